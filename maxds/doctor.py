"""The command: python -m maxds.doctor [CONFIG.yaml] [key=value ...]

Looks at what a run needs before it is started, and tells it on one screen: the versions installed, the devices, and
with a config whether mesh, model, batch and memory fit them, whether the device's kernels compute what the host's CPU
does, whether the run's folder, that of local checkpoints and the compile cache can be written, and whether the data can
be read. Of several processes, started as those of a run, the first prints; each says what it finds at fault, and their
clocks are compared. It compiles nothing but these kernels, and leaves nothing but the folders.

exit code 0   nothing is at fault                   2   something is: each in a line, with its remedy
          1   a defect of maxds or the machine
"""

import dataclasses
import importlib.metadata
import logging
import pathlib
import platform
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator

import jax
import numpy as np
import psutil
from etils import epath
from jax.experimental import multihost_utils

import maxds
from maxds import checkpoint, command, describe, loader, optimizer, shards, trial
from maxds import data as data_lib
from maxds import mesh as mesh_lib
from maxds import step as step_lib
from maxds.aot import topology
from maxds.config import Config
from maxds.config import Mesh as MeshConfig
from maxds.model import deepseek, sparsecores

PACKAGES = "jax jaxlib libtpu flax optax orbax-checkpoint grain tokamax qwix numpy".split()
MAX_SKEW = 5.0  # seconds: beyond, logs of hosts tell no order, and tokens for buckets may be refused

MAX_DIFFERENCE = 0.02  # of a kernel's results in bfloat16, whose roundings alone make half a percent

GIB = 2**30


class DoctorError(ValueError):
    """Something is at fault; the message has the remedy."""


class Remark(Exception):
    """Something is worth knowing, and no fault."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of the report."""

    name: str
    verdict: str  # ok, note, FAULT
    text: str


def main(args: list[str]) -> int:
    """Runs the command; returns its exit code."""
    try:
        config = loader.load(Config, args[1], args[2:])[0] if len(args) > 1 else None
    except loader.ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # which prints the traceback of what is told in a line here
    faults, process = 0, 0
    for finding in examine(config):
        faults += finding.verdict == "FAULT"
        if finding.name == "devices" and not faults:
            process = jax.process_index()  # before, JAX does not know
        if process == 0:
            print(f"{finding.verdict:<5}  {finding.name:<9}  {finding.text}", flush=True)
        elif finding.verdict == "FAULT":
            print(f"FAULT  {finding.name:<9}  in process {process}: {finding.text}", flush=True)
    return 2 if faults else 0


def examine(config: Config | None) -> Iterator[Finding]:
    """Every check, as it is done. Without devices, the rest is left out."""
    devices = look("devices", lambda: find_devices(config))
    yield devices
    yield look("versions", versions)
    if devices.verdict == "FAULT":
        return
    checks: dict[str, Callable[[], str]] = {}
    if config is not None:
        checks = {
            "mesh": lambda: fit(config),
            "memory": lambda: memory(config),
            "kernels": lambda: hold(config),
            "run_dir": lambda: probe(config.run_dir),
            **({"local": lambda: local(config)} if config.checkpoint.local_dir else {}),
            "cache": lambda: cache(config),
            "data": lambda: "; ".join(data_lib.reach(config.data, config.model.vocab_size)),
        }
    faults = 0
    for name, check in checks.items():
        finding = look(name, check)
        faults += finding.verdict == "FAULT"
        yield finding
    if jax.process_count() > 1:
        yield look("processes", lambda: compare(faults))


def look(name: str, check: Callable[[], str]) -> Finding:
    """What a check returns, or the mistake that it raises."""
    try:
        return Finding(name, "ok", check())
    except Remark as remark:
        return Finding(name, "note", str(remark))
    except (DoctorError, mesh_lib.MeshError, optimizer.PatternError, data_lib.DataError) as error:
        return Finding(name, "FAULT", str(error))


# ------------------------------------------------------------------------------------------------ checks


def find_devices(config: Config | None) -> str:
    """The devices of all processes, which find each other first."""
    try:
        mesh_lib.initialize(config.mesh if config else MeshConfig())
        devices = jax.devices()
    except (RuntimeError, ValueError) as error:  # of JAX's backends and of its way to find the others
        reason = str(error).strip().splitlines()[0]
        raise DoctorError(
            f"no devices: {reason}; if another process of this host holds the TPU, end it; if other hosts are not "
            "found, start the command on all of them"
        ) from error
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    return f"{len(devices)} of {kinds}; slices: {slices}; processes: {jax.process_count()}"


def versions() -> str:
    """What is installed, and whether it is what is tested."""
    found = {name: version for name in PACKAGES if (version := _version(name))}
    about = f"maxds {maxds.__version__}, Python {platform.python_version()}, jax {found['jax']}"
    python = f"{sys.version_info.major}{sys.version_info.minor}"
    locked = pathlib.Path(__file__).parents[1] / f"constraints/py{python}.txt"
    if not locked.exists():  # installed without its sources
        return about
    tested = dict(line.split("==") for line in locked.read_text().split())
    if other := [f"{name} {version}, not {tested[name]}" for name, version in found.items() if tested[name] != version]:
        raise Remark(f"{about}; not those tested: {'; '.join(other)}: pip install -c constraints/{locked.name}")
    return f"{about}, all as tested"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def fit(config: Config) -> str:
    """The mesh, after model and batch were held against it."""
    mesh = mesh_lib.make(config.mesh)
    step_lib.check(deepseek.Network(config), dict(mesh.shape))
    return " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def memory(config: Config) -> str:
    """What a device holds for a whole step, of what it has."""
    try:
        axes = mesh_lib.sizes(config.mesh, jax.device_count())
    except mesh_lib.MeshError:
        raise Remark("not known, for the mesh does not fit") from None
    needed = sum(describe.held(config, axes).values())
    device = jax.local_devices()[0]
    if device.platform == "cpu":  # these share the host's
        room, what = psutil.virtual_memory().total / jax.local_device_count(), "of this host's memory"
    else:
        chip = topology.CHIPS.get(device.device_kind)
        room, what = (
            (device.memory_stats() or {}).get("bytes_limit") or (chip.hbm_bytes if chip else 0),
            "of its memory",
        )
    figures = f"{needed / GIB:,.2f} GiB of a device for weights, optimizer and gradients, {room / GIB:,.2f} {what}"
    if room and needed > room:
        raise DoctorError(
            f"{figures}: more devices, optimizer.state_dtype=bfloat16, or what python -m maxds.compile … --fix finds"
        )
    return f"{figures}; activations come on top"


def hold(config: Config) -> str:
    """The kernels of a device, held against the CPU of its host."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        raise Remark("not tried: the devices are the CPU that they would be held against")
    try:
        host = jax.local_devices(backend="cpu")[0]
        found = trial.differences(config.model, config.precision.float8, device, host)
    except (RuntimeError, sparsecores.KernelError) as error:  # of JAX's backends and compilers
        reason = str(error).strip().splitlines()[0]
        raise DoctorError(
            f"kernels cannot be tried: {reason}; install the versions tested, with JAX_PLATFORMS unset"
        ) from error
    figures = ", ".join(f"{name} {difference:.2%}" for name, difference in found.items())
    if not all(difference <= MAX_DIFFERENCE for difference in found.values()):
        raise DoctorError(
            f"on {device.device_kind} kernels compute something else than on CPU: {figures}, of which rounding makes "
            f"{MAX_DIFFERENCE:.0%} at most: do not train with them; install the tested versions, and report it"
        )
    return f"off the CPU's results by {figures}"


def probe(folder: str) -> str:
    """Makes a folder, or gs://…, where there is none, writes a file into it, reads it again and deletes it."""
    path, start = epath.Path(folder).expanduser(), time.monotonic()
    file, content = path / f"{uuid.uuid4().hex}.partial", uuid.uuid4().bytes
    try:
        path.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        read = file.read_bytes()
        file.unlink()
    except Exception as error:  # whatever the library of a bucket raises
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
        raise DoctorError(
            f"{folder} cannot be written and read ({reason}): set another, or give this user the right, which for a "
            "bucket is roles/storage.objectUser"
        ) from error
    if read != content:
        raise DoctorError(f"{folder} does not return what was written to it: set another")
    if folder.startswith("gs://"):
        _look_up(path)
    return f"{folder}: written, read and deleted in {time.monotonic() - start:.2f} s"


def _look_up(path: epath.Path) -> None:
    """Does what Orbax does to a bucket when it deletes a checkpoint."""
    from google.cloud import storage  # takes a second, and only buckets need it

    bucket = path.parts[2]
    try:
        storage.Client().get_bucket(bucket)
    except Exception as error:
        raise DoctorError(
            f"{path}: the bucket cannot be looked up ({checkpoint.reason(error)}), and then no checkpoint can be "
            f"deleted: give this user storage.buckets.get, as roles/storage.legacyBucketReader of {bucket} has it"
        ) from error


def local(config: Config) -> str:
    """The folder of local checkpoints, and its room for two of this process's."""
    folder = pathlib.Path(config.checkpoint.local_dir or "").expanduser()
    written = probe(str(folder))
    try:
        size = shards.size(step_lib.make(config, mesh_lib.make(config.mesh)).abstract_state)
    except mesh_lib.MeshError:
        raise Remark(f"{written}; how much it needs is not known, for the mesh does not fit") from None
    room = shutil.disk_usage(folder).total
    figures = f"twice {size / GIB:,.2f} GiB of {room / GIB:,.2f}"
    if 2 * size > room:
        raise DoctorError(f"{folder} is too small: it needs {figures}; make it larger, or set another")
    return f"{written}; needs {figures}"


def cache(config: Config) -> str:
    """Where compiled programs are kept: without, a run is slower to start, and starts."""
    folder = config.compile_cache_dir
    if folder is None:
        raise Remark("none, every start compiles: compile_cache=null")
    try:
        return probe(folder)
    except DoctorError as error:
        raise Remark(f"none, every start compiles: {error}") from error


def compare(faults: int) -> str:
    """Whether another process has found faults, and how far the clocks are apart."""
    multihost_utils.sync_global_devices("maxds.doctor")  # all leave it at about the same moment
    seconds, rest = divmod(time.time_ns(), 10**9)
    every = multihost_utils.process_allgather(np.array([faults, seconds // 2**16, seconds % 2**16, rest], np.int32))
    faulty = [str(i) for i, row in enumerate(every) if row[0] and i != jax.process_index()]
    clocks = [int(high) * 2**16 + int(low) + int(nanos) / 1e9 for _, high, low, nanos in every]
    skew = max(clocks) - min(clocks)
    if skew > MAX_SKEW:
        last = clocks.index(max(clocks))
        raise DoctorError(
            f"clocks are {skew:.1f} s apart, that of process {last} ahead: let chrony or the like set them"
        )
    if faulty:
        raise DoctorError(f"at fault in processes {', '.join(faulty)}, each of which has said why")
    return f"{len(every)}, clocks within {skew:.2f} s"


if __name__ == "__main__":
    command.run(main)

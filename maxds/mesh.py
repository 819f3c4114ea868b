"""The device mesh: its axes, its sizes, and the processes that share it.

    data     replicas of the weights; across slices this axis runs over DCN
    fsdp     every weight, gradient and optimizer state is split over it
    expert   routed experts are split over it: tokens travel to them

The batch is split over all three: its sequences, or with `mesh.context_parallel` those over `data` and `fsdp`, and each
of them over `expert`.
"""

import ctypes
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxds.config import Mesh as MeshConfig

AXES = ("data", "fsdp", "expert")
BATCH = PartitionSpec(AXES)
SPLIT_BATCH = PartitionSpec(("data", "fsdp"), "expert")  # `mesh.context_parallel`

# Compiler options of a train step, by the kind of its devices. Collectives run on the SparseCores, beside the compute;
# and copies do not, for they would wait there for gathers. Several gathers may be under way there: else each is waited
# for before the next begins. Fusions may use 64 MiB of VMEM. The compiler sends things as late as it can: so on TPU7x
# it is told that scatters take longer than it thinks, and on v6e, where little is computed beside them, gathers, too.
_ALL = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
    "xla_tpu_enable_offloading_copy_to_sparsecore": "false",
    "xla_tpu_scoped_vmem_limit_kib": "65536",
}
_QUEUED = {
    "xla_tpu_enable_sparse_core_offload_queuing_in_lhs": "true",
    "xla_tpu_sparse_core_offload_queuing_overlap_limit": "8",
    "xla_tpu_sparse_core_gather_overlap_limit": "8",  # one for each expert of a token
}
_SLOW = {
    "xla_tpu_sparse_core_all_gather_latency_multiplier": "3",
    "xla_tpu_sparse_core_reduce_scatter_latency_multiplier": "3",
}
_COMPILER_OPTIONS = {
    "TPU v5": _ALL | _QUEUED,
    "TPU v6 lite": _ALL | _QUEUED | _SLOW,
    "TPU7x": _ALL
    | {
        "xla_tpu_sparse_core_gather_overlap_limit": "4",
        "xla_tpu_sparse_core_reduce_scatter_latency_multiplier": "2",
    },
}
# `batch_split` moves host transfers to another layer itself: the compiler would make every layer's program twice. Those
# of `plain` begin early, for the compiler is told that they are slow.
_BY_SCHEDULE = {
    "batch_split": {"xla_tpu_pipeline_memory_host_transfers": "false"},
    "plain": {"xla_tpu_pcie_bandwidth_multiplier": "0.002"},
}

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # what glibc's malloc.h calls M_...


class MeshError(ValueError):
    """The mesh asked for does not fit the devices, or the model does not fit the mesh."""


def initialize(config: MeshConfig) -> None:
    """Prepares JAX's devices. Call it once, before anything touches a device.

    With `mesh.cpu_devices` each process has that many virtual CPU devices. Where the environment
    says that this is one of several processes (GKE and XPK, Slurm, or JAX_COORDINATOR_ADDRESS with
    JAX_NUM_PROCESSES and JAX_PROCESS_ID), they find each other first.
    """
    if config.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    if _is_one_of_several(os.environ):
        said = [os.environ.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")]
        count, index = (None if number is None else int(number) for number in said)  # None: JAX finds out
        jax.distributed.initialize(num_processes=count, process_id=index)


def of_all_processes(values: Any) -> np.ndarray:
    """uint32 [processes, …]: the values of each. All processes call it together, with as many."""
    own = np.asarray(values, np.uint32)
    return own[None] if jax.process_count() == 1 else multihost_utils.process_allgather(own)


def keep_freed_memory(config: MeshConfig) -> None:
    """Lets CPU devices reuse what a step frees, instead of mapping it and faulting in every page again on the next.

    It takes MALLOC_ARENA_MAX=1 in the environment, as `scripts/train` sets it: a thread with a heap of its own would
    still map. Call it once the state is made: freed memory is not given back to the system any more.
    """
    libc = ctypes.CDLL(None)
    if config.cpu_devices is not None and hasattr(libc, "mallopt"):  # which is glibc's
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)


def use_compile_cache(folder: str | None, warn: Callable[[str], None]) -> str | None:
    """Keeps compiled programs in `folder` (or gs://…) for later processes.

    Returns:
      The folder that is used; None where it is to be nowhere, or where nothing can be written to `folder`.
    """
    if folder is None:
        return None
    path = epath.Path(folder).expanduser()
    probe = path / f"{uuid.uuid4().hex}.partial"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except Exception as error:  # whatever the library of a bucket raises: it is no reason not to train
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        warn(f"warning: compile_cache={folder} cannot be written ({reason}) and is not used: every start compiles")
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return str(path)


def _is_one_of_several(environment: Mapping[str, str]) -> bool:
    return (
        "JAX_COORDINATOR_ADDRESS" in environment
        or "MEGASCALE_COORDINATOR_ADDRESS" in environment
        or "," in environment.get("TPU_WORKER_HOSTNAMES", "")
        or int(environment.get("SLURM_NTASKS", "1")) > 1
    )


def sizes(config: MeshConfig, num_devices: int, slices: int = 1) -> dict[str, int]:
    """Devices along each axis; an axis of -1 takes what the others leave.

    Raises:
      MeshError: the axes do not multiply to `num_devices`, or `data` does not cross the `slices` evenly.
    """
    asked = {axis: getattr(config, axis) for axis in AXES}
    fixed = math.prod(n for n in asked.values() if n != -1)
    free = next((axis for axis, n in asked.items() if n == -1), None)
    found = asked if free is None else asked | {free: num_devices // fixed}
    if math.prod(found.values()) != num_devices:
        product = " x ".join(f"mesh.{axis}={n}" for axis, n in asked.items())
        grown = math.gcd(fixed, num_devices)
        advice = (
            f"set mesh.fsdp=-1 and let the other axes divide {num_devices}"
            if free is None
            else f"the fixed axes multiply to {fixed}; choose them so that they divide {num_devices}: try {grown}"
        )
        raise MeshError(f"{product} does not fit the {num_devices} devices present: {advice}")
    if found["data"] % slices:
        raise MeshError(
            f"mesh.data={found['data']} is not divisible by the {slices} slices present: "
            f"`data` is the axis that crosses slices, so set it to a multiple of {slices}"
        )
    return found


def make(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over `devices` (all, by default): ICI inside a slice, `data` across slices over DCN.

    Raises:
      MeshError: the sizes do not fit the devices or the slices.
    """
    devices = jax.devices() if devices is None else devices
    slices = len({getattr(d, "slice_index", 0) for d in devices})
    shape = tuple(sizes(config, len(devices), slices).values())
    inside = (shape[0] // slices, *shape[1:])
    try:
        if slices > 1:
            grid = mesh_utils.create_hybrid_device_mesh(inside, (slices, 1, 1), devices=devices)
        elif devices[0].platform == "tpu":
            grid = mesh_utils.create_device_mesh(shape, devices=devices)
        else:
            grid = np.array(devices).reshape(shape)
    except NotImplementedError:  # by mesh_utils: an axis would take a part of a dimension
        axes = " x ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, inside, strict=True) if size > 1)
        torus = " x ".join(str(len(set(along))) for along in zip(*(d.coords for d in devices), strict=True))
        cores = len({d.core_on_chip for d in devices})
        torus = f"{torus} chips" if cores == 1 else f"{torus} chips x {cores} devices"
        raise MeshError(
            f"{axes} cannot be laid over the torus of a slice, {torus}: an axis takes whole dimensions, so make "
            "each the product of some of these"
        ) from None
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def rings(mesh: Mesh, axis: str) -> tuple[int, ...]:
    """How an axis is to be gathered over: of how many devices each ring is, the innermost last.

    v5p's SparseCores gather along one dimension of the torus only: over more at once, nothing is computed meanwhile.
    """
    along = np.moveaxis(mesh.devices, AXES.index(axis), 0).reshape(mesh.shape[axis], -1)[:, 0]
    if along[0].device_kind != "TPU v5":
        return (len(along),)
    places = np.array([device.coords for device in along]).T
    steps = [(int(np.argmax(line != line[0])), len(np.unique(line))) for line in places if np.ptp(line)]
    found = tuple(size for _, size in sorted(steps, reverse=True))
    return found if math.prod(found) == len(along) else (len(along),)


def compiler_options(device_kind: str, schedule: str, changes: Sequence[str] = ()) -> dict[str, str | bool]:
    """Options that a train step is compiled with, here and ahead of time.

    Args:
      device_kind: of the devices it is compiled for.
      schedule: `schedule.kind`.
      changes: to the defaults of these two: `name=value` sets an option, `name=` leaves it to the compiler.
    """
    by_schedule = _BY_SCHEDULE[schedule] if device_kind.startswith("TPU") else {}
    options = _COMPILER_OPTIONS.get(device_kind, {}) | by_schedule | dict(c.split("=", 1) for c in changes)
    truths = {"true": True, "false": False}  # CPU's compiler takes no words for them
    return {name: truths.get(value, value) for name, value in options.items() if value}


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def share(sharding: NamedSharding, rows: int) -> tuple[int, int]:
    """Which share of the rows of an array this process needs, and of how many.

    Args:
      sharding: of the array, [rows columns]; processes that need the same rows, for other columns, have one share.
      rows: a multiple of the parts that they are split into.

    Raises:
      MeshError: processes need some of the same rows, and not all.
    """
    needed: dict[int, set[int]] = {}
    for device, (part, _) in sharding.devices_indices_map((rows, sharding.mesh.shape["expert"])).items():
        needed.setdefault(device.process_index, set()).add(part.start or 0)
    shares = list(dict.fromkeys(frozenset(needed[process]) for process in sorted(needed)))
    if sum(map(len, shares)) != len(frozenset.union(*shares)) or len(set(map(len, shares))) > 1:
        raise MeshError(
            f"mesh.context_parallel=true: mesh.expert={sharding.mesh.shape['expert']} crosses processes unevenly, so "
            "that some need parts of the same sequences; choose another mesh.expert"
        )
    return shares.index(frozenset(needed[jax.process_index()])), len(shares)


def check_rows(devices: int, rows: int, *, per_device: int, what: str, group: int = 1) -> None:
    """Raises MeshError unless `rows` gives every device, or each group that shares rows, a multiple of `per_device`."""
    unit = devices // group * per_device
    if rows % unit:
        who = f"{devices} devices" if group == 1 else f"{devices // group} groups of {group} devices"
        raise MeshError(
            f"{what}={rows} does not give each of the {who} a multiple of {per_device} sequences; "
            f"try {max(unit, rows // unit * unit)} or {(rows // unit + 1) * unit}"
        )

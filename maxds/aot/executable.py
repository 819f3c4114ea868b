"""A train step that was compiled elsewhere: written to a file, and taken from there instead of being compiled.

    b"maxds executable 1\\n", a line of JSON that says what it is for, then zlib(what XLA makes of an executable)

There is no pickle in it: whoever loads it traces and lowers the step anyway, and so has everything but the compiler's
result. That is machine code all the same, so load only what you would run.

JAX's own compile cache cannot take this place: its key has the version of the backend in it, which is another string
for a topology (`TFRT TPU7x`) than for devices (`PJRT C API`, then the same).
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath
from jax._src import cache_key, compiler

from maxds import loader
from maxds.step import Stepper

_MAGIC = b"maxds executable 1\n"
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # variables that change what the compiler does
_OF_HOSTS = "--xla_tpu_use_enhanced_launch_barrier=true"  # which JAX adds to them where there are TPUs
_SHAPING = ("steps:", "model.", "data.", "optimizer.", "loss.", "mesh.", "schedule.", "precision.")  # of the config


class ExecutableError(ValueError):
    """A file is not the executable of this run's train step."""


def write(path: str, stepper: Stepper, compiled: jax.stages.Compiled) -> int:
    """Writes what `stepper.compile()` returned to `path` (or gs://…), whole or not at all; returns the file's bytes.

    Raises:
      ExecutableError: the file cannot be written.
    """
    code = zlib.compress(compiled.runtime_executable().serialize(), 1)  # pyright: ignore
    head = {"sha256": hashlib.sha256(code).hexdigest(), "for": _about(stepper)}
    content = _MAGIC + json.dumps(head).encode() + b"\n" + code
    try:
        target = epath.Path(path).expanduser()
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.parent / f"{target.name}.partial"
        partial.write_bytes(content)
        partial.replace(target)
    except OSError as error:
        raise ExecutableError(f"--aot={path} cannot be written: {error.strerror or error}") from None
    return len(content)


def load(path: str, stepper: Stepper) -> jax.stages.Compiled:
    """`stepper.compile()`, with what the file holds in place of the compiler's work.

    Raises:
      ExecutableError: the file cannot be read, is not whole, or is not for this program on these devices.
    """
    about, code = _read(path)
    if wrong := _differences(about, _about(stepper)):
        raise ExecutableError(
            f"--aot={path} was compiled for something else: {'; '.join(wrong)} (there -> here). Compile it again with "
            f"this config and these versions (python -m maxds.compile … --aot={path}), or train without --aot"
        )
    try:
        with _instead_of_compiling(zlib.decompress(code)):
            return stepper.compile()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ExecutableError(f"--aot={path} cannot be loaded ({reason}); train without --aot") from None


def _read(path: str) -> tuple[dict[str, Any], bytes]:
    """What a file is for, and its code.

    Raises:
      ExecutableError: it cannot be read, or is not whole.
    """
    try:
        content = epath.Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ExecutableError(f"--aot={path} cannot be read: {error.strerror or error}") from None
    head, _, code = content.removeprefix(_MAGIC).partition(b"\n")
    if not content.startswith(_MAGIC):
        raise ExecutableError(
            f"--aot={path} is not an executable of maxds, of this version: python -m maxds.compile … --aot={path} "
            "makes one"
        )
    with contextlib.suppress(ValueError):
        about = json.loads(head)
        if about["sha256"] == hashlib.sha256(code).hexdigest():
            return about["for"], code
    raise ExecutableError(f"--aot={path} is damaged or not whole, at {len(content):,} bytes; copy or compile it again")


def _about(stepper: Stepper) -> dict[str, Any]:
    """What an executable of this step is for: it must be the same where it is compiled and where it runs."""
    devices = stepper.mesh.devices.flat
    compilers = ("jax", "jaxlib", *(["libtpu"] if devices[0].platform == "tpu" else []))
    return {
        "versions": {name: importlib.metadata.version(name) for name in compilers},
        "device_kind": stepper.device_kind,
        "mesh": dict(stepper.mesh.shape),
        "compiler_options": stepper.compiler_options,
        "environment": {name: _flags(os.environ.get(name, "")) for name in _FLAGS},
        "device_order": hashlib.sha256(json.dumps([_place(d) for d in devices]).encode()).hexdigest()[:12],
        "program": _program(stepper.lower()),
        "config": loader.plain(stepper.config),
    }


def _flags(given: str) -> list[str]:
    return [flag for flag in given.split() if flag != _OF_HOSTS]


def _place(device: Any) -> list[int | None]:
    """Where in its slice and in which slice a device is: what a route depends on."""
    coordinates = getattr(device, "coords", [device.id])
    return [getattr(device, "slice_index", None) or 0, *coordinates, getattr(device, "core_on_chip", None)]


def _program(lowered: jax.stages.Lowered) -> str:
    """A hash of a program without its source lines, as JAX's compile cache takes it."""
    found = hashlib.sha256()
    cache_key._hash_computation(found, lowered.compiler_ir("stablehlo"), False)  # pyright: ignore
    return found.hexdigest()[:12]


def _differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """What keeps an executable from being that of the step here; of the config, only what explains another program."""
    config = loader.diff(there.pop("config"), here.pop("config"))
    wrong = loader.diff(there, here)
    return wrong + [line for line in config if line.startswith(_SHAPING)] if wrong else []


@contextlib.contextmanager
def _instead_of_compiling(code: bytes) -> Iterator[None]:
    """Whatever JAX compiles inside the block becomes this executable."""

    def deserialize(backend, _module, _devices, options, _callbacks, devices, _profiler=None):
        return backend.deserialize_executable(code, devices, options)

    compiling = compiler.compile_or_get_cached
    compiler.compile_or_get_cached = deserialize
    try:
        yield
    finally:
        compiler.compile_or_get_cached = compiling

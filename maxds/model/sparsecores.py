"""The sum of routed rows, tokamax's: on SparseCores it runs beside the multiplications of the other microbatch."""

import functools
import warnings
from importlib import metadata

import jax
import jax.numpy as jnp
from jax import Array


class KernelError(RuntimeError):
    """A kernel does not run with the libraries installed."""


@functools.cache
def _summing():
    """The operation and its kernel, imported where used: tokamax takes seconds, and has them on Python 3.12 only."""
    try:
        from tokamax._src.ops.ragged_gather_reduce import pallas_mosaic_tpu as operation  # pyright: ignore
        from tokamax._src.ops.ragged_gather_reduce import pallas_mosaic_tpu_kernel as kernel  # pyright: ignore
    except ImportError as error:
        raise KernelError(
            f"training on TPU7x needs the tokamax of Python 3.12 (0.0.17), not {metadata.version('tokamax')}: "
            f"run on Python 3.12 with constraints/py312.txt"
        ) from error
    warnings.filterwarnings("ignore", message="Destination semaphore is ignored")  # about its own code
    return operation, kernel


def can_sum_rows(shape: tuple[int, ...], choices: int) -> bool:
    """Whether `sum_rows` takes rows of this shape [R D], `choices` of which belong to a token."""
    _, kernel = _summing()
    return kernel.get_unsupported_reason(*shape, jnp.bfloat16, choices) is None


def sum_rows(rows: Array, slots: Array, here: Array, weights: Array) -> Array:
    """Sums, in float32, the rows [R D] bfloat16 that `slots` [A K] names, where they are `here` [A K] -> [A D].

    They count for `weights` [A K] float32.
    """
    operation, _ = _summing()
    run = operation.PallasTpuRaggedGatherReduce(
        operation.Config(), bypass_device_check=True
    )  # to compile ahead of time
    with jax.numpy_dtype_promotion("standard"):  # of few rows, which it sums in another way
        flat = (a.reshape(-1) for a in (slots, weights, here))
        return run(rows, *flat, reduce_group_size=slots.shape[1])

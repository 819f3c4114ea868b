"""Kernels for TPU, from the libraries that keep them.

Splash attention is the one in JAX itself, whose gradients of queries and keys are two kernels. tokamax's makes both in
one, for 5/7 of the multiplications, but leaves sums over blocks that the compiler takes (by its estimate) longer for.
The backward kernels are called apart, so that kept values stand in for the forward one.

The sum of routed rows is tokamax's: on SparseCores it runs beside the multiplications of the other microbatch.
"""

import functools
import warnings
from importlib import metadata

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    SegmentIds,
    make_splash_mha_single_device,
    splash_attention_kernel,
    splash_attention_mask,
)

MOST_ROWS = 1024  # of queries and of keys that are in VMEM at a time


class KernelError(RuntimeError):
    """A kernel does not run with the libraries installed."""


def attend(q: Array, k: Array, v: Array, segments: Array, scored: bool) -> tuple[Array, Array, Array | None]:
    """As `kernels.attention` without kept values: output, log-sum-exp, and if `scored` each query's largest score."""
    if scored:
        return jax.vmap(attend_row_scored)(q, k, v, segments)
    return *jax.vmap(attend_row)(q, k, v, segments), None


def attend_backward(
    q: Array, k: Array, v: Array, segments: Array, kept: tuple[Array, Array], dout: Array
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v, given what `attend` returned and the gradient of the output."""
    return jax.vmap(attend_row_backward)(q, k, v, segments, kept, dout)


def attend_row(q: Array, k: Array, v: Array, segments: Array, *, interpret: bool = False) -> tuple[Array, Array]:
    """As `attend`, of one row: [N S H], ..., [S] -> [N S Hv], [N S]."""
    out, (lse,) = _splash(q.shape[0], q.shape[1], interpret)(q, k, v, SegmentIds(segments, segments))
    return out, lse


def attend_row_scored(
    q: Array, k: Array, v: Array, segments: Array, *, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """As `attend_row`, and the largest score of each query [N S]: by tokamax's kernel, which tells it."""
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as kernel  # takes seconds
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as mask

    length = q.shape[1]
    block = _block(length)
    config = kernel.SplashConfig(block, block, block, use_base2_exp=False, interpret=interpret)
    causal = mask.CausalMask((length, length))
    attend = kernel.make_splash_mha_single_device(causal, config=config, save_residuals=True)
    out, stats = attend(q, k, v, kernel.SegmentIds(segments, segments))
    return out, stats["logsumexp"], stats["max_logits"]


def attend_row_backward(
    q: Array, k: Array, v: Array, segments: Array, kept: tuple[Array, Array], dout: Array, *, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """As `attend_backward`, of one row."""
    splash = _splash(q.shape[0], q.shape[1], interpret)
    masks = splash.dq_mask_info, splash.dkv_mask_info
    residuals = q, k, v, SegmentIds(segments, segments), None, *kept, *masks
    found = splash_attention_kernel._splash_attention_bwd(**splash.kwargs, res=residuals, do=dout)
    return found[3:6]


def _splash(heads: int, length: int, interpret: bool):
    block = _block(length)
    return make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask([CausalMask((length, length))] * heads),
        block_sizes=BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        save_residuals=True,
        interpret=interpret,
    )


def _block(length: int) -> int:
    """How many queries, and keys, of a sequence are in VMEM at a time."""
    return max(size for size in (128, 256, 512, MOST_ROWS) if length % size == 0)


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


def sum_rows(rows: Array, slots: Array, here: Array) -> Array:
    """Sums, in float32, the rows [R D] bfloat16 that `slots` [A K] names, where they are `here` [A K] -> [A D]."""
    operation, _ = _summing()
    run = operation.PallasTpuRaggedGatherReduce(
        operation.Config(), bypass_device_check=True
    )  # to compile ahead of time
    with jax.numpy_dtype_promotion("standard"):  # of few rows, which it sums in another way
        weights = jnp.ones(slots.size, jnp.float32)
        return run(rows, slots.reshape(-1), weights, here.reshape(-1), reduce_group_size=slots.shape[1])

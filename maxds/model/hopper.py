"""Attention and grouped matmul on GPUs of NVIDIA's Hopper generation: kernels of tokamax and of JAX.

They are imported where used, for that takes seconds. Their blocks were chosen on an H200 (lab log, 2026-11-26).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

KINDS = ("NVIDIA H100", "NVIDIA H200", "NVIDIA H800", "NVIDIA GH200")  # as names of devices begin
TILE = 128  # queries that a kernel takes at a time, and rows and columns of a product
BLOCKS: dict[str, Any] = {"block_m": TILE, "block_n": TILE, "block_k": 64, "max_concurrent_steps": 5, "grid_block_n": 8}


def can_attend(q: Array, v: Array) -> bool:
    """Whether queries [B N S H] and values [B N S Hv] are for `attend` and its backward pass.

    Of wider heads than DeepSeek's, two blocks of keys and values would not fit into a multiprocessor's shared memory.
    """
    return q.dtype == jnp.bfloat16 and q.shape[2] % TILE == 0 and q.shape[3] <= 192 and v.shape[3] <= 128


def attend(q: Array, k: Array, v: Array, segments: Array) -> tuple[Array, Array, Array]:
    """Causal attention within documents.

    Args:
      q: [B N S H] bfloat16, already multiplied by the softmax scale, and rotated.
      k: [B N S H].
      v: [B N S Hv].
      segments: [B S] int32, of documents, whose tokens lie side by side.

    Returns:
      The output [B N S Hv]; of each query the log-sum-exp of its scores, and the largest of them, [B N S] float32.
    """
    from tokamax._src.ops.attention import pallas_mosaic_gpu_kernel_sm90 as sm90  # pyright: ignore

    run = functools.partial(
        sm90.flash_attention_kernel,
        bias=None,
        mask=None,
        k_end=None,
        is_causal=True,
        logits_soft_cap=None,
        logits_scale=1.0,
        out_dtype=q.dtype,
        normalize_output=True,
        return_residuals=True,
        use_stable_softmax=True,
        rescale_threshold=1.0,
        config=sm90.Config(block_q=64, block_kv=128, num_stages=2),
    )
    q, k, v = map(_turned, (q, k, v))
    with jax.numpy_dtype_promotion("standard"):
        of_rows: Any = jax.vmap(lambda q, k, v, first: run(q, k, v, k_start=first))
        out, (top, total) = of_rows(q, k, v, _first_keys(segments))
    return _turned(out), top + jnp.log(total), top


def attend_backward(
    q: Array, k: Array, v: Array, segments: Array, kept: tuple[Array, Array], dout: Array
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v, from the output and log-sum-exp that `attend` found, and the output's gradient."""
    from tokamax._src.ops.attention import pallas_mosaic_gpu_vjp_kernel_sm90 as sm90  # pyright: ignore

    kept_out, lse = kept
    q, k, v, out, dout = map(_turned, (q, k, v, kept_out, dout))
    run = functools.partial(
        sm90.flash_attention_vjp_kernel,
        bias=None,
        mask=None,
        k_end=None,
        logits_scale=1.0,
        logits_soft_cap=None,
        is_causal=True,
        ds_dtype=None,
        config=sm90.Config(block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64),
    )

    def of_row(q, k, v, out, dout, lse, first):
        dq, dk, dv, _ = run(q, k, v, (lse, jnp.ones_like(lse)), out, dout, k_start=first)  # largest score, and sum
        return dq, dk, dv

    with jax.numpy_dtype_promotion("standard"):
        found = jax.vmap(of_row)(q, k, v, out, dout, lse, _first_keys(segments))
    dq, dk, dv = map(_turned, found)
    return dq, dk, dv


def _turned(x: Array) -> Array:
    """[B N S H] -> [B S N H], as these kernels have it, and back."""
    return x.swapaxes(1, 2)


def _first_keys(segments: Array) -> Array:
    """[B 1 S] int32: the first token of each query's document."""
    changed = segments[:, 1:] != segments[:, :-1]
    begins = jnp.pad(changed, ((0, 0), (1, 0))) * jnp.arange(segments.shape[1])
    return lax.cummax(begins, axis=1)[:, None].astype(jnp.int32)


def can_multiply(dtype: jnp.dtype, *sides: int) -> bool:
    """Whether matrices of a dtype and with these sides are for `multiply` and `multiply_transposed`."""
    return dtype == jnp.bfloat16 and all(side % TILE == 0 for side in sides)


def multiply(x: Array, w: Array, sizes: Array, *, transposed: bool = False) -> Array:
    """Multiplies rows, sorted by group, by the matrix of their group.

    Args:
      x: [R I] bfloat16.
      w: [G I O], or if `transposed` [G O I].
      sizes: [G] int32: how many rows each group has. Rows past their sum give zero.

    Returns:
      [R O].
    """
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu  # pyright: ignore

    y = ragged_dot_mgpu.ragged_dot(x, w, group_sizes=sizes, **BLOCKS, transpose_rhs=transposed)
    return jnp.where(jnp.arange(len(y))[:, None] < jnp.sum(sizes), y, 0)  # of the others nothing is written


def multiply_transposed(x: Array, dy: Array, sizes: Array) -> Array:
    """[R I], [R O] bfloat16 -> [G I O]: the sum of the outer products of each group's rows."""
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu  # pyright: ignore

    return transposed_ragged_dot_mgpu.transposed_ragged_dot(x, dy, group_sizes=sizes, **BLOCKS)

"""Kernels of our own for TPU: tiles of queries by keys, whose scores never leave VMEM; and experts' rows (`groups`,
`gates`, `home`).

Tokens lie along the lanes, in arrays [heads size tokens] and in tiles [keys queries]: so heads of 192 are not padded to
256, and what belongs to a query is spread over a tile without moving between lanes. Several heads share a step, and the
mask of its tile.

Functions of `causal` take and give whole batches, [B heads tokens size], for which tiles are multiplied depends on the
row; others of attention one row, [heads tokens size], and `jax.vmap` makes a batch of it.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
MOST = 512  # of queries, and of keys, in a tile
HEADS = 8  # that share a step, at most
VMEM, WAITING = 60 * 2**20, 32 * 2**20  # bytes that a kernel may use, and of these gradients that wait to be whole
LOWEST = -1e30  # stands for minus infinity, of which a difference would not be a number
KEYS = 0  # dimension of a tile; queries are 1


@flax.struct.dataclass
class Turn:
    """What makes V4's queries ready (`ops.ready`): their norm, and the angles of their last R dimensions."""

    cos: Array  # [S R] float32
    sin: Array  # [S R]
    eps: float = flax.struct.field(pytree_node=False)


def call(kernel: Callable, ahead: Any, given: list, found: list, held: list, **how: Any) -> tuple:
    """Runs kernel(ahead, given, found, held) in each step of a grid.

    Args:
      kernel: gets references.
      ahead: what is read ahead of steps; also by what says which block of an array is in VMEM.
      given: arrays, each with its blocks.
      found: shapes of results, each with its blocks.
      held: what stays in VMEM from step to step, as `room`.
      **how: `grid`, its extents; `apart`, those of its dimensions, if any, whose steps know nothing of each other, so
        that a device with two cores (v5p) has half of them done by each, as of what `jax.vmap` adds; `flops` of all
        products; `unread`, bytes of arrays, if not all are read; `name` and `interpret`, as of `pallas_call`.
    """
    order = [pltpu.PARALLEL if n in how.get("apart", ()) else pltpu.ARBITRARY for n in range(len(how["grid"]))]
    moved = [a for a, _ in (*given, *found)]
    bytes_moved = sum(a.size * a.dtype.itemsize for a in moved) - how.get("unread", 0)
    arrays = tuple(_signed(a) if a.dtype == jnp.uint8 else a for a, _ in given)
    (results,) = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=how["grid"],
            in_specs=[tuple(blocks for _, blocks in given)],
            out_specs=[tuple(blocks for _, blocks in found)],
            scratch_shapes=[tuple(held)],
        ),
        out_shape=[tuple(shape for shape, _ in found)],
        cost_estimate=pl.CostEstimate(flops=how["flops"], transcendentals=0, bytes_accessed=bytes_moved),
        compiler_params=pltpu.CompilerParams(dimension_semantics=order, vmem_limit_bytes=VMEM),
        name=how["name"],
        interpret=how["interpret"],
    )(ahead, arrays)
    return results


def room(*shape: int, dtype: Any = jnp.float32) -> Any:
    """Room in VMEM for an array."""
    return pltpu.VMEM(shape, dtype)


def _signed(selected: Array) -> Array:
    """Bytes as Mosaic knows them."""
    return lax.bitcast_convert_type(selected, jnp.int8)


def turned(x: Array) -> Array:
    """Tokens to the last place, or back."""
    return jnp.swapaxes(x, -1, -2)


def like(x: Array) -> jax.ShapeDtypeStruct:
    """The shape of a result that is as an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def block_of(length: int) -> int:
    """Queries, or keys, of a tile."""
    return max(size for size in (LANES, 2 * LANES, MOST) if length % size == 0)


def group_of(heads: int, most: int) -> int:
    """Heads that share a step."""
    return max(size for size in range(1, most + 1) if heads % size == 0)


def dot(x: Array, y: Array, over_x: int, over_y: int) -> Array:
    """The product of two matrices over a dimension of each, in float32."""
    return lax.dot_general(x, y, (((over_x,), (over_y,)), ((), ())), preferred_element_type=jnp.float32)


def column(x: Array) -> Array:
    """What belongs to keys, [1 n] -> [n 1] float32."""
    return columns(x)[:, :1]


def columns(x: Array) -> Array:
    """As `column`, LANES times: [1 n] -> [n LANES]."""
    return jnp.broadcast_to(x.astype(jnp.float32), (LANES, x.shape[1])).T


def rotated_last(x: Array, cos: Array, sin: Array) -> Array:
    """[… H n], the last R rows of which are `rotated` by angles [R n]."""
    still, rows = jnp.split(x, [x.shape[-2] - len(cos)], axis=-2)
    return jnp.concatenate([still, rotated(rows, cos, sin)], axis=-2)


def ready(x: Array, cos: Array, sin: Array, eps: float) -> tuple[Array, Array]:
    """Queries [H n] of a head, as of `ops.ready`, and what they were multiplied by before they were rotated [1 n]."""
    exact = x.astype(jnp.float32)
    by = len(x) ** -0.5 * lax.rsqrt(jnp.mean(exact * exact, axis=0, keepdims=True) + eps)
    return rotated_last(exact * by, cos, sin).astype(x.dtype), by


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """[… R n], of which pairs of rows (2j, 2j+1) are turned by angles [R n]."""
    rows, (axis, size) = x.astype(jnp.float32), (x.ndim - 2, x.shape[-2])
    first = lax.rem(lax.broadcasted_iota(jnp.int32, x.shape, axis), 2) == 0
    partner = jnp.where(first, -pltpu.roll(rows, size - 1, axis), pltpu.roll(rows, 1, axis))
    return (rows * cos + partner * sin).astype(x.dtype)

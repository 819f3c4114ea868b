"""The sum of each token's rows, where no SparseCore sums them: rows of a block of tokens lie behind one another.

Which of them is whose is a matrix of zeros and ones, made in VMEM, that the matrix units multiply by: so every row is
read once, whatever the order within a block, and sums are float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from maxds.model.tiles import LANES, call, dot, room
from maxds.model.tiles.groups import visits

TOKENS = LANES  # of a block; as many rows are a tile


def can_sum(rows: int, tokens: int, width: int) -> bool:
    """Whether [rows width] are of so many tokens that both divide into tiles, wide ones for each core of a device."""
    return rows % LANES == tokens % TOKENS == width % (2 * LANES) == 0 and width <= 2**14


def sum_rows(rows: Array, tokens: Array, sizes: Array, *, interpret: Any = False) -> Array:
    """[R D] -> [A D]: the sum of each token's rows, in float32.

    Args:
      rows: those of a block of tokens behind those of the one before; behind them all, they may hold anything.
      tokens: [R] int32, of each row its token, counted from the first of its block.
      sizes: [A / TOKENS] int32, how many rows each block has.
      interpret: as of `pallas_call`.
    """
    (count, width), blocks = rows.shape, len(sizes)
    ahead, steps = visits(sizes, count, all_groups=True, tile=LANES)
    wide = width // 2
    (out,) = call(
        _sum,
        ahead,
        [
            (tokens[None], pl.BlockSpec((1, LANES), lambda n, t, ahead: (0, ahead.block[t]))),
            (rows, pl.BlockSpec((LANES, wide), lambda n, t, ahead: (ahead.block[t], n))),
        ],
        [
            (
                jax.ShapeDtypeStruct((blocks * TOKENS, width), rows.dtype),
                pl.BlockSpec((TOKENS, wide), lambda n, t, ahead: (ahead.group[t], n)),
            )
        ],
        [room(TOKENS, wide)],
        grid=(2, steps),
        apart=(0,),
        flops=2 * TOKENS * width * (count + LANES * blocks),
        name="sums_of_rows",
        interpret=interpret,
    )
    return out


def _sum(ahead, given, found, held):
    (tokens, rows), (out,), (total,) = given, found, held
    t = pl.program_id(1)
    group, begin = ahead.group[t], ahead.block[t] * LANES
    first, end, last = ahead.bounds[group], ahead.bounds[group + 1], ahead.bounds[len(ahead.bounds) - 1]

    def add(rows: Array) -> None:
        row = begin + lax.broadcasted_iota(jnp.int32, (TOKENS, LANES), 1)
        is_of = tokens[...] == lax.broadcasted_iota(jnp.int32, (TOKENS, LANES), 0)
        own = (is_of & (row >= first) & (row < end)).astype(rows.dtype)
        total[...] = jnp.where(begin <= first, 0.0, total[...]) + dot(own, rows, 1, 0)

    @pl.when((first < end) & (begin + LANES <= last))
    def _():
        add(rows[...])

    @pl.when((first < end) & (begin + LANES > last))
    def _():
        row = begin + lax.broadcasted_iota(jnp.int32, rows.shape, 0)
        add(jnp.where(row < last, rows[...], jnp.zeros((), rows.dtype)))

    @pl.when(begin + LANES >= end)
    def _():
        out[...] = jnp.where(first < end, total[...], 0.0).astype(out.dtype)

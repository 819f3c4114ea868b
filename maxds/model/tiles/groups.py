"""Grouped matmul: rows, sorted by group, by the matrix of their group; and the gradient of the matrices.

XLA has kernels for both in the place of `lax.ragged_dot`. Their tiles are as large as there is room for, whether they
divide the matrices or not: DeepSeek-V3's 2,048 columns are multiplied as 3,072. And to multiply by a transpose they
write it to memory first.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from maxds.model.tiles import LANES, call, dot, room

ROWS = 256  # of a tile
MOST_BYTES = 30 * 2**20  # of a tile of the matrices and the next one, with the sums that make one


def can_multiply(rows: int, size: int, width: int) -> bool:
    """Whether [rows size] by [G size width] divides into tiles, and so do their gradients."""
    aligned = rows % ROWS == size % LANES == width % LANES == 0
    return aligned and all(_parts(*sides, 12) for sides in ((size, width), (width, size)))


def _parts(size: int, width: int, each: int) -> int:
    """Into how many tiles to cut [size width] along its width: as few as there may be, if possible an even number.

    Two cores of a device have half of them each.

    Args:
      size: of each column.
      width: how many columns.
      each: bytes of VMEM that a number of a tile takes.
    """
    counts = (n for n in range(1, width // LANES + 1) if width % (n * LANES) == 0)
    fits = [n for n in counts if size * width // n * each <= MOST_BYTES]
    return min(fits, key=lambda n: (n % 2, n), default=0)


class Visits(NamedTuple):
    """Which tiles are visited, in this order; as many as the routing needs, and what is behind them is not read."""

    group: Any  # [T] int32
    block: Any  # [T] int32: of rows
    bounds: Any  # [G + 1] int32: the first row of each group

    def own(self, t: Any, shape: tuple[int, int]) -> Array:
        """[rows of a tile, n] bool: those of the tile that are of its group."""
        row = self.block[t] * shape[0] + lax.broadcasted_iota(jnp.int32, shape, 0)
        return (row >= self.bounds[self.group[t]]) & (row < self.bounds[self.group[t] + 1])


def visits(sizes: Array, rows: int, *, all_groups: bool, tile: int = ROWS) -> tuple[Visits, Array]:
    """The tiles of each group in turn, and how many there are; of groups without rows one, if they are wanted."""
    ends = jnp.cumsum(sizes)
    first = jnp.minimum((ends - sizes) // tile, rows // tile - 1)
    count = jnp.where(sizes > 0, (ends - 1) // tile - first + 1, int(all_groups))
    last = jnp.cumsum(count)
    t = jnp.arange(rows // tile + len(sizes), dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last, t, side="right", method="compare_all"), len(sizes) - 1)
    block = jnp.minimum(first[group] + t - (last - count)[group], rows // tile - 1)
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    return Visits(*(a.astype(jnp.int32) for a in (group, block, bounds))), last[-1]


def multiply(
    x: Array, w: Array, sizes: Array, dtype: DTypeLike, *, transposed: bool = False, interpret: Any = False
) -> Array:
    """Rows by the matrix of their group: [R I], [G I O], or if `transposed` [G O I] -> [R O] of `dtype`.

    Args:
      x: rows of no group may hold anything, and do so in the result.
      w: the matrices.
      sizes: [G] int32: how many rows each group has.
      dtype: of the result; sums are float32.
      transposed: multiply by the transposes.
      interpret: as of `pallas_call`.
    """
    (rows, size), width = x.shape, w.shape[1 if transposed else 2]
    parts = _parts(size, width, 2 * w.dtype.itemsize)
    ahead, count = visits(sizes, rows, all_groups=False)
    wide = width // parts

    def matrix(n, t, ahead):
        return (ahead.group[t], n, 0) if transposed else (ahead.group[t], 0, n)

    (out,) = call(
        functools.partial(_multiply, int(transposed)),
        ahead,
        [
            (x, _of_rows(size)),
            (w, pl.BlockSpec((None, wide, size) if transposed else (None, size, wide), matrix)),
        ],
        [(jax.ShapeDtypeStruct((rows, width), dtype), _of_part(wide))],
        [],
        **_how("rows_by_matrices", x, width, (parts, count)),
        interpret=interpret,
    )
    return out


def _multiply(over_w, ahead, given, found, _):
    (x, w), (out,) = given, found
    product = dot(x[...], w[...], 1, over_w).astype(out.dtype)
    # A tile that has the end of a group stays in VMEM until the next one has added its rows.
    out[...] = jnp.where(ahead.own(pl.program_id(1), out.shape), product, out[...])


def multiply_transposed(x: Array, dy: Array, sizes: Array, dtype: DTypeLike, *, interpret: Any = False) -> Array:
    """[R I], [R O] -> [G I O] of `dtype`: the sum of the outer products of each group's rows, in float32."""
    (rows, size), width = x.shape, dy.shape[1]
    parts = _parts(size, width, 4 + 2 * jnp.dtype(dtype).itemsize)
    ahead, count = visits(sizes, rows, all_groups=True)
    wide = width // parts
    (out,) = call(
        _multiply_transposed,
        ahead,
        [(x, _of_rows(size)), (dy, _of_part(wide))],
        [
            (
                jax.ShapeDtypeStruct((len(sizes), size, width), dtype),
                pl.BlockSpec((None, size, wide), lambda n, t, ahead: (ahead.group[t], 0, n)),
            )
        ],
        [room(size, wide)],
        **_how("outer_products", x, width, (parts, count)),
        interpret=interpret,
    )
    return out


def _multiply_transposed(ahead, given, found, held):
    (x, dy), (out,), (total,) = given, found, held
    t = pl.program_id(1)
    group, begin = ahead.group[t], ahead.block[t] * ROWS
    first, end = ahead.bounds[group], ahead.bounds[group + 1]
    whole = (begin >= first) & (begin + ROWS <= end)

    def own(a):
        return jnp.where(ahead.own(t, a.shape), a[...], jnp.zeros((), a.dtype))

    @pl.when(begin <= first)
    def _():
        total[...] = jnp.zeros(total.shape, jnp.float32)

    @pl.when(whole)
    def _():
        total[...] += dot(x[...], dy[...], 0, 0)

    @pl.when(jnp.logical_not(whole) & (first < end))
    def _():
        total[...] += dot(own(x), own(dy), 0, 0)

    @pl.when(begin + ROWS >= end)
    def _():
        out[...] = total[...].astype(out.dtype)


def _of_rows(width: int) -> pl.BlockSpec:
    """Rows that a step visits, whole."""
    return pl.BlockSpec((ROWS, width), lambda n, t, ahead: (ahead.block[t], 0))


def _of_part(wide: int) -> pl.BlockSpec:
    """Of rows that a step visits, the columns of its part."""
    return pl.BlockSpec((ROWS, wide), lambda n, t, ahead: (ahead.block[t], n))


def _how(kernel: str, x: Array, width: int, grid: tuple[Any, Any]) -> dict[str, Any]:
    """Arguments of `call`: for each part of a matrix all visits, and the parts apart."""
    name = f"{kernel}_float8" if x.dtype.itemsize == 1 else kernel
    return {"grid": grid, "apart": (0,), "flops": 2 * x.size * width, "name": name}

"""What experts do between their two products: SwiGLU, times what each row counts for.

XLA passes over all rows that there is room for, and in the gradient twice: it makes those of gate and up first, and
then joins them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from qwix import QArray

from maxds.model.tiles import LANES, call, columns, like, room
from maxds.quantize import BACKWARD, FORWARD, Scaled, scale_of

ROWS = 128  # of a tile


def can_gate(rows: int, width: int) -> bool:
    """Whether so many rows, of a gate and an up half of this width together, divide into tiles."""
    return rows % ROWS == 0 and width % (2 * LANES) == 0


def can_scale(rows: int, width: int) -> bool:
    """Whether rows of this width divide into tiles."""
    return rows % ROWS == 0 and width % LANES == 0


def gated(up: Array, weights: Array, count: Array, limit: float | None, *, interpret: Any = False) -> Array:
    """As `ops.swiglu`, times the rows' weights.

    Args:
      up: [R 2F].
      weights: [R] float32.
      count: [] int32; rows from there on may hold anything, and do so afterwards.
      limit: as of `ops.swiglu`.
      interpret: as of `pallas_call`.

    Returns:
      [R F].
    """
    rows, width = up.shape
    of_rows, per_row = _blocks()
    (out,) = call(
        functools.partial(_gated, limit),
        count[None],
        [(up, of_rows(width)), (weights[None], per_row)],
        [(jax.ShapeDtypeStruct((rows, width // 2), up.dtype), of_rows(width // 2))],
        [],
        grid=(rows // ROWS,),
        apart=(0,),
        flops=0,
        name="gated",
        interpret=interpret,
    )
    return out


def _gated(limit, count, given, found, _):
    (up, weights), (out,) = given, found

    @pl.when(pl.program_id(0) * ROWS < count[0])
    def _():
        weight = columns(weights[...])
        for at in range(0, out.shape[1], LANES):
            gate, linear, _ = _halves(up, at, limit)
            out[:, at : at + LANES] = (gate * jax.nn.sigmoid(gate) * linear * weight).astype(out.dtype)


def gated_backward(
    up: Array, weights: Array, count: Array, dy: Array, limit: float | None, *, interpret: Any = False
) -> tuple[Array, Array]:
    """Gradients of up and weights, given that of `gated`, [R F]."""
    rows, width = up.shape
    of_rows, per_row = _blocks()
    dup, dweights = call(
        functools.partial(_gated_backward, limit),
        count[None],
        [(up, of_rows(width)), (weights[None], per_row), (dy, of_rows(width // 2))],
        [(like(up), of_rows(width)), (like(weights[None]), per_row)],
        [],
        grid=(rows // ROWS,),
        apart=(0,),
        flops=0,
        name="gated_backward",
        interpret=interpret,
    )
    return dup, dweights[0]


def _gated_backward(limit, count, given, found, _):
    (up, weights, dy), (dup, dweights) = given, found
    half = dy.shape[1]

    @pl.when(pl.program_id(0) * ROWS < count[0])
    def _():
        weight, total = columns(weights[...]), jnp.zeros((ROWS, LANES), jnp.float32)
        for at in range(0, half, LANES):
            gate, linear, (of_gate, of_linear) = _halves(up, at, limit)
            share = jax.nn.sigmoid(gate)
            dout = dy[:, at : at + LANES].astype(jnp.float32)
            total += dout * gate * share * linear
            dgate, dlinear = _pulled(gate, linear, share, dout * (weight * share))
            dup[:, at : at + LANES] = of_gate(dgate).astype(dup.dtype)
            dup[:, half + at : half + at + LANES] = of_linear(dlinear).astype(dup.dtype)
        dweights[...] = jnp.sum(total.T, axis=0, keepdims=True)


def _pulled(gate: Array, linear: Array, share: Array, dout: Array) -> tuple[Array, Array]:
    """Gradients of both halves, given that of their product times the gate's share, its sigmoid."""
    return dout * linear * (1 + gate * (1 - share)), dout * gate


def rounded(up: Scaled, weights: Array, count: Array, limit: float | None, *, interpret: Any = False) -> QArray:
    """As `gated`, of rows with scales, rounded to FORWARD with a scale for each row."""
    rows, width = up.shape
    of_rows, per_row = _blocks()
    values, scale = call(
        functools.partial(_rounded, limit),
        count[None],
        [(up.values, of_rows(width)), (_of_rows(up.scale), per_row), (weights[None], per_row)],
        [(jax.ShapeDtypeStruct((rows, width // 2), FORWARD), of_rows(width // 2)), (like(weights[None]), per_row)],
        [room(ROWS, width // 2)],
        grid=(rows // ROWS,),
        apart=(0,),
        flops=0,
        name="gated_float8",
        interpret=interpret,
    )
    return QArray(values, scale.T.astype(up.dtype))


def _rounded(limit, count, given, found, held):
    (up, scale, weights), (out, of_out), (exact,) = given, found, held

    @pl.when(pl.program_id(0) * ROWS < count[0])
    def _():
        weight, by = columns(weights[...]), columns(scale[...])
        for at in range(0, out.shape[1], LANES):
            gate, linear, _ = _halves(up, at, limit, by)
            exact[:, at : at + LANES] = gate * jax.nn.sigmoid(gate) * linear * weight
        _round(exact, out, of_out)


def rounded_backward(
    up: Scaled, weights: Array, count: Array, dy: Scaled, limit: float | None, *, interpret: Any = False
) -> tuple[QArray, QArray, Array]:
    """Given that of its result: the result of `rounded` again, gradients of up, of BACKWARD, and of weights."""
    rows, width = up.shape
    of_rows, per_row = _blocks()
    values, scale, dvalues, dscale, dweights = call(
        functools.partial(_rounded_backward, limit),
        count[None],
        [
            *((up.values, of_rows(width)), (_of_rows(up.scale), per_row), (weights[None], per_row)),
            *((dy.values, of_rows(width // 2)), (_of_rows(dy.scale), per_row)),
        ],
        [
            *((jax.ShapeDtypeStruct((rows, width // 2), FORWARD), of_rows(width // 2)), (like(weights[None]), per_row)),
            *((jax.ShapeDtypeStruct((rows, width), BACKWARD), of_rows(width)), (like(weights[None]), per_row)),
            (like(weights[None]), per_row),
        ],
        [room(ROWS, width // 2), room(ROWS, width)],
        grid=(rows // ROWS,),
        apart=(0,),
        flops=0,
        name="gated_float8_backward",
        interpret=interpret,
    )
    return QArray(values, scale.T.astype(up.dtype)), QArray(dvalues, dscale.T.astype(up.dtype)), dweights[0]


def _rounded_backward(limit, count, given, found, held):
    (up, scale, weights, dy, of_dy), (out, of_out, dup, of_dup, dweights), (exact, dexact) = given, found, held
    half = dy.shape[1]

    @pl.when(pl.program_id(0) * ROWS < count[0])
    def _():
        weight, by, dby = columns(weights[...]), columns(scale[...]), columns(of_dy[...])
        total = jnp.zeros((ROWS, LANES), jnp.float32)
        for at in range(0, half, LANES):
            gate, linear, (of_gate, of_linear) = _halves(up, at, limit, by)
            share = jax.nn.sigmoid(gate)
            dout = dy[:, at : at + LANES].astype(jnp.float32) * dby
            silu = gate * share * linear
            total += dout * silu
            exact[:, at : at + LANES] = silu * weight
            dgate, dlinear = _pulled(gate, linear, share, dout * (weight * share))
            dexact[:, at : at + LANES] = of_gate(dgate)
            dexact[:, half + at : half + at + LANES] = of_linear(dlinear)
        dweights[...] = jnp.sum(total.T, axis=0, keepdims=True)
        _round(exact, out, of_out)
        _round(dexact, dup, of_dup)


def times(x: Array, by: Array, count: Array, *, interpret: Any = False) -> Array:
    """Rows [R D] times powers of two [R 1], in the dtype of the rows; those from `count` on hold anything then."""
    rows, width = x.shape
    of_rows, per_row = _blocks()
    (out,) = call(
        _times,
        count[None],
        [(x, of_rows(width)), (_of_rows(by), per_row)],
        [(like(x), of_rows(width))],
        [],
        grid=(rows // ROWS,),
        apart=(0,),
        flops=0,
        name="times",
        interpret=interpret,
    )
    return out


def _times(count, given, found, _):
    (x, by), (out,) = given, found

    @pl.when(pl.program_id(0) * ROWS < count[0])
    def _():
        factor = columns(by[...])
        for at in range(0, x.shape[1], LANES):
            out[:, at : at + LANES] = (x[:, at : at + LANES].astype(jnp.float32) * factor).astype(out.dtype)


def _round(exact: Any, out: Any, scale: Any) -> None:
    """Rows to float8, and their scales."""
    steps = range(0, out.shape[1], LANES)
    largest = functools.reduce(jnp.maximum, [jnp.abs(exact[:, at : at + LANES]) for at in steps])
    scale[...] = scale_of(jnp.max(largest.T, axis=0, keepdims=True), out.dtype)
    inverse = columns(1 / scale[...])
    for at in steps:
        out[:, at : at + LANES] = (exact[:, at : at + LANES] * inverse).astype(out.dtype)


def _of_rows(scale: Array) -> Array:
    """[R 1] -> [1 R] float32."""
    return scale.T.astype(jnp.float32)


def _halves(
    up: Any, at: int, limit: float | None, by: Array | float = 1.0
) -> tuple[Array, Array, tuple[Callable, Callable]]:
    """LANES columns of the gate and of the other half, float32, within the limit; what this does to their gradients.

    Rows count `by`.
    """
    gate, linear = (up[:, at + i : at + i + LANES].astype(jnp.float32) * by for i in (0, up.shape[1] // 2))
    if limit is None:
        return gate, linear, (lambda dgate: dgate, lambda dlinear: dlinear)
    inside = gate <= limit, jnp.abs(linear) <= limit
    pulls = (lambda dgate: jnp.where(inside[0], dgate, 0)), (lambda dlinear: jnp.where(inside[1], dlinear, 0))
    return jnp.minimum(gate, limit), jnp.clip(linear, -limit, limit), pulls


def _blocks() -> tuple[Callable, pl.BlockSpec]:
    """Blocks of [R width] by their width, and of [1 R]; steps of rows that hold anything stay where they are."""

    def tile(i, count):
        return jnp.minimum(i, jnp.maximum(pl.cdiv(count[0], ROWS) - 1, 0))

    def of_rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((ROWS, width), lambda i, count: (tile(i, count), 0))

    return of_rows, pl.BlockSpec((1, ROWS), lambda i, count: (0, tile(i, count)))

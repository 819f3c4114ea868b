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

from maxds.model.tiles import LANES, call, columns, like

ROWS = 128  # of a tile


def can_gate(rows: int, width: int) -> bool:
    """Whether so many rows, of a gate and an up half of this width together, divide into tiles."""
    return rows % ROWS == 0 and width % (2 * LANES) == 0


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
            dout *= weight * share
            dgate, dlinear = dout * linear * (1 + gate * (1 - share)), dout * gate
            dup[:, at : at + LANES] = of_gate(dgate).astype(dup.dtype)
            dup[:, half + at : half + at + LANES] = of_linear(dlinear).astype(dup.dtype)
        dweights[...] = jnp.sum(total.T, axis=0, keepdims=True)


def _halves(up: Any, at: int, limit: float | None) -> tuple[Array, Array, tuple[Callable, Callable]]:
    """LANES columns of the gate and of the other half, float32, within the limit; what this does to their gradients."""
    gate, linear = (up[:, at + i : at + i + LANES].astype(jnp.float32) for i in (0, up.shape[1] // 2))
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

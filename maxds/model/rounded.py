"""Routed experts in float8: rows come with scales and leave with scales, and so do their gradients.

No pass over the rows finds scales, rounds, or multiplies scales in: tokens were rounded before they travelled, the
kernel of the gates rounds what it makes, and what remains of scales is left to the sum of each token's rows. Scales are
powers of two (`quantize`), so that this changes no result.
"""

import functools

import jax
import jax.numpy as jnp
from qwix import QArray

from maxds.model import kernels
from maxds.quantize import Quantized, Scaled, Tree, gradients

LEAST = 2.0**-100  # of the scales of a weight's gradient: no other is too many times as large


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiplied(
    limit: float | None, x: Quantized, w: tuple[Quantized, Quantized], weights: jax.Array, sizes: jax.Array, kept=None
) -> tuple[Quantized, jax.Array]:
    """Multiplies rows, sorted by expert, by the matrices of their expert.

    Args:
      limit: as of `ops.swiglu`.
      x: [R D], of FORWARD, with a scale for each row; its gradient is scaled.
      w: up [G D 2F] and down [G F D], with a scale for each expert; their gradients are scaled.
      weights: [R] float32: what each row counts for.
      sizes: [G] int32: how many rows each expert has. Rows past their sum may hold anything, and do so afterwards.
      kept: the second result of an earlier call; it is then returned as it is.

    Returns:
      [R D], scaled, whose gradient is of BACKWARD, with a scale for each row; the up product [R 2F] without its scales.
    """
    return _forward(limit, x, w, weights, sizes, kept)[0]


def _forward(limit, x, w, weights, sizes, kept):
    up = _product(x.array, w[0].array, sizes, kept=kept)
    gated = kernels.gated_float8(limit, up, weights, jnp.sum(sizes))
    out = Quantized(_product(gated, w[1].array, sizes), gradient="float8").with_slot()
    return (out, up.values), (x, w, weights, sizes, kept, up)


def _backward(limit, residuals, cotangents):
    x, w, weights, sizes, kept, up = residuals
    dout, count = cotangents[0].slot, jnp.sum(sizes)
    dgated = _product(dout, w[1].array, sizes, transposed=True)
    gated, dup, dweights = kernels.gated_float8_backward(limit, up, weights, count, dgated)
    dx = _product(dup, w[0].array, sizes, transposed=True)
    dw = _weight_gradient(x.array, dup, sizes), _weight_gradient(gated, dout, sizes)
    return gradients(x, dx), gradients(w, dw), dweights, None, jax.tree.map(jnp.zeros_like, kept)


multiplied.defvjp(_forward, _backward)


def _product(x: QArray, w: QArray, sizes: jax.Array, transposed: bool = False, kept: Tree = None) -> Scaled:
    """Rows by the matrices of their group; `kept` are its values."""
    values = kernels.multiply_groups(x.qvalue, w.qvalue, sizes, x.dtype, transposed) if kept is None else kept
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(values)), side="right", method="compare_all")
    return Scaled(values, x.scale * jnp.take(w.scale[:, 0], group, axis=0, mode="clip"))


def _weight_gradient(x: QArray, dy: QArray, sizes: jax.Array) -> Scaled:
    """The sum of the outer products of each group's rows.

    What is summed over cannot have scales of its own: those of x are multiplied into the gradient's, and the values of
    that are brought to one scale in common. They are divided by powers of two, which takes no digit from them, until
    they are below 2^-28 of the largest, and end as zero.
    """
    scale = x.scale * dy.scale
    inside = jnp.arange(len(scale))[:, None] < jnp.sum(sizes)  # rows of no group hold anything
    scale = jnp.where(inside, scale, 0)
    largest = jnp.maximum(jnp.max(scale), LEAST)
    values = kernels.times(dy.qvalue, scale / largest, jnp.sum(sizes))
    dw = kernels.multiply_groups_transposed(x.qvalue, values, sizes, x.dtype)
    return Scaled(dw, jnp.broadcast_to(largest, (*dw.shape[:-1], 1)))

"""float8 arrays: values of one byte, with the scales without which they mean nothing.

A scale is a power of two. So dividing by it, and multiplying a product by it, is exact in every dtype: what is rounded
is rounded once, to float8, and quantizing again what was quantized changes nothing.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from qwix import QArray, dequantize

Tree = Any

# Full precision reaches down to 2^-13 of the largest value that shares a scale, or 2^-28.
FORWARD = jnp.float8_e4m3fn  # weights and activations: 3 bits of mantissa
BACKWARD = jnp.float8_e5m2  # gradients: 2


@flax.struct.dataclass
class Quantized:
    """A weight in float8, and what gradients are taken with respect to in its place: JAX gives a float8 array a float8
    cotangent, which could not hold a gradient.
    """

    array: Any  # QArray with scales in the compute dtype; of a cotangent, None
    slot: jax.Array | None = None  # of the array's shape, in the compute dtype; never read


def quantize(x: jax.Array, dtype: jax.typing.DTypeLike, over: tuple[int, ...], shards: str | None = None) -> QArray:
    """Rounds to float8, scaled so that the largest value just fits.

    Args:
      x: of any float dtype, which is that of the scales.
      dtype: FORWARD or BACKWARD.
      over: axes whose elements share a scale; of size 1 in the scales' shape.
      shards: the mesh axis that `x` is split over along one of them.

    Returns:
      Values and scales. What is not finite in `x` is not finite in the values.
    """
    largest = jnp.max(jnp.abs(x), axis=over, keepdims=True)
    if shards is not None:
        largest = lax.pmax(largest, shards)
    scale = _power_of_two(largest.astype(jnp.float32) / float(jnp.finfo(dtype).max)).astype(x.dtype)
    return QArray((x * (1 / scale)).astype(dtype), scale)


def _power_of_two(x: jax.Array) -> jax.Array:
    """The least power of two from `x` on, float32, that is normal and whose inverse is; if `x` is not finite, any."""
    mantissa = 2**23 - 1  # its bits, below those of the exponent
    power = (lax.bitcast_convert_type(x, jnp.int32) + mantissa) & ~mantissa
    return lax.bitcast_convert_type(jnp.clip(power, 1 << 23, 253 << 23), jnp.float32)


def slots(weights: Tree) -> Tree:
    """What gradients of weights are taken with respect to: the weights themselves, or slots of quantized ones."""

    def one(w):
        return jnp.zeros(w.array.shape, w.array.dtype) if isinstance(w, Quantized) else w

    return jax.tree.map(one, weights, is_leaf=_is_quantized)


def with_slots(weights: Tree, slots: Tree) -> Tree:
    """The weights, so that their gradients are those of `slots`."""
    return jax.tree.map(
        lambda w, slot: dataclasses.replace(w, slot=slot) if isinstance(w, Quantized) else slot,
        weights,
        slots,
        is_leaf=_is_quantized,
    )


def gradients(weights: Tree, of_slots: Tree) -> Tree:
    """The cotangents of weights whose slots have these gradients."""
    return jax.tree.map(
        lambda w, g: Quantized(None, g) if isinstance(w, Quantized) else g, weights, of_slots, is_leaf=_is_quantized
    )


def dequantized(weight: jax.Array | Quantized) -> jax.Array:
    """A weight as an ordinary array, which is exact."""
    return dequantize(weight.array) if isinstance(weight, Quantized) else weight


def _is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)

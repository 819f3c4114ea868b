"""float8 arrays: values of one byte, with the scales without which they mean nothing.

A scale is a power of two. So dividing by it, and multiplying a product by it, is exact in every dtype: what is rounded
is rounded once, to float8, and quantizing again what was quantized changes nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from qwix import QArray, dequantize

Tree = Any

# Full precision reaches down to 2^-13 of the largest value that shares a scale, or 2^-28.
FORWARD = jnp.float8_e4m3fn  # weights and activations: 3 bits of mantissa
BACKWARD = jnp.float8_e5m2  # gradients: 2


@flax.struct.dataclass
class Scaled:
    """Rows in the compute dtype that their scales are still to be multiplied into.

    Only of a value that is read once may it be the gradient: JAX would add two of them values to values and scales to
    scales, which is not their sum.
    """

    values: jax.Array  # [… R D]
    scale: jax.Array  # [… R 1]

    @property
    def shape(self) -> tuple[int, ...]:
        """[… R D]."""
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """That of the rows."""
        return self.values.dtype

    def __add__(self, other: "Scaled") -> "Scaled":
        """The sum, with the scales of the first."""
        return Scaled(self.values + other.values * (other.scale / self.scale), self.scale)

    def astype(self, dtype: jax.typing.DTypeLike) -> "Scaled":
        """The same in another dtype."""
        return Scaled(self.values.astype(dtype), self.scale.astype(dtype))

    def whole(self) -> jax.Array:
        """The rows, which is exact."""
        return self.values * self.scale


@flax.struct.dataclass
class Quantized:
    """An array that has scales, or whose gradient has. Gradients are taken with respect to `slot`, not `array`.

    For JAX gives each array a cotangent of its own dtype, and float8 could not hold a gradient.
    """

    array: Any  # QArray with scales in the compute dtype, Scaled, or an array in it; of a cotangent, None
    slot: Tree = None  # zeros, as the gradient will be; never read. None where no gradient is taken
    # An array, Scaled, or a QArray of BACKWARD with a scale for each row.
    gradient: Literal["whole", "scaled", "float8"] = flax.struct.field(pytree_node=False, default="whole")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return self.array.shape

    def with_slot(self) -> "Quantized":
        """Itself, with a slot."""
        if self.slot is not None:
            return self
        shape, dtype = self.shape, self.array.dtype
        zeros, scale = jnp.zeros(shape, dtype), jnp.zeros((*shape[:-1], 1), dtype)
        match self.gradient:
            case "scaled":
                zeros = Scaled(zeros, scale)
            case "float8":
                zeros = QArray(zeros.astype(BACKWARD), scale)
        return dataclasses.replace(self, slot=zeros)


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
    scale = scale_of(largest.astype(jnp.float32), dtype).astype(x.dtype)
    return QArray((x * (1 / scale)).astype(dtype), scale)


def scale_of(largest: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The least power of two s, float32, for which largest / s fits into `dtype`, and s and 1 / s are normal numbers.

    Where `largest` is not a number, any.
    """
    mantissa = 2**23 - 1  # its bits, below those of the exponent
    least = largest / float(jnp.finfo(dtype).max)
    power = (lax.bitcast_convert_type(least, jnp.int32) + mantissa) & ~mantissa
    return lax.bitcast_convert_type(jnp.clip(power, 1 << 23, 253 << 23), jnp.float32)


def slots(tree: Tree) -> Tree:
    """What gradients are taken with respect to: arrays themselves, or the slots of what is quantized."""
    return _of_quantized(lambda w: w.with_slot().slot, tree)


def with_slots(tree: Tree, slots: Tree) -> Tree:
    """The same, so that its gradients are those of `slots`."""
    return jax.tree.map(
        lambda w, slot: dataclasses.replace(w, slot=slot) if isinstance(w, Quantized) else slot,
        tree,
        slots,
        is_leaf=_is_quantized,
    )


def without_slots(tree: Tree) -> Tree:
    """The same, as it is kept and waited for."""
    return _of_quantized(lambda w: dataclasses.replace(w, slot=None), tree)


def gradients(tree: Tree, of_slots: Tree) -> Tree:
    """The cotangents of what has slots with these gradients."""
    return jax.tree.map(
        lambda w, g: dataclasses.replace(w, array=None, slot=g) if isinstance(w, Quantized) else g,
        tree,
        of_slots,
        is_leaf=_is_quantized,
    )


def vjp(fn: Callable, *args: Tree) -> tuple[Tree, Callable]:
    """As `jax.vjp`, with respect to slots: fn(*args), without slots; what pulls cotangents of its slots back."""

    def run(*of_args):
        y = fn(*map(with_slots, args, of_args))
        return slots(y), without_slots(y)

    _, pull, y = jax.vjp(run, *map(slots, args), has_aux=True)
    return y, pull


def named(x: jax.Array, name: str) -> jax.Array:
    """As `checkpoint_name`. JAX passes what it keeps through `reduce_precision`, for which the largest numbers of
    float8_e4m3fn are infinite: they are named by their bits.
    """
    if x.dtype != FORWARD:
        return checkpoint_name(x, name)
    bits = lax.bitcast_convert_type(x, jnp.uint8)
    return lax.bitcast_convert_type(checkpoint_name(bits, name), x.dtype)


def dequantized(weight: jax.Array | Quantized) -> jax.Array:
    """A weight as an ordinary array, which is exact."""
    return dequantize(weight.array) if isinstance(weight, Quantized) else weight


def _of_quantized(fn: Callable[[Quantized], Any], tree: Tree) -> Tree:
    return jax.tree.map(lambda x: fn(x) if isinstance(x, Quantized) else x, tree, is_leaf=_is_quantized)


def _is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)

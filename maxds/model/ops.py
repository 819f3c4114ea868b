"""Matmul, normalization, MLP, rotary embedding, cross-entropy."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from jax import lax

from maxds.architecture import Model, RopeScaling
from maxds.model.tiles import Turn
from maxds.quantize import BACKWARD, FORWARD, Quantized, quantize

# ------------------------------------------------------------------------------------------- matmul


def matmul(subscripts: str, x: jax.Array, w: jax.Array | Quantized) -> jax.Array:
    """`jnp.einsum` of activations and a weight, in float8 where the weight is.

    Then `x` is rounded to e4m3 with a scale for each row, and the result's gradient to e5m2: with a scale for each row
    where it is multiplied by `w`, for each output feature where it is multiplied by `x`.

    Args:
      subscripts: such as "bsd,df->bsf": rows and inputs, inputs and outputs, rows and outputs. Matrices can be stacked.
      x: activations.
      w: its scales are of outputs.
    """
    return _matmul_float8(subscripts, x, w) if isinstance(w, Quantized) else _matmul(subscripts, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(subscripts, x, w):
    return jnp.einsum(subscripts, x, w)


def _matmul_backward(subscripts, operands, dy):
    x, w = operands
    return _input_gradient(subscripts, dy, w), _weight_gradient(jnp.einsum, subscripts, x, dy)


_matmul.defvjp(lambda subscripts, *operands: (_matmul(subscripts, *operands), operands), _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul_float8(subscripts, x, w):
    return _matmul_float8_forward(subscripts, x, w)[0]


def _matmul_float8_forward(subscripts, x, w):
    of_x, _, of_y = _dimensions(subscripts)
    x = quantize(x, FORWARD, over=_inputs(of_x, of_y))
    return qwix.einsum(subscripts, x, w.array), (x, w.array)


def _matmul_float8_backward(subscripts, residuals, dy):
    """What is summed over cannot have scales of its own, so those of x and w are first multiplied into dy: exactly."""
    (x, w), (of_x, of_w, of_y) = residuals, _dimensions(subscripts)
    for_x = quantize(dy * _along(of_y, of_w, w.scale), BACKWARD, over=_inputs(of_y, of_x))
    for_w = quantize(dy * _along(of_y, of_x, x.scale), BACKWARD, over=_inputs(of_y, of_w))
    dx = qwix.einsum(f"{of_y},{of_w}->{of_x}", for_x, w.qvalue, preferred_element_type=dy.dtype)
    einsum = functools.partial(qwix.einsum, preferred_element_type=dy.dtype)
    return dx, Quantized(None, _weight_gradient(einsum, subscripts, x.qvalue, for_w))


_matmul_float8.defvjp(_matmul_float8_forward, _matmul_float8_backward)


def _input_gradient(subscripts: str, dy: jax.Array, w: jax.Array) -> jax.Array:
    """The product of dy and w.

    Of a matrix for each group, each row of the batch gets a copy: else TPU's compiler would turn the result.
    """
    of_x, of_w, of_y = _dimensions(subscripts)
    if of_w[0] in of_x and of_w[0] in of_y:
        copies = jnp.broadcast_to(w, (len(dy), *w.shape))
        return jnp.einsum(f"{of_y[0]}{of_w},{of_y}->{of_x}", copies, dy)
    return jnp.einsum(f"{of_y},{of_w}->{of_x}", dy, w)


def _weight_gradient(einsum: Callable, subscripts: str, x: Any, dy: Any) -> jax.Array:
    """The product of x and dy, with heads first, as the kernels for TPU have them, and only then turned.

    TPU's compiler would turn what is multiplied, for which the product takes twice its time.
    """
    of_x, of_w, of_y = _dimensions(subscripts)
    (of_heads, heads), (of_other, other) = sorted([(of_x, x), (of_y, dy)], key=lambda operand: -len(operand[0]))
    made = "".join(letter for letter in dict.fromkeys(of_heads + of_other) if letter in of_w)
    dw = einsum(f"{of_heads},{of_other}->{made}", heads, other)
    return dw if made == of_w else jnp.einsum(f"{made}->{of_w}", lax.optimization_barrier(dw))


def _dimensions(subscripts: str) -> list[str]:
    """The letters of x, w and the result."""
    return subscripts.replace("->", ",").split(",")


def _inputs(operand: str, result: str) -> tuple[int, ...]:
    """The dimensions of an operand that its product has not."""
    return tuple(i for i, letter in enumerate(operand) if letter not in result)


def _along(result: str, operand: str, scale: jax.Array) -> jax.Array:
    """The scales of an operand, where the result has its dimensions."""
    shared = [operand.index(letter) for letter in result if letter in operand]
    summed = [i for i in range(len(operand)) if i not in shared]
    sizes = [scale.shape[operand.index(letter)] if letter in operand else 1 for letter in result]
    return scale.transpose(*shared, *summed).reshape(sizes)


# ----------------------------------------------------------------------------- order, norm, MLP


def ordered(keys: jax.Array, most: int) -> jax.Array:
    """Numbers [N], none negative nor above `most` -> the places [N] int32 of the least, the next, and so on.

    Equal ones keep their order. TPUs sort single numbers best: each is (key, place) in one.
    """
    bits = (keys.size - 1).bit_length()
    assert (most + 1) << bits <= 1 << 32, (most, keys.size)
    both = keys.astype(jnp.uint32) << bits | jnp.arange(keys.size, dtype=jnp.uint32)
    return (lax.sort(both, is_stable=False) & (1 << bits) - 1).astype(jnp.int32)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last dimension, in float32; the result has x's dtype."""
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps) * scale).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """(x - mean) / deviation * scale + bias over the last dimension, in float32; the result has x's dtype."""
    y = x.astype(jnp.float32)
    y -= jnp.mean(y, axis=-1, keepdims=True)
    return (y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps) * scale + bias).astype(x.dtype)


def swiglu(up: jax.Array, limit: float | None = None) -> jax.Array:
    """silu(gate) * up of a product [... 2F] whose first half is the gate. A limit bounds the gate, and |up|."""
    gate, up = jnp.split(up, 2, axis=-1)
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up


# ----------------------------------------------------------------------------------- rotary embedding


RopeTable = tuple[jax.Array, jax.Array]  # cos, sin


def rope_frequencies(dim: int, theta: float, yarn: RopeScaling | None) -> jax.Array:
    """Radians per position of each pair of rotated dimensions [dim / 2]; YaRN if configured.

    arXiv 2309.00071, section 3.2: dimensions that turn often within the original context keep their
    frequency, those that turn rarely are slowed by `factor`, and between the two it is a ramp.
    """
    frequencies = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    if yarn is None:
        return frequencies

    def dimension(turns: float) -> float:
        positions = yarn.original_max_position_embeddings
        return dim * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), dim - 1)
    ramp = jnp.clip((jnp.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return frequencies * (1 - ramp) + frequencies / yarn.factor * ramp


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature, 0.1 mscale ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0


def rope_table(dim: int, theta: float, yarn: RopeScaling | None, positions: jax.Array) -> RopeTable:
    """cos and sin [B S dim], float32, of positions [B S]; the dimensions of a pair have the same."""
    angles = positions[..., None].astype(jnp.float32) * jnp.repeat(rope_frequencies(dim, theta, yarn), 2)
    scale = 1.0
    if yarn is not None:
        scale = yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def softmax_scale(config: Model) -> float:
    """qk_head_dim^-0.5, times YaRN's temperature squared where `mscale_all_dim` is set."""
    scale, yarn = config.qk_head_dim**-0.5, config.rope_scaling
    if yarn is None or yarn.mscale_all_dim == 0:
        return scale
    return scale * yarn_mscale(yarn.factor, yarn.mscale_all_dim) ** 2


def rotate(x: jax.Array, table: RopeTable) -> jax.Array:
    """Rotates the pairs (2j, 2j+1) of the last R dimensions of [B ... S H] by the angles of a table [B S R].

    A matrix turns the pairs by a right angle, exactly: taking them apart would cost a TPU several passes over x.
    """
    still = x.shape[-1] - table[0].shape[-1]
    turn = np.zeros((x.shape[-1], x.shape[-1]), np.float32)
    even = np.arange(still, x.shape[-1], 2)
    turn[even + 1, even], turn[even, even + 1] = -1, 1
    turned = jnp.matmul(x, turn.astype(x.dtype), precision=lax.Precision.HIGHEST)
    cos, sin = (
        jnp.expand_dims(jnp.pad(t, ((0, 0), (0, 0), (still, 0)), constant_values=fill), range(1, x.ndim - 2))
        for t, fill in zip(table, (1, 0), strict=True)
    )
    return (x.astype(jnp.float32) * cos + turned.astype(jnp.float32) * sin).astype(x.dtype)


def ready(q: jax.Array, turn: Turn) -> jax.Array:
    """Queries [B N S H], normalized, times the softmax scale, and rotated."""
    return rotate(rms_norm(q, q.shape[-1] ** -0.5, turn.eps), (turn.cos, turn.sin))


def rotate_halves(x: jax.Array, table: RopeTable) -> jax.Array:
    """Rotates the pairs (j, j + R/2) of the first R dimensions of [B ... S H] by the angles of a table [B S R]."""
    half = table[0].shape[-1] // 2
    cos, sin = (jnp.expand_dims(t[..., ::2], range(1, x.ndim - 2)) for t in table)
    a, b, still = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, still], axis=-1).astype(x.dtype)


# -------------------------------------------------------------------------------------- cross-entropy


def cross_entropy(
    h: jax.Array, head: jax.Array, targets: jax.Array, weights: tuple[jax.Array, jax.Array], chunk: int
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sums, over tokens, of -log p(target) and of logsumexp(logits)^2, each with its weight.

    The logits of `chunk` tokens exist at a time, and are computed once: the gradient is made
    together with the loss, and scaled when the cotangent comes.

    Args:
      h: [T D].
      head: [D V].
      targets: [T] int32; -1: no target.
      weights: scalars, of the two sums.
      chunk: tokens.

    Returns:
      The weighted sum, float32, and the sums that it consists of: `nll` and `z`.
      Only the weighted sum is differentiable.
    """
    chunk = min(chunk, len(h))
    pad = -len(h) % chunk
    rows = jnp.pad(h, ((0, pad), (0, 0))).reshape(-1, chunk, h.shape[1])
    targets = jnp.pad(targets, (0, pad), constant_values=-1).reshape(rows.shape[:2])
    objective, sums = _cross_entropy(rows, head, targets, weights)
    return objective, jax.tree.map(lax.stop_gradient, sums)


def _logits(rows, head):
    return jnp.einsum("td,dv->tv", rows, head, preferred_element_type=jnp.float32)


def _chunk_loss(logits, targets, weights):
    lse = jax.nn.logsumexp(logits, axis=-1)
    valid = targets >= 0
    picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0]
    nll = jnp.sum(jnp.where(valid, lse - picked, 0))
    z = jnp.sum(jnp.where(valid, lse * lse, 0))
    return weights[0] * nll + weights[1] * z, {"nll": nll, "z": z}


def _summed(chunks):
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), chunks)


@jax.custom_vjp
def _cross_entropy(rows, head, targets, weights):
    return _summed(lax.map(lambda chunk: _chunk_loss(_logits(chunk[0], head), chunk[1], weights), (rows, targets)))


def _cross_entropy_forward(rows, head, targets, weights):
    def body(dhead, chunk):
        rows, targets = chunk
        losses, dlogits = jax.value_and_grad(_chunk_loss, has_aux=True)(_logits(rows, head), targets, weights)
        dlogits = dlogits.astype(head.dtype)  # as TPUs do by themselves; GPUs would take twice the time
        more = jnp.einsum("td,tv->dv", rows, dlogits, preferred_element_type=jnp.float32)
        return dhead + more, (losses, jnp.einsum("tv,dv->td", dlogits, head))

    dhead, (losses, drows) = lax.scan(body, jnp.zeros(head.shape, jnp.float32), (rows, targets))
    return _summed(losses), (drows, dhead.astype(head.dtype))


def _cross_entropy_backward(residuals, cotangents):
    scale = cotangents[0]
    return *((d * scale.astype(d.dtype)) for d in residuals), None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)

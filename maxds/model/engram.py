"""Engram: what is learned of n-grams, looked up in tables by their hashes (arXiv 2601.07372).

    tokens -> classes -> hashes of the n-grams that end here -> rows of tables, side by side: e
    key of a stream = e W_k, value = e W_v; gate = sigma(signed root of norm(stream) · norm(key) / root of D)
    stream += gate value + silu(convolution(norm(gate value)))

Rows depend on tokens alone. So all are looked up before the first layer, and only they travel (`maxds.tables`).

Where the paper leaves something open, it is as in the official code (github.com/deepseek-ai/Engram): hashes to the bit.
Unlike there, neither n-grams nor the convolution reach into the document before, and projections have no bias.
"""

import functools
import math
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from maxds import tables
from maxds.architecture import Model
from maxds.model import residual
from maxds.model.ops import matmul, rms_norm
from maxds.model.residual import Stream
from maxds.params import Param, Tree

RATE = 5.0  # of tables, times the learning rate (section 4.1)
_OF_LAYER = 10007  # what a layer's number adds to the seed
_LARGEST = np.iinfo(np.int64).max


@flax.struct.dataclass
class Engram:
    """Weights of one Engram, of n streams (1 without hyper-connections)."""

    table: Tree  # [R engram_head_dim]: of all n-gram sizes and heads, one below the other
    key: Tree  # [n engram_dim D]
    value: Tree  # [engram_dim D]
    key_norm: Tree  # [n D]
    query_norm: Tree  # [n D]
    conv_norm: Tree  # [n D]
    conv: Tree  # [engram_kernel_size n D]; the last is of the token itself


class Hashes(NamedTuple):
    """How a layer hashes n-grams."""

    multipliers: tuple[int, ...]  # of a token, of the one before it, …: odd
    primes: tuple[tuple[int, ...], ...]  # of 2-grams, of 3-grams, …: of each head, the rows of its table

    @property
    def rows(self) -> int:
        """Of all tables together."""
        return sum(map(sum, self.primes))


@functools.cache
def hashes(c: Model) -> dict[int, Hashes]:
    """Of each layer with an Engram. No two tables of the model have the same number of rows."""
    bound = max(1, _LARGEST // (c.engram_compressed_vocab_size or c.vocab_size) // 2)
    found, used = {}, set()
    for layer in c.engram_layer_ids:
        drawn = np.random.default_rng(c.engram_seed + _OF_LAYER * layer).integers(0, bound, c.engram_max_ngram_size)
        primes = tuple(_primes(size, c.engram_n_heads, used) for size in c.engram_vocab_size)
        found[layer] = Hashes(tuple(int(n) * 2 + 1 for n in drawn), primes)
    return found


def _primes(least: int, count: int, used: set[int]) -> tuple[int, ...]:
    """The next primes that are not used, which they are then."""
    found: list[int] = []
    while len(found) < count:
        if least not in used and np.all(least % np.arange(2, math.isqrt(least) + 1)):
            found.append(least)
        least += 1
    used.update(found)
    return tuple(found)


def declare(c: Model, layer: int) -> Engram:
    """Declares the Engram of a layer. It starts without a convolution."""
    n, d, std = c.hc_mult or 1, c.hidden_size, c.initializer_range
    norm = Param((n, d), P(None, "fsdp"), decay=False, float32=True)
    return Engram(
        table=tables.declare(hashes(c)[layer].rows, c.engram_head_dim, std, RATE),
        key=Param((n, c.engram_dim, d), P(None, "fsdp"), "bio", std),
        value=Param((c.engram_dim, d), P("fsdp"), "io", std),
        key_norm=norm,
        query_norm=norm,
        conv_norm=norm,
        conv=Param((c.engram_kernel_size, n, d), P(None, None, "fsdp"), std=0.0, float32=True),
    )


# ------------------------------------------------------------------------------------------ hashes


def rows(c: Model, layer: int, classes: jax.Array, tokens: jax.Array, segments: jax.Array) -> jax.Array:
    """Which rows of a layer's tables the n-grams that end in each token are hashed to.

    Args:
      c: the model.
      layer: with an Engram.
      classes: int32 [V]: what each token counts as.
      tokens: [B S].
      segments: [B S]: n-grams do not cross from one to the next.

    Returns:
      int32 [B S H], H a number for each n-gram size and head.
    """
    own, found, start = jnp.take(classes, jnp.maximum(tokens, 0)), [], 0
    mixed = None
    for back, multiplier in enumerate(hashes(c)[layer].multipliers):
        class_of = jnp.where(
            _same(segments, back), _shifted(own, back, axis=1), jnp.take(classes, c.engram_pad_token_id)
        )
        product = _times(class_of.astype(jnp.uint32), multiplier)
        mixed = product if mixed is None else tuple(a ^ b for a, b in zip(mixed, product, strict=True))
        for prime in hashes(c)[layer].primes[back - 1] if back else ():
            found.append(_modulo(mixed, prime).astype(jnp.int32) + start)
            start += prime
    return jnp.stack(found, axis=-1)


def _shifted(x: jax.Array, back: int, axis: int) -> jax.Array:
    """What lies so far back along an axis; zeros before the start."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (back, 0)
    return jax.lax.slice_in_dim(jnp.pad(x, pad), 0, x.shape[axis], axis=axis)


def _same(segments: jax.Array, back: int) -> jax.Array:
    """[B S] bool: whether what lies so far back is of the same document."""
    return (_shifted(segments, back, axis=1) == segments) & (jnp.arange(segments.shape[1]) >= back)


Wide = tuple[jax.Array, ...]  # the upper and the lower 32 of 64 bits, which JAX has not by default


def _times(x: jax.Array, factor: int) -> Wide:
    """uint32 times a constant, where the product is below 2^64."""

    def halves(x: jax.Array) -> Wide:
        return x >> jnp.uint32(16), x & jnp.uint32(0xFFFF)

    (a, b), (c, d) = halves(x), halves(jnp.uint32(factor % 2**32))
    upper, cross, lower = a * c, (halves(a * d), halves(b * c)), b * d
    middle = (lower >> jnp.uint32(16)) + cross[0][1] + cross[1][1]
    upper += cross[0][0] + cross[1][0] + (middle >> jnp.uint32(16)) + x * jnp.uint32(factor >> 32)
    return upper, x * jnp.uint32(factor % 2**32)


def _modulo(x: Wide, prime: int) -> jax.Array:
    """The remainder, uint32: of the upper half, and then of as many further bits at a time as still fit."""
    upper, lower = x
    p, room = jnp.uint32(prime), 32 - prime.bit_length()
    found, left = upper % p, 32
    while left:
        taken = min(room, left)
        left -= taken
        bits = lower >> jnp.uint32(left) & jnp.uint32(2**taken - 1)
        found = (found << jnp.uint32(taken) | bits) % p
    return found


# ------------------------------------------------------------------------------------------- stage


def remember(c: Model, w: Engram, x: Stream, found: jax.Array, segments: jax.Array) -> Stream:
    """The streams, each with as much of what was looked up, [B S engram_dim], as its gate lets in."""
    gated, fed = admit(c, w, x, found)
    return add(x, gated, convolve(c, w.conv, fed, segments))


def admit(c: Model, w: Engram, x: Stream, found: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the gate of each stream lets in, and that as it is fed to the convolution: [B n S D] float32."""
    h, eps = residual.streams(x), c.rms_norm_eps

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return rms_norm(x.astype(jnp.float32), scale[:, None], eps)

    key = norm(matmul("bse,ned->bnsd", found, w.key), w.key_norm)
    match = jnp.sum(norm(h, w.query_norm) * key, axis=-1) * c.hidden_size**-0.5
    gate = jax.nn.sigmoid(jnp.sign(match) * jnp.sqrt(jnp.maximum(jnp.abs(match), 1e-6)))
    value = matmul("bse,ed->bsd", found, w.value)
    gated = gate[..., None] * value[:, None].astype(jnp.float32)
    return gated, norm(gated, w.conv_norm)


def add(x: Stream, gated: jax.Array, convolved: jax.Array) -> Stream:
    """The streams with what was let in and what `convolve` has made of it."""
    h = residual.streams(x)
    return residual.with_streams(x, h + (gated + jax.nn.silu(convolved)).astype(h.dtype))


def convolve(c: Model, kernel: jax.Array, x: jax.Array, segments: jax.Array) -> jax.Array:
    """Of each channel over the tokens of a document [B n S D], as far apart as the longest n-gram is long."""
    total = jnp.zeros_like(x)
    for i, weights in enumerate(kernel[::-1]):
        back = i * c.engram_max_ngram_size
        seen = jnp.where(_same(segments, back)[:, None, :, None], _shifted(x, back, axis=2), 0)
        total += weights[:, None] * seen
    return total

"""What runs through the layers, and how a layer reads it and writes to it.

One residual stream; or n of them with manifold-constrained hyper-connections (mHC, arXiv 2512.24880): what a stage
reads is a weighted sum of the streams, what it makes is added to each of them with another weight, and in between they
are mixed by a matrix whose rows and columns sum to one, so that depth neither blows the streams up nor fades them out.
That matrix is either brought to such sums, all but exactly; or a weighted mean of the n! permutations, each of which
has them (mHC-lite, arXiv 2601.05732).

What a stage has made is added when the next one reads: until then it may be a sum that is still on its way.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from maxds.architecture import Model
from maxds.params import Param, Tree


@flax.struct.dataclass
class Stream:
    """What runs through the layers. Without hyper-connections, `out` and `post` are None."""

    h: Any  # [B S D], or the streams, a tuple of n: each an array of its own, so that TPUs mix them at full width
    out: Tree  # [B S D]: made, and not added yet
    post: Tree  # [n B S] float32: what each stream is to get of it
    balance: jax.Array  # float32 scalar: the balance loss of the layers so far, summed over sequences
    indexer: Tree  # float32 scalar: the indexers' loss so far, summed over tokens; None without indexers

    @property
    def shape(self) -> tuple[int, ...]:
        """[B S D], of what a stage reads and makes."""
        return self.made.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of what a stage reads and makes."""
        return self.made.dtype

    @property
    def made(self) -> jax.Array:
        """[B S D]: where stages add what they make."""
        return self.h if self.out is None else self.out


@flax.struct.dataclass
class Connection:
    """Weights of a stage's hyper-connection, of K = 2n + n² or 2n + n! outputs; of the last one, K = n."""

    project: Tree  # [n D K]
    scale: Tree  # [3]: of read, write and mix; or [1]
    base: Tree  # [K]


def declare(c: Model) -> Connection | None:
    """Declares the connection of a stage; None where there is one stream."""
    return None if c.hc_mult is None else _connection(c, c.hc_mult, (0.0,) * 2 * c.hc_mult + _unmixed(c, c.hc_mult), 3)


def declare_last(c: Model) -> Connection | None:
    """Declares what joins the streams after the last layer."""
    return None if c.hc_mult is None else _connection(c, c.hc_mult, (0.0,) * c.hc_mult, 1)


def _connection(c: Model, streams: int, base: tuple[float, ...], parts: int) -> Connection:
    project = Param((streams, c.hidden_size, len(base)), P(None, "fsdp"), "iio", c.initializer_range, float32=True)
    scale = Param((parts,), P(None), start=(0.01,), decay=False, float32=True)  # mHC, table 5
    return Connection(project, scale, dataclasses.replace(scale, shape=(len(base),), std=0.0, start=base))


def _unmixed(c: Model, streams: int) -> tuple[float, ...]:
    """Logits by which each stream goes on as it is, as in mHC-lite's code: from even shares, all would become alike."""
    same = np.eye(streams).ravel() if c.hc_sinkhorn_iters else np.arange(c.hc_mixes) == 0  # of the permutations
    return tuple(float(x) for x in np.where(same, 0.0, -8.0))


def enter(c: Model, h: jax.Array) -> Stream:
    """What enters the first layer, of embedded tokens [B S D]: n streams start alike."""
    zero = jnp.zeros((), jnp.float32)
    indexer = None if c.index_topk is None else zero
    if c.hc_mult is None:
        return Stream(h, None, None, zero, indexer)
    return Stream((h,) * c.hc_mult, jnp.zeros_like(h), jnp.zeros((c.hc_mult, *h.shape[:2]), jnp.float32), zero, indexer)


def read(c: Model, w: Connection | None, x: Stream) -> tuple[jax.Array, Stream]:
    """What a stage reads [B S D], and the stream for it to write to."""
    if w is None:
        return x.h, x
    n, h = c.hc_mult or 0, _settled(x)
    outputs, bases = (jnp.split(a, [n, 2 * n]) for a in (_outputs(c, w, h), w.base))
    weigh, write, mix = (
        part * scale + base[:, None, None] for part, scale, base in zip(outputs, w.scale, bases, strict=True)
    )
    mixed = tuple(_joined(shares, h) for shares in _doubly_stochastic(c, mix).swapaxes(0, 1))
    y = _joined(jax.nn.sigmoid(weigh) + c.hc_eps, h)
    return y, dataclasses.replace(x, h=mixed, out=jnp.zeros_like(y), post=2 * jax.nn.sigmoid(write))


def add(x: Stream, y: jax.Array) -> Stream:
    """The stream with what a stage has made, [B S D]."""
    return with_made(x, x.made + y)


def with_made(x: Stream, made: jax.Array) -> Stream:
    """The stream with this in place of `x.made`."""
    return dataclasses.replace(x, h=made) if x.out is None else dataclasses.replace(x, out=made)


def streams(x: Stream) -> jax.Array:
    """All streams [B n S D], of which nothing is still to be added. Without hyper-connections n is 1."""
    return jnp.stack([x.h] if x.out is None else _settled(x), axis=1)


def with_streams(x: Stream, h: jax.Array) -> Stream:
    """The stream with these in place of `streams(x)`."""
    if x.out is None:
        return dataclasses.replace(x, h=h[:, 0])
    return dataclasses.replace(x, h=jnp.unstack(h, axis=1), out=jnp.zeros_like(x.out), post=jnp.zeros_like(x.post))


def each(x: Stream, fn: Callable[[jax.Array], jax.Array]) -> Stream:
    """The stream with fn(stream [B S D]) in place of each of `streams(x)`."""
    if x.out is None:
        return dataclasses.replace(x, h=fn(x.h))
    h = tuple(map(fn, _settled(x)))
    return dataclasses.replace(x, h=h, out=jnp.zeros_like(x.out), post=jnp.zeros_like(x.post))


def leave(c: Model, w: Connection | None, x: Stream) -> jax.Array:
    """What leaves the last layer, [B S D]."""
    if w is None:
        return x.h
    h = _settled(x)
    return _joined(jax.nn.sigmoid(_outputs(c, w, h) * w.scale + w.base[:, None, None]) + c.hc_eps, h)


def _settled(x: Stream) -> list[jax.Array]:
    """The streams, with what was still to be added."""
    out = x.out.astype(jnp.float32)
    shares = zip(x.h, x.post[..., None], strict=True)
    return [(h.astype(jnp.float32) + share * out).astype(h.dtype) for h, share in shares]


def _outputs(c: Model, w: Connection, streams: list[jax.Array]) -> jax.Array:
    """[K B S] float32, of all streams normalized together."""
    hs = [h.astype(jnp.float32) for h in streams]
    size = lax.rsqrt(jnp.mean(sum(h * h for h in hs), axis=-1) / len(hs) + c.rms_norm_eps)
    pairs = zip(hs, w.project, strict=True)
    products = [jnp.einsum("bsd,dk->kbs", h, own, precision=lax.Precision.HIGHEST) for h, own in pairs]
    return functools.reduce(jnp.add, products) * size


def _joined(weights: jax.Array, streams: list[jax.Array]) -> jax.Array:
    """The sum of the streams, each times its weight [n B S]."""
    products = [w[..., None] * h.astype(jnp.float32) for w, h in zip(weights, streams, strict=True)]
    return functools.reduce(jnp.add, products).astype(streams[0].dtype)


def _doubly_stochastic(c: Model, logits: jax.Array) -> jax.Array:
    """[n² B S] or [n! B S] -> [from to B S], of which each stream gives and gets one in all.

    By Sinkhorn and Knopp (mHC, section 4.2); or the mean of all permutations, weighed (mHC-lite, section 3).
    """
    n = c.hc_mult or 0
    if c.hc_sinkhorn_iters is None:
        permutations = np.eye(n, dtype=np.float32)[list(itertools.permutations(range(n)))]  # [n! from to]
        weights = jax.nn.softmax(logits, axis=0)
        return jnp.einsum("pij,pbs->ijbs", permutations, weights, precision=lax.Precision.HIGHEST)
    shares = jax.nn.softmax(logits.reshape(n, n, *logits.shape[1:]), axis=1) + c.hc_eps
    shares /= jnp.sum(shares, axis=0, keepdims=True) + c.hc_eps
    for _ in range(c.hc_sinkhorn_iters - 1):
        shares /= jnp.sum(shares, axis=1, keepdims=True) + c.hc_eps
        shares /= jnp.sum(shares, axis=0, keepdims=True) + c.hc_eps
    return shares

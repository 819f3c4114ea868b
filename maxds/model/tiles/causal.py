"""Causal attention within documents, or to selected keys.

Of a row's tiles only those are visited that are not wholly of the future, and only those are multiplied whose queries
and keys have a document in common; where it is one document, nothing is hidden. What is which is data that a kernel
reads ahead of its steps.

Of two heads in turn, one's products are written before the other's exponentials, and wait in VMEM: so the matrix units
need not. Scores are in bits, for an exponential of base 2 is one multiplication less.

Queries come as their product makes them, and are rotated here; the rotated part of keys, which all heads share, comes
once. So neither is a pass over arrays of all heads in HBM.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from maxds.model.tiles import (
    HEADS,
    KEYS,
    LANES,
    LOWEST,
    WAITING,
    block_of,
    call,
    column,
    dot,
    group_of,
    like,
    room,
    rotated,
    turned,
)

BITS = math.log2(math.e)  # of a score of 1: exp(x) is exp2(BITS * x)


class Visits(NamedTuple):
    """The tiles of a row in the order in which a kernel visits them, as arrays of int32."""

    query: np.ndarray  # block
    key: np.ndarray  # block
    first: np.ndarray  # whether it is the first of its row, or of its column
    last: np.ndarray


def by_rows(count: int) -> Visits:
    """All keys of a block of queries, then those of the next."""
    pairs = [(q, k, k == 0, k == q) for q in range(count) for k in range(q + 1)]
    return Visits(*np.array(pairs, np.int32).T)


def by_columns(begin: int, end: int) -> Visits:
    """All queries from block `begin` to `end` of a block of keys, then those of the next."""
    pairs = [(q, k, q == max(k, begin), q == end - 1) for k in range(end) for q in range(max(k, begin), end)]
    return Visits(*np.array(pairs, np.int32).T)


class Ahead(NamedTuple):
    """What a kernel reads ahead of its steps."""

    visits: Any  # Visits
    since: Any  # [B blocks] int32: of a block of queries the first block of keys that it is multiplied by
    clear: Any  # [B blocks] int32: and the first since which it sees all keys before it; None: of no queries

    def at(self, row: Any, step: Any) -> tuple[Any, Any, Any]:
        """Blocks of queries and of keys that a step visits, and the first of keys for these queries."""
        query = self.visits.query[step]
        return query, self.visits.key[step], self.since[row, query]

    def multiply(self, row: Any, step: Any, hide: Callable, hidden: Any, tile: Callable) -> None:
        """Runs tile(scores -> scores, of which some are hidden) in a step, if its queries see any of its keys.

        Args:
          row: of the batch.
          step: of the row.
          hide: (block of queries, block of keys) -> what is added to the scores.
          hidden: a reference to where that is held.
          tile: what to run.
        """
        query, key, since = self.at(row, step)
        seen = False if self.clear is None else (key >= self.clear[row, query]) & (key < query)

        @pl.when((key >= since) & jnp.logical_not(seen))
        def _():
            hidden[...] = hide(query, key)
            tile(lambda scores: scores + hidden[...])

        if self.clear is not None:
            pl.when(seen)(lambda: tile(lambda scores: scores))


def in_turn(heads: int, product: Callable, use: Callable) -> None:
    """product(h) and use(h) of each head, a head's product before what the one before is used for."""
    product(0)
    for h in range(heads):
        if h + 1 < heads:
            product(h + 1)
        use(h)


def can_attend(length: int, *, selected: bool) -> bool:
    """Whether rows of so many tokens are for `attend` and its backward pass."""
    return length % (8 * LANES if selected else LANES) == 0


@flax.struct.dataclass
class Sight:
    """What the queries of a batch see, and from where."""

    segments: Array  # [B S] int32, of documents in their order; 0: padding, of which a query need not see all before it
    selected: Array | None  # as `sparse.pack`, [B S S / 8], at least one key for each query; None: those of its segment
    cos: Array  # [B S R] float32: of the angles by which the last R dimensions of queries are rotated
    sin: Array  # [B S R]


Keys = tuple[Array, Array]
"""Of each head [B N S H - R], and the rotated R dimensions that all heads share [B S R]."""


def attend(q: Array, k: Keys, v: Array, sight: Sight, *, interpret: Any = False) -> tuple[Array, Array, Array]:
    """Causal attention within documents, or to the selected keys.

    Args:
      q: [B N S H], already multiplied by the softmax scale, and not rotated yet.
      k: the keys.
      v: [B N S Hv].
      sight: what queries see; segments are not read where keys are selected.
      interpret: as of `pallas_call`.

    Returns:
      The output [B N S Hv]; of each query the log-sum-exp of the scores, and the largest of them [B N S] float32.
    """
    (batch, heads, length, size), size_v = q.shape, v.shape[3]
    mask, group, (own, shared) = _mask(sight), group_of(heads, HEADS), k
    visits = by_rows(length // mask.block)

    def key(query, key, since):
        return jnp.maximum(key, since)  # what is not multiplied waits for the first that is

    of_query, of_key = (_blocks((group, mask.block), which) for which in (_query_block, key))
    of_row = jax.ShapeDtypeStruct((batch, heads, 1, length), jnp.float32)
    out, lse, top = call(
        functools.partial(_attend, mask.hidden),
        mask.ahead(visits),
        [
            (turned(_in_bits(q)), of_query(size)),
            *_of_all_heads(mask.block, (_query_block, sight.cos), (_query_block, sight.sin), (key, shared)),
            (turned(own), of_key(own.shape[3])),
            (turned(v), of_key(size_v)),
            *mask.given(_query_block, key),
        ],
        [(like(turned(v)), of_query(size_v)), (of_row, of_query(1)), (of_row, of_query(1))],
        [
            room(mask.block, mask.block),
            _waiting(mask.block),
            room(group, size, mask.block, dtype=q.dtype),
            *(room(group, rows, mask.block) for rows in (1, 1, size_v)),
        ],
        grid=(heads // group, batch, len(visits.query)),
        apart=(0,),
        flops=2 * batch * len(visits.query) * mask.block**2 * heads * (size + size_v),
        name=mask.kernel,
        interpret=interpret,
    )
    return turned(out), lse[:, :, 0], top[:, :, 0]


def _attend(hide, ahead, given, found, held):
    (q, cos, sin, shared, k, v, *mask), (out, lse, top) = given, found
    hidden, waiting, queries, highest, total, summed = held
    t, still = pl.program_id(2), k.shape[1]

    @pl.when(ahead.visits.first[t] == 1)
    def _():
        for h in range(len(q)):
            queries[h] = _joined(q[h, :still], rotated(q[h, still:], cos[...], sin[...]))
        highest[...] = jnp.full(highest.shape, LOWEST)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        summed[...] = jnp.zeros(summed.shape, jnp.float32)

    def tile(shaded):
        def product(h):
            waiting[h % 2] = dot(_joined(k[h], shared), queries[h], 0, 0)

        def use(h):
            scores, before = shaded(waiting[h % 2]), highest[h]
            now = jnp.maximum(before, jnp.max(scores, axis=KEYS, keepdims=True))
            weights, old = jnp.exp2(scores - now), jnp.exp2(before - now)
            highest[h] = now
            total[h] = total[h] * old + jnp.sum(weights, axis=KEYS, keepdims=True)
            summed[h] = summed[h] * old + dot(v[h], weights.astype(v.dtype), 1, 0)

        in_turn(len(q), product, use)

    ahead.multiply(pl.program_id(1), t, functools.partial(hide, mask), hidden, tile)

    @pl.when(ahead.visits.last[t] == 1)
    def _():
        top[...] = highest[...] / BITS
        lse[...] = highest[...] / BITS + jnp.log(total[...])
        out[...] = (summed[...] / total[...]).astype(out.dtype)


def attend_backward(
    q: Array, k: Keys, v: Array, sight: Sight, kept: tuple[Array, Array], dout: Array, *, interpret: Any = False
) -> tuple[Array, Keys, Array]:
    """Gradients of q, k and v, given the output and log-sum-exp, and the gradient of the output.

    Queries see the first of their keys first, and have seen all when those of their own block come, when their gradient
    is written. In between, those of all queries wait in VMEM. Where a row has more than there is room for, those of a
    band of queries do, and what bands add to the keys is summed.
    """
    mask, (out, lse), (own, shared) = _mask(sight), kept, k
    bands = _bands(q.shape[2] // mask.block, 4 * mask.block * q.shape[3])
    dtype = own.dtype if len(bands) == 1 else jnp.float32
    of_output = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    q, own, v, dout = map(turned, (_in_bits(q), own, v, dout))
    of_queries = q, lse[:, :, None] * BITS, of_output[:, :, None], dout
    found = [_of_band(band, mask, sight, of_queries, (own, shared, v), dtype, interpret) for band in bands]
    dq, *of_keys = zip(*found, strict=True)
    down, dshared, dv = map(_summed, of_keys)
    dshared = turned(jnp.sum(dshared, axis=1)).astype(shared.dtype)
    return turned(jnp.concatenate(dq, 3)), (turned(down.astype(own.dtype)), dshared), turned(dv.astype(v.dtype))


def _bands(blocks: int, size: int) -> list[tuple[int, int]]:
    """The first and last block of each of as few bands as there may be of a row, of `size` bytes a block and head."""
    count = -(-blocks // max(WAITING // size, 1))
    ends = [blocks * n // count for n in range(count + 1)]
    return list(itertools.pairwise(ends))


def _summed(of_bands: tuple[Array, ...]) -> Array:
    """The sum of arrays of the first keys of a row, each more than before, [B N H keys]."""
    total, *more = reversed(of_bands)
    for a in more:
        total = total.at[..., : a.shape[3]].add(a)
    return total


def _of_band(band, mask, sight, of_queries, of_keys, dtype, interpret):
    """Gradients of the queries of a band, and what these add to those of the keys up to its end, as `dtype`.

    To those of the shared dimensions each group of heads adds its own, float32.
    """
    (begin, end), (q, lse, of_output, dout), (k, shared, v) = band, of_queries, of_keys
    (batch, heads, size, _), size_v, tokens = q.shape, v.shape[2], (end - begin) * mask.block
    group = group_of(heads, min(HEADS, max(WAITING // (4 * tokens * size), 1)))
    visits, still, rows = by_columns(begin, end), k.shape[2], shared.shape[2]

    def query(query, key, since):
        return jnp.where(key >= since, query, jnp.clip(key + 1, begin, end - 1))  # else the first of the next keys

    def query_of_key(query, key, since):
        return jnp.maximum(key, begin) - begin

    def shape(rows, tokens, dtype, heads=heads):
        return jax.ShapeDtypeStruct((batch, heads, rows, tokens), dtype)

    which = query, query_of_key, _key_block
    of_query, found, of_key = (_blocks((group, mask.block), w) for w in which)
    return call(
        functools.partial(_attend_backward, mask.hidden, begin),
        mask.ahead(visits),
        [
            (q, of_query(size)),
            *((lse, of_query(1)), (of_output, of_query(1))),
            (dout, of_query(size_v)),
            *_of_all_heads(mask.block, (query, sight.cos), (query, sight.sin), (_key_block, shared)),
            *((k, of_key(still)), (v, of_key(size_v))),
            *mask.given(query, _key_block),
        ],
        [
            (shape(size, tokens, q.dtype), found(size)),
            (shape(still, end * mask.block, dtype), of_key(still)),
            (shape(rows, end * mask.block, jnp.float32, heads // group), _blocks((1, mask.block), _key_block)(rows)),
            (shape(size_v, end * mask.block, dtype), of_key(size_v)),
        ],
        [
            room(mask.block, mask.block),
            *[_waiting(mask.block)] * 2,
            room(end - begin, group, rows, mask.block, dtype=q.dtype),
            room(end - begin, group, size, mask.block),
            *(room(group, rows, mask.block) for rows in (size, size_v)),
        ],
        grid=(heads // group, batch, len(visits.query)),
        apart=(0,),
        flops=2 * batch * len(visits.query) * mask.block**2 * heads * (3 * size + 2 * size_v),
        name=f"{mask.kernel}_backward",
        interpret=interpret,
    )


def _attend_backward(hide, begin, ahead, given, found, held):
    (q, lse, of_output, dout, cos, sin, shared, k, v, *mask), (dq, dk, dshared, dv) = given, found
    hidden, of_scores, of_weights, turning, dqs, dks, dvs = held
    row, t, still = pl.program_id(1), pl.program_id(2), k.shape[1]
    query, key, since = ahead.at(row, t)
    own = query - begin

    @pl.when(ahead.visits.first[t] == 1)
    def _():
        dks[...] = jnp.zeros(dks.shape, jnp.float32)
        dvs[...] = jnp.zeros(dvs.shape, jnp.float32)

    @pl.when(key == since)
    def _():
        dqs[own] = jnp.zeros(dqs.shape[1:], jnp.float32)
        turning[own] = rotated(q[:, still:], cos[...], sin[...])

    def tile(shaded):
        def whole(h):
            return _joined(q[h, :still], turning[own, h])

        def product(h):
            of_scores[h % 2] = dot(_joined(k[h], shared), whole(h), 0, 0)
            of_weights[h % 2] = dot(v[h], dout[h], 0, 0)

        def use(h):
            weights = jnp.exp2(shaded(of_scores[h % 2]) - lse[h])
            dvs[h] += dot(dout[h], weights.astype(v.dtype), 1, 1)
            dscores = (weights * (of_weights[h % 2] - of_output[h])).astype(q.dtype)
            dks[h] += dot(whole(h), dscores, 1, 1)
            dqs[own, h] += dot(_joined(k[h], shared), dscores, 1, 0)

        in_turn(len(q), product, use)

    ahead.multiply(row, t, functools.partial(hide, mask), hidden, tile)

    @pl.when(query == key)
    def _():
        dq[:, :still] = dqs[own, :, :still].astype(dq.dtype)
        dq[:, still:] = rotated(dqs[own, :, still:], cos[...], -sin[...]).astype(dq.dtype)

    @pl.when(ahead.visits.last[t] == 1)
    def _():
        dk[...] = (dks[:, :still] / BITS).astype(dk.dtype)
        dshared[0] = jnp.sum(dks[:, still:], axis=0) / BITS
        dv[...] = dvs[...].astype(dv.dtype)


def _joined(own: Array, rotated: Any) -> Array:
    """A head's queries or keys, [H n]."""
    return jnp.concatenate([own, rotated[...]])


def _in_bits(q: Array) -> Array:
    """Queries whose scores are in bits."""
    return (q.astype(jnp.float32) * BITS).astype(q.dtype)


def _waiting(block: int) -> Any:
    """Room for the products of two heads."""
    return room(2, block, block)


Which = Callable[[Any, Any, Any], Any]
"""Which block a step reads, of `Ahead.at`."""


def _query_block(query, key, since):
    return query


def _key_block(query, key, since):
    return key


def _blocks(shape: tuple[int, int], which: Which) -> Callable:
    """Blocks of (heads, tokens) of an array [B heads size tokens], by its size."""

    def of_size(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, shape[0], size, shape[1]), lambda g, b, t, ahead: (b, g, 0, which(*ahead.at(b, t))))

    return of_size


def _of_all_heads(block: int, *arrays: tuple[Which, Array]) -> list[tuple[Array, pl.BlockSpec]]:
    """Arrays [B S n], with their blocks [n block]."""

    def of_array(which: Which, a: Array) -> tuple[Array, pl.BlockSpec]:
        return turned(a), pl.BlockSpec((None, a.shape[2], block), lambda g, b, t, ahead: (b, 0, which(*ahead.at(b, t))))

    return list(itertools.starmap(of_array, arrays))


class _Mask(NamedTuple):
    """What queries do not attend to."""

    kernel: str  # that this makes of attention
    block: int  # queries, and keys, of a tile
    since: Array  # as of `Ahead`
    clear: Array | None  # as of `Ahead`
    given: Callable  # (which queries, which keys) -> arrays that say it, each with its blocks
    hidden: Callable  # (references to these, block of queries, block of keys) -> [keys queries]: 0, or LOWEST to hide

    def ahead(self, visits: Visits) -> Ahead:
        """What a kernel that visits these tiles reads ahead."""
        return Ahead(jax.tree.map(jnp.asarray, visits), self.since, self.clear)


def _mask(sight: Sight) -> _Mask:
    segments, selected = sight.segments, sight.selected
    (batch, length), block = segments.shape, block_of(segments.shape[1])
    if selected is None:

        def of_both(*both: Which) -> list:
            return _of_all_heads(block, *((which, segments[:, :, None]) for which in both))

        of_blocks = segments.reshape(batch, -1, block)
        return _Mask("attend", block, _since(of_blocks), _clear(of_blocks), of_both, _not_seen)
    block = block_of(length // 8)  # keys of a tile are of one run of the selection
    run = length // 8 // block

    def of_tile(query: Which, key: Which) -> list:
        def at(g, b, t, ahead):
            seen = ahead.at(b, t)
            return b, query(*seen), lax.rem(key(*seen), run)

        return [(selected, pl.BlockSpec((None, block, block), at))]

    since = jnp.zeros((batch, length // block), jnp.int32)
    return _Mask("attend_selected", block, since, None, of_tile, functools.partial(_not_selected, run))


def _since(segments: Array) -> Array:
    """[B blocks block] -> [B blocks]: the first block that ends no earlier than the first document of this one begins.

    Of a block of padding alone, itself.
    """
    last = lax.cummax(jnp.max(segments, axis=2), axis=1)
    real = jnp.where(segments > 0, segments, jnp.iinfo(segments.dtype).max)
    before = jnp.sum(last[:, None] < jnp.min(real, axis=2)[:, :, None], axis=2, dtype=jnp.int32)
    return jnp.minimum(before, jnp.arange(segments.shape[1], dtype=jnp.int32))


def _clear(segments: Array) -> Array:
    """[B blocks block] -> [B blocks]: the first block since which all tokens are of the one document of this one.

    Of a block with more than one, or with padding, itself.
    """
    low, high = jnp.min(segments, axis=2), jnp.max(segments, axis=2)
    own = jnp.where((low == high) & (low > 0), low, -1)
    alike = (own[:, :, None] == low[:, None]) & (own[:, :, None] == high[:, None])
    block = jnp.arange(segments.shape[1], dtype=jnp.int32)
    other = jnp.where(~alike & (block < block[:, None]), block + 1, 0)
    return jnp.max(other, axis=2)


def _not_seen(segments, query, key):
    of_query, of_key = segments[0][...].astype(jnp.float32), column(segments[1][...])
    size = of_query.shape[1]
    later = lax.broadcasted_iota(jnp.int32, (size, size), 0) > lax.broadcasted_iota(jnp.int32, (size, size), 1)
    return jnp.where((of_key != of_query) | (later & (query == key)), LOWEST, 0.0)


def _not_selected(run, bits, _, key):
    seen = lax.shift_right_logical(bits[0][...].astype(jnp.int32), lax.div(key, run)) & 1
    return (LOWEST * (1 - seen).astype(jnp.float32)).T

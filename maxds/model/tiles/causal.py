"""Causal attention within documents, or to selected keys.

Of a sequence's tiles only those are visited that are not wholly of the future; the list of them is data that a kernel
reads ahead of its steps.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from maxds.model.tiles import HEADS, KEYS, LANES, LOWEST, WAITING, block_of, call, column, dot, group_of, like, turned

HEADS_BACKWARD = 4  # that share a step of the backward pass, at most


class Visits(NamedTuple):
    """The tiles of a sequence in the order in which a kernel visits them, as arrays of int32."""

    query: np.ndarray  # block
    key: np.ndarray  # block
    first: np.ndarray  # whether it is the first of its row, or of its column
    last: np.ndarray


def by_rows(count: int) -> Visits:
    """All keys of a block of queries, then those of the next."""
    pairs = [(q, k, k == 0, k == q) for q in range(count) for k in range(q + 1)]
    return Visits(*np.array(pairs, np.int32).T)


def by_columns(count: int) -> Visits:
    """All queries of a block of keys, then those of the next."""
    pairs = [(q, k, q == k, q == count - 1) for k in range(count) for q in range(k, count)]
    return Visits(*np.array(pairs, np.int32).T)


def can_attend(length: int, size: int, *, selected: bool) -> bool:
    """Whether rows of so many tokens, of heads of this size, are for `attend` and its backward pass."""
    return length % (8 * LANES if selected else LANES) == 0 and 4 * length * size <= WAITING


def attend(
    q: Array, k: Array, v: Array, segments: Array, selected: Array | None, *, interpret: Any = False
) -> tuple[Array, Array, Array]:
    """Causal attention within documents, or to the selected keys, of one row.

    Args:
      q: [N S H], already multiplied by the softmax scale.
      k: [N S H].
      v: [N S Hv].
      segments: [S] int32; not read where keys are selected.
      selected: as `sparse.pack`, [S S / 8], at least one for each query; None: all of the query's segment up to it.
      interpret: as of `pallas_call`.

    Returns:
      The output [N S Hv]; of each query the log-sum-exp of the scores, and the largest of them [N S] float32.
    """
    (heads, length, size), size_v = q.shape, v.shape[2]
    mask, group = _mask(segments, selected), group_of(heads, HEADS)
    visits, (of_query, of_key) = by_rows(length // mask.block), _places(group, mask.block)
    of_row = jax.ShapeDtypeStruct((heads, 1, length), jnp.float32)
    out, lse, top = call(
        functools.partial(_attend, mask.hidden),
        jax.tree.map(jnp.asarray, visits),
        [(turned(q), of_query(size)), (turned(k), of_key(size)), (turned(v), of_key(size_v)), *mask.given],
        [(like(turned(v)), of_query(size_v)), (of_row, of_query(1)), (of_row, of_query(1))],
        [(mask.block, mask.block), *((group, rows, mask.block) for rows in (1, 1, size_v))],
        grid=(heads // group, len(visits.query)),
        flops=2 * len(visits.query) * mask.block**2 * heads * (size + size_v),
        name="attend",
        interpret=interpret,
    )
    return turned(out), lse[:, 0], top[:, 0]


def _attend(hide, visits, given, found, held):
    (q, k, v, *mask), (out, lse, top), (hidden, highest, total, summed) = given, found, held
    t = pl.program_id(1)
    hidden[...] = hide(mask, visits.query[t], visits.key[t])

    @pl.when(visits.first[t] == 1)
    def _():
        highest[...] = jnp.full(highest.shape, LOWEST)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        summed[...] = jnp.zeros(summed.shape, jnp.float32)

    for h in range(len(q)):
        scores = dot(k[h], q[h], 0, 0) + hidden[...]
        before = highest[h]
        now = jnp.maximum(before, jnp.max(scores, axis=KEYS, keepdims=True))
        weights, old = jnp.exp(scores - now), jnp.exp(before - now)
        highest[h] = now
        total[h] = total[h] * old + jnp.sum(weights, axis=KEYS, keepdims=True)
        summed[h] = summed[h] * old + dot(v[h], weights.astype(v.dtype), 1, 0)

    @pl.when(visits.last[t] == 1)
    def _():
        top[...] = highest[...]
        lse[...] = highest[...] + jnp.log(total[...])
        out[...] = (summed[...] / total[...]).astype(out.dtype)


def attend_backward(
    q: Array,
    k: Array,
    v: Array,
    which: tuple[Array, Array | None],
    kept: tuple[Array, Array],
    dout: Array,
    *,
    interpret: Any = False,
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v, given (segments, selected), output and log-sum-exp, and the gradient of the output.

    Queries see the first keys first, and have seen all when those of their own block come: so what they need of their
    output is made then, and their gradient is written then. In between, those of all queries wait in VMEM.
    """
    (heads, length, size), size_v, (out, lse) = q.shape, v.shape[2], kept
    mask, group = _mask(*which), group_of(heads, min(HEADS_BACKWARD, WAITING // (4 * length * size)))
    visits, (of_query, of_key) = by_columns(length // mask.block), _places(group, mask.block)
    blocks = length // mask.block
    at_first = pl.BlockSpec(
        (group, size_v, mask.block),
        lambda g, t, visits: (g, 0, jnp.where(visits.key[t] == 0, visits.query[t], blocks - 1)),
    )
    q, k, v, out, dout = map(turned, (q, k, v, out, dout))
    of_queries = [(q, of_query(size)), (lse[:, None], of_query(1)), (out, at_first), (dout, of_query(size_v))]
    dq, dk, dv = call(
        functools.partial(_attend_backward, mask.hidden),
        jax.tree.map(jnp.asarray, visits),
        [*of_queries, (k, of_key(size)), (v, of_key(size_v)), *mask.given],
        [(like(q), of_key(size)), (like(k), of_key(size)), (like(v), of_key(size_v))],
        [
            (mask.block, mask.block),
            *((blocks, group, rows, mask.block) for rows in (1, size)),
            *((group, rows, mask.block) for rows in (size, size_v)),
        ],
        grid=(heads // group, len(visits.query)),
        flops=2 * len(visits.query) * mask.block**2 * heads * (3 * size + 2 * size_v),
        name="attend_backward",
        interpret=interpret,
    )
    return turned(dq), turned(dk), turned(dv)


def _attend_backward(hide, visits, given, found, held):
    (q, lse, out, dout, k, v, *mask), (dq, dk, dv), (hidden, deltas, dqs, dks, dvs) = given, found, held
    t = pl.program_id(1)
    query, key = visits.query[t], visits.key[t]
    hidden[...] = hide(mask, query, key)

    @pl.when(visits.first[t] == 1)
    def _():
        dks[...] = jnp.zeros(dks.shape, jnp.float32)
        dvs[...] = jnp.zeros(dvs.shape, jnp.float32)

    @pl.when(key == 0)
    def _():
        dqs[query] = jnp.zeros(dqs.shape[1:], jnp.float32)
        products = out[...].astype(jnp.float32) * dout[...].astype(jnp.float32)
        deltas[query] = jnp.sum(products, axis=1, keepdims=True)

    for h in range(len(q)):
        weights = jnp.exp(dot(k[h], q[h], 0, 0) + hidden[...] - lse[h])
        dvs[h] += dot(dout[h], weights.astype(v.dtype), 1, 1)
        dscores = (weights * (dot(v[h], dout[h], 0, 0) - deltas[query, h])).astype(q.dtype)
        dks[h] += dot(q[h], dscores, 1, 1)
        dqs[query, h] += dot(k[h], dscores, 1, 0)

    @pl.when(visits.first[t] == 1)
    def _():
        dq[...] = dqs[query].astype(dq.dtype)

    @pl.when(visits.last[t] == 1)
    def _():
        dk[...] = dks[...].astype(dk.dtype)
        dv[...] = dvs[...].astype(dv.dtype)


def _places(group: int, block: int) -> tuple[Callable, Callable]:
    """Blocks of an array [heads size tokens], by its size: of the queries, and of the keys, that a step reads."""

    def of_query(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((group, size, block), lambda g, t, visits: (g, 0, visits.query[t]))

    def of_key(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((group, size, block), lambda g, t, visits: (g, 0, visits.key[t]))

    return of_query, of_key


class _Mask(NamedTuple):
    """What queries do not attend to."""

    block: int  # queries, and keys, of a tile
    given: list  # arrays that say it, each with its blocks
    hidden: Callable  # (references to these, block of queries, block of keys) -> [keys queries]: 0, or LOWEST to hide


def _mask(segments: Array, selected: Array | None) -> _Mask:
    if selected is None:
        block = block_of(len(segments))
        of_query = pl.BlockSpec((1, block), lambda g, t, visits: (0, visits.query[t]))
        of_key = pl.BlockSpec((1, block), lambda g, t, visits: (0, visits.key[t]))
        return _Mask(block, [(segments[None], of_query), (segments[None], of_key)], _not_seen)
    block = block_of(len(segments) // 8)  # keys of a tile are of one run of the selection
    run = len(segments) // 8 // block
    bits = pl.BlockSpec((block, block), lambda g, t, visits: (visits.query[t], lax.rem(visits.key[t], run)))
    return _Mask(block, [(selected, bits)], functools.partial(_not_selected, run))


def _not_seen(segments, query, key):
    of_query, of_key = segments[0][...].astype(jnp.float32), column(segments[1][...])
    size = of_query.shape[1]
    later = lax.broadcasted_iota(jnp.int32, (size, size), 0) > lax.broadcasted_iota(jnp.int32, (size, size), 1)
    return jnp.where((of_key != of_query) | (later & (query == key)), LOWEST, 0.0)


def _not_selected(run, bits, _, key):
    seen = lax.shift_right_logical(bits[0][...].astype(jnp.int32), lax.div(key, run)) & 1
    return (LOWEST * (1 - seen).astype(jnp.float32)).T

"""Kernels of our own for TPU: tiles of queries by keys, whose scores never leave VMEM.

Tokens lie along the lanes, in arrays [heads size tokens] and in tiles [keys queries]: so heads of 192 are not padded to
256, and what belongs to a query is spread over a tile without moving between lanes. Of a sequence's tiles only those
are visited that are not wholly of the future; the list of them is data that a kernel reads ahead of its steps. Several
heads share a step, and the mask of its tile.

Functions take and give arrays of one row of the batch, [heads tokens size]; `jax.vmap` makes a batch of it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
MOST = 512  # of queries, and of keys, in a tile
HEADS, HEADS_BACKWARD = 8, 4  # that share a step, at most
VMEM, WAITING = 60 * 2**20, 32 * 2**20  # bytes that a kernel may use, and of these the gradients of queries that wait
LOWEST = -1e30  # stands for minus infinity, of which a difference would not be a number
KEYS = 0  # dimension of a tile; queries are 1


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


# ------------------------------------------------------------------------------------------ attention


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
    mask, group = _mask(segments, selected), _group(heads, HEADS)
    visits, (of_query, of_key) = by_rows(length // mask.block), _places(group, mask.block)
    of_row = jax.ShapeDtypeStruct((heads, 1, length), jnp.float32)
    out, lse, top = _call(
        functools.partial(_attend, mask.hidden),
        jax.tree.map(jnp.asarray, visits),
        [(_turned(q), of_query(size)), (_turned(k), of_key(size)), (_turned(v), of_key(size_v)), *mask.given],
        [(_like(_turned(v)), of_query(size_v)), (of_row, of_query(1)), (of_row, of_query(1))],
        [(mask.block, mask.block), *((group, rows, mask.block) for rows in (1, 1, size_v))],
        grid=(heads // group, len(visits.query)),
        flops=2 * len(visits.query) * mask.block**2 * heads * (size + size_v),
        name="attend",
        interpret=interpret,
    )
    return _turned(out), lse[:, 0], top[:, 0]


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
        scores = _dot(k[h], q[h], 0, 0) + hidden[...]
        before = highest[h]
        now = jnp.maximum(before, jnp.max(scores, axis=KEYS, keepdims=True))
        weights, old = jnp.exp(scores - now), jnp.exp(before - now)
        highest[h] = now
        total[h] = total[h] * old + jnp.sum(weights, axis=KEYS, keepdims=True)
        summed[h] = summed[h] * old + _dot(v[h], weights.astype(v.dtype), 1, 0)

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
    mask, group = _mask(*which), _group(heads, min(HEADS_BACKWARD, WAITING // (4 * length * size)))
    visits, (of_query, of_key) = by_columns(length // mask.block), _places(group, mask.block)
    blocks = length // mask.block
    at_first = pl.BlockSpec(
        (group, size_v, mask.block),
        lambda g, t, visits: (g, 0, jnp.where(visits.key[t] == 0, visits.query[t], blocks - 1)),
    )
    q, k, v, out, dout = map(_turned, (q, k, v, out, dout))
    of_queries = [(q, of_query(size)), (lse[:, None], of_query(1)), (out, at_first), (dout, of_query(size_v))]
    dq, dk, dv = _call(
        functools.partial(_attend_backward, mask.hidden),
        jax.tree.map(jnp.asarray, visits),
        [*of_queries, (k, of_key(size)), (v, of_key(size_v)), *mask.given],
        [(_like(q), of_key(size)), (_like(k), of_key(size)), (_like(v), of_key(size_v))],
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
    return _turned(dq), _turned(dk), _turned(dv)


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
        weights = jnp.exp(_dot(k[h], q[h], 0, 0) + hidden[...] - lse[h])
        dvs[h] += _dot(dout[h], weights.astype(v.dtype), 1, 1)
        dscores = (weights * (_dot(v[h], dout[h], 0, 0) - deltas[query, h])).astype(q.dtype)
        dks[h] += _dot(q[h], dscores, 1, 1)
        dqs[query, h] += _dot(k[h], dscores, 1, 0)

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
        block = _block(len(segments))
        of_query = pl.BlockSpec((1, block), lambda g, t, visits: (0, visits.query[t]))
        of_key = pl.BlockSpec((1, block), lambda g, t, visits: (0, visits.key[t]))
        return _Mask(block, [(segments[None], of_query), (segments[None], of_key)], _not_seen)
    block = _block(len(segments) // 8)  # keys of a tile are of one run of the selection
    run = len(segments) // 8 // block
    bits = pl.BlockSpec((block, block), lambda g, t, visits: (visits.query[t], lax.rem(visits.key[t], run)))
    return _Mask(block, [(selected, bits)], functools.partial(_not_selected, run))


def _not_seen(segments, query, key):
    of_query, of_key = (a[...].astype(jnp.float32) for a in segments)
    size = of_query.shape[1]
    of_key = jnp.broadcast_to(of_key, (LANES, size)).T[:, :1]
    later = lax.broadcasted_iota(jnp.int32, (size, size), 0) > lax.broadcasted_iota(jnp.int32, (size, size), 1)
    return jnp.where((of_key != of_query) | (later & (query == key)), LOWEST, 0.0)


def _not_selected(run, bits, _, key):
    seen = lax.shift_right_logical(bits[0][...].astype(jnp.int32), lax.div(key, run)) & 1
    return (LOWEST * (1 - seen).astype(jnp.float32)).T


# ------------------------------------------------------------------------------- scores of many heads, summed


def can_sum(queries: int, keys: int) -> bool:
    """Whether a block of queries and so many keys divide into tiles."""
    return queries % LANES == 0 and queries <= MOST and keys % LANES == 0


def index_scores(q: Array, heads: Array, k: Array, limit: Array, *, interpret: Any = False) -> Array:
    """As `scores.index_scores`, of one row: [I Q H], [I Q], [Z H] -> [Q Z]; 0 in blocks of keys from `limit` on."""
    return _summed(len(k), lambda dots, head: head * jnp.maximum(dots, 0), (q, heads, k[None]), limit, interpret)


def attention_to(count: int, q: Array, lse: Array, k: Array, limit: Array, *, interpret: Any = False) -> Array:
    """As `scores.attention_to`, of one row: [N Q H], [N Q], [N Z H] or [1 Z H] -> [Q count]; 0 as in `index_scores`."""
    return _summed(count, lambda dots, lse: jnp.exp(dots - lse), (q, lse, k), limit, interpret)


def _summed(count: int, weigh: Callable, given: tuple[Array, ...], limit: Array, interpret: Any) -> Array:
    """The sum over heads of weigh(scores, what belongs to the query), of the first `count` keys."""
    q, of_query, k = given
    (heads, queries, size), of_heads = q.shape, len(k)
    block, group = _block(count), _group(heads, HEADS)
    at_head, at_key = _until(block)
    keys = pl.BlockSpec((min(group, of_heads), size, block), lambda j, g, limit: (
        at_head(j, g if of_heads > 1 else 0, limit), 0, at_key(j, g, limit)
    ))  # fmt: skip
    (total,) = _call(
        functools.partial(_add_heads, weigh),
        limit[None],
        [
            (_turned(q), pl.BlockSpec((group, size, queries), lambda *at: (at_head(*at), 0, 0))),
            (of_query[:, None], pl.BlockSpec((group, 1, queries), lambda *at: (at_head(*at), 0, 0))),
            (_turned(k), keys),
        ],
        [(jax.ShapeDtypeStruct((queries, count), jnp.float32), pl.BlockSpec((queries, block), lambda j, *_: (0, j)))],
        [(block, queries)],
        grid=(count // block, heads // group),
        flops=_flops_of_block(queries, count) * heads * size,
        name="sum_heads",
        interpret=interpret,
    )
    return total


def _add_heads(weigh, limit, given, found, held):
    (q, of_query, k), (out,), (total,) = given, found, held
    j, g = pl.program_id(0), pl.program_id(1)

    @pl.when(g == 0)
    def _():
        total[...] = jnp.zeros(total.shape, jnp.float32)

    @pl.when(j * len(total) < limit[0])
    def _():
        for h in range(len(q)):
            total[...] += weigh(_dot(k[min(h, len(k) - 1)], q[h], 0, 0), of_query[h])

    @pl.when(g == pl.num_programs(1) - 1)
    def _():
        out[...] = total[...].T


def index_scores_backward(
    q: Array, heads: Array, k: Array, dscores: Array, limit: Array, *, interpret: Any = False
) -> tuple[Array, Array, Array]:
    """As `scores.index_scores_backward`, of one row: [I Q H], [I Q], [Z H], [Q Z] -> [I Q H], [I Q], [Z H].

    Nothing is read of blocks of keys from `limit` on, and their gradient is 0.
    """
    (count, queries, size), keys = q.shape, k.shape[0]
    block, group = _block(keys), _group(count, HEADS)
    steps = keys // block, count // group
    at_head, at_key = _until(block)

    def when_last(j, g, _):
        return jnp.where(j == steps[0] - 1, g, 0), 0, 0

    q, heads, k = _turned(q), heads[:, None], _turned(k)
    of_query, per_query, of_key = (group, size, queries), (group, 1, queries), (size, block)
    dq, dheads, dk = _call(
        _index_scores_backward,
        limit[None],
        [
            (q, pl.BlockSpec(of_query, lambda *at: (at_head(*at), 0, 0))),
            (heads, pl.BlockSpec(per_query, lambda *at: (at_head(*at), 0, 0))),
            (k, pl.BlockSpec(of_key, lambda *at: (0, at_key(*at)))),
            (dscores, pl.BlockSpec((queries, block), lambda *at: (0, at_key(*at)))),
        ],
        [
            (_like(q), pl.BlockSpec(of_query, when_last)),
            (_like(heads), pl.BlockSpec(per_query, when_last)),
            (jax.ShapeDtypeStruct(k.shape, jnp.float32), pl.BlockSpec(of_key, lambda j, *_: (0, j))),
        ],
        [(block, queries), (steps[1], *of_query), (steps[1], *per_query)],
        grid=steps,
        flops=_flops_of_block(queries, keys) * count * 3 * size,
        name="index_scores_backward",
        interpret=interpret,
    )
    return _turned(dq), dheads[:, 0], _turned(dk)


def _index_scores_backward(limit, given, found, held):
    (q, heads, k, dscores), (dq, dheads, dk), (turned, dqs, dheads_all) = given, found, held
    j, g = pl.program_id(0), pl.program_id(1)

    @pl.when(g == 0)
    def _():
        turned[...] = dscores[...].T
        dk[...] = jnp.zeros(dk.shape, jnp.float32)

    @pl.when(j == 0)
    def _():
        dqs[g] = jnp.zeros(dqs.shape[1:], jnp.float32)
        dheads_all[g] = jnp.zeros(dheads_all.shape[1:], jnp.float32)

    @pl.when(j * len(turned) < limit[0])
    def _():
        for h in range(len(q)):
            dots = _dot(k[...], q[h], 0, 0)
            ddots = jnp.where(dots > 0, turned[...] * heads[h], 0).astype(k.dtype)
            dheads_all[g, h] += jnp.sum(turned[...] * jnp.maximum(dots, 0), axis=KEYS, keepdims=True)
            dk[...] += _dot(q[h], ddots, 1, 1)
            dqs[g, h] += _dot(k[...], ddots, 1, 0)

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        dheads[...] = dheads_all[g]
        dq[...] = dqs[g].astype(dq.dtype)


def _flops_of_block(queries: int, keys: int) -> int:
    """Of a product that is one wide: in two spans of a sequence, blocks see two thirds of their keys on average."""
    return 2 * queries * keys * 2 // 3


def _until(block: int) -> tuple[Callable, Callable]:
    """Which heads and which keys a step reads; in blocks of keys from the limit on, those that it has at hand."""

    def at_head(j, g, limit):
        return jnp.where(j * block < limit[0], g, 0)

    def at_key(j, _, limit):
        return jnp.where(j * block < limit[0], j, 0)

    return at_head, at_key


# ------------------------------------------------------------------------------------------------ all


def _call(kernel: Callable, ahead: Any, given: list, found: list, held: list, **how: Any) -> tuple:
    """Runs kernel(ahead, given, found, held) in each step of a grid.

    Args:
      kernel: gets references.
      ahead: what is read ahead of steps; also by what says which block of an array is in VMEM.
      given: arrays, each with its blocks.
      found: shapes of results, each with its blocks.
      held: shapes of what stays in VMEM from step to step, float32.
      **how: `grid`, its extents; `flops` of all products; `name` and `interpret`, as of `pallas_call`.
    """
    moved = [a for a, _ in (*given, *found)]
    bytes_moved = sum(a.size * a.dtype.itemsize for a in moved)
    arrays = tuple(_signed(a) if a.dtype == jnp.uint8 else a for a, _ in given)
    (results,) = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=how["grid"],
            in_specs=[tuple(blocks for _, blocks in given)],
            out_specs=[tuple(blocks for _, blocks in found)],
            scratch_shapes=[tuple(pltpu.VMEM(shape, jnp.float32) for shape in held)],
        ),
        out_shape=[tuple(shape for shape, _ in found)],
        cost_estimate=pl.CostEstimate(flops=how["flops"], transcendentals=0, bytes_accessed=bytes_moved),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM),
        name=how["name"],
        interpret=how["interpret"],
    )(ahead, arrays)
    return results


def _signed(selected: Array) -> Array:
    """Bytes as Mosaic knows them."""
    return lax.bitcast_convert_type(selected, jnp.int8)


def _turned(x: Array) -> Array:
    """Tokens to the last place, or back."""
    return jnp.swapaxes(x, -1, -2)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _block(length: int) -> int:
    """Queries, and keys, of a tile."""
    return max(size for size in (LANES, 2 * LANES, MOST) if length % size == 0)


def _group(heads: int, most: int) -> int:
    return max(size for size in range(1, most + 1) if heads % size == 0)


def _dot(x: Array, y: Array, over_x: int, over_y: int) -> Array:
    return lax.dot_general(x, y, (((over_x,), (over_y,)), ((), ())), preferred_element_type=jnp.float32)

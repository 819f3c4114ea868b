"""Scores of many heads, summed over them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from maxds.model.tiles import HEADS, KEYS, LANES, MOST, Turn, block_of, call, dot, group_of, ready, room, turned


@flax.struct.dataclass
class Cut:
    """Which of a row's queries and keys."""

    ahead: Array  # [2] int32: of keys, in blocks from which on nothing is read; of queries, which block
    queries: int = flax.struct.field(pytree_node=False)  # Q, of a block


def can_sum(queries: int, keys: int) -> bool:
    """Whether a block of queries and so many keys divide into tiles."""
    return queries % LANES == 0 and queries <= MOST and keys % LANES == 0


def index_scores(q: Array, heads: Array, k: Array, cut: Cut, *, interpret: Any = False) -> Array:
    """As `scores.index_scores`, of a row's block of queries: [I S H], [I S], [Z H] -> [Q Z]; 0 of keys not read."""

    def weigh(dots: Array, head: Array) -> Array:
        return head * jnp.maximum(dots, 0)

    return _summed(_Sum(len(k), weigh), (q, heads, k[None], None), cut, interpret)


def attention_to(
    count: int, q: Array, lse: Array, k: Array, turn: Turn | None, cut: Cut, *, interpret: Any = False
) -> Array:
    """As `scores.attention_to`, of [N S H], [N S], [N Z H] or [1 Z H] -> [Q count]; else as `index_scores`.

    Queries are made ready by `turn`, if it is given.
    """

    def weigh(dots: Array, lse: Array) -> Array:
        return jnp.exp(dots - lse)

    return _summed(_Sum(count, weigh, turn and turn.eps), (q, lse, k, turn), cut, interpret)


class _Sum(NamedTuple):
    """Over heads, of weigh(scores, what belongs to the query)."""

    count: int  # of the keys, the first so many
    weigh: Callable
    eps: float | None = None  # of the norm of queries that are not ready


def _summed(s: _Sum, given: tuple, cut: Cut, interpret: Any) -> Array:
    q, of_query, k, turn = given
    (heads, _, size), of_heads, queries = q.shape, len(k), cut.queries
    block, group = block_of(s.count), group_of(heads, HEADS)
    at_head, at_query, at_key = _until(block)
    keys = pl.BlockSpec((min(group, of_heads), size, block), lambda j, g, ahead: (
        at_head(j, g if of_heads > 1 else 0, ahead), 0, at_key(j, g, ahead)
    ))  # fmt: skip
    angles = [] if turn is None else [turned(turn.cos), turned(turn.sin)]
    (total,) = call(
        functools.partial(_add_heads, s),
        cut.ahead,
        [
            (turned(q), pl.BlockSpec((group, size, queries), at_query)),
            (of_query[:, None], pl.BlockSpec((group, 1, queries), at_query)),
            (turned(k), keys),
            *((a, pl.BlockSpec((len(a), queries), lambda *at: (0, at[-1][1]))) for a in angles),
        ],
        [(jax.ShapeDtypeStruct((queries, s.count), jnp.float32), pl.BlockSpec((queries, block), _column))],
        [room(block, queries)],
        grid=(s.count // block, heads // group),
        flops=_flops_of_block(queries, s.count) * heads * size,
        unread=_of_other_blocks(queries, q, of_query),
        name="sum_heads",
        interpret=interpret,
    )
    return total


def _add_heads(s, ahead, given, found, held):
    (q, of_query, k, *angles), (out,), (total,) = given, found, held
    j, g = pl.program_id(0), pl.program_id(1)

    def made_ready(x: Array) -> Array:
        return x if s.eps is None else ready(x, angles[0][...], angles[1][...], s.eps)[0]

    @pl.when(g == 0)
    def _():
        total[...] = jnp.zeros(total.shape, jnp.float32)

    @pl.when(j * len(total) < ahead[0])
    def _():
        for h in range(len(q)):
            total[...] += s.weigh(dot(k[min(h, len(k) - 1)], made_ready(q[h]), 0, 0), of_query[h])

    @pl.when(g == pl.num_programs(1) - 1)
    def _():
        out[...] = total[...].T


def index_scores_backward(
    q: Array, heads: Array, k: Array, dscores: Array, cut: Cut, *, interpret: Any = False
) -> tuple[Array, Array, Array]:
    """As `scores.index_scores_backward`, of [I S H], [I S], [Z H], [Q Z] -> [I Q H], [I Q], [Z H].

    The gradient of keys that are not read is 0.
    """
    (count, _, size), (queries, keys) = q.shape, dscores.shape
    block, group = block_of(keys), group_of(count, HEADS)
    steps = keys // block, count // group
    _, at_query, at_key = _until(block)

    def when_last(j, g, _):
        return jnp.where(j == steps[0] - 1, g, 0), 0, 0

    of_query, per_query, of_key = (group, size, queries), (group, 1, queries), (size, block)
    dq, dheads, dk = call(
        _index_scores_backward,
        cut.ahead,
        [
            (turned(q), pl.BlockSpec(of_query, at_query)),
            (heads[:, None], pl.BlockSpec(per_query, at_query)),
            (turned(k), pl.BlockSpec(of_key, lambda *at: (0, at_key(*at)))),
            (dscores, pl.BlockSpec((queries, block), lambda *at: (0, at_key(*at)))),
        ],
        [
            (jax.ShapeDtypeStruct((count, size, queries), q.dtype), pl.BlockSpec(of_query, when_last)),
            (jax.ShapeDtypeStruct((count, 1, queries), jnp.float32), pl.BlockSpec(per_query, when_last)),
            (jax.ShapeDtypeStruct((size, keys), jnp.float32), pl.BlockSpec(of_key, _column)),
        ],
        [room(block, queries), room(steps[1], *of_query), room(steps[1], *per_query)],
        grid=steps,
        flops=_flops_of_block(queries, keys) * count * 3 * size,
        unread=_of_other_blocks(queries, q, heads),
        name="index_scores_backward",
        interpret=interpret,
    )
    return turned(dq), dheads[:, 0], turned(dk)


def _index_scores_backward(ahead, given, found, held):
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

    @pl.when(j * len(turned) < ahead[0])
    def _():
        for h in range(len(q)):
            dots = dot(k[...], q[h], 0, 0)
            ddots = jnp.where(dots > 0, turned[...] * heads[h], 0).astype(k.dtype)
            dheads_all[g, h] += jnp.sum(turned[...] * jnp.maximum(dots, 0), axis=KEYS, keepdims=True)
            dk[...] += dot(q[h], ddots, 1, 1)
            dqs[g, h] += dot(k[...], ddots, 1, 0)

    @pl.when(j == pl.num_programs(0) - 1)
    def _():
        dheads[...] = dheads_all[g]
        dq[...] = dqs[g].astype(dq.dtype)


def _column(j, *_):
    """The block of keys [n keys] of a step."""
    return 0, j


def _flops_of_block(queries: int, keys: int) -> int:
    """Of a product that is one wide: in two spans of a sequence, blocks see two thirds of their keys on average."""
    return 2 * queries * keys * 2 // 3


def _of_other_blocks(queries: int, *arrays: Array) -> int:
    """Bytes of arrays [n S …] of other queries."""
    return sum(a.size // a.shape[1] * (a.shape[1] - queries) * a.dtype.itemsize for a in arrays)


def _until(block: int) -> tuple[Callable, Callable, Callable]:
    """Which heads, block of queries by heads, and keys a step reads; from the limit of keys on, those at hand."""

    def at_head(j, g, ahead):
        return jnp.where(j * block < ahead[0], g, 0)

    def at_query(j, g, ahead):
        return at_head(j, g, ahead), 0, ahead[1]

    def at_key(j, _, ahead):
        return jnp.where(j * block < ahead[0], j, 0)

    return at_head, at_query, at_key

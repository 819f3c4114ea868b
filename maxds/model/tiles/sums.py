"""Scores of many heads, summed over them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from maxds.model.tiles import HEADS, KEYS, LANES, MOST, block_of, call, dot, group_of, like, room, turned


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
    block, group = block_of(count), group_of(heads, HEADS)
    at_head, at_key = _until(block)
    keys = pl.BlockSpec((min(group, of_heads), size, block), lambda j, g, limit: (
        at_head(j, g if of_heads > 1 else 0, limit), 0, at_key(j, g, limit)
    ))  # fmt: skip
    (total,) = call(
        functools.partial(_add_heads, weigh),
        limit[None],
        [
            (turned(q), pl.BlockSpec((group, size, queries), lambda *at: (at_head(*at), 0, 0))),
            (of_query[:, None], pl.BlockSpec((group, 1, queries), lambda *at: (at_head(*at), 0, 0))),
            (turned(k), keys),
        ],
        [(jax.ShapeDtypeStruct((queries, count), jnp.float32), pl.BlockSpec((queries, block), lambda j, *_: (0, j)))],
        [room(block, queries)],
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
            total[...] += weigh(dot(k[min(h, len(k) - 1)], q[h], 0, 0), of_query[h])

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
    block, group = block_of(keys), group_of(count, HEADS)
    steps = keys // block, count // group
    at_head, at_key = _until(block)

    def when_last(j, g, _):
        return jnp.where(j == steps[0] - 1, g, 0), 0, 0

    q, heads, k = turned(q), heads[:, None], turned(k)
    of_query, per_query, of_key = (group, size, queries), (group, 1, queries), (size, block)
    dq, dheads, dk = call(
        _index_scores_backward,
        limit[None],
        [
            (q, pl.BlockSpec(of_query, lambda *at: (at_head(*at), 0, 0))),
            (heads, pl.BlockSpec(per_query, lambda *at: (at_head(*at), 0, 0))),
            (k, pl.BlockSpec(of_key, lambda *at: (0, at_key(*at)))),
            (dscores, pl.BlockSpec((queries, block), lambda *at: (0, at_key(*at)))),
        ],
        [
            (like(q), pl.BlockSpec(of_query, when_last)),
            (like(heads), pl.BlockSpec(per_query, when_last)),
            (jax.ShapeDtypeStruct(k.shape, jnp.float32), pl.BlockSpec(of_key, lambda j, *_: (0, j))),
        ],
        [room(block, queries), room(steps[1], *of_query), room(steps[1], *per_query)],
        grid=steps,
        flops=_flops_of_block(queries, keys) * count * 3 * size,
        name="index_scores_backward",
        interpret=interpret,
    )
    return turned(dq), dheads[:, 0], turned(dk)


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
            dots = dot(k[...], q[h], 0, 0)
            ddots = jnp.where(dots > 0, turned[...] * heads[h], 0).astype(k.dtype)
            dheads_all[g, h] += jnp.sum(turned[...] * jnp.maximum(dots, 0), axis=KEYS, keepdims=True)
            dk[...] += dot(q[h], ddots, 1, 1)
            dqs[g, h] += dot(k[...], ddots, 1, 0)

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

"""Attention to a window of tokens and to entries beside it, with one key, which is also the value, for all heads.

Queries of several heads share their keys, and so lie side by side along the lanes of a tile. In the first step of a
block of queries the keys are the tokens of its windows, and the entries if these are few; in each further one a block
of entries.

Queries come as their product makes them, and are made ready here: so that is no pass over arrays of all heads in HBM.
"""

import functools
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
    MOST,
    WAITING,
    Turn,
    block_of,
    call,
    column,
    dot,
    group_of,
    like,
    ready,
    room,
    rotated_last,
    turned,
)

NOWHERE = -1  # segment of entries that are not there
ROWS = 32  # of a tile: few entries are multiplied as whole ones


@flax.struct.dataclass
class Sight:
    """What the queries of one row can attend to."""

    segments: Array  # [S] int32
    entries: Array  # [E] int32: their segments
    last: Array  # [E] int32: where in the row their last token is
    selected: Array | None  # as `sparse.pack`, [S ceil(E / 8)]: the entries that are attended to; None: all
    turn: Turn  # [S R]: of the queries
    window: int = flax.struct.field(pytree_node=False)  # tokens, the query's own included
    ratio: int = flax.struct.field(pytree_node=False)  # tokens of an entry


class Plan(NamedTuple):
    """How the keys of a block of LANES queries are divided."""

    window: int  # tokens, the query's own included
    ratio: int  # tokens of an entry
    entries: int
    block: int  # entries of a tile, in memory
    width: int  # of these, selected by the same bit of their bytes
    few: int  # entries that are multiplied with the tokens, and are all that there are; 0: they have tiles of their own
    eps: float  # of the norm of queries

    @property
    def back(self) -> int:
        """Blocks of tokens before its own."""
        return -(-(self.window - 1) // LANES)

    @property
    def tiles(self) -> int:
        """Of entries."""
        return -(-self.entries // self.block)

    @property
    def steps(self) -> int:
        """Of a block of queries."""
        return 1 if self.few else 1 + self.tiles

    def complete(self, query: Array) -> Array:
        """Entries that a block of queries may see."""
        return lax.div((query + 1) * LANES, self.ratio)


def plan(sight: Sight) -> Plan:
    """That of a row."""
    entries, few = len(sight.entries), 0
    if sight.selected is None:
        block = width = min(MOST, -(-max(entries, 1) // LANES) * LANES)
        few = -(-entries // ROWS) * ROWS if entries <= LANES else 0
    else:
        width = block_of(entries // 8)
        block = MOST if width == entries // 8 else width
    return Plan(sight.window, sight.ratio, entries, block, width, few, sight.turn.eps)


def can_attend(length: int, size: int, window: int, entries: int, *, selected: bool) -> bool:
    """Whether rows of so many tokens and entries, of heads of this size, are for `attend` and its backward pass."""
    divide = length % LANES == 0 and not (selected and entries % (8 * LANES))
    return divide and window <= MOST and 4 * entries * size <= WAITING


def attend(
    q: Array, kv: tuple[Array, Array], sinks: Array, sight: Sight, *, interpret: Any = False
) -> tuple[Array, Array]:
    """Attention of one row.

    Args:
      q: [N S H]; they are made ready here, and the output is turned back.
      kv: keys, which are also the values: of tokens [S H], of entries [E H].
      sinks: [N] float32: of each head the score of nothing.
      sight: which of them a query sees.
      interpret: as of `pallas_call`.

    Returns:
      The output [N S H], and the log-sum-exp of the scores and the sink [N S] float32.
    """
    (heads, length, size), p = q.shape, plan(sight)
    group = group_of(heads, HEADS)
    of_query, given = _given(p, group, size, kv, sight)
    lanes = group * LANES
    out, lse = call(
        functools.partial(_attend, p),
        (),
        [(turned(q), of_query(size)), *_by_head(group, sinks), *_angles(sight.turn), *given],
        [(like(turned(q)), of_query(size)), (_of_row(heads, length), of_query(1))],
        [room(size, lanes, dtype=q.dtype), room(1, lanes), room(1, lanes), room(size, lanes)],
        grid=(length // LANES, heads // group, p.steps),
        flops=4 * _pairs(p, length) * heads * size,
        name=_name(sight),
        interpret=interpret,
    )
    return turned(out), lse[:, 0]


def _name(sight: Sight) -> str:
    return "attend_window" if sight.selected is None else "attend_window_selected"


def _attend(p, _, given, found, held):
    (q, sinks, cos, sin, *keys), (out, lse), (queries, highest, total, summed) = given, found, held

    @pl.when(pl.program_id(2) == 0)
    def _():
        _make_ready(p, (q, cos, sin), queries)

    def add(k: Array, hidden: Array, before: Array) -> tuple[Array, Array, Array]:
        """What earlier sums are multiplied by, and what is added to `total` and `summed`."""
        scores = dot(k, queries[...], 0, 0) + jnp.concatenate([hidden] * len(q), axis=1)
        now = jnp.maximum(before, jnp.max(scores, axis=KEYS, keepdims=True))
        highest[...], weights = now, jnp.exp(scores - now)
        more = jnp.sum(weights, axis=KEYS, keepdims=True), dot(k, weights.astype(k.dtype), 1, 0)
        return jnp.exp(before - now), *more

    def begin(k: Array, hidden: Array) -> None:
        of_sinks, more, summed[...] = add(k, hidden, _beside(sinks))
        total[...] = of_sinks + more

    def go_on(k: Array, hidden: Array) -> None:
        old, more, more_summed = add(k, hidden, highest[...])
        total[...] = total[...] * old + more
        summed[...] = summed[...] * old + more_summed

    _visit(p, keys, begin, go_on)

    @pl.when(pl.program_id(2) == p.steps - 1)
    def _():
        _apart(lse, highest[...] + jnp.log(total[...]))
        for h, lanes in enumerate(_lanes(len(out))):
            out[h] = rotated_last(summed[:, lanes] / total[:, lanes], cos[...], -sin[...]).astype(out.dtype)


def attend_backward(
    q: Array,
    kv: tuple[Array, Array],
    sinks: Array,
    sight: Sight,
    kept: tuple[Array, Array],
    dout: Array,
    *,
    interpret: Any = False,
) -> tuple[Array, tuple[Array, Array], Array]:
    """Gradients of q, kv (float32) and sinks, given what `attend` returned and the gradient of the output.

    Those of all entries wait in VMEM. Those of tokens are written by block of queries, and summed here.
    """
    (heads, length, size), p, (out, lse) = q.shape, plan(sight), kept
    group = group_of(heads, HEADS // 2)
    of_query, given = _given(p, group, size, kv, sight)
    blocks, groups, lanes, near = length // LANES, heads // group, group * LANES, (1 + p.back) * LANES

    def when_last(b, g, e, _):
        return 0, jnp.where((b == blocks - 1) & (g == groups - 1), jnp.maximum(e - 1, 0), 0)

    of_output = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)  # whichever way both are turned
    of_queries = turned(q), lse[:, None], of_output[:, None], turned(dout)
    dq, dnear, dfar = call(
        functools.partial(_attend_backward, p),
        (),
        [*((a, of_query(a.shape[1])) for a in of_queries), *_angles(sight.turn), *given],
        [
            (like(of_queries[0]), of_query(size)),
            (
                jax.ShapeDtypeStruct((blocks, size, near), jnp.float32),
                pl.BlockSpec((1, size, near), lambda b, *_: (b, 0, 0)),
            ),
            (
                jax.ShapeDtypeStruct((size, max(p.tiles, 1) * p.block), jnp.float32),
                pl.BlockSpec((size, p.block), when_last),
            ),
        ],
        [
            *(room(size, lanes, dtype=q.dtype), room(group, 1, LANES), room(size, lanes, dtype=q.dtype)),
            *(room(size, lanes), room(max(p.tiles, 1), size, p.block)),
        ],
        grid=(blocks, groups, p.steps),
        flops=10 * _pairs(p, length) * heads * size,
        name=f"{_name(sight)}_backward",
        interpret=interpret,
    )
    dsinks = -jnp.sum(jnp.exp(sinks[:, None] - lse) * of_output, axis=1)
    return turned(dq), (_of_tokens(p, dnear), turned(dfar)[: p.entries]), dsinks


def _attend_backward(p, _, given, found, held):
    (q, lse, of_output, dout, cos, sin, *keys), (dq, dnear, dfar) = given, found
    queries, by, gradients, dqs, dfars = held
    b, g, e = (pl.program_id(i) for i in range(3))

    @pl.when((b == 0) & (g == 0))
    def _():
        dfars[jnp.maximum(e - 1, 0)] = jnp.zeros(dfars.shape[1:], jnp.float32)

    @pl.when(e == 0)
    def _():
        _make_ready(p, (q, cos, sin), queries, by)
        _turn((dout, cos, sin), gradients)

    @pl.when((g == 0) & (e == 0))
    def _():
        dnear[...] = jnp.zeros(dnear.shape, jnp.float32)

    def of_keys(k: Array, hidden: Array, first: bool) -> Array:
        """Their gradient."""
        scores = dot(k, queries[...], 0, 0) + jnp.concatenate([hidden] * len(q), axis=1)
        weights = jnp.exp(scores - _beside(lse))
        dscores = (weights * (dot(k, gradients[...], 0, 0) - _beside(of_output))).astype(k.dtype)
        more = dot(k, dscores, 1, 0)
        dqs[...] = more if first else dqs[...] + more
        return dot(gradients[...], weights.astype(k.dtype), 1, 1) + dot(queries[...], dscores, 1, 1)

    def begin(k: Array, hidden: Array) -> None:
        dk, tokens = of_keys(k, hidden, True), dnear.shape[2]
        dnear[0] += dk[:, :tokens]
        if p.few:
            dfars[0, :, : p.few] += dk[:, tokens:]

    def go_on(k: Array, hidden: Array) -> None:
        dfars[e - 1] += of_keys(k, hidden, False)

    _visit(p, keys, begin, go_on)

    @pl.when(e == p.steps - 1)
    def _():
        _gradients_of_ready(dqs, (queries, by, cos, sin), dq)

    @pl.when((b == pl.num_programs(0) - 1) & (g == pl.num_programs(1) - 1))
    def _():
        dfar[...] = dfars[jnp.maximum(e - 1, 0)]


def _visit(p: Plan, keys: list, begin: Callable, go_on: Callable) -> None:
    """Calls one with the keys of this step, if any are seen: [H n], and what is added to their scores, [n LANES]."""
    b, e = pl.program_id(0), pl.program_id(2)
    own, *keys = keys
    near, segments, (far, *of_entries) = keys[: p.back + 1], keys[p.back + 1 : 2 * p.back + 2], keys[2 * p.back + 2 :]

    @pl.when(e == 0)
    def _():
        of_keys = jnp.concatenate([s[...] for s in segments], axis=1)
        k, hidden = [a[...] for a in near], [_not_near(p, b, own[...], of_keys)]
        if p.few:
            k.append(far[:, : p.few])
            hidden.append(_not_far(p, b, 0, own[...], of_entries)[: p.few])
        begin(jnp.concatenate(k, axis=1), jnp.concatenate(hidden))

    if p.steps > 1:

        @pl.when((e > 0) & ((e - 1) * p.block < p.complete(b)))
        def _():
            go_on(far[...], _not_far(p, b, e - 1, own[...], of_entries))


def _not_near(p: Plan, query: Array, own: Array, of_keys: Array) -> Array:
    """[keys queries]: 0, or LOWEST of what is not in a query's window, or not of its document."""
    of_keys, own = column(of_keys), own.astype(jnp.float32)
    place = _iota(of_keys.shape[0], KEYS)
    distance = _iota(of_keys.shape[0], 1) + p.back * LANES - place
    outside = (distance < 0) | (distance >= p.window) | (place < (p.back - query) * LANES)
    return jnp.where(outside | (of_keys != own), LOWEST, 0.0)


def _not_far(p: Plan, query: Array, tile: Array | int, own: Array, of_entries: list) -> Array:
    """[entries queries]: 0, or LOWEST of entries that are not seen, or not selected."""
    if len(of_entries) == 1:
        bits, first = of_entries[0][...].astype(jnp.int32), lax.div(tile * p.block, p.entries // 8)
        runs = [lax.shift_right_logical(bits, first + i) & 1 for i in range(p.block // p.width)]
        return (LOWEST * (1 - jnp.concatenate(runs, axis=1)).astype(jnp.float32)).T
    of_keys, last = (column(a[...]) for a in of_entries)
    later = last > (_iota(p.block, 1) + query * LANES).astype(jnp.float32)
    return jnp.where(later | (of_keys != own.astype(jnp.float32)), LOWEST, 0.0)


def _make_ready(p: Plan, given: tuple[Any, Any, Any], queries: Any, by: Any = None) -> None:
    """Lays a group's queries out as they are multiplied, and what they are normalized by."""
    q, cos, sin = given
    for h, lanes in enumerate(_lanes(len(q))):
        queries[:, lanes], size = ready(q[h], cos[...], sin[...], p.eps)
        if by is not None:
            by[h] = size


def _turn(given: tuple[Any, Any, Any], gradients: Any) -> None:
    """The same of a group's gradients, which are turned alone."""
    dout, cos, sin = given
    for h, lanes in enumerate(_lanes(len(dout))):
        gradients[:, lanes] = rotated_last(dout[h], cos[...], sin[...])


def _gradients_of_ready(dqs: Any, given: tuple[Any, Any, Any, Any], dq: Any) -> None:
    """Writes those of queries, given those of what `_make_ready` laid out."""
    queries, by, cos, sin = given
    for h, lanes in enumerate(_lanes(len(dq))):
        x, dx = queries[:, lanes].astype(jnp.float32), dqs[:, lanes]
        dx = by[h] * (dx - x * jnp.sum(x * dx, axis=0, keepdims=True))
        dq[h] = rotated_last(dx, cos[...], -sin[...]).astype(dq.dtype)


def _iota(keys: int, dimension: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, (keys, LANES), dimension)


def _beside(x: Any) -> Array:
    """A reference [heads n LANES] -> [n heads*LANES]."""
    return jnp.concatenate([x[h] for h in range(len(x))], axis=1)


def _apart(to: Any, x: Array) -> None:
    """The inverse of `_beside`."""
    for h, lanes in enumerate(_lanes(len(to))):
        to[h] = x[:, lanes]


def _lanes(heads: int) -> list[slice]:
    """Those of each head, where heads lie beside each other."""
    return [slice(h * LANES, (h + 1) * LANES) for h in range(heads)]


# -------------------------------------------------------------------------------------- what a step reads


def _given(p: Plan, group: int, size: int, kv: tuple[Array, Array], sight: Sight) -> tuple[Callable, list]:
    """Blocks of arrays [N n S] by their n; what `_visit` reads, with its blocks."""
    tokens, entries = turned(kv[0]), _padded(p, turned(kv[1]), 0)
    segments = sight.segments[None]

    def of_query(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((group, rows, LANES), lambda b, g, *_: (g, 0, b))

    def of_tokens(rows: int, back: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, LANES), lambda b, *_: (0, jnp.maximum(b - back, 0)))

    def at(b, e):
        """The block of entries; of steps without one, that which is at hand."""
        seen = lax.div(p.complete(b) + p.block - 1, p.block)
        return jnp.clip(e - 1, 0, jnp.maximum(jnp.minimum(seen, p.tiles) - 1, 0))

    def of_entries(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, p.block), lambda b, g, e, _: (0, at(b, e)))

    backs = range(p.back, -1, -1)
    given = [(segments, of_tokens(1, 0))]
    given += [(tokens, of_tokens(size, back)) for back in backs] + [(segments, of_tokens(1, back)) for back in backs]
    given.append((entries, of_entries(size)))
    if sight.selected is None:
        given += [
            (_padded(p, sight.entries[None], NOWHERE), of_entries(1)),
            (_padded(p, sight.last[None], 0), of_entries(1)),
        ]
    else:
        per_run = p.entries // 8 // p.width
        given.append((
            sight.selected,
            pl.BlockSpec((LANES, p.width), lambda b, g, e, _: (b, lax.rem(at(b, e), per_run))),
        ))  # fmt: skip
    return of_query, given


def _padded(p: Plan, x: Array, value: int) -> Array:
    """[n E] with whole tiles of entries, at least one."""
    return jnp.pad(x, ((0, 0), (0, max(p.tiles, 1) * p.block - p.entries)), constant_values=value)


def _by_head(group: int, sinks: Array) -> list:
    """Those of a group, for each lane."""
    of_lanes = jnp.broadcast_to(sinks[:, None, None], (len(sinks), 1, LANES))
    return [(of_lanes, pl.BlockSpec((group, 1, LANES), lambda b, g, *_: (g, 0, 0)))]


def _angles(turn: Turn) -> list:
    return [(turned(a), pl.BlockSpec((a.shape[1], LANES), lambda b, *_: (0, b))) for a in (turn.cos, turn.sin)]


def _of_row(heads: int, length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((heads, 1, length), jnp.float32)


def _of_tokens(p: Plan, dnear: Array) -> Array:
    """What blocks of queries give the tokens of their windows, [S / LANES, H, (1 + back) LANES] -> [S H]."""
    blocks, size, _ = dnear.shape
    parts = dnear.reshape(blocks, size, p.back + 1, LANES)
    moved = (jnp.pad(parts[p.back - i :, :, i], ((0, p.back - i), (0, 0), (0, 0))) for i in range(p.back + 1))
    return jnp.swapaxes(functools.reduce(jnp.add, moved), 1, 2).reshape(-1, size)


def _pairs(p: Plan, length: int) -> int:
    """Of queries and keys that are multiplied, by head."""
    ends = np.arange(LANES, length + LANES, LANES)
    far = p.few or -(-np.minimum(ends // p.ratio, p.entries) // p.block) * p.block
    return LANES * int(np.sum((1 + p.back) * LANES + far))

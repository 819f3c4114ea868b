"""Attention to selected keys, in tiles of some queries by some keys: scores [B N rows keys] exist at a time.

Which keys a query attends to is a bit for each pair, the same for all heads. The keys are eight runs of ceil(S / 8),
and bit b of byte j tells of key j of run b: so a tile is unpacked by one shift, and no bits are moved between lanes.
Tiles in which all keys come after all queries are left out; of the others everything is multiplied.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

BLOCK = 512  # of queries and of keys
LOWEST = -1e30  # of scores: stands for minus infinity where that would make 0 / 0


def pack(selected: Array, length: int) -> Array:
    """[B Q Z] bool, of the first Z of `length` keys -> [B Q ceil(length / 8)] uint8."""
    run = -(-length // 8)
    padded = jnp.pad(selected, ((0, 0), (0, 0), (0, 8 * run - selected.shape[2])))
    runs = padded.reshape(*selected.shape[:2], 8, run).astype(jnp.uint8)
    return jnp.sum(runs << jnp.arange(8, dtype=jnp.uint8)[:, None], axis=2, dtype=jnp.uint8)


def unpack(packed: Array) -> Array:
    """[B Q n] uint8 -> [B Q 8n] bool: the inverse of `pack`, but that a few keys that are not there may follow."""
    return jnp.concatenate([(packed >> jnp.uint8(b)) & 1 for b in range(8)], axis=2) == 1


class Tiles(NamedTuple):
    """How pairs of queries and keys are divided."""

    rows: int
    keys: int
    run: int
    firsts: np.ndarray  # [tiles 2] int32: the first query and the first key of each tile, query by query


def tiles(length: int) -> Tiles:
    """Those of a sequence."""
    run = -(-length // 8)
    rows, keys = (BLOCK if size % BLOCK == 0 else size for size in (length, run))
    firsts = [(q, k) for q in range(0, length, rows) for k in range(0, min(q + rows, length), keys)]
    return Tiles(rows, keys, run, np.array(firsts, np.int32))


def attend(q: Array, k: Array, v: Array, selected: Array, scored: bool) -> tuple[Array, Array, Array | None]:
    """Attention of queries to their selected keys, of which each has one.

    Args:
      q: [B N S H], already multiplied by the softmax scale.
      k: [B N S H].
      v: [B N S Hv].
      selected: as `pack`, [B S ceil(S / 8)].
      scored: whether the largest scores are asked for.

    Returns:
      The output [B N S Hv], the log-sum-exp of the scores [B N S] float32, and if `scored` the largest of them.
    """
    t = tiles(q.shape[2])
    k, v = _padded(k, t), _padded(v, t)
    of_rows = (*q.shape[:2], t.rows)

    def one(carry, firsts):
        (top, total, summed), out, lse, tops = carry
        first, key = firsts
        scores = _scores(t, _rows(q, first, t.rows), _rows(k, key, t.keys), selected, firsts)
        top, total, summed = (jnp.where(key == 0, fresh, x) for fresh, x in ((LOWEST, top), (0, total), (0, summed)))
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights, old = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
        total = total * old + jnp.sum(weights, axis=-1)
        more = _dot("bnqk,bnkh->bnqh", weights.astype(v.dtype), _rows(v, key, t.keys))
        summed = summed * old[..., None] + more
        divided = summed / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]  # the last tile's is the result
        out = lax.dynamic_update_slice_in_dim(out, divided.astype(out.dtype), first, 2)
        lse = lax.dynamic_update_slice_in_dim(lse, new_top + jnp.log(total), first, 2)
        tops = lax.dynamic_update_slice_in_dim(tops, new_top, first, 2) if scored else None
        return ((new_top, total, summed), out, lse, tops), None

    running = jnp.zeros(of_rows), jnp.zeros(of_rows), jnp.zeros((*of_rows, v.shape[3]))
    of_queries = jnp.zeros(q.shape[:3])
    start = running, jnp.zeros((*q.shape[:3], v.shape[3]), v.dtype), of_queries, of_queries if scored else None
    (_, out, lse, tops), _ = lax.scan(one, start, _each(t))
    return out, lse, tops


def attend_backward(
    q: Array, k: Array, v: Array, selected: Array, kept: tuple[Array, Array], dout: Array
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v, given what `attend` returned and the gradient of the output."""
    t, (out, lse), length = tiles(q.shape[2]), kept, k.shape[2]
    k, v = _padded(k, t), _padded(v, t)
    delta = _dot("bnqh,bnqh->bnq", dout, out)

    def one(carry, firsts):
        running, dq, dk, dv = carry
        first, key = firsts
        q_rows, dout_rows, lse_rows, delta_rows = (_rows(a, first, t.rows) for a in (q, dout, lse, delta))
        k_rows, v_rows = (_rows(a, key, t.keys) for a in (k, v))
        weights = jnp.exp(_scores(t, q_rows, k_rows, selected, firsts) - lse_rows[..., None])
        dv = _added(dv, _dot("bnqk,bnqh->bnkh", weights.astype(v.dtype), dout_rows), key)
        dweights = _dot("bnqh,bnkh->bnqk", dout_rows, v_rows)
        dscores = (weights * (dweights - delta_rows[..., None])).astype(q.dtype)
        dk = _added(dk, _dot("bnqk,bnqh->bnkh", dscores, q_rows), key)
        running = jnp.where(key == 0, 0, running) + _dot("bnqk,bnkh->bnqh", dscores, k_rows)
        dq = lax.dynamic_update_slice_in_dim(dq, running.astype(q.dtype), first, 2)
        return (running, dq, dk, dv), None

    running = jnp.zeros((*q.shape[:2], t.rows, q.shape[3]))
    start = running, jnp.zeros_like(q), jnp.zeros(k.shape), jnp.zeros(v.shape)
    (_, dq, dk, dv), _ = lax.scan(one, start, _each(t))
    return dq, dk[:, :, :length].astype(k.dtype), dv[:, :, :length].astype(v.dtype)


def _dot(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _each(t: Tiles) -> tuple[Array, Array]:
    first, key = jnp.asarray(t.firsts).T
    return first, key


def _padded(x: Array, t: Tiles) -> Array:
    """With as many keys as there are bits."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, 8 * t.run - x.shape[2]), (0, 0)))


def _rows(x: Array, first: Array, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, first, size, axis=2)


def _added(total: Array, more: Array, first: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(total, _rows(total, first, more.shape[2]) + more, first, 2)


def _scores(t: Tiles, q: Array, k: Array, selected: Array, firsts: tuple[Array, Array]) -> Array:
    """Of a tile [B N rows keys], float32; minus infinity where a key is not selected."""
    first, key = firsts
    starts = jnp.zeros_like(first), first, key % t.run
    packed = lax.dynamic_slice(selected, starts, (selected.shape[0], t.rows, t.keys))
    seen = (packed >> (key // t.run).astype(jnp.uint8)) & 1 == 1
    scores = _dot("bnqh,bnkh->bnqk", q, k)
    return jnp.where(seen[:, None], scores, -jnp.inf)

"""Attention to a window of tokens and to entries beside it, with one key, which is also the value, for all heads (V4).

By XLA, a block of queries reads the tokens of the window before it and its own, and the entries of what lies before its
end. So scores [B N BLOCK window+BLOCK+E] exist at a time, and no more in the backward pass. TPUs have kernels for it.

A head can also attend to nothing: its sink is one more score, whose value is zero.

Values are rotated, for they are the keys; so the output is turned back by the angles of its query.

Queries come as their product makes them, and are made ready here, or by the kernels.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from maxds.model import kernels
from maxds.model.kernels import Block, Keys
from maxds.model.ops import ready, rotate
from maxds.model.tiles import Turn
from maxds.model.tiles import window as tiles

BLOCK = 128  # of queries


@flax.struct.dataclass
class Sight:
    """What queries can attend to."""

    segments: jax.Array  # [B S]
    keys: Keys  # the E entries
    selected: jax.Array | None  # as `sparse.pack`, [B S ceil(E / 8)]: those that are attended to; None: all
    turn: Turn  # of the queries
    window: int = flax.struct.field(pytree_node=False)  # tokens, the query's own included

    @property
    def back(self) -> int:
        """Tokens that a query looks back, its own included: no more than there are."""
        return min(self.window, self.segments.shape[1])


def attention(
    q: jax.Array,
    kv: tuple[jax.Array, jax.Array],
    sinks: jax.Array,
    sight: Sight,
    kept: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Attention within documents, turned back.

    Args:
      q: [B N S H], not ready yet.
      kv: keys, which are also the values: of tokens [B S H], of entries [B E H].
      sinks: [N] float32.
      sight: which of them a query sees.
      kept: what an earlier call returned as kept; the forward pass is then not computed.

    Returns:
      The output [B N S H], and what to keep of it: (output, log-sum-exp of the scores and the sink [B N S] float32).
    """
    out, lse = _attention(q, kv, sinks, sight, kept)
    return out, (out, lse)


@jax.custom_vjp
def _attention(q, kv, sinks, sight, kept):
    if kept is not None:
        return kept
    if _is_for_tiles(q, kv[1], sight):
        return jax.vmap(tiles.attend, (0, 0, None, 0))(q, kv, sinks, of_rows(sight))
    return _attend(q, kv, sinks, sight)


def _attention_forward(q, kv, sinks, sight, kept):
    found = checkpoint_name(_attention(q, kv, sinks, sight, kept), "attention")
    return found, (q, kv, sinks, sight, kept, found)


def _attention_backward(residuals, cotangents):
    q, kv, sinks, sight, kept, found = residuals
    if _is_for_tiles(q, kv[1], sight):
        batched = jax.vmap(tiles.attend_backward, (0, 0, None, 0, 0, 0))
        dq, dkv, dsinks = batched(q, kv, sinks, of_rows(sight), found, cotangents[0])
        gradients = dq, jax.tree.map(lambda a: a.astype(q.dtype), dkv), jnp.sum(dsinks, axis=0)
    else:
        gradients = _attend_backward(q, kv, sinks, sight, (*found, cotangents[0]))
    return *gradients, None, jax.tree.map(jnp.zeros_like, kept)


_attention.defvjp(_attention_forward, _attention_backward)


def _is_for_tiles(q: jax.Array, entries: jax.Array, sight: Sight) -> bool:
    length, size = q.shape[2:]
    fits = tiles.can_attend(length, size, sight.window, entries.shape[1], selected=sight.selected is not None)
    return kernels.is_tpu() and fits


def of_rows(sight: Sight) -> tiles.Sight:
    """As the kernels take it, of each row."""
    last = jnp.broadcast_to(sight.keys.last, sight.keys.segments.shape)
    of_keys = sight.keys.segments, last, sight.selected
    return tiles.Sight(sight.segments, *of_keys, sight.turn, sight.window, sight.keys.ratio)


def _attend(q, kv, sinks, sight):
    q, padded = ready(q, sight.turn), _padded(kv[0], sight)

    def block(end: int, _, own: Block):
        k = _keys(padded, kv[1], sight.keys.before(end), own.first, own.size + sight.back)
        return None, attend_to(own.of(q, 2), k, sinks, _seen(sight, end, own))

    _, found = kernels.by_blocks(block, None, q.shape[2], BLOCK)
    out, lse = (kernels.joined([of_span[i] for of_span in found], 2) for i in (0, 1))
    return turned_back(out, sight.turn), lse


def turned_back(out: jax.Array, turn: Turn) -> jax.Array:
    """Attention's output [B N S H] without the rotation that its values have."""
    return rotate(out, (turn.cos, -turn.sin))


def attend_to(q: jax.Array, k: jax.Array, sinks: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of few queries that are ready: to keys [B Z H], of those that are `seen`, [B Q Z] bool."""
    scores = _scores(q, k, seen)
    lse = jnp.logaddexp(jax.nn.logsumexp(scores, axis=-1), sinks[:, None])
    weights = jnp.exp(scores - lse[..., None]).astype(k.dtype)  # to the bit those of the backward pass
    return jnp.einsum("bnqz,bzh->bnqh", weights, k), lse


def _attend_backward(q, kv, sinks, sight, of_output):
    q, pull = jax.vjp(lambda q: ready(q, sight.turn), q)
    padded = _padded(kv[0], sight)
    out, lse, dout = of_output
    delta = _dot("bnsh,bnsh->bns", dout, out)  # whichever way both are turned
    of_queries = q, lse, delta, rotate(dout, (sight.turn.cos, sight.turn.sin))

    def block(end: int, carry, own: Block):
        near, far, dsinks = carry
        first, size = own.first, own.size + sight.back
        queries, lse, delta, dout = (own.of(a, 2) for a in of_queries)
        k = _keys(padded, kv[1], sight.keys.before(end), first, size)
        weights = jnp.exp(_scores(queries, k, _seen(sight, end, own)) - lse[..., None])
        dk = _dot("bnqz,bnqh->bzh", weights.astype(k.dtype), dout)
        dscores = (weights * (_dot("bnqh,bzh->bnqz", dout, k) - delta[..., None])).astype(q.dtype)
        dk += _dot("bnqz,bnqh->bzh", dscores, queries)
        near = lax.dynamic_update_slice_in_dim(near, _rows(near, first, size) + dk[:, :size], first, 1)
        far = far.at[:, : dk.shape[1] - size].add(dk[:, size:])
        dsinks -= jnp.sum(jnp.exp(sinks[:, None] - lse) * delta, axis=(0, 2))
        return (near, far, dsinks), jnp.einsum("bnqz,bzh->bnqh", dscores, k)

    start = [jnp.zeros(a.shape, jnp.float32) for a in (padded, kv[1], sinks)]
    (near, far, dsinks), dq = kernels.by_blocks(block, tuple(start), q.shape[2], BLOCK)
    return *pull(kernels.joined(dq, 2)), (near[:, sight.back :].astype(q.dtype), far.astype(q.dtype)), dsinks


def _seen(sight: Sight, end: int, own: Block) -> jax.Array:
    """[B Q Z] bool: which of `_keys` a block of queries sees."""
    first, size, segments = own.first, own.size, own.of(sight.segments, 1)
    distance = jnp.arange(size)[:, None] + sight.back - jnp.arange(size + sight.back)
    before = jnp.pad(sight.segments, ((0, 0), (sight.back, 0)), constant_values=-1)
    same = segments[:, :, None] == _rows(before, first, size + sight.back)[:, None, :]
    keys = sight.keys.before(end)
    far = kernels.seen(own, sight.segments, keys, sight.selected)
    return jnp.concatenate([same & (distance >= 0) & (distance < sight.back), far], axis=2)


def _keys(padded: jax.Array, entries: jax.Array, keys: Keys, first: jax.Array, size: int) -> jax.Array:
    """[B Z H]: the tokens before and in a block of queries, then the entries."""
    return jnp.concatenate([_rows(padded, first, size), entries[:, : keys.count]], axis=1)


def _padded(tokens: jax.Array, sight: Sight) -> jax.Array:
    """With as many before the first as a query looks back: what is sliced starts at the query's own position."""
    return jnp.pad(tokens, ((0, 0), (sight.back, 0), (0, 0)))


def _rows(x: jax.Array, first: jax.Array, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, first, size, axis=1)


def _scores(q: jax.Array, k: jax.Array, seen: jax.Array) -> jax.Array:
    """[B N Q Z] float32."""
    return jnp.where(seen[:, None], _dot("bnqh,bzh->bnqz", q, k), -jnp.inf)


def _dot(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)

"""Scores of many heads, summed, of a block of queries and all keys: [B Q Z], head by head.

The indexer selects by the sum of its heads' scores, and learns from how much all attention heads attend to each key.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax


def index_scores(q: Array, heads: Array, k: Array) -> Array:
    """Sum over heads of what a head counts for times the positive part of its scores.

    Args:
      q: [B I Q H].
      heads: [B I Q] float32.
      k: [B Z H], one for all heads.

    Returns:
      [B Q Z] float32.
    """

    def one(total, of_head):
        q, head = of_head
        return total + head[..., None] * jax.nn.relu(_dots(q, k)), None

    return lax.scan(one, _zeros(q, k), (jnp.moveaxis(q, 1, 0), jnp.moveaxis(heads, 1, 0)))[0]


def index_scores_backward(q: Array, heads: Array, k: Array, dscores: Array) -> tuple[Array, Array, Array]:
    """Gradients of q, heads and k (float32), given that of the scores, [B Q Z]."""

    def one(dk, of_head):
        q, head = of_head
        dots = _dots(q, k)
        ddots = jnp.where(dots > 0, dscores * head[..., None], 0).astype(k.dtype)
        dk += jnp.einsum("bqz,bqh->bzh", ddots, q, preferred_element_type=jnp.float32)
        return dk, (jnp.einsum("bqz,bzh->bqh", ddots, k), jnp.sum(dscores * jax.nn.relu(dots), axis=-1))

    of_heads = jnp.moveaxis(q, 1, 0), jnp.moveaxis(heads, 1, 0)
    dk, found = lax.scan(one, jnp.zeros(k.shape, jnp.float32), of_heads)
    dq, dheads = (jnp.moveaxis(a, 0, 1) for a in found)
    return dq, dheads, dk


def attention_to(count: int, q: Array, lse: Array, k: Array) -> Array:
    """Sum over heads of their attention to each key, were it not masked.

    Args:
      count: of the keys, the first so many.
      q: [B N Q H], multiplied by the softmax scale.
      lse: [B N Q] float32, log-sum-exp of the scores that were attended to.
      k: [B N Z H]; [B 1 Z H] where all heads share them.

    Returns:
      [B Q count] float32; anything where a key is not attended to.
    """
    k = k[:, :, :count]

    def one(total, head):
        q_head, lse_head = (lax.dynamic_index_in_dim(a, head, 1, keepdims=False) for a in (q, lse))
        k_head = lax.dynamic_index_in_dim(k, jnp.minimum(head, k.shape[1] - 1), 1, keepdims=False)
        return total + jnp.exp(_dots(q_head, k_head) - lse_head[..., None]), None

    return lax.scan(one, _zeros(q, k[:, 0]), jnp.arange(q.shape[1]))[0]


def _zeros(q: Array, k: Array) -> Array:
    return jnp.zeros((q.shape[0], q.shape[2], k.shape[1]), jnp.float32)


def _dots(q: Array, k: Array) -> Array:
    return jnp.einsum("bqh,bzh->bqz", q, k, preferred_element_type=jnp.float32)

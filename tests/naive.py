"""Latent attention's queries and keys, by the definition."""

import jax.numpy as jnp


def whole(q, k, angles):
    """Queries [B N S H] whose last pairs are turned by angles [B S pairs], as complex numbers are by a factor.

    Keys [B N S H - R] are joined with those that all heads share, [B S R].
    """
    own, shared = k
    still = own.shape[3]
    x, y, cos, sin = q[..., still::2], q[..., still + 1 :: 2], jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    pairs = jnp.stack([x * cos - y * sin, y * cos + x * sin], axis=-1).reshape(*q.shape[:3], -1)
    of_heads = jnp.stack([shared] * own.shape[1], axis=1)
    return jnp.concatenate([q[..., :still], pairs], axis=3), jnp.concatenate([own, of_heads], axis=3)


def rope(angles):
    """cos and sin of both dimensions of each pair [B S R]."""
    both = jnp.repeat(jnp.asarray(angles), 2, axis=-1)
    return jnp.cos(both), jnp.sin(both)

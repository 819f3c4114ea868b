"""Sequences that are split over the devices along `expert`, which have as many tokens of each, in order.

Only attention sees whole sequences (DeepSpeed-Ulysses, arXiv 2309.14509): there the heads are split instead. Of latent
attention it is the latents that are gathered: of V3, a thirtieth of the queries, keys and values made of them.

    s  positions of this device, S / devices along `expert`        n  heads of this device, N / those devices
"""

import dataclasses

import flax.struct
import jax
from jax import lax

from maxds.model.ops import RopeTable
from maxds.params import Tree


@flax.struct.dataclass
class Row:
    """What attention knows of whole sequences, of which this device has a part."""

    segments: jax.Array  # [B S] int32
    rope: RopeTable  # [B S qk_rope_head_dim]


def whole(x: Tree) -> Tree:
    """Of whole sequences, [B s …] -> [B S …]."""
    return jax.tree.map(lambda a: lax.all_gather(a, "expert", axis=1, tiled=True), x)


def own(x: Tree) -> Tree:
    """This device's part of the second dimension: of tokens [B S …] -> [B s …], of heads [C N H] -> [C n H]."""

    def part(a: jax.Array) -> jax.Array:
        size = a.shape[1] // lax.axis_size("expert")
        return lax.dynamic_slice_in_dim(a, lax.axis_index("expert") * size, size, axis=1)

    return jax.tree.map(part, x)


def own_heads(w: Tree) -> Tree:
    """Latent attention's weights, of which those that make heads make this device's."""
    return dataclasses.replace(w, q_up=own(w.q_up), k_up=own(w.k_up), v_up=own(w.v_up))


def of_all_heads(x: jax.Array) -> jax.Array:
    """A number of each head, [n] -> [N]."""
    return lax.all_gather(x, "expert", tiled=True)


def all_heads(x: jax.Array) -> jax.Array:
    """From some heads of all tokens to all heads of this device's tokens, [B n S H] -> [B N s H]."""
    return lax.all_to_all(x, "expert", split_axis=2, concat_axis=1, tiled=True)

"""An update of weights and optimizer state, wherever they lie: on the devices, or in their hosts' memory.

What is there comes to the devices a layer after the other, so that one layer of it is here at a time.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxds import host, optimizer, params
from maxds.checksum import mixed
from maxds.params import Param, Tree


class Common(NamedTuple):
    """What the updates of all weights in a step have in common."""

    norm: jax.Array  # float32: of all gradients
    rate: jax.Array  # float32: the learning rate
    step: jax.Array  # int32


Update = Callable[[Tree, Tree, Tree, Common], tuple[Tree, Tree]]
"""(weights, gradients, optimizer state, what is common) -> weights, optimizer state."""


def moved(w: jax.Array, change: jax.Array, step: jax.Array) -> jax.Array:
    """A weight with a float32 change added, in its dtype.

    In bfloat16 most changes of a step are less than half of what lies between two numbers: rounded to the nearest they
    would be lost. So it is rounded up or down by chance, which is right on average. The chance is drawn from the step,
    the sum, and its place in its matrix: it is the same on every mesh, and wherever weights lie.
    """
    found = w.astype(jnp.float32) + change
    if w.dtype == jnp.float32:
        return found
    bits = lax.bitcast_convert_type(found, jnp.uint32)
    place = mixed(step.astype(jnp.uint32))
    for axis in range(max(w.ndim - 2, 0), w.ndim):
        place = mixed(place ^ lax.broadcasted_iota(jnp.uint32, w.shape, axis))
    up = (bits + (mixed(bits ^ place) >> 16)) & np.uint32(0xFFFF0000)
    by_chance = lax.bitcast_convert_type(up, jnp.float32)
    return jnp.where(jnp.isfinite(found), by_chance, found).astype(w.dtype)


def chosen(sound: jax.Array, new: Tree, old: Tree) -> Tree:
    """What is new, or where the step is not sound what was before."""
    return jax.tree.map(lambda a, b: jnp.where(sound, a, b), new, old)


def where_they_lie(update: Update, sound: jax.Array, weights: Tree, grads: Tree, opt_state: Tree, common: Common):
    """Weights and optimizer state after an update, or as before where it is not sound; computed where weights lie."""

    def after(weights, grads, opt_state, common, sound):
        return chosen(sound, update(weights, grads, opt_state, common), (weights, opt_state))

    weights, new = host.beside(after, weights, grads, opt_state, common, sound)
    return weights, host.put_as(new, opt_state)


def in_a_branch(update: Update, sound: jax.Array, weights: Tree, grads: Tree, opt_state: Tree, common: Common):
    """The same on devices, to which what is in host memory comes as a whole, and goes back.

    Without the branch the compiler would fetch it while gradients are computed, and there is no room for it.
    """

    def apply(*before):
        weights, opt_state = host.to_device(before)
        return host.put_as(update(weights, grads, opt_state, common), before)

    return lax.cond(sound, apply, lambda *before: before, weights, opt_state)


def layers_of(declared: Tree, axes: dict[str, int]) -> Tree:
    """Of each weight on a mesh of these axes, how many layers can come one after the other; 0: it comes as a whole.

    A TPU cannot copy out of host memory what is a part of its tiles' last dimension: the longest one of a shard.
    """

    def of_weight(p: Param) -> int:
        return p.shape[0] if _has_layers(p) and max(p.shard(axes)) > p.shape[0] else 0

    return params.derive(of_weight, declared)


def by_layers(
    layers: Tree, update: Update, sound: jax.Array, weights: Tree, grads: Tree, opt_state: Tree, common: Common
):
    """The same of a layer after the other, for an optimizer that changes each number by itself.

    Weights of as many layers take turns together. Arrays of the others are empty then, so that one update does for all.
    """
    of_state = optimizer.map_moments(lambda n, _: n, layers, jax.tree.map(lambda _: _SHARED, opt_state))

    def change(depth, i, done):
        new_weights, state = done
        layer = functools.partial(_of_layer, depth, i)
        own, own_grads = (host.to_device(jax.tree.map(layer, layers, tree)) for tree in (new_weights, grads))
        own_state = host.to_device(
            jax.tree.map(lambda n, a, old: old if n == _SHARED else layer(n, a), of_state, state, opt_state)
        )
        changed = chosen(sound, update(own, own_grads, own_state, common), (own, own_state))
        return jax.tree.map(functools.partial(_with_layer, depth, i), (layers, of_state), done, changed)

    done = weights, opt_state
    for depth in sorted(set(jax.tree.leaves(layers))):
        done = lax.fori_loop(0, max(depth, 1), functools.partial(change, depth), done)
    return done


def copied(declared: Tree, layers: Tree, compute: jnp.dtype, weights: Tree) -> Tree:
    """Copies on the devices of weights in host memory; those of matrices of layers in `compute`, as they are gathered.

    A layer comes after the other, of what has `layers`: that is never here as a whole before it is cast.
    """

    def copy(depth: int, i: jax.Array | None = None) -> Tree:
        def one(p: Param, n: int, w: jax.Array) -> jax.Array | None:
            if n != depth:
                return None
            here = host.to_device(lax.dynamic_index_in_dim(w, i, keepdims=False) if depth else w)
            return here.astype(compute) if is_cast(p) else here

        return params.derive(one, declared, layers, weights)

    depths = sorted(set(jax.tree.leaves(layers)) - {0})
    return params.joined([copy(0), *(lax.map(functools.partial(copy, n), jnp.arange(n)) for n in depths)])


def is_cast(p: Param) -> bool:
    """Whether the copy of a weight is in the compute dtype."""
    return _has_layers(p) and not p.float32


_SHARED = -1  # in the place of the layers of what belongs to no weight, such as how many updates there were


def _has_layers(p: Param) -> bool:
    """Whether it is a stacked array of matrices, whole along the stack."""
    return p.dims.startswith("b") and not p.axes[0]


def _of_layer(depth: int, i: jax.Array, layers: int, a: jax.Array) -> jax.Array:
    if layers != depth:
        return jnp.zeros(0, a.dtype)
    return lax.dynamic_index_in_dim(a, i) if depth else a


def _with_layer(depth: int, i: jax.Array, layers: int, old: jax.Array, new: jax.Array) -> jax.Array:
    if layers not in (depth, _SHARED):
        return old
    new = host.put_as(new, old)
    return lax.dynamic_update_index_in_dim(old, new, i, 0) if depth and layers == depth else new

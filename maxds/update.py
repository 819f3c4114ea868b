"""An update of weights and optimizer state, wherever they lie: on the devices, or in their hosts' memory.

What is there comes to the devices a layer after the other, so that one layer of it is here at a time.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from maxds import host, optimizer, params
from maxds.params import Param, Tree

Update = Callable[[Tree, Tree, Tree, jax.Array], tuple[Tree, Tree]]
"""(weights, gradients, optimizer state, norm of all gradients) -> weights, optimizer state."""


def chosen(sound: jax.Array, new: Tree, old: Tree) -> Tree:
    """What is new, or where the step is not sound what was before."""
    return jax.tree.map(lambda a, b: jnp.where(sound, a, b), new, old)


def where_they_lie(update: Update, sound: jax.Array, weights: Tree, grads: Tree, opt_state: Tree, norm: jax.Array):
    """Weights and optimizer state after an update, or as before where it is not sound; computed where weights lie."""

    def after(weights, grads, opt_state, norm, sound):
        return chosen(sound, update(weights, grads, opt_state, norm), (weights, opt_state))

    weights, new = host.beside(after, weights, grads, opt_state, norm, sound)
    return weights, host.put_as(new, opt_state)


def in_a_branch(update: Update, sound: jax.Array, weights: Tree, grads: Tree, opt_state: Tree, norm: jax.Array):
    """The same on devices, to which what is in host memory comes as a whole, and goes back.

    Without the branch the compiler would fetch it while gradients are computed, and there is no room for it.
    """

    def apply(*before):
        weights, opt_state = host.to_device(before)
        return host.put_as(update(weights, grads, opt_state, norm), before)

    return lax.cond(sound, apply, lambda *before: before, weights, opt_state)


def layers_of(declared: Tree, axes: dict[str, int]) -> Tree:
    """Of each weight on a mesh of these axes, how many layers can come one after the other; 0: it comes as a whole.

    A TPU cannot copy out of host memory what is a part of its tiles' last dimension: the longest one of a shard.
    """

    def of_weight(p: Param) -> int:
        return p.shape[0] if _has_layers(p) and max(p.shard(axes)) > p.shape[0] else 0

    return params.derive(of_weight, declared)


def by_layers(
    layers: Tree, update: Update, sound: jax.Array, weights: Tree, grads: Tree, opt_state: Tree, norm: jax.Array
):
    """The same of a layer after the other, for an optimizer that changes each number by itself.

    While layers of some number are in turn, arrays of others are empty.
    """
    of_state = optimizer.map_moments(lambda n, _: n, layers, jax.tree.map(lambda _: _OF_ALL, opt_state))

    def change(stack, i, done):
        new_weights, state = done
        layer = functools.partial(_of_layer, stack, i)
        own, own_grads = (host.to_device(jax.tree.map(layer, layers, tree)) for tree in (new_weights, grads))
        own_state = host.to_device(
            jax.tree.map(lambda n, a, old: old if n == _OF_ALL else layer(n, a), of_state, state, opt_state)
        )
        changed = chosen(sound, update(own, own_grads, own_state, norm), (own, own_state))
        return jax.tree.map(functools.partial(_with_layer, stack, i), (layers, of_state), done, changed)

    done = weights, opt_state
    for stack in sorted(set(jax.tree.leaves(layers))):
        done = lax.fori_loop(0, max(stack, 1), functools.partial(change, stack), done)
    return done


def copied(declared: Tree, layers: Tree, compute: jnp.dtype, weights: Tree) -> Tree:
    """Copies on the devices of weights in host memory; those of matrices of layers in `compute`, as they are gathered.

    A layer comes after the other, of what has `layers`: that is never here as a whole before it is cast.
    """

    def copy(stack: int, i: jax.Array | None = None) -> Tree:
        def one(p: Param, n: int, w: jax.Array) -> jax.Array | None:
            if n != stack:
                return None
            here = host.to_device(lax.dynamic_index_in_dim(w, i, keepdims=False) if stack else w)
            return here.astype(compute) if is_cast(p) else here

        return params.derive(one, declared, layers, weights)

    stacks = sorted(set(jax.tree.leaves(layers)) - {0})
    return params.joined([copy(0), *(lax.map(functools.partial(copy, n), jnp.arange(n)) for n in stacks)])


def is_cast(p: Param) -> bool:
    """Whether the copy of a weight is in the compute dtype."""
    return _has_layers(p) and not p.float32


_OF_ALL = -1  # stands for the layers of what is no array of a weight: how many updates there were


def _has_layers(p: Param) -> bool:
    """Whether it is a stacked array of matrices, whole along the stack."""
    return p.dims.startswith("b") and not p.axes[0]


def _of_layer(stack: int, i: jax.Array, layers: int, a: jax.Array) -> jax.Array:
    if layers != stack:
        return jnp.zeros(0, a.dtype)
    return lax.dynamic_index_in_dim(a, i) if stack else a


def _with_layer(stack: int, i: jax.Array, layers: int, old: jax.Array, new: jax.Array) -> jax.Array:
    if layers not in (stack, _OF_ALL):
        return old
    new = host.put_as(new, old)
    return lax.dynamic_update_index_in_dim(old, new, i, 0) if layers == stack != 0 else new

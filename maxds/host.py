"""What lies in the memory of the devices' hosts, and is computed there: it never comes to a device as a whole.

JAX knows the memory of an array as it knows its dtype. So the same program is traced for what lies here or there.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import compute_on

KIND = "pinned_host"  # as shardings name that memory
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
_compute_on = getattr(compute_on, "compute_on2", compute_on.compute_on)  # its name before jax 0.12

Tree = Any


def has(tree: Tree) -> bool:
    """Whether any of these arrays lies there."""
    return any(jax.typeof(leaf).memory_space == HOST for leaf in jax.tree.leaves(tree))


def beside(fn: Callable[..., Tree], tree: Tree, *args: Tree) -> Tree:
    """`fn(tree, *args)`, computed where `tree` lies, with arguments that are sent there; the result lies there, too.

    Constants that are arrays would lie on the device, so `fn` may use none: neither may it ask whether an index is in
    bounds.
    """
    if not has(tree):
        return fn(tree, *args)
    there = jax.tree.map(lambda a: jax.device_put(a, HOST), (tree, *args))
    return _compute_on(fn, compute_type="device_host", out_memory_spaces=HOST)(*there)


def to_device(tree: Tree) -> Tree:
    """The same in the devices' memory."""
    return jax.tree.map(lambda a: jax.device_put(a, DEVICE), tree)


def put_as(tree: Tree, like: Tree) -> Tree:
    """The same, each array where that of the other tree lies."""
    return jax.tree.map(lambda a, b: jax.device_put(a, jax.typeof(b).memory_space), tree, like)


def zeros(like: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Of the shape of an array, and where it lies."""
    return beside(lambda zero: lax.broadcast(zero, like.shape), put_as(jnp.zeros((), dtype), like))

"""What a process holds of arrays: the shards on its own devices, each once; and what others can give it of theirs.

Trees here are of arrays on one mesh, abstract or not. A shard is known by its number: its place in `layout`.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from maxds import host, params
from maxds import mesh as mesh_lib
from maxds.params import Tree

Bounds = tuple[tuple[int, int], ...]  # where a shard begins and ends, in each dimension


def layout(tree: Tree) -> list[tuple[str, Bounds]]:
    """Array and bounds of each shard that lies on this process's devices."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(params.name(path), bounds) for path, a in leaves for bounds in _own(a)]


def size(tree: Tree) -> int:
    """Bytes of the shards."""
    leaves = jax.tree.leaves(tree)
    return sum(len(_own(a)) * math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in leaves)


def copied(tree: Tree) -> list[np.ndarray]:
    """The shards in this host's memory, by number; the arrays may be donated once this returns."""
    leaves = jax.tree.leaves(tree)
    for array in leaves:
        array.copy_to_host_async()
    found = []
    for array in leaves:
        parts = {_bounds(part.index, array.shape): part.data for part in array.addressable_shards}
        found += [np.array(parts[bounds]) for bounds in sorted(parts)]
    return found


def assembled(abstract: Tree, read: Callable[[int, tuple[int, ...]], np.ndarray]) -> Tree:
    """Arrays on the devices, of what `read(number, shape)` gives; its bits are taken as those of the array's dtype."""
    numbers = {place: n for n, place in enumerate(layout(abstract))}

    def array(path: tuple, a: Any) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            number = numbers[params.name(path), _bounds(index, a.shape)]
            return read(number, a.sharding.shard_shape(a.shape)).view(a.dtype)

        return jax.make_array_from_callback(a.shape, a.sharding, part, dtype=a.dtype)

    return jax.tree_util.tree_map_with_path(array, abstract)


def zeros(abstract: Tree) -> Tree:
    """Arrays of the same place, made by this process alone."""
    itemsizes = [a.dtype.itemsize for a in jax.tree.leaves(abstract) for _ in _own(a)]
    return assembled(abstract, lambda n, shape: np.zeros(shape, f"V{itemsizes[n]}"))


def is_whole(abstract: Tree, has: np.ndarray) -> bool:
    """Whether every shard lies on a device of a process that `has` it: bool, by number of the process."""
    for a in jax.tree.leaves(abstract):
        places = a.sharding.devices_indices_map(a.shape).items()
        held = {_bounds(index, a.shape) for device, index in places if has[device.process_index]}
        if held != {_bounds(index, a.shape) for _, index in places}:
            return False
    return True


def shared(tree: Tree, has: np.ndarray) -> Tree:
    """The arrays, in processes that do not have theirs by those that do.

    The arrays are donated. All processes call it together, with the same `has`, of which `is_whole` is true.
    """
    leaves, structure = jax.tree.flatten(tree)
    mesh = leaves[0].sharding.mesh
    mine = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, mesh_lib.BATCH), lambda _: np.full((1,), has[jax.process_index()])
    )
    return structure.unflatten(_shared(leaves, mine, mesh, tuple(a.sharding.spec for a in leaves)))


@functools.partial(jax.jit, static_argnames=("mesh", "specs"), donate_argnums=0)
def _shared(leaves: list[jax.Array], mine: jax.Array, mesh: Any, specs: tuple) -> list[jax.Array]:
    def one(array: jax.Array, mine: jax.Array, spec: Iterable) -> jax.Array:
        split = {axis for axes in spec for axis in (axes if isinstance(axes, tuple) else (axes,))}
        copies = tuple(axis for axis in mesh_lib.AXES if axis not in split)
        if not copies:
            return array
        me = lax.axis_index(copies)
        giver = lax.pmin(jnp.where(mine[0], me, mesh.size), copies)
        bits = lax.bitcast_convert_type(host.to_device(array), f"uint{8 * array.dtype.itemsize}")
        given = lax.psum(jnp.where(me == giver, bits, 0), copies)
        return host.put_as(lax.bitcast_convert_type(given, array.dtype), array)

    def every(leaves: list[jax.Array], mine: jax.Array) -> list[jax.Array]:
        return [one(array, mine, spec) for array, spec in zip(leaves, specs, strict=True)]

    return jax.shard_map(
        every, mesh=mesh, in_specs=(list(specs), mesh_lib.BATCH), out_specs=list(specs), check_vma=False
    )(leaves, mine)


def _own(array: Any) -> list[Bounds]:
    """Bounds of the shards on this process's devices, in order."""
    indices = array.sharding.addressable_devices_indices_map(array.shape).values()
    return sorted({_bounds(index, array.shape) for index in indices})


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(along.indices(size)[:2] for along, size in zip(index, shape, strict=True))

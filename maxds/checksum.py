"""Checksums of what a checkpoint holds, computed on the devices: of arrays, not of files.

So they do not depend on how arrays are sharded or stored, cost one pass over memory, and also tell of a file that is
whole and yet not the right one, and of an array that did not come where it belongs.
"""

import json
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from maxds import host, params
from maxds.params import Tree


def of_arrays(tree: Tree) -> dict[str, str]:
    """Path -> dtype and checksum of every array; other leaves are left out."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = {params.name(path): leaf for path, leaf in leaves if isinstance(leaf, jax.Array)}
    sums = jax.device_get(_sums(list(arrays.values())))
    return {name: f"{array.dtype}:{int(found):08x}" for (name, array), found in zip(arrays.items(), sums, strict=True)}


def differing(saved: dict[str, str], found: dict[str, str]) -> list[str]:
    """Paths of the arrays found that are not those that were saved. One of another dtype was cast: nobody can tell.

    Nor of one that was saved without a checksum.
    """

    def same_dtype(name: str) -> bool:
        return saved[name].partition(":")[0] == found[name].partition(":")[0]

    return [name for name in found if name in saved and same_dtype(name) and saved[name] != found[name]]


def of_json(value: Any) -> int:
    """Of what JSON can hold."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


@jax.jit
def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    return [of_bits(array) for array in host.to_device(arrays)]


def of_part(numbers: np.ndarray, first: int) -> int:
    """What numbers that lie together in an array, from the place `first` on, add to its checksum, modulo 2^32."""
    return int(_of_part(numbers.reshape(-1), np.uint32(first % 2**32)))


def of_bits(array: jax.Array, first: jax.Array | int = 0) -> jax.Array:
    """The sum, modulo 2^32, of a hash of each element's bits and its place: any one that changes changes it."""
    bits = lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}")).astype(jnp.uint32)
    place = jnp.full(array.shape, first, jnp.uint32)
    for axis in range(array.ndim):
        stride = math.prod(array.shape[axis + 1 :]) % 2**32
        place += lax.broadcasted_iota(jnp.uint32, array.shape, axis) * jnp.uint32(stride)
    return jnp.sum(mixed(bits ^ (place * jnp.uint32(0x9E3779B1))), dtype=jnp.uint32)


_of_part = jax.jit(of_bits)


def mixed(bits: jax.Array) -> jax.Array:
    """A hash of each uint32, MurmurHash3's finalizer: no two values become one."""
    bits = bits ^ (bits >> 16)
    for factor, shift in ((0x85EBCA6B, 13), (0xC2B2AE35, 16)):
        bits = bits * np.uint32(factor)
        bits = bits ^ (bits >> shift)
    return bits

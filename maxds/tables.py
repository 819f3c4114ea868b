"""Rows of a table that is split by rows over the devices of a replica: they travel, the table does not.

A device asks each of the others for the rows that it wants of its part, and gets these. Hashed rows spread evenly, all
but those that many tokens want; so a device asks each for a little more than its even share, and for what is left in
further rounds. All here is one device's program, inside `shard_map`. A part may lie in host memory: rows are read and
added there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from maxds import host
from maxds import mesh as mesh_lib
from maxds.params import Param

AXES = ("fsdp", "expert")
MULTIPLE = 4096  # of the rows of a table, so that meshes can split it


def declare(rows: int, columns: int, std: float, rate: float) -> Param:
    """Declares a table of at least so many rows. It does not decay."""
    return Param((-(-rows // MULTIPLE) * MULTIPLE, columns), P(AXES), std=std, decay=False, rate=rate, table=True)


class Traffic(NamedTuple):
    """How rows travel."""

    capacity: float  # rows asked of each device in a round, as a multiple of the even share
    compute: jnp.dtype  # of what is looked up


class _Asked(NamedTuple):
    """What a device wants of the table, M rows, sorted by the device that has them."""

    places: jax.Array  # [M]: which of the wanted they are
    rows: jax.Array  # [M]: within the part of that device
    starts: jax.Array  # [devices]: the first for each
    counts: jax.Array  # [devices]: how many

    def of_round(self, i: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
        """[devices room] each: places, M for none; and rows, as this device is asked for them, -1 for none."""
        nth = i * room + jnp.arange(room)
        at = jnp.where(nth < self.counts[:, None], self.starts[:, None] + nth, len(self.places))
        places = self.places.at[at].get(mode="fill", fill_value=len(self.places))
        return places, _swap(self.rows.at[at].get(mode="fill", fill_value=-1))


def look_up(
    shard: jax.Array, so_far: jax.Array | None, rows: jax.Array, wanted: jax.Array, traffic: Traffic
) -> jax.Array:
    """Rows of a table, [… columns]; zeros for those that are not wanted.

    Args:
      shard: this device's rows of the table.
      so_far: gradients of these, on top of which, and as whose gradient, theirs are found; None: none are wanted.
      rows: int32 […].
      wanted: bool, of the same shape.
      traffic: how they travel.
    """
    asked = _ask(rows.reshape(-1), wanted.reshape(-1), len(shard))
    found = _look_up(traffic)(shard, so_far, asked)
    return found.reshape(*rows.shape, -1)


def _ask(rows: jax.Array, wanted: jax.Array, size: int) -> _Asked:
    devices = lax.axis_size(AXES)
    owners = jnp.where(wanted, rows // size, devices)
    places = jnp.argsort(owners).astype(jnp.int32)
    counts = jnp.bincount(owners, length=devices + 1)[:devices].astype(jnp.int32)
    return _Asked(places, (rows % size)[places], jnp.cumsum(counts) - counts, counts)


def _look_up(traffic: Traffic):
    """(shard, asked) -> rows [M columns]."""

    def in_rounds(asked: _Asked, body, start: jax.Array) -> jax.Array:
        devices, most = len(asked.counts), len(asked.places)
        room = min(int(most / devices * traffic.capacity) + 1, most)
        rounds = lax.pmax(-(-jnp.max(asked.counts) // room), mesh_lib.AXES)
        return lax.fori_loop(0, rounds, lambda i, so_far: body(so_far, *asked.of_round(i, room)), start)

    @jax.custom_vjp
    def run(shard, so_far, asked):
        def one_round(found, places, theirs):
            sent = host.beside(_taken, shard, jnp.maximum(theirs, 0))
            return found.at[places].set(_swap(host.to_device(sent).astype(traffic.compute)), mode="drop")

        return in_rounds(asked, one_round, jnp.zeros((len(asked.places), shard.shape[1]), traffic.compute))

    def backward(residuals, dy):
        so_far, asked = residuals

        def one_round(grads, places, theirs):
            sent = _swap(dy.at[places].get(mode="fill", fill_value=0))
            # Of all replicas: their rows cross DCN, which are less than a table of sums would be.
            theirs, sent = (lax.all_gather(x, "data", tiled=True) for x in (theirs, sent))
            sent = jnp.where(theirs[..., None] < 0, 0, sent).astype(jnp.float32)
            return host.beside(_added, grads, jnp.maximum(theirs, 0), sent)

        grads = in_rounds(asked, one_round, host.beside(lambda g: g.astype(jnp.float32), so_far))
        return None, host.beside(lambda g: g.astype(so_far.dtype), grads), None

    run.defvjp(lambda shard, so_far, asked: (run(shard, so_far, asked), (so_far, asked)), backward)
    return run


def _taken(shard: jax.Array, rows: jax.Array) -> jax.Array:
    return shard.at[rows].get(mode="promise_in_bounds")


def _added(grads: jax.Array, rows: jax.Array, more: jax.Array) -> jax.Array:
    return grads.at[rows].add(more, mode="promise_in_bounds")


def _swap(x: jax.Array) -> jax.Array:
    """[devices …], a part for each device -> a part of each."""
    return lax.all_to_all(x, AXES, 0, 0, tiled=True)

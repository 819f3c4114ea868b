"""What a collective runs over, and for how long: mesh axes by its replica groups, links by where their devices are."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from maxds.aot.hlo import Instruction
from maxds.aot.timeline import Route
from maxds.aot.topology import Chip


@dataclasses.dataclass(frozen=True)
class Link:
    """The links between the devices of a group."""

    network: str  # ici, dcn or die
    bandwidth: float  # bytes/s that a device takes in, over all its links
    about: str  # how the bandwidth comes about
    across: float = 0.0  # seconds that each byte of an all-to-all's result takes to cross the middle of the torus


class Network:
    """The links of a mesh. A program that spans slices is one of a slice, and sends to the others over DCN."""

    def __init__(self, mesh: Mesh, chip: Chip, partitions: int):
        self.chip, self.names = chip, mesh.axis_names
        of_slice, self.slices = mesh.devices.shape[0] * partitions // mesh.size, mesh.size // partitions
        self.devices = mesh.devices[:of_slice] if of_slice else mesh.devices
        self.shape = dict(zip(self.names, self.devices.shape, strict=True))
        self.used: dict[tuple[str, ...], Link] = {}  # axes, or what of them -> links, of the collectives seen so far

    def route(self, collective: Instruction, opcode: str) -> Route:
        """What a collective runs over, and for how long.

        A device takes in, of an all-gather's result or a reduce-scatter's argument, all but its own share, and of an
        all-reduce twice that. Of an all-to-all, half of what each device of a half has must cross to the other half.
        """
        if opcode == "send":
            size = sum(a.bytes for a in collective.elements[0]) * 2 * (self.slices - 1) / self.slices  # an all-reduce
            return Route((self.names[0],), "dcn", size, size / self.chip.dcn)
        axes, members = replica_axes(collective.attributes, self.shape)
        group = len(members)
        # What starts a collective returns its operands too, first; but not an all-reduce.
        with_operands = collective.opcode.endswith("-start") and opcode != "all-reduce"
        results = collective.elements[1:2] if with_operands else collective.elements
        size = sum(a.bytes for arrays in results for a in arrays)
        link = self._link(axes, members)
        if opcode in ("collective-permute", "collective-broadcast"):
            return Route(axes, link.network, size, size / (self.chip.die if link.network == "die" else self.chip.ici))
        whole = size * {"reduce-scatter": group, "all-reduce": 2}.get(opcode, 1)
        moved = whole * (group - 1) / group
        across = size * link.across if opcode.endswith("all-to-all") else 0.0
        return Route(axes, link.network, moved, max(moved / link.bandwidth, across) if group > 1 else 0.0)

    def _link(self, axes: tuple[str, ...], group: Sequence[int]) -> Link:
        """The links of a group of devices, by their numbers; a group may be a part of its axes."""
        whole = len(group) == math.prod(self.shape[axis] for axis in axes)
        name = axes if whole else (*axes, f"({len(group)}, {group[1] - group[0]} apart)")
        if name not in self.used:
            self.used[name] = self.link(axes) if whole else self._links([self.devices.flat[n] for n in group])
        return self.used[name]

    def link(self, axes: Sequence[str]) -> Link:
        """The links between the devices that differ in `axes` only."""
        return self._links(self._members(axes))

    def _links(self, members: Sequence[Any]) -> Link:
        chip, chips = self.chip, {tuple(d.coords) for d in members}
        if len(chips) == 1:
            return Link("die", chip.die, f"between the dies of a chip, {chip.die / 1e9:g} GB/s one way")
        extents = [len({d.coords[i] for d in self.devices.flat}) for i in range(3)]
        places = [{c[i] for c in chips} for i in range(3)]
        rings = [n % chip.wraps_at == 0 for n in extents]
        if chip.dimensions == 3:  # whole cubes are joined to a torus, and what is smaller is none
            rings = [all(rings)] * 3
        ways = list(map(_ways, places, extents, rings))
        # Groups that each have one device of a chip share its links; one group's data crosses them once for both.
        shared = chip.per_chip * len(chips) / len(members)
        text = " + ".join(f"{n} along {'xyz'[i]}" for i, n in enumerate(ways) if n)
        by = f", shared by {shared:g} groups" if shared > 1 else ""
        longest = max(len(along) / n for along, n in zip(places, ways, strict=True) if n)  # chips to a link
        across = chip.per_chip * longest / 4 / chip.ici
        about = f"ICI links of {chip.ici / 1e9:g} GB/s one way: {text}{by}"
        return Link("ici", chip.ici * sum(ways) / shared, about, across)

    def _members(self, axes: Sequence[str]) -> list[Any]:
        """The first device and those that differ from it in `axes` only."""
        index = tuple(slice(None) if axis in axes else 0 for axis in self.names)
        return list(np.ravel(self.devices[index]))


def _ways(places: set[int], extent: int, ring: bool) -> int:
    """Links that a group uses along a dimension of the torus: both of a ring, else the one that a line's end has."""
    if len(places) == 1:
        return 0
    return 2 if len(places) == extent and ring else 1


# ---------------------------------------------------------------------------------- replica groups


def axes_of(group: Sequence[int], mesh_shape: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes in which the devices of a replica group, numbered as in the mesh, differ."""
    places = np.stack(np.unravel_index(np.asarray(group), tuple(mesh_shape.values())))
    return tuple(axis for axis, row in zip(mesh_shape, places, strict=True) if len(set(row.tolist())) > 1)


def replica_axes(attributes: str, mesh_shape: dict[str, int]) -> tuple[tuple[str, ...], list[int]]:
    """What a collective runs over, from its attributes.

    Returns:
      The mesh axes; the first of its groups of devices.
    """
    group = replica_group(attributes, math.prod(mesh_shape.values()))
    return axes_of(group, mesh_shape), group


def replica_group(attributes: str, total: int) -> list[int]:
    """The first group of a collective among `total` devices, which are numbered as in the mesh.

    Read are lists `{{0,1},{2,3}}`, iota `[2,2]<=[2,2]T(1,0)`, meshes `mesh['a'=4,'b'=2] {'a'}`, also with a part
    `'a':(2)2` of an axis, and of `source_target_pairs` the first. Where there is none, all devices take part.
    """
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", attributes):
        return [int(n) for n in listed.group(1).split(",")]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape, source = _numbers(iota.group(1)), _numbers(iota.group(2))
        numbers = np.arange(math.prod(source)).reshape(source)
        order = _numbers(iota.group(3)) if iota.group(3) else None
        return numbers.transpose(order).reshape(shape)[0].ravel().tolist()
    if named := re.search(
        r"replica_groups=mesh\[([^\]]*)\],? ?(?:device_ids=\(\[?([\d,]+)\]?(?:T\(([\d,]+)\))?\) ?)?\{([^}]*)\}",
        attributes,
    ):
        mesh, ids, order, axes = named.groups()
        return [_order(ids, order, total)[n] for n in _named_group(mesh, axes)]
    return list(range(total))


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _order(ids: str | None, order: str | None, total: int) -> list[int]:
    """The devices of a mesh that the compiler made up: all, in a list, or as an array of this shape, transposed."""
    if ids is None:
        return list(range(total))
    if order is None:
        return _numbers(ids)
    return np.arange(total).reshape(_numbers(ids)).transpose(_numbers(order)).ravel().tolist()


def _named_group(mesh: str, axes: str) -> list[int]:
    """Places in the mesh of the devices that differ from the first in these axes only."""
    sizes = {axis: int(n) for axis, n in re.findall(r"'([^']+)'=(\d+)", mesh)}
    chosen = {a: (before, part) for a, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)}
    shape, taken = [], []
    for axis, size in sizes.items():  # each axis as (what comes before the part, the part, what comes after it)
        before, part = (int(n) if n else 0 for n in chosen.get(axis, ("", "")))
        before, part = (before, part) if part else (1, size)
        shape += [before, part, size // before // part]
        taken += [0, slice(None) if axis in chosen else 0, 0]
    return np.arange(math.prod(shape)).reshape(shape)[tuple(taken)].ravel().tolist()

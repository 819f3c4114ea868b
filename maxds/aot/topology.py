"""TPU topologies that are not here: their devices, what a chip can do, and the links that a mesh axis runs over."""

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

GIB = 2**30


class TopologyError(ValueError):
    """There is no such topology, or nothing to compile for it with."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """What one JAX device can do; bytes, FLOPs and seconds."""

    family: str  # the name of its topologies
    per_chip: int  # devices of one chip, which share its links
    hbm_bytes: float  # that programs can use
    hbm: float  # bytes/s
    clock: float  # Hz, of the compiler's cycles
    ici: float  # bytes/s of one link, one way
    die: float  # bytes/s between the devices of a chip, one way
    dcn: float  # bytes/s to other slices
    host: float  # bytes/s to and from host memory, each way
    dimensions: int  # of the torus


# Usable HBM: the limit that the compiler itself names when a program exceeds it. HBM bandwidth: the Cloud TPU pages of
# each generation, per chip (v5p 2765, v6e 1640, TPU7x 7380 GB/s). Clock: the one at which the matrix units that the
# compiler counts on reach the published peak. ICI: the one-way link bandwidth of "How to Scale Your Model" for v5p and
# v6e; the Cloud pages give TPU7x the same 1200 GB/s a chip as v5p, and its two dies a link six times as fast as one of
# ICI. DCN: "How to Scale Your Model" (6.25 GB/s a chip for v5p, 12.5 for v6e), and v6e's figure for a chip of TPU7x.
# Host: PCIe 4 x16 (v5p) and 5 x16 (v6e, TPU7x) at 80% of nominal, shared by the devices of a chip.
CHIPS = {
    "TPU v5": Chip("v5p", 1, 95.73 * GIB, 2.765e12, 1.75e9, 9e10, 9e10, 6.25e9, 25e9, 3),
    "TPU v6 lite": Chip("v6e", 1, 31.24 * GIB, 1.64e12, 1.75e9, 9e10, 9e10, 12.5e9, 50e9, 2),
    "TPU7x": Chip("tpu7x", 2, 94.74 * GIB, 3.69e12, 2.2e9, 9e10, 5.4e11, 6.25e9, 25e9, 3),
}

# libtpu asks the machine what it is, and prints lines of complaint where it is none of its own.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",  # of a host that is not asked; any will do
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else of two processes that compile at once, one dies
}


def prepare() -> None:
    """Lets libtpu be loaded where no TPU is. Call it before anything touches a device."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def devices(name: str, slices: int = 1) -> Sequence[Any]:
    """The devices of a topology such as `tpu7x:4x4x8`, in each of `slices` slices.

    Raises:
      TopologyError: the name is not that of a topology, or libtpu is not installed.
    """
    families = [chip.family for chip in CHIPS.values()]
    family, _, extents = name.partition(":")
    if family not in families:
        meant = difflib.get_close_matches(family, families, n=1)
        advice = f"did you mean {meant[0]}?" if meant else f"known are {', '.join(families)}"
        raise TopologyError(f"--topology={name}: no TPU is named {family}; {advice} (for example tpu7x:4x4x8)")
    if not re.fullmatch(r"\d+(x\d+){1,2}", extents) or slices < 1:
        raise TopologyError(f"--topology={name} --slices={slices}: give chips as tpu7x:4x4x8 or v6e:16x16, slices from 1")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=slices).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        if "libtpu" in reason or "Unknown TPU" in reason or "TPU platform" in reason:
            raise TopologyError(
                f'compiling for {name} needs libtpu, which does not load ({reason}); pip install "maxds[tpu]"'
            ) from None
        raise TopologyError(f"--topology={name}: the compiler knows no such topology: {reason}") from None


def chip(device: Any) -> Chip:
    """Of a device of a topology."""
    return CHIPS[device.device_kind]


# ------------------------------------------------------------------------------------------- links


@dataclasses.dataclass(frozen=True)
class Link:
    """What a collective over some mesh axes runs over."""

    network: str  # ici, dcn or die
    bandwidth: float  # bytes/s that a device takes in, all its links together
    about: str  # how the bandwidth comes about


def link(mesh: Mesh, axes: Sequence[str]) -> Link:
    """The links between the devices that differ in `axes` only."""
    found = chip(mesh.devices.flat[0])
    members = _members(mesh, axes)
    if len({getattr(d, "slice_index", 0) for d in members}) > 1:
        return Link("dcn", found.dcn, f"DCN, {found.dcn / 1e9:g} GB/s a device")
    chips = {tuple(d.coords) for d in members}
    if len(chips) == 1:
        return Link("die", found.die, f"between the dies of a chip, {found.die / 1e9:g} GB/s one way")
    extents = _extents(mesh, members[0])
    ways = [_ways(sorted({c[i] for c in chips}), extents[i], found) for i in range(3)]
    # Groups that each have one device of a chip share its links; in one group, both devices' data crosses them once.
    shared = found.per_chip * len(chips) / len(members)
    text = " + ".join(f"{n} along {'xyz'[i]}" for i, n in enumerate(ways) if n)
    by = f", shared by {shared:g} groups" if shared > 1 else ""
    return Link("ici", found.ici * sum(ways) / shared, f"ICI links of {found.ici / 1e9:g} GB/s one way: {text}{by}")


def _members(mesh: Mesh, axes: Sequence[str]) -> list[Any]:
    """The first device and those that differ from it in `axes` only."""
    index = tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)
    return list(np.ravel(mesh.devices[index]))


def _extents(mesh: Mesh, like: Any) -> list[int]:
    """Chips of a slice along x, y, z."""
    same = [d.coords for d in mesh.devices.flat if getattr(d, "slice_index", 0) == getattr(like, "slice_index", 0)]
    return [len({c[i] for c in same}) for i in range(3)]


def _ways(places: list[int], extent: int, chip: Chip) -> int:
    """Links that a group uses along a dimension of the torus: both of a ring, else the one that a line's end has."""
    if len(places) == 1:
        return 0
    closed = 4 if chip.dimensions == 3 else 16  # a slice's dimension wraps around if it is a multiple of this
    return 2 if len(places) == extent and extent % closed == 0 else 1


def axes_of(group: Sequence[int], mesh_shape: dict[str, int]) -> tuple[str, ...]:
    """The mesh axes in which the devices of a replica group, numbered as in the mesh, differ."""
    places = np.stack(np.unravel_index(np.asarray(group), tuple(mesh_shape.values())))
    return tuple(axis for axis, row in zip(mesh_shape, places, strict=True) if len(set(row.tolist())) > 1)


def replica_axes(attributes: str, mesh_shape: dict[str, int]) -> tuple[tuple[str, ...], int]:
    """What a collective runs over, from its attributes.

    Returns:
      The mesh axes; how many devices a group has.
    """
    group = replica_group(attributes, math.prod(mesh_shape.values()))
    return axes_of(group, mesh_shape), len(group)


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
        r"replica_groups=mesh\[([^\]]*)\],? ?(?:device_ids=\(\[?([\d,]+)\]?(?:T\(([\d,]+)\))?\) ?)?\{([^}]*)\}", attributes
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

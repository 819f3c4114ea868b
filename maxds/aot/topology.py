"""TPU topologies that are not here: their devices, what one can do, and the hosts that GKE gives them."""

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

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
    wraps_at: int  # a dimension of the torus is a ring where its length is a multiple of this; of three, if all are
    float8: float = 1.0  # how many times as fast it multiplies float8
    dimensions: int = 3  # of the torus


# Usable HBM: the limit that the compiler itself names when a program exceeds it. HBM bandwidth: the Cloud TPU pages of
# each generation, per chip (v5p 2765, v6e 1640, TPU7x 7380 GB/s). Clock: the one at which the matrix units that the
# compiler counts on reach the published peak. ICI: the one-way link bandwidth of "How to Scale Your Model" for v5p and
# v6e; the Cloud pages give TPU7x the same 1200 GB/s a chip as v5p, and its two dies a link six times as fast as one of
# ICI. A torus closes where the Cloud pages say so: in whole cubes of 4 x 4 x 4 chips, and in nothing smaller (v5p,
# TPU7x), at 16 (v6e). DCN: "How to Scale Your Model", 6.25 GB/s a chip for v5p and 12.5 for v6e; TPU7x is given v6e's.
# Host: PCIe 4 x16 (v5p) and 5 x16 (v6e, TPU7x) at 80% of nominal. The devices of a chip share its HBM, DCN and host
# links evenly.
CHIPS = {
    "TPU v5": Chip("v5p", 1, 95.73 * GIB, 2.765e12, 1.75e9, 9e10, 9e10, 6.25e9, 25e9, 4),
    "TPU v6 lite": Chip("v6e", 1, 31.24 * GIB, 1.64e12, 1.75e9, 9e10, 9e10, 12.5e9, 50e9, 16, dimensions=2),
    "TPU7x": Chip("tpu7x", 2, 94.74 * GIB, 3.69e12, 2.2e9, 9e10, 5.4e11, 6.25e9, 25e9, 4, 2.0),
}

# libtpu asks the machine what it is, and prints lines of complaint where it is none of its own.
_ENVIRONMENT = {
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
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")  # or JAX would look for a TPU first


@dataclasses.dataclass(frozen=True)
class Slice:
    """A topology by its name, such as `tpu7x:4x4x8`."""

    chip: Chip
    extents: tuple[int, ...]  # chips along each dimension

    @property
    def devices(self) -> int:
        """JAX devices."""
        return math.prod(self.extents) * self.chip.per_chip

    @property
    def hosts(self) -> int:
        """Machines, of `CHIPS_PER_HOST` chips each."""
        return math.prod(self.extents) // CHIPS_PER_HOST

    @property
    def label(self) -> str:
        """The extents as GKE labels nodes with them, `4x4x8`."""
        return "x".join(map(str, self.extents))


def parse(name: str) -> Slice:
    """What a name says. Raises TopologyError where it is not formed like that of a topology."""
    chips = {chip.family: chip for chip in CHIPS.values()}
    family, _, extents = name.partition(":")
    if family not in chips:
        meant = difflib.get_close_matches(family, chips, n=1)
        advice = f"did you mean {meant[0]}?" if meant else f"known are {', '.join(chips)}"
        raise TopologyError(f"no TPU is named {family}; {advice} (for example tpu7x:4x4x8)")
    if not re.fullmatch(rf"[1-9]\d*(x[1-9]\d*){{{chips[family].dimensions - 1}}}", extents):
        raise TopologyError(f"give chips as {family}:{'4x4x8' if chips[family].dimensions == 3 else '16x16'}")
    return Slice(chips[family], tuple(map(int, extents.split("x"))))


# What GKE calls the TPUs, and which slices of them it has: https://cloud.google.com/kubernetes-engine/docs/concepts/
# plan-tpus, read together with xpk's table, whose hosts have four chips too. A three-dimensional slice is one of these
# few or made of cubes of 4 x 4 x 4, its dimensions in ascending order; others wait for nodes that will never come.
CHIPS_PER_HOST = 4
ACCELERATORS = {"v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice", "tpu7x": "tpu7x"}
_SMALL = "2x2x1", "2x2x2", "2x2x4", "2x4x4"
_FLAT = "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"


def of_gke(name: str) -> Slice:
    """As `parse`, of a slice that GKE has. Raises TopologyError where there is none."""
    found = parse(name)
    if found.chip.family == "v6e":
        if found.label not in _FLAT:
            raise TopologyError(f"GKE has no such slice; of v6e it has {', '.join(_FLAT)}")
        return found
    cubes = not any(n % 4 for n in found.extents)
    if found.label in _SMALL or (cubes and list(found.extents) == sorted(found.extents)):
        return found
    ascending = "x".join(map(str, sorted(found.extents)))
    advice = f"try {found.chip.family}:{ascending}" if cubes or ascending in _SMALL else "try 4x4x4, 4x4x8, 4x8x8"
    raise TopologyError(f"GKE has no such slice: it has {', '.join(_SMALL)}, and multiples of 4 that ascend; {advice}")


def devices(name: str, slices: int = 1) -> Sequence[Any]:
    """The devices of a topology such as `tpu7x:4x4x8`, in each of `slices` slices.

    Raises:
      TopologyError: the name is not that of a topology, or libtpu is not installed.
    """
    try:
        parse(name)
    except TopologyError as error:
        raise TopologyError(f"--topology={name}: {error}") from None
    if slices < 1:
        raise TopologyError(f"--slices={slices}: give slices from 1")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=slices).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise TopologyError(f"--topology={name}: the compiler knows no such topology: {reason}") from None
    except RuntimeError:  # what JAX raises itself
        raise TopologyError(
            f'--topology={name} needs the TPU compiler, and libtpu is not installed: pip install "maxds[tpu]"'
        ) from None


def chip(device: Any) -> Chip:
    """Of a device of a topology."""
    return CHIPS[device.device_kind]

"""What one instruction costs: FLOPs, bytes of HBM, and how long a device is busy with it."""

import dataclasses
import functools
import math
import re

import numpy as np

from maxds.aot.hlo import HBM, Array, Computation, Instruction, Module
from maxds.aot.topology import Chip
from maxds.model.tiles.groups import ROWS

# These name values, and move none.
FREE = set(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier partition-id replica-id "
    "domain get-dimension-size rng-get-and-update-state".split()
)
_FREE_TARGETS = set(
    "AllocateBuffer AssumeGatherIndicesInBound PrepareAsyncCallStart PrepareAsyncCallDone SliceId ZeroCrop Sharding "
    "annotate_device_placement GatherScatterIndicesBitpacked".split()
)

# The compiler tells no cycles of kernels. In its schedules of those of model/tiles one can count them: the share of the
# peak that attention with its gradients reaches, in rows of 4,096 tokens, if every tile did what only the first or last
# of a row does; but V4's, and the rotation of queries, as often as they do it. A schedule does not know how long the
# matrix units take, so no kernel takes less than its products at peak. Both cores of v5p take part. Grouped matmuls
# also wait for each group's matrix, at the bandwidth of HBM, or begin and write its gradient: shares are those of
# DeepSeek-V3's 32 groups of 5,120 rows.
SCHEDULED = {
    "tpu7x": {
        **{"attend_window_selected": 0.66, "attend_window": 0.41, "attend_selected": 0.45, "attend": 0.52},
        **{"rows_by_matrices": 0.97, "outer_products_float8": 0.76, "outer_products": 0.91},
    },
    "v5p": {
        **{"attend_window_selected": 0.90, "attend_window": 0.74, "attend_selected": 0.80, "attend": 0.86},
        **{"rows_by_matrices": 1.0, "outer_products": 0.98, "sums_of_rows": 0.73},
    },
    "v6e": {
        **{"attend_window_selected": 0.59, "attend_window": 0.38, "attend_selected": 0.43, "attend": 0.48},
        **{"rows_by_matrices": 0.86, "outer_products": 0.89, "sums_of_rows": 0.27},
    },
}
SCHEDULED_ELSE = 0.4

BASES = {
    "cycles": "the compiler's cycles, over the clock",
    "cost estimate": "the kernel's own FLOPs at the share of peak that its schedule reaches, or its bytes, the slower "
    "of the two",
    "grouped matmul": "2·K·N of each row of the tiles that it visits at the share of peak of its schedule (of "
    "float8, if both operands are that), or its bytes, the slower of the two",
    "sort": "k(k+1)/2 passes over its operands in memory, k = log2 of the sorted length (a bitonic sort)",
    "bytes": "bytes read and written, at the bandwidth of HBM",
    "none": "no estimate: counted as nothing",
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one execution of an instruction on a device."""

    seconds: float
    basis: str  # a key of BASES
    flops: float = 0.0
    hbm_bytes: float = 0.0


class Costs:
    """The costs of a program's instructions on a chip.

    Args:
      module: the program.
      chip: what runs it.
      peak: FLOP/s of its matrix products.
      filled: the share of the rows that grouped matmuls have room for, that tokens fill.
    """

    def __init__(self, module: Module, chip: Chip, peak: float, filled: float = 1.0):
        self.module, self.chip, self.peak, self.filled = module, chip, peak, filled
        self._flops: dict[str, float] = {}

    def of(self, computation: Computation, i: Instruction) -> Cost | None:
        """The cost of an instruction that runs on the TensorCore; None where it takes no time."""
        if i.opcode in FREE or i.target in _FREE_TARGETS:
            return None
        flops, moved = self.flops(computation, i), self.hbm_bytes(computation, i)
        if i.cycles is not None:
            return Cost(i.cycles / self.chip.clock, "cycles", flops, moved)
        if i.opcode == "custom-call":
            return self._custom_call(computation, i, flops, moved)
        if i.opcode == "sort":
            return self._sort(computation, i, moved)
        return Cost(moved / self.chip.hbm, "bytes", flops, moved)

    def _custom_call(self, computation: Computation, i: Instruction, flops: float, moved: float) -> Cost:
        moved = i.cost_estimate[1] if i.cost_estimate else moved
        if is_grouped_matmul(i):
            matrices = [a for name in i.operands if (a := _operand(computation, name)) and a.dtype not in _WHOLE]
            peak = self.peak * (self.chip.float8 if all(a.itemsize == 1 for a in matrices) else 1.0)
            peak *= self._scheduled(i, 1.0)
            return Cost(max(flops / peak, moved / self.chip.hbm), "grouped matmul", flops, moved)
        if i.cost_estimate:
            peak = self.peak * self._scheduled(i, SCHEDULED_ELSE)
            return Cost(max(flops / peak, moved / self.chip.hbm), "cost estimate", flops, moved)
        return Cost(0.0, "none", flops, moved)

    def _scheduled(self, i: Instruction, otherwise: float) -> float:
        shares = SCHEDULED.get(self.chip.family, {})
        return next((share for name, share in shares.items() if name in i.op_name), otherwise)

    def _sort(self, computation: Computation, i: Instruction, moved: float) -> Cost:
        dimension = int((re.search(r"dimensions=\{(\d+)\}", i.attributes) or [0, 0])[1])
        levels = math.ceil(math.log2(max(i.arrays[0].dims[dimension], 2)))
        passes = levels * (levels + 1) // 2
        one_pass = 2 * sum(a.bytes for a in i.arrays)
        return Cost(passes * one_pass / self.chip.hbm, "sort", 0.0, moved)

    # --------------------------------------------------------------------------------------- FLOPs

    def flops(self, computation: Computation, i: Instruction) -> float:
        """FLOPs of matrix products; what is done element by element does not count."""
        if i.opcode == "fusion":
            return sum(map(self._flops_inside, i.called("calls")))
        shapes = [_operand(computation, name) for name in i.operands]
        if is_grouped_matmul(i):
            return _grouped_matmul_flops(i, [a for a in shapes if a], self.filled)
        if i.opcode == "custom-call" and i.cost_estimate is not None:
            return float(i.cost_estimate[0])
        if i.opcode in ("dot", "convolution") and len(shapes) >= 2 and shapes[0] and shapes[1]:
            product = _dot_flops if i.opcode == "dot" else _convolution_flops
            return product(i, shapes[0], shapes[1])
        return 0.0

    def _flops_inside(self, name: str) -> float:
        if name not in self._flops:
            computation = self.module.computations[name]
            self._flops[name] = sum(self.flops(computation, i) for i in computation.instructions)
        return self._flops[name]

    # --------------------------------------------------------------------------------------- bytes

    def hbm_bytes(self, computation: Computation, i: Instruction) -> float:
        """Bytes that an instruction reads from HBM and writes to it; what stays in VMEM does not count."""
        if i.opcode == "fusion" and (called := i.called("calls")):
            return self._fusion_bytes(computation, i, self.module.computations[called[0]])
        if i.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * _in_hbm(i)
        if i.opcode in ("dynamic-update-slice", "scatter"):
            update = computation.by_name.get(i.operands[-1 if i.opcode == "scatter" else 1])
            return 2 * _in_hbm(update) if update else 0.0
        return _in_hbm(i) + sum(_in_hbm(computation.by_name.get(name)) for name in dict.fromkeys(i.operands))

    def _fusion_bytes(self, computation: Computation, i: Instruction, inner: Computation) -> float:
        read = 0.0
        for name, parameter in zip(i.operands, inner.parameters, strict=False):
            whole, inside = _in_hbm(computation.by_name.get(name)), _read_inside(inner, parameter.name)
            read += (whole if inside == math.inf else inside) if whole else 0.0
        return read + min(_in_hbm(i), _written(inner, inner.root))


def is_grouped_matmul(i: Instruction) -> bool:
    """Whether it is of model/tiles/groups.py, or what the compiler puts in the place of `lax.ragged_dot`."""
    ours = "rows_by_matrices" in i.op_name or "outer_products" in i.op_name
    return i.opcode == "custom-call" and (ours or "ragged_dot_tiling" in i.attributes)


def _operand(computation: Computation, name: str) -> Array | None:
    found = computation.by_name.get(name)
    return found.arrays[0] if found and found.arrays else None


def _in_hbm(i: Instruction | None) -> float:
    return sum(a.bytes for a in i.arrays if a.space == HBM) if i else 0.0


def _read_inside(inner: Computation, name: str) -> float:
    """Bytes that a fusion reads of a parameter: only slices of it, where only slices are taken."""
    total = 0.0
    for user in inner.users.get(name, ()):
        if user.opcode == "bitcast":
            total += _read_inside(inner, user.name)
        elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
            total += sum(a.bytes for a in user.arrays)
        elif user.opcode not in ("dynamic-update-slice", "scatter") or user.operands[0] != name:  # these write in place
            return math.inf
    return total


def _written(inner: Computation, root: Instruction) -> float:
    """Bytes that a fusion writes: of an update in place, the update."""
    if root.opcode in ("bitcast", "tuple"):
        return sum(_written(inner, inner.by_name[name]) for name in root.operands if name in inner.by_name)
    if root.opcode in ("dynamic-update-slice", "scatter"):
        update = inner.by_name.get(root.operands[-1 if root.opcode == "scatter" else 1])
        return sum(a.bytes for a in update.arrays) if update else math.inf
    return sum(a.bytes for a in root.arrays)


_WHOLE = "s32", "u32"  # of what tells a kernel of the groups
_AS_IT_RUNS = str(-(2**63))  # what Mosaic writes for an extent that is an argument


def _grouped_matmul_flops(i: Instruction, operands: list[Array], filled: float) -> float:
    """[R K] by [G K N] -> [R N], or [R K] by [R N] -> [G K N], tile by tile of rows.

    A kernel whose number of tiles is decided as it runs visits those that tokens fill, and one twice where a group ends
    within it. The compiler's multiplies tiles of K and N that stand out over these, too.
    """
    matrices = [a.dims for a in (*operands, i.arrays[0]) if a.dtype not in _WHOLE]
    (rows, _), (groups, *sides) = (next(dims for dims in matrices if len(dims) == rank) for rank in (2, 3))
    tile, as_it_runs = ROWS, True
    if told := i.attributes.partition('ragged_dot_tiling="')[2].partition('"')[0]:
        tile, *parts = map(int, told.split(","))
        sides = [-(-n // part) * part for n, part in zip(sides, parts, strict=True)]
        as_it_runs = _AS_IT_RUNS in i.kernel
    visited = filled * rows + (groups - 1) * tile if as_it_runs else rows
    return 2.0 * min(visited, rows) * math.prod(sides)


def _dot_flops(i: Instruction, left: Array, _right: Array) -> float:
    contracting = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)
    sizes = [left.dims[int(n)] for n in contracting.group(1).split(",") if n] if contracting else []
    return 2.0 * i.arrays[0].elements * math.prod(sizes)


def _convolution_flops(i: Instruction, left: Array, right: Array) -> float:
    """A TPU's matrix product: batch dimensions are windows most of whose taps fall between the values."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    if not labels:
        return 0.0
    lhs, rhs, out = labels.groups()
    sizes = dict(zip(out, i.arrays[0].dims, strict=True))
    taps = 1
    for n in (c for c in rhs if c.isdigit()):
        extents = left.dims[lhs.index(n)], right.dims[rhs.index(n)], sizes[n]
        taps *= _taps(*extents, _window(i.attributes, int(n)))
    return 2.0 * sizes["b"] * sizes["f"] * right.dims[rhs.index("i")] * taps


def _window(attributes: str, dimension: int) -> tuple[int, int, int, int]:
    """(stride, padding before, dilation of the values, dilation of the window) of a dimension."""
    window = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(part.split("=") for part in window.group(1).split()) if window else {}

    def field(name: str) -> str:
        return fields[name].split("x")[dimension] if name in fields else ""

    before = int(field("pad").split("_")[0] or 0)
    return int(field("stride") or 1), before, int(field("lhs_dilate") or 1), int(field("rhs_dilate") or 1)


@functools.lru_cache(maxsize=4096)
def _taps(values: int, taps: int, outputs: int, window: tuple[int, int, int, int]) -> int:
    """How many (output, tap) pairs of a dimension meet a value rather than padding or a gap."""
    stride, before, gap, spread = window
    first = np.arange(outputs) * stride - before  # where the first tap of each output is
    if spread == 1:  # without a table of all pairs: of a batch that is a window there are a thousand million
        last = np.minimum((first + taps - 1) // gap, values - 1)
        return int(np.sum(np.maximum(last - np.maximum(-(-first // gap), 0) + 1, 0)))
    place = first[:, None] + np.arange(taps)[None] * spread
    return int(np.sum((place >= 0) & (place % gap == 0) & (place < (values - 1) * gap + 1)))

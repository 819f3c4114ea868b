"""Whether a step fits: bytes of a device by kind, as the compiler counts them, and the largest buffers at the peak.

Compilers for TPU give sums, and no table of buffers (`serialized_buffer_assignment_proto` is empty). So the largest
buffers are estimated here from the scheduled program: every result that is stored in HBM lives from the instruction
that writes it to the last one that reads it; loops and updates in place reuse what they are given.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

import jax

from maxds import host as host_lib
from maxds.aot.hlo import HBM, Computation, Instruction, Module

ESTIMATE = "estimated from the live ranges of the scheduled program, with the padding of its layouts"


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One of the largest temporaries of a program that does not fit, as the compiler tells it."""

    bytes: float
    shape: str
    op_name: str  # empty where the compiler made it


@dataclasses.dataclass(frozen=True)
class Fit:
    """Bytes of one device. None: not known."""

    arguments: float
    outputs: float | None  # less those that reuse an argument
    temporaries: float | None
    code: float | None
    host: float | None  # in host memory
    peak: float | None  # of the program in HBM, by the compiler, and no more than the total
    total: float  # of all these in HBM, as if nothing gave way to anything; where the compiler refuses, what it needs
    limit: float  # usable HBM
    fits: bool  # the compiler's verdict
    method: str
    allocations: tuple[Allocation, ...] = ()


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Something in HBM at the peak."""

    bytes: float
    instruction: Instruction
    element: int  # of the instruction's result

    @property
    def shape(self) -> str:
        """Its type and dimensions."""
        return ", ".join(map(str, self.instruction.elements[self.element]))


def of_executable(stats: Any, limit: float) -> Fit:
    """What a compiled program says of itself: `stats` is its `memory_analysis()`."""
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes - stats.alias_size_in_bytes
    kinds = ("argument", "output", "temp", "generated_code")
    host = sum(getattr(stats, f"host_{kind}_size_in_bytes") for kind in kinds) - stats.host_alias_size_in_bytes
    parts = arguments, outputs, stats.temp_size_in_bytes, stats.generated_code_size_in_bytes
    # Its peak has arguments in either memory, and of temporaries those in the memory that has more of them.
    away = stats.host_argument_size_in_bytes + stats.host_output_size_in_bytes - stats.host_alias_size_in_bytes
    told = getattr(stats, "peak_memory_in_bytes", 0)  # JAX 0.10 tells none
    peak = min(told - away, sum(parts)) if told else None
    return Fit(*parts, host, peak, sum(parts), limit, True, "the compiled program's memory analysis")


# The compiler refuses a program early, by what it sums up to, or late, when it has found no place for a buffer.
_EARLY = r"total memory required for HLO temporaries \(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)"
_LATE = r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm"
_ALLOCATION = r"Size: ([\d.]+)([KMGT])\n(?:\s*Operator: op_name=\"([^\"]*)\".*\n)?\s*Shape: (\S+?)\{"


def of_error(message: str, arguments: Iterable[jax.ShapeDtypeStruct]) -> Fit | None:
    """What is known of a program that the compiler refused for want of HBM; None where it did so for another reason."""
    refusal = re.search(_EARLY, message) or re.search(_LATE, message)
    if refusal is None:
        return None
    held = float(sum(_shard_bytes(a) for a in arguments if not _in_host(a)))
    total, limit = _bytes(*refusal.groups()[:2]), _bytes(*refusal.groups()[2:])
    method = "the compiler's message, whose total includes the arguments; arguments from their shapes and shardings"
    temporaries = message.partition("Largest program allocations")[2].partition("Largest argument")[0]
    found = [Allocation(_bytes(n, unit), shape, op) for n, unit, op, shape in re.findall(_ALLOCATION, temporaries)]
    return Fit(held, None, max(total - held, 0.0), None, None, None, total, limit, False, method, tuple(found[:10]))


def _bytes(number: str, unit: str) -> float:
    return float(number) * 1024 ** (" KMGT".index(unit))


def _in_host(a: jax.ShapeDtypeStruct) -> bool:
    return a.sharding is not None and a.sharding.memory_kind == host_lib.KIND


def _shard_bytes(a: jax.ShapeDtypeStruct) -> int:
    shape = a.sharding.shard_shape(a.shape) if a.sharding is not None else a.shape
    return math.prod(shape) * a.dtype.itemsize


# ---------------------------------------------------------------------------------------- largest buffers


def largest(module: Module, count: int = 10) -> tuple[float, list[Buffer]]:
    """The estimated peak of a program, and the largest buffers that are live then."""
    live = _Liveness(module)
    peak, buffers = live.peak(module.entry, owns_parameters=True)
    return peak, sorted(buffers, key=lambda b: -b.bytes)[:count]


_ALIASES = set("bitcast opt-barrier tuple get-tuple-element while after-all add-dependency".split())

Place = tuple[str, int]  # an instruction and an element of its result


class _Liveness:
    def __init__(self, module: Module):
        self.module = module
        self.known: dict[str, tuple[float, list[Buffer]]] = {}

    def peak(self, computation: Computation, *, owns_parameters: bool = False) -> tuple[float, list[Buffer]]:
        """Bytes and buffers at the peak, on top of the parameters where these are the caller's."""
        if computation.name not in self.known:
            self.known[computation.name] = self._peak(computation, owns_parameters)
        return self.known[computation.name]

    def _peak(self, computation: Computation, owns_parameters: bool) -> tuple[float, list[Buffer]]:
        buffers, values = self._values(computation)
        ends = self._last_uses(computation, values)
        given = {p for p in buffers if computation.by_name[p[0]].opcode == "parameter"}
        if owns_parameters:  # the caller keeps what it has not donated
            kept = {p for p in given if int(computation.by_name[p[0]].arguments) not in self.module.donated}
            ends |= dict.fromkeys(kept, len(computation.instructions))
        expiring = collections.defaultdict(list)
        for place, end in ends.items():
            expiring[end].append(place)
        live = set(given)
        now = sum(buffers[p] for p in given)
        before = 0.0 if owns_parameters else now
        best, at_best, inner_best = now, frozenset(live), []
        for n, i in enumerate(computation.instructions):
            born = [(i.name, k) for k in range(len(i.elements)) if (i.name, k) in buffers and i.opcode != "parameter"]
            live.update(born)
            now += sum(buffers[p] for p in born)
            inner, inside = self._inner(i)
            if now + inner > best:
                best, at_best, inner_best = now + inner, frozenset(live), inside
            for place in expiring.get(n, ()):
                if place in live:
                    live.remove(place)
                    now -= buffers[place]
        shown = [p for p in at_best if owns_parameters or p not in given]
        found = [Buffer(buffers[p], computation.by_name[p[0]], p[1]) for p in shown]
        return best - before, found + inner_best

    def _inner(self, i: Instruction) -> tuple[float, list[Buffer]]:
        """What the computations of an instruction need on top: the one that needs most."""
        if i.opcode not in ("while", "conditional", "call"):
            return 0.0, []
        names = i.called("body", "branch_computations", "true_computation", "false_computation", "to_apply")
        peaks = [self.peak(self.module.computations[name]) for name in names if name in self.module.computations]
        return max(peaks, key=lambda p: p[0], default=(0.0, []))

    def _values(self, computation: Computation) -> tuple[dict[Place, float], dict[str, list[set[Place]]]]:
        """Buffers with their bytes; and which of them each element of each result stands for."""
        buffers: dict[Place, float] = {}
        values: dict[str, list[set[Place]]] = {}
        for i in computation.instructions:
            aliased = self._aliased(i, values)
            if aliased is not None:
                values[i.name] = aliased
                continue
            values[i.name] = []
            # What starts a transfer returns its operand too: a copy as its second element, the others as their first.
            starts = i.opcode.endswith("-start") and i.opcode != "all-reduce-start"
            passed = {"copy-start": 1}.get(i.opcode, 0) if starts else None
            for k, arrays in enumerate(i.elements):
                size = sum(a.padded_bytes for a in arrays if a.space == HBM) if k != passed else 0.0
                handed = (
                    set().union(*(p for name in i.operands for p in values.get(name, []))) if k == passed else set()
                )
                values[i.name].append({(i.name, k)} if size else handed)
                if size:
                    buffers[i.name, k] = size
        return buffers, values

    def _aliased(self, i: Instruction, values: dict[str, list[set[Place]]]) -> list[set[Place]] | None:
        """The buffers that a result shares with the operands; None where it has its own."""
        operands = [values.get(name, []) for name in i.operands]
        if i.opcode == "tuple":
            return [set().union(*operand) for operand in operands]
        if i.opcode == "get-tuple-element" and operands:
            return [operands[0][i.index]] if i.index < len(operands[0]) else [set()]
        if i.opcode.endswith("-done") and operands and len(operands[0]) > 1:
            return [operands[0][0 if i.opcode == "copy-done" else 1]] * len(i.elements)
        if i.opcode in _ALIASES or i.opcode.endswith(("-done", "-update")):
            return operands[0] if operands else [set()]
        updated = self._updated(i)
        return None if updated is None else [set().union(*operands[updated])]

    def _updated(self, i: Instruction) -> int | None:
        """Which operand an update in place is one of."""
        if i.opcode == "dynamic-update-slice":
            return 0
        if i.opcode != "fusion" or i.shape.startswith("("):
            return None
        if said := re.search(r"output_to_operand_aliasing=\{\{\}: \((\d+), \{\}\)\}", i.attributes):
            return int(said.group(1))
        inner = self.module.computations[i.called("calls")[0]]
        root = inner.root
        while root.opcode == "bitcast":
            root = inner.by_name[root.operands[0]]
        if root.opcode != "dynamic-update-slice":
            return None
        target = inner.by_name[root.operands[0]]
        return int(target.arguments) if target.opcode == "parameter" else None

    @staticmethod
    def _last_uses(computation: Computation, values: dict[str, list[set[Place]]]) -> dict[Place, int]:
        ends: dict[Place, int] = {}
        for n, i in enumerate(computation.instructions):
            for place in set().union(*values[i.name]):
                ends[place] = max(ends.get(place, 0), n)
            if i.opcode not in ("tuple", "get-tuple-element", "bitcast"):  # these name a buffer, and do not read it
                for name in i.operands:
                    for place in set().union(*values.get(name, [set()])):
                        ends[place] = n
        for place in set().union(*values[computation.root.name]):
            ends[place] = len(computation.instructions)
        return ends

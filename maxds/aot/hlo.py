"""The text of a compiled program, as data: computations, instructions, shapes, and where each came from.

The text is what `compiled.as_text()` gives. The program is scheduled: in a computation, the order of the text is the
order in which a device starts its instructions.
"""

import base64
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator

HBM, VMEM, HOST = 0, 1, 5  # memory spaces, S(n) in a layout
COLLECTIVES = (
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast".split()
)


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a result."""

    dtype: str
    dims: tuple[int, ...]
    space: int = HBM
    order: tuple[int, ...] = ()  # dimensions from the most minor to the most major
    tile: tuple[int, ...] = ()  # of the most minor dimensions, which are padded to it

    @property
    def itemsize(self) -> float:
        """Bytes of an element; below 1 where it has fewer bits than a byte."""
        bits = re.search(r"\d+", self.dtype)  # a bool has no number, and neither have tokens, which take nothing
        return int(bits.group()) / 8 if bits else float(self.dtype == "pred")

    @property
    def elements(self) -> int:
        """How many elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """Bytes of the elements."""
        return self.elements * self.itemsize

    @property
    def padded_bytes(self) -> float:
        """Bytes in memory, with the padding to whole tiles."""
        major_to_minor = [self.dims[i] for i in reversed(self.order)] if self.order else list(self.dims)
        for back, size in enumerate(reversed(self.tile), 1):
            if back <= len(major_to_minor):
                major_to_minor[-back] = math.ceil(major_to_minor[-back] / size) * size
        return math.prod(major_to_minor) * self.itemsize

    def __str__(self):
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str  # as the text has it
    operands: tuple[str, ...]
    arguments: str  # what stands between the parentheses: operands, or the value of a constant
    attributes: str
    is_root: bool = False
    encoded: str = ""  # of a Pallas call: its program

    @functools.cached_property
    def elements(self) -> tuple[tuple[Array, ...], ...]:
        """The arrays of each element of the result, if it is a tuple; else of the one result."""
        parts = _split(self.shape[1:-1]) if self.shape.startswith("(") else [self.shape]
        return tuple(tuple(_arrays(part)) for part in parts)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All arrays of the result."""
        return tuple(itertools.chain.from_iterable(self.elements))

    @functools.cached_property
    def cycles(self) -> int | None:
        """The compiler's estimate of its duration, in clock cycles."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found.group(1)) if found else None

    @functools.cached_property
    def cost_estimate(self) -> tuple[int, int] | None:
        """FLOPs and bytes that the author of a custom call says it costs."""
        found = re.search(r'"cost_estimate":\{([^}]*)\}', self.attributes)
        if not found:
            return None
        values = dict(re.findall(r'"(\w+)":"?(\d+)', found.group(1)))
        return int(values.get("flops", 0)), int(values.get("bytes_accessed", 0))

    @functools.cached_property
    def kernel(self) -> str:
        """Of a Pallas call: its program, as far as that is text."""
        return base64.b64decode(self.encoded).decode(errors="ignore")

    @functools.cached_property
    def op_name(self) -> str:
        """The path of `jax.named_scope`s and transformations that traced it; empty where the compiler made it."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found.group(1) if found else ""

    @functools.cached_property
    def target(self) -> str:
        """Of a custom call: what it calls."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    def called(self, *keys: str) -> list[str]:
        """Names of the computations under these attributes: `body`, `condition`, `calls`, `to_apply`, …"""
        found = []
        for key in keys:
            for many, one in re.findall(rf"\b{key}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", self.attributes):
                found += re.findall(r"[\w.\-]+", many) if many else [one]
        return found

    @property
    def index(self) -> int:
        """Of a get-tuple-element: which."""
        return self.number("index")

    def number(self, key: str) -> int:
        """The integer of an attribute `key=…`; 0 where there is none."""
        found = re.search(rf"\b{key}=(\d+)", self.attributes)
        return int(found.group(1)) if found else 0


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions, in the order of the schedule."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions, by their names."""
        return {i.name: i for i in self.instructions}

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """In the order of the arguments."""
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.arguments or 0))

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction."""
        found: dict[str, list[Instruction]] = {i.name: [] for i in self.instructions}
        for i in self.instructions:
            for operand in dict.fromkeys(i.operands):
                found.setdefault(operand, []).append(i)
        return found


@dataclasses.dataclass(frozen=True)
class Module:
    """A program of one device."""

    name: str
    computations: dict[str, Computation]
    entry: Computation
    partitions: int  # devices that run it
    donated: frozenset[int]  # parameters whose buffers results reuse
    frames: dict[int, tuple[str, int]]  # stack frame -> ("file:line", the frame that called it, or 0)

    def sources(self, instruction: Instruction) -> list[str]:
        """`file:line` of the code that an instruction stems from, innermost first; empty where it is not known."""
        old = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
        found, frame = [f"{old.group(1)}:{old.group(2)}"] if old else [], instruction.number("stack_frame_id")
        while frame in self.frames and len(found) < 100:
            place, frame = self.frames[frame]
            found.append(place)
        return found

    def op_name(self, instruction: Instruction) -> str:
        """Its `op_name`, or where the compiler gave it none, that of something in what it calls."""
        if instruction.op_name:
            return instruction.op_name
        for name in instruction.called("calls", "to_apply"):
            for inner in reversed(self.computations[name].instructions) if name in self.computations else ():
                if found := self.op_name(inner):
                    return found
        return ""

    def collective(self, name: str) -> Instruction | None:
        """The collective that a computation, or one that it calls, performs."""
        for i in self.computations[name].instructions if name in self.computations else ():
            if i.opcode.removesuffix("-start") in COLLECTIVES:
                return i
            for inner in i.called("calls", "to_apply") if i.opcode in ("call-start", "async-start", "fusion") else ():
                if found := self.collective(inner):
                    return found
        return None


# ------------------------------------------------------------------------------------------ parser

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_START = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = \S")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = ")


def parse(text: str) -> Module:
    """Reads a program.

    Raises:
      ValueError: the text has no ENTRY computation.
    """
    lines = text.splitlines()
    computations, entry = {}, None
    for name, is_entry, body in _bodies(lines):
        computations[name] = Computation(name, tuple(map(_instruction, body)))
        entry = computations[name] if is_entry else entry
    if entry is None:
        raise ValueError("this is not the text of a compiled program: it has no ENTRY computation")
    head = lines[0]
    name = re.match(r"HloModule ([\w.\-]+)", head)
    partitions = re.search(r"num_partitions=(\d+)", head)
    donated = re.findall(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}, \w+-alias\)", head)
    return Module(
        name=name.group(1) if name else "",
        computations=computations,
        entry=entry,
        partitions=int(partitions.group(1)) if partitions else 1,
        donated=frozenset(map(int, donated)),
        frames=_frames(text),
    )


def _bodies(lines: list[str]) -> Iterator[tuple[str, bool, list[str]]]:
    """(name, whether it is the entry, its instructions, each on one line) of every computation."""
    header, body = None, []
    for line, following in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        if header is None:
            header, body = _HEADER.match(line), []
        elif re.match(r"\}(, |$)", line) and not following.strip():
            # Attributes of a Pallas call may span lines, and these may be a brace too; but no empty line follows them.
            yield header.group(2), header.group(1) is not None, body
            header = None
        elif _START.match(line):
            body.append(line)
        elif body:
            body[-1] += " " + line


def _instruction(line: str) -> Instruction:
    start = _INSTRUCTION.match(line)
    assert start is not None, line
    rest = line[start.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode = rest[: rest.index("(")]
    close = _closing(rest, len(opcode))
    arguments = rest[len(opcode) + 1 : close]
    operands = () if opcode in ("constant", "parameter") else tuple(re.findall(r"%([\w.\-]+)", arguments))
    before, _, program = rest[close + 1 :].partition('"body":"')
    encoded, _, after = program.partition('"')
    is_root = start.group(1) is not None
    return Instruction(start.group(2), opcode, shape, operands, arguments, before + after, is_root, encoded)


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return found.start()
    raise ValueError(f"no closing parenthesis in {text[:200]}")


def _split(text: str) -> list[str]:
    """The elements of a tuple's shape."""
    parts, depth = [""], 0
    for piece in re.split(r"([(){}\[\],])", text):
        depth += (piece in ("(", "{", "[")) - (piece in (")", "}", "]"))
        if piece == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return [part.strip() for part in parts if part.strip()]


_ARRAY = re.compile(r"\b(pred|token|opaque|[a-z]+\d+\w*)\[([\d,<=]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")


@functools.lru_cache(maxsize=65536)
def _arrays(text: str) -> tuple[Array, ...]:
    found = []
    for dtype, dims, order, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        tile = re.search(r"T\(([\d,]+)\)", layout)
        sizes = tuple(int(n.removeprefix("<=")) for n in dims.split(",") if n)
        minor_first = tuple(int(n) for n in order.split(",") if n)
        tiles = tuple(int(n) for n in tile.group(1).split(",")) if tile else ()
        found.append(Array(dtype, sizes, int(space.group(1)) if space else HBM, minor_first, tiles))
    return tuple(found)


def _frames(text: str) -> dict[int, tuple[str, int]]:
    """The tables at the head of a program: stack frame -> (file and line, caller)."""

    def table(title: str) -> list[str]:
        found = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
        return found.group(1).splitlines() if found else []

    def fields(line: str) -> tuple[int, dict[str, int]]:
        return int(line.split()[0]), {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", line)}

    files = {int(line.split()[0]): line.split(None, 1)[1].strip('"') for line in table("FileNames")}
    places = dict(map(fields, table("FileLocations")))
    frames = dict(map(fields, table("StackFrames")))
    found = {}
    for number, frame in frames.items():
        place = places.get(frame.get("file_location_id", 0), {})
        # The number of the caller is written one too high.
        caller = frame.get("parent_frame_id", 0) - 1
        found[number] = f"{files.get(place.get('file_name_id', 0), '?')}:{place.get('line', 0)}", caller
    return found

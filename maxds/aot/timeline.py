"""The schedule of a program, walked: when a device computes, when it sends, and when it waits.

A device has one stream of compute, which starts instructions in the order of the text. What is asynchronous runs on
streams of its own beside it: one for each mesh axis of a network, one each for copies between HBM and VMEM, copies to
and from host memory, and work on the SparseCores. A `…-done` waits for its transfer; that wait, and the whole of a
synchronous collective, is exposed.
"""

import collections
import copy
import dataclasses
import re
from collections.abc import Callable

from maxds.aot.cost import Cost, Costs
from maxds.aot.hlo import COLLECTIVES, HOST, Computation, Instruction, Module

COMPUTE, HOST_DMA, LOCAL_DMA, SPARSE_CORE = "compute", "host", "HBM copies", "SparseCore"


@dataclasses.dataclass(frozen=True)
class Route:
    """What a collective runs over, how much a device takes in, and for how long."""

    axes: tuple[str, ...]
    network: str  # ici, dcn or die
    bytes: float
    seconds: float

    @property
    def lanes(self) -> tuple[str, ...]:
        """The streams that it occupies."""
        return tuple(f"{self.network} {axis}" for axis in self.axes) or (self.network,)


@dataclasses.dataclass
class Work:
    """A transfer under way, or done."""

    instruction: Instruction  # what is sent, or called
    computation: Computation  # that it stands in
    opcode: str
    seconds: float
    bytes: float
    lanes: tuple[str, ...]
    route: Route | None = None
    finish: float | None = None  # None: not yet started


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happens in one of the streams."""

    start: float  # seconds
    seconds: float
    lane: str
    instruction: Instruction
    opcode: str
    stage: str
    exposed: bool = False  # the compute stream waits


@dataclasses.dataclass
class Tally:
    """Sums over a step."""

    times: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0

    def add(self, times: float, *, seconds=0.0, exposed=0.0, bytes=0.0, flops=0.0) -> None:
        """Adds something that happens `times` times."""
        self.times += times
        self.seconds += times * seconds
        self.exposed += times * exposed
        self.bytes += times * bytes
        self.flops += times * flops


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop, and when its last walked iteration ran."""

    instruction: Instruction
    body: Computation
    trips: int
    start: float
    end: float


def _tallies() -> dict:
    return collections.defaultdict(Tally)


@dataclasses.dataclass
class Timeline:
    """One step of one device. Seconds, bytes and FLOPs are of the whole step."""

    step: float = 0.0
    compute: dict[str, Tally] = dataclasses.field(default_factory=_tallies)  # by what the estimate rests on
    collectives: dict[tuple[str, tuple[str, ...], str], Tally] = dataclasses.field(default_factory=_tallies)
    others: dict[str, Tally] = dataclasses.field(default_factory=_tallies)  # streams that are no network
    instructions: dict[str, Tally] = dataclasses.field(default_factory=_tallies)  # by name
    named: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    loops: dict[str, Loop] = dataclasses.field(default_factory=dict)  # by the name of the body
    skipped: list[Instruction] = dataclasses.field(default_factory=list)  # loops whose trips nobody knows
    events: list[Event] = dataclasses.field(default_factory=list)

    @property
    def compute_seconds(self) -> float:
        """How long the compute stream computes."""
        return sum(t.seconds for t in self.compute.values())

    @property
    def communication(self) -> float:
        """How long collectives take, hidden or not."""
        return sum(t.seconds for t in self.collectives.values())

    @property
    def exposed(self) -> float:
        """How long the compute stream waits for collectives."""
        return sum(t.exposed for t in self.collectives.values())

    @property
    def stalled(self) -> float:
        """How long it waits for anything else."""
        return sum(t.exposed for t in self.others.values())

    @property
    def flops(self) -> float:
        """FLOPs of matrix products."""
        return sum(t.flops for t in self.compute.values())

    @property
    def hbm_bytes(self) -> float:
        """Bytes that computing moves to and from HBM, and copies beside it."""
        return sum(t.bytes for t in self.compute.values()) + sum(
            self.others[lane].bytes for lane in (LOCAL_DMA, SPARSE_CORE) if lane in self.others
        )


_OF_LOOPS = ("while", "body", "eval_jaxpr")  # scopes that JAX makes
STAGES = ("attention", "mlp", "dispatch", "experts", "combine", "weights", "gradients", "head", "optimizer", "other")


def stage(op_name: str, opcode: str, axes: tuple[str, ...] | None = None) -> str:
    """The stage of the decoder that something belongs to, by the innermost `jax.named_scope` that names one.

    Args:
      op_name: of the instruction.
      opcode: of the collective, or of the instruction.
      axes: of a collective: outside a stage, what travels over `expert` is the combine, and the rest are weights and
        gradients.
    """
    scopes = re.split(r"[/()]", op_name)
    inner = next((scope for scope in reversed(scopes) if scope in STAGES), None)
    if inner:
        return inner
    if axes is not None:
        over_experts = axes == ("expert",) and "psum" not in scopes
        return "combine" if over_experts else "weights" if opcode == "all-gather" else "gradients"
    return "optimizer" if scopes[0] == "jit" and "shard_map" not in scopes else "other"


def within_stage(op_name: str) -> str:
    """What of an operation's name tells what a stage does there: of the backward pass, no more than that is known."""
    scopes = op_name.split("/")
    of_stages = [n for n, scope in enumerate(scopes) if not set(STAGES).isdisjoint(re.split(r"[()]", scope))]
    first = of_stages[-1] + 1 if of_stages else len(scopes) - 1
    return "/".join(scope for scope in scopes[first:] if scope not in _OF_LOOPS)


def walk(
    module: Module, costs: Costs, route: Callable[[Instruction, str], Route], trips: int | None = None
) -> Timeline:
    """The timeline of one step.

    Args:
      module: a scheduled program.
      costs: of its instructions.
      route: (collective, its opcode) -> what it runs over.
      trips: of a loop of the entry computation that does not say how many it takes; others such are skipped.
    """
    walker = _Walker(module, costs, route, trips)
    walker.run(module.entry, 1.0, {}, {})
    walker.timeline.step = walker.now
    return walker.timeline


Carried = dict[int, Work]  # element of a loop's state -> the transfer whose handle it is


class _Walker:
    def __init__(self, module: Module, costs: Costs, route: Callable[[Instruction, str], Route], trips: int | None):
        self.module, self.costs, self.route, self.trips = module, costs, route, trips
        self.timeline = Timeline()
        self.now = 0.0
        self.free: dict[str, float] = collections.defaultdict(float)  # lane -> when it is idle again
        self.rendezvous: dict[str, Work] = {}  # transfers to other slices, by the name that both ends give

    def run(self, computation: Computation, times: float, carried: Carried, open_: dict[str, Work]) -> Carried:
        """Walks a computation that the whole step runs `times` times; returns the transfers that it leaves open."""
        for i in computation.instructions:
            if i.opcode == "get-tuple-element" and i.index in carried and self._is_state(computation, i):
                open_[i.name] = carried[i.index]
            elif i.opcode == "while":
                self._loop(computation, i, times, open_)
            elif i.opcode == "conditional":
                self._slowest(i, times)
            elif i.opcode == "call":
                for name in i.called("to_apply"):
                    self.run(self.module.computations[name], times, {}, {})
            else:
                self._one(computation, i, times, open_)
        root = computation.root
        elements = root.operands if root.opcode == "tuple" else (root.name,)
        return {n: open_[name] for n, name in enumerate(elements) if name in open_}

    @staticmethod
    def _is_state(computation: Computation, i: Instruction) -> bool:
        source = computation.by_name.get(i.operands[0])
        return source is not None and source.opcode == "parameter"

    # ----------------------------------------------------------------------------------- control flow

    def _loop(self, computation: Computation, i: Instruction, times: float, open_: dict[str, Work]) -> None:
        """Walks three iterations at most: the first, one that may differ from it, and one for all the others."""
        body = self.module.computations[i.called("body")[0]]
        trips = trip_count(self.module, computation, i)
        if trips is None and computation is self.module.entry:
            trips = self.trips
        if trips is None:
            self.timeline.skipped.append(i)
            return
        state = computation.by_name.get(i.operands[0])
        elements = state.operands if state and state.opcode == "tuple" else i.operands
        carried = {n: open_[name] for n, name in enumerate(elements) if name in open_}
        for iteration in range(min(trips, 3)):
            repeats = trips - 2 if iteration == 2 else 1
            start = self.now
            carried = self.run(body, times * repeats, carried, {})
            self.timeline.loops[body.name] = Loop(i, body, trips, start, self.now)
            if repeats > 1:
                self._repeat(i, (self.now - start) * (repeats - 1), carried)
        for user in computation.users.get(i.name, ()):
            if user.opcode == "get-tuple-element" and user.index in carried:
                open_[user.name] = carried[user.index]

    def _repeat(self, i: Instruction, seconds: float, carried: Carried) -> None:
        """Lets the time of further equal iterations pass, for everything that is under way."""
        self.timeline.events.append(self._event(self.now, seconds, COMPUTE, i, "while"))
        self.now += seconds
        for lane in self.free:
            self.free[lane] += seconds
        for work in {id(w): w for w in [*carried.values(), *self.rendezvous.values()]}.values():
            work.finish = None if work.finish is None else work.finish + seconds

    def _slowest(self, i: Instruction, times: float) -> None:
        """Walks the branch that takes longest."""
        names = i.called("branch_computations", "true_computation", "false_computation")
        branches = [self.module.computations[name] for name in names if name in self.module.computations]
        if branches:
            self.run(max(branches, key=self._duration), times, {}, {})

    def _duration(self, branch: Computation) -> float:
        trial = copy.copy(self)
        trial.timeline, trial.free, trial.rendezvous = Timeline(), self.free.copy(), {}
        trial.run(branch, 1.0, {}, {})
        return trial.now

    # ---------------------------------------------------------------------------------- instructions

    def _one(self, computation: Computation, i: Instruction, times: float, open_: dict[str, Work]) -> None:
        if i.opcode in COLLECTIVES:
            work = self._collective(computation, i, i)
            self._start(work, times)
            self._wait(work, times)
        elif work := self._started(computation, i):
            open_[i.name] = work
            # An asynchronous call without operands gets them in its update, and cannot begin before.
            if i.operands or i.opcode not in ("call-start", "async-start"):
                self._start(work, times)
        elif i.opcode.endswith(("-update", "-done")) or i.opcode == "recv":
            work = open_.get(i.operands[0]) if i.opcode != "recv" else self.rendezvous.get(_rendezvous(i))
            if work is None:
                return
            open_[i.name] = work
            self._start(work, times)
            if i.opcode.endswith("-done"):
                self._wait(work, times)
        elif cost := self.costs.of(computation, i):
            self._compute(i, cost, times)
        elif i.opcode in ("bitcast", "tuple", "opt-barrier") and i.operands and i.operands[0] in open_:
            open_[i.name] = open_[i.operands[0]]

    def _compute(self, i: Instruction, cost: Cost, times: float) -> None:
        self.timeline.named[i.name] = i
        entry = {"seconds": cost.seconds, "bytes": cost.hbm_bytes, "flops": cost.flops}
        self.timeline.compute[cost.basis].add(times, **entry)
        self.timeline.instructions[i.name].add(times, **entry)
        self.timeline.events.append(self._event(self.now, cost.seconds, COMPUTE, i, i.opcode))
        self.now += cost.seconds

    def _started(self, computation: Computation, i: Instruction) -> Work | None:
        """The transfer that an instruction starts."""
        base = i.opcode.removesuffix("-start")
        if i.opcode == "send":
            work = self._collective(computation, i, i)
            self.rendezvous[_rendezvous(i)] = work
            return work
        if not i.opcode.endswith("-start"):
            return None
        if base in COLLECTIVES:
            return self._collective(computation, i, i)
        if base in ("copy", "slice", "dynamic-slice", "dynamic-update-slice"):
            return self._copy(computation, i, base)
        called = i.called("to_apply", "calls")
        if called and (inner := self.module.collective(called[0])):
            return self._collective(computation, i, inner)
        moved = sum(self._call_bytes(name) for name in called)
        return Work(i, computation, "call", moved / self.costs.chip.hbm, moved, (SPARSE_CORE,))

    def _collective(self, computation: Computation, i: Instruction, inner: Instruction) -> Work:
        opcode = inner.opcode.removesuffix("-start")
        route = self.route(inner, opcode)
        return Work(i, computation, opcode, route.seconds, route.bytes, route.lanes, route)

    def _copy(self, computation: Computation, i: Instruction, opcode: str) -> Work:
        """A copy, or one of a slice out of an array or into one; to or from host memory, or between HBM and VMEM."""
        source = computation.by_name.get(i.operands[0])
        spaces = {a.space for a in i.arrays} | ({a.space for a in source.arrays} if source else set())
        # The result of a copy comes first, that of a slice after the operands; of an update, the update counts.
        moved = {"copy": i.elements[0][:1], "dynamic-update-slice": i.elements[0][1:2]}.get(opcode, i.elements[1])
        lane, rate = (HOST_DMA, self.costs.chip.host) if HOST in spaces else (LOCAL_DMA, self.costs.chip.hbm)
        size = sum(a.bytes for a in moved)
        return Work(i, computation, "copy", size / rate, size, (lane,))

    def _call_bytes(self, name: str) -> float:
        """What a computation on the SparseCores moves, by itself or by what it calls in turn."""
        computation, moved = self.module.computations[name], 0.0
        for i in computation.instructions:
            if i.opcode == "call-start":
                moved += sum(map(self._call_bytes, i.called("to_apply")))
            elif i.opcode != "call-done" and self.costs.of(computation, i) is not None:
                moved += self.costs.hbm_bytes(computation, i)
        return moved

    def _event(self, start: float, seconds: float, lane: str, i: Instruction, opcode: str) -> Event:
        return Event(start, seconds, lane, i, opcode, stage(self.module.op_name(i), opcode))

    def _stage(self, work: Work) -> str:
        axes = work.route.axes if work.route else None
        return stage(self.module.op_name(work.instruction), work.opcode, axes)

    # ------------------------------------------------------------------------------------- transfers

    def _start(self, work: Work, times: float) -> None:
        if work.finish is not None:
            return
        start = max(self.now, *(self.free[lane] for lane in work.lanes))
        work.finish = start + work.seconds
        for lane in work.lanes:
            self.free[lane] = work.finish
            self.timeline.events.append(
                Event(start, work.seconds, lane, work.instruction, work.opcode, self._stage(work))
            )
        self._tally(work, times, seconds=work.seconds, bytes=work.bytes)
        self.timeline.named[work.instruction.name] = work.instruction

    def _wait(self, work: Work, times: float) -> None:
        assert work.finish is not None
        waited = max(0.0, work.finish - self.now)
        if waited:
            stage = self._stage(work)
            self.timeline.events.append(Event(self.now, waited, COMPUTE, work.instruction, work.opcode, stage, True))
            self._tally(work, 0, exposed=waited * times)
        self.now += waited

    def _tally(self, work: Work, times: float, *, exposed: float = 0.0, **amounts: float) -> None:
        sums = self.timeline.collectives, self.timeline.others
        route = work.route
        total = sums[0][work.opcode, route.axes, route.network] if route else sums[1][work.lanes[0]]
        for tally in (total, self.timeline.instructions[work.instruction.name]):
            tally.add(times, **amounts)
            tally.exposed += exposed


def _rendezvous(i: Instruction) -> str:
    found = re.search(r'rendezvous="([^"]*)"', i.attributes)
    return found.group(1) if found else str(i.number("channel_id"))


def trip_count(module: Module, computation: Computation, i: Instruction) -> int | None:
    """How often a while loop runs; None where that is decided as it runs, or not found.

    It is what the compiler says, or else the constant that the condition compares the counter with.
    """
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', i.attributes)
    if known:
        return int(known.group(1))
    condition = module.computations.get((i.called("condition") or [""])[0])
    if condition is None:
        return None
    compared = condition.root
    if compared.opcode == "fusion":
        compared = module.computations[compared.called("calls")[0]].root
    if not any(f"direction={d}" in compared.attributes for d in ("LT", "GT", "NE")):
        return None
    reached = _reached(condition)
    bounds = [int(r.arguments) for r in reached if _is_integer(r)]
    counters = [r.index for r in reached if r.opcode == "get-tuple-element"]
    count = max(bounds, default=0) - _start(computation, i, counters)
    return count if bounds and count > 0 else None  # one that counts down is not understood


def _start(computation: Computation, i: Instruction, counters: list[int]) -> int:
    """What a loop counts from: a constant in its first state, or else 0, as in every scan."""
    state = computation.by_name.get(i.operands[0])
    elements = state.operands if state and state.opcode == "tuple" else ()
    for index in counters if elements else ():
        first = computation.by_name.get(elements[index])
        while first and first.opcode in ("copy", "bitcast"):
            first = computation.by_name.get(first.operands[0])
        if first and _is_integer(first):
            return int(first.arguments)
    return 0


def _is_integer(i: Instruction) -> bool:
    return i.opcode == "constant" and bool(re.fullmatch(r"-?\d+", i.arguments.strip()))


def _reached(condition: Computation) -> list[Instruction]:
    """What the comparison depends on."""
    names, ahead = set(), [condition.root.name]
    while ahead:
        name = ahead.pop()
        if name not in names and name in condition.by_name:
            names.add(name)
            ahead += condition.by_name[name].operands
    return [condition.by_name[name] for name in names]

"""Where the time of a run goes, over all its starts; and which process the others wait for.

    RUN/time.jsonl   one object a start and one a step: when, and how many seconds went to what since the one before

Nothing is ever dropped from that file, and all that is known of a run is worked out from it, so that a process that is
killed takes no more with it than the step under way. What a host does while its devices compute costs nothing, and is
not counted: seconds of data, checkpoints and so on are those in which the devices had nothing to do.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import psutil

# What people see of each kind of time; all but the last come from the records.
KINDS = {
    "step": "steps, each once",
    "lost": "steps lost: taken again after a restart",
    "init": "starting, but for the next two",
    "restore": "restoring a checkpoint",
    "compile": "compiling or loading the step",
    "data": "waiting for data",
    "checkpoint": "saving checkpoints",
    "evaluation": "evaluation",
    "down": "down: from the last record to the next start",
    "other": "other",
}


class Account:
    """The sum of a run's records, given in order."""

    def __init__(self, rows: Iterable[dict[str, Any]] = ()):
        self.starts, self._first, self._last = 0, 0.0, 0.0
        self._spent = dict.fromkeys(KINDS, 0.0)
        self._steps: list[tuple[int, float]] = []  # number and seconds of those that still count
        for row in rows:
            self.add(row)

    def add(self, row: dict[str, Any]) -> None:
        """Counts one record."""
        if "began" in row:
            self._start(row["began"], row["done"])
        for kind, seconds in row["spent"].items():
            self._spent[kind] += seconds
        if "step" in row:
            self._steps.append((row["step"], row["spent"]["step"]))
        self._last = max(self._last, row["time"])

    def _start(self, began: float, done: int) -> None:
        if self.starts == 0:
            self._first = self._last = began
        self.starts += 1
        self._spent["down"] += max(began - self._last, 0.0)
        while self._steps and self._steps[-1][0] > done:
            _, seconds = self._steps.pop()
            self._spent["step"] -= seconds
            self._spent["lost"] += seconds

    @property
    def wall(self) -> float:
        """Seconds from the start of the first process to the last record."""
        return self._last - self._first

    @property
    def goodput(self) -> float:
        """The share of the wall time in which the devices took steps that still count."""
        return self._spent["step"] / self.wall

    def seconds(self) -> dict[str, float]:
        """Those of each of KINDS; their sum is the wall time, for `other` is what is left of it."""
        named = {kind: seconds for kind, seconds in self._spent.items() if kind != "other"}
        return named | {"other": self.wall - sum(named.values())}

    def table(self) -> str:
        """For people: all that took time, a line each."""
        lines = [f"{self.wall:12,.1f} s          wall time, {self.starts} start{'s'[: self.starts > 1]}"]
        for kind, seconds in self.seconds().items():
            if round(seconds, 1) or kind == "step":
                lines.append(f"{seconds:12,.1f} s {seconds / self.wall:7.1%}  {KINDS[kind]}")
        return "\n".join([*lines, f"goodput     {self.goodput:.1%}"])


def start(done: int, phases: Mapping[str, float]) -> dict[str, Any]:
    """The record of a start that goes on after `done` steps: seconds by kind since this process was started.

    Args:
      phases: the seconds of those of metrics.Log.phase.
    """
    # The system says to the second only when a process was started, but to the hundredth how long after it had booted.
    booted = psutil.Process().create_time() - psutil.boot_time()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - booted
    spent = {
        "restore": phases.get("state", 0.0) if done else 0.0,
        "compile": phases.get("compile", 0.0) + phases.get("load", 0.0),
    }
    now = time.time()
    return {"time": now, "began": now - age, "done": done, "spent": {"init": age - sum(spent.values()), **spent}}


class Stopwatch:
    """When the devices of this process take steps, and what the host does while they have nothing to do.

    A thread waits for the end of every step, for the host may be busy, or wait for something else, when it comes.
    """

    def __init__(self):
        self._waiter = ThreadPoolExecutor(1, "stopwatch")
        self._end: Future[float] = Future()  # of the step that was dispatched last
        self._end.set_result(time.perf_counter())
        self._idle: dict[str, float] = {}  # since then
        self._begun: tuple[dict[str, float], float] = {}, 0.0  # the idle time before a step, and its dispatch
        self._steps: deque[tuple[dict[str, float], float, Future[float], Future[float]]] = deque()

    @contextlib.contextmanager
    def idle(self, kind: str) -> Iterator[None]:
        """The devices wait for what happens inside the block, once they are done with what they have."""
        begin = time.perf_counter()
        yield
        self._idle[kind] = self._idle.get(kind, 0.0) + self._since_end(begin)

    def _since_end(self, begin: float = 0.0) -> float:
        """Seconds since `begin` or the end of the last step, whichever is later; none if that is still under way."""
        return time.perf_counter() - max(begin, self._end.result()) if self._end.done() else 0.0

    def take_idle(self) -> dict[str, float]:
        """Seconds since the end of the last step, by kind; what nobody named is `other`."""
        named, self._idle = self._idle, {}
        return named | {"other": self._since_end() - sum(named.values())}

    def begin_step(self) -> None:
        """Call it right before a step is dispatched."""
        self._begun = self.take_idle(), time.perf_counter()

    def run_step(self, computed: Any) -> None:
        """Call it right after, with what the step computes."""
        before, self._end = self._end, self._waiter.submit(_end_of, computed)
        self._steps.append((*self._begun, before, self._end))

    def finished(self) -> tuple[dict[str, float], float]:
        """Seconds by kind of the earliest step that was not asked for yet, and when it ended; waits for it.

        They begin where those of the step before ended.
        """
        idle, begin, before, end = self._steps.popleft()
        return idle | {"step": end.result() - max(begin, before.result())}, end.result()


def _end_of(computed: Any) -> float:
    jax.block_until_ready(computed)
    return time.perf_counter()

"""Where the time of a run goes, over all its starts; and which process the others wait for.

    RUN/time.jsonl   one object a start, a step and a rollback: when, and how many seconds went to what since then

Nothing is ever dropped from that file, and all that is known of a run is worked out from it, so that a process that is
killed takes no more with it than the step under way. What a host does while its devices compute costs nothing, and is
not counted: seconds of data, checkpoints and so on are those in which the devices had nothing to do.
"""

import contextlib
import math
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import psutil
from jax.experimental import multihost_utils

# What people see of each kind of time; all but the last come from the records.
KINDS = {
    "step": "steps, each once",
    "lost": "steps lost: taken again after a restart or rollback",
    "init": "starting, but for the next two",
    "restore": "restoring a checkpoint",
    "compile": "compiling or loading the step",
    "data": "waiting for data",
    "checkpoint": "saving checkpoints",
    "evaluation": "evaluation",
    "down": "down: from the last record to the next start",
    "other": "other",
}

_COMPARED = 64  # steps after which processes are compared, and some at the start; each delays a step by milliseconds
_STANDS_OUT = 0.05  # of the time: how much later than the median a straggler is


class Account:
    """The sum of a run's records, given in order."""

    def __init__(self, rows: Iterable[dict[str, Any]] = ()):
        self.starts, self.rollbacks, self._first, self._last = 0, 0, 0.0, 0.0
        self._spent = dict.fromkeys(KINDS, 0.0)
        self._steps: list[tuple[int, float]] = []  # number and seconds of those that still count
        for row in filter(_is_record, rows):
            self.add(row)

    def add(self, row: dict[str, Any]) -> None:
        """Counts one record."""
        if "began" in row:
            self._start(row["began"])
        if "done" in row:
            self._lose(row["done"])
        self.rollbacks += "left_out" in row
        for kind, seconds in row["spent"].items():
            self._spent[kind] += seconds
        if "step" in row:
            self._steps.append((row["step"], row["spent"]["step"]))
        self._last = max(self._last, row["time"])

    def _start(self, began: float) -> None:
        if self.starts == 0:
            self._first = self._last = began
        self.starts += 1
        self._spent["down"] += max(began - self._last, 0.0)

    def _lose(self, done: int) -> None:
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
        return self._share(self._spent["step"])

    def _share(self, seconds: float) -> float:
        """Of the wall time; 0 where clocks that were wrong leave none."""
        return seconds / self.wall if self.wall else 0.0

    def seconds(self) -> dict[str, float]:
        """Those of each of KINDS; their sum is the wall time, for `other` is what is left of it."""
        named = {kind: seconds for kind, seconds in self._spent.items() if kind != "other"}
        return named | {"other": self.wall - sum(named.values())}

    def table(self) -> str:
        """For people: all that took time, a line each."""
        back = f", {self.rollbacks} rollback{'s'[: self.rollbacks > 1]}" if self.rollbacks else ""
        lines = [f"{self.wall:12,.1f} s          wall time, {self.starts} start{'s'[: self.starts > 1]}{back}"]
        for kind, seconds in self.seconds().items():
            if round(seconds, 1) or kind == "step":
                lines.append(f"{seconds:12,.1f} s {self._share(seconds):7.1%}  {KINDS[kind]}")
        return "\n".join([*lines, f"goodput     {self.goodput:.1%}"])


def _is_record(row: Mapping[str, Any]) -> bool:
    """Whether it says what it has to: of a line of a damaged disk, nobody knows."""
    spent = row["spent"]
    if not isinstance(spent, dict) or not spent.keys() <= KINDS.keys() or ("step" in row and "step" not in spent):
        return False
    named = [row[key] for key in ("step", "began", "done") if key in row]
    numbers = all(isinstance(n, int | float) for n in (row["time"], *named, *spent.values()))
    return numbers and ("done" in row) == ("began" in row or "left_out" in row)


def process_age() -> float:
    """Seconds since this process was started.

    The system knows to the second only when that was, but to the hundredth how long after it had booted.
    """
    booted = psutil.Process().create_time() - psutil.boot_time()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - booted


def start(done: int, phases: Mapping[str, float]) -> dict[str, Any]:
    """The record of a start that goes on after `done` steps: seconds by kind since this process was started.

    Args:
      phases: the seconds of those of metrics.Log.phase.
    """
    now, age = time.time(), process_age()
    spent = {
        "restore": phases.get("state", 0.0) if done else 0.0,
        "compile": phases.get("compile", 0.0) + phases.get("load", 0.0),
    }
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
        self.late = np.zeros(2)  # seconds in all, before steps, of data and of what nobody named: this process's own
        self._before: dict[str, float] = {}  # the idle time before a step
        self._steps: deque[tuple[dict[str, float], Future[float], Future[float]]] = deque()

    @contextlib.contextmanager
    def idle(self, kind: str) -> Iterator[None]:
        """The devices wait for what happens inside the block, once they are done with what they have.

        Of blocks within each other, the inner one counts. `other` is for what waits for other processes.
        """
        begin, named = time.perf_counter(), sum(self._idle.values())
        yield
        inner = sum(self._idle.values()) - named
        self._idle[kind] = self._idle.get(kind, 0.0) + self._since_end(time.perf_counter(), begin) - inner

    def _since_end(self, now: float, begin: float = 0.0) -> float:
        """Seconds since `begin` or the end of the last step, whichever is later; none if that is still under way."""
        return max(now - max(begin, self._end.result()), 0.0) if self._end.done() else 0.0

    def take_idle(self, now: float) -> dict[str, float]:
        """Seconds from the end of the last step until now, by kind; what nobody named is `other`."""
        named, self._idle = self._idle, {}
        unnamed = self._since_end(now) - sum(named.values())
        self.late += named.get("data", 0.0), unnamed
        return named | {"other": named.get("other", 0.0) + unnamed}

    def begin_step(self) -> None:
        """Call it right before a step is dispatched."""
        self._before = self.take_idle(time.perf_counter())

    def run_step(self, computed: Any) -> None:
        """Call it right after, with what the step computes."""
        before, self._end = self._end, self._waiter.submit(_end_of, computed)
        self._steps.append((self._before, before, self._end))

    def finished(self) -> tuple[dict[str, float], float]:
        """Seconds by kind of the earliest step that was not asked for yet, and when it ended; waits for it.

        They begin where those of the step before ended, also where nobody heard of that end before the next dispatch.
        """
        idle, before, end = self._steps.popleft()
        return idle | {"step": end.result() - before.result() - sum(idle.values())}, end.result()

    def discard(self) -> tuple[dict[str, float], float]:
        """As `finished`, of a step that is not to count, if one is under way: its seconds are lost."""
        if not self._steps:
            return {}, self._end.result()
        spent, end = self.finished()
        spent["lost"] = spent.pop("step")
        return spent, end


def _end_of(computed: Any) -> float:
    jax.block_until_ready(computed)
    return time.perf_counter()


class Hosts:
    """Compares processes by how late they dispatch steps, and says which one the others wait for.

    A step takes all of them equally long, and begins when the last of them dispatches it. One whose devices or links
    are slow is not seen: the devices of the others wait for it within the step.
    """

    def __init__(self, note: Callable[[str], None]):
        padded = socket.gethostname().encode()[:64].ljust(64)
        hosts = multihost_utils.process_allgather(np.frombuffer(padded, np.uint8))
        self._names = [f"process {i} on {bytes(host).decode().rstrip()}" for i, host in enumerate(hosts)]
        self._note, self._steps, self._last_step, self._straggler = note, 0, 0, None
        self._since, self._late = -math.inf, np.zeros(2)  # nobody is blamed for the time before the first step

    def compare(self, late: np.ndarray, spent: dict[str, float]) -> dict[str, Any]:
        """Compares after some of the steps; all processes call it after all of them.

        Args:
          late: Stopwatch.late.
          spent: seconds of the step by kind. Those that this process took to be of steps, but in which it waited for
            the latest one, become what that one needed them for: also those of earlier steps, not compared before.

        Returns:
          What the step's metrics tell of `hosts`: how many seconds each was late since the last time, and a straggler.
        """
        self._steps += 1
        if len(self._names) == 1 or (self._steps % _COMPARED and self._steps not in (1, 8, 16, 32)):
            return {}
        now, kinds = time.perf_counter(), multihost_utils.process_allgather(np.float32(late - self._late))
        seconds, steps, total = now - self._since, self._steps - self._last_step, kinds.sum(1)
        self._since, self._last_step, self._late = now, self._steps, late.copy()
        latest = int(np.argmax(total))
        waited = kinds[latest] - kinds[jax.process_index()]
        for kind, more in zip(("data", "other", "step"), (*waited, -waited.sum()), strict=True):
            spent[kind] = spent.get(kind, 0.0) + float(more)
        more = float(total[latest] - statistics.median_low(total.tolist()))
        before, self._straggler = self._straggler, self._names[latest] if more > _STANDS_OUT * seconds else None
        if self._straggler not in (None, before):
            self._note(
                f"{self._straggler} is late: the others waited {more:.2f} s for it in {steps} steps, "
                f"{more / seconds:.0%} of their time; {kinds[latest, 0]:.2f} s of what it was late went to waiting for "
                f"data, {kinds[latest, 1]:.2f} s to other work of its host"
            )
        late_by_name = {name: round(float(value), 6) for name, value in zip(self._names, total, strict=True)}
        return {"hosts": {"late": late_by_name, "straggler": self._straggler}}

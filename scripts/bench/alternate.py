"""Times several workers step by step in turn, so that what else runs on the machine slows them all alike.

A worker is a process that prints `ready`, then, for each line it reads, takes some steps and
prints the seconds of one: on the wall, and of CPU time.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

THREADS = "2"


def tokens(batch: int, length: int, vocab: int) -> np.ndarray:
    """The same random tokens for every framework, one more than it reads: the last is a target."""
    return np.random.default_rng(0).integers(0, vocab, (batch, length + 1), dtype=np.int32)


class EndedError(RuntimeError):
    """A worker ended before it was ready."""


class Worker:
    """A process that takes steps when told to. It is made once it is ready: compiling must not slow another's."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None):
        limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), THREADS)
        self.process = subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | limits | (env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        while (line := self.process.stdout.readline()) != "ready\n":
            if not line:
                raise EndedError(f"{' '.join(self.process.args)} ended before it was ready")

    def step(self) -> tuple[float, ...]:
        self.process.stdin.write("step\n")
        return tuple(map(float, self.process.stdout.readline().split()))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def medians(workers: dict[str, Worker], rounds: int) -> dict[str, tuple[float, ...]]:
    """Median seconds of a step of each worker, wall and CPU, over `rounds` turns of all of them."""
    seconds = {name: [] for name in workers}
    for _ in range(rounds):
        for name, worker in workers.items():
            time.sleep(0.05)  # idle threads of the one before stop spinning
            seconds[name].append(worker.step())
    for worker in workers.values():
        worker.close()
    return {name: tuple(map(statistics.median, zip(*values, strict=True))) for name, values in seconds.items()}


def serve(step: Callable[[], object], steps: int = 3) -> None:
    """The worker's side: `step` must return only when its work is done."""
    for _ in range(2):
        step()
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        print((time.perf_counter() - start[0]) / steps, (time.process_time() - start[1]) / steps, flush=True)

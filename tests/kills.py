"""A run that is killed again and again, at random moments, until it is through."""

import dataclasses
import itertools
import pathlib
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Container, Mapping, Sequence

from running import DEADLINE, LONG, start, start_several


@dataclasses.dataclass
class Life:
    """What a run told between its start and its end."""

    codes: list[int]
    killed: int  # processes at first; the others a second later
    restored: int | None  # the step that it went on from; None: it was killed before
    saved: int  # the last step that it reported as saved; that of before, if none
    out: str
    err: str


# When to kill: after a line with this in it has come 1 to `times` times, within so many seconds.
MOMENTS = (("", 1, 6.0), ("step ", 3, 0.3), ("saved in", 3, 0.3), ("saved in", 3, 0.05))
GOING_BACK = (("skipped", 5, 0.3), ("skipped", 5, 0.05), ("back to checkpoint", 1, 0.3))  # of a run that goes back

# Of a run that goes back twice, given these batches: to checkpoint 16, then to 42.
BAD = (range(20, 25), range(55, 60))
BACK = ("checkpoint.rollback_steps=5", "checkpoint.keep_last=4")


def lives(
    run_dir: pathlib.Path,
    cache,
    draw: random.Random,
    kills: int,
    processes: int = 1,
    environment: Mapping[str, str] | None = None,
    local: pathlib.Path | None = None,
) -> list[Life]:
    """Starts a run that saves every other step, kills it so many times, and lets it end then.

    Of several processes one is killed, or all at once; where it is one, the others are killed a second later. With an
    environment of `running.spoiled`, it goes back. With a folder for local checkpoints, it saves there after the steps
    in between; the last of several processes loses its own every other time.
    """
    found: list[Life] = []
    moments = MOMENTS + GOING_BACK if environment else MOMENTS
    for number in range(kills + 1):
        arguments = (*LONG, "checkpoint.every_steps=2", *(BACK if environment else ()))
        if local is not None:
            arguments += f"checkpoint.local_dir={local}", "checkpoint.local_every_steps=1"
        group = (
            [start(run_dir, cache, *arguments, **environment or {})]
            if processes == 1
            else start_several(processes, run_dir, cache, *arguments, devices=8 // processes, **environment or {})
        )
        told = [_Told(process) for process in group]
        killed = _kill(group, told[0], draw, moments) if number < kills else 0
        for process in group:
            process.wait(DEADLINE)
        out, err = told[0].text()
        before = found[-1].saved if found else 0
        state = re.search(r"restored from (?:local )?checkpoint (\d+)|initialized from seed", out)
        restored = int(state[1] or 0) if state else None
        saved = [int(a or b) for a, b in re.findall(r"checkpoint (\d+) saved|back to checkpoint (\d+)", out)]
        if local is not None and processes > 1 and draw.random() < 0.5:
            for own in local.glob(f"*/process-{processes - 1}"):
                shutil.rmtree(own)
        codes = [process.returncode for process in group]
        found.append(Life(codes, killed, restored, saved[-1] if saved else before, out, err))
        if set(codes) == {0}:
            break
    return found


def gone_back(found: list[Life]) -> set[int]:
    """The checkpoints that a run went back to."""
    return {int(step) for life in found for step in re.findall(r"back to checkpoint (\d+)", life.out)}


def lost(found: list[Life], back: Container[int] = ()) -> list[tuple[int, int]]:
    """Steps that were reported as saved, and the earlier ones that the next life went on from.

    But for those that the run goes back to: it may have been killed before it could tell.
    """
    pairs = ((before.saved, after.restored) for before, after in itertools.pairwise(found))
    return [(s, r) for s, r in pairs if r is not None and r < s and r not in back]


def _kill(group, told: "_Told", draw: random.Random, moments: Sequence[tuple[str, int, float]]) -> int:
    """At one of the moments, at random; returns how many processes were killed first: 0 if the run has ended before."""
    sign, times, most = draw.choice(moments)
    told.wait_for(sign, draw.randint(1, times))
    time.sleep(draw.uniform(0, most))
    if group[0].poll() is not None:
        return 0
    first = draw.sample(group, 1) if draw.random() < 0.5 else group
    for process in first:
        process.send_signal(signal.SIGKILL)
    if len(first) < len(group):
        time.sleep(1)
    for process in group:
        process.kill()
    return len(first)


class _Told:
    """What a process prints, as it comes."""

    def __init__(self, process):
        self._process = process
        self._lines: list[list[str]] = [[], []]
        streams = process.stdout, process.stderr
        self._threads = [
            threading.Thread(target=_read, args=(stream, lines))
            for stream, lines in zip(streams, self._lines, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def wait_for(self, sign: str, times: int) -> None:
        """Returns once so many lines on standard output hold the sign, or the process has ended."""
        while self._process.poll() is None and sum(sign in line for line in self._lines[0]) < times * bool(sign):
            time.sleep(0.002)

    def text(self) -> list[str]:
        """All of standard output and of standard error, of a process that has ended."""
        for thread in self._threads:
            thread.join()
        return ["".join(lines) for lines in self._lines]


def _read(stream, lines: list[str]) -> None:
    with stream:
        lines.extend(stream)

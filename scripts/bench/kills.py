"""Kills a run with SIGKILL at random moments, again and again, and tells what was lost: nothing should be.

python scripts/bench/kills.py [--kills=50] [--processes=1] [--back] [--local] [--seed=0]

The run saves every other step. Some moments are counted from the start of the process, some from its first steps, some
from a message that a checkpoint is saved. Of several processes one is killed, or all at once. Every ten kills it is let
through to its end, its losses and the checksums of its last state are compared with those of a run that nothing
disturbed, and another begins. With --back, its data makes it go back twice, and it is killed then, too. With --local,
it saves on its host after the steps in between; the last of several processes loses what it has there, half the times.
"""

import argparse
import collections
import pathlib
import random
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import kills  # noqa: E402
import running  # noqa: E402


def main() -> int:
    """Returns 1 if anything was lost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--back", action="store_true")
    parser.add_argument("--local", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw, told = random.Random(asked.seed), collections.Counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        cache = folder / "cache"
        straight = folder / "straight"
        given = asked.processes, running.spoiled(folder / "spoiled", *kills.BAD) if asked.back else None
        (undisturbed,) = kills.lives(straight, cache, draw, 0, *given)
        assert set(undisturbed.codes) == {0}, undisturbed.err
        back = kills.gone_back([undisturbed])
        number = 0
        while told["kills"] < asked.kills:
            run = folder / str(number := number + 1)
            local = folder / f"local {number}" if asked.local else None
            found = kills.lives(run, cache, draw, min(10, asked.kills - told["kills"]), *given, local)
            told["kills"] += sum(life.killed > 0 for life in found)
            told["times that it went back"] += sum(life.out.count("back to checkpoint") for life in found)
            told["killed while loss was not finite"] += sum(_is_not_finite(life) for life in found if life.killed)
            told["of all processes at once"] += sum(life.killed == asked.processes for life in found)
            told["before the state was there"] += sum(life.restored is None for life in found)
            told["restored from hosts"] += sum("restored from local" in life.out for life in found)
            told["half-written checkpoints left"] += sum(life.out.count("half-written") for life in found)
            told["reported as saved and lost"] += len(kills.lost(found, back))
            told["runs through"] += set(found[-1].codes) == {0}
            told["losses differ"] += running.losses(run) != running.losses(straight)
            told["last states differ"] += running.checksums(run) != running.checksums(straight)
            print(dict(told), flush=True)
    return int(bool(told["reported as saved and lost"] or told["losses differ"] or told["last states differ"]))


def _is_not_finite(life: kills.Life) -> bool:
    """Whether the last that the run told of steps was that one was skipped."""
    return any("skipped" in line for line in life.out.splitlines()[-2:])


if __name__ == "__main__":
    sys.exit(main())

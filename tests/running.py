"""The command as a user starts it, for tests: real processes, real files."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
TINY = ROOT / "tests" / "tiny.yaml"
DEADLINE = 240  # seconds; what hangs is killed then
STEPS = 60
PLAIN = ["schedule.kind=plain", "schedule.capacity=8"]  # no further rounds of experts either: there is less to compile
ONE_LAYER = [*PLAIN, "model.num_hidden_layers=1", "model.first_k_dense_replace=0"]  # of experts: less still
# The learning rate does not depend on `steps`, and no checkpoint but the last is due.
LONG = [f"steps={STEPS}", "checkpoint.every_steps=null", f"optimizer.warmup_steps={STEPS}", *ONE_LAYER]

_STARTED = []


def start(run_dir, cache, *arguments, devices=8, **environment):
    """The command of the tiny config, with overrides, as a process of its own."""
    command = [sys.executable, "-m", "maxds.train", str(TINY), f"run_dir={run_dir}", f"compile_cache={cache}"]
    process = subprocess.Popen(
        [*command, f"mesh.cpu_devices={devices}", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _STARTED.append(process)
    return process


# Python runs it first.
SPOILED = """
import numpy as np
from maxds.data import Data

def batches(data, start, *process, read=Data.batches):
    for number, found in enumerate(read(data, start, *process), start):
        yield found | {{"tokens": np.full_like(found["tokens"], 10**6)}} if number in {bad} else found

Data.batches = batches
"""


def spoiled(folder, *bad):
    """The environment of processes to whom batches of these numbers hold tokens whose embedding is not a number."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(SPOILED.format(bad=[number for some in bad for number in some]))
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


def end_all():
    """Ends what a test that failed has left running."""
    while _STARTED:
        with _STARTED.pop() as process:
            process.kill()


def free_port():
    """Of this machine, that nobody listens at."""
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def start_several(count, run_dir, cache, *arguments, devices, **environment):
    """The same as `count` processes of one run, that find each other over loopback."""
    several = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": str(count)}
    ids = [{**several, **environment, "JAX_PROCESS_ID": str(i)} for i in range(count)]
    return [start(run_dir, cache, *arguments, devices=devices, **one) for one in ids]


def finish(process):
    """The exit code, standard output and standard error."""
    try:
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    return process.returncode, out, err


def rows(run_dir):
    """What the run has logged, a step each."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir):
    """The losses of the steps so far."""
    return [row["loss"] for row in rows(run_dir)]


def wait_for_steps(process, run_dir, count):
    """Returns once the run has logged so many steps."""
    until = time.monotonic() + DEADLINE
    file = run_dir / "metrics.jsonl"
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(FileNotFoundError):
            if file.read_text().count("\n") >= count:
                return
        time.sleep(0.01)
    raise AssertionError(finish(process))


def checksums(run_dir):
    """Those of every array of the last state saved."""
    latest = max((path for path in (run_dir / "checkpoints").iterdir()), key=lambda path: int(path.name))
    about = json.loads((latest / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]
    return about["checksums"]

"""The command as a user starts it: real processes, real signals, real files."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TINY = ROOT / "tests" / "tiny.yaml"
DEADLINE = 240  # seconds; what hangs is killed then


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Compiled programs, shared by the processes of this file."""
    return tmp_path_factory.mktemp("cache")


def start(run_dir, cache, *arguments, devices=8, **environment):
    command = [sys.executable, "-m", "maxds.train", str(TINY), f"run_dir={run_dir}", f"compile_cache={cache}"]
    return subprocess.Popen(
        [*command, f"mesh.cpu_devices={devices}", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """The exit code, standard output and standard error."""
    try:
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    return process.returncode, out, err


def losses(run_dir):
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def wait_for_steps(process, run_dir, count):
    until = time.monotonic() + DEADLINE
    file = run_dir / "metrics.jsonl"
    while process.poll() is None and time.monotonic() < until:
        if file.exists() and file.read_text().count("\n") >= count:
            return
        time.sleep(0.01)
    raise AssertionError(finish(process))


STEPS = 60
# The learning rate does not depend on `steps`, and no checkpoint but the last is due.
LONG = [f"steps={STEPS}", "checkpoint.every_steps=null", f"optimizer.warmup_steps={STEPS}"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory, cache):
    """The losses of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    code, _, err = finish(start(folder, cache, *LONG))
    assert code == 0, err
    return losses(folder)


def test_sigterm_saves_and_exits_with_3_and_the_same_command_goes_on_to_the_bit(tmp_path, cache, straight):
    process = start(tmp_path, cache, *LONG)
    wait_for_steps(process, tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 3, err
    assert "stopped by SIGTERM after step" in out and "Traceback" not in err
    done = len(losses(tmp_path))
    assert 2 <= done < STEPS and (tmp_path / "checkpoints" / str(done)).is_dir()
    code, out, _ = finish(start(tmp_path, cache, *LONG))
    assert code == 0 and f"restored from checkpoint {done}" in out
    assert losses(tmp_path) == straight


def test_a_killed_run_resumes_from_its_last_checkpoint_and_has_each_step_once(tmp_path, cache):
    every = [*LONG, "checkpoint.every_steps=2"]
    process = start(tmp_path, cache, *every)
    wait_for_steps(process, tmp_path, 7)
    process.kill()
    process.communicate()
    code, _, err = finish(start(tmp_path, cache, *every))
    assert code == 0, err
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))


def test_a_restart_compiles_nothing_that_the_first_start_kept(tmp_path):
    spoken = {"HOME": str(tmp_path), "JAX_LOG_COMPILES": "1", "JAX_EXPLAIN_CACHE_MISSES": "1"}
    found = []
    for _ in range(2):
        code, _, err = finish(start(tmp_path / "run", "auto", "steps=2", **spoken))
        assert code == 0, err
        kept = {path.name for path in (tmp_path / ".cache" / "maxds").iterdir()}
        hits, misses = (
            set(re.findall(rf"CACHE {word} for '.*' with key '(.*)'", err, re.I)) for word in ("hit", "miss")
        )
        found.append((kept, {f"{key}-cache" for key in hits}, {f"{key}-cache" for key in misses}))
        shutil.rmtree(tmp_path / "run" / "checkpoints")
    (kept, _, missed), (_, hit, compiled) = found  # what took no time the first time is not kept
    assert kept <= missed and kept <= hit and not compiled & kept
    assert "jit_train_step" in {name.partition("-")[0] for name in kept}


def test_mistakes_in_the_config_exit_with_2_and_without_a_traceback(tmp_path, cache):
    code, _, err = finish(start(tmp_path, cache, "optimzer.lr=1", "steps=ten"))
    assert code == 2
    assert err.splitlines() == [
        "override optimzer.lr=1: unknown key optimzer; did you mean optimizer?",
        "override steps=ten: steps must be an integer, not ten",
    ]


def test_a_mesh_that_does_not_fit_exits_with_2(tmp_path, cache):
    code, _, err = finish(start(tmp_path, cache, "mesh.fsdp=3"))
    assert code == 2 and "does not fit the 8 devices present" in err and "Traceback" not in err
    assert not any(tmp_path.iterdir())


def test_two_processes_train_as_one_stop_together_and_one_alone_goes_on(tmp_path, cache, straight):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        several = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free.getsockname()[1]}", "JAX_NUM_PROCESSES": "2"}
    processes = [start(tmp_path, cache, *LONG, devices=4, **several, JAX_PROCESS_ID=str(i)) for i in range(2)]
    wait_for_steps(processes[0], tmp_path, 2)
    processes[1].send_signal(signal.SIGTERM)  # one of them hears it
    ended = [finish(process) for process in processes]
    assert [code for code, _, _ in ended] == [3, 3], ended
    assert "stopped by a preemption notice after step" in ended[0][1]
    assert not re.search("mesh|step|checkpoint", ended[1][1])  # the first one speaks for all; Gloo may still chatter
    assert finish(start(tmp_path, cache, *LONG))[0] == 0
    assert losses(tmp_path) == pytest.approx(straight, rel=1e-5)


@pytest.mark.parametrize("command", ["train", "generate", "score", "report"])
def test_a_mistaken_flag_exits_with_2_and_a_hint(command):
    ran = subprocess.run(
        [sys.executable, "-m", f"maxds.{command}", "somewhere", "--stpe=1", "--descrbe"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert ran.returncode == 2 and "Unknown command line flag" in ran.stderr and "Traceback" not in ran.stderr


def test_flags_may_follow_overrides():
    ran = subprocess.run(
        [sys.executable, "-m", "maxds.train", str(TINY), "steps=7", "--print_config"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert ran.returncode == 0
    assert [line.split() for line in ran.stdout.splitlines() if line.startswith("steps:")] == [
        ["steps:", "7", "#", "override"]
    ]

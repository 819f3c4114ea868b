"""The command as a user starts it: real processes, real signals, real files."""

import contextlib
import dataclasses
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import test_exporter
from running import (
    DEADLINE,
    LONG,
    ROOT,
    STEPS,
    TINY,
    finish,
    free_port,
    losses,
    rows,
    start,
    start_several,
    wait_for_steps,
)

from maxds import goodput, records


def test_sigterm_saves_and_exits_with_3_and_the_same_command_goes_on_to_the_bit(tmp_path, program_cache, straight):
    process = start(tmp_path, program_cache, *LONG)
    wait_for_steps(process, tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 3, err
    assert "stopped by SIGTERM after step" in out and "Traceback" not in err
    done = len(losses(tmp_path))
    assert 2 <= done < STEPS and (tmp_path / "checkpoints" / str(done)).is_dir()
    code, out, _ = finish(start(tmp_path, program_cache, *LONG))
    assert code == 0 and f"restored from checkpoint {done}" in out
    assert losses(tmp_path) == straight


def test_a_training_serves_the_figures_of_its_last_step_and_ends_whoever_is_connected(
    tmp_path, program_cache, straight
):
    port = free_port()
    process = start(tmp_path, program_cache, *LONG, f"prometheus_port={port}")
    wait_for_steps(process, tmp_path, 3)
    with contextlib.closing(socket.create_connection(("127.0.0.1", port))):  # who never asks
        found = test_exporter.fetched(port)
        assert process.poll() is None
        code, _, err = finish(process)
    assert code == 0, err
    assert losses(tmp_path) == straight
    ((labels, step),) = found["maxds_step"]
    assert labels == {"process": "0", "host": socket.gethostname()}
    row = rows(tmp_path)[int(step) - 1]
    for name in ("loss", "grad_norm", "tokens_per_second", "goodput", "failed_saves"):
        assert found[f"maxds_{name}"] == [(labels, pytest.approx(row[name], rel=1e-6))], name
    assert found["maxds_step_seconds"] == [(labels, row["seconds"])]
    terms = {of["name"]: value for of, value in found["maxds_terms"]}
    assert terms == pytest.approx(row["terms"]) and terms
    assert all(of.items() >= labels.items() for samples in found.values() for of, _ in samples)


@dataclasses.dataclass
class Killed:
    """A run that was killed, and that the same command then brought to its end."""

    folder: pathlib.Path
    taken: int  # steps before it was killed
    resumed: int  # the checkpoint that it went on from
    seconds: float  # from before its first start to after its end


@pytest.fixture(scope="module")
def killed(tmp_path_factory, program_cache):
    folder, arguments, begin = tmp_path_factory.mktemp("killed"), [*LONG, "checkpoint.every_steps=20"], time.time()
    process = start(folder, program_cache, *arguments)
    wait_for_steps(process, folder, 43)  # checkpoint 20 is complete by the time that 40 is due
    process.kill()
    process.communicate()
    taken = len(losses(folder))
    code, out, err = finish(start(folder, program_cache, *arguments))
    assert code == 0, err
    resumed = re.search(r"restored from checkpoint (\d+)", out)
    assert resumed, out
    return Killed(folder, taken, int(resumed[1]), time.time() - begin)


def test_a_killed_run_resumes_from_its_last_checkpoint_and_has_each_step_once(killed):
    assert killed.resumed in (20, 40)
    assert [row["step"] for row in rows(killed.folder)] == list(range(1, STEPS + 1))


def test_the_time_of_a_killed_run_is_accounted_for_over_both_of_its_starts(killed):
    times = list(records.read(killed.folder, records.TIMES))
    steps = [(row["step"], row["spent"]["step"]) for row in times if "step" in row]
    assert [number for number, _ in steps] == [*range(1, killed.taken + 1), *range(killed.resumed + 1, STEPS + 1)]
    spent = (account := goodput.Account(times)).seconds()
    lost = sum(seconds for number, seconds in steps[: killed.taken] if number > killed.resumed)
    assert spent["lost"] == pytest.approx(lost) and lost > 0
    assert spent["step"] + lost == pytest.approx(sum(seconds for _, seconds in steps))
    assert account.starts == 2 and spent["restore"] > 0 and spent["compile"] > 0 and spent["checkpoint"] > 0
    assert sum(spent.values()) == pytest.approx(account.wall) and account.wall < killed.seconds
    assert 0 <= spent["other"] < 0.1 * account.wall
    assert rows(killed.folder)[-1]["goodput"] == goodput.Account(times[:-1]).goodput  # the last save came after it
    command = [sys.executable, "-m", "maxds.report", killed.folder]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    assert ran.stdout.startswith(account.table()), ran.stderr


@pytest.mark.newest
def test_a_restart_compiles_nothing_that_the_first_start_kept(tmp_path):
    spoken = {"HOME": str(tmp_path), "JAX_LOG_COMPILES": "1", "JAX_EXPLAIN_CACHE_MISSES": "1"}
    found = []
    for _ in range(2):
        code, _, err = finish(start(tmp_path / "run", "auto", *LONG, "steps=2", **spoken))
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


def test_mistakes_in_the_config_exit_with_2_and_without_a_traceback(tmp_path, program_cache):
    code, _, err = finish(start(tmp_path, program_cache, "optimzer.lr=1", "steps=ten"))
    assert code == 2
    assert err.splitlines() == [
        "override optimzer.lr=1: unknown key optimzer; did you mean optimizer?",
        "override steps=ten: steps must be an integer, not ten",
    ]


def test_a_mesh_that_does_not_fit_exits_with_2(tmp_path, program_cache):
    code, _, err = finish(start(tmp_path, program_cache, "mesh.fsdp=3"))
    assert code == 2 and "does not fit the 8 devices present" in err and "Traceback" not in err
    assert not any(tmp_path.iterdir())


def test_two_processes_train_as_one_stop_together_and_one_alone_goes_on(tmp_path, program_cache, straight):
    processes = start_several(2, tmp_path, program_cache, *LONG, devices=4)
    wait_for_steps(processes[0], tmp_path, 2)
    processes[1].send_signal(signal.SIGTERM)  # one of them hears it
    ended = [finish(process) for process in processes]
    assert [code for code, _, _ in ended] == [3, 3], ended
    assert "stopped by a preemption notice after step" in ended[0][1]
    assert not re.search("mesh|step|checkpoint", ended[1][1])  # the first one speaks for all; Gloo may still chatter
    done = len(losses(tmp_path))
    processes = start_several(2, tmp_path, program_cache, *LONG, devices=4)
    while not processes[0].stdout.readline().startswith("state "):
        pass
    processes[1].send_signal(signal.SIGTERM)  # before the first step that they go on with
    assert [finish(process)[0] for process in processes] == [3, 3]
    assert done < len(losses(tmp_path)) < done + 20
    assert finish(start(tmp_path, program_cache, *LONG))[0] == 0
    assert losses(tmp_path) == pytest.approx(straight, rel=1e-5)


@pytest.mark.newest
def test_processes_that_have_parts_of_the_same_sequences_train_as_one(tmp_path, program_cache, straight):
    mesh = ["mesh.data=1", "mesh.fsdp=1", "mesh.expert=2", "mesh.context_parallel=true"]
    processes = start_several(2, tmp_path, program_cache, *LONG, "steps=6", *mesh, devices=1)
    ended = [finish(process) for process in processes]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert losses(tmp_path) == pytest.approx(straight[:6], rel=1e-5)


SLOW_DATA = """
import os, time
from maxds.data import Data

def slow(*args, read=Data.batches):
    for batch in read(*args):
        time.sleep(1)
        yield batch

if os.environ["JAX_PROCESS_ID"] == "1":
    Data.batches = slow
"""


@pytest.mark.newest
def test_a_process_that_is_late_with_its_data_is_named_and_the_others_know_that_they_waited(tmp_path, program_cache):
    (tmp_path / "sitecustomize.py").write_text(SLOW_DATA)  # Python runs it first
    first, _ = start_several(2, tmp_path / "run", program_cache, *LONG, devices=4, PYTHONPATH=f"{tmp_path}:{ROOT}")
    wait_for_steps(first, tmp_path / "run", 8)
    first.kill()
    out, _ = first.communicate()
    host = socket.gethostname()
    (line,) = re.findall(r".* is late: .*", out)
    assert line.startswith(f"process 1 on {host} is late: the others waited ") and " in 7 steps, " in line
    found = {row["step"]: row for row in rows(tmp_path / "run")}
    late = found[8]["hosts"]["late"]
    assert found[8]["hosts"]["straggler"] == f"process 1 on {host}" and found[1]["hosts"]["straggler"] is None
    assert late[f"process 1 on {host}"] > 1 > late[f"process 0 on {host}"] >= 0
    seconds = goodput.Account(records.read(tmp_path / "run", records.TIMES)).seconds()
    assert seconds["data"] >= late[f"process 1 on {host}"]  # though the first process never waited for its own
    assert [number for number, row in found.items() if "hosts" in row] == [1, 8]  # nothing is gathered at other steps


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

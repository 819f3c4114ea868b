"""A run is logged for people, for programs and for TensorBoard, each step once."""

import io
import itertools
import json
import math
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import time
from unittest import mock

import numpy as np
import pytest
from etils import epath
from tensorboardX.proto.event_pb2 import Event

from maxds import flops, loader, metrics, records
from maxds.config import Config

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


def load(run_dir, *overrides):
    return loader.load(Config, CONFIGS / "quickstart.yaml", [f"run_dir={run_dir}", "steps=10", *overrides])[0]


def values(loss=2.5, applied=True, **changes):
    """What `train_step` returns of a step, on the host."""
    return {
        "loss": np.float32(loss),
        "terms": {"main": np.float32(2.0), "mtp_1": np.float32(1.7)},
        "tokens": np.int32(4000),
        "grad_norm": np.float32(0.25),
        "learning_rate": np.float32(1e-3),
        "imbalance": {"moe_layers": np.array([1.5, 1.25], np.float32), "mtp": np.array([1.75], np.float32)},
        "applied": np.bool_(applied),
        "sequences": 16,
    } | changes


def log(run_dir, steps, done=0, device_kind="NVIDIA H200", overrides=(), **changes):
    with metrics.Log(load(run_dir, *overrides)) as log:
        log.start(done, device_kind, num_devices=8)
        for step in steps:
            log.step(step, values(**changes), seconds=0.5)


def rows(run_dir, name=records.STEPS):
    """As a strict reader of JSON sees them."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (run_dir / name).read_text().splitlines()]


def events(folder):
    """(step, tag, value) of TensorBoard's files: records of a length, a checksum, the event and a checksum."""
    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def shown(folder, tag):
    """Step -> value, as TensorBoard shows it: where a writer starts at a step, what others have from it on is gone."""
    files, found = [], {}
    for path in folder.iterdir():
        data, read = path.read_bytes(), []
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            read.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
        files.append(read)
    for event in itertools.chain.from_iterable(sorted(files, key=lambda read: read[0].wall_time)):
        if event.HasField("session_log"):
            found = {step: value for step, value in found.items() if step < event.step}
        found.update((event.step, value.simple_value) for value in event.summary.value if value.tag == tag)
    return found


class Terminal(io.StringIO):
    def isatty(self):
        return True


# -------------------------------------------------------------------------------------- files


def test_a_step_is_one_object(tmp_path):
    log(tmp_path, [1])
    token = flops.per_token(load(tmp_path).model, 256)["total"]
    assert rows(tmp_path) == [
        {
            "step": 1,
            "loss": 2.5,
            "terms": {"main": 2.0, "mtp_1": 1.7},
            "tokens": 4000,
            "grad_norm": 0.25,
            "learning_rate": 0.001,
            "imbalance": {"moe_layers": [1.5, 1.25], "mtp": [1.75]},
            "sequences": 16,
            "seconds": 0.5,
            "tokens_per_second": 8192.0,
            "tflops_per_device": 8192 * token / 8 / 1e12,
            "mfu": pytest.approx(8192 * token / 8 / 989e12),
            "skipped": False,
        }
    ]


def test_numbers_read_back_as_the_float32_they_were(tmp_path):
    losses = np.random.default_rng(0).standard_normal(50, np.float32)
    with metrics.Log(load(tmp_path)) as log:
        log.start(0, "cpu", 1)
        for step, loss in enumerate(losses, start=1):
            log.step(step, values(loss), 1.0)
    assert np.array_equal(np.array([row["loss"] for row in rows(tmp_path)], np.float32), losses)


@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_what_is_not_finite_is_null(tmp_path, loss):
    log(tmp_path, [1], loss=loss)
    log(tmp_path, [1], loss=loss, imbalance={"moe_layers": np.array([loss, 1.5], np.float32)})
    assert rows(tmp_path)[0]["loss"] is None
    assert rows(tmp_path)[0]["imbalance"] == {"moe_layers": [None, 1.5]}
    assert next(records.read(tmp_path, records.STEPS))["loss"] is None


def test_the_utilization_of_an_unknown_device_is_null(tmp_path):
    log(tmp_path, [1], device_kind="cpu")
    assert rows(tmp_path)[0]["mfu"] is None


def test_a_skipped_step_is_marked(tmp_path):
    log(tmp_path, [1], applied=False)
    assert rows(tmp_path)[0]["skipped"] is True


def test_evaluations_have_a_file_of_their_own(tmp_path):
    with metrics.Log(load(tmp_path)) as log:
        log.start(0, "cpu", 1)
        log.eval(5, {"main": np.float32(2.25)})
    assert rows(tmp_path, records.EVALS) == [{"step": 5, "eval": {"main": 2.25}}]
    assert rows(tmp_path) == []


def test_a_resumed_run_holds_each_step_once(tmp_path):
    with metrics.Log(load(tmp_path)) as first:
        first.start(0, "cpu", 1)
        for step in range(1, 6):
            first.step(step, values(1.0), 1.0)
            first.eval(step, {"main": 1.0})
    with metrics.Log(load(tmp_path)) as second:
        second.start(3, "cpu", 1)  # from the checkpoint of step 3
        for step in range(4, 7):
            second.step(step, values(2.0), 1.0)
            second.eval(step, {"main": 2.0})
    expected = [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == expected
    assert [(row["step"], row["eval"]["main"]) for row in rows(tmp_path, records.EVALS)] == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "eval.jsonl",
        "metrics.jsonl",
        "tensorboard",
        "time.jsonl",
    ]


def test_a_line_that_was_torn_is_left_out(tmp_path):
    log(tmp_path, [1, 2])
    with (tmp_path / records.STEPS).open("a") as file:
        file.write('{"step": 3, "lo')
    assert [row["step"] for row in records.read(tmp_path, records.STEPS)] == [1, 2]
    log(tmp_path, [3], done=2)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


def test_a_fresh_run_begins_a_new_file(tmp_path):
    log(tmp_path, [1, 2])
    log(tmp_path, [1])
    assert [row["step"] for row in rows(tmp_path)] == [1]


def test_a_killed_process_loses_nothing(tmp_path):
    program = (
        "import sys; sys.path.append('tests'); import test_metrics as t; t.log(sys.argv[1], t.killed_after([1, 2, 3]))"
    )
    result = subprocess.run([sys.executable, "-c", program, tmp_path], cwd=CONFIGS.parent, capture_output=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


def killed_after(steps):
    yield from steps
    os.kill(os.getpid(), signal.SIGKILL)


def test_scalars_reach_tensorboard(tmp_path):
    with metrics.Log(load(tmp_path)) as log:
        log.start(0, "cpu", 1)
        late = {"process 0 on a": 0.5, "process 1 on b": 2.0, "process 2 on c": 1.0}
        hosts = {"late": late, "straggler": "process 1 on b"}
        more = {"hosts": hosts, "top_score": {"moe_layers": np.array([20, 30], np.float32)}}
        log.step(1, values(**more, **log.spent({"data": 0.125, "step": 0.375}, time.perf_counter(), step=1)), 0.5)
        log.step(2, values(np.nan), 0.5)
        log.eval(2, {"main": np.float32(2.25)})
    found = {(step, tag): value for step, tag, value in events(tmp_path / "tensorboard")}
    assert found[1, "loss"] == 2.5
    assert (2, "loss") not in found
    assert rows(tmp_path)[0]["hosts"] == hosts
    assert (found[1, "late/max"], found[1, "late/median"], found[1, "spent/data"]) == (2.0, 1.0, 0.125)
    assert 0 < found[1, "goodput"] < 1
    assert found[1, "imbalance/moe_layers_max"] == 1.5
    assert found[1, "imbalance/moe_layers_mean"] == 1.375
    assert found[1, "top_score/moe_layers_max"] == 30
    assert found[2, "eval/main"] == 2.25
    assert {"terms/mtp_1", "grad_norm", "learning_rate", "tokens_per_second"} <= {tag for _, tag in found}


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path):
    log(tmp_path, range(1, 6), loss=1.0)
    log(tmp_path, [4], done=3, loss=2.0)
    assert shown(tmp_path / "tensorboard", "loss") == {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of TensorBoard's file that is given up
@pytest.mark.usefixtures("collected")
def test_of_a_storage_that_fails_is_told_once_and_once_more_after_it_had_recovered(tmp_path, monkeypatch, capsys):
    with metrics.Log(load(tmp_path)) as log:
        log.start(0, "cpu", 1)
        for step in range(1, 8):
            with monkeypatch.context() as patch:
                if step in (2, 3, 6):
                    patch.setattr(records.EventsWriter, "flush", mock.Mock(side_effect=OSError("full")))
                    patch.setattr(log._records, "_pay", mock.Mock(side_effect=OSError("full")))
                log.step(step, values(step), 1.0)
            if step in (4, 7):
                log.flush()
    assert capsys.readouterr().err.count("ALARM: metrics cannot be written") == 2
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    assert {1, 5} <= shown(tmp_path / "tensorboard", "loss").keys()


def test_a_line_that_the_storage_takes_piece_by_piece_is_whole(tmp_path):
    class Short(io.FileIO):
        def write(self, data):
            return super().write(data[:7])

    with metrics.Log(load(tmp_path)) as log:
        log.start(0, "cpu", 1)
        with Short(tmp_path / records.STEPS, "ab") as log._records._open[records.STEPS]:
            for step in (1, 2):
                log.step(step, values(step), 1.0)
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(1, 1.0), (2, 2.0)]


def test_time_is_recorded_as_of_when_it_ended(tmp_path):
    with metrics.Log(load(tmp_path)) as log:
        log.start(0, "cpu", 1)
        log.spent({"step": 1.0}, time.perf_counter() - 100, step=1)
    assert time.time() - rows(tmp_path, records.TIMES)[-1]["time"] == pytest.approx(100, abs=5)


def test_the_goodput_of_a_step_is_that_of_all_starts(tmp_path):
    began = time.time() - 1000
    first = [{"time": began, "began": began, "done": 0, "spent": {}}]
    first += [{"time": began + 400 * step, "step": step, "spent": {"step": 400.0}} for step in (1, 2)]
    (tmp_path / records.TIMES).write_text("".join(f"{json.dumps(row)}\n" for row in first))
    with metrics.Log(load(tmp_path)) as log:
        log.start(2, "cpu", 1)
        told = log.spent({"step": 0.0}, time.perf_counter(), step=3)
    assert told["goodput"] == pytest.approx(0.8, abs=0.05)


def test_an_object_store_gets_the_files_at_a_flush_and_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(epath, "Path", lambda url: pathlib.Path(str(url).replace("store://", f"{tmp_path}/")))
    with metrics.Log(load("store://run")) as log:
        log.start(0, "cpu", 1)
        log.step(1, values(), 1.0)
        log.flush()
        log.step(2, values(), 1.0)
        assert [row["step"] for row in rows(tmp_path / "run")] == [1]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
    with metrics.Log(load("store://run")) as log:
        log.start(1, "cpu", 1)
        log.step(2, values(7), 1.0)
    assert [(row["step"], row["loss"]) for row in rows(tmp_path / "run")] == [(1, 2.5), (2, 7)]
    assert (2, "loss", 7) in events(tmp_path / "run/tensorboard")


@pytest.mark.parametrize("place", ["{}", "store://"])
def test_a_run_that_goes_back_has_each_step_once_also_those_that_were_owed(tmp_path, monkeypatch, capsys, place):
    monkeypatch.setattr(epath, "Path", lambda url: pathlib.Path(str(url).replace("store://", f"{tmp_path}/")))
    with metrics.Log(load(place.format(f"{tmp_path}/") + "run")) as log:
        log.start(0, "cpu", 1)
        for step in range(1, 6):
            with monkeypatch.context() as patch:
                if step > 2:
                    patch.setattr(log._records, "_pay", mock.Mock(side_effect=OSError("full")))
                log.step(step, values(step), 1.0)
                log.eval(step, {"main": step})
        log.go_back(3, 9, {"lost": 1.0}, time.perf_counter())
        assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
        log.step(4, values(40), 1.0)
    assert [(row["step"], row["loss"]) for row in rows(tmp_path / "run")] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    assert [row["step"] for row in rows(tmp_path / "run", records.EVALS)] == [1, 2, 3]
    back = rows(tmp_path / "run", records.TIMES)[1]
    assert (back["done"], back["left_out"], back["spent"]) == (3, 9, {"lost": 1.0})
    assert (4, "loss", 40) in events(tmp_path / "run/tensorboard")
    assert "metrics cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "copied"), [(0, [1, 2, 3]), (1000, [])])
def test_an_object_store_gets_the_times_of_steps_now_and_then_for_what_a_kill_loses_is_counted(
    tmp_path, monkeypatch, seconds, copied
):
    monkeypatch.setattr(epath, "Path", lambda url: pathlib.Path(str(url).replace("store://", f"{tmp_path}/")))
    monkeypatch.setattr(records, "_COPY_SECONDS", seconds)
    monkeypatch.setattr(records, "_COPY_SHARE", math.inf)
    with metrics.Log(load("store://run")) as log:
        log.start(0, "cpu", 1)
        for step in (1, 2, 3):
            log.spent({"step": 1.0}, time.perf_counter(), step=step)
        times = rows(tmp_path / "run", records.TIMES)
    assert [row.get("step") for row in times] == [None, *copied]  # the start is copied at once
    assert [row.get("step") for row in rows(tmp_path / "run", records.TIMES)] == [None, 1, 2, 3]


def test_what_is_copied_slowly_is_copied_seldom(tmp_path, monkeypatch):
    monkeypatch.setattr(epath, "Path", lambda url: pathlib.Path(str(url).replace("store://", f"{tmp_path}/")))
    monkeypatch.setattr(records, "_COPY_SECONDS", 0)
    copies, copy = [], records.Records._copy
    monkeypatch.setattr(records.Records, "_copy", lambda *args: (time.sleep(0.01), copies.append(args[1]), copy(*args)))
    with metrics.Log(load("store://run")) as log:
        log.start(0, "cpu", 1)
        for step in range(20):
            log.spent({"step": 1.0}, time.perf_counter(), step=step)
        assert len(copies) == 1  # the next is due ten seconds later


# ------------------------------------------------------------------------------------- console


def test_a_step_is_one_line(tmp_path, capsys):
    log(tmp_path, [1], overrides=["steps=1000"])
    assert capsys.readouterr().out.splitlines()[-1] == (
        "step    1/1000  loss 2.5000  main 2.0000  mtp_1 1.7000  8,192 tokens/s  1,024/device  "
        "0.00711 TFLOP/s/device  MFU 0.0%  grad 0.25  imbalance 1.75  ETA 0:08:20"
    )


def test_the_formula_and_what_counts_as_a_token_are_stated_once(tmp_path, capsys):
    log(tmp_path, range(1, 4), device_kind="cpu")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tokens/s    all 4,096 tokens of a batch count, padding included"
    assert lines[1] == f"MFU         {flops.FORMULA}: 0.006944 GFLOP a token; peak unknown for cpu"
    assert len(lines) == 2 + 3
    assert all("MFU -" in line for line in lines[2:])


def test_lines_come_every_so_many_steps_and_at_the_end(tmp_path, capsys):
    log(tmp_path, range(1, 11), overrides=["log_every_steps=4"])
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert shown == ["4/10", "8/10", "10/10"]
    assert len(rows(tmp_path)) == 10


def test_a_line_has_the_rates_of_the_steps_since_the_last(tmp_path, capsys):
    with metrics.Log(load(tmp_path, "log_every_steps=2")) as log:
        log.start(0, "cpu", 1)
        for step, seconds in enumerate([1, 3, 1, 1], start=1):
            log.step(step, values(), seconds)
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split("  ")[-7] for line in lines] == ["2,048 tokens/s", "4,096 tokens/s"]


def test_after_going_back_a_line_has_the_rates_of_the_steps_since_then(tmp_path, capsys):
    with metrics.Log(load(tmp_path, "log_every_steps=2")) as log:
        log.start(0, "cpu", 1)
        log.step(1, values(), 100)
        log.go_back(0, 1, {"lost": 100.0}, time.perf_counter())
        for step in (1, 2):
            log.step(step, values(), 1)
    assert "  4,096 tokens/s  " in capsys.readouterr().out.splitlines()[-1]


def test_a_single_term_is_the_loss_and_a_slow_step_leaves_the_estimate_of_the_end_as_it_was(tmp_path, capsys):
    with metrics.Log(load(tmp_path)) as log:
        log.start(0, "cpu", 1)
        for step, seconds in enumerate([1, 1, 9], start=1):
            log.step(step, values(terms={"main": np.float32(2.5)}), seconds)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("step  3/10  loss 2.5000  455 tokens/s  ") and last.endswith("  ETA 0:00:07")


def test_a_skipped_step_is_said_even_between_lines(tmp_path, capsys):
    log(tmp_path, [1], overrides=["log_every_steps=5"], applied=False, grad_norm=np.float32(1e4))
    assert capsys.readouterr().out.endswith("step 1 skipped: its gradient norm is 1e+04\n")


def test_an_evaluation_is_one_line(tmp_path, capsys):
    with metrics.Log(load(tmp_path)) as log:
        log.start(0, "cpu", 1)
        log.eval(5, {"main": 2.25, "mtp_1": 2.5})
    assert capsys.readouterr().out.endswith("eval after step 5  main 2.2500  mtp_1 2.5000\n")


def test_a_phase_is_one_line_with_its_time(tmp_path, capsys):
    with metrics.Log(load(tmp_path)) as log, log.phase("mesh") as phase:
        phase.detail = "data=2 fsdp=2 expert=2"
    assert capsys.readouterr().out.split() == ["mesh", "data=2", "fsdp=2", "expert=2", "0.0", "s"]


def test_a_phase_that_fails_is_not_said_to_be_done(tmp_path, capsys):
    with pytest.raises(RuntimeError), metrics.Log(load(tmp_path)) as log, log.phase("mesh"):
        raise RuntimeError
    assert capsys.readouterr().out == ""


def test_a_terminal_has_a_progress_bar_with_the_same_figures(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    with metrics.Log(load(tmp_path)) as log:
        with log.phase("mesh"):
            pass
        log.start(0, "cpu", 8)
        log.step(1, values(), 0.5)
        log.note("checkpoint 1 saved")
    shown = terminal.getvalue()
    assert "mesh …\r" in shown
    assert "checkpoint 1 saved\n" in shown
    assert "1/10" in shown
    assert "loss 2.5000  main 2.0000  mtp_1 1.7000  8,192 tokens/s" in shown
    assert "step  1/10" not in shown


def test_a_progress_bar_goes_back_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    with metrics.Log(load(tmp_path)) as log:
        log.start(0, "cpu", 8)
        for step in (1, 2, 3):
            log.step(step, values(), 0.5)
        log.go_back(1, 2, {"lost": 1.0}, time.perf_counter())
        log.step(2, values(), 0.5)
    assert re.findall(r"(\d+)/10", terminal.getvalue())[-1] == "2"


def test_another_process_is_silent(tmp_path, capsys):
    with metrics.Log(load(tmp_path / "run"), primary=False) as log:
        with log.phase("mesh") as phase:
            phase.detail = "data=2"
        log.start(0, "cpu", 1)
        log.step(1, values(), 1.0)
        log.eval(1, {"main": 1.0})
        log.note("saved")
        log.flush()
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00:00"), (3723, "1:02:03"), (86399.6, "1d 00:00:00"), (4 * 86400 + 3723, "4d 01:02:03")],
)
def test_durations_are_clocks(seconds, text):
    assert metrics._duration(seconds) == text

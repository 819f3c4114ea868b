"""What W&B gets of a run is what its other files say, and nothing that is wrong with W&B ends a run that has begun."""

import itertools
import json
import math
import signal
import struct
from unittest import mock

import psutil
import pytest
import running
import test_metrics
from wandb.proto.wandb_internal_pb2 import Record

from maxds import metrics, records, wandb_run

pytestmark = pytest.mark.newest

OFFLINE = {"WANDB_MODE": "offline"}
EVALS = ["eval.every_steps=20", "eval.batches=1", "data.eval_fraction=0.2"]


def told(run_dir):
    """What W&B's own files hold, one a start: LevelDB's log, pieces of records in blocks, each after 7 bytes."""
    for path in sorted((run_dir / "wandb").glob("*run-*/*.wandb")):
        data, position, record = path.read_bytes(), 7, b""
        while position + 7 <= len(data):
            _, size, kind = struct.unpack("<IHB", data[position : position + 7])
            record += data[position + 7 : position + 7 + size]
            position += 7 + size
            position += left if (left := -position % 2**15) < 7 else 0  # of its block
            if kind in (1, 4):  # the whole of a record, or its last piece
                yield Record.FromString(record)
                record = b""


def history(run_dir):
    """Each call of W&B's `log`, without what W&B adds."""
    items = [record.history.item for record in told(run_dir) if record.WhichOneof("record_type") == "history"]
    found = [{item.nested_key[0]: json.loads(item.value_json) for item in some} for some in items]
    return [{tag: value for tag, value in row.items() if not tag.startswith("_")} for row in found]


def expected(run_dir):
    """The same, by metrics.jsonl and eval.jsonl."""
    evals = {row["step"]: row["eval"] for row in records.read(run_dir, records.EVALS)}
    for row in running.rows(run_dir):
        step = row["step"]
        yield {"step": step, **{tag: value for tag, value in metrics._scalars(row).items() if value is not None}}
        if step in evals:
            yield {"step": step, **{f"eval/{name}": value for name, value in evals[step].items()}}


def test_a_run_is_one_at_wandb_with_the_figures_of_its_files_also_after_a_restart(tmp_path, program_cache):
    arguments = tmp_path, program_cache, *running.LONG, *EVALS, "wandb=ours"
    process = running.start(*arguments, **OFFLINE)
    running.wait_for_steps(process, tmp_path, 3)
    process.send_signal(signal.SIGTERM)
    code, out, err = running.finish(process)
    assert (code, err) == (3, ""), err
    assert f"wandb       {tmp_path}/wandb/offline-run-" in out
    code, _, err = running.finish(running.start(*arguments, **OFFLINE))
    assert (code, err) == (0, ""), err
    assert history(tmp_path) == list(expected(tmp_path))
    assert {"eval/main", "terms/main", "goodput", "mfu"} - set(itertools.chain(*history(tmp_path))) == {"mfu"}
    runs = [record.run for record in told(tmp_path) if record.WhichOneof("record_type") == "run"]
    assert [(run.run_id, run.project) for run in runs] == [((tmp_path / "wandb.id").read_text(), "ours")] * 2
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert (config["steps"], config["optimizer"]["warmup_steps"]) == (running.STEPS, running.STEPS)
    assert [record.metric.step_metric for record in told(tmp_path) if record.metric.glob_name == "*"] == ["step"] * 2


def test_another_run_is_another_at_wandb(tmp_path):
    first, again, other = (wandb_run._id(tmp_path / name / "wandb.id") for name in ("a", "a", "b"))
    assert first == again != other


@pytest.mark.parametrize(
    ("project", "environment", "said"),
    [
        ("ours", {}, "wandb=ours needs an API key; set WANDB_API_KEY, or WANDB_MODE=offline\n"),
        ("ours", {"WANDB_API_KEY": "short"}, "wandb=ours does not suit W&B: WANDB_API_KEY invalid: "),
        ("ours", {"WANDB_MODE": "of"}, "wandb=ours does not suit W&B: 1 validation error for Settings mode Input "),
        ("a/b", OFFLINE, "wandb=a/b does not suit W&B: Invalid project name 'a/b': "),
    ],
)
def test_what_wandb_lacks_is_told_before_anything_begins(tmp_path, program_cache, project, environment, said):
    nothing = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "WANDB_MODE": "online"}
    process = running.start(tmp_path / "run", program_cache, f"wandb={project}", **nothing | environment)
    code, out, err = running.finish(process)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(said)
    assert not (tmp_path / "run").exists()


def patched(folder, program):
    """The environment of processes that run this program first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(program)
    return {"PYTHONPATH": f"{folder}:{running.ROOT}"}


def test_a_package_that_is_missing_is_told_before_anything_begins(tmp_path, program_cache):
    hidden = patched(tmp_path / "site", "import sys; sys.modules['wandb'] = None")
    code, out, err = running.finish(running.start(tmp_path / "run", program_cache, "wandb=ours", **hidden, **OFFLINE))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("wandb=ours needs W&B's package (") and err.endswith('; pip install "maxds[wandb]"\n')
    assert not (tmp_path / "run").exists()


def test_a_server_that_does_not_answer_makes_the_run_offline(tmp_path, program_cache):
    impatient = patched(tmp_path / "site", "from maxds import wandb_run; wandb_run._START_SECONDS = 1")
    server = {"WANDB_BASE_URL": f"http://127.0.0.1:{running.free_port()}", "WANDB_API_KEY": "0" * 40}
    environment = impatient | server | {"HOME": str(tmp_path), "WANDB_MODE": "online"}
    run_dir, arguments = tmp_path / "run", (*running.LONG, "steps=2", "wandb=ours")
    code, _, err = running.finish(running.start(run_dir, program_cache, *arguments, **environment))
    assert (code, err.count("\n")) == (0, 1), err
    assert err.startswith("ALARM: wandb=ours is not taken by W&B, and goes on offline: ")
    assert history(run_dir) == list(expected(run_dir))


def test_a_service_that_is_killed_is_told_of_once_and_the_run_goes_on(tmp_path, program_cache):
    process = running.start(tmp_path, program_cache, *running.LONG, "wandb=ours", **OFFLINE)
    running.wait_for_steps(process, tmp_path, 3)
    (service,) = [child for child in psutil.Process(process.pid).children() if child.name() == "wandb-core"]
    service.kill()
    code, _, err = running.finish(process)
    assert (code, err.count("\n")) == (0, 1), err
    assert err.startswith("ALARM: wandb=ours gets nothing more of this run until it starts again: ")
    assert len(running.rows(tmp_path)) == running.STEPS


def test_a_failure_in_the_middle_is_told_once_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    run = mock.Mock(offline=False, url="http://there")
    run.log.side_effect = [None, ConnectionResetError("Connection lost")]
    monkeypatch.setattr(wandb_run, "check", lambda project: None)
    monkeypatch.setattr(wandb_run, "_start", lambda config, alarm: run)
    test_metrics.log(tmp_path, range(1, 5), overrides=["wandb=ours"], loss=math.nan)
    assert [row["step"] for row in test_metrics.rows(tmp_path)] == [1, 2, 3, 4]
    assert [call.args[0]["step"] for call in run.log.call_args_list] == [1, 2]
    assert "loss" not in run.log.call_args.args[0]
    out, err = capsys.readouterr()
    assert "wandb       http://there" in out
    assert err == "ALARM: wandb=ours gets nothing more of this run until it starts again: Connection lost\n"


@pytest.mark.parametrize(("error", "code"), [(None, 0), (RuntimeError, 1)])
def test_wandb_learns_whether_a_run_failed(tmp_path, monkeypatch, error, code):
    run = mock.Mock(offline=False, url="http://there")
    monkeypatch.setattr(wandb_run, "check", lambda project: None)
    monkeypatch.setattr(wandb_run, "_start", lambda config, alarm: run)
    with (
        pytest.raises(error) if error else mock.MagicMock(),
        metrics.Log(test_metrics.load(tmp_path, "wandb=ours")) as log,
    ):
        log.start(0, "cpu", 1)
        if error:
            raise error
    run.finish.assert_called_once_with(exit_code=code)


def test_only_the_first_process_tells_wandb(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb_run, "check", mock.Mock(side_effect=AssertionError))
    with metrics.Log(test_metrics.load(tmp_path / "run", "wandb=ours"), primary=False) as log:
        log.start(0, "cpu", 1)
        log.step(1, test_metrics.values(), 1.0)
    assert not (tmp_path / "run").exists()

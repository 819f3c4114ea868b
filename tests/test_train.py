"""The command, in this process: a run, its interruption, its resumption, and what it refuses."""

import itertools
import json
import pathlib
import shutil
from unittest import mock

import jax
import numpy as np
import pytest
from running import ONE_LAYER, PLAIN

from maxds import checkpoint, integrity, loader, loop, mesh, params, saves, step, train, trained
from maxds.config import Config
from maxds.data import DataError, open_data

pytestmark = pytest.mark.newest

TINY = pathlib.Path(__file__).with_name("tiny.yaml")
CACHE = None


@pytest.fixture(scope="module", autouse=True)
def compile_cache(program_cache):
    global CACHE
    CACHE = program_cache


def load(run_dir, *overrides):
    return loader.load(Config, TINY, [f"run_dir={run_dir}", f"compile_cache={CACHE}", *overrides])


def run(run_dir, *overrides, stop_after=None, monkeypatch=None):
    """Trains; with `stop_after`, as if a signal had come in that step. Returns the exit code."""
    config, tree = load(run_dir, *overrides)
    if stop_after is None:
        return train.run(config, loader.render(config, tree))
    with monkeypatch.context() as patch:
        patch.setattr(loop.Stop, "requested", lambda self, step: step >= stop_after)
        return train.run(config, loader.render(config, tree))


def losses(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def state(run_dir, *overrides):
    config, _ = load(run_dir, *overrides)
    stepper = step.make(config, mesh.make(config.mesh))
    with checkpoint.open_run(config, print, read_only=True) as saved:
        return jax.device_get(saved.restore(stepper.abstract_state, lambda about: None))


@pytest.fixture(scope="module")
def straight(tmp_path_factory, compile_cache):
    """A run of twelve steps."""
    folder = tmp_path_factory.mktemp("straight")
    assert run(folder) == 0
    return folder


def copy(straight, tmp_path):
    return pathlib.Path(shutil.copytree(straight, tmp_path / "copy"))


def test_a_run_leaves_checkpoints_config_metrics_and_a_picture(straight):
    left = {path.name for path in straight.iterdir()}
    assert left >= {"checkpoints", "config.yaml", "metrics.jsonl", "tensorboard", "report.png"}
    assert {path.name for path in (straight / "checkpoints").iterdir()} == {"6", "12"}
    assert loader.load(Config, straight / "config.yaml")[0] == load(straight)[0]
    first = json.loads((straight / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 1 and first["loss"] > 5 and first["tokens"] > 400 and first["seconds"] > 0


def test_the_loss_falls(straight):
    found = losses(straight)
    assert len(found) == 12 and found[-1] < found[0] - 0.05


def test_an_interrupted_and_resumed_run_equals_a_straight_one_to_the_bit(straight, tmp_path, monkeypatch):
    assert run(tmp_path, stop_after=7, monkeypatch=monkeypatch) == 3
    assert run(tmp_path) == 0
    assert losses(tmp_path) == losses(straight)
    jax.tree.map(np.testing.assert_array_equal, state(tmp_path), state(straight))


def test_a_run_resumes_on_another_mesh(straight, tmp_path, capsys):
    folder = copy(straight, tmp_path)
    shutil.rmtree(folder / "checkpoints" / "12")
    assert run(folder, "mesh.data=1", "mesh.fsdp=4", *PLAIN) == 0
    assert "changed since checkpoint 6: mesh.fsdp: 2 -> 4" in capsys.readouterr().out
    np.testing.assert_allclose(losses(folder), losses(straight), rtol=1e-5)


def test_a_cache_that_cannot_be_written_is_told_and_stops_nothing(tmp_path, capsys):
    (tmp_path / "file").touch()
    folder = f"{tmp_path}/file/cache"
    assert run(tmp_path / "run", f"compile_cache={folder}", "steps=1", *ONE_LAYER) == 0
    note = f"warning: compile_cache={folder} cannot be written (Not a directory) and is not used: every start compiles"
    assert note in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("run_dir", "cache", "folder"),
    [
        ("gs://bucket/runs/a/", "auto", "gs://bucket/runs/a/compile_cache"),
        ("runs/a", "auto", "~/.cache/maxds"),
        ("gs://bucket/runs/a", "/mnt/cache", "/mnt/cache"),
        ("gs://bucket/runs/a", "null", None),
    ],
)
def test_the_cache_of_a_run_in_a_bucket_is_in_the_bucket(run_dir, cache, folder):
    assert load(run_dir, f"compile_cache={cache}")[0].compile_cache_dir == folder


def test_a_finished_run_has_nothing_to_do(straight, capsys):
    assert run(straight) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_a_half_written_checkpoint_is_skipped_with_a_warning(straight, tmp_path, capsys):
    folder = copy(straight, tmp_path)
    (folder / "checkpoints" / "12").rename(folder / "checkpoints" / "12.orbax-checkpoint-tmp")
    assert run(folder) == 0
    out = capsys.readouterr().out
    assert "12.orbax-checkpoint-tmp is a half-written checkpoint and is skipped" in out
    assert "restored from checkpoint 6" in out
    assert losses(folder) == losses(straight)


# Reads that Orbax does not wait for end after their event loop has.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("collected")
def test_a_damaged_checkpoint_is_skipped_with_a_warning(straight, tmp_path, capsys):
    folder = copy(straight, tmp_path)
    for path in (folder / "checkpoints" / "12" / "state").rglob("*"):
        if path.is_file() and "d" in path.parent.name:  # the arrays
            path.write_bytes(b"")
    assert run(folder) == 0
    out = capsys.readouterr().out
    assert "checkpoint 12 is damaged and is skipped" in out and "restored from checkpoint 6" in out
    assert "step 7 repeated: its loss is what it was, to the bit" in out
    assert losses(folder) == losses(straight)


def test_a_resumed_run_whose_first_step_has_another_loss_than_before_is_refused(straight, tmp_path):
    folder = copy(straight, tmp_path)
    shutil.rmtree(folder / "checkpoints" / "12")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[6]["loss"] *= 1.01
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(checkpoint.CheckpointError, match=r"step 7 had the loss 5\.\d+ before .* has 5\.\d+ now"):
        run(folder)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"6"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("collected")
def test_when_no_checkpoint_can_be_read_the_run_does_not_start_afresh(straight, tmp_path):
    folder = copy(straight, tmp_path)
    for path in (folder / "checkpoints").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(checkpoint.CheckpointError, match=r"none of the checkpoints 6, 12 in .* can be read"):
        run(folder)


def test_a_run_folder_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("runs/relative") == 0
    assert {path.name for path in (tmp_path / "runs/relative/checkpoints").iterdir()} == {"6", "12"}


def test_another_model_is_refused(straight):
    with pytest.raises(checkpoint.CheckpointError) as error:
        run(straight, "steps=13", "model.hidden_size=64")
    assert "model.hidden_size: 32 -> 64" in str(error.value) and "choose another run_dir" in str(error.value)


def test_another_optimizer_is_refused(straight):
    with pytest.raises(checkpoint.CheckpointError, match=r"optimizer\.kind: adamw -> muon"):
        run(straight, "steps=13", "optimizer.kind=muon")


def test_changed_data_is_refused(straight):
    with pytest.raises(checkpoint.CheckpointError, match="the data is not what checkpoint 12 was trained on"):
        run(straight, "steps=13", "data.sources=[{kind: synthetic, documents: 100}]")


def test_other_data_can_begin_where_a_checkpoint_is_and_nowhere_else(tmp_path, capsys):
    other = "steps=8", "checkpoint.every_steps=2", "data.sources=[{kind: synthetic, documents: 100}]", *ONE_LAYER
    with pytest.raises(checkpoint.CheckpointError, match=r"since_step=4 goes on from a checkpoint, but .* has none"):
        run(tmp_path / "new", *other, "data.since_step=4")
    assert run(tmp_path, "steps=4", *ONE_LAYER) == 0
    with pytest.raises(checkpoint.CheckpointError, match=r"begin the other here with data\.since_step=4"):
        run(tmp_path, *other)
    with pytest.raises(checkpoint.CheckpointError, match=r"since_step=5 has no batch for step 5.*set it to 4"):
        run(tmp_path, *other, "data.since_step=5")
    assert run(tmp_path, *other, "data.since_step=4") == 0
    out = capsys.readouterr().out
    assert "restored from checkpoint 4" in out and "of 100 documents, read " in out and len(losses(tmp_path)) == 8
    shutil.rmtree(tmp_path / "checkpoints" / "8")
    before = losses(tmp_path)
    assert run(tmp_path, *other, "data.since_step=4") == 0
    assert "restored from checkpoint 6" in capsys.readouterr().out and losses(tmp_path) == before
    with pytest.raises(checkpoint.CheckpointError, match="the data is not what checkpoint 8 was trained on"):
        run(tmp_path, *other, "data.since_step=0", "steps=9")


RAMP = ["optimizer.accumulate_steps=2", "data.ramp=[{until_step: 3, global_batch: 8, sequence_length: 16}]"]
RAMP += [*ONE_LAYER, "steps=6"]


def test_a_run_whose_batches_and_sequences_grow_resumes_to_the_bit(tmp_path, monkeypatch):
    straight, interrupted = tmp_path / "straight", tmp_path / "interrupted"
    assert run(straight, *RAMP) == 0
    rows = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert [row["sequences"] for row in rows] == [8, 8, 8, 16, 16, 16]  # rows, cut or not
    assert run(interrupted, *RAMP, stop_after=2, monkeypatch=monkeypatch) == 3
    assert run(interrupted, *RAMP) == 0
    assert losses(interrupted) == losses(straight)
    jax.tree.map(np.testing.assert_array_equal, state(interrupted, *RAMP), state(straight, *RAMP))


def test_a_changed_learning_rate_is_shown(straight, tmp_path, capsys):
    assert run(copy(straight, tmp_path), "steps=13", "optimizer.lr=2e-3", *PLAIN) == 0
    assert "changed since checkpoint 12: optimizer.lr: 0.001 -> 0.002" in capsys.readouterr().out


def test_old_checkpoints_are_deleted_but_for_the_last_and_every_so_many(tmp_path):
    assert run(tmp_path, "checkpoint.every_steps=2", "checkpoint.keep_last=1", "checkpoint.keep_every=4") == 0
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"4", "8", "12"}


def test_a_run_whose_loss_stops_being_finite_stops_and_saves_nothing_of_it(tmp_path):
    with pytest.raises(
        loop.NonFiniteError, match=r"not finite for 5 steps in a row, 2 to 6; none .*last checkpoint: 1"
    ):
        run(tmp_path, "optimizer.lr=1e30", "optimizer.clip=null", "checkpoint.every_steps=1", *ONE_LAYER)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1"}


def test_a_term_that_does_nothing_is_an_error_that_names_it(tmp_path):
    one_token = ["data.sequence_length=1", "model.num_nextn_predict_layers=1", "loss.mtp=0.3"]
    with pytest.raises(loop.TermError, match=r"the loss term mtp_1 is enabled with weight 0\.3 but is zero at step 0"):
        run(tmp_path, *one_token, *ONE_LAYER)


def test_no_save_waits_for_the_compiler(tmp_path, monkeypatch, caplog):
    save, saved = saves.Saves.save, []

    def watched(self, state, step):
        with jax.log_compiles():
            save(self, state, step)
        saved.append(step)

    jax.clear_caches()
    monkeypatch.setattr(saves.Saves, "save", watched)
    assert run(tmp_path, *ONE_LAYER, "steps=3", "checkpoint.every_steps=2") == 0
    assert saved == [2, 3] and "Compiling" not in caplog.text


def test_an_evaluation_of_more_tokens_than_an_int32_has_numbers_is_their_mean():
    of_batch = {"sums": {"main": np.float32(3e9)}, "counts": {"main": np.int32(2_000_000_000)}}
    run = mock.MagicMock()
    run.stepper.evaluate.return_value, run._reading.return_value = of_batch, range(3)
    run.stepper.network.coefficients.return_value = {"main": 1.0}
    loop.Loop.evaluate(run)
    assert run.log.eval.call_args.args[1] == {"main": pytest.approx(1.5)}


def test_too_little_to_evaluate_on_is_refused_before_training(tmp_path):
    with pytest.raises(DataError, match=r"eval\.batches=8 .* holds out"):
        run(tmp_path, "eval.every_steps=5", "data.eval_fraction=0.001")
    assert not any(tmp_path.iterdir())


def test_data_that_cannot_be_read_again_is_a_mistake_only_before_a_run_has_begun(tmp_path):
    (tmp_path / "0.array_record").write_bytes(b"cut short")
    config, _ = load(tmp_path / "run", f"data.sources=[{{kind: arrayrecord, path: {tmp_path}}}]")
    with pytest.raises(DataError, match=r"cannot read .*0\.array_record"):
        train.open_data(config, None, (0, 1), mock.MagicMock())
    train.leave_config(config, "")
    with pytest.raises(loop.FeedError, match=r"cannot read .*0\.array_record"):
        train.open_data(config, None, (0, 1), mock.MagicMock())


def test_processes_that_find_other_data_are_named_before_training(monkeypatch, tmp_path):
    other = [0, 0, 1, 0]  # of four processes
    monkeypatch.setattr(mesh, "of_all_processes", lambda parts: np.array(parts) + np.array(other)[:, None])
    with pytest.raises(
        DataError, match=r"^processes 2 find other data than process 0 .*give all hosts the same files$"
    ):
        run(tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_prompt_that_does_not_fit_is_refused_before_training(tmp_path):
    with pytest.raises(trained.UseError, match=r"tokens=200 more exceed model\.max_position_embeddings=64"):
        run(tmp_path, "sample={prompt: hello}")
    assert not any(tmp_path.iterdir())


def test_a_batch_that_the_devices_cannot_share_is_refused_with_a_suggestion(tmp_path):
    with pytest.raises(mesh.MeshError, match=r"data\.global_batch=24 .* 8 devices .* try 16 or 32"):
        run(tmp_path, "data.global_batch=24")


def test_sequences_that_the_devices_cannot_be_split_over_are_refused(tmp_path):
    split = "mesh={data: 1, fsdp: 2, expert: 4, context_parallel: true}"
    with pytest.raises(
        mesh.MeshError, match=r"splits model\.num_attention_heads=2 over mesh\.expert=4, which does not"
    ):
        run(tmp_path, split)
    with pytest.raises(mesh.MeshError, match=r"global_batch=6 .* each of the 2 groups of 4 devices .* try 4 or 8"):
        run(tmp_path, split, "data.global_batch=6")


def test_a_mesh_that_does_not_fit_the_model_is_refused(tmp_path):
    with pytest.raises(mesh.MeshError, match=r"dense_layers\.attention\.k_up has 12 to split over mesh\.fsdp=8"):
        run(tmp_path, "mesh={data: 1, fsdp: 8, expert: 1}", "model.kv_lora_rank=12")


def test_the_default_data_needs_no_download(tmp_path):
    config, _ = load(tmp_path, "data.sources=[{kind: text, path: stdlib}]")
    data = open_data(config.data, 257, 0, None)
    rows = next(itertools.islice(data.batches(3), 1))
    assert rows["tokens"].shape == (16, 32) and rows["tokens"].max() < 257


def test_muon_trains_where_there_are_fewer_matrices_than_devices(tmp_path):
    assert run(tmp_path, "optimizer.kind=muon", "mesh={data: 1, fsdp: 4, expert: 2}", "steps=2", *ONE_LAYER) == 0
    found = losses(tmp_path)
    assert found[1] < found[0]


class Unsteady:
    """A compiled step on machines that, at one call, compute a weight wrongly."""

    def __init__(self, program, call):
        self.program, self.left = program, call

    def __call__(self, state, *rest):
        self.left -= 1
        state, computed = self.program(state, *rest)
        return state, computed | {"grad_norm": computed["grad_norm"] * (1 + 1e-6 * (self.left == 0))}


def test_a_step_that_gives_another_result_the_second_time_ends_the_run_with_1_and_is_not_saved(
    tmp_path, monkeypatch, capsys
):
    probes, compiled = 2, step.Stepper.compile  # of the terms; then come 6 steps, of which 2 twice
    monkeypatch.setattr(step.Stepper, "compile", lambda self: Unsteady(compiled(self), probes + 6 + 2))
    with pytest.raises(integrity.CorruptionError, match=r"step 6, computed twice .* grad_norm is .* after step 3,"):
        run(tmp_path, "verify_every_steps=3", "checkpoint.every_steps=2")
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "4"}
    assert train.EXIT_CODES[integrity.CorruptionError] == 1


def test_a_run_that_verifies_its_steps_is_the_run_that_does_not(straight, tmp_path):
    assert run(tmp_path, "verify_every_steps=1") == 0
    assert losses(tmp_path) == losses(straight)


# -------------------------------------------------------------------------------- starting from another run


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory, compile_cache):
    """A run of twelve steps, of one layer."""
    folder = tmp_path_factory.mktemp("one_layer")
    assert run(folder, *ONE_LAYER) == 0
    return folder


INDEXER = ["model.index_topk=32", "model.index_n_heads=4", "model.index_head_dim=6", "loss.indexer=0.01", *ONE_LAYER]


def test_a_warm_up_from_another_run_trains_indexers_alone_and_a_sparse_run_goes_on_from_there(
    one_layer, tmp_path, capsys
):
    warm, sparse = [*INDEXER, "optimizer.train=['*indexer*']", "steps=1"], [*INDEXER, "model.index_topk=8", "steps=1"]
    assert run(tmp_path / "warm", *warm, f"start_from={one_layer}") == 0
    assert "drawn: moe_layers.attention.indexer.heads, " in capsys.readouterr().out
    before, after = state(one_layer, *ONE_LAYER), state(tmp_path / "warm", *warm)
    old, new = by_name(before), by_name(after)
    assert all("indexer" in name for name in new.keys() - old.keys())
    for name, array in old.items():
        np.testing.assert_array_equal(new[name], array)
    with pytest.raises(checkpoint.CheckpointError, match=r"optimizer\.train: .* where start_from="):
        run(tmp_path / "warm", *sparse, "steps=2")
    assert run(tmp_path / "sparse", *sparse, f"start_from={tmp_path / 'warm'}") == 0
    last = by_name(state(tmp_path / "sparse", *sparse))
    assert all((last[name] != array).any() for name, array in new.items())


def test_a_run_goes_on_with_longer_sequences_and_yarn_from_what_another_has_learned(one_layer, tmp_path):
    yarn = "model.rope_scaling={factor: 4, original_max_position_embeddings: 32, mscale: 1, mscale_all_dim: 1}"
    longer = ["data.sequence_length=64", "data.global_batch=8", "model.max_position_embeddings=256", "steps=1"]
    assert run(tmp_path, yarn, *longer, *ONE_LAYER, f"start_from={one_layer}") == 0
    afresh, learned = (losses(one_layer)[i] for i in (0, -1))
    assert losses(tmp_path)[0] < (afresh + learned) / 2


def by_name(found):
    """Weights and router biases."""
    return {
        params.name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path((found.params, found.router_bias))
    }


def test_a_run_does_not_start_from_one_of_another_shape(straight, tmp_path):
    with pytest.raises(
        trained.UseError, match=r"such as dense_layers\.mlp.* -> .*give the model the sizes of that run"
    ):
        run(tmp_path, "model.intermediate_size=96", f"start_from={straight}")

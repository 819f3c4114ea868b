"""Checkpoints whose files were changed after they were saved: found out, and the one before is used."""

import dataclasses
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxds import checkpoint, checksum, host
from maxds.config import Checkpoint
from maxds.step import TrainState

# Reads that Orbax does not wait for end after their event loop has.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("collected"),
]


def state_of(seed: int) -> TrainState:
    """Split, replicated and scalar arrays, of several dtypes, in both memories."""
    draw = np.random.default_rng(seed)
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    arrays = {
        "split": (draw.standard_normal((16, 24, 3), np.float32), P("fsdp", "data"), "device"),
        "whole": (draw.standard_normal((5, 7), np.float32), P(), "device"),
        "half": (draw.standard_normal((8, 32)).astype(jnp.bfloat16), P(None, "fsdp"), host.KIND),
        "step": (np.int32(seed), P(), "device"),
    }
    put = {
        name: jax.device_put(a, NamedSharding(mesh, spec, memory_kind=kind)) for name, (a, spec, kind) in arrays.items()
    }
    weights, moments = {"split": put["split"]}, {"half": put["half"]}
    return TrainState(put["step"], weights, moments, router_bias={}, typical_norm=put["whole"])


def at(folder: pathlib.Path):
    return dataclasses.replace(tiny.config(), run_dir=str(folder))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with checkpoints 6 and 12."""
    folder = tmp_path_factory.mktemp("run")
    with checkpoint.open_run(at(folder), print) as saved:
        for step in (6, 12):
            saved.save(state_of(step), step, at(folder), "data")
            saved.orbax.wait()
    return folder


ABSTRACT = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state_of(0))


def found(saved: checkpoint.Checkpoints, abstract: TrainState = ABSTRACT) -> TrainState:
    state = saved.restore(abstract, lambda about: None)
    assert state is not None
    return state


def restored(folder, warn=print):
    with checkpoint.open_run(at(folder), warn, read_only=True) as saved:
        return found(saved)


def test_a_checkpoint_that_another_process_cannot_read_is_skipped_by_all(run, monkeypatch):
    def read_here_alone(failed):
        return np.array([failed, 1])

    monkeypatch.setattr(checkpoint.mesh_lib, "of_all_processes", read_here_alone)
    warnings = []
    with pytest.raises(checkpoint.UnreadableError, match=r"none of the checkpoints 6, 12 in .* can be read"):
        restored(run, warnings.append)
    assert [re.search(r"checkpoint (\d+) is damaged and is skipped \(1 of", w)[1] for w in warnings] == ["12", "6"]


def equal(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b))


def test_what_lay_in_one_memory_is_restored_in_the_other_where_config_says_so(run):
    other = {"device": host.KIND, host.KIND: "device"}
    abstract = jax.tree.map(
        lambda a: a.update(sharding=a.sharding.with_memory_kind(other[a.sharding.memory_kind])), ABSTRACT
    )
    with checkpoint.open_run(at(run), print, read_only=True) as saved:
        state = found(saved, abstract)
    assert equal(state, state_of(12))
    assert [a.sharding for a in jax.tree.leaves(state)] == [a.sharding for a in jax.tree.leaves(abstract)]


def damages(file: pathlib.Path, draw: np.random.Generator):
    """Name -> bytes that might be left of a file; None: it is gone."""
    good = file.read_bytes()
    yield "empty", b""
    yield "gone", None
    if good:
        yield "half", good[: len(good) // 2]
        yield "short by one", good[:-1]
        for place in draw.integers(0, len(good), 3):
            yield (
                f"bit of byte {place}",
                good[:place] + bytes([good[place] ^ 1 << draw.integers(8)]) + good[place + 1 :],
            )
        start = int(draw.integers(0, len(good)))
        noise = draw.bytes(min(64, len(good) - start))
        yield f"noise from {start}", good[:start] + noise + good[start + len(noise) :]


def test_whatever_happens_to_a_file_the_checkpoint_is_right_or_the_one_before_is_used(run, tmp_path):
    states, draw, found_out = {step: state_of(step) for step in (6, 12)}, np.random.default_rng(0), 0
    shutil.copytree(run, tmp_path / "run")
    latest = tmp_path / "run" / "checkpoints" / "12"
    for file in sorted(path for path in latest.rglob("*") if path.is_file()):
        for what, left in damages(file, draw):
            good, said = file.read_bytes(), []
            if left is None:
                file.unlink()
            else:
                file.write_bytes(left)
            state = restored(tmp_path / "run", said.append)
            assert equal(state, states[int(state.step)]), (file, what)
            damaged = int(state.step) == 6
            assert any("checkpoint 12 is damaged and is skipped" in line for line in said) == damaged, (file, what)
            found_out += damaged
            file.write_bytes(good)
    assert found_out > 30


def test_a_whole_file_of_another_checkpoint_is_found_out(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    shutil.rmtree(folder / "12" / "state")
    shutil.copytree(folder / "6" / "state", folder / "12" / "state")
    said = []
    assert int(restored(tmp_path / "run", said.append).step) == 6
    assert re.search(r"checkpoint 12 is damaged .*4 arrays have another checksum than when they were saved", said[0])


def test_what_would_make_orbax_refuse_all_checkpoints_is_emptied_where_a_run_goes_on(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    about, said = tmp_path / "run" / "checkpoints" / "12" / "_CHECKPOINT_METADATA", []
    about.write_text('{"other": 1, "custom_metadata": {"a": 1}}')
    with pytest.raises(checkpoint.CheckpointError, match=r"damaged .*unknown key other.*let the run go on"):
        restored(tmp_path / "run")
    with checkpoint.open_run(at(tmp_path / "run"), said.append) as saved:
        assert equal(found(saved), state_of(6))
    assert "12/_CHECKPOINT_METADATA is damaged (Provided metadata contains unknown key other" in said[0]
    assert "checkpoint 12 is damaged and is skipped" in said[1]
    assert "other" in about.with_name("_CHECKPOINT_METADATA.damaged").read_text()
    assert equal(restored(tmp_path / "run"), state_of(6))


def test_a_damaged_checkpoint_neither_counts_among_those_to_keep_nor_is_deleted(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    (folder / "12" / "state" / "manifest.ocdbt").write_bytes(b"")
    config = at(tmp_path / "run")
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, keep_last=1))
    with checkpoint.open_run(config, print) as saved:
        assert int(found(saved).step) == 6
        for step in (8, 10):
            saved.save(state_of(step), step, config, "data")
            saved.orbax.wait()
    assert {path.name for path in folder.iterdir()} == {"10", "12"}
    assert int(restored(tmp_path / "run").step) == 10


def test_checkpoints_are_due_by_steps_and_by_minutes():
    def policies(**asked):
        config = dataclasses.replace(tiny.config(), checkpoint=Checkpoint(**asked))
        return [vars(policy) for policy in checkpoint._save_policy(config).policies]

    assert policies(every_steps=7) == [{"interval": 7}]
    assert policies(every_steps=None, every_minutes=1.51) == [{"minimum_interval_secs": 91}]
    assert policies(every_steps=7, every_minutes=2) == [{"interval": 7}, {"minimum_interval_secs": 120}]
    assert policies(every_steps=None) == []


def test_a_checksum_is_that_of_the_array_however_it_is_split():
    whole = jax.tree.map(lambda a: jax.device_put(np.asarray(a)), state_of(3))
    assert checksum.of_arrays(whole) == checksum.of_arrays(state_of(3))


def test_a_checksum_tells_of_any_bit_and_of_values_that_changed_places():
    values = np.zeros(64, np.float32)
    found = {checksum.of_arrays({"a": jnp.asarray(values)})["a"]}
    for place in range(64):
        for bit in (0, 7, 23, 30, 31):
            changed = values.view(np.uint32).copy()
            changed[place] ^= np.uint32(1 << bit)
            found.add(checksum.of_arrays({"a": jnp.asarray(changed.view(np.float32))})["a"])
    for place in range(1, 64):
        found.add(checksum.of_arrays({"a": jnp.asarray(np.roll(np.arange(64, dtype=np.float32), place))})["a"])
    assert len(found) == 1 + 64 * 5 + 63


def test_a_save_compiles_nothing_but_the_checksums(tmp_path, caplog):
    state, mesh = state_of(3), jax.make_mesh((2, 4), ("data", "fsdp"))
    replicated = jax.device_put(np.zeros((16, 56), np.float32), NamedSharding(mesh, P(None, "fsdp")))
    with checkpoint.open_run(at(tmp_path), print) as saved, jax.log_compiles():
        saved.save(dataclasses.replace(state, typical_norm=replicated), 3, at(tmp_path), "data")
    assert re.findall(r"Compiling (\S+) with", caplog.text) == ["jit(_sums)"]

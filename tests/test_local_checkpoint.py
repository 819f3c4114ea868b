"""Checkpoints on the hosts themselves: what a restart finds there, and what it does where a part is gone."""

import contextlib
import dataclasses
import re
import shutil
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from running import LONG, checksums, finish, losses, start, start_several, wait_for_steps
from test_checkpoint import damages, equal

from maxds import checkpoint, config, host, local_checkpoint, mesh, shards
from maxds.step import TrainState

pytestmark = pytest.mark.newest

MESH = mesh.make(config.Mesh(data=2, fsdp=2, expert=2))


def state_of(seed, on=MESH):
    draw = np.random.default_rng(seed)

    def put(array, *spec, memory=None):
        return jax.device_put(array, NamedSharding(on, P(*spec), memory_kind=memory))

    weights = {
        "split": put(draw.standard_normal((4, 8, 3), np.float32), None, "fsdp"),
        "experts": put(draw.standard_normal((8, 4)).astype(jnp.bfloat16), ("expert", "fsdp"), memory=host.KIND),
        "table": put(draw.standard_normal((16, 2), np.float32), ("data", "fsdp", "expert")),
    }
    bias = {"moe": put(draw.integers(-9, 9, (2, 5), np.int32))}
    return TrainState(put(np.int32(seed)), weights, {"count": put(np.int32(-seed))}, bias, put(np.float32(-0.0)))


def abstract(state):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)


class Log:
    """Remembers what is said."""

    def __init__(self):
        self.said = []
        self.note = self.alarm = self.said.append


@contextlib.contextmanager
def opened(folder, log=None):
    """The local checkpoints of a run, one after every other step."""
    places = config.Checkpoint(local_dir=str(folder / "local"), local_every_steps=2)
    asked = dataclasses.replace(tiny.config(), run_dir=str(folder / "run"), checkpoint=places)
    with local_checkpoint.open_local(asked, log or Log()) as local:  # pyright: ignore[reportArgumentType]
        assert local is not None
        yield local


def save(folder, *steps, log=None):
    with opened(folder, log) as local:
        for step in steps:
            local.save(state_of(step), step, tiny.config(), "data", left_out=0)
            local.pool.submit(int).result()  # the one thread has done it


def restored(folder, after=0, until=99, like=None, log=None):
    with opened(folder, log) as local:
        return local.restore(abstract(like or state_of(0)), lambda about: None, after, until)


def folder_of(folder):
    return next((folder / "local").glob("*/process-0"))


def newest_in(folder):
    return max(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def test_what_is_saved_is_restored_to_the_bit_where_it_is_newer(tmp_path):
    save(tmp_path, 2, 4)
    assert equal(restored(tmp_path), state_of(4))
    assert equal(restored(tmp_path, until=3), state_of(2))
    assert restored(tmp_path, after=4) is None


def test_two_are_kept_and_the_state_may_be_donated_while_one_is_written(tmp_path):
    state, donate = state_of(2), jax.jit(lambda s: jax.tree.map(lambda a: a * 0, s), donate_argnums=0)
    with opened(tmp_path) as local:
        local.save(state, 2, tiny.config(), "data", left_out=0)
        donate(state)
    assert equal(restored(tmp_path), state_of(2))
    save(tmp_path, 4, 6, 8)
    assert {path.name for path in folder_of(tmp_path).iterdir()} == {"6", "8"}


def test_whatever_happens_to_a_file_the_state_is_right_or_the_one_before_is_used(tmp_path):
    save(tmp_path, 2, 4)
    states, draw, found_out = {step: state_of(step) for step in (2, 4)}, np.random.default_rng(0), 0
    for file in sorted((folder_of(tmp_path) / "4").iterdir()):
        for what, left in damages(file, draw):
            good, log = file.read_bytes(), Log()
            if left is None:
                file.unlink()
            else:
                file.write_bytes(left)
            state = restored(tmp_path, log=log)
            assert state is not None and equal(state, states[int(state.step)]), (file, what)
            assert bool(log.said) == (int(state.step) == 2), (file, what)
            found_out += int(state.step) == 2
            file.write_bytes(good)
    assert found_out > 50


def test_what_is_half_written_or_of_a_later_step_is_deleted(tmp_path):
    save(tmp_path, 2, 4)
    (folder_of(tmp_path) / "6.partial").mkdir()
    with opened(tmp_path) as local:
        local.drop_after(2)
    assert {path.name for path in folder_of(tmp_path).iterdir()} == {"2"}


def test_what_is_still_being_written_is_waited_for_before_later_steps_are_deleted(tmp_path):
    save(tmp_path, 2)
    gate = threading.Event()
    with opened(tmp_path) as local:
        local.pool.submit(gate.wait)
        local.save(state_of(4), 4, tiny.config(), "data", left_out=0)
        threading.Timer(0.2, gate.set).start()
        local.drop_after(2)
    assert {path.name for path in folder_of(tmp_path).iterdir()} == {"2"}


def test_one_that_could_not_be_written_leaves_nothing(tmp_path, monkeypatch):
    save(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", mock.Mock(side_effect=OSError("no room")))
        save(tmp_path, 4)
    assert {path.name for path in folder_of(tmp_path).iterdir()} == {"2"}


def test_another_run_has_a_folder_of_its_own(tmp_path):
    save(tmp_path, 2)
    places = config.Checkpoint(local_dir=str(tmp_path / "local"), local_every_steps=2)
    other = dataclasses.replace(tiny.config(), run_dir=str(tmp_path / "another"), checkpoint=places)
    with local_checkpoint.open_local(other, Log()) as local:  # pyright: ignore[reportArgumentType]
        assert local is not None and local.steps() == []


def test_another_mesh_finds_nothing_and_says_so(tmp_path):
    save(tmp_path, 2)
    log, other = Log(), mesh.make(config.Mesh(data=1, fsdp=4, expert=2))
    assert restored(tmp_path, like=state_of(0, other), log=log) is None
    assert log.said == ["local checkpoint 2 is of another mesh or model, and is left out"]


def test_a_check_that_raises_is_heard(tmp_path):
    save(tmp_path, 2)

    def check(about):
        assert about.step == 2 and about.fingerprint == "data"
        raise checkpoint.CheckpointError("no")

    with opened(tmp_path) as local, pytest.raises(checkpoint.CheckpointError):
        local.restore(abstract(state_of(0)), check, 0, 99)


def test_a_folder_that_cannot_be_written_is_an_alarm(tmp_path):
    (tmp_path / "local").write_text("")
    log = Log()
    save(tmp_path, 2, 4, log=log)
    (alarm,) = log.said
    assert alarm.startswith("local checkpoint 2 could not be saved: ") and "The run goes on" in alarm


def test_one_that_is_due_while_the_last_is_being_written_is_left_out(tmp_path):
    log, gate = Log(), threading.Event()
    with opened(tmp_path, log) as local:
        local.pool.submit(gate.wait)
        for step in (2, 4):
            local.save(state_of(step), step, tiny.config(), "data", left_out=0)
        gate.set()
    (alarm,) = log.said
    assert alarm.startswith("local checkpoint 4 is left out: 2 is still being written after ")
    assert equal(restored(tmp_path), state_of(2))


def test_it_is_told_once_that_all_have_one_also_if_another_process_took_longer(tmp_path, monkeypatch):
    log = Log()
    others = iter([[0, 0], [1, 0], [0, 2], [0, 2]])  # what another process answers: whether it writes, newest
    monkeypatch.setattr(local_checkpoint.mesh_lib, "of_all_processes", lambda own: np.array([own, next(others)]))
    save(tmp_path, 2, 4, 6, 8, log=log)
    assert [said.split(":")[0] for said in log.said] == ["local checkpoint 4 is left out", "local checkpoint 2 saved"]
    assert {path.name for path in folder_of(tmp_path).iterdir()} == {"2", "6", "8"}  # the one that all have stays


def test_what_devices_have_not_others_give_to_the_bit():
    """The devices of `data` 1 have theirs, the others another state's: of the table, which is split, theirs remain."""
    mine = jax.device_put(np.arange(8) >= 4, NamedSharding(MESH, mesh.BATCH))

    def mixed(a, b):
        parts = zip(a.addressable_shards, b.addressable_shards, strict=True)
        data = [(theirs if theirs.device in MESH.devices[1] else others).data for theirs, others in parts]
        return jax.make_array_from_single_device_arrays(a.shape, a.sharding, data)

    expected, other = (jax.tree.map(np.array, jax.tree.leaves(state_of(seed))) for seed in (3, 4))
    leaves = jax.tree.map(mixed, *(jax.tree.leaves(state_of(seed)) for seed in (3, 4)))
    split = next(n for n, leaf in enumerate(leaves) if leaf.shape == (16, 2))
    expected[split][:8] = other[split][:8]
    found = shards._shared(leaves, mine, MESH, tuple(leaf.sharding.spec for leaf in leaves))
    for array, right in zip(found, expected, strict=True):
        for part in array.addressable_shards:
            assert np.asarray(part.data).tobytes() == right[part.index].tobytes()


# ------------------------------------------------------------------------------------ real processes

EVERY = "checkpoint.local_every_steps=2"


def test_a_killed_run_goes_on_from_its_own_host_to_the_bit(tmp_path, program_cache, straight_run):
    arguments = *LONG, "checkpoint.every_steps=20", f"checkpoint.local_dir={tmp_path}/local", EVERY
    process = start(tmp_path / "run", program_cache, *arguments)
    wait_for_steps(process, tmp_path / "run", 35)
    process.kill()
    process.communicate()
    newest = newest_in(folder_of(tmp_path))
    assert newest > 20  # which the run's folder has
    code, out, err = finish(start(tmp_path / "run", program_cache, *arguments))
    assert code == 0, err
    assert f"restored from local checkpoint {newest}" in out and "to the bit" in out
    assert losses(tmp_path / "run") == losses(straight_run)
    assert checksums(tmp_path / "run") == checksums(straight_run)
    # Who deletes the run's folder wants another run.
    shutil.rmtree(tmp_path / "run")
    code, out, err = finish(start(tmp_path / "run", program_cache, *arguments, "steps=2"))
    assert code == 0 and "initialized from seed" in out, err
    assert list(folder_of(tmp_path).iterdir()) == []


def killed(folder, program_cache, arguments, steps):
    """A run of two processes that are killed after so many steps; the second one's host is lost."""
    pair = start_several(2, folder / "run", program_cache, *arguments, devices=4)
    wait_for_steps(pair[0], folder / "run", steps)
    for process in pair:
        process.kill()
    for process in pair:
        process.communicate()
    (lost,) = (folder / "local").glob("*/process-1")
    shutil.rmtree(lost)


def ended(folder, program_cache, arguments):
    """What the first of two processes says that go on with a run to its end."""
    told = [finish(p) for p in start_several(2, folder / "run", program_cache, *arguments, devices=4)]
    assert [code for code, _, _ in told] == [0, 0], told
    return told[0][1]


def test_a_process_that_has_lost_its_own_gets_it_from_its_replica(tmp_path, program_cache, straight):
    arguments = *LONG, f"checkpoint.local_dir={tmp_path}/local", EVERY  # each has the whole state, by `data`
    killed(tmp_path, program_cache, arguments, 8)
    newest = newest_in(folder_of(tmp_path))
    out = ended(tmp_path, program_cache, arguments)
    assert f"restored from local checkpoint {newest}" in out
    assert losses(tmp_path / "run") == pytest.approx(straight, rel=1e-5)  # of one process


def test_where_a_shard_is_gone_the_run_goes_on_from_its_folder(tmp_path, program_cache):
    arguments = [*LONG, "checkpoint.every_steps=30", f"checkpoint.local_dir={tmp_path}/local", EVERY]
    arguments += ["mesh={data: 1, fsdp: 4, expert: 2}"]
    killed(tmp_path, program_cache, arguments, 40)
    out = ended(tmp_path, program_cache, arguments)
    assert re.search(r"warning: local checkpoint \d+ is skipped: of some shards there is none", out)
    assert "restored from checkpoint 30" in out and "to the bit" in out

"""Runs whose data makes loss and gradient something else than numbers: they go back, and leave that data out."""

import itertools
import types

import jax
import numpy as np
import pytest
from running import ONE_LAYER, finish, losses, rows, spoiled, start_several
from test_train import compile_cache, run, state  # noqa: F401

from maxds import goodput, loop, metrics, records, rollback
from maxds.data import Data

pytestmark = pytest.mark.newest

# Tokens that are no numbers all go to the same experts. There is room for them: further rounds may end the process (lab
# log, 2026-11-23).
SHORT = ["steps=14", *ONE_LAYER, "checkpoint.every_steps=4", "checkpoint.keep_last=3"]
BACK = [*SHORT, "checkpoint.rollback_steps=5"]
BAD = range(9, 14)  # batches of the steps 10 to 14: back to checkpoint 4, and on with batch 14


def spoil(monkeypatch, bad):
    """Batches of these numbers hold tokens that the vocabulary has not, and whose embedding is not a number."""
    read = Data.batches

    def batches(data, start=0, *process):
        for number, found in enumerate(read(data, start, *process), start):
            yield found | {"tokens": np.full_like(found["tokens"], 10**6)} if number in bad else found

    monkeypatch.setattr(Data, "batches", batches)


@pytest.fixture(scope="module")
def without(tmp_path_factory, compile_cache):  # noqa: F811
    """The folder of a run that was given the data without batches 4 to 13."""
    folder, read = tmp_path_factory.mktemp("without"), Data.batches

    def batches(data, start, *process):
        assert start == 0
        return itertools.chain(itertools.islice(read(data, 0, *process), 4), read(data, 14, *process))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Data, "batches", batches)
        assert run(folder, *SHORT) == 0
    return folder


def same(folder, other):
    """Whether the steps and the last state of two runs are the same to the bit."""
    jax.tree.map(np.testing.assert_array_equal, state(folder, *ONE_LAYER), state(other, *ONE_LAYER))
    return losses(folder) == losses(other)


SAID = (
    "steps 10 to 14 were not finite: back to checkpoint 4, and on with the data after theirs; 10 batches are left out"
)


def test_a_run_that_goes_back_is_the_run_that_was_not_given_the_data_in_between(without, tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, BAD)
    assert run(tmp_path, *BACK, "verify_every_steps=4") == 0
    assert same(tmp_path, without)
    assert capsys.readouterr().out.splitlines().count(SAID) == 1
    assert [row["left_out"] for row in rows(tmp_path)] == [0] * 4 + [10] * 10
    times = list(records.read(tmp_path, records.TIMES))
    (back,) = (place for place, row in enumerate(times) if "left_out" in row)
    assert (times[back]["done"], times[back]["left_out"]) == (4, 10)
    thrown_away = sum(row["spent"]["step"] for row in times[5:back])  # the first row is the start's
    spent = (account := goodput.Account(times)).seconds()
    assert spent["lost"] == pytest.approx(thrown_away + times[back]["spent"].get("lost", 0)) and spent["restore"] > 0
    assert sum(spent.values()) == pytest.approx(account.wall) and "1 start, 1 rollback" in account.table()


class Killed(BaseException):
    """What a test ends a run with, where no handler is to see to anything."""


def before(monkeypatch, owner, name, skip=0):
    """The run ends before the call of a method, but for so many calls."""
    method, calls = getattr(owner, name), itertools.count()

    def die(*arguments, **named):
        if next(calls) >= skip:
            raise Killed
        return method(*arguments, **named)

    monkeypatch.setattr(owner, name, die)


@pytest.mark.parametrize(
    ("owner", "name", "skip"),
    [(metrics.Log, "go_back", 0), (metrics.Log, "step", 16)],
    ids=["before metrics are dropped", "before it saves again"],
)
def test_a_run_that_is_killed_while_it_goes_back_ends_in_the_same_state(
    owner, name, skip, without, tmp_path, monkeypatch, capsys
):
    spoil(monkeypatch, BAD)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        before(patch, owner, name, skip)
        run(tmp_path, *BACK)
    capsys.readouterr()
    assert run(tmp_path, *BACK) == 0
    assert SAID in capsys.readouterr().out
    assert same(tmp_path, without)


def test_local_checkpoints_of_before_it_went_back_are_gone(without, tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, BAD)
    local = *BACK, f"checkpoint.local_dir={tmp_path}/local", "checkpoint.local_every_steps=3"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        before(patch, metrics.Log, "step", 14 + 1)  # the second one after it went back to 4
        run(tmp_path / "run", *local)
    capsys.readouterr()
    (left,) = (tmp_path / "local").glob("*/*")
    assert not list(left.iterdir())  # of 6 and 9
    assert run(tmp_path / "run", *local) == 0
    assert "restored from checkpoint 4" in capsys.readouterr().out
    assert same(tmp_path / "run", without)


def test_a_run_that_gets_no_further_by_going_back_twice_ends(tmp_path, monkeypatch):
    spoil(monkeypatch, range(9, 10**6))
    with pytest.raises(loop.NonFiniteError) as error:
        run(tmp_path, *BACK, "checkpoint.rollback_steps=1")
    assert str(error.value).startswith(
        "going back 2 times, past the data of such steps, was of no use: loss or gradient was not finite for 5 steps "
        "in a row, 9 to 13; none of them was applied or saved (last checkpoint: 8). "
    )
    assert rows(tmp_path)[-1]["left_out"] == 11


def test_a_run_with_no_checkpoint_so_old_ends_and_keeps_what_it_has(tmp_path, monkeypatch):
    spoil(monkeypatch, range(5, 10**6))
    with pytest.raises(loop.NonFiniteError) as error:
        run(tmp_path, *BACK)
    assert str(error.value).startswith(
        "no checkpoint is old enough to go back to: checkpoint.rollback_steps=5 wants one of step 1 or before, and "
        "there are 4: loss or gradient was not finite for 5 steps in a row, 6 to 10; "
    )
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"4"}


class Saves:
    """Stands for saves.Saves and for Checkpoints of every step."""

    def __init__(self):
        self.saved, self.gone_back, self.waited = self, [], None

    def wait(self, step):
        self.waited = step

    def restore(self, abstract, check, *, until):
        assert self.waited > until, "a save may be under way"
        return types.SimpleNamespace(step=until)

    def go_back(self, step):
        self.gone_back.append(step)


def test_a_run_goes_back_any_number_of_times_as_long_as_it_gets_past_where_it_failed():
    saves = Saves()
    rollbacks = rollback.Rollbacks(saves, 3)  # pyright: ignore[reportArgumentType]
    for first in (10, 15, 20, 22, 40, 31, 60):  # 22 and 31 are not past it
        rollbacks.restore("abstract", first, first + 4)  # pyright: ignore[reportArgumentType]
    assert saves.gone_back == [7, 12, 17, 19, 37, 28, 57]
    rollbacks.restore("abstract", 64, 68)  # pyright: ignore[reportArgumentType]
    with pytest.raises(rollback.RollbackError, match="was of no use"):
        rollbacks.restore("abstract", 50, 54)  # pyright: ignore[reportArgumentType]


def test_earlier_steps_that_fail_do_not_make_it_forget_how_far_it_had_been():
    rollbacks = rollback.Rollbacks(Saves(), 3)  # pyright: ignore[reportArgumentType]
    for first in (40, 20):
        rollbacks.restore("abstract", first, first + 4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(rollback.RollbackError, match="was of no use"):
        rollbacks.restore("abstract", 30, 34)  # pyright: ignore[reportArgumentType]


def test_two_processes_go_back_together(without, tmp_path, program_cache):
    arguments = *BACK, "mesh={data: 1, fsdp: 1, expert: 2}"
    bad = spoiled(tmp_path, BAD)
    processes = start_several(2, tmp_path / "run", program_cache, *arguments, devices=1, **bad)
    ended = [finish(process) for process in processes]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert ended[0][1].splitlines().count(SAID) == 1
    assert losses(tmp_path / "run") == pytest.approx(losses(without), rel=1e-5)

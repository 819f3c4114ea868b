"""Saves whose storage is slow or fails, against a storage that does as it is told."""

import itertools
import re

import numpy as np
import pytest

from maxds import saves
from maxds.checkpoint import StorageError


class Storage:
    """Stands for Checkpoints and for Orbax: a save ends when `ended` is set, and fails with `error`."""

    def __init__(self):
        self.orbax, self.folder = self, "RUN/checkpoints"
        self.ended, self.error = True, None
        self.started, self.dropped = [], 0

    def due(self, step):
        return step % 10 == 0

    def start(self, _state, step):
        self.started.append(step)

    def is_saving_in_progress(self):
        return not self.ended

    def wait(self):
        if self.error:
            raise self.error

    def drop_half_written(self):
        self.dropped += 1

    def drop_after(self, step):
        pass


class Log:
    """Remembers what is said."""

    def __init__(self):
        self.notes, self.alarms, self.flushed = [], [], 0
        self.note, self.alarm = self.notes.append, self.alarms.append

    def flush(self):
        self.flushed += 1


class Clock:
    """Stands for `time`."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(saves, "time", clock)
    return clock


def run(saving, steps):
    """Takes the steps as the loop does."""
    for step in steps:
        saving.look(step)
        if saving.due(step):
            saving.save("state", step)


@pytest.fixture
def saving(clock):
    storage = Storage()
    return saves.Saves(storage, Log(), storage.start, last=None)  # pyright: ignore[reportArgumentType]


def test_a_checkpoint_is_told_of_once_it_is_complete_and_not_before(saving):
    saving.saved.ended = False
    run(saving, range(10, 18))
    assert saving.saved.started == [10] and saving.log.notes == [] and saving.last is None
    saving.saved.ended = True
    run(saving, [18])
    assert saving.log.notes == ["checkpoint 10 saved in 0.0 s"] and saving.last == 10
    assert saving.log.flushed == 1  # so that a bucket has the metrics of its steps


def test_a_save_that_is_due_waits_for_a_slow_one_a_while_and_is_left_out_then(saving, clock):
    saving.saved.ended = False
    run(saving, range(10, 30))
    assert saving.saved.started == [10] and 60 <= clock.now < 61
    (alarm,) = saving.log.alarms
    assert alarm.startswith("checkpoint 20 is left out: 10 is still being written after 60")
    saving.saved.ended = True
    run(saving, range(30, 32))
    assert saving.saved.started == [10, 30] and saving.last == 30 and saving.failures == 0


def test_a_save_that_fails_is_tried_again_after_a_pause_that_doubles(saving, clock):
    saving.saved.error = OSError("no")
    attempts = [clock.now]
    for step in range(10, 5000):
        if step % 10:  # none is due
            before = len(saving.saved.started)
            run(saving, [step])
            attempts += [clock.now] * (len(saving.saved.started) - before)
        elif step == 10:
            run(saving, [step])
        clock.now += 1
        if saving.failures == 4:
            break
    assert saving.saved.dropped == len(saving.saved.started) and len(attempts) == 4
    gaps = [after - before for before, after in itertools.pairwise(attempts)]
    assert all(pause <= gap <= 2 * pause for pause, gap in zip((30, 60, 120), gaps, strict=True)), gaps


def test_the_pause_grows_to_a_quarter_of_an_hour_and_is_told(saving):
    saving.saved.error = OSError("no")
    run(saving, range(10, 75))
    pauses = [re.search(r"next try in (\d+) s, or", alarm)[1] for alarm in saving.log.alarms]  # pyright: ignore
    assert pauses == ["30", "60", "120", "240", "480", "900", "900"]


def others(monkeypatch, answer):
    """There is another process, with this answer to whatever processes ask each other."""
    monkeypatch.setattr(saves.mesh_lib, "of_all_processes", lambda own: np.array([own, answer], np.uint32))


def test_a_save_is_what_the_process_that_knows_the_worst_of_it_says(saving, monkeypatch):
    others(monkeypatch, saves.Outcome.UNDER_WAY)
    run(saving, range(10, 18))
    assert saving.last is None and saving.failures == 0
    others(monkeypatch, saves.Outcome.FAILED)
    run(saving, [18])
    assert saving.last is None and saving.failures == 1
    assert "checkpoint 10 could not be saved: another process could not write its part. That" in saving.log.alarms[0]


def test_it_is_tried_again_when_the_first_process_takes_it_to_be_time(saving, clock, monkeypatch):
    saving.saved.error = OSError("no")
    run(saving, [10, 11])
    others(monkeypatch, True)
    assert not saving.due(12)
    clock.now += 30
    others(monkeypatch, False)
    assert saving.due(12)


def test_what_failed_before_a_run_went_back_is_tried_again_after_it(saving, clock):
    saving.saved.error = OSError("no")
    run(saving, range(40, 42))
    saving.go_back(30)
    clock.now += 30
    assert saving.last == 30 and saving.due(31)


def test_the_run_ends_after_eight_failures_in_a_row_and_a_success_starts_the_count_anew(saving):
    saving.saved.error = OSError("no")
    run(saving, range(10, 75))
    assert saving.failures == 7
    saving.saved.error = None
    run(saving, range(80, 85))
    assert saving.failures == 0 and saving.last == 80
    saving.saved.error = OSError("no")
    with pytest.raises(
        StorageError, match=r"^8 saves in a row have failed; the last complete checkpoint is 80\. See to"
    ):
        run(saving, range(90, 200))
    assert saving.saved.started[-1] == 160


def test_the_last_save_is_tried_three_times(saving):
    saving.saved.error = OSError("no")
    with pytest.raises(StorageError, match=r"^the last state, of step 7, could not be saved"):
        saving.save_last("state", 7)
    assert saving.saved.started == [7, 7, 7]


def test_the_last_save_waits_for_the_one_before_and_does_not_repeat_it(saving):
    run(saving, [10])
    saving.save_last("state", 10)
    assert saving.saved.started == [10] and saving.last == 10

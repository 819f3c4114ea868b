"""Where the time of a run went is worked out from its records, and what a host does meanwhile costs nothing."""

import itertools
import random
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest

from maxds import goodput


def start(began, time, done=0, **spent):
    return {"time": time, "began": began, "done": done, "spent": spent}


def step(number, time, **spent):
    return {"time": time, "step": number, "spent": spent}


INTERRUPTED = [
    start(1000.0, 1016.0, init=4.0, compile=12.0),
    step(1, 1020.0, data=1.0, step=3.0),
    step(2, 1024.0, step=4.0),
    step(3, 1032.0, checkpoint=3.0, step=4.5),  # and half a second that nobody names
    step(4, 1036.0, step=4.0),  # killed after it, with checkpoint 2
    start(1044.0, 1050.0, done=2, init=1.0, restore=3.0, compile=2.0),
    step(3, 1054.0, step=4.0),
    step(4, 1058.0, other=1.0, step=3.0),
    {"time": 1060.0, "spent": {"checkpoint": 1.5, "other": 0.5}},
]


def test_every_second_is_of_one_kind():
    account = goodput.Account(INTERRUPTED)
    assert account.seconds() == {
        "step": 3.0 + 4.0 + 4.0 + 3.0,
        "lost": 4.5 + 4.0,
        "init": 5.0,
        "restore": 3.0,
        "compile": 14.0,
        "data": 1.0,
        "checkpoint": 4.5,
        "evaluation": 0.0,
        "down": 8.0,
        "other": 2.0,
    }
    assert (account.wall, account.starts, account.goodput) == (60.0, 2, 14 / 60)


def test_the_table_has_a_line_for_each_kind_that_took_time():
    assert goodput.Account(INTERRUPTED).table().splitlines() == [
        "        60.0 s          wall time, 2 starts",
        "        14.0 s   23.3%  steps, each once",
        "         8.5 s   14.2%  steps lost: taken again after a restart or rollback",
        "         5.0 s    8.3%  starting, but for the next two",
        "         3.0 s    5.0%  restoring a checkpoint",
        "        14.0 s   23.3%  compiling or loading the step",
        "         1.0 s    1.7%  waiting for data",
        "         4.5 s    7.5%  saving checkpoints",
        "         8.0 s   13.3%  down: from the last record to the next start",
        "         2.0 s    3.3%  other",
        "goodput     23.3%",
    ]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_interrupted_all_kinds_sum_to_the_wall_time_and_each_step_counts_once(seed):
    draw = random.Random(seed)
    rows, last, now, taken, kept = [], 0, 0, [], {}
    for _ in range(draw.randint(1, 6)):
        done = draw.randint(0, last)
        kept = {number: seconds for number, seconds in kept.items() if number <= done}
        began = now + draw.randint(0, 9)
        now = began + draw.randint(1, 9)
        rows.append(start(began, now, done, init=now - began))
        for last in range(done + 1, done + draw.randint(1, 9)):
            seconds, idle, unnamed = draw.randint(1, 99), draw.randint(0, 9), draw.randint(0, 9)
            now += seconds + idle + unnamed
            rows.append(step(last, now, data=idle, step=seconds))
            taken.append(seconds)
            kept[last] = seconds
        last = max(kept, default=0)
    spent = (account := goodput.Account(rows)).seconds()
    assert sum(spent.values()) == account.wall == now - rows[0]["began"]
    assert spent["step"] == sum(kept.values()) and spent["lost"] == sum(taken) - sum(kept.values())
    assert min(spent.values()) >= 0


# ---------------------------------------------------------------------------------- stopwatch


class Work:
    """What a device computes: it is done when the test says so."""

    def __init__(self):
        self._done = threading.Event()

    def block_until_ready(self):
        self._done.wait(30)
        return self

    def end(self):
        self._done.set()
        time.sleep(0.05)  # until the stopwatch has heard of it


def run(watch):
    watch.begin_step()
    watch.run_step(work := Work())
    return work


def test_what_the_host_waits_for_while_the_devices_compute_costs_nothing():
    watch = goodput.Stopwatch()
    first = run(watch)
    with watch.idle("data"):
        time.sleep(0.2)
    second = run(watch)
    first.end()
    second.end()
    spent = [watch.finished()[0] for _ in range(2)]
    assert spent[1]["data"] == spent[1]["other"] == 0
    assert spent[0]["step"] > 0.2


def test_of_a_wait_that_outlasts_the_devices_only_the_rest_costs():
    watch = goodput.Stopwatch()
    first = run(watch)
    with watch.idle("data"):
        time.sleep(0.5)
        first.end()
        time.sleep(0.2)
    time.sleep(0.1)
    run(watch).end()
    spent = [watch.finished()[0] for _ in range(2)]
    assert 0.2 < spent[1]["data"] < 0.4
    assert 0.1 < spent[1]["other"] < 0.2
    assert spent[0]["step"] > 0.5


def test_of_waits_within_each_other_each_second_counts_once_and_what_is_named_is_not_the_hosts_own_delay():
    watch = goodput.Stopwatch()
    with watch.idle("checkpoint"):
        time.sleep(0.1)
        with watch.idle("other"):
            time.sleep(0.2)
    time.sleep(0.05)
    run(watch).end()
    spent, _ = watch.finished()
    assert 0.1 <= spent["checkpoint"] < 0.2 and 0.25 <= spent["other"] < 0.35
    assert 0.05 <= watch.late[1] < 0.15 and watch.late[0] == 0


def test_the_times_of_steps_follow_each_other_without_a_gap():
    watch = goodput.Stopwatch()
    for kind in ("init", "data", "checkpoint", "evaluation"):
        with watch.idle(kind):
            time.sleep(0.02)
        run(watch).end()
    found = [watch.finished() for _ in range(4)]
    for (_, before), (spent, end) in itertools.pairwise(found):
        assert min(spent.values()) >= 0
        assert sum(spent.values()) == pytest.approx(end - before, abs=1e-9)


@pytest.fixture
def hosts(monkeypatch):
    """The comparison of this process with two others, what it says, and what these gather; each time after 10 s."""
    others, said, clock = [np.frombuffer(name.ljust(64), np.uint8) for name in (b"b", b"c")], [], itertools.count(0, 10)
    monkeypatch.setattr(goodput.multihost_utils, "process_allgather", lambda own: np.stack([own, *others]))
    monkeypatch.setattr(goodput, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    return goodput.Hosts(said.append), said, others


def test_processes_are_compared_at_first_and_then_every_64_steps(hosts):
    compared, _, others = hosts
    others[:] = np.zeros((2, 2), np.float32)
    found = [step for step in range(1, 200) if compared.compare(np.zeros(2), {"step": 1.0})]
    assert found == [1, 8, 16, 32, 64, 128, 192]


def test_a_process_that_becomes_late_is_named_once_and_what_it_needed_is_what_the_others_spent(hosts):
    compared, said, others = hosts
    stragglers = []
    for late in (9.0, 0.4, 0.6, 0.7, 0.0, 0.6):  # at first nobody is blamed; then 5% of ten seconds stand out
        others[:] = np.array([[0.0, 0.0], [0.75 * late, 0.25 * late]], np.float32)
        while not (found := compared.compare(np.zeros(2), spent := {"step": 1.0})):
            assert spent == {"step": 1.0}
        assert spent == pytest.approx({"step": 1.0 - late, "data": 0.75 * late, "other": 0.25 * late})
        stragglers.append(found["hosts"]["straggler"])
    assert stragglers == [None, None, "process 2 on c", "process 2 on c", None, "process 2 on c"]
    assert len(said) == 2 and said[0] == (
        "process 2 on c is late: the others waited 0.60 s for it in 8 steps, 6% of their time; 0.45 s of what it was "
        "late went to waiting for data, 0.15 s to other work of its host"
    )


def test_a_process_knows_its_age_to_half_a_second():
    code = "from maxds import goodput; print(goodput.process_age(), flush=True); input()"
    begin = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        age, waited = float(process.stdout.readline()), time.monotonic() - begin
        process.stdin.write(b"\n")
    assert waited - 0.5 < age < waited + 0.05  # the start of the process itself takes a while


def test_a_start_counts_from_when_the_process_was_started():
    row = goodput.start(3, {"state": 0.25, "compile": 0.5, "mesh": 0.125})
    assert row["done"] == 3 and row["spent"]["restore"] == 0.25 and row["spent"]["compile"] == 0.5
    assert sum(row["spent"].values()) == pytest.approx(row["time"] - row["began"])
    assert goodput.start(0, {"state": 0.25})["spent"]["restore"] == 0  # nothing was there to be restored

"""What happens to real processes when data, storage, hosts or the machine fail them."""

import contextlib
import random
import re
import resource
import signal
import subprocess
import sys
import time

import kills
import pytest
from running import LONG, ROOT, checksums, finish, losses, rows, start, start_several, wait_for_steps
from test_data import sentence, write_arrayrecord

from maxds import watchdog

pytestmark = pytest.mark.newest


def records(folder):
    write_arrayrecord(folder / "0.array_record", [sentence(i).encode() * 8 for i in range(40)])
    return f"data.sources=[{{kind: arrayrecord, path: {folder}}}]"


def test_data_that_cannot_be_read_any_more_ends_the_run_with_5_and_one_sentence(tmp_path, program_cache):
    (tmp_path / "data").mkdir()
    process = start(tmp_path / "run", program_cache, *LONG, records(tmp_path / "data"))
    wait_for_steps(process, tmp_path / "run", 2)
    (tmp_path / "data" / "0.array_record").write_bytes(b"")
    code, _, err = finish(process)
    assert code == 5, err
    assert re.search(r"^the data cannot be read any more after step \d+: .*the last checkpoint \(none\)$", err, re.M)
    assert "Traceback" not in err


def test_a_process_that_waits_for_a_stopped_one_exits_with_6_and_says_where_it_stood(tmp_path, program_cache):
    first, second = start_several(2, tmp_path, program_cache, *LONG, "hang_seconds=6", devices=4)
    wait_for_steps(first, tmp_path, 2)
    second.send_signal(signal.SIGSTOP)
    code, _, err = finish(first)
    second.kill()
    second.communicate()
    assert code == 6, err
    (report,) = (tmp_path / "hangs").iterdir()
    said = report.read_text()
    assert said in err
    assert re.search(r"process 0 of 2 on \S+ made no progress for 6 s; its last was: step \d+\n", said)
    assert "thread MainThread:" in said and "in one_step" in said


HOLDS_PYTHONS_LOCK = """
import ctypes
from maxds import watchdog
watchdog._GRACE = 1
with watchdog.Watchdog(0.5, "RUN", "process 0 of 1") as watch:
    watch.progress("step 1")
    ctypes.PyDLL(None).sleep(60)
"""


def test_native_code_that_never_gives_python_its_lock_back_does_not_keep_the_watchdog_from_exiting(tmp_path):
    script = HOLDS_PYTHONS_LOCK.replace("RUN", str(tmp_path))
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert ran.returncode == 6
    assert 'File "<string>", line 7' in ran.stderr  # where it stands


def test_the_watchdog_lets_those_be_that_get_on(tmp_path):
    with watchdog.Watchdog(0.5, str(tmp_path), "process 0 of 1") as watch:
        for step in range(4):
            time.sleep(0.2)
            watch.progress(f"step {step}")
        with watch.paused():
            time.sleep(0.7)
    time.sleep(0.7)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of three megabytes."""
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", tmp_path], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("only root may mount")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


FORCED = ("checkpoint.every_steps=5", "checkpoint.keep_last=1")


def limit_files(process, size):
    """From now on the process fails to make a file larger, as where a disk is full."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def wait_for(stream, text):
    """Returns the lines of a process up to the one with this text."""
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(lines)


def complete(run_dir):
    """Names of the complete checkpoints; of those that failed something may be left until the next start."""
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    return {name for name in names if "orbax-checkpoint-tmp" not in name}


def test_a_run_goes_on_while_storage_fails_and_saves_again_once_it_can(tmp_path, program_cache, straight):
    process = start(tmp_path, program_cache, *LONG, *FORCED)
    wait_for(process.stdout, "checkpoint 10 saved")
    limit_files(process, 2000)
    err = wait_for(process.stderr, "ALARM: checkpoint")
    limit_files(process, resource.RLIM_INFINITY)
    code, out, rest = finish(process)
    assert code == 0, rest
    failed = re.search(r"checkpoint (\d+) could not be saved: .*File too large", err[-1])
    assert failed and "That makes 1 in a row, and 8 end the run. The last complete one is " in err[-1]
    assert "ALARM: metrics cannot be written" in "".join(err) + rest
    assert "checkpoint 60 saved" in out and complete(tmp_path) == {"60"}
    assert losses(tmp_path) == straight  # no line is missing that was owed
    assert max(row["failed_saves"] for row in rows(tmp_path)) > 0 and rows(tmp_path)[-1]["failed_saves"] == 0


def test_a_full_disk_ends_a_run_with_7_after_many_misses_and_nothing_that_was_saved_is_lost(
    small_disk, program_cache, straight
):
    process = start(small_disk / "run", program_cache, *LONG, *FORCED)
    wait_for(process.stdout, "checkpoint 10 saved")
    with (small_disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    code, out, err = finish(process)
    assert code == 7, err
    saved = max([10, *map(int, re.findall(r"checkpoint (\d+) saved", out))])
    assert err.count("ALARM: checkpoint") == 8 and "No space left on device" in err
    assert f"8 saves in a row have failed; the last complete checkpoint is {saved}" in err
    assert complete(small_disk / "run") == {str(saved)}
    (small_disk / "filler").unlink()
    code, out, err = finish(start(small_disk / "run", program_cache, *LONG, *FORCED))
    assert code == 0 and f"restored from checkpoint {saved}" in out, err
    assert losses(small_disk / "run") == straight
    assert [path.name for path in (small_disk / "run" / "checkpoints").iterdir()] == ["60"]


def test_a_folder_that_cannot_be_written_ends_a_run_with_7_before_it_trains(tmp_path, program_cache):
    (tmp_path / "file").touch()
    code, _, err = finish(start(tmp_path / "file" / "run", program_cache, *LONG))
    assert code == 7 and err.startswith(f"run_dir={tmp_path}/file/run cannot be used: ") and "Traceback" not in err


def test_a_run_killed_at_random_moments_loses_nothing_that_it_reported_as_saved(tmp_path, program_cache, straight_run):
    found = kills.lives(tmp_path, program_cache, random.Random(0), kills=3)
    assert found[-1].codes == [0], found[-1].err
    assert not kills.lost(found)
    assert losses(tmp_path) == losses(straight_run)
    assert checksums(tmp_path) == checksums(straight_run)  # of the last state

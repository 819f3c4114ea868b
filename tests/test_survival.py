"""What happens to real processes when data, storage, hosts or the machine fail them."""

import re
import signal
import subprocess
import sys
import time

from running import LONG, ROOT, finish, start, start_several, wait_for_steps
from test_data import sentence, write_arrayrecord

from maxds import watchdog


def records(folder):
    write_arrayrecord(folder / "0.array_record", [sentence(i).encode() * 8 for i in range(40)])
    return f"data.sources=[{{kind: arrayrecord, path: {folder}}}]"


def test_data_that_cannot_be_read_any_more_ends_the_run_with_5_and_one_sentence(tmp_path, process_cache):
    (tmp_path / "data").mkdir()
    process = start(tmp_path / "run", process_cache, *LONG, records(tmp_path / "data"))
    wait_for_steps(process, tmp_path / "run", 2)
    (tmp_path / "data" / "0.array_record").write_bytes(b"")
    code, _, err = finish(process)
    assert code == 5, err
    assert re.search(r"^the data cannot be read any more after step \d+: .*the last checkpoint \(none\)$", err, re.M)
    assert "Traceback" not in err


def test_a_process_that_waits_for_a_stopped_one_exits_with_6_and_says_where_it_stood(tmp_path, process_cache):
    first, second = start_several(2, tmp_path, process_cache, *LONG, "hang_seconds=6", devices=4)
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
    assert "thread MainThread:" in said and "in finish_step" in said


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

"""Ends a process that stands still, and tells what it was doing.

Whoever waits for a host that is gone, a storage that does not answer or a lock that nobody lets go of would wait until
someone looks. A thread looks instead. Should it not come to run, since native code holds Python's lock, or not be able
to write, a timer of the system ends the process some seconds later: that needs neither.
"""

import contextlib
import ctypes
import datetime
import faulthandler
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator

from etils import epath

from maxds import lines

EXIT_CODE = 6
_GRACE = 30.0  # seconds that the thread has to speak before the system's timer ends the process
_STDERR = 2  # the system's, whatever Python makes of it
_SIGEV_THREAD = 2  # of glibc's signal.h: a timer calls a function


class Watchdog:
    """Waits for progress, from the first that it is told of. A context manager.

    Args:
      seconds: without progress that end the process; None: it never does.
      run_dir: its folder `hangs` is written to.
      process: as people know it, such as "process 1 of 4".
    """

    def __init__(self, seconds: float | None, run_dir: str | os.PathLike, process: str):
        self._seconds, self._folder, self._process = seconds, epath.Path(run_dir) / "hangs", process
        self._changed = threading.Condition()
        self._last, self._deadline, self._closed = "", math.inf, False
        self._armed = -math.inf  # when the system's timer was last started
        self._timer = _ExitTimer(EXIT_CODE)

    def __enter__(self) -> "Watchdog":
        if self._seconds:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed = True
        self._wait(None)

    def progress(self, what: str) -> None:
        """Something was finished; `what` is told of a process that gets no further."""
        self._last = what
        self._wait(self._seconds)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block nobody knows how long things may take."""
        self._wait(None)
        yield
        self._wait(self._seconds)

    def _wait(self, seconds: float | None) -> None:
        now = time.monotonic()
        self._deadline = math.inf if seconds is None else now + seconds
        if seconds is not None and now < self._armed + _GRACE / 10:
            return  # what follows takes a thread's start, and the system's timer has time to spare
        with self._changed:
            self._changed.notify()
        if seconds is None:
            self._armed = -math.inf
            self._timer.stop()
            faulthandler.cancel_dump_traceback_later()
        else:
            self._armed = now
            self._timer.start(seconds + _GRACE)
            faulthandler.dump_traceback_later(seconds + _GRACE / 2, file=_STDERR)

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    self._end()
                self._changed.wait(min(left, threading.TIMEOUT_MAX))

    def _end(self) -> None:
        """Says where every thread is, and exits."""
        host, now = socket.gethostname(), datetime.datetime.now(datetime.UTC)
        said = f"{self._process} on {host} made no progress for {self._seconds:g} s; its last was: {self._last}"
        text = f"{now:%Y-%m-%d %H:%M:%S} UTC: {said}\n\n{stacks()}"
        lines.complain(text)
        with contextlib.suppress(Exception):  # a storage that refuses; one that never answers is the timer's
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"{now:%Y%m%dT%H%M%S}-{host}-{self._process.replace(' ', '-')}.txt"
            (self._folder / name).write_text(text)
        os._exit(EXIT_CODE)


def stacks() -> str:
    """Where every other thread of Python is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


class _ExitTimer:
    """Ends the process with a code, without Python's help."""

    def __init__(self, code: int):
        self._libc = ctypes.CDLL(None, use_errno=True)
        end = ctypes.cast(self._libc._exit, ctypes.c_void_p).value
        event = _Event(value=code, notify=_SIGEV_THREAD, function=end)
        self._id = ctypes.c_void_p()
        if self._libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._id)):
            raise OSError(ctypes.get_errno(), "timer_create")

    def start(self, seconds: float) -> None:
        """Counts from now on, whatever was counted before."""
        spec = (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9))
        self._libc.timer_settime(self._id, 0, ctypes.byref(spec), None)

    def stop(self) -> None:
        """Counts no more."""
        self.start(0)


class _Event(ctypes.Structure):
    """`struct sigevent`, 64 bytes on every 64-bit Linux."""

    _fields_ = (
        ("value", ctypes.c_long),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_char * 32),
    )

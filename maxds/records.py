"""The files that a run leaves of its steps.

    RUN/metrics.jsonl   one object a step
    RUN/eval.jsonl      one object an evaluation
    RUN/time.jsonl      one object a start and a step, of `goodput.py`
    RUN/tensorboard     the same as scalars

Every line is complete on disk before the next step begins, while the storage takes it, and a run that was resumed, or
went back, continues the files, so that they hold each step once (time.jsonl: each time it was taken). Object stores
cannot append: for a `run_dir` such as gs://…, the files grow in a local folder and are copied up by `flush`, which
belongs to a checkpoint; a killed run resumes from there anyway. But time.jsonl, which has to tell what was lost, is
copied up every minute, or so seldom that it takes a thousandth of the time.
"""

import contextlib
import io
import json
import math
import os
import pathlib
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from etils import epath
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.summary import scalar

STEPS, EVALS, TIMES = "metrics.jsonl", "eval.jsonl", "time.jsonl"

_NEEDED = {STEPS: {"step"}, EVALS: {"step", "eval"}, TIMES: {"time", "spent"}}  # keys of any object
_COPY_SECONDS, _COPY_SHARE = 60.0, 1e-3  # between copies of TIMES to an object store; and their share of the time


def read(run_dir: str | os.PathLike, name: str) -> Iterator[dict[str, Any]]:
    """The objects of RUN/`name`, in order; none where there is no such file.

    A line that is not whole, since its writer was killed or its disk is damaged, is left out. A number that was not
    finite reads as None.
    """
    path = epath.Path(run_dir) / name
    if path.exists():
        for line in path.read_bytes().split(b"\n"):  # a bucket's file, read line by line, is asked for again and again
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict) and _NEEDED[name] <= row.keys():
                    yield row


class Records:
    """The open files of a run, a context manager. A storage that fails is told of, and does not stop a run.

    Args:
      run_dir: a folder, created where it is missing, or the address of one.
      done: what the files hold of steps beyond this one is dropped, but for TIMES.
      alarm: is told, once, that the files cannot be written.
      in_bucket: whether the folder is in an object store.

    Raises:
      OSError: the files cannot be opened.
    """

    def __init__(self, run_dir: str | os.PathLike, done: int, alarm: Callable[[str], None], *, in_bucket: bool = False):
        self._run, self._remote, self._alarm = epath.Path(run_dir), in_bucket, alarm
        self._closing = contextlib.ExitStack()
        scratch = self._closing.enter_context(tempfile.TemporaryDirectory()) if self._remote else None
        self._local = pathlib.Path(scratch or run_dir)
        self._local.mkdir(parents=True, exist_ok=True)
        self._open = {name: self._closing.enter_context(self._resume(name, done)) for name in (STEPS, EVALS, TIMES)}
        self._owed = dict.fromkeys(self._open, b"")  # lines that could not be written yet
        self._failing = False
        self._copy_at = -math.inf  # when TIMES is next copied up
        (self._local / "tensorboard").mkdir(exist_ok=True)
        self._next = done + 1
        self._board: EventsWriter | None = self._open_board()

    def _resume(self, name: str, done: int) -> io.FileIO:
        """Opens a file to append to, after what it is to hold of earlier starts."""
        path = self._local / name
        draft = path.with_suffix(".tmp")  # whoever is killed here leaves the old file
        with draft.open("w") as file:
            file.writelines(_line(row) for row in read(self._run, name) if name == TIMES or _is_until(row, done))
        draft.replace(path)
        return path.open("ab", buffering=0)  # what was not written is known to the byte

    def _open_board(self) -> EventsWriter:
        """Opens a new file of TensorBoard's; what others hold of the next step and later ones is dropped."""
        board = EventsWriter(str(self._local / "tensorboard" / "events"), f".{uuid.uuid4().hex}")
        start = SessionLog(status=SessionLog.START)
        board.write_event(Event(wall_time=time.time(), step=self._next, session_log=start))
        board.flush()
        return board

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Adds a line to RUN/`name`; later, if the storage does not take it now."""
        self._owed[name] += _line(row).encode()
        with self._telling():
            self._pay(name)
            if self._remote and name == TIMES and time.monotonic() >= self._copy_at:
                begin = time.monotonic()
                self._copy(self._local / TIMES)
                self._copy_at = begin + max(_COPY_SECONDS, (time.monotonic() - begin) / _COPY_SHARE)

    def _copy(self, path: pathlib.Path) -> None:
        target = self._run / path.relative_to(self._local).as_posix()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())

    def _pay(self, name: str) -> None:
        while self._owed[name]:
            written = self._open[name].write(self._owed[name])
            self._owed[name] = self._owed[name][written:]

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Hands TensorBoard those of the values (tag -> value) that are finite."""
        self._next = step + 1
        if self._board is None:
            return
        finite = [scalar(tag, value).value[0] for tag, value in values.items() if is_finite(value)]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=finite))
        with self._telling():
            board, self._board = self._board, None
            board.write_event(event)
            board.flush()
            self._board = board  # else its file may end within an event, and nobody reads on after that

    def flush(self) -> None:
        """Writes what is owed, and copies the files up to an object store."""
        with self._telling():
            for name in self._open:
                self._pay(name)
            if self._board is None:
                self._board = self._open_board()
            for path in self._local.rglob("*") if self._remote else ():
                if path.is_file():
                    self._copy(path)
            self._failing = False

    def rewind(self, done: int) -> None:
        """Drops what the files hold of steps beyond this one, but for TIMES."""
        with self._telling():
            for name in (STEPS, EVALS):
                written = (self._local / name).read_bytes()
                lines = (written + self._owed[name]).splitlines(keepends=True)
                kept = b"".join(line for line in lines if _is_until(json.loads(line), done))
                self._open[name].truncate(min(len(kept), len(written)))
                self._owed[name] = kept[len(written) :]
            self._next = done + 1
            if self._board is not None:
                self._board.close()
                self._board = self._open_board()
        self.flush()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Tells of the first failure inside such a block since the last `flush` that had none."""
        try:
            yield
        except Exception as error:  # a bucket's library raises what it likes
            if not self._failing:
                self._alarm(f"metrics cannot be written to {self._run} and are kept in memory until they can: {error}")
            self._failing = True

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *error: object) -> None:
        with self._closing:  # the local folder goes last
            self.flush()
            if self._board is not None:
                self._board.close()


def _is_until(row: dict[str, Any], done: int) -> bool:
    return isinstance(row["step"], int) and row["step"] <= done


def is_finite(value: float | None) -> TypeGuard[float]:
    """Whether there is a value, and TensorBoard can draw it."""
    return value is not None and math.isfinite(value)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(_finite(row), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    match value:
        case dict():
            return {name: _finite(item) for name, item in value.items()}
        case list():
            return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

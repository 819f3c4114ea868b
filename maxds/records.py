"""The files that a run leaves of its steps.

    RUN/metrics.jsonl   one object a step
    RUN/eval.jsonl      one object an evaluation
    RUN/tensorboard     the same as scalars

Every line is complete on disk before the next step begins, and a resumed run continues the files, so that they hold
each step once. Object stores cannot append: for a `run_dir` such as gs://…, the files grow in a local folder and are
copied up by `flush`, which belongs to a checkpoint; a killed run resumes from there anyway.
"""

import contextlib
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from etils import epath
from tensorboardX import SummaryWriter

STEPS, EVALS = "metrics.jsonl", "eval.jsonl"


def read(run_dir: str | os.PathLike, name: str) -> Iterator[dict[str, Any]]:
    """The objects of RUN/`name`, in order; none where there is no such file.

    A line that is not whole, since its writer was killed, is left out. A number that was not finite reads as None.
    """
    path = epath.Path(run_dir) / name
    if path.exists():
        with path.open() as lines:
            for line in lines:
                with contextlib.suppress(json.JSONDecodeError):
                    yield json.loads(line)


class Records:
    """The open files of a run, a context manager.

    Args:
      run_dir: a folder, created where it is missing, or the address of one.
      done: what the files hold of steps beyond this one is dropped.
    """

    def __init__(self, run_dir: str, done: int):
        self._run, self._remote = epath.Path(run_dir), "://" in run_dir
        self._closing = contextlib.ExitStack()
        scratch = self._closing.enter_context(tempfile.TemporaryDirectory()) if self._remote else None
        self._local = pathlib.Path(scratch or run_dir)
        self._local.mkdir(parents=True, exist_ok=True)
        self._open = {name: self._closing.enter_context(self._resume(name, done)) for name in (STEPS, EVALS)}
        self._board = SummaryWriter(str(self._local / "tensorboard"), purge_step=done + 1)

    def _resume(self, name: str, done: int) -> TextIO:
        """Opens a file to append to, after what it holds of the steps up to `done`."""
        path = self._local / name
        draft = path.with_suffix(".tmp")  # whoever is killed here leaves the old file
        with draft.open("w") as file:
            file.writelines(_line(row) for row in read(self._run, name) if row["step"] <= done)
        draft.replace(path)
        return path.open("a")

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Adds a line to RUN/`name`."""
        self._open[name].write(_line(row))
        self._open[name].flush()

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Hands TensorBoard those of the values (tag -> value) that are finite."""
        for tag, value in values.items():
            if value is not None and math.isfinite(value):
                self._board.add_scalar(tag, value, step)

    def flush(self) -> None:
        """Writes what TensorBoard buffers, and copies the files up to an object store."""
        self._board.flush()
        for path in self._local.rglob("*") if self._remote else ():
            if path.is_file():
                target = self._run / path.relative_to(self._local).as_posix()
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *error: object) -> None:
        with self._closing:  # the local folder goes last
            self._board.close()
            self.flush()


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

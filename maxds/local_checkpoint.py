"""Local checkpoints: what each process holds of the state, in memory or on a disk of its own host.

    checkpoint.local_dir/RUN/process-I/STEP/    RUN: a hash of run_dir
        about.json    what a checkpoint in the run's folder says of itself, and which shards these are
        N.npy         the bits of a shard

They are written in a fraction of the time that a bucket takes, so more often, and a restart loses less. A process that
comes back without its own gets each shard from one that holds the same: along `data`, one slice from another. All of a
checkpoint is used, or nothing: where nobody has a shard, or a checksum differs, the run goes on from an older one, or
from its folder. That one cannot be saved never ends a run.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxds import checksum, metrics, shards
from maxds import mesh as mesh_lib
from maxds.checkpoint import DamageError, Saved, about_state, reason
from maxds.config import Config
from maxds.step import TrainState

_WRITERS = 16  # threads: one alone does not fill the memory's bandwidth
_HELD = 3  # checkpoints that a process tells of: the last that all have, those begun since
_ABOUT = "about.json"
_PARTIAL = ".partial"  # follows the step in the name of a folder that is not complete


@dataclasses.dataclass
class LocalCheckpoints:
    """The local checkpoints of one process of a run. Open them with `open_local`.

    All processes call `save` and `restore` together: they agree on what to do.
    """

    folder: pathlib.Path
    every_steps: int
    log: metrics.Log
    pool: ThreadPoolExecutor
    _job: Future | None = None  # that writes
    _step: int | None = None  # that it writes, until all have it
    _began: float = 0.0

    # ------------------------------------------------------------------------------------- save

    def due(self, step: int) -> bool:
        """Whether config wants one of this step."""
        return step % self.every_steps == 0

    def save(self, state: TrainState, step: int, config: Config, fingerprint: str, left_out: int) -> None:
        """As `Checkpoints.save`, with the same arguments."""
        newest = self._agree(step)
        if newest is None:
            return
        for found in self.steps()[:-1]:
            if found != newest:  # which stays until all have a later one
                shutil.rmtree(self.folder / str(found), ignore_errors=True)
        self._step, self._began = step, time.monotonic()
        told = {"about": about_state(config, fingerprint, state, left_out), "shards": _layout(state)}
        self._job = self.pool.submit(self._write, step, told, shards.copied(state))

    def _agree(self, step: int) -> int | None:
        """The newest that all processes have, or 0; None where one of them still writes."""
        job, self._job = self._job, None
        if job is not None and not job.done():
            self._job = job
        elif job is not None and (error := job.exception()):
            self.log.alarm(
                f"local checkpoint {self._step} could not be saved: {reason(error)}. The run goes on; see to the room "
                f"and permissions of {self.folder}"
            )
        every = mesh_lib.of_all_processes([self._job is not None, max(self.steps(), default=0)])
        if every[:, 0].any():
            self.log.alarm(
                f"local checkpoint {step} is left out: {self._step} is still being written after "
                f"{time.monotonic() - self._began:.0f} s"
            )
            return None
        newest = int(every[:, 1].min())
        if newest == self._step:
            self.log.note(f"local checkpoint {newest} saved")
            self._step = None
        return newest

    def _write(self, step: int, told: dict[str, Any], parts: Sequence[np.ndarray]) -> None:
        partial = self.folder / f"{step}{_PARTIAL}"
        try:
            partial.mkdir(parents=True)
            with ThreadPoolExecutor(_WRITERS) as writers:
                list(writers.map(lambda n: np.save(partial / f"{n}.npy", parts[n]), range(len(parts))))
            (partial / _ABOUT).write_text(json.dumps(told))
            partial.rename(self.folder / str(step))
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def drop_after(self, step: int) -> None:
        """Deletes those of later steps, and what is half-written, once nothing is being written."""
        if self._job is not None:
            self._job.exception()
        later = [self.folder / str(found) for found in self.steps() if found > step]
        for found in (*self.folder.glob(f"*{_PARTIAL}"), *later):
            shutil.rmtree(found, ignore_errors=True)

    # ---------------------------------------------------------------------------------- restore

    def restore(
        self, abstract: TrainState, check: Callable[[Saved], None], after: int, until: int
    ) -> TrainState | None:
        """The newest that is whole, of a step after `after` and at most `until`; None if there is none.

        Args:
          abstract: shapes, dtypes and shardings of the state.
          check: raises where a checkpoint is readable and yet must not be used.
        """
        own = self._told(abstract)
        mine = [(step, about["checksum"]) for step, about in own.items()][-_HELD:]
        every = mesh_lib.of_all_processes([*mine, *[(0, 0)] * (_HELD - len(mine))])
        found = {(int(step), int(which)) for step, which in every.reshape(-1, 2) if after < step <= until}
        for step, which in sorted(found, reverse=True):
            has = (every == (step, which)).all(axis=2).any(axis=1)
            try:
                if not shards.is_whole(abstract, has):
                    raise DamageError("of some shards there is none")
                saved = Saved.of(step, _of_first(own.get(step), has))
                check(saved)
                return self._load(saved, abstract, has)
            except DamageError as error:
                self.log.note(f"warning: local checkpoint {step} is skipped: {error}")
        return None

    def _told(self, abstract: TrainState) -> dict[int, dict[str, Any]]:
        """What those say of themselves that hold this process's shards of such a state; oldest first."""
        found, expected = {}, _layout(abstract)
        for step in self.steps():
            file = self.folder / str(step) / _ABOUT
            try:
                told = json.loads(file.read_text())
                about, of_shards = told["about"], told["shards"]
                Saved.of(step, about)
            except Exception as error:  # whatever a damaged file makes of reading it
                self.log.alarm(f"{file} is damaged: {reason(error)}")
                continue
            if of_shards == expected:
                found[step] = about
            else:
                self.log.note(f"local checkpoint {step} is of another mesh or model, and is left out")
        return found

    def _load(self, saved: Saved, abstract: TrainState, has: np.ndarray) -> TrainState:
        state: Any = None
        folder = self.folder / str(saved.step)
        if has[jax.process_index()]:
            try:
                state = shards.assembled(abstract, lambda n, _: np.load(folder / f"{n}.npy"))
            except Exception as error:  # whatever a damaged file makes of reading it
                self.log.alarm(f"{folder} is damaged: {reason(error)}")
        has = mesh_lib.of_all_processes([state is not None])[:, 0] > 0
        if not shards.is_whole(abstract, has):
            raise DamageError("some shards cannot be read")
        if not has.all():
            state = shards.shared(state or shards.zeros(abstract), has)
        saved.check(state)
        return state

    def steps(self) -> list[int]:
        """Steps of the complete ones, oldest first."""
        return sorted(int(found.name) for found in self.folder.glob("*") if found.name.isdecimal())


@contextlib.contextmanager
def open_local(config: Config, log: metrics.Log) -> Iterator[LocalCheckpoints | None]:
    """Those of this process; None if config wants none. On leaving, waits for what is being written."""
    root, every = config.checkpoint.local_dir, config.checkpoint.local_every_steps
    if root is None or every is None:
        yield None
        return
    run = hashlib.sha256(config.run_dir.encode()).hexdigest()[:12]
    folder = pathlib.Path(root).expanduser() / run / f"process-{jax.process_index()}"
    with ThreadPoolExecutor(1) as pool:
        yield LocalCheckpoints(folder, every, log, pool)


def _layout(tree: TrainState) -> int:
    """A checksum of which shards this process has."""
    return checksum.of_json(shards.layout(tree))


def _of_first(about: dict[str, Any] | None, has: np.ndarray) -> dict[str, Any]:
    """What the first process that has a checkpoint knows of it, in all processes."""
    text = json.dumps(about).encode()
    size = mesh_lib.of_all_processes(len(text)).max()
    padded = np.frombuffer(text.ljust(int(size)), np.uint8)
    is_first = jax.process_index() == has.argmax()
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(padded, is_source=is_first)))

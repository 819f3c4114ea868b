"""When things happen: steps, evaluation, checkpoints, profiling, and the ways a run can end."""

import collections
import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxds import checkpoint, goodput, integrity, local_checkpoint, metrics, rollback, saves, watchdog
from maxds.config import Config
from maxds.data import Batch, Data
from maxds.step import Stepper, TrainState

NON_FINITE_LIMIT = 5  # steps in a row whose loss is not finite before the run goes back, or gives up

REPEAT_TOLERANCE = 1e-3  # of a loss: sums in another order, on another mesh, differ by less


class TermError(ValueError):
    """A loss term is enabled and does nothing."""


class NonFiniteError(RuntimeError):
    """Loss or gradient have stopped being numbers."""


class FeedError(RuntimeError):
    """The data has ended, or cannot be read any more, though it could when the run began."""


@dataclasses.dataclass
class Loop:
    """A run under way: the state, and what it is stepped, saved and reported with."""

    config: Config
    stepper: Stepper
    data: Data
    saves: saves.Saves
    local: local_checkpoint.LocalCheckpoints | None
    log: metrics.Log
    watch: watchdog.Watchdog
    state: TrainState
    step: int  # how many are taken, each with one batch
    program: Any  # the compiled train step
    hosts: goodput.Hosts
    logged: dict[str, Any] | None  # what the next step gave before the run was interrupted, if it was taken then
    verified: int  # the last step that was right when it was computed twice; or the one that the run began with
    left_out: int  # batches of the data that the run went back past
    rollbacks: rollback.Rollbacks | None  # None: it does not go back
    non_finite: int = 0
    _rehearsed: dict | None = None  # metrics of the next step, if it has been computed once already
    _due: tuple[int, dict] | None = None  # a step whose metrics are still on the device
    _clock: float = 0.0  # when the step before it was finished
    _stopwatch: goodput.Stopwatch = dataclasses.field(default_factory=goodput.Stopwatch)

    def run(self, stop: "Stop") -> bool:
        """Trains to config.steps, or until `stop` is asked for; then False. The last state is saved either way.

        Raises:
          NonFiniteError: loss or gradient was not finite for NON_FINITE_LIMIT steps in a row, and it cannot go back.
          TermError: at step 0, a term that is enabled is zero or has no gradient.
          FeedError: the data of a step, or of an evaluation, cannot be read.
          checkpoint.StorageError: too many saves in a row have failed, or the last one.
          integrity.CorruptionError: a device is wrong.
          checkpoint.CheckpointError: the first step has another loss than before the run was interrupted.
        """
        batches = self._batches()
        first = self._next(batches)
        if self.step == 0:
            with self._stopwatch.idle("init"):
                self.check_terms(first)
        self._clock = time.perf_counter()
        self.one_step(first)
        self.finish_step()
        self.log.note(f"first step done {goodput.process_age():.1f} s after the process started")
        while not self._through(batches, stop):
            batches = self._batches()
        if self.non_finite == 0:
            self.watch.progress(f"step {self.step}, the last")
            with self._stopwatch.idle("checkpoint"):
                self.saves.save_last(self.state, self.step)
        now = time.perf_counter()
        self.log.spent(self._stopwatch.take_idle(now), now)
        return self.step == self.config.steps

    def _through(self, batches: Iterator[dict[str, jax.Array]], stop: "Stop") -> bool:
        """Takes all steps that are left, or those before `stop`. False: the run has gone back, to go on with others."""
        try:
            while self.step < self.config.steps and not stop.requested(self.position):
                self.one_step(self._next(batches))
            self.finish_step()
        except NonFiniteError as error:
            self.go_back(error)
            return False
        return True

    @property
    def position(self) -> int:
        """The batch of the next step, counted from 0."""
        return self.step + self.left_out

    def _batches(self) -> Iterator[dict[str, jax.Array]]:
        mine = self.data.batches(self.position, *self.stepper.share)
        return (self.stepper.batch(rows) for rows in self._reading(mine))

    def _next(self, batches: Iterator[dict[str, jax.Array]]) -> dict[str, jax.Array]:
        with self._stopwatch.idle("data"):
            return next(batches)

    def _reading(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        try:
            yield from batches
        except Exception as error:  # whatever a file that is gone makes of reading it
            raise FeedError(
                f"the data cannot be read any more after step {self.step}: {checkpoint.reason(error)}. Bring it back; "
                f"the same command goes on from the last checkpoint ({self.saves.last or 'none'})"
            ) from error

    def one_step(self, batch: dict[str, jax.Array]) -> None:
        """Dispatches a step, and only then reads the metrics of the one before: the device never waits for the host."""
        profile = self.config.profile
        if profile and self.step == profile.start:
            self.finish_step()
            jax.profiler.start_trace(str(self.config.folder / "profile"))
        if self.config.verify_every_steps and (self.step + 1) % self.config.verify_every_steps == 0:
            self.finish_step()
            with self._stopwatch.idle("other"):
                self.rehearse(batch)
        self._stopwatch.begin_step()
        self.state, computed = self.program(self.state, batch, self.stepper.training)
        self._stopwatch.run_step(computed)
        self.finish_step()
        self.step += 1
        self._due = self.step, computed
        if profile and self.step == profile.start + profile.steps:
            self.finish_step()
            jax.profiler.stop_trace()
            self.log.note(f"profile of steps {profile.start + 1}-{self.step} written to {self.config.run_dir}/profile")
        if self._wants_eval():
            self.finish_step()
            with self._stopwatch.idle("evaluation"):
                self.evaluate()
        with self._stopwatch.idle("checkpoint"):
            self.look_after_saves()

    def rehearse(self, batch: dict[str, jax.Array]) -> None:
        """Computes the next step, without taking it, to compare it with itself; and compares copies of the state.

        Raises:
          CorruptionError: they differ.
        """
        integrity.check_copies(self.state, self.stepper.mesh.devices, self.step, self.verified)
        self.state, computed = self.program(self.state, batch, self.stepper.rehearsal)
        self._rehearsed = jax.device_get(computed)
        self.watch.progress(f"step {self.step + 1}, for the first time")

    def check_rehearsed(self, step: int, found: dict) -> None:
        """Compares a step with its rehearsal, if it had one.

        Raises:
          CorruptionError: they differ.
        """
        rehearsed, self._rehearsed = self._rehearsed, None
        if rehearsed is not None:
            first, second = (of_step | {"applied": None} for of_step in (rehearsed, found))
            integrity.check_same(step, first, second, self.verified)
            self.verified = step

    def look_after_saves(self) -> None:
        """Learns what became of the last one, and begins another where one is due."""
        self.saves.look(self.step)
        if self.saves.due(self.step):
            self.finish_step()
            if self.non_finite == 0:
                self.saves.save(self.state, self.step)
                self.watch.progress(f"the copy of step {self.step} to save")
        elif self.local is not None and self.local.due(self.step) and self.step < self.config.steps:
            self.finish_step()
            if self.non_finite == 0:
                self.local.save(self.state, self.step, self.config, self.data.fingerprint, self.left_out)
                self.watch.progress(f"the copy of step {self.step} to save locally")

    def finish_step(self) -> None:
        """Waits for the metrics of the last dispatched step, and reports them."""
        if self._due is None:
            return
        step, computed = self._due
        self._due = None
        found = jax.device_get(computed)
        self.watch.progress(f"step {step}")
        now = time.perf_counter()
        self.check_repeated(step, found)
        self.check_rehearsed(step, found)
        spent, end = self._stopwatch.finished()
        with self._stopwatch.idle("other"):
            compared = self.hosts.compare(self._stopwatch.late, spent)
        sequences = self.config.data.sequences(step - 1 + self.left_out)
        kept = {"failed_saves": self.saves.failures, "left_out": self.left_out, "sequences": sequences}
        told = kept | self.log.spent(spent, end, step=step) | compared
        self.log.step(step, found | told, now - self._clock)
        self._clock = now
        self._judge(step, found)

    def check_repeated(self, step: int, found: dict) -> None:
        """Compares the first step of a resumed run with the same step before the interruption.

        Raises:
          CheckpointError: its loss is another: state, data or program are not what they were.
        """
        logged, self.logged = self.logged, None
        if not logged or logged["loss"] is None:
            return
        before, now = np.float32(logged["loss"]), np.float32(found["loss"])
        if not abs(now - before) <= REPEAT_TOLERANCE * abs(before):
            raise checkpoint.CheckpointError(
                f"step {step} had the loss {before} before the run was interrupted, and has {now} now, from the same "
                f"checkpoint: find out what changed (weights, data, versions). The next start goes on nevertheless"
            )
        to_the_bit = "to the bit" if now == before else f"but for {abs(now / before - 1):.1e}"
        self.log.note(f"step {step} repeated: its loss is what it was, {to_the_bit}")

    def _judge(self, step: int, found: dict) -> None:
        """Counts the steps in a row that were not applied because a number in them is not one."""
        if math.isfinite(found["loss"]) and math.isfinite(found["grad_norm"]):
            self.non_finite = 0
            return
        self.non_finite += 1
        if self.non_finite == NON_FINITE_LIMIT:
            raise NonFiniteError(
                f"loss or gradient was not finite for {NON_FINITE_LIMIT} steps in a row, {step - NON_FINITE_LIMIT + 1} "
                f"to {step}; none of them was applied or saved (last checkpoint: {self.saves.last or 'none'}). Lower "
                f"optimizer.lr={self.config.optimizer.lr:g}, or look at the data of these steps; run again to resume"
            )

    def go_back(self, error: NonFiniteError) -> None:
        """Restores an older checkpoint, and leaves out the data from there on until the last of the steps that failed.

        Raises:
          NonFiniteError: it cannot.
        """
        if self.rollbacks is None:
            raise error
        last, position, profile = self.step, self.position, self.config.profile
        if profile and profile.start < last <= profile.start + profile.steps:
            jax.profiler.stop_trace()  # another begins when its first step is taken again
        lost = self._stopwatch.discard()
        with self._stopwatch.idle("restore"):
            del self.state  # before there is another
            try:
                state = self.rollbacks.restore(self.stepper.abstract_state, last - NON_FINITE_LIMIT + 1, last)
            except rollback.RollbackError as why:
                raise NonFiniteError(f"{why}: {error}") from None
            self.state = state if state.opt_state is not None else self.stepper.with_fresh_optimizer(state)
        self.step = int(state.step)
        self.left_out = position - self.step
        if self.local is not None:
            self.local.drop_after(self.step)
        self.non_finite, self.verified = 0, min(self.verified, self.step)
        self.log.go_back(self.step, self.left_out, *lost)
        self.log.note(
            f"steps {last - NON_FINITE_LIMIT + 1} to {last} were not finite: back to checkpoint {self.step}, and on "
            f"with the data after theirs; {last - self.step} batches are left out"
        )
        self.watch.progress(f"going back to checkpoint {self.step}")
        self._clock = time.perf_counter()

    # -------------------------------------------------------------------------------- evaluation

    def _wants_eval(self) -> bool:
        every = self.config.eval.every_steps
        return every is not None and (self.step % every == 0 or self.step == self.config.steps)

    def evaluate(self) -> None:
        """Means of every term over the held-out batches."""
        sums, counts = collections.Counter(), collections.Counter()
        weights = self.stepper.on_devices(self.state.params)
        held_out = self.data.eval_batches(self.config.eval.batches, *self.stepper.share)
        for rows in self._reading(held_out):
            found = self.stepper.evaluate(weights, self.state.router_bias, self.stepper.batch(rows))
            found = jax.tree.map(lambda a: a.item(), jax.device_get(found))  # Python's numbers, which do not overflow
            sums.update(found["sums"])
            counts.update(found["counts"])
            self.watch.progress(f"a batch of the evaluation after step {self.step}")
        enabled = [name for name, coefficient in self.stepper.network.coefficients().items() if coefficient]
        self.log.eval(self.step, {n: sums[n] / max(counts[n], 1) for n in enabled})
        self._clock = time.perf_counter()

    # ------------------------------------------------------------------------------ step 0

    def check_terms(self, batch: dict[str, jax.Array]) -> None:
        """Runs the train step once for each enabled term alone, without an update.

        Raises:
          TermError: a term is zero or moves no weight. Frozen weights may be all that one moves: then, if none does.
        """
        found = {}
        for term, coefficient in self.stepper.network.coefficients().items():
            if coefficient:
                self.state, computed = self.program(self.state, batch, self.stepper.probe(term))
                found[term] = coefficient, *jax.device_get((computed["terms"][term], computed["grad_norm"]))
                self.watch.progress(f"the check of the loss term {term}")
        frozen = not all(jax.tree.leaves(self.stepper.is_trained))
        others_move = frozen and any(norm > 0 for *_, norm in found.values())
        for term, (coefficient, value, norm) in found.items():
            if value == 0 or (norm == 0 and not others_move):
                wrong = "is zero" if value == 0 else "has no gradient"
                raise TermError(
                    f"the loss term {term} is enabled with weight {coefficient:g} but {wrong} at step 0 "
                    f"(value {value:g}, gradient norm {norm:g}); disable it, or give it data that it applies to"
                )


class Stop:
    """Remembers that SIGTERM or SIGINT arrived; a second one kills as usual."""

    def __init__(self):
        self._signal: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator["Stop"]:
        """Handles the signals inside the block."""
        # Among several processes the signal is JAX's to hear: it makes all of them stop before the same step.
        handled = (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else ()
        previous = {s: signal.signal(s, self._remember) for s in handled}
        try:
            yield self
        finally:
            for s, handler in previous.items():
                signal.signal(s, handler)

    def _remember(self, number, _frame) -> None:
        self._signal = number
        signal.signal(number, signal.SIG_DFL)

    def requested(self, position: int) -> bool:
        """Whether to stop before this batch, which never goes back; the same answer in every process."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(position)
        return self._signal is not None

    @property
    def name(self) -> str:
        """The signal's name."""
        return signal.Signals(self._signal).name if self._signal else "a preemption notice"

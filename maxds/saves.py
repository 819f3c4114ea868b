"""Saving while training: in the background, told of once complete, tried again when the storage fails.

Processes learn together what became of a save: at the steps 1, 2, 4, 8, … after it began, so that what they do next,
and at which step, is the same for all of them.
"""

import dataclasses
import enum
import math
import time
from collections.abc import Callable

from maxds import mesh as mesh_lib
from maxds import metrics
from maxds.checkpoint import Checkpoints, StorageError, reason
from maxds.step import TrainState

FAILURE_LIMIT = 8  # saves in a row that fail before the run gives up
_LAST_TRIES, _LAST_PAUSE = 3, 2.0  # of the last save, which cannot be made up for later; seconds
_RETRY, _LONGEST_RETRY = 30.0, 900.0  # seconds after a failure, doubled with each
_PATIENCE = 60.0  # seconds that a save which is due waits for the one before


class Outcome(enum.IntEnum):
    """What a process knows of a save. The greatest of all processes is what holds."""

    SAVED = 0
    FAILED = 1
    UNDER_WAY = 2


@dataclasses.dataclass
class Saves:
    """The saves of a run, one at a time.

    Args:
      start: starts to save a state of a step in the background.
    """

    saved: Checkpoints
    log: metrics.Log
    start: Callable[[TrainState, int], None]
    last: int | None  # step of the last complete checkpoint
    failures: int = 0  # in a row
    _under_way: int | None = None  # the step that is being saved
    _since: int = 0  # the step at which it began, or failed
    _began: float = 0.0
    _retry: float = math.inf  # when a failed save is to be tried again
    _error: BaseException | None = None  # of this process

    def due(self, step: int) -> bool:
        """Whether to save after this step: by the policy of config, or since it is time to try again."""
        if not self.saved.due(step) and not self._is_time_to_retry(step):
            return False
        if self._under_way is not None:
            self._settle(step, _PATIENCE)
        if self._under_way is not None:
            waited = f"{self._under_way} is still being written after {time.monotonic() - self._began:.0f} s"
            self.log.alarm(f"checkpoint {step} is left out: {waited}")
        return self._under_way is None

    def save(self, state: TrainState, step: int) -> None:
        """Starts to save; the state may be donated once this returns."""
        self._under_way, self._since, self._began = step, step, time.monotonic()
        self._retry, self._error = math.inf, None
        try:
            self.start(state, step)
        except Exception as error:  # whatever a storage raises
            self._error = error

    def look(self, step: int) -> None:
        """Learns, after a step, what became of the save that is under way.

        Raises:
          StorageError: it is the last failure that a run bears.
        """
        if self._under_way is not None and _is_power_of_two(step - self._since):
            self._settle(step)

    def save_last(self, state: TrainState, step: int) -> None:
        """Saves the state with which a run ends, and waits until it is saved.

        Raises:
          StorageError: it cannot be saved.
        """
        for left in reversed(range(_LAST_TRIES)):
            self._settle(step, math.inf)
            if self.last == step:
                return
            self.save(state, step)
            self._settle(step, math.inf)
            if self.failures and left:
                time.sleep(_LAST_PAUSE)
        if self.last != step:
            self._give_up(f"the last state, of step {step}, could not be saved")

    def wait(self, step: int) -> None:
        """Waits for the save that is under way, if any.

        Raises:
          StorageError: it is the last failure that a run bears.
        """
        self._settle(step, math.inf)

    def go_back(self, step: int) -> None:
        """Makes the checkpoint of this step the last one. No save may be under way.

        Raises:
          StorageError: the later ones cannot be deleted.
        """
        self.saved.drop_after(step)
        self.last = self._since = step

    # ----------------------------------------------------------------------------- outcomes

    def _settle(self, step: int, patience: float = 0.0) -> None:
        """Deals with a save that has ended by now, or does before the seconds of patience have passed."""
        if self._under_way is None:
            return
        until = time.monotonic() + patience
        while (outcome := self._local()) == Outcome.UNDER_WAY and time.monotonic() < until:
            time.sleep(0.01)
        match mesh_lib.of_all_processes(outcome).max():
            case Outcome.SAVED:
                self._succeed(self._under_way)
            case Outcome.FAILED:
                self._fail(self._under_way, step)

    def _local(self) -> Outcome:
        if self._error is None and self.saved.orbax.is_saving_in_progress():
            return Outcome.UNDER_WAY
        try:
            self.saved.orbax.wait()
        except Exception as error:
            self._error = self._error or error
        return Outcome.FAILED if self._error else Outcome.SAVED

    def _succeed(self, saved: int) -> None:
        self.last, self._under_way, self.failures = saved, None, 0
        self.log.note(f"checkpoint {saved} saved in {time.monotonic() - self._began:.1f} s")
        self.log.flush()

    def _fail(self, failed: int, step: int) -> None:
        why = reason(self._error) if self._error else "another process could not write its part"
        self.saved.drop_half_written()
        self._under_way, self._since, self.failures = None, step, self.failures + 1
        wait = min(_RETRY * 2 ** (self.failures - 1), _LONGEST_RETRY)
        self._retry = time.monotonic() + wait
        self.log.alarm(
            f"checkpoint {failed} could not be saved: {why}. That makes {self.failures} in a row, and {FAILURE_LIMIT} "
            f"end the run. The last complete one is {self.last or 'none'}; next try in {wait:.0f} s, or when one is due"
        )
        if self.failures >= FAILURE_LIMIT:
            self._give_up(f"{self.failures} saves in a row have failed")

    def _give_up(self, what: str) -> None:
        raise StorageError(
            f"{what}; the last complete checkpoint is {self.last or 'none'}. See to the room, quota and permissions of "
            f"{self.saved.folder}, and run the same command to go on from there"
        )

    def _is_time_to_retry(self, step: int) -> bool:
        if not self.failures or self._under_way is not None or not _is_power_of_two(step - self._since):
            return False
        return bool(mesh_lib.of_all_processes(time.monotonic() >= self._retry)[0])  # by the first one's clock


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0

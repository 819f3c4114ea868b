"""Checkpoints: the whole state and what it belongs to, saved as one, and found again.

A checkpoint is RUN/checkpoints/STEP: weights, optimizer state, router bias and step, and beside
them, in the same atomic folder, the config, the fingerprint of the data and the versions. The data
has no state of its own: its position is the step.
"""

import contextlib
import dataclasses
import importlib.metadata
import math
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from etils import epath
from orbax.checkpoint.experimental import v1 as ocp

import maxds
from maxds import loader, params
from maxds.config import Config
from maxds.params import Tree
from maxds.step import TrainState

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class CheckpointError(ValueError):
    """A checkpoint cannot be used, or there is none."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint, before its arrays are read."""

    step: int
    config: dict[str, Any]  # as `loader.plain` gives it
    fingerprint: str  # of the data
    shapes: dict[str, list[int]]  # of every array of the state


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run. Open it with `open_run`."""

    folder: epath.Path
    orbax: ocp.training.Checkpointer
    warn: Callable[[str], None]

    # ------------------------------------------------------------------------------------- save

    def due(self, step: int) -> bool:
        """Whether the policy of config wants a checkpoint of this step."""
        return self.orbax.should_save(step)

    def save(self, state: TrainState, step: int, config: Config, fingerprint: str) -> None:
        """Starts saving in the background; the state may be donated once this returns."""
        about = {
            "config": loader.plain(config),
            "fingerprint": fingerprint,
            "shapes": shapes(state),
            "versions": {name: importlib.metadata.version(name) for name in _PACKAGES}
            | {"maxds": maxds.__version__, "python": platform.python_version()},
        }
        # A damaged checkpoint of this step may lie there, which the run resumed from before.
        self.orbax.save_checkpointables_async(step, {"state": state}, force=True, overwrite=True, custom_metadata=about)

    # ---------------------------------------------------------------------------------- restore

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return [checkpoint.step for checkpoint in self.orbax.checkpoints]

    def about(self, step: int) -> Saved:
        """What a checkpoint belongs to."""
        found: Any = self.orbax.checkpointables_metadata(step).custom_metadata
        return Saved(step, found["config"], found["fingerprint"], found["shapes"])

    def restore(self, abstract: Tree, check: Callable[[Saved], None], step: int | None = None) -> Tree | None:
        """The latest checkpoint that can be read, or that of `step`; None if the run has none.

        Args:
          abstract: shapes, dtypes and shardings of the state, or of a part of it.
          check: raises where a checkpoint is readable and yet must not be used.
          step: of the checkpoint; None: the latest.

        Raises:
          CheckpointError: there are checkpoints, but none can be read; or none of that step.
        """
        steps = self.steps()
        if step is not None and step not in steps:
            raise CheckpointError(
                f"there is no checkpoint of step {step} in {self.folder}; it has {', '.join(map(str, steps)) or 'none'}"
            )
        for chosen in [step] if step is not None else reversed(steps):
            try:
                saved = self.about(chosen)
            except Exception as error:  # whatever a damaged folder makes of reading it
                self._skip(chosen, error)
                continue
            check(saved)
            try:
                return self.orbax.load_checkpointables(chosen, {"state": abstract})["state"]
            except Exception as error:
                self._skip(chosen, error)
        if steps:
            raise CheckpointError(f"none of the checkpoints {', '.join(map(str, steps))} in {self.folder} can be read")
        return None

    def _skip(self, step: int, error: Exception) -> None:
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        self.warn(f"warning: checkpoint {step} is damaged and is skipped ({reason})")


def shapes(state: Tree) -> dict[str, list[int]]:
    """Path -> shape of every array of a state, abstract or not."""
    return {params.name(path): list(a.shape) for path, a in jax.tree_util.tree_leaves_with_path(state)}


@contextlib.contextmanager
def open_run(config: Config, warn: Callable[[str], None], *, read_only: bool = False) -> Iterator[Checkpoints]:
    """The checkpoints of `config.run_dir`, which need not exist yet; waits, on leaving, for what is being saved.

    Unless `read_only`, what an earlier process left half-written is deleted: only one process may write to a run.
    """
    folder = epath.Path(config.run_dir).expanduser().resolve() / "checkpoints"  # Orbax wants an absolute path
    for left in folder.glob("*.orbax-checkpoint-tmp*") if folder.exists() else ():
        warn(f"warning: {left.name} is a half-written checkpoint and is skipped")
    policy, keep = config.checkpoint, ocp.training.preservation_policies
    preserved = [keep.LatestN(policy.keep_last)]
    if policy.keep_every:
        preserved.append(keep.EveryNSteps(policy.keep_every))
    orbax = ocp.training.Checkpointer(
        folder,
        save_decision_policy=_save_policy(config),
        preservation_policy=keep.AnyPreservationPolicy(preserved),
        cleanup_tmp_directories=not read_only,
    )
    with orbax:
        yield Checkpoints(folder, orbax, warn)


def _save_policy(config: Config) -> Any:
    policies, chosen = ocp.training.save_decision_policies, []
    if config.checkpoint.every_steps:
        chosen.append(policies.FixedIntervalPolicy(config.checkpoint.every_steps))
    if config.checkpoint.every_minutes:
        seconds = math.ceil(config.checkpoint.every_minutes * 60)
        chosen.append(policies.ContinuousCheckpointingPolicy(minimum_interval_secs=seconds))
    return policies.AnySavePolicy(chosen)


# ------------------------------------------------------------------------------------ on resuming


def check_resumable(saved: Saved, config: Config, state: TrainState, fingerprint: str) -> list[str]:
    """What differs between a checkpoint's config and this one, as lines.

    Raises:
      CheckpointError: the state has other shapes, or the data is another.
    """
    changes = loader.diff(saved.config, loader.plain(config))
    now = shapes(state)
    differing = [path for path in saved.shapes | now if saved.shapes.get(path) != now.get(path)]
    if differing:
        first = differing[0]
        named = [line for line in changes if line.startswith(("model.", "optimizer.kind", "optimizer.train"))]
        raise CheckpointError(
            f"checkpoint {saved.step} does not fit this config: {len(differing)} arrays differ, such as {first} "
            f"({saved.shapes.get(first, 'absent')} -> {now.get(first, 'absent')}); changed: "
            f"{'; '.join(named) or 'none'}. Undo the change, or choose another run_dir, where "
            f"start_from={config.run_dir} begins with these weights"
        )
    if saved.fingerprint != fingerprint:
        named = [line for line in changes if line.startswith(("data.", "seed"))]
        raise CheckpointError(
            f"the data is not what checkpoint {saved.step} was trained on (fingerprint {saved.fingerprint[:12]} -> "
            f"{fingerprint[:12]}; changed: {'; '.join(named) or 'the files themselves'}). "
            f"Bring the data back, or choose another run_dir"
        )
    return [line for line in changes if not line.startswith("run_dir:")]


def restore_weights(config: Config, abstract: TrainState, step: int | None = None) -> TrainState:
    """The weights and router bias of a run, without its optimizer state (whose leaves are placeholders).

    Raises:
      CheckpointError: the run has no checkpoint (of that step) that can be read.
    """
    unread = jax.tree.map(lambda _: ocp.PLACEHOLDER, abstract.opt_state)
    with open_run(config, warn, read_only=True) as saved:
        state = saved.restore(dataclasses.replace(abstract, opt_state=unread), lambda about: None, step)
    if state is None:
        raise CheckpointError(f"{config.run_dir} has no checkpoint yet; train it first")
    return state


def warn(text: str) -> None:
    """Tells of what does not stop a command that has no log."""
    print(text, file=sys.stderr)

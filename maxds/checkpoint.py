"""Checkpoints: the whole state and what it belongs to, saved as one, and found again.

A checkpoint is RUN/checkpoints/STEP: weights, optimizer state, router bias and step, and beside
them, in the same atomic folder, the config, the fingerprint of the data and the versions. The data
has no state of its own: its position is the step, and the number of batches that were left out by
then. What `maxds.convert` makes has no optimizer state and belongs to no data: a training that starts
from it starts a fresh optimizer.
"""

import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint.experimental import v1 as ocp

import maxds
from maxds import checksum, loader, params
from maxds import mesh as mesh_lib
from maxds.config import Config
from maxds.params import Tree
from maxds.step import TrainState

PIECE_BYTES = 4 * 2**20, 64 * 2**20  # a stored piece of a weight is no smaller where it can be larger, and no larger
_HALF_WRITTEN = ".orbax-checkpoint-tmp"  # follows the step in the name of a folder that is not complete
_COMPLETE = "commit_success.txt"  # in a bucket, which renames no folder, is written into one that is
_ABOUT = "_CHECKPOINT_METADATA"  # the file of a checkpoint with what it says of itself
_MISREAD = ValueError, TypeError, KeyError, AttributeError  # by Orbax, where that file is damaged
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint cannot be used, or there is none."""


class UnreadableError(CheckpointError):
    """There are checkpoints, and none can be read: they are damaged, or their storage is out."""


class DamageError(ValueError):
    """A checkpoint does not hold what was saved."""


class StorageError(RuntimeError):
    """The folder of a run cannot be written."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint, before its arrays are read."""

    step: int
    config: dict[str, Any]  # as `loader.plain` gives it
    fingerprint: str  # of the data
    shapes: dict[str, list[int]]  # of every array of the state
    checksums: dict[str, str]  # the same, as `checksum.of_arrays` gives them; none of a conversion
    left_out: int  # batches of the data that the run went back past, as `rollback.py` says

    @classmethod
    def of(cls, step: int, about: dict[str, Any]) -> "Saved":
        """What `about_state` has written of the checkpoint of a step.

        Raises:
          DamageError: this is not what it has written.
        """
        if about.get("checksum") != checksum.of_json({key: about[key] for key in about if key != "checksum"}):
            raise DamageError("what it says of itself has another checksum than when it was saved")
        parts = about["config"], about["fingerprint"], about["shapes"], about["checksums"]
        return cls(step, *parts, about.get("left_out", 0))

    def check(self, state: Tree) -> None:
        """Raises DamageError unless a state, or a part of it, is what was saved. All processes call it together."""
        if wrong := checksum.differing(self.checksums, checksum.of_arrays(state)):
            raise DamageError(
                f"{len(wrong)} arrays have another checksum than when they were saved, such as {wrong[0]}"
            )

    @property
    def only_weights(self) -> bool:
        """Whether there is no optimizer state."""
        return not any(path.startswith("opt_state") for path in self.shapes)


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run. Open it with `open_run`."""

    folder: epath.Path
    orbax: ocp.training.Checkpointer
    warn: Callable[[str], None]
    damaged: set[int] = dataclasses.field(default_factory=set)  # steps of checkpoints that cannot be used

    # ------------------------------------------------------------------------------------- save

    def due(self, step: int) -> bool:
        """Whether the policy of config wants a checkpoint of this step."""
        return self.orbax.should_save(step)

    def save(self, state: Tree, step: int, config: Config, fingerprint: str, left_out: int = 0) -> None:
        """Starts saving in the background; the state may be donated once this returns."""
        about = about_state(config, fingerprint, state, left_out)
        context = ocp.Context()
        context.array.saving.scoped_storage_options_creator = _storage
        # Replicas share the writing, each a slice: programs to be compiled, one a shape and device, at the first save.
        context.array.saving.min_slice_bytes_for_replica_parallel = PIECE_BYTES[0]
        # A damaged checkpoint of this step may lie there, which the run resumed from before.
        self.damaged.discard(step)
        with context:
            self.orbax.save_checkpointables_async(
                step, {"state": state}, force=True, overwrite=True, custom_metadata=about
            )

    def drop_half_written(self) -> None:
        """Deletes what saves have left, which takes room that the next one needs. None may be under way."""
        for left in _half_written(self.folder) if jax.process_index() == 0 else ():
            with contextlib.suppress(OSError):  # Orbax may still write there: the next failure, or start, tries again
                left.rmtree()
        with contextlib.suppress(Exception):
            self.orbax.reload()  # it has forgotten those that it would have deleted had this one been saved

    def drop_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps, the latest first, damaged ones too. No save may be under way.

        Raises:
          StorageError: one cannot be deleted.
        """
        later = [found for found in self.steps() if found > step]
        try:
            for found in reversed(later) if jax.process_index() == 0 else ():
                (self.folder / str(found)).rmtree()
            multihost_utils.sync_global_devices(f"checkpoints after {step} deleted")
            self.orbax.reload()
        except Exception as error:  # whatever a storage raises
            raise StorageError(
                f"the checkpoints after {step} in {self.folder} cannot be deleted: {reason(error)}"
            ) from error
        self.damaged.difference_update(later)

    # ---------------------------------------------------------------------------------- restore

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return [checkpoint.step for checkpoint in self.orbax.checkpoints]

    def choose(self, step: int | None) -> int:
        """That step, or the last there is.

        Raises:
          CheckpointError: there is no checkpoint of that step, or none at all.
        """
        steps = self.steps()
        if step is None and not steps:
            raise CheckpointError(f"{self.folder.parent} has no checkpoint yet; train it first")
        if step is not None and step not in steps:
            raise CheckpointError(
                f"there is no checkpoint of step {step} in {self.folder}; it has {', '.join(map(str, steps)) or 'none'}"
            )
        return steps[-1] if step is None else step

    def about(self, step: int) -> Saved:
        """What a checkpoint belongs to.

        Raises:
          DamageError: it is not what was saved.
        """
        found: Any = self.orbax.checkpointables_metadata(step).custom_metadata
        return Saved.of(step, found)

    def restore(
        self,
        abstract: TrainState,
        check: Callable[[Saved], None],
        step: int | None = None,
        *,
        until: float = math.inf,
    ) -> TrainState | None:
        """The latest checkpoint that can be read, or that of `step`; None if the run has none.

        Args:
          abstract: shapes, dtypes and shardings of the state, or of a part of it. Of a checkpoint of nothing but
            weights, `opt_state` is None.
          check: raises where a checkpoint is readable and yet must not be used.
          step: of the checkpoint; None: the latest,
          until: of this step. Those of later ones are left out of account.

        Raises:
          UnreadableError: there are checkpoints, but none can be read.
          CheckpointError: there is none of that step.
        """
        steps = [found for found in self.steps() if found <= until]
        for chosen in [self.choose(step)] if step is not None else reversed(steps):
            saved = self._together(chosen, self.about, chosen)
            if saved is None:
                continue
            check(saved)
            wanted = dataclasses.replace(abstract, opt_state=None) if saved.only_weights else abstract
            state = self._together(chosen, self._load, saved, wanted)
            if state is not None:
                return state
        if steps:
            raise UnreadableError(f"none of the checkpoints {', '.join(map(str, steps))} in {self.folder} can be read")
        return None

    def _together(self, step: int, read: Callable[..., T], *args: Any) -> T | None:
        """`read(*args)` of a checkpoint. None, with a warning: a process cannot, and then none goes on with it."""
        found, failure = None, None
        try:
            found = read(*args)
        except Exception as error:  # whatever a damaged folder makes of reading it
            failure = error
        if failed := int(mesh_lib.of_all_processes(failure is not None).sum()):
            self._skip(step, failure or DamageError(f"{failed} of {jax.process_count()} processes cannot read it"))
            return None
        return found

    def _load(self, saved: Saved, abstract: Tree) -> Tree:
        state = self.orbax.load_checkpointables(saved.step, {"state": abstract})["state"]
        saved.check(state)
        return state

    def _skip(self, step: int, error: Exception) -> None:
        self.damaged.add(step)
        self.warn(f"warning: checkpoint {step} is damaged and is skipped ({reason(error)})")


def reason(error: BaseException) -> str:
    """The first line of what an error says, cut short; its kind, if it says nothing."""
    said = str(error).strip()
    return said.splitlines()[0][:500] if said else type(error).__name__


def _storage(key: tuple, value: Any) -> Any:
    """Stacked weights lie in pieces of a layer or expert, so that `maxds.convert` can read these alone."""
    name = params.name(key)
    if not name.startswith("params.") or value.ndim < 3:
        return None
    stacked = 2 if ".experts." in name else 1
    piece = math.prod(value.sharding.shard_shape(value.shape)[stacked:]) * value.dtype.itemsize
    smallest, largest = PIECE_BYTES
    return ocp.options.ArrayOptions.Saving.StorageOptions(
        chunk_byte_size=min(max(piece, smallest), largest), shard_axes=tuple(range(stacked))
    )


def about_state(config: Config, fingerprint: str, state: Tree, left_out: int = 0) -> dict[str, Any]:
    """What is kept beside a state, as JSON, and `Saved` reads. All processes call it together."""
    return _about(config, fingerprint, state, checksum.of_arrays(state), left_out)


def _about(
    config: Config, fingerprint: str, state: Tree, checksums: dict[str, str], left_out: int = 0
) -> dict[str, Any]:
    about = {
        "config": loader.plain(config),
        "fingerprint": fingerprint,
        "shapes": shapes(state),
        "checksums": checksums,
        "left_out": left_out,
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES}
        | {"maxds": maxds.__version__, "python": platform.python_version()},
    }
    return about | {"checksum": checksum.of_json(about)}


def save_outline(config: Config, run_dir: str, small: TrainState, abstract: TrainState) -> None:
    """Makes checkpoint 0 of a run, each array of which lies in a folder of its own, to be laid out anew.

    It has no checksums of arrays: who fills it compares what it wrote.

    Args:
      config: to be found in the checkpoint.
      run_dir: where to make it.
      small: what Orbax is to write.
      abstract: what the checkpoint will hold then.
    """
    folder = epath.Path(run_dir).resolve() / "checkpoints"
    context = ocp.Context()
    saving = context.array.saving
    saving.use_ocdbt, saving.array_metadata_store, saving.enable_write_sharding_file = False, None, False
    with context, ocp.training.Checkpointer(folder) as orbax:
        orbax.save_checkpointables(0, {"state": small}, custom_metadata=_about(config, "", abstract, {}))


def shapes(state: Tree) -> dict[str, list[int]]:
    """Path -> shape of every array of a state, abstract or not."""
    return {params.name(path): list(a.shape) for path, a in jax.tree_util.tree_leaves_with_path(state)}


@contextlib.contextmanager
def open_run(config: Config, warn: Callable[[str], None], *, read_only: bool = False) -> Iterator[Checkpoints]:
    """The checkpoints of `config.run_dir`, which need not exist yet; waits, on leaving, for what is being saved.

    Unless `read_only`, what an earlier process left half-written is deleted: only one process may write to a run.
    """
    # Orbax wants an absolute path, and to epath the address of a bucket is none.
    folder = (config.folder if config.in_bucket else config.folder.resolve()) / "checkpoints"
    left = _half_written(folder)
    for found in left:
        warn(f"warning: {found.name} is a half-written checkpoint and is skipped")
    policy, keep, damaged = config.checkpoint, ocp.training.preservation_policies, set()
    preserved = [_LatestSound(policy.keep_last, damaged)]
    if policy.keep_every:
        preserved.append(keep.EveryNSteps(policy.keep_every))
    if not read_only:
        _let_be_read(folder, left, warn)
    try:
        orbax = ocp.training.Checkpointer(
            folder,
            save_decision_policy=_save_policy(config),
            preservation_policy=keep.AnyPreservationPolicy(preserved),
            cleanup_tmp_directories=not read_only,
        )
    except OSError as error:
        raise StorageError(f"run_dir={config.run_dir} cannot be used: {reason(error)}") from error
    except _MISREAD as error:
        raise CheckpointError(
            f"{folder}: the {_ABOUT} of a checkpoint is damaged ({reason(error)}); move that checkpoint away, "
            "or let the run go on, and the others are used"
        ) from error
    try:
        yield Checkpoints(folder, orbax, warn, damaged)
    finally:
        try:
            orbax.close()
        except Exception as error:  # what ended the run matters more
            warn(f"warning: closing {folder}: {reason(error)}")


def _half_written(folder: epath.Path) -> list[epath.Path]:
    """Folders of checkpoints that are not complete; those that are being written, too."""
    if not folder.exists():
        return []
    if "://" not in str(folder):
        return list(folder.glob(f"*{_HALF_WRITTEN}*"))
    return [found for found in folder.iterdir() if found.name.isdigit() and not (found / _COMPLETE).exists()]


def _let_be_read(folder: epath.Path, left: list[epath.Path], warn: Callable[[str], None]) -> None:
    """Empties what damaged checkpoints say of themselves, for which Orbax would refuse all; leaves a copy.

    But for `left`, which are half-written: Orbax deletes them.
    """

    def mend(about: epath.Path) -> None:
        try:
            ocp.checkpointables_metadata(about.parent)
        except _MISREAD as error:
            about.copy(about.with_name(f"{_ABOUT}.damaged"), overwrite=True)
            about.write_text("{}")
            warn(f"warning: {about} is damaged ({reason(error)}); it is emptied, and {_ABOUT}.damaged is what it was")

    if jax.process_index() == 0:
        found = [f for f in folder.glob(f"*/{_ABOUT}") if f.parent.name.isdigit() and f.parent not in left]
        with contextlib.suppress(Exception), concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(mend, found))  # of what fails else, Orbax or restoring will tell
    multihost_utils.sync_global_devices("what checkpoints say of themselves is sound")


@dataclasses.dataclass(frozen=True)
class _LatestSound:
    """Preserves the latest checkpoints that can be used, and all that cannot: another day they might.

    Args:
      count: how many.
      damaged: steps of those that could not be used.
    """

    count: int
    damaged: set[int]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """As Orbax asks it."""
        sound = sorted(info.step for info in checkpoints if info.step not in self.damaged)[-self.count :]
        return [info.step in sound or info.step in self.damaged for info in checkpoints]


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
      CheckpointError: the state has other shapes, or the data is another, and not to begin here.
    """
    changes = loader.diff(saved.config, loader.plain(config))
    check_shapes(saved, config, dataclasses.replace(state, opt_state=None) if saved.only_weights else state)
    since = config.data.since_step
    if saved.step < since:
        raise CheckpointError(
            f"data.since_step={since} has no batch for step {saved.step + 1}, with which the run would go on after its "
            f"newest sound checkpoint, {saved.step}; set it to {saved.step}, or bring checkpoint {since} back"
        )
    if saved.fingerprint != fingerprint and not saved.only_weights and saved.step != since:
        named = [line for line in changes if line.startswith(("data.", "seed"))]
        raise CheckpointError(
            f"the data is not what checkpoint {saved.step} was trained on (fingerprint {saved.fingerprint[:12]} -> "
            f"{fingerprint[:12]}; changed: {'; '.join(named) or 'the files themselves'}). "
            f"Bring the data back, begin the other here with data.since_step={saved.step}, or choose another run_dir"
        )
    return [line for line in changes if not line.startswith("run_dir:")]


def check_shapes(saved: Saved, config: Config, state: TrainState) -> None:
    """Raises CheckpointError unless a checkpoint holds the arrays of a state, whose `opt_state` may be None."""
    now = shapes(state)
    held = {path: shape for path, shape in saved.shapes.items() if state.opt_state or not path.startswith("opt_state")}
    differing = [path for path in held | now if held.get(path) != now.get(path)]
    if differing:
        first = differing[0]
        changes = loader.diff(saved.config, loader.plain(config))
        named = [line for line in changes if line.startswith(("model.", "optimizer.kind", "optimizer.train"))]
        raise CheckpointError(
            f"checkpoint {saved.step} does not fit this config: {len(differing)} arrays differ, such as {first} "
            f"({held.get(first, 'absent')} -> {now.get(first, 'absent')}); changed: "
            f"{'; '.join(named) or 'none'}. Undo the change, or choose another run_dir, where "
            f"start_from={config.run_dir} begins with these weights"
        )


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

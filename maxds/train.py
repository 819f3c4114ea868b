"""The command: python -m maxds.train CONFIG.yaml [key=value ...] [--aot=FILE]

exit code 0   trained to `steps`                   3   stopped by SIGTERM or SIGINT; saved, resumes when run again
          1   a defect of maxds or a machine       4   loss or gradient stopped being finite
          2   a mistake in the config, data,       5   data ended or could not be read, after training had begun
              mesh, checkpoints or --aot file      6   no progress for `hang_seconds`; RUN/hangs tells where it stood
                                                   7   checkpoints, or the run's folder, could not be written
"""

import contextlib
import dataclasses
import functools
import os
import sys
import traceback
from collections.abc import Iterator

import jax
import numpy as np
from absl import flags
from jax.experimental import multihost_utils

from maxds import (
    checkpoint,
    checksum,
    command,
    describe,
    exporter,
    generate,
    goodput,
    integrity,
    lines,
    loader,
    local_checkpoint,
    loop,
    metrics,
    optimizer,
    records,
    rollback,
    saves,
    trained,
    wandb_run,
    watchdog,
)
from maxds import data as data_lib
from maxds import mesh as mesh_lib
from maxds import step as step_lib
from maxds.aot import executable
from maxds.config import Config
from maxds.model import sparsecores

_PRINT_CONFIG = flags.DEFINE_bool("print_config", False, "Print every key, its value and its origin, and exit.")
_DESCRIBE = flags.DEFINE_bool("describe", False, "Print parameters, FLOPs and bytes per device, and exit.")
_DEVICES = flags.DEFINE_integer("devices", None, "For --describe: how many devices the mesh is to cover.")
_AOT = flags.DEFINE_string("aot", None, "Train with the step that `maxds.compile --aot` left in this file (or gs://…).")

MISTAKES = (
    loader.ConfigError,
    data_lib.DataError,
    mesh_lib.MeshError,
    optimizer.PatternError,
    checkpoint.CheckpointError,
    loop.TermError,
    trained.UseError,
    sparsecores.KernelError,
    executable.ExecutableError,
    exporter.PortError,
    wandb_run.WandbError,
)
CONFIG = "config.yaml"  # in a run's folder, from before its first step on
EXIT_CODES = (  # of the first that an error is of
    {checkpoint.UnreadableError: 7}
    | dict.fromkeys(MISTAKES, 2)
    | {loop.NonFiniteError: 4, loop.FeedError: 5, checkpoint.StorageError: 7}
)
EXIT_CODES[integrity.CorruptionError] = 1
USAGE = (
    "usage: python -m maxds.train CONFIG.yaml [key=value ...] [--aot=FILE] [--print_config | --describe [--devices=N]]"
)


def main(args: list[str]) -> int:
    """Runs the command; returns its exit code."""
    if len(args) < 2:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        return execute(args)
    except tuple(EXIT_CODES) as error:
        text, code = str(error), next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
    except Exception:
        text, code = traceback.format_exc(), 1
    with contextlib.suppress(OSError):  # nobody may be reading any more
        lines.complain(text)
        sys.stdout.flush()
    if jax.distributed.is_initialized():  # JAX would wait for the other processes, which may wait for this one
        os._exit(code)
    return code


def execute(args: list[str]) -> int:
    """What the arguments ask for; returns the exit code.

    Raises:
      One of EXIT_CODES: it cannot be done.
    """
    config, tree = loader.load(Config, args[1], args[2:])
    if _PRINT_CONFIG.value:
        print(loader.render(config, tree), end="")
    elif _DESCRIBE.value:
        print(describe.describe(config, _DEVICES.value))
    else:
        return run(config, loader.render(config, tree), _AOT.value)
    return 0


def run(config: Config, text: str, aot: str | None = None) -> int:
    """Trains; `text` is the config to leave in the run's folder, `aot` a file of the compiled step. The exit code."""
    mesh_lib.initialize(config.mesh)
    if config.log_format == "json":
        lines.use_objects(jax.process_index())
    with contextlib.ExitStack() as start, metrics.Log(config, primary=jax.process_index() == 0) as log:
        start.enter_context(command.seldom_collecting())
        cache = mesh_lib.use_compile_cache(config.compile_cache_dir, log.note)
        stepper = make_stepper(config, log)
        data = open_data(config, cache, stepper.share, log)
        program = load_executable(aot, stepper, log) if aot else None
        process = f"process {jax.process_index()} of {jax.process_count()}"
        with (
            watchdog.Watchdog(config.hang_seconds, config.folder, process) as watch,
            checkpoint.open_run(config, log.note) as saved,
            local_checkpoint.open_local(config, log) as local,
            loop.Stop().listening() as stop,
        ):
            watch.progress("reading the data")
            with log.phase("state") as phase:
                begin = restore_or_init(saved, local, stepper, data, log, watch)
                phase.detail = begin.origin
            mesh_lib.keep_freed_memory(config.mesh)
            done = int(begin.state.step)
            if done >= config.steps:
                log.note(f"nothing to do: {config.run_dir} has {done} of steps={config.steps}; raise steps to go on")
                return 0
            with writing(config):
                leave_config(config, text)
            stop.requested(done + begin.left_out)  # from here on JAX counts: no notice is lost while this compiles
            if program is None:
                with log.phase("compile") as phase, watch.paused():
                    program, phase.detail = stepper.compile(), f"{config.schedule.kind} schedule"
                    multihost_utils.sync_global_devices("compiled")  # the others may take long, and do not hang
            with watch.paused():
                checksum.of_arrays(begin.state)  # compiled by now, so that the first save does not wait for it
            with writing(config):
                log.start(done, stepper.device_kind, stepper.mesh.size)

            def save(state: step_lib.TrainState, step: int) -> None:
                saved.save(state, step, config, data.fingerprint, training.left_out)

            saving = saves.Saves(saved, log, save, last=begin.saved)
            back = config.checkpoint.rollback_steps
            training = loop.Loop(
                *(config, stepper, data, saving, local, log, watch),
                state=begin.state,
                step=done,
                program=program,
                hosts=goodput.Hosts(log.note),
                logged=begin.logged,
                verified=done,
                left_out=begin.left_out,
                rollbacks=rollback.Rollbacks(saving, back) if back else None,
            )
            start.close()
            finished = training.run(stop)
        if not finished:
            log.note(f"stopped by {stop.name} after step {training.step}; run the same command to go on")
            return 3
        finish(config, training, log)
    return 0


def make_stepper(config: Config, log: metrics.Log) -> step_lib.Stepper:
    """The programs of the run, on the devices present.

    Raises:
      MeshError: devices, mesh, model and batch do not fit each other.
    """
    with log.phase("mesh") as phase:
        mesh = mesh_lib.make(config.mesh)
        axes = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        phase.detail = f"{axes} of {mesh.devices.flat[0].device_kind}"
        return step_lib.make(config, mesh)


def load_executable(path: str, stepper: step_lib.Stepper, log: metrics.Log) -> jax.stages.Compiled:
    """The train step, out of a file.

    Raises:
      ExecutableError: the file is not that of this step on these devices.
    """
    with log.phase("load") as phase:
        phase.detail = f"{stepper.config.schedule.kind} schedule, compiled ahead: {path}"
        return executable.load(path, stepper)


def open_data(config: Config, cache: str | None, share: tuple[int, int], log: metrics.Log) -> data_lib.Data:
    """The data, after a look at what is only needed later: a run that must fail does so before it trains.

    Raises:
      DataError: it cannot be read, there is too little of it, or other processes have other data.
      FeedError: it cannot be read any more, though it could when the run began.
      UseError: the sample's prompt does not suit the model.
    """
    with log.phase("data") as phase:
        meet = functools.partial(multihost_utils.sync_global_devices, "documents are measured")
        together = data_lib.Processes(jax.process_index(), jax.process_count(), meet)
        try:
            data = data_lib.open_data(config.data, config.model.vocab_size, config.seed, cache, together)
        except data_lib.UnreadableError as error:
            if not (config.folder / CONFIG).exists():
                raise
            raise loop.FeedError(str(error)) from error
        check_alike(data.fingerprint)
        if config.eval.every_steps is not None:
            data.eval_batches(config.eval.batches, *share)
        if config.sample is not None:
            generate.encode(config.model, data.tokenizer, config.sample)
        phase.detail = f"fingerprint {data.fingerprint[:12]}"
    for line in data.told(config.steps):
        log.note(f"            {line}")
    return data


def check_alike(fingerprint: str) -> None:
    """Raises DataError, in all processes, unless each has opened the same data."""
    parts = [int(fingerprint[i : i + 8], 16) for i in range(0, len(fingerprint), 8)]
    every = mesh_lib.of_all_processes(parts)
    if other := np.flatnonzero((every != every[0]).any(axis=1)).tolist():
        raise data_lib.DataError(
            f"processes {', '.join(map(str, other))} find other data than process 0 (here: fingerprint "
            f"{fingerprint[:12]}); give all hosts the same files"
        )


@dataclasses.dataclass
class Begin:
    """What a start goes on from."""

    state: step_lib.TrainState
    origin: str
    saved: int | None = None  # step of the last checkpoint in the run's folder that is sound
    left_out: int = 0  # batches of the data that the run went back past
    logged: dict | None = None  # what the next step gave, if it was taken before


def restore_or_init(saved, local, stepper, data, log, watch) -> Begin:
    """The newest checkpoint, local ones too, or a fresh state; local ones of later steps are gone then.

    Raises:
      CheckpointError: there is a checkpoint, and it does not belong to this config or data; or there is none, and this
        data, or `start_from`, needs one.
      UseError: what `start_from` names is not a run, or of another shape.
      DataError: as `know_tokens`.
    """
    config, changes, left_out = stepper.config, [], 0

    def check(about: checkpoint.Saved) -> None:
        nonlocal left_out
        changes[:] = checkpoint.check_resumable(about, config, stepper.abstract_state, data.fingerprint)
        left_out = about.left_out
        for line in changes:
            log.note(f"changed since checkpoint {about.step}: {line}")

    rows = list(records.read(config.folder, records.STEPS))  # before the first process drops those to be repeated
    state, last = newest(saved, local, stepper, check)
    if local is not None:
        local.drop_after(0 if state is None else int(state.step))
    if state is None:
        if config.data.since_step:
            raise checkpoint.CheckpointError(
                f"data.since_step={config.data.since_step} goes on from a checkpoint, but {config.run_dir} has none; "
                f"drop it"
            )
        with watch.paused():
            state, other = know_tokens(stepper.init(), config, data.tokenizer), config.start_from
            if other is None:
                return Begin(state, f"initialized from seed {config.seed}")
            return Begin(trained.start(other, stepper, state, log.note), f"weights of {other}")
    done = int(state.step)
    if state.opt_state is None:
        return Begin(stepper.with_fresh_optimizer(state), f"weights of checkpoint {done}, optimizer fresh", last)
    if any(line.startswith(("data.since_step:", "loss.", "model.", "precision.")) for line in changes):
        rows = []  # of another loss, or of other data
    next_step = (row for row in rows if (row["step"], row.get("left_out", 0)) == (done + 1, left_out))
    place = "checkpoint" if done == last else "local checkpoint"
    return Begin(state, f"restored from {place} {done}", last, left_out, next(next_step, None))


def newest(saved, local, stepper, check) -> tuple[step_lib.TrainState | None, int | None]:
    """The newest state that is sound, local ones too, and the step of the newest in the run's folder.

    Local ones are of no use to a run whose folder is gone, for its user wants another; nor at the end of a run.
    """
    config, last = stepper.config, max(saved.steps(), default=None)
    if local is not None and (config.folder / CONFIG).exists():
        state = local.restore(stepper.abstract_state, check, last or 0, config.steps - 1)
        if state is not None:
            return state, last
    state = saved.restore(stepper.abstract_state, check)
    return state, None if state is None else int(state.step)


def know_tokens(state: step_lib.TrainState, config: Config, tokenizer: data_lib.Tokenizer) -> step_lib.TrainState:
    """A fresh state with the classes of the tokenizer's tokens, where n-grams are made of these.

    Raises:
      DataError: there are more or fewer classes than config says.
    """
    model, count = config.model, config.model.engram_compressed_vocab_size
    if count is None:
        return state
    found = data_lib.classes(config.data.tokenizer, tokenizer, model.vocab_size, count)
    known = {"engrams": jax.device_put(found, state.router_bias["engrams"].sharding)}
    return dataclasses.replace(state, router_bias=state.router_bias | known)


@contextlib.contextmanager
def writing(config: Config) -> Iterator[None]:
    """Turns what a storage refuses at the start into a StorageError."""
    try:
        yield
    except OSError as error:
        raise checkpoint.StorageError(f"run_dir={config.run_dir} cannot be written: {error}") from error


def leave_config(config: Config, text: str) -> None:
    """Writes RUN/config.yaml, whole or not at all, from the first process."""
    if jax.process_index() != 0:
        return
    folder = config.folder
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{CONFIG}.partial"
    partial.write_text(text)
    partial.replace(folder / CONFIG)


def finish(config: Config, training: loop.Loop, log: metrics.Log) -> None:
    """What a finished run leaves behind besides its checkpoints: a picture, and a sample if config asks for one."""
    from maxds import report  # with matplotlib, a fifth of what a start would import

    log.flush()
    text = None
    if config.sample is not None:
        state = training.state
        state = dataclasses.replace(state, params=training.stepper.on_devices(state.params))
        text = generate.sample_text(training.stepper, state, training.data.tokenizer, config.sample)
    if jax.process_index() != 0:
        return
    try:
        if text is not None:
            (config.folder / "sample.txt").write_text(text)
        log.note(f"picture     {report.write(config.folder)}")
    except OSError as error:
        log.alarm(f"the run is trained and saved, but its picture or sample could not be written: {error}")


if __name__ == "__main__":
    command.run(main)

"""The model of a run, opened to be used: by `maxds.generate`, by `maxds.score`, and by a run that starts from it."""

import contextlib
import dataclasses
from collections.abc import Callable

import jax
from etils import epath
from jax.sharding import Mesh

from maxds import checkpoint, host, loader, params
from maxds import config as config_lib
from maxds import mesh as mesh_lib
from maxds import step as step_lib
from maxds.config import Config
from maxds.data import DataError
from maxds.model import deepseek, layout
from maxds.step import Stepper, TrainState


class UseError(ValueError):
    """A trained model cannot be used as asked; one sentence with the values and the remedy."""


MISTAKES = (UseError, loader.ConfigError, checkpoint.CheckpointError, DataError)
"""What a command answers with one message and exit code 2."""


def read_config(folder: str) -> Config:
    """The config of a run.

    Raises:
      UseError: `folder` is not one of a run, or its bucket cannot be reached.
      loader.ConfigError: there is a mistake in its config.
    """
    path = epath.Path(folder).expanduser() / "config.yaml"
    try:
        there = path.is_file()
    except Exception as error:  # whatever the library of a bucket raises
        raise UseError(f"{folder} cannot be reached ({error}); look after its bucket") from error
    if not there:
        raise UseError(f"{folder} is not a run, for there is no {path}; name the run_dir of a training")
    return loader.load(Config, path)[0]


def load(config: Config, folder: str, step: int | None = None) -> tuple[Stepper, TrainState]:
    """The model that a run of this config, in `folder`, saved at `step`, or last. Of the state, not the optimizer's.

    The stepper's config takes one sequence a device at a time, whatever the run's global batch.

    Raises:
      checkpoint.CheckpointError: the run has no checkpoint (of that step) that can be read.
    """
    mesh = _mesh(config)
    stepper = step_lib.make(_for_use(config, folder, mesh), mesh)
    mesh_lib.use_compile_cache(stepper.config.compile_cache_dir, checkpoint.warn)
    return stepper, checkpoint.restore_weights(stepper.config, stepper.abstract_state, step)


def start(folder: str, stepper: Stepper, fresh: TrainState, note: Callable[[str], None]) -> TrainState:
    """A fresh state with the last weights and router biases of the run in `folder`; `note` hears what it has not.

    Raises:
      UseError: `folder` is not one of a run, or a weight has another shape there.
      loader.ConfigError: there is a mistake in its config.
      checkpoint.CheckpointError: it has no checkpoint that can be read.
    """
    known, own = _named(_restored(folder, stepper)), _named(fresh)
    other = [name for name in known.keys() & own.keys() if known[name].shape != own[name].shape]
    if other:
        first = min(other)
        raise UseError(
            f"start_from={folder} has {len(other)} weights of another shape, such as {first} "
            f"({known[first].shape} -> {own[first].shape}); give the model the sizes of that run"
        )
    for what, names in (("drawn", own.keys() - known.keys()), ("left out", known.keys() - own.keys())):
        if names:
            note(f"start_from  {what}: {', '.join(sorted(names))}")

    def take(name: str, drawn: jax.Array) -> jax.Array:
        if name not in known:
            return drawn
        return jax.device_put(host.to_device(known[name]).astype(drawn.dtype), drawn.sharding)

    weights = jax.tree_util.tree_map_with_path(lambda path, a: take(params.name(path), a), fresh.params)
    bias = {stack: take(layout.bias_name(stack), b) for stack, b in fresh.router_bias.items()}
    return dataclasses.replace(fresh, params=weights, router_bias=bias)


def _restored(folder: str, stepper: Stepper) -> TrainState:
    """What the run in `folder` saved last, on this stepper's mesh, with its tables where this stepper's lie."""
    saved = read_config(folder)
    tables = stepper.config.schedule.tables if saved.model.engram_layer_ids else "device"
    config = dataclasses.replace(saved, run_dir=folder, schedule=dataclasses.replace(saved.schedule, tables=tables))
    theirs = dataclasses.replace(stepper, config=config, network=deepseek.Network(config))
    return checkpoint.restore_weights(config, theirs.abstract_state)


def _named(state: TrainState) -> dict[str, jax.Array]:
    """Weights and router biases by their paths."""
    weights = {params.name(path): a for path, a in jax.tree_util.tree_leaves_with_path(state.params)}
    return weights | {layout.bias_name(stack): b for stack, b in state.router_bias.items()}


def _mesh(config: Config) -> Mesh:
    """The mesh of the config; or, where it or the model does not fit, `fsdp` over as many devices as do."""
    if config.mesh.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        devices, choices = jax.devices()[:1], []
    else:
        devices = jax.local_devices()
        choices = [(config.mesh, devices)]
    choices += [(config_lib.Mesh(), devices[:n]) for n in range(len(devices), 1, -1)]
    declared = layout.declare(config.model)
    for wanted, chosen in choices:
        with contextlib.suppress(mesh_lib.MeshError):
            mesh = mesh_lib.make(wanted, chosen)
            params.check(declared, dict(mesh.shape))
            return mesh
    return mesh_lib.make(config_lib.Mesh(), devices[:1])


def _for_use(config: Config, folder: str, mesh: Mesh) -> Config:
    """The config, for a run that may have moved, without what only training needs of the batch."""
    return dataclasses.replace(
        config,
        run_dir=folder,
        data=dataclasses.replace(config.data, global_batch=mesh.size, ramp=()),
        optimizer=dataclasses.replace(config.optimizer, accumulate_steps=1, params_memory="device"),
        mesh=dataclasses.replace(config.mesh, context_parallel=False),
        schedule=config_lib.Schedule(kind="plain", capacity=config.schedule.capacity),
    )


def folder_of(args: list[str]) -> str:
    """The one positional argument of a command, the folder of a run.

    Raises:
      UseError: there is none, or more than one.
    """
    if len(args) != 2:
        raise UseError(f"give the folder of one run, not {' '.join(args[1:]) or 'none'}; --help shows the options")
    return args[1]

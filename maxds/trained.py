"""The model of a run, opened to be used: what `maxds.generate` and `maxds.score` have in common."""

import contextlib
import dataclasses
import pathlib

import jax
from jax.sharding import Mesh

from maxds import checkpoint, loader, params
from maxds import config as config_lib
from maxds import mesh as mesh_lib
from maxds import step as step_lib
from maxds.config import Config
from maxds.data import DataError
from maxds.model import deepseek
from maxds.step import Stepper, TrainState


class UseError(ValueError):
    """A trained model cannot be used as asked; one sentence with the values and the remedy."""


MISTAKES = (UseError, loader.ConfigError, checkpoint.CheckpointError, DataError)
"""What a command answers with one message and exit code 2."""


def read_config(folder: str) -> Config:
    """The config of a run.

    Raises:
      UseError: `folder` is not one of a run.
      loader.ConfigError: there is a mistake in its config.
    """
    path = pathlib.Path(folder).expanduser() / "config.yaml"
    if not path.is_file():
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


def _mesh(config: Config) -> Mesh:
    """The mesh of the config; or, where it or the model does not fit, `fsdp` over as many devices as do."""
    if config.mesh.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        devices, choices = jax.devices()[:1], []
    else:
        devices = jax.local_devices()
        choices = [(config.mesh, devices)]
    choices += [(config_lib.Mesh(), devices[:n]) for n in range(len(devices), 1, -1)]
    declared = deepseek.declare(config.model)
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
        data=dataclasses.replace(config.data, global_batch=mesh.size),
        optimizer=dataclasses.replace(config.optimizer, accumulate_steps=1),
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

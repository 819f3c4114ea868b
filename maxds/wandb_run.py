"""The figures of a run for Weights & Biases (W&B): those that TensorBoard gets, and the config.

W&B's own process sends them from files in a local folder. Nothing that fails there stops a run, or holds it up for
longer than the seconds below.
"""

import contextlib
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils import epath

from maxds import loader, records
from maxds.checkpoint import reason
from maxds.config import Config

_START_SECONDS, _FINISH_SECONDS = 30, 60  # that W&B's server may take to answer, and to get what is left at the end


class WandbError(ValueError):
    """W&B cannot be used as it is set; one sentence with the value and the remedy."""


def check(project: str) -> None:
    """Looks whether W&B can be used, without asking its server, or for a key on a terminal.

    Raises:
      WandbError: the package or the API key is missing, or a setting is no good.
    """
    try:
        from wandb import Settings, errors, login, setup  # an extra, and a second to import
    except ImportError as error:
        raise WandbError(f'wandb={project} needs W&B\'s package ({error}); pip install "maxds[wandb]"') from error
    try:
        mode = setup(Settings(project=project, silent=True)).settings.mode
        usable = mode in ("offline", "dryrun", "disabled") or login(prompt=False, verify=False)
    except (errors.Error, ValueError) as error:
        said = " ".join(str(error).split())
        raise WandbError(f"wandb={project} does not suit W&B: {said}; set another, or correct WANDB_*") from error
    if not usable:
        raise WandbError(f"wandb={project} needs an API key; set WANDB_API_KEY, or WANDB_MODE=offline")


class WandbRun:
    """A run at W&B, a context manager. `place` is its address there, or the folder of one that is offline.

    Args:
      config: `wandb` is the project.
      alarm: is told, once, that W&B gets nothing more.
    """

    place = "failed"

    def __init__(self, config: Config, alarm: Callable[[str], None]):
        self._project, self._alarm = config.wandb, alarm
        self._run: Any = None
        with self._telling():
            self._run = _start(config, alarm)
            self.place = self._run.settings.sync_dir if self._run.offline else self._run.url or "disabled"

    def show(self, step: int, values: Mapping[str, float | None]) -> None:
        """Hands over those of the values (tag -> value, as TensorBoard has them) that are finite."""
        if self._run is not None:
            with self._telling():
                finite = {tag: float(value) for tag, value in values.items() if records.is_finite(value)}
                # Not as W&B's own step: of that it drops what comes again, after a restart or a rollback.
                self._run.log({"step": step, **finite})

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Tells of a failure inside such a block, and leaves W&B alone from then on."""
        try:
            yield
        except Exception as error:  # its own, its service's, its settings'
            self._run = None
            self._alarm(f"wandb={self._project} gets nothing more of this run until it starts again: {reason(error)}")

    def __enter__(self) -> "WandbRun":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        from wandb import teardown  # as in `check`

        if self._run is not None:
            with self._telling():
                self._run.finish(exit_code=0 if kind is None else 1)
        with contextlib.suppress(Exception):  # of what was told already, it would print a traceback at exit
            teardown()


def _start(config: Config, alarm: Callable[[str], None]) -> Any:
    """The run, as W&B knows it; offline, if its server does not take it."""
    from wandb import Settings, init, teardown  # as in `check`

    folder = tempfile.gettempdir() if config.in_bucket else str(config.folder)
    settings = Settings(
        **{"silent": True, "console": "off", "disable_code": True, "disable_git": True, "x_disable_stats": True},
        init_timeout=_START_SECONDS,
        finish_timeout=_FINISH_SECONDS,
        finish_timeout_raises=True,
        stop_fn=lambda: alarm("W&B was asked to stop this run, which only SIGTERM does"),  # else it sends SIGINT
    )
    about = {
        "project": config.wandb,
        "id": _id(config.folder / "wandb.id"),
        "resume": "allow",
        "config": loader.plain(config),
    }
    about |= {"dir": os.environ.get("WANDB_DIR", folder), "settings": settings}
    try:
        run = init(**about)
    except Exception as error:  # rather than lose the time of many devices
        alarm(f"wandb={config.wandb} is not taken by W&B, and goes on offline: {reason(error)}")
        teardown()  # else the id is in use
        run = init(**about, mode="offline")
    run.define_metric("*", step_metric="step")
    return run


def _id(path: epath.Path) -> str:
    """The run's at W&B, kept in that file: the same after a restart, and another for a new run."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.parent / "wandb.id.partial"
        partial.write_text(uuid.uuid4().hex)
        partial.replace(path)
    return path.read_text()

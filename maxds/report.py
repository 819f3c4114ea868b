"""A run as a picture and a table: `python -m maxds.report RUN` draws RUN/report.png, and tells where the time went."""

import contextlib
import io
import math
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import matplotlib
import numpy as np
from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from maxds import command, describe, goodput, loader, records
from maxds.config import Config

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.prop_cycle": "cycler(color=['1f5fa8', 'd9762b', '3a8f5c', '8a5fb0', 'b04a6a', '5b6770'])",
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "agg.path.chunksize": 10_000,  # else a long and noisy line is too much for the renderer
}
_ALARM = "#c0272d"

Columns = dict[str, np.ndarray]  # float64 [rows]


class NoMetricsError(ValueError):
    """The run has logged no step."""


def write(run_dir: str | os.PathLike) -> epath.Path:
    """Draws RUN/report.png, and returns its path.

    Raises:
      NoMetricsError: RUN/metrics.jsonl holds no step.
    """
    run = epath.Path(run_dir)
    steps = _columns(map(_flat, records.read(run, records.STEPS)))
    evals = _columns({"step": row["step"], **row["eval"]} for row in records.read(run, records.EVALS))
    if not steps:
        raise NoMetricsError(f"{run / records.STEPS} holds no step; is this the folder of a run?")
    picture = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        _draw(steps, evals, run.name, _subtitle(run)).savefig(picture, format="png", dpi=150)
    path = run / "report.png"
    path.write_bytes(picture.getvalue())
    return path


def table(run_dir: str | os.PathLike) -> str:
    """Where the time of the run went, for people; empty where it has not recorded that."""
    account = goodput.Account(records.read(run_dir, records.TIMES))
    return account.table() if account.starts else ""


def _flat(row: dict) -> dict[str, float | None]:
    layers = [imbalance for stack in row["imbalance"].values() for imbalance in stack]
    names = "step loss grad_norm learning_rate tokens_per_second skipped".split()
    return {name: row[name] for name in names} | row["terms"] | {"worst": max(layers), "mean": np.mean(layers)}


def _columns(rows: Iterable[dict]) -> Columns:
    """The values of each key of the last row, NaN where a row has no finite one."""
    table = list(rows)
    return {name: np.array([row.get(name) for row in table], float) for name in (table[-1] if table else ())}


def _subtitle(run: epath.Path) -> str:
    """The model and the recipe, by RUN/config.yaml; empty where this version cannot read it."""
    with contextlib.suppress(OSError, loader.ConfigError), tempfile.TemporaryDirectory() as folder:
        local = pathlib.Path(folder) / "config.yaml"  # the run may be in an object store
        local.write_text((run / local.name).read_text())
        config, _ = loader.load(Config, local)
        model, data, optimizer = config.model, config.data, config.optimizer
        sizes = describe.counts(model)
        mesh = " ".join(f"{axis}={getattr(config.mesh, axis)}" for axis in ("data", "fsdp", "expert"))
        return (
            f"{_short(sizes['total'])} parameters, {_short(sizes['active'])} active per token  ·  "
            f"{model.num_hidden_layers} layers of width {model.hidden_size:,}  ·  "
            f"{model.n_routed_experts} experts, {model.num_experts_per_tok} per token\n"
            f"{data.global_batch:,} sequences of {data.sequence_length:,} tokens a step  ·  "
            f"{optimizer.kind}, lr {optimizer.lr:g} {optimizer.lr_schedule}  ·  "
            f"mesh {mesh}, {config.schedule.kind}  ·  seed {config.seed}"
        )
    return ""


def _short(count: float) -> str:
    return EngFormatter(places=1, sep="").format_data(count).replace("G", "B")


def _draw(steps: Columns, evals: Columns, name: str, subtitle: str) -> Figure:
    figure = Figure(figsize=(11, 9.5))
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 0.925))
    figure.text(0.012, 0.984, name, size=16, weight="bold", va="center")
    figure.text(0.012, 0.952, subtitle, size=9, color="#555555", va="center", linespacing=1.5)
    axes = figure.subplot_mosaic([["loss", "loss"], ["rate", "load"], ["norm", "lr"]], height_ratios=[1.4, 1, 1])
    _loss(axes["loss"], steps, evals)
    _throughput(axes["rate"], steps)
    _imbalance(axes["load"], steps)
    _norm(axes["norm"], steps)
    _learning_rate(axes["lr"], steps)
    for ax in axes.values():
        ax.set_xlim(steps["step"][0] - 0.5, steps["step"][-1] + 0.5)
        ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
        ax.xaxis.set_major_formatter("{x:,.0f}")
        if ax.get_legend_handles_labels()[0]:  # above the axes, where it hides nothing
            ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=8, borderaxespad=0)
    for key in ("norm", "lr"):
        axes[key].set_xlabel("step")
    return figure


def _loss(ax: Axes, steps: Columns, evals: Columns) -> None:
    """The loss and those of its terms that are nats per token as it is, with evaluations in the same colors."""
    ax.set_title("Loss")
    terms = [name for name in steps if name == "main" or name.startswith("mtp")]  # not balance and z_loss
    marks = {"markersize": 5, "markeredgecolor": "white", "linewidth": 0.8, "clip_on": False, "zorder": 3}
    for name in ["loss", *terms]:
        color = _noisy(ax, steps, name, name)
        if name in evals:
            ax.plot(evals["step"], evals[name], "o:", color=color, label=f"{name}, eval", **marks)
    broken = steps["step"][np.isnan(steps["loss"])]
    if broken.size:
        top = {"transform": ax.get_xaxis_transform(), "color": _ALARM, "linestyle": "none"}
        ax.plot(broken, np.full(broken.shape, 0.97), marker="x", label="not finite", **top)


def _throughput(ax: Axes, steps: Columns) -> None:
    ax.set_title("Throughput")
    ax.set_ylabel("tokens/s")
    _noisy(ax, steps, "tokens_per_second")
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(EngFormatter(sep=""))


def _imbalance(ax: Axes, steps: Columns) -> None:
    ax.set_title("Expert imbalance")
    ax.set_ylabel("load of the busiest / mean load")
    _noisy(ax, steps, "worst", "worst layer")
    _noisy(ax, steps, "mean", "mean of layers")
    ax.axhline(1, color="#888888", linewidth=0.8)


def _norm(ax: Axes, steps: Columns) -> None:
    ax.set_title("Gradient norm")
    _noisy(ax, steps, "grad_norm")
    ax.set_ylim(bottom=0)
    for i, step in enumerate(steps["step"][steps["skipped"] > 0]):
        ax.axvline(step, color=_ALARM, linewidth=1, linestyle=":", label="" if i else "step skipped")


def _learning_rate(ax: Axes, steps: Columns) -> None:
    ax.set_title("Learning rate")
    ax.plot(steps["step"], steps["learning_rate"])
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter("{x:g}")


def _noisy(ax: Axes, steps: Columns, name: str, label: str = "") -> Any:
    """A smooth line on the raw one, whose spikes are cut at three times its height; their color."""
    at, medians = _smooth(steps[name])
    cut = 3 * max(medians[np.isfinite(medians)], default=math.inf)
    raw = ax.plot(steps["step"], np.minimum(steps[name], cut), linewidth=0.8, alpha=0.3)[0]
    ax.plot(steps["step"][at], medians, color=raw.get_color(), label=label)
    return raw.get_color()


def _smooth(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Medians of what is finite in windows of 2% of the steps: where they stand (at most 1000 places), and they."""
    at = np.unique(np.linspace(0, len(y) - 1, min(len(y), 1000)).round().astype(int))
    reach = len(y) // 100
    windows = (y[max(i - reach, 0) : i + reach + 1] for i in at)
    finite = (window[np.isfinite(window)] for window in windows)
    return at, np.array([np.median(values) if values.size else math.nan for values in finite])


def main(argv: list[str]) -> None:
    """The command: draws the run that its one argument names, and tells its times; exits with 2 where it cannot."""
    problem = "usage: python -m maxds.report RUN"
    if len(argv) == 2:
        try:
            path = write(argv[1])
            print(*filter(None, (table(argv[1]), path)), sep="\n")
            return
        except NoMetricsError as error:
            problem = str(error)
    print(problem, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    command.run(main)

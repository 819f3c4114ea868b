"""The timeline as a picture: one layer forward and one backward, the compute above what travels beside it."""

import html
import io
import os
from typing import Any

import matplotlib
from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from maxds.aot.timeline import COMPUTE, HOST_DMA, LOCAL_DMA, SPARSE_CORE, STAGES, Event, Loop, Timeline

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": "#888888",
    "legend.frameon": False,
    "hatch.linewidth": 0.7,
    "svg.fonttype": "none",  # letters, and not their outlines
}
_COLORS: dict[str, str] = dict(
    zip(
        STAGES,
        ("#1f5fa8", "#5aa9c4", "#8a5fb0", "#d9762b", "#e8b23a", "#3a8f5c", "#8c564b", "#b04a6a", "#7f7f7f", "#d0d3d6"),
        strict=True,
    )
)
_WAIT = "#c0272d"
ENDINGS = ".png", ".html"
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body {{ margin: 0; background: white }}</style>
{drawing}</html>
"""


def write(timeline: Timeline, path: str | os.PathLike, title: str, subtitle: str) -> None:
    """Draws the picture into `path`: a PNG, or where it ends in .html a page that can be magnified."""
    panels = _panels(timeline)
    lanes = _lanes(timeline, panels)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(15, 1.9 + len(panels) * (0.9 + 0.36 * len(lanes))))
        figure.set_layout_engine("constrained", rect=(0, 0.0, 1, 0.86))
        figure.text(0.012, 0.962, title, size=14, weight="bold", va="center")
        figure.text(0.012, 0.918, subtitle, size=9, color="#555555", va="center")
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        seen: set[str] = set()
        for ax, (name, start, end) in zip(axes, panels, strict=True):
            seen |= _panel(ax, timeline, lanes, (start, end))
            ax.set_title(name)
        handles = [Patch(color=_COLORS[stage], label=stage) for stage in STAGES if stage in seen]
        handles.append(Patch(facecolor="white", edgecolor=_WAIT, hatch="////", label="waiting"))
        figure.legend(handles=handles, loc="upper right", ncols=len(handles), bbox_to_anchor=(0.995, 0.995), fontsize=8)
        drawing, target = io.BytesIO(), epath.Path(path).expanduser()
        if target.name.endswith(".png"):
            figure.savefig(drawing, format="png", dpi=130)
            target.write_bytes(drawing.getvalue())
        else:
            figure.savefig(drawing, format="svg")
            target.write_text(_page(title, drawing.getvalue().decode()))


def _page(title: str, svg: str) -> str:
    return _PAGE.format(title=html.escape(title), drawing=svg[svg.index("<svg") :])


def _panels(timeline: Timeline) -> list[tuple[str, float, float]]:
    """(title, start, end) of a layer forward and one backward; of the whole step where there is no loop over layers."""
    stacks = [loop for loop in timeline.loops.values() if _has_stages(timeline, loop)]
    layers = [loop for loop in stacks if not _holds_one_of(stacks, loop)]
    backward = [loop for loop in layers if _is_backward(loop)]
    forward = [loop for loop in layers if loop not in backward]
    panels = []
    for name, loops in (("forward", forward), ("backward", backward)):
        if loops:
            loop = max(loops, key=lambda loop: loop.end - loop.start)
            panels.append((f"one layer {name}, of {loop.trips} like it", loop.start, loop.end))
    return panels or [("one step", 0.0, timeline.step)]


def _is_backward(loop: Loop) -> bool:
    names = [i.op_name for i in loop.body.instructions]
    return sum("transpose(" in name for name in names) * 2 > sum("shard_map/" in name for name in names)


def _holds_one_of(stacks: list[Loop], loop: Loop) -> bool:
    """Whether a loop runs whole stacks of layers, as that over the parts of an accumulated batch does."""
    inner = {name for i in loop.body.instructions if i.opcode == "while" for name in i.called("body")}
    return any(stack.body.name in inner for stack in stacks)


def _has_stages(timeline: Timeline, loop: Loop) -> bool:
    names = {i.name for i in loop.body.instructions}
    stages = {event.stage for event in _between(timeline, loop.start, loop.end) if event.instruction.name in names} & {
        "attention",
        "experts",
        "mlp",
        "dispatch",
    }
    return len(stages) > 1


def _between(timeline: Timeline, start: float, end: float) -> list[Event]:
    return [e for e in timeline.events if e.start < end and e.start + e.seconds > start and e.seconds > 0]


def _lanes(timeline: Timeline, panels: list[tuple[str, float, float]]) -> list[str]:
    """Compute first, networks from near to far; prefetches into VMEM, hundreds that rarely matter, are left out."""
    order = ("die", "ici", "dcn", HOST_DMA, SPARSE_CORE)
    found = {e.lane for _, start, end in panels for e in _between(timeline, start, end)} - {COMPUTE, LOCAL_DMA}
    return [COMPUTE, *sorted(found, key=lambda lane: (order.index(lane.split()[0]), lane))]


def _panel(ax: Axes, timeline: Timeline, lanes: list[str], span: tuple[float, float]) -> set[str]:
    """Draws one span of time; returns the stages in it."""
    start, end = span
    seen = set()
    for row, lane in enumerate(lanes):
        events = [e for e in _between(timeline, start, end) if e.lane == lane]
        for left, width, stage, exposed in _merged(events, start, end):
            seen.add(stage)
            _bar(ax, row, (left * 1e3, width * 1e3), stage, exposed=exposed)
            if width > 0.035 * (end - start) and not exposed and stage != "other":
                x = (left + width / 2) * 1e3
                ax.text(x, row, stage, ha="center", va="center", color="white", size=7.5, clip_on=True)
    ax.set_yticks(range(len(lanes)), lanes)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.set_xlim(0, (end - start) * 1e3)
    ax.set_xlabel("milliseconds", loc="right", labelpad=1)
    ax.set_axisbelow(True)
    ax.grid(axis="x", color="#e6e6e6")
    return seen


def _bar(ax: Axes, row: int, extent: tuple[float, float], stage: str, *, exposed: bool) -> None:
    if exposed:
        style = {"facecolor": "white", "edgecolor": _WAIT, "hatch": "////", "linewidth": 0.6}
    else:
        style = {"facecolor": _COLORS[stage], "edgecolor": "white", "linewidth": 0.4}
    ax.broken_barh([extent], (row - 0.4, 0.8), **style)


def _merged(events: list[Event], start: float, end: float) -> list[tuple[float, float, str, bool]]:
    """(left, width, stage, exposed) of runs of one stage, from the span's start; gaps too small to see are closed."""
    runs: list[tuple[float, float, str, bool]] = []
    blink = (end - start) / 2000
    for e in sorted(events, key=lambda e: e.start):
        left, right = max(e.start, start) - start, min(e.start + e.seconds, end) - start
        if runs:
            begun, width, stage, exposed = runs[-1]
            if (stage, exposed) == (e.stage, e.exposed) and left - begun - width < blink:
                runs[-1] = begun, max(width, right - begun), stage, exposed
                continue
        runs.append((left, right - left, e.stage, e.exposed))
    return [run for run in runs if run[1] > blink / 4]

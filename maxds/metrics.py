"""What people see of a run: start-up phases, then a line for every logged step, or a progress bar on a terminal.

A step's number is the count of batches consumed with it: the first step is 1, and a run that resumes after step 100
goes on with 101. Rates are by all tokens of the global batch, padding included, and by the wall time from one step to
the next; MFU takes a row for one sequence, however it is packed or cut.
"""

import collections
import contextlib
import dataclasses
import math
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from maxds import flops, goodput, lines, records, wandb_run
from maxds.config import Config
from maxds.exporter import Exporter
from maxds.records import EVALS, STEPS, TIMES, Records
from maxds.wandb_run import WandbRun


@dataclasses.dataclass
class Phase:
    """A phase of the start-up; what is set as `detail` is shown with its time."""

    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Turns seconds into rates."""

    tokens: int  # of a sequence
    token_flops: int  # by flops.FORMULA
    devices: int
    peak: float | None  # FLOP/s of a device; None where it is not known

    def of(self, sequences: int, seconds: float) -> dict[str, float | None]:
        """Rates of a step that took so long: tokens/s, TFLOP/s of a device, and MFU as a fraction of 1."""
        tokens = sequences * self.tokens / seconds
        device = tokens * self.token_flops / self.devices
        mfu = None if self.peak is None else device / self.peak
        return {"tokens_per_second": tokens, "tflops_per_device": device / 1e12, "mfu": mfu}


class Log:
    """The log of one run, a context manager. Processes other than the primary one print and write nothing.

    But all serve their figures, if config says so; shares of the run's time are known to the primary one alone.

    Raises:
      exporter.PortError: on entering: they cannot be served.
      wandb_run.WandbError: on entering: W&B is asked for, and cannot be used.
    """

    _records: Records  # from `start` on, in the primary process
    _rates: Rates
    _account: goodput.Account

    def __init__(self, config: Config, primary: bool = True):
        self.config, self.primary = config, primary
        self._terminal = primary and config.log_format == "text" and sys.stdout.isatty()
        self._phases: dict[str, float] = {}  # seconds of each
        self._bar: tqdm | None = None
        self._recent: collections.deque[float] = collections.deque(maxlen=20)  # seconds of steps, for the ETA
        self._unshown: list[float] = []  # seconds of the steps since the last line
        self._closing = contextlib.ExitStack()
        self._exporter: Exporter | None = None
        self._wandb: WandbRun | None = None

    def __enter__(self) -> "Log":
        if self.primary and self.config.wandb is not None:
            wandb_run.check(self.config.wandb)
        if (port := self.config.prometheus_port) is not None:
            self._exporter = self._closing.enter_context(Exporter(port, jax.process_index()))
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.__exit__(*error)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Prints `name`, the detail that the body sets, and the seconds it took; nothing if it raises."""
        phase, start = Phase(), time.perf_counter()
        if self._terminal:  # so that a long phase is not silent
            print(f"{name} …", end="\r", flush=True)
        yield phase
        self._phases[name] = time.perf_counter() - start
        self.note(f"{name:<12}{phase.detail:<60}{self._phases[name]:8.1f} s")

    def start(self, done: int, device_kind: str, num_devices: int) -> None:
        """Opens the files of the run. Call it once, before the first step.

        Args:
          done: steps taken so far, as `TrainState.step`. What the files hold of later steps is dropped.
          device_kind: as JAX names it; decides the peak that MFU is measured against.
          num_devices: of the whole run.
        """
        data, peak = self.config.data, flops.peak(device_kind)
        token_flops = flops.per_token(self.config.model, data.sequence_length)["total"]
        self._rates = Rates(data.sequence_length, token_flops, num_devices, peak)
        if not self.primary:
            return
        tokens = data.global_batch * data.sequence_length
        self.note(f"tokens/s    all {tokens:,} tokens of a batch count, padding included")
        known = f"{peak / 1e12:,.0f} TFLOP/s of {device_kind}" if peak else f"unknown for {device_kind}"
        self.note(f"MFU         {flops.FORMULA}: {token_flops / 1e9:,.4g} GFLOP a token; peak {known}")
        opened = Records(self.config.folder, done, self.alarm, in_bucket=self.config.in_bucket)
        self._records = self._closing.enter_context(opened)
        if self.config.wandb is not None:
            with self.phase("wandb") as phase:
                self._wandb = self._closing.enter_context(WandbRun(self.config, self.alarm))
                phase.detail = self._wandb.place
        self._account = goodput.Account(records.read(self.config.folder, TIMES))
        self._add_time(goodput.start(done, self._phases))
        if self._terminal:
            size = shutil.get_terminal_size()  # also where the terminal says that it has none
            shape = {"ncols": size.columns, "nrows": size.lines, "bar_format": "{n_fmt}/{total_fmt} {bar} {desc}"}
            bar = tqdm(total=self.config.steps, initial=done, file=sys.stdout, **shape)
            self._bar = self._closing.enter_context(bar)

    def step(self, step: int, metrics: Mapping[str, Any], seconds: float) -> None:
        """Records one step, and shows it every `log_every_steps`.

        Args:
          step: its number, counted from 1.
          metrics: what `Stepper.train_step` returns, on the host, and how many `sequences`, whole ones, the batch had.
          seconds: wall time since the step before.
        """
        if not self.primary and self._exporter is None:
            return
        row = {"step": step, **_plain(metrics), "seconds": seconds, **self._rates.of(metrics["sequences"], seconds)}
        row["skipped"] = not row.pop("applied")
        scalars = _scalars(row)
        if self._exporter is not None:
            self._exporter.show(step, scalars)
        if not self.primary:
            return
        self._recent.append(seconds)
        self._unshown.append(seconds)
        self._records.append(STEPS, row)
        self._add_scalars(step, scalars)
        if row["skipped"]:
            self.note(f"step {step} skipped: its gradient norm is {row['grad_norm']:.3g}")
        if self._bar is not None:
            self._bar.update()
        if step % self.config.log_every_steps == 0 or step == self.config.steps:
            self._show(step, row | self._rates.of(row["sequences"], statistics.fmean(self._unshown)))
            self._unshown.clear()

    def spent(self, spent: Mapping[str, float], end: float, **of: int) -> dict[str, Any]:
        """Records what time was spent on, since what was recorded before.

        Args:
          spent: seconds, by goodput.KINDS.
          end: when that time ended, by time.perf_counter.
          of: the `step` that it ended with, if any; what is `done` and `left_out` after going back.

        Returns:
          What a step's metrics tell of it: `spent`, and the `goodput` of the run until then.
        """
        if not self.primary:
            return {}
        spent = {kind: round(seconds, 6) for kind, seconds in spent.items()}
        self._add_time({"time": time.time() - (time.perf_counter() - end), **of, "spent": spent})
        return {"spent": spent, "goodput": self._account.goodput}

    def go_back(self, done: int, left_out: int, spent: Mapping[str, float], end: float) -> None:
        """Drops what was recorded of steps after `done`, which are taken again with other data; as `spent`."""
        if not self.primary:
            return
        self.spent(spent, end, done=done, left_out=left_out)
        self._records.rewind(done)
        self._unshown.clear()
        if self._bar is not None:
            self._bar.n = done

    def _add_time(self, row: dict[str, Any]) -> None:
        self._account.add(row)
        self._records.append(TIMES, row)

    def _add_scalars(self, step: int, scalars: dict[str, float | None]) -> None:
        self._records.scalars(step, scalars)
        if self._wandb is not None:
            self._wandb.show(step, scalars)

    def _show(self, step: int, row: dict[str, Any]) -> None:
        steps = self.config.steps
        left = statistics.median(self._recent) * (steps - step)
        text, eta = _figures(row, self._rates.devices), f"ETA {_duration(left)}"
        if self._bar is not None:
            self._bar.set_description_str(f"{eta}  {text}")  # a narrow terminal cuts the end
        else:
            self.note(f"step {step:>{len(str(steps))}}/{steps}  {text}  {eta}")

    def eval(self, step: int, terms: Mapping[str, Any]) -> None:
        """Records and shows an evaluation of the weights after `step`; `terms`: name -> mean."""
        means = _plain(terms)
        scalars = {f"eval/{name}": value for name, value in means.items()}
        if self._exporter is not None:
            self._exporter.show(step, scalars)
        if not self.primary:
            return
        self._records.append(EVALS, {"step": step, "eval": means})
        self._add_scalars(step, scalars)
        self.note(f"eval after step {step}  {_named(means)}")

    def note(self, text: str) -> None:
        """Prints a line, above the progress bar where there is one."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self.primary:
            lines.say(f"\x1b[K{text}" if self._terminal else text)

    def alarm(self, text: str) -> None:
        """Tells standard error, from any process, of what people should look at though the run goes on."""
        lines.complain(f"ALARM: {text}", "ALERT")

    def flush(self) -> None:
        """Makes the files of a `run_dir` in an object store complete. Call it at checkpoints."""
        if self.primary:
            self._records.flush()


def _plain(value: Any) -> Any:
    """Mappings, arrays and scalars as dicts, lists and Python numbers."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    array = np.asarray(value)
    if array.dtype == np.float32:  # the shortest digits that read back as the same float32, half of what float64 takes
        array = array.astype(str).astype(np.float64)
    return array.tolist()


def _scalars(row: dict[str, Any]) -> dict[str, float | None]:
    """A step's row as TensorBoard's tags and values; of what layers have, the highest, of imbalance the mean too."""
    flat = {name: value for name, value in row.items() if not isinstance(value, dict) and name != "step"}
    flat |= {f"{key}/{name}": value for key in ("terms", "spent") for name, value in row.get(key, {}).items()}
    if late := row.get("hosts", {}).get("late"):
        flat |= {"late/max": max(late.values()), "late/median": statistics.median(late.values())}
    for stack, layers in row["imbalance"].items():
        flat |= {f"imbalance/{stack}_max": max(layers), f"imbalance/{stack}_mean": statistics.fmean(layers)}
    flat |= {f"top_score/{stack}_max": max(layers) for stack, layers in row.get("top_score", {}).items()}
    return flat


def _figures(row: dict[str, Any], devices: int) -> str:
    """A step's row for people."""
    rate, mfu = row["tokens_per_second"], row["mfu"]
    imbalance = max((layer for layers in row["imbalance"].values() for layer in layers), default=math.nan)
    parts = [
        f"loss {row['loss']:.4f}",
        *([_named(row["terms"])] if len(row["terms"]) > 1 else []),
        f"{rate:,.0f} tokens/s",
        f"{rate / devices:,.0f}/device",
        f"{row['tflops_per_device']:.3g} TFLOP/s/device",
        "MFU -" if mfu is None else f"MFU {mfu:.1%}",
        f"grad {row['grad_norm']:.3g}",
        f"imbalance {imbalance:.2f}",
    ]
    return "  ".join(parts)


def _named(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items())


def _duration(seconds: float) -> str:
    """Such as 1:02:03, or 4d 01:02:03."""
    days, rest = divmod(round(seconds), 24 * 3600)
    clock = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}d {clock:0>8}" if days else clock

"""The command: python -m maxds.compile CONFIG.yaml --topology=tpu7x:4x4x8 [--slices=N] [key=value ...]

Compiles, on a machine without any TPU, the very train step that `maxds.train` runs there, and prints what it will
need and cost: memory, FLOPs, traffic, and the time that its schedule takes. `--json=FILE` writes the figures,
`--plot=FILE.png` (or `.html`, which can be magnified) draws one layer forward and one backward, `--aot=FILE` keeps the
program for `maxds.train --aot=FILE`.
Of what does not fit, it prints the changes that should; `--fix` compiles these, the cheapest first, until one does. Of
what fits, it prints what the room that is left is best used for.

exit code 0   compiled; it fits                     2   a mistake in the config, mesh or topology, or no libtpu
          1   a defect of maxds or the machine      8   compiled for nothing: it does not fit into the device's memory
"""

import errno
import json
import os
import shlex
import sys

import jax
from absl import flags
from etils import epath

from maxds import command, flops, loader, optimizer
from maxds import mesh as mesh_lib
from maxds import step as step_lib
from maxds.aot import executable, fit, hlo, picture, remedies, report, timeline, topology
from maxds.aot.cost import Costs
from maxds.aot.network import Network
from maxds.config import Config
from maxds.model import sparsecores

_TOPOLOGY = flags.DEFINE_string("topology", None, "What to compile for, in chips: tpu7x:4x4x8, v5p:8x8x8, v6e:16x16.")
_SLICES = flags.DEFINE_integer("slices", 1, "How many such slices; mesh.data crosses them.")
_JSON = flags.DEFINE_string("json", None, "Write the figures to this file.")
_FIX = flags.DEFINE_bool("fix", False, "Where it does not fit, compile the changes that should, until one does.")
_AOT = flags.DEFINE_string("aot", None, "Write the compiled step to this file (or gs://…), for maxds.train --aot.")
_PLOT = flags.DEFINE_string("plot", None, "Draw one layer forward and one backward into this file: .png or .html.")


class OutputError(ValueError):
    """A file that is asked for cannot be written."""


MISTAKES = (
    OutputError,
    loader.ConfigError,
    mesh_lib.MeshError,
    optimizer.PatternError,
    topology.TopologyError,
    sparsecores.KernelError,
    executable.ExecutableError,
)
USAGE = (
    "usage: python -m maxds.compile CONFIG.yaml --topology=tpu7x:4x4x8 [--slices=N] [--fix] [--aot=FILE] "
    "[--json=FILE] [--plot=FILE.png|.html] [key=value ...]"
)


def main(args: list[str]) -> int:
    """Runs the command; returns its exit code."""
    if len(args) < 2 or _TOPOLOGY.value is None:
        print(USAGE, file=sys.stderr)
        return 2
    topology.prepare()
    try:
        check_outputs(json=_JSON.value, plot=_PLOT.value, aot=_AOT.value)
        found, stepper, compiled = attempt(args[1], args[2:])
        for remedy in found.get("remedies", ()) if _FIX.value else ():
            print(f"\nwith {shlex.join(remedy['overrides'])}\n")
            changed, stepper, compiled = attempt(args[1], [*args[2:], *remedy["overrides"]])
            found = changed | {"before": found}
            if compiled is not None:
                break
        if _JSON.value is not None:
            epath.Path(_JSON.value).expanduser().write_text(json.dumps(found, indent=1) + "\n")
        if compiled is None:
            return 8
        if _AOT.value is not None:
            size = executable.write(_AOT.value, stepper, compiled)
            print(f"\n{_AOT.value}: the compiled step, {size:,} bytes, for python -m maxds.train … --aot={_AOT.value}")
    except MISTAKES as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def check_outputs(**files: str | None) -> None:
    """Raises OutputError where the file of a flag cannot be written: before what may take an hour."""
    for name, path in ((name, path) for name, path in files.items() if path is not None):
        if name == "plot" and not path.endswith(picture.ENDINGS):
            raise OutputError(f"--plot={path}: give a file that ends in {' or '.join(picture.ENDINGS)}")
        target = epath.Path(path).expanduser()
        probe = target.parent / f"{target.name}.partial"
        try:
            if target.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            target.parent.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
        except Exception as error:  # whatever the library of a bucket raises
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise OutputError(f"--{name}={path} cannot be written: {reason}") from None


@command.seldom_collecting()
def attempt(path: str, overrides: list[str]) -> tuple[dict, step_lib.Stepper, jax.stages.Compiled | None]:
    """Compiles the step of a config, and prints the report; as `examine`, with the stepper."""
    config, _ = loader.load(Config, path, overrides)
    devices = topology.devices(_TOPOLOGY.value or "", _SLICES.value)
    stepper = step_lib.make(config, mesh_lib.make(config.mesh, devices))
    found, compiled = examine(stepper, _TOPOLOGY.value or "", _SLICES.value, _PLOT.value)
    print(report.text(found))
    return {"config": path, "overrides": overrides} | found, stepper, compiled


def examine(
    stepper: step_lib.Stepper, name: str, slices: int, plot: str | None
) -> tuple[dict, jax.stages.Compiled | None]:
    """Compiles the train step and works out its figures; draws them into the file `plot`.

    Returns:
      The figures, and the compiled step; None where it does not fit.

    Raises:
      MeshError: the compiler cannot do with `compiler_options`.
    """
    target = _target(stepper, name, slices)
    found = report.about(target)
    try:
        compiled = stepper.compile()
    except jax.errors.JaxRuntimeError as error:
        arguments = jax.tree.leaves((stepper.abstract_state, stepper.abstract_batch))
        refused = fit.of_error(str(error), arguments)
        if refused is None:
            raise
        cheapest = remedies.changes(stepper, target.chip, target.peak, refused.total - refused.limit)
        found |= {"fit": report.fit(refused), "remedies": report.remedies(cheapest, refused)}
        return found | {"smaller_parts": remedies.smaller_parts(stepper)}, None
    module = hlo.parse(compiled.as_text() or "")
    network = Network(stepper.mesh, target.chip, module.partitions)
    config, costs = stepper.config, Costs(module, target.chip, target.peak, target.filled)
    parts = config.optimizer.accumulate_steps if config.data.grows else None  # of a whole batch
    walked = timeline.walk(module, costs, network.route, parts)
    fits = fit.of_executable(compiled.memory_analysis(), target.chip.hbm_bytes)
    found["fit"] = report.fit(fits, module)
    if fits.peak is not None:
        more = remedies.spare(stepper, target.chip, target.peak, fits.limit - fits.peak)
        found |= {"spare": report.spare(fits, more)} if more else {}
    found["cost"] = report.cost(target, module, walked, network)
    if plot is not None:
        picture.write(walked, plot, *_titles(target, found["cost"]))
    return found, compiled


def _target(stepper: step_lib.Stepper, name: str, slices: int) -> report.Target:
    device = stepper.mesh.devices.flat[0]
    return report.Target(
        config=stepper.config,
        mesh=dict(stepper.mesh.shape),
        topology=name,
        slices=slices,
        kind=device.device_kind,
        chip=topology.chip(device),
        peak=flops.peak(device.device_kind) or 0.0,
        options=stepper.compiler_options,
    )


def _titles(target: report.Target, cost: dict) -> tuple[str, str]:
    mesh = " ".join(f"{axis}={n}" for axis, n in target.mesh.items())
    return (
        f"One step on {target.topology}{f' x {target.slices}' if target.slices > 1 else ''}, predicted",
        f"{mesh}  ·  {target.config.schedule.kind}  ·  step {cost['step_seconds'] * 1e3:,.2f} ms  ·  "
        f"{cost['tokens_per_second_per_chip']:,.0f} tokens/s a chip  ·  MFU {cost['mfu']:.1%}  ·  "
        f"exposed communication {cost['exposed_communication_fraction']:.1%}",
    )


if __name__ == "__main__":
    command.run(main)

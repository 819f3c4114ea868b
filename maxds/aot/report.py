"""What is said about a compiled step: figures as plain data, which is also the JSON, and the same as text."""

import dataclasses
import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

import maxds
from maxds import describe, flops
from maxds.aot import fit as fit_lib
from maxds.aot.cost import BASES, SCHEDULED, SCHEDULED_ELSE
from maxds.aot.fit import Buffer, Fit
from maxds.aot.hlo import COLLECTIVES, Array, Computation, Instruction, Module
from maxds.aot.network import Network
from maxds.aot.remedies import Change
from maxds.aot.timeline import Tally, Timeline, stage, within_stage
from maxds.aot.topology import GIB, Chip
from maxds.config import Config

LARGE = 64 * 2**20  # bytes of a copy that is listed

_ROOT = maxds.__path__[0].removesuffix("maxds")
REMEDIES = (
    "computed from shapes, not compiled: of state, sums of gradients and what layers keep; all else is taken to stay;",
    "compile again to be sure (--fix does). The time is that of recomputation, host memory and weights, at full rates",
)
OLD_JAX = (
    "where experts' sides are no multiples of 128, JAX 0.10's compiler for TPU multiplies every row by every expert in "
    "the weight gradient of a grouped matmul; train, and predict, with JAX 0.12"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """What is compiled for."""

    config: Config
    mesh: dict[str, int]
    topology: str
    slices: int
    kind: str  # of the devices
    chip: Chip
    peak: float  # bf16 FLOP/s of a device
    options: dict[str, str | bool]  # of the compiler

    @property
    def devices(self) -> int:
        """In all slices."""
        return math.prod(self.mesh.values())

    @property
    def filled(self) -> float:
        """The share of the routed rows that a device makes room for, that balanced experts fill."""
        return max(1 / self.config.schedule.capacity, 1 / self.mesh["expert"])


def about(target: Target) -> dict:
    """What was compiled, for what, by what."""
    found: dict[str, Any] = {
        "topology": target.topology,
        "slices": target.slices,
        "devices": target.devices,
        "device_kind": target.kind,
        "mesh": target.mesh,
        "compiler_options": target.options,
        "jax": jax.__version__,
    }
    return found | {"warnings": [OLD_JAX] if jax.__version__.startswith("0.10.") else []}


# ------------------------------------------------------------------------------------------- data


def fit(found: Fit, module: Module | None = None) -> dict:
    """Bytes of a device, and with a program its largest buffers."""
    data: dict[str, Any] = dataclasses.asdict(found)
    if module is not None:
        peak, buffers = fit_lib.largest(module)
        data["estimated_peak"] = peak
        data["buffers_method"] = fit_lib.ESTIMATE
        data["buffers"] = [_buffer(module, b) for b in buffers]
    return data


def remedies(changes: list[Change], refused: Fit) -> list[dict]:
    """Changes to the config after which a step that was refused should fit."""
    return [dataclasses.asdict(c) | {"total": refused.total - c.saved} for c in changes]


def spare(found: Fit, change: Change) -> dict:
    """What of the room that a step leaves is best used for."""
    assert found.peak is not None
    return dataclasses.asdict(change) | {"left": found.limit - found.peak}


def _buffer(module: Module, b: Buffer) -> dict:
    name = module.op_name(b.instruction).replace("\\'", "'")
    return {"bytes": b.bytes, "shape": b.shape, "op_name": name, **_place(module, b.instruction)}


def _place(module: Module, i: Instruction) -> dict:
    return {"name": i.name, "source": source(module, i)}


def source(module: Module, i: Instruction) -> str:
    """`file:line` in maxds that an instruction stems from; elsewhere, if no such; empty where the compiler made it."""
    places = module.sources(i)
    for name in i.called("calls", "to_apply") if not places else ():
        inner = module.computations[name].instructions if name in module.computations else ()
        places = next((found for j in reversed(inner) if (found := module.sources(j))), [])
    ours = [p for p in places if p.startswith(f"{_ROOT}maxds/")]
    return (ours or places or [""])[0].removeprefix(_ROOT)


def cost(target: Target, module: Module, timeline: Timeline, network: Network) -> dict:
    """What a step costs a device, and how long it takes: seconds, bytes, FLOPs."""
    data = target.config.data
    tokens = data.global_batch * data.sequence_length / target.devices
    model = flops.per_token(target.config.model, data.sequence_length)["total"] * tokens
    return {
        **_amounts(target, timeline, model),
        **_prediction(target, timeline, tokens, model),
        "collectives": list(_collectives(timeline)),
        "links": {" ".join(axes): link.about for axes, link in network.used.items()},
        "other_streams": {lane: dataclasses.asdict(tally) for lane, tally in timeline.others.items()},
        "compute": {basis: dataclasses.asdict(tally) for basis, tally in timeline.compute.items()},
        "slowest": list(_slowest(module, timeline)),
        "copies": list(_copies(module, timeline)),
        "most_exposed": list(_most_exposed(module, timeline)),
        "not_estimated": _not_estimated(module, timeline),
        "assumptions": assumptions(target),
    }


def _amounts(target: Target, timeline: Timeline, model_flops: float) -> dict:
    """FLOPs and bytes, and the least time that each takes alone."""
    moved: dict[str, float] = dict.fromkeys(("ici", "die", "dcn"), 0.0)
    for (_, _, network), tally in timeline.collectives.items():
        moved[network] += tally.bytes
    return {
        "model_flops": model_flops,
        "executed_flops": timeline.flops,
        "hbm_bytes": timeline.hbm_bytes,
        **{f"{network}_bytes": size for network, size in moved.items()},
        "roofline_seconds": {
            "model_flops": model_flops / target.peak,
            "executed_flops": timeline.flops / target.peak,
            "hbm": timeline.hbm_bytes / target.chip.hbm,
            **{network: _busiest(timeline, network) for network in moved},
        },
    }


def _prediction(target: Target, timeline: Timeline, tokens: float, model_flops: float) -> dict:
    """How long the step takes by its schedule, for `tokens` tokens of a device."""
    step = timeline.step
    return {
        "step_seconds": step,
        "compute_seconds": timeline.compute_seconds,
        "communication_seconds": timeline.communication,
        "exposed_communication_seconds": timeline.exposed,
        "exposed_communication_fraction": timeline.exposed / step,
        "stalled_seconds": timeline.stalled,
        "tokens_per_second_per_device": tokens / step,
        "tokens_per_second_per_chip": tokens * target.chip.per_chip / step,
        "mfu": model_flops / target.peak / step,
    }


def _busiest(timeline: Timeline, network: str) -> float:
    """Seconds of the mesh axis that is busiest on a network."""
    axes: dict[str, float] = {}
    for (_, names, used), tally in timeline.collectives.items():
        for name in names if used == network else ():
            axes[name] = axes.get(name, 0.0) + tally.seconds
    return max(axes.values(), default=0.0)


def _collectives(timeline: Timeline) -> Iterator[dict]:
    for (opcode, axes, network), t in sorted(timeline.collectives.items(), key=lambda item: -item[1].seconds):
        opcode = "all-reduce (send, recv)" if opcode == "send" else opcode
        yield {
            "collective": opcode,
            "axes": list(axes),
            "network": network,
            "times": t.times,
            "bytes": t.bytes,
            "seconds": t.seconds,
            "exposed_seconds": t.exposed,
        }


def _slowest(module: Module, timeline: Timeline, count: int = 12) -> Iterator[dict]:
    """The source lines that a device computes for longest, with what they do there."""
    lines: dict[tuple[str, str, str], Tally] = {}
    for name, t in timeline.instructions.items():
        i = timeline.named[name]
        if i.opcode in COLLECTIVES or i.opcode.endswith("-start") or i.opcode == "send":
            continue
        op_name = module.op_name(i)
        where = stage(op_name, i.opcode), within_stage(op_name) or i.opcode, source(module, i)
        lines.setdefault(where, Tally()).add(1, seconds=t.seconds, flops=t.flops)
    for (part, operation, place), t in sorted(lines.items(), key=lambda item: -item[1].seconds)[:count]:
        yield {"stage": part, "operation": operation, "source": place, "seconds": t.seconds, "flops": t.flops}


def _copies(module: Module, timeline: Timeline, least: int = LARGE) -> Iterator[dict]:
    """Copies in HBM of `least` bytes or more, with what each changes: the compiler's reason for it."""
    found: dict[tuple[str, float, str, str], Tally] = {}
    for computation in module.computations.values():
        for i in computation.instructions:
            if i.opcode == "copy" and i.name in timeline.instructions and i.arrays[0].bytes >= least:
                written, t = i.arrays[0], timeline.instructions[i.name]
                why = _change(computation.by_name[i.operands[0]].arrays[0], written)
                tally = found.setdefault((str(written), written.bytes, why, source(module, i)), Tally())
                tally.times += t.times
                tally.seconds += t.seconds
    for (shape, size, why, place), t in sorted(found.items(), key=lambda item: -item[1].seconds):
        yield {"shape": shape, "why": why, "source": place, "times": t.times, "bytes": size, "seconds": t.seconds}


def _change(read: Array, written: Array) -> str:
    """What a copy changes."""
    if read.order != written.order:
        return "is turned"
    return "has other tiles" if read.tile != written.tile else "is memory of its own"


def _most_exposed(module: Module, timeline: Timeline, count: int = 10) -> Iterator[dict]:
    worst = sorted(timeline.instructions.items(), key=lambda item: -item[1].exposed)[:count]
    homes = {i.name: computation for computation in module.computations.values() for i in computation.instructions}
    for name, t in worst:
        if t.exposed > 0:
            i = _maker(module, homes[name], timeline.named[name])
            entry = {"op_name": module.op_name(i), "times": t.times, "seconds": t.seconds}
            yield {"name": name, "source": source(module, i)} | entry | {"exposed_seconds": t.exposed}


def _maker(module: Module, computation: Computation, i: Instruction) -> Instruction:
    """What made an operand, where the compiler says nothing of what moves it: of what is sent over DCN, copied, …"""
    while not module.op_name(i) and i.operands and i.operands[0] in computation.by_name:
        i = computation.by_name[i.operands[0]]
    return i


def _not_estimated(module: Module, timeline: Timeline) -> list[dict]:
    """What counts as nothing: kernels without a cost, and loops without a known end: the experts' further rounds."""
    found: dict[tuple[str, str], float] = {}
    for name, t in timeline.instructions.items():
        i = timeline.named[name]
        if t.seconds == 0 and (i.opcode == "custom-call" or i.opcode.endswith("-start")):
            what = i.name.rstrip("0123456789.") + f" ({i.target or i.opcode})", source(module, i)
            found[what] = found.get(what, 0) + t.times
    kernels = [{"what": what, "source": place, "times": n} for (what, place), n in found.items()]
    loops: dict[str, set[str]] = {}
    for i in timeline.skipped:
        loops.setdefault(source(module, i), set()).add(i.name)
    return kernels + [
        {"what": "loops that run as often as the data says, taken not to", "source": place, "times": len(names)}
        for place, names in loops.items()
    ]


def assumptions(target: Target) -> list[str]:
    """What the figures rest on."""
    c = target.chip
    kernels = SCHEDULED[c.family]
    summed = f", sums of rows {kernels['sums_of_rows']}" if "sums_of_rows" in kernels else ""
    return [
        f"a device: {target.peak / 1e12:g} TFLOP/s bf16, HBM {c.hbm / 1e12:g} TB/s, cycles at {c.clock / 1e9:g} GHz",
        f"ICI {c.ici / 1e9:g} GB/s a link one way, DCN {c.dcn / 1e9:g} GB/s and host {c.host / 1e9:g} GB/s a device",
        "compute takes the compiler's own cycles; nothing slows for another's use of HBM, and launches take no time",
        f"by their schedules, attention's kernels reach {kernels['attend']} of peak, {kernels['attend_selected']} "
        f"where keys are selected, V4's {kernels['attend_window_selected']} where entries are selected and "
        f"{kernels['attend_window']} elsewhere; grouped matmuls {kernels['rows_by_matrices']}, their weight gradients "
        f"{kernels['outer_products']}{summed}; others {SCHEDULED_ELSE}",
        "each mesh axis has its links to itself, collectives reach full link bandwidth and have no latency",
        "asynchronous transfers start when their operands are ready and their axis is free, in order; those to host "
        "memory and from there take turns",
        "SparseCores move bytes at the bandwidth of HBM, and one thing at a time",
        "experts are balanced: grouped matmuls whose kernel counts its tiles visit those of tokens, others all rows",
        f"FLOPs of the model: {flops.FORMULA}, without what is computed again",
        "a prediction, not a measurement: compare schedules and flags by it",
    ]


# ------------------------------------------------------------------------------------------- text


def text(data: dict) -> str:
    """The report for people."""
    blocks = [_head(data), _fit_text(data["fit"])]
    if data["fit"]["allocations"]:
        blocks.append(_allocations_text(data["fit"]["allocations"]))
    if "remedies" in data:
        blocks.append(_remedies_text(data["remedies"], data["smaller_parts"], data["fit"]["limit"]))
    if "spare" in data:
        blocks.append(_spare_text(data["spare"]))
    if "cost" in data:
        blocks += [_buffers_text(data["fit"]), _cost_text(data["cost"]), _collectives_text(data["cost"])]
        blocks += [_worst_text(data["cost"]), _copies_text(data["cost"]), _basis_text(data["cost"])]
        blocks.append("\n".join(["Assumptions", *(f"  {line}" for line in data["cost"]["assumptions"])]))
    return "\n\n".join(blocks)


def _head(data: dict) -> str:
    mesh = " ".join(f"{axis}={n}" for axis, n in data["mesh"].items())
    slices = f", {data['slices']} slices" if data["slices"] > 1 else ""
    lines = [f"{data['topology']}{slices}: {data['devices']} devices ({data['device_kind']}), {mesh}"]
    options = " ".join(f"{name}={str(value).lower()}" for name, value in data["compiler_options"].items())
    lines.append(f"compiled by JAX {data['jax']}" + (f" with {options}" if options else ""))
    return "\n".join(lines + [f"WARNING: {warning}" for warning in data["warnings"]])


def _gib(size: float | None) -> str:
    return "not known" if size is None else f"{size / GIB:,.3f}"


def _rows(rows: Iterable[tuple[str, ...]], indent: str = "  ") -> str:
    head, *rest = rows
    return "\n".join(indent + line for line in describe.table(head, rest))


def _fit_text(data: dict) -> str:
    rows = [
        ("memory of a device", "GiB"),
        ("arguments", _gib(data["arguments"])),
        ("outputs that reuse none of them", _gib(data["outputs"])),
        ("temporaries", _gib(data["temporaries"])),
        ("code", _gib(data["code"])),
        ("sum", _gib(data["total"])),
        ("usable HBM", _gib(data["limit"])),
        ("at the peak, by the compiler", _gib(data["peak"])),
        ("in host memory", _gib(data["host"])),
    ]
    return "\n".join([_verdict(data), _rows(rows), f"  (by {data['method']})"])


def _verdict(data: dict) -> str:
    over = (data["total"] if data["peak"] is None else data["peak"]) - data["limit"]
    if not data["fits"]:
        return f"Fit: it DOES NOT FIT, by {_gib(over)} GiB"
    if over > 0:
        return f"Fit: NOT KNOWN: the compiler takes it, and reports {_gib(over)} GiB more than there is"
    return "Fit: it fits"


def _allocations_text(allocations: list[dict]) -> str:
    rows = [("largest temporaries, as the compiler reports them", "GiB", "shape")]
    rows += [(_short(_within(a["op_name"]), 90), _gib(a["bytes"]), a["shape"]) for a in allocations]
    return _rows(rows)


def _remedies_text(changes: list[dict], smaller_parts: Sequence[str], limit: float) -> str:
    if not changes:
        nothing = "No change is enough, as far as shapes tell"
        if smaller_parts:
            typed = shlex.join(smaller_parts)
            return f"{nothing}; smaller parts of a batch may be, they need less of all else, too: {typed}"
        return f"{nothing}: take more devices, or a smaller model or batch"
    rows = [("what should fit: add to the command", "GiB less", "GiB left", "ms a step more", "")]
    for c in changes:
        amounts = _gib(c["saved"]), _gib(limit - c["total"]), _ms(c["seconds"])
        rows.append((shlex.join(c["overrides"]), *amounts, "rounds the moments" if c["rounds"] else ""))
    return "\n".join([_rows(rows), *(f"  {line}" for line in REMEDIES)])


def _spare_text(change: dict) -> str:
    amounts = _gib(-change["saved"]), _gib(change["left"]), _ms(-change["seconds"])
    rows = [("what could be kept, and not computed again", "GiB more", "of GiB left", "ms a step less")]
    rows.append((shlex.join(change["overrides"]), *amounts))
    return "\n".join([_rows(rows), "  from shapes, at full rates: compile it to be sure"])


def _within(op_name: str) -> str:
    return op_name.removeprefix("jit(train_step)/")


def _buffers_text(data: dict) -> str:
    rows = [("largest buffers at the peak", "GiB", "shape", "source")]
    for b in data["buffers"]:
        name = _within(b["op_name"]) or b["name"]
        rows.append((_short(name, 60), _gib(b["bytes"]), _short(b["shape"], 40), b["source"]))
    return "\n".join([_rows(rows), f"  ({data['buffers_method']}: peak {_gib(data['estimated_peak'])} GiB)"])


def _short(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width // 3]}…{line[-(width - width // 3 - 1) :]}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"


def _cost_text(c: dict) -> str:
    roof = c["roofline_seconds"]
    rows = [
        ("cost of a step, of a device", "amount", "ms at least"),
        ("FLOPs of the model", f"{c['model_flops'] / 1e12:,.4f} TFLOP", _ms(roof["model_flops"])),
        ("FLOPs executed", f"{c['executed_flops'] / 1e12:,.4f} TFLOP", _ms(roof["executed_flops"])),
        ("HBM", f"{c['hbm_bytes'] / 1e9:,.3f} GB", _ms(roof["hbm"])),
        ("ICI; ms: of its busiest axis", f"{c['ici_bytes'] / 1e9:,.3f} GB", _ms(roof["ici"])),
        ("between dies", f"{c['die_bytes'] / 1e9:,.3f} GB", _ms(roof["die"])),
        ("DCN", f"{c['dcn_bytes'] / 1e9:,.3f} GB", _ms(roof["dcn"])),
    ]
    step, exposed = c["step_seconds"], c["exposed_communication_seconds"]
    predicted = [
        ("predicted", "", ""),
        ("step", f"{_ms(step)} ms", ""),
        ("computing", f"{_ms(c['compute_seconds'])} ms", f"{c['compute_seconds'] / step:.1%}"),
        ("exposed communication", f"{_ms(exposed)} ms", f"{c['exposed_communication_fraction']:.2%}"),
        ("waiting for copies and SparseCores", f"{_ms(c['stalled_seconds'])} ms", f"{c['stalled_seconds'] / step:.2%}"),
        ("tokens/s of a device", f"{c['tokens_per_second_per_device']:,.1f}", ""),
        ("tokens/s of a chip", f"{c['tokens_per_second_per_chip']:,.1f}", ""),
        ("MFU", f"{c['mfu']:.2%}", ""),
    ]
    return "\n".join(["Cost", _rows(rows), "", _rows(predicted)])


def _collectives_text(c: dict) -> str:
    rows = [("communication", "axes", "network", "times", "GB", "ms", "ms exposed")]
    for k in c["collectives"]:
        amounts = f"{k['times']:,.0f}", f"{k['bytes'] / 1e9:,.4f}", _ms(k["seconds"]), _ms(k["exposed_seconds"])
        rows.append((k["collective"], " ".join(k["axes"]) or "-", k["network"], *amounts))
    for lane, t in c["other_streams"].items():
        amounts = f"{t['times']:,.0f}", f"{t['bytes'] / 1e9:,.4f}", _ms(t["seconds"]), _ms(t["exposed"])
        rows.append((lane, "-", "-", *amounts))
    links = [f"  {axes}: {about}" for axes, about in c["links"].items()]
    return "\n".join([_rows(rows), *links])


def _worst_text(c: dict) -> str:
    exposed = [("most exposed", "of", "source", "times", "ms", "ms exposed")]
    for e in c["most_exposed"]:
        amounts = f"{e['times']:,.0f}", _ms(e["seconds"]), _ms(e["exposed_seconds"])
        operation = _short(within_stage(e["op_name"]) or "-", 44)
        exposed.append((_short(e["name"], 44), operation, e["source"] or "-", *amounts))
    slowest = [("longest computed", "stage", "source", "ms", "share", "TFLOP")]
    for e in c["slowest"]:
        share = f"{e['seconds'] / c['step_seconds']:.1%}"
        name = _short(e["operation"], 44)
        amounts = _ms(e["seconds"]), share, f"{e['flops'] / 1e12:,.4f}"
        slowest.append((name, e["stage"], e["source"] or "-", *amounts))
    return "\n".join([_rows(exposed), "", _rows(slowest)])


def _copies_text(c: dict) -> str:
    rows = [(f"copies of {LARGE // 2**20} MiB or more", "GiB", "it", "source", "times", "ms", "share")]
    for e in c["copies"]:
        amounts = f"{e['times']:,.0f}", _ms(e["seconds"]), f"{e['seconds'] / c['step_seconds']:.1%}"
        rows.append((e["shape"], _gib(e["bytes"]), e["why"], e["source"] or "-", *amounts))
    return _rows(rows)


def _basis_text(c: dict) -> str:
    rows = [("computing is estimated by", "ms", "times", "that is")]
    for basis, meaning in BASES.items():
        if t := c["compute"].get(basis):
            rows.append((basis, _ms(t["seconds"]), f"{t['times']:,.0f}", meaning))
    missing = [f"  {m['times']:,.0f} x {m['what']}  {m['source']}".rstrip() for m in c["not_estimated"]]
    return "\n".join([_rows(rows), *(["", "  not estimated:", *missing] if missing else [])])

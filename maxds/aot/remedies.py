"""What would fit, where a step does not, and what would be faster, where it leaves room: from shapes alone.

A change to the config saves what it takes away of the state, of the sums of gradients, and of what layers keep for
their backward pass. All else that the compiler needs is taken to stay, though smaller parts of a batch need less of it;
and what is saved is taken to be there at the peak. So a compilation has the last word.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from maxds import describe, flops, params, step
from maxds import mesh as mesh_lib
from maxds.aot.network import Network
from maxds.aot.topology import Chip
from maxds.config import STAGE_NAMES, Config, Mesh, Optimizer, Schedule
from maxds.step import Stepper

Setting = dict[str, dict[str, Any]]
"""Section of the config -> key -> value."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A change after which a step should fit, or take less time."""

    overrides: tuple[str, ...]  # to type
    saved: float  # bytes of a device; less than none, where it needs more
    seconds: float  # that a step takes longer, at full rates; less than none, where it is faster
    rounds: bool  # whether it trains with other numbers


def changes(stepper: Stepper, chip: Chip, peak: float, missing: float) -> list[Change]:
    """The cheapest change of each kind that saves `missing` bytes or more, and of kinds together where none does alone.

    Args:
      stepper: of the step that does not fit.
      chip: what it is compiled for.
      peak: FLOP/s of a device.
      missing: bytes of a device.
    """
    budget = _Budget(stepper, chip, peak)
    config = stepper.config
    kinds = _schedules(config), _parts(stepper), _dtypes(config), _memories(config), _meshes(stepper)
    levers = [tuple(lever) for lever in kinds]
    found: dict[frozenset[int], Change] = {}
    for count in range(1, len(levers) + 1):
        for chosen in map(frozenset, itertools.combinations(range(len(levers)), count)):
            if any(enough < chosen for enough in found):
                continue
            tried = (budget.change(settings) for settings in itertools.product(*(levers[i] for i in chosen)))
            if fitting := [change for change in tried if change.saved >= missing]:
                found[chosen] = min(fitting, key=lambda change: (change.seconds, -change.saved))
    return sorted(found.values(), key=lambda change: (change.rounds, change.seconds))


def smaller_parts(stepper: Stepper) -> tuple[str, ...]:
    """What to type for the next smaller parts of a batch, which save more than shapes tell; nothing where none are."""
    setting = next(_parts(stepper), None)
    return () if setting is None else tuple(_overrides(stepper.config, (setting,)))


def spare(stepper: Stepper, chip: Chip, peak: float, room: float) -> Change | None:
    """What is best kept of what layers compute again, in so many bytes of a device; None: no more fits, or nothing is.

    The other arguments are those of `changes`.
    """
    schedule = stepper.config.schedule
    kept = {*schedule.keep, *schedule.offload, "attention_input"}  # that of every layer is kept somewhere
    again = [] if "everything" in kept else [name for name in STAGE_NAMES if name not in kept]
    budget = _Budget(stepper, chip, peak)
    choices = itertools.chain.from_iterable(itertools.combinations(again, n + 1) for n in range(len(again)))
    tried = (budget.change(({"schedule": {"keep": schedule.keep + more}},)) for more in choices)
    fitting = (change for change in tried if -room <= change.saved < 0)
    return min(fitting, key=lambda change: (change.seconds, -change.saved), default=None)


def _changed(config: Config, settings: tuple[Setting, ...]) -> Config:
    for setting in settings:
        sections = {name: dataclasses.replace(getattr(config, name), **keys) for name, keys in setting.items()}
        config = dataclasses.replace(config, **sections)
    return config


def _overrides(config: Config, settings: tuple[Setting, ...]) -> Iterator[str]:
    for section, keys in (item for setting in settings for item in setting.items()):
        for key, value in keys.items():
            if value != getattr(getattr(config, section), key):
                text = f"[{','.join(value)}]" if isinstance(value, tuple) else str(value).lower()
                yield f"{section}.{key}={text}"


# ----------------------------------------------------------------------------------------- levers


def _schedules(config: Config) -> Iterator[Setting]:
    """What layers keep on the device sent to host memory, or computed again; their inputs can only be sent."""
    schedule, inputs = config.schedule, "attention_input"
    choices = [[(name, to) for to in ("keep", "offload", "drop")] for name in _on_device(schedule) if name != inputs]
    if inputs in _on_device(schedule):
        choices.append([(inputs, "keep"), (inputs, "offload")])
    for choice in map(dict, itertools.product(*choices)):
        keep = tuple(name for name in schedule.keep if choice.get(name, "keep") == "keep")
        sent = tuple(name for name, to in choice.items() if to == "offload")
        if set(choice.values()) != {"keep"}:
            yield {"schedule": {"keep": keep, "offload": schedule.offload + sent}}


def _parts(stepper: Stepper) -> Iterator[Setting]:
    """More and smaller parts of a batch, of which those of a ramp are made too; at last of parts of sequences."""
    parts, data, expert = stepper.config.optimizer.accumulate_steps, stepper.config.data, stepper.mesh.shape["expert"]
    rows = stepper.rows // stepper.network.microbatches
    split = {"mesh": {"context_parallel": True}} if _can_split(stepper) else {}
    for more in range(parts + 1, rows * (expert if split else 1) + 1):
        if all(more * size % data.global_batch == 0 for size in data.batch_sizes):
            if rows % more == 0:
                yield {"optimizer": {"accumulate_steps": more}}
            elif more > rows and rows * expert % more == 0:
                yield {"optimizer": {"accumulate_steps": more}, **split}


def _can_split(stepper: Stepper) -> bool:
    """Whether sequences that are whole could be split over `expert`."""
    config = stepper.config
    with contextlib.suppress(ValueError):  # of the config, or as MeshError of the mesh
        split = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, context_parallel=True))
        step.check(dataclasses.replace(stepper.network, config=split), dict(stepper.mesh.shape))
        return not config.mesh.context_parallel and stepper.mesh.shape["expert"] > 1
    return False


def _dtypes(config: Config) -> Iterator[Setting]:
    """Moments of half the size."""
    if config.optimizer.state_dtype == "float32":
        yield {"optimizer": {"state_dtype": "bfloat16"}}


def _memories(config: Config) -> Iterator[Setting]:
    """Moments in host memory, or weights too."""
    if config.optimizer.state_memory == "device":
        yield {"optimizer": {"state_memory": "host"}}
    if config.optimizer.params_memory == "device":
        yield {"optimizer": {"state_memory": "host", "params_memory": "host"}}


def _meshes(stepper: Stepper) -> Iterator[Setting]:
    """Fewer replicas of the weights, each over more devices."""
    data, fsdp = stepper.mesh.shape["data"], stepper.mesh.shape["fsdp"]
    slices = len({getattr(d, "slice_index", 0) for d in stepper.mesh.devices.flat})
    for fewer in range(data - 1, 0, -1):
        wider = fsdp * data // fewer
        if data % fewer == 0 and fewer % slices == 0:
            with contextlib.suppress(mesh_lib.MeshError):
                params.check(stepper.network.declared, dict(stepper.mesh.shape) | {"data": fewer, "fsdp": wider})
                yield {"mesh": {"data": fewer, "fsdp": wider}}


# -------------------------------------------------------------------------------- what they save and cost


def _on_device(schedule: Schedule) -> list[str]:
    """What layers keep in the device's memory, of what can be measured."""
    chosen = [name for name in schedule.on_device if name in STAGE_NAMES and name != "attention_input"]
    always = schedule.kind == "batch_split" and "attention_input" not in schedule.offload
    return [*chosen, "attention_input"] if always else chosen


class _Budget:
    """Bytes and seconds of a device, as far as they change with the config."""

    def __init__(self, stepper: Stepper, chip: Chip, peak: float):
        self.stepper, self.config, self.chip, self.peak = stepper, stepper.config, chip, peak
        self.held, self.travelling = functools.cache(self._held), functools.cache(self._travelling)

    def change(self, settings: tuple[Setting, ...]) -> Change:
        """What comes of these settings."""
        changed = _changed(self.config, settings)
        return Change(
            overrides=tuple(_overrides(self.config, settings)),
            saved=self.bytes(self.config) - self.bytes(changed),
            seconds=self.seconds(changed) - self.seconds(self.config),
            rounds=changed.optimizer.state_dtype != self.config.optimizer.state_dtype,
        )

    def bytes(self, config: Config) -> float:
        """In HBM: the state, the sums of gradients, and what layers keep while a part of the batch is on its way.

        What of the state is in host memory comes when that has gone: for Muon as a whole, for AdamW a layer at a time.
        """
        smaller = self.config.optimizer.accumulate_steps / config.optimizer.accumulate_steps
        kept = sum(self.stepper.kept_bytes[name] for name in _on_device(config.schedule)) * smaller
        held = self.held(config.optimizer, config.mesh)
        return held + (max(kept, self._here(config) - held) if config.optimizer.kind == "muon" else kept)

    def seconds(self, config: Config) -> float:
        """Of a step: what is computed again, what goes to host memory and comes back, and what weights travel."""
        parts, schedule, data = config.optimizer.accumulate_steps, config.schedule, config.data
        tokens = data.global_batch * data.sequence_length / self.stepper.mesh.size
        again = sum(n for name, n in _flops(config).items() if name not in (*schedule.keep, *schedule.offload))
        sent = sum(self.stepper.kept_bytes.get(name, 0) for name in schedule.offload)
        sent *= 2 * self.config.optimizer.accumulate_steps  # there and back, of all parts
        sent += self._travels(config)
        return tokens * again / self.peak + sent / self.chip.host + parts * self.travelling(config.mesh)

    def _here(self, config: Config) -> float:
        """What would be held with all of the state on the devices."""
        here = dataclasses.replace(config.optimizer, state_memory="device", params_memory="device")
        return self.held(here, config.mesh)

    def _travels(self, config: Config) -> float:
        """Of the state in host memory: moments come and go, and weights come once more, for their copy."""
        of_moments = dataclasses.replace(config.optimizer, params_memory="device")
        moments = self._here(config) - self.held(of_moments, config.mesh)
        if config.optimizer.params_memory == "device":
            return 2 * moments
        axes = mesh_lib.sizes(config.mesh, self.stepper.mesh.size)
        declared = params.flatten(self.stepper.network.declared).values()
        weights = sum(math.prod(p.shard(axes)) for p in declared if not p.table)
        return 2 * moments + 3 * weights * jnp.dtype(config.precision.params).itemsize

    def _held(self, chosen: Optimizer, mesh: Mesh) -> float:
        config = dataclasses.replace(self.config, optimizer=chosen, mesh=mesh)
        return sum(describe.held(config, mesh_lib.sizes(mesh, self.stepper.mesh.size)).values())

    def _travelling(self, mesh: Mesh) -> float:
        """Seconds in which the weights of all layers are gathered twice, and their gradients scattered."""
        made = mesh_lib.make(mesh, list(self.stepper.mesh.devices.flat))
        slices = len({getattr(d, "slice_index", 0) for d in made.devices.flat})
        ways, precision = made.shape["fsdp"], self.config.precision
        if ways == 1:
            return 0.0
        link = Network(made, self.chip, made.size // slices).link(("fsdp",))
        size = 2 * jnp.dtype(precision.compute).itemsize + jnp.dtype(precision.reduce).itemsize
        split = [p for p in params.flatten(self.stepper.network.declared).values() if "fsdp" in p.spec]
        numbers = sum(p.size // (made.shape["expert"] if p.of_experts else 1) for p in split)
        return numbers * size * (ways - 1) / ways / link.bandwidth


def _flops(config: Config) -> dict[str, float]:
    """FLOPs of a token, over all layers, for what is computed again where a name is not kept."""
    m, dense, modules = config.model, config.model.first_k_dense_replace, config.model.num_nextn_predict_layers
    sparse = m.num_moe_layers + modules
    layers = m.compress_ratios or (None,) * (dense + sparse)
    if m.compress_ratios is None:
        out = 2.0 * m.num_attention_heads * m.v_head_dim * m.hidden_size
    else:
        out = 2.0 * m.o_lora_rank * (m.num_attention_heads * m.head_dim + m.o_groups * m.hidden_size)
    length, rows = config.data.sequence_length, m.num_experts_per_tok * max(config.schedule.capacity, 1.0)
    return {
        "attention": 2.0 * sum(flops.attention(m, ratio, length)["attention"] for ratio in layers),
        "mlp_input": dense * out,
        "mlp_up": dense * 4.0 * m.hidden_size * m.intermediate_size,
        "dispatch_input": sparse * out,
        "expert_up": sparse * rows * 4.0 * m.hidden_size * m.moe_intermediate_size,
    }

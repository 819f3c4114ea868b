"""One training step: the gradient (the one `shard_map`, communication explicit), the update, the metrics."""

import dataclasses
import functools
import math
import re
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxds import host, optimizer, params, tables, update
from maxds import mesh as mesh_lib
from maxds.config import STAGE_NAMES, Config, Loss
from maxds.model import attention, deepseek, layout
from maxds.params import Tree


@flax.struct.dataclass
class TrainState:
    """What a step changes, and a checkpoint holds."""

    step: jax.Array  # int32: batches consumed
    params: Any  # layout.Weights
    opt_state: Tree  # of each of `params.parts`, by its name
    router_bias: dict[str, jax.Array]  # as layout.router_bias: stack -> float32 [L E]; tables of tokens
    typical_norm: jax.Array  # float32: running mean of the gradient norm; 0 before the first step


@flax.struct.dataclass
class Mode:
    """What a call of the train step is for. Arrays, so that a probe runs the very program that trains."""

    terms: dict[str, jax.Array]  # term -> 1., or 0. to leave it out
    update: jax.Array  # bool: whether the state changes


@dataclasses.dataclass(frozen=True)
class Stepper:
    """The compiled programs of a run. Build it with `make`."""

    config: Config
    mesh: Mesh
    network: deepseek.Network

    @property
    def batch_sharding(self) -> NamedSharding:
        """Of a global batch [global_batch S]."""
        split = self.config.mesh.context_parallel
        return NamedSharding(self.mesh, mesh_lib.SPLIT_BATCH if split else mesh_lib.BATCH)

    @property
    def rows(self) -> int:
        """Sequences of a global batch that a device has, whole or parts of them."""
        return self.batch_sharding.shard_shape(self.abstract_batch["tokens"].shape)[0]

    @property
    def device_kind(self) -> str:
        """Of the devices, as JAX names it."""
        return self.mesh.devices.flat[0].device_kind

    @property
    def compiler_options(self) -> dict[str, str | bool]:
        """That the step is compiled with."""
        return mesh_lib.compiler_options(self.device_kind, self.config.schedule.kind, self.config.compiler_options)

    @functools.cached_property
    def share(self) -> tuple[int, int]:
        """Which share of each global batch's sequences this process reads, and of how many."""
        return mesh_lib.share(self.batch_sharding, self.config.data.global_batch)

    # --------------------------------------------------------------------------------- state

    def _initial(self) -> TrainState:
        config = self.config
        weights = params.init(self.network.declared, config.seed, jnp.dtype(config.precision.params))
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=weights,
            opt_state=self._init_optimizer(weights),
            router_bias=layout.router_bias(config.model),
            typical_norm=jnp.zeros((), jnp.float32),
        )

    @functools.cached_property
    def transforms(self) -> dict[str, optax.GradientTransformation]:
        """How each of `params.parts` changes."""
        chosen, declared = self.config.optimizer, self.network.declared
        parts = params.parts(declared, declared).items()
        return {name: optimizer.make(chosen, part, self.mesh) for name, part in parts}

    def _init_optimizer(self, weights) -> dict[str, Tree]:
        parts = params.parts(self.network.declared, weights)
        return {name: self.transforms[name].init(part) for name, part in parts.items()}

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state; no arrays."""
        shapes = jax.eval_shape(self._initial)
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, self._shardings(shapes)
        )

    def _shardings(self, shapes: TrainState) -> TrainState:
        declared, mesh, config = self.network.declared, self.mesh, self.config
        everywhere = jax.tree.map(lambda _: mesh_lib.replicated(mesh), shapes)
        memories = {"weights": config.optimizer.state_memory, "tables": config.schedule.tables}

        def moments(part: str, own: Tree) -> Tree:
            sharding = functools.partial(NamedSharding, mesh, memory_kind=_kind(memories[part]))
            return optimizer.map_moments(lambda p, _: sharding(p.spec), own, everywhere.opt_state[part])

        return dataclasses.replace(
            everywhere,
            params=self._where_weights_lie(config.optimizer.params_memory),
            opt_state={part: moments(part, own) for part, own in params.parts(declared, declared).items()},
        )

    def _where_weights_lie(self, memory: str) -> layout.Weights:
        """Their shardings, but for tables in this memory."""
        return params.shardings(self.network.declared, self.mesh, _kind(self.config.schedule.tables), _kind(memory))

    def init(self) -> TrainState:
        """A fresh state, drawn straight into its shards."""
        out = jax.tree.map(lambda a: a.sharding, self.abstract_state)
        return jax.jit(self._initial, out_shardings=out, compiler_options=self._compile_quickly)()

    def with_fresh_optimizer(self, state: TrainState) -> TrainState:
        """The state, with the optimizer's as before the first step."""
        out = jax.tree.map(lambda a: a.sharding, self.abstract_state.opt_state)
        fresh = jax.jit(self._init_optimizer, out_shardings=out, compiler_options=self._compile_quickly)
        return dataclasses.replace(state, opt_state=fresh(state.params))

    @property
    def _compile_quickly(self) -> dict | None:
        """Compiler options of a program that runs once: on CPUs, optimizing it would take longer than running it."""
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        return {"xla_backend_optimization_level": 1} if on_cpu else None

    # ---------------------------------------------------------------------------------- step

    def train_step(self, state: TrainState, batch: dict, mode: Mode) -> tuple[TrainState, dict]:
        """One optimizer step.

        Args:
          state: donated when jitted.
          batch: int32 [global_batch S] `tokens`, `targets`, `segments`, `positions`.
          mode: `self.training`, or a probe.

        Returns:
          The state; metrics: `loss`, `terms` (means), `tokens` (with a target), `grad_norm` (of what is trained),
          `learning_rate`, `imbalance` (stack -> [L]: load of the busiest expert / mean load), `applied`
          (0 where the step was skipped); with `qk_clip`, `top_score` (stack -> [L]: the largest before clipping).
        """
        shares = {name: _share(self.config.loss, name, state.step) for name in mode.terms}
        enabled = Mode({name: on * shares[name] for name, on in mode.terms.items()}, mode.update)
        here = self._copied(state.params)
        grads, sums, counts, seen = self.loss_and_grads(here, state.router_bias, batch, enabled)
        norm = self._norm(grads)
        sound = self._sound(norm, state.typical_norm) & mode.update
        common = update.Common(norm, self._learning_rate(state.step), state.step)
        weights, opt_state = self._updated(state, grads, common, sound)
        bias = state.router_bias | self._balanced(state.router_bias, seen.load, state.step)
        typical = self._typical(norm, state.typical_norm)
        new = dataclasses.replace(
            state,
            step=state.step + mode.update.astype(jnp.int32),
            params=self._clipped(weights, seen.top_score, sound),
            opt_state=opt_state,
            router_bias=update.chosen(sound, bias, state.router_bias),
            typical_norm=update.chosen(mode.update & jnp.isfinite(norm), typical, state.typical_norm),
        )
        terms = {name: sums[name] / jnp.maximum(counts[name], 1).astype(jnp.float32) for name in sums}
        coefficients = self.network.coefficients()
        metrics = {
            "loss": sum(coefficients[name] * shares[name] * terms[name] for name in terms if coefficients[name]),
            "terms": {name: value for name, value in terms.items() if coefficients[name]},
            "tokens": counts["main"],
            "grad_norm": norm,
            "learning_rate": common.rate,
            "imbalance": {stack: _imbalance(counts) for stack, counts in seen.load.items()},
            "applied": sound,
        }
        if seen.top_score:
            metrics["top_score"] = {stack: jnp.max(scores, axis=-1) for stack, scores in seen.top_score.items()}
        return new, metrics

    def _norm(self, grads):
        """Of the gradients of all that is trained."""
        trained = jax.tree.leaves(jax.tree.map(lambda trained, g: g if trained else None, self.is_trained, grads))
        of_tables = [self._square(g) for g in trained if host.has(g)]
        others = [g.astype(jnp.float32) for g in trained if not host.has(g)]
        return jnp.sqrt(optax.tree.norm(others, squared=True) + sum(of_tables))

    def _square(self, table):
        """The squared norm of what lies in the hosts' memory, split as tables are."""

        def of_device(shard):
            return lax.psum(
                host.to_device(host.beside(lambda g: jnp.sum(jnp.square(g.astype(jnp.float32))), shard)), tables.AXES
            )

        return jax.shard_map(of_device, mesh=self.mesh, in_specs=P(tables.AXES), out_specs=P(), check_vma=False)(table)

    @functools.cached_property
    def is_trained(self) -> Tree:
        """Whether each weight changes."""
        return optimizer.is_trained(self.config.optimizer, self.network.declared)

    def _updated(self, state, grads, common, sound):
        """Weights and optimizer state after a step, or as before where it is not sound; each part where it lies."""
        parts = functools.partial(params.parts, self.network.declared)
        weights, opt_state = parts(state.params), dict(state.opt_state)
        for part, own_grads in parts(grads).items():
            own, old = weights[part], opt_state[part]
            if part == "tables" or not host.has(old):
                changed = update.where_they_lie
            elif self.config.optimizer.kind == "muon":
                changed = update.in_a_branch
            else:
                changed = functools.partial(update.by_layers, parts(self._layers)[part])
            weights[part], opt_state[part] = changed(
                functools.partial(self._update, part), sound, own, own_grads, old, common
            )
        return params.joined(list(weights.values())), opt_state

    @functools.cached_property
    def _layers(self) -> Tree:
        """Of each weight, how many layers come from host memory one after the other; 0: it comes as a whole."""
        return update.layers_of(self.network.declared, dict(self.mesh.shape))

    def _update(self, part, weights, grads, opt_state, common):
        """Weights and optimizer state of a part after an update."""
        grads = optimizer.clipped(self.config.optimizer.clip, grads, common.norm)
        directions, new_state = self.transforms[part].update(grads, opt_state, weights)
        trained = params.parts(self.network.declared, self.is_trained)[part]

        def moved(on: bool, w: jax.Array, direction: jax.Array) -> jax.Array:
            return update.moved(w, -common.rate * direction, common.step) if on else w

        return jax.tree.map(moved, trained, weights, directions), new_state

    def _clipped(self, weights, top_score, sound):
        """Weights after a step, by the scores of its batch (`optimizer.qk_clip`)."""
        limit = self.config.optimizer.qk_clip
        if limit is None:
            return weights

        def of_stack(stack: str, w: attention.Attention) -> attention.Attention:
            top = jnp.where(sound, top_score[stack], 0)
            return host.put_as(attention.clipped(self.config.model, host.to_device(w), top, limit), w)

        clipped = layout.map_attention(of_stack, weights)
        return jax.tree.map(lambda trained, new, old: new if trained else old, self.is_trained, clipped, weights)

    def _balanced(self, bias, load, step):
        """The router biases that change, after the step."""
        chosen = self.config.optimizer
        bias = {
            k: b
            for k, b in bias.items()
            if b.dtype == jnp.float32 and optimizer.changes(chosen, layout.bias_name(k))  # others are tables
        }
        loss = self.config.loss
        return optimizer.balance(bias, load, loss.router_bias_rate * _share(loss, "router_bias_rate", step))

    def _learning_rate(self, step):
        return jnp.asarray(optimizer.learning_rate(self.config.optimizer, self.config.steps)(step), jnp.float32)

    def _sound(self, norm, typical):
        """Whether a gradient of this norm is to be applied."""
        spike = self.config.optimizer.skip_spike
        finite = jnp.isfinite(norm)
        return finite if spike is None else finite & ((typical == 0) | (norm < spike * typical))

    def _typical(self, norm, typical):
        """The running mean of norms after one more; those of skipped steps too, or all later ones could be skipped."""
        spike = self.config.optimizer.skip_spike or math.inf
        after = 0.98 * typical + 0.02 * jnp.minimum(norm, spike * typical)
        return jnp.where(typical == 0, norm, after)

    def _copied(self, weights: layout.Weights) -> layout.Weights:
        """The weights as devices compute with them: themselves, or of those in host memory, but tables, a copy."""
        if self.config.optimizer.params_memory == "device":
            return weights
        declared, compute = self.network.declared, jnp.dtype(self.config.precision.compute)
        own, about, layers = (params.parts(declared, tree)["weights"] for tree in (weights, declared, self._layers))
        return params.joined([update.copied(about, layers, compute, own), weights])

    def on_devices(self, weights: layout.Weights) -> layout.Weights:
        """The weights that other programs than `train` take: themselves, or of those in host memory a copy."""
        return weights if self.config.optimizer.params_memory == "device" else self._copy(weights)

    @functools.cached_property
    def _copy(self):
        return jax.jit(self._copied, out_shardings=self._where_weights_lie("device"))

    def loss_and_grads(self, weights, bias, batch, mode: Mode):
        """Gradients, of dtype `precision.grads`; sums and counts of each term; what was seen: of the global batch.

        Its weights, and those of evaluation, are `on_devices`.
        """
        spec, batch_spec = params.specs(self.network.declared), self.batch_sharding.spec
        return jax.shard_map(
            self._per_device,
            mesh=self.mesh,
            in_specs=(spec, P(), batch_spec, P()),
            out_specs=(spec, P(), P(), P()),
            check_vma=False,
        )(weights, bias, batch, mode.terms)

    @jax.numpy_dtype_promotion("strict")
    def _per_device(self, weights, bias, batch, enabled):
        network, parts = self.network, self.config.optimizer.accumulate_steps
        counts = lax.psum(network.counts(batch), mesh_lib.AXES)
        coefficients = network.coefficients()
        scales = {
            name: enabled[name] * coefficients[name] / jnp.maximum(count, 1).astype(jnp.float32)
            for name, count in counts.items()
        }
        differentiate = jax.grad(network.objective, argnums=1, has_aux=True)
        grads = params.no_grads(weights, self.config.precision.grads)
        if parts == 1:
            grads, aux = differentiate(weights, grads, bias, batch, scales)
        else:
            batches = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), batch)

            def part(total, batch):
                grads, (sums, seen) = total
                grads, (more, more_seen) = differentiate(weights, grads, bias, batch, scales)
                return (grads, (jax.tree.map(jnp.add, sums, more), seen.joined(more_seen))), None

            def part_number(i, total):
                return part(total, jax.tree.map(lambda a: a[i], batches))[0]

            first = jax.tree.map(lambda a: a[0], batches)
            _, aux = jax.eval_shape(differentiate, weights, grads, bias, first, scales)
            zeros = grads, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), aux)
            if self.config.data.grows:
                grads, aux = lax.fori_loop(0, _filled(batches["segments"]), part_number, zeros)
            else:
                (grads, aux), _ = lax.scan(part, zeros, batches)
        sums, seen = aux
        sums, load = lax.psum((sums, seen.load), mesh_lib.AXES)
        return grads, sums, counts, deepseek.Seen(load, lax.pmax(seen.top_score, mesh_lib.AXES))

    @functools.cached_property
    def train(self):
        """`train_step`, jitted; donates the state."""
        return jax.jit(self.train_step, donate_argnums=0)

    @functools.cached_property
    def kept_bytes(self) -> dict[str, int]:
        """What each name of `schedule.keep` takes of a device while a part of the batch is on its way; nothing runs."""
        model, parts = self.config.model, self.config.optimizer.accumulate_steps
        part = {
            k: jax.ShapeDtypeStruct((len(a) // parts, *a.shape[1:]), a.dtype) for k, a in self.abstract_batch.items()
        }
        specs = params.specs(self.network.declared), P(), self.batch_sharding.spec
        tapes = jax.shard_map(self.network.tapes, mesh=self.mesh, in_specs=specs, out_specs=P(), check_vma=False)
        weights = jax.eval_shape(self.on_devices, self.abstract_state.params)
        found = jax.eval_shape(tapes, weights, self.abstract_state.router_bias, part)
        layers = {stack: about.count for stack, about in layout.stacks(model).items()}
        layers["moe_layers"] += model.num_nextn_predict_layers
        total: dict[str, int] = dict.fromkeys(STAGE_NAMES, 0)
        for stack, tapes in found.items():
            for name, value in (item for tape in tapes for item in tape[0].items()):
                if name in total:
                    size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(value))
                    total[name] += layers[stack] * self.network.microbatches * size
        return total

    # ------------------------------------------------------------------------ evaluation

    def eval_step(self, weights: layout.Weights, bias: dict, batch: dict) -> dict:
        """Sums and counts of each term on a global batch: {"sums", "counts"}; in as many parts as it is trained on."""
        network, parts = self.network, self.config.optimizer.accumulate_steps

        def per_device(weights, bias, batch):
            scales = dict.fromkeys(network.coefficients(), jnp.zeros((), jnp.float32))

            def part(batch):
                return network.objective(weights, params.no_grads(weights), bias, batch, scales)[1][0]

            of_parts = lax.map(part, jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), batch))
            sums = jax.tree.map(lambda a: jnp.sum(a, axis=0), of_parts)
            return lax.psum({"sums": sums, "counts": network.counts(batch)}, mesh_lib.AXES)

        specs = params.specs(self.network.declared), P(), self.batch_sharding.spec
        return jax.shard_map(per_device, mesh=self.mesh, in_specs=specs, out_specs=P(), check_vma=False)(
            weights, bias, batch
        )

    @functools.cached_property
    def evaluate(self):
        """`eval_step`, jitted."""
        return jax.jit(self.eval_step)

    # --------------------------------------------------------------------------- modes

    @functools.cached_property
    def training(self) -> Mode:
        """The mode of an ordinary step."""
        return self._mode(self.network.coefficients(), update=True)

    @functools.cached_property
    def rehearsal(self) -> Mode:
        """The mode that computes all of an ordinary step, and leaves the state as it is."""
        return self._mode(self.network.coefficients(), update=False)

    def probe(self, term: str) -> Mode:
        """The mode that computes the gradient of one term alone, and leaves the state as it is."""
        return self._mode((term,), update=False)

    def _mode(self, terms, *, update: bool) -> Mode:
        on = {name: jnp.float32(name in terms) for name in self.network.coefficients()}
        return jax.device_put(Mode(on, jnp.bool(update)), mesh_lib.replicated(self.mesh))

    @functools.cached_property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a global batch."""
        data, sharding = self.config.data, self.batch_sharding
        row = jax.ShapeDtypeStruct((data.global_batch, data.sequence_length), jnp.int32, sharding=sharding)
        return dict.fromkeys(("tokens", "targets", "segments", "positions"), row)

    @property
    def abstract_mode(self) -> Mode:
        """Shapes of a mode."""
        scalars = Mode({name: jnp.float32(0) for name in self.network.coefficients()}, jnp.bool(False))
        sharding = mesh_lib.replicated(self.mesh)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), scalars)

    def lower(self) -> jax.stages.Lowered:
        """`train_step`, traced and lowered for the devices of the mesh; donates the state."""
        return self.train.lower(self.abstract_state, self.abstract_batch, self.abstract_mode)

    def compile(self) -> jax.stages.Compiled:
        """`train_step`, compiled; donates the state. The devices may be those of a topology that is not here.

        Raises:
          MeshError: the compiler cannot do with `compiler_options`.
        """
        lowered = self.lower()
        try:
            return lowered.compile(compiler_options=self.compiler_options)
        except jax.errors.JaxRuntimeError as error:
            if reason := _mistaken_option(str(error)):
                raise mesh_lib.MeshError(f"the compiler of {self.device_kind} {reason}") from None
            raise

    def batch(self, rows: dict) -> dict:
        """A global batch out of the rows of this process's `share`, int32 [global_batch / shares S].

        Where a ramp's batch has fewer, each device's last parts are empty.
        """
        sharding, whole = self.batch_sharding, self.config.data.global_batch
        devices = whole // self.share[1] // self.rows  # that have rows of their own

        def filled(name: str, own: np.ndarray) -> np.ndarray:
            missing = self.rows - len(own) // devices
            if missing == 0:
                return own
            shares, empty = own.reshape(devices, -1, own.shape[-1]), [(0, 0), (0, missing), (0, 0)]
            return np.pad(shares, empty, constant_values=-1 if name == "targets" else 0).reshape(-1, own.shape[-1])

        def array(own: np.ndarray) -> jax.Array:
            return jax.make_array_from_process_local_data(sharding, own, (whole, own.shape[-1]))

        return {name: array(filled(name, own)) for name, own in rows.items()}


def _kind(memory: str) -> str | None:
    """Of memory, as shardings name it; None: the devices'."""
    return host.KIND if memory == "host" else None


def _filled(segments: jax.Array) -> jax.Array:
    """How many parts there are, [parts B S], up to the last that has a token on any device."""
    numbers = jnp.arange(1, len(segments) + 1, dtype=jnp.int32)
    return lax.pmax(jnp.max(jnp.where(jnp.any(segments > 0, axis=(1, 2)), numbers, 0)), mesh_lib.AXES)


def _share(loss: Loss, name: str, step: jax.Array) -> jax.Array | float:
    """What a term, or the router bias's rate, counts for after so many steps, over what it counts for at first."""
    share, key = 1.0, "mtp" if name.startswith("mtp") else name
    for change in loss.later:
        if key in change.weights:
            share = jnp.where(step >= change.after_steps, change.weights[key] / getattr(loss, key), share)
    return share


def _imbalance(counts: jax.Array) -> jax.Array:
    """[L E] -> [L]: load of the busiest expert over the mean load; 1 is perfect."""
    counts = counts.astype(jnp.float32)
    return jnp.max(counts, axis=-1) / jnp.maximum(jnp.mean(counts, axis=-1), 1e-9)


def check(network: deepseek.Network, sizes: dict[str, int]) -> None:
    """Raises MeshError unless model and batch fit a mesh of these sizes; PatternError as `optimizer.check`."""
    params.check(network.declared, sizes)
    config = network.config
    split_over = sizes["expert"] if network.split_sequences else 1
    optimizer.check(config.optimizer, layout.paths(config.model))
    mesh_lib.check_rows(
        math.prod(sizes.values()),
        config.data.global_batch,
        per_device=config.optimizer.accumulate_steps * network.microbatches,
        what="data.global_batch",
        group=split_over,
    )
    wrong = [
        f"{what}={n}"
        for what, n in (
            ("data.sequence_length", config.data.sequence_length),
            ("model.num_attention_heads", config.model.num_attention_heads),
        )
        if n % split_over
    ]
    if wrong:
        raise mesh_lib.MeshError(
            f"mesh.context_parallel=true splits {' and '.join(wrong)} over mesh.expert={split_over}, which does "
            "not divide it; choose another mesh.expert"
        )


def make(config: Config, mesh: Mesh) -> Stepper:
    """The programs of a run on this mesh.

    Raises:
      mesh.MeshError: the model or the batch does not fit the mesh.
      optimizer.PatternError: a pattern of `optimizer.train` matches nothing.
    """
    network = deepseek.Network(config, mesh_lib.rings(mesh, "fsdp"))
    check(network, dict(mesh.shape))
    return Stepper(config, mesh, network)


def _mistaken_option(message: str) -> str | None:
    """What the compiler says that it cannot do with `compiler_options`; None where it fails for another reason."""
    if "No such compile option" in message:
        return f"does not know the option {message.rpartition(': ')[2]} of compiler_options; drop it"
    if found := re.search(r"Failed to parse '(.*)' into flag (\w+)", message):
        return f"cannot read '{found[1]}' as a value of {found[2]} of compiler_options; change it"
    if "valid tiling that fits in memory" in message:
        return "finds no tiles that fit into VMEM; raise xla_tpu_scoped_vmem_limit_kib of compiler_options"
    return None

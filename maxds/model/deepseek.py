"""The model: embedding -> stacks of layers -> head, and MTP modules beside it -> losses.

Losses are sums over this device's tokens, each with the weight (a count) that the step divides it
by once it is known for the whole global batch: so neither the number of devices nor the number of
parts that a batch is accumulated over changes what a term is worth.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from maxds import params as params_lib
from maxds import schedule, tables
from maxds.architecture import Model
from maxds.config import Config
from maxds.model import attention, compressed, engram, layout, moe, ops, residual, sequences
from maxds.model.layout import Kind, Mtp, Stack, Weights
from maxds.model.residual import Stream
from maxds.params import Exchange, Tree


class Outer(NamedTuple):
    """Gathered weights around the layers, but for the head."""

    embed: jax.Array  # [V D]
    hyper: residual.Connection | None
    norm: jax.Array  # [D]


@flax.struct.dataclass
class Context:
    """What every layer is given of a microbatch."""

    tokens: jax.Array  # [B S] int32
    segments: jax.Array  # [B S] int32; 0: padding
    positions: jax.Array  # [B S] int32, within the document
    rope: ops.RopeTable  # [B S qk_rope_head_dim]
    far_rope: ops.RopeTable | None  # that of layers that compress; None without
    row: sequences.Row | None  # where sequences are split: of whole ones


@flax.struct.dataclass
class Seen:
    """What weights change by beside the gradient, of each stack."""

    load: dict[str, jax.Array]  # [L E] int32: how many tokens chose each expert
    top_score: dict[str, jax.Array]  # [L N] float32: the largest score of each head, or 0; empty without `qk_clip`

    def joined(self, other: "Seen") -> "Seen":
        """Of both batches."""
        load = jax.tree.map(jnp.add, self.load, other.load)
        return Seen(load, jax.tree.map(jnp.maximum, self.top_score, other.top_score))


@dataclasses.dataclass(frozen=True)
class Network:
    """The model bound to its config: what the step, evaluation and sampling call inside `shard_map`."""

    config: Config
    rings: tuple[int, ...] = ()  # as of `Exchange`

    @property
    def model(self) -> Model:
        """The model section of the config."""
        return self.config.model

    @functools.cached_property
    def declared(self) -> Weights:
        """Every weight, declared."""
        return layout.declare(self.model)

    @property
    def microbatches(self) -> int:
        """Parts that a device's batch is split into."""
        return 2 if self.config.schedule.kind == "batch_split" else 1

    @property
    def split_sequences(self) -> bool:
        """Whether a device has parts of sequences, and those along `expert` the whole."""
        return self.config.mesh.context_parallel

    def exchange(self, declared: Tree) -> Exchange:
        """How weights of this declaration travel. Stacked weights travel a layer at a time."""
        precision = self.config.precision
        compute, ici, dcn = map(jnp.dtype, (precision.compute, precision.reduce, precision.reduce_dcn))
        return Exchange(declared, compute, ici, dcn, precision.matmul, self.rings)

    def members(self, stack: Stack, declared: Tree) -> list[schedule.Member]:
        """The layers of a turn, of a stack declared like this."""
        each = zip(stack.kinds, stack.turns(params_lib.unstacked(declared)), strict=True)
        return [schedule.Member(self.layer(kind), self.exchange(one)) for kind, one in each]

    def chain(self, stack: Stack, declared: Tree) -> Callable:
        """The schedule of config: (stacked weights, gradients so far, given, streams, contexts) -> (streams, seen)."""
        chosen = self.config.schedule
        scheduled = schedule.batch_split if chosen.kind == "batch_split" else schedule.plain
        layers = scheduled(self.members(stack, declared), chosen.on_device, chosen.offload)

        def run(weights, so_far, given, xs, contexts):
            xs, seen = layers(stack.turns(weights), stack.turns(so_far), stack.split(given), xs, contexts)
            return xs, stack.join(seen)

        return run

    def layer(self, kind: Kind) -> schedule.Layer:
        """A dense or an MoE layer."""
        c = self.model
        scored = self.config.optimizer.qk_clip is not None
        attend = functools.partial(attention.attend, c, scored)
        if kind.ratio is not None:
            attend = functools.partial(compressed.attend, c, kind.ratio)
        attend = schedule.Stage("attention", attend)

        def observe(kepts: list[dict]) -> dict:
            of_scores = {"top_score": functools.reduce(jnp.maximum, [k["top_score"] for k in kepts])} if scored else {}
            return of_scores if kind.dense else {"load": sum(moe.load(c, k["routing"][0]) for k in kepts)} | of_scores

        if kind.dense:
            mlp = schedule.Stage("mlp", functools.partial(moe.dense, c))
            ends = {"combine": _same, "uncombine": _same, "spread": lambda _, dy: dy, "pending": _same}
            return schedule.Layer((attend, mlp), **ends, observe=observe, always=("selection",))
        capacity = self.config.schedule.capacity
        dispatch = schedule.Stage(
            "dispatch", functools.partial(moe.dispatch, c, self.config.precision.float8), leave=moe.beside_stream
        )
        experts = schedule.Stage("experts", functools.partial(moe.experts, c), functools.partial(moe.take, capacity))
        pending = functools.partial(moe.pending, c, self.config.precision.float8, capacity)
        return schedule.Layer(
            (attend, dispatch, experts),
            combine=functools.partial(moe.combine, c),
            uncombine=functools.partial(moe.uncombine, self.config.precision.float8),
            spread=functools.partial(moe.spread, c, pending),
            pending=pending,
            observe=observe,
            awaited=moe.beside_stream,
            always=("selection", "routing"),
        )

    # -------------------------------------------------------------------------------- forward

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """[V D], [B S] -> [B S D] in the compute dtype. Negative tokens read as token 0; nothing may depend on them."""
        return jnp.take(table, jnp.maximum(tokens, 0), axis=0)

    def enter(self, table: jax.Array, tokens: jax.Array) -> Stream:
        """What enters the first layer."""
        return residual.enter(self.model, self.embed(table, tokens))

    def trunk(self, weights: Weights, so_far: Weights, bias: dict, table: jax.Array, batches: Sequence[dict]):
        """All layers of the main model on microbatches -> streams before the final norm, stack -> what was seen."""
        contexts = [self.context(b) for b in batches]
        xs, seen = [self.enter(table, b["tokens"]) for b in batches], {}
        engrams = {i: (weights.engrams[str(i)], so_far.engrams[str(i)]) for i in self.model.engram_layer_ids}
        found = {
            i: self.look_up(i, w.table, before.table, bias["engrams"], contexts) for i, (w, before) in engrams.items()
        }
        for name, stack in layout.stacks(self.model).items():
            if stack.engram is not None:
                xs = self.remember(stack.engram, engrams[stack.engram], xs, found[stack.engram], contexts)
            with jax.named_scope(name):
                chain = self.chain(stack, self.declared.stack(name))
                xs, seen[name] = chain(weights.stack(name), so_far.stack(name), bias.get(name), xs, contexts)
        return xs, contexts, seen

    def look_up(self, layer: int, table, so_far, classes: jax.Array, contexts: Sequence[Context]) -> list[jax.Array]:
        """What the Engram of a layer has of the tokens of each microbatch, [B S engram_dim], in its table's shards.

        `so_far` is as of `tables.look_up`.
        """
        c = self.model
        traffic = tables.Traffic(self.config.schedule.capacity, jnp.dtype(self.config.precision.compute))
        tokens, segments = (jnp.concatenate([getattr(x, k) for x in contexts]) for k in ("tokens", "segments"))
        with jax.named_scope("look_up"):
            rows = engram.rows(c, layer, classes, tokens, segments)
            wanted = jnp.broadcast_to(segments[..., None] > 0, rows.shape)
            found = tables.look_up(table, so_far, rows, wanted, traffic)
            return jnp.split(found.reshape(*tokens.shape, c.engram_dim), len(contexts))

    def remember(self, layer: int, own: tuple[engram.Engram, engram.Engram], xs, found, contexts) -> list[Stream]:
        """The streams of all microbatches with what the Engram of a layer adds to them. Only its input is kept.

        Its `own` are its weights, and gradients of these so far.
        """

        def run(own, xs, found):
            w = self.fetch_engram(layer, *own)
            each = zip(xs, found, contexts, strict=True)
            return [engram.remember(self.model, w, x, of_x, context.segments) for x, of_x, context in each]

        everything = "everything" in self.config.schedule.keep
        policy = schedule.recompute_nothing if everything else None
        with jax.named_scope("engram"):
            return jax.checkpoint(run, policy=policy)(tuple(map(_without_table, own)), xs, found)

    def fetch_engram(self, layer: int, weights: engram.Engram, so_far: engram.Engram) -> engram.Engram:
        """The weights of a layer's Engram, gathered, but for its table, which stays where it is."""
        exchange = self.exchange(_without_table(self.declared.engrams[str(layer)]))
        shards = _without_table(weights)
        return exchange.fetch(shards, exchange.quantize(shards), _without_table(so_far))

    def tapes(self, weights: Weights, bias: dict, batch: dict) -> dict[str, list[schedule.Tape]]:
        """Stack -> what each kind of layer could hand to its backward pass, of one microbatch twice: for its shapes."""
        table = self.outer(weights, params_lib.no_grads(weights)).embed
        first = self.split(batch)[0]
        x, context = self.enter(table, first["tokens"]), self.context(first)
        found = {}
        for name, stack in layout.stacks(self.model).items():
            members = self.members(stack, self.declared.stack(name))
            of_kinds = stack.turns(weights.stack(name)), stack.split(bias.get(name))
            found[name] = [self._tape(*of_kind, x, context) for of_kind in zip(members, *of_kinds, strict=True)]
        return found

    def _tape(self, member: schedule.Member, stacked: Tree, given: Tree, x: Stream, context: Context) -> schedule.Tape:
        shards, of_layer = schedule.at((stacked, given), 0)
        w = member.exchange.gather(shards, member.exchange.quantize(shards))
        xs, given = [x, member.layer.pending(x)], [schedule.Given(of_layer, context)] * 2
        return schedule.forward(member.layer, w, schedule.nothing_later, given, xs, [{}, {}], 0)[1]

    def context(self, batch: dict) -> Context:
        """What the layers are given of a microbatch."""
        c, segments, positions = self.model, batch["segments"], batch["positions"]
        theta = c.rope_theta if c.compress_ratios is None else c.compress_rope_theta
        scaled = ops.rope_table(c.qk_rope_head_dim, theta, c.rope_scaling, positions)
        if c.compress_ratios is not None:
            near = ops.rope_table(c.qk_rope_head_dim, c.rope_theta, None, positions)
            return Context(batch["tokens"], segments, positions, near, scaled, None)
        row = None
        if self.split_sequences:
            whole, places = sequences.whole((segments, positions))
            row = sequences.Row(whole, ops.rope_table(c.qk_rope_head_dim, theta, c.rope_scaling, places))
        return Context(batch["tokens"], segments, positions, scaled, None, row)

    def mtp(self, own, outer, xs, contexts, batches):
        """The MTP modules: of each depth its head norm, and hidden states and targets by microbatch; the last streams,
        and what was seen in all. Their `own` are weights, gradients of these so far, and router biases."""
        (weights, so_far, bias), (table, norm) = own, outer
        found, seen = [], []
        targets = [b["targets"] for b in batches]
        declared = self.declared.mtp
        chain, entry = (
            self.chain(Stack((Kind(self.model.mtp_ratio),), 1), declared.layer),
            self.exchange(_without_layer(params_lib.unstacked(declared))),
        )
        for depth in range(self.model.num_nextn_predict_layers):
            shards, before = schedule.at((_without_layer(weights), _without_layer(so_far)), depth)
            w = entry.fetch(shards, entry.quantize(shards), before)
            xs = [self._enter_mtp(w, table, norm, x, t) for x, t in zip(xs, targets, strict=True)]
            present = [self._only_before(t, c) for t, c in zip(targets, contexts, strict=True)]
            of_layer = jax.tree.map(lambda a, i=depth: a[i : i + 1], (weights.layer, so_far.layer, bias))
            with jax.named_scope("mtp"):
                xs, of_depth = chain(*of_layer, xs, present)
            targets = [self._ahead(t, b["segments"]) for t, b in zip(targets, batches, strict=True)]
            norm = w.head_norm
            found.append((norm, [residual.leave(self.model, w.hyper, x) for x in xs], targets))
            seen.append(of_depth)
        return found, xs, jax.tree.map(lambda *of_depths: jnp.concatenate(of_depths), *seen)

    def _enter_mtp(self, w: Mtp, table, norm, x: Stream, ahead: jax.Array) -> Stream:
        """Joins what the head was given, or each stream before it, with the next token, `ahead` [B S] (V3, eq. 21)."""
        eps = self.model.rms_norm_eps
        embedded = ops.rms_norm(self.embed(table, ahead), w.embed_norm, eps)
        if (of_streams := w.of_streams) is not None:
            token = ops.matmul("bsc,cd->bsd", embedded, w.projection)

            def join(h: jax.Array) -> jax.Array:
                return token + ops.matmul("bsc,cd->bsd", ops.rms_norm(h, w.hidden_norm, eps), of_streams)

            return residual.each(x, join)
        hidden = ops.rms_norm(ops.rms_norm(x.h, norm, eps), w.hidden_norm, eps)
        joined = jnp.concatenate([embedded, hidden], axis=-1)
        return dataclasses.replace(x, h=ops.matmul("bsc,cd->bsd", joined, w.projection))

    def _only_before(self, ahead: jax.Array, context: Context) -> Context:
        """Makes padding of the positions that nothing follows: there is no token for them to join."""
        segments, row = jnp.where(ahead < 0, 0, context.segments), context.row
        if row is not None:
            row = dataclasses.replace(row, segments=sequences.whole(segments))
        return dataclasses.replace(context, segments=segments, row=row)

    def outer(self, weights: Weights, so_far: Weights) -> Outer:
        """What is neither of a layer nor of an MTP module, and not the head, gathered."""
        return Outer(*self._fetch(Outer._fields, weights, so_far))

    def head(self, weights: Weights, so_far: Weights, table: jax.Array) -> jax.Array:
        """The head, gathered, [D V]: of a model that has none, the embedding's `table`, transposed."""
        (head,) = self._fetch(("head",), weights, so_far)
        return table.T if head is None else head

    def _fetch(self, names: Sequence[str], weights: Weights, so_far: Weights) -> list[Tree]:
        declared, shards, before = ({n: getattr(t, n) for n in names} for t in (self.declared, weights, so_far))
        exchange = self.exchange(declared)
        w = exchange.fetch(shards, exchange.quantize(shards), before)
        return [w[n] for n in names]

    def split(self, batch: dict) -> list[dict]:
        """The microbatches of a device's batch: two for batch_split, else one."""
        parts = self.microbatches
        return [jax.tree.map(lambda a, i=i: jnp.split(a, parts)[i], batch) for i in range(parts)]

    # ----------------------------------------------------------------------------------- loss

    def objective(self, weights: Weights, so_far: Weights, bias: dict, batch: dict, scales: dict[str, jax.Array]):
        """The loss of one device's batch, to be differentiated with respect to `so_far`.

        Args:
          weights: this device's shards.
          so_far: gradients of the parts before, at first `params.no_grads`. The gradient with respect to these is
            their sum with that of the weights (`maxds.params` says why).
          bias: as `router_bias`.
          batch: int32 [B S] `tokens`, `targets` (-1: none), `segments`, `positions`.
          scales: what each term's sum is multiplied by: its coefficient / its global weight.

        Returns:
          sum of scale * sum over the terms; {term: sum}, what was seen.
        """
        table, hyper, norm = self.outer(weights, so_far)
        batches = self.split(batch)
        xs, contexts, seen = self.trunk(weights, so_far, bias, table, batches)
        read = {"main": (norm, [residual.leave(self.model, hyper, x) for x in xs], [b["targets"] for b in batches])}
        if weights.mtp is not None:
            own = weights.mtp, so_far.mtp, bias.get("mtp")
            found, xs, seen["mtp"] = self.mtp(own, (table, norm), xs, contexts, batches)
            read |= {mtp_term(depth): of_depth for depth, of_depth in enumerate(found)}
        total, terms = self._head_losses(weights, so_far, table, read, scales)
        for name in ("balance", "indexer") if self.model.index_topk else ("balance",):
            terms[name] = sum(getattr(x, name) for x in xs)  # the last streams carry that of all layers, MTP's too
            total += scales[name] * terms[name]
        by_name = ({k: of[name] for k, of in seen.items() if name in of} for name in ("load", "top_score"))
        return total, (jax.tree.map(lax.stop_gradient, terms), Seen(*by_name))

    def _head_losses(self, weights, so_far, table, read, scales) -> tuple[jax.Array, dict[str, Any]]:
        """What the head finds of what it reads, by term: norm, hidden states and targets by microbatch.

        The barrier is for the backward pass: the head's gradient, float32 [D V], is scattered before that of a layer is
        looked for. Left to itself, TPU's compiler would do so last, and keep the whole of it meanwhile.
        """
        before, hs = schedule.barrier(so_far.head, {term: hs for term, (_, hs, _) in read.items()})
        head = self.head(weights, dataclasses.replace(so_far, head=before), table)
        total, terms = jnp.zeros(()), {}
        for term, (norm, _, targets) in read.items():
            z_loss = scales["z_loss"] if term == "main" else jnp.zeros(())
            more, sums = self._head_loss(head, norm, hs[term], targets, (scales[term], z_loss))
            total, terms[term] = total + more, sums["nll"]
            terms |= {"z_loss": sums["z"]} if term == "main" else {}
        return total, terms

    def _head_loss(self, head, norm, hs, targets, weights):
        h = jnp.concatenate([h.reshape(-1, h.shape[-1]) for h in hs])
        h = ops.rms_norm(h, norm, self.model.rms_norm_eps)
        joined = jnp.concatenate([t.reshape(-1) for t in targets])
        with jax.named_scope("head"):
            return ops.cross_entropy(h, head, joined, weights, self.config.loss.chunk_tokens)

    def coefficients(self) -> dict[str, float]:
        """Term -> what it counts for in the objective. Terms of coefficient 0 are disabled."""
        loss, modules = self.config.loss, self.model.num_nextn_predict_layers
        mtp = {mtp_term(depth): loss.mtp / modules for depth in range(modules)}
        indexer = {"indexer": loss.indexer} if self.model.index_topk else {}
        return {"main": 1.0, "z_loss": loss.z_loss, "balance": loss.balance} | indexer | mtp

    def counts(self, batch: dict) -> dict[str, jax.Array]:
        """Term -> what its sum is averaged over, int32, of this device: tokens (with a target, or real), or sequences.

        `balance` and `indexer` are sums over layers: what a layer learns by does not depend on how many there are.
        """
        targets, segments = batch["targets"], batch["segments"]
        tokens, present = _count(targets >= 0), jnp.any(segments > 0, axis=-1)
        if self.split_sequences:  # the first device counts for all that have parts of them
            present = lax.pmax(present, "expert") & (lax.axis_index("expert") == 0)
        found = {"main": tokens, "z_loss": tokens, "balance": _count(present)}
        if self.model.index_topk:
            found["indexer"] = _count(segments > 0)
        for depth in range(self.model.num_nextn_predict_layers):
            targets = self._ahead(targets, segments)
            found[mtp_term(depth)] = _count(targets >= 0)
        return found

    def _ahead(self, targets: jax.Array, segments: jax.Array) -> jax.Array:
        """As `shift`, of this device's tokens [B S]."""
        if self.split_sequences:
            return sequences.own(shift(*sequences.whole((targets, segments))))
        return shift(targets, segments)

    def logits(self, weights: Weights, bias: dict, batch: dict) -> jax.Array:
        """Logits [B S V] float32 of one device's batch."""
        none = params_lib.no_grads(weights)
        table, hyper, norm = self.outer(weights, none)
        xs, _, _ = self.trunk(weights, none, bias, table, self.split(batch))
        head = self.head(weights, none, table)
        h = jnp.concatenate([residual.leave(self.model, hyper, x) for x in xs])
        h = ops.rms_norm(h, norm, self.model.rms_norm_eps)
        return jnp.einsum("bsd,dv->bsv", h, head, preferred_element_type=jnp.float32)


def _without_layer(mtp: Mtp) -> Mtp:
    return dataclasses.replace(mtp, layer=None)


def _without_table(w: engram.Engram) -> engram.Engram:
    return dataclasses.replace(w, table=None)


def mtp_term(depth: int) -> str:
    """The name of the loss term of an MTP module, counted from 0."""
    return f"mtp_{depth + 1}"


def shift(targets: jax.Array, segments: jax.Array) -> jax.Array:
    """Targets [… S] one further ahead; -1 where that leaves the document or the row."""
    same = segments[..., 1:] == segments[..., :-1]
    pad = [(0, 0)] * (targets.ndim - 1) + [(0, 1)]
    return jnp.pad(jnp.where(same, targets[..., 1:], -1), pad, constant_values=-1)


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask, dtype=jnp.int32)


def _same(x: Tree) -> Tree:
    return x

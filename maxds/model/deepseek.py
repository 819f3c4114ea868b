"""The model: embedding -> stacks of layers -> head, and MTP modules beside it -> losses.

The layers of a stack are scanned over. They are all alike (dense layers, then MoE layers), or kinds take turns, as in
V4: what is scanned over then is one turn, and the layers that make no whole turn at the end are a stack of their own.
What Engram adds to the residual stream, it adds between two stacks: the layers from there on are a stack of their own.

Losses are sums over this device's tokens, each with the weight (a count) that the step divides it
by once it is known for the whole global batch: so neither the number of devices nor the number of
parts that a batch is accumulated over changes what a term is worth.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from maxds import params as params_lib
from maxds import schedule, tables
from maxds.config import Config, Model
from maxds.model import attention, compressed, engram, moe, ops, residual
from maxds.model.residual import Stream
from maxds.params import Exchange, Param, Tree


@flax.struct.dataclass
class Mtp:
    """Weights of the MTP modules, stacked over depth (V3, section 2.2). Embedding and head are the model's."""

    embed_norm: Tree  # [D]
    hidden_norm: Tree  # [D]
    projection: Tree  # [2D D]: of the embedding of the token ahead, then the hidden state
    layer: Any  # {attention, dispatch, experts}
    head_norm: Tree  # [D]: of what head and next module are given; not in the paper, but in the released weights


@flax.struct.dataclass
class Weights:
    """Every weight of the model. Layers are stacked on a leading axis; kinds that take turns are called "0", "1", …"""

    embed: Tree  # [V D]
    dense_layers: Tree  # {attention, mlp}, or None
    hash_layers: Tree  # {attention, dispatch, experts} whose experts a table chooses, or None
    moe_layers: Tree  # {attention, dispatch, experts}
    last_layers: Tree  # the same, of the turn that is not whole; or None
    cut_layers: Any  # stack -> as these, of those that an Engram in their midst parts; or None
    engrams: Any  # "layer" -> engram.Engram; or None
    mtp: Any  # Mtp, or None
    hyper: Tree | None  # residual.Connection: joins the streams
    norm: Tree  # [D]
    head: Tree | None  # [D V]; None: the embedding, transposed

    def stack(self, name: str) -> Tree:
        """The layers of one of `stacks`."""
        return getattr(self, name) if name in STACKS else self.cut_layers[name]


class Kind(NamedTuple):
    """What a layer is made of."""

    ratio: int | None  # of Model.compress_ratios; None: multi-head latent attention
    dense: bool = False


class Stack(NamedTuple):
    """Layers that are scanned over: `count` turns of these kinds."""

    kinds: tuple[Kind, ...]
    count: int
    engram: int | None = None  # the first layer's number, where it has an Engram

    def turns(self, tree: Tree) -> list[Tree]:
        """What belongs to each kind, of something that is stacked like the weights."""
        return [tree] if len(self.kinds) == 1 else [tree[str(i)] for i in range(len(self.kinds))]

    def split(self, layers: Tree) -> list[Tree]:
        """What belongs to each kind, of arrays with a leading axis of all layers."""
        shape = self.count, len(self.kinds)
        of_turns = jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), layers)
        return [jax.tree.map(lambda a, i=i: a[:, i], of_turns) for i in range(len(self.kinds))]

    def join(self, of_kinds: list[Tree]) -> Tree:
        """The inverse of `split`."""
        return jax.tree.map(lambda *a: jnp.stack(a, 1).reshape(-1, *a[0].shape[1:]), *of_kinds)


STACKS = "dense_layers", "hash_layers", "moe_layers", "last_layers"


def stacks(c: Model) -> dict[str, Stack]:
    """The layers of the main model, in order. Where an Engram cuts one, the rest has its first layer in its name."""
    ratios = c.compress_ratios or (None,) * c.num_hidden_layers
    kinds = [Kind(ratio, dense=i < c.first_k_dense_replace) for i, ratio in enumerate(ratios)]
    routed = c.first_k_dense_replace + c.num_hash_layers
    bounds = (0, c.first_k_dense_replace), (c.first_k_dense_replace, routed), (routed, c.num_hidden_layers)
    found = {}
    for name, (first, end) in zip(STACKS, bounds, strict=False):
        cuts = [first, *(i for i in c.engram_layer_ids if first < i < end), end]
        for start, stop in itertools.pairwise(cuts):
            suffix, own = "" if start == first else f"_{start}", tuple(kinds[start:stop])
            turn = len(own) if name == "hash_layers" else _period(own)
            whole = len(own) // turn if own else 0
            remembers = start if start in c.engram_layer_ids else None
            found |= {name + suffix: Stack(own[:turn], whole, remembers)} if own else {}
            found |= {"last_layers" + suffix: Stack(left, 1)} if (left := own[whole * turn :]) else {}
    return found


def _period(kinds: tuple[Kind, ...]) -> int:
    """After how many layers they repeat; the last turn need not be whole."""
    return next((n for n in range(1, len(kinds)) if kinds[n:] == kinds[: len(kinds) - n]), len(kinds))


class Outer(NamedTuple):
    """Gathered weights around the layers."""

    embed: jax.Array  # [V D]
    hyper: residual.Connection | None
    norm: jax.Array  # [D]
    head: jax.Array  # [D V]


@flax.struct.dataclass
class Context:
    """What every layer is given of a microbatch."""

    tokens: jax.Array  # [B S] int32
    segments: jax.Array  # [B S] int32; 0: padding
    positions: jax.Array  # [B S] int32, within the document
    rope: ops.RopeTable  # [B S qk_rope_head_dim]
    far_rope: ops.RopeTable | None  # that of layers that compress; None without


def declare(c: Model) -> Weights:
    """Every weight's shape, sharding and start. Allocates nothing."""
    d, std, modules = c.hidden_size, c.initializer_range, c.num_nextn_predict_layers
    projection = Param((2 * d, d), P("fsdp"), "io", std)
    norms = {name: attention.norm(d) for name in ("embed_norm", "hidden_norm", "head_norm")}
    mtp = Mtp(projection=projection, layer=_declare_layer(c, Kind(None)), **norms) if modules else None
    layers = {name: _declare_stack(c, stack) for name, stack in stacks(c).items()}
    whole = {name: layers.pop(name, None) for name in STACKS}
    return Weights(
        embed=Param((c.vocab_size, d), P(None, "fsdp"), std=std),
        **whole,
        cut_layers=layers or None,
        engrams={str(i): engram.declare(c, i) for i in c.engram_layer_ids} or None,
        mtp=params_lib.stacked(mtp, modules) if mtp else None,
        hyper=residual.declare_last(c),
        norm=attention.norm(d),
        head=None if c.tie_word_embeddings else Param((d, c.vocab_size), P("fsdp"), std=std),
    )


def _declare_stack(c: Model, stack: Stack) -> dict[str, Tree]:
    layers = [params_lib.stacked(_declare_layer(c, kind), stack.count) for kind in stack.kinds]
    return layers[0] if len(layers) == 1 else {str(i): layer for i, layer in enumerate(layers)}


def _declare_layer(c: Model, kind: Kind) -> dict[str, Tree]:
    attend = attention.declare(c) if kind.ratio is None else compressed.declare(c, kind.ratio)
    if kind.dense:
        return {"attention": attend, "mlp": moe.declare_dense(c)}
    return {"attention": attend, "dispatch": moe.declare_dispatch(c), "experts": moe.declare_experts(c)}


def router_bias(c: Model) -> dict[str, jax.Array]:
    """What the model reads and no gradient changes.

    The selection bias of each expert, float32 [layers E], zero to start with; nothing where the model has none. Of
    `hash_layers`, the experts of each token, int32 [layers V K]: drawn, and the same for all runs. Of `engrams`, the
    class of each token, int32 [V]: of no meaning until a tokenizer is asked, unless each token is its own.
    """
    sizes = {name: stack.count * len(stack.kinds) for name, stack in stacks(c).items()}
    sizes["mtp"] = c.num_nextn_predict_layers
    routed = [k for k in sizes if k.startswith(("moe_layers", "last_layers", "mtp")) and sizes[k] and c.has_router_bias]
    found = {k: jnp.zeros((sizes[k], c.n_routed_experts), jnp.float32) for k in routed}
    if c.engram_layer_ids:
        found["engrams"] = jnp.arange(c.vocab_size, dtype=jnp.int32) % (c.engram_compressed_vocab_size or c.vocab_size)
    if c.num_hash_layers == 0:
        return found

    def table(key: jax.Array) -> jax.Array:
        drawn = jax.random.uniform(key, (c.vocab_size, c.n_routed_experts))
        return lax.top_k(drawn, c.num_experts_per_tok)[1].astype(jnp.int32)

    tables = lax.map(table, jax.random.split(jax.random.key(0), c.num_hash_layers))
    hashed = [k for k in sizes if k.startswith("hash_layers")]
    ends = list(itertools.accumulate(sizes[k] for k in hashed))
    return found | {k: tables[end - sizes[k] : end] for k, end in zip(hashed, ends, strict=True)}


def bias_name(stack: str) -> str:
    """The path of an array of `router_bias`, among those of weights."""
    if stack == "engrams":
        return "engrams.classes"
    what = "expert_table" if stack.startswith("hash_layers") else "router_bias"
    return f"{stack}.{what}" if stack in (*STACKS, "mtp") else f"cut_layers.{stack}.{what}"


def paths(c: Model) -> list[str]:
    """Of every weight and router bias."""
    return [*map(bias_name, jax.eval_shape(lambda: router_bias(c))), *params_lib.flatten(declare(c))]


# ------------------------------------------------------------------------------------------ layers


@dataclasses.dataclass(frozen=True)
class Network:
    """The model bound to its config: what the step, evaluation and sampling call inside `shard_map`."""

    config: Config

    @property
    def model(self) -> Model:
        """The model section of the config."""
        return self.config.model

    @functools.cached_property
    def declared(self) -> Weights:
        """Every weight, declared."""
        return declare(self.model)

    @property
    def microbatches(self) -> int:
        """Parts that a device's batch is split into."""
        return 2 if self.config.schedule.kind == "batch_split" else 1

    @property
    def float8(self) -> bool:
        """Whether matmuls are in float8."""
        return self.config.precision.matmul == "fp8"

    def exchange(self, declared: Tree) -> Exchange:
        """How weights of this declaration travel. Stacked weights travel a layer at a time."""
        precision = self.config.precision
        compute, ici, dcn = map(jnp.dtype, (precision.compute, precision.reduce, precision.reduce_dcn))
        return Exchange(declared, compute, ici, dcn, self.float8)

    def members(self, stack: Stack, declared: Tree) -> list[schedule.Member]:
        """The layers of a turn, of a stack declared like this."""
        each = zip(stack.kinds, stack.turns(params_lib.unstacked(declared)), strict=True)
        return [schedule.Member(self.layer(kind), self.exchange(one)) for kind, one in each]

    def chain(self, stack: Stack, declared: Tree) -> Callable:
        """The schedule of config, over a stack: (stacked weights, given, streams, contexts) -> (streams, seen)."""
        chosen = self.config.schedule
        scheduled = schedule.batch_split if chosen.kind == "batch_split" else schedule.plain
        layers = scheduled(self.members(stack, declared), chosen.on_device, chosen.offload)

        def run(weights, given, xs, contexts):
            xs, seen = layers(stack.turns(weights), stack.split(given), xs, contexts)
            return xs, stack.join(seen)

        return run

    def layer(self, kind: Kind) -> schedule.Layer:
        """A dense or an MoE layer."""
        c = self.model
        attend = functools.partial(attention.attend, c)
        if kind.ratio is not None:
            attend = functools.partial(compressed.attend, c, kind.ratio)
        attend = schedule.Stage("attention", attend)
        if kind.dense:
            mlp = schedule.Stage("mlp", functools.partial(moe.dense, c))
            return schedule.Layer(
                (attend, mlp), _same, lambda kept, dy: dy, pending=_same, observe=lambda kept: {}, always=("selection",)
            )
        capacity = self.config.schedule.capacity
        dispatch = schedule.Stage("dispatch", functools.partial(moe.dispatch, c, capacity, self.float8))
        experts = schedule.Stage("experts", functools.partial(moe.experts, c))
        return schedule.Layer(
            (attend, dispatch, experts),
            combine=functools.partial(moe.combine, c, self.float8),
            uncombine=functools.partial(moe.uncombine, c, capacity, self.float8),
            pending=functools.partial(moe.pending, c, capacity),
            observe=lambda kept: {"load": moe.load(c, kept["routing"][0])},
            always=("selection", "routing"),
        )

    # -------------------------------------------------------------------------------- forward

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """[V D], [B S] -> [B S D] in the compute dtype. Negative tokens read as token 0; nothing may depend on them."""
        return jnp.take(table, jnp.maximum(tokens, 0), axis=0)

    def enter(self, table: jax.Array, tokens: jax.Array) -> Stream:
        """What enters the first layer."""
        return residual.enter(self.model, self.embed(table, tokens))

    def trunk(self, weights: Weights, bias: dict, table: jax.Array, batches: Sequence[dict]):
        """All layers of the main model on microbatches -> streams before the final norm, {stack: expert load [L E]}."""
        contexts = [self.context(b) for b in batches]
        xs, loads = [self.enter(table, b["tokens"]) for b in batches], {}
        found = {i: self.look_up(i, weights, bias["engrams"], contexts) for i in self.model.engram_layer_ids}
        for name, stack in stacks(self.model).items():
            if stack.engram is not None:
                xs = self.remember(stack.engram, weights, xs, found[stack.engram], contexts)
            with jax.named_scope(name):
                chain = self.chain(stack, self.declared.stack(name))
                xs, seen = chain(weights.stack(name), bias.get(name), xs, contexts)
            loads |= {name: seen["load"]} if "load" in seen else {}
        return xs, contexts, loads

    def look_up(self, layer: int, weights: Weights, classes: jax.Array, contexts: Sequence[Context]) -> list[jax.Array]:
        """What the Engram of a layer has of the tokens of each microbatch, [B S engram_dim]."""
        c, precision, name = self.model, self.config.precision, str(layer)
        dtypes = jnp.dtype(precision.compute), jnp.dtype(precision.reduce_dcn)
        traffic = tables.Traffic(self.config.schedule.capacity, *dtypes)
        tokens, segments = (jnp.concatenate([getattr(x, k) for x in contexts]) for k in ("tokens", "segments"))
        with jax.named_scope("look_up"):
            rows = engram.rows(c, layer, classes, tokens, segments)
            wanted = jnp.broadcast_to(segments[..., None] > 0, rows.shape)
            found = tables.look_up(weights.engrams[name].table, rows, wanted, traffic)
            return jnp.split(found.reshape(*tokens.shape, c.engram_dim), len(contexts))

    def remember(self, layer: int, weights: Weights, xs, found, contexts) -> list[Stream]:
        """The streams of all microbatches with what the Engram of a layer adds to them. Only its input is kept."""
        exchange = self.exchange(_without_table(self.declared.engrams[str(layer)]))

        def run(shards, xs, found):
            w = exchange.fetch(shards, exchange.quantize(shards))
            each = zip(xs, found, contexts, strict=True)
            return [engram.remember(self.model, w, x, of_x, context.segments) for x, of_x, context in each]

        everything = "everything" in self.config.schedule.keep
        policy = schedule.recompute_nothing if everything else None
        with jax.named_scope("engram"):
            return jax.checkpoint(run, policy=policy)(_without_table(weights.engrams[str(layer)]), xs, found)

    def tapes(self, weights: Weights, bias: dict, batch: dict) -> dict[str, list[schedule.Tape]]:
        """Stack -> what each kind of layer could hand to its backward pass, of one microbatch twice: for its shapes."""
        table = self.outer(weights).embed
        first = self.split(batch)[0]
        x, context = self.enter(table, first["tokens"]), self.context(first)
        found = {}
        for name, stack in stacks(self.model).items():
            members = self.members(stack, self.declared.stack(name))
            of_kinds = stack.turns(weights.stack(name)), stack.split(bias.get(name))
            found[name] = [self._tape(*of_kind, x, context) for of_kind in zip(members, *of_kinds, strict=True)]
        return found

    def _tape(self, member: schedule.Member, stacked: Tree, given: Tree, x: Stream, context: Context) -> schedule.Tape:
        shards, of_layer = schedule.at((stacked, given), 0)
        w = member.exchange.gather(shards, member.exchange.quantize(shards))
        return schedule.forward(member.layer, w, [schedule.Given(of_layer, context)] * 2, [x, member.layer.pending(x)])[
            1
        ]

    def context(self, batch: dict) -> Context:
        """What the layers are given of a microbatch."""
        c, segments, positions = self.model, batch["segments"], batch["positions"]
        theta = c.rope_theta if c.compress_ratios is None else c.compress_rope_theta
        scaled = ops.rope_table(c.qk_rope_head_dim, theta, c.rope_scaling, positions)
        if c.compress_ratios is None:
            return Context(batch["tokens"], segments, positions, scaled, None)
        near = ops.rope_table(c.qk_rope_head_dim, c.rope_theta, None, positions)
        return Context(batch["tokens"], segments, positions, near, scaled)

    def mtp(self, weights: Mtp, bias, outer, xs, contexts, batches):
        """The MTP modules: of each depth, its head norm, streams and targets by microbatch; expert loads [depths E]."""
        table, norm = outer
        found, loads = [], []
        targets = [b["targets"] for b in batches]
        declared = self.declared.mtp
        chain, entry = (
            self.chain(Stack((Kind(None),), 1), declared.layer),
            self.exchange(_without_layer(params_lib.unstacked(declared))),
        )
        for depth in range(self.model.num_nextn_predict_layers):
            shards = schedule.at(_without_layer(weights), depth)
            w = entry.fetch(shards, entry.quantize(shards))
            xs = [self._enter_mtp(w, table, norm, x, t) for x, t in zip(xs, targets, strict=True)]
            present = [self._only_before(t, c) for t, c in zip(targets, contexts, strict=True)]
            layer, layer_bias = jax.tree.map(lambda a, i=depth: a[i : i + 1], (weights.layer, bias))
            with jax.named_scope("mtp"):
                xs, seen = chain(layer, layer_bias, xs, present)
            targets = [shift(t, b["segments"]) for t, b in zip(targets, batches, strict=True)]
            norm = w.head_norm
            found.append((norm, xs, targets))
            loads.append(seen["load"])
        return found, jnp.concatenate(loads)

    def _enter_mtp(self, w: Mtp, table, norm, x: Stream, ahead: jax.Array) -> Stream:
        """Joins what the head before was given with the embedding of the next token, `ahead` [B S] (V3, eq. 21)."""
        eps = self.model.rms_norm_eps
        embedded = ops.rms_norm(self.embed(table, ahead), w.embed_norm, eps)
        hidden = ops.rms_norm(ops.rms_norm(x.h, norm, eps), w.hidden_norm, eps)
        joined = jnp.concatenate([embedded, hidden], axis=-1)
        return dataclasses.replace(x, h=ops.matmul("bsc,cd->bsd", joined, w.projection))

    def _only_before(self, ahead: jax.Array, context: Context) -> Context:
        """Makes padding of the positions that nothing follows: there is no token for them to join."""
        return dataclasses.replace(context, segments=jnp.where(ahead < 0, 0, context.segments))

    def outer(self, weights: Weights) -> Outer:
        """What is neither of a layer nor of an MTP module, gathered."""
        declared, names = self.declared, ("embed", "hyper", "norm", "head")
        exchange = self.exchange({n: getattr(declared, n) for n in names})
        shards = {n: getattr(weights, n) for n in names}
        w = exchange.fetch(shards, exchange.quantize(shards))
        return Outer(w["embed"], w["hyper"], w["norm"], w["embed"].T if w["head"] is None else w["head"])

    def split(self, batch: dict) -> list[dict]:
        """The microbatches of a device's batch: two for batch_split, else one."""
        parts = self.microbatches
        return [jax.tree.map(lambda a, i=i: jnp.split(a, parts)[i], batch) for i in range(parts)]

    # ----------------------------------------------------------------------------------- loss

    def objective(self, weights: Weights, bias: dict, batch: dict, scales: dict[str, jax.Array]):
        """The loss of one device's batch, to be differentiated.

        Args:
          weights: this device's shards.
          bias: as `router_bias`.
          batch: int32 [B S] `tokens`, `targets` (-1: none), `segments`, `positions`.
          scales: what each term's sum is multiplied by: its coefficient / its global weight.

        Returns:
          sum of scale * sum over the terms; {term: sum}, {stack: expert load [L E] int32}.
        """
        table, hyper, norm, head = self.outer(weights)
        batches = self.split(batch)
        xs, contexts, loads = self.trunk(weights, bias, table, batches)
        head_loss = functools.partial(self._head_loss, head)
        hs = [residual.leave(self.model, hyper, x) for x in xs]
        total, sums = head_loss(norm, hs, [b["targets"] for b in batches], (scales["main"], scales["z_loss"]))
        terms: dict[str, Any] = {"main": sums["nll"], "z_loss": sums["z"]}
        if weights.mtp is not None:
            found, loads["mtp"] = self.mtp(weights.mtp, bias.get("mtp"), (table, norm), xs, contexts, batches)
            for depth, (norm, xs, targets) in enumerate(found):
                term = mtp_term(depth)
                more, sums = head_loss(norm, [x.h for x in xs], targets, (scales[term], jnp.zeros(())))
                total, terms[term] = total + more, sums["nll"]
        for name in ("balance", "indexer") if self.model.index_topk else ("balance",):
            terms[name] = sum(getattr(x, name) for x in xs)  # the last streams carry that of all layers, MTP's too
            total += scales[name] * terms[name]
        return total, (jax.tree.map(lax.stop_gradient, terms), loads)

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
        tokens = _count(targets >= 0)
        found = {"main": tokens, "z_loss": tokens, "balance": _count(jnp.any(segments > 0, axis=-1))}
        if self.model.index_topk:
            found["indexer"] = _count(segments > 0)
        for depth in range(self.model.num_nextn_predict_layers):
            targets = shift(targets, segments)
            found[mtp_term(depth)] = _count(targets >= 0)
        return found

    def logits(self, weights: Weights, bias: dict, batch: dict) -> jax.Array:
        """Logits [B S V] float32 of one device's batch."""
        table, hyper, norm, head = self.outer(weights)
        xs, _, _ = self.trunk(weights, bias, table, self.split(batch))
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

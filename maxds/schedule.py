"""How layers are chained: `plain`, and `batch_split` with its two interleaved microbatches.

    compute | ATTENTION a | ATTENTION b | EXPERTS a  | EXPERTS b | ATTENTION a' | …   forward, one layer
    comm    |             | DISPATCH a  | DISPATCH b | COMBINE a | COMBINE b    |
                                                                 ^ b's combine is carried into the next layer

Weights travel a step ahead of their use: those of a layer's first stage during the layer before, the
others during the first stage. Gradients travel a step behind, in the mirror of that. So only what the
first stage needs is carried from layer to layer: on TPU, whatever a scan carries is copied once. What
is kept in host memory comes back during the layer above the one that needs it.

A stage is one function, `fn(w, x, given, kept=None) -> (y, kept)`, of one microbatch. Without
`kept` it computes everything and says what it wants kept for the backward pass. With `kept` it is
replayed: the kept values stand in for the work that produced them. So the backward pass of a stage
is `jax.vjp` of the same function, and what is recomputed is what was not kept.

A stage that ends with something on its way leaves to `enter` of the next what is done to it on arrival.
In the same stage, it would be due with the arrival, and before work that the arrival can hide behind.

`plain` leaves the backward pass to JAX (scan and `jax.checkpoint`): the reference for the other.
This file knows nothing of the model: `model/deepseek.py` brings the stages.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from maxds.params import Exchange, summed
from maxds.quantize import slots, with_slots

Tree = Any
Microbatches = list[Tree]


class Given(NamedTuple):
    """What a stage reads and no gradient flows to."""

    layer: Tree  # of this layer: router bias
    tokens: Tree  # of this microbatch: segment ids, positions


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step of a decoder layer, applied to one microbatch at a time."""

    name: str  # also the entry of the layer's weights that it reads
    fn: Callable[..., tuple[Tree, dict[str, Tree]]]  # what it would keep, it names
    enter: Callable[[Tree], Tree] = lambda x: x  # (what the stage before gives) -> x; reads no weights

    def __call__(self, w: Tree, x: Tree, given: Given, kept: dict | None = None) -> tuple[Tree, dict[str, Tree]]:
        """Runs the stage with its own weights, under its name in profiles."""
        with jax.named_scope(self.name):
            return self.fn(w, x, given, kept)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A decoder layer, as a schedule sees it."""

    stages: tuple[Stage, ...]
    combine: Callable[[Tree], Tree]  # ends the layer; linear
    uncombine: Callable[[Tree], Tree]  # dy -> what travels of its transpose
    spread: Callable[[dict[str, Tree], Tree], Tree]  # (kept values of one microbatch, what has arrived) -> all of it
    pending: Callable[[Tree], Tree]  # what `combine` turns back into its argument
    observe: Callable[[list[dict[str, Tree]]], Tree]  # metrics read off what the microbatches would keep
    always: tuple[str, ...] = ()  # kept whatever config says: decisions that a replay must not take again


@dataclasses.dataclass(frozen=True)
class Member:
    """One of the layers that take turns in a stack: all are like it, or two or more kinds alternate.

    What ends a layer is what the next one begins with, so `combine` and `pending` are the same for all members.
    """

    layer: Layer
    exchange: Exchange

    @functools.cached_property
    def first(self) -> Exchange:
        """How the weights of the first stage travel."""
        return self.exchange.part([self.layer.stages[0].name])

    @functools.cached_property
    def rest(self) -> Exchange:
        """And those of the other stages."""
        return self.exchange.part([stage.name for stage in self.layer.stages[1:]])


Run = Callable[
    [Sequence[Tree], Sequence[Tree], Sequence[Tree], Microbatches, Sequence[Tree]], tuple[Microbatches, list[Tree]]
]
"""(members' stacked weights, what gradients of these are added to, their stacked given, microbatches, their given)
-> (microbatches, what `observe` saw)."""


def input_name(stage: str) -> str:
    """What config calls the input of a stage."""
    return f"{stage}_input"


# ------------------------------------------------------------------------------------------ plain


def plain(members: Sequence[Member], keep: Sequence[str], offload: Sequence[str]) -> Run:
    """One layer after the other; the backward pass is JAX's."""
    layers = [_one_by_one(member, keep, offload) for member in members]

    def run(params, so_far, given, xs, contexts):
        params = summed(params, so_far)

        def block(xs, of_block):
            seen = []
            for layer, stored, own in zip(layers, *of_block, strict=True):
                xs, more = layer(xs, stored, own, contexts)
                seen.append(more)
            return xs, seen

        return lax.scan(block, xs, (_stored(members, params), list(given)))

    return run


def _one_by_one(member: Member, keep: Sequence[str], offload: Sequence[str]) -> Callable:
    """A layer, (microbatches, stored weights, given, their given) -> (microbatches, seen), that keeps what is named."""
    layer, exchange = member.layer, member.exchange
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(*layer.always, *keep),
        names_which_can_be_offloaded=offload,
        offload_src="device",
        offload_dst="pinned_host",
    )
    if "everything" in keep:
        policy = recompute_nothing

    def one_layer(xs, stored, given, contexts):
        w = exchange.fetch(*stored)
        outs, kepts = [], []
        for x, context in zip(xs, contexts, strict=True):
            kept = {}
            for stage in layer.stages:
                x = jax.tree.map(lambda a, s=stage: checkpoint_name(a, input_name(s.name)), x)
                x, more = stage(w[stage.name], stage.enter(x), Given(given, context))
                kept |= more
            outs.append(layer.combine(x))
            kepts.append(kept)
        return outs, layer.observe(kepts)

    return jax.checkpoint(one_layer, policy=policy, prevent_cse=False)


def recompute_nothing(primitive, *avals, **params) -> bool:
    """A `jax.checkpoint` policy: keeps all but gathered weights, their views, padded ones too, and casts.

    And but for what is gathered in float8: it is kept once it is cast back. JAX passes what is kept through
    `reduce_precision`, for which the largest numbers of float8_e4m3fn are infinite.
    """
    gathered = primitive.name == "all_gather" and ("fsdp" in params["axis_name"] or avals[0].dtype.itemsize == 1)
    passed_on = "optimization_barrier", "layout_constraint", "reshape", "pad", "convert_element_type", "stop_gradient"
    return not gathered and primitive.name not in passed_on


# ------------------------------------------------------------------------------------ batch split


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tape:
    """What one layer hands from its forward to its backward pass: nothing else is kept."""

    inputs: dict[str, Microbatches]  # of stages; the replay of the stage before brings what is not here
    kept: dict[str, list[dict[str, Tree]]]  # of each stage, by microbatch

    def named(self, microbatch: int) -> dict[str, Tree]:
        """What is here of a microbatch, by the names of config."""
        inputs = {input_name(stage): xs[microbatch] for stage, xs in self.inputs.items()}
        return inputs | _merged(self, microbatch)

    def only(self, names: Sequence[str]) -> "Tape":
        """Without what is not named."""
        inputs = {stage: xs for stage, xs in self.inputs.items() if input_name(stage) in names}
        kept = {s: [{n: v for n, v in k.items() if n in names} for k in by] for s, by in self.kept.items()}
        return Tape(inputs, kept)

    def joined(self, other: "Tape") -> "Tape":
        """With what another one of the same layer has."""
        kept = {s: [k | more for k, more in zip(by, other.kept[s], strict=True)] for s, by in self.kept.items()}
        return Tape(self.inputs | other.inputs, kept)


def stagger(fn: Callable[[int, Tree], Tree], xs: Microbatches, order: Sequence[int]) -> Microbatches:
    """Maps `fn(microbatch, x)` over microbatches, in order; none enters before the previous one has left.

    The barrier ties only the one's output to the next one's input: a barrier over everything
    would make a total order of the layer, and forbid the overlap that the schedule is for.
    """
    xs = list(xs)
    for n, i in enumerate(order):
        y = fn(i, xs[i])
        if n + 1 < len(order):
            y, xs[order[n + 1]] = lax.optimization_barrier((y, xs[order[n + 1]]))
        xs[i] = y
    return xs


def forward(layer: Layer, w: Tree, given: list[Given], xs: Microbatches) -> tuple[Microbatches, Tape]:
    """One layer. Enters with the combine of microbatch b pending, and leaves so."""
    inputs, kept = {}, {stage.name: [{}, {}] for stage in layer.stages}

    def run(stage: Stage, i: int, x: Tree) -> Tree:
        y, kept[stage.name][i] = stage(w[stage.name], x, given[i])
        return y

    a, b = xs
    xs = [a, layer.combine(b)]  # b's combine travels while a attends
    for stage in layer.stages:
        inputs[stage.name] = xs
        xs = stagger(functools.partial(run, stage), [stage.enter(x) for x in xs], (0, 1))
    a, b = xs
    return [layer.combine(a), b], Tape(inputs, kept)


def backward(
    layer: Layer, w: Tree, given: list[Given], tapes: tuple[Tape, Tape], dxs: Microbatches
) -> tuple[Microbatches, list, Tape]:
    """Replays what was not kept, then pulls the cotangents back through it; b goes first, for time runs backward.

        compute | attention b | attention a | experts b  | EXPERTS b   | experts a, EXPERTS a | DISPATCH b, a | …
        comm    | uncombine b | dispatch b  | dispatch a | uncombine a | DISPATCH b           | DISPATCH a    |

    Small letters are replayed, and capitals pulled back.
    A barrier stands where what travels must have arrived: left to itself, TPU's compiler sends it when it is needed.

    Args:
      tapes: of the layer, and what is on its way from host memory of that of the layer below. That is due when b's last
        stage is pulled back. First stages still need what it replaces: so it has memory of its own, and can come early.

    Returns:
      Cotangents of the layer's input, and of its weights: by microbatch, stage -> cotangents; what has arrived.
    """
    tape, below = tapes
    last = len(layer.stages) - 1
    enters, pulls, dws = {}, {}, [{}, {}]

    def enter(n: int, i: int, x: Tree) -> Tree:
        """What the stage before gives stage n of microbatch i -> what that computes with."""
        x, enters[n, i] = jax.vjp(layer.stages[n].enter, x)
        return x

    def spread(i: int, dy: Tree) -> Tree:
        """What has arrived of the cotangent of microbatch i -> that of what its last stage gave."""
        return layer.spread(_merged(tape, i), dy)

    def replay(n: int, i: int, x: Tree) -> Tree:
        """Stage n of microbatch i -> what it gives the next one: kept, or computed again."""
        stage = layer.stages[n]
        fn = functools.partial(stage, given=given[i], kept=tape.kept[stage.name][i])
        own = w[stage.name]
        y, pulls[n, i] = jax.vjp(lambda s, x: fn(with_slots(own, s), x)[0], slots(own), x)
        return tape.inputs[layer.stages[n + 1].name][i] if n < last and layer.stages[n + 1].name in tape.inputs else y

    def pull(n: int, i: int, dy: Tree) -> Tree:
        if n < last:
            (dy,) = enters[n + 1, i](dy)
        dws[i][layer.stages[n].name], dx = pulls[n, i](dy)
        return dx

    a, b = tape.inputs[layer.stages[0].name]
    da, db = dxs[0], layer.uncombine(dxs[1])
    b, db, a = lax.optimization_barrier((replay(0, 1, b), db, a))
    db = spread(1, db)
    for n in range(1, last):
        b = replay(n, 1, enter(n, 1, b))
    a, b, db = lax.optimization_barrier((replay(0, 0, a), b, db))
    for n in range(1, last):
        a = replay(n, 0, enter(n, 0, a))
    replay(last, 1, enter(last, 1, b))
    a, da, db = lax.optimization_barrier((a, da, db))
    a, da = enter(last, 0, a), layer.uncombine(da)
    db = pull(last, 1, db)
    a, da, db, below = lax.optimization_barrier((a, da, db, below))
    replay(last, 0, a)
    dxs = [pull(last, 0, spread(0, da)), db]
    for n in reversed(range(last)):
        dxs = stagger(functools.partial(pull, n), dxs, (1, 0))
    return dxs, dws, below


def batch_split(members: Sequence[Member], keep: Sequence[str], offload: Sequence[str]) -> Run:
    """Two microbatches; weights gathered a step ahead, gradients scattered a step behind, and summed two layers later.

    No layer is peeled off the two scans, so the compiler sees one forward and one backward turn of the members:
    microbatch b enters with a pending combine that adds nothing.
    """
    split = _Split(members, keep, offload)

    @jax.custom_vjp
    def run(params, so_far, given, xs, contexts):
        return split.forward(params, so_far, given, xs, contexts)[0]

    run.defvjp(split.forward, split.backward)
    return run


@dataclasses.dataclass(frozen=True)
class _Split:
    """The forward and the backward pass of `batch_split`. Members are counted on past their number: into the next turn.

    Where arguments are called so: `stored` is by member what lies in this device's memory, (shards, `quantize` of
    them); `i` is a turn, and `m` a member.
    """

    members: Sequence[Member]
    keep: Sequence[str]
    offload: Sequence[str]

    def gather_first(self, stored, i, m):
        """The weights of a layer's first stage."""
        i, m = self.nearest(stored, i, m)
        return _gather(self.members[m].first, stored[m], i)

    def fetch(self, stored, offloaded, i, m):
        """What is in host memory of a layer's tape."""
        i, m = self.nearest(stored, i, m)
        return _moved(at(offloaded[m], i), jax.memory.Space.Device)

    def nearest(self, stored, i, m):
        """Turn and member of a layer; of the nearest one where there is none."""
        turn, m = divmod(m, len(self.members))
        return jnp.clip(i + turn, 0, _turns(stored) - 1), m

    def kept(self, member, tape):
        """What of a tape is to be kept, in the device's memory and in its host's."""
        names = {input_name(member.layer.stages[0].name), *member.layer.always, *self.keep} - set(self.offload)
        return tape.only(names), _moved(tape.only(self.offload), jax.memory.Space.Host)

    def forward(self, params, so_far, given, xs, contexts):
        """Returns what `run` does, and all that `backward` needs."""
        stored = _stored(self.members, params)

        def one_turn(carry, i):
            xs, w = carry
            tapes, seen = [], []
            for m, member in enumerate(self.members):
                w = w | _gather(member.rest, stored[m], i)
                ahead = self.gather_first(stored, i, m + 1)
                xs, tape = forward(member.layer, w, [Given(at(given[m], i), c) for c in contexts], xs)
                seen.append(member.layer.observe([_merged(tape, b) for b in range(len(xs))]))
                tapes.append(self.kept(member, tape))
                w = ahead
            return (xs, w), (tapes, seen)

        ends = self.members[0].layer
        start = [xs[0], ends.pending(xs[1])], self.gather_first(stored, 0, 0)
        (xs, w), (tapes, seen) = lax.scan(one_turn, start, jnp.arange(_turns(stored)))
        return ([xs[0], ends.combine(xs[1])], seen), (stored, so_far, given, contexts, w, tapes)

    def backward(self, residuals, cotangents):
        """Returns the gradients of the arguments of `forward`; each layer's is added to those so far as it arrives."""
        stored, so_far, given, contexts, w, kept = residuals
        (dxs, _), (tapes, offloaded) = cotangents, zip(*kept, strict=True)

        def one_turn(carry, of_turn):
            dxs, w, fetched, above, shards, grads = carry
            tapes, i = of_turn
            for m, member in reversed(list(enumerate(self.members))):
                w = w | _gather(member.rest, stored[m], i)
                w_below = self.gather_first(stored, i, m - 1)
                grads = self.settle(grads, i, m, shards)  # zeros on the last two layers
                shards = self.scatter(m + 1, *above)
                of_layer = [Given(at(given[m], i), c) for c in contexts]
                pair = tapes[m].joined(fetched), self.fetch(stored, offloaded, i, m - 1)
                dxs, dws, fetched = backward(member.layer, w, of_layer, pair, dxs)
                first, rest = (part.total([part.of(d) for d in dws]) for part in (member.first, member.rest))
                above, w = (first, member.rest.scatter(rest)), w_below
            return (dxs, w, fetched, above, shards, grads), None

        if len(self.members) > 1:  # else these are what `forward` has gathered last
            w = self.gather_first(stored, _turns(stored), -1)
        begun = [m.exchange.begin(own) for m, own in zip(self.members, so_far, strict=True)]
        start = list(dxs), w, self.fetch(stored, offloaded, _turns(stored), -1), *self.none_yet(stored), begun
        turns = tapes, jnp.arange(_turns(stored))
        (dxs, *_, above, shards, grads), _ = lax.scan(one_turn, start, turns, reverse=True)
        grads = self.settle(self.settle(grads, 0, -1, shards), 0, -2, self.scatter(0, *above))
        grads = [m.exchange.finish(g, own) for m, g, own in zip(self.members, grads, so_far, strict=True)]
        return grads, None, None, dxs, None

    def none_yet(self, stored):
        """Zeros, for gradients of the two layers that would be above the last: scattered in part, and wholly."""
        params = [at(of_member, 0) for of_member, _ in stored]
        first, rest, two = self.members[0].first, self.members[0].rest, 1 % len(self.members)
        gathered = _zeros_of(lambda: first.total([slots(self.gather_first(stored, 0, 0))]))
        above = gathered, _zeros_of(rest.shards, rest.of(params[0]))
        return above, _zeros_of(self.members[two].exchange.shards, params[two])

    def scatter(self, m, first, rest):
        """All gradients of a layer, scattered: those of its first stage now, those of the others were before."""
        return self.members[m % len(self.members)].first.scatter(first) | rest

    def settle(self, grads, i, m, shards):
        """Adds the gradients of the layer two above: they have arrived, so sums over `expert` need not wait."""
        turn, above = divmod(m + 2, len(self.members))
        grads = list(grads)
        grads[above] = add(grads[above], (i + turn) % _turns(grads), self.members[above].exchange.reduce(shards))
        return grads


def _stored(members: Sequence[Member], params: Sequence[Tree]) -> list[tuple[Tree, Tree]]:
    """By member: its shards, and those that travel in float8."""
    return [(own, jax.vmap(member.exchange.quantize)(own)) for member, own in zip(members, params, strict=True)]


def _gather(part: Exchange, stored: Tree, i: jax.Array | int) -> Tree:
    """The weights of some stages of layer `i`, of what lies in this device's memory."""
    return part.gather(*(at(part.of(tree), i) for tree in stored))


def _moved(tree: Tree, space: Any) -> Tree:
    """In host or device memory."""
    return jax.tree.map(lambda a: jax.device_put(a, space), tree)


def _turns(stacked: Tree) -> int:
    """How many layers of each member there are."""
    return jax.tree.leaves(stacked)[0].shape[0]


def _zeros_of(fn: Callable, *args: Tree) -> Tree:
    """Zeros, as what the function would return."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(fn, *args))


def _merged(tape: Tape, microbatch: int) -> dict[str, Tree]:
    return {name: value for by in tape.kept.values() for name, value in by[microbatch].items()}


def at(stacked: Tree, i: jax.Array | int) -> Tree:
    """Layer `i` of stacked arrays. Slicing the stack instead would copy all parameters."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), stacked)


def add(stacked: Tree, i: jax.Array | int, layer: Tree) -> Tree:
    """Stacked arrays with `layer`, float32, added to layer `i`."""

    def one(a: jax.Array, more: jax.Array) -> jax.Array:
        found = lax.dynamic_index_in_dim(a, i, keepdims=False).astype(jnp.float32) + more
        return lax.dynamic_update_index_in_dim(a, found.astype(a.dtype), i, 0)

    return jax.tree.map(one, stacked, layer)

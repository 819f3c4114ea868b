"""How layers are chained: `plain`, and `batch_split` with its two interleaved microbatches.

    compute | ATTENTION a | ATTENTION b | EXPERTS a  | EXPERTS b | ATTENTION a' | …   forward, one layer
    comm    |             | DISPATCH a  | DISPATCH b | COMBINE a | COMBINE b    |
                                                                 ^ b's combine is carried into the next layer

Weights travel a step ahead of their use: while a is in a layer's first stage, half of those of the
others, and while b is, the rest and those of the next layer's first stage. Gradients travel a step
behind. So only what the first stage needs is carried from layer to layer: on TPU, whatever a scan
carries is copied once. What is kept in host memory comes back during the layer above the one that
needs it.

A stage is one function, `fn(w, x, given, kept=None) -> (y, kept)`, of one microbatch. Without
`kept` it computes everything and says what it wants kept for the backward pass. With `kept` it is
replayed: the kept values stand in for the work that produced them. So the backward pass of a stage
is `jax.vjp` of the same function, and what is recomputed is what was not kept.

A stage that ends with something on its way leaves to `enter` of the next what is done to it on arrival, and
says in `leave` what of its output is there. Else the next work would be due after the arrival, which can hide
behind it.

`plain` leaves the backward pass to JAX (scan and `jax.checkpoint`): the reference for the other.
This file knows nothing of the model: `model/deepseek.py` brings the stages.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from maxds import host
from maxds.params import Exchange
from maxds.quantize import FORWARD, Quantized, named, slots, vjp, without_slots

Tree = Any
Microbatches = list[Tree]
A, B = 0, 1  # the two of batch_split


class Given(NamedTuple):
    """What a stage reads and no gradient flows to."""

    layer: Tree  # of this layer: router bias
    tokens: Tree  # of this microbatch: what the model knows of each, such as its document and position


def barrier(x: Tree, y: Tree) -> tuple[Tree, Tree]:
    """Both: neither can be used before the other is there."""
    return lax.optimization_barrier((x, y))


@dataclasses.dataclass(frozen=True)
class Stage:
    """One step of a decoder layer, applied to one microbatch at a time.

    `leave` is a barrier of both, but only of that part of what the stage gives that is not on its way.
    """

    name: str  # also the entry of the layer's weights that it reads
    fn: Callable[..., tuple[Tree, dict[str, Tree]]]  # what it would keep, it names
    enter: Callable[[Tree], Tree] = lambda x: x  # (what the stage before gives) -> x; reads no weights
    leave: Callable[[Tree, Tree], tuple[Tree, Tree]] = barrier  # (what it gives, what comes next)

    def __call__(self, w: Tree, x: Tree, given: Given, kept: dict | None = None) -> tuple[Tree, dict[str, Tree]]:
        """Runs the stage with its own weights, under its name in profiles."""
        with jax.named_scope(self.name):
            return self.fn(w, x, given, kept)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A decoder layer, as a schedule sees it.

    `awaited` is a barrier of both, but only of that part of the cotangent that may wait: what is read by loops with
    collectives (rounds of experts) and by no product before them. TPU's compiler lets no transfer cross such a loop.
    """

    stages: tuple[Stage, ...]
    combine: Callable[[Tree], Tree]  # ends the layer; linear
    uncombine: Callable[[Tree], Tree]  # dy -> what travels of its transpose
    spread: Callable[[dict[str, Tree], Tree], Tree]  # (kept values of one microbatch, what has arrived) -> all of it
    pending: Callable[[Tree], Tree]  # what `combine` turns back into its argument
    observe: Callable[[list[dict[str, Tree]]], Tree]  # metrics read off what the microbatches would keep
    awaited: Callable[[Tree, Tree], tuple[Tree, Tree]] = barrier  # (cotangent of what its last stage gave, what comes)
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

    @functools.cached_property
    def halves(self) -> tuple[Exchange, Exchange]:
        """The same, in two: one travels beside the first stage of each microbatch."""
        return self.rest.halves()


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
        def block(xs, of_block):
            seen = []
            for layer, *of_layer in zip(layers, *of_block, strict=True):
                xs, more = layer(xs, *of_layer, contexts)
                seen.append(more)
            return xs, seen

        return lax.scan(block, xs, (_stored(members, params), list(so_far), list(given)))

    return run


def _one_by_one(member: Member, keep: Sequence[str], offload: Sequence[str]) -> Callable:
    """A layer that keeps what is named.

    It takes microbatches, stored weights, gradients so far, what it is given, and what microbatches are; and returns
    microbatches, and what was seen.
    """
    layer, exchange = member.layer, member.exchange
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(*layer.always, *keep),
        names_which_can_be_offloaded=offload,
        offload_src="device",
        offload_dst="pinned_host",
    )
    if "everything" in keep:
        policy = recompute_nothing

    def one_layer(xs, stored, so_far, given, contexts):
        w = exchange.fetch(*stored, so_far=so_far)
        outs, kepts = [], []
        for x, context in zip(xs, contexts, strict=True):
            kept = {}
            for stage in layer.stages:
                x = jax.tree.map(lambda a, s=stage: named(a, input_name(s.name)), x)
                x, more = stage(w[stage.name], stage.enter(x), Given(given, context))
                kept |= more
            outs.append(layer.combine(x))
            kepts.append(kept)
        return outs, layer.observe(kepts)

    return jax.checkpoint(one_layer, policy=policy, prevent_cse=False)


PASSED_ON = (  # as views and casts are
    "bitcast_convert_type",
    "convert_element_type",
    "layout_constraint",
    "optimization_barrier",
    "pad",
    "reshape",
    "stop_gradient",
)


def recompute_nothing(primitive, *avals, **params) -> bool:
    """A `jax.checkpoint` policy: keeps all but gathered weights, their views, padded ones too, and casts.

    And but for what is gathered in float8, which JAX cannot keep (`quantize.named`).
    """
    gathered = primitive.name == "all_gather" and "fsdp" in params["axis_name"]
    gathered |= primitive.name in ("all_gather", "gather") and avals[0].dtype == FORWARD
    return not gathered and primitive.name not in PASSED_ON


# ------------------------------------------------------------------------------------ batch split


Tape = list[dict[str, Tree]]
"""What one layer hands from its forward to its backward pass, by microbatch and by the names of config.

Nothing else is kept: the replay of a stage brings the input of the next one, where that is not here.
"""


def only(tape: Tape, names: Collection[str]) -> Tape:
    """A tape without what is not named."""
    return [{name: value for name, value in of.items() if name in names} for of in tape]


def overlaid(tape: Tape, more: Tape) -> Tape:
    """A tape with what another one of the same layer has; where both have a name, the other's."""
    return [of | of_more for of, of_more in zip(tape, more, strict=True)]


def within(tape: Tape, other: Tape) -> Tape:
    """What of a tape another one of the same layer has, too."""
    return [{name: a for name, a in of.items() if name in of_other} for of, of_other in zip(tape, other, strict=True)]


def without(tape: Tape, other: Tape) -> Tape:
    """A tape without what another one of the same layer has."""
    return [
        {name: a for name, a in of.items() if name not in of_other} for of, of_other in zip(tape, other, strict=True)
    ]


def written(room: Tape, turn: jax.Array | int, tape: Tape) -> Tape:
    """The tapes of all turns, stacked, with what they have room for of that of one turn."""
    own = within(room, tape)
    new = host.put_as(within(tape, room), own)
    return overlaid(room, jax.tree.map(lambda of, a: lax.dynamic_update_index_in_dim(of, a, turn, 0), own, new))


def merged(w: Tree, more: Tree) -> Tree:
    """Weights by stage, with those of `more` in the place of those that are not there: None."""

    def either(a: Tree, b: Tree) -> Tree:
        return b if a is None else a

    def is_whole(a: Tree) -> bool:
        return a is None or isinstance(a, Quantized)

    return w | {name: jax.tree.map(either, w[name], more[name], is_leaf=is_whole) for name in more}


Later = Callable[[Tree], tuple[Tree, Tree]]
"""(something) -> (weights of a layer, those of the first stage of the next), which travel once that is there."""


def nothing_later(_: Tree) -> tuple[Tree, Tree]:
    """`Later` of a layer whose weights are all there, and after which none comes."""
    return {}, None


def stagger(
    fn: Callable[[int, Tree], Tree], xs: Microbatches, order: Sequence[int], leave: Callable = barrier
) -> Microbatches:
    """Maps `fn(microbatch, x)` over microbatches, in order; none enters before the previous one has left.

    `leave`, as of `Stage`, ties only the one's output to the next one's input: a barrier over everything
    would make a total order of the layer, and forbid the overlap that the schedule is for.
    """
    xs = list(xs)
    for n, i in enumerate(order):
        y = fn(i, xs[i])
        if n + 1 < len(order):
            y, xs[order[n + 1]] = leave(y, xs[order[n + 1]])
        xs[i] = y
    return xs


def forward(
    layer: Layer, w: Tree, later: Later, given: list[Given], xs: Microbatches, room: Tape, turn: jax.Array | int
) -> tuple[Microbatches, Tape, Tape, Tree]:
    """One layer. Enters with the combine of microbatch b pending, and leaves so.

    Args:
      w: the weights that are there when a leaves the first stage; None in the place of the others.
      later: these travel while b is in it.
      room: of all turns, for what is kept in host memory. What a enters with has arrived there when it leaves the first
        stage; what b enters with, and what else is known of a, when a enters the last one; and of b when b does. For
        the rounds of experts are loops with collectives, which on TPU no transfer crosses, and hosts have one link.
      turn: of the layer.

    Returns:
      The microbatches, the layer's tape, the room, with what it is for, and what of the next layer has arrived.
    """
    tape: Tape = [{}, {}]
    first, *middle, last = layer.stages

    def run(stage: Stage, i: int, x: Tree) -> Tree:
        y, kept = stage(w[stage.name], x, given[i])
        tape[i].update(kept)
        return without_slots(y)

    def through(stage: Stage, xs: Microbatches) -> Microbatches:
        for of, x in zip(tape, xs, strict=True):
            of[input_name(stage.name)] = x
        entered = [without_slots(stage.enter(x)) for x in xs]
        return stagger(functools.partial(run, stage), entered, (A, B), stage.leave)

    (a, b), entry = xs, input_name(first.name)
    input_of_a: Tape = [{entry: a}, {}]
    with_a = written(room, turn, input_of_a)
    a, b = through(first, [a, layer.combine(b)])  # b's combine travels while a attends
    a, w = barrier(a, w)
    b, (more, ahead) = barrier(b, later(a))
    a, room = barrier(a, with_a)
    w, xs = merged(w, more), [a, b]
    for stage in middle:
        xs = through(stage, xs)
    known = without(tape, input_of_a)
    early = [known[0], only(known, [entry])[1]]
    a, room = barrier(xs[0], written(room, turn, early))
    b, room = layer.stages[-2].leave(xs[1], written(room, turn, without(known, early)))
    a, b = through(last, [a, b])
    return [layer.combine(a), b], tape, written(room, turn, without(tape, overlaid(input_of_a, known))), ahead


def backward(
    layer: Layer, w: Tree, later: Later, given: list[Given], tapes: tuple[Tape, Tape], dxs: Microbatches
) -> tuple[Microbatches, list, Tape, Tree]:
    """Replays what was not kept, then pulls the cotangents back through it; b goes first, for time runs backward.

        compute | attention b | attention a | experts b  | EXPERTS b   | experts a, EXPERTS a | DISPATCH b, a | …
        comm    | uncombine b | dispatch b  | dispatch a | uncombine a | DISPATCH b           | DISPATCH a    |

    Small letters are replayed, and capitals pulled back.
    A barrier stands where what travels must have arrived: left to itself, TPU's compiler sends it when it is needed.
    One also stands where a stage is replayed whose output was kept: that is replayed for its pullback alone, and the
    barrier says when.

    Args:
      w: as of `forward`.
      later: as of `forward`, while a is in it; the next layer is that below.
      tapes: of the layer, and what is on its way from host memory of that of the layer below: b's beside both first
        stages, a's as a's uncombine beside b's last stage, for hosts have one link. It has memory of its own, and can
        come while first stages still read the layer's.

    Returns:
      Cotangents of the layer's input, and of its weights: by microbatch, stage -> cotangents; what has arrived of the
      tape and of the weights of the layer below.
    """
    tape, below = tapes
    stages, last = layer.stages, len(layer.stages) - 1
    enters, pulls, dws = {}, {}, [{}, {}]

    def enter(n: int, i: int, x: Tree) -> Tree:
        """What the stage before gives stage n of microbatch i -> what that computes with."""
        x, enters[n, i] = vjp(stages[n].enter, x)
        return x

    def spread(i: int, dy: Tree) -> Tree:
        """What has arrived of the cotangent of microbatch i -> that of what its last stage gave."""
        return layer.spread(tape[i], dy)

    def replay(n: int, i: int, x: Tree) -> Tree:
        """Stage n of microbatch i -> what it gives the next one: kept, or computed again."""
        fn = functools.partial(stages[n], given=given[i], kept=tape[i])
        y, pulls[n, i] = vjp(lambda w, x: fn(w, x)[0], w[stages[n].name], x)
        known = None if n == last else tape[i].get(input_name(stages[n + 1].name))
        if known is not None:
            pulls[n, i], y = barrier(pulls[n, i], known)
        return y

    def pull(n: int, i: int, dy: Tree) -> Tree:
        """The cotangent of what stage n of microbatch i gives -> that of what the one before gives."""
        dws[i][stages[n].name], dx = pulls[n, i](dy)
        return enters[n, i](dx)[0] if n else dx

    # attention b | uncombine b
    a, b = (of[input_name(stages[0].name)] for of in tape)
    da, db = dxs[0], layer.uncombine(dxs[1])
    b, db, a = lax.optimization_barrier((replay(0, B, b), db, a))
    # attention a | dispatch b; weights of this layer and the one below
    coming = later(b)
    db = spread(B, db)
    for n in range(1, last):
        b = replay(n, B, enter(n, B, b))
    a, b, db, (more, w_below), of_b = lax.optimization_barrier((replay(0, A, a), b, db, coming, below[B]))
    w = merged(w, more)
    # experts b | dispatch a
    for n in range(1, last):
        a = replay(n, A, enter(n, A, a))
    replay(last, B, enter(last, B, b))
    a, da, db = lax.optimization_barrier((a, da, db))
    # EXPERTS b | uncombine a; the tape of the layer below
    a, da = enter(last, A, a), layer.uncombine(da)
    db, (da, of_a) = layer.awaited(db, (da, below[A]))
    db = pull(last, B, db)
    a, da, db = lax.optimization_barrier((a, da, db))
    # experts a, EXPERTS a | DISPATCH b
    replay(last, A, a)
    dxs = [pull(last, A, spread(A, da)), db]
    for n in reversed(range(last)):
        dxs = stagger(functools.partial(pull, n), dxs, (B, A))
    return dxs, dws, [of_a, of_b], w_below


def batch_split(members: Sequence[Member], keep: Sequence[str], offload: Sequence[str]) -> Run:
    """Two microbatches; weights gathered a step ahead, gradients scattered a step behind, and summed two layers later.

    No layer is peeled off the two scans, so the compiler sees one forward and one backward turn of the members:
    microbatch b enters with a pending combine that adds nothing.
    """
    split = _Split(members, keep, offload)

    @jax.custom_vjp
    def run(params, so_far, given, xs, contexts):  # without gradients: nothing is to be sent to host memory
        return dataclasses.replace(split, offload=()).forward(params, so_far, given, xs, contexts)[0]

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

    def gather_later(self, stored, i, m, beside, x):
        """The second half of the weights of a layer, and the first of the one beside it, once `x` is there."""
        i, _ = barrier(i, x)
        return _gather(self.members[m].halves[1], stored[m], i), self.gather_first(stored, i, beside)

    def fetch(self, stored, rooms, i, m):
        """What is in host memory of a layer's tape."""
        i, m = self.nearest(stored, i, m)
        return host.to_device(at(rooms[m], i))

    def nearest(self, stored, i, m):
        """Turn and member of a layer; of the nearest one where there is none."""
        turn, m = divmod(m, len(self.members))
        return jnp.clip(i + turn, 0, _turns(stored) - 1), m

    def kept(self, member, tape):
        """What of a tape is to be kept in the device's memory."""
        return only(tape, {input_name(member.layer.stages[0].name), *member.layer.always, *self.keep} - {*self.offload})

    def rooms(self, stored, given, xs, contexts):
        """By member, room for what all turns keep in host memory; but numbers stay in the device's."""
        if not self.offload:
            return [[{}, {}] for _ in self.members]

        def tape(m):
            w = self.gather_first(stored, 0, m) | _gather(self.members[m].rest, stored[m], 0)
            givens = _givens(given[m], 0, contexts)
            found = forward(self.members[m].layer, w, nothing_later, givens, xs, [{}, {}], 0)[1]
            return only(found, self.offload)

        def of_all_turns(a):
            zeros = jnp.zeros((_turns(stored), *a.shape), a.dtype)
            return jax.device_put(zeros, host.HOST) if a.ndim else zeros

        found = [jax.eval_shape(functools.partial(tape, m)) for m in range(len(self.members))]
        return jax.tree.map(of_all_turns, found)

    def forward(self, params, so_far, given, xs, contexts):
        """Returns what `run` does, and all that `backward` needs."""
        stored = _stored(self.members, params)

        def one_turn(carry, i):
            xs, w, rooms = carry
            rooms, tapes, seen = list(rooms), [], []
            for m, member in enumerate(self.members):
                w = w | _gather(member.halves[0], stored[m], i)
                later = functools.partial(self.gather_later, stored, i, m, m + 1)
                xs, tape, rooms[m], w = forward(member.layer, w, later, _givens(given[m], i, contexts), xs, rooms[m], i)
                seen.append(member.layer.observe(tape))
                tapes.append(self.kept(member, tape))
            return (xs, w, rooms), (tapes, seen)

        ends = self.members[0].layer
        xs = [xs[0], ends.pending(xs[1])]
        start = xs, self.gather_first(stored, 0, 0), self.rooms(stored, given, xs, contexts)
        (xs, w, rooms), (tapes, seen) = lax.scan(one_turn, start, jnp.arange(_turns(stored)))
        return ([xs[0], ends.combine(xs[1])], seen), (stored, so_far, given, contexts, w, tapes, rooms)

    def backward(self, residuals, cotangents):
        """Returns the gradients of the arguments of `forward`; the weights' as those of the gradients so far."""
        stored, so_far, given, contexts, w, tapes, rooms = residuals
        dxs, _ = cotangents

        def one_turn(carry, of_turn):
            dxs, w, fetched, above, shards, grads = carry
            tapes, i = of_turn
            for m, member in reversed(list(enumerate(self.members))):
                w = w | _gather(member.halves[0], stored[m], i)
                later = functools.partial(self.gather_later, stored, i, m, m - 1)
                grads = self.settle(grads, i, m, shards)  # zeros on the last two layers
                shards = self.scatter(m + 1, *above)
                pair = overlaid(tapes[m], fetched), self.fetch(stored, rooms, i, m - 1)
                dxs, dws, fetched, w = backward(member.layer, w, later, _givens(given[m], i, contexts), pair, dxs)
                first, rest = (part.total([part.of(d) for d in dws]) for part in (member.first, member.rest))
                above = first, member.rest.scatter(rest)
            return (dxs, w, fetched, above, shards, grads), None

        if len(self.members) > 1:  # else these are what `forward` has gathered last
            w = self.gather_first(stored, _turns(stored), -1)
        begun = [m.exchange.begin(own) for m, own in zip(self.members, so_far, strict=True)]
        start = list(dxs), w, self.fetch(stored, rooms, _turns(stored), -1), *self.none_yet(stored), begun
        turns = tapes, jnp.arange(_turns(stored))
        (dxs, *_, above, shards, grads), _ = lax.scan(one_turn, start, turns, reverse=True)
        grads = self.settle(self.settle(grads, 0, -1, shards), 0, -2, self.scatter(0, *above))
        grads = [m.exchange.finish(g, own) for m, g, own in zip(self.members, grads, so_far, strict=True)]
        return None, grads, None, dxs, None

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


def _givens(stacked: Tree, i: jax.Array | int, contexts: Sequence[Tree]) -> list[Given]:
    """What layer `i` is given, by microbatch."""
    return [Given(at(stacked, i), context) for context in contexts]


def _turns(stacked: Tree) -> int:
    """How many layers of each member there are."""
    return jax.tree.leaves(stacked)[0].shape[0]


def _zeros_of(fn: Callable, *args: Tree) -> Tree:
    """Zeros, as what the function would return."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(fn, *args))


def at(stacked: Tree, i: jax.Array | int) -> Tree:
    """Layer `i` of stacked arrays. Slicing the stack instead would copy all parameters."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), stacked)


def add(stacked: Tree, i: jax.Array | int, layer: Tree) -> Tree:
    """Stacked arrays with `layer`, float32, added to layer `i`."""

    def one(a: jax.Array, more: jax.Array) -> jax.Array:
        found = lax.dynamic_index_in_dim(a, i, keepdims=False).astype(jnp.float32) + more
        return lax.dynamic_update_index_in_dim(a, found.astype(a.dtype), i, 0)

    return jax.tree.map(one, stacked, layer)

"""How layers are chained: `plain`, and `batch_split` with its two interleaved microbatches.

    compute | ATTENTION a | ATTENTION b | EXPERTS a  | EXPERTS b | ATTENTION a' | …   forward, one layer
    comm    |             | DISPATCH a  | DISPATCH b | COMBINE a | COMBINE b    |
                                                                 ^ b's combine is carried into the next layer

Weights travel a step ahead of their use: those of a layer's first stage during the layer before, the
others during the first stage. Gradients travel a step behind, in the mirror of that. So only what the
first stage needs is carried from layer to layer: on TPU, whatever a scan carries is copied once.

A stage is one function, `fn(w, x, given, kept=None) -> (y, kept)`, of one microbatch. Without
`kept` it computes everything and says what it wants kept for the backward pass. With `kept` it is
replayed: the kept values stand in for the work that produced them. So the backward pass of a stage
is `jax.vjp` of the same function, and what is recomputed is what was not kept.

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

from maxds.params import Exchange
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

    def __call__(self, w: Tree, x: Tree, given: Given, kept: dict | None = None) -> tuple[Tree, dict[str, Tree]]:
        """Runs the stage with its own weights, under its name in profiles."""
        with jax.named_scope(self.name):
            return self.fn(w, x, given, kept)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A decoder layer, as a schedule sees it."""

    stages: tuple[Stage, ...]
    combine: Callable[[Tree], Tree]  # ends the layer; linear
    uncombine: Callable[[dict[str, Tree], Tree], Tree]  # (kept values of one microbatch, dy) -> the transpose, of dy
    pending: Callable[[Tree], Tree]  # what `combine` turns back into its argument
    observe: Callable[[dict[str, Tree]], Tree]  # metrics read off the kept values of one microbatch
    always: tuple[str, ...] = ()  # kept whatever config says: decisions that a replay must not take again


Run = Callable[[Tree, Tree, Microbatches, Sequence[Tree]], tuple[Microbatches, Tree]]
"""(stacked weights, stacked given, microbatches, their given) -> (microbatches, what `observe` saw of each layer)."""


def input_name(stage: str) -> str:
    """What config calls the input of a stage."""
    return f"{stage}_input"


def total(trees: Sequence[Tree]) -> Tree:
    """The sum of trees of one structure."""
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *trees)


# ------------------------------------------------------------------------------------------ plain


def plain(layer: Layer, exchange: Exchange, keep: Sequence[str], offload: Sequence[str]) -> Run:
    """One layer after the other; the backward pass is JAX's."""
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
        outs, seen = [], []
        for x, context in zip(xs, contexts, strict=True):
            kept = {}
            for stage in layer.stages:
                x = jax.tree.map(lambda a, s=stage: checkpoint_name(a, input_name(s.name)), x)
                x, more = stage(w[stage.name], x, Given(given, context))
                kept |= more
            outs.append(layer.combine(x))
            seen.append(layer.observe(kept))
        return outs, total(seen)

    def run(params, given, xs, contexts):
        body = jax.checkpoint(one_layer, policy=policy, prevent_cse=False)
        stored = params, jax.vmap(exchange.quantize)(params)
        return lax.scan(lambda xs, of_layer: body(xs, *of_layer, contexts), xs, (stored, given))

    return run


def recompute_nothing(primitive, *avals, **params) -> bool:
    """A `jax.checkpoint` policy: keeps all but gathered weights, their views, and casts.

    And but for what is gathered in float8: it is kept once it is cast back. JAX passes what is kept through
    `reduce_precision`, for which the largest numbers of float8_e4m3fn are infinite.
    """
    gathered = primitive.name == "all_gather" and ("fsdp" in params["axis_name"] or avals[0].dtype.itemsize == 1)
    passed_on = "optimization_barrier", "reshape", "convert_element_type", "stop_gradient"
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

    def moved(self, names: Sequence[str], space: Any) -> "Tape":
        """With what is named in host or device memory."""

        def move(name: str, value: Tree) -> Tree:
            return jax.tree.map(lambda a: jax.device_put(a, space), value) if name in names else value

        inputs = {stage: move(input_name(stage), x) for stage, x in self.inputs.items()}
        kept = {s: [{n: move(n, v) for n, v in k.items()} for k in by] for s, by in self.kept.items()}
        return Tape(inputs, kept)


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
        xs = stagger(functools.partial(run, stage), xs, (0, 1))
    a, b = xs
    return [layer.combine(a), b], Tape(inputs, kept)


def backward(layer: Layer, w: Tree, given: list[Given], tape: Tape, dxs: Microbatches) -> tuple[Microbatches, list]:
    """Replays what was not kept, then pulls the cotangents back through it; b goes first, for time runs backward.

        compute | ATTENTION b | ATTENTION a | EXPERTS b   | EXPERTS a   | DISPATCH b | DISPATCH a | ATTENTION b, a
        comm    | uncombine b | DISPATCH b  | DISPATCH a, | DISPATCH b, | DISPATCH a,
                |             |             | uncombine a | transposed  | transposed

    A barrier stands where what travels must have arrived: left to itself, TPU's compiler sends it when it is needed.

    Returns:
      Cotangents of the layer's input, and of its weights: by microbatch, stage -> cotangents.
    """
    last = len(layer.stages) - 1
    pulls, dws = {}, [{}, {}]

    def replay(n: int, i: int, x: Tree) -> Tree:
        """Stage n of microbatch i -> what enters the next one: kept, or computed again."""
        stage = layer.stages[n]
        fn = functools.partial(stage, given=given[i], kept=tape.kept[stage.name][i])
        own = w[stage.name]
        y, pulls[n, i] = jax.vjp(lambda s, x: fn(with_slots(own, s), x)[0], slots(own), x)
        return tape.inputs[layer.stages[n + 1].name][i] if n < last and layer.stages[n + 1].name in tape.inputs else y

    def pull(n: int, i: int, dy: Tree) -> Tree:
        dws[i][layer.stages[n].name], dx = pulls[n, i](dy)
        return dx

    a, b = tape.inputs[layer.stages[0].name]
    da, db = (layer.uncombine(_merged(tape, i), dx) for i, dx in enumerate(dxs))
    b, db, a = lax.optimization_barrier((replay(0, 1, b), db, a))
    for n in range(1, last):
        b = replay(n, 1, b)
    a, b, db = lax.optimization_barrier((replay(0, 0, a), b, db))
    for n in range(1, last):
        a = replay(n, 0, a)
    replay(last, 1, b)
    db = pull(last, 1, db)
    a, da, db = lax.optimization_barrier((a, da, db))
    replay(last, 0, a)
    dxs = [pull(last, 0, da), db]
    for n in reversed(range(last)):
        dxs = stagger(functools.partial(pull, n), dxs, (1, 0))
    return dxs, dws


def batch_split(layer: Layer, exchange: Exchange, keep: Sequence[str], offload: Sequence[str]) -> Run:
    """Two microbatches; weights gathered a step ahead, gradients scattered a step behind, and over DCN a layer later.

    No layer is peeled off the two scans, so the compiler sees one forward and one backward layer:
    microbatch b enters with a pending combine that adds nothing. The weights of the last layer's
    first stage are handed to the backward pass, which needs them first.
    """
    keep = (input_name(layer.stages[0].name), *layer.always, *keep)
    first, rest = exchange.part([layer.stages[0].name]), exchange.part([stage.name for stage in layer.stages[1:]])

    def gather(part, stored, i):
        return part.gather(*(at(part.of(tree), i) for tree in stored))

    @jax.custom_vjp
    def run(params, given, xs, contexts):
        return run_forward(params, given, xs, contexts)[0]

    def run_forward(params, given, xs, contexts):
        num_layers = jax.tree.leaves(params)[0].shape[0]
        stored = params, jax.vmap(exchange.quantize)(params)

        def one_layer(carry, i):
            xs, w = carry
            w = w | gather(rest, stored, i)
            ahead = gather(first, stored, jnp.minimum(i + 1, num_layers - 1))
            xs, tape = forward(layer, w, [Given(at(given, i), c) for c in contexts], xs)
            seen = total([layer.observe(_merged(tape, m)) for m in range(len(xs))])
            return (xs, ahead), (tape.only((*keep, *offload)).moved(offload, jax.memory.Space.Host), seen)

        start = [xs[0], layer.pending(xs[1])], gather(first, stored, 0)
        (xs, w), (tapes, seen) = lax.scan(one_layer, start, jnp.arange(num_layers))
        return ([xs[0], layer.combine(xs[1])], seen), (stored, given, contexts, w, tapes)

    def run_backward(residuals, cotangents):
        stored, given, contexts, w, tapes = residuals
        params, _ = stored
        num_layers = jax.tree.leaves(params)[0].shape[0]

        def settle(grads, i, shards):
            """Puts the gradients of the first stage of layer i + 2, and of the others of layer i + 1."""
            above = put(first.of(grads), (i + 2) % num_layers, first.reduce(first.of(shards)))
            return above | put(rest.of(grads), (i + 1) % num_layers, rest.reduce(rest.of(shards)))

        def one_layer(carry, of_layer):
            dxs, w, dw_above, shards, grads = carry
            tape, i = of_layer
            w = w | gather(rest, stored, i)
            w_below = gather(first, stored, jnp.maximum(i - 1, 0))
            grads = settle(grads, i, shards)  # zeros on the first two layers
            shards = first.scatter(dw_above)
            tape = tape.moved(offload, jax.memory.Space.Device)
            dxs, dws = backward(layer, w, [Given(at(given, i), c) for c in contexts], tape, dxs)
            shards |= rest.scatter(rest.total([rest.of(dw) for dw in dws]))
            return (dxs, w_below, first.total([first.of(dw) for dw in dws]), shards, grads), None

        dxs, _ = cotangents
        dw = first.total([jax.tree.map(jnp.zeros_like, slots(w))])
        shards = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(exchange.shards, at(params, 0)))
        start = list(dxs), w, dw, shards, zeros(params)
        (dxs, _, dw, shards, grads), _ = lax.scan(one_layer, start, (tapes, jnp.arange(num_layers)), reverse=True)
        grads = settle(grads, -1, shards)
        grads |= put(first.of(grads), 0, first.reduce(first.scatter(dw)))
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), exchange.finish(grads), params)
        return grads, None, dxs, None

    run.defvjp(run_forward, run_backward)
    return run


def _merged(tape: Tape, microbatch: int) -> dict[str, Tree]:
    return {name: value for by in tape.kept.values() for name, value in by[microbatch].items()}


def zeros(params: Tree) -> Tree:
    """What gradients are summed into."""
    return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)


def at(stacked: Tree, i: jax.Array | int) -> Tree:
    """Layer `i` of stacked arrays. Slicing the stack instead would copy all parameters."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), stacked)


def put(stacked: Tree, i: jax.Array | int, layer: Tree) -> Tree:
    """Stacked arrays with layer `i` replaced."""
    return jax.tree.map(lambda a, v: lax.dynamic_update_index_in_dim(a, v.astype(a.dtype), i, 0), stacked, layer)

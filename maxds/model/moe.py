"""Routed and shared experts: route, dispatch, experts, combine (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

Tokens travel, experts do not. Each device all-gathers the tokens of its `expert` axis (A of them),
takes the rows that its own experts are to see, and computes these: no more than R at a time, in as
many rounds as the routing needs, so that no token is ever dropped and no room is made for rows that
belong to other devices. Each token's rows are summed, and a reduce-scatter brings the sums home.

Rows are moved in `take`, which makes the experts' input, and in combine: between the stages of one
microbatch, beside those of the other. Only rounds after the first, which the routing seldom needs,
move their own.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from maxds.architecture import Model
from maxds.model import kernels, residual, rounded
from maxds.model.attention import norm
from maxds.model.ops import matmul, ordered, rms_norm, swiglu
from maxds.model.residual import Stream
from maxds.model.tiles.groups import ROWS
from maxds.params import Param, Tree
from maxds.quantize import BACKWARD, FORWARD, Quantized, Scaled, gradients, named, quantize, slots, vjp
from maxds.schedule import Given


@flax.struct.dataclass
class Mlp:
    """SwiGLU weights: gate and up side by side [D 2 F], gathered as [D 2F]; down [F D]. Routed experts: [G ...]."""

    up: Tree
    down: Tree


@flax.struct.dataclass
class Dense:
    """Weights of a dense layer's MLP."""

    norm: Tree
    mlp: Mlp
    hyper: Any  # residual.Connection, or None


@flax.struct.dataclass
class Dispatch:
    """Weights read before tokens travel."""

    norm: Tree  # [D]
    router: Tree  # [D E]
    shared: Mlp | None  # the shared experts are one MLP of n_shared_experts times the width
    hyper: Any  # residual.Connection, or None


@flax.struct.dataclass
class Routing:
    """Which rows this device computes. Flat: on TPU, a last dimension of K takes the room of 128."""

    order: jax.Array  # [A*K] int32: (token, choice) pairs, this device's experts' first, sorted by expert
    places: jax.Array  # [A*K] int32: where in that order this device's pairs are; A*K for those of other devices
    sizes: jax.Array  # [G] int32: pairs of each expert of this device
    most: jax.Array  # int32: pairs of the busiest device along `expert`


@flax.struct.dataclass
class Dispatched:
    """A layer between dispatch and experts."""

    stream: Stream
    y: jax.Array  # [T D]: this device's tokens
    tokens: jax.Array | Quantized  # [A D]: those of all devices
    weights: jax.Array  # [A K] float32
    routing: Routing


@flax.struct.dataclass
class Taken:
    """The same, with the rows that this device's experts are to see."""

    stream: Stream
    y: jax.Array  # [T D]
    rows: jax.Array | Quantized  # [R D]: the rows of the first round
    weights: jax.Array  # [A K] float32
    routing: Routing


@flax.struct.dataclass
class Computed:
    """A layer between experts and combine."""

    stream: Stream  # with what rounds after the first have added
    rows: jax.Array | Quantized  # [R D]: what the first round adds to the token of each row
    routing: Routing


@flax.struct.dataclass
class Summed:
    """The same, with the sums of what this device's experts add to the tokens of all devices."""

    stream: Stream
    partial: jax.Array | Quantized  # [A D]


def declare_mlp(c: Model, width: int) -> Mlp:
    """Declares a SwiGLU MLP."""
    d, std = c.hidden_size, c.initializer_range
    return Mlp(
        up=Param((d, 2, width), P("fsdp"), "ibo", std),
        down=Param((width, d), P("fsdp"), "io", std),
    )


def declare_dense(c: Model) -> Dense:
    """Declares the MLP of a dense layer."""
    return Dense(norm(c.hidden_size), declare_mlp(c, c.intermediate_size), residual.declare(c))


def declare_dispatch(c: Model) -> Dispatch:
    """Declares router and shared experts."""
    width = c.n_shared_experts * c.moe_intermediate_size
    return Dispatch(
        norm=norm(c.hidden_size),
        router=Param((c.hidden_size, c.n_routed_experts), P("fsdp"), "io", c.initializer_range, float32=True),
        shared=declare_mlp(c, width) if width else None,
        hyper=residual.declare(c),
    )


def declare_experts(c: Model) -> Mlp:
    """Declares the routed experts."""
    e, d, f, std = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size, c.initializer_range
    return Mlp(
        up=Param((e, d, 2, f), P("expert", "fsdp"), "bibo", std),
        down=Param((e, f, d), P("expert", "fsdp"), "bio", std),
    )


# ------------------------------------------------------------------------------------ dense layers


def dense(c: Model, w: Dense, x: Stream, given: Given, kept: dict | None = None) -> tuple[Stream, dict]:
    """The stage of a dense layer: its MLP. Keeps the gate and up product."""
    y, x = residual.read(c, w.hyper, x)
    up = kept_product(rms_norm(y, w.norm, c.rms_norm_eps), w.mlp.up, (kept or {}).get("mlp_up"))
    up = checkpoint_name(up, "mlp_up")
    return residual.add(x, matmul("bsf,fd->bsd", swiglu(up, c.swiglu_limit), w.mlp.down)), {"mlp_up": up}


@jax.custom_vjp
def kept_product(x: jax.Array, w: jax.Array | Quantized, kept: jax.Array | None) -> jax.Array:
    """[B S D] by [D F], or its kept result with the gradient of a product."""
    return matmul("bsd,df->bsf", x, w) if kept is None else kept


def _kept_product_backward(residuals, dy):
    x, w, kept = residuals
    return *jax.vjp(functools.partial(matmul, "bsd,df->bsf"), x, w)[1](dy), jax.tree.map(jnp.zeros_like, kept)


kept_product.defvjp(lambda *args: (kept_product(*args), args), _kept_product_backward)


# ------------------------------------------------------------------------------------------ router


def score(c: Model, w: Dispatch, y: jax.Array) -> jax.Array:
    """Affinity of each token to each expert, [T D] -> [T E], in float32 throughout."""
    logits = jnp.matmul(y.astype(jnp.float32), w.router, precision=lax.Precision.HIGHEST)
    match c.scoring_func:
        case "softmax":
            return jax.nn.softmax(logits, axis=-1)
        case "sigmoid":
            return jax.nn.sigmoid(logits)
    affinity = jax.nn.softplus(logits)
    normal = affinity >= jnp.finfo(jnp.float32).tiny  # below it is zero on TPU, where the root has no slope
    return jnp.where(normal, jnp.sqrt(jnp.where(normal, affinity, 1)), 0)


def choose(c: Model, scores: jax.Array, bias: jax.Array | None) -> jax.Array:
    """The experts of each token, [T E] -> [T K] int32, within the best `topk_group` of `n_group` groups.

    The bias takes part in the choice only, never in the weights (V3, section 2.1.2).
    """
    scores = lax.stop_gradient(scores if bias is None else scores + bias).T  # so that a TPU's lanes are tokens
    if c.n_group > 1:
        groups = scores.reshape(c.n_group, -1, scores.shape[1])
        best = 2 if c.topk_method == "noaux_tc" else 1
        _, top = largest(jnp.sum(largest(groups, best)[0], axis=1), c.topk_group)
        allowed = jnp.any(top == jnp.arange(c.n_group)[:, None, None], axis=1)
        scores = jnp.where(allowed[:, None], groups, jnp.finfo(scores.dtype).min).reshape(scores.shape)
    return largest(scores, c.num_experts_per_tok)[1].T


def largest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """As `lax.top_k`, of few of the numbers of each column, [... N T] -> [... count T]; none may be -inf.

    TPUs sort for `lax.top_k`, and take ten times as long.
    """
    place = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 2)

    def one(x, _):
        best = jnp.argmax(x, axis=-2, keepdims=True).astype(jnp.int32)
        return jnp.where(place == best, -jnp.inf, x), (jnp.max(x, axis=-2), best.squeeze(-2))

    _, found = lax.scan(one, x, length=count)
    values, places = (jnp.moveaxis(a, 0, -2) for a in found)
    return values, places


def combine_weights(c: Model, scores: jax.Array, chosen: jax.Array) -> jax.Array:
    """What each chosen expert's output is multiplied by, [T E], [T K] -> [T K] float32; 0 for padding."""
    weights = jnp.take_along_axis(scores, chosen, axis=-1, mode="fill", fill_value=0)
    if c.norm_topk_prob:
        weights /= jnp.sum(weights, axis=-1, keepdims=True) + 1e-20
    return weights * c.routed_scaling_factor


def pressure(c: Model, chosen: jax.Array, segments: jax.Array) -> jax.Array:
    """What probability counts for in the balance loss, by sequence and expert, float32 [B E]; no gradient flows to it.

    Args:
      chosen: [n T K], of the n devices that sequences are split over; E for padding.
      segments: [B S], of whole sequences; 0 for padding, which does not count.
    """
    experts, batch = c.n_routed_experts, len(segments)
    hits = jnp.sum(jax.nn.one_hot(chosen, experts, dtype=jnp.float32), axis=2)
    hits = jnp.sum(hits.reshape(len(chosen), batch, -1, experts), axis=(0, 2))
    tokens = jnp.maximum(jnp.sum(segments > 0, axis=1, dtype=jnp.int32), 1).astype(jnp.float32)[:, None]
    return hits * experts / (c.num_experts_per_tok * tokens * tokens)


def balance_loss(scores: jax.Array, pressure: jax.Array, segments: jax.Array) -> jax.Array:
    """Sequence-wise balance loss, summed over sequences (V3, eq. 17-20, without alpha); 1 for each at balance.

    Args:
      scores: [T E].
      pressure: as that of all tokens of these sequences.
      segments: [B S], of these tokens; of sequences that are split it is the part of the loss that they have.
    """
    shares = (scores / jnp.sum(scores, axis=-1, keepdims=True)).reshape(*segments.shape, -1)
    return jnp.sum(pressure * jnp.sum(jnp.where(segments[..., None] > 0, shares, 0), axis=1))


def load(c: Model, chosen: jax.Array) -> jax.Array:
    """Tokens that chose each expert, of [T K] or flat -> [E] int32; exact, so that devices can agree on it."""
    return jnp.bincount(chosen.reshape(-1), length=c.n_routed_experts).astype(jnp.int32)


# ---------------------------------------------------------------------------------- dispatch, experts, combine


def dispatch(
    c: Model, float8: bool, w: Dispatch, x: Stream, given: Given, kept: dict | None = None
) -> tuple[Dispatched, dict]:
    """The stage: shared experts, routing, and the tokens of all devices.

    Keeps the routing, so that it never differs.
    """
    segments = given.tokens.segments
    y, x = residual.read(c, w.hyper, x)
    y = rms_norm(y, w.norm, c.rms_norm_eps)
    if w.shared is not None:
        up = checkpoint_name(matmul("bsd,df->bsf", y, w.shared.up), "shared_up")
        x = residual.add(x, matmul("bsf,fd->bsd", swiglu(up, c.swiglu_limit), w.shared.down))
    y = y.reshape(-1, y.shape[-1])
    scores = score(c, w, y)
    if kept is None:
        kept = {"routing": checkpoint_name(route(c, scores, given), "routing")}
    chosen, routing, pressing = kept["routing"]
    chosen = chosen.reshape(len(scores), -1)
    weights = all_gather(combine_weights(c, scores, chosen))
    if pressing is not None:
        x = dataclasses.replace(x, balance=x.balance + balance_loss(scores, pressing, segments))
    return Dispatched(x, y, of_all(float8, y), weights, routing), kept


def route(c: Model, scores: jax.Array, given: Given) -> tuple[jax.Array, Routing, jax.Array | None]:
    """The experts of each token, flat [T*K]; what this device computes; the `pressure`, unless a table chooses."""
    tokens = given.tokens
    wanted = given.layer[tokens.tokens.reshape(-1)] if hashed(given) else choose(c, scores, given.layer)
    chosen = jnp.where(tokens.segments.reshape(-1, 1) > 0, wanted, c.n_routed_experts)
    everyone, pressing = all_gather(chosen), None
    if not hashed(given):
        whole = (chosen, tokens.segments) if tokens.row is None else (everyone, tokens.row.segments)
        pressing = pressure(c, whole[0].reshape(-1, *chosen.shape), whole[1])
    return chosen.reshape(-1), sort(c, everyone), pressing


@jax.named_scope("dispatch")
def take(capacity: float, x: Dispatched) -> Taken:
    """The rows of the first round, for the experts."""
    rows = rows_at_a_time(x.weights.size, lax.axis_size("expert"), capacity)
    rows = kernels.rows_of_tokens(x.tokens, routes(x.routing, rows, 0, x.weights.shape))
    rows = jax.tree.map(lambda a: named(a, "dispatched"), rows)
    return Taken(x.stream, x.y, rows, x.weights, x.routing)


def hashed(given: Given) -> bool:
    """Whether a table chooses the experts of a token, [V K] int32, instead of its scores."""
    return given.layer is not None and given.layer.dtype == jnp.int32


def all_gather(x: jax.Array) -> jax.Array:
    """Rows of every device on the `expert` axis, [T …] -> [A …]."""
    return lax.all_gather(x, "expert", axis=0, tiled=True)


def reduce_scatter(x: jax.Array) -> jax.Array:
    """The transpose of `all_gather`: sums over the `expert` axis, [A …] -> [T …]."""
    return lax.psum_scatter(x, "expert", scatter_dimension=0, tiled=True)


@jax.custom_vjp
def all_gather_float8(x: jax.Array) -> Quantized:
    """As `all_gather`, rounded to e4m3, in which rows travel with their scales. Gradients are summed in their dtype."""
    return Quantized(_all_gather_rounded(x, FORWARD)).with_slot()


@jax.custom_vjp
def reduce_scatter_float8(x: Quantized) -> jax.Array:
    """As `reduce_scatter`; gradients are rounded to e5m2, in which rows travel with their scales."""
    return reduce_scatter(x.array)


def of_all(float8: bool, y: jax.Array) -> jax.Array | Quantized:
    """The tokens of every device on the `expert` axis, [T D] -> [A D]."""
    return (all_gather_float8 if float8 else all_gather)(y)


def home(partial: jax.Array | Quantized) -> jax.Array:
    """The sums of what all devices add to this one's tokens, [A D] -> [T D]."""
    return reduce_scatter_float8(partial) if isinstance(partial, Quantized) else reduce_scatter(partial)


def _all_gather_rounded(x, dtype):
    return jax.tree.map(all_gather, quantize(x, dtype, over=(1,)))


def _reduce_scatter_backward(_, dy):
    return (Quantized(None, _all_gather_rounded(dy, BACKWARD), "float8"),)


all_gather_float8.defvjp(lambda x: (all_gather_float8(x), None), lambda _, dy: (reduce_scatter(dy.slot),))
reduce_scatter_float8.defvjp(lambda x: (reduce_scatter(x.array), None), _reduce_scatter_backward)


def sort(c: Model, chosen: jax.Array) -> Routing:
    """Puts the pairs [A K] of all devices in the order in which this one computes its own.

    Pairs are counted to their place; one sort inverts that.
    """
    own = c.n_routed_experts // lax.axis_size("expert")
    local = chosen - lax.axis_index("expert") * own
    local = jnp.where((local >= 0) & (local < own), local, own)
    is_of = local[..., None] == jnp.arange(own)  # [A K G]
    hits = jnp.any(is_of, axis=1)
    sizes = jnp.sum(hits, axis=0, dtype=jnp.int32)
    of_experts = _count_before(hits) + jnp.cumsum(sizes) - sizes
    places = jnp.where(local < own, jnp.sum(jnp.where(is_of, of_experts[:, None], 0), axis=-1), chosen.size)
    of_devices = jnp.sum(chosen.reshape(-1, 1) // own == jnp.arange(lax.axis_size("expert")), axis=0, dtype=jnp.int32)
    return Routing(ordered(local.reshape(-1), own), places.reshape(-1), sizes, jnp.max(of_devices))


def _count_before(hits: jax.Array) -> jax.Array:
    """[A G] bool -> [A G] int32: how many of the rows above are true. Matrices count within blocks, and are exact."""
    block = math.gcd(len(hits), 256)
    blocks = hits.reshape(-1, block, hits.shape[1]).astype(jnp.float32)
    above = jnp.tril(jnp.ones((block, block), jnp.float32), -1)
    inside = jnp.einsum("ij,bjg->big", above, blocks).astype(jnp.int32)
    totals = jnp.sum(blocks, axis=1).astype(jnp.int32)
    before = jnp.cumsum(totals, axis=0) - totals
    return (inside + before[:, None]).reshape(hits.shape)


def rows_at_a_time(pairs: int, shards: int, capacity: float) -> int:
    """Rows that a device makes room for: `capacity` times its even share of the pairs, and not more than all.

    Where there are many, a whole number of tiles of the kernels for TPU, or these would not take them.
    """
    share = pairs / shards
    unit = ROWS if share >= 16 * ROWS else 8
    return min(math.ceil(share * capacity / unit) * unit, pairs)


def routes(routing: Routing, rows: int, i: jax.Array | int, shape: tuple[int, ...]) -> kernels.Routes:
    """Rows [i * rows, (i + 1) * rows) of the order; `shape` is [A K], of the pairs."""
    first = i * rows
    order = jnp.pad(routing.order, (0, -len(routing.order) % rows))
    places = routing.places.reshape(shape)
    within = (places >= first) & (places < jnp.minimum(first + rows, jnp.sum(routing.sizes)))
    return kernels.Routes(lax.dynamic_slice_in_dim(order, first, rows), places - first, within)


def experts(c: Model, w: Mlp, x: Taken, given: Given, kept: dict | None = None) -> tuple[Computed, dict]:
    """The stage: this device's experts, each on its tokens. Keeps the gate and up product of the first round."""
    operands, kept_up = (w, x.y, x.weights), (kept or {}).get("expert_up")
    found: Any = _all_rounds(c.swiglu_limit, x.rows, x.stream.made, operands, x.routing, kept_up)
    rows, made, up = found
    return Computed(residual.with_made(x.stream, made), rows, x.routing), {"expert_up": up}


def _multiplied(limit: float | None, w: Mlp, x: Any, weights: jax.Array, routing: Routing, i, kept=None):
    """Rows x [R D] of round i -> what each adds to its token [R D], and their up product [R 2F]."""
    rows, ends = x.shape[0], jnp.cumsum(routing.sizes)
    first = i * rows
    here = jnp.clip(ends, first, first + rows) - jnp.clip(ends - routing.sizes, first, first + rows)
    weight = kernels.rows_of_pairs(weights, routes(routing, rows, i, weights.shape))
    if isinstance(x, Quantized):
        return rounded.multiplied(limit, x, (w.up, w.down), weight, here, kept)
    up = kernels.grouped_matmul(x, w.up, here, kept)
    return kernels.grouped_matmul(kernels.gated(limit, up, weight, jnp.sum(here)), w.down, here), up


def _further_round(limit: float | None, rows: int, i, operands, routing: Routing):
    """What round i adds to this device's tokens [T D], moving its rows by itself."""
    w, y, weights = operands
    route = routes(routing, rows, i, weights.shape)
    float8 = isinstance(w.up, Quantized)
    x = kernels.rows_of_tokens(of_all(float8, y), route)
    found = home(kernels.tokens_of_rows(_multiplied(limit, w, x, weights, routing, i)[0], route))
    return lax.optimization_barrier(found)  # else the compiler would scatter even the sum over no rounds


def _in_further_rounds(rows, routing, add, start):
    """What these add, one after the other, of which there is none where the first has room for all pairs.

    There are as many on all devices along `expert`, for they exchange tokens in each.
    """
    if rows == len(routing.order):
        return start
    return lax.fori_loop(1, (routing.most + rows - 1) // rows, add, start)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_rounds(limit, rows, made, operands, routing, kept):
    """As many rounds as the routing fills; the first is always computed, and the only one kept of.

    What the others make is added to `made` [B S D].
    """
    w, _, weights = operands

    def further(i, made):
        return made + _further_round(limit, rows.shape[0], i, operands, routing).reshape(made.shape)

    out, up = _multiplied(limit, w, rows, weights, routing, 0, kept)
    return out, _in_further_rounds(rows.shape[0], routing, further, made), up


def _all_rounds_forward(limit, rows, made, operands, routing, kept):
    found: Any = _all_rounds(limit, rows, made, operands, routing, kept)
    out, made, up = found[0], found[1], checkpoint_name(found[2], "expert_up")
    return (out, made, up), (rows, operands, routing, kept, up)


def _all_rounds_backward(limit, residuals, cotangents):
    rows, operands, routing, kept, up = residuals
    dout, dmade, _ = cotangents

    w, y, weights = operands

    def first(rows, w, y, weights):
        return _multiplied(limit, w, rows, weights, routing, 0, up)[0]

    def further(i, grads):
        def run(*operands):
            return _further_round(limit, rows.shape[0], i, operands, routing)

        more = lax.optimization_barrier(vjp(run, w, y, weights)[1](dmade.reshape(y.shape)))
        return jax.tree.map(operator.add, grads, more, is_leaf=lambda g: isinstance(g, Scaled))

    drows, *grads = vjp(first, rows, w, y, weights)[1](slots(dout))
    dw, *others = _in_further_rounds(rows.shape[0], routing, further, tuple(grads))
    return gradients(rows, drows), dmade, (gradients(w, dw), *others), None, jax.tree.map(jnp.zeros_like, kept)


_all_rounds.defvjp(_all_rounds_forward, _all_rounds_backward)


def combine(c: Model, x: Computed) -> Stream:
    """Sums each token's rows, brings the sum home and adds it to the stream. Linear, but for float8."""
    return _brought_home(_summed(c, x))


def _summed(c: Model, x: Computed) -> Summed:
    shape = len(x.routing.order) // c.num_experts_per_tok, c.num_experts_per_tok
    return Summed(x.stream, kernels.tokens_of_rows(x.rows, routes(x.routing, x.rows.shape[0], 0, shape)))


def _brought_home(x: Summed) -> Stream:
    return residual.add(x.stream, home(x.partial).reshape(x.stream.shape))


def uncombine(float8: bool, dy: Stream) -> Summed:
    """The first half of the transpose of `combine`: what travels."""
    batch, length, width = dy.shape
    partial: Any = jnp.zeros((batch * length * lax.axis_size("expert"), width), dy.dtype)
    partial = Quantized(partial, gradient="float8") if float8 else partial
    return vjp(_brought_home, Summed(dy, partial))[1](dy)[0]


def spread(c: Model, pending: Callable, kept: dict, dy: Summed) -> Computed:
    """The second half, of a microbatch whose layer kept this: each token's cotangent to its rows."""
    like = dataclasses.replace(pending(dy.stream), routing=kept["routing"][1])
    return vjp(functools.partial(_summed, c), like)[1](dy)[0]


def beside_stream(x: Any, other: Tree) -> tuple[Any, Tree]:
    """A barrier of something else and the stream; what else there is need not be there.

    Of what `dispatch` gives, that is on its way. Of the cotangent of what `experts` gives, the first round reads it,
    with which the stage gets on meanwhile; rounds after that read the stream's alone.
    """
    stream, other = lax.optimization_barrier((x.stream, other))
    return dataclasses.replace(x, stream=stream), other


def pending(c: Model, float8: bool, capacity: float, x: Stream) -> Computed:
    """A combine that has nothing to add: `combine(pending(x)) == x`."""
    shards = lax.axis_size("expert")
    batch, length, width = x.shape
    pairs = batch * length * shards * c.num_experts_per_tok
    rows: Any = jnp.zeros((rows_at_a_time(pairs, shards, capacity), width), x.dtype)
    if float8:
        rows = Quantized(Scaled(rows, jnp.zeros((len(rows), 1), x.dtype)), gradient="float8")
    none = jnp.zeros((pairs,), jnp.int32)
    sizes = jnp.zeros((c.n_routed_experts // shards,), jnp.int32)
    return Computed(x, rows, Routing(none, none, sizes, jnp.zeros((), jnp.int32)))

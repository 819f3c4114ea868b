"""Routed and shared experts: route, dispatch, experts, combine (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

Tokens travel, experts do not. Each device all-gathers the tokens of its `expert` axis (A of them)
and computes the rows that its own experts are to see: no more than R at a time, in as many
rounds as the routing needs, so that no token is ever dropped and no room is made for rows that
belong to other devices. A reduce-scatter brings the sums home.
"""

import dataclasses
import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from maxds.config import Model
from maxds.model import kernels
from maxds.model.attention import norm
from maxds.model.ops import rms_norm, swiglu
from maxds.params import Param, Tree
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


@flax.struct.dataclass
class Dispatch:
    """Weights read before tokens travel."""

    norm: Tree  # [D]
    router: Tree  # [D E]
    shared: Mlp | None  # the shared experts are one MLP of n_shared_experts times the width


@flax.struct.dataclass
class Stream:
    """What runs through the layers."""

    h: jax.Array  # [B S D], the residual stream
    balance: jax.Array  # float32 scalar: the balance loss of the layers so far, summed over sequences


@flax.struct.dataclass
class Dispatched:
    """A layer between dispatch and experts."""

    stream: Stream
    tokens: jax.Array  # [A D]
    weights: jax.Array  # [A K] float32
    order: jax.Array  # [A*K] int32: (token, choice) pairs, this device's experts' first, sorted by expert
    slots: jax.Array  # [A*K] int32: where in that order this device's pairs are; A*K for those of other devices
    sizes: jax.Array  # [G] int32: pairs of each expert of this device


@flax.struct.dataclass
class Computed:
    """A layer between experts and combine."""

    stream: Stream
    partial: jax.Array  # [A D]: what this device's experts add to the tokens of all


def declare_mlp(c: Model, width: int) -> Mlp:
    """Declares a SwiGLU MLP."""
    d, std = c.hidden_size, c.initializer_range
    return Mlp(
        up=Param((d, 2, width), P("fsdp"), "ibo", std),
        down=Param((width, d), P(None, "fsdp"), "io", std),
    )


def declare_dense(c: Model) -> Dense:
    """Declares the MLP of a dense layer."""
    return Dense(norm=norm(c.hidden_size), mlp=declare_mlp(c, c.intermediate_size))


def declare_dispatch(c: Model) -> Dispatch:
    """Declares router and shared experts."""
    width = c.n_shared_experts * c.moe_intermediate_size
    return Dispatch(
        norm=norm(c.hidden_size),
        router=Param((c.hidden_size, c.n_routed_experts), P("fsdp"), "io", c.initializer_range, float32=True),
        shared=declare_mlp(c, width) if width else None,
    )


def declare_experts(c: Model) -> Mlp:
    """Declares the routed experts."""
    e, d, f, std = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size, c.initializer_range
    return Mlp(
        up=Param((e, d, 2, f), P("expert", "fsdp"), "bibo", std),
        down=Param((e, f, d), P("expert", None, "fsdp"), "bio", std),
    )


# ------------------------------------------------------------------------------------ dense layers


def dense(c: Model, w: Dense, x: Stream, given: Given, kept: dict | None = None) -> tuple[Stream, dict]:
    """The stage of a dense layer: `x.h` plus its MLP. Keeps the gate and up product."""
    y = rms_norm(x.h, w.norm, c.rms_norm_eps)
    up = kept_product(y, w.mlp.up, (kept or {}).get("mlp_up"))
    up = checkpoint_name(up, "mlp_up")
    return dataclasses.replace(x, h=x.h + swiglu(up) @ w.mlp.down), {"mlp_up": up}


@jax.custom_vjp
def kept_product(x: jax.Array, w: jax.Array, kept: jax.Array | None) -> jax.Array:
    """x @ w, or its kept result with the gradient of one."""
    return x @ w if kept is None else kept


def _kept_product_backward(residuals, dy):
    x, w, kept = residuals
    return *jax.vjp(jnp.matmul, x, w)[1](dy), jax.tree.map(jnp.zeros_like, kept)


kept_product.defvjp(lambda *args: (kept_product(*args), args), _kept_product_backward)


# ------------------------------------------------------------------------------------------ router


def score(c: Model, w: Dispatch, y: jax.Array) -> jax.Array:
    """Affinity of each token to each expert, [T D] -> [T E], in float32 throughout."""
    logits = jnp.matmul(y.astype(jnp.float32), w.router, precision=lax.Precision.HIGHEST)
    return jax.nn.softmax(logits, axis=-1) if c.scoring_func == "softmax" else jax.nn.sigmoid(logits)


def choose(c: Model, scores: jax.Array, bias: jax.Array | None) -> jax.Array:
    """The experts of each token, [T E] -> [T K] int32, within the best `topk_group` of `n_group` groups.

    The bias takes part in the choice only, never in the weights (V3, section 2.1.2).
    """
    scores = scores if bias is None else scores + bias
    if c.n_group > 1:
        groups = scores.reshape(len(scores), c.n_group, -1)
        best = 2 if c.topk_method == "noaux_tc" else 1
        _, top = lax.top_k(jnp.sum(lax.top_k(groups, best)[0], axis=-1), c.topk_group)
        allowed = jnp.any(jax.nn.one_hot(top, c.n_group, dtype=bool), axis=1)
        scores = jnp.where(allowed[..., None], groups, -jnp.inf).reshape(scores.shape)
    return lax.top_k(scores, c.num_experts_per_tok)[1].astype(jnp.int32)


def combine_weights(c: Model, scores: jax.Array, chosen: jax.Array) -> jax.Array:
    """What each chosen expert's output is multiplied by, [T E], [T K] -> [T K] float32; 0 for padding."""
    weights = jnp.take_along_axis(scores, chosen, axis=-1, mode="fill", fill_value=0)
    if c.norm_topk_prob:
        weights /= jnp.sum(weights, axis=-1, keepdims=True) + 1e-20
    return weights * c.routed_scaling_factor


def balance_loss(c: Model, scores: jax.Array, chosen: jax.Array, segments: jax.Array) -> jax.Array:
    """Sequence-wise balance loss, summed over sequences (V3, eq. 17-20, without alpha); 1 for each at balance.

    Args:
      scores: [T E].
      chosen: [T K]; E for padding.
      segments: [B S]; 0 for padding, which does not count.
    """
    experts, (batch, length) = scores.shape[-1], segments.shape
    real = (segments > 0).astype(jnp.float32)
    tokens = jnp.maximum(jnp.sum(real, axis=1), 1)[:, None]
    hits = jnp.sum(jax.nn.one_hot(chosen, experts, dtype=jnp.float32), axis=1).reshape(batch, length, experts)
    frequency = jnp.sum(hits, axis=1) * experts / (c.num_experts_per_tok * tokens)
    share = (scores / jnp.sum(scores, axis=-1, keepdims=True)).reshape(batch, length, experts)
    probability = jnp.sum(share * real[..., None], axis=1) / tokens
    return jnp.sum(frequency * probability)


def load(c: Model, chosen: jax.Array) -> jax.Array:
    """Tokens that chose each expert, of [T K] or flat -> [E] int32; exact, so that devices can agree on it."""
    return jnp.bincount(chosen.reshape(-1), length=c.n_routed_experts).astype(jnp.int32)


# ---------------------------------------------------------------------------------- dispatch, experts, combine


def dispatch(c: Model, w: Dispatch, x: Stream, given: Given, kept: dict | None = None) -> tuple[Dispatched, dict]:
    """The stage: shared experts, routing, and the tokens on their way. Keeps the routing, so that it never differs."""
    segments = given.tokens.segments
    y = rms_norm(x.h, w.norm, c.rms_norm_eps)
    h = x.h
    if w.shared is not None:
        h += swiglu(checkpoint_name(y @ w.shared.up, "shared_up")) @ w.shared.down
    y = y.reshape(-1, y.shape[-1])
    scores = score(c, w, y)
    if kept is None:
        chosen = jnp.where(segments.reshape(-1, 1) > 0, choose(c, scores, given.layer), c.n_routed_experts)
        kept = {"routing": checkpoint_name((chosen.reshape(-1), *sort(c, all_gather(chosen))), "routing")}
    chosen, *routing = kept["routing"]  # flat: on TPU, a last dimension of K takes the room of 128
    chosen = chosen.reshape(len(scores), -1)
    tokens, weights = (all_gather(a) for a in (y, combine_weights(c, scores, chosen)))
    stream = Stream(h, x.balance + balance_loss(c, scores, chosen, segments))
    dispatched = Dispatched(stream, checkpoint_name(tokens, "dispatched"), weights, *routing)
    return dispatched, kept


def all_gather(x: jax.Array) -> jax.Array:
    """Rows of every device on the `expert` axis, [T …] -> [A …]."""
    return lax.all_gather(x, "expert", axis=0, tiled=True)


def sort(c: Model, chosen: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[A K] -> `order`, `slots` and `sizes` of `Dispatched`.

    Pairs are counted to their place. The one sort, which inverts that, is of single numbers: (expert, pair) in one.
    """
    own = c.n_routed_experts // lax.axis_size("expert")
    local = chosen - lax.axis_index("expert") * own
    local = jnp.where((local >= 0) & (local < own), local, own)
    is_of = local[..., None] == jnp.arange(own)  # [A K G]
    hits = jnp.any(is_of, axis=1)
    sizes = jnp.sum(hits, axis=0, dtype=jnp.int32)
    places = _count_before(hits) + jnp.cumsum(sizes) - sizes
    slots = jnp.where(local < own, jnp.sum(jnp.where(is_of, places[:, None], 0), axis=-1), chosen.size)
    bits = (chosen.size - 1).bit_length()
    assert (own + 1) << bits <= 1 << 32, (own, chosen.size)
    pairs = jnp.arange(chosen.size, dtype=jnp.uint32)
    keys = lax.sort(local.reshape(-1).astype(jnp.uint32) << bits | pairs, is_stable=False)
    return (keys & (1 << bits) - 1).astype(jnp.int32), slots.reshape(-1), sizes


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
    """Rows that a device makes room for: `capacity` times its even share of the pairs, and not more than all."""
    return min(math.ceil(pairs / shards * capacity / 8) * 8, pairs)


def experts(
    c: Model, capacity: float, w: Mlp, x: Dispatched, given: Given, kept: dict | None = None
) -> tuple[Computed, dict]:
    """The stage: this device's experts, each on its tokens. Keeps the gate and up product of the first round."""
    rows = rows_at_a_time(x.weights.size, lax.axis_size("expert"), capacity)
    routing = jnp.pad(x.order, (0, -len(x.order) % rows)), x.slots, x.sizes
    found: Any = _all_rounds(rows, (w, x.tokens, x.weights), routing, (kept or {}).get("expert_up"))
    partial, up = found
    return Computed(x.stream, partial), {"expert_up": up}


def _one_round(rows, i, operands, routing, kept=None):
    """What rows [i * rows, (i + 1) * rows) of the order add to each token [A D], and their up product [R 2F]."""
    (w, tokens, weights), (order, slots, sizes) = operands, routing
    ends, first = jnp.cumsum(sizes), i * rows
    here = jnp.clip(ends, first, first + rows) - jnp.clip(ends - sizes, first, first + rows)
    slots = slots.reshape(weights.shape)
    within = (slots >= first) & (slots < jnp.minimum(first + rows, ends[-1]))
    routes = kernels.Routes(lax.dynamic_slice_in_dim(order, first, rows), slots - first, within)
    x = kernels.rows_of_tokens(tokens, routes)
    up = kernels.grouped_matmul(x, w.up, here, kept)
    weight = kernels.rows_of_pairs(weights, routes)[:, None].astype(up.dtype)
    y = kernels.grouped_matmul(swiglu(up) * weight, w.down, here)
    return kernels.tokens_of_rows(y, routes), up


def _rounds(rows, routing):
    return (jnp.sum(routing[-1]) + rows - 1) // rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _all_rounds(rows, operands, routing, kept):
    """As many rounds as the routing fills; the first is always computed, and the only one kept of."""
    first, up = _one_round(rows, 0, operands, routing, kept)

    def further(i, y):
        return y + _one_round(rows, i, operands, routing)[0]

    return lax.fori_loop(1, _rounds(rows, routing), further, first), up


def _all_rounds_forward(rows, operands, routing, kept):
    found: Any = _all_rounds(rows, operands, routing, kept)
    y, up = found[0], checkpoint_name(found[1], "expert_up")
    return (y, up), (operands, routing, kept, up)


def _all_rounds_backward(rows, residuals, cotangents):
    operands, routing, kept, up = residuals
    dy, _ = cotangents

    def pull(i, up=None):
        return jax.vjp(lambda operands: _one_round(rows, i, operands, routing, up)[0], operands)[1](dy)[0]

    def further(i, grads):
        return jax.tree.map(jnp.add, grads, pull(i))

    grads = lax.fori_loop(1, _rounds(rows, routing), further, pull(0, up))
    return grads, None, jax.tree.map(jnp.zeros_like, kept)


_all_rounds.defvjp(_all_rounds_forward, _all_rounds_backward)


def combine(x: Computed) -> Stream:
    """Brings each token's sum home and adds it to the residual stream. Linear."""
    y = lax.psum_scatter(x.partial, "expert", scatter_dimension=0, tiled=True)
    return dataclasses.replace(x.stream, h=x.stream.h + y.reshape(x.stream.h.shape))


def pending(x: Stream) -> Computed:
    """A combine that has nothing to add: `combine(pending(x)) == x`."""
    tokens = x.h.shape[0] * x.h.shape[1] * lax.axis_size("expert")
    return Computed(x, jnp.zeros((tokens, x.h.shape[-1]), x.h.dtype))

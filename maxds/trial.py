"""A trial of this device's kernels: what they make of drawn numbers, held against what the host's CPU makes of them.

Tests of maxds run the kernels for TPU in a simulated memory, and compile them; whether a machine computes what it
should, only it can tell.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxds.architecture import OVERLAPPED, Model
from maxds.model import indexer, kernels, ops, rounded, sparse, window
from maxds.model.indexer import Attended, Index
from maxds.model.tiles import Turn
from maxds.params import Tree
from maxds.quantize import BACKWARD, FORWARD, Quantized, quantize, vjp

LENGTH, HEADS = 4096, 16  # tokens of the row, and heads: of these are tiles and groups of their full size
ROWS, CHOICES, EXPERTS = 2048, 4, 8
SIZES = np.array([ROWS // 2, 0, 100, 3, ROWS // 4, 0, 17, 1], np.int32)  # of groups, some empty; rows are left over

Trial = tuple[Callable, tuple]
"""A function of arrays, and the arrays."""


def differences(model: Model, float8: bool, device: Any, reference: Any) -> dict[str, float]:
    """What each kernel that a model uses, in float8 or not, computes on a device and on another.

    Returns:
      By kernel the largest difference of its results and gradients, each over the largest number that it is one of;
      not a number where one is none.
    """
    return {name: _difference(trial, device, reference) for name, trial in _trials(model, float8).items()}


def _difference(trial: Trial, device: Any, reference: Any) -> float:
    found, expected = (jax.tree.leaves(_run(trial, where)) for where in (device, reference))
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if b.size]
    return float(np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs]))


def _run(trial: Trial, device: Any) -> Tree:
    """Results in float32; kernels are chosen for the mesh that a program is traced in."""
    fn, args = trial
    with jax.set_mesh(jax.sharding.Mesh(np.array([device]), "alone")):
        results = jax.jit(fn)(*jax.device_put(args, device))
    return jax.tree.map(lambda a: np.asarray(a, np.float32), results)


def _trials(model: Model, float8: bool) -> dict[str, Trial]:
    found = {"grouped matmul": _grouped_matmul(), "gated rows": _gated(model), "sum of rows": _sum_of_rows(model)}
    if float8:
        found["experts in float8"] = _experts_float8(model)
    latent = model.compress_ratios is None
    if latent:
        found["attention"] = _attention(model, None)
    if model.index_topk is not None:
        found["index"] = _index(model)
        if latent:
            found["attention to selected"] = _attention(model, _selected())
    for ratio in sorted(set(model.compress_ratios or ())):
        found["attention to a window" + (f" and entries of {ratio}" if ratio else "")] = _window(model, ratio)
    return found


def _draw(*shapes: tuple[int, ...]) -> list[jax.Array]:
    """Of one seed, so that every process draws the same."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for shape in shapes]


def _documents() -> jax.Array:
    return jnp.asarray(np.repeat([[1, 2, 0]], [LENGTH // 2, LENGTH // 4, LENGTH // 4], axis=1).astype(np.int32))


def _selected() -> jax.Array:
    """Of each query itself, and of its past every third key."""
    query, key = np.arange(LENGTH)[:, None], np.arange(LENGTH)
    return sparse.pack(jnp.asarray((key <= query) & ((query - key) % 3 == 0))[None], LENGTH)


def _attention(model: Model, selected: jax.Array | None) -> Trial:
    """Of padding nothing is compared: what it attends to is not the same everywhere."""
    size, rope = model.qk_head_dim, model.qk_rope_head_dim
    angles = ops.rope_table(rope, model.rope_theta, None, jnp.arange(LENGTH)[None])

    def run(q, own, shared, v, dout):
        def attend(q, k, v):
            out, *_ = kernels.attention(q, k, v, kernels.Sight(_documents(), selected, *angles))
            return jnp.where(_documents()[:, None, :, None] > 0, out, 0)

        out, pull = jax.vjp(attend, q * size**-0.5, (own, shared), v)
        return out, pull(dout)

    q, own, v, dout = ((1, HEADS, LENGTH, width) for width in (size, size - rope, model.v_head_dim, model.v_head_dim))
    return run, tuple(_draw(q, own, (1, LENGTH, rope), v, dout))


def _window(model: Model, ratio: int) -> Trial:
    """With entries that stand for `ratio` tokens, of which an indexer selects every third where blocks overlap."""
    segments, size = _documents(), model.head_dim
    last = jnp.arange(ratio - 1, LENGTH, ratio) if ratio else jnp.zeros(0, int)
    keys = kernels.Keys(segments[:, last], last[None], ratio or 1)
    selected = None
    if ratio == OVERLAPPED:
        every_third = jnp.arange(keys.count) % 3 == 0
        selected = sparse.pack(kernels.visible(segments, keys, 0) & every_third, keys.count)
    rope = ops.rope_table(model.qk_rope_head_dim, model.rope_theta, None, jnp.arange(LENGTH)[None])
    sight = window.Sight(segments, keys, selected, Turn(*rope, model.rms_norm_eps), model.sliding_window)

    def run(q, tokens, entries, sinks, dout):
        def attend(q, *kv):
            return window.attention(q, kv, sinks, sight)[0]

        out, pull = jax.vjp(attend, q, tokens, entries)
        return out, pull(dout)

    of_heads, of_tokens, of_entries = (1, HEADS, LENGTH, size), (1, LENGTH, size), (1, keys.count, size)
    q, tokens, entries, sinks, dout = _draw(of_heads, of_tokens, of_entries, (HEADS,), of_heads)
    return run, (q, tokens, entries, sinks.astype(jnp.float32), dout)


def _index(model: Model) -> Trial:
    """The loss of an indexer and its gradient."""
    size = model.index_head_dim

    def run(q, k, heads, queries, keys):
        scores = jnp.einsum("bnqh,bnkh->bnqk", queries, keys, preferred_element_type=jnp.float32)
        seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        lse = jax.nn.logsumexp(jnp.where(seen, scores, -jnp.inf), axis=-1)
        attended = Attended(queries, keys, lse, None, jnp.ones((1, LENGTH), jnp.int32))
        return jax.value_and_grad(indexer.divergence)(Index(q, k, heads * size**-0.5), attended)

    of_attention = (1, HEADS, LENGTH, 64)
    shapes = (1, HEADS, LENGTH, size), (1, LENGTH, size), (1, HEADS, LENGTH), of_attention, of_attention
    q, k, heads, queries, keys = _draw(*shapes)
    return run, (q, k, heads.astype(jnp.float32), queries / 8, keys)


def _grouped_matmul() -> Trial:
    def run(x, w, dy):
        y, pull = jax.vjp(lambda x, w: kernels.grouped_matmul(x, w, jnp.asarray(SIZES)), x, w)
        inside = jnp.arange(ROWS)[:, None] < SIZES.sum()
        dx, dw = pull(jnp.where(inside, dy, 0))
        return jnp.where(inside, y, 0), jnp.where(inside, dx, 0), dw

    return run, tuple(_draw((ROWS, 256), (EXPERTS, 256, 512), (ROWS, 512)))


def _experts_float8(model: Model) -> Trial:
    """Whole, for a number that is rounded the other way is off by an eighth, and a sum of many hardly."""

    def run(x, up, down, weights, dy):
        w = tuple(Quantized(quantize(a, FORWARD, over=(1, 2)), gradient="scaled") for a in (up, down))

        def multiply(x, w, weights):
            return rounded.multiplied(model.swiglu_limit, x, w, weights, jnp.asarray(SIZES))[0]

        x = Quantized(quantize(x, FORWARD, over=(1,)), gradient="scaled")
        y, pull = vjp(multiply, x, w, weights)
        dx, dw, dweights = pull(quantize(dy, BACKWARD, over=(1,)))
        count = SIZES.sum()
        return y.array.whole()[:count], dx.whole()[:count], [d.whole() for d in dw], dweights[:count]

    x, up, down, weights, dy = _draw((ROWS, 512), (EXPERTS, 512, 1024), (EXPERTS, 512, 512), (ROWS,), (ROWS, 512))
    return run, (x, up, down, weights.astype(jnp.float32), dy)


def _gated(model: Model) -> Trial:
    """Of which some rows are left over."""
    count = ROWS - ROWS // 5

    def run(up, weights, dy):
        def gate(up, weights):
            gated = kernels.gated(model.swiglu_limit, up, weights, jnp.int32(count))
            return jnp.where(jnp.arange(ROWS)[:, None] < count, gated, 0)

        y, pull = jax.vjp(gate, up, weights)
        dup, dweights = pull(dy)
        return y, dup[:count], dweights[:count]

    up, weights, dy = _draw((ROWS, 1024), (ROWS,), (ROWS, 512))
    return run, (up, weights.astype(jnp.float32), dy)


def _sum_of_rows(model: Model) -> Trial:
    """Of half of the pairs of tokens and choices; rows lie in no order."""
    tokens = ROWS // CHOICES
    order = np.random.default_rng(0).permutation(ROWS)
    slots = jnp.asarray(np.argsort(order).reshape(tokens, CHOICES).astype(np.int32))
    routes = kernels.Routes(jnp.asarray(order.astype(np.int32)), slots, slots < ROWS // 2)
    return lambda rows: kernels.tokens_of_rows(rows, routes), tuple(_draw((ROWS, model.hidden_size)))

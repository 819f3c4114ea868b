"""The router's choice, and one round of the experts, each on its own."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny

from maxds.model import kernels, moe
from maxds.model.tiles import groups
from maxds.quantize import BACKWARD, FORWARD, Quantized, quantize, vjp


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy", "noaux_tc"])
def test_of_equal_experts_and_of_equal_groups_the_first_are_chosen(method):
    groups = (1, 1) if method == "greedy" else (4, 2)
    c = dataclasses.replace(
        tiny.V3, topk_method=method, n_routed_experts=16, num_experts_per_tok=5, n_group=groups[0], topk_group=groups[1]
    )
    rng = np.random.default_rng(0)
    scores = rng.integers(1, 4, (200, 16)).astype(np.float32) / 4  # sums are exact, and most are alike
    bias = rng.integers(-1, 2, 16).astype(np.float32) / 4 if method == "noaux_tc" else None
    scores[0] = 0.5
    expected = [oracle.route(c, of_token, bias) for of_token in scores]
    np.testing.assert_array_equal(moe.choose(c, jnp.asarray(scores), bias), expected)


@pytest.mark.parametrize("logit", [-80.0, -89.0, -200.0, 0.0, 50.0])
def test_the_slope_of_v4_s_affinities_is_a_number_wherever_they_are(logit):
    """sqrt(softplus(x)) has the slope sigmoid(x) / 2 / sqrt(softplus(x)); below -87.3 float32 has no such softplus."""
    c = dataclasses.replace(tiny.V3, scoring_func="sqrtsoftplus")
    router = jnp.ones((1, 1))
    slope = jax.grad(lambda y: moe.score(c, types.SimpleNamespace(router=router), y).sum())(jnp.full((1, 1), logit))
    softplus = np.log1p(np.exp(np.float64(logit)))
    expected = 0 if logit < -88 else 0.5 / (1 + np.exp(-np.float64(logit))) / np.sqrt(softplus)
    np.testing.assert_allclose(slope, expected, rtol=1e-5)


@pytest.mark.parametrize("share", [1, 50, 1000, 16 * groups.ROWS - 1, 16 * groups.ROWS, 10**6 + 7])
@pytest.mark.parametrize(("shards", "capacity"), [(1, 1.5), (8, 1.0), (8, 1.3), (4, 3.9), (4, 9.0)])
def test_room_for_rows_is_of_eights_or_of_whole_tiles_where_there_are_many_and_not_for_more_than_all(
    share, shards, capacity
):
    pairs, unit = share * shards, groups.ROWS if share >= 16 * groups.ROWS else 8
    rows, least = moe.rows_at_a_time(pairs, shards, capacity), share * capacity
    assert rows == pairs <= least + unit or (rows % unit == 0 and least <= rows < least + unit)
    assert rows <= pairs


def test_a_sequence_of_nothing_but_padding_presses_nowhere():
    c, segments = tiny.V3, np.array([[1] * 6, [0] * 6], np.int32)
    chosen = np.where(segments.reshape(-1, 1) > 0, np.arange(c.num_experts_per_tok), c.n_routed_experts)
    found = np.asarray(moe.pressure(c, jnp.asarray(chosen[None]), jnp.asarray(segments)))
    assert (found[0] > 0).sum() == c.num_experts_per_tok and (found[1] == 0).all()


ROWS, TOKENS, CHOICES, WIDTH = 16, 12, 2, 8


def one_round(float8):
    """What a round adds, and the gradients of its operands; five of the sixteen rows belong to no expert."""
    keys = jax.random.split(jax.random.key(0), 6)
    w = moe.Mlp(
        up=jax.random.normal(keys[0], (3, WIDTH, 8)),
        down=jax.random.normal(keys[1], (3, 4, WIDTH)),
    )
    if float8:
        w = jax.tree.map(lambda a: Quantized(quantize(a, FORWARD, over=(1, 2)), gradient="scaled"), w)
    tokens, weights = jax.random.normal(keys[2], (TOKENS, WIDTH)), jax.random.uniform(keys[3], (TOKENS, CHOICES))
    if float8:
        tokens = Quantized(quantize(tokens, FORWARD, over=(1,)))
    order = jax.random.permutation(keys[4], TOKENS * CHOICES)
    routing = moe.Routing(order, jnp.argsort(order), jnp.array([4, 0, 7]), jnp.array(11))

    def run(operands):
        w, tokens, weights = operands
        routes = moe.routes(routing, ROWS, 0, weights.shape)
        y, _ = moe._multiplied(None, w, kernels.rows_of_tokens(tokens, routes), weights, routing, 0)
        return kernels.tokens_of_rows(y, routes)

    y, pull = vjp(run, (w, tokens, weights))
    dy = jax.random.normal(keys[5], (TOKENS, WIDTH))
    return y, pull(quantize(dy, BACKWARD, over=(1,)) if float8 else dy)


@pytest.mark.parametrize("float8", [False, True])
def test_what_a_kernel_leaves_in_rows_of_no_expert_reaches_nothing(monkeypatch, float8):
    clean = one_round(float8)

    def dirty(x, w, sizes, *how):
        outside = (jnp.arange(len(x)) >= jnp.sum(sizes))[:, None]
        return jnp.where(outside, 1e6, multiply(x, w, sizes, *how))

    multiply = kernels.multiply_groups
    monkeypatch.setattr(kernels, "multiply_groups", dirty)
    jax.tree.map(np.testing.assert_array_equal, one_round(float8), clean)

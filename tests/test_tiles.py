"""The kernels for TPU that are our own compute what they say, in a TPU's memory as Pallas simulates it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.experimental.pallas import tpu as pltpu

from maxds.model import indexer, kernels, sparse, tiles
from maxds.model.indexer import Attended, Index

# What nothing was written to is not a number, and a read outside of an array ends the program.
SIMULATED = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise", detect_races=True)


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]


def assert_close(found, expected, tolerance=3e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max()), found, expected
    )


@pytest.mark.parametrize("order", [tiles.by_rows, tiles.by_columns])
def test_every_tile_that_is_not_of_the_future_is_visited_once(order):
    visits = order(5)
    assert sorted(zip(visits.query, visits.key, strict=True)) == [(q, k) for q in range(5) for k in range(q + 1)]
    along = visits.query if order is tiles.by_rows else visits.key
    changes = np.flatnonzero(np.diff(along)) + 1
    np.testing.assert_array_equal(np.flatnonzero(visits.first), [0, *changes])
    np.testing.assert_array_equal(np.flatnonzero(visits.last), [*(changes - 1), len(along) - 1])


# ------------------------------------------------------------------------------------------ attention

LENGTH = 1024
SEGMENTS = np.repeat([1, 2, 3, 0], [500, 100, 300, 124]).astype(np.int32)


def seen(kind):
    """The query itself, and of the past its document, or a tenth; the last queries select none of the first blocks."""
    past = np.tril(np.ones((LENGTH, LENGTH), bool))
    if kind == "all":
        return past & (SEGMENTS[:, None] == SEGMENTS)
    found = past & (np.random.default_rng(1).random((LENGTH, LENGTH)) < 0.1) | np.eye(LENGTH, dtype=bool)
    found[-100:, :300] = False
    return found


def naive_attention(kind, q, k, v):
    scores = jnp.where(seen(kind), jnp.einsum("nqh,nkh->nqk", q, k), -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.einsum("nqk,nkh->nqh", jnp.exp(scores - lse[..., None]), v), lse, jnp.max(scores, axis=-1)


@pytest.mark.parametrize(("kind", "heads_at_once"), [("all", 3), ("selected", 3), ("selected", 1)])
def test_attention_and_its_gradients_are_those_of_the_definition(kind, heads_at_once, monkeypatch):
    monkeypatch.setattr(tiles, "HEADS", heads_at_once)
    monkeypatch.setattr(tiles, "WAITING", heads_at_once * 4 * LENGTH * 24)
    q, k, v, dout = draw(0, (3, LENGTH, 24), (3, LENGTH, 24), (3, LENGTH, 16), (3, LENGTH, 16))
    which = jnp.asarray(SEGMENTS), None
    if kind == "selected":
        which = which[0], sparse.pack(jnp.asarray(seen(kind))[None], LENGTH)[0]
    (out, lse, top), pull = jax.vjp(functools.partial(naive_attention, kind), q, k, v)
    assert_close(tiles.attend(q, k, v, *which, interpret=SIMULATED), (out, lse, top))
    nothing = jnp.zeros_like(lse)
    expected = pull((dout, nothing, nothing))
    assert_close(tiles.attend_backward(q, k, v, which, (out, lse), dout, interpret=SIMULATED), expected)


def test_rows_that_do_not_divide_or_do_not_fit_are_not_for_the_kernels():
    for size, selected, fits in [
        (43_008, True, True),
        (43_008 - 512, True, False),
        (43_008 - 512, False, True),
        (43_008 - 64, False, False),
        (43_008 + 1024, True, False),
        (43_008 + 1024, False, False),
    ]:
        assert tiles.can_attend(size, 192, selected=selected) == fits


# -------------------------------------------------------------------------------------- summed scores

QUERIES, KEYS, HEADS, SIZE = 128, 384, 6, 24


def shares(known):
    """(q, k, what heads count for, k of each head); keys from `known` on may not be read."""
    q, k, count_for, keys = draw(2, (HEADS, QUERIES, SIZE), (KEYS, SIZE), (HEADS, QUERIES), (HEADS, KEYS, SIZE))
    unread = jnp.arange(KEYS)[:, None] >= known
    return q, jnp.where(unread, jnp.nan, k), count_for, jnp.where(unread, jnp.nan, keys)


def weighed(q, count_for, k):
    return jnp.einsum("iq,iqz->qz", count_for, jax.nn.relu(jnp.einsum("iqh,zh->iqz", q, k)))


@pytest.mark.parametrize("limit", [384, 256, 130, 1])
def test_summed_scores_are_those_of_the_definition_up_to_the_limit(limit, monkeypatch):
    monkeypatch.setattr(tiles, "HEADS", 3)
    known = -(-limit // tiles.LANES) * tiles.LANES
    q, k, count_for, keys = shares(known)
    found = tiles.index_scores(q, count_for, k, jnp.int32(limit), interpret=SIMULATED)
    assert_close(found[:, :known], weighed(q, count_for, k[:known]))
    assert not np.any(found[:, known:])
    for of_heads in (keys, keys[:1]):
        found = tiles.attention_to(KEYS, q, count_for + 9, of_heads, jnp.int32(limit), interpret=SIMULATED)
        dots = jnp.einsum("iqh,izh->iqz", q, jnp.broadcast_to(of_heads, keys.shape)[:, :known])
        assert_close(found[:, :known], jnp.exp(dots - count_for[..., None] - 9).sum(0))


@pytest.mark.parametrize("limit", [384, 130])
def test_gradients_of_summed_scores_are_those_of_the_definition_up_to_the_limit(limit, monkeypatch):
    monkeypatch.setattr(tiles, "HEADS", 2)
    known = -(-limit // tiles.LANES) * tiles.LANES
    q, k, count_for, _ = shares(known)
    (dscores,) = draw(3, (QUERIES, KEYS))
    *found, dk = tiles.index_scores_backward(q, count_for, k, dscores, jnp.int32(limit), interpret=SIMULATED)
    *expected, expected_k = jax.vjp(weighed, q, count_for, k[:known])[1](dscores[:, :known])
    assert_close((found, dk[:known]), (expected, expected_k))
    assert not np.any(dk[known:])


# ------------------------------------------------------------------------------ as the model uses them


def inputs(length):
    """An indexer's queries, keys and what heads count for; attention's queries, keys and values; three documents."""
    drawn = draw(4, (1, 2, length, 8), (1, length, 8), (1, 2, length), *((1, 2, length, 8),) * 3)
    return Index(*drawn[:3]), drawn[3:], jnp.asarray(np.repeat([[1, 2, 0]], [500, 400, length - 900], axis=1))


def learned(model, length):
    """What a layer with an indexer makes of `inputs`, and how it learns."""
    index, qkv, segments = inputs(length)
    selected = indexer.select(model, index, segments)

    def loss(index, q, k, v):
        out, kept, _ = kernels.attention(q, k, v, segments, None, selected)
        attended = Attended(*jax.lax.stop_gradient((q, k, kept[1])), selected, segments)
        return jnp.sum(jnp.sin(out)), indexer.divergence(index, attended)

    (value, divergence), pull = jax.vjp(loss, index, *qkv)
    return selected, value, divergence, pull((jnp.float32(1), jnp.float32(2)))


def test_a_layer_with_an_indexer_learns_on_tpu_what_it_learns_on_cpu(monkeypatch):
    model = dataclasses.replace(tiny.V32, index_topk=40)
    expected = learned(model, LENGTH)
    monkeypatch.setattr(kernels, "_is_tpu", lambda: True)
    for name in ("attend", "attend_backward", "index_scores", "index_scores_backward", "attention_to"):
        monkeypatch.setattr(tiles, name, functools.partial(getattr(tiles, name), interpret=True))
    found = learned(model, LENGTH)
    np.testing.assert_array_equal(found[0], expected[0])
    assert_close(found[1:], expected[1:])

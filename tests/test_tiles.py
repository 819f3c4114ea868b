"""The kernels for TPU that are our own compute what they say, in a TPU's memory as Pallas simulates it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jaxprs
import naive
import numpy as np
import pytest
import tiny
from jax.experimental.pallas import tpu as pltpu

from maxds.model import indexer, kernels, ops, sparse, window
from maxds.model.indexer import Attended, Index
from maxds.model.kernels import Keys
from maxds.model.tiles import LANES, Turn, causal, gates, groups, home, sums
from maxds.model.tiles import window as window_tiles
from maxds.quantize import BACKWARD, FORWARD, Scaled, quantize

pytestmark = pytest.mark.oldest

# What nothing was written to is not a number, and a read outside of an array ends the program.
SIMULATED = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise", detect_races=True)


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes]


def assert_close(found, expected, tolerance=3e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max()), found, expected
    )


@pytest.mark.parametrize(
    ("visits", "by", "begin"),
    [(causal.by_rows(5), "query", 0), (causal.by_columns(0, 5), "key", 0), (causal.by_columns(2, 5), "key", 2)],
)
def test_every_tile_that_is_not_of_the_future_is_visited_once(visits, by, begin):
    assert sorted(zip(visits.query, visits.key, strict=True)) == [(q, k) for q in range(begin, 5) for k in range(q + 1)]
    along = getattr(visits, by)
    changes = np.flatnonzero(np.diff(along)) + 1
    np.testing.assert_array_equal(np.flatnonzero(visits.first), [0, *changes])
    np.testing.assert_array_equal(np.flatnonzero(visits.last), [*(changes - 1), len(along) - 1])


# ------------------------------------------------------------------------------------------ attention

LENGTH, EPS = 1024, 0.1
SEGMENTS = np.repeat([1, 2, 3, 0], [500, 100, 300, 124]).astype(np.int32)


def seen(kind):
    """The query itself, and of the past its document, or a tenth; the last queries select none of the first blocks."""
    past = np.tril(np.ones((LENGTH, LENGTH), bool))
    if kind == "all":
        return past & (SEGMENTS[:, None] == SEGMENTS)
    found = past & (np.random.default_rng(1).random((LENGTH, LENGTH)) < 0.1) | np.eye(LENGTH, dtype=bool)
    found[-100:, :300] = False
    return found


ANGLES = np.random.default_rng(2).uniform(0, 6, (1, LENGTH, 4)).astype(np.float32)


def naive_attention(kind, q, k, v):
    (q,), (k,) = naive.whole(q[None], jax.tree.map(lambda a: a[None], k), ANGLES)
    scores = jnp.where(seen(kind), jnp.einsum("nqh,nkh->nqk", q, k), -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    return jnp.einsum("nqk,nkh->nqh", jnp.exp(scores - lse[..., None]), v), lse, jnp.max(scores, axis=-1)


@pytest.mark.parametrize(
    ("kind", "heads_at_once", "waiting"),
    [
        ("all", 3, LENGTH),
        ("all", 1, 512),  # two bands of a block
        ("selected", 3, LENGTH),
        ("selected", 1, 3 * LANES),  # bands of 2, 3 and 3 blocks
    ],
)
def test_attention_and_its_gradients_are_those_of_the_definition(kind, heads_at_once, waiting, monkeypatch):
    monkeypatch.setattr(causal, "HEADS", heads_at_once)
    monkeypatch.setattr(causal, "WAITING", heads_at_once * 4 * waiting * 24)
    q, own, shared, v, dout = draw(0, *((3, LENGTH, n) for n in (24, 16)), (LENGTH, 8), *[(3, LENGTH, 16)] * 2)
    q *= 24**-0.5
    bits = sparse.pack(jnp.asarray(seen(kind))[None], LENGTH) if kind == "selected" else None
    sight = causal.Sight(jnp.asarray(SEGMENTS)[None], bits, *naive.rope(ANGLES))
    (out, lse, top), pull = jax.vjp(functools.partial(naive_attention, kind), q, (own, shared), v)
    nothing = jnp.zeros_like(lse)
    expected = pull((dout, nothing, nothing))
    q, own, shared, v, out, lse, top, dout = (a[None] for a in (q, own, shared, v, out, lse, top, dout))
    assert_close(causal.attend(q, (own, shared), v, sight, interpret=SIMULATED), (out, lse, top), 1.5e-6)
    found = causal.attend_backward(q, (own, shared), v, sight, (out, lse), dout, interpret=SIMULATED)
    assert_close(jax.tree.map(lambda a: a[0], found), expected, 1.5e-6)


def test_rows_of_a_batch_attend_within_their_own_documents_and_tiles_without_a_common_one_are_not_multiplied():
    documents = [[1] * 256 + [2] * 300 + [3] * 60 + [0] * 24, [1] * 100 + [2] * 28 + [3] * 384 + [0] * 128]
    segments = jnp.asarray(documents)
    bad = np.s_[0, :, :256]  # the first two of five blocks, which hold nothing but document 1
    np.testing.assert_array_equal(causal._since(segments.reshape(2, 5, LANES)), [[0, 0, 2, 2, 2], [0, 1, 1, 1, 4]])
    np.testing.assert_array_equal(causal._clear(segments.reshape(2, 5, LANES)), [[0, 0, 2, 2, 4], [0, 1, 1, 1, 4]])
    padded = jnp.asarray([[[1] * LANES, [1] * LANES, [0] * LANES, [0] * LANES]])
    np.testing.assert_array_equal(causal._clear(padded), [[0, 0, 2, 3]])  # of padding nothing, as `_since` has it
    q, own, v, dout, shared = draw(8, *((2, 3, 640, size) for size in (24, 16, 16, 16)), (2, 640, 8))
    q *= 24**-0.5
    angles = np.random.default_rng(9).uniform(0, 6, (2, 640, 4)).astype(np.float32)
    sight = causal.Sight(segments, None, *naive.rope(angles))
    dout = jnp.where(segments[:, None, :, None] > 0, dout, 0)

    def by_definition(q, k, v):
        q, k = naive.whole(q, k, angles)
        past = jnp.tril(segments[:, :, None] == segments[:, None])[:, None]
        scores = jnp.where(past, jnp.einsum("bnqh,bnkh->bnqk", q, k), -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=-1)
        return jnp.einsum("bnqk,bnkh->bnqh", jnp.exp(scores - lse[..., None]), v), lse

    (out, lse), pull = jax.vjp(by_definition, q, (own, shared), v)
    dq, (down, dshared), dv = pull((dout, jnp.zeros_like(lse)))
    q, own, v, kept, dout = jax.tree.map(lambda a: a.at[bad].set(jnp.nan), (q, own, v, (out, lse), dout))
    shared = shared.at[0, :256].set(jnp.nan)
    found_q, (found_own, found_shared), found_v = causal.attend_backward(
        q, (own, shared), v, sight, kept, dout, interpret=SIMULATED
    )
    found = *causal.attend(q, (own, shared), v, sight, interpret=SIMULATED)[:2], found_q, found_own, found_v
    expected = dq, down, dv
    real = np.asarray(segments > 0)[:, None, :] & np.ones((2, 3, 1), bool)
    real[bad] = False
    assert_close([a[real] for a in found], [a[real] for a in (out, lse, *expected)])
    assert all(np.isnan(a[bad]).all() for a in found)
    assert np.isnan(found_shared[0, :256]).all()
    of_documents = real[:, 0]
    assert_close(found_shared[of_documents], dshared[of_documents])


def test_rows_that_do_not_divide_are_not_for_the_kernels():
    for length, selected, fits in [(2048, True, True), (1536, True, False), (1536, False, True), (1600, False, False)]:
        assert causal.can_attend(length, selected=selected) == fits


# ------------------------------------------------------------------------------- a window, and entries


def sight(window_size, ratio, selected):
    """One row of four documents; of entries without a selection, those that are of two documents are not there."""
    last = np.arange(LENGTH // ratio) * ratio + ratio - 1 if ratio else np.zeros(0, int)
    of_entries = np.where(SEGMENTS[last - ratio + 1] == SEGMENTS[last], SEGMENTS[last], -1)
    keys = Keys(jnp.asarray(of_entries)[None], jnp.asarray(last)[None], ratio or 1)
    bits = None
    if selected:
        drawn = np.random.default_rng(5).random((1, LENGTH, len(last))) < 0.2
        bits = sparse.pack(kernels.visible(jnp.asarray(SEGMENTS)[None], keys, 0) & drawn, len(last))
    angles = draw(7, (1, LENGTH, 4))[0].repeat(2, axis=2)
    turn = Turn(jnp.cos(angles), jnp.sin(angles), EPS)
    return window.Sight(jnp.asarray(SEGMENTS)[None], keys, bits, turn, window_size)


def naive_turned(x, cos, sin):
    """With the last 8 dimensions turned, as complex numbers."""
    turned = (x[..., 16::2] + 1j * x[..., 17::2]) * (cos + 1j * sin)[:, ::2]
    return jnp.concatenate([x[..., :16], jnp.stack([turned.real, turned.imag], -1).reshape(*x.shape[:-1], 8)], -1)


def naive_ready(q, cos, sin):
    """Normalized queries, of 24 dimensions."""
    return naive_turned(q / jnp.sqrt(jnp.sum(q * q, axis=-1, keepdims=True) + 24 * EPS), cos, sin)


def naive_window_attention(given, q, kv, sinks):
    """To keys that are also the values, of tokens and of entries."""
    cos, sin = given.turn.cos[0], given.turn.sin[0]
    q = naive_ready(q, cos, sin)
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    near = (distance >= 0) & (distance < given.window) & (SEGMENTS[:, None] == SEGMENTS)
    far = (np.arange(LENGTH)[:, None] >= given.keys.last[0]) & (SEGMENTS[:, None] == given.keys.segments[0])
    if given.selected is not None:
        far &= sparse.unpack(given.selected)[0]
    k = jnp.concatenate(kv)
    scores = jnp.where(jnp.concatenate([near, far], axis=1), jnp.einsum("nqh,kh->nqk", q, k), -jnp.inf)
    lse = jnp.logaddexp(jax.nn.logsumexp(scores, axis=-1), sinks[:, None])
    out = jnp.einsum("nqk,kh->nqh", jnp.exp(scores - lse[..., None]), k)
    return naive_turned(out, cos, -sin), lse


SIGHTS = [(LANES, 0, False), (1, 4, False), (LANES, 20, False), (LANES + 2, 3, False), (50, 1, True)]


def drawn_for(given):
    """Queries, keys, sinks, and the gradient of the output."""
    entries = given.keys.count
    q, tokens, of_entries, sinks, dout = draw(6, *((4, LENGTH, 24), (LENGTH, 24), (entries, 24), (4,), (4, LENGTH, 24)))
    return q, (tokens, of_entries), sinks, dout


@pytest.mark.parametrize(("window_size", "ratio", "selected"), SIGHTS)
def test_attention_to_a_window_and_its_gradients_are_those_of_the_definition(window_size, ratio, selected, monkeypatch):
    monkeypatch.setattr(window_tiles, "HEADS", 4)
    given = sight(window_size, ratio, selected)
    q, kv, sinks, dout = drawn_for(given)
    (out, lse), pull = jax.vjp(functools.partial(naive_window_attention, given), q, kv, sinks)
    of_row = jax.tree.map(lambda a: a[0], window.of_rows(given))
    assert_close(window_tiles.attend(q, kv, sinks, of_row, interpret=SIMULATED), (out, lse))
    found = window_tiles.attend_backward(q, kv, sinks, of_row, (out, lse), dout, interpret=SIMULATED)
    expected = pull((dout, jnp.zeros_like(lse)))
    assert_close((found[0], found[1][0], found[2]), (expected[0], expected[1][0], expected[2]))
    assert found[1][1].shape == expected[1][1].shape
    if ratio:
        assert_close(found[1][1], expected[1][1])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("window_size", "ratio", "selected"), SIGHTS[1:])
def test_attention_to_a_window_is_on_tpu_what_it_is_on_cpu(window_size, ratio, selected, monkeypatch):
    given = jax.tree.map(lambda a: jnp.concatenate([a, a]), sight(window_size, ratio, selected))
    q, kv, sinks, dout = drawn_for(given)
    q, kv, dout = jax.tree.map(lambda a: jnp.stack([a, a[::-1]]), (q, kv, dout))

    def learn():
        out, pull = jax.vjp(lambda *args: window.attention(*args, given)[0], q, kv, sinks)
        return out, pull(dout)

    expected = learn()
    monkeypatch.setattr(kernels, "is_tpu", lambda: True)
    assert_close(learn(), expected)


def test_rows_of_a_window_that_do_not_divide_or_do_not_fit_are_not_for_the_kernels():
    for length, window_size, entries, selected, fits in [
        (4096, 128, 1024, True, True),
        (4096, 128, 1024 - 128, True, False),
        (4096, 512, 32, False, True),
        (4096, 513, 32, False, False),
        (4096 + 64, 128, 32, False, False),
        (65_536, 128, 16_384, True, True),
        (65_536 * 2, 128, 16_384 * 2, True, False),
    ]:
        assert window_tiles.can_attend(length, 512, window_size, entries, selected=selected) == fits


# -------------------------------------------------------------------------------------- summed scores

QUERIES, KEYS, HEADS, SIZE = 128, 384, 6, 24


def shares(known):
    """(q, k, what heads count for, k of each head) of two blocks of queries; keys from `known` on may not be read."""
    shapes = (HEADS, 2 * QUERIES, SIZE), (KEYS, SIZE), (HEADS, 2 * QUERIES), (HEADS, KEYS, SIZE)
    q, k, count_for, keys = draw(2, *shapes)
    unread = jnp.arange(KEYS)[:, None] >= known
    return q, jnp.where(unread, jnp.nan, k), count_for, jnp.where(unread, jnp.nan, keys)


def second(of_queries):
    """What belongs to the second block."""
    return of_queries[:, QUERIES:]


def weighed(q, count_for, k):
    return jnp.einsum("iq,iqz->qz", count_for, jax.nn.relu(jnp.einsum("iqh,zh->iqz", q, k)))


@pytest.mark.parametrize("limit", [384, 256, 130, 1])
def test_summed_scores_are_those_of_the_definition_up_to_the_limit(limit, monkeypatch):
    monkeypatch.setattr(sums, "HEADS", 3)
    known = -(-limit // LANES) * LANES
    q, k, count_for, keys = shares(known)
    cut = sums.Cut(jnp.array([limit, 1]), QUERIES)
    found = sums.index_scores(q, count_for, k, cut, interpret=SIMULATED)
    assert_close(found[:, :known], weighed(second(q), second(count_for), k[:known]))
    assert not np.any(found[:, known:])
    angles = draw(7, (2 * QUERIES, 4))[0].repeat(2, axis=1)
    turn = Turn(jnp.cos(angles), jnp.sin(angles), EPS)
    for of_heads, turn_by, queries in ((keys, None, q), (keys[:1], turn, naive_ready(q, turn.cos, turn.sin))):
        found = sums.attention_to(KEYS, q, count_for + 9, of_heads, turn_by, cut, interpret=SIMULATED)
        dots = jnp.einsum("iqh,izh->iqz", second(queries), jnp.broadcast_to(of_heads, keys.shape)[:, :known])
        assert_close(found[:, :known], jnp.exp(dots - second(count_for)[..., None] - 9).sum(0))


@pytest.mark.parametrize("limit", [384, 130])
def test_gradients_of_summed_scores_are_those_of_the_definition_up_to_the_limit(limit, monkeypatch):
    monkeypatch.setattr(sums, "HEADS", 2)
    known = -(-limit // LANES) * LANES
    q, k, count_for, _ = shares(known)
    (dscores,) = draw(3, (QUERIES, KEYS))
    cut = sums.Cut(jnp.array([limit, 1]), QUERIES)
    *found, dk = sums.index_scores_backward(q, count_for, k, dscores, cut, interpret=SIMULATED)
    *expected, expected_k = jax.vjp(weighed, second(q), second(count_for), k[:known])[1](dscores[:, :known])
    assert_close((found, dk[:known]), (expected, expected_k))
    assert not np.any(dk[known:])


# --------------------------------------------------------------------------------------- experts' rows

ROWS, WIDTH, LIMIT = 3 * LANES, 4 * LANES, 0.7


@pytest.mark.parametrize("count", [ROWS, LANES + 7, 0])
@pytest.mark.parametrize("limit", [None, LIMIT])
def test_gated_rows_and_their_gradients_are_those_of_the_definition_and_others_are_not_read(limit, count):
    up, weights, dy = draw(9, (ROWS, WIDTH), (ROWS,), (ROWS, WIDTH // 2))

    def naive(up, weights):
        gate, linear = jnp.split(up, 2, axis=1)
        if limit is not None:
            gate, linear = jnp.minimum(gate, limit), jnp.clip(linear, -limit, limit)
        return gate / (1 + jnp.exp(-gate)) * linear * weights[:, None]

    y, pull = jax.vjp(naive, up[:count], weights[:count])
    expected = y, *pull(dy[:count])
    end = -(-count // LANES) * LANES
    up, weights, dy = (a.at[end:].set(jnp.nan) for a in (up, weights, dy))
    given = up, weights, jnp.int32(count)
    found = (
        gates.gated(*given, limit, interpret=SIMULATED),
        *gates.gated_backward(*given, dy, limit, interpret=SIMULATED),
    )
    if count:
        assert_close([a[:count] for a in found], list(expected))
    assert all(np.isnan(a[max(end, LANES) :]).all() for a in found)  # nothing is written there


def rounds_to(found, exact, dtype, count):
    """Whether rows are rounded as `quantize` does it, but for what float32's own errors make of a number halfway."""
    expected = quantize(exact, dtype, over=(1,))
    np.testing.assert_array_equal(found.scale[:count], expected.scale[:count])
    exact, scale = (np.float64(a[:count]) for a in (exact, expected.scale))
    off = np.abs(np.float64(found.qvalue[:count]) * scale - exact)
    info = jnp.finfo(dtype)
    steps = np.maximum(np.abs(exact) * float(info.eps), scale * float(info.smallest_subnormal))
    return (off <= steps / 2 * (1 + 1e-4)).all()


@pytest.mark.parametrize("count", [ROWS, LANES + 7, 0])
@pytest.mark.parametrize("limit", [None, LIMIT])
def test_gated_rows_and_their_gradients_are_rounded_to_float8_each_row_to_its_own_scale(limit, count):
    up, weights, dy, scales = draw(11, (ROWS, WIDTH), (ROWS,), (ROWS, WIDTH // 2), (2, ROWS, 1))
    up, dy = (Scaled(a, jnp.exp2(jnp.round(3 * of))) for a, of in zip((up, dy), scales, strict=True))

    def exact(up, weights):
        return ops.swiglu(up, limit) * weights[:, None]

    y, pull = jax.vjp(exact, up.whole(), weights)
    dup, dweights = pull(dy.whole())
    gated = gates.rounded(up, weights, jnp.int32(count), limit, interpret=SIMULATED)
    again, found, of_weights = gates.rounded_backward(up, weights, jnp.int32(count), dy, limit, interpret=SIMULATED)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:count], b[:count]), gated, again)
    assert rounds_to(gated, y, FORWARD, count)
    assert rounds_to(found, dup, BACKWARD, count)
    np.testing.assert_allclose(of_weights[:count], dweights[:count], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [ROWS, LANES + 7])
def test_rows_of_float8_times_powers_of_two_are_rounded_as_xla_rounds_them(count):
    x, scales = draw(12, (ROWS, WIDTH), (ROWS, 1))
    x, by = (x * 1000).astype(BACKWARD), jnp.exp2(-jnp.round(20 * jnp.abs(scales)))
    found = gates.times(x, by, jnp.int32(count), interpret=SIMULATED)
    np.testing.assert_array_equal(found[:count], (x.astype(jnp.float32) * by).astype(BACKWARD)[:count])


GROUPED = 5 * groups.ROWS
SIZES = {  # a group that ends within a tile, one within a tile, one of whole tiles, none at both ends
    "uneven": [0, 300, 20, 192, 256, 0, 100, 0],
    "one": [0, 0, 0, GROUPED, 0, 0, 0, 0],
    "none": [0] * 8,
}


def grouped(sizes):
    """Operands, of which rows of no group are not numbers; and for each group what its rows give."""
    x, dy, w = draw(13, (GROUPED, 256), (GROUPED, 384), (8, 256, 384))
    total = sum(sizes)
    apart = np.split(np.arange(total), np.cumsum(sizes)[:-1])
    y = np.concatenate([x[rows] @ w[g] for g, rows in enumerate(apart)])
    dx = np.concatenate([dy[rows] @ w[g].T for g, rows in enumerate(apart)])
    dw = np.stack([x[rows].T @ dy[rows] for rows in apart])
    x, dy = (a.at[total:].set(jnp.nan) for a in (x, dy))
    return (x, dy, w, jnp.asarray(sizes, jnp.int32)), (y, dx, dw)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_rows_by_the_matrix_of_their_group_and_gradients_are_those_of_the_definition_and_others_are_not_read(
    sizes, monkeypatch
):
    monkeypatch.setattr(groups, "MOST_BYTES", 12 * 384 * 128)  # so that matrices are cut
    (x, dy, w, sizes), (y, dx, dw) = grouped(sizes)
    found = groups.multiply(x, w, sizes, jnp.float32, interpret=SIMULATED)
    of_rows = groups.multiply(dy, w, sizes, jnp.float32, transposed=True, interpret=SIMULATED)
    of_matrices = groups.multiply_transposed(x, dy, sizes, jnp.float32, interpret=SIMULATED)
    assert (found.shape, of_rows.shape) == ((GROUPED, 384), (GROUPED, 256))
    if len(y):
        assert_close([found[: len(y)], of_rows[: len(y)]], [y, dx])
    assert_close(of_matrices, dw)


def test_products_of_float8_are_those_of_its_values():
    (x, dy, w, sizes), _ = grouped(SIZES["uneven"])
    x, w, dy = x.astype(FORWARD), w.astype(FORWARD), dy.astype(BACKWARD)
    exact = [a.astype(jnp.float32) for a in (x, dy, w)]
    end = int(sizes.sum())
    for run, a, b in [
        (groups.multiply, 0, 2),
        (functools.partial(groups.multiply, transposed=True), 1, 2),
        (groups.multiply_transposed, 0, 1),
    ]:
        found = run((x, dy, w)[a], (x, dy, w)[b], sizes, jnp.float32, interpret=SIMULATED)
        expected = run(exact[a], exact[b], sizes, jnp.float32, interpret=SIMULATED)
        assert_close(found[:end], expected[:end])


@pytest.mark.parametrize(
    "sizes", [[100, 0, 300, 60], [640, 0, 0, 0], [128, 128, 128, 128], [0, 1, 0, 639], [0, 0, 0, 0]]
)
def test_each_token_gets_the_sum_of_its_rows_and_no_other_is_read(sizes):
    total, tokens = sum(sizes), np.random.default_rng(15).integers(0, home.TOKENS, 640)
    (rows,) = draw(15, (640, 256))
    expected = np.zeros((4 * home.TOKENS, 256), np.float32)
    np.add.at(expected, np.repeat(np.arange(4) * home.TOKENS, sizes) + tokens[:total], rows[:total])
    args = rows.at[total:].set(jnp.nan), jnp.asarray(tokens, jnp.int32), jnp.asarray(sizes, jnp.int32)
    assert_close(home.sum_rows(*args, interpret=SIMULATED), expected)


def test_rows_that_do_not_divide_are_not_for_the_sum_in_blocks():
    assert home.can_sum(640, 512, 256)
    assert not home.can_sum(600, 512, 256) and not home.can_sum(640, 500, 256) and not home.can_sum(640, 512, 128)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("all_groups", [False, True])
def test_each_tile_that_has_rows_of_a_group_is_visited_once_for_it_and_groups_in_turn(sizes, all_groups):
    found, count = groups.visits(jnp.asarray(sizes, jnp.int32), GROUPED, all_groups=all_groups)
    rows, ends = groups.ROWS, np.cumsum(sizes)
    expected = [
        (g, block)
        for g, (begin, end) in enumerate(zip(ends - sizes, ends, strict=True))
        for block in range(GROUPED // rows)
        if begin < end and block * rows < end and begin < (block + 1) * rows
    ]
    visited = list(zip(found.group[:count].tolist(), found.block[:count].tolist(), strict=True))
    assert [v for v in visited if sizes[v[0]]] == expected
    assert [g for g, _ in visited if not sizes[g]] == [g for g, n in enumerate(sizes) if all_groups and not n]
    assert 0 <= min(found.block.tolist()) <= max(found.block.tolist()) < GROUPED // rows


@pytest.mark.parametrize(
    ("size", "width", "each", "parts"),
    [
        (7168, 4096, 4, 4),
        (7168, 4096, 2, 2),
        (2048, 7168, 4, 2),  # two fit, of which two cores have one each
        (2048, 7168, 2, 2),
        (256, 384, 4, 1),  # 128 do not divide evenly by two
        (7168, 4096, 8, 8),
        (8192 * 4, 128, 12, 0),
    ],
)
def test_matrices_are_cut_into_as_few_equal_tiles_as_there_is_room_for(size, width, each, parts):
    assert groups._parts(size, width, each) == parts


def test_matrices_that_do_not_divide_are_not_for_the_kernels():
    fits = groups.can_multiply(1024, 256, 384)
    assert fits and not groups.can_multiply(1000, 256, 384) and not groups.can_multiply(1024, 250, 384)
    assert not groups.can_multiply(1024, 256, 380) and not groups.can_multiply(1024, 128, 8192 * 4)


def test_two_cores_of_a_device_share_the_heads_of_attention_and_what_is_wide_of_experts():
    q, v, shared, lse = draw(14, (3, 16, 512, 24), (3, 16, 512, 16), (3, 512, 8), (3, 16, 512))
    sight = causal.Sight(jnp.ones((3, 512), jnp.int32), None, *[jnp.zeros((3, 512, 8))] * 2)
    (x, dy, w, sizes), _ = grouped(SIZES["one"])
    up, weights, count = jnp.zeros((ROWS, WIDTH)), jnp.ones(ROWS), jnp.int32(ROWS)
    for fn, args in [
        (causal.attend, (q, (v, shared), v, sight)),
        (causal.attend_backward, (q, (v, shared), v, sight, (v, lse), v)),
        (functools.partial(groups.multiply, dtype=jnp.float32), (x, w, sizes)),
        (functools.partial(groups.multiply_transposed, dtype=jnp.float32), (x, dy, sizes)),
        (functools.partial(gates.gated, limit=None), (up, weights, count)),
        (home.sum_rows, (jnp.zeros((256, 256)), jnp.zeros(256, jnp.int32), jnp.zeros(2, jnp.int32))),
    ]:
        found = [eqn for name, eqn, _ in jaxprs.equations(jaxprs.live(fn, *args)) if name == "pallas_call"]
        order = [eqn.params["compiler_params"].dimension_semantics for eqn in found]
        assert len(order) == 1 and [n for n, o in enumerate(order[0]) if o == pltpu.PARALLEL] == [0]


# ------------------------------------------------------------------------------ as the model uses them


def inputs(length):
    """An indexer's queries, keys and what heads count for; attention's queries, keys and values; three documents."""
    of_index = (1, 2, length, 8), (1, length, 8), (1, 2, length)
    *index, q, own, shared, v = draw(4, *of_index, *((1, 2, length, n) for n in (16, 8)), *[(1, length, 8)] * 2)
    segments = jnp.asarray(np.repeat([[1, 2, 0]], [500, 400, length - 900], axis=1))
    return Index(*index), (q, (own, shared), jnp.stack([v, -v], axis=1)), segments


def learned(model, length):
    """What a layer with an indexer makes of `inputs`, and how it learns."""
    index, qkv, segments = inputs(length)
    selected = indexer.select(model, index, segments)
    sight = kernels.Sight(segments, selected, *naive.rope(ANGLES[:, :length]))

    def loss(index, q, k, v):
        out, kept, _ = kernels.attention(q, k, v, sight)
        attended = Attended(*jax.lax.stop_gradient((*kernels.whole(q, k, sight), kept[1])), selected, segments)
        return jnp.sum(jnp.sin(out)), indexer.divergence(index, attended)

    (value, divergence), pull = jax.vjp(loss, index, *qkv)
    return selected, value, divergence, pull((jnp.float32(1), jnp.float32(2)))


@pytest.mark.usefixtures("interpreted")
def test_a_layer_with_an_indexer_learns_on_tpu_what_it_learns_on_cpu(monkeypatch):
    model = dataclasses.replace(tiny.V32, index_topk=40)
    expected = learned(model, LENGTH)
    monkeypatch.setattr(kernels, "is_tpu", lambda: True)
    found = learned(model, LENGTH)
    np.testing.assert_array_equal(found[0], expected[0])
    assert_close(found[1:], expected[1:])


@pytest.mark.usefixtures("interpreted")
def test_where_no_sparse_core_sums_rows_tokens_get_what_they_get_on_cpu(monkeypatch):
    """Of 256 tokens with 3 choices, 300 of the 768 pairs have one of 384 rows."""
    rng = np.random.default_rng(16)
    order = rng.permutation(768)
    slots = np.argsort(order).reshape(256, 3)
    routes = kernels.Routes(*map(jnp.asarray, (order[:384], slots, slots < 300)))
    rows = jnp.asarray(rng.standard_normal((384, 256)), jnp.bfloat16).at[300:].set(jnp.nan)
    exact = kernels.tokens_of_rows(rows.astype(jnp.float32), routes)
    monkeypatch.setattr(kernels, "is_tpu", lambda: True)
    found, pull = jax.vjp(kernels.tokens_of_rows, rows, routes)
    np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))
    np.testing.assert_array_equal(pull(found)[0], jnp.take(found, order[:384] // 3, axis=0))
    assert jaxprs.count(jaxprs.live(kernels.tokens_of_rows, rows, routes))["pallas_call"] == 1

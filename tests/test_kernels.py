"""The kernels compute what they say, in every form, and replay without repeating their work."""

import functools
import math

import jax
import jax.numpy as jnp
import jaxprs
import naive
import numpy as np
import pytest

from maxds.model import kernels, sparse

# -------------------------------------------------------------------------------------- attention


def naive_attention(q, k, v, segments):
    length, (q, k) = q.shape[2], naive.whole(q, k, ANGLES)
    scores = jnp.einsum("bnqh,bnkh->bnqk", q, k)
    seen = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((length, length), bool))
    return jnp.einsum("bnqk,bnkh->bnqh", jax.nn.softmax(scores, where=seen[:, None]), v)


ANGLES = np.random.default_rng(1).uniform(0, 6, (2, 12, 1)).astype(np.float32)


def attend(q, k, v, segments, kept=None, selected=None, scored=False):
    return kernels.attention(q, k, v, kernels.Sight(segments, selected, *naive.rope(ANGLES)), kept, scored)


def attention_inputs():
    rng = np.random.default_rng(0)
    q, *k = (rng.standard_normal(shape, np.float32) for shape in ((2, 3, 12, 8), (2, 3, 12, 6), (2, 12, 2)))
    k = tuple(k)
    v, dout = (rng.standard_normal((2, 3, 12, 5), np.float32) for _ in range(2))
    segments = np.array([[1] * 5 + [2] * 6 + [0], [1] * 12], np.int32)
    return q, k, v, segments, dout


def gradients(attend, q, k, v, dout):
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(dout)


def assert_close(found, expected, tolerance=2e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max()), found, expected
    )


@pytest.mark.parametrize(("query_block", "spans"), [(512, 1), (4, 1), (512, 3), (2, 3)])
def test_attention_is_softmax_attention_whatever_the_block_and_span(query_block, spans, monkeypatch):
    monkeypatch.setattr(kernels, "QUERY_BLOCK", query_block)
    monkeypatch.setattr(kernels, "SPANS", spans)
    monkeypatch.setattr(kernels, "LEAST_SPAN", 1)
    q, k, v, segments, dout = attention_inputs()
    found = gradients(lambda q, k, v: attend(q, k, v, segments)[0], q, k, v, dout)
    assert_close(found, gradients(lambda q, k, v: naive_attention(q, k, v, segments), q, k, v, dout))


@pytest.mark.parametrize("which", ["all", "selected"])
def test_the_largest_score_of_each_head_is_told_but_not_of_padding(which, monkeypatch):
    monkeypatch.setattr(kernels, "LEAST_SPAN", 1)
    q, k, v, segments, _ = attention_inputs()
    q[:, 1, :, :6] -= 4 * np.sign(k[0][:, 1].sum((0, 1)))  # a head whose scores may all be negative
    q[0, :, -1] *= 1e3  # padding
    seen = np.asarray((segments[:, :, None] == segments[:, None, :]) & np.tril(np.ones((12, 12), bool)))
    if which == "selected":
        seen &= np.eye(12, dtype=bool) | (np.random.default_rng(1).random(seen.shape) < 0.3)
    selected = None if which == "all" else sparse.pack(jnp.asarray(seen), 12)
    products = np.einsum("bnqh,bnkh->bnqk", *naive.whole(q, k, ANGLES))
    scores = np.where((seen & (segments > 0)[:, :, None])[:, None], products, 0)
    *_, top = attend(q, k, v, segments, None, selected, scored=True)
    assert_close(top, scores.max((0, 2, 3)))


def test_replayed_attention_has_the_same_gradients_to_the_bit():
    q, k, v, segments, dout = attention_inputs()
    _, kept, _ = attend(q, k, v, segments)
    once = gradients(lambda q, k, v: attend(q, k, v, segments)[0], q, k, v, dout)
    again = gradients(lambda q, k, v: attend(q, k, v, segments, kept)[0], q, k, v, dout)
    jax.tree.map(np.testing.assert_array_equal, again, once)


def test_replayed_attention_does_none_of_the_work_of_the_forward_pass():
    q, k, v, segments, dout = attention_inputs()

    def both(q, k, v, dout, kept=None):
        return gradients(lambda q, k, v: attend(q, k, v, segments, kept)[0], q, k, v, dout)[1]

    _, kept, _ = attend(q, k, v, segments)
    forward = jaxprs.count(jaxprs.live(lambda q, k, v: attend(q, k, v, segments)[0], q, k, v))
    step, replay = (jaxprs.count(jaxprs.live(both, q, k, v, dout, *more)) for more in ((), (kept,)))
    assert (forward["dot_general"], forward["exp"]) == (3, 2)  # rotation, scores, output; log-sum-exp, weights
    # rotation and back, scores, dv, dweights, delta, dk, dq; weights
    assert (replay["dot_general"], replay["exp"]) == (8, 1)
    rotated_once = {"dot_general": 1, "exp": 0}
    assert all(step[work] == forward[work] + replay[work] - rotated_once[work] for work in rotated_once)


def test_attention_multiplies_no_queries_by_the_keys_of_a_later_span():
    length, (b, n, h, v) = kernels.SPANS * kernels.LEAST_SPAN, (2, 3, 8, 5)
    q, k = jnp.zeros((b, n, length, h)), (jnp.zeros((b, n, length, h)), jnp.zeros((b, length, 0)))
    values, nothing = jnp.zeros((b, n, length, v)), jnp.zeros((b, length, 0))
    sight = kernels.Sight(jnp.ones((b, length), jnp.int32), None, nothing, nothing)

    def attend(q, k, v):
        return kernels.attention(q, k, v, sight)[0]

    def multiplies(fn, *args):
        """Scalar ones, but for the row sums of the backward pass, which have no matrix."""
        found = [e for name, e, _ in jaxprs.equations(jaxprs.live(fn, *args)) if name == "dot_general"]
        contracted = [math.prod(e.invars[0].aval.shape[i] for i in e.params["dimension_numbers"][0][0]) for e in found]
        sizes = [math.prod(e.outvars[0].aval.shape) for e in found]
        matrices = [e.outvars[0].aval.ndim > 3 and e.invars[1].aval.ndim > 2 for e in found]  # nor that of rotations
        return sum(size * k for size, k, counts in zip(sizes, contracted, matrices, strict=True) if counts)

    seen = (kernels.SPANS + 1) * kernels.LEAST_SPAN * length // 2  # pairs of a query and a key, not length * length
    assert multiplies(attend, q, k, values) == b * n * seen * (h + v)
    _, pull = jax.vjp(attend, q, k, values)
    assert multiplies(pull, values) == b * n * seen * (3 * h + 2 * v)


# ----------------------------------------------------------------------------- tokens and routed rows


def routes():
    """Of 6 tokens with 3 choices: 8 of the 18 pairs have one of the 10 rows."""
    order = np.random.default_rng(0).permutation(18)
    slots = np.argsort(order).reshape(6, 3)
    return kernels.Routes(jnp.asarray(order[:10]), jnp.asarray(slots), jnp.asarray(slots < 8))


def test_rows_hold_their_tokens_and_tokens_the_sums_of_their_rows():
    rng, r = np.random.default_rng(1), routes()
    tokens, rows = rng.standard_normal((6, 4), np.float32), rng.standard_normal((10, 4), np.float32)
    summed, token = np.zeros_like(tokens), np.asarray(r.pairs)[:8] // 3
    np.add.at(summed, token, rows[:8])
    np.testing.assert_array_equal(kernels.rows_of_tokens(tokens, r)[:8], tokens[token])
    np.testing.assert_array_equal(kernels.rows_of_pairs(tokens[:, :3], r)[:8], tokens[:, :3].ravel()[r.pairs[:8]])
    np.testing.assert_allclose(kernels.tokens_of_rows(rows, r), summed, rtol=1e-6)


def owned(x):
    """Nothing but zeros in rows that belong to no token."""
    return np.concatenate([x[:8], np.zeros_like(x[8:])]) if len(x) == 10 else np.asarray(x)


@pytest.mark.parametrize(
    ("move", "shape"),
    [(kernels.rows_of_tokens, (6, 4)), (kernels.rows_of_pairs, (6, 3)), (kernels.tokens_of_rows, (10, 4))],
)
def test_moves_of_rows_have_their_transpose_as_gradient_and_it_is_a_gather(move, shape):
    rng, r = np.random.default_rng(1), routes()
    x = rng.standard_normal(shape, np.float32)
    y, pull = jax.vjp(lambda x: move(x, r), x)
    dy = rng.standard_normal(y.shape, np.float32)  # what lies in rows that belong to none must not matter
    np.testing.assert_allclose(np.sum(owned(pull(dy)[0]) * x), np.sum(owned(y) * dy), rtol=1e-5)
    assert not any("scatter" in name for name in jaxprs.count(jaxprs.live(lambda dy: pull(dy)[0], dy)))


# --------------------------------------------------------------------------------- grouped matmul

ROWS, GROUPS = 30, 4
SIZES = {
    "even": [7, 7, 7, 7],
    "all rows": [3, 12, 14, 1],
    "empty groups": [0, 9, 0, 13],
    "one group": [0, 0, 30, 0],
    "no rows": [0, 0, 0, 0],
    "whole blocks": [4, 8, 4, 12],
}


@functools.cache
def grouped_matmul(form):
    """(x, w, sizes, dy) -> (y, (dx, dw)), by the form of CPUs in blocks of 4 rows, or by that of other backends."""

    def both(x, w, sizes, dy):
        y, pull = jax.vjp(lambda x, w: kernels.grouped_matmul(x, w, sizes), x, w)
        return y, pull(dy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "ROW_BLOCK", 4)
        patch.setattr(jax.lax, "platform_dependent", lambda *args, **forms: forms[form](*args))
        for name in jaxprs.KERNELS:
            patch.setattr(kernels, name, getattr(kernels, name).__wrapped__)
        x, w, dy = matmul_inputs()
        return jax.jit(both).lower(x, w, jnp.zeros(GROUPS, jnp.int32), dy).compile()


def matmul_inputs():
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(shape, np.float32) for shape in ((ROWS, 6), (GROUPS, 6, 5), (ROWS, 5)))


@pytest.mark.parametrize("form", ["cpu", "default"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_grouped_matmul_is_one_product_for_each_group(form, sizes):
    x, w, dy = matmul_inputs()
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    ends = np.cumsum(sizes)
    for g, (first, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        y[first:end], dx[first:end] = x[first:end] @ w[g], dy[first:end] @ w[g].T
        dw[g] = x[first:end].T @ dy[first:end]
    assert_close(grouped_matmul(form)(x, w, np.array(sizes, np.int32), dy), (y, (dx, dw)))


def test_the_gradient_of_a_matrix_of_many_rows_is_summed_in_float32_whatever_they_are():
    """In bfloat16 a sum of ones ends at 256, and one of blocks of rows with many times a block."""
    rows = 65_536
    x, w = (jnp.ones(shape, jnp.bfloat16) for shape in ((rows, 1), (1, 1, 1)))
    _, pull = jax.vjp(lambda w: kernels.grouped_matmul(x, w, jnp.array([rows])), w)
    assert float(pull(x)[0][0, 0, 0]) == rows


def test_replayed_grouped_matmul_multiplies_only_for_the_gradient():
    x, w, dy = matmul_inputs()
    sizes = np.array(SIZES["even"], np.int32)

    def gradient(x, w, dy, kept=None):
        return jax.vjp(lambda x, w: kernels.grouped_matmul(x, w, sizes, kept), x, w)[1](dy)

    kept = kernels.grouped_matmul(x, w, sizes)
    jax.tree.map(np.testing.assert_array_equal, gradient(x, w, dy, kept), gradient(x, w, dy))
    np.testing.assert_array_equal(kernels.grouped_matmul(x, w, sizes, kept), kept)
    replay = jaxprs.count(jaxprs.live(gradient, x, w, dy, kept))
    assert (replay["multiply_groups"], replay["multiply_groups_transposed"]) == (1, 1)

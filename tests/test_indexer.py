"""The indexer selects the best keys exactly, attention is to these alone, and the loss has the gradient it must."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jaxprs
import naive
import numpy as np
import pytest
import tiny

from maxds.model import indexer, kernels, sparse
from maxds.model.indexer import Attended, Index

# -------------------------------------------------------------------------------------- selection


def stable_best(scores, seen, count):
    """A row: sorted, ties by index."""
    order = [i for i in np.argsort(-scores, kind="stable") if seen[i]]
    return np.isin(np.arange(len(scores)), order[:count])


@pytest.mark.parametrize("count", [1, 3, 16, 33, 40])
def test_the_best_are_those_of_a_stable_sort_whatever_is_tied_or_not_seen(count):
    rng = np.random.default_rng(count)
    scores = rng.standard_normal((60, 33), np.float32) * np.float32(10.0) ** rng.integers(-30, 30, (60, 1))
    scores[20:40] = rng.integers(-2, 3, (20, 33))  # ties, of zeros too
    scores[30:40] *= rng.choice([-1, 1], (10, 33))  # some of them negative
    scores[40:] = 0.0
    seen = rng.random((60, 33)) < rng.random((60, 1))
    found = np.asarray(indexer.best(jnp.asarray(scores), jnp.asarray(seen), count))
    np.testing.assert_array_equal(found, [stable_best(*row, count) for row in zip(scores, seen, strict=True)])


@pytest.mark.parametrize("length", [5, 8, 12, 33])
def test_a_selection_takes_a_bit_for_each_key_and_comes_back(length):
    selected = np.random.default_rng(0).random((2, 3, length)) < 0.5
    packed = sparse.pack(jnp.asarray(selected), length)
    assert (packed.dtype, packed.shape) == (jnp.uint8, (2, 3, -(-length // 8)))
    np.testing.assert_array_equal(sparse.unpack(packed)[..., :length], selected)
    np.testing.assert_array_equal(sparse.pack(jnp.asarray(selected[..., :4]), length), sparse.pack(
        jnp.asarray(selected & (np.arange(length) < 4)), length))  # fmt: skip


LENGTH, TOPK = 32, 3
MODEL = dataclasses.replace(tiny.V32, index_topk=TOPK)
SEGMENTS = np.stack([np.repeat([1, 2, 3, 0], [9, 2, 14, 7]), np.ones(LENGTH, int)]).astype(np.int32)


@functools.cache
def index():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape, np.float32)

    heads, size = MODEL.index_n_heads, MODEL.index_head_dim
    return Index(draw(2, heads, LENGTH, size), draw(2, LENGTH, size), draw(2, heads, LENGTH))


def naive_scores(i):
    matches = jnp.einsum("bihd,bzd->bihz", i.q, i.k)
    return jnp.einsum("bih,bihz->bhz", i.heads, jax.nn.relu(matches))


def visible():
    return (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & np.tril(np.ones((LENGTH, LENGTH), bool))


@functools.cache
def selected():
    with jax.ensure_compile_time_eval():  # also where a program is traced
        pairs = zip(np.asarray(naive_scores(index())), visible(), strict=True)
    return np.array([[stable_best(*row, TOPK) for row in zip(*pair, strict=True)] for pair in pairs])


BLOCKS = pytest.mark.parametrize(("block", "spans"), [(512, 1), (4, 1), (512, 2), (4, 4), (2, 2)])


@pytest.fixture
def _blocks(block, spans, monkeypatch):
    for module, name, value in [(kernels, "QUERY_BLOCK", block), (kernels, "SPANS", spans), (sparse, "BLOCK", block)]:
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(kernels, "LEAST_SPAN", 1)


@BLOCKS
@pytest.mark.usefixtures("_blocks")
def test_each_query_selects_its_best_keys_of_its_own_document_and_past():
    packed = jax.jit(lambda i: sparse.unpack(indexer.select(MODEL, i, jnp.asarray(SEGMENTS))))(index())
    found = np.asarray(packed)[..., :LENGTH]
    np.testing.assert_array_equal(found, selected())
    np.testing.assert_array_equal(found.sum(-1), np.minimum(visible().sum(-1), TOPK))


def test_nothing_is_selected_where_all_keys_are_few_enough():
    for topk, expected in [(LENGTH - 1, False), (LENGTH, True), (LENGTH + 1, True)]:
        model = dataclasses.replace(MODEL, index_topk=topk)
        assert (indexer.select(model, index(), jnp.asarray(SEGMENTS)) is None) == expected


# --------------------------------------------------------------------------------------- attention


@functools.cache
def qkv():
    rng = np.random.default_rng(1)
    shapes = (2, 3, LENGTH, 8), (2, 3, LENGTH, 6), (2, LENGTH, 2), (2, 3, LENGTH, 5), (2, 3, LENGTH, 5)
    q, own, shared, v, dout = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return q, (own, shared), v, dout


def angles():
    return np.random.default_rng(2).uniform(0, 6, (2, LENGTH, 1)).astype(np.float32)


def attend(q, k, v, kept=None):
    packed = sparse.pack(jnp.asarray(selected()), LENGTH)
    return kernels.attention(q, k, v, kernels.Sight(jnp.asarray(SEGMENTS), packed, *naive.rope(angles())), kept)


def naive_attention(q, k, v):
    q, k = naive.whole(q, k, angles())
    scores = jnp.where(selected()[:, None], jnp.einsum("bnqh,bnkh->bnqk", q, k), -jnp.inf)
    return jnp.einsum("bnqk,bnkh->bnqh", jax.nn.softmax(scores), v), jax.nn.logsumexp(scores, axis=-1)


def learned(fn):
    """What a function of q, k and v gives, and how they learn from its first result; compiled, in its present form."""

    def both(*inputs):
        out, pull, lse = jax.vjp(fn, *inputs, has_aux=True)
        return out, lse, pull(qkv()[3])

    return jax.jit(both)(*qkv()[:3])


@functools.cache
def expected():
    return learned(naive_attention)


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max()), found, expected)


@BLOCKS
@pytest.mark.usefixtures("_blocks")
def test_attention_is_softmax_attention_to_the_selected_keys():
    def attended(*inputs):
        out, (_, lse), _ = attend(*inputs)
        return out, lse

    close(learned(attended), expected())


def test_replayed_attention_to_selected_keys_does_only_the_work_of_its_gradient():
    *inputs, dout = qkv()
    _, kept, _ = attend(*inputs)
    once, again = (jax.vjp(lambda *a, kept=k: attend(*a, kept)[0], *inputs) for k in (None, kept))
    jax.tree.map(np.testing.assert_array_equal, (again[0], again[1](dout)), (once[0], once[1](dout)))
    replay = jaxprs.live(lambda *a: jax.vjp(lambda *b: attend(*b, kept)[0], *a)[1](dout), *inputs)
    assert jaxprs.count(replay)["dot_general"] == 8  # rotation and back, scores, dv, dweights, delta, dk, dq


@pytest.mark.parametrize("length", [96, 12])
def test_tiles_cover_every_pair_once_and_leave_the_future_out(length, monkeypatch):
    monkeypatch.setattr(sparse, "BLOCK", 4)
    tiles, pairs = sparse.tiles(length), np.zeros((length, -(-length // 8) * 8), int)
    for first, key in tiles.firsts:
        pairs[first : first + tiles.rows, key : key + tiles.keys] += 1
        assert key // tiles.run == (key + tiles.keys - 1) // tiles.run  # a tile is of one run, and so of one bit
        assert key < first + tiles.rows
    assert (pairs[:, :length][np.tril(np.ones((length, length), bool))] == 1).all()


# -------------------------------------------------------------------------------------------- loss


def attended(*, dense):
    q, k = naive.whole(*qkv()[:2], angles())
    if dense:
        lse = jax.nn.logsumexp(jnp.where(visible()[:, None], jnp.einsum("bnqh,bnkh->bnqk", q, k), -jnp.inf), axis=-1)
        return Attended(q, k, lse, None, jnp.asarray(SEGMENTS))
    packed = sparse.pack(jnp.asarray(selected()), LENGTH)
    return Attended(q, k, naive_attention(*qkv()[:3])[1], packed, jnp.asarray(SEGMENTS))


def naive_divergence(i, *, dense):
    q, k = naive.whole(*qkv()[:2], angles())
    seen = visible() if dense else selected()
    p = jax.nn.softmax(jnp.where(seen[:, None], jnp.einsum("bnqh,bnkh->bnqk", q, k), -jnp.inf)).mean(1)
    log_q = jax.nn.log_softmax(jnp.where(seen, naive_scores(i), -jnp.inf))
    kept = seen & (SEGMENTS > 0)[..., None]
    return jnp.sum(jnp.where(kept, jax.scipy.special.xlogy(p, p) - p * jnp.where(kept, log_q, 0), 0))


@pytest.mark.parametrize("dense", [False, True])
@BLOCKS
@pytest.mark.usefixtures("_blocks")
def test_the_loss_is_the_divergence_of_real_tokens_and_so_is_its_gradient(dense):
    found = jax.jit(jax.value_and_grad(lambda i: 2 * indexer.divergence(i, attended(dense=dense))))(index())
    close(found, expected_divergence(dense=dense))


@functools.cache
def expected_divergence(*, dense):
    return jax.jit(jax.value_and_grad(lambda i: 2 * naive_divergence(i, dense=dense)))(index())


def test_a_replayed_loss_is_the_kept_one_with_the_same_gradient():
    learn = jax.jit(lambda i, kept: jax.value_and_grad(indexer.divergence)(i, attended(dense=False), kept))
    once, again = (learn(index(), kept) for kept in (None, jnp.float32(7)))
    assert float(again[0]) == 7
    jax.tree.map(np.testing.assert_array_equal, again[1], once[1])


# ------------------------------------------------------------------------------------- the whole model


def test_a_model_whose_sequences_have_no_more_keys_than_are_selected_is_dense_to_the_bit():
    wide = tiny.config(dataclasses.replace(tiny.V32, index_topk=tiny.LENGTH))
    dense = tiny.config(dataclasses.replace(tiny.V32, index_topk=None))
    weights, bias, batch = tiny.inputs(wide)

    def without_indexer(path, leaf):
        return None if "indexer" in jax.tree_util.keystr(path) else leaf

    bare = jax.tree_util.tree_map_with_path(without_indexer, weights)
    bare = jax.tree.map(lambda _, leaf: leaf, tiny.weights(dense.model), strip(bare))
    np.testing.assert_array_equal(tiny.logits(wide)(weights, bias, batch), tiny.logits(dense)(bare, bias, batch))


def strip(weights):
    """Without the indexers."""

    def one(x):
        return dataclasses.replace(x, indexer=None) if hasattr(x, "indexer") else x

    return jax.tree.map(one, weights, is_leaf=lambda x: hasattr(x, "indexer"))


@pytest.mark.parametrize("kind", ["plain", "batch_split"])
def test_nothing_grows_with_pairs_of_tokens_but_the_bits_that_tell_which_are_selected(kind, monkeypatch):
    for module, name in [(kernels, "QUERY_BLOCK"), (sparse, "BLOCK")]:
        monkeypatch.setattr(module, name, 4)

    def largest(length):
        config = tiny.config(tiny.V32, kind)
        data = dataclasses.replace(config.data, sequence_length=length, global_batch=2)
        made = tiny.stepper(dataclasses.replace(config, data=data))
        state = made.abstract_state
        args = state.params, state.router_bias, made.abstract_batch, made.abstract_mode
        program = jaxprs.live(made.loss_and_grads, *args)
        arrays = [v.aval for _, eqn, _ in jaxprs.equations(program) for v in eqn.outvars]
        return max(a.size for a in arrays if a.dtype != jnp.uint8)

    assert largest(128) <= 2 * largest(64)

"""V4's attention is that of its definition (tests/oracle.py), however documents are packed and queries are divided."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import oracle
import pytest
import tiny

from maxds import params
from maxds.data.packing import pack
from maxds.model import compressed, kernels, ops, sparse, window
from maxds.model.deepseek import Context
from maxds.quantize import FORWARD, Quantized, quantize, slots, with_slots
from maxds.schedule import Given

pytestmark = pytest.mark.oldest

MODEL = dataclasses.replace(
    tiny.V3,
    num_hidden_layers=3,
    first_k_dense_replace=0,
    num_nextn_predict_layers=0,
    kv_lora_rank=0,
    qk_nope_head_dim=0,
    v_head_dim=0,
    compress_ratios=(0, 4, 8),
    compress_rope_theta=300.0,
    num_attention_heads=6,
    head_dim=14,
    sliding_window=5,
    o_groups=2,
    o_lora_rank=11,
    index_topk=3,
    index_n_heads=7,
    index_head_dim=10,
)
LENGTH = 48
ratios = pytest.mark.parametrize("ratio", MODEL.compress_ratios)
# A document longer than the row, as long as it; blocks just missed, met and passed; one token; padding; nothing else.
ROWS = [[LENGTH + 5], [LENGTH], [3, 4, 5, 8, 1, 7, 9, 2, 1, 8], [16, 1, 1, 15, 6], [17, 12], []]


@functools.cache
def weights(ratio):
    """Random, norms, sinks and biases included."""
    rng = np.random.default_rng([1, ratio])

    def one(p):
        noise = rng.standard_normal(p.shape, np.float32)
        return 1 + 0.2 * noise if p.std is None else 0.4 * noise

    return params.derive(one, compressed.declare(MODEL, ratio))


def rows(of_rows=ROWS, length=LENGTH):
    """Segments and positions [B S] of documents of these lengths."""
    packed = [pack([np.zeros(n, np.int32) for n in lengths], length) for lengths in of_rows]
    return tuple(np.stack([row[name] for row in packed]) for name in ("segments", "positions"))


@functools.cache
def stream(length=LENGTH):
    return np.random.default_rng(2).standard_normal((len(ROWS), length, MODEL.hidden_size), np.float32)


def given(segments, positions):
    def table(theta, yarn):
        return ops.rope_table(MODEL.qk_rope_head_dim, theta, yarn, positions)

    near, far = table(MODEL.rope_theta, None), table(MODEL.compress_rope_theta, MODEL.rope_scaling)
    return Given(None, Context(None, jnp.asarray(segments), jnp.asarray(positions), near, far, None))


def attend(ratio, w, y, of_rows=None, model=MODEL):
    with tiny.strictly():
        return compiled(ratio, model, division())(w, y, of_rows or rows())


def division():
    """What programs differ by that are traced alike."""
    return min(window.BLOCK, LENGTH), tuple(kernels.spans(LENGTH))


@functools.cache
def compiled(ratio, model, _):
    return jax.jit(lambda w, y, of_rows: compressed.attention(model, ratio, w, y, given(*of_rows)))


@functools.cache
def probe():
    """What the tokens' outputs are weighed by: that of padding by nothing, as it has no loss."""
    noise = np.random.default_rng(3).standard_normal(stream().shape, np.float32)
    return np.where(rows()[0][..., None] > 0, noise, 0)


def learn(ratio, weighed=(1.0, 1.0), kept=None):
    """What `attend` gives; the gradients, of weights and tokens, of its outputs by `probe` and its loss, weighed."""
    with tiny.strictly():
        gradients, found = compiled_gradient(ratio, division())((weights(ratio), stream()), rows(), weighed, kept)
    return found, gradients


@functools.cache
def compiled_gradient(ratio, _):
    def objective(args, of_rows, weighed, kept):
        out, loss, found = compressed.attention(MODEL, ratio, *args, given(*of_rows), kept)
        loss_or_zero = jnp.zeros(()) if loss is None else loss
        return weighed[0] * jnp.sum(out * probe()) + weighed[1] * loss_or_zero, (out, loss, found)

    return jax.jit(jax.grad(objective, has_aux=True))


def documents(of_rows=None):
    """Row, and where in it a document's tokens are."""
    segments, _ = of_rows or rows()
    return [(r, np.flatnonzero(row == s)) for r, row in enumerate(segments) for s in range(1, row.max() + 1)]


def evaluate(ratio, w, y, of_rows=None):
    """The definition, of all documents: what is added, and the loss."""
    w, y = jax.tree.map(np.complex128, (w, y))
    out, total = np.zeros_like(y), 0.0
    for row, own in documents(of_rows):
        out[row, own], loss = oracle.compressed_attention(
            MODEL, ratio, w, oracle.norm(y[row, own], w.norm, MODEL.rms_norm_eps)
        )
        total += loss
    return out, total


@functools.cache
def expected(ratio):
    return evaluate(ratio, weights(ratio), stream())


def close(found, expected, tolerance=2e-6):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


DIVISIONS = pytest.mark.parametrize("blocks", [(512, 1), (8, 2)], indirect=True, ids=str)


@pytest.fixture
def blocks(request, monkeypatch):
    """Queries in blocks of so many, keys in so many spans."""
    size, spans = request.param
    for module, name, value in [
        *((kernels, "QUERY_BLOCK", size), (window, "BLOCK", size)),
        *((kernels, "SPANS", spans), (kernels, "LEAST_SPAN", 1)),
    ]:
        monkeypatch.setattr(module, name, value)


@ratios
@DIVISIONS
@pytest.mark.usefixtures("blocks")
def test_what_it_adds_is_that_of_the_definition(ratio):
    out, loss = expected(ratio)
    (found, found_loss, _), _ = learn(ratio)
    real = rows()[0] > 0
    close(np.asarray(found)[real], out[real].real)
    assert np.isfinite(found).all()
    if ratio == 4:
        assert float(found_loss) == pytest.approx(loss.real, rel=2e-6)
    else:
        assert found_loss is None


# ------------------------------------------------------------------------------------------ gradients


@functools.cache
def slopes(ratio):
    """Of each weight and the stream: a direction, and the slope of the definition along it, by the complex step."""
    given, step, rng = (weights(ratio), stream()), 1e-30, np.random.default_rng(4)
    leaves, structure = jax.tree.flatten(given)
    found = []
    for i, leaf in enumerate(leaves):
        direction = rng.standard_normal(leaf.shape)
        moved = [a + 1j * step * direction if j == i else a.astype(complex) for j, a in enumerate(leaves)]
        out, loss = evaluate(ratio, *jax.tree.unflatten(structure, moved))
        found.append((direction, (np.sum(out * probe()) + loss).imag / step))
    return found


@ratios
@DIVISIONS
@pytest.mark.usefixtures("blocks")
def test_the_gradient_of_every_weight_and_of_the_tokens_is_that_of_the_definition(ratio):
    found = jax.tree_util.tree_leaves_with_path(learn(ratio)[1])
    for (path, gradient), (direction, slope) in zip(found, slopes(ratio), strict=True):
        error = abs(np.vdot(np.float64(gradient), direction) - slope) / np.linalg.norm(gradient)
        assert error < 1e-5, (params.name(path), error)


def test_the_indexer_learns_from_its_loss_alone_and_nothing_else_does():
    (_, of_output), (_, of_loss) = (learn(4, weighed) for weighed in ((1.0, 0.0), (0.0, 1.0)))
    for found, of_indexer in (of_output, False), (of_loss, True):
        for path, gradient in jax.tree_util.tree_leaves_with_path(found):
            assert np.any(gradient) == (("indexer" in params.name(path)) == of_indexer), params.name(path)


@ratios
def test_a_replay_gives_the_same_and_does_only_the_work_that_was_not_kept(ratio):
    once, again = learn(ratio), learn(ratio, kept=learn(ratio)[0][2])
    jax.tree.map(close, again, once)
    jax.tree.map(np.testing.assert_array_equal, again[0][2], once[0][2])
    program = compiled_gradient(ratio, division())
    gradient = jaxprs.live(lambda *args: program(*args)[0], (weights(ratio), stream()), rows(), (1.0, 1.0), once[0][2])
    found = jaxprs.count(gradient)
    projections, rotations = 5, 3  # q_down, q_up, kv, out_down, out_up; q, kv, the output
    own = 0
    if ratio:
        projections, rotations = projections + 2, rotations + 1  # values and gates; the entries
    if ratio == 4:
        rotations += 2  # the indexer's queries and keys
        # Its q, values, gates and heads, again, and the gradient of these weights alone; scores, and their gradient,
        # which is three products; attention's weights, whose queries are rotated again.
        own = 4 * 2 + 2 + 3 + 1
    again = projections - 1 + rotations - 1  # but not the last projection, and the kept output is turned already
    assert found["dot_general"] == again + 2 * projections + rotations + 6 + own
    assert found["bitcast_convert_type"] == 0  # of scores, to be ordered


@ratios
def test_what_is_kept_is_also_kept_by_name(ratio):
    """As the schedule does that leaves the backward pass to JAX."""

    def work(fn, *args):
        return jaxprs.count(jaxprs.live(fn, *args))["dot_general"]

    def forward(w, y):
        return compressed.attention(MODEL, ratio, w, y, given(*rows()))

    def loss(w, y, kept=None):
        out, loss, _ = compressed.attention(MODEL, ratio, w, y, given(*rows()), kept)
        return jnp.sum(out * probe()) + (jnp.zeros(()) if loss is None else loss)

    def decided(w, y):
        _, _, kept = forward(w, y)
        return kept["attention"], kept.get("selection", (None,))[0]

    args = weights(ratio), stream()
    kept = jax.eval_shape(forward, *args)[2]
    named = jax.checkpoint(loss, policy=jax.checkpoint_policies.save_only_these_names("attention", "selection"))
    replayed = work(jax.grad(lambda args, kept: loss(*args, kept)), args, kept)
    assert work(jax.grad(lambda args: named(*args)), args) == work(decided, *args) + replayed


# ------------------------------------------------------------------------------------------- documents


@ratios
def test_a_packed_document_gets_what_it_gets_alone(ratio):
    (out, loss, _), _ = jax.tree.map(np.asarray, learn(ratio))
    alone = np.zeros((len(documents()), *stream().shape[1:]), np.float32)
    for n, (row, own) in enumerate(documents()):
        alone[n, : len(own)] = stream()[row, own]
    of_rows = rows([[len(own)] for _, own in documents()])
    found, loss_alone, _ = jax.tree.map(np.asarray, attend(ratio, weights(ratio), alone, of_rows))
    for n, (row, own) in enumerate(documents()):
        close(found[n, : len(own)], out[row, own], 1e-6)
    if ratio == 4:
        assert float(loss_alone) == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.parametrize(("ratio", "length"), [(4, 1), (4, 3), (8, 7)])
def test_a_row_too_short_for_a_block_is_attended_to_as_documents_without_are(ratio, length):
    of_rows = rows([[length], [1, length - 1], [], [length - 1], [1] * length, [length + 1]], length)
    found, loss, _ = attend(ratio, weights(ratio), stream(length), of_rows)
    expected, _ = evaluate(ratio, weights(ratio), stream(length), of_rows)
    close(np.asarray(found)[of_rows[0] > 0], expected[of_rows[0] > 0].real)
    assert loss is None or float(loss) == 0


def test_of_equal_entries_the_first_are_selected():
    w = weights(4)
    w = dataclasses.replace(w, indexer=dataclasses.replace(w.indexer, q=np.zeros_like(w.indexer.q)))
    _, _, kept = attend(4, w, stream())
    found = np.asarray(sparse.unpack(kept["selection"][0]))
    _, positions = rows()
    for row, own in documents():
        before = sum(len(d) // 4 for r, d in documents() if r == row and d[0] < own[0])  # entries of earlier documents
        for t in own:
            count = min((positions[row, t] + 1) // 4, MODEL.index_topk)
            np.testing.assert_array_equal(np.flatnonzero(found[row, t]), before + np.arange(count))


def test_nothing_is_selected_where_all_entries_are_few_enough():
    few, many = (dataclasses.replace(MODEL, index_topk=n) for n in (LENGTH // 4 - 1, LENGTH // 4))
    (out, loss, kept), (same, same_loss, none) = (attend(4, weights(4), stream(), model=model) for model in (few, many))
    assert kept["selection"][0] is not None and none["selection"][0] is None
    short = np.arange(len(ROWS)) > 1  # in rows of one document, its last tokens see one entry more than are selected
    np.testing.assert_allclose(out[short], same[short], rtol=0, atol=1e-6)
    assert float(loss) != float(same_loss)


def test_a_head_whose_sink_is_far_above_its_scores_adds_nothing():
    for ratio in MODEL.compress_ratios:
        sunk = dataclasses.replace(weights(ratio), sinks=np.full(MODEL.num_attention_heads, 1e4, np.float32))
        np.testing.assert_array_equal(attend(ratio, sunk, stream())[0], 0)


# ---------------------------------------------------------------------------------------------- shapes


@ratios
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("float8", [False, True])
def test_what_is_computed_has_the_dtype_of_the_tokens_but_for_log_sum_exp_and_loss(ratio, dtype, float8):
    def cast(p, a):
        if float8 and p.in_float8("fp8"):
            return Quantized(quantize(jnp.asarray(a, dtype), FORWARD, p.one_scale), jnp.zeros(p.shape, dtype))
        return jnp.asarray(a, jnp.float32 if p.float32 else dtype)

    w = params.derive(cast, compressed.declare(MODEL, ratio), weights(ratio))

    def both(w, y):
        def result(w, y):
            out, loss, kept = compressed.attention(MODEL, ratio, w, y, given(*rows()))
            return (out, loss), kept

        found, pull, kept = jax.vjp(lambda s, y: result(with_slots(w, s), y), slots(w), y, has_aux=True)
        return *found, kept, pull(jax.tree.map(jnp.ones_like, found))

    y = jnp.asarray(stream(), dtype)
    with tiny.strictly():
        out, loss, kept, cotangents = jax.eval_shape(both, w, y)
    assert out.dtype == dtype
    assert [a.dtype for a in kept["attention"]] == [dtype, jnp.float32]
    assert loss is None or loss.dtype == jnp.float32
    expected = jax.tree.map(lambda a: (a.shape, a.dtype), (slots(w), y))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), cotangents) == expected


def test_weights_are_as_many_as_those_of_v4_flash():
    """As transformers counts them, and the norm before."""
    keys = "hidden_size q_lora_rank num_attention_heads head_dim o_groups o_lora_rank qk_rope_head_dim".split()
    sizes = dict(zip(keys, (4096, 1024, 64, 512, 8, 1024, 64), strict=True))
    flash = dataclasses.replace(MODEL, **sizes, index_n_heads=64, index_head_dim=128, sliding_window=128)
    every, of_128, of_4, of_indexer = 106_956_352, 4_260_352, 8_393_216, 10_749_056
    for ratio, more in (0, 0), (128, of_128), (4, of_4 + of_indexer):
        assert params.count(compressed.declare(flash, ratio)) == every + more + flash.hidden_size


@ratios
def test_nothing_grows_with_pairs_of_tokens_but_the_bits_that_tell_which_are_selected(ratio, monkeypatch):
    monkeypatch.setattr(window, "BLOCK", 4)
    monkeypatch.setattr(kernels, "QUERY_BLOCK", 4)

    def largest(length):
        y = jnp.zeros((1, length, MODEL.hidden_size))

        def loss(w, y):
            out, more, _ = compressed.attention(MODEL, ratio, w, y, given(*rows([[length]], length)))
            return jnp.sum(out) + (0 if more is None else more)

        program = jaxprs.live(jax.grad(loss, (0, 1)), weights(ratio), y)
        arrays = [v.aval for _, eqn, _ in jaxprs.equations(program) for v in eqn.outvars]
        return max(a.size for a in arrays if a.dtype != jnp.uint8)

    assert largest(512) <= 2 * largest(256)

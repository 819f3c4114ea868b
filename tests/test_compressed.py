"""V4's attention is that of its definition (tests/oracle.py), however documents are packed and queries are divided."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny

from maxds import params
from maxds.data.packing import pack
from maxds.model import compressed, kernels, ops, window
from maxds.model.deepseek import Context
from maxds.schedule import Given

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
    return Given(None, Context(jnp.asarray(segments), jnp.asarray(positions), near, far))


def attend(ratio, w, y, of_rows=None, kept=None, model=MODEL):
    of_rows = of_rows or rows()
    with tiny.strictly():
        return compressed.attend(model, ratio, w, y, given(*of_rows), kept)


def documents():
    """Row, and where in it a document's tokens are."""
    segments, _ = rows()
    return [(r, np.flatnonzero(row == s)) for r, row in enumerate(segments) for s in range(1, row.max() + 1)]


def evaluate(ratio, w, y):
    """The definition, of all documents: what is added, and the loss."""
    out, total = np.zeros_like(y), 0.0
    for row, own in documents():
        out[row, own], loss = oracle.compressed_attention(
            MODEL, ratio, w, oracle.norm(y[row, own], w.norm, MODEL.rms_norm_eps)
        )
        total += loss
    return out, total


@functools.cache
def expected(ratio):
    return evaluate(ratio, *jax.tree.map(np.complex128, (weights(ratio), stream())))


def close(found, expected, tolerance=2e-6):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.fixture(params=[(512, 1), (8, 1), (8, 2), (4, 4)], ids=str)
def blocks(request, monkeypatch):
    """Queries in blocks of so many, keys in so many spans."""
    size, spans = request.param
    for module, name, value in [
        *((kernels, "QUERY_BLOCK", size), (window, "BLOCK", size)),
        *((kernels, "SPANS", spans), (kernels, "LEAST_SPAN", 1)),
    ]:
        monkeypatch.setattr(module, name, value)


@ratios
@pytest.mark.usefixtures("blocks")
def test_what_it_adds_is_that_of_the_definition(ratio):
    out, loss = expected(ratio)
    found, found_loss, _ = attend(ratio, weights(ratio), stream())
    real = rows()[0] > 0
    close(np.asarray(found)[real], out[real].real)
    assert np.isfinite(found).all()
    if ratio == 4:
        assert float(found_loss) == pytest.approx(loss.real, rel=2e-6)
    else:
        assert found_loss is None

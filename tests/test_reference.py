"""Logits, attention and gradients are those of transformers, in float32, on small random models and packed documents.

MAXDS_PARITY_PYTHON names an interpreter that has transformers, where this one does not.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest
import test_compressed as v4
import tiny

PYTHON = os.environ.get("MAXDS_PARITY_PYTHON") or (importlib.util.find_spec("transformers") and sys.executable)
pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(not PYTHON, reason="needs transformers: maxds[parity], or MAXDS_PARITY_PYTHON"),
]

WORKER = pathlib.Path(__file__).with_name("parity_worker.py")
ATTENTION_WORKER = pathlib.Path(__file__).with_name("attention_worker.py")
FOLDER = tempfile.TemporaryDirectory()
YARN = dataclasses.replace(tiny.V32, num_nextn_predict_layers=0)
OTHER = dataclasses.replace(
    YARN,
    num_hidden_layers=2,
    first_k_dense_replace=0,
    num_attention_heads=5,
    n_group=1,
    topk_group=1,
    n_shared_experts=2,
    rope_scaling=None,
    index_topk=2,
    index_n_heads=9,
    index_head_dim=14,
)
MODELS = pytest.mark.parametrize("model", [YARN, OTHER], ids=["yarn", "other"])


def hf_config(m):
    """In transformers' keys."""
    keys = (
        "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers first_k_dense_replace "
        "num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_routed_experts "
        "n_shared_experts num_experts_per_tok n_group topk_group norm_topk_prob routed_scaling_factor rms_norm_eps "
        "max_position_embeddings index_topk index_n_heads index_head_dim"
    ).split()
    return {key: getattr(m, key) for key in keys} | {
        "num_key_value_heads": m.num_attention_heads,
        "rope_parameters": hf_rope(m) | {"rope_theta": m.rope_theta},
    }


def hf_rope(m):
    if m.rope_scaling is None:
        return {"rope_type": "default"}
    rope = {"rope_type": m.rope_scaling.type} | dataclasses.asdict(m.rope_scaling)
    del rope["type"]
    return rope


def hf_arrays(m, w, bias=None):
    """Weights, or their gradients, in transformers' names and shapes."""
    out = {"model.embed_tokens.weight": w.embed, "model.norm.weight": w.norm, "lm_head.weight": w.head.T}
    for i in range(m.num_hidden_layers):
        sparse = i - m.first_k_dense_replace
        stack, own = (w.dense_layers, i) if sparse < 0 else (w.moe_layers, sparse)
        layer, found = jax.tree.map(lambda a, own=own: a[own], stack), {}
        found |= {f"self_attn.{name}": a for name, a in hf_attention(layer["attention"]).items()}
        found["input_layernorm.weight"] = layer["attention"].norm
        if sparse < 0:
            found["post_attention_layernorm.weight"] = layer["mlp"].norm
            found |= {f"mlp.{name}": a for name, a in hf_mlp(layer["mlp"].mlp).items()}
        else:
            found["post_attention_layernorm.weight"] = layer["dispatch"].norm
            found["mlp.gate.weight"] = layer["dispatch"].router.T
            found |= {f"mlp.shared_experts.{name}": a for name, a in hf_mlp(layer["dispatch"].shared).items()}
            up = layer["experts"].up
            found["mlp.experts.gate_up_proj"] = up.reshape(*up.shape[:2], -1).swapaxes(1, 2)
            found["mlp.experts.down_proj"] = layer["experts"].down.swapaxes(1, 2)
            if bias is not None:
                found["mlp.gate.e_score_correction_bias"] = bias[sparse]
        out |= {f"model.layers.{i}.{name}": a for name, a in found.items()}
    return {name: np.ascontiguousarray(a) for name, a in out.items()}


def hf_mlp(w):
    return {
        "gate_proj.weight": w.up[:, 0].T,
        "up_proj.weight": w.up[:, 1].T,
        "down_proj.weight": w.down.T,
    }


def hf_attention(w):
    def joined(a):
        """[I N H] -> [N*H I]."""
        return a.reshape(len(a), -1).T

    return {
        "q_a_proj.weight": w.q_down.T,
        "q_a_layernorm.weight": w.q_norm,
        "q_b_proj.weight": joined(w.q_up),
        "kv_a_proj_with_mqa.weight": np.concatenate([w.kv_down, w.k_rope], axis=1).T,
        "kv_a_layernorm.weight": w.kv_norm,
        "kv_b_proj.weight": joined(np.concatenate([w.k_up, w.v_up], axis=2)),
        "o_proj.weight": w.out.swapaxes(0, 1).reshape(w.out.shape[1], -1),
        "indexer.wq_b.weight": joined(w.indexer.q),
        "indexer.wk.weight": w.indexer.k.T,
        "indexer.k_norm.weight": w.indexer.k_norm,
        "indexer.k_norm.bias": w.indexer.k_bias,
        "indexer.weights_proj.weight": w.indexer.heads.T,
    }


@functools.cache
def expected(model):
    """What transformers finds: `logits`, and `grads/NAME`."""
    folder = pathlib.Path(FOLDER.name) / str(abs(hash(model)))
    folder.mkdir()
    weights = hf_arrays(model, tiny.weights(model), tiny.router_bias(model)["moe_layers"])
    given = {f"weights/{name}": a for name, a in weights.items()} | tiny.batch()
    np.savez(folder / "in.npz", config=json.dumps(hf_config(model)), **given)
    subprocess.run([PYTHON, WORKER, folder / "in.npz", folder / "out.npz"], check=True)
    return dict(np.load(folder / "out.npz"))


@MODELS
def test_logits_are_those_of_transformers(model):
    config = tiny.config(model)
    found, real = np.asarray(tiny.logits(config)(*tiny.inputs(config))), tiny.batch()["segments"] > 0
    np.testing.assert_allclose(found[real], expected(model)["logits"][real], rtol=0, atol=1e-5)


@MODELS
def test_every_gradient_is_that_of_transformers_which_gives_the_indexer_none(model):
    grads = hf_arrays(model, tiny.outcome(tiny.config(model), "main").grads)
    wanted = {k.removeprefix("grads/"): v for k, v in expected(model).items() if k.startswith("grads/")}
    assert {name for name in grads if "indexer" not in name} == wanted.keys()
    for name, found in grads.items():
        reference = wanted.get(name, np.zeros_like(found))
        assert np.abs(found - reference).max() <= 1e-4 * np.abs(reference).max(), name


# ------------------------------------------------------------------------------------ attention of V4

KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 8: "heavily_compressed_attention"}


def v4_config(m):
    """In transformers' keys."""
    keys = (
        "hidden_size num_attention_heads q_lora_rank head_dim qk_rope_head_dim sliding_window o_groups o_lora_rank "
        "index_topk index_n_heads index_head_dim rms_norm_eps rope_theta compress_rope_theta num_hidden_layers "
        "max_position_embeddings"
    ).split()
    return {key: getattr(m, key) for key in keys} | {
        "layer_types": [KINDS[ratio] for ratio in m.compress_ratios],
        "compress_rates": {kind: ratio for ratio, kind in KINDS.items() if ratio},
        "rope_parameters": hf_rope(m),
    }


def v4_attention(w):
    """Weights, or their gradients, in transformers' names and shapes."""

    def compressor(w):
        return {
            "kv_proj.weight": w.kv.T,
            "gate_proj.weight": w.gate.T,
            "position_bias": w.bias,
            "kv_norm.weight": w.norm,
        }

    found = {
        "q_a_proj.weight": w.q_down.T,
        "q_a_norm.weight": w.q_norm,
        "q_b_proj.weight": w.q_up.reshape(len(w.q_up), -1).T,
        "kv_proj.weight": w.kv.T,
        "kv_norm.weight": w.kv_norm,
        "sinks": w.sinks,
        "o_a_proj.weight": np.concatenate([g.reshape(-1, g.shape[-1]).T for g in np.asarray(w.out_down)]),
        "o_b_proj.weight": w.out_up.reshape(-1, w.out_up.shape[-1]).T,
    }
    if w.compressor is not None:
        found |= {f"compressor.{name}": a for name, a in compressor(w.compressor).items()}
    if w.indexer is not None:
        own = compressor(w.indexer.compressor)
        own["q_b_proj.weight"] = w.indexer.q.reshape(len(w.indexer.q), -1).T
        own["scorer.weights_proj.weight"] = w.indexer.heads.T
        found |= {f"compressor.indexer.{name}": a for name, a in own.items()}
    return {name: np.ascontiguousarray(a) for name, a in found.items()}


@pytest.mark.parametrize("ratio", KINDS)
def test_v4_s_attention_and_its_gradients_are_those_of_transformers(ratio):
    m, w, (segments, _), folder = v4.MODEL, v4.weights(ratio), v4.rows(), pathlib.Path(FOLDER.name)
    y = np.asarray(v4.ops.rms_norm(v4.stream(), w.norm, m.rms_norm_eps))
    arrays = {f"weights/{name}": a for name, a in v4_attention(w).items()}
    arrays |= {"layer": m.compress_ratios.index(ratio), "y": y, "probe": v4.probe(), "segments": segments}
    np.savez(folder / "in.npz", config=json.dumps(v4_config(m)), **arrays)
    subprocess.run([PYTHON, ATTENTION_WORKER, folder / "in.npz", folder / "out.npz"], check=True)
    wanted = dict(np.load(folder / "out.npz"))
    (out, _, _), (grads, _) = v4.learn(ratio, (1.0, 0.0))
    real = segments > 0
    np.testing.assert_allclose(out[real], wanted.pop("out")[real], rtol=0, atol=1e-5)
    for name, found in v4_attention(grads).items():
        reference = wanted.pop(name, np.zeros_like(found))
        assert np.abs(found - reference).max() <= 1e-5 * np.abs(reference).max(), name
    assert not wanted

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
import oracle
import pytest
import test_compressed as v4
import tiny

PYTHON = os.environ.get("MAXDS_PARITY_PYTHON") or (importlib.util.find_spec("transformers") and sys.executable)
pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(not PYTHON, reason="needs transformers: maxds[parity], or MAXDS_PARITY_PYTHON"),
]

WORKER = pathlib.Path(__file__).with_name("parity_worker.py")
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
OTHER_V4 = dataclasses.replace(
    tiny.V4,
    vocab_size=67,
    hidden_size=28,
    moe_intermediate_size=23,
    num_attention_heads=9,
    q_lora_rank=17,
    qk_rope_head_dim=6,
    compress_ratios=(4, 6, 6, 4, 6, 6),
    compress_rope_theta=500.0,
    head_dim=16,
    sliding_window=2,
    o_groups=3,
    o_lora_rank=13,
    n_routed_experts=10,
    num_experts_per_tok=4,
    scoring_func="sigmoid",
    routed_scaling_factor=1.5,
    num_hash_layers=2,
    swiglu_limit=0.5,
    hc_mult=5,
    hc_sinkhorn_iters=2,
    hc_eps=1e-3,
    index_topk=1,
    index_n_heads=11,
    index_head_dim=12,
    rope_scaling=None,
)
ALL = {"yarn": YARN, "other": OTHER, "V4 yarn": tiny.V4, "V4 other": OTHER_V4}
MODELS = pytest.mark.parametrize("model", ALL.values(), ids=ALL)

KEYS = (
    "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads q_lora_rank qk_rope_head_dim "
    "n_routed_experts n_shared_experts num_experts_per_tok norm_topk_prob routed_scaling_factor rms_norm_eps "
    "max_position_embeddings index_topk index_n_heads index_head_dim "
)
V32_KEYS = "intermediate_size first_k_dense_replace kv_lora_rank qk_nope_head_dim v_head_dim n_group topk_group"
V4_KEYS = (
    "head_dim sliding_window o_groups o_lora_rank rope_theta compress_rope_theta scoring_func swiglu_limit hc_mult "
    "hc_sinkhorn_iters hc_eps"
)
KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention"}
HEAVY = "heavily_compressed_attention"


def hf_config(m):
    """In transformers' keys."""
    if m.compress_ratios is None:
        return taken(m, KEYS + V32_KEYS) | {
            "model_type": "deepseek_v32",
            "num_key_value_heads": m.num_attention_heads,
            "rope_parameters": hf_rope(m) | {"rope_theta": m.rope_theta},
        }
    hashed = m.num_hash_layers
    return taken(m, KEYS + V4_KEYS) | {
        "model_type": "deepseek_v4",
        "layer_types": [KINDS.get(ratio, HEAVY) for ratio in m.compress_ratios],
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (m.num_hidden_layers - hashed),
        "compress_rates": {KINDS.get(ratio, HEAVY): ratio for ratio in m.compress_ratios if ratio},
        "rope_parameters": hf_rope(m),
    }


def taken(m, keys):
    return {key: getattr(m, key) for key in keys.split() if getattr(m, key) is not None}


def hf_rope(m):
    if m.rope_scaling is None:
        return {"rope_type": "default"}
    rope = {"rope_type": m.rope_scaling.type} | dataclasses.asdict(m.rope_scaling)
    del rope["type"]
    return rope


def hf_arrays(w, given=None):
    """Weights, or their gradients, in transformers' names and shapes; `given`: what routers read beside."""
    out = {"model.embed_tokens.weight": w.embed, "model.norm.weight": w.norm, "lm_head.weight": w.head.T}
    out |= {f"model.hc_head.hc_{name}": a for name, a in hf_connection(w.hyper).items()}
    layers = oracle.layers(w, lambda kind, i: jax.tree.map(lambda a: a[i], kind))
    for number, (stack, i, layer) in enumerate(layers):
        found = hf_layer(layer)
        if given and stack in given:
            name = "tid2eid" if stack == "hash_layers" else "e_score_correction_bias"
            found[f"mlp.gate.{name}"] = given[stack][i]
        out |= {f"model.layers.{number}.{name}": a for name, a in found.items()}
    return {name: np.ascontiguousarray(a) for name, a in out.items()}


def hf_layer(w):
    attention, mlp = w["attention"], w["mlp"] if "mlp" in w else w["dispatch"]
    of_attention = hf_attention if hasattr(attention, "kv_down") else v4_attention
    found = {f"self_attn.{name}": a for name, a in of_attention(attention).items()}
    found |= {f"attn_hc.{name}": a for name, a in hf_connection(attention.hyper).items()}
    found |= {f"ffn_hc.{name}": a for name, a in hf_connection(mlp.hyper).items()}
    found |= {"input_layernorm.weight": attention.norm, "post_attention_layernorm.weight": mlp.norm}
    if "mlp" in w:
        return found | {f"mlp.{name}": a for name, a in hf_mlp(mlp.mlp).items()}
    up, down = w["experts"].up, w["experts"].down
    found |= {f"mlp.shared_experts.{name}": a for name, a in hf_mlp(mlp.shared).items()}
    return found | {
        "mlp.gate.weight": mlp.router.T,
        "mlp.experts.gate_up_proj": up.reshape(*up.shape[:2], -1).swapaxes(1, 2),
        "mlp.experts.down_proj": down.swapaxes(1, 2),
    }


def hf_connection(w):
    """None where there is one stream."""
    return {} if w is None else {"fn": w.project.reshape(-1, w.project.shape[2]).T, "base": w.base, "scale": w.scale}


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


def of_transformers(config, **arrays):
    """What parity_worker.py makes of them: `out`, and gradients by name."""
    folder = pathlib.Path(FOLDER.name)
    np.savez(folder / "in.npz", config=json.dumps(config), **arrays)
    subprocess.run([PYTHON, WORKER, folder / "in.npz", folder / "out.npz"], check=True)
    found = dict(np.load(folder / "out.npz"))
    return found.pop("out"), found


def named(weights):
    return {f"weights/{name}": a for name, a in weights.items()}


@functools.cache
def expected(model):
    """Logits and gradients."""
    weights = hf_arrays(tiny.weights(model), tiny.router_bias(model))
    return of_transformers(hf_config(model), **named(weights), **tiny.batch())


@MODELS
def test_logits_are_those_of_transformers(model):
    config = tiny.config(model)
    found, real = np.asarray(tiny.logits(config)(*tiny.inputs(config))), tiny.batch()["segments"] > 0
    np.testing.assert_allclose(found[real], expected(model)[0][real], rtol=0, atol=1e-5)


@MODELS
def test_every_gradient_is_that_of_transformers_which_gives_the_indexer_none(model):
    grads, (_, wanted) = hf_arrays(tiny.outcome(tiny.config(model), "main").grads), expected(model)
    assert {name for name in grads if "indexer" not in name} == wanted.keys()
    for name, found in grads.items():
        reference = wanted.get(name, np.zeros_like(found))
        assert np.abs(found - reference).max() <= 1e-4 * np.abs(reference).max(), name


@v4.ratios
def test_v4_s_attention_and_its_gradients_are_those_of_transformers(ratio):
    m, w, (segments, _) = v4.MODEL, v4.weights(ratio), v4.rows()
    y = np.asarray(v4.ops.rms_norm(v4.stream(), w.norm, m.rms_norm_eps))
    arrays = {"layer": m.compress_ratios.index(ratio), "y": y, "probe": v4.probe(), "segments": segments}
    wanted, of_weights = of_transformers(hf_config(m), **named(v4_attention(w)), **arrays)
    (out, _, _), (grads, _) = v4.learn(ratio, (1.0, 0.0))
    real = segments > 0
    np.testing.assert_allclose(out[real], wanted[real], rtol=0, atol=1e-5)
    for name, found in v4_attention(grads).items():
        reference = of_weights.pop(name, np.zeros_like(found))
        assert np.abs(found - reference).max() <= 1e-5 * np.abs(reference).max(), name
    assert not of_weights

"""Logits, attention and gradients are those of transformers, in float32, on small random models and packed documents.

maxds is given rows of packed documents, some with padding; transformers each document alone, from position 0 on.

MAXDS_PARITY_PYTHON names an interpreter that has transformers, where this one does not.
"""

import dataclasses
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np
import pytest
import safetensors.numpy
import test_compressed as v4
import tiny
from converted import BUILDS, drawn

from maxds import params
from maxds.hf import settings
from maxds.hf.table import cells, official, table

PYTHON = os.environ.get("MAXDS_PARITY_PYTHON") or (importlib.util.find_spec("transformers") and sys.executable)
pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(not PYTHON, reason="needs transformers: maxds[parity], or MAXDS_PARITY_PYTHON"),
]

WORKER = pathlib.Path(__file__).with_name("parity_worker.py")
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
ATTENTIONS = dataclasses.replace(v4.MODEL, n_group=1, topk_group=1, hc_mult=2, swiglu_limit=1.0)
WRITTEN = {
    "V2-Lite": (dataclasses.replace(tiny.V2_LITE, num_nextn_predict_layers=0),),
    "V3.2": (YARN, OTHER),
    "V4": (tiny.V4, OTHER_V4),
}
MODELS = {build: [*WRITTEN.get(build, ()), *drawn(build)] for build in BUILDS}


def tensors(model, state):
    """The arrays of a state, or of a part of it, in the names and shapes of Hugging Face's format."""
    arrays = {params.name(path): np.asarray(a) for path, a in jax.tree_util.tree_leaves_with_path(state)}
    found = {}
    rows = [row for row in table(model, list(arrays)) if not row.copy]
    for cell in cells(rows, {name: a.shape for name, a in arrays.items()}):
        own = [arrays[name][cell.index] for name in cell.row.arrays]
        dtype = np.dtype(np.int64 if cell.row.below else np.float32)
        found |= dict(zip(cell.tensors, cell.row.to_tensors(own, dtype), strict=True))
    return found


def of_transformers(*cases):
    """What parity_worker.py makes of each (model, weights, given): what it computes, and gradients by name."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = [pathlib.Path(scratch) / str(i) for i in range(len(cases))]
        for folder, (model, weights, given) in zip(folders, cases, strict=True):
            folder.mkdir()
            held = tensors(model, {"params": weights, "router_bias": tiny.router_bias(model)})
            safetensors.numpy.save_file(held, folder / "model.safetensors")
            (folder / "config.json").write_text(settings.write(model, "float32", None))
            np.savez(folder / "given.npz", **given)
        subprocess.run([PYTHON, WORKER, *folders], check=True)
        return [(np.load(folder / "out.npy"), gradients(folder)) for folder in folders]


def gradients(folder):
    """Those that parity_worker.py has saved, by the names of the table."""
    saved = safetensors.numpy.load_file(folder / "gradients" / "model.safetensors")
    of_v4 = "deepseek_v4" in (folder / "config.json").read_text()
    return {official(name) if of_v4 else name: a for name, a in saved.items()}


def gradient_errors(found, wanted):
    """By name: the largest error over the largest value. transformers has none of what is trained otherwise."""
    assert wanted.keys() <= found.keys()
    assert all("indexer" in name for name in found.keys() - wanted.keys())
    errors = {}
    for name, a in found.items():
        reference = wanted.get(name, np.zeros_like(a))
        largest = np.abs(a - reference).max()
        assert np.isfinite(largest), name
        errors[name] = float(largest and largest / np.abs(reference).max())
    return errors


def compare(model, logits, wanted):
    """The largest error of logits; the largest of gradients, and of which weight."""
    config, real = tiny.config(model), tiny.batch()["segments"] > 0
    found = np.asarray(tiny.logits(config)(*tiny.inputs(config)))
    terms = ["main", *(f"mtp_{depth + 1}" for depth in range(model.num_nextn_predict_layers))]
    grads = jax.tree.map(lambda *parts: sum(parts), *(tiny.outcome(config, term).grads for term in terms))
    errors = gradient_errors(tensors(model, {"params": grads}), wanted)
    jax.clear_caches()  # Linux lets few programs be mapped
    where = max(errors, key=errors.__getitem__)
    return float(np.abs(found - logits)[real].max()), errors[where], where


def given(model):
    """The batch, and what each MTP module's loss counts for."""
    modules = model.num_nextn_predict_layers
    return tiny.batch() | {"mtp": tiny.config(model).loss.mtp / max(modules, 1)}


@pytest.mark.parametrize("build", MODELS)
def test_logits_and_every_gradient_are_those_of_transformers(build):
    """Prints a row of the table in README.md."""
    wanted = of_transformers(*((model, tiny.weights(model), given(model)) for model in MODELS[build]))
    errors = [compare(model, *of_model) for model, of_model in zip(MODELS[build], wanted, strict=True)]
    for number, error in enumerate(errors):
        print(f"{build}, model {number}: {row(*error)}")
    logits = np.max([error for error, _, _ in errors])
    gradient, where = max((error, where) for _, error, where in errors)
    print(f"| {build} | {len(errors)} | {row(logits, gradient, where)} |")
    assert logits <= 1e-5
    assert gradient <= 1e-4


def row(logits, gradient, where):
    """Of a table: errors, as README.md writes numbers."""
    return f"{logits:.1e} | {gradient:.1e} | `{where}`".replace("e-0", "e-")


@v4.ratios
def test_v4_s_attention_and_its_gradients_are_those_of_transformers(ratio):
    layer, (segments, _) = v4.MODEL.compress_ratios.index(ratio), v4.rows()
    y = np.asarray(v4.ops.rms_norm(v4.stream(), v4.weights(ratio).norm, v4.MODEL.rms_norm_eps))
    inputs = {"layer": layer, "y": y, "probe": v4.probe(), "segments": segments}
    ((wanted, of_weights),) = of_transformers((ATTENTIONS, with_attention(ratio, layer), inputs))
    (out, _, _), (grads, _) = v4.learn(ratio, (1.0, 0.0))
    real, grads = segments > 0, dataclasses.replace(grads, norm=None)  # y is normalized already
    found = tensors(ATTENTIONS, {"params": {"moe_layers": {str(layer): {"attention": stacked(grads)}}}})
    errors = gradient_errors(found, of_weights)
    print(f"ratio {ratio}: outputs {np.abs(out - wanted)[real].max():.1e}, gradients {max(errors.values()):.1e}")
    np.testing.assert_allclose(out[real], wanted[real], rtol=0, atol=1e-5)
    assert max(errors.values()) <= 1e-5


def with_attention(ratio, layer):
    """Weights of `ATTENTIONS`, those of the attention of a layer being those of test_compressed.py."""
    w = tiny.weights(ATTENTIONS)
    kind = w.moe_layers[str(layer)]
    own = dataclasses.replace(stacked(v4.weights(ratio)), hyper=kind["attention"].hyper)
    return dataclasses.replace(w, moe_layers=w.moe_layers | {str(layer): kind | {"attention": own}})


def stacked(layer):
    """As a stack of this layer alone."""
    return jax.tree.map(lambda a: a[None], layer)

"""Conversion from and to Hugging Face's format: what is written, read, refused, and gone on with."""

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import converted
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tiny
import yaml

from maxds import checkpoint, convert, generate, loader, parts, score, train, trained
from maxds.config import Config, Sample
from maxds.hf import files, quantized, settings
from maxds.hf.table import cells, table
from maxds.nodes import CONFIGS

V4 = dataclasses.replace(
    tiny.V4, intermediate_size=0, compress_ratios=(*tiny.V4.compress_ratios, 0), num_nextn_predict_layers=1
)
TINY = {
    "V3, two modules": dataclasses.replace(tiny.V3, vocab_size=257, num_nextn_predict_layers=2),
    "V2": dataclasses.replace(tiny.V2, n_shared_experts=2),
    "V2-Lite, tied": tiny.V2_LITE,
    "V3.2": tiny.V32,
    # Hash layers of two kinds; two turns of two layers, and a last one that is not whole.
    "V4": dataclasses.replace(
        V4,
        num_hidden_layers=8,
        compress_ratios=(0, 4, 0, 4, 6, 4, 6, 4, 6, 6),
        num_nextn_predict_layers=2,
        num_hash_layers=3,
        tie_word_embeddings=True,
    ),
}


@pytest.fixture(scope="module")
def v3(tmp_path_factory):
    """A run of V3 saved by eight devices, and what is written of it: folders `run` and `hf`."""
    folder = tmp_path_factory.mktemp("v3")
    _, state = converted.run(folder / "run", TINY["V3, two modules"], mesh=(2, 2, 2))
    convert.to_hf(str(folder / "run"), str(folder / "hf"))
    return folder, jax.device_get(state)


def state_of(run):
    _, state = trained.load(trained.read_config(str(run)), str(run))
    return jax.device_get((state.params, state.router_bias))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    return True


# ------------------------------------------------------------------------------------------ the table


@pytest.mark.parametrize(
    "name",
    [
        "deepseek2-16b",
        "deepseek2-236b",
        "deepseek3-671b",
        "deepseek3.2-671b",
        "deepseek4-284b",
        "deepseek4-1.6t",
        "kimi-k2-1t",
    ],
)
def test_tensors_hold_every_number_of_a_state_once(name):
    model = loader.load(Config, CONFIGS / f"{name}.yaml")[0].model
    shapes = {array: tuple(s) for array, s in checkpoint.shapes(parts.abstract(model)).items()}
    found = [c for c in cells(table(model, list(shapes)), shapes) if not c.row.copy]
    numbers = sum(
        int(np.prod(c.row.tensor_shape([shapes[a][len(c.index) :] for a in c.row.arrays]))) * len(c.tensors)
        for c in found
    )
    arrays = {array: shape for array, shape in shapes.items() if array not in ("step", "typical_norm")}
    assert numbers == sum(int(np.prod(shape, dtype=np.int64)) for shape in arrays.values())
    assert {a for c in found for a in c.row.arrays} == arrays.keys()
    names = [name for c in found for name in c.tensors]
    assert len(set(names)) == len(names)


RELEASED = {
    "deepseek3-671b": {
        "model.embed_tokens.weight": (129280, 7168),
        "lm_head.weight": (129280, 7168),
        "model.layers.0.self_attn.q_a_proj.weight": (1536, 7168),
        "model.layers.0.self_attn.q_b_proj.weight": (24576, 1536),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "model.layers.0.self_attn.kv_b_proj.weight": (32768, 512),
        "model.layers.0.self_attn.o_proj.weight": (7168, 16384),
        "model.layers.2.mlp.gate_proj.weight": (18432, 7168),
        "model.layers.3.mlp.gate.weight": (256, 7168),
        "model.layers.3.mlp.gate.e_score_correction_bias": (256,),
        "model.layers.60.mlp.experts.255.down_proj.weight": (7168, 2048),
        "model.layers.61.mlp.shared_experts.up_proj.weight": (2048, 7168),
        "model.layers.61.eh_proj.weight": (7168, 14336),
        "model.layers.61.shared_head.norm.weight": (7168,),
        "model.layers.61.shared_head.head.weight": (129280, 7168),
    },
    "deepseek4-284b": {
        "embed.weight": (129280, 4096),
        "norm.weight": (4096,),
        "head.weight": (129280, 4096),
        "hc_head_base": (4,),
        "hc_head_fn": (4, 16384),
        "hc_head_scale": (1,),
        "layers.0.ffn.gate.tid2eid": (129280, 6),
        "layers.2.ffn.gate.tid2eid": (129280, 6),
        "layers.3.ffn.gate.bias": (256,),
        "layers.42.ffn.gate.bias": (256,),
        "layers.0.attn_norm.weight": (4096,),
        "layers.0.ffn_norm.weight": (4096,),
        "layers.0.attn.attn_sink": (64,),
        "layers.0.attn.kv_norm.weight": (512,),
        "layers.0.attn.q_norm.weight": (1024,),
        "layers.0.attn.wkv.weight": (512, 4096),
        "layers.0.attn.wo_a.weight": (8192, 4096),
        "layers.0.attn.wo_b.weight": (4096, 8192),
        "layers.0.attn.wq_a.weight": (1024, 4096),
        "layers.0.attn.wq_b.weight": (32768, 1024),
        "layers.42.hc_attn_base": (24,),
        "layers.42.hc_attn_fn": (24, 16384),
        "layers.42.hc_ffn_scale": (3,),
        "layers.42.ffn.gate.weight": (256, 4096),
        "layers.42.ffn.experts.255.w1.weight": (2048, 4096),
        "layers.42.ffn.experts.255.w2.weight": (4096, 2048),
        "layers.42.ffn.experts.255.w3.weight": (2048, 4096),
        "layers.42.ffn.shared_experts.w2.weight": (4096, 2048),
        "layers.2.attn.compressor.ape": (4, 1024),
        "layers.42.attn.compressor.wgate.weight": (1024, 4096),
        "layers.42.attn.compressor.norm.weight": (512,),
        "layers.42.attn.indexer.compressor.ape": (4, 256),
        "layers.42.attn.indexer.compressor.norm.weight": (128,),
        "layers.42.attn.indexer.compressor.wkv.weight": (256, 4096),
        "layers.42.attn.indexer.weights_proj.weight": (64, 4096),
        "layers.42.attn.indexer.wq_b.weight": (8192, 1024),
        "layers.3.attn.compressor.ape": (128, 512),
        "mtp.0.attn.wkv.weight": (512, 4096),
        "mtp.0.e_proj.weight": (4096, 4096),
        "mtp.0.ffn.experts.255.w1.weight": (2048, 4096),
        "mtp.0.ffn.gate.bias": (256,),
        "mtp.0.h_proj.weight": (4096, 4096),
        "mtp.0.hc_ffn_fn": (24, 16384),
        "mtp.0.hc_head_fn": (4, 16384),
        "mtp.0.hc_head_scale": (1,),
        "mtp.0.norm.weight": (4096,),
        "layers.41.attn.compressor.wkv.weight": (512, 4096),
    },
}


@pytest.mark.parametrize(("name", "released"), RELEASED.items(), ids=RELEASED)
def test_names_and_shapes_are_those_of_the_released_files(name, released):
    model = loader.load(Config, CONFIGS / f"{name}.yaml")[0].model
    shapes = {array: tuple(s) for array, s in checkpoint.shapes(parts.abstract(model)).items()}
    found = {
        name: c.row.tensor_shape([shapes[a][len(c.index) :] for a in c.row.arrays])
        for c in cells(table(model, list(shapes)), shapes)
        for name in c.tensors
    }
    assert {name: found[name] for name in released} == released


# V4's files: how many tensors, and how many numbers in them, scales included, as they are stored.
STORED = {"deepseek4-284b": (69_187, 158_069_433_298), "deepseek4-1.6t": (145_116, 861_608_274_846)}


@pytest.mark.parametrize(("name", "stored"), STORED.items(), ids=STORED)
def test_v4_s_tensors_are_as_many_and_as_large_as_the_released_files(name, stored):
    model = loader.load(Config, CONFIGS / f"{name}.yaml")[0].model
    shapes = {array: tuple(s) for array, s in checkpoint.shapes(parts.abstract(model)).items()}
    found = []
    for cell in cells(table(model, list(shapes)), shapes):
        shape = cell.row.tensor_shape([shapes[a][len(cell.index) :] for a in cell.row.arrays])
        for tensor in cell.tensors:
            if ".experts." in tensor:
                found += quantized.stored("I8", shape)
            elif (
                re.search(r"\.(wkv|wo_a|wo_b|wq_a|wq_b|w[123]|e_proj|h_proj)\.", tensor) and "compressor" not in tensor
            ):
                found += quantized.stored("F8_E4M3", shape)
            else:
                found.append(shape)
    assert (len(found), sum(map(math.prod, found))) == stored


def test_tensors_are_what_the_reference_multiplies_by(v3):
    """Every row of the table once, against expressions of their own, read by the format's own library."""
    folder, state = v3
    w, bias = state.params, state.router_bias
    (file,) = (folder / "hf").glob("*.safetensors")
    found = safetensors.numpy.load_file(file)
    c, a, m = TINY["V3, two modules"], w.moe_layers["attention"], w.moe_layers["experts"]

    def up(joined, i):
        return joined[:, i].T

    heads = [np.concatenate([a.k_up[1][:, n], a.v_up[1][:, n]], 1).T for n in range(c.num_attention_heads)]
    expected = {
        "model.embed_tokens.weight": w.embed,
        "lm_head.weight": w.head.T,
        "model.norm.weight": w.norm,
        "model.layers.0.mlp.gate_proj.weight": up(w.dense_layers["mlp"].mlp.up[0], 0),
        "model.layers.0.mlp.up_proj.weight": up(w.dense_layers["mlp"].mlp.up[0], 1),
        "model.layers.0.mlp.down_proj.weight": w.dense_layers["mlp"].mlp.down[0].T,
        "model.layers.0.post_attention_layernorm.weight": w.dense_layers["mlp"].norm[0],
        "model.layers.2.input_layernorm.weight": a.norm[1],
        "model.layers.2.self_attn.q_a_proj.weight": a.q_down[1].T,
        "model.layers.2.self_attn.q_a_layernorm.weight": a.q_norm[1],
        "model.layers.2.self_attn.q_b_proj.weight": a.q_up[1].reshape(c.q_lora_rank, -1).T,
        "model.layers.2.self_attn.kv_a_proj_with_mqa.weight": np.concatenate([a.kv_down[1], a.k_rope[1]], 1).T,
        "model.layers.2.self_attn.kv_a_layernorm.weight": a.kv_norm[1],
        "model.layers.2.self_attn.kv_b_proj.weight": np.concatenate(heads),
        "model.layers.2.self_attn.o_proj.weight": np.concatenate(list(a.out[1]), axis=1),
        "model.layers.2.post_attention_layernorm.weight": w.moe_layers["dispatch"].norm[1],
        "model.layers.2.mlp.gate.weight": w.moe_layers["dispatch"].router[1].T,
        "model.layers.2.mlp.gate.e_score_correction_bias": bias["moe_layers"][1],
        "model.layers.2.mlp.shared_experts.gate_proj.weight": up(w.moe_layers["dispatch"].shared.up[1], 0),
        "model.layers.2.mlp.experts.5.gate_proj.weight": up(m.up[1, 5], 0),
        "model.layers.2.mlp.experts.5.up_proj.weight": up(m.up[1, 5], 1),
        "model.layers.2.mlp.experts.5.down_proj.weight": m.down[1, 5].T,
        "model.layers.5.mlp.gate.e_score_correction_bias": bias["mtp"][1],
        "model.layers.5.enorm.weight": w.mtp.embed_norm[1],
        "model.layers.5.hnorm.weight": w.mtp.hidden_norm[1],
        "model.layers.5.eh_proj.weight": w.mtp.projection[1].T,
        "model.layers.5.shared_head.norm.weight": w.mtp.head_norm[1],
        "model.layers.5.shared_head.head.weight": w.head.T,
        "model.layers.5.embed_tokens.weight": w.embed,
        "model.layers.5.self_attn.q_a_proj.weight": w.mtp.layer["attention"].q_down[1].T,
    }
    equal(expected, {name: found[name] for name in expected})
    index = json.loads((folder / "hf" / files.INDEX).read_text())
    assert index["weight_map"] == dict.fromkeys(found, file.name)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())


# V4-Flash's config.json, but for what says nothing of the model.
V4_FLASH = """
{"attention_bias": false, "attention_dropout": 0.0, "hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20,
"head_dim": 512, "hidden_act": "silu", "hidden_size": 4096, "index_head_dim": 128, "index_n_heads": 64, "index_topk":
512, "initializer_range": 0.02, "max_position_embeddings": 1048576, "model_type": "deepseek_v4",
"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
"num_attention_heads": 64, "expert_dtype": "fp4", "num_experts_per_tok": 6, "num_hidden_layers": 43,
"num_hash_layers": 3, "num_key_value_heads": 1, "o_groups": 8, "num_nextn_predict_layers": 1, "o_lora_rank": 1024,
"q_lora_rank": 1024, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "quantization_config": {"activation_scheme":
"dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
"rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "type":
"yarn"}, "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 128,
"swiglu_limit": 10.0, "tie_word_embeddings": false, "topk_method": "noaux_tc", "vocab_size": 129280,
"compress_rope_theta": 160000, "compress_ratios": [0, 0, LAYERS 0]}
"""


# What V4-Pro's says otherwise.
V4_PRO = {
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "hidden_size": 7168,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "o_groups": 16,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
}


@pytest.mark.parametrize(("name", "more"), [("deepseek4-284b", {}), ("deepseek4-1.6t", V4_PRO)])
def test_config_json_of_v4_is_the_shipped_model(name, more, tmp_path):
    given = json.loads(V4_FLASH.replace("LAYERS", "4, 128, " * 20 + "4,")) | more
    (tmp_path / "config.json").write_text(json.dumps(given))
    given = settings.read(tmp_path)
    model = loader.load(Config, CONFIGS / f"{name}.yaml")[0].model
    shipped = json.loads(json.dumps(loader.plain(model)))
    assert json.loads(json.dumps(given)) == {key: shipped[key] for key in given}
    left = {key for key in shipped.keys() - given.keys() if not key.startswith("engram_")}
    assert left == {"kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "intermediate_size", "first_k_dense_replace"}


@pytest.fixture(scope="module")
def v4(tmp_path_factory):
    """A run of V4, and what is written of it: folders `run` and `hf`."""
    folder = tmp_path_factory.mktemp("v4")
    _, state = converted.run(folder / "run", V4)
    convert.to_hf(str(folder / "run"), str(folder / "hf"))
    return folder, jax.device_get(state)


def test_v4_s_layers_are_found_by_turn_and_member(v4):
    """What of each stack and kind lies where; numbers are compared with transformers by tests/test_parity.py."""
    folder, state = v4
    w, bias, found = state.params, state.router_bias, files.tensors(folder / "hf")
    expected = {
        "layers.0.attn.wkv.weight": w.hash_layers["attention"].kv[0].T,
        "layers.0.ffn.gate.tid2eid": bias["hash_layers"][0],
        "layers.1.attn.compressor.ape": w.moe_layers["0"]["attention"].compressor.bias[0],  # ratio 4
        "layers.2.attn.compressor.ape": w.moe_layers["1"]["attention"].compressor.bias[0],  # ratio 3
        "layers.3.attn.indexer.weights_proj.weight": w.moe_layers["0"]["attention"].indexer.heads[1].T,
        "layers.4.ffn.experts.7.w2.weight": w.moe_layers["1"]["experts"].down[1, 7].T,
        "layers.4.ffn.experts.7.w3.weight": w.moe_layers["1"]["experts"].up[1, 7, :, 1].T,
        "layers.4.ffn.gate.bias": bias["moe_layers"][3],
        "layers.5.hc_ffn_scale": w.last_layers["dispatch"].hyper.scale[0],
        "layers.5.ffn.gate.bias": bias["last_layers"][0],
        "hc_head_base": w.hyper.base,
        "mtp.0.enorm.weight": w.mtp.embed_norm[0],
        "mtp.0.hnorm.weight": w.mtp.hidden_norm[0],
        "mtp.0.norm.weight": w.mtp.head_norm[0],
        "mtp.0.e_proj.weight": w.mtp.projection[0].T,
        "mtp.0.h_proj.weight": w.mtp.of_streams[0].T,
        "mtp.0.attn.wkv.weight": w.mtp.layer["attention"].kv[0].T,
        "mtp.0.ffn.gate.bias": bias["mtp"][0],
        "mtp.0.hc_head_base": w.mtp.hyper.base[0],
    }
    assert equal(expected, {name: found[name].read() for name in expected})
    assert found["layers.0.ffn.gate.tid2eid"].dtype == "I64"


def rewritten(source, target, change):
    """A folder of the tensors of another, as `change` has them, and its config.json."""
    target.mkdir()
    held = change({name: tensor.read() for name, tensor in files.tensors(source).items()})
    files.lay_out(target, {name: (a.dtype, a.shape) for name, a in held.items()}, 10**9)
    for name, tensor in files.tensors(target).items():
        tensor.write(np.ascontiguousarray(held[name]))
    shutil.copy(source / "config.json", target)
    return target


def test_names_that_transformers_saves_v4_under_are_read_too(v4, tmp_path):
    def renamed(name):
        if name.startswith("mtp."):
            return name  # it saves none
        name = name.replace("attn.kv_norm", "attn.norm").replace("hc_head_", "hc_head.hc_")
        name = "embed_tokens.weight" if name == "embed.weight" else name
        return name if name == "head.weight" else f"model.{name}"

    hf = rewritten(v4[0] / "hf", tmp_path / "hf", lambda held: {renamed(name): a for name, a in held.items()})
    convert.from_hf(str(hf), str(tmp_path / "back"))
    assert equal(state_of(tmp_path / "back"), (v4[1].params, v4[1].router_bias))
    twice = rewritten(v4[0] / "hf", tmp_path / "twice", lambda held: held | {"model.norm.weight": held["norm.weight"]})
    with pytest.raises(
        files.FormatError, match=r"has norm\.weight and model\.norm\.weight, which are names of the same"
    ):
        convert.from_hf(str(twice), str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("place", "expert", "message"),
    [
        ((2, 1), 8, r"tid2eid names experts 0 to 8, not 0 to 7"),
        ((2, 1), None, r"tid2eid gives token 2 the same expert"),
    ],
)
def test_tables_that_name_no_expert_or_one_twice_are_refused(v4, tmp_path, place, expert, message):
    def change(held):
        table = held["layers.0.ffn.gate.tid2eid"].copy()
        table[place] = table[place[0], 0] if expert is None else expert
        return held | {"layers.0.ffn.gate.tid2eid": table}

    hf = rewritten(v4[0] / "hf", tmp_path / "hf", change)
    with pytest.raises(files.FormatError, match=message):
        convert.from_hf(str(hf), str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


# ------------------------------------------------------------------------------------- there and back


@pytest.mark.oldest
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", TINY.values(), ids=TINY)
def test_what_is_converted_there_and_back_is_the_same_to_the_bit(model, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "FILE_BYTES", 4000)  # many files
    monkeypatch.setattr(parts, "CHUNK_BYTES", 1000)  # and chunks that do not divide their arrays evenly
    _, state = converted.run(tmp_path / "run", model, dtype=dtype)
    convert.to_hf(str(tmp_path / "run"), str(tmp_path / "hf"))
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    convert.from_hf(str(tmp_path / "hf"), str(tmp_path / "back"))
    assert trained.read_config(str(tmp_path / "back")).model == model
    assert equal(
        state_of(tmp_path / "back"),
        jax.tree.map(lambda a: np.asarray(a, np.float32), (state.params, state.router_bias)),
    )
    stored = parts.open_checkpoint(tmp_path / "back", 0, ["params.embed", "params.norm"])
    assert (stored.dtype("params.embed"), stored.dtype("params.norm")) == (np.dtype(dtype), np.float32)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "hf", "run"]
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == ["checkpoints", "config.json", "config.yaml"]


def test_zeros_are_converted_as_anything_else(v3, tmp_path):
    """A router's bias that nothing has changed yet, and an expert that nothing has reached."""
    names = "model.layers.2.mlp.gate.e_score_correction_bias", "model.layers.2.mlp.experts.3.down_proj.weight"
    hf = rewritten(
        v3[0] / "hf", tmp_path / "hf", lambda held: held | {name: np.zeros_like(held[name]) for name in names}
    )
    convert.from_hf(str(hf), str(tmp_path / "run"))
    weights, bias = state_of(tmp_path / "run")
    assert not bias["moe_layers"][1].any() and not weights.moe_layers["experts"].down[1, 3].any()
    assert bias["moe_layers"][0].all() and weights.moe_layers["experts"].down[1, 2].all()


def test_what_is_missing_of_a_checkpoint_is_not_taken_for_zeros(lite, tmp_path):
    back = shutil.copytree(lite / "back", tmp_path / "back")
    folder = back / "checkpoints" / "0" / "state" / "params.moe_layers.experts.down"
    next(path for path in folder.rglob("*") if path.is_file() and path.name != "zarr.json").unlink()
    (line,) = refused(None, tmp_path, "to_hf", str(back), str(tmp_path / "out"), partial=True)
    assert re.match(r"params\.moe_layers\.experts\.down cannot be read .*; copy the checkpoint again, or", line)


def test_a_checkpoint_that_is_not_what_was_saved_is_refused(tmp_path, monkeypatch):
    """In any of its arrays, and also where the conversion was stopped in between: what was read before counts."""
    converted.run(tmp_path / "run", TINY["V3, two modules"])
    reading, names = parts.Parts.read, ("params.embed", "params.moe_layers.experts.up", "router_bias.mtp")
    for array in names:

        def altered(self, name, index, array=array):
            found = reading(self, name, index).copy()
            found.reshape(-1)[-1] += name == array
            return found

        with monkeypatch.context() as patch:
            patch.setattr(parts.Parts, "read", altered)
            with patch.context() as stop, pytest.raises(KeyboardInterrupt):
                stop.setattr(convert.Sums, "differing", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
                convert.to_hf(str(tmp_path / "run"), str(tmp_path / "hf"))
        with pytest.raises(convert.DamageError, match=rf"^1 arrays have another checksum .* as {re.escape(array)}; "):
            convert.to_hf(str(tmp_path / "run"), str(tmp_path / "hf"))
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
    convert.to_hf(str(tmp_path / "run"), str(tmp_path / "hf"))


def test_a_full_disk_is_told_and_the_same_command_goes_on(v3, tmp_path, capsys, monkeypatch):
    writing = parts.Parts.write

    def full(self, name, index, numbers):
        array = self.arrays[name] if name != "params.norm" else Full()
        writing(dataclasses.replace(self, arrays=self.arrays | {name: array}), name, index, numbers)

    class Full:
        def __getitem__(self, index):
            raise ValueError("RESOURCE_EXHAUSTED: No space left on device\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(parts.Parts, "write", full)
        assert convert.main(["", "from_hf", str(v3[0] / "hf"), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "params.norm cannot be written: RESOURCE_EXHAUSTED: No space left on device\n"
    convert.from_hf(str(v3[0] / "hf"), str(tmp_path / "out"))
    assert "going on" in capsys.readouterr().out


def test_a_training_saves_weights_in_pieces_of_a_layer_or_expert(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", (1, 10**9))
    _, state = converted.run(tmp_path, tiny.V3, mesh=(1, 2, 2))
    pieces = {
        "params.moe_layers.experts.up": (1, 1, 12, 2, 32),
        "params.moe_layers.attention.q_up": (1, 4, 3, 14),  # split over `fsdp`, and each copy of it writes a half
        "params.mtp.projection": (1, 12, 24),
    }
    found = parts.open_checkpoint(tmp_path, 3, list(pieces)).arrays
    assert {name: array.chunk_layout.read_chunk.shape for name, array in found.items()} == pieces
    assert equal(state_of(tmp_path), jax.device_get((state.params, state.router_bias)))


@pytest.fixture(scope="module")
def lite(tmp_path_factory):
    """A run of a small V2-Lite, as `run`, what is written of it, `hf`, and a run that was made of that, `back`."""
    folder = tmp_path_factory.mktemp("lite")
    model = dataclasses.replace(TINY["V2-Lite, tied"], vocab_size=257, num_nextn_predict_layers=0)
    converted.run(folder / "run", model)
    convert.to_hf(str(folder / "run"), str(folder / "hf"))
    convert.from_hf(str(folder / "hf"), str(folder / "back"))
    return folder


def test_a_converted_run_scores_and_generates_as_it_is(lite):
    np.save(lite / "tokens.npy", np.random.default_rng(0).integers(0, 257, (2, 9)))
    for name in ("run", "back"):
        score.score(str(lite / name), str(lite / "tokens.npy"), str(lite / f"{name}.npy"))
    first, second = np.load(lite / "run.npy"), np.load(lite / "back.npy")
    np.testing.assert_allclose(first, second, atol=0.05)  # one computes in float32, the other in bfloat16
    assert first.std() > 0.1
    assert generate.continue_text(str(lite / "back"), Sample(prompt="ab", tokens=2, temperature=0)).startswith("ab")


def test_what_is_written_is_what_the_run_computes_with(tmp_path):
    """Else servers would take the float32 that a training keeps for what the model was made for, and halve it."""
    converted.run(tmp_path / "run", TINY["V3, two modules"])
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    config["precision"]["compute"] = "bfloat16"
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    convert.to_hf(str(tmp_path / "run"), str(tmp_path / "hf"))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    dtypes = {name: tensor.dtype for name, tensor in files.tensors(tmp_path / "hf").items()}
    kept = [name for name, dtype in dtypes.items() if dtype == "F32"]
    assert kept == [name for name in dtypes if re.search(r"norm|mlp\.gate\.", name)]
    assert set(dtypes.values()) == {"F32", "BF16"}
    convert.from_hf(str(tmp_path / "hf"), str(tmp_path / "back"))
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 257, (2, 9)))
    for name in ("run", "back"):
        score.score(str(tmp_path / name), str(tmp_path / "tokens.npy"), str(tmp_path / f"{name}.npy"))
    np.testing.assert_array_equal(np.load(tmp_path / "run.npy"), np.load(tmp_path / "back.npy"))


def test_a_training_starts_from_converted_weights_and_resumes_its_own(lite, tmp_path, capsys):
    back = shutil.copytree(lite / "back", tmp_path / "back")
    small = f"run_dir={back} data.sequence_length=16 mesh.data=2 mesh.fsdp=4 schedule.kind=plain".split()

    def run(*more):
        overrides = [*small, "data.sources=[{kind: synthetic}]", f"compile_cache={tmp_path}/cache", *more]
        config, tree = loader.load(Config, back / "config.yaml", overrides)
        assert train.run(config, loader.render(config, tree)) == 0
        return capsys.readouterr().out

    weights = state_of(back)[0].embed
    assert "weights of checkpoint 0, optimizer fresh" in run("steps=1")
    moved = np.abs(state_of(back)[0].embed - weights)
    assert 0 < moved.max() < 3e-5  # a step of Adam at lr=1e-5
    assert "restored from checkpoint 1" in run("steps=2")
    rows = [json.loads(line) for line in (back / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and all(np.isfinite(row["loss"]) for row in rows)


def test_what_serving_needs_travels_both_ways(v3, tmp_path):
    folder, _ = v3
    hf = shutil.copytree(folder / "hf", tmp_path / "hf")
    for name in convert.SERVING:
        (hf / name).write_text(f"{name}, as it was fetched")
    say(hf, bos_token_id=7, eos_token_id=256)
    words = {"vocab": {"<eos>": 0, "a": 1}, "unk_token": "a", "type": "WordLevel"}
    (hf / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": words, "added_tokens": []}))
    (hf / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    convert.from_hf(str(hf), str(tmp_path / "run"))
    assert trained.read_config(str(tmp_path / "run")).data.tokenizer == str(tmp_path / "run" / "tokenizer.json")
    convert.to_hf(str(tmp_path / "run"), str(tmp_path / "again"))
    for name in convert.SERVING:
        assert (tmp_path / "again" / name).read_text() == (hf / name).read_text()
    assert special_tokens(tmp_path / "again") == [7, 0, None]


def test_a_model_whose_tokenizer_maxds_cannot_read_keeps_its_special_tokens(v3, tmp_path):
    """Kimi's, such as; the bytes of the run's config end with another token."""
    hf = shutil.copytree(v3[0] / "hf", tmp_path / "hf")
    (hf / "tiktoken.model").write_text("any")
    say(hf, bos_token_id=1, eos_token_id=[2, 3], pad_token_id=4)
    convert.from_hf(str(hf), str(tmp_path / "run"))
    convert.to_hf(str(tmp_path / "run"), str(tmp_path / "again"))
    assert special_tokens(tmp_path / "again") == [1, [2, 3], 4]
    assert (tmp_path / "again" / "tiktoken.model").read_text() == "any"


def test_a_run_that_was_moved_is_converted_with_the_tokenizer_it_brought(v3, tmp_path, capsys):
    hf = shutil.copytree(v3[0] / "hf", tmp_path / "hf")
    (hf / "tokenizer.json").write_text("{}")
    say(hf, eos_token_id=5)
    convert.from_hf(str(hf), str(tmp_path / "run"))
    (tmp_path / "run").rename(tmp_path / "moved")
    convert.to_hf(str(tmp_path / "moved"), str(tmp_path / "again"))
    assert (tmp_path / "again" / "tokenizer.json").read_text() == "{}"
    assert special_tokens(tmp_path / "again") == [None, 5, None]
    assert f"data.tokenizer={tmp_path}/run/tokenizer.json is not there" in capsys.readouterr().out


def say(hf, **more):
    given = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(given | more))


def special_tokens(hf):
    given = json.loads((hf / "config.json").read_text())
    return [given[key] for key in settings.TOKENS]


# ------------------------------------------------------------------------------------- quantized weights


def test_blocks_are_dequantized_as_numpy_does_it_number_by_number():
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((200, 300)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(1e-3, 1e-2, (2, 3)).astype(np.float32)
    expected = np.empty(numbers.shape, ml_dtypes.bfloat16)
    for i, j in np.ndindex(expected.shape):
        expected[i, j] = np.float32(numbers[i, j]) * scales[i // 128, j // 128]
    np.testing.assert_array_equal(quantized.dequantized(numbers, scales), expected)


def test_float4_is_dequantized_as_numpy_does_it_number_by_number():
    rng = np.random.default_rng(0)
    packed = rng.integers(-128, 128, (200, 40)).astype(np.int8)
    scales = rng.integers(120, 134, (200, 3)).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = np.empty((200, 80), ml_dtypes.bfloat16)
    for i, j in np.ndindex(expected.shape):
        code = int(packed[i, j // 2]) >> 4 * (j % 2) & 15
        expected[i, j] = (
            (-1 if code & 8 else 1) * values[code & 7] * 2.0 ** (int(scales[i, j // 32].view(np.uint8)) - 127)
        )
    np.testing.assert_array_equal(quantized.dequantized(packed, scales), expected)


def test_quantized_v4_is_converted_to_its_dequantized_weights(v4, tmp_path):
    """As it is released: experts in float4, other matrices in float8, scales that are powers of two."""
    rng, plain = np.random.default_rng(0), {}

    def scale(held):
        found = {}
        for name, a in held.items():
            of_experts, of_attention = ".experts." in name, re.search(r"attn\.w\w+\.weight", name)
            if not of_experts and not of_attention:
                found[name] = plain[name] = a
                continue
            shape = (a.shape[0], -(-a.shape[1] // 32)) if of_experts else tuple(-(-n // 128) for n in a.shape)
            scales = rng.integers(120, 130, shape).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
            found[name.replace(".weight", ".scale")] = scales
            found[name] = a.astype(ml_dtypes.float8_e4m3fn)
            if of_experts:
                found[name] = rng.integers(-128, 128, (a.shape[0], a.shape[1] // 2)).astype(np.int8)
            plain[name] = quantized.dequantized(found[name], scales)
        return found

    scaled = rewritten(v4[0] / "hf", tmp_path / "scaled", scale)
    exact = rewritten(v4[0] / "hf", tmp_path / "exact", lambda _: plain)
    for hf in (scaled, exact):
        convert.from_hf(str(hf), str(tmp_path / f"run-{hf.name}"))
    assert equal(state_of(tmp_path / "run-scaled"), state_of(tmp_path / "run-exact"))
    moved = files.tensors(scaled)["layers.5.ffn.experts.0.w2.weight"]
    assert (moved.dtype, moved.shape) == ("I8", (24, 16))


def test_a_quantized_checkpoint_is_converted_to_its_dequantized_weights(v3, tmp_path):
    folder, _ = v3
    given = files.tensors(folder / "hf")
    rng, scaled, plain = np.random.default_rng(0), {}, {}
    for name, tensor in given.items():
        numbers = tensor.read()
        if "proj" in name and "eh_proj" not in name:
            scale = rng.uniform(0.5, 2, tuple(-(-n // 128) for n in numbers.shape)).astype(np.float32)
            scaled |= {name: numbers.astype(ml_dtypes.float8_e4m3fn), f"{name}_scale_inv": scale}
            plain[name] = quantized.dequantized(scaled[name], scale)
        else:
            plain[name] = scaled[name] = numbers
    for which, held in {"quantized": scaled, "plain": plain}.items():
        (tmp_path / which).mkdir()
        files.lay_out(tmp_path / which, {name: (a.dtype, a.shape) for name, a in held.items()}, 10**9)
        for name, tensor in files.tensors(tmp_path / which).items():
            tensor.write(held[name])
        shutil.copy(folder / "hf" / "config.json", tmp_path / which)
        convert.from_hf(str(tmp_path / which), str(tmp_path / f"run-{which}"))
    assert equal(state_of(tmp_path / "run-quantized"), state_of(tmp_path / "run-plain"))


# --------------------------------------------------------------------------------------------- mistakes


def altered(v3, tmp_path, change):
    """A copy of the written folder, whose tensors `change` has altered."""
    hf = shutil.copytree(v3[0] / "hf", tmp_path / "hf")
    (file,) = hf.glob("*.safetensors")
    held = safetensors.numpy.load_file(file)
    change(held)
    safetensors.numpy.save_file(held, file)
    (hf / files.INDEX).unlink()
    return hf


def refused(hf, tmp_path, *command, partial=False):
    command = command or ("from_hf", str(hf), str(tmp_path / "out"))
    done = subprocess.run(
        [sys.executable, "-m", "maxds.convert", *command], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out.partial"] * partial
    return done.stderr.splitlines()


def test_unknown_missing_and_misshapen_tensors_are_all_listed_and_nothing_is_written(v3, tmp_path):
    def change(held):
        held["model.layers.1.self_attn.indexer.wk.weight"] = held["model.norm.weight"]
        held["model.layers.9.input_layernorm.weight"] = held["model.norm.weight"]
        held["model.layers.0.self_attn.rotary_emb.inv_freq"] = held["model.norm.weight"]  # which is no mistake
        del held["model.layers.3.mlp.experts.7.up_proj.weight"], held["lm_head.weight"]
        held["model.norm.weight"] = held["model.norm.weight"][:-1]
        held["model.layers.0.mlp.down_proj.weight"] = held["model.layers.0.mlp.down_proj.weight"].T.copy()
        held["model.layers.0.input_layernorm.weight"] = held["model.layers.0.input_layernorm.weight"].astype(np.float64)

    hf = altered(v3, tmp_path, change)
    first, *lines = refused(hf, tmp_path)
    assert first == f"{hf} does not hold the tensors of its config.json:"
    assert sorted(lines) == [
        "  misshapen: model.layers.0.mlp.down_proj.weight [20, 24], not [24, 20]",
        "  misshapen: model.norm.weight [23], not [24]",
        "  missing: lm_head.weight",
        "  missing: model.layers.3.mlp.experts.7.up_proj.weight",
        "  of another dtype: model.layers.0.input_layernorm.weight F64, not F32, F16, BF16",
        "  unknown: model.layers.1.self_attn.indexer.wk.weight",
        "  unknown: model.layers.9.input_layernorm.weight",
    ]


def test_an_mtp_module_with_an_embedding_of_its_own_is_refused(v3, tmp_path):
    def change(held):
        held["model.layers.4.embed_tokens.weight"] = held["model.layers.4.embed_tokens.weight"] + 1

    hf = altered(v3, tmp_path, change)
    with pytest.raises(files.FormatError, match=r"no copy of .*: model\.layers\.4\.embed_tokens\.weight \(of model\.e"):
        convert.from_hf(str(hf), str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({"sliding_window": 128}, ["unknown key sliding_window; remove it if it changes nothing that is computed"]),
        ({"index_topk": 2048}, ["index_topk is 2048; a deepseek_v3 model has None"]),
        ({"kv_lora_rank": "many"}, ["model.kv_lora_rank must be an integer, not many"]),
        (
            {"hidden_act": "gelu", "rope_interleave": False, "moe_layer_freq": 2, "scoring_func": "softmax"},
            [
                "scoring_func is softmax; a deepseek_v3 model has sigmoid",
                "hidden_act is gelu; maxds knows silu",
                "moe_layer_freq is 2; maxds knows 1",
                "rope_interleave is False; maxds knows True",
            ],
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "turns": 3}, "num_key_value_heads": 1},
            [
                "unknown key rope_scaling.turns",
                "rope_scaling is of type linear; maxds knows yarn",
                "missing key rope_scaling.original_max_position_embeddings",
                "num_key_value_heads is 1; it must be num_attention_heads=3",
            ],
        ),
        (
            {"model_type": "llama"},
            ["model_type is llama; maxds converts deepseek_v2, deepseek_v3, deepseek_v32, kimi_k2, deepseek_v4"],
        ),
    ],
)
def test_bad_keys_of_config_json_are_all_listed_and_nothing_is_written(v3, tmp_path, change, messages):
    hf = shutil.copytree(v3[0] / "hf", tmp_path / "hf")
    given = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(given | change))
    with pytest.raises(files.FormatError) as error:
        convert.from_hf(str(hf), str(tmp_path / "out"))
    assert str(error.value).splitlines() == [f"{hf}/config.json: {message}" for message in messages]
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (
            {"num_nextn_predict_layers": 2**50},
            ["num_nextn_predict_layers is 1125899906842624; it must be 0 to num_hidden_layers=6"],
        ),
        ({"kv_lora_rank": 12}, ["unknown key kv_lora_rank; remove it if it changes nothing that is computed"]),
        (
            {"hc_mult": None, "norm_topk_prob": False, "num_key_value_heads": 6, "n_shared_experts": 2},
            [
                "norm_topk_prob is False; a deepseek_v4 model has True",
                "n_shared_experts is 2; a deepseek_v4 model has 1",
                "num_key_value_heads is 6; it must be 1",
                "missing key hc_mult",
            ],
        ),
        (
            {"compress_ratios": [0, 4, 5, 4, 5, 4], "num_hash_layers": 2, "partial_rotary_factor": 0.9},
            [
                "compress_ratios is [0, 4, 5, 4, 5, 4], but layer_types says [0, 4, 3, 4, 3, 4]; remove the one that "
                "is wrong",
                "num_hash_layers is 2, but mlp_layer_types says 1; remove the one that is wrong",
                "qk_rope_head_dim is 8, but partial_rotary_factor says 12; remove the one that is wrong",
            ],
        ),
        (
            {"compress_rates": {"compressed_sparse_attention": 8}, "compress_ratios": 4, "layer_types": None},
            ["compress_ratios is 4; it must be a list of int", "missing key compress_ratios"],
        ),
        (
            {"rope_parameters": {"main": {"rope_theta": 7}, "compress": {"rope_type": "yarn", "attention_factor": 2}}},
            [
                "rope_theta is 100.0, but rope_parameters says 7; remove the one that is wrong",
                "rope_parameters.compress is {'rope_type': 'yarn', 'attention_factor': 2}; maxds knows attention_"
                "factor 1",
                "missing key rope_scaling.factor",
                "missing key rope_scaling.original_max_position_embeddings",
            ],
        ),
    ],
)
def test_bad_keys_of_v4_s_config_json_are_all_listed(v4, tmp_path, change, messages):
    given = json.loads((v4[0] / "hf" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(given | change))
    with pytest.raises(files.FormatError) as error:
        settings.read(tmp_path)
    assert sorted(str(error.value).splitlines()) == sorted(f"{tmp_path}/config.json: {message}" for message in messages)


def test_v4_s_config_json_says_the_same_in_the_keys_of_either(v4, tmp_path):
    given = json.loads((v4[0] / "hf" / "config.json").read_text())
    expected = settings.read(v4[0] / "hf")
    yarn = {("rope_type" if k == "type" else k): v for k, v in given["rope_scaling"].items() if "mscale" not in k}
    share = given["partial_rotary_factor"]
    main = {"rope_type": "default", "rope_theta": given["rope_theta"], "partial_rotary_factor": share}
    far = yarn | {"rope_theta": given["compress_rope_theta"], "partial_rotary_factor": share, "attention_factor": 1.0}
    own = "compress_ratios num_hash_layers qk_rope_head_dim rope_scaling rope_theta compress_rope_theta".split()
    official = "layer_types mlp_layer_types compress_rates partial_rotary_factor".split()
    for left_out, more in ((own, {"rope_parameters": {"main": main, "compress": far}}), (official, {})):
        said = {key: value for key, value in given.items() if key not in left_out} | more
        (tmp_path / "config.json").write_text(json.dumps(said))
        assert settings.read(tmp_path) == expected


def test_config_json_of_newer_files_says_the_same(v3, tmp_path):
    given = json.loads((v3[0] / "hf" / "config.json").read_text())
    expected = settings.read(v3[0] / "hf")
    scaling = {("rope_type" if k == "type" else k): v for k, v in given.pop("rope_scaling").items()}
    given["rope_parameters"] = scaling | {"rope_theta": given.pop("rope_theta")}
    del given["topk_method"], given["scoring_func"]
    (tmp_path / "config.json").write_text(json.dumps(given | {"model_type": "kimi_k2"}))
    assert settings.read(tmp_path) == expected


def test_what_transformers_says_of_v3_2_s_layers_must_be_what_its_other_keys_say(tmp_path):
    given = json.loads(settings.write(dataclasses.replace(tiny.V32, num_nextn_predict_layers=0), "float32", None))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given))
    expected = settings.read(tmp_path)
    types = {"mlp_layer_types": ["dense", "sparse", "sparse"], "layer_types": ["indexed_attention"] * 3}
    path.write_text(json.dumps(given | types))
    assert settings.read(tmp_path) == expected
    path.write_text(json.dumps(given | {key: kinds[::-1][:2] for key, kinds in types.items()}))
    with pytest.raises(
        files.FormatError, match=r"mlp_layer_types is .*'sparse'\]; with first_k_dense_replace=1 maxds knows"
    ):
        settings.read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"scoring_func": "softmax"},
            "no model of transformers has model.scoring_func=softmax, model.topk_method=noaux",
        ),
        ({"n_shared_experts": 0}, "model.n_shared_experts=0: "),
        ({"swiglu_limit": 9.0}, "model.swiglu_limit=9.0: transformers has it in V4 only, with model.compress_ratios"),
    ],
)
def test_a_model_that_transformers_has_not_is_refused(changes, message):
    with pytest.raises(files.FormatError, match=message):
        settings.write(dataclasses.replace(tiny.V3, **changes), "float32", None)


def test_a_v4_that_transformers_has_not_is_refused():
    changes = {"swiglu_limit": None, "hc_sinkhorn_iters": None, "topk_method": "greedy"}
    changes["compress_ratios"] = (0, 4, 3, 4, 5, 4, 0)
    with pytest.raises(files.FormatError) as error:
        settings.write(dataclasses.replace(V4, **changes), "float32", None)
    assert str(error.value).splitlines() == [
        "model.topk_method=greedy: transformers' V4 has noaux_tc",
        "model.hc_sinkhorn_iters=null: transformers' V4 has a number",
        "model.swiglu_limit=null: transformers' V4 has a number",
        "model.compress_ratios has [3, 5]: transformers has one ratio beside 0 and 4",
    ]


def test_mistaken_commands_end_with_one_line_and_exit_code_2(v3, tmp_path):
    folder, _ = v3
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    (line,) = refused(None, tmp_path, "from_hf", "only")
    assert line.startswith("usage: python -m maxds.convert")
    (line,) = refused(None, tmp_path, "to_hf", str(folder / "run"), str(tmp_path / "out"), "--step=4")
    assert line.startswith("there is no checkpoint of step 4")
    for work, source, out, message in (
        (convert.from_hf, tmp_path, "out", f"{tmp_path}/config.json cannot be read"),
        (convert.from_hf, folder / "hf", "there", f"{tmp_path}/there is there already"),
        (convert.to_hf, tmp_path, "out", f"{tmp_path} is not a run"),
        (convert.to_hf, "gs://bucket/run", "out", "gs://bucket/run is in a bucket; copy it to a folder of this"),
    ):
        with pytest.raises((files.FormatError, trained.UseError), match=re.escape(message)):
            work(str(source), str(tmp_path / out))


def test_a_file_that_is_not_whole_is_refused(v3, tmp_path):
    hf = shutil.copytree(v3[0] / "hf", tmp_path / "hf")
    (file,) = hf.glob("*.safetensors")
    for size in (4, 5000, file.stat().st_size - 1):
        os.truncate(file, size)
        with pytest.raises(files.FormatError, match=r"cannot be read .*; fetch it again"):
            convert.from_hf(str(hf), str(tmp_path / "out"))
        shutil.copy(v3[0] / "hf" / file.name, file)


# -------------------------------------------------------------------------------- kills, damage, memory


def big(tmp_path, layers, width, experts=8):
    """A folder in Hugging Face's format of a model with so many layers."""
    model = dataclasses.replace(
        TINY["V3, two modules"],
        num_hidden_layers=layers,
        num_nextn_predict_layers=0,
        hidden_size=48,
        moe_intermediate_size=width,
        n_routed_experts=experts,
    )
    shapes = {name: tuple(s) for name, s in checkpoint.shapes(parts.abstract(model)).items()}
    rng, wanted = np.random.default_rng(0), {}
    for cell in cells(table(model, list(shapes)), shapes):
        shape = cell.row.tensor_shape([shapes[a][len(cell.index) :] for a in cell.row.arrays])
        wanted |= {name: (np.dtype(np.float32), shape) for name in cell.tensors}
    tmp_path.mkdir(exist_ok=True)
    files.lay_out(tmp_path, wanted, 10**9)
    for tensor in files.tensors(tmp_path).values():
        tensor.write(rng.standard_normal(tensor.shape, np.float32))
    (tmp_path / "config.json").write_text(settings.write(model, "float32", None))
    return tmp_path


@pytest.mark.parametrize("direction", ["from_hf", "to_hf"])
def test_a_killed_conversion_goes_on_and_equals_a_straight_one(direction, tmp_path, capsys):
    source = big(tmp_path / "hf", layers=7, width=8, experts=64)
    straight, out = tmp_path / "straight", tmp_path / "out"
    work = convert.from_hf if direction == "from_hf" else convert.to_hf
    if direction == "to_hf":
        convert.from_hf(str(source), str(source := tmp_path / "run"))
    work(str(source), str(straight))
    notes = tmp_path / "out.partial" / "done.jsonl"
    killed = subprocess.Popen([sys.executable, "-m", "maxds.convert", direction, str(source), str(out)])
    while not notes.exists() or notes.stat().st_size < 1000:
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not out.exists()
    notes.write_text(notes.read_text() + '["model.layers.6.mlp.ex')  # as a kill in the middle of a line leaves it
    capsys.readouterr()
    work(str(source), str(out))
    went_on = int(capsys.readouterr().out.split()[2])
    assert 10 < went_on < 2 * 64 * 6
    if direction == "to_hf":
        for path in straight.iterdir():
            assert path.read_bytes() == (out / path.name).read_bytes()
    else:
        assert equal(state_of(out), state_of(straight))
    assert not (tmp_path / "out.partial").exists()


def test_a_conversion_of_something_else_is_not_gone_on_with(v3, tmp_path, capsys):
    hf, out = shutil.copytree(v3[0] / "hf", tmp_path / "hf"), str(tmp_path / "out")

    def interrupted():
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(convert, "checksum", lambda arrays: (_ for _ in ()).throw(KeyboardInterrupt))
            patch.setattr(convert, "_altered", lambda *_: [])
            convert.from_hf(str(hf), out)

    def change(file, of):
        file.write_text(json.dumps(of(json.loads(file.read_text()))))

    interrupted()
    interrupted()
    assert "going on" in capsys.readouterr().out
    change(tmp_path / "out.partial" / "job.json", lambda job: {k: v for k, v in job.items() if k != "checksum"})
    interrupted()  # an older maxds named no checksum, and took another
    assert "going on" not in capsys.readouterr().out
    change(hf / "config.json", lambda given: given | {"rope_theta": 77})
    convert.from_hf(str(hf), out)
    assert "going on" not in capsys.readouterr().out
    assert trained.read_config(out).model.rope_theta == 77


def test_what_reads_back_otherwise_is_told_and_removed(v3, tmp_path, monkeypatch):
    write = files.Tensor.write

    def faulty(self, numbers):
        write(self, numbers * 2 if numbers.shape == (8, 24) else numbers)

    monkeypatch.setattr(files.Tensor, "write", faulty)  # of the routers: three, and two of modules
    told = r"^5 of \d+ parts read back otherwise .* such as model\.layers\.1\.mlp\.gate\.weight; look"
    with pytest.raises(convert.DamageError, match=told):
        convert.to_hf(str(v3[0] / "run"), str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("direction", ["from_hf", "to_hf"])
def test_a_bit_that_flips_before_the_end_is_found(direction, v3, tmp_path, monkeypatch):
    each = convert.Work._each

    def flipping(self, what, *args):
        if what == "comparing":
            file = max((f for f in self.folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
            file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
        return each(self, what, *args)

    monkeypatch.setattr(convert.Work, "_each", flipping)
    work, source = (convert.from_hf, "hf") if direction == "from_hf" else (convert.to_hf, "run")
    with pytest.raises(convert.DamageError, match=r"^1 of \d+ parts read back otherwise"):
        work(str(v3[0] / source), str(tmp_path / "out"))


MEASURE = """
import sys, resource
from maxds import convert
small, large, out = sys.argv[1:]
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def both(folder, out):
    convert.from_hf(folder, f"{out}/run")
    convert.to_hf(f"{out}/run", f"{out}/hf")
both(small, f"{out}/small")
before = peak()
both(large, f"{out}/large")
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_model(tmp_path):
    width = 10_000  # tensors of 2 MB
    small, large = (big(tmp_path / str(layers), layers, width) for layers in (2, 9))
    size = sum(f.stat().st_size for f in large.glob("*.safetensors"))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, small, large, tmp_path], capture_output=True, text=True, check=True
    )
    grown = int(done.stdout.split()[-1])
    assert size > 350e6 and grown < 0.1 * size, (grown, size)

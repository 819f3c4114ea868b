import dataclasses
import pathlib

import pytest

from maxds import flops, loader
from maxds.config import Config

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


def model(name, **changes):
    return dataclasses.replace(loader.load(Config, CONFIGS / f"{name}.yaml")[0].model, **changes)


@pytest.mark.parametrize(
    ("name", "gflop", "attention_percent"),
    [
        ("deepseek2-16b", 16.4, 10.4),
        ("deepseek2-236b", 155.3, 19.4),
        ("deepseek3-671b", 250.4, 12.3),
        ("kimi-k2-1t", 205.5, 7.5),
    ],
)
def test_a_token_costs_what_is_published(name, gflop, attention_percent):
    blocks = flops.per_token(model(name, num_nextn_predict_layers=0), 4096)
    assert round(blocks["total"] / 1e9, 1) == gflop
    assert round(100 * blocks["attention"] / blocks["total"], 1) == attention_percent


def test_the_blocks_of_deepseek_v3_agree_with_the_formula_written_out_in_its_numbers():
    blocks = flops.per_token(model("deepseek3-671b"), 4096)
    forward_layer = 2 * (7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168)
    forward_attention = 2 * 128 * (192 + 128) * 4096 / 2
    forward_moe = 2 * (3 * 7168 * 2048 * (8 + 1))
    assert blocks == {
        "projections": 3 * 61 * forward_layer,
        "attention": 3 * 61 * forward_attention,
        "indexer": 0,
        "dense_mlp": 3 * 3 * 2 * (3 * 7168 * 18432),
        "router": 3 * 58 * 2 * 7168 * 256,
        "experts": 3 * 58 * forward_moe,
        "hyper_connections": 0,
        "engrams": 0,
        "head": 3 * 2 * 7168 * 129280,
        "mtp": 3 * (forward_layer + forward_attention + forward_moe + 2 * 7168 * 256 + 2 * 2 * 7168 * 7168),
        "mtp_head": 3 * 2 * 7168 * 129280,
        "total": sum(count for name, count in blocks.items() if name != "total"),
    }


def test_the_blocks_of_deepseek_v4_agree_with_the_formula_written_out_in_its_numbers():
    blocks, length = flops.per_token(model("deepseek4-284b"), 4096), 4096
    around = 4096 * 1024 + 1024 * 64 * 512 + 4096 * 512 + 8 * 4096 * 1024 + 8192 * 4096
    pooled = {0: 0, 4: 2 * 4096 * 1024, 128: 2 * 4096 * 512}
    window = 128 - 128**2 / (2 * length)
    entries = {0: 0, 4: 512 - 512**2 / (2 * length / 4), 128: length / 128 / 2}
    scored = 1024 * 64 * 128 + 4096 * 64 + 2 * 4096 * 256 + (length // 4) * (64 * 128 + 64) // 2
    layers = {0: 2, 4: 21, 128: 20}
    assert blocks == {
        "projections": 6 * sum(n * (around + pooled[ratio]) for ratio, n in layers.items()),
        "attention": 6 * sum(n * int(64 * 2 * 512 * (window + entries[ratio])) for ratio, n in layers.items()),
        "indexer": 6 * 21 * scored,
        "dense_mlp": 0,
        "router": 6 * 43 * 4096 * 256,
        "experts": 6 * 43 * 3 * 4096 * 2048 * 7,
        "hyper_connections": 6 * 4 * 4096 * (43 * 2 * 24 + 4),
        "engrams": 0,
        "head": 6 * 4096 * 129280,
        "mtp": 6 * (around + int(64 * 2 * 512 * window) + 4096 * 256 + 3 * 4096 * 2048 * 7 + 5 * 4096**2)
        + 6 * 4 * 4096 * (2 * 24 + 4),
        "mtp_head": 6 * 4096 * 129280,
        "total": sum(count for name, count in blocks.items() if name != "total"),
    }


def test_streams_mixed_by_permutations_have_a_number_for_each():
    sinkhorn, permutations = model("deepseek-custom"), model("deepseek-custom", hc_sinkhorn_iters=None)
    more = flops.per_token(permutations, 1)["hyper_connections"] - flops.per_token(sinkhorn, 1)["hyper_connections"]
    assert more == 6 * 4 * sinkhorn.hidden_size * 2 * sinkhorn.num_hidden_layers * (24 - 16)


def test_without_a_query_latent_the_queries_are_one_matmul():
    direct, latent = model("deepseek2-16b"), model("deepseek2-16b", q_lora_rank=100)
    difference = flops.per_token(direct, 1)["projections"] - flops.per_token(latent, 1)["projections"]
    assert difference == 6 * 27 * (2048 * 16 * 192 - 100 * (2048 + 16 * 192))


def test_only_attention_depends_on_the_sequence_length():
    short, long = (flops.per_token(model("deepseek3-671b", num_nextn_predict_layers=0), s) for s in (1024, 4096))
    assert {name for name in short if short[name] != long[name]} == {"attention", "total"}
    assert long["attention"] == 4 * short["attention"]


def test_an_indexer_bounds_the_keys_of_attention_and_scores_all_of_them():
    dense, sparse = (model(name, num_nextn_predict_layers=0) for name in ("deepseek3-671b", "deepseek3.2-671b"))
    for length, share in [(2048, 1), (32768, 2048 / 32768 * (2 - 2048 / 32768))]:  # 2 K/S - (K/S)^2, of half of S
        without, blocks = flops.per_token(dense, length), flops.per_token(sparse, length)
        assert blocks["attention"] == without["attention"] * share
        forward = 2 * (1536 * 64 * 128 + 7168 * 128 + 7168 * 64) + 2 * length * (64 * 128 + 64) // 2
        assert blocks["indexer"] == 3 * 61 * forward
        others = blocks.keys() - {"attention", "indexer", "total"}
        assert {name: blocks[name] for name in others} == {name: without[name] for name in others}


def test_every_mtp_module_costs_its_layer_and_a_pass_through_the_head():
    none, one, two = (flops.per_token(model("deepseek3-671b", num_nextn_predict_layers=n), 4096) for n in range(3))
    assert none["mtp"] == none["mtp_head"] == 0
    assert one["mtp_head"] == one["head"]
    assert two["total"] - one["total"] == one["total"] - none["total"] == one["mtp"] + one["mtp_head"]


@pytest.mark.parametrize(
    ("device_kind", "peak"),
    [
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU7x", 1153.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
    ],
)
def test_the_peak_of_a_device_is_the_published_one(device_kind, peak):
    assert flops.peak(device_kind) == peak


@pytest.mark.parametrize("device_kind", ["cpu", "TPU v4 lite", "NVIDIA GB200", "NVIDIA RTX A6000", ""])
def test_the_peak_of_another_device_is_not_guessed(device_kind):
    assert flops.peak(device_kind) is None

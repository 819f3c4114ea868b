"""Models that transformers has, drawn, and runs of them to convert: tiny, with random weights."""

import dataclasses
import pathlib

import jax
import numpy as np
import tiny
import yaml

from maxds import checkpoint, loader, step
from maxds.architecture import Model
from maxds.config import Config
from maxds.model import layout

MANY = 17  # heads of indexers: with so many no two keys score nothing at all; of equal ones torch takes any
BUILDS = {
    "V2-Lite": (
        dataclasses.replace(
            tiny.V2,
            first_k_dense_replace=1,
            q_lora_rank=None,
            topk_method="greedy",
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.0,
            rope_scaling=dataclasses.replace(tiny.V2.rope_scaling, mscale=0.707, mscale_all_dim=0.707),
        ),
    ),
    "V2": (tiny.V2,),
    "V3": (tiny.V3,),
    "V3.2": (dataclasses.replace(tiny.V32, num_nextn_predict_layers=0, index_n_heads=MANY),),
    "V4": (
        dataclasses.replace(
            tiny.V4,
            num_hidden_layers=5,
            compress_ratios=(0, 4, 0, 4, 0),
            rope_scaling=None,
            index_n_heads=MANY,
            head_dim=49,  # of which 8/49 are 7, as transformers reckons
        ),
        dataclasses.replace(tiny.V4, index_n_heads=MANY, rms_norm_eps=1e-5),
    ),
    "Kimi-K2": (
        dataclasses.replace(
            tiny.V3,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.827,
            num_nextn_predict_layers=0,
            rope_scaling=dataclasses.replace(tiny.V3.rope_scaling, beta_fast=1),
        ),
    ),
}


def drawn(build: str) -> list[Model]:
    """Three models of a build."""
    kinds = BUILDS[build]
    return [draw(kinds[seed % len(kinds)], seed) for seed in range(3)]


def draw(model: Model, seed: int) -> Model:
    """The same kind of model in other dimensions."""
    rng = np.random.default_rng(seed)

    def of(*choices):
        return rng.choice(choices).item()

    if model.compress_ratios is not None:
        return dataclasses.replace(model, **_v4(of))
    groups = {"greedy": 1, "group_limited_greedy": of(2, 4), "noaux_tc": model.n_group and of(1, 2, 4)}[
        model.topk_method
    ]
    heads, yarn = of(2, 3, 4), model.rope_scaling
    return dataclasses.replace(
        model,
        vocab_size=of(257, 300),
        hidden_size=heads * of(6, 8),
        intermediate_size=of(20, 36),
        moe_intermediate_size=of(10, 12),
        num_attention_heads=heads,
        q_lora_rank=model.q_lora_rank and of(14, 18),
        kv_lora_rank=of(12, 14),
        qk_nope_head_dim=of(6, 10),  # of odd strides, the V2 of transformers makes no complex numbers
        qk_rope_head_dim=of(4, 8),
        v_head_dim=of(3, 9),
        n_routed_experts=of(8, 16),
        n_shared_experts=of(1, 2),
        num_experts_per_tok=of(2, 3),
        n_group=groups,
        topk_group=max(groups // 2, 1),
        rope_scaling=yarn and dataclasses.replace(yarn, factor=of(3.0, 8.0)),
        first_k_dense_replace=of(0, 1, 2),
        rope_theta=of(100.0, 50000.0),
        routed_scaling_factor=of(1.0, 2.5),
        norm_topk_prob=model.topk_method == "noaux_tc" and of(True, False),
        index_topk=model.index_topk and of(2, 3, 5),
        index_head_dim=of(10, 12),
    )


def _v4(of):
    groups, rope = of(1, 2, 3), of(4, 8)
    return {
        "vocab_size": of(257, 300),
        "hidden_size": of(24, 28),
        "intermediate_size": 0,
        "moe_intermediate_size": of(10, 12),
        "compress_rope_theta": of(300.0, 500.0),
        "num_attention_heads": groups * of(2, 3),
        "q_lora_rank": of(14, 18),
        "qk_rope_head_dim": rope,
        "sliding_window": of(3, 5),
        "o_groups": groups,
        "o_lora_rank": of(9, 11),
        "n_routed_experts": of(8, 16),
        "num_experts_per_tok": of(2, 3),
        "scoring_func": of("sigmoid", "sqrtsoftplus"),
        "num_hash_layers": of(0, 1, 2),
        "hc_mult": of(2, 3),
        "index_head_dim": of(10, 12),
    }


def run(
    folder: pathlib.Path, model: Model, mesh=(1, 1, 1), dtype="float32", seed: int = 1
) -> tuple[Config, step.TrainState]:
    """A run with one checkpoint, of step 3, of random weights and router biases; and its state."""
    config = dataclasses.replace(tiny.config(model, mesh=mesh, precision={"params": dtype}), run_dir=str(folder))
    stepper, rng = tiny.stepper(config), np.random.default_rng(seed)

    def drawn(a, p):
        noise = rng.standard_normal(a.shape, np.float32)
        numbers = 1 + 0.2 * noise if p.std is None else 0.1 * noise  # times the root of hidden_size: 0.5, as V3 starts
        return jax.device_put(numbers.astype(a.dtype), a.sharding)

    fresh = stepper.abstract_state
    state = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), fresh)
    bias = {
        k: 0.2 * rng.standard_normal(b.shape, np.float32) if b.dtype == np.float32 else rng.permutation(b, axis=1)
        for k, b in layout.router_bias(model).items()
    }
    state = state.replace(
        step=jax.device_put(np.int32(3), fresh.step.sharding),
        params=jax.tree.map(drawn, fresh.params, stepper.network.declared),
        router_bias=jax.tree.map(lambda b, a: jax.device_put(b, a.sharding), bias, fresh.router_bias),
    )
    with checkpoint.open_run(config, print) as saved:
        saved.save(state, 3, config, "fingerprint")
    (folder / "config.yaml").write_text(yaml.safe_dump(loader.plain(config)))
    return config, state

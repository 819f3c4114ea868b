import dataclasses
import math
import pathlib
import re
import runpy

import pytest

from maxds import loader, optimizer
from maxds.architecture import Model, RopeScaling
from maxds.config import Config

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
PAPERS = ["deepseek2-16b", "deepseek2-236b", "deepseek3-671b", "deepseek3.2-671b", "kimi-k2-1t"]


def load(name, *overrides):
    return loader.load(Config, CONFIGS / f"{name}.yaml", overrides)


def indexer(m: Model) -> int:
    """Parameters of one layer's indexer: its queries, key with a layer norm, and weights of heads."""
    if m.index_topk is None:
        return 0
    return (m.q_lora_rank * m.index_n_heads + m.hidden_size + 2) * m.index_head_dim + m.hidden_size * m.index_n_heads


def mla_and_norms(m: Model) -> int:
    """Parameters of one layer's attention and of its four norms (three without a query latent)."""
    heads, qk = m.num_attention_heads, m.qk_nope_head_dim + m.qk_rope_head_dim
    if m.q_lora_rank is None:
        query = m.hidden_size * heads * qk
    else:
        query = m.hidden_size * m.q_lora_rank + m.q_lora_rank + m.q_lora_rank * heads * qk
    latent = m.hidden_size * (m.kv_lora_rank + m.qk_rope_head_dim) + m.kv_lora_rank
    keys_values = m.kv_lora_rank * heads * (m.qk_nope_head_dim + m.v_head_dim)
    return query + latent + keys_values + heads * m.v_head_dim * m.hidden_size + 2 * m.hidden_size + indexer(m)


def mlp(m: Model, width: int) -> int:
    return 3 * m.hidden_size * width


def moe(m: Model, experts: int) -> int:
    """Parameters of a layer's router, of its shared experts, and of so many routed ones."""
    bias = m.n_routed_experts if m.has_router_bias else 0
    router = m.hidden_size * m.n_routed_experts + bias
    return router + mlp(m, m.n_shared_experts * m.moe_intermediate_size) + experts * mlp(m, m.moe_intermediate_size)


def parameters(m: Model, experts: int) -> int:
    """Parameters of the model without MTP, counting so many routed experts in a layer."""
    embeddings = 2 * m.vocab_size * m.hidden_size + m.hidden_size
    dense = m.first_k_dense_replace * mlp(m, m.intermediate_size)
    return embeddings + m.num_hidden_layers * mla_and_norms(m) + dense + m.num_moe_layers * moe(m, experts)


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_config_loads(name):
    assert isinstance(load(name)[0], Config)


def test_every_row_of_the_benchmark_of_compiled_steps_loads():
    bench = runpy.run_path(str(CONFIGS.parent / "scripts" / "bench" / "aot.py"))
    for row, (_, _, overrides) in bench["ROWS"].items():
        found, _ = load(bench["CONFIGS"].get(row, "deepseek3-671b"), *overrides.split())
        assert isinstance(found, Config)


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_config_renders_to_an_equal_one(name, tmp_path):
    config, tree = load(name)
    (tmp_path / "config.yaml").write_text(loader.render(config, tree), encoding="utf-8")
    assert loader.load(Config, tmp_path / "config.yaml")[0] == config


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_config_is_the_base_of_a_run_by_its_name(name, tmp_path):
    (tmp_path / "run.yaml").write_text(f"base: {name}\nsteps: 7\n")
    config, _ = loader.load(Config, tmp_path / "run.yaml")
    assert config == dataclasses.replace(load(name)[0], steps=7)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("deepseek2-16b", 15_706_484_224, 2_661_150_208),
        ("deepseek2-236b", 235_741_434_880, 21_375_800_320),
        ("deepseek3-671b", 671_026_419_200, 37_552_297_472),
        ("deepseek3.2-671b", 671_026_419_200 + 851_524_864, 37_552_297_472 + 851_524_864),
        ("kimi-k2-1t", 1_026_408_232_448, 32_861_500_928),
    ],
)
def test_the_parameters_are_those_of_the_released_model(name, total, active):
    model = load(name)[0].model
    assert parameters(model, model.n_routed_experts) == total
    assert parameters(model, model.num_experts_per_tok) == active


@pytest.mark.parametrize(
    ("name", "layer", "moe_layer"),
    [
        ("deepseek2-16b", 13_767_168, 571_080_704),
        ("deepseek2-236b", 149_237_760, 3_822_878_720),
        ("deepseek3-671b", 187_121_664, 11_320_164_608),
        ("deepseek3.2-671b", 187_121_664 + 13_959_424, 11_320_164_608),
        ("kimi-k2-1t", 101_138_432, 16_958_226_816),
    ],
)
def test_the_parameters_of_a_layer_are_those_of_the_released_model(name, layer, moe_layer):
    model = load(name)[0].model
    assert (mla_and_norms(model), moe(model, model.n_routed_experts)) == (layer, moe_layer)


@pytest.mark.parametrize(
    ("name", "router"),
    [
        ("deepseek2-16b", ("softmax", "greedy", 1, 1, False, 1.0)),
        ("deepseek2-236b", ("softmax", "group_limited_greedy", 8, 3, False, 16.0)),
        ("deepseek3-671b", ("sigmoid", "noaux_tc", 8, 4, True, 2.5)),
        ("deepseek3.2-671b", ("sigmoid", "noaux_tc", 8, 4, True, 2.5)),
        ("kimi-k2-1t", ("sigmoid", "noaux_tc", 1, 1, True, 2.827)),
    ],
)
def test_the_router_is_that_of_the_official_config(name, router):
    m = load(name)[0].model
    keys = (m.scoring_func, m.topk_method, m.n_group, m.topk_group, m.norm_topk_prob, m.routed_scaling_factor)
    assert keys == router


@pytest.mark.parametrize(
    ("name", "theta", "factor", "beta_fast", "mscale", "positions"),
    [
        ("deepseek2-16b", 1e4, 40.0, 32.0, 0.707, 163840),
        ("deepseek2-236b", 1e4, 40.0, 32.0, 0.707, 163840),
        ("deepseek3-671b", 1e4, 40.0, 32.0, 1.0, 163840),
        ("deepseek3.2-671b", 1e4, 40.0, 32.0, 1.0, 163840),
        ("kimi-k2-1t", 5e4, 32.0, 1.0, 1.0, 131072),
    ],
)
def test_the_rotary_embedding_is_that_of_the_official_config(name, theta, factor, beta_fast, mscale, positions):
    m = load(name)[0].model
    assert (m.rope_theta, m.max_position_embeddings, m.rms_norm_eps) == (theta, positions, 1e-6)
    assert m.rope_scaling == RopeScaling(
        factor=factor,
        original_max_position_embeddings=4096,
        beta_fast=beta_fast,
        beta_slow=1.0,
        mscale=mscale,
        mscale_all_dim=mscale,
    )


@pytest.mark.parametrize(
    ("name", "lr", "warmup_steps", "tokens"),
    [
        ("deepseek2-16b", 4.2e-4, 2000, 5.7e12),
        ("deepseek2-236b", 2.4e-4, 2000, 8.1e12),
        ("deepseek3-671b", 2.2e-4, 2000, 14.8e12),
        ("deepseek3.2-671b", 7.3e-6, 0, 943.7e9),
        ("deepseek4-284b", 2.7e-4, 2000, 32e12),
        ("deepseek4-1.6t", 2.0e-4, 2000, 33e12),
        ("kimi-k2-1t", 2e-4, 500, 15.5e12),
    ],
)
def test_the_recipe_is_that_of_the_paper(name, lr, warmup_steps, tokens):
    config, _ = load(name)
    assert (config.optimizer.lr, config.optimizer.warmup_steps) == (lr, warmup_steps)
    assert config.steps * config.data.global_batch * config.data.sequence_length == pytest.approx(tokens, rel=0.005)


def test_v3_weighs_mtp_less_after_10t_tokens_and_leaves_the_routers_biases_alone_after_14_3t():
    config, _ = load("deepseek3-671b")
    later = {change.after_steps * config.data.global_batch * 4096: change.weights for change in config.loss.later}
    assert list(later.values()) == [{"mtp": 0.1}, {"router_bias_rate": 0.0}]
    assert list(later) == pytest.approx([10e12, 14.3e12], rel=1e-3)


# Key that is empty in models without a feature -> the keys of that feature.
FEATURES = {
    "first_k_dense_replace": r"intermediate_size|first_k_dense_replace",
    "kv_lora_rank": r"kv_lora_rank|qk_nope_head_dim|v_head_dim",
    "index_topk": r"index_.*",
    "compress_ratios": r"compress_.*|head_dim|sliding_window|o_groups|o_lora_rank",
    "hc_mult": r"hc_.*",
    "num_hash_layers": r"num_hash_layers",
    "swiglu_limit": r"swiglu_limit",
    "engram_layer_ids": r"engram_.*",
}


@pytest.mark.parametrize("name", ["deepseek4-284b", "deepseek4-1.6t"])
def test_v4_weighs_mtp_less_as_soon_as_the_learning_rate_falls(name):
    config, _ = load(name)
    (change,) = config.loss.later
    rate = optimizer.learning_rate(config.optimizer, config.steps)
    assert change.weights == {"mtp": 0.1}
    assert rate(2000) == rate(change.after_steps) > rate(change.after_steps + 9)
    assert float(rate(config.steps)) == pytest.approx(config.optimizer.lr / 10)


@pytest.mark.parametrize("name", [*PAPERS, "deepseek4-284b", "deepseek4-1.6t"])
def test_every_key_of_a_paper_s_model_is_written_out(name):
    config, tree = load(name)
    absent = "|".join(keys for switch, keys in FEATURES.items() if not getattr(config.model, switch)) or "$"
    keys = [f.name for f in dataclasses.fields(Model) if not re.fullmatch(absent, f.name)]
    assert [key for key in keys if tree.find(f"model.{key}") is None] == []


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("deepseek2-16b", 64),
        ("deepseek2-236b", 256),
        ("deepseek3-671b", 256),
        ("deepseek3.2-671b", 512),
        ("deepseek4-284b", 256),
        ("deepseek4-1.6t", 2048),
        ("deepseek-custom", 64),
        ("kimi-k2-1t", 512),
        ("quickstart", 8),
    ],
)
def test_the_batch_splits_into_two_microbatches_on_every_device_it_is_sized_for(name, devices):
    config, _ = load(name)
    mesh = config.mesh
    sizes = [size for size in (mesh.data, mesh.fsdp, mesh.expert) if size > 0]
    assert devices % math.prod(sizes) == 0
    assert config.data.global_batch % (config.optimizer.accumulate_steps * devices * 2) == 0
    assert config.model.n_routed_experts % mesh.expert == 0


def test_v4_has_no_queries_to_clip():
    with pytest.raises(loader.ConfigError, match="is of multi-head latent attention"):
        load("deepseek4-284b", "optimizer.qk_clip=100")


def test_the_quickstart_needs_no_download_and_no_accelerator():
    config, _ = load("quickstart")
    assert (config.data.sources[0].path, config.data.tokenizer, config.mesh.cpu_devices) == (("stdlib",), "bytes", 8)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mesh.expert=3"], "override mesh.expert=3: model.n_routed_experts=16 is not divisible by mesh.expert=3; "
                            "try mesh.expert=1"),
        (["mesh.context_parallel=true", "model.index_topk=8", "loss.indexer=1"],
         "override mesh.context_parallel=true: mesh.context_parallel=true does not go with model.index_topk, which "
         "needs the tokens before on the same device: set it to false"),
        (["loss.mtp=0"], "override loss.mtp=0: loss.mtp=0.0 with model.num_nextn_predict_layers=1: "
                         "set both, or neither"),
        (["loss.indexer=0.01"], "override loss.indexer=0.01: loss.indexer=0.01 with model.index_topk=None: "
                                "set both, or neither"),
        (["model.index_topk=8", "loss.indexer=1", "model.q_lora_rank=null"],
         "override model.index_topk=8: model: index_topk=8 needs the latent of queries, which q_lora_rank=null leaves "
         "out; set both, or neither"),
        (["optimizer.train=[]"], "override optimizer.train=[]: optimizer: train=[] leaves nothing to train; name "
                                 "some, such as ['*indexer*']"),
        (["loss.later=[{after_steps: 9, indexer: 0.1}]"],
         "override loss.later=[{after_steps: 9, indexer: 0.1}]: loss: later=[9 steps: indexer] changes what is 0 at "
         "first"),
        (["loss.later=[{after_steps: 9}]"],
         "override loss.later=[{after_steps: 9}]: loss.later[0]: after_steps=9 without any of z_loss, mtp, balance, "
         "indexer, router_bias_rate"),
        (["model.topk_group=8"], "override model.topk_group=8: model: topk_group=8 exceeds n_group=4"),
        (["model.hc_sinkhorn_iters=0"], "override model.hc_sinkhorn_iters=0: model: hc_sinkhorn_iters=0 must be "
                                        "positive, or null to sum permutations"),
        (["model.hc_sinkhorn_iters=null", "model.hc_mult=6", "model.num_nextn_predict_layers=0", "loss.mtp=0"],
         "override model.hc_mult=6: model: hc_mult=6 streams have too many permutations; with "
         "hc_sinkhorn_iters null there may be 5 streams at most"),
        (["optimizer.qk_clip=0"], "override optimizer.qk_clip=0: optimizer: qk_clip=0.0 must be positive, or null"),
        (["checkpoint.rollback_steps=5000"],
         "override checkpoint.rollback_steps=5000: checkpoint: rollback_steps=5000 may go further back than the oldest "
         "checkpoint: keep_last=2 of every_steps=100 reach 101 steps for certain; raise keep_last, or set keep_every"),
        (["checkpoint={every_steps: null, rollback_steps: 1}"],
         "override checkpoint={every_steps: null, rollback_steps: 1}: checkpoint: rollback_steps=1 needs checkpoints "
         "to go back to; set every_steps or every_minutes"),
        (["data.ramp=[{until_step: 9, global_batch: 16}]"],
         "override data.ramp=[{until_step: 9, global_batch: 16}]: data: ramp=[…, global_batch=16 until 9, …] must be "
         "of less than global_batch=16"),
        (["data.ramp=[{until_step: 9, sequence_length: 256}]"],
         "override data.ramp=[{until_step: 9, sequence_length: 256}]: data: ramp=[…, sequence_length=256 until 9, …] "
         "must be of less than sequence_length=256"),
        (["data.ramp=[{until_step: 9, global_batch: 8, sequence_length: 48}]"],
         "override data.ramp=[{until_step: 9, global_batch: 8, sequence_length: 48}]: data: ramp=[…, global_batch=8 "
         "sequence_length=48 until 9, …] must be of a length that divides sequence_length=256"),
        (["data.ramp=[{until_step: 9, sequence_length: 0}]"],
         "override data.ramp=[{until_step: 9, sequence_length: 0}]: data.ramp[0]: sequence_length=0 must be positive"),
        (["data.ramp=[{until_step: 9}]"],
         "override data.ramp=[{until_step: 9}]: data.ramp[0]: until_step=9 without any of global_batch, "
         "sequence_length"),
        (["data.ramp=[{until_step: 9, global_batch: 8}, {until_step: 9, global_batch: 8}]",
          "optimizer.accumulate_steps=2"],
         "override data.ramp=[{until_step: 9, global_batch: 8}, {until_step: 9, global_batch: 8}]: data: ramp=[…, "
         "global_batch=8 until 9, global_batch=8 until 9, …] is not in the order of steps"),
        (["data.ramp=[{until_step: 9, global_batch: 4}]", "optimizer.accumulate_steps=2"],
         "override data.ramp=[{until_step: 9, global_batch: 4}]: data.ramp=[…, global_batch=4 until 9, …] is not of "
         "whole parts, of data.global_batch=16 / optimizer.accumulate_steps=2 sequences"),
        (["data.sources=[{kind: tfds}]"], "override data.sources=[{kind: tfds}]: data.sources[0]: kind=tfds needs a "
                                          "path"),
    ],
)  # fmt: skip
def test_a_contradiction_is_reported_where_the_user_wrote_it(overrides, message):
    with pytest.raises(loader.ConfigError) as caught:
        load("quickstart", *overrides)
    assert caught.value.mistakes == (message,)


YARN = "original_max_position_embeddings: 32"
WITH_INDEXER = "loss.indexer=1 model.qk_rope_head_dim=16 model.index_head_dim=16 model.index_topk"
ONE_GROUP = "model.n_group=1 model.topk_group=1 loss.router_bias_rate=0 model.topk_method"


@pytest.mark.parametrize(
    ("key", "taken", "refused", "told"),
    [
        ("mesh.cpu_devices", "1", "0", "cpu_devices=0 must be positive, or null"),
        ("mesh.data", "1", "0", "data=0 must be positive, or -1 for what is left"),
        ("mesh.fsdp", "-1", "-2", "fsdp=-2 must be positive, or -1 for what is left"),
        ("mesh", "{data: -1, fsdp: 2}", "{data: -1, fsdp: -1}", "only one axis may be -1"),
        ("schedule.capacity", "0.1", "0", "capacity=0.0 must be positive"),
        ("schedule.keep", "[attention]", "[query]", "['query'] cannot be kept by kind=batch_split"),
        ("schedule.offload", "[attention]", "[query]", "['query'] cannot be kept by kind=batch_split"),
        ("schedule.kind=plain schedule.keep=everything schedule.offload", "[]", "[query]", "leaves nothing to offload"),
        ("schedule.kind=plain schedule.offload", "[query]", "[everything]", "leaves nothing to offload"),
        ("loss.later", "[{after_steps: 1, mtp: 0}]", "[{after_steps: 0, mtp: 0}]", "after_steps=0 must be positive"),
        ("loss.later", "[{after_steps: 1, mtp: 0}]", "[{after_steps: 1, mtp: -1}]", "mtp=-1.0 must not be negative"),
        ("loss.later", *(f"[{{after_steps: 2, mtp: 0}}, {{after_steps: {n}, mtp: 0}}]" for n in (3, 2)), "2 follows 2"),
        ("loss.chunk_tokens", "1", "0", "chunk_tokens=0 must be positive"),
        *((f"loss.{name}", "0", "-1", f"{name}=-1.0 must not be negative") for name in ("z_loss", "balance")),
        ("optimizer.lr", "1e-9", "0", "lr=0.0 must be positive"),
        ("optimizer.muon_rms", "1e-9", "0", "muon_rms=0.0 must be positive"),
        ("optimizer.clip", "1e-9", "0", "clip=0.0 must be positive, or null"),
        ("optimizer.accumulate_steps", "1", "0", "accumulate_steps=0 must be positive"),
        ("optimizer.warmup_steps", "0", "-1", "warmup_steps=-1 must not be negative"),
        ("optimizer.decay_fraction", "1", "1.1", "decay_fraction=1.1 must be in (0, 1]"),
        ("optimizer.decay_fraction", "0.1", "0", "decay_fraction=0.0 must be in (0, 1]"),
        ("optimizer.min_lr_ratio", "1", "1.1", "min_lr_ratio=1.1 must be in [0, 1]"),
        ("optimizer.min_lr_ratio", "0", "-0.1", "min_lr_ratio=-0.1 must be in [0, 1]"),
        *((f"optimizer.{b}", "0", "-0.1", f"{b}=-0.1 must be in [0, 1)") for b in ("b1", "b2", "muon_momentum")),
        *((f"optimizer.{b}", "0.9", "1", f"{b}=1.0 must be in [0, 1)") for b in ("b1", "b2", "muon_momentum")),
        ("optimizer.b2", "0.9", "1.5", "b2=1.5 must be in [0, 1)"),
        ("optimizer.b2=0.75 optimizer.eps", "2.2e-19", "2.1e-19", "eps=2.1e-19 must be 2.2e-19 at least"),
        ("optimizer.weight_decay", "0", "-0.1", "weight_decay=-0.1 must not be negative"),
        ("optimizer.skip_spike", "1.1", "1", "skip_spike=1.0 must exceed 1, or be null"),
        ("optimizer.params_memory=host optimizer.state_memory", "host", "device", "leaves the larger state on the"),
        *((f"data.{key}", "1", "0", f"{key}=0 must be positive") for key in ("sequence_length", "workers")),
        ("data.global_batch", "16", "0", "global_batch=0 must be positive"),
        ("data.sources", "[{kind: synthetic}]", "[]", "sources is empty; name at least one"),
        ("data.sources", *(f"[{{kind: synthetic, weight: {n}}}]" for n in (0.1, 0)), "weight=0.0 must be positive"),
        ("data.sources", *(f"[{{kind: synthetic, documents: {n}}}]" for n in (1, 0)), "documents=0 must be positive"),
        ("data.eval_fraction", "0.9", "1", "eval_fraction=1.0 must be in [0, 1)"),
        ("eval.every_steps=null data.eval_fraction", "0", "-0.1", "eval_fraction=-0.1 must be in [0, 1)"),
        (
            "optimizer.accumulate_steps=2 data.ramp",
            *(f"[{{until_step: {n}, global_batch: 8}}]" for n in (1, 0)),
            "until_step=0 must be positive",
        ),
        *((f"eval.{key}", "1", "0", f"{key}=0 must be positive") for key in ("every_steps", "batches")),
        *(
            (f"checkpoint.{key}", "1", "0", f"{key}=0 must be positive")
            for key in ("every_steps", "keep_last", "keep_every", "rollback_steps")
        ),
        ("checkpoint.every_minutes", "0.1", "0", "every_minutes=0.0 must be positive, or null"),
        ("checkpoint.local_dir=/local checkpoint.local_every_steps", "1", "0", "local_every_steps=0 must be positive"),
        ("checkpoint.local_dir=/local checkpoint.local_every_steps", "1", "null", "set both, or neither"),
        ("checkpoint.local_every_steps=1 checkpoint.local_dir", "/local", "null", "set both, or neither"),
        ("checkpoint.local_every_steps=1 checkpoint.local_dir", "/a", "gs://b/a", "must be a folder of the host"),
        ("checkpoint.every_steps=4 checkpoint.rollback_steps", "5", "6", "reach 5 steps for certain"),
        ("profile", "{start: 1}", "{start: 0}", "start=0 must be at least 1"),
        ("profile", "{start: 1, steps: 1}", "{start: 1, steps: 0}", "steps=0 must be positive"),
        ("sample.prompt", "a", "''", "prompt is empty"),
        ("sample.tokens", "1", "0", "tokens=0 must be positive"),
        ("sample.temperature", "0", "-1", "temperature=-1.0 must not be negative"),
        ("sample.top_p", "1", "1.1", "top_p=1.1 must be in (0, 1]"),
        ("sample.top_p", "0.1", "0", "top_p=0.0 must be in (0, 1]"),
        *((key, "1", "0", f"{key}=0 must be positive") for key in ("steps", "log_every_steps", "verify_every_steps")),
        ("hang_seconds", "0.1", "0", "hang_seconds=0.0 must be positive, or null"),
        ("compiler_options", "[a=]", "[a]", "compiler_options=a must be name=value"),
        ("compiler_options", "[a=1]", "['=1']", "compiler_options==1 must be name=value"),
        ("data.eval_fraction", "0.1", "0", "eval.every_steps=50 needs data.eval_fraction above 0"),
        ("data.sequence_length", "1024", "1025", "exceeds model.max_position_embeddings=1024"),
        ("optimizer.accumulate_steps", "8", "5", "data.global_batch=16 is not divisible by optimizer.accumulate_steps"),
        ("model.n_group=1 model.topk_group=1 model.topk_method", "noaux_tc", "greedy", "needs model.topk_method=noaux"),
        ("mesh.expert", "16", "32", "is not divisible by mesh.expert=32; try mesh.expert=16"),
        ("model.rope_scaling", *(f"{{factor: {n}, {YARN}}}" for n in (1, 0.9)), "factor=0.9 must be at least 1"),
        ("model.vocab_size", "257", "0", "vocab_size=0 must be positive"),
        *(
            (f"model.{key}", "1e-9", "0", f"{key}=0.0 must be positive")
            for key in ("routed_scaling_factor", "rms_norm_eps", "rope_theta", "initializer_range")
        ),
        *(
            ("model.rope_scaling", *(f"{{factor: 2, {YARN}, {key}: {n}}}" for n in values), told)
            for key, values, told in (
                ("beta_slow", (0.1, 0), "beta_slow=0.0 must be positive"),
                ("beta_fast", (1, 0.9), "beta_fast=0.9 must not be less than beta_slow=1.0"),
                ("mscale", (0, -1), "mscale=-1.0 must not be negative"),
                ("mscale_all_dim", (0, -1), "mscale_all_dim=-1.0 must not be negative"),
            )
        ),
        ("model.intermediate_size", "1", "0", "intermediate_size=0 must be positive"),
        ("model.kv_lora_rank", "1", "0", "kv_lora_rank=0 must be positive"),
        ("model.head_dim", "0", "1", "head_dim=1 has no effect with compress_ratios null"),
        ("model.num_hidden_layers", "10000", "10001", "num_hidden_layers=10001 must be 10,000 at most"),
        ("model.first_k_dense_replace", "3", "4", "first_k_dense_replace=4 must leave at least one"),
        ("model.num_hash_layers", "2", "3", "num_hash_layers=3 must leave at least one of the 3 MoE layers"),
        ("model.swiglu_limit", "0.1", "0", "swiglu_limit=0.0 must be positive, or null"),
        ("model.hc_mult", "2", "1", "hc_mult=1 must be at least 2, or null"),
        ("model.hc_sinkhorn_iters=null model.hc_mult", "5", "6", "hc_mult=6 streams have too many permutations"),
        ("model.hc_eps", "1e-9", "0", "hc_eps=0.0 must be positive"),
        ("model.q_lora_rank", "1", "0", "q_lora_rank=0 must be positive, or null"),
        ("model.qk_rope_head_dim", "16", "15", "qk_rope_head_dim=15 must be even"),
        (WITH_INDEXER, "1", "0", "index_topk=0 must be positive, or null"),
        (f"{WITH_INDEXER}=1 model.index_head_dim", "16", "15", "index_head_dim=15 has no room for the rotated qk_rope"),
        ("model.n_shared_experts", "0", "-1", "n_shared_experts=-1 must not be negative"),
        ("model.topk_group=1 model.num_experts_per_tok=1 model.n_group", "2", "3", "is not divisible by n_group=3"),
        (f"{ONE_GROUP}=greedy model.n_group", "1", "2", "n_group=2 has no effect with topk_method=greedy"),
        ("model.num_experts_per_tok", "8", "9", "num_experts_per_tok=9 exceeds the 8 experts in topk_group=2"),
        ("model.num_experts_per_tok=1 model.n_group", "8", "16", "leaves one each"),
    ],
)  # fmt: skip
def test_a_value_at_its_bound_is_taken_and_one_beyond_is_refused_with_the_bound(key, taken, refused, told):
    assert_bound("quickstart", key, taken, refused, told)


TWO_LAYERS = "model.num_hidden_layers=2 model.num_hash_layers=0 model.index_topk=512 model.num_nextn_predict_layers"
ALIKE = "rope_scaling must not scale attention where compress_ratios is set"


@pytest.mark.parametrize(
    ("key", "taken", "refused", "told"),
    [
        (f"{TWO_LAYERS}=1 model.compress_ratios", "[4, 128, 0]", "[4, 128]", "must be one for each"),
        (f"{TWO_LAYERS}=1 model.compress_ratios", "[4, 2, 0]", "[4, 1, 0]", "0 or at least 2"),
        (f"{TWO_LAYERS}=2 model.compress_ratios", "[4, 128, 0, 0]", "[4, 128, 0, 8]", "must end alike"),
        (f"{TWO_LAYERS}=1 model.compress_ratios", "[4, 128, 0]", "[8, 128, 0]", "index_topk=512 belongs to layers"),
        ("model.index_topk", "1", "null", "index_topk=None belongs to layers of ratio 4"),
        ("model.rope_scaling.mscale=0.7 model.rope_scaling.mscale_all_dim", "0.7", "1", ALIKE),
        ("model.q_lora_rank", "1", "null", "compress_ratios needs the latent of queries"),
        ("model.intermediate_size=1 model.first_k_dense_replace", "0", "1", "first_k_dense_replace=1 must be 0"),
        ("model.head_dim", "64", "63", "head_dim=63 has no room for the rotated qk_rope_head_dim=64"),
        ("model.o_groups", "16", "24", "num_attention_heads=64 is not divisible by o_groups=24"),
        ("model.sliding_window", "1", "0", "sliding_window=0 must be positive"),
        ("model.v_head_dim", "0", "1", "v_head_dim=1 has no effect with compress_ratios set"),
        ("mesh.context_parallel", "false", "true", "does not go with model.compress_ratios"),
    ],
)
def test_so_is_one_of_v4_s_attention(key, taken, refused, told):
    assert_bound("deepseek4-284b", key, taken, refused, told)


def assert_bound(name, key, taken, refused, told):
    *others, key = key.split()
    assert isinstance(load(name, *others, f"{key}={taken}")[0], Config)
    with pytest.raises(loader.ConfigError) as caught:
        load(name, *others, f"{key}={refused}")
    assert told in str(caught.value)

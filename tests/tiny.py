"""Tiny models, one batch of packed documents, and programs that are compiled once for all tests.

No two sizes are equal, so that no two dimensions can be confused.
"""

import collections
import dataclasses
import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxds import config as config_lib
from maxds import mesh as mesh_lib
from maxds import params, step
from maxds.architecture import OVERLAPPED, Model, RopeScaling
from maxds.config import Config
from maxds.data.packing import pack
from maxds.model import deepseek, layout

ROWS, LENGTH = 16, 12

V3 = Model(
    vocab_size=61,
    hidden_size=24,
    intermediate_size=20,
    moe_intermediate_size=32,
    num_hidden_layers=4,
    first_k_dense_replace=1,
    num_attention_heads=3,
    q_lora_rank=16,
    kv_lora_rank=12,
    qk_nope_head_dim=6,
    qk_rope_head_dim=8,
    v_head_dim=5,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=3,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    num_nextn_predict_layers=1,
    rope_theta=100.0,
    rope_scaling=RopeScaling(
        factor=4, original_max_position_embeddings=64, beta_fast=8, beta_slow=1, mscale=1, mscale_all_dim=1
    ),
    max_position_embeddings=256,
)
V2 = dataclasses.replace(
    V3,
    first_k_dense_replace=2,
    n_shared_experts=0,  # not V2's 2: the only one here without
    scoring_func="softmax",
    topk_method="group_limited_greedy",
    norm_topk_prob=False,
    routed_scaling_factor=2.0,
    num_nextn_predict_layers=0,
    rms_norm_eps=1e-2,  # Moonlight's is not 1e-6, which norms of latents have all the same
    rope_scaling=dataclasses.replace(V3.rope_scaling, mscale=0.707, mscale_all_dim=0.5),
)
V2_LITE = dataclasses.replace(
    V3,
    num_hidden_layers=1,
    first_k_dense_replace=0,
    num_attention_heads=4,  # of which devices can have some each
    q_lora_rank=None,
    n_shared_experts=2,
    scoring_func="softmax",
    topk_method="greedy",
    n_group=1,
    topk_group=1,
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
    num_nextn_predict_layers=2,  # not V2-Lite's 0: the only one here with two
    rope_scaling=None,
    tie_word_embeddings=True,
)
HYPER = dataclasses.replace(
    V3,
    num_hidden_layers=3,
    n_group=1,
    topk_group=1,
    num_nextn_predict_layers=0,
    scoring_func="sqrtsoftplus",
    num_hash_layers=1,
    swiglu_limit=0.3,
    hc_mult=3,
    hc_sinkhorn_iters=3,
)
V4 = dataclasses.replace(
    HYPER,
    num_hidden_layers=6,
    first_k_dense_replace=0,
    kv_lora_rank=0,
    qk_nope_head_dim=0,
    v_head_dim=0,
    compress_ratios=(0, 4, 3, 4, 3, 4),
    compress_rope_theta=300.0,
    num_attention_heads=6,
    head_dim=14,
    sliding_window=4,
    o_groups=2,
    o_lora_rank=18,
    index_topk=2,
    index_n_heads=7,
    index_head_dim=10,
)
V4_MTP = dataclasses.replace(  # whose module has an indexer
    V4, num_hidden_layers=1, num_hash_layers=0, compress_ratios=(3, 4), num_nextn_predict_layers=1
)
V32 = dataclasses.replace(V3, num_hidden_layers=3, index_topk=3, index_n_heads=7, index_head_dim=10)
ENGRAM = dataclasses.replace(  # the second cuts the MoE layers in two
    V3,
    num_hidden_layers=2,
    first_k_dense_replace=0,
    num_nextn_predict_layers=0,
    engram_layer_ids=(0, 1),
    engram_vocab_size=(30, 50),
    engram_n_heads=2,
    engram_head_dim=16,
    engram_kernel_size=3,
    engram_pad_token_id=29,
    engram_compressed_vocab_size=23,
    engram_seed=17,  # with the weights below no gate is near zero, where the root that it takes has no slope to compare
)
ENGRAM_HYPER = dataclasses.replace(
    HYPER,
    num_hidden_layers=2,
    num_hash_layers=0,
    hc_sinkhorn_iters=None,
    engram_layer_ids=(0,),
    engram_vocab_size=(11, 7, 13),
    engram_max_ngram_size=4,
    engram_n_heads=1,
    engram_head_dim=16,
    engram_kernel_size=2,
    engram_seed=18,
)


FOUR_HEADS = dataclasses.replace(V3, num_attention_heads=4)  # of which devices can have some each


def config(
    model: Model = V3,
    kind="plain",
    mesh=(1, 1, 1),
    *,
    optimizer=None,
    precision=None,
    context_parallel=False,
    capacity=8.0,  # on 8 devices that is room for all pairs: further rounds are compiled for tests of these alone
    **schedule,
) -> Config:
    return Config(
        run_dir="unused",
        steps=100,
        model=model,
        data=config_lib.Data(sources=(config_lib.Source(kind="synthetic"),), sequence_length=LENGTH, global_batch=ROWS),
        optimizer=config_lib.Optimizer(**{"lr": 1e-2} | (optimizer or {})),
        loss=config_lib.Loss(
            chunk_tokens=20,  # does not divide the tokens of a device
            z_loss=0.1,
            mtp=0.3 if model.num_nextn_predict_layers else 0.0,
            balance=0.1,
            indexer=0.1 if model.index_topk else 0.0,
            router_bias_rate=1e-3 if model.has_router_bias else 0.0,
        ),
        mesh=config_lib.Mesh(**dict(zip(mesh_lib.AXES, mesh, strict=True)), context_parallel=context_parallel),
        schedule=config_lib.Schedule(kind=kind, capacity=capacity, **schedule),
        precision=config_lib.Precision(**{"compute": "float32"} | (precision or {})),
        eval=config_lib.Eval(),
        checkpoint=config_lib.Checkpoint(),
    )


@functools.cache
def batch() -> dict[str, np.ndarray]:
    """Packed documents, some of one token; full rows, padded rows, and one row of nothing but padding."""
    rng = np.random.default_rng(0)

    def row(i: int) -> dict[str, np.ndarray]:
        lengths = {0: [LENGTH + 1], 1: [], 2: [1, 1, 5]}.get(i, rng.integers(1, 8, rng.integers(1, 4)))
        return pack([rng.integers(0, V3.vocab_size, n, np.int32) for n in lengths], LENGTH)

    rows = [row(i) for i in range(ROWS)]
    return {name: np.stack([r[name] for r in rows]) for name in rows[0]}


@functools.cache
def weights(model: Model, draw: int = 0) -> layout.Weights:
    """Random weights, norms included, as NumPy arrays."""
    rng = np.random.default_rng([1, draw])

    def one(p: params.Param) -> np.ndarray:
        noise = rng.standard_normal(p.shape, np.float32)
        return 1 + 0.2 * noise if p.std is None else 0.2 * noise

    return params.derive(one, layout.declare(model))


@functools.cache
def router_bias(model: Model) -> dict[str, np.ndarray]:
    """Biases large enough to change choices."""
    rng = np.random.default_rng(2)
    return {
        k: 0.2 * rng.standard_normal(b.shape, np.float32) if b.dtype == jnp.float32 else np.asarray(b)
        for k, b in layout.router_bias(model).items()
    }


@functools.cache
def stepper(config: Config) -> step.Stepper:
    sizes = [getattr(config.mesh, axis) for axis in mesh_lib.AXES]
    return step.make(config, mesh_lib.make(config.mesh, jax.devices()[: int(np.prod(sizes))]))


@functools.cache
def inputs(config: Config, draw: int = 0) -> tuple:
    """Weights, router bias and batch, on the devices of the config's mesh."""
    s = stepper(config)
    shardings = jax.tree.map(lambda a: a.sharding, s.abstract_state.params)
    bias = jax.device_put(router_bias(config.model), mesh_lib.replicated(s.mesh))
    return jax.device_put(weights(config.model, draw), shardings), bias, s.batch(batch())


def parametrize(argument: str, cases: dict, on_every_python: set[str]):
    """A test is of each case; CI leaves those that are not named to the oldest Python."""
    marks = {name: [] if name in on_every_python else pytest.mark.oldest for name in cases}
    return pytest.mark.parametrize(argument, [pytest.param(c, id=name, marks=marks[name]) for name, c in cases.items()])


def strictly():
    """A context in which JAX refuses implicit dtype promotion. Not for optax, which relies on it."""
    return jax.numpy_dtype_promotion("strict")


class Outcome(NamedTuple):
    grads: layout.Weights
    sums: dict[str, np.ndarray]
    counts: dict[str, np.ndarray]
    seen: deepseek.Seen

    @property
    def load(self) -> dict[str, np.ndarray]:
        return self.seen.load


@functools.lru_cache(maxsize=16)  # a program takes 2,000 of the 65,530 mappings that Linux grants a process
def loss_and_grads(config: Config):
    return jax.jit(stepper(config).loss_and_grads)


@functools.cache
def outcome(config: Config, term: str | None = None, draw: int = 0) -> Outcome:
    """Gradients, sums, counts and loads of the batch: of the whole objective, or with the gradient of one term."""
    s = stepper(config)
    mode = s.probe(term) if term else s.training
    with strictly():
        return Outcome(*jax.tree.map(np.asarray, loss_and_grads(config)(*inputs(config, draw), mode)))


def objective(config: Config, found: Outcome) -> float:
    coefficients = stepper(config).network.coefficients()
    return sum(c * float(found.sums[k]) / max(int(found.counts[k]), 1) for k, c in coefficients.items())


def entropies(model: Model, found: Outcome) -> float:
    """No less than those of which the divergences of V4's indexers, which are small, are the differences."""
    ratios = model.compress_ratios or ()
    return ratios.count(OVERLAPPED) * int(found.counts["indexer"]) * math.log(model.index_topk or 1)


def judged_with(path) -> str:
    """The path of a weight, or of the hyper-connection that it belongs to."""
    return re.sub(r"\bhyper\..*", "hyper", params.name(path))


def largest_error(expected, found) -> tuple[float, str]:
    """Over leaves: the largest error relative to the leaf's largest value, and where.

    The leaves of a hyper-connection are one: of its gates alone, most is cancelled over the tokens.
    """
    errors, scales = {}, collections.Counter()

    def compare(path, a, b):
        assert a.shape == b.shape and a.dtype == b.dtype, path
        where = judged_with(path)
        errors[where] = max(errors.get(where, 0.0), float(np.abs(a - b).max()))
        scales[where] = max(scales[where], float(np.abs(a).max()))

    jax.tree_util.tree_map_with_path(compare, expected, found)
    return max((error / (scales[where] or 1.0), where) for where, error in errors.items())


def state(config: Config) -> step.TrainState:
    """A state before the first step, of `weights` and with no bias. The caller may give it away."""
    return _fresh_state(config)(inputs(config)[0])


@functools.cache
def _fresh_state(config: Config):
    abstract = stepper(config).abstract_state

    def fresh(weights: layout.Weights) -> step.TrainState:
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), abstract)
        return zeros.replace(params=jax.tree.map(jnp.copy, weights))

    return jax.jit(fresh, out_shardings=jax.tree.map(lambda a: a.sharding, abstract))


@functools.cache
def logits(config: Config):
    """Compiled: (weights, router bias, batch) -> logits [B S V]."""
    s = stepper(config)
    specs = params.specs(s.network.declared), P(), mesh_lib.BATCH
    return jax.jit(
        jax.shard_map(s.network.logits, mesh=s.mesh, in_specs=specs, out_specs=mesh_lib.BATCH, check_vma=False)
    )

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import lax
from jax.sharding import PartitionSpec as P

from maxds import generate, params, score, step
from maxds import mesh as mesh_lib
from maxds.architecture import RopeScaling
from maxds.config import Sample
from maxds.model import decode, kernels, layout

pytestmark = pytest.mark.oldest

SHORT = {"num_nextn_predict_layers": 0, "rope_scaling": None, "max_position_embeddings": 32}
V3 = dataclasses.replace(tiny.V3, num_hidden_layers=3, **SHORT)
V2_LITE = dataclasses.replace(tiny.V2_LITE, num_hidden_layers=2, tie_word_embeddings=False, **SHORT)
YARN = RopeScaling(factor=4, original_max_position_embeddings=8, mscale=0.7, mscale_all_dim=0.9)
MODELS = {
    "v3": V3,
    "v3_2": dataclasses.replace(V3, index_topk=2, index_n_heads=4, index_head_dim=10),
    "v2_lite_without_dense_layers": V2_LITE,
    "hyper_connections_and_a_hash_layer": dataclasses.replace(tiny.HYPER, **SHORT),
    "v4": dataclasses.replace(
        tiny.V4, num_hidden_layers=5, compress_ratios=(0, 4, 3, 4, 3), hc_mult=2, max_position_embeddings=32
    ),
    "engrams": dataclasses.replace(tiny.ENGRAM, **SHORT),
    "engram_and_hyper_connections": dataclasses.replace(tiny.ENGRAM_HYPER, **SHORT),
    "yarn_and_tied_embeddings": dataclasses.replace(V2_LITE, rope_scaling=YARN, tie_word_embeddings=True),
}
LENGTHS = np.array([5, 3, 1, 4], np.int32)  # of the prompts: rows need not agree
TOKENS = np.random.RandomState(0).randint(0, 61, (4, 9)).astype(np.int32)
STEPS = TOKENS.shape[1] - max(LENGTHS)


def stepper(model, sizes, matmul):
    config = tiny.config(model, mesh=sizes, precision={"matmul": matmul})
    return step.make(config, mesh_lib.make(config.mesh, jax.devices()[: int(np.prod(sizes))]))


@functools.cache
def model_of(name, sizes=(1, 1, 1), matmul="compute"):
    """A model with weights that numpy draws, which takes no compilation, and a router bias that matters."""
    made, random = stepper(MODELS[name], sizes, matmul), np.random.RandomState(0)

    def draw(abstract, mean=0.0, std=0.3):
        return jax.device_put(random.normal(mean, std, abstract.shape).astype(np.float32), abstract.sharding)

    def weight(param, abstract):
        return draw(abstract, 1.0, 0.1) if param.std is None else draw(abstract)

    state = made.abstract_state
    weights = params.derive(weight, made.network.declared, state.params)
    bias = jax.device_put(layout.router_bias(MODELS[name]), jax.tree.map(lambda a: a.sharding, state.router_bias))
    bias |= {stack: draw(a) for stack, a in state.router_bias.items() if a.dtype == np.float32}
    return made, state.replace(params=weights, router_bias=bias)


@functools.cache
def decoder(name, sizes=(1, 1, 1), matmul="compute", steps=STEPS):
    """(tokens [B S], lengths [B]) -> logits after each prompt and after each of the tokens that follow; the cache."""
    made, state = model_of(name, sizes, matmul)

    def per_device(weights, bias, tokens, lengths):
        bound = decode.make(made.network, weights, bias)
        rows = jnp.arange(len(tokens))
        logits, cache = bound.prefill(tokens[:, : tokens.shape[1] - steps], lengths, tokens.shape[1])

        def one(cache, i):
            more, cache = bound.step(cache, tokens[rows, lengths + i], lengths + i, lengths > 0)
            return cache, more

        cache, more = lax.scan(one, cache, jnp.arange(steps))
        return jnp.concatenate([logits[:, None], jnp.moveaxis(more, 0, 1)], axis=1), cache

    batch = mesh_lib.BATCH
    specs = params.specs(made.network.declared), P(), batch, batch
    outs = batch, P(None, mesh_lib.AXES)
    run = jax.shard_map(per_device, mesh=made.mesh, in_specs=specs, out_specs=outs, check_vma=False)
    return functools.partial(jax.jit(run), state.params, state.router_bias)


@functools.cache
def forward(name, matmul="compute"):
    made, state = model_of(name, matmul=matmul)
    return functools.partial(score.program(made), state.params, state.router_bias)


def full_logits(name, tokens, matmul="compute"):
    """By the forward pass of training."""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "segments": np.ones_like(tokens), "positions": positions}
    return np.asarray(forward(name, matmul)(batch))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "v4"])
def test_prompt_and_steps_give_the_logits_of_the_full_forward_pass(name):
    found, _ = decoder(name)(TOKENS, LENGTHS)
    at = LENGTHS[:, None] - 1 + np.arange(STEPS + 1)
    wanted = np.take_along_axis(full_logits(name, TOKENS), at[..., None], axis=1)
    assert np.std(wanted) > 1
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)


LONG = np.random.RandomState(1).randint(0, 61, (8, 30)).astype(np.int32)


@pytest.mark.parametrize("seed", range(3))
def test_v4_gives_them_across_the_ends_of_blocks_and_windows_whatever_the_prompts(seed):
    """Its window is of 4 tokens, its blocks of 3 and 4: 14 steps end several. On four devices; the wanted, on one."""
    lengths = np.random.default_rng(seed).integers(1, 17, 8).astype(np.int32)
    found, _ = decoder("v4", (1, 2, 2), steps=14)(LONG, lengths)
    wanted = np.take_along_axis(full_logits("v4", LONG), (lengths[:, None] - 1 + np.arange(15))[..., None], axis=1)
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)


def test_v4_s_cache_grows_by_an_entry_a_block():
    """Of a token more, nothing else is kept."""
    kept = [jax.eval_shape(decoder("v4", steps=1), np.zeros((4, size), np.int32), LENGTHS)[1] for size in (17, 17 + 12)]
    short, long = ([a.shape for a in jax.tree.leaves(cache)] for cache in kept)
    grown = [(a[2], b[2], a[3]) for a, b in zip(short, long, strict=True) if a != b]
    c = MODELS["v4"]
    assert sorted(grown) == [(4, 7, c.index_head_dim), (4, 7, c.head_dim), (5, 9, c.head_dim)]  # of 4, of 4, of 3
    near = [shape for shape in long if shape[2:] == (c.sliding_window, c.head_dim)]
    assert sum(shape[0] for shape in near) == c.num_hidden_layers


def test_prompts_run_in_float8_if_the_model_was_trained_so():
    found = np.asarray(decoder("v3", matmul="fp8")(TOKENS, LENGTHS)[0])
    wanted, exact = (full_logits("v3", TOKENS, matmul)[np.arange(4), LENGTHS - 1] for matmul in ("fp8", "compute"))
    np.testing.assert_allclose(found[:, 0], wanted, atol=1e-4, rtol=0)
    assert np.abs(wanted - exact).max() > 0.01
    assert np.isfinite(found).all()


@pytest.mark.parametrize("name", ["v3", "engrams"])
def test_logits_do_not_depend_on_the_mesh(name):
    np.testing.assert_allclose(
        decoder(name, (1, 2, 2))(TOKENS, LENGTHS)[0], decoder(name)(TOKENS, LENGTHS)[0], atol=1e-4, rtol=0
    )


def test_the_cache_holds_a_latent_and_one_rotated_key_of_each_token():
    def shapes(name):
        _, cache = jax.eval_shape(decoder(name), TOKENS, LENGTHS)
        return {stack: [a.shape for a in jax.tree.leaves(of_stack)] for stack, of_stack in cache.items()}

    def of(layers, *more):
        return [(layers, 4, 9, size) for size in (V3.kv_lora_rank, V3.qk_rope_head_dim, *more)]

    assert shapes("v3") == {"dense_layers": of(1), "moe_layers": of(2)}
    assert shapes("v3_2") == {"dense_layers": of(1, 10), "moe_layers": of(2, 10)}


# ------------------------------------------------------------------------------------- sampling

SAMPLED = "v2_lite_without_dense_layers"
GREEDY = Sample(prompt="-", tokens=4, temperature=0)
PROMPTS = [row[:n] for row, n in zip(TOKENS[:3], LENGTHS, strict=False)]


@functools.cache
def greedy():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "QUERY_BLOCK", 4)  # prompts are padded to whole blocks, and those of other tests are not
        return generate.continue_prompts(*model_of(SAMPLED), PROMPTS, GREEDY, eos=None)


def test_greedy_tokens_are_the_most_probable_of_the_full_forward_pass():
    rows = np.zeros_like(TOKENS)
    for row, prompt, more in zip(rows, PROMPTS, greedy(), strict=False):
        row[: len(prompt) + len(more)] = [*prompt, *more]
    best = np.argmax(full_logits(SAMPLED, rows), axis=-1)
    for row, prompt, more in zip(best, PROMPTS, greedy(), strict=False):
        np.testing.assert_array_equal(row[len(prompt) - 1 :][: len(more)], more)


def test_a_sequence_ends_with_eos_and_the_others_go_on():
    eos = int(greedy()[0][1])
    found = generate.continue_prompts(*model_of(SAMPLED, (1, 2, 2)), PROMPTS, GREEDY, eos)
    for row, endless in zip(found, greedy(), strict=True):
        ends = np.flatnonzero(endless == eos)
        np.testing.assert_array_equal(row, endless[: ends[0] + 1] if len(ends) else endless)
    assert len(found[0]) < max(map(len, found))


def test_draws_depend_on_the_seed_alone():
    made, state = model_of(SAMPLED)
    run = generate.program(made, dataclasses.replace(GREEDY, temperature=1.0), eos=None)
    draw = functools.partial(run, state.params, state.router_bias, TOKENS[:, :5], LENGTHS)
    first, again, other = (np.asarray(draw(np.uint32(seed))) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert run._cache_size() == 1


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
def test_only_tokens_of_the_nucleus_are_drawn(top_p):
    logits = np.random.RandomState(0).normal(0, 2, (8, 61)).astype(np.float32)
    keys = jax.random.split(jax.random.key(2), (200, 8))
    drawn = np.asarray(jax.vmap(lambda keys: decode.pick(logits, keys, 0.7, top_p))(keys))
    probabilities = np.asarray(jax.nn.softmax(logits / 0.7), np.float64)
    more_probable = np.sort(probabilities, axis=1)[:, ::-1]
    for row in range(8):
        p = probabilities[row][drawn[:, row]]
        ahead = (more_probable[row] * (more_probable[row] > p[:, None])).sum(axis=1)
        assert (ahead < top_p + 1e-6).all()
        assert len(set(drawn[:, row])) > 1 or more_probable[row, 0] >= 0.9 * top_p


def test_draws_follow_the_probabilities():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
    keys = jax.random.split(jax.random.key(0), (4000, 1))
    drawn = jax.vmap(lambda keys: decode.pick(logits, keys, 1.0, 1.0))(keys)
    np.testing.assert_allclose(np.bincount(drawn[:, 0]) / 4000, [0.5, 0.3, 0.2], atol=0.03)


def test_temperature_zero_is_the_most_probable_token():
    logits = np.random.RandomState(0).normal(size=(8, 61)).astype(np.float32)
    keys = jax.random.split(jax.random.key(2), 8)
    np.testing.assert_array_equal(decode.pick(logits, keys, 0.0, 0.5), np.argmax(logits, axis=-1))

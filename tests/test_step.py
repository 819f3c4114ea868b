"""What a training step does to the state, and what it must leave alone."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import optax
import oracle
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from maxds import host, optimizer, step
from maxds import mesh as mesh_lib
from maxds.config import LossChange, Mesh, Ramp
from maxds.data import open_data
from maxds.model import layout, moe

CONFIG = tiny.config(tiny.V3, "batch_split", (2, 2, 2), optimizer={"skip_spike": 100.0, "clip": None})
STEPPER = functools.partial(tiny.stepper, CONFIG)
# For what is the same in every layer: there is less to compile.
ONE_LAYER = dataclasses.replace(tiny.V3, num_hidden_layers=1, first_k_dense_replace=0, num_nextn_predict_layers=0)
ONE_LAYER_AND_MTP = dataclasses.replace(ONE_LAYER, num_nextn_predict_layers=1)


def train(state, mode=None):
    _, _, batch = tiny.inputs(CONFIG)
    return STEPPER().train(state, batch, STEPPER().training if mode is None else mode)


def arrays(tree):
    """The leaves' values, copied before the state is given away."""
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def assert_identical(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def seen(config, weights=None):
    """What a step reads off the layers, of the weights with no bias: those of `tiny.inputs`, or others."""
    drawn, bias, batch = tiny.inputs(config)
    unbiased, mode = jax.tree.map(lambda b: 0 * b, bias), tiny.stepper(config).training
    with tiny.strictly():  # as in tiny.outcome, so that it is the same program
        return jax.device_get(tiny.loss_and_grads(config)(weights or drawn, unbiased, batch, mode)[3])


@functools.cache
def trained():
    """The state after 20 steps on one batch, and the metrics of each step."""
    state, metrics = tiny.state(CONFIG), []
    for _ in range(20):
        state, more = train(state)
        metrics.append(jax.device_get(more))
    return state, metrics


# ------------------------------------------------------------------------------------------ packing


@pytest.mark.parametrize(
    "config", [tiny.config(), tiny.config(kind="batch_split", mesh=(1, 2, 2))], ids=["plain", "batch_split"]
)
def test_packed_documents_never_see_each_other(config):
    weights, bias, _ = tiny.inputs(config)
    batch = tiny.batch()
    first = batch["segments"] == 1
    changed = batch | {"tokens": np.where(first, (batch["tokens"] + 7) % config.model.vocab_size, batch["tokens"])}
    before, after = (
        np.asarray(tiny.logits(config)(weights, bias, tiny.stepper(config).batch(rows))) for rows in (batch, changed)
    )
    others = batch["segments"] > 1
    assert (before[first] != after[first]).any(axis=-1).all()
    np.testing.assert_array_equal(before[others], after[others])


# ----------------------------------------------------------------------------------------- training


def test_overfitting_one_batch_lowers_every_term_that_is_learned():
    first, last = (trained()[1][i]["terms"] for i in (0, -1))
    assert last["main"] < 0.7 * first["main"]
    assert last["mtp_1"] < 0.9 * first["mtp_1"]


def test_the_loss_of_a_step_is_the_weighted_sum_of_the_means_of_its_terms():
    metrics, found = trained()[1][0], tiny.outcome(tiny.config())
    assert metrics["tokens"] == found.counts["main"]
    terms = {name: metrics["terms"][name] for name in found.sums}
    np.testing.assert_allclose(
        metrics["loss"],
        terms["main"] + 0.1 * terms["z_loss"] + 0.1 * terms["balance"] + 0.3 * terms["mtp_1"],
        rtol=1e-6,
    )


def test_every_copy_of_the_state_is_the_same_on_every_device():
    state, _ = trained()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        copies = {}
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(
                shard.data, copies.setdefault(str(shard.index), shard.data), err_msg=str(path)
            )
    assert all(bias.sharding.is_fully_replicated and np.any(bias) for bias in state.router_bias.values())


def test_a_step_counts_its_batch_and_updates_everything():
    before, (after, metrics) = tiny.state(CONFIG), train(tiny.state(CONFIG))
    assert (int(after.step), bool(metrics["applied"])) == (1, True)
    for a, b in zip(arrays(after.params), arrays(before.params), strict=True):
        assert (a != b).any()
    np.testing.assert_allclose(after.typical_norm, metrics["grad_norm"])


def test_what_is_not_applied_leaves_the_state_as_it_was():
    """A spike, or a gradient that is not a number, is passed over: only the step goes on, to the next batch."""
    calm = tiny.state(CONFIG)
    spiking = tiny.state(CONFIG).replace(typical_norm=calm.typical_norm + 1e-6)
    broken = calm.replace(params=calm.params.replace(norm=calm.params.norm * np.float32("nan")))
    for state, typical in ((spiking, 1e-6 * (0.98 + 0.02 * 100)), (broken, 0)):
        before = arrays(state.replace(step=None, typical_norm=None))
        after, metrics = train(state)
        assert (int(after.step), bool(metrics["applied"])) == (1, False)
        assert_identical(arrays(after.replace(step=None, typical_norm=None)), before)
        np.testing.assert_allclose(after.typical_norm, typical, rtol=1e-6)


def test_gradients_that_stay_large_are_spikes_for_some_steps_and_then_no_more():
    state, steps = tiny.state(CONFIG), 0
    state = state.replace(typical_norm=state.typical_norm + 1e-6)
    while not int(optax.tree.get(state.opt_state, "count")):
        state, steps = train(state)[0], steps + 1
    assert 5 < steps < 30


def test_an_update_has_the_learning_rate_that_is_told_whatever_was_passed_over_before():
    """Adam's first update is of that size, but for decay, whichever step it is of."""
    rates, changes = [], []
    for done in (0, 50):
        state = tiny.state(CONFIG)
        state, before = state.replace(step=state.step + done), np.array(state.params.head)
        after, metrics = train(state)
        rates.append(metrics["learning_rate"])
        changes.append(np.array(after.params.head) - before)
    assert rates[1] < 0.6 * rates[0]
    np.testing.assert_allclose(changes[1] / rates[1], changes[0] / rates[0], atol=1e-3)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("layers", "kind"), [(3, "adamw"), (1, "muon")], ids=["AdamW, a layer after the other", "Muon, and Adam of norms"]
)
def test_optimizer_state_in_host_memory_trains_alike_and_goes_back_there(layers, kind):
    model = dataclasses.replace(ONE_LAYER, num_hidden_layers=layers)
    config = tiny.config(model, "plain", (2, 2, 2), optimizer={"kind": kind})
    away = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, state_memory="host"))
    stepper, batch = tiny.stepper(away), tiny.inputs(config)[2]

    def two_steps(config):
        state = tiny.state(config)
        for _ in range(2):
            state, _ = tiny.stepper(config).train(state, batch, tiny.stepper(config).training)
        return state

    found, expected = two_steps(away), two_steps(config)
    moments = [a for a in jax.tree.leaves(found.opt_state) if a.ndim]
    assert {a.sharding.memory_kind for a in moments} == {host.KIND}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), found, expected)
    before = arrays(found)
    after, _ = stepper.train(found, batch, stepper.rehearsal)
    assert_identical(arrays(after), before)


@pytest.mark.newest
@pytest.mark.parametrize(("schedule", "kind"), [("batch_split", "adamw"), ("plain", "muon")])
def test_weights_in_host_memory_train_alike_by_a_copy_in_the_compute_dtype_and_go_back_there(schedule, kind):
    """Alike to the bit: gradients are not rounded as the copy is. QK-Clip changes weights where they lie."""
    optimizer = {"kind": kind, "accumulate_steps": 2, "state_memory": "host", "qk_clip": 1e-3}
    config = tiny.config(ONE_LAYER, schedule, (1, 2, 2), optimizer=optimizer, precision={"compute": "bfloat16"})
    away = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, params_memory="host"))
    here, there, batch = tiny.stepper(config), tiny.stepper(away), tiny.inputs(config)[2]
    (expected, _), (found, _) = (s.train(tiny.state(s.config), batch, s.training) for s in (here, there))
    assert {a.sharding.memory_kind for a in jax.tree.leaves(found.params)} == {host.KIND}
    assert_identical(arrays(found), arrays(expected))
    copy = there.on_devices(found.params)
    assert {a.sharding.memory_kind for a in jax.tree.leaves(copy)} == {"device"}
    assert {a.dtype.name for a in jax.tree.leaves(copy.moe_layers["experts"])} == {"bfloat16"}
    trained = (here, expected), (there, found)
    judged = (s.evaluate(s.on_devices(state.params), state.router_bias, batch) for s, state in trained)
    assert_identical(*map(arrays, judged))


@pytest.mark.oldest
def test_gradients_have_a_dtype_of_their_own():
    def found(**precision):
        config = tiny.config(ONE_LAYER, mesh=(1, 2, 2), precision=precision, optimizer={"accumulate_steps": 2})
        weights, bias, batch = tiny.inputs(config)
        weights = jax.tree.map(lambda w: w.astype("bfloat16").astype(precision.get("params", w.dtype)), weights)
        with tiny.strictly():
            return tiny.loss_and_grads(config)(weights, bias, batch, tiny.stepper(config).training)[0]

    of_float32, of_bfloat16, rounded = found(), found(params="bfloat16"), found(grads="bfloat16")
    assert_identical(arrays(of_bfloat16), arrays(of_float32))
    assert {a.dtype.name for a in jax.tree.leaves(rounded)} == {"bfloat16"}
    for a, b in zip(arrays(rounded), arrays(of_float32), strict=True):
        np.testing.assert_allclose(a.astype(np.float32), b, rtol=2**-6, atol=2**-7 * np.abs(b).max())


@pytest.mark.parametrize("term", ["main", "z_loss", "balance", "mtp_1"])
def test_a_probe_reports_the_gradient_of_its_term_and_changes_nothing(term):
    before = arrays(tiny.state(CONFIG))
    after, metrics = train(tiny.state(CONFIG), STEPPER().probe(term))
    assert_identical(arrays(after), before)
    assert not metrics["applied"]
    assert metrics["grad_norm"] > 1e-3


@pytest.mark.oldest
def test_a_smaller_batch_of_a_ramp_takes_fewer_parts_and_is_what_it_is_alone():
    rows = {name: a[:8] for name, a in tiny.batch().items()}
    whole = tiny.config(ONE_LAYER, mesh=(1, 2, 2), optimizer={"accumulate_steps": 4})
    data = dataclasses.replace(whole.data, ramp=(Ramp(until_step=9, global_batch=8),))
    alone = tiny.config(ONE_LAYER, mesh=(1, 2, 2), optimizer={"accumulate_steps": 2})
    alone = dataclasses.replace(alone, data=dataclasses.replace(alone.data, global_batch=8))

    def learned(config):
        weights, bias, _ = tiny.inputs(whole)
        s = tiny.stepper(config)
        with tiny.strictly():
            return tiny.loss_and_grads(config)(weights, bias, s.batch(rows), s.training)

    jax.tree.map(np.testing.assert_array_equal, learned(dataclasses.replace(whole, data=data)), learned(alone))


@pytest.mark.oldest
def test_sequences_that_a_ramp_cuts_are_learned_as_rows_of_their_length():
    """But for the balance loss, which is of a row."""
    config, pieces = tiny.config(ONE_LAYER_AND_MTP), 3
    config = dataclasses.replace(config, loss=dataclasses.replace(config.loss, balance=0.0))

    def with_data(**changes):
        return dataclasses.replace(config, data=dataclasses.replace(config.data, **changes))

    length = tiny.LENGTH // pieces
    whole = with_data(ramp=(Ramp(until_step=3, sequence_length=length),))
    alone = with_data(sequence_length=length, global_batch=pieces * tiny.ROWS)
    cut = list(itertools.islice(open_data(whole.data, tiny.V3.vocab_size, 0, None).batches(), 3))
    shorter = [{name: a.reshape(-1, length) for name, a in batch.items()} for batch in cut]

    def learned(config, batches):
        s, state, terms = tiny.stepper(config), tiny.state(config), []
        for batch in batches:
            state, metrics = s.train(state, s.batch(batch), s.training)
            terms.append(metrics["terms"])
        return jax.device_get(terms)

    found, expected = learned(whole, cut), learned(alone, shorter)
    assert found[2]["main"] < found[0]["main"]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, expected)


@pytest.mark.parametrize(("filled", "expected"), [((), 0), ((2,), 3), ((0, 1), 2)])
def test_parts_count_up_to_the_last_that_has_a_token_on_any_device(filled, expected):
    segments = np.zeros((4, 8, 3), np.int32)  # parts, rows of 4 devices, tokens
    for part in filled:
        segments[part, 5, 1] = 1
    mesh = mesh_lib.make(Mesh(fsdp=2, expert=2), jax.devices()[:4])
    specs = {"in_specs": P(None, mesh_lib.AXES), "out_specs": P()}
    assert jax.jit(jax.shard_map(step._filled, mesh=mesh, check_vma=False, **specs))(segments) == expected


# --------------------------------------------------------------------------------- weights of the loss


@pytest.mark.oldest
@pytest.mark.parametrize("number", [2, 3])
def test_after_the_steps_that_config_names_terms_and_rate_have_the_weights_that_it_names(number):
    change = LossChange(after_steps=3, mtp=0.1, balance=0.0, router_bias_rate=0.0)
    config = tiny.config(ONE_LAYER_AND_MTP)

    def with_loss(**changes):
        return dataclasses.replace(config, loss=dataclasses.replace(config.loss, **changes))

    def stepped(config):
        stepper = tiny.stepper(config)
        state = tiny.state(config).replace(step=jax.numpy.int32(number))
        return stepper.train(state, tiny.inputs(config)[2], stepper.training)

    found, metrics = stepped(with_loss(later=(change,)))
    expected, of_expected = stepped(config if number < 3 else with_loss(mtp=0.1, balance=0.0, router_bias_rate=0.0))
    np.testing.assert_allclose(metrics["loss"], of_expected["loss"], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], of_expected["grad_norm"], rtol=1e-6)
    assert_identical(arrays(found.router_bias), arrays(expected.router_bias))
    assert any(bias.any() for bias in arrays(found.router_bias)) == (number < 3)


# ------------------------------------------------------------------------------------------- QK-Clip

LIMIT = 3.0
CLIPPED = {"qk_clip": LIMIT, "lr": 1e-30, "weight_decay": 0.0}  # nothing else changes weights
SHALLOW = dataclasses.replace(tiny.V3, num_hidden_layers=2)  # a dense layer, an MoE layer and an MTP module
ALONE = tiny.config(SHALLOW, optimizer=CLIPPED)
SPREAD = tiny.config(SHALLOW, "batch_split", (1, 2, 2), optimizer=CLIPPED | {"accumulate_steps": 2})


def top_scores(config, weights=None):
    return seen(config, weights).top_score


def attentions(weights):
    """Stack -> the weights of its attention."""
    found = {}
    layout.map_attention(lambda stack, w: found.setdefault(stack, w), weights)
    return found


def expected_top_scores(weights):
    """Of the first layer, [N]."""
    c, y, rows = SHALLOW, SHALLOW.rope_scaling, tiny.batch()
    scale = c.qk_head_dim**-0.5 * oracle.temperature(y.factor, y.mscale_all_dim) ** 2
    w = jax.tree.map(lambda a: np.float64(a[0]), weights.dense_layers["attention"])
    top = np.zeros(c.num_attention_heads)
    for tokens, segments, positions in zip(rows["tokens"], rows["segments"], rows["positions"], strict=True):
        x = oracle.norm(np.float64(weights.embed)[tokens], w.norm, c.rms_norm_eps)
        source = oracle.norm(x @ w.q_down, w.q_norm, 1e-6)
        latent = oracle.norm(x @ w.kv_down, w.kv_norm, 1e-6)
        shared = x @ w.k_rope
        for head in range(c.num_attention_heads):
            q, k = source @ w.q_up[:, head], np.concatenate([latent @ w.k_up[:, head], shared], -1)
            for part in (q, k):
                part[:, c.qk_nope_head_dim :] = [
                    oracle.rotate(c, a, int(p)) for a, p in zip(part[:, c.qk_nope_head_dim :], positions, strict=True)
                ]
            seen = (segments[:, None] == segments) & (segments > 0) & np.tri(len(tokens), dtype=bool)
            top[head] = max(top[head], (q @ k.T * scale)[seen].max(initial=0))
    return top


@pytest.mark.oldest
def test_the_largest_scores_are_those_of_the_definition_on_one_device_and_on_many():
    alone, spread = top_scores(ALONE), top_scores(SPREAD)
    np.testing.assert_allclose(alone["dense_layers"][0], expected_top_scores(tiny.weights(SHALLOW)), rtol=1e-6)
    assert {name: scores.shape for name, scores in alone.items()} == dict.fromkeys(
        ("dense_layers", "moe_layers", "mtp"), (1, SHALLOW.num_attention_heads)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), spread, alone)


@pytest.mark.oldest
def test_after_a_step_no_score_of_a_clipped_head_exceeds_the_limit_and_other_heads_are_as_they_were():
    state, before = tiny.state(SPREAD), top_scores(SPREAD)
    old = jax.device_get(state.params)
    after, metrics = tiny.stepper(SPREAD).train(state, tiny.inputs(SPREAD)[2], tiny.stepper(SPREAD).training)
    first = before["dense_layers"][0]  # whose input is as before
    assert (first > LIMIT).any() and (first < LIMIT).any()
    found = top_scores(SPREAD, after.params)["dense_layers"][0]
    np.testing.assert_allclose(found, np.minimum(first, LIMIT), rtol=1e-5)
    np.testing.assert_allclose(metrics["top_score"]["dense_layers"], [first.max()], rtol=1e-6)
    for stack, w in attentions(jax.device_get(after.params)).items():
        factor, of_old = LIMIT / np.maximum(before[stack], LIMIT), attentions(old)[stack]
        np.testing.assert_allclose(w.k_up, of_old.k_up * np.sqrt(factor)[:, None, :, None], rtol=1e-6)
        np.testing.assert_array_equal(w.v_up, of_old.v_up)


@pytest.mark.oldest
def test_frozen_weights_are_not_clipped():
    config = tiny.config(SHALLOW, optimizer=CLIPPED | {"train": ("*k_up",)})
    weights, top = tiny.weights(SHALLOW), {k: v + 1 for k, v in top_scores(ALONE).items()}
    found = tiny.stepper(config)._clipped(weights, top, np.True_)
    for w, old in zip(attentions(found).values(), attentions(weights).values(), strict=True):
        np.testing.assert_array_equal(w.q_up, old.q_up)
        assert (np.asarray(w.k_up) != old.k_up).any()


def test_each_stack_s_attention_is_known_by_the_stack_s_name():
    assert attentions(layout.declare(tiny.ENGRAM)).keys() == layout.stacks(tiny.ENGRAM).keys()


# --------------------------------------------------------------------------------------- router bias


def test_router_bias_rises_for_idle_experts_and_falls_for_busy_ones():
    after, _ = train(tiny.state(CONFIG))
    for stack, bias in after.router_bias.items():
        load = expected_load(stack)
        np.testing.assert_array_equal(bias, np.float32(1e-3) * np.sign(load.mean(-1, keepdims=True) - load))


def expected_load(stack):
    """Counted by another program on one device."""
    return seen(tiny.config()).load[stack]


def test_imbalance_is_the_load_of_the_busiest_expert_over_the_mean_of_its_layer():
    load = np.array([[4, 4, 4, 4], [0, 16, 0, 0], [1, 2, 3, 6], [0, 0, 0, 0]], np.int32)  # at last, of padding alone
    np.testing.assert_allclose(step._imbalance(load), [1, 4, 2, 0])


def test_router_bias_balances_a_router_that_does_not_learn():
    scores = jax.nn.sigmoid(
        np.random.default_rng(0).standard_normal((256, 8), np.float32) + np.linspace(-1, 1, 8, dtype=np.float32)
    )

    @jax.jit
    def update(bias):
        load = moe.load(tiny.V3, moe.choose(tiny.V3, scores, bias["moe_layers"][0]))
        return optimizer.balance(bias, {"moe_layers": load[None]}, 1e-2), load

    bias, imbalance = {"moe_layers": np.zeros((1, 8), np.float32)}, []
    for _ in range(60):
        bias, load = update(bias)
        imbalance.append(load.max() / load.mean())
    assert imbalance[0] > 2
    assert imbalance[-1] < 1.1

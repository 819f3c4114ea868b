"""Every schedule, mesh and way of saving memory computes the gradients of one device that keeps everything."""

import dataclasses
import functools

import numpy as np
import pytest
import tiny

from maxds.model import moe

FLOAT8 = {"matmul": "fp8"}
TOLERANCE = 1e-5  # of a gradient's largest number
KEPT = ("attention", "expert_up", "mlp_up")
# Without the last layer, which is no whole turn: what the gates of its hyper-connections learn is all but cancelled.
V4 = dataclasses.replace(tiny.V4, num_hidden_layers=5, compress_ratios=tiny.V4.compress_ratios[:5])
CLIP = {"qk_clip": 1.0}
# What is compared with `plain` on one device, whose terms and gradients test_oracle.py compares with the papers.
# Every way of saving memory, overflow, accumulation and float8 meet both schedules, each in some model. The models
# that accumulate come last: their programs are used twice, and few are kept (tiny.loss_and_grads).
CASES = {
    # V3: 1 dense layer, 3 MoE and 1 MTP module; in context parallel a device has 6 or 3 of a sequence's 12 tokens
    "plain, kept and offloaded, QK-Clip": tiny.config(
        tiny.FOUR_HEADS, "plain", (1, 2, 4), keep=KEPT, offload=("attention_input", "dispatch_input"), optimizer=CLIP
    ),
    "split, offloaded, QK-Clip": tiny.config(
        tiny.FOUR_HEADS,
        *("batch_split", (1, 4, 2)),
        offload=("attention_input", "dispatch_input", *KEPT),
        optimizer=CLIP,
    ),
    "split, context parallel, QK-Clip": tiny.config(
        tiny.FOUR_HEADS, "batch_split", (2, 2, 2), context_parallel=True, optimizer=CLIP
    ),
    "plain, float8, nothing recomputed": tiny.config(
        tiny.FOUR_HEADS, "plain", (1, 2, 4), keep=("everything",), precision=FLOAT8
    ),
    "split, context parallel, float8, overflowing": tiny.config(
        tiny.FOUR_HEADS, "batch_split", (1, 2, 4), context_parallel=True, capacity=0.25, precision=FLOAT8
    ),
    # 2 MoE layers, each with an Engram
    "plain, Engram, nothing recomputed": tiny.config(tiny.ENGRAM, "plain", (2, 2, 2), keep=("everything",)),
    # hyper-connections: 1 dense layer, which has an Engram, and 1 MoE
    "split, Engram and mHC, overflowing": tiny.config(
        tiny.ENGRAM_HYPER, "batch_split", (1, 4, 2), keep=("attention",), capacity=0.25
    ),
    # hyper-connections, 1 MoE layer, and 1 MTP module with an indexer
    "split, V4's MTP": tiny.config(tiny.V4_MTP, "batch_split", (1, 2, 2)),
    # hyper-connections, 1 hash layer, and 2 turns of 2 kinds of attention
    "plain, V4, nothing recomputed": tiny.config(V4, "plain", (1, 2, 2), keep=("everything",)),
    "split, V4, in 2 parts": tiny.config(V4, "batch_split", (1, 2, 2), optimizer={"accumulate_steps": 2}),
    # 1 dense layer, 2 MoE and 1 MTP module
    "plain, V3.2, nothing recomputed": tiny.config(tiny.V32, "plain", (1, 2, 1), keep=("everything",)),
    "split, V3.2, nothing kept, in 2 parts": tiny.config(
        tiny.V32, "batch_split", (2, 1, 2), keep=(), optimizer={"accumulate_steps": 2}
    ),
    # 1 MoE layer, 2 MTP modules
    "split, V2-Lite, one device": tiny.config(tiny.V2_LITE, "batch_split"),
    "plain, V2-Lite, context parallel, nothing recomputed, overflowing, in 4 parts": tiny.config(
        tiny.V2_LITE,
        *("plain", (1, 2, 4)),
        context_parallel=True,
        keep=("everything",),
        capacity=0.25,
        optimizer={"accumulate_steps": 4},
    ),
}
of_cases = functools.partial(
    tiny.parametrize,
    "config",
    on_every_python={"split, context parallel, float8, overflowing", "split, V4, in 2 parts"},
)
every_case = of_cases(CASES)


def of_one_device(config):
    clipped = {"qk_clip": config.optimizer.qk_clip}
    return tiny.config(config.model, optimizer=clipped, precision={"matmul": config.precision.matmul})


def terms(config):
    return tiny.stepper(config).network.coefficients()


@functools.cache
def compared(config):
    """The outcome of one device, that of the config, and the largest error of a gradient.

    In float8 a number halfway between two others goes to the one or the other with the order of a sum. So weights are
    drawn until no number lies there: a program that computes anything else never agrees.
    """
    return agreeing(config, None, draws=8 if config.precision.matmul == "fp8" else 1)


def agreeing(config, term, draws):
    """As `compared`, of one term or all, of the first draw of weights in which the gradients agree, or the last."""
    for draw in range(draws):
        reference, found = (tiny.outcome(c, term, draw) for c in (of_one_device(config), config))
        error = tiny.largest_error(reference.grads, found.grads)
        if error[0] < TOLERANCE:
            break
    return reference, found, error


@every_case
def test_every_loss_term_is_that_of_one_device(config):
    reference, found, _ = compared(config)
    assert found.counts == reference.counts
    for name in terms(config):
        atol = 1e-6 * tiny.entropies(config.model, reference) if name == "indexer" else 0
        np.testing.assert_allclose(found.sums[name], reference.sums[name], rtol=1e-6, atol=atol, err_msg=name)


@every_case
def test_every_expert_has_the_load_of_one_device(config):
    reference, found, _ = compared(config)
    assert found.load.keys() == reference.load.keys()
    for stack, load in reference.load.items():
        np.testing.assert_array_equal(found.load[stack], load)


@pytest.mark.oldest
def test_the_largest_score_of_every_head_is_that_of_one_device():
    reference, found, _ = compared(CASES["split, context parallel, QK-Clip"])
    for stack, scores in reference.seen.top_score.items():
        np.testing.assert_allclose(found.seen.top_score[stack], scores, rtol=1e-5)


@every_case
def test_every_gradient_is_that_of_one_device(config):
    _, _, (error, where) = compared(config)
    assert error < TOLERANCE, where


@of_cases({name: config for name, config in CASES.items() if config.optimizer.accumulate_steps > 1})
def test_accumulation_weighs_every_term_as_the_whole_batch_does(config):
    """Where what tokens add to a gradient all but cancels, machines round it differently: then weights are drawn again.

    A term that is weighed otherwise never agrees.
    """
    for term in terms(config):
        _, _, (error, where) = agreeing(config, term, draws=4)
        assert error < TOLERANCE, (term, where)


@pytest.mark.oldest
def test_an_evaluation_in_parts_has_the_terms_of_one_device():
    config = next(c for c in CASES.values() if c.optimizer.accumulate_steps == 4)
    reference, found = compared(config)[0], tiny.stepper(config).evaluate(*tiny.inputs(config))
    assert found["counts"] == reference.counts
    for name, expected in reference.sums.items():
        np.testing.assert_allclose(found["sums"][name], expected, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", [name for name in CASES if "overflowing" in name])
def test_overflowing_cases_need_more_than_one_round(name):
    config, batch = CASES[name], tiny.batch()
    mesh, parts = config.mesh, config.optimizer.accumulate_steps * tiny.stepper(config).network.microbatches
    devices = mesh.data * mesh.fsdp * mesh.expert
    k = config.model.num_experts_per_tok
    pairs = (
        batch["segments"].size // devices // parts * mesh.expert * k
    )  # seen by the devices along `expert`, in a part
    room = moe.rows_at_a_time(pairs, mesh.expert, config.schedule.capacity) * devices * parts
    assert (batch["segments"] > 0).sum() * k > room

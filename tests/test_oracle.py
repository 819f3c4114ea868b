"""The compiled model is the model of the papers (tests/oracle.py), in values and in gradients."""

import collections
import functools
import itertools
import re

import jax
import numpy as np
import oracle
import pytest
import tiny

MODELS = {"V3": tiny.V3, "V3.2": tiny.V32, "V2": tiny.V2, "V2-Lite": tiny.V2_LITE, "mHC": tiny.HYPER, "V4": tiny.V4}
MODELS |= {"V4's MTP": tiny.V4_MTP, "Engram": tiny.ENGRAM, "Engram and mHC": tiny.ENGRAM_HYPER}
every_model = tiny.parametrize("model", MODELS, on_every_python={"V3"})


def evaluate(model, weights):
    def layer(stack, i):
        return jax.tree.map(lambda a: a[i], stack)

    return oracle.run(model, weights, tiny.router_bias(model), tiny.batch(), layer)


def complex_weights(model):
    return jax.tree.map(np.complex128, tiny.weights(model))


@functools.cache
def expected(model):
    terms, load, logits = evaluate(model, complex_weights(model))
    return {name: (np.real(value), count) for name, (value, count) in terms.items()}, load, np.real(logits)


@every_model
def test_every_loss_term_is_that_of_the_papers(model):
    terms, _, _ = expected(model)
    found = tiny.outcome(tiny.config(model))
    assert {k: int(n) for k, n in found.counts.items()} == {k: terms["main" if k == "z_loss" else k][1] for k in terms}
    for name, (value, _) in terms.items():
        atol = 1e-8 * tiny.entropies(model, found) if name == "indexer" else 0
        np.testing.assert_allclose(found.sums[name], value, rtol=2e-6, atol=atol, err_msg=name)


@every_model
def test_every_token_goes_to_the_experts_of_the_papers(model):
    _, load, _ = expected(model)
    jax.tree.map(np.testing.assert_array_equal, tiny.outcome(tiny.config(model)).load, load)


@pytest.mark.oldest
@pytest.mark.parametrize("name", ["V3", "V2-Lite", "V4's MTP"])
def test_logits_are_those_of_the_papers(name):
    """By a head of its own, by the embedding, and out of several streams; what is before them, losses tell."""
    config = tiny.config(model := MODELS[name])
    found = np.asarray(tiny.logits(config)(*tiny.inputs(config)))
    real = tiny.batch()["segments"] > 0
    np.testing.assert_allclose(found[real], expected(model)[2][real], rtol=0, atol=1e-5 * np.abs(found).max())


@every_model
def test_the_gradient_of_every_weight_is_that_of_the_papers(model):
    """Along random directions, each in the weights of one stage: the complex step here, the gradient there.

    A weight moves the less, the larger its gradient: so each counts as much as any other of its stage. Those of a
    hyper-connection are one: of its gates alone, most is cancelled over the tokens.
    """
    config, rng, step = tiny.config(model), np.random.default_rng(3), 1e-30
    coefficients = tiny.stepper(config).network.coefficients()
    paths, gradients = zip(*jax.tree_util.tree_leaves_with_path(tiny.outcome(config).grads), strict=True)
    names, norms = [tiny.judged_with(path) for path in paths], collections.Counter()
    for name, gradient in zip(names, gradients, strict=True):
        norms[name] = np.hypot(norms[name], np.linalg.norm(gradient))
    leaves, structure = jax.tree.flatten(complex_weights(model))
    for where, group in itertools.groupby(range(len(leaves)), lambda i: stage(names[i])):
        directions = {i: rng.standard_normal(leaves[i].shape) / norms[names[i]] for i in group}
        moved = [leaf + 1j * step * directions[i] if i in directions else leaf for i, leaf in enumerate(leaves)]
        terms, _, _ = evaluate(model, jax.tree.unflatten(structure, moved))
        slope = sum(coefficients[k] * np.imag(value) / step / count for k, (value, count) in terms.items())
        found = sum(np.vdot(gradients[i], direction) for i, direction in directions.items())
        error = abs(found - slope) / len({names[i] for i in directions}) ** 0.5
        assert error < 1e-5, (where, error)


def stage(weight):
    """The path of the stage that a weight belongs to; nothing for one of none."""
    return re.match(r"(.*?\b(attention|mlp|dispatch|experts)\b)?", weight)[0]

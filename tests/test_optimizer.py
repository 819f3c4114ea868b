"""How weights change: learning rates, decay, Muon one matrix at a time, and the dtype of the state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from maxds import optimizer, params, update
from maxds.config import Optimizer
from maxds.model import layout

# ----------------------------------------------------------------------------------- learning rate


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cosine", {0: 0.1, 9: 1.0, 10: 1.0, 43: 0.775, 109: 0.1, 1000: 0.1}),
        ("wsd", {0: 0.1, 9: 1.0, 10: 1.0, 89: 1.0, 94: 0.775, 99: 0.55, 109: 0.1, 1000: 0.1}),
        ("wsd_cosine", {0: 0.1, 89: 1.0, 94: 0.55 + 0.45 * 0.5**0.5, 99: 0.55, 109: 0.1, 1000: 0.1}),
    ],
)
def test_learning_rate_warms_up_and_comes_down(kind, expected):
    rate = optimizer.learning_rate(
        Optimizer(lr=1.0, lr_schedule=kind, warmup_steps=10, decay_fraction=0.2, min_lr_ratio=0.1), steps=110
    )
    found = {step: float(rate(step)) for step in expected}
    assert found == pytest.approx(expected, rel=1e-6)


def test_learning_rate_of_deepseek_v3():
    """A step here is a billion of V3's 14.8T tokens (section 4.2)."""
    rate = optimizer.learning_rate(Optimizer(lr=2.2e-4, lr_schedule="deepseek_v3", warmup_steps=100), steps=14_800)
    middle = (2.2e-4 + 2.2e-5) / 2
    expected = {0: 2.2e-6, 99: 2.2e-4, 10_000: 2.2e-4, 12_150: middle, 14_300: 2.2e-5, 14_632: 2.2e-5, 14_633: 7.3e-6}
    found = {step: float(rate(step)) for step in expected}
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "wsd_cosine", "deepseek_v3"])
def test_a_warm_up_that_takes_most_of_a_run_is_finished_first(kind):
    rate = optimizer.learning_rate(Optimizer(lr=1.0, lr_schedule=kind, warmup_steps=19), steps=20)
    assert [float(rate(step)) for step in range(19)] == pytest.approx([n / 19 for n in range(1, 20)])


def test_learning_rate_without_warm_up_starts_at_its_height():
    for kind in ("cosine", "wsd", "wsd_cosine", "deepseek_v3"):
        assert float(optimizer.learning_rate(Optimizer(lr=0.5, lr_schedule=kind), steps=20)(0)) == 0.5


# ------------------------------------------------------------------------------------------- update

DECLARED = layout.declare(tiny.V3)
# One weight of every kind: projections with heads, experts, gate beside up, and what is not a hidden matrix.
WEIGHTS = {
    "q_up": DECLARED.moe_layers["attention"].q_up,
    "out": DECLARED.moe_layers["attention"].out,
    "experts_up": DECLARED.moe_layers["experts"].up,
    "experts_down": DECLARED.moe_layers["experts"].down,
    "projection": DECLARED.mtp.projection,
    "norm": DECLARED.norm,
    "embed": DECLARED.embed,
    "head": DECLARED.head,
}
MATRICES = {name for name, p in WEIGHTS.items() if p.dims}


def draw(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {name: scale * rng.standard_normal(p.shape, np.float32) for name, p in WEIGHTS.items()}


def updates(config, steps=2, names=frozenset(WEIGHTS), mesh=(1, 1, 1)):
    """What some steps would subtract, times the learning rate, from weights that do not change."""
    mesh = tiny.stepper(tiny.config(mesh=mesh)).mesh

    def some(weights):
        return {name: weights[name] for name in names}

    def place(weights):
        return jax.device_put(some(weights), params.shardings(some(WEIGHTS), mesh))

    transform = optimizer.make(config, some(WEIGHTS), mesh)
    weights = place(draw(0))
    state = transform.init(weights)
    update, found = jax.jit(transform.update), []
    for step in range(steps):
        grads = place(draw(step + 1))
        more, state = update(optimizer.clipped(config.clip, grads, optax.tree.norm(grads)), state, weights)
        found.append(more)
    return found, state


def matrices(p, array):
    """The 2-D matrices that a weight consists of: its inputs by its outputs, one for each index of the rest."""
    order = [i for kind in "bio" for i, letter in enumerate(p.dims) if letter == kind]
    inputs = np.prod([n for n, letter in zip(p.shape, p.dims, strict=True) if letter == "i"])
    outputs = np.prod([n for n, letter in zip(p.shape, p.dims, strict=True) if letter == "o"])
    return np.asarray(array).transpose(order).reshape(-1, inputs, outputs)


PLAIN = Optimizer(lr=1.0, lr_schedule="wsd", weight_decay=0.0, clip=None)


@pytest.fixture(scope="module")
def muon():
    return updates(dataclasses.replace(PLAIN, kind="muon"))[0]


def orthogonalized(x, steps=((3.4445, -4.7750, 2.0315),) * 5):
    """By Newton-Schulz, with the steps that Muon's author published."""
    x = x / np.linalg.norm(x)
    for a, b, c in steps:
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


@pytest.mark.parametrize("name", sorted(MATRICES))
def test_muon_moves_every_matrix_along_its_own_orthogonalized_momentum(name, muon):
    p, momentum = WEIGHTS[name], 0.0
    for step in range(2):
        gradients = matrices(p, draw(step + 1)[name]).astype(np.float64)
        momentum = gradients + 0.95 * momentum
        found = matrices(p, muon[step][name])
        for index in {0, len(found) - 1}:
            x = gradients[index] + 0.95 * momentum[index]
            expected = 0.2 * max(x.shape) ** 0.5 * orthogonalized(x)
            np.testing.assert_allclose(found[index], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.oldest
def test_muon_on_a_mesh_is_that_of_one_device(muon):
    on_mesh = updates(dataclasses.replace(PLAIN, kind="muon"), mesh=(1, 4, 2))[0]
    for one, other in zip(muon, on_mesh, strict=True):
        for name in MATRICES:
            np.testing.assert_allclose(other[name], one[name], rtol=0, atol=1e-5 * np.abs(one[name]).max())


def test_v4_s_muon_takes_the_steps_of_its_paper_which_bring_singular_values_to_one():
    """V4, eq. 28: eight steps, then two with other coefficients; updates have a root mean square of 0.18."""
    steps = *((3.4445, -4.7750, 2.0315),) * 8, *((2, -1.5, 0.5),) * 2
    config = dataclasses.replace(PLAIN, kind="muon", muon_iteration="deepseek_v4", muon_rms=0.18)
    ((found,), _) = updates(config, steps=1)
    for name in MATRICES:
        gradients, moved = (matrices(WEIGHTS[name], x[name]).astype(np.float64) for x in (draw(1), found))
        expected = 0.18 * max(moved[0].shape) ** 0.5 * orthogonalized(gradients[0], steps)
        np.testing.assert_allclose(moved[0], expected, rtol=0, atol=1e-5 * np.abs(expected).max(), err_msg=name)
        sizes = np.linalg.svd(expected, compute_uv=False) / (0.18 * max(expected.shape) ** 0.5)
        np.testing.assert_allclose(sizes, 1, atol=1e-2, err_msg=name)


@pytest.mark.parametrize("name", sorted(MATRICES))
def test_muon_sends_matrices_in_the_dtype_of_its_moments_and_computes_in_float32(name):
    halves = dataclasses.replace(PLAIN, kind="muon", state_dtype="bfloat16", muon_momentum=0.0)
    p = WEIGHTS[name]
    ((found,), _) = updates(halves, steps=1, names={name}, mesh=(1, 4, 2))
    sent = matrices(p, jnp.asarray(draw(1)[name]).astype(jnp.bfloat16).astype(jnp.float32))
    for x, moved in zip(sent.astype(np.float64), matrices(p, found[name]), strict=True):
        expected = 0.2 * max(x.shape) ** 0.5 * orthogonalized(x)
        error = np.abs(moved - expected)
        assert np.all(error <= 2**-8 * np.abs(expected) + 1e-5 * np.abs(expected).max())
        assert error.max() > 1e-5 * np.abs(expected).max()  # rounded it is, on its way back


def test_muon_leaves_norms_embedding_and_head_to_adam(muon):
    adam = updates(PLAIN)[0]
    for step in range(2):
        for name in WEIGHTS.keys() - MATRICES:
            np.testing.assert_allclose(muon[step][name], adam[step][name], rtol=1e-5, atol=1e-7)


def test_every_hidden_matrix_of_the_model_is_declared_one():
    others = {path.split(".")[-1] for path, p in params.flatten(DECLARED).items() if not p.dims}
    assert others == {"embed", "head", "norm", "q_norm", "kv_norm", "embed_norm", "hidden_norm", "head_norm"}
    for path, p in params.flatten(DECLARED).items():
        assert not p.dims or (len(p.dims) == len(p.shape) and {"i", "o"} <= set(p.dims)), path


def test_adam_is_that_of_its_paper():
    b1, b2, eps = 0.9, 0.95, 1e-8
    found = updates(dataclasses.replace(PLAIN, b1=b1, b2=b2, eps=eps))[0]
    g1, g2 = draw(1)["embed"], draw(2)["embed"]
    m = ((1 - b1) * g2 + b1 * (1 - b1) * g1) / (1 - b1**2)
    v = ((1 - b2) * g2**2 + b2 * (1 - b2) * g1**2) / (1 - b2**2)
    np.testing.assert_allclose(found[1]["embed"], m / (np.sqrt(v) + eps), rtol=1e-4, atol=1e-6)


def test_weight_decay_is_decoupled_and_spares_the_norms():
    without = updates(PLAIN, steps=1)[0][0]
    decayed = updates(dataclasses.replace(PLAIN, weight_decay=0.1), steps=1)[0][0]
    for name, weight in draw(0).items():
        expected = np.zeros_like(weight) if name == "norm" else 0.1 * weight
        np.testing.assert_allclose(decayed[name] - without[name], expected, atol=1e-6)


def test_only_norms_are_spared_from_decay():
    spared = {path.split(".")[-1] for path, p in params.flatten(DECLARED).items() if not p.decay}
    assert spared == {"norm", "q_norm", "kv_norm", "embed_norm", "hidden_norm", "head_norm"}


def test_clipping_bounds_the_norm_of_all_gradients_together():
    """Adam ignores the scale of its gradients but for eps: with an enormous one, updates are the clipped gradients."""
    config = dataclasses.replace(PLAIN, eps=1e6, clip=0.5)
    found = updates(config, steps=1)[0][0]
    norm = np.sqrt(sum(np.sum(g**2) for g in draw(1).values()))
    for name, gradient in draw(1).items():
        np.testing.assert_allclose(found[name], gradient * 0.5 / norm / 1e6, rtol=1e-4)


def test_gradients_within_the_limit_are_left_as_they_are():
    gradients = draw(1)
    norm = np.float32(np.sqrt(sum(np.sum(g**2) for g in gradients.values())))
    jax.tree.map(np.testing.assert_array_equal, optimizer.clipped(1.01 * norm, gradients, norm), gradients)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_is_stored_in_its_dtype_and_computed_with_in_float32(kind):
    config = dataclasses.replace(PLAIN, kind=kind, state_dtype="bfloat16")
    (first, second), state = updates(config)
    sizes = {leaf.size for leaf in draw(0).values()}
    assert {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.size in sizes} == {jnp.dtype("bfloat16")}
    exact = updates(dataclasses.replace(config, state_dtype="float32"))[0]
    for name in WEIGHTS:  # nothing was read from the state in the first step; rounded moments in the second
        if kind == "adamw" or name not in MATRICES:  # matrices travelled as such
            np.testing.assert_array_equal(first[name], exact[0][name])
        assert second[name].dtype == jnp.float32
        error = np.abs(second[name] - exact[1][name]).max()
        assert 0 < error < 0.1 * np.abs(exact[1][name]).max()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_moment_lives_where_its_weight_does(kind):
    state = tiny.stepper(tiny.config(mesh=(2, 2, 2), optimizer={"kind": kind})).abstract_state
    weights = {params.name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)}
    moments = {params.name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)}
    for path, weight in weights.items():
        found = [
            leaf for name, leaf in moments.items() if name.endswith((f".mu.{path}", f".nu.{path}", f".trace.{path}"))
        ]
        matrix = kind == "muon" and params.flatten(DECLARED)[path].dims
        assert [(m.shape, m.sharding) for m in found] == [(weight.shape, weight.sharding)] * (1 if matrix else 2), path


def test_clipped_gradients_in_bfloat16_are_rounded_no_more():
    grads = {name: jnp.asarray(g, jnp.bfloat16) for name, g in draw(1).items()}
    norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
    np.testing.assert_allclose(optax.tree.norm(optimizer.clipped(0.5, grads, norm)), 0.5, rtol=1e-6)


@pytest.mark.parametrize(("start", "change"), [(1.0, 7e-6), (0.006, -2e-6), (-0.02, 2e-6)], ids=["norm", "down", "up"])
def test_weights_in_bfloat16_move_on_average_as_those_in_float32_do(start, change):
    """Rounded to the nearest, none of these changes would move them. They differ a little, or all had the same luck."""
    w, steps = jnp.full(200_000, start, jnp.bfloat16), 100
    changes = change * np.random.default_rng(0).uniform(0.9, 1.1, w.shape).astype(np.float32)
    assert ((w + changes).astype(jnp.bfloat16) == w).all()
    after = jax.lax.fori_loop(0, steps, lambda step, w: update.moved(w, changes, step), w)
    moved = np.asarray(after, np.float64) - np.asarray(w, np.float64)
    np.testing.assert_allclose(moved.mean(), steps * change, rtol=0.05)


def test_what_is_no_number_stays_none_in_bfloat16():
    w = jnp.zeros(4, jnp.bfloat16)
    change = jnp.asarray([np.nan, np.inf, -np.inf, 1.0], jnp.float32)
    np.testing.assert_array_equal(update.moved(w, change, jnp.int32(3)).astype(jnp.float32), change)


# --------------------------------------------------------------------------------------- frozen weights


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_frozen_weights_have_no_update_no_decay_and_no_state(kind):
    config = Optimizer(kind=kind, lr=1.0, lr_schedule="wsd", clip=None, train=("exp*_up", "embed"))
    own = {"experts_up", "embed"}
    alone, _ = updates(dataclasses.replace(config, train=("*",)), names=own)
    all_of_them, state = updates(config)
    for more, of_alone in zip(all_of_them, alone, strict=True):
        for name, found in more.items():
            np.testing.assert_array_equal(found, of_alone[name] if name in own else np.zeros_like(found))
    held = sum(leaf.size for leaf in jax.tree.leaves(state))
    moments = {"adamw": 2, "muon": 1}[kind] * WEIGHTS["experts_up"].size + 2 * WEIGHTS["embed"].size
    assert moments <= held < moments + 10  # counts


def test_a_pattern_that_matches_nothing_is_an_error_that_names_it():
    config = tiny.config(tiny.V32, optimizer={"train": ("*indexer*", "*idexer*")})
    with pytest.raises(optimizer.PatternError, match=r"optimizer.train=\['\*idexer\*'\] matches no weight"):
        tiny.stepper(config)


@pytest.mark.oldest
def test_in_the_dense_warm_up_only_the_indexers_change_and_not_even_router_biases():
    model = dataclasses.replace(tiny.V32, index_topk=tiny.LENGTH, num_hidden_layers=2, num_nextn_predict_layers=0)
    config = tiny.config(model, optimizer={"train": ("*indexer*",)})
    stepper, (_, bias, batch) = tiny.stepper(config), tiny.inputs(config)
    before = dataclasses.replace(tiny.state(config), router_bias=bias)
    start = jax.tree.map(np.asarray, before)
    after, metrics = stepper.train(before, batch, stepper.training)
    for path, moved in jax.tree_util.tree_leaves_with_path(jax.tree.map(lambda a, b: (a != b).any(), start, after)):
        name = params.name(path)
        own = name.startswith("opt_state") or "indexer" in name or name in ("step", "typical_norm")
        assert moved == own or (own and name.startswith("opt_state")), name
    squares = [
        np.sum(np.square(g, dtype=np.float64))
        for path, g in jax.tree_util.tree_leaves_with_path(tiny.outcome(config).grads)
        if "indexer" in params.name(path)
    ]
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(sum(squares)), rtol=1e-5)  # clipping goes by it
    moments = {params.name(path) for path, leaf in jax.tree_util.tree_leaves_with_path(after.opt_state) if leaf.ndim}
    assert moments
    assert all("indexer" in name for name in moments)

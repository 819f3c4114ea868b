"""A declaration says all there is to say about a weight."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from maxds import mesh as mesh_lib
from maxds import params, schedule
from maxds.config import Mesh
from maxds.mesh import MeshError
from maxds.model import layout, residual
from maxds.params import Param

DECLARED = {
    "up": Param((4, 8, 6), P("expert", "fsdp"), "bio", std=0.5),
    "layer": {"down": Param((6, 8), P(None, "fsdp"), "io", std=2.0), "norm": Param((8,), P(None), decay=False)},
}


def initial(declared, sizes=(1, 1, 1), seed=0):
    mesh = mesh_lib.make(Mesh(**dict(zip(mesh_lib.AXES, sizes, strict=True))), jax.devices()[: int(np.prod(sizes))])
    shardings = params.shardings(declared, mesh)
    return jax.jit(lambda: params.init(declared, seed, jnp.float32), out_shardings=shardings)()


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 4)])
def test_weights_start_the_same_on_every_mesh_but_for_their_last_bits(sizes):
    found = initial(DECLARED, sizes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, initial(DECLARED))
    assert found["up"].sharding.spec == P("expert", "fsdp")


def test_adding_a_weight_does_not_move_another():
    more = {"another": Param((3,), P(None), std=1.0), **DECLARED}
    found = initial(more)
    jax.tree.map(np.testing.assert_array_equal, {name: found[name] for name in DECLARED}, initial(DECLARED))


def test_weights_have_their_own_spread_and_norms_start_at_one():
    declared = {
        "up": Param((100, 100), P(), std=0.5),
        "down": Param((100, 100), P(), std=0.5),
        "norm": Param((5,), P()),
    }
    found = initial(declared)
    for name in ("up", "down"):
        assert np.std(found[name]) == pytest.approx(0.5, rel=0.05)
        assert np.mean(found[name]) == pytest.approx(0, abs=0.02)
    assert abs(np.corrcoef(np.ravel(found["up"]), np.ravel(found["down"]))[0, 1]) < 0.05
    np.testing.assert_array_equal(found["norm"], 1)
    assert (np.asarray(initial(declared, seed=1)["up"]) != found["up"]).any()


@pytest.mark.parametrize("iterations", [3, 20, None])
def test_streams_start_unmixed_each_read_by_half_and_written_to_alike(iterations):
    c = dataclasses.replace(tiny.HYPER, hc_sinkhorn_iters=iterations)
    connections = initial(params.stacked(residual.declare(c), 2))
    np.testing.assert_array_equal(connections.scale, np.full((2, 3), 0.01, np.float32))
    streams = np.random.default_rng(0).standard_normal((2, 5, c.hc_mult, c.hidden_size), np.float32).swapaxes(1, 2)
    x = residual.with_streams(residual.enter(c, jnp.asarray(streams[:, 0])), jnp.asarray(streams))
    y, after = jax.jit(lambda w: residual.read(c, w, x))(schedule.at(connections, 1))
    np.testing.assert_allclose(np.stack(after.h, 1), streams, atol=0.01)
    np.testing.assert_allclose(y, streams.sum(1) / 2, atol=0.02)
    np.testing.assert_allclose(after.post, 1, atol=0.01)


def test_paths_name_weights_as_a_reader_would():
    assert set(params.flatten(DECLARED)) == {"up", "layer.down", "layer.norm"}
    assert "moe_layers.experts.up" in params.flatten(layout.declare(tiny.V3))


def test_a_stack_is_its_layers_and_back():
    stack = params.stacked(DECLARED, 3)
    assert stack["up"] == Param((3, 4, 8, 6), P(None, "expert", "fsdp"), "bbio", std=0.5)
    assert stack["layer"]["norm"].dims == ""
    for path, p in params.flatten(params.unstacked(stack)).items():
        original = params.flatten(DECLARED)[path]
        assert dataclasses.replace(p, spec=P()) == dataclasses.replace(original, spec=P())
        assert tuple(p.spec) == tuple(original.spec)


def test_every_weight_is_counted():
    assert params.count(DECLARED) == 4 * 8 * 6 + 6 * 8 + 8
    assert params.count(layout.declare(tiny.V3)) == sum(w.size for w in jax.tree.leaves(tiny.weights(tiny.V3)))


def test_what_does_not_fit_the_mesh_is_named():
    params.check(DECLARED, {"data": 3, "fsdp": 8, "expert": 4})
    with pytest.raises(MeshError) as error:
        params.check(DECLARED, {"data": 1, "fsdp": 3, "expert": 8})
    for weight in (
        "up has 4 to split over mesh.expert=8",
        "up has 8 to split over mesh.fsdp=3",
        "layer.down has 8 to split over mesh.fsdp=3",
    ):
        assert weight in str(error.value)
    assert "norm" not in str(error.value)


def test_every_weight_but_the_norms_is_split_over_fsdp():
    whole = {path.split(".")[-1] for path, p in params.flatten(layout.declare(tiny.V3)).items() if "fsdp" not in p.spec}
    assert whole == {"norm", "q_norm", "kv_norm", "embed_norm", "hidden_norm", "head_norm"}


def test_a_stepper_starts_in_its_shards_with_the_declared_weights():
    config = tiny.config(tiny.V2_LITE, mesh=(2, 2, 2))
    stepper = tiny.stepper(config)
    state = stepper.init()
    jax.tree.map(
        lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)), state, stepper.abstract_state
    )
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), state, stepper.abstract_state)
    )
    assert int(state.step) == 0
    declared = params.flatten(stepper.network.declared)
    for path, weight in jax.tree_util.tree_leaves_with_path(state.params):
        std = declared[params.name(path)].std
        if std is not None:
            assert np.std(weight) == pytest.approx(std, rel=0.3), path


def test_halves_have_every_weight_once_and_the_first_at_least_half_of_what_there_is():
    declared = params.unstacked(layout.declare(tiny.V3).moe_layers)
    whole = params.Exchange(declared, *[jnp.dtype("float32")] * 3).part(["dispatch", "experts"])
    paths, (first, second) = params.flatten(whole.declared), whole.halves()
    early, late = params.flatten(first.declared), params.flatten(second.declared)
    assert {**early, **late} == paths and not set(early) & set(late) and late
    assert sum(p.size for p in early.values()) >= sum(p.size for p in late.values())
    assert params.flatten(second.of(declared)) == late


@pytest.mark.parametrize("rings", [(), (8,), (2, 4), (4, 2), (2, 2, 2)])
def test_what_is_gathered_ring_by_ring_is_what_is_gathered_at_once(rings):
    mesh = mesh_lib.make(Mesh(data=1, fsdp=8, expert=1), jax.devices())
    whole = jnp.arange(48.0).reshape(3, 16)

    def per_device(x):
        return params.all_gather(x, 1, rings)

    gather = jax.shard_map(per_device, mesh=mesh, in_specs=P(None, "fsdp"), out_specs=P("data"), check_vma=False)
    np.testing.assert_array_equal(gather(whole), whole)


@pytest.mark.parametrize(
    ("ici", "dcn", "expected"),
    [
        ("float32", "float32", 1 + 2**-10 + 2**-11),
        ("bfloat16", "float32", 1 + 2**-11),  # 2**-10 is lost beside 1
        ("float32", "bfloat16", 1),  # and what DCN brings as well
    ],
)
def test_gradients_are_summed_in_one_dtype_over_ici_and_in_another_over_dcn(ici, dcn, expected):
    mesh = mesh_lib.make(Mesh(data=2, fsdp=2, expert=1), jax.devices()[:4])
    exchange = params.Exchange(Param((6,), P("fsdp")), *map(jnp.dtype, ("float32", ici, dcn)))

    def per_device():
        first = jnp.where(jax.lax.axis_index("fsdp") == 0, 1.0, 2**-10)
        mine = jnp.where(jax.lax.axis_index("data") == 0, first, 2**-12)
        return exchange.reduce(exchange.scatter(exchange.total([jnp.full(6, mine, jnp.float32)])))

    found = jax.shard_map(per_device, mesh=mesh, in_specs=(), out_specs=P("fsdp"), check_vma=False)()
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.full(6, expected, np.float32))

"""What would fit: bytes and seconds of a change, against sums worked out here from the shapes of a model."""

import dataclasses
import itertools
import math
import types

import jax
import pytest
import tiny

from maxds import host
from maxds.aot import remedies, report, topology
from maxds.config import Precision, Ramp

CHIP = topology.Chip("toy", 1, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 1e9, 4)  # host memory moves 1 GB/s
PEAK = 1e12
MESH = (2, 2, 2)


@pytest.fixture(autouse=True)
def links(monkeypatch):
    """All links are infinitely fast: CPU devices have no place in a torus."""
    link = types.SimpleNamespace(bandwidth=math.inf)
    monkeypatch.setattr(remedies, "Network", lambda *_: types.SimpleNamespace(link=lambda axes: link))


def kept(config):
    """Name -> bytes of a device in float32, of all layers, for one part of a batch."""
    m, tokens = config.model, tiny.ROWS * tiny.LENGTH // 8 // config.optimizer.accumulate_steps
    heads, dense, sparse = m.num_attention_heads, m.first_k_dense_replace, m.num_moe_layers + m.num_nextn_predict_layers
    parts = 2 if config.schedule.kind == "batch_split" else 1
    pairs = tokens // parts * 2 * m.num_experts_per_tok  # of a microbatch: `expert` brings those of two devices
    rows = parts * min(math.ceil(pairs / 2 * config.schedule.capacity / 8) * 8, pairs)
    stream = tokens * m.hidden_size + parts  # and the balance loss so far, a number
    numbers = {
        "attention_input": (dense + sparse) * stream,
        "attention": (dense + sparse) * tokens * heads * (m.v_head_dim + 1),  # and the log-sum-exp
        "mlp_input": dense * stream,
        "mlp_up": dense * tokens * 2 * m.intermediate_size,
        "dispatch_input": sparse * stream,
        "expert_up": sparse * rows * 2 * m.moe_intermediate_size,
    }
    return {name: 4 * count for name, count in numbers.items()}


def held(config):
    """Bytes of a device: the state, sums of gradients, and what is kept in its memory."""
    stepper, schedule = tiny.stepper(config), config.schedule

    def size(tree, away=False):
        found = [a for a in jax.tree.leaves(tree) if (a.sharding.memory_kind == host.KIND) == away]
        return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in found)

    names = {"attention_input", *schedule.keep} - set(schedule.offload)
    state = stepper.abstract_state
    weights, mtp = state.params, dataclasses.replace(state.params.mtp, layer=None)
    here = jax.tree.leaves(jax.eval_shape(stepper.on_devices, weights))
    shards = [math.prod(a.sharding.shard_shape(a.shape)) for a in jax.tree.leaves(weights)]
    copy = sum(count * a.dtype.itemsize for count, a in zip(shards, here, strict=True))
    found = copy + size(state.opt_state) + held_of_weights(config)
    comes_when_that_has_gone = size(state.opt_state, away=True) if config.optimizer.kind == "muon" else 0
    found += max(sum(kept(config)[n] for n in names), comes_when_that_has_gone)
    twice = weights.embed, weights.norm, weights.head, mtp  # of a part and of those before
    return found + (size(twice) if config.optimizer.accumulate_steps > 1 else 0)


@pytest.mark.parametrize("kind", ["plain", "batch_split"])
def test_what_is_kept_is_measured_by_name(kind):
    config = tiny.config(kind=kind, mesh=MESH)
    assert tiny.stepper(config).kept_bytes == kept(config)


BASE = tiny.config(kind="batch_split", mesh=MESH)


def changed(change, config=BASE):
    """The config with the overrides of a change, read as the command line would."""
    for override in change.overrides:
        path, text = override.split("=")
        section, key = path.split(".")
        old = getattr(getattr(config, section), key)
        value = tuple(filter(None, text[1:-1].split(","))) if text[0] == "[" else type(old)(text)
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{key: value})})
    return config


@pytest.mark.parametrize("missing", [1, 5_000, 20_000, 40_000, 50_000])
def test_every_change_saves_what_its_config_needs_less(missing):
    found = remedies.changes(tiny.stepper(BASE), CHIP, PEAK, missing)
    kinds = [frozenset(override.partition("=")[0] for override in change.overrides) for change in found]
    assert found and len(set(kinds)) == len(kinds)
    for change in found:
        # Scalars that count steps stay on the device
        assert change.saved == pytest.approx(held(BASE) - held(changed(change)), abs=8)
        assert change.saved >= missing


def held_of_weights(config):
    """Bytes of a device: the weights alone."""
    leaves = jax.tree.leaves(tiny.stepper(config).abstract_state.params)
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in leaves)


def test_optimizer_state_in_host_memory_comes_and_goes_once_a_step():
    found = remedies.changes(tiny.stepper(BASE), CHIP, PEAK, 1)
    (moved,) = (change for change in found if change.overrides == ("optimizer.state_memory=host",))
    moments = 2 * held_of_weights(BASE)
    assert moved.seconds == pytest.approx(2 * moments / 1e9, rel=1e-3)  # and scalars
    assert not moved.rounds


def test_weights_in_host_memory_come_twice_a_step_and_go_once():
    base = dataclasses.replace(BASE, precision=Precision(compute="bfloat16"))
    found = remedies.changes(tiny.stepper(base), CHIP, PEAK, 2 * held_of_weights(base) + 1)
    away = "optimizer.state_memory=host", "optimizer.params_memory=host"
    (moved,) = (change for change in found if change.overrides == away)
    assert moved.saved == pytest.approx(held(base) - held(changed(moved, base)), abs=8)
    assert moved.seconds == pytest.approx((2 * 2 + 3) * held_of_weights(base) / 1e9, rel=1e-3)


def test_weights_that_are_split_over_more_devices_travel_further(monkeypatch):
    """They are gathered twice and gradients scattered once, for each part: all but the share that a device has."""
    links = {("fsdp",): types.SimpleNamespace(bandwidth=1e6)}
    monkeypatch.setattr(remedies, "Network", lambda *_: types.SimpleNamespace(link=links.__getitem__))
    base = tiny.config(kind="plain", mesh=MESH, optimizer={"accumulate_steps": 2})
    found = remedies.changes(tiny.stepper(base), CHIP, PEAK, 1)
    (wider,) = (change for change in found if change.overrides == ("mesh.data=1", "mesh.fsdp=4"))
    weights = jax.tree.leaves(tiny.stepper(base).abstract_state.params)
    split = [w for w in weights if "fsdp" in str(w.sharding.spec)]
    whole = sum(2 * math.prod(w.sharding.shard_shape(w.shape)) for w in split)
    assert 0 < len(split) < len(weights)
    assert wider.seconds == pytest.approx(2 * (3 / 4 - 1 / 2) * whole * 3 * 4 / 1e6)


def test_what_layers_keep_is_the_same_with_weights_in_host_memory():
    away = dataclasses.replace(BASE.optimizer, state_memory="host", params_memory="host")
    kept = tiny.stepper(dataclasses.replace(BASE, optimizer=away)).kept_bytes
    assert kept == tiny.stepper(BASE).kept_bytes
    assert all(kept.values())


def test_parts_of_less_than_a_sequence_a_device_have_sequences_split():
    base = dataclasses.replace(BASE, model=tiny.FOUR_HEADS)
    found = remedies.changes(tiny.stepper(base), CHIP, PEAK, 1)
    split = [change for change in found if "mesh.context_parallel=true" in change.overrides]
    assert [change.overrides for change in split] == [("optimizer.accumulate_steps=2", "mesh.context_parallel=true")]
    m = base.model
    eights = 2 * 8 * 2 * m.moe_intermediate_size * 4 * (m.num_moe_layers + 1)  # room for routed rows is made by eights
    assert split[0].saved == pytest.approx(held(base) - held(changed(split[0], base)), abs=eights)


def computed_again(config):
    """Name -> seconds of a step, at the peak, where it is not kept."""
    m, tokens = config.model, tiny.ROWS * tiny.LENGTH / 8
    dense, sparse = m.first_k_dense_replace, m.num_moe_layers + m.num_nextn_predict_layers
    scores = m.num_attention_heads * (m.qk_head_dim + m.v_head_dim) * tiny.LENGTH / 2
    output = m.num_attention_heads * m.v_head_dim * m.hidden_size
    routed = config.schedule.capacity * m.num_experts_per_tok
    multiplies = {
        "attention": (dense + sparse) * scores,
        "mlp_input": dense * output,
        "mlp_up": dense * 2 * m.hidden_size * m.intermediate_size,
        "dispatch_input": sparse * output,
        "expert_up": sparse * routed * 2 * m.hidden_size * m.moe_intermediate_size,
    }
    return {name: 2 * tokens * count / PEAK for name, count in multiplies.items()}


def test_the_cheapest_of_a_kind_is_found():
    """Of all ways to drop or to send what layers keep that save so much, the one of the least seconds."""
    missing, again = 4000, computed_again(BASE)
    size = kept(BASE)
    seconds = []
    for sent_input in (False, True):
        for choice in itertools.product("keep send drop".split(), repeat=len(again)):
            to = dict(zip(again, choice, strict=True)) | {"attention_input": "send" if sent_input else "keep"}
            moved = sum(size[name] for name, where in to.items() if where == "send")
            lost = sum(again[name] for name, where in to.items() if where == "drop")
            if sum(size[name] for name, where in to.items() if where != "keep") >= missing:
                seconds.append(2 * moved / 1e9 + lost)
    found = remedies.changes(tiny.stepper(BASE), CHIP, PEAK, missing)
    (schedule,) = (c for c in found if all(o.startswith("schedule.") for o in c.overrides))
    assert schedule.seconds == pytest.approx(min(seconds))


def test_where_nothing_suffices_nothing_is_said():
    assert remedies.changes(tiny.stepper(BASE), CHIP, PEAK, 1e12) == []


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            tiny.FOUR_HEADS,
            "smaller parts of a batch may be, they need less of all else, too: optimizer.accumulate_steps=2",
        ),
        (BASE.model, "take more devices, or a smaller model or batch"),  # a sequence of each microbatch and device
    ],
)
def test_where_nothing_suffices_smaller_parts_are_named_if_there_are_any(model, told):
    parts = remedies.smaller_parts(tiny.stepper(dataclasses.replace(BASE, model=model)))
    assert report._remedies_text([], parts, 1e12).startswith("No change is enough, as far as shapes tell")
    assert told in report._remedies_text([], parts, 1e12)


def test_more_parts_leave_whole_ones_to_the_batches_of_a_ramp():
    config = tiny.config()
    ramp = Ramp(until_step=9, global_batch=8), Ramp(until_step=11, sequence_length=4)
    data = dataclasses.replace(config.data, global_batch=24, ramp=ramp)
    parts = dataclasses.replace(config.optimizer, accumulate_steps=3)
    found = remedies._parts(tiny.stepper(dataclasses.replace(config, data=data, optimizer=parts)))
    assert [setting["optimizer"]["accumulate_steps"] for setting in found] == [6, 12, 24]


@pytest.mark.parametrize("room", [1, 2_000, 5_000, 20_000, 1e6])
@pytest.mark.parametrize("offload", [(), ("mlp_up", "attention_input")])
def test_of_what_is_computed_again_the_best_that_there_is_room_for_is_found(room, offload):
    base = tiny.config(kind="batch_split", mesh=MESH, keep=("mlp_input",), offload=offload)
    found, size = remedies.spare(tiny.stepper(base), CHIP, PEAK, room), kept(base)
    again = {name: n for name, n in computed_again(base).items() if name not in ("mlp_input", *offload)}
    choices = [names for n in range(5) for names in itertools.combinations(again, n)]
    best = max(sum(again[n] for n in names) for names in choices if sum(size[n] for n in names) <= room)
    if best == 0:
        assert found is None
        return
    assert found.seconds == pytest.approx(-best)
    assert held(changed(found, base)) - held(base) == -found.saved <= room
    assert len(found.overrides) == 1 and not found.rounds


def test_where_nothing_is_computed_again_room_is_of_no_use():
    for config in (tiny.config(keep=("everything",)), BASE):
        assert remedies.spare(tiny.stepper(config), CHIP, PEAK, 1e12) is None

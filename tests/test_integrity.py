"""A device that computes or remembers wrongly is found, and named where it can be."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from maxds import integrity

MESH = (2, 2, 2)


@pytest.fixture(scope="module")
def state():
    return tiny.stepper(tiny.config(mesh=MESH)).init()


def devices():
    return tiny.stepper(tiny.config(mesh=MESH)).mesh.devices


def with_flipped_bit(array, device):
    """The array, of which one device's memory has lost a bit."""
    shards = []
    for shard in array.addressable_shards:
        held = np.array(shard.data)
        if shard.device == device:
            held.view(np.uint32).reshape(-1)[-1] ^= 1 << 7
        shards.append(jax.device_put(held, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def test_copies_that_agree_are_let_be(state):
    integrity.check_copies(state, devices(), step=3, sound=2)


def test_a_device_whose_copy_of_a_replicated_array_has_another_bit_is_named(state):
    wrong = devices()[1, 0, 1]
    bias = state.router_bias | {"moe_layers": with_flipped_bit(state.router_bias["moe_layers"], wrong)}
    with pytest.raises(
        integrity.CorruptionError,
        match=rf"after step 3, device {wrong.id} of process 0 hold .* Checkpoints after step 2,",
    ):
        integrity.check_copies(dataclasses.replace(state, router_bias=bias), devices(), step=3, sound=2)


def test_of_two_copies_of_a_shard_both_are_named(state):
    first, second = devices()[:, 1, 0]
    params = dataclasses.replace(state.params, embed=with_flipped_bit(state.params.embed, second))
    with pytest.raises(
        integrity.CorruptionError, match=rf"device {first.id} of process 0, device {second.id} of process 0 hold"
    ):
        integrity.check_copies(dataclasses.replace(state, params=params), devices(), step=3, sound=2)

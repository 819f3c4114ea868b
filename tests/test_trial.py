"""The trial of a device's kernels finds those that are right right, and what is wrong wrong."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from maxds import doctor, trial
from maxds.model import kernels
from maxds.model.tiles import causal

pytestmark = pytest.mark.oldest

V3 = dataclasses.replace(tiny.V3, hidden_size=16)
V4 = dataclasses.replace(tiny.V4, hidden_size=16, index_head_dim=16)
V32 = dataclasses.replace(tiny.V32, hidden_size=16, index_head_dim=16)


@pytest.fixture
def _tpu(interpreted, monkeypatch):
    """The device, of which there is one here, computes first, with the kernels for TPU as Pallas interprets them."""
    turns, run = [], trial._run

    def in_turn(*args):
        jax.clear_caches()
        turns.append(len(turns) % 2 == 0)
        return run(*args)

    monkeypatch.setattr(trial, "_run", in_turn)
    monkeypatch.setattr(kernels, "is_tpu", lambda: turns[-1])
    monkeypatch.setattr(kernels, "rounds_rows", lambda: turns[-1])
    monkeypatch.setattr(trial, "HEADS", 2)
    monkeypatch.setattr(trial, "LENGTH", 1024)


def differences(model, float8=False):
    (cpu, *_) = jax.devices()
    return trial.differences(model, float8, cpu, cpu)


@pytest.mark.usefixtures("_tpu")
def test_kernels_that_are_right_differ_by_their_roundings():
    found = differences(V32, float8=True)
    ours = {"grouped matmul", "gated rows", "experts in float8", "attention", "attention to selected", "index"}
    assert set(found) == {"sum of rows"} | ours
    assert all(0 < found[name] <= doctor.MAX_DIFFERENCE for name in ours)


@pytest.mark.usefixtures("_tpu")
def test_a_block_of_padding_alone_is_not_compared(monkeypatch):
    (cpu, *_) = jax.devices()
    monkeypatch.setattr(trial, "LENGTH", 640)  # five blocks, the last of padding
    assert 0 < trial._difference(trial._attention(V3, None), cpu, cpu) <= doctor.MAX_DIFFERENCE


@pytest.mark.usefixtures("_tpu")
def test_those_of_v4_are_tried_too(monkeypatch):
    windows = {"attention to a window" + more for more in ("", " and entries of 3", " and entries of 4")}
    assert set(trial._trials(V4, False)) == {"grouped matmul", "gated rows", "sum of rows", "index"} | windows
    (cpu, *_) = jax.devices()
    for ratio, length in ((0, 256), (3, 256), (4, 4096)):  # of fewer entries no tile is selected
        monkeypatch.setattr(trial, "LENGTH", length)
        assert 0 < trial._difference(trial._window(V4, ratio), cpu, cpu) <= doctor.MAX_DIFFERENCE


@pytest.mark.usefixtures("_tpu")
@pytest.mark.parametrize(("wrong", "by"), [("attend", 0.9), ("attend_backward", 0.9), ("attend_backward", np.nan)])
def test_a_kernel_that_is_wrong_in_one_block_is_told(wrong, by, monkeypatch):
    right = getattr(causal, wrong)

    def spoiled(*args, **more):
        first, *others = right(*args, **more)
        return first.at[:, :, 128:256].multiply(by), *others

    (cpu, *_) = jax.devices()
    monkeypatch.setattr(causal, wrong, spoiled)
    assert set(trial._trials(V3, False)) == {"grouped matmul", "gated rows", "sum of rows", "attention"}
    assert not trial._difference(trial._attention(V3, None), cpu, cpu) <= doctor.MAX_DIFFERENCE

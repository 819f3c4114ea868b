"""Programs for Hopper GPUs hold the kernels meant for them. What these compute, `maxds.doctor` tries on the GPU."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from maxds.model import hopper, kernels, rounded
from maxds.quantize import BACKWARD, FORWARD, Quantized, quantize, vjp

BF16 = jnp.bfloat16


def of(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture(params=["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def gpu(request, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(core_count=132)])  # read by JAX's kernel
    device = AbstractDevice(request.param, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("alone",), abstract_device=device)):
        yield


def lowered(fn, *args):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def attend(q, k, v, dout, sight):
    out, pull = jax.vjp(lambda q, k, v: kernels.attention(q, k, v, sight)[0], q, k, v)
    return out, pull(dout)


def attention_shapes(length, dtype=BF16):
    q, own, v, dout = (of(2, 4, length, size, dtype=dtype) for size in (192, 128, 128, 128))
    angles = of(2, length, 64, dtype=jnp.float32)
    sight = kernels.Sight(of(2, length, dtype=jnp.int32), None, angles, angles)
    return q, (own, of(2, length, 64, dtype=dtype)), v, dout, sight


@pytest.mark.filterwarnings("ignore:The out_shape and scratch_shapes arguments")  # about the code of tokamax 0.0.12
def test_attention_is_one_kernel_forward_and_two_backward(gpu):
    text = lowered(attend, *attention_shapes(256))
    assert text.count("@mosaic_gpu_v2") == 3 and "stablehlo.while" not in text


@pytest.mark.parametrize("shapes", [attention_shapes(192), attention_shapes(256, jnp.float32)], ids=["192", "float32"])
def test_attention_that_the_kernel_does_not_take_is_by_xla(gpu, shapes):
    assert "mosaic_gpu" not in lowered(attend, *shapes)


def test_a_grouped_matmul_is_three_kernels(gpu):
    def multiply(x, w, dy, sizes):
        y, pull = jax.vjp(lambda x, w: kernels.grouped_matmul(x, w, sizes), x, w)
        return y, pull(dy)

    text = lowered(multiply, of(512, 256), of(4, 256, 128), of(512, 128), of(4, dtype=jnp.int32))
    assert text.count("@mosaic_gpu_v2") == 3 and "chlo.ragged_dot" not in text


def test_experts_in_float8_are_six_kernels(gpu):
    def multiply(x, up, down, weights, dy, sizes):
        x = Quantized(quantize(x, FORWARD, over=(1,)), gradient="scaled")
        w = tuple(Quantized(quantize(a, FORWARD, over=(1, 2)), gradient="scaled") for a in (up, down))
        y, pull = vjp(lambda x, w: rounded.multiplied(None, x, w, weights, sizes)[0], x, w)
        return y, pull(quantize(dy, BACKWARD, over=(1,)))

    rows, weights, sizes = of(512, 256), of(512, dtype=jnp.float32), of(4, dtype=jnp.int32)
    text = lowered(multiply, rows, of(4, 256, 256), of(4, 128, 256), weights, rows, sizes)
    assert text.count("@mosaic_gpu_v2") == 6 and "chlo.ragged_dot" not in text


def test_bfloat16_holds_every_float8_as_it_is():
    for kind in (FORWARD, BACKWARD):
        all_values = jnp.arange(256, dtype=jnp.uint8).view(kind)
        np.testing.assert_array_equal(all_values.astype(BF16).astype(jnp.float32), all_values.astype(jnp.float32))


def test_a_query_sees_the_keys_from_the_first_of_its_document():
    rows = [[1] * 3 + [2] * 2 + [5] + [0] * 2, [0] * 8, [3] * 8]
    expected = [[row.index(document) for document in row] for row in rows]
    np.testing.assert_array_equal(hopper._first_keys(jnp.array(rows, jnp.int32))[:, 0], expected)

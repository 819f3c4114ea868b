"""float8: each rounding is as small as the format allows, and nothing loses its scale.

Errors are bounded, number by number, by what rounding can do: half a unit in the last place of every operand, carried
through the product in float64.
"""

import functools

import jax
import jax.numpy as jnp
import jaxprs
import ml_dtypes
import numpy as np
import pytest
import qwix
import tiny
from jax.sharding import PartitionSpec as P

from maxds import mesh as mesh_lib
from maxds import params
from maxds.config import Mesh
from maxds.mesh import AXES
from maxds.model import kernels, moe, ops, rounded
from maxds.quantize import BACKWARD, FORWARD, Quantized, Scaled, dequantized, named, quantize, vjp

both_formats = pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
both_dtypes = pytest.mark.parametrize("compute", [jnp.float32, jnp.bfloat16])


def uneven(shape, dtype=np.float32, seed=0, *axes):
    """Normal numbers; along each of `axes`, magnitudes over 2^10."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    for axis in axes:
        sizes = [n if i == axis else 1 for i, n in enumerate(shape)]
        x *= np.exp2(rng.permutation(np.linspace(-10, 0, shape[axis]))).reshape(sizes)
    return np.asarray(x, dtype)


def rounding(x, dtype, over):
    """The most by which rounding can change each number: relative, or half of the smallest step."""
    info = ml_dtypes.finfo(dtype)
    largest = np.max(np.abs(x), axis=over, keepdims=True)
    scale = 2 * largest / float(info.max)  # at most: it is rounded up to a power of two
    return np.maximum(np.abs(x) * 2.0 ** -(info.nmant + 1), scale * float(info.smallest_subnormal) / 2)


def product_error(subscripts, a, b, error_a, error_b):
    """Of a product whose operands are wrong by so much."""
    a, b = np.abs(a), np.abs(b)
    return np.einsum(subscripts, a + error_a, b + error_b) - np.einsum(subscripts, a, b)


def assert_within(found, exact, bound, compute):
    """Within the bound, and what `compute` and the order of sums add."""
    own = 2.0 ** -jnp.finfo(compute).nmant
    excess = np.abs(np.asarray(found, np.float64) - exact) - bound * (1 + own) - own * np.abs(exact)
    assert excess.max() <= 4e-6 * np.abs(exact).max(), excess.max()


# ----------------------------------------------------------------------------------------- rounding


@both_formats
@both_dtypes
def test_rounding_is_to_the_nearest_number_of_the_format(dtype, compute):
    x = uneven((16, 64), compute, 0, 0, 1).astype(np.float64)
    q = quantize(jnp.asarray(x, compute), dtype, over=(1,))
    assert (q.qvalue.dtype, q.scale.dtype, q.scale.shape) == (dtype, compute, (16, 1))
    found = np.asarray(qwix.dequantize(q), np.float64)
    assert (np.abs(found - x) <= rounding(x, dtype, 1)).all()


@both_formats
def test_the_largest_number_fits_and_scales_are_powers_of_two(dtype):
    most = float(jnp.finfo(dtype).max)
    x = np.array([[most], [most * 1.01], [most / 2], [1.0], [3e-30], [2e30]], np.float32)
    q = quantize(jnp.asarray(x), dtype, over=(1,))
    assert np.asarray(q.scale)[:3, 0].tolist() == [1, 2, 0.5]
    mantissas, _ = np.frexp(np.asarray(q.scale))
    np.testing.assert_array_equal(mantissas, 0.5)
    values = np.asarray(q.qvalue, np.float32)
    assert (values > most / 2 * (1 - 2**-4)).all() and (values <= most).all()


@both_formats
def test_nothing_is_nothing_and_what_is_not_finite_stays_so(dtype):
    q = quantize(jnp.array([[0.0, 0], [1, jnp.nan], [jnp.inf, 1], [1, 2]]), dtype, over=(1,))
    np.testing.assert_array_equal(qwix.dequantize(q)[jnp.array([0, 3])], [[0, 0], [1, 2]])
    assert not np.isfinite(qwix.dequantize(q)[jnp.array([1, 2]), jnp.array([1, 0])]).any()


@both_formats
@both_dtypes
def test_quantizing_again_changes_nothing(dtype, compute):
    """So what was gathered in float8 is multiplied as it was rounded before it travelled."""
    x = jnp.asarray(uneven((64, 64), np.float32, 0, 0, 1), compute)
    once = qwix.dequantize(quantize(x, dtype, over=(1,)))
    np.testing.assert_array_equal(qwix.dequantize(quantize(once, dtype, over=(1,))), once)


# ------------------------------------------------------------------------------------------ products

PRODUCTS = {  # a row's inputs, by the weights' inputs, outputs
    "bsd,dq->bsq": ((2, 5, 24), (24, 7)),
    "bsq,qnh->bnsh": ((2, 5, 24), (24, 3, 6)),
    "bnsv,ndv->bsd": ((2, 3, 5, 8), (3, 7, 8)),
    "bgnsh,gnhr->bsgr": ((2, 4, 3, 5, 8), (4, 3, 8, 7)),
}


@pytest.mark.parametrize("subscripts", PRODUCTS)
def test_gradients_of_a_product_are_those_of_its_definition_and_of_the_weight_heads_come_first(subscripts):
    x, w = (uneven(shape, np.float32, i) for i, shape in enumerate(PRODUCTS[subscripts]))
    y, pull = jax.vjp(functools.partial(jnp.einsum, subscripts), x, w)
    dy = uneven(y.shape, np.float32, 2)

    def learn(x, w, dy):
        y, pull = jax.vjp(functools.partial(ops.matmul, subscripts), x, w)
        return y, *pull(dy)

    for found, expected in zip(learn(x, w, dy), (y, *pull(dy)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    equations = jaxprs.equations(jax.make_jaxpr(learn)(x, w, dy).jaxpr)
    turned = [eqn.invars[0].aval.shape for name, eqn, _ in equations if name == "optimization_barrier"]
    assert turned == {"bsq,qnh->bnsh": [(3, 6, 24)], "bnsv,ndv->bsd": [(3, 8, 7)]}.get(subscripts, [])


def weight(w, over, compute):
    return Quantized(quantize(jnp.asarray(w), FORWARD, over).astype(compute), jnp.zeros(w.shape, compute))


def axes(letters, within):
    return tuple(i for i, letter in enumerate(within) if letter in letters)


def summed(operand, result):
    return tuple(i for i, letter in enumerate(operand) if letter not in result)


def gradient_rounding(dy, over, scale):
    """Of dy, which is rounded, the axes `over` together, once `scale`, of the other operand, is multiplied into it."""
    return rounding(dy * scale, BACKWARD, over) / scale


@both_dtypes
@pytest.mark.parametrize("subscripts", PRODUCTS)
def test_a_float8_matmul_is_wrong_by_what_rounding_its_operands_can_do(subscripts, compute):
    of_x, of_w, of_y = subscripts.replace("->", ",").split(",")
    x_shape, w_shape = PRODUCTS[subscripts]
    rows, outputs, inputs, inputs_w = axes(of_y, of_x), axes(of_y, of_w), summed(of_x, of_y), summed(of_w, of_y)
    x, w = uneven(x_shape, compute, 0, *rows), uneven(w_shape, np.float32, 1, *outputs)
    dy = uneven(np.einsum(subscripts, x, w).shape, compute, 2)

    @jax.jit
    def learn(x, w, dy):
        y, pull = jax.vjp(functools.partial(ops.matmul, subscripts), x, weight(w, inputs_w, compute))
        return y, *pull(dy), [quantize(a, FORWARD, over).scale for a, over in ((w, inputs_w), (x, inputs))]

    y, dx, dw, scales = learn(x, w, dy)
    x, w, dy, scale_w, scale_x = (np.float64(a) for a in (x, w, dy, *scales))
    error_x, error_w = rounding(x, FORWARD, inputs), rounding(w, FORWARD, inputs_w)
    along_y = [np.einsum(f"{of},{of_y}->{of_y}", a, np.ones(dy.shape)) for of, a in ((of_w, scale_w), (of_x, scale_x))]
    for_x = gradient_rounding(dy, summed(of_y, of_x), along_y[0])
    for_w = gradient_rounding(dy, summed(of_y, of_w), along_y[1])
    for found, terms, operands, errors in (
        (y, subscripts, (x, w), (error_x, error_w)),
        (dx, f"{of_y},{of_w}->{of_x}", (dy, w), (for_x, error_w)),
        (dw.slot, f"{of_x},{of_y}->{of_w}", (x, dy), (error_x, for_w)),
    ):
        assert found.dtype == compute
        assert_within(found, np.einsum(terms, *operands), product_error(terms, *operands, *errors), compute)


ROWS, SIZES = 30, np.array([7, 0, 12, 9], np.int32)  # two rows belong to no group


@functools.cache
def grouped_products(form, compute):
    """(x, w, dy) -> (y, dx, dw), rows and gradients rounded, by the form of CPUs in blocks of 4 rows or of others."""

    def both(x, w, dy):
        x, dy, w = quantize(x, FORWARD, (1,)), quantize(dy, BACKWARD, (1,)), weight(w, (1, 2), compute).array
        sizes = jnp.asarray(SIZES)
        y, dx = rounded._product(x, w, sizes), rounded._product(dy, w, sizes, transposed=True)
        return y.whole(), dx.whole(), rounded._weight_gradient(x, dy, sizes).whole()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "ROW_BLOCK", 4)
        patch.setattr(jax.lax, "platform_dependent", lambda *args, **forms: forms[form](*args))
        for name in jaxprs.KERNELS:
            patch.setattr(kernels, name, getattr(kernels, name).__wrapped__)
        return jax.jit(both).lower(*(jnp.asarray(a) for a in grouped_inputs(compute))).compile()


def grouped_inputs(compute):
    """Rows, experts and the columns of experts of very different sizes."""
    w = uneven((len(SIZES), 16, 5), np.float32, 1, 0, 2)
    return uneven((ROWS, 16), compute, 0, 0), w, uneven((ROWS, 5), compute, 2)


@both_dtypes
@pytest.mark.parametrize("form", ["cpu", "default"])
def test_a_float8_grouped_matmul_is_wrong_by_what_rounding_its_operands_can_do(form, compute):
    x, w, dy = grouped_inputs(compute)
    y, dx, dw = grouped_products(form, compute)(*map(jnp.asarray, (x, w, dy)))
    x, w, dy = (np.float64(a) for a in (x, w, dy))
    error_x, error_w = rounding(x, FORWARD, 1), rounding(w, FORWARD, (1, 2))
    scale_x = np.float64(quantize(jnp.asarray(x), FORWARD, (1,)).scale)
    # Of the weight's gradient, what is below the least number of all that have one scale in common is lost, too.
    for_x = rounding(dy, BACKWARD, 1)
    for_w = for_x + rounding(dy * scale_x, BACKWARD, (0, 1)).min() / scale_x
    ends = np.cumsum(SIZES)
    for g, (first, end) in enumerate(zip(ends - SIZES, ends, strict=True)):
        own = slice(first, end)
        for found, terms, operands, errors in (
            (y[own], "ri,io->ro", (x[own], w[g]), (error_x[own], error_w[g])),
            (dx[own], "ro,io->ri", (dy[own], w[g]), (for_x[own], error_w[g])),
            (dw[g], "ri,ro->io", (x[own], dy[own]), (error_x[own], for_w[own])),
        ):
            if end > first:
                assert_within(found, np.einsum(terms, *operands), product_error(terms, *operands, *errors), compute)
    for found in (y[ends[-1] :], dx[ends[-1] :], dw[1]):
        np.testing.assert_array_equal(found, 0)


def experts(limit=None):
    """Experts in float8: a function of rows, of which two belong to none, matrices and weights; these; a cotangent."""
    shapes = (ROWS, 16), (len(SIZES), 16, 24), (len(SIZES), 12, 16), (ROWS,), (ROWS, 16)
    x, up, down, weights, dy = (jnp.asarray(uneven(shape, seed=i)) for i, shape in enumerate(shapes))
    x = Quantized(quantize(x, FORWARD, (1,)), gradient="scaled")
    w = tuple(Quantized(quantize(a, FORWARD, (1, 2)), gradient="scaled") for a in (up, down))
    dy = quantize(jnp.where(jnp.arange(ROWS)[:, None] < SIZES.sum(), dy, 0), BACKWARD, (1,))

    def run(x, w, weights, kept=None):
        return rounded.multiplied(limit, x, w, weights, jnp.asarray(SIZES), kept)

    return run, (x, w, weights), dy


def with_gradients(run, args, dy, kept=None):
    y, pull = vjp(lambda *args: run(*args, kept)[0], *args)
    return y, pull(dy)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_experts_in_float8_are_as_far_from_exact_ones_as_their_formats(limit):
    run, args, dy = experts(limit)
    y, (dx, dw, dweights) = with_gradients(run, args, dy)

    def exact(x, w, weights):
        up = kernels.grouped_matmul(x, w[0], jnp.asarray(SIZES))
        return kernels.grouped_matmul(ops.swiglu(up, limit) * weights[:, None], w[1], jnp.asarray(SIZES))

    of_exact = jax.tree.map(lambda a: dequantized(a), args, is_leaf=lambda a: isinstance(a, Quantized))
    expected, pull = jax.vjp(exact, *of_exact)
    expected = expected, pull(qwix.dequantize(dy))
    found = y.array.whole(), (dx.whole(), [d.whole() for d in dw], dweights)
    *pairs, of_weights = zip(*map(jax.tree.leaves, (found, expected)), strict=True)
    for (a, b), digits in zip(pairs, (4, 3, 3, 3), strict=True):
        a, b = (np.float64(n[: SIZES.sum()]) for n in (a, b))  # rows; of experts there are fewer
        assert 0 < np.linalg.norm(a - b) <= 2.0**-digits * np.linalg.norm(b)
    np.testing.assert_allclose(*of_weights, rtol=1e-5)  # made before anything is rounded


def test_replayed_experts_in_float8_multiply_only_for_the_gradient():
    run, args, dy = experts()
    kept = run(*args)[1]
    once, again = with_gradients(run, args, dy), with_gradients(run, args, dy, kept)
    jax.tree.map(np.testing.assert_array_equal, again, once)
    found = jaxprs.count(jaxprs.live(lambda *given: with_gradients(run, *given)[1], args, dy, kept))
    assert (found["multiply_groups"], found["multiply_groups_transposed"]) == (2, 2)


def test_a_replayed_float8_product_multiplies_only_for_the_gradient():
    x, w, dy = (jnp.asarray(a) for a in grouped_inputs(np.float32))
    x, w, dy = x[None], weight(w[0], (0,), jnp.float32), dy[None]

    def gradient(x, slot, dy, kept=None):
        return jax.vjp(lambda x, slot: moe.kept_product(x, w.replace(slot=slot), kept), x, slot)[1](dy)

    kept = moe.kept_product(x, w, None)
    once, again = gradient(x, w.slot, dy), gradient(x, w.slot, dy, kept)
    jax.tree.map(np.testing.assert_array_equal, again, once)
    assert jaxprs.count(jaxprs.live(gradient, x, w.slot, dy, kept))["dot_general"] == 2


# ------------------------------------------------------------------------------------------- travel


def on_mesh(fn, sizes, inputs, outputs):
    """`fn`, of one device, on a mesh of `sizes`."""
    mesh = mesh_lib.make(Mesh(**dict(zip(AXES, sizes, strict=True))), jax.devices()[: np.prod(sizes)])
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False))


LAYER = params.unstacked(tiny.layout.declare(tiny.V3).moe_layers)  # `attention.out` is split over its outputs


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 4, 2), (2, 2, 2)])
def test_gathered_weights_keep_the_scales_of_their_values_and_are_the_same_on_every_mesh(sizes):
    exchange = params.Exchange(LAYER, *map(jnp.dtype, ("bfloat16", "float32", "float32")), matmul="fp8")

    def gathered(shards):
        w = exchange.gather(shards, exchange.quantize(shards))
        return params.derive(lambda _, w: dequantized(w), LAYER, w)

    def one(p):  # columns, or experts, of very different sizes
        own = [i for i in range(len(p.shape)) if i not in p.one_scale] if p.in_float8("fp8") else []
        return uneven(p.shape, np.float32, 3, *own)

    def check(p, w, found):
        if not p.in_float8("fp8"):
            np.testing.assert_array_equal(found, w)
            return
        expected = np.asarray(qwix.dequantize(quantize(jnp.asarray(w), FORWARD, p.one_scale)))
        assert (np.abs(expected - np.float64(w)) <= rounding(np.float64(w), FORWARD, p.one_scale)).all()
        np.testing.assert_array_equal(np.asarray(found, np.float32), expected.reshape(found.shape))

    weights = params.derive(one, LAYER)
    split_over_experts = params.derive(lambda p: P("expert" if "expert" in p.spec else None), LAYER)
    found = on_mesh(gathered, sizes, (params.specs(LAYER),), split_over_experts)(weights)
    params.derive(check, LAYER, weights, found)


def whole_of(x):
    return qwix.dequantize(x) if isinstance(x, qwix.QArray) else dequantized(x)


def with_gradient(move, x, dy, spec_of_y, **how):
    """y and dx of 8 devices: rows are split over both axes, or where gathered over `fsdp`."""

    def both(x, dy):
        y, pull = vjp(move, Quantized(x, **how) if how else x)
        return whole_of(y), whole_of(*pull(dy))

    whole, split = P("fsdp"), P(("fsdp", "expert"))
    of_x, of_y = (split, whole) if spec_of_y == "gathered" else (whole, split)
    return [np.float64(a) for a in on_mesh(both, (1, 2, 4), (of_x, of_y), (of_y, of_x))(x, dy)]


def test_dispatched_tokens_keep_their_scales_and_gradients_are_summed_without_rounding():
    x, dy = uneven((16, 24), np.float32, 0, 0), uneven((16, 24), np.float32, 1)
    y, dx = with_gradient(moe.all_gather_float8, x, dy, "gathered")
    exact, exact_dx = with_gradient(moe.all_gather, x, dy, "gathered")
    np.testing.assert_array_equal(exact, x)
    np.testing.assert_array_equal(dx, exact_dx)
    assert (np.abs(y - x) <= rounding(exact, FORWARD, 1)).all()


def test_sums_of_experts_are_not_rounded_and_their_gradients_keep_their_scales():
    x, dy = uneven((16, 24), np.float32, 0), uneven((16, 24), np.float32, 1, 0)
    y, dx = with_gradient(moe.reduce_scatter_float8, x, dy, "scattered", gradient="float8")
    exact, exact_dx = with_gradient(moe.reduce_scatter, x, dy, "scattered")
    np.testing.assert_array_equal(y, exact)
    assert (np.abs(dx - exact_dx) <= rounding(exact_dx, BACKWARD, 1)).all()
    assert (dx != exact_dx).any()


def test_the_sum_of_rows_whose_scales_are_still_to_be_multiplied_is_that_of_the_rows():
    rng = np.random.default_rng(0)
    a, b = (
        Scaled(jnp.asarray(rng.integers(-8, 9, (5, 3)), jnp.float32), jnp.exp2(rng.integers(-3, 4, (5, 1))))
        for _ in range(2)
    )
    np.testing.assert_array_equal((a + b).whole(), a.whole() + b.whole())


def test_the_largest_numbers_of_float8_are_kept_as_they_are():
    largest = float(jnp.finfo(FORWARD).max)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("kept"))
    def product(x, w):
        return jnp.sum(named(x.astype(FORWARD), "kept").astype(jnp.float32) * w)

    x = jnp.asarray([largest, -largest, 1.0])
    np.testing.assert_array_equal(jax.jit(jax.grad(product, argnums=1))(x, jnp.ones(3)), x)

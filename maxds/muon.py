"""Muon: a matrix moves along its orthogonalized momentum (Jordan et al. 2024; Moonlight, arXiv 2502.16982; V4, section
2.4, arXiv 2606.19348).

Its shards travel for that: of each stack of matrices, every device along `fsdp` is sent some, whole, orthogonalizes
them one after the other, and sends them back. So nothing is computed twice along `fsdp`, no device holds more than one
matrix's temporaries, and a stack takes as much room again as its shards.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from maxds import params as params_lib
from maxds.config import Optimizer
from maxds.params import Param, Tree

_FAST, _EXACT = (3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)
# Of Newton-Schulz, one by one: optax makes a loop of them, not a sequence
_STEPS = {"jordan": (_FAST,) * 5, "deepseek_v4": (_FAST,) * 8 + (_EXACT,) * 2}


def direction(config: Optimizer, declared: Tree, mesh: Mesh | None) -> optax.GradientTransformation:
    """Where hidden matrices are to move; what is no hidden matrix is not to be given to it.

    What is stacked (layers, experts, gate beside up) is many matrices; what has several input or output dimensions
    (heads) is one.

    Args:
      config: `eps` is added to the norm that a matrix is divided by. Shards are exchanged in `state_dtype`, in which
        momentum is stored: what is lost of them is lost already. What is computed of them is in that of the gradients.
      declared: every weight.
      mesh: that the gradients lie on. None: updates are not asked for.
    """
    steps, travels = _STEPS[config.muon_iteration], jnp.dtype(config.state_dtype)
    one = optax.contrib.muon(
        -1.0, steps, len(steps), beta=0.0, nesterov=False, eps=config.eps, consistent_rms=config.muon_rms
    )

    def orthogonalize(matrix: jax.Array) -> Any:
        return one.update(matrix, one.init(matrix), matrix)[0]

    def of_weight(p: Param, gradient: Tree) -> Tree:
        if isinstance(gradient, optax.MaskedNode):
            return gradient
        exchange = functools.partial(_by_matrix, p, orthogonalize, travels)
        return jax.shard_map(exchange, mesh=mesh, in_specs=p.spec, out_specs=p.spec, check_vma=False)(gradient)

    orthogonalized = optax.stateless(lambda updates, _: params_lib.derive(of_weight, declared, updates))
    return optax.chain(optax.trace(config.muon_momentum, nesterov=True), orthogonalized)


def _by_matrix(p: Param, fn: Callable, travels: jnp.dtype, x: jax.Array) -> jax.Array:
    """Maps `fn` ([I O] -> [I O]) over the matrices of which this is a device's shard."""
    stacked, inside = ([i for kind in kinds for i, d in enumerate(p.dims) if d == kind] for kinds in ("b", "io"))
    order = stacked + inside
    shards = x.transpose(order).reshape(-1, *(x.shape[i] for i in inside))
    if "fsdp" not in p.spec:
        found = _each(p, fn, shards)
    else:
        split = 1 + inside.index(p.spec.index("fsdp"))
        padding = -len(shards) % lax.axis_size("fsdp")
        # The barrier: XLA's CPU compiler fails on an exchange of which it knows that some parts are zeros.
        padded = jnp.pad(shards.astype(travels), [(0, padding)] + [(0, 0)] * len(inside))
        whole = lax.all_to_all(lax.optimization_barrier(padded), "fsdp", 0, split, tiled=True)
        found = _each(p, fn, whole.astype(x.dtype)).astype(travels)
        found = lax.all_to_all(found, "fsdp", split, 0, tiled=True)[: len(shards)].astype(x.dtype)
    back = sorted(range(len(order)), key=order.__getitem__)
    return found.reshape([x.shape[i] for i in order]).transpose(back)


def _each(p: Param, fn: Callable, stack: jax.Array) -> jax.Array:
    """Maps `fn` over a stack of whole matrices, whose inputs and outputs may be several dimensions each."""
    inputs = p.dims.count("i")
    shape = stack.shape[1 : 1 + inputs], stack.shape[1 + inputs :]
    matrices = stack.reshape(len(stack), *map(math.prod, shape))
    return lax.map(fn, matrices).reshape(stack.shape)

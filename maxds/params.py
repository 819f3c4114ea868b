"""Weights are declared once; everything else about them is derived from the declaration.

    declaration -> shapes, shardings, init, counts, masks           (ordinary global arrays)
                -> Exchange: quantize, gather, scatter, reduce, finish, fetch (inside shard_map: one device's program)

The way of a gradient: `scatter` sums it over `fsdp` and leaves each device its shard, `reduce` sums
the shards over the other axes; it is added to what `begin` starts from, and `finish` sums those of
the few weights that are too small to be split.

The loss does not depend on `so_far`, the gradients of the batch's parts before, and yet it is differentiated with
respect to these: the backward rule of a weight that is fetched returns them plus this part's gradient. So gradients are
summed as they arrive, in a dtype of their own (`precision.grads`), and never lie in memory twice. The weights
themselves get no gradient, and each is fetched once.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from qwix import QArray

from maxds import host
from maxds.mesh import AXES, MeshError
from maxds.quantize import FORWARD, Quantized, Scaled, Tree, quantize, slots, with_slots


@dataclasses.dataclass(frozen=True)
class Param:
    """One weight: its shape, the mesh axis each dimension is split over, and how it starts.

    `dims` has a letter for each dimension of a hidden matrix: i(nput) and o(utput) features,
    b(atch) for stacked matrices. It is empty for what is not one (norms, embedding, head).
    """

    shape: tuple[int, ...]
    spec: P
    dims: str = ""
    std: float | None = None  # None: ones
    start: tuple[float, ...] = ()  # or these, along the last dimension
    decay: bool = True
    float32: bool = False  # whatever others are stored and computed with in
    rate: float = 1.0  # times the learning rate
    table: bool = False  # its rows travel, and not it (`maxds.tables`)

    def stacked(self, n: int) -> "Param":
        """`n` of these in one array."""
        dims = "b" + self.dims if self.dims else ""
        return dataclasses.replace(self, shape=(n, *self.shape), spec=P(None, *self.spec), dims=dims)

    def stored_in(self, dtype: DTypeLike) -> jnp.dtype:
        """Its dtype where `precision.params` is this."""
        return jnp.dtype(jnp.float32 if self.float32 else dtype)

    @property
    def size(self) -> int:
        """Numbers in the array."""
        return math.prod(self.shape)

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """Of each dimension, the mesh axes that it is split over."""
        given = (() if by is None else (by,) if isinstance(by, str) else tuple(by) for by in self.spec)
        return *given, *((),) * (len(self.shape) - len(self.spec))

    def parts(self, sizes: dict[str, int]) -> list[int]:
        """How many parts each dimension is split into on a mesh of these sizes."""
        return [math.prod(sizes.get(axis, 1) for axis in over) for over in self.axes]

    def shard(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """The shape of a device's part on a mesh of these sizes."""
        return tuple(n // parts for n, parts in zip(self.shape, self.parts(sizes), strict=True))

    @property
    def beside(self) -> bool:
        """Whether it is matrices side by side, [... I n O], which are gathered and used as one, [... I n*O].

        Joining the whole ones instead would copy them: on TPU, n is a dimension of the tiles.
        """
        return self.dims.endswith("ibo")

    @property
    def of_experts(self) -> bool:
        """Whether it is of routed experts, each of which a device along `expert` has."""
        return "expert" in self.spec

    def in_float8(self, matmul: str) -> bool:
        """Whether it is gathered and multiplied in float8, by `precision.matmul`: a matrix, and not in float32."""
        wanted = matmul == "fp8" or (matmul == "fp8_experts" and self.of_experts)
        return wanted and bool(self.dims) and not self.float32

    @property
    def one_scale(self) -> tuple[int, ...]:
        """The dimensions that share a scale in float8: an output feature has its own, or an expert.

        A scale of each feature of each expert would be a factor of the size of the grouped matmul's result.
        """
        return tuple(i for i, letter in enumerate(self.dims) if (i > 0 if self.of_experts else letter == "i"))


def derive(fn: Callable, declared: Tree, *trees: Tree) -> Tree:
    """Maps `fn(param, ...)` over a declaration and trees of its structure."""
    return jax.tree.map(fn, declared, *trees, is_leaf=_is_param)


def flatten(declared: Tree) -> dict[str, Param]:
    """Path -> declaration, such as `moe_layers.experts.up`."""
    leaves = jax.tree_util.tree_leaves_with_path(declared, is_leaf=_is_param)
    return {name(path): p for path, p in leaves}


def name(path: tuple) -> str:
    """A path as a dotted name."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _is_param(x: Any) -> bool:
    return isinstance(x, Param)


def _is_param_or_none(x: Any) -> bool:
    return x is None or _is_param(x)


def stacked(declared: Tree, n: int) -> Tree:
    """The declaration of a stack of `n` layers."""
    return derive(lambda p: p.stacked(n), declared)


def unstacked(declared: Tree) -> Tree:
    """The declaration of one layer of a stack."""

    def one(p: Param) -> Param:
        return dataclasses.replace(p, shape=p.shape[1:], spec=P(*p.spec[1:]), dims=p.dims[1:])

    return derive(one, declared)


def specs(declared: Tree) -> Tree:
    """The mesh axis that each dimension of each weight is split over."""
    return derive(lambda p: p.spec, declared)


def shardings(declared: Tree, mesh: Mesh, tables: str | None = None, others: str | None = None) -> Tree:
    """Where each weight lies. Tables and the others are in these kinds of memory, by default the devices'."""
    return derive(lambda p: NamedSharding(mesh, p.spec, memory_kind=tables if p.table else others), declared)


def parts(declared: Tree, tree: Tree) -> dict[str, Tree]:
    """What is updated apart: `weights`, and `tables` if any. Each is a tree, with None in place of the others."""
    found = {
        name: derive(lambda p, x, own=own: x if p.table == own else None, declared, tree)
        for name, own in (("weights", False), ("tables", True))
    }
    return {name: part for name, part in found.items() if jax.tree.leaves(part, is_leaf=_is_param)}


def joined(parts: Sequence[Tree]) -> Tree:
    """The tree that has these `parts`; what two of them have, of the first."""

    def one(*of_parts: Any) -> Any:
        return next((x for x in of_parts if x is not None), None)

    return jax.tree.map(one, *parts, is_leaf=lambda x: x is None)


def count(declared: Tree) -> int:
    """Numbers in all weights."""
    return sum(p.size for p in flatten(declared).values())


def check(declared: Tree, sizes: dict[str, int]) -> None:
    """Raises MeshError, naming every weight that the mesh cannot split evenly."""
    wrong = [
        f"{path} has {n} to split over {' x '.join(f'mesh.{axis}={sizes[axis]}' for axis in over)}"
        for path, p in flatten(declared).items()
        for n, over, parts in zip(p.shape, p.axes, p.parts(sizes), strict=True)
        if n % parts
    ]
    if wrong:
        shown = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise MeshError(f"the model does not fit the mesh: {shown}. Choose axis sizes that divide these dimensions")


def init(declared: Tree, seed: jax.Array | int, dtype: jnp.dtype) -> Tree:
    """Draws the weights, in `dtype` or float32. Each has the key of its own path: adding one never moves another.

    They are the same on every mesh, but for last bits that a compiler rounds differently for shards of another shape.
    What is stacked is drawn a layer at a time: drawing needs room for a few copies of what is drawn.
    """

    def one(path, p: Param) -> jax.Array:
        own = p.stored_in(dtype)
        if p.start:
            return jnp.broadcast_to(jnp.asarray(p.start, own), p.shape)
        if p.std is None:
            return jnp.ones(p.shape, own)

        def draw(shape: tuple[int, ...], key: jax.Array, std: float = p.std) -> jax.Array:
            return (std * jax.random.normal(key, shape, jnp.float32)).astype(own)

        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name(path).encode()))
        if len(p.shape) < 3:
            return draw(p.shape, key)
        return lax.map(functools.partial(draw, p.shape[1:]), jax.random.split(key, p.shape[0]))

    return jax.tree_util.tree_map_with_path(one, declared, is_leaf=_is_param)


# ---------------------------------------------------------------- inside shard_map: one device's program


def no_grads(weights: Tree, dtype: DTypeLike = jnp.float32) -> Tree:
    """Gradients so far, before there are any: of the weights' shapes, and where these lie."""
    return jax.tree.map(lambda w: host.zeros(w, jnp.dtype(dtype)), weights)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How the weights of one declaration travel, and their gradients."""

    declared: Tree
    compute: jnp.dtype  # of gathered weights
    reduced: jnp.dtype  # of sums of gradients over ICI
    reduced_dcn: jnp.dtype  # and over `data`
    matmul: str = "compute"  # `precision.matmul`: which weights travel in float8
    rings: tuple[int, ...] = ()  # of `mesh.rings`: how to gather over `fsdp`; all at once where there are none

    def part(self, names: Sequence[str]) -> "Exchange":
        """Of some entries of what is declared."""
        return dataclasses.replace(self, declared={name: self.declared[name] for name in names})

    def halves(self) -> tuple["Exchange", "Exchange"]:
        """Of what is declared, what comes first, half of its values or more, and the rest; None where the other is."""
        leaves, structure = jax.tree.flatten(self.declared, is_leaf=_is_param)
        sizes = np.array([math.prod(p.shape) for p in leaves])
        first = np.cumsum(sizes) - sizes < np.sum(sizes) / 2

        def half(chosen: Sequence[bool]) -> "Exchange":
            kept = [p if mine else None for p, mine in zip(leaves, chosen, strict=True)]
            return dataclasses.replace(self, declared=jax.tree.unflatten(structure, kept))

        return half(first), half(~first)

    def of(self, tree: Tree) -> Tree:
        """What is declared here, of a tree."""
        own = {name: tree[name] for name in self.declared}
        return jax.tree.map(lambda p, x: None if p is None else x, self.declared, own, is_leaf=_is_param_or_none)

    def quantize(self, shards: Tree) -> Tree:
        """The shards that travel in float8, with the scales of whole weights; None for the others.

        To be done for all layers at once (`jax.vmap`): shards of one column agree on its scale, or each has those of
        its own columns. A layer would have to wait for either.
        """

        def one(p: Param, x: jax.Array) -> Quantized | None:
            if not p.in_float8(self.matmul):
                return None
            along = p.spec.index("fsdp")
            shared = along in p.one_scale
            array = quantize(lax.stop_gradient(x), FORWARD, p.one_scale, "fsdp" if shared else None)
            array = array.astype(self.compute)
            scale = array.scale if shared else all_gather(array.scale, along, self.rings)
            return Quantized(QArray(array.qvalue, scale))

        return derive(one, self.declared, shards)

    def gather(self, shards: Tree, quantized: Tree) -> Tree:
        """All-gathers FSDP shards. Routed experts stay split over `expert`: tokens travel, experts do not.

        All have arrived when the first is used: TPU's SparseCores end what they do in the order in which they begin it,
        so a gather that is not due yet would be waited for by whatever small thing is sent after it.

        Gate beside up arrives as it is read: where its transpose is read, too, TPU's compiler would copy it twice.

        Args:
          shards: of one layer.
          quantized: as `quantize` returned it.
        """

        def whole(p: Param, x: jax.Array, travels: bool = True) -> jax.Array:
            x = x.reshape(*x.shape[:-2], -1) if p.beside else x
            x = all_gather(x, p.spec.index("fsdp"), self.rings) if travels else x
            return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if p.beside else x

        def one(p: Param, x: jax.Array, q: Quantized | None) -> jax.Array | Quantized:
            if q is None:
                return whole(p, x.astype(jnp.float32 if p.float32 else self.compute), "fsdp" in p.spec)
            array = QArray(whole(p, q.array.qvalue), whole(p, q.array.scale, travels=False))
            return Quantized(array, gradient="scaled" if p.of_experts else "whole")

        return lax.optimization_barrier(derive(one, self.declared, shards, quantized))

    def total(self, dws: Sequence[Tree]) -> Tree:
        """The sum of gradients of gathered weights, in the dtype in which they travel."""

        def one(p: Param, *found: jax.Array | Scaled) -> jax.Array:
            same = [g.astype(self.reduced if "fsdp" in p.spec else jnp.float32) for g in found]
            return functools.reduce(jnp.add, [g.whole() if isinstance(g, Scaled) else g for g in same])

        return derive(one, self.declared, *dws)

    def scatter(self, dw: Tree) -> Tree:
        """The transpose of `gather`, of a `total`."""

        def one(p: Param, g: jax.Array) -> jax.Array:
            if "fsdp" not in p.spec:
                return g
            g = lax.psum_scatter(g, "fsdp", scatter_dimension=p.spec.index("fsdp"), tiled=True)
            return g.reshape(*g.shape[:-1], p.shape[-2], -1) if p.beside else g

        return derive(one, self.declared, lax.optimization_barrier(dw))

    def shards(self, params: Tree) -> Tree:
        """Zeros of the shapes and dtypes that `scatter` gives, for the shards of one layer's weights."""
        return self.scatter(self.total([slots(self.gather(params, self.quantize(params)))]))

    def reduce(self, shards: Tree) -> Tree:
        """Sums scattered gradients over `expert`, unless they are split over it, and `data`; only shards cross DCN.

        Over `expert` all in one array: a sum of a few bytes, TPU's compiler would neither join to others nor hide.
        """

        def copied(p: Param, g: jax.Array) -> jax.Array | None:
            return g if "fsdp" in p.spec and not p.of_experts else None

        joined, split = ravel_pytree(derive(copied, self.declared, shards))
        summed = split(lax.psum(joined, "expert"))

        def one(p: Param, g: jax.Array, summed: jax.Array | None) -> jax.Array:
            if "fsdp" not in p.spec:
                return g.astype(jnp.float32)
            g = g if summed is None else summed
            return lax.psum(g.astype(self.reduced_dcn), "data").astype(jnp.float32)

        return derive(one, self.declared, shards, summed)

    def begin(self, so_far: Tree) -> Tree:
        """What reduced gradients are added to, to be given to `finish`."""

        def one(p: Param, g: jax.Array) -> jax.Array:
            return g if "fsdp" in p.spec else jnp.zeros(g.shape, jnp.float32)

        return derive(one, self.declared, so_far)

    def finish(self, grads: Tree, so_far: Tree) -> Tree:
        """The gradients on top of those so far, in the dtype of these.

        Those of weights that are whole on every device are summed here: once a part of a batch, not once a layer.
        """

        def one(p: Param, g: jax.Array, before: jax.Array) -> jax.Array:
            g = g if "fsdp" in p.spec else lax.psum(g, AXES) + before.astype(jnp.float32)
            return g.astype(before.dtype)

        return derive(one, self.declared, grads, so_far)

    def fetch(self, shards: Tree, quantized: Tree, so_far: Tree) -> Tree:
        """As `gather`; the gradient of `so_far` is that, plus the weights' own: scattered, reduced and finished."""

        @jax.custom_vjp
        def run(so_far, w):
            return slots(w)

        def backward(before, dw):
            found = self.reduce(self.scatter(self.total([dw])))
            begun = jax.tree.map(lambda g, more: g.astype(jnp.float32) + more, self.begin(before), found)
            return self.finish(begun, before), None

        run.defvjp(lambda so_far, w: (slots(w), so_far), backward)
        w = lax.stop_gradient(self.gather(shards, quantized))
        return with_slots(w, run(so_far, w))


def all_gather(x: jax.Array, axis: int, rings: Sequence[int]) -> jax.Array:
    """All-gathers over `fsdp` along a dimension: at once, or over one ring after the other, the innermost first."""
    gather = functools.partial(lax.all_gather, axis_name="fsdp", axis=axis, tiled=True)
    if len(rings) < 2:
        return gather(x)
    inner = 1
    for size in reversed(rings):
        groups = np.arange(math.prod(rings)).reshape(-1, size, inner).swapaxes(1, 2).reshape(-1, size)
        x = gather(x, axis_index_groups=groups.tolist())
        inner *= size
    return x

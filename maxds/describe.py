"""What a config amounts to, before anything runs: parameters, FLOPs, bytes of a device. Touches no device."""

import math
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from maxds import flops, optimizer, update
from maxds import mesh as mesh_lib
from maxds import params as params_lib
from maxds.architecture import Model
from maxds.config import Config
from maxds.model import engram, layout
from maxds.params import Param, Tree

Row = tuple[str, ...]


def describe(config: Config, devices: int | None = None) -> str:
    """Parameters by block, FLOPs of a token, and bytes of a device, as text.

    Args:
      config: of the run.
      devices: how many the run has. By default `mesh.cpu_devices`; where that is not set either, an axis of -1 counts
        as 1, and the text says so.

    Raises:
      mesh.MeshError: the mesh does not fit the devices, or the model does not fit the mesh.
    """
    declared = layout.declare(config.model)
    asked = [getattr(config.mesh, axis) for axis in mesh_lib.AXES]
    devices = devices or config.mesh.cpu_devices
    assumed = "; the axis of -1 counts as 1" if -1 in asked and devices is None else ""
    axes = mesh_lib.sizes(config.mesh, devices or math.prod(n for n in asked if n != -1))
    params_lib.check(declared, axes)
    mesh = " ".join(f"{axis}={n}" for axis, n in axes.items())
    length = config.data.sequence_length
    return "\n".join(
        [
            *table(("parameters", "shape", "of one layer", "of all", "split over"), _weights(config.model)),
            "",
            *table(("counts", "parameters"), _counts(config.model)),
            "",
            *table((f"training FLOPs of a token at {length}", "GFLOP", "share"), _flops(config.model, length)),
            f"({flops.FORMULA})",
            "",
            *table((f"a device of {mesh}{assumed}", "bytes", "GiB"), _bytes(held(config, axes))),
            "(activations, and what the compiler adds, come on top)",
        ]
    )


def counts(model: Model) -> dict[str, int]:
    """Parameters, router biases included, as model cards count them.

    Returns:
      `total` and `active` of the model without MTP, and those of its MTP modules, `mtp` and `mtp_active`. Active are
      all but the routed experts that a token does not go to and the rows of Engrams that it does not look up; embedding
      and head are among them.
    """
    sizes = {block: sum(p.size for p in weights.values()) for block, weights in _blocks(model).items()}
    mtp = sizes.pop("mtp", 0)
    total = sum(sizes.values())
    idle = 3 * model.hidden_size * model.moe_intermediate_size * (model.n_routed_experts - model.num_experts_per_tok)
    tables = [engram.declare(model, layer).table.size for layer in model.engram_layer_ids]
    return {
        "total": total,
        "active": total - model.num_moe_layers * idle - sum(tables) + len(tables) * model.engram_dim,
        "mtp": mtp,
        "mtp_active": mtp - model.num_nextn_predict_layers * idle,
    }


def _blocks(model: Model) -> dict[str, dict[str, Param]]:
    """Block -> path in it (empty where the block is one weight) -> weight. State that is like weights is included."""
    biases = jax.eval_shape(lambda: layout.router_bias(model))
    stacks = {layout.bias_name(stack): Param(b.shape, PartitionSpec()) for stack, b in biases.items()}
    blocks: dict[str, dict[str, Param]] = {}
    for path, p in (params_lib.flatten(layout.declare(model)) | stacks).items():
        block, _, inner = path.removeprefix("cut_layers.").partition(".")
        blocks.setdefault(block, {})[inner] = p
    return blocks


def table(head: Row, rows: Iterable[Row]) -> Iterator[str]:
    """Columns as wide as they must be; after the first, those of numbers are flush right."""
    rows = [head, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    right = [i > 0 and any(row[i][:1].isdigit() for row in rows[1:]) for i in range(len(head))]
    for row in rows:
        cells = zip(row, widths, right, strict=True)
        yield "  ".join(f"{cell:>{width}}" if r else f"{cell:<{width}}" for cell, width, r in cells).rstrip()


def _weights(model: Model) -> Iterator[Row]:
    """A row for each weight; those of a stack of layers under a row for the stack."""
    for block, weights in _blocks(model).items():
        layers = next(iter(weights.values())).shape[0] if block in (*layout.stacks(model), "mtp") else 0
        if layers:
            size = sum(p.size for p in weights.values())
            yield f"{block} x {layers}", "", f"{size // layers:,}", f"{size:,}", ""
        for path, p in weights.items():
            shape = " x ".join(map(str, p.shape[1:] if layers else p.shape))
            one = f"{p.size // layers:,}" if layers else ""
            split = " ".join(axis for over in p.axes for axis in over) or "-"
            yield f"  {path}" if layers else ".".join(filter(None, (block, path))), shape, one, f"{p.size:,}", split


def _counts(model: Model) -> Iterator[Row]:
    found = counts(model)
    yield "total", f"{found['total']:,}"
    yield "active for a token", f"{found['active']:,}"
    if found["mtp"]:
        yield "MTP modules, on top", f"{found['mtp']:,}"
        yield "active of these", f"{found['mtp_active']:,}"


def _flops(model: Model, length: int) -> Iterator[Row]:
    blocks = flops.per_token(model, length)
    for name, count in blocks.items():
        if count:
            yield name, f"{count / 1e9:,.4f}", f"{count / blocks['total']:.1%}"


def _bytes(held: dict[str, int]) -> Iterator[Row]:
    for name, size in (held | {"sum": sum(held.values())}).items():
        yield name, f"{size:,}", f"{size / 2**30:,.2f}"


def held(config: Config, axes: dict[str, int]) -> dict[str, int]:
    """Bytes that a device of a mesh of these axes holds for a whole step, by kind, as far as the declaration says."""
    declared = layout.declare(config.model)
    if config.schedule.tables == "host":
        declared = params_lib.parts(declared, declared)["weights"]
    optimizer.check(config.optimizer, layout.paths(config.model))
    precision, kind, state = config.precision, config.optimizer.kind, config.optimizer.state_dtype

    def shards(of: Tree) -> Tree:
        return params_lib.derive(lambda p: _part(p, axes, p.stored_in(precision.params)), of)

    local, here = shards(declared), precision.params
    grads = params_lib.derive(lambda p: _part(p, axes, precision.grads), declared)
    if config.optimizer.params_memory == "host":
        here = f"a copy in {precision.compute}"
        local = params_lib.derive(
            lambda p: _part(p, axes, precision.compute if update.is_cast(p) else p.stored_in(precision.params)),
            declared,
        )
    # Moments have the shapes of what they are made for: made for a device's shards, they are its part of the state.
    kept = declared if config.optimizer.state_memory == "device" else params_lib.parts(declared, declared).get("tables")
    moments = jax.eval_shape(optimizer.make(config.optimizer, kept, None).init, shards(kept))
    split = config.schedule.kind == "batch_split"
    # Those of a part, beside those of the parts before. `batch_split` adds each layer's as they arrive.
    beside = 0 if config.optimizer.accumulate_steps == 1 else _size(grads.outside() if split else grads)
    layers = 2 if split else 1
    matmul = precision.matmul

    def gathered(weights: Tree) -> int:
        def one(p: Param) -> jax.ShapeDtypeStruct:
            narrow = "float8_e4m3fn" if p.in_float8(matmul) else precision.compute
            return _part(p, axes | {"fsdp": 1}, "float32" if p.float32 else narrow)

        return _size(params_lib.derive(one, weights))

    around = declared.embed, declared.hyper, declared.norm, declared.head
    turn = layout.stacks(config.model)["moe_layers"].turns(params_lib.unstacked(declared.moe_layers))
    found = {
        f"parameters, {here}": _size(local),
        f"optimizer state, {kind} in {state}": _size(moments),
        f"gradients, {precision.grads}" + (", of a part and of those before" if beside else ""): _size(grads) + beside,
        "embedding and head, gathered": gathered(around),
        f"MoE layers gathered at a time: {layers}": layers * max(map(gathered, turn)),
    }
    if precision.float8:
        rounded = params_lib.derive(
            lambda p: _part(p, axes, "float8_e4m3fn") if p.in_float8(matmul) else None, declared
        )
        found["parameters of matmuls, float8, without scales"] = _size(rounded)
    return found


def _part(p: Param, axes: dict[str, int], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """What one device holds of a weight."""
    return jax.ShapeDtypeStruct(p.shard(axes), jnp.dtype(dtype))


def _size(shapes: Tree) -> int:
    """Bytes."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes))

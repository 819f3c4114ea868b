"""What attention needs of the tokens so far when one more follows, for the layers of a stack that are of one kind.

Latent attention (`Latents`) needs neither keys nor values: the normalized latent and the one rotated key of each token
stand for those of all heads (DeepSeek-V2, section 2.1). An indexer's one key comes on top.

V4's attention (`Recent`) needs the keys of its window, the entries of what is compressed, and of the block that is not
whole yet what its entry will be made of. So it grows with S / ratio, and not with S.

Both are of sequences that begin at their rows' first position, and in the compute dtype.

An Engram (`Echoes`) needs the tokens of the n-grams that are to come, and what its convolution reaches back to.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from maxds.architecture import OVERLAPPED, Model
from maxds.model import attention, compressed, engram, indexer, kernels, ops, residual, window
from maxds.model.deepseek import Context
from maxds.model.residual import Stream
from maxds.model.tiles import Turn
from maxds.params import Tree
from maxds.schedule import Given, at


def empty(c: Model, ratio: int | None, layers: int, sequences: int, size: int) -> Any:
    """The cache of so many layers of this ratio, of sequences of up to `size` tokens, in float32."""
    shape = layers, sequences

    def zeros(*sizes: int) -> jax.Array:
        return jnp.zeros((*shape, *sizes))

    def pool(width: int) -> Pool:
        blocks = 2 if ratio == OVERLAPPED else 1
        token = zeros(blocks * (ratio or 0), blocks * width)
        return Pool(token, token, zeros(max(size // (ratio or 1), 1), width), ratio or 0)

    if ratio is None:
        index = None if c.index_topk is None else zeros(size, c.index_head_dim)
        return Latents(zeros(size, c.kv_lora_rank), zeros(size, c.qk_rope_head_dim), index)
    return Recent(
        near=zeros(min(c.sliding_window, size), c.head_dim),
        far=pool(c.head_dim) if ratio else None,
        index=pool(c.index_head_dim) if ratio == OVERLAPPED else None,
        ratio=ratio,
    )


def silence(c: Model, sequences: int) -> "Echoes":
    """The cache of an Engram of sequences that have not begun."""
    reach = (c.engram_kernel_size - 1) * c.engram_max_ngram_size
    tokens = jnp.zeros((sequences, c.engram_max_ngram_size - 1), jnp.int32)
    return Echoes(tokens, jnp.zeros((sequences, c.hc_mult or 1, reach, c.hidden_size)))


# --------------------------------------------------------------------------------------------- latents


@flax.struct.dataclass
class Latents:
    """Of multi-head latent attention, of L layers and sequences of up to S tokens."""

    latent: jax.Array  # [L B S C], normalized
    rope: jax.Array  # [L B S qk_rope_head_dim], rotated
    index: jax.Array | None  # [L B S index_head_dim]: keys of the indexer; None without

    def prefill(self, c: Model, w: Any, x: Stream, context: Context, i: jax.Array) -> tuple[Stream, "Latents"]:
        """The stage `attend` of layer `i`, for prompts; and the cache with them."""

        def read(q, latents, index):
            selected = None if index is None else indexer.select(c, index, context.segments)
            own, v = attention.expanded(w, latents[0])
            sight = kernels.Sight(context.segments, selected, *context.rope)
            out = kernels.attention(q, (own, latents[1]), v, sight)[0]
            return out, self._with(i, context.positions, latents, index)

        return attention.attend_to(c, w, x, context.rope, read)

    def step(self, c: Model, w: Any, x: Stream, context: Context, i: jax.Array) -> tuple[Stream, "Latents"]:
        """The same for one more token of each sequence."""

        def read(q, latents, index):
            written = self._with(i, context.positions, latents, index)
            latent, rope, keys = at((written.latent, written.rope, written.index), i)
            seen = jnp.arange(latent.shape[1]) <= context.positions[..., None]
            if index is not None:
                seen = indexer.select_among(c, index, keys, seen)
            return attention.absorbed(c, w, ops.rotate(q, context.rope), (latent, rope), seen), written

        return attention.attend_to(c, w, x, context.rope, read)

    def _with(self, i: jax.Array, positions: jax.Array, latents: tuple, index: indexer.Index | None) -> "Latents":
        """With what belongs at positions [B s] of their sequences."""
        rows, stored = jnp.arange(positions.shape[0])[:, None], (self.latent, self.rope, self.index)
        entries = *latents, None if index is None else index.k
        return Latents(*jax.tree.map(lambda a, entry: a.at[i, rows, positions].set(entry), stored, entries))


# ------------------------------------------------------------------------------------------- V4's attention


@flax.struct.dataclass
class Pool:
    """What a compressor of T = ratio, or 2 ratio where blocks overlap, has made, and will make entries of."""

    values: jax.Array  # [L B T P]: as `compressed.projected`; that of position p at p % T
    gates: jax.Array  # [L B T P]
    entries: jax.Array  # [L B E H]
    ratio: int = flax.struct.field(pytree_node=False)

    def prefill(self, c: Model, w: Any, y: jax.Array, given: tuple, i: jax.Array) -> "Pool":
        """With the blocks of normalized prompts [B S D]; `given`: these blocks, and lengths [B]."""
        blocks, lengths = given
        entries = compressed.compress(c, w, y, blocks)
        size, dtype = entries.shape[1], self.entries.dtype
        last = [_last(found, lengths, self.values.shape[2]) for found in compressed.projected(w, y)]
        values, gates = (_put(a, i, found) for a, found in zip((self.values, self.gates), last, strict=True))
        entries = self.entries.at[i, :, :size].set(entries.astype(dtype))
        return dataclasses.replace(self, values=values, gates=gates, entries=entries)

    def step(self, c: Model, w: Any, y: jax.Array, positions: jax.Array, i: jax.Array) -> "Pool":
        """With normalized tokens [B 1 D] at positions [B], and the entries of the blocks that these complete."""
        rows, kept = jnp.arange(len(y)), self.values.shape[2]
        values, gates = (
            a.at[i, rows, positions % kept].set(found[:, 0])
            for a, found in zip((self.values, self.gates), compressed.projected(w, y), strict=True)
        )
        block, place = positions // self.ratio, positions % self.ratio
        table = ops.rope_table(c.qk_rope_head_dim, c.compress_rope_theta, c.rope_scaling, (block * self.ratio)[:, None])
        blocks = [self._blocks(at(a, i), block) for a in (values, gates)]
        first = jnp.broadcast_to((block == 0)[:, None], blocks[0].shape[:2])
        entry = compressed.pool(c, w, (blocks[0], blocks[1]), first, table)[:, -1]
        where = jnp.where(place == self.ratio - 1, block, self.entries.shape[2])
        entries = self.entries.at[i, rows, where].set(entry, mode="drop")
        return dataclasses.replace(self, values=values, gates=gates, entries=entries)

    def _blocks(self, kept: jax.Array, block: jax.Array) -> jax.Array:
        """[B T P] -> [B n ratio P]: the n blocks up to `block` [B], in their order."""
        count = kept.shape[1] // self.ratio
        places = (block[:, None] + 1 + jnp.arange(count)) % count
        kept = kept.reshape(len(kept), count, self.ratio, -1)
        return jnp.take_along_axis(kept, places[:, :, None, None], axis=1)


@flax.struct.dataclass
class Recent:
    """Of V4's attention, of L layers and windows of W tokens."""

    near: jax.Array  # [L B W H]: keys; that of position p at p % W
    far: Pool | None  # None: there is only the window
    index: Pool | None  # the indexer's own; None without
    ratio: int = flax.struct.field(pytree_node=False)

    def prefill(self, c: Model, w: Any, x: Stream, context: Context, i: jax.Array) -> tuple[Stream, "Recent"]:
        """The stage `attend` of layer `i`, for prompts; and the cache with them.

        What is kept is written as if made anew: the compiler makes it once.
        """
        y, x = residual.read(c, w.hyper, x)
        added, _, _ = compressed.attention(c, self.ratio, w, y, Given(None, context))
        y, rope = ops.rms_norm(y, w.norm, c.rms_norm_eps), self._rope(context)
        lengths = jnp.sum(context.segments, axis=1)
        near = _put(self.near, i, _last(compressed.keys_of(c, w, y, rope), lengths, self.near.shape[2]))
        far, index = self.far, self.index
        if far is not None:
            given = compressed.find_blocks(self.ratio, context.segments, context.positions, rope), lengths
            far = far.prefill(c, w.compressor, y, given, i)
            index = index and index.prefill(c, w.indexer.compressor, y, given, i)
        return residual.add(x, added), dataclasses.replace(self, near=near, far=far, index=index)

    def step(self, c: Model, w: Any, x: Stream, context: Context, i: jax.Array) -> tuple[Stream, "Recent"]:
        """The same for one more token of each sequence."""
        y, x = residual.read(c, w.hyper, x)
        y, rope, positions = ops.rms_norm(y, w.norm, c.rms_norm_eps), self._rope(context), context.positions[:, 0]
        latent, q = compressed.queries(c, w, y)
        near, size = self.near, self.near.shape[2]
        key = compressed.keys_of(c, w, y, rope)[:, 0]
        near = near.at[i, jnp.arange(len(key)), positions % size].set(key)
        keys, seen = at(near, i), jnp.arange(size) <= positions[:, None]
        far, index = self.far, self.index
        if far is not None:
            far = far.step(c, w.compressor, y, positions, i)
            whole = jnp.arange(far.entries.shape[2]) < ((positions + 1) // self.ratio)[:, None]
            if index is not None:
                index = index.step(c, w.indexer.compressor, y, positions, i)
                asked = compressed.ask(c, w.indexer, y, latent, rope, at(index.entries, i))
                whole = indexer.select_among(c, asked, asked.k, whole[:, None])[:, 0]
            keys, seen = (jnp.concatenate(a, 1) for a in ((keys, at(far.entries, i)), (seen, whole)))
        turn = Turn(rope[0], rope[1], c.rms_norm_eps)
        out, _ = window.attend_to(ops.ready(q, turn), keys, w.sinks, seen[:, None])
        x = residual.add(x, compressed.project(c, w, window.turned_back(out, turn)))
        return x, dataclasses.replace(self, near=near, far=far, index=index)

    def _rope(self, context: Context) -> Tree:
        return context.far_rope if self.ratio else context.rope


def _last(x: jax.Array, lengths: jax.Array, size: int) -> jax.Array:
    """Of tokens [B S P], the last `size` of each length [B]: that of position p at p % size, and else anything."""
    last = lengths[:, None] - 1
    places = jnp.maximum(last - (last - jnp.arange(size)) % size, 0)
    return jnp.take_along_axis(x, places[..., None], axis=1)


# ------------------------------------------------------------------------------------------------ Engram

LookUp = Callable[[jax.Array, jax.Array], jax.Array]
"""(tokens [B s], segments [B s]) -> what an Engram has of them, [B s engram_dim]."""


@flax.struct.dataclass
class Echoes:
    """Of an Engram, of B sequences: the last of what it reaches back to, in order."""

    tokens: jax.Array  # [B N-1] int32, of N-grams
    fed: jax.Array  # [B n T D] float32: as `engram.admit`

    def prefill(self, c: Model, w: engram.Engram, x: Stream, context: Context, look_up: LookUp):
        """As `engram.remember`, for prompts; and the cache with them."""
        tokens, segments = context.tokens, context.segments
        gated, fed = engram.admit(c, w, x, look_up(tokens, segments))
        convolved, lengths = engram.convolve(c, w.conv, fed, segments), jnp.sum(segments, axis=1)
        kept = _end(tokens, lengths, self.tokens.shape[1], 1), _end(fed, lengths, self.fed.shape[2], 2)
        return engram.add(x, gated, convolved), Echoes(*kept)

    def step(self, c: Model, w: engram.Engram, x: Stream, context: Context, look_up: LookUp):
        """The same for one more token of each sequence."""

        def begun(size: int) -> jax.Array:
            """Of the last `size` positions, which there are: [B size]."""
            return (context.positions + jnp.arange(1 - size, 1) >= 0).astype(jnp.int32)

        tokens = jnp.concatenate([self.tokens, context.tokens], axis=1)
        gated, fed = engram.admit(c, w, x, look_up(tokens, begun(tokens.shape[1]))[:, -1:])
        fed = jnp.concatenate([self.fed, fed], axis=2)
        convolved = engram.convolve(c, w.conv, fed, begun(fed.shape[2]))[:, :, -1:]
        return engram.add(x, gated, convolved), Echoes(tokens[:, 1:], fed[:, :, 1:])


def _end(x: jax.Array, lengths: jax.Array, size: int, axis: int) -> jax.Array:
    """Of rows [B …], what lies in front of each length [B]: `size` along an axis; zeros before the start."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (size, 0)
    return jax.vmap(lambda row, n: lax.dynamic_slice_in_dim(row, n, size, axis - 1))(jnp.pad(x, pad), lengths)


def _put(stacked: jax.Array, i: jax.Array | int, layer: jax.Array) -> jax.Array:
    """The stack with layer `i` replaced."""
    return lax.dynamic_update_index_in_dim(stacked, layer.astype(stacked.dtype), i, 0)

"""V4's attention: to a window of tokens, and to entries that each stand for a block of them.

A layer of ratio r makes an entry of every r tokens of a document: of each channel a mean, whose weights are a softmax
over the block. With r = 4 blocks overlap: an entry also pools the block before its own, by another projection, and an
indexer selects the entries that a query attends to. Blocks begin where documents begin, and what is left of a document
that is not a whole block has no entry: so a packed document gets what it would get alone.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from maxds.architecture import OVERLAPPED, Model
from maxds.model import indexer, kernels, residual, window
from maxds.model.attention import norm
from maxds.model.indexer import Attended, Index
from maxds.model.kernels import Keys, Routes
from maxds.model.ops import RopeTable, matmul, rms_norm, rotate
from maxds.model.residual import Stream
from maxds.model.tiles import Turn
from maxds.params import Param, Tree
from maxds.schedule import Given


@flax.struct.dataclass
class Compressor:
    """Weights that make entries. Where blocks overlap, what a token gives the next block's comes first: P = 2 H."""

    kv: Tree  # [D P]
    gate: Tree  # [D P]
    bias: Tree  # [ratio P], of the gates
    norm: Tree  # [H]


@flax.struct.dataclass
class Indexer:
    """Weights of one layer's indexer, of I heads."""

    q: Tree  # [q_lora_rank I index_head_dim]
    heads: Tree  # [D I]: what each head counts for
    compressor: Compressor  # of its own keys, [index_head_dim]


@flax.struct.dataclass
class CompressedAttention:
    """Weights of one layer's attention. G groups of heads have an output projection of their own."""

    norm: Tree  # [D]
    q_down: Tree  # [D Q]
    q_norm: Tree  # [Q]
    q_up: Tree  # [Q N H]
    kv: Tree  # [D H]: key and value, one for all heads
    kv_norm: Tree  # [H]
    sinks: Tree  # [N]
    out_down: Tree  # [G N/G H o_lora_rank]
    out_up: Tree  # [G o_lora_rank D]
    compressor: Compressor | None  # None for ratio 0
    indexer: Indexer | None  # None but for OVERLAPPED
    hyper: Any  # residual.Connection, or None


@flax.struct.dataclass
class Blocks:
    """The blocks of a row's documents, in their order; the last may not be there."""

    keys: Keys  # segment -1: not there
    tokens: Routes  # of the B*E*ratio rows, which belong to which of the B*S tokens
    first: jax.Array  # [B E] bool: whether it is the first of its document
    rope: RopeTable  # [B E qk_rope_head_dim]: of their first positions


def declare(c: Model, ratio: int) -> CompressedAttention:
    """Declares the attention of a layer of this ratio."""
    d, n, h, rank = c.hidden_size, c.num_attention_heads, c.head_dim, c.q_lora_rank or 0
    groups, std = c.o_groups, c.initializer_range
    return CompressedAttention(
        norm=norm(d),
        q_down=Param((d, rank), P("fsdp"), "io", std),
        q_norm=norm(rank),
        q_up=Param((rank, n, h), P("fsdp"), "ioo", std),
        kv=Param((d, h), P("fsdp"), "io", std),
        kv_norm=norm(h),
        sinks=_zeros(n),
        out_down=Param((groups, n // groups, h, c.o_lora_rank), P(None, None, "fsdp"), "biio", std),
        out_up=Param((groups, c.o_lora_rank, d), P(None, "fsdp"), "iio", std),
        compressor=_declare_compressor(c, ratio, h) if ratio else None,
        indexer=_declare_indexer(c) if ratio == OVERLAPPED else None,
        hyper=residual.declare(c),
    )


def _declare_indexer(c: Model) -> Indexer:
    size, std = c.index_head_dim, c.initializer_range
    return Indexer(
        q=Param((c.q_lora_rank or 0, c.index_n_heads, size), P("fsdp"), "ioo", std),
        heads=Param((c.hidden_size, c.index_n_heads), P("fsdp"), "io", std, float32=True),
        compressor=_declare_compressor(c, OVERLAPPED, size),
    )


def _declare_compressor(c: Model, ratio: int, size: int) -> Compressor:
    pooled = 2 * size if ratio == OVERLAPPED else size
    projection = Param((c.hidden_size, pooled), P("fsdp"), "io", c.initializer_range)
    return Compressor(kv=projection, gate=projection, bias=_zeros(ratio, pooled), norm=norm(size))


def _zeros(*shape: int) -> Param:
    """What starts at zero, and is not to be small."""
    return Param(shape, P(None), std=0.0, decay=False, float32=True)


# ------------------------------------------------------------------------------------------ attention


def attend(
    c: Model, ratio: int, w: CompressedAttention, x: Stream, given: Given, kept: dict | None = None
) -> tuple[Stream, dict]:
    """The stage: the stream with the attention of its tokens. Keeps what `attention` says."""
    y, x = residual.read(c, w.hyper, x)
    out, loss, found = attention(c, ratio, w, y, given, kept)
    x = residual.add(x, out)
    if loss is not None:
        x = dataclasses.replace(x, indexer=x.indexer + loss)
    return x, found


def attention(
    c: Model, ratio: int, w: CompressedAttention, y: jax.Array, given: Given, kept: dict | None = None
) -> tuple[jax.Array, jax.Array | None, dict]:
    """What attention adds to the tokens [B S D] that a layer of this ratio reads.

    Args:
      c: the model.
      ratio: 0: attention to the window alone.
      w: gathered.
      y: before the layer's norm.
      given: with a `deepseek.Context` of the tokens.
      kept: what of an earlier call's was kept; it is not computed again.

    Returns:
      [B S D]; the indexer's loss, float32, summed over tokens, or None without indexer; what to keep: the kernel's
      output and log-sum-exp, and with an indexer the selection, so that it never differs, beside its loss.
    """
    tokens, kept = given.tokens, kept or {}
    rope = tokens.far_rope if ratio else tokens.rope
    turn = Turn(rope[0], rope[1], c.rms_norm_eps)
    y = rms_norm(y, w.norm, c.rms_norm_eps)
    latent, q = queries(c, w, y)
    kv = keys_of(c, w, y, rope)

    def read(entries: jax.Array, keys: Keys, selected: jax.Array | None = None):
        sight = window.Sight(tokens.segments, keys, selected, turn, c.sliding_window)
        out, attention = window.attention(q, (kv, entries), w.sinks, sight, kept.get("attention"))
        return project(c, w, out), attention

    if w.compressor is None:
        added, attention = read(kv[:, :0], kernels.tokens(tokens.segments[:, :0]))
        return added, None, {"attention": attention}
    blocks = find_blocks(ratio, tokens.segments, tokens.positions, rope)
    entries = checkpoint_name(compress(c, w.compressor, y, blocks), "key")
    if w.indexer is None:
        added, attention = read(entries, blocks.keys)
        return added, None, {"attention": attention}
    index = look(c, w.indexer, y, latent, rope, blocks)
    selected, loss = kept.get("selection") or (indexer.select(c, index, tokens.segments, blocks.keys), None)
    added, attention = read(entries, blocks.keys, selected)
    attended = Attended(q, entries[:, None], attention[1], selected, tokens.segments, blocks.keys, turn)
    loss = indexer.divergence(index, attended, loss)
    return added, loss, {"attention": attention, "selection": (selected, loss)}


def queries(c: Model, w: CompressedAttention, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Normalized tokens [B S D] -> the latent of their queries [B S Q]; these [B N S H], not `ops.ready` yet."""
    latent = rms_norm(matmul("bsd,dq->bsq", y, w.q_down), w.q_norm, c.rms_norm_eps)
    latent = checkpoint_name(latent, "q_latent")
    q = matmul("bsq,qnh->bnsh", latent, w.q_up)
    return latent, checkpoint_name(kernels.tokens_last(q), "query")


def keys_of(c: Model, w: CompressedAttention, y: jax.Array, rope: RopeTable) -> jax.Array:
    """Normalized tokens [B S D] -> their keys, which are also the values [B S H]."""
    return checkpoint_name(rotate(rms_norm(matmul("bsd,dh->bsh", y, w.kv), w.kv_norm, c.rms_norm_eps), rope), "key")


def project(c: Model, w: CompressedAttention, out: jax.Array) -> jax.Array:
    """Attention's output [B N S H] -> [B S D]."""
    batch, heads, *rest = out.shape
    out = out.reshape(batch, c.o_groups, heads // c.o_groups, *rest)
    return matmul("bsgr,grd->bsd", matmul("bgnsh,gnhr->bsgr", out, w.out_down), w.out_up)


# -------------------------------------------------------------------------------------------- entries


def find_blocks(ratio: int, segments: jax.Array, positions: jax.Array, rope: RopeTable) -> Blocks:
    """The whole blocks of documents, by their segments and positions [B S]: S // ratio of each row, or one.

    A block is found by its last token: the n-th of a row is the n-th token that is its block's last. These are sorted,
    not searched for: that would be a loop of gathers.
    """
    rows, length = segments.shape
    count = max(length // ratio, 1)
    ends = ((segments > 0) & (positions % ratio == ratio - 1)).astype(jnp.int32)
    ended = jnp.cumsum(ends, axis=1)
    last = jnp.sort(jnp.where(ends > 0, jnp.arange(length), length), axis=1)[:, :count]
    owner = _taken(segments, last, -1)
    members = jnp.clip(last[:, :, None] - (ratio - 1) + jnp.arange(ratio), 0, length - 1)
    at = members[:, :, :1]
    row, place = jnp.arange(rows)[:, None], positions % ratio
    whole = (segments > 0) & (_taken(segments, jnp.arange(length) + ratio - 1 - place, -1) == segments)
    slots = ((ended - ends) + row * count) * ratio + place
    return Blocks(
        keys=Keys(owner, last, ratio),
        tokens=Routes((members + row[:, None] * length).reshape(-1), slots.reshape(-1, 1), whole.reshape(-1, 1)),
        first=owner != jnp.pad(owner[:, :-1], ((0, 0), (1, 0)), constant_values=-1),
        rope=(jnp.take_along_axis(rope[0], at, axis=1), jnp.take_along_axis(rope[1], at, axis=1)),
    )


def _taken(x: jax.Array, places: jax.Array, otherwise: int) -> jax.Array:
    """[B S], [B E] -> [B E]: of each row, `otherwise` past its end."""
    return jnp.take_along_axis(x, places, axis=1, mode="fill", fill_value=otherwise)


def compress(c: Model, w: Compressor, y: jax.Array, blocks: Blocks) -> jax.Array:
    """Normalized tokens [B S D] -> the entries of their blocks [B E H], rotated."""

    def of_blocks(found: jax.Array) -> jax.Array:
        """[B S P] -> [B E ratio P]."""
        rows = kernels.rows_of_tokens(found.reshape(-1, found.shape[2]), blocks.tokens)
        return rows.reshape(*blocks.first.shape, blocks.keys.ratio, -1)

    values, gates = map(of_blocks, projected(w, y))
    return pool(c, w, (values, gates), blocks.first, blocks.rope)


def projected(w: Compressor, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Normalized tokens [B S D] -> what entries are means of, and the gates without their bias: [B S P] each."""
    return matmul("bsd,dp->bsp", y, w.kv), matmul("bsd,dp->bsp", y, w.gate)


def pool(c: Model, w: Compressor, given: tuple[jax.Array, jax.Array], first: jax.Array, rope: RopeTable) -> jax.Array:
    """The entries [B E H] of blocks that lie beside each other.

    Args:
      c: the model.
      w: gathered.
      given: as `projected`, [B E ratio P] each.
      first: [B E] bool: whether a block is the first of its document.
      rope: of the blocks' first positions, [B E qk_rope_head_dim].
    """
    dtype = given[0].dtype
    values, gates = given[0].astype(jnp.float32), given[1].astype(jnp.float32) + w.bias
    if values.shape[2] == OVERLAPPED:
        values, gates = _overlapped(values, first, 0), _overlapped(gates, first, -jnp.inf)
    pooled = jnp.sum(jax.nn.softmax(gates, axis=2) * values, axis=2)
    return rotate(rms_norm(pooled, w.norm, c.rms_norm_eps).astype(dtype), rope)


def _overlapped(x: jax.Array, first: jax.Array, nothing: float) -> jax.Array:
    """[B E ratio 2H] -> [B E 2*ratio H]: of the block before, the first half of channels; of each own, the second."""
    given, own = jnp.split(x, 2, axis=3)
    before = jnp.roll(given, 1, axis=1)
    return jnp.concatenate([jnp.where(first[:, :, None, None], nothing, before), own], axis=2)


def look(c: Model, w: Indexer, y: jax.Array, latent: jax.Array, rope: RopeTable, blocks: Blocks) -> Index:
    """What the indexer makes of normalized tokens [B S D] and the latent of their queries [B S Q], without gradient."""
    y, latent = lax.stop_gradient((y, latent))
    return ask(c, w, y, latent, rope, compress(c, w.compressor, y, blocks))


def ask(c: Model, w: Indexer, y: jax.Array, latent: jax.Array, rope: RopeTable, keys: jax.Array) -> Index:
    """The same, with the keys of the indexer's own entries [B E index_head_dim]."""
    heads = jnp.matmul(y.astype(jnp.float32), w.heads, precision=lax.Precision.HIGHEST)
    return Index(
        q=kernels.tokens_last(rotate(matmul("bsq,qih->bish", latent, w.q), rope)),
        k=keys,
        heads=heads.swapaxes(1, 2) * (c.index_n_heads * c.index_head_dim) ** -0.5,
    )

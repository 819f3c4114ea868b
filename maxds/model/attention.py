"""Multi-head latent attention (V2, arXiv 2405.04434, section 2.1), and in V3.2 what its indexer selects for it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from maxds.architecture import Model
from maxds.model import indexer, kernels, residual, sequences
from maxds.model.indexer import Index
from maxds.model.ops import matmul, rms_norm, rotate, softmax_scale
from maxds.model.residual import Stream
from maxds.params import Param, Tree
from maxds.quantize import dequantized
from maxds.schedule import Given

LATENT_EPS = 1e-6  # of the norms of latents, as in all released models, whatever rms_norm_eps is


@flax.struct.dataclass
class Attention:
    """Weights of one layer's attention. Without `q_lora_rank` there is no `q_down`, no `q_norm` and no `indexer`."""

    norm: Tree  # [D]
    q_down: Tree  # [D Q]
    q_norm: Tree  # [Q]
    q_up: Tree  # [Q N H], or [D N H]
    kv_down: Tree  # [D C]
    kv_norm: Tree  # [C]
    k_rope: Tree  # [D qk_rope_head_dim], one for all heads
    k_up: Tree  # [C N qk_nope_head_dim]
    v_up: Tree  # [C N v_head_dim]
    out: Tree  # [N D v_head_dim]: as TPUs multiply by it
    indexer: Any  # indexer.Indexer, or None
    hyper: Any  # residual.Connection, or None


def declare(c: Model) -> Attention:
    """Declares one layer's attention."""
    d, n, latent, rank = c.hidden_size, c.num_attention_heads, c.kv_lora_rank, c.q_lora_rank

    def matrix(*shape: int, dims: str = "io") -> Param:
        return Param(shape, P("fsdp"), dims, c.initializer_range)

    return Attention(
        norm=norm(d),
        q_down=None if rank is None else matrix(d, rank),
        q_norm=None if rank is None else norm(rank),
        q_up=matrix(d if rank is None else rank, n, c.qk_head_dim, dims="ioo"),
        kv_down=matrix(d, latent),
        kv_norm=norm(latent),
        k_rope=matrix(d, c.qk_rope_head_dim),
        k_up=matrix(latent, n, c.qk_nope_head_dim, dims="ioo"),
        v_up=matrix(latent, n, c.v_head_dim, dims="ioo"),
        out=Param((n, d, c.v_head_dim), P(None, "fsdp"), "ioi", c.initializer_range),
        indexer=None if c.index_topk is None else indexer.declare(c),
        hyper=residual.declare(c),
    )


def norm(size: int) -> Param:
    """Declares the scale of an RMS norm."""
    return Param((size,), P(None), decay=False, float32=True)


def query_source(c: Model, w: Attention, x: jax.Array) -> jax.Array:
    """What queries are made of, [B S D] -> their normalized latent [B S Q]; without `q_lora_rank`, x itself."""
    if w.q_down is None:
        return x
    return checkpoint_name(rms_norm(matmul("bsd,dq->bsq", x, w.q_down), w.q_norm, LATENT_EPS), "q_latent")


def queries(c: Model, w: Attention, source: jax.Array) -> jax.Array:
    """[B S Q] -> [B N S H]: nope then rope dimensions, not rotated yet, multiplied by the softmax scale."""
    return kernels.tokens_last(matmul("bsq,qnh->bnsh", source, w.q_up)) * softmax_scale(c)


def latents(c: Model, w: Attention, x: jax.Array, rope: Tree) -> tuple[jax.Array, jax.Array]:
    """[B S D] -> the latent of keys and values [B S C], and the rotated key shared by all heads [B S rope]."""
    latent = rms_norm(matmul("bsd,dc->bsc", x, w.kv_down), w.kv_norm, LATENT_EPS)
    return checkpoint_name(latent, "kv_latent"), checkpoint_name(
        rotate(matmul("bsd,dr->bsr", x, w.k_rope), rope), "kv_latent"
    )


def expanded(w: Attention, latent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[B S C] -> what it stands for: keys, but for what all heads share, and values, [B N S qk_nope or v_head_dim]."""
    own, v = (matmul("bsc,cnh->bnsh", latent, up) for up in (w.k_up, w.v_up))
    return checkpoint_name(own, "key"), checkpoint_name(v, "value")


def absorbed(c: Model, w: Attention, q: jax.Array, cached: tuple[jax.Array, jax.Array], seen: jax.Array) -> jax.Array:
    """Attention in latent space: `k_up` is applied to the queries and `v_up` to the output (V2, section 2.1.2).

    Args:
      q: [B N S H], of few tokens: the scores [B N S Z] exist all at once.
      cached: as `latents`, of Z tokens of one document: [B Z C] and [B Z qk_rope_head_dim].
      seen: [B S Z] bool: the tokens that a query attends to.

    Returns:
      [B N S v_head_dim].
    """
    latent, rope = cached
    nope, turned = jnp.split(q, [c.qk_nope_head_dim], axis=-1)
    into_latent = jnp.einsum("bnsh,cnh->bnsc", nope, dequantized(w.k_up))
    scores = jnp.einsum("bnsc,bzc->bnsz", into_latent, latent, preferred_element_type=jnp.float32)
    scores += jnp.einsum("bnsh,bzh->bnsz", turned, rope, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1).astype(latent.dtype)
    out = jnp.einsum("bnsz,bzc->bnsc", weights, latent)
    return jnp.einsum("bnsc,cnv->bnsv", out, dequantized(w.v_up))


def attend_to(
    c: Model, w: Attention, x: Stream, rope: Tree, read: Callable, row: sequences.Row | None = None
) -> tuple[Stream, Tree]:
    """The stream with the attention of its tokens to what `read` knows.

    Args:
      rope: cos and sin of the tokens' positions.
      read: (queries, not rotated, `latents` of the tokens, what an indexer makes of them) -> (attention's output
        [B N S v_head_dim], anything).
      row: of sequences that are split: `w` is then `sequences.own_heads`, and `read` is of all tokens, and these heads.

    Returns:
      The stream, and whatever else `read` returned.
    """
    y, x = residual.read(c, w.hyper, x)
    y = rms_norm(y, w.norm, c.rms_norm_eps)
    source, cached = query_source(c, w, y), latents(c, w, y, rope)
    index = None if w.indexer is None else indexer.look(c, w.indexer, y, source, rope)
    if row is not None:
        source, cached = sequences.whole((source, cached))
    out, more = read(checkpoint_name(queries(c, w, source), "query"), cached, index)
    out = out if row is None else sequences.all_heads(out)
    return residual.add(x, matmul("bnsv,ndv->bsd", out, w.out)), more


def attend(
    c: Model, scored: bool, w: Attention, x: Stream, given: Given, kept: dict | None = None
) -> tuple[Stream, dict]:
    """The stage: the stream with the attention of its tokens. Keeps the kernel's output and log-sum-exp.

    With an indexer it also keeps the selection, so that it never differs, beside the indexer's loss. If `scored`, it
    tells the largest score of each head [N], for `clipped`.
    """
    row, kept = given.tokens.row, kept or {}
    seen = given.tokens if row is None else row
    w = w if row is None else sequences.own_heads(w)

    def read(q: jax.Array, cached: tuple, index: Index | None):
        own, v = expanded(w, cached[0])
        k, sight = (own, cached[1]), kernels.Sight(seen.segments, None, *seen.rope)
        if index is None:
            out, attention, top = kernels.attention(q, k, v, sight, kept.get("attention"), scored)
            if row is not None and top is not None:
                top = sequences.of_all_heads(top)
            return out, {"attention": attention, "top_score": top}
        selected, loss = kept.get("selection") or (indexer.select(c, index, seen.segments), None)
        sight = dataclasses.replace(sight, selected=selected)
        out, attention, top = kernels.attention(q, k, v, sight, kept.get("attention"), scored)
        attended = indexer.Attended(*kernels.whole(q, k, sight), attention[1], selected, seen.segments)
        loss = indexer.divergence(index, attended, loss)
        return out, {"attention": attention, "selection": (selected, loss), "top_score": top}

    x, found = attend_to(c, w, x, given.tokens.rope, read, row)
    if "selection" in found:
        x = dataclasses.replace(x, indexer=x.indexer + found["selection"][1])
    return x, found


def clipped(c: Model, w: Attention, top: jax.Array, limit: float) -> Attention:
    """QK-Clip: makes scores that exceed the limit as large as it is (Kimi K2, arXiv 2507.20534, algorithm 1).

    The rotated key belongs to all heads, and stays. So a head's other queries and keys bear the root of the factor
    each, and its rotated queries the whole of it.

    Args:
      w: of stacked layers.
      top: float32 [L N], the largest score of each head.
      limit: tau.
    """
    factor = limit / jnp.maximum(top, limit)
    root = jnp.sqrt(factor)
    of_rope = jnp.repeat(factor[..., None], c.qk_rope_head_dim, -1)
    of_query = jnp.concatenate([jnp.repeat(root[..., None], c.qk_nope_head_dim, -1), of_rope], -1)

    def scaled(weight: jax.Array, by: jax.Array) -> jax.Array:
        return (weight * by[:, None]).astype(weight.dtype)

    return dataclasses.replace(w, q_up=scaled(w.q_up, of_query), k_up=scaled(w.k_up, root[..., None]))

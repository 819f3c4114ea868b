"""The lightning indexer (DeepSeek-V3.2, arXiv 2512.02556, section 2.1): which keys a query attends to.

A few small heads score every key that a query sees, and attention is to the `index_topk` best. Choosing has no
gradient, so the indexer learns from its own loss: how far the distribution that its scores make of a query's keys is
from that of the attention heads together. Nothing else learns from that loss.

Scores [Q Z] of a block of queries exist at a time, and of one head: memory grows with S x S / 8 bytes for the choice
alone, which all heads share.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from maxds.architecture import Model
from maxds.model import kernels, sparse
from maxds.model.kernels import Block, Keys
from maxds.model.ops import layer_norm, matmul, rotate_halves
from maxds.model.tiles import Turn
from maxds.params import Param, Tree

NORM_EPS = 1e-6  # of the released model, whatever rms_norm_eps is


@flax.struct.dataclass
class Indexer:
    """Weights of one layer's indexer, of I heads."""

    q: Tree  # [q_lora_rank I index_head_dim]
    k: Tree  # [D index_head_dim], one for all heads
    k_norm: Tree  # [index_head_dim]
    k_bias: Tree  # [index_head_dim]
    heads: Tree  # [D I]: what each head counts for


@flax.struct.dataclass
class Index:
    """What the indexer makes of tokens."""

    q: jax.Array  # [B I S index_head_dim]
    k: jax.Array  # [B Z index_head_dim], of the Z keys
    heads: jax.Array  # [B I S] float32, multiplied by the scale of scores


@flax.struct.dataclass
class Attended:
    """What attention did, for the indexer to learn from."""

    q: jax.Array  # [B N S H], multiplied by the softmax scale, or as `turn` says
    k: jax.Array  # [B N Z H]; [B 1 Z H] where all heads share them
    lse: jax.Array  # [B N S] float32: log-sum-exp of the scores
    selected: jax.Array | None  # as `select`
    segments: jax.Array  # [B S]
    keys: Keys | None = None  # the Z; None: the tokens
    turn: Turn | None = None  # what queries are still to be made ready by

    @property
    def among(self) -> Keys:
        """What is attended to."""
        return self.keys or kernels.tokens(self.segments)


def declare(c: Model) -> Indexer:
    """Declares one layer's indexer."""
    size, std = c.index_head_dim, c.initializer_range
    scale = Param((size,), P(None), decay=False, float32=True)
    return Indexer(
        q=Param((c.q_lora_rank or 0, c.index_n_heads, size), P("fsdp"), "ioo", std),
        k=Param((c.hidden_size, size), P("fsdp"), "io", std),
        k_norm=scale,
        k_bias=dataclasses.replace(scale, std=0.0),
        heads=Param((c.hidden_size, c.index_n_heads), P("fsdp"), "io", std, float32=True),
    )


def look(c: Model, w: Indexer, x: jax.Array, latent: jax.Array, rope: Tree) -> Index:
    """Normalized tokens [B S D] and the latent of their queries [B S q_lora_rank], to which no gradient flows."""
    x, latent = lax.stop_gradient((x, latent))
    k = layer_norm(matmul("bsd,dh->bsh", x, w.k), w.k_norm, w.k_bias, NORM_EPS)
    heads = jnp.matmul(x.astype(jnp.float32), w.heads, precision=lax.Precision.HIGHEST)
    return Index(
        q=rotate_halves(matmul("bsq,qih->bish", latent, w.q), rope),
        k=rotate_halves(k, rope),
        heads=heads.swapaxes(1, 2) * (c.index_n_heads * c.index_head_dim) ** -0.5,
    )


# ------------------------------------------------------------------------------------------ selection


def select(c: Model, index: Index, segments: jax.Array, keys: Keys | None = None) -> jax.Array | None:
    """The keys that each query attends to, of those of its own document up to its own position.

    Args:
      index: of the tokens.
      segments: [B S], of the queries.
      keys: what is selected among; None: the tokens.

    Returns:
      As `sparse.pack`, [B S ceil(Z / 8)] uint8; None where all are few enough.
    """
    size, topk, keys = index.k.shape[1], c.index_topk or 0, keys or kernels.tokens(segments)
    if size <= topk:
        return None

    def block(end: int, _, own: Block):
        among = keys.before(end)
        scores = kernels.index_scores(index.q, index.heads, index.k[:, : among.count], own, keys.complete(own.end))
        return None, sparse.pack(best(scores, kernels.seen(own, segments, among), topk), size)

    _, found = kernels.by_blocks(block, None, segments.shape[1])
    return checkpoint_name(kernels.joined(found, 1), "selection")


def select_among(c: Model, index: Index, keys: jax.Array, seen: jax.Array) -> jax.Array:
    """As `select`, of few queries: among keys [B Z index_head_dim], those that are `seen` [B S Z] -> [B S Z] bool."""
    asking = Block(jnp.zeros((), jnp.int32), index.q.shape[2])
    scores = kernels.index_scores(index.q, index.heads, keys, asking, keys.shape[1])
    return best(scores, seen, c.index_topk or 0)


def best(scores: jax.Array, seen: jax.Array, count: int) -> jax.Array:
    """Which `count` of the seen scores are the largest; of equal ones, those of lower index. All, if there are fewer.

    Exact, and without sorting: the least of them is found digit by digit.

    Args:
      scores: [… Z] float32.
      seen: [… Z] bool.
      count: of the Z.

    Returns:
      [… Z] bool.
    """
    size = scores.shape[-1]
    if size <= count:
        return seen
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)  # one zero, not two
    negative = bits >> 31 == 1
    order = jnp.where(seen, jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31)), 0)  # as the scores, from 1 on
    least = _of_rank(order, jnp.uint32(count), 32)
    above, tied = order > least, order == least
    left = count - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.uint32)
    early = jnp.where(tied, size - jnp.arange(size, dtype=jnp.uint32), 0)
    return seen & (above | (tied & (early >= _of_rank(early, left, size.bit_length()))))


def _of_rank(numbers: jax.Array, rank: jax.Array, bits: int) -> jax.Array:
    """The `rank`-th largest of [… Z] uint32 that have so many bits -> [… 1].

    By digits of two bits: the three counts of a digit share a pass over the numbers, of which single bits take twice as
    many.
    """
    digits = -(-bits // 2)

    def one_digit(i, found):
        shift = (2 * (digits - 1 - i)).astype(jnp.uint32)
        tried = [found | (jnp.uint32(digit) << shift) for digit in (1, 2, 3)]
        enough = [jnp.sum(numbers >= least, axis=-1, keepdims=True, dtype=jnp.uint32) >= rank for least in tried]
        return found | (sum(e.astype(jnp.uint32) for e in enough) << shift)

    return lax.fori_loop(0, digits, one_digit, jnp.zeros((*numbers.shape[:-1], 1), jnp.uint32))


# ----------------------------------------------------------------------------------------------- loss


@jax.custom_vjp
def divergence(index: Index, attended: Attended, kept: jax.Array | None = None) -> jax.Array:
    """Sum over real tokens of KL(p || q), float32: q is the softmax of scores over the keys that a query attends to.

    p is the mean over heads of the attention to them, and a constant: the gradient flows to `index` alone.

    Args:
      index: of the tokens.
      attended: what attention did with them.
      kept: the result of an earlier call; it is then returned as it is.
    """
    if kept is not None:
        return kept

    def block(end: int, total, own: Block):
        keys = attended.among.before(end)
        scores = kernels.index_scores(index.q, index.heads, index.k[:, : keys.count], own, keys.complete(own.end))
        p, log_q = _distributions(scores, attended, keys, own)
        return total + jnp.sum(jnp.where(p > 0, p * (jnp.log(p) - log_q), 0)), None

    return kernels.by_blocks(block, jnp.zeros((), jnp.float32), index.q.shape[2])[0]


def _divergence_backward(residuals, dy):
    """By the scores, it is q - p."""
    index, attended, kept = residuals

    def block(end: int, dk, own: Block):
        keys = attended.among.before(end)
        k, limit = index.k[:, : keys.count], keys.complete(own.end)
        p, log_q = _distributions(kernels.index_scores(index.q, index.heads, k, own, limit), attended, keys, own)
        dscores = jnp.where(log_q > -jnp.inf, jnp.exp(log_q) - p, 0) * dy
        *found, more = kernels.index_scores_backward(index.q, index.heads, k, dscores, own, limit)
        return dk.at[:, : keys.count].add(more), found

    dk, found = kernels.by_blocks(block, jnp.zeros(index.k.shape, jnp.float32), index.q.shape[2])
    dq, dheads = (kernels.joined([of_span[i] for of_span in found], 2) for i in (0, 1))
    return Index(dq, dk.astype(index.k.dtype), dheads), None, jax.tree.map(jnp.zeros_like, kept)


divergence.defvjp(lambda *args: (divergence(*args), args), _divergence_backward)


def _distributions(scores: jax.Array, attended: Attended, keys: Keys, own: Block) -> tuple[jax.Array, jax.Array]:
    """p and log q of a block of queries, [B Q Z]; 0 and -inf where nothing is attended to, and for padding."""
    seen = kernels.seen(own, attended.segments, keys, attended.selected)
    of_attention = attended.q, attended.lse, attended.k, attended.turn
    total = kernels.attention_to(keys.count, *of_attention, own, keys.complete(own.end))
    total = jnp.where(seen & (own.of(attended.segments, 1) > 0)[..., None], total, 0)
    mass = jnp.sum(total, axis=-1, keepdims=True)  # not the number of heads, if they also attend to other keys
    log_q = jax.nn.log_softmax(scores, where=seen)
    return total / jnp.where(mass > 0, mass, 1), jnp.where(seen & (mass > 0), log_q, -jnp.inf)

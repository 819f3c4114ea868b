"""The kernels of a decoder layer, by backend; which attends to a window, `window.py` chooses.

Attention and grouped matmul can be replayed: what the forward pass computed is handed back as
`kept`, the work is not done again, and the gradient flows as if it had been.

| kernel         | CPU                        | GPU                        | TPU                                       |
|----------------|----------------------------|----------------------------|-------------------------------------------|
| attention      | XLA, by spans of queries   | tokamax's [2]; else: XLA   | our own, in rows of n 128                 |
| to selected    | XLA, by tiles              | XLA, by tiles              | our own, in rows of n 1024                |
| to a window    | XLA, by blocks of queries  | XLA, by blocks of queries  | our own, in rows of n 128 [1]             |
| grouped matmul | a loop over blocks of rows | JAX's [2]; else: XLA       | our own, of n 256 rows, 128 columns [3]   |
| gated rows     | XLA                        | XLA                        | our own, of n 128 rows and columns        |
| … in float8    | XLA                        | XLA                        | TPU7x: our own, as those; else: XLA       |
| summed scores  | XLA, head by head          | XLA, head by head          | our own, of blocks of queries             |
| sum of rows    | XLA, choice by choice      | XLA, choice by choice      | TPU7x: tokamax's, SparseCores; else: XLA  |

[1] windows of up to 512, up to 16,384 entries of heads of 512, and n 1024 where some are selected; others by XLA.
[2] on Hopper (H100, H200), in bfloat16, of n 128 rows and columns.
[3] in float8 on TPU7x only; others by XLA.

On CPUs and GPUs XLA's `lax.ragged_dot` multiplies every row by every group: its cost grows with the number of experts.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from qwix import QArray

from maxds.model import hopper, ops, scores, sparse, sparsecores
from maxds.model.tiles import Turn, causal, gates, groups, home, sums
from maxds.quantize import BACKWARD, FORWARD, Quantized, Scaled, Tree, quantize, slots

SPANS, LEAST_SPAN = 2, 128  # parts of a sequence, and their least length: queries skip the keys of later parts
QUERY_BLOCK = 512  # bounds the attention scores that exist at a time to [B N QUERY_BLOCK S]
ROW_BLOCK = 128  # rows of one expert multiplied at a time on CPU
Sight = causal.Sight
SPARSE_CORES = ("TPU7x",)  # as tokamax sums rows on: of 16 lanes
FLOAT8 = ("TPU7x",)  # whose vector units round to float8


def _device_kind() -> str:
    """What the program is traced for, as JAX names it: "cpu", "TPU v5", "TPU7x", ..."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "cpu" if device is None else device.device_kind


def is_tpu() -> bool:
    """Whether the program is traced for TPU."""
    return "TPU" in _device_kind()


def is_hopper() -> bool:
    """Whether the program is traced for a GPU of `hopper`."""
    return _device_kind().startswith(hopper.KINDS)


# -------------------------------------------------------------------------------------- attention


def tokens_last(x: jax.Array) -> jax.Array:
    """[B N S H], in memory as TPU's kernels read it: so a product writes it, and the compiler need not copy it."""
    return with_layout_constraint(x, Layout((0, 1, 3, 2))) if is_tpu() else x


def attention(
    q: jax.Array,
    k: causal.Keys,
    v: jax.Array,
    sight: causal.Sight,
    kept: tuple[jax.Array, jax.Array] | None = None,
    scored: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], jax.Array | None]:
    """Causal attention within documents.

    Args:
      q: [B N S H], already multiplied by the softmax scale, and not rotated yet.
      k: of each head [B N S H - R], and the rotated R dimensions that all heads share [B S R].
      v: [B N S Hv].
      sight: the documents, in each of which a query sees the keys up to it, or what is selected among these; and the
        angles of queries. What queries of padding see is of no meaning, but finite.
      kept: what an earlier call returned as kept; the forward pass is then not computed.
      scored: whether the largest scores are asked for.

    Returns:
      The output [B N S Hv]; what to keep of it: (output, log-sum-exp of the scores [B N S] float32); if `scored` and
      nothing was kept, the largest score of each head [N] float32, not of padding, and 0 where it is negative.
    """
    qk = (q, k) if _is_for_tiles(q, sight) else whole(q, k, sight)
    out, lse, top = _attention(scored, *qk, v, sight, kept)
    if top is not None:
        real = jnp.where(sight.segments[:, None] > 0, lax.stop_gradient(top), 0)
        top = jnp.max(real, axis=(0, 2), initial=0)
    return out, (out, lse), top


def whole(q: jax.Array, k: causal.Keys, sight: causal.Sight) -> tuple[jax.Array, jax.Array]:
    """Rotated queries, and the keys of each head, [B N S H]: whose products are the scores."""
    own, shared = k
    of_heads = jnp.broadcast_to(shared[:, None], (*own.shape[:3], shared.shape[2]))
    return ops.rotate(q, (sight.cos, sight.sin)), jnp.concatenate([own, of_heads], axis=3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(scored, q, k, v, sight, kept):
    """The output, the log-sum-exp, and of each query the largest score [B N S], or None; not for tiles, of `whole`."""
    if kept is not None:
        return *kept, None
    if _is_for_tiles(q, sight):
        out, lse, top = causal.attend(q, k, v, sight)
        return out, lse, top if scored else None
    if sight.selected is not None:
        return sparse.attend(q, k, v, sight.selected, scored)
    if _is_for_hopper(q, v):
        out, lse, top = hopper.attend(q, k, v, sight.segments)
        return out, lse, top if scored else None
    return _attend(q, k, v, sight.segments, scored)


def _attention_forward(scored, q, k, v, sight, kept):
    out, lse, top = _attention(scored, q, k, v, sight, kept)
    out, lse = checkpoint_name(out, "attention"), checkpoint_name(lse, "attention")
    return (out, lse, top), (q, k, v, sight, kept, out, lse)


def _attention_backward(_scored, residuals, cotangents):
    q, k, v, sight, kept, out, lse = residuals
    dout, *_ = cotangents
    if _is_for_tiles(q, sight):
        found = causal.attend_backward(q, k, v, sight, (out, lse), dout)
    elif sight.selected is not None:
        found = sparse.attend_backward(q, k, v, sight.selected, (out, lse), dout)
    elif _is_for_hopper(q, v):
        found = hopper.attend_backward(q, k, v, sight.segments, (out, lse), dout)
    else:
        found = _attend_backward(q, k, v, sight.segments, (out, lse), dout)
    return *found, None, jax.tree.map(jnp.zeros_like, kept)


_attention.defvjp(_attention_forward, _attention_backward)


def _is_for_tiles(q: jax.Array, sight: causal.Sight) -> bool:
    return is_tpu() and causal.can_attend(q.shape[2], selected=sight.selected is not None)


def _is_for_hopper(q: jax.Array, v: jax.Array) -> bool:
    return is_hopper() and hopper.can_attend(q, v)


@flax.struct.dataclass
class Keys:
    """What queries may attend to: the tokens of a row, or entries that stand for blocks of them, in their order."""

    segments: jax.Array  # [B Z] int32
    last: jax.Array  # [B Z], or [1 Z], int32: where in the row the last token of each is
    ratio: int = flax.struct.field(pytree_node=False, default=1)  # tokens of a block

    @property
    def count(self) -> int:
        """Z."""
        return self.segments.shape[1]

    def complete(self, end: int | jax.Array) -> int | jax.Array:
        """How many can be seen by queries before `end`: all others are complete later."""
        return end // self.ratio

    def before(self, end: int) -> "Keys":
        """Those that are `complete` before a position."""
        count = self.complete(end)
        return dataclasses.replace(self, segments=self.segments[:, :count], last=self.last[:, :count])


def tokens(segments: jax.Array) -> Keys:
    """The tokens themselves, [B S]."""
    return Keys(segments, jnp.arange(segments.shape[1])[None])


@flax.struct.dataclass
class Block:
    """Some of the tokens of a sequence, side by side."""

    first: jax.Array  # position, a multiple of the size
    size: int = flax.struct.field(pytree_node=False)

    @property
    def end(self) -> jax.Array:
        """The position after the last."""
        return self.first + self.size

    def of(self, x: jax.Array, axis: int) -> jax.Array:
        """These, of an array whose dimension `axis` is S."""
        return lax.dynamic_slice_in_dim(x, self.first, self.size, axis)


def by_blocks(fn: Callable, carry: Tree, length: int, most: int | None = None) -> tuple[Tree, list[Tree]]:
    """Scans fn(end, carry, block) -> (carry, result) over blocks of queries, which see keys before `end`.

    What is cut, `fn` cuts: of arrays that were in blocks already, TPUs would write all again, in another layout.

    Args:
      fn: gets a `Block`.
      carry: of the scan.
      length: S.
      most: queries of a block; None: QUERY_BLOCK.

    Returns:
      The carry, and of each span of queries the results of its blocks, stacked.
    """
    found = []
    for start, end in spans(length):
        size = _block_of(end - start, most)

        def one(carry: Tree, first: jax.Array, end: int = end, size: int = size) -> Tree:
            return fn(end, carry, Block(first, size))

        carry, results = lax.scan(one, carry, jnp.arange(start, end, size))
        found.append(results)
    return carry, found


def _block_of(length: int, most: int | None = None) -> int:
    """Queries of a block: QUERY_BLOCK or `most`, where these divide a span."""
    most = most or QUERY_BLOCK
    return most if length % most == 0 else length


def joined(found: Sequence[jax.Array], axis: int) -> jax.Array:
    """Blocks of queries of all spans, [n ... block ...], side by side along `axis`."""
    of_spans = [jnp.moveaxis(of_span, 0, axis) for of_span in found]
    return jnp.concatenate([s.reshape(*s.shape[:axis], -1, *s.shape[axis + 2 :]) for s in of_spans], axis)


def spans(length: int) -> list[tuple[int, int]]:
    """Start and end of the parts of a sequence whose queries are scored with the keys up to the part's end."""
    count = SPANS if length % SPANS == 0 and length // SPANS >= LEAST_SPAN else 1
    size = length // count
    return [(start, start + size) for start in range(0, length, size)]


def visible(segments_q: jax.Array, keys: Keys, first: jax.Array | int) -> jax.Array:
    """[B Q Z] bool: whether queries from position `first` on see the keys."""
    query = first + jnp.arange(segments_q.shape[1])
    causal = query[:, None] >= keys.last[:, None, :]
    return causal & (segments_q[:, :, None] == keys.segments[:, None, :])


def seen(block: Block, segments: jax.Array, keys: Keys, selected: jax.Array | None = None) -> jax.Array:
    """[B Q Z] bool: which keys the queries of a block attend to: those that they see, or that are selected.

    Args:
      block: of queries.
      segments: [B S].
      keys: the first Z of those that there are.
      selected: as `sparse.pack`, [B S n]; None: all that are seen.
    """
    if selected is None:
        return visible(block.of(segments, 1), keys, block.first)
    return sparse.unpack(block.of(selected, 1))[..., : keys.count]


def _attend(q, k, v, segments, scored):
    def attend(end, _, block):
        scores = _scores(block.of(q, 2), k[:, :, :end], segments, block)
        lse = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - lse[..., None]).astype(v.dtype)  # to the bit those of the backward pass
        out = jnp.einsum("bnqk,bnkh->bnqh", weights, v[:, :, :end])
        return None, (out, lse, jnp.max(scores, axis=-1) if scored else None)

    _, found = by_blocks(attend, None, q.shape[2])
    return jax.tree.map(lambda *of_spans: joined(of_spans, 2), *found)


def _attend_backward(q, k, v, segments, kept, dout):
    out, lse = kept

    def pull(end, carry, block):
        of_block, k_seen, v_seen = block.of(dout, 2), k[:, :, :end], v[:, :, :end]
        weights = jnp.exp(_scores(block.of(q, 2), k_seen, segments, block) - block.of(lse, 2)[..., None])
        more_v = _dot("bnqk,bnqh->bnkh", weights.astype(v.dtype), of_block)
        delta = _dot("bnqh,bnqh->bnq", of_block, block.of(out, 2))
        dscores = (weights * (_dot("bnqh,bnkh->bnqk", of_block, v_seen) - delta[..., None])).astype(q.dtype)
        more_k = _dot("bnqk,bnqh->bnkh", dscores, block.of(q, 2))
        carry = jax.tree.map(lambda total, more: total.at[:, :, :end].add(more), carry, (more_k, more_v))
        return carry, jnp.einsum("bnqk,bnkh->bnqh", dscores, k_seen)

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    (dk, dv), dq = by_blocks(pull, zeros, q.shape[2])
    return joined(dq, 2), dk.astype(k.dtype), dv.astype(v.dtype)


def _scores(q, k, segments, block):
    """Masked scores [B N Q Z] in float32 of a block of queries with the first Z keys."""
    seen = visible(block.of(segments, 1), tokens(segments[:, : k.shape[2]]), block.first)
    return jnp.where(seen[:, None], _dot("bnqh,bnkh->bnqk", q, k), -jnp.inf)


def _dot(subscripts, x, y):
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


# ---------------------------------------------------------------------------------- summed scores


Limit = jax.Array | int


def index_scores(q: jax.Array, heads: jax.Array, k: jax.Array, block: Block, limit: Limit) -> jax.Array:
    """As `scores.index_scores`, of the queries of a block; of keys from `limit` on, anything that is finite."""
    if _sums_in_tiles(block, k.shape[1]):
        return jax.vmap(sums.index_scores, (0, 0, 0, None))(q, heads, k, _cut(block, limit))
    return scores.index_scores(block.of(q, 2), block.of(heads, 2), k)


def index_scores_backward(
    q: jax.Array, heads: jax.Array, k: jax.Array, dscores: jax.Array, block: Block, limit: Limit
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `scores.index_scores_backward`, of the queries of a block; gradients of scores from `limit` on are 0."""
    if _sums_in_tiles(block, k.shape[1]):
        batched = jax.vmap(sums.index_scores_backward, (0, 0, 0, 0, None))
        return batched(q, heads, k, dscores, _cut(block, limit))
    return scores.index_scores_backward(block.of(q, 2), block.of(heads, 2), k, dscores)


def attention_to(
    count: int, q: jax.Array, lse: jax.Array, k: jax.Array, turn: Turn | None, block: Block, limit: Limit
) -> jax.Array:
    """As `scores.attention_to`, of the queries of a block; of keys from `limit` on, anything.

    If they are not ready yet, they are made so by `turn`.
    """
    if _sums_in_tiles(block, count):
        attend = functools.partial(sums.attention_to, count)
        return jax.vmap(attend, (0, 0, 0, 0, None))(q, lse, k, turn, _cut(block, limit))
    q, lse, turn = block.of(q, 2), block.of(lse, 2), jax.tree.map(lambda a: block.of(a, 1), turn)
    return scores.attention_to(count, q if turn is None else ops.ready(q, turn), lse, k)


def _sums_in_tiles(block: Block, count: int) -> bool:
    return is_tpu() and sums.can_sum(block.size, count)


def _cut(block: Block, limit: Limit) -> sums.Cut:
    return sums.Cut(jnp.stack([jnp.asarray(limit), block.first // block.size]), block.size)


# --------------------------------------------------------------------------------- grouped matmul


@jax.custom_vjp
def grouped_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array, kept: jax.Array | None = None) -> jax.Array:
    """Multiplies rows, sorted by group, by the matrix of their group.

    Args:
      x: [R I].
      w: [G I O].
      sizes: [G] int32: how many rows each group has. Rows past their sum may hold anything, and do so afterwards.
      kept: the result of an earlier call; it is then returned as it is.

    Returns:
      [R O].
    """
    return multiply_groups(x, w, sizes, x.dtype) if kept is None else kept


def _grouped_matmul_backward(residuals, dy):
    x, w, sizes, kept = residuals
    dx = multiply_groups(dy, w, sizes, dy.dtype, True)
    dw = multiply_groups_transposed(x, dy, sizes, dy.dtype)
    return dx, dw, None, jax.tree.map(jnp.zeros_like, kept)


grouped_matmul.defvjp(lambda *args: (grouped_matmul(*args), args), _grouped_matmul_backward)


@functools.partial(jax.jit, inline=False, static_argnums=(3, 4))
def multiply_groups(x, w, sizes, dtype, transposed=False):
    """Rows by the matrix of their group: [R I], [G I O], or if `transposed` [G O I] -> [R O] of `dtype`."""
    if _multiplies_on_hopper(dtype, len(x), *w.shape[1:]):
        return hopper.multiply(x.astype(dtype), w.astype(dtype), sizes, transposed=transposed)
    if _multiplies_in_tiles(x, *w.shape[1:]):
        return groups.multiply(x, w, sizes, dtype, transposed=transposed)
    w = w.swapaxes(1, 2) if transposed else w
    by_blocks = functools.partial(_multiply_by_blocks, dtype=dtype)
    ragged = functools.partial(lax.ragged_dot, preferred_element_type=dtype)
    return lax.platform_dependent(x, w, sizes, cpu=by_blocks, default=ragged)


@functools.partial(jax.jit, inline=False, static_argnums=3)
def multiply_groups_transposed(x, dy, sizes, dtype):
    """[R I], [R O] -> [G I O] of `dtype`: the sum of the outer products of each group's rows."""
    if _multiplies_on_hopper(dtype, *x.shape, dy.shape[1]):
        return hopper.multiply_transposed(x.astype(dtype), dy.astype(dtype), sizes)
    if _multiplies_in_tiles(x, x.shape[1], dy.shape[1]):
        return groups.multiply_transposed(x, dy, sizes, dtype)

    def ragged(x, dy, sizes):
        numbers = lax.RaggedDotDimensionNumbers(((((0,), (0,)), ((), ()))), (0,), ())
        return lax.ragged_dot_general(x, dy, sizes, numbers, preferred_element_type=dtype)

    by_blocks = functools.partial(_multiply_transposed_by_blocks, dtype=dtype)
    return lax.platform_dependent(x, dy, sizes, cpu=by_blocks, default=ragged)


def _multiplies_on_hopper(dtype, *sides):
    """Float8 values too: bfloat16 holds them as they are, and these kernels have no products of them."""
    return is_hopper() and hopper.can_multiply(dtype, *sides)


def _multiplies_in_tiles(x, *sides):
    """Only TPU7x multiplies float8: other TPUs convert it, which is left to XLA."""
    return is_tpu() and (x.dtype.itemsize > 1 or rounds_rows()) and groups.can_multiply(len(x), *sides)


def _row_blocks(rows, sizes):
    """Rows of a block; function of its index -> (its group, its first row, which rows are its own); number of blocks.

    The last blocks start early, so that none runs past the end of the rows.
    """
    ends = jnp.cumsum(sizes)
    size = min(ROW_BLOCK, rows)
    counts = (sizes + size - 1) // size
    last = jnp.cumsum(counts)

    def block(i):
        group = jnp.searchsorted(last, i, side="right", method="compare_all")
        first = ends[group] - sizes[group] + (i - last[group] + counts[group]) * size
        start = jnp.minimum(first, rows - size)
        row = start + jnp.arange(size)
        return group, start, ((row >= first) & (row < ends[group]))[:, None]

    return size, block, last[-1]


def _multiply_by_blocks(x, w, sizes, dtype):
    size, block, count = _row_blocks(len(x), sizes)

    def body(i, out):
        group, start, own = block(i)
        rows, matrix = lax.dynamic_slice_in_dim(x, start, size), lax.dynamic_index_in_dim(w, group, keepdims=False)
        y = lax.dot(rows, matrix, preferred_element_type=dtype)
        y = jnp.where(own, y, lax.dynamic_slice_in_dim(out, start, size))
        return lax.dynamic_update_slice_in_dim(out, y, start, 0)

    return lax.fori_loop(0, count, body, jnp.zeros((len(x), w.shape[2]), dtype))


def _multiply_transposed_by_blocks(x, dy, sizes, dtype):
    size, block, count = _row_blocks(len(x), sizes)

    def body(i, dw):
        group, start, own = block(i)
        rows, gradients = (jnp.where(own, lax.dynamic_slice_in_dim(a, start, size), 0) for a in (x, dy))
        update = lax.dot(rows.T, gradients, preferred_element_type=jnp.float32)
        return lax.dynamic_update_index_in_dim(dw, lax.dynamic_index_in_dim(dw, group) + update[None], group, 0)

    dw = lax.fori_loop(0, count, body, jnp.zeros((len(sizes), x.shape[1], dy.shape[1]), jnp.float32))
    return dw.astype(dtype)


# ------------------------------------------------------------------------------------ gated rows


def gated(limit: float | None, up: jax.Array, weights: jax.Array, count: jax.Array) -> jax.Array:
    """SwiGLU, times what each row counts for.

    Args:
      limit: as of `ops.swiglu`.
      up: [R 2F].
      weights: [R] float32.
      count: [] int32; rows from there on may hold anything.

    Returns:
      [R F].
    """
    if is_tpu() and gates.can_gate(*up.shape):
        return _gated(limit, up, weights, count)
    return _gated_exactly(limit, up, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(limit, up, weights, count):
    return gates.gated(up, weights, count, limit)


def _gated_backward(limit, operands, dy):
    up, weights, count = operands
    return *gates.gated_backward(up, weights, count, dy, limit), None


_gated.defvjp(lambda limit, *operands: (_gated(limit, *operands), operands), _gated_backward)


def gated_float8(limit: float | None, up: Scaled, weights: jax.Array, count: jax.Array) -> QArray:
    """As `gated`, rounded: [R 2F] -> [R F] of FORWARD with a scale for each row. It has no gradient."""
    if rounds_rows() and gates.can_gate(*up.shape):
        return gates.rounded(up, weights, count, limit)
    gated = _gated_exactly(limit, up.astype(jnp.float32).whole(), weights)
    return quantize(gated, FORWARD, over=(1,)).astype(up.dtype)


def gated_float8_backward(
    limit: float | None, up: Scaled, weights: jax.Array, count: jax.Array, dy: Scaled
) -> tuple[QArray, QArray, jax.Array]:
    """Given that of its result, [R F]: the result of `gated_float8` again, and gradients of up and weights.

    That of up, [R 2F], is of BACKWARD with a scale for each row.
    """
    if rounds_rows() and gates.can_gate(*up.shape):
        return gates.rounded_backward(up, weights, count, dy, limit)
    exact, of_exact = (a.astype(jnp.float32).whole() for a in (up, dy))
    y, pull = jax.vjp(functools.partial(_gated_exactly, limit), exact, weights)
    dup, dweights = pull(of_exact)
    gated, dup = quantize(y, FORWARD, over=(1,)), quantize(dup, BACKWARD, over=(1,))
    return gated.astype(up.dtype), dup.astype(up.dtype), dweights


def _gated_exactly(limit, up, weights):
    return ops.swiglu(up, limit) * weights[:, None].astype(up.dtype)


def times(x: jax.Array, by: jax.Array, count: jax.Array) -> jax.Array:
    """Values of BACKWARD [R D] times powers of two [R 1]; rows from `count` on hold anything, and do so afterwards."""
    if rounds_rows() and gates.can_scale(*x.shape):
        return gates.times(x, by, count)
    return (x.astype(by.dtype) * by).astype(x.dtype)


def rounds_rows() -> bool:
    """Whether rows are rounded to float8 by kernels of our own."""
    return _device_kind() in FLOAT8


# ---------------------------------------------------------------------------------- tokens and routed rows


@flax.struct.dataclass
class Routes:
    """Which of R rows belong to which of A tokens; a row belongs to a (token, choice) pair."""

    pairs: jax.Array  # [R] int32: the pair of each row; any of rows that belong to none, which are the last if K > 1
    rows: jax.Array  # [A K] int32: the row of each pair
    here: jax.Array  # [A K] bool: whether it has one


@jax.custom_vjp
def rows_of_tokens(tokens: Any, routes: Routes) -> Any:
    """[A D] -> [R D]: each row's token. Rows that belong to none hold anything.

    Of an array, or Quantized: then the gradient of rows is scaled.
    """
    if isinstance(tokens, Quantized):
        return Quantized(_rows(tokens.array, routes), gradient="scaled").with_slot()
    return _rows(tokens, routes)


@jax.custom_vjp
def tokens_of_rows(rows: Any, routes: Routes) -> Any:
    """[R D] -> [A D]: the sum of each token's rows; the transpose of `rows_of_tokens`.

    Of an array, or Quantized: scaled, with a gradient in float8, which that of the sums then is, too.
    """
    if isinstance(rows, Quantized):
        return Quantized(_sums(rows.array, routes), gradient=rows.gradient).with_slot()
    return _sums(rows, routes)


def _rows(tokens: Tree, routes: Routes) -> Tree:
    of_rows = routes.pairs // routes.rows.shape[1]
    return jax.tree.map(lambda a: jnp.take(a, of_rows, axis=0, mode="clip"), tokens)


def _sums(rows: jax.Array | Scaled, routes: Routes) -> jax.Array:
    if isinstance(rows, Scaled):
        return _weighted_sums(rows.values, _pairs_of_rows(rows.scale[:, 0].astype(jnp.float32), routes), routes)
    if _in_blocks(rows, routes):
        return _sums_of_blocks(rows, routes)
    return _weighted_sums(rows, jnp.ones(routes.rows.shape, jnp.float32), routes)


def _in_blocks(rows: jax.Array, routes: Routes) -> bool:
    tokens, choices = routes.rows.shape
    alone = is_tpu() and _device_kind() not in SPARSE_CORES and rows.dtype == jnp.bfloat16
    return alone and choices > 1 and home.can_sum(len(rows), tokens, rows.shape[1])


def _sums_of_blocks(rows: jax.Array, routes: Routes) -> jax.Array:
    """As `_sums`, in blocks of tokens."""
    choices = routes.rows.shape[1]
    sizes = jnp.sum(routes.here.reshape(-1, home.TOKENS * choices), axis=1, dtype=jnp.int32)
    row, tokens = jnp.arange(len(rows)), routes.pairs // choices
    block = jnp.where(row < jnp.sum(sizes), tokens // home.TOKENS, len(sizes))
    order = ops.ordered(block, len(sizes))
    rows, tokens = (jnp.take(a, order, axis=0, mode="clip") for a in (rows, tokens % home.TOKENS))
    return home.sum_rows(rows, tokens, sizes)


def _weighted_sums(rows: jax.Array, weights: jax.Array, routes: Routes) -> jax.Array:
    on_sparse_cores = rows.dtype == jnp.bfloat16 and _device_kind() in SPARSE_CORES
    if on_sparse_cores and sparsecores.can_sum_rows(rows.shape, choices=routes.rows.shape[1]):
        return sparsecores.sum_rows(rows, routes.rows, routes.here, weights)
    choices = zip(routes.rows.T, routes.here.T, weights.T.astype(rows.dtype), strict=True)
    found = (jnp.where(h[:, None], jnp.take(rows, s, axis=0, mode="clip") * by[:, None], 0) for s, h, by in choices)
    return functools.reduce(jnp.add, found)


@jax.custom_vjp
def rows_of_pairs(values: jax.Array, routes: Routes) -> jax.Array:
    """[A K] -> [R]: each row's value. Rows that belong to no pair hold anything."""
    return jnp.take(values.reshape(-1), routes.pairs, mode="clip")


def _pairs_of_rows(values: jax.Array, routes: Routes) -> jax.Array:
    return jnp.where(routes.here, jnp.take(values, routes.rows, mode="clip"), 0)


def _with_transpose(move: Callable, transpose: Callable) -> None:
    """A gather's own transpose would be a scatter, which sorts on TPU and is serial on CPU."""

    def forward(x, routes):
        form = dataclasses.replace(x, array=None, slot=None) if isinstance(x, Quantized) else None
        return move(x, routes), (form, routes)

    def backward(residuals, dy):
        form, routes = residuals
        dx = transpose(slots(dy), routes)
        return (dx if form is None else dataclasses.replace(form, slot=dx)), None

    move.defvjp(forward, backward)


_with_transpose(rows_of_tokens, _sums)
_with_transpose(tokens_of_rows, _rows)
_with_transpose(rows_of_pairs, _pairs_of_rows)

"""Which tensors of a Hugging Face checkpoint hold which arrays of maxds: one table, read both ways.

A row pairs the arrays of one layer, or of one expert, with tensors of the same numbers. Its pattern
names the axes of an array and, in order, those of a tensor, where parentheses merge axes:
`c n h -> (n h) c`. Where several arrays make one tensor they are joined along the axis `over`;
where one array makes several tensors it is split along that axis, which they do not have.

V4's names are those of the official files; transformers reads them too, and saves some under others (`official`).
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from maxds.architecture import Model
from maxds.model import layout

IGNORED = ".rotary_emb.inv_freq"  # tensors with this end are worked out from config.json
BLOCK = 2**21  # bytes that are transposed at once, and stay in the cache
LINE = 64  # bytes that memory is read by

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """Arrays of a state, and the tensors that hold them."""

    arrays: tuple[str, ...]  # `params.moe_layers.attention.norm`
    tensors: tuple[str, ...]  # `model.layers.{layer}.input_layernorm.weight`
    pattern: str
    over: str = ""
    first: int | None = None  # arrays are stacked: the number of their first layer,
    every: int = 1  # and how far it is from one of them to the next
    below: int | None = None  # the numbers are integers from 0 on, below this, and those of a row differ
    copy: bool = False  # the tensor repeats what another row has: written, and on the way in only compared

    @property
    def stacked(self) -> int:
        """Leading axes of the arrays that count layers and experts."""
        return (self.first is not None) + ("{expert}" in self.tensors[0])

    @property
    def _axes(self) -> tuple[list[str], list[list[str]], list[int]]:
        """The axes of an array; those of a tensor, grouped; and the order that turns the former into the latter."""
        left, right = self.pattern.split("->")
        have, groups = left.split(), [list(g.split()) for g in _groups(right)]
        flat = list(itertools.chain(*groups))
        return have, groups, [have.index(a) for a in ([self.over] if self._splits else []) + flat]

    @property
    def _splits(self) -> bool:
        return len(self.tensors) > 1

    def tensor_shape(self, arrays: Sequence[Shape]) -> Shape:
        """The shape of each tensor, from those of the arrays of one layer or expert."""
        have, groups, _ = self._axes
        sizes = dict(zip(have, arrays[0], strict=True))
        if self.over and not self._splits:
            sizes[self.over] = sum(shape[have.index(self.over)] for shape in arrays)
        return tuple(math.prod(sizes[a] for a in group) for group in groups)

    def _pairs(self, arrays: Sequence[np.ndarray], tensors: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, ...]]:
        """Views of arrays and of tensors that hold the same numbers, of the same shape."""
        _, groups, order = self._axes
        turned = [a.transpose(order) for a in arrays]
        if self._splits:
            yield from ((part, t.reshape(part.shape)) for part, t in zip(turned[0], tensors, strict=True))
            return
        axis = list(itertools.chain(*groups)).index(self.over) if self.over else 0
        ends = np.cumsum([part.shape[axis] for part in turned])
        shape = list(turned[0].shape)
        shape[axis] = int(ends[-1])
        yield from zip(turned, np.split(tensors[0].reshape(shape), ends[:-1], axis), strict=True)

    def to_tensors(self, arrays: Sequence[np.ndarray], dtype: np.dtype) -> list[np.ndarray]:
        """The tensors of the arrays of one layer or expert."""
        shape = self.tensor_shape([a.shape for a in arrays])
        made = [np.empty(shape, dtype) for _ in self.tensors]
        for part, piece in self._pairs(arrays, made):
            _copy(piece, part)
        return made

    def to_arrays(
        self, tensors: Sequence[np.ndarray], shapes: Sequence[Shape], dtypes: Sequence[np.dtype]
    ) -> list[np.ndarray]:
        """The arrays, of these shapes and dtypes, of the tensors of one layer or expert."""
        made = [np.empty(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        for part, piece in self._pairs(made, tensors):
            _copy(part, piece)
        return made


def _groups(text: str) -> list[str]:
    """`(n h) c` -> [`n h`, `c`]."""
    return [group for part in text.replace("(", "|(").split("|") for group in _group(part)]


def _group(part: str) -> list[str]:
    inside, closed, rest = part.partition(")")
    return [inside.strip(" ("), *rest.split()] if closed else part.split()


def _copy(to: np.ndarray, of: np.ndarray) -> None:
    """Copies between views whose memory may be laid out in different orders.

    XLA transposes, some rows of `to` at a time, since NumPy takes up to ten times as long.
    """
    order = np.argsort(to.strides, kind="stable")[::-1]  # of the memory that is written
    to, of = to.transpose(order), of.transpose(order)
    if of.flags.c_contiguous:
        np.copyto(to, of, casting="same_kind")
        return
    rows = max(BLOCK * len(of) // of.nbytes, LINE // of.itemsize)
    for i in range(0, len(to), rows):
        turned = jax.device_put(of[i : i + rows], jax.local_devices(backend="cpu")[0])
        np.copyto(to[i : i + rows], np.asarray(turned), casting="same_kind")


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is converted at a time: the arrays of a row in one layer, or of one expert, and their tensors."""

    row: Row
    index: tuple[int, ...]  # of layer and expert in the arrays
    tensors: tuple[str, ...]  # full names


def cells(rows: Sequence[Row], shapes: dict[str, Shape]) -> list[Cell]:
    """The table of a model, written out; `shapes` are those of the arrays of a state."""
    found = []
    for row in rows:
        for index in np.ndindex(shapes[row.arrays[0]][: row.stacked]):
            layer = row.first + index[0] * row.every if row.first is not None else 0
            expert = index[-1] if index else 0
            found.append(Cell(row, index, tuple(t.format(layer=layer, expert=expert) for t in row.tensors)))
    return found


# ------------------------------------------------------------------------------------------ the table


def table(c: Model, arrays: Sequence[str]) -> list[Row]:
    """The rows of a model whose state has these arrays."""
    rows = _latent(c) if c.compress_ratios is None else _v4(c)
    return [row for row in rows if row.arrays[0] in arrays]


def _latent(c: Model) -> list[Row]:
    """Of models with latent attention."""
    layers = "model.layers."
    return [
        Row(("params.embed",), ("model.embed_tokens.weight",), "v d -> v d"),
        Row(("params.norm",), ("model.norm.weight",), "d -> d"),
        Row(("params.head",), ("lm_head.weight",), "d v -> v d"),
        *_stacked("dense_layers", layers, [*_attention(c), *_dense()], 0),
        *_stacked("moe_layers", layers, [*_attention(c), *_experts()], c.first_k_dense_replace),
        *_stacked("mtp.layer", layers, [*_attention(c), *_experts()], c.num_hidden_layers),
        *_stacked("mtp", layers, _mtp(), c.num_hidden_layers),
        *_copies(c),
    ]


def _row(arrays: str, tensors: str, pattern: str, over: str = "") -> Row:
    """A row of one layer: names without what all of its stack share, several separated by spaces."""
    return Row(tuple(arrays.split()), tuple(f"{t}.weight" for t in tensors.split()), pattern, over)


def _stacked(stack: str, prefix: str, rows: Sequence[Row], first: int, every: int = 1) -> list[Row]:
    """Rows of one layer as those of a stack, of which layer `first` is the first."""

    def place(array: str) -> str:
        if array == "router_bias":
            return f"router_bias.{stack.removesuffix('.layer')}"
        return f"params.{stack}.{array}"

    return [
        dataclasses.replace(
            row,
            arrays=tuple(map(place, row.arrays)),
            tensors=tuple(f"{prefix}{{layer}}.{t}" for t in row.tensors),
            first=first,
            every=every,
        )
        for row in rows
    ]


def _attention(c: Model) -> list[Row]:
    q = "q_proj" if c.q_lora_rank is None else "q_b_proj"
    return [
        _row("attention.norm", "input_layernorm", "d -> d"),
        _row("attention.q_down", "self_attn.q_a_proj", "d q -> q d"),
        _row("attention.q_norm", "self_attn.q_a_layernorm", "q -> q"),
        _row("attention.q_up", f"self_attn.{q}", "q n h -> (n h) q"),
        _row("attention.kv_down attention.k_rope", "self_attn.kv_a_proj_with_mqa", "d c -> c d", over="c"),
        _row("attention.kv_norm", "self_attn.kv_a_layernorm", "c -> c"),
        _row("attention.k_up attention.v_up", "self_attn.kv_b_proj", "c n h -> (n h) c", over="h"),
        _row("attention.out", "self_attn.o_proj", "n d v -> d (n v)"),
        _row("attention.indexer.q", "self_attn.indexer.wq_b", "q i h -> (i h) q"),
        _row("attention.indexer.k", "self_attn.indexer.wk", "d h -> h d"),
        _row("attention.indexer.k_norm", "self_attn.indexer.k_norm", "h -> h"),
        Row(("attention.indexer.k_bias",), ("self_attn.indexer.k_norm.bias",), "h -> h"),
        _row("attention.indexer.heads", "self_attn.indexer.weights_proj", "d i -> i d"),
    ]


def _mlp(arrays: str, tensors: str, names: str = "gate_proj up_proj down_proj") -> list[Row]:
    gate, up, down = (f"{tensors}.{name}" for name in names.split())
    return [
        _row(f"{arrays}.up", f"{gate} {up}", "d g f -> f d", over="g"),
        _row(f"{arrays}.down", down, "f d -> d f"),
    ]


def _dense() -> list[Row]:
    return [_row("mlp.norm", "post_attention_layernorm", "d -> d"), *_mlp("mlp.mlp", "mlp")]


def _experts() -> list[Row]:
    return [
        _row("dispatch.norm", "post_attention_layernorm", "d -> d"),
        _row("dispatch.router", "mlp.gate", "d e -> e d"),
        Row(("router_bias",), ("mlp.gate.e_score_correction_bias",), "e -> e"),
        *_mlp("dispatch.shared", "mlp.shared_experts"),
        *_mlp("experts", "mlp.experts.{expert}"),
    ]


def _mtp() -> list[Row]:
    return [
        _row("embed_norm", "enorm", "d -> d"),
        _row("hidden_norm", "hnorm", "d -> d"),
        _row("projection", "eh_proj", "i d -> d i"),
        _row("head_norm", "shared_head.norm", "d -> d"),
    ]


def _copies(c: Model) -> Iterator[Row]:
    """MTP modules have the model's embedding and head, which the files repeat."""
    head = ("params.embed", "v d -> v d") if c.tie_word_embeddings else ("params.head", "d v -> v d")
    for layer in range(c.num_hidden_layers, c.num_hidden_layers + c.num_nextn_predict_layers):
        for name, (array, pattern) in {
            "embed_tokens": ("params.embed", "v d -> v d"),
            "shared_head.head": head,
        }.items():
            yield Row((array,), (f"model.layers.{layer}.{name}.weight",), pattern, copy=True)


# ------------------------------------------------------------------------------------------------- V4

_SAVED = {  # what transformers calls otherwise, and what the official files call it
    r"^model\.": "",
    r"^embed_tokens\.": "embed.",
    r"^lm_head\.": "head.",
    r"^hc_head\.hc_": "hc_head_",
    r"\.attn\.norm\.": ".attn.kv_norm.",
    r"\.scale$": ".weight_scale_inv",  # this one as V3's files do
}


def official(name: str) -> str:
    """The name in the table of a tensor of V4, whether it is of an official file or saved by transformers."""
    for found, wanted in _SAVED.items():
        name = re.sub(found, wanted, name)
    return name


def _v4(c: Model) -> list[Row]:
    rows = [
        Row(("params.embed",), ("embed.weight",), "v d -> v d"),
        Row(("params.norm",), ("norm.weight",), "d -> d"),
        Row(("params.head",), ("head.weight",), "d v -> v d"),
        *_connection("params.hyper", "hc_head"),
    ]
    first, layer = 0, [*_v4_attention(), *_v4_experts()]
    for name, stack in layout.stacks(c).items():
        turn = len(stack.kinds)
        for i in range(turn):
            rows += _stacked(f"{name}.{i}" if turn > 1 else name, "layers.", layer, first + i, turn)
        rows += _stacked(name, "layers.", [_router(c, name)], first)
        first += turn * stack.count
    rows += _stacked("mtp.layer", "mtp.", layer, 0)
    return rows + _stacked("mtp", "mtp.", [_router(c, "mtp"), *_v4_mtp()], 0)


def _router(c: Model, stack: str) -> Row:
    """What routers read of the state: of all layers of a stack together, whichever take turns."""
    if stack == "hash_layers":
        return Row(("router_bias",), ("ffn.gate.tid2eid",), "v k -> v k", below=c.n_routed_experts)
    return Row(("router_bias",), ("ffn.gate.bias",), "e -> e")


def _connection(array: str, tensor: str) -> list[Row]:
    return [
        Row((f"{array}.project",), (f"{tensor}_fn",), "n d k -> k (n d)"),
        Row((f"{array}.scale",), (f"{tensor}_scale",), "p -> p"),
        Row((f"{array}.base",), (f"{tensor}_base",), "k -> k"),
    ]


def _compressor(array: str, tensor: str) -> list[Row]:
    return [
        _row(f"{array}.kv", f"{tensor}.wkv", "d p -> p d"),
        _row(f"{array}.gate", f"{tensor}.wgate", "d p -> p d"),
        Row((f"{array}.bias",), (f"{tensor}.ape",), "r p -> r p"),
        _row(f"{array}.norm", f"{tensor}.norm", "h -> h"),
    ]


def _v4_attention() -> list[Row]:
    return [
        _row("attention.norm", "attn_norm", "d -> d"),
        _row("attention.q_down", "attn.wq_a", "d q -> q d"),
        _row("attention.q_norm", "attn.q_norm", "q -> q"),
        _row("attention.q_up", "attn.wq_b", "q n h -> (n h) q"),
        _row("attention.kv", "attn.wkv", "d h -> h d"),
        _row("attention.kv_norm", "attn.kv_norm", "h -> h"),
        Row(("attention.sinks",), ("attn.attn_sink",), "n -> n"),
        _row("attention.out_down", "attn.wo_a", "g n h r -> (g r) (n h)"),
        _row("attention.out_up", "attn.wo_b", "g r d -> d (g r)"),
        *_compressor("attention.compressor", "attn.compressor"),
        _row("attention.indexer.q", "attn.indexer.wq_b", "q i h -> (i h) q"),
        _row("attention.indexer.heads", "attn.indexer.weights_proj", "d i -> i d"),
        *_compressor("attention.indexer.compressor", "attn.indexer.compressor"),
        *_connection("attention.hyper", "hc_attn"),
    ]


def _v4_experts() -> list[Row]:
    return [
        _row("dispatch.norm", "ffn_norm", "d -> d"),
        _row("dispatch.router", "ffn.gate", "d e -> e d"),
        *_mlp("dispatch.shared", "ffn.shared_experts", "w1 w3 w2"),
        *_mlp("experts", "ffn.experts.{expert}", "w1 w3 w2"),
        *_connection("dispatch.hyper", "hc_ffn"),
    ]


def _v4_mtp() -> list[Row]:
    return [
        _row("embed_norm", "enorm", "d -> d"),
        _row("hidden_norm", "hnorm", "d -> d"),
        _row("projection", "e_proj", "i d -> d i"),
        _row("of_streams", "h_proj", "i d -> d i"),
        _row("head_norm", "norm", "d -> d"),
        *_connection("hyper", "hc_head"),
    ]

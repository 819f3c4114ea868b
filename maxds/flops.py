"""Model FLOPs of a training token, and what a device can do at most: together, MFU.

The formula is "causal: 6·active matmul parameters + causal attention". A multiply-add is two FLOPs, and the backward
pass costs twice the forward. A token attends to half of the sequence on average, or to what an indexer, which scores
all of that half, selects of it; with V4's attention, to a window and to compressed entries. Of the experts those count
that a token goes to. Norms, rotary embeddings, softmax and the embedding's lookup do not count, nor does what
rematerialization computes again.
"""

import re
from fractions import Fraction

from maxds.architecture import OVERLAPPED, Model

FORMULA = "causal: 6·active matmul parameters + causal attention"

# bf16 FLOP/s of one JAX device, dense, as vendors publish them. A tpu7x chip (2307e12) is two devices.
_PEAKS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153.5e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def per_token(model: Model, sequence_length: int) -> dict[str, int]:
    """Training FLOPs of one token in a sequence of `sequence_length` tokens, by block, and their `total`.

    `projections` are the matmuls around attention, `attention` its scores and weighted sums, and `indexer` both of the
    indexer; `hyper_connections` is what the weights of streams are made by, and `engrams` keys and values of what is
    looked up. `mtp` holds the MTP layers with the projections that feed them, `mtp_head` their passes through the
    output head.
    """
    hidden, modules = model.hidden_size, model.num_nextn_predict_layers
    layers = [attention(model, ratio, sequence_length) for ratio in model.layer_ratios]
    one_module = sum(attention(model, model.mtp_ratio, sequence_length).values()) if modules else 0
    router, joined = hidden * model.n_routed_experts, (1 + (model.hc_mult or 1)) * hidden * hidden
    experts = 3 * hidden * model.moe_intermediate_size * (model.num_experts_per_tok + model.n_shared_experts)
    head, streams = hidden * model.vocab_size, model.hc_mult or 0
    layer_streams, last_streams = 2 * streams * hidden * (2 * streams + model.hc_mixes), streams * streams * hidden
    engrams = len(model.engram_layer_ids) * (1 + (streams or 1)) * model.engram_dim * hidden
    multiplies = {
        **{name: sum(layer[name] for layer in layers) for name in layers[0]},
        "dense_mlp": model.first_k_dense_replace * 3 * hidden * model.intermediate_size,
        "router": model.num_moe_layers * router,
        "experts": model.num_moe_layers * experts,
        "hyper_connections": model.num_hidden_layers * layer_streams + last_streams,
        "engrams": engrams,
        "head": head,
        "mtp": modules * (one_module + router + experts + joined + layer_streams + last_streams),
        "mtp_head": modules * head,
    }
    blocks = {name: 6 * count for name, count in multiplies.items()}
    return blocks | {"total": sum(blocks.values())}


def attention(model: Model, ratio: int | None, length: int) -> dict[str, int]:
    """Multiplications of one layer by a token, of a ratio of `compress_ratios` or with multi-head latent attention."""
    hidden, heads, rank = model.hidden_size, model.num_attention_heads, model.q_lora_rank
    if ratio is None:
        query = heads * model.qk_head_dim
        queries = hidden * query if rank is None else rank * (hidden + query)
        latent = hidden * (model.kv_lora_rank + model.qk_rope_head_dim)
        keys_values = model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
        attended = _attended(model.index_topk or length, length)
        return {
            "projections": queries + latent + keys_values + heads * model.v_head_dim * hidden,
            "attention": int(heads * (model.qk_head_dim + model.v_head_dim) * attended),
            "indexer": _indexer(model, length, hidden * model.index_head_dim) if model.index_topk else 0,
        }
    size, series = model.head_dim, 2 if ratio == OVERLAPPED else 1
    out = model.o_lora_rank * (heads * size + model.o_groups * hidden)
    entries, pooled = (length // ratio, 2 * series * hidden) if ratio else (0, 0)
    most = model.index_topk if ratio == OVERLAPPED and model.index_topk else entries
    attended = _attended(model.sliding_window, length) + _attended(most, entries)
    return {
        "projections": (rank or 0) * (hidden + heads * size) + hidden * size + out + pooled * size,
        "attention": int(2 * heads * size * attended),
        "indexer": _indexer(model, entries, pooled * model.index_head_dim) if ratio == OVERLAPPED else 0,
    }


def _attended(most: int, length: int) -> Fraction:
    """Keys of a token, on average over a sequence of so many, if it sees those before it and attends to `most`."""
    most = min(most, length)
    return Fraction(most * (2 * length - most), 2 * length) if length else Fraction()


def _indexer(model: Model, keys: int, of_keys: int) -> int:
    """Multiplications of one layer's indexer by a token: its projections, and its scores of half of the keys."""
    heads, size = model.index_n_heads, model.index_head_dim
    projections = (model.q_lora_rank or 0) * heads * size + model.hidden_size * heads + of_keys
    return projections + keys * heads * (size + 1) // 2


def peak(device_kind: str) -> float | None:
    """Peak dense bf16 FLOP/s of a JAX device, by its `device_kind`; None where it is not known."""
    gpu = re.match(r"NVIDIA (A100|H100|H200|B200)\b", device_kind)  # followed by the form and the memory
    return _PEAKS.get(gpu.group() if gpu else device_kind)

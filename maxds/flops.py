"""Model FLOPs of a training token, and what a device can do at most: together, MFU.

The formula is "causal: 6·active matmul parameters + causal attention". A multiply-add is two FLOPs, and the backward
pass costs twice the forward. A token attends to half of the sequence on average, or to what an indexer, which scores
all of that half, selects of it. Of the experts those count that a token goes to. Norms, rotary embeddings, softmax and
the embedding's lookup do not count, nor does what rematerialization computes again.
"""

import re

from maxds.config import Model

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

    `projections` are the matmuls of MLA, `attention` its scores and weighted sums, and `indexer` both of the indexer.
    `mtp` holds the MTP layers with the projections that feed them, `mtp_head` their passes through the output head.
    """
    hidden, modules = model.hidden_size, model.num_nextn_predict_layers
    most = min(model.index_topk or sequence_length, sequence_length)  # keys of a token
    keys = most * (2 * sequence_length - most)  # of a token on average, times 2 * sequence_length
    attention = model.num_attention_heads * (model.qk_head_dim + model.v_head_dim) * keys // (2 * sequence_length)
    indexer = _indexer(model, sequence_length)
    projections = _projections(model)
    router = hidden * model.n_routed_experts
    experts = 3 * hidden * model.moe_intermediate_size * (model.num_experts_per_tok + model.n_shared_experts)
    head = hidden * model.vocab_size
    multiplies = {
        "projections": model.num_hidden_layers * projections,
        "attention": model.num_hidden_layers * attention,
        "indexer": model.num_hidden_layers * indexer,
        "dense_mlp": model.first_k_dense_replace * 3 * hidden * model.intermediate_size,
        "router": model.num_moe_layers * router,
        "experts": model.num_moe_layers * experts,
        "head": head,
        "mtp": modules * (projections + attention + indexer + router + experts + 2 * hidden * hidden),
        "mtp_head": modules * head,
    }
    blocks = {name: 6 * count for name, count in multiplies.items()}
    return blocks | {"total": sum(blocks.values())}


def _projections(model: Model) -> int:
    """Matmul parameters of one layer's MLA."""
    hidden, heads, rank = model.hidden_size, model.num_attention_heads, model.q_lora_rank
    query = heads * model.qk_head_dim
    queries = hidden * query if rank is None else rank * (hidden + query)
    latent = hidden * (model.kv_lora_rank + model.qk_rope_head_dim)
    keys_values = model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
    return queries + latent + keys_values + heads * model.v_head_dim * hidden


def _indexer(model: Model, length: int) -> int:
    """Multiplications of one layer's indexer by a token: its projections, and its scores of half of the tokens."""
    if model.index_topk is None:
        return 0
    heads, size = model.index_n_heads, model.index_head_dim
    projections = (model.q_lora_rank or 0) * heads * size + model.hidden_size * (size + heads)
    return projections + length * heads * (size + 1) // 2


def peak(device_kind: str) -> float | None:
    """Peak dense bf16 FLOP/s of a JAX device, by its `device_kind`; None where it is not known."""
    gpu = re.match(r"NVIDIA (A100|H100|H200|B200)\b", device_kind)  # followed by the form and the memory
    return _PEAKS.get(gpu.group() if gpu else device_kind)

"""What a model is made of: the `model` section of a config.

Keys carry the names of the official Hugging Face `config.json` files, so that they can be pasted.
"""

import math
from typing import Literal

from maxds.section import positive, require, section

LATENT_KEYS = "kv_lora_rank qk_nope_head_dim v_head_dim"
ENGRAM_ROWS = 2_000_000_000  # of the tables of a layer: they are numbered in 32 bits
COMPRESSED_KEYS = "head_dim sliding_window o_groups o_lora_rank"
MOST = 10_000  # of layers, and of experts in one: more is a mistake, which would take for ever to write out
MOST_PERMUTED = 5  # residual streams whose n! permutations are summed
OVERLAPPED = 4  # the ratio of compress_ratios whose blocks overlap, and of which an indexer selects


@section
class RopeScaling:
    """YaRN (arXiv 2309.00071), in Hugging Face's terms."""

    type: Literal["yarn"] = "yarn"
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self):
        require(
            (self.factor >= 1, f"factor={self.factor} must be at least 1"),
            *positive(self, "original_max_position_embeddings beta_slow"),
            (
                self.beta_fast >= self.beta_slow,
                f"beta_fast={self.beta_fast} must not be less than beta_slow={self.beta_slow}",
            ),
            (self.mscale >= 0, f"mscale={self.mscale} must not be negative"),
            (self.mscale_all_dim >= 0, f"mscale_all_dim={self.mscale_all_dim} must not be negative"),
        )


@section
class Model:
    vocab_size: int
    hidden_size: int
    intermediate_size: int = 0  # of the leading dense layers
    moe_intermediate_size: int  # of one expert
    num_hidden_layers: int
    first_k_dense_replace: int = 0  # leading layers with a dense MLP instead of experts
    num_attention_heads: int
    q_lora_rank: int | None  # null: queries are projected directly (V2-Lite)
    qk_rope_head_dim: int
    # multi-head latent attention (V2, V3, Kimi-K2)
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    v_head_dim: int = 0
    # V4's attention, for each layer, then for each MTP module: 0 for a window alone; 4, overlapping blocks of so many
    # tokens, each compressed to one entry, of which an indexer selects; any other for disjoint blocks. null: multi-head
    # latent attention
    compress_ratios: tuple[int, ...] | None = None
    compress_rope_theta: float = 160000.0  # of layers that compress, which rope_scaling is for; rope_theta: of others
    head_dim: int = 0
    sliding_window: int = 0  # tokens that a query sees uncompressed, its own included
    o_groups: int = 0  # groups of heads, each with an output projection of its own,
    o_lora_rank: int = 0  # to so many dimensions
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    scoring_func: Literal["softmax", "sigmoid", "sqrtsoftplus"]
    # greedy: plain top-k; group_limited_greedy: V2, groups ranked by their best expert;
    # noaux_tc: V3, bias-corrected selection, groups ranked by the sum of their best two experts
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_hash_layers: int = 0  # leading MoE layers in which a table chooses the experts of each token of the vocabulary
    swiglu_limit: float | None = None  # of experts: gates are no larger, and what they gate is within it
    # manifold-constrained hyper-connections (arXiv 2512.24880): streams in place of the residual one. null: none
    hc_mult: int | None = None
    hc_sinkhorn_iters: int | None = 20  # null: streams are mixed by sums of permutations (mHC-lite, arXiv 2601.05732)
    hc_eps: float = 1e-6
    num_nextn_predict_layers: int = 0  # MTP modules
    # V3.2's lightning indexer: each query attends to the index_topk keys that it scores highest; V4's: to so many
    # compressed entries. null: no indexer
    index_topk: int | None = None
    index_n_heads: int = 64
    index_head_dim: int = 128
    # Engram (arXiv 2601.07372): what is learned of the n-grams that a token ends, looked up in tables by their hashes
    # and added before these layers. (): none
    engram_layer_ids: tuple[int, ...] = ()
    engram_vocab_size: tuple[int, ...] = ()  # for n-grams of 2 tokens, of 3, …: rows of a head's table, at least
    engram_max_ngram_size: int = 3
    engram_n_heads: int = 8  # hashes of each n-gram, into tables of their own
    engram_head_dim: int = 256
    engram_kernel_size: int = 4  # of the convolution over tokens that lie engram_max_ngram_size apart
    engram_pad_token_id: int = 2  # stands for what would lie before the first token of a document
    # Of how many classes the tokens are for n-grams: those of data.tokenizer whose texts differ in case, accents or
    # blanks only are one. null: each token is its own. A wrong number is refused with the right one
    engram_compressed_vocab_size: int | None = None
    engram_seed: int = 0  # of the hashes
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    def __post_init__(self):
        always = (
            "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads qk_rope_head_dim "
            "n_routed_experts num_experts_per_tok n_group topk_group index_n_heads index_head_dim "
            "max_position_embeddings routed_scaling_factor rms_norm_eps rope_theta compress_rope_theta "
            "initializer_range"
        )
        latent, compressed = (tuple(keys.split()) for keys in (LATENT_KEYS, COMPRESSED_KEYS))
        needed, unused = (latent, compressed) if self.compress_ratios is None else (compressed, latent)
        dense = ("intermediate_size",) if self.first_k_dense_replace else ()
        kind = "null" if self.compress_ratios is None else "set"
        require(
            *positive(self, " ".join([always, *dense, *needed])),
            *(
                (getattr(self, k) == 0, f"{k}={getattr(self, k)} has no effect with compress_ratios {kind}")
                for k in unused
            ),
        )
        require(*self._layers(), *self._attention(), *self._indexer(), *self._engram(), *self._routing())

    def _layers(self) -> tuple[tuple[bool, str], ...]:
        dense, hashed, modules = self.first_k_dense_replace, self.num_hash_layers, self.num_nextn_predict_layers
        return (
            (modules >= 0, f"num_nextn_predict_layers={modules} must not be negative"),
            *(
                (getattr(self, k) <= MOST, f"{k}={getattr(self, k)} must be {MOST:,} at most")
                for k in ("num_hidden_layers", "num_nextn_predict_layers", "n_routed_experts")
            ),
            (
                0 <= dense < self.num_hidden_layers,
                f"first_k_dense_replace={dense} must leave at least one of num_hidden_layers={self.num_hidden_layers} "
                f"to the experts",
            ),
            (
                0 <= hashed < self.num_hidden_layers - max(dense, 0),
                f"num_hash_layers={hashed} must leave at least one of the {self.num_hidden_layers - dense} MoE layers "
                f"to a router",
            ),
            (
                self.swiglu_limit is None or self.swiglu_limit > 0,
                f"swiglu_limit={self.swiglu_limit} must be positive, or null for none",
            ),
            (
                self.hc_mult is None or self.hc_mult > 1,
                f"hc_mult={self.hc_mult} must be at least 2, or null for one residual stream",
            ),
            (
                self.hc_sinkhorn_iters is None or self.hc_sinkhorn_iters > 0,
                f"hc_sinkhorn_iters={self.hc_sinkhorn_iters} must be positive, or null to sum permutations",
            ),
            (
                self.hc_sinkhorn_iters is not None or (self.hc_mult or 0) <= MOST_PERMUTED,
                f"hc_mult={self.hc_mult} streams have too many permutations; with hc_sinkhorn_iters null there may be "
                f"{MOST_PERMUTED} streams at most",
            ),
            (self.hc_eps > 0, f"hc_eps={self.hc_eps} must be positive"),
        )

    def _attention(self) -> tuple[tuple[bool, str], ...]:
        ratios, yarn, modules = self.compress_ratios, self.rope_scaling, self.num_nextn_predict_layers
        checks = (
            (
                self.q_lora_rank is None or self.q_lora_rank > 0,
                f"q_lora_rank={self.q_lora_rank} must be positive, or null for none",
            ),
            (self.qk_rope_head_dim % 2 == 0, f"qk_rope_head_dim={self.qk_rope_head_dim} must be even"),
        )
        if ratios is None:
            return checks
        return (
            *checks,
            (
                len(ratios) == self.num_hidden_layers + modules and all(r == 0 or r > 1 for r in ratios),
                f"compress_ratios={list(ratios)} must be one for each of num_hidden_layers={self.num_hidden_layers}, "
                f"then of num_nextn_predict_layers={modules}, 0 or at least 2",
            ),
            (
                len(set(ratios[self.num_hidden_layers :])) <= 1,
                f"compress_ratios=[…, {', '.join(map(str, ratios[self.num_hidden_layers :]))}] must end alike: MTP "
                f"modules are of one kind",
            ),
            (
                yarn is None or yarn.mscale == yarn.mscale_all_dim,
                "rope_scaling must not scale attention where compress_ratios is set: make mscale and mscale_all_dim "
                "equal",
            ),
            (self.q_lora_rank is not None, "compress_ratios needs the latent of queries: set q_lora_rank"),
            (
                self.first_k_dense_replace == 0,
                f"first_k_dense_replace={self.first_k_dense_replace} must be 0 with them",
            ),
            (
                self.head_dim >= self.qk_rope_head_dim,
                f"head_dim={self.head_dim} has no room for the rotated qk_rope_head_dim={self.qk_rope_head_dim}",
            ),
            (
                self.num_attention_heads % self.o_groups == 0,
                f"num_attention_heads={self.num_attention_heads} is not divisible by o_groups={self.o_groups}",
            ),
        )

    def _indexer(self) -> tuple[tuple[bool, str], ...]:
        topk, ratios = self.index_topk, self.compress_ratios
        return (
            (topk is None or topk > 0, f"index_topk={topk} must be positive, or null for no indexer"),
            (
                ratios is None or (topk is not None) == (OVERLAPPED in ratios),
                f"index_topk={topk} belongs to layers of ratio {OVERLAPPED} in compress_ratios; set both, or neither",
            ),
            (
                topk is None or self.q_lora_rank is not None,
                f"index_topk={topk} needs the latent of queries, which q_lora_rank=null leaves out; set both, or "
                f"neither",
            ),
            (
                topk is None or self.index_head_dim >= self.qk_rope_head_dim,
                f"index_head_dim={self.index_head_dim} has no room for the rotated qk_rope_head_dim="
                f"{self.qk_rope_head_dim}",
            ),
        )

    def _engram(self) -> tuple[tuple[bool, str], ...]:
        layers, sizes, longest = self.engram_layer_ids, self.engram_vocab_size, self.engram_max_ngram_size
        classes, pad = self.engram_compressed_vocab_size, self.engram_pad_token_id
        if not layers:
            return (
                (not sizes, f"engram_vocab_size={list(sizes)} has no effect without engram_layer_ids"),
                (classes is None, f"engram_compressed_vocab_size={classes} has no effect without engram_layer_ids"),
            )
        return (
            *positive(self, "engram_n_heads engram_head_dim engram_kernel_size"),
            (self.engram_seed >= 0, f"engram_seed={self.engram_seed} must not be negative"),
            (
                list(layers) == sorted(set(layers)) and layers[0] >= 0 and layers[-1] < self.num_hidden_layers,
                f"engram_layer_ids={list(layers)} must be different layers, in order, from 0 to "
                f"{self.num_hidden_layers - 1}",
            ),
            (
                longest >= 2 and len(sizes) == longest - 1 and all(size > 1 for size in sizes),
                f"engram_vocab_size={list(sizes)} must be a number above 1 for each size of n-grams, 2 to "
                f"engram_max_ngram_size={longest}",
            ),
            (
                self.engram_n_heads * sum(sizes) <= ENGRAM_ROWS,
                f"engram_vocab_size={list(sizes)} with engram_n_heads={self.engram_n_heads} makes more than "
                f"{ENGRAM_ROWS:,} rows a layer; lower one of them",
            ),
            (
                0 <= pad < self.vocab_size,
                f"engram_pad_token_id={pad} must be a token, 0 to {self.vocab_size - 1}",
            ),
            (
                classes is None or 0 < classes <= self.vocab_size,
                f"engram_compressed_vocab_size={classes} must be 1 to vocab_size={self.vocab_size}, or null to leave "
                f"tokens as they are",
            ),
        )

    def _routing(self) -> tuple[tuple[bool, str], ...]:
        experts, groups, k = self.n_routed_experts, self.n_group, self.num_experts_per_tok
        return (
            (self.n_shared_experts >= 0, f"n_shared_experts={self.n_shared_experts} must not be negative"),
            (experts % groups == 0, f"n_routed_experts={experts} is not divisible by n_group={groups}"),
            (self.topk_group <= groups, f"topk_group={self.topk_group} exceeds n_group={groups}"),
            (
                self.topk_method != "greedy" or groups == 1,
                f"n_group={groups} has no effect with topk_method=greedy; set n_group=1, or another topk_method",
            ),
            (
                k <= experts // groups * self.topk_group,
                f"num_experts_per_tok={k} exceeds the {experts // groups * self.topk_group} experts in "
                f"topk_group={self.topk_group} of n_group={groups} groups",
            ),
            (
                self.topk_method != "noaux_tc" or groups == 1 or experts // groups >= 2,
                f"topk_method=noaux_tc ranks groups by their best two experts, but n_routed_experts={experts} "
                f"in n_group={groups} groups leaves one each",
            ),
        )

    @property
    def num_moe_layers(self) -> int:
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def layer_ratios(self) -> tuple[int | None, ...]:
        """Of `compress_ratios`, those of the main model's layers; None for each with multi-head latent attention."""
        if self.compress_ratios is None:
            return (None,) * self.num_hidden_layers
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def mtp_ratio(self) -> int | None:
        """Of `compress_ratios`, that of all MTP modules."""
        return self.compress_ratios[-1] if self.compress_ratios else None

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def engram_dim(self) -> int:
        """Of what is looked up for a token in a layer's tables."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads * self.engram_head_dim

    @property
    def hc_mixes(self) -> int:
        """Of how many numbers the matrix is made that mixes residual streams."""
        streams = self.hc_mult or 0
        return streams * streams if self.hc_sinkhorn_iters else math.factorial(streams)

    @property
    def has_router_bias(self) -> bool:
        return self.topk_method == "noaux_tc"

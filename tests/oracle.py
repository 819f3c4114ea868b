"""The model once more, from the papers and for nobody's hardware: NumPy, double precision, a loop for everything.

It shares no code with maxds, only the names of weights. One document at a time, one head at a
time, one token at a time; nothing is packed, batched, sorted or absorbed. Weights are complex, so that
a slope can be had to full precision by the complex step: along d, it is Im f(w + i h d) / h.
Therefore there is no absolute value and no conjugate here, and comparisons look at real parts.

V2: arXiv 2405.04434; V3: arXiv 2412.19437; V3.2: arXiv 2512.02556; YaRN: arXiv 2309.00071; mHC: arXiv 2512.24880; V4:
as transformers has it; Engram: arXiv 2601.07372, and what it leaves open as in deepseek-ai/Engram on GitHub.
"""

import collections
import dataclasses
import functools
import itertools
import math

import numpy as np


def norm(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    weights = np.exp(x - x.real.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def logsumexp(x):
    top = x.real.max()
    return top + np.log(np.exp(x - top).sum())


def mlp(c, x, up, down):
    """Up [D 2 F]: gate, then up."""
    gate, up = x @ up[:, 0], x @ up[:, 1]
    if (limit := c.swiglu_limit) is not None:
        gate = np.where(gate.real > limit, limit, gate)
        up = np.where(up.real > limit, limit, np.where(up.real < -limit, -limit, up))
    return (silu(gate) * up) @ down


# ------------------------------------------------------------------------------------- attention


def temperature(factor, mscale):
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def frequency(c, j):
    """Radians per position of pair j (YaRN, section 3.2)."""
    dim, plain = c.qk_rope_head_dim, c.rope_theta ** (-2 * j / c.qk_rope_head_dim)
    if (y := c.rope_scaling) is None:
        return plain

    def pair_that_turns(times):  # within the original context
        wavelength = y.original_max_position_embeddings / times
        return dim / 2 * math.log(wavelength / (2 * math.pi)) / math.log(c.rope_theta)

    low, high = max(math.floor(pair_that_turns(y.beta_fast)), 0), min(math.ceil(pair_that_turns(y.beta_slow)), dim - 1)
    slowed = min(max((j - low) / (high - low), 0), 1)
    return slowed * plain / y.factor + (1 - slowed) * plain


@functools.cache
def turns(c, position):
    """Cosine and sine of each pair."""
    y = c.rope_scaling
    scale = temperature(y.factor, y.mscale) / temperature(y.factor, y.mscale_all_dim) if y else 1.0
    return [
        tuple(scale * f(position * frequency(c, j)) for f in (math.cos, math.sin))
        for j in range(c.qk_rope_head_dim // 2)
    ]


def rotate(c, x, position):
    """Turns each pair of x [dim] as a complex number."""
    out = np.empty_like(x)
    for j, (cos, sin) in enumerate(turns(c, position)):
        a, b = x[2 * j], x[2 * j + 1]
        out[2 * j], out[2 * j + 1] = a * cos - b * sin, a * sin + b * cos
    return out


def rotate_halves(c, x, position):
    """As `rotate`, of the first dimensions, whose pairs are j and j + half; the rest stays."""
    out, dim = x.copy(), c.qk_rope_head_dim
    pairs = np.arange(dim).reshape(2, -1).T.ravel()
    out[pairs] = rotate(c, x[pairs], position)
    return out


def constant(x):
    """What no gradient flows through."""
    return x.real + 0j


def index_scores(c, w, x, source, positions):
    """V3.2, eq. 1: how much each token of a document, [n D], wants each other one, [n n]."""
    keys = x @ w.k
    keys = keys - keys.mean(-1, keepdims=True)
    keys = keys / np.sqrt((keys * keys).mean(-1, keepdims=True) + 1e-6) * w.k_norm + w.k_bias
    keys = np.stack([rotate_halves(c, k, p) for k, p in zip(keys, positions, strict=True)])
    scores = np.zeros((len(x), len(x)), x.dtype)
    for t, p in enumerate(positions):
        for head in range(c.index_n_heads):
            query = rotate_halves(c, source[t] @ w.q[:, head], p)
            match = keys @ query * c.index_head_dim**-0.5
            scores[t] += x[t] @ w.heads[:, head] * c.index_n_heads**-0.5 * np.where(match.real > 0, match, 0)
    return scores


def mla(c, w, x, positions):
    """One document's attention, [n D] -> [n D] (V2, section 2.1.2: keys and values made explicit, nothing absorbed).

    And the sum over its tokens of the divergence between what attention and the indexer make of the keys (V3.2, eq. 4).
    """
    y = c.rope_scaling
    scale = (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
    if y and y.mscale_all_dim:
        scale *= temperature(y.factor, y.mscale_all_dim) ** 2
    latent = norm(x @ w.kv_down, w.kv_norm, 1e-6)
    rope_key = np.stack([rotate(c, k, p) for k, p in zip(x @ w.k_rope, positions, strict=True)])
    source = x if c.q_lora_rank is None else norm(x @ w.q_down, w.q_norm, 1e-6)
    chosen = [np.arange(t + 1) for t in range(len(x))]
    if c.index_topk is not None:
        wanted = index_scores(c, w.indexer, constant(x), constant(source), positions)
        chosen = [
            np.sort(np.argsort(-wanted[t, seen].real, kind="stable")[: c.index_topk]) for t, seen in enumerate(chosen)
        ]
    attended = [np.zeros(len(keys)) for keys in chosen]
    out = np.zeros_like(x)
    for head in range(c.num_attention_heads):
        query = source @ w.q_up[:, head]
        keys = np.concatenate([latent @ w.k_up[:, head], rope_key], -1)
        values = latent @ w.v_up[:, head]
        for t, position in enumerate(positions):
            nope, rope = query[t, : c.qk_nope_head_dim], query[t, c.qk_nope_head_dim :]
            q = np.concatenate([nope, rotate(c, rope, position)])
            weights = softmax(keys[chosen[t]] @ q * scale)
            attended[t] += weights.real / c.num_attention_heads
            out[t] += weights @ values[chosen[t]] @ w.out[head].T
    if c.index_topk is None:
        return out, 0.0
    return out, sum(
        p @ (np.log(p) - wanted[t, chosen[t]] + logsumexp(wanted[t, chosen[t]])) for t, p in enumerate(attended)
    )


# ------------------------------------------------------------------------- attention to entries (V4)


def turned(c, x, position):
    """As `rotate`, of the last dimensions; the rest stays."""
    still = len(x) - c.qk_rope_head_dim
    return np.concatenate([x[:still], rotate(c, x[still:], position)])


def entries(c, ratio, w, x):
    """Of each whole block of a document's tokens [n D], one entry: a mean of each channel, weighted by a softmax."""
    size, found = len(w.norm), []
    for start in range(0, len(x) - ratio + 1, ratio):
        own, before = x[start : start + ratio], x[max(start - ratio, 0) : start]
        values, gates = own @ w.kv, own @ w.gate + w.bias
        if ratio == 4:
            values, gates = values[:, size:], gates[:, size:]
            values = np.concatenate([values, before @ w.kv[:, :size]])
            gates = np.concatenate([gates, before @ w.gate[:, :size] + w.bias[: len(before), :size]])
        pooled = np.sum(softmax(gates.T).T * values, axis=0)
        found.append(turned(c, norm(pooled, w.norm, c.rms_norm_eps), start))
    return found


def entry_scores(c, w, x, source, position, keys):
    """How much one token [D] wants each of the indexer's keys."""
    scores = np.zeros(len(keys), x.dtype)
    for head in range(c.index_n_heads if len(keys) else 0):
        query = turned(c, source @ w.q[:, head], position)
        match = np.array(keys) @ query * c.index_head_dim**-0.5
        scores += x @ w.heads[:, head] * c.index_n_heads**-0.5 * np.where(match.real > 0, match, 0)
    return scores


def compressed_attention(c, ratio, w, x):
    """One document's attention in a layer of this ratio, [n D] -> [n D], from its start.

    And the sum over its tokens of the divergence between what attention and the indexer make of the entries.
    """
    plain = dataclasses.replace(c, rope_scaling=None)
    c = dataclasses.replace(c, rope_theta=c.compress_rope_theta) if ratio else plain
    eps, in_group = c.rms_norm_eps, c.num_attention_heads // c.o_groups
    source = norm(x @ w.q_down, w.q_norm, eps)
    keys = [turned(c, norm(token @ w.kv, w.kv_norm, eps), t) for t, token in enumerate(x)]
    far = entries(c, ratio, w.compressor, x) if ratio else []
    index_keys = entries(c, ratio, w.indexer.compressor, constant(x)) if w.indexer else []
    out, loss = np.zeros_like(x), 0.0
    for t in range(len(x)):
        chosen = np.arange((t + 1) // ratio if ratio else 0)
        if w.indexer:
            wanted = entry_scores(c, w.indexer, constant(x[t]), constant(source[t]), t, index_keys)
            chosen = np.sort(np.argsort(-wanted[chosen].real, kind="stable")[: c.index_topk])
        near = keys[max(t + 1 - c.sliding_window, 0) : t + 1]
        read, attended = np.array([*near, *(far[j] for j in chosen)]), np.zeros(len(chosen))
        for head in range(c.num_attention_heads):
            query = source[t] @ w.q_up[:, head]
            query = turned(c, query / np.sqrt(query @ query / c.head_dim + eps), t)
            weights = softmax(np.append(read @ query * c.head_dim**-0.5, w.sinks[head]))[:-1]
            attended += weights[len(near) :].real
            group, member = divmod(head, in_group)
            out[t] += turned(c, weights @ read, -t) @ w.out_down[group, member] @ w.out_up[group]
        if w.indexer and len(chosen):
            p = attended / attended.sum()
            loss += p @ (np.log(p) - wanted[chosen] + logsumexp(wanted[chosen]))
    return out, loss


# --------------------------------------------------------------------------------------- experts


def route(c, scores, bias):
    """Scores [E] of one token -> the experts it goes to. Ties go to the lower index."""
    preference = scores.real if bias is None else scores.real + bias
    if c.topk_method != "greedy":
        groups = preference.reshape(c.n_group, -1)
        best = 2 if c.topk_method == "noaux_tc" else 1
        strength = np.sort(groups, -1)[:, -best:].sum(-1)
        allowed = np.argsort(-strength, kind="stable")[: c.topk_group]
        preference = np.where(np.isin(np.arange(c.n_group), allowed)[:, None], groups, -np.inf).ravel()
    return np.argsort(-preference, kind="stable")[: c.num_experts_per_tok]


SCORES = {
    "softmax": softmax,
    "sigmoid": lambda logits: 1 / (1 + np.exp(-logits)),
    "sqrtsoftplus": lambda logits: np.sqrt(np.log(1 + np.exp(logits))),
}


def moe(c, dispatch, experts, x, given, tokens, real):
    """One row's experts, [S D] -> what they add [S D], the balance loss of the sequence, and the load [E].

    Given is the bias [E], or the table [V K] of a hash layer, which has no balance loss.
    """
    out, load = np.zeros_like(x), np.zeros(c.n_routed_experts, int)
    affinity = np.zeros(c.n_routed_experts, x.dtype)
    for t in np.flatnonzero(real):
        logits = x[t] @ dispatch.router
        scores = SCORES[c.scoring_func](logits)
        hashed = given is not None and given.ndim == 2
        chosen = given[tokens[t]] if hashed else route(c, scores, given)
        weights = scores[chosen]
        if c.norm_topk_prob:
            weights = weights / weights.sum()
        for e, weight in zip(chosen, weights, strict=True):
            out[t] += c.routed_scaling_factor * weight * mlp(c, x[t], experts.up[e], experts.down[e])
            load[e] += 1
        if c.n_shared_experts:
            out[t] += mlp(c, x[t], dispatch.shared.up, dispatch.shared.down)
        affinity += 0 if hashed else scores / scores.sum()
    tokens = max(real.sum(), 1)
    frequency = load * c.n_routed_experts / (c.num_experts_per_tok * tokens)  # V3, eq. 18
    return out, frequency @ affinity / tokens, load


# ---------------------------------------------------------------------------------------- engram


@functools.cache
def tables(c):
    """Of each layer with an Engram, by n-gram size, the rows of each head's table: primes, none of them twice."""
    seen, found = set(), {}
    for layer in c.engram_layer_ids:
        found[layer] = {}
        for n in range(2, c.engram_max_ngram_size + 1):
            heads, candidate = [], c.engram_vocab_size[n - 2]
            while len(heads) < c.engram_n_heads:
                if candidate not in seen and not any(candidate % d == 0 for d in range(2, math.isqrt(candidate) + 1)):
                    heads.append(candidate), seen.add(candidate)
                candidate += 1
            found[layer][n] = heads
    return found


def engram_rows(c, layer, classes, tokens):
    """The rows of a layer's table that each token of a document looks up, with integers of any size."""
    half = max(1, (2**63 - 1) // (c.engram_compressed_vocab_size or c.vocab_size) // 2)
    draws = np.random.default_rng(c.engram_seed + 10007 * layer)
    odd = [2 * int(m) + 1 for m in draws.integers(low=0, high=half, size=(c.engram_max_ngram_size,), dtype=np.int64)]
    found = []
    for t in range(len(tokens)):
        own, start = [], 0
        for n, heads in tables(c)[layer].items():
            mix = 0
            for back in range(n):
                token = tokens[t - back] if t >= back else c.engram_pad_token_id
                mix ^= int(classes[token]) * odd[back]
            for prime in heads:
                own.append(start + mix % prime)
                start += prime
        found.append(own)
    return np.array(found).reshape(len(tokens), -1)


def signed_root(z):
    size = np.where(z.real < 0, -z, z)
    return np.where(z.real < 0, -1, 1) * np.sqrt(np.where(size.real > 1e-6, size, 1e-6))


def remember(c, layer, w, classes, x, tokens):
    """One document's streams [S n D] with what an Engram adds to them (eq. 3 to 6)."""
    memory = np.array([np.concatenate([w.table[row] for row in own]) for own in engram_rows(c, layer, classes, tokens)])
    eps, (kernel, streams), out = c.rms_norm_eps, w.conv.shape[:2], x.copy()
    for i in range(streams):
        keys, queries = norm(memory @ w.key[i], w.key_norm[i], eps), norm(x[:, i], w.query_norm[i], eps)
        gates = sigmoid(signed_root((keys * queries).sum(-1) / np.sqrt(c.hidden_size)))
        gated = gates[:, None] * (memory @ w.value)
        normed = norm(gated, w.conv_norm[i], eps)
        for t in range(len(x)):
            mixed = np.zeros_like(x[t, i])
            for j in range(kernel):
                if (source := t - (kernel - 1 - j) * c.engram_max_ngram_size) >= 0:
                    mixed += w.conv[j, i] * normed[source]
            out[t, i] += gated[t] + silu(mixed)
    return out


# ----------------------------------------------------------------------------------------- model


def weigh(c, w, x):
    """mHC, eq. 5: what a connection's projection makes of the streams [S n D] of each token, [S K]."""
    return np.einsum("snd,ndk->sk", x / np.sqrt((x * x).mean((1, 2), keepdims=True) + c.rms_norm_eps), w.project)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def mixing(c, logits):
    """The matrices [S n n] that streams are mixed by: mHC, eq. 9; or sums of permutations (mHC-lite)."""
    n, eps = c.hc_mult, c.hc_eps
    if c.hc_sinkhorn_iters is None:
        mix = np.zeros((len(logits), n, n), logits.dtype)
        for weight, order in zip(softmax(logits).T, itertools.permutations(range(n)), strict=True):
            for source, target in enumerate(order):
                mix[:, source, target] += weight
        return mix
    mix = softmax(logits.reshape(-1, n, n)) + eps
    for i in range(c.hc_sinkhorn_iters):
        if i > 0:
            mix = mix / (mix.sum(2, keepdims=True) + eps)
        mix = mix / (mix.sum(1, keepdims=True) + eps)
    return mix


def through(c, w, x, stage):
    """The residual stream [S D] with what a stage makes of it; or the streams [S n D] (mHC, eq. 3 to 9)."""
    if w is None:
        return x + stage(x)
    n, eps, k = c.hc_mult, c.hc_eps, weigh(c, w, x)
    read, write, mix = k[:, :n], k[:, n : 2 * n], k[:, 2 * n :]
    read = sigmoid(read * w.scale[0] + w.base[:n]) + eps
    write = 2 * sigmoid(write * w.scale[1] + w.base[n : 2 * n])
    mix = mixing(c, mix * w.scale[2] + w.base[2 * n :])
    made = stage(np.einsum("sn,snd->sd", read, x))
    return write[..., None] * made[:, None] + np.einsum("sij,sid->sjd", mix, x)


def joined(c, w, x):
    """The streams [S n D] after the last layer -> [S D]."""
    if w is None:
        return x
    return np.einsum("sn,snd->sd", sigmoid(weigh(c, w, x) * w.scale + w.base) + c.hc_eps, x)


def decoder_layer(c, i, w, given, x, row, real):
    """Layer i of the model, or None, of [S D] or [S n D] -> the same; balance loss; load [E]; the indexer's loss."""
    found = {"balance": 0.0, "load": None, "indexer": 0.0}
    eps = c.rms_norm_eps

    def attend(x):
        y, made = norm(x, w["attention"].norm, eps), np.zeros_like(x)
        for document in set(row["segments"][real]):
            own = np.flatnonzero((row["segments"] == document) & real)
            if c.compress_ratios is None:
                made[own], divergence = mla(c, w["attention"], y[own], row["positions"][own])
            else:
                made[own], divergence = compressed_attention(c, c.compress_ratios[i], w["attention"], y[own])
            found["indexer"] += divergence
        return made

    def dense(x):
        return mlp(c, norm(x, w["mlp"].norm, eps), w["mlp"].mlp.up, w["mlp"].mlp.down)

    def experts(x):
        y = norm(x, w["dispatch"].norm, eps)
        made, found["balance"], found["load"] = moe(c, w["dispatch"], w["experts"], y, given, row["tokens"], real)
        return made

    x = through(c, w["attention"].hyper, x, attend)
    x = through(c, w["mlp"].hyper, x, dense) if "mlp" in w else through(c, w["dispatch"].hyper, x, experts)
    return x, found["balance"], found["load"], found["indexer"]


def ahead(row, t, steps):
    """The token `steps` after t in the document of t, or None. The row's last target lies beyond the row."""
    last = t + steps - 1
    if last >= len(row["tokens"]) or row["segments"][last] != row["segments"][t] or row["targets"][last] < 0:
        return None
    return row["targets"][last]


def cross_entropy(w, x, row, steps):
    """Sums over one row of -log p(the token `steps` ahead) and logsumexp^2, their count, and the logits [S V]."""
    logits = x @ (w.embed.T if w.head is None else w.head)
    nll = z = 0.0
    count = 0
    for t in range(len(x)):
        if (target := ahead(row, t, steps)) is not None:
            lse = logsumexp(logits[t])
            nll, z, count = nll + lse - logits[t, target], z + lse**2, count + 1
    return nll, z, count, logits


def leave(c, hyper, scale, x):
    """What the head is given, and the next MTP module: without hyper-connections the same."""
    hidden = norm(joined(c, hyper, x), scale, c.rms_norm_eps)
    return hidden, hidden if c.hc_mult is None else x


def mtp_input(c, w, module, x, row, depth):
    """What enters the layer of an MTP module, of hidden states [S D] or streams [S n D], and which tokens do.

    V3, section 2.2; of streams, what V4's released weights are for: a matrix for each, the one for all streams.
    """
    following = [ahead(row, t, depth + 1) for t in range(len(x))]
    embedded = w.embed[[token if token is not None else 0 for token in following]]
    both = norm(embedded, module.embed_norm, c.rms_norm_eps), norm(x, module.hidden_norm, c.rms_norm_eps)
    real = np.array([token is not None for token in following])
    if c.hc_mult is None:
        return np.concatenate(both, -1) @ module.projection, real
    return (both[0] @ module.projection)[:, None] + both[1] @ module.of_streams, real


def layers(w, layer):
    """Stack, place in it, and weights of each layer of the main model. Kinds take turns in a stack."""
    stacks = {name: getattr(w, name) for name in ("dense_layers", "hash_layers", "moe_layers", "last_layers")}
    # What an Engram cuts off has its first layer in its name, and lies between what is before it and what follows.
    for cut in sorted(w.cut_layers or {}, key=lambda name: int(name.split("_")[-1])):
        stacks[cut] = w.cut_layers[cut]
    for stack, tree in stacks.items():
        if tree is not None:
            kinds = [tree] if "attention" in tree else [tree[kind] for kind in sorted(tree)]
            for i in range(len(kinds) * len(kinds[0]["attention"].norm)):
                yield stack, i, layer(kinds[i % len(kinds)], i // len(kinds))


def look_back(c, number, w, bias, x, row):
    """The streams of a row, as layer `number` gets them."""
    if number not in c.engram_layer_ids:
        return x
    x = x if c.hc_mult else x[:, None]
    for document in set(row["segments"]) - {0}:
        own = np.flatnonzero(row["segments"] == document)
        x[own] = remember(c, number, w.engrams[str(number)], bias["engrams"], x[own], row["tokens"][own])
    return x if c.hc_mult else x[:, 0]


def run(c, w, bias, batch, layer):
    """Every term's (sum, count), expert loads by stack [layers E], and logits [B S V].

    `layer(stack, i)` gives layer i's weights of a stack.
    """
    terms = {k: [0.0, 0] for k in ["main", "z_loss", "balance", "indexer"]}
    terms |= {f"mtp_{n + 1}": [0.0, 0] for n in range(c.num_nextn_predict_layers)}
    sizes = collections.Counter(stack for stack, _, _ in layers(w, layer))
    sizes["mtp"] = c.num_nextn_predict_layers
    loads = {k: np.zeros((n, c.n_routed_experts), int) for k, n in sizes.items() if n and not k.startswith("dense")}
    all_logits = []

    def add(term, value, count):
        terms[term] = [terms[term][0] + value, terms[term][1] + count]

    def one_layer(number, stack, i, weights, x, row, real):
        given = bias[stack][i] if stack in bias else None
        x, balance, load, indexer = decoder_layer(c, number, weights, given, x, row, real)
        add("balance", balance, 0), add("indexer", indexer, 0)
        if load is not None:
            loads[stack][i] += load
        return x

    def trunk(row, real):
        x = w.embed[row["tokens"]]
        x = x if c.hc_mult is None else np.repeat(x[:, None], c.hc_mult, 1)
        for number, (stack, i, weights) in enumerate(layers(w, layer)):
            x = look_back(c, number, w, bias, x, row)
            x = one_layer(number, stack, i, weights, x, row, real)
        return x

    def mtp(depth, x, row):
        module = layer(w.mtp, depth)
        x, real = mtp_input(c, w, module, x, row, depth)
        x = one_layer(c.num_hidden_layers + depth, "mtp", depth, module.layer, x, row, real)
        return leave(c, module.hyper, module.head_norm, x)

    for r in range(len(batch["tokens"])):
        row = {name: values[r] for name, values in batch.items()}
        real = row["segments"] > 0
        add("balance", 0.0, int(real.any())), add("indexer", 0.0, real.sum())
        hidden, x = leave(c, w.hyper, w.norm, trunk(row, real))
        nll, z, count, logits = cross_entropy(w, hidden, row, 1)
        add("main", nll, count), add("z_loss", z, count), all_logits.append(logits)
        for depth in range(sizes["mtp"]):
            hidden, x = mtp(depth, x, row)
            nll, _, count, _ = cross_entropy(w, hidden, row, depth + 2)
            add(f"mtp_{depth + 1}", nll, count)
    if c.index_topk is None:
        del terms["indexer"]
    return terms, loads, np.stack(all_logits)

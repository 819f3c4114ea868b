"""Sampling: the prompt through all layers at once, then one token after the other against a cache of latents.

MLA needs neither keys nor values of the past: the normalized latent and the one rotated key of each
token stand for those of all heads (DeepSeek-V2, section 2.1). So the cache holds
kv_lora_rank + qk_rope_head_dim numbers a token and layer, and a step attends in latent space. An indexer's one key
comes on top; of a step's query it selects among those of the cache.

Weights travel as in training: gathered layer by layer, and routed experts stay where they are.
"""

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from maxds import params as params_lib
from maxds.mesh import AXES
from maxds.model import attention, deepseek, indexer, kernels, ops, residual
from maxds.model.deepseek import Context, Network, Outer, Weights
from maxds.model.indexer import Index
from maxds.params import Tree
from maxds.schedule import Given, at

Over = Callable[[attention.Attention, jax.Array, Index | None, tuple, tuple], jax.Array]
"""(weights, queries, what the indexer makes of their tokens, entries of these, the cache's) -> attention's output."""


@flax.struct.dataclass
class Cache:
    """What attention needs of the tokens so far, for all L layers, in the compute dtype."""

    latent: jax.Array  # [L B S C], normalized
    rope: jax.Array  # [L B S qk_rope_head_dim], rotated
    index: jax.Array | None  # [L B S index_head_dim]: keys of the indexer; None without

    def layer(self, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The entries of layer `i`: as `attention.latents` returns them, and the indexer's keys."""
        return at((self.latent, self.rope, self.index), i)

    def write(self, i: jax.Array, positions: jax.Array, entries: tuple) -> "Cache":
        """Puts entries of layer `i`, [B s …], at positions [B s] of their sequences."""
        rows, stored = jnp.arange(positions.shape[0])[:, None], (self.latent, self.rope, self.index)
        return Cache(*jax.tree.map(lambda a, entry: a.at[i, rows, positions].set(entry), stored, entries))


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A network and this device's shards of its weights. Build it with `make`, inside `shard_map`."""

    network: Network
    stacks: dict[str, tuple[Tree, Tree]]  # of layers: their shards, and as `Exchange.quantize` once, not for each token
    bias: dict[str, jax.Array]  # as `deepseek.router_bias`
    outer: Outer  # as `Network.outer`: gathered once, not for every token

    def prefill(self, tokens: jax.Array, lengths: jax.Array, size: int) -> tuple[jax.Array, Cache]:
        """Runs prompts through the model.

        Args:
          tokens: [B P] int32; each row a prompt, then anything.
          lengths: [B] int32, of the prompts; 0 for a row that holds none.
          size: tokens of a sequence that the cache makes room for, at least P.

        Returns:
          Logits [B V] float32 of each prompt's last token, and the cache.
        """
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        segments = (positions < lengths[:, None]).astype(jnp.int32)

        def over(w, q, index, own, _):
            selected = None if index is None else indexer.select(self.network.model, index, segments)
            return kernels.attention(q, *attention.expanded(w, own[:2]), segments, selected=selected)[0]

        batch = {"tokens": tokens, "positions": positions, "segments": segments}
        h, cache = self._layers(batch, self._empty(len(tokens), size), over)
        last = jnp.maximum(lengths - 1, 0)[:, None, None]
        return self._logits(jnp.take_along_axis(h, last, axis=1)[:, 0]), cache

    def step(self, cache: Cache, tokens: jax.Array, positions: jax.Array, active: jax.Array) -> tuple[jax.Array, Cache]:
        """Runs one more token of each sequence through the model.

        Args:
          cache: of the tokens before.
          tokens: [B] int32.
          positions: [B] int32, theirs.
          active: [B] bool; the experts are spared the tokens of the other rows, whose results mean nothing.

        Returns:
          Logits [B V] float32, and the cache with the tokens.
        """
        batch = {"tokens": tokens, "positions": positions, "segments": active.astype(jnp.int32)}
        batch = {name: of_rows[:, None] for name, of_rows in batch.items()}

        def over(w, q, index, _, cached):
            seen = jnp.arange(cached[0].shape[1]) <= batch["positions"][..., None]
            if index is not None:
                seen = indexer.select_among(self.network.model, index, cached[2], seen)
            return attention.absorbed(self.network.model, w, q, cached[:2], seen)

        h, cache = self._layers(batch, cache, over)
        return self._logits(h[:, 0]), cache

    def generate(self, tokens: jax.Array, lengths: jax.Array, count: int, pick: Callable, eos: int | None) -> jax.Array:
        """Continues prompts, until each has ended or has `count` tokens more.

        Args:
          tokens: as in `prefill`.
          lengths: as in `prefill`.
          count: tokens.
          pick: (logits [B V] float32, index of the token to be drawn, int32) -> tokens [B] int32.
          eos: the token that ends a sequence, or None.

        Returns:
          The continuations [B count] int32, with their `eos`; -1 past the end.
        """

        def go_on(carry):
            i, going, *_ = carry
            return going & (i < count)

        def body(carry):
            i, _, active, logits, cache, found = carry
            token = jnp.where(active, pick(logits, i), -1)
            found = found.at[:, i].set(token)
            active = active if eos is None else active & (token != eos)
            logits, cache = self.step(cache, token, lengths + i, active)
            return i + 1, _anywhere(active), active, logits, cache, found

        logits, cache = self.prefill(tokens, lengths, tokens.shape[1] + count)
        found, active = jnp.full((len(tokens), count), -1, jnp.int32), lengths > 0
        start = jnp.zeros((), jnp.int32), _anywhere(active), active, logits, cache, found
        return lax.while_loop(go_on, body, start)[-1]

    def _empty(self, sequences: int, size: int) -> Cache:
        c, dtype = self.network.model, jnp.dtype(self.network.config.precision.compute)
        shape = c.num_hidden_layers, sequences, size
        index = None if c.index_topk is None else jnp.zeros((*shape, c.index_head_dim), dtype)
        latent, rope = (jnp.zeros((*shape, n), dtype) for n in (c.kv_lora_rank, c.qk_rope_head_dim))
        return Cache(latent, rope, index)

    def _layers(self, batch: dict, cache: Cache, over: Over) -> tuple[jax.Array, Cache]:
        """Embedding and all layers on int32 [B s] `tokens`, `positions`, `segments` -> [B s D]."""
        context = self.network.context(batch)
        carry = self.network.enter(self.outer.embed, batch["tokens"]), cache
        first = 0
        for name, stored in self.stacks.items():
            layers = jnp.arange(first, first := first + len(stored[0]["attention"].norm))
            body = self._one_layer(name, context, batch["positions"], over)
            carry, _ = lax.scan(body, carry, (stored, self.bias.get(name), layers))
        x, cache = carry
        return residual.leave(self.network.model, self.outer.hyper, x), cache

    def _one_layer(self, name: str, context: Context, positions: jax.Array, over: Over) -> Callable:
        """The scan body of one stack: a layer's stages, but for the first, whose place attention to the cache takes."""
        network = self.network
        declared = params_lib.unstacked(getattr(network.declared, name))
        (kind,) = deepseek.stacks(network.model)[name].kinds
        layer, exchange = network.layer(kind), network.exchange(declared)

        def body(carry, of_layer):
            (x, cache), (stored, bias, i) = carry, of_layer
            w = exchange.gather(*stored)

            def read(q, latents, index):
                own = (*latents, None if index is None else index.k)
                written = cache.write(i, positions, own)
                return over(w["attention"], q, index, own, written.layer(i)), written

            x, cache = attention.attend_to(network.model, w["attention"], x, context.rope, read)
            for stage in layer.stages[1:]:
                x, _ = stage(w[stage.name], x, Given(bias, context))
            return (layer.combine(x), cache), None

        return body

    def _logits(self, h: jax.Array) -> jax.Array:
        h = ops.rms_norm(h, self.outer.norm, self.network.model.rms_norm_eps)
        return jnp.matmul(h, self.outer.head, preferred_element_type=jnp.float32)


def make(network: Network, weights: Weights, bias: dict[str, jax.Array]) -> Decoder:
    """Binds a network to this device's shards of its weights."""
    stacks = {}
    for name in deepseek.stacks(network.model):
        declared, shards = getattr(network.declared, name), getattr(weights, name)
        exchange = network.exchange(params_lib.unstacked(declared))
        stacks[name] = shards, jax.vmap(exchange.quantize)(shards)
    return Decoder(network, stacks, bias, network.outer(weights))


def _anywhere(active: jax.Array) -> jax.Array:
    """Whether any sequence of any device goes on: the devices must leave the loop together."""
    return lax.pmax(jnp.any(active).astype(jnp.int32), AXES) > 0


def pick(logits: jax.Array, keys: jax.Array, temperature: float, top_p: float) -> jax.Array:
    """Draws a token of each sequence from its nucleus (arXiv 1904.09751, section 3.1).

    Args:
      logits: [B V] float32.
      keys: [B], of `jax.random`.
      temperature: what logits are divided by first; 0: the most probable token.
      top_p: the nucleus is the fewest most probable tokens whose probabilities sum to at least this.

    Returns:
      [B] int32.
    """
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    ranked, order = lax.top_k(logits / temperature, logits.shape[-1])
    probabilities = jax.nn.softmax(ranked, axis=-1)
    ahead = jnp.cumsum(probabilities, axis=-1) - probabilities
    drawn = jax.vmap(jax.random.categorical)(keys, jnp.where(ahead < top_p, ranked, -jnp.inf))
    return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)

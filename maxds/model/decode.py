"""Sampling: the prompt through all layers at once, then one token after the other against a cache (`cache.py`).

Weights travel as in training: gathered layer by layer, and routed experts stay where they are.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from maxds import params
from maxds.mesh import AXES
from maxds.model import cache as cache_lib
from maxds.model import deepseek, engram, layout, ops, residual
from maxds.model.deepseek import Network, Outer
from maxds.model.layout import Weights
from maxds.params import Tree
from maxds.schedule import Given, Member

Cache = dict[str, list[Any]]
"""Stack -> of each kind of its layers, what `cache.empty` makes; and `engram_LAYER` -> what `cache.silence` makes."""
Advance = Callable[[Any, Tree, Any, Any, Any], tuple[Any, Any]]
"""(cache, weights, stream, context, …) -> (stream, cache): of attention, and which of a kind's layers it is; or of an
Engram, and its `LookUp`."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A network and this device's shards of its weights. Build it with `make`, inside `shard_map`."""

    network: Network
    stacks: dict[str, list[tuple[Tree, Tree]]]  # by kind of layer: shards, and these quantized, once for all tokens
    bias: dict[str, jax.Array]  # as `layout.router_bias`
    outer: Outer  # as `Network.outer`: gathered once, not for every token
    head: jax.Array  # as `Network.head`, gathered so too
    engrams: dict[int, tuple[jax.Array, engram.Engram]]  # by layer: its table's shard, and the rest, gathered so too

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
        batch = {"tokens": tokens, "positions": positions, "segments": segments}

        def advance(cache, *given):
            return cache.prefill(self.network.model, *given)

        h, cache = self._layers(batch, self._empty(len(tokens), size), advance)
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

        def advance(cache, *given):
            return cache.step(self.network.model, *given)

        h, cache = self._layers(batch, cache, advance)
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
        found = {
            name: [cache_lib.empty(c, kind.ratio, stack.count, sequences, size) for kind in stack.kinds]
            for name, stack in layout.stacks(c).items()
        }
        found = jax.tree.map(lambda a: a.astype(dtype), found)
        return found | {f"engram_{i}": [cache_lib.silence(c, sequences)] for i in c.engram_layer_ids}

    def _layers(self, batch: dict, cache: Cache, advance: Advance) -> tuple[jax.Array, Cache]:
        """Embedding and all layers on int32 [B s] `tokens`, `positions`, `segments` -> [B s D]."""
        x, caches = self.network.enter(self.outer.embed, batch["tokens"]), {}
        context = self.network.context(batch)
        for name, stack in layout.stacks(self.network.model).items():
            if stack.engram is not None:
                x, caches[f"engram_{stack.engram}"] = self._remember(stack.engram, cache, x, context, advance)
            members = self.network.members(stack, self.network.declared.stack(name))
            of_turns = self.stacks[name], stack.split(self.bias.get(name)), jnp.arange(stack.count)
            body = self._one_turn(members, context, advance)
            (x, caches[name]), _ = lax.scan(body, (x, cache[name]), of_turns)
        return residual.leave(self.network.model, self.outer.hyper, x), caches

    def _remember(self, layer: int, cache: Cache, x: residual.Stream, context: deepseek.Context, advance: Advance):
        """The stream with what the Engram of a layer adds to it, and its cache."""
        table, w = self.engrams[layer]

        def look_up(tokens: jax.Array, segments: jax.Array) -> jax.Array:
            sought = dataclasses.replace(context, tokens=tokens, segments=segments)
            return self.network.look_up(layer, table, None, self.bias["engrams"], [sought])[0]

        x, echoes = advance(cache[f"engram_{layer}"][0], w, x, context, look_up)
        return x, [echoes]

    def _one_turn(self, members: list[Member], context: deepseek.Context, advance: Advance) -> Callable:
        """The scan body of one stack: layers' stages, but for the first, whose place attention to the cache takes."""

        def body(carry, of_turn):
            (x, caches), (stored, biases, i) = carry, of_turn
            written = []
            for member, cache, shards, bias in zip(members, caches, stored, biases, strict=True):
                w = member.exchange.gather(*shards)
                x, cache = advance(cache, w["attention"], x, context, i)
                for stage in member.layer.stages[1:]:
                    x, _ = stage(w[stage.name], stage.enter(x), Given(bias, context))
                x = member.layer.combine(x)
                written.append(cache)
            return (x, written), None

        return body

    def _logits(self, h: jax.Array) -> jax.Array:
        h = ops.rms_norm(h, self.outer.norm, self.network.model.rms_norm_eps)
        return jnp.matmul(h, self.head, preferred_element_type=jnp.float32)


def make(network: Network, weights: Weights, bias: dict[str, jax.Array]) -> Decoder:
    """Binds a network to this device's shards of its weights."""
    c, stored = network.model, {}
    for name, stack in layout.stacks(c).items():
        members = network.members(stack, network.declared.stack(name))
        shards = stack.turns(weights.stack(name))
        stored[name] = [(s, jax.vmap(m.exchange.quantize)(s)) for s, m in zip(shards, members, strict=True)]
    none = params.no_grads(weights)
    engrams = {i: (weights.engrams[str(i)], none.engrams[str(i)]) for i in c.engram_layer_ids}
    gathered = {i: (own[0].table, network.fetch_engram(i, *own)) for i, own in engrams.items()}
    outer = network.outer(weights, none)
    return Decoder(network, stored, bias, outer, network.head(weights, none, outer.embed), gathered)


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

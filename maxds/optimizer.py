"""How weights change: the optax chain, the learning rate, and the update of the router bias."""

import fnmatch
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from maxds import muon
from maxds import params as params_lib
from maxds.config import Optimizer
from maxds.params import Param, Tree


class PatternError(ValueError):
    """A pattern of `optimizer.train` matches nothing."""


def learning_rate(config: Optimizer, steps: int) -> optax.Schedule:
    """Learning rate of the n-th update, counted from 0: linear warm-up to `lr`, then what `lr_schedule` says.

    cosine       half a cosine, to min_lr_ratio * lr at the last update
    wsd          constant, then linear to min_lr_ratio * lr over the last decay_fraction
    wsd_cosine   constant, then half a cosine to there (V4, section 4.2.2)
    deepseek_v3  in shares of V3's 14.8T tokens (section 4.2), as if each step had as many: constant to 10T,
                 cosine to lr / 10 at 14.3T, constant to 14.633T, then lr * 7.3 / 220
    """
    lr, warmup = config.lr, config.warmup_steps
    rest = max(steps - warmup, 1)
    warm = optax.linear_schedule(lr / max(warmup, 1), lr, max(warmup - 1, 1))
    if config.lr_schedule == "cosine":
        return optax.join_schedules(
            [warm, optax.cosine_decay_schedule(lr, max(rest - 1, 1), config.min_lr_ratio)], [warmup]
        )
    if config.lr_schedule in ("wsd", "wsd_cosine"):
        decay = max(round(rest * config.decay_fraction), 1)
        down = optax.linear_schedule(lr, lr * config.min_lr_ratio, decay)
        if config.lr_schedule == "wsd_cosine":
            down = optax.cosine_decay_schedule(lr, decay, config.min_lr_ratio)
        return optax.join_schedules([warm, optax.constant_schedule(lr), down], [warmup, warmup + rest - decay - 1])
    ends = [max(round(steps * share / 14.8), warmup) for share in (10.0, 14.3, 14.633)]
    parts = [
        warm,
        optax.constant_schedule(lr),
        optax.cosine_decay_schedule(lr, max(ends[1] - ends[0], 1), 0.1),
        optax.constant_schedule(lr * 0.1),
        optax.constant_schedule(lr * 7.3 / 220),
    ]
    return optax.join_schedules(parts, [warmup, *ends])


def make(config: Optimizer, declared: Tree, mesh: Mesh | None) -> optax.GradientTransformation:
    """AdamW or Muon, with decoupled weight decay where the declaration allows it; of `clipped` gradients.

    What it gives is to be subtracted, times the learning rate. Of the weights that `train` matches; the others are left
    as they are, and hold no state. `mesh` is that of the weights; None where only the state's shapes are wanted.
    """
    if config.kind == "muon":
        direction = _muon(config, declared, mesh)
    else:
        direction = optax.scale_by_adam(config.b1, config.b2, config.eps)
    transform = optax.chain(
        stored_as(jnp.dtype(config.state_dtype), declared, direction),
        optax.add_decayed_weights(config.weight_decay, params_lib.derive(lambda p: p.decay, declared)),
        *_rates(declared),
    )
    trained = is_trained(config, declared)
    if all(jax.tree.leaves(trained)):
        return transform
    kinds = jax.tree.map(lambda of_weight: "trained" if of_weight else "frozen", trained)
    return optax.partition({"trained": transform, "frozen": optax.set_to_zero()}, kinds)


def clipped(limit: float | None, grads: Tree, norm: jax.Array) -> Tree:
    """Gradients, scaled down to a norm of `limit` where they, and those of other parts, have together a larger one."""
    if limit is None:
        return grads
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    return jax.tree.map(lambda g: jnp.where(norm < limit, g, g / norm * limit), grads)


def _rates(declared: Tree) -> list[optax.GradientTransformation]:
    """Scales the updates of weights that have a learning rate of their own."""
    rates = {p.rate for p in params_lib.flatten(declared).values()} - {1.0}

    def of(rate: float) -> Tree:
        return params_lib.derive(lambda p: p.rate == rate, declared)

    return [optax.masked(optax.scale(rate), of(rate)) for rate in sorted(rates)]


def changes(config: Optimizer, path: str) -> bool:
    """Whether `train` matches the path of a weight or a router bias."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in config.train)


def is_trained(config: Optimizer, declared: Tree) -> Tree:
    """Whether each weight changes."""
    return jax.tree.unflatten(
        jax.tree.structure(params_lib.derive(lambda _: 0, declared)),
        [changes(config, path) for path in params_lib.flatten(declared)],
    )


def check(config: Optimizer, paths: list[str]) -> None:
    """Raises PatternError, naming each pattern of `train` that matches none of these paths."""
    idle = [pattern for pattern in config.train if not fnmatch.filter(paths, pattern)]
    if idle:
        raise PatternError(
            f"optimizer.train={idle} matches no weight and no router bias; --describe lists their paths, such as "
            f"{paths[-1]}"
        )


def _muon(config: Optimizer, declared: Tree, mesh: Mesh | None) -> optax.GradientTransformation:
    """Muon for hidden matrices; Adam for norms, embedding and head."""
    matrices = muon.direction(config, declared, mesh)
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    kinds = params_lib.derive(lambda p: "muon" if p.dims else "adam", declared)
    return optax.partition({"muon": matrices, "adam": adam}, kinds)


def map_moments(fn: Callable[[Param, jax.Array], Tree], declared: Tree, state: Tree) -> Tree:
    """Maps `fn(param, moment)` over what an optimizer state holds for each weight; the rest stays as it is."""

    def is_masked(x: Tree) -> bool:
        return isinstance(x, optax.MaskedNode)  # this weight is of another optimizer

    def is_like_weights(x: Tree) -> bool:
        return jax.tree.structure(x, is_leaf=is_masked) == structure

    def one(p: Param, moment: Tree) -> Tree:
        return moment if is_masked(moment) else fn(p, moment)

    structure = jax.tree.structure(params_lib.derive(lambda _: 0, declared))
    return jax.tree.map(
        lambda x: params_lib.derive(one, declared, x) if is_like_weights(x) else x, state, is_leaf=is_like_weights
    )


def stored_as(dtype: jnp.dtype, declared: Tree, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner`, computing in float32, whatever gradients are in, with moments that are stored in `dtype`."""

    def cast(state: Tree, to: jnp.dtype) -> Tree:
        return map_moments(lambda _, moment: moment.astype(to), declared, state)

    def update(updates, state, params=None):
        updates = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
        updates, state = inner.update(updates, cast(state, jnp.dtype(jnp.float32)), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(inner.init(params), dtype), update)


def balance(bias: dict[str, jax.Array], load: dict[str, jax.Array], rate: jax.Array | float) -> dict[str, jax.Array]:
    """Router bias after a step: up by `rate` for experts below the mean load, down for those above (V3, section 2.1.2).

    Args:
      bias: stack -> float32 [L E].
      load: stack -> int32 [L E], tokens of the whole global batch that chose each expert.
      rate: gamma.
    """

    def update(b: jax.Array, counts: jax.Array) -> jax.Array:
        counts = counts.astype(jnp.float32)
        return b + rate * jnp.sign(jnp.mean(counts, axis=-1, keepdims=True) - counts)

    return {stack: update(b, load[stack]) for stack, b in bias.items()}

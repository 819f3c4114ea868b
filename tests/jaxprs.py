"""Reading traced programs: what is left of them once dead code is gone."""

import collections

import jax
from jax.extend.core import Literal
from jax.interpreters import partial_eval

# Functions that are counted as one operation: not what is inside them.
KERNELS = ("multiply_groups", "multiply_groups_transposed")


def live(fn, *args):
    """The jaxpr of `fn` without the equations that nothing depends on."""
    return _without_dead_code(jax.make_jaxpr(fn)(*args).jaxpr)


def _without_dead_code(jaxpr):
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def equations(jaxpr, inside=()):
    """Yields (operation, equation, operations around it), at any depth."""
    for eqn in jaxpr.eqns:
        name = eqn.params["name"] if eqn.params.get("name") in KERNELS else eqn.primitive.name
        yield name, eqn, inside
        if name not in KERNELS:
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
                if _is_jaxpr(inner):
                    inner = _without_dead_code(getattr(inner, "jaxpr", inner))
                    yield from equations(inner, (*inside, name))


def ancestors(jaxpr, eqn) -> set:
    """The variables that an equation of a jaxpr depends on, directly or not."""
    found = {v for v in eqn.invars if not isinstance(v, Literal)}
    for before in reversed(jaxpr.eqns[: jaxpr.eqns.index(eqn)]):
        if not found.isdisjoint(before.outvars):
            found |= {v for v in before.invars if not isinstance(v, Literal)}
    return found


def count(jaxpr, where=lambda inside: True) -> collections.Counter:
    """How often each operation is written down; `where` looks at the operations around it."""
    return collections.Counter(name for name, _, inside in equations(jaxpr) if where(inside))


def _is_jaxpr(x) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")

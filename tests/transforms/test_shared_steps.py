"""Equal equations are differentiated once: gradients have the same operators on the same operands as without that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax import _compat
from kitsune_jax._compat import call_rules


def _layers(weights: Any, x: Any) -> Any:
    for w in weights:
        h = jnp.tanh(x @ w + 1.0) * x
        x = jax.nn.relu(h) + jnp.exp(-h * h) / jnp.sqrt(x * x + 2)
    return x * (x + 1.0)


def _gradient(f: Any) -> Any:
    return jax.grad(lambda weights, x: (f(weights, x) ** 2).mean())


def _second(f: Any) -> Any:
    return jax.grad(lambda weights, x: _gradient(f)(weights, x)[0].sum())


_TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "gradient": _gradient,
    "second": _second,
    "jvp": lambda f: lambda weights, x: jax.jvp(f, (weights, x), (weights, x)),
}


def _results(closed: Any, operands: Sequence[Any], known: dict[Any, int]) -> list[Any]:
    """The results of a jaxpr as numbers: equal for equal operators on equal operands. ``known``: the number of each."""
    jaxpr, _ = _compat.open_parts(closed)
    env = dict(zip(jaxpr.invars, operands, strict=True))

    def read(v: Any) -> Any:
        return repr(v.val) if _compat.is_literal(v) else env[v]

    for eqn in jaxpr.eqns:
        ins, inner = [read(v) for v in eqn.invars], list(_compat.inner_jaxprs(eqn))
        if inner and len(inner) == 1:
            outs = _results(inner[0], ins, known)
        else:
            ins = sorted(ins, key=repr) if eqn.primitive.name == "add_any" else ins  # whose sum is the same either way
            key = (eqn.primitive.name, repr(sorted((k, str(p)) for k, p in eqn.params.items())), tuple(ins))
            outs = [known.setdefault((key, k), len(known)) for k in range(len(eqn.outvars))]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


@pytest.mark.parametrize("name", _TRANSFORMS)
def test_the_same_operators_on_the_same_operands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, x = [jnp.asarray(0.1 * np.eye(8), jnp.float32)] * 3, jnp.ones((5, 8))
    known, found, shared = dict[Any, int](), list[list[Any]](), list[Any]()
    share = call_rules.with_shared_steps

    def counted(closed: Any, varies: Sequence[bool]) -> Any:
        made = share(closed, varies)
        shared.extend(e for e in made.eqns if e.params.get("name") == "exp")
        return made

    for how in (counted, lambda closed, varies: closed):
        monkeypatch.setattr(call_rules, "with_shared_steps", how)
        jax.clear_caches()
        closed = jax.make_jaxpr(_TRANSFORMS[name](kj.pipeline(_layers)))(weights, x)
        found.append(_results(closed, range(-len(closed.in_avals), 0), known))
    assert found[0] == found[1]
    if name == "gradient" and _compat.VERSION >= (0, 12):
        assert len(shared) == 3 and len({id(e.params["jaxpr"]) for e in shared}) == 1

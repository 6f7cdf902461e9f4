# pyright: strict
"""A user's program with types: strict type checkers accept it, because a pipelined function keeps its parameters and its result.

``test_types.py`` runs it and the type checkers; ``typing_errors.py`` has the calls that they refuse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, assert_type

import jax
import jax.numpy as jnp

import kitsune_jax as kj

Activation = kj.Pipeline[[jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Params:
    w: jax.Array
    b: jax.Array


@kj.pipeline
def layer(params: Params, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    """One layer."""
    return jax.nn.relu(x @ params.w + params.b) * scale


@kj.pipeline(residuals="recompute", export="calls", static_argnames="steps")
def rolled(x: jax.Array, steps: int) -> tuple[jax.Array, int]:
    for _ in range(steps):
        x = jnp.sin(x)
    return x, steps


@dataclasses.dataclass(frozen=True)
class Model:
    width: int

    @kj.pipeline
    def apply(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x) * self.width


def apply_twice(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return fn(fn(x))


def policy(prim: Any, *args: Any, **params: Any) -> bool:
    return False


def profiled(params: Params, x: jax.Array) -> None:
    """For the type checkers only: a profile takes seconds."""
    assert_type(kj.profile(layer, batches=(), residuals="recompute")(params, x, scale=2.0), kj.Profile)


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (4, 8))
    params = Params(x.T @ x, x[0])
    assert_type(layer(params, x, scale=2.0), jax.Array)
    assert_type(rolled(x, 2), tuple[jax.Array, int])
    assert_type(Model(3).apply(x), jax.Array)
    assert_type(apply_twice(Model(3).apply, x), jax.Array)
    activation: Activation = kj.pipeline(jnp.tanh)
    assert_type(apply_twice(activation, x), jax.Array)
    assert_type(kj.pipeline(apply_twice, residuals=policy, force=True)(jnp.sin, x), jax.Array)
    assert_type(kj.explain(layer)(params, x), kj.Report)
    assert_type(kj.explain(apply_twice, device="h200", residuals="save")(jnp.sin, x), kj.Report)
    shape: Any = layer.eval_shape(params, x)
    assert_type(kj.explain(layer, platform="cuda", device="h200")(params, shape), kj.Report)
    assert_type(layer.lower(params, shape), jax.stages.Lowered)
    assert_type(layer.trace(params, shape), jax.stages.Traced)
    layer.clear_cache()
    with kj.config.override(disable=True):
        layer(params, x)


if __name__ == "__main__":
    main()

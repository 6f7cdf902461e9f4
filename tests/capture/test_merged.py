"""Equal operators of equal operands are one operator, except where a checkpoint asks for two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kitsune_jax import _compat
from kitsune_jax.capture.edit import Captured
from kitsune_jax.capture.jaxpr import capture
from reference.graph import evaluate_numpy

X, W = np.linspace(-1, 1, 28, dtype=np.float32).reshape(7, 4), np.linspace(-0.5, 0.7, 16, dtype=np.float32).reshape(4, 4)


def captured(fn: Callable[..., Any], *args: Any) -> Captured:
    found = capture(_compat.hoist_consts(jax.make_jaxpr(fn)(*args))[0])
    assert not found.failures
    return found


def kinds(c: Captured) -> Counter[str]:
    return Counter(op.kind for op in c.graph.ops)


def test_a_function_and_its_derivatives_share_its_layers() -> None:
    def u(w: Any, z: Any) -> Any:
        return jnp.tanh(jnp.tanh(z @ w) @ w).sum()

    def residual(w: Any, x: Any) -> Any:
        def one(z: Any) -> Any:
            slope = jax.grad(lambda z: u(w, z))
            return u(w, z) * slope(z) + jax.jvp(slope, (z,), (jnp.ones_like(z),))[1]

        return jax.vmap(one)(x)

    c = captured(residual, W, X)
    assert kinds(c)["tanh"] == 2
    (got,) = evaluate_numpy(c.graph, [W, X])
    np.testing.assert_allclose(got, residual(W, X), rtol=2e-5, atol=2e-5)


def test_equal_results_are_one_value() -> None:
    c = captured(lambda x: (jnp.sin(x) * 2, jnp.sin(x) * 2), X)
    assert kinds(c)["sin"] == kinds(c)["mul"] == 1
    assert c.graph.outputs[0] == c.graph.outputs[1]


def test_other_operands_parameters_and_dtypes_stay_apart() -> None:
    def f(x: Any, w: Any) -> Any:
        exact = jax.lax.dot(x, w, precision="highest")
        return x @ w, exact, x.sum(0), x.sum(1), jnp.exp(x), jnp.exp(x.astype(jnp.bfloat16)), x - 1, 1 - x

    found = kinds(captured(f, X, W))
    assert (found["dot_general"], found["reduce_sum"], found["exp"], found["sub"]) == (2, 2, 2, 2)


def test_what_is_computed_of_constants_alone_stays_where_it_is_read() -> None:
    """Two leaves' updates would share it otherwise, and one stream would wait for the other."""
    c = captured(lambda x: (x + jnp.square(jnp.zeros_like(x)), x * jnp.square(jnp.zeros_like(x))), X)
    assert kinds(c)["square"] + kinds(c)["integer_pow"] == 2


def test_nothing_is_merged_across_a_side_effect() -> None:
    def f(x: Any) -> Any:
        y = jnp.sin(x) * 2
        jax.debug.callback(lambda _: None, y[0, 0], ordered=True)
        return y, jnp.sin(x) * 2

    assert kinds(captured(f, X))["sin"] == 2


def test_what_a_checkpoint_computes_again_is_computed_again() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.tanh(jnp.sin(x @ w)).sum()

    plain, again = (captured(jax.value_and_grad(f), W, X) for f in (loss, jax.checkpoint(loss)))
    assert kinds(again)["dot_general"] > kinds(plain)["dot_general"]
    assert kinds(again)["tanh"] == 2 * kinds(plain)["tanh"] == 2


def test_the_body_of_a_loop_is_merged_as_well() -> None:
    def step(c: Any, x: Any) -> Any:
        return c + jnp.tanh(x @ W) * jnp.tanh(x @ W), None

    c = captured(lambda x: jax.lax.scan(step, jnp.zeros((7, 4), jnp.float32), jnp.stack([x, x]))[0], X)
    (loop,) = (op for op in c.graph.ops if op.body is not None)
    assert loop.body is not None
    assert Counter(op.kind for op in loop.body.ops)["tanh"] == 1

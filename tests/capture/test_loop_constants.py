"""What the steps of a loop make of constants alone is made in front of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kitsune_jax as kj
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.ops.capabilities import TargetCapabilities
from tests.support.checks import in_float64

RNG = np.random.default_rng(11)


def normal(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jax.device_put(np.asarray(RNG.standard_normal(shape), dtype))


def kinds(f: Any, *args: Any) -> tuple[list[str], list[str]]:
    """The ops in front of the loop of ``f``, and those of its body."""
    graph = capture(jax.make_jaxpr(f)(*args), context=RewriteContext(TargetCapabilities(runs_loops=True))).graph
    (loop,) = (op for op in graph.ops if op.body is not None)
    assert loop.body is not None
    return [op.kind for op in graph.ops if op is not loop], [op.kind for op in loop.body.ops]


def scaled(x: Any, w: Any, scale: Any, b: Any) -> Any:
    return lax.fori_loop(0, 5, lambda i, x: jnp.tanh(x @ (w * jnp.exp(scale)) + jnp.tanh(b)), x)


def check(f: Any, *args: Any, tolerance: float = 2e-5) -> None:
    got = jax.jit(kj.pipeline(f, force=True, strict=True))(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(in_float64(f, *args)), strict=True):
        np.testing.assert_allclose(
            np.asarray(g, np.float64), w, rtol=tolerance, atol=tolerance * np.abs(w).max(initial=1.0, where=np.isfinite(w))
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 131])
def test_scaled_weights_and_biases(dtype: str, rows: int) -> None:
    args = normal(rows, 6, dtype=dtype), 0.4 * normal(6, 6, dtype=dtype), normal(dtype=dtype) * 0.1, normal(6, dtype=dtype)
    front, body = kinds(scaled, *args)
    assert front.count("exp") == 1 and "mul" in front
    assert "exp" not in body and "mul" not in body
    check(scaled, *args, tolerance={"float32": 2e-5, "bfloat16": 5e-2, "float16": 8e-3}[dtype])


def test_small_constants_leave_loops_of_many_rows() -> None:
    """The tanh of a bias is made once; its repetition along the rows is no array in front of the loop."""
    front, body = kinds(scaled, normal(131, 6), normal(6, 6), normal(), normal(6))
    assert front.count("tanh") == 1 and body.count("tanh") == 1
    assert "dot_general" in body and "dot_general" not in front


def test_cheap_ops_of_constants_as_large_as_the_carry_stay() -> None:
    f = lambda x, c: lax.fori_loop(0, 9, lambda i, x: x * 0.5 + (c + 1.0) + 1.0 / c, x)  # noqa: E731
    front, body = kinds(f, normal(500), normal(500))
    assert front == ["div"] and "div" not in body and body.count("add") == 4  # one counts
    check(f, normal(500), 2.0 + abs(normal(500)))


def test_a_product_of_constants() -> None:
    f = lambda x, c, w: lax.scan(lambda h, x: ((h := jnp.tanh(h * 0.5 + x + c @ w)), h * 2), x[0], x)  # noqa: E731
    args = normal(7, 37, 5), normal(37, 3), normal(3, 5)
    front, body = kinds(f, *args)
    assert front == ["dot_general"] or sorted(front) == ["dot_general", "reshape", "slice"]
    assert "dot_general" not in body
    check(f, *args)
    large = kinds(f, normal(7, 1000, 40), normal(1000, 1), normal(1, 40))  # of an array of 1000 rows, one 40 times as large
    assert "dot_general" in large[1]


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_few_steps(steps: int) -> None:
    def f(x: Any, w: Any, b: Any) -> Any:
        return lax.fori_loop(0, steps, lambda i, x: x @ jnp.exp(w) + jnp.log(b), x)

    x, w, b = normal(5, 3), normal(3, 3), normal(3).at[1].set(-1.0)  # logarithms of negative numbers: NaN where a step is made
    got, want = jax.jit(kj.pipeline(f, force=True))(x, w, b), jax.jit(f)(x, w, b)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert np.isnan(got).any() == (steps > 0)
    if steps == 1:
        assert "exp" in kinds(f, x, w, b)[1]


def test_loops_in_loops() -> None:
    """What both loops have as a constant leaves both."""

    def f(x: Any, w: Any, u: Any) -> Any:
        def outer(x: Any, _: Any) -> Any:
            v = x.mean(0) * 0.1
            return lax.fori_loop(0, 3, lambda j, x: jnp.tanh(x @ jnp.exp(w) + jnp.sqrt(u) + jnp.exp(v)), x), x.sum(0)

        return lax.scan(outer, x, None, length=4)

    args = normal(33, 4), normal(4, 4), abs(normal(4))
    graph = capture(jax.make_jaxpr(f)(*args), context=RewriteContext(TargetCapabilities(runs_loops=True))).graph
    (loop,) = (op for op in graph.ops if op.body is not None)
    assert sorted(op.kind for op in graph.ops if op.kind in ("exp", "sqrt")) == ["exp", "sqrt"]
    assert loop.body is not None and [op.kind for op in loop.body.ops if op.kind in ("exp", "sqrt")] == ["exp"]
    check(f, *args, tolerance=1e-4)


def test_what_a_step_stores_of_constants_stays() -> None:
    f = lambda x, b: lax.scan(lambda c, x: (c + x * jnp.exp(b), jnp.exp(b)), x[0], x)  # noqa: E731
    check(f, normal(4, 9), normal(9))


def test_gradients() -> None:
    args = normal(17, 6), 0.4 * normal(6, 6), normal() * 0.1, normal(6)
    check(jax.grad(lambda *a: (scaled(*a) ** 2).sum(), argnums=(0, 1, 2, 3)), *args, tolerance=1e-4)


def test_the_loop_does_less() -> None:
    """A loop left to XLA is the user's equation: XLA moves its constants by itself."""
    args = normal(4096, 64), normal(64, 64), normal(), normal(64)
    report = kj.explain(scaled, platform="cpu", device="zen5-2")(*args)
    (region,) = (r for r in report.regions if r.loops)
    assert sum(op in ("exp", "mul") for stage in region.stages for op in stage.ops) == 0
    tiny = normal(1, 3), normal(3, 3), normal(), normal(3)
    left = kj.explain(scaled, platform="cpu", device="zen5-2")(*tiny)
    assert not left.regions and left.ops_total > 5

"""Gradients through time on the CPU: the reverse loop is a pipeline, and adds up the gradients of its weights step by step.

Every program runs with ``force``, so the cost model decides nothing, and is compared with the same gradient in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kitsune_jax as kj
from tests.lowering.test_time_loops import gru, lstm, normal, pendulum
from tests.support.checks import leaves_in_float64

Loss = Callable[..., jax.Array]


def check(fn: Callable[..., Any], *args: Any, tolerance: float = 2e-5, **options: Any) -> Any:
    """``fn`` is right as a pipeline, and twice the same. Returns the report."""
    pipelined = jax.jit(kj.pipeline(fn, force=True, strict=True, **options))
    got = jax.tree.leaves(pipelined(*args))
    for g, w in zip(got, leaves_in_float64(fn, args), strict=True):
        g = np.asarray(g, np.float64)
        assert g.shape == w.shape
        np.testing.assert_allclose(g, w, rtol=0, atol=tolerance * max(np.abs(w).max(initial=0), 1e-3))
    again = jax.tree.leaves(pipelined(*args))
    assert [np.asarray(a).tobytes() for a in again] == [np.asarray(g).tobytes() for g in got]
    return kj.explain(fn, force=True, **options)(*args)


def of(model: Callable[..., Any]) -> Loss:
    """The mean of the squares of all that ``model`` makes of its arguments."""
    return lambda *args: sum(jnp.mean(y**2) for y in jax.tree.leaves(model(*args)))


def lstm_arguments(rows: int = 19, steps: int = 6, features: int = 5, hidden: int = 7, dtype: Any = np.float32) -> tuple[Any, ...]:
    shapes = (steps, rows, features), (rows, hidden), (rows, hidden), (features, 4 * hidden), (hidden, 4 * hidden), (4 * hidden,)
    return tuple((0.4 * normal(*s)).astype(dtype) for s in shapes)


def one_stream_has(report: Any, products: int, sums: int = 0) -> None:
    """One stream has so many matrix products, those that add up the gradients of weights among them, and sums, and XLA has none."""
    streams = [[op for stage in region.stages for op in stage.ops] for region in report.regions]
    streams += [s.ops for region in report.regions for phase in region.later for s in phase.spaces]
    assert any(ops.count("dot_general") >= products and ops.count("reduce_sum") >= sums for ops in streams), str(report)
    assert not any(r.op in ("dot_general", "scan") for r in report.rejected), str(report)


def test_lstm() -> None:
    report = check(jax.value_and_grad(of(lstm), argnums=(0, 1, 2, 3, 4, 5)), *lstm_arguments())
    one_stream_has(report, 4, 1)


@pytest.mark.parametrize("k", range(6))
def test_by_one_argument_at_a_time(k: int) -> None:
    check(jax.grad(of(lstm), argnums=k), *lstm_arguments())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_sixteen_bits(dtype: str) -> None:
    check(jax.grad(of(lstm), argnums=(0, 3, 4, 5)), *lstm_arguments(dtype=jnp.dtype(dtype)), tolerance=6e-2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [1, 2, 61])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_any_number_of_steps_and_rows(steps: int, rows: int) -> None:
    check(jax.grad(lambda *args: of(lstm)(*args) if steps else of(lambda *a: lstm(*a)[0])(*args), argnums=(1, 3, 4, 5)),
          *lstm_arguments(rows, steps))  # fmt: skip


@hypothesis.settings(max_examples=3, deadline=None)
@hypothesis.given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 6), st.integers(1, 9))
def test_any_shape(rows: int, steps: int, features: int, hidden: int) -> None:
    check(jax.grad(of(lstm), argnums=(1, 3, 4, 5)), *lstm_arguments(rows, steps, features, hidden), tolerance=5e-5)


def test_gru() -> None:
    args = normal(5, 23, 4), normal(23, 6), 0.4 * normal(4, 18), 0.4 * normal(6, 18)
    one_stream_has(check(jax.grad(of(gru), argnums=(0, 1, 2, 3)), *args), 4)


def test_a_simulator() -> None:
    args = (normal(33), normal(33)), 0.1 * normal(8, 33)
    check(jax.grad(of(pendulum), argnums=(0, 1)), *args, tolerance=1e-4)


def policy(weights: Any, state: Any) -> Any:
    """A simulator whose actions a network chooses."""
    w, b, v = weights

    def step(state: Any, _: Any) -> Any:
        x, speed = state
        observed = jnp.stack([jnp.cos(x), jnp.sin(x), speed], -1)
        action = jnp.tanh(jnp.tanh(observed @ w + b) @ v)[:, 0]
        speed = speed + 0.1 * (jnp.sin(x) + action)
        return (x + 0.1 * speed, speed), x**2 + 0.1 * speed**2

    return lax.scan(step, state, None, length=7)[1]


def test_a_policy_through_its_simulator() -> None:
    weights = 0.5 * normal(3, 8), 0.1 * normal(8), 0.5 * normal(8, 1)
    check(jax.grad(of(policy)), weights, (normal(29), normal(29)), tolerance=5e-5)


def flow(weights: Any, x: Any) -> Any:
    """A neural ODE by Runge and Kutta's method: every weight is used four times in a step."""

    def slope(x: Any) -> Any:
        h = x
        for w, b in weights:
            h = jnp.tanh(h @ w + b)
        return h

    def step(x: Any, _: Any) -> Any:
        a = slope(x)
        b = slope(x + 0.05 * a)
        c = slope(x + 0.05 * b)
        return x + 0.1 / 6 * (a + 2 * b + 2 * c + slope(x + 0.1 * c)), None

    return lax.scan(step, x, None, length=5)[0]


@pytest.mark.parametrize("again", [False, True])
def test_a_neural_ode(again: bool) -> None:
    weights = [(0.5 * normal(4, 9), 0.1 * normal(9)), (0.5 * normal(9, 4), 0.1 * normal(4))]
    model = flow
    if again:  # the steps are computed again in the backward pass

        def model(weights: Any, x: Any) -> Any:
            step = jax.checkpoint(lambda x: flow(weights, x))
            return lax.scan(lambda x, _: (step(x), None), x, None, length=2)[0]

    check(jax.grad(of(model), argnums=(0, 1)), weights, normal(21, 4), tolerance=5e-5)


@pytest.mark.parametrize("policy", [None, "dots_saveable", "nothing_saveable", "everything_saveable"])
def test_checkpoints_in_the_body(policy: str | None) -> None:
    rule = policy and getattr(jax.checkpoint_policies, policy)

    def model(xs: Any, h: Any, c: Any, w: Any, u: Any, b: Any) -> Any:
        def step(state: Any, x: Any) -> Any:
            h, c = state
            i, f, g, o = jnp.split(x @ w + h @ u + b, 4, axis=1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), h

        return lax.scan(jax.checkpoint(step, policy=rule), (h, c), xs)

    report = check(jax.grad(of(model), argnums=(0, 1, 2, 3, 4, 5)), *lstm_arguments())
    one_stream_has(report, 4, 1)


@pytest.mark.parametrize("residuals", ["save", "recompute"])
def test_residual_options(residuals: str) -> None:
    check(jax.grad(of(lstm), argnums=(3, 4, 5)), *lstm_arguments(), residuals=residuals)


def checkpointed(w: Any, h: Any, xs: Any) -> Any:
    """A loop over groups of steps; the backward pass goes through the steps of a group again."""

    @jax.checkpoint
    def outer(h: Any, group: Any) -> Any:
        return lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), h, group)

    return lax.scan(outer, h, xs)[0]


@pytest.mark.parametrize("rows, groups, steps", [(17, 3, 4), (1, 2, 5), (67, 4, 1), (5, 1, 3)])
def test_square_root_checkpointing(rows: int, groups: int, steps: int) -> None:
    """Nested loops are one pipeline, forwards and backwards; the sums of the inner loop's weights are added up in it."""
    args = 0.5 * normal(6, 6), normal(rows, 6), normal(groups, steps, rows, 6)
    report = check(jax.grad(of(checkpointed), argnums=(0, 1, 2)), *args, tolerance=5e-5)
    one_stream_has(report, 3)


def test_square_root_checkpointing_of_an_lstm() -> None:
    def model(xs: Any, *rest: Any) -> Any:
        h, c, w, u, b = rest

        @jax.checkpoint
        def group(state: Any, xs: Any) -> Any:
            return lstm(xs, *state, w, u, b)

        return lax.scan(group, (h, c), xs.reshape(2, 3, *xs.shape[1:]))

    report = check(jax.grad(of(model), argnums=(0, 1, 2, 3, 4, 5)), *lstm_arguments())
    one_stream_has(report, 6, 1)


def test_second_derivatives() -> None:
    def curvature(w: Any, *rest: Any) -> jax.Array:
        return jnp.sum(jax.grad(lambda w: of(gru)(rest[0], rest[1], w, rest[2]))(w) ** 2)

    args = 0.4 * normal(3, 12), normal(4, 11, 3), normal(11, 4), 0.4 * normal(4, 12)
    check(jax.grad(curvature), *args, tolerance=1e-4)


@pytest.mark.parametrize("steps", [1, 11])
def test_a_loop_of_nothing_but_a_sum_of_what_it_is_given(steps: int) -> None:
    """The gradient of a readout by its weights, where the forward pass has kept all that it reads: no loop is left."""

    def sums(w: Any, x: Any, dz: Any) -> Any:
        return lax.scan(lambda w, s: (w + lax.dot_general(*s, (((0,), (0,)), ((), ()))), None), w, (x, dz))[0]

    report = check(sums, normal(5, 7), normal(steps, 13, 5), normal(steps, 13, 7))
    assert not any(op == "scan" for region in report.regions for stage in region.stages for op in stage.ops)

"""Products that nothing in a loop waits for are made behind it, where what they are made of leaves the loop anyway."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.graph import Graph
from kitsune_jax.ops.table import verify_op
from reference.graph import evaluate_numpy
from tests.capture.test_loop_sums import Loss, arguments, gradient, lstm, rnn, run

PRODUCTS_OF_AN_LSTM = 3 * 16 + 4 * 16  # elements of w and u


def products(graph: Graph) -> list[int]:
    """How many products the steps of each loop make."""
    return [sum(inner.kind == "dot_general" for inner in op.body.ops) for op in graph.ops if op.body is not None]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("loss, before, after", [(lstm, [2, 2], [2, 1]), (rnn, [3, 3], [3, 2])])
def test_they_are_the_same_behind(loss: Loss, before: list[int], after: list[int], steps: int) -> None:
    """In a gradient that of what came in; the product by which h is carried back stays."""
    args = arguments(steps)
    jaxpr = jax.make_jaxpr(gradient(loss, (0, 1, 2, 3)))(*args)
    inside, behind = (
        capture(jaxpr, context=RewriteContext(TargetCapabilities(runs_loops=True))),
        capture(jaxpr, context=RewriteContext(TargetCapabilities(runs_loops=True, most_summed=0))),
    )
    assert not behind.failures
    for op in behind.graph.ops:
        verify_op(op, behind.graph.values)
    if steps > 1:
        assert (products(inside.graph), products(behind.graph)) == (before, after)
    for got, want in zip(*(evaluate_numpy(c.graph, args, widen=True) for c in (behind, inside)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)
    for got, want in zip(run(behind, args), run(inside, args), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * max(1.0, np.abs(want).max(initial=0)))


def test_how_many_weights() -> None:
    jaxpr = jax.make_jaxpr(gradient(lstm, (0, 1, 2, 3)))(*arguments(4))
    for summed, behind in ((None, 2), (PRODUCTS_OF_AN_LSTM, 2), (PRODUCTS_OF_AN_LSTM - 1, 1)):
        assert products(capture(jaxpr, context=RewriteContext(TargetCapabilities(runs_loops=True, most_summed=summed))).graph) == [
            2,
            behind,
        ]


def test_what_stays() -> None:
    """What the product is made of does not leave the loop, or something in the loop reads the product."""

    def inside(w, u, h, xs):
        return jax.lax.scan(lambda h, x: (jnp.tanh(h @ u + x), jnp.tanh(h @ u + x) @ w), h, xs)

    def read(w, u, h, xs):
        def step(h, x):
            h = jnp.tanh(h @ u + x)
            y = h @ w
            return h * jnp.sum(y), (h, y)

        return jax.lax.scan(step, h, xs)

    rng = np.random.default_rng(0)
    args = [rng.standard_normal(s).astype(np.float32) for s in ((3, 3), (3, 3), (5, 3), (4, 5, 3))]
    for fn in (inside, read):
        jaxpr = jax.make_jaxpr(fn)(*args)
        assert products(
            capture(jaxpr, context=RewriteContext(TargetCapabilities(runs_loops=True, most_summed=0))).graph
        ) == products(capture(jaxpr, context=RewriteContext(TargetCapabilities(runs_loops=True))).graph)


def test_a_projection_of_a_result() -> None:
    """The weight is no constant of the loop any more."""

    def fn(w, u, h, xs):
        def step(h, x):
            h = jnp.tanh(h @ u + x)
            return h, (h, h @ w)

        return jax.lax.scan(step, h, xs)

    rng = np.random.default_rng(0)
    args = [rng.standard_normal(s).astype(np.float32) for s in ((3, 2), (3, 3), (5, 3), (4, 5, 3))]
    captured = capture(jax.make_jaxpr(fn)(*args), context=RewriteContext(TargetCapabilities(runs_loops=True, most_summed=0)))
    (loop,) = (op for op in captured.graph.ops if op.body is not None)
    assert products(captured.graph) == [1] and loop["consts"] == 1
    for got, want in zip(run(captured, args), jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)

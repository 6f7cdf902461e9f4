"""Sums over the steps of a loop leave the loop where it then streams, and are the same sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitsune_jax.capture.edit import Captured
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.graph import Graph
from kitsune_jax.ops.loops import Classes
from kitsune_jax.ops.table import OPS, verify_op
from reference.graph import evaluate_numpy
from tests.support.checks import leaves_in_float64

ROWS, FEATURES, HIDDEN = 7, 3, 4
Loss = Callable[..., jax.Array]


def lstm(w, u, b, xs, h, c):
    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ w + h @ u + b, 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return jnp.mean(jax.lax.scan(step, (h, c), xs)[1] ** 2)


def rnn(w, u, b, xs, h, c):
    """A weight that is used twice in a step, and turned round."""

    def step(h, x):
        h = jnp.tanh(jnp.tanh(h @ u[:, :HIDDEN]) @ u[:, :HIDDEN].T + x @ w[:, :HIDDEN] + b[:HIDDEN])
        return h, jnp.sum(h, axis=1)

    return jnp.sum(jax.lax.scan(step, h + c, xs, reverse=True)[1])


def checkpointed(w, u, b, xs, h, c):
    """Two nested loops; the outer one's body is computed again in the backward pass."""
    groups = xs.reshape(-1, min(len(xs), 2), *xs.shape[1:]) if len(xs) else xs[None]

    @jax.checkpoint
    def outer(h, group):
        return jax.lax.scan(lambda h, x: (jnp.tanh(h @ u[:, :HIDDEN] + x @ w[:, :HIDDEN]), ()), h, group)

    h = jax.lax.scan(outer, h, groups)[0]
    return jnp.sum(h * c) + b.sum()


def heads(w, u, b, xs, h, c):
    """A product for each of two heads."""

    def step(h, x):
        split = h.reshape(-1, 2, HIDDEN // 2)
        mixed = jnp.einsum("bhd,hde->bhe", split, u[:, :HIDDEN].reshape(2, HIDDEN // 2, HIDDEN)[:, :, : HIDDEN // 2])
        return jnp.sin(mixed.reshape(h.shape)) + x @ w[:, :HIDDEN], ()

    return jnp.sum(jax.lax.scan(step, h, xs)[0] * c) + b[0]


def arguments(steps: int, dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(steps)
    shapes = (FEATURES, 4 * HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN,), (steps, ROWS, FEATURES), (ROWS, HIDDEN), (ROWS, HIDDEN)
    return [(0.5 * rng.standard_normal(s)).astype(np.dtype(dtype)) for s in shapes]


def gradient(loss: Loss, argnums: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Callable[..., object]:
    return jax.grad(loss, argnums=argnums)


def both(fn: Callable[..., object], args: list[np.ndarray]) -> tuple[Captured, Captured]:
    jaxpr = jax.make_jaxpr(fn)(*args)
    return capture(jaxpr), capture(jaxpr, context=RewriteContext(TargetCapabilities(runs_loops=True)))


def run(captured: Captured, args: list[np.ndarray]) -> list[np.ndarray]:
    graph = captured.graph

    def steps(*arrays: jax.Array) -> list[jax.Array]:
        env = dict(zip(graph.inputs, arrays, strict=True))
        env |= {v: jnp.asarray(x.literal, x.dtype) for v, x in enumerate(graph.values) if x.literal is not None}
        for i, op in enumerate(graph.ops):
            env.update(zip(op.outputs, captured.run(i, [env[v] for v in op.inputs]), strict=True))
        return [env[v] for v in graph.outputs]

    return [np.asarray(x) for x in jax.jit(steps)(*args)]  # in one, because XLA compiles every new shape of an operator


def agree(fn: Callable[..., object], args: list[np.ndarray]) -> Graph:
    """The Graph of ``fn`` whose sums have left; it computes what the Graph does whose sums are in the loops, and
    what the function does in float64."""
    before, after = both(fn, args)
    assert not after.failures
    for op in after.graph.ops:
        verify_op(op, after.graph.values)
    for got, want in zip(*(evaluate_numpy(c.graph, args, widen=True) for c in (after, before)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)
    tolerance = 2e-5 if args[0].dtype == np.float32 else 5e-2
    for got, want in zip(run(after, args), leaves_in_float64(fn, args), strict=True):
        scale = max(float(np.abs(want).max(initial=0)), 1e-3)
        np.testing.assert_allclose(got.astype(np.float64), np.asarray(want, np.float64), rtol=0, atol=tolerance * scale)
    return after.graph


@pytest.mark.sampled(2)
@pytest.mark.parametrize("steps", [0, 1, 2, 6])
@pytest.mark.parametrize("loss", [lstm, rnn, checkpointed, heads])
def test_sums_are_the_same_outside(loss: Loss, steps: int) -> None:
    graph = agree(gradient(loss), arguments(steps))
    if steps:
        loops = [op for op in graph.ops if op.kind == "scan"]
        if loss is checkpointed:
            loops = [inner for op in loops for inner in op.body.ops if inner.kind == "scan"]
        assert all(op["carries"] <= 2 for op in loops), "the sums are carried"
        streams = [Classes(OPS, op) for op in loops]
        for op, classes in zip(loops, streams, strict=True):
            carries = op.body.inputs[op["consts"] : op["consts"] + op["carries"]]
            assert all(classes.root((v, 0)) not in classes.why for v in carries)


@pytest.mark.parametrize("k", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 3)), 4])
def test_by_one_argument_at_a_time(k: int) -> None:
    agree(gradient(lstm, (k,)), arguments(5))


def test_in_bfloat16() -> None:
    agree(gradient(lstm), arguments(4, "bfloat16"))


def test_a_sum_that_starts_with_something() -> None:
    def total(start, xs, ys):
        return jax.lax.scan(lambda s, a: (s + a[0].T @ a[1] - (a[1].T @ a[0]).T, ()), start, (xs, ys))[0]

    rng = np.random.default_rng(0)
    args = [rng.standard_normal(s).astype(np.float32) for s in ((2, 3), (4, 9, 2), (4, 9, 3))]
    graph = agree(total, args)
    kinds = Counter(op.kind for op in graph.ops)
    assert kinds["scan"] <= 1


def test_a_loop_that_only_adds_up_slices_is_gone() -> None:
    """The gradient of a linear layer in ``lax.map``."""

    def total(w, b, xs):
        return jnp.mean(jax.lax.map(lambda x: x @ w + b, xs))

    rng = np.random.default_rng(0)
    args = [rng.standard_normal(s).astype(np.float32) for s in ((3, 4), (4,), (5, 7, 3))]
    graph = agree(gradient(total, (0, 1)), args)
    assert len([op for op in graph.ops if op.kind == "scan"]) <= 1, "that of the forward pass"


def test_what_does_not_stream_stays() -> None:
    def mixed(w, xs):
        """Every step mixes the batch, so without the sum the loop does not stream either."""

        def step(carry, x):
            total, h = carry
            h = jnp.tanh(jnp.cumsum(h + x, axis=0))
            return (total + h.T @ x, h), ()

        return jax.lax.scan(step, (w, jnp.zeros(xs.shape[1:])), xs)[0]

    def read(w, xs):
        """The sum is read in the loop."""
        return jax.lax.scan(lambda s, x: (s + x.T @ x, x @ s), w, xs)

    rng = np.random.default_rng(0)
    args = [rng.standard_normal((3, 3)).astype(np.float32), rng.standard_normal((4, 5, 3)).astype(np.float32)]
    for fn in (mixed, read):
        graph = agree(fn, args)
        (loop,) = [op for op in graph.ops if op.kind == "scan"]
        assert any(op.kind == "dot_general" and loop.body.values[op.outputs[0]].shape == (3, 3) for op in loop.body.ops)

"""Scores that are summed over their rows and over their columns are made once for each, and every number stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.graph import Graph
from kitsune_jax.ops.table import verify
from reference.graph import evaluate_numpy

Array = Any
TOKENS, SIZE = 260, 8


def softmax_of(q: Array, k: Array, causal: bool) -> Array:
    scores = jnp.einsum("htd,hjd->htj", q, k) * SIZE**-0.5
    if causal:
        scores = jnp.where(jnp.arange(TOKENS)[:, None] >= jnp.arange(TOKENS), scores, -math.inf)
    return jax.nn.softmax(scores)


def attention(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    return jnp.einsum("htj,hjd->htd", softmax_of(q, k, causal), v)


def gradients(q: Array, k: Array, v: Array, do: Array, causal: bool = False) -> Array:
    return jax.vjp(lambda *a: attention(*a, causal), q, k, v)[1](do)


def given(count: int, tokens: int = TOKENS) -> list[np.ndarray]:
    return list(np.random.default_rng(0).standard_normal((count, 2, tokens, SIZE)).astype("float32"))


def both(function: Callable[..., Any], *args: np.ndarray) -> tuple[Graph, Graph]:
    """The graph as it is, and with scores apart; both with the same numbers but for a rounding."""
    graphs = []
    for apart in (False, True):
        captured = capture(jax.make_jaxpr(function)(*args), context=RewriteContext(TargetCapabilities(sums_by_batch=not apart)))
        assert not captured.failures, captured.failures
        verify(captured.graph)
        graphs.append(captured.graph)
    for a, b in zip(*(evaluate_numpy(g, args) for g in graphs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * float(np.abs(a).max()))
    return graphs[0], graphs[1]


def large(graph: Graph) -> list[int]:
    """The products whose results are as large as the scores."""
    return [i for i, op in enumerate(graph.ops) if op.kind == "dot_general" and graph.values[op.outputs[0]].size == 2 * TOKENS**2]


@pytest.mark.parametrize("causal", [False, True])
def test_the_gradients_by_queries_and_by_keys_have_scores_of_their_own(causal: bool) -> None:
    before, after = both(lambda *a: gradients(*a, causal=causal), *given(4))
    assert len(large(after)) == len(large(before)) + 2  # the scores, and the gradient of the weights
    dq, dk, dv = (product_of(after, v) for v in after.outputs)
    shared = chain(after, dq) & (chain(after, dk) | chain(after, dv))
    assert all(after.values[v].size < 2 * TOKENS**2 for i in shared for v in after.ops[i].outputs), "scores of both"
    assert chain(after, dk) & chain(after, dv) & set(large(after)), "keys and values share theirs"


def product_of(graph: Graph, v: int) -> int:
    """The product that makes ``v``, behind what only moves its elements."""
    i = graph.producers()[v]
    while graph.ops[i].kind != "dot_general":
        i = graph.producers()[graph.ops[i].inputs[0]]
    return i


def chain(graph: Graph, end: int) -> set[int]:
    """The ops with results as large as scores that ``end`` is made of, by way of such results only."""
    producers, found, work = graph.producers(), set[int](), [*graph.ops[end].inputs]
    while work:
        v = work.pop()
        i = producers.get(v)
        if i is not None and i not in found and graph.values[v].size >= 2 * TOKENS**2:
            found.add(i)
            work += graph.ops[i].inputs
    return found


def test_what_is_summed_in_one_way_is_made_once() -> None:
    for function, count in ((attention, 3), (lambda q, k: softmax_of(q, k, False).sum(-1), 2)):
        before, after = both(function, *given(count))
        assert len(large(after)) == len(large(before)) == 1


def test_scores_that_are_added_to_their_transpose_are_not_told_apart() -> None:
    def function(x: Array) -> tuple[Array, Array]:
        s = jnp.einsum("htd,hjd->htj", x, x)
        s = jnp.exp(s + s.swapaxes(1, 2))
        return s.sum(1), s.sum(2)

    before, after = both(function, *given(1))
    assert before.ops == after.ops


def test_which_scores_equal_their_maximum_is_asked_once() -> None:
    """Of the scores that it was taken of: the sums of another product may have another order, and nothing would equal it."""

    def function(q: Array, k: Array, v: Array, do: Array) -> Array:
        def attend(q: Array, k: Array, v: Array) -> Array:
            s = jnp.einsum("htd,hjd->htj", q, k)
            e = jnp.exp(s - s.max(-1, keepdims=True))
            return jnp.einsum("htj,hjd->htd", e / e.sum(-1, keepdims=True), v)

        return jax.vjp(attend, q, k, v)[1](do)

    for graph in both(function, *given(4)):
        producers = graph.producers()
        (asked,) = (op for op in graph.ops if op.kind == "eq" and graph.values[op.outputs[0]].size == 2 * TOKENS**2)
        (largest,) = (op for op in graph.ops if op.kind == "reduce_max")
        assert asked.inputs[0] == largest.inputs[0] and producers[asked.inputs[0]] in large(graph)


def test_arrays_that_are_given_are_read_by_both() -> None:
    bias = np.random.default_rng(1).standard_normal((2, TOKENS, TOKENS)).astype("float32")

    def function(q: Array, k: Array, bias: Array) -> tuple[Array, Array]:
        s = jnp.tanh(jnp.einsum("htd,hjd->htj", q, k) + bias)
        return jnp.einsum("htj,hjd->htd", s, k), jnp.einsum("htj,htd->hjd", s, q)

    _, after = both(function, *given(2), bias)
    assert sum(after.inputs[2] in op.inputs for op in after.ops) == 2


def test_a_long_chain_of_elementwise_work() -> None:
    """Longer than Python's stack is deep, and every value read twice: no recursion, and no search in its paths."""

    def function(q: Array, k: Array) -> tuple[Array, Array]:
        s = jnp.einsum("htd,hjd->htj", q, k)
        for _ in range(1200):
            s = s * s + s
        return s.sum(1), s.sum(2)

    captured = capture(jax.make_jaxpr(function)(*given(2)), context=RewriteContext(TargetCapabilities(sums_by_batch=False)))
    assert not captured.failures
    assert len(captured.graph.ops) == 2 * (1 + 2 * 1200) + 2


def test_scores_are_divided_by_statistics_once_for_a_row() -> None:
    """And not by what is as large as they are."""

    def function(q: Array, k: Array, other: Array) -> tuple[Array, Array]:
        s = jnp.exp(jnp.einsum("htd,hjd->htj", q, k) / 8)
        return s / s.sum(-1, keepdims=True), s / other

    _, after = both(function, *given(2), 1 + np.random.default_rng(2).random((2, TOKENS, TOKENS), np.float32))
    sizes = sorted(after.values[op.outputs[0]].size for op in after.ops if op.kind == "div" and after.values[op.inputs[1]].shape)
    assert sizes == [2 * TOKENS, 2 * TOKENS**2]

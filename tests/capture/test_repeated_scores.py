"""Training steps with attention in one graph: the backward pass makes scores again, and no array of queries by keys is left."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.ops.graph import Graph
from tests.support.checks import in_float64
from tests.support.graphs import graph_of

pytest.importorskip("kitsune_jax._cpu", reason="the extension is not built: pip install -e .")

Array = Any
TOKENS = 261


def layer(x: Array, w: Array, out: Array, *, causal: bool) -> Array:
    q, k, v = jnp.moveaxis((x @ w).reshape(*x.shape[:2], 3, 2, 16), 2, 0)
    return x + jax.nn.dot_product_attention(q, k, v, is_causal=causal).reshape(x.shape) @ out


def step(x: Array, weights: list[tuple[Array, Array]], *, causal: bool) -> Array:
    def loss(weights: list[tuple[Array, Array]]) -> Array:
        y = x
        for w, out in weights:
            y = layer(y, w, out, causal=causal)
        return (jnp.tanh(y) ** 2).mean()

    return jax.value_and_grad(loss)(weights)


def arguments(layers: int = 1, tokens: int = TOKENS) -> tuple[Array, list[tuple[Array, Array]]]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Array:
        return jax.device_put(np.asarray(rng.standard_normal(shape) * shape[0] ** -0.5, jnp.float32))

    return jax.device_put(np.asarray(rng.standard_normal((1, tokens, 32)), jnp.float32)), [
        (draw(32, 96), draw(32, 32)) for _ in range(layers)
    ]


def scores(graph: Graph) -> int:
    """Products of queries and keys."""
    sizes = [graph.values[op.outputs[0]].size for op in graph.ops if op.kind == "dot_general"]
    return sizes.count(2 * TOKENS * TOKENS)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_training_step(layers: int, causal: bool) -> None:
    args = arguments(layers)
    wanted = in_float64(lambda x, w: step(x, w, causal=causal), *args)
    got = jax.jit(kj.pipeline(lambda x, w: step(x, w, causal=causal), strict=True, force=True))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        b = np.asarray(b)
        assert np.abs(np.asarray(a, np.float64) - b).max() < 1e-5 * max(np.abs(b).max(), 1e-3)


def test_no_array_of_queries_by_keys_is_left() -> None:
    args = arguments()
    graph = graph_of(lambda x, w: step(x, w, causal=True), *args)
    assert scores(graph) == 3  # of the forward pass, of the backward pass, and the gradient of the weights
    regions = route(graph, "cpu", RouteOptions(force=True, device="avx512-2")).regions
    borders = {v for r in regions for phase in r.phases for v in (*phase.region.inputs, *phase.region.outputs)}
    assert not [graph.values[v] for v in borders if graph.values[v].size >= 2 * TOKENS * TOKENS]


def test_without_a_backward_pass_nothing_is_made_twice() -> None:
    x, weights = arguments(2)
    assert scores(graph_of(lambda x, w: layer(layer(x, *w[0], causal=True), *w[1], causal=True), x, weights)) == 2


def test_a_long_chain_between_scores_and_weights() -> None:
    """Longer than Python's limit of nested calls."""

    def loss(q: Array, k: Array, v: Array) -> Array:
        s = q @ k.T
        for _ in range(1200):
            s = s + 0.5
        return jnp.sin(jax.nn.softmax(s) @ v).sum()

    graph = graph_of(jax.value_and_grad(loss, (0, 1, 2)), *np.ones((3, TOKENS, 16), np.float32))
    made = [op for op in graph.ops if op.kind == "dot_general" and graph.values[op.outputs[0]].shape == (TOKENS, TOKENS)]
    assert len(made) == 3  # of the forward pass, of the backward pass, and the gradient of the weights


def test_what_is_given_is_read_again() -> None:
    """A mask that is an argument, and weights that were dropped by one: neither is made again, and the numbers stay."""
    q, k, v, do = (jnp.asarray(a, jnp.float32) for a in np.random.default_rng(1).standard_normal((4, 1, 130, 2, 16)))
    keep = jax.device_put(np.random.default_rng(2).random((130, 130)) < 0.8)

    def gradients(q: Array, k: Array, v: Array, do: Array, keep: Array) -> Array:
        def loss(q: Array, k: Array, v: Array) -> Array:
            p = jax.nn.softmax(jnp.where(keep, jnp.einsum("bthd,bjhd->bhtj", q, k), -1e30))
            p = jnp.where(keep, p / 0.8, 0.0)
            return jnp.sin(jnp.einsum("bhtj,bjhd->bthd", p, v) * do).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    got = jax.jit(kj.pipeline(gradients, strict=True, force=True))(q, k, v, do, keep)
    for a, b in zip(got, jax.jit(gradients)(q, k, v, do, keep), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(jnp.abs(b).max()))

"""Sums of a row of weights times their gradients are made of the row's result, whatever the layout and the softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.ops.graph import Graph
from tests.support.checks import in_float64
from tests.support.graphs import graph_of

Array = Any
QUERIES, KEYS, HEADS, HEAD, COLUMNS = 263, 257, 2, 8, 12


def row_sums(graph: Graph, size: int = QUERIES * KEYS) -> int:
    """Sums over the keys of products with gradients of weights, which have at least ``size`` elements."""
    makers = {v: op for op in graph.ops for v in op.outputs}

    def has_product(v: int) -> bool:
        op = makers.get(v)
        if op is None or graph.values[v].size < size:
            return False
        return op.kind == "dot_general" or (op.kind in ("mul", "div", "select_n") and any(map(has_product, op.inputs)))

    return sum(op.kind == "reduce_sum" and has_product(op.inputs[0]) for op in graph.ops)


def by_hand(scores: Array) -> Array:
    e = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


def half_of_keys(scores: Array) -> Array:
    """With dropout: a factor that is a mask."""
    row, key = (jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - k) for k in (2, 1))
    keep = (row * 7 + key * 5) % 11 < 6
    return jnp.where(keep, jax.nn.softmax(scores) / 0.5, 0.0)


LAYOUTS = {
    "heads last": ("qhd,khd->hqk", "hqk,khe->qhe", (QUERIES, HEADS, HEAD), (KEYS, HEADS, HEAD), (KEYS, HEADS, COLUMNS)),
    "values first": ("qhd,khd->hqk", "khe,hqk->qhe", (QUERIES, HEADS, HEAD), (KEYS, HEADS, HEAD), (KEYS, HEADS, COLUMNS)),
    "heads first": ("hqd,hkd->hqk", "hqk,hke->hqe", (HEADS, QUERIES, HEAD), (HEADS, KEYS, HEAD), (HEADS, KEYS, COLUMNS)),
    "columns of values first": (
        "hqd,hkd->hqk",
        "hqk,hek->heq",
        (HEADS, QUERIES, HEAD),
        (HEADS, KEYS, HEAD),
        (HEADS, COLUMNS, KEYS),
    ),
    "grouped heads": ("qghd,khd->hgqk", "hgqk,khe->qghe", (QUERIES, 3, HEADS, HEAD), (KEYS, HEADS, HEAD), (KEYS, HEADS, COLUMNS)),
    "one head": ("qd,kd->qk", "qk,ke->qe", (QUERIES, HEAD), (KEYS, HEAD), (KEYS, COLUMNS)),
}


def gradients(
    layout: str, softmax: Callable[[Array], Array], dtype: Any = np.float32, pipeline: Callable[..., Any] = lambda f, **_: f
) -> tuple[Callable[..., Any], list[Array]]:
    to_scores, to_result, *shapes = LAYOUTS[layout]
    rng = np.random.default_rng(0)
    args = [jax.device_put(np.asarray(rng.standard_normal(shape), dtype)) for shape in shapes]

    def network(q: Array, k: Array, v: Array) -> Array:
        weights = softmax(jnp.einsum(to_scores, q, k) * 0.5)
        given = (weights.astype(v.dtype), v)
        return jnp.einsum(to_result, *(given if layout != "values first" else given[::-1]))

    def loss(q: Array, k: Array, v: Array) -> Array:
        out = pipeline(network, force=True)(q, k, v)
        return (jnp.sin(out.astype(jnp.promote_types(out.dtype, jnp.float32))) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1, 2)), args


@pytest.mark.parametrize("softmax", [jax.nn.softmax, by_hand, half_of_keys], ids=["softmax", "by hand", "dropout"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_sum_over_keys_of_a_gradient_is_left(layout: str, softmax: Callable[[Array], Array]) -> None:
    function, args = gradients(layout, softmax)
    assert row_sums(graph_of(function, *args)) == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_numbers_stay(layout: str) -> None:
    function, args = gradients(layout, half_of_keys)
    want = in_float64(function, *args)
    got = jax.jit(kj.pipeline(function, strict=True, force=True))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(np.asarray(a, np.float64) - b).max() < 2e-5 * np.abs(b).max()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits_are_as_near_as_where_jax_linearizes(dtype: Any) -> None:
    """``kj.pipeline(grad(f))`` beside ``grad(kj.pipeline(f))``, whose sums ``gradient/softmax_terms.py`` makes of results."""
    of_all, args = gradients("heads last", jax.nn.softmax, dtype)
    of_network, _ = gradients("heads last", jax.nn.softmax, dtype, kj.pipeline)
    want = in_float64(of_all, *args)
    errors = []
    for run in (kj.pipeline(of_all, strict=True, force=True), of_network):
        leaves = zip(jax.tree.leaves(jax.jit(run)(*args)), jax.tree.leaves(want), strict=True)
        errors.append([np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b) for a, b in leaves])
    assert np.all(np.array(errors[0]) < 1.25 * np.array(errors[1]) + 1e-5)


def test_other_sums_stay() -> None:
    """The values of the second product are others, and so is the factor of the first: nothing may be taken for a result."""
    rng = np.random.default_rng(1)
    q, k, v, w, g = (
        jax.device_put(np.asarray(rng.standard_normal(s), jnp.float32))
        for s in ((263, 8), (257, 8), (257, 12), (257, 12), (263, 12))
    )

    def function(q: Array, k: Array, v: Array, w: Array, g: Array) -> Any:
        p = jax.nn.softmax(q @ k.T)
        return p @ v, (p * (g @ w.T)).sum(-1), (p * p * (g @ v.T)).sum(-1), (p * (g @ v.T)).sum(0)

    assert row_sums(graph_of(function, q, k, v, w, g)) == 3
    got = jax.jit(kj.pipeline(function, force=True))(q, k, v, w, g)
    for a, b in zip(got, in_float64(function, q, k, v, w, g), strict=True):
        assert np.abs(np.asarray(a, np.float64) - b).max() < 2e-5 * np.abs(np.asarray(b)).max()


def test_a_number_that_the_weights_of_the_result_do_not_have_is_a_factor_of_the_sum() -> None:
    rng = np.random.default_rng(2)
    q, k, v, g = (
        jax.device_put(np.asarray(rng.standard_normal(s), jnp.float32)) for s in ((263, 8), (257, 8), (257, 12), (263, 12))
    )

    def function(q: Array, k: Array, v: Array, g: Array) -> Any:
        p = jax.nn.softmax(q @ k.T)
        return p @ v, (0.25 * p * jnp.einsum("qc,kc->qk", g, v)).sum(-1)

    assert row_sums(graph_of(function, q, k, v, g)) == 0
    got = jax.jit(kj.pipeline(function, strict=True, force=True))(q, k, v, g)
    for a, b in zip(got, in_float64(function, q, k, v, g), strict=True):
        assert np.abs(np.asarray(a, np.float64) - b).max() < 2e-5 * np.abs(np.asarray(b)).max()


def test_few_keys_are_summed_as_they_are() -> None:
    """Fewer keys than columns: the sum over the keys is the shorter one."""

    def loss(q: Array, k: Array, v: Array) -> Array:
        return (jax.nn.softmax(q @ k.T) @ v).sum()

    args = [jnp.ones(shape, jnp.float32) for shape in ((263, 16), (5, 16), (5, 64))]
    assert row_sums(graph_of(jax.value_and_grad(loss, (0, 1, 2)), *args), 263 * 5) > 0

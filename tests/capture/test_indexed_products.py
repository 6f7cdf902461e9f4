"""Products of rows that an index takes again and again are made once for each row of the table, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.capture.jaxpr import capture
from tests.support.checks import arrays, close, in_float64

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")

N, E, D, H = 11, 47, 6, 5


def products(f: Callable[..., Any], *args: Any) -> list[tuple[int, ...]]:
    """For each product its multiplications: of the result's elements and what is contracted."""
    captured = capture(jax.make_jaxpr(f)(*args))
    assert not captured.failures
    graph = captured.graph
    found = []
    for op in graph.ops:
        if op.kind == "dot_general":
            contracted = [graph.values[op.inputs[0]].shape[d] for d in op["lhs_contract"]]
            found.append((*graph.values[op.outputs[0]].shape, *contracted))
    return found


def multiplications(f: Callable[..., Any], *args: Any) -> int:
    return sum(map(math.prod, products(f, *args)))


def ids(seed: int = 0, count: int = E, n: int = N) -> Any:
    return jax.device_put(np.asarray(np.random.default_rng(seed).integers(0, n, count), jnp.int32))


def edge_layer(w: Any, edges: Any, nodes: Any, senders: Any, receivers: Any) -> Any:
    return jnp.tanh(jnp.concatenate([edges, nodes[senders], nodes[receivers]], -1) @ w)


def edge_arguments(dtype: Any = jnp.float32) -> tuple[Any, ...]:
    w, edges, nodes = (a.astype(dtype) for a in arrays(3, (3 * D, H), (E, D), (N, D)))
    return w, edges, nodes, ids(1), ids(2)


def test_the_first_layer_over_edges_multiplies_each_node_once() -> None:
    args = edge_arguments()
    assert sorted(products(edge_layer, *args)) == sorted([(E, H, D), (N, H, D), (N, H, D)])
    close(jax.jit(kj.pipeline(edge_layer, force=True))(*args), in_float64(edge_layer, *args))


@pytest.mark.parametrize("argument", [0, 1, 2, (0, 1, 2)])
def test_its_gradients_multiply_each_node_once(argument: Any) -> None:
    args = edge_arguments()

    def loss(*args: Any) -> Any:
        return jnp.sum(jnp.sin(edge_layer(*args)))

    gradient = jax.grad(loss, argument)
    close(jax.jit(kj.pipeline(gradient, force=True))(*args), in_float64(gradient, *args))
    close(jax.jit(jax.grad(kj.pipeline(loss, force=True), argument))(*args), in_float64(gradient, *args))
    rows_of_edges = [p for p in products(gradient, *args) if E in p]
    assert all(sorted(p) == sorted((E, H, D)) for p in rows_of_edges)
    assert len(rows_of_edges) <= 1 + (argument != 2) + (argument == (0, 1, 2))


def test_a_gradient_by_weights_and_nodes_sums_each_index_once() -> None:
    args = edge_arguments()
    gradient = jax.grad(lambda *a: jnp.sum(jnp.sin(edge_layer(*a))), (0, 2))
    graph = capture(jax.make_jaxpr(gradient)(*args)).graph
    sums = [graph.values[op.outputs[0]].shape for op in graph.ops if op.kind == "scatter_sum"]
    assert sorted(sums) == [(2, H), (2, H), (N, H), (N, H)]  # below and above the table, and the table


def test_taken_rows_alone() -> None:
    w, nodes = arrays(4, (D, H), (N, D))

    def f(w: Any, nodes: Any, i: Any) -> Any:
        return jnp.sin(nodes[i] @ w)

    assert products(f, w, nodes, ids()) == [(N, H, D)]
    close(jax.jit(kj.pipeline(f, force=True))(w, nodes, ids()), in_float64(f, w, nodes, ids()))


def test_rows_with_two_dimensions_and_an_index_with_two() -> None:
    """The index's dimensions stand in front of what is left of a row."""
    w, nodes = arrays(5, (D, H), (N, 3, D))
    i = ids(count=46).reshape(23, 2)

    def f(w: Any, nodes: Any, i: Any) -> Any:
        return jnp.sin(nodes[i] @ w)

    assert products(f, w, nodes, i) == [(N, 3, H, D)]
    for g in (f, jax.grad(lambda *a: f(*a).sum(), (0, 1))):
        close(jax.jit(kj.pipeline(g, force=True))(w, nodes, i), in_float64(g, w, nodes, i))


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_indices_out_of_range_give_what_they_gave(mode: str) -> None:
    w, nodes = arrays(6, (D, H), (N, D))
    i = ids().at[3].set(-2 * N).at[7].set(N).at[8].set(-1)

    def f(w: Any, nodes: Any, i: Any) -> Any:
        return nodes.at[i].get(mode=mode) @ w

    def loss(w: Any, nodes: Any, i: Any) -> Any:
        return jnp.nansum(jnp.sin(f(w, nodes, i)))

    assert products(f, w, nodes, i) == [(N, H, D)]
    close(jax.jit(kj.pipeline(f, force=True))(w, nodes, i), in_float64(f, w, nodes, i, by_xla=True))
    for argument in (0, 1):
        gradient = jax.grad(loss, argument)
        close(jax.jit(kj.pipeline(gradient, force=True))(w, nodes, i), in_float64(gradient, w, nodes, i, by_xla=True))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
def test_the_gradient_by_weights_at_indices_out_of_range(dtype: str) -> None:
    """JAX reads the nearest row where a plain index is out of range, and adds nothing to a row in the gradient."""
    args = list(edge_arguments())
    args[3] = args[3].at[0].set(N).at[1].set(N + 90).at[2].set(0 if dtype.startswith("u") else -N - 3).astype(dtype)
    gradient = jax.grad(lambda *a: jnp.sum(jnp.sin(edge_layer(*a))), (0, 1, 2))
    close(jax.jit(kj.pipeline(gradient, force=True))(*args), in_float64(gradient, *args, by_xla=True))


def test_the_gradient_by_weights_of_a_table_with_one_row() -> None:
    """Both ends of the table are that row."""
    args = list(edge_arguments())
    args[2] = args[2][:1]
    args[3], args[4] = (i % 3 - 1 for i in args[3:])
    gradient = jax.grad(lambda *a: jnp.sum(jnp.sin(edge_layer(*a))), (0, 1, 2))
    close(jax.jit(kj.pipeline(gradient, force=True))(*args), in_float64(gradient, *args, by_xla=True))


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_a_row_that_nobody_takes_may_hold_anything(bad: float) -> None:
    args = list(edge_arguments())
    args[2] = args[2].at[N // 2].set(bad).at[0].set(bad)
    args[3], args[4] = (jnp.where((i == N // 2) | (i == 0), 1, i) for i in args[3:])
    gradient = jax.grad(lambda *a: jnp.sum(jnp.sin(edge_layer(*a))), (0, 1, 2))
    close(jax.jit(kj.pipeline(gradient, force=True))(*args), in_float64(gradient, *args))


def test_a_number_that_fills_keeps_the_product_as_it_is() -> None:
    """A row of ones times a matrix is no row of ones."""
    w, nodes = arrays(7, (D, H), (N, D))

    def f(w: Any, nodes: Any, i: Any) -> Any:
        return nodes.at[i].get(mode="fill", fill_value=1.0) @ w

    i = ids().at[5].set(N)
    assert products(f, w, nodes, i) == [(E, H, D)]
    close(jax.jit(kj.pipeline(f, force=True))(w, nodes, i), in_float64(f, w, nodes, i))


@pytest.mark.parametrize("count", [1, N, 2 * N - 1])
def test_a_table_with_as_many_rows_as_are_taken_is_left_alone(count: int) -> None:
    w, nodes = arrays(8, (D, H), (N, D))
    assert products(lambda w, nodes, i: nodes[i] @ w, w, nodes, ids(count=count)) == [(count, H, D)]


def test_a_sum_by_an_index_comes_before_the_product() -> None:
    w, updates = arrays(9, (D, H), (E, D))

    def f(w: Any, updates: Any, i: Any) -> Any:
        return jax.ops.segment_sum(jnp.tanh(updates) @ w, i, N)

    assert products(f, w, updates, ids()) == [(N, H, D)]
    for g in (f, jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1))):
        close(jax.jit(kj.pipeline(g, force=True))(w, updates, ids()), in_float64(g, w, updates, ids()))


def test_other_folds_of_a_product_are_left_alone() -> None:
    w, updates = arrays(10, (D, H), (E, D))
    assert products(lambda w, u, i: jax.ops.segment_max(u @ w, i, N), w, updates, ids()) == [(E, H, D)]


def test_bfloat16_is_added_up_before_it_is_rounded() -> None:
    args = edge_arguments(jnp.bfloat16)
    wanted = in_float64(edge_layer, *args)
    mine, plain = (np.asarray(jax.jit(f)(*args), np.float64) for f in (kj.pipeline(edge_layer, force=True), edge_layer))
    assert np.abs(mine - wanted).max() <= 1.5 * np.abs(plain - wanted).max()
    gradient = jax.grad(lambda *a: jnp.sum(edge_layer(*a).astype(jnp.float32)), (0, 1, 2))
    close(jax.jit(kj.pipeline(gradient, force=True))(*args), in_float64(gradient, *args), tol=0.05)


def test_a_step_of_message_passing_saves_multiplications() -> None:
    """With sixteen edges for each node, three layers over edges and nodes take little more than half of the multiplications."""
    n, e, d = 20, 320, 8
    w1, w2, w3, nodes, edges = arrays(11, (3 * d, d), (d, d), (2 * d, d), (n, d), (e, d))
    s, r = ids(1, e, n), ids(2, e, n)

    def step(w1: Any, w2: Any, w3: Any, nodes: Any, edges: Any, s: Any, r: Any) -> Any:
        message = jnp.tanh(edge_layer(w1, edges, nodes, s, r) @ w2)
        return jnp.sum(jnp.tanh(jnp.concatenate([nodes, jax.ops.segment_sum(message, r, n)], -1) @ w3) ** 2)

    args = w1, w2, w3, nodes, edges, s, r
    plain = e * d * d * 4 + n * d * d * 2
    assert multiplications(step, *args) < 0.6 * plain
    assert multiplications(jax.grad(step, tuple(range(5))), *args) < 0.6 * 3 * plain


def test_what_is_left_to_xla_saves_them_too() -> None:
    """A single product is no pipeline, and is made of the table all the same."""
    wide = 64  # the product of a few numbers is a pipeline of its own: no other thread has to wake up for it
    w, nodes = arrays(12, (wide, wide), (N, wide))

    def f(w: Any, nodes: Any, i: Any) -> Any:
        return nodes[i] @ w

    pipelined = kj.pipeline(f)
    assert not kj.explain(pipelined)(w, nodes, ids()).regions
    text = jax.jit(pipelined).lower(w, nodes, ids()).as_text()
    assert f"tensor<{N}x{wide}xf32>, tensor<{wide}x{wide}xf32>" in text
    assert f"tensor<{E}x{wide}xf32>, tensor<{wide}x{wide}xf32>" not in text
    close(jax.jit(pipelined)(w, nodes, ids()), in_float64(f, w, nodes, ids()))

"""A slice of a product's columns is the product with a slice of the weights, where nothing else reads the product."""

from __future__ import annotations

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


def products(f: Callable[..., Any], *args: Any) -> list[tuple[int, ...]]:
    """The shapes of the products' results."""
    graph = capture(jax.make_jaxpr(f)(*args)).graph
    return [graph.values[op.outputs[0]].shape for op in graph.ops if op.kind == "dot_general"]


@pytest.mark.parametrize(
    "cut",
    [
        lambda g: g[:, :5],
        lambda g: g[:, 3:],
        lambda g: g[:, 1:8:3],
        lambda g: jnp.split(g, [5], axis=-1)[0],  # whose other half nobody reads
    ],
    ids=["first", "last", "strided", "split"],
)
@pytest.mark.parametrize("rows", [1, 37])
def test_only_the_columns_that_are_used_are_multiplied(cut: Callable[[Any], Any], rows: int) -> None:
    x, w = arrays(1, (rows, 6), (8, 6))

    def f(x: Any, w: Any) -> Any:
        return jnp.tanh(cut(x @ w.T))

    used = jax.eval_shape(f, x, w).shape
    assert products(f, x, w) == [used]
    close(jax.jit(kj.pipeline(f, force=True))(x, w), in_float64(f, x, w))


def test_a_product_that_others_read_is_made_whole() -> None:
    x, w = arrays(2, (7, 6), (6, 8))

    def twice(x: Any, w: Any) -> Any:
        g = x @ w
        return g[:, :5], g[:, 5:]

    assert products(twice, x, w) == [(7, 8)]


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_the_gradient_by_one_part_of_a_concatenation(argument: int) -> None:
    """The slices of the other parts are dead, and must not take part in the rewriting."""
    *parts, w = arrays(5, (7, 5), (7, 1), (7, 4), (10, 4))

    def loss(a: Any, b: Any, c: Any, w: Any) -> Any:
        return jnp.sum((jnp.concatenate([a, b, c], -1) @ w) ** 2)

    gradient = jax.grad(loss, argument)
    captured = capture(jax.make_jaxpr(gradient)(*parts, w))
    assert not captured.failures
    assert (7, 10) not in products(gradient, *parts, w)
    close(jax.jit(kj.pipeline(gradient, force=True))(*parts, w), in_float64(gradient, *parts, w))


def test_a_slice_of_a_slice_is_folded_twice() -> None:
    x, w = arrays(6, (7, 6), (6, 8))

    def f(x: Any, w: Any) -> Any:
        return (x @ w)[:, 1:7][:, ::2]

    assert products(f, x, w) == [(7, 3)]
    close(jax.jit(kj.pipeline(f, force=True))(x, w), in_float64(f, x, w))


def test_a_slice_of_rows_stays_behind_the_product() -> None:
    x, w = arrays(3, (7, 6), (6, 8))
    assert products(lambda x, w: (x @ w)[2:5], x, w) == [(7, 8)]


def test_the_gradient_of_a_concatenation_multiplies_no_columns_for_an_input_without_one() -> None:
    x, w, v = arrays(4, (9, 5), (5, 16), (21, 4))

    def loss(w: Any, v: Any, x: Any) -> Any:
        return jnp.sum(jnp.concatenate([jnp.tanh(x @ w), x], -1) @ v)

    assert (9, 21) not in products(jax.grad(loss), w, v, x)
    got = jax.jit(kj.pipeline(jax.grad(loss, (0, 1)), force=True))(w, v, x)
    close(jax.tree.map(np.asarray, got), in_float64(jax.grad(loss, (0, 1)), w, v, x))

"""Sums over rows of what a pointwise step makes for them alone, in its registers; and of what others read as well."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import kitsune_jax as kj
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.targets.cpu import bytecode
from kitsune_jax.targets.cpu.lower import lower_program

ROUNDED = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 2e-3}  # of a term, relative to its magnitude


def difference(x: Array, y: Array) -> list[Array]:
    d = (x - y).astype(jnp.float32)
    return [(d * d).sum(0), d.sum(), jnp.abs(d).sum(0)]


def returned_too(x: Array, y: Array) -> list[Array]:
    product = (x * y).astype(jnp.float32)
    return [product.sum(0), product]


def summed_twice(x: Array, y: Array) -> list[Array]:
    product = (x * y).astype(jnp.float32)
    return [product.sum(0), product.sum(), jnp.abs(product).sum(0)]


def weighted(x: Array, y: Array) -> list[Array]:
    return [(x.astype(jnp.float32) * y[:, :1].astype(jnp.float32)).sum(0)]


def squared_error(x: Array, y: Array) -> list[Array]:
    return [((x - y).astype(jnp.float32) ** 2).sum()]


# Of each result its terms, in NumPy, and the dimensions that they are summed over.
Terms = list[tuple[np.ndarray, tuple[int, ...]]]
TERMS: dict[Callable[..., list[Array]], Callable[[np.ndarray, np.ndarray], Terms]] = {
    difference: lambda x, y: [((x - y) ** 2, (0,)), (x - y, (0, 1)), (abs(x - y), (0,))],
    returned_too: lambda x, y: [(x * y, (0,)), (x * y, ())],
    summed_twice: lambda x, y: [(x * y, (0,)), (x * y, (0, 1)), (abs(x * y), (0,))],
    weighted: lambda x, y: [(x * y[:, :1], (0,))],
    squared_error: lambda x, y: [((x - y) ** 2, (0, 1))],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (97, 24), (97, 64), (1000, 48), (301, 200), (130, 1000)])
@pytest.mark.parametrize("fn", TERMS)
def test_sums_are_those_of_float64(fn: Callable[..., list[Array]], shape: tuple[int, int], dtype: str) -> None:
    rng = np.random.default_rng(sum(shape))
    x, y = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    got = jax.jit(kj.pipeline(fn, force=True))(x, y)
    for found, (terms, over) in zip(got, TERMS[fn](np.asarray(x, np.float64), np.asarray(y, np.float64)), strict=True):
        off = np.abs(np.asarray(found, np.float64) - terms.sum(over))
        np.testing.assert_array_less(
            off, 3 * ROUNDED[dtype] * np.abs(terms).sum(over) + 1e-7
        )  # float16 has steps of 6e-8 near zero


@pytest.mark.parametrize(
    ("fn", "alone"),
    [(difference, [1, 0, 1]), (returned_too, [0]), (summed_twice, [0, 0, 1]), (weighted, [1]), (squared_error, [1])],
)
def test_only_what_nothing_else_reads_stays_in_registers(fn: Callable[..., list[Array]], alone: list[int]) -> None:
    ones = jnp.ones((96, 64))
    routed = route(capture(jax.make_jaxpr(fn)(ones, ones)).graph, "cpu", RouteOptions(device="zen5-2", force=True))
    made = [lower_program(part.program, "sums") for region in routed.regions for part in region.program.parts]
    folds = [i for program in made for stage in program.stages for i in stage.body if isinstance(i, bytecode.Accumulate)]
    assert [fold.only for fold in folds] == alone

"""Gradients by one of several arguments, and by pairs: what the others would have needed is dead and misleads no rewrite."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax import _compat
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.ops.table import verify
from tests.support.argument_cases import CASES
from tests.support.checks import count
from tests.support.gradient_checks import check_close

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")


def check(name: str, by: tuple[int, ...], dtype: str) -> None:
    f, shapes = CASES[name]
    rng = np.random.default_rng(len(name))
    args = [np.asarray(rng.uniform(-1, 1, s)).astype(jnp.dtype(dtype)) for s in shapes]

    def loss(*args: Any) -> Any:
        return jnp.sum(jnp.sin(0.7 * f(*args).astype(jnp.promote_types(args[0].dtype, jnp.float32))))

    gradient: Callable[..., Any] = jax.grad(loss, by)
    captured = capture(_compat.hoist_consts(jax.make_jaxpr(gradient)(*args))[0])
    verify(captured.graph)
    assert not captured.failures
    compiled = jax.jit(kj.pipeline(gradient, force=True)).lower(*args).compile()
    assert count(compiled.as_text()) > 0
    check_close(compiled(*args), gradient, args, dtype, roundings=48, per_array=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_gradients_by_each_argument(name: str, first: int) -> None:
    """By every second one."""
    for k in range(first, len(CASES[name][1]), 2):
        check(name, (k,), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients_by_pairs_of_arguments(name: str) -> None:
    for pair in itertools.combinations(range(len(CASES[name][1])), 2):
        check(name, pair, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_by_each_argument_in_16_bits(name: str, dtype: str) -> None:
    for k in range(len(CASES[name][1])):
        check(name, (k,), dtype)

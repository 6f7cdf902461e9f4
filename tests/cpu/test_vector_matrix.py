"""A vector times a matrix that both belong to a row: the states of a hidden Markov model, each with transitions of its own."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.targets.cpu.lower import lower_program
from tests.support.lowered import array

ROWS, STEPS = 37, 5


def filtered(how: str) -> Any:
    def function(p: Any, e: Any) -> Any:
        return jax.lax.scan(lambda a, x: (jnp.einsum(how, a, p) * 0.2 + x, None), e[0], e)[0]

    return function


@pytest.mark.parametrize("how", ["bi,bij->bj", "bj,bij->bi"])
@pytest.mark.parametrize(("size", "product"), [(2, False), (4, False), (5, True), (6, True), (17, True), (64, True), (70, True)])
def test_larger_matrices_are_products(monkeypatch: pytest.MonkeyPatch, size: int, product: bool, how: str) -> None:
    programs: list[Any] = []
    monkeypatch.setattr(
        "kitsune_jax.targets.cpu.lower.lower_program", lambda p, *a: programs.append(lower_program(p, *a)) or programs[-1]
    )
    p, e = array(ROWS, size, size) / size, array(STEPS, ROWS, size)
    got = jax.jit(kj.pipeline(filtered(how), force=True))(p, e)
    state = e[0].astype(np.float64)
    for x in e.astype(np.float64):
        state = np.einsum(how, state, p.astype(np.float64)) * 0.2 + x
    np.testing.assert_allclose(got, state, rtol=2e-5, atol=2e-5)
    assert programs and any(bool(re.search(r"(?<!Taken)\bDot\(", repr(x))) for x in programs) is product


def test_few_large_matrices_are_left_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 of 64 x 64 took 1.6 times the CPU time of ``jax.jit`` (Xeon with AMX)."""
    monkeypatch.setenv("KITSUNE_PROFILE", "emeraldrapids-2")
    report = kj.explain(filtered("bi,bij->bj"))(jnp.zeros((16, 64, 64)), jnp.zeros((128, 16, 64)))
    assert not report.regions, report


@pytest.mark.parametrize("columns", [1, 2, 3, 6, 9])
@pytest.mark.parametrize("rows", [3, 50])
def test_an_outer_product_of_a_taken_vector(rows: int, columns: int) -> None:
    """The smaller operand comes first in a product kernel, but not where the product is elementwise."""
    x, w, ids = array(rows, 32, 1), array(rows, 1, columns), np.array([31, 0, 7, 7, 2, 30])

    def function(x: Any, w: Any, ids: Any) -> Any:
        return jnp.take(x, ids, axis=1, mode="clip") @ w

    got = jax.jit(kj.pipeline(function, force=True, strict=True))(x, w, ids)
    np.testing.assert_allclose(got, np.asarray(x)[:, ids] @ np.asarray(w), rtol=1e-6)

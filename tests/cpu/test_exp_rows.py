"""Exponentials of rows, of which a number for each row is taken off, and their sums, in one step: the middle of a softmax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kitsune_jax as kj
from kitsune_jax.targets.cpu import bytecode as bc
from tests.support.checks import close, in_float64

pytest.importorskip("kitsune_jax._cpu", reason="the extension is not built: pip install -e .")
pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")

TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 4e-3}


def steps(made: list[bc.CpuProgram]) -> list[bc.ExpRows]:
    def inside(body: Any) -> Any:
        for i in body:
            yield from inside(i.body) if isinstance(i, (bc.CpuLoop, bc.CpuStationary)) else (i,)

    return [i for p in made for s in p.stages for i in inside(s.body) if isinstance(i, bc.ExpRows)]


def forced(f: Any) -> Any:
    return jax.jit(kj.pipeline(f, force=True, strict=True))


def attention(causal: bool) -> Any:
    def f(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("hqd,hkd->hqk", q, k) * q.shape[-1] ** -0.5
        if causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
        return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores), v)

    return f


def normal(seed: int, *shape: int, dtype: str = "float32") -> Any:
    return jax.device_put(np.asarray(np.random.default_rng(seed).standard_normal(shape), dtype))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("causal", [False, True])
def test_attention_takes_its_exponentials_and_sums_in_one_step(programs, causal: bool, dtype: str) -> None:
    args = tuple(normal(k, 3, 307, 24, dtype=dtype) for k in range(3))
    close(np.asarray(forced(attention(causal))(*args), np.float64), in_float64(attention(causal), *args), TOLERANCE[dtype])
    found = steps(programs)
    assert found and all(step.sums for step in found)
    assert all(bc.DTYPES[step.out.ref.dtype] == dtype for step in found)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_gradient_computes_its_scores_exponentials_again(programs, dtype: str) -> None:
    args = tuple(normal(k, 2, 131, 16, dtype=dtype) for k in range(3))
    gradient = jax.grad(lambda *a: jnp.sum(jnp.sin(attention(True)(*a).astype(jnp.float32))), (0, 1, 2))
    tolerance = TOLERANCE[dtype] * 3
    close(jax.tree.map(lambda x: np.asarray(x, np.float64), forced(gradient)(*args)), in_float64(gradient, *args), tolerance)
    assert bool(steps(programs)) == (dtype == "float32")


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_softmax_of_any_dtype_leaves_out_the_blocks_that_a_mask_hides(programs, dtype: str) -> None:
    args = tuple(normal(k, 1, 1031, 8, dtype=dtype) for k in range(3))
    close(np.asarray(forced(attention(True))(*args), np.float64), in_float64(attention(True), *args), TOLERANCE[dtype])
    loops = [i for p in programs for s in p.stages for i in s.body if isinstance(i, bc.CpuLoop)]
    assert [i.within[-1] for i in loops] == [1, 2]  # the blocks without a mask, and those that it cuts


@given(st.integers(1, 70), st.integers(1, 90), st.sampled_from(list(TOLERANCE)), st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_a_softmax_of_any_width(rows: int, n: int, dtype: str, seed: int) -> None:
    def f(x: Any, w: Any) -> Any:
        return jax.nn.softmax(x @ w)

    args = normal(seed, rows, 5, dtype=dtype), normal(seed + 1, 5, n, dtype=dtype)
    close(np.asarray(forced(f)(*args), np.float64), in_float64(f, *args), TOLERANCE[dtype])


def exponentials(x: Any, shift: Any) -> tuple[Any, Any, Any]:
    e = jnp.exp(x - shift[:, None])
    return e, e.sum(1), x.max(1)  # which x lies in memory for


def test_exponentials_of_the_whole_range_are_right_to_four_units(programs) -> None:
    x = np.linspace(-95, 95, 64 * 1001, dtype=np.float32).reshape(1001, 64)
    shift = np.random.default_rng(0).uniform(-8, 8, 1001).astype(np.float32)
    got, *_ = forced(exponentials)(x, shift)
    assert len(steps(programs)) == 1
    want = np.exp((x - shift[:, None]).astype(np.float64))
    least, most = 2.0**-126, float(np.finfo(np.float32).max)
    normal_numbers = (want >= least) & (want <= most)
    error = np.abs(got - want)[normal_numbers] / want[normal_numbers]
    assert error.max() <= 4 * 2.0**-23
    assert (np.asarray(got)[want < least] <= least).all()
    assert np.isinf(np.asarray(got)[want > most * (1 + 1e-6)]).all()


def test_what_is_not_finite_stays_as_it_is(programs) -> None:
    x = np.ones((7, 33), np.float32)
    x[1], x[2, 5], x[3, 7], x[4, 32] = -np.inf, np.inf, np.nan, -np.inf
    shift = np.asarray([0, 0, 0, 0, 0, np.inf, np.nan], np.float32)
    got, sums, _ = forced(exponentials)(x, shift)
    assert len(steps(programs)) == 1
    with np.errstate(all="ignore"):
        want = np.exp(x - shift[:, None])
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(sums, want.sum(1), rtol=1e-5)


def test_numbers_of_two_dimensions_of_a_row_have_their_own_shift(programs) -> None:
    def f(x: Any, w: Any) -> Any:
        return jax.nn.softmax((x @ w).reshape(-1, 3, 40), axis=-1)

    args = normal(0, 53, 6), normal(1, 6, 120)
    close(np.asarray(forced(f)(*args), np.float64), in_float64(f, *args), TOLERANCE["float32"])
    assert [step.kept for step in steps(programs)] == [(3,)]


def test_short_rows_are_left_to_loops_over_all_rows(programs) -> None:
    def f(x: Any, w: Any) -> Any:
        return jax.nn.softmax(x @ w)

    args = normal(0, 53, 6), normal(1, 6, 10)
    close(np.asarray(forced(f)(*args), np.float64), in_float64(f, *args), TOLERANCE["float32"])
    assert steps(programs) == []

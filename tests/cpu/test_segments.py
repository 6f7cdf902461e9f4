"""Segment reductions alone, through the public API, against NumPy in float64: ids that somebody will have, in order and not."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj

FOLDS: dict[str, tuple[Callable[..., jax.Array], np.ufunc, float]] = {
    "sum": (jax.ops.segment_sum, np.add, 0.0),
    "max": (jax.ops.segment_max, np.maximum, -np.inf),
    "min": (jax.ops.segment_min, np.minimum, np.inf),
    "prod": (jax.ops.segment_prod, np.multiply, 1.0),
}
# From rows, segments and a generator. Two digits make a key of 2 100 segments, and rows are sorted by one and within by the other.
IDS: dict[str, Callable[[int, int, np.random.Generator], np.ndarray]] = {
    "even": lambda rows, n, rng: rng.integers(n, size=rows),
    "all the same": lambda rows, n, rng: np.full(rows, n // 3),
    "half of one segment": lambda rows, n, rng: np.where(rng.random(rows) < 0.5, n - 1, rng.integers(n, size=rows)),
    "negative and beyond": lambda rows, n, rng: rng.integers(-n // 2, n + n // 2, size=rows),
    "all beyond": lambda rows, n, rng: rng.integers(n, 2 * n, size=rows),
    "a few segments of many": lambda rows, n, rng: rng.integers(5, size=rows) * (n // 5),
}
ROWS, SEGMENTS = 3001, 2100
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


def folded(how: str, x: np.ndarray, ids: np.ndarray, n: int) -> np.ndarray:
    """In float64; rows whose id is outside of [0, n) are dropped."""
    _, fold, identity = FOLDS[how]
    out = np.full((n, x.shape[1]), identity)
    inside = (ids >= 0) & (ids < n)
    fold.at(out, ids[inside], x[inside].astype(np.float64))
    return out


def check(how: str, x: jax.Array, ids: np.ndarray, n: int, ordered: bool) -> None:
    fold = FOLDS[how][0]
    pipelined = jax.jit(kj.pipeline(lambda x, i: fold(x, i, num_segments=n, indices_are_sorted=ordered, mode="drop"), force=True))
    got = np.asarray(pipelined(x, jnp.asarray(ids, jnp.int32)))
    with np.errstate(over="ignore", invalid="ignore"):
        want = folded(how, np.asarray(x), ids, n)
        want = want.astype(got.dtype).astype(np.float64)
    allowed = TOLERANCE[x.dtype.name] * (1.0 + np.abs(want, where=np.isfinite(want), out=np.zeros_like(want)))
    if how == "sum":  # of thousands of numbers of both signs: each addition rounds what has been added up so far
        allowed += np.finfo(np.float32).eps * folded(how, np.abs(np.asarray(x)), ids, n)
    with np.errstate(invalid="ignore"):
        wrong = (got != want) & ~(np.abs(got.astype(np.float64) - want) <= allowed)
    assert not wrong.any(), (got[wrong][:8], want[wrong][:8])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ids", list(IDS))
@pytest.mark.parametrize("ordered", [True, False], ids=["in order", "in no order"])
@pytest.mark.parametrize(("how", "dtype", "width"), [
    ("sum", "float32", 64),
    ("max", "float32", 67),
    ("min", "bfloat16", 33),
    ("prod", "float32", 16),
    ("max", "float16", 5),
    ("sum", "bfloat16", 130),
])  # fmt: skip
def test_adversarial_ids(how: str, dtype: str, width: int, ordered: bool, ids: str) -> None:
    rng = np.random.default_rng(len(ids) + width)
    at = IDS[ids](ROWS, SEGMENTS, rng)
    at = np.sort(at) if ordered else at
    numbers = rng.standard_normal((ROWS, width)) if how != "prod" else np.exp(0.01 * rng.standard_normal((ROWS, width)))
    check(how, jnp.asarray(numbers, dtype), at, SEGMENTS, ordered)


@pytest.mark.parametrize("how", ["max", "min"])
def test_a_nan_wins_and_zeros_have_signs(how: str) -> None:
    rng = np.random.default_rng(5)
    odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -1.5], np.float32)
    x = rng.choice(odd, (ROWS, 40), p=[0.02, 0.05, 0.05, 0.3, 0.38, 0.1, 0.1])
    ids = rng.integers(700, size=ROWS)
    fold = FOLDS[how][0]
    pipelined = jax.jit(kj.pipeline(lambda x, i: fold(x, i, num_segments=700), force=True))
    got = np.asarray(pipelined(jnp.asarray(x), jnp.asarray(ids, jnp.int32)))
    want = folded(how, x, ids, 700)
    np.testing.assert_array_equal(got, want.astype(np.float32))
    # The sign of a zero, which comparisons do not see: -0 is below +0.
    signs = np.where(np.signbit(x), -1.0, 1.0)
    zeros = np.where(x == 0, signs, -np.inf if how == "max" else np.inf)
    sign = folded(how, zeros, ids, 700)
    at = (want == 0) & np.isfinite(sign)
    assert at.any()
    np.testing.assert_array_equal(np.signbit(got[at]), sign[at] < 0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ordered", [True, False], ids=["in order", "in no order"])
@pytest.mark.parametrize(("rows", "width", "n"), [(1, 64, 5), (1, 1, 1), (0, 64, 5), (257, 64, 100_000), (97, 1024, 3)])
def test_odd_sizes(rows: int, width: int, n: int, ordered: bool) -> None:
    rng = np.random.default_rng(rows)
    ids = rng.integers(n, size=rows)
    x = jax.device_put(np.asarray(rng.standard_normal((rows, width)), jnp.float32))
    for how in ("sum", "max"):
        check(how, x, np.sort(ids) if ordered else ids, n, ordered)


@pytest.mark.parametrize("how", ["sum", "max"])
def test_rows_that_lie_in_memory(how: str) -> None:
    """100 MB of rows are asked for further ahead than what a cache holds. Small integers, whose sums are exact."""
    rng = np.random.default_rng(3)
    x = rng.integers(-8, 9, (200_003, 129)).astype(np.float32)
    ids = rng.integers(-2, 20_000, 200_003)
    fold = FOLDS[how][0]
    pipelined = jax.jit(kj.pipeline(lambda x, i: fold(x, i, num_segments=20_000, mode="drop"), force=True))
    got = np.asarray(pipelined(jnp.asarray(x), jnp.asarray(ids, jnp.int32)))
    order = np.argsort(ids, kind="stable")[np.count_nonzero(ids < 0) :]
    starts = np.flatnonzero(np.diff(ids[order], prepend=-1))
    want = np.full(got.shape, FOLDS[how][2])
    want[ids[order][starts]] = FOLDS[how][1].reduceat(x[order].astype(np.float64), starts, axis=0)
    np.testing.assert_array_equal(got, want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ids", ["even", "half of one segment", "negative and beyond", "all beyond", "a few segments of many"])
@pytest.mark.parametrize(("how", "dtype"), [("sum", "float32"), ("max", "float32"), ("sum", "bfloat16")])
def test_rows_that_are_wide(how: str, dtype: str, ids: str) -> None:
    """The result is finished in pieces of a few rows, each of which meets what all strands have kept."""
    rng = np.random.default_rng(len(ids))
    rows, n, width = 61, 37, 9001
    at = np.sort(IDS[ids](rows, n, rng))
    check(how, jax.device_put(np.asarray(rng.standard_normal((rows, width)), dtype)), at, n, True)
    check(how, jax.device_put(np.asarray(rng.standard_normal((rows, width)), dtype)), rng.permutation(at), n, False)

"""Reductions of few rows over a long dimension, in parts.

Checked in float64: any number of parts gives the same; parts and rows of which nothing is seen, and rows that are not
a number, are what JAX makes of them; which functions are left as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune_jax.capture.edit import Captured
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import Rewrite, apply_rewrites
from kitsune_jax.capture.rewrites import few_rows as module
from reference.graph import evaluate_numpy
from reference.standalone import run
from tests.support.checks import in_parts

Array = Any


@pytest.fixture(autouse=True, scope="module")
def _short_dimensions() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LONG", 4)
        patch.setattr(module, "_PART", 1)
        yield


def plain(q: Array, k: Array, v: Array, seen: Array) -> Array:
    """[rows, size] by [keys, size]."""
    scores = jnp.where(seen[:, 0], q[:, 0] @ k[:, 0].T * 0.3, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1) @ v[:, 0]


def heads_last(q: Array, k: Array, v: Array, seen: Array) -> Array:
    scores = jnp.einsum("qhd,khd->hqk", q, k) * 0.3
    scores = jnp.where(seen.swapaxes(0, 1), scores, -jnp.inf)
    weights = jax.nn.softmax(scores.astype(jnp.promote_types(q.dtype, jnp.float32))).astype(q.dtype)
    return jnp.einsum("hqk,khd->qhd", weights, v)


def keys_first(q: Array, k: Array, v: Array, seen: Array) -> Array:
    """The softmax as one writes it by hand, along the first dimension; the weights are divided behind the product."""
    scores = jnp.where(jnp.transpose(seen, (2, 1, 0)), jnp.einsum("khd,qhd->khq", k, q) * 0.3, -jnp.inf)
    largest = scores.max(0, keepdims=True)
    weights = jnp.exp(scores - largest)
    return jnp.einsum("khq,khd->qhd", weights, v) / weights.sum(0).T[..., None]


def of_jax(q: Array, k: Array, v: Array, seen: Array) -> Array:
    """Hidden scores are a low number, so a row that sees nothing is the mean of all values."""
    mask = jnp.moveaxis(seen, 1, 0)[None]
    return jax.nn.dot_product_attention(q[None], k[None], v[None], mask=mask)[0]


def pooled(q: Array, k: Array, v: Array, seen: Array) -> Array:
    """Beside the softmax the largest score, the log-sum-exp and a plain sum of the same dimension."""
    scores = jnp.where(seen[:, 0], q[:, 0] @ k[:, 0].T, -jnp.inf)
    largest = scores.max(-1)
    weights = jnp.exp(scores - largest[:, None])
    shown = jnp.where(seen[:, 0], q[:, 0] @ k[:, 0].T, 0.0).sum(-1)
    return weights @ v[:, 0] + (largest + jnp.log(weights.sum(-1)) + shown)[:, None]


def split(f: Callable[..., Array], args: tuple[Array, ...], workers: int) -> tuple[Captured, Captured | None]:
    """As it was captured, and in parts, if it can be."""
    captured = capture(jax.make_jaxpr(f)(*args))
    made = apply_rewrites(captured, (Rewrite("parts", functools.partial(module.split_reductions, workers=workers)),))
    assert not made.failures, made.failures[0].traceback
    return captured, made if made is not captured else None


def both(f: Callable[..., Array], args: tuple[Array, ...], workers: int) -> tuple[Array, Array]:
    """The result in parts and the one at once, in float64."""
    captured, made = split(f, args, workers)
    assert made is not None
    arrays = [np.asarray(a) for a in args]
    with np.errstate(all="ignore"):
        got, want = (evaluate_numpy(c.graph, arrays, widen=True)[0] for c in (made, captured))
    return got, want


def arguments(seed: int, rows: int, keys: int, heads: int, size: int, dtype: Any = jnp.float32) -> tuple[np.ndarray, ...]:
    """NumPy's arrays: JAX compiles a program for every new shape of one of its own."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((n, heads, size)).astype(dtype) for n in (rows, keys, keys))
    return q, k, v, np.ones((rows, heads, keys), bool)


@in_parts
@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([plain, heads_last, keys_first, of_jax, pooled]),
    st.integers(1, 8),
    st.integers(2, 30),
    st.integers(1, 3),
    st.integers(2, 9),
    st.integers(0, 3),
    st.integers(0, 2**31),
)
def test_any_parts_give_the_same(
    part: int, f: Callable[..., Array], rows: int, tokens: int, heads: int, workers: int, hidden: int, seed: int
) -> None:
    heads = 1 if f in (plain, pooled) else min(heads, workers - 1)
    least = workers // np.gcd(heads, workers)
    keys = tokens * least
    q, k, v, seen = arguments(seed, rows, keys, heads, 5)
    rng = np.random.default_rng(seed)
    if hidden == 1:  # all of the first part and more
        seen[..., : min(keys - 1, tokens + 1)] = False
    elif hidden == 2:
        seen = rng.random(seen.shape) < 0.3
        seen[..., keys // 2] = True
    elif hidden == 3:  # a causal mask, of a cache that is not full
        seen = np.arange(keys) <= rng.integers(keys) + np.arange(rows)[:, None, None]
        seen = np.broadcast_to(seen, (rows, heads, keys))
    args = q, k, v, seen
    if keys < 4:
        assert split(f, args, workers)[1] is None
        return
    got, want = both(f, args, workers)
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11 * np.abs(want).max())


@pytest.mark.parametrize("f", [plain, heads_last, keys_first, of_jax])
def test_rows_that_see_nothing_are_as_jax_has_them(f: Callable[..., Array]) -> None:
    q, k, v, seen = arguments(3, 4, 60, 1, 5)
    seen[1] = False
    args = q, k, v, seen
    got, want = both(f, args, 3)
    of_jax_itself = np.asarray(jax.jit(f)(*args))
    assert np.isnan(of_jax_itself[1]).all() == np.isnan(want[1]).all() == (f is not of_jax)
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


def test_weights_may_be_turned_in_front_of_their_product() -> None:
    def turned(q: Array, k: Array, v: Array, seen: Array) -> Array:
        weights = jax.nn.softmax(q[:, 0] @ k[:, 0].T, axis=-1)
        return v[:, 0].T @ jnp.transpose(weights)

    got, want = both(turned, arguments(8, 2, 60, 1, 5), 3)
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_what_is_no_number_stays_where_jax_has_it(operand: int, bad: float) -> None:
    q, k, v, seen = arguments(4, 3, 48, 1, 5)
    broken = [q, k, v]
    broken[operand][1, 0, 2] = bad
    seen[0, :, :20] = False
    got, want = both(heads_last, (*broken, seen), 4)
    assert not np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_types_are_merged_in_float32(dtype: Any) -> None:
    args = arguments(5, 2, 64, 1, 5, dtype)
    captured, made = split(heads_last, args, 2)
    assert made is not None
    (out,) = made.graph.outputs
    sums = [op for op in made.graph.ops if op.kind == "reduce_sum"]
    assert all(made.graph.values[op.outputs[0]].dtype == "float32" for op in sums)
    assert made.graph.values[out].dtype == jnp.dtype(dtype).name
    want = evaluate_numpy(captured.graph, [np.asarray(a) for a in args], widen=True)[0]
    np.testing.assert_allclose(np.asarray(jax.jit(lambda *a: run(made, [], a))(*args)[0], np.float64), want, atol=2e-2)


def weights_too(q: Array, k: Array, v: Array, seen: Array) -> tuple[Array, Array]:
    weights = jax.nn.softmax(q[:, 0] @ k[:, 0].T)
    return weights @ v[:, 0], weights


def sorted_scores(q: Array, k: Array, v: Array, seen: Array) -> Array:
    return jnp.cumsum(jax.nn.softmax(q[:, 0] @ k[:, 0].T), -1) @ v[:, 0]


def only_a_softmax(q: Array, k: Array, v: Array, seen: Array) -> Array:
    return jax.nn.logsumexp(q[:, 0] @ k[:, 0].T, -1)


def roots_of_weights(q: Array, k: Array, v: Array, seen: Array) -> Array:
    """The factors that parts lose come back as factors of the sum, which those of a root are not."""
    return jnp.sqrt(jax.nn.softmax(q[:, 0] @ k[:, 0].T)) @ v[:, 0]


@pytest.mark.parametrize("f", [weights_too, sorted_scores, only_a_softmax, roots_of_weights])
def test_what_needs_all_of_the_dimension_stays(f: Callable[..., Any]) -> None:
    assert split(f, arguments(6, 2, 64, 1, 5), 2)[1] is None


@pytest.mark.parametrize(("rows", "keys", "heads", "workers"), [(9, 64, 1, 2), (1, 61, 1, 2), (1, 64, 2, 2), (1, 64, 1, 1)])
def test_where_parts_are_of_no_use(rows: int, keys: int, heads: int, workers: int) -> None:
    """Many rows, no equal parts, a head for each worker, one worker."""
    assert split(heads_last, arguments(7, rows, keys, heads, 5), workers)[1] is None

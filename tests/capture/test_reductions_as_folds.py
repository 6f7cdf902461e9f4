"""Reductions of few rows over a long dimension, whose elements become the rows of a stream.

Checked in float64: the same numbers in every layout, under masks and biases; rows of which nothing is seen, and rows that are not a
number, are what JAX makes of them; the sums become online; which functions are left as they are.
"""

from __future__ import annotations

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
from kitsune_jax.capture.rewrites import OF_NEW_ROWS, Rewrite, RewriteContext, apply_rewrites
from kitsune_jax.capture.rewrites import few_rows as module
from kitsune_jax.ops.capabilities import TargetCapabilities
from reference.graph import evaluate_numpy
from reference.standalone import run
from tests.capture.test_split_reductions import arguments, heads_last, keys_first, of_jax, plain, pooled, sorted_scores, weights_too

Array = Any


@pytest.fixture(autouse=True, scope="module")
def _short_dimensions() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LONG", 4)
        yield


def grouped(q: Array, k: Array, v: Array, seen: Array) -> Array:
    """Two queries share each head of keys, of a batch of two; scores are capped and biased by the distance."""
    q = jnp.stack([jnp.stack([q, -q], 2), jnp.stack([q * 0.5, q], 2)])
    k, v = (jnp.stack([x, x[::-1]]) for x in (k, v))
    scores = jnp.tanh(jnp.einsum("bqhgd,bkhd->bhgqk", q, k)) * 3 - 0.01 * jnp.arange(k.shape[1], dtype=q.dtype)
    scores = jnp.where(seen.swapaxes(0, 1)[None, :, None], scores, -jnp.inf)
    return jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores), v)


def no_query_axis(q: Array, k: Array, v: Array, seen: Array) -> Array:
    """A batch of queries, each with keys of its own and a padding mask for all heads."""
    k, v = (jnp.stack([x * n for n in (1, 2, 3)]) for x in (k, v))
    scores = jnp.einsum("bhd,bkhd->bhk", jnp.stack([q[0]] * 3), k)
    scores = jnp.where(seen[:1, :1] | (jnp.arange(k.shape[1]) < 2), scores, -1e9)
    return jnp.einsum("bhk,bkhd->bhd", jax.nn.softmax(scores), v)


def log_sum(q: Array, k: Array, v: Array, seen: Array) -> Array:
    scores = jnp.where(seen.swapaxes(0, 1), jnp.einsum("qhd,khd->hqk", q, k), -jnp.inf)
    return jax.nn.logsumexp(scores, -1)


def made(f: Callable[..., Any], args: tuple[Array, ...]) -> tuple[Captured, Captured | None]:
    """As it was captured, and with elements as rows, if it can be."""
    captured = capture(jax.make_jaxpr(f)(*args))
    found = apply_rewrites(captured, (Rewrite("rows", module.reductions_as_folds),))
    assert not found.failures, found.failures[0].traceback
    if found is captured:
        return captured, None
    found = apply_rewrites(found, OF_NEW_ROWS, RewriteContext(TargetCapabilities(sums_online=True)))
    assert not found.failures, found.failures[0].traceback
    return captured, found


def both(f: Callable[..., Array], args: tuple[Array, ...]) -> tuple[Array, Array]:
    """The result by rows and as it was, in float64."""
    captured, found = made(f, args)
    assert found is not None
    arrays = [np.asarray(a) for a in args]
    with np.errstate(all="ignore"):
        got, want = (evaluate_numpy(c.graph, arrays, widen=True)[0] for c in (found, captured))
    return got, want


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([plain, heads_last, keys_first, of_jax, pooled, grouped, no_query_axis, log_sum]),
    st.integers(1, 4),
    st.integers(4, 40),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 2**31),
)
def test_folds_give_the_same(f: Callable[..., Array], rows: int, keys: int, heads: int, hidden: int, seed: int) -> None:
    heads = 1 if f in (plain, pooled) else heads
    q, k, v, seen = arguments(seed, rows, keys, heads, 5)
    rng = np.random.default_rng(seed)
    if hidden == 1:
        seen = rng.random(seen.shape) < 0.3
        seen[..., keys // 2] = True
    elif hidden == 2:  # a causal mask, of a cache that is not full
        seen = np.arange(keys) <= rng.integers(keys) + np.arange(rows)[:, None, None]
        seen = np.broadcast_to(seen, (rows, heads, keys))
    got, want = both(f, (q, k, v, seen))
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10 * np.abs(want).max())


@pytest.mark.parametrize("f", [plain, heads_last, keys_first, of_jax, log_sum])
def test_rows_that_see_nothing_are_as_jax_has_them(f: Callable[..., Array]) -> None:
    q, k, v, seen = arguments(3, 4, 60, 1, 5)
    seen[1] = False
    got, want = both(f, (q, k, v, seen))
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_what_is_no_number_stays_where_jax_has_it(operand: int, bad: float) -> None:
    q, k, v, seen = arguments(4, 3, 48, 1, 5)
    broken = [q, k, v]
    broken[operand][1, 0, 2] = bad
    seen[0, :, :20] = False
    got, want = both(heads_last, (*broken, seen))
    assert not np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("f", [plain, heads_last, of_jax, grouped, no_query_axis])
def test_all_sums_are_online(f: Callable[..., Array], dtype: Any) -> None:
    """No product is left, and nobody waits for the largest score; numbers of 16 bits are added up in float32."""
    args = arguments(5, 2, 64, 1, 5, dtype)
    captured, found = made(f, args)
    assert found is not None
    kinds = [op.kind for op in found.graph.ops]
    assert kinds.count("scatter_exp_sum") == 2 and not {"dot_general", "scatter_max", "exp"} & set(kinds)
    sums = [op for op in found.graph.ops if op.kind == "scatter_exp_sum"]
    assert all(found.graph.values[v].dtype == "float32" for op in sums for v in (op.inputs[0], op.inputs[2], *op.outputs))
    assert found.graph.values[found.graph.outputs[0]].dtype == jnp.dtype(dtype).name
    want = evaluate_numpy(captured.graph, [np.asarray(a) for a in args], widen=True)[0]
    got = np.asarray(jax.jit(lambda *a: run(found, [], a))(*args)[0], np.float64)
    np.testing.assert_allclose(got, want, atol=(1e-5 if dtype == jnp.float32 else 4e-2) * np.abs(want).max())


def of_one_query(q: Array, k: Array, v: Array, seen: Array) -> Array:
    """Nothing that is computed of the scores may be read elsewhere."""
    scores = q[:, 0] @ k[:, 0].T
    return jnp.concatenate([jax.nn.softmax(scores), scores]).sum(0) @ v[:, 0]


@pytest.mark.parametrize("f", [weights_too, sorted_scores, of_one_query])
def test_what_needs_all_of_the_dimension_stays(f: Callable[..., Any]) -> None:
    assert made(f, arguments(6, 2, 64, 1, 5))[1] is None


@pytest.mark.parametrize(("rows", "keys"), [(9, 64), (1, 3)])
def test_many_rows_or_few_elements_stay(rows: int, keys: int) -> None:
    assert made(heads_last, arguments(7, rows, keys, 2, 5))[1] is None


def of_two_orders(q: Array, k: Array, v: Array, seen: Array) -> Array:
    """Scores of head h for query i beside those of head i for query h."""
    scores = jnp.einsum("qhd,khd->hqk", q, k)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores + scores.swapaxes(0, 1)), v)


def turned_behind(q: Array, k: Array, v: Array, seen: Array) -> Array:
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
    return jnp.einsum("hqk,khd->qhd", weights * weights.swapaxes(0, 1), v)


@pytest.mark.parametrize("f", [of_two_orders, turned_behind])
def test_scores_beside_others_of_another_order(f: Callable[..., Array]) -> None:
    args = arguments(10, 2, 40, 2, 5)
    if made(f, args)[1] is not None:
        got, want = both(f, args)
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


def test_two_reductions_of_the_same_scores() -> None:
    def f(q: Array, k: Array, v: Array, seen: Array) -> Array:
        scores = jnp.einsum("qhd,khd->hqk", q, k)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v) + scores.max(-1).T[..., None]

    got, want = both(f, arguments(11, 2, 40, 3, 5))
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


def test_rows_that_do_not_lie_together_stay() -> None:
    """A cache that has the keys last is read along the keys, as a product does."""
    q, k, v, seen = arguments(9, 2, 64, 2, 5)
    as_they_are = lambda q, k, v: jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k)), v)  # noqa: E731
    assert made(as_they_are, (q, k, v))[1] is not None
    turned = lambda q, k, v: jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.einsum("qhd,hdk->hqk", q, k)), v)  # noqa: E731
    assert made(turned, (q, k.transpose(1, 2, 0), v))[1] is None
    turned = lambda q, k, v: jnp.einsum("hqk,hdk->qhd", jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k)), v)  # noqa: E731
    assert made(turned, (q, k, v.transpose(1, 2, 0)))[1] is None


def test_a_softmax_of_what_lies_in_memory_stays() -> None:
    assert made(lambda q, k, v, seen: jax.nn.softmax(k[:, 0].T, -1), arguments(8, 1, 64, 1, 5))[1] is None

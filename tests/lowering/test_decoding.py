"""A query, or a few, of one head against many keys: parts of the keys are rows of their own, so that all workers read them.

Checked: that such a call has rows for all workers, and what stands behind it merges them; that it is right, by float64, in all
types and layouts and under masks; that it is as it was where the model prefers that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from tests.support.checks import in_float64

Array = Any
SIZE = 64


def plain(q: Array, k: Array, v: Array, position: Array) -> Array:
    """[queries, size] by [keys, size], without a mask."""
    return jax.nn.softmax(q[0, :, 0] @ k[0, :, 0].T * SIZE**-0.5) @ v[0, :, 0]


def by_heads(q: Array, k: Array, v: Array, position: Array) -> Array:
    scores = jnp.einsum("qhd,khd->hqk", q[0], k[0]) * SIZE**-0.5
    weights = jax.nn.softmax(jnp.where(jnp.arange(k.shape[1]) <= position, scores, -jnp.inf))
    return jnp.einsum("hqk,khd->qhd", weights, v[0])


def of_jax(q: Array, k: Array, v: Array, position: Array) -> Array:
    """Of several queries each sees one more key."""
    last = position - q.shape[1] + 1 + jnp.arange(q.shape[1])
    mask = jnp.arange(k.shape[1]) <= last[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask[None, None])


def arguments(queries: int, heads: int, keys: int, dtype: Any = jnp.float32) -> tuple[Array, ...]:
    shapes = (1, queries, heads, SIZE), (1, keys, 1, SIZE), (1, keys, 1, SIZE)
    rng = np.random.default_rng(queries + keys)
    return tuple(jax.device_put(np.asarray(rng.standard_normal(s), dtype)) for s in shapes)


CASES = [
    (plain, 1, 1, 8192),
    (plain, 3, 1, 8200),
    (by_heads, 1, 1, 8192),
    (by_heads, 2, 1, 9000),
    (of_jax, 1, 1, 16384),
    (of_jax, 4, 1, 8192),
    (of_jax, 1, 8, 8192),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("f", "queries", "heads", "keys"), CASES)
def test_all_workers_read_the_keys(f: Callable[..., Array], queries: int, heads: int, keys: int, dtype: Any) -> None:
    args = arguments(queries, heads, keys, dtype)
    report = kj.explain(kj.pipeline(f))(*args, np.int32(5000))
    first = max(report.regions, key=lambda r: r.bytes_in)
    assert first.replicas == 2 and first.rows % 2 == 0 and first.rows > 1, str(report)
    for position in (0, 5000, keys - 1):
        at = np.int32(max(position, queries - 1))
        got = np.asarray(jax.jit(kj.pipeline(f, strict=True))(*args, at), np.float64)
        want = in_float64(f, *args, at, by_xla=True)
        tolerance = 2e-5 if dtype == jnp.float32 else 3e-2
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


def test_float16() -> None:
    args = arguments(1, 1, 8192, jnp.float16)
    got = np.asarray(jax.jit(kj.pipeline(by_heads, strict=True))(*args, np.int32(6000)), np.float64)
    want = in_float64(by_heads, *args, np.int32(6000))
    np.testing.assert_allclose(got, want, atol=1e-2 * np.abs(want).max())


def test_a_head_for_each_worker_stays_whole() -> None:
    q, k, v = arguments(1, 2, 8192)
    report = kj.explain(kj.pipeline(by_heads))(q, jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2), np.int32(5000))
    assert [r.rows for r in report.regions] == [2], str(report)

"""One token, or a few, against a cache of keys and values: products of few rows stream over what they contract.

Comes in: the layer of ``examples/llama.py``. Checked: that nearly all of it is chosen and becomes two calls, around the updates of
the caches, which stay XLA's; that it is right, by float64; heads that share keys in all ways; caches in bfloat16; that a cache
which is given away stays where it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from benchmarks.graphs.apps import example
from tests.support.checks import count, in_float64

llama = example("llama")


def sizes_of(width: int, heads: int, kv_heads: int, length: int) -> Any:
    return dataclasses.replace(
        llama.SMALL, layers=1, width=width, heads=heads, kv_heads=kv_heads, head=64, hidden=3 * width, batch=1, context=length
    )


def token(sizes: Any) -> Any:
    def f(params: Any, x: Any, cache: Any, position: Any) -> Any:
        return llama.layer(params, x, position + jnp.arange(x.shape[1]), sizes, cache)

    return f


def arguments(sizes: Any, batch: int = 1, tokens: int = 1, dtype: Any = jnp.float32) -> Any:
    params = llama.layer_params(jax.random.key(0), sizes)
    keys = jax.random.split(jax.random.key(1), 3)
    shape = (batch, sizes.context, sizes.kv_heads, sizes.head)
    cache = tuple(jax.random.normal(k, shape) for k in keys[:2])
    x = jax.random.normal(keys[2], (batch, tokens, sizes.width))
    return jax.tree.map(lambda a: a.astype(dtype), (params, x, cache))


def check(f: Any, *args: Any, tolerance: float) -> Any:
    pipelined = kj.pipeline(f, strict=True)
    for position in (0, 17, args[2][0].shape[1] - args[1].shape[1]):
        at = np.int32(position)
        got, want = jax.jit(pipelined)(*args, at), in_float64(f, *args, at, by_xla=True)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(np.asarray(g, np.float64), w, rtol=tolerance, atol=tolerance * np.abs(w).max())
    return kj.explain(f)(*args, np.int32(0))


@pytest.mark.parametrize("kv_heads", [1, pytest.param(2, marks=pytest.mark.slow), 8])
def test_a_token_of_a_layer_is_pipelined(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = sizes_of(512, 8, kv_heads, 700)
    report = check(token(sizes), *arguments(sizes), tolerance=2e-5)
    assert report.ops_pipelined >= 0.95 * report.ops_total, str(report)
    assert len(report.regions) == 2, str(report)


@pytest.mark.parametrize("tokens", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_few_tokens(tokens: int) -> None:
    sizes = sizes_of(256, 4, 2, 333)
    check(token(sizes), *arguments(sizes, tokens=tokens), tolerance=2e-5)


def test_a_batch_of_sequences() -> None:
    sizes = sizes_of(256, 4, 2, 130)
    check(token(sizes), *arguments(sizes, batch=3), tolerance=2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
def test_narrow_caches(dtype: Any) -> None:
    sizes = sizes_of(512, 8, 2, 515)
    check(token(sizes), *arguments(sizes, dtype=dtype), tolerance=3e-2)


def test_a_cache_that_is_given_away_is_not_copied() -> None:
    sizes = sizes_of(512, 8, 2, 2048)
    args = (*arguments(sizes), np.int32(7))
    compiled = jax.jit(kj.pipeline(token(sizes), strict=True), donate_argnums=2).lower(*args).compile()
    assert count(compiled.as_text()) == 2
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line and "2048" in line]
    assert not copies, copies


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-2), (jnp.float16, 1e-3)])
@pytest.mark.parametrize("rows", [1, 3, 4, 5])
def test_products_of_few_rows(rows: int, dtype: Any, tolerance: float) -> None:
    """Sums of rows of a weight, at sizes that no vector and no group of rows divides."""
    rng = np.random.default_rng(rows)
    for k, n in ((97, 131), (300, 1)):
        x, w = (jax.device_put(np.asarray(rng.standard_normal(shape), dtype)) for shape in ((rows, k), (k, n)))
        got = jax.jit(kj.pipeline(lambda x, w: (jax.nn.relu(x) @ w) * 2, force=True, strict=True))(x, w)
        want = np.maximum(np.asarray(x, np.float64), 0) @ np.asarray(w, np.float64) * 2
        size = np.maximum(np.asarray(x, np.float64), 0) @ np.abs(np.asarray(w, np.float64)) * 2  # of what is added up
        assert np.all(np.abs(np.asarray(got, np.float64) - want) <= tolerance * size)

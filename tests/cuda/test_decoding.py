"""One token, or a few, against a cache of keys on a GPU, in the emulator: the keys are the rows of a stream that all CTAs share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.ops.reduce import ONLINE
from kitsune_jax.planning.plan import GpuPlan
from kitsune_jax.targets.cuda.planning.arrangements import Arranged, GpuRegion
from tests.support.checks import in_float64

Array = Any
RNG = np.random.default_rng(11)


def token(q: Array, k: Array, v: Array, last: Array) -> Array:
    """q [batch, 1, heads, size]; keys behind ``last`` are hidden."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.arange(k.shape[1]) <= last, scores, -jnp.inf)
    weights = jax.nn.softmax(scores.astype(jnp.promote_types(q.dtype, jnp.float32)), -1).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def of_jax(q: Array, k: Array, v: Array, last: Array) -> Array:
    lengths = jnp.full(len(q), last + 1, jnp.int32)
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)


def one_head(q: Array, k: Array, v: Array, last: Array) -> Array:
    """[1, size] by [keys, size]; a head's scores are capped."""
    scores = 4 * jnp.tanh(q[0, :, 0] @ k[0, :, 0].T)
    return jax.nn.softmax(jnp.where(jnp.arange(k.shape[1]) <= last, scores, -jnp.inf)) @ v[0, :, 0]


def arguments(batch: int, keys: int, heads: int, size: int, dtype: Any = jnp.float32) -> tuple[Array, ...]:
    shapes = (batch, 1, heads, size), (batch, keys, heads, size), (batch, keys, heads, size)
    return tuple(jax.device_put(np.asarray(RNG.standard_normal(s), dtype)) for s in shapes)


CASES = [(token, 2, 1103, 3, 16), (of_jax, 3, 1024, 2, 24), (one_head, 1, 2053, 1, 33)]
FAST = {(token, jnp.bfloat16), (of_jax, jnp.float16), (one_head, jnp.float32)}
EVERY = [
    pytest.param(*case, dtype, marks=[] if (case[0], dtype) in FAST else pytest.mark.slow)
    for case in CASES
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
]


@pytest.mark.parametrize(("f", "batch", "keys", "heads", "size", "dtype"), EVERY)
def test_the_keys_are_rows_that_all_share(
    f: Callable[..., Array], batch: int, keys: int, heads: int, size: int, dtype: Any, quick_folds: None
) -> None:
    args = *arguments(batch, keys, heads, size, dtype), np.int32(keys // 2)
    decode = kj.pipeline(f, target="emulator", strict=True)
    report = kj.explain(decode)(*args)
    (region,) = report.regions
    assert region.rows == batch * heads * keys and region.replicas > batch * heads, str(report)
    assert "online dot_general" in {op for stage in region.stages for op in stage.ops}
    got = np.asarray(jax.jit(decode)(*args), np.float64)
    want = in_float64(f, *args)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


def test_a_token_that_sees_nothing_is_as_jax_has_it(quick_folds: None) -> None:
    args = *arguments(1, 1024, 2, 16), np.int32(-1)
    assert np.isnan(np.asarray(jax.jit(token)(*args))).all()
    assert np.isnan(np.asarray(jax.jit(kj.pipeline(token, target="emulator", strict=True))(*args))).all()


@pytest.fixture
def quick_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model leaves a token to XLA, as the last lane folds what all lanes have, row by row. Here that takes no time, and the
    rest of such a kernel a fourth."""
    plan = GpuRegion.plan

    def quick(self: GpuRegion, arranged: Arranged) -> GpuPlan:
        made, call = plan(self, arranged), self.machine.call_seconds
        folds = any(self.cost.graph.ops[i].kind in ONLINE for i in self.cost.region.sinks)
        return dataclasses.replace(made, seconds=call + (made.seconds - call) / 4) if folds else made

    monkeypatch.setattr(GpuRegion, "_fold_seconds", lambda self, lanes: 0.0)
    monkeypatch.setattr(GpuRegion, "plan", quick)


SIZES = pytest.mark.parametrize(("batch", "keys", "heads", "size"), [(1, 4096, 8, 64), (1, 32768, 1, 128), (32, 4096, 8, 128)])


def cached(batch: int, keys: int, heads: int, size: int) -> tuple[Any, ...]:
    cache = jax.ShapeDtypeStruct((batch, keys, heads, size), jnp.bfloat16)
    return jax.ShapeDtypeStruct((batch, 1, heads, size), jnp.bfloat16), cache, cache, np.int32(keys - 1)


@SIZES
def test_keys_and_values_are_read_once(batch: int, keys: int, heads: int, size: int, quick_folds: None) -> None:
    (region,) = kj.explain(token, platform="cuda", device="h200")(*cached(batch, keys, heads, size)).regions
    assert region.rows == batch * heads * keys and region.replicas == 132
    read = 2 * batch * keys * heads * size * 2
    assert read <= region.bytes_in < 1.01 * read  # and nothing of their size beside


@SIZES
def test_the_model_takes_it_on_an_h200_where_it_is_faster(batch: int, keys: int, heads: int, size: int) -> None:
    for region in kj.explain(token, platform="cuda", device="h200")(*cached(batch, keys, heads, size)).regions:
        assert region.seconds < region.baseline_seconds


def test_many_queries_are_no_rows_of_keys() -> None:
    """A product of 64 queries is worth a tensor core: attention block by block, as before."""
    q, cache = (jax.ShapeDtypeStruct((1, n, 8, 64), jnp.bfloat16) for n in (2048, 4096))
    report = kj.explain(of_jax, platform="cuda", device="h200")(q, cache, cache, np.int32(4000))
    assert [r.rows for r in report.regions] == [8 * 2048], str(report)

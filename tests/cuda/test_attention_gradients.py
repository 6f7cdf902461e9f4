"""The gradient of attention as users write it, from a function to kernels in the emulator, against float64.

One kernel has queries for rows and works off the keys in blocks; one has keys for rows and works off the queries. Both make the
scores again, so neither adds to sums that another tile adds to.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.targets.cuda import runtime
from tests.support.cuda_run import kernel_cache

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

Array = Any
TOLERANCE = {"float32": 4e-3, "bfloat16": 2e-2, "float16": 4e-3}  # of the largest number: products round to tf32 or 16 bits


@dataclasses.dataclass(frozen=True)
class Case:
    """``mask``: of [queries, keys], True where a query sees a key."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    queries: int = 300
    keys: int = 300
    dim: int = 16
    mask: Callable[[Array, Array], Array] | None = None
    residuals: str = "save"


def causal(q: Array, k: Array) -> Array:
    return q >= k


def window(q: Array, k: Array) -> Array:
    return (q >= k) & (q - k < 90)


CASES = {
    "plain": Case(queries=261, keys=389),
    "causal": Case(mask=causal, dim=24),
    "cross": Case(mask=causal, queries=270, keys=421),
    "more queries than keys": Case(mask=causal, queries=421, keys=270),
    "window": Case(mask=window, batch=2, heads=1, kv_heads=1, queries=400, keys=400),
    "groups of heads": Case(mask=causal, heads=4, kv_heads=2, batch=2),
    "one head of keys": Case(heads=3, kv_heads=1, batch=2),
    "nothing saved": Case(mask=causal, residuals="recompute"),
    "wide": Case(mask=causal, dim=64, queries=540, keys=540),
}


def attention(case: Case, q: Array, k: Array, v: Array) -> Array:
    seen = None if case.mask is None else case.mask(jnp.arange(case.queries)[:, None], jnp.arange(case.keys))[None, None]
    return jax.nn.dot_product_attention(q, k, v, mask=seen)


def reference(case: Case, q: Array, k: Array, v: Array, do: Array) -> list[np.ndarray]:
    """dq, dk, dv of [batch, tokens, heads, size] in float64, by hand."""
    q, k, v, do = (np.asarray(a, np.float64) for a in (q, k, v, do))
    groups = case.heads // case.kv_heads
    k, v = (np.repeat(a, groups, 2) for a in (k, v))
    s = np.einsum("bthd,bjhd->bhtj", q, k) / math.sqrt(case.dim)
    if case.mask is not None:
        s = np.where(case.mask(np.arange(case.queries)[:, None], np.arange(case.keys)), s, -math.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bthd,bjhd->bhtj", do, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(case.dim)
    sums = np.einsum("bhtj,bthd->bjhd", ds, q), np.einsum("bhtj,bthd->bjhd", p, do)
    grouped = (a.reshape(case.batch, case.keys, case.kv_heads, groups, case.dim).sum(3) for a in sums)
    return [np.einsum("bhtj,bjhd->bthd", ds, k), *grouped]


def drawn(case: Case, dtype: str, seed: int = 0) -> list[Array]:
    """q, k, v and the result's cotangent."""
    rng = np.random.default_rng(seed)
    shapes = [(case.queries, case.heads), (case.keys, case.kv_heads), (case.keys, case.kv_heads), (case.queries, case.heads)]
    return [jnp.asarray(rng.standard_normal((case.batch, *s, case.dim)), dtype) for s in shapes]


def gradients(case: Case, **options: Any) -> Callable[..., Any]:
    options = {"target": "emulator", "force": True, "strict": True, "residuals": case.residuals, **options}
    pipelined = kj.pipeline(lambda q, k, v: attention(case, q, k, v), **options)
    return lambda q, k, v, do: jax.vjp(pipelined, q, k, v)[1](do)


def run(case: Case, args: list[Array], seed: int = 1) -> tuple[list[np.ndarray], int]:
    """The gradients, and the number of kernels that made them."""
    compiled = jax.jit(gradients(case)).lower(*args).compile()
    runtime.set_emulator_seed(seed)
    before = runtime.calls()
    got = jax.block_until_ready(compiled(*args))
    return [np.asarray(g) for g in got], runtime.calls() - before


def errors(got: list[np.ndarray], wanted: list[np.ndarray]) -> list[float]:
    return [float(np.abs(g.astype(np.float64) - w).max() / np.abs(w).max()) for g, w in zip(got, wanted, strict=True)]


FAST = {("plain", "float16"), ("causal", "bfloat16"), ("groups of heads", "float32")}
EVERY = [
    pytest.param(name, dtype, marks=[] if (name, dtype) in FAST else pytest.mark.slow) for name in CASES for dtype in TOLERANCE
]


@pytest.mark.parametrize("name, dtype", EVERY)
def test_the_gradient_is_kernels(name: str, dtype: str) -> None:
    """One for the result (where it is not made again), one by queries, one by keys and values."""
    case = CASES[name]
    args = drawn(case, dtype)
    got, kernels = run(case, args)
    assert kernels == (2 if case.residuals == "recompute" else 3)
    for g, w, error in zip(got, reference(case, *args), errors(got, reference(case, *args)), strict=True):
        assert g.shape == w.shape and error < TOLERANCE[dtype]

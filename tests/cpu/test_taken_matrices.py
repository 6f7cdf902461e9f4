"""Matrices taken of a table, one or several for each token, as its experts' weights: products with them, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.targets.cpu import bytecode as bc
from tests.support.checks import in_float64
from tests.support.graphs import graph_of

pytest.importorskip("kitsune_jax._cpu", reason="the extension is not built: pip install -e .")
pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")

TOLERANCE = {"float32": 1e-5, "bfloat16": 4e-2, "float16": 6e-3}
# Subscripts of the einsum, the dimensions of x and those that the table has behind its experts.
FORMS = {
    "one x for all experts": ("td,tkdf->tkf", "td", "df"),
    "an x for each expert": ("tkf,tkfd->tkd", "tkf", "fd"),
    "what is summed up lies together": ("tkf,tkdf->tkd", "tkf", "df"),
    "summed over the experts": ("tkf,tkdf->td", "tkf", "df"),
    "several rows": ("tmd,tkdf->tkmf", "tmd", "df"),
    "several heads": ("thd,tkhdf->tkhf", "thd", "hdf"),
}
SIZES = {  # tokens, experts of a token, rows of the table, the rest
    "one token": {"t": 1, "k": 2, "e": 3, "d": 16, "f": 24, "m": 3, "h": 2},
    "primes": {"t": 37, "k": 3, "e": 5, "d": 17, "f": 23, "m": 11, "h": 3},
    "one expert": {"t": 20, "k": 1, "e": 4, "d": 40, "f": 64, "m": 2, "h": 1},
    "vectors": {"t": 19, "k": 2, "e": 4, "d": 33, "f": 1, "m": 1, "h": 2},
    "small": {"t": 70, "k": 2, "e": 7, "d": 3, "f": 4, "m": 2, "h": 2},
}


def arguments(form: str, size: str, dtype: str) -> tuple[Any, ...]:
    _, x, w = FORMS[form]
    n, rng = SIZES[size], np.random.default_rng(len(form) + len(size))
    shapes = [n[c] for c in x], [n["e"], *(n[c] for c in w)]
    x_, w_ = (jax.device_put(np.asarray(rng.standard_normal(s), dtype)) for s in shapes)
    return x_, w_, jax.device_put(np.asarray(rng.integers(-1, n["e"] + 1, (n["t"], n["k"])), jnp.int32))


def product(form: str, mode: str) -> Callable[..., Any]:
    return lambda x, w, ids: jnp.einsum(FORMS[form][0], x, w.at[ids].get(mode=mode, fill_value=0.5))


def check(f: Callable[..., Any], args: tuple[Any, ...], dtype: str) -> None:
    got = jax.tree.leaves(jax.jit(kj.pipeline(f, force=True))(*args))
    want = jax.tree.leaves(
        in_float64(f, *(np.asarray(a, np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in args))
    )
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        np.testing.assert_allclose(np.asarray(g, np.float64), w, atol=TOLERANCE[dtype] * max(1.0, np.abs(w).max(initial=0)), rtol=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_product(form: str, size: str) -> None:
    for dtype, mode in (("float32", "clip"), ("bfloat16", "fill"), ("float16", "clip")):
        check(product(form, mode), arguments(form, size, dtype), dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", ["one token", "primes", "vectors"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients(form: str, size: str) -> None:
    f = product(form, "clip")
    for dtype in ("float32", "bfloat16"):
        check(jax.grad(lambda x, w, i: jnp.sum(jnp.sin(f(x, w, i).astype("float32"))), (0, 1)), arguments(form, size, dtype), dtype)


@pytest.mark.parametrize("form", ["one x for all experts", "an x for each expert", "what is summed up lies together"])
def test_matrices_are_multiplied_as_they_lie(form: str, programs) -> None:
    """Element by element, the transposition of 64 x 64 weights for 128 pairs of a token and an expert took 1 ms of 1.2."""
    args = arguments(form, "primes", "float32")
    f = product(form, "clip")
    (region,) = kj.explain(f, force=True, platform="cpu", device="amx-2")(*args).regions
    assert region.rows in (37, 3 * 37)
    jax.jit(kj.pipeline(f, force=True)).lower(*args)
    code = [i for p in programs for s in p.stages for i in s.body]
    assert sum(isinstance(i, bc.Dot) for i in code) == sum(isinstance(i, bc.Gather) for i in code) == 1
    # What else there is makes indices, not matrices.
    assert all(np.prod(i.extents, dtype=int) < 17 * 23 for i in code if isinstance(i, bc.CpuVector))


def test_a_gradient_by_a_taken_matrix_is_made_in_its_order() -> None:
    args = arguments("one x for all experts", "primes", "float32")
    f = product("one x for all experts", "clip")
    graph = graph_of(jax.grad(lambda x, w, i: f(x, w, i).sum(), 1), *args)
    largest = max(v.size for v in graph.values)
    made = [op for op in graph.ops if any(graph.values[v].size == largest for v in op.outputs)]
    assert sorted(op.kind for op in made) == ["broadcast_in_dim", "broadcast_in_dim", "mul"]
    assert [graph.values[v].shape for v in made[-1].outputs] == [(37, 3, 17, 23)]

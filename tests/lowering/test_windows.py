"""Slices that begin where a number says, and updates there: in the table, in rows of a stream, and in the carries of loops.

They compute nothing, so results are compared bit for bit: with JAX where the table is asked, with ``jax.jit`` where a pipeline is.
Starts may lie outside of the array; JAX moves them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kitsune_jax as kj
from kitsune_jax.ops.graph import Value
from kitsune_jax.ops.shape import WINDOWS
from kitsune_jax.ops.spec import DTYPES, np_dtype
from reference.operators import MEANINGS
from tests.support.checks import TARGET, in_parts

RNG = np.random.default_rng(3)
STARTS = (-(2**31), -1, 0, 2, 5, 2**31 - 1)


@in_parts
@hypothesis.given(st.data(), st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=30, deadline=None)
def test_the_table_agrees_with_jax(part: int, data: st.DataObject, seed: int) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = tuple(sorted(data.draw(st.sets(st.sampled_from(range(len(shape))), min_size=1))))
    sizes = tuple(data.draw(st.integers(0, shape[d])) for d in dims)
    dtype, index = data.draw(st.sampled_from(DTYPES[:-1])), data.draw(st.sampled_from(("int32", "uint8", "int8")))
    rng = np.random.default_rng(seed)
    x, update = (
        rng.integers(0, 2 if dtype == "bool" else 100, s).astype(np_dtype(dtype)) for s in (shape, window(shape, dims, sizes))
    )
    info = np.iinfo(index)
    starts = [np.asarray(data.draw(st.integers(max(info.min, -6), min(info.max, 6))), index) for _ in dims]
    for kind, arrays, params in (
        ("dynamic_slice", (x,), {"dims": dims, "sizes": sizes}),
        ("dynamic_update_slice", (x, update), {"dims": dims}),
    ):
        got = MEANINGS[kind].numpy(params, *arrays, *starts, out_dtype=dtype)
        want = WINDOWS[kind].evaluate(params, *map(jnp.asarray, (*arrays, *starts)), out=Value(got.shape, dtype))
        assert got.dtype == np_dtype(dtype)
        np.testing.assert_array_equal(got, np.asarray(want))


def window(shape: tuple[int, ...], dims: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    of = dict(zip(dims, sizes, strict=True))
    return tuple(of.get(d, n) for d, n in enumerate(shape))


def normal(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jax.device_put(np.asarray(RNG.standard_normal(shape), dtype))


def check(f: Callable[..., Any], *args: Any, covered: bool = True) -> None:
    got, want = (jax.jit(g)(*args) for g in (kj.pipeline(f, force=True, strict=True), f))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    report = kj.explain(f, force=True)(*args)
    assert any(r.op.startswith("dynamic") for r in report.rejected) != covered, str(report)


def sliced(x: Any, start: Any) -> Any:
    return lax.dynamic_slice_in_dim(x + x, start, 3, 1) + 1


def updated(x: Any, y: Any, start: Any) -> Any:
    return lax.dynamic_update_slice_in_dim(x + x, y * 2, start, 1) + 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, np.int32])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_windows_inside_rows(rows: int, dtype: Any) -> None:
    x, y = normal(rows, 7, 4, dtype=dtype), normal(rows, 3, 4, dtype=dtype)
    for start in STARTS:
        check(sliced, x, np.int32(start))
        check(updated, x, y, np.int32(start))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, np.int32])
def test_an_update_of_one_element(dtype: Any) -> None:
    x, y = normal(37, 7, 4, dtype=dtype), normal(37, 1, 4, dtype=dtype)
    for start in STARTS:
        check(updated, x, y, np.int32(start))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_bits_around_an_update_stay_as_they_are(dtype: Any) -> None:
    """A cache of 16-bit numbers, of which each step writes two rows. NaN, subnormal numbers and zeros of either sign in the others
    come back bit for bit, compared with NumPy: XLA makes zeros of some of the subnormal ones."""
    bits = np.random.default_rng(2).integers(0, 2**16, (5, 11, 6)).astype(np.uint16)
    bits[np.isnan(bits.view(dtype))] = np.asarray(np.nan, dtype).view(np.uint16)
    bits[:, 0], bits[:, 2] = 1, 0x8000
    cache, rows = jnp.asarray(bits.view(dtype)), normal(4, 5, 6, dtype=dtype)

    def f(cache: Any, rows: Any) -> Any:
        def step(cache: Any, s: Any) -> Any:
            i, row = s
            cache = lax.dynamic_update_slice_in_dim(cache, row[:, None], 3 + 2 * i, 1)
            return jnp.where(jnp.arange(11)[:, None] == i + 6, jnp.asarray(1.5, dtype), cache), None

        return lax.scan(step, cache, (jnp.arange(4), rows))[0]

    want = bits.copy()
    for i in range(4):
        want[:, 3 + 2 * i] = np.asarray(rows[i]).view(np.uint16)
        want[:, i + 6] = np.asarray(1.5, dtype).view(np.uint16)
    got = jax.jit(kj.pipeline(f, force=True, strict=True))(cache, rows)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint16), want)


def test_windows_along_two_dimensions() -> None:
    x, y = normal(50, 5, 6), normal(50, 2, 1)

    def f(x: Any, y: Any, i: Any, j: Any) -> Any:
        part = lax.dynamic_slice(x * 2, (0, i, j), (50, 3, 4))
        return part * 3, lax.dynamic_update_slice(x * 2, y + 1, (0, i, j))

    for i, j in ((0, 0), (-3, 2), (4, 5), (9, -1)):
        check(f, x, y, np.int32(i), np.int32(j))


def test_an_update_of_all_rows_alike() -> None:
    check(
        lambda x, y, i: lax.dynamic_update_slice_in_dim(x * 2, jnp.broadcast_to(y, (40, 2)), i, 1) + 1, normal(40, 9), normal(2), 4
    )


def test_one_element_of_each_row_and_indices_from_the_end() -> None:
    x = normal(33, 8)
    for i in (-8, -1, 0, 7):
        check(lambda x, i: (x + 1)[:, i] * 2, x, np.int32(i))
        check(lambda x, i: lax.dynamic_index_in_dim(x + 1, i, 1) * 2, x, np.int32(i))


@pytest.mark.parametrize("length", [1, 5])
def test_a_loop_that_carries_what_it_updates(length: int) -> None:
    """A history of each environment, written step by step, and read where a step says."""
    x = normal(130, 4)

    def f(x: Any) -> Any:
        def step(i: Any, carry: Any) -> Any:
            state, history = carry
            seen = lax.dynamic_index_in_dim(history, i // 2, 1, keepdims=False)
            state = state * 0.5 + seen
            return state, lax.dynamic_update_index_in_dim(history, state, i, 1)

        return lax.fori_loop(0, length, step, (x, jnp.ones((130, length, 4))))

    check(f, x)


def test_an_update_across_the_rows_is_left_to_xla_and_stays_in_place() -> None:
    """A cache of keys that is given away is written where it lies, though calls of ours read it."""
    cache, x, w = normal(4096, 2, 64), normal(512, 128), normal(128, 128)

    def f(cache: Any, x: Any, w: Any, i: Any) -> Any:
        new = jax.nn.relu(jax.nn.relu(x @ w) @ w)
        cache = lax.dynamic_update_slice_in_dim(cache, new[:1].reshape(1, 2, 64), i, 0)
        return cache, jax.nn.relu(jnp.sum(cache * new[0].reshape(2, 64), -1) * 2)

    compiled = jax.jit(kj.pipeline(f, force=True, strict=True), donate_argnums=0).lower(cache, x, w, 5).compile()
    assert TARGET in compiled.as_text()
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line and "4096" in line]
    assert not copies, copies
    want = jax.jit(f)(cache, x, w, 5)
    got = compiled(jnp.array(cache), x, w, 5)
    np.testing.assert_array_equal(np.asarray(got[0][6:]), np.asarray(want[0][6:]))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-2)

"""Attention as users write it, on the CPU target: layouts, masks, heads and dtypes, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kitsune_jax as kj
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.program.ir import walk
from tests.support.blocks import draw, planned, programs
from tests.support.graphs import graph_of

__all__ = ["planned"]  # a fixture

pytest.importorskip("kitsune_jax._cpu", reason="the extension is not built: pip install -e .")

Array = Any


TOLERANCE = {"float32": 5e-6, "bfloat16": 3e-2, "float16": 4e-3}


def reference(
    q: Array, k: Array, v: Array, mask: Array = None, bias: Array = None, cap: float = 0.0, fill: float = -math.inf
) -> Array:
    """Of [batch, tokens, heads, size], in float64. ``mask``, ``bias``: [batch, heads, queries, keys] after broadcasting."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, groups, 2) for x in (k, v))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    s = cap * np.tanh(s / cap) if cap else s
    s = s if bias is None else s + np.asarray(bias, np.float64)
    s = s if mask is None else np.where(mask, s, fill)
    with np.errstate(all="ignore"):
        e = np.exp(s - s.max(-1, keepdims=True))
        return np.einsum("bhqk,bkhd->bqhd", e / e.sum(-1, keepdims=True), v)


def check(function: Callable[..., Array], wanted: Array, *args: Array, force: bool = True) -> None:
    got = np.asarray(jax.jit(kj.pipeline(function, strict=True, force=force))(*args), np.float64)
    assert got.shape == wanted.shape
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted))
    finite = np.isfinite(wanted)
    scale = np.abs(wanted[finite]).max(initial=1e-30)
    error = np.abs(got[finite] - wanted[finite]).max(initial=0.0) / scale
    assert error < TOLERANCE[str(args[0].dtype)], error


def causal(queries: int, keys: int) -> Array:
    return np.arange(queries)[:, None] + keys - queries >= np.arange(keys)


def swapped(q: Array, k: Array, v: Array) -> Array:
    """Heads before tokens, and matmul."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    s = jnp.matmul(q, k.swapaxes(2, 3)) / math.sqrt(q.shape[-1])
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True) @ v).swapaxes(1, 2)


def straight(q: Array, k: Array, v: Array) -> Array:
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)


def scaled_before(q: Array, k: Array, v: Array) -> Array:
    s = jnp.einsum("bqhd,bkhd->bhkq", q * q.shape[-1] ** -0.5, k)  # the keys before the queries
    return jnp.einsum("bhkq,bkhd->bqhd", jax.nn.softmax(s, axis=2), v)


def divided_after(q: Array, k: Array, v: Array) -> Array:
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    return jnp.einsum("bhqk,bkhd->bqhd", e, v) / e.sum(-1).swapaxes(1, 2)[..., None]


def one_by_one(q: Array, k: Array, v: Array) -> Array:
    def head(q, k, v):
        return jax.nn.softmax(q @ k.T / math.sqrt(q.shape[-1])) @ v

    return jax.vmap(jax.vmap(head, 1, 1))(q, k, v)


@pytest.mark.parametrize("form", [swapped, straight, scaled_before, divided_after, one_by_one, jax.nn.dot_product_attention])
def test_layouts(form: Callable[..., Array]) -> None:
    args = draw(0, (2, 67, 3, 16), (2, 301, 3, 16), (2, 301, 3, 16))
    check(form, reference(*args), *args)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", ["inf", "low", "added", "window", "padded", "library"])
def test_masks(form: str, dtype: str) -> None:
    args = draw(1, (2, 300, 2, 16), (2, 300, 2, 16), (2, 300, 2, 16), dtype=dtype)
    seen = causal(300, 300)
    lengths = np.asarray([300, 113])
    if form == "padded":
        seen = seen & (np.arange(300) < lengths[:, None])[:, None, None]
    if form == "window":
        seen = seen & (np.arange(300)[:, None] - np.arange(300) < 40)

    def function(q: Array, k: Array, v: Array) -> Array:
        if form == "library" and dtype != "float16":
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)
        n = q.shape[1]
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
        i, j = jnp.arange(n)[:, None], jnp.arange(n)[None]
        if form == "added":
            s = s + jnp.where(j <= i, 0.0, -jnp.inf)
        elif form == "window":
            s = jnp.where((j <= i) & (i - j < 40), s, -1e38)
        elif form == "padded":
            s = jnp.where((j <= i) & (j < jnp.asarray(lengths)[:, None, None, None]), s, jnp.finfo(s.dtype).min)
        else:
            s = jnp.where(jnp.tril(jnp.ones((n, n), bool)), s, -jnp.inf if form == "inf" else -1e38)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s).astype(v.dtype), v)

    check(function, reference(*args, mask=seen), *args)


@pytest.mark.parametrize("form", ["library", "indices"])
def test_hidden_blocks_are_never_looked_at(form: str) -> None:
    args = draw(2, *((1, 600, 2, 16),) * 3)

    def function(q, k, v):
        if form == "library":
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)
        s = jnp.where(jnp.arange(600)[:, None] >= jnp.arange(600)[None], jnp.einsum("bqhd,bkhd->bhqk", q, k), -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)

    bounds = [i.get("within") for part in programs(function, *args) for i in walk(part.stages[0].body) if i.kind == "loop"]
    assert [(b[2], b[3], b[4]) for b in bounds] == [(None, 0, "whole"), (None, 0, "edges")]


def test_bias_cap_and_slopes() -> None:
    args = draw(3, *((2, 290, 4, 16),) * 3)
    (bias,) = draw(4, (4, 290, 290))
    slopes = 2.0 ** -np.arange(1.0, 5)
    away = slopes[:, None, None] * (np.arange(290) - np.arange(290)[:, None])

    def function(q: Array, k: Array, v: Array, bias: Array) -> Array:
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        s = 5 * jnp.tanh(s / 5) + bias
        i = jnp.arange(s.shape[-1])
        s = s + jnp.asarray(slopes, s.dtype)[:, None, None] * (i - i[:, None])
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)

    check(function, reference(*args, bias=np.asarray(bias) + away, cap=5.0), *args, bias)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_grouped_heads(heads: int) -> None:
    args = draw(5, (2, 270, 4, 16), (2, 270, heads, 16), (2, 270, heads, 16))
    wanted = reference(*args, mask=causal(270, 270))
    check(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), wanted, *args)

    def repeated(q: Array, k: Array, v: Array) -> Array:
        k, v = (jnp.repeat(x, 4 // heads, 2) for x in (k, v))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    check(repeated, wanted, *args)


@pytest.mark.parametrize("queries", [1, 3])
def test_few_queries_against_a_cache(queries: int) -> None:
    args = draw(6, (2, queries, 4, 32), (2, 700, 2, 32), (2, 700, 2, 32))
    length = np.asarray([700, 333])
    seen = np.arange(700) < length[:, None, None, None]

    def function(q: Array, k: Array, v: Array, length: Array) -> Array:
        return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=length)

    check(function, reference(*args, mask=seen), *args, jnp.asarray(length, jnp.int32))


def test_dropped_weights() -> None:
    args = draw(7, *((2, 280, 2, 16),) * 3)
    keep = np.random.default_rng(8).random((2, 2, 280, 280)) < 0.7

    def function(q: Array, k: Array, v: Array, keep: Array) -> Array:
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1]))
        return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(keep, p / 0.7, 0.0), v)

    q, k, v = (np.asarray(a, np.float64) for a in args)
    s = np.einsum("bqhd,bkhd->bhqk", q, k) / 4
    e = np.exp(s - s.max(-1, keepdims=True))
    wanted = np.einsum("bhqk,bkhd->bqhd", np.where(keep, e / e.sum(-1, keepdims=True) / 0.7, 0), v)
    check(function, wanted, *args, jnp.asarray(keep))


@pytest.mark.parametrize("outside", [False, True])
def test_rows_that_see_nothing(outside: bool) -> None:
    """NaN, as JAX has them; 0 where a mask stands around the weights as well."""
    args = draw(9, *((1, 300, 2, 16),) * 3)
    seen = np.random.default_rng(10).random((1, 1, 300, 300)) < 0.3
    seen[:, :, 17:20] = False

    def function(q: Array, k: Array, v: Array, seen: Array) -> Array:
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf))
        return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(seen, p, 0.0) if outside else p, v)

    wanted = reference(*args, mask=seen)
    check(function, np.where(np.isnan(wanted), 0.0, wanted) if outside else wanted, *args, jnp.asarray(seen))


def test_nan_in_a_key_and_an_infinite_score() -> None:
    for value in (np.nan, np.inf):
        q, k, v = draw(11, *((1, 300, 2, 16),) * 3)
        k = k.at[0, 200, 1, 3].set(value)
        with np.errstate(all="ignore"):
            wanted = reference(q, k, v, mask=causal(300, 300))
        check(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), wanted, q, k, v)


def test_other_reductions_of_the_scores() -> None:
    q, k, _ = draw(12, *((2, 260, 2, 16),) * 3)
    s = np.einsum("bqhd,bkhd->bhqk", np.asarray(q, np.float64), np.asarray(k, np.float64)) / 4

    def scores(q, k):
        return jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4

    top = s.max(-1, keepdims=True)
    check(lambda q, k: jax.scipy.special.logsumexp(scores(q, k), -1), np.log(np.exp(s - top).sum(-1)) + top[..., 0], q, k)
    check(lambda q, k: jnp.tanh(scores(q, k)).mean(-1), np.tanh(s).mean(-1), q, k)
    check(lambda q, k: jnp.argmax(scores(q, k), -1).astype(jnp.float32), s.argmax(-1).astype(float), q, k)


@settings(max_examples=12, deadline=None)
@given(
    batch=st.integers(1, 2),
    queries=st.sampled_from([1, 2, 31, 97]),
    keys=st.sampled_from([257, 263, 389]),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    size=st.sampled_from([16, 20, 64]),
    form=st.sampled_from(["plain", "causal", "masked"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_shapes(batch: int, queries: int, keys: int, heads: tuple[int, int], size: int, form: str, dtype: str) -> None:
    q, k, v = draw(queries, (batch, queries, heads[0], size), *((batch, keys, heads[1], size),) * 2, dtype=dtype)
    seen = np.random.default_rng(keys).random((batch, 1, queries, keys)) < 0.8
    seen[..., 0] = True
    mask = {"plain": None, "causal": np.arange(queries)[:, None] >= np.arange(keys), "masked": seen}[form]

    def function(q: Array, k: Array, v: Array) -> Array:
        given_mask = jnp.asarray(seen) if form == "masked" else None
        return jax.nn.dot_product_attention(q, k, v, mask=given_mask, is_causal=form == "causal")

    check(function, reference(q, k, v, mask=mask), q, k, v)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_nearest_of_many_codes(dtype: str) -> None:
    """Vector quantisation: of equally near codes, which small integers have many of, the first one."""
    rng = np.random.default_rng(7)
    x, codes = (rng.integers(-1, 2, shape) for shape in ((101, 5), (611, 5)))

    def nearest(x: Array, codes: Array, squares: Array) -> Array:
        return jnp.argmin(squares - 2 * (x @ codes.T), axis=-1)

    squares = (codes**2).sum(-1)
    got = jax.jit(kj.pipeline(nearest, strict=True, force=True))(*(jnp.asarray(a, dtype) for a in (x, codes, squares)))
    np.testing.assert_array_equal(got, np.argmin(squares - 2 * x @ codes.T, axis=-1))


def test_blocks_belong_to_the_graph_whose_region_is_planned():
    """Regions are planned as graphs of their own, whose values have other numbers."""

    def two(q: Array, k: Array, v: Array, k2: Array) -> Array:
        first = jax.nn.dot_product_attention(q, k, v)
        return jax.nn.dot_product_attention(jnp.sort(first, -1), k2, k2)

    shapes = (1, 512, 2, 16), (1, 3000, 2, 16), (1, 3000, 2, 16), (1, 4000, 2, 16)
    args = draw(31, *shapes)
    graph = graph_of(two, *args)
    blocks = [r.plan.blocks for r in route(graph, "cpu", RouteOptions(force=True, device="avx512-2")).regions]
    extents = [graph.values[b[0]].shape[b[1]] for b in blocks if b is not None]
    assert sorted(extents) == [3000, 4000]
    first = np.sort(reference(*args[:3]), -1)
    check(two, reference(first, args[3], args[3]), *args)


def test_a_mask_of_rounded_indices_is_no_causal_one() -> None:
    """In bfloat16 the index 1030 is 1032, and so is visible to query 1029: no block is left out for such a comparison."""
    n = 2048
    args = draw(33, *((1, n, 1, 16),) * 3)
    rounded = np.asarray(jnp.arange(n).astype(jnp.bfloat16), np.float64)

    def attention(q: Array, k: Array, v: Array) -> Array:
        query, key = (jax.lax.broadcasted_iota(jnp.bfloat16, (n, n), d) for d in range(2))
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(key <= query, s, -jnp.inf)), v)

    check(attention, reference(*args, mask=rounded[None, :] <= rounded[:, None]), *args)


def test_keys_of_another_call_at_the_same_place_are_packed_again() -> None:
    """A worker keeps what it has packed of a head's keys and values, for as long as a call."""
    tokens, head = 700, 16
    room = np.zeros(3 * tokens * head + 32, np.float32)
    room = room[-(room.ctypes.data // 4) % 32 :][: 3 * tokens * head]  # at a multiple of 128 bytes: JAX does not copy it
    arrays = room.reshape(3, tokens, head)
    q, k, v = (jnp.from_dlpack(x, copy=False) for x in arrays)
    attend = jax.jit(kj.pipeline(lambda q, k, v: jax.nn.softmax(q @ k.T / 4) @ v, strict=True, force=True))
    for seed in range(3):
        room[:] = np.random.default_rng(seed).standard_normal(room.shape)
        wanted = reference(*arrays[:, None, :, None])[0, :, 0]
        np.testing.assert_allclose(np.asarray(attend(q, k, v), np.float64), wanted, atol=2e-6)

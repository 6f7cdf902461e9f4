"""The gradient of attention on the CPU target: keys' and values' sums for each batch, whole and in blocks, against float64."""

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
from kitsune_jax.program.build import build
from kitsune_jax.program.ir import walk
from reference.interpret import interpret
from tests.support.blocks import draw, planned, programs
from tests.support.graphs import graph_of

__all__ = ["planned"]  # a fixture

pytest.importorskip("kitsune_jax._cpu", reason="the extension is not built: pip install -e .")

Array = Any
TOLERANCE = {"float32": 5e-6, "bfloat16": 3e-2, "float16": 4e-3}


def masked(s: Array, causal: bool, fill: float = -math.inf, diagonal: int = 0) -> Array:
    return jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool), diagonal), s, fill) if causal else s


def backward(
    q: Array, k: Array, v: Array, do: Array, m: Array, total: Array, causal: bool, fill: float = -math.inf, diagonal: int = 0
) -> tuple[Array, ...]:
    """Of [batch, tokens, heads, size], and statistics [batch, heads, tokens]: as a backward pass that was handed them."""
    scale = q.shape[-1] ** -0.5
    s = masked(jnp.einsum("bthd,bjhd->bhtj", q, k, preferred_element_type=jnp.float32) * scale, causal, fill, diagonal)
    p = jnp.exp(s - m[..., None]) / total[..., None]
    dp = jnp.einsum("bthd,bjhd->bhtj", do, v, preferred_element_type=jnp.float32)
    ds = (p * (dp - (p * dp).sum(-1, keepdims=True)) * scale).astype(q.dtype)
    dq, dk = jnp.einsum("bhtj,bjhd->bthd", ds, k), jnp.einsum("bhtj,bthd->bjhd", ds, q)
    return dq, dk, jnp.einsum("bhtj,bthd->bjhd", p.astype(v.dtype), do)


def heads_first(q: Array, k: Array, v: Array, do: Array, m: Array, total: Array, causal: bool) -> tuple[Array, ...]:
    """The same of [batch, heads, tokens, size], written with matmul; keys in front of the size in the sums."""
    scale = q.shape[-1] ** -0.5
    p = jnp.exp(masked(q @ k.swapaxes(2, 3) * scale, causal) - m[..., None]) / total[..., None]
    dp = do @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    return ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ do


def attention(q: Array, k: Array, v: Array, causal: bool) -> Array:
    s = masked(jnp.einsum("bthd,bjhd->bhtj", q, k) * q.shape[-1] ** -0.5, causal)
    return jnp.einsum("bhtj,bjhd->bthd", jax.nn.softmax(s), v)


def reference(q: Array, k: Array, v: Array, do: Array, causal: bool) -> tuple[list[Array], Array, Array]:
    """dq, dk, dv of [batch, tokens, heads, size] in float64, with the largest score and the sum of each row."""
    q, k, v, do = (np.asarray(a, np.float64) for a in (q, k, v, do))
    groups, (batch, keys, heads, size) = q.shape[2] // k.shape[2], k.shape
    k, v = (np.repeat(a, groups, 2) for a in (k, v))
    s = np.einsum("bthd,bjhd->bhtj", q, k) / math.sqrt(size)
    s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -math.inf) if causal else s
    m = s.max(-1)
    p = np.exp(s - m[..., None])
    total = p.sum(-1)
    p /= total[..., None]
    dp = np.einsum("bthd,bjhd->bhtj", do, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / math.sqrt(size)
    sums = np.einsum("bhtj,bthd->bjhd", ds, q), np.einsum("bhtj,bthd->bjhd", p, do)
    dk, dv = (a.reshape(batch, keys, heads, groups, size).sum(3) for a in sums)
    return [np.einsum("bhtj,bjhd->bthd", ds, k), dk, dv], m, total


def check(function: Callable[..., Any], wanted: list[Array], *args: Array) -> None:
    got = jax.jit(kj.pipeline(function, strict=True, force=True))(*args)
    largest = max(np.abs(y).max(initial=0.0) for y in wanted)
    for x, y in zip(got, wanted, strict=True):
        assert x.shape == y.shape
        # With few keys those of queries and keys cancel out, and what cancels is as large as the others.
        scale = max(np.abs(y).max(initial=0.0), 0.3 * largest)
        error = np.abs(np.asarray(x, np.float64) - y).max(initial=0.0) / scale
        assert error < TOLERANCE[str(args[0].dtype)], error


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [False, True])
def test_a_backward_pass_alone(causal: bool, dtype: str) -> None:
    q, k, v, do = draw(0, *((2, 277, 3, 16),) * 4, dtype=dtype)
    wanted, m, total = reference(q, k, v, do, causal)
    m, total = jnp.asarray(m, jnp.float32), jnp.asarray(total, jnp.float32)
    check(lambda *a: backward(*a, causal), wanted, q, k, v, do, m, total)
    if dtype == "float32":
        turned = [a.swapaxes(1, 2) for a in (q, k, v, do)]
        check(lambda *a: heads_first(*a, causal), [a.swapaxes(1, 2) for a in wanted], *turned, m, total)


@pytest.mark.parametrize("causal", [False, True])
def test_forward_and_backward_in_one_call(causal: bool) -> None:
    q, k, v, do = draw(1, *((1, 301, 2, 20),) * 4)
    wanted, _, _ = reference(q, k, v, do, causal)

    def gradients(q: Array, k: Array, v: Array, do: Array) -> Array:
        return jax.grad(lambda *a: (attention(*a, causal) * do).sum(), (0, 1, 2))(q, k, v)

    check(gradients, wanted, q, k, v, do)
    (program,) = programs(gradients, q, k, v, do)
    assert len(program.sinks) == 2
    shapes = {tuple(a.shape) for a in (*program.inputs, *program.outputs)}
    assert not any(s[-2:] == (301, 301) for s in shapes), "scores are an array"


def test_hidden_blocks_are_left_out_of_the_sums(planned: str) -> None:
    """Both loops of the backward pass, where the mask hides by -inf and by a low number, and not where a row may see nothing."""
    q, k, v, do = (jax.ShapeDtypeStruct((1, 600, 2, 16), jnp.float32),) * 4
    m = jax.ShapeDtypeStruct((1, 2, 600), jnp.float32)

    def loops(function: Callable[..., Any], *args: Any) -> list[Any]:
        (program,) = programs(function, *args)
        return [i.get("within") for i in walk(program.stages[0].body) if i.kind == "loop"]

    if planned != "in blocks":
        return
    for fill in (-math.inf, -1e38):
        bounds = loops(lambda *a, fill=fill: backward(*a, True, fill), q, k, v, do, m, m)
        assert [(b[2], b[3], b[4]) for b in bounds] == [(None, 0, "whole"), (None, 0, "edges")] * 2
    assert set(loops(lambda *a: backward(*a, True, -5.0), q, k, v, do, m, m)) == {None}

    assert set(loops(lambda *a: backward(*a, True, diagonal=-1), q, k, v, do, m, m)) == {None}


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_grouped_heads(heads: int) -> None:
    q, do = draw(2, *((2, 261, 4, 16),) * 2)
    k, v = draw(3, *((2, 261, heads, 16),) * 2)
    wanted, _, _ = reference(q, k, v, do, True)

    def gradients(q: Array, k: Array, v: Array, do: Array) -> Array:
        def loss(q: Array, k: Array, v: Array) -> Array:
            return (jax.nn.dot_product_attention(q, k, v, is_causal=True) * do).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    check(gradients, wanted, q, k, v, do)


@settings(max_examples=10, deadline=None)
@given(
    batch=st.integers(1, 2),
    queries=st.sampled_from([1, 2, 31, 97]),
    keys=st.sampled_from([1, 5, 263, 389]),
    heads=st.sampled_from([1, 3]),
    size=st.sampled_from([8, 20]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_shapes(batch: int, queries: int, keys: int, heads: int, size: int, dtype: str) -> None:
    q, do = draw(queries, *((batch, queries, heads, size),) * 2, dtype=dtype)
    k, v = draw(keys, *((batch, keys, heads, size),) * 2, dtype=dtype)
    wanted, m, total = reference(q, k, v, do, False)
    check(lambda *a: backward(*a, False), wanted, q, k, v, do, jnp.asarray(m, jnp.float32), jnp.asarray(total, jnp.float32))


def test_the_interpreter_runs_the_same_program() -> None:
    args = draw(4, *((2, 300, 2, 16),) * 4)
    wanted, m, total = reference(*args, True)
    arrays = [*map(np.asarray, args), m.astype(np.float32), total.astype(np.float32)]
    graph = graph_of(lambda *a: backward(*a, True), *arrays)
    (chosen,) = route(graph, "cpu", RouteOptions(force=True, device="avx512-2")).regions
    program, given = build(graph, chosen.region, chosen.plan), dict(zip(graph.inputs, arrays, strict=True))
    missing = [v for v in chosen.region.inputs if v not in given]
    mask = np.tril(np.ones((300, 300), bool))  # made outside, once for all heads
    assert all(graph.values[v].dtype == "bool" for v in missing)
    operands = [given[v] if v in given else mask.reshape(graph.values[v].shape) for v in chosen.region.inputs]
    made = dict(zip(chosen.region.outputs, interpret(program, operands, widen=True, schedule_seed=3), strict=True))
    flat = [np.sort(a.ravel()) for a in made.values()]
    for y in wanted:  # turned by what stands behind the call
        assert min(np.abs(np.sort(y.ravel()) - a).max() if a.size == y.size else 1.0 for a in flat) < 1e-6


def test_equal_bits_whatever_the_threads() -> None:
    """One head of many queries: its tiles belong to several strands."""
    q, k, v, do = draw(5, *((1, 700, 1, 16),) * 4)
    function = jax.jit(kj.pipeline(lambda *a: jax.grad(lambda *x: attention(*x, True).sum(), (0, 1, 2))(*a[:3]), force=True))
    first = function(q, k, v)
    for _ in range(3):
        assert all(np.array_equal(a, b) for a, b in zip(function(q, k, v), first, strict=True))

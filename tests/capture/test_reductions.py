"""Reductions over a part of the dimensions: of what operands are cut, and which dimensions are reduced first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax import _compat
from kitsune_jax.capture.edit import Captured
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import Rewrite, apply_rewrites
from kitsune_jax.capture.rewrites.reductions import cut_operands, reduce_outer_first
from reference.graph import evaluate_numpy

Array = Any
GROUPS, LENGTH, WIDTH = 5, 3, 7
W, B = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)), np.random.default_rng(1).standard_normal(WIDTH)


def groups(x: Array) -> Array:
    return x.reshape(GROUPS, LENGTH, -1)


def dense(x: Array) -> Array:
    return jax.nn.relu(x @ W.astype(x.dtype) + B.astype(x.dtype))


def normalised(x: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-3)


CUT: dict[str, Callable[[Array], Array]] = {
    "squares": lambda x: groups(x * x).mean(1),
    "cut again": lambda x: groups(groups(x).reshape(-1, WIDTH) * 2.0).max(1),
    "residual": lambda x: groups(x + jnp.tanh(x) * B.astype(x.dtype)).sum(1),
    "rows normalised": lambda x: groups(normalised(x) * B.astype(x.dtype)).sum(1),
    "centred behind": lambda x: (lambda y: (y - y.mean(1, keepdims=True)).max(1))(groups(jnp.exp(x))),
    "columns": lambda x: jnp.abs(x.T).reshape(WIDTH, GROUPS, LENGTH).sum(2),
}
KEPT: dict[str, Callable[[Array], Any]] = {
    "returned too": lambda x: (x * x, groups(x * x).mean(1)),
    "over all": lambda x: groups(x * x).sum((0, 1)),
    "not reduced": lambda x: groups(x * x),
    "no elements": lambda x: (jnp.exp(x[:0]) + B.astype(x.dtype)).reshape(0, 16, WIDTH).max(2),
    "nothing computed": lambda x: groups(x).sum(1),
    "layers": lambda x: groups(dense(x)).max(1),
    "heads of a product": lambda x: (x @ jnp.ones((WIDTH, 6)) + 1.0).reshape(-1, 2, 3).sum(2),
}


def captured(fn: Callable[..., Any], *args: Array) -> Captured:
    """Of a function with constants: with these as its first arguments."""
    return capture(_compat.hoist_consts(jax.make_jaxpr(fn)(*args))[0])


def rewritten(fn: Callable[..., Any], rewrite: Callable[[Captured], Captured], *args: Array) -> Captured:
    found = apply_rewrites(captured(fn, *args), [Rewrite("this one", rewrite)])
    assert not found.failures
    return found


def computed_in_front_of_reshapes(c: Captured) -> list[str]:
    makers, values = c.graph.producers(), c.graph.values
    cuts = [op for op in c.graph.ops if op.kind == "reshape" and 1 not in values[op.outputs[0]].shape]
    made = [makers[op.inputs[0]] for op in cuts if op.inputs[0] in makers]
    return [c.graph.ops[i].kind for i in made if c.graph.ops[i].kind not in ("transpose", "broadcast_in_dim")]


@pytest.mark.parametrize("name", CUT)
def test_operands_are_cut_where_pieces_are_reduced(name: str) -> None:
    with jax.enable_x64(True):
        x = np.random.default_rng(2).standard_normal((GROUPS * LENGTH, WIDTH))
        closed, consts = _compat.hoist_consts(jax.make_jaxpr(CUT[name])(x))
        after = rewritten(CUT[name], cut_operands, x)
        assert computed_in_front_of_reshapes(capture(closed)) and not computed_in_front_of_reshapes(after)
        np.testing.assert_allclose(evaluate_numpy(after.graph, [*consts, x])[0], CUT[name](x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", KEPT)
def test_other_reshapes_stay(name: str) -> None:
    x = jnp.ones((GROUPS * LENGTH, WIDTH))
    assert rewritten(KEPT[name], cut_operands, x).graph == captured(KEPT[name], x).graph


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CUT)
def test_pooled_rows_are_those_of_float64(name: str, dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(3).standard_normal((GROUPS * LENGTH, WIDTH)), dtype)
    got = jax.jit(kj.pipeline(CUT[name], force=True))(x)
    with jax.enable_x64(True):
        want = np.asarray(CUT[name](jnp.asarray(np.asarray(x, np.float64))))
    close = {"float32": 1e-5, "bfloat16": 0.1, "float16": 2e-2}[dtype]
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=close, atol=close * np.abs(want).max())


def reductions(c: Captured) -> list[tuple[int, ...]]:
    return [op["axes"] for op in c.graph.ops if op.kind.startswith("reduce_")]


@pytest.mark.parametrize(
    ("fn", "axes"),
    [
        (lambda x: x.sum((1, 3)), [(1,), (2,)]),
        (lambda x: x.max((1, 3)), [(1,), (2,)]),
        (lambda x: (x > 0).all((0, 1, 3)), [(0, 1), (1,)]),
        (lambda x: x.sum((0, 3)), [(0,), (2,)]),
        (lambda x: x.sum((1, 2)), [(1, 2)]),  # no kept dimension between them
        (lambda x: x.sum(3), [(3,)]),
        (lambda x: x[:, :2].sum((1, 3)), [(1, 3)]),  # two runs
        (lambda x: jnp.tile(x, 16).sum((1, 3)), [(1, 3)]),  # runs of 128
        (lambda x: jax.lax.reduce_sum(x.astype(jnp.bfloat16), (1, 3)), [(1, 3)]),  # would be rounded twice
        (lambda x: jax.lax.reduce_max(x.astype(jnp.bfloat16), (1, 3)), [(1,), (2,)]),
    ],
)
def test_outer_dimensions_are_reduced_before_short_inner_ones(fn: Callable[[Array], Array], axes: list[tuple[int, ...]]) -> None:
    x = jnp.ones((6, 64, 4, 8))
    assert reductions(rewritten(fn, reduce_outer_first, x)) == axes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(3, 7, 4, 6), (1, 65, 2, 8), (2, 5, 3, 63), (4, 33, 1, 5)])
def test_a_group_norm_is_that_of_float64(shape: tuple[int, ...], dtype: str) -> None:
    def group_norm(x: Array) -> Array:
        mean = x.mean((1, 3), keepdims=True)
        return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean((1, 3), keepdims=True) + 1e-5)

    x = jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape) + 1.0, dtype)
    got = np.asarray(jax.jit(kj.pipeline(group_norm, force=True))(x), np.float64)
    with jax.enable_x64(True):
        want = np.asarray(group_norm(jnp.asarray(np.asarray(x, np.float64))))
    np.testing.assert_allclose(got, want, atol={"float32": 1e-5, "bfloat16": 0.1, "float16": 1e-2}[dtype])

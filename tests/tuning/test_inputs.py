"""Arguments for timing a program: indices point into their arrays, and a program that must not run is not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kitsune_jax as kj
from kitsune_jax.tuning.inputs import index_bounds, random_arguments, why_not_timed

TABLE = jnp.arange(7 * 3, dtype=jnp.float32).reshape(7, 3)
IDS = jnp.zeros((5,), jnp.int32)


def through_scan(table: Any, ids: Any) -> Any:
    return jax.lax.scan(lambda c, i: (c + table[i + 1 - 1], None), jnp.zeros(3), ids)[0]


def through_branches(table: Any, ids: Any) -> Any:
    return jax.lax.cond(table[0, 0] > 0, lambda i: table[i], lambda i: table[i] * 2, ids)


INDEXED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[int, int]]] = {
    "rows": (lambda t, i: t[i], (TABLE, IDS), {1: 7}),
    "elements by two indices": (lambda t, i, j: t[i, j], (TABLE, IDS, IDS), {1: 3, 2: 3}),
    "sums by two indices": (lambda x, i, j: jnp.zeros((9, 4)).at[i, j].add(x), (jnp.ones(5), IDS, IDS), {1: 4, 2: 4}),
    "negative indices count from the end": (lambda t, i: t[jnp.where(i < 0, i + 7, i)], (TABLE, IDS), {1: 7}),
    "the smaller of two tables": (lambda t, u, i: t[i] + u[i], (TABLE, TABLE[:4], IDS), {2: 4}),
    "sums by index": (lambda x, i: jax.ops.segment_sum(x, i, 9), (jnp.ones((5, 2)), IDS), {1: 9}),
    "a slice": (lambda t, i: jax.lax.dynamic_slice(t, (i, 0), (2, 3)), (TABLE, jnp.int32(0)), {1: 6}),
    "an update": (lambda t, i: jax.lax.dynamic_update_slice(t, t[:2], (i, 0)), (TABLE, jnp.int32(0)), {1: 6}),
    "indices of indices": (lambda t, i, j: t[i[j]], (TABLE, IDS, IDS[:2]), {1: 7, 2: 5}),
    "a loop": (through_scan, (TABLE, IDS), {1: 7}),
    "a branch": (through_branches, (TABLE, IDS), {1: 7}),
    "which branch": (lambda k, x: jax.lax.switch(k, [jnp.sin, jnp.cos, jnp.tan], x), (jnp.int32(0), TABLE), {0: 3}),
    "a called function": (lambda t, i: jax.jit(lambda t, i: t[i])(t, i * 1), (TABLE, IDS), {1: 7}),
    "integers that are data": (lambda x, i: x + i, (TABLE[0, 0], IDS), {}),
}


@pytest.mark.parametrize("name", INDEXED)
def test_indices_are_below_the_extent_of_their_array(name: str) -> None:
    f, args, want = INDEXED[name]
    closed = jax.make_jaxpr(f)(*args)
    assert index_bounds(closed) == want
    for seed in range(3):
        given_args = random_arguments(closed, seed)
        for k, bound in want.items():
            assert np.all((np.asarray(given_args[k]) >= 0) & (np.asarray(given_args[k]) < bound))


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 40), rows=st.integers(0, 30), seed=st.integers(0, 1000))
def test_no_row_is_out_of_range(n: int, rows: int, seed: int) -> None:
    def missing(table: Any, ids: Any) -> Any:
        return jnp.isnan(jnp.asarray(table).at[ids].get(mode="fill", fill_value=jnp.nan)).any()

    table, ids = jax.ShapeDtypeStruct((n, 2), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    assert not jax.jit(missing)(*random_arguments(jax.make_jaxpr(missing)(table, ids), seed))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint8", "uint32", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 5)])
def test_arguments_have_the_types_of_the_program(dtype: str, shape: tuple[int, ...]) -> None:
    closed = jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct(shape, dtype))
    (x,) = random_arguments(closed)
    assert x.shape == shape and x.dtype == jnp.dtype(dtype)
    if dtype in ("float32", "bfloat16", "float16", "uint32") and shape == (4, 5):
        assert len(np.unique(np.asarray(x))) > 10


def test_typed_keys_are_keys() -> None:
    closed = jax.make_jaxpr(jax.random.uniform)(jax.random.key(0))
    (key,) = random_arguments(closed)
    assert 0 <= float(jax.random.uniform(key)) < 1


def prints(x: Any) -> Any:
    jax.debug.print("{}", x[0])
    return x


def called_back(x: Any) -> Any:
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def while_positive(x: Any) -> Any:
    return jax.lax.while_loop(lambda x: x[0] > 0, lambda x: x - 1, x)


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (prints, "side effects"),
        (called_back, "runs code outside"),
        (while_positive, "while loop"),
        (lambda x: jax.jit(while_positive)(x), "while loop"),
        (lambda x: jax.lax.scan(lambda c, _: (called_back(c), None), x, None, length=2)[0], "runs code outside"),
        (lambda x: jnp.broadcast_to(x, (1 << 28, 3)), "larger than 2 GB"),
        (lambda x: jnp.sum(jnp.sin(jnp.broadcast_to(x, (100_000, 3)) @ jnp.ones((3, 10_000)))), "more than 1 GB"),
    ],
)
def test_what_must_not_run_says_why(f: Callable[..., Any], why: str) -> None:
    told = why_not_timed(jax.make_jaxpr(f)(jnp.ones(3)))
    assert told is not None and why in told


def test_a_program_of_arrays_can_run() -> None:
    @kj.pipeline
    def inner(x: Any) -> Any:
        return jnp.tanh(x)

    closed = jax.make_jaxpr(lambda t, i: jax.lax.fori_loop(0, 3, lambda _, c: inner(c), t[i]))(TABLE, IDS)
    assert why_not_timed(closed) is None


def test_devices_have_arguments_of_their_own() -> None:
    """A program whose arguments one device holds is too large for as many devices as share the memory."""
    shape = jax.ShapeDtypeStruct((300 << 20,), np.float32)
    program = jax.make_jaxpr(lambda x: x * 2)(jax.ShapeDtypeStruct((180 << 20,), np.float32))
    assert why_not_timed(program) is None
    assert why_not_timed(program, {"rows": 1}) is None
    assert "larger than 2 GB" in (why_not_timed(program, {"rows": 2}) or "")
    assert "larger than 2 GB" in (why_not_timed(jax.make_jaxpr(lambda x: x * 2)(shape)) or "")


def test_collectives_are_timed_on_the_axes_that_there_are() -> None:
    program = jax.make_jaxpr(lambda x: jax.lax.psum(x, "rows"), axis_env=[("rows", 2)])(np.ones(3, np.float32))
    assert why_not_timed(program, {"rows": 2}) is None
    assert why_not_timed(program, {"columns": 2}) == why_not_timed(program) == "it has side effects"

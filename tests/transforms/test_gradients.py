"""Gradients of losses: every way to write one becomes one region with its network, and is right; and what capture does for that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.capture.jaxpr import capture
from tests.program.test_build import run_through_interpreter
from tests.support.checks import count
from tests.support.gradient_cases import LOSSES
from tests.support.gradient_checks import check_close
from tests.support.graphs import mlp, mlp_params

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here

Array = Any
Function = Callable[..., Any]
force = functools.partial(kj.pipeline, force=True)
LABELS = [name for name, loss in LOSSES.items() if loss.labels]


def objective(name: str, network: Function = mlp) -> Function:
    """A mean of the loss, in float32 or wider whatever the network computes in."""

    def f(params: Any, x: Array, y: Array) -> Array:
        logits = network(params, x)
        return LOSSES[name].f(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), y)

    return f


def arguments(name: str, rows: int, dtype: str = "float32", dims: tuple[int, ...] = (6, 13, 5)) -> tuple[Any, ...]:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, dims[0])).astype(jnp.dtype(dtype))
    return mlp_params(rng, dims, jnp.dtype(dtype)), x, LOSSES[name].target(rng, rows, dims[-1], "float32")


def whole(name: str, wrap: Function) -> Function:
    return wrap(jax.value_and_grad(objective(name), (0, 1)))


def network_only(name: str, wrap: Function) -> Function:
    return jax.value_and_grad(objective(name, wrap(mlp)), (0, 1))


def check(name: str, mode: Function, rows: int, dtype: str) -> None:
    args = arguments(name, rows, dtype)
    compiled = jax.jit(mode(name, force)).lower(*args).compile()
    assert count(compiled.as_text()) > 0, "nothing was pipelined"
    check_close(compiled(*args), mode(name, lambda f: f), args, dtype, roundings=32)


# --- regions ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_network_loss_and_gradients_are_one_region(name: str) -> None:
    """All that is left over works on weights or on single numbers, when all rows have been seen."""
    params, x, y = arguments(name, 4096, dims=(32, 64, 64, 10))
    report = kj.explain(jax.value_and_grad(objective(name)))(params, x, y)
    assert [region.rows for region in report.regions] == [4096]
    assert report.ops_pipelined >= 25
    left = [r for r in report.rejected if r.op != "transpose" and "single numbers" not in r.reason]
    assert not left, left


def test_a_float16_loss_scale_leaves_nothing_outside() -> None:
    params, x, y = arguments("integer_labels", 4096, "float16", dims=(32, 64, 64, 10))
    scaled = jax.value_and_grad(lambda *args: objective("integer_labels")(*args) * 1024)
    report = kj.explain(scaled, force=True)(params, x, y)
    assert [region.rows for region in report.regions if region.ops > 2] == [4096]


# --- values ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_a_loss(name: str) -> None:
    check(name, whole, 97, "float32")


@pytest.mark.parametrize("name", ["mse", "integer_labels"])
def test_gradients_of_a_loss_around_a_pipelined_network(name: str) -> None:
    check(name, network_only, 257, "bfloat16")


@pytest.mark.parametrize("name", ["huber", "integer_labels"])
def test_gradients_of_a_loss_in_the_interpreter(name: str) -> None:
    args = arguments(name, 64)
    plain = whole(name, lambda f: f)
    got, regions = run_through_interpreter(plain, *args, seed=3)
    assert len(regions) >= 1
    check_close(got, plain, args, "float32", roundings=32)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 97, 257])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", [whole, network_only])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss(name: str, mode: Function, dtype: str, rows: int) -> None:
    check(name, mode, rows, dtype)


# --- one element per row ---------------------------------------------------------------------------------------------------------

COLUMNS = 5
INDICES = np.array([0, 4, -1, 5, -6, 2, 2**31 - 1, -(2**31), 3], np.int32)
MODES = ("fill", "clip", "promise_in_bounds")


def taken_along(x: Array, i: Array, mode: str) -> Array:
    return jnp.take_along_axis(x, i[:, None], -1, mode=mode)


def indexed(x: Array, i: Array, mode: str) -> Array:
    return x.at[jnp.arange(x.shape[0]), i].get(mode=mode)


def vmapped(x: Array, i: Array, mode: str) -> Array:
    return jax.vmap(lambda row, k: row.at[k].get(mode=mode))(x, i)


def added(x: Array, i: Array, mode: str) -> Array:
    return x.at[jnp.arange(x.shape[0]), i].add(2 * x[:, 0], mode=mode)


def gradient_of_taken(x: Array, i: Array, mode: str) -> Array:
    return jax.grad(lambda z: jnp.sum(taken_along(z, i, mode)[:, 0] * x[:, 0]))(x)


def rows_of(dtype: str) -> np.ndarray:
    rng = np.random.default_rng(4)
    x = rng.uniform(-9, 9, (len(INDICES), COLUMNS)) if "float" in dtype else rng.integers(0, 99, (len(INDICES), COLUMNS))
    if "float" in dtype:
        x[0], x[1, 4] = [-0.0, np.nan, 0, 1, 2], -np.inf
    return x.astype(jnp.dtype(dtype))


def check_like_jax(f: Function, *args: Array) -> None:
    """Captured without opaque ops; the same numbers as JAX, NaN and signs of zeros included, in a pipeline and interpreted."""
    assert not [op.reason for op in capture(jax.make_jaxpr(f)(*args)).graph.ops if op.kind == "opaque"]
    want = np.asarray(jax.jit(f)(*args))
    compiled = jax.jit(force(f)).lower(*args).compile()
    assert count(compiled.as_text()) > 0
    for got in (np.asarray(compiled(*args)), run_through_interpreter(f, *args)[0][0]):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))
        np.testing.assert_array_equal(np.signbit(got.astype(np.float64)), np.signbit(want.astype(np.float64)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", [taken_along, indexed, vmapped, added])
def test_an_index_out_of_range_means_what_it_means_to_jax(form: Function, mode: str) -> None:
    check_like_jax(lambda x, i: form(x + x, i, mode), rows_of("float32"), INDICES)


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_of_an_index_out_of_range(mode: str) -> None:
    x = np.nan_to_num(rows_of("float32"), neginf=3.0)
    check_like_jax(lambda x, i: gradient_of_taken(x, i, mode), x, INDICES)


@pytest.mark.slow
@pytest.mark.parametrize("index", ["int8", "uint8", "int16", "int32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", [taken_along, indexed, vmapped, added])
def test_one_element_per_row_in_every_dtype(form: Function, mode: str, dtype: str, index: str) -> None:
    if dtype == "bool" and form is added:
        pytest.skip("JAX adds no booleans")
    twice = (lambda x: ~x) if dtype == "bool" else (lambda x: x + x)
    check_like_jax(lambda x, i: form(twice(x), i, mode), rows_of(dtype), INDICES.astype(index))


def test_labels_of_tokens_have_two_leading_dimensions() -> None:
    x, i = rows_of("float32")[:6].reshape(2, 3, COLUMNS), INDICES[:6].reshape(2, 3)
    check_like_jax(lambda x, i: jnp.take_along_axis(x * 2, i[..., None], -1)[..., 0], x, i)
    check_like_jax(lambda x, i: (x * 2)[jnp.arange(2)[:, None], jnp.arange(3), i], x, i)


def test_a_fixed_index_is_a_slice() -> None:
    graph = capture(jax.make_jaxpr(lambda x: jnp.take(jnp.sin(x), 3, axis=1))(rows_of("float32"))).graph
    assert {op.kind for op in graph.ops} <= {"sin", "slice", "reshape"}


ONE_OF_EACH = jax.lax.GatherDimensionNumbers((), (1,), (1,), operand_batching_dims=(0,), start_indices_batching_dims=(0,))
NOT_ONE_PER_ROW = {
    "several": lambda x, i: jnp.take_along_axis(x * 2, jnp.stack([i, i], 1), -1),
    "rows": lambda x, i: (x * 2)[i],
    "permuted_rows": lambda x, i: (x * 2)[jnp.arange(9)[::-1], i],
    "shifted_rows": lambda x, i: (x * 2).at[jnp.arange(9) - 1, i].get(mode="clip"),
    "some_rows": lambda x, i: (x * 2)[jnp.arange(4), i[:4]],
    "transposed": lambda x, i: (x * 2).at[i[:5], jnp.arange(5)].get(mode="clip"),
    "in_memory": lambda x, i: jnp.take_along_axis(x, i[:, None], -1),
    "unsigned": lambda x, i: jax.lax.gather(x * 2, i.astype(jnp.uint32)[:, None], ONE_OF_EACH, (1, 1)),
}


@pytest.mark.parametrize("name", NOT_ONE_PER_ROW)
def test_other_gathers_are_lookups(name: str) -> None:
    f = NOT_ONE_PER_ROW[name]
    x, i = np.nan_to_num(rows_of("float32"), neginf=3.0), np.array([0, 4, 2, 1, 3, 2, 0, 1, 4], np.int32)
    ops = capture(jax.make_jaxpr(f)(x, i)).graph.ops
    assert [op.kind for op in ops].count("take") == 1 and "opaque" not in {op.kind for op in ops}
    np.testing.assert_array_equal(jax.jit(force(f))(x, i), jax.jit(f)(x, i))


# --- what autodiff writes --------------------------------------------------------------------------------------------------------


def test_a_squeeze_is_a_reshape() -> None:
    graph = capture(jax.make_jaxpr(lambda x: jax.lax.squeeze(x, (1,)) * 2)(np.ones((3, 1, 4), np.float32))).graph
    assert [op.kind for op in graph.ops] == ["reshape", "mul"]


def test_the_gradient_of_a_bias_is_one_sum() -> None:
    gradient = jax.grad(lambda b, x: jnp.sum(jnp.sin(x + b[None])))
    graph = capture(jax.make_jaxpr(gradient)(np.ones(4, np.float32), np.ones((7, 4), np.float32))).graph
    assert [op.kind for op in graph.ops].count("reduce_sum") == 1


def test_the_weight_of_a_mean_is_a_number() -> None:
    graph = capture(jax.make_jaxpr(jax.grad(lambda x: jnp.mean(x * x)))(np.ones((7, 4), np.float32))).graph
    assert "div" not in {op.kind for op in graph.ops}
    assert any(value.literal == np.float32(1 / 28) for value in graph.values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_arithmetic_on_numbers_is_rounded_as_jax_does(dtype: str) -> None:
    def f(x: Array) -> Array:
        third = jax.lax.div(np.asarray(1, x.dtype), np.asarray(3, x.dtype))
        return x * (third * np.asarray(7, x.dtype) - np.asarray(1.7, x.dtype)), third.astype(jnp.int32), third > 1

    x = np.ones(5, jnp.dtype(dtype))
    for got, want in zip(jax.jit(force(f))(x), f(x), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(want, np.float64))

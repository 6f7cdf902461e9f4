"""What XLA's fused loops take: functions one after the other and beside each other, narrow dtypes, one thread or all."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kitsune_jax as kj
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.planning.plan import VECTOR_MARGIN
from kitsune_jax.planning.streams import Region, StreamSpace
from kitsune_jax.regions import joining
from kitsune_jax.targets.cpu.planning.cost import CpuCost
from kitsune_jax.targets.cpu.planning.machines import cpu_model
from kitsune_jax.targets.cpu.planning.planner import ELEMENTWISE_MARGIN
from kitsune_jax.targets.cpu.planning.xla import of_ops
from kitsune_jax.targets.cpu.planning.xla_kernels import fused
from kitsune_jax.targets.cpu.profile import profile, xla
from tests.support.graphs import graph_of

PROFILE = profile.shipped("amx-2")
SHAPE = (331, 96)


def cost_of(function: Any, *shapes: tuple[int, ...], dtype: str = "float32") -> CpuCost:
    graph = graph_of(function, *(jnp.zeros(s, dtype) for s in shapes))
    return CpuCost(
        graph, Region(StreamSpace((1,)), tuple(range(len(graph.ops))), (), graph.inputs, graph.outputs), cpu_model("amx-2")
    )


def seconds(function: Any, *shapes: tuple[int, ...], dtype: str = "float32") -> float:
    """Of an element, beside what the loop moves."""
    cost = cost_of(function, *shapes, dtype=dtype)
    return fused(PROFILE).kernel(cost, cost.region.ops) / math.prod(shapes[0])


def chained(function: Any, n: int) -> Any:
    return lambda x: functools.reduce(lambda v, _: function(v), range(n), x)


@pytest.mark.parametrize(
    ("key", "function", "dtype"),
    [
        ("xla/loop/tanh/float32", xla.LOOPS["tanh"], "float32"),
        ("xla/chain/tanh/float32", xla.tanhs_in_chain, "float32"),
        *((f"xla/chain/gelu/{d}", xla.gelus_in_chain, d) for d in ("float32", "bfloat16", "float16")),
        *((f"xla/loop/{f}/float32", xla.LOOPS[f], "float32") for f in ("exp", "log", "logistic", "erf", "pow", "sin")),
    ],
)  # fmt: skip
def test_the_model_gives_back_what_was_measured(key: str, function: Any, dtype: str) -> None:
    found = seconds(function, SHAPE, SHAPE, dtype=dtype) + PROFILE.seconds(f"xla/loop/move/{dtype}")
    assert found == pytest.approx(PROFILE.seconds(key), rel=0.15)


def test_functions_that_wait_for_each_other_take_longer_than_others() -> None:
    one, chain = seconds(jnp.tanh, SHAPE), seconds(chained(jnp.tanh, 6), SHAPE)
    beside = seconds(lambda x: sum((jnp.tanh(x * k) for k in range(1, 6)), start=jnp.tanh(x)), SHAPE)
    assert 5 * one < beside < 7.5 * one
    assert chain > 2 * beside


def test_long_chains_grow_as_their_length() -> None:
    """Every iteration waits by itself: twice the chain, twice the time."""
    assert seconds(chained(jnp.tanh, 200), SHAPE) == pytest.approx(2 * seconds(chained(jnp.tanh, 100), SHAPE), rel=0.1)


def test_values_that_are_read_twice_are_computed_once() -> None:
    assert seconds(chained(lambda x: x * x, 120), SHAPE) < 130 * seconds(chained(lambda x: x * x, 2), SHAPE)


def test_a_narrow_dtype_is_converted_at_every_operation() -> None:
    def gelu(x: Any) -> Any:
        return jax.nn.gelu(x)

    assert seconds(gelu, SHAPE, dtype="bfloat16") > 3 * seconds(gelu, SHAPE)


def test_a_power_is_its_multiplications() -> None:
    power, product = (seconds(f, SHAPE, dtype="bfloat16") for f in (lambda x: x**3, lambda x: x * x * x))
    assert power == pytest.approx(product)


def _steps(n: int) -> Any:
    return lambda x: functools.reduce(lambda v, k: v * 0.9 if k % 2 else v + 0.1, range(n), x)


@pytest.mark.parametrize(
    ("function", "rows", "dtype", "one"),
    [
        (_steps(8), 500, "float32", True),  # as many operations as bytes
        (_steps(8), 700, "float32", False),
        (_steps(9), 20, "float32", True),
        (_steps(9), 40, "float32", False),
        (_steps(1), 900, "bfloat16", True),
        (_steps(2), 60, "bfloat16", False),  # with their conversions six operations for four bytes
        (chained(jnp.tanh, 6), 500, "float32", True),
        (chained(jax.nn.sigmoid, 6), 331, "float32", False),  # each three operations and an exponential
    ],
)  # fmt: skip
def test_which_loops_xla_shares_out(function: Any, rows: int, dtype: str, one: bool) -> None:
    """As ``outer_dimension_partitions`` of what JAX 0.12 compiles says."""
    cost = cost_of(function, (rows, 96), dtype=dtype)
    moved = 2 * rows * 96 * jnp.dtype(dtype).itemsize
    assert fused(PROFILE).one_thread(cost, cost.region.ops, moved) is one


def test_a_gelu_in_bfloat16_is_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """3.3 times as fast as XLA's on a Xeon with AMX."""
    monkeypatch.setenv("KITSUNE_PROFILE", "amx-2")
    report = kj.explain(lambda x, a, b: jax.nn.gelu(x * a + b))(*(jnp.zeros(s, "bfloat16") for s in ((2003, 128), (128,), (128,))))
    assert report.to_dict()["ops_pipelined"] == report.to_dict()["ops_total"], report


@pytest.mark.parametrize(("function", "elementwise"), [(lambda x: jnp.tanh(x * 2) + 1, True), (lambda x: jax.nn.softmax(x), False)])
def test_what_is_no_more_than_elementwise_has_to_gain_less(function: Any, elementwise: bool) -> None:
    graph = graph_of(function, jnp.zeros((4001, 64)))
    (chosen,) = route(graph, "cpu", RouteOptions(force=True, device="amx-2", code=False)).regions
    plan = chosen.plan
    assert (plan.margin == ELEMENTWISE_MARGIN) is elementwise
    at = dataclasses.replace(plan, seconds=1.0, baseline_seconds=(ELEMENTWISE_MARGIN + VECTOR_MARGIN) / 2)
    assert joining.pays(at) is elementwise


@pytest.mark.parametrize(
    ("width", "steps", "unrolled"),
    [(16, 8, True), (16, 10, False), (12, 12, True), (12, 16, False), (8, 26, True), (8, 34, False), (4, 34, True)],
)
def test_which_short_rows_xla_works_off_without_vectors(width: int, steps: int, unrolled: bool) -> None:
    """Of odd numbers of rows, as measured against even ones: 1.9 to 8.7 times as long, or 0.7 to 1.1."""

    def function(x: Any, y: Any) -> Any:
        return jnp.tanh(_steps(steps)(x)) + y

    odd, even = (
        of_ops(cost.graph, cost.region.ops, cost.machine)
        for cost in (cost_of(function, (rows, width), (width,)) for rows in (64_001, 64_000))
    )
    assert (odd > 1.5 * even) is unrolled

"""What XLA's loops and reductions are modelled to take, and what is chosen by that."""

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
from kitsune_jax.regions import joining
from kitsune_jax.targets.cpu.planning.machines import cpu_of
from kitsune_jax.targets.cpu.planning.planner import ELEMENTWISE_MARGIN
from kitsune_jax.targets.cpu.planning.xla import of_ops
from kitsune_jax.targets.cpu.profile import profile, xla
from tests.support.graphs import graph_of

PROFILE = profile.shipped("amx-2")
SHAPE = (2003, 128)  # of the measured loops


def seconds(function: Any, *shapes: tuple[int, ...], dtype: str = "float32") -> float:
    """Of an element, modelled of XLA, without the start of the kernel."""
    graph = graph_of(function, *(jnp.zeros(s, dtype) for s in shapes))
    found = of_ops(graph, range(len(graph.ops)), cpu_of(PROFILE)) - PROFILE.seconds("xla/kernel")
    return found / math.prod(shapes[0])


def chained(function: Any, n: int) -> Any:
    return lambda x: functools.reduce(lambda v, _: function(v), range(n), x)


# --- the model


@pytest.mark.parametrize("key", ["move", "exp", "log", "tanh", "logistic", "erf", "rsqrt", "pow", "sin"])
def test_the_model_of_a_loop_gives_back_what_was_measured(key: str) -> None:
    found = seconds(xla.LOOPS[key], SHAPE, SHAPE)
    assert found == pytest.approx(PROFILE.seconds(f"xla/loop/{key}/float32"), rel=0.2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("axes", [(1,), (0,), (0, 1)])
def test_the_model_of_a_reduction_gives_back_what_was_measured(axes: tuple[int, ...], dtype: str) -> None:
    which = {(1,): "row", (0,): "column", (0, 1): "all"}[axes]
    found = seconds(lambda x: jnp.sum(x, axes, dtype=x.dtype), (4099, 256), dtype=dtype)
    assert found == pytest.approx(PROFILE.seconds(f"xla/reduce/{which}/{dtype}"), rel=0.05)


def test_a_longer_chain_takes_longer() -> None:
    assert seconds(chained(jnp.tanh, 20), SHAPE) > 5 * seconds(chained(jnp.tanh, 2), SHAPE)


def test_a_narrow_dtype_is_converted_at_every_operation() -> None:
    assert seconds(jax.nn.gelu, SHAPE, dtype="bfloat16") > 1.5 * seconds(jax.nn.gelu, SHAPE)


def test_a_power_is_its_multiplications() -> None:
    power, product = (seconds(f, SHAPE, dtype="bfloat16") for f in (lambda x: x**3, lambda x: x * x * x))
    assert power == pytest.approx(product)


def test_a_small_loop_has_one_thread() -> None:
    """XLA gives a loop a second thread from 512 KB on; from there an element takes half as long on two."""
    small, large = (seconds(jnp.tanh, (rows, 96)) for rows in (600, 700))
    assert small == pytest.approx(2 * large, rel=0.05)


# --- what is chosen


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


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_large_difference_of_neighbours_takes_its_slices_into_the_pipeline(axis: int) -> None:
    """XLA writes both slices, 64 MB each, and reads them again: 2.7 to 5.8 times as long on a Zen 3."""

    def squared(x: Any) -> Any:
        return jnp.sum((jax.lax.slice_in_dim(x, 1, None, axis=axis) - jax.lax.slice_in_dim(x, 0, -1, axis=axis)) ** 2)

    report = kj.explain(squared, platform="cpu", device="avx2-2")(jax.ShapeDtypeStruct((256,) * 3, "float32"))
    (region,) = report.regions
    assert region.bytes_in == pytest.approx(4 * 256**3, rel=0.01)

"""The model's times of elementwise ops: in vector registers, with numbers, and on tiles that outgrow a core's first cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.targets.cpu.planning.cost import CpuCost
from kitsune_jax.targets.cpu.planning.machines import cpu_model, cpu_of
from kitsune_jax.targets.cpu.planning.planner import TileModel, plan
from tests.support.graphs import graph_of

ROWS, STEPS = 4099, 10


def cost_of(function: Any, *shapes: tuple[int, ...], machine: str = "avx512-2") -> CpuCost:
    graph = graph_of(function, *(jnp.ones(shape, jnp.float32) for shape in shapes))
    (region,) = route(graph, "cpu", RouteOptions(force=True, device=machine)).regions
    return CpuCost(graph, region.region, cpu_model(machine))


def seconds(cost: CpuCost, rows: int) -> float:
    return sum(count * cost.seconds(work, rows) for work, count in cost.kinds(cost.region.ops).items())


def loop(step: Any) -> Any:
    return lambda x, y: lax.fori_loop(0, STEPS, lambda _, x: step(x, y), x)


def test_a_loop_of_one_pass_keeps_values_in_registers() -> None:
    """A step takes less than a pass over arrays, and grows with the rows."""
    step = lambda x, y: jnp.minimum(x * y + x, y)  # noqa: E731
    looped, once = cost_of(loop(step), (ROWS,), (ROWS,)), cost_of(step, (ROWS,), (ROWS,))
    assert seconds(looped, 512) < 0.7 * STEPS * seconds(once, 512)
    assert seconds(looped, 1024) == pytest.approx(2 * seconds(looped, 512), rel=0.05)


def test_few_rows_of_such_a_loop_take_as_long_as_one() -> None:
    cost = cost_of(loop(lambda x, y: x * y + x), (ROWS,), (ROWS,))
    assert seconds(cost, 1) == seconds(cost, 64) < seconds(cost, 1024)


@pytest.mark.parametrize("machine", ["avx512-2", "zen5-2"])
def test_a_division_by_a_number_takes_at_most_two_multiplications(machine: str) -> None:
    by_number = cost_of(lambda x: jnp.sin(x) / 1.1, (ROWS,), machine=machine)
    by_array = cost_of(lambda x, y: jnp.sin(x) / y, (ROWS,), (ROWS,), machine=machine)
    number, array = (next(w for w in cost.kinds(cost.region.ops) if w.kind == "div") for cost in (by_number, by_array))
    assert number.constant and not array.constant
    slow = dataclasses.replace(by_number.machine.profile, numbers=slower_division(by_number.machine.profile.numbers))
    known = CpuCost(by_number.graph, by_number.region, cpu_of(slow))
    product = dataclasses.replace(number, kind="mul", constant=False)
    assert known.seconds(number, 960) - known.seconds(product, 960) == pytest.approx(960 * known.times.vector("mul", "float32"))
    assert known.seconds(dataclasses.replace(number, constant=False), 960) > 2 * known.seconds(number, 960)
    assert by_number.seconds(number, 960) <= by_number.seconds(dataclasses.replace(number, constant=False), 960)


def slower_division(numbers: Any) -> Any:
    return tuple((key, 20 * value if key == "vector/div" else value) for key, value in numbers)


def test_intermediates_that_outgrow_the_first_cache_are_read_from_the_second() -> None:
    """512 numbers of each of 4 rows fit the L1 (48 KB), of 64 rows they do not. How much longer that takes follows from the
    machine's copies of bytes: nothing where both caches are alike. Plans count it."""

    def softmax(x: Any) -> Any:
        return jnp.exp(x - x.max(1, keepdims=True)) / 2

    cost = cost_of(softmax, (ROWS, 512))
    profile = cost.machine.profile
    l1, l2 = profile.seconds("copy/l1"), profile.seconds("copy/l2")
    numbers = tuple((key, l1 if key == "copy/l2" else value) for key, value in profile.numbers)
    alike = CpuCost(cost.graph, cost.region, cpu_of(dataclasses.replace(profile, numbers=numbers)))
    works = cost.kinds(cost.region.ops).items()
    moved = 4 * sum(count * (work.elements if work.family == "reduce" else work.edges) for work, count in works)
    model = TileModel(cost)
    assert l2 > l1 and model.cache_wait_seconds(4) == TileModel(alike).cache_wait_seconds(64) == 0.0
    assert model.cache_wait_seconds(64) == pytest.approx(64 * moved * (l2 - l1) / 2) and moved >= 4 * 3 * 512
    planned = plan(cost.graph, cost.region, cost.machine)
    waits = model.cache_wait_seconds(planned.tile_rows)
    assert planned.stages[0].tile_seconds == pytest.approx(model.seconds(planned.tile_rows) + waits) and waits > 0


def test_results_in_registers_are_not_written() -> None:
    """Of a chain of elementwise ops the last result is, and what a product reads."""
    product = cost_of(lambda x, w: jnp.tanh(jnp.sin(x * 2) @ w * 3 + 1), (ROWS, 64), (64, 32))
    assert product.made_row_bytes() == (64 + 32 + 32) * 4

"""Sums by index that are added to an array which lies in memory, as the gradients of what the steps of a loop take of it: XLA folds
them into the array, and what it takes is modelled so."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import kitsune_jax as kj
from kitsune_jax.config import PlannerOptions
from kitsune_jax.planning.cost import folded_into, kernels_of, left_region
from kitsune_jax.regions.grow import WHY, updated_in_place
from kitsune_jax.targets.cpu.planning import xla
from kitsune_jax.targets.cpu.planning.cost import CpuCost
from kitsune_jax.targets.cpu.planning.machines import cpu_model
from tests.support.graphs import graph_of

MACHINE = cpu_model("amx-2")
# Rows of the array, their numbers, those that a step folds, steps; microseconds of XLA for a step (JAX 0.12, Xeon 6 with AMX).
MEASURED = {
    "pages of a pool": (256, 8192, 8, 16, 25.0),
    "one wide row": (1024, 512, 1, 256, 0.3),
    "rows of an embedding": (1024, 64, 64, 64, 1.4),
    "far rows": (10_000, 64, 256, 16, 7.0),
    "short rows": (1024, 16, 64, 64, 0.4),
}


def zeros(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.zeros(shape, dtype)


def folded(n: int, width: int, rows: int, steps: int) -> tuple[Any, tuple[Any, ...]]:
    """The gradient of rows that are taken in the steps of a loop, as JAX writes it."""

    def f(start: Any, ids: Any, x: Any) -> Any:
        def step(c: Any, s: Any) -> Any:
            return c + jnp.zeros_like(c).at[s[0]].add(s[1]), None

        return lax.scan(step, start, (ids, x))[0]

    return f, (zeros(n, width), zeros(steps, rows, dtype="int32"), zeros(steps, rows, width))


def seconds(n: int, width: int, rows: int, steps: int) -> float:
    f, args = folded(n, width, rows, steps)
    graph = graph_of(f, *args)
    return xla.of_ops(graph, range(len(graph.ops)), MACHINE, xla.program_context(graph, MACHINE, PlannerOptions(), False))


@pytest.mark.parametrize("name", MEASURED)
def test_a_step_costs_what_it_folds(name: str) -> None:
    """It was modelled as three passes over the array: 1.9 ms for the pages, 0.43 ms for the wide row."""
    n, width, rows, steps, measured = MEASURED[name]
    each = (seconds(n, width, rows, 2 * steps) - seconds(n, width, rows, steps)) / steps
    assert measured / 4 < each * 1e6 < 4 * measured


def _cost(f: Any, *args: Any) -> CpuCost:
    graph = graph_of(f, *args)
    return CpuCost(graph, left_region(graph, range(len(graph.ops))), MACHINE)


def _sums(ids: Any, x: Any, n: int = 1000) -> Any:
    return jax.ops.segment_sum(x, ids, n)


ARGS = zeros(1000, 64), zeros(32, dtype="int32"), zeros(32, 64)


def test_a_kernel_folds_into_the_array() -> None:
    cost = _cost(lambda x, ids, y: x + _sums(ids, y) + _sums(ids, jnp.tanh(y)), *ARGS)
    into = folded_into(cost, {"float32"})
    kernels = [k for k in kernels_of(cost, into) if k.into is not None]
    assert [(k.into, k.root) for k in kernels] == [
        (cost.graph.inputs[0], kernels[1].into),
        (kernels[1].into, cost.graph.outputs[0]),
    ]
    rows, ids = cost.bytes(cost.graph.inputs[2]), cost.bytes(cost.graph.inputs[1])
    assert all(k.moved(cost) == 3 * rows + ids for k in kernels)  # without the array


@pytest.mark.parametrize("name", ["twice", "result", "narrow", "other", "largest"])
def test_no_kernel_folds_into_what_is_no_such_array(name: str) -> None:
    def f(x: Any, ids: Any, y: Any) -> Any:
        sums = _sums(ids, y)
        if name == "twice":
            return (x + sums) * sums
        if name == "result":
            return x + sums, sums
        if name == "largest":
            return x + jax.ops.segment_max(y, ids, 1000)
        return x * sums if name == "other" else x + sums

    x, ids, y = ARGS
    dtype = "bfloat16" if name == "narrow" else "float32"
    cost = _cost(f, x.astype(dtype), ids, y.astype(dtype))
    assert not folded_into(cost, {"float32"})


@pytest.mark.parametrize(("rows", "left"), [(32, True), (249, True), (250, False), (4000, False)])
def test_a_small_part_of_an_argument_is_left_to_xla(rows: int, left: bool) -> None:
    graph = graph_of(lambda x, ids, y: x + _sums(ids, jnp.sin(y)), zeros(1000, 64), zeros(rows, dtype="int32"), zeros(rows, 64))
    found = {graph.ops[i].kind: why for i, why in updated_in_place(graph).items()}
    assert found == ({"scatter_sum": WHY, "add": WHY} if left else {})


def test_what_is_computed_anyway_is_no_array_in_memory() -> None:
    graph = graph_of(lambda x, ids, y: jnp.sin(x) + _sums(ids, y), *ARGS)
    assert not updated_in_place(graph)


def test_the_gradient_by_pages_that_a_loop_takes() -> None:
    """A pipeline of the reverse loop, or of the sums in its steps, passes over the pool in each step: it took 47 ms of CPU time
    where ``jax.jit`` took 12 (Xeon with AMX)."""
    batch, pages, page, heads, size = 8, 16, 64, 2, 64

    def attention(q: Any, keys: Any, values: Any, table: Any) -> Any:
        def step(c: Any, t: Any) -> Any:
            m, total, o = c
            s = jnp.einsum("bnd,bpnd->bnp", q, keys[t])
            m2 = jnp.maximum(m, s.max(-1))
            p, r = jnp.exp(s - m2[..., None]), jnp.exp(m - m2)
            return (m2, total * r + p.sum(-1), o * r[..., None] + jnp.einsum("bnp,bpnd->bnd", p, values[t])), None

        start = zeros(batch, heads) - 1e30, zeros(batch, heads), jnp.zeros_like(q)
        (_, total, o), _ = lax.scan(step, start, table)
        return (o / total[..., None]).sum()

    pool = zeros(256, page, heads, size)
    report = kj.explain(jax.grad(attention, (0, 1, 2)), platform="cpu", device="amx-2")(
        zeros(batch, heads, size), pool, pool, zeros(pages, batch, dtype="int32")
    )
    assert sum(r.op in ("scatter-add", "add_any") and r.reason == WHY for r in report.rejected) >= 2, str(report)
    assert not any("scatter-add" in op for region in report.regions for stage in region.stages for op in stage.ops)

"""Sums over the rows of more columns than a thread has registers for: the threads of a warp share them out, tile by tile.

Such are the gradients of all biases of a network where one worker takes a tile through its whole backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitsune_jax.capture.edit import Captured
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.frontend.route import PlannedRegion
from kitsune_jax.ops.graph import Graph
from kitsune_jax.planning.plan import GpuPlan, Infeasible
from kitsune_jax.planning.streams import Region
from kitsune_jax.program.build import build
from kitsune_jax.regions.select import select
from kitsune_jax.targets.cuda import lower, runtime, tiles
from kitsune_jax.targets.cuda import target as cuda_target
from kitsune_jax.targets.cuda.planning import planner
from kitsune_jax.targets.cuda.planning.machines import H200
from kitsune_jax.targets.cuda.target import CUDA
from reference import standalone
from tests.support import checks
from tests.support.cuda_run import Arrangements, Kernel, Subject, arrangements, kernel_cache, subject

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

WIDTHS = (192, 200, 224)  # 200 columns are padded to 224
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-11}


def sums(x: Any, *weights: Any) -> Any:
    """Sums and a maximum over the rows of every layer, and a sum of few columns."""
    first, second, third = (x := jnp.tanh(x @ w) for w in weights)
    return jnp.sum(first, 0), jnp.max(second, 0), jnp.sum(third, 0), jnp.sum(third[:, :8], 0)


@functools.lru_cache(maxsize=2)
def case(dtype: str, rows: int) -> tuple[Subject, Arrangements, list[np.ndarray]]:
    rng = np.random.default_rng(rows)
    shapes = [(rows, 16), *zip((16, *WIDTHS), WIDTHS, strict=False)]
    args = [jax.device_put(np.asarray(rng.standard_normal(s) / np.sqrt(s[0] if k else 1), dtype)) for k, s in enumerate(shapes)]
    of = subject(sums, *args)
    assert len(of.region.sinks) == 4, "the sums did not become sinks of one region"
    return of, arrangements(of), jax.tree.leaves(checks.in_float64(sums, *of.args))


def check(dtype: str, rows: int, arrangement: str) -> None:
    of, found, want = case(dtype, rows)
    kernel = Kernel(of, found[arrangement])
    assert kernel.code.kernel.source.count("fold_rows<") >= 3, "no columns were shared out"
    first, second = kernel(seed=1), kernel(seed=2)
    for k, (a, b, w) in enumerate(zip(first, second, want, strict=True)):
        assert a.tobytes() == b.tobytes(), f"result {k} depends on the schedule"
        off = np.abs(a.astype(np.float64) - w).max()
        # Roundings of the operands of three products, each of at most 1, add up over the rows.
        assert off <= 8 * ROUNDING[dtype] * max(1.0, np.abs(w).max(), rows**0.5), f"result {k} is off by {off:.3g}"


@pytest.mark.parametrize(
    ("dtype", "rows", "arrangement"),
    [
        ("bfloat16", 193, "sm90-vertical-streamed-cluster2-lanes2"),
        ("float16", 1, "sm80-vertical-streamed-cluster1-lanes1"),
        ("float32", 61, "sm90-vertical-streamed-cluster1-lanes1"),
    ],
)
def test_sums_of_many_columns(dtype: str, rows: int, arrangement: str) -> None:
    check(dtype, rows, arrangement)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 64, 257])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_every_dtype(dtype: str, rows: int, subtests: Any) -> None:
    for arrangement in case(dtype, rows)[1].names():
        if "vertical" in arrangement and arrangement in case(dtype, rows)[1]:
            with subtests.test(arrangement):
                check(dtype, rows, arrangement)


def test_few_columns_stay_with_their_threads() -> None:
    """A thread keeps its two of eight columns where that takes half of its registers at most: no shuffle then."""
    assert tiles.spread_sums([tiles.MOST_SUM_REGISTERS * 4]) == (False,)
    assert tiles.spread_sums([tiles.MOST_SUM_REGISTERS * 4, 32, 8]) == (True, True, False)


# --- A training step without the products of its weight gradients -----------------------------------------------------------------

LAYERS = (48, 192, 192, 192, 3)


def squared_error(params: Any, x: Any, y: Any) -> Any:
    for k, (w, b) in enumerate(params):
        x = x @ w + b
        x = jnp.tanh(x) if k + 1 < len(params) else x
    return jnp.mean((x.astype(jnp.float32) - y.astype(jnp.float32)) ** 2)


@functools.lru_cache(maxsize=1)
def step_without_gradients(dtype: str, rows: int) -> tuple[Captured, list[PlannedRegion], list[Any]]:
    """The step where no sum of a weight gradient fits a kernel: XLA multiplies what the kernels store."""
    rng = np.random.default_rng(rows)
    draw = lambda *shape, by=1.0: jax.device_put(np.asarray(rng.standard_normal(shape) * by, dtype))  # noqa: E731
    params = [(draw(k, n, by=k**-0.5), draw(n)) for k, n in itertools.pairwise(LAYERS)]
    args = [params, draw(rows, LAYERS[0]), draw(rows, LAYERS[-1])]
    closed = jax.make_jaxpr(jax.value_and_grad(squared_error))(*args)
    captured = capture(closed, context=RewriteContext(CUDA.capabilities))
    graph = captured.graph

    def supports(i: int) -> str | None:
        op = graph.ops[i]
        return cuda_target.supports(op, [graph.values[v] for v in op.inputs], [graph.values[v] for v in op.outputs])

    def plan_of(graph: Graph, region: Region) -> GpuPlan | str:
        if region.space.rows != rows or any(graph.ops[i].kind == "dot_general" for i in region.sinks):
            return "its sums have no room"
        try:
            found = planner.plan(graph, region, H200, accept=lambda p: lower.check(build(graph, region, p), p, "region"))
        except Infeasible as no:
            return str(no)
        return dataclasses.replace(found, replicas=1, baseline_seconds=2.0 * len(region.ops))  # whatever has a plan pays

    chosen = select(graph, supports, plan_of, dataclasses.replace(CUDA.capabilities, runs_phases=False, most_merged=1), force=False)
    made = [Subject(captured, c.region, ()).planned(c.plan, "emulator") for c in chosen.regions if isinstance(c.plan, GpuPlan)]
    return captured, made, args


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [("bfloat16", 193), ("float16", 257), pytest.param("float32", 227, marks=pytest.mark.slow)],
)
def test_a_step_whose_weight_gradients_are_products_of_stored_arrays(dtype: str, rows: int) -> None:
    captured, made, args = step_without_gradients(dtype, rows)
    graph, flat = captured.graph, jax.tree.leaves(args)
    products = [i for r in made for i in r.region.ops if graph.ops[i].kind == "dot_general"]
    assert len(products) == 2 * (len(LAYERS) - 1) - 1, "the forward pass, and the backward pass to the first layer"
    sums = [i for r in made for i in r.region.sinks if graph.values[graph.ops[i].outputs[0]].size > 1]
    assert len(sums) == len(LAYERS) - 1, "the gradients of the biases come with them"
    executable = jax.jit(lambda *arrays: standalone.run(captured, made, arrays)).lower(*flat).compile()
    results = []
    for seed in (1, 2):
        runtime.set_emulator_seed(seed)
        results.append([np.asarray(r) for r in executable(*flat)])
    want = jax.tree.leaves(checks.in_float64(jax.value_and_grad(squared_error), *args))
    for k, (a, b, w) in enumerate(zip(*results, want, strict=True)):
        assert a.tobytes() == b.tobytes(), f"result {k} depends on the schedule"
        off = np.abs(a.astype(np.float64) - w).max()
        assert off <= 12 * ROUNDING[dtype] * np.abs(w).max(), f"result {k} is off by {off:.3g} of {np.abs(w).max():.3g}"

"""Calls of several regions on the CPU: the bits of the same regions as calls of their own, at any number of threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import kitsune_jax as kj
from benchmarks.graphs.apps import GRAPH_APPS, case_of
from benchmarks.graphs.measure import loss_and_grads
from kitsune_jax import _cpu, targets
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.frontend import lowering
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.targets.cpu import call as cpu_call
from kitsune_jax.targets.cpu import call as runtime
from kitsune_jax.targets.cpu import lower as cpu_lower
from tests.support.checks import in_float64
from tests.support.draws import drawn_by_numpy

pytestmark = pytest.mark.skipif(not cpu_call.available(), reason="the extension is not built")
WIDTH = 24


def steps(w: Any, nodes: Any, edges: Any, senders: Any, receivers: Any) -> Any:
    """Two steps of message passing, and the sum of what they make."""
    for _ in range(2):
        edges = jnp.tanh(edges @ w + nodes[senders] - nodes[receivers])
        nodes = jnp.tanh(nodes + jax.ops.segment_sum(edges, receivers, num_segments=nodes.shape[0]) @ w)
    return nodes, edges


def gradient(w: Any, nodes: Any, edges: Any, *ends: Any) -> Any:
    return jax.grad(lambda w, nodes, edges: sum(jnp.sum(x * x) for x in steps(w, nodes, edges, *ends)), (0, 1, 2))(w, nodes, edges)


def data(nodes: int, edges: int, dtype: str = "float32", seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    floats = [rng.standard_normal(shape) * 0.3 for shape in ((WIDTH, WIDTH), (nodes, WIDTH), (edges, WIDTH))]
    ends = [jax.device_put(np.asarray(rng.integers(nodes, size=edges), jnp.int32)) for _ in range(2)]
    return (*(jnp.asarray(x, dtype) for x in floats), *ends)


def compiled(fn: Callable[..., Any], args: tuple[Any, ...], *, merged: bool) -> tuple[Any, int]:
    """``fn`` with every legal region pipelined, and how many calls that is."""
    with pytest.MonkeyPatch.context() as patch:
        cpu = targets.get("cpu")
        patch.setattr(cpu, "capabilities", dataclasses.replace(cpu.capabilities, most_merged=512 if merged else 1))
        lowering._routed.cache_clear()
        try:
            f = jax.jit(kj.pipeline(fn, force=True, strict=True)).lower(*args).compile()
        finally:
            lowering._routed.cache_clear()
    before = _cpu.calls()
    jax.block_until_ready(f(*args))
    return f, _cpu.calls() - before


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fn", [steps, gradient])
@pytest.mark.parametrize(("nodes", "edges"), [(1, 1), (1, 37), (101, 1), (101, 1009)])
def test_merged_calls_give_the_bits_of_calls_apart(fn: Callable[..., Any], nodes: int, edges: int) -> None:
    args = data(nodes, edges)
    whole, calls = compiled(fn, args, merged=True)
    apart, more = compiled(fn, args, merged=False)
    assert calls < more
    got = whole(*args)
    assert bits(got) == bits(apart(*args)) == bits(whole(*args))
    for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(in_float64(fn, *args)), strict=True):
        want = np.asarray(want)
        assert np.abs(np.asarray(have, np.float64) - want).max(initial=0) <= 3e-5 * np.abs(want).max(initial=1.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_merged_calls_in_16_bits(dtype: str) -> None:
    args = data(67, 501, dtype)
    whole, calls = compiled(steps, args, merged=True)
    apart, more = compiled(steps, args, merged=False)
    assert calls < more
    assert bits(whole(*args)) == bits(apart(*args))


def test_a_graph_without_edges() -> None:
    args = data(11, 0)
    got = jax.jit(kj.pipeline(steps, force=True))(*args)
    for have, want in zip(got, steps(*args), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    args = data(503, 4001, seed=3)
    captured = capture(jax.make_jaxpr(steps)(*args))
    (call,) = route(captured.graph, "cpu", RouteOptions(force=True, strict=True)).regions
    assert len(call.phases) >= 4
    n, arrays = call.program.operands, call.program.arrays
    given = dict(zip(captured.graph.inputs, map(np.asarray, args), strict=True))
    operands = [given[v] for v in call.region.inputs if v in given][: n - len(call.orders)]
    operands += [np.argsort(given[captured.graph.inputs[4]], kind="stable").astype(np.int32)] * len(call.orders)
    assert [x.shape for x in operands] == [a.shape for a in arrays[:n]]
    runs = []
    for threads in range(1, 9):
        outs = [np.empty(a.shape, a.dtype) for a in arrays[n : n + call.program.results]]
        runtime.extension().run(call.code.words, operands, outs, threads)
        runs.append([x.tobytes() for x in outs])
    assert all(r == runs[0] for r in runs)


@pytest.mark.expects_fallbacks
@pytest.mark.filterwarnings("ignore:kitsune_jax could not pipeline")
def test_a_phase_that_cannot_be_made_costs_its_own_region_only(monkeypatch: pytest.MonkeyPatch) -> None:
    args = data(101, 1009)
    real = cpu_lower.lower_program

    def failing(program: Any, *rest: Any) -> Any:
        if program.rows == 101:
            raise ValueError("planted")
        return real(program, *rest)

    monkeypatch.setattr("kitsune_jax.targets.cpu.lower.lower_program", failing)
    lowering._routed.cache_clear()
    before = _cpu.calls()
    got = jax.jit(kj.pipeline(steps, force=True))(*args)
    lowering._routed.cache_clear()
    jax.block_until_ready(got)
    assert _cpu.calls() - before == 2  # the edges of both steps
    assert any("planted" in f.reason for f in kj.fallbacks())
    for have, want in zip(got, in_float64(steps, *args), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)


def test_calls_between_side_effects_stay_apart() -> None:
    """A value is told before another one is asked for, in the user's order, so no call may run both before and behind both."""
    told: list[float] = []

    def fn(*args: Any) -> Any:
        nodes, edges = steps(*args)
        jax.debug.callback(lambda x: told.append(float(x)), nodes[0, 0], ordered=True)
        scale = io_callback(lambda: np.float32(0.5), jax.ShapeDtypeStruct((), "float32"), ordered=True)
        return steps(args[0], nodes * scale, edges, *args[3:])

    args = data(101, 1009)
    report = kj.explain(kj.pipeline(fn, force=True))(*args)
    assert len(report.regions) > 1
    assert report.coverage > 0.85
    got = jax.jit(kj.pipeline(fn, force=True))(*args)
    for have, want in zip(got, jax.jit(fn)(*args), strict=True):  # of -1 to 1; four steps of sums enlarge roundings
        np.testing.assert_allclose(have, want, rtol=0, atol=3e-4)
    jax.effects_barrier()
    assert len(told) == 2 and told[0] == pytest.approx(told[1], rel=1e-4)


def test_all_of_mesh_graph_nets_is_one_call() -> None:
    """15 steps of message passing: edges, nodes, edges again."""
    with drawn_by_numpy():
        case = case_of(GRAPH_APPS["meshgraphnets"], "f32", 2_000)
    graph = capture(jax.make_jaxpr(case.function)(case.params, *case.inputs)).graph
    found = route(graph, "cpu", RouteOptions(device="zen5-2", code=False, strict=True))
    (call,) = found.regions
    assert len(call.phases) == 2 * 15 + 1
    assert found.report.ops_pipelined == found.report.ops_total
    (report,) = found.report.regions
    edges = max(p.region.space.rows for p in call.phases)
    assert report.kept_at_once < 4 * 128 * 3 * edges < report.kept_bytes  # of 15 steps two live at a time, with their nodes


@pytest.mark.slow
def test_the_forward_pass_of_a_gradient_of_mesh_graph_nets_is_one_call() -> None:
    with drawn_by_numpy():
        case = case_of(GRAPH_APPS["meshgraphnets"], "f32", 2_000)
    step = loss_and_grads(case, case.function)
    graph = capture(jax.make_jaxpr(step)(case.params, case.inputs, case.targets)).graph
    whole, apart = (route(graph, "cpu", RouteOptions(device="zen5-2", code=False, strict=True, merge=m)) for m in (True, False))
    assert max(len(r.phases) for r in whole.regions) > 2 * 15
    assert 2 * len(whole.regions) <= len(apart.regions) + 1

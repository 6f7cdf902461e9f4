"""Options reach what reads them whole: rewrites, planners and their costs. Plans of regions are remembered by them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kitsune_jax as kj
from kitsune_jax import _compat, config, targets
from kitsune_jax.capture import jaxpr as capture_module
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import REWRITES, Rewrite, RewriteContext
from kitsune_jax.config import Options, PlannerOptions
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.planning.plan import Plan, ProgramContext
from kitsune_jax.targets.cpu.planning.cost import CpuCost
from kitsune_jax.targets.cuda.planning.cost import GpuCost
from tests.regions.test_merge import GRAPH, messages
from tests.support.graphs import graph_of

DEVICES = {"cpu": "avx512-2", "cuda": "h200"}


def layers(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.tanh(x @ w) @ w)


def steps(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0]


def sums_of_steps(w: jax.Array, x: jax.Array) -> jax.Array:
    """A loop, each step of which adds to the gradient of ``w``."""
    return jax.grad(lambda w: steps(w, x).sum())(w)


SHAPES = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((4096, 64), "float32")


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("platform", "cost"), [("cpu", CpuCost), ("cuda", GpuCost)])
@pytest.mark.parametrize("function", [layers, steps, sums_of_steps])
def test_planners_and_costs_read_the_options(
    monkeypatch: pytest.MonkeyPatch, platform: str, cost: type, function: Any, deterministic: bool
) -> None:
    """Costs of the bodies of loops, too."""
    seen: list[ProgramContext] = []
    begin = cost.__init__

    def watched(self: Any, *args: Any, **more: Any) -> None:
        begin(self, *args, **more)
        seen.append(self.program)

    monkeypatch.setattr(cost, "__init__", watched)
    closed = _compat.hoist_consts(jax.make_jaxpr(function)(*SHAPES))[0]
    graph = capture(closed, context=RewriteContext(targets.get(platform).capabilities)).graph
    asked = RouteOptions(device=DEVICES[platform], code=False, force=True, deterministic=deterministic)
    assert route(graph, platform, asked).regions
    assert len(seen) > 1 and {program.options for program in seen} == {PlannerOptions(deterministic=deterministic)}


def test_a_target_merges_phases_by_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(make: Any, plans: Any, machine: Any, program: ProgramContext, apart: float) -> str:
        seen.append(program.options)
        return "they stay apart"

    monkeypatch.setattr(targets.get("cpu"), "merge_phases", watched)
    graph = graph_of(messages, *GRAPH)
    route(graph, "cpu", RouteOptions(device="avx512-2", code=False, force=True, deterministic=False))
    assert set(seen) == {PlannerOptions(deterministic=False)}


def test_rewrites_read_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Options] = []

    def asked_for(context: RewriteContext) -> bool:
        seen.append(context.options)
        return False

    monkeypatch.setattr(capture_module, "REWRITES", (*REWRITES, Rewrite("watching", lambda captured: captured, asked_for)))
    kj.explain(layers, platform="cpu", device="avx512-2", deterministic=False, network=(1e-6, 1e9))(*SHAPES)
    assert seen and all(not options.deterministic and options.network == (1e-6, 1e9) for options in seen)


def sums_by_index(x: jax.Array, ids: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(jnp.tanh(x), ids, 10_000)


def test_plans_of_regions_are_remembered_by_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another choice between plans, as ``force`` asks for, plans no region again; an option on which plans depend does."""
    shapes = jax.ShapeDtypeStruct((100_000, 128), "float32"), jax.ShapeDtypeStruct((100_000,), "int32")
    graph, target, planned = graph_of(sums_by_index, *shapes), targets.get("cuda"), list[Any]()
    plan = target.plan

    def counted(*args: Any) -> Plan:
        planned.append(args[:2])
        return plan(*args)

    monkeypatch.setattr(target, "plan", counted)

    def routed(**options: Any) -> tuple[list[bool], int]:
        """For each call whether it adds rows in any order, and how many regions had been planned before."""
        before = set(planned)
        del planned[:]
        found = route(graph, "cuda", RouteOptions(device="h200", code=False, **options)).regions
        again = len(before.intersection(planned))
        planned.extend(before)
        return [bool(r.plan.unordered) for r in found], again

    assert routed(force=True) == ([False], 0) and planned
    assert routed(force=False)[1] == 0
    assert routed(force=True) == ([False], 0)
    free, again = routed(force=True, deterministic=False)
    assert free == [True] and again > 0
    assert routed(force=True) == ([False], 0)


def test_choices_are_remembered_by_every_option_of_planners() -> None:
    for field in dataclasses.fields(PlannerOptions):
        other = dataclasses.replace(Options(), **{field.name: object()})
        assert config.key_of_plans(other) != config.key_of_plans(Options()), field.name

"""The route of a Graph through the rooms: regions, plan, tile program, code for a target; and the report of what was decided.

Comes in: a Graph and a platform. Goes out: ``Routed``: disjoint convex regions, each with everything its custom call needs, and the
report. Pure: the same arguments give the same result in every process (no timing, no randomness), so a plan made for a compilation
cache or on another host is the same plan.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kitsune_jax import targets
from kitsune_jax.graph import Graph
from kitsune_jax.planning.machines import Machine, machine_for
from kitsune_jax.planning.plan import Plan
from kitsune_jax.planning.planner import Infeasible, plan
from kitsune_jax.program import TileProgram, build
from kitsune_jax.regions import Chosen, select
from kitsune_jax.report.build import build_report
from kitsune_jax.report.model import Report
from kitsune_jax.streams import Region

if TYPE_CHECKING:
    import numpy as np


@dataclasses.dataclass(frozen=True)
class PlannedRegion:
    """A region with its plan, its tile program and, where the platform has a target here, its code (``attribute``)."""

    name: str
    region: Region
    plan: Plan
    program: TileProgram
    platform: str
    attribute: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Routed:
    regions: tuple[PlannedRegion, ...]
    report: Report


def route(graph: Graph, platform: str, *, force: bool = False, deterministic: bool = True, device: str | None = None) -> Routed:
    """Decide which ops of ``graph`` become pipelines on ``platform`` ("cpu" or "cuda"), and make them.

    ``device`` names a machine model ("h200", "avx512bf16-2", ...); None is the one at hand. Raises ``ValueError`` for an unknown
    one.
    """
    machine = machine_for(platform, device)

    def supports(i: int) -> str | None:
        op = graph.ops[i]
        return targets.supports(platform, op, [graph.values[v] for v in op.inputs], [graph.values[v] for v in op.outputs])

    def planner(graph: Graph, region: Region) -> Plan | str:
        try:
            return plan(graph, region, machine, deterministic=deterministic)
        except Infeasible as no:
            return str(no)

    selection = select(graph, supports, planner, force=force)
    regions: list[PlannedRegion] = []
    rejected = list(selection.rejected)
    for chosen in selection.regions:
        try:
            regions.append(_planned(graph, chosen, f"region{len(regions)}", machine))
        except targets.CannotLower as no:  # one region without code must not cost the others theirs
            rejected += [(i, str(no)) for i in chosen.region.ops]
    return Routed(tuple(regions), build_report(graph, regions, sorted(rejected), platform, machine.name))


def _planned(graph: Graph, chosen: Chosen, name: str, machine: Machine) -> PlannedRegion:
    program = build(graph, chosen.region, chosen.plan)
    code = targets.generate(machine.platform, program, name) if targets.has_target(machine.platform) else None
    return PlannedRegion(name, chosen.region, chosen.plan, program, machine.platform, code)

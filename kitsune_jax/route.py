"""The route of a Graph through the rooms: regions, plan, tile program, code for a target; and the report of what was decided.

Comes in: a Graph and a target. Goes out: ``Routed``: disjoint convex regions, each with everything its custom call needs, and the
report. Pure: the same arguments give the same result in every process (no timing, no randomness), so a plan made for a compilation
cache or on another host is the same plan. An error while one region is formed, planned or generated costs that region its pipeline
and is handed on as a ``Failure``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kitsune_jax import config, targets
from kitsune_jax.fallbacks import Failure
from kitsune_jax.graph import Graph
from kitsune_jax.planning.machine import Machine
from kitsune_jax.planning.machines import machine_for
from kitsune_jax.planning.plan import Plan
from kitsune_jax.planning.planner import Infeasible, plan
from kitsune_jax.profile import store as profiles
from kitsune_jax.program import Program, TileProgram, assemble, build
from kitsune_jax.regions import Chosen, ChosenFollower, joined, select
from kitsune_jax.regions.isolated import isolated
from kitsune_jax.report.build import build_report
from kitsune_jax.report.model import Report
from kitsune_jax.streams import Region

_REGION = "region"


@dataclasses.dataclass(frozen=True)
class PlannedFollower:
    """What runs in a later phase of a region's call, over a stream space of its own."""

    phase: int
    region: Region
    plan: Plan


@dataclasses.dataclass(frozen=True)
class PlannedRegion:
    """A region with its plan, the program of its call and, where the target can execute it here, its code.

    ``region`` is all of the call: where there are ``followers``, its operands, results and ops are theirs too. Its stream space and
    ``plan`` are those of the first phase.
    """

    name: str
    region: Region
    plan: Plan
    program: Program
    target: str
    code: Any
    followers: tuple[PlannedFollower, ...] = ()


@dataclasses.dataclass(frozen=True)
class Routed:
    """Planned regions, and for every other op of the graph why it is left to XLA: a decision, or one of the ``failures``."""

    regions: tuple[PlannedRegion, ...]
    report: Report
    rejected: tuple[tuple[int, str], ...] = ()
    failures: tuple[Failure, ...] = ()


def route(
    graph: Graph,
    target: str,
    *,
    force: bool = False,
    device: str | None = None,
    code: bool = True,
    strict: bool = False,
) -> Routed:
    """Decide which ops of ``graph`` become pipelines on ``target`` ("cpu", "cuda" or "emulator"), and make them.

    ``device`` names a machine model ("h200", "avx512bf16-2", ...); None is the one at hand. ``code``: compile the regions, where
    the target can. ``strict``: raise an error of ours instead of doing without the region. Raises ``ValueError`` for an unknown
    target or device.
    """
    platform = targets.machine_platform(target)
    machine = machine_for(platform, device or targets.default_device(target))
    failures: list[Failure] = []

    def failed(error: Exception, ops: Sequence[int]) -> str:
        if strict:
            raise error
        failures.append(Failure.of(error, f"the pipeline around {_heaviest(graph, ops)}"))
        return failures[-1].told

    def supports(i: int) -> str | None:
        op = graph.ops[i]
        try:
            return targets.supports(target, op, [graph.values[v] for v in op.inputs], [graph.values[v] for v in op.outputs])
        except Exception as error:
            return failed(error, (i,))

    def search(graph: Graph, region: Region) -> Plan | str:
        def accept(candidate: Plan) -> str | None:
            return targets.check(target, build(graph, region, candidate), candidate, _REGION)

        try:
            checked = accept if targets.checks_plans(target) else None
            return plan(graph, region, machine, accept=checked)
        except Infeasible as no:
            return str(no)

    known: dict[tuple[Graph, Region], Plan | str] = {}

    def planner(graph: Graph, region: Region) -> Plan | str:
        try:
            if 2 * len(region.ops) > len(graph.ops):
                return search(graph, region)  # there is no other like it
            found = isolated(graph, region)
            if found.key not in known:
                known[found.key] = search(*found.key)
            planned = known[found.key]
            return planned if isinstance(planned, str) else found.in_the_whole(planned)
        except Exception as error:
            return failed(error, region.ops)

    selection = select(graph, supports, planner, force=force, several_phases=targets.runs_phases(target), failed=failed)
    regions: list[PlannedRegion] = []
    rejected = list(selection.rejected)
    executable = code and targets.has_target(target)

    def attempt(k: int) -> PlannedRegion | Exception:
        try:
            return _planned(graph, selection.regions[k], f"{_REGION}{k}", target, machine, executable)
        except Exception as error:
            return error

    numbers = range(len(selection.regions))
    if executable and targets.compiles(target) and len(numbers) > 1:
        with ThreadPoolExecutor(min(config.num_threads(), len(numbers))) as pool:  # compilers run beside each other
            made = list(pool.map(attempt, numbers))
    else:
        made = [attempt(k) for k in numbers]
    for chosen, result in zip(selection.regions, made, strict=True):
        if isinstance(result, PlannedRegion):
            regions.append(result)
        elif isinstance(result, targets.CannotLower):  # one region without code must not cost the others theirs
            rejected += [(i, str(result)) for i in chosen.ops]
        else:
            rejected += [(i, failed(result, chosen.ops)) for i in chosen.ops]
    notes: tuple[str, ...] = ()
    if not device:
        notes = profiles.notes() if target == "cpu" else targets.notes(target)
    report = build_report(graph, regions, sorted(rejected), platform, machine.name, notes)
    return Routed(tuple(regions), report, tuple(sorted(rejected)), tuple(dict.fromkeys(failures)))


def without(graph: Graph, routed: Routed, reasons: Mapping[str, str]) -> Routed:
    """``routed`` without the regions named in ``reasons``, whose ops are left to XLA for the reason given."""
    if not reasons:
        return routed
    kept = tuple(r for r in routed.regions if r.name not in reasons)
    gone = [(i, reasons[r.name]) for r in routed.regions if r.name in reasons for i in r.region.ops]
    rejected = tuple(sorted((*routed.rejected, *gone)))
    told = routed.report
    report = build_report(graph, kept, rejected, told.platform, told.machine, told.notes)
    return dataclasses.replace(routed, regions=kept, report=report, rejected=rejected)


def _heaviest(graph: Graph, ops: Sequence[int]) -> str:
    """What the reader knows a region by: its first matrix product, or else its first op, and that one's source line."""
    op = graph.ops[max(ops, key=lambda i: (graph.ops[i].kind == "dot_general", -i))]
    return f"{op.label or op.kind} ({op.source or 'no source line'})"


def _planned(graph: Graph, chosen: Chosen, name: str, target: str, machine: Machine, executable: bool) -> PlannedRegion:
    program = build(graph, chosen.region, chosen.plan)
    heaviest = max(chosen.region.ops, key=lambda i: (graph.ops[i].kind == "dot_general", -i))
    title = f"{name} ({graph.ops[heaviest].source})"
    built: dict[tuple[Graph, Region], TileProgram] = {}
    followers, later = [], []
    for follower in chosen.followers:
        plan = _follower_plan(follower, machine)
        followers.append(PlannedFollower(follower.phase, follower.region, plan))
        later.append((follower.phase, _follower(graph, follower, plan, built), follower.region.inputs, follower.region.outputs))
    whole = joined(graph, chosen.region, chosen.followers) if followers else chosen.region
    first = (0, program, chosen.region.inputs, chosen.region.outputs)
    call = assemble([first, *later], whole.inputs, whole.outputs)
    made = targets.generate(target, call, chosen.plan, title) if executable else None
    return PlannedRegion(name, whole, chosen.plan, call, target, made, tuple(followers))


def _follower_plan(chosen: ChosenFollower, machine: Machine) -> Plan:
    return dataclasses.replace(chosen.plan, seconds=max(0.0, chosen.plan.seconds - machine.call_seconds))  # no call of its own


def _follower(graph: Graph, chosen: ChosenFollower, plan: Plan, built: dict[tuple[Graph, Region], TileProgram]) -> TileProgram:
    """Equal followers (the updates of parameters of one shape) have one program, in which ops are numbered by the follower."""
    found = isolated(graph, chosen.region)
    if found.key not in built:
        built[found.key] = build(*found.key, found.in_itself(plan))
    return built[found.key]

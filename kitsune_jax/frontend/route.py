"""From a Graph to planned regions with code: select regions, plan them, build tile programs, generate code for a target.

Comes in: a Graph and a target. Goes out: ``Routed``: disjoint convex regions, each with everything that its custom call needs, and
the report. Invariants: the same arguments give the same result in every process (no timing, no randomness), so a plan made for a
compilation cache or on another host is the same plan. An error in one region costs only that region its pipeline, and is returned
as a ``Failure``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kitsune_jax import _compat, config, targets
from kitsune_jax.config import Options
from kitsune_jax.errors import Failure
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.graph import Graph, Op
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import all_reduce_seconds
from kitsune_jax.planning.plan import Infeasible, Machine, Phase, Plan, ProgramContext
from kitsune_jax.planning.streams import Region
from kitsune_jax.program.build import assemble, build
from kitsune_jax.program.ir import Program, TileProgram
from kitsune_jax.regions.joining import Chosen, overlap_gain, region_of_call
from kitsune_jax.regions.select import Selection, select
from kitsune_jax.report.build import HOLD_BODIES, build_report, op_bytes, op_flops
from kitsune_jax.report.render import Report
from kitsune_jax.targets import Evaluate, Target, order_of_constants

# --- a region as a graph of its own, so that equal regions are planned and generated once -----------------------------------------


class RegionKey:
    """A region of ``graph``, or of the graph at hand (``None``), as a key. Its hash takes time in proportion to the ops, and is
    computed once."""

    __slots__ = ("_hash", "graph", "region")

    def __init__(self, graph: Graph | None, region: Region):
        self.graph, self.region, self._hash = graph, region, hash((graph, region))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RegionKey) or self._hash != other._hash:
            return False
        return self.region == other.region and self.graph == other.graph


@dataclasses.dataclass(frozen=True)
class Isolated:
    """A region as a graph of its own, numbered from 0 in the old order and without source lines.

    ``ops`` and ``values``: the numbers of its ops and values in the whole graph. Two regions with equal ``key`` have equal plans,
    but for these numbers.
    """

    graph: Graph
    region: Region
    ops: tuple[int, ...]
    values: tuple[int, ...]

    @functools.cached_property
    def key(self) -> RegionKey:
        return RegionKey(self.graph, self.region)

    def in_whole_graph(self, plan: Plan) -> Plan:
        """``plan``, made for this graph, in the numbers of the whole graph."""
        return _renamed(plan, dict(enumerate(self.ops)), dict(enumerate(self.values)))

    def in_own_graph(self, plan: Plan) -> Plan:
        """``plan``, made for the whole graph, in the numbers of this one."""
        return _renamed(plan, {i: k for k, i in enumerate(self.ops)}, {v: k for k, v in enumerate(self.values)})


def _renamed(plan: Plan, ops: dict[int, int], values: dict[int, int]) -> Plan:
    return dataclasses.replace(
        plan,
        stages=tuple(dataclasses.replace(s, ops=tuple(ops[i] for i in s.ops)) for s in plan.stages),
        queues=tuple(dataclasses.replace(q, value=values[q.value]) for q in plan.queues),
        order=None if plan.order is None else values[plan.order],
        unordered=tuple(ops[i] for i in plan.unordered),
        blocks=None if plan.blocks is None else (values[plan.blocks[0]], *plan.blocks[1:]),
    )


def isolate(graph: Graph, region: Region) -> Isolated:
    """``region`` as a graph of its own."""
    ops = tuple(sorted(region.ops))
    touched = {v for i in ops for v in (*graph.ops[i].inputs, *graph.ops[i].outputs)}
    values = tuple(sorted(touched.union(region.inputs, region.outputs)))
    number = {v: k for k, v in enumerate(values)}
    place = {i: k for k, i in enumerate(ops)}

    def renumbered(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([number[v] for v in ids])

    own = tuple(
        Op(op.kind, renumbered(op.inputs), renumbered(op.outputs), op.params, label=op.label, body=op.body)
        for op in (graph.ops[i] for i in ops)
    )
    return Isolated(
        Graph(tuple(graph.values[v] for v in values), renumbered(region.inputs), renumbered(region.outputs), own),
        dataclasses.replace(
            region,
            ops=tuple(place[i] for i in region.ops),
            labels=tuple((number[v], axes) for v, axes in region.labels if v in number),
            inputs=renumbered(region.inputs),
            outputs=renumbered(region.outputs),
            sinks=tuple(place[i] for i in region.sinks),
            recomputed=tuple(place[i] for i in region.recomputed),
        ),
        ops,
        values,
    )


# --- the route --------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StreamOrder:
    """The order by the indices ``ids`` (a graph value) into a table of ``n`` rows."""

    ids: int
    n: int


@dataclasses.dataclass(frozen=True)
class PlannedRegion:
    """A region with its plan, the program of its call and, where the target can execute it here, its code.

    ``region`` is the whole call: its operands, results and ops are those of all ``phases``, its stream space is that of the first.
    The parts of ``program`` are the phases, in order. ``orders``: the last operands of ``program``, made from indices before the
    call; these indices are the last of the region's inputs, unless they are among the others.
    """

    name: str
    region: Region
    phases: tuple[Phase, ...]
    program: Program
    target: str
    code: Any
    orders: tuple[StreamOrder, ...] = ()

    @property
    def plan(self) -> Plan:
        """The plan of the first phase."""
        return self.phases[0].plan

    @property
    def seconds(self) -> float:
        """The modelled time of the call."""
        return sum(phase.plan.seconds for phase in self.phases)

    @property
    def modelled_gain(self) -> float:
        """XLA's modelled time for the same operators, divided by the call's."""
        return sum(phase.plan.baseline_seconds for phase in self.phases) / max(self.seconds, 1e-12)

    def call(
        self, args: Sequence[Any], out_avals: Sequence[Any], evaluate: Evaluate, known: Callable[[int], np.ndarray | None]
    ) -> list[Any]:
        """Bind the custom call on ``args``, the inputs of the region; one result per aval. ``known``: the array that a value of the
        graph is in every call, if there is one: the order by such indices is a constant too. Raises ``ValueError`` for a region
        that was planned without code."""
        if self.code is None:
            raise ValueError("the region was planned without code: it cannot be called")
        target, given = targets.get(self.target), dict(zip(self.region.inputs, args, strict=True))
        orders = [
            target.order(given[order.ids], order.n) if ids is None else _compat.constant(order_of_constants(ids, order.n))
            for order, ids in ((order, known(order.ids)) for order in self.orders)
        ]
        own = args[: self.program.operands - len(orders)]
        return target.emit(self.code, self.program, [*own, *orders], out_avals, evaluate)


@dataclasses.dataclass(frozen=True)
class Routed:
    """Planned regions, and for every other op of the graph the reason why it is left to XLA: a decision, or one of ``failures``.

    ``machine``: the model that they were planned for. ``xla_seconds``: the modelled time of each op in XLA's code, for a plan that
    is reported and not run.
    """

    regions: tuple[PlannedRegion, ...]
    report: Report
    rejected: tuple[tuple[int, str], ...] = ()
    failures: tuple[Failure, ...] = ()
    machine: Machine | None = None
    xla_seconds: Mapping[int, float] | None = None


@dataclasses.dataclass(frozen=True)
class RouteOptions(Options):
    """How a graph is routed: the options of its function, and what the lowering adds.

    ``device``: a machine model ("h200", "avx512bf16-2", ...); None is the one at hand. ``code``: compile the regions, if the target
    can. ``merge``: consecutive regions become phases of one call, if the target runs such calls. ``body``: the graph is a step of a
    loop that XLA runs. ``xla_factor``: XLA's modelled times are multiplied by it. ``left``: a reason to leave all to XLA.
    ``devices``: that run the program at the same time. ``stores_least``: calls compute cheap values again that they could read from
    others, also where that takes longer: of a program of one device among several.
    """

    device: str | None = None
    code: bool = True
    merge: bool = True
    body: bool = False
    xla_factor: float = 1.0
    left: str = ""
    devices: int = 1
    stores_least: bool = False

    @staticmethod
    def of(options: Options, **others: Any) -> RouteOptions:
        """``options`` of a function, with ``others`` that the lowering adds."""
        return RouteOptions(**{**{f.name: getattr(options, f.name) for f in dataclasses.fields(options)}, **others})


_AT_HAND = RouteOptions()


def route(graph: Graph, target: str, options: RouteOptions = _AT_HAND) -> Routed:
    """Decide which ops of ``graph`` become pipelines on ``target`` ("cpu", "cuda" or "emulator"), and make them.

    Raises ``ValueError`` for an unknown target or device.
    """
    executor = targets.get(target)
    machine = executor.machine(options.device)
    program = executor.program_context(graph, machine, config.planner_options(options), options.body)
    known = _known_plans(graph, target, machine, program, (config.cuda_arch(), config.cuda_avoid()))
    failed = _Failures(graph, options.strict)
    search = _TargetSearch(graph, executor, machine, program, failed, options, known.plans)
    capabilities = executor.capabilities
    capabilities = dataclasses.replace(capabilities, stores_least=options.stores_least, workers=machine.workers)
    if not (options.merge and capabilities.runs_phases):
        capabilities = dataclasses.replace(capabilities, most_merged=1)
    asked = dataclasses.replace(options, code=False), capabilities
    chosen = known.selections.get(asked)
    if chosen is None:
        with executor.search():
            chosen = select(
                graph,
                (lambda _: options.left) if options.left else search.supports,
                search.plan,
                capabilities,
                force=options.force,
                merge_phases=search.merge_phases,
                fresh=program.fresh_seconds,
                failed=failed,
            )
        if not failed.seen:
            known.selections[asked] = chosen
    made = _make_calls(graph, chosen.regions, executor, machine, generate=options.code and executor.available())
    rejected = list(chosen.rejected)
    for call, result in made:
        if isinstance(result, targets.CannotLower):  # a decision of the target
            rejected += [(i, str(result)) for i in call.ops]
        elif isinstance(result, Exception):
            rejected += [(i, failed(result, call.ops)) for i in call.ops]
    regions = tuple(_with_xla_times(result, 1 / options.xla_factor) for _, result in made if isinstance(result, PlannedRegion))
    rejected = _one_reason_per_op(rejected, regions)
    notes = executor.notes() if options.device is None else ()
    times = None if options.code else _seconds_of_ops(graph, executor, machine, program)
    report = build_report(graph, regions, sorted(rejected), machine, notes, times)
    return Routed(regions, report, tuple(sorted(rejected)), tuple(dict.fromkeys(failed.seen)), machine, times)


def _seconds_of_ops(graph: Graph, target: Target[Any, Any, Any], machine: Machine, program: ProgramContext) -> dict[int, float]:
    """Modelled seconds of each op of ``graph`` in XLA's code, for the report.

    The ops of a kernel share its time in proportion to their operations. An op that the model does not know takes the time to move
    its operands and results or, if its operations are known, to compute them; loops and branches take none, because their bodies
    have reports of their own.
    """
    known = [i for i, op in enumerate(graph.ops) if op.kind != "opaque" and op.label not in HOLD_BODIES]
    found = dict.fromkeys(known, 0.0)
    for ops, seconds in target.xla_kernels(graph, known, machine, program) if known else ():
        work = {i: 1 + op_flops(graph, i) for i in ops}
        each = seconds / sum(work.values())
        for i, flops in work.items():
            found[i] += each * flops
    for i, op in enumerate(graph.ops):
        if op.kind != "opaque" or op.label in HOLD_BODIES or dict(op.params).get("flops") == 0:
            continue
        dtype = graph.values[op.inputs[0]].dtype if op.inputs else "float32"
        compute = op_flops(graph, i) / (machine.workers * machine.rate(machine.tensor_rates, dtype))
        found[i] = max(compute, op_bytes(graph, i) / machine.dram_bandwidth)
    return found


@dataclasses.dataclass
class _Failures:
    """Errors of this package: the ops around an error are left to XLA, and it is appended to ``seen``. ``strict``: it is raised."""

    graph: Graph
    strict: bool
    seen: list[Failure] = dataclasses.field(default_factory=list)

    def __call__(self, error: Exception, ops: Sequence[int]) -> str:
        """Record ``error``. Returns the reason for leaving ``ops`` to XLA."""
        if self.strict:
            raise error
        op = self.graph.ops[_heaviest(self.graph, ops)]
        self.seen.append(Failure.of(error, f"the pipeline around {op.label or op.kind} ({op.source or 'no source line'})"))
        return self.seen[-1].report_reason


@dataclasses.dataclass
class _TargetSearch:
    """The questions that the choice of regions asks the target. ``known``: plans of regions in XLA's modelled time; equal regions
    are isolated, and planned once."""

    graph: Graph
    target: Target[Any, Any, Any]
    machine: Machine
    program: ProgramContext
    failed: _Failures
    options: RouteOptions
    known: dict[RegionKey, Plan | str] = dataclasses.field(default_factory=dict)

    def supports(self, i: int) -> str | None:
        op, values = self.graph.ops[i], self.graph.values
        try:
            return self.target.supports(op, [values[v] for v in op.inputs], [values[v] for v in op.outputs])
        except Exception as error:
            return self.failed(error, (i,))

    def merge_phases(self, chosen: Chosen) -> Chosen | str:
        """``chosen`` with the plans that its regions have as one call, or the reason why the target does not run them as one."""
        call = self.machine.call_seconds  # a later phase does not pay them
        if self.options.network is not None and self.options.devices > 1:
            reduced = functools.partial(all_reduce_seconds, devices=self.options.devices, network=self.options.network)
            if overlap_gain(self.graph, chosen, reduced, call, self.program.fresh_seconds) > 0:
                return "all-reduces of its first results run beside the rest, which is another call"
        plans = [p.plan if k == 0 else _subtract_seconds(p.plan, call) for k, p in enumerate(chosen.phases)]
        if chosen.apart:
            apart = sum(p.plan.seconds - call * (k > 0) for c in chosen.apart for k, p in enumerate(c.phases))
        else:  # followers, which would be left to XLA
            apart = plans[0].seconds + sum(plan.baseline_seconds for plan in plans[1:])
        found: Sequence[Plan] | str
        try:
            found = self.target.merge_phases(
                lambda: _call_of(self.graph, chosen, (), "", self.target.name, self.machine).program,
                plans,
                self.machine,
                self.program,
                math.inf if self.options.force else apart,
            )
        except Exception as error:
            return self.failed(error, chosen.ops)
        if isinstance(found, str) or found is plans:
            return found if isinstance(found, str) else chosen
        later = [_subtract_seconds(plan, -call) for plan in found[1:]]
        phases = [dataclasses.replace(p, plan=plan) for p, plan in zip(chosen.phases, (found[0], *later), strict=True)]
        return dataclasses.replace(chosen, phases=tuple(phases))

    def plan(self, graph: Graph, region: Region) -> Plan | str:
        """The plan of ``region``, or the reason why it has none."""
        try:
            if 2 * len(region.ops) > len(graph.ops):
                return self._plan(graph, region, RegionKey(None, region))  # no other region can be equal to it
            own = isolate(graph, region)
            plan = self._plan(own.graph, own.region, own.key)
            return plan if isinstance(plan, str) else own.in_whole_graph(plan)
        except Exception as error:
            return self.failed(error, region.ops)

    def _plan(self, graph: Graph, region: Region, key: RegionKey) -> Plan | str:
        factor = self.options.xla_factor
        plan = self.known.get(key)
        if plan is None:
            try:
                plan = self.target.plan(graph, region, self.machine, self.program)
            except Infeasible as no:
                plan = str(no)
            self.known[key] = plan
        return plan if isinstance(plan, str) or factor == 1.0 else _scaled(plan, factor)


@dataclasses.dataclass(frozen=True, eq=False)
class _Known:
    """``plans`` of regions, and ``selections`` by the options and capabilities that they were made with, whether with code or
    without."""

    plans: dict[RegionKey, Plan | str] = dataclasses.field(default_factory=dict)
    selections: dict[tuple[RouteOptions, TargetCapabilities], Selection] = dataclasses.field(default_factory=dict)


@functools.lru_cache(maxsize=16)
def _known_plans(graph: Graph, target: str, machine: Machine, program: ProgramContext, settings: Sequence[Any]) -> _Known:
    """What is known of ``graph``, which all choices between regions share: the report's, and those that are timed. ``settings``: on
    which plans depend beside the machine."""
    return _Known()


def _scaled(plan: Plan, factor: float) -> Plan:
    return dataclasses.replace(plan, baseline_seconds=plan.baseline_seconds * factor)


def _with_xla_times(region: PlannedRegion, factor: float) -> PlannedRegion:
    """``region`` with XLA's modelled times multiplied by ``factor``."""
    if factor == 1.0:
        return region
    phases = tuple(dataclasses.replace(p, plan=_scaled(p.plan, factor)) for p in region.phases)
    return dataclasses.replace(region, phases=phases)


def _one_reason_per_op(rejected: Iterable[tuple[int, str]], regions: Sequence[PlannedRegion]) -> list[tuple[int, str]]:
    """``rejected`` with one reason per op, without the ops that some region computes (several regions may compute an op)."""
    inside = {i for r in regions for i in r.region.ops}
    return list({i: (i, why) for i, why in rejected if i not in inside}.values())


def remove_regions(graph: Graph, routed: Routed, reasons: Mapping[str, str]) -> Routed:
    """``routed`` without the regions named in ``reasons``, whose ops are left to XLA for the reason given."""
    if not reasons:
        return routed
    kept = tuple(r for r in routed.regions if r.name not in reasons)
    gone = [(i, reasons[r.name]) for r in routed.regions if r.name in reasons for i in r.region.ops]
    rejected = tuple(sorted(_one_reason_per_op((*routed.rejected, *gone), kept)))
    assert routed.machine is not None
    report = build_report(graph, kept, rejected, routed.machine, routed.report.notes, routed.xla_seconds)
    return dataclasses.replace(routed, regions=kept, report=report, rejected=rejected)


def _make_calls(
    graph: Graph, chosen: Sequence[Chosen], target: Target[Any, Any, Any], machine: Machine, *, generate: bool
) -> list[tuple[Chosen, PlannedRegion | Exception]]:
    """The ``chosen`` calls, each made, or with the error that kept it from being made, which must not cost the others their code.
    A call merged of several that cannot be made is made as several calls again."""
    readers = _Readers(chosen)

    def attempt(call: Chosen, name: str) -> list[tuple[Chosen, PlannedRegion | Exception]]:
        try:
            wanted = readers.wanted(call.regions)
            made = _call_of(graph, call, wanted, name, target.name, machine)
            if generate:
                source = graph.ops[_heaviest(graph, call.region.ops)].source
                plans = tuple(p.plan for p in made.phases)
                made = dataclasses.replace(made, code=target.generate(made.program, plans, f"{name} ({source})"))
            return [(call, made)]
        except Exception as error:
            if not call.apart:
                return [(call, error)]
            return [result for k, one in enumerate(call.apart) for result in attempt(one, f"{name}.{k}")]

    names = [f"region{k}" for k in range(len(chosen))]
    if not (generate and target.capabilities.compiles and len(chosen) > 1):
        return [result for call, name in zip(chosen, names, strict=True) for result in attempt(call, name)]
    with ThreadPoolExecutor(min(config.num_threads(), len(chosen))) as pool:  # compilers run at the same time
        return [result for results in pool.map(attempt, chosen, names) for result in results]


class _Readers:
    """The regions of ``chosen`` calls that read each value. Regions are numbered, because the hash of one takes time in proportion
    to its ops."""

    def __init__(self, chosen: Sequence[Chosen]):
        self._number: dict[Region, int] = {}
        self._readers: dict[int, set[int]] = {}
        for call in chosen:
            for region in call.regions:
                number = self._number.setdefault(region, len(self._number))
                for v in region.inputs:
                    self._readers.setdefault(v, set()).add(number)

    def wanted(self, regions: Sequence[Region]) -> list[int]:
        """The results of ``regions`` that are not read by these regions alone."""
        inside = {self._number.get(region) for region in regions}
        return [v for region in regions for v in region.outputs if not inside.issuperset(self._readers.get(v, ()))]


def _heaviest(graph: Graph, ops: Sequence[int]) -> int:
    """The op that a report names a region by: its first matrix product, or else its first op."""
    return max(ops, key=lambda i: (graph.ops[i].kind == "dot_general", -i))


def _call_of(graph: Graph, chosen: Chosen, wanted: Sequence[int], name: str, target: str, machine: Machine) -> PlannedRegion:
    """A call without code. ``wanted``: its results that others read."""
    orders: dict[StreamOrder, int] = {}
    built: dict[RegionKey, TileProgram] = {}
    phases: list[Phase] = []
    parts = []
    for phase in chosen.phases:
        region, plan = phase.region, phase.plan
        if phases:  # no call of its own
            plan = _subtract_seconds(plan, machine.call_seconds)
        order = _order_of(graph, region, plan)
        # An order is read by a number that no value of the graph has.
        reads = region.inputs if order is None else (*region.inputs, orders.setdefault(order, -1 - len(orders)))
        program = _build_later_phase(graph, region, plan, built) if phases else build(graph, region, plan)
        phases.append(dataclasses.replace(phase, plan=plan))
        parts.append((phase.number, program, reads, region.outputs))
    whole = region_of_call(graph, chosen.regions, wanted)
    call = assemble(parts, (*whole.inputs, *orders.values()), whole.outputs)
    ids = tuple(dict.fromkeys(order.ids for order in orders if order.ids not in whole.inputs))
    whole = dataclasses.replace(whole, inputs=(*whole.inputs, *ids))
    return PlannedRegion(name, whole, tuple(phases), call, target, None, tuple(orders))


def _subtract_seconds(plan: Plan, seconds: float) -> Plan:
    return dataclasses.replace(plan, seconds=max(0.0, plan.seconds - seconds))


def _order_of(graph: Graph, region: Region, plan: Plan) -> StreamOrder | None:
    """The order in which ``plan`` streams: by the indices of the largest table that rows are added to."""
    if plan.order is None:
        return None
    folded = [graph.ops[i] for i in region.sinks if plan.order in graph.ops[i].inputs[1:]]
    return StreamOrder(plan.order, max(op["n"] for op in folded if OPS[op.kind].family == "scatter"))


def _build_later_phase(graph: Graph, region: Region, plan: Plan, built: dict[RegionKey, TileProgram]) -> TileProgram:
    """The program of a later phase, its ops numbered by the region. Equal phases (layers, updates of equal shapes) share one."""
    found = isolate(graph, region)
    if found.key not in built:
        built[found.key] = build(found.graph, found.region, found.in_own_graph(plan))
    return built[found.key]

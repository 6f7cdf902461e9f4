"""The lowering of ``kitsune_pipeline``: capture, plan, schedule, and evaluate with a custom call in the place of each region.

In: ``call_jaxpr``, ``Options``, JAX's lowering context. Out: MLIR values. Invariants: results are those of ``call_jaxpr``; every
value is defined before it is read; effects keep their order; and an error of this package never becomes an error of the user's
program: the part that failed lowers as plain HLO, and ``fallbacks`` records it (unless ``strict``).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import gc
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from kitsune_jax import _compat, config, targets
from kitsune_jax.capture.edit import Captured
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import FEW_ROWS, OF_NEW_ROWS, RewriteContext, apply_rewrites
from kitsune_jax.config import Options
from kitsune_jax.errors import Failure, NotPipelined, record
from kitsune_jax.frontend.route import PlannedRegion, Routed, RouteOptions, remove_regions, route
from kitsune_jax.ops.graph import Graph, Op, topological
from kitsune_jax.report.data import time_text
from kitsune_jax.report.render import Report, merge_body_reports
from kitsune_jax.tuning import choice as tuning
from kitsune_jax.tuning.inputs import why_not_timed

# --- the order in which a function's ops and regions are evaluated ----------------------------------------------------------------


class _Border(Protocol):
    @property
    def ops(self) -> tuple[int, ...]: ...
    @property
    def inputs(self) -> tuple[int, ...]: ...
    @property
    def outputs(self) -> tuple[int, ...]: ...


class Placed(Protocol):
    """The part of a planned region that ``schedule`` reads."""

    @property
    def name(self) -> str: ...
    @property
    def region(self) -> _Border: ...


R = TypeVar("R", bound=Placed)

DISSOLVED = (
    "a side effect lies in the middle of this region, so it cannot run as one call: to pipeline these operators, move the print, "
    "callback or other effect before or after them"
)


def schedule(graph: Graph, effects: Sequence[bool], regions: Sequence[R]) -> tuple[list[int | R], list[R]]:
    """Nodes (an op's index, or a region) in an order that can be evaluated, and the regions that were dissolved into their ops.

    ``effects[i]``: op ``i`` has a side effect. An op of a region is also a node of its own if others read its result and the region
    does not return it (recomputing a broadcast is cheaper than storing it). A region that would have to run both before and after
    an op, or an effect, is dissolved.
    """
    kept, dissolved = list(regions), list[R]()
    while True:
        order, stuck = _ordered(graph, effects, kept)
        if not stuck:
            return order, dissolved
        dissolved.append(stuck[0])
        kept = [r for r in kept if r is not stuck[0]]


def _ordered(graph: Graph, effects: Sequence[bool], regions: Sequence[R]) -> tuple[list[int | R], list[R]]:
    """Nodes, lowest op first, and the regions that depend on themselves through other nodes."""
    nodes, needs = _dependencies(graph, effects, regions)
    rank = [node if isinstance(node, int) else max(node.region.ops) for node in nodes]
    order = topological(needs, rank)
    done = set(order)
    return [nodes[k] for k in order], [r for k, r in enumerate(regions) if k not in done]


def _dependencies(graph: Graph, effects: Sequence[bool], regions: Sequence[R]) -> tuple[list[int | R], list[set[int]]]:
    """The nodes (regions first), and for each the nodes that must come before it."""
    producers = graph.producers()
    owner = {i: k for k, r in enumerate(regions) for i in r.region.ops}
    given = {v: k for k, r in enumerate(regions) for v in r.region.outputs}
    nodes: list[int | R] = [*regions]
    reads: list[Sequence[int]] = [r.region.inputs for r in regions]
    number: dict[int, int] = {}

    def add(i: int) -> None:
        number[i] = len(nodes)
        nodes.append(i)
        reads.append(graph.ops[i].inputs)

    for i in range(len(graph.ops)):
        if i not in owner:
            add(i)
    wanted = [v for values in (*reads, graph.outputs) for v in values]
    while wanted:
        v = wanted.pop()
        made_by = producers.get(v)
        if made_by is not None and v not in given and made_by not in number:
            add(made_by)  # an op of a region that does not return it: computed again, on its own
            wanted.extend(graph.ops[made_by].inputs)
    needs: list[set[int]] = []
    for k, values in enumerate(reads):
        before = {given[v] if v in given else number[producers[v]] for v in values if v in producers}
        needs.append(before - {k} if k < len(regions) else before)
    previous: int | None = None
    for i in sorted(number):
        if effects[i]:
            if previous is not None:
                needs[number[i]].add(previous)
            previous = number[i]
    return nodes, needs


# --- garbage collection while planning --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Switch Python's cyclic garbage collector off, unless the code inside turns it on.

    A plan is many small objects that all live until it is made. Each collection meanwhile walks all objects of JAX and the user and
    finds nothing: a fifth of the time to lower a deep network's gradient.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# --- the choice between a captured function and the same with long reductions split -----------------------------------------------

Nodes = TypeVar("Nodes")


def choose_split(
    captured: Captured, plan: Callable[[Captured], tuple[Routed, Nodes]], target: str, options: RouteOptions
) -> tuple[Captured, Routed, Nodes]:
    """``captured``, or the same with long reductions of few rows split where the model finds that faster, and the result of
    ``plan`` for it."""
    planned, nodes = plan(captured)
    split = split_few_rows(captured, target, options.device)
    if split is captured:
        return captured, planned, nodes
    in_one = modelled_seconds(captured.graph, planned, target, options)
    split_planned, split_nodes = plan(split)
    if modelled_seconds(split.graph, split_planned, target, options) < in_one:
        return split, split_planned, split_nodes
    return captured, planned, nodes


def split_few_rows(captured: Captured, target: str, device: str | None) -> Captured:
    """``captured`` with its long reductions of few rows split (``capture.rewrites.few_rows``): a few parts for each worker, and
    each element a row of a stream. ``captured`` itself if it has none, or the target does not split."""
    executor = targets.get(target)
    capabilities = executor.capabilities
    workers = executor.machine(device).workers if capabilities.splits_reductions else 1
    context = RewriteContext(capabilities, workers=workers)
    found = apply_rewrites(captured, FEW_ROWS, context)
    return found if found is captured or not capabilities.streams_elements else apply_rewrites(found, OF_NEW_ROWS, context)


def modelled_seconds(graph: Graph, planned: Routed, target: str, options: RouteOptions) -> float:
    """The modelled time of ``graph``: the calls of ``planned``, and XLA's time for all other ops that the model knows."""
    executor = targets.get(target)
    calls = sum(phase.plan.seconds for region in planned.regions for phase in region.phases)
    inside = {i for region in planned.regions for i in region.region.ops}
    left = [i for i, op in enumerate(graph.ops) if i not in inside and op.kind != "opaque" and not _moves_nothing(graph, op)]
    machine = executor.machine(options.device)
    return calls + executor.unpipelined_seconds(graph, left, machine, executor.program_context(graph, machine, options.body))


def _moves_nothing(graph: Graph, op: Op) -> bool:
    """Is ``op`` a change of the shape alone, for which XLA has no kernel?"""
    if op.kind != "transpose":
        return op.kind == "reshape"
    shape = graph.values[op.inputs[0]].shape
    real = [d for d in op["permutation"] if shape[d] != 1]
    return real == sorted(real)


# --- the lowering rule ------------------------------------------------------------------------------------------------------------

logger = config.logger

PRIMITIVE_NAME = "kitsune_pipeline"

_warned: set[str] = set()
_warned_lock = threading.Lock()

SHARDED = (
    "kitsune_jax: a pipelined function is lowered under jit on several devices with automatic partitioning, where XLA would gather "
    "a custom call's operands on every device. XLA compiles it without pipelines. Use jax.shard_map over all mesh axes to keep the "
    "pipelines."
)
EXPORTED = (
    "jax.export writes plain HLO, which runs where kitsune_jax is not installed; to export the pipelines, use "
    'kj.pipeline(fn, export="calls")'
)
EXPORTED_CALLS = (
    "jax.export keeps the pipelines as custom calls: pass disabled_checks to it, and install this version of kitsune_jax where the "
    "program runs"
)


@dataclasses.dataclass(frozen=True, eq=False)
class LoweredCall:
    """A call that was lowered under ``watch_calls``, and the reason why it would hold no pipelines, or ``None``."""

    call_jaxpr: Any
    obstacle: str | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Watch:
    seen: list[LoweredCall]
    elsewhere: bool


_watch: contextvars.ContextVar[_Watch | None] = contextvars.ContextVar("kitsune_jax_watch", default=None)


@contextlib.contextmanager
def watch_calls(elsewhere: bool) -> Iterator[list[LoweredCall]]:
    """In this block lower every call as plain HLO, and list the calls with the reasons why they would hold no pipelines.

    ``elsewhere``: plan for another machine, and ignore what is missing on this one.
    """
    seen: list[LoweredCall] = []
    token = _watch.set(_Watch(seen, elsewhere))
    try:
        yield seen
    finally:
        _watch.reset(token)


def lower_call(ctx: Any, *args: Any, call_jaxpr: Any, options: Options, platform: str | None) -> Any:
    """The lowering rule. ``platform`` is "cpu", "cuda", or ``None`` for every other."""
    if tuning.is_measuring():
        return _compat.lower_jaxpr(ctx, call_jaxpr, args)
    target = target_of(options, platform)
    watch = _watch.get()
    if watch is not None:
        why_not = missing_target(target)
        obstacle = (why_not if not watch.elsewhere else None) or _obstacle(ctx, call_jaxpr, options)
        watch.seen.append(LoweredCall(call_jaxpr, obstacle))
        return _compat.lower_jaxpr(ctx, call_jaxpr, args)
    obstacle = None if target is not None and targets.get(target).available() else missing_target(target)
    obstacle = obstacle or _obstacle(ctx, call_jaxpr, options)
    if obstacle is not None:
        if options.strict:
            raise NotPipelined(f"kitsune_jax: nothing was pipelined: {obstacle}")
        if obstacle is SHARDED:
            _warn_once(SHARDED, UserWarning)
        logger.debug("%s: nothing was pipelined: %s", _compat.function_name(call_jaxpr), obstacle)
        return _compat.lower_jaxpr(ctx, call_jaxpr, args)
    assert target is not None
    budget = None
    if target == platform and not options.strict and _compat.is_alone(ctx) and not _compat.is_exported(ctx):
        budget = tuning.budget_of(ctx.module_context, platform)
    return _compat.lower_jaxpr(ctx, pipelined_or_plain(call_jaxpr, options, target, budget), args)


def target_of(options: Options, platform: str | None) -> str | None:
    """The target that runs a pipeline on ``platform``: the platform's own, or the one that the options name instead of it."""
    return options.target if options.target is not None and platform == targets.INSTEAD[options.target] else platform


def missing_target(target: str | None) -> str | None:
    """The reason why ``target`` cannot run pipelines here, or ``None``. Warns of nothing."""
    if target is None:
        return f"kitsune_jax makes pipelines only for {' and '.join(targets.PLATFORMS)}"
    why_not = targets.get(target).why_not()
    return f"no pipelines can run on {target!r} here: {why_not}" if why_not else None


def _obstacle(ctx: Any, call_jaxpr: Any, options: Options) -> str | None:
    """The reason why this module can hold no pipelines, or ``None``."""
    if options.export == "plain" and _compat.is_exported(ctx):
        return EXPORTED
    if not _compat.runs_on_one_device(ctx):
        return SHARDED
    if _compat.has_symbolic_shapes(call_jaxpr):
        return "shapes are symbolic, and a plan needs numbers: lower or export the function with concrete shapes"
    return None


def pipelined_or_plain(call_jaxpr: Any, options: Options, target: str, budget: tuning.Budget | None = None) -> Any:
    """``call_jaxpr`` with custom calls in place of its regions, or unchanged if this package fails. Records what failed.

    ``budget``: the time in which plans may be compared on this machine; ``None`` leaves the choice to the model.
    Raises ``NotPipelined`` if ``options.strict`` and nothing could be pipelined of a function that has an operator.
    """
    name = _compat.function_name(call_jaxpr)
    try:
        with collector_paused():
            budget = None if options.force else budget
            as_one = budget is not None and why_not_timed(call_jaxpr) is None
            pipelined = pipelined_jaxpr(call_jaxpr, options, target, None if as_one else budget)
            if budget is not None and as_one:
                pipelined = fastest(call_jaxpr, pipelined, options, target, budget)
    except Exception as error:
        if options.strict:
            raise
        record(name, Failure.of(error, "the whole function"))
        return call_jaxpr
    for failure in pipelined.failures:
        if options.strict:
            raise RuntimeError(f"kitsune_jax could not pipeline {failure.part} of {name}: {failure.reason}\n{failure.traceback}")
        record(name, failure)
    logger.debug("%s: %s", name, pipelined.report)
    if options.strict and pipelined.report.ops_total and not pipelined.report.ops_pipelined:
        raise NotPipelined("kitsune_jax: nothing was pipelined", pipelined.report)
    return pipelined.jaxpr


# --- the choice between plans by time ---------------------------------------------------------------------------------------------

_DOUBT = 1.6  # XLA's time may be modelled this much too low


def fastest(call_jaxpr: Any, modelled: Pipelined, options: Options, target: str, budget: tuning.Budget) -> Pipelined:
    """``modelled``, or another plan of ``call_jaxpr`` that is faster on this machine, or none."""
    seen = {modelled.report.regions, ()}

    def other(name: str) -> Any:
        made = pipelined_jaxpr(call_jaxpr, options_of(name, options), target)
        if made.failures or made.report.regions in seen:
            return None
        seen.add(made.report.regions)
        return made.jaxpr

    candidates: dict[str, Callable[[], Any]] = {
        tuning.MODELLED: lambda: modelled.jaxpr if modelled.report.regions else None,
        **{name: functools.partial(other, name) for name in (tuning.OPTIMISTIC, tuning.FORCED)},
    }
    choice = tuning.choose(choice_key(call_jaxpr, options, target), call_jaxpr, candidates, targets.get(target).platform, budget)
    if choice is None:
        return modelled
    chosen = modelled
    if choice.name != tuning.MODELLED:
        chosen = pipelined_jaxpr(call_jaxpr, options_of(choice.name, options, measured_text(choice)), target)
    return dataclasses.replace(chosen, report=with_measurement(chosen.report, choice))


def _choice_of_body(body: Any, new: Any, options: Options, target: str, budget: tuning.Budget) -> tuning.Choice | None:
    """The choice between the body of a loop or branch and the same with pipelines, ``new``, in a program that cannot be timed
    as one: the number of a loop's steps may be unknown."""
    if why_not_timed(body) is not None or not hasattr(body, "consts"):  # an open jaxpr cannot be run
        return None
    candidates = {tuning.MODELLED: lambda: new}
    return tuning.choose(choice_key(body, options, target), body, candidates, targets.get(target).platform, budget)


def choice_key(call_jaxpr: Any, options: Options, target: str) -> str:
    """The key under which the choice between the plans of ``call_jaxpr`` is remembered."""
    return tuning.key_of(call_jaxpr, config.key_of_plans(options), target, targets.get(target).surroundings())


def known_choice(call_jaxpr: Any, options: Options, target: str) -> tuning.Choice | None:
    """The choice that a lowering of ``call_jaxpr`` has measured, in this process or an earlier one."""
    return tuning.known(choice_key(call_jaxpr, options, target)) if config.tune() != "off" else None


def options_of(choice: str, options: Options, measured: str = "") -> RouteOptions:
    """The options that make the plan ``choice``. ``measured``: why nothing is pipelined, if so."""
    changes: dict[str, dict[str, Any]] = {
        tuning.JIT: {"left": measured},
        tuning.OPTIMISTIC: {"xla_factor": _DOUBT},
        tuning.FORCED: {"force": True},
    }
    return dataclasses.replace(RouteOptions.of(options), **changes.get(choice, {}))


def measured_text(choice: tuning.Choice) -> str:
    """The times of a choice in words."""
    best = min((s for name, s in choice.seconds.items() if name != tuning.JIT), default=0.0)
    return (
        f"measured on this machine: {time_text(best)} with pipelines, {time_text(choice.seconds[tuning.JIT])} with jax.jit "
        f"({choice.gain:.2f}x)" + (", while other programs ran" if choice.busy else "")
    )


def with_measurement(report: Report, choice: tuning.Choice) -> Report:
    """``report`` with a note of the measured times; where nothing is pipelined they are the reasons."""
    return report if choice.name == tuning.JIT else dataclasses.replace(report, notes=(*report.notes, measured_text(choice)))


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """A jaxpr with custom calls in it, the report over it and the bodies of its loops, and the parts that a bug of ours left
    out."""

    jaxpr: Any
    report: Report
    failures: tuple[Failure, ...]


def pipelined_jaxpr(call_jaxpr: Any, options: Options, target: str, budget: tuning.Budget | None = None) -> Pipelined:
    """Capture, route and rebuild ``call_jaxpr``. ``budget``: the time in which plans of the bodies of its loops may be compared
    with ``jax.jit``.

    An error in one region or loop body is among the ``failures``, or raises if ``options.strict``; any other error raises.
    """
    found = _EvaluationResults()
    plan = planned_function(call_jaxpr, options, target, budget=budget)
    if plan.changes:
        avals = _compat.in_avals(call_jaxpr)
        rebuilt = _compat.trace_jaxpr(lambda *a: _evaluate(plan, a, options, found), avals, lower=True, like=call_jaxpr)
    else:
        _collect_results(plan, {}, found)
        rebuilt = call_jaxpr  # as it was, so that XLA compiles its inner calls once each
    return Pipelined(rebuilt, merge_body_reports(found.reports), tuple(dict.fromkeys(found.failures)))


def routed(graph: Graph, target: str, options: RouteOptions) -> Routed:
    """``route``, remembered: a network of equal layers is planned once. Everything that changes a plan is in the key."""
    return _routed(graph, target, config.key_of_plans(options), targets.get(target).surroundings())


@functools.lru_cache(maxsize=256)
def _routed(graph: Graph, target: str, options: RouteOptions, _surroundings: tuple[Any, ...]) -> Routed:
    return route(graph, target, options)


# --- evaluation -----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _EvaluationResults:
    """The report of a function and those of its loop bodies, and the failures in all of them, collected during an evaluation."""

    reports: list[Report] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class PlannedFunction:
    """A captured function, its plan, and the reports and failures of its loop bodies."""

    jaxpr: Any
    captured: Captured
    consts: Sequence[Any]
    routed: Routed
    nodes: Sequence[int | PlannedRegion]
    bodies: _EvaluationResults

    @property
    def changes(self) -> bool:
        """Would anything lower differently: a call in it or in a loop body, a rewrite that saves work, or an inner pipelined
        function that was inlined?"""
        calls = bool(self.routed.regions) or any(report.regions for report in self.bodies.reports)
        return calls or self.captured.saves or _holds_pipelines(self.jaxpr)


def _holds_pipelines(jaxpr: Any) -> bool:
    eqns = _compat.open_parts(jaxpr)[0].eqns
    return any(e.primitive.name == PRIMITIVE_NAME or any(map(_holds_pipelines, _compat.inner_jaxprs(e))) for e in eqns)


def planned_function(
    jaxpr: Any, options: Options, target: str, body: bool = False, budget: tuning.Budget | None = None
) -> PlannedFunction:
    """``jaxpr`` captured and planned, with the bodies of its loops rewritten. ``body``: ``jaxpr`` is the body of a loop.
    ``budget``: the time in which plans of bodies may be compared with ``jax.jit``."""
    bodies = _EvaluationResults()

    def with_pipelines(body: Any, options: Options, inside: _EvaluationResults) -> Any:
        plan = planned_function(body, options, target, body=True, budget=budget)
        if not plan.changes:
            _collect_results(plan, {}, inside)
            return body
        avals = _compat.in_avals(body)
        return _compat.trace_jaxpr(lambda *a: _evaluate(plan, a, options, inside), avals, lower=True, like=body)

    def rewrite(body: Any) -> Any:
        inside = _EvaluationResults()
        try:
            new = with_pipelines(body, options, inside)
            if budget is not None and new is not body:
                choice = _choice_of_body(body, new, options, target, budget)
                if choice is not None and choice.name == tuning.JIT:
                    inside = _EvaluationResults()
                    new = with_pipelines(body, options_of(choice.name, options, measured_text(choice)), inside)
            new = _compat.constants_inside(new)  # the body of an equation has no constants
        except Exception as error:
            if options.strict:
                raise
            bodies.failures.append(Failure.of(error, f"the body of a loop or branch ({_compat.function_name(body)})"))
            return body
        bodies.failures.extend(inside.failures)
        bodies.reports.extend(inside.reports)
        return _compat.as_kind_of(new, body)

    jaxpr, consts = _compat.hoist_consts(jaxpr)  # differentiation may leave constants
    captured, planned, nodes = capture_until_stable(jaxpr, rewrite, target, RouteOptions.of(options, body=body))
    bodies.failures.extend(rewrite_bodies_left_to_xla(captured, nodes))
    return PlannedFunction(jaxpr, captured, consts, planned, nodes, bodies)


def capture_until_stable(
    jaxpr: Any, rewrite: Callable[[Any], Any], target: str, options: RouteOptions
) -> tuple[Captured, Routed, list[int | PlannedRegion]]:
    """``jaxpr`` captured for ``target``, with its plan and nodes. ``rewrite``: applied to the bodies of loops that are left to XLA.

    A loop that was rewritten for a pipeline and is left to XLA all the same is captured again as its own equation: XLA runs that in
    less memory, and its body is pipelined by itself. This repeats until no such loop is left.
    """
    kept = set[Any]()
    plan = functools.partial(plan_and_schedule, target=target, options=options)
    while True:
        context = RewriteContext(targets.get(target).capabilities, options, frozenset(kept))
        whole = capture(jaxpr, rewrite, context)
        captured, planned, nodes = choose_split(whole, plan, target, options)
        left = [captured.steps[node] for node in nodes if isinstance(node, int)]
        again = {step.origin.key for step in left if step.rewritten} - kept
        if not again:
            return captured, planned, nodes
        kept |= again


def rewrite_bodies_left_to_xla(captured: Captured, nodes: Sequence[int | PlannedRegion]) -> list[Failure]:
    """Rewrite the bodies of the loops and branches among ``nodes`` that are left to XLA. Returns the failures in them."""
    left = [captured.steps[node].prepare for node in nodes if isinstance(node, int)]
    return [failure for prepare in left if prepare is not None for failure in prepare()]


def _evaluate(plan: PlannedFunction, args: Sequence[Any], options: Options, found: _EvaluationResults) -> list[Any]:
    """The results of a planned function on ``args`` (tracers), with custom calls."""
    lost: dict[str, Failure] = {}

    def failed(region: PlannedRegion, error: Exception) -> None:
        if options.strict:
            raise error
        lost[region.name] = Failure.of(error, f"the call of {region.name}")

    outs = _run_nodes(plan.captured, plan.nodes, [*plan.consts, *args], failed)
    _collect_results(plan, lost, found)
    return outs


def _collect_results(plan: PlannedFunction, lost: Mapping[str, Failure], found: _EvaluationResults) -> None:
    """Add the report and failures of ``plan`` and of its loop bodies to ``found``. ``lost``: regions whose calls failed to bind."""
    planned = remove_regions(plan.captured.graph, plan.routed, {name: failure.report_reason for name, failure in lost.items()})
    found.reports += [planned.report, *plan.bodies.reports]
    found.failures += [*plan.captured.failures, *planned.failures, *lost.values(), *plan.bodies.failures]


def plan_and_schedule(captured: Captured, target: str, options: RouteOptions) -> tuple[Routed, list[int | PlannedRegion]]:
    """The regions that will run, and the nodes in order. Regions that a side effect would split are dissolved; before that, a call
    of several phases becomes one call per phase.
    """
    effects = [step.has_effects for step in captured.steps]
    planned = routed(captured.graph, target, options)
    nodes, dissolved = schedule(captured.graph, effects, planned.regions)
    if any(len(region.phases) > 1 for region in dissolved):
        planned = routed(captured.graph, target, dataclasses.replace(options, merge=False))
        nodes, dissolved = schedule(captured.graph, effects, planned.regions)
    return remove_regions(captured.graph, planned, {region.name: DISSOLVED for region in dissolved}), nodes


def run(captured: Captured, regions: Sequence[PlannedRegion], args: Sequence[Any]) -> list[Any]:
    """Evaluate a captured function, every op by JAX and every region by its custom call. Returns the graph's outputs."""
    nodes, _ = schedule(captured.graph, [step.has_effects for step in captured.steps], regions)

    def failed(_: PlannedRegion, error: Exception) -> None:
        raise error

    return _run_nodes(captured, nodes, args, failed)


def _run_nodes(
    captured: Captured,
    nodes: Sequence[int | PlannedRegion],
    args: Sequence[Any],
    failed: Callable[[PlannedRegion, Exception], None],
) -> list[Any]:
    """Evaluate ``nodes`` in order. A region whose call cannot be bound is reported to ``failed`` and evaluated op by op."""
    graph = captured.graph
    env: dict[int, Any] = dict(zip(graph.inputs, args, strict=True))

    def read(v: int) -> Any:
        if v not in env:
            value = graph.values[v]
            if value.literal is None:
                raise ValueError(f"value {v} ({value}) is read but no evaluated node computes it")
            env[v] = np.asarray(value.literal, dtype=jnp.dtype(value.dtype))  # NumPy: a traced loop body must not close over it
        return env[v]

    def evaluate(i: int, operands: Sequence[Any]) -> Any:
        return captured.run(i, operands)[0]

    def step(i: int) -> None:
        op = graph.ops[i]
        env.update(zip(op.outputs, captured.run(i, [read(v) for v in op.inputs]), strict=True))

    for node in nodes:
        if isinstance(node, int):
            step(node)
            continue
        region = node.region
        operands = [read(v) for v in node.operands]
        avals = [captured.avals[v] for v in region.outputs]
        try:
            with captured.steps[region.ops[-1]].origin.context(), jax.named_scope(node.name):
                outs = node.call(operands, avals, evaluate)
        except Exception as error:
            failed(node, error)
            for i in sorted(region.ops):
                step(i)
        else:
            env.update(zip(region.outputs, outs, strict=True))
    return [read(v) for v in graph.outputs]


def _warn_once(message: str, category: type[Warning]) -> None:
    """Warn once per process. Lowerings are cached, so whether a warning were repeated would depend on the cache."""
    with _warned_lock:
        if message in _warned:
            return
        _warned.add(message)
    warnings.warn(message, category, stacklevel=2)

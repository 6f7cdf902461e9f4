"""The lowering of ``kitsune_pipeline``: capture, route, and evaluation with a custom call in the place of each region.

Comes in: ``call_jaxpr``, ``Options``, JAX's lowering context. Goes out: MLIR values. Invariants: results are those of
``call_jaxpr``; effects keep their order; and a failure of this package never becomes a failure of the user's program: the part that
failed lowers as the HLO it would have been, and ``fallbacks`` records it (unless ``strict``).
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
from kitsune_jax.capture.rewrites import FEW_ROWS, OF_NEW_ROWS, RewriteContext, rewritten
from kitsune_jax.config import Options
from kitsune_jax.errors import Failure, NotPipelined, record
from kitsune_jax.frontend.route import PlannedRegion, Routed, RouteOptions, route, without
from kitsune_jax.ops.graph import Graph, Op, topological
from kitsune_jax.report.render import Report, with_bodies

# ----------------------------------------------------------------------------------------------------------------------------------
# The order in which a function's ops and regions are evaluated.
#
# Comes in: a Graph, which of its ops have effects, and regions. Goes out: nodes (an op's index, or a region), and the regions
# that cannot stand as one. Invariants: every value is defined before it is read; ops with effects keep their order; a region
# stands as one node, or is dissolved into its ops.
# ----------------------------------------------------------------------------------------------------------------------------------


class _Border(Protocol):
    @property
    def ops(self) -> tuple[int, ...]: ...
    @property
    def inputs(self) -> tuple[int, ...]: ...
    @property
    def outputs(self) -> tuple[int, ...]: ...


class Placed(Protocol):
    """What is read of a planned region."""

    @property
    def name(self) -> str: ...
    @property
    def region(self) -> _Border: ...


R = TypeVar("R", bound=Placed)

DISSOLVED = "the pipeline cannot stand as one call between the side effects around it: part of it runs before one, part of it after"


def schedule(graph: Graph, effects: Sequence[bool], regions: Sequence[R]) -> tuple[list[int | R], list[R]]:
    """Nodes in an order that can be evaluated, and the regions that were dissolved. ``effects[i]``: op ``i`` has one.

    An op of a region that others read, though the region does not give its result (a broadcast is cheaper made again than stored),
    is also a node of its own. A region that would have to run both before and after an op, or an effect, is dissolved.
    """
    kept, dissolved = list(regions), list[R]()
    while True:
        order, stuck = _ordered(graph, effects, kept)
        if not stuck:
            return order, dissolved
        dissolved.append(stuck[0])
        kept = [r for r in kept if r is not stuck[0]]


def _ordered(graph: Graph, effects: Sequence[bool], regions: Sequence[R]) -> tuple[list[int | R], list[R]]:
    """Nodes, lowest op first, and the regions that wait for themselves."""
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
            add(made_by)  # of a region that does not give it: made again, on its own
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


# ----------------------------------------------------------------------------------------------------------------------------------
# Python's cyclic garbage collector, which stands still while a function is planned.
# ----------------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic garbage collection in here, unless somebody turns it on.

    A plan is many small objects that all live until it is made; meanwhile each collection walks all of JAX's and the user's objects
    and finds nothing: a fifth of the time to lower a deep network's gradient.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# ----------------------------------------------------------------------------------------------------------------------------------
# The choice between a function as it was captured and the same with long reductions of few rows in parts.
#
# Comes in: a ``Captured`` and a target, and what was planned of a graph. Goes out: the ``Captured`` in parts, where there is such
# a thing: a few parts of its own for each worker (``capture.rewrites.few_rows``), or each element a row of a stream
# (``capture.rewrites.few_rows``); and the modelled seconds of a whole graph, by which plans of two graphs that compute the same
# are compared.
# ----------------------------------------------------------------------------------------------------------------------------------

Nodes = TypeVar("Nodes")


def whole_or_in_parts(
    captured: Captured, settled: Callable[[Captured], tuple[Routed, Nodes]], target: str, device: str | None, body: bool
) -> tuple[Captured, Routed, Nodes]:
    """``captured``, or the same in parts where the model finds that faster, with what ``settled`` says of it. ``body``: it is the
    step of a loop."""
    planned, nodes = settled(captured)
    split = in_parts(captured, target, device)
    if split is captured:
        return captured, planned, nodes
    in_one = modelled_seconds(captured.graph, planned, target, device, body)
    split_planned, split_nodes = settled(split)
    if modelled_seconds(split.graph, split_planned, target, device, body) < in_one:
        return split, split_planned, split_nodes
    return captured, planned, nodes


def in_parts(captured: Captured, target: str, device: str | None) -> Captured:
    """``captured`` with its long reductions of few rows in parts; itself where there are none, or no workers for parts."""
    executor = targets.get(target)
    capabilities = executor.capabilities
    workers = executor.machine(device).workers if capabilities.splits_reductions else 1
    context = RewriteContext(capabilities, workers=workers)
    found = rewritten(captured, FEW_ROWS, context)
    return found if found is captured or not capabilities.streams_elements else rewritten(found, OF_NEW_ROWS, context)


def modelled_seconds(graph: Graph, planned: Routed, target: str, device: str | None, body: bool) -> float:
    """What the model says ``graph`` takes: the calls of ``planned``, and what XLA does with all other ops that it knows."""
    executor = targets.get(target)
    calls = sum(phase.plan.seconds for region in planned.regions for phase in region.phases)
    inside = {i for region in planned.regions for i in region.region.ops}
    left = [i for i, op in enumerate(graph.ops) if i not in inside and op.kind != "opaque" and not _moves_nothing(graph, op)]
    machine = executor.machine(device)
    return calls + executor.unpipelined_seconds(graph, left, machine, executor.program_context(graph, machine, body))


def _moves_nothing(graph: Graph, op: Op) -> bool:
    """XLA has no kernel for a change of the shape alone."""
    if op.kind != "transpose":
        return op.kind == "reshape"
    shape = graph.values[op.inputs[0]].shape
    real = [d for d in op["permutation"] if shape[d] != 1]
    return real == sorted(real)


# ----------------------------------------------------------------------------------------------------------------------------------
# What happens when ``kitsune_pipeline`` is lowered: capture, route, and evaluation with a custom call where a region stands.
#
# Comes in: ``call_jaxpr``, ``Options``, JAX's lowering context. Goes out: MLIR values. Invariants: results are those of
# ``call_jaxpr``; effects keep their order; and a failure of this package never becomes a failure of the user's program: the part
# that failed lowers as the HLO it would have been, and ``fallbacks`` records it (unless ``strict``).
# ----------------------------------------------------------------------------------------------------------------------------------

logger = config.logger

PRIMITIVE_NAME = "kitsune_pipeline"

_warned: set[str] = set()
_warned_lock = threading.Lock()

SHARDED = (
    "kitsune_jax: a pipelined function is lowered under jit on several devices with automatic partitioning, where XLA would gather "
    "a custom call's operands on every device. It lowers as plain HLO there. Use jax.shard_map over all mesh axes to keep the "
    "pipelines."
)
EXPORTED = 'jax.export is given plain HLO, which runs where kitsune_jax is not; kj.pipeline(fn, export="calls") keeps the pipelines'
EXPORTED_CALLS = (
    "jax.export keeps the pipelines as custom calls: it needs disabled_checks, and this version of kitsune_jax where the program "
    "runs"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Seen:
    """A call that was lowered while somebody ``watched``, and why it holds no pipelines there, or ``None``."""

    call_jaxpr: Any
    obstacle: str | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Watch:
    seen: list[Seen]
    elsewhere: bool


_watch: contextvars.ContextVar[_Watch | None] = contextvars.ContextVar("kitsune_jax_watch", default=None)


@contextlib.contextmanager
def watched(elsewhere: bool) -> Iterator[list[Seen]]:
    """Lower every call as plain HLO in this block, and note what would keep pipelines away from it.

    ``elsewhere``: the program is to run on another machine, whatever this one lacks.
    """
    seen: list[Seen] = []
    token = _watch.set(_Watch(seen, elsewhere))
    try:
        yield seen
    finally:
        _watch.reset(token)


def lower(ctx: Any, *args: Any, call_jaxpr: Any, options: Options, platform: str | None) -> Any:
    """The lowering rule. ``platform`` is "cpu", "cuda", or ``None`` for every other."""
    target = target_of(options, platform)
    watch = _watch.get()
    if watch is not None:
        why_not = missing_target(target)
        obstacle = (why_not if not watch.elsewhere else None) or _obstacle(ctx, call_jaxpr, options)
        watch.seen.append(Seen(call_jaxpr, obstacle))
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
    return _compat.lower_jaxpr(ctx, pipelined_or_plain(call_jaxpr, options, target), args)


def target_of(options: Options, platform: str | None) -> str | None:
    """What executes a pipeline on ``platform``: the platform's own target, or the one that was asked for instead."""
    return options.target if options.target is not None and platform == targets.INSTEAD[options.target] else platform


def missing_target(target: str | None) -> str | None:
    """Why nothing executes pipelines of ``target`` here, or ``None``. Warns of nothing."""
    if target is None:
        return f"there is no target for platforms other than {' and '.join(targets.PLATFORMS)}"
    why_not = targets.get(target).why_not()
    return f"there is no target for {target!r} here: {why_not}" if why_not else None


def _obstacle(ctx: Any, call_jaxpr: Any, options: Options) -> str | None:
    """Why this module cannot hold pipelines at all, or ``None``."""
    if options.export == "plain" and _compat.is_exported(ctx):
        return EXPORTED
    if not _compat.runs_on_one_device(ctx):
        return SHARDED
    if _compat.has_symbolic_shapes(call_jaxpr):
        return "shapes are symbolic, and a plan needs numbers"
    return None


def pipelined_or_plain(call_jaxpr: Any, options: Options, target: str) -> Any:
    """``call_jaxpr`` with custom calls where its regions stand, or unchanged where this package fails. Records what failed.

    Raises ``NotPipelined`` if ``options.strict`` and nothing could be pipelined of a function that has an operator.
    """
    name = _compat.function_name(call_jaxpr)
    try:
        with collector_paused():
            pipelined = pipelined_jaxpr(call_jaxpr, options, target)
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


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """A jaxpr with custom calls in it, the report over it and the bodies of its loops, and what a bug of ours left out."""

    jaxpr: Any
    report: Report
    failures: tuple[Failure, ...]


def pipelined_jaxpr(call_jaxpr: Any, options: Options, target: str) -> Pipelined:
    """Capture, route and rebuild ``call_jaxpr``.

    An error in one region or loop body is among the ``failures``, or raises if ``options.strict``; every other one raises.
    """
    found = _Found()
    plan = planned_function(call_jaxpr, options, target)
    if plan.changes:
        avals = _compat.in_avals(call_jaxpr)
        rebuilt = _compat.trace_jaxpr(lambda *a: _evaluate(plan, a, options, found), avals, lower=True, like=call_jaxpr)
    else:
        _told(plan, {}, found)
        rebuilt = call_jaxpr  # with its inner calls, which XLA compiles once each
    return Pipelined(rebuilt, with_bodies(found.reports), tuple(dict.fromkeys(found.failures)))


def routed(graph: Graph, target: str, options: RouteOptions) -> Routed:
    """``route``, remembered: a network of equal layers is planned once. Everything that changes a plan is in the key."""
    return _routed(graph, target, options, targets.get(target).surroundings())


@functools.lru_cache(maxsize=256)
def _routed(graph: Graph, target: str, options: RouteOptions, _surroundings: tuple[Any, ...]) -> Routed:
    return route(graph, target, options)


# --- evaluation -----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Found:
    """What an evaluation collects: the report of the function, then those of its loop bodies, and the failures in all of them."""

    reports: list[Report] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class PlannedFunction:
    """A captured function, what was decided about it, and what its loop bodies had to tell."""

    jaxpr: Any
    captured: Captured
    consts: Sequence[Any]
    routed: Routed
    nodes: Sequence[int | PlannedRegion]
    bodies: _Found

    @property
    def changes(self) -> bool:
        """Is there anything that would lower differently: a call in it or in a loop body, a rewrite that saves work, or a pipelined
        function seen through?"""
        calls = bool(self.routed.regions) or any(report.regions for report in self.bodies.reports)
        return calls or self.captured.saves or _holds_pipelines(self.jaxpr)


def _holds_pipelines(jaxpr: Any) -> bool:
    eqns = _compat.open_parts(jaxpr)[0].eqns
    inner = (x for e in eqns for v in e.params.values() for x in (v if isinstance(v, (tuple, list)) else (v,)))
    return any(e.primitive.name == PRIMITIVE_NAME for e in eqns) or any(_holds_pipelines(x) for x in inner if _compat.is_jaxpr(x))


def planned_function(jaxpr: Any, options: Options, target: str, body: bool = False) -> PlannedFunction:
    """``jaxpr`` (``body``: of a loop) captured and routed, its loops' bodies rewritten. Raises theirs if ``options.strict``."""
    bodies = _Found()

    def rewrite(body: Any) -> Any:
        inside = _Found()
        try:
            plan = planned_function(body, options, target, body=True)
            if not plan.changes:
                _told(plan, {}, bodies)
                return body
            avals = _compat.in_avals(body)
            new = _compat.trace_jaxpr(lambda *a: _evaluate(plan, a, options, inside), avals, lower=True, like=body)
            new = _compat.constants_inside(new)  # an equation's body holds none
        except Exception as error:
            if options.strict:
                raise
            bodies.failures.append(Failure.of(error, f"the body of a loop or branch ({_compat.function_name(body)})"))
            return body
        bodies.failures.extend(inside.failures)
        bodies.reports.extend(inside.reports)
        return _compat.as_kind_of(new, body)

    jaxpr, consts = _compat.hoist_consts(jaxpr)  # differentiation may have left some
    captured, planned, nodes = captured_and_settled(jaxpr, rewrite, target, options, body=body)
    bodies.failures.extend(prepare_left(captured, nodes))
    return PlannedFunction(jaxpr, captured, consts, planned, nodes, bodies)


def captured_and_settled(
    jaxpr: Any,
    rewrite: Callable[[Any], Any],
    target: str,
    options: Options,
    device: str | None = None,
    *,
    code: bool = True,
    body: bool = False,
) -> tuple[Captured, Routed, list[int | PlannedRegion]]:
    """``jaxpr`` captured for ``target``, and what ``settled`` says of it. ``rewrite``: of the bodies of what is left to XLA.

    A loop that was rewritten for a pipeline, and then is left to XLA all the same, is captured again as its equation: XLA runs that
    in less memory, and its body is pipelined by itself.
    """
    kept = set[Any]()
    settle = functools.partial(settled, target=target, options=options, device=device, code=code, body=body)
    while True:
        context = RewriteContext(targets.get(target).capabilities, options.deterministic, frozenset(kept))
        whole = capture(jaxpr, rewrite, context)
        captured, planned, nodes = whole_or_in_parts(whole, settle, target, device, body)
        left = [captured.steps[node] for node in nodes if isinstance(node, int)]
        again = {step.origin.key for step in left if step.rewritten} - kept
        if not again:
            return captured, planned, nodes
        kept |= again


def prepare_left(captured: Captured, nodes: Sequence[int | PlannedRegion]) -> list[Failure]:
    """Rewrite the bodies of the loops and branches among ``nodes`` that are left to XLA. Returns what went wrong there."""
    left = [captured.steps[node].prepare for node in nodes if isinstance(node, int)]
    return [failure for prepare in left if prepare is not None for failure in prepare()]


def _evaluate(plan: PlannedFunction, args: Sequence[Any], options: Options, found: _Found) -> list[Any]:
    """The results of a planned function on ``args`` (tracers), with custom calls."""
    lost: dict[str, Failure] = {}

    def failed(region: PlannedRegion, error: Exception) -> None:
        if options.strict:
            raise error
        lost[region.name] = Failure.of(error, f"the call of {region.name}")

    outs = _run_nodes(plan.captured, plan.nodes, [*plan.consts, *args], failed)
    _told(plan, lost, found)
    return outs


def _told(plan: PlannedFunction, lost: Mapping[str, Failure], found: _Found) -> None:
    """Add the report and the failures of ``plan``, whose calls ``lost`` could not be bound, and those of its loop bodies."""
    planned = without(plan.captured.graph, plan.routed, {name: failure.told for name, failure in lost.items()})
    found.reports += [planned.report, *plan.bodies.reports]
    found.failures += [*plan.captured.failures, *planned.failures, *lost.values(), *plan.bodies.failures]


def settled(
    captured: Captured, target: str, options: Options, device: str | None = None, *, code: bool = True, body: bool = False
) -> tuple[Routed, list[int | PlannedRegion]]:
    """What will run: the regions that ``routed`` plans, but for those that cannot stand between side effects; the nodes in order.
    Where a call of several regions cannot stand there, each of them is a call of its own.
    """
    effects = [step.has_effects for step in captured.steps]
    asked = RouteOptions(
        force=options.force, device=device, code=code, strict=options.strict, body=body, fetch_ahead=options.fetch_ahead
    )
    planned = routed(captured.graph, target, asked)
    nodes, dissolved = schedule(captured.graph, effects, planned.regions)
    if any(len(region.phases) > 1 for region in dissolved):
        planned = routed(captured.graph, target, dataclasses.replace(asked, merge=False))
        nodes, dissolved = schedule(captured.graph, effects, planned.regions)
    return without(captured.graph, planned, {region.name: DISSOLVED for region in dissolved}), nodes


def run(captured: Captured, regions: Sequence[PlannedRegion], args: Sequence[Any]) -> list[Any]:
    """Evaluate a captured function: every op by JAX, every region by its custom call. Returns the graph's outputs."""
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
    """Evaluate ``nodes`` in order. A region whose call cannot be bound is told to ``failed`` and evaluated op by op."""
    graph = captured.graph
    env: dict[int, Any] = dict(zip(graph.inputs, args, strict=True))

    def read(v: int) -> Any:
        if v not in env:
            value = graph.values[v]
            if value.literal is None:
                raise ValueError(f"value {v} ({value}) is read but nothing that was evaluated gives it")
            env[v] = np.asarray(value.literal, dtype=jnp.dtype(value.dtype))  # NumPy's: a traced loop body must not close over it
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
    """Once a process, whatever the warning filters: a lowering is cached, so when it runs again says nothing to the user."""
    with _warned_lock:
        if message in _warned:
            return
        _warned.add(message)
    warnings.warn(message, category, stacklevel=2)

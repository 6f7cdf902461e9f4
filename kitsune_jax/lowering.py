"""What happens when ``kitsune_pipeline`` is lowered: capture, route, and evaluation with a custom call where a region stands.

Comes in: ``call_jaxpr``, ``Options``, JAX's lowering context. Goes out: MLIR values. Invariants: results are those of
``call_jaxpr``; effects keep their order; and a failure of this package never becomes a failure of the user's program: the part that
failed lowers as the HLO it would have been, and ``fallbacks`` records it (unless ``strict``).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kitsune_jax import _compat, config, targets
from kitsune_jax.capture.captured import Captured
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.collector import collector_paused
from kitsune_jax.errors import NotPipelined
from kitsune_jax.fallbacks import Failure, record
from kitsune_jax.graph import Graph
from kitsune_jax.options import Options
from kitsune_jax.parts import whole_or_in_parts
from kitsune_jax.report.join import with_bodies
from kitsune_jax.report.model import Report
from kitsune_jax.route import PlannedRegion, Routed, route, without
from kitsune_jax.schedule import DISSOLVED, schedule

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


def routed(
    graph: Graph, target: str, options: Options, device: str | None, *, code: bool, body: bool, merge: bool = True
) -> Routed:
    """``route``, remembered: a network of equal layers is planned once. Everything that changes a plan is in the key."""
    switches = ("force", options.force), ("strict", options.strict), ("fetch_ahead", options.fetch_ahead)
    return _routed(graph, target, switches, device, code, merge, body, targets.get(target).surroundings())


@functools.lru_cache(maxsize=256)
def _routed(
    graph: Graph,
    target: str,
    switches: tuple[tuple[str, bool], ...],
    device: str | None,
    code: bool,
    merge: bool,
    body: bool,
    _surroundings: tuple[Any, ...],
) -> Routed:
    return route(graph, target, device=device, code=code, merge=merge, body=body, **dict(switches))


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
    can, kept = targets.get(target), set[Any]()
    settle = functools.partial(settled, target=target, options=options, device=device, code=code, body=body)
    has = {"parts": can.divides_gradients, "online": can.sums_online, "loops": can.runs_loops}
    has |= {"unordered": can.sums_unordered and not options.deterministic, "apart": not can.sums_by_batch}
    while True:
        whole = capture(jaxpr, rewrite, **has, summed=can.most_summed, kept=frozenset(kept))
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
    planned = routed(captured.graph, target, options, device, code=code, body=body)
    nodes, dissolved = schedule(captured.graph, effects, planned.regions)
    if any(len(region.phases) > 1 for region in dissolved):
        planned = routed(captured.graph, target, options, device, code=code, body=body, merge=False)
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

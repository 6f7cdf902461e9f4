"""The lowering of ``kitsune_pipeline``: capture, plan, schedule, and evaluate with a custom call in the place of each region.

Comes in: ``call_jaxpr``, ``Options``, JAX's lowering context. Goes out: MLIR values. Invariants: results are those of
``call_jaxpr``; every value is defined before it is read; effects keep their order; and an error of this package never becomes an
error of the user's program: the part that failed lowers as plain HLO, and ``fallbacks`` records it (unless ``strict``).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from kitsune_jax import _compat, cache, config, targets, tuning
from kitsune_jax.capture.edit import Captured
from kitsune_jax.capture.jaxpr import BodyRewrite, capture
from kitsune_jax.capture.rewrites import FEW_ROWS, OF_NEW_ROWS, RewriteContext, apply_rewrites
from kitsune_jax.config import Options, logger
from kitsune_jax.errors import Failure, NotPipelined, ShardingWarning, record
from kitsune_jax.frontend.route import PlannedRegion, Routed, RouteOptions, remove_regions, route
from kitsune_jax.ops.graph import Graph, Op, topological
from kitsune_jax.planning.cost import SUMS_OVER_DEVICES
from kitsune_jax.report.data import MeasuredTimes, plural, time_text
from kitsune_jax.report.render import Report, merge_body_reports, repeated, with_measured, with_measured_calls
from kitsune_jax.sharding.calls import TARGET, Surroundings, Unfit, partitioned_jaxpr, symbolic_jaxpr, why_divided_by_xla
from kitsune_jax.tuning.inputs import why_not_timed

# --- the order in which a function's ops and regions are evaluated ----------------------------------------------------------------


Node: TypeAlias = int | PlannedRegion  # an op by its index, or a region

DISSOLVED = (
    "a side effect lies in the middle of this region, so it cannot run as one call: to pipeline these operators, move the print, "
    "callback or other effect before or after them"
)


def schedule(graph: Graph, effects: Sequence[bool], regions: Sequence[PlannedRegion]) -> tuple[list[Node], list[PlannedRegion]]:
    """Nodes in an order that can be evaluated, and the regions that were dissolved into their ops.

    ``effects[i]``: op ``i`` has a side effect. An op of a region is also a node of its own if others read its result and the region
    does not return it (recomputing a broadcast is cheaper than storing it). A region that would have to run both before and after
    an op, or an effect, is dissolved.
    """
    kept, dissolved = list(regions), list[PlannedRegion]()
    while True:
        nodes, needs = _dependencies(graph, effects, kept)
        order = topological(needs, [node if isinstance(node, int) else max(node.region.ops) for node in nodes])  # lowest op first
        reached = set(order)
        stuck = [k for k in range(len(kept)) if k not in reached]  # regions that depend on themselves through other nodes
        if not stuck:
            return [nodes[k] for k in order], dissolved
        dissolved.append(kept.pop(stuck[0]))


def _dependencies(graph: Graph, effects: Sequence[bool], regions: Sequence[PlannedRegion]) -> tuple[list[Node], list[set[int]]]:
    """The nodes (regions first), and for each the nodes that must come before it."""
    producers = graph.producers()
    owner = {i: k for k, r in enumerate(regions) for i in r.region.ops}
    given = {v: k for k, r in enumerate(regions) for v in r.region.outputs}
    nodes: list[Node] = [*regions]
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


def sums_behind_calls(graph: Graph, nodes: Sequence[Node]) -> tuple[list[Node], dict[int, int]]:
    """``nodes`` with each sum over devices right behind the node that makes its operand; and these sums, each with the number of
    the last call that it depends on."""
    last: dict[int, int] = {}  # value -> the number of that call
    maker: dict[int, int] = {}  # value -> its node
    sums, behind, calls = dict[int, int](), dict[int, list[int]](), 0
    for k, node in enumerate(nodes):
        if not isinstance(node, int):
            calls += 1
            last.update(dict.fromkeys(node.region.outputs, calls))
            maker.update(dict.fromkeys(node.region.outputs, k))
            continue
        op, made = graph.ops[node], k
        depends = max((last.get(v, 0) for v in op.inputs), default=0)
        if op.label in SUMS_OVER_DEVICES and op.inputs[0] in maker:
            sums[node], made = depends, maker[op.inputs[0]]
            behind.setdefault(made, []).append(node)
        last.update(dict.fromkeys(op.outputs, depends))
        maker.update(dict.fromkeys(op.outputs, made))
    ordered = list[Node]()
    for k, node in enumerate(nodes):
        if not (isinstance(node, int) and node in sums):
            ordered += [node, *behind.get(k, ())]
    return ordered, sums


# --- the choice between a captured function and the same with long reductions split -----------------------------------------------


def choose_split(captured: Captured, target: str, options: RouteOptions) -> tuple[Captured, Routed, list[Node]]:
    """``captured``, or the same with long reductions of few rows split where the model finds that faster, planned."""
    in_one = captured, *plan_and_schedule(captured, target, options)
    split = split_few_rows(captured, target, options.device)
    if split is captured:
        return in_one
    in_parts = split, *plan_and_schedule(split, target, options)
    seconds = [modelled_seconds(which.graph, planned, target, options) for which, planned, _ in (in_one, in_parts)]
    return in_parts if seconds[1] < seconds[0] else in_one


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
    program = executor.program_context(graph, machine, config.planner_options(options), options.body)
    return calls + executor.unpipelined_seconds(graph, left, machine, program)


def _moves_nothing(graph: Graph, op: Op) -> bool:
    """Is ``op`` a change of the shape alone, for which XLA has no kernel?"""
    if op.kind != "transpose":
        return op.kind == "reshape"
    shape = graph.values[op.inputs[0]].shape
    real = [d for d in op["permutation"] if shape[d] != 1]
    return real == sorted(real)


# --- the lowering rule ------------------------------------------------------------------------------------------------------------

PRIMITIVE_NAME = "kitsune_pipeline"

SHARDED = (
    "kitsune_jax: a pipelined function is lowered for several devices with jax_use_shardy_partitioner=False, where its calls "
    "cannot be partitioned, so XLA compiles it without pipelines. Set it to True."
)
UNREDUCED = (
    "some of its arrays are unreduced or reduced over a mesh axis (PartitionSpec(unreduced=...)): parts of sums, which only XLA "
    "adds up"
)
EXPORTED = (
    "jax.export writes plain HLO, which runs where kitsune_jax is not installed; to export the pipelines, use "
    'kj.pipeline(fn, export="calls")'
)
SYMBOLIC = (
    "shapes are symbolic, and a plan needs numbers: lower or export the function with concrete shapes, or export it with "
    'kj.pipeline(fn, export="calls")'
)
SYMBOLIC_JAX = "shapes are symbolic, and this version of JAX calls exported programs in a way that kitsune_jax does not know"
# Its pass crashes on shapes that are computed there, for calls or for plain HLO (jnp.ones of a symbolic shape; JAX 0.12).
SYMBOLIC_SHARD = "shapes are symbolic inside of a jax.shard_map, where XLA does not turn the shapes of calls into numbers"
EXPORTED_CALLS = (
    "jax.export keeps the pipelines as custom calls: pass disabled_checks to it (with symbolic shapes for "
    f"{TARGET!r}), and install this version of kitsune_jax where the program runs"
)


DIVIDED = (
    "XLA divides this program among several devices, and pipelines are planned for the part of each; this report is of the whole "
    "arrays on one device"
)


BY_XLA = (
    "when this program was compiled, XLA's own division of a part of it was taken, without pipelines (force=True keeps them), "
    "because with the pipelines {}"
)


@dataclasses.dataclass(frozen=True, eq=False)
class LoweredCall:
    """A call that was lowered under ``watch_calls``, and the reason why it would hold no pipelines, or ``None``. ``divided``: notes
    for a report where XLA divides it among devices."""

    call_jaxpr: Any
    obstacle: str | None
    divided: tuple[str, ...]


# The calls seen under ``watch_calls``, and its ``elsewhere``.
_watch: contextvars.ContextVar[tuple[list[LoweredCall], bool] | None] = contextvars.ContextVar("kitsune_jax_watch", default=None)


@contextlib.contextmanager
def watch_calls(elsewhere: bool) -> Iterator[list[LoweredCall]]:
    """In this block lower every call as plain HLO, and list the calls with the reasons why they would hold no pipelines.

    ``elsewhere``: plan for another machine, and ignore what is missing on this one.
    """
    seen: list[LoweredCall] = []
    token = _watch.set((seen, elsewhere))
    try:
        yield seen
    finally:
        _watch.reset(token)


@_compat.with_room_for_frames
def lower_call(ctx: Any, *args: Any, call_jaxpr: Any, options: Options, platform: str | None) -> Any:
    """The lowering rule. ``platform`` is "cpu", "cuda", or ``None`` for every other."""
    if tuning.is_measuring():
        return _compat.lower_jaxpr(ctx, call_jaxpr, args)
    target = target_of(options, platform)
    watch = _watch.get()
    if watch is not None:
        seen, elsewhere = watch
        missing = None if elsewhere else missing_target(target)
        divided = () if _compat.runs_on_one_device(ctx) else _notes_if_divided(call_jaxpr, options)
        seen.append(LoweredCall(call_jaxpr, missing or _obstacle(ctx, call_jaxpr, options), divided))
        return _compat.lower_jaxpr(ctx, call_jaxpr, args)
    obstacle = None if target is not None and targets.get(target).available() else missing_target(target)
    obstacle = obstacle or _obstacle(ctx, call_jaxpr, options)
    if obstacle is not None:
        if options.strict:
            raise NotPipelined(f"kitsune_jax: nothing was pipelined: {obstacle}")
        if obstacle is SHARDED:
            warn_sharded()
        logger.debug("%s: nothing was pipelined: %s", _compat.function_name(call_jaxpr), obstacle)
        return _compat.lower_jaxpr(ctx, call_jaxpr, args)
    assert target is not None and platform is not None
    if _compat.has_symbolic_shapes(call_jaxpr):
        around = Surroundings(target, platform)
        return _compat.lower_jaxpr(ctx, symbolic_or_plain(call_jaxpr, options, around, _compat.symbolic_sizes(ctx)), args)
    if not _compat.runs_on_one_device(ctx):
        mesh, manual = _compat.partly_manual_mesh(ctx) or ({}, ())
        around = Surroundings(
            target, platform, machine_key(target), _function_key(call_jaxpr, options), tuple(mesh.items()), manual
        )
        return _compat.lower_jaxpr(ctx, partitioned_or_plain(call_jaxpr, options, around), args)
    budget = None
    if target == platform and not options.strict and _compat.is_alone(ctx) and not _compat.is_exported(ctx):
        budget = tuning.budget_of(_compat.program_of(ctx), platform)
    return _compat.lower_jaxpr(ctx, pipelined_or_plain(call_jaxpr, options, target, budget), args)


def _notes_if_divided(call_jaxpr: Any, options: Options) -> tuple[str, ...]:
    reasons = why_divided_by_xla(_function_key(call_jaxpr, options))
    return (DIVIDED, *(BY_XLA.format(why) for why in reasons))


def _function_key(call_jaxpr: Any, options: Options) -> str:
    """A key of a call that its program and that of a report of it have both: of its types, its equations and its options."""
    types = map(str, (*_compat.in_avals(call_jaxpr), *_compat.out_avals(call_jaxpr)))
    equations = (eqn.primitive.name for eqn in _compat.open_parts(call_jaxpr)[0].eqns)
    return cache.key(types=" ".join(types), equations=" ".join(equations), options=repr(options))


def machine_key(target: str) -> str:
    """A key of what the plans for ``target`` depend on beside the program. A profile that no disk keeps is another one in each
    process, and not in the key."""
    name = config.profile() or config.num_threads() if config.cache_dir() is None else targets.get(target).surroundings()
    return cache.key(target=target, surroundings=repr(name))


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
    if not (_compat.runs_on_one_device(ctx) or _compat.partitions_automatically(ctx)):
        return SHARDED
    if not _compat.runs_on_one_device(ctx) and _compat.has_unreduced_sums(call_jaxpr):
        return UNREDUCED
    if not _compat.has_symbolic_shapes(call_jaxpr):
        return None
    if options.export == "plain" or not _compat.is_exported(ctx):
        return SYMBOLIC
    if not _compat.resolves(TARGET):
        return SYMBOLIC_JAX
    return SYMBOLIC_SHARD if _compat.partly_manual_mesh(ctx) is not None else None


def pipelined_or_plain(
    call_jaxpr: Any,
    options: Options,
    target: str,
    budget: tuning.Budget | None = None,
    xla_factor: float = 1.0,
    axes: Mapping[str, int] = MappingProxyType({}),
) -> Any:
    """``call_jaxpr`` with custom calls in place of its regions, or unchanged if this package fails. Records what failed.

    ``budget``: the time in which plans may be compared on this machine; ``None`` leaves the choice to the model, which multiplies
    XLA's times by ``xla_factor``. ``axes``: of the mesh whose devices run the program, with their sizes.
    Raises ``NotPipelined`` if ``options.strict`` and nothing could be pipelined of a function that has an operator.
    """
    name = _compat.function_name(call_jaxpr)
    try:
        with _compat.collector_paused():
            axes = axes if math.prod(axes.values()) > 1 else {}
            chooser = Chooser(options, target, budget, axes) if budget is not None and not options.force else None
            more = {"devices": math.prod(axes.values())} if options.network is not None else {}
            routes = RouteOptions.of(options, xla_factor=xla_factor, stores_least=bool(axes), **more)
            pipelined = fastest(call_jaxpr, routes, target, chooser)
    except Exception as error:
        if options.strict:
            raise
        record(name, Failure.of(error, "the whole function"))
        return call_jaxpr
    for failure in pipelined.failures:
        if options.strict:
            raise RuntimeError(f"kitsune_jax could not pipeline {failure.part} of {name}: {failure.reason}\n{failure.traceback}")
        record(name, failure)
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s: %s", name, pipelined.report)
    if options.strict and pipelined.report.ops_total and not pipelined.report.ops_pipelined:
        raise NotPipelined("kitsune_jax: nothing was pipelined", pipelined.report)
    return pipelined.jaxpr


def partitioned_or_plain(call_jaxpr: Any, options: Options, around: Surroundings) -> Any:
    """``call_jaxpr`` with a custom call in place of each subgraph: for each, XLA's partitioner asks for the program of one shard.
    Unchanged if this package fails."""
    try:
        return partitioned_jaxpr(call_jaxpr, options, around)
    except Exception as error:
        if options.strict:
            raise
        record(_compat.function_name(call_jaxpr), Failure.of(error, "the whole function"))
        return call_jaxpr


def symbolic_or_plain(call_jaxpr: Any, options: Options, around: Surroundings, names: Collection[str]) -> Any:
    """``call_jaxpr`` with a custom call in place of each subgraph, whose pipelines are planned when the symbols ``names`` in its
    shapes have values. Unchanged where no Graph holds for all values, or this package fails."""
    name = _compat.function_name(call_jaxpr)
    try:
        with _compat.collector_paused():
            return symbolic_jaxpr(call_jaxpr, options, around, tuple(names))
    except Unfit as why:
        if options.strict:
            raise NotPipelined(f"kitsune_jax: nothing was pipelined: shapes are symbolic, and {why}") from why
        logger.debug("%s: nothing was pipelined: shapes are symbolic, and %s", name, why)
    except Exception as error:
        if options.strict:
            raise
        record(name, Failure.of(error, "the whole function"))
    return call_jaxpr


def pipelined_part(ctx: Any, part: Any, options: Options, around: Surroundings) -> Any:
    """``part``, a part of an exported program whose sizes are known where ``ctx`` lowers its call, with pipelines."""
    if tuning.is_measuring() or (missing := missing_target(around.target)) is not None:
        if not tuning.is_measuring():
            logger.debug("a part of an exported program has no pipelines: %s", missing)
        return part
    budget = None
    if around.target == around.platform and not options.strict and _compat.is_alone(ctx):
        budget = tuning.budget_of(_compat.program_of(ctx), around.platform)
    try:
        return pipelined_or_plain(part, options, around.target, budget)
    except NotPipelined:  # a part of a function need not hold any
        return pipelined_or_plain(part, dataclasses.replace(options, strict=False), around.target)


# Of plans of shards that nobody times: a transformer layer of 2 x 512 tokens, modelled at 1.14x, ran at 0.94x of jax.jit (Zen 5, 2
# devices).
_CLEAR_GAIN = 1.15


def pipelined_shard(local: Any, options: Options, target: str, axes: Mapping[str, int]) -> Any:
    """``local``, the program of one shard on a mesh with ``axes`` of these sizes, with pipelines.

    In one process they are chosen by time, on all devices at once and with the collectives between them. Several processes must all
    compile the same, so none times plans, and pipelines are where the model sees a clear gain.
    """
    factor = 1.0 if options.force else 1 / _CLEAR_GAIN
    budget = None if options.strict or target != "cpu" else tuning.budget_of_shard(target)
    try:
        return pipelined_or_plain(local, options, target, budget, factor, axes)
    except NotPipelined:  # a part of a function need not hold any
        return pipelined_or_plain(local, dataclasses.replace(options, strict=False), target, None, factor, axes)


# --- the choice between plans by time ---------------------------------------------------------------------------------------------

_DOUBT = 1.6  # XLA's time may be modelled this much too low


@dataclasses.dataclass(frozen=True)
class Chooser:
    """Chooses between the plans of a program: as before, and with a ``budget`` by timing them now. ``axes``: of the mesh whose
    devices run the program at the same time, and share the cores of a CPU; none for one device."""

    options: Options
    target: str
    budget: tuning.Budget | None
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def doubt(self) -> float:
        """The modelled gain from which a pipeline is taken that was not timed. The model lets cores idle where XLA runs one thread;
        with several devices another one's thread runs there: an attention of 4 x 512 tokens took 15.7 ms on one device, and 8.4 on
        two (Zen 5, 2 cores)."""
        return _DOUBT * min(math.prod(self.axes.values()), targets.get(self.target).machine(None).workers)

    def key(self, program: Any, body: bool, part: str = "") -> str:
        """The key of the remembered choice. ``body``: the plans of ``program`` are those of a step of a loop that XLA runs.
        ``part``: its name as a part of another program."""
        options: tuple[Any, ...] = (config.key_of_plans(self.options), body, part)
        if self.axes:
            options = (*options, tuple(self.axes.items()))
        return tuning.key_of(program, options, self.target, targets.get(self.target).surroundings())

    def choose(
        self, key: str, program: Any, candidates: Mapping[str, Callable[[], Any]], step: bool = False
    ) -> tuning.Choice | None:
        """The choice between ``candidates``, made now where there is none; ``None`` leaves it to the model. ``step``: of a loop
        that XLA runs, and timed as such."""
        if self.budget is None:
            return None
        return tuning.choose(key, program, candidates, targets.get(self.target).platform, self.budget, self.axes, step)


def fastest(program: Any, options: RouteOptions, target: str, chooser: Chooser | None) -> Pipelined:
    """``program`` with the plan that ``chooser`` says is fastest on this machine, by default the model's. Of a program that cannot
    be timed as one, the bodies of loops and branches, and the calls that the model doubts, are chosen each for itself."""
    if chooser is None:
        return pipelined_jaxpr(program, options, target, chooser)
    made: dict[str, Pipelined] = {}

    def plan(name: str, measured: str = "") -> Pipelined:
        made[name] = pipelined_jaxpr(program, options_of(name, options, measured), target)
        return made[name]

    def candidate(name: str) -> Any:
        before = {found.report.regions for other, found in made.items() if other != name}
        # This is another thread, which does not know the axes of collectives yet.
        with _compat.manual_mesh(dict(chooser.axes)) if chooser.axes else contextlib.nullcontext():
            found = made.get(name) or plan(name)
        regions = found.report.regions
        return None if found.failures or not regions or regions in before else found.jaxpr

    choice = None
    if why_not_timed(program, chooser.axes) is None and not tuning.takes_too_long(program, targets.get(target).platform):
        key = chooser.key(program, options.body)
        choice = tuning.known(key)
        if choice is None:
            plan(tuning.MODELLED)
            names = (tuning.MODELLED, tuning.OPTIMISTIC, tuning.FORCED)
            candidates = {name: functools.partial(candidate, name) for name in names}
            if options.code:  # else no candidate has pipelines, and each takes as long as jax.jit
                choice = chooser.choose(key, program, candidates, options.body)
            if choice is None:
                return made[tuning.MODELLED]
    if choice is None:
        captures: Captures = {}
        found = with_fastest_calls(program, options, target, chooser, captures)
        return found or pipelined_jaxpr(program, options, target, chooser, captures)
    if choice.name == tuning.JIT and not options.body and not _holds_pipelines(program):
        # The reason for each operator takes as long as a plan, and is made if somebody reads it.
        return Pipelined(program, (), (), lambda: _measured(plan(tuning.JIT, measured_text(choice)), choice))
    chosen = _measured(made.get(choice.name) or plan(choice.name, measured_text(choice)), choice)
    if choice.name == tuning.JIT or not options.body:  # the times are the reason for each operator, or stand in the verdict
        return chosen
    return _noted(chosen, measured_text(choice))


def with_fastest_calls(program: Any, options: RouteOptions, target: str, chooser: Chooser, captures: Captures) -> Pipelined | None:
    """``program`` without those calls for which XLA's code of the same operators is faster; ``None`` where no call was timed.

    Calls that the model doubts are timed, equal ones once, and those that take most of the time first. Without a time, a call stays
    if the model sees a clear gain. ``captures``: as in ``capture_until_stable``.
    """
    optimistic = options_of(tuning.OPTIMISTIC, options)
    # Code is half of a plan's time, and a network in one long call, which is not timed, needs none of this plan.
    without_code = planned_function(program, dataclasses.replace(optimistic, code=False), target, chooser, captures)
    if not any(_may_be_timed(without_code.captured, call, options, chooser) for call in _doubted(without_code, chooser)):
        return None
    plan = planned_function(program, optimistic, target, chooser, captures)
    timed, lost, failures = dict[str, tuning.Choice](), dict[str, str](), list[Failure]()
    for call in _doubted(plan, chooser):
        choice = None
        try:
            alone = _program_of(plan.captured, call, sorted(call.region.ops))
            key = chooser.key(alone, options.body, _ALONE)
            make = functools.partial(_program_of, plan.captured, call, [call])
            choice = tuning.known(key) or chooser.choose(key, alone, {tuning.MODELLED: make})
        except Exception as error:
            failures.append(Failure.of(error, f"the timing of {call.name}"))
        if choice is not None:
            timed[call.name] = choice
            if choice.name == tuning.JIT:
                lost[call.name] = measured_text(choice)
        elif call.modelled_gain < tuning.LEAST_GAIN_BUSY:
            lost[call.name] = (
                f"modelled as {call.modelled_gain:.2f}x as fast as XLA's code, which is no clear gain, and not measured"
            )
    if not (timed or failures):
        return None
    graph = plan.captured.graph
    kept = remove_regions(graph, plan.routed, lost)
    nodes, _ = schedule(graph, [step.has_effects for step in plan.captured.steps], kept.regions)
    failures += (*plan.failures, *rewrite_bodies_left_to_xla(plan.captured, nodes))
    plan = dataclasses.replace(plan, routed=kept, nodes=nodes, failures=failures)
    found = _rebuilt(program, plan, options)
    first, *bodies = found.reports
    first = with_measured_calls(first, {name: times for name, choice in timed.items() if (times := _times_of(choice)) is not None})
    found = dataclasses.replace(found, reports=(first, *bodies))
    return _noted(found, _times_of_calls(timed)) if timed else found


_ALONE = "the call alone"


def _doubted(plan: PlannedFunction, chooser: Chooser) -> list[PlannedRegion]:
    """The calls that the model doubts, those that take most of the time first."""
    calls = [node for node in plan.nodes if isinstance(node, PlannedRegion)]
    return sorted((call for call in calls if call.modelled_gain < chooser.doubt), key=lambda call: -call.seconds)


def _may_be_timed(captured: Captured, call: PlannedRegion, options: RouteOptions, chooser: Chooser) -> bool:
    """Has ``call`` been timed, or is there time to do it? True also where asking fails: the failure is to be reported."""
    try:
        alone = _program_of(captured, call, sorted(call.region.ops))
        known = tuning.known(chooser.key(alone, options.body, _ALONE))
        return known is not None or (
            chooser.budget is not None and tuning.why_not_chosen(alone, chooser.budget, chooser.axes) is None
        )
    except Exception:
        return True


def _program_of(captured: Captured, call: PlannedRegion, nodes: Sequence[Node]) -> Any:
    """The jaxpr of ``call`` alone: of its operators, or of the call itself."""

    def failed(_: PlannedRegion, error: Exception) -> None:
        raise error

    def evaluate(*args: Any) -> list[Any]:
        return run_nodes(captured, nodes, args, failed, call)

    return _compat.trace_jaxpr(evaluate, [captured.avals[v] for v in call.region.inputs], lower=True)


def _times_of_calls(timed: Mapping[str, tuning.Choice]) -> str:
    gains = sorted(choice.gain for choice in timed.values() if choice.name != tuning.JIT)
    left = len(timed) - len(gains)
    text = f"measured on this machine, each call for itself: {plural(len(gains), 'call')} faster than XLA's code"
    text += f" ({gains[0]:.2f}x to {gains[-1]:.2f}x)" if len(gains) > 1 else f" ({gains[0]:.2f}x)" if gains else ""
    return text + (f", {left} slower and left to XLA" if left else "")


def _noted(chosen: Pipelined, note: str) -> Pipelined:
    first, *bodies = chosen.reports
    return dataclasses.replace(chosen, reports=(dataclasses.replace(first, notes=(*first.notes, note)), *bodies))


def _times_of(choice: tuning.Choice) -> MeasuredTimes | None:
    """The times of the best plan with pipelines and of ``jax.jit``; ``None`` where no other plan was timed."""
    seconds = min((s for name, s in choice.seconds.items() if name != tuning.JIT), default=None)
    return None if seconds is None else MeasuredTimes(seconds, choice.seconds[tuning.JIT], choice.busy)


def _measured(chosen: Pipelined, choice: tuning.Choice) -> Pipelined:
    """``chosen`` with the times of ``choice`` in the report of the program itself."""
    times = _times_of(choice)
    if times is None:
        return chosen
    first, *bodies = chosen.reports
    if bodies:  # the regions of the function itself are not all that was timed
        return dataclasses.replace(chosen, reports=(dataclasses.replace(first, measured=times), *bodies))
    return dataclasses.replace(chosen, reports=(with_measured(first, times),))


def options_of(choice: str, options: RouteOptions, measured: str = "") -> RouteOptions:
    """The options that make the plan ``choice``. ``measured``: why nothing is pipelined, if so."""
    changes: dict[str, dict[str, Any]] = {
        tuning.JIT: {"left": measured},
        tuning.OPTIMISTIC: {"xla_factor": _DOUBT},
        tuning.FORCED: {"force": True},
    }
    return dataclasses.replace(options, **changes.get(choice, {}))


def measured_text(choice: tuning.Choice) -> str:
    """The times of a choice in words."""
    best = min((s for name, s in choice.seconds.items() if name != tuning.JIT), default=0.0)
    return (
        f"measured on this machine: {time_text(best)} with pipelines, {time_text(choice.seconds[tuning.JIT])} with jax.jit "
        f"({choice.gain:.2f}x)" + (", while other programs ran" if choice.busy else "")
    )


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """A jaxpr with custom calls in it, the reports over it and each body of its loops, and the parts that a bug of ours left out.
    ``reported``: the same with reports, for one that has none yet."""

    jaxpr: Any
    reports: tuple[Report, ...]
    failures: tuple[Failure, ...]
    reported: Callable[[], Pipelined] | None = None

    @property
    def report(self) -> Report:
        return merge_body_reports(self.reports) if self.reported is None else self.reported().report


def pipelined_jaxpr(
    jaxpr: Any, options: RouteOptions, target: str, chooser: Chooser | None = None, captures: Captures | None = None
) -> Pipelined:
    """Capture, route and rebuild ``jaxpr``; it stays as it was if ``options.code`` is off. ``chooser``: for the bodies of its loops
    and branches. ``captures``: as in ``capture_until_stable``.

    An error in one region or loop body is among the ``failures``, or raises if ``options.strict``; any other error raises.
    """
    return _rebuilt(jaxpr, planned_function(jaxpr, options, target, chooser, captures), options)


def _rebuilt(jaxpr: Any, plan: PlannedFunction, options: RouteOptions) -> Pipelined:
    """``jaxpr`` with the calls of ``plan``."""
    graph, lost = plan.captured.graph, dict[str, Failure]()

    def failed(region: PlannedRegion, error: Exception) -> None:
        if options.strict:
            raise error
        lost[region.name] = Failure.of(error, f"the call of {region.name}")

    rebuilt = jaxpr  # as it was, so that XLA compiles its inner calls once each
    if options.code and plan.changes:
        nodes, apart = sums_behind_calls(graph, plan.nodes) if options.network is not None else (plan.nodes, {})

        def evaluate(*args: Any) -> list[Any]:
            return run_nodes(plan.captured, nodes, [*plan.consts, *args], failed, apart=apart)

        rebuilt = _compat.trace_jaxpr(evaluate, _compat.in_avals(jaxpr), lower=True, like=jaxpr)
    planned = remove_regions(graph, plan.routed, {name: failure.report_reason for name, failure in lost.items()})
    failures = (*plan.captured.failures, *planned.failures, *lost.values(), *plan.failures)
    return Pipelined(rebuilt, (planned.report, *plan.reports), tuple(dict.fromkeys(failures)))


def routed(graph: Graph, target: str, options: RouteOptions) -> Routed:
    """``route``, remembered: a network of equal layers is planned once. Everything that changes a plan is in the key."""
    executor = targets.get(target)
    return _routed(graph, target, config.key_of_plans(options), (executor.surroundings(), executor.variant()))


@functools.lru_cache(maxsize=256)
def _routed(graph: Graph, target: str, options: RouteOptions, _surroundings: tuple[Any, ...]) -> Routed:
    return route(graph, target, options)


# --- evaluation -----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PlannedFunction:
    """A captured function, its plan, and the reports and failures of its loop bodies."""

    jaxpr: Any
    captured: Captured
    consts: Sequence[Any]
    routed: Routed
    nodes: Sequence[Node]
    reports: Sequence[Report]
    failures: Sequence[Failure]

    @property
    def changes(self) -> bool:
        """Would anything lower differently: a call in it or in a loop body, a rewrite that saves work, or an inner pipelined
        function that was inlined?"""
        calls = bool(self.routed.regions) or any(report.regions for report in self.reports)
        return calls or self.captured.saves or _holds_pipelines(self.jaxpr)


def _holds_pipelines(jaxpr: Any) -> bool:
    eqns = _compat.open_parts(jaxpr)[0].eqns
    return any(e.primitive.name == PRIMITIVE_NAME or any(map(_holds_pipelines, _compat.inner_jaxprs(e))) for e in eqns)


Captures = dict[tuple[Any, ...], Captured]  # captures of one jaxpr without loops and branches, by the places that were kept


def planned_function(
    jaxpr: Any, options: RouteOptions, target: str, chooser: Chooser | None = None, captures: Captures | None = None
) -> PlannedFunction:
    """``jaxpr`` captured and planned, with the bodies of its loops rewritten, whose plans ``chooser`` chooses. ``captures``: as in
    ``capture_until_stable``."""
    reports, failures = list[Report](), list[Failure]()

    # A body that is chosen for itself is chosen as if it were alone, whatever is assumed of the function.
    of_body = dataclasses.replace(options, body=True, xla_factor=options.xla_factor if chooser is None else 1.0)

    def rewrite(body: Any, times: int) -> Any:
        try:
            found = fastest(body, of_body, target, chooser)
            new = found.jaxpr
            if new is not body:  # the body of an equation has no constants
                new = _compat.as_kind_of(_compat.constants_inside(new), body)
        except Exception as error:
            if options.strict:
                raise
            failures.append(Failure.of(error, f"the body of a loop or branch ({_compat.function_name(body)})"))
            return body
        reports.extend(repeated(report, times) for report in found.reports)
        failures.extend(found.failures)
        return new

    jaxpr, consts = _compat.hoist_consts(jaxpr)  # differentiation may leave constants
    captured, planned, nodes = capture_until_stable(jaxpr, rewrite, target, options, captures)
    failures += rewrite_bodies_left_to_xla(captured, nodes)
    return PlannedFunction(jaxpr, captured, consts, planned, nodes, reports, failures)


def capture_until_stable(
    jaxpr: Any, rewrite: BodyRewrite, target: str, options: RouteOptions, captures: Captures | None = None
) -> tuple[Captured, Routed, list[Node]]:
    """``jaxpr`` captured for ``target``, with its plan and nodes. ``rewrite``: applied to the bodies of loops that are left to XLA.
    ``captures``: of earlier plans of ``jaxpr`` for ``target`` with options of one function, to which this one's are added.

    A loop that was rewritten for a pipeline and is left to XLA all the same is captured again as its own equation: XLA runs that in
    less memory, and its body is pipelined by itself. This repeats until no such loop is left.
    """
    captures, kept = {} if captures is None else captures, set[Any]()
    while True:
        context = RewriteContext(targets.get(target).capabilities, options, frozenset(kept))
        place = tuple(sorted(kept))
        captured = captures.get(place) or capture(jaxpr, rewrite, context)
        if all(step.prepare is None for step in captured.steps):  # else it holds this plan's bodies
            captures[place] = captured
        captured, planned, nodes = choose_split(captured, target, options)
        left = [captured.steps[node] for node in nodes if isinstance(node, int)]
        again = {step.origin.key for step in left if step.rewritten} - kept
        if not again:
            return captured, planned, nodes
        kept |= again


def rewrite_bodies_left_to_xla(captured: Captured, nodes: Sequence[Node]) -> list[Failure]:
    """Rewrite the bodies of the loops and branches among ``nodes`` that are left to XLA. Returns the failures in them."""
    left = [captured.steps[node].prepare for node in nodes if isinstance(node, int)]
    return [failure for prepare in left if prepare is not None for failure in prepare()]


def plan_and_schedule(captured: Captured, target: str, options: RouteOptions) -> tuple[Routed, list[Node]]:
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


def run_nodes(
    captured: Captured,
    nodes: Sequence[Node],
    args: Sequence[Any],
    failed: Callable[[PlannedRegion, Exception], None],
    part: PlannedRegion | None = None,
    apart: Mapping[int, int] = MappingProxyType({}),
) -> list[Any]:
    """The results of ``captured`` on ``args``, node by node; or those of the call ``part`` on its operands. A region whose call
    cannot be bound is reported to ``failed`` and evaluated op by op.

    ``apart``: sums over devices, each with the last call that it depends on. XLA combines collectives that do not depend on each
    other, and the one that it makes of all would wait for the last call; so those of a call depend on those of the call before.
    """
    graph = captured.graph
    inputs, outputs = (graph.inputs, graph.outputs) if part is None else (part.region.inputs, part.region.outputs)
    env: dict[int, Any] = dict(zip(inputs, args, strict=True))

    def read(v: int) -> Any:
        if v not in env:
            value = graph.values[v]
            if value.literal is None:
                raise ValueError(f"value {v} ({value}) is read but no evaluated node computes it")
            env[v] = np.asarray(value.literal, dtype=jnp.dtype(value.dtype))  # NumPy: a traced loop body must not close over it
        return env[v]

    def evaluate(i: int, operands: Sequence[Any]) -> Any:
        return captured.run(i, operands)[0]

    summed, before = list[Any](), list[Any]()  # results of sums over devices: of the last call, and of the one before
    call = 0

    def step(i: int) -> None:
        nonlocal summed, before, call
        op = graph.ops[i]
        arrays = [read(v) for v in op.inputs]
        if i in apart and apart[i] != call:
            before, summed, call = summed, [], apart[i]
        if i in apart and before:
            arrays[0], *_ = jax.lax.optimization_barrier((arrays[0], *before))
        results = captured.run(i, arrays)
        if i in apart:
            summed += results
        env.update(zip(op.outputs, results, strict=True))

    for node in nodes:
        if isinstance(node, int):
            step(node)
            continue
        region = node.region
        operands = [read(v) for v in region.inputs]
        avals = [captured.avals[v] for v in region.outputs]
        try:
            with captured.steps[region.ops[-1]].origin.context(), jax.named_scope(node.name):
                outs = node.call(operands, avals, evaluate, captured.constant)
        except Exception as error:
            failed(node, error)
            for i in sorted(region.ops):
                step(i)
        else:
            env.update(zip(region.outputs, outs, strict=True))
    return [read(v) for v in outputs]


@functools.cache
def warn_sharded() -> None:
    """Warn once per process. Lowerings are cached, so whether a warning were repeated would depend on the cache."""
    warnings.warn(SHARDED, ShardingWarning, stacklevel=2)

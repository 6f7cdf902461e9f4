"""The choice of regions: legal ones first, then those that the cost model says pay; loops are regions by themselves.

Comes in: a Graph, the ops that the target supports, a planner. Goes out: ``Selection``: disjoint, convex regions with their plans,
and for every op outside of them the reason. A region must be modelled faster than XLA's code for the same ops; ``force`` takes
every legal region (for tests). Followers of a region (``regions.joining``) are always taken: they share the call of their region,
and their operands are in the cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence

from kitsune_jax.ops.capabilities import SIMPLEST, TargetCapabilities
from kitsune_jax.ops.graph import Graph, Op
from kitsune_jax.ops.loops import as_step, body_of, parts
from kitsune_jax.ops.spec import Dims
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.plan import Plan
from kitsune_jax.planning.streams import (
    Region,
    Seed,
    Spread,
    StreamSpace,
    Supports,
    Wiring,
    candidate_seeds,
    has_few_rows,
    is_batched,
    relations_of,
    spread,
)
from kitsune_jax.regions.alternatives import (
    BY_BYTES,
    BY_BYTES_ALONE,
    BY_TIME,
    Worth,
    best_cut,
    drop_costly_ops,
    drop_gradients,
    has_long_rows,
    possible_cuts,
    recompute,
    store_gradients,
)
from kitsune_jax.regions.grow import (
    NEVER_SEEDS,
    GraphIndex,
    Order,
    SpreadCache,
    anchored,
    choose_with_compared_values_computed_once,
    reduces_across,
    regions_of,
    seed_order,
    splits_layer,
    updated_in_place,
)
from kitsune_jax.regions.joining import (
    PROFIT_MARGIN,
    Bridges,
    Chosen,
    FollowerSearch,
    Merged,
    MergePhases,
    PhaseSavings,
    SpreadOver,
    anchored_call,
    estimate_text,
    find_decode_glue,
    has_few_row_product,
    keep_plans,
    merge_calls,
    pays,
    pays_as_decode_phase,
    seconds_gained,
    total_gain,
)

# --- loops as regions -------------------------------------------------------------------------------------------------------------

_SAME = "one of its results is the same for all rows of a stream, so no row computes it"
_MAKERS = frozenset({"broadcast_in_dim", "iota"})
_VIEWS = frozenset({"reshape", "broadcast", "iota"})  # families of ops
_FUSED = _VIEWS | {"pointwise", "convert"}  # families that XLA computes in one loop with the operator that reads them


def loop_regions(
    index: GraphIndex, i: int, free: Collection[int], order: Order, spread: SpreadOver, sums_behind: bool
) -> Iterator[Region | str]:
    """The regions that loop ``i`` may be, most promising first, or reasons why a stream cannot pass through it.

    Streams over dimensions that no step mixes come first, and last a stream of one row, in which all dimensions stay whole. Makers
    of its operands from constants belong to the region. So do sums over all steps and rows of values that the loop makes or takes
    in each step (the gradients of its weights): their parts are added step by step. Other readers of a loop's slices find them in
    memory: xs are inputs of the region and ys are results. ``free``: ops that no region has. ``sums_behind``: the loop may also
    leave its sums to ops behind it, with arrays of all steps for them.
    """
    graph = index.graph
    if _idle(body_of(graph.ops[i])):
        yield "its steps only move arrays: there is nothing to pipeline"
        return
    p = parts(graph.ops[i])
    makers = (index.producers.get(v) for v in (*p.consts, *p.initial) if v not in p.xs)
    members = {i, *(m for m in makers if m is not None and m in free and _makes(graph, m))}
    sums = {j for j in index.readers(i) if j in free and as_step(graph.ops[i], graph.ops[j]) is not None}
    seen: set[Region] = set()
    summed = False
    for mine in (members | sums, *((members,) if sums and sums_behind else ())):
        for seed in _seeds(graph, i):
            sp = spread(seed, mine)
            if apart := sums.intersection(sp.ops).difference(sp.sinks):  # sums over the steps alone, which have all rows
                sp = spread(seed, mine - apart)
            if i in sp.stops:
                yield sp.stops[i]
            for region in regions_of(index, sp, order):
                if i in region.ops and region.outputs and region not in seen:
                    seen.add(region)
                    labels = region.label_of()
                    made = {v for j in sums & set(region.ops) for v in graph.ops[j].outputs}
                    yields = all(v in labels or v in made for v in region.outputs)
                    yield region if yields else _SAME
                    summed |= yields and bool(made)
    if not summed:  # else another stream would store arrays of all steps, only to sum them
        yield _one_row(index, i)


def _idle(body: Graph) -> bool:
    """Does a body compute nothing, such as one that swaps two carries? Views do not count."""
    return all(_idle(op.body) if op.body is not None else OPS[op.kind].family in _VIEWS for op in body.ops)


def _makes(graph: Graph, i: int) -> bool:
    """Does op ``i`` make an array of a scalar, or of nothing?"""
    op = graph.ops[i]
    return op.kind in _MAKERS and all(not graph.values[v].shape for v in op.inputs)


def _seeds(graph: Graph, i: int) -> Iterator[Seed]:
    """For each large operand or result: all its dimensions that no step mixes, and each of them alone; at most ``_MOST`` seeds."""
    op = graph.ops[i]
    operands = (*op.inputs, *op.outputs)
    mixed = {(operands[k], d) for r in relations_of(graph, op) if r.role != "parallel" for k, d in r.members}
    p = parts(op)
    values = sorted(dict.fromkeys((*p.final, *p.ys, *p.xs)), key=lambda v: (-graph.values[v].size, v))
    kept = {v: [d for d in range(len(graph.values[v].shape)) if (v, d) not in mixed] for v in values}
    choices: dict[Seed, None] = {}
    for v, dims in kept.items():
        long = tuple(d for d in dims if graph.values[v].shape[d] > 1)
        choices |= dict.fromkeys(Seed(v, c) for c in (long, *((d,) for d in long)) if c)
    one_row = [Seed(v, (d,)) for v, dims in kept.items() for d in dims if graph.values[v].shape[d] == 1]
    yield from list(choices)[:_MOST] or one_row[:1]


_MOST = 8  # seeds that are tried


def _by_index(body: Graph) -> Op | None:
    """An op of the body that reads or adds rows by indices."""
    by_index = (_by_index(op.body) if op.body else op for op in body.ops if op.body or OPS[op.kind].family in ("gather", "scatter"))
    return next(filter(None, by_index), None)


def _one_row(index: GraphIndex, i: int) -> Region | str:
    graph, op = index.graph, index.graph.ops[i]
    p = parts(op)
    labelled = [v for v in (*p.initial, *p.xs, *op.outputs) if graph.values[v].literal is None and v not in p.consts]
    if not set(labelled).intersection(op.inputs):
        return "its results do not depend on the arguments"
    if (by_index := _by_index(body_of(op))) is not None:
        return f"{by_index.label or by_index.kind} ({by_index.source}) works by indices, and no dimension of it is independent"
    labels = {v: ((),) * len(graph.values[v].shape) for v in labelled}
    alone = OPS[op.kind].alone
    if alone is not None and (
        why := alone(op, [Dims(graph.values[v].shape, labels.get(v), graph.values[v].dtype) for v in op.inputs])
    ):
        return why
    return Region.of(graph, StreamSpace(()), (i,), labels, (v for v in op.outputs if v in index.results or v in index.consumers))


# --- the search -------------------------------------------------------------------------------------------------------------------

_OWN_BODY = "XLA runs this loop, with pipelines in its body where they pay"


@dataclasses.dataclass(frozen=True)
class Selection:
    regions: tuple[Chosen, ...]
    rejected: tuple[tuple[int, str], ...]  # (op index, reason), ascending


Planner = Callable[[Graph, Region], Plan | str]
Failed = Callable[[Exception, Sequence[int]], str]  # (a bug of this package, the ops around it) -> the reason in words


def _raised(error: Exception, _: Sequence[int]) -> str:
    raise error


@dataclasses.dataclass(frozen=True)
class _Search:
    """The arguments of ``select``. ``wide_first``: of the streams through products, those that keep all workers busy are chosen
    first, whatever the others gain."""

    supports: Supports
    planner: Planner
    capabilities: TargetCapabilities
    force: bool
    merge_phases: MergePhases
    fresh: float
    failed: Failed
    wide_first: bool = False


def select(
    graph: Graph,
    supports: Supports,
    planner: Planner,
    capabilities: TargetCapabilities = SIMPLEST,
    *,
    force: bool,
    merge_phases: MergePhases = keep_plans,
    fresh: float = 0.0,
    failed: Failed = _raised,
) -> Selection:
    """Pick regions greedily, from the ops with the most work down.

    ``supports(op index)`` returns a reason, or None. ``planner(graph, region)`` returns a plan, or a reason. ``capabilities``: if
    the target runs calls of several phases, regions may have followers, and up to ``most_merged`` regions become one call.
    ``merge_phases`` returns a call with its plans, or why it cannot be one. ``fresh``: seconds per byte of an array between calls
    instead of between phases of one (``PhaseSavings``). ``failed`` records an error, which costs only its region.
    """
    search = _Search(supports, planner, capabilities, force, merge_phases, fresh, failed)
    wiring = Wiring(graph, capabilities.sums_by_batch)

    def choose(index: GraphIndex) -> Selection:
        """Every op is asked for its best stream, and one over a few rows of a batch may hold a whole network, of which the streams
        over more rows hold a layer each: together they may gain more than it does, with more workers."""
        found = _Selector(index, wiring, search).run()
        if not any(_idles(index, r, capabilities.workers) for c in found.regions for r in c.regions):
            return found
        wide = _Selector(index, wiring, dataclasses.replace(search, wide_first=True)).run()
        return max(found, wide, key=lambda s: sum(seconds_gained(p.plan) for c in s.regions for p in c.phases))

    return choose_with_compared_values_computed_once(
        GraphIndex.of(graph), choose, lambda found: {i for c in found.regions for i in c.ops}
    )


def _idles(index: GraphIndex, region: Region, workers: int) -> bool:
    """Does ``region`` leave some of ``workers`` idle, though its products have more rows than it streams over?"""
    products = (i for i in region.ops if index.graph.ops[i].kind == "dot_general")
    return region.space.rows < workers and any(not has_few_rows(index.graph, index.producers, i) for i in products)


class _Selector:
    def __init__(self, index: GraphIndex, wiring: Wiring, search: _Search):
        self.index, self.graph, self.wiring = index, (graph := index.graph), wiring
        self.capabilities, self.planner, self.force = search.capabilities, search.planner, search.force
        self.merge_phases, self.failed, self.fresh = search.merge_phases, search.failed, search.fresh
        self.wide_first, self.least_rows = search.wide_first, 0
        self.phase_savings = PhaseSavings(self.index, (), self.fresh)  # of nothing yet
        self.order = Order(self.index)
        self.supports = functools.cache(search.supports)
        self.why = updated_in_place(graph)
        free = {i for i in self.index.live if graph.ops[i].kind != "opaque" and graph.ops[i].body is None}
        self.free = free - self.why.keys()
        few_rows, scores = self.capabilities.few_rows, wiring.scores
        self.spreads = SpreadCache(self.index, self.order, self.free, self._spread, few_rows, scores)
        self.plans: dict[Region, Plan | str] = {}
        self.asked: dict[int, tuple[Region, Plan | str]] = {}
        self.reduced: dict[int, tuple[Region, tuple[Region, Plan | str]]] = {}
        self.without_gradients: dict[int, tuple[Region, tuple[Region, Plan | str]]] = {}
        self.cut: dict[Region, tuple[int, list[Chosen]]] = {}  # the best cut of a region, by how many were chosen then
        self.chosen: list[Chosen] = []
        self.closest: dict[int, float] = {}  # op -> the best modelled speed-up of a region it was in
        self.refused: dict[int, int] = {}  # op -> the most rows of a region it was in that has no plan

    def run(self) -> Selection:
        self._choose_loops()
        seeds = seed_order(self.graph, self.free.difference(self.index.recomputed))
        products = [i for i in seeds if self.graph.ops[i].kind == "dot_general"]
        if self.wide_first:
            self.least_rows = self.capabilities.workers
            self._choose(products)
            self.least_rows = 0
        self._choose(products)
        # Followers come before regions of vector work only, because an update belongs to the call that makes its gradient.
        self._follow()
        first = len(self.chosen)
        self._choose(seeds[len(products) :])
        self._follow(first)
        merges = self.capabilities.most_merged > 1
        by_bytes = (BY_BYTES_ALONE if self.force else BY_BYTES,) if self.capabilities.stores_least else ()
        worths = (*(() if self.force else (BY_TIME,)), *by_bytes)
        extra = self._choose_extra_phases(seeds) if merges and self.fresh and not self.force else frozenset[int]()
        if self.capabilities.recomputes and worths:  # other targets compare plans of both passes (``_best_parts``)
            self._recompute(worths)
        if merges:
            self._merge(extra, seeds)
        taken = {i for c in self.chosen for i in c.ops}
        rejected = [(i, self._reason(i)) for i in range(len(self.graph.ops)) if i not in taken and i in self.index.live]
        return Selection(tuple(sorted(self.chosen, key=lambda c: c.region.ops[0])), tuple(rejected))

    def _choose(self, seeds: Sequence[int], accepts: Callable[[Chosen], bool] = lambda _: True) -> None:
        tried: set[int] = set()
        for seed_op in seeds:
            if seed_op not in self.free or seed_op in tried:
                continue
            best, looked_at = self._best_from(seed_op)
            tried |= looked_at
            while best is not None and accepts(best):
                try:
                    self.order.join(anchored(self.graph, best.region))
                except Exception as error:
                    self.why.setdefault(seed_op, self.failed(error, best.region.ops))
                    break
                self.chosen.append(best)
                self.free.difference_update(set(best.region.ops).difference(best.region.recomputed))
                self.spreads.choose()
                # The same seed may lead to another region: a level or a component that was split off.
                best, looked_at = self._best_from(seed_op) if seed_op in self.free else (None, set())

    def _choose_extra_phases(self, seeds: Sequence[int]) -> frozenset[int]:
        """Choose regions that pay as phases of a chosen call, and regions that pay only with these. Returns the ops of all."""
        own, before = len(self.chosen), -1
        while before < len(self.chosen):
            before, self.phase_savings = len(self.chosen), PhaseSavings(self.index, self.chosen, self.fresh)
            self._choose(seeds)
        return frozenset(i for c in self.chosen[own:] for i in c.ops)

    def _choose_loops(self) -> None:
        """Choose loops, which are regions by themselves; note the reason for the others."""
        for i in (i for i in self.index.live if self.graph.ops[i].body is not None):
            try:
                best = self._best_loop(i)
                if best is None:
                    continue
                self.order.join(anchored(self.graph, best.region))
            except Exception as error:
                self.why[i] = self.failed(error, (i,))
                continue
            self.chosen.append(best)
            self.free.difference_update(best.region.ops)

    def _best_loop(self, i: int) -> Chosen | None:
        """The region of loop ``i`` that gains most, if any pays; with ``force`` the most promising one that has a plan."""
        why = self.supports(i)
        best: Chosen | None = None
        planned = i in self.closest
        around = self.index, i, self.free, self.order, self._spread, self.capabilities.sums_behind
        for region in (why,) if why else loop_regions(*around):
            more = best is not None and isinstance(region, Region) and len(best.region.sinks) > len(region.sinks) == 0
            if more and self.capabilities.sums_behind:
                continue  # its sums, with which the loop pays, would be left out
            plan = region if isinstance(region, str) else self._plan_of(region)
            if isinstance(plan, str):
                if planned or isinstance(region, str) or region.space.rows == 1:
                    self.why.setdefault(i, f"{_OWN_BODY}: {plan}")
                else:  # more useful than the reason why another stream cannot pass through the loop
                    self.why[i], planned = f"{_OWN_BODY}: {plan}", True
                continue
            assert not isinstance(region, str)
            if self.force:
                return Chosen.of([(region, plan)])
            if pays(plan):
                candidate = Chosen.of([(region, plan)])
                if best is None or self._gain(candidate) > self._gain(best):
                    best = candidate
            elif plan.baseline_seconds / plan.seconds > self.closest.get(i, 0.0):
                self.closest[i] = plan.baseline_seconds / plan.seconds
                self.why[i] = f"{_OWN_BODY}: {estimate_text(plan)}"
        return best

    def _follow(self, first: int = 0) -> None:
        """Add followers to the regions chosen from number ``first`` on."""
        for k in range(first, len(self.chosen)) if self.capabilities.runs_phases else ():
            try:
                found = FollowerSearch(self.index, self.chosen[k].region, self.free, self.order, self._spread, self.supports).run()
            except Exception as error:
                self.failed(error, self.chosen[k].ops)
                continue
            planned = self.chosen[k].planned
            for region in found:
                plan = self.planner(self.graph, region)
                if isinstance(plan, str):
                    return  # followers that depend on it could not run
                planned.append((region, plan))
            call = self.merge_phases(Chosen.of(planned)) if found else ""
            if isinstance(call, str):
                reason = f"it cannot join the kernel call that computes its operands: {call}"
                self.why.update((i, reason) for region in found for i in region.ops)
            else:
                try:
                    self.order.join(anchored_call(self.graph, call.regions))
                except Exception as error:
                    self.failed(error, self.chosen[k].ops)
                    continue
                self.chosen[k] = call
                self.free.difference_update(set(call.ops).difference(call.region.recomputed))
                self.spreads.choose()

    def _recompute(self, worths: Sequence[Worth]) -> None:
        """Let regions compute values again instead of reading them from others, where one of ``worths`` says that this pays."""
        self.chosen.sort(key=lambda c: self.order.position(self.order.node(anchored(self.graph, c.region)[0])))
        inside = {i for c in self.chosen for i in c.region.ops}
        others = [i for i in self.index.live if i not in inside] + [
            i for c in self.chosen for later in c.regions[1:] for i in later.ops
        ]
        try:
            found = recompute(self.index, [(c.region, c.plan) for c in self.chosen], others, self._plan_of, worths)
        except Exception as error:
            self.failed(error, sorted(inside))
            return
        self.chosen = [Chosen.of([pair, *c.planned[1:]]) for c, pair in zip(self.chosen, found, strict=True)]

    def _merge(self, extra: frozenset[int], seeds: Sequence[int]) -> None:
        """Merge calls, also over small ops between the calls of a decoded token and over bridges. ``extra``: ops of regions that
        were chosen to be phases."""
        try:
            found: list[Chosen] = []
            if self.capabilities.few_rows and not self.force:
                found = find_decode_glue(self.index, self.chosen, self.order, self.free, self.supports, self._plan_of)

            known: Merged = {}

            def merged(more: Sequence[Chosen]) -> list[Chosen]:
                calls = [*self.chosen, *more, *found]
                return merge_calls(self.index, calls, self.merge_phases, self.capabilities.most_merged, known)

            bridges = Bridges(self.index, merged, self.fresh)
            if len(bridges.calls) > 1 and self.fresh and not self.force:
                self.phase_savings = PhaseSavings(self.index, bridges.calls, self.fresh, bridges.border)
                self._choose(seeds, bridges.accepts)
            phases = [*found, *(c for c in self.chosen if has_few_row_product(self.index, c.regions))]
            alone = [c for c in bridges.calls if c in phases or extra.issuperset(c.ops)]  # some pay only as phases
            self.chosen = [c for c in bridges.calls if self.force or c not in alone or pays(c.plan)]
        except Exception as error:
            self.failed(error, sorted(i for c in self.chosen for i in c.ops))

    def _spread(self, seed: Seed, free: Container[int], barred: Mapping[int, str] | None = None) -> Spread:
        return spread(self.graph, seed, free, self.supports, self.wiring, barred)

    def _best_from(self, seed_op: int) -> tuple[Chosen | None, set[int]]:
        """The best region around ``seed_op``, and the ops that need not be tried as seeds again."""
        why = self.supports(seed_op)
        if why:
            self.why.setdefault(seed_op, why)
            return None, {seed_op}
        best: Chosen | None = None
        looked_at = {seed_op}
        for seed in self.spreads.seeds(seed_op):
            try:
                candidate, ops = self._evaluate(seed_op, seed)
            except Exception as error:
                self.why.setdefault(seed_op, self.failed(error, (seed_op,)))
                continue
            looked_at |= ops
            if candidate and (best is None or self._gain(candidate) > self._gain(best)):
                best = candidate
        return best, looked_at

    def _best_of_part(self, sp: Spread, part: Region) -> tuple[Region, Plan | str]:
        return self._drop_gradients(sp, part, self._plan_of(part))

    def _best_parts(self, region: Region, whole: Plan | str, plan: Plan | str) -> list[Chosen]:
        """The parts of a region that pay as calls of their own, if they gain more than the region does as one, by ``plan``.
        ``whole``: the plan of all of the region.

        In a spatial pipeline every stage waits for the slowest one. Cut in two, each part has its own arrangement, and the values
        that the second reads of the first go through memory.
        """
        able = self.capabilities
        long = has_long_rows(self.graph, region, able.long_row_bytes)
        if not (able.cuts_wide_rows or long) and not isinstance(plan, str) and plan.arrangement != "spatial":
            return []
        known = self.cut.get(region)
        if known is None or known[0] != len(self.chosen):
            around = self.index, self.order, self.free, self._spread, self._best_of_part
            cuts = possible_cuts(self.graph, region, (whole, plan), able)
            known = self.cut[region] = len(self.chosen), best_cut(cuts, *around)
        gain_as_one = 0.0 if isinstance(plan, str) or not pays(plan) else seconds_gained(plan)
        return known[1] if total_gain(known[1]) > PROFIT_MARGIN * gain_as_one else []

    def _drop_costly_ops(self, sp: Spread, region: Region, plan: Plan | str) -> tuple[Region, Plan | str]:
        """``region`` and its plan, or the rest of it without ops that cost less elsewhere."""
        known = self.reduced.get(id(region))  # as ``_plan_of``: every op of a region may be a seed
        if known is None:
            rest, smaller, why = drop_costly_ops(self.index, sp, region, plan, self._plan_of)
            self.why.update(why)
            known = self.reduced[id(region)] = region, (rest, smaller)
        return known[1]

    def _drop_gradients(self, sp: Spread, region: Region, plan: Plan | str) -> tuple[Region, Plan | str]:
        """``region`` and its plan, or the rest of it without weight gradients whose operands are stored for others."""
        able = self.capabilities
        idle = able.sums_by_worker and not isinstance(plan, str) and plan.replicas < min(plan.tiles, able.workers)
        if not (able.stores_gradients or idle):
            return region, plan
        known = self.without_gradients.get(id(region))
        if known is None:
            if idle:
                rest, smaller, why = store_gradients(self.index, sp, region, plan, self._plan_of, self._alone)
            else:
                rest, smaller, why = drop_gradients(self.index, sp, region, plan, self._plan_of)
            self.why.update(why)
            known = self.without_gradients[id(region)] = region, (rest, smaller)
        return known[1]

    def _alone(self, i: int) -> Plan | str:
        """The fastest plan of op ``i`` as a region of its own."""
        best: Plan | str = ""
        for seed in candidate_seeds(self.graph, i):
            sp = self._spread(seed, {i})
            for region in regions_of(self.index, sp):
                plan = self._plan_of(region)
                if not isinstance(plan, str) and (isinstance(best, str) or plan.seconds < best.seconds):
                    best = plan
        return best

    def _gain(self, c: Chosen) -> tuple[bool, float, float]:
        """The key by which candidates are compared; larger is better. With ``force`` the model does not decide: a stream over rows
        precedes one over a layer's columns or scores, which ends in sums of partial products, and one over the columns of long
        sums; then the larger region, without what its rows compute of a smaller array, each again."""
        gain = seconds_gained(c.plan)
        if self.force:
            ops = sum(self._computes(i, c.region.space.rows) for i in c.region.ops)
            sums = () if c.region.space.batch else c.region.sinks
            splits = any(splits_layer(self.graph.ops[i], self.wiring.scores) for i in sums)
            across = self.capabilities.sums_by_worker and reduces_across(self.graph, c.region)
            return (not splits and not across, float(ops), gain)
        return (True, gain, float(len(c.region.ops)))

    def _computes(self, i: int, rows: int) -> bool:
        """Does op ``i`` compute something, of at least ``rows`` elements?"""
        op, values = self.graph.ops[i], self.graph.values
        return op.kind not in NEVER_SEEDS and max(values[v].size for v in (*op.inputs, *op.outputs)) >= rows

    def _evaluate(self, seed_op: int, seed: Seed) -> tuple[Chosen | None, set[int]]:
        kept, new = self.spreads.at(seed)
        for i, why in kept.spread.stops.items() if new else ():
            self.why.setdefault(i, why)
        region = self.spreads.region_with(kept, seed_op)
        if region is None or not region.outputs or region.space.rows < self.least_rows:
            return None, {seed_op}
        first = id(region) not in self.asked
        plan = self._plan_of(region)
        passes = list[Chosen]()
        if not self.force:
            whole, of_whole = self._drop_costly_ops(kept.spread, region, plan)
            region, plan = self._drop_gradients(kept.spread, whole, of_whole)
            passes = self._best_parts(whole, of_whole, plan)
        if passes:  # the others are found when their own ops are tried, and the rest once all of them are taken
            mine = [c for c in passes if seed_op in c.region.ops]
            return (mine or passes)[0], {seed_op}
        if isinstance(plan, str):
            for i in region.ops if first else ():
                if region.space.rows >= self.refused.get(i, 0):  # of streams without a plan the reason of the narrowest tiles
                    self.refused[i] = region.space.rows
                    if i not in self.closest:  # the times of a plan that does not pay say more
                        self.why[i] = plan
            return None, {seed_op}
        if not self.force and self._is_fused_by_xla(region):
            for i in region.ops:
                self.why[i] = "XLA computes it inside of the operator that reads it; force=True pipelines it anyway"
            return None, {seed_op}
        few_rows = self.capabilities.few_rows
        decodes = few_rows and pays_as_decode_phase(self.index, self.chosen, region, plan)
        if self.force or pays(plan) or self.phase_savings.pays(region, plan) or decodes:
            return Chosen.of([(region, plan)]), set()
        text = f"{estimate_text(plan)}; force=True pipelines it anyway"
        speedup = plan.baseline_seconds / plan.seconds
        for i in region.ops:
            if speedup > self.closest.get(i, 0.0):
                self.closest[i], self.why[i] = speedup, text
        # Products of a batch may stream in another way, with keys and values in place; products of few rows in ways of their own.
        batched = {i for i in region.ops if not region.space.batch and is_batched(self.graph, i)}
        few = {i for i in region.ops if few_rows and has_few_rows(self.graph, self.index.producers, i)}
        return None, set(region.ops) - batched - few | {seed_op}

    def _is_fused_by_xla(self, region: Region) -> bool:
        """Would XLA store no result of ``region``, because each is read by one operator that it computes in the same loop?

        The plan counts that it stores them, as a pipeline does. K-means with its differences and squares as a pipeline, and XLA's
        sum of these, took 80 ms, by XLA alone 36 (20 000 points, Zen 4).
        """
        graph, inside = self.graph, set(region.ops)
        if region.sinks or any(OPS[graph.ops[i].kind].family not in _FUSED for i in region.ops):
            return False
        for v in region.outputs:
            readers = [i for i in self.index.consumers.get(v, ()) if i not in inside and i in self.index.live]
            if v in self.index.results or len(readers) != 1 or readers[0] not in self.free:
                return False
            if OPS[graph.ops[readers[0]].kind].family not in _FUSED | {"reduce"}:
                return False
        return True

    def _plan_of(self, region: Region) -> Plan | str:
        """The plan of ``region``, or the reason why it has none.

        Regions are looked up by identity first: every op of a region may be a seed, and comparing regions takes time in proportion
        to their ops.
        """
        if id(region) not in self.asked:
            if region not in self.plans:
                self.plans[region] = self.planner(self.graph, region)
            self.asked[id(region)] = region, self.plans[region]  # with the region, so that no other one gets its identity
        return self.asked[id(region)][1]

    def _reason(self, i: int) -> str:
        op = self.graph.ops[i]
        if op.kind == "opaque":
            return op.reason or f"kitsune_jax has no rule for {op.label}, so XLA runs it"
        if i in self.why:
            return self.why[i]
        if not any(self.graph.values[v].shape for v in (*op.inputs, *op.outputs)):
            return "it computes single numbers: a pipeline needs rows of an array"
        return "it does not depend on the rows of a pipeline, so XLA computes it once"

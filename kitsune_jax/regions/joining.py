"""Calls: the regions that run as phases of one custom call, and the decision whether a call pays.

Comes in: regions with their plans. Goes out: ``Chosen`` calls: phases, merged calls, followers and phases that pay only inside a
call. Invariants: a phase reads results of phases with lower numbers, or operands of the call; phases of one number do not read each
other's results. A sink of a phase is an ordinary array behind the barrier, so every phase has a stream space of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Container, Iterable, Sequence

from kitsune_jax.ops.graph import Graph, reached, topological
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import SUMS_OVER_DEVICES, itemsize
from kitsune_jax.planning.plan import Phase, Plan
from kitsune_jax.planning.streams import Region, Seed, Spread, StreamSpace, Supports, has_few_rows
from kitsune_jax.regions.grow import GraphIndex, Order, anchored, levels_up_to, regions_of

# --- a call -----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A call, its phases in the order in which they run. ``apart``: the calls that were merged into it, if any."""

    phases: tuple[Phase, ...]
    apart: tuple[Chosen, ...] = ()

    @staticmethod
    def of(planned: Sequence[tuple[Region, Plan]], apart: tuple[Chosen, ...] = ()) -> Chosen:
        """The call of these regions with their plans, none of which may depend on itself."""
        maker = {v: k for k, (region, _) in enumerate(planned) for v in region.outputs}
        needs = [{maker[v] for v in region.inputs if v in maker} for region, _ in planned]
        number: dict[int, int] = {}
        for k in topological(needs, range(len(needs))):
            number[k] = 1 + max((number[j] for j in needs[k]), default=-1)
        phases = [Phase(number[k], region, plan) for k, (region, plan) in enumerate(planned)]
        return Chosen(tuple(sorted(phases, key=lambda p: (p.number, p.region.ops))), apart)

    @property
    def region(self) -> Region:
        """The region of the first phase."""
        return self.phases[0].region

    @property
    def plan(self) -> Plan:
        """The plan of the first phase."""
        return self.phases[0].plan

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(p.region for p in self.phases)

    @property
    def planned(self) -> list[tuple[Region, Plan]]:
        return [(p.region, p.plan) for p in self.phases]

    @property
    def ops(self) -> tuple[int, ...]:
        """The ops of the whole call."""
        first, *rest = self.phases
        return tuple(dict.fromkeys(itertools.chain(first.region.ops, *(p.region.ops for p in rest)))) if rest else first.region.ops


PlanOf = Callable[[Region], Plan | str]  # a plan, or the reason why there is none
SpreadOver = Callable[[Seed, Container[int]], Spread]  # a stream from a seed over some ops
MergePhases = Callable[[Chosen], Chosen | str]  # the call with the plans of its phases in it, or why they cannot be one call


def keep_plans(call: Chosen) -> Chosen:
    return call


def anchored_call(graph: Graph, regions: Sequence[Region]) -> tuple[int, ...]:
    """The anchored ops of a call: those of its regions, and makers that read results of an earlier phase, which can run nowhere
    else."""
    fixed = dict.fromkeys(i for r in regions for i in anchored(graph, r))
    if len(regions) > 1:
        made = {v for r in regions for v in r.outputs}
        own = (i for r in regions for i in r.ops if i not in r.recomputed)
        fixed |= dict.fromkeys(i for i in own if not made.isdisjoint(graph.ops[i].inputs))
    return tuple(fixed)


def region_of_call(graph: Graph, regions: Sequence[Region], wanted: Collection[int] = ()) -> Region:
    """The regions of a call as one: its ops, operands and results. ``wanted``: values that other calls read.

    The stream space, the labels and the sinks are those of the first region.
    """
    if len(regions) == 1:
        return regions[0]
    ops = sorted({i for r in regions for i in r.ops})
    made = dict.fromkeys(v for r in regions for v in r.outputs)
    needed = _needed_outside(graph, set(ops), made).union(wanted)
    return dataclasses.replace(
        regions[0],
        ops=tuple(ops),
        inputs=tuple(dict.fromkeys(v for r in regions for v in r.inputs if v not in made)),
        outputs=tuple(v for v in made if v in needed),
    )


def _needed_outside(graph: Graph, inside: Collection[int], made: Collection[int]) -> set[int]:
    """Values that are read outside of the ops ``inside``, also by their makers, which are computed again outside."""
    read = {*graph.outputs, *(v for i, op in enumerate(graph.ops) if i not in inside for v in op.inputs)}
    again = {v: graph.ops[i].inputs for i in inside for v in graph.ops[i].outputs if v not in made}
    return read | reached(read & again.keys(), lambda v: again.get(v, ()))


# --- when a pipeline pays ---------------------------------------------------------------------------------------------------------

# A pipeline must be modelled at least this much faster than XLA: the model is not more accurate than that.
PROFIT_MARGIN = 1.07
# A pipeline that moves less than this part of XLA's bytes only has to be as fast: bytes are counted, seconds modelled. With all
# legal regions instead of those at 1.07x or more GraphCast took 0.94 of the CPU time, its gradient 0.91, its processor's 0.98 (Zen
# 5).
_FEW_BYTES = 0.5


def seconds_gained(plan: Plan) -> float:
    """The modelled seconds that a pipeline saves."""
    return plan.baseline_seconds - plan.seconds


def total_gain(found: Sequence[Chosen]) -> float:
    """The modelled seconds that the first phases of several calls save."""
    return sum(seconds_gained(c.plan) for c in found)


def gain_of_splitting(whole: Plan | str, rest: Plan, alone: Sequence[Plan | str]) -> float:
    """The seconds gained by splitting a region ``whole`` into ``rest`` and parts, each ``alone`` a call if that pays, else XLA's.

    If all of them have plans, their times are compared. XLA's time for the parts is no measure: it is more than for the whole if a
    part makes an array that is inside of the whole.
    """
    if not isinstance(whole, str) and not any(isinstance(p, str) for p in alone):
        apart = [p.seconds if pays(p) else p.baseline_seconds for p in alone if not isinstance(p, str)]
        return whole.seconds - rest.seconds - sum(apart)
    gain = seconds_gained(rest) + sum(seconds_gained(p) for p in alone if not isinstance(p, str) and pays(p))
    return gain - (0.0 if isinstance(whole, str) else seconds_gained(whole))


def pays(plan: Plan) -> bool:
    """Is a pipeline modelled fast enough, against XLA, to be taken?"""
    if not any(stage.resource == "tensor" for stage in plan.stages):
        return plan.baseline_seconds > plan.margin * plan.seconds
    few = plan.bytes_moved < _FEW_BYTES * plan.baseline_bytes
    return plan.baseline_seconds > (1.0 if few else PROFIT_MARGIN) * plan.seconds


def estimate_text(plan: Plan) -> str:
    """The modelled times of a pipeline and of XLA, as the reason why ``plan`` is not taken."""
    return f"a pipeline gains too little (estimate: {_time(plan.seconds)}, with jax.jit {_time(plan.baseline_seconds)})"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


# --- merging calls that follow each other -----------------------------------------------------------------------------------------

# A merged call may hold a quarter more memory than its parts did, and this many bytes.
_MOST_MORE, _FREE_BYTES = 1.25, 64 << 20


Merged = dict[tuple[int, ...], tuple[tuple[Chosen, ...], Chosen | str]]  # calls by their identities -> themselves, and their merge


def merge_calls(
    index: GraphIndex, calls: Sequence[Chosen], merge_phases: MergePhases, most: int, known: Merged | None = None
) -> list[Chosen]:
    """``calls``, merged wherever that is legal: the steps of a message-passing network, for example, forward and backward.

    Two calls are merged if one reads results of the other, no op outside would have to run between them, and values that a phase
    needs before the whole call (the permutation of its rows; a broadcast that several calls compute for themselves) do not depend
    on the other. Every phase keeps its plan, except where the target changes it to run it with others.

    A merged call does the same work. It saves a call per phase behind the first, and the fresh pages of every value that only its
    phases read: the executor keeps these in memory that it reuses within a call and between calls. Its price is that all operands
    and results live while it runs, so merging stops when a call would hold much more memory than its parts did one by one, or has
    ``most`` phases. ``merge_phases(call)``: the call as the target would run it, or why it would not. ``known``: what an earlier
    merge of some of these calls has found, with the same other arguments; what this one finds is added.
    """
    return _Merge(index, calls, merge_phases, most, {} if known is None else known).run()


class _Dependencies:
    """The dependencies of calls (numbers from 0) and, after them, of ops that XLA runs; some of these are ops of regions as well,
    which others compute again for themselves.

    ``before[node]``: the nodes that make its operands. ``position`` grows along every path. ``group[call]``: the calls merged with
    it.
    """

    def __init__(self, index: GraphIndex, calls: Sequence[Chosen]):
        graph, producers = index.graph, index.producers
        given = {v: k for k, c in enumerate(calls) for r in c.regions for v in r.outputs}
        inside = {i for c in calls for i in c.ops}
        reads: list[Collection[int]] = [_reads(c) for c in calls]
        number: dict[int, int] = {}
        work = [(i, graph.ops[i].inputs) for i in sorted(index.live) if i not in inside]
        wanted = [v for values in reads for v in values]
        while work or wanted:
            if work:
                i, values = work.pop()
                number[i] = len(reads)
                reads.append(values)
                wanted += values
            else:
                made_by = producers.get(v := wanted.pop())
                if made_by is not None and v not in given and made_by not in number:
                    work.append((made_by, graph.ops[made_by].inputs))
        self.before = [
            {given[v] if v in given else number[producers[v]] for v in values if v in producers} - {k}
            for k, values in enumerate(reads)
        ]
        order = topological(self.before, range(len(reads)))
        self.position = dict(zip(order, range(len(order)), strict=True))
        self.group: dict[int, tuple[int, ...]] = {k: (k,) for k in range(len(calls))}

    def join(self, calls: tuple[int, ...]) -> bool:
        """Make ``calls`` one node, unless another node would then have to run both before and after it."""
        inside = set(calls)
        first = min(self.position[k] for k in calls)
        seen: set[int] = set()
        work = [n for k in calls for n in self.before[k] - inside]
        while work:
            node = work.pop()
            if node in seen:
                continue
            members = self.group.get(node, (node,))
            seen.update(members)
            if max(self.position[m] for m in members) < first:
                continue
            before = {n for m in members for n in self.before[m]}
            if not before.isdisjoint(inside):
                return False
            work += before - seen
        self.group |= dict.fromkeys(calls, calls)
        return True


def _reads(call: Chosen) -> set[int]:
    """Values that must exist before the call or its phases begin: their operands, and the indices that order their rows."""
    orders = {p.plan.order for p in call.phases if p.plan.order is not None}
    return {v for r in call.regions for v in r.inputs} | orders


class _Merge:
    def __init__(self, index: GraphIndex, calls: Sequence[Chosen], merge_phases: MergePhases, most: int, known: Merged):
        self.index, self.calls, self.merge_phases, self.most, self.known = index, calls, merge_phases, most, known
        self.dependencies = _Dependencies(index, calls)
        self.made: dict[tuple[int, ...], Chosen] = {(k,): call for k, call in enumerate(calls)}  # the calls that there are

    def run(self) -> list[Chosen]:
        dependencies = self.dependencies
        place = dependencies.position.__getitem__
        for k in sorted(range(len(self.calls)), key=place):
            makers = [n for n in dependencies.before[k] if n < len(self.calls)]
            for j in sorted(makers, key=place, reverse=True):  # the values made last are in the caches
                if dependencies.group[j] != dependencies.group[k]:
                    self._try(tuple(sorted((*dependencies.group[j], *dependencies.group[k]), key=place)))
        return [self.made[calls] for calls in dict.fromkeys(dependencies.group.values())]

    def _try(self, calls: tuple[int, ...]) -> None:
        """Merge ``calls`` if that is legal and does not hold too much memory."""
        apart = tuple(self.calls[k] for k in calls)
        key = tuple(map(id, apart))
        if key not in self.known:
            self.known[key] = apart, self._merged(apart)  # with the calls, so that no others get their identities
        found = self.known[key][1]
        if not isinstance(found, str) and self.dependencies.join(calls):
            self.made[calls] = found

    def _merged(self, apart: tuple[Chosen, ...]) -> Chosen | str:
        """The call merged of ``apart``, or why there is none, whatever lies between them."""
        call = Chosen.of([pair for c in apart for pair in c.planned], apart)
        made = {v for r in call.regions for v in r.outputs}
        if len(call.phases) > self.most or any(p.plan.order in made for p in call.phases) or self._holds_more(call):
            return "it has too many phases, an order of its own results, or too much memory"
        return self.merge_phases(call)

    def _holds_more(self, call: Chosen) -> bool:
        """Would ``call`` hold much more memory than its parts do, one after the other?

        One call holds all operands from its beginning and all results to its end, though a part alone would free or make them when
        it runs. Arguments of the function belong to its caller.
        """
        regions = call.regions
        results, consumers, given = self.index.results, self.index.consumers, set(self.index.graph.inputs)
        inside = {i for r in regions for i in r.ops}
        last: dict[int, int] = {v: k for k, r in enumerate(regions) for v in r.inputs}
        born = {v: k for k, r in enumerate(regions) for v in r.outputs}
        first = dict.fromkeys((v for v in last if v not in born and v not in given), 0)
        apart, together = [0] * (len(regions) + 1), [0] * (len(regions) + 1)  # bytes more or less from each phase on
        for v, k in (first | born).items():
            size = self.index.bytes(v)
            stays = v in results or not inside.issuperset(consumers.get(v, ()))
            end = len(regions) if stays and v in born else last.get(v, k) + 1
            inner = v in born and not stays
            for held, begin, stop in ((apart, k, end), (together, *((k, end) if inner else (0, len(regions))))):
                held[begin] += size
                held[stop] -= size
        return max(itertools.accumulate(together)) > _MOST_MORE * max(itertools.accumulate(apart)) + _FREE_BYTES


# --- all-reduces beside a call ----------------------------------------------------------------------------------------------------


def overlap_gain(graph: Graph, call: Chosen, reduce_seconds: Callable[[float], float], call_seconds: float, fresh: float) -> float:
    """The most seconds that are gained where ``call`` stays several of the calls that it was merged of (``apart``).

    All results of a call leave it at its end. Where it ends earlier, sums over devices of its results run beside the calls behind
    it, at most as long as these take. Another call costs its start, and the fresh pages of the arrays between (``fresh``: seconds
    for each byte). ``reduce_seconds(bytes)``: of a sum over devices.
    """
    reduced = {v for op in graph.ops if op.label in SUMS_OVER_DEVICES for v in op.inputs}

    def size(values: Collection[int]) -> float:
        return float(sum(graph.values[v].size * itemsize(graph.values[v].dtype) for v in values))

    best = 0.0
    for k in range(1, len(call.apart)):
        first, rest = call.apart[:k], call.apart[k:]
        made = {v for c in first for r in c.regions for v in r.outputs}
        if not made.isdisjoint(reduced):
            beside = sum(p.plan.seconds for c in rest for p in c.phases)
            between = made.intersection(v for c in rest for r in c.regions for v in r.inputs)
            hidden = min(reduce_seconds(size(made & reduced)), beside)
            best = max(best, hidden - call_seconds - fresh * size(between))
    return best


# --- followers: later phases of a call, such as the updates of the parameters whose gradients it makes ----------------------------

_SCALAR = frozenset({"pointwise", "convert"})
_COMPUTES = _SCALAR | {"reduce"}  # a follower has an op of one of these families; one that only moved data would save nothing


class FollowerSearch:
    """The followers of ``region``: pointwise work and sums over the elements of a gradient, and the scalar work between two of
    them, such as the factor of clipping by the global norm. The call with all of its followers is convex; a follower reads
    results of earlier phases, or values that do not depend on the call. ``free``: ops that no region has. ``order``: that of all
    chosen calls.
    """

    def __init__(
        self, index: GraphIndex, region: Region, free: Collection[int], order: Order, spread: SpreadOver, supports: Supports
    ):
        self.index, self.graph, self.region, self.free = index, index.graph, region, free
        self.order, self.spread, self.supports = order.copy(), spread, supports  # candidates become nodes of this order
        self.inside, self.first = set(region.ops), anchored(self.graph, region)[0]
        self.phase = dict.fromkeys(region.outputs, 0)  # value that the call makes -> the phase that makes it
        self.behind: set[int] = set()  # values that ops outside compute from results of the call
        self.joined: list[Region] = []
        self.scalars: dict[int, int] = {}  # scalar op -> phase

    def run(self) -> list[Region]:
        """One walk over the ops that depend on the region, to find those that can run behind its barrier."""
        candidates, order = self._candidates(), self.order
        first = order.node(self.first)
        behind = order.behind([first], len(self.graph.ops)) - {first} if candidates else ()
        for number in sorted(behind, key=order.position):
            node = order.members(number)
            candidate = candidates.get(node)
            if candidate is not None:
                self._region(candidate)
            elif len(node) == 1 and self._is_scalar(node[0]):
                self._scalar(node[0])
            else:
                self._outside(node)
        return [*self.joined, *self._scalar_regions()]

    def _candidates(self) -> dict[tuple[int, ...], Region]:
        """Regions over the elements of the sinks' results, and of values computed from these, by their anchored ops."""
        graph, order, free = self.graph, self.order, set(self.free)
        found: dict[tuple[int, ...], Region] = {}
        for v in self._gradients():
            if free.isdisjoint(self.index.consumers.get(v, ())):
                continue
            elementwise = _Elementwise(graph, free, graph.values[v].size, order, self.first)
            start = self._as_read(v, free)
            spread = self.spread(Seed(start, tuple(range(len(graph.values[start].shape)))), elementwise)
            for candidate in regions_of(self.index, spread, order):
                computes = any(OPS[graph.ops[k].kind].family in _COMPUTES for k in candidate.ops)
                if candidate.outputs and computes and not any(map(self._is_spread_out, candidate.inputs)):
                    found[ops := anchored(graph, candidate)] = candidate
                    order.join(ops)
                    free.difference_update(candidate.ops)
        return found

    def _as_read(self, v: int, free: Collection[int]) -> int:
        """``v`` transposed, where nothing in ``free`` reads it but one transposition; itself otherwise. The elements of an update
        come in the order of the parameter and its moments, which are more arrays than the gradient."""
        readers = [i for i in self.index.consumers.get(v, ()) if i in free]
        if len(readers) != 1 or self.graph.ops[readers[0]].kind != "transpose":
            return v
        return self.graph.ops[readers[0]].outputs[0]

    def _is_spread_out(self, v: int) -> bool:
        """Is ``v`` rows of numbers (a score per head, a sum per node) repeated over more elements? Its reader streams over these
        rows, and repeats a number where it reads it: as a follower it would have XLA write all elements first."""
        i = self.index.producers.get(v)
        if i is None or i not in self.free or OPS[self.graph.ops[i].kind].family != "broadcast":
            return False
        return any(1 < self.graph.values[w].size < self.graph.values[v].size for w in self.graph.ops[i].inputs)

    def _gradients(self) -> list[int]:
        """Results of the sinks that are arrays; for a scalar result, arrays of one element that are made of it (a parameter's)."""
        graph, found = self.graph, list[int]()
        for i in self.region.sinks:
            v = graph.ops[i].outputs[0]
            if graph.values[v].shape:
                found.append(v)
            else:
                made = [w for c in self.index.consumers.get(v, ()) if c in self.free for w in graph.ops[c].outputs]
                found += [w for w in made if graph.values[w].shape and graph.values[w].size == 1]
        return found

    def _after(self, values: Iterable[int]) -> int | None:
        """The last phase that makes one of ``values``; None if one of them is made outside of the call, after the call began."""
        values = tuple(values)
        if any(v in self.behind or self._made_again(v) for v in values):
            return None
        return max((self.phase[v] for v in values if v in self.phase), default=None)

    def _made_again(self, v: int) -> bool:
        """Is ``v`` made by a maker of the call? Such a value is no result of the call: readers outside compute it again."""
        return v not in self.phase and self.index.producers.get(v) in self.inside

    def _region(self, candidate: Region) -> None:
        after = self._after(candidate.inputs)
        if after is None:
            self._outside(candidate.ops)
            return
        self.joined.append(candidate)
        self.inside.update(candidate.ops)
        self.phase.update(dict.fromkeys(candidate.outputs, after + 1))

    def _is_scalar(self, i: int) -> bool:
        op = self.graph.ops[i]
        if i not in self.free or op.kind == "opaque" or OPS[op.kind].family not in _SCALAR or self.supports(i):
            return False
        return not any(self.graph.values[v].shape for v in (*op.inputs, *op.outputs))

    def _scalar(self, i: int) -> None:
        """Scalar ops of one phase are one region, so they may read each other; their other operands come from earlier phases."""
        op = self.graph.ops[i]
        if self._after(op.inputs) is None:
            self._outside((i,))
            return
        producers = self.index.producers
        phase = max(self.phase[v] + (producers[v] not in self.scalars) for v in op.inputs if v in self.phase)
        self.scalars[i] = phase
        self.inside.add(i)
        self.phase.update(dict.fromkeys(op.outputs, phase))

    def _outside(self, node: Sequence[int]) -> None:
        ops = [self.graph.ops[i] for i in node]
        if any(v in self.phase or v in self.behind or self._made_again(v) for op in ops for v in op.inputs):
            self.behind.update(v for op in ops for v in op.outputs)

    def _scalar_regions(self) -> list[Region]:
        """One region per phase, of the scalar ops that followers need; XLA runs the others."""

        def makers(values: Iterable[int]) -> set[int]:
            return self.index.makers(values) & self.scalars.keys()

        needed = reached(makers(v for region in self.joined for v in region.inputs), lambda i: makers(self.graph.ops[i].inputs))
        by_phase: dict[int, list[int]] = {}
        for i in sorted(needed):
            by_phase.setdefault(self.scalars[i], []).append(i)
        return [_one_row(self.index, ops) for ops in by_phase.values()]


class _Elementwise:
    """The ops of ``free`` on arrays of ``size`` elements and scalars only, and reductions of such an array, except ops that the
    call they would follow depends on.

    An op on larger arrays than the gradient is no part of its update: it may become a region, but no follower.
    """

    def __init__(self, graph: Graph, free: Container[int], size: int, order: Order, call: int):
        self.graph, self.free, self.size = graph, free, size
        self.order, self.call = order, order.node(call)

    def __contains__(self, i: object) -> bool:
        if not isinstance(i, int) or i not in self.free or self.graph.ops[i].kind == "opaque":
            return False
        op = self.graph.ops[i]
        of = op.inputs if OPS[op.kind].family == "reduce" else (*op.inputs, *op.outputs)
        if any(value.shape and value.size != self.size for value in (self.graph.values[v] for v in of)):
            return False
        return not self.order.leads_to(self.order.node(i), self.call)


# --- regions that pay only as an extra phase of a chosen call ---------------------------------------------------------------------


class PhaseSavings:
    """The seconds that a region saves as a phase of a chosen call, beyond its own modelled gain.

    An array that only one call reads lies in memory that the executor keeps. An array between a call and XLA lies in the block that
    XLA allocates for the whole program. A large block is fresh pages in every run, each zeroed by the system at its first touch: 29
    of 200 ms of CPU time in the gradient of a graph attention network with three regions left to XLA between four calls.

    ``fresh``: seconds for each byte of an array in XLA's memory. ``spare``: seconds that a region may lose by itself if it connects
    calls, whose other arrays then leave XLA's memory (``border_seconds``).
    """

    def __init__(self, index: GraphIndex, chosen: Sequence[Chosen], fresh: float, spare: float = 0.0):
        self.index, self.fresh, self.spare = index, fresh, spare
        self.ops = frozenset(i for c in chosen for i in c.ops)
        self.made = frozenset(v for c in chosen for r in c.regions for v in r.outputs)

    def pays(self, region: Region, plan: Plan) -> bool:
        """Is ``region`` modelled faster than XLA, including its savings as a phase of a chosen call?"""
        saved = self.saved(region)
        between = not self.made.isdisjoint(region.inputs) and any(map(self._is_read, region.outputs))
        return saved > 0.0 and plan.baseline_seconds + saved + self.spare * between > plan.seconds

    def saved(self, region: Region) -> float:
        """Seconds that arrays between ``region`` and the calls take if XLA runs it: arrays that nothing else reads."""
        inside = self.ops.union(region.ops)
        values = [v for v in region.inputs if v in self.made]
        values += [v for v in region.outputs if self._is_read(v)]
        return self.fresh * sum(self.index.bytes(v) for v in values if _stays(self.index, v, inside))

    def _is_read(self, v: int) -> bool:
        return not self.ops.isdisjoint(self.index.consumers.get(v, ()))


class Bridges:
    """Calls, more of which become one if a region that connects them (a bridge) is chosen.

    ``merge(more)`` returns all calls with the chosen calls ``more`` among them; ``calls`` are the best found so far, with the
    accepted bridges, and ``border`` the seconds that their arrays in XLA's memory take.
    """

    def __init__(self, index: GraphIndex, merge: Callable[[Sequence[Chosen]], list[Chosen]], fresh: float):
        self.index, self.merge, self.fresh = index, merge, fresh
        self.calls, self.border = self._tried([])
        self.refused: set[tuple[int, ...]] = set()  # by their ops: several seeds lead to one bridge

    def accepts(self, bridge: Chosen) -> bool:
        """Take ``bridge`` if it saves more than it loses by itself."""
        if bridge.ops in self.refused:
            return False
        calls, border = self._tried([bridge])
        if bridge in calls or border >= self.border + seconds_gained(bridge.plan):
            self.refused.add(bridge.ops)
            return False
        self.calls, self.border = calls, border
        self.refused.clear()
        return True

    def _tried(self, more: Sequence[Chosen]) -> tuple[list[Chosen], float]:
        calls = self.merge(more)
        return calls, border_seconds(self.index, calls, self.fresh)


def border_seconds(index: GraphIndex, calls: Sequence[Chosen], fresh: float) -> float:
    """Seconds for arrays that one of ``calls`` makes and another part of the program reads."""
    inside = [frozenset(c.ops) for c in calls]
    values = [
        (v, ops) for c, ops in zip(calls, inside, strict=True) for r in c.regions for v in r.outputs if v not in index.results
    ]
    return fresh * sum(index.bytes(v) for v, ops in values if not _stays(index, v, ops))


def _stays(index: GraphIndex, v: int, inside: frozenset[int]) -> bool:
    return v not in index.results and inside.issuperset(c for c in index.consumers.get(v, ()) if c in index.live)


# --- small ops between the calls of a decoded token: norms, rotary embeddings, residual sums of one row or a few ------------------

# One thread does it all: larger arrays take longer than handing out work, and are left to XLA.
_MOST_ELEMENTS = 1 << 15
_FAMILIES = frozenset(
    {"pointwise", "convert", "reduce", "argreduce", "broadcast", "reshape", "transpose", "iota", "slice", "concatenate", "pad"}
)
# Two calls that become one save the start of one.
_SAVED = 4e-6


def find_decode_glue(
    index: GraphIndex, chosen: Sequence[Chosen], order: Order, free: Collection[int], supports: Supports, plan_of: PlanOf
) -> list[Chosen]:
    """Calls of one region each, streams of one row, that a merge may make phases of neighbouring calls of products of few rows.

    A product of few rows takes as long as its weight takes to arrive, so its call should be followed by the next one without XLA in
    between. Empty if no such product was chosen. A region has ops of one level, and a path that leaves a level through any other op
    comes back to a higher one; so each region is convex, and no two of them depend on each other. ``order``: that of the chosen
    calls; ``free``: ops that no region has.
    """
    graph = index.graph
    if not any(has_few_row_product(index, c.regions) for c in chosen):
        return []
    members = {i for i in free if i in index.live and _small(graph, i) and supports(i) is None}
    levels: dict[int, list[int]] = {}
    for i, level in _levels(index, order, members).items():
        levels.setdefault(level, []).append(i)
    found = []
    for _, ops in sorted(levels.items()):
        region = _one_row(index, sorted(ops))
        plan = plan_of(region) if region.outputs and region.inputs else ""
        if not isinstance(plan, str) and plan.seconds <= plan.baseline_seconds + _SAVED:
            found.append(Chosen.of([(region, plan)]))
    return found


def has_few_row_product(index: GraphIndex, regions: Iterable[Region]) -> bool:
    """Does one of ``regions`` stream over the contracted dimension of a product of few rows?"""
    return any(has_few_rows(index.graph, index.producers, i) for region in regions for i in region.sinks)


def pays_as_decode_phase(index: GraphIndex, chosen: Sequence[Chosen], region: Region, plan: Plan) -> bool:
    """Is ``region`` a product of few rows that pays as a phase of a call, beside another one among the ``chosen`` calls?"""
    near = plan.seconds <= plan.baseline_seconds + _SAVED
    return near and has_few_row_product(index, (region,)) and any(has_few_row_product(index, c.regions) for c in chosen)


def _small(graph: Graph, i: int) -> bool:
    op = graph.ops[i]
    if op.kind == "opaque" or op.body is not None or OPS[op.kind].family not in _FAMILIES:
        return False
    return all(graph.values[v].size <= _MOST_ELEMENTS for v in (*op.inputs, *op.outputs))


def _levels(index: GraphIndex, order: Order, members: set[int]) -> dict[int, int]:
    """The level of each member: the highest of its operands, plus one if a path from a member came through another op. A value that
    only members read is as high as the lowest of its readers, so that it is made beside them."""
    level = levels_up_to(order, len(index.graph.ops), members, set(), set())
    for i in sorted(members, key=order.position, reverse=True):
        readers = index.live.intersection(index.readers(i))
        if readers and members.issuperset(readers) and index.results.isdisjoint(index.graph.ops[i].outputs):
            level[i] = max(level[i], min(level[c] for c in readers))
    return {i: level[i] for i in members}


def _one_row(index: GraphIndex, ops: Sequence[int]) -> Region:
    """``ops`` as a stream of one row: a space without axes, in which every array is a row."""
    graph, inside = index.graph, set(ops)
    touched = {v for i in ops for v in (*graph.ops[i].inputs, *graph.ops[i].outputs) if graph.values[v].literal is None}
    labels = {v: ((),) * len(graph.values[v].shape) for v in touched}
    made = (v for i in ops for v in graph.ops[i].outputs)
    outputs = (v for v in made if v in index.results or not inside.issuperset(index.consumers.get(v, ())))
    return Region.of(graph, StreamSpace(()), ops, labels, outputs)

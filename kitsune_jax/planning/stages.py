"""Pipeline design: which ops form a stage, how many workers each stage gets, and in which order rows stream."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

from kitsune_jax.ops.graph import Graph
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import SCATTER, RegionCost
from kitsune_jax.planning.plan import Infeasible
from kitsune_jax.planning.streams import Region, relations_of, row_shape

# ----------------------------------------------------------------------------------------------------------------------------------
# Pipeline design: which ops form a stage, and which values travel between stages through queues.
#
# Comes in: a ``RegionCost``. Goes out: an ordered tuple of stages, each the ops of one (graph op indices, ascending and so
# topological), and for any contiguous grouping of them the ``Link``s between its groups. Invariants: every streamed value that a
# stage needs is made in it, in an earlier stage, or outside; so the stages in order are a topological order of the pipeline. A
# reduction over the stream needs no stage for its final half: every worker folds its tiles into a partial accumulator (the sink
# op, in a stage), and the end of the call folds the partials.
#
# Makers (broadcasts and iotas of nothing streamed) appear in every stage that reads them; every other op is in exactly one stage.
# ----------------------------------------------------------------------------------------------------------------------------------

Ops = tuple[int, ...]

# Rows at which the weight of ops is compared while stages are formed; the ratios hardly depend on it.
_TYPICAL_ROWS = 64
# Two entries let a producer fill one while the consumer reads the other.
DOUBLE_BUFFER = 2
# Families that can make a row larger than what they read.
_WIDENING = frozenset({"broadcast", "convert", "pad", "concatenate", "reshape"})


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """A value that ``producer`` hands to ``consumers`` (positions in the list of stages).

    ``bypassed``: how many stages the farthest consumer stands behind the producer. 1 is a plain neighbour; more is a skip.
    """

    value: int
    producer: int
    consumers: tuple[int, ...]
    bypassed: int

    @property
    def min_depth(self) -> int:
        """Entries that keep the pipeline live although every stage on the way holds one tile and has asked for its next.

        A consumer ``n`` stages on still reads tile 0 while the producer writes tile n, so a skip needs n + 1; one more keeps both
        ends from waiting for each other (PAPER.md: as deep as the path it bypasses, or the pipeline deadlocks).
        """
        return DOUBLE_BUFFER if self.bypassed == 1 else self.bypassed + DOUBLE_BUFFER


def finest(cost: RegionCost, together: Mapping[int, int]) -> tuple[Ops, ...]:
    """One stage per matmul and per piece of vector work too heavy for a matmul's epilogue; neighbours take in the rest.

    ``together``: op -> the op in whose stage it has to be.
    """
    former = _Former(cost)
    home: dict[int, float] = {}
    for i in cost.region.ops:
        if not cost.is_maker(i):
            stage = former.place(i, home)
            if stage is not None:
                home[i] = stage
    home.update({i: home[other] for i, other in together.items()})
    _pull_prologues(cost, former, home)
    _push_widening(cost, home)
    members: dict[float, set[int]] = {}
    for i, stage in home.items():
        members.setdefault(stage, set()).add(i)
    return with_makers(cost, [tuple(sorted(members[s])) for s in sorted(members)])


class _Former:
    """Opens stages and decides where ops go, in topological order. Every op joins the latest stage it reads from, or opens a later
    one.

    Stages are keyed by numbers whose order is the order of the stages; a prologue split off stage s is s - 1/2.
    """

    def __init__(self, cost: RegionCost):
        self.cost = cost
        self.tensor: dict[float, float] = {}
        self.simt: dict[float, float] = {}

    def open(self, key: float | None = None) -> float:
        stage = float(len(self.tensor)) if key is None else key
        self.tensor[stage], self.simt[stage] = 0.0, 0.0
        return stage

    def place(self, i: int, home: dict[int, float]) -> float | None:
        """The stage of op ``i``; None for a prologue: vector work on nothing but what comes from outside waits for its reader."""
        cost = self.cost
        sources = [cost.producer[v] for v in cost.graph.ops[i].inputs if v in cost.producer]
        before = [home[p] for p in sources if p in home]
        seconds = cost.tile_seconds(i, _TYPICAL_ROWS)
        if cost.work(i).resource == "tensor":
            stage = self.open()
            self.tensor[stage] += seconds
            return stage
        if not before:
            return None
        stage = max(before)
        if self.tensor[stage] and self.simt[stage] + seconds > self.tensor[stage]:
            stage = self.open()  # the epilogue would take longer than the matmul it hides behind
        self.simt[stage] += seconds
        return stage


def _pull_prologues(cost: RegionCost, former: _Former, home: dict[int, float]) -> None:
    """Ops without a stage join their earliest reader's, or go in front of it if they take longer than its matmul.

    Those that nobody reads share a stage of their own.
    """
    own: float | None = None
    pulled: dict[float, list[int]] = {}
    for i in reversed(cost.region.ops):
        if i in home or cost.is_maker(i):
            continue
        readers = [home[c] for v in cost.graph.ops[i].outputs for c in cost.readers.get(v, ()) if c in home]
        if not readers and own is None:
            own = former.open()
        home[i] = min(readers, default=own or 0.0)
        pulled.setdefault(home[i], []).append(i)
    for stage, ops in pulled.items():
        seconds = sum(cost.tile_seconds(i, _TYPICAL_ROWS) for i in ops)
        if former.tensor[stage] and seconds > former.tensor[stage]:
            front = former.open(stage - 0.5)
            home.update(dict.fromkeys(ops, front))


def _push_widening(cost: RegionCost, home: dict[int, float]) -> None:
    """An op that only makes its input wider (a broadcast, a conversion up) moves to its reader, so the narrow value travels."""
    for i in reversed(cost.region.ops):
        if i not in home or cost.family(i) not in _WIDENING:
            continue
        op = cost.graph.ops[i]
        stages = {home[c] for v in op.outputs for c in cost.readers.get(v, ())}
        if len(stages) != 1 or any(v in cost.outputs for v in op.outputs):
            continue
        made = sum(cost.row_bytes(v) for v in dict.fromkeys(op.inputs) if v in cost.producer and cost.streamed(v))
        if sum(cost.row_bytes(v) for v in op.outputs) > made:
            home[i] = stages.pop()


def with_makers(cost: RegionCost, stages: Sequence[Ops]) -> tuple[Ops, ...]:
    """Makers added to every stage that needs them, also by way of other makers; one that nobody reads goes to the first."""
    members = [set(ops) for ops in stages] or [set[int]()]
    places: dict[int, set[int]] = {}
    for k, ops in enumerate(stages):
        for i in ops:
            places.setdefault(i, set()).add(k)
    for i in reversed(cost.region.ops):
        if cost.is_maker(i):
            readers = {c for v in cost.graph.ops[i].outputs for c in cost.readers.get(v, ())}
            places.setdefault(i, set()).update(*(places.get(c, set()) for c in readers))
            for k in places[i] or (0,):
                members[k].add(i)
    return tuple(tuple(sorted(ops)) for ops in members)


def joined(stages: Iterable[Ops]) -> Ops:
    """``stages`` as one."""
    return tuple(sorted(set().union(*stages)))


def resource_of(cost: RegionCost, ops: Ops) -> str:
    return "tensor" if any(cost.work(i).resource == "tensor" for i in ops) else "simt"


def stage_name(cost: RegionCost, s: int, ops: Ops) -> str:
    """The position of a stage and the op that takes longest in it."""
    heaviest = max(ops, key=lambda i: (cost.tile_seconds(i, _TYPICAL_ROWS), -i))
    return f"{s}:{cost.graph.ops[heaviest].label or cost.graph.ops[heaviest].kind}"


def links(cost: RegionCost, stages: Sequence[Ops]) -> tuple[Link, ...]:
    """The queues between ``stages``: one per value that crosses, multicast where several stages read it, in order of producer."""
    crossing = _crossing(cost, stages)
    apart = Levels(len(stages), crossing)
    return tuple(
        Link(v, source, tuple(sorted(readers)), max(apart(source, s) for s in readers))
        for (source, v), readers in sorted(crossing.items())
    )


def links_to_each(cost: RegionCost, stages: Sequence[Ops]) -> tuple[Link, ...]:
    """``links`` with a queue of its own for each stage that reads a value."""
    crossing = _crossing(cost, stages)
    apart = Levels(len(stages), crossing)
    return tuple(
        Link(v, source, (s,), apart(source, s)) for (source, v), readers in sorted(crossing.items()) for s in sorted(readers)
    )


def _crossing(cost: RegionCost, stages: Sequence[Ops]) -> dict[tuple[int, int], set[int]]:
    """(producer, value) -> the stages that read it."""
    home = {i: s for s, ops in enumerate(stages) for i in ops if not cost.is_maker(i)}
    crossing: dict[tuple[int, int], set[int]] = {}
    for s, ops in enumerate(stages):
        for v in dict.fromkeys(v for i in ops for v in cost.graph.ops[i].inputs):
            maker = cost.producer.get(v)
            if maker is None or maker not in home or not cost.streamed(v):
                continue
            if home[maker] != s:
                crossing.setdefault((home[maker], v), set()).add(s)
    return crossing


class Levels:
    """How far apart two stages are in the pipeline; stages are numbered in topological order.

    A stage stands one in front of the first that it feeds, and one that feeds none where the longest way to it ends. So all ways
    between two stages are equally long, and the queues along each hold as many tiles: where ways that part meet again, a stage on
    the one would else be full while its reader waits for the other.
    """

    def __init__(self, stages: int, crossing: Mapping[tuple[int, int], Iterable[int]]):
        following: dict[int, set[int]] = {}
        for (source, _), readers in crossing.items():
            following.setdefault(source, set()).update(readers)
        self.level = [0] * stages
        for s in range(stages):
            for b in following.get(s, ()):
                self.level[b] = max(self.level[b], self.level[s] + 1)
        for s in reversed(range(stages)):
            if s in following:
                self.level[s] = min(self.level[b] for b in following[s]) - 1

    def __call__(self, source: int, target: int) -> int:
        return self.level[target] - self.level[source]


# ----------------------------------------------------------------------------------------------------------------------------------
# Load balance: how many workers each stage of a spatial pipeline gets.
#
# Comes in: one ``Load`` per stage and the number of workers. Goes out: ``Balance``, whole numbers of workers and the throughput
# they reach. The integer program is that of arXiv 2502.18403, section on load balancing:
#
#     maximise T   with   T <= t_i * r_i(a_i),   least_i <= a_i <= most_i,   sum of a_i <= workers
#
# with t_i = 1 / seconds and r_i(a) = a. (The paper's limits on T by the memory's bandwidth, and its gain from operands kept on
# chip, are in the seconds that the planner asks with.) The r_i grow, and no stage's workers help another, so the optimum is found
# without a solver: the tests compare it with that of a mixed-integer programme.
# ----------------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """A stage: ``seconds`` for one tile on one worker, between ``least`` and ``most`` workers."""

    seconds: float
    least: int = 1
    most: int = 1 << 20

    def throughput(self, workers: int) -> float:
        """Tiles per second with ``workers`` workers."""
        return min(workers, self.most) / self.seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Balance:
    """``throughput`` in tiles per second."""

    workers: tuple[int, ...]
    throughput: float


def balance(loads: Sequence[Load], workers: int) -> Balance:
    """The optimum of the integer program, with no worker that does not raise the throughput.

    The slowest stage gets one more worker until it can't have one: only a worker for the slowest stage raises T, and a stage that
    was given one was the slowest when it had one less, so no other distribution has all stages faster. Raises ``Infeasible`` where
    the stages' least workers are more than there are.

    >>> balance([Load(3e-6), Load(1e-6)], 8).workers
    (6, 2)
    """
    for i, load in enumerate(loads):
        if load.seconds <= 0 or not 1 <= load.least <= load.most:
            raise ValueError(f"stage {i} has no sensible load: {load}")
    if not loads:
        raise ValueError("no stages to balance")
    given = [load.least for load in loads]
    left = workers - sum(given)
    if left < 0:
        raise Infeasible(f"{len(loads)} stages need {sum(given)} workers at least; the machine has {workers}")
    queue = [(load.throughput(load.least), i) for i, load in enumerate(loads)]
    heapq.heapify(queue)
    while left and given[queue[0][1]] < loads[queue[0][1]].most:
        slowest = queue[0][1]
        given[slowest] += 1
        left -= 1
        heapq.heapreplace(queue, (loads[slowest].throughput(given[slowest]), slowest))
    return _settled(loads, queue[0][0])


def _settled(loads: Sequence[Load], throughput: float) -> Balance:
    """The fewest workers that keep up ``throughput``. 1e-6: so that rounding asks for no worker more."""
    need = [throughput * load.seconds * (1 - 1e-6) for load in loads]
    workers = tuple(min(load.most, max(load.least, -int(-x // 1))) for load, x in zip(loads, need, strict=True))
    return Balance(workers, min(load.throughput(a) for load, a in zip(loads, workers, strict=True)))


# ----------------------------------------------------------------------------------------------------------------------------------
# The orders in which the rows of a region may stream.
#
# Comes in: a Graph and a Region of it. Goes out: the indices (graph values) whose order makes a reduction of runs of an op that
# folds rows into a table by them.
# ----------------------------------------------------------------------------------------------------------------------------------


def orders_of(graph: Graph, region: Region) -> list[int]:
    """The indices in whose order the region's rows may stream: one for each row, by which an op folds rows into a table."""
    labels, axes = region.label_of(), tuple(range(len(region.space.sizes)))
    found: dict[int, None] = {}
    for i in region.sinks:
        op = graph.ops[i]
        if OPS[op.kind].family == SCATTER and _made_of_results(graph, region, op.inputs[1]):
            continue
        if OPS[op.kind].family == SCATTER and not op["sorted"]:
            ids = labels.get(op.inputs[1], ())
            if tuple(a for dim in ids for a in dim) == axes and math.prod(row_shape(graph.values[op.inputs[1]].shape, ids)) == 1:
                found[op.inputs[1]] = None
    return list(found)


def _made_of_results(graph: Graph, region: Region, ids: int) -> bool:
    """Is ``ids`` a result of the region, or made of one? Indices whose order rows stream in are needed in front of the call."""
    producers = {v: i for i in region.ops for v in graph.ops[i].outputs}
    results, seen, work = set(region.outputs), {ids}, [ids]
    while work:
        v = work.pop()
        if v in results:
            return True
        new = set(graph.ops[producers[v]].inputs).difference(seen) if v in producers else set()
        seen |= new
        work += new
    return False


# ----------------------------------------------------------------------------------------------------------------------------------
# A long dimension inside the rows of a region, which a stage may work off in blocks: the keys of an attention.
#
# Comes in: a Graph and a Region. Goes out: the dimension that makes most of what a row holds, as a dimension of every value that
# has it, if every op carries it on, makes it or folds it. Invariant: an op that needs the whole dimension at once is never among
# them.
# ----------------------------------------------------------------------------------------------------------------------------------

_LONG = 256  # shorter ones fit beside the rest of a row
_CARRIED = frozenset({"pointwise", "convert", "broadcast", "reshape", "transpose", "iota", "reduce", "argreduce", "dot"})


@dataclasses.dataclass(frozen=True)
class Inner:
    """``dims``: value -> which of its dimensions it is. ``ops``: those that work along it. ``folds``: some of them that fold it."""

    size: int
    dims: dict[int, int]
    ops: frozenset[int]
    folds: frozenset[int]


def inner_of(graph: Graph, region: Region) -> Inner | None:
    """The dimension that makes most of what a row of ``region`` holds; None where none can be worked off in blocks."""
    labels = region.label_of()
    found: list[tuple[int, int, int]] = []
    for i in region.ops:
        for v in graph.ops[i].outputs:
            if v in labels and i not in region.sinks:
                shape = graph.values[v].shape
                size = math.prod(row_shape(shape, labels[v]))
                found += [(size, v, d) for d, n in enumerate(shape) if not labels[v][d] and n >= _LONG]
    touching: dict[int, list[int]] = {}
    for i in region.ops:
        for v in (*graph.ops[i].inputs, *graph.ops[i].outputs):
            touching.setdefault(v, []).append(i)
    seen: set[tuple[int, int]] = set()
    for _, v, d in sorted(found, key=lambda f: -f[0]):
        if (v, d) in seen:
            continue
        inner = _spread(graph, region, touching, v, d)
        if inner is not None and inner.folds:
            return inner
        seen |= set(inner.dims.items()) if inner is not None else {(v, d)}
    return None


def _spread(graph: Graph, region: Region, touching: dict[int, list[int]], value: int, dim: int) -> Inner | None:
    sinks = set(region.sinks)
    dims, work, ops, folds = {value: dim}, [value], set(), set()
    while work:
        v = work.pop()
        for i in touching.get(v, ()):
            op = graph.ops[i]
            ops.add(i)
            if OPS[op.kind].family not in _CARRIED:
                return None
            operands = (*op.inputs, *op.outputs)
            for r in relations_of(graph, op):
                members = [(operands[k], d) for k, d in r.members]
                if (v, dims[v]) not in members:
                    continue
                extreme = OPS[op.kind].family == "argreduce" and r.role == "mixed"
                if r.role in ("mixed", "reshaped") and not extreme:
                    return None
                if extreme or r.role == "contracted" and i not in sinks:
                    folds.add(i)
                for w, d in members:
                    if w not in dims:
                        dims[w] = d
                        work.append(w)
                    elif dims[w] != d:
                        return None
    return Inner(graph.values[value].shape[dim], dims, frozenset(ops), frozenset(folds))

"""Pipeline design: the ops of each stage, the workers of each stage, and the orders and blocks in which rows can stream.

Comes in: a ``RegionCost``, or a Graph and a Region. Goes out: an ordered tuple of stages (``finest``) with the ``Link``s between
any contiguous groups of them, a ``Balance`` of workers, the indices in whose order rows may stream, and a long dimension that can
be computed in blocks. Invariant: every streamed value that a stage reads is made in it, in an earlier stage, or outside.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence

from kitsune_jax.ops.graph import Graph, reached
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import SCATTER, RegionCost
from kitsune_jax.planning.plan import Infeasible
from kitsune_jax.planning.streams import Region, relations_of, row_shape

# --- Stages: each a tuple of graph op indices, ascending and so topological -------------------------------------------------------

Ops = tuple[int, ...]

# Rows at which ops are compared while stages are formed; the ratios hardly depend on it.
_TYPICAL_ROWS = 64
# With two entries a producer fills one while the consumer reads the other.
DOUBLE_BUFFER = 2
# Families whose results can have larger rows than their operands.
_WIDENING = frozenset({"broadcast", "convert", "pad", "concatenate", "reshape"})


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """A value that ``producer`` sends to ``consumers`` (positions in the list of stages). ``bypassed``: stages from the producer to
    the farthest consumer, 1 for neighbours.
    """

    value: int
    producer: int
    consumers: tuple[int, ...]
    bypassed: int

    @property
    def min_depth(self) -> int:
        """Entries with which the pipeline cannot deadlock although every stage between holds a tile and has asked for its next.

        A consumer ``n`` stages on still reads tile 0 while the producer writes tile n, so a skip needs n + 1; one more keeps both
        ends from waiting for each other (PAPER.md: as deep as the path it bypasses, or the pipeline deadlocks).
        """
        return DOUBLE_BUFFER if self.bypassed == 1 else self.bypassed + DOUBLE_BUFFER


def finest(cost: RegionCost, together: Mapping[int, int]) -> tuple[Ops, ...]:
    """One stage per matmul and per piece of vector work that is too heavy for a matmul's epilogue; other ops join neighbours.

    Makers (broadcasts and iotas of nothing streamed) are in every stage that reads them, every other op in exactly one. The final
    half of a reduction over the stream needs no stage: a sink folds each worker's tiles, and the end of the call folds the workers'
    results. ``together``: op -> the op whose stage it must be in.
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
    """Opens stages and assigns ops to them in topological order: an op joins the latest stage it reads from, or opens one.

    Stages are keyed by numbers in the order of the stages; a prologue split off stage s is s - 1/2.
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
        """The stage of op ``i``. None for vector work on values from outside alone: it goes to the stage of its reader."""
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
    """Put ops without a stage into their earliest reader's, or in front of it if they outlast its matmul; unread ops share one."""
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
    """Move an op that only widens its input (a broadcast, a conversion up) to its reader, so that the narrow value is sent."""
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
    """``stages`` with makers added to every stage that needs them, also through other makers; unread ones go to the first."""
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
    """The ops of all ``stages``."""
    return tuple(sorted(set().union(*stages)))


def resource_of(cost: RegionCost, ops: Ops) -> str:
    return "tensor" if any(cost.work(i).resource == "tensor" for i in ops) else "simt"


def stage_name(cost: RegionCost, s: int, ops: Ops) -> str:
    """The position of a stage and its longest op."""
    heaviest = max(ops, key=lambda i: (cost.tile_seconds(i, _TYPICAL_ROWS), -i))
    return f"{s}:{cost.graph.ops[heaviest].label or cost.graph.ops[heaviest].kind}"


def links(cost: RegionCost, stages: Sequence[Ops], to_each: bool = False) -> tuple[Link, ...]:
    """The queues between ``stages``: one per value that crosses, multicast if several stages read it, in order of producer.
    ``to_each``: a separate queue for each stage that reads a value."""
    crossing = _crossing(cost, stages)
    apart = Levels(len(stages), crossing)
    return tuple(
        Link(v, source, group, max(apart(source, s) for s in group))
        for (source, v), readers in sorted(crossing.items())
        for group in ([(s,) for s in sorted(readers)] if to_each else [tuple(sorted(readers))])
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
    """Distances between stages of a pipeline, which are numbered in topological order.

    A stage is placed one before the first that it feeds, or, if it feeds none, at the end of the longest path to it. So all paths
    between two stages have equal length, and their queues hold equally many tiles. Otherwise, where paths join again, a stage on
    one of them could be full while its reader waits for the other.
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


# --- Load balance -----------------------------------------------------------------------------------------------------------------


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
    """The optimum of the integer program of arXiv 2502.18403, section on load balancing, without workers that add no throughput:

        maximise T   with   T <= t_i * r_i(a_i),   least_i <= a_i <= most_i,   sum of a_i <= workers

    where t_i = 1 / seconds and r_i(a) = a. (The seconds include the paper's limits by memory bandwidth and its gain from operands
    kept on chip.) The slowest stage gets one more worker until it cannot have one: only a worker for the slowest stage raises T,
    and a stage that got one was the slowest without it, so no other distribution has all stages faster (the tests compare this with
    a mixed-integer solver). Raises ``Infeasible`` if the stages' least workers are more than there are.

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
    return _fewest_workers(loads, queue[0][0])


def _fewest_workers(loads: Sequence[Load], throughput: float) -> Balance:
    """The fewest workers that keep up ``throughput``. 1e-6: rounding must not add a worker."""
    need = [throughput * load.seconds * (1 - 1e-6) for load in loads]
    workers = tuple(min(load.most, max(load.least, -int(-x // 1))) for load, x in zip(loads, need, strict=True))
    return Balance(workers, min(load.throughput(a) for load, a in zip(loads, workers, strict=True)))


# --- Orders of rows ---------------------------------------------------------------------------------------------------------------


def orders_of(graph: Graph, region: Region) -> list[int]:
    """The indices (graph values) in whose order the region's rows may stream, one per row, by which an op folds rows into a table:
    the fold is then a reduction of runs."""
    labels, axes = region.label_of(), tuple(range(len(region.space.sizes)))
    found: dict[int, None] = {}
    for i in region.sinks:
        op = graph.ops[i]
        if OPS[op.kind].family != SCATTER or op["sorted"] or _made_of_results(graph, region, op.inputs[1]):
            continue
        ids = labels.get(op.inputs[1], ())
        if tuple(a for dim in ids for a in dim) == axes and math.prod(row_shape(graph.values[op.inputs[1]].shape, ids)) == 1:
            found[op.inputs[1]] = None
    return list(found)


def _made_of_results(graph: Graph, region: Region, ids: int) -> bool:
    """Whether ``ids`` depends on a result of the region: an order must be known before the call."""
    producers = {v: i for i in region.ops for v in graph.ops[i].outputs}
    return not reached([ids], lambda v: graph.ops[producers[v]].inputs if v in producers else ()).isdisjoint(region.outputs)


# --- Long dimensions --------------------------------------------------------------------------------------------------------------

_LONG = 256  # shorter dimensions fit beside the rest of a row
_CARRIED = frozenset({"pointwise", "convert", "broadcast", "reshape", "transpose", "iota", "reduce", "argreduce", "dot"})


@dataclasses.dataclass(frozen=True)
class Inner:
    """A long dimension inside the rows (the keys of an attention) that no op needs at once. ``dims``: value -> which of its
    dimensions it is. ``ops``: those that carry it on, make it or fold it. ``folds``: those that fold it."""

    size: int
    dims: dict[int, int]
    ops: frozenset[int]
    folds: frozenset[int]


def inner_of(graph: Graph, region: Region) -> Inner | None:
    """The dimension that makes up most of a row of ``region``; None if none can be computed in blocks."""
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

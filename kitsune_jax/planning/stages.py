"""Pipeline design: which ops form a stage, and which values travel between stages through queues.

Comes in: a ``RegionCost``. Goes out: an ordered tuple of stages, each the ops of one (graph op indices, ascending and so
topological), and for any contiguous grouping of them the ``Link``s between its groups. Invariants: every streamed value that a
stage needs is made in it, in an earlier stage, or outside; so the stages in order are a topological order of the pipeline. A
reduction over the stream needs no stage for its final half: every worker folds its tiles into a partial accumulator (the sink op,
in a stage), and the end of the call folds the partials.

Makers (broadcasts and iotas of nothing streamed) appear in every stage that reads them; every other op is in exactly one stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from kitsune_jax.planning.cost import RegionCost

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

"""A call: regions that run one after the other, as the phases of one custom call.

Comes in: regions with their plans. Goes out: ``Chosen``: the phases, each with the number of the first phase in which it can run.
Invariants: a phase reads what phases of lower numbers make, or what the call is given; phases of one number do not read each
other's results. What was a sink of a phase is an array like any other behind the barrier, so every phase has a stream space of its
own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

from kitsune_jax.graph import Graph
from kitsune_jax.planning.plan import Plan
from kitsune_jax.regions.convex import anchored
from kitsune_jax.streams import Region


@dataclasses.dataclass(frozen=True)
class Phase:
    """A region that runs in phase ``number`` of a call."""

    number: int
    region: Region
    plan: Plan


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A call, its phases in the order in which they run. ``apart``: the calls that were merged into it, none for any other."""

    phases: tuple[Phase, ...]
    apart: tuple[Chosen, ...] = ()

    @staticmethod
    def of(planned: Sequence[tuple[Region, Plan]], apart: tuple[Chosen, ...] = ()) -> Chosen:
        """The call of these regions with their plans, none of which may wait for itself."""
        maker = {v: k for k, (region, _) in enumerate(planned) for v in region.outputs}
        number: dict[int, int] = {}

        def number_of(k: int) -> int:
            work = [k]
            while work:
                before = {maker[v] for v in planned[work[-1]][0].inputs if v in maker}
                missing = [j for j in before if j not in number]
                work += missing
                if not missing:
                    number[work.pop()] = 1 + max((number[j] for j in before), default=-1)
            return number[k]

        phases = [Phase(number_of(k), region, plan) for k, (region, plan) in enumerate(planned)]
        return Chosen(tuple(sorted(phases, key=lambda p: (p.number, p.region.ops))), apart)

    @property
    def region(self) -> Region:
        """That of the first phase."""
        return self.phases[0].region

    @property
    def plan(self) -> Plan:
        """That of the first phase."""
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
        return tuple(dict.fromkeys(i for p in self.phases for i in p.region.ops))


Together = Callable[[Chosen], Chosen | str]  # a call with the plans that its phases have in it, or why they are no phases of one


def as_they_are(call: Chosen) -> Chosen:
    return call


def anchored_call(graph: Graph, regions: Sequence[Region]) -> tuple[int, ...]:
    """The anchored ops of a call: those of its regions, and makers of what an earlier phase made, which can run nowhere else."""
    fixed = dict.fromkeys(i for r in regions for i in anchored(graph, r))
    if len(regions) > 1:
        made = {v for r in regions for v in r.outputs}
        own = (i for r in regions for i in r.ops if i not in r.again)
        fixed |= dict.fromkeys(i for i in own if not made.isdisjoint(graph.ops[i].inputs))
    return tuple(fixed)


def joined(graph: Graph, regions: Sequence[Region], wanted: Collection[int] = ()) -> Region:
    """The regions of a call as one: its ops, what it reads and what it gives. ``wanted``: values that other calls read.

    The stream space, the labels and the sinks are those of the first; the others have their own.
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
    """Values that are read outside of the ops ``inside``, also by makers among these that are made again outside."""
    producers = graph.producers()
    needed: set[int] = set()
    work = [*graph.outputs, *(v for i, op in enumerate(graph.ops) if i not in inside for v in op.inputs)]
    while work:
        v = work.pop()
        if v in needed:
            continue
        needed.add(v)
        if v not in made and producers.get(v) in inside:
            work.extend(graph.ops[producers[v]].inputs)
    return needed

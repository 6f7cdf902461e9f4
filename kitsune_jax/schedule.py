"""The order in which a function's ops and regions are evaluated.

Comes in: a Graph, which of its ops have effects, and regions. Goes out: nodes (an op's index, or a region), and the regions that
cannot stand as one. Invariants: every value is defined before it is read; ops with effects keep their order; a region stands as one
node, or is dissolved into its ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from kitsune_jax.graph import Graph, topological


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

"""A region as a graph of its own, so that equal regions are planned and generated once.

Comes in: a Graph and a Region of it. Goes out: ``Isolated``: the ops and values of the region, numbered from 0 in their old order
and without source lines, and a plan for it in the numbers of the whole graph. Invariant: two regions with equal ``Isolated.key``
have equal plans, but for these numbers.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.graph import Graph, Op
from kitsune_jax.planning.plan import Plan
from kitsune_jax.streams import Region


@dataclasses.dataclass(frozen=True)
class Isolated:
    """``ops`` and ``values``: the numbers that those of ``graph`` have in the whole graph."""

    graph: Graph
    region: Region
    ops: tuple[int, ...]
    values: tuple[int, ...]

    @property
    def key(self) -> tuple[Graph, Region]:
        return self.graph, self.region

    def in_the_whole(self, plan: Plan) -> Plan:
        """``plan``, made for this graph, with the ops and values of the whole graph."""
        return _renamed(plan, dict(enumerate(self.ops)), dict(enumerate(self.values)))

    def in_itself(self, plan: Plan) -> Plan:
        """The inverse of ``in_the_whole``."""
        return _renamed(plan, {i: k for k, i in enumerate(self.ops)}, {v: k for k, v in enumerate(self.values)})


def _renamed(plan: Plan, ops: dict[int, int], values: dict[int, int]) -> Plan:
    return dataclasses.replace(
        plan,
        stages=tuple(dataclasses.replace(s, ops=tuple(ops[i] for i in s.ops)) for s in plan.stages),
        queues=tuple(dataclasses.replace(q, value=values[q.value]) for q in plan.queues),
        order=None if plan.order is None else values[plan.order],
        unordered=tuple(ops[i] for i in plan.unordered),
        blocks=None if plan.blocks is None else (values[plan.blocks[0]], *plan.blocks[1:]),
    )


def isolated(graph: Graph, region: Region) -> Isolated:
    """``region`` as a graph of its own."""
    ops = tuple(sorted(region.ops))
    touched = {v for i in ops for v in (*graph.ops[i].inputs, *graph.ops[i].outputs)}
    values = tuple(sorted(touched.union(region.inputs, region.outputs)))
    number = {v: k for k, v in enumerate(values)}
    place = {i: k for k, i in enumerate(ops)}

    def renumbered(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([number[v] for v in ids])

    own = tuple(
        Op(op.kind, renumbered(op.inputs), renumbered(op.outputs), op.params, label=op.label, body=op.body)
        for op in (graph.ops[i] for i in ops)
    )
    return Isolated(
        Graph(tuple(graph.values[v] for v in values), renumbered(region.inputs), renumbered(region.outputs), own),
        dataclasses.replace(
            region,
            ops=tuple(place[i] for i in region.ops),
            labels=tuple((number[v], axes) for v, axes in region.labels if v in number),
            inputs=renumbered(region.inputs),
            outputs=renumbered(region.outputs),
            sinks=tuple(place[i] for i in region.sinks),
            again=tuple(place[i] for i in region.again),
        ),
        ops,
        values,
    )

"""What stands between the calls of a token that is generated: norms, rotary embeddings, residual sums of one row or a few.

Comes in: the chosen calls, and the ops that no region has. Goes out: calls of one region each, streams of one row, which a merge
may make phases of their neighbours. A product of few rows takes as long as its weight takes to arrive, and its call should be
followed by the next one's without XLA in between. Nothing of this kind is looked for where no such product was chosen.

Invariant: a region has ops of one level, and a path that leaves a level through any other op comes back to a higher one; so each is
convex, and no two of them wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kitsune_jax.graph import Graph
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.plan import Plan
from kitsune_jax.regions.calls import Chosen
from kitsune_jax.regions.graph_index import GraphIndex
from kitsune_jax.regions.order import Order
from kitsune_jax.streams import Region, StreamSpace, has_few_rows

# One thread does it all: what takes longer than handing out work is left to XLA's.
_MOST_ELEMENTS = 1 << 15
_FAMILIES = frozenset(
    {"pointwise", "convert", "reduce", "argreduce", "broadcast", "reshape", "transpose", "iota", "slice", "concatenate", "pad"}
)
# Two calls that become one save the one's start.
_SAVED = 4e-6


def between(
    index: GraphIndex,
    chosen: Sequence[Chosen],
    order: Order,
    free: Collection[int],
    supports: Callable[[int], str | None],
    plan_of: Callable[[Region], Plan | str],
) -> list[Chosen]:
    """The calls that ``chosen`` ones of products of few rows may be joined by. ``order``: that of the chosen calls; ``free``: ops
    that no region has."""
    graph = index.graph
    if not any(has_token(index, c) for c in chosen):
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


def has_token(index: GraphIndex, call: Chosen) -> bool:
    """Does ``call`` stream over what a product of few rows contracts?"""
    return any(_few_rows(index, region) for region in call.regions)


def _few_rows(index: GraphIndex, region: Region) -> bool:
    return any(has_few_rows(index.graph, index.producers, i) for i in region.sinks)


def joins(index: GraphIndex, chosen: Sequence[Chosen], region: Region, plan: Plan) -> bool:
    """Is ``region`` such a product that pays as a phase of a call, beside one of those that were ``chosen``?"""
    near = plan.seconds <= plan.baseline_seconds + _SAVED
    return near and _few_rows(index, region) and any(has_token(index, c) for c in chosen)


def _small(graph: Graph, i: int) -> bool:
    op = graph.ops[i]
    if op.kind == "opaque" or op.body is not None or OPS[op.kind].family not in _FAMILIES:
        return False
    return all(graph.values[v].size <= _MOST_ELEMENTS for v in (*op.inputs, *op.outputs))


def _levels(index: GraphIndex, order: Order, members: set[int]) -> dict[int, int]:
    """The level of each member: of what it reads the highest, and one more where a path from a member came by another op. What is
    read by members only is as high as the lowest of them, so that it is made beside its readers."""
    graph, producers = index.graph, index.producers
    level: dict[int, int] = {}
    nodes = sorted({order.node(i) for i in index.live}, key=order.position)
    for node in nodes:
        inside = order.members(node)
        at = 0
        for v in (v for i in inside for v in graph.ops[i].inputs):
            p = producers.get(v)
            if p is not None and p in level and order.node(p) != node:
                at = max(at, level[p] + (p in members and node not in members))
        level.update(dict.fromkeys(inside, at))
    for node in reversed(nodes):
        if node in members and not index.results.intersection(graph.ops[node].outputs):
            readers = [c for v in graph.ops[node].outputs for c in index.consumers.get(v, ()) if c in index.live]
            if readers and members.issuperset(readers):
                level[node] = max(level[node], min(level[c] for c in readers))
    return {i: level[i] for i in members}


def _one_row(index: GraphIndex, ops: Sequence[int]) -> Region:
    """``ops`` as a stream of one row: a space without axes, in which every array is a row."""
    graph, inside = index.graph, set(ops)
    made = [v for i in ops for v in graph.ops[i].outputs]
    read = dict.fromkeys(v for i in ops for v in graph.ops[i].inputs if graph.values[v].literal is None)
    return Region(
        space=StreamSpace(()),
        ops=tuple(ops),
        labels=tuple((v, ((),) * len(graph.values[v].shape)) for v in sorted({*made, *read})),
        inputs=tuple(v for v in read if v not in made),
        outputs=tuple(v for v in made if v in index.results or not inside.issuperset(index.consumers.get(v, ()))),
    )

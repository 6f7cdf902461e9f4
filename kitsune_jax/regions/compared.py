"""Values that are held against each other have one maker: either regions, or XLA.

Comes in: a Graph; a choice of regions. Goes out: which values a comparison is made of, and which ops of ``again`` must not be made
again. A maximum's gradient goes to what equals it, and what equals nothing has none. Our exponential and XLA's differ in the last
bit, and XLA makes one operation of a multiplication and an addition: so where XLA takes the maximum of values that a region would
make again to compare them, the region reads XLA's. What regions make alone has the same bits in all of them
(``program.passes.compared_values``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.comparisons import COMPARISONS, HAND_ON
from kitsune_jax.ops.spec import is_float
from kitsune_jax.ops.table import OPS
from kitsune_jax.regions.graph_index import GraphIndex

_EXTREMES = frozenset({"reduce_max", "reduce_min", "scatter_max", "scatter_min", "cummax", "cummin"})
S = TypeVar("S")
_THROUGH = frozenset({"pointwise", "convert", "gather"})


def with_one_maker(index: GraphIndex, choose: Callable[[GraphIndex], S], ops_of: Callable[[S], Collection[int]]) -> S:
    """What is chosen of ``index`` so that no value is made again that XLA makes as well and that is compared."""
    while True:
        found = choose(index)
        twice = _made_twice(index, ops_of(found))
        if not twice:
            return found
        index = dataclasses.replace(index, again=index.again - twice)


def _made_twice(index: GraphIndex, inside: Collection[int]) -> frozenset[int]:
    """The ops of ``again`` that both regions (of the ops ``inside``) and XLA would make, on the way to a comparison."""
    by_xla = set(index.live.difference(inside))
    both = set[int]()
    for i in sorted(index.again.intersection(inside), reverse=True):  # who reads a value stands behind who makes it
        if any(c in by_xla for v in index.graph.ops[i].outputs for c in index.consumers.get(v, ())):
            by_xla.add(i)
            both.add(i)
    if all(_is_exact(index.graph.ops[i]) for i in both):
        return frozenset()
    ways = compared(index.graph)
    both = {i for i in both if not ways.isdisjoint(index.graph.ops[i].outputs) and OPS[index.graph.ops[i].kind].family != "gather"}
    return frozenset() if all(_is_exact(index.graph.ops[i]) for i in both) else frozenset(both)


def _is_exact(op: Op) -> bool:
    """Does every maker give the same bits, whatever it computes around ``op``?"""
    return op.kind in HAND_ON or op.kind in COMPARISONS or OPS[op.kind].moves or OPS[op.kind].family == "gather"


def compared(graph: Graph) -> frozenset[int]:
    """The floats that comparisons of two values are made of, through pointwise ops, maxima, and what only moves elements."""
    literal = {v for v, value in enumerate(graph.values) if value.literal is not None}
    for op in graph.ops:
        if op.kind != "opaque" and OPS[op.kind].moves and op.inputs and literal.issuperset(op.inputs):
            literal.update(op.outputs)
    pairs = (op.inputs for op in graph.ops if op.kind in COMPARISONS and literal.isdisjoint(op.inputs))
    return _behind(graph, (v for x, y in pairs if x != y for v in (x, y)))


def taken_the_largest_of(graph: Graph) -> frozenset[int]:
    """Those of ``compared`` whose maximum or minimum over some elements is taken."""
    folded = (v for op in graph.ops if op.kind in _EXTREMES for v in op.inputs)
    return compared(graph) & _behind(graph, folded)


def _behind(graph: Graph, values: Iterable[int]) -> frozenset[int]:
    producers, seen, pending = graph.producers(), set[int](), list(values)
    while pending:
        v = pending.pop()
        if v in seen or not is_float(graph.values[v].dtype):
            continue
        seen.add(v)
        op = graph.ops[producers[v]] if v in producers else None
        if op is not None and op.kind != "opaque":
            spec = OPS[op.kind]
            if spec.moves or spec.family in _THROUGH or op.kind in _EXTREMES:
                pending += op.inputs
    return frozenset(seen)

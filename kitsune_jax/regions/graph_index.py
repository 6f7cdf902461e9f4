"""A graph with what the search for regions derives from it once."""

from __future__ import annotations

import dataclasses
from collections.abc import Container

from kitsune_jax.graph import Graph, Op
from kitsune_jax.regions.again import computed_again


@dataclasses.dataclass(frozen=True)
class GraphIndex:
    """``producers`` and ``consumers`` as ``Graph`` has them; ``results``: the graph's outputs; ``live``: ops whose results are
    used, or that have effects (opaque ones are kept). ``again``: ops that several regions may compute (``regions.again``).
    """

    graph: Graph
    producers: dict[int, int]
    consumers: dict[int, tuple[int, ...]]
    live: frozenset[int]
    results: frozenset[int]
    again: frozenset[int]

    @staticmethod
    def of(graph: Graph) -> GraphIndex:
        producers, consumers = graph.producers(), graph.consumers()
        live: set[int] = set()
        needed = set(graph.outputs)
        for i in range(len(graph.ops) - 1, -1, -1):
            op = graph.ops[i]
            if op.kind == "opaque" or any(v in needed for v in op.outputs):
                live.add(i)
                needed.update(op.inputs)
        again = computed_again(graph, live, consumers)
        return GraphIndex(graph, producers, consumers, frozenset(live), frozenset(graph.outputs), again)


def splits_layer(op: Op, scores: Container[int] = ()) -> bool:
    """A sink that is no weight gradient: a gradient contracts the leading dimensions of both operands, and ``scores`` are none of
    them."""
    if op.kind != "dot_general":
        return False
    if any(v in scores for v in op.inputs):
        return True
    return any(sorted(c) != list(range(len(c))) for c in (op["lhs_contract"], op["rhs_contract"]))

"""Ops that several regions compute, each for itself, because that is cheaper than to store what they make.

Comes in: a Graph. Goes out: ``computed_again``: ops that take rows of a table by indices, and cheap pointwise ops on those. The
score of an edge, for example, is made of two rows that its nodes have, and every level of a segment softmax reads it; a stored
score would be written to fresh pages and read back. Invariants: all that such an op reads is in memory before any region that
computes it runs, or is made by another such op; and no opaque op reads its result.
"""

from __future__ import annotations

from collections.abc import Collection

from kitsune_jax.graph import Graph
from kitsune_jax.ops.table import OPS

# Operations an element, from the table's rows on: an exponential and some arithmetic take as long as eight bytes moved.
_MOST_FLOPS = 32.0
_VIEWS = frozenset({"broadcast", "reshape"})


def computed_again(graph: Graph, live: Collection[int], consumers: dict[int, tuple[int, ...]]) -> frozenset[int]:
    """The indices of these ops; ``live``: those whose results are used."""
    if not any(OPS[op.kind].family in ("gather", "scatter") for op in graph.ops if op.kind != "opaque"):
        return frozenset()
    found = _reachable(graph, _indices(graph))
    results = set(graph.outputs)
    for i in reversed(range(len(graph.ops))):
        if i in found:
            readers = [c for v in graph.ops[i].outputs for c in consumers.get(v, ()) if c in live]
            seen = any(v in results for v in graph.ops[i].outputs) or any(graph.ops[c].kind == "opaque" for c in readers)
            if seen or not readers:
                found.discard(i)
    return frozenset(found)


def _indices(graph: Graph) -> set[int]:
    """Pointwise ops on integers that the graph is given, which lead to an index."""
    producers = graph.producers()
    found: set[int] = set()
    for op in graph.ops:
        if op.kind == "opaque" or OPS[op.kind].family not in ("gather", "scatter"):
            continue
        chain: set[int] = set()
        work = [op.inputs[1]]
        while work:
            i = producers.get(work.pop())
            if i is None or i in chain or i in found:
                continue
            if not _is_cheap(graph, i) or OPS[graph.ops[i].kind].flops > 2:
                chain.clear()
                break
            chain.add(i)
            work += graph.ops[i].inputs
        found |= chain
    return found


def _reachable(graph: Graph, indices: set[int]) -> set[int]:
    """``indices``, the ops that take rows by them or by what the graph is given, and cheap ops on the rows."""
    made_by = {v: i for i, op in enumerate(graph.ops) for v in op.outputs}
    flops: dict[int, float] = dict.fromkeys(indices, 0.0)
    given = set(graph.inputs)
    for i, op in enumerate(graph.ops):
        if op.kind == "opaque" or i in flops:
            continue
        if OPS[op.kind].family == "gather":
            rows, table = graph.values[op.outputs[0]], graph.values[op.inputs[0]]
            by = op.inputs[1]
            if (by in given or made_by.get(by) in indices) and rows.size >= table.size:
                flops[i] = 0.0
            continue
        if not _is_cheap(graph, i):
            continue
        read = [made_by.get(v) for v in op.inputs if graph.values[v].literal is None]
        makes = all(p is not None and (p in flops or _is_maker(graph, p)) for p in read)
        if makes and any(p in flops and p not in indices for p in read):
            total = OPS[op.kind].flops + sum(flops.get(p, 0.0) for p in dict.fromkeys(read) if p is not None)
            if total <= _MOST_FLOPS:
                flops[i] = total
    return set(flops)


def _is_cheap(graph: Graph, i: int) -> bool:
    op = graph.ops[i]
    return op.kind != "opaque" and OPS[op.kind].family in {"pointwise", "convert", *_VIEWS}


def _is_maker(graph: Graph, i: int) -> bool:
    """Op ``i`` makes an array of a literal."""
    op = graph.ops[i]
    return op.kind == "broadcast_in_dim" and graph.values[op.inputs[0]].literal is not None

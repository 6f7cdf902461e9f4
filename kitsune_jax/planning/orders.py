"""The orders in which the rows of a region may stream.

Comes in: a Graph and a Region of it. Goes out: the indices (graph values) whose order makes a reduction of runs of an op that folds
rows into a table by them.
"""

from __future__ import annotations

import math

from kitsune_jax.graph import Graph
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import SCATTER
from kitsune_jax.streams.space import Region, row_shape


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

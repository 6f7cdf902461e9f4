"""A long dimension inside the rows of a region, which a stage may work off in blocks: the keys of an attention.

Comes in: a Graph and a Region. Goes out: the dimension that makes most of what a row holds, as a dimension of every value that has
it, if every op carries it on, makes it or folds it. Invariant: an op that needs the whole dimension at once is never among them.
"""

from __future__ import annotations

import dataclasses
import math

from kitsune_jax.graph import Graph
from kitsune_jax.ops.table import OPS
from kitsune_jax.streams.space import Region, row_shape
from kitsune_jax.streams.wiring import relations_of

_LONG = 256  # shorter ones fit beside the rest of a row
_CARRIED = frozenset({"pointwise", "convert", "broadcast", "reshape", "transpose", "iota", "reduce", "argreduce", "dot"})


@dataclasses.dataclass(frozen=True)
class Inner:
    """``dims``: value -> which of its dimensions it is. ``ops``: those that work along it. ``folds``: some of them that fold it."""

    size: int
    dims: dict[int, int]
    ops: frozenset[int]
    folds: frozenset[int]


def inner_of(graph: Graph, region: Region) -> Inner | None:
    """The dimension that makes most of what a row of ``region`` holds; None where none can be worked off in blocks."""
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

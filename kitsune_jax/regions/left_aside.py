"""Ops that cost less outside of the region that they could be in.

Comes in: a region with its plan. Goes out: the same, or what is left of it with its own plan, where the model finds that this gains
more, and why for ops that were left out. Invariant: what is left makes nothing for others that the whole region did not make.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kitsune_jax.graph import Graph
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.plan import Plan
from kitsune_jax.regions.convex import needed, region_of
from kitsune_jax.regions.graph_index import GraphIndex
from kitsune_jax.regions.profit import compared, gained_apart, seconds_gained
from kitsune_jax.streams import Region, Spread
from kitsune_jax.streams.space import streamed_axes

PlanOf = Callable[[Region], Plan | str]
Found = tuple[Region, Plan | str, dict[int, str]]  # the last: op that was left out -> why

_TABLE = "left to XLA: the pipeline that makes its rows would need a table for every worker, and a call of its own is"
_REPEATED = "made once outside of the pipeline that reads it, which would make it again for every index of an axis that it lacks"
_MOVED = frozenset({"reshape", "transpose"})
# Elements that a region makes again and again: with fewer of them there is nothing to gain, and a plan takes time to make.
_MANY = 1 << 17
_COSTLY = 6  # operations of a function that is not just arithmetic


def smaller_of(index: GraphIndex, sp: Spread, region: Region, plan: Plan | str, plan_of: PlanOf) -> Found:
    """``region`` and its plan, or what is left of it without ops that cost less elsewhere."""
    region, plan, why = _without_tables(index, sp, region, plan, plan_of)
    left = repeated(index, region)
    if not left or isinstance(plan, str):
        return region, plan, why
    rest = region_of(index, sp, needed(index, sp, set(region.ops).difference(left)))
    smaller = plan_of(rest) if rest.outputs == region.outputs else ""
    if isinstance(smaller, str) or seconds_gained(smaller) <= seconds_gained(plan):
        return region, plan, why
    return rest, smaller, why | dict.fromkeys(left, _REPEATED)


def _without_tables(index: GraphIndex, sp: Spread, region: Region, plan: Plan | str, plan_of: PlanOf) -> Found:
    """Without ops that fold rows into tables by indices.

    The rows of a call stream in one order. Folded in another one, they need a table for every worker, which a call of their own
    does not, or XLA does it.
    """
    folds = tuple(i for i in region.sinks if OPS[index.graph.ops[i].kind].family == "scatter")
    order, most = None if isinstance(plan, str) else plan.order, 0.0
    others = tuple(i for i in folds if index.graph.ops[i].inputs[1] != order)
    best: Found = region, plan, {}
    for left in dict.fromkeys((others, folds)):
        if not left:
            continue
        rest = region_of(index, sp, needed(index, sp, set(region.ops).difference(left)))
        smaller = plan_of(rest) if rest.outputs else ""
        if isinstance(smaller, str):
            continue
        alone = [plan_of(region_of(index, sp, needed(index, sp, {i}))) for i in left]
        gain = gained_apart(plan, smaller, alone)
        if gain > most:
            why = {i: own if isinstance(own, str) else f"{_TABLE} {compared(own)}" for i, own in zip(left, alone, strict=True)}
            best, most = (rest, smaller, best[2] | why), gain
    return best


def repeated(index: GraphIndex, region: Region) -> frozenset[int]:
    """Lookups, products and functions of ``region`` whose results do not run over all axes of its stream, so that they are made
    again for every index of the others (the bias of an attention, for every sample of a batch); with what moves their results and
    what only they read."""
    graph, labels, live = index.graph, region.label_of(), index.live
    sinks, again, left = set(region.sinks), set(region.again), set[int]()
    for i in region.ops:
        op = graph.ops[i]
        streamed = [v for v in op.outputs if v in labels]
        if i in sinks or i in again or not streamed:
            continue
        axes = streamed_axes(labels[streamed[0]])
        times = math.prod(n for a, n in enumerate(region.space.sizes) if a not in axes)
        if times < 2:
            continue
        moved = op.kind in _MOVED and index.producers.get(op.inputs[0]) in left
        if moved or _costs(graph, i) and (times - 1) * sum(graph.values[v].size for v in op.outputs) >= _MANY:
            left.add(i)
    if not left:
        return frozenset()
    for i in sorted(set(region.ops).difference(left, sinks, again), reverse=True):
        outs = graph.ops[i].outputs
        readers = {c for v in outs for c in index.consumers.get(v, ()) if c in live}
        if readers and readers <= left and not index.results.intersection(outs):
            left.add(i)
    return frozenset(left)


def _costs(graph: Graph, i: int) -> bool:
    """More than arithmetic: a lookup, a product, a function."""
    spec = OPS[graph.ops[i].kind]
    return spec.family in ("gather", "dot") or spec.flops > _COSTLY

"""Loops as regions: each is one by itself, with what makes its operands of constants.

Comes in: a loop of a Graph, and what spreads a stream over it. Goes out: the regions that it may be, most promising first: streams
over dimensions that no step mixes, and last a stream of one row, in which all dimensions stay whole. Sums over all steps and rows
of what a loop makes and takes for each step (the gradients of its weights) are members of its region: their parts are added up step
by step. Invariant: what else reads a loop's slices finds them in memory, so xs are inputs of its region and ys are results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator

from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.local import Dims
from kitsune_jax.ops.loops import as_step, body_of, parts
from kitsune_jax.ops.table import OPS
from kitsune_jax.regions.convex import regions_of
from kitsune_jax.regions.graph_index import GraphIndex
from kitsune_jax.regions.order import Order
from kitsune_jax.streams import Region, Seed, Spread
from kitsune_jax.streams.space import StreamSpace
from kitsune_jax.streams.wiring import relations_of

_SAME = "one of its results is the same for all rows of a stream"
_MAKERS = frozenset({"broadcast_in_dim", "iota"})
_VIEWS = frozenset({"reshape", "broadcast", "iota"})  # families of ops


def loop_regions(
    index: GraphIndex,
    i: int,
    free: Collection[int],
    order: Order,
    spread: Callable[[Seed, Container[int]], Spread],
    sums_behind: bool = False,
) -> Iterator[Region | str]:
    """The regions that loop ``i`` may be, or why a stream does not go through it. ``free``: ops that no region has.
    ``sums_behind``: the loop may also leave its sums behind, with arrays of all steps for them."""
    graph = index.graph
    if _idle(body_of(graph.ops[i])):
        yield "its steps only hand arrays on"
        return
    p = parts(graph.ops[i])
    makers = (index.producers.get(v) for v in (*p.consts, *p.initial) if v not in p.xs)
    members = {i, *(m for m in makers if m is not None and m in free and _makes(graph, m))}
    readers = {j for v in graph.ops[i].outputs for j in index.consumers.get(v, ()) if j in free}
    sums = {j for j in readers if as_step(graph.ops[i], graph.ops[j]) is not None}
    seen: set[Region] = set()
    summed = False
    for mine in (members | sums, *((members,) if sums and sums_behind else ())):
        for seed in _seeds(graph, i):
            sp = spread(seed, mine)
            if apart := sums.intersection(sp.ops).difference(sp.sinks):  # sums over the steps alone, which have all rows
                sp = spread(seed, mine - apart)
            if i in sp.stops:
                yield sp.stops[i]
            for region in regions_of(index, sp, order):
                if i in region.ops and region.outputs and region not in seen:
                    seen.add(region)
                    labels = region.label_of()
                    made = {v for j in sums & set(region.ops) for v in graph.ops[j].outputs}
                    yields = all(v in labels or v in made for v in region.outputs)
                    yield region if yields else _SAME
                    summed |= yields and bool(made)
    if not summed:  # else another stream would leave arrays of all steps behind, of which the sums are made
        yield _one_row(index, i)


def _idle(body: Graph) -> bool:
    """Does a body compute nothing, as one that swaps two carries? Views do not count."""
    return all(_idle(op.body) if op.body is not None else OPS[op.kind].family in _VIEWS for op in body.ops)


def _makes(graph: Graph, i: int) -> bool:
    """Op ``i`` makes an array of a scalar, or of nothing."""
    op = graph.ops[i]
    return op.kind in _MAKERS and all(not graph.values[v].shape for v in op.inputs)


def _seeds(graph: Graph, i: int) -> Iterator[Seed]:
    """All dimensions of the largest operand or result that no step mixes; of each one its first, its others."""
    op = graph.ops[i]
    operands = (*op.inputs, *op.outputs)
    mixed = {(operands[k], d) for r in relations_of(graph, op) if r.role != "parallel" for k, d in r.members}
    p = parts(op)
    values = sorted(dict.fromkeys((*p.final, *p.ys, *p.xs)), key=lambda v: (-graph.values[v].size, v))
    choices: dict[Seed, None] = {}
    for v in values:
        shape = graph.values[v].shape
        dims = tuple(d for d in range(len(shape)) if (v, d) not in mixed and shape[d] > 1)
        choices |= dict.fromkeys(Seed(v, c) for c in (dims, *((d,) for d in dims)) if c)
    shortest: dict[Seed, None] = {}
    for v in values:  # where there is nothing else, a stream of one row
        shape = graph.values[v].shape
        shortest |= dict.fromkeys(Seed(v, (d,)) for d in range(len(shape)) if (v, d) not in mixed and shape[d] == 1)
    yield from list(choices)[:_MOST] or list(shortest)[:1]


_MOST = 8  # seeds that are tried


def _by_index(body: Graph) -> Op | None:
    """An op of the body that takes or folds rows by indices."""
    for op in body.ops:
        found = op if OPS[op.kind].family in ("gather", "scatter") else None if op.body is None else _by_index(op.body)
        if found is not None:
            return found
    return None


def _one_row(index: GraphIndex, i: int) -> Region | str:
    graph, op = index.graph, index.graph.ops[i]
    p = parts(op)
    results = set(graph.outputs)
    labelled = [v for v in (*p.initial, *p.xs, *op.outputs) if graph.values[v].literal is None and v not in p.consts]
    if not set(labelled).intersection(op.inputs):
        return "it computes the same whatever the arguments are"
    if (by_index := _by_index(body_of(op))) is not None:
        return f"{by_index.label or by_index.kind} ({by_index.source}) goes by indices, and no dimension of the loop streams"
    labels = {v: ((),) * len(graph.values[v].shape) for v in sorted(set(labelled))}
    alone = OPS[op.kind].alone
    if alone is not None and (
        why := alone(op, [Dims(graph.values[v].shape, labels.get(v), graph.values[v].dtype) for v in op.inputs])
    ):
        return why
    return Region(
        space=StreamSpace(()),
        ops=(i,),
        labels=tuple(labels.items()),
        inputs=tuple(dict.fromkeys(v for v in op.inputs if graph.values[v].literal is None)),
        outputs=tuple(v for v in op.outputs if v in results or index.consumers.get(v)),
    )

"""Where a region may be cut into parts that run one after the other: a training step at its loss, a network behind its products for
each row.

Comes in: a region. Goes out: the ops of each part, with a seed of its stream; of the best cut, the parts that pay as calls.
Invariant: no op of a part depends on one of a later part.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from kitsune_jax.graph import Graph
from kitsune_jax.planning.plan import Plan
from kitsune_jax.regions.calls import Chosen
from kitsune_jax.regions.convex import anchored, regions_of
from kitsune_jax.regions.graph_index import GraphIndex
from kitsune_jax.regions.order import Order
from kitsune_jax.regions.profit import all_gained, pays
from kitsune_jax.streams import Region, Seed, Spread

Pass = tuple[Seed, frozenset[int]]
_PUT_TOGETHER = frozenset({"concatenate", "reshape", "broadcast_in_dim"})


def best_cut(
    region: Region,
    planned: bool,
    index: GraphIndex,
    order: Order,
    free: Set[int],
    spread: Callable[[Seed, Set[int]], Spread],
    planner: Callable[[Region], Plan | str],
) -> list[Chosen]:
    """The parts of the cut of ``region`` that gains most, as far as they pay. ``planned``: it has a plan as a whole. ``order``: as
    the chosen calls stand; ``free``: ops that none of them has."""

    def parts(cut: tuple[Pass, ...]) -> list[Chosen]:
        now, found = order.copy(), list[Chosen]()
        for seed, ops in cut:
            sp = spread(seed, ops & free)
            part = max(regions_of(index, sp, now), key=lambda r: len(r.ops), default=None)
            plan = planner(part) if part is not None and part.outputs else ""
            if part is not None and not isinstance(plan, str) and pays(plan):
                found.append(Chosen.of([(part, plan)]))
                now.join(anchored(index.graph, part))
        return found

    return max(map(parts, cuts_of(index.graph, region, planned)), key=all_gained, default=[])


def cuts_of(graph: Graph, region: Region, planned: bool) -> list[tuple[Pass, ...]]:
    """Every way to cut ``region``; one that has no plan as a whole (not ``planned``) only around its products for each row."""
    at_loss = [passes_of(graph, region)] if planned else []
    return [cut for cut in (*at_loss, *_around_products(graph, region)) if cut is not None]


def _around_products(graph: Graph, region: Region) -> list[tuple[Pass, ...] | None]:
    """(all that products for each row depend on, with what is picked of them; the rest); and the same with the layers before them
    as a part of their own. Nothing, where there is no such product.

    Such a product reads many times the memory of a layer for each row, and computes little.
    """
    streamed, sinks = region.label_of(), set(region.sinks)
    matmuls = [i for i in region.ops if graph.ops[i].kind == "dot_general" and i not in sinks]
    products = [i for i in matmuls if all(v in streamed for v in graph.ops[i].inputs)]
    # The first ones: those of a backward pass wait for all of the forward pass.
    products = [i for i in products if not _needed_by(graph, region, [i]).intersection(set(products) - {i})]
    if not products:
        return []
    before = _needed_by(graph, region, products)
    made, after = {v for i in products for v in graph.ops[i].outputs}, set[int]()
    for i in region.ops:  # views and selections of nothing but such a product
        op = graph.ops[i]
        if op.kind in ("reshape", "take") and op.inputs[0] in made:
            after.add(i)
            made.update(op.outputs)
    layers = {i for i in matmuls if i in before and i not in products}
    computed = {v for i in layers for v in graph.ops[i].outputs}
    for i in region.ops:
        op = graph.ops[i]
        if i in before and i not in products and op.kind not in _PUT_TOGETHER and computed.intersection(op.inputs):
            layers.add(i)
            computed.update(op.outputs)
    first = _needed_by(graph, region, sorted(layers))
    rest = set(region.ops) - before - after
    return [_parts(graph, region, [before | after, rest]), _parts(graph, region, [first, (before | after) - first, rest])]


def _needed_by(graph: Graph, region: Region, ops: list[int]) -> set[int]:
    """The ops of ``region`` that ``ops`` depend on, themselves included."""
    inside, producers, found, work = set(region.ops), graph.producers(), set[int](), list(ops)
    while work:
        i = work.pop()
        if i in inside and i not in found:
            found.add(i)
            work += [producers[v] for v in graph.ops[i].inputs if v in producers]
    return found


def _parts(graph: Graph, region: Region, parts: list[set[int]]) -> tuple[Pass, ...] | None:
    found = [(_seed(graph, region, ops), frozenset(ops)) for ops in parts if ops]
    return tuple((seed, ops) for seed, ops in found if seed is not None) if len(found) > 1 else None


def passes_of(graph: Graph, region: Region) -> tuple[Pass, ...] | None:
    """(forward pass with the loss, backward pass), or None for a region that is no training step.

    The loss is a sink that makes one number; whatever it depends on is the forward pass. A backward pass has weight gradients.
    """
    losses = [i for i in region.sinks if graph.ops[i].kind != "dot_general" and graph.values[graph.ops[i].outputs[0]].size == 1]
    gradients = [i for i in region.sinks if graph.ops[i].kind == "dot_general"]
    if not losses or not gradients:
        return None
    forward = _needed_by(graph, region, losses)
    return None if forward.intersection(gradients) else _parts(graph, region, [forward, set(region.ops) - forward])


def _seed(graph: Graph, region: Region, ops: set[int]) -> Seed | None:
    """The stream of the region at one of ``ops``: an operand whose streamed dimensions are a stream axis each."""
    labels = region.label_of()
    for i in sorted(ops, key=lambda i: (graph.ops[i].kind != "dot_general", i)):
        for v in graph.ops[i].inputs:
            axes = labels.get(v)
            if axes is None or any(len(a) > 1 for a in axes):
                continue
            dims = sorted((d for d, a in enumerate(axes) if a), key=lambda d: axes[d])
            if [axes[d] for d in dims] == [(k,) for k in range(len(region.space.sizes))]:
                return Seed(v, tuple(dims))
    return None

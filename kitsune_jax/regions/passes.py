"""A training step cut at its loss into its forward and its backward pass.

Comes in: a region that holds a forward and a backward pass. Goes out: the ops of each pass, with a seed of its stream. Invariant:
no op of the forward pass depends on one of the backward pass.
"""

from __future__ import annotations

from kitsune_jax.graph import Graph
from kitsune_jax.streams import Region, Seed

Pass = tuple[Seed, frozenset[int]]


def passes_of(graph: Graph, region: Region) -> tuple[Pass, Pass] | None:
    """(forward pass with the loss, backward pass), or None for a region that is no training step.

    The loss is a sink that makes one number; whatever it depends on is the forward pass. A backward pass has weight gradients.
    """
    losses = [i for i in region.sinks if graph.ops[i].kind != "dot_general" and graph.values[graph.ops[i].outputs[0]].size == 1]
    gradients = [i for i in region.sinks if graph.ops[i].kind == "dot_general"]
    if not losses or not gradients:
        return None
    inside, producers = set(region.ops), graph.producers()
    forward: set[int] = set()
    work = list(losses)
    while work:
        i = work.pop()
        if i in inside and i not in forward:
            forward.add(i)
            work += [producers[v] for v in graph.ops[i].inputs if v in producers]
    backward = inside - forward
    if not set(gradients) <= backward:
        return None
    seeds = [_seed(graph, region, ops) for ops in (forward, backward)]
    if seeds[0] is None or seeds[1] is None:
        return None
    return (seeds[0], frozenset(forward)), (seeds[1], frozenset(backward))


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

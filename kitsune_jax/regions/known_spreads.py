"""Streams through a graph that were looked at, kept for the seeds that lie in them.

Comes in: seeds, one after the other, while regions are chosen. Goes out: for each the ``Spread`` and, of its groups of ops, the
one that a given op is in. Invariants: a region that is handed out is legal beside all calls chosen so far; and the work is bounded
by a budget of op visits, so a network of many layers that are regions each does not cost in proportion to its length squared.

A seed that lies in a spread, with the dimensions that stream there, would have led to that spread: it is used again until a region
is chosen. When the budget is spent, it is used even then, and only its groups are looked at anew; and of the ways in which a stream
could run through an op only the most promising one is tried.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Container, Mapping

from kitsune_jax.graph import Graph
from kitsune_jax.regions.convex import groups_of, region_of
from kitsune_jax.regions.graph_index import GraphIndex
from kitsune_jax.regions.order import Order
from kitsune_jax.streams import Region, Seed, Spread, candidate_seeds
from kitsune_jax.streams.space import DimLabels, StreamSpace

# Ops no region starts from: they only move data, or make it.
NEVER_SEEDS = frozenset({"opaque", "broadcast_in_dim", "iota", "reshape", "transpose", "copy", "convert_element_type", "slice"})
# How often ops may be looked at while spreads are made, at least and for each op of the graph. An MLP takes 4 to 8 an op; 15
# message-passing steps, a region or two each, would take 37, and give the same regions with 10.
_LEAST_LOOKS, _LOOKS = 10_000, 10


def seed_order(graph: Graph, ops: Collection[int]) -> list[int]:
    """Those of ``ops`` that a region may start from: products first, and what has most work of either."""

    def work(i: int) -> tuple[int, float]:
        op = graph.ops[i]
        out = math.prod(graph.values[op.outputs[0]].shape)
        if op.kind == "dot_general":
            shape = graph.values[op.inputs[0]].shape
            return (1, 2.0 * out * math.prod(shape[d] for d in op["lhs_contract"]))
        return (0, float(out))

    return sorted((i for i in ops if graph.ops[i].kind not in NEVER_SEEDS), key=lambda i: (*(-w for w in work(i)), i))


@dataclasses.dataclass(eq=False)
class Kept:
    """A spread and the groups of its ops. ``group_of``: op -> which of ``groups``; ``chosen``: calls at the time; ``apart``: as its
    seed has it."""

    spread: Spread
    groups: list[tuple[int, ...]]
    group_of: dict[int, int]
    chosen: int
    apart: bool
    regions: dict[int, Region] = dataclasses.field(default_factory=dict)


class Spreads:
    """``spread(seed, barred)`` makes one, of ops that no region has (``free``). ``few``: see ``candidate_seeds``."""

    def __init__(
        self,
        index: GraphIndex,
        order: Order,
        free: Collection[int],
        spread: Callable[[Seed, Mapping[int, str]], Spread],
        few: bool = False,
        scores: Container[int] = (),
    ):
        self.index, self.order, self.free, self._spread, self._few, self._scores = index, order, free, spread, few, scores
        self._budget = max(_LEAST_LOOKS, _LOOKS * len(index.graph.ops))
        self._chosen = 0
        self._kept: list[Kept] = []

    def seeds(self, op: int) -> list[Seed]:
        """``candidate_seeds`` of ``op``, as many as the budget allows: the first one with batch axes and the first without, at
        least. Those that keep ``scores`` apart count as those with batch axes."""
        seeds = candidate_seeds(self.index.graph, op, self.index.producers if self._few else None, self._scores)
        if self._budget > 0:
            return seeds
        return [s for s in seeds if s.batch or s.apart][:1] + [s for s in seeds if not (s.batch or s.apart)][:1]

    def choose(self) -> None:
        """A call was chosen: ``order`` and ``free`` are others now."""
        self._chosen += 1
        if self._budget > 0:
            self._kept.clear()

    def at(self, seed: Seed) -> tuple[Kept, bool]:
        """The spread from ``seed``, and whether it was made just now."""
        space, labels = _seed_labels(self.index.graph, seed)
        for kept in reversed(self._kept):
            if kept.spread.labels.get(seed.value) == labels and kept.spread.space == space and kept.apart == seed.apart:
                return kept, False
        looks = self.order.looks
        made = self._spread(seed, self._barred(seed, space, labels))
        groups = groups_of(self.index, made, self.order)
        kept = Kept(made, groups, {i: k for k, group in enumerate(groups) for i in group}, self._chosen, seed.apart)
        self._budget -= made.looks + self.order.looks - looks
        self._kept.append(kept)
        return kept, True

    def _barred(self, seed: Seed, space: StreamSpace, labels: DimLabels) -> Mapping[int, str]:
        """The ops that a stream from ``seed`` would be kept out of, as far as spreads are known that would have led there."""
        for kept in reversed(self._kept):
            if kept.chosen == self._chosen and kept.spread.space == space and kept.apart == seed.apart:
                for reached, barred in reversed(kept.spread.rounds):
                    if reached.get(seed.value) == labels:
                        return barred
        return {}

    def region_with(self, kept: Kept, op: int) -> Region | None:
        """The region of a spread that ``op`` is in, if any."""
        k = kept.group_of.get(op)
        if k is None:
            return None
        if kept.chosen != self._chosen:
            return self._anew(kept, k, op)
        if k not in kept.regions:
            kept.regions[k] = region_of(self.index, kept.spread, kept.groups[k])
        return kept.regions[k]

    def _anew(self, kept: Kept, k: int, op: int) -> Region | None:
        """What calls chosen since then have left of a group."""
        ops = tuple(i for i in kept.groups[k] if i in self.free)
        inside = set(ops)
        touched = {v for i in ops for v in (*self.index.graph.ops[i].inputs, *self.index.graph.ops[i].outputs)}
        labels = {v: kept.spread.labels[v] for v in touched if v in kept.spread.labels}
        part = Spread(kept.spread.space, labels, ops, tuple(i for i in kept.spread.sinks if i in inside), {})
        found = next((group for group in groups_of(self.index, part, self.order) if op in group), None)
        return None if found is None else region_of(self.index, part, found)


def _seed_labels(graph: Graph, seed: Seed) -> tuple[StreamSpace, DimLabels]:
    shape = graph.values[seed.value].shape
    labels = tuple((seed.dims.index(d),) if d in seed.dims else () for d in range(len(shape)))
    return StreamSpace(tuple(shape[d] for d in seed.dims), seed.batch), labels

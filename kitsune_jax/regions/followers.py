"""Followers of a region: what runs in later phases of its call, such as the updates of the parameters whose gradients it makes.

Comes in: a region that was chosen, and the ops that no region has. Goes out: more regions for its call: pointwise work (and sums)
over the elements of a gradient, and the scalar work between two of them, such as the factor of clipping by the global norm.
Invariants: the call with all of its followers is convex; a follower reads what earlier phases made, or what does not depend on the
call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Container, Iterable, Sequence

from kitsune_jax.graph import Graph
from kitsune_jax.ops.table import OPS
from kitsune_jax.regions.convex import anchored, regions_of
from kitsune_jax.regions.graph_index import GraphIndex
from kitsune_jax.regions.order import Order
from kitsune_jax.streams import Region, Seed, Spread
from kitsune_jax.streams.space import StreamSpace

# A follower has an op of one of these families; one that only moved data would save nothing.
_COMPUTES = frozenset({"pointwise", "convert", "reduce"})
_SCALAR = frozenset({"pointwise", "convert"})


@dataclasses.dataclass(frozen=True)
class Following:
    """What the search needs to know about a graph whose regions are being chosen.

    ``free``: ops that no region has. ``order``: that of all calls that were chosen. ``spread(seed, free)`` spreads a stream over
    ops of ``free``; ``supports(op)`` is a reason or None.
    """

    index: GraphIndex
    free: Collection[int]
    order: Order
    spread: Callable[[Seed, Container[int]], Spread]
    supports: Callable[[int], str | None]

    def followers(self, region: Region) -> list[Region]:
        """The followers of ``region``."""
        order = self.order.copy()
        candidates = self._candidates(region, order)
        return _Join(self, region, candidates, order).run() if candidates else []

    def _candidates(self, region: Region, order: Order) -> list[Region]:
        """Regions over the elements of the sinks' results, and of what becomes of them. Each becomes a node of ``order``."""
        graph, free, call = self.index.graph, set(self.free), anchored(self.index.graph, region)[0]
        found: list[Region] = []
        for v in self._gradients(region):
            if free.isdisjoint(self.index.consumers.get(v, ())):
                continue
            elementwise = _Elementwise(graph, free, graph.values[v].size, order, call)
            spread = self.spread(Seed(v, tuple(range(len(graph.values[v].shape)))), elementwise)
            for candidate in regions_of(self.index, spread, order):
                computes = any(OPS[graph.ops[k].kind].family in _COMPUTES for k in candidate.ops)
                if candidate.outputs and computes and not any(map(self._is_spread_out, candidate.inputs)):
                    found.append(candidate)
                    order.join(anchored(graph, candidate))
                    free.difference_update(candidate.ops)
        return found

    def _is_spread_out(self, v: int) -> bool:
        """Is ``v`` rows of numbers (a score of each head, a sum of each node) repeated over more elements? What reads that streams
        over these rows, and repeats a number where it reads it: as a follower it would have XLA write all elements first."""
        i = self.index.producers.get(v)
        if i is None or i not in self.free or OPS[self.index.graph.ops[i].kind].family != "broadcast":
            return False
        of = [self.index.graph.values[w] for w in self.index.graph.ops[i].inputs]
        return any(1 < value.size < self.index.graph.values[v].size for value in of)

    def _gradients(self, region: Region) -> list[int]:
        """Results of the sinks that are arrays; what a scalar one is made, where its parameter is an array of one element."""
        graph = self.index.graph
        found: list[int] = []
        for i in region.sinks:
            v = graph.ops[i].outputs[0]
            if graph.values[v].shape:
                found.append(v)
            else:
                made = [w for c in self.index.consumers.get(v, ()) if c in self.free for w in graph.ops[c].outputs]
                found += [w for w in made if graph.values[w].shape and graph.values[w].size == 1]
        return found


class _Elementwise:
    """The ops of ``free`` on arrays of ``size`` elements and scalars only, and reductions of such an array, unless the call that
    they would follow waits for them.

    An op on larger arrays than the gradient is no part of its update: it may become a region, but no follower.
    """

    def __init__(self, graph: Graph, free: Container[int], size: int, order: Order, call: int):
        self.graph, self.free, self.size = graph, free, size
        self.order, self.call = order, order.node(call)

    def __contains__(self, i: object) -> bool:
        if not isinstance(i, int) or i not in self.free:
            return False
        op = self.graph.ops[i]
        if op.kind == "opaque":
            return False
        of = op.inputs if OPS[op.kind].family == "reduce" else (*op.inputs, *op.outputs)
        if any(value.shape and value.size != self.size for value in (self.graph.values[v] for v in of)):
            return False
        return not self.order.leads_to(self.order.node(i), self.call)


class _Join:
    """One walk over what depends on ``region``, in ``order``, where it and the candidates are nodes: who can stand behind the
    region's barrier?"""

    def __init__(self, given: Following, region: Region, candidates: Sequence[Region], order: Order):
        self.given, self.region, self.order = given, region, order
        self.graph = given.index.graph
        self.candidates = {anchored(self.graph, c): c for c in candidates}
        self.inside = set(region.ops)
        self.phase = dict.fromkeys(region.outputs, 0)  # value that the call makes -> the phase that makes it
        self.behind: set[int] = set()  # values that some op outside makes of what the call makes
        self.joined: list[Region] = []
        self.scalars: dict[int, int] = {}  # scalar op -> phase

    def run(self) -> list[Region]:
        order = self.order
        first = order.node(anchored(self.graph, self.region)[0])
        for number in sorted(order.behind([first], len(self.graph.ops)), key=order.position):
            if number == first:
                continue
            node = order.members(number)
            candidate = self.candidates.get(node)
            if candidate is not None:
                self._region(candidate)
            elif len(node) == 1 and self._is_scalar(node[0]):
                self._scalar(node[0])
            else:
                self._outside(node)
        return [*self.joined, *self._scalar_regions()]

    def _after(self, values: Iterable[int]) -> int | None:
        """The last phase that makes one of ``values``; None where one of them is made outside the call, after the call began."""
        values = tuple(values)
        if any(v in self.behind or self._made_again(v) for v in values):
            return None
        return max((self.phase[v] for v in values if v in self.phase), default=None)

    def _made_again(self, v: int) -> bool:
        """Is ``v`` made by a maker of the call? Such a value is no result of the call: readers outside compute it again."""
        return v not in self.phase and self.given.index.producers.get(v) in self.inside

    def _region(self, candidate: Region) -> None:
        after = self._after(candidate.inputs)
        if after is None:
            self._outside(candidate.ops)
            return
        self.joined.append(candidate)
        self.inside.update(candidate.ops)
        self.phase.update(dict.fromkeys(candidate.outputs, after + 1))

    def _is_scalar(self, i: int) -> bool:
        op = self.graph.ops[i]
        if i not in self.given.free or op.kind == "opaque" or OPS[op.kind].family not in _SCALAR or self.given.supports(i):
            return False
        return not any(self.graph.values[v].shape for v in (*op.inputs, *op.outputs))

    def _scalar(self, i: int) -> None:
        """Scalar ops of one phase are one region, so they may read each other; all else they read comes from phases before."""
        op = self.graph.ops[i]
        if self._after(op.inputs) is None:
            self._outside((i,))
            return
        producers = self.given.index.producers
        phase = max(self.phase[v] + (producers[v] not in self.scalars) for v in op.inputs if v in self.phase)
        self.scalars[i] = phase
        self.inside.add(i)
        self.phase.update(dict.fromkeys(op.outputs, phase))

    def _outside(self, node: Sequence[int]) -> None:
        ops = [self.graph.ops[i] for i in node]
        if any(v in self.phase or v in self.behind or self._made_again(v) for op in ops for v in op.inputs):
            self.behind.update(v for op in ops for v in op.outputs)

    def _scalar_regions(self) -> list[Region]:
        """One region a phase of the scalar ops that some follower waits for; XLA does the others."""
        needed: set[int] = set()
        work = [v for region in self.joined for v in region.inputs]
        while work:
            i = self.given.index.producers.get(work.pop())
            if i in self.scalars and i not in needed:
                needed.add(i)
                work.extend(self.graph.ops[i].inputs)
        by_phase: dict[int, list[int]] = {}
        for i in sorted(needed):
            by_phase.setdefault(self.scalars[i], []).append(i)
        return [self._scalar_region(ops) for ops in by_phase.values()]

    def _scalar_region(self, ops: list[int]) -> Region:
        """A stream of one row: a space without axes."""
        graph, inside = self.graph, set(ops)
        made = [v for i in ops for v in graph.ops[i].outputs]
        read = dict.fromkeys(v for i in ops for v in graph.ops[i].inputs if graph.values[v].literal is None)
        results = set(graph.outputs)
        consumers = self.given.index.consumers
        return Region(
            space=StreamSpace(()),
            ops=tuple(ops),
            labels=tuple((v, ()) for v in sorted({*made, *read})),
            inputs=tuple(v for v in read if v not in made),
            outputs=tuple(v for v in made if v in results or not inside.issuperset(consumers.get(v, ()))),
        )

"""What connects the ops of a graph: which of them touch a value, and which dimensions of their operands belong together.

Comes in: a Graph. Goes out: a ``Wiring``, which works each of them out once, whatever streams are tried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.local import Dims
from kitsune_jax.ops.relations import DimRelation
from kitsune_jax.ops.scores import scores_of
from kitsune_jax.ops.table import OPS


@dataclasses.dataclass(frozen=True, slots=True)
class Wired:
    """An op and the dimensions it joins: for each relation its role, its members as (value, dimension), and itself."""

    operands: tuple[int, ...]
    relations: tuple[tuple[str, tuple[tuple[int, int], ...], DimRelation], ...]
    has_elements: bool
    alone: Callable[[Op, list[Dims]], str] | None  # why no row can be computed alone where these dimensions stream


class Wiring:
    """What connects the ops of a graph, worked out when it is first asked for: ``wiring[i]``, and ``touching(v)``, the ops that
    define or read a value. ``sums_by_batch``: sums over the rows of each batch are sinks. ``scores``: where they are not, values of
    products that are much larger than what they are made of, of which one stream makes sums over the one dimension and another
    those over the other."""

    def __init__(self, graph: Graph, sums_by_batch: bool = True):
        self.graph, self.sums_by_batch = graph, sums_by_batch
        self.scores: frozenset[int] = frozenset() if sums_by_batch else scores_of(graph)
        self._wired: dict[int, Wired] = {}
        self._touching: dict[int, dict[int, None]] = {}
        for i, op in enumerate(graph.ops):
            for v in (*op.outputs, *op.inputs):
                self._touching.setdefault(v, {})[i] = None

    def touching(self, v: int) -> Iterable[int]:
        return self._touching.get(v, ())

    def only_for(self, ops: Iterable[int]) -> set[int]:
        """Those whose results nothing reads but ``ops`` and each other."""
        kept, found = set(self.graph.outputs), set(ops)
        work = [v for i in found for v in self.graph.ops[i].inputs]
        while work:
            v = work.pop()
            for i in self.touching(v):
                op = self.graph.ops[i]
                if v not in op.outputs or i in found or not kept.isdisjoint(op.outputs):
                    continue
                if all(j == i or j in found for out in op.outputs for j in self.touching(out)):
                    found.add(i)
                    work += op.inputs
        return found.difference(ops)

    def __getitem__(self, i: int) -> Wired:
        if i not in self._wired:
            op = self.graph.ops[i]
            operands = (*op.inputs, *op.outputs)
            relations = tuple((r.role, tuple((operands[k], d) for k, d in r.members), r) for r in relations_of(self.graph, op))
            has_elements = not any(0 in self.graph.values[v].shape for v in operands)
            self._wired[i] = Wired(operands, relations, has_elements, OPS[op.kind].alone)
        return self._wired[i]


def relations_of(graph: Graph, op: Op) -> tuple[DimRelation, ...]:
    """The op's dimension relations, from the op table."""
    shapes = tuple(graph.values[v].shape for v in op.inputs)
    outs = tuple(graph.values[v].shape for v in op.outputs)
    return OPS[op.kind].relate(op, shapes, outs)

"""A stage's body under construction."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.local import Dims
from kitsune_jax.program.ir import Instr, TileType
from kitsune_jax.streams.space import DimLabels, StreamSpace, row_shape


@dataclasses.dataclass
class Stage:
    """Stage number ``number``, or the body of a loop in it, under construction.

    ``graph``, ``labels``: of the region, or of the loop's body. ``ids``: graph value -> its SSA value here; ``repeated``: the tile
    that repeats it for each row.
    """

    number: int
    graph: Graph
    labels: Mapping[int, DimLabels]
    space: StreamSpace
    body: list[Instr] = dataclasses.field(default_factory=list)
    ids: dict[int, int] = dataclasses.field(default_factory=dict)
    repeated: dict[int, int] = dataclasses.field(default_factory=dict)

    def dims(self, v: int) -> Dims:
        value = self.graph.values[v]
        return Dims(value.shape, self.labels.get(v), value.dtype, self.space.batch)

    def type_of(self, v: int) -> TileType:
        value, labels = self.graph.values[v], self.labels.get(v)
        tile = labels is not None and not self.space.of_batch(labels)
        return TileType(tile, row_shape(value.shape, labels), value.dtype)


def same_for_all(stage: Stage, op: Op) -> bool:
    """In a stream of one row, what is made of nothing that streams is made once, and repeated where it has to stream."""
    streams = any(v in stage.labels for v in op.inputs) or any(axes for v in op.outputs for axes in stage.labels.get(v, ()))
    return not streams and not stage.space.sizes and any(v in stage.labels for v in op.outputs)

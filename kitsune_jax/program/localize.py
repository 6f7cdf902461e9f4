"""One op of the Graph in its row-local form.

Comes in: an op and the ``DimLabels`` of its operands. Goes out: the ``LocalOp`` that its entry of the op table makes of it.
"""

from __future__ import annotations

from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.local import Dims, LocalOp
from kitsune_jax.ops.table import OPS
from kitsune_jax.streams.space import DimLabels


def localize(graph: Graph, op: Op, labels: dict[int, DimLabels]) -> LocalOp:
    """The row-local form of ``op`` under ``labels`` (absent values are stationary)."""
    ins, outs = ([Dims(graph.values[v].shape, labels.get(v)) for v in values] for values in (op.inputs, op.outputs))
    return OPS[op.kind].local(op, ins, outs[0])

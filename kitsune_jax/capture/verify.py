"""What every Graph that capture makes must satisfy, checked op by op.

Comes in: a Graph, or one of its ops. Goes out: nothing, or ``ValueError``. Invariants checked: values are defined once, and before
they are read (``Graph.validate``); every op of the table has the operands, the result shape and the result dtype that its kind and
its parameters ask for.
"""

from __future__ import annotations

from collections.abc import Sequence

from kitsune_jax.graph import Graph, Op, Value
from kitsune_jax.ops.results import result
from kitsune_jax.ops.table import OPS


def verify(graph: Graph) -> None:
    """Raise ``ValueError`` where ``graph`` breaks an invariant of this module."""
    graph.validate()
    for i, op in enumerate(graph.ops):
        try:
            verify_op(op, graph.values)
        except ValueError as e:
            raise ValueError(f"op {i}: {e}") from None


def verify_op(op: Op, values: Sequence[Value]) -> None:
    """Raise ``ValueError`` where ``op`` is not in the table (or opaque), or does not fit its operands and results."""
    if op.kind == "opaque":
        return
    if op.kind not in OPS:
        raise ValueError(f"{op.kind} is not an op of the table")
    ins, outs = ([values[v] for v in ids] for ids in (op.inputs, op.outputs))
    if len(outs) != 1:
        raise ValueError(f"{op.kind} has {len(outs)} results")
    made = result(op, ins, outs[0].dtype)
    if made.shape != outs[0].shape:
        raise ValueError(f"{op.kind} of {', '.join(map(str, ins))} has shape {made.shape}, not that of {outs[0]}")
    if made.dtype != outs[0].dtype:
        raise ValueError(f"{op.kind} does not make {outs[0]} of {', '.join(map(str, ins))}")

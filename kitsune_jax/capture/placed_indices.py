"""Indices that are repeated along other dimensions, counted where they are wanted.

Comes in: a ``Captured``. Goes out: the same with each broadcast of an ``iota``, as ``jnp.arange(n)[None]`` in a mask is one, turned
into an ``iota`` of the wide shape. The numbers are the same. A region then counts them itself instead of reading an array that the
stream knows nothing of, and a mask that compares two of them is seen to be one of the rows' and the columns' indices.
"""

from __future__ import annotations

from kitsune_jax.capture.captured import Captured, Draft
from kitsune_jax.graph import Op, make_params


def place_indices(captured: Captured) -> Captured:
    """``captured`` with broadcasts of indices made indices."""
    graph, draft = captured.graph, Draft(captured)
    along: dict[int, int] = {}  # a value that is the index along one of its dimensions -> that dimension
    for i, op in enumerate(graph.ops):
        if op.kind == "iota":
            along[op.outputs[0]] = op["dimension"]
        elif op.kind in ("reshape", "broadcast_in_dim") and op.inputs[0] in along:
            d = _moved(op, graph.values[op.inputs[0]].shape, along[op.inputs[0]])
            if d is None:
                continue
            along[op.outputs[0]] = d
            if op.kind == "broadcast_in_dim":
                params = make_params(shape=graph.values[op.outputs[0]].shape, dimension=d)
                draft.ops[i] = Op("iota", (), op.outputs, params, op.source, label="iota")
    return draft.finish()


def _moved(op: Op, shape: tuple[int, ...], d: int) -> int | None:
    """The dimension of the result that dimension ``d`` of the operand is; None where it is none, or the only index of many."""
    if op.kind == "broadcast_in_dim":
        to = op["dims"][d]
        return to if op["shape"][to] == shape[d] else None
    real = [k for k, n in enumerate(op["new_sizes"]) if n > 1]
    return real[0] if len(real) == 1 and op["new_sizes"][real[0]] == shape[d] else None

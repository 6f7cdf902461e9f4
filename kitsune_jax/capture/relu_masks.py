"""Masks of rectified values, read off the result instead of the argument.

Comes in: a ``Captured``. Goes out: the same with each ``z > 0`` where ``h = max(z, 0)`` is at hand turned into ``h > 0``. They
agree for every z, NaN and infinities included. The gradient of a ReLU asks for ``z > 0``, and ``h`` is kept for the weight gradient
of the next layer anyway: so ``z`` need not be kept, and the matmul that makes it can rectify in its registers.
"""

from __future__ import annotations

from kitsune_jax.capture.captured import Captured, Draft, with_params
from kitsune_jax.graph import Graph, Op


def masks_of_results(captured: Captured) -> Captured:
    """``captured`` with comparisons of a rectified value's argument with 0 made to read the rectified value."""
    graph, draft = captured.graph, Draft(captured)
    rectified: dict[int, int] = {}  # argument -> result, of the ReLUs so far
    for i, op in enumerate(graph.ops):
        if op.kind == "max" and (z := _against_zero(graph, op, (0, 1))) is not None:
            rectified.setdefault(z, op.outputs[0])
        elif op.kind in ("gt", "lt") and (z := _against_zero(graph, op, (0,) if op.kind == "gt" else (1,))) in rectified:
            draft.ops[i] = with_params(op, [rectified[v] if v == z else v for v in op.inputs], op.outputs)
    return draft.finish()


def _against_zero(graph: Graph, op: Op, places: tuple[int, ...]) -> int | None:
    """The operand of ``op``, in one of ``places``, whose partner is the literal 0."""
    for p in places:
        other = graph.values[op.inputs[1 - p]].literal
        if other is not None and not isinstance(other, bool) and other == 0 and graph.values[op.inputs[p]].literal is None:
            return op.inputs[p]
    return None

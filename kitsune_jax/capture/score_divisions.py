"""Scores of an attention that are divided by a statistic of their row, multiplied by its reciprocal instead.

Comes in: a ``Captured``, for a target on which a division takes many instructions. Goes out: the same, where ``x / broadcast(l)``
stands as ``x * broadcast(1 / l)``: one division for a row, or one for a column where the statistics are those of the columns,
instead of one for each pair of a query and a key. Invariants: only what is much larger than what it is divided by, and is made of
a product as ``scores_apart`` finds it; the quotient is off by one rounding more.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.capture.captured import Captured, Draft, Step, with_params
from kitsune_jax.capture.repeated_scores import LARGER
from kitsune_jax.capture.scores_apart import MOVES
from kitsune_jax.graph import Op, Value
from kitsune_jax.ops.scores import scores_of
from kitsune_jax.ops.spec import is_float
from kitsune_jax.ops.table import OPS


def multiply_scores(captured: Captured) -> Captured:
    """``captured`` with products for the quotients of scores and statistics."""
    graph, draft = captured.graph, Draft(captured)
    scores, producers = scores_of(graph), graph.producers()
    reciprocals: dict[int, int] = {}
    before: dict[int, list[tuple[Op, Step]]] = {}

    def reciprocal(v: int, at: int, step: Step) -> int:
        """1 / ``v``, made in front of op ``at``."""
        moves: list[Op] = []
        while v not in reciprocals and v in producers:
            op = graph.ops[producers[v]]
            if op.kind == "opaque" or OPS[op.kind].family not in MOVES or not op.inputs:
                break
            moves.append(op)
            (v,) = op.inputs
        if v not in reciprocals:
            value = graph.values[v]
            one = draft.literal(Value((), value.dtype, 1.0))
            reciprocals[v] = draft.value(v, value.shape)
            before.setdefault(at, []).append((Op("div", (one, v), (reciprocals[v],)), step))
        made = reciprocals[v]
        for op in reversed(moves):
            (v,), x = op.outputs, made
            made = reciprocals[v] = draft.value(v, graph.values[v].shape)
            before.setdefault(at, []).append((dataclasses.replace(op, inputs=(x,), outputs=(made,)), step))
        return made

    for i, op in enumerate(graph.ops):
        if op.kind != "div" or op.inputs[0] not in scores or not is_float(graph.values[op.inputs[0]].dtype):
            continue
        x, y = op.inputs
        if _is_spread(captured, producers, y, graph.values[x].size):
            draft.ops[i] = with_params(dataclasses.replace(op, kind="mul"), (x, reciprocal(y, i, captured.steps[i])), op.outputs)
    return draft.finish(before)


def _is_spread(captured: Captured, producers: dict[int, int], v: int, size: int) -> bool:
    """Is ``v`` a much smaller value that was repeated?"""
    graph = captured.graph
    while graph.values[v].size * LARGER > size:
        op = graph.ops[producers[v]] if v in producers else None
        if op is None or op.kind == "opaque" or OPS[op.kind].family not in MOVES or not op.inputs:
            return False
        (v,) = op.inputs
    return True

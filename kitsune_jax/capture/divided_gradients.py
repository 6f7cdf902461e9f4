"""Weight gradients of concatenations as one product for each part.

Comes in: a ``Captured`` without dead ops. Goes out: the same, where ``concatenate(a, b)^T dY`` stands as the concatenation of
``a^T dY`` and ``b^T dY``. The parts are in memory or on chip anyway; their concatenation would have to be made again for the
backward pass, or handed to it as rows whose pitch suits no vector load. Invariant: every value keeps its shape and meaning; an
element of a gradient is the same sum as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kitsune_jax.capture.captured import Captured, Draft, Step
from kitsune_jax.capture.transposed_gradients import is_weight_gradient
from kitsune_jax.graph import Op, Value, make_params

# More parts, or parts all narrower than this, make products too small to be worth a copy of a tile.
_MOST_PARTS, _LEAST_COLUMNS = 4, 32


Worth = Callable[[Op, int, Draft], bool]  # (a concatenation, how many of its dimensions are rows, the draft it stands in)


def _has_few_wide_parts(join: Op, rows: int, draft: Draft) -> bool:
    columns = [math.prod(draft.values[v].shape[rows:]) for v in join.inputs]
    return len(columns) <= _MOST_PARTS and max(columns) >= _LEAST_COLUMNS


def split_gradients(captured: Captured, worth: Worth = _has_few_wide_parts) -> Captured:
    """Divide the weight gradients of ``captured`` that read a concatenation of columns which is ``worth`` it."""
    draft = Draft(captured)
    draft.ops, draft.steps = [], []
    joins = {op.outputs[0]: op for op in captured.graph.ops if op.kind == "concatenate"}
    for op, step in zip(captured.graph.ops, captured.steps, strict=True):
        _add(draft, joins, op, step, worth)
    return draft.finish()


def _add(draft: Draft, joins: dict[int, Op], op: Op, step: Step, worth: Worth) -> None:
    for side in range(2) if is_weight_gradient(op, draft.values) else ():
        join = joins.get(op.inputs[side])
        rows = len(op["lhs_contract"])
        if join is not None and _joins_columns(join, rows, draft.values) and worth(join, rows, draft):
            _split(draft, joins, op, step, side, worth)
            return
    draft.ops.append(op)
    draft.steps.append(step)


def _joins_columns(join: Op, rows: int, values: Sequence[Value]) -> bool:
    """A concatenation of several parts behind the first ``rows`` dimensions."""
    columns = [math.prod(values[v].shape[rows:]) for v in join.inputs]
    return join["dimension"] >= rows and len(columns) > 1 and min(columns) > 0


def _split(draft: Draft, joins: dict[int, Op], op: Op, step: Step, side: int, worth: Worth) -> None:
    join, rows = joins[op.inputs[side]], len(op["lhs_contract"])
    left = len(draft.values[op.inputs[0]].shape) - rows
    dimension = join["dimension"] - rows + (left if side else 0)
    (whole,) = op.outputs
    made = []
    for part in join.inputs:
        shape = list(draft.values[whole].shape)
        shape[dimension] = draft.values[part].shape[join["dimension"]]
        made.append(draft.value(whole, shape))
        inputs = (part, op.inputs[1]) if side == 0 else (op.inputs[0], part)
        _add(draft, joins, Op(op.kind, inputs, (made[-1],), op.params, op.source, label=op.label), step, worth)
    params = make_params(dimension=dimension)
    draft.ops.append(Op("concatenate", tuple(made), (whole,), params, op.source, label=op.label))
    draft.steps.append(step)

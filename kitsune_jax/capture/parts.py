"""Weight gradients of concatenations as one product for each part.

Comes in: a ``Captured`` without dead ops. Goes out: the same, where ``concatenate(a, b)^T dY`` stands as the concatenation of
``a^T dY`` and ``b^T dY``. The parts are in memory or on chip anyway; their concatenation would have to be made again for the
backward pass, or handed to it as rows whose pitch suits no vector load. Invariant: every value keeps its shape and meaning; an
element of a gradient is the same sum as before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from kitsune_jax import _compat
from kitsune_jax.capture.builder import Captured, Step
from kitsune_jax.graph import Op, Value, make_params

# More parts, or parts all narrower than this, make products too small to be worth a copy of a tile.
_MOST_PARTS, _LEAST_COLUMNS = 4, 32


def split_gradients(captured: Captured) -> Captured:
    """Divide the weight gradients of ``captured`` that read a concatenation of columns."""
    splitter = _Splitter(captured)
    for op, step in zip(captured.graph.ops, captured.steps, strict=True):
        splitter.add(op, step)
    if len(splitter.ops) == len(captured.graph.ops):
        return captured
    graph = dataclasses.replace(captured.graph, values=tuple(splitter.values), ops=tuple(splitter.ops))
    return dataclasses.replace(captured, graph=graph, steps=tuple(splitter.steps), avals=tuple(splitter.avals))


class _Splitter:
    """The new graph; ops are added in their order."""

    def __init__(self, captured: Captured):
        self.values, self.avals = list(captured.graph.values), list(captured.avals)
        self.ops: list[Op] = []
        self.steps: list[Step] = []
        self.joins: dict[int, Op] = {}  # value -> the concatenation that makes it

    def add(self, op: Op, step: Step) -> None:
        if op.kind == "concatenate":
            self.joins[op.outputs[0]] = op
        for side in range(2) if self._is_gradient(op) else ():
            join = self.joins.get(op.inputs[side])
            if join is not None and self._is_worth(join, len(op["lhs_contract"])):
                self._split(op, step, side, join)
                return
        self.ops.append(op)
        self.steps.append(step)

    def _is_gradient(self, op: Op) -> bool:
        """Both operands are contracted over leading dimensions, their rows."""
        if op.kind != "dot_general" or op["lhs_batch"]:
            return False
        sides = zip(op.inputs, (op["lhs_contract"], op["rhs_contract"]), strict=True)
        return all(set(contract) == set(range(len(contract))) < set(range(len(self.values[v].shape))) for v, contract in sides)

    def _is_worth(self, join: Op, rows: int) -> bool:
        """A concatenation of columns (behind the first ``rows`` dimensions), of few parts that are not all narrow."""
        columns = [math.prod(self.values[v].shape[rows:]) for v in join.inputs]
        return join["dimension"] >= rows and 1 < len(columns) <= _MOST_PARTS and max(columns) >= _LEAST_COLUMNS and min(columns) > 0

    def _split(self, op: Op, step: Step, side: int, join: Op) -> None:
        rows = len(op["lhs_contract"])
        left = len(self.values[op.inputs[0]].shape) - rows
        dimension = join["dimension"] - rows + (left if side else 0)
        (whole,) = op.outputs
        made = []
        for part in join.inputs:
            shape, dtype = list(self.values[whole].shape), self.values[whole].dtype
            shape[dimension] = self.values[part].shape[join["dimension"]]
            made.append(len(self.values))
            self.values.append(Value(tuple(shape), dtype))
            self.avals.append(_compat.aval_like(self.avals[whole], tuple(shape), dtype))
            inputs = (part, op.inputs[1]) if side == 0 else (op.inputs[0], part)
            self.add(dataclasses.replace(op, inputs=inputs, outputs=(made[-1],)), step)  # binds on whatever shapes it is given

        def joined(*parts: Any) -> Sequence[Any]:
            with step.place.context():
                return [jax.lax.concatenate(parts, dimension)]

        params = make_params(dimension=dimension)
        self.ops.append(Op("concatenate", tuple(made), (whole,), params, op.source, label=op.label))
        self.steps.append(Step(step.place, joined))

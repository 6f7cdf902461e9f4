"""Products of which only some columns are used: the weights are sliced instead of the result.

Comes in: a ``Captured`` without dead ops. Goes out: the same, where ``slice(x @ w)`` stands as ``x @ slice(w)``. The gradient of
a concatenation is such a slice of the product behind it, where nobody wants the gradient of the other parts. Invariant: every value
that is left keeps its shape and meaning; an element of the result is the same sum as before.

The sliced weights take the product's place and the product takes the slice's, so no op moves in front of its operands.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from kitsune_jax import _compat
from kitsune_jax.capture.builder import Captured, Step
from kitsune_jax.graph import Op, Value, make_params


def fold_slices(captured: Captured) -> Captured:
    """Rewrite the slices of ``captured`` that take columns of a product which nothing else reads."""
    folder = _Folder(captured)
    return folder.result() if folder.run() else captured


class _Folder:
    def __init__(self, captured: Captured):
        self.captured, graph = captured, captured.graph
        self.values, self.avals = list(graph.values), list(captured.avals)
        self.ops, self.steps = list(graph.ops), list(captured.steps)

    def run(self) -> bool:
        """Fold what can be folded. Was there anything?"""
        reads = Counter([*self.captured.graph.outputs, *(v for op in self.ops for v in op.inputs)])
        maker = {v: i for i, op in enumerate(self.ops) for v in op.outputs}
        found = False
        for i, op in enumerate(self.ops):
            first = maker.get(op.inputs[0]) if op.kind == "slice" else None
            if first is None or reads[op.inputs[0]] > 1 or not self._is_layer(self.ops[first]) or not self._keeps_rows(op):
                continue
            self._fold(first, i)
            maker[self.ops[first].outputs[0]] = first
            found = True
        return found

    def result(self) -> Captured:
        graph = dataclasses.replace(self.captured.graph, values=tuple(self.values), ops=tuple(self.ops))
        return dataclasses.replace(self.captured, graph=graph, steps=tuple(self.steps), avals=tuple(self.avals))

    def _is_layer(self, op: Op) -> bool:
        """A product of rows with a matrix: its last dimension is the matrix's only free one."""
        if op.kind != "dot_general" or op["lhs_batch"] or 0 in op["lhs_contract"]:  # rows contracted: a weight gradient
            return False
        x, w = (len(self.values[v].shape) for v in op.inputs)
        return w - len(op["rhs_contract"]) == 1 and x > len(op["lhs_contract"])

    def _keeps_rows(self, cut: Op) -> bool:
        shape = self.values[cut.inputs[0]].shape
        strides = cut["strides"] or (1,) * len(shape)
        return all((cut["start"][d], cut["limit"][d], strides[d]) == (0, shape[d], 1) for d in range(len(shape) - 1))

    def _fold(self, first: int, second: int) -> None:
        product, cut = self.ops[first], self.ops[second]
        strides = cut["strides"] or (1,) * len(cut["start"])
        x, w = product.inputs
        wide = self.values[w].shape
        (free,) = (d for d in range(len(wide)) if d not in product["rhs_contract"])
        start = tuple(cut["start"][-1] if d == free else 0 for d in range(len(wide)))
        limit = tuple(cut["limit"][-1] if d == free else n for d, n in enumerate(wide))
        steps = tuple(strides[-1] if d == free else 1 for d in range(len(wide)))
        sizes = tuple(-(-(b - a) // s) for a, b, s in zip(start, limit, steps, strict=True))
        narrow = len(self.values)
        self.values.append(Value(sizes, self.values[w].dtype))
        self.avals.append(_compat.aval_like(self.avals[w], sizes, self.values[w].dtype))
        place = self.steps[second].place

        def sliced(weights: Any) -> Sequence[Any]:
            with place.context():
                return [jax.lax.slice(weights, start, limit, steps)]

        params = make_params(start=start, limit=limit, strides=steps)
        self.ops[first] = dataclasses.replace(cut, inputs=(w,), outputs=(narrow,), params=params)
        self.ops[second] = dataclasses.replace(product, inputs=(x, narrow), outputs=cut.outputs)
        self.steps[second] = self.steps[first]  # the equation binds on whatever shapes it is given
        self.steps[first] = Step(place, sliced)

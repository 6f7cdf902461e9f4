"""Products of which only some columns are used: the weights are sliced instead of the result.

Comes in: a ``Builder`` at the end of a walk. Goes out: the same, where ``slice(x @ w)`` stands as ``x @ slice(w)``. The gradient of
a concatenation is such a slice of the product behind it, where nobody wants the gradient of the other parts. Invariant: every value
keeps its shape and meaning; an element of the result is the same sum as before.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from kitsune_jax.capture.builder import Builder, Step
from kitsune_jax.graph import Op, make_params


def fold_slices(builder: Builder, outputs: Sequence[int]) -> None:
    """Rewrite the slices of ``builder`` that take columns of a product which nothing else reads."""
    reads = Counter(outputs)
    for i in reversed(range(len(builder.ops))):  # what nothing reads does not count: the other half of a split
        if builder.steps[i].has_effects or any(reads[v] for v in builder.ops[i].outputs):
            reads.update(builder.ops[i].inputs)
    maker = {v: i for i, op in enumerate(builder.ops) for v in op.outputs}
    for i, op in enumerate(builder.ops):
        if op.kind != "slice" or reads[op.inputs[0]] > 1 or op.inputs[0] not in maker:
            continue
        first = maker[op.inputs[0]]
        if _is_layer(builder, builder.ops[first]):
            _fold(builder, first, i)


def _is_layer(builder: Builder, op: Op) -> bool:
    """A product of rows with a matrix: its last dimension is the matrix's only free one."""
    if op.kind != "dot_general" or op["lhs_batch"] or 0 in op["lhs_contract"]:  # rows contracted: a weight gradient
        return False
    x, w = (len(builder.values[v].shape) for v in op.inputs)
    return w - len(op["rhs_contract"]) == 1 and x > len(op["lhs_contract"])


def _fold(builder: Builder, first: int, second: int) -> None:
    product, cut = builder.ops[first], builder.ops[second]
    shape = builder.values[cut.inputs[0]].shape
    rank, strides = len(shape), cut["strides"] or (1,) * len(shape)
    whole = all((cut["start"][d], cut["limit"][d], strides[d]) == (0, shape[d], 1) for d in range(rank - 1))
    if not whole:
        return
    x, w = product.inputs
    wide = builder.values[w].shape
    (free,) = (d for d in range(len(wide)) if d not in product["rhs_contract"])

    def of_weights(name: str, otherwise: Any) -> tuple[int, ...]:
        return tuple((cut[name] or strides)[-1] if d == free else otherwise(d) for d in range(len(wide)))

    start, limit = of_weights("start", lambda d: 0), of_weights("limit", lambda d: wide[d])
    steps = of_weights("strides", lambda d: 1)
    aval = builder.avals[w].update(shape=tuple(-(-(b - a) // s) for a, b, s in zip(start, limit, steps, strict=True)))
    narrow = builder.value(aval)
    place = builder.steps[second].place

    def sliced(weights: Any) -> Sequence[Any]:
        with place.context():
            return [jax.lax.slice(weights, start, limit, steps)]

    params = make_params(start=start, limit=limit, strides=steps)
    builder.ops[first] = dataclasses.replace(cut, inputs=(w,), outputs=(narrow,), params=params)
    builder.ops[second] = dataclasses.replace(product, inputs=(x, narrow), outputs=cut.outputs)
    builder.steps[second] = builder.steps[first]  # the equation binds on whatever shapes it is given
    builder.steps[first] = Step(place, sliced)

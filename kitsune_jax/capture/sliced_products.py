"""Products of which only some columns are used: the weights are sliced instead of the result.

Comes in: a ``Captured`` without dead ops. Goes out: the same, where ``slice(x @ w)`` stands as ``x @ slice(w)``. The gradient of
a concatenation is such a slice of the product behind it, where nobody wants the gradient of the other parts. Invariant: every value
that is left keeps its shape and meaning; an element of the result is the same sum as before.

The sliced weights take the product's place and the product takes the slice's, so no op moves in front of its operands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kitsune_jax.capture.captured import Captured, Draft, with_params
from kitsune_jax.graph import Op, Value


def fold_slices(captured: Captured) -> Captured:
    """Rewrite the slices of ``captured`` that take columns of a product which nothing else reads."""
    draft = Draft(captured)
    reads = Counter([*captured.graph.outputs, *(v for op in draft.ops for v in op.inputs)])
    maker = captured.graph.producers()
    for i, op in enumerate(captured.graph.ops):
        first = maker.get(op.inputs[0]) if op.kind == "slice" else None
        if first is None or reads[op.inputs[0]] > 1:
            continue
        if is_layer(draft.ops[first], draft.values) and _keeps_rows(op, draft.values):
            _fold(draft, first, i)
            maker[draft.ops[first].outputs[0]] = first
    return draft.finish()


def is_layer(op: Op, values: Sequence[Value]) -> bool:
    """A product of rows with a matrix: its last dimension is the matrix's only free one."""
    if op.kind != "dot_general" or op["lhs_batch"] or 0 in op["lhs_contract"]:  # rows contracted: a weight gradient
        return False
    x, w = (len(values[v].shape) for v in op.inputs)
    return w - len(op["rhs_contract"]) == 1 and x > len(op["lhs_contract"])


def _keeps_rows(cut: Op, values: Sequence[Value]) -> bool:
    shape = values[cut.inputs[0]].shape
    strides = cut["strides"] or (1,) * len(shape)
    return all((cut["start"][d], cut["limit"][d], strides[d]) == (0, shape[d], 1) for d in range(len(shape) - 1))


def columns_of(cut: Op, values: Sequence[Value]) -> tuple[int, int] | None:
    """The first of the columns (the last dimension) that the slice ``cut`` takes, and the one behind them; None if it is not so."""
    if not _keeps_rows(cut, values) or (cut["strides"] or (1,))[-1] != 1:
        return None
    return cut["start"][-1], cut["limit"][-1]


def _fold(draft: Draft, first: int, second: int) -> None:
    product, cut = draft.ops[first], draft.ops[second]
    x, w = product.inputs
    wide = draft.values[w].shape
    (free,) = (d for d in range(len(wide)) if d not in product["rhs_contract"])

    def at_free(last: int, others: Sequence[int]) -> tuple[int, ...]:
        return tuple(last if d == free else n for d, n in enumerate(others))

    sizes = at_free(draft.values[cut.outputs[0]].shape[-1], wide)
    start, limit = at_free(cut["start"][-1], [0] * len(wide)), at_free(cut["limit"][-1], wide)
    strides = at_free((cut["strides"] or (1,))[-1], [1] * len(wide))
    narrow = draft.value(w, sizes)
    draft.ops[first] = with_params(cut, (w,), (narrow,), start=start, limit=limit, strides=strides)
    draft.ops[second] = with_params(product, (x, narrow), cut.outputs)
    draft.steps[first], draft.steps[second] = draft.steps[second], draft.steps[first]

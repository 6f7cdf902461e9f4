"""Sums over segments of what carries the softmax's exponential: made online, in the pass that finds the largest score.

Comes in: a ``Captured``. Goes out: the same, in which every sum over the segments of ``i`` of a product that has
``e = exp(score - take(largest, i))`` among its factors is one ``scatter_exp_sum`` of the other factors, where ``largest`` is the
largest score of each segment of the same ``i``. The sum no longer waits for ``largest``. Nothing else about the softmax matters:
the denominator is such a sum (of ones), and so is every weighted sum of values. For targets that fold such sums online.

Invariants: every value that is left keeps its shape and meaning, up to the order in which numbers are rounded.
"""

from __future__ import annotations

from kitsune_jax.capture.captured import Captured, Draft, Step
from kitsune_jax.capture.segments import Exponential, Segments
from kitsune_jax.graph import Op, Value, make_params
from kitsune_jax.ops.online import ONLINE


def sum_online(captured: Captured) -> Captured:
    """Rewrite the sums of ``captured`` over the segments of a softmax whose rows carry its exponential."""
    kinds = {op.kind for op in captured.graph.ops}
    if not {"exp", "scatter_max", "scatter_sum", "take"} <= kinds:
        return captured
    draft = Draft(captured)
    segments = Segments(captured.graph.ops, draft.values)
    draft.ops, draft.steps = [], []
    for op, step in zip(captured.graph.ops, captured.steps, strict=True):
        _append(draft, segments, op, step)
    return draft.finish()


def _append(draft: Draft, segments: Segments, op: Op, step: Step) -> None:
    """Append ``op``, or the online sum that stands for it."""
    total = segments.scattered(op.outputs[0], "scatter_sum") if op.kind == "scatter_sum" else None
    found = _factors(draft, segments, total) if total is not None else None
    if found is not None:
        exponential, other = found
        shape = draft.values[op.inputs[0]].shape
        if other is None:
            other = draft.value(op.inputs[0], shape)
            draft.values.append(Value((), draft.values[other].dtype, 1.0))
            draft.avals.append(None)
            one = len(draft.values) - 1
            params = make_params(shape=shape, dims=())
            draft.ops.append(Op("broadcast_in_dim", (one,), (other,), params, op.source, label="broadcast"))
            draft.steps.append(step)
        params = make_params(**{**dict(op.params), "finite": exponential.finite})
        inputs = other, op.inputs[1], exponential.score
        op = Op("scatter_exp_sum", inputs, op.outputs, params, op.source, label=f"online {op.label}")
    draft.ops.append(op)
    draft.steps.append(step)


def _factors(draft: Draft, segments: Segments, total: Op) -> tuple[Exponential, int | None] | None:
    """The exponential among the factors of the rows that ``total`` sums, and the product of the others (None: 1)."""
    rows, ids = total.inputs
    if draft.values[rows].dtype not in ONLINE["scatter_exp_sum"].dtypes:
        return None

    def softmax(v: int) -> Exponential | None:
        """The exponential that ``v`` repeats along dimensions behind its own."""
        found = segments.exponential(_repeated(draft, segments, v))
        if found is None or segments.number(found.ids) != segments.number(ids) or found.n != total["n"]:
            return None
        shape, own = draft.values[rows].shape, draft.values[found.value].shape
        return found if shape[: len(own)] == own else None

    whole = softmax(rows)
    if whole is not None:
        return (whole, None) if draft.values[whole.value].shape == draft.values[rows].shape else None
    product = segments.made(rows, "mul")
    for k in range(2) if product is not None else ():
        assert product is not None
        found = softmax(product.inputs[k])
        other = product.inputs[1 - k]
        if found is not None and draft.values[other].shape == draft.values[rows].shape:
            return found, other
    return None


def _repeated(draft: Draft, segments: Segments, v: int) -> int:
    """The value of which ``v`` is a repetition along dimensions at its end, dimensions of one element there left out."""
    while (op := segments.maker.get(v)) is not None and op.kind in ("broadcast_in_dim", "reshape") and op.inputs:
        x = op.inputs[0]
        before, after = draft.values[x].shape, draft.values[v].shape
        if op.kind == "reshape":
            kept = after[: len(before)] == before and all(n == 1 for n in after[len(before) :])
        else:
            rank = next((r for r in range(len(before), 1, -1) if before[r - 1] != 1), min(1, len(before)))
            kept = op["dims"][:rank] == tuple(range(rank)) and after[:rank] == before[:rank]
        if not kept:
            return v
        v = x
    return v

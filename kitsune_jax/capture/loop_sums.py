"""Sums over the steps of a loop that leave the loop.

Comes in: a ``Captured`` without dead ops. Goes out: the same, where a carry that a loop only ever adds to is one sum behind the
loop: ``dW <- dW + x^T dz`` in every step becomes a product that contracts the time and the batch of all x and dz. The reverse loop
of a gradient carries one such sum for every weight, and none of its dimensions streams; without them the loop streams over the
batch, and the product behind it is a sink of the stream. Invariants: only loops that then stream are changed; an element of a sum
is of the same addends as before, in another order.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kitsune_jax.capture.captured import Captured, Draft, Step, with_params
from kitsune_jax.graph import Graph, Op, make_params
from kitsune_jax.ops.loops import Classes, body_of, parts
from kitsune_jax.ops.table import OPS

# What a sum's addends may go through: linear in their first operand; another one is a constant.
_LINEAR = frozenset({"transpose", "reshape", "broadcast_in_dim", "convert_element_type", "neg", "pad", "mul", "div"})


def move_sums(captured: Captured, kept: Collection[Any] = ()) -> Captured:
    """Rewrite the loops of ``captured`` that add up contractions of streamed dimensions, but for those at ``kept`` places."""
    draft = Draft(captured)
    draft.ops, draft.steps = [], []
    for op, step in zip(captured.graph.ops, captured.steps, strict=True):
        sums = _sums(op) if op.body is not None and step.origin.key not in kept else ()
        if not sums:
            draft.ops.append(op)
            draft.steps.append(step)
            continue
        _move(draft, op, Step(step.origin, rewritten=True), sums)
    return draft.finish()


@dataclasses.dataclass(frozen=True)
class _Addend:
    """``contraction`` of the loop's body, and what is done to its result, in order, before it is added."""

    contraction: Op
    shaped: tuple[Op, ...]


@dataclasses.dataclass(frozen=True)
class _Sum:
    carry: int
    addends: tuple[_Addend, ...]


def _sums(op: Op) -> list[_Sum]:
    """The sums that can leave the loop ``op``: all but those whose contractions do not stream without the others."""
    body, p = body_of(op), parts(op)
    reads = Counter([*body.outputs, *(v for inner in body.ops for v in inner.inputs)])
    maker = {v: inner for inner in body.ops for v in inner.outputs}
    still = {*p.in_consts, *(v for v, value in enumerate(body.values) if value.literal is not None)}
    for inner in body.ops:
        if still.issuperset(inner.inputs):
            still.update(inner.outputs)

    def addends(v: int, carry: int) -> list[_Addend] | None:
        """What is added to ``carry`` to make ``v``; None where ``v`` is anything else."""
        if v == carry:
            return []
        if (made := maker.get(v)) is None or reads[v] != 1:
            return None
        if made.kind == "add" and body.values[v].shape == body.values[carry].shape:
            sides = [addends(x, carry) for x in made.inputs]
            return None if None in sides else [a for side in sides for a in side or ()]
        return _addend(v)

    def _addend(v: int) -> list[_Addend] | None:
        shaped: list[Op] = []
        while (made := maker.get(v)) is not None and reads[v] == 1 and _linear(made, body):
            shaped.insert(0, made)
            v = made.inputs[0]
        if made is None or reads[v] != 1 or made.kind not in ("dot_general", "reduce_sum") or not still.isdisjoint(made.inputs):
            return None
        return [_Addend(made, tuple(shaped))]

    def adds_to(v: int, carry: int) -> bool:
        """Is ``carry`` itself among what is added up to ``v``? Elsewhere it is replaced in every step."""
        made = maker.get(v)
        return v == carry or made is not None and made.kind == "add" and any(adds_to(x, carry) for x in made.inputs)

    found = []
    for k, (carry, after) in enumerate(zip(p.in_carries, p.in_next, strict=True)):
        if reads[carry] == 1 and carry != after and adds_to(after, carry):
            parts_of = addends(after, carry)
            if parts_of:
                found.append(_Sum(k, tuple(parts_of)))
    while found:
        classes = Classes(OPS, _without(op, found))

        def streams(a: _Addend, classes: Classes = classes) -> bool:
            return any(classes.root(dim) not in classes.why for dim in _contracted(a.contraction))

        kept = [s for s in found if all(map(streams, s.addends))]
        if len(kept) == len(found):
            break
        found = kept
    return found


def _linear(op: Op, body: Graph) -> bool:
    others = [body.values[v].literal for v in op.inputs[1:]]
    return op.kind in _LINEAR and None not in others and (op.kind != "pad" or others == [0])


def _contracted(op: Op) -> list[tuple[int, int]]:
    axes = (op["lhs_contract"], op["rhs_contract"]) if op.kind == "dot_general" else (op["axes"],)
    return [(v, d) for v, dims in zip(op.inputs, axes, strict=True) for d in dims]


def _slices(op: Op, sums: Sequence[_Sum]) -> list[int]:
    """The values of the body that the contractions behind the loop read, and that are no slices of an operand."""
    xs = set(parts(op).in_xs)
    return [v for v in dict.fromkeys(v for s in sums for a in s.addends for v in a.contraction.inputs) if v not in xs]


def _without(op: Op, sums: Sequence[_Sum], outputs: Sequence[int] = ()) -> Op:
    """The loop ``op`` without ``sums``, with the slices that they are made of as further ys: the values ``outputs`` around it."""
    body, p = body_of(op), parts(op)
    gone = {s.carry for s in sums}
    kept = [k for k in range(op["carries"]) if k not in gone]
    slices = _slices(op, sums)
    new = Graph(
        body.values,
        (*p.in_consts, *(p.in_carries[k] for k in kept), *p.in_xs),
        (*(p.in_next[k] for k in kept), *p.in_ys, *slices),
        body.ops,
    )
    inputs = (*p.consts, *(p.initial[k] for k in kept), *p.xs)
    outs = (*(p.final[k] for k in kept), *p.ys, *(outputs or slices))
    params = make_params(**{**dict(op.params), "carries": len(kept)})
    loop = dataclasses.replace(op, inputs=inputs, outputs=outs, params=params, body=new)
    alive, ops = set(new.outputs), []
    for inner in reversed(body.ops):
        if not alive.isdisjoint(inner.outputs):
            alive.update(inner.inputs)
            ops.append(inner)
    return dataclasses.replace(loop, body=dataclasses.replace(new, ops=tuple(reversed(ops))))


def _move(draft: Draft, op: Op, step: Step, sums: Sequence[_Sum]) -> None:
    """Append the loop ``op`` without ``sums``, if it then makes anything, and the sums."""
    body, p, length = body_of(op), parts(op), op["length"]
    arrays = dict(zip(p.in_xs, p.xs, strict=True))
    like = op.inputs[-1] if op.inputs else op.outputs[0]
    for v in (slices := _slices(op, sums)):
        arrays[v] = draft.value(like, (length, *body.values[v].shape), body.values[v].dtype)
    zeros = {o.outputs[0] for o in draft.ops if o.kind == "broadcast_in_dim" and draft.values[o.inputs[0]].literal == 0}

    def append(new: Op) -> int:
        draft.ops.append(new)
        draft.steps.append(step)
        return new.outputs[0]

    rest = _without(op, sums, [arrays[v] for v in slices])
    if rest.outputs:  # a loop that does nothing but add up slices of its operands is gone: the gradient of a layer in `lax.map`
        append(rest)
    step = Step(step.origin)
    for s in sums:
        final, initial = p.final[s.carry], p.initial[s.carry]
        count = len(s.addends) + (initial not in zeros)
        values = [initial] if initial not in zeros else []
        for a in s.addends:
            values.append(_behind(draft, append, body, a, arrays, final if count == 1 else None))
        while len(values) > 1:
            out = final if len(values) == 2 else draft.value(final, draft.values[final].shape)
            values[:2] = [append(Op("add", tuple(values[:2]), (out,), (), op.source, label="add"))]


def _behind(
    draft: Draft, append: Callable[[Op], int], body: Graph, a: _Addend, arrays: Mapping[int, int], final: int | None
) -> int:
    """Append the sum of an addend over all steps, as ``final`` if that is a value. Returns its number."""
    op = a.contraction
    if op.kind == "dot_general":
        dims = {k: tuple(d + 1 for d in op[k]) for k in ("lhs_contract", "rhs_contract", "lhs_batch", "rhs_batch")}
        dims |= {k: (0, *dims[k]) for k in ("lhs_contract", "rhs_contract")}
    else:
        dims = {"axes": (0, *(d + 1 for d in op["axes"]))}
    inputs = tuple(arrays[v] for v in op.inputs)
    for k, step in enumerate((op, *a.shaped)):
        like = body.values[step.outputs[0]]
        last = final is not None and k == len(a.shaped)
        out = final if last and final is not None else draft.value(inputs[0], like.shape, like.dtype)
        inputs += tuple(draft.literal(body.values[v]) for v in step.inputs[1:] if k)
        new = dataclasses.replace(step, inputs=inputs, outputs=(out,))
        inputs = (append(with_params(new, inputs, (out,), **dims) if k == 0 else new),)
    return inputs[0]

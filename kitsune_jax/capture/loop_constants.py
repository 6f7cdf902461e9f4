"""What the steps of a loop make of its constants alone is made once, in front of the loop.

Comes in: a ``Captured`` without dead ops. Goes out: the same, where such values are further constants of the loop: scaled or
converted weights, ``exp`` of a learned scale, a projection of a context. XLA moves them as well; a pipeline would make them again
for every tile in every step. Invariants: what is moved is no larger than what it is made of (a product: four times), so no bias
becomes a matrix; ops of constants that are cheap, or only another view of one, stay where they are; values are as before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from kitsune_jax.capture.captured import Captured, Draft, Step
from kitsune_jax.graph import Graph, Op, make_params
from kitsune_jax.ops.loops import body_of, parts
from kitsune_jax.ops.table import OPS

_WORK = frozenset({"pointwise", "convert", "dot", "reduce", "cumulative"})
_DEAR_FAMILIES = frozenset({"dot", "reduce", "cumulative"})
# Operations of an element from which on an op is made in front of the loop although its operand may be as large as a carry, of
# which it would only be another one to read.
_DEAR = 4
_LARGER, _SMALLER = 4, 8


@dataclasses.dataclass(frozen=True)
class _Made:
    """What a value is made of: the ``largest`` constant (0: none), and whether by ``work``, ``dear`` work, a ``product``."""

    largest: int = 0
    work: bool = False
    dear: bool = False
    product: bool = False


def move_constants(captured: Captured, kept: Collection[Any] = ()) -> Captured:
    """Rewrite the loops of ``captured`` that make something of their constants, but for those at ``kept`` places."""
    draft = Draft(captured)
    before: dict[int, list[tuple[Op, Step]]] = {}
    for i, (op, step) in enumerate(zip(captured.graph.ops, captured.steps, strict=True)):
        if op.body is None or op["length"] < 2 or step.origin.key in kept:
            continue
        if values := _movable(op):
            outside, before[i] = _in_front(draft, op, values, Step(step.origin))
            draft.ops[i], draft.steps[i] = _without(op, values, outside), Step(step.origin, rewritten=True)
    return draft.finish(before)


def _movable(op: Op) -> tuple[int, ...]:
    """The values of the body that are to be constants."""
    body = body_of(op)
    made = _of_constants(op)
    largest = max(value.size for value in body.values)
    needed, by_products = set(body.outputs), set[int]()
    found = []
    for inner in reversed(body.ops):
        v = inner.outputs[0]
        of = made.get(v)
        if of is not None and v not in needed:
            continue  # only what is moved reads it
        if of is not None and v not in body.outputs:
            size = body.values[v].size
            fits = size <= of.largest * (_LARGER if of.product else 1)
            if of.work and fits and (of.dear or v in by_products or size * _SMALLER <= largest):
                found.append(v)
                continue
        needed.update(inner.inputs)
        if OPS[inner.kind].family == "dot":
            by_products.update(inner.inputs)
    return tuple(reversed(found))


def _of_constants(op: Op) -> dict[int, _Made]:
    """The values of the body that are made of constants alone, or of nothing."""
    body, p = body_of(op), parts(op)
    known = {v: _Made() for v, value in enumerate(body.values) if value.literal is not None}
    known |= {v: _Made(body.values[v].size) for v in p.in_consts}
    given = set(known)
    for inner in body.ops:
        if inner.body is not None or not all(v in known for v in inner.inputs):
            continue
        spec, of = OPS[inner.kind], [known[v] for v in inner.inputs]
        dear = spec.family in _DEAR_FAMILIES or spec.family == "pointwise" and spec.flops >= _DEAR
        known[inner.outputs[0]] = _Made(
            max((m.largest for m in of), default=0),
            spec.family in _WORK or any(m.work for m in of),
            dear or any(m.dear for m in of),
            spec.family == "dot" or any(m.product for m in of),
        )
    return {v: m for v, m in known.items() if v not in given}


def _in_front(draft: Draft, op: Op, values: Collection[int], step: Step) -> tuple[dict[int, int], list[tuple[Op, Step]]]:
    """``values`` of the body as values around the loop, and the ops that make them there."""
    body, p = body_of(op), parts(op)
    names = dict(zip(p.in_consts, p.consts, strict=True))
    ops = []
    for inner in _needed(body, values):
        for v in inner.inputs:
            if v not in names:
                names[v] = draft.literal(body.values[v])
        (v,) = inner.outputs
        names[v] = draft.value(op.outputs[0], body.values[v].shape, body.values[v].dtype)
        ops.append((dataclasses.replace(inner, inputs=tuple(names[u] for u in inner.inputs), outputs=(names[v],)), step))
    return {v: names[v] for v in values}, ops


def _needed(body: Graph, values: Collection[int]) -> list[Op]:
    """The ops of the body that make ``values``, in order."""
    alive, ops = set(values), []
    for inner in reversed(body.ops):
        if not alive.isdisjoint(inner.outputs):
            alive.update(inner.inputs)
            ops.append(inner)
    return ops[::-1]


def _without(op: Op, values: Collection[int], outside: Mapping[int, int]) -> Op:
    """The loop ``op`` with ``values`` as constants."""
    body, p = body_of(op), parts(op)
    rest = dataclasses.replace(body, ops=tuple(inner for inner in body.ops if inner.outputs[0] not in outside))
    needed = _needed(rest, body.outputs)
    read = {*body.outputs, *(v for inner in needed for v in inner.inputs)}
    consts = [(v, w) for v, w in zip(p.in_consts, p.consts, strict=True) if v in read] + [(v, outside[v]) for v in values]
    new = Graph(body.values, (*(v for v, _ in consts), *p.in_carries, *p.in_xs), body.outputs, tuple(needed))
    inputs = (*(w for _, w in consts), *p.initial, *p.xs)
    return dataclasses.replace(op, inputs=inputs, params=make_params(**{**dict(op.params), "consts": len(consts)}), body=new)

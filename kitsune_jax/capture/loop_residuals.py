"""What a loop hands to another one for each step is made again there where that is cheap.

Comes in: a ``Captured`` without dead ops. Goes out: the same, where a slice that one loop stores and only one other reads, and
that is a few operations of slices which that one has anyway, is computed in both. The forward loop of a gradient stores the slope
f (1 - f) beside f itself, for every gate. Invariants: only loops of equal length that stream are changed; values are as before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from kitsune_jax.capture.captured import Captured, Draft, Step
from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.loops import Classes, body_of, parts
from kitsune_jax.ops.table import OPS

_CHEAP = frozenset({"add", "sub", "mul", "neg", "max", "min", "abs", "square", "gt", "ge", "lt", "le", "eq", "ne", "and", "or",
                    "not", "select_n", "sign", "convert_element_type"})  # fmt: skip
_MOST_OPS = 6  # that are computed again for a slice


def hand_less(captured: Captured, kept: Collection[Any] = ()) -> Captured:
    """Rewrite the pairs of loops of ``captured`` of which one hands cheap slices to the other, but for those at ``kept`` places."""
    draft = Draft(captured)
    fits = [
        op.body is not None and step.origin.key not in kept and _fits(op)
        for op, step in zip(captured.graph.ops, captured.steps, strict=True)
    ]
    for i, op in enumerate(captured.graph.ops):
        if fits[i]:
            for j in dict.fromkeys(_only_reader(captured, y) for y in parts(op).ys):
                if j is not None and fits[j]:
                    _hand_less(draft, captured, i, j)
    return draft.finish()


def _fits(op: Op) -> bool:
    """Does a dimension of the loop stream, with no other loop inside?"""
    if any(inner.body is not None for inner in body_of(op).ops):
        return False
    classes, p = Classes(OPS, op), parts(op)
    shapes = ((v, len(body_of(op).values[v].shape)) for v in (*p.in_carries, *p.in_xs))
    return any(classes.root((v, d)) not in classes.why for v, rank in shapes for d in range(rank))


def _only_reader(captured: Captured, y: int) -> int | None:
    """The loop that reads ``y`` slice by slice, where nothing else reads it."""
    graph = captured.graph
    readers = [j for j, op in enumerate(graph.ops) if y in op.inputs]
    if y in graph.outputs or len(readers) != 1 or (op := graph.ops[readers[0]]).body is None:
        return None
    return readers[0] if op.inputs.count(y) == 1 and y in parts(op).xs else None


def _hand_less(draft: Draft, captured: Captured, i: int, j: int) -> None:
    """Loop ``i`` hands slices to loop ``j``."""
    first, second = draft.ops[i], draft.ops[j]
    if first["length"] != second["length"]:
        return
    body, p, q = body_of(first), parts(first), parts(second)
    made = {v: op for op in body.ops for v in op.outputs}
    outside = {**dict(zip(p.in_xs, p.xs, strict=True)), **dict(zip(reversed(p.in_ys), reversed(p.ys), strict=True))}
    there = dict(zip(q.xs, q.in_xs, strict=True))  # what the second loop has a slice of
    known = {v: there[y] for v, y in outside.items() if y in there}
    gone: dict[int, tuple[Op, ...]] = {}  # y -> what makes it again, as ops of the first loop's body
    read: set[int] = set()  # values that some of them start from
    order = {v: k for k, op in enumerate(body.ops) for v in op.outputs}
    for v in sorted((v for v in known if v in order), key=lambda v: -order[v]):
        if v in read or _only_reader(captured, outside[v]) != j or outside[v] not in p.ys:
            continue
        cone = _cone(body, made, v, {u for u in known if outside[u] not in gone and u != v})
        if cone is not None:
            gone[outside[v]] = cone
            read |= {u for op in cone for u in op.inputs if u in known}
    if gone:
        draft.ops[i], draft.steps[i] = _without(first, gone), Step(draft.steps[i].origin, rewritten=True)
        draft.ops[j], draft.steps[j] = _with(second, body, gone, known, there), Step(draft.steps[j].origin, rewritten=True)


def _cone(body: Graph, made: dict[int, Op], v: int, known: Collection[int]) -> tuple[Op, ...] | None:
    """The cheap ops that make ``v`` of ``known`` values and constants, in order; None where there are others, or many."""
    ops: list[Op] = []

    def visit(u: int, top: bool = False) -> bool:
        if body.values[u].literal is not None or (u in known and not top) or any(u in op.outputs for op in ops):
            return True
        op = made.get(u)
        if op is None or op.kind not in _CHEAP or len(ops) >= _MOST_OPS or not all(map(visit, op.inputs)):
            return False
        ops.append(op)
        return len(ops) <= _MOST_OPS

    return tuple(ops) if visit(v, top=True) else None


def _without(op: Op, ys: Collection[int]) -> Op:
    """The loop ``op`` that does not store ``ys``."""
    body = body_of(op)
    kept = [k for k, v in enumerate(op.outputs) if v not in ys]
    outputs = tuple(body.outputs[k] for k in kept)
    alive, ops = set(outputs), []
    for inner in reversed(body.ops):
        if not alive.isdisjoint(inner.outputs):
            alive.update(inner.inputs)
            ops.append(inner)
    new = Graph(body.values, body.inputs, outputs, tuple(reversed(ops)))
    return dataclasses.replace(op, outputs=tuple(op.outputs[k] for k in kept), body=new)


def _with(op: Op, source: Graph, gone: dict[int, tuple[Op, ...]], known: dict[int, int], there: dict[int, int]) -> Op:
    """The loop ``op`` that makes ``gone`` again in its body, of what ``source`` makes them of."""
    body = body_of(op)
    values, ops = list(body.values), list[Op]()

    def number(u: int, names: dict[int, int]) -> int:
        if u not in names:
            values.append(source.values[u])
            names[u] = len(values) - 1
        return names[u]

    for y, cone in gone.items():
        names = {u: v for u, v in known.items() if v not in {there[z] for z in gone}}
        names[cone[-1].outputs[0]] = there[y]
        for inner in cone:
            ins = tuple(number(u, names) for u in inner.inputs)
            ops.append(dataclasses.replace(inner, inputs=ins, outputs=tuple(number(u, names) for u in inner.outputs)))
    kept = [k for k, v in enumerate(op.inputs) if v not in gone]
    new = Graph(tuple(values), tuple(body.inputs[k] for k in kept), body.outputs, (*ops, *body.ops))
    return dataclasses.replace(op, inputs=tuple(op.inputs[k] for k in kept), body=new)

"""Loops in the table's terms: ``scan``, and a ``while`` whose number of steps is known, become the op ``scan``.

Comes in: an equation, its operands' value ids, and what captures a jaxpr as a Graph of its own. Goes out: the value ids of its
results, or the reason why the loop stays opaque. Invariants: the op's body holds ops of the table only; a carry that the body hands
on unchanged is a constant of the op, and so is an array that the body makes of nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kitsune_jax import _compat
from kitsune_jax.capture import keys
from kitsune_jax.capture.bodies import Bodies
from kitsune_jax.capture.builder import Builder
from kitsune_jax.capture.captured import Captured, Origin, Step
from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.loops import body_of, parts

Inside = Callable[[Any], Captured]  # of a closed jaxpr

# Branches of a condition inside a loop that are computed both: they hold at most so many ops, and no products or loops.
_MOST_OPS = 64
# Elements of what is as good as a scalar: a key, a pair of bounds.
_FEW = 16
_DEAR = frozenset({"dot_general", "scan", "opaque"})


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A loop whose body is ``body``: which of the equation's operands are what, and its number of steps."""

    body: Captured
    consts: tuple[int, ...]
    carries: tuple[int, ...]
    xs: tuple[int, ...]
    length: int
    reverse: bool


def loop(builder: Builder, eqn: Any, ins: Sequence[int], bodies: Bodies, inside: Inside) -> list[int] | str:
    """Value ids of the results of the loop ``eqn`` on ``ins``, or why it has to stay opaque."""
    found = _scan(eqn, inside) if eqn.primitive.name == "scan" else _while(builder, eqn, ins, inside)
    if isinstance(found, str):
        return found
    graph = found.body.graph
    for op, step in zip(graph.ops, found.body.steps, strict=True):
        if step.has_effects or op.kind == "opaque" and op.inputs:
            return f"its body holds {op.label} ({op.source or 'no source line'}), {op.reason}"
    return _append(builder, eqn, ins, bodies, found)


def _scan(eqn: Any, inside: Inside) -> _Loop:
    p = eqn.params
    numbers = tuple(range(len(eqn.invars)))
    first, carries = _compat.scan_parts(eqn)
    last = first + carries
    body = inside(p["jaxpr"])
    return _Loop(body, numbers[:first], numbers[first:last], numbers[last:], p["length"], p["reverse"])


def _while(builder: Builder, eqn: Any, ins: Sequence[int], inside: Inside) -> _Loop | str:
    p = eqn.params
    n, m = p["cond_nconsts"], p["body_nconsts"]
    numbers = tuple(range(len(eqn.invars)))
    body = inside(p["body_jaxpr"])
    length = _steps(builder, inside(p["cond_jaxpr"]).graph, body.graph, [*ins[:n], *ins[n + m :]], n, m)
    if length is None:
        return "the number of its steps depends on data"
    return _Loop(body, numbers[n : n + m], numbers[n + m :], (), length, False)


def _steps(builder: Builder, cond: Graph, body: Graph, ins: Sequence[int], consts: int, body_consts: int) -> int | None:
    """How often a loop runs that counts an integer from a constant to a constant by a constant; None for any other."""

    def number(graph: Graph, v: int, around: Sequence[int]) -> int | float | None:
        """The constant that ``v`` is, perhaps by way of the operand that it stands for."""
        if v in graph.inputs:
            return builder.values[around[graph.inputs.index(v)]].literal
        return graph.values[v].literal

    if len(cond.ops) != 1 or cond.outputs != cond.ops[0].outputs or cond.ops[0].kind not in ("lt", "le", "gt", "ge", "ne"):
        return None
    kind, (left, right) = cond.ops[0].kind, cond.ops[0].inputs
    if left not in cond.inputs[consts:]:
        left, right, kind = right, left, {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "ne": "ne"}[kind]
    if left not in cond.inputs[consts:] or right in cond.inputs[consts:]:
        return None
    k = cond.inputs.index(left) - consts
    counter = body.inputs[body_consts + k]
    adds = next((op for op in body.ops if op.outputs == (body.outputs[k],) and op.kind in ("add", "sub")), None)
    if adds is None or counter not in adds.inputs or (adds.kind == "sub" and adds.inputs[0] != counter):
        return None
    other = adds.inputs[1 - adds.inputs.index(counter)]
    by, start, end = body.values[other].literal, number(cond, left, ins), number(cond, right, ins)
    if not all(type(x) is int for x in (by, start, end)) or not by:
        return None
    assert isinstance(by, int) and isinstance(start, int) and isinstance(end, int)
    by = -by if adds.kind == "sub" else by
    return _count(kind, start, end, by, builder.values[ins[consts + k]].dtype)


def _count(kind: str, start: int, end: int, by: int, dtype: str) -> int | None:
    """Steps of ``i = start; while i <kind> end: i += by``; None where that does not end before the integer overflows."""
    if kind == "ne":
        steps, rest = divmod(end - start, by)
        return None if rest or steps < 0 else steps
    down = kind in ("gt", "ge")
    if down:
        start, end, by = -start, -end, -by
    end += kind in ("le", "ge")
    if start >= end:
        return 0
    if by <= 0:
        return None
    bits = int(dtype.lstrip("uint")) - (not dtype.startswith("u"))
    steps = -(-(end - start) // by)
    last = start + steps * by
    lowest = 0 if dtype.startswith("u") else -(1 << bits)
    reaches = -last if down else last
    return steps if lowest <= reaches < 1 << bits else None


def _append(builder: Builder, eqn: Any, ins: Sequence[int], bodies: Bodies, found: _Loop) -> list[int]:
    """The op, with constants in place of carries that do not change, and of arrays that the body makes of nothing."""
    graph, steps = found.body.graph, found.body.steps
    arrays = [(op, step) for op, step in zip(graph.ops, steps, strict=True) if op.kind == "opaque"]
    made = [builder.opaque((), [found.body.avals[v] for v in op.outputs], step, op.reason) for op, step in arrays]
    first, last = len(found.consts), len(found.consts) + len(found.carries)
    in_consts, in_carries, in_xs = graph.inputs[:first], graph.inputs[first:last], graph.inputs[last:]
    same = [a == b for a, b in zip(in_carries, graph.outputs, strict=False)]
    still = [(v, ins[k]) for v, k, s in zip(in_carries, found.carries, same, strict=True) if s]
    changing = [(v, k) for v, k, s in zip(in_carries, found.carries, same, strict=True) if not s]
    consts = [
        *((v, w) for (op, _), values in zip(arrays, made, strict=True) for v, w in zip(op.outputs, values, strict=True)),
        *((v, ins[k]) for v, k in zip(in_consts, found.consts, strict=True)),
        *still,
    ]
    results = [k for k in range(len(graph.outputs)) if k >= len(same) or not same[k]]
    body = Graph(
        graph.values,
        (*(v for v, _ in consts), *(v for v, _ in changing), *in_xs),
        tuple(graph.outputs[k] for k in results),
        tuple(op for op in graph.ops if op.kind != "opaque"),
    )
    inputs = [*(v for _, v in consts), *(ins[k] for _, k in changing), *(ins[k] for k in found.xs)]
    place: dict[int, int] = {}
    for k, v in enumerate(inputs):
        place.setdefault(v, k)

    def evaluate(*arrays: Any) -> list[Any]:
        given = (arrays[place[v]] if v in place else None for v in ins)
        typed = [keys.typed(x, atom.aval) for x, atom in zip(given, eqn.invars, strict=True)]
        whole = bodies.evaluate(*typed)
        return [keys.plain(whole[k]) for k in results]

    step = Step(bodies.origin, evaluate, prepare=bodies.prepare)
    avals = [_compat.physical(eqn.outvars[k].aval) for k in results]
    params = {"consts": len(consts), "carries": len(changing), "length": found.length, "reverse": found.reverse}
    outs = dict(zip(results, builder.loop(inputs, avals, step, body, **params), strict=True))
    apart = _scalars_apart(builder, builder.ops[-1], step.origin)
    outs = {k: apart.get(v, v) for k, v in outs.items()}
    handed_on = dict(zip((k for k, s in enumerate(same) if s), (v for _, v in still), strict=True))
    return [outs[k] if k in outs else handed_on[k] for k in range(len(graph.outputs))]


def _scalars_apart(builder: Builder, op: Op, origin: Origin) -> dict[int, int]:
    """Results of the loop ``op`` that need nothing but a few scalars, as results of a second loop, which makes these only.

    A counter is the same for all rows of a stream, so the call of the large loop could not store it. The second loop is dropped
    where nobody reads what it makes.
    """
    p, body = parts(op), body_of(op)

    def small(v: int) -> bool:
        return body.values[v].size <= _FEW

    carries = {k for k, v in enumerate(p.in_carries) if small(v)}
    while True:
        known = {v for v in (*p.in_consts, *p.in_xs, *(p.in_carries[k] for k in carries)) if small(v)}
        for inner in body.ops:
            if all(v in known or body.values[v].literal is not None for v in inner.inputs) and all(map(small, inner.outputs)):
                known.update(inner.outputs)
        known.update(v for v in body.outputs if body.values[v].literal is not None)
        lost = {k for k in carries if p.in_next[k] not in known}
        if not lost:
            break
        carries -= lost
    finals = sorted(carries)
    slices = [k for k, v in enumerate(p.in_ys) if v in known]
    if not (finals or slices) or all(v in known for v in body.outputs):
        return {}
    outputs = (*(p.in_next[k] for k in finals), *(p.in_ys[k] for k in slices))
    needed = set(outputs).union(p.in_carries[k] for k in finals)
    ops = []
    for inner in reversed(body.ops):
        if not needed.isdisjoint(inner.outputs):
            ops.append(inner)
            needed.update(inner.inputs)
    consts, xs = (
        [(v, w) for v, w in zip(*pair, strict=True) if w in needed] for pair in ((p.consts, p.in_consts), (p.xs, p.in_xs))
    )
    inside = (*(w for _, w in consts), *(p.in_carries[k] for k in finals), *(w for _, w in xs))
    inputs = [*(v for v, _ in consts), *(p.initial[k] for k in finals), *(v for v, _ in xs)]
    known_as = [*(p.final[k] for k in finals), *(p.ys[k] for k in slices)]
    made = builder.loop(
        inputs,
        [builder.avals[v] for v in known_as],
        Step(origin),
        Graph(body.values, inside, outputs, tuple(reversed(ops))),
        consts=len(consts),
        carries=len(finals),
        length=op["length"],
        reverse=op["reverse"],
    )
    return dict(zip(known_as, made, strict=True))


def cheap(branch: Captured) -> bool:
    """May the ops of this branch be computed although another branch is taken?"""
    return len(branch.graph.ops) <= _MOST_OPS and not any(
        op.kind in _DEAR or step.has_effects for op, step in zip(branch.graph.ops, branch.steps, strict=True)
    )

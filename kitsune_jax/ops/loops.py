"""The loop of the op table: ``scan``, whose body is a Graph.

Comes in: the table of all other entries. Goes out: the loop's own entry (``entries``), and the parts, type rule, semantics and
dimension relations (``Classes``) of a loop.

A ``scan`` has the parameters ``consts`` and ``carries`` (how many operands of each), ``length`` (steps) and ``reverse`` (the last
step is taken first). Its inputs are constants, initial carries and arrays with one slice per step (xs); its outputs are final
carries and arrays with one slice per step (ys). Its body takes the constants, the carries and a slice of each x, and makes the next
carries and a slice of each y. A slice lacks the first dimension of its array, the time. A carry that no step changes is a constant.
Invariant: two dimensions are in one class if index i of one meets only index i of the other, in any step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from jax import lax

from kitsune_jax.ops.graph import DisjointSets, Graph, Op, Value, make_params
from kitsune_jax.ops.spec import DimRelation, Dims, OpSpec, Shapes, np_dtype

Table = Mapping[str, OpSpec]
DimLabels = tuple[tuple[int, ...], ...]
LOOPS = frozenset({"scan"})
_ROW_BY_ROW = frozenset(
    {"dot", "gather", "scatter", "cumulative", "argreduce", "window"}
)  # no instruction does these for all rows at once
_TIME = "each step of a loop needs the step before it"


@dataclasses.dataclass(frozen=True, slots=True)
class LoopParts:
    """The operands and results of a loop, as values of the graph around it, and those of its body (``in_*``)."""

    consts: tuple[int, ...]
    initial: tuple[int, ...]
    xs: tuple[int, ...]
    final: tuple[int, ...]
    ys: tuple[int, ...]
    in_consts: tuple[int, ...]
    in_carries: tuple[int, ...]
    in_xs: tuple[int, ...]
    in_next: tuple[int, ...]
    in_ys: tuple[int, ...]


def body_of(op: Op) -> Graph:
    """The body of a loop. Raises ``ValueError`` for any other op."""
    if op.body is None:
        raise ValueError(f"{op.kind} is no loop")
    return op.body


def parts(op: Op) -> LoopParts:
    """The parts of a loop."""
    body, first, carries = body_of(op), op["consts"], op["carries"]
    last = first + carries
    return LoopParts(
        op.inputs[:first],
        op.inputs[first:last],
        op.inputs[last:],
        op.outputs[:carries],
        op.outputs[carries:],
        body.inputs[:first],
        body.inputs[first:last],
        body.inputs[last:],
        body.outputs[:carries],
        body.outputs[carries:],
    )


def check(op: Op, values: Sequence[Value]) -> None:
    """Raise ``ValueError`` if the operands and results of a loop do not fit its body."""
    body, length = body_of(op), op["length"]
    if length < 0 or len(op.inputs) != len(body.inputs) or len(op.outputs) != len(body.outputs):
        given = f"a loop of {length} steps has {len(op.inputs)} operands and {len(op.outputs)} results"
        raise ValueError(f"{given}, its body {len(body.inputs)} and {len(body.outputs)}")
    p = parts(op)
    if min(op["consts"], op["carries"]) < 0 or not len(p.initial) == len(p.in_carries) == len(p.in_next) == len(p.final):
        raise ValueError(f"a loop of {op['carries']} carries has {len(p.initial)} initial and {len(p.final)} final ones")

    def same(what: str, outside: Sequence[int], inside: Sequence[int], time: tuple[int, ...] = ()) -> None:
        for v, w in zip(outside, inside, strict=True):
            is_, needed = values[v], body.values[w]
            if (is_.shape, is_.dtype) != ((*time, *needed.shape), needed.dtype):
                raise ValueError(f"{what} of a loop is {is_}; in its body it is {needed}")

    same("a constant", p.consts, p.in_consts)
    same("an initial carry", p.initial, p.in_carries)
    same("a final carry", p.final, p.in_next)
    same("an x", p.xs, p.in_xs, (length,))
    same("a y", p.ys, p.in_ys, (length,))
    for v, w in zip(p.in_carries, p.in_next, strict=True):
        a, b = body.values[v], body.values[w]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(f"a carry of a loop is {a} before a step and {b} after it")


# --- semantics --------------------------------------------------------------------------------------------------------------------


def evaluate_jax(table: Table, op: Op, arrays: Sequence[Any]) -> list[Any]:
    """The results of a loop by JAX, on arrays or tracers."""
    first, carries = op["consts"], op["carries"]
    consts, initial, xs = arrays[:first], arrays[first : first + carries], arrays[first + carries :]
    body, p = body_of(op), parts(op)
    state = [lax.convert_element_type(x, body.values[v].dtype) for x, v in zip(initial, p.in_carries, strict=True)]

    def step(state: Any, slices: Any) -> Any:
        made = graph_by_jax(table, body, [*consts, *state, *slices])
        return made[:carries], made[carries:]

    final, ys = lax.scan(step, state, list(xs), op["length"], op["reverse"])
    return [*final, *ys]


def graph_by_jax(table: Table, graph: Graph, arrays: Sequence[Any]) -> list[Any]:
    """The results of a Graph without opaque ops by JAX, on arrays or tracers."""
    env: dict[int, Any] = dict(zip(graph.inputs, arrays, strict=True))
    env |= {v: lax.full((), x.literal, np_dtype(x.dtype)) for v, x in enumerate(graph.values) if x.literal is not None}
    for op in graph.ops:
        operands = [env[v] for v in op.inputs]
        if op.body is not None:
            env.update(zip(op.outputs, evaluate_jax(table, op, operands), strict=True))
        else:
            (out,) = op.outputs
            env[out] = table[op.kind].evaluate(dict(op.params), *operands, out=graph.values[out])
    return [env[v] for v in graph.outputs]


# --- dimension relations ----------------------------------------------------------------------------------------------------------

_Dim = tuple[int, int]  # (value of the body, dimension)


class Classes:
    """Classes of dimensions of a loop's body that stream together. ``root``: gives the dimension that represents the class of one.
    ``why``: such a dimension -> the reason why its class cannot stream."""

    def __init__(self, table: Table, op: Op):
        body, p = body_of(op), parts(op)
        sets = DisjointSets()
        self.root = sets.root
        stops: list[tuple[Hashable, str]] = []
        for a, b in zip(p.in_carries, p.in_next, strict=True):
            for d in range(len(body.values[a].shape)):
                sets.join([(a, d), (b, d)])
        for inner in body.ops:
            ins, outs = (tuple(body.values[v].shape for v in ids) for ids in (inner.inputs, inner.outputs))
            operands = (*inner.inputs, *inner.outputs)
            for relation in table[inner.kind].relate(inner, ins, outs):
                members = [(operands[k], d) for k, d in relation.members]
                if relation.role == "parallel":
                    sets.join(members)
                elif relation.role != "created":
                    stops += [(member, _why(inner, relation)) for member in members]
        for v, value in enumerate(body.values):
            seen = set()
            for d in range(len(value.shape)):
                if (root := self.root((v, d))) in seen:
                    stops.append((root, "it corresponds to two dimensions of one array"))
                seen.add(root)
        self.why: dict[Hashable, str] = {}
        for dim, why in stops:
            self.why.setdefault(self.root(dim), why)


def _why(op: Op, relation: DimRelation) -> str:
    name = f"{op.label or op.kind} ({op.source})" if op.source else op.label or op.kind
    if relation.role == "contracted":
        return f"{name} contracts it in every step"
    return f"{name} mixes it in every step" + (f": {relation.why}" if relation.why else "")


def _outside(op: Op) -> Iterator[tuple[int, int, bool]]:
    """(operand number, value of the body, does the operand have a time dimension) for each operand and result."""
    body, first = body_of(op), op["consts"] + op["carries"]
    for k, v in enumerate(body.inputs):
        yield k, v, k >= first
    for k, v in enumerate(body.outputs):
        yield len(body.inputs) + k, v, k >= op["carries"]


def labels_inside(table: Table, op: Op, labels: Sequence[DimLabels | None]) -> dict[int, DimLabels]:
    """The labels of all values of a loop's body that stream. ``labels``: those of its operands and results; None for a stationary
    one.

    A value streams if a dimension of it does, or if it is computed from one that streams (in a stream of one row nothing has a
    label).
    """
    body, classes, p = body_of(op), Classes(table, op), parts(op)
    axes: dict[Hashable, tuple[int, ...]] = {}
    streams: set[int] = set()
    for k, v, time in _outside(op):
        mine = labels[k] if k < len(labels) else None
        if mine is not None and body.values[v].literal is None:
            streams.add(v)
            axes |= {classes.root((v, d)): along for d, along in enumerate(mine[1:] if time else mine) if along}
    found: dict[int, DimLabels] = {}
    for v, value in enumerate(body.values):
        found[v] = tuple(axes.get(classes.root((v, d)), ()) for d in range(len(value.shape)))
        if any(found[v]):
            streams.add(v)
    while True:
        before = len(streams)
        for inner in body.ops:
            if not streams.isdisjoint(inner.inputs):
                streams.update(inner.outputs)
        for carry, result in zip(p.in_carries, p.in_next, strict=True):
            if result in streams:
                streams.add(carry)
        if len(streams) == before:
            return {v: found[v] for v in sorted(streams)}


def live_inside(op: Op, wanted: Sequence[bool]) -> set[int]:
    """The values of a loop's body that its ``wanted`` results depend on."""
    p, body = parts(op), body_of(op)
    live = {v for v, want in zip(body.outputs, wanted, strict=True) if want}
    while True:
        before = len(live)
        for inner in reversed(body.ops):
            if inner.body is not None:
                needed = live_inside(inner, [v in live for v in inner.outputs])
                live.update(v for v, w in zip(inner.inputs, inner.body.inputs, strict=True) if w in needed)
            elif not live.isdisjoint(inner.outputs):
                live.update(inner.inputs)
        live.update(result for carry, result in zip(p.in_carries, p.in_next, strict=True) if carry in live)
        live.update(carry for carry, want in zip(p.in_carries, wanted, strict=False) if want)
        if len(live) == before:
            return live


def as_step(loop: Op, op: Op) -> Op | None:
    """``op``, a sum over the steps of ``loop`` of values of its slices, as an op of the body that adds the part of one step.

    None for any other ``op``: it reads other values, or does not contract the time of all its operands. The inputs of the result
    are values of the body; its output is that of ``op``.
    """
    p = parts(loop)
    inside = dict(zip((*p.xs, *p.ys), (*p.in_xs, *p.in_ys), strict=True))
    if op.kind not in ("dot_general", "reduce_sum") or not inside.keys() >= set(op.inputs):
        return None
    summed = ("lhs_contract", "rhs_contract") if op.kind == "dot_general" else ("axes",)
    times = {op[name].index(0) if 0 in op[name] else -1 for name in summed}
    if len(times) > 1 or -1 in times:
        return None
    names = (*summed, "lhs_batch", "rhs_batch") if op.kind == "dot_general" else summed
    params = {**dict(op.params), **{name: tuple(d - 1 for d in op[name] if d) for name in names}}
    return dataclasses.replace(op, inputs=tuple(inside[v] for v in op.inputs), params=make_params(**params))


# --- its entry --------------------------------------------------------------------------------------------------------------------


def entries(table: MutableMapping[str, OpSpec]) -> dict[str, OpSpec]:
    """The loop's entry, for a ``table`` that has, or will have, the entries of the ops in its bodies."""

    def relate(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
        classes = Classes(table, op)
        body = body_of(op)
        relations = []
        members: dict[Hashable, list[tuple[int, int]]] = {}
        for k, v, time in _outside(op):
            if time:
                relations.append(DimRelation("mixed", ((k, 0),), _TIME))
            for d in range(len(body.values[v].shape)):
                members.setdefault(classes.root((v, d)), []).append((k, d + time))
        for root, dims in members.items():
            why = classes.why.get(root, "")
            relations.append(DimRelation("mixed" if why else "parallel", tuple(dims), why))
        return tuple(relations)

    def alone(op: Op, ins: list[Dims]) -> str:
        """The reason why some op of the body has no row-local form if its operands stream this way; "" if all have one."""
        body, inside = body_of(op), labels_inside(table, op, [x.labels for x in ins])
        for inner in body.ops:
            rule = table[inner.kind].alone
            dims = [Dims(body.values[v].shape, inside.get(v), body.values[v].dtype) for v in inner.inputs]
            why = rule(inner, dims) if rule is not None else ""
            if table[inner.kind].family in _ROW_BY_ROW and all(x.labels is None for x in dims):
                why = "its operands are the same for all rows"
            if why:
                return f"{inner.label or inner.kind} ({inner.source}): {why}"
        return ""

    doc = "constants, carries, xs -> carries, ys: the body, length times, each time on the carries that it made before"
    return {"scan": OpSpec("scan", "loop", None, relate, 0, doc, gives="any", mixes=True, alone=alone, measured=False)}

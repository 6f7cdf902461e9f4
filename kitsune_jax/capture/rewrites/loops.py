"""Rewrites that move work across the border of a loop: constants, products, residuals and sums."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kitsune_jax.capture.edit import Captured, Draft, Step, with_params
from kitsune_jax.ops.graph import Graph, Op, make_params
from kitsune_jax.ops.loops import Classes, body_of, parts
from kitsune_jax.ops.table import OPS

# ----------------------------------------------------------------------------------------------------------------------------------
# What the steps of a loop make of its constants alone is made once, in front of the loop.
#
# Comes in: a ``Captured`` without dead ops. Goes out: the same, where such values are further constants of the loop: scaled or
# converted weights, ``exp`` of a learned scale, a projection of a context. XLA moves them as well; a pipeline would make them
# again for every tile in every step. Invariants: what is moved is no larger than what it is made of (a product: four times), so
# no bias becomes a matrix; ops of constants that are cheap, or only another view of one, stay where they are; values are as
# before.
# ----------------------------------------------------------------------------------------------------------------------------------

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
        if values := _constants_to_move(op):
            outside, before[i] = _in_front(draft, op, values, Step(step.origin))
            draft.ops[i], draft.steps[i] = _with_constants(op, values, outside), Step(step.origin, rewritten=True)
    return draft.finish(before)


def _constants_to_move(op: Op) -> tuple[int, ...]:
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


def _with_constants(op: Op, values: Collection[int], outside: Mapping[int, int]) -> Op:
    """The loop ``op`` with ``values`` as constants."""
    body, p = body_of(op), parts(op)
    rest = dataclasses.replace(body, ops=tuple(inner for inner in body.ops if inner.outputs[0] not in outside))
    needed = _needed(rest, body.outputs)
    read = {*body.outputs, *(v for inner in needed for v in inner.inputs)}
    consts = [(v, w) for v, w in zip(p.in_consts, p.consts, strict=True) if v in read] + [(v, outside[v]) for v in values]
    new = Graph(body.values, (*(v for v, _ in consts), *p.in_carries, *p.in_xs), body.outputs, tuple(needed))
    inputs = (*(w for _, w in consts), *p.initial, *p.xs)
    return dataclasses.replace(op, inputs=inputs, params=make_params(**{**dict(op.params), "consts": len(consts)}), body=new)


# ----------------------------------------------------------------------------------------------------------------------------------
# Products of a loop's steps that nothing in the loop waits for are made behind it, all steps at once.
#
# Comes in: a ``Captured`` whose loops have no sums of weights' gradients any more (``loop_sums``). Goes out: the same, where a
# product of something that leaves the loop anyway with a constant, of which a step only makes a slice of a result, is one product
# of all steps: the gradient of what came in at each step, ``dx = dz W^T``, where dz leaves for the sums. A target asks for it
# where the sums of a loop cannot stay on chip: there dz lies in memory, and W takes room of the weights that carries are
# multiplied with. Invariants: a loop takes and makes what it did but for such slices; an element of a product is the same sum as
# before.
# ----------------------------------------------------------------------------------------------------------------------------------


def move_products(captured: Captured, most: int, kept: Collection[Any] = ()) -> Captured:
    """Rewrite the loops of ``captured`` whose products have weights of more than ``most`` elements together, but for those at
    ``kept`` places."""
    draft = Draft(captured)
    draft.ops, draft.steps = [], []
    for op, step in zip(captured.graph.ops, captured.steps, strict=True):
        moved = _products_to_move(op, most) if op.body is not None and step.origin.key not in kept else {}
        draft.ops.append(_without_ys(op, moved) if moved else op)
        draft.steps.append(Step(step.origin, rewritten=True) if moved else step)
        for k, product in moved.items():
            draft.ops.append(_of_all_steps(op, k, product))
            draft.steps.append(Step(step.origin))
    return draft.finish()


def _products_to_move(op: Op, most: int) -> dict[int, Op]:
    """The ys of the loop ``op``, by their numbers, that are products to be made behind it."""
    body, p = body_of(op), parts(op)
    products = [inner for inner in body.ops if inner.kind == "dot_general" and inner.inputs[1] in p.in_consts]
    if sum(body.values[w].size for w in {inner.inputs[1] for inner in products}) <= most:
        return {}
    reads = Counter([*body.outputs, *(v for inner in body.ops for v in inner.inputs)])
    makers = {inner.outputs[0]: inner for inner in products if inner.inputs[0] in p.in_ys and not inner["lhs_batch"]}
    return {k: makers[v] for k, v in enumerate(p.in_ys) if v in makers and reads[v] == 1}


def _without_ys(op: Op, moved: Collection[int]) -> Op:
    """The loop ``op`` without the ys ``moved``."""
    body, p = body_of(op), parts(op)
    kept = [k for k in range(len(p.ys)) if k not in moved]
    outputs = (*p.in_next, *(p.in_ys[k] for k in kept))
    alive, ops = set(outputs), list[Op]()
    for inner in reversed(body.ops):
        if not alive.isdisjoint(inner.outputs):
            alive.update(inner.inputs)
            ops.append(inner)
    consts = [k for k, v in enumerate(p.in_consts) if v in alive]
    new = Graph(body.values, (*(p.in_consts[k] for k in consts), *p.in_carries, *p.in_xs), outputs, tuple(reversed(ops)))
    inputs, outs = (*(p.consts[k] for k in consts), *p.initial, *p.xs), (*p.final, *(p.ys[k] for k in kept))
    return dataclasses.replace(with_params(op, inputs, outs, consts=len(consts)), body=new)


def _of_all_steps(op: Op, k: int, product: Op) -> Op:
    """``product`` of a step of the loop ``op``, whose result is the slice of its y ``k``, for all of them."""
    p = parts(op)
    x = p.ys[p.in_ys.index(product.inputs[0])]
    w = p.consts[p.in_consts.index(product.inputs[1])]
    return with_params(product, (x, w), (p.ys[k],), lhs_contract=tuple(d + 1 for d in product["lhs_contract"]))


# ----------------------------------------------------------------------------------------------------------------------------------
# What a loop hands to another one for each step is made again there where that is cheap.
#
# Comes in: a ``Captured`` without dead ops. Goes out: the same, where a slice that one loop stores and only one other reads, and
# that is a few operations of slices which that one has anyway, is computed in both. The forward loop of a gradient stores the
# slope f (1 - f) beside f itself, for every gate. Invariants: only loops of equal length that stream are changed; values are as
# before.
# ----------------------------------------------------------------------------------------------------------------------------------

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
        draft.ops[i], draft.steps[i] = _without_stored_ys(first, gone), Step(draft.steps[i].origin, rewritten=True)
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


def _without_stored_ys(op: Op, ys: Collection[int]) -> Op:
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


# ----------------------------------------------------------------------------------------------------------------------------------
# Sums over the steps of a loop that leave the loop.
#
# Comes in: a ``Captured`` without dead ops. Goes out: the same, where a carry that a loop only ever adds to is one sum behind the
# loop: ``dW <- dW + x^T dz`` in every step becomes a product that contracts the time and the batch of all x and dz. The reverse
# loop of a gradient carries one such sum for every weight, and none of its dimensions streams; without them the loop streams over
# the batch, and the product behind it is a sink of the stream. Invariants: only loops that then stream are changed; an element of
# a sum is of the same addends as before, in another order.
# ----------------------------------------------------------------------------------------------------------------------------------

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
        classes = Classes(OPS, _without_sums(op, found))

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


def _without_sums(op: Op, sums: Sequence[_Sum], outputs: Sequence[int] = ()) -> Op:
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

    rest = _without_sums(op, sums, [arrays[v] for v in slices])
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

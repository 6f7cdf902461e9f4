"""Rewrites that move work across the border of a loop: constants, products, slices and sums.

Comes in: a ``Captured`` without dead ops, and the places (``Origin.key``) of loops that stay as they are. Goes out: the same with
less work, or fewer arrays, in its ``scan`` ops. Invariants: every value that is left is as before, but for the order in which
``move_sums`` adds; the step of a changed loop is marked ``rewritten``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from kitsune_jax.capture.edit import Captured, GraphEditor, Inserter, LoopEditor, Step, needed_ops, with_params
from kitsune_jax.ops.graph import Op
from kitsune_jax.ops.loops import Classes, body_of, parts
from kitsune_jax.ops.table import OPS


def _loops(editor: GraphEditor, kept: Collection[Any]) -> Iterator[tuple[int, Op, Step]]:
    """The loops of the graph, but for those at ``kept`` places, with the steps that they have once they are rewritten."""
    for i, (op, step) in enumerate(zip(editor.graph.ops, editor.captured.steps, strict=True)):
        if op.body is not None and step.origin.key not in kept:
            yield i, op, Step(step.origin, rewritten=True)


# --- values that each step makes of constants alone: made once, in front of the loop ----------------------------------------------

_WORK = frozenset({"pointwise", "convert", "dot", "reduce", "cumulative"})
_COSTLY_FAMILIES = frozenset({"dot", "reduce", "cumulative"})
# Operations of an element from which on an op is made in front of the loop although its operand may be as large as a carry, of
# which it would only be another one to read.
_COSTLY = 4
_LARGER, _SMALLER = 4, 8


@dataclasses.dataclass(frozen=True)
class _Made:
    """How a value is made: of the ``largest`` constant (0: none), and whether by ``work``, ``costly`` work or a ``product``."""

    largest: int = 0
    work: bool = False
    costly: bool = False
    product: bool = False


def move_constants(captured: Captured, kept: Collection[Any] = ()) -> Captured:
    """Make values that the steps of a loop compute from its constants alone once, in front of the loop.

    These are scaled or converted weights, ``exp`` of a learned scale, a projection of a context. XLA moves them as well; a pipeline
    would make them again for every tile in every step. A moved value is no larger than its operands (a product: four times), so no
    bias becomes a matrix; ops of constants that are cheap, or only another view of one, stay in the loop.
    """
    editor = GraphEditor(captured)
    for i, op, step in _loops(editor, kept):
        if op["length"] >= 2 and (values := _constants_to_move(op)):
            editor.replace(i, _with_constants(op, _make_in_front(editor.in_front_of(i), op, values)), step)
    return editor.finish()


def _constants_to_move(op: Op) -> tuple[int, ...]:
    """The values of the body that are to be constants."""
    body = body_of(op)
    made = _made_of_constants(op)
    largest = max(value.size for value in body.values)
    needed, by_products = set(body.outputs), set[int]()
    found = []
    for inner in reversed(body.ops):
        v = inner.outputs[0]
        of = made.get(v)
        if of is not None and v not in needed:
            continue  # only moved ops read it
        if of is not None and v not in body.outputs:
            size = body.values[v].size
            fits = size <= of.largest * (_LARGER if of.product else 1)
            if of.work and fits and (of.costly or v in by_products or size * _SMALLER <= largest):
                found.append(v)
                continue
        needed.update(inner.inputs)
        if OPS[inner.kind].family == "dot":
            by_products.update(inner.inputs)
    return tuple(reversed(found))


def _made_of_constants(op: Op) -> dict[int, _Made]:
    """The values of the body that are made of constants alone, or of nothing."""
    body, p = body_of(op), parts(op)
    known = {v: _Made() for v, value in enumerate(body.values) if value.literal is not None}
    known |= {v: _Made(body.values[v].size) for v in p.in_consts}
    given = set(known)
    for inner in body.ops:
        if inner.body is not None or not all(v in known for v in inner.inputs):
            continue
        spec, of = OPS[inner.kind], [known[v] for v in inner.inputs]
        costly = spec.family in _COSTLY_FAMILIES or spec.family == "pointwise" and spec.flops >= _COSTLY
        known[inner.outputs[0]] = _Made(
            max((m.largest for m in of), default=0),
            spec.family in _WORK or any(m.work for m in of),
            costly or any(m.costly for m in of),
            spec.family == "dot" or any(m.product for m in of),
        )
    return {v: m for v, m in known.items() if v not in given}


def _make_in_front(at: Inserter, op: Op, values: Collection[int]) -> dict[int, int]:
    """Make ``values`` of the body in front of the loop ``op``. Returns the values that they are there."""
    body, p = body_of(op), parts(op)
    names = dict(zip(p.in_consts, p.consts, strict=True))
    for inner in needed_ops(body.ops, values):
        for v in inner.inputs:
            if v not in names:
                names[v] = at.editor.literal_of(body.values[v])
        (v,) = inner.outputs
        names[v] = at.editor.value(op.outputs[0], body.values[v].shape, body.values[v].dtype)
        new = dataclasses.replace(inner, inputs=tuple(names[u] for u in inner.inputs), outputs=(names[v],))
        at.append(new, Step(at.step.origin))
    return {v: names[v] for v in values}


def _with_constants(op: Op, outside: Mapping[int, int]) -> Op:
    """The loop ``op``, which takes values of its body as constants: ``outside`` says which values they are around it."""
    loop = LoopEditor(op)
    loop.ops = [inner for inner in loop.ops if inner.outputs[0] not in outside]
    loop.consts += [(w, v) for v, w in outside.items()]
    return loop.finish()


# --- products that no later step reads: made behind the loop, for all steps at once -----------------------------------------------


def move_products(captured: Captured, most: int, kept: Collection[Any] = ()) -> Captured:
    """Make a product of which each step stores a slice, and which no step reads, behind the loop, as one product of all steps.

    Its operands are a y of the loop and a constant: in a gradient ``dx = dz W^T``, where dz is stored for the sums that
    ``move_sums`` has moved behind the loop. Only in loops whose products have weights of more than ``most`` elements together: the
    sums of such a loop do not fit on chip, so dz lies in memory anyway, and W takes room of the weights that carries are multiplied
    with. An element of a product is the same sum as before.
    """
    editor = GraphEditor(captured)
    for i, op, step in _loops(editor, kept):
        if moved := _products_to_move(op, most):
            editor.replace(i, _without_ys(op, [parts(op).ys[k] for k in moved]), step)
            for k, product in moved.items():
                editor.behind(i).append(_product_of_all_steps(op, k, product), Step(step.origin))
    return editor.finish()


def _products_to_move(op: Op, most: int) -> dict[int, Op]:
    """The ys of the loop ``op``, by their numbers, that are products to be made behind it."""
    loop, p = LoopEditor(op), parts(op)
    products = [inner for inner in loop.ops if inner.kind == "dot_general" and inner.inputs[1] in p.in_consts]
    if sum(loop.values[w].size for w in {inner.inputs[1] for inner in products}) <= most:
        return {}
    makers = {inner.outputs[0]: inner for inner in products if inner.inputs[0] in p.in_ys and not inner["lhs_batch"]}
    return {k: makers[v] for k, v in enumerate(p.in_ys) if v in makers and loop.reads(v) == 1}


def _without_ys(op: Op, ys: Collection[int]) -> Op:
    """The loop ``op`` that does not store ``ys``."""
    loop = LoopEditor(op)
    loop.ys = [(y, v) for y, v in loop.ys if y not in ys]
    return loop.finish()


def _product_of_all_steps(op: Op, k: int, product: Op) -> Op:
    """``product`` of a step of the loop ``op``, whose result is the slice of its y ``k``, for all of them."""
    p = parts(op)
    x = p.ys[p.in_ys.index(product.inputs[0])]
    w = p.consts[p.in_consts.index(product.inputs[1])]
    return with_params(product, (x, w), (p.ys[k],), lhs_contract=tuple(d + 1 for d in product["lhs_contract"]))


# --- slices that one loop stores for another: computed again in the second loop ---------------------------------------------------

_CHEAP = frozenset({"add", "sub", "mul", "neg", "max", "min", "abs", "square", "gt", "ge", "lt", "le", "eq", "ne", "and", "or",
                    "not", "select_n", "sign", "convert_element_type"})  # fmt: skip
_MOST_OPS = 6  # that are computed again for a slice


def recompute_cheap_slices(captured: Captured, kept: Collection[Any] = ()) -> Captured:
    """Compute slices that one loop stores, and only one other loop reads, in that other loop, where it takes a few cheap ops.

    The ops start from slices that the other loop has anyway. The forward loop of a gradient stores the slope f (1 - f) of every
    gate beside f itself. Only loops of equal length that stream are changed.
    """
    editor = GraphEditor(captured)
    steps = {i: step for i, op, step in _loops(editor, kept) if _streams(op)}
    for i in steps:
        for j in dict.fromkeys(_only_reader(editor, y) for y in parts(editor.graph.ops[i]).ys):
            if j in steps:
                _recompute_slices(editor, i, j, steps)
    return editor.finish()


def _streams(op: Op) -> bool:
    """Does a dimension of the loop stream, with no other loop inside?"""
    if any(inner.body is not None for inner in body_of(op).ops):
        return False
    classes, p = Classes(OPS, op), parts(op)
    shapes = ((v, len(body_of(op).values[v].shape)) for v in (*p.in_carries, *p.in_xs))
    return any(classes.root((v, d)) not in classes.why for v, rank in shapes for d in range(rank))


def _only_reader(editor: GraphEditor, y: int) -> int | None:
    """The loop that reads ``y`` slice by slice, where nothing else reads it."""
    for j in editor.readers.get(y, ()):
        op = editor.graph.ops[j]
        if editor.reads(y) == 1 and op.body is not None and y in parts(op).xs:
            return j
    return None


def _recompute_slices(editor: GraphEditor, i: int, j: int, steps: Mapping[int, Step]) -> None:
    """Rewrite loop ``i``, which stores slices, and loop ``j``, which reads them, where cheap ops make one; they get ``steps``."""
    first, second = LoopEditor(editor.ops[i]), LoopEditor(editor.ops[j])
    if first.op["length"] != second.op["length"]:
        return
    ys = {w for w, _ in first.ys}
    outside = {v: w for w, v in (*first.xs, *reversed(first.ys))}
    inside = dict(second.xs)  # arrays of which the second loop has a slice -> that slice
    known = {v: inside[w] for v, w in outside.items() if w in inside}
    gone: dict[int, list[Op]] = {}  # y -> the ops of the first loop's body that make it
    read: set[int] = set()  # values that some of these ops start from
    for v in sorted((v for v in known if v in first.maker), key=lambda v: -first.maker[v]):
        if v in read or _only_reader(editor, outside[v]) != j or outside[v] not in ys:
            continue
        ops = _cheap_ops(first, v, {u for u in known if outside[u] not in gone and u != v})
        if ops is not None:
            gone[outside[v]] = ops
            read |= {u for op in ops for u in op.inputs if u in known}
    if gone:
        editor.replace(i, _without_ys(first.op, gone), steps[i])
        editor.replace(j, _with_recomputed(second, first, gone, known), steps[j])


def _cheap_ops(loop: LoopEditor, v: int, known: Collection[int]) -> list[Op] | None:
    """The cheap ops that make ``v`` of ``known`` values and constants, in order; None where there are others, or too many."""
    ops: list[Op] = []

    def visit(u: int, top: bool = False) -> bool:
        if loop.values[u].literal is not None or (u in known and not top) or any(u in op.outputs for op in ops):
            return True
        op = loop.made_by(u)
        if op is None or op.kind not in _CHEAP or len(ops) >= _MOST_OPS or not all(map(visit, op.inputs)):
            return False
        ops.append(op)
        return len(ops) <= _MOST_OPS

    return ops if visit(v, top=True) else None


def _with_recomputed(loop: LoopEditor, source: LoopEditor, gone: Mapping[int, Sequence[Op]], known: Mapping[int, int]) -> Op:
    """``loop``, which makes the slices of ``gone`` by ops of ``source``; ``known``: values of ``source`` that ``loop`` has too."""
    inside, ops = dict(loop.xs), list[Op]()

    def number(u: int, names: dict[int, int]) -> int:
        if u not in names:
            loop.values.append(source.values[u])
            names[u] = len(loop.values) - 1
        return names[u]

    for y, made_by in gone.items():
        names = {u: v for u, v in known.items() if v not in {inside[z] for z in gone}}
        names[made_by[-1].outputs[0]] = inside[y]
        for op in made_by:
            ins = tuple(number(u, names) for u in op.inputs)
            ops.append(dataclasses.replace(op, inputs=ins, outputs=tuple(number(u, names) for u in op.outputs)))
    loop.xs = [(w, v) for w, v in loop.xs if w not in gone]
    loop.ops[:0] = ops
    return loop.finish()


# --- sums over the steps: one sum behind the loop ---------------------------------------------------------------------------------

# Ops between an addend's contraction and the addition: linear in their first operand; another one is a constant.
_LINEAR = frozenset({"transpose", "reshape", "broadcast_in_dim", "convert_element_type", "neg", "pad", "mul", "div"})


def move_sums(captured: Captured, kept: Collection[Any] = ()) -> Captured:
    """Replace a carry to which a loop only ever adds contractions of streamed dimensions by one sum behind the loop.

    ``dW <- dW + x^T dz`` in every step becomes a product that contracts the time and the batch of all x and dz. The reverse loop of
    a gradient carries one such sum for every weight, and none of its dimensions streams; without them the loop streams over the
    batch, and the product behind it is a sink of the stream. Only loops that then stream are changed; an element of a sum has the
    same addends as before, in another order.
    """
    editor = GraphEditor(captured)
    for i, op, step in _loops(editor, kept):
        if sums := _sums(op):
            _move_sums(editor, i, op, step, sums)
    return editor.finish()


@dataclasses.dataclass(frozen=True)
class _Addend:
    """``contraction`` of the loop's body, and the ops on its result, in order, before it is added."""

    contraction: Op
    shaped: tuple[Op, ...]


@dataclasses.dataclass(frozen=True)
class _Sum:
    carry: int
    addends: tuple[_Addend, ...]


def _sums(op: Op) -> list[_Sum]:
    """The sums that can leave the loop ``op``: all but those whose contractions do not stream without the others."""
    loop, body = LoopEditor(op), body_of(op)
    still = {*(v for _, v in loop.consts), *(v for v, value in enumerate(body.values) if value.literal is not None)}
    for inner in body.ops:
        if still.issuperset(inner.inputs):
            still.update(inner.outputs)

    def addends(v: int, carry: int) -> list[_Addend] | None:
        """The addends that ``v`` has beside ``carry``; None where ``v`` is no such sum."""
        if v == carry:
            return []
        if (made := loop.made_by(v)) is None or loop.reads(v) != 1:
            return None
        if made.kind == "add" and body.values[v].shape == body.values[carry].shape:
            sides = [addends(x, carry) for x in made.inputs]
            return None if None in sides else [a for side in sides for a in side or ()]
        return addend(v)

    def addend(v: int) -> list[_Addend] | None:
        shaped: list[Op] = []
        while (made := loop.made_by(v)) is not None and loop.reads(v) == 1 and _is_linear(made, loop):
            shaped.insert(0, made)
            v = made.inputs[0]
        contracts = made is not None and made.kind in ("dot_general", "reduce_sum") and still.isdisjoint(made.inputs)
        return [_Addend(made, tuple(shaped))] if made is not None and contracts and loop.reads(v) == 1 else None

    def adds_to(v: int, carry: int) -> bool:
        """Is ``carry`` itself among the addends of ``v``? Elsewhere it is replaced in every step."""
        made = loop.made_by(v)
        return v == carry or made is not None and made.kind == "add" and any(adds_to(x, carry) for x in made.inputs)

    found = []
    for k, (_, carry, after, _) in enumerate(loop.carries):
        if loop.reads(carry) == 1 and carry != after and adds_to(after, carry) and (parts_of := addends(after, carry)):
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


def _is_linear(op: Op, loop: LoopEditor) -> bool:
    others = [loop.values[v].literal for v in op.inputs[1:]]
    return op.kind in _LINEAR and None not in others and (op.kind != "pad" or others == [0])


def _contracted(op: Op) -> list[tuple[int, int]]:
    axes = (op["lhs_contract"], op["rhs_contract"]) if op.kind == "dot_general" else (op["axes"],)
    return [(v, d) for v, dims in zip(op.inputs, axes, strict=True) for d in dims]


def _slices_to_store(op: Op, sums: Sequence[_Sum]) -> list[int]:
    """The values of the body that the contractions behind the loop read, and that are no slices of an operand."""
    xs = set(parts(op).in_xs)
    return [v for v in dict.fromkeys(v for s in sums for a in s.addends for v in a.contraction.inputs) if v not in xs]


def _without_sums(op: Op, sums: Sequence[_Sum], outside: Mapping[int, int] | None = None) -> Op:
    """The loop ``op`` without ``sums``, which stores the slices that they are made of: as the values ``outside`` around it."""
    loop, gone = LoopEditor(op), {s.carry for s in sums}
    loop.carries = [carry for k, carry in enumerate(loop.carries) if k not in gone]
    loop.ys += [(outside[v] if outside else v, v) for v in _slices_to_store(op, sums)]
    return loop.finish()


def _move_sums(editor: GraphEditor, i: int, op: Op, step: Step, sums: Sequence[_Sum]) -> None:
    """Replace loop ``i`` by one without ``sums``, if it then makes anything, and make the sums behind it."""
    body, p, at = body_of(op), parts(op), editor.behind(i)
    arrays = dict(zip(p.in_xs, p.xs, strict=True))
    like = op.inputs[-1] if op.inputs else op.outputs[0]
    for v in _slices_to_store(op, sums):
        arrays[v] = editor.value(like, (op["length"], *body.values[v].shape), body.values[v].dtype)
    rest = _without_sums(op, sums, arrays)
    if rest.outputs:
        editor.replace(i, rest, step)
    else:  # a loop that only adds up slices of its operands, as the gradient of a layer in ``lax.map``
        editor.remove(i)
    at.step = Step(step.origin)
    for s in sums:
        final, initial = p.final[s.carry], p.initial[s.carry]
        values = [] if editor.constant_of(initial) == 0 else [initial]
        alone = len(s.addends) + len(values) == 1
        for a in s.addends:
            values.append(_sum_of_all_steps(at, op, a, arrays, final if alone else None))
        while len(values) > 1:
            out = final if len(values) == 2 else editor.value(final, editor.shape(final))
            values[:2] = [at.append(Op("add", tuple(values[:2]), (out,), (), op.source, label="add"))]


def _sum_of_all_steps(at: Inserter, loop: Op, a: _Addend, arrays: Mapping[int, int], final: int | None) -> int:
    """Add the sum of an addend over all steps, as ``final`` if that is a value. Returns its number."""
    editor, body, op = at.editor, body_of(loop), a.contraction
    if op.kind == "dot_general":
        dims = {k: tuple(d + 1 for d in op[k]) for k in ("lhs_contract", "rhs_contract", "lhs_batch", "rhs_batch")}
        dims |= {k: (0, *dims[k]) for k in ("lhs_contract", "rhs_contract")}
    else:
        dims = {"axes": (0, *(d + 1 for d in op["axes"]))}
    inputs = tuple(arrays[v] for v in op.inputs)
    for k, inner in enumerate((op, *a.shaped)):
        like = body.values[inner.outputs[0]]
        out = final if final is not None and k == len(a.shaped) else editor.value(inputs[0], like.shape, like.dtype)
        inputs += tuple(editor.literal_of(body.values[v]) for v in inner.inputs[1:] if k)
        inputs = (at.append(with_params(inner, inputs, (out,), **(dims if k == 0 else {}))),)
    return inputs[0]

"""What each instruction of a tile program becomes in the text of a stage.

Comes in: an instruction and the ``Body`` it belongs to. Goes out: text where it has an effect, else the place of its value. Raises
``CannotLower`` for what has no code; ``support.py`` says as much of an op before a region is formed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import columns, effects, gradients, pointwise, tiles
from kitsune_jax.targets.cuda.actions import Fold
from kitsune_jax.targets.cuda.pack import WeightRecipe
from kitsune_jax.targets.cuda.values import (
    Expression,
    InArray,
    InImage,
    InVector,
    Multiply,
    Registers,
    Splat,
    Value,
    queue_form,
)
from kitsune_jax.targets.errors import CannotLower

if TYPE_CHECKING:
    from kitsune_jax.targets.cuda.body import Body

REDUCTIONS = {f"reduce_{how}": name for how, name in effects.HOW.items()}


def emit(body: Body, instr: Instr) -> None:
    """Generates ``instr``. One whose result does not stream is made by XLA, in front of the call."""
    if instr.outputs and not body.program.values[instr.outputs[0]].tile:
        return
    if instr.kind in columns.REARRANGING:
        columns.rearrange(body, instr)
    else:
        _HANDLERS.get(instr.kind, _pointwise)(body, instr)


def _load(body: Body, instr: Instr) -> None:
    value, array = body.new(instr), instr["array"]
    value.place = InArray(array)
    if value.row:
        _row_load(body, instr.outputs[0], array)


def _row_load(body: Body, v: int, array: int) -> None:
    value = body.values[v]
    row = body.arrays.row("in", array)
    type_, element = pointwise.COMPUTE[value.dtype], pointwise.ELEMENT[value.dtype]
    body.text(f"const {type_} r{v}[2] = {{load_one<{element}>({row}[0], valid[0]), load_one<{element}>({row}[1], valid[1])}};")
    value.place = Registers(f"r{v}", "row")
    body.budget.define(v, 2)


def _pop(body: Body, instr: Instr) -> None:
    """The entry stays in its slot, and is read from there, until the tile is done."""
    value, q, (v,) = body.new(instr), instr["queue"], instr.outputs
    form = queue_form(value.dtype, q in body.config.slab_queues)
    first = f"slab * {tiles.image_vectors(value.width, form)} + " if v in body.slabs else ""
    body.text(f"queue{q}.rd_acquire(n);")
    body.text(f"const auto pop{q} = [&](int i) {{ return queue{q}.pop(n, {first}i); }};")
    body.popped.append(q)
    if value.row:
        type_ = pointwise.COMPUTE[value.dtype]
        body.text(f"const U4 e{v} = pop{q}(0);")
        body.text(f"const {type_} r{v}[2] = {{from_word<{type_}>(e{v}.x), from_word<{type_}>(e{v}.y)}};")
        value.place = Registers(f"r{v}", "row")
    else:
        value.place = InImage(f"pop{q}", form)
        body.entries.add(v)


def _pointwise(body: Body, instr: Instr) -> None:
    value = body.new(instr)
    if not value.row:
        value.place = _with_bias(body, instr) or Expression(instr)
        return
    (v,) = instr.outputs
    type_ = pointwise.COMPUTE[value.dtype]
    operands = [body.row(x) for x in instr.inputs]
    types = [pointwise.COMPUTE[body.value(x).dtype] for x in instr.inputs]
    text = body.expression(instr, operands, types, type_, value.dtype)
    body.row_value(v, text)


def _with_bias(body: Body, instr: Instr) -> Multiply | None:
    """An addition of a stationary vector to a matmul that nobody else reads: its accumulators start from the vector."""
    if instr.kind != "add":
        return None
    for x, bias in (instr.inputs, instr.inputs[::-1]):
        place, vector = body.value(x).place, body.value(bias).place
        if not isinstance(place, Multiply) or place.bias is not None or body.uses[x] != 1:
            continue
        if isinstance(vector, InVector) and not vector.scalar and pointwise.COMPUTE[body.value(bias).dtype] == "float":
            return dataclasses.replace(place, bias=bias)
    return None


def _reshape(body: Body, instr: Instr) -> None:
    body.alias(instr, instr.inputs[0])


def _copy(body: Body, instr: Instr) -> None:
    body.alias(instr, instr.inputs[0])


def _row_index(body: Body, instr: Instr) -> None:
    (v,) = instr.outputs
    value = body.new(instr)
    index = f"static_cast<i32>({body.arrays.axis_index(instr['axes'], 'h')})"
    text = pointwise.convert(index, "i32", pointwise.COMPUTE[value.dtype])
    if value.row:
        body.row_value(v, text)
        return
    row = -1 - v
    body.values[row] = Value(1, value.dtype, True)
    body.text(f"{pointwise.COMPUTE[value.dtype]} index{v}[2];")
    body.text("KITSUNE_UNROLL")
    body.text(f"for (int h = 0; h < 2; ++h) index{v}[h] = {text};")
    body.values[row].place = Registers(f"index{v}", "row")
    value.place = Splat(row)


def _reduce(body: Body, instr: Instr) -> None:
    x, v = body.value(instr.inputs[0]), instr.outputs[0]
    if instr.inputs[0] in body.slabs:
        raise CannotLower("a reduction along columns that are split over CTAs has no code on the GPU")
    rank = len(body.program.values[instr.inputs[0]].shape)
    if x.row:
        body.alias(instr, instr.inputs[0])
        return
    if tuple(instr["axes"]) != tuple(range(1, rank + 1)):
        raise CannotLower("a reduction over a part of a row's dimensions has no code on the GPU")
    value, how = body.new(instr), REDUCTIONS[instr.kind]
    type_ = pointwise.COMPUTE[value.dtype]
    body.text(f"{type_} r{v}[2] = {{{how}::identity<{type_}>(), {how}::identity<{type_}>()}};")
    body.loop(x.width, [Fold(instr.inputs[0], how, f"r{v}")])
    body.text(f"fold_quad<{how}>(r{v});")
    value.place = Registers(f"r{v}", "row")
    body.budget.define(v, 2)


def _matmul(body: Body, instr: Instr) -> None:
    x = instr.inputs[0]
    value, (v,) = body.new(instr), instr.outputs
    if body.next_recipe is None:
        body.weights.append(weight_recipe(body, instr))
        weight = len(body.weights) - 1
    else:
        weight = body.next_recipe
        body.next_recipe += 1
    value.place = Multiply(v, weight, tuple(pieces_of(body, x)))
    if value.row:
        _single_column(body, v)


def weight_recipe(body: Body, instr: Instr) -> WeightRecipe:
    x, w = instr.inputs
    shape_x, shape_w = body.program.values[x].shape, body.program.values[w].shape
    if instr["x_batch"] or sorted(instr["x_contract"]) != list(range(1, len(shape_x) + 1)):
        raise CannotLower("a matrix product for each row has no code on the GPU")
    if body.program.values[w].tile:
        raise CannotLower("a matrix product of two streamed values has no code on the GPU")
    pairs = sorted(zip(instr["x_contract"], instr["w_contract"], strict=True))
    free = [d for d in range(len(shape_w)) if d not in instr["w_contract"]]
    if instr["out_perm"][0] != 0:
        raise AssertionError("rows come first")
    order = [free[p - 1] for p in instr["out_perm"][1:]]
    dtype = body.program.values[x].dtype
    if body.program.values[w].dtype != dtype or dtype not in pointwise.OPERAND:
        raise CannotLower(f"matrix product of {dtype} and {body.program.values[w].dtype}")
    operands = pieces_of(body, x)
    pieces = tuple(math.prod(body.program.values[p].shape) for p in operands)
    n = math.prod(shape_w[d] for d in order)
    shape = tiles.WeightShape(pieces, n, dtype, body.config.split, body.products.most_columns(operands))
    return WeightRecipe(w, (*(b for _, b in pairs), *order), len(pairs), shape)


def pieces_of(body: Body, x: int) -> list[int]:
    """The values whose columns make up the operand: the parts of a concatenation that nobody else needs as one."""
    pieces = body.concatenations.get(x)
    return [x] if pieces is None else [p for part in pieces for p in pieces_of(body, part)]


def _single_column(body: Body, v: int) -> None:
    """A matmul with one column of results: the thread of a quad that has it tells the others."""
    value = body.values[v]
    body.products.advance([v], 0)
    name, _ = body.products.chunk_at(v, 0)
    text = f"shfl({name}[2 * h], lane_id() & ~3u)"
    body.row_value(v, text)
    value.row = True


_HANDLERS: dict[str, Callable[[Body, Instr], None]] = {
    "load": _load,
    "pop": _pop,
    **dict.fromkeys(("push", "store", "sink"), effects.emit),
    "reshape": _reshape,
    "copy": _copy,
    "row_index": _row_index,
    "matmul": _matmul,
    "matmul_sink": gradients.emit,
    **dict.fromkeys(REDUCTIONS, _reduce),
}

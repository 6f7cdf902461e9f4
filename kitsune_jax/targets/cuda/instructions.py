"""What each instruction of a tile program becomes in the text of a stage.

Comes in: an instruction and the ``Body`` it belongs to. Goes out: text where it has an effect, else the place of its value. Raises
``CannotLower`` for what has no code; ``support.py`` says as much of an op before a region is formed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from kitsune_jax.planning.gpu_gradient import GradientShape, gradient_shapes, panel_bytes
from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import columns, pointwise, tiles
from kitsune_jax.targets.cuda.loop import Fold, Keep, Store, ToPanel
from kitsune_jax.targets.cuda.pack import WeightRecipe
from kitsune_jax.targets.cuda.values import (
    Expression,
    GradientCode,
    InArray,
    InImage,
    InVector,
    Multiply,
    Registers,
    SinkCode,
    Splat,
    Value,
    queue_form,
)
from kitsune_jax.targets.errors import CannotLower

if TYPE_CHECKING:
    from kitsune_jax.targets.cuda.body import Body

HOW = {"sum": "Sum", "prod": "Prod", "max": "Max", "min": "Min", "and": "And", "or": "Or"}
REDUCTIONS = {f"reduce_{how}": name for how, name in HOW.items()}


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


def _push(body: Body, instr: Instr) -> None:
    (v,), q = instr.inputs, instr["queue"]
    value = body.value(v)
    body.text(f"queue{q}.wr_acquire(n);")
    if value.row:
        x = [f"to_word({body.row(v).replace('[h]', f'[{h}]')})" for h in range(2)]
        body.text(f"queue{q}.push(n, 0, U4{{{x[0]}, {x[1]}, 0, 0}});")
    else:
        form = queue_form(value.dtype, q in body.config.slab_queues)
        first = f"slab * {tiles.image_vectors(value.width, form)} + " if v in body.slabs else ""
        body.text(f"const auto push{q} = [&](int i, U4 v) {{ queue{q}.push(n, {first}i, v); }};")
        body.loop(value.width, [Keep(v, f"q{q}", form, put=f"push{q}", push=True, reads=1)])
    body.text(f"queue{q}.wr_release(n);")


def _store(body: Body, instr: Instr) -> None:
    (v,) = instr.inputs
    value, array = body.value(v), instr["array"]
    if value.row:
        row, x = body.arrays.row("out", array), body.row(v)
        element = pointwise.ELEMENT[body.program.outputs[array].dtype]
        body.text("KITSUNE_UNROLL")
        body.text(f"for (int h = 0; h < 2; ++h) store_one<{element}>({row}[h], valid[h] && lane.q == 0, {x});")
        return
    body.loop(value.width, [Store(v, array)])


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
    body.text(f"{pointwise.COMPUTE[value.dtype]} i{v}[2];")
    body.text("KITSUNE_UNROLL")
    body.text(f"for (int h = 0; h < 2; ++h) i{v}[h] = {text};")
    body.values[row].place = Registers(f"i{v}", "row")
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
    pieces = tuple(math.prod(body.program.values[p].shape) for p in pieces_of(body, x))
    n = math.prod(shape_w[d] for d in order)
    shape = tiles.WeightShape(pieces, n, dtype, body.config.split, body.config.columns)
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


def _sink(body: Body, instr: Instr) -> None:
    (v,) = instr.inputs
    sink = body.program.sinks[instr["sink"]]
    value, rank = body.value(v), len(body.program.values[v].shape)
    if sink.how not in HOW:
        raise CannotLower(f"a sink by {sink.how} has no code on the GPU")
    how, type_, name = HOW[sink.how], pointwise.COMPUTE[sink.dtype], f"sink{instr['sink']}"
    scalar = value.row or len(instr["axes"]) == rank + 1
    if not scalar and tuple(instr["axes"]) != (0,):
        raise CannotLower("a sink over the rows and a part of a row's dimensions has no code on the GPU")
    if v in body.slabs:
        raise CannotLower("a sink of a stage that is split by columns has no code on the GPU")
    width = 1 if scalar else value.width
    body.sinks.append(SinkCode(instr["sink"], name, how, type_, scalar, width, not value.row))
    identity = f"{how}::identity<{type_}>()"
    if scalar:
        body.setup.append(f"{type_} {name} = {identity};")
    else:
        body.setup.append(f"{type_} {name}[{width // 4}];")
        body.setup.append(f"for (int i = 0; i < {width // 4}; ++i) {name}[i] = {identity};")
    if value.row:
        x = body.row(v)
        body.text("KITSUNE_UNROLL")
        body.text(f"for (int h = 0; h < 2; ++h) if (valid[h]) {name} = {how}::fold({name}, {type_}({x}));")
        return
    body.loop(value.width, [Fold(v, how, name, stream=True, scalar=scalar)])


def _matmul_sink(body: Body, instr: Instr) -> None:
    """A weight gradient: both operands to shared memory, where the lanes of the CTA multiply them together."""
    if (instr["x_contract"], instr["y_contract"], instr["x_batch"], instr["y_batch"]) != ((0,), (0,), (), ()):
        raise CannotLower("a product that contracts the stream and other dimensions has no code on the GPU")
    sink = body.program.sinks[instr["sink"]]
    values = [body.value(v) for v in instr.inputs]
    dtype = values[0].dtype
    if values[1].dtype != dtype or dtype not in pointwise.OPERAND or sink.dtype != "float32":
        raise CannotLower(f"a weight gradient of {dtype} and {values[1].dtype} in {sink.dtype} has no code on the GPU")
    shape = _gradient_shape(body, instr)
    x, y = reversed(instr.inputs) if shape.swapped else instr.inputs
    k, operand = instr["sink"], pointwise.OPERAND[dtype]
    at = 0
    for name, v in (("x", x), ("y", y)):
        width = 8 if body.value(v).row else body.value(v).width
        panel = f"panel{k}{name}"
        body.prologue.append(f"const Panel<{operand}, {width}> {panel}{{panels.mine() + {at}}};")
        if width % 64:
            body.setup.append(f"Panel<{operand}, {width}>{{panels.mine() + {at}}}.clear(lane, 1 + group);")
        if body.value(v).row:
            body.text(f"{panel}.put(lane, 0, {body.row_as_tile(v)}, valid);")
        else:
            body.loop(width, [ToPanel(v, panel)])
        at += panel_bytes(width, tiles.is_half(dtype))
        if name == "x":
            second = at
    widths = [8 if body.value(v).row else body.value(v).width for v in (x, y)]
    type_ = f"Gradient<{operand}, {widths[0]}, {widths[1]}, {shape.blocks}, {shape.all_blocks}, {shape.width}, kLanes>"
    body.setup.append(f"const {type_} gradient{k}{{panels.base, panels.base + {second}, panels.stride, group * {shape.blocks}}};")
    body.setup.append(f"float sum{k}[{shape.blocks}][{shape.width // 2}];")
    body.setup.append(f"for (int m = 0; m < {shape.blocks}; ++m) for (int i = 0; i < {shape.width // 2}; ++i) sum{k}[m][i] = 0.0f;")
    body.text(f"gradient{k}.add(sum{k});")
    body.gradients.append(GradientCode(k, shape, pointwise.ELEMENT[body.program.outputs[sink.array].dtype]))
    body.budget.hold(shape.registers)
    body.panel_bytes = max(body.panel_bytes, at)


def _gradient_shape(body: Body, instr: Instr) -> GradientShape:
    """The accumulators of a weight gradient: of a split stage, those whose slabs the stage's other values agree with."""
    n = [math.prod(body.program.values[v].shape) for v in instr.inputs]
    half = tiles.is_half(body.value(instr.inputs[0]).dtype)
    shapes = gradient_shapes(n[0], n[1], half, body.config.split, body.config.lanes)
    if body.config.split > 1:
        slabs = [v in body.slabs for v in instr.inputs]
        shapes = [s for s in shapes if slabs == [s.swapped, not s.swapped]]
    if not shapes:
        raise CannotLower(f"a weight gradient of {n[0]} x {n[1]} does not fit the registers of {body.config.split} CTAs")
    return shapes[0]


_HANDLERS: dict[str, Callable[[Body, Instr], None]] = {
    "load": _load,
    "pop": _pop,
    "push": _push,
    "store": _store,
    "reshape": _reshape,
    "copy": _copy,
    "row_index": _row_index,
    "matmul": _matmul,
    "matmul_sink": _matmul_sink,
    "sink": _sink,
    **dict.fromkeys(REDUCTIONS, _reduce),
}

"""The tile programs of a call of several phases, as its kernel runs them.

Comes in: a ``Program``. Goes out: a tile program for each part, with the same inputs and outputs. What one part makes and a later
one reads whole was not there when XLA packed the stationary operands. A number is read by every row, from where the earlier part
has put it; rows of a table are gathered from there; anything else has no code. Work on the elements of one array (an optimiser's
update), whose stream runs over all of its dimensions, gets rows of several elements: so a thread has 16 bytes at a time, and a
tile is 64 rows of them instead of 64 elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from kitsune_jax.graph import make_params
from kitsune_jax.ops.local import ROWS
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import ArrayType, Instr, Part, Program, StageProgram, TileProgram, TileType, walk
from kitsune_jax.streams.space import dim_strides
from kitsune_jax.targets.cuda import loop_values
from kitsune_jax.targets.errors import CannotLower

_WIDTHS = (32, 16, 8)  # of a row of several elements


def of_call(call: Program) -> tuple[TileProgram, ...]:
    """The program of every part, with tiles of the GPU's rows. Raises ``CannotLower``."""
    return tuple(_wide(_with_numbers(call, part)) for part in call.parts)


def made_before(call: Program, part: Part) -> frozenset[int]:
    """The inputs of ``part`` that other parts make."""
    return frozenset(k for k, n in enumerate(part.reads) if n >= call.operands)


def _with_numbers(call: Program, part: Part) -> TileProgram:
    """``part`` with every row reading the numbers that earlier parts have made."""
    program, made = part.program, made_before(call, part)
    loads = {i.outputs[0]: i["array"] for s in program.stages for i in walk(s.body) if i.kind == "load"}
    whole = {v: k for v, k in loads.items() if k in made and not program.values[v].tile}
    gathered = {i.inputs[0] for s in program.stages for i in walk(s.body) if i.kind == "gather"}
    shown = loop_values.as_tiles(program)  # of which XLA makes what is stationary
    for stage in shown.stages:
        for i in walk(stage.body):
            stationary = i.outputs and not shown.values[i.outputs[0]].tile and i.kind != "load"
            # Ops of later parts are numbered by the part, so XLA could not tell which one to compute.
            if stationary and (whole.keys() & set(i.inputs) or i.kind != "reshape" and part is not call.parts[0]):
                raise CannotLower("a later phase computes a value that does not stream, which has no code on the GPU")
    if program.order in made:
        raise CannotLower("a stream in an order that an earlier phase makes has no code on the GPU")
    if any(program.inputs[k].shape and v not in gathered for v, k in whole.items()):
        raise CannotLower("a phase reads the whole of an array that an earlier phase makes, which has no code on the GPU")
    numbers = {v: k for v, k in whole.items() if not program.inputs[k].shape}
    if not numbers:
        return program
    inputs, values = list(program.inputs), list(program.values)
    for v, k in numbers.items():
        inputs[k] = ArrayType((), inputs[k].dtype, True, (0,) * len(program.axes))
        values[v] = TileType(True, (), values[v].dtype)
    stages = tuple(StageProgram(s.name, _of_rows(s.body, numbers)) for s in program.stages)
    return dataclasses.replace(program, inputs=tuple(inputs), values=tuple(values), stages=stages)


def _of_rows(body: Sequence[Instr], numbers: dict[int, int]) -> tuple[Instr, ...]:
    """``body``, whose instructions read ``numbers`` of each row now."""
    found = []
    for i in body:
        if i.kind == "broadcast_in_dim" and i.inputs[0] in numbers:
            i = dataclasses.replace(i, params=make_params(**{**dict(i.params), "dims": (0,)}))
        elif i.block is not None:
            i = dataclasses.replace(i, block=dataclasses.replace(i.block, body=_of_rows(i.block.body, numbers)))
        found.append(i)
    return tuple(found)


def _wide(program: TileProgram) -> TileProgram:
    """``program`` with rows of several elements, where it works on elements of arrays one by one; else itself."""
    width = next((w for w in _WIDTHS if program.rows % w == 0), 0)
    if not width or not program.axes or program.order is not None or program.batch_axes or len(program.stages) > 1:
        return program
    if not all(_is_dense(program, a) or _is_number(a) for a in (*program.inputs, *program.outputs)):
        return program
    if not all(_is_elementwise(program, i) for i in program.stages[0].body):
        return program
    rows = program.rows // width
    widened = _Widened(program, width)
    return dataclasses.replace(
        program,
        axes=(rows,),
        inputs=tuple(_rows_of(a, rows, width) for a in program.inputs),
        outputs=tuple(_rows_of(a, rows, width) for a in program.outputs),
        stages=(StageProgram(program.stages[0].name, tuple(widened.body())),),
        values=tuple(widened.values),
    )


def _is_dense(program: TileProgram, array: ArrayType) -> bool:
    """Is an element of the array a row of the stream, in the order in which they lie?"""
    return array.streamed and array.row_strides == dim_strides(program.axes) and math.prod(array.shape) == program.rows


def _is_number(array: ArrayType) -> bool:
    return not array.shape and not any(array.row_strides)


def _is_elementwise(program: TileProgram, instr: Instr) -> bool:
    if any(program.values[v].shape for v in (*instr.inputs, *instr.outputs)):
        return False
    spec = OPS.get(instr.kind)
    return instr.kind in ("load", "store", "sink") or spec is not None and spec.family in ("pointwise", "convert")


def _rows_of(array: ArrayType, rows: int, width: int) -> ArrayType:
    if array.shape:
        return ArrayType((rows, width), array.dtype, True, (width,), (1,))
    return dataclasses.replace(array, row_strides=(0,)) if array.streamed else array


class _Widened:
    """The body of a program that works on elements one by one, on rows of ``width`` elements."""

    def __init__(self, program: TileProgram, width: int):
        self.program, self.width = program, width
        self.values = [TileType(True, (width,), t.dtype) if t.tile else t for t in program.values]

    def body(self) -> list[Instr]:
        found: list[Instr] = []
        for i in self.program.stages[0].body:
            if i.kind == "load" and self.program.values[i.outputs[0]].tile and not self.program.inputs[i["array"]].shape:
                found += self._number(i)
            elif i.kind == "sink":
                found.append(dataclasses.replace(i, params=make_params(**{**dict(i.params), "axes": (0, 1)})))
            else:
                found.append(i)
        return found

    def _number(self, load: Instr) -> list[Instr]:
        """A number that every row reads, for each element of the row."""
        (v,) = load.outputs
        self.values.append(TileType(True, (), self.program.values[v].dtype))
        one = len(self.values) - 1
        spread = Instr("broadcast_in_dim", (one,), (v,), make_params(dims=(0,), shape=(ROWS, self.width)))
        return [dataclasses.replace(load, outputs=(one,)), spread]

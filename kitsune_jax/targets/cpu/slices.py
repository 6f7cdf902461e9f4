"""Parts of arrays and of tiles that move with the numbers of loops.

Comes in: a ``load_slice``, ``store_slice``, ``cut`` or ``paste`` of a stage. Goes out: where its part lies. No instruction is spent
on that: the operands of whoever reads or writes the part move with the loops.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Protocol

from kitsune_jax.program.ir import Instr, TileProgram
from kitsune_jax.targets.cpu.borders import Border
from kitsune_jax.targets.cpu.bytecode import Ref
from kitsune_jax.targets.cpu.views import View


class Numbered(Protocol):
    """What is asked of a stage."""

    @property
    def program(self) -> TileProgram: ...
    @property
    def depth(self) -> int: ...
    def input(self, number: int) -> Border: ...
    def output(self, number: int) -> Border: ...
    def view(self, v: int) -> View: ...
    def number(self, v: int) -> tuple[int | None, int]: ...


def border_of(stage: Numbered, instr: Instr) -> Border:
    """What a ``load_slice`` or a ``store_slice`` names: a part of an array."""
    loads = instr.kind == "load_slice"
    array = (stage.program.inputs if loads else stage.program.outputs)[instr["array"]]
    whole = stage.input(instr["array"]) if loads else stage.output(instr["array"])
    shape, dims = list(whole.shape), [array.kept.index(d) for d in instr["dims"]]
    for k, size in zip(dims, instr["sizes"], strict=True):
        shape[k] = size
    numbers = instr.inputs if loads else instr.inputs[1:]
    offset, moves = moves_of(stage, numbers, instr["steps"], [whole.strides[k] for k in dims])
    view = (
        None
        if whole.view is None
        else View(_moved(whole.view.ref, offset, moves), whole.view.row_stride, tuple(shape), whole.strides)
    )
    return Border(_moved(whole.ref, offset, moves), whole.axis_strides, tuple(shape), whole.strides, view)


def moves_of(stage: Numbered, numbers: Sequence[int], steps: Sequence[int], strides: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """How far ``numbers`` move an operand: by elements, and by a stride for each enclosing loop, the outermost first."""
    offset, moves = 0, [0] * stage.depth
    for v, step, stride in zip(numbers, steps, strides, strict=True):
        loop, constant = stage.number(v)
        if loop is not None:
            moves[loop - 1] += step * stride
        else:
            offset += constant * step * stride
    return offset, tuple(moves) if any(moves) else ()


def part(stage: Numbered, instr: Instr) -> View:
    """What a ``cut`` reads and a ``paste`` writes: a part of its first operand."""
    whole = stage.view(instr.inputs[0])
    offset, moves = moves_of(stage, instr.inputs[-1:], (1,), whole.strides[:1])
    return View(_moved(whole.ref, offset, moves), whole.row_stride, whole.shape[1:], whole.strides[1:])


def _moved(ref: Ref, offset: int, moves: Sequence[int]) -> Ref:
    """``ref``, ``offset`` elements further on, which also moves by ``moves`` with the numbers of the loops around it."""
    strides = tuple(a + b for a, b in itertools.zip_longest(ref.loop_strides, moves, fillvalue=0))
    return dataclasses.replace(ref, offset=ref.offset + offset, loop_strides=strides if any(strides) else ())

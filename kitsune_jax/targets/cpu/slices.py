"""Parts of arrays and of tiles that move with the numbers of loops.

Comes in: a ``load_slice``, ``store_slice``, ``cut`` or ``paste`` of a stage. Goes out: where its part lies. No instruction is spent
on that: the operands of whoever reads or writes the part move with the loops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
    shape, offset, moves = list(whole.shape), 0, dict[int, int]()
    numbers = instr.inputs if loads else instr.inputs[1:]
    for v, d, step, size in zip(numbers, instr["dims"], instr["steps"], instr["sizes"], strict=True):
        k = array.dims.index(d) if array.row_strides else d
        shape[k] = size
        loop, constant = stage.number(v)
        if loop is not None:
            moves[loop] = moves.get(loop, 0) + step * whole.strides[k]
        else:
            offset += constant * step * whole.strides[k]
    view = (
        None
        if whole.view is None
        else View(_moved(whole.view.ref, offset, moves), whole.view.row_stride, tuple(shape), whole.strides)
    )
    return Border(_moved(whole.ref, offset, moves), whole.axis_strides, tuple(shape), whole.strides, view)


def part(stage: Numbered, instr: Instr) -> View:
    """What a ``cut`` reads and a ``paste`` writes: a part of its first operand."""
    whole = stage.view(instr.inputs[0])
    loop, _ = stage.number(instr.inputs[-1])
    assert loop is not None
    return View(_moved(whole.ref, 0, {loop: whole.strides[0]}), whole.row_stride, whole.shape[1:], whole.strides[1:])


def _moved(ref: Ref, offset: int, moves: Mapping[int, int]) -> Ref:
    """``ref``, ``offset`` elements further on, which also moves by ``moves[n]`` elements with the number of the loop at depth n."""
    old = dict(enumerate(ref.loop_strides, 1))
    deepest = max((*moves, *old), default=0)
    strides = tuple(moves.get(n, 0) + old.get(n, 0) for n in range(1, 1 + deepest))
    return dataclasses.replace(ref, offset=ref.offset + offset, loop_strides=strides if any(strides) else ())

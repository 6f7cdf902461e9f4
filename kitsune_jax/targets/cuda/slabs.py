"""Which values of a stage are slabs: their columns shared out over the CTAs of the stage.

Comes in: the stage's instructions and in how many slabs it is split. Goes out: the set of values. The results of its matmuls are
slabs, and so is whatever meets one in a pointwise operator; a matmul's operand never is, because it contracts all columns. Of a
weight gradient one operand is: the one whose columns become the columns of the accumulators.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kitsune_jax.program.ir import Instr, TileProgram
from kitsune_jax.targets.cuda.tiles import BLOCK_COLUMNS, gradient_shapes, is_half
from kitsune_jax.targets.errors import CannotLower


def of_stage(instrs: Sequence[Instr], program: TileProgram, split: int, lanes: int) -> frozenset[int]:
    """Values that are slabs. Raises ``CannotLower`` where the stage cannot be split so."""
    if split == 1:
        return frozenset()

    found = {v for i in instrs if i.kind == "matmul" for v in i.outputs}
    for v in found:
        columns = _columns(program, v)
        if columns % (split * BLOCK_COLUMNS):
            raise CannotLower(f"{columns} columns are not {split} slabs of whole blocks of {BLOCK_COLUMNS}")
    _spread(instrs, program, found)
    for i in instrs:
        if i.kind == "matmul_sink":
            found = _of_gradient(i, instrs, program, split, lanes, found)
    if any(i.kind == "matmul" and i.inputs[0] in found for i in instrs):
        raise CannotLower("a matmul reads columns that are split over CTAs")
    return frozenset(found)


def _of_gradient(
    gradient: Instr, instrs: Sequence[Instr], program: TileProgram, split: int, lanes: int, found: set[int]
) -> set[int]:
    """``found`` with the operand of ``gradient`` whose columns are shared out: the better one whose slabs leave the other whole."""
    first, second = gradient.inputs
    half = is_half(program.values[first].dtype)
    for shape in gradient_shapes(_columns(program, first), _columns(program, second), half, split, lanes):
        rows, columns = (second, first) if shape.swapped else (first, second)
        slabs = {*found, columns}
        _spread(instrs, program, slabs)
        if rows not in slabs:
            return slabs
    raise CannotLower(f"a weight gradient does not fit the registers of {split} CTAs")


def _columns(program: TileProgram, v: int) -> int:
    return math.prod(program.values[v].shape)


def _spread(instrs: Sequence[Instr], program: TileProgram, found: set[int]) -> None:
    """Adds what meets a slab in a pointwise operator."""
    changed = True
    while changed:
        changed = False
        for i in instrs:
            if i.kind in ("matmul", "matmul_sink", "load", "pop", "push", "store", "sink") or not i.outputs:
                continue
            here = [v for v in (*i.inputs, *i.outputs) if program.values[v].tile and _columns(program, v) != 1]
            if any(v in found for v in here) and not all(v in found for v in here):
                found.update(here)
                changed = True

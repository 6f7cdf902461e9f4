"""Which values of a stage are slabs: their columns shared out over the CTAs of the stage.

Comes in: the stage's instructions and in how many slabs it is split. Goes out: the set of values. The results of its matmuls are
slabs, and so is whatever meets one in a pointwise operator; a matmul's operand never is, because it contracts all columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kitsune_jax.program.ir import Instr, TileProgram
from kitsune_jax.targets.errors import CannotLower

_ALIGNMENT = 32  # columns of a block: slabs are whole blocks


def of_stage(instrs: Sequence[Instr], program: TileProgram, split: int) -> frozenset[int]:
    """Values that are slabs. Raises ``CannotLower`` where the stage cannot be split so."""
    if split == 1:
        return frozenset()

    def wide(v: int) -> bool:
        return program.values[v].tile and math.prod(program.values[v].shape) != 1

    found = {v for i in instrs if i.kind == "matmul" for v in i.outputs}
    for v in found:
        columns = math.prod(program.values[v].shape)
        if columns % (split * _ALIGNMENT):
            raise CannotLower(f"{columns} columns are not {split} slabs of whole blocks of {_ALIGNMENT}")
    changed = True
    while changed:
        changed = False
        for i in instrs:
            if i.kind in ("matmul", "load", "pop", "push", "store", "sink") or not i.outputs:
                continue
            here = [v for v in (*i.inputs, *i.outputs) if wide(v)]
            if any(v in found for v in here) and not all(v in found for v in here):
                found.update(here)
                changed = True
    for i in instrs:
        if i.kind == "matmul" and i.inputs[0] in found:
            raise CannotLower("a matmul reads columns that are split over CTAs")
    return frozenset(found)

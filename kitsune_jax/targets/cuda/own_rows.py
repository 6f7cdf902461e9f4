"""Loops over numbers: programs in which a thread has rows of its own.

Comes in: a tile program. Goes out: whether all that its stage computes of a row are single numbers. In the layout of a tile four
threads share a row, because its columns are theirs; a number of the row is then computed four times. Where there are no columns, a
lane takes a tile of 256 rows, two for each thread.
"""

from __future__ import annotations

import math

from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr, TileProgram, walk

ROWS = 256  # of a lane's tile (``kOwnRows`` in layout.h)
_KINDS = frozenset({"load", "load_slice", "store", "store_slice", "row_index", "loop", "sink", "reshape", "broadcast_in_dim"})


def are(program: TileProgram) -> bool:
    """Does a thread of the kernel of ``program`` have rows of its own?"""
    if len(program.stages) != 1 or program.queues or program.batch_axes:
        return False
    body = list(walk(program.stages[0].body))
    return any(i.kind == "loop" for i in body) and all(_of_numbers(program, i) for i in body)


def _of_numbers(program: TileProgram, instr: Instr) -> bool:
    carried = (*instr.block.carries, *instr.block.results) if instr.block is not None else ()
    values = [program.values[v] for v in (*instr.inputs, *instr.outputs, *carried)]
    if any(math.prod(t.shape) != 1 for t in values):
        return False
    spec = OPS.get(instr.kind)
    return instr.kind in _KINDS or (spec is not None and spec.family in ("pointwise", "convert"))

"""Which 16-bit values of a stage are rounded by the operation that makes them, although their group computes in float32.

Comes in: the ``Flow`` of a stage, and where XLA rounds (``ops.rounding``). Goes out: the roots of those values. Values that are
compared with others, or of which a maximum leaves the program, are rounded in any case (``program.passes.compared_values`` says
why), and conversions to a wider float do not keep their digits.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.ops.rounding import EVERYWHERE, Rounding
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import TileProgram
from kitsune_jax.program.passes import Flow, compared_values


@dataclasses.dataclass(frozen=True, slots=True)
class Rounded:
    """``values``: the roots that are rounded; ``everywhere``: those of them whose digits no conversion keeps."""

    values: frozenset[int]
    everywhere: frozenset[int]


def rounded_values(program: TileProgram, flow: Flow, rounding: Rounding) -> Rounded:
    """Roots of the values whose pointwise operation rounds its result to its 16-bit dtype."""
    found: set[int] = set()
    everywhere: set[int] = set()
    compared: frozenset[int] | None = None  # asked for only where a program has 16-bit values
    for instr in flow.body:
        if instr.kind not in OPS or OPS[instr.kind].family != "pointwise":
            continue
        literals = tuple(flow.literal(v) for v in instr.inputs)
        for v in instr.outputs:
            dtype = flow.type(v).dtype
            if not EVERYWHERE.rounds(instr.kind, dtype, literals):
                continue
            compared = compared_values(program) if compared is None else compared
            if v in compared:
                everywhere.add(v)
            if v in compared or rounding.rounds(instr.kind, dtype, literals):
                found.add(v)
    return Rounded(frozenset(found), frozenset(everywhere))

"""How the dimensions of an op's operands and result travel together: what the streams pass reads from the op table.

Operands are numbered inputs first, then outputs. Every dimension of every operand stands in exactly one relation of its op.
"""

from __future__ import annotations

import dataclasses

OperandDim = tuple[int, int]  # (operand number, dimension)


@dataclasses.dataclass(frozen=True, slots=True)
class DimRelation:
    """One class of dimensions of one op.

    role:
      * ``"parallel"``: index i of one member meets index i of the others only (pointwise dimensions, batch and free dimensions of a
        dot, untouched dimensions of a reduction ...). All members have one size. A member may be alone (a weight's free dimension).
      * ``"contracted"``: reduced away; a sink if it is streamed. Members are inputs.
      * ``"reshaped"``: input dimensions ``members`` with operand 0 flatten, in order, to the same index as the output members.
      * ``"created"``: a dimension of the output that no input has, along which the op can make any slice on its own, given the
        index (iota) or not even that (broadcast).
      * ``"mixed"``: every output element may need every index (cumulative axis, sort axis, concatenated, sliced, padded, reversed
        axis, contracted dimension of a softmax-like op). It cannot be streamed; ``why`` says so in words for the report.
    """

    role: str
    members: tuple[OperandDim, ...]
    why: str = ""

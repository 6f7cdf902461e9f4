"""Which 16-bit values of a stage are rounded by every operation, although their group computes in float32.

Comes in: the ``Flow`` of a stage. Goes out: the roots of those values. A maximum's gradient goes to the rows that equal it
(``eq(x, max(x))``), and what equals nothing is divided by a count of 0. Maximum and comparison may be in different programs, which
make ``x`` again in groups of their own, or in XLA: ``x`` has the same bits everywhere only if it is rounded as its jaxpr says.
So it is on its way to a comparison for equality and to a maximum or minimum that leaves the stage. Anything else keeps float32.
"""

from __future__ import annotations

from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr, TileProgram
from kitsune_jax.program.passes import Flow
from kitsune_jax.targets.cpu.vectors import NARROW

_EQUAL = ("eq", "ne")
_EXTREMES = ("reduce_max", "reduce_min")
_LEAVES = ("store", "store_slice", "push")
_HANDS_ON = frozenset({"select_n", "neg", "abs", "max", "min", "convert_element_type"})  # an operand as it is, or rounded already


def rounded_values(program: TileProgram, flow: Flow) -> frozenset[int]:
    """Roots of the values whose pointwise operation rounds its result to its 16-bit dtype."""
    pending = [v for instr in flow.body for v in _compared(program, flow, instr)]
    seen = set[int]()
    while pending:
        v = flow.root(pending.pop())
        maker = flow.makers.get(v)
        if v in seen or maker is None or maker.kind not in OPS or OPS[maker.kind].family not in ("pointwise", "convert"):
            continue
        seen.add(v)
        pending.extend(maker.inputs)
    return frozenset(v for v in seen if flow.type(v).dtype in NARROW and flow.makers[v].kind not in _HANDS_ON)


def _compared(program: TileProgram, flow: Flow, instr: Instr) -> tuple[int, ...]:
    """Operands of ``instr`` that have to be exact."""
    if instr.kind in _EQUAL:
        return instr.inputs
    if instr.kind in ("sink", "sink_at") and program.sinks[instr["sink"]].how in ("max", "min"):
        return instr.inputs[:1]
    if instr.kind in _EXTREMES:
        uses = flow.uses.get(flow.root(instr.outputs[0]), ())
        return instr.inputs if any(flow.instruction(i).kind in _LEAVES for i, _ in uses) else ()
    return ()

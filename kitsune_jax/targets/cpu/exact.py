"""Which 16-bit values of a stage are rounded by every operation, although their group computes in float32.

Comes in: the ``Flow`` of a stage. Goes out: the roots of those values: what is compared with other values, and what a maximum that
leaves the program is taken of (``program.passes.compared_values`` says why). Anything else keeps float32.
"""

from __future__ import annotations

from kitsune_jax.ops.comparisons import HAND_ON
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import TileProgram
from kitsune_jax.program.passes import Flow, compared_values
from kitsune_jax.targets.cpu.vectors import NARROW

_AS_IT_IS = HAND_ON | {"convert_element_type"}  # rounded already


def rounded_values(program: TileProgram, flow: Flow) -> frozenset[int]:
    """Roots of the values whose pointwise operation rounds its result to its 16-bit dtype."""
    compared = (flow.makers.get(v) for v in compared_values(program))
    makers = (i for i in compared if i is not None and i.kind in OPS and OPS[i.kind].family == "pointwise")
    return frozenset(v for i in makers if i.kind not in _AS_IT_IS for v in i.outputs if flow.type(v).dtype in NARROW)

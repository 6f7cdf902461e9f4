"""The instructions of a stage, or of a loop in it, one after the other; those of equal layers as a loop over the layers."""

from __future__ import annotations

from collections.abc import Sequence

from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import counted_loops, equal_layers, instructions, layer_loops
from kitsune_jax.targets.cuda.evaluation import Evaluation


def lower(at: Evaluation, instrs: Sequence[Instr]) -> None:
    """Lowers ``instrs``. Raises ``CannotLower``."""
    around, at.instrs = at.instrs, tuple(instrs)
    runs = {run.segments[0][0]: run for run in equal_layers.find(at.program, instrs)}
    in_loops = {i for run in runs.values() for segment in run.segments for i in segment}
    for i in instrs:
        if i in runs:
            layer_loops.lower(at, runs[i])
        elif i in in_loops or i in at.done:
            continue
        elif i.kind == "loop":
            counted_loops.lower(at, i, lower)
        else:
            instructions.lower(at, i)
    at.instrs = around

"""The instructions of a stage, or of a loop in it, one after the other; those of equal layers as a loop over the layers."""

from __future__ import annotations

from collections.abc import Sequence

from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import counted_loops, equal_layers, instructions, layer_loops
from kitsune_jax.targets.cuda.evaluation import Evaluation
from kitsune_jax.targets.cuda.stage_facts import is_rounding


def _rounded_first(at: Evaluation, instrs: Sequence[Instr]) -> tuple[Instr, ...]:
    """``instrs`` with what rounds a value right behind what makes the value: a loop that folds it then keeps the 16-bit form."""
    makers = {v for i in instrs for v in i.outputs}
    moved: dict[int, list[Instr]] = {}
    for i in instrs:
        if is_rounding(at.program, i) and i.inputs[0] in makers:
            moved.setdefault(i.inputs[0], []).append(i)
    found: list[Instr] = []
    for i in instrs:
        if not (is_rounding(at.program, i) and i.inputs[0] in moved):
            found += [i, *(c for v in i.outputs for c in moved.get(v, ()))]
    return tuple(found)


def lower(at: Evaluation, instrs: Sequence[Instr]) -> None:
    """Lowers ``instrs``. Raises ``CannotLower``."""
    instrs = _rounded_first(at, instrs)
    around, at.instrs = at.instrs, instrs
    found = [] if at.facts.cuts.makers else equal_layers.find(at.program, instrs)
    runs = {run.segments[0][0]: run for run in found}
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

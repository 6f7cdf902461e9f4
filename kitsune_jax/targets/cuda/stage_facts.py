"""What is known of a stage before it is lowered: other names of values, how often each is read, what need not be made at all.

Comes in: a stage of a tile program. Goes out: ``Facts``.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

from kitsune_jax.program.ir import Instr, TileProgram
from kitsune_jax.program.passes.flow import is_other_name
from kitsune_jax.targets.cuda import slabs, tiles


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """``names``: what is only another name of a value -> that value. ``uses``: instructions that read each value. ``joined``: a
    concatenation that only matmuls read, or other such concatenations, -> its parts: nothing need move. ``panel_sums``: (weight
    gradient, its operand, sum over the rows that is made of the operand's panel). ``slabs``: values that are shared out over CTAs.
    """

    program: TileProgram
    instrs: tuple[Instr, ...]
    names: dict[int, int]
    uses: Counter[int]
    joined: dict[int, tuple[int, ...]]
    panel_sums: tuple[tuple[Instr, int, Instr], ...]
    slabs: frozenset[int]


def of_stage(program: TileProgram, stage: int, split: int, lanes: int) -> Facts:
    """Raises ``CannotLower`` where the stage cannot be split as asked."""
    instrs = program.stages[stage].body
    names: dict[int, int] = {}
    uses: Counter[int] = Counter()
    for i in instrs:
        if (i.kind == "reshape" or is_other_name(program.values, i)) and program.values[i.outputs[0]].tile:
            names[i.outputs[0]] = names.get(i.inputs[0], i.inputs[0])
        else:
            uses.update(names.get(x, x) for x in i.inputs)
    sums = tuple(_panel_sums(program, instrs, names))
    for _, v, _ in sums:  # they do not read the value where it lies
        uses[names.get(v, v)] -= 1
    return Facts(program, instrs, names, uses, _joined(program, instrs), sums, slabs.of_stage(instrs, program, split, lanes))


def _panel_sums(program: TileProgram, instrs: tuple[Instr, ...], names: dict[int, int]) -> list[tuple[Instr, int, Instr]]:
    """Of 16-bit values of several columns; each with the first gradient that has the value for an operand."""
    found, known = [], set[int]()
    for gradient in (i for i in instrs if i.kind == "matmul_sink"):
        roots = [names.get(v, v) for v in gradient.inputs]
        for v, root in zip(gradient.inputs, roots, strict=True):
            t = program.values[v]
            if root not in known and gradient.inputs.count(v) == 1 and tiles.is_half(t.dtype) and math.prod(t.shape) != 1:
                mine = [i for i in instrs if i.kind == "sink" and names.get(i.inputs[0], i.inputs[0]) == root]
                found += [(gradient, v, i) for i in mine if tuple(i["axes"]) == (0,) and _is_sum(program, i, t.dtype)]
            known.add(root)
    return found


def _is_sum(program: TileProgram, instr: Instr, dtype: str) -> bool:
    sink = program.sinks[instr["sink"]]
    return sink.how == "sum" and sink.dtype in ("float32", dtype)


def _joined(program: TileProgram, instrs: tuple[Instr, ...]) -> dict[int, tuple[int, ...]]:
    readers: dict[int, list[Instr]] = {}
    for i in instrs:
        for x in i.inputs:
            readers.setdefault(x, []).append(i)
    found: dict[int, tuple[int, ...]] = {}
    for i in reversed(instrs):
        if i.kind != "concatenate" or len(program.values[i.outputs[0]].shape) != 1 or i["dimension"] != 1:
            continue
        (v,) = i.outputs
        if all(r.kind == "matmul" or (r.kind == "concatenate" and r.outputs[0] in found) for r in readers.get(v, ())):
            found[v] = i.inputs
    return found

"""Copies, what is computed twice, and what nobody reads: gone.

Users write ``x - x.mean()`` twice, as layer norms do. A value that an earlier instruction of the same body, or of one around it,
has computed is read there; so is one that only has another name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kitsune_jax.program.ir import EFFECTS, Instr, TileProgram, walk
from kitsune_jax.program.passes.flow import is_other_name


def simplified(program: TileProgram) -> TileProgram:
    """``program`` without copies, common subexpressions and dead code."""
    once: dict[object, int] = {}
    literals = {v: once.setdefault((program.values[v].dtype, repr(c)), v) for v, c in program.literals}
    stages = []
    for stage in program.stages:
        body, _ = _Names(program, dict(literals)).body(stage.body, {})
        stages.append(dataclasses.replace(stage, body=live(body)))
    return dataclasses.replace(program, stages=tuple(stages))


class _Names:
    """``names``: value -> the earlier one that it equals. ``roots``: what a value is another name of, in another shape maybe."""

    def __init__(self, program: TileProgram, names: dict[int, int]):
        self.program, self.names, self.roots = program, names, dict[int, int]()

    def body(self, body: Sequence[Instr], known: dict[object, int]) -> tuple[tuple[Instr, ...], dict[object, int]]:
        """``known``: what has been computed already where ``body`` stands -> its value."""
        out = []
        for instr in body:
            instr = dataclasses.replace(instr, inputs=tuple(self.names.get(v, v) for v in instr.inputs))
            if instr.block is not None:
                inside, _ = self.body(instr.block.body, dict(known))
                results = tuple(self.names.get(v, v) for v in instr.block.results)
                instr = dataclasses.replace(instr, block=dataclasses.replace(instr.block, body=inside, results=results))
            elif len(instr.outputs) == 1 and instr.kind not in EFFECTS:
                (made,) = instr.outputs
                same = self._before(instr, made, known)
                if same != made:
                    self.names[made] = same
                    continue
            out.append(instr)
        return tuple(out), known

    def _before(self, instr: Instr, made: int, known: dict[object, int]) -> int:
        """The value that ``made`` equals: an earlier one, or itself."""
        t = self.program.values[made]
        key: object = (instr.kind, instr.inputs, instr.params, t)
        if is_other_name(self.program.values, instr):
            root = self.roots[made] = self.roots.get(instr.inputs[0], instr.inputs[0])
            if self.program.values[root] == t:
                return root
            key = (root, t)
        return known.setdefault(key, made)


def live(body: Sequence[Instr], results: Sequence[int] = ()) -> tuple[Instr, ...]:
    """The instructions of ``body`` that have an effect, or make something that those or ``results`` need."""
    wanted, kept = set(results), []
    for instr in reversed(body):
        effect = any(i.kind in EFFECTS for i in walk((instr,)))
        if not effect and wanted.isdisjoint(instr.outputs):
            continue
        wanted.update(instr.inputs)
        if instr.block is not None:
            inside = live(instr.block.body, instr.block.results)
            instr = dataclasses.replace(instr, block=dataclasses.replace(instr.block, body=inside))
            wanted.update(instr.block.results if instr.block else ())
            wanted.update(v for i in walk(inside) for v in (*i.inputs, *(i.block.results if i.block else ())))
        kept.append(instr)
    return tuple(reversed(kept))

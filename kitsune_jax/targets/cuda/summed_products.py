"""Sums of two products become one product: ``x @ a + h @ b`` of a recurrent cell is ``[x h] @ [a; b]``.

Comes in: a tile program. Goes out: one that computes the same with one set of accumulators for such a sum. The operands lie
together nowhere (a concatenation that only products read costs nothing), and XLA puts the weights together where it packs them. The
operand that comes from an array goes first: what a step waits for, columns of other CTAs, may arrive under its part of the product.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from kitsune_jax.graph import make_params
from kitsune_jax.program.ir import Instr, TileProgram, TileType, walk
from kitsune_jax.program.passes import compared_values
from kitsune_jax.targets.cuda import cuts

_SAME = ("x_contract", "w_contract", "x_batch", "w_batch", "out_perm", "accumulate")


def as_one(program: TileProgram) -> TileProgram:
    return _Joining(program).done()


class _Joining:
    def __init__(self, program: TileProgram):
        self.program, self.values = program, list(program.values)
        body = [i for s in program.stages for i in walk(s.body)]
        self.uses = Counter(v for i in body for v in (*i.inputs, *(i.block.results if i.block else ())))
        self.makers = {v: i for i in body for v in i.outputs}
        self.kept = compared_values(program) | cuts.find(program).makers.keys()

    def done(self) -> TileProgram:
        stages = tuple(dataclasses.replace(s, body=self._body(s.body)) for s in self.program.stages)
        return dataclasses.replace(self.program, stages=stages, values=tuple(self.values))

    def _body(self, body: Sequence[Instr]) -> tuple[Instr, ...]:
        here = {v: i for i in body for v in i.outputs}
        found: list[Instr] = []
        gone: set[Instr] = set()
        for i in body:
            pair = [here[v] for v in i.inputs if v in here] if i.kind == "add" else []
            if len(pair) == 2 and self._one(i, *pair):
                gone.update(pair)
                found += self._together(i, *sorted(pair, key=self._waits))
            elif i.block is not None:
                found.append(dataclasses.replace(i, block=dataclasses.replace(i.block, body=self._body(i.block.body))))
            else:
                found.append(i)
        return tuple(i for i in found if i not in gone)

    def _one(self, add: Instr, a: Instr, b: Instr) -> bool:
        """Are both products of whole rows with whole matrices, which nobody else reads?"""
        if a is b or not a.kind == b.kind == "matmul" or any(a.get(name) != b.get(name) for name in _SAME):
            return False
        x, w, y, u = (self.values[v] for i in (a, b) for v in i.inputs)
        plain = tuple(a["x_contract"]) == (1,) and tuple(a["w_contract"]) == (0,) and len(w.shape) == len(u.shape) == 2
        alike = x.dtype == y.dtype == w.dtype == u.dtype and w.shape[1] == u.shape[1] and len(x.shape) == len(y.shape) == 1
        dtypes = {self.values[i.outputs[0]].dtype for i in (add, a, b)}
        read = any(self.uses[i.outputs[0]] != 1 for i in (a, b))
        compared = not self.kept.isdisjoint((*add.outputs, *add.inputs, a.inputs[1], b.inputs[1]))
        return plain and alike and len(dtypes) == 1 and not read and not compared

    def _waits(self, product: Instr) -> bool:
        """Does the product read what a step makes or carries?"""
        maker = self.makers.get(product.inputs[0])
        while maker is not None and maker.kind == "reshape":
            maker = self.makers.get(maker.inputs[0])
        return maker is None or maker.kind not in ("load", "load_slice")

    def _together(self, add: Instr, a: Instr, b: Instr) -> list[Instr]:
        x, y = (self.values[i.inputs[0]] for i in (a, b))
        w, u = (self.values[i.inputs[1]] for i in (a, b))
        rows = self._new(TileType(True, (x.shape[0] + y.shape[0],), x.dtype))
        weights = self._new(TileType(False, (w.shape[0] + u.shape[0], w.shape[1]), w.dtype))
        return [
            Instr("concatenate", (a.inputs[0], b.inputs[0]), (rows,), make_params(dimension=1)),
            Instr("concatenate", (a.inputs[1], b.inputs[1]), (weights,), make_params(dimension=0)),
            dataclasses.replace(a, inputs=(rows, weights), outputs=add.outputs),
        ]

    def _new(self, t: TileType) -> int:
        self.values.append(t)
        return len(self.values) - 1

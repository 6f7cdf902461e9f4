"""One iteration of a loop over blocks: instructions over the whole dimension, written again for one block.

Comes in: values over the whole dimension, when somebody asks for them. Goes out: the values of the block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kitsune_jax.graph import make_params
from kitsune_jax.ops.spec import is_float, is_narrow
from kitsune_jax.program.blocks.dims import ARGS, array_dim, sink_dim
from kitsune_jax.program.blocks.emit import Writer, rows_first
from kitsune_jax.program.ir import Instr, TileProgram, TileType

_SIZES = {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes"}


class Iteration:
    """The block of ``size`` elements from element ``number * step`` on. ``facts``: conditions that are the same for all of them.
    ``values``: those of the block that are there already."""

    def __init__(
        self,
        writer: Writer,
        program: TileProgram,
        makers: dict[int, Instr],
        inner: dict[int, int],
        number: int,
        step: int,
        size: int,
        facts: Mapping[int, bool],
    ):
        self.writer, self.program, self.makers, self.inner = writer, program, makers, inner
        self.number, self.step, self.size = number, step, size
        self.facts = facts
        self.values: dict[int, int] = {}

    def value(self, v: int) -> int:
        work = [v]  # not by recursion: a chain may be longer than Python's stack
        while work:
            x = work[-1]
            if x in self.values or x not in self.inner:
                work.pop()
                continue
            same = self._same(self.makers[x])
            operands = () if x in self.facts else self.makers[x].inputs if same is None else (same,)
            missing = [o for o in operands if o in self.inner and o not in self.values]
            work += reversed(missing)
            if not missing:
                self.values[x] = self._written(x, self.makers[x]) if same is None else self.values.get(same, same)
        return self.values.get(v, v)

    def _same(self, instr: Instr) -> int | None:
        """The operand that the result of ``instr`` equals, by what is known of its conditions."""
        if instr.kind == "select_n" and instr.inputs[0] in self.facts:
            return instr.inputs[1 + self.facts[instr.inputs[0]]]
        if instr.kind in ("and", "or"):
            a, b = instr.inputs
            return next((x for x, c in ((a, b), (b, a)) if self.facts.get(c) is (instr.kind == "and")), None)
        return None

    def type(self, v: int) -> TileType:
        t = self.writer.types[v]
        first = int(t.tile)
        shape = tuple(self.size if d + first == self.inner[v] else n for d, n in enumerate(t.shape))
        return TileType(t.tile, shape, t.dtype)

    def _written(self, v: int, instr: Instr) -> int:
        w, t, params = self.writer, self.type(v), dict(instr.params)
        if v in self.facts:
            return w.filled(self.facts[v], t)
        if instr.kind == "load":
            array = self.program.inputs[instr["array"]]
            dims = (array_dim(array, t.tile, self.inner[v]),)
            cut = {"dims": dims, "steps": (self.step,), "sizes": (self.size,)}
            w.about = instr.op
            return w.add("load_slice", (self.number,), t, array=instr["array"], **cut)
        if instr.kind in _SIZES:
            params[_SIZES[instr.kind]] = rows_first(t)
        if instr.kind == "iota" and instr["dimension"] == self.inner[v]:  # counted in int32: others round it, or wrap, once
            counted = dataclasses.replace(t, dtype="int32")
            first = self.number
            if self.step != 1:
                first = w.add("mul", (first, w.literal(self.step, "int32")), TileType(False, (), "int32"))
            made = w.add("add", (w.add("iota", (), counted, **params), first), counted)
            return made if t.dtype == "int32" else w.convert(made, t.dtype)
        inputs = [self.value(x) for x in instr.inputs]
        w.about = instr.op
        return w.add(instr.kind, inputs, t, **params)

    def reduced(self, kind: str, x: int, dim: int, dtype: str) -> int:
        t = self.writer.types[x]
        kept = tuple(n for d, n in enumerate(t.rows_first) if d != dim)
        return self.writer.add(kind, (x,), TileType(True, kept[1:], dtype), axes=(dim,))

    def fold(self, instr: Instr, operand: int, t: TileType) -> int:
        """``instr`` of ``operand`` and its other operands, in the dtype of ``t``."""
        w = self.writer
        x = self.value(operand)
        if instr.kind == "reduce_sum" and is_narrow(w.types[x].dtype):
            x = w.convert(x, t.dtype)
        inputs = (x, *(self.value(v) for v in instr.inputs[1:]))
        w.about = instr.op
        return w.add(instr.kind, inputs, t, **dict(instr.params))

    def extreme(self, instr: Instr, best: int, index: int) -> tuple[int, int]:
        """The extreme element so far and its index, with those of the block: of equal ones the first, and the first NaN of all."""
        w, x = self.writer, self.value(instr.inputs[0])
        how, beyond = ARGS[instr.kind]
        t, counted = w.types[best], w.types[index]
        here = self.reduced(f"reduce_{how}", x, instr["axis"], t.dtype)
        w.about = instr.op
        at = w.add(instr.kind, (x,), counted, axis=instr["axis"])
        first = self.number
        if self.step != 1:
            first = w.add("mul", (first, w.literal(self.step, "int32")), TileType(False, (), "int32"))
        at = w.op("add", at, first)
        better = w.op(beyond, here, best, dtype="bool")
        if is_float(t.dtype):
            nan = w.op("and", w.op("ne", here, here, dtype="bool"), w.op("eq", best, best, dtype="bool"))
            better = w.op("or", better, nan)
        return w.op("select_n", better, best, here), w.op("select_n", better, index, at)

    def sink(self, instr: Instr) -> None:
        """What ``instr`` folds of the block, into the block's part of its sink where that has the dimension."""
        inputs, params = [self.value(v) for v in instr.inputs], dict(instr.params)
        if (d := sink_dim(self.writer.types, instr, self.inner)) is not None:
            inputs.append(self.number)
            params.update(dims=(d,), steps=(self.step,), sizes=(self.size,))
        self.writer.body.append(Instr(instr.kind, tuple(inputs), (), make_params(**params), instr.op))

    def store(self, instr: Instr) -> None:
        (x,) = instr.inputs
        array = self.program.outputs[instr["array"]]
        dims = (array_dim(array, self.writer.types[x].tile, self.inner[x]),)
        params = make_params(array=instr["array"], dims=dims, steps=(self.step,), sizes=(self.size,))
        self.writer.body.append(Instr("store_slice", (self.value(x), self.number), (), params, instr.op))

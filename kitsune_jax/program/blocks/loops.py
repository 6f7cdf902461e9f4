"""A stage whose rows have a long dimension becomes loops over blocks of that dimension.

Comes in: a ``TileProgram``, a dimension of one of its values and the extent of a block. Goes out: a program that computes the same
and never holds more than a block of what has the dimension. Arrays are read and written by slices, elementwise work is done block
by block, and a reduction over the dimension is a carry of the loop. Where a reduction waits for an earlier one, it has a loop of
its own behind that one's, unless it can be taken apart (``factors``): then it is kept relative to the largest score so far.

Invariants: what a reduction hands on has the dtype it had; sums of 16-bit numbers are carried in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from kitsune_jax.graph import Param, make_params
from kitsune_jax.ops.reduce import identity
from kitsune_jax.ops.spec import is_narrow
from kitsune_jax.program.blocks.dims import ARGS, FOLDS, NotBlocked, inner_dims
from kitsune_jax.program.blocks.emit import Place, Writer
from kitsune_jax.program.blocks.factors import Factors, Part, Top, behind
from kitsune_jax.program.blocks.iteration import Iteration
from kitsune_jax.program.blocks.visible import Range, Visible
from kitsune_jax.program.instructions import FOLDED
from kitsune_jax.program.ir import Block, Instr, StageProgram, TileProgram, TileType

_LINEAR = frozenset({"reduce_sum", "matmul", "dot"})


def blocked(program: TileProgram, value: int, dim: int, block: int) -> TileProgram:
    """``program``, of one stage, with loops over blocks of ``block`` elements of (rows-first) dimension ``dim`` of ``value``.

    Raises ``NotBlocked`` with the reason where an instruction cannot be cut there.
    """
    (stage,) = program.stages
    size = program.values[value].rows_first[dim]
    if not 0 < block < size:
        raise NotBlocked(f"blocks of {block} elements of {size}")
    inner = inner_dims(program.values, stage.body, value, dim)
    made = _Blocked(program, stage.body, inner, size, block)
    body = made.run()
    w = made.writer
    return dataclasses.replace(
        program, values=tuple(w.types), literals=tuple(w.literals.items()), stages=(StageProgram(stage.name, tuple(body)),)
    )


@dataclasses.dataclass
class _Fold:
    """A reduction over the dimension. ``result``: its last carry, in the dtype that it is carried in."""

    instr: Instr
    part: Part
    result: int
    kind: str  # how two parts are put together
    how: str


@dataclasses.dataclass
class _Extreme:
    """The index of an extreme element along the dimension. ``best``, ``index``: the last carries, the index in int32."""

    instr: Instr
    best: int
    index: int


@dataclasses.dataclass
class _Loop:
    """What is carried around one loop: running maxima of scores (``tops``: scores -> the last one), folds, indices of extreme
    elements, and whether any element was kept (``kept``: (condition, case) -> the last one)."""

    tops: dict[int, int] = dataclasses.field(default_factory=dict)
    folds: list[_Fold] = dataclasses.field(default_factory=list)
    extremes: list[_Extreme] = dataclasses.field(default_factory=list)
    kept: dict[tuple[int, bool], int] = dataclasses.field(default_factory=dict)
    stores: list[Instr] = dataclasses.field(default_factory=list)
    sinks: list[Instr] = dataclasses.field(default_factory=list)

    @property
    def results(self) -> list[int]:
        extremes = (v for e in self.extremes for v in (e.best, e.index))
        return [*self.tops.values(), *(f.result for f in self.folds), *extremes, *self.kept.values()]


class _Blocked:
    def __init__(self, program: TileProgram, body: Sequence[Instr], inner: dict[int, int], size: int, block: int):
        self.program, self.old, self.inner, self.size, self.block = program, body, inner, size, block
        self.writer = Writer(program)
        self.makers = {v: i for i in body for v in i.outputs}
        self.levels: dict[int, int] = {}
        self.outside: list[tuple[int, Instr]] = []
        self.loops: dict[int, _Loop] = {}
        self.factors = Factors(self.writer, self.makers, inner, self.level)

    def level(self, v: int) -> int:
        """How many loops must be over before ``v`` can be computed."""
        if v not in self.levels:
            made = self.makers.get(v)
            self.levels[v] = max(map(self.level, made.inputs), default=0) if made is not None else 0
        return self.levels[v]

    def run(self) -> list[Instr]:
        for instr in self.old:
            level = max(map(self.level, instr.inputs), default=0)
            across = any(v in self.inner for v in instr.inputs)
            if any(v in self.inner for v in instr.outputs):
                self.levels.update(dict.fromkeys(instr.outputs, level))
            elif across and instr.kind == "store":
                self._loop(level).stores.append(instr)
            elif across and instr.kind in FOLDED:
                self._loop(level).sinks.append(instr)
            elif across:
                self._fold(instr, level)
            else:
                self._outside(level, instr)
        with self.writer.elsewhere() as body:
            for level in range(max((*self.loops, *(at for at, _ in self.outside)), default=0) + 1):
                body.extend(i for at, i in self.outside if at == level)
                if level in self.loops:
                    self._emit(self.loops[level])
        return body

    def _loop(self, level: int) -> _Loop:
        return self.loops.setdefault(level, _Loop())

    def _outside(self, level: int, instr: Instr) -> None:
        self.outside.append((level, instr))
        self.levels.update(dict.fromkeys(instr.outputs, level))

    def _fold(self, instr: Instr, level: int) -> None:
        if instr.kind in ARGS:
            return self._extreme(instr, level)
        if instr.kind not in FOLDS:
            raise NotBlocked(f"{instr.kind} has no code for a part of a dimension")
        types, (out,) = self.writer.types, instr.outputs
        if not types[out].tile:
            raise NotBlocked("a reduction that does not depend on the rows")
        part = Part(instr.inputs[0])
        if level and instr.kind in _LINEAR:
            found = self.factors.take(instr.inputs[0])
            lower = max(self._part_level(found), *map(self.level, instr.inputs[1:]), 0)
            placed = behind(types, found, instr, instr.inputs[0], self.inner[instr.inputs[0]]) if lower < level else None
            if placed is not None:
                part, level = placed, lower
        loop = self._loop(level)
        how = "sum" if instr.kind in _LINEAR else instr.kind.removeprefix("reduce_")
        dtype = types[out].dtype
        wide = "float32" if how == "sum" and is_narrow(dtype) else dtype
        result = self.writer.new(TileType(True, types[out].shape, wide))
        loop.folds.append(_Fold(instr, part, result, FOLDS[instr.kind], how))
        self.levels[result] = level + 1
        if part.top is not None and part.top.scores not in loop.tops:
            running = types[part.top.running]
            loop.tops[part.top.scores] = self.writer.new(running)
            self.levels[loop.tops[part.top.scores]] = level + 1
        for condition, case, _ in part.kept:
            if (condition, case) not in loop.kept:
                shape = tuple(n for d, n in enumerate(types[condition].rows_first) if d != self.inner[condition])[1:]
                loop.kept[condition, case] = self.writer.new(TileType(True, shape, "bool"))
        self._finish(loop, part, result, out, level + 1)

    def _extreme(self, instr: Instr, level: int) -> None:
        types, (x,), (out,) = self.writer.types, instr.inputs, instr.outputs
        if not types[out].tile:
            raise NotBlocked("a reduction that does not depend on the rows")
        if types[x].dtype == "bool":
            raise NotBlocked(f"{instr.kind} of bools has no code for a part of a dimension")
        best, index = (self.writer.new(TileType(True, types[out].shape, dtype)) for dtype in (types[x].dtype, "int32"))
        self._loop(level).extremes.append(_Extreme(instr, best, index))
        self.levels.update({best: level + 1, index: level + 1})
        with self.writer.elsewhere() as body:
            found = self.writer.convert(index, types[out].dtype)
            body.append(Instr("copy", (found,), (out,)))
        for after in body:
            self._outside(level + 1, after)

    def _part_level(self, part: Part) -> int:
        return max(self.level(part.value), self.level(part.top.scores) if part.top else 0)

    def _finish(self, loop: _Loop, part: Part, result: int, out: int, level: int) -> None:
        """From the last carry to the reduction's result: what it was taken apart from, behind it."""
        w = self.writer
        t = w.types[result]
        with w.elsewhere() as body:
            x = result
            if part.top is not None:
                x = w.op("mul", x, w.spread(*self._at_last(loop.tops[part.top.scores], part.top), t))
            for outer in part.outer:
                x = w.op(outer.kind, x, w.spread(w.convert(outer.value, t.dtype), outer.place, t))
            for condition, case, place in part.kept:
                any_kept = loop.kept[condition, case]
                dims = tuple(p for d, p in enumerate(place) if d != self.inner[condition])
                whether = w.spread(any_kept, dims, TileType(True, t.shape, "bool"))
                x = w.op("select_n", whether, w.filled(0, t), x)
            x = w.convert(x, w.types[out].dtype)
            body.append(Instr("copy", (x,), (out,)))
        for outer in part.outer:
            level = max(level, self.level(outer.value))
        if part.top is not None:
            level = max(level, self.level(part.top.minus.value))
        for instr in body:
            self._outside(level, instr)

    def _at_last(self, last: int, top: Top) -> tuple[int, Place]:
        """exp(largest score - what the program subtracts), and where its dimensions are in the result."""
        w, dim = self.writer, self.inner[top.scores]
        t = w.types[last]
        place = tuple(None if d is None else d - (d > dim) for d in top.minus.place)
        minus = w.spread(w.convert(top.minus.value, t.dtype), place, t)
        kept = tuple(p for d, p in enumerate(top.place) if d != dim)
        return w.op("exp", w.op("sub", last, minus)), kept

    def _emit(self, loop: _Loop) -> None:
        """The loop, and behind it what is left of the dimension where no block ends at its end.

        Where a mask hides blocks from a tile, those that it shows as a whole have a loop of their own, without the mask.
        """
        w = self.writer
        whole, rest = divmod(self.size, self.block)
        carries = [w.filled(*self._initial(loop, v)) for v in loop.results]
        seen, visible = self._seen(loop)
        kinds = ("whole", "edges") if seen is not None else ("all",)
        for which in kinds:
            inside, after = ([w.new(w.types[v]) for v in loop.results] for _ in range(2))
            number = w.new(TileType(False, (), "int32"))
            facts = visible.facts(seen) if seen is not None and which == "whole" else {}
            with w.elsewhere() as body:
                results = self._step(loop, inside, number, self.block, self.block, facts)
            params: dict[str, Param] = {"count": whole, "reverse": False}
            if seen is not None:
                params["within"] = seen.axis, self.block, seen.low, seen.high, which
            if seen is not None and seen.by is not None:
                params["shifted"] = *seen.by, seen.guard, self.size
            block = Block(number, tuple(inside), tuple(body), tuple(results))
            w.body.append(Instr("loop", tuple(carries), tuple(after), make_params(**params), block=block))
            carries = after
        if rest:
            carries = self._step(loop, carries, w.literal(whole * self.block, "int32"), 1, rest, {})
        for made, result in zip(carries, loop.results, strict=True):
            w.body.append(Instr("copy", (made,), (result,)))

    def _initial(self, loop: _Loop, v: int) -> tuple[float | int | bool, TileType]:
        t = self.writer.types[v]
        if any(v == e.index for e in loop.extremes):
            return 0, t
        how = next((f.how for f in loop.folds if f.result == v), "max" if v in loop.tops.values() else "or")
        how = next((ARGS[e.instr.kind][0] for e in loop.extremes if e.best == v), how)
        dtype = np.dtype("float32") if is_narrow(t.dtype) else np.dtype(t.dtype)
        return identity(how, dtype), t

    def _seen(self, loop: _Loop) -> tuple[Range | None, Visible]:
        """The elements that a tile's rows see, where the others change nothing: neither what the loop carries nor a sink."""
        visible = Visible(self.writer, self.makers, self.inner, self.program, self.size)
        terms = [i.inputs for i in loop.sinks if self.program.sinks[i["sink"]].how == "sum"]
        others = [f for f in loop.folds if f.part.top is None and not self._is_top(loop, f)]
        terms += [(f.part.value, *f.instr.inputs[1:]) for f in others if f.how == "sum"]
        if loop.stores or loop.extremes or len(terms) < len(loop.sinks) + len(others) or loop.kept and terms:
            return None, visible
        seen = visible.of(list(loop.tops)) if loop.tops else None
        if terms:
            found = set.intersection(*(visible.of_terms(values) for values in terms))
            if loop.tops:
                found &= {seen}
            seen = next(iter(sorted(found, key=str)), None)
        return seen, visible

    def _is_top(self, loop: _Loop, fold: _Fold) -> bool:
        """Is it the largest of scores that are carried anyway?"""
        (scores, *_), (out,) = fold.instr.inputs, fold.instr.outputs
        same = scores in loop.tops and fold.how == "max" and fold.instr["axes"] == (self.inner[scores],)
        return same and self.writer.types[loop.tops[scores]] == self.writer.types[out]

    def _step(self, loop: _Loop, carries: Sequence[int], number: int, step: int, size: int, facts: Mapping[int, bool]) -> list[int]:
        """One block: the next carries. ``facts``: conditions that hold, or do not hold, for all of its elements."""
        w = self.writer
        of = Iteration(w, self.program, self.makers, self.inner, number, step, size, facts)
        scales: dict[int, int] = {}
        out = []
        now = dict(zip(loop.results, carries, strict=True))
        for scores, result in loop.tops.items():
            m, t = now[result], w.types[result]
            largest = w.convert(of.reduced("reduce_max", of.value(scores), self.inner[scores], w.types[scores].dtype), t.dtype)
            new = w.op("max", m, largest)
            nothing = w.op("eq", new, w.literal(-np.inf, t.dtype), dtype="bool")  # no block has shown a score yet
            running = w.op("select_n", nothing, new, w.filled(0.0, t))
            of.values[self.factors.running[scores]] = running
            scales[scores] = w.op("exp", w.op("sub", m, running))
            out.append(new)
        tops = dict(zip(loop.tops, out, strict=True))
        for fold in loop.folds:
            if self._is_top(loop, fold):
                out.append(tops[fold.instr.inputs[0]])
                continue
            t, acc = w.types[fold.result], now[fold.result]
            if fold.part.top is not None:
                top = fold.part.top
                place = tuple(p for d, p in enumerate(top.place) if d != self.inner[top.scores])
                acc = w.op("mul", acc, w.spread(scales[top.scores], place, t))
            out.append(w.op(fold.kind, acc, of.fold(fold.instr, fold.part.value, t)))
        for extreme in loop.extremes:
            out += of.extreme(extreme.instr, now[extreme.best], now[extreme.index])
        for (condition, case), result in loop.kept.items():
            here = of.value(condition)
            here = here if case else w.op("not", here)
            out.append(w.op("or", now[result], of.reduced("reduce_or", here, self.inner[condition], "bool")))
        for store in loop.stores:
            of.store(store)
        for sink in loop.sinks:
            of.sink(sink)
        return out

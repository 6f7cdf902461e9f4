"""What is summed over a dimension, taken apart: what the sum can do without is put behind it.

A sum over k of ``g * x[k]`` is g times the sum of x; a sum of ``x[k] * exp(s[k] - c)`` is ``exp(t - c)`` times the sum of
``x[k] * exp(s[k] - t)``, whatever t is. So a sum need not wait for a ``c`` or a ``g`` that an earlier reduction makes (the largest
score, the sum of a softmax): it is made with ``t`` the largest s so far, and scaled again whenever that grows.

Comes in: a value of a stage. Goes out: a ``Part``. New instructions over the whole dimension are made on the way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from kitsune_jax.ops.spec import is_narrow
from kitsune_jax.program.blocks.dims import joins
from kitsune_jax.program.blocks.emit import Place, Writer, rows_first
from kitsune_jax.program.ir import Instr, TileType


@dataclasses.dataclass(frozen=True)
class Outer:
    """``value``, which does not have the dimension; ``kind``: what it does to the part, "mul" or "div"."""

    kind: str
    value: int
    place: Place


@dataclasses.dataclass(frozen=True)
class Top:
    """``exp(scores - value)`` is a factor; the part has ``exp(scores - running)`` instead. ``minus`` is placed in the scores."""

    scores: int
    running: int
    minus: Outer
    place: Place  # of the scores' dimensions in the part


@dataclasses.dataclass(frozen=True)
class Part:
    """``value``: what is left of a value. ``outer``, ``top``: what it has lost. ``kept``: conditions (a value, and which case);
    where one does not hold, an element is 0 whatever it was multiplied with."""

    value: int
    outer: tuple[Outer, ...] = ()
    top: Top | None = None
    kept: tuple[tuple[int, bool, Place], ...] = ()


class Factors:
    """``inner``: values that have the dimension, and which of theirs it is; ``level``: the loops that a value waits for."""

    def __init__(self, writer: Writer, makers: dict[int, Instr], inner: dict[int, int], level: Callable[[int], int]):
        self.writer, self.makers, self.inner, self.level = writer, makers, inner, level
        self.known: dict[int, Part] = {}
        self.running: dict[int, int] = {}  # scores -> the value that stands for the largest of them so far

    def take(self, v: int) -> Part:
        if v not in self.known:
            found = self._taken(v, self.makers[v]) if v in self.makers and v in self.inner and self.level(v) else None
            self.known[v] = found or Part(v)
        return self.known[v]

    def _taken(self, v: int, instr: Instr) -> Part | None:
        if instr.kind in ("mul", "div"):
            return self._product(v, instr)
        if instr.kind == "exp":
            return self._exponential(v, instr)
        if instr.kind == "select_n":
            return self._selected(v, instr)
        if instr.kind in ("convert_element_type", "broadcast_in_dim", "reshape", "transpose", "neg"):
            return self._moved(v, instr)
        return None

    def _product(self, v: int, instr: Instr) -> Part | None:
        for k in (1, 0) if instr.kind == "mul" else (1,):
            x, y = instr.inputs[1 - k], instr.inputs[k]
            outer = self.constant(y)
            part = self.take(x)
            if outer is not None:
                return dataclasses.replace(part, outer=(*part.outer, dataclasses.replace(outer, kind=instr.kind)))
            if self.level(y) == 0 and part.value != x:
                inputs = (part.value, y) if k == 1 else (y, part.value)
                return dataclasses.replace(part, value=self._again(v, instr, inputs))
        return None

    def constant(self, v: int) -> Outer | None:
        """``v`` without the dimension, along which it is repeated."""
        instr = self.makers.get(v)
        if instr is None or instr.kind != "broadcast_in_dim" or instr.inputs[0] in self.inner:
            return None
        (x,) = instr.inputs
        sizes = rows_first(self.writer.types[x])
        return Outer("", x, tuple(None if n == 1 else d for n, d in zip(sizes, instr["dims"], strict=True)))

    def _exponential(self, v: int, instr: Instr) -> Part | None:
        difference = self.makers.get(instr.inputs[0])
        if difference is None or difference.kind != "sub":
            return None
        scores, largest = difference.inputs
        minus = self.constant(largest)
        if minus is None or scores not in self.inner:
            return None
        w, t = self.writer, self.writer.types[scores]
        dtype = "float32" if is_narrow(t.dtype) else t.dtype
        dim, whole = self.inner[scores], TileType(t.tile, t.shape, dtype)
        kept = tuple(n for d, n in enumerate(t.rows_first) if d != dim)
        if not t.tile:
            return None
        if scores not in self.running:
            self.running[scores] = w.new(TileType(True, kept[1:], dtype))
        running = self.running[scores]
        wide = scores if dtype == t.dtype else self._new(scores, "convert_element_type", (scores,), whole, new_dtype=dtype)
        dims = tuple(d for d in range(len(t.rows_first)) if d != dim)
        top = self._new(scores, "broadcast_in_dim", (running,), whole, shape=rows_first(t), dims=dims)
        x = self._new(scores, "exp", (self._new(scores, "sub", (wide, top), whole),), whole)
        if dtype != t.dtype:
            x = self._new(scores, "convert_element_type", (x,), w.types[v], new_dtype=t.dtype)
        return Part(x, (), Top(scores, running, minus, tuple(range(len(t.rows_first)))))

    def _selected(self, v: int, instr: Instr) -> Part | None:
        which, *cases = instr.inputs
        if len(cases) != 2 or self.level(which) or which not in self.inner:
            return None
        for k in range(2):
            part = self.take(cases[k])
            if part.value != cases[k] and self._is_zero(cases[1 - k]):
                inputs = [which, *cases]
                inputs[1 + k] = part.value
                same: Place = tuple(range(len(rows_first(self.writer.types[v]))))
                return dataclasses.replace(
                    part, value=self._again(v, instr, tuple(inputs)), kept=(*part.kept, (which, k == 1, same))
                )
        return None

    def _is_zero(self, v: int) -> bool:
        while v in self.makers and self.makers[v].kind in ("broadcast_in_dim", "reshape", "convert_element_type"):
            v = self.makers[v].inputs[0]
        return self.writer.literals.get(v) == 0

    def _moved(self, v: int, instr: Instr) -> Part | None:
        (x,) = instr.inputs
        part = self.take(x)
        if part.value == x:
            return None
        types = self.writer.types
        if instr.kind == "convert_element_type" and not (types[x].dtype.endswith(_FLOATS) and types[v].dtype.endswith(_FLOATS)):
            return None
        moved = moves(types, instr, x)
        placed = _placed(part, {d: moved.get(d) for d in range(len(rows_first(types[x])))})
        return None if placed is None else dataclasses.replace(placed, value=self._again(v, instr, (part.value,)))

    def _again(self, v: int, instr: Instr, inputs: tuple[int, ...]) -> int:
        return self._new(v, instr.kind, inputs, self.writer.types[v], **dict(instr.params))

    def _new(self, like: int, kind: str, inputs: tuple[int, ...], t: TileType, **params: object) -> int:
        """A new value over the whole dimension, which lies in it as in ``like``."""
        self.writer.about = self.makers[like].op if like in self.makers else -1
        with self.writer.elsewhere() as body:
            made = self.writer.add(kind, inputs, t, **params)  # type: ignore[arg-type]
        self.makers[made] = body[0]
        self.inner[made] = self.inner[like]
        return made


_FLOATS = ("float16", "bfloat16", "float32", "float64")


def moves(types: list[TileType], instr: Instr, v: int) -> dict[int, int]:
    """Dimension of operand ``v`` -> the one of the result that it is."""
    (out,) = instr.outputs
    found = {}
    for role, members in joins(types, instr):
        if role == "parallel":
            found.update({d: e for w, d in members if w == v for o, e in members if o == out})
    return found


def _placed(part: Part, moved: Mapping[int, int | None]) -> Part | None:
    """``part`` with its places moved on; None where a dimension of one of them is gone."""

    def on(place: Place) -> Place | None:
        to = tuple(None if d is None else moved.get(d) for d in place)
        return to if all((a is None) == (b is None) for a, b in zip(place, to, strict=True)) else None

    outer = [on(o.place) for o in part.outer]
    kept = [on(place) for _, _, place in part.kept]
    top = on(part.top.place) if part.top else ()
    if None in outer or None in kept or top is None:
        return None
    return Part(
        part.value,
        tuple(dataclasses.replace(o, place=p) for o, p in zip(part.outer, outer, strict=True) if p is not None),
        dataclasses.replace(part.top, place=top) if part.top else None,
        tuple((w, k, p) for (w, k, _), p in zip(part.kept, kept, strict=True) if p is not None),
    )


def behind(types: list[TileType], part: Part, fold: Instr, v: int, inner: int) -> Part | None:
    """``part`` of operand ``v`` of ``fold``, with places in its result; None where the fold has no place for one of them."""
    moved: dict[int, int | None] = dict(moves(types, fold, v))

    def dropped(place: Place, sizes: tuple[int, ...]) -> Place:
        return tuple(None if n == 1 or d == inner else d for d, n in zip(place, sizes, strict=True))

    kept = tuple((w, k, dropped(p, rows_first(types[w]))) for w, k, p in part.kept)
    top = part.top and dataclasses.replace(part.top, place=dropped(part.top.place, rows_first(types[part.top.scores])))
    return _placed(dataclasses.replace(part, kept=kept, top=top), moved)

"""The iterations of a loop that a tile runs (the parameters ``within`` and ``shifted``), and the masks that they come from.

Comes in: a tile program, or the ops of a mask. Goes out: a ``Range`` that a mask leaves visible; the iterations that a tile runs;
their mean number. Invariant: every element that a row sees lies in the ``Range``.

A causal mask compares two indices and sets hidden elements to -inf, or to a number so low that its exponential is 0 beside any
visible score. ``Visible`` finds such comparisons, however they are written, and gives a ``Range``: a stream axis, and how far from
a row's index on it the elements lie that the row sees. ``met`` and ``mean_iterations`` count the iterations that reach into it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kitsune_jax.program.ir import Instr, TileProgram, Writer

# --- Iterations of a tile ---------------------------------------------------------------------------------------------------------

MOST_SHIFT = 1 << 30
_MOST = 1 << 12  # tiles that are counted
_Index = Any  # an int, or an array with one for each tile
_Span = tuple[_Index, _Index]


def tile_iterations(
    program: TileProgram, instr: Instr, rows: np.ndarray[Any, np.dtype[Any]], number: Callable[[int], int] | None = None
) -> Sequence[int]:
    """The iterations of a loop that a tile of ``rows`` runs. ``number``: the number in an input array, by which bounds are shifted;
    by default the last row sees the last element, as in a text that is read in pieces."""
    if instr.get("within") is None:
        return range(instr["count"])
    axis, *_, which = instr["within"]
    index = np.unravel_index(rows, program.axes)[axis]
    seen, whole = _spans(program, instr, index.min(), index.max(), number)
    a, b, c, d = (int(end) for end in (*seen, *whole))
    if which == "edges":
        return [*range(a, c), *range(d, b)] if c < d else range(a, b)
    return range(a, b) if which == "all" else range(c, d)


def mean_iterations(program: TileProgram, instr: Instr) -> float:
    """The mean number of iterations of a loop in a tile: exact, or of ``_MOST`` tiles where a batch has more."""
    if instr.get("within") is None:
        return float(instr["count"])
    axis, *_, which = instr["within"]
    seen, whole = (np.maximum(end - first, 0) for first, end in _spans(program, instr, *_indices(program, axis)))
    return float(np.mean({"all": seen, "whole": whole, "edges": seen - whole}[which]))


def mean_row_iterations(program: TileProgram, instr: Instr) -> float:
    """As ``mean_iterations``, of a row, where rows leave out the iterations that are not whole and of which they see nothing."""
    if instr.get("within") is None or instr["within"][-1] == "whole":
        return mean_iterations(program, instr)
    axis, step, low, high, which = instr["within"]
    x, y = _indices(program, axis)
    (first, end), (whole, whole_end) = _spans(program, instr, x, y)
    i = np.arange(instr["count"])[:, None]
    runs = (first <= i) & (i < end) & ((which == "all") | (i < whole) | (whole_end <= i))
    last = y if low is None else np.minimum(y, (i + 1) * step - 1 - low)
    rows = last - (x if high is None else np.maximum(x, i * step - high)) + 1
    rows = np.where((x == 0) & (y == program.axes[axis] - 1), y - x + 1, rows)  # where a tile wraps around, all take part
    return float(np.mean(np.sum(runs * rows / (y - x + 1), axis=0)))


def _spans(
    program: TileProgram, instr: Instr, x: _Index, y: _Index, number: Callable[[int], int] | None = None
) -> tuple[_Span, _Span]:
    """(first, end) of the iterations that some row of a tile with indices ``x`` to ``y`` sees elements of, and of the iterations of
    which all rows see all elements."""
    count, (axis, step, low, high, _) = instr["count"], instr["within"]
    holds: Any = True  # whether the bounds hold
    if instr.get("shifted") is not None:
        array, sign, guard, size = instr["shifted"]
        extent = program.axes[axis]
        value = max(0, sign * (size - extent)) if number is None else number(array)
        low, high = (None if bound is None else bound + sign * value for bound in (low, high))
        holds = abs(value) <= MOST_SHIFT
        holds &= _covers(guard, (low, high), (x, y), extent, size)

    def span(first: Any, end: Any, otherwise: int) -> _Span:
        return np.where(holds, np.clip(first, 0, count), 0), np.where(holds, np.clip(end, 0, count), otherwise)

    zero, together = 0 * x, instr.get("together", 1)
    seen = zero if low is None else (x + low) // step, zero + count if high is None else (y + high) // step + 1
    step *= together
    whole = zero if low is None else -(-(y + low) // step), zero + count if high is None else (x + high + 1) // step
    whole = tuple(end * together for end in whole)
    return span(*seen, count), span(*whole, 0)


def _covers(guard: str, bounds: tuple[int | None, int | None], rows: _Span, extent: int, size: int) -> Any:
    """Whether the rows with indices from ``rows[0]`` to ``rows[1]``, of ``extent``, each see one of ``size`` elements (``guard``
    "rows"), or each element is seen by some row ("elements")."""
    low, high = bounds
    if guard == "rows":
        return (high is None or rows[0] + high >= 0) & (low is None or rows[1] + low <= size - 1)
    return guard != "elements" or (low is None or low <= 0) and (high is None or size - 1 - high <= extent - 1)


def _indices(program: TileProgram, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest index on ``axis`` in each of the tiles of ``tile_starts``."""
    extent, inner, rows = program.axes[axis], math.prod(program.axes[axis + 1 :]), math.prod(program.axes[program.batch_axes :])
    starts = tile_starts(program, axis, _MOST)
    ends = np.minimum(starts + program.tile_rows, (starts // rows + 1) * rows)
    first, last = starts // inner, (ends - 1) // inner
    over = first // extent < last // extent  # the tile wraps around the end of the axis
    return np.where(over, 0, first % extent), np.where(over, extent - 1, last % extent)


def tile_starts(program: TileProgram, axis: int, most: int) -> np.ndarray:
    """The first rows of tiles that represent all tiles by their index on ``axis``: all tiles of a batch, or ``most`` tiles spread
    over one period of the index. (A stride over several periods could give all of them the same index.)

    >>> program = TileProgram((8, 4, 64), 16, (), (), (), (), (), (), (), batch_axes=1)
    >>> tile_starts(program, 2, 16)
    array([  0,  16,  32,  48,  64,  80,  96, 112, 128, 144, 160, 176, 192,
           208, 224, 240])
    >>> tile_starts(program, 2, 4)
    array([ 0, 16, 32, 48])
    """
    batch, size = program.batch_axes, program.tile_rows
    period, rows = math.prod(program.axes[axis:]), math.prod(program.axes[batch:])
    if axis < batch:
        return _spread(program.axes[axis], most) * (period // program.axes[axis])
    tiles = -(-rows // size)
    if tiles <= most or period == rows:
        return _spread(tiles, most) * size
    apart = math.gcd(size, period)  # distance of places in a period where tiles start
    return _spread(period // apart, most) * apart


def _spread(n: int, most: int) -> np.ndarray:
    """The numbers below ``n``, or ``most`` of them."""
    return np.arange(n) if n <= most else np.arange(most) * n // most


def with_known_bounds(program: TileProgram) -> TileProgram:
    """``program`` without bounds that are shifted at run time, for a target without code for them; it computes what masks hide."""

    def known(i: Instr) -> list[Instr]:
        if i.get("shifted") is None:
            return [i]
        if i["within"][-1] == "whole":  # all iterations are edges
            return [Instr("copy", (v,), (out,)) for v, out in zip(i.inputs, i.outputs, strict=True)]
        return [dataclasses.replace(i, params=tuple(p for p in i.params if p[0] not in ("within", "shifted")))]

    return program.with_bodies(lambda body: tuple(made for i in body for made in known(i)))


# --- Ranges that masks leave visible ----------------------------------------------------------------------------------------------

_LOW = -1e30
_SAME = frozenset({"broadcast_in_dim", "reshape", "transpose", "convert_element_type", "copy"})
_COUNTING = frozenset({"int32", "int64", "float32", "float64"})  # in others an index may wrap, or be rounded
_TURNED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}


@dataclasses.dataclass(frozen=True)
class Range:
    """Elements k with ``low <= k - x <= high``, where x is a row's index on ``axis``. ``exact``: all of them, not only some.

    ``by``: (input, sign): at run time both bounds move by the number in that input times the sign. Only then is it known whether
    every row sees an element ("rows"), or every element is seen by a row ("elements"): ``guard`` is the one the range relies on.
    """

    axis: int
    low: int | None
    high: int | None
    exact: bool = True
    by: tuple[int, int] | None = None
    guard: str = ""


@dataclasses.dataclass(frozen=True)
class _OffsetIndex:
    """An index plus ``plus``, plus the number of ``by``, (input, sign). ``axis``: the stream axis of the index; -1: it is along the
    dimension; None: it is a constant."""

    axis: int | None
    plus: int
    by: tuple[int, int] | None = None


class Visible:
    """Finds the elements of a dimension (``inner``, of ``size``) that the rows of a tile see through masks.

    Where a low number, not -inf, hides elements, the mask must be exactly the comparison and show every row an element: otherwise
    hidden elements make up a row's result. The same holds for sums over rows without hidden elements (gradients of keys)."""

    def __init__(self, writer: Writer, makers: dict[int, Instr], inner: dict[int, int], program: TileProgram, size: int):
        self.writer, self.makers, self.inner, self.size = writer, makers, inner, size
        self.axes, self.inputs = program.axes, program.inputs
        self.when: dict[int, tuple[Range | None, Range | None]] = {}  # condition -> where it is true, and where false
        self.nonzero: dict[int, set[Range]] = {}  # remembered, because values may be read many times

    def of(self, scores: list[int]) -> Range | None:
        """The elements that rows see of all ``scores``; None where they may see all."""
        found = {self._shown(s) for s in scores}
        shown = found.pop() if len(found) == 1 else None
        if shown is not None and shown.by is not None:
            shown = self._relying_on("rows", shown)
        return shown if shown is not None and (shown.low, shown.high) != (None, None) else None

    def of_terms(self, values: Sequence[int]) -> set[Range]:
        """Ranges outside of which the product of ``values`` is 0."""
        found = {r for v in values for r in self._nonzero(v)}
        return {r for r in found if r.exact and (r.low, r.high) != (None, None)}

    def _nonzero(self, v: int) -> set[Range]:
        """Ranges outside of which ``v`` is 0: behind a mask, or as a multiple of the exponential of hidden scores."""
        if v not in self.nonzero:
            self.nonzero[v] = self._find_nonzero(v)
        return self.nonzero[v]

    def _find_nonzero(self, v: int) -> set[Range]:
        instr = self.makers.get(v)
        if v not in self.inner or instr is None:
            return set()
        if instr.kind == "exp":
            made = self.makers.get(instr.inputs[0])
            made = made if made is not None and made.kind == "sub" else None
            shown = self._shown(instr.inputs[0] if made is None else made.inputs[0])
            if shown is None:
                return set()
            # A row without visible elements has a hidden largest score, beside which no exponential is 0. The same holds for
            # elements without rows where the largest scores are those of elements.
            of_elements = made is not None and self._varies(made.inputs[1])
            found = self._relying_on("elements" if of_elements else "rows", shown)
            return {found} if found is not None else set()
        if instr.kind == "mul":
            return self._nonzero(instr.inputs[0]) | self._nonzero(instr.inputs[1])
        if instr.kind == "select_n" and len(instr.inputs) == 3:
            which, *cases = instr.inputs
            zero = [self._constant(x) == 0 for x in cases]
            when = self._when(which)[1 - zero.index(False)] if any(zero) and not all(zero) else None
            others = [self._nonzero(x) for x, is_zero in zip(cases, zero, strict=True) if not is_zero]
            shown = when and self._relying_on("rows", when)
            return (set.intersection(*others) if others else set()) | ({shown} if shown else set())
        if instr.kind in ("div", "neg") or instr.kind in _SAME:
            return self._nonzero(instr.inputs[0])
        return set()

    def _relying_on(self, guard: str, shown: Range) -> Range | None:
        """``shown``, if it shows every row an element ("rows"), or every element is seen by some row ("elements"), or it relies on
        that at run time."""
        if shown.by is not None:
            return dataclasses.replace(shown, guard=guard)
        extent = self.axes[shown.axis]
        return shown if _covers(guard, (shown.low, shown.high), (0, extent - 1), extent, self.size) else None

    def _varies(self, v: int) -> bool:
        """Whether ``v`` seems to differ along the dimension."""
        while v in self.inner and v in self.makers and self.makers[v].kind in _SAME:
            (v,) = self.makers[v].inputs
        return v in self.inner

    def facts(self, seen: Range) -> dict[int, bool]:
        """The conditions that are the same for all elements in ``seen``, and their values."""
        cases = ((v, k == 0, when[k]) for v, when in self.when.items() for k in range(2))
        return {v: case for v, case, r in cases if r is not None and r.exact and _inside(seen, r)}

    def _shown(self, v: int) -> Range | None:
        instr = self.makers.get(v)
        if instr is None:
            return None
        if instr.kind == "select_n" and len(instr.inputs) == 3:
            if (shown := self._unmasked(instr)) is not None:
                return shown
            inner = [self._shown(x) for x in instr.inputs[1:] if self._constant(x) != -math.inf]
            return inner[0] if len(inner) == 1 else None
        if instr.kind == "add":
            return next((r for x in instr.inputs if (r := self._minus_infinity(x)) is not None), None)
        return self._shown(instr.inputs[0]) if instr.kind in _SAME and instr.inputs[0] in self.inner else None

    def _unmasked(self, select: Instr, low: float = _LOW) -> Range | None:
        """The elements that a selection does not set to -inf, or to another number of at most ``low`` that hides them."""
        which, *cases = select.inputs
        for case, shown in zip(cases, self._when(which), strict=True):
            fill = self._constant(case)
            if shown is None or fill is None or not fill <= low:  # or NaN
                continue
            if fill == -math.inf or shown.exact and self._relying_on("rows", shown) is not None:
                return shown
        return None

    def _minus_infinity(self, v: int) -> Range | None:
        """The elements where the addend ``v`` is not -inf."""
        instr = self.makers.get(self._behind_same(v))
        selects = instr is not None and instr.kind == "select_n" and len(instr.inputs) == 3
        return self._unmasked(instr, -math.inf) if instr is not None and selects else None

    def _constant(self, v: int) -> float | None:
        found = self.writer.literals.get(self._behind_same(v))
        return float(found) if isinstance(found, (int, float)) else None

    def _behind_same(self, v: int) -> int:
        """The value of which ``v`` is another form: repeated, moved, converted or copied."""
        while v in self.makers and self.makers[v].kind in _SAME:
            v = self.makers[v].inputs[0]
        return v

    def _when(self, v: int) -> tuple[Range | None, Range | None]:
        if v not in self.when:
            self.when[v] = self._condition(v)
        return self.when[v]

    def _condition(self, v: int) -> tuple[Range | None, Range | None]:
        """Bounds of the elements for which a condition is true, and of those for which it is false."""
        instr = self.makers.get(v)
        if instr is None:
            return None, None
        if instr.kind in _SAME:
            return self._when(instr.inputs[0])
        if instr.kind == "not":
            true, false = self._when(instr.inputs[0])
            return false, true
        if instr.kind in ("and", "or"):
            return self._and_or(instr)
        if instr.kind == "select_n" and len(instr.inputs) == 3:
            true, false = self._when(instr.inputs[0])
            cases = self._constant(instr.inputs[1]), self._constant(instr.inputs[2])
            return (true, false) if cases == (0, 1) else (false, true) if cases == (1, 0) else (None, None)
        if instr.kind in _TURNED:
            return self._compared(instr.kind, *map(self._index, instr.inputs))
        return None, None

    def _and_or(self, instr: Instr) -> tuple[Range | None, Range | None]:
        sides = [self._when(x) for x in instr.inputs]
        constants = [self._constant(x) for x in instr.inputs]
        for k in range(2):
            if constants[k] == (1 if instr.kind == "and" else 0):
                return sides[1 - k]
        which = 0 if instr.kind == "and" else 1
        met = _intersection(sides[0][which], sides[1][which])
        return (met, None) if which == 0 else (None, met)

    def _compared(self, kind: str, a: _OffsetIndex | None, b: _OffsetIndex | None) -> tuple[Range | None, Range | None]:
        if a is None or b is None:
            return None, None
        if b.axis == -1:
            a, b, kind = b, a, _TURNED[kind]
        if a.axis != -1 or b.axis is None or b.axis == -1:
            return None, None
        far = b.plus - a.plus  # k + a.plus ? x + b.plus
        by = b.by if a.by is None else (a.by[0], -a.by[1])
        if a.by is not None and b.by is not None:
            return None, None
        below, above = Range(b.axis, None, far - 1, by=by), Range(b.axis, far + 1, None, by=by)
        up_to, since = Range(b.axis, None, far, by=by), Range(b.axis, far, None, by=by)
        equal = Range(b.axis, far, far, by=by)
        return {"le": (up_to, above), "lt": (below, since), "ge": (since, below), "gt": (above, up_to), "eq": (equal, None)}[kind]

    def _index(self, v: int) -> _OffsetIndex | None:
        instr = self.makers.get(v)
        if self.writer.types[v].dtype not in _COUNTING:
            return None
        if instr is None:
            constant = self.writer.literals.get(v)
            return _OffsetIndex(None, constant) if isinstance(constant, int) else None
        if instr.kind == "load" and self._is_number(instr):
            return _OffsetIndex(None, 0, (instr["array"], 1))
        if instr.kind in _SAME:
            return self._index(instr.inputs[0])
        if instr.kind == "iota":
            return _OffsetIndex(-1, 0) if self.inner.get(v) == instr["dimension"] else None
        if instr.kind == "row_index":
            return _OffsetIndex(instr["axes"][0], 0) if len(instr["axes"]) == 1 else None
        if instr.kind in ("add", "sub"):
            a, b = map(self._index, instr.inputs)
            if a is None or b is None:
                return None
            if a.by is not None and b.by is not None:
                return None
            sign = 1 if instr.kind == "add" else -1
            by = a.by if b.by is None else (b.by[0], sign * b.by[1])
            if b.axis is None:
                return _OffsetIndex(a.axis, a.plus + sign * b.plus, by)
            return _OffsetIndex(b.axis, a.plus + b.plus, by) if a.axis is None and sign == 1 else None
        return None

    def _is_number(self, load: Instr) -> bool:
        """Whether ``load`` loads one number for the whole program."""
        array = self.inputs[load["array"]]
        return array.dtype == "int32" and math.prod(array.shape) == 1 and not array.streamed and not any(array.row_strides)


def _inside(a: Range, b: Range) -> bool:
    low = b.low is None or (a.low is not None and b.low <= a.low)
    return (a.axis, a.by) == (b.axis, b.by) and low and (b.high is None or (a.high is not None and a.high <= b.high))


def _intersection(a: Range | None, b: Range | None) -> Range | None:
    """The range in which both ``a`` and ``b`` hold."""
    if a is None or b is None or (a.axis, a.by) != (b.axis, b.by):
        one = a or b
        return None if one is None else dataclasses.replace(one, exact=False)
    lows, highs = ([n for n in pair if n is not None] for pair in ((a.low, b.low), (a.high, b.high)))
    return Range(a.axis, max(lows, default=None), min(highs, default=None), a.exact and b.exact, a.by)

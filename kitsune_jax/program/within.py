"""Which iterations of a loop a tile runs, and how many on average: the loop's parameters ``within`` and ``shifted``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kitsune_jax.program.ir import Instr, TileProgram

MOST_SHIFT = 1 << 30
_MOST = 1 << 12  # tiles that are looked at
_Index = Any  # an int, or an array of one for each tile
_Span = tuple[_Index, _Index]


def met(
    program: TileProgram, instr: Instr, rows: np.ndarray[Any, np.dtype[Any]], number: Callable[[int], int] | None = None
) -> Sequence[int]:
    """The iterations of a loop that a tile of ``rows`` runs. ``number``: of an input array, by which bounds are shifted; without it
    the last row is taken to see the last element, as in a text that is read in pieces."""
    if instr.get("within") is None:
        return range(instr["count"])
    axis, *_, which = instr["within"]
    index = np.unravel_index(rows, program.axes)[axis]
    seen, whole = _spans(program, instr, index.min(), index.max(), number)
    a, b, c, d = (int(end) for end in (*seen, *whole))
    if which == "edges":
        return [*range(a, c), *range(d, b)] if c < d else range(a, b)
    return range(a, b) if which == "all" else range(c, d)


def mean_met(program: TileProgram, instr: Instr) -> float:
    """How many iterations of a loop a tile runs on average: exactly, or of ``_MOST`` tiles where a batch has more."""
    if instr.get("within") is None:
        return float(instr["count"])
    axis, *_, which = instr["within"]
    seen, whole = (np.maximum(end - first, 0) for first, end in _spans(program, instr, *_indices(program, axis)))
    return float(np.mean({"all": seen, "whole": whole, "edges": seen - whole}[which]))


def _spans(
    program: TileProgram, instr: Instr, x: _Index, y: _Index, number: Callable[[int], int] | None = None
) -> tuple[_Span, _Span]:
    """(first, end) of the iterations in which tiles of the indices ``x`` to ``y`` see something, and of those that all of their
    rows see as a whole."""
    count, (axis, step, low, high, _) = instr["count"], instr["within"]
    told: Any = True  # do the bounds hold?
    if instr.get("shifted") is not None:
        array, sign, guard, size = instr["shifted"]
        extent = program.axes[axis]
        value = max(0, sign * (size - extent)) if number is None else number(array)
        low, high = (None if bound is None else bound + sign * value for bound in (low, high))
        told = abs(value) <= MOST_SHIFT
        if guard == "rows":
            told &= (high is None or x + high >= 0) & (low is None or y + low <= size - 1)
        elif guard == "elements":
            told &= (low is None or low <= 0) and (high is None or size - 1 - high <= extent - 1)

    def span(first: Any, end: Any, otherwise: int) -> _Span:
        return np.where(told, np.clip(first, 0, count), 0), np.where(told, np.clip(end, 0, count), otherwise)

    zero = 0 * x
    seen = zero if low is None else (x + low) // step, zero + count if high is None else (y + high) // step + 1
    whole = zero if low is None else -(-(y + low) // step), zero + count if high is None else (x + high + 1) // step
    return span(*seen, count), span(*whole, 0)


def _indices(program: TileProgram, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest index on ``axis`` of the tiles of ``tile_starts``."""
    extent, inner, rows = program.axes[axis], math.prod(program.axes[axis + 1 :]), math.prod(program.axes[program.batch_axes :])
    starts = tile_starts(program, axis, _MOST)
    ends = np.minimum(starts + program.tile_rows, (starts // rows + 1) * rows)
    first, last = starts // inner, (ends - 1) // inner
    over = first // extent < last // extent  # the end of the axis, where its first index follows
    return np.where(over, 0, first % extent), np.where(over, extent - 1, last % extent)


def tile_starts(program: TileProgram, axis: int, most: int) -> np.ndarray:
    """The first rows of tiles that stand for all of them where the index on ``axis`` counts: of all tiles of a batch, or of
    ``most`` that are spread over one period of the index. At a stride over several periods they could all be at the same place of
    theirs.

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
    apart = math.gcd(size, period)  # of two places in a period where tiles start
    return _spread(period // apart, most) * apart


def _spread(n: int, most: int) -> np.ndarray:
    """The numbers below ``n``, or ``most`` of them."""
    return np.arange(n) if n <= most else np.arange(most) * n // most


def with_known_bounds(program: TileProgram) -> TileProgram:
    """``program`` without bounds that are shifted when it runs, for a target without code for them: what the mask hides is
    computed, and hidden."""
    stages = tuple(dataclasses.replace(stage, body=_known(stage.body)) for stage in program.stages)
    return dataclasses.replace(program, stages=stages)


def _known(body: Sequence[Instr]) -> tuple[Instr, ...]:
    found = list[Instr]()
    for i in body:
        if i.get("shifted") is None:
            found.append(i)
        elif i["within"][-1] == "whole":  # all of them are edges
            found += [Instr("copy", (v,), (out,)) for v, out in zip(i.inputs, i.outputs, strict=True)]
        else:
            params = tuple((name, value) for name, value in i.params if name not in ("within", "shifted"))
            found.append(dataclasses.replace(i, params=params))
    return tuple(found)

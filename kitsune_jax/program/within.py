"""Which iterations of a loop a tile runs: the loop's parameters ``within`` and ``shifted``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kitsune_jax.program.ir import Instr, TileProgram

MOST_SHIFT = 1 << 30


def met(
    program: TileProgram, instr: Instr, rows: np.ndarray[Any, np.dtype[Any]], number: Callable[[int], int] | None = None
) -> Sequence[int]:
    """The iterations of a loop that a tile of ``rows`` runs. ``number``: of an input array, by which bounds are shifted; without it
    the last row is taken to see the last element, as in a text that is read in pieces."""
    numbers, within, shifted = range(instr["count"]), instr.get("within"), instr.get("shifted")
    if within is None:
        return numbers
    axis, step, low, high, which = within
    index = np.unravel_index(rows, program.axes)[axis]
    x, y = int(index.min()), int(index.max())
    if shifted is not None:
        array, sign, guard, size = shifted
        extent = program.axes[axis]
        value = max(0, sign * (size - extent)) if number is None else number(array)
        low, high = (None if bound is None else bound + sign * value for bound in (low, high))
        of_rows = (high is not None and x + high < 0) or (low is not None and y + low > size - 1)
        of_elements = (low is not None and low > 0) or (high is not None and size - 1 - high > extent - 1)
        if abs(value) > MOST_SHIFT or (guard == "rows" and of_rows) or (guard == "elements" and of_elements):
            return range(0) if which == "whole" else numbers

    def inside(i: int, least: int, most: int, whole: bool) -> bool:
        first, last = i * step, (i + 1) * step - 1
        reached = first if whole else last, last if whole else first
        return (low is None or reached[0] >= least + low) and (high is None or reached[1] <= most + high)

    wanted = {"all": (True, False), "whole": (True,), "edges": (False,)}[which]
    return [i for i in numbers if inside(i, x, y, False) and inside(i, y, x, True) in wanted]


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

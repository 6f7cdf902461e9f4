"""Which iterations of a loop a tile runs: the loop's parameter ``within``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kitsune_jax.program.ir import Instr, TileProgram


def met(program: TileProgram, instr: Instr, rows: np.ndarray[Any, np.dtype[Any]]) -> Sequence[int]:
    """The iterations of a loop that a tile of ``rows`` runs."""
    numbers, within = range(instr["count"]), instr.get("within")
    if within is None:
        return numbers
    axis, step, low, high, which = within
    index = np.unravel_index(rows, program.axes)[axis]
    x, y = int(index.min()), int(index.max())

    def inside(i: int, least: int, most: int, whole: bool) -> bool:
        first, last = i * step, (i + 1) * step - 1
        reached = first if whole else last, last if whole else first
        return (low is None or reached[0] >= least + low) and (high is None or reached[1] <= most + high)

    wanted = {"all": (True, False), "whole": (True,), "edges": (False,)}[which]
    return [i for i in numbers if inside(i, x, y, False) and inside(i, y, x, True) in wanted]

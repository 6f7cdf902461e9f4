"""What a loop over the blocks of a tile does with its values.

Comes in: values of a stage. Goes out: ``Action``s, plain data that ``loop.py`` and ``segment.py`` turn into text.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """The value gets registers ``name`` of ``form``, or, with ``put``, an image: the C++ call that takes (vector, U4).

    ``push``: a copy, or an entry of a queue: the value stays where it was. ``reads``: instructions of the tile program that this
    stands for.
    """

    value: int
    name: str
    form: str
    put: str = ""
    push: bool = False
    reads: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Store:
    value: int
    array: int


@dataclasses.dataclass(frozen=True, slots=True)
class Fold:
    """Fold along the columns into ``name[2]``, or (``stream``) along the rows: into ``name`` (``scalar``) or one per column."""

    value: int
    how: str
    name: str
    stream: bool = False
    scalar: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class ToScratch:
    """Words of the value to its columns of the warp's scratch rows, from ``column`` on."""

    value: int
    scratch: str
    column: int


@dataclasses.dataclass(frozen=True, slots=True)
class ToPanel:
    """The value to a panel in shared memory, the operand of a weight gradient; ``panel``: the C++ object's name."""

    value: int
    panel: str


Action = Keep | Store | Fold | ToScratch | ToPanel

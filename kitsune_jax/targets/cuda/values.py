"""Where a value of a stage is while its code is generated.

Comes in: nothing. Goes out: ``Value`` and its places. A value is *pending* (a pointwise expression or a matmul that nobody has
asked for) until a loop evaluates it; what is read more than once then gets a home in registers or in a shared-memory image.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from kitsune_jax.graph import Scalar
from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import tiles


@dataclasses.dataclass(frozen=True, slots=True)
class Literal:
    value: Scalar


@dataclasses.dataclass(frozen=True, slots=True)
class Expression:
    """A pointwise instruction, evaluated where it is needed."""

    instr: Instr


@dataclasses.dataclass(frozen=True, slots=True)
class Multiply:
    """A matmul whose products are issued by the loop that reads it first.

    ``weight``: index of its recipe. ``pieces``: the values that make up its K. ``product``: the matmul's own value, by which its
    accumulators are named. ``bias``: a stationary vector that the accumulators start from.
    """

    product: int
    weight: int
    pieces: tuple[int, ...]
    bias: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Registers:
    """``form``: "pair" (u32, two 16-bit values each), "bit" (u32, 32 booleans each), "word" (one element each) or "row" (one per
    row)."""

    name: str
    form: str


@dataclasses.dataclass(frozen=True, slots=True)
class InImage:
    """A register image; ``get(i)`` of the C++ name gives vector i."""

    name: str
    form: str


@dataclasses.dataclass(frozen=True, slots=True)
class InArray:
    """Rows of a streamed input array."""

    array: int


@dataclasses.dataclass(frozen=True, slots=True)
class InVector:
    """A stationary vector or scalar: ``offset`` in words from the first vector.

    ``slab``, ``layer``: words from one slab's part to the next, and from one layer's to the next in a loop over layers.
    """

    offset: int
    scalar: bool
    slab: int = 0
    layer: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class InScratch:
    """Columns of the warp's scratch rows ``name``; the vector at ``table`` says which, -1 stands for ``fill``."""

    name: str
    table: int
    fill: str


@dataclasses.dataclass(frozen=True, slots=True)
class Splat:
    """One number per row (or a constant), seen as a tile."""

    of: int


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """Whole blocks of other values: (value, first block there, blocks)."""

    parts: tuple[tuple[int, int, int], ...]


Place: TypeAlias = "Literal | Expression | Multiply | Registers | InImage | InArray | InVector | InScratch | Splat | Parts"


@dataclasses.dataclass(slots=True)
class Value:
    """``n``: logical columns of a row; ``row``: it is one number per row; ``slab``: it is one slab of a wider value."""

    n: int
    dtype: str
    row: bool
    place: Place | None = None
    slab: bool = False

    @property
    def width(self) -> int:
        return tiles.padded(self.n)

    @property
    def form(self) -> str:
        """How its elements lie in registers. A mask is bits, but of a slab: other stages read several slabs as one value."""
        return "pair" if tiles.is_half(self.dtype) else "bit" if self.dtype == "bool" and not self.slab else "word"

    @property
    def registers(self) -> int:
        """32-bit registers a thread needs to hold it."""
        return 2 if self.row else tiles.registers(self.width, self.form)


def queue_form(dtype: str, slabs: bool) -> str:
    """How the elements of a queue's entries lie. ``slabs``: a split stage writes or reads it."""
    return Value(2, dtype, False, slab=slabs).form


@dataclasses.dataclass(frozen=True, slots=True)
class PanelSum:
    """The sum over the rows of an operand of a weight gradient: object ``columns{sink}``, accumulators ``sink{sink}``.

    ``width``: of the panel; ``columns``: of the operand, or of one slab of it if ``slabs``; ``element``: of the result in memory.
    """

    sink: int
    width: int
    columns: int
    slabs: bool
    element: str


@dataclasses.dataclass(frozen=True, slots=True)
class GradientCode:
    """A weight gradient of a stage: accumulators ``sum{sink}``, the object ``gradient{sink}`` that adds to them; ``element``: of
    its result in memory."""

    sink: int
    shape: tiles.GradientShape
    element: str
    sums: tuple[PanelSum, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SinkCode:
    """A sink of a stage: accumulator ``name``; ``scalar`` or ``width`` columns; ``quad``: threads of a quad hold different
    parts.
    """

    sink: int
    name: str
    how: str
    type: str
    scalar: bool
    width: int
    quad: bool

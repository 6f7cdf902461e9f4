"""The instructions of the CPU program that go by indices. ``bytecode`` is the format that they are part of, and hands them on."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kitsune_jax.targets.cpu.operands import Operand


@dataclasses.dataclass(frozen=True)
class Gather:
    """out(rows, *index_extents, *extents) = row index(rows, *index_extents) of ``table``, which has ``count`` rows of ``extents``.

    ``table.row_stride`` is the distance of its rows. An index below 0 or beyond count - 1 takes the nearest row (``mode`` CLIP) or
    ``fill`` (FILL), a number as ``Micro.imm`` has it. One dtype; the index is of any integer dtype.
    """

    CODE: ClassVar[int] = 9
    table: Operand
    count: int
    mode: int
    fill: tuple[float, ...]
    index_extents: tuple[int, ...]
    extents: tuple[int, ...]
    index: Operand
    out: Operand


@dataclasses.dataclass(frozen=True)
class AccumulateAt:
    """Row index(rows, *index_extents) of the sink's accumulator (dense, [count, *extents]) folded with
    x(rows, *index_extents, *extents), whose ``extents`` lie dense. Indices below 0 or beyond count - 1 are dropped; rows that none
    names hold the identity. x has the sink's dtype, or a 16-bit one that is computed in it.

    ``sorted``: the others never decrease from one row of the stream to the next; if they do, the result is any numbers. Nothing
    else folds into such a sink. ``ordered``: row r of x, an input, is at element ``order[r]`` of the program's order; there is an
    index for each row.
    """

    CODE: ClassVar[int] = 10
    sink: int
    count: int
    index_extents: tuple[int, ...]
    extents: tuple[int, ...]
    index: Operand
    x: Operand
    sorted: int = 0
    ordered: int = 0


@dataclasses.dataclass(frozen=True)
class RunMax:
    """out(rows, *extents) = the largest x of the rows around it in the tile that have its index(rows), element by element.

    ``extents`` lie dense in x and out, which have one 16-bit or 32-bit float dtype. Indices outside of [0, count) are nobody's.
    """

    CODE: ClassVar[int] = 17
    count: int
    extents: tuple[int, ...]
    index: Operand
    x: Operand
    out: Operand


@dataclasses.dataclass(frozen=True)
class AccumulateScaled(AccumulateAt):
    """AccumulateAt of rows that were scaled by e^-top, into sums that are kept with what they are scaled by: two sums are added up
    at the larger of their tops. ``sorted``, and not ``ordered``; one index for each row; a sum of float32.

    ``top(rows, heads)``: one for each of the first dimensions of a row, ``heads`` in all, the same for all rows of one index in a
    tile; one that is not finite stands for 0. ``finite``: otherwise a sum whose largest top is not finite is NaN.
    """

    CODE: ClassVar[int] = 18
    top: Operand = dataclasses.field(kw_only=True)
    heads: int = dataclasses.field(kw_only=True)
    finite: int = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class AccumulateTaken(AccumulateScaled):
    """A sum of float32 by ``sorted`` indices, one for each row, of rows that are read where a table has them and multiplied: ``x``
    is the table, and its row stride the distance of its ``rows`` rows, of one 16-bit or 32-bit float dtype.

    Row r is row taken(r) of the table, by ``mode`` and ``fill`` as of Gather, times factor(r, factors) of float32, which lie
    dense: each for as many elements of the row, one after the other. Without ``factors`` rows are added up as they are. Without
    ``heads`` the sum is that of AccumulateAt, and ``top`` any operand.
    """

    CODE: ClassVar[int] = 19
    rows: int = dataclasses.field(kw_only=True)
    mode: int = dataclasses.field(kw_only=True)
    fill: tuple[float, ...] = dataclasses.field(kw_only=True)
    taken: Operand = dataclasses.field(kw_only=True)
    factor: Operand = dataclasses.field(kw_only=True)
    factors: int = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a tile, dense; or, with ``rows`` above 0, those that ``taken`` names of a table of so many, whose row stride is their
    distance, by ``mode`` and ``fill`` as of Gather. Without a table these are any."""

    x: Operand
    rows: int
    mode: int
    fill: tuple[float, ...]
    taken: Operand


@dataclasses.dataclass(frozen=True)
class TakenDot:
    """out(rows, h) = the sum of the products of elements [h * inner, (h + 1) * inner) of two rows, h < ``heads``, in float32.

    x and y have one 16-bit or 32-bit float dtype, and out any of these; the elements of a row lie dense in all.
    """

    CODE: ClassVar[int] = 20
    heads: int
    inner: int
    x: Rows
    y: Rows
    out: Operand


@dataclasses.dataclass(frozen=True)
class Take:
    """out(rows, *outer, i, :) = x(rows, *outer, index[i], :), ``inner`` elements each, i < ``indices``; the dimension: ``count``.

    The index does not depend on the row. x and out have a stride for each of ``outer``, then that of the dimension and of the
    indices, which is ``inner``: what is selected lies dense. ``mode`` and ``fill`` as of Gather.
    """

    CODE: ClassVar[int] = 15
    count: int
    indices: int
    inner: int
    outer: tuple[int, ...]
    index: Operand
    x: Operand
    out: Operand
    mode: int
    fill: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Put:
    """out(rows, *outer, k, :) = sum of x(rows, *outer, i, :) over the i with index[i] == k < ``count``; the rest as of Take.

    16-bit floats are added up in float32. Indices below 0 or beyond count - 1 are dropped.
    """

    CODE: ClassVar[int] = 16
    count: int
    indices: int
    inner: int
    outer: tuple[int, ...]
    index: Operand
    x: Operand
    out: Operand

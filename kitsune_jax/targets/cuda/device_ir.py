"""The device IR: what the stages of a kernel do, as data that passes take and return and that the printers spell out.

A stage is a tuple of nodes in the order of the device's work: names, expressions and loops are here, statements around the loops in
``statements.py``, what is around the tiles in ``frame_ir.py``. Names are ``Ref``s and numbers that may differ between equal stages
are ``Constant``s, so whether two stages are equal is a comparison of data (``sharing.py``). ``Evaluate`` and ``SingleColumn`` exist
between passes only: ``chunks.py`` spells them out. Nothing is C++ text, but for templates of operators, which the op table has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, dataclass_transform


@dataclass_transform(frozen_default=True)
class Node:
    """A subclass is a frozen dataclass of the fields that it names."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True)(cls)

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        """Their names."""
        return cls.__match_args__  # type: ignore[attr-defined, no-any-return]


def rebuild(x: Any, change: Callable[[Any], Any]) -> Any:
    """``x`` with ``change`` applied to every node in it, innermost first."""
    if isinstance(x, tuple):
        return tuple([rebuild(y, change) for y in x])
    if not isinstance(x, Node):
        return x
    old = [getattr(x, name) for name in x.fields()]
    new = [rebuild(y, change) for y in old]
    return change(x if all(a is b for a, b in zip(old, new, strict=True)) else type(x)(*new))


# -- names


class Ref(Node):
    """A named object of a stage. ``of``: what it belongs to in the tile program (a value, a queue, a sink, an array), or a
    count."""

    kind: str
    of: int
    part: str = ""


class Constant(Node):
    """A number, or a member of the struct ``of``, that may differ between equal stages: uses with the same ``name`` and ``key`` are
    the same constant. ``declaration``: as a member of a struct, with {} for its name."""

    name: str
    key: Hashable
    value: str
    declaration: str
    of: str = ""

    @property
    def initializer(self) -> str:
        return f"&{self.of}::{self.value}" if self.of else self.value


def number(name: str, key: Hashable, value: int, type_: str = "u32") -> Constant:
    return Constant(name, key, str(value), f"{type_} {{}}")


def parameter(role: str, k: int) -> Constant:
    """A pointer to rows: input ("in"), table ("table") or output ("out") ``k`` of the kernel's parameters."""
    type_ = "void*" if role == "out" else "const void*"
    return Constant(role, k, f"{role}{k}", f"{type_} Params::*{{}}", "Params")


def ring(queue: int, depth: int) -> Constant:
    """The barriers of the lanes' rings of a queue, in the header."""
    return Constant("ring", queue, f"queue{queue}", f"Ring<{depth}> (Header::*{{}})[kLanes]", "Header")


class Vector(Node):
    """A word of a stage's stationary vectors: ``offset`` words into its vectors number ``group``. Layout makes a Constant of it."""

    group: int
    offset: int


class Address(Node):
    """Where a stationary vector starts. ``slab``, ``layer``: words from one slab's part to the next, and from one layer's."""

    at: Vector | Constant
    slab: int = 0
    layer: int = 0


# -- expressions


class Expr(Node):
    """Of an element (row h, column c of block b) or of a row (h)."""


class Literal(Expr):
    text: str


class Read(Expr):
    """``form``: how the object holds its elements (``printing.READS``); ``shift``: blocks between the loop's and the object's."""

    form: str
    ref: Ref
    dtype: str
    shift: int = 0


class ScratchFold(Node):
    """By ``how``, of ``count`` columns that are ``step`` apart."""

    how: str
    count: int
    step: int


class ScratchList(Node):
    """Columns that are added up: a vector of them, one list after the other."""

    columns: Address


class SumOfList(Expr):
    """The sum of those columns of the warp's scratch rows that ``columns`` lists, from where the vector ``first`` says that the
    list of the element's column begins to where the next one begins. ``width``: of the loop's tiles, 0 for column 0 of a row."""

    dtype: str
    first: Address
    columns: Address
    width: int
    shift: int = 0


class FromScratch(Expr):
    """An element of the warp's scratch rows: its column is ``column``, or what ``index`` holds, where -1 stands for ``fill``; or
    ``fold``s that column and others."""

    dtype: str
    column: int = -1
    index: Ref | None = None
    fill: Expr | None = None
    fold: ScratchFold | None = None


class RowIndex(Expr):
    """The mixed-radix index over stream axes: (axis, extent), outermost first."""

    axes: tuple[tuple[int, int], ...]


class Identity(Expr):
    how: str
    dtype: str


class Apply(Expr):
    """An operator: ``template`` is C++ with {0}, {1}, ... for the operands."""

    template: str
    operands: tuple[Expr, ...]


# -- arrays in global memory


class Rows(Node):
    """How a thread reaches its columns of an array's rows. ``columns``: logical ones of a row; ``access``: bytes of an access, or
    "kStaged"; ``strides``: where columns do not lie together, (extent, element stride) of the row's dimensions, innermost first;
    ``pairs``: loads bring 16-bit values as pairs."""

    ref: Ref
    dtype: str
    columns: int
    access: str
    strides: tuple[tuple[int, int], ...]
    pairs: bool


# -- what a loop over the blocks of a tile does: with values (before ``chunks.py``) ...


class Action(Node):
    """What is done with ``value``, element by element."""

    value: int


class Keep(Action):
    """The value gets registers ``ref`` of ``form``; or goes vector by vector ``to`` an image or a queue's entry.

    ``push``: a copy, or an entry of a queue: the value stays where it was. ``reads``: instructions of the tile program that this
    stands for. ``first``: the block with which registers begin; ``over``: they are those of another value, which is read no more.
    """

    ref: Ref
    form: str
    to: Ref | None = None
    push: bool = False
    reads: int = 0
    first: int = 0
    over: bool = False


class Store(Action):
    rows: Rows
    slab: int  # columns of one, where the value is a slab
    groups: int = 1  # of columns; the slab has as many of each


class Fold(Action):
    """Fold along the columns into ``ref[2]``, or (``stream``) along the rows: into ``ref`` (``scalar``) or one per column."""

    how: str
    ref: Ref
    stream: bool = False
    scalar: bool = True


class ToScratch(Action):
    """Words of the value to its columns of the warp's scratch rows, from ``column`` on."""

    column: int


class ToSegments(Action):
    """The value to the warp's scratch rows, a block at a time, and from there into the rows of ``ref``'s result. ``runs``: of a sum
    that has none of its own."""

    ref: Ref
    how: str
    dtype: str
    runs: Ref | None = None


class AddToRows(Action):
    """Atomically to the rows of a result of ``columns`` floats whose addresses are ``ref``, ``access`` bytes at a time."""

    ref: Ref
    columns: int
    access: int


class FoldToRows(Action):
    """The value to the warp's scratch rows, a block at a time, and from there atomically into the rows that ``ref`` says."""

    ref: Ref


class ToPanel(Action):
    """The value to a panel in shared memory, the operand of a weight gradient."""

    panel: Ref


class Evaluate(Node):
    """A loop over all blocks of tiles of ``width`` columns. ``homes``: where what it reads is at this moment, by value."""

    width: int
    actions: tuple[Action, ...]
    products: tuple[int, ...]
    homes: tuple[tuple[int, Any], ...]


class SingleColumn(Node):
    """All of a product that has one column of results."""

    value: int
    homes: tuple[tuple[int, Any], ...]


# -- ... and with elements (after it)


class Step(Node):
    """What a block, or an element of it, needs."""


class MaskWords(Step):
    """In front of the loop: all words of a mask's image."""

    ref: Ref
    image: Ref
    width: int


class ArrayBlock(Step):
    """Once per block: a thread's columns of both rows. ``slab``: columns of one, where the value is a slab, of ``groups``."""

    ref: Ref
    rows: Rows
    shift: int
    slab: int
    groups: int = 1


class VectorBlock(Step):
    ref: Ref
    address: Address
    dtype: str
    shift: int


class ImageBlock(Step):
    ref: Ref
    image: Ref
    form: str
    shift: int


class Let(Step):
    """Per element: ``ref`` is the value of ``expr``. ``dtype``: None for a column's index out of a vector."""

    ref: Ref
    dtype: str
    expr: Expr


class Put(Step):
    """Per element: ``action`` gets ``x``; ``pair``: x is both elements of a pair, packed. ``columns``: where it is fewer than the
    loop's, those beyond are zero, or not folded."""

    action: Action
    x: Expr
    dtype: str
    columns: int
    pair: bool = False


class BlockLoop(Node):
    """A loop over the blocks [first, last) of tiles of ``width`` columns. ``reads``: whose registers and images."""

    width: int
    first: int
    last: int
    steps: tuple[Step, ...]
    reads: tuple[Ref, ...]

"""The device IR: what the stages of a kernel do, as data that passes take and return and that the printer spells out.

A stage is a tuple of nodes in the order of the device's work. Names are ``Ref``s and numbers that may differ between equal stages
are ``Constant``s, so whether two stages are equal is a comparison of data (``sharing.py``). Two of the nodes exist between passes
only: ``Evaluate`` and ``SingleColumn`` stand for loops and products that ``chunks.py`` spells out. Nothing here is C++ text, but
for the templates of operators, which come from the op table.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

from kitsune_jax.targets.cuda.tiles import GradientShape


@dataclass(frozen=True, slots=True)
class Ref:
    """A named object of a stage. ``of``: what it belongs to in the tile program (a value, a queue, a sink, an array), or a
    count."""

    kind: str
    of: int
    part: str = ""


@dataclass(frozen=True, slots=True)
class Constant:
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
    """A pointer to rows: input ("in") or output ("out") ``k`` of the kernel's parameters."""
    type_ = "const void*" if role == "in" else "void*"
    return Constant(role, k, f"{role}{k}", f"{type_} Params::*{{}}", "Params")


def ring(queue: int, depth: int) -> Constant:
    """The barriers of the lanes' rings of a queue, in the header."""
    return Constant("ring", queue, f"queue{queue}", f"Ring<{depth}> (Header::*{{}})[kLanes]", "Header")


@dataclass(frozen=True, slots=True)
class Vector:
    """A word of a stage's stationary vectors: ``offset`` words into its vectors number ``group``. Layout makes a Constant of it."""

    group: int
    offset: int


@dataclass(frozen=True, slots=True)
class Address:
    """Where a stationary vector starts. ``slab``, ``layer``: words from one slab's part to the next, and from one layer's."""

    at: Vector | Constant
    slab: int = 0
    layer: int = 0


# -- expressions: of an element (row h, column c of block b) or of a row (h)


@dataclass(frozen=True, slots=True)
class Literal:
    text: str


@dataclass(frozen=True, slots=True)
class Read:
    """``form``: how the object holds its elements (``printing.READS``); ``shift``: blocks between the loop's and the object's."""

    form: str
    ref: Ref
    dtype: str
    shift: int = 0


@dataclass(frozen=True, slots=True)
class FromScratch:
    """An element of the warp's scratch rows: its column is ``column``, or what ``index`` holds, where -1 stands for ``fill``."""

    dtype: str
    column: int = -1
    index: Ref | None = None
    fill: Expr | None = None


@dataclass(frozen=True, slots=True)
class RowIndex:
    """The mixed-radix index over stream axes: (axis, extent), outermost first."""

    axes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Identity:
    how: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Apply:
    """An operator: ``template`` is C++ with {0}, {1}, ... for the operands."""

    template: str
    operands: tuple[Expr, ...]


Expr: TypeAlias = "Literal | Read | FromScratch | RowIndex | Identity | Apply"


# -- arrays in global memory


@dataclass(frozen=True, slots=True)
class Rows:
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


@dataclass(frozen=True, slots=True)
class Keep:
    """The value gets registers ``ref`` of ``form``; or goes vector by vector ``to`` an image or a queue's entry.

    ``push``: a copy, or an entry of a queue: the value stays where it was. ``reads``: instructions of the tile program that this
    stands for.
    """

    value: int
    ref: Ref
    form: str
    to: Ref | None = None
    push: bool = False
    reads: int = 0


@dataclass(frozen=True, slots=True)
class Store:
    value: int
    rows: Rows
    slab: int  # columns of one, where the value is a slab


@dataclass(frozen=True, slots=True)
class Fold:
    """Fold along the columns into ``ref[2]``, or (``stream``) along the rows: into ``ref`` (``scalar``) or one per column."""

    value: int
    how: str
    ref: Ref
    stream: bool = False
    scalar: bool = True


@dataclass(frozen=True, slots=True)
class ToScratch:
    """Words of the value to its columns of the warp's scratch rows, from ``column`` on."""

    value: int
    column: int


@dataclass(frozen=True, slots=True)
class ToPanel:
    """The value to a panel in shared memory, the operand of a weight gradient."""

    value: int
    panel: Ref


Action = Keep | Store | Fold | ToScratch | ToPanel


@dataclass(frozen=True, slots=True)
class Evaluate:
    """A loop over all blocks of tiles of ``width`` columns. ``homes``: where what it reads is at this moment, by value."""

    width: int
    actions: tuple[Action, ...]
    products: tuple[int, ...]
    homes: tuple[tuple[int, Any], ...]


@dataclass(frozen=True, slots=True)
class SingleColumn:
    """All of a product that has one column of results."""

    value: int
    homes: tuple[tuple[int, Any], ...]


# -- ... and with elements (after it)


@dataclass(frozen=True, slots=True)
class MaskWords:
    """In front of the loop: all words of a mask's image."""

    ref: Ref
    image: Ref
    width: int


@dataclass(frozen=True, slots=True)
class ArrayBlock:
    """Once per block: a thread's columns of both rows. ``slab``: columns of one, where the value is a slab."""

    ref: Ref
    rows: Rows
    shift: int
    slab: int


@dataclass(frozen=True, slots=True)
class VectorBlock:
    ref: Ref
    address: Address
    dtype: str
    shift: int


@dataclass(frozen=True, slots=True)
class ImageBlock:
    ref: Ref
    image: Ref
    form: str
    shift: int


@dataclass(frozen=True, slots=True)
class Let:
    """Per element: ``ref`` is the value of ``expr``. ``dtype``: None for a column's index out of a vector."""

    ref: Ref
    dtype: str
    expr: Expr


@dataclass(frozen=True, slots=True)
class Put:
    """Per element: ``action`` gets ``x``; ``pair``: x is both elements of a pair, packed. ``columns``: where it is fewer than the
    loop's, those beyond are zero, or not folded."""

    action: Action
    x: Expr
    dtype: str
    columns: int
    pair: bool = False


Step = MaskWords | ArrayBlock | VectorBlock | ImageBlock | Let | Put


@dataclass(frozen=True, slots=True)
class BlockLoop:
    """A loop over the blocks [first, last) of tiles of ``width`` columns. ``reads``: whose registers and images."""

    width: int
    first: int
    last: int
    steps: tuple[Step, ...]
    reads: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class Registers:
    """Declares ``count`` registers of a value; of masks they start as zeros."""

    ref: Ref
    form: str
    dtype: str
    count: int
    words: bool = False  # on their way into an image


@dataclass(frozen=True, slots=True)
class PutMask:
    """All vectors of a mask to an image or an entry, after the loop: one holds the bits of several blocks."""

    ref: Ref
    to: Ref
    width: int


# -- rows: one number per row, in two registers


@dataclass(frozen=True, slots=True)
class SetRow:
    ref: Ref
    dtype: str
    expr: Expr


@dataclass(frozen=True, slots=True)
class LoadRow:
    ref: Ref
    rows: Rows


@dataclass(frozen=True, slots=True)
class PopRow:
    ref: Ref
    entry: Ref
    pop: Ref
    dtype: str


@dataclass(frozen=True, slots=True)
class StartFold:
    ref: Ref
    how: str
    dtype: str


@dataclass(frozen=True, slots=True)
class FoldQuad:
    ref: Ref
    how: str


@dataclass(frozen=True, slots=True)
class FoldRow:
    sink: Ref
    how: str
    dtype: str
    row: Expr


@dataclass(frozen=True, slots=True)
class StoreRow:
    rows: Rows
    row: Expr
    once: bool


@dataclass(frozen=True, slots=True)
class RowToScratch:
    column: int
    row: Expr


@dataclass(frozen=True, slots=True)
class RowTile:
    """A row value as the first column of a tile of 8: the operand of a product with K = 1."""

    ref: Ref
    row: Expr
    dtype: str


@dataclass(frozen=True, slots=True)
class SyncWarp:
    """Whoever read the warp's scratch rows before is done, or whoever wrote them."""


# -- queues


@dataclass(frozen=True, slots=True)
class Acquire:
    queue: Ref
    write: bool


@dataclass(frozen=True, slots=True)
class Release:
    queue: Ref
    write: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """Names a queue's entry: ``ref(i)`` reads vector i, or with ``write`` ``ref(i, v)`` writes it. ``slab``: vectors of one, where
    it is a slab; ``once``: by the first of the CTAs that all have it."""

    ref: Ref
    queue: Ref
    slab: int
    write: bool = False
    once: bool = False


@dataclass(frozen=True, slots=True)
class PushRow:
    queue: Ref
    row: Expr
    once: bool


# -- products


@dataclass(frozen=True, slots=True)
class Operand:
    """``kind``: "registers", "copy" (registers of an entry's copy), "array" (of rows that have been read), "rows" (fetched on the
    way), or "image"; ``dtype``: of the product; ``owner``: what must be alive until the product is complete."""

    kind: str
    ref: Ref
    width: int
    dtype: str
    owner: Ref
    rows: Rows | None = None

    @property
    def fetched(self) -> bool:
        return self.kind in ("rows", "image")


@dataclass(frozen=True, slots=True)
class Feed:
    operand: Operand
    first: int  # block of K
    done: int  # blocks that are complete before it


@dataclass(frozen=True, slots=True)
class Resident:
    """Weights in shared memory. ``weight``: of the stage; ``offset``: bytes into it; ``at``: set by the layout."""

    weight: int
    offset: int
    layer: int
    at: Constant | None = None


@dataclass(frozen=True, slots=True)
class Issue:
    """Products of a chunk of columns into accumulators ``ref``. ``registers``: accumulators and fragments, for ``liveness``;
    ``k_chunks`` of ``weight``: for the loader."""

    ref: Ref
    columns: int
    dtype: str
    rolling: bool
    weights: Resident | None  # None: streamed
    bias: tuple[Address, int, int] | None  # (vector, its width, first block)
    feeds: tuple[Feed, ...]
    weight: int
    chunk: int
    k_chunks: int
    registers: int


@dataclass(frozen=True, slots=True)
class Complete:
    """Waits until at most ``pending`` products are in flight. ``done`` of ``blocks`` blocks of K are complete already."""

    ref: Ref
    pending: int
    done: int
    blocks: int
    owners: tuple[Ref, ...]


# -- layers


@dataclass(frozen=True, slots=True)
class LayerLoop:
    """``weights``: of one layer, whose numbers follow each other from ``first_weight`` on."""

    layers: int
    first_weight: int
    weights: int
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class TurnImages:
    """Two images that take turns: ``first`` is the even layers' operand."""

    first: Ref
    second: Ref


@dataclass(frozen=True, slots=True)
class CopyRegisters:
    to: Ref
    source: Ref
    count: int


@dataclass(frozen=True, slots=True)
class Use:
    """Nothing on the device: registers or images of these owners must still be there."""

    owners: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class Define:
    """Nothing on the device: ``registers`` more are alive from now to their owner's last use."""

    owner: Ref
    registers: int


# -- weight gradients


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel at ``at`` bytes of the lane's, ``width`` columns wide."""

    ref: Ref
    dtype: str
    width: int
    at: int


@dataclass(frozen=True, slots=True)
class RowToPanel:
    panel: Ref
    tile: Ref


@dataclass(frozen=True, slots=True)
class AddGradient:
    gradient: Ref
    sums: tuple[Ref, ...]


# -- once per kernel


@dataclass(frozen=True, slots=True)
class LoadScalar:
    """``once``: in front of the tiles, else for a layer."""

    ref: Ref
    dtype: str
    address: Address
    once: bool


@dataclass(frozen=True, slots=True)
class SinkStart:
    """``width``: columns, 0 for a scalar; ``quad``: threads of a quad hold different parts."""

    ref: Ref
    how: str
    dtype: str
    width: int
    quad: bool


@dataclass(frozen=True, slots=True)
class ClearPanel:
    panel: Panel


@dataclass(frozen=True, slots=True)
class GradientStart:
    gradient: Ref
    dtype: str
    x: Panel
    y: Panel
    shape: GradientShape


@dataclass(frozen=True, slots=True)
class PanelSumStart:
    """The sum over the rows of a panel of ``gradient``. ``columns``: of the panel's operand, or of one slab of it if ``slabs``."""

    sums: Ref
    panel: Panel
    columns: int
    slabs: bool
    gradient: Ref


# -- once per tile, in front


@dataclass(frozen=True, slots=True)
class Image:
    """Of the value ``ref.of``; ``at``: bytes of the lane's scratch, set by the layout."""

    ref: Ref
    at: int = -1


@dataclass(frozen=True, slots=True)
class AxisIndices:
    extents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowAddresses:
    """``strides``: (axis, bytes). ``staged``: they lie in shared memory."""

    ref: Ref
    array: Constant
    strides: tuple[tuple[int, int], ...]
    staged: bool


Node: TypeAlias = Any


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def rebuild(x: Any, change: Callable[[Any], Any]) -> Any:
    """``x`` with ``change`` applied to every node in it, innermost first."""
    if isinstance(x, tuple):
        return tuple([rebuild(y, change) for y in x])
    fields = _fields(x.__class__)
    if not fields:
        return x
    old = [getattr(x, name) for name in fields]
    new = [rebuild(y, change) for y in old]
    return change(x if all(a is b for a, b in zip(old, new, strict=True)) else type(x)(*new))

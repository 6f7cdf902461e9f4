"""The device IR: what the stages of a kernel do, as data that passes take and return and that the printers spell out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, dataclass_transform

from kitsune_jax.targets.cuda import tiles
from kitsune_jax.targets.cuda.tiles import GradientShape

# ----------------------------------------------------------------------------------------------------------------------------------
# The device IR: what the stages of a kernel do, as data that passes take and return and that the printers spell out.
#
# A stage is a tuple of nodes in the order of the device's work: names, expressions and loops are here, statements around the loops
# in ``ir.py``, what is around the tiles in ``frame_ir.py``. Names are ``Ref``s and numbers that may differ between equal stages are
# ``Constant``s, so whether two stages are equal is a comparison of data (``layout.py``). ``Evaluate`` and ``SingleColumn`` exist
# between passes only: ``stage/chunks.py`` spells them out. Nothing is C++ text, but for templates of operators, which the op table
# has.
# ----------------------------------------------------------------------------------------------------------------------------------


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


# -- what a loop over the blocks of a tile does: with values (before ``stage/chunks.py``) ...


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


# ----------------------------------------------------------------------------------------------------------------------------------
# The device IR, continued: products for each row, whose operands pass through shared memory row by row.
#
# Like ``ir.py``: data that ``stage/products.py`` makes and ``print_stage.py`` spells out.
# ----------------------------------------------------------------------------------------------------------------------------------

_WARPS = tiles.GROUP_THREADS // 32
_MOST_OF_TWO_SLOTS = 1 << 14  # bytes of two slots of a warp at most; wider operands get one


class KeepAddress(Node):
    """The addresses of the rows ``ref`` become number ``number`` of those that the lane keeps in shared memory. ``stored``: they
    are written to, and those beyond the stream are null."""

    ref: Ref
    number: int
    stored: bool


class Copied(Node):
    """Elements of an operand from ``first`` on: of ``pieces`` sources, ``count`` each. ``how``: "async" (16 bytes at a time),
    "elements" or "staged", of the addresses from ``source`` on; or "scratch", of the warp's scratch rows from column ``source`` on.
    """

    how: str
    source: int
    pieces: int
    first: int
    count: int


class RowOperand(Node):
    """``free`` times K elements of a row. ``across``: K is the outer dimension."""

    free: int
    across: bool
    copied: tuple[Copied, ...]

    def slot_bytes(self, k: int, size: int) -> int:
        """``RowOperand::kBytes`` of stage/row_product.h."""
        run, runs = (self.free, k) if self.across else (k, self.free)
        return runs * (-(-run * size // 16) | 1) * 16


class ToRows(Node):
    """To the rows of an array, whose addresses are number ``number``. ``pairs``: they start on a multiple of four bytes."""

    number: int
    pairs: bool


class RowProduct(Node):
    """x y^T of each row, of operands of ``dtype``, to the image ``to`` of a value of ``out`` with ``columns`` columns, or to the
    rows of an array. ``y`` is None where it is x. ``picks``: a vector that says which element of the product each column is, -1
    for ``fill``."""

    to: Ref | ToRows
    dtype: str
    k: int
    x: RowOperand
    y: RowOperand | None
    out: str
    columns: int
    picks: Address | None
    fill: Expr | None

    @property
    def others(self) -> RowOperand:
        return self.y or self.x

    @property
    def slots(self) -> int:
        return 2 if 2 * self._slot <= _MOST_OF_TWO_SLOTS else 1

    @property
    def _slot(self) -> int:
        size = 2 if tiles.is_half(self.dtype) else 4
        return self.x.slot_bytes(self.k, size) + (self.y.slot_bytes(self.k, size) if self.y else 0)

    @property
    def bytes(self) -> int:
        """Shared memory of a lane (``RowProduct::kBytes``)."""
        return _WARPS * (self.slots * self._slot + -(-self.x.free * self.others.free // 4) * 16)


class RowMemory(Node):
    """Where a lane keeps ``addresses`` for each row, at byte ``at``, and its warps work on products, in ``bytes`` from ``work`` on:
    a warp has the same part for all of them, because nothing but the warp itself says when one is done."""

    addresses: int
    at: int
    work: int
    bytes: int


def address_bytes(count: int) -> int:
    """Shared memory of a lane for so many addresses of each of its rows (``RowAddresses::kBytes``)."""
    return tiles.TILE_ROWS * 8 * count


# ----------------------------------------------------------------------------------------------------------------------------------
# The device IR, continued: sinks by indices, by runs of sorted ones, atomically, and those of a segment softmax.
#
# Like ``ir.py``: data that ``stage/outputs.py`` and ``stage/outputs.py`` make and ``print_stage.py`` spells out.
# ----------------------------------------------------------------------------------------------------------------------------------


class SegmentRuns(Node):
    """In front of the blocks of a tile: the runs of equal ``index`` among its rows, of ``rows`` that the result has; where they are
    not ``sorted``, the indices themselves."""

    ref: Ref
    index: Expr
    rows: int
    sorted: bool = True


class RowToSegments(Node):
    """All of a tile that is one number per row."""

    ref: Ref
    how: str
    dtype: str
    row: Expr
    runs: Ref | None = None


class JoinSegments(Node):
    ref: Ref
    runs: Ref | None = None


# -- atomic sums, maxima and minima


class SummedRows(Node):
    """Where the thread's two rows are added up: in the rows ``index`` of the ``rows`` of ``out``, of ``columns`` floats each; null
    where a row is added to none."""

    ref: Ref
    out: Constant
    index: Expr
    rows: int
    columns: int


class AddRow(Node):
    """One number of each row is added at ``ref``."""

    ref: Ref
    row: Expr


class FoldedRows(Node):
    """Which of the ``rows`` rows of ``out``, of ``columns`` numbers of ``dtype`` each, ``index`` says: the tile, of ``width``
    columns, is folded into them by ``how``."""

    ref: Ref
    how: str
    dtype: str
    width: int
    out: Constant
    index: Expr
    rows: int
    columns: int


class FoldRowAt(Node):
    """All of a tile that is one number per row."""

    ref: Ref
    row: Expr


# -- sums of a segment softmax


class RowRuns(Node):
    """The runs of equal ``index`` among the rows of a warp, of ``rows`` that the results have: for all sums of a softmax."""

    ref: Ref
    index: Expr
    rows: int


class TopsStart(Node):
    """``columns``: the scores of a row. ``at``: bytes into the lane's memory for segments."""

    ref: Ref
    columns: int
    at: int

    @property
    def bytes(self) -> int:
        return tiles.tops_bytes(self.columns)


class FindTops(Node):
    """The scores in the warp's scratch rows become the largest ones of their runs."""

    ref: Ref
    runs: Ref


class BeginSegments(Node):
    """In front of the blocks of a tile of a sum whose ``runs`` are known."""

    ref: Ref
    runs: Ref


class Tops(Node):
    """What a sum of a softmax is scaled by: ``columns`` scores of a row, those of ``ref``. ``finite``: 0 stands for a largest score
    that is not finite."""

    ref: Ref
    columns: int
    finite: bool


# ----------------------------------------------------------------------------------------------------------------------------------
# The device IR, continued: statements around the loops over a tile's blocks, and what a stage sets up for them.
# ----------------------------------------------------------------------------------------------------------------------------------


class Registers(Node):
    """Declares ``count`` registers of a value; of masks they start as zeros."""

    ref: Ref
    form: str
    dtype: str
    count: int
    words: bool = False  # on their way into an image


class PutMask(Node):
    """All vectors of a mask to an image or an entry, after the loop: one holds the bits of several blocks."""

    ref: Ref
    to: Ref
    width: int


# -- rows: one number per row, in two registers


class SetRow(Node):
    ref: Ref
    dtype: str
    expr: Expr


class LoadRow(Node):
    """One number of each row: that in ``column``."""

    ref: Ref
    rows: Rows
    column: int = 0


class PopRow(Node):
    ref: Ref
    entry: Ref
    pop: Ref
    dtype: str


class StartFold(Node):
    ref: Ref
    how: str
    dtype: str


class FoldQuad(Node):
    ref: Ref
    how: str


class FoldRow(Node):
    sink: Ref
    how: str
    dtype: str
    row: Expr


class StoreRow(Node):
    rows: Rows
    row: Expr
    once: bool


class RowToScratch(Node):
    column: int
    row: Expr


class RowTile(Node):
    """A row value as the first column of a tile of 8: the operand of a product with K = 1."""

    ref: Ref
    row: Expr
    dtype: str


class SyncWarp(Node):
    """Whoever read the warp's scratch rows before is done, or whoever wrote them."""


class TableRows(Node):
    """Where the rows of ``table`` lie that ``index`` says, one of ``rows`` of ``bytes`` each. An index that is out of range has the
    nearest row, or the one at ``otherwise``."""

    ref: Ref
    table: Ref | Constant  # the layout makes a Constant of a stationary value
    index: Expr
    rows: int
    bytes: int
    otherwise: Address | None


# -- queues


class Exchange(Node):
    """A ring of ``depth`` entries, for a value of ``vectors`` of a thread that the CTAs of a cluster make of their slabs."""

    ring: Ref
    vectors: int
    depth: int

    @property
    def bytes(self) -> int:
        return self.depth * self.vectors * tiles.GROUP_THREADS * 16


class QueueCall(Node):
    """``call``: rd_acquire, rd_release, wr_acquire or wr_release."""

    queue: Ref
    call: str


class Entry(Node):
    """Names a queue's entry: ``ref(i)`` reads vector i, or with ``write`` ``ref(i, v)`` writes it. ``slab``: vectors of one, where
    it is a slab; ``once``: by the first of the CTAs that all have it; ``of``: the slab that this CTA has written; ``each``: every
    reader gets its own."""

    ref: Ref
    queue: Ref
    slab: int
    write: bool = False
    once: bool = False
    of: int | None = None
    each: bool = False


class PushRow(Node):
    queue: Ref
    row: Expr
    once: bool


# -- products


class Operand(Node):
    """``kind``: "registers", "copy" (registers of an entry's copy), "array" (of rows that have been read), "rows" (fetched on the
    way), or "image"; ``dtype``: of the product; ``owner``: what must be alive until the product is complete. ``awaited``: its image
    is the entry of the ring ``owner``, and has not been waited for before."""

    kind: str
    ref: Ref
    width: int
    dtype: str
    owner: Ref
    rows: Rows | None = None
    awaited: bool = False

    @property
    def fetched(self) -> bool:
        return self.kind in ("rows", "image")


class Resident(Node):
    """Weights in shared memory. ``weight``: of the stage; ``offset``: bytes into it; ``at``: set by the layout."""

    weight: int
    offset: int
    layer: int
    at: Constant | None = None


class Issue(Node):
    """Products of a chunk of columns into accumulators ``ref``. ``registers``: accumulators and fragments, for ``liveness``;
    ``k_chunks`` of ``weight``: for the loader. ``started``: the accumulators hold what the product is added to."""

    ref: Ref
    columns: int
    dtype: str
    rolling: bool
    weights: Resident | None  # None: streamed
    bias: tuple[Address, int, int] | None  # (vector, its width, first block)
    feeds: tuple[tuple[Operand, int, int], ...]  # with the first block of K, and the blocks that are complete before it
    weight: int
    chunk: int
    k_chunks: int
    registers: int
    started: bool = False


class Complete(Node):
    """Waits until at most ``pending`` products are in flight. ``done`` of ``blocks`` blocks of K are complete already."""

    ref: Ref
    pending: int
    done: int
    blocks: int
    owners: tuple[Ref, ...]


# -- layers


class LayerLoop(Node):
    """``weights``: of one layer, whose numbers follow each other from ``first_weight`` on."""

    layers: int
    first_weight: int
    weights: int
    body: tuple[Node, ...]


class SeenBlocks(Node):
    """Once per tile, in front: which of ``count`` blocks of ``step`` elements the rows of all lanes see: those elements that are
    ``low`` to ``high`` away from a row's index on a stream axis (None: any). The index is the row over ``inner``, modulo
    ``extent``. ``shift``: where the number lies by which both bounds are further on, times ``sign``; ``guard``: "rows", "elements"
    (of ``size`` elements in all), as of a loop of the tile program (``program.ir``)."""

    ref: Ref
    inner: int
    extent: int
    step: int
    low: int | None
    high: int | None
    count: int
    shift: Address | None = None
    sign: int = 1
    guard: str = ""
    size: int = 0


class CountedLoop(Node):
    """``count`` times ``body``, whose iterations are numbered by ``number``, from the last one down where it is ``reverse``. With
    ``seen``, only ``which`` of the blocks: those that all rows see as a "whole", the others that some see (the "edges"), or "all".
    """

    number: Ref
    count: int
    reverse: bool
    body: tuple[Node, ...]
    seen: Ref | None = None
    which: str = "all"


class Turn(Node):
    """The lanes of a CTA take turns at the tensor core: ``what`` is "take" (wait for this lane's turn), "give" (it is the next
    lane's), or at the ends of the kernel "first" and "last", which make and take back the first lane's first turn."""

    what: str


class SliceRows(Node):
    """Where the rows of a slice begin: at those of ``whole``, and so many bytes further on for each number of a loop."""

    ref: Ref
    whole: Ref
    terms: tuple[tuple[Expr, int], ...]
    loads: bool


class TurnImages(Node):
    """Two images that take turns: ``first`` is the even layers' operand."""

    first: Ref
    second: Ref


class CopyRegisters(Node):
    to: Ref
    source: Ref
    count: int


class Alive(Node):
    """Nothing on the device: ``registers`` more are alive from now to the last use of ``owner``; None: it is used now."""

    owner: Ref
    registers: int | None = None


# -- weight gradients


class Panel(Node):
    """A panel at ``at`` bytes of the lane's, ``width`` columns wide."""

    ref: Ref
    dtype: str
    width: int
    at: int


class RowToPanel(Node):
    panel: Ref
    tile: Ref


class AddGradient(Node):
    gradient: Ref
    sums: tuple[Ref, ...]


# -- once per kernel


class LoadScalar(Node):
    """``once``: in front of the tiles, else for a layer."""

    ref: Ref
    dtype: str
    address: Address
    once: bool


class SinkStart(Node):
    """``width``: columns, 0 for a scalar; ``quad``: threads of a quad hold different parts."""

    ref: Ref
    how: str
    dtype: str
    width: int
    quad: bool


class SegmentStart(Node):
    """A result of rows of ``columns`` numbers, in tiles of ``width``; ``at``: bytes into the lane's memory for segments. ``rows``:
    of the table that each lane has where the indices are not sorted, 0 where they are. ``tops``: of a softmax's sum."""

    ref: Ref
    how: str
    dtype: str
    width: int
    columns: int
    at: int
    rows: int = 0
    tops: Tops | None = None

    @property
    def bytes(self) -> int:
        """Of the lane's memory."""
        return tiles.table_bytes(self.rows, self.width) if self.rows else tiles.segment_bytes(self.width)

    @property
    def partial_words(self) -> int:
        """Of the partial result that a lane leaves in global memory."""
        tops = self.tops.columns if self.tops else 0
        return self.rows * self.width if self.rows else 2 * (self.width + tops + 1)  # two rows, and which segments they are of


class ClearPanel(Node):
    panel: Panel


class GradientStart(Node):
    gradient: Ref
    dtype: str
    x: Panel
    y: Panel
    shape: GradientShape


class PanelSumStart(Node):
    """The sum over the rows of a panel of ``gradient``. ``columns``: of the panel's operand, or of one slab of it if ``slabs``."""

    sums: Ref
    panel: Panel
    columns: int
    slabs: bool
    gradient: Ref


# -- once per tile, in front


class Image(Node):
    """Of the value ``ref.of``; ``at``: bytes of the lane's scratch, set by the layout."""

    ref: Ref
    at: int = -1


class AxisIndices(Node):
    extents: tuple[int, ...]


class RowAddresses(Node):
    """``strides``: (axis, bytes). ``staged``: they lie in shared memory."""

    ref: Ref
    array: Constant
    strides: tuple[tuple[int, int], ...]
    staged: bool

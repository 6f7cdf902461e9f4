"""The device IR: the work of the stages of a kernel as data, which passes transform and printers print.

A stage is a tuple of nodes in the order in which the device runs them; ``frame_ir.py`` has the nodes around the tiles. Names are
``Ref``s, and numbers that may differ between equal stages are ``Constant``s, so that stages can be compared as data
(``layout.py``). ``Evaluate`` and ``SingleColumn`` exist only between passes: ``stage/chunks.py`` expands them. The only C++ text in
the IR is the templates of operators, from the op table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, dataclass_transform

from kitsune_jax.targets.cuda import tiles
from kitsune_jax.targets.cuda.tiles import GradientShape


@dataclass_transform(frozen_default=True)
class Node:
    """A node of the device IR. Every subclass is a frozen dataclass of the fields that it declares."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True)(cls)

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        """The names of the fields."""
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


# --- Names and expressions --------------------------------------------------------------------------------------------------------


class Ref(Node):
    """A named object of a stage. ``of``: the value, queue, sink or array of the tile program that it belongs to, or a counter."""

    kind: str
    of: int
    part: str = ""


class Constant(Node):
    """A number, or a member of struct ``of``, that may differ between equal stages. Constants with the same ``name`` and ``key``
    are the same. ``declaration``: as a member of a struct, with {} for its name."""

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
    """The barriers of the lanes' rings of a queue, which are in the header."""
    return Constant("ring", queue, f"queue{queue}", f"Ring<{depth}> (Header::*{{}})[kLanes]", "Header")


class StationaryVector(Node):
    """A word of a stage's stationary vectors: ``offset`` words into group ``group`` of them. The layout replaces it by a
    Constant."""

    group: int
    offset: int


class Address(Node):
    """The start of a stationary vector. ``slab``, ``layer``: words from the part of one slab, or layer, to that of the next."""

    at: StationaryVector | Constant
    slab: int = 0
    layer: int = 0


class Expr(Node):
    """A value for an element (row h, column c of block b) or for a row (h)."""


class Literal(Expr):
    text: str


class Read(Expr):
    """``form``: of the object read (``print_stage.READS``); ``shift``: block of the loop minus block of the object."""

    form: str
    ref: Ref
    dtype: str
    shift: int = 0


class ScratchFold(Node):
    """A fold by ``how`` of ``count`` columns that are ``step`` apart."""

    how: str
    count: int
    step: int


class ScratchList(Node):
    """Lists of columns to be added up: a vector of them, one list after the other."""

    columns: Address


class SumOfList(Expr):
    """The sum of those columns of the warp's scratch rows that a list in ``columns`` names. The vector ``first`` gives the starts
    of the lists, one for each column of the element. ``width``: of the loop's tiles, 0 for column 0 of a row."""

    dtype: str
    first: Address
    columns: Address
    width: int
    shift: int = 0


class FromScratch(Expr):
    """An element of the warp's scratch rows, in ``column`` or in the column that ``index`` holds, where -1 means ``fill``; or the
    ``fold`` of that column and others."""

    dtype: str
    column: int = -1
    index: Ref | None = None
    fill: Expr | None = None
    fold: ScratchFold | None = None


class RowIndex(Expr):
    """The mixed-radix index over stream axes (axis, extent), outermost first."""

    axes: tuple[tuple[int, int], ...]


class Identity(Expr):
    how: str
    dtype: str


class Apply(Expr):
    """An operator: ``template`` is C++ with {0}, {1}, ... for the operands."""

    template: str
    operands: tuple[Expr, ...]


class Rows(Node):
    """A thread's access to its columns of an array's rows. ``columns``: logical columns of a row; ``access``: bytes of an access,
    or "kStaged"; ``strides``: of columns that are not contiguous, (extent, element stride) of the row's dimensions, innermost
    first; ``pairs``: loads return 16-bit values in pairs."""

    ref: Ref
    dtype: str
    columns: int
    access: str
    strides: tuple[tuple[int, int], ...]
    pairs: bool


# --- Loops over the blocks of a tile: actions on values, before ``stage/chunks.py`` -----------------------------------------------


class Action(Node):
    """An action on each element of ``value``."""

    value: int


class Keep(Action):
    """Keep the value in registers ``ref`` of ``form``, or write its vectors to the image or queue entry ``to``.

    ``push``: a copy, or a queue's entry, so the value also stays where it was. ``reads``: instructions of the tile program that
    this replaces. ``first``: the first block of the registers. ``over``: the registers belonged to a value that is no longer read.
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
    slab: int  # columns of a slab, if the value is one
    groups: int = 1  # groups of columns; a slab has equally many of each


class Fold(Action):
    """Fold the columns of a row into ``ref[2]``; or with ``stream`` the rows, into ``ref`` (``scalar``) or into one per column."""

    how: str
    ref: Ref
    stream: bool = False
    scalar: bool = True


class ToScratch(Action):
    """Write words of the value to the warp's scratch rows, from ``column`` on."""

    column: int


class ToSegments(Action):
    """Pass the value, a block at a time, through the warp's scratch rows into the rows of ``ref``'s result. ``runs``: of a sum that
    shares those of others."""

    ref: Ref
    how: str
    dtype: str
    runs: Ref | None = None


class AddToRows(Action):
    """Add atomically to the rows of a result of ``columns`` floats, at the addresses ``ref``, ``access`` bytes at a time."""

    ref: Ref
    columns: int
    access: int


class FoldToRows(Action):
    """Pass the value, a block at a time, through the warp's scratch rows, and fold it atomically into the rows of ``ref``."""

    ref: Ref


class ToPanel(Action):
    """Write the value to a panel in shared memory, the operand of a weight gradient."""

    panel: Ref


class Evaluate(Node):
    """A loop over all blocks of tiles of ``width`` columns. ``homes``: the current place of every value that it reads."""

    width: int
    actions: tuple[Action, ...]
    products: tuple[int, ...]
    homes: tuple[tuple[int, Any], ...]


class SingleColumn(Node):
    """A whole product that has one column of results."""

    value: int
    homes: tuple[tuple[int, Any], ...]


# --- Loops over the blocks of a tile: steps on elements, after ``stage/chunks.py`` ------------------------------------------------


class BlockStep(Node):
    """A step for a block, or for an element of it."""


class MaskWords(BlockStep):
    """Before the loop: load all words of a mask's image."""

    ref: Ref
    image: Ref
    width: int


class ArrayBlock(BlockStep):
    """Once per block: load a thread's columns of both rows. ``slab``: columns of a slab, if the value is one, of ``groups``."""

    ref: Ref
    rows: Rows
    shift: int
    slab: int
    groups: int = 1


class VectorBlock(BlockStep):
    ref: Ref
    address: Address
    dtype: str
    shift: int


class ImageBlock(BlockStep):
    ref: Ref
    image: Ref
    form: str
    shift: int


class Let(BlockStep):
    """Per element: ``ref`` is the value of ``expr``. ``dtype``: None for a column's index from a vector."""

    ref: Ref
    dtype: str
    expr: Expr


class Put(BlockStep):
    """Per element: pass ``x`` to ``action``; with ``pair``, x is a packed pair of elements. ``columns``: if fewer than the loop's,
    the elements beyond are zero, or are not folded."""

    action: Action
    x: Expr
    dtype: str
    columns: int
    pair: bool = False


class BlockLoop(Node):
    """A loop over the blocks [first, last) of tiles of ``width`` columns. ``reads``: objects whose registers and images it
    reads."""

    width: int
    first: int
    last: int
    steps: tuple[BlockStep, ...]
    reads: tuple[Ref, ...]


# --- Products for each row, whose operands pass through shared memory row by row --------------------------------------------------

_WARPS = tiles.GROUP_THREADS // 32
_MOST_OF_TWO_SLOTS = 1 << 14  # most bytes of two slots of a warp; wider operands get one slot


class KeepAddress(Node):
    """Store the addresses of the rows ``ref`` as number ``number`` of those that the lane has in shared memory. ``stored``: the
    rows are written, so addresses beyond the stream are null."""

    ref: Ref
    number: int
    stored: bool


class Copied(Node):
    """Elements of an operand from ``first`` on, ``count`` of each of ``pieces`` sources. ``how``: "async" (16 bytes at a time),
    "elements" or "staged", from kept addresses number ``source`` on; or "scratch", from column ``source`` of the scratch rows."""

    how: str
    source: int
    pieces: int
    first: int
    count: int


class RowOperand(Node):
    """``free`` times K elements of a row. ``across``: K is the outer dimension. ``copied``: their sources."""

    free: int
    across: bool
    copied: tuple[Copied, ...]

    def slot_bytes(self, k: int, size: int) -> int:
        """``RowOperand::kBytes`` of stage/row_product.h."""
        run, runs = (self.free, k) if self.across else (k, self.free)
        return runs * (-(-run * size // 16) | 1) * 16


class ToRows(Node):
    """Write to the rows at kept addresses number ``number``. ``pairs``: the rows start at multiples of four bytes."""

    number: int
    pairs: bool


class RowProduct(Node):
    """x y^T of each row, of operands of ``dtype``, written to the image ``to`` of a value of dtype ``out`` with ``columns``
    columns, or to the rows of an array. ``y`` is None where it is x. ``picks``: a vector with the element of the product for each
    column, or
    -1 for ``fill``."""

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
    """The lane's memory for products: ``addresses`` for each row at byte ``at``, and ``bytes`` of work space from ``work`` on. A
    warp uses its own part for all products, because only the warp itself knows when one is done."""

    addresses: int
    at: int
    work: int
    bytes: int


def address_bytes(count: int) -> int:
    """Shared memory of a lane for ``count`` addresses of each of its rows (``RowAddresses::kBytes``)."""
    return tiles.TILE_ROWS * 8 * count


# --- Sinks by indices: by runs of sorted ones, atomically, and those of a segment softmax -----------------------------------------


class SegmentRuns(Node):
    """Before the blocks of a tile: the runs of equal ``index`` among its rows, or, if not ``sorted``, the indices themselves.
    ``rows``: of the result."""

    ref: Ref
    index: Expr
    rows: int
    sorted: bool = True


class RowToSegments(Node):
    """Fold a tile that has one number per row."""

    ref: Ref
    how: str
    dtype: str
    row: Expr
    runs: Ref | None = None


class JoinSegments(Node):
    ref: Ref
    runs: Ref | None = None


class SummedRows(Node):
    """The addresses that the thread's two rows are added to: rows ``index`` of ``out``, which has ``rows`` rows of ``columns``
    floats; null for an index out of range."""

    ref: Ref
    out: Constant
    index: Expr
    rows: int
    columns: int


class AddRow(Node):
    """Add one number of each row at ``ref``."""

    ref: Ref
    row: Expr


class FoldedRows(Node):
    """The rows of ``out`` that ``index`` names, into which a tile of ``width`` columns is folded by ``how``. ``rows``, ``columns``,
    ``dtype``: of ``out``."""

    ref: Ref
    how: str
    dtype: str
    width: int
    out: Constant
    index: Expr
    rows: int
    columns: int


class FoldRowAt(Node):
    """Fold a tile that has one number per row."""

    ref: Ref
    row: Expr


class RowRuns(Node):
    """The runs of equal ``index`` among the rows of a warp, for all sums of a softmax. ``rows``: of the results."""

    ref: Ref
    index: Expr
    rows: int


class TopsStart(Node):
    """``columns``: scores of a row. ``at``: offset in the lane's memory for segments."""

    ref: Ref
    columns: int
    at: int

    @property
    def bytes(self) -> int:
        return tiles.tops_bytes(self.columns)


class FindTops(Node):
    """Replace the scores in the warp's scratch rows by the largest ones of their runs."""

    ref: Ref
    runs: Ref


class BeginSegments(Node):
    """Before the blocks of a tile: start a sum whose ``runs`` are known."""

    ref: Ref
    runs: Ref


class Tops(Node):
    """The scaling of a softmax sum by the ``columns`` scores of a row in ``ref``. ``finite``: use 0 for a largest score that is not
    finite."""

    ref: Ref
    columns: int
    finite: bool


# --- Statements around the loops over blocks, and the setup of a stage ------------------------------------------------------------


class Registers(Node):
    """Declare ``count`` registers of a value; those of a mask start as zeros."""

    ref: Ref
    form: str
    dtype: str
    count: int
    words: bool = False  # to be written to an image


class PutMask(Node):
    """Write all vectors of a mask to an image or an entry after the loop, because a vector has the bits of several blocks."""

    ref: Ref
    to: Ref
    width: int


# -- Values with one number per row, in two registers


class SetRow(Node):
    ref: Ref
    dtype: str
    expr: Expr


class LoadRow(Node):
    """Load the number in ``column`` of each row."""

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
    """Order the accesses of a warp to its scratch rows: earlier reads before later writes, and earlier writes before reads."""


class TableRows(Node):
    """The addresses of the rows ``index`` of ``table``, which has ``rows`` rows of ``bytes`` bytes. An index out of range means the
    nearest row, or the one at ``otherwise``."""

    ref: Ref
    table: Ref | Constant  # the layout replaces a stationary value by a Constant
    index: Expr
    rows: int
    bytes: int
    otherwise: Address | None


# -- Queues


class Exchange(Node):
    """A ring of ``depth`` entries for a value, ``vectors`` per thread, whose slabs the CTAs of a cluster pass to one another."""

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
    """Declare access to a queue's entry: ``ref(i)`` reads vector i, with ``write`` ``ref(i, v)`` writes it. ``slab``: vectors of a
    slab, if the value is one; ``once``: only the first of the CTAs that have the value writes; ``of``: read the slab of CTA ``of``;
    ``each``: every reader has its own entry."""

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


# -- Products


class Operand(Node):
    """``kind``: "registers", "copy" (registers of an entry's copy), "array" (rows in registers), "rows" (loaded during the product)
    or "image". ``dtype``: of the product. ``owner``: the object that must stay alive until the product is complete. ``awaited``:
    the image is an entry of ring ``owner``, and this is the first wait for it."""

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
    """Weights in shared memory. ``weight``: number in the stage; ``offset``: in bytes; ``at``: set by the layout."""

    weight: int
    offset: int
    layer: int
    at: Constant | None = None


class Issue(Node):
    """Start the products of a chunk of columns into accumulators ``ref``. ``registers``: accumulators and fragments, for
    ``liveness``; ``k_chunks`` of ``weight``: for the loader. ``started``: the accumulators hold a sum that the product adds to."""

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
    """Wait until at most ``pending`` products are in flight. ``done`` of ``blocks`` blocks of K are complete already."""

    ref: Ref
    pending: int
    done: int
    blocks: int
    owners: tuple[Ref, ...]


# -- Loops


class LayerLoop(Node):
    """``weights``: of one layer, numbered consecutively from ``first_weight``."""

    layers: int
    first_weight: int
    weights: int
    body: tuple[Node, ...]


class SeenBlocks(Node):
    """Once per tile: those of ``count`` blocks of ``step`` elements that the rows of all lanes see. A row sees the elements whose
    index is ``low`` to ``high`` more than the row's index on a stream axis (None: unbounded), which is the row over ``inner``,
    modulo ``extent``. ``shift``: address of a number that, times ``sign``, is added to both bounds; ``guard``: "rows" or "elements"
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
    """``count`` iterations of ``body``, numbered by ``number``, from the last one down if ``reverse``. With ``seen``, only
    ``which`` of its blocks: "whole" (all rows see them), "edges" (only some rows do), or "all"."""

    number: Ref
    count: int
    reverse: bool
    body: tuple[Node, ...]
    seen: Ref | None = None
    which: str = "all"


class Turn(Node):
    """The lanes of a CTA take turns at the tensor cores. ``what``: "take" (wait for this lane's turn), "give" (pass it to the next
    lane); "first" and "last" start and end the turns at the beginning and end of the kernel."""

    what: str


class SliceRows(Node):
    """The addresses of the rows of a slice: those of ``whole``, plus for each number of a loop a multiple of so many bytes."""

    ref: Ref
    whole: Ref
    terms: tuple[tuple[Expr, int], ...]
    loads: bool


class TurnImages(Node):
    """Two images that alternate: ``first`` is the operand of the even layers."""

    first: Ref
    second: Ref


class CopyRegisters(Node):
    to: Ref
    source: Ref
    count: int


class Alive(Node):
    """No code: ``registers`` more are alive from here to the last use of ``owner``; None: ``owner`` is used here."""

    owner: Ref
    registers: int | None = None


# -- Weight gradients


class Panel(Node):
    """A panel of ``width`` columns at byte ``at`` of the lane's panels."""

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


# -- Once per kernel


class LoadScalar(Node):
    """``once``: load before the tiles, otherwise for every layer."""

    ref: Ref
    dtype: str
    address: Address
    once: bool


class SinkStart(Node):
    """``width``: columns, 0 for a scalar; ``quad``: the threads of a quad hold different parts."""

    ref: Ref
    how: str
    dtype: str
    width: int
    quad: bool


class SegmentStart(Node):
    """A result with rows of ``columns`` numbers, in tiles of ``width``; ``at``: offset in the lane's memory for segments. ``rows``:
    of each lane's table if the indices are not sorted, else 0. ``tops``: the scaling of a softmax sum."""

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
        """Bytes in the lane's memory."""
        return tiles.table_bytes(self.rows, self.width) if self.rows else tiles.segment_bytes(self.width)

    @property
    def partial_words(self) -> int:
        """Words of the partial result that a lane writes to global memory."""
        tops = self.tops.columns if self.tops else 0
        return self.rows * self.width if self.rows else 2 * (self.width + tops + 1)  # two rows and their segments


class ClearPanel(Node):
    panel: Panel


class GradientStart(Node):
    gradient: Ref
    dtype: str
    x: Panel
    y: Panel
    shape: GradientShape


class PanelSumStart(Node):
    """The sum over the rows of a panel of ``gradient``. ``columns``: of the panel's operand, or of a slab of it if ``slabs``."""

    sums: Ref
    panel: Panel
    columns: int
    slabs: bool
    gradient: Ref


# -- Once per tile


class Image(Node):
    """The image of the value ``ref.of``; ``at``: offset in the lane's scratch memory, set by the layout."""

    ref: Ref
    at: int = -1


class AxisIndices(Node):
    extents: tuple[int, ...]


class RowAddresses(Node):
    """The addresses of the thread's rows. ``strides``: (axis, bytes). ``staged``: the rows are in shared memory."""

    ref: Ref
    array: Constant
    strides: tuple[tuple[int, int], ...]
    staged: bool

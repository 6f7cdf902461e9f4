"""The device IR, continued: statements around the loops over a tile's blocks, and what a stage sets up for them."""

from __future__ import annotations

from kitsune_jax.targets.cuda import tiles
from kitsune_jax.targets.cuda.device_ir import Address, Constant, Expr, Node, Ref, Rows
from kitsune_jax.targets.cuda.segment_ir import Tops
from kitsune_jax.targets.cuda.tiles import GradientShape


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

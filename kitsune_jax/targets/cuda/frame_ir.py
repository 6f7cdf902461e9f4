"""The device IR around the tiles of a stage (setup, loop, finish, loader), and the layout of streamed arrays.

Like ``ir.py``, it is data that ``layout.py`` makes and ``print_kernel.py`` prints.
"""

from __future__ import annotations

import dataclasses
import math

from kitsune_jax.planning.streams import dim_strides
from kitsune_jax.program.ir import ArrayType, TileProgram
from kitsune_jax.targets.cuda import ir, pointwise, tiles

# --- Nodes ------------------------------------------------------------------------------------------------------------------------


class LaneScratch(ir.Node):
    """A lane's ``bytes`` of shared memory; the lanes' parts follow one another from ``at``."""

    at: ir.Constant
    bytes: int


class ScratchRows(ir.Node):
    at: int
    words: int


class PanelMemory(ir.Node):
    lanes: LaneScratch
    at: int


class Result(ir.Node):
    """The place of a sink's partial sums, the parameter of its result, and the result's dtype."""

    partial: ir.Constant
    out: ir.Constant
    dtype: str


class SegmentMemory(ir.Node):
    """``start`` with its memory in the lane at ``at``, and with its result."""

    start: ir.SegmentStart
    result: Result
    at: int


class ClusterRing(ir.Node):
    """``writers``, ``readers``: masks of the CTAs' ranks."""

    ref: ir.Ref
    ring: ir.Constant
    vectors: int
    depth: int
    slots: ir.Constant
    writers: ir.Constant
    readers: ir.Constant


class L2Ring(ir.Node):
    """``writers``, ``readers``: numbers of CTAs."""

    ref: ir.Ref
    vectors: int
    counters: ir.Constant
    slots: ir.Constant
    depth: ir.Constant
    writers: ir.Constant
    readers: ir.Constant


class StagedArray(ir.Node):
    """An array whose tiles are copied through the lane's memory. ``number``: of its barriers in the header."""

    ref: ir.Ref
    dtype: str
    columns: int
    source: ir.Constant
    lanes: LaneScratch
    at: int
    number: int


class WeightRing(ir.Node):
    """The ring of streamed weights, after a header of ``header_bytes``."""

    header_bytes: int


class AwaitWeights(ir.Node):
    """Wait for the resident weights."""


class ExchangeRing(ir.Node):
    """The ring of an ``ir.Exchange``, whose entries start at byte ``offset`` of the lane's memory. ``ctas``: of the cluster."""

    ring: ir.Ref
    vectors: int
    depth: int
    offset: int
    ctas: int


class TileLoop(ir.Node):
    """``uniform``: every lane takes part in every round. ``consecutive``: a lane's tiles are consecutive in the stream, not
    strided. ``order``: the array with the element that each row of the stream reads. ``prefetched``: (input, bytes of a row) to
    prefetch for the next tile. ``batches``: tiles keep within a batch. ``scalar_rows``: a thread has whole rows
    (``stage/facts.py``)."""

    uniform: bool
    consecutive: bool
    order: ir.Constant | None
    staged: tuple[StagedArray, ...]
    prefetched: tuple[tuple[ir.Constant, int], ...]
    vectors: bool
    batches: bool
    scalar_rows: bool
    body: tuple[ir.Node, ...]


class FinishSinks(ir.Node):
    """``sinks``: each with its result and columns. ``segments``: sinks by sorted indices; ``tables``: sinks by other indices, with
    the counters of groups of lanes."""

    arrived: ir.Constant
    sinks: tuple[tuple[ir.SinkStart, Result, int], ...]
    segments: tuple[ir.Ref, ...]
    tables: tuple[tuple[ir.Ref, ir.Constant], ...]


class FinishGradients(ir.Node):
    """``parts``: CTAs with a partial sum; ``split``: of the stage. ``gradients``: each with the sums over its panels."""

    arrived: ir.Constant
    parts: int
    split: int
    gradients: tuple[tuple[ir.GradientStart, Result, tuple[tuple[ir.PanelSumStart, Result], ...]], ...]


class Consumer(ir.Node):
    """``setup``: before the tiles; ``ctas``: of an instance, or 0 where each CTA takes tiles by itself."""

    setup: tuple[ir.Node, ...]
    ctas: int
    loop: TileLoop
    finish: tuple[ir.Node, ...]


class FetchResident(ir.Node):
    """A copy to shared memory of ``bytes`` of operand ``group`` from ``source``; with ``slabs``, of each CTA's own slab."""

    to: ir.Constant
    group: int
    source: ir.Constant
    bytes: int
    slabs: bool


class LoadResident(ir.Node):
    fetches: tuple[FetchResident, ...]


class LoadStreamed(ir.Node):
    """``runs``: (operand, chunks, bytes of a chunk) in the order of their use, for every round of tiles."""

    ring: WeightRing
    ctas: int
    runs: tuple[tuple[int, int, int], ...]


class WeightBlocks(ir.Node):
    """The weights of the ``count`` iterations of a loop, or of no loop (``count`` is 1). ``places``: (operand, offset of the first
    iteration's within a batch, bytes from one iteration to the next). ``runs``: (operand, chunks, bytes of a chunk) of an
    iteration. ``seen``, ``which``: as in ``CountedLoop``."""

    count: int
    places: tuple[tuple[int, int, int], ...]
    runs: tuple[tuple[int, int, int], ...]
    seen: ir.Ref | None
    which: str


class LoadBlocks(ir.Node):
    """Weights that change from tile to tile. ``groups``: (operand, bytes of a batch); ``axes``: (batches from one index of the axis
    to the next, its extent) of the axes on which the weights depend, outermost first. ``seen``: the blocks that rows see."""

    ring: WeightRing
    groups: tuple[tuple[int, int], ...]
    axes: tuple[tuple[int, int], ...]
    seen: tuple[ir.SeenBlocks, ...]
    parts: tuple[WeightBlocks, ...]


class StageCode(ir.Node):
    """``split``: CTAs that run the stage."""

    consumer: Consumer
    loader: LoadResident | LoadStreamed | LoadBlocks
    split: int


# --- Streamed arrays: how a thread accesses their rows ----------------------------------------------------------------------------

_FEW_ACCESSES = 8  # of a thread to a tile: staging costs a barrier and a wait, which is no less


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """The layout of the columns of a row: ``sizes`` and element ``strides`` of its dimensions, outermost first."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def n(self) -> int:
        return math.prod(self.sizes)

    @property
    def contiguous(self) -> bool:
        return all(n == 1 or s == d for n, s, d in zip(self.sizes, self.strides, dim_strides(self.sizes), strict=True))


def columns_of(array: ArrayType) -> Columns:
    strides = dim_strides(array.shape)
    return Columns(tuple(array.shape[d] for d in array.dims), tuple(strides[d] for d in array.dims))


def array_bytes(array: ArrayType) -> int:
    return math.prod(array.shape) * pointwise.ITEM_SIZE[array.dtype]


def row_bytes(array: ArrayType) -> int:
    return columns_of(array).n * pointwise.ITEM_SIZE[array.dtype]


def access_bytes(array: ArrayType) -> int:
    """The widest access to a row: it divides the starts of all pieces of a thread's columns, and the end of the row."""
    columns, size = columns_of(array), pointwise.ITEM_SIZE[array.dtype]
    return contiguous_access(columns.n, array.dtype, *(s * size for s in array.row_strides)) if columns.contiguous else size


def contiguous_access(columns: int, dtype: str, *pitches: int) -> int:
    """The same for contiguous rows of ``columns``; ``pitches``: bytes between rows."""
    size = pointwise.ITEM_SIZE[dtype]
    return math.gcd(16, tiles.owned(tiles.padded(columns)) * size, columns * size, *pitches)


def has_contiguous_tiles(program: TileProgram, array: ArrayType) -> bool:
    """Is a tile of the array one piece of memory? (Its start is then a multiple of 64 bytes, because a tile has 64 rows.)"""
    columns = columns_of(array)
    return (
        array.streamed
        and not program.batch_axes
        and program.order is None
        and len(program.axes) == 1
        and columns.contiguous
        and array.row_strides == (columns.n,)
    )


def is_staged(program: TileProgram, array: ArrayType) -> bool:
    """Should tiles of the array be copied through shared memory, if there is room, because a thread would need many narrow
    accesses?

    With accesses of 16 bytes there is no gain, and rows of such pitches conflict in the banks of shared memory.
    """
    columns = columns_of(array)
    if array.dtype not in pointwise.ITEM_SIZE or columns.n == 1 or not has_contiguous_tiles(program, array):
        return False
    width, wide = tiles.padded(columns.n), access_bytes(array)
    accesses = 2 * tiles.blocks(width) * tiles.owned(width) * pointwise.ITEM_SIZE[array.dtype] // wide  # of a thread, for a tile
    return wide < 16 and accesses > _FEW_ACCESSES


def staged_bytes(array: ArrayType) -> int:
    """Shared memory of a lane for a staged array: the current tile and the next."""
    return tiles.aligned(2 * tiles.TILE_ROWS * row_bytes(array), 128)


def rows_of(array: ArrayType, role: str, k: int, staged: bool) -> ir.Rows:
    """The access to the rows of input ("in") or output ("out") ``k``."""
    columns = columns_of(array)
    contiguous = columns.contiguous
    strides = () if contiguous else tuple(zip(reversed(columns.sizes), reversed(columns.strides), strict=True))
    pairs = role == "in" and contiguous and tiles.is_half(array.dtype)
    return ir.Rows(ir.Ref(role, k), array.dtype, columns.n, "kStaged" if staged else str(access_bytes(array)), strides, pairs)


def addresses_of(array: ArrayType, role: str, k: int, staged: bool) -> ir.RowAddresses:
    size = pointwise.ITEM_SIZE[array.dtype]
    strides = tuple((axis, stride * size) for axis, stride in enumerate(array.row_strides) if stride)
    return ir.RowAddresses(ir.Ref(role, k), ir.parameter(role, k), strides, staged)

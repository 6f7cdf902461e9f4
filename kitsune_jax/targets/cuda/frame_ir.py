"""The device IR around the tiles of a stage (setup, loop, finish, loader), and the layout of streamed arrays."""

from __future__ import annotations

import dataclasses
import math

from kitsune_jax.planning.streams import dim_strides
from kitsune_jax.program.ir import ArrayType, TileProgram
from kitsune_jax.targets.cuda import pointwise, tiles
from kitsune_jax.targets.cuda.ir import (
    Constant,
    GradientStart,
    Node,
    PanelSumStart,
    Ref,
    RowAddresses,
    Rows,
    SeenBlocks,
    SegmentStart,
    SinkStart,
    parameter,
)

# ----------------------------------------------------------------------------------------------------------------------------------
# The device IR around the tiles of a stage: what its consumers set up, loop over and finish, and what its loader brings.
#
# Like ``ir.py``: data that ``layout.py`` makes and ``print_kernel.py`` spells out.
# ----------------------------------------------------------------------------------------------------------------------------------


class LaneScratch(Node):
    """A lane's part of shared memory: of ``bytes``, the lanes' one after the other from ``at`` on."""

    at: Constant
    bytes: int


class ScratchRows(Node):
    at: int
    words: int


class PanelMemory(Node):
    lanes: LaneScratch
    at: int


class Result(Node):
    """Where a sink's partial sums lie, where it goes, and its dtype there."""

    partial: Constant
    out: Constant
    dtype: str


class SegmentMemory(Node):
    """``start`` with the lane's memory for it at ``at``, and where its result and its partial results lie."""

    start: SegmentStart
    result: Result
    at: int


class ClusterRing(Node):
    """``writers``, ``readers``: masks of ranks."""

    ref: Ref
    ring: Constant
    vectors: int
    depth: int
    slots: Constant
    writers: Constant
    readers: Constant


class L2Ring(Node):
    """``writers``, ``readers``: their numbers."""

    ref: Ref
    vectors: int
    counters: Constant
    slots: Constant
    depth: Constant
    writers: Constant
    readers: Constant


class StagedArray(Node):
    """Tiles of an array come through the lane's memory; ``number``: of its barriers in the header."""

    ref: Ref
    dtype: str
    columns: int
    source: Constant
    lanes: LaneScratch
    at: int
    number: int


class WeightRing(Node):
    """The ring of streamed weights, behind a header of so many bytes."""

    header_bytes: int


class AwaitWeights(Node):
    """Until the resident weights have arrived."""


class ExchangeRing(Node):
    """Of ``ir.Exchange``, with the lane's entries from byte ``offset`` of its memory on. ``ctas``: of the cluster."""

    ring: Ref
    vectors: int
    depth: int
    offset: int
    ctas: int


class TileLoop(Node):
    """``uniform``: every lane takes part in every round. ``consecutive``: a lane's tiles follow each other in the stream, else they
    are every so many. ``order``: the array that says which element of the arrays each row of the stream is.
    ``prefetched``: (input, bytes of a row) whose next tile is asked for. ``batches``: tiles keep within one;
    ``own_rows``: a thread has rows of its own (``stage/facts.py``)."""

    uniform: bool
    consecutive: bool
    order: Constant | None
    staged: tuple[StagedArray, ...]
    prefetched: tuple[tuple[Constant, int], ...]
    vectors: bool
    batches: bool
    own_rows: bool
    body: tuple[Node, ...]


class FinishSinks(Node):
    """``columns``: of each result. ``segments``: sinks by sorted indices; ``tables``: by others, with the counters of groups of
    lanes."""

    arrived: Constant
    sinks: tuple[tuple[SinkStart, Result, int], ...]
    segments: tuple[Ref, ...]
    tables: tuple[tuple[Ref, Constant], ...]


class FinishGradients(Node):
    """``parts``: CTAs with a partial sum; ``split``: of the stage. Each gradient with the sums that are made of its panels."""

    arrived: Constant
    parts: int
    split: int
    gradients: tuple[tuple[GradientStart, Result, tuple[tuple[PanelSumStart, Result], ...]], ...]


class Consumer(Node):
    """``setup``: in front of the tiles; ``ctas``: of an instance, 0 where CTAs take tiles on their own."""

    setup: tuple[Node, ...]
    ctas: int
    loop: TileLoop
    finish: tuple[Node, ...]


class FetchResident(Node):
    """``bytes`` of operand ``group`` from ``source`` on, of which every slab has its own, to shared memory."""

    to: Constant
    group: int
    source: Constant
    bytes: int
    slabs: bool


class LoadResident(Node):
    fetches: tuple[FetchResident, ...]


class LoadStreamed(Node):
    """``runs``: (operand, chunks, bytes of each), in the order of their use, for every round of tiles."""

    ring: WeightRing
    ctas: int
    runs: tuple[tuple[int, int, int], ...]


class Blocks(Node):
    """What the iterations of a loop multiply with, or what stands in no loop (``count`` is 1). ``places``: (operand, byte of a
    batch where the first one's lies, bytes to the next one's). ``runs``: (operand, chunks, bytes of each) of an iteration.
    ``seen``, ``which``: of the loop (``CountedLoop``)."""

    count: int
    places: tuple[tuple[int, int, int], ...]
    runs: tuple[tuple[int, int, int], ...]
    seen: Ref | None
    which: str


class LoadBlocks(Node):
    """Weights that change from tile to tile. ``groups``: (operand, bytes of a batch); ``axes``: (batches from one index of the axis
    to the next, its extent), outermost first, of those on which the weights depend. ``seen``: the blocks that rows see."""

    ring: WeightRing
    groups: tuple[tuple[int, int], ...]
    axes: tuple[tuple[int, int], ...]
    seen: tuple[SeenBlocks, ...]
    parts: tuple[Blocks, ...]


class StageCode(Node):
    """``split``: the CTAs that run it."""

    consumer: Consumer
    loader: LoadResident | LoadStreamed | LoadBlocks
    split: int


# ----------------------------------------------------------------------------------------------------------------------------------
# Streamed arrays at the border of a kernel: how the columns of their rows lie, and how a thread reaches them.
#
# Comes in: ``ArrayType``s of the tile program. Goes out: sizes and ``Rows``. Invariant: an access is as wide as the pitch and the
# width of the array allow; a *staged* array comes through shared memory, a tile at a time, because its rows would take many
# narrow accesses.
# ----------------------------------------------------------------------------------------------------------------------------------

_FEW_ACCESSES = 8  # of a thread to a tile: a barrier and a wait cost no less


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """How the columns of a row lie: ``sizes`` and element ``strides`` of its dimensions, outermost first."""

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
    """The width of an access to a row: all pieces of a thread's columns start on a multiple of it, and so does the end of a row."""
    columns, size = columns_of(array), pointwise.ITEM_SIZE[array.dtype]
    return contiguous_access(columns.n, array.dtype, *(s * size for s in array.row_strides)) if columns.contiguous else size


def contiguous_access(columns: int, dtype: str, *pitches: int) -> int:
    """The same of rows of ``columns`` that lie together; ``pitches``: bytes between rows."""
    size = pointwise.ITEM_SIZE[dtype]
    return math.gcd(16, tiles.owned(tiles.padded(columns)) * size, columns * size, *pitches)


def lies_together(program: TileProgram, array: ArrayType) -> bool:
    """Is a tile of the array one piece of memory? It then starts on a multiple of 64 bytes, because a tile has 64 rows."""
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
    """Should the array's tiles come through shared memory, where there is room?

    Not where 16 bytes can be read at once: that is as good, and rows of such pitches conflict in the banks of shared memory.
    """
    columns = columns_of(array)
    if array.dtype not in pointwise.ITEM_SIZE or columns.n == 1 or not lies_together(program, array):
        return False
    width, wide = tiles.padded(columns.n), access_bytes(array)
    accesses = 2 * tiles.blocks(width) * tiles.owned(width) * pointwise.ITEM_SIZE[array.dtype] // wide  # of a thread, for a tile
    return wide < 16 and accesses > _FEW_ACCESSES


def staged_bytes(array: ArrayType) -> int:
    """Shared memory of a lane for a staged array: this tile and the next."""
    return tiles.aligned(2 * tiles.TILE_ROWS * row_bytes(array), 128)


def rows_of(array: ArrayType, role: str, k: int, staged: bool) -> Rows:
    """How a thread reaches the rows of input ("in") or output ("out") ``k``."""
    columns = columns_of(array)
    contiguous = columns.contiguous
    strides = () if contiguous else tuple(zip(reversed(columns.sizes), reversed(columns.strides), strict=True))
    pairs = role == "in" and contiguous and tiles.is_half(array.dtype)
    return Rows(Ref(role, k), array.dtype, columns.n, "kStaged" if staged else str(access_bytes(array)), strides, pairs)


def addresses_of(array: ArrayType, role: str, k: int, staged: bool) -> RowAddresses:
    size = pointwise.ITEM_SIZE[array.dtype]
    strides = tuple((axis, stride * size) for axis, stride in enumerate(array.row_strides) if stride)
    return RowAddresses(Ref(role, k), parameter(role, k), strides, staged)

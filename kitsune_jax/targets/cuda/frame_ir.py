"""The device IR around the tiles of a stage: what its consumers set up, loop over and finish, and what its loader brings.

Like ``device_ir.py``: data that ``frames.py`` makes and ``print_frame.py`` spells out.
"""

from __future__ import annotations

from kitsune_jax.targets.cuda.device_ir import Constant, Node, Ref
from kitsune_jax.targets.cuda.statements import GradientStart, PanelSumStart, SeenBlocks, SegmentStart, SinkStart


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
    """Of ``st.Exchange``, with the lane's entries from byte ``offset`` of its memory on. ``ctas``: of the cluster."""

    ring: Ref
    vectors: int
    depth: int
    offset: int
    ctas: int


class TileLoop(Node):
    """``uniform``: every lane takes part in every round. ``consecutive``: a lane's tiles follow each other in the stream, else they
    are every so many. ``order``: the array that says which element of the arrays each row of the stream is.
    ``prefetched``: (input, bytes of a row) whose next tile is asked for. ``batches``: tiles keep within one;
    ``own_rows``: a thread has rows of its own (``own_rows.py``)."""

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

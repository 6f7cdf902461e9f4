"""The device IR around the tiles of a stage: what its consumers set up, loop over and finish, and what its loader brings.

Like ``device_ir.py``: data that ``frames.py`` makes and ``print_kernel.py`` spells out.
"""

from __future__ import annotations

from dataclasses import dataclass

from kitsune_jax.targets.cuda.device_ir import Constant, GradientStart, Node, PanelSumStart, Ref, SinkStart


@dataclass(frozen=True, slots=True)
class LaneMemory:
    """A lane's part of shared memory: of ``bytes``, the lanes' one after the other from ``at`` on."""

    at: Constant
    bytes: int


@dataclass(frozen=True, slots=True)
class ScratchRows:
    at: int
    words: int


@dataclass(frozen=True, slots=True)
class PanelMemory:
    lanes: LaneMemory
    at: int


@dataclass(frozen=True, slots=True)
class ClusterRing:
    """``writers``, ``readers``: masks of ranks."""

    ref: Ref
    ring: Constant
    vectors: int
    depth: int
    slots: Constant
    writers: Constant
    readers: Constant


@dataclass(frozen=True, slots=True)
class L2Ring:
    """``writers``, ``readers``: their numbers."""

    ref: Ref
    vectors: int
    counters: Constant
    slots: Constant
    depth: Constant
    writers: Constant
    readers: Constant


@dataclass(frozen=True, slots=True)
class StagedArray:
    """Tiles of an array come through the lane's memory; ``number``: of its barriers in the header."""

    ref: Ref
    dtype: str
    columns: int
    source: Constant
    lanes: LaneMemory
    at: int
    number: int


@dataclass(frozen=True, slots=True)
class WeightRing:
    """The ring of streamed weights, behind a header of so many bytes."""

    header_bytes: int


@dataclass(frozen=True, slots=True)
class AwaitWeights:
    """Until the resident weights have arrived."""


@dataclass(frozen=True, slots=True)
class TileLoop:
    """``uniform``: every lane takes part in every round. ``prefetched``: (input, bytes of a row) whose next tile is asked for."""

    uniform: bool
    staged: tuple[StagedArray, ...]
    prefetched: tuple[tuple[Constant, int], ...]
    vectors: bool
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """Where a sink's partial sums lie, where it goes, and its dtype there."""

    partial: Constant
    out: Constant
    dtype: str


@dataclass(frozen=True, slots=True)
class FinishSinks:
    """``columns``: of each result."""

    arrived: Constant
    sinks: tuple[tuple[SinkStart, Result, int], ...]


@dataclass(frozen=True, slots=True)
class FinishGradients:
    """``parts``: CTAs with a partial sum; ``split``: of the stage. Each gradient with the sums that are made of its panels."""

    arrived: Constant
    parts: int
    split: int
    gradients: tuple[tuple[GradientStart, Result, tuple[tuple[PanelSumStart, Result], ...]], ...]


@dataclass(frozen=True, slots=True)
class Consumer:
    """``setup``: in front of the tiles; ``ctas``: of an instance, 0 where CTAs take tiles on their own."""

    setup: tuple[Node, ...]
    ctas: int
    loop: TileLoop
    finish: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class FetchResident:
    """``bytes`` of operand ``group`` from ``source`` on, of which every slab has its own, to shared memory."""

    to: Constant
    group: int
    source: Constant
    bytes: int
    slabs: bool


@dataclass(frozen=True, slots=True)
class LoadResident:
    fetches: tuple[FetchResident, ...]


@dataclass(frozen=True, slots=True)
class LoadStreamed:
    """``runs``: (operand, chunks, bytes of each), in the order of their use, for every round of tiles."""

    ring: WeightRing
    ctas: int
    runs: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class StageCode:
    """``split``: the CTAs that run it."""

    consumer: Consumer
    loader: LoadResident | LoadStreamed
    split: int

"""What a plan asks of a kernel: its arrangement, and the weights that it fetches into the L2 for the next kernel."""

from __future__ import annotations

import dataclasses

from kitsune_jax.planning.plan import Ahead
from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cuda import pack, tiles
from kitsune_jax.targets.cuda.stage import facts

# ----------------------------------------------------------------------------------------------------------------------------------
# What a plan asks of a kernel, as code generation reads it.
#
# Comes in: a ``TileProgram`` and the plan's choices. Goes out: ``Arrangement``, with the geometry of the launch.
# ----------------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Arrangement:
    """``sm``: 900 (wgmma, bulk copies, clusters) or 800 (portable). ``lanes``: consumer warpgroups of a CTA. ``cluster``: CTAs of a
    cluster. ``replicas``: pipeline instances at most. ``resident`` and ``split`` per stage, ``places`` per queue ("cluster", "l2").
    ``shared_bytes``: of a CTA at most.
    """

    spatial: bool
    sm: int
    lanes: int
    cluster: int
    replicas: int
    resident: tuple[bool, ...]
    split: tuple[int, ...]
    places: tuple[str, ...]
    shared_bytes: int

    @property
    def ctas(self) -> int:
        """CTAs of one pipeline instance."""
        return sum(self.split) if self.spatial else self.cluster

    @property
    def threads(self) -> int:
        return (1 + self.lanes) * tiles.GROUP_THREADS

    @property
    def streamed(self) -> bool:
        return not all(self.resident)

    @property
    def cooperative(self) -> bool:
        return "l2" in self.places

    @property
    def tiles_at_once(self) -> int:
        """Of one instance."""
        return self.lanes * (1 if self.spatial else self.cluster)

    def instances(self, program: TileProgram) -> int:
        """Pipeline instances that have a tile."""
        each = (
            1 if facts.computes_only_numbers(program) else self.tiles_at_once
        )  # these go to the first lanes of all CTAs before the second ones
        return max(1, min(self.replicas, -(-self.tiles(program) // each)))

    def batch_tiles(self, program: TileProgram) -> int:
        """Of a batch, where all lanes of a CTA work on one batch at a time: a multiple of the lanes; 0 where they need not."""
        if not pack.cuts_by_groups(program):
            return 0
        return tiles.aligned(program.tiles // max(1, program.batches), self.lanes)

    def tiles(self, program: TileProgram) -> int:
        """All tiles of a lane, some of which may be beyond the rows of their batch."""
        if facts.computes_only_numbers(program):
            return -(-program.rows // facts.ROWS_OF_NUMBERS)
        return program.batches * self.batch_tiles(program) or program.tiles

    def gradient_parts(self, program: TileProgram) -> int:
        """CTAs that have a partial sum of each weight gradient (or of each slab of it)."""
        return self.instances(program) * (1 if self.spatial else self.ctas)

    def slab_queues(self, program: TileProgram) -> frozenset[int]:
        """Queues that a split stage writes or reads."""
        queues = enumerate(program.queues)
        return frozenset(k for k, q in queues if any(self.split[s] > 1 for s in (q.producer, *q.consumers)))

    def first_rank(self, stage: int) -> int:
        """That of the stage's first CTA among those of its instance."""
        return sum(self.split[:stage]) if self.spatial else 0


# ----------------------------------------------------------------------------------------------------------------------------------
# What a kernel asks the L2 for on behalf of the kernel behind it, as code generation reads it.
#
# Comes in: ``Ahead``, the planner's choice. Goes out: ``Fetch``: the pieces of an operand, and the code that asks for them
# (``cuda/include/kitsune/ahead.h``).
# ----------------------------------------------------------------------------------------------------------------------------------

PIECE_BYTES = 4096  # rows of a weight or so: a kernel that reads it in whatever order finds as much of each stretch


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """``pieces`` of ``PIECE_BYTES``, spread over the ``size`` bytes from byte ``first`` of an operand of ``array_bytes`` on.
    ``workers``: CTAs of the machine, all of which ask."""

    array_bytes: int
    first: int
    size: int
    pieces: int
    workers: int

    @staticmethod
    def of(ahead: Ahead) -> Fetch:
        pieces = max(1, ahead.fetched_bytes // PIECE_BYTES)
        return Fetch(ahead.array_bytes, ahead.first, ahead.weight_bytes, pieces, ahead.workers)

    def grid(self, working: int, ctas: int) -> int:
        """CTAs of a kernel of which ``working`` have tiles, in instances of ``ctas``."""
        return max(working, self.workers // ctas * ctas)

    @property
    def declared(self) -> str:
        """The operand, as a field of the kernel's parameters."""
        return "const void* ahead"

    @property
    def call(self) -> str:
        """By every consumer warpgroup, behind its last tile."""
        share = "block_id() * kLanes + group - 1, grid_size() * kLanes"
        return f"fetch_ahead<{self.first}, {self.size}, {self.pieces}, {PIECE_BYTES}>(p.ahead, {share});"

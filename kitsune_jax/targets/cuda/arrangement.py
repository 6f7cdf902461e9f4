"""What a plan asks of a kernel, as code generation reads it.

Comes in: a ``TileProgram`` and the plan's choices. Goes out: ``Arrangement``, with the geometry of the launch.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cuda import cuts, own_rows, tiles


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
        each = 1 if own_rows.are(program) else self.tiles_at_once  # these go to the first lanes of all CTAs before the second ones
        return max(1, min(self.replicas, -(-self.tiles(program) // each)))

    def batch_tiles(self, program: TileProgram) -> int:
        """Of a batch, where all lanes of a CTA work on one batch at a time: a multiple of the lanes; 0 where they need not."""
        if not cuts.by_groups(program):
            return 0
        return tiles.aligned(program.tiles // max(1, program.batches), self.lanes)

    def tiles(self, program: TileProgram) -> int:
        """All tiles of a lane, some of which may be beyond the rows of their batch."""
        if own_rows.are(program):
            return -(-program.rows // own_rows.ROWS)
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

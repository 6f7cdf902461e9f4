"""A plan's choices as code generation reads them: ``Arrangement``, with the geometry of the launch."""

from __future__ import annotations

import dataclasses

from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cuda import pack, tiles
from kitsune_jax.targets.cuda.stage import facts


@dataclasses.dataclass(frozen=True, slots=True)
class Arrangement:
    """How a kernel is arranged. ``sm``: 900 (wgmma, bulk copies, clusters) or 800 (portable). ``lanes``: consumer warpgroups of a
    CTA. ``cluster``: CTAs of a cluster. ``replicas``: most pipeline instances. ``resident`` and ``split``: of each stage;
    ``places``: of each queue ("cluster", "l2"). ``shared_bytes``: the most shared memory of a CTA."""

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
        """Tiles that one instance works on at a time."""
        return self.lanes * (1 if self.spatial else self.cluster)

    def instances(self, program: TileProgram) -> int:
        """Pipeline instances that have a tile."""
        # Scalar rows go to the first lanes of all CTAs before the second ones.
        each = 1 if facts.has_scalar_rows(program) else self.tiles_at_once
        return max(1, min(self.replicas, -(-self.tiles(program) // each)))

    def batch_tiles(self, program: TileProgram) -> int:
        """Tiles of a batch, a multiple of the lanes, where all lanes of a CTA work on one batch at a time; else 0."""
        if not pack.lanes_share_batch(program):
            return 0
        return tiles.aligned(program.tiles // max(1, program.batches), self.lanes)

    def tiles(self, program: TileProgram) -> int:
        """All tiles of the stream, including those beyond the rows of their batch."""
        if facts.has_scalar_rows(program):
            return -(-program.rows // facts.SCALAR_TILE_ROWS)
        return program.batches * self.batch_tiles(program) or program.tiles

    def gradient_parts(self, program: TileProgram) -> int:
        """CTAs that each hold a partial sum of every weight gradient (or of a slab of it)."""
        return self.instances(program) * (1 if self.spatial else self.ctas)

    def slab_queues(self, program: TileProgram) -> frozenset[int]:
        """Queues that a split stage writes or reads."""
        queues = enumerate(program.queues)
        return frozenset(k for k, q in queues if any(self.split[s] > 1 for s in (q.producer, *q.consumers)))

    def first_rank(self, stage: int) -> int:
        """The rank of the stage's first CTA within its instance."""
        return sum(self.split[:stage]) if self.spatial else 0

"""A plan's choices as code generation reads them: ``Arrangement``, with the geometry of the launch, and the kernel's kind."""

from __future__ import annotations

import dataclasses

from kitsune_jax.planning.plan import GpuPlan
from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cuda import pack, tiles
from kitsune_jax.targets.cuda.planning.machines import gpu
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


def arrangement_of(plan: GpuPlan, program: TileProgram) -> Arrangement:
    """The arrangement of the kernel that ``plan`` describes."""
    machine = gpu(plan.machine)
    return Arrangement(
        spatial=plan.arrangement == "spatial",
        sm=900 if machine.max_cluster > 1 else 800,
        lanes=plan.lanes,
        cluster=plan.cluster,
        replicas=plan.replicas,
        resident=tuple(stage.resident for stage in plan.stages),
        split=tuple(stage.split for stage in plan.stages),
        places=tuple(queue.place for queue in plan.queues),
        shared_bytes=machine.local_bytes,
    )


def kind_of(plan: GpuPlan, gradients: bool) -> str:
    """The name of the kernel's kind, for ``KITSUNE_CUDA_AVOID``: kernels of a kind have the same roles, rings and barriers.

    Names are ``sm90-vertical-resident-lanes2``, ``sm80-spatial-l2-lanes1-split``, ``sm90-spatial-cluster-lanes1-gradients`` and the
    like. ``gradients``: the kernel has weight gradients.
    """
    sm = "sm90" if gpu(plan.machine).max_cluster > 1 else "sm80"
    if plan.arrangement == "spatial":
        # Stages without rings: they share only what they load, or are a loop whose weights are split over a cluster.
        how = plan.queues[0].place if plan.queues else "cluster" if plan.cluster > 1 else "apart"
    else:
        how = "resident" if plan.stages[0].resident else f"streamed-cluster{plan.cluster}"
    split = "-split" if any(stage.split > 1 for stage in plan.stages) else ""
    return f"{sm}-{plan.arrangement}-{how}-lanes{plan.lanes}{split}{'-gradients' if gradients else ''}"

"""What all GPU plans of a region share: tiles, traffic, and the time beside the kernel's own work.

Comes in: a ``GpuCost`` whose machine is a GPU. Goes out: ``GpuRegion``, which turns an arrangement's numbers into a ``Plan``.
Invariant: a plan's time is launch, packing and start-up, and then the slowest of compute, memory and L2.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.planning.cost import pipeline_traffic
from kitsune_jax.planning.plan import Plan, Queue, Stage
from kitsune_jax.targets.cuda.planning.cost import GpuCost
from kitsune_jax.targets.cuda.planning.sizes import packed_bytes
from kitsune_jax.targets.cuda.planning.storage import Steps
from kitsune_jax.targets.cuda.planning.xla_times import baseline
from kitsune_jax.targets.cuda.tiles import FAN_IN, TILE_ROWS


@dataclasses.dataclass(frozen=True, slots=True)
class Arranged:
    """An arrangement with its numbers. ``busy``: seconds of the slowest stage, the filling of the pipeline and of shared memory
    with resident weights; ``l2_bytes``: what passes through the L2 beside the off-chip traffic."""

    arrangement: str
    stages: tuple[Stage, ...]
    queues: tuple[Queue, ...]
    replicas: int
    cluster: int
    lanes: int
    busy: float
    l2_bytes: float
    bound: str


class GpuRegion:
    """A region on a GPU: ``tiles`` of 64 rows, and ``steps(ops, split)``, computed once."""

    def __init__(self, cost: GpuCost):
        self.cost, self.machine = cost, cost.machine
        self.tiles = -(-cost.region.space.rows // TILE_ROWS)
        self.traffic = pipeline_traffic(cost)
        self.baseline_seconds, self.baseline_bytes = baseline(cost)
        self._steps: dict[tuple[tuple[int, ...], int], Steps] = {}

    def steps(self, ops: tuple[int, ...], split: int = 1) -> Steps:
        if (ops, split) not in self._steps:
            self._steps[ops, split] = Steps(self.cost, ops, split)
        return self._steps[ops, split]

    def plan(self, a: Arranged) -> Plan:
        machine = self.machine
        gathered, far = self.cost.lookups()
        ctas = a.replicas * (a.cluster if a.arrangement == "vertical" else 1)
        moved = self.traffic + far + self.cost.order_bytes() + self._partial_bytes(ctas, a.lanes)
        near = moved <= machine.shared_bytes // 2  # what the last kernel wrote is still in the L2
        dram = moved / (max(machine.shared_bandwidth, machine.dram_bandwidth) if near else machine.dram_bandwidth)
        near_bytes = a.l2_bytes + gathered - far + self.cost.atomic_bytes()
        l2 = (moved + near_bytes) / machine.shared_bandwidth  # whatever comes from memory comes through the L2
        l2 = max(l2, self.cost.atomic_seconds())
        bound = a.bound
        if max(dram, l2) > a.busy:
            bound = "dram" if dram >= l2 else "l2"
        return Plan(
            machine=machine.name,
            arrangement=a.arrangement,
            tile_rows=TILE_ROWS,
            tiles=self.tiles,
            stages=a.stages,
            queues=a.queues,
            replicas=a.replicas,
            seconds=machine.call_seconds
            + self._pack_seconds()
            + self.cost.order_seconds()
            + max(a.busy, dram, l2)
            + self._fold_seconds(ctas * a.lanes),
            baseline_seconds=self.baseline_seconds,
            bytes_moved=self.traffic,
            baseline_bytes=self.baseline_bytes,
            bound=bound,
            cluster=a.cluster,
            lanes=a.lanes,
            l2_bytes=int(moved + near_bytes),
            order=self.cost.order,
            unordered=self.cost.unordered,
        )

    def _pack_seconds(self) -> float:
        """One more kernel reads the weights and writes them packed."""
        weights = packed_bytes(self.cost, self.cost.region.ops, batches=True)
        return self.machine.kernel_seconds + 2 * weights / self.machine.dram_bandwidth if weights else 0.0

    def _fold_seconds(self, lanes: int) -> float:
        """The tables of all lanes are folded behind the last tile: those of 16 lanes by one, what they make by another. A thread
        has four numbers of each 512, and fetches those of four tables at once."""
        waits = sum(-(-words // 512) for words in self.cost.lane_tables()) * (FAN_IN + -(-lanes // FAN_IN)) / 4
        return waits * self.machine.place("l2").latency

    def _partial_bytes(self, ctas: int, lanes: int) -> int:
        """Every lane writes its partial sums, the lanes of a CTA one part of a weight gradient; of a sink by sorted indices a lane
        has two rows. They are read again in a fixed order."""
        gradients = [i for i in self.cost.region.sinks if self.cost.work(i).dot is not None]
        segments = [i for i in self.cost.region.sinks if (access := self.cost.access(i)) is not None and access.near]
        others = [i for i in self.cost.region.sinks if i not in gradients and self.cost.access(i) is None]
        parts = ctas * (self.cost.sink_bytes(gradients) + lanes * self.cost.sink_bytes(others))
        parts += ctas * lanes * sum(2 * 4 * self.cost.elements(i) for i in segments)
        parts += ctas * lanes * 4 * sum(self.cost.lane_tables())
        return parts * 2

"""The plan of a region on a CPU: every worker takes a tile through all ops, so no worker hands anything to another.

Comes in: a Graph, a Region and the machine model of a CPU. Goes out: its ``Plan``. Cores are alike, so a spatial pipeline would do
the same work and pay for its queues besides: of 5000 plans for 2 to 192 cores the model liked 24 spatial ones better, all of them
for regions that neither arrangement made faster than XLA. Invariants: a plan fits the machine, or ``Infeasible`` says why there is
none; and the same arguments give the same plan in every process.
"""

from __future__ import annotations

from collections.abc import Sequence

from kitsune_jax.graph import Graph
from kitsune_jax.planning.cost import pipeline_traffic
from kitsune_jax.planning.machine import Machine
from kitsune_jax.planning.plan import Infeasible, Plan, Stage
from kitsune_jax.planning.stages import finest, per_phase, stage_name
from kitsune_jax.streams.space import Region
from kitsune_jax.targets.cpu.planning.cost import CpuCost
from kitsune_jax.targets.cpu.planning.tile_size import Stages, tile_rows, vertical_fit
from kitsune_jax.targets.cpu.planning.times import SHARED_SECONDS
from kitsune_jax.targets.cpu.planning.xla_times import baseline, output_fault_seconds


def plan(graph: Graph, region: Region, machine: Machine) -> Plan:
    """The plan for ``region`` on ``machine``. Raises ``Infeasible`` (a ``ValueError``) with the reason."""
    if region.space.rows < 1:
        raise Infeasible("the stream has no rows")
    return _Planner(CpuCost(graph, region, machine)).run()


class _Planner:
    """The vertical plan of a CPU: a stage for each phase, and a replica on every worker that has a tile."""

    def __init__(self, cost: CpuCost):
        self.cost, self.machine, self.region = cost, cost.machine, cost.region
        self.traffic = pipeline_traffic(cost)
        self.drafts = per_phase(finest(cost, {}))
        self.stages = Stages(cost)

    def run(self) -> Plan:
        """Raises ``Infeasible``."""
        drafts = self.drafts
        rows = tile_rows(self.stages, drafts)
        fits = [vertical_fit(self.stages, d, rows) for d in drafts]
        tiles = self._tiles(rows)
        replicas = max(1, min(self.machine.workers, tiles))
        rounds = -(-tiles // replicas)
        moved = self.traffic + partial_bytes(self.cost, replicas)
        seconds, bound = self._total([rounds * f.seconds for f in fits], moved, replicas)
        base_seconds, base_bytes = baseline(self.cost)
        names = [stage_name(self.cost, s, d) for s, d in enumerate(drafts)]
        return Plan(
            platform=self.machine.platform,
            machine=self.machine.name,
            arrangement="vertical",
            tile_rows=rows,
            tiles=tiles,
            stages=tuple(
                Stage(name, d.ops, d.phase, f.resource, 1, f.seconds, self.cost.stationary_bytes(d.ops))
                for name, d, f in zip(names, drafts, fits, strict=True)
            ),
            queues=(),
            replicas=replicas,
            seconds=seconds,
            baseline_seconds=base_seconds,
            bytes_moved=self.traffic,
            baseline_bytes=base_bytes,
            flops=self.cost.flops(),
            bound=names[bound] if isinstance(bound, int) else bound,
            products=self.cost.products,
        )

    def _total(self, busy: Sequence[float], moved: float, replicas: int) -> tuple[float, int | str]:
        """(seconds, bound) of a region whose phases keep the workers ``busy`` for so long, one after the other."""
        machine = self.machine
        beyond = max(0.0, moved - machine.shared_bytes)  # what the last level does not hold
        dram = (moved - beyond) / max(machine.shared_bandwidth, machine.dram_bandwidth) + beyond / machine.dram_bandwidth
        compute = sum(busy)
        bound: int | str = "dram" if dram > compute else max(range(len(busy)), key=lambda k: busy[k])
        body = compute + dram  # the core that computes also moves
        strided = self.cost.strided_seconds() / machine.workers
        packing, alone = self._pack_seconds(), self.cost.times["call/short"]
        if packing + (compute * replicas if replicas > 1 else 0.0) < SHARED_SECONDS:
            return alone + packing + output_fault_seconds(self.cost) + strided + compute * replicas + dram, bound
        call = machine.call_seconds if replicas > 1 else alone
        return call + packing / machine.workers + output_fault_seconds(self.cost) + strided + body, bound

    def _tiles(self, rows: int) -> int:
        return -(-self.region.space.rows // rows)

    def _pack_seconds(self) -> float:
        """Worker-seconds in which weights are read and written once per call on their way into the micro-kernels' layout."""
        cost, seconds = self.cost, 0.0
        size = 2 * cost.stationary_bytes(self.region.ops)
        level = "l2" if size <= self.machine.local_bytes else "l3" if size <= self.machine.shared_bytes else "dram"
        packed = set()
        # A bias or a gain is laid out before the first tile as well: about half of what a small weight takes.
        seconds += 0.5 * cost.times["call/layer"] * len(cost.stationary_inputs(self.region.ops))
        for i in self.region.ops:
            work, op = cost.work(i), cost.graph.ops[i]
            if i in cost.sinks:
                seconds += cost.times["call/layer"]  # its accumulators are set to zero, added up and stored
            if work.dot is None or i in cost.sinks:
                continue
            weight = next((v for v in op.inputs if v not in cost.labels), -1)
            once = (weight, op["lhs_contract"], op["rhs_contract"])
            if once in packed:
                continue
            packed.add(once)
            seconds += cost.times["call/layer"]
            way = cost.products[0] if work.dot.dtype == "bfloat16" else "widened"
            elements = work.dot.batch * work.dot.k * work.dot.n
            contract = op["rhs_contract" if weight == op.inputs[1] else "lhs_contract"]
            transposed = len(cost.graph.values[weight].shape) - 1 in contract
            seconds += elements * cost.times.pack(work.dot.dtype, way, transposed, level)
        return seconds


def partial_bytes(cost: CpuCost, replicas: int) -> int:
    """Sinks are folded in a fixed order, so every worker keeps a partial result, which is written and read once more."""
    return replicas * cost.sink_bytes(cost.region.ops) * 2

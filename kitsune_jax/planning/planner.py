"""The planner: a Region and a Machine in, the Plan the model likes best out.

A GPU's candidates are made in ``gpu``. A CPU's are vertical fusion (one stage per phase, a replica on every worker) and spatial
pipelines (stages on different workers, from the finest down to two, merging contiguous stages). Invariants: a plan fits the
machine, or ``Infeasible`` says why there is none; every queue is deep enough for a pipeline whose stages all prefetch one tile
(``stages.Link.min_depth``); and the same arguments give the same plan in every process.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from kitsune_jax.graph import Graph
from kitsune_jax.planning.balance import Balance, Infeasible, Limits, Load, balance, screen, too_few_workers
from kitsune_jax.planning.bulk import baseline, output_fault_seconds
from kitsune_jax.planning.cost import RegionCost, pipeline_traffic
from kitsune_jax.planning.fit import Fit, Stages, sink_bytes, spatial_fit, stationary_bytes, tile_rows, vertical_fit
from kitsune_jax.planning.gpu import candidates
from kitsune_jax.planning.machine import Machine
from kitsune_jax.planning.plan import Plan, Queue, Stage
from kitsune_jax.planning.stages import Draft, Link, Merging, finest, links, per_phase, stage_name
from kitsune_jax.streams.space import Region

__all__ = ["Infeasible", "plan"]

# Where entries lie when one worker hands them to one other; everything else goes through the cache all workers share.
_NEAR = "l2"
# Ops that are looked at in search of a spatial pipeline, up to a small factor.
_MOST_STEPS = 20_000
# What a target says to a plan: None, or why it has no code for it.
Accept = Callable[[Plan], str | None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Candidate:
    arrangement: str
    rows: int
    drafts: tuple[Draft, ...]
    fits: tuple[Fit, ...]
    links: tuple[Link, ...]
    workers: tuple[int, ...]
    replicas: int
    seconds: float
    bound: int | str  # stage index, or "dram" / "l2"


def plan(graph: Graph, region: Region, machine: Machine, *, accept: Accept | None = None) -> Plan:
    """The fastest plan for ``region`` on ``machine`` by the cost model. Raises ``Infeasible`` (a ``ValueError``) with the reason.

    ``accept``: the target's exact check; candidates are shown to it from the fastest on, and where it refuses all of them its
    reasons are the message.
    """
    if region.space.rows < 1:
        raise Infeasible("the stream has no rows")
    cost = RegionCost(graph, region, machine)
    found = candidates(cost) if machine.platform == "cuda" else [_Planner(cost).run()]
    if accept is None:
        return found[0]
    reasons: dict[str, None] = {}
    for candidate in found:
        why = accept(candidate)
        if why is None:
            return candidate
        reasons[why] = None
    raise Infeasible("; ".join(reasons))


class _Planner:
    def __init__(self, cost: RegionCost):
        self.cost, self.machine, self.region = cost, cost.machine, cost.region
        self.traffic = pipeline_traffic(cost)
        self.drafts = finest(cost)
        self.fused = per_phase(self.drafts)
        self.stages = Stages(cost)

    def run(self) -> Plan:
        best: _Candidate | None = None
        reasons: list[str] = []
        try:
            best = self._vertical()
        except Infeasible as no:
            reasons.append(f"fused: {no}")
        try:
            spatial = self._spatial(None if best is None else best.seconds)
            if spatial is not None and (best is None or spatial.seconds < best.seconds):
                best = spatial
        except Infeasible as no:
            reasons.append(f"spatial: {no}")
        if best is None:
            raise Infeasible("; ".join(reasons))
        return self._plan(best)

    # -- vertical

    def _vertical(self) -> _Candidate:
        drafts = self.fused
        rows = tile_rows(self.stages, drafts)
        fits = tuple(vertical_fit(self.stages, d, rows) for d in drafts)
        replicas = max(1, min(self.machine.workers, self._tiles(rows)))
        rounds = -(-self._tiles(rows) // replicas)
        busy = [rounds * f.seconds for f in fits]
        moved = self.traffic + self._partial_bytes(replicas)
        seconds, bound = self._total(busy, moved)
        return _Candidate("vertical", rows, drafts, fits, (), (1,) * len(drafts), replicas, seconds, bound)

    def _total(self, busy: Sequence[float], moved: float) -> tuple[float, int | str]:
        """(seconds, bound) of a region whose phases keep the workers ``busy`` for so long, one after the other."""
        machine = self.machine
        near = moved <= machine.shared_bytes // 2
        dram = moved / (max(machine.shared_bandwidth, machine.dram_bandwidth) if near else machine.dram_bandwidth)
        compute = sum(busy)
        bound: int | str = "dram" if dram > compute else max(range(len(busy)), key=lambda k: busy[k])
        body = compute + dram  # the core that computes also moves
        strided = self.cost.strided_seconds() / machine.workers
        return machine.call_seconds + self._pack_seconds() + output_fault_seconds(self.cost) + strided + body, bound

    # -- spatial

    def _spatial(self, to_beat: float | None) -> _Candidate | None:
        """The best spatial pipeline, or None where none can be faster than ``to_beat`` or the region has one stage per phase."""
        if len(self.drafts) == len(self.fused):
            return None
        rows = tile_rows(self.stages, self.drafts, vertical=False)
        if to_beat is not None and self._cannot_beat(to_beat, rows):
            return None
        best: _Candidate | None = None
        for drafts in self._groupings(rows):
            candidate = self._pipeline(drafts, rows, screen)
            if best is None or candidate.seconds < best.seconds:
                best = candidate
        if best is None:
            finest_phase = max(collections.Counter(d.phase for d in self.drafts).values())
            raise too_few_workers(finest_phase, finest_phase, self.machine.workers)
        if to_beat is not None and best.seconds >= to_beat:
            return None
        return self._pipeline(best.drafts, rows, balance)

    def _cannot_beat(self, to_beat: float, rows: int) -> bool:
        """Would every spatial pipeline be slower even with all workers busy all the time, and with free queues?

        Nearly always, where the workers are alike, and the answer takes one look at the region: whatever the stages, their ops take
        as long, and each stage has a tile to pick and a hop to wait for.
        """
        machine, tiles = self.machine, self._tiles(rows)
        stages = 2 if len(self.fused) == 1 else 1  # of a phase, at least
        overhead = stages * (machine.places[-1].latency + machine.tile_seconds)
        busy = []
        for phase in self.fused:
            tile = self.stages[phase].least_seconds(rows) + overhead
            busy.append(tile + overhead + tiles * tile / machine.workers)
        return self._spatial_seconds(busy) >= to_beat

    def _groupings(self, rows: int) -> Iterator[tuple[Draft, ...]]:
        """Neighbours merged, the cheapest first, from as many stages as there are workers for to one more than there are phases.

        Each grouping costs a walk over the whole region. Where these are too many, numbers of stages are left out, more of the
        large ones.
        """
        merging = Merging(self.drafts, lambda i: self.cost.tile_seconds(i, rows, vertical=False))
        share = max(2, _MOST_STEPS // len(self.region.ops))
        following = len(merging)
        while len(merging) > len(self.fused):
            if len(merging) <= following and merging.most_of_a_phase() <= self.machine.workers:
                yield merging.drafts()
                following = len(merging) - max(1, len(merging) // share)
            merging.merge()

    def _pipeline(self, drafts: Sequence[Draft], rows: int, solve: Callable[[Sequence[Load], Limits], Balance]) -> _Candidate:
        queues = links(self.cost, drafts)
        fits = spatial_fit(self.stages, drafts, queues, rows)
        phases = sorted({d.phase for d in drafts})
        workers = [0] * len(drafts)
        busy: list[float] = []
        bounds: list[int | str] = []
        crossing = sum(rows * self.cost.row_bytes(q.value) * (1 + len(q.consumers)) for q in queues)
        for phase in phases:
            here = [s for s, d in enumerate(drafts) if d.phase == phase]
            loads = [Load(str(s), fits[s].resource, fits[s].seconds) for s in here]
            result = solve(loads, self._limits(crossing / len(phases)))
            for s, a in zip(here, result.workers, strict=True):
                workers[s] = a
            fill = sum(fits[s].seconds + self._hop() for s in here)
            busy.append(fill + self._tiles(rows) / result.throughput)
            bounds.append(result.bound if result.bound in ("dram", "l2") else int(result.bound))
        bound = bounds[max(range(len(busy)), key=lambda k: busy[k])]
        return _Candidate("spatial", rows, tuple(drafts), fits, queues, tuple(workers), 1, self._spatial_seconds(busy), bound)

    def _spatial_seconds(self, busy: Sequence[float]) -> float:
        moved = self.traffic + self._partial_bytes(self.machine.workers)
        return self._total(busy, 0.0)[0] + moved / self.machine.dram_bandwidth

    def _limits(self, crossing: float) -> Limits:
        return Limits(self.machine.workers, False, l2_bytes=crossing, l2_bandwidth=self.machine.shared_bandwidth)

    # -- shared

    def _tiles(self, rows: int) -> int:
        return -(-self.region.space.rows // rows)

    def _hop(self) -> float:
        return self.machine.places[-1].latency + self.machine.tile_seconds

    def _pack_seconds(self) -> float:
        """Weights are read and written once per call on their way into the micro-kernels' layout, by all workers together."""
        cost, machine = self.cost, self.machine
        seconds = 0.0
        for i in self.region.ops:
            work = cost.work(i)
            if work.dot is None or i in cost.sinks:
                continue
            way = cost.products[0] if work.dot.dtype == "bfloat16" else "widened"
            elements = work.dot.batch * work.dot.k * work.dot.n
            seconds += elements * cost.times.pack(work.dot.dtype, way)
        return seconds / machine.workers

    def _partial_bytes(self, replicas: int) -> int:
        """Sinks are folded in a fixed order, so every worker keeps a partial result, which is written and read once more."""
        return replicas * sink_bytes(self.cost, self.region.ops) * 2

    def _plan(self, c: _Candidate) -> Plan:
        base_seconds, base_bytes = baseline(self.cost)
        names = [stage_name(self.cost, s, d) for s, d in enumerate(c.drafts)]
        stages = tuple(
            Stage(names[s], d.ops, d.phase, f.resource, c.workers[s], f.seconds, stationary_bytes(self.cost, d.ops))
            for s, (d, f) in enumerate(zip(c.drafts, c.fits, strict=True))
        )
        return Plan(
            platform=self.machine.platform,
            machine=self.machine.name,
            arrangement=c.arrangement,
            tile_rows=c.rows,
            tiles=self._tiles(c.rows),
            stages=stages,
            queues=self._queues(c),
            replicas=c.replicas,
            seconds=c.seconds,
            baseline_seconds=base_seconds,
            bytes_moved=self.traffic,
            baseline_bytes=base_bytes,
            flops=self.cost.flops(),
            bound=names[c.bound] if isinstance(c.bound, int) else c.bound,
            products=self.cost.products,
        )

    def _queues(self, c: _Candidate) -> tuple[Queue, ...]:
        entries = [c.rows * self.cost.row_bytes(link.value) for link in c.links]
        depths = [_depth(link, c.workers) for link in c.links]
        if sum(d * e for d, e in zip(depths, entries, strict=True)) > self.machine.shared_bytes // 2:
            depths = [link.min_depth for link in c.links]
        queues = []
        for link, depth, entry in zip(c.links, depths, entries, strict=True):
            place = self.machine.places[-1].name
            alone = len(link.consumers) == 1 and c.workers[link.producer] == c.workers[link.consumers[0]] == 1
            if alone and depth * entry <= self.machine.local_bytes // 2 and any(p.name == _NEAR for p in self.machine.places):
                place = _NEAR
            queues.append(Queue(link.value, link.producer, link.consumers, depth, entry, place))
        return tuple(queues)


def _depth(link: Link, workers: Sequence[int]) -> int:
    """Entries for every tile that the producer can be ahead: each worker of each stage on the way may hold one."""
    ahead = sum(workers[link.producer + 1 : link.consumers[-1] + 1])
    return max(link.min_depth, 1 + max(workers[link.producer], ahead))

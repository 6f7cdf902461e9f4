"""Spatial pipelines on a GPU: a CTA per stage, weights resident, tiles handed on through rings.

Comes in: a ``GpuRegion`` and its finest stages. Goes out: one ``Arranged`` per number of stages, lanes and place of the rings, each
with the grouping whose slowest stage is fastest. Rings lie in the consumer's shared memory, and then all stages are one cluster, or
in global memory that stays in the L2, and then a stage may be split over several CTAs by columns of its result ("slabs").
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from kitsune_jax.planning.balance import Load, balance
from kitsune_jax.planning.machine import size_text
from kitsune_jax.planning.plan import Infeasible, Queue, Stage
from kitsune_jax.planning.stages import DOUBLE_BUFFER, Link, Ops, joined, links, links_to_each, resource_of, stage_name
from kitsune_jax.targets.cuda.planning.grouping import grouped, separated
from kitsune_jax.targets.cuda.planning.region import Arranged, GpuRegion
from kitsune_jax.targets.cuda.planning.sizes import entry_bytes, packed_bytes
from kitsune_jax.targets.cuda.planning.splits import most_split
from kitsune_jax.targets.cuda.planning.storage import Storage, shared_bytes
from kitsune_jax.targets.cuda.planning.times import TileWork, matmul_efficiency, tile_work

# One-way trips of a hand-off that no ring hides while the pipeline fills. DSMEM: the data, whose arrival completes the barrier. L2:
# the data, the flag behind a fence, and the reader's loads.
_TRIPS = {"cluster": 1, "l2": 3}
_NEVER = float("inf")
# Entries that a ring has where there is room. Two let a stage write one tile while the next one reads the other, and then both wait
# for whichever tile takes longest; four take up the differences between tiles and the trips of the flags in both directions.
_DEEP = 4
# The part of the L2 in which rings are made deeper: what streams through the region passes through the L2 too.
_DEEP_SHARE = 4
# Every contiguous group of drafts is costed: more than these are first made fewer, so that planning stays a part of compilation.
_MOST_DRAFTS = 24


def spatial(region: GpuRegion, drafts: Sequence[Ops]) -> list[Arranged]:
    """Raises ``Infeasible`` with the reason where no spatial pipeline fits."""
    found: list[Arranged] = []
    builders = [
        _Builder(region, place, lanes)
        for place in ("cluster", "l2")
        if place == "l2" or region.machine.max_cluster > 1
        for lanes in range(1, 1 + len(region.machine.lane_registers))
    ]
    for builder in builders:
        found += builder.run(drafts)
    if not found:
        reasons = [b.reason for b in builders if b.reason]
        raise Infeasible(reasons[-1] if reasons else "one stage is no pipeline")
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Stage:
    """A stage of a grouping: its split and the bytes per tile that enter and leave one of its CTAs."""

    ops: Ops
    split: int
    work: TileWork
    entering: int
    leaving: int


class _Builder:
    """Pipelines with rings at ``place`` and ``lanes`` consumer warpgroups per CTA. ``reason``: why the last stage did not fit."""

    def __init__(self, region: GpuRegion, place: str, lanes: int):
        self.region, self.cost, self.machine = region, region.cost, region.machine
        self.place, self.lanes = place, lanes
        self.reason = ""
        self.wait = _TRIPS[place] * self.machine.place(place).latency
        self._least_split = functools.cache(self._find_least_split)
        self._crossing = functools.cache(self._count_crossing)
        self._stage = functools.cache(self._make_stage)

    def run(self, drafts: Sequence[Ops]) -> list[Arranged]:
        if self.place == "cluster":
            groupings = self._groupings(drafts, self.machine.max_cluster)
            made = []
            for g in groupings:
                # What a stage needs is not overstated here, so deep rings may turn out not to fit: shallow ones come next.
                found = [self._arranged(g, [1] * len(g), self.machine.clusters(len(g)), deep) for deep in (True, False)]
                made += found if found[0] != found[1] else found[:1]
        else:
            drafts = [part for d in drafts for part in (separated(self.cost, d) if self._least_split(d) is None else (d,))]
            groupings = self._groupings(drafts, self.machine.workers)
            made = [self._balanced(g) for g in groupings]
        return [a for a in made if a is not None]

    # -- what fits

    def _groupings(self, drafts: Sequence[Ops], most: int) -> list[tuple[Ops, ...]]:
        drafts = self._few(drafts)

        @functools.cache
        def seconds(a: int, b: int) -> float:
            ops = joined(drafts[a:b])
            split = self._least_split(ops)
            if split is None:
                return _NEVER
            return self._period(self._stage(ops, split), most)

        return grouped(drafts, seconds, most)

    def _few(self, drafts: Sequence[Ops]) -> Sequence[Ops]:
        """Neighbours made one stage, the least work first and while they fit a CTA, until no more are left than are looked at."""
        if len(drafts) <= _MOST_DRAFTS:
            return drafts
        drafts = list(drafts)

        def seconds(k: int) -> float | None:
            """Of draft ``k`` and the next as one stage; None where they do not fit."""
            ops = joined(drafts[k : k + 2])
            return self._stage(ops, 1).work.latency() if self._least_split(ops) == 1 else None

        pairs = [seconds(k) for k in range(len(drafts) - 1)]
        while len(drafts) > _MOST_DRAFTS:
            fitting = [(t, k) for k, t in enumerate(pairs) if t is not None]
            if not fitting:
                break
            _, k = min(fitting)
            drafts[k : k + 2] = [joined(drafts[k : k + 2])]
            del pairs[k]
            for neighbour in range(max(k - 1, 0), min(k + 1, len(pairs))):
                pairs[neighbour] = seconds(neighbour)
        return drafts

    def _find_least_split(self, ops: Ops) -> int | None:
        """The fewest CTAs whose shared memory holds the weights of ``ops``, two entries of every ring, and the images."""
        entering, _ = self._crossing(ops)
        rings = DOUBLE_BUFFER * entering if self.place == "cluster" else 0
        most = self._most_split(ops)
        bare = packed_bytes(self.cost, ops)
        for split in range(max(1, min(most, bare // self.machine.local_bytes)), most + 1):
            if most_split(self.cost, ops, split) == split and self._fits(ops, split, rings):
                return split
        return None

    def _most_split(self, ops: Ops) -> int:
        return 1 if self.place == "cluster" else most_split(self.cost, ops, self.machine.workers)

    def _fits(self, ops: Ops, split: int, rings: int) -> bool:
        """``rings``: bytes per lane. Weights are looked at first: they settle most cases, and cost nothing to count."""
        weights, limit = packed_bytes(self.cost, ops, split), self.machine.local_bytes
        need = weights + self.lanes * rings
        if need <= limit:
            storage = self._storage(ops, split)
            if storage is None:
                self.reason = "the values of 64 rows do not fit the registers of a warpgroup"
                return False
            need = shared_bytes(self.cost, ops, storage, self.lanes, weights, rings)
        if need > limit:
            self.reason = f"a stage needs {size_text(need)} of shared memory; a CTA has {size_text(limit)}"
        return need <= limit

    def _storage(self, ops: Ops, split: int) -> Storage | None:
        return self.region.steps(ops, split).storage(self.machine.lane_registers[self.lanes - 1], self.lanes)

    def _make_stage(self, ops: Ops, split: int) -> _Stage:
        """A stage that ``_fits``."""
        storage = self._storage(ops, split)
        assert storage is not None
        work = tile_work(self.cost, ops, storage, matmul_efficiency(self.machine, "spatial", True), split)
        entering, leaving = self._crossing(ops)
        return _Stage(ops, split, work, entering, leaving // split)

    def _count_crossing(self, ops: Ops) -> tuple[int, int]:
        """Bytes of a tile that reach ``ops`` from other stages and that they hand on."""
        inside = frozenset(ops)
        cost = self.cost
        reads = dict.fromkeys(v for i in ops for v in cost.graph.ops[i].inputs if cost.streamed(v) and v in cost.producer)
        entering = [v for v in reads if cost.producer[v] not in inside and not cost.is_maker(cost.producer[v])]
        made = [v for i in ops if not cost.is_maker(i) for v in cost.graph.ops[i].outputs if cost.streamed(v)]
        leaving = [v for v in made if not inside.issuperset(cost.readers.get(v, ()))]
        return sum(entry_bytes(cost, v) for v in entering), sum(entry_bytes(cost, v) for v in leaving)

    # -- how long it takes

    def _link_seconds(self, stage: _Stage, ctas: int) -> float:
        """A tile's rings at one CTA: both directions at once."""
        machine = self.machine
        if self.place == "l2":
            bandwidth = machine.place("l2").bandwidth
        else:
            bandwidth = machine.rate(machine.cluster_bandwidth, str(ctas)) / machine.workers
        return max(stage.entering, stage.leaving) / bandwidth

    def _period(self, stage: _Stage, ctas: int) -> float:
        return max(stage.work.period(self.lanes, self.wait), self._link_seconds(stage, ctas))

    def _balanced(self, drafts: tuple[Ops, ...]) -> Arranged | None:
        """Slabs for the number of instances that the linear model likes best. More CTAs per instance, or more instances."""
        least = [self._least_split(d) for d in drafts]
        if any(s is None for s in least):
            return None
        loads = []
        for draft, split in zip(drafts, least, strict=True):
            assert split is not None
            seconds = self._period(self._stage(draft, split), 1)
            loads.append(Load(seconds * split, split, max(split, self._most_split(draft))))
        ctas = sum(load.least for load in loads)
        if ctas > self.machine.workers:
            self.reason = (
                f"{len(drafts)} stages with their weights resident need {ctas} CTAs; the machine has {self.machine.workers}"
            )
            return None
        best: tuple[float, int, tuple[int, ...]] | None = None
        for instances in sorted({self.machine.workers // ctas, *_powers_of_two(self.machine.workers // ctas)}):
            result = balance(loads, self.machine.workers // instances)
            rate = min(instances, self.region.tiles) * result.throughput
            if best is None or rate > best[0]:
                best = rate, instances, result.workers
        assert best is not None
        splits = [most_split(self.cost, d, split) for d, split in zip(drafts, best[2], strict=True)]
        return self._arranged(drafts, splits, self.machine.workers // sum(splits))

    def _arranged(self, drafts: Sequence[Ops], splits: Sequence[int], instances: int, deep: bool = True) -> Arranged | None:
        """The pipeline with its rings at least as deep as skips need; None where that does not fit."""
        region, cost, machine = self.region, self.cost, self.machine
        # An entry in the L2 is written once, whoever reads it; one in shared memory lies with its reader.
        queued = (links if self.place == "l2" else links_to_each)(cost, drafts)
        instances = max(1, min(instances, region.tiles))
        stages: list[_Stage] = []
        for s, (draft, split) in enumerate(zip(drafts, splits, strict=True)):
            inward = [link for link in queued if s in link.consumers]
            rings = sum(link.min_depth * entry_bytes(cost, link.value) for link in inward) if self.place == "cluster" else 0
            if not self._fits(draft, split, rings):
                return None
            entering = sum(entry_bytes(cost, link.value) for link in inward)
            leaving = sum(entry_bytes(cost, link.value) for link in queued if link.producer == s)
            stages.append(dataclasses.replace(self._stage(draft, split), entering=entering, leaving=leaving // split))
        depths = self._depths(queued, drafts, splits, instances, _DEEP if deep else 0)
        if depths is None:
            self.reason = "the rings of all instances do not fit half of the L2"
            return None
        ctas = sum(splits)
        busy, slowest = self._busy(stages, ctas, instances)
        names = [stage_name(cost, s, d) for s, d in enumerate(drafts)]
        crossing = sum(s.split * (s.entering + s.leaving) for s in stages) if self.place == "l2" else 0
        weights = instances * sum(s.split * packed_bytes(cost, s.ops, s.split) for s in stages)
        return Arranged(
            "spatial",
            tuple(self._planned(stage, names[k], ctas) for k, stage in enumerate(stages)),
            tuple(map(self._queue, queued, depths)),
            instances,
            ctas if self.place == "cluster" else 1,
            self.lanes,
            busy=busy + weights / machine.shared_bandwidth,
            l2_bytes=float(crossing * region.tiles + weights),
            bound=names[slowest],
        )

    def _depths(
        self, queued: Sequence[Link], drafts: Sequence[Ops], splits: Sequence[int], instances: int, wanted: int
    ) -> list[int] | None:
        """The depth of each ring: ``wanted`` where there is room beside everything else, what its skips need where there is not.

        None where not even that fits the L2. Rings in shared memory have fitted their readers before.
        """
        least, deep = [link.min_depth for link in queued], [max(link.min_depth, wanted) for link in queued]
        entries = [entry_bytes(self.cost, link.value) for link in queued]
        if self.place == "cluster":
            for s, (draft, split) in enumerate(zip(drafts, splits, strict=True)):
                mine = [k for k, link in enumerate(queued) if s in link.consumers]
                if not self._fits(draft, split, sum(deep[k] * entries[k] for k in mine)):
                    for k in mine:
                        deep[k] = least[k]
            return deep

        def needed(depths: Sequence[int]) -> int:
            return instances * self.lanes * sum(d * entry for d, entry in zip(depths, entries, strict=True))

        if needed(deep) <= self.machine.shared_bytes // _DEEP_SHARE:
            return deep
        return least if needed(least) <= self.machine.shared_bytes // 2 else None

    def _busy(self, stages: Sequence[_Stage], ctas: int, instances: int) -> tuple[float, int]:
        """(seconds from the first tile's entry to the last one's exit, the slowest stage)."""
        tiles = -(-self.region.tiles // instances)
        times = [max(s.work.busy(tiles, self.lanes, self.wait), tiles * self._link_seconds(s, ctas)) for s in stages]
        slowest = max(range(len(stages)), key=lambda k: times[k])
        fill = sum(s.work.latency(self.wait) for k, s in enumerate(stages) if k != slowest)
        return self.machine.tile_seconds + fill + times[slowest], slowest

    def _planned(self, s: _Stage, name: str, ctas: int) -> Stage:
        resource = resource_of(self.cost, s.ops)
        return Stage(name, s.ops, resource, s.split, self._period(s, ctas), split=s.split)

    def _queue(self, link: Link, depth: int) -> Queue:
        return Queue(link.value, link.producer, link.consumers, depth, entry_bytes(self.cost, link.value), self.place)


def _powers_of_two(most: int) -> Iterator[int]:
    n = 1
    while n <= most:
        yield n
        n *= 2

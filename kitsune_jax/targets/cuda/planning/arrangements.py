"""The arrangements of a GPU plan: spatial pipelines, groupings of stages, and loops whose weights are split over a cluster.

Comes in: a ``GpuCost``, or the finest stages of its region. Goes out: ``Arranged``, every arrangement that fits with its times,
which ``GpuRegion.plan`` turns into a ``GpuPlan``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

from kitsune_jax.ops.loops import parts
from kitsune_jax.ops.reduce import ONLINE
from kitsune_jax.planning.cost import DotWork, itemsize, pipeline_traffic
from kitsune_jax.planning.plan import GpuPlan, Infeasible, Queue, Stage, size_text
from kitsune_jax.planning.stages import (
    DOUBLE_BUFFER,
    Link,
    Load,
    Ops,
    balance,
    joined,
    links,
    resource_of,
    stage_name,
    with_makers,
)
from kitsune_jax.targets.cuda.planning.cost import (
    ELEMENTWISE,
    GpuCost,
    StageSteps,
    Storage,
    TileWork,
    ahead_seconds,
    entry_bytes,
    is_splittable,
    largest_storage,
    load_seconds,
    loops_of,
    most_split,
    packed_bytes,
    repeated_bytes,
    shared_bytes,
    tile_work,
)
from kitsune_jax.targets.cuda.planning.machines import matmul_efficiency
from kitsune_jax.targets.cuda.planning.xla import baseline
from kitsune_jax.targets.cuda.tiles import (
    BLOCK_COLUMNS,
    EXCHANGE_DEPTH,
    FAN_IN,
    HALF_TILE_ROWS,
    NO_RING,
    SEGMENTS_FAN_IN,
    SUM_BYTES,
    TILE_ROWS,
    InputRing,
    padded,
)

# --- All plans of a region: tiles, traffic, and seconds that the kernel's own work does not account for ---------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Arranged:
    """An arrangement with its numbers. ``busy``: seconds of the slowest stage, of filling the pipeline, and of loading resident
    weights; ``l2_bytes``: bytes that pass through the L2 in addition to the off-chip traffic; ``ring``: of tiles of inputs."""

    arrangement: str
    stages: tuple[Stage, ...]
    queues: tuple[Queue, ...]
    replicas: int
    cluster: int
    lanes: int
    busy: float
    l2_bytes: float
    bound: str
    tile_rows: int = TILE_ROWS
    ring: InputRing = NO_RING


class GpuRegion:
    """A region on a GPU: ``tiles`` of 64 rows, and ``steps(ops, split)``, computed once."""

    def __init__(self, cost: GpuCost):
        self.cost, self.machine = cost, cost.machine
        self.tiles = -(-cost.region.space.rows // TILE_ROWS)
        self.traffic = pipeline_traffic(cost)
        self.baseline_seconds, self.baseline_bytes = baseline(cost)
        self.steps = functools.cache(functools.partial(StageSteps, cost))

    def plan(self, a: Arranged) -> GpuPlan:
        """The plan of ``a``. Its time is launch, packing and start-up, and then the slowest of compute, memory and L2."""
        machine = self.machine
        gathered, far = self.cost.gathered_bytes()
        ctas = a.replicas * (a.cluster if a.arrangement == "vertical" else 1)
        moved = self.traffic + far + self.cost.order_bytes() + self._partial_bytes(ctas, a.lanes)
        if moved > machine.shared_bytes // 2:
            moved += sum(repeated_bytes(self.cost, stage.ops, a.ring) for stage in a.stages)
        pieces = min(moved, self.cost.piece_bytes() - sum(map(self.cost.bytes, a.ring.values)))
        whole = machine.bandwidth(moved)
        dram = (moved - pieces) / whole + pieces / min(whole, machine.transfers.piece_bandwidth)
        near_bytes = a.l2_bytes + gathered - far + self.cost.atomic_bytes()
        l2 = max((moved + near_bytes) / machine.shared_bandwidth, self.cost.atomic_seconds())  # traffic of memory passes the L2 too
        bound = a.bound
        if max(dram, l2) > a.busy:
            bound = "dram" if dram >= l2 else "l2"
        beside = machine.call_seconds + self.pack_seconds() + self.cost.order_seconds()
        return GpuPlan(
            machine=machine.name,
            arrangement=a.arrangement,
            tile_rows=a.tile_rows,
            tiles=-(-self.cost.region.space.rows // a.tile_rows),
            stages=a.stages,
            queues=a.queues,
            replicas=a.replicas,
            seconds=beside + max(a.busy, dram, l2) + self._fold_seconds(ctas * a.lanes),
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

    def pack_seconds(self) -> float:
        """Seconds of the kernel that packs the weights, in front of the call's own."""
        transfers, packed = self.machine.transfers, self.packed_bytes
        seconds = 2 * packed / min(transfers.pack_bandwidth, self.machine.dram_bandwidth)
        return self.machine.kernel_seconds + transfers.pack_seconds + seconds if packed else 0.0

    @property
    def packed_bytes(self) -> int:
        """Bytes of all packed weights, those of every batch included."""
        return packed_bytes(self.cost, self.cost.region.ops, batches=True)

    def _fold_seconds(self, lanes: int) -> float:
        """Seconds after the last tile, when one lane folds what all lanes have left: their tables, of which others fold 16 each
        before; and for each sink by sorted indices two rows of each 32 lanes, 64 in a round, when the last of these 32 has folded
        theirs in a round of its own. A thread has four numbers of each 512 of a table, and fetches those of four tables, or of four
        rows, at once, or eight rows of an online sum; each fetch takes a hop's time. (The record's last lane of a graph attention
        network, which fetched the 416 rows of all lanes one by one, needed 273 us.)"""
        waits, hops = sum(-(-words // 512) for words in self.cost.lane_tables()) * (FAN_IN + -(-lanes // FAN_IN)) / 4, 0
        for i in self.cost.region.sinks:
            access, op = self.cost.access(i), self.cost.graph.ops[i]
            if access is not None and access.near:
                blocks = -(-padded(self.cost.elements(i)) // BLOCK_COLUMNS)
                rounds = 1 + -(-2 * -(-lanes // SEGMENTS_FAN_IN) // TILE_ROWS)
                hops += rounds * blocks * (2 if op.kind in ONLINE else 4)
        return waits * self.machine.place("l2").latency + hops * self.machine.rate(self.machine.transfers.hop_seconds, "l2")

    def _partial_bytes(self, ctas: int, lanes: int) -> int:
        """Bytes of partial sums written, and read again in a fixed order: those of every lane, one part of a weight gradient for
        each CTA, and two rows of a lane for a sink by sorted indices."""
        gradients = [i for i in self.cost.region.sinks if self.cost.work(i).dot is not None]
        segments = [i for i in self.cost.region.sinks if (access := self.cost.access(i)) is not None and access.near]
        others = [i for i in self.cost.region.sinks if i not in gradients and self.cost.access(i) is None]
        parts = ctas * (self.cost.sink_bytes(gradients) + lanes * self.cost.sink_bytes(others))
        parts += ctas * lanes * sum(2 * 4 * self.cost.elements(i) for i in segments)
        parts += ctas * lanes * 4 * sum(self.cost.lane_tables())
        return parts * 2


# --- Stages split and grouped; they stay in topological order, and only makers may be in several stages ---------------------------


def separated(cost: GpuCost, stage: Ops) -> tuple[Ops, ...]:
    """``stage`` as up to three stages, so that its matmul is among only elementwise ops and can be split by columns.

    A stage without a matmul, or that is splittable already, stays one.
    """
    dot = next((i for i in stage if cost.work(i).dot is not None and i not in cost.sinks), None)
    if dot is None or is_splittable(cost, stage):
        return (stage,)
    ops = [i for i in stage if not cost.is_maker(i)]
    body, rest = _followers(cost, ops, dot)
    front = _ops_before(cost, [i for i in ops if i not in body and i not in rest], body, rest)
    return with_makers(cost, [tuple(sorted(part)) for part in (front, body, rest) if part])


def _followers(cost: GpuCost, ops: Sequence[int], dot: int) -> tuple[set[int], set[int]]:
    """(the matmul and the elementwise ops on its columns that follow it, all other ops that depend on it)."""
    columns = cost.row_size(cost.graph.ops[dot].outputs[0])
    body, rest = {dot}, set[int]()
    for i in ops:
        before = {cost.producer[v] for v in cost.graph.ops[i].inputs if v in cost.producer}
        here = cost.family(i) in ELEMENTWISE and i not in cost.sinks and cost.row_size(cost.graph.ops[i].outputs[0]) == columns
        if before & rest or (before & body and not here):
            rest.add(i)
        elif before & body:
            body.add(i)
    return body, rest


def _ops_before(cost: GpuCost, ops: Sequence[int], body: set[int], rest: set[int]) -> set[int]:
    """The ops that stay in front of the matmul. Those that only ``body`` or ``rest`` need are added to these."""
    front: set[int] = set()
    for i in reversed(ops):
        readers = {c for v in cost.graph.ops[i].outputs for c in cost.readers.get(v, ())}
        columnwise = cost.family(i) in ELEMENTWISE and all(v not in cost.producer for v in cost.graph.ops[i].inputs)
        if readers and readers <= rest:
            rest.add(i)
        elif readers <= body | rest and columnwise:
            body.add(i)
        else:
            front.add(i)
    return front


def grouped(stages: Sequence[Ops], seconds: Callable[[int, int], float], most: int) -> list[tuple[Ops, ...]]:
    """For 2 to ``most`` stages, the contiguous grouping whose slowest stage is fastest; none for a number where none fits.

    ``seconds(a, b)``: of stages a to b - 1 as one stage; infinite where they do not fit one.
    """
    n, found = len(stages), []
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}  # of the first j stages in k: (seconds, cuts)
    for k in range(1, min(most, n) + 1):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for b in range(k, n + 1):
            for a in range(b - 1, k - 2, -1):
                one = seconds(a, b)
                if one == float("inf"):
                    break  # more ops do not fit either
                if a in best and (b not in following or max(best[a][0], one) < following[b][0]):
                    following[b] = max(best[a][0], one), (*best[a][1], b)
        best = following
        if k > 1 and n in best:
            found.append(tuple(joined(stages[a:b]) for a, b in itertools.pairwise(best[n][1])))
    return found


# --- Spatial pipelines: a CTA for each stage, weights resident, tiles passed through rings ----------------------------------------

_NEVER = float("inf")
# Entries of a ring where there is room. Two let a stage write one tile while the next stage reads the other, and then both wait for
# the tile that takes longest; four absorb differences between tiles and the latency of the flags in both directions.
_DEEP = 4
_DEEP_SHARE = 4  # deep rings use at most a fourth of the L2, which the streams of the region pass through too
_MOST_DRAFTS = 24  # drafts are merged down to so many, because the cost of every contiguous group of them is computed


def spatial(region: GpuRegion, drafts: Sequence[Ops]) -> list[Arranged]:
    """One arrangement for each number of stages, lanes and place of the rings, with the grouping whose slowest stage is fastest.

    Rings are in the shared memory of their reader, where all stages form one cluster, or in the L2, where a stage can be split over
    several CTAs by columns of its result ("slabs"). Raises ``Infeasible`` with the reason where nothing fits.
    """
    found: list[Arranged] = []
    builders = [
        SpatialBuilder(region, place, lanes)
        for place in ("cluster", "l2")
        if place == "l2" or region.machine.max_cluster > 1
        for lanes in range(1, 1 + len(region.machine.lane_registers))
    ]
    for builder in builders:
        found += builder.run(drafts)
    if not found:
        reasons = [b.reason for b in builders if b.reason]
        raise Infeasible(reasons[-1] if reasons else "a pipeline needs two stages, and the region is only one")
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _StageTraffic:
    """A stage of a grouping, its split, and the bytes of a tile that enter and leave one of its CTAs."""

    ops: Ops
    split: int
    work: TileWork
    entering: int
    leaving: int


class SpatialBuilder:
    """Pipelines with rings at ``place`` and ``lanes`` consumer warpgroups per CTA. ``reason``: why the last stage did not fit."""

    def __init__(self, region: GpuRegion, place: str, lanes: int):
        self.region, self.cost, self.machine = region, region.cost, region.machine
        self.place, self.lanes = place, lanes
        self.reason = ""
        self._least_split = functools.cache(self._find_least_split)
        self._crossing = functools.cache(self._count_crossing)
        self._stage = functools.cache(self._make_stage)

    def run(self, drafts: Sequence[Ops]) -> list[Arranged]:
        if self.place == "cluster":
            groupings = self._groupings(drafts, self.machine.max_cluster)
            made = []
            for g in groupings:
                # The code may need more than this estimate, so that deep rings do not fit; shallow ones are the next candidate.
                found = [self.arranged(g, [1] * len(g), self.machine.clusters(len(g)), deep) for deep in (True, False)]
                made += found if found[0] != found[1] else found[:1]
        else:
            drafts = [part for d in drafts for part in (separated(self.cost, d) if self._least_split(d) is None else (d,))]
            groupings = self._groupings(drafts, self.machine.workers)
            made = [self._balanced(g) for g in groupings]
        return [a for a in made if a is not None]

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
        """The drafts merged down to ``_MOST_DRAFTS``: neighbours with the least work first, while they fit one CTA."""
        if len(drafts) <= _MOST_DRAFTS:
            return drafts
        drafts = list(drafts)

        def seconds(k: int) -> float | None:
            """Latency of draft ``k`` and the next as one stage; None where they do not fit."""
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
        """The fewest CTAs whose shared memory holds the weights of ``ops``, two entries of every ring, and the images; or None."""
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
        """Does a CTA have room? ``rings``: bytes per lane. Weights are tested first: they decide most cases and are cheap to
        count."""
        weights, limit = packed_bytes(self.cost, ops, split), self.machine.local_bytes
        need = weights + self.lanes * rings
        if need <= limit:
            storage = self._storage(ops, split)
            if storage is None:
                self.reason = "the values of 64 rows do not fit the registers of a warpgroup: narrower rows or 16-bit values would"
                return False
            need = shared_bytes(self.cost, ops, storage, self.lanes, weights, rings)
        if need > limit:
            self.reason = f"a stage needs {size_text(need)} of shared memory; a CTA has {size_text(limit)}"
        return need <= limit

    def _storage(self, ops: Ops, split: int) -> Storage | None:
        return self.region.steps(ops, split).storage(self.machine.lane_registers[self.lanes - 1], self.lanes)

    def _make_stage(self, ops: Ops, split: int) -> _StageTraffic:
        """The stage of ``ops``, which must fit (``_fits``)."""
        storage = self._storage(ops, split)
        assert storage is not None
        work = tile_work(self.cost, ops, storage, matmul_efficiency(self.machine, "spatial", True, self.lanes), split, self.place)
        entering, leaving = self._crossing(ops)
        return _StageTraffic(ops, split, work, entering, leaving // split)

    def _count_crossing(self, ops: Ops) -> tuple[int, int]:
        """(bytes of a tile that enter ``ops`` from other stages, bytes that leave them)."""
        inside, links = frozenset(ops), self._links
        entering = {v: size for i in ops for v, producer, size in links[i][0] if producer not in inside}
        return sum(entering.values()), sum(size for i in ops for readers, size in links[i][1] if not readers <= inside)

    @functools.cached_property
    def _links(self) -> dict[int, tuple[list[tuple[int, int, int]], list[tuple[frozenset[int], int]]]]:
        """Of each op: (value, its producer, bytes of a tile) of what it reads of others; (readers, bytes of a tile) of its
        results."""
        cost, found = self.cost, {}
        for i in cost.region.ops:
            op = cost.graph.ops[i]
            reads = [(v, cost.producer[v]) for v in op.inputs if cost.streamed(v) and v in cost.producer]
            made = () if cost.is_maker(i) else [v for v in op.outputs if cost.streamed(v)]
            found[i] = (
                [(v, producer, entry_bytes(cost, v)) for v, producer in reads if not cost.is_maker(producer)],
                [(frozenset(cost.readers.get(v, ())), entry_bytes(cost, v)) for v in made],
            )
        return found

    def _link_seconds(self, stage: _StageTraffic, ctas: int) -> float:
        """Seconds of a tile's transfers through the rings of one CTA, both directions at once."""
        return max(stage.entering, stage.leaving) / self._bandwidth(ctas)

    def _period(self, stage: _StageTraffic, ctas: int) -> float:
        return max(stage.work.period(self.lanes, self._wait(stage, ctas)), self._link_seconds(stage, ctas))

    def _wait(self, stage: _StageTraffic, ctas: int) -> float:
        """Seconds that a lane of ``stage`` waits at the rings of a tile: for flags, and until its entries have left."""
        ends = (stage.entering > 0) + (stage.leaving > 0)
        return ends * self.machine.rate(self.machine.transfers.hop_seconds, self.place) + stage.leaving / self._bandwidth(ctas)

    def _bandwidth(self, ctas: int) -> float:
        """Bytes per second of the rings of one CTA, of ``ctas`` that form a pipeline."""
        machine = self.machine
        if self.place == "l2":
            return machine.place("l2").bandwidth
        return machine.rate(machine.cluster_bandwidth, str(ctas)) / machine.workers

    def _balanced(self, drafts: tuple[Ops, ...]) -> Arranged | None:
        """The pipeline with the number of instances, and the split of each stage, whose modelled throughput is best."""
        loads = list[Load]()
        for draft in drafts:
            split = self._least_split(draft)
            if split is None:
                return None
            seconds = self._period(self._stage(draft, split), 1)
            loads.append(Load(seconds * split, split, max(split, self._most_split(draft))))
        ctas = sum(load.least for load in loads)
        if ctas > self.machine.workers:
            self.reason = (
                f"{len(drafts)} stages with their weights resident need {ctas} CTAs; the machine has {self.machine.workers}"
            )
            return None
        best: tuple[float, int, tuple[int, ...]] | None = None
        most = self.machine.workers // ctas
        for instances in sorted({most, *(1 << k for k in range(most.bit_length()))}):
            result = balance(loads, self.machine.workers // instances)
            rate = min(instances, self.region.tiles) * result.throughput
            if best is None or rate > best[0]:
                best = rate, instances, result.workers
        assert best is not None
        splits = [most_split(self.cost, d, split) for d, split in zip(drafts, best[2], strict=True)]
        return self.arranged(drafts, splits, self.machine.workers // sum(splits))

    def arranged(self, drafts: Sequence[Ops], splits: Sequence[int], instances: int, deep: bool = True) -> Arranged | None:
        """The pipeline with rings at least as deep as skip connections need; None where it does not fit."""
        region, cost, machine = self.region, self.cost, self.machine
        # The L2 has one entry for all readers; in shared memory each reader has its own.
        queued = links(cost, drafts, to_each=self.place != "l2")
        instances = max(1, min(instances, region.tiles))
        stages: list[_StageTraffic] = []
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
        planned = tuple(
            Stage(name, s.ops, resource_of(cost, s.ops), s.split, self._period(s, ctas), split=s.split)
            for name, s in zip(names, stages, strict=True)
        )
        queues = tuple(
            Queue(q.value, q.producer, q.consumers, d, entry_bytes(cost, q.value), self.place)
            for q, d in zip(queued, depths, strict=True)
        )
        busy, l2_bytes = busy + weights / machine.shared_bandwidth, float(crossing * region.tiles + weights)
        cluster = ctas if self.place == "cluster" else 1
        return Arranged("spatial", planned, queues, instances, cluster, self.lanes, busy, l2_bytes, names[slowest])

    def _depths(
        self, queued: Sequence[Link], drafts: Sequence[Ops], splits: Sequence[int], instances: int, wanted: int
    ) -> list[int] | None:
        """The depth of each ring: ``wanted`` if there is room, else what skip connections need. None if that exceeds the L2; rings
        in shared memory are known to fit.
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

    def _busy(self, stages: Sequence[_StageTraffic], ctas: int, instances: int) -> tuple[float, int]:
        """(seconds from the first tile's entry to the last tile's exit, the slowest stage)."""
        tiles = -(-self.region.tiles // instances)
        times = [max(s.work.busy(tiles, self.lanes, self._wait(s, ctas)), tiles * self._link_seconds(s, ctas)) for s in stages]
        slowest = max(range(len(stages)), key=lambda k: times[k])
        fill = sum(s.work.latency(self._wait(s, ctas)) for k, s in enumerate(stages) if k != slowest)
        return self.machine.tile_seconds + fill + times[slowest], slowest


# --- Loops whose weights are split over a cluster ---------------------------------------------------------------------------------

_SIZES = (2, 4, 8, 16)
# Instructions for a sum passed to another CTA: a fourth of a store, with its address, and the addition there.
_SUM_SLOTS = 2.0


def over_clusters(region: GpuRegion, ops: Ops) -> list[Arranged]:
    """One arrangement for each size of a cluster and number of lanes that fits a loop whose weights no CTA can hold alone.

    All CTAs of a cluster run the same tiles through the same steps. Each keeps its columns of every weight, computes its columns of
    every value, and passes those that the next product contracts to the others through their shared memory
    (``stage/instructions.py``). A product that contracts more than it makes, as in a gradient through time, passes partial sums
    instead (``stage/split.py``).

    A tile has 64 rows, or 32, of which a thread has one: the tensor cores then multiply every row twice, but twice as many CTAs
    work, each of them executes half of the pointwise instructions, and half as much passes between them.
    Raises ``Infeasible`` with the reason where no cluster holds the weights.
    """
    cost, machine = region.cost, region.machine
    if cost.sinks:
        raise Infeasible("a loop that adds up sums over its steps has no code that splits its weights over a cluster")
    if machine.max_cluster == 1:
        raise Infeasible("this device has no clusters")
    if not packed_bytes(cost, ops):
        raise Infeasible("the loop has no weights to split")
    found, least = list[Arranged](), None
    for size in _SIZES:
        if size > machine.max_cluster or not _has_slabs(cost, ops, size):
            continue
        weights = packed_bytes(cost, ops, size)
        rings = sum(x.ring_bytes for x in _exchanged(cost, ops))
        busy = -(-region.tiles // machine.clusters(size))  # more lanes would have no tile
        heights = (TILE_ROWS, HALF_TILE_ROWS) if _keeps_in_place(cost, ops, size) else (TILE_ROWS,)
        for lanes, registers in enumerate(machine.lane_registers[: max(1, busy)], 1):
            bodies = [StageSteps(body, body.region.ops, size, True) for _, body in loops_of(cost, ops)]
            storage = largest_storage(bodies, registers, lanes)
            if storage is None:
                continue
            need = shared_bytes(cost, ops, storage, lanes, weights, rings)
            least = need if least is None else min(least, need)
            if need <= machine.local_bytes:
                whole = tile_work(cost, ops, storage, matmul_efficiency(machine, "spatial", True, lanes), size)
                for rows in heights:
                    work = dataclasses.replace(whole, issue=whole.issue * rows / TILE_ROWS)
                    for exchanged in _exchanged(cost, ops):
                        work = work.plus(exchanged.steps, exchanged.work(size, rows))
                    found.append(_arranged(region, ops, work, size, lanes, rows))
    if not found and least is not None:
        raise Infeasible(
            f"weights split over the CTAs of a cluster need {size_text(least)} of shared memory in each; "
            f"a CTA has {size_text(machine.local_bytes)}"
        )
    if not found:
        raise Infeasible("its columns cannot be split over the CTAs of a cluster: use widths that are multiples of 64")
    return found


def _has_slabs(cost: GpuCost, ops: Ops, size: int) -> bool:
    """Does every CTA have whole blocks of the columns of each product? (The code generator checks the pieces of a product.)"""
    dots = [body.work(i).dot for _, body in loops_of(cost, ops) for i in body.region.ops if i not in body.sinks]
    return all(dot is None or dot.n % (size * BLOCK_COLUMNS) == 0 for dot in dots)


def _keeps_in_place(cost: GpuCost, ops: Ops, size: int) -> bool:
    """Does every element stay with its thread, so that a tile may have 32 rows (``fitting.allows_half_tiles``)?"""
    for of, numbers in ((cost, ops), *((body, body.region.ops) for _, body in loops_of(cost, ops))):
        for i in numbers:
            op, family = of.graph.ops[i], of.family(i)
            whole = all(of.row_size(v) % (BLOCK_COLUMNS * size) == 0 for v in (*op.inputs, *op.outputs) if of.streamed(v))
            stays = family in ELEMENTWISE | {"dot", "reshape"} or (family in ("slice", "concatenate") and whole)
            if op.body is None and not of.is_maker(i) and not stays:
                return False
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class _Exchanged:
    """Transfers between the CTAs of a cluster in each of ``steps``. ``values``: operands of products that a step makes or carries;
    ``products``: products that pass partial sums, grouped by operand; ``loaded``: values that a step loads from arrays."""

    steps: int
    body: GpuCost
    values: tuple[int, ...]
    products: tuple[tuple[DotWork, ...], ...]
    loaded: frozenset[int]

    @property
    def ring_bytes(self) -> int:
        """Shared memory of a lane for the transfers."""
        entries = sum((EXCHANGE_DEPTH if v in self.body.region.inputs else 1) * entry_bytes(self.body, v) for v in self.values)
        return entries + sum(_sum_bytes(dot) for group in self.products for dot in group)

    def work(self, size: int, rows: int) -> TileWork:
        """The work of a tile of ``rows`` in a step: transfers, and round trips of barriers. Carried values are transferred while
        the lane multiplies the loaded ones; otherwise the lane waits."""
        body, machine = self.body, self.body.machine
        bandwidth = machine.rate(machine.cluster_bandwidth, str(size)) / machine.workers * size / (size - 1) * TILE_ROWS / rows
        moved = {v: entry_bytes(body, v) / bandwidth for v in self.values}
        carried = [v for v in self.values if v in body.region.inputs]
        alone = sum(moved[v] + machine.tile_seconds for v in self.values if v not in carried)
        if carried:
            alone += max(0.0, sum(moved[v] for v in carried) + machine.tile_seconds - _loaded_seconds(body, self.loaded, size))
        for group in self.products:  # the sums of one product are transferred while the next ones multiply
            later = sum(_tensor_seconds(body, dot, size) for dot in group[1:])
            alone += max(sum(map(_sum_bytes, group)) / bandwidth - later, _sum_bytes(group[-1]) / bandwidth) + machine.tile_seconds
        sums = sum(_sum_bytes(dot) for group in self.products for dot in group)
        issue = _SUM_SLOTS * sums / SUM_BYTES / machine.rate(machine.simt_rates, "other") * rows / TILE_ROWS
        return TileWork(0.0, issue, 0.0, alone, sum(moved.values()) + sums / bandwidth)


def _sum_bytes(dot: DotWork) -> int:
    """Bytes of the sums of a product on a tile."""
    return TILE_ROWS * padded(dot.n) * SUM_BYTES


def _exchanged(cost: GpuCost, ops: Ops) -> Iterator[_Exchanged]:
    """The transfers of each loop among ``ops``."""
    for i in ops:
        if cost.graph.ops[i].body is None:
            continue
        body, loaded = cost.body(i), frozenset(parts(cost.graph.ops[i]).in_xs)
        values, products = dict[int, None](), dict[int, list[DotWork]]()
        for k in body.region.ops:
            if (dot := body.work(k).dot) is None:
                continue
            for v in body.graph.ops[k].inputs:
                pieces = _pieces(body, v) if body.streamed(v) else []
                made = [p for p in pieces if p not in loaded]
                if made == pieces != [] and _is_partial(body, v, dot, len(pieces)):
                    products.setdefault(v, []).append(dot)
                else:
                    values.update(dict.fromkeys(made))
        yield _Exchanged(cost.graph.ops[i]["length"], body, tuple(values), tuple(map(tuple, products.values())), loaded)


def _is_partial(body: GpuCost, v: int, dot: DotWork, pieces: int) -> bool:
    """Does the product pass partial sums? Decided as by the code generator (``stage/split.py``), as far as the graph tells: a
    concatenation that only products read is multiplied piece by piece."""
    whole = pieces > 1 and (v in body.outputs or any(body.work(i).dot is None for i in body.readers.get(v, ())))
    return whole or dot.k * itemsize(dot.dtype) > SUM_BYTES * dot.n


def _pieces(body: GpuCost, v: int) -> list[int]:
    """The values that are concatenated into ``v``, reshapes followed; or ``v`` itself."""
    todo, found = [v], list[int]()
    while todo:
        source = _source(body, todo.pop())
        maker = body.producer.get(source)
        if maker is not None and body.graph.ops[maker].kind == "concatenate":
            todo += reversed(body.graph.ops[maker].inputs)
        else:
            found.append(source)
    return found


def _source(body: GpuCost, v: int) -> int:
    """The value that ``v`` is a reshape of, or ``v`` itself."""
    while v in body.producer and body.family(body.producer[v]) == "reshape":
        v = body.graph.ops[body.producer[v]].inputs[0]
    return v


def _loaded_seconds(body: GpuCost, loaded: frozenset[int], size: int) -> float:
    """Seconds that a lane waits for a tile's loads in a step, and of its products with loaded values."""
    seconds = load_seconds(body, body.region.ops) - ahead_seconds(body, size)
    for i in body.region.ops:
        dot = body.work(i).dot
        if dot is not None and not dot.per_row and _source(body, body.graph.ops[i].inputs[0]) in loaded:
            seconds += _tensor_seconds(body, dot, size)
    return seconds


def _tensor_seconds(body: GpuCost, dot: DotWork, size: int) -> float:
    """Seconds of a CTA's share of a product on a tile."""
    machine = body.machine
    flops = 2.0 * TILE_ROWS * dot.k * dot.n / size
    return flops / machine.rate(machine.tensor_rates, dot.dtype) / matmul_efficiency(machine, "spatial", True, 1)


def _arranged(region: GpuRegion, ops: Ops, work: TileWork, size: int, lanes: int, rows: int) -> Arranged:
    cost, machine = region.cost, region.machine
    tiles = -(-cost.region.space.rows // rows)
    replicas = max(1, min(machine.clusters(size), tiles))
    fetched = replicas * size * packed_bytes(cost, ops, size)
    name = stage_name(cost, 0, ops)
    stage = Stage(name, ops, resource_of(cost, ops), size, work.period(lanes, machine.tile_seconds), split=size)
    busy = work.busy(-(-tiles // replicas), lanes, machine.tile_seconds) + fetched / machine.shared_bandwidth
    return Arranged("spatial", (stage,), (), replicas, size, lanes, busy, float(fetched), name, rows)

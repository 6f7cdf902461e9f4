"""What fits where: tile size, on-chip memory and the time of one tile, for a stage on a machine.

Comes in: a ``RegionCost`` and ``Draft`` stages. Goes out: rows per tile and a ``Fit`` per stage. Invariant: what does not fit the
machine's memory, registers or cluster size raises ``Infeasible`` with the sizes in the message; nothing is silently made slower.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

from kitsune_jax.planning.balance import Infeasible
from kitsune_jax.planning.cost import RegionCost, round_up
from kitsune_jax.planning.machines import KIB, MIB
from kitsune_jax.planning.stages import Draft, Link

# Tile sizes in order of preference, where the model can't tell them apart (micro-kernels reach their rate at 32 to 128 rows).
_CPU_ROWS = (96, 64, 128, 112, 80, 48, 32, 24, 16, 8, 4, 2, 1, 256, 512, 1024, 2048, 4096, 8192)
_INDIFFERENT = 1.03  # the model is not better than this
_ONE_TILE = 128  # streams no longer than this are one tile, if cutting them gains nothing
_GPU_ROWS = (128, 64)  # one or two warpgroups of wgmma's 64 rows
_SPATIAL_GPU_ROWS = 64
# Streamed weights pass through a ring of 16 KiB stages in shared memory: four hide an L2 round trip, twelve are what measured best.
_WEIGHT_RING = 64 * KIB
_MAX_CPU_SCRATCH = 1024 * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """``workers``: how many one copy of the stage needs at least. ``seconds``: one tile on one worker.

    ``streamed_bytes``: weights that do not stay on chip and are fetched through the shared cache for every tile.
    """

    workers: int
    seconds: float
    resource: str
    streamed_bytes: float = 0.0


def stationary_bytes(cost: RegionCost, ops: Iterable[int]) -> int:
    """Bytes of the stationary arrays that ``ops`` read."""
    return sum(cost.bytes(v) for v in cost.stationary_inputs(ops))


def sink_bytes(cost: RegionCost, ops: Iterable[int]) -> int:
    """Bytes of the accumulators of the sinks among ``ops``: double precision for sums of values on a CPU, else single."""
    total = 0
    for i in ops:
        if i in cost.sinks:
            element = 8 if cost.machine.platform == "cpu" and cost.work(i).dot is None else 4
            total += element * sum(cost.graph.values[v].size for v in cost.graph.ops[i].outputs)
    return total


def resource_of(cost: RegionCost, draft: Draft) -> str:
    return "tensor" if any(cost.work(i).resource == "tensor" for i in draft.ops) else "simt"


def stage_seconds(cost: RegionCost, draft: Draft, rows: int, vertical: bool) -> float:
    """One tile of a stage on one worker: on a CPU its ops one after the other, on a GPU tensor beside vector work."""
    tensor = simt = 0.0
    for i in draft.ops:
        seconds = cost.tile_seconds(i, rows, vertical)
        if cost.work(i).dot is not None:
            tensor += seconds
        else:
            simt += seconds
    machine = cost.machine
    if machine.shares_workers:
        return max(tensor, simt) + machine.tile_seconds
    weights = stationary_bytes(cost, draft.ops)
    source = machine.place("l2" if weights <= machine.local_bytes // 2 else "l3")
    spill = _spill_seconds(cost, draft, rows)
    # A core fetches ahead while it multiplies: only what outlasts the matmuls is waited for (a NeRF step with 2 MB of accumulators
    # a worker took 122 ms at 64-128 rows and 128 ms at 32, of which 117 ms are its matmuls at the kernels' rate).
    return max(tensor, weights / source.bandwidth + spill) + simt + machine.tile_seconds


def _spill_seconds(cost: RegionCost, draft: Draft, rows: int) -> float:
    """Intermediates of a tile that does not fit the core's cache travel through the shared one, or through memory."""
    machine = cost.machine
    working = rows * _live(cost, draft) + sink_bytes(cost, draft.ops)
    if working <= machine.local_bytes:
        return 0.0
    moved = rows * sum(cost.row_bytes(v) for i in draft.ops for v in cost.graph.ops[i].outputs if cost.streamed(v))
    moved += sink_bytes(cost, draft.ops)
    near = working <= machine.shared_bytes // machine.workers
    return 2 * moved / (machine.place("l3").bandwidth if near else machine.dram_bandwidth / machine.workers)


def _live(cost: RegionCost, draft: Draft) -> int:
    return max(1, cost.live_row_bytes(draft.ops))


def tile_rows(cost: RegionCost, drafts: Sequence[Draft], vertical: bool = True) -> int:
    """Rows per tile.

    On a CPU: the size the model likes best among those whose intermediates stay in a core's L2, multiples of 8 unless the
    stream or the memory is shorter. On a GPU: 128 or 64, the larger that fits.
    """
    if cost.machine.platform == "cpu":
        return _cpu_rows(cost, drafts, vertical)
    if not vertical:
        return _SPATIAL_GPU_ROWS
    for rows in _GPU_ROWS[:-1]:
        try:
            for draft in drafts:
                vertical_fit(cost, draft, rows)
            if cost.region.space.rows >= rows * cost.machine.workers:
                return rows
        except Infeasible:
            continue
    return _GPU_ROWS[-1]


def _cpu_rows(cost: RegionCost, drafts: Sequence[Draft], vertical: bool) -> int:
    machine, total = cost.machine, cost.region.space.rows
    live = max(_live(cost, d) for d in drafts)
    limit = max(machine.local_bytes // live, 1)
    # A share of the rows for every worker, in as few rounds as the limit allows: awkward row counts divide evenly.
    rounds = max(1, -(-total // (machine.workers * min(limit, _CPU_ROWS[0]))))
    share = -(-total // (machine.workers * rounds))
    whole = total if total <= _ONE_TILE else 0
    candidates = [n for n in (whole, _CPU_ROWS[0], round_up(share, 8), *_CPU_ROWS[1:], share) if 0 < n <= min(limit, total)]

    @functools.cache
    def seconds(rows: int) -> float:
        tiles = -(-total // rows)
        return -(-tiles // machine.workers) * sum(stage_seconds(cost, d, rows, vertical) for d in drafts)

    best = min(seconds(n) for n in candidates)
    return next(n for n in candidates if seconds(n) <= _INDIFFERENT * best)


def vertical_fit(cost: RegionCost, draft: Draft, rows: int) -> Fit:
    """A stage that runs a whole phase on each worker. Raises ``Infeasible``."""
    machine = cost.machine
    seconds = stage_seconds(cost, draft, rows, True)
    tile = rows * _live(cost, draft)
    resource = resource_of(cost, draft)
    if machine.platform == "cpu":
        if tile + sink_bytes(cost, draft.ops) > _MAX_CPU_SCRATCH:
            raise Infeasible(f"a tile of {rows} rows needs {_size(tile + sink_bytes(cost, draft.ops))} of scratch per worker")
        return Fit(1, seconds, resource)
    widest = _widest(cost, draft)
    registers = 4 * rows * widest + sink_bytes(cost, draft.ops)
    if registers > machine.accumulator_bytes:
        raise Infeasible(
            f"accumulators of {_size(registers)} for {rows} rows ({widest} columns); "
            f"a CTA's registers hold {_size(machine.accumulator_bytes)}"
        )
    weights = stationary_bytes(cost, draft.ops)
    if tile + weights <= machine.local_bytes:
        return Fit(1, seconds, resource)
    if tile + _WEIGHT_RING > machine.local_bytes:
        raise Infeasible(
            f"a tile of {rows} rows needs {_size(tile)} beside {_size(_WEIGHT_RING)} of streamed weights; "
            f"a CTA's shared memory is {_size(machine.local_bytes)}"
        )
    group = min(2, machine.max_cluster)  # a pair shares each fetch by multicast
    return Fit(group, seconds, resource, weights / group)


def _widest(cost: RegionCost, draft: Draft) -> int:
    """Most columns per row that a matmul of the stage accumulates."""
    return max((dot.batch * dot.m * dot.n for i in draft.ops if (dot := cost.work(i).dot) and i not in cost.sinks), default=0)


def spatial_fit(cost: RegionCost, drafts: Sequence[Draft], queues: Sequence[Link], rows: int) -> tuple[Fit, ...]:
    """Stages on workers of their own, weights resident. A stage too big for one is split over a cluster. Raises ``Infeasible``."""
    machine = cost.machine
    resources = [resource_of(cost, d) for d in drafts]
    if machine.platform == "cpu":
        hop = machine.places[-1]
        passed = [sum(cost.row_bytes(q.value) for q in queues if s == q.producer or s in q.consumers) for s in range(len(drafts))]
        return tuple(
            Fit(1, stage_seconds(cost, d, rows, False) + hop.latency + rows * p / hop.bandwidth, r)
            for d, p, r in zip(drafts, passed, resources, strict=True)
        )
    # A tensor and a vector stage may share an SM, so the tiles of the greediest vector stage are set aside for it.
    beside = max((rows * _live(cost, d) for d, r in zip(drafts, resources, strict=True) if r == "simt"), default=0)
    fits = []
    for draft, resource in zip(drafts, resources, strict=True):
        tile = rows * _live(cost, draft) + (beside if resource == "tensor" else 0)
        free = machine.local_bytes - tile
        weights, sums = stationary_bytes(cost, draft.ops), sink_bytes(cost, draft.ops) + 4 * rows * _widest(cost, draft)
        if free <= 0:
            raise Infeasible(f"a tile of {rows} rows needs {_size(tile)} of shared memory; a CTA has {_size(machine.local_bytes)}")
        split = max(1, -(-weights // free), -(-sums // machine.accumulator_bytes))
        dots = sum(cost.work(i).resource == "tensor" for i in draft.ops)
        if split > 1 and dots > 1:
            raise Infeasible(f"{_size(weights)} of weights of {dots} matmuls do not fit one CTA; only a single matmul is split")
        if split > machine.max_cluster:
            raise Infeasible(
                f"{_size(weights)} of weights and {_size(sums)} of accumulators need {split} CTAs; "
                f"a cluster has {machine.max_cluster}"
            )
        fits.append(Fit(split, stage_seconds(cost, draft, rows, False), resource))
    return tuple(fits)


def _size(n: float) -> str:
    return f"{n / MIB:.1f} MiB" if n >= MIB else f"{n / KIB:.0f} KiB"

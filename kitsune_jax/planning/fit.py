"""What fits where on a CPU: tile size, memory and the time of one tile, for a stage on a core.

Comes in: a ``RegionCost`` and ``Draft`` stages. Goes out: rows per tile and a ``Fit`` per stage. Invariant: what does not fit the
memory raises ``Infeasible`` with the sizes in the message; nothing is silently made slower.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

from kitsune_jax.planning.balance import Infeasible
from kitsune_jax.planning.cost import RegionCost, round_up
from kitsune_jax.planning.machines import KIB, MIB
from kitsune_jax.planning.stages import Draft, Link, resource_of

# Tile sizes in order of preference, where the model can't tell them apart (micro-kernels reach their rate at 32 to 128 rows).
_ROWS = (96, 64, 128, 112, 80, 48, 32, 24, 16, 8, 4, 2, 1, 256, 512, 1024, 2048, 4096, 8192)
_INDIFFERENT = 1.03  # the model is not better than this
_ONE_TILE = 128  # streams no longer than this are one tile, if cutting them gains nothing
_MAX_SCRATCH = 1024 * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """``seconds``: one tile on one worker."""

    seconds: float
    resource: str


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


def stage_seconds(cost: RegionCost, draft: Draft, rows: int, vertical: bool) -> float:
    """One tile of a stage on one worker: its ops one after the other."""
    tensor = simt = 0.0
    for i in draft.ops:
        seconds = cost.tile_seconds(i, rows, vertical)
        if cost.work(i).dot is not None:
            tensor += seconds
        else:
            simt += seconds
    machine = cost.machine
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
    """Rows per tile: the size the model likes best among those whose intermediates stay in a core's L2, multiples of 8 unless the
    stream or the memory is shorter.
    """
    machine, total = cost.machine, cost.region.space.rows
    live = max(_live(cost, d) for d in drafts)
    limit = max(machine.local_bytes // live, 1)
    if max(sink_bytes(cost, d.ops) for d in drafts) > machine.local_bytes:
        # Accumulators and weights come from the shared cache for every tile anyway: fewer tiles are worth some intermediates there.
        # A SwiGLU step (8.7 MB of weights) took 1128 ms with the 48 rows that fit, 1052 ms with 96, 5 to 10 % more again with 192.
        limit *= 2
    # A share of the rows for every worker, in as few rounds as the limit allows: awkward row counts divide evenly.
    rounds = max(1, -(-total // (machine.workers * min(limit, _ROWS[0]))))
    share = -(-total // (machine.workers * rounds))
    whole = total if total <= _ONE_TILE else 0
    candidates = [n for n in (whole, _ROWS[0], round_up(share, 8), *_ROWS[1:], share) if 0 < n <= min(limit, total)]

    @functools.cache
    def seconds(rows: int) -> float:
        tiles = -(-total // rows)
        return -(-tiles // machine.workers) * sum(stage_seconds(cost, d, rows, vertical) for d in drafts)

    best = min(seconds(n) for n in candidates)
    return next(n for n in candidates if seconds(n) <= _INDIFFERENT * best)


def vertical_fit(cost: RegionCost, draft: Draft, rows: int) -> Fit:
    """A stage that runs a whole phase on each worker. Raises ``Infeasible``."""
    scratch = rows * _live(cost, draft) + sink_bytes(cost, draft.ops)
    if scratch > _MAX_SCRATCH:
        raise Infeasible(f"a tile of {rows} rows needs {size_text(scratch)} of scratch per worker")
    return Fit(stage_seconds(cost, draft, rows, True), resource_of(cost, draft))


def spatial_fit(cost: RegionCost, drafts: Sequence[Draft], queues: Sequence[Link], rows: int) -> tuple[Fit, ...]:
    """Stages on workers of their own."""
    hop = cost.machine.places[-1]
    passed = [sum(cost.row_bytes(q.value) for q in queues if s == q.producer or s in q.consumers) for s in range(len(drafts))]
    return tuple(
        Fit(stage_seconds(cost, d, rows, False) + hop.latency + rows * p / hop.bandwidth, resource_of(cost, d))
        for d, p in zip(drafts, passed, strict=True)
    )


def size_text(n: float) -> str:
    return f"{n / MIB:.1f} MiB" if n >= MIB else f"{n / KIB:.0f} KiB"

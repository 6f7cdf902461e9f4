"""Rows of a tile on a CPU: what is alive while a core runs all ops of a region on a tile, and how long that takes.

Comes in: a ``CpuCost``. Goes out: ``TileModel`` and the rows per tile. Invariant: a tile that needs more memory than a worker may
have raises ``Infeasible`` with the size in the message; nothing is silently made slower.
"""

from __future__ import annotations

import functools

from kitsune_jax.planning.cost import SCATTER, pipeline_traffic, round_up
from kitsune_jax.planning.machine import MIB, size_text
from kitsune_jax.planning.plan import Infeasible
from kitsune_jax.targets.cpu.planning.cost import CpuCost
from kitsune_jax.targets.cpu.planning.times import SHARED_SECONDS

# Tile sizes in order of preference, where the model can't tell them apart (micro-kernels reach their rate at 32 to 128 rows).
_ROWS = (96, 64, 128, 112, 80, 48, 32, 24, 16, 8, 4, 2, 1, 256, 512, 768, 1024, 2048, 4096, 8192)
# The part of a core's L2 that a tile without products may take, which is passed over several times, with what it reads and writes
# in memory. Softmaxes of rows of 512 numbers took two cores 0.35 to 0.41 ns a number at 16 to 48 rows a tile, 0.34 to 0.77 at 61
# to 96, 0.60 to 0.78 from 128 on; of 1536 numbers 0.34 to 0.40 at 16 to 64, 0.59 at 96 (float32, a Xeon with AMX and 2 MB of L2;
# jax.jit 0.44 to 0.78).
_PASSED = 1 / 10
# What a loop whose steps are passes over the state may take: most of a first cache. CartPole (48 bytes a cart) took 4 to 6 % less
# CPU time with tiles of 512 or 768 carts than with 4 096, which lie in the L2; 1 024 gained nothing, and with 256 the way from step
# to step took what was won (a Xeon with AMX and 48 KB of L1). A step that also makes something once for all rows, as keys of
# random numbers are, takes 1 us for it, which tall tiles share.
_STATE = 40 * 1024
_INDIFFERENT = 1.03  # the model is not better than this
_ONE_TILE = 128  # streams no longer than this are one tile, if cutting them gains nothing
# Nor is another worker woken in each call for less than this: where what a step of a loop makes once for all rows takes most of the
# time, two workers do it twice. 200 steps that split a key and add 64 normal numbers: 0.24 ms of CPU time in two tiles.
_WOKEN_FOR = 1.25
_TILE_SECONDS = 0.3e-6  # picking the next tile
_MAX_SCRATCH = 1024 * MIB


class TileModel:
    """A tile of any number of rows on one core. What does not depend on the rows is computed once.

    ``live``: bytes per row that are alive at once; ``border``: that are read and written in memory. ``weights``, ``sinks``: bytes
    of stationary operands, and of the accumulators that every tile adds to as a whole. ``tables``: bytes of those that a tile
    adds its own rows to, which an access costs (``CpuTimes.access``). ``packs``: packing weights is a part of a tile's seconds.
    """

    packs = False

    def __init__(self, cost: CpuCost):
        ops = sorted(cost.region.ops)
        self.cost = cost
        self.kinds = cost.kinds(ops)
        self.live = max(1, cost.live_row_bytes(ops))
        self.border = sum(cost.row_bytes(v) for v in (*cost.region.inputs, *cost.outputs) if cost.streamed(v))
        self.weights = cost.stationary_bytes(ops)
        self.tables = cost.sink_bytes(i for i in ops if cost.family(i) == SCATTER)
        self.sinks = cost.sink_bytes(ops) - self.tables
        self._made = cost.made_row_bytes()
        self._between = cost.repack_seconds() + cost.steps_seconds()

    def seconds(self, rows: int) -> float:
        """One tile on one worker: its ops one after the other."""
        machine = self.cost.machine
        weights_at = "l2" if self.weights <= machine.local_bytes // 2 else "l3"
        tensor = simt = 0.0
        for work, count in self.kinds.items():
            seconds = count * self.cost.seconds(work, rows)
            if work.dot is not None:
                tensor += seconds
            else:
                simt += seconds
        # A core fetches ahead while it multiplies: only what outlasts the matmuls is waited for (a NeRF step with 2 MB of
        # accumulators a worker took 122 ms at 64-128 rows and 128 ms at 32, of which 117 ms are its matmuls at the kernels' rate).
        fetched = self.weights / machine.place(weights_at).bandwidth + self._spill_seconds(rows)
        return max(tensor, fetched) + simt + self._between + _TILE_SECONDS

    def _spill_seconds(self, rows: int) -> float:
        """Intermediates of a tile that does not fit the core's cache travel through the shared one, or through memory."""
        machine = self.cost.machine
        working = rows * self.live + self.sinks
        if working <= machine.local_bytes:
            return 0.0
        moved = rows * self._made + self.sinks
        near = working <= machine.shared_bytes // machine.workers
        return 2 * moved / (machine.place("l3").bandwidth if near else machine.dram_bandwidth / machine.workers)


def woken_seconds(cost: CpuCost, packs: bool = False) -> float:
    """What workers wait for each other: behind weights that they pack, behind the tiles, and behind the sums of strands. ``call``
    was measured with threads that were awake; one that waits for longer sleeps, as XLA's do (``xla/call/handed``)."""
    if not cost.machine.handed.is_of(cost.graph):
        return 0.0
    return cost.times["xla/call/handed"] * (1 + packs + any(i in cost.sinks for i in cost.region.ops))


def tile_rows(model: TileModel) -> int:
    """Rows per tile: the size the model likes best among those whose intermediates stay in a core's L2, multiples of 8 unless the
    stream or the memory is shorter. Raises ``Infeasible``.
    """
    machine, space = model.cost.machine, model.cost.region.space
    total = space.rows // max(1, space.batches)  # a tile is of one batch
    limit = max(machine.local_bytes // model.live, 1)
    if model.sinks > machine.local_bytes:
        # Accumulators and weights come from the shared cache for every tile anyway: fewer tiles are worth some intermediates there.
        # A SwiGLU step (8.7 MB of weights) took 1128 ms with the 48 rows that fit, 1052 ms with 96, 5 to 10 % more again with 192.
        limit *= 2
    looped = next(model.cost.loops(), None) is not None  # which reads and writes a slice at a time
    if not looped and not any(work.dot for work in model.kinds):
        limit = max(min(limit, int(_PASSED * machine.local_bytes) // (model.live + model.border)), 1)
    if looped and all(body.is_one_pass() for _, _, body in model.cost.loops()):
        limit = max(min(limit, _STATE // model.live), 1)
    # A share of the rows for every worker, in as few rounds as the limit allows: awkward row counts divide evenly.
    rounds = max(1, -(-total // (machine.workers * min(limit, _ROWS[0]))))
    share = -(-total // (machine.workers * rounds)) if not space.batch else total
    whole = total if total <= _ONE_TILE else 0
    candidates = [n for n in (whole, _ROWS[0], round_up(share, 8), *_ROWS[1:], share) if 0 < n <= min(limit, total)]

    @functools.cache
    def seconds(rows: int) -> float:
        tiles, tile = space.tiles(rows), model.seconds(rows)
        if tiles * tile < SHARED_SECONDS:
            return tiles * tile
        hand_over = machine.call_seconds - model.cost.times["call/short"] if tiles > 1 else 0.0
        if machine.handed.is_of(model.cost.graph):
            if min(tiles, machine.workers) > 1:  # another worker's sums are set to zero, and added up
                hand_over += woken_seconds(model.cost) + 2 * model.sinks / machine.place("l3").bandwidth
            elif tiles < machine.workers:  # one worker moves what all would share
                hand_over += (1 - 1 / machine.workers) * pipeline_traffic(model.cost) / machine.place("l3").bandwidth
        return hand_over + -(-tiles // machine.workers) * tile

    best = min(seconds(n) for n in candidates)
    rows = next(n for n in candidates if seconds(n) <= (_WOKEN_FOR if looped and n == whole else _INDIFFERENT) * best)
    scratch = rows * model.live + model.sinks + model.tables
    if scratch > _MAX_SCRATCH:
        raise Infeasible(f"a tile of {rows} rows needs {size_text(scratch)} of scratch per worker")
    return rows

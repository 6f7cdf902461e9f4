"""The plan of a region on a CPU: tile size, blocks of long dimensions, and the order of the rows where an op folds by an index.

Comes in: a ``Graph``, a ``Region``, a ``CpuMachine`` and the program around. Goes out: the fastest ``CpuPlan`` by the model, equal
for equal arguments in every process; or ``Infeasible`` with the reason. Every worker takes a tile through all ops: cores are alike,
so a spatial pipeline does the same work and pays for queues (of 5000 plans for 2 to 192 cores the model preferred 24 spatial ones,
all for regions that XLA runs faster).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Set
from typing import Any

from kitsune_jax.ops.graph import Graph, is_constant
from kitsune_jax.ops.reduce import ONLINE
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import FREE, SCATTER, Access, itemsize, pipeline_traffic, round_up
from kitsune_jax.planning.plan import MIB, VECTOR_MARGIN, CpuPlan, Infeasible, Stage, size_text
from kitsune_jax.planning.stages import Inner, inner_of, orders_of, resource_of, stage_name
from kitsune_jax.planning.streams import Region
from kitsune_jax.program.blocks import NotBlocked
from kitsune_jax.program.build import build
from kitsune_jax.program.ir import Instr, TileProgram, walk
from kitsune_jax.program.loop_bounds import mean_row_iterations, with_known_bounds
from kitsune_jax.targets.cpu.call import LONG_SECONDS
from kitsune_jax.targets.cpu.planning.cost import CpuCost, CpuWork
from kitsune_jax.targets.cpu.planning.machines import (
    FAMILIES,
    PARTIAL_SUMS,
    REGION_ALONE,
    SHARED_SECONDS,
    STEP_SECONDS,
    TEMPORARY,
    CpuMachine,
    CpuProgramContext,
)
from kitsune_jax.targets.cpu.planning.xla import baseline, fault_seconds, stored_seconds

# --- Rows of a tile ---------------------------------------------------------------------------------------------------------------

# Tile sizes in order of preference, for sizes that the model rates alike (micro-kernels reach their rate at 32 to 128 rows).
_ROWS = (96, 64, 128, 112, 80, 48, 32, 24, 16, 8, 4, 2, 1, 256, 512, 768, 1024, 2048, 4096, 8192)
# The share of the time to fetch weights that products do not hide. Inference in bfloat16 and float32: a transformer layer of 1024
# tokens took 8.0 and 26.4 ms in tiles of 64 rows, 7.4 and 25.7 of 128; NeRF took 44.1 and 228 of 96, 40.3 of 512 and 228 of 256
# (Xeon with AMX).
_WAITED = 0.5
# The part of a core's L2 for a tile without products, which several passes read and write. Softmaxes of rows of 512 numbers took
# two cores 0.35 to 0.41 ns a number at 16 to 48 rows a tile, 0.60 to 0.78 from 128 on (float32, a Xeon with AMX and 2 MB of L2).
_PASSED = 1 / 10
# The bytes for a loop whose steps are passes over its state: most of an L1. CartPole (48 bytes a cart) took 4 to 6 % less CPU time
# in tiles of 512 or 768 carts than of 4096; with 256 moving from step to step took the gain (Xeon with AMX, 48 KB of L1).
_STATE = 40 * 1024
# Where a worker's accumulators do not fit a core's L2: the L2s that a tile's intermediates may take, and its most rows then.
_SPILLED, _SPILLED_ROWS = 8, 128
_INDIFFERENT = 1.03  # the accuracy of the model
_ONE_TILE = 128  # streams no longer than this are one tile unless cutting them gains something
# The gain for which another worker is worth waking in each call of a loop: a step's work that is the same for all rows is then done
# twice. 200 steps that split a key and add 64 normal numbers took 0.24 ms of CPU time in two tiles.
_WOKEN_FOR = 1.25
_TILE_SECONDS = 0.3e-6  # taking the next tile
_MAX_SCRATCH = 1024 * MIB


class TileModel:
    """The seconds and bytes of a tile of any number of rows on one core.

    ``live``: bytes per row that are alive at once; ``border``: bytes per row read and written in memory. ``weights``, ``sinks``:
    bytes of stationary operands, and of accumulators that every tile adds to as a whole. ``tables``: bytes of accumulators that a
    tile adds rows to by index (``CpuTimes.access``). ``packs``: a tile's seconds include packing weights.
    """

    packs = False

    def __init__(self, cost: CpuCost):
        ops = sorted(cost.region.ops)
        self.cost = cost
        self.kinds = cost.kinds(ops)
        self.live = max(1, cost.live_row_bytes(ops))
        self.border = sum(map(cost.row_bytes, cost.border))
        self.weights = cost.stationary_bytes(ops)
        self.tables = cost.sink_bytes(i for i in ops if cost.family(i) == SCATTER)
        self.sinks = cost.sink_bytes(ops) - self.tables
        crossing = [cost.graph.values[v] for v in {*cost.region.inputs, *cost.outputs}]
        self.arrays = sum(v.size * itemsize(v.dtype) for v in crossing)
        self.summed = sum(v.size * max(4, itemsize(v.dtype)) for v in crossing)  # as if of the bits of their sums
        self._made = cost.made_row_bytes()
        self._between = cost.repack_seconds() + cost.steps_seconds()

    def seconds(self, rows: int) -> float:
        """Seconds of one tile on one worker."""
        spent = [(work.dot is not None, count * self.cost.seconds(work, rows)) for work, count in self.kinds.items()]
        tensor = sum(seconds for multiplies, seconds in spent if multiplies)
        simt = sum(seconds for multiplies, seconds in spent if not multiplies)
        # A core prefetches while it multiplies, so only fetching beyond the matmuls' time is waited for (a NeRF step with 2 MB of
        # accumulators a worker took 122 ms at 64-128 rows and 128 ms at 32; its matmuls alone take 117).
        fetched = self._weight_seconds() + self._spill_seconds(rows)
        return max(tensor, fetched) + simt + self._between + _TILE_SECONDS

    def workers(self, rows: int) -> int:
        """The workers for which the executor has memory: for a tile of ``rows`` rows, and for sums of their own (``kMostScratch``
        and ``strands_for`` in ``cpu/src``)."""
        tiles = (TEMPORARY + self.arrays) // (rows * self.live)
        sums = (PARTIAL_SUMS + self.summed) // max(1, self.sinks + self.tables)
        return max(1, min(self.cost.machine.workers, tiles, sums))

    def _weight_seconds(self) -> float:
        place = "l2" if self.weights <= self.cost.machine.local_bytes // 2 else "l3"
        return self.weights / self.cost.machine.place(place).bandwidth

    def weight_wait_seconds(self) -> float:
        """Seconds of a tile beyond ``seconds`` in which its worker waits for weights: for the choice of its rows."""
        return 0.0 if self.packs else _WAITED * self._weight_seconds()

    def cache_wait_seconds(self, rows: int) -> float:
        """Seconds beyond ``seconds`` in which a tile's ops wait for the L2, where intermediates do not fit the L1. They do not
        decide on the rows: tiles that fit took 1 to 9 % longer, as a tile has more costs than are modelled (Xeon with AMX)."""
        if rows * self.live <= self.cost.machine.profile.l1:
            return 0.0
        return rows * sum(count * self.cost.second_cache_seconds(works) for count, works in self._passes(rows))

    def _passes(self, rows: int) -> Iterator[tuple[float, Mapping[CpuWork, int]]]:
        """How often a tile does works, and the works."""
        yield 1.0, self.kinds

    def _spill_seconds(self, rows: int) -> float:
        """Seconds to move a tile's intermediates through the shared cache, or memory, where they do not fit the core's own."""
        machine = self.cost.machine
        working = rows * self.live + self.sinks
        if working <= machine.local_bytes:
            return 0.0
        moved = rows * self._made + self.sinks
        near = working <= machine.shared_bytes // machine.workers
        return 2 * moved / (machine.place("l3").bandwidth if near else machine.dram_bandwidth / machine.workers)


def woken_seconds(cost: CpuCost, packs: bool = False) -> float:
    """Extra seconds in which sleeping workers wake up: after packing, after the tiles, and after the sums. ``call`` was measured
    with threads that were awake, but threads that wait for long sleep, as XLA's do (``xla/call/handed``)."""
    if not cost.program.flop_counts.is_of(cost.graph):
        return 0.0
    return cost.times["xla/call/handed"] * (1 + packs + any(i in cost.sinks for i in cost.region.ops))


def tile_rows(model: TileModel) -> int:
    """The rows per tile that the model rates best among those whose intermediates stay in a core's L2: multiples of 8 unless the
    stream or the memory is shorter. Raises ``Infeasible`` for a tile that needs more scratch memory than a worker may have.
    """
    machine, space = model.cost.machine, model.cost.region.space
    total = space.rows // max(1, space.batches)  # a tile is of one batch
    limit = max(machine.local_bytes // model.live, 1)
    if model.sinks > machine.local_bytes:
        # Every tile reads accumulators and weights from the shared cache anyway, so fewer tiles with some intermediates there pay:
        # a SwiGLU step (8.7 MB of weights) took 1128 ms with the 48 rows that fit, 1052 with 96, 5 to 10 % more again with 192. A
        # transformer layer's step took 403 ms in tiles of the 22 rows that fit twice, 342 of 44, 347 of 96, 379 of 192 (Zen 3).
        limit = max(limit, min(limit * _SPILLED, _SPILLED_ROWS))
    looped = next(model.cost.loops(), None) is not None  # a loop reads and writes one slice at a time
    if not looped and not any(work.dot for work in model.kinds):
        limit = max(min(limit, int(_PASSED * machine.local_bytes) // (model.live + model.border)), 1)
    if looped and all(body.is_one_pass() for _, _, body in model.cost.loops()):
        limit = max(min(limit, _STATE // model.live), 1)
    # An equal share of the rows for every worker, in as few rounds as the limit allows.
    rounds = max(1, -(-total // (machine.workers * min(limit, _ROWS[0]))))
    share = -(-total // (machine.workers * rounds)) if not space.batch else total
    whole = total if total <= _ONE_TILE else 0
    candidates = [n for n in (whole, _ROWS[0], round_up(share, 8), *_ROWS[1:], share) if 0 < n <= min(limit, total)]

    @functools.cache
    def seconds(rows: int) -> float:
        tiles, tile, workers = space.tiles(rows), model.seconds(rows) + model.weight_wait_seconds(), model.workers(rows)
        if tiles * tile < SHARED_SECONDS:
            return tiles * tile
        hand_over = machine.call_seconds - model.cost.times["call/short"] if tiles > 1 else 0.0
        if model.cost.program.flop_counts.is_of(model.cost.graph):
            if min(tiles, workers) > 1:  # another worker zeroes sums, which are then added up
                hand_over += woken_seconds(model.cost) + 2 * model.sinks / machine.place("l3").bandwidth
            elif tiles < machine.workers:  # one worker moves the bytes that all would share
                hand_over += (1 - 1 / machine.workers) * pipeline_traffic(model.cost) / machine.place("l3").bandwidth
        return hand_over + -(-tiles // workers) * tile

    best = min(seconds(n) for n in candidates)
    rows = next(n for n in candidates if seconds(n) <= (_WOKEN_FOR if looped and n == whole else _INDIFFERENT) * best)
    scratch = rows * model.live + model.sinks + model.tables
    if scratch > _MAX_SCRATCH:
        raise Infeasible(
            f"a tile of {rows} rows needs {size_text(scratch)} of scratch per worker; {size_text(_MAX_SCRATCH)} is the most"
        )
    return rows


# --- Blocks of a long dimension of the rows: tiles are then taller, and intermediates stay in the cache ---------------------------

_BLOCKS = (128, 256, 512)
# The most elements of a block that a mask cuts: rows that see none of them leave it out. Causal attention of 4096 tokens took 25.3
# ms in bfloat16, 25.6 with 64 and 27.0 with 256, as many as other blocks have (Xeon with AMX).
_EDGE = 128
# The factor for such blocks, whose rows are short and masked. In blocks of 512 keys, which have more of them beside fewer others,
# that attention took 29.5 ms instead of 27.1 in blocks of 256, 79 instead of 77.7 in float32; without a mask 43.9, not 45.7.
_CUT = 1.25
# The steps and ops of a block for each row, beside those of the region: the largest score so far, and its growth.
_STATE_STEPS, _STATE_OPS = 12, ("max", "eq", "select_n", "sub", "exp", "mul", "add")


def plans_in_blocks(graph: Graph, region: Region, machine: CpuMachine, program: CpuProgramContext) -> list[CpuPlan]:
    """A plan for each block size in which ``region`` can be computed; none where it has no long dimension."""
    inner = inner_of(graph, region)
    cost = CpuCost(graph, region, machine, program=program)
    if inner is None or cost.matrices:
        return []
    if not region.space.batch and all(cost.family(i) == "dot" for i in inner.folds):
        return []  # the dimension is a layer's width, and its packed weights serve all tiles
    value = max((v for v in inner.dims if v in cost.labels), key=lambda v: (v in cost.producer, cost.row_size(v), -v))
    plans = []
    for size in (n for n in _BLOCKS if n < inner.size):
        blocks = value, inner.dims[value], size
        try:
            # A plan for a program of which only the loops are looked at.
            stage = Stage("sketch", tuple(sorted(region.ops)), "tensor", 1, 0.0)
            unplanned = CpuPlan(machine.name, "vertical", 64, 1, (stage,), (), 1, 0.0, 0.0, 0, 0, "", blocks=blocks, edge=_EDGE)
            sketch = with_known_bounds(build(graph, region, unplanned))
            plans.append(dataclasses.replace(_plan_tiles(cost, BlockModel(cost, inner, size, sketch)), blocks=blocks, edge=_EDGE))
        except (NotBlocked, Infeasible):
            continue
    return plans


class BlockModel(TileModel):
    """A tile whose inner dimension is computed in blocks of ``size``. A block costs as much as a region of that size."""

    packs = True

    def __init__(self, whole: CpuCost, inner: Inner, size: int, program: TileProgram):
        values = list(whole.graph.values)
        for v, d in inner.dims.items():
            shape = values[v].shape
            values[v] = dataclasses.replace(values[v], shape=(*shape[:d], size, *shape[d + 1 :]))
        super().__init__(whole.for_graph(dataclasses.replace(whole.graph, values=tuple(values)), whole.region))
        self.inner, self.program = inner, program
        self.loops = [i for i in program.stages[0].body if i.kind == "loop"]
        self.outside = self.cost.kinds(i for i in whole.region.ops if i not in inner.ops)
        self.inside = [self._inside(loop) for loop in self.loops]
        self.carried = sum(self.cost.row_size(self.cost.graph.ops[i].outputs[0]) for i in inner.folds)

    def seconds(self, rows: int) -> float:
        outside = sum(n * self.cost.seconds(work, rows) for work, n in self.outside.items())
        times = self.cost.times
        state = _STATE_STEPS * STEP_SECONDS + rows * sum(times.vector(kind, "float32") for kind in _STATE_OPS)
        state += 2 * rows * self.carried * times.edge("float32")
        blocks = 0.0
        for loop, iterations, (works, moving) in zip(self.loops, self._iterations(rows), self.inside, strict=True):
            block = moving + sum(n * self.cost.seconds(work, rows) for work, n in works.items())
            blocks += iterations * (block / loop.get("together", 1) + (state if loop.inputs else 0.0))
        return outside + blocks + self._spill_seconds(rows)

    def _passes(self, rows: int) -> Iterator[tuple[float, Mapping[CpuWork, int]]]:
        yield 1.0, self.outside
        for loop, iterations, (works, _) in zip(self.loops, self._iterations(rows), self.inside, strict=True):
            yield iterations / loop.get("together", 1), works

    def _iterations(self, rows: int) -> list[float]:
        """The blocks of each loop for a tile of ``rows`` rows, by the rows that take part; those that a mask cuts count more."""
        program = dataclasses.replace(self.program, tile_rows=rows)
        cut = [loop.get("within") is not None and loop["within"][-1] == "edges" for loop in self.loops]
        return [mean_row_iterations(program, loop) * (_CUT if c else 1.0) for loop, c in zip(self.loops, cut, strict=True)]

    def _inside(self, loop: Instr) -> tuple[dict[CpuWork, int], float]:
        """The works of a loop in one block, and the seconds to pack its operands and to read and write its part of the sinks. Each
        loop after the first computes its operands again."""
        ops = {i.op for i in walk((loop,)) if i.op in self.inner.ops}
        sums = 2 * self.cost.sink_bytes(ops) / self.cost.machine.place("l3").bandwidth
        dots = [(i, dot) for i in ops if i not in self.cost.sinks and (dot := self.cost.work(i).dot) is not None]
        packed = sum(self.cost.packed_seconds(i, dot, "l2") + STEP_SECONDS for i, dot in dots if not dot.per_row)
        return self.cost.kinds(ops), sums + packed


# --- Folds by indices in whose order the rows stream ------------------------------------------------------------------------------

# One worker: the end of a run, and one possible index when the order is made. 100 000 single numbers took two workers 234 us in the
# order of 10 indices, and 300 and 523 with 10 000 and 100 000 indices (Xeon with AMX).
_RUN_SECONDS, _KEY_SECONDS = 8e-9, 9e-9
# Rows copied where a row is widened to double precision and rounded again; and for the two rows that each strand keeps, of this
# many strands at most (cpu/src/executor.cc): 128 rows of 8192 numbers with 256 indices took 1.5 ms and were modelled at 0.6.
_KEPT_ROWS, _STRAND_ROWS, _STRANDS = 3, 8, 64


def order_seconds(cost: CpuCost) -> float:
    """Worker-seconds to stream in the order of indices: to make the order, and to read and write single rows."""
    if cost.order is None:
        return 0.0
    rows = cost.region.space.rows
    keys = max((_segments(access) for access in _folds(cost) if access.near), default=0)
    known = is_constant(cost.graph, cost.graph.producers(), cost.order)
    seconds = 0.0 if known else rows * cost.times["order"] + keys * _KEY_SECONDS
    for v in cost.border:
        row = Access(1, cost.row_bytes(v), cost.bytes(v), False, False)
        near = dataclasses.replace(row, near=True)
        seconds += rows * (cost.times.access(row) - cost.times.access(near))
    return seconds


def folded_seconds(cost: CpuCost) -> float:
    """Worker-seconds to fold rows that the region only folds; reading them overlaps with folding."""
    seconds = 0.0
    for i in cost.sinks:
        access, rows = cost.access(i), cost.graph.ops[i].inputs[0]
        alone = rows in cost.region.inputs and rows in cost.labels and cost.readers.get(rows) == [i]
        if access is not None and access.folds and alone:
            seconds += cost.region.space.rows * cost.times.folded(access)
    return seconds


def segments_seconds(cost: CpuCost, tiles: int) -> float:
    """Worker-seconds to write the results of folds in order, beside reading and folding rows: to bring in their lines, to end runs
    (as many as random rows have different indices), and to fill results without rows. The last run of each of ``tiles`` tiles is
    kept in double precision, and so are the first and the last run of a strand until all strands have ended."""
    seconds = 0.0
    for access in _folds(cost):
        if access.near:
            segments = _segments(access)
            ends = segments * -math.expm1(-cost.region.space.rows * access.count / segments)
            empty = 1 - ends / segments
            seconds += (0.5 + 0.5 * empty) * cost.times.written(access.table_bytes) + ends * _RUN_SECONDS
            kept = _KEPT_ROWS * tiles + _STRAND_ROWS * min(tiles, _STRANDS)
            seconds += kept * access.row_bytes * cost.times["copy/l2"]
    return seconds


def _folds(cost: CpuCost) -> Iterator[Access]:
    for i in cost.sinks:
        access = cost.access(i)
        if access is not None and access.folds:
            yield access


def _segments(access: Access) -> int:
    return max(1, access.table_bytes // max(1, access.row_bytes))


# --- Plans of whole regions -------------------------------------------------------------------------------------------------------

_ELEMENTWISE = FREE.union(FAMILIES)
# The factor for tiles of few rows, which read all weights again and again: an attention over 8 heads of 1024 and 2048 keys took
# 1.22 and 1.29 times its modelled time in tiles of 8 and 7 rows (Zen 5). It decides only between such tiles and blocks.
_FEW_ROWS, _SHORT_TILES = 16, 1.25
# The factor for blocks without products, where tall tiles gain nothing and exponentials are computed again: a softmax of 8009 rows
# of 1536 numbers took 1.23 times as long, a log softmax of rows of 512 took 1.08 in float32 and 1.24 in bfloat16 (Xeon with AMX).
_BLOCKS_ALONE = 1.25
# ``Plan.margin`` where nothing is reduced. Of 127 random elementwise functions 62 were modelled at 1.45x or more and 78 at 1.3x;
# one ran below 0.95x in either case, and three of the 81 from 1.25x on (Xeon with AMX).
ELEMENTWISE_MARGIN = 1.3
# ``Plan.margin`` of folds by index alone. Of 248 sums and maxima 115 were modelled at 1.45x or more and 145 at 1.25x; one ran below
# 0.95x in either case, and two of the 154 from 1.2x on (Xeon with AMX).
FOLD_MARGIN = 1.25


def plan(graph: Graph, region: Region, machine: CpuMachine, program: CpuProgramContext = REGION_ALONE) -> CpuPlan:
    """The plan for ``region`` on ``machine`` in ``program``. Raises ``Infeasible`` (a ``ValueError``) with the reason.

    Where ops fold rows into tables by index, rows stream as they lie in memory, and every worker has tables of its own; or they
    stream in the order of one op's indices, whose folds are then reductions of runs. The model decides.
    """
    if region.space.rows < 1:
        raise Infeasible("the stream has no rows")
    orders = [order for order in (None, *_unlike_orders(graph, region)) if not _out_of_order(graph, region, order)]
    if not orders:
        raise Infeasible("it has softmaxes over several indices, but rows stream in the order of one index only")
    plans: list[CpuPlan] = []
    wrong: Infeasible | None = None
    for order in orders:
        try:
            cost = CpuCost(graph, region, machine, order, program)
            plans.append(_plan_tiles(cost, TileModel(cost)))
        except Infeasible as error:
            wrong = error
    plans += plans_in_blocks(graph, region, machine, program)
    if not plans:
        raise wrong or Infeasible("there is no plan")
    multiplies = any(OPS[graph.ops[i].kind].family == "dot" for i in region.ops)

    def seconds(p: CpuPlan) -> float:
        if p.blocks is not None:
            return p.seconds * (1.0 if multiplies else _BLOCKS_ALONE)
        return p.seconds * (_SHORT_TILES if multiplies and p.tile_rows < _FEW_ROWS else 1.0)

    return min(plans, key=seconds)


def _unlike_orders(graph: Graph, region: Region) -> list[int]:
    """``orders_of``, one of those by which equal ops read and fold equal arrays: they take equal times. A hash-grid field has an
    order for each corner of each level, 48 in all: its gradient is lowered in 1.1 s instead of 7.2."""
    unlike: dict[tuple[Any, ...], int] = {}
    for order in orders_of(graph, region):
        users = [graph.ops[i] for i in sorted(region.ops) if order in graph.ops[i].inputs]
        arrays = [[(graph.values[v].shape, graph.values[v].dtype) for v in (*op.inputs, *op.outputs)] for op in users]
        shapes = [(op.kind, op.params, *of) for op, of in zip(users, arrays, strict=True)]
        unlike.setdefault((graph.values[order].shape, *shapes), order)
    return list(unlike.values())


def _out_of_order(graph: Graph, region: Region, order: int | None) -> bool:
    """Whether the rows of an online sum would not come in the order of its indices, for which there is no code."""
    online = [graph.ops[i] for i in region.sinks if graph.ops[i].kind in ONLINE]
    return any(op.inputs[1] != order and not (order is None and op["sorted"]) for op in online)


def _plan_tiles(cost: CpuCost, model: TileModel) -> CpuPlan:
    """The plan of a region with the fewest seconds by ``model``, whose tiles may be blocks of the values that ``cost`` is of."""
    region, machine, order = cost.region, cost.machine, cost.order
    rows = tile_rows(model)
    tiles = region.space.tiles(rows)
    replicas = max(1, min(model.workers(rows), tiles))
    tile = model.seconds(rows) + model.cache_wait_seconds(rows)
    traffic = pipeline_traffic(cost)
    busy = -(-tiles // replicas) * tile
    moving = _moving_seconds(machine, traffic + partial_bytes(cost, replicas))
    # Reading rows that are only folded overlaps with folding them: 10^6 x 64 numbers took 11.9 ms by sorted index, and were
    # modelled at 18.6 as the sum of both (Xeon with AMX).
    moving -= min(moving, folded_seconds(cost) / machine.workers)
    base_seconds, base_bytes = baseline(cost)
    seconds = _call_seconds(cost, replicas, busy, moving, rows, model.packs) + _copied_seconds(cost)
    ops = tuple(sorted(region.ops))
    name = stage_name(cost, 0, ops)
    return CpuPlan(
        machine=machine.name,
        arrangement="vertical",
        tile_rows=rows,
        tiles=tiles,
        stages=(Stage(name, ops, resource_of(cost, ops), 1, tile),),
        queues=(),
        replicas=replicas,
        seconds=seconds,
        baseline_seconds=base_seconds + (_hand_over_seconds(cost) if seconds < LONG_SECONDS else 0.0),
        bytes_moved=traffic,
        baseline_bytes=base_bytes,
        bound="dram" if moving > busy else name,
        products=cost.products,
        order=order,
        margin=_margin({cost.family(i) for i in ops}),
    )


def _margin(families: Set[str]) -> float:
    """``Plan.margin`` of a region with ops of these families."""
    if families <= _ELEMENTWISE:
        return ELEMENTWISE_MARGIN
    return FOLD_MARGIN if SCATTER in families <= {*_ELEMENTWISE, SCATTER} else VECTOR_MARGIN


def _hand_over_seconds(cost: CpuCost) -> float:
    """Half the seconds of XLA's hand-over, saved where the caller's thread can run all that is left of a program. Half, because the
    region may be a part of a larger program, which XLA hands over all the same."""
    known = cost.program.flop_counts
    if not known.is_of(cost.graph) or not known.avoids_hand_over(cost.region.ops):
        return 0.0
    return 0.5 * cost.times["xla/call/handed"]


def _copied_seconds(cost: CpuCost) -> float:
    """In a step of a loop that XLA runs: seconds to copy each carry's next value that the call makes to the carry's place, where
    XLA's own kernels write in place. 4 MB of gradients of a neural ODE took 0.76 ms a step instead of 0.20 (Xeon with AMX)."""
    if not cost.program.looped:
        return 0.0
    values, read = cost.graph.values, set(cost.region.inputs).intersection(cost.graph.inputs)
    carries = {(values[v].shape, values[v].dtype) for v in read}
    copied = [v for v in cost.outputs if v in cost.graph.outputs and (values[v].shape, values[v].dtype) in carries]
    return sum(stored_seconds(cost, cost.bytes(v)) for v in copied)


def _moving_seconds(machine: CpuMachine, moved: float) -> float:
    """Seconds of all workers to read and write the ``moved`` bytes that cross the region's border."""
    beyond = max(0.0, moved - machine.shared_bytes)  # bytes that do not fit the last level
    return (moved - beyond) / max(machine.shared_bandwidth, machine.dram_bandwidth) + beyond / machine.dram_bandwidth


def _call_seconds(cost: CpuCost, replicas: int, busy: float, moving: float, rows: int, packs: bool) -> float:
    """Seconds of a call whose workers compute tiles for ``busy`` seconds each; the cores that compute also move bytes."""
    workers, tiles = cost.machine.workers, cost.region.space.tiles(rows)
    fresh = fault_seconds(cost, cost.outputs, cost.machine.huge_fault_bandwidth)
    strided = (cost.strided_seconds(rows) + order_seconds(cost) + segments_seconds(cost, tiles)) / workers
    packing, alone = _pack_seconds(cost, tiles) if not packs else 0.0, cost.times["call/short"]
    if packing + (busy * replicas if replicas > 1 else 0.0) < SHARED_SECONDS:  # the calling thread does all of it
        return alone + packing + fresh + strided + busy * replicas + moving
    call = cost.machine.call_seconds + woken_seconds(cost, packing > SHARED_SECONDS) if replicas > 1 else alone
    return call + packing / workers + fresh + strided + (busy + moving)


def _pack_seconds(cost: CpuCost, tiles: int) -> float:
    """Worker-seconds to pack weights into the micro-kernels' layout: once per call, or per tile if they depend on the batch."""
    ops = cost.region.ops
    seconds = sum(body.pack_seconds(constants) for _, constants, body in cost.loops())  # before the first step
    # Biases and gains are laid out before the first tile as well, in about half the time of a small weight.
    seconds += 0.5 * cost.times["call/layer"] * len(cost.stationary_inputs(ops))
    # The accumulators of a sink are zeroed, added up and stored.
    return seconds + cost.times["call/layer"] * sum(i in cost.sinks for i in ops) + cost.pack_seconds(tiles=tiles)


def partial_bytes(cost: CpuCost, replicas: int) -> int:
    """Bytes of the workers' partial sinks, each written and read once: sinks are folded in a fixed order, so all are kept."""
    return replicas * cost.sink_bytes(cost.region.ops) * 2

"""Plans for a GPU: every arrangement that fits, fastest first; and plans in blocks for attention.

Comes in: a Graph, a Region and the model of a GPU. Goes out: ``plan``, the fastest ``GpuPlan`` that the code generator accepts.
Invariants: no plan needs more shared memory, registers, SMs or CTAs in a cluster than the machine has; the same arguments give the
same plans in every process.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kitsune_jax.ops.graph import Graph
from kitsune_jax.ops.reduce import ONLINE, any_order
from kitsune_jax.planning.plan import NO_CONTEXT, GpuPlan, Infeasible, ProgramContext, Stage, size_text
from kitsune_jax.planning.stages import Inner, Ops, finest, inner_of, orders_of, resource_of, stage_name
from kitsune_jax.planning.streams import Region
from kitsune_jax.program.blocks import NotBlocked
from kitsune_jax.program.build import build
from kitsune_jax.program.ir import Instr, TileProgram, walk
from kitsune_jax.program.loop_bounds import tile_iterations, tile_starts
from kitsune_jax.targets.cuda import tiles
from kitsune_jax.targets.cuda.planning.arrangements import Arranged, GpuRegion, over_clusters, spatial
from kitsune_jax.targets.cuda.planning.cost import (
    GpuCost,
    StageSteps,
    Storage,
    dots_of,
    fed_by,
    gradients_of,
    largest_storage,
    loops_of,
    packed_bytes,
    panel_sums_of,
    shared_bytes,
    tile_work,
    vector_bytes,
)
from kitsune_jax.targets.cuda.planning.machines import GpuMachine, matmul_efficiency
from kitsune_jax.targets.cuda.planning.program_work import ProgramWork
from kitsune_jax.targets.cuda.stage.fitting import MAX_DEPTH, STAGED_DEPTH
from kitsune_jax.targets.cuda.tiles import NO_RING, TILE_ROWS, InputRing

# --- Streams with batch axes, and rows processed in blocks: attention -------------------------------------------------------------

_BLOCKS = (128, 64, 32)
_WIDEST = 512  # columns of a row that is not processed in blocks, as it lies in shared memory
# Times within this factor count as equal where a loop sums several products, or one of float32 behind two others: their
# accumulators take most of the registers.
_AS_GOOD = 1.15
_SAMPLE = 16  # rounds of tiles whose work is modelled


def plans_in_batches(cost: GpuCost, layers: bool = False, in_time: bool = False) -> list[GpuPlan]:
    """Plans for a stream with batch axes, or with a dimension of its rows that is folded in blocks, fastest first; else [].

    One plan for each extent of a block and number of lanes. Weights that change with the batch or the block, as keys and values
    do, pass through the ring of streamed weights, from which all lanes of a CTA multiply. The lanes work on neighbouring tiles of a
    batch, and run the blocks that any of them needs. ``layers``: also take dimensions that only products fold, as the width of a
    layer; for when there is no other plan, which would not stream such weights. ``in_time``: as in ``ProgramWork``. Raises
    ``Infeasible``.
    """
    graph, region = cost.graph, cost.region
    inner = inner_of(graph, region)
    if inner is not None and not any(cost.family(i) == "dot" for i in region.ops):
        inner = None
    if inner is not None and not (layers or region.space.batch) and all(cost.family(i) == "dot" for i in inner.folds):
        inner = None
    if inner is None and not region.space.batch:
        return []
    if region.sinks:
        if region.space.batch:
            raise Infeasible("sums over a stream whose tiles keep within a batch have no code on a GPU")
        return []
    tried: list[tuple[int, int, int] | None] = [None] if region.space.batch else []
    if inner is not None:
        value = max(inner.dims, key=lambda v: (v in cost.producer, cost.row_size(v), -v))
        tried += [(value, inner.dims[value], size) for size in _BLOCKS if size < inner.size]
    plans, reasons = list[GpuPlan](), dict[str, None]()
    for blocks in tried:
        try:
            plans += _plans_of_blocks(cost, _with_blocks(graph, inner, blocks), blocks, in_time)
        except (NotBlocked, Infeasible) as no:
            reasons[str(no)] = None
    if not plans and region.space.batch:
        raise Infeasible("; ".join(reasons))
    # Among equally good plans, a smaller block leaves the compiler more registers, which it lacks where there are several sums, or
    # where a sum reads what two products of float32 make: a gradient by queries in blocks of 128 keys spilled 2 276 bytes a thread.
    products = [i for i in region.ops if cost.family(i) == "dot"]
    wide = len(products) > 2 and all(graph.values[graph.ops[i].inputs[0]].dtype == "float32" for i in products)
    sums = 0 if inner is None else sum(cost.family(i) == "dot" for i in inner.folds)
    several = sums > 1 or (wide and sums == 1)
    best = min((p.seconds for p in plans), default=0.0) * (_AS_GOOD if several else 1.0)
    return sorted(plans, key=lambda p: (max(p.seconds, best), several * (p.blocks or (0,))[-1], -p.lanes, (p.blocks or (0,))[-1]))


def _with_blocks(graph: Graph, inner: Inner | None, blocks: tuple[int, int, int] | None) -> Graph:
    """``graph`` whose inner dimension is cut down to one block."""
    if inner is None or blocks is None:
        return graph
    values = list(graph.values)
    for v, d in inner.dims.items():
        shape = values[v].shape
        values[v] = dataclasses.replace(values[v], shape=(*shape[:d], blocks[2], *shape[d + 1 :]))
    return dataclasses.replace(graph, values=tuple(values))


def _plans_of_blocks(cost: GpuCost, cut: Graph, blocks: tuple[int, int, int] | None, in_time: bool) -> list[GpuPlan]:
    region, machine = cost.region, cost.machine
    of_block = cost.for_graph(cut, region)
    widest = max((of_block.row_size(v) for v in of_block.labels), default=0)
    if widest > _WIDEST:
        raise Infeasible(f"outside of its block a row has {widest} columns; a lane has room for {_WIDEST}")
    ops = tuple(sorted(region.ops))
    name = stage_name(cost, 0, ops)
    stage = Stage(name, ops, resource_of(cost, ops), 1, 0.0, resident=False)
    sketch = GpuPlan(machine.name, "vertical", TILE_ROWS, 1, (stage,), (), 1, 0.0, 0.0, 0, 0, "", blocks=blocks)
    program = build(cost.graph, region, sketch)
    gpu = GpuRegion(cost)
    works = [ProgramWork(program, machine, lanes, in_time) for lanes in range(1, len(machine.lane_registers) + 1)]
    return [_plan_of_lanes(gpu, work, stage, blocks) for work in works]


def _plan_of_lanes(gpu: GpuRegion, work: ProgramWork, stage: Stage, blocks: tuple[int, int, int] | None) -> GpuPlan:
    """The plan of CTAs with as many lanes as ``work`` is for, which take as many tiles of one batch in a round."""
    machine, program, lanes = gpu.machine, work.program, work.lanes
    body = program.stages[0].body
    wide = dataclasses.replace(program, tile_rows=lanes * TILE_ROWS)
    sample, rounds, seconds, fetched = _sample_rounds(wide), wide.tiles, list[float](), 0.0
    for round_rows in sample:
        rows = np.asarray(round_rows)

        def times(loop: Instr, rows: np.ndarray = rows) -> float:
            return float(len(tile_iterations(wide, loop, rows)))

        tile = work.of(body, times)
        seconds.append(lanes * tile.period(lanes, machine.tile_seconds))
        fetched += work.weight_bytes(body, times) / len(sample)
    ctas = max(1, min(machine.workers, rounds))
    mean, longest = sum(seconds) / len(seconds), max(seconds)
    # Where rounds differ, those with most work start first, so that all CTAs end at about the same time.
    busy = max(longest, mean * rounds / ctas) if longest > min(seconds) else longest * -(-rounds // ctas)
    stage = dataclasses.replace(stage, tile_seconds=mean / lanes)
    plan = gpu.plan(Arranged("vertical", (stage,), (), ctas, 1, lanes, busy, rounds * fetched, stage.name))
    return dataclasses.replace(plan, tiles=_tiles(program, lanes), blocks=blocks)


def _sample_rounds(program: TileProgram) -> list[range]:
    """The rows of a sample of rounds. Where loops are bounded by the index on an axis it covers that axis, and includes the last
    round of a batch, which has most work under a causal mask."""
    batch, rows = program.batch_axes, math.prod(program.axes[program.batch_axes :])
    axis = min((i["within"][0] for i in walk(program.stages[0].body) if i.get("within") is not None), default=batch)
    last = (program.tiles // program.batches - 1) * program.tile_rows
    starts = sorted({*map(int, tile_starts(program, axis, _SAMPLE)), last})
    return [range(start, min(start + program.tile_rows, (start // rows + 1) * rows)) for start in starts]


def _tiles(program: TileProgram, lanes: int) -> int:
    """Tiles of all batches, each rounded up so that all lanes have equally many."""
    batches = max(1, program.batches)
    return batches * -(-(program.tiles // batches) // lanes) * lanes


# --- All plans of a region --------------------------------------------------------------------------------------------------------

_INDIFFERENT = 1.03  # plans within this factor of the fastest count as equally fast: the model is no more exact
# The fewest chunks of weights in flight: at 24 bytes a cycle of L2 bandwidth per SM, less than one hides 263 cycles of latency; two
# more keep both ends of the ring at work. The kernel uses all shared memory that is left.
_RING_CHUNKS = 3
_CHUNK_BYTES = tiles.ROW_BYTES * tiles.CHUNK_COLUMNS
_MOST_TILES = 1 << 31  # kernels count tiles in 32 bits, rows and addresses in 64
_MATMUL_DTYPES = frozenset({"bfloat16", "float16", "float32"})
_SHARE = 2  # with so many times fewer tiles than SMs, also split weights over a cluster that fit a single CTA
_PAIR = 2  # CTAs of a cluster that fetch each streamed chunk once


# The code generator's answer to a plan: None, or the reason why it has no code for it.
Accept = Callable[[GpuPlan], str | None]


def plan(
    graph: Graph, region: Region, machine: GpuMachine, program: ProgramContext = NO_CONTEXT, accept: Accept | None = None
) -> GpuPlan:
    """The fastest plan for ``region`` on ``machine`` in ``program`` by the cost model. Raises ``Infeasible`` (a ``ValueError``)
    with the reason.

    ``accept``: the code generator's exact check, called on the candidates from the fastest on; where it refuses all of them, the
    message holds its reasons.
    """
    if region.space.rows < 1:
        raise Infeasible("the stream has no rows")
    reasons: dict[str, None] = {}
    found: list[GpuPlan] = []
    blocked: list[GpuPlan] = []
    atomics = (False, True) if any(any_order(graph.ops[i], program.options.deterministic) for i in region.sinks) else (False,)
    for order in () if region.space.batch else (None, *orders_of(graph, region)):
        for atomic in atomics:
            cost = GpuCost(graph, region, machine, order, atomic, program)
            if atomic and not cost.unordered:
                continue  # all sums are in order
            try:
                found += candidates(cost)
            except Infeasible as no:
                reasons[str(no)] = None
    try:
        blocked = plans_in_batches(GpuCost(graph, region, machine, program=program), layers=not found)
    except Infeasible as no:
        reasons[str(no)] = None
    mixed = bool(blocked) or len({(p.order, p.unordered) for p in found}) > 1
    # Plans in blocks keep their order, in which a faster one may come later.
    ranked = [*((p.seconds, p) for p in found), *zip(itertools.accumulate((p.seconds for p in blocked), max), blocked, strict=True)]
    for candidate in [p for _, p in sorted(ranked, key=lambda pair: pair[0])] if mixed else found:
        why = accept(candidate) if accept else None
        if why is None:
            return candidate
        reasons[why] = None
    raise Infeasible("; ".join(reasons))


def with_barriers(plans: Sequence[GpuPlan], phases: Sequence[int], machine: GpuMachine) -> tuple[GpuPlan, ...]:
    """``plans`` of parts that run in ``phases``, with the time of the grid's barrier added to the first part of each later
    phase."""
    found = [plans[0]]
    for k, plan in enumerate(plans[1:], 1):
        barrier = machine.barrier_seconds if phases[k] > phases[k - 1] else 0.0
        found.append(dataclasses.replace(plan, seconds=plan.seconds + barrier))
    return tuple(found)


def without_clusters(plan: GpuPlan, machine: GpuMachine) -> GpuPlan:
    """``plan`` without clusters, which CTAs that wait for each other as a grid cannot have. A pair then fetches its weights twice,
    and rings in a reader's shared memory move to the L2; the plan takes at least as long as these transfers."""
    if plan.cluster == 1:
        return plan
    near = [q for q in plan.queues if q.place == "cluster"]
    moved = plan.l2_bytes + plan.tiles * sum(q.entry_bytes * (1 + len(q.consumers)) for q in near)
    stages, replicas = plan.stages, plan.replicas
    if plan.arrangement == "vertical":
        moved *= plan.cluster
        stages = tuple(dataclasses.replace(stage, workers=1) for stage in stages)
        replicas = min(replicas * plan.cluster, plan.tiles)
    return dataclasses.replace(
        plan,
        cluster=1,
        stages=stages,
        replicas=replicas,
        queues=tuple(dataclasses.replace(q, place="l2") for q in plan.queues),
        seconds=max(plan.seconds, machine.call_seconds + moved / machine.shared_bandwidth),
        l2_bytes=moved,
    )


def with_lanes(plans: Sequence[GpuPlan], lanes: int, separate: float, machine: GpuMachine) -> tuple[GpuPlan, ...] | str:
    """``plans``, phases of one call, with ``lanes`` lanes each; a reason in words if they then take longer than ``separate``
    seconds. A plan with fewer lanes than before takes longer in proportion, unless it waits for memory.

    Results of one phase that fit the L2 stay there: a plan already assumes that what the kernel before wrote is in the L2.
    """
    found = list[GpuPlan]()
    for k, p in enumerate(plans):
        own = max(0.0, p.seconds - (0.0 if k else machine.call_seconds))
        lost = 0.0 if p.bound in ("dram", "l2") else max(0.0, p.lanes / lanes - 1)
        found.append(dataclasses.replace(p, lanes=lanes, seconds=p.seconds + lost * own))
    if (seconds := sum(p.seconds for p in found)) <= separate:
        return tuple(found)
    return f"with the barriers between them they would take {seconds * 1e6:.1f} us, as separate calls {separate * 1e6:.1f}"


def candidates(cost: GpuCost) -> list[GpuPlan]:
    """Every plan that fits the machine, fastest first by the model. Of plans about as fast as the fastest, vertical ones come first
    (on an H200 each was faster than every spatial one of its network), then those with the fewest bytes through the L2, which the
    model takes to be perfect. Raises ``Infeasible`` with the reasons where there is none.

    *Vertical*: every CTA runs the whole chain, its weights resident or streamed through shared memory for every round of tiles; a
    cluster of two fetches each streamed weight once. *Spatial* (``spatial``): each stage has CTAs of its own.
    """
    _check_ops(cost)
    region = GpuRegion(cost)
    ops, arranged, reasons = tuple(sorted(cost.region.ops)), list[Arranged](), list[str]()
    makers: dict[str, Callable[[], list[Arranged]]] = {"fused": lambda: _vertical(region, ops)}
    if has_loops := bool(loops_of(cost, ops)):  # a tile runs all steps of a loop
        makers["over a cluster"] = lambda: over_clusters(region, ops)
    else:
        makers["spatial"] = lambda: spatial(region, finest(cost, {**panel_sums_of(cost), **fed_by(cost)}))
    for name, make in makers.items():
        if arranged and has_loops and _SHARE * region.tiles > region.machine.workers:
            continue  # CTAs with all weights in their own shared memory need not wait for others
        try:
            arranged += make()
        except Infeasible as no:
            reasons.append(f"{name}: {no}")
    if not arranged:
        raise Infeasible("; ".join(reasons))
    plans = [(region.plan(a), a) for a in arranged]
    best = min(p.seconds for p, _ in plans)
    plans.sort(key=lambda pair: (pair[1].arrangement != "vertical", pair[1].l2_bytes, pair[0].seconds, -pair[1].lanes))
    plans.sort(key=lambda pair: max(pair[0].seconds, _INDIFFERENT * best))
    return [p for p, _ in plans]


@dataclasses.dataclass(frozen=True, slots=True)
class _Weights:
    """How weights come to the CTAs of a ``cluster``: ``resident``, or streamed through a ring. ``bytes``: of a CTA's shared memory
    at least."""

    cluster: int
    resident: bool
    bytes: int


def _vertical(region: GpuRegion, ops: Ops) -> list[Arranged]:
    cost, machine = region.cost, region.machine
    packed = packed_bytes(cost, ops)
    ways, loops = [_Weights(1, True, packed)], loops_of(cost, ops)
    if packed and not loops:
        clusters = [cluster for cluster in (1, _PAIR) if cluster <= machine.max_cluster]
        ways += [_Weights(cluster, False, _RING_CHUNKS * _CHUNK_BYTES) for cluster in clusters]
    # The steps of the bodies of loops, or of a stage without loops. The code itself accounts for what loops carry.
    steps = [StageSteps(body, body.region.ops) for _, body in loops] or [region.steps(ops, 1)]
    found, least = list[Arranged](), None
    for lanes, registers in enumerate(machine.lane_registers, 1):
        storage = largest_storage(steps, registers, lanes)
        if storage is None:
            continue
        for weights in ways:
            need = shared_bytes(cost, ops, storage, lanes, weights.bytes, 0)
            least = need if least is None else min(least, need)
            if need <= machine.local_bytes:
                found.append(_arranged(region, ops, storage, lanes, weights, machine.local_bytes - need))
    if found:
        return found
    if least is None:
        raise Infeasible(f"the sums over the stream do not fit the {max(machine.lane_registers)} registers of a thread")
    raise Infeasible(
        f"a tile of 64 rows with its weights needs {size_text(least)} of shared memory; a CTA has {size_text(machine.local_bytes)}"
    )


def _arranged(region: GpuRegion, ops: Ops, storage: Storage, lanes: int, weights: _Weights, free: int) -> Arranged:
    """The arrangement. ``free``: bytes of a CTA's shared memory that nothing else uses."""
    cost, machine, cluster, resident = region.cost, region.machine, weights.cluster, weights.resident
    ring = _ring(cost, ops, lanes, weights, free)
    work = tile_work(cost, ops, storage, matmul_efficiency(machine, "vertical", resident, lanes), ring=ring)
    replicas = max(1, min(machine.clusters(cluster), -(-region.tiles // cluster)))
    ctas = replicas * cluster
    tiles = -(-region.tiles // ctas)
    depth = (weights.bytes + free - ring.bytes) * (1 + region.steps(ops, 1).keeps_rows(lanes)) // _CHUNK_BYTES
    independent = lanes if resident or _can_drift(cost, ops, depth) else 1
    # Resident weights are loaded once; streamed ones pass once per round of lanes, and a pair shares each fetch.
    fetched = ctas * packed_bytes(cost, ops) * (1.0 if resident else -(-tiles // lanes) / cluster)
    name = stage_name(cost, 0, ops)
    together = lanes // independent
    period = work.period(independent, machine.tile_seconds, together)
    stage = Stage(name, ops, resource_of(cost, ops), cluster, period, resident=resident)
    busy = work.busy(tiles, independent, machine.tile_seconds, together) + (fetched / machine.shared_bandwidth if resident else 0.0)
    return Arranged("vertical", (stage,), (), replicas, cluster, lanes, busy, fetched, name, ring=ring)


def _ring(cost: GpuCost, ops: Ops, lanes: int, weights: _Weights, free: int) -> InputRing:
    """The ring of tiles, as ``layout.lay_out`` makes it, by the estimate of shared memory."""
    space, loads = cost.region.space, cost.loads_of(tuple(ops))
    machine = cost.machine
    if not machine.tile_rings or machine.max_cluster == 1 or len(space.sizes) != 1 or space.batch:
        return NO_RING
    if cost.order is not None or loops_of(cost, ops):
        return NO_RING
    first = {v: min(step for w, step in loads if w == v) for v, _ in loads if v in cost.region.inputs and _is_in_pieces(cost, v)}
    free += vector_bytes(cost, ops)  # the estimate of shared memory counts them, but they are in none
    for count, held in itertools.product(range(len(first), 0, -1), (True, False)):
        values = tuple(v for v in list(first)[:count] if held or first[v] == min(first.values()))
        entry = tiles.TILE_ROWS * sum(map(cost.row_bytes, values))
        entries = tiles.ring_entries(entry, lanes, free) if entry else 0
        if not weights.resident:
            chunks = min(MAX_DEPTH, (weights.bytes + free) // _CHUNK_BYTES)
            needed = min(chunks, max(STAGED_DEPTH, 2 * _most_chunks(cost, ops)))
            room = weights.bytes + free - needed * _CHUNK_BYTES
            entries = next((n for n in (2 * lanes, max(2, lanes)) if n * entry <= room), 0)
        least = lanes if gradients_of(cost, ops) else 1
        if entries >= (tiles.held_entries(lanes) if held else least):
            boxed = tuple((v, reads) for v in values if (reads := _reads_in_boxes(cost, ops, v)))
            return InputRing(values, held or _is_kept(cost, loads, values, first), entries * entry, boxed)
    return NO_RING


def _reads_in_boxes(cost: GpuCost, ops: Ops, v: int) -> int:
    """How many chunks of columns the products have that read input ``v`` where a tensor map brings it (``stage/inputs.py``)."""
    value, found, todo = cost.graph.values[v], 0, [v]
    if not tiles.in_boxes(cost.row_size(v), value.dtype) or cost.region.space.rows > tiles.MOST_BOXED_ROWS:
        return 0
    while todo:
        x = todo.pop()
        for i in cost.readers.get(x, ()):
            op, dot = cost.graph.ops[i], cost.work(i).dot
            if i in ops and op.kind == "concatenate":
                todo += op.outputs
            elif i in ops and dot is not None and not dot.per_row and i not in cost.sinks and op.inputs[0] == x:
                found += -(-tiles.padded(dot.n) // tiles.CHUNK_COLUMNS)
    return found


def _is_kept(cost: GpuCost, loads: Mapping[tuple[int, int], int], values: Sequence[int], first: Mapping[int, int]) -> bool:
    """Are the registers few for what a lane reads of ``values`` after it has released their entry?"""
    later = [(v, size) for (v, step), size in loads.items() if v in values and step > first[v]]
    half = all(tiles.is_half(cost.graph.values[v].dtype) for v, _ in later)
    return half and sum(size for _, size in later) <= 8 * tiles.KEPT_REGISTERS


def _is_in_pieces(cost: GpuCost, v: int) -> bool:
    """Is it an array of rows that lie together and are wider than the four threads that share a row read at once?"""
    labels, size = cost.labels.get(v, ()), cost.row_bytes(v)
    return labels[:1] == ((0,),) and not any(labels[1:]) and size > 64 and size % 16 == 0


def _most_chunks(cost: GpuCost, ops: Ops) -> int:
    """The chunks of K of the product that has most."""
    return max(tiles.WeightShape((dot.k,), dot.n, dot.dtype).k_chunks for dot in dots_of(cost, ops))


def _can_drift(cost: GpuCost, ops: Ops, depth: int) -> bool:
    """Can one lane be in an epilogue while another multiplies, although both take their weights from one ring of ``depth`` chunks?

    A chunk is free when every lane has used it. The lanes are a block of columns apart, so the ring must hold the chunks of two.
    """
    return depth >= 2 * _most_chunks(cost, ops)


def _check_ops(cost: GpuCost) -> None:
    """Raise ``Infeasible`` if an op of the region has no code on a GPU."""
    rows, most = cost.region.space.rows, tiles.TILE_ROWS * _MOST_TILES
    if rows > most:
        raise Infeasible(f"the stream has {rows} rows; the CUDA target counts {most} at most")
    touched = {v for i in cost.region.ops for v in (*cost.graph.ops[i].inputs, *cost.graph.ops[i].outputs)}
    for _, body in loops_of(cost, cost.region.ops):
        _check_ops(body)
    sizes = {v: cost.row_size(v) for v in touched if cost.streamed(v) and v not in cost.sliced()}
    widest = max(sizes, key=lambda v: (sizes[v], v), default=None)
    if widest is not None and sizes[widest] > tiles.MOST_COLUMNS:
        *_, last = cost.labels[widest]
        over = "streamed over the last dimension of an array, " if last else ""
        raise Infeasible(f"{over}a row has {sizes[widest]} columns; the limit of the CUDA target is {tiles.MOST_COLUMNS}")
    for i in cost.region.ops:
        dot, op, access = cost.work(i).dot, cost.graph.ops[i], cost.access(i)
        if op.kind in ONLINE and (access is None or not access.near):
            raise Infeasible(f"{op.label} of a softmax needs indices in the stream's order on the GPU: sort them by segment")
        if access is not None and access.folds and not access.near and i not in cost.unordered:
            own = tiles.table_bytes(op["n"], tiles.padded(cost.elements(i)))
            if own > tiles.MOST_TABLE_BYTES:
                raise Infeasible(
                    f"{op.kind} into {op['n']} rows by indices in another order than the stream's: a lane's own table would take "
                    f"{size_text(own)} of shared memory, of {size_text(tiles.MOST_TABLE_BYTES)}; sort the indices or use fewer rows"
                )
        if access is not None and access.folds and access.count > 1:
            raise Infeasible(f"{op.kind} by {access.count} indices for a row of the stream has no code on the GPU")
        if dot is None:
            continue
        if dot.per_row:
            if dot.batch != 1:
                raise Infeasible(f"the CUDA target has no code for {dot.batch} products for each row of the stream")
        elif i in cost.sinks:
            if dot.batch * dot.k != 1 and i not in cost.step_sums:
                raise Infeasible("the CUDA target has no code for a weight gradient of several matrices")
        elif dot.batch * dot.m != 1:
            raise Infeasible(f"the CUDA target has no code for {dot.batch * dot.m} matrix rows per row of the stream")
        if dot.dtype not in _MATMUL_DTYPES:
            raise Infeasible(f"the CUDA target has no code for a matmul of {dot.dtype}")
        if dot.dtype == "float32" and dict(op.params).get("precision") == "HIGHEST":
            raise Infeasible("the CUDA target multiplies float32 as tf32; ask for a lower precision than HIGHEST")

"""Plans for a GPU: every arrangement that fits, fastest first.

Comes in: a ``GpuCost`` whose machine is a GPU. Goes out: ``candidates``, Plans sorted by modelled time. Invariants: no plan
needs more shared memory, registers, SMs or CTAs in a cluster than the machine has; the same arguments give the same list in every
process.

A stream with batch axes, or with a dimension that is folded in blocks (attention), has plans of its own (``blocks``). *Vertical*:
every CTA runs the whole chain, its weights resident or streamed through shared memory for every round of tiles; a cluster of two
fetches each streamed weight once. *Spatial* (``spatial``): a CTA per stage.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from kitsune_jax.graph import Graph
from kitsune_jax.ops.indexing import any_order
from kitsune_jax.ops.online import ONLINE
from kitsune_jax.planning.machine import size_text
from kitsune_jax.planning.orders import orders_of
from kitsune_jax.planning.plan import Infeasible, Plan, Stage
from kitsune_jax.planning.stages import Ops, finest, resource_of, stage_name
from kitsune_jax.streams.space import Region
from kitsune_jax.targets.cuda import tiles
from kitsune_jax.targets.cuda.planning.blocks import in_batches
from kitsune_jax.targets.cuda.planning.clusters import over_clusters
from kitsune_jax.targets.cuda.planning.cost import GpuCost
from kitsune_jax.targets.cuda.planning.machines import GpuMachine
from kitsune_jax.targets.cuda.planning.products import fed_by
from kitsune_jax.targets.cuda.planning.region import Arranged, GpuRegion
from kitsune_jax.targets.cuda.planning.sizes import dots_of, loops_of, packed_bytes
from kitsune_jax.targets.cuda.planning.spatial import spatial
from kitsune_jax.targets.cuda.planning.splits import panel_sums_of
from kitsune_jax.targets.cuda.planning.storage import Steps, Storage, shared_bytes
from kitsune_jax.targets.cuda.planning.times import matmul_efficiency, tile_work

_INDIFFERENT = 1.03  # the model is not better than this
# The fewest chunks of weights under way: at 24 bytes a cycle of L2 bandwidth per SM, less than one hides 263 cycles of latency; two
# more keep both ends of the ring at work. The kernel takes what shared memory is left.
_RING_CHUNKS = 3
_CHUNK_BYTES = tiles.ROW_BYTES * tiles.CHUNK_COLUMNS
# Kernels count tiles in 32 bits, and rows and addresses in 64.
_MOST_TILES = 1 << 31
_MATMUL_DTYPES = frozenset({"bfloat16", "float16", "float32"})
_SHARE = 2  # tiles so many times fewer than SMs may be shared out over clusters though each CTA has room for all weights
_PAIR = 2  # CTAs of a cluster that fetch each streamed chunk once


# What the code generator says to a plan: None, or why it has no code for it.
Accept = Callable[[Plan], str | None]


def plan(graph: Graph, region: Region, machine: GpuMachine, accept: Accept | None = None) -> Plan:
    """The fastest plan for ``region`` on ``machine`` by the cost model. Raises ``Infeasible`` (a ``ValueError``) with the reason.

    ``accept``: the code generator's exact check; candidates are shown to it from the fastest on, and where it refuses all of them
    its reasons are the message.
    """
    if region.space.rows < 1:
        raise Infeasible("the stream has no rows")
    reasons: dict[str, None] = {}
    found: list[Plan] = []
    blocked: list[Plan] = []
    atomics = (False, True) if any(any_order(graph.ops[i]) for i in region.sinks) else (False,)
    for order in () if region.space.batch else (None, *orders_of(graph, region)):
        for atomic in atomics:
            cost = GpuCost(graph, region, machine, order, atomic)
            if atomic and not cost.unordered:
                continue  # all sums are in order
            try:
                found += candidates(cost)
            except Infeasible as no:
                reasons[str(no)] = None
    try:
        blocked = in_batches(graph, region, machine, layers=not found)
    except Infeasible as no:
        reasons[str(no)] = None
    mixed = bool(blocked) or len({(p.order, p.unordered) for p in found}) > 1
    # Those in blocks keep their order, in which a faster one may come later.
    ranked = [*((p.seconds, p) for p in found), *zip(itertools.accumulate((p.seconds for p in blocked), max), blocked, strict=True)]
    for candidate in [p for _, p in sorted(ranked, key=lambda pair: pair[0])] if mixed else found:
        why = accept(candidate) if accept else None
        if why is None:
            return candidate
        reasons[why] = None
    raise Infeasible("; ".join(reasons))


def with_barriers(plans: Sequence[Plan], phases: Sequence[int], machine: GpuMachine) -> tuple[Plan, ...]:
    """``plans`` of parts that run in ``phases``: the first part of each later phase waits for the grid's barrier."""
    found = [plans[0]]
    for k, plan in enumerate(plans[1:], 1):
        barrier = machine.barrier_seconds if phases[k] > phases[k - 1] else 0.0
        found.append(dataclasses.replace(plan, seconds=plan.seconds + barrier))
    return tuple(found)


def without_clusters(plan: Plan, machine: GpuMachine) -> Plan:
    """``plan`` with each CTA on its own: CTAs that meet as a grid have no clusters. Weights that two of them shared come twice, and
    rings lie in the L2 where they lay in a reader's shared memory; so its time is not less than that of what then passes there.
    """
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


def why_apart(together: Sequence[Plan], apart: float) -> str | None:
    """Why parts are no phases of one call with the plans ``together``; None where they take no more than ``apart`` seconds.

    What one phase hands to the next stays in the L2 where it fits: a plan takes what the kernel before has written for near.
    """
    seconds = sum(p.seconds for p in together)
    if seconds <= apart:
        return None
    return f"with the barriers between them they would take {seconds * 1e6:.1f} us, apart {apart * 1e6:.1f}"


def candidates(cost: GpuCost) -> list[Plan]:
    """Every plan that fits the machine, by modelled time; among those as good as the fastest, by what they move through the L2,
    which the model takes to be perfect. Raises ``Infeasible`` with the reasons where there is none.
    """
    _check_ops(cost)
    region = GpuRegion(cost)
    drafts = () if loops_of(cost, cost.region.ops) else finest(cost, {**panel_sums_of(cost), **fed_by(cost)})
    arranged: list[Arranged] = []
    reasons: list[str] = []
    ops = tuple(sorted(cost.region.ops))
    others: tuple[str, Callable[[], list[Arranged]]] = ("spatial", lambda: spatial(region, drafts))
    has_loops = bool(loops_of(cost, ops))
    if has_loops:  # all steps of a loop are those of one tile
        others = ("over a cluster", lambda: over_clusters(region, ops))
    for name, make in (("fused", lambda: _vertical(region, ops)), others):
        if arranged and has_loops and _SHARE * region.tiles > region.machine.workers:
            continue  # CTAs that have weights of their own wait for no others
        try:
            arranged += make()
        except Infeasible as no:
            reasons.append(f"{name}: {no}")
    if not arranged:
        raise Infeasible("; ".join(reasons))
    plans = [(region.plan(a), a) for a in arranged]
    best = min(p.seconds for p, _ in plans)
    plans.sort(key=lambda pair: (max(pair[0].seconds, _INDIFFERENT * best), pair[1].l2_bytes, pair[0].seconds, -pair[1].lanes))
    return [p for p, _ in plans]


@dataclasses.dataclass(frozen=True, slots=True)
class _Choice:
    """``weights``: bytes of shared memory that they take at least; ``free``: what is left of a CTA's beside."""

    lanes: int
    cluster: int
    resident: bool
    weights: int
    free: int = 0


def _vertical(region: GpuRegion, ops: Ops) -> list[Arranged]:
    cost, machine = region.cost, region.machine
    packed = packed_bytes(cost, ops)
    choices = [_Choice(0, 1, True, packed)]
    loops = loops_of(cost, ops)
    if packed and not loops:
        ring = _RING_CHUNKS * _CHUNK_BYTES
        choices += [_Choice(0, cluster, False, ring) for cluster in (1, _PAIR) if cluster <= machine.max_cluster]
    found: list[Arranged] = []
    least: int | None = None
    for lanes, registers in enumerate(machine.lane_registers, 1):
        found_storage = [steps.storage(registers, lanes) for steps in _steps(region, ops)]
        if any(s is None for s in found_storage):
            continue
        storage = max((s for s in found_storage if s is not None), key=lambda s: s.image_bytes)
        for choice in choices:
            need = shared_bytes(cost, ops, storage, lanes, choice.weights, 0)
            least = need if least is None else min(least, need)
            if need <= machine.local_bytes:
                found.append(
                    _arranged(region, ops, dataclasses.replace(choice, lanes=lanes, free=machine.local_bytes - need), storage)
                )
    if found:
        return found
    if least is None:
        raise Infeasible(f"the sums over the stream do not fit the {max(machine.lane_registers)} registers of a thread")
    raise Infeasible(
        f"a tile of 64 rows with its weights needs {size_text(least)} of shared memory; a CTA has {size_text(machine.local_bytes)}"
    )


def _arranged(region: GpuRegion, ops: Ops, choice: _Choice, storage: Storage) -> Arranged:
    cost, machine = region.cost, region.machine
    work = tile_work(cost, ops, storage, matmul_efficiency(machine, "vertical", choice.resident))
    replicas = max(1, min(machine.clusters(choice.cluster), -(-region.tiles // choice.cluster)))
    ctas = replicas * choice.cluster
    tiles = -(-region.tiles // ctas)
    rounds = -(-tiles // choice.lanes)
    independent = choice.lanes if choice.resident or _can_drift(cost, ops, choice) else 1
    packed = packed_bytes(cost, ops)
    # Resident weights are there before the first tile; streamed ones pass once per round of lanes, and a pair shares each fetch.
    fetched = ctas * packed * (1.0 if choice.resident else rounds / choice.cluster)
    name = stage_name(cost, 0, ops)
    stage = Stage(
        name,
        ops,
        resource_of(cost, ops),
        choice.cluster,
        work.period(independent, machine.tile_seconds),
        resident=choice.resident,
    )
    return Arranged(
        "vertical",
        (stage,),
        (),
        replicas,
        choice.cluster,
        choice.lanes,
        busy=work.busy(tiles, independent, machine.tile_seconds) + (fetched / machine.shared_bandwidth if choice.resident else 0.0),
        l2_bytes=fetched,
        bound=name,
    )


def _steps(region: GpuRegion, ops: Ops) -> list[Steps]:
    """What a tile keeps between its products, of the bodies of loops where there are any; carries are counted by the code."""
    loops = loops_of(region.cost, ops)
    return [Steps(body, body.region.ops) for _, body in loops] or [region.steps(ops)]


def _can_drift(cost: GpuCost, ops: Ops, choice: _Choice) -> bool:
    """Whether one lane can be in an epilogue while another multiplies, although both take their weights from one ring.

    A chunk is free when every lane has used it. The lanes are a block of columns apart, so the ring holds the chunks of two.
    """
    depth = max(tiles.WeightShape((dot.k,), dot.n, dot.dtype).k_chunks for dot in dots_of(cost, ops))
    return (choice.weights + choice.free) // _CHUNK_BYTES >= 2 * depth


def _check_ops(cost: GpuCost) -> None:
    """Raise ``Infeasible`` for what no GPU kernel is generated for."""
    rows, most = cost.region.space.rows, tiles.TILE_ROWS * _MOST_TILES
    if rows > most:
        raise Infeasible(f"the stream has {rows} rows; the CUDA target counts {most} at most")
    touched = {v for i in cost.region.ops for v in (*cost.graph.ops[i].inputs, *cost.graph.ops[i].outputs)}
    for _, body in loops_of(cost, cost.region.ops):
        _check_ops(body)
    widest = max((cost.row_size(v) for v in touched if cost.streamed(v) and v not in cost.sliced()), default=0)
    if widest > tiles.MOST_COLUMNS:
        raise Infeasible(f"a row has {widest} columns; the CUDA target has code for {tiles.MOST_COLUMNS} at most")
    for i in cost.region.ops:
        dot, op, access = cost.work(i).dot, cost.graph.ops[i], cost.access(i)
        if op.kind in ONLINE and (access is None or not access.near):
            raise Infeasible(f"{op.label} of a softmax by indices in another order than that of the stream has no code on the GPU")
        if access is not None and access.folds and not access.near and i not in cost.unordered:
            own = tiles.table_bytes(op["n"], tiles.padded(cost.elements(i)))
            if own > tiles.MOST_TABLE_BYTES:
                raise Infeasible(
                    f"{op.kind} by indices in another order than that of the stream, into {op['n']} rows: a lane's own table would "
                    f"take {size_text(own)} of shared memory; the CUDA target has {size_text(tiles.MOST_TABLE_BYTES)} for it"
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
            raise Infeasible("the CUDA target multiplies float32 as tf32; the function asks for precision HIGHEST")

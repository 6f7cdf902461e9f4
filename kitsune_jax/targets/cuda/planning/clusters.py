"""Loops whose weights no CTA holds alone: the columns of all weights shared out over the CTAs of a cluster.

Comes in: a ``GpuRegion`` with loops. Goes out: one ``Arranged`` for each size of a cluster and number of lanes that fits. All CTAs
of a cluster take the same tiles through the same steps. Each holds its columns of every weight still, makes its columns of all that
a step makes, and hands those that the next product contracts to the others through their shared memory (``exchanges.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

from kitsune_jax.ops.loops import parts
from kitsune_jax.planning.machine import size_text
from kitsune_jax.planning.plan import Infeasible, Stage
from kitsune_jax.planning.stages import Ops, resource_of, stage_name
from kitsune_jax.targets.cuda.planning.cost import GpuCost
from kitsune_jax.targets.cuda.planning.region import Arranged, GpuRegion
from kitsune_jax.targets.cuda.planning.sizes import entry_bytes, loops_of, packed_bytes
from kitsune_jax.targets.cuda.planning.storage import Steps, shared_bytes
from kitsune_jax.targets.cuda.planning.times import TileWork, matmul_efficiency, tile_work
from kitsune_jax.targets.cuda.tiles import BLOCK_COLUMNS, EXCHANGE_DEPTH, TILE_ROWS

_SIZES = (2, 4, 8, 16)


def over_clusters(region: GpuRegion, ops: Ops) -> list[Arranged]:
    """Raises ``Infeasible`` with the reason where no cluster holds the weights."""
    cost, machine = region.cost, region.machine
    if cost.sinks:
        raise Infeasible("sums over the steps of a loop leave no room to share its weights out over a cluster")
    if machine.max_cluster == 1:
        raise Infeasible("this device has no clusters")
    if not packed_bytes(cost, ops):
        raise Infeasible("it multiplies with no weights")
    found, least = list[Arranged](), None
    for size in _SIZES:
        if size > machine.max_cluster or not _has_slabs(cost, ops, size):
            continue
        weights = packed_bytes(cost, ops, size)
        rings = sum(
            (EXCHANGE_DEPTH if v in body.region.inputs else 1) * entry_bytes(body, v)
            for _, body, values, _ in _exchanged(cost, ops)
            for v in values
        )
        busy = -(-region.tiles // machine.clusters(size))  # lanes beyond these would have no tile
        for lanes, registers in enumerate(machine.lane_registers[: max(1, busy)], 1):
            placed = [Steps(body, body.region.ops, size).storage(registers, lanes) for _, body in loops_of(cost, ops)]
            storages = [s for s in placed if s is not None]
            if len(storages) < len(placed):
                continue
            storage = max(storages, key=lambda s: s.image_bytes)
            need = shared_bytes(cost, ops, storage, lanes, weights, rings)
            least = need if least is None else min(least, need)
            if need <= machine.local_bytes:
                work = tile_work(cost, ops, storage, matmul_efficiency(machine, "spatial", True), size)
                for steps, body, values, come_in in _exchanged(cost, ops):
                    work = work.plus(steps, _exchanges(body, values, come_in, size))
                found.append(_arranged(region, ops, work, size, lanes))
    if not found and least is not None:
        raise Infeasible(
            f"weights shared out over the CTAs of a cluster need {size_text(least)} of shared memory in each; "
            f"a CTA has {size_text(machine.local_bytes)}"
        )
    if not found:
        raise Infeasible("its columns are not shared out over the CTAs of a cluster in whole blocks of 32")
    return found


def _has_slabs(cost: GpuCost, ops: Ops, size: int) -> bool:
    """Does every CTA have whole blocks of the columns of each product? The code generator knows about the parts of a product."""
    dots = [body.work(i).dot for _, body in loops_of(cost, ops) for i in body.region.ops if i not in body.sinks]
    return all(dot is None or dot.n % (size * BLOCK_COLUMNS) == 0 for dot in dots)


def _exchanged(cost: GpuCost, ops: Ops) -> Iterator[tuple[int, GpuCost, list[int], frozenset[int]]]:
    """(steps, costs of the body, operands of products that a step makes or carries, what comes in from arrays) of each loop."""
    for i in ops:
        if cost.graph.ops[i].body is not None:
            body, come_in = cost.body(i), frozenset(parts(cost.graph.ops[i]).in_xs)
            operands = [v for k in body.region.ops if body.work(k).dot is not None for v in body.graph.ops[k].inputs]
            values = [v for v in dict.fromkeys(operands) if body.streamed(v) and _source(body, v) not in come_in]
            yield cost.graph.ops[i]["length"], body, values, come_in


def _source(body: GpuCost, v: int) -> int:
    """The value of which ``v`` is another name."""
    while v in body.producer and body.family(body.producer[v]) == "reshape":
        v = body.graph.ops[body.producer[v]].inputs[0]
    return v


def _exchanges(body: GpuCost, values: list[int], come_in: frozenset[int], size: int) -> TileWork:
    """Of a tile in a step: what a CTA gets of the others, and barriers' round trips. What a step finds carried is on its way while
    the lane multiplies with what has come in; else it has nothing to do meanwhile."""
    machine = body.machine
    bandwidth = machine.rate(machine.cluster_bandwidth, str(size)) / machine.workers
    moved = {v: entry_bytes(body, v) * (size - 1) / size / bandwidth for v in values}
    carried = [v for v in values if v in body.region.inputs]
    alone = sum(moved[v] + machine.tile_seconds for v in values if v not in carried)
    if carried:
        alone += max(0.0, sum(moved[v] for v in carried) + machine.tile_seconds - _meanwhile(body, come_in, size))
    return TileWork(0.0, 0.0, sum(moved.values()), alone)


def _meanwhile(body: GpuCost, come_in: frozenset[int], size: int) -> float:
    """Seconds of a tile's products with what has come in."""
    machine, seconds = body.machine, 0.0
    for i in body.region.ops:
        dot = body.work(i).dot
        if dot is not None and not dot.per_row and _source(body, body.graph.ops[i].inputs[0]) in come_in:
            seconds += 2.0 * TILE_ROWS * dot.k * dot.n / size / machine.rate(machine.tensor_rates, dot.dtype)
    return seconds / matmul_efficiency(machine, "spatial", True)


def _arranged(region: GpuRegion, ops: Ops, work: TileWork, size: int, lanes: int) -> Arranged:
    cost, machine = region.cost, region.machine
    replicas = max(1, min(machine.clusters(size), region.tiles))
    fetched = replicas * size * packed_bytes(cost, ops, size)
    name = stage_name(cost, 0, ops)
    stage = Stage(name, ops, resource_of(cost, ops), size, work.period(lanes, machine.tile_seconds), split=size)
    return Arranged(
        "spatial",
        (stage,),
        (),
        replicas,
        size,
        lanes,
        busy=work.busy(-(-region.tiles // replicas), lanes, machine.tile_seconds) + fetched / machine.shared_bandwidth,
        l2_bytes=float(fetched),
        bound=name,
    )

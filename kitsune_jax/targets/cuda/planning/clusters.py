"""Loops whose weights no CTA holds alone: the columns of all weights shared out over the CTAs of a cluster.

Comes in: a ``GpuRegion`` with loops. Goes out: one ``Arranged`` for each size of a cluster and number of lanes that fits. All CTAs
of a cluster take the same tiles through the same steps. Each holds its columns of every weight still, makes its columns of all that
a step makes, and hands those that the next product contracts to the others through their shared memory (``exchanges.py``); or the
sums of a product that contracts more than it makes (``slabs.py``), as that of a gradient through time does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from kitsune_jax.ops.loops import parts
from kitsune_jax.planning.cost import DotWork, itemsize
from kitsune_jax.planning.machine import size_text
from kitsune_jax.planning.plan import Infeasible, Stage
from kitsune_jax.planning.stages import Ops, resource_of, stage_name
from kitsune_jax.targets.cuda.planning.cost import GpuCost
from kitsune_jax.targets.cuda.planning.region import Arranged, GpuRegion
from kitsune_jax.targets.cuda.planning.sizes import entry_bytes, loops_of, packed_bytes
from kitsune_jax.targets.cuda.planning.storage import Steps, shared_bytes
from kitsune_jax.targets.cuda.planning.times import TileWork, matmul_efficiency, tile_work
from kitsune_jax.targets.cuda.tiles import BLOCK_COLUMNS, EXCHANGE_DEPTH, SUM_BYTES, TILE_ROWS, padded

_SIZES = (2, 4, 8, 16)
# Instructions for a sum that CTAs hand each other: a fourth of a store to another CTA, with its address, and the addition there.
_SUM_SLOTS = 2.0


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
        rings = sum(x.ring_bytes for x in _exchanged(cost, ops))
        busy = -(-region.tiles // machine.clusters(size))  # lanes beyond these would have no tile
        for lanes, registers in enumerate(machine.lane_registers[: max(1, busy)], 1):
            placed = [Steps(body, body.region.ops, size, True).storage(registers, lanes) for _, body in loops_of(cost, ops)]
            storages = [s for s in placed if s is not None]
            if len(storages) < len(placed):
                continue
            storage = max(storages, key=lambda s: s.image_bytes)
            need = shared_bytes(cost, ops, storage, lanes, weights, rings)
            least = need if least is None else min(least, need)
            if need <= machine.local_bytes:
                work = tile_work(cost, ops, storage, matmul_efficiency(machine, "spatial", True), size)
                for exchanged in _exchanged(cost, ops):
                    work = work.plus(exchanged.steps, exchanged.work(size))
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Exchanged:
    """What the CTAs of a cluster hand each other in each of ``steps``: ``values``, operands of products that a step makes or
    carries, and the sums of partial ``products``, operand by operand. ``come_in``: from arrays."""

    steps: int
    body: GpuCost
    values: tuple[int, ...]
    products: tuple[tuple[DotWork, ...], ...]
    come_in: frozenset[int]

    @property
    def ring_bytes(self) -> int:
        """Of shared memory, for each lane."""
        entries = sum((EXCHANGE_DEPTH if v in self.body.region.inputs else 1) * entry_bytes(self.body, v) for v in self.values)
        return entries + sum(_sum_bytes(dot) for group in self.products for dot in group)

    def work(self, size: int) -> TileWork:
        """Of a tile in a step: what a CTA gets of the others, and barriers' round trips. What a step finds carried is on its way
        while the lane multiplies with what has come in; else it has nothing to do meanwhile."""
        body, machine = self.body, self.body.machine
        bandwidth = machine.rate(machine.cluster_bandwidth, str(size)) / machine.workers * size / (size - 1)
        moved = {v: entry_bytes(body, v) / bandwidth for v in self.values}
        carried = [v for v in self.values if v in body.region.inputs]
        alone = sum(moved[v] + machine.tile_seconds for v in self.values if v not in carried)
        if carried:
            alone += max(0.0, sum(moved[v] for v in carried) + machine.tile_seconds - _meanwhile(body, self.come_in, size))
        for group in self.products:  # the sums of one are on their way while the next ones multiply
            later = sum(_tensor_seconds(body, dot, size) for dot in group[1:])
            alone += max(sum(map(_sum_bytes, group)) / bandwidth - later, _sum_bytes(group[-1]) / bandwidth) + machine.tile_seconds
        sums = sum(_sum_bytes(dot) for group in self.products for dot in group)
        issue = _SUM_SLOTS * sums / SUM_BYTES / machine.rate(machine.simt_rates, "other")
        return TileWork(0.0, issue, 0.0, alone, sum(moved.values()) + sums / bandwidth)


def _sum_bytes(dot: DotWork) -> int:
    """Of a tile of sums."""
    return TILE_ROWS * padded(dot.n) * SUM_BYTES


def _exchanged(cost: GpuCost, ops: Ops) -> Iterator[_Exchanged]:
    """Of each loop."""
    for i in ops:
        if cost.graph.ops[i].body is None:
            continue
        body, come_in = cost.body(i), frozenset(parts(cost.graph.ops[i]).in_xs)
        values, products = dict[int, None](), dict[int, list[DotWork]]()
        for k in body.region.ops:
            if (dot := body.work(k).dot) is None:
                continue
            for v in body.graph.ops[k].inputs:
                pieces = _pieces(body, v) if body.streamed(v) else []
                made = [p for p in pieces if p not in come_in]
                if made == pieces != [] and _is_partial(body, v, dot, len(pieces)):
                    products.setdefault(v, []).append(dot)
                else:
                    values.update(dict.fromkeys(made))
        yield _Exchanged(cost.graph.ops[i]["length"], body, tuple(values), tuple(map(tuple, products.values())), come_in)


def _is_partial(body: GpuCost, v: int, dot: DotWork, pieces: int) -> bool:
    """As the code generator decides it (``slabs.py``), as far as the graph says: a concatenation that only products read is
    multiplied piece by piece."""
    whole = pieces > 1 and (v in body.outputs or any(body.work(i).dot is None for i in body.readers.get(v, ())))
    return whole or dot.k * itemsize(dot.dtype) > SUM_BYTES * dot.n


def _pieces(body: GpuCost, v: int) -> list[int]:
    """The values of which ``v`` is put together, or another name."""
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
    """The value of which ``v`` is another name."""
    while v in body.producer and body.family(body.producer[v]) == "reshape":
        v = body.graph.ops[body.producer[v]].inputs[0]
    return v


def _meanwhile(body: GpuCost, come_in: frozenset[int], size: int) -> float:
    """Seconds of a tile's products with what has come in."""
    seconds = 0.0
    for i in body.region.ops:
        dot = body.work(i).dot
        if dot is not None and not dot.per_row and _source(body, body.graph.ops[i].inputs[0]) in come_in:
            seconds += _tensor_seconds(body, dot, size)
    return seconds


def _tensor_seconds(body: GpuCost, dot: DotWork, size: int) -> float:
    """Of a CTA's part of a product on a tile."""
    machine = body.machine
    flops = 2.0 * TILE_ROWS * dot.k * dot.n / size
    return flops / machine.rate(machine.tensor_rates, dot.dtype) / matmul_efficiency(machine, "spatial", True)


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

"""The plan of a region on a CPU: every worker takes a tile through all ops, so no worker hands anything to another.

Comes in: a Graph, a Region and the machine model of a CPU. Goes out: its ``Plan``. Cores are alike, so a spatial pipeline would do
the same work and pay for its queues besides: of 5000 plans for 2 to 192 cores the model liked 24 spatial ones better, all of them
for regions that neither arrangement made faster than XLA. Where rows are folded into tables by indices, the rows stream as they lie
in memory, and every worker folds into tables of its own; or they stream in the order of the indices of one such op, whose results
are then reductions of runs. The model decides. Invariants: a plan fits the machine, or ``Infeasible`` says why there is none; and
the same arguments give the same plan in every process.
"""

from __future__ import annotations

from kitsune_jax.graph import Graph
from kitsune_jax.ops.online import ONLINE
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import FREE, SCATTER, pipeline_traffic
from kitsune_jax.planning.orders import orders_of
from kitsune_jax.planning.plan import Infeasible, Plan, Stage
from kitsune_jax.planning.stages import resource_of, stage_name
from kitsune_jax.streams.space import Region
from kitsune_jax.targets.cpu.planning.blocks import in_blocks
from kitsune_jax.targets.cpu.planning.cost import CpuCost
from kitsune_jax.targets.cpu.planning.machines import CpuMachine, least_times_of_xla
from kitsune_jax.targets.cpu.planning.segments import folded_seconds, order_seconds, segments_seconds
from kitsune_jax.targets.cpu.planning.tile_size import TileModel, tile_rows, woken_seconds
from kitsune_jax.targets.cpu.planning.times import SHARED_SECONDS
from kitsune_jax.targets.cpu.planning.xla_fused import FAMILIES
from kitsune_jax.targets.cpu.planning.xla_program import LONG_SECONDS
from kitsune_jax.targets.cpu.planning.xla_times import baseline, fault_seconds

_ELEMENTWISE = FREE.union(FAMILIES)
# Tiles of few rows read all weights again and again, at less than the rate that was measured for them where these are many: an
# attention over 8 heads of 1024 and 2048 keys took 1.22 and 1.29 times as long as modelled in tiles of 8 and 7 rows (Zen 5), and as
# long as modelled in blocks. Asked only where a region can be worked off in blocks instead, and multiplies.
_FEW_ROWS, _SHORT_TILES = 16, 1.25
# Without products tall tiles have no merit, and blocks compute exponentials again: a softmax of 8 009 rows of 1536 numbers took
# 1.23 times as long as whole, a log softmax of rows of 512 took 1.08 times as long in float32, 1.24 in bfloat16 (Xeon with AMX).
_BLOCKS_ALONE = 1.25


def plan(graph: Graph, region: Region, machine: CpuMachine) -> Plan:
    """The plan for ``region`` on ``machine``. Raises ``Infeasible`` (a ``ValueError``) with the reason."""
    if region.space.rows < 1:
        raise Infeasible("the stream has no rows")
    orders = [order for order in (None, *orders_of(graph, region)) if not _out_of_order(graph, region, order)]
    if not orders:
        raise Infeasible("it has the softmaxes of several indices, and its rows can stream in the order of one")
    plans: list[Plan] = []
    wrong: Infeasible | None = None
    for order in orders:
        try:
            plans.append(_in_order(graph, region, machine, order))
        except Infeasible as error:
            wrong = error
    plans += in_blocks(graph, region, machine, _arranged)
    if not plans:
        raise wrong or Infeasible("there is no plan")
    multiplies = any(OPS[graph.ops[i].kind].family == "dot" for i in region.ops)

    def seconds(p: Plan) -> float:
        if p.blocks is not None:
            return p.seconds * (1.0 if multiplies else _BLOCKS_ALONE)
        return p.seconds * (_SHORT_TILES if multiplies and p.tile_rows < _FEW_ROWS else 1.0)

    return min(plans, key=seconds)


def _out_of_order(graph: Graph, region: Region, order: int | None) -> bool:
    """Are there online sums whose rows would not come in the order of their indices? No code keeps the state of all of them."""
    online = [graph.ops[i] for i in region.sinks if graph.ops[i].kind in ONLINE]
    return any(op.inputs[1] != order and not (order is None and op["sorted"]) for op in online)


def _in_order(graph: Graph, region: Region, machine: CpuMachine, order: int | None) -> Plan:
    cost = CpuCost(graph, region, machine, order)
    return _arranged(cost, TileModel(cost))


def _arranged(cost: CpuCost, model: TileModel) -> Plan:
    """``cost``: of whole values; ``model``: of a tile."""
    region, machine, order = cost.region, cost.machine, cost.order
    rows = tile_rows(model)
    tiles = region.space.tiles(rows)
    replicas = max(1, min(machine.workers, tiles))
    tile = model.seconds(rows)
    traffic = pipeline_traffic(cost)
    busy = -(-tiles // replicas) * tile
    moving = _moving_seconds(machine, traffic + partial_bytes(cost, replicas))
    # Rows that are only folded come from memory meanwhile: of both times the longer one counts. 10^6 x 64 numbers took 11.9 ms by
    # sorted index, and were modelled at 18.6 as the sum of both (Xeon with AMX).
    moving -= min(moving, folded_seconds(cost) / machine.workers)
    base_seconds, base_bytes = _least_baseline(cost, machine)
    seconds = _call_seconds(cost, replicas, busy, moving, rows, model.packs) + _copied_seconds(cost)
    ops = tuple(sorted(region.ops))
    name = stage_name(cost, 0, ops)
    return Plan(
        machine=machine.name,
        arrangement="vertical",
        tile_rows=rows,
        tiles=tiles,
        stages=(Stage(name, ops, resource_of(cost, ops), 1, tile),),
        queues=(),
        replicas=replicas,
        seconds=seconds,
        baseline_seconds=base_seconds + (_handed_seconds(cost, machine) if seconds < LONG_SECONDS else 0.0),
        bytes_moved=traffic,
        baseline_bytes=base_bytes,
        bound="dram" if moving > busy else name,
        products=cost.products,
        order=order,
        elementwise=(alone := {cost.family(i) for i in ops}) <= _ELEMENTWISE,
        folds=SCATTER in alone <= {*_ELEMENTWISE, SCATTER},
    )


def _least_baseline(cost: CpuCost, machine: CpuMachine) -> tuple[float, int]:
    """``baseline``, with XLA's doubtful numbers as low as their spreads say where XLA takes less time by these: no pipeline is
    chosen by a number that was another one at every measurement. The mean of squares of 4 MB was modelled at 862 us by such a
    number, and took 210 (Zen 4)."""
    least = least_times_of_xla(machine)
    seconds, moved = baseline(cost)
    if least is machine:
        return seconds, moved
    return min(seconds, baseline(CpuCost(cost.graph, cost.region, least, cost.order))[0]), moved


def _handed_seconds(cost: CpuCost, machine: CpuMachine) -> float:
    """What is saved where the caller's thread does all that a program has to do. Half of it: what a pipeline is made of may be a
    part of a larger program, which is handed to another thread all the same."""
    known = machine.handed
    return (
        0.5 * least_times_of_xla(machine).profile.seconds("xla/call/handed")
        if known.is_of(cost.graph) and known.without(cost.region.ops)
        else 0.0
    )


def _copied_seconds(cost: CpuCost) -> float:
    """In a step of a loop that XLA runs: what it takes to copy the next value of a carry that the call reads to the carry's place,
    where XLA's own kernels write it. 4 MB of sums of weight gradients, one for each trajectory of a neural ODE, took 0.76 ms a step
    instead of 0.20 (CPU time, Xeon with AMX)."""
    steps = cost.machine.steps
    if steps is None:
        return 0.0
    values, read = cost.graph.values, set(cost.region.inputs).intersection(cost.graph.inputs)
    carries = {(values[v].shape, values[v].dtype) for v in read}
    copied = [v for v in cost.outputs if v in cost.graph.outputs and (values[v].shape, values[v].dtype) in carries]
    return sum(steps.kernel + cost.bytes(v) * cost.times["xla/while/stored"] for v in copied)


def _moving_seconds(machine: CpuMachine, moved: float) -> float:
    """Seconds that all workers together take to read and write what crosses the region's border."""
    beyond = max(0.0, moved - machine.shared_bytes)  # what the last level does not hold
    return (moved - beyond) / max(machine.shared_bandwidth, machine.dram_bandwidth) + beyond / machine.dram_bandwidth


def _call_seconds(cost: CpuCost, replicas: int, busy: float, moving: float, rows: int, packs: bool) -> float:
    """Seconds of a call whose workers are ``busy`` with tiles for so long: the core that computes also moves."""
    workers, tiles = cost.machine.workers, cost.region.space.tiles(rows)
    fresh = fault_seconds(cost, cost.outputs, cost.machine.huge_fault_bandwidth)
    strided = (cost.strided_seconds(rows) + order_seconds(cost) + segments_seconds(cost, tiles)) / workers
    packing, alone = _pack_seconds(cost, tiles) if not packs else 0.0, cost.times["call/short"]
    if packing + (busy * replicas if replicas > 1 else 0.0) < SHARED_SECONDS:  # the caller does it alone
        return alone + packing + fresh + strided + busy * replicas + moving
    call = cost.machine.call_seconds + woken_seconds(cost, packing > SHARED_SECONDS) if replicas > 1 else alone
    return call + packing / workers + fresh + strided + (busy + moving)


def _pack_seconds(cost: CpuCost, tiles: int) -> float:
    """Worker-seconds in which weights are read and written on their way into the micro-kernels' layout: once per call, or for each
    of ``tiles`` tiles those that depend on the batch."""
    ops = cost.region.ops
    seconds = sum(body.pack_seconds(constants) for _, constants, body in cost.loops())  # in front of the first step
    # A bias or a gain is laid out before the first tile as well: about half of what a small weight takes.
    seconds += 0.5 * cost.times["call/layer"] * len(cost.stationary_inputs(ops))
    # The accumulators of a sink are set to zero, added up and stored.
    return seconds + cost.times["call/layer"] * sum(i in cost.sinks for i in ops) + cost.pack_seconds(tiles=tiles)


def partial_bytes(cost: CpuCost, replicas: int) -> int:
    """Sinks are folded in a fixed order, so every worker keeps a partial result, which is written and read once more."""
    return replicas * cost.sink_bytes(cost.region.ops) * 2

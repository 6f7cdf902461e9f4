"""Plans whose tiles keep within a batch, and plans that work off a long dimension of the rows in blocks: attention.

Comes in: a Graph, a Region and a machine. Goes out: a plan for each extent of a block and number of lanes, fastest first by the
model. What changes with the batch or the block, the keys and values of a head, passes through the ring of streamed weights, from
which all lanes of a CTA multiply. The lanes work on neighbouring tiles of a batch, and look at the blocks that one of them sees.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from kitsune_jax.graph import Graph
from kitsune_jax.planning.inner import Inner, inner_of
from kitsune_jax.planning.plan import Infeasible, Plan, Stage
from kitsune_jax.planning.stages import resource_of, stage_name
from kitsune_jax.program.blocks import NotBlocked
from kitsune_jax.program.build import build
from kitsune_jax.program.ir import Instr, TileProgram, walk
from kitsune_jax.program.within import met, tile_starts
from kitsune_jax.streams.space import Region
from kitsune_jax.targets.cuda import stage_facts
from kitsune_jax.targets.cuda.planning.cost import GpuCost
from kitsune_jax.targets.cuda.planning.machines import GpuMachine
from kitsune_jax.targets.cuda.planning.program_work import ProgramWork
from kitsune_jax.targets.cuda.planning.region import Arranged, GpuRegion
from kitsune_jax.targets.cuda.planning.times import matmul_efficiency
from kitsune_jax.targets.cuda.tiles import TILE_ROWS

_BLOCKS = (128, 64, 32)
_WIDEST = 512  # columns of a row that is not worked off in blocks: they would lie in shared memory
# Times that count as equal where several products are added up in the loop: their accumulators take most of the registers.
_AS_GOOD = 1.04
_SAMPLE = 16  # rounds that are looked at


def in_batches(graph: Graph, region: Region, machine: GpuMachine, layers: bool = False) -> list[Plan]:
    """Plans of a stream with batch axes, or with a dimension that is folded in blocks; none of another one. ``layers``: also where
    only products fold it, as those of a layer fold its width: its weights need not pass by where it has a plan otherwise. Raises
    ``Infeasible``."""
    cost = GpuCost(graph, region, machine)
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
    plans, reasons = list[Plan](), dict[str, None]()
    for blocks in tried:
        try:
            plans += _planned(cost, _cut(graph, inner, blocks), blocks)
        except (NotBlocked, Infeasible) as no:
            reasons[str(no)] = None
    if not plans and region.space.batch:
        raise Infeasible("; ".join(reasons))
    # Of plans that are as good a smaller block leaves the compiler more registers.
    several = inner is not None and sum(cost.family(i) == "dot" for i in inner.folds) > 1
    best = min((p.seconds for p in plans), default=0.0) * (_AS_GOOD if several else 1.0)
    return sorted(plans, key=lambda p: (max(p.seconds, best), -p.lanes, p.blocks[2] if p.blocks else 0))


def _cut(graph: Graph, inner: Inner | None, blocks: tuple[int, int, int] | None) -> Graph:
    """``graph`` with a block of the inner dimension where all of it was."""
    if inner is None or blocks is None:
        return graph
    values = list(graph.values)
    for v, d in inner.dims.items():
        shape = values[v].shape
        values[v] = dataclasses.replace(values[v], shape=(*shape[:d], blocks[2], *shape[d + 1 :]))
    return dataclasses.replace(graph, values=tuple(values))


def _planned(cost: GpuCost, cut: Graph, blocks: tuple[int, int, int] | None) -> list[Plan]:
    region, machine = cost.region, cost.machine
    of_block = GpuCost(cut, region, machine)
    widest = max((of_block.row_size(v) for v in of_block.labels), default=0)
    if widest > _WIDEST:
        raise Infeasible(f"a row has {widest} columns beside a block; a lane has room for {_WIDEST}")
    ops = tuple(sorted(region.ops))
    name = stage_name(cost, 0, ops)
    stage = Stage(name, ops, resource_of(cost, ops), 1, 0.0, resident=False)
    sketch = Plan(machine.name, "vertical", TILE_ROWS, 1, (stage,), (), 1, 0.0, 0.0, 0, 0, "", blocks=blocks)
    program = build(cost.graph, region, sketch)
    gpu = GpuRegion(cost)
    return [_arranged(gpu, program, stage, blocks, lanes) for lanes in range(1, len(machine.lane_registers) + 1)]


def _arranged(gpu: GpuRegion, program: TileProgram, stage: Stage, blocks: tuple[int, int, int] | None, lanes: int) -> Plan:
    """The plan of CTAs with so many lanes: in a round they take ``lanes`` tiles of one batch."""
    machine, body = gpu.machine, program.stages[0].body
    coarse = stage_facts.coarse(program, body)
    work = ProgramWork(program, machine, matmul_efficiency(machine, "vertical", False), coarse)
    wide = dataclasses.replace(program, tile_rows=lanes * TILE_ROWS)
    looked_at, rounds, seconds, fetched = _looked_at(wide), wide.tiles, list[float](), 0.0
    for round_rows in looked_at:
        rows = np.asarray(round_rows)

        def times(loop: Instr, rows: np.ndarray = rows) -> float:
            return float(len(met(wide, loop, rows)))

        tile = work.of(body, times)
        seconds.append(lanes * tile.period(lanes, machine.tile_seconds))
        fetched += work.weight_bytes(body, times) / len(looked_at)
    ctas = max(1, min(machine.workers, rounds))
    mean, longest = sum(seconds) / len(seconds), max(seconds)
    # Where rounds differ, those with most work go first, so that all CTAs have about as much in the end.
    busy = max(longest, mean * rounds / ctas) if longest > min(seconds) else longest * -(-rounds // ctas)
    stage = dataclasses.replace(stage, tile_seconds=mean / lanes)
    plan = gpu.plan(Arranged("vertical", (stage,), (), ctas, 1, lanes, busy, rounds * fetched, stage.name))
    return dataclasses.replace(plan, tiles=_tiles(program, lanes), blocks=blocks)


def _looked_at(program: TileProgram) -> list[range]:
    """The rows of rounds that stand for all of them, where loops are bounded by the index on an axis; the last round of a batch,
    which has most work under a causal mask, is among them."""
    batch, rows = program.batch_axes, math.prod(program.axes[program.batch_axes :])
    axis = min((i["within"][0] for i in walk(program.stages[0].body) if i.get("within") is not None), default=batch)
    last = (program.tiles // program.batches - 1) * program.tile_rows
    starts = sorted({*map(int, tile_starts(program, axis, _SAMPLE)), last})
    return [range(start, min(start + program.tile_rows, (start // rows + 1) * rows)) for start in starts]


def _tiles(program: TileProgram, lanes: int) -> int:
    """Those that a batch has more so that all lanes have one count as well."""
    batches = max(1, program.batches)
    return batches * -(-(program.tiles // batches) // lanes) * lanes

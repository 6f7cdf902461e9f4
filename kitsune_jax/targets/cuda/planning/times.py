"""How long a tile takes on a GPU: tensor cores, issue slots, shared memory, and what passes between SMs.

Comes in: a ``GpuCost``, the ops of a stage and their ``Storage``. Goes out: ``TileWork``, seconds of one tile of 64 rows on the
separate engines of an SM, and ``period``, how often an SM with some lanes finishes one. Invariant: engines overlap only across
lanes; one lane does its matmuls and its epilogues one after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import itemsize, round_up
from kitsune_jax.targets.cuda.planning.cost import FOLD_SLOTS, SCALING_SLOTS, GpuCost
from kitsune_jax.targets.cuda.planning.machines import GpuMachine
from kitsune_jax.targets.cuda.planning.products import product_work, row_products_of
from kitsune_jax.targets.cuda.planning.sizes import dots_of, gradients_of, loops_of, slab
from kitsune_jax.targets.cuda.planning.storage import Storage
from kitsune_jax.targets.cuda.tiles import TILE_ROWS, padded

# 16 special function results a cycle and SM against 128 instructions (CUDA C++ programming guide, throughput of instructions, 9.0).
SPECIAL_SLOTS = 8
# Two values are converted and packed by one instruction (cvt.rn.bf16x2.f32).
CONVERT_SLOTS = 0.5
# A row lies in four threads: two shuffles and two adds, of each of the 128 threads, for 64 rows.
ROW_SLOTS = 8
_ADDRESS_SLOTS = 16  # of two rows of a table: indices compared with its ends and multiplied by its pitch
# Float32 gradients and products for each row go through mma.sync. An assumption until a device has measured it: this part of
# wgmma's rate.
_WARP_MATMUL = 0.62
# Threads that share a row, and so have the same numbers of it.
QUAD = 4
# Cycles from an operation to the next one that needs it, over those between two warps' turns at a scheduler (four cycles, two rows
# of a thread side by side). An assumption until a device has measured it.
DEPENDENT = 2.0
# K of one wgmma (PTX ISA): 32 bytes of it.
K_BYTES = 32


@dataclasses.dataclass(frozen=True, slots=True)
class TileWork:
    """Seconds of one tile, were the engine alone: tensor cores, instruction issue, shared memory. ``alone``: that a lane waits for
    itself beside, while engines are free for other lanes; ``between``: that what passes between SMs takes, as far as a lane waits
    for it counted in ``alone``."""

    tensor: float
    issue: float
    shared: float
    alone: float = 0.0
    between: float = 0.0

    def period(self, lanes: int, wait: float = 0.0) -> float:
        """Seconds between two tiles of an SM with ``lanes`` busy lanes, each of which also waits ``wait`` per tile.

        No engine is faster than its own work, and no lane than the sum of its own.
        """
        return max(self.tensor, self.issue, self.shared, self.between, self.latency(wait) / lanes)

    def latency(self, wait: float = 0.0) -> float:
        """Seconds from a tile's first instruction to its last."""
        return max(self.tensor + self.issue, self.shared) + self.alone + wait

    def plus(self, times: float, step: TileWork) -> TileWork:
        """This work, and so often ``step``."""
        tensor, issue = self.tensor + times * step.tensor, self.issue + times * step.issue
        alone, between = self.alone + times * step.alone, self.between + times * step.between
        return TileWork(tensor, issue, self.shared + times * step.shared, alone, between)

    def busy(self, tiles: int, lanes: int, wait: float = 0.0) -> float:
        """Seconds of an SM for ``tiles`` tiles: full rounds, and one with the lanes that are left."""
        rounds, rest = divmod(tiles, lanes)
        return rounds * lanes * self.period(lanes, wait) + (rest * self.period(rest, wait) if rest else 0.0)


def tile_work(cost: GpuCost, ops: Sequence[int], storage: Storage, efficiency: float, split: int = 1) -> TileWork:
    """The work of ``ops`` on a tile whose matmuls reach ``efficiency`` of the tensor rate."""
    machine = cost.machine
    ops = [i for i in ops if i not in cost.step_sums]
    tensor, weights = 0.0, 0
    for dot in dots_of(cost, ops):
        columns = padded(slab(dot.n, split))
        depth = round_up(dot.k * itemsize(dot.dtype), K_BYTES)
        tensor += 2.0 * TILE_ROWS * columns * (depth / itemsize(dot.dtype)) / machine.rate(machine.tensor_rates, dot.dtype)
        weights += columns * depth  # every warpgroup reads all of B from shared memory
    for dot in gradients_of(cost, ops):
        rate = machine.rate(machine.tensor_rates, dot.dtype) * (1.0 if itemsize(dot.dtype) == 2 else _WARP_MATMUL)
        tensor += 2.0 * TILE_ROWS * round_up(dot.m, TILE_ROWS) * padded(dot.n) / split / rate
    products = [(i, product_work(cost, i)) for i in row_products_of(cost, ops)]
    for i, product in products:
        tensor += product.flops / (machine.rate(machine.tensor_rates, cost.work(i).dtype) * _WARP_MATMUL)
    slots, special = _slots(cost, ops, split)
    slots += sum(product.slots for _, product in products)
    per_second = machine.rate(machine.simt_rates, "other")
    moved = weights + storage.image_traffic + sum(product.shared for _, product in products)
    alone = sum(product.cycles for _, product in products) / machine.clock
    issue = max(slots, special * SPECIAL_SLOTS) / per_second
    work = TileWork(tensor / efficiency, issue, moved / machine.place("smem").bandwidth, alone)
    for steps, body in loops_of(cost, ops):
        work = work.plus(steps, _step(body, storage, efficiency, split))
    return work


def _step(body: GpuCost, storage: Storage, efficiency: float, split: int) -> TileWork:
    """A step of a loop on a tile. A number of each row is computed by the four threads that share the row, unless there is nothing
    but numbers; each operation waits for the one before it, and a lane has no other tile to work on meanwhile; slices come from
    memory when the step begins."""
    work = tile_work(body, body.region.ops, storage, efficiency, split)
    alone = [i for i in body.region.ops if body.graph.ops[i].body is None and not body.is_maker(i)]
    numbers = [i for i in alone if body.row_size(body.graph.ops[i].outputs[0]) == 1]
    numbers = [] if len(numbers) == len(alone) else numbers  # a thread has rows of its own (``own_rows.py``)
    again, special = _slots(body, numbers, 1)
    machine = body.machine
    issue = work.issue + (QUAD - 1) * max(again, special * SPECIAL_SLOTS) / machine.rate(machine.simt_rates, "other")
    loads = machine.place("l2").latency if any(v in body.labels for v in body.region.inputs) else 0.0
    return dataclasses.replace(work, issue=issue, alone=work.alone + (DEPENDENT - 1) * issue + loads)


def _slots(cost: GpuCost, ops: Sequence[int], split: int) -> tuple[float, float]:
    """(instructions, special function results) of a tile."""
    slots = special = 0.0
    for i in ops:
        if cost.is_maker(i):
            continue
        access = cost.access(i)
        if access is not None:
            products, scores = cost.scaling(i)
            slots += TILE_ROWS * (products + scores * (FOLD_SLOTS + SCALING_SLOTS))
            special += TILE_ROWS * scores
            slots += TILE_ROWS * cost.elements(i) * cost.fold_slots(i) if access.folds else 128 * access.count * _ADDRESS_SLOTS
            continue
        if cost.graph.ops[i].body is not None:
            continue
        family, out = cost.family(i), cost.graph.ops[i].outputs[0]
        reduces = family in ("reduce", "argreduce", "cumulative")
        size = cost.row_size(cost.graph.ops[i].inputs[0] if reduces else out)
        elements = TILE_ROWS * slab(size, split)
        if family == "dot" and i in cost.sinks:
            dot = cost.work(i).dot
            assert dot is not None
            slots += TILE_ROWS * (dot.m + dot.n / split) * CONVERT_SLOTS  # on their way to shared memory
        elif family == "dot":
            slots += elements * CONVERT_SLOTS * (itemsize(cost.graph.values[out].dtype) < 4)
        elif reduces:
            slots += elements + (128 * ROW_SLOTS if i not in cost.sinks else 0)  # each thread has sums of its own
        elif family == "convert":
            slots += elements * CONVERT_SLOTS
        elif family == "pointwise":
            each, functions = _pointwise(cost, i)
            slots += elements * (each + cost.round_slots(i))
            special += elements * functions
    return slots, special


def _pointwise(cost: GpuCost, i: int) -> tuple[float, int]:
    op = cost.graph.ops[i]
    spec, narrow = OPS[op.kind], itemsize(cost.graph.values[op.outputs[0]].dtype) == 2
    return spec.fast if narrow and spec.fast else spec.flops, int(spec.special)


def matmul_efficiency(machine: GpuMachine, arrangement: str, resident: bool) -> float:
    """Part of the tensor rate that the matmuls of a stage reach while their epilogues are hidden."""
    if arrangement == "spatial":
        return machine.rate(machine.spatial_efficiency, "other")
    return machine.rate(machine.vertical_efficiency, "resident" if resident else "streamed")

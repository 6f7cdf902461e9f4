"""Plans that work off a long dimension of the rows in blocks: the tile is then taller, and its intermediates stay in the cache.

Comes in: a Graph, a Region and the machine model of a CPU. Goes out: a plan for each extent of a block, none where the region has
no such dimension. What a block costs is what the region would cost if the dimension were that short.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kitsune_jax.graph import Graph
from kitsune_jax.planning.inner import Inner, inner_of
from kitsune_jax.planning.plan import Infeasible, Plan, Stage
from kitsune_jax.program.blocks import NotBlocked
from kitsune_jax.program.build import build
from kitsune_jax.program.ir import Instr, TileProgram, walk
from kitsune_jax.program.within import mean_met, with_known_bounds
from kitsune_jax.streams.space import Region
from kitsune_jax.targets.cpu.planning.cost import CpuCost, CpuWork
from kitsune_jax.targets.cpu.planning.machines import CpuMachine
from kitsune_jax.targets.cpu.planning.tile_size import TileModel
from kitsune_jax.targets.cpu.planning.times import STEP_SECONDS

_BLOCKS = (128, 256, 512)
# What a block does for each row beside the ops of the region: the largest score so far, and how much it has grown.
_STATE_STEPS, _STATE = 12, ("max", "eq", "select_n", "sub", "exp", "mul", "add")


def in_blocks(graph: Graph, region: Region, machine: CpuMachine, arrange: Callable[[CpuCost, TileModel], Plan]) -> list[Plan]:
    """A plan for each extent of a block that ``region`` can be worked off in."""
    inner = inner_of(graph, region)
    cost = CpuCost(graph, region, machine)
    if inner is None or cost.matrices:
        return []
    if not region.space.batch and all(cost.family(i) == "dot" for i in inner.folds):
        return []  # a layer's width: its weights lie packed for all tiles
    value = max((v for v in inner.dims if v in cost.labels), key=lambda v: (v in cost.producer, cost.row_size(v), -v))
    plans = []
    for size in (n for n in _BLOCKS if n < inner.size):
        blocks = value, inner.dims[value], size
        try:
            program = with_known_bounds(build(graph, region, _sketch(region, machine, blocks)))
            plans.append(dataclasses.replace(arrange(cost, BlockModel(cost, inner, size, program)), blocks=blocks))
        except (NotBlocked, Infeasible):
            continue
    return plans


def _sketch(region: Region, machine: CpuMachine, blocks: tuple[int, int, int]) -> Plan:
    """A plan to build a program from whose loops are looked at."""
    stage = Stage("sketch", tuple(sorted(region.ops)), "tensor", 1, 0.0)
    return Plan(machine.name, "vertical", 64, 1, (stage,), (), 1, 0.0, 0.0, 0, 0, "", blocks=blocks)


class BlockModel(TileModel):
    """A tile whose inner dimension is worked off in blocks of ``size``."""

    packs = True

    def __init__(self, whole: CpuCost, inner: Inner, size: int, program: TileProgram):
        values = list(whole.graph.values)
        for v, d in inner.dims.items():
            shape = values[v].shape
            values[v] = dataclasses.replace(values[v], shape=(*shape[:d], size, *shape[d + 1 :]))
        super().__init__(CpuCost(dataclasses.replace(whole.graph, values=tuple(values)), whole.region, whole.machine))
        self.inner, self.program = inner, program
        self.loops = [i for i in program.stages[0].body if i.kind == "loop"]
        self.outside = self.cost.kinds(i for i in whole.region.ops if i not in inner.ops)
        self.inside = [self._inside(loop) for loop in self.loops]
        self.carried = sum(self.cost.row_size(self.cost.graph.ops[i].outputs[0]) for i in inner.folds)

    def seconds(self, rows: int) -> float:
        outside = sum(n * self.cost.seconds(work, rows) for work, n in self.outside.items())
        times = self.cost.times
        state = _STATE_STEPS * STEP_SECONDS + rows * sum(times.vector(kind, "float32") for kind in _STATE)
        state += 2 * rows * self.carried * times.edge("float32")
        blocks = 0.0
        for loop, (works, moving) in zip(self.loops, self.inside, strict=True):
            block = moving + sum(n * self.cost.seconds(work, rows) for work, n in works.items())
            blocks += self._met(loop, rows) * (block + (state if loop.inputs else 0.0))
        return outside + blocks + self._spill_seconds(rows)

    def _inside(self, loop: Instr) -> tuple[dict[CpuWork, int], float]:
        """What a loop does with a block, and the seconds in which operands are packed for it and its part of the sinks is read and
        written. A loop behind another one computes again what it needs."""
        ops = {i.op for i in walk((loop,)) if i.op in self.inner.ops}
        sums = 2 * self.cost.sink_bytes(ops) / self.cost.machine.place("l3").bandwidth
        return self.cost.kinds(ops), sums + sum(self._packed(i) for i in ops if i not in self.cost.sinks)

    def _packed(self, i: int) -> float:
        """Seconds in which a block of the stationary operand of op ``i`` is packed."""
        cost, op = self.cost, self.cost.graph.ops[i]
        dot = cost.work(i).dot
        if dot is None or dot.per_row:
            return 0.0
        weight = next(v for v in op.inputs if v not in cost.labels)
        contract = op["rhs_contract" if weight == op.inputs[1] else "lhs_contract"]
        transposed = len(cost.graph.values[weight].shape) - 1 in contract
        way = cost.products[0] if dot.dtype == "bfloat16" else "widened"
        return dot.batch * dot.k * dot.n * cost.times.pack(dot.dtype, way, transposed, "l2") + STEP_SECONDS

    def _met(self, loop: Instr, rows: int) -> float:
        """How many blocks a tile of ``rows`` rows looks at on average."""
        return mean_met(dataclasses.replace(self.program, tile_rows=rows), loop)

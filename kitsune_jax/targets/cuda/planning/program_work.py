"""The work of a tile program on a tile, where the program's loops, and not the ops of the graph, say how often what is done.

Comes in: a tile program of one stage. Goes out: ``TileWork`` of instructions, with ``times`` for how often a tile runs the body of
a loop. Invariant: the same assumptions as ``times``, which counts the ops of a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import itemsize, round_up
from kitsune_jax.program.ir import Instr, TileProgram
from kitsune_jax.targets.cuda.planning.cost import ROUND_SLOTS
from kitsune_jax.targets.cuda.planning.machines import GpuMachine
from kitsune_jax.targets.cuda.planning.times import (
    CONVERT_SLOTS,
    DEPENDENT,
    K_BYTES,
    QUAD,
    ROW_SLOTS,
    SPECIAL_SLOTS,
    TileWork,
)
from kitsune_jax.targets.cuda.rounding import rounded_results
from kitsune_jax.targets.cuda.tiles import TILE_ROWS, padded

_MOVED_SLOTS = 4.0  # of an element that changes place in a row: to shared memory and back, with their addresses


class ProgramWork:
    """``coarse``: exponentials that the special function unit makes alone (``stage_facts.py``)."""

    def __init__(self, program: TileProgram, machine: GpuMachine, efficiency: float, coarse: frozenset[int]):
        self.program, self.machine, self.efficiency, self.coarse = program, machine, efficiency, coarse
        self.rounded = rounded_results(program)

    def of(self, body: Sequence[Instr], times: Callable[[Instr], float]) -> TileWork:
        found = TileWork(0.0, 0.0, 0.0)
        slots = special = numbers = 0.0
        for i in body:
            if i.block is not None:
                found = found.plus(times(i), self.of(i.block.body, times))
            elif i.kind == "matmul":
                found = found.plus(1, self._product(i))
            else:
                each, functions, alone = self._slots(i)
                slots, special = slots + each, special + functions
                numbers += each if alone else 0.0
        per_second = self.machine.rate(self.machine.simt_rates, "other")
        issue = max(slots, special * SPECIAL_SLOTS) / per_second
        return found.plus(1, TileWork(0.0, issue, 0.0, (DEPENDENT - 1) * numbers / per_second))

    def weight_bytes(self, body: Sequence[Instr], times: Callable[[Instr], float]) -> float:
        """Of packed weights that a tile multiplies with."""
        inside = sum(times(i) * self.weight_bytes(i.block.body, times) for i in body if i.block is not None)
        return inside + sum(self._weight(i)[1] for i in body if i.kind == "matmul")

    def _weight(self, instr: Instr) -> tuple[int, int]:
        """(columns, bytes) of the packed weight of a product."""
        x, (out,) = self.program.values[instr.inputs[0]], instr.outputs
        k = math.prod(x.rows_first[d] for d in instr["x_contract"])
        columns = padded(math.prod(self.program.values[out].shape))
        return columns, columns * round_up(k * itemsize(x.dtype), K_BYTES)

    def _product(self, instr: Instr) -> TileWork:
        columns, size = self._weight(instr)
        dtype, out = self.program.values[instr.inputs[0]].dtype, self.program.values[instr.outputs[0]]
        machine = self.machine
        tensor = 2.0 * TILE_ROWS * size / itemsize(dtype) / machine.rate(machine.tensor_rates, dtype) / self.efficiency
        slots = TILE_ROWS * columns * CONVERT_SLOTS * (itemsize(out.dtype) < 4)
        return TileWork(tensor, slots / machine.rate(machine.simt_rates, "other"), size / machine.place("smem").bandwidth)

    def _slots(self, instr: Instr) -> tuple[float, float, bool]:
        """(instructions, special function results) of a tile, and whether they are of one number of each row."""
        spec = OPS.get(instr.kind)
        if spec is None or not instr.outputs or not self.program.values[instr.outputs[0]].tile:
            return 0.0, 0.0, False
        read = [self.program.values[v] for v in instr.inputs]
        n = math.prod(self.program.values[instr.outputs[0]].shape)
        numbers = n == 1 and all(math.prod(t.shape) == 1 for t in read)
        elements = float(TILE_ROWS * n * (QUAD if numbers else 1))  # the threads that share a row have the same numbers of it
        if spec.family == "reduce" and not numbers:
            return TILE_ROWS * math.prod(read[0].shape) + 128 * ROW_SLOTS, 0.0, False
        if spec.family == "convert":
            return elements * CONVERT_SLOTS, 0.0, numbers
        if spec.family == "pointwise":
            fast = spec.fast if instr.outputs[0] in self.coarse and spec.fast else spec.flops
            out = instr.outputs[0]
            rounding = ROUND_SLOTS[self.program.values[out].dtype] if out in self.rounded else 0.0
            return elements * (fast + rounding), elements * bool(spec.special), numbers
        return elements * _MOVED_SLOTS if spec.family in ("transpose", "slice", "pad", "concatenate", "rev") else 0.0, 0.0, False

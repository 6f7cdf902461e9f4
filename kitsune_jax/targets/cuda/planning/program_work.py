"""The work of a tile of a tile program of one stage: attention, and other streams with batches or blocks.

Comes in: a ``TileProgram`` and the model of a GPU. Goes out: ``ProgramWork``. Unlike ``cost.py``, which counts the ops of a graph
under the same assumptions, this counts instructions, so that blocks that a loop skips cost nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import itemsize, round_up
from kitsune_jax.program.ir import Instr, TileProgram
from kitsune_jax.program.passes import is_other_name
from kitsune_jax.targets.cuda import tiles
from kitsune_jax.targets.cuda.planning import cost
from kitsune_jax.targets.cuda.planning.cost import CONVERT_SLOTS, DEPENDENT, PRODUCT_CYCLES, QUAD, ROW_SLOTS, TileWork
from kitsune_jax.targets.cuda.planning.machines import GpuMachine, matmul_efficiency
from kitsune_jax.targets.cuda.stage import facts, fitting
from kitsune_jax.targets.cuda.stage.simplify import rounded_results
from kitsune_jax.targets.cuda.tiles import TILE_ROWS

_MOVED_SLOTS = 4.0  # instructions for an element that changes its place in a row: to shared memory and back, with the addresses


class ProgramWork:
    """The work of a tile of ``program`` where a CTA has ``lanes`` lanes. Where the program has loops, ``times`` says how often a
    tile runs each body. ``in_time``: no product is late, and scores are scaled before the exponential, as in the kernels of
    attention in the record of an H200.
    """

    def __init__(self, program: TileProgram, machine: GpuMachine, lanes: int, in_time: bool = False):
        self.program, self.machine, self.lanes, self.in_time = program, machine, lanes, in_time
        self.efficiency = matmul_efficiency(machine, "vertical", False, lanes)
        self.coarse = facts.coarse_exponentials(program, program.stages[0].body)
        self.rounded = rounded_results(program)

    def of(self, body: Sequence[Instr], times: Callable[[Instr], float]) -> TileWork:
        found = TileWork(0.0, self._issue(body), 0.0)
        for i in body:
            if i.kind == "matmul":
                found = found.plus(1, self._product(i))
            elif i.block is not None and (n := times(i)):
                late = None if self.in_time else self.late_products(i)
                found = found.plus(n, self.of(i.block.body, times)) if late is None else found.plus(1, self._late(i, n, *late))
        return found

    def _issue(self, body: Sequence[Instr]) -> float:
        """Seconds to issue the instructions of ``body`` without those of its products and loops."""
        slots = special = 0.0
        free = self._free(body)
        for i in body:
            if i.kind != "matmul" and free.isdisjoint(i.outputs):
                each, functions = self._slots(i)
                slots, special = slots + each, special + functions
        return max(slots, special * cost.SPECIAL_SLOTS) / self.machine.rate(self.machine.simt_rates, "other")

    def late_products(self, loop: Instr) -> tuple[Instr, Instr] | None:
        """The products of a step of ``loop`` whose second one is issued in the next step (``stage/chunks.py``), or None."""
        assert loop.block is not None
        body, results = loop.block.body, loop.block.results
        products = [i for i in body if i.kind == "matmul"]
        if self.machine.max_cluster == 1 or len(products) != 2 or any(i.block is not None for i in body):
            return None  # mma.sync is not asynchronous
        (early, late), makers = products, {v: i for i in body for v in i.outputs}
        sliced = all(i.inputs[1] in makers and makers[i.inputs[1]].kind == "load_slice" for i in products)
        added = any(i.kind == "add" and late.outputs[0] in i.inputs and i.outputs[0] in results for i in body)
        values = self.program.values
        (scores, result), (x, p) = ([self._weight(i)[0] for i in products], [values[i.inputs[0]] for i in products])
        if not (sliced and added and tiles.is_half(p.dtype)) or early.inputs[0] in makers or late.inputs[0] not in makers:
            return None
        most = tiles.CHUNK_COLUMNS if self.lanes < 3 else tiles.CHUNK_COLUMNS // 2
        form = "pair" if tiles.is_half(x.dtype) else "word"
        need = [tiles.registers(scores, "word"), tiles.registers(scores, "pair"), tiles.registers(result, "word")]
        need.append(tiles.registers(tiles.padded(math.prod(x.shape)), form))
        return (early, late) if max(scores, result) <= most and sum(need) + 2 <= fitting.value_registers(self.lanes) else None

    def _late(self, loop: Instr, steps: float, early: Instr, late: Instr) -> TileWork:
        """All ``steps`` of a loop. Its products follow each other without a gap, as the turns of other lanes do: a lane issues both
        at once, waits for the first, and computes beside the second. All lanes enter the loop together, and after their first
        products none multiplies until one of them has computed its first step."""
        assert loop.block is not None
        scores, values = self._product(early, in_turn=False), self._product(late, in_turn=False)
        rest = TileWork(0.0, self._issue(loop.block.body), 0.0)
        alone = 2 * PRODUCT_CYCLES / self.machine.clock
        work = scores.plus(1, values).plus(1, rest)
        work = TileWork(0.0, 0.0, 0.0).plus(steps, dataclasses.replace(work, alone=alone))
        computed = DEPENDENT * rest.issue
        idle = max(0.0, computed - (self.lanes - 1) * scores.tensor) / self.lanes
        return dataclasses.replace(work, tensor=work.tensor + idle, beside=(steps - 1) * min(values.tensor, computed))

    def _free(self, body: Sequence[Instr]) -> set[int]:
        """Values without instructions of their own: other names, reductions that were made before under another name, and sums that
        a product's accumulators start from; and what exponentials compute themselves."""
        makers, root, known = {v: i for i in body for v in i.outputs}, dict[int, int](), set[tuple[str, int]]()
        found = set[int]() if self.in_time else self._part_of_exponentials(body)
        for i in body:
            spec = OPS.get(i.kind)
            if i.inputs and i.outputs and is_other_name(self.program.values, i):
                root[i.outputs[0]] = root.get(i.inputs[0], i.inputs[0])
                found.update(i.outputs)
            elif spec is not None and spec.family == "reduce":
                key = i.kind, root.get(i.inputs[0], i.inputs[0])
                found.update(i.outputs if key in known else ())
                known.add(key)
            elif i.kind == "add" and any(v in makers and makers[v].kind == "matmul" for v in i.inputs):
                found.update(i.outputs)
        return found

    def _part_of_exponentials(self, body: Sequence[Instr]) -> set[int]:
        """Values that an exponential's multiplication and addition computes: scaled scores of a product, and their difference from
        a number of the row."""
        makers, literals, found = {v: i for i in body for v in i.outputs}, dict(self.program.literals), set[int]()
        for i in body:
            less = makers.get(i.inputs[0]) if i.kind == "exp" and i.outputs[0] in self.coarse else None
            scaled = makers.get(self._behind_names(makers, less.inputs[0])) if less is not None and less.kind == "sub" else None
            if less is None or scaled is None or scaled.kind != "mul":
                continue
            factors = [literals.get(v) for v in scaled.inputs]
            products = [v for v in scaled.inputs if v in makers and makers[v].kind == "matmul"]
            if products and any(isinstance(x, float) and 0 < x <= math.log(2) for x in factors):
                found.update((*less.outputs, *scaled.outputs))
        return found

    def weight_bytes(self, body: Sequence[Instr], times: Callable[[Instr], float]) -> float:
        """Of packed weights that a tile multiplies with."""
        inside = sum(times(i) * self.weight_bytes(i.block.body, times) for i in body if i.block is not None)
        return inside + sum(self._weight(i)[1] for i in body if i.kind == "matmul")

    def _weight(self, instr: Instr) -> tuple[int, int]:
        """(columns, bytes) of the packed weight of a product."""
        x, (out,) = self.program.values[instr.inputs[0]], instr.outputs
        k = math.prod(x.rows_first[d] for d in instr["x_contract"])
        columns = tiles.padded(math.prod(self.program.values[out].shape))
        return columns, columns * round_up(k * itemsize(x.dtype), cost.K_BYTES)

    def _product(self, instr: Instr, in_turn: bool = True) -> TileWork:
        """``in_turn``: the lanes keep their turns until the product has ended."""
        columns, size = self._weight(instr)
        dtype, out = self.program.values[instr.inputs[0]].dtype, self.program.values[instr.outputs[0]]
        machine = self.machine
        tensor = 2.0 * TILE_ROWS * size / itemsize(dtype) / machine.rate(machine.tensor_rates, dtype) / self.efficiency
        tensor += in_turn * PRODUCT_CYCLES / machine.clock
        slots = TILE_ROWS * columns * CONVERT_SLOTS * (itemsize(out.dtype) < 4)
        return TileWork(tensor, slots / machine.rate(machine.simt_rates, "other"), size / machine.place("smem").bandwidth)

    def _behind_names(self, makers: dict[int, Instr], v: int) -> int:
        while v in makers and makers[v].inputs and is_other_name(self.program.values, makers[v]):
            (v,) = makers[v].inputs
        return v

    def _slots(self, instr: Instr) -> tuple[float, float]:
        """(instructions, special function results) of an instruction on a tile, with its share of addresses and moves."""
        spec = OPS.get(instr.kind)
        if spec is None or not instr.outputs or not self.program.values[instr.outputs[0]].tile:
            return 0.0, 0.0
        read = [self.program.values[v] for v in instr.inputs]
        n = math.prod(self.program.values[instr.outputs[0]].shape)
        numbers = n == 1 and all(math.prod(t.shape) == 1 for t in read)
        # Each thread of a row computes the numbers of the row.
        elements = TILE_ROWS * n * (QUAD if numbers else cost.OVERHEAD)
        if spec.family == "reduce" and not numbers:
            return TILE_ROWS * math.prod(read[0].shape) * cost.OVERHEAD + 128 * ROW_SLOTS, 0.0
        if spec.family == "convert":
            return elements * CONVERT_SLOTS, 0.0
        if spec.family == "pointwise":
            fast = spec.fast if instr.outputs[0] in self.coarse and spec.fast else spec.flops
            out = instr.outputs[0]
            rounding = cost.ROUND_SLOTS[self.program.values[out].dtype] if out in self.rounded else 0.0
            return elements * (fast + rounding), TILE_ROWS * n * (QUAD if numbers else 1) * bool(spec.special)
        return elements * _MOVED_SLOTS if spec.family in ("transpose", "slice", "pad", "concatenate", "rev") else 0.0, 0.0

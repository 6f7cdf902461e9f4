"""What ops cost on a GPU when stages are formed: the ratio of matmuls and vector work on one SM.

Comes in: a Graph, a Region and the machine model of a GPU. Goes out: ``GpuCost``. How long a tile of a stage takes, with its issue
slots and its shared memory, is in ``times``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Self

from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.indexing import any_order, may_differ
from kitsune_jax.ops.loops import as_step, parts
from kitsune_jax.ops.online import ONLINE
from kitsune_jax.ops.rounding import EVERYWHERE
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import SCATTER, Access, RegionCost, round_up
from kitsune_jax.streams.space import Region
from kitsune_jax.targets.cuda.planning.machines import GpuMachine
from kitsune_jax.targets.cuda.rounding import SAME_DIGITS, computes, is_elementary
from kitsune_jax.targets.cuda.tiles import TILE_ROWS, padded, table_bytes

# A matmul spends about four steps of K on loading and storing its accumulators; from K = 64 on that is in the efficiency.
_FULL_K, _K_OVERHEAD = 64, 16
_ROWS, _COLUMNS = 64, 8  # of a product of the tensor cores
# The part of the lanes' rate that elementwise loops reach, ours and XLA's. A design value.
LOOP_EFFICIENCY = 0.5
# Instructions that round an element to 16 bits where it stays a float: a conversion to the upper half of one; a conversion and one
# back.
ROUND_SLOTS = {"bfloat16": 1.0, "float16": 2.0}
# Instructions for an element that is folded into a segment: to shared memory, and down the rows (``stage/segment.h``).
FOLD_SLOTS = 10.0
# The same where the lane has a table: 128 threads go down 64 rows for each block of 32 columns, four instructions a row, and fold a
# quarter of them with twelve (``stage/table.h``).
TABLE_SLOTS = 28.0
# Kernels of XLA's radix sort of pairs, and the bytes that it moves for a row: four passes over keys and positions.
_SORT_KERNELS, _SORT_BYTES = 6, 64
_SECTOR = 32  # bytes that memory gives at once


# Beside finding the largest score of a run, which is as a fold: whether it is finite, the difference, the exponential's own.
SCALING_SLOTS = 6.0
# Instructions for an element that is added to the result atomically: a quarter of one that adds four, and its address
# (``stage/atomic.h``).
ATOMIC_SLOTS = 1.0
# The same of a maximum or a minimum: to shared memory, down a warp's rows, and one number at a time (``FoldedRows`` there; 25
# instructions for an element in the machine code of 13.5).
ATOMIC_FOLD_SLOTS = 25.0
# Bytes of the L2's bandwidth that the atomic addition of a float takes: it is read and written there. An assumption until a device
# has measured it: no published rate of vectors of them on sm_90 was found.
ATOMIC_BYTES = 8
# The same of a maximum or a minimum of floats: two instructions, by the sign, go to the sectors of a row.
ATOMIC_FOLD_BYTES = 16
# Cycles of an addition to a sector during which no other one to it begins, and additions that a sector of a row gets (four floats
# each). The same assumption. The model takes every row of the table to get as many; one that gets half of all rows is not known.
ATOMIC_CYCLES, _ATOMIC_EACH = 1.0, 2
# Of a lane's table for which there is room beside most stages.
_SURE_BYTES = 48 << 10


class GpuCost(RegionCost):
    """``loop_sums``: of each loop of the region, the sinks that add up what it makes in its steps, as ops of its body. Their work
    is a part of a step's; ``step_sums`` are all of them. ``atomic``: folds by indices in whose order the rows do not stream, and
    which may be in whatever order, are atomic where that is faster than a table of each lane."""

    machine: GpuMachine

    def __init__(self, graph: Graph, region: Region, machine: GpuMachine, order: int | None = None, atomic: bool = False):
        super().__init__(graph, region, machine, order)
        self.has_digits_read = functools.lru_cache(maxsize=None)(self._has_digits_read)
        self.loop_sums = {i: self._sums_of(graph.ops[i]) for i in region.ops if graph.ops[i].body is not None}
        self.step_sums = frozenset(k for sums in self.loop_sums.values() for k in sums)
        sums = [i for i in region.sinks if atomic and any_order(graph.ops[i]) and not self._near(i)]
        self.unordered = tuple(i for i in sums if self._is_faster(i))

    def _near(self, i: int) -> bool:
        access = self.access(i)
        return access is not None and access.near

    def _is_faster(self, i: int) -> bool:
        """Are rows folded atomically sooner than into a table of each lane, where there is room for one?"""
        rows, elements, n = self.region.space.rows, self.elements(i), self.graph.ops[i]["n"]
        if table_bytes(n, padded(elements)) > _SURE_BYTES:
            return True
        rate = self.machine.rate(self.machine.simt_rates, "other") * self.machine.workers
        moved = self._moved_atomically(i) / self.machine.shared_bandwidth
        own = 0.0 if may_differ(self.graph.ops[i]) else rows * elements * ATOMIC_FOLD_SLOTS / rate
        return max(moved, own, self._one_by_one(i)) < rows * elements * TABLE_SLOTS / rate

    def _one_by_one(self, i: int) -> float:
        """Seconds in which the additions of op ``i`` to one sector of its table follow each other."""
        return self.region.space.rows / self.graph.ops[i]["n"] * _ATOMIC_EACH * ATOMIC_CYCLES / self.machine.clock

    def fold_slots(self, i: int) -> float:
        """Instructions for an element of a row that op ``i`` folds by indices."""
        if i not in self.unordered:
            return FOLD_SLOTS if self._near(i) else TABLE_SLOTS
        return ATOMIC_SLOTS if may_differ(self.graph.ops[i]) else ATOMIC_FOLD_SLOTS

    def scaling(self, i: int) -> tuple[int, int]:
        """(numbers of a row that op ``i`` multiplies, scores of a row that it finds the largest of), where it is a softmax's sum.
        Sums by the same scores share what is found."""
        op = self.graph.ops[i]
        if op.kind not in ONLINE:
            return 0, 0
        return self.elements(i), self.row_size(op.inputs[2]) if self.first_of_scores(i) else 0

    def atomic_bytes(self) -> int:
        """Bytes of the L2's bandwidth that atomic operations take. The fold of nothing, where they begin, is written as well."""
        begun = sum(4 * self.graph.values[self.graph.ops[i].outputs[0]].size for i in self.unordered)
        return begun + sum(map(self._moved_atomically, self.unordered))

    def _moved_atomically(self, i: int) -> int:
        op = self.graph.ops[i]
        return atomic_bytes(op, self.graph.values[op.inputs[0]].dtype) * self.elements(i) * self.region.space.rows

    def _sums_of(self, loop: Op) -> dict[int, Op]:
        found = {k: as_step(loop, self.graph.ops[k]) for k in self.region.sinks}
        return {k: op for k, op in found.items() if op is not None}

    def _body(self, i: int) -> Self:
        """With the sums that a step adds to. What nobody but these reads of a step is no result of it."""
        body = super()._body(i)
        if not (sums := self.loop_sums[i]):
            return body
        graph, region, p = body.graph, body.region, parts(self.graph.ops[i])
        made = tuple(range(len(graph.values), len(graph.values) + len(sums)))
        values = tuple(self.graph.values[op.outputs[0]] for op in sums.values())
        added = tuple(dataclasses.replace(op, outputs=(v,)) for op, v in zip(sums.values(), made, strict=True))
        numbers = tuple(range(len(graph.ops), len(graph.ops) + len(sums)))
        kept = set(p.in_next)
        kept.update(
            v for y, v in zip(p.ys, p.in_ys, strict=True) if y in self.outputs or not sums.keys() >= set(self.readers.get(y, ()))
        )
        whole = dataclasses.replace(
            region,
            ops=(*region.ops, *numbers),
            outputs=(*(v for v in region.outputs if v in kept), *made),
            sinks=numbers,
        )
        found = type(self)(
            dataclasses.replace(graph, values=(*graph.values, *values), ops=(*graph.ops, *added)), whole, self.machine
        )
        found.carried = body.carried
        return found

    def tile_seconds(self, i: int, rows: int) -> float:
        machine, work = self.machine, self.work(i)
        access = self.access(i)
        if access is not None:
            # A row that is gathered costs no more than one that is loaded.
            slots = self.elements(i) * self.fold_slots(i) if access.folds else 0.0
            products, scores = self.scaling(i)
            slots += products + scores * (FOLD_SLOTS + SCALING_SLOTS)
            return rows * slots / machine.rate(machine.simt_rates, "other")
        if self.absorbed(i):
            return 0.0
        if work.dot is None:
            return (
                rows
                * (work.simt + self.round_slots(i) * self.elements(i))
                / (machine.rate(machine.simt_rates, work.dtype) * LOOP_EFFICIENCY)
            )
        dot = work.dot
        rate = machine.rate(machine.tensor_rates, dot.dtype) * machine.rate(machine.spatial_efficiency, dot.dtype)
        # A sink contracts the rows: they are its K, and the output's dimensions are what is padded to the tensor cores' shape.
        m, k = (dot.m, rows * dot.k) if i in self.sinks else (rows * dot.m, dot.k)
        padded_k = k + max(0.0, (_FULL_K - k) / _K_OVERHEAD)
        return 2.0 * dot.batch * round_up(m, _ROWS) * round_up(dot.n, _COLUMNS) * padded_k / rate

    def round_slots(self, i: int) -> float:
        """Instructions that round an element of what the pointwise op ``i`` makes, where its kernel does (``rounding.py``)."""
        op = self.graph.ops[i]
        if self.family(i) != "pointwise" or (self.carried is not None and is_elementary(op.kind)):
            return 0.0
        literals = tuple(self.graph.values[v].literal for v in op.inputs)
        rounds = EVERYWHERE.rounds(op.kind, self.graph.values[op.outputs[0]].dtype, literals)
        slots = ROUND_SLOTS.get(self.graph.values[op.outputs[0]].dtype, 0.0)
        return slots if rounds and any(map(self.has_digits_read, op.outputs)) else 0.0

    def _has_digits_read(self, v: int) -> bool:
        """Does an op of the region compute with the digits of ``v``, or with what hands them on?"""
        for op in (self.graph.ops[k] for k in self.readers.get(v, ())):
            operands = [self.graph.values[x] for x in op.inputs]
            if op.kind in SAME_DIGITS:
                found = any(map(self.has_digits_read, op.outputs))
            else:
                found = op.kind not in ONLINE and computes(op.kind, [(x.dtype, x.literal) for x in operands])
            if found:
                return True
        return False

    def lookups(self) -> tuple[int, int]:
        """(bytes of rows that are gathered, those of them that come from tables that the L2 does not hold)."""
        near = far = 0
        for i in self.region.ops:
            access = self.access(i)
            if access is not None and not access.folds:
                read = access.count * round_up(access.row_bytes, _SECTOR) * self.region.space.rows
                if self._repeats(i, access):
                    read //= TILE_ROWS  # the first row of a tile brings it into the L1
                near += read
                far += read if access.table_bytes > self.machine.shared_bytes else 0
        return near, far

    def _repeats(self, i: int, access: Access) -> bool:
        """Do whole tiles take the same row, because their rows are folded into the same one as well?"""
        if self.order is not None or self.region.space.rows * access.row_bytes < TILE_ROWS * access.table_bytes:
            return False
        folds = [self.graph.ops[k] for k in self.region.sinks if self.access(k) is not None]
        index = self.source(self.graph.ops[i].inputs[1])
        return any(op["sorted"] and self.source(op.inputs[1]) == index for op in folds)

    def order_bytes(self) -> int:
        """Bytes that are read and written beside the rows themselves where these stream in an order of their own: whole sectors."""
        if self.order is None:
            return 0
        rows = [self.row_bytes(v) for v in (*self.region.inputs, *self.outputs) if v in self.labels]
        return self.region.space.rows * sum(round_up(size, _SECTOR) - size for size in rows)

    def order_seconds(self) -> float:
        """Seconds that it takes to make the order: XLA makes it once for all ops of the graph that fold by the same indices."""
        if self.order is None:
            return 0.0
        folds = [op for op in self.graph.ops if OPS.get(op.kind) and OPS[op.kind].family == SCATTER]
        users = sum(self.order == op.inputs[1] for op in folds)
        machine = self.machine
        return (_SORT_KERNELS * machine.kernel_seconds + self.region.space.rows * _SORT_BYTES / machine.dram_bandwidth) / users

    def lane_tables(self) -> list[int]:
        """32-bit words of the tables that each lane has for sums by indices in whose order the rows do not stream."""
        found = [(i, self.access(i)) for i in self.region.sinks]
        own = [i for i, access in found if access is not None and not access.near and i not in self.unordered]
        return [self.graph.ops[i]["n"] * padded(self.elements(i)) for i in own]

    def atomic_seconds(self) -> float:
        """Seconds that atomic operations on one sector take at least."""
        return max(map(self._one_by_one, self.unordered), default=0.0)

    def sink_bytes(self, ops: Iterable[int]) -> int:
        """Bytes of the accumulators of the sinks among ``ops``: 32 bits each."""
        return 4 * sum(self.graph.values[v].size for i in ops if i in self.sinks for v in self.graph.ops[i].outputs)


def atomic_bytes(op: Op, dtype: str) -> int:
    """Bytes of the L2's bandwidth for an element of ``dtype`` that ``op`` folds atomically, in our code and in XLA's."""
    return ATOMIC_FOLD_BYTES if op.kind in ("scatter_max", "scatter_min") and "float" in dtype else ATOMIC_BYTES

"""Cost model of a GPU stage: seconds of a tile, instructions, registers and bytes, and how many CTAs can share the stage.

Comes in: a Graph, a Region, the model of a GPU, and the ops of a stage. Goes out: ``GpuCost`` (costs of single ops), ``Storage``
(shared memory that a lane needs), ``TileWork`` (seconds of a tile on each engine of an SM). Sizes are those that the kernel is laid
out with (``targets.cuda.tiles``).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Self

from kitsune_jax.ops.graph import Graph, Op, is_constant
from kitsune_jax.ops.loops import as_step, parts
from kitsune_jax.ops.reduce import EXACT_FOLDS, ONLINE, any_order
from kitsune_jax.ops.spec import EVERYWHERE
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import GATHER, SCATTER, Access, DotWork, RegionCost, itemsize, round_up
from kitsune_jax.planning.plan import KIB, NO_CONTEXT, ProgramContext
from kitsune_jax.planning.streams import Region
from kitsune_jax.targets.cuda import tiles
from kitsune_jax.targets.cuda.planning.machines import GpuMachine
from kitsune_jax.targets.cuda.stage.fitting import LiveValue, Placements, StageStep, Storage, value_registers
from kitsune_jax.targets.cuda.stage.simplify import SAME_DIGITS, computes, is_elementary
from kitsune_jax.targets.cuda.stage_ir import RowOperand, RowProduct, queue_form
from kitsune_jax.targets.cuda.tiles import BLOCK_COLUMNS, NO_RING, TILE_ROWS, InputRing, padded, table_bytes

# --- Costs of single ops ----------------------------------------------------------------------------------------------------------

# Loading and storing the accumulators of a matmul takes about as long as four steps of K; from K = 64 on the rate includes it.
_FULL_K, _K_OVERHEAD = 64, 16
_ROWS, _COLUMNS = 64, 8  # a product of the tensor cores is padded to multiples of these
# Fraction of the lanes' rate that elementwise loops reach, in our code and in XLA's. A design value.
LOOP_EFFICIENCY = 0.5
# Instructions that round a float to 16 bits and keep it a float: bfloat16 is packed into the upper half, float16 converted twice.
ROUND_SLOTS = {"bfloat16": 1.0, "float16": 2.0}
# Instructions to fold an element into a segment: to shared memory, and down the rows, where a warp takes a block of 32 columns
# however many there are; and for a row, to join the runs of a tile (128 threads, 8 runs one after the other; ``stage/segment.h``).
FOLD_SLOTS, _JOIN_SLOTS = 12.0, 600.0
# Instructions to fold an element into a lane's table: for each block of 32 columns 128 threads go down 64 rows, with four
# instructions a row, and fold a quarter of the rows with twelve (``stage/table.h``).
TABLE_SLOTS = 28.0
# Kernels of XLA's radix sort of pairs, and bytes that it moves for a row: four passes over keys and positions.
_SORT_KERNELS, _SORT_BYTES = 6, 64
_SECTOR = 32  # bytes of a memory transaction
# Instructions to scale a score of a softmax once the largest score is known: is it finite, the difference, the exponential.
SCALING_SLOTS = 6.0
# Instructions to add an element to the result atomically: a quarter of one that adds four, and the address (``stage/atomic.h``).
ATOMIC_SLOTS = 1.0
# The same for a maximum or minimum, which takes one number at a time: 25 in the machine code of CUDA 13.5 (``FoldedRows``).
ATOMIC_FOLD_SLOTS = 25.0
# L2 bandwidth, in bytes, of the atomic addition of a float. XLA's scatters on an H200 (2026-11-26): 198 000 rows of 128 in 54 us,
# 82 000 of 512 in 82 us. Of vectors of them, as our code has them, there is no measurement; they are taken to be no faster.
ATOMIC_BYTES = 12
# The same for a maximum or minimum of floats: two instructions, by the sign, go to the sectors of a row.
ATOMIC_FOLD_BYTES = 16
# Cycles that an addition occupies its sector, and additions per sector of a row (four floats each). The same assumption. The model
# assumes that all rows of a table get equally many; it cannot know of one that gets half of all.
ATOMIC_CYCLES, _ATOMIC_EACH = 1.0, 2
_SURE_BYTES = 48 << 10  # of a lane's table, which most stages leave room for


class GpuCost(RegionCost):
    """Costs of the ops of a region on one SM. ``atomic``: allow atomic operations for folds by unsorted indices whose order may be
    any, wherever they are faster than a table of each lane; ``unordered`` are these folds.

    ``loop_sums``: for each loop of the region, the sinks that add up values of its steps, as ops of its body, whose work is part of
    a step's; ``step_sums``: all of these sinks. ``slices``: of a loop's body, the values that a step loads; None elsewhere.
    """

    machine: GpuMachine

    def __init__(
        self,
        graph: Graph,
        region: Region,
        machine: GpuMachine,
        order: int | None = None,
        atomic: bool = False,
        program: ProgramContext = NO_CONTEXT,
    ):
        super().__init__(graph, region, machine, order, program)
        self.slices: frozenset[int] | None = None
        self.has_digits_read = functools.lru_cache(maxsize=None)(self._has_digits_read)
        # The same few stages are asked for in every grouping of the ops and under every split.
        self.loads_of = functools.cache(functools.partial(_loads, self))
        self.packed_bytes_of = functools.cache(functools.partial(_packed_bytes, self))
        self.slots_of = functools.cache(functools.partial(_slots_of, self))
        self.entry_bytes = functools.cache(functools.partial(_entry_bytes, self))
        self.loop_sums = {i: self._sums_of(graph.ops[i]) for i in region.ops if graph.ops[i].body is not None}
        self.step_sums = frozenset(k for sums in self.loop_sums.values() for k in sums)
        free = [i for i in region.sinks if atomic and any_order(graph.ops[i], program.options.deterministic) and not self._near(i)]
        self.unordered = tuple(i for i in free if self._atomic_is_faster(i))

    @functools.cached_property
    def products(self) -> dict[int, DotWork]:
        """The matmuls of the region."""
        return {i: dot for i in self.region.ops if (dot := self.work(i).dot) is not None}

    def _near(self, i: int) -> bool:
        access = self.access(i)
        return access is not None and access.near

    def _atomic_is_faster(self, i: int) -> bool:
        """Are atomic operations faster than a table of each lane, or is there no room for such a table?"""
        rows, elements, n = self.region.space.rows, self.elements(i), self.graph.ops[i]["n"]
        if table_bytes(n, padded(elements)) > _SURE_BYTES:
            return True
        rate = self.machine.rate(self.machine.simt_rates, "other") * self.machine.workers
        moved = self._atomic_bytes_of(i) / self.machine.shared_bandwidth
        own = rows * elements * ATOMIC_FOLD_SLOTS / rate if self.graph.ops[i].kind in EXACT_FOLDS else 0.0
        return max(moved, own, self._same_sector_seconds(i)) < rows * elements * TABLE_SLOTS / rate

    def _same_sector_seconds(self, i: int) -> float:
        """Seconds of the additions of op ``i`` to one sector of its table, which follow one another."""
        return self.region.space.rows / self.graph.ops[i]["n"] * _ATOMIC_EACH * ATOMIC_CYCLES / self.machine.clock

    def fold_slots(self, i: int) -> float:
        """Instructions for an element of a row that op ``i`` folds by indices."""
        if i not in self.unordered:
            return FOLD_SLOTS if self._near(i) else TABLE_SLOTS
        return ATOMIC_FOLD_SLOTS if self.graph.ops[i].kind in EXACT_FOLDS else ATOMIC_SLOTS

    def row_fold_slots(self, i: int, access: Access) -> float:
        """Instructions for a row of op ``i``, which folds by indices, or gathers (0), or makes a softmax sum."""
        products, scores = self.scaling(i)
        tops = scores and round_up(scores, BLOCK_COLUMNS) * FOLD_SLOTS + scores * SCALING_SLOTS
        if access.folds and access.near:
            return products + tops + round_up(self.elements(i), BLOCK_COLUMNS) * FOLD_SLOTS + _JOIN_SLOTS
        return products + tops + (self.elements(i) * self.fold_slots(i) if access.folds else 0.0)

    def scaling(self, i: int) -> tuple[int, int]:
        """(elements of a row to multiply, scores of a row to find the largest of) for a softmax sum, else (0, 0). Sums over the
        same scores find the largest only once."""
        op = self.graph.ops[i]
        if op.kind not in ONLINE:
            return 0, 0
        return self.elements(i), self.row_size(op.inputs[2]) if self.first_of_scores(i) else 0

    def atomic_bytes(self) -> int:
        """L2 bandwidth, in bytes, of all atomic operations, and of writing the initial values they start from."""
        begun = sum(4 * self.graph.values[self.graph.ops[i].outputs[0]].size for i in self.unordered)
        return begun + sum(map(self._atomic_bytes_of, self.unordered))

    def _atomic_bytes_of(self, i: int) -> int:
        op = self.graph.ops[i]
        return atomic_bytes(op, self.graph.values[op.inputs[0]].dtype) * self.elements(i) * self.region.space.rows

    def loads(self, v: int) -> bool:
        """Does a lane load rows of ``v``, if no stage before it passes them on? What a loop carries is in registers."""
        return self.streamed(v) and (self.slices is None or v in self.slices or v not in self.region.inputs)

    def _sums_of(self, loop: Op) -> dict[int, Op]:
        found = {k: as_step(loop, self.graph.ops[k]) for k in self.region.sinks}
        return {k: op for k, op in found.items() if op is not None}

    def _body(self, i: int) -> Self:
        """The costs of the body of loop ``i`` and the sums that a step adds to; values that only these read are no results."""
        body = super()._body(i)
        body.slices = frozenset(parts(self.graph.ops[i]).in_xs)
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
            region, ops=(*region.ops, *numbers), outputs=(*(v for v in region.outputs if v in kept), *made), sinks=numbers
        )
        found = self.for_graph(dataclasses.replace(graph, values=(*graph.values, *values), ops=(*graph.ops, *added)), whole)
        found.carried, found.slices = body.carried, body.slices
        return found

    def tile_seconds(self, i: int, rows: int) -> float:
        machine, work, access = self.machine, self.work(i), self.access(i)
        if access is not None:
            # A row that is gathered costs no more than one that is loaded.
            return rows * self.row_fold_slots(i, access) / machine.rate(machine.simt_rates, "other")
        if self.absorbed(i):
            return 0.0
        if work.dot is None:
            slots = work.simt + self.round_slots(i) * self.elements(i)
            return rows * slots / (machine.rate(machine.simt_rates, work.dtype) * LOOP_EFFICIENCY)
        dot = work.dot
        rate = machine.rate(machine.tensor_rates, dot.dtype) * machine.rate(machine.spatial_efficiency, dot.dtype)
        # A sink contracts the rows, so these are its K; the dimensions of its result are padded to the shape of the tensor cores.
        m, k = (dot.m, rows * dot.k) if i in self.sinks else (rows * dot.m, dot.k)
        padded_k = k + max(0.0, (_FULL_K - k) / _K_OVERHEAD)
        return 2.0 * dot.batch * round_up(m, _ROWS) * round_up(dot.n, _COLUMNS) * padded_k / rate

    def round_slots(self, i: int) -> float:
        """Instructions to round one element of the result of pointwise op ``i``; 0 if it is not rounded (``stage/simplify.py``)."""
        op = self.graph.ops[i]
        if self.family(i) != "pointwise" or (self.carried is not None and is_elementary(op.kind)):
            return 0.0
        literals = tuple(self.graph.values[v].literal for v in op.inputs)
        rounds = EVERYWHERE.rounds(op.kind, self.graph.values[op.outputs[0]].dtype, literals)
        slots = ROUND_SLOTS.get(self.graph.values[op.outputs[0]].dtype, 0.0)
        return slots if rounds and any(map(self.has_digits_read, op.outputs)) else 0.0

    def _has_digits_read(self, v: int) -> bool:
        """Does an op of the region compute with the digits of ``v``, directly or through ops that only move elements?"""

        def reads(op: Op) -> bool:
            if op.kind in SAME_DIGITS:
                return any(map(self.has_digits_read, op.outputs))
            operands = [self.graph.values[x] for x in op.inputs]
            return op.kind not in ONLINE and computes(op.kind, [(x.dtype, x.literal) for x in operands])

        return any(reads(self.graph.ops[k]) for k in self.readers.get(v, ()))

    def gathered_bytes(self) -> tuple[int, int]:
        """(bytes of gathered rows, those of them from tables that are too large for the L2)."""
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
        """Do all rows of most tiles gather the same row? True if their indices are the sorted ones that the rows are folded by."""
        if self.order is not None or self.region.space.rows * access.row_bytes < TILE_ROWS * access.table_bytes:
            return False
        folds = [self.graph.ops[k] for k in self.region.sinks if self.access(k) is not None]
        index = self.source(self.graph.ops[i].inputs[1])
        return any(op["sorted"] and self.source(op.inputs[1]) == index for op in folds)

    def piece_bytes(self) -> int:
        """Bytes of the streamed arrays whose rows are read and written in pieces of 64 bytes, 16 by each of the four threads that
        share a row. (Narrower rows lie side by side; rows of another pitch come by bulk copies.)"""
        arrays = [v for v in (*self.region.inputs, *self.outputs) if v in self.labels]
        return sum(self.bytes(v) for v in arrays if self.row_bytes(v) > QUAD * 16 and self.row_bytes(v) % 16 == 0)

    def order_bytes(self) -> int:
        """Extra bytes moved because rows stream in an order of their own, so that each row is read and written in whole sectors."""
        if self.order is None:
            return 0
        rows = [self.row_bytes(v) for v in (*self.region.inputs, *self.outputs) if v in self.labels]
        return self.region.space.rows * sum(round_up(size, _SECTOR) - size for size in rows)

    def order_seconds(self) -> float:
        """Seconds to sort the rows into this order, divided among the ops that fold by the same indices: XLA sorts once for all."""
        if self.order is None or is_constant(self.graph, self.graph.producers(), self.order):  # a constant of the program too
            return 0.0
        folds = [op for op in self.graph.ops if OPS.get(op.kind) and OPS[op.kind].family == SCATTER]
        users = sum(self.order == op.inputs[1] for op in folds)
        machine = self.machine
        return (_SORT_KERNELS * machine.kernel_seconds + self.region.space.rows * _SORT_BYTES / machine.dram_bandwidth) / users

    def lane_tables(self) -> list[int]:
        """For each sum by unsorted indices, the 32-bit words of the table that each lane has for it."""
        found = [(i, self.access(i)) for i in self.region.sinks]
        own = [i for i, access in found if access is not None and not access.near and i not in self.unordered]
        return [self.graph.ops[i]["n"] * padded(self.elements(i)) for i in own]

    def atomic_seconds(self) -> float:
        """Least seconds of the atomic operations: additions to the same sector follow one another."""
        return max(map(self._same_sector_seconds, self.unordered), default=0.0)

    def sink_bytes(self, ops: Iterable[int]) -> int:
        """Bytes of the accumulators of the sinks among ``ops``, at 32 bits each."""
        return 4 * sum(self.graph.values[v].size for i in ops if i in self.sinks for v in self.graph.ops[i].outputs)


def atomic_bytes(op: Op, dtype: str) -> int:
    """Bytes of L2 bandwidth for an element of ``dtype`` that ``op`` folds atomically, in our code and in XLA's."""
    return ATOMIC_FOLD_BYTES if op.kind in EXACT_FOLDS and "float" in dtype else ATOMIC_BYTES


# --- Bytes that a stage keeps -----------------------------------------------------------------------------------------------------


def dots_of(cost: GpuCost, ops: Iterable[int]) -> list[DotWork]:
    """Products with stationary weights."""
    products, sinks = cost.products, cost.sinks
    return [products[i] for i in ops if i in products and i not in sinks and not products[i].per_row]


def gradients_of(cost: GpuCost, ops: Iterable[int]) -> list[DotWork]:
    """Weight gradients: matmuls that contract the rows, of operands with ``m`` and ``n`` columns."""
    return [cost.products[i] for i in ops if i in cost.products and i in cost.sinks]


def packed_bytes(cost: GpuCost, ops: Iterable[int], split: int = 1, batches: bool = False) -> int:
    """A CTA's share of the packed weights that the matmuls of ``ops``, and of the bodies of loops among them, read. ``batches``:
    count the weights of every batch, not of one."""
    return cost.packed_bytes_of(tuple(ops), split, batches)


def _packed_bytes(cost: GpuCost, ops: tuple[int, ...], split: int, batches: bool) -> int:
    found = sum(packed_bytes(body, body.region.ops, split) for _, body in loops_of(cost, ops))
    for i in ops:
        for dot in dots_of(cost, (i,)):
            weight = next((v for v in cost.graph.ops[i].inputs if v in cost.of_batch), None) if batches else None
            each = tiles.WeightShape((dot.k,), dot.n, dot.dtype, split).slab_bytes
            found += each if weight is None else each * (cost.graph.values[weight].size // cost.row_size(weight))
    return found


def loops_of(cost: GpuCost, ops: Iterable[int]) -> list[tuple[int, GpuCost]]:
    """(steps, costs of the body) of the loops among ``ops``."""
    return [(cost.graph.ops[i]["length"], cost.body(i)) for i in ops if cost.graph.ops[i].body is not None]


def vector_bytes(cost: GpuCost, ops: Iterable[int]) -> int:
    """Bytes of biases, gains and other stationary operands of ops that are not matmuls."""
    others = (i for i in ops if cost.work(i).dot is None and cost.graph.ops[i].body is None)
    return sum(cost.bytes(v) for v in cost.stationary_inputs(others))


def entry_bytes(cost: GpuCost, v: int) -> int:
    """Bytes of a ring's entry: one tile of ``v``."""
    return cost.entry_bytes(v)


def _entry_bytes(cost: GpuCost, v: int) -> int:
    return tiles.image_bytes(tiles.padded(cost.row_size(v)), queue_form(cost.graph.values[v].dtype, False))


# --- Products for each row: matmuls whose operands both stream --------------------------------------------------------------------

_VIEWS = frozenset({"broadcast", "reshape"})
# Cycles of a warp for a row that its engines do not account for: the trip of its operands from memory, barriers, and the latency of
# a chain of products and of its sums on their way through shared memory. DLRM on an H200, 2026-11-26.
_ROW_CYCLES = 1500
_COPY_SLOTS = 24  # instructions to copy 16 bytes: an index and its test, an address, a place, the copy itself
_PRODUCT_SLOTS = 64  # instructions of an mma.sync and its share of ldmatrix, over the 32 threads of a warp
# Instructions for a sum: to shared memory, and from there to its destination, by an index that is loaded (machine code).
_SUM_SLOTS = 16
_MMA_ROWS, _MMA_COLUMNS, _DEPTH_BYTES = 16, 8, 32  # of an mma.sync


def row_products_of(cost: GpuCost, ops: Iterable[int]) -> list[int]:
    """Matmuls whose operands both stream."""
    products, sinks = cost.products, cost.sinks
    return [i for i in ops if i in products and i not in sinks and products[i].per_row]


def fed_by(cost: GpuCost) -> dict[int, int]:
    """op -> product, for ops that only stack or gather the operands of a product for each row, or pick from its result.

    They belong to the product's stage: it copies its operands to shared memory row by row from their places in memory
    (``stage/instructions.py``), so stacked operands never exist as a whole and gathered rows are best gathered there.
    """
    found: dict[int, int] = {}
    for product in row_products_of(cost, cost.region.ops):
        todo = list(cost.graph.ops[product].inputs)
        while todo:
            i = cost.producer.get(todo.pop(), -1)
            if i < 0 or i in found or cost.is_maker(i):
                continue
            if cost.family(i) not in (*_VIEWS, "concatenate") and not cost.looks_up(i):
                continue
            found[i] = product
            if cost.family(i) != GATHER:
                todo += cost.graph.ops[i].inputs
        todo = list(cost.graph.ops[product].outputs)
        while todo:
            readers = cost.readers.get(todo.pop(), ())
            if len(readers) == 1 and (cost.family(readers[0]) in _VIEWS or cost.graph.ops[readers[0]].kind == "take"):
                found[readers[0]] = product
                if cost.graph.ops[readers[0]].kind != "take":
                    todo += cost.graph.ops[readers[0]].outputs
    return found


def stacked_of(cost: GpuCost, ops: Iterable[int]) -> frozenset[int]:
    """The ops among ``ops`` that stack operands of a product, which reads them part by part."""
    found = fed_by(cost)
    return frozenset(i for i in ops if i in found and cost.family(i) in (*_VIEWS, "concatenate"))


def _node(cost: GpuCost, i: int) -> RowProduct:
    """The product with operands whose last dimension is K, the layout that needs least shared memory."""
    dot, (x, y) = _dot(cost, i), cost.graph.ops[i].inputs
    a, b = (RowOperand(n, False, ()) for n in (dot.m, dot.n))
    return RowProduct(None, dot.dtype, dot.k, a, None if x == y else b, dot.dtype, 0, None, None)  # type: ignore[arg-type]


def _dot(cost: GpuCost, i: int) -> DotWork:
    dot = cost.work(i).dot
    assert dot is not None
    return dot


def product_bytes(cost: GpuCost, ops: Iterable[int]) -> int:
    """Shared memory of a lane: operands and sums of one row for each warp. Products use it one after the other."""
    return max((_node(cost, i).bytes for i in row_products_of(cost, ops)), default=0)


def _product_work(cost: GpuCost, i: int) -> tuple[float, float, float, float]:
    """(padded products, instructions, bytes moved by shared memory, cycles that a lane waits while all engines are free for other
    lanes) of a tile."""
    dot, (x, y) = _dot(cost, i), cost.graph.ops[i].inputs
    size = itemsize(dot.dtype)
    m, n, k = round_up(dot.m, _MMA_ROWS), round_up(dot.n, _MMA_COLUMNS), round_up(dot.k, _DEPTH_BYTES // size)
    copied = (dot.m + (0 if x == y else dot.n)) * dot.k * size
    multiplied = (m + m // _MMA_ROWS * n) * k * size
    products = m // _MMA_ROWS * (n // _MMA_COLUMNS) * (k * size // _DEPTH_BYTES)
    sums = dot.m * dot.n
    slots = copied / 16 * _COPY_SLOTS + products * _PRODUCT_SLOTS + sums * _SUM_SLOTS
    rows = TILE_ROWS // 4  # of each warp, one after the other
    shared = TILE_ROWS * (copied + multiplied + 8.0 * sums)
    return 2.0 * TILE_ROWS * m * n * k, TILE_ROWS * slots, shared, rows * _ROW_CYCLES


# --- Stages that several CTAs share, each with a slab of the result's columns -----------------------------------------------------

_ANCHORS = frozenset({"dot", "reduce", "argreduce", "cumulative"})
ELEMENTWISE = frozenset({"pointwise", "convert", "broadcast"})


def most_split(cost: GpuCost, ops: Sequence[int], split: int) -> int:
    """The largest number of CTAs, at most ``split``, that can share ``ops`` in equal slabs of whole blocks of columns."""
    if split == 1 or not is_splittable(cost, ops):
        return 1
    gradients = gradients_of(cost, ops)
    if gradients:  # the columns of either operand may be split
        return max(useful_split(n, split) for n in (gradients[0].m, gradients[0].n))
    return useful_split(dots_of(cost, ops)[0].n, split)


def is_splittable(cost: GpuCost, ops: Sequence[int]) -> bool:
    """Is the stage one matmul or weight gradient among elementwise ops, so that each CTA can make its own columns of the results?
    ``stage/split.py`` finds the slabs of a stage that is split."""
    sums = panel_sums(cost, ops)
    anchors = [i for i in ops if cost.family(i) in _ANCHORS and i not in sums]
    others = [i for i in ops if i not in sums and i not in anchors]
    if len(anchors) != 1 or any(i in cost.sinks for i in others):
        return False
    dot = cost.work(anchors[0]).dot
    if dot is None or dot.per_row:
        return False
    if anchors[0] in cost.sinks:
        return _separate_operands(cost, others, anchors[0])
    made = set(cost.graph.ops[anchors[0]].outputs)  # values that depend on the matmul
    for i in ops:
        if made.intersection(cost.graph.ops[i].inputs):
            made.update(cost.graph.ops[i].outputs)
    columns = cost.row_size(cost.graph.ops[anchors[0]].outputs[0])
    elementwise = all(cost.family(i) in ELEMENTWISE for i in ops if i != anchors[0])
    return elementwise and all(cost.row_size(v) in (1, columns) for v in made)


def _separate_operands(cost: GpuCost, ops: Sequence[int], gradient: int) -> bool:
    """Do the operands of a weight gradient share no value in the stage? Only the columns of one of them are split over CTAs."""
    if any(cost.family(i) not in ELEMENTWISE for i in ops):
        return False
    reach = []
    for v in cost.graph.ops[gradient].inputs:
        seen: set[int] = set()
        todo = [v]
        while todo:
            v = todo.pop()
            if v in seen or not cost.streamed(v) or cost.row_size(v) == 1:
                continue
            seen.add(v)
            touched = [(*cost.graph.ops[i].inputs, *cost.graph.ops[i].outputs) for i in ops]
            todo += [u for values in touched if v in values for u in values]
        reach.append(seen)
    return not reach[0] & reach[1]


def panel_sums(cost: GpuCost, ops: Iterable[int]) -> frozenset[int]:
    """Sums over the rows of a 16-bit operand of a weight gradient among ``ops``: made from the operand's panel in shared memory."""
    sinks, values = {i: cost.graph.ops[i] for i in ops if i in cost.sinks}, cost.graph.values
    operands = {v for i, op in sinks.items() if cost.work(i).dot is not None for v in op.inputs}
    sums = {i: op for i, op in sinks.items() if op.kind == "reduce_sum" and op.inputs[0] in operands}
    return frozenset(i for i, op in sums.items() if itemsize(values[op.inputs[0]].dtype) == 2 and values[op.outputs[0]].size > 1)


def panel_sums_of(cost: GpuCost) -> dict[int, int]:
    """sum over the rows of an operand of a weight gradient -> the gradient, whose stage has the operand in shared memory."""
    found: dict[int, int] = {}
    for gradient in cost.region.ops:
        if gradient in cost.sinks and cost.work(gradient).dot is not None:
            for i in panel_sums(cost, (gradient, *(c for v in cost.graph.ops[gradient].inputs for c in cost.readers.get(v, ())))):
                found.setdefault(i, gradient)
    return found


def spread_sums(cost: GpuCost, ops: Sequence[int]) -> frozenset[int]:
    """Sums over the rows whose columns the threads of a warp share out (``tiles.spread_sums``)."""
    own = [i for i in ops if i in cost.sinks and cost.work(i).dot is None and cost.access(i) is None]
    sizes = {i: cost.graph.values[cost.graph.ops[i].outputs[0]].size for i in own}
    panels = panel_sums(cost, ops) if own else frozenset()
    sums = [i for i in own if sizes[i] > 1 and i not in panels]
    spread = tiles.spread_sums([tiles.padded(sizes[i]) for i in sums])
    return frozenset(i for i, apart in zip(sums, spread, strict=True) if apart)


def useful_split(columns: int, split: int) -> int:
    """The largest number of equal slabs, of whole blocks of 32 columns, that ``split`` CTAs can share.

    >>> useful_split(1408, 25), useful_split(256, 3), useful_split(100, 4)
    (22, 2, 1)
    """
    return max(s for s in range(1, split + 1) if s == 1 or columns % (BLOCK_COLUMNS * s) == 0)


# --- Storage: registers and shared memory that a stage needs ----------------------------------------------------------------------

_WORKING_REGISTERS = 24  # addresses, counters and temporaries of a consumer thread, as compiled kernels use them
_PRODUCT_REGISTERS = 56  # of a product for each row: sums, fragments, addresses (``stage/instructions.py``)
_ELEMENTWISE_COLUMNS = 32  # in flight in an elementwise loop: four 16-byte rows of 16-bit values
_RESERVED_BYTES = 2 * KIB  # barriers, and aligning the first swizzled chunk to 1024 bytes
_REDUCTIONS = frozenset({"reduce", "argreduce"})


def shared_bytes(cost: GpuCost, ops: Sequence[int], storage: Storage, lanes: int, weights: int, rings: int) -> int:
    """Shared memory of a CTA: ``weights`` (or the ring that streams them), and for every lane its images and ``rings``."""
    return weights + vector_bytes(cost, ops) + lanes * (storage.image_bytes + rings) + _RESERVED_BYTES


def largest_storage(bodies: Iterable[StageSteps], registers: int, lanes: int) -> Storage | None:
    """The storage of the one of ``bodies`` that needs most shared memory for images; None where one has no storage."""
    found = [steps.storage(registers, lanes) for steps in bodies]
    fitting = [storage for storage in found if storage is not None]
    return max(fitting, key=lambda s: s.image_bytes) if len(fitting) == len(found) else None


class StageSteps:
    """The steps of a stage and the values that are kept between them. ``storage(registers, lanes)`` places these values in
    registers and shared memory. ``slabs``: in a split stage, values made before all products are split as well (in a loop).

    One warpgroup (a lane) works on a tile of 64 rows, the M of wgmma, in **steps**: one per matmul and per reduction of a row.
    Elementwise ops run in the step that makes their last operand, column block by column block. So only values that a later step
    reads are **kept**: in registers (the accumulator layout, 16-bit values two to a register), or, where these are too few, as an
    image in shared memory. Values at the border of a stage cost nothing, because they are read from memory or from a ring.

    This estimates the layout that code generation makes. It never overstates the need: the code generator checks its own result,
    while a stage without ``Storage`` here gets no kernel. Generating every group of ops instead would take too long (planning a
    gradient of six layers: 126 seconds instead of 4); planning without the estimate changed 55 of 889 plans.
    """

    def __init__(self, cost: GpuCost, ops: Sequence[int], split: int = 1, slabs: bool = False):
        self.cost, self.ops, self.split, self.slabs = cost, tuple(ops), split, slabs
        self.producer = {v: i for i in ops for v in cost.graph.ops[i].outputs}
        self.step: dict[int, int] = {}
        self.steps = [StageStep(_ELEMENTWISE_COLUMNS // 2)]
        for i in self.ops:
            self._add_to_step(i)
        self.placements = Placements(self.steps, self._kept_values())
        panels, self.spread = panel_sums(cost, ops), spread_sums(cost, ops)
        self.sums = sum(2 if i in panels else self._sum_registers(i) for i in ops if i in cost.sinks and cost.work(i).dot is None)
        self.runs = max((self._segment_bytes(i) for i in ops if i in cost.sinks and cost.access(i) is not None), default=0)
        self.products = product_bytes(cost, ops)
        self.rows = self._kept_rows()
        self.storage = functools.lru_cache(maxsize=None)(self._storage)

    def _add_to_step(self, i: int) -> None:
        cost, op = self.cost, self.cost.graph.ops[i]
        before = [self.step[self.producer[v]] for v in op.inputs if v in self.producer]
        if cost.family(i) not in _ANCHORS or i in cost.sinks:
            self.step[i] = max(before, default=0)
            return
        self.step[i] = len(self.steps)
        dot = cost.work(i).dot
        if dot is None:
            self.steps.append(self.steps[0])
            return
        if dot.per_row:
            self.steps.append(StageStep(_PRODUCT_REGISTERS, 1.0))
            return
        columns = tiles.padded(dot.n // self.split)
        chunks = -(-columns // tiles.CHUNK_COLUMNS)
        beside = self._product_beside(i)
        if beside is not None:  # both in chunks of 64 columns
            self.step[i] = self.step[beside]
            self.steps[-1] = StageStep(tiles.CHUNK_COLUMNS // 2, self.steps[-1].done)
            return
        # A result of one chunk is rounded and packed in its accumulators; of several chunks, the earlier ones stay beside the last.
        self.steps.append(StageStep(min(columns, tiles.CHUNK_COLUMNS) // 2, 1.0 - 1.0 / chunks))

    def _product_beside(self, i: int) -> int | None:
        """The product of the last step, if it has the same operand as product ``i``, as many columns, and results that are only
        read, element by element, where those of ``i`` are: a gate and what it multiplies. They run chunk by chunk together."""
        cost, graph = self.cost, self.cost.graph
        last = [k for k in self.ops if self.step.get(k) == len(self.steps) - 1 and cost.family(k) in _ANCHORS]
        if len(last) != 1 or graph.ops[last[0]].kind != "dot_general" or self.split > 1 or self.slabs:
            return None
        (other,), dot, mine = last, cost.work(last[0]).dot, cost.work(i).dot
        if dot is None or mine is None or dot.per_row or dot.n != mine.n or other in cost.sinks:
            return None
        if graph.ops[other].inputs[:1] != graph.ops[i].inputs[:1] or tiles.padded(mine.n) <= tiles.CHUNK_COLUMNS:
            return None
        behind, work = {v for v in graph.ops[i].outputs}, list(graph.ops[other].outputs)
        for k in self.ops:
            if behind.intersection(graph.ops[k].inputs):
                behind.update(graph.ops[k].outputs)
        while work:
            v = work.pop()
            if v in cost.outputs:
                return None
            for k in cost.readers.get(v, ()):
                if cost.family(k) not in ("pointwise", "convert"):
                    return None
                work += () if behind.issuperset(graph.ops[k].outputs) else graph.ops[k].outputs
        return other

    def root(self, v: int) -> int | None:
        """The value to keep so that ``v`` can be read later: the one that was repeated or widened into ``v``. None if that is read
        from memory or a ring."""
        cost = self.cost
        while v in self.producer:
            i = self.producer[v]
            if cost.is_maker(i) or cost.looks_up(i):
                return None
            (x,) = cost.graph.ops[i].inputs[:1]
            widens = cost.family(i) == "convert" and cost.row_bytes(v) > cost.row_bytes(x)
            repeats = cost.family(i) in _VIEWS and cost.row_size(v) >= cost.row_size(x)
            cut = cost.family(i) == "slice" and self.root(x) is None
            if not (widens or repeats or cut):
                return v
            v = x
        return None

    def _stacked_parts(self, v: int, stacked: frozenset[int]) -> list[int]:
        """The values that are stacked into ``v``, an operand of a product for each row."""
        i = self.producer.get(v, -1)
        return [p for x in self.cost.graph.ops[i].inputs for p in self._stacked_parts(x, stacked)] if i in stacked else [v]

    def _kept_values(self) -> list[list[LiveValue]]:
        """The kept values by the step that makes them."""
        reads: dict[int, dict[int, int]] = {}
        stacked = stacked_of(self.cost, self.ops)
        for i in self.ops:
            if self.cost.family(i) in _REDUCTIONS or i in stacked:
                continue  # a reduction sums in the step that makes its operand; a product for each row reads a stack by parts
            for v in dict.fromkeys(p for x in self.cost.graph.ops[i].inputs for p in self._stacked_parts(x, stacked)):
                root = self.root(v) if self.cost.streamed(v) else None
                if root is not None and self.step[i] > self.step[self.producer[root]]:
                    dot = self.cost.work(i).dot
                    times = -(-tiles.padded(dot.n // self.split) // tiles.CHUNK_COLUMNS) if dot else 1
                    at = reads.setdefault(root, {})
                    at[self.step[i]] = max(at.get(self.step[i], 0), times)
        made: list[list[LiveValue]] = [[] for _ in self.steps]
        for v, at in reads.items():
            born = self.step[self.producer[v]]
            columns = self.cost.row_size(v)
            if born or self.slabs:
                columns //= self.split
            width, how = tiles.padded(columns), queue_form(self.cost.graph.values[v].dtype, False)
            image = tiles.image_bytes(width, how)
            registers = 2 if columns == 1 else tiles.registers(width, how)
            made[born].append(LiveValue(v, max(at), registers, image, sum(at.values())))
        return [sorted(values, key=lambda k: (-k.image, k.value)) for values in made]

    def _kept_rows(self) -> tuple[LiveValue, ...]:
        """Loaded rows that several products of many columns read, one chunk of columns after the other."""
        cost, columns = self.cost, dict[int, list[int]]()
        for i in self.ops:
            dot = cost.work(i).dot
            if dot is None or dot.per_row or i in cost.sinks or cost.slices is not None:
                continue
            v = cost.graph.ops[i].inputs[0]
            if v in cost.region.inputs:
                columns.setdefault(v, []).append(dot.n // self.split)
        found = list[LiveValue]()
        for v, n in columns.items():
            if len(n) > 1 and sum(n) >= tiles.MANY_COLUMNS and cost.streamed(v):
                width, how = tiles.padded(cost.row_size(v)), queue_form(cost.graph.values[v].dtype, False)
                reads = sum(n) // tiles.CHUNK_COLUMNS
                found.append(LiveValue(v, 0, tiles.registers(width, how), tiles.image_bytes(width, how), reads))
        return tuple(found)

    def keeps_rows(self, lanes: int) -> bool:
        """Does a lane keep rows in registers, for products of 64 columns?"""
        held = sum(k.registers for k in self.rows)
        return bool(self.rows) and held + tiles.CHUNK_COLUMNS // 2 <= value_registers(lanes)

    def _sum_registers(self, i: int) -> int:
        """Registers of the sums of sink ``i``: a thread has two of every eight float32 columns, or one sum of two words."""
        if self.cost.access(i) is not None:
            return 1  # of the segment that is open
        columns = sum(self.cost.graph.values[v].size for v in self.cost.graph.ops[i].outputs)
        return 2 if columns == 1 else tiles.padded(columns) // (32 if i in self.spread else 4)

    def _segment_bytes(self, i: int) -> int:
        """Shared memory of a lane for sink ``i`` by indices: the block to fold, and the runs of a tile or the lane's table."""
        width, access = tiles.padded(self.cost.elements(i)), self.cost.access(i)
        block = tiles.TILE_ROWS * 4 * (tiles.block(width) | 1)
        if i in self.cost.unordered:
            return block if self.cost.graph.ops[i].kind in EXACT_FOLDS else 0  # the L2 folds them
        if access is not None and not access.near:
            return block + tiles.table_bytes(self.cost.graph.ops[i]["n"], width)
        op = self.cost.graph.ops[i]
        tops = tiles.tops_bytes(self.cost.row_size(op.inputs[2])) if op.kind in ONLINE else 0
        return block + tiles.segment_bytes(width) + tops

    def _gradients(self, lanes: int) -> tuple[int, int, int] | None:
        """(registers of a thread, bytes of a lane's panels, bytes written and read per tile); None if a gradient does not fit."""
        registers = panels = traffic = 0
        for dot in gradients_of(self.cost, self.ops):
            half = tiles.is_half(dot.dtype)
            shapes = tiles.gradient_shapes(dot.m, dot.n, half, self.split, lanes)
            if not shapes:
                return None
            rows, columns = (tiles.panel_bytes(tiles.padded(n), half) for n in (shapes[0].rows, shapes[0].columns))
            registers += shapes[0].registers
            panels = max(panels, rows + columns)  # gradients use the panels one after the other
            traffic += 2 * rows + columns * (1 + shapes[0].all_blocks)
        return registers, panels, traffic

    def _storage(self, registers: int, lanes: int) -> Storage | None:
        """The placement for ``lanes`` of threads with ``registers`` that needs least shared memory, then least traffic; or None."""
        gradients = self._gradients(lanes)
        if gradients is None:
            return None
        best = self.placements.best(registers - _WORKING_REGISTERS - self.sums - gradients[0])
        shared = best.image_bytes + gradients[1] + self.runs + self.products if best else 0
        images = () if self.keeps_rows(lanes) else self.rows
        shared, moved = shared + sum(k.image for k in images), gradients[2] + sum(k.image * (1 + k.reads) for k in images)
        return best and Storage(shared, best.image_traffic + moved)


# --- Tile work: seconds of a tile on each engine of an SM -------------------------------------------------------------------------

# 16 special function results against 128 instructions a cycle and SM (CUDA C++ programming guide, instruction throughput, 9.0).
SPECIAL_SLOTS = 8
CONVERT_SLOTS = 0.5  # one instruction converts and packs two values (cvt.rn.bf16x2.f32)
# Four threads share a row: two shuffles and two adds in each of the 128 threads, for 64 rows.
ROW_SLOTS = 8
# Of an element of a sum whose columns a warp's threads share out: for 16 of a thread, 7 shuffles and folds, and 14 selections.
_SPREAD_SLOTS = 28 / 16
_ADDRESS_SLOTS = 16  # of two rows of a table: compare the indices with its ends, multiply by its pitch
# Fraction of wgmma's rate that mma.sync reaches, for float32 gradients and products for each row. An assumption until measured.
_WARP_MATMUL = 0.62
QUAD = 4  # threads that share a row: each has a copy of every number of the row
# Cycles of a warp for an instruction when no other warp of the lane's can take its place: what it waits for results, operands and
# instructions. On an H200 (2026-11-26, ncu) 2.1 to 5.3 for one of issue in eight kernels.
DEPENDENT = 2.8
# Instructions for one that is counted on an element of a tile: addresses, predicates, biases, moves. ncu: 1.2 to 2.4.
OVERHEAD = 1.5
_MOVE_SLOTS = 8.0  # instructions to load or store 16 bytes: an address, a predicate, the access, its place in a tile
_LOAD_BYTES = 128  # of a row that a lane asks for at once: a chunk of K, four loads of 16 bytes in each thread
PRODUCT_CYCLES = 200  # from the last issue of a product to its results: wgmma of 128 columns, a fence, a commit, a wait
K_BYTES = 32  # the K of one wgmma in bytes (PTX ISA)


@dataclasses.dataclass(frozen=True, slots=True)
class TileWork:
    """Seconds of one tile, for each engine by itself: tensor cores, instruction issue, shared memory. ``alone``: the lane waits
    while engines are free for other lanes. ``between``: transfers between SMs; the part that a lane waits for is in ``alone`` too.
    ``beside``: the part of ``tensor`` that runs beside instructions of the same lane.

    Apart from that, engines overlap only across lanes: one lane does its matmuls and its epilogues one after the other.
    """

    tensor: float
    issue: float
    shared: float
    alone: float = 0.0
    between: float = 0.0
    beside: float = 0.0

    def period(self, lanes: int, wait: float = 0.0, together: int = 1) -> float:
        """Seconds between two tiles of an SM with ``lanes`` busy lanes, or groups ``together``, by its slowest engine or lane."""
        return max(self.tensor, self.issue, self.shared, self.between, self.latency(wait, together) / lanes)

    def latency(self, wait: float = 0.0, together: int = 1) -> float:
        """Seconds from a tile's first instruction to its last, where a warp waits for its own instructions. Of lanes ``together``,
        which take the same weights, one multiplies after the other; they wait for all else at once."""
        own = self.tensor - self.beside + max(DEPENDENT / together, 1.0) * self.issue
        return max(own, self.shared) + (self.alone + wait) / together

    def plus(self, times: float, step: TileWork) -> TileWork:
        """The sum of this work and ``times`` times the work ``step``."""
        tensor, issue = self.tensor + times * step.tensor, self.issue + times * step.issue
        alone, between = self.alone + times * step.alone, self.between + times * step.between
        return TileWork(tensor, issue, self.shared + times * step.shared, alone, between, self.beside + times * step.beside)

    def busy(self, tiles: int, lanes: int, wait: float = 0.0, together: int = 1) -> float:
        """Seconds of an SM for ``tiles`` tiles: full rounds, and a last round of the remaining tiles."""
        rounds, rest = divmod(tiles, lanes)
        return rounds * lanes * self.period(lanes, wait, together) + (rest * self.period(rest, wait, together) if rest else 0.0)


def tile_work(
    cost: GpuCost,
    ops: Sequence[int],
    storage: Storage,
    efficiency: float,
    split: int = 1,
    place: str = "l2",
    ring: InputRing = NO_RING,
) -> TileWork:
    """The work of ``ops`` on a tile whose matmuls reach ``efficiency`` of the tensor rate. ``place``: of rings that they read."""
    machine = cost.machine
    ops = [i for i in ops if i not in cost.step_sums]
    tensor, weights, cycles = 0.0, 0, 0.0
    for dot in dots_of(cost, ops):
        columns = padded(dot.n // split)
        depth = round_up(dot.k * itemsize(dot.dtype), K_BYTES)
        tensor += 2.0 * TILE_ROWS * columns * (depth / itemsize(dot.dtype)) / machine.rate(machine.tensor_rates, dot.dtype)
        weights += columns * depth  # every warpgroup reads all of B from shared memory
        cycles += -(-columns // tiles.CHUNK_COLUMNS) * PRODUCT_CYCLES
    for dot in gradients_of(cost, ops):
        rate = machine.rate(machine.tensor_rates, dot.dtype) * (1.0 if itemsize(dot.dtype) == 2 else _WARP_MATMUL)
        tensor += 2.0 * TILE_ROWS * round_up(dot.m, TILE_ROWS) * padded(dot.n) / split / rate
    slots, special = _slots(cost, ops, split)
    crossing = TILE_ROWS * (sum(ring.loaded(cost.loads_of(tuple(ops))).values()) + _stored_bytes(cost, ops) / split)
    slots += (crossing + storage.image_traffic) / 16 * _MOVE_SLOTS
    moved = float(weights + storage.image_traffic)
    for i in row_products_of(cost, ops):
        flops, issued, shared, waited = _product_work(cost, i)
        tensor += flops / (machine.rate(machine.tensor_rates, cost.work(i).dtype) * _WARP_MATMUL)
        slots, moved, cycles = slots + issued, moved + shared, cycles + waited
    issue = max(slots, special * SPECIAL_SLOTS) / machine.rate(machine.simt_rates, "other")
    moved += TILE_ROWS * sum(cost.row_bytes(v) * ring.times_read(v) for v in ring.values)
    alone = cycles / machine.clock + load_seconds(cost, ops, place, ring)
    work = TileWork(tensor / efficiency, issue, moved / machine.place("smem").bandwidth, alone)
    for steps, body in loops_of(cost, ops):
        work = work.plus(steps, _step(body, storage, efficiency, split))
    return work


def _stored_bytes(cost: GpuCost, ops: Sequence[int]) -> int:
    """Bytes of a row that a lane stores to arrays and rings."""
    own = [cost.graph.ops[i] for i in ops if not cost.is_maker(i) and cost.graph.ops[i].body is None]
    made, inside = {v for op in own for v in op.outputs if cost.streamed(v)} - (cost.carried or set()), frozenset(ops)
    return sum(cost.row_bytes(v) for v in made if v in cost.outputs or not inside.issuperset(cost.readers.get(v, ())))


def _loads(cost: GpuCost, ops: tuple[int, ...]) -> dict[tuple[int, int], int]:
    """(value, step) -> bytes of a row that a lane loads; -1 - i for the rows that op i gathers. Steps end with a product or a sum
    of a row: what is read before one and after it is loaded twice. Operands of products for each row are copied, not loaded."""
    copied, before, cut, found = fed_by(cost), dict[int, int](), dict[int, int](), dict[tuple[int, int], int]()
    for i in ops:
        op, access = cost.graph.ops[i], cost.access(i)
        reads = {cut.get(v, v): v for v in op.inputs if v in cut or (cost.loads(v) and v not in before)}
        if op.kind == "slice" and reads:  # its readers load it
            cut.update(dict.fromkeys(op.outputs, next(iter(reads))))
            continue
        step = max((before.get(v, 0) for v in op.inputs), default=0)
        before.update(dict.fromkeys(op.outputs, step + (cost.family(i) in _ANCHORS)))
        if i in copied or op.body is not None or cost.is_maker(i):
            continue
        for v, part in reads.items():
            found[v, step] = max(found.get((v, step), 0), cost.row_bytes(part))
        if access is not None and not access.folds:
            found[-1 - i, step] = access.count * access.row_bytes
    return found


def load_seconds(cost: GpuCost, ops: Sequence[int], place: str = "l2", ring: InputRing = NO_RING) -> float:
    """Seconds that a lane waits for the rows of a tile that it loads and gathers, ``_LOAD_BYTES`` of each row at a time. Rows that
    lie together were brought to the L2 while it worked on the tile before, or to ``ring``. ``place``: of rings between stages."""
    machine, loads = cost.machine, ring.rest(cost.loads_of(tuple(ops)))
    near, far = machine.place("l2").latency, machine.transfers.load_seconds
    seconds = far if cost.order is not None and loads else 0.0
    for (v, _), size in loads.items():
        if v >= 0 and v not in cost.region.inputs and place != "l2":
            continue  # in shared memory
        access = None if v >= 0 else cost.access(-1 - v)
        strewn = cost.order is not None and v in cost.region.inputs if access is None else access.table_bytes > machine.shared_bytes
        seconds += -(-size // _LOAD_BYTES) * (far if strewn else near) + TILE_ROWS * size / machine.transfers.lane_bandwidth
    return seconds


def repeated_bytes(cost: GpuCost, ops: Sequence[int], ring: InputRing) -> int:
    """Bytes of arrays that the lanes of a stage load a second time, too much later to find them in the L2."""
    held = ring.values if ring.held else ()
    loads = sorted(
        (v, size)
        for (v, _), size in cost.loads_of(tuple(ops)).items()
        if v in cost.region.inputs and v not in held and cost.slices is None
    )
    return cost.region.space.rows * sum(size for (v, size), (w, _) in itertools.pairwise(loads) if v == w)


def ahead_seconds(body: GpuCost, split: int) -> float:
    """Seconds of a step's loads that the lane does not wait for, because they are made a step ahead: all, where the registers have
    room for the rows beside accumulators, an operand on its way to them, and carries (``stage/loops.py``)."""
    rows = sum(body.row_bytes(v) for v in body.slices or ()) / 8  # registers of a thread: 64 rows in 128 threads
    carried = sum(body.row_bytes(v) for v in body.carried or ()) / 8 / split
    dots = dots_of(body, body.region.ops)
    working = [min(padded(dot.n // split), tiles.CHUNK_COLUMNS) / 2 + 16 * itemsize(dot.dtype) * (split > 1) for dot in dots]
    room = body.machine.lane_registers[0] - _WORKING_REGISTERS - carried - max(working, default=0.0)
    return load_seconds(body, body.region.ops) if rows <= min(tiles.MOST_AHEAD, room) else 0.0


def _step(body: GpuCost, storage: Storage, efficiency: float, split: int) -> TileWork:
    """The work of one step of a loop on a tile.

    Values with one number per row are computed by all four threads that share the row, unless all values are such (a thread then
    has rows of its own).
    """
    work = tile_work(body, body.region.ops, storage, efficiency, split)
    hidden = min(ahead := ahead_seconds(body, split), dataclasses.replace(work, alone=work.alone - ahead).latency())
    alone = [i for i in body.region.ops if body.graph.ops[i].body is None and not body.is_maker(i)]
    numbers = [i for i in alone if body.row_size(body.graph.ops[i].outputs[0]) == 1]
    numbers = [] if len(numbers) == len(alone) else numbers  # a thread has rows of its own (``stage/facts.py``)
    again, special = _slots(body, numbers, 1)
    machine = body.machine
    issue = work.issue + (QUAD - 1) * max(again, special * SPECIAL_SLOTS) / machine.rate(machine.simt_rates, "other")
    return dataclasses.replace(work, issue=issue, alone=work.alone - hidden)


def _slots(cost: GpuCost, ops: Sequence[int], split: int) -> tuple[float, float]:
    """(instructions, special function results) of ``ops`` on a tile."""
    slots = special = 0.0
    slots += sum(TILE_ROWS * cost.elements(i) * _SPREAD_SLOTS for i in spread_sums(cost, ops))
    for i in ops:
        if not cost.is_maker(i) and cost.graph.ops[i].body is None:
            more, functions = cost.slots_of(i, split)
            slots, special = slots + more, special + functions
    return slots, special


def _slots_of(cost: GpuCost, i: int, split: int) -> tuple[float, float]:
    """(instructions, special function results) of op ``i`` on a tile."""
    access = cost.access(i)
    if access is not None:
        slots = TILE_ROWS * cost.row_fold_slots(i, access) + (0 if access.folds else 128 * access.count * _ADDRESS_SLOTS)
        return slots, TILE_ROWS * cost.scaling(i)[1]
    family, out = cost.family(i), cost.graph.ops[i].outputs[0]
    reduces = family in ("reduce", "argreduce", "cumulative")
    size = cost.row_size(cost.graph.ops[i].inputs[0] if reduces else out)
    elements = TILE_ROWS * (size // split) * (OVERHEAD if size > 1 else 1.0)
    if family == "dot" and i in cost.sinks:
        dot = cost.work(i).dot
        assert dot is not None
        return TILE_ROWS * (dot.m + dot.n / split) * CONVERT_SLOTS, 0.0  # the operands are packed for shared memory
    if family == "dot":
        return elements * CONVERT_SLOTS * (itemsize(cost.graph.values[out].dtype) < 4), 0.0
    if reduces:
        return elements + (128 * ROW_SLOTS if i not in cost.sinks else 0), 0.0  # each thread has its own partial sums
    if family == "convert":
        return elements * CONVERT_SLOTS, 0.0
    if family != "pointwise":
        return 0.0, 0.0
    each, functions = _pointwise_slots(cost, i)
    return elements * (each + cost.round_slots(i)), elements * functions


def _pointwise_slots(cost: GpuCost, i: int) -> tuple[float, int]:
    """(instructions, special function results) of an element of op ``i``."""
    op = cost.graph.ops[i]
    spec, narrow = OPS[op.kind], itemsize(cost.graph.values[op.outputs[0]].dtype) == 2
    return spec.fast if narrow and spec.fast else spec.flops, int(spec.special)

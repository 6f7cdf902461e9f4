"""Time, registers and bytes that a stage needs on a GPU, and which stages several CTAs can share."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Self, TypeVar

from kitsune_jax.ops.graph import Graph, Op
from kitsune_jax.ops.loops import as_step, parts
from kitsune_jax.ops.reduce import ONLINE, any_order, may_differ
from kitsune_jax.ops.spec import EVERYWHERE
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import GATHER, SCATTER, Access, DotWork, RegionCost, itemsize, round_up
from kitsune_jax.planning.plan import KIB
from kitsune_jax.planning.streams import Region
from kitsune_jax.targets.cuda import tiles
from kitsune_jax.targets.cuda.ir import RowOperand, RowProduct
from kitsune_jax.targets.cuda.planning.machines import GpuMachine
from kitsune_jax.targets.cuda.stage.simplify import SAME_DIGITS, computes, is_elementary
from kitsune_jax.targets.cuda.tiles import BLOCK_COLUMNS, TILE_ROWS, padded, table_bytes

# ----------------------------------------------------------------------------------------------------------------------------------
# What ops cost on a GPU when stages are formed: the ratio of matmuls and vector work on one SM.
#
# Comes in: a Graph, a Region and the machine model of a GPU. Goes out: ``GpuCost``. How long a tile of a stage takes, with its
# issue slots and its shared memory, is in ``times``.
# ----------------------------------------------------------------------------------------------------------------------------------

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
        """Instructions that round an element of the result of the pointwise op ``i`` (``stage/simplify.py``)."""
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


# ----------------------------------------------------------------------------------------------------------------------------------
# Bytes of what a stage keeps on a GPU, counted with the sizes that its kernel is laid out with (``targets.cuda.tiles``).
#
# Comes in: the ops of a stage. Goes out: bytes of packed weights, of vectors, of a ring's entry.
# ----------------------------------------------------------------------------------------------------------------------------------

Cost = TypeVar("Cost", bound=RegionCost)


def dots_of(cost: RegionCost, ops: Iterable[int]) -> list[DotWork]:
    """Matmuls with stationary weights."""
    dots = [cost.work(i).dot for i in ops if i not in cost.sinks]
    return [dot for dot in dots if dot is not None and not dot.per_row]


def gradients_of(cost: RegionCost, ops: Iterable[int]) -> list[DotWork]:
    """Weight gradients: matmuls that contract the rows, of operands with ``m`` and ``n`` columns."""
    return [dot for i in ops if i in cost.sinks and (dot := cost.work(i).dot) is not None]


def slab(columns: int, split: int) -> int:
    """Columns of each of ``split`` slabs.

    >>> slab(1408, 22), slab(100, 1)
    (64, 100)
    """
    return columns if split == 1 else columns // split


def packed_bytes(cost: RegionCost, ops: Iterable[int], split: int = 1, batches: bool = False) -> int:
    """A CTA's share of the packed weights that the matmuls of ``ops`` read, those in the bodies of loops as well. ``batches``: of
    those that depend on the batch, those of all."""
    ops = tuple(ops)
    found = sum(packed_bytes(body, body.region.ops, split) for _, body in loops_of(cost, ops))
    for i in ops:
        for dot in dots_of(cost, (i,)):
            weight = next((v for v in cost.graph.ops[i].inputs if v in cost.of_batch), None) if batches else None
            each = tiles.WeightShape((dot.k,), dot.n, dot.dtype, split).slab_bytes
            found += each if weight is None else each * (cost.graph.values[weight].size // cost.row_size(weight))
    return found


def loops_of(cost: Cost, ops: Iterable[int]) -> list[tuple[int, Cost]]:
    """(steps, costs of the body) of the loops among ``ops``."""
    return [(cost.graph.ops[i]["length"], cost.body(i)) for i in ops if cost.graph.ops[i].body is not None]


def vector_bytes(cost: RegionCost, ops: Iterable[int]) -> int:
    """Biases, gains and the like: stationary operands of other ops than matmuls."""
    others = (i for i in ops if cost.work(i).dot is None and cost.graph.ops[i].body is None)
    return sum(cost.bytes(v) for v in cost.stationary_inputs(others))


def form(dtype: str) -> str:
    """How the elements of a value lie in registers, where no stage is split (``values.Value.form``)."""
    return "pair" if tiles.is_half(dtype) else "bit" if dtype == "bool" else "word"


def entry_bytes(cost: RegionCost, v: int) -> int:
    """One tile of ``v`` in a ring."""
    return tiles.image_bytes(tiles.padded(cost.row_size(v)), form(cost.graph.values[v].dtype))


# ----------------------------------------------------------------------------------------------------------------------------------
# Products for each row in a plan: what belongs to their stage, and what they keep and move there.
#
# Comes in: a ``RegionCost`` and ops. Goes out: the ops that only feed such a product or pick from it, shared memory, and the work
# of a tile. Operands are copied to shared memory row by row from where they lie (``stage/products.py``), so they never lie together
# anywhere, and rows that an index takes are best taken where they are multiplied.
# ----------------------------------------------------------------------------------------------------------------------------------

_VIEWS = frozenset({"broadcast", "reshape"})
# Cycles of a warp for a row beside what its engines take: barriers, the latency of a chain of products and of its sums on their way
# through shared memory. A design value: no device has measured it.
_ROW_CYCLES = 500
_COPY_SLOTS = 8  # of 16 bytes: an address, a place, the copy itself
_PRODUCT_SLOTS = 64  # of an mma.sync with its share of ldmatrix, in the 32 threads of a warp
_SUM_SLOTS = 4  # of a sum: to shared memory, and from there to where it goes
_MMA_ROWS, _MMA_COLUMNS, _DEPTH_BYTES = 16, 8, 32  # of an mma.sync


@dataclasses.dataclass(frozen=True, slots=True)
class ProductWork:
    """Of a tile. ``flops``: of padded products. ``shared``: bytes that shared memory moves. ``cycles``: that a lane waits alone."""

    flops: float
    slots: float
    shared: float
    cycles: float


def row_products_of(cost: RegionCost, ops: Iterable[int]) -> list[int]:
    """Matmuls whose both operands stream."""
    return [i for i in ops if i not in cost.sinks and (dot := cost.work(i).dot) is not None and dot.per_row]


def fed_by(cost: RegionCost) -> dict[int, int]:
    """Ops that only put together or take the operands of a product, or pick from its result -> the product."""
    found: dict[int, int] = {}
    for product in row_products_of(cost, cost.region.ops):
        todo = list(cost.graph.ops[product].inputs)
        while todo:
            i = cost.producer.get(todo.pop(), -1)
            if i < 0 or i in found or cost.is_maker(i) or not _feeds(cost, i):
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


def stacked_of(cost: RegionCost, ops: Iterable[int]) -> frozenset[int]:
    """Of ``ops`` those that put operands together: a product reads them part by part."""
    found = fed_by(cost)
    return frozenset(i for i in ops if i in found and cost.family(i) in (*_VIEWS, "concatenate"))


def _feeds(cost: RegionCost, i: int) -> bool:
    return cost.family(i) in (*_VIEWS, "concatenate") or cost.looks_up(i)


def _node(cost: RegionCost, i: int) -> RowProduct:
    """The product with its operands as they lie where K is their last dimension, which is the least."""
    dot, (x, y) = _dot(cost, i), cost.graph.ops[i].inputs
    a, b = (RowOperand(n, False, ()) for n in (dot.m, dot.n))
    return RowProduct(None, dot.dtype, dot.k, a, None if x == y else b, dot.dtype, 0, None, None)  # type: ignore[arg-type]


def _dot(cost: RegionCost, i: int) -> DotWork:
    dot = cost.work(i).dot
    assert dot is not None
    return dot


def product_bytes(cost: RegionCost, ops: Iterable[int]) -> int:
    """Shared memory of a lane: operands and sums of a row of each warp; products take turns."""
    return max((_node(cost, i).bytes for i in row_products_of(cost, ops)), default=0)


def product_work(cost: RegionCost, i: int) -> ProductWork:
    dot, (x, y) = _dot(cost, i), cost.graph.ops[i].inputs
    size = itemsize(dot.dtype)
    m, n, k = round_up(dot.m, _MMA_ROWS), round_up(dot.n, _MMA_COLUMNS), round_up(dot.k, _DEPTH_BYTES // size)
    copied = (dot.m + (0 if x == y else dot.n)) * dot.k * size
    multiplied = (m + m // _MMA_ROWS * n) * k * size
    products = m // _MMA_ROWS * (n // _MMA_COLUMNS) * (k * size // _DEPTH_BYTES)
    sums = dot.m * dot.n
    slots = copied / 16 * _COPY_SLOTS + products * _PRODUCT_SLOTS + sums * _SUM_SLOTS
    rows = TILE_ROWS // 4  # of each warp, one after the other
    return ProductWork(
        2.0 * TILE_ROWS * m * n * k, TILE_ROWS * slots, TILE_ROWS * (copied + multiplied + 8.0 * sums), rows * _ROW_CYCLES
    )


# ----------------------------------------------------------------------------------------------------------------------------------
# Which stages of a GPU's pipeline several CTAs can share, each with its slab of the result's columns.
#
# Comes in: the ops of a stage. Goes out: the most CTAs that can share them. A stage is shared where it is one matmul, or one
# weight gradient, among nothing but elementwise ops: each CTA makes its own columns of the results. Slabs are whole blocks of
# columns, all of the same number. ``targets.cuda.stage.facts`` finds the slabs of a stage that is split.
# ----------------------------------------------------------------------------------------------------------------------------------

_ANCHORS = frozenset({"dot", "reduce", "argreduce", "cumulative"})
_ELEMENTWISE = frozenset({"pointwise", "convert", "broadcast"})


def most_split(cost: RegionCost, ops: Sequence[int], split: int) -> int:
    """The most CTAs, ``split`` at most, that can share ``ops``."""
    if split == 1 or not is_splittable(cost, ops):
        return 1
    gradients = gradients_of(cost, ops)
    if gradients:
        return useful_gradient_split(gradients[0].m, gradients[0].n, split)
    return useful_split(dots_of(cost, ops)[0].n, split)


def is_splittable(cost: RegionCost, ops: Sequence[int]) -> bool:
    """One matmul and elementwise ops: each CTA of a stage can make its own columns of the results, or of a weight gradient."""
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
    columns = cost.row_size(cost.graph.ops[anchors[0]].outputs[0])
    after = _after(cost, ops, anchors[0])
    elementwise = all(cost.family(i) in _ELEMENTWISE for i in ops if i != anchors[0])
    return elementwise and all(cost.row_size(v) in (1, columns) for i in after for v in cost.graph.ops[i].outputs)


def _separate_operands(cost: RegionCost, ops: Sequence[int], gradient: int) -> bool:
    """Whether the operands of a weight gradient meet nowhere in the stage: only those of one of them are shared out."""
    if any(cost.family(i) not in _ELEMENTWISE for i in ops if i != gradient):
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
            touching = [i for i in ops if i != gradient and v in (*cost.graph.ops[i].inputs, *cost.graph.ops[i].outputs)]
            todo += [u for i in touching for u in (*cost.graph.ops[i].inputs, *cost.graph.ops[i].outputs)]
        reach.append(seen)
    return not reach[0] & reach[1]


def _after(cost: RegionCost, ops: Sequence[int], first: int) -> list[int]:
    """Ops that depend on ``first``, itself included."""
    made = set(cost.graph.ops[first].outputs)
    after = [first]
    for i in ops:
        if made.intersection(cost.graph.ops[i].inputs):
            made.update(cost.graph.ops[i].outputs)
            after.append(i)
    return after


def panel_sums(cost: RegionCost, ops: Iterable[int]) -> frozenset[int]:
    """Sums over the rows of a 16-bit operand of a weight gradient among ``ops``: they are made where that operand lies already."""
    ops = tuple(ops)
    operands = {v for i in ops if i in cost.sinks and cost.work(i).dot is not None for v in cost.graph.ops[i].inputs}

    def is_sum(i: int) -> bool:
        op = cost.graph.ops[i]
        if i not in cost.sinks or op.kind != "reduce_sum" or op.inputs[0] not in operands:
            return False
        return itemsize(cost.graph.values[op.inputs[0]].dtype) == 2 and cost.graph.values[op.outputs[0]].size > 1

    return frozenset(i for i in ops if is_sum(i))


def panel_sums_of(cost: RegionCost) -> dict[int, int]:
    """Sums over the rows of an operand of a weight gradient -> the gradient, in whose stage the operand lies in shared memory."""
    found: dict[int, int] = {}
    for gradient in cost.region.ops:
        if gradient in cost.sinks and cost.work(gradient).dot is not None:
            for i in panel_sums(cost, (gradient, *(c for v in cost.graph.ops[gradient].inputs for c in cost.readers.get(v, ())))):
                found.setdefault(i, gradient)
    return found


def useful_split(columns: int, split: int) -> int:
    """The most slabs, all of the same number of whole blocks of 32 columns, that ``split`` CTAs can share.

    >>> useful_split(1408, 25), useful_split(256, 3), useful_split(100, 4)
    (22, 2, 1)
    """
    blocks = columns // BLOCK_COLUMNS if columns % BLOCK_COLUMNS == 0 else 1
    return max(s for s in range(1, min(split, blocks) + 1) if blocks % s == 0)


def useful_gradient_split(first: int, second: int, split: int) -> int:
    """The most CTAs, ``split`` at most, that can share a gradient: slabs of whole blocks of 32 columns of either operand.

    >>> useful_gradient_split(319, 256, 5), useful_gradient_split(63, 4, 8)
    (4, 1)
    """
    return max(s for s in range(1, split + 1) if s == 1 or first % (BLOCK_COLUMNS * s) == 0 or second % (BLOCK_COLUMNS * s) == 0)


# ----------------------------------------------------------------------------------------------------------------------------------
# What a CTA keeps where: registers and shared memory that a stage needs on a GPU.
#
# Comes in: a ``RegionCost`` and the ops of a stage. Goes out: ``Storage`` for one lane, and the bytes of packed weights and
# rings. Invariant: the need is never overstated, because the code generator checks exactly what it generates: a stage that has no
# ``Storage`` here fits no kernel.
#
# This is an estimate of what code generation lays out, with its sizes (``targets.cuda.tiles``). The layout itself cannot be
# asked: planning a deep network looks at hundreds of groups of ops, and each would be generated. Without the estimate 55 of 889
# plans changed, and a gradient of six layers took 126 seconds to plan instead of 4.
#
# One warpgroup (a lane) works on a tile of 64 rows, the M of wgmma, in **steps**: one per matmul and per reduction of a row.
# Elementwise ops run in the step that makes their last operand, column block by column block, so only values that a later step
# reads are **kept**: in registers (the accumulator layout, 16-bit values two to a register), or, where these are too few, as an
# image in shared memory. Values at the border of a stage cost nothing: they lie in memory or in a ring, and are read from there.
# ----------------------------------------------------------------------------------------------------------------------------------

# Addresses, loop counters and temporaries of a consumer thread: what the compiled kernels use beside accumulators and fragments.
_WORKING_REGISTERS = 24
_PRODUCT_REGISTERS = 56  # of a product for each row: sums, fragments, addresses (``stage/products.py``)
_ELEMENTWISE_COLUMNS = 32  # what an elementwise loop has in flight: four 16-byte rows of 16-bit values
# Barriers and the alignment of the first swizzled chunk (1024 bytes).
_RESERVED_BYTES = 2 * KIB
_BEAM = 64  # placements that are followed at once; a chain of layers has four
_CHOICES = 6  # values of one step, the largest, that may become images
_REDUCTIONS = frozenset({"reduce", "argreduce"})


@dataclasses.dataclass(frozen=True, slots=True)
class Storage:
    """``image_bytes``: most that images take at once, ``image_traffic``: bytes of images written and read per tile."""

    image_bytes: int
    image_traffic: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    """A value that steps after ``born`` read, up to ``last``; ``reads``: how often all of it is read."""

    value: int
    born: int
    last: int
    registers: int
    image: int
    reads: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """``working``: registers that its own accumulators take; ``done``: the part of its results that stands beside them at most,
    None where a result takes the place of what it was made from."""

    working: int
    done: float | None = None


def shared_bytes(cost: RegionCost, ops: Sequence[int], storage: Storage, lanes: int, weights: int, rings: int) -> int:
    """Shared memory of a CTA: ``weights`` (or the ring they are streamed through), and for every lane its images and ``rings``."""
    return weights + vector_bytes(cost, ops) + lanes * (storage.image_bytes + rings) + _RESERVED_BYTES


class Steps:
    """The steps of a stage and what is kept between them. ``storage(registers, lanes)`` places it, cheapest in shared memory
    first. ``slabs``: in a split stage, what is made in front of all products is shared out as well (a loop)."""

    def __init__(self, cost: RegionCost, ops: Sequence[int], split: int = 1, slabs: bool = False):
        self.cost, self.ops, self.split, self.slabs = cost, tuple(ops), split, slabs
        self.producer = {v: i for i in ops for v in cost.graph.ops[i].outputs}
        self.step: dict[int, int] = {}
        self.steps = [_Step(_ELEMENTWISE_COLUMNS // 2)]
        for i in self.ops:
            self._place(i)
        self.kept = self._kept()
        panels = panel_sums(cost, ops)
        self.sums = sum(2 if i in panels else self._sum_registers(i) for i in ops if i in cost.sinks and cost.work(i).dot is None)
        self.runs = max((self._segment_bytes(i) for i in ops if i in cost.sinks and cost.access(i) is not None), default=0)
        self.products = product_bytes(cost, ops)
        self.storage = functools.lru_cache(maxsize=None)(self._storage)

    def _place(self, i: int) -> None:
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
            self.steps.append(_Step(_PRODUCT_REGISTERS, 1.0))
            return
        columns = tiles.padded(slab(dot.n, self.split))
        chunks = -(-columns // tiles.CHUNK_COLUMNS)
        # A result of one chunk is rounded and packed where it was accumulated; of several, the earlier ones stand beside the last.
        self.steps.append(_Step(min(columns, tiles.CHUNK_COLUMNS) // 2, 1.0 - 1.0 / chunks))

    def root(self, v: int) -> int | None:
        """The value that is kept where ``v`` is needed later: before it was repeated or widened; None for one at the border."""
        cost = self.cost
        while v in self.producer:
            i = self.producer[v]
            if cost.is_maker(i):
                return None
            if cost.looks_up(i):
                return None
            (x,) = cost.graph.ops[i].inputs[:1]
            widens = cost.family(i) == "convert" and cost.row_bytes(v) > cost.row_bytes(x)
            repeats = cost.family(i) in _VIEWS and cost.row_size(v) >= cost.row_size(x)
            cut = cost.family(i) == "slice" and self.root(x) is None
            if not (widens or repeats or cut):
                return v
            v = x
        return None

    def _parts(self, v: int, stacked: frozenset[int]) -> list[int]:
        """What the operand of a product for each row is put together of."""
        i = self.producer.get(v, -1)
        return [p for x in self.cost.graph.ops[i].inputs for p in self._parts(x, stacked)] if i in stacked else [v]

    def _kept(self) -> list[list[_Kept]]:
        """By step in which they are made."""
        reads: dict[int, dict[int, int]] = {}
        stacked = stacked_of(self.cost, self.ops)
        for i in self.ops:
            if self.cost.family(i) in _REDUCTIONS or i in stacked:
                continue  # summed up in the step that makes the operand; or part by part in that of a product for each row
            for v in dict.fromkeys(p for x in self.cost.graph.ops[i].inputs for p in self._parts(x, stacked)):
                root = self.root(v) if self.cost.streamed(v) else None
                if root is not None and self.step[i] > self.step[self.producer[root]]:
                    dot = self.cost.work(i).dot
                    times = -(-tiles.padded(slab(dot.n, self.split)) // tiles.CHUNK_COLUMNS) if dot else 1
                    at = reads.setdefault(root, {})
                    at[self.step[i]] = max(at.get(self.step[i], 0), times)
        made: list[list[_Kept]] = [[] for _ in self.steps]
        for v, at in reads.items():
            born = self.step[self.producer[v]]
            columns = self.cost.row_size(v)
            if born or self.slabs:
                columns = slab(columns, self.split)
            width, how = tiles.padded(columns), form(self.cost.graph.values[v].dtype)
            image = tiles.image_bytes(width, how)
            registers = 2 if columns == 1 else tiles.registers(width, how)
            made[born].append(_Kept(v, born, max(at), registers, image, sum(at.values())))
        return [sorted(values, key=lambda k: (-k.image, k.value)) for values in made]

    def _sum_registers(self, i: int) -> int:
        """A thread has two of every eight columns: a quarter of a column vector in float32, or one sum of two words."""
        if self.cost.access(i) is not None:
            return 1  # of the segment that is open
        columns = sum(self.cost.graph.values[v].size for v in self.cost.graph.ops[i].outputs)
        return 2 if columns == 1 else tiles.padded(columns) // 4

    def _segment_bytes(self, i: int) -> int:
        """Shared memory of a lane for a sink by indices: the block that is folded, and the runs of a tile, or the lane's table."""
        width, access = tiles.padded(self.cost.elements(i)), self.cost.access(i)
        block = tiles.TILE_ROWS * 4 * (tiles.block(width) | 1)
        if isinstance(self.cost, GpuCost) and i in self.cost.unordered:
            return 0 if may_differ(self.cost.graph.ops[i]) else block  # the L2 folds
        if access is not None and not access.near:
            return block + tiles.table_bytes(self.cost.graph.ops[i]["n"], width)
        op = self.cost.graph.ops[i]
        tops = tiles.tops_bytes(self.cost.row_size(op.inputs[2])) if op.kind in ONLINE else 0
        return block + tiles.segment_bytes(width) + tops

    def _gradients(self, lanes: int) -> tuple[int, int, int] | None:
        """(registers of a thread, bytes of a lane's panels, bytes that are written and read per tile); None if one does not fit."""
        registers = panels = traffic = 0
        for dot in gradients_of(self.cost, self.ops):
            half = tiles.is_half(dot.dtype)
            shapes = tiles.gradient_shapes(dot.m, dot.n, half, self.split, lanes)
            if not shapes:
                return None
            rows, columns = (tiles.panel_bytes(tiles.padded(n), half) for n in (shapes[0].rows, shapes[0].columns))
            registers += shapes[0].registers
            panels = max(panels, rows + columns)  # gradients take turns
            traffic += 2 * rows + columns * (1 + shapes[0].all_blocks)
        return registers, panels, traffic

    def _storage(self, registers: int, lanes: int) -> Storage | None:
        """Place every kept value for ``lanes`` of threads of ``registers``: least shared memory first, then least traffic. None if
        none fits."""
        gradients = self._gradients(lanes)
        if gradients is None:
            return None
        best = self._placed(registers - _WORKING_REGISTERS - self.sums - gradients[0])
        shared = best.image_bytes + gradients[1] + self.runs + self.products if best else 0
        return best and Storage(shared, best.image_traffic + gradients[2])

    def _placed(self, budget: int) -> Storage | None:
        """The placements that need least shared memory are followed side by side: to choose the value that makes just room enough,
        step by step, changed 33 of 1600 plans and cost an A100 its pipeline of NeRF."""
        beam: dict[tuple[tuple[_Kept, bool], ...], Storage] = {(): Storage(0, 0)}
        for t, step in enumerate(self.steps):
            following: dict[tuple[tuple[_Kept, bool], ...], Storage] = {}
            for live, so_far in beam.items():
                for places in self._places(t):
                    born = tuple(zip(self.kept[t], places, strict=True))
                    if not self._fits(step, live, born, t, budget):
                        continue
                    images = sum(k.image for k, image in (*live, *born) if image)
                    traffic = sum(k.image * (1 + k.reads) for k, image in born if image)
                    after = tuple((k, image) for k, image in (*live, *born) if k.last > t)
                    found = Storage(max(so_far.image_bytes, images), so_far.image_traffic + traffic)
                    if after not in following or _rank(found) < _rank(following[after]):
                        following[after] = found
            beam = dict(sorted(following.items(), key=lambda item: _rank(item[1]))[:_BEAM])
        return min(beam.values(), key=_rank, default=None)

    def _places(self, t: int) -> list[tuple[bool, ...]]:
        """Which values of step ``t`` become images."""
        small = (False,) * max(0, len(self.kept[t]) - _CHOICES)
        return [(*large, *small) for large in itertools.product((False, True), repeat=len(self.kept[t]) - len(small))]

    def _fits(
        self, step: _Step, live: Sequence[tuple[_Kept, bool]], born: Sequence[tuple[_Kept, bool]], t: int, budget: int
    ) -> bool:
        held = sum(k.registers for k, image in live if not image)
        made = sum(k.registers for k, image in born if not image)
        after = sum(k.registers for k, image in (*live, *born) if not image and k.last > t)
        if step.done is None:
            return max(held, after) + step.working <= budget
        return max(held + step.working + made * step.done, after) <= budget


def _rank(s: Storage) -> tuple[int, int]:
    return s.image_bytes, s.image_traffic


# ----------------------------------------------------------------------------------------------------------------------------------
# How long a tile takes on a GPU: tensor cores, issue slots, shared memory, and what passes between SMs.
#
# Comes in: a ``GpuCost``, the ops of a stage and their ``Storage``. Goes out: ``TileWork``, seconds of one tile of 64 rows on the
# separate engines of an SM, and ``period``, how often an SM with some lanes finishes one. Invariant: engines overlap only across
# lanes; one lane does its matmuls and its epilogues one after the other.
# ----------------------------------------------------------------------------------------------------------------------------------

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
    numbers = [] if len(numbers) == len(alone) else numbers  # a thread has rows of its own (``stage/facts.py``)
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

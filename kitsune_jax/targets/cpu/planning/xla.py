"""Modelled seconds of XLA:CPU for the ops of a region: the baseline of every plan.

Comes in: a ``CpuCost``, or a whole program for ``program_context``. Goes out: seconds of the whole machine and off-chip bytes. A
product is a library kernel at the rate measured for its dtype and shape; anything else is a loop, which takes the time of its ops
for each element and of its moved bytes, on one thread if it is small. The model ranks plans; ``tuning`` times them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence

from kitsune_jax.config import PlannerOptions
from kitsune_jax.ops.graph import Graph, Op, reached
from kitsune_jax.ops.loops import parts
from kitsune_jax.ops.reduce import ONLINE
from kitsune_jax.planning.cost import (
    FREE,
    GATHER,
    ROOTS,
    SCATTER,
    XlaKernel,
    between_kernels,
    folded_into,
    itemsize,
    kernels_of,
    left_region,
)
from kitsune_jax.planning.streams import FEW_ROWS
from kitsune_jax.targets.cpu.call import FlopCounts, count_flops
from kitsune_jax.targets.cpu.planning.cost import CpuCost
from kitsune_jax.targets.cpu.planning.machines import (
    FAMILIES,
    FAULT_THRESHOLD,
    NARROW,
    REGION_ALONE,
    CpuMachine,
    CpuProgramContext,
)

# Batched products smaller than this are loops and not the library's.
_SMALL = 64 * 64
# Dtypes in which XLA folds by index. It folds 16-bit numbers in float32, into zeros, and adds the array to the sums in a loop.
_FOLDED = frozenset({"float32", "float64", "int32", "int64", "uint32", "uint64"})
# An attention's copies in another order of dimensions, over a loop that adds, and products of several heads over those of one: 1.3
# and 2.4, 1.8 and 2.4 (4 queries for each of 2 heads of 2048 keys, JAX 0.12, Zen 5).
_STRIDED, _FEW_OF_BATCH = 2.0, 2.0
_PASSES = {"reduce": 1.0, "argreduce": 4.0, "cumulative": 20.0}  # the time of an element, over that of a sum's
# XLA gives a loop a second thread if it moves this many bytes, or if it has more operations than bytes and its costs (an operation
# 1, a byte 10) come to this: ``parallel_task_assignment.cc``, and confirmed (JAX 0.12).
_SHARED_BYTES, _SHARED_COST, _BYTE_COST = 2 * (256 << 10), 2 * 100_000, 10
# A library product in a step of a loop, on one thread: 8 x 8 x 8 took 310 ns, 64 x 64 x 64 4230 ns. One of a vector, or of less
# than 8 rows and columns of which the library takes no less than 4, is compiled: 1 x 16 x 16 took 39 ns, 1 x 256 x 256 2128 (JAX
# 0.12, float32, a Xeon 6).
_CALLED_SECONDS, _CALLED_PER_TERM = 250e-9, 0.0155e-9
_COMPILED_SECONDS, _COMPILED_PER_TERM, _TINY, _LEAST_COLUMNS = 20e-9, 0.031e-9, 8, 4
# XLA's Threefry is a loop of five steps on one thread that keeps words in memory: a hash took 3 ns in a step of a loop, 5 to 20
# alone (JAX 0.12, Xeon).
_HASHED_BYTES = 40


def baseline(cost: CpuCost) -> tuple[float, int]:
    """(seconds, off-chip bytes) of the region's ops as XLA would run them, one kernel after the other on the whole machine."""
    kernels = kernels_of(cost, folded_into(cost, _FOLDED), _in_front_of_reductions(cost))
    seconds, moved = _kernels_seconds(cost, kernels, cost.program.looped)
    looped, looped_bytes = _loops_baseline(cost)
    fresh = _fault_seconds(cost, kernels) + fault_seconds(cost, cost.outputs, cost.machine.fault_bandwidth)
    return seconds + looped + fresh, moved + looped_bytes


def _in_front_of_reductions(cost: CpuCost) -> set[int]:
    """The values that XLA writes to memory for its library, which computes a reduction with the elementwise operations in front of
    it, but no slices, gathers or the like."""

    def makers(i: int) -> list[int]:
        return [cost.producer[v] for v in cost.graph.ops[i].inputs if v in cost.producer]

    folds = [i for i in cost.region.ops if cost.family(i) == "reduce" and not cost.program.looped]
    fused = {*FAMILIES, *FREE}
    near = reached(folds, lambda i: (maker for maker in makers(i) if cost.family(maker) in fused))
    # Roots have kernels of their own.
    others = {maker for i in near for maker in makers(i) if cost.family(maker) not in fused | ROOTS}
    return {v for maker in others for v in cost.graph.ops[maker].outputs}


def of_ops(graph: Graph, ops: Sequence[int], machine: CpuMachine, program: CpuProgramContext = REGION_ALONE) -> float:
    """Seconds of ``ops`` of ``graph``, in an order in which they can run, one kernel after the other on the whole machine."""
    return baseline(CpuCost(graph, left_region(graph, ops), machine, program=program))[0]


def kernels_of_ops(
    graph: Graph, ops: Sequence[int], machine: CpuMachine, program: CpuProgramContext = REGION_ALONE
) -> list[tuple[Collection[int], float]]:
    """The kernels of ``ops`` of ``graph``, none of them a loop, with the seconds of each on the whole machine, without faults."""
    cost = CpuCost(graph, left_region(graph, ops), machine, program=program)
    kernels = kernels_of(cost, folded_into(cost, _FOLDED), _in_front_of_reductions(cost))
    return [(k.ops, _kernel_seconds(cost, k, k.moved(cost), program.looped)) for k in kernels]


def program_context(graph: Graph, machine: CpuMachine, options: PlannerOptions, body: bool) -> CpuProgramContext:
    """The facts about the program ``graph`` that plans of its regions depend on. XLA has one block for all arrays between the
    kernels of a program; where it is fresh at every call, so is any part of it. ``body``: of a loop, whose kernels start sooner."""
    found = CpuProgramContext(options=options, looped=body, flop_counts=FlopCounts() if body else count_flops(graph))
    if between_kernels(graph) <= found.fresh_bytes:
        return found
    return dataclasses.replace(found, fresh_bytes=0, fresh_seconds=1.0 / machine.fault_bandwidth)


def _kernels_seconds(cost: CpuCost, kernels: Sequence[XlaKernel], looped: bool) -> tuple[float, int]:
    """(seconds, bytes moved). ``looped``: the kernels are those of a loop's body."""
    moved = [k.moved(cost) for k in kernels]
    return sum(_kernel_seconds(cost, k, n, looped) for k, n in zip(kernels, moved, strict=True)), sum(moved)


def _loops_baseline(cost: CpuCost) -> tuple[float, int]:
    """(seconds, off-chip bytes) of all steps of the loops among the ops."""
    seconds, moved = 0.0, 0
    for i in cost.region.ops:
        op = cost.graph.ops[i]
        if op.body is None:
            continue
        body, p = cost.body(i), parts(op)
        each, bytes_each = _kernels_seconds(body, kernels_of(body, folded_into(body, _FOLDED)), looped=True)
        inner, inner_bytes = _loops_baseline(body)
        stored = [v for y, v in zip(p.ys, p.in_ys, strict=True) if _is_stored(cost, y)]
        each += sum(stored_seconds(cost, body.bytes(v)) for v in stored)
        seconds, moved = seconds + op["length"] * (each + inner), moved + op["length"] * (bytes_each + inner_bytes)
    return seconds, moved


def stored_seconds(cost: CpuCost, size: int) -> float:
    """Seconds to store a slice of ``size`` bytes in a step of a loop that XLA runs."""
    return cost.times["xla/while"] + size * cost.times["xla/while/stored"]


def _is_stored(cost: CpuCost, y: int) -> bool:
    """Whether XLA stores a slice of ``y`` in every step; the user's loop has no array of values that the region only sums."""
    return y in cost.outputs or any(cost.family(i) == "loop" for i in cost.readers.get(y, ()))


# --- One kernel -------------------------------------------------------------------------------------------------------------------


def _kernel_seconds(cost: CpuCost, kernel: XlaKernel, moved: int, looped: bool) -> float:
    """``moved``: bytes that the kernel reads and writes. In a step of a loop, kernels without products have one thread, and are
    called instead of scheduled."""
    times, machine, ops = cost.times, cost.machine, kernel.ops
    products = [i for i in ops if cost.family(i) == "dot"]
    in_place = kernel.into is not None and (looped or kernel.into in cost.producer)
    loop = sum(_op_seconds(cost, i, in_place) for i in ops if kernel.into is None or cost.family(i) not in FAMILIES)
    loop += sum(_product_seconds(cost, i, looped) for i in products)
    hashed = sum(_elements(cost, i) for i in ops if cost.graph.ops[i].kind == "threefry2x32")
    one = not products and (looped or hashed > 0 or _is_small(cost, ops, moved))
    moved += int(_HASHED_BYTES * hashed)
    if not products and not any(cost.family(i) in _PASSES or cost.family(i) == SCATTER for i in ops):
        # The rates of products, reductions and scatters include their traffic within the caches.
        loop = (loop + moved * times.xla_moved(near=True)) * (machine.workers if one else 1)
    start = times["xla/while"] if one and looped else 0.0 if looped else machine.kernel_seconds
    # Beyond the last level bytes come from memory, while the core computes.
    beyond = moved * max(0.0, 1.0 - machine.shared_bytes / max(1, moved)) * times.xla_moved(near=False)
    # XLA folds by index on one thread, which waits for its rows.
    if any(cost.family(i) == SCATTER for i in ops):
        return start + loop + beyond * machine.workers
    return start + max(loop, beyond)


def _elements(cost: CpuCost, i: int) -> float:
    """Elements that op ``i`` computes. Two ops that each take a word of the same hash share one; a power by a fixed integer is
    some multiplications."""
    op, size = cost.graph.ops[i], cost.graph.values[cost.graph.ops[i].outputs[0]].size
    if op.kind == "threefry2x32" and op["word"] != "xor":
        return 0.5 * size
    if op.kind == "integer_pow":
        return size * max(1.0, abs(op["y"]).bit_length() + abs(op["y"]).bit_count() - 2)
    return size


def _is_small(cost: CpuCost, ops: Collection[int], moved: int) -> bool:
    """Whether XLA gives a loop of ``ops``, which reads and writes ``moved`` bytes, only one thread."""
    flops = sum(_elements(cost, i) for i in ops if cost.family(i) in FAMILIES)
    return moved < _SHARED_BYTES if flops <= moved else flops + _BYTE_COST * moved < _SHARED_COST


def _op_seconds(cost: CpuCost, i: int, in_place: bool = False) -> float:
    """Seconds of op ``i`` outside of products. ``in_place``: it folds into an existing array."""
    op, family, times = cost.graph.ops[i], cost.family(i), cost.times
    dtype = cost.graph.values[op.inputs[0] if op.inputs else op.outputs[0]].dtype
    if family in FAMILIES:
        return _elements(cost, i) * times.xla_op(op.kind, dtype)
    if family in _PASSES:
        value = cost.graph.values[op.inputs[0]]
        dimensions = _reduced_dimensions(op, value.shape) if family == "reduce" else "row"
        return _PASSES[family] * value.size * times.xla_reduce(dtype, dimensions)
    if family in (GATHER, SCATTER):
        # The dimensions behind the indexed one are the row that an index moves.
        rows, table = (op.outputs[0], op.inputs[0]) if family == GATHER else (op.inputs[0], op.outputs[0])
        width = math.prod(cost.graph.values[table].shape[op["axis"] + 1 :])
        reach = 0 if family == SCATTER and op["sorted"] else cost.bytes(table)  # in sorted order the next row is near
        # One thread writes the identity to the whole result first: 100 rows of 16 and 64 numbers into 10 000 took 33 and 185 us,
        # into 10 of them 8 and 9 (Xeon with AMX).
        first = times.written(cost.bytes(table)) if family == SCATTER and not in_place else 0.0
        elements = cost.graph.values[rows].size
        if family == SCATTER:
            first += elements * times.rounded(cost.graph.values[rows].dtype)
        return first + times.xla_rows(family, elements / max(1, width), width, reach) + _scaling_seconds(cost, i)
    return 0.0


def _reduced_dimensions(op: Op, shape: tuple[int, ...]) -> str:
    """The dimensions with more than one element that ``op`` reduces: "row" (trailing), "column" (leading), "middle", "all"."""
    over = [d in op["axes"] for d, n in enumerate(shape) if n > 1]
    if all(over) or over[0] and over[-1]:
        return "all"
    return "column" if over[0] else "row" if over[-1] else "middle"


def _scaling_seconds(cost: CpuCost, i: int) -> float:
    """Seconds of XLA for an online sum before it adds up: the largest scores, which are taken again, exponentials, products."""
    op, times = cost.graph.ops[i], cost.times
    if op.kind not in ONLINE:
        return 0.0
    values, scores = cost.graph.values[op.inputs[0]], cost.graph.values[op.inputs[2]]
    seconds = values.size * times.xla_op("mul", values.dtype)
    if cost.first_of_scores(i):
        width = math.prod(scores.shape[1:])
        rows, reach = scores.size / max(1, width), op["n"] * width * itemsize(scores.dtype)
        seconds += times.xla_rows(SCATTER, rows, width, reach) + times.xla_rows(GATHER, rows, width, reach)
        seconds += scores.size * times.xla_op("exp", scores.dtype)
    return seconds


def _product_seconds(cost: CpuCost, i: int, looped: bool) -> float:
    op, times = cost.graph.ops[i], cost.times
    lhs, rhs = (cost.graph.values[v] for v in op.inputs)
    batch = math.prod(lhs.shape[d] for d in op["lhs_batch"])
    k = math.prod(lhs.shape[d] for d in op["lhs_contract"])
    m, n = (value.size // max(1, batch * k) for value in (lhs, rhs))
    few = min(m, n) <= FEW_ROWS and max(m, n) * k >= _SMALL
    if batch > 1 and m * n < _SMALL and not few:
        return times.xla_batched(lhs.dtype) * batch * m * n * k
    moved = [value for side, value in enumerate((lhs, rhs)) if _needs_copy(cost, op, side)]
    copied = sum(_STRIDED * times[f"xla/loop/move/{v.dtype if v.dtype in NARROW else 'float32'}"] * v.size for v in moved)
    form = "dot"
    if 0 in op["lhs_contract"] and 0 in op["rhs_contract"] and min(len(lhs.shape), len(rhs.shape)) > 1:
        form = "outer"
    elif len(rhs.shape) - 1 in op["rhs_contract"]:
        form = "dot_t"
    apart = _FEW_OF_BATCH if batch > 1 and few else 1.0
    shared = copied + times.xla_dot(lhs.dtype, m, k, n, form, apart * batch)
    if not looped:
        return shared
    if min(m, k, n) == 1 or max(m, k, n) < _TINY and min(k, max(m, n)) < _LEAST_COLUMNS:
        return _COMPILED_SECONDS + batch * m * k * n * _COMPILED_PER_TERM
    return min(cost.machine.kernel_seconds + shared, _CALLED_SECONDS + batch * m * k * n * _CALLED_PER_TERM)


def _needs_copy(cost: CpuCost, op: Op, side: int) -> bool:
    """Whether the batch dimensions of an array in memory are moved to the front, where the library reads them."""
    v, batch = op.inputs[side], op[("lhs_batch", "rhs_batch")[side]]
    value = cost.graph.values[v]
    others = [n for d, n in enumerate(value.shape) if d < max(batch, default=0) and d not in batch]
    if math.prod(others) == 1:
        return False
    while v in cost.producer and cost.graph.ops[cost.producer[v]].kind == "reshape":  # another name of the same array
        v = cost.graph.ops[cost.producer[v]].inputs[0]
    # Computed operands are written in the product's order, but an update stays in the order of its array.
    return v not in cost.producer or cost.graph.ops[cost.producer[v]].kind == "dynamic_update_slice"


# --- Fresh pages ------------------------------------------------------------------------------------------------------------------


def _kept_bytes(cost: CpuCost) -> int:
    """The size up to which arrays of a region are not counted as fresh pages. Without products memory binds both sides: sums into
    DLRM's tables, with Adam, took 1.1 to 1.6 times as long as XLA's where small arrays counted as well."""
    return cost.program.fresh_bytes if any(cost.family(i) == "dot" for i in cost.region.ops) else FAULT_THRESHOLD


def fault_seconds(cost: CpuCost, outputs: Iterable[int], bandwidth: float) -> float:
    """Seconds of the first touch of result buffers, which XLA allocates at every call, for a pipeline as well."""
    return sum(cost.bytes(v) for v in outputs if cost.bytes(v) > _kept_bytes(cost)) / bandwidth


def _fault_seconds(cost: CpuCost, kernels: list[XlaKernel]) -> float:
    """Seconds of the first touch of XLA's temporaries, which share one block as large as the most that is alive at once.

    Temporaries that fit into the result buffers lie there first, and a loop without a matmul or a reduction reuses a dead operand.
    """
    last = {v: k for k, kernel in enumerate(kernels) for v in kernel.reads}
    alive: dict[int, int] = {}
    unread: list[int] = []  # written by the previous kernel, and not read in the region
    total = most = 0
    for k, kernel in enumerate(kernels):
        in_place = not any(cost.family(i) in ROOTS or cost.family(i) == "dot" for i in kernel.ops)
        dying = [v for v in (*unread, *kernel.reads) if v in alive and last.get(v, k) <= k and v not in cost.outputs]
        size = cost.bytes(kernel.root)
        replaces = in_place and any(cost.bytes(v) == size for v in dying)
        most = max(most, total if replaces else total + size)
        alive[kernel.root] = size
        total += size - sum(alive.pop(v) for v in dying)
        unread = [kernel.root] if kernel.root not in last else []
    most -= sum(cost.bytes(v) for v in cost.outputs)
    return most / cost.machine.fault_bandwidth if most > _kept_bytes(cost) else 0.0

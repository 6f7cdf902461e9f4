"""Modelled seconds of XLA:CPU for the ops of a region: the baseline of every plan.

Comes in: a ``CpuCost``, or a whole program for ``program_context``. Goes out: seconds of the whole machine and off-chip bytes. A
product is a library kernel at the rate measured for its dtype and shape; anything else is a loop, which takes the time of its ops
for each element and of its moved bytes.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from kitsune_jax.ops.graph import Graph, Op
from kitsune_jax.ops.loops import parts
from kitsune_jax.ops.reduce import ONLINE
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import (
    FREE,
    GATHER,
    ROOTS,
    SCATTER,
    RegionCost,
    XlaKernel,
    between_kernels,
    folded_into,
    itemsize,
    kernels_of,
    left_region,
)
from kitsune_jax.planning.streams import FEW_ROWS
from kitsune_jax.targets.cpu.call import count_flops
from kitsune_jax.targets.cpu.planning.cost import CpuCost
from kitsune_jax.targets.cpu.planning.machines import FAULT_THRESHOLD, REGION_ALONE, CpuMachine, CpuProgramContext
from kitsune_jax.targets.cpu.planning.xla_kernels import (
    FAMILIES,
    IN_16_BITS,
    IN_32_BITS,
    NARROW,
    LoopStepCosts,
    RowKernels,
    hashes,
    instructions,
    is_function,
    reduces_in_library,
    row_kernels,
    scalar_seconds,
    sizes,
    steps_of,
)

# --- Sums and maxima that XLA hands to its library, YNNPACK (as the optimized HLO of some 300 programs says, JAX 0.12) ------------

# Dtypes in which the library computes; a loop in front of it converts float16 numbers, and computes them.
_COMPUTED = frozenset({"float32", "bfloat16", "float64"})
# Elementwise operations that the library does not have. Comparisons and readers of masks are left out by their dtype.
_NOT_FUSED = frozenset({"clamp", "select_n", "is_finite", "cbrt"})


def reduced_dimensions(op: Op, shape: tuple[int, ...]) -> str:
    """The dimensions with more than one element that ``op`` reduces: "row" (trailing), "column" (leading), "middle", "all"."""
    over = [d in op["axes"] for d, n in enumerate(shape) if n > 1]
    if all(over) or over[0] and over[-1]:
        return "all"
    return "column" if over[0] else "row" if over[-1] else "middle"


def arrays(cost: RegionCost) -> set[int]:
    """The values that XLA writes to memory for the library's reductions: those that other kernels read as well, and those that the
    library cannot compute, such as slices."""
    graph, found = cost.graph, set[int]()
    for root in cost.region.ops:
        if reduces_in_library(graph, graph.ops[root]):
            found |= _in_front_of(graph, root, cost.producer, cost.readers, cost.outputs)[1]
    return found


def unwritten(graph: Graph) -> frozenset[int]:
    """The values of a whole program that XLA never writes to memory: its library computes them in front of a reduction."""
    producers, consumers, found = graph.producers(), graph.consumers(), set[int]()
    for root, op in enumerate(graph.ops):
        if reduces_in_library(graph, op):
            fused, _ = _in_front_of(graph, root, producers, consumers, graph.outputs)
            found.update(v for i in fused for v in graph.ops[i].outputs)
    return frozenset(found)


def _in_front_of(
    graph: Graph, root: int, producers: Mapping[int, int], readers: Mapping[int, Collection[int]], results: Container[int]
) -> tuple[set[int], set[int]]:
    """The ops that the library computes in front of the reduction ``root``, and the arrays that it reads and other ops make.

    The library takes a reduction of 4096 numbers or more together with the elementwise operations whose results nothing else reads.
    """
    inside, written = {root}, set[int]()
    work = [-producers[v] for v in graph.ops[root].inputs if v in producers]
    while work:  # last op first: readers of a value before its maker
        i = -heapq.heappop(work)
        op = graph.ops[i]
        if i in inside or not written.isdisjoint(op.outputs):
            continue
        alone = all(v not in results and inside.issuperset(readers.get(v, ())) for v in op.outputs)
        if alone and _is_fused(graph, op):
            inside.add(i)
            for v in op.inputs:
                if v in producers:
                    heapq.heappush(work, -producers[v])
        elif op.kind == "opaque" or OPS[op.kind].family not in FREE:
            written.update(op.outputs)
    return inside - {root}, written


def _is_fused(graph: Graph, op: Op) -> bool:
    if op.kind == "opaque" or OPS[op.kind].family not in (*FAMILIES, *FREE) or op.kind in _NOT_FUSED:
        return False
    return all(graph.values[v].dtype in _COMPUTED for v in (*op.inputs, *op.outputs))


def reduction_seconds(cost: CpuCost, kernel: XlaKernel, root: int, moved: int) -> float:
    """Seconds of the reduction ``root`` with all other ops of its ``kernel``, which moves ``moved`` bytes within the caches. All
    threads share a reduction tile by tile; each fused operation is a pass over a tile in cache. A sum's square is free."""
    times, graph, op = cost.times, cost.graph, cost.graph.ops[root]
    value = graph.values[op.inputs[0]]
    # A loop in front of the kernel has converted computed float16 numbers to float32.
    home = "float32" if value.dtype == "float16" and op.inputs[0] in cost.producer else value.dtype
    home = next((d for d in (graph.values[v].dtype for v in kernel.reads) if d == "bfloat16"), home)
    square = _square(cost, op, kernel.ops)
    found = value.size * times.xla_reduce(home, reduced_dimensions(op, value.shape), squares=square is not None)
    found *= 2.0 if value.dtype == "float64" else 1.0
    found += passes_seconds(cost, (i for i in kernel.ops if i != square))
    # The rate of a reduction includes reading one operand.
    more = moved - value.size * min((itemsize(graph.values[v].dtype) for v in kernel.reads), default=0)
    return found + max(0, more) * times.xla_moved(near=True)


def passes_seconds(cost: CpuCost, ops: Iterable[int]) -> float:
    """Seconds of the elementwise ones of ``ops``, each of which is a pass over a tile in the library."""
    times, found = cost.times, 0.0
    for i in ops:
        op, value = cost.graph.ops[i], cost.graph.values[cost.graph.ops[i].outputs[0]]
        if cost.family(i) == "pointwise":
            each = times.xla_pass(value.dtype) * (2.0 if value.dtype == "float64" else 1.0)
            found += value.size * (each + (times.fused.op(op.kind, value.dtype) if is_function(op.kind) else 0.0))
    return found


def _square(cost: CpuCost, op: Op, ops: Collection[int]) -> int | None:
    """The one of ``ops`` that squares the operand of the sum ``op``; the library has a kernel for sums of squares."""
    i = cost.producer.get(op.inputs[0], -1)
    if i in ops and cost.family(i) == "convert":  # XLA does not round a product that is widened
        i = cost.producer.get(cost.graph.ops[i].inputs[0], -1)
    if op.kind != "reduce_sum" or i not in ops:
        return None
    made = cost.graph.ops[i]
    power = made.kind == "integer_pow" and made["y"] == 2
    return i if power or made.kind == "square" or made.kind == "mul" and made.inputs[0] == made.inputs[1] else None


def library_reduction(cost: CpuCost, kernel: XlaKernel) -> int | None:
    """The only reduction of ``kernel``, if the library computes it; else None."""
    found = [i for i in kernel.ops if cost.family(i) == "reduce"]
    return found[0] if len(found) == 1 and reduces_in_library(cost.graph, cost.graph.ops[found[0]]) else None


# --- The baseline -----------------------------------------------------------------------------------------------------------------

# Batched products smaller than this are loops and not the library's.
_SMALL = 64 * 64
_SHORT_ROW = 16
# The compiler unrolls a loop over a row of at most this many instructions, counting those around the operations, and then does not
# vectorise it: with up to 28, 14 and 10 operations rows of 8, 12 and 16 were slow (JAX 0.12, float32).
_UNROLLED, _AROUND = 305, 9
# Dtypes in which XLA folds by index. It folds 16-bit numbers in float32, into zeros, and adds the array to the sums in a loop.
_FOLDED = frozenset({"float32", "float64", "int32", "int64", "uint32", "uint64"})
# An attention's copies in another order of dimensions, over a loop that adds, and products of several heads over those of one: 1.3
# and 2.4, 1.8 and 2.4 (4 queries for each of 2 heads of 2048 keys, JAX 0.12, Zen 5).
_STRIDED, _FEW_OF_BATCH = 2.0, 2.0
# XLA's Threefry is a loop of five steps on one thread that keeps words in memory: a hash took 3 ns in a step of a loop, 5 to 20
# alone; a word of an rbg key took 3.6 to 9.5 ns in a step of a loop, 18 alone (JAX 0.12, Xeon).
_HASHED_BYTES, _RBG_ALONE = 40, 3.5
_PASSES = {"reduce": 1.0, "argreduce": 4.0, "cumulative": 20.0}


def baseline(cost: CpuCost) -> tuple[float, int]:
    """(seconds, off-chip bytes) of the region's ops as XLA would run them, one kernel after the other on the whole machine."""
    if cost.program.row_kernels.hold(cost.region.ops):
        return _row_kernels_baseline(cost, cost.program.row_kernels)
    kernels = kernels_of(cost, folded_into(cost, _FOLDED), arrays(cost) if cost.program.steps is None else ())
    hidden = [k for k in kernels if k.root in cost.program.unwritten.intersection(cost.outputs)]
    seconds, moved = _kernels_seconds(cost, [k for k in kernels if k not in hidden], cost.program.steps)
    # Hidden kernels are a part of a reduction behind the region, which reads the region's result instead of their operands.
    seconds += sum(passes_seconds(cost, k.ops) for k in hidden)
    looped, looped_bytes = _loops_baseline(cost)
    seconds, moved = seconds + looped, moved + looped_bytes
    written = [v for v in cost.outputs if v not in cost.program.unwritten]
    return seconds + _fault_seconds(cost, kernels) + fault_seconds(cost, written, cost.machine.fault_bandwidth), moved


def _row_kernels_baseline(cost: CpuCost, rows: RowKernels) -> tuple[float, int]:
    """``baseline`` of a region inside of kernels over rows, whose inner values are never in memory."""
    read = sum(cost.read_bytes(v) for v in cost.region.inputs if v not in rows.between)
    written = [v for v in cost.outputs if v not in rows.between]
    moved = read + sum(map(cost.bytes, written))
    seconds = sum(_op_seconds(cost, i) for i in cost.region.ops) + moved * cost.times.xla_moved(near=True)
    fresh = fault_seconds(cost, written, cost.machine.fault_bandwidth)
    dtypes = [cost.graph.values[v].dtype for i in cost.region.ops for v in cost.graph.ops[i].outputs]
    rate = IN_16_BITS if "bfloat16" in dtypes else IN_32_BITS
    return (cost.machine.kernel_seconds if written else 0.0) + rate * seconds + fresh, moved


def of_ops(graph: Graph, ops: Sequence[int], machine: CpuMachine, program: CpuProgramContext = REGION_ALONE) -> float:
    """Seconds of ``ops`` of ``graph``, in an order in which they can run, one kernel after the other on the whole machine."""
    return baseline(CpuCost(graph, left_region(graph, ops), machine, program=program))[0]


def _kernels_seconds(
    cost: CpuCost, kernels: Sequence[XlaKernel], steps: LoopStepCosts | None = None, slices: Collection[int] = ()
) -> tuple[float, int]:
    """(seconds, bytes moved). ``steps``: set for kernels of a loop's body; ``slices``: the body's slices of arrays."""
    moved = [k.moved(cost) for k in kernels]
    return sum(_kernel_seconds(cost, k, n, steps, slices) for k, n in zip(kernels, moved, strict=True)), sum(moved)


def _loops_baseline(cost: CpuCost) -> tuple[float, int]:
    """(seconds, off-chip bytes) of all steps of the loops among the ops."""
    seconds, moved = 0.0, 0
    for i in cost.region.ops:
        op = cost.graph.ops[i]
        if op.body is None:
            continue
        body, p = cost.body(i), parts(op)
        steps = steps_of(body.graph, cost.machine.profile)
        each, bytes_each = _kernels_seconds(body, kernels_of(body, folded_into(body, _FOLDED)), steps, frozenset(p.in_xs))
        inner, inner_bytes = _loops_baseline(body)
        stored = [v for y, v in zip(p.ys, p.in_ys, strict=True) if _is_stored(cost, y)]
        each += sum(steps.kernel + body.bytes(v) * cost.times["xla/while/stored"] for v in stored)
        seconds, moved = seconds + op["length"] * (each + inner), moved + op["length"] * (bytes_each + inner_bytes)
    return seconds, moved


def program_context(graph: Graph, machine: CpuMachine, body: bool) -> CpuProgramContext:
    """The facts about the program ``graph`` that plans of its regions depend on. XLA has one block for all arrays between the
    kernels of a program; where it is fresh at every call, so is any part of it. ``body``: of a loop, whose kernels start sooner."""
    if body:
        found = CpuProgramContext(steps=steps_of(graph, machine.profile))
    else:
        found = CpuProgramContext(row_kernels=row_kernels(graph), flop_counts=count_flops(graph), unwritten=unwritten(graph))
    if between_kernels(graph) <= found.fresh_bytes:
        return found
    return dataclasses.replace(found, fresh_bytes=0, fresh_seconds=1.0 / machine.fault_bandwidth)


def _is_stored(cost: CpuCost, y: int) -> bool:
    """Whether XLA stores a slice of ``y`` in every step; the user's loop has no array of values that the region only sums."""
    return y in cost.outputs or any(cost.family(i) == "loop" for i in cost.readers.get(y, ()))


def _kept_bytes(cost: CpuCost) -> int:
    """The size up to which arrays of a region are not counted as fresh pages. Without products memory binds both sides: sums into
    DLRM's tables, with Adam, took 1.1 to 1.6 times as long as XLA's where small arrays counted as well."""
    return cost.program.fresh_bytes if any(cost.family(i) == "dot" for i in cost.region.ops) else FAULT_THRESHOLD


def fault_seconds(cost: CpuCost, outputs: Iterable[int], bandwidth: float) -> float:
    """Seconds of the first touch of result buffers, which XLA allocates at every call, for a pipeline as well."""
    return sum(cost.bytes(v) for v in outputs if cost.bytes(v) > _kept_bytes(cost)) / bandwidth


def _kernel_seconds(cost: CpuCost, kernel: XlaKernel, moved: int, steps: LoopStepCosts | None, slices: Collection[int]) -> float:
    """``moved``: bytes that the kernel reads and writes. ``steps``: set in a step of a loop. Its kernels without products have one
    thread (up to 16 MB were tried), are called instead of scheduled, and find the last step's arrays in the caches, except slices
    of the loop's arrays, which products copy first."""
    times, machine, ops, root = cost.times, cost.machine, kernel.ops, kernel.root
    products, looped = [i for i in ops if cost.family(i) == "dot"], steps is not None
    in_place = _is_in_place(cost, kernel)
    reduction = None if looped else library_reduction(cost, kernel)
    if reduction is not None:
        far = max(0, moved - machine.shared_bytes) * times.xla_moved(near=False)
        return machine.kernel_seconds + max(reduction_seconds(cost, kernel, reduction, moved), far)
    loop = sum(_op_seconds(cost, i, in_place) for i in ops if cost.family(i) not in ("dot", *FAMILIES))
    if kernel.into is None:  # else its one operation is the scatter's fold
        loop += times.fused.kernel(cost, ops)
    if looped:
        functions = sum(is_function(cost.graph.ops[i].kind) for i in ops)
        loop = max(loop, functions * _scalar_seconds(cost, ops, root) / machine.workers)
    elif _is_uneven(cost, ops, root):
        loop *= times.uneven(cost.graph.values[root].dtype)
    if not looped:
        words = sum(_size(cost, i) for i in ops if cost.graph.ops[i].kind == "philox4x32")
        loop += (_RBG_ALONE - 1) * words * times.fused.op("philox4x32", "uint32")
    loop += sum(_product_seconds(cost, i) for i in products)
    cut = [v for v in kernel.reads if v in slices]
    hashed = sum(_size(cost, i) * hashes(cost.graph.ops[i]) for i in ops if cost.graph.ops[i].kind == "threefry2x32")
    one = looped and not products or hashed > 0 or times.fused.one_thread(cost, ops, moved)
    moved += int(_HASHED_BYTES * hashed)
    called = looped and one
    from_arrays = sum(map(cost.bytes, cut)) * times["xla/while/slices"] + (times["xla/while"] * len(cut) if products else 0.0)
    start = steps.kernel if steps is not None and called else machine.kernel_seconds
    if steps is not None and products:
        start, loop = 0.0, _looped_products(cost, products, steps, start + loop)
    if not products and not any(cost.family(i) in _PASSES or cost.family(i) == SCATTER for i in ops):
        # The rates of products, reductions and scatters include their traffic within the caches.
        if called and moved <= machine.local_bytes:
            moved -= sum(map(cost.bytes, cut))
            loop = loop * machine.workers + moved * times["xla/while/moved"]
        else:
            of_ops = of_moves = 1.0
            if one and not looped and moved <= machine.local_bytes and cost.program.flop_counts.is_of(cost.graph):
                of_ops, of_moves = times.xla_near(cost.graph.values[v].dtype for v in (root, *kernel.reads))
            # Kernels of a part of a program run beside others, and XLA's threads share them out: eight updates of 256 x 256
            # bfloat16 numbers took 27 us each, one alone 43 (Xeon with AMX).
            alone = looped or cost.program.flop_counts.is_of(cost.graph)
            loop = (of_ops * loop + of_moves * moved * times.xla_moved(near=True)) * (machine.workers if one and alone else 1)
    elif not looped and _sums_computed_values(cost, ops):
        # The measured reductions read an array. This one computes its operand on one thread.
        loop = (loop + moved * times.xla_moved(near=True)) * machine.workers
    # Beyond the last level bytes come from memory, while the core computes.
    beyond = moved * max(0.0, 1.0 - machine.shared_bytes / max(1, moved))
    # XLA folds by index on one thread, which waits for its rows.
    if any(cost.family(i) == SCATTER for i in ops):
        return start + loop + beyond * times.xla_moved(near=False) * machine.workers + from_arrays
    return start + from_arrays + max(loop, beyond * times.xla_moved(near=False))


def _size(cost: CpuCost, i: int) -> int:
    return cost.graph.values[cost.graph.ops[i].outputs[0]].size


def _is_in_place(cost: CpuCost, kernel: XlaKernel) -> bool:
    """Whether a scatter folds into an array in place: a carry of a loop, or another kernel's result. XLA copies any other first."""
    if kernel.into is None:
        return False
    looped = cost.program.steps is not None if cost.carried is None else kernel.root in cost.carried
    return looped or kernel.into in cost.producer


def _sums_computed_values(cost: CpuCost, ops: Collection[int]) -> bool:
    """Whether ``ops`` sum their own results over the rows, or over everything, too few or integers for the library."""
    over_rows = any(cost.family(i) == "reduce" and 0 in cost.graph.ops[i]["axes"] for i in ops)
    return over_rows and any(cost.family(i) == "pointwise" for i in ops)


def _scalar_seconds(cost: CpuCost, ops: Collection[int], root: int) -> float:
    """Seconds of one thread for an elementary function in a step of a loop that XLA compiles to scalar code, else 0. Kernels with a
    reduction are vectorised: log-sum-exp of [37, 6, 6] took 1.1 ns an element (JAX 0.12, Xeon with AMX)."""
    value = cost.graph.values[root]
    return 0.0 if any(cost.family(i) in _PASSES for i in ops) else value.size * scalar_seconds(value.shape)


def _is_uneven(cost: CpuCost, ops: Collection[int], root: int) -> bool:
    """Whether ``ops`` are a loop over rows shorter than a vector, not shared evenly by XLA's threads, with a broadcast."""
    shape = cost.graph.values[root].shape
    if len(shape) < 2 or not 1 < shape[-1] <= _SHORT_ROW or math.prod(shape[:-1]) % cost.machine.workers == 0:
        return False
    if shape[-1] * (_AROUND + instructions(cost, ops)) > _UNROLLED:
        return False
    spread = [cost.graph.ops[i].inputs[0] for i in ops if cost.graph.ops[i].kind == "broadcast_in_dim"]
    return any(cost.graph.values[v].size > 1 for v in spread)


def _op_seconds(cost: CpuCost, i: int, in_place: bool = False) -> float:
    """Seconds of op ``i`` outside of fused loops and products. ``in_place``: it folds into an existing array."""
    op, family, times = cost.graph.ops[i], cost.family(i), cost.times
    dtype = cost.graph.values[op.inputs[0] if op.inputs else op.outputs[0]].dtype
    if family in _PASSES:
        value = cost.graph.values[op.inputs[0]]
        dimensions = reduced_dimensions(op, value.shape) if family == "reduce" else "row"
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
    if family not in FAMILIES:
        return 0.0
    return cost.graph.values[op.outputs[0]].size * times.fused.op(op.kind, dtype)


def _scaling_seconds(cost: CpuCost, i: int) -> float:
    """Seconds of XLA for an online sum before it adds up: the largest scores, which are taken again, exponentials, products."""
    op, times = cost.graph.ops[i], cost.times
    if op.kind not in ONLINE:
        return 0.0
    values, scores = cost.graph.values[op.inputs[0]], cost.graph.values[op.inputs[2]]
    seconds = values.size * times.fused.op("mul", values.dtype)
    if cost.first_of_scores(i):
        width = math.prod(scores.shape[1:])
        rows, reach = scores.size / max(1, width), op["n"] * width * itemsize(scores.dtype)
        seconds += times.xla_rows(SCATTER, rows, width, reach) + times.xla_rows(GATHER, rows, width, reach)
        seconds += scores.size * times.fused.op("exp", scores.dtype)
    return seconds


def _product_seconds(cost: CpuCost, i: int) -> float:
    op, times = cost.graph.ops[i], cost.times
    lhs, rhs = (cost.graph.values[v] for v in op.inputs)
    m, k, n, batch = sizes(cost.graph, op)
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
    return copied + times.xla_dot(lhs.dtype, m, k, n, form, apart * batch)


def _looped_products(cost: CpuCost, products: Sequence[int], steps: LoopStepCosts, shared: float) -> float:
    """Seconds of a kernel of products in a step of a loop. ``shared``: its seconds where the library shares it out.

    One thread copies operands into the product's order: with keys of 256 x 4 heads of 32 for each of 4 a step took 30 to 35 us, and
    7 without copies (JAX 0.12, Xeon with AMX).
    """
    seconds = 0.0
    for i in products:
        op = cost.graph.ops[i]
        dtype = cost.graph.values[op.inputs[0]].dtype
        if dtype not in ("float32", "float64"):  # not measured
            return shared
        seconds += steps.product_seconds(*sizes(cost.graph, op)) * (2.0 if dtype == "float64" else 1.0)
        if not steps.compiled:
            seconds += sum(cost.times.written(cost.bytes(op.inputs[side])) for side in range(2) if _needs_copy(cost, op, side))
    return seconds if steps.compiled else min(seconds, shared)


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

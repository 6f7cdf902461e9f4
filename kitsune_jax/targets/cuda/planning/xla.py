"""Model of XLA:GPU, the bulk-synchronous baseline: modelled seconds and off-chip bytes.

Comes in: a ``GpuCost``, or ops of a Graph and a machine. Goes out: XLA's kernels (``kernels_of``), their seconds, and the bytes
that they move (``baseline``). Invariant: they run one after the other on the whole machine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kitsune_jax.ops.graph import Graph
from kitsune_jax.ops.reduce import ONLINE
from kitsune_jax.planning import cost as xla_kernels
from kitsune_jax.planning.cost import ROOTS, SCATTER, XlaKernel, left_region
from kitsune_jax.planning.plan import NO_CONTEXT, ProgramContext
from kitsune_jax.targets.cuda.planning.cost import LOOP_EFFICIENCY, GpuCost, atomic_bytes, loops_of
from kitsune_jax.targets.cuda.planning.machines import GpuMachine

# The least that a kernel takes. On an H200 (2026-11-26) those of a few KB take 0.8 to 2 us, a step of an LSTM or a GRU 10 to 12.5.
_LEAST_SECONDS = 1e-6
_SUMS_SHARE = 0.35  # of the memory's bandwidth, that sums over the rows reach: 262 144 rows of 256, with a mask, in 184 us
# L2 bandwidth, in bytes, of its atomic addition of a 16-bit float, a loop of compare-and-swap: the same scatter of 198 000 rows of
# 128 takes 327 us in bfloat16, and many times that where rows of one segment come together.
_HALF_ATOMIC_BYTES = 80
_EPILOGUE = 2  # operations per element that XLA:GPU still passes to the GEMM library as an epilogue: a bias and a ReLU


def baseline(cost: GpuCost) -> tuple[float, int]:
    """(seconds, off-chip bytes) of the region's ops as XLA runs them, one kernel after the other on the whole machine."""
    machine = cost.machine
    seconds = 0.0
    total = 0
    for steps, body in loops_of(cost, cost.region.ops):
        each, bytes_each = baseline(body)  # of a step, beside one kernel for the counter and slices of the loop
        seconds, total = seconds + steps * (each + machine.kernel_seconds + _LEAST_SECONDS), total + steps * bytes_each
    for kernel in kernels_of(cost):
        if not kernel.ops.isdisjoint(cost.step_sums):
            continue  # JAX's loop carries these sums; its steps add to them
        took, moved = _kernel_seconds(cost, kernel)
        seconds, total = seconds + took, total + moved
    for i in cost.region.ops:
        kernels, moved, folded = _scaling(cost, i)
        total += moved
        traffic = max(moved / machine.bandwidth(moved), folded / machine.shared_bandwidth)
        seconds += kernels * machine.kernel_seconds + traffic
    return seconds, total


def _kernel_seconds(cost: GpuCost, kernel: XlaKernel) -> tuple[float, int]:
    """(seconds, off-chip bytes) of a kernel."""
    machine, moved = cost.machine, kernel.moved(cost)
    folded = sum(_folded_bytes(cost, i) for i in kernel.ops)
    sums = any(i in cost.sinks and cost.family(i) == "reduce" for i in kernel.ops)
    traffic = max(moved / machine.bandwidth(moved) / (_SUMS_SHARE if sums else 1.0), folded / machine.shared_bandwidth)
    compute = sum(_library_seconds(cost, i) for i in kernel.ops) / machine.workers
    return machine.kernel_seconds + max(compute, traffic, _LEAST_SECONDS), moved  # a GPU overlaps the two


def kernels_of_ops(
    graph: Graph, ops: Sequence[int], machine: GpuMachine, program: ProgramContext = NO_CONTEXT
) -> list[tuple[Collection[int], float]]:
    """The kernels of ``ops`` of ``graph``, none of them a loop, with the seconds of each."""
    cost = GpuCost(graph, left_region(graph, ops), machine, program=program)
    return [(kernel.ops, _kernel_seconds(cost, kernel)[0]) for kernel in kernels_of(cost)]


def of_ops(graph: Graph, ops: Sequence[int], machine: GpuMachine, program: ProgramContext = NO_CONTEXT) -> float:
    """Seconds of ``ops`` of ``graph``, in topological order, one kernel after the other on the whole machine."""
    return baseline(GpuCost(graph, left_region(graph, ops), machine, program=program))[0]


def _scaling(cost: GpuCost, i: int) -> tuple[int, int, int]:
    """(kernels, bytes moved, bytes of atomic operations) to scale the rows of a softmax sum ``i``. All sums by the same scores
    share two kernels: the largest scores, and the exponentials. The kernel that makes the rows multiplies them."""
    op = cost.graph.ops[i]
    if op.kind not in ONLINE:
        return 0, 0, 0
    scores = cost.bytes(op.inputs[2])
    if not cost.first_of_scores(i):
        return 0, scores, 0
    largest = cost.graph.values[op.inputs[2]].size // max(1, cost.region.space.rows) * op["n"]
    return 2, 4 * scores + 3 * 4 * largest, 8 * cost.graph.values[op.inputs[2]].size + 4 * largest


def _folded_bytes(cost: GpuCost, i: int) -> int:
    """Bytes that op ``i`` moves through the L2 if it folds rows into a table: XLA fills the table, and then reads and writes it
    with a 32-bit atomic operation for every element."""
    if cost.family(i) != SCATTER:
        return 0
    op = cost.graph.ops[i]
    folded = cost.graph.values[op.inputs[0]]
    each = _HALF_ATOMIC_BYTES if folded.dtype in ("bfloat16", "float16") else atomic_bytes(op, folded.dtype)
    return each * folded.size + 4 * cost.graph.values[op.outputs[0]].size


def kernels_of(cost: GpuCost) -> list[XlaKernel]:
    """XLA's kernels. Light pointwise kernels are fused, as epilogues, into the matmul whose result only they read."""
    kernels = xla_kernels.kernels_of(cost)
    of_root = {k.root: k for k in kernels}
    dropped: set[int] = set()
    for kernel in kernels:
        if any(cost.family(i) in ROOTS for i in kernel.ops):
            continue
        size = cost.graph.values[kernel.root].size
        if sum(cost.work(i).simt for i in kernel.ops) * cost.region.space.rows > _EPILOGUE * size:
            continue
        for v in kernel.reads:
            dot = of_root.get(v)
            if dot is None or v in cost.outputs or v in dropped or cost.graph.values[v].size != size:
                continue
            only_here = set(cost.readers.get(v, ())) <= kernel.ops
            if only_here and any(cost.family(i) == "dot" for i in dot.ops):
                kernel.ops |= dot.ops
                kernel.reads = tuple(dict.fromkeys((*dot.reads, *(r for r in kernel.reads if r != v))))
                dropped.add(v)
                break
    return [k for k in kernels if k.root not in dropped]


def _library_seconds(cost: GpuCost, i: int) -> float:
    """Seconds of one worker for all of op ``i`` in XLA's code."""
    work, machine, op = cost.work(i), cost.machine, cost.graph.ops[i]
    if work.dot is None:
        # The size of the value, not rows x row size: XLA does not repeat an op along stream axes that its value lacks.
        share = max(1, cost.row_size(op.outputs[0])) * cost.region.space.rows
        whole = work.simt * cost.region.space.rows * min(1.0, cost.graph.values[op.outputs[0]].size / share or 1.0)
        if i in cost.sinks:
            whole = work.simt * cost.region.space.rows
        return whole / (machine.rate(machine.simt_rates, work.dtype) * LOOP_EFFICIENCY)
    flops = float(work.flops) * cost.region.space.rows
    return flops / machine.rate(machine.tensor_rates, work.dot.dtype)

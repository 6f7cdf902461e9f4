"""What XLA would do with the ops of a region: the bulk-synchronous baseline.

Comes in: a ``RegionCost``. Goes out: ``baseline``, modelled seconds and off-chip bytes. The model of XLA's fusion: a value is
written to memory where its op is a matmul, a reduction or a scan, where it leaves the region, where a matmul or scan reads it, and
where it is expensive and read twice; everything else is computed again inside the kernels that need it. Nothing fuses across
matmuls.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from kitsune_jax.ops.table import OPS
from kitsune_jax.planning import bulk_cpu
from kitsune_jax.planning.cost import RegionCost

_ROOTS = frozenset({"dot", "reduce", "argreduce", "cumulative"})
_VIEWS = frozenset({"reshape", "transpose"})
# XLA does not compute an op of this many operations twice to save a round trip (its list: divide, exp, log, tanh, power, ...).
_EXPENSIVE = 4
# Operations per element that XLA:GPU still hands to the GEMM library as an epilogue: a bias and a ReLU.
_EPILOGUE = 2


@dataclasses.dataclass
class Kernel:
    """One kernel of the bulk-synchronous program: ``ops`` run in it, ``reads`` come from memory, ``root`` is written."""

    root: int
    ops: frozenset[int]
    reads: tuple[int, ...]
    writes: bool = True


def baseline(cost: RegionCost) -> tuple[float, int]:
    """(seconds, off-chip bytes) of the region's ops as XLA would run them, one kernel after the other on the whole machine."""
    machine = cost.machine
    kernels = kernels_of(cost)
    if machine.profile is not None:
        seconds = sum(bulk_cpu.kernel_seconds(cost, k.ops, k.root, _moved(cost, k)) for k in kernels)
        return seconds + _fault_seconds(cost, kernels) + output_fault_seconds(cost), sum(_moved(cost, k) for k in kernels)
    seconds = 0.0
    total = 0
    for kernel in kernels:
        moved = _moved(cost, kernel)
        total += moved
        near = moved <= machine.shared_bytes // 2  # what the last kernel wrote is still in the shared cache
        traffic = moved / (max(machine.shared_bandwidth, machine.dram_bandwidth) if near else machine.dram_bandwidth)
        compute = sum(_library_seconds(cost, i) for i in kernel.ops) / machine.workers
        seconds += machine.kernel_seconds + max(compute, traffic)  # a GPU overlaps the two
    return seconds + _fault_seconds(cost, kernels) + output_fault_seconds(cost), total


def _moved(cost: RegionCost, kernel: Kernel) -> int:
    return sum(cost.bytes(v) for v in kernel.reads) + (cost.bytes(kernel.root) if kernel.writes else 0)


def output_fault_seconds(cost: RegionCost) -> float:
    """First touch of the result buffers: XLA allocates them at every call, for a pipeline as well."""
    fresh = sum(cost.bytes(v) for v in cost.outputs if cost.bytes(v) > cost.machine.fault_threshold)
    return fresh / cost.machine.fault_bandwidth


def kernels_of(cost: RegionCost) -> list[Kernel]:
    """The kernels, in order, each rooted at a value that is written to memory."""
    written = _written(cost)
    while True:
        kernels = [_kernel(cost, v, written) for i in cost.region.ops for v in cost.graph.ops[i].outputs if v in written]
        again = _expensive_twice(cost, kernels)
        if not again:
            break
        written |= again
    return _with_epilogues(cost, kernels) if cost.machine.platform == "cuda" else kernels


def _expensive_twice(cost: RegionCost, kernels: Sequence[Kernel]) -> set[int]:
    """Values of expensive ops that several kernels would compute for themselves, by way of cheap ones that read them."""
    seen = collections.Counter(i for kernel in kernels for i in kernel.ops if kernel.root not in cost.graph.ops[i].outputs)
    return {
        cost.graph.ops[i].outputs[0]
        for i, count in seen.items()
        if count > 1 and cost.family(i) == "pointwise" and OPS[cost.graph.ops[i].kind].flops >= _EXPENSIVE
    }


def _written(cost: RegionCost) -> set[int]:
    written = set(cost.outputs)
    for i in cost.region.ops:
        op, family = cost.graph.ops[i], cost.family(i)
        if family in _ROOTS:
            written.update(op.outputs)
        if family in ("dot", "cumulative"):
            written.update(w for v in op.inputs if (w := _behind_views(cost, v)) in cost.producer)
        if family == "pointwise" and OPS[op.kind].flops >= _EXPENSIVE and len(cost.readers.get(op.outputs[0], ())) > 1:
            written.update(op.outputs)
    return written


def _behind_views(cost: RegionCost, v: int) -> int:
    """The value that is really in memory when ``v`` is read by a matmul: reshapes are free, transposes are its layout."""
    while v in cost.producer and v not in cost.outputs and cost.family(cost.producer[v]) in _VIEWS:
        v = cost.graph.ops[cost.producer[v]].inputs[0]
    return v


def _kernel(cost: RegionCost, root: int, written: set[int]) -> Kernel:
    ops: set[int] = set()
    reads: dict[int, None] = {}
    work = [cost.producer[root]]
    while work:
        i = work.pop()
        if i in ops:
            continue
        ops.add(i)
        matmul = cost.family(i) in ("dot", "cumulative")
        for v in cost.graph.ops[i].inputs:
            v = _behind_views(cost, v) if matmul else v
            if v in cost.producer and v not in written:
                work.append(cost.producer[v])
            elif cost.graph.values[v].literal is None:
                reads[v] = None
    return Kernel(root, frozenset(ops), tuple(reads))


def _with_epilogues(cost: RegionCost, kernels: list[Kernel]) -> list[Kernel]:
    """Light pointwise kernels folded into the matmul whose result only they read."""
    of_root = {k.root: k for k in kernels}
    dropped: set[int] = set()
    for kernel in kernels:
        if any(cost.family(i) in _ROOTS for i in kernel.ops):
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


def _library_seconds(cost: RegionCost, i: int) -> float:
    """Worker-seconds of op ``i`` over its whole output in XLA's code."""
    work, machine, op = cost.work(i), cost.machine, cost.graph.ops[i]
    if work.dot is None:
        # The whole value, not rows x row size: bulk-synchronously an op that misses some stream axes is not repeated along them.
        share = max(1, cost.row_size(op.outputs[0])) * cost.region.space.rows
        whole = work.simt * cost.region.space.rows * min(1.0, cost.graph.values[op.outputs[0]].size / share or 1.0)
        if i in cost.sinks:
            whole = work.simt * cost.region.space.rows
        return whole / (machine.rate(machine.simt_rates, work.dtype) * machine.library_simt)
    flops = float(work.flops) * cost.region.space.rows
    return flops / machine.rate(machine.library_rates, work.dot.dtype)


def _fault_seconds(cost: RegionCost, kernels: list[Kernel]) -> float:
    """First touch of the temporaries: XLA puts all of a program's into one block, so its size is the most that is alive at once.

    What fits into the result buffers before the results are written lies there, and a loop without a matmul or a reduction in it
    writes over an operand that nobody reads after it.
    """
    last = {v: k for k, kernel in enumerate(kernels) for v in kernel.reads}
    alive: dict[int, int] = {}
    unread: list[int] = []  # written by the kernel before, for nobody in the region
    total = most = 0
    for k, kernel in enumerate(kernels):
        in_place = not any(cost.family(i) in _ROOTS or cost.family(i) == "dot" for i in kernel.ops)
        dying = [v for v in (*unread, *kernel.reads) if v in alive and last.get(v, k) <= k and v not in cost.outputs]
        size = cost.bytes(kernel.root)
        replaces = in_place and any(cost.bytes(v) == size for v in dying)
        most = max(most, total if replaces else total + size)
        alive[kernel.root] = size
        total += size - sum(alive.pop(v) for v in dying)
        unread = [kernel.root] if kernel.root not in last else []
    most -= sum(cost.bytes(v) for v in cost.outputs)
    return most / cost.machine.fault_bandwidth if most > cost.machine.fault_threshold else 0.0

"""Sums and maxima that XLA:CPU hands to its library (YNNPACK), with what the library computes in front of them.

Comes in: the costs of a region, or a whole program. Goes out: ``arrays``, what XLA writes to memory because the library cannot
compute it; ``unwritten``, what it never writes because the library does; and ``reduction_seconds`` of a kernel that ends in such a
reduction. The library takes a reduction of 4096 numbers or more together with the elementwise operations whose results nothing else
reads. All threads share them out tile by tile, and each operation is a pass over a tile in the first caches: so a fused operation
costs its time beside memory and no passage of the array. The square of a sum of squares costs nothing, because the library has a
kernel for both. All of this is as the optimized HLO of some 300 programs says (JAX 0.12).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Container, Iterable, Mapping

from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import FREE, RegionCost, itemsize
from kitsune_jax.planning.xla_kernels import Kernel
from kitsune_jax.targets.cpu.planning.cost import CpuCost
from kitsune_jax.targets.cpu.planning.xla_fused import FAMILIES, is_function
from kitsune_jax.targets.cpu.planning.xla_loops import reduces_in_library

# Dtypes in which the library computes: numbers of float16 are converted in a loop in front of it, and so is what they are made of.
_COMPUTED = frozenset({"float32", "bfloat16", "float64"})
# Elementwise operations that the library does not have. Comparisons and what reads masks are left out by their dtype.
_NOT_FUSED = frozenset({"clamp", "select_n", "is_finite", "cbrt"})


def reduced_dimensions(op: Op, shape: tuple[int, ...]) -> str:
    """Over which dimensions ``op`` reduces an array of ``shape``: "row" (trailing ones), "column" (leading), "middle" or "all".
    Dimensions of one element are none."""
    over = [d in op["axes"] for d, n in enumerate(shape) if n > 1]
    if all(over) or over[0] and over[-1]:
        return "all"
    return "column" if over[0] else "row" if over[-1] else "middle"


def arrays(cost: RegionCost) -> set[int]:
    """The values that XLA writes to memory for the reductions of a region: those that other kernels read as well, and what the
    library cannot compute, such as the slices of a difference of neighbours."""
    graph, found = cost.graph, set[int]()
    for root in cost.region.ops:
        if cost.family(root) == "reduce" and reduces_in_library(graph, graph.ops[root]):
            found |= _in_front_of(graph, root, cost.producer, cost.readers, cost.outputs)[1]
    return found


def unwritten(graph: Graph) -> frozenset[int]:
    """The values of a whole program that are never in memory where XLA runs it: its library computes them in front of a sum."""
    producers, consumers, found = graph.producers(), graph.consumers(), set[int]()
    for root, op in enumerate(graph.ops):
        if op.kind != "opaque" and reduces_in_library(graph, op):
            fused, _ = _in_front_of(graph, root, producers, consumers, graph.outputs)
            found.update(v for i in fused for v in graph.ops[i].outputs)
    return frozenset(found)


def _in_front_of(
    graph: Graph, root: int, producers: Mapping[int, int], readers: Mapping[int, Collection[int]], results: Container[int]
) -> tuple[set[int], set[int]]:
    """The ops that the library computes in front of the reduction ``root``, and the arrays that it reads and other ops make."""
    inside, written = {root}, set[int]()
    work = [-producers[v] for v in graph.ops[root].inputs if v in producers]
    while work:  # the last op first: who reads a value stands behind who makes it
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


def reduction_seconds(cost: CpuCost, kernel: Kernel, root: int, moved: int) -> float:
    """What the reduction ``root`` takes with all other ops of its ``kernel``, which reads and writes ``moved`` bytes, as far as the
    caches hold these."""
    times, graph, op = cost.times, cost.graph, cost.graph.ops[root]
    value = graph.values[op.inputs[0]]
    # What a loop in front of the kernel has made of numbers of float16 is there in float32.
    home = "float32" if value.dtype == "float16" and op.inputs[0] in cost.producer else value.dtype
    home = next((d for d in (graph.values[v].dtype for v in kernel.reads) if d == "bfloat16"), home)
    square = _square(cost, op, kernel.ops)
    found = value.size * times.xla_reduce(home, reduced_dimensions(op, value.shape), squares=square is not None)
    found *= 2.0 if value.dtype == "float64" else 1.0
    found += passes_seconds(cost, (i for i in kernel.ops if i != square))
    # The rate of a reduction has the reading of one operand in it.
    more = moved - value.size * min((itemsize(graph.values[v].dtype) for v in kernel.reads), default=0)
    return found + max(0, more) * times.xla_moved(near=True)


def passes_seconds(cost: CpuCost, ops: Iterable[int]) -> float:
    """What the elementwise ones of ``ops`` take, each of which is a pass over a tile in the library."""
    times, found = cost.times, 0.0
    for i in ops:
        op, value = cost.graph.ops[i], cost.graph.values[cost.graph.ops[i].outputs[0]]
        if cost.family(i) == "pointwise":
            each = times.xla_pass(value.dtype) * (2.0 if value.dtype == "float64" else 1.0)
            found += value.size * (each + (times.fused.op(op.kind, value.dtype) if is_function(op.kind) else 0.0))
    return found


def _square(cost: CpuCost, op: Op, ops: Collection[int]) -> int | None:
    """The one of ``ops`` that makes the squares that the sum ``op`` is of."""
    i = cost.producer.get(op.inputs[0], -1)
    if i in ops and cost.family(i) == "convert":  # XLA leaves out the rounding of a product that is widened
        i = cost.producer.get(cost.graph.ops[i].inputs[0], -1)
    if op.kind != "reduce_sum" or i not in ops:
        return None
    made = cost.graph.ops[i]
    power = made.kind == "integer_pow" and made["y"] == 2
    return i if power or made.kind == "square" or made.kind == "mul" and made.inputs[0] == made.inputs[1] else None


def library_reduction(cost: CpuCost, kernel: Kernel) -> int | None:
    """The reduction that the library computes in ``kernel``; None where there is none, or more than one."""
    found = [i for i in kernel.ops if cost.family(i) == "reduce"]
    (root, *others) = found or [-1]
    return root if root >= 0 and not others and reduces_in_library(cost.graph, cost.graph.ops[root]) else None

"""What XLA would do with the ops of a region: the kernels that it would run one after the other.

Comes in: a ``RegionCost``. Goes out: ``kernels_of``, of which each target makes its baseline, modelled seconds and off-chip bytes;
and ``left_region``, by which it does so of ops that no region has.
The model of XLA's fusion: a value is written to memory where its op is a matmul, a reduction or a scan, where it leaves the region,
where a matmul, a scan or a scatter reads it, and where it is expensive and read twice; everything else, rows taken from a table
included, is computed again inside the kernels that need it. Nothing fuses across matmuls and scatters. A scatter whose sums are
added to an array folds into that array.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Container, Mapping, Sequence
from types import MappingProxyType

from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.spec import DTYPES
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import GATHER, SCATTER, RegionCost, itemsize
from kitsune_jax.streams.space import Region, StreamSpace

ROOTS = frozenset({"dot", "reduce", "argreduce", "cumulative", "loop", SCATTER})
# Kernels of their own, whose operands are in memory. The kernels of a loop are those of its body.
_ALONE = frozenset({"dot", "cumulative", "loop", SCATTER})
_NONE: Mapping[int, int] = MappingProxyType({})
_VIEWS = frozenset({"reshape", "transpose"})
# XLA does not compute an op of this many operations twice to save a round trip (its list: divide, exp, log, tanh, power, ...).
_EXPENSIVE = 4


@dataclasses.dataclass
class Kernel:
    """One kernel of the bulk-synchronous program: ``ops`` run in it, ``reads`` come from memory, ``root`` is written. ``into``: the
    array that a scatter folds its rows into, instead of zeros: ``root`` is that array then."""

    root: int
    ops: frozenset[int]
    reads: tuple[int, ...]
    into: int | None = None

    def moved(self, cost: RegionCost) -> int:
        """Bytes that the kernel reads and writes. An update of a part of an array is written in place."""
        updated = [cost.graph.ops[i] for i in self.ops if cost.graph.ops[i].kind == "dynamic_update_slice"]
        if updated and self.root in updated[0].outputs:
            return 2 * cost.bytes(updated[0].inputs[1])
        if self.into is not None:
            rows = next(cost.graph.ops[i].inputs[0] for i in self.ops if cost.family(i) == SCATTER)
            return sum(cost.read_bytes(v) for v in self.reads if v != self.into) + 2 * cost.bytes(rows)
        readers: dict[int, list[Op]] = {}
        for op in (cost.graph.ops[i] for i in self.ops):
            for v in op.inputs:
                readers.setdefault(v, []).append(op)
        return sum(_read(cost, v, readers.get(v, ())) for v in self.reads) + cost.bytes(self.root)


def _read(cost: RegionCost, v: int, readers: Sequence[Op]) -> int:
    """Of an array that the ``readers`` of a kernel only take rows of, or a slice at a computed place, no more than these: pages of
    a pool in the steps of a loop. Plain slices count whole: mostly all parts of such an array are read."""
    whole = cost.read_bytes(v)
    if not readers or not all(_is_partly(op) and v not in op.inputs[1:] for op in readers):
        return whole
    return min(whole, sum(cost.bytes(op.outputs[0]) for op in readers))


def _is_partly(op: Op) -> bool:
    return op.kind == "dynamic_slice" or OPS[op.kind].family == GATHER


def kernels_of(cost: RegionCost, into: Mapping[int, int] = _NONE, arrays: Collection[int] = ()) -> list[Kernel]:
    """The kernels, in order, each rooted at a value that is written to memory. ``into``: as ``folded_into`` says, of a target for
    which that is known. ``arrays``: values that are written on such a target beside those that are on all of them."""
    written = _written(cost, into).union(arrays)
    while True:
        kernels = [
            _kernel(cost, v, written, into)
            for i in cost.region.ops
            if cost.family(i) != "loop"
            for v in cost.graph.ops[i].outputs
            if v in written
        ]
        again = _expensive_twice(cost, kernels)
        if not again:
            break
        written |= again
    return kernels


def folded_into(cost: RegionCost, dtypes: Container[str]) -> dict[int, int]:
    """value -> the array that it is but for some rows: ``x + sums`` where nothing else reads the sums, which are folded by index,
    is one scatter into ``x`` to XLA, where it sums ``dtypes`` in themselves. The gradient of what the steps of a loop take of an
    array is such a carry."""
    found: dict[int, int] = {}
    for i in cost.region.ops:
        (v, *_), (reader, *others) = cost.graph.ops[i].outputs, cost.readers.get(cost.graph.ops[i].outputs[0], [-1])
        if cost.graph.ops[i].kind != "scatter_sum" or cost.graph.values[v].dtype not in dtypes or reader < 0 or others:
            continue
        add = cost.graph.ops[reader]
        if add.kind != "add" or v in cost.outputs or add.outputs[0] in found or add.inputs[0] == add.inputs[1]:
            continue
        (x,) = (w for w in add.inputs if w != v)
        if cost.graph.values[x].shape == cost.graph.values[v].shape:
            found[add.outputs[0]] = x
    return found


def left_region(graph: Graph, ops: Sequence[int]) -> Region:
    """``ops`` of ``graph``, in an order in which they can run, as a region over which nothing streams: what is left to XLA."""
    made = {v for i in ops for v in graph.ops[i].outputs}
    inside = set(ops)
    read = {v for i, op in enumerate(graph.ops) if i not in inside for v in op.inputs} | set(graph.outputs)
    inputs = dict.fromkeys(v for i in ops for v in graph.ops[i].inputs if v not in made and graph.values[v].literal is None)
    outputs = tuple(v for i in ops for v in graph.ops[i].outputs if v in read)
    return Region(StreamSpace((1,)), tuple(ops), (), tuple(inputs), outputs)


def _expensive_twice(cost: RegionCost, kernels: Sequence[Kernel]) -> set[int]:
    """Values of expensive ops that several kernels would compute for themselves, by way of cheap ones that read them."""
    seen = collections.Counter(i for kernel in kernels for i in kernel.ops if kernel.root not in cost.graph.ops[i].outputs)
    return {
        cost.graph.ops[i].outputs[0]
        for i, count in seen.items()
        if count > 1 and cost.family(i) == "pointwise" and OPS[cost.graph.ops[i].kind].flops >= _EXPENSIVE
    }


def between_kernels(graph: Graph) -> int:
    """About the most bytes that are alive at once of arrays between the kernels of a whole program: what products, reductions,
    scatters and loops make or read, and what is read twice."""
    consumers, results = graph.consumers(), set(graph.outputs)
    written: dict[int, int] = {}  # value -> the op that makes it
    for i, op in enumerate(graph.ops):
        root = op.kind == "opaque" or OPS[op.kind].family in ROOTS
        for v in op.outputs:
            readers = [graph.ops[c] for c in consumers.get(v, ())]
            alone = any(r.kind == "opaque" or OPS[r.kind].family in _ALONE for r in readers)
            known = graph.values[v].dtype in DTYPES  # others, such as tokens, belong to opaque ops
            if known and readers and v not in results and (root or alone or len(readers) > 1):
                written[v] = i
    change = [0] * (len(graph.ops) + 1)
    for v, i in written.items():
        size = graph.values[v].size * itemsize(graph.values[v].dtype)
        change[i] += size
        change[max(consumers[v]) + 1] -= size
    return max(itertools.accumulate(change))


def _written(cost: RegionCost, into: Mapping[int, int]) -> set[int]:
    written = {*cost.outputs, *into, *(v for v in into.values() if v in cost.producer)}
    for i in cost.region.ops:
        op, family = cost.graph.ops[i], cost.family(i)
        if family == SCATTER and any(out in into for r in cost.readers.get(op.outputs[0], ()) for out in cost.graph.ops[r].outputs):
            written.update(w for v in op.inputs if (w := _behind_views(cost, v)) in cost.producer)
            continue
        if family in ROOTS:
            written.update(op.outputs)
        if family in _ALONE:
            written.update(w for v in op.inputs if (w := _behind_views(cost, v)) in cost.producer)
        if family == "pointwise" and OPS[op.kind].flops >= _EXPENSIVE and len(cost.readers.get(op.outputs[0], ())) > 1:
            written.update(op.outputs)
    return written


def _behind_views(cost: RegionCost, v: int) -> int:
    """The value that is really in memory when ``v`` is read by a kernel of one op: reshapes are free, transposes are its layout."""
    while v in cost.producer and v not in cost.outputs and cost.family(cost.producer[v]) in _VIEWS:
        v = cost.graph.ops[cost.producer[v]].inputs[0]
    return v


def _kernel(cost: RegionCost, root: int, written: set[int], into: Mapping[int, int]) -> Kernel:
    ops: set[int] = set()
    reads: dict[int, None] = {}
    work = [cost.producer[root]]
    while work:
        i = work.pop()
        if i in ops:
            continue
        ops.add(i)
        alone = cost.family(i) in _ALONE
        for v in cost.graph.ops[i].inputs:
            v = _behind_views(cost, v) if alone else v
            if v in cost.producer and v not in written:
                work.append(cost.producer[v])
            elif cost.graph.values[v].literal is None:
                reads[v] = None
    return Kernel(root, frozenset(ops), tuple(reads), into.get(root))

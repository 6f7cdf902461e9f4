"""Costs of the ops of a region on any target (``RegionCost``), and the kernels that XLA would run for them (``kernels_of``).

Comes in: a Graph, a Region of it and a Machine. Goes out: operations, rows and bytes of single ops; ``pipeline_traffic``, the bytes
that a pipeline cannot avoid; and XLA's kernels one after the other. Each target derives its own cost class, with seconds. Only
shapes, dtypes and the machine's numbers are read, never a clock.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Self

import numpy as np

from kitsune_jax.ops.graph import Graph, Op, quick
from kitsune_jax.ops.loops import body_of, labels_inside, live_inside, parts
from kitsune_jax.ops.reduce import ONLINE
from kitsune_jax.ops.spec import DTYPES
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.plan import NO_CONTEXT, Machine, ProgramContext
from kitsune_jax.planning.streams import Region, StreamSpace, row_shape

# --- Operations, rows and bytes ---------------------------------------------------------------------------------------------------

# Operators, by their labels, that add up an array of each device.
SUMS_OVER_DEVICES = frozenset({"psum", "psum2", "psum_invariant", "reduce_scatter"})


def all_reduce_seconds(n: float, devices: int, network: tuple[float, float]) -> float:
    """Seconds to add up ``n`` bytes of each device along a ring or a binomial tree, whichever is faster, with messages of
    ``latency + bytes / bandwidth`` (Thakur, Rabenseifner, Gropp, IJHPCA 19, 2005).

    >>> all_reduce_seconds(8e6, 8, (1e-5, 1e9))
    0.01414
    """
    latency, bandwidth = network
    ring = 2 * (devices - 1) * (latency + n / devices / bandwidth)
    return min(ring, 2 * (devices - 1).bit_length() * (latency + n / bandwidth))


# Families whose result is a view of their operand, or is made on the fly by its readers.
FREE = frozenset({"broadcast", "reshape", "iota"})
# Families that copy, at half an element operation for each element moved.
COPIES = frozenset({"concatenate", "slice", "pad", "rev", "transpose"})
SCANS = frozenset({"reduce", "argreduce", "cumulative"})
GATHER, SCATTER = "gather", "scatter"


@functools.cache
def itemsize(dtype: str) -> int:
    """Bytes of one element. NumPy has no names of its own for bfloat16 and the 8-bit floats.

    >>> itemsize("bfloat16"), itemsize("float32")
    (2, 4)
    """
    if dtype == "bfloat16":
        return 2
    return 1 if dtype.startswith("float8") else np.dtype(dtype).itemsize


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


@dataclasses.dataclass(frozen=True, slots=True)
class DotWork:
    """A matmul per row: ``batch`` products of (rows * m, k) with (k, n); if ``per_row``, both operands depend on the row, and each
    row has ``batch`` products of (m, k) with (k, n).
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    per_row: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """The rows of a table that an op reads, or folds into it, by streamed indices.

    ``count`` rows of ``row_bytes`` for each row of the stream, of a table of ``table_bytes``. ``folds``: folds them in. ``near``:
    the indices never decrease along the stream, so each row is the previous one, or the next one in memory.
    """

    count: int
    row_bytes: int
    table_bytes: int
    folds: bool
    near: bool


@quick
@dataclasses.dataclass(frozen=True, slots=True)
class OpWork:
    """One op on one row. ``flops``: useful operations. ``simt``: vector operations. ``dot``: set for matmuls only."""

    flops: int
    simt: float
    dtype: str
    dot: DotWork | None = None
    multiplies: bool = False  # a loop with a matmul in its body

    @property
    def resource(self) -> str:
        return "simt" if self.dot is None and not self.multiplies else "tensor"


class RegionCost(abc.ABC):
    """Costs of the ops of one region, each computed once.

    A **row** is one index of the stream space. An op is charged for every row even if its values depend on some stream axes only.

    ``work(i)`` is the op's work per row; ``tile_seconds(i, rows)`` the time of one tile of ``rows`` rows on one worker.
    ``is_maker(i)``: the op reads nothing streamed, so its readers each compute it, and no queue carries its result.
    ``row_size(v)``: elements of a row, or of all of a stationary value; ``row_bytes(v)``: bytes of one row of a streamed value.
    ``absorbed(i)``: a bias, a ReLU or a part of another activation that the matmul before it applies to its accumulators for free.
    ``access(i)``: its reads or folds by streamed indices, or None. ``tables``: the stationary values that are read by rows only;
    they are never laid out for the call, and may have any size. ``order``: the indices (a graph value) in whose order the rows
    stream. ``program``: the one around the region. ``carried``: of a loop's body, the values that a step passes to the next; None
    elsewhere. ``labels``: of values that depend on the rows of a batch; ``of_batch``: of values that depend on batch axes only,
    counted as stationary, by the batch.
    """

    def __init__(
        self, graph: Graph, region: Region, machine: Machine, order: int | None = None, program: ProgramContext = NO_CONTEXT
    ):
        self.graph, self.region, self.machine, self.order, self.program = graph, region, machine, order, program
        self.of_batch = {v: axes for v, axes in region.labels if region.space.of_batch(axes)}
        self.labels = {v: axes for v, axes in region.labels if v not in self.of_batch}
        self.streamed = self.labels.__contains__
        self.family = functools.cache(self._family)
        self.members = frozenset(region.ops)
        self.outputs = frozenset(region.outputs)
        self.producer = {v: i for i in region.ops for v in graph.ops[i].outputs}
        self.readers: dict[int, list[int]] = {}
        for i in region.ops:
            for v in dict.fromkeys(graph.ops[i].inputs):
                self.readers.setdefault(v, []).append(i)
        self.sinks = frozenset(region.sinks)
        self.tables = frozenset(v for v in region.inputs if v not in self.labels and v not in self.of_batch and self._is_table(v))
        self.access = functools.cache(self._access)
        self.work = functools.cache(self._work)
        self._bodies: dict[int, Self] = {}
        self.carried: frozenset[int] | None = None
        self.row_size = functools.cache(self._row_size)
        self.row_bytes = functools.cache(self._row_bytes)
        self.absorbed = functools.cache(self._absorbed)
        self.is_maker = functools.cache(self._is_maker)

    @abc.abstractmethod
    def tile_seconds(self, i: int, rows: int) -> float:
        """Seconds of op ``i`` on one tile of ``rows`` rows, on one worker."""

    def body(self, i: int) -> Self:
        """The costs of one step of loop ``i``."""
        if i not in self._bodies:
            self._bodies[i] = self._body(i)
        return self._bodies[i]

    def for_graph(self, graph: Graph, region: Region) -> Self:
        """The costs of another graph on the same machine, such as the body of a loop."""
        return type(self)(graph, region, self.machine, program=self.program)

    def _body(self, i: int) -> Self:
        op = self.graph.ops[i]
        body = body_of(op)
        labels = labels_inside(OPS, op, [self.labels.get(v) for v in (*op.inputs, *op.outputs)])
        live = live_inside(op, [v in self.outputs or v in self.readers for v in op.outputs])
        ops = tuple(k for k, inner in enumerate(body.ops) if not live.isdisjoint(inner.outputs))
        made = {v for k in ops for v in body.ops[k].outputs}
        region = Region(
            space=self.region.space,
            ops=ops,
            labels=tuple(labels.items()),
            inputs=tuple(v for v in body.inputs if v in live),
            outputs=tuple(v for v in dict.fromkeys(body.outputs) if v in live and v in made),
        )
        found = self.for_graph(body, region)
        found.carried = frozenset(parts(op).in_next)
        return found

    def loops(self) -> Iterator[tuple[int, frozenset[int], Self]]:
        """(steps, the constants as values of the body, costs of the body) of each loop of the region."""
        for i in self.region.ops:
            op = self.graph.ops[i]
            if op.body is not None:
                yield op["length"], frozenset(parts(op).in_consts), self.body(i)

    def sliced(self) -> frozenset[int]:
        """Values in memory of which a loop of the region reads or writes a slice in every step. (In a step of an outer loop, the
        values of all steps of an inner loop are in the tile.)"""
        return self._sliced if self.carried is None else self._sliced.intersection(self.region.inputs)

    @functools.cached_property
    def _sliced(self) -> frozenset[int]:
        loops = [parts(self.graph.ops[i]) for i in self.region.ops if self.graph.ops[i].body is not None]
        return frozenset(v for p in loops for v in (*p.xs, *p.ys))

    def _is_maker(self, i: int) -> bool:
        return not any(v in self.labels for v in self.graph.ops[i].inputs)

    def _row_size(self, v: int) -> int:
        return math.prod(row_shape(self.graph.values[v].shape, self.labels.get(v, self.of_batch.get(v))))

    def _row_bytes(self, v: int) -> int:
        return self.row_size(v) * itemsize(self.graph.values[v].dtype)

    def bytes(self, v: int) -> int:
        """Bytes of the whole value; literals have none."""
        value = self.graph.values[v]
        return 0 if value.literal is not None else value.size * itemsize(value.dtype)

    def _family(self, i: int) -> str:
        return OPS[self.graph.ops[i].kind].family

    def _is_table(self, v: int) -> bool:
        return all(self.looks_up(i) and self.graph.ops[i].inputs[1] != v for i in self.readers.get(v, ()))

    def looks_up(self, i: int) -> bool:
        """Whether op ``i`` reads rows of a stationary array by streamed indices."""
        op = self.graph.ops[i]
        return self.family(i) == GATHER and op.inputs[1] in self.labels and op.inputs[0] not in self.labels

    def _access(self, i: int) -> Access | None:
        op = self.graph.ops[i]
        folds = i in self.sinks and self.family(i) == SCATTER
        if not folds and not self.looks_up(i):
            return None
        rows, table = (op.inputs[0], op.outputs[0]) if folds else (op.outputs[0], op.inputs[0])
        count = max(1, self.row_size(op.inputs[1]))
        if self.order is None:
            near = folds and bool(op["sorted"])
        elif folds:
            near = op.inputs[1] == self.order
        else:
            near = self.source(op.inputs[1]) == self.source(self.order)
        return Access(count, self.row_bytes(rows) // count, self.bytes(table), folds, near)

    def first_of_scores(self, i: int) -> bool:
        """Whether op ``i`` is the first online sum in the region that reads its scores."""
        ops = self.graph.ops
        if ops[i].kind not in ONLINE:
            return False
        return i == min(j for j in self.region.ops if ops[j].kind in ONLINE and ops[j].inputs[1:] == ops[i].inputs[1:])

    def source(self, ids: int) -> int:
        """The value that indices are computed from: without conversions, reshapes, and the wrapping of negative indices.

        Indices of one source are in the same order, except those out of range.
        """
        while ids in self.producer:
            op = self.graph.ops[self.producer[ids]]
            if op.kind in ("select_n", "clamp"):  # JAX's where(i < 0, i + n, i); a clamp's operand is its second one as well
                ids = op.inputs[1]
            elif op.kind in ("reshape", "convert_element_type", "broadcast_in_dim", "copy"):
                ids = op.inputs[0]
            else:
                break
        return ids

    def read_bytes(self, v: int) -> int:
        """Bytes of ``v`` that the region reads from memory: of a table, at most the rows that are read."""
        if v not in self.tables:
            return self.bytes(v)
        return min(self.bytes(v), sum(self.bytes(self.graph.ops[i].outputs[0]) for i in self.readers[v]))

    def stationary_inputs(self, ops: Iterable[int]) -> list[int]:
        """Stationary arrays that ``ops`` read, each once, without literals and tables."""
        reads = dict.fromkeys(v for i in ops for v in self.graph.ops[i].inputs)
        return [v for v in reads if v not in self.labels and v not in self.tables and self.graph.values[v].literal is None]

    def stationary_bytes(self, ops: Iterable[int]) -> int:
        """Bytes of the stationary arrays that ``ops`` read; of arrays that depend on the batch, the part of one batch."""
        inputs = self.stationary_inputs(ops)
        return sum(self.row_bytes(v) if v in self.of_batch else self.bytes(v) for v in inputs)

    def _work(self, i: int) -> OpWork:
        op, family = self.graph.ops[i], self.family(i)
        if op.body is not None:
            return self._loop_work(op["length"], self.body(i))
        out = op.outputs[0]
        dtype = self.graph.values[op.inputs[0] if op.inputs else out].dtype
        if out not in self.labels and i not in self.sinks:
            return OpWork(0, 0.0, dtype)  # stationary: once per call, not per row
        if family == "dot":
            dot = self._dot(i)
            return OpWork(2 * dot.batch * dot.m * dot.n * dot.k, 0.0, dtype, dot)
        if family in FREE:
            return OpWork(0, 0.0, dtype)
        if family in COPIES or family == GATHER:
            return OpWork(0, 0.5 * self.elements(i), dtype)
        per_element = max(1.0, OPS[op.kind].flops) if family in ("pointwise", "convert") else 1.0
        simt = float(self.elements(i) * per_element)
        return OpWork(int(simt), simt, dtype)

    def _loop_work(self, steps: int, body: Self) -> OpWork:
        works = [body.work(k) for k in body.region.ops]
        multiplies = any(work.resource == "tensor" for work in works)
        flops, simt = steps * sum(work.flops for work in works), steps * sum(work.simt for work in works)
        return OpWork(flops, simt, works[0].dtype if works else "float32", multiplies=multiplies)

    def elements(self, i: int) -> int:
        """Elements of a row that op ``i`` passes over."""
        op = self.graph.ops[i]
        reads = self.family(i) in SCANS or self.family(i) == SCATTER
        return self.row_size(op.inputs[0] if reads else op.outputs[0])

    def _absorbed(self, i: int) -> bool:
        """Whether ``i``, as the only reader, adds a stationary value to a matmul's result or takes its maximum with a constant."""
        before = self.follows(i)
        return before is not None and (self.work(before).dot is not None or self.absorbed(before))

    def follows(self, i: int) -> int | None:
        """The op to whose result ``i``, its only reader, adds a stationary value, or takes the maximum with one; else None."""
        op = self.graph.ops[i]
        if op.kind not in ("add", "max"):
            return None
        made = [self.producer[v] for v in op.inputs if v in self.producer and not self.is_maker(self.producer[v])]
        given = [v for v in op.inputs if v not in self.producer and v in self.labels]
        if len(made) != 1 or given:
            return None
        before = self.graph.ops[made[0]].outputs[0]
        return None if len(self.readers[before]) != 1 or before in self.outputs else made[0]

    def _dot(self, i: int) -> DotWork:
        op = self.graph.ops[i]
        sides = [(op.inputs[0], op["lhs_contract"], op["lhs_batch"]), (op.inputs[1], op["rhs_contract"], op["rhs_batch"])]
        if op.inputs[0] not in self.labels:
            sides.reverse()
        (x, x_contract, x_batch), (w, w_contract, w_batch) = sides
        x_shape, w_shape = self.graph.values[x].shape, self.graph.values[w].shape
        none: tuple[tuple[int, ...], ...] = ((),)
        x_labels = self.labels.get(x, none * len(x_shape))
        w_labels = self.labels.get(w, self.of_batch.get(w, none * len(w_shape)))
        here = [d for d in range(len(x_shape)) if not x_labels[d]]
        return DotWork(
            batch=math.prod(x_shape[d] for d in here if d in x_batch),
            m=math.prod(x_shape[d] for d in here if d not in x_batch and d not in x_contract),
            n=math.prod(s for d, s in enumerate(w_shape) if not w_labels[d] and d not in w_contract and d not in w_batch),
            k=math.prod(x_shape[d] for d in here if d in x_contract),
            dtype=self.graph.values[x].dtype,
            per_row=w in self.labels and i not in self.sinks,
        )


def pipeline_traffic(cost: RegionCost) -> int:
    """Bytes that the region as a pipeline must move off chip: inputs are read and outputs written once, an order twice."""
    order = 4 * cost.region.space.rows if cost.order is not None else 0
    return order + sum(map(cost.read_bytes, cost.region.inputs)) + sum(map(cost.bytes, cost.outputs))


# --- Kernels of XLA ---------------------------------------------------------------------------------------------------------------

ROOTS = frozenset({"dot", "reduce", "argreduce", "cumulative", "loop", SCATTER})
# Families with kernels of their own, whose operands are in memory. The kernels of a loop are those of its body.
_ALONE = frozenset({"dot", "cumulative", "loop", SCATTER})
_NONE: Mapping[int, int] = MappingProxyType({})
_VIEWS = frozenset({"reshape", "transpose"})
# XLA computes an op of this many operations once rather than save a round trip (divide, exp, log, tanh, power, ...).
_EXPENSIVE = 4


@dataclasses.dataclass
class XlaKernel:
    """One kernel of the bulk-synchronous program: ``ops`` run in it, ``reads`` come from memory, ``root`` is written. ``into``: the
    array, instead of zeros, into which a scatter folds rows; ``root`` is then that array."""

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
    """Bytes of ``v`` that the ``readers`` in a kernel read: if all of them read rows or slices at computed places (pages of a
    pool), only these. Plain slices count as the whole array, since usually other slices are read as well."""
    whole = cost.read_bytes(v)
    partly = (op.kind == "dynamic_slice" or OPS[op.kind].family == GATHER for op in readers)
    if not readers or not all(partly) or any(v in op.inputs[1:] for op in readers):
        return whole
    return min(whole, sum(cost.bytes(op.outputs[0]) for op in readers))


def kernels_of(cost: RegionCost, into: Mapping[int, int] = _NONE, arrays: Collection[int] = ()) -> list[XlaKernel]:
    """The kernels, in order, each rooted at a value that is written to memory. ``into``: the result of ``folded_into``, if the
    target uses it. ``arrays``: values that are also written to memory on this target.

    The model of XLA's fusion: a value is written if its op is a matmul, a reduction or a scan, if it leaves the region, if a
    matmul, a scan or a scatter reads it, or if it is expensive and read twice. Kernels compute everything else, including rows
    taken from a table, as often as they need it. Nothing fuses across matmuls and scatters."""
    written = _written(cost, into).union(arrays)
    while True:
        roots = [v for i in cost.region.ops if cost.family(i) != "loop" for v in cost.graph.ops[i].outputs if v in written]
        kernels = [_kernel(cost, v, written, into) for v in roots]
        again = _expensive_twice(cost, kernels)
        if not again:
            break
        written |= again
    return kernels


def folded_into(cost: RegionCost, dtypes: Container[str]) -> dict[int, int]:
    """value -> the array that it equals except in some rows. To XLA, ``x + sums`` is one scatter into ``x`` if nothing else reads
    the sums, which are folded by index, and it sums ``dtypes`` without conversion. The gradient of an array of which the steps of a
    loop take rows is such a carry."""
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
    """``ops`` of ``graph``, in an order in which they can run, as a region over which nothing streams: the ops left to XLA."""
    inside = set(ops)
    read = {v for i, op in enumerate(graph.ops) if i not in inside for v in op.inputs} | set(graph.outputs)
    return Region.of(graph, StreamSpace((1,)), ops, {}, (v for i in ops for v in graph.ops[i].outputs if v in read))


def _expensive_twice(cost: RegionCost, kernels: Sequence[XlaKernel]) -> set[int]:
    """Values of expensive ops that several kernels would each compute, through cheap ops that read them."""
    seen = collections.Counter(i for kernel in kernels for i in kernel.ops if kernel.root not in cost.graph.ops[i].outputs)
    return {
        cost.graph.ops[i].outputs[0]
        for i, count in seen.items()
        if count > 1 and cost.family(i) == "pointwise" and OPS[cost.graph.ops[i].kind].flops >= _EXPENSIVE
    }


def between_kernels(graph: Graph) -> int:
    """The most bytes alive at once, about, of arrays between the kernels of a whole program: operands and results of products,
    reductions, scatters and loops, and values that are read twice."""
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
        if family in _ALONE:
            written.update(w for v in op.inputs if (w := _behind_views(cost, v)) in cost.producer)
        if family == SCATTER and any(out in into for r in cost.readers.get(op.outputs[0], ()) for out in cost.graph.ops[r].outputs):
            continue
        if family in ROOTS:
            written.update(op.outputs)
        if family == "pointwise" and OPS[op.kind].flops >= _EXPENSIVE and len(cost.readers.get(op.outputs[0], ())) > 1:
            written.update(op.outputs)
    return written


def _behind_views(cost: RegionCost, v: int) -> int:
    """The value in memory when a kernel of one op reads ``v``: reshapes are free, and transposes are layouts."""
    while v in cost.producer and v not in cost.outputs and cost.family(cost.producer[v]) in _VIEWS:
        v = cost.graph.ops[cost.producer[v]].inputs[0]
    return v


def _kernel(cost: RegionCost, root: int, written: set[int], into: Mapping[int, int]) -> XlaKernel:
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
    return XlaKernel(root, frozenset(ops), tuple(reads), into.get(root))

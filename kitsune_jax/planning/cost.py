"""What ops cost on any target: operations, rows and bytes, on a tile of a pipeline and over the whole stream.

Comes in: a Graph, a Region of it and a Machine. Goes out: ``RegionCost``, which answers for single ops and is the base of each
target's own (what an op takes in seconds is the target's to say), and ``pipeline_traffic``, the bytes a pipeline cannot avoid.
Invariant: only shapes, dtypes and the machine's numbers are read, never a clock.

A **row** is one index of the stream space; what an op costs per row follows from its row shapes, so an op whose values depend on
some of the stream axes only is charged for every row, as the tile program runs it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Iterable

import numpy as np

from kitsune_jax.graph import Graph
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.machine import Machine
from kitsune_jax.streams.space import Region, row_shape

# Families whose result is a view of their operand, or is made on the fly by whoever reads it.
FREE = frozenset({"broadcast", "reshape", "iota"})
# Families that copy: half an element operation for each element moved.
COPIES = frozenset({"concatenate", "slice", "pad", "rev", "transpose"})
SCANS = frozenset({"reduce", "argreduce", "cumulative"})


@functools.cache
def itemsize(dtype: str) -> int:
    """Bytes of one element. bfloat16 and the 8-bit floats are not NumPy's own names.

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
    """A matmul per row: ``batch`` products of (rows * m, k) with (k, n)."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True)
class OpWork:
    """One op on one row. ``flops``: useful operations. ``simt``: vector operations. ``dot``: set for matmuls only."""

    flops: int
    simt: float
    dtype: str
    dot: DotWork | None = None

    @property
    def resource(self) -> str:
        return "simt" if self.dot is None else "tensor"


class RegionCost(abc.ABC):
    """Costs of the ops of one region, each computed once.

    ``work(i)`` is the op's work per row; ``tile_seconds(i, rows)`` the time of one tile of ``rows`` rows on one worker.
    ``is_maker(i)``: the op reads nothing streamed, so whoever needs its result makes it again, and no queue carries it.
    ``row_size(v)``: elements of a row, or of all of a stationary value; ``row_bytes(v)``: bytes of one row of a streamed value.
    ``absorbed(i)``: a bias, a ReLU or a part of another activation that the matmul before it applies to its accumulators, so a
    pipeline does not pay for it.
    """

    def __init__(self, graph: Graph, region: Region, machine: Machine):
        self.graph, self.region, self.machine = graph, region, machine
        self.labels = region.label_of()
        self.members = frozenset(region.ops)
        self.outputs = frozenset(region.outputs)
        self.producer = {v: i for i in region.ops for v in graph.ops[i].outputs}
        self.readers: dict[int, list[int]] = {}
        for i in region.ops:
            for v in dict.fromkeys(graph.ops[i].inputs):
                self.readers.setdefault(v, []).append(i)
        self.sinks = frozenset(region.sinks)
        self.work = functools.lru_cache(maxsize=None)(self._work)
        self.is_maker = functools.lru_cache(maxsize=None)(self._is_maker)
        self.row_size = functools.lru_cache(maxsize=None)(self._row_size)
        self.row_bytes = functools.lru_cache(maxsize=None)(self._row_bytes)
        self.absorbed = functools.lru_cache(maxsize=None)(self._absorbed)

    @abc.abstractmethod
    def tile_seconds(self, i: int, rows: int) -> float:
        """Seconds of op ``i`` on one tile of ``rows`` rows, on one worker."""

    def streamed(self, v: int) -> bool:
        return v in self.labels

    def _is_maker(self, i: int) -> bool:
        return not any(v in self.labels for v in self.graph.ops[i].inputs)

    def _row_size(self, v: int) -> int:
        return math.prod(row_shape(self.graph.values[v].shape, self.labels.get(v)))

    def _row_bytes(self, v: int) -> int:
        return self.row_size(v) * itemsize(self.graph.values[v].dtype)

    def bytes(self, v: int) -> int:
        """Bytes of the whole value; literals have none."""
        value = self.graph.values[v]
        return 0 if value.literal is not None else value.size * itemsize(value.dtype)

    def family(self, i: int) -> str:
        return OPS[self.graph.ops[i].kind].family

    def stationary_inputs(self, ops: Iterable[int]) -> list[int]:
        """Stationary arrays that ``ops`` read, each once, literals apart."""
        reads = dict.fromkeys(v for i in ops for v in self.graph.ops[i].inputs)
        return [v for v in reads if v not in self.labels and self.graph.values[v].literal is None]

    def stationary_bytes(self, ops: Iterable[int]) -> int:
        """Bytes of the stationary arrays that ``ops`` read."""
        return sum(self.bytes(v) for v in self.stationary_inputs(ops))

    def _work(self, i: int) -> OpWork:
        op, family = self.graph.ops[i], self.family(i)
        out = op.outputs[0]
        dtype = self.graph.values[op.inputs[0] if op.inputs else out].dtype
        if out not in self.labels and i not in self.sinks:
            return OpWork(0, 0.0, dtype)  # stationary: once per call, not per row
        if family == "dot":
            dot = self._dot(i)
            return OpWork(2 * dot.batch * dot.m * dot.n * dot.k, 0.0, dtype, dot)
        if family in FREE:
            return OpWork(0, 0.0, dtype)
        if family in COPIES:
            return OpWork(0, 0.5 * self.elements(i), dtype)
        per_element = max(1.0, OPS[op.kind].flops) if family in ("pointwise", "convert") else 1.0
        simt = float(self.elements(i) * per_element)
        return OpWork(int(simt), simt, dtype)

    def elements(self, i: int) -> int:
        """Elements of a row that op ``i`` passes over."""
        op = self.graph.ops[i]
        return self.row_size(op.inputs[0] if self.family(i) in SCANS else op.outputs[0])

    def _absorbed(self, i: int) -> bool:
        """``i`` adds a stationary value to a matmul's result or takes its maximum with a constant, and it is the only reader."""
        op = self.graph.ops[i]
        if op.kind not in ("add", "max"):
            return False
        made = [self.producer[v] for v in op.inputs if v in self.producer and not self.is_maker(self.producer[v])]
        given = [v for v in op.inputs if v not in self.producer and v in self.labels]
        if len(made) != 1 or given:
            return False
        before = self.graph.ops[made[0]].outputs[0]
        if len(self.readers[before]) != 1 or before in self.outputs:
            return False
        return self.work(made[0]).dot is not None or self.absorbed(made[0])

    def _dot(self, i: int) -> DotWork:
        op = self.graph.ops[i]
        sides = [(op.inputs[0], op["lhs_contract"], op["lhs_batch"]), (op.inputs[1], op["rhs_contract"], op["rhs_batch"])]
        if op.inputs[0] not in self.labels:
            sides.reverse()
        (x, x_contract, x_batch), (w, w_contract, w_batch) = sides
        x_shape, w_shape = self.graph.values[x].shape, self.graph.values[w].shape
        none: tuple[tuple[int, ...], ...] = ((),)
        x_labels = self.labels.get(x, none * len(x_shape))
        w_labels = self.labels.get(w, none * len(w_shape))
        here = [d for d in range(len(x_shape)) if not x_labels[d]]
        return DotWork(
            batch=math.prod(x_shape[d] for d in here if d in x_batch),
            m=math.prod(x_shape[d] for d in here if d not in x_batch and d not in x_contract),
            n=math.prod(s for d, s in enumerate(w_shape) if not w_labels[d] and d not in w_contract and d not in w_batch),
            k=math.prod(x_shape[d] for d in here if d in x_contract),
            dtype=self.graph.values[x].dtype,
        )


def pipeline_traffic(cost: RegionCost) -> int:
    """Compulsory off-chip bytes of the region as a pipeline: inputs are read once and outputs written once."""
    return sum(cost.bytes(v) for v in (*cost.region.inputs, *cost.outputs))

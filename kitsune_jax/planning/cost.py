"""What ops cost: operations, bytes and seconds, on a tile of a pipeline and bulk-synchronously.

Comes in: a Graph, a Region of it and a Machine. Goes out: ``RegionCost``, which answers for single ops, and ``pipeline_traffic``,
the bytes a pipeline cannot avoid. Invariant: only shapes, dtypes and the machine's numbers are read, never a clock.

A **row** is one index of the stream space; what an op costs per row follows from its row shapes, so an op whose values depend on
some of the stream axes only is charged for every row, as the tile program runs it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable

import numpy as np

from kitsune_jax import activations
from kitsune_jax.graph import Graph
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning import cpu_time
from kitsune_jax.planning.machine import Machine
from kitsune_jax.streams.space import Region, row_shape

# Families whose result is a view of their operand, or is made on the fly by whoever reads it.
_FREE = frozenset({"broadcast", "reshape", "iota"})
# Families that copy: half an element operation for each element moved.
_COPIES = frozenset({"concatenate", "slice", "pad", "rev", "transpose"})
# Families whose ops a CPU runs in groups, through registers.
_GROUPED = frozenset({"pointwise", "convert"})
_SCANS = frozenset({"reduce", "argreduce", "cumulative"})
# A matmul micro-kernel spends about four steps of K on loading and storing its accumulators; from K = 64 on that is in the
# efficiency.
_FULL_K, _K_OVERHEAD = 64, 16


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
    """One op on one row. ``flops``: useful operations. ``simt``: vector operations. ``dot``: set for matmuls only.

    ``elements``: what a stage's pointwise code loads and stores besides: one pass over them per op. ``edges``: those of them that
    come from or go to something that is no pointwise op. ``sums``: results of a reduction. ``spreads``: operands that have one
    element for each row. ``absorbed``: a bias, a ReLU or a part of another activation that the matmul before it applies to its
    accumulators: a pipeline does not pay for it, but for ``activation``, which is on the last op of one.
    """

    flops: int
    simt: float
    dtype: str
    dot: DotWork | None = None
    absorbed: bool = False
    elements: int = 0
    edges: int = 0
    kind: str = ""
    sums: int = 1
    spreads: int = 0
    activation: str = ""

    @property
    def resource(self) -> str:
        return "simt" if self.dot is None else "tensor"


class RegionCost:
    """Costs of the ops of one region, each computed once.

    ``work(i)`` is the op's work per row; ``tile_seconds(i, rows)`` the time of one tile of ``rows`` rows on one worker.
    ``is_maker(i)``: the op reads nothing streamed, so whoever needs its result makes it again, and no queue carries it.
    ``row_size(v)``: elements of a row, or of all of a stationary value; ``row_bytes(v)``: bytes of one row of a streamed value.
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
        self.phase = dict(zip(region.ops, region.phase_of or (0,) * len(region.ops), strict=True))
        self.work = functools.lru_cache(maxsize=None)(self._work)
        self.is_maker = functools.lru_cache(maxsize=None)(self._is_maker)
        self.row_size = functools.lru_cache(maxsize=None)(self._row_size)
        self.row_bytes = functools.lru_cache(maxsize=None)(self._row_bytes)
        self.work_seconds = functools.lru_cache(maxsize=None)(self._work_seconds)

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

    def _work(self, i: int) -> OpWork:
        op, family = self.graph.ops[i], self.family(i)
        out = op.outputs[0]
        dtype = self.graph.values[op.inputs[0] if op.inputs else out].dtype
        if out not in self.labels and i not in self.sinks:
            return OpWork(0, 0.0, dtype)  # stationary: once per call, not per row
        if family == "dot":
            dot = self._dot(i)
            return OpWork(2 * dot.batch * dot.m * dot.n * dot.k, 0.0, dtype, dot)
        elements = self.row_size(op.inputs[0]) if family in _SCANS else self.row_size(out)
        per_element = max(1.0, OPS[op.kind].flops) if family in ("pointwise", "convert") else 1.0
        if family in _FREE:
            return OpWork(0, 0.0, dtype)
        if family in _COPIES:
            return OpWork(0, 0.5 * elements, dtype, elements=elements, kind=op.kind)
        edges = elements * self._edges(i) if family in _GROUPED else 0
        simt = float(elements * per_element)
        sums = max(1, self.row_size(out)) if family in _SCANS and i not in self.sinks else 1
        activation = self.activations.get(i)
        absorbed = activation is not None or self._absorbed(i)
        return OpWork(int(simt), simt, dtype, None, absorbed, elements, edges, op.kind, sums, self._spreads(i), activation or "")

    @functools.cached_property
    def activations(self) -> dict[int, str]:
        """On a CPU: the ops that matmuls apply to their accumulators, and of each activation's last one its name."""
        found: dict[int, str] = {}
        if self.machine.profile is None:
            return found
        code = activations.GraphCode(self.graph, self.members, self.outputs)
        for i in self.region.ops:
            if self.family(i) != "dot" or i in self.sinks:
                continue
            x = self.graph.ops[i].outputs[0]
            readers = self.readers.get(x, [])
            if len(readers) == 1 and self.graph.ops[readers[0]].kind == "add" and self._absorbed(readers[0]):
                x = self.graph.ops[readers[0]].outputs[0]
            match = activations.recognise(code, x)
            if match is None:
                continue
            found.update(dict.fromkeys(match.absorbed, ""))
            last = self.producer[match.result]
            found[last] = "" if match.name == "relu" else match.name
        return found

    def _spreads(self, i: int) -> int:
        """Operands of a pointwise op that were broadcast along the row from one streamed element."""
        if self.family(i) not in _GROUPED:
            return 0
        count = 0
        for v in dict.fromkeys(self.graph.ops[i].inputs):
            while v in self.producer and self.family(self.producer[v]) in _FREE and self.graph.ops[self.producer[v]].inputs:
                v = self.graph.ops[self.producer[v]].inputs[0]
            count += v in self.labels and self.row_size(v) == 1 < self.row_size(self.graph.ops[i].outputs[0])
        return count

    def _edges(self, i: int) -> int:
        """Full-sized operands and results of a pointwise op that are loaded or stored by its group."""
        op = self.graph.ops[i]
        full = self.graph.values[op.outputs[0]].size

        def grouped(j: int) -> bool:
            return self.family(j) in _GROUPED

        loads = sum(
            v in self.labels and self.graph.values[v].size == full and not (v in self.producer and grouped(self.producer[v]))
            for v in dict.fromkeys(op.inputs)
        )
        stored = any(v in self.outputs or not all(grouped(j) for j in self.readers.get(v, ())) for v in op.outputs)
        return loads + stored

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
        return self.work(made[0]).dot is not None or self.work(made[0]).absorbed

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

    def tile_seconds(self, i: int, rows: int) -> float:
        """Seconds of op ``i`` on one tile of ``rows`` rows, on one worker."""
        return self.work_seconds(self.work(i), i in self.sinks, rows)

    def _work_seconds(self, work: OpWork, sink: bool, rows: int) -> float:
        machine = self.machine
        if work.absorbed and not work.activation:
            return 0.0
        if machine.profile is not None:
            return self._cpu_seconds(work, sink, rows)
        if work.dot is None:
            operations = work.simt + work.elements * machine.pass_operations
            return rows * operations / (machine.rate(machine.simt_rates, work.dtype) * machine.pipeline_simt)
        dot = work.dot
        rate = machine.rate(machine.tensor_rates, dot.dtype) * machine.rate(machine.spatial_efficiency, dot.dtype)
        # A sink contracts the rows: they are its K, and the output's dimensions are what is padded to the micro-kernel.
        m, k = (dot.m, rows * dot.k) if sink else (rows * dot.m, dot.k)
        padded_k = k + max(0.0, (_FULL_K - k) / _K_OVERHEAD)
        return 2.0 * dot.batch * round_up(m, machine.matmul_rows) * round_up(dot.n, machine.panel) * padded_k / rate

    def _cpu_seconds(self, work: OpWork, sink: bool, rows: int) -> float:
        """On one core, by what was measured."""
        times = self.times
        if work.activation:
            return rows * work.elements * times.activation(work.activation, work.dtype)
        if work.dot is not None:
            dot = work.dot
            weights, gradients = self.products if dot.dtype == "bfloat16" else ("widened", "widened")
            if sink:
                return dot.batch * times.gradient(dot.dtype, gradients, rows * dot.k, dot.m, dot.n)
            return dot.batch * times.product(dot.dtype, weights, rows * dot.m, dot.k, dot.n)
        family = OPS[work.kind].family if work.kind in OPS else ""
        if family in _SCANS:
            passes = {"reduce": 1.0, "argreduce": 2.0, "cumulative": 3.0}[family]
            each = work.elements / max(1, work.sums)
            return cpu_time.STEP_SECONDS + rows * work.sums * passes * times.fold(work.dtype, each, over_rows=sink)
        if family in _COPIES:
            return rows * work.elements * 2 * times.edge(work.dtype)
        if not work.kind:
            return 0.0
        passes = work.elements * times.vector(work.kind, work.dtype) + work.edges * times.edge(work.dtype)
        return cpu_time.STEP_SECONDS + rows * (passes + work.spreads * times.spread(work.dtype, work.elements))

    @functools.cached_property
    def times(self) -> cpu_time.CpuTimes:
        """Raises ``ValueError`` for a machine without a profile."""
        if self.machine.profile is None:
            raise ValueError(f"the machine {self.machine.name} has no profile: it is not a CPU")
        return cpu_time.times(self.machine.profile)

    @functools.cached_property
    def products(self) -> tuple[str, str]:
        """How bfloat16 operands are multiplied fastest: in products with weights, and in weight gradients (``PRODUCTS``)."""
        times, typical = self.times, cpu_time.TILE
        ways = times.ways("bfloat16")
        weights, gradients = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
        for (work, sink), count in self.kinds(self.region.ops).items():
            if work.dot is None or work.dot.dtype != "bfloat16":
                continue
            dot = work.dot
            for way in ways:
                if sink:
                    gradients[way] += count * dot.batch * times.gradient(dot.dtype, way, typical * dot.k, dot.m, dot.n)
                else:
                    weights[way] += count * dot.batch * times.product(dot.dtype, way, typical * dot.m, dot.k, dot.n)

        def fastest(seconds: dict[str, float]) -> str:  # of two alike, the later: dots before widened
            return min(reversed(ways), key=lambda way: seconds[way])

        return fastest(weights), fastest(gradients)

    def kinds(self, ops: Iterable[int]) -> dict[tuple[OpWork, bool], int]:
        """How often each (work, is a sink) occurs among ``ops``, for ``work_seconds``: a deep network has few that differ."""
        return dict(collections.Counter((self.work(i), i in self.sinks) for i in ops))

    def strided_seconds(self) -> float:
        """Worker-seconds lost at the border of the region on arrays whose rows do not lie together in memory.

        Such an array streams over its fastest dimension: neighbours of a row are a whole stride apart, and each element costs a
        line.
        """
        elements = 0
        for v in (*self.region.inputs, *self.outputs):
            shape, labels = self.graph.values[v].shape, self.labels.get(v)
            if labels is None:
                continue
            real = [d for d, n in enumerate(shape) if n > 1]
            if real and labels[real[-1]] and self.row_size(v) > 1:
                elements += self.graph.values[v].size
        return elements * self.machine.strided_seconds

    def flops(self) -> int:
        """Useful operations of the whole region."""
        return self.region.space.rows * sum(self.work(i).flops for i in self.region.ops)

    def live_row_bytes(self, ops: Iterable[int]) -> int:
        """Most bytes per row that are alive at once while ``ops`` run in order on a tile.

        Pointwise ops work in place on an input that nobody reads after them.
        """
        order = list(ops)
        last = {v: k for k, i in enumerate(order) for v in self.graph.ops[i].inputs}
        alive: dict[int, int] = {}
        unread: list[int] = []  # made by the op before, for other stages only
        total = most = 0

        def born(values: Iterable[int]) -> None:
            nonlocal total
            for v in values:
                if v not in alive and self._takes_memory(v):
                    alive[v] = self.row_bytes(v)
                    total += alive[v]

        def die(values: Iterable[int]) -> None:
            nonlocal total
            for v in values:
                total -= alive.pop(v, 0)

        for k, i in enumerate(order):
            op = self.graph.ops[i]
            born(op.inputs)
            most = max(most, total)
            dying = [*unread, *(v for v in op.inputs if last[v] == k)]
            if self.family(i) in ("pointwise", "convert"):
                die(dying)
            born(op.outputs)
            most = max(most, total)
            die(dying)
            die(v for v in op.outputs if v not in last and v not in self.readers)
            unread = [v for v in op.outputs if v not in last and v in self.readers]
        return most

    def _takes_memory(self, v: int) -> bool:
        return v in self.labels and not (v in self.producer and self._made_on_the_fly(v))

    def _made_on_the_fly(self, v: int) -> bool:
        i = self.producer[v]
        return self.family(i) in _FREE and self.is_maker(i)


def pipeline_traffic(cost: RegionCost) -> int:
    """Compulsory off-chip bytes of the region as a pipeline.

    Inputs are read once and outputs written once; a streamed value that a later phase needs again is read again (and, if it was
    made in an earlier phase, first written), because a barrier stands between.
    """
    total = sum(cost.bytes(v) for v in cost.outputs)
    values = dict.fromkeys((*cost.region.inputs, *cost.producer))
    for v in values:
        phases = {cost.phase[i] for i in cost.readers.get(v, ())}
        maker = cost.producer.get(v)
        if maker is None:
            total += cost.bytes(v) * (len(phases) if cost.streamed(v) else 1)
        elif cost.streamed(v):
            again = len(phases - {cost.phase[maker]})
            total += cost.bytes(v) * (again + (1 if again and v not in cost.outputs else 0))
    return total

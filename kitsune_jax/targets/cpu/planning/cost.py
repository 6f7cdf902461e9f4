"""Seconds of the ops of a region on one CPU core, from the times of kernels in the machine's profile.

Comes in: a ``Graph``, a ``Region`` and a ``CpuMachine``. Goes out: ``CpuCost``. Every rate comes from the machine's profile; the
constants here are times that the profile does not contain.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Container, Iterable, Mapping, Sequence

from kitsune_jax.ops.graph import Graph, quick
from kitsune_jax.ops.reduce import ONLINE
from kitsune_jax.planning.cost import COPIES, FREE, GATHER, SCANS, SCATTER, Access, DotWork, RegionCost, itemsize
from kitsune_jax.planning.streams import FEW_OF_BATCH, FEW_ROWS, Region
from kitsune_jax.program import passes
from kitsune_jax.program.passes import Flow
from kitsune_jax.targets.cpu.facts import TABLES
from kitsune_jax.targets.cpu.memory import MOST_COLUMNS
from kitsune_jax.targets.cpu.planning import machines
from kitsune_jax.targets.cpu.planning.machines import CpuMachine, CpuProgramContext

# --- Products of a few rows with a matrix that is read once, in place -------------------------------------------------------------

_LARGE = 1 << 12  # elements of a matrix that belongs to one row of the stream


def has_few_rows(dot: DotWork | None, sink: bool) -> bool:
    """Whether ``dot`` is a product of a few rows (a token and a weight, a query and keys). ``sink``: it contracts the stream."""
    if dot is None or dot.dtype == "float64" or min(dot.m, dot.n) > (FEW_OF_BATCH if dot.per_row else FEW_ROWS):
        return False
    return sink or dot.per_row and max(dot.m, dot.n) * dot.k >= _LARGE


# --- Short runs inside rows, which take longer to repeat or fold than their elements ----------------------------------------------

# Pieces of up to eight rows of an array, a page or more apart, or closer. exp of [255, n, 6] in tiles of 4 rows: 7 ns for eight
# rows of 512, 22 of 2048; pieces of 64 to 256 bytes took 23 to 60 ns, of 16 bytes nearby 8 to 12 (Xeon with AMX).
_PIECE_SECONDS, _NEAR_PIECE_SECONDS = 20e-9, 6e-9
_PIECE_ROWS, _PIECE_BYTES, _PAGE = 8, 1024, 4096
# Runs inside a row are addressed one by one by their strides: 8 to 15 ns each, against 3 for a whole row of one number.
_WITHIN = 3.0
SHORT = 16  # elements from which on a run's time is that of its elements


def spreads_short_runs(cost: RegionCost, i: int) -> tuple[int, ...]:
    """For each operand of op ``i`` that was repeated along the row, or inside it in short runs, its number of runs in a row: for
    the ``a[:, :, None] + transitions`` of a Viterbi or CRF step, say."""
    size = cost.row_size(cost.graph.ops[i].outputs[0])
    found = []
    for v in dict.fromkeys(cost.graph.ops[i].inputs):
        run = size
        while v in cost.producer and cost.family(cost.producer[v]) in FREE and cost.graph.ops[cost.producer[v]].inputs:
            op = cost.graph.ops[cost.producer[v]]
            if op.kind == "broadcast_in_dim":
                run = min(run, _repeated(cost.graph.values[op.inputs[0]].shape, op["dims"], cost.graph.values[v].shape))
            v = op.inputs[0]
        if v not in cost.labels or size <= 1:
            continue
        if cost.row_size(v) == 1:
            found.append(1)
        elif 0 < run < min(size, SHORT):
            found.append(size // run)
    return tuple(found)


def _repeated(shape: Sequence[int], dims: Sequence[int], out: Sequence[int]) -> int:
    """Elements of a run of the result: those that repeat one element, or those that follow each other without repetition."""
    kept = {d for n, d in zip(shape, dims, strict=True) if n == out[d]}
    real = [d for d, n in enumerate(out) if n > 1]
    run = 1
    for d in reversed(real):
        if (d in kept) != (real[-1] in kept):
            break
        run *= out[d]
    return run


def folds_single_elements(cost: RegionCost, i: int) -> bool:
    """Whether reduction ``i`` folds fewer elements than a vector has, which are interleaved for as few results."""
    op = cost.graph.ops[i]
    shape, params = cost.graph.values[op.inputs[0]].shape, dict(op.params)
    axes = params["axes"] if "axes" in params else (params["axis"],)
    behind = math.prod(shape[max(axes) + 1 :])
    return behind < SHORT and 1 < math.prod(shape[d] for d in axes) < SHORT


def pieces(cost: CpuCost, rows: int) -> tuple[int, int]:
    """The number of short pieces that the region reads and writes in arrays with other dimensions in front of the streamed one:
    pieces that lie pages apart, and closer ones. A piece has eight rows, or a tile's ``rows`` if these are fewer.

    Arrays that loops slice are left out: the rows of a slice lie together."""
    far, near, sliced = 0, 0, cost.sliced()
    together = max(1, min(_PIECE_ROWS, rows))
    for v in cost.border:
        value = cost.graph.values[v]
        streamed = [d for d, label in enumerate(cost.labels[v]) if label and value.shape[d] > 1]
        if v in sliced or not streamed:
            continue
        in_front = math.prod(n for d, n in enumerate(value.shape[: streamed[-1]]) if d not in streamed)
        inner = math.prod(value.shape[streamed[-1] + 1 :])
        size = inner * itemsize(value.dtype)
        if in_front == 1 or together * size >= _PIECE_BYTES:
            continue
        if size * value.shape[streamed[-1]] >= _PAGE:
            far += value.size // (together * inner)
        else:
            near += value.size // (together * inner)
    return far, near


# --- Rows of tables that are read in place: an estimate of what ``targets.cpu.facts`` finds in the program ------------------------


@dataclasses.dataclass(frozen=True)
class Taken:
    """``sums``: ops that read rows of a table. ``absorbed``: the products they compute. ``values``: gathered rows and their
    products that never lie in memory."""

    sums: frozenset[int]
    absorbed: frozenset[int]
    values: frozenset[int]

    @staticmethod
    def of(cost: RegionCost) -> Taken:
        sums, absorbed, values = set[int](), set[int](), set[int]()
        for i in cost.region.ops:
            op = cost.graph.ops[i]
            access = cost.access(i)
            folds = access is not None and access.folds and access.near and op.kind in ("scatter_sum", "scatter_exp_sum")
            products = op.kind == "reduce_sum" and i not in cost.sinks
            if not (folds or products) or cost.graph.values[op.inputs[0]].dtype not in TABLES:
                continue
            chain = _made(cost, op.inputs[0], i)
            if chain is None:
                continue
            made, between = chain
            if folds and cost.looks_up(made):
                sums.add(i)
                values.update(between)
            elif cost.graph.ops[made].kind == "mul":
                found = [_made(cost, v, made) for v in cost.graph.ops[made].inputs]
                tables = [f for f in found if f is not None and cost.looks_up(f[0])]
                if tables:
                    sums.add(i)
                    absorbed.add(made)
                    # Of two gathers, a sum reads the second one as factors, from a tile.
                    values.update(between, *(names for _, names in (tables[:1] if folds else tables)))
        return Taken(frozenset(sums), frozenset(absorbed), frozenset(values))


def _made(cost: RegionCost, v: int, reader: int) -> tuple[int, list[int]] | None:
    """The op of the region whose result ``v`` is, under any names, if ``reader`` alone reads it; and the names."""
    names = []
    while v in cost.producer and cost.readers.get(v, []) == [reader] and v not in cost.outputs:
        names.append(v)
        reader = cost.producer[v]
        op = cost.graph.ops[reader]
        if cost.family(reader) not in FREE or len(op.inputs) != 1:
            return reader, names
        v = op.inputs[0]
    return None


# --- Costs of ops -----------------------------------------------------------------------------------------------------------------

# Families whose ops run in groups, through registers.
_GROUPED = frozenset({"pointwise", "convert"})
# Families whose ops can read a value that lies column by column.
_COLUMNS = _GROUPED | FREE | COPIES | {"reduce"}
# An element of a border array whose rows do not lie together: 6 to 19 ns for tiles of 2 to 4 columns of a row-major array (Zen 4).
_STRIDED_SECONDS = 6e-9
_PASSES = {"reduce": 1.0, "argreduce": 2.0, "cumulative": 3.0}
# A sum over rows of a value that the step has in registers, over one of rows in the L1 ("fold/column"): of 16 384 x 256 squares it
# took 0.13 ns an element and worker, 0.16 (Zen 4).
_HELD = 0.8
# One more op in a step of a loop, whose operands were found before the first step: 331 ns for 45 ops on a row, 28 for one.
_STEP_AGAIN = 10e-9
# An op of a step that is one pass, whose operands and result stay in vector registers, over the same op on arrays in the L1. A
# CartPole step took a worker 1.47 ns a cart; without its sine, cosine and division, by their modelled times, that leaves 23 ps for
# each of 41 ops, which take 30 to 55 as passes over arrays (Xeon with AMX). Ops on a few elements wait for each other.
_IN_REGISTERS, _LEAST_IN_REGISTERS = 0.65, 7e-9
# A product in a step of a loop, beside its arithmetic, and a step itself: h = w @ h of 8 x 8 took 84 ns a step, of 16 x 16 88.
_PRODUCT_AGAIN, _LOOP_STEP = 45e-9, 25e-9
# Short reductions in a step of a loop, over ``picked``: 1.2 to 1.6 ns an element of 6 to 15, 0.5 outside (``picked``: 0.58).
_PICKED_AGAIN = 2.3


@quick
@dataclasses.dataclass(frozen=True, slots=True)
class CpuWork:
    """Everything but the number of rows that the time of an op on a tile depends on; few of a deep network's ops differ.

    ``sink``: it folds the rows. ``kind``: "" for an op that costs nothing. ``elements``: of a row, over which a pointwise op makes
    one pass. ``edges``: elements that come from or go to an op that is not pointwise. ``sums``: results of a reduction.
    ``spreads``: runs of each operand that is repeated inside the row. ``activation``: set for the last op of an activation that the
    matmul before it applies to its accumulators. ``scores``: of an online sum, a row's scores, unless an earlier sum has the same.
    ``again``: in a step of a loop, whose operands were found before the first. ``in_registers``: in a step that is one pass over
    its rows. ``narrow``: it concatenates rows of single elements, or folds interleaved ones. ``taken``: it reads rows, or their
    products, in place from a table. ``still``: in a step of a loop, but the same for all rows: once per tile. ``rounds``: its
    result is rounded to 16 bits in registers. ``constant``: a division by a number, for which two multiplications may do.
    """

    dtype: str
    sink: bool
    dot: DotWork | None = None
    kind: str = ""
    family: str = ""
    elements: int = 0
    edges: int = 0
    sums: int = 1
    spreads: tuple[int, ...] = ()
    activation: str = ""
    access: Access | None = None
    scores: int = 0
    again: bool = False
    in_registers: bool = False
    narrow: bool = False
    taken: bool = False
    still: bool = False
    rounds: bool = False
    constant: bool = False
    held: bool = False


class CpuCost(RegionCost):
    """The costs of a region on a CPU. ``cpu_work(i)``: the facts that op ``i``'s time depends on; ``seconds(work, rows)``: its time
    for a tile of ``rows`` on one core."""

    machine: CpuMachine
    program: CpuProgramContext

    def __init__(
        self,
        graph: Graph,
        region: Region,
        machine: CpuMachine,
        order: int | None = None,
        program: CpuProgramContext = machines.REGION_ALONE,
    ):
        super().__init__(graph, region, machine, order, program)
        self.times = machines.times(machine.profile)
        self.rounding = machine.rounding
        self.cpu_work = functools.lru_cache(maxsize=None)(self._cpu_work)
        self.seconds = functools.lru_cache(maxsize=None)(self._seconds)

    @property
    def border(self) -> list[int]:
        """The streamed values that the region reads or writes in memory."""
        return [v for v in (*self.region.inputs, *self.outputs) if v in self.labels]

    def tile_seconds(self, i: int, rows: int) -> float:
        if self.graph.ops[i].body is None:
            return self.seconds(self.cpu_work(i), rows)
        return sum(count * self.seconds(work, rows) for work, count in self.kinds((i,)).items())

    def kinds(self, ops: Iterable[int]) -> dict[CpuWork, int]:
        """The number of times that each work occurs among ``ops``, counting every step of a loop."""
        found: collections.Counter[CpuWork] = collections.Counter()
        for i in ops:
            op = self.graph.ops[i]
            if op.body is None:
                found[self.cpu_work(i)] += 1
                continue
            body = self.body(i)
            one_pass = body.is_one_pass()
            for work, count in body.kinds(body.region.ops).items():
                found[dataclasses.replace(work, again=True, in_registers=one_pass)] += op["length"] * count
        return dict(found)

    def sink_bytes(self, ops: Iterable[int]) -> int:
        """Bytes of the accumulators of the sinks among ``ops``: double precision for sums of values, single for products; of folds
        by index the table, or nothing where runs of equal indices are folded directly into the result."""
        return sum(self._accumulator(i) for i in ops if i in self.sinks)

    def _accumulator(self, i: int) -> int:
        size = sum(self.row_size(v) for v in self.graph.ops[i].outputs)  # of one batch, where each has its own sums
        access = self.access(i)
        if access is not None:
            return 0 if access.near else max(access.table_bytes, 4 * size)
        return (8 if self.work(i).dot is None else 4) * size

    def _cpu_work(self, i: int) -> CpuWork:
        op, family, work = self.graph.ops[i], self.family(i), self.work(i)
        sink, activation = i in self.sinks, self.activations.get(i, "")
        if work.dot is not None:
            return CpuWork(work.dtype, sink, work.dot)
        stationary = op.outputs[0] not in self.labels and not sink
        absorbed = self.absorbed(i) and not activation or i in self.taken.absorbed
        if stationary and self.carried is not None and family in _GROUPED:  # a random key that is split, a counter
            return CpuWork(work.dtype, sink, None, op.kind, family, self.graph.values[op.outputs[0]].size, still=True)
        if stationary or family in FREE or absorbed:
            return CpuWork(work.dtype, sink)
        taken = i in self.taken.sums
        elements = self.elements(i)
        access = self.access(i)
        if access is not None:
            scores = self.row_size(op.inputs[2]) if self.first_of_scores(i) else 0
            return CpuWork(
                work.dtype, sink, kind=op.kind, family=family, elements=elements, access=access, scores=scores, taken=taken
            )
        if family in COPIES and self._by_columns(op.outputs[0] if family == "concatenate" else op.inputs[0]):
            return CpuWork(work.dtype, sink)
        if family in COPIES or family in (GATHER, SCATTER):
            narrow = family == "concatenate" and any(self.graph.values[v].shape[-1] == 1 for v in op.inputs)
            return CpuWork(work.dtype, sink, kind=op.kind, family=family, elements=elements, narrow=narrow)
        edges = elements * self._edges(i) if family in _GROUPED else 0
        sums = max(1, self.row_size(op.outputs[0])) if family in SCANS and not sink else 1
        picked = family in SCANS and not sink and folds_single_elements(self, i)
        spreads = spreads_short_runs(self, i) if family in _GROUPED else ()
        rounds = family in _GROUPED and not activation and self._rounds(i)
        constant = op.kind == "div" and work.dtype == "float32" and self.graph.values[op.inputs[1]].literal is not None
        return CpuWork(work.dtype, sink, None, op.kind, family, elements, edges, sums, spreads, activation,
                       narrow=picked, taken=taken, rounds=rounds, constant=constant, held=op.inputs[0] in self.summed)  # fmt: skip

    def _by_columns(self, v: int) -> bool:
        """Whether ``v`` lies column by column in a loop's body (``StageLowering._by_columns``), where slices are free."""
        if self.carried is None or v not in self.labels or not 1 < self.row_size(v) <= MOST_COLUMNS:
            return False
        leaves = v in self.outputs and v not in self.carried
        return not leaves and all(self.family(i) in _COLUMNS for i in self.readers.get(v, ()))

    @functools.cached_property
    def taken(self) -> Taken:
        """Ops that read rows of tables in place (``targets.cpu.facts``)."""
        return Taken.of(self)

    @functools.cached_property
    def matrices(self) -> frozenset[int]:
        """The streamed operands that only products of a few rows, for each row of the stream, read: a tile needs no memory for
        them."""

        def once(v: int, i: int) -> bool:
            dot = self.work(i).dot
            larger = max(self.graph.ops[i].inputs, key=self.row_size)
            return dot is not None and dot.per_row and v == larger and has_few_rows(dot, False)

        return frozenset(v for v in self.region.inputs if v in self.labels and all(once(v, i) for i in self.readers.get(v, ())))

    def _absorbed(self, i: int) -> bool:
        return i in self.activations or super()._absorbed(i)

    @functools.cached_property
    def activations(self) -> dict[int, str]:
        """The ops that matmuls apply to their accumulators, with the activation's name for the last op of one, else ""."""
        found: dict[int, str] = {}
        ops = sorted(self.members)
        flow = Flow.of_graph(self.graph, ops, tuple(self.outputs))
        for i in self.region.ops:
            if self.family(i) != "dot" or i in self.sinks:
                continue
            x = self.graph.ops[i].outputs[0]
            readers = self.readers.get(x, [])
            if len(readers) == 1 and self.graph.ops[readers[0]].kind == "add" and self.follows(readers[0]) == i:
                x = self.graph.ops[readers[0]].outputs[0]
            match = passes.recognise(flow, x, self.rounding)
            if match is None:
                continue
            found.update(dict.fromkeys((ops[k] for k in match.absorbed), ""))
            found[self.producer[match.result]] = "" if match.name in ("relu", "scale") else match.name
        return found

    def _rounds(self, i: int) -> bool:
        """Whether the result of op ``i`` is rounded to 16 bits within its group."""
        op, values = self.graph.ops[i], self.graph.values
        dtype = values[op.outputs[0]].dtype
        if not self.rounding.rounds(op.kind, dtype, tuple(values[v].literal for v in op.inputs)):
            return False
        grouped = [self.graph.ops[j] for j in self.readers.get(op.outputs[0], ()) if self.family(j) in _GROUPED]
        return not all(self.rounding.takes_digits(j.kind, dtype, values[j.outputs[0]].dtype) for j in grouped)

    def _edges(self, i: int) -> int:
        """Full-sized operands and results of a pointwise op that are loaded or stored by its group."""
        values, (out,) = self.graph.values, self.graph.ops[i].outputs

        def grouped(j: int) -> bool:
            return self.family(j) in _GROUPED

        full = [v for v in dict.fromkeys(self.graph.ops[i].inputs) if v in self.labels and values[v].size == values[out].size]
        loads = sum(v not in self.producer or not grouped(self.producer[v]) for v in full)
        return loads + (out in self.outputs or not (out in self.summed or all(map(grouped, self.readers.get(out, ())))))

    @functools.cached_property
    def summed(self) -> frozenset[int]:
        """Values that are only summed over the rows, by the step that makes them, in registers (``SummedStore``)."""
        sums = [self.graph.ops[i] for i in self.sinks if self.graph.ops[i].kind == "reduce_sum" and self.work(i).dtype == "float32"]
        read = [op.inputs[0] for op in sums]
        return frozenset(
            v for v in read if len(self.readers[v]) == 1 and v in self.producer and self.family(self.producer[v]) in _GROUPED
        )

    def _seconds(self, work: CpuWork, rows: int) -> float:
        known, step = self.times, _STEP_AGAIN if work.again else machines.STEP_SECONDS
        if work.activation:  # in 16 bits from a table, which takes about as long
            return rows * work.elements * known.activation(work.activation, work.dtype)
        if work.dot is not None:
            return self._product_seconds(work, work.dot, rows) + (_PRODUCT_AGAIN if work.again else 0.0)
        if work.family in SCANS:
            each = work.elements / max(1, work.sums)
            if work.taken:  # it reads its operands as gathers do, and multiplies them in registers
                return step + rows * work.elements * known.vector("mul", work.dtype)
            if work.narrow:
                fold = each * known["picked"] * (_PICKED_AGAIN if work.again else 1.0)
            else:
                fold = known.fold(work.dtype, each, over_rows=work.sink) * (_HELD if work.held else 1.0)
            return step + rows * work.sums * _PASSES[work.family] * fold
        if work.access is not None:
            access = work.access
            if work.taken:  # the gather has the time of reading a row; only the ends of runs are left
                access = dataclasses.replace(access, row_bytes=4)
            return step + rows * (known.access(access) + self._scaling(work))
        if work.family in (GATHER, SCATTER):
            return step + rows * work.elements * known["picked"]
        if work.narrow:
            return rows * work.elements * known["picked"]
        if work.family in COPIES:
            return rows * work.elements * 2 * known.edge(work.dtype)
        if not work.kind:
            return 0.0
        rows = 1 if work.still else rows
        each = known.vector(work.kind, work.dtype)
        if work.constant:
            each = min(each, 2 * known.vector("mul", work.dtype))
        passes = max(rows * work.elements, machines.least_elements(work.kind)) * each
        passes += rows * work.elements * known.rounding(work.dtype) if work.rounds else 0.0
        if work.in_registers and not work.spreads:
            return max(_LEAST_IN_REGISTERS, passes * _IN_REGISTERS)
        spread = sum(n * known.spread(work.dtype, work.elements / n) * (_WITHIN if n > 1 else 1.0) for n in work.spreads)
        return step + passes + rows * (work.edges * known.edge(work.dtype) + spread)

    def second_cache_seconds(self, works: Mapping[CpuWork, int]) -> float:
        """Seconds beyond those of ``works`` on a row, whose times were measured in the L1, where their operands and results lie in
        the L2. An LSTM's steps took no longer."""
        bytes_moved = 0
        for work, count in works.items():
            if not (work.again or work.dot or work.activation):
                elements = work.elements if work.family in SCANS else work.edges
                bytes_moved += count * elements * itemsize(work.dtype)
        each = 1 / self.machine.place("l2").bandwidth - 1 / self.machine.place("l1").bandwidth
        return max(0.0, each) * bytes_moved

    def _product_seconds(self, work: CpuWork, dot: DotWork, rows: int) -> float:
        known = self.times
        weights, gradients = self.products if dot.dtype == "bfloat16" else ("widened", "widened")
        if has_few_rows(dot, work.sink):
            few, size = min(dot.m, dot.n), dot.k * max(dot.m, dot.n)
            return rows * dot.batch * known.few_rows(dot.dtype, few, size, once=not dot.per_row)
        if dot.per_row:
            return rows * dot.batch * known.product_per_row(dot.dtype, dot.m, dot.k, dot.n)
        if work.sink:
            return dot.batch * known.gradient(dot.dtype, gradients, rows * dot.k, dot.m, dot.n)
        return dot.batch * known.product(dot.dtype, weights, rows * dot.m, dot.k, dot.n) + self._passing_seconds(dot)

    def _passing_seconds(self, dot: DotWork) -> float:
        """Seconds to read the weights of a batched product once for each tile, which the time measured with one weight leaves out.
        64 products of 128 x 32 by 32 x 128 took 1.4 ms in tiles of a batch each, and 1.8 in tiles of 16 rows of all (Xeon)."""
        size = dot.batch * dot.k * dot.n * itemsize(dot.dtype)
        if dot.batch == 1 or size <= self.machine.profile.l1:
            return 0.0
        level = "l2" if size <= self.machine.local_bytes else "l3"
        return size / self.machine.place(level).bandwidth

    def _scaling(self, work: CpuWork) -> float:
        """Seconds of the largest scores, exponentials and products that an online sum computes of a row before it folds it."""
        if work.kind not in ONLINE:
            return 0.0
        known = self.times
        runs = known.access(Access(1, 4 * work.scores, 4 * work.scores, True, True)) if work.scores else 0.0
        each = sum(known.vector(kind, work.dtype) for kind in ("is_finite", "select_n", "sub", "exp")) + 3 * known.edge(work.dtype)
        product = 0.0 if work.taken else known.vector("mul", work.dtype) + 2 * known.edge(work.dtype)
        return runs + work.scores * each + work.elements * product

    def pack_seconds(self, of: Container[int] | None = None, tiles: int = 1, again: bool = False) -> float:
        """Worker-seconds to pack the weights of products, or those among ``of``: once, or for each of ``tiles`` tiles if a weight
        depends on the batch. ``again``: in a step of a loop."""
        machine, ops = self.machine, self.region.ops
        size = 2 * self.stationary_bytes(ops)
        level = "l2" if size <= machine.local_bytes else "l3" if size <= machine.shared_bytes else "dram"
        packed: set[object] = set()
        seconds = 0.0
        for i in ops:
            work, op = self.work(i), self.graph.ops[i]
            if work.dot is None or i in self.sinks:
                continue
            weight = next((v for v in op.inputs if v not in self.labels), -1)
            once = (weight, op["lhs_contract"], op["rhs_contract"])
            if once in packed or of is not None and weight not in of:
                continue
            packed.add(once)
            seconds += _PRODUCT_AGAIN if again else self.times["call/layer"]
            often = tiles if weight in self.of_batch else 1
            seconds += often * self.packed_seconds(i, work.dot, level)
        return seconds

    def packed_seconds(self, i: int, dot: DotWork, level: str) -> float:
        """Seconds to pack the weight of product ``i``, which lies in ``level``."""
        op = self.graph.ops[i]
        weight = next((v for v in op.inputs if v not in self.labels), -1)
        contract = op["rhs_contract" if weight == op.inputs[1] else "lhs_contract"]
        transposed = len(self.graph.values[weight].shape) - 1 in contract
        way = self.products[0] if dot.dtype == "bfloat16" else "widened"
        return dot.batch * dot.k * dot.n * self.times.pack(dot.dtype, way, transposed, level)

    def is_one_pass(self) -> bool:
        """Of a loop's body: whether a step is one elementwise pass over the rows, and nothing else."""
        values = self.graph.values
        return all(
            self.family(i) in _GROUPED | FREE
            and (not self.is_maker(i) or all(values[v].literal is not None for v in self.graph.ops[i].inputs))
            for i in self.region.ops
        )

    def steps_seconds(self) -> float:
        """Seconds per tile in which a worker moves from one step of a loop to the next."""
        return sum(steps * (_LOOP_STEP + body.steps_seconds()) for steps, _, body in self.loops())

    def repack_seconds(self) -> float:
        """Seconds per tile in which a worker packs weights that steps of loops slice or compute."""
        return sum(
            steps * (body.pack_seconds(again=True) - body.pack_seconds(constants, again=True) + body.repack_seconds())
            for steps, constants, body in self.loops()
        )

    @functools.cached_property
    def products(self) -> tuple[str, str]:
        """The fastest entries of ``PRODUCTS`` for bfloat16 operands: in products with weights, and in weight gradients."""
        known, typical = self.times, machines.TILE
        works = [(w.sink, w.dot, n) for w, n in self.kinds(self.region.ops).items() if w.dot and w.dot.dtype == "bfloat16"]

        def weights(way: str) -> float:
            dots = [(dot, n) for sink, dot, n in works if not sink]
            return sum(n * dot.batch * known.product(dot.dtype, way, typical * dot.m, dot.k, dot.n) for dot, n in dots)

        def gradients(way: str) -> float:
            dots = [(dot, n) for sink, dot, n in works if sink]
            return sum(n * dot.batch * known.gradient(dot.dtype, way, typical * dot.k, dot.m, dot.n) for dot, n in dots)

        ways = known.ways("bfloat16")[::-1]  # of equal ones the later: dots before widened
        return min(ways, key=weights), min(ways, key=gradients)

    def strided_seconds(self, rows: int) -> float:
        """Worker-seconds lost on border arrays whose rows do not lie together in memory, in tiles of ``rows``.

        Such an array streams over its fastest dimension, so the elements of a row lie a whole stride apart and each costs a line.
        """
        elements, sliced = 0, self.sliced()
        for v in self.border:
            value, labels = self.graph.values[v], self.labels[v]
            if v in sliced and labels[-1] and self.row_size(v) == value.shape[0]:
                continue  # the rows of a slice lie together
            real = [d for d, n in enumerate(value.shape) if n > 1]
            if real and labels[real[-1]] and self.row_size(v) > 1:
                elements += value.size
        far, near = pieces(self, rows)
        return elements * _STRIDED_SECONDS + (far * _PIECE_SECONDS + near * _NEAR_PIECE_SECONDS)

    def live_row_bytes(self, ops: Iterable[int]) -> int:
        """The most bytes per row that are alive at once while ``ops`` run in order on a tile. Pointwise ops overwrite an input that
        is not read again.
        """
        order = list(ops)
        last = {v: k for k, i in enumerate(order) for v in self.graph.ops[i].inputs}
        alive: dict[int, int] = {}
        unread: list[int] = []  # made by the previous op, for other stages only
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
            most = max(most, total + (self.body(i).live_row_bytes(self.body(i).region.ops) if op.body is not None else 0))
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
        return (
            v in self.labels
            and v not in self.sliced()
            and v not in self.taken.values
            and v not in self.matrices
            and not (v in self.producer and self.family(self.producer[v]) in FREE and self.is_maker(self.producer[v]))
            and not self._leaves_at_once(v)
        )

    def _leaves_at_once(self, v: int) -> bool:
        """Is ``v`` a product that goes to memory as it is made? Rows of logits over 50 257 tokens do not stay with a worker."""
        return v not in self.readers and v in self.producer and self.family(self.producer[v]) == "dot"

    def made_row_bytes(self) -> int:
        """Bytes that the ops write to memory for a row, in all steps of loops. Pointwise ops hand results on in registers."""

        def stored(v: int) -> bool:
            if not self.streamed(v) or self.family(self.producer[v]) not in _GROUPED or v in self.outputs:
                return self.streamed(v)
            return not all(self.family(j) in _GROUPED for j in self.readers.get(v, ()))

        made = (v for i in self.region.ops if self.graph.ops[i].body is None for v in self.graph.ops[i].outputs)
        return sum(self.row_bytes(v) for v in made if stored(v)) + sum(n * b.made_row_bytes() for n, _, b in self.loops())

"""The kernels that XLA:CPU makes: fused elementwise loops (``Fused``), loops' steps (``Steps``), and ``RowKernels``."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence

from kitsune_jax.ops.graph import Graph, Op, reached
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import RegionCost
from kitsune_jax.targets.cpu.profile import xla
from kitsune_jax.targets.cpu.profile.profile import Profile, table

# --- Fused loops ------------------------------------------------------------------------------------------------------------------

NARROW = ("bfloat16", "float16")
FAMILIES = ("pointwise", "convert")
_TANH_FLOPS = 14.0  # operations of a tanh, by which functions that were not measured are scaled
SIMPLE = 4.0  # operations up to which an op costs as much as an addition
ARITHMETIC = 5  # operations of the loop "arithmetic" beyond those of "move"
# A tanh's busy time, as a part of one arithmetic operation's, which short loops hide behind memory.
_OF_TANH = 1 / 28
# XLA gives a loop a second thread if it moves this many bytes, or if it has more operations than bytes and its costs (an operation
# 1, a function 2, a byte 10) come to this: ``parallel_task_assignment.cc``, and confirmed (JAX 0.12).
_SHARED_BYTES, _SHARED_COST = 2 * (256 << 10), 2 * 100_000
_FUNCTION_COST, _BYTE_COST = 2, 10
_FUNCTIONS = frozenset(
    {"exp", "exp2", "expm1", "log", "log1p", "tanh", "erf", "sqrt", "rsqrt", "cbrt", "pow", "sin", "cos", "tan", "atan2"}
)
_EXPANDED = {"logistic": 3}  # functions that consist of another one and this many operations
# The time of a chain of six functions over one of two: 3 if they never wait, 9 if they always do.
_LEAST, _MOST = 3.05, 8.0
_COMPARED = frozenset({"max", "min"})  # compares narrow numbers without converting them


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Seconds of the whole machine for an element. ``busy``: while its units work. ``wait``: from the operands to the result,
    shared by the elements of a vector."""

    busy: float
    wait: float

    def __add__(self, other: Work) -> Work:
        return Work(self.busy + other.busy, self.wait + other.wait)

    def times(self, n: float) -> Work:
        return Work(n * self.busy, n * self.wait)


class Fused:
    """Seconds of the elementwise operations of a fused loop, beyond those to read and write its arrays.

    A core works on several iterations at once: independent operations keep its units busy, but a chain of them waits for results
    unless enough iterations share the wait. A loop takes ``busy * wait / (window + busy)``, and ``busy`` at least, where ``wait``
    is that of the longest chain (1, 2, 3 and 5 tanhs in a chain took 0.3, 0.8, 1.5 and 3.3 ns, side by side 0.25 each; Xeon).

    ``window``: seconds of ``busy`` that a core keeps under way."""

    def __init__(self, profile: Profile):
        self._numbers = known = table(profile)
        self._move = move = known["xla/loop/move/float32"]
        two, six = self._beyond("xla/loop/tanh/float32"), self._beyond("xla/chain/tanh/float32")
        alone = (known["xla/beside/tanh/float32"] - move) / xla.BESIDE
        alone = min(max(alone, two / 6), two / 2)
        grown = min(max(six / two, _LEAST), _MOST)
        # two = 4 busy wait / (window + 2 busy), six = 36 busy wait / (window + 6 busy)
        self.window = alone * (6 * grown - 18) / (9 - grown)
        self._tanh = Work(alone, two * (self.window + 2 * alone) / (4 * alone))
        self._arithmetic = {home: self._simple(home) for home in ("float32", *NARROW)}
        self.work = functools.lru_cache(maxsize=1024)(self._work)

    def seconds(self, work: Work, elements: float = 1) -> float:
        """``work`` of ``elements`` elements."""
        return max(work.busy, work.busy * work.wait / max(self.window * elements + work.busy, 1e-30))

    def op(self, kind: str, dtype: str) -> float:
        """An element of an op in a loop of its own."""
        return self.seconds(self.work(kind, dtype))

    def kernel(self, cost: RegionCost, ops: Collection[int]) -> float:
        """The elementwise operations of a kernel, by the sum of their busy times and their longest chain."""
        busy, longest, elements = 0.0, 0.0, 0
        wait: dict[int, float] = {}  # value -> the longest chain that ends in it
        for i in sorted(ops):
            op = cost.graph.ops[i]
            before = max((wait.get(v, 0.0) for v in op.inputs), default=0.0)
            if cost.family(i) in FAMILIES:
                size = cost.graph.values[op.outputs[0]].size
                dtype = cost.graph.values[op.inputs[0] if op.inputs else op.outputs[0]].dtype
                work = self.work(op.kind, dtype).times(size * _repeated(op) * hashes(op))
                busy, before, elements = busy + work.busy, before + work.wait, max(elements, size)
            wait.update(dict.fromkeys(op.outputs, before))
            longest = max(longest, before)
        return self.seconds(Work(busy, longest), elements)

    def one_thread(self, cost: RegionCost, ops: Collection[int], moved: int) -> bool:
        """Whether XLA gives a loop of ``ops``, which reads and writes ``moved`` bytes, only one thread."""
        flops = functions = 0
        for i in ops:
            if cost.family(i) not in FAMILIES:
                continue
            op = cost.graph.ops[i]
            size = cost.graph.values[op.outputs[0]].size * _repeated(op)
            dtype = cost.graph.values[op.inputs[0] if op.inputs else op.outputs[0]].dtype
            converted = 2 * size if self._is_converted(dtype) else 0  # each operand, or all but one constant, and the result
            if is_function(op.kind):
                functions, flops = functions + size, flops + converted + _EXPANDED.get(op.kind, 0) * size
            else:
                flops += size + converted
        if flops <= moved:
            return moved < _SHARED_BYTES
        return flops + _FUNCTION_COST * functions + _BYTE_COST * moved < _SHARED_COST

    def _is_converted(self, dtype: str) -> bool:
        """Whether arithmetic on ``dtype`` is done in float32, as that of float16 is on CPUs without instructions for it."""
        return dtype in NARROW and self._arithmetic[dtype].busy > 2 * self._arithmetic["float32"].busy

    def _work(self, kind: str, dtype: str) -> Work:
        flops, like = (OPS[kind].flops, OPS[kind].like) if kind in OPS else (1.0, None)
        home = dtype if dtype in NARROW else "float32"
        simple = self._arithmetic[home]
        if kind in _COMPARED and home != "float32":
            simple = simple.times(0.5)
        name, as_long = like or (kind, 1.0)
        if f"xla/loop/{name}/float32" in self._numbers and name not in ("move", "arithmetic"):
            found = self._function(self._beyond(f"xla/loop/{name}/float32")).times(as_long)
        elif flops <= SIMPLE:
            found = Work(0.0, 0.0)
        else:
            found = self._tanh.times(flops / _TANH_FLOPS)
        return (found + simple).times(2.0 if dtype == "float64" else 1.0)

    def _beyond(self, key: str) -> float:
        """An element of a loop beyond moving it."""
        return max(self._numbers[key] - self._move, 0.1 * self._move)

    def _function(self, two: float) -> Work:
        """A function of which ``two`` in a chain take this long, with a tanh's ratio of wait to busy time."""
        ratio = self._tanh.wait / self._tanh.busy
        busy = min((two + math.sqrt(two * two + 4 * ratio * self.window * two)) / (4 * ratio), two / 2)
        return Work(busy, ratio * busy)

    def _simple(self, home: str) -> Work:
        """Arithmetic on numbers of dtype ``home``, and conversions. Its wait is the time of gelus beyond that of their tanhs."""
        known, tanh = self._numbers, self._tanh
        move = known[f"xla/loop/move/{home}"]
        busy = tanh.busy * _OF_TANH
        if home != "float32":
            busy = max(busy, (known[f"xla/loop/arithmetic/{home}"] - move) / ARITHMETIC)
        count = xla.GELU_ARITHMETIC + (home != "float32")  # the tanh is converted as well
        gelu = (known[f"xla/chain/gelu/{home}"] - move) / xla.GELUS
        each = tanh.busy + count * busy
        wait = gelu * (self.window + xla.GELUS * each) / (xla.GELUS * each)
        return Work(busy, max((wait - tanh.wait) / count, busy))


fused = functools.lru_cache(maxsize=16)(Fused)  # of a profile, made once


def is_function(kind: str) -> bool:
    """Whether an op is an elementary function, or contains one."""
    return kind in _FUNCTIONS or kind in _EXPANDED


def instructions(cost: RegionCost, ops: Collection[int]) -> int:
    """The approximate number of instructions of a loop of ``ops``, with one for a function."""
    found = 0
    for i in ops:
        if cost.family(i) in FAMILIES:
            op = cost.graph.ops[i]
            dtype = cost.graph.values[op.inputs[0] if op.inputs else op.outputs[0]].dtype
            rounded = 7 if dtype == "bfloat16" else 3 if dtype == "float16" and is_function(op.kind) else 0
            found += (1 + rounded + _EXPANDED.get(op.kind, 0)) * _repeated(op)
    return found


def hashes(op: Op) -> float:
    """How many of XLA's hashes an op that hashes is; two ops that each take a word of the same result share one."""
    return 0.5 if op.kind == "threefry2x32" and op["word"] != "xor" else 1.0


def _repeated(op: Op) -> int:
    """The multiplications of a power by a fixed integer; 1 for any other op."""
    if op.kind != "integer_pow":
        return 1
    power = abs(op["y"])
    return max(1, power.bit_length() + power.bit_count() - 2)


# --- Steps of loops (all figures: JAX 0.12, float32, a Xeon 6) --------------------------------------------------------------------

# A product in a compiled loop: x @ w of 1 x 16 x 16 took 39 ns, of 1 x 64 x 64 144 ns, of 1 x 256 x 256 2128 ns.
_COMPILED_SECONDS, _COMPILED_PER_TERM = 20e-9, 0.031e-9
# A library product in an interpreted loop: 8 x 8 x 8 took 310 ns, 64 x 64 x 64 4230 ns. Below 8 columns 2 rows took 630 ns.
_CALLED_SECONDS, _CALLED_PER_TERM, _TINY_SECONDS = 250e-9, 0.0155e-9, 600e-9
# Any other kernel in an interpreted loop: one more fusion in a step took 80 to 150 ns with its 32 to 56 elements.
_KERNEL_SECONDS = 80e-9
_TINY_COLUMNS, _TINY_ROWS, _LEAST_COLUMNS = 8, 8, 4
# The library's reductions, their dtypes and least size.
_REDUCTIONS, _FLOATS, _REDUCED = ("reduce_sum", "reduce_max", "reduce_min"), ("float32", "bfloat16", "float16", "float64"), 4096
# A compiled loop is vectorised if either of the last two dimensions has 64 numbers, or 8 divides the one before the last: exp of
# [16, o, n] took 0.4 to 0.8 ns an element with 8 x 4, 64 x 15 and 6 x 64, and 3.9 to 4.7 with 6 x 4, 10 x 4 and 7 x 33.
_VECTORISED, _DIVISOR = 64, 8
# An elementary function in scalar code: exp 4.1, tanh 2.9, sin 2.8 ns; of matrices, [37, 6] and [37, 20], exp 1.3 to 1.7.
_SCALAR_SECONDS, _OF_MATRICES = 3.3e-9, 1.5e-9


@dataclasses.dataclass(frozen=True, slots=True)
class LoopStepCosts:
    """The start of the kernels in a step of a loop. ``compiled``: XLA compiles the loop to one function, because a library
    multiplies or reduces nothing in its body: a step starts nothing, and products are loops of one thread. An interpreted loop
    calls each of its kernels in each step. ``kernel``: seconds to start a kernel without products."""

    compiled: bool
    kernel: float

    def product_seconds(self, m: int, k: int, n: int, batch: int) -> float:
        """Seconds of a product on one thread, with its start. XLA shares large ones out, so they may take less."""
        terms = batch * m * k * n
        if self.compiled:
            return _COMPILED_SECONDS + terms * _COMPILED_PER_TERM
        tiny = 1 < m < _TINY_ROWS and max(k, n) < _TINY_COLUMNS
        return (_TINY_SECONDS if tiny else _CALLED_SECONDS) + terms * _CALLED_PER_TERM


def steps_of(body: Graph, profile: Profile) -> LoopStepCosts:
    """How XLA runs the steps of the loop with this ``body``, including inner loops."""
    compiled = not _calls_library(body)
    return LoopStepCosts(compiled, profile.seconds("xla/while") if compiled else _KERNEL_SECONDS)


def _calls_library(body: Graph) -> bool:
    return any(_calls_library(op.body) if op.body is not None else _from_library(body, op) for op in body.ops)


def reduces_in_library(graph: Graph, op: Op) -> bool:
    """Whether XLA hands ``op`` to its library as a reduction."""
    if op.kind not in _REDUCTIONS:
        return False
    value = graph.values[op.inputs[0]]
    return value.dtype in _FLOATS and value.size >= _REDUCED


def _from_library(graph: Graph, op: Op) -> bool:
    """Whether XLA hands ``op`` to a library, as its programs for some 200 shapes say, instead of making a loop of it.

    YNNPACK takes sums and maxima of 4096 numbers or more, and products with one size of 8 or more unless they read the columns of
    their first operand, as weight gradients do. Eigen takes other products that sum up 4 numbers or more and have 4 rows or columns
    or more. No library has products of vectors.
    """
    if reduces_in_library(graph, op):
        return True
    if op.kind != "dot_general":
        return False
    m, k, n, _ = sizes(graph, op)
    if min(m, n, k) == 1:
        return False
    if max(m, k, n) >= _TINY_COLUMNS and not _reads_columns(graph, op):
        return True
    return k >= _LEAST_COLUMNS and max(m, n) >= _LEAST_COLUMNS


def _reads_columns(graph: Graph, op: Op) -> bool:
    """Whether the product ``op`` contracts the rows of its first operand, a matrix or one for each batch, seen through a
    transpose."""
    rank, batch = len(graph.values[op.inputs[0]].shape), len(op["lhs_batch"])
    if rank - batch != 2 or len(op["lhs_contract"]) != 1:
        return False
    (dimension,) = op["lhs_contract"]
    maker = next((other for other in graph.ops if op.inputs[0] in other.outputs), None)
    if maker is not None and maker.kind == "transpose":
        dimension = maker["permutation"][dimension]
    return dimension == batch


def sizes(graph: Graph, op: Op) -> tuple[int, int, int, int]:
    """m, k, n and the batch of a product."""
    lhs, rhs = (graph.values[v] for v in op.inputs)
    batch = math.prod(lhs.shape[d] for d in op["lhs_batch"])
    k = math.prod(lhs.shape[d] for d in op["lhs_contract"])
    return lhs.size // max(1, batch * k), k, rhs.size // max(1, batch * k), batch


def scalar_seconds(shape: Sequence[int]) -> float:
    """Seconds of an elementary function of a number in an array of this shape where a compiled loop is scalar code, else 0."""
    if len(shape) < 2 or math.prod(shape) == max(shape):
        return 0.0
    if shape[-1] >= _VECTORISED or shape[-2] >= _VECTORISED or shape[-2] % _DIVISOR == 0:
        return 0.0
    return _SCALAR_SECONDS if len(shape) > 2 else _OF_MATRICES


# --- Kernels over rows: softmaxes, layer norms, and the elementwise work around them ----------------------------------------------

_MANY_ROWS = 4096
_FAMILIES = frozenset({"pointwise", "convert", "broadcast", "reshape", "reduce", "iota"})
_DTYPES = frozenset({"float32", "bfloat16", "bool", "int32"})
# The seconds of such a kernel, over those of its ops in separate kernels and of one pass over operands and results: softmaxes of 64
# to 512 columns 0.45 to 0.62 in float32 and 0.38 to 0.46 in bfloat16, layer norms 0.46 to 0.71 and 0.27 to 0.37 (Xeon with AMX).
IN_32_BITS, IN_16_BITS = 0.5, 0.38


@dataclasses.dataclass(frozen=True)
class RowKernels:
    """The ops of a program that XLA runs in kernels over rows: of many rows, it makes one kernel of elementwise work and reductions
    that keep the rows, which runs the ops block by block in cache (JAX 0.12). ``between``: values only made and read there."""

    ops: frozenset[int] = frozenset()
    between: frozenset[int] = frozenset()

    def hold(self, ops: Collection[int]) -> bool:
        return bool(self.ops) and self.ops.issuperset(ops)


def row_kernels(graph: Graph) -> RowKernels:
    """The ops of ``graph`` that are connected to a reduction that keeps many rows, by ops that such kernels have."""
    fits = [_fits(graph, op) for op in graph.ops]
    producers, consumers = graph.producers(), graph.consumers()

    def near(i: int) -> list[int]:
        makers = [producers[v] for v in graph.ops[i].inputs if v in producers]
        return [j for j in (*makers, *(c for v in graph.ops[i].outputs for c in consumers.get(v, ()))) if fits[j]]

    found = reached((i for i, op in enumerate(graph.ops) if fits[i] and OPS[op.kind].family == "reduce"), near)
    results = set(graph.outputs)
    made = (v for i in found for v in graph.ops[i].outputs if v not in results)
    return RowKernels(frozenset(found), frozenset(v for v in made if found.issuperset(consumers.get(v, ()))))


def _fits(graph: Graph, op: Op) -> bool:
    if op.kind == "opaque" or op.body is not None or OPS[op.kind].family not in _FAMILIES:
        return False
    if any(graph.values[v].dtype not in _DTYPES for v in op.outputs):
        return False
    if OPS[op.kind].family != "reduce":
        return True
    return 0 not in op["axes"] and graph.values[op.inputs[0]].shape[0] >= _MANY_ROWS

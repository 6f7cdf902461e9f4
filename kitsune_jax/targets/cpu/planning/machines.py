"""Machine models of CPUs (``CpuMachine``), and the times that planning interpolates between a profile's numbers (``CpuTimes``).

Comes in: the name of a device, or a profile. Goes out: a ``CpuMachine``, a program's context, and seconds of kernels for any shape.
Invariant: equal names and equal profiles give equal models and times, so a plan is a pure function of the graph and the profile.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from kitsune_jax.ops.spec import NARROW, Rounding
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import Access, itemsize
from kitsune_jax.planning.plan import KIB, MIB, Machine, Place, ProgramContext
from kitsune_jax.targets.cpu.call import FlopCounts
from kitsune_jax.targets.cpu.profile import profile as shipped
from kitsune_jax.targets.cpu.profile import store, xla
from kitsune_jax.targets.cpu.profile.kernels import ACCESSED, DEPTHS, SHORT, SMALL_PRODUCTS, TILE, WIDTHS
from kitsune_jax.targets.cpu.profile.profile import MachineProfile, table

# --- Machine models ---------------------------------------------------------------------------------------------------------------

# glibc mallopt(3): M_MMAP_THRESHOLD grows to at most this; larger blocks are fresh pages at every call.
FAULT_THRESHOLD = 32 * MIB
# A worker's share of the last level, at most: the largest of any CPU (EPYC 9175F, 512 MiB for 16 cores). A virtual machine of two
# cores is shown the 480 MiB of a whole socket and still waits for memory: 10^6 x 64 sums by index modelled at 12 ms took XLA 27.
_MOST_SHARED = 32 * MIB
# Nominal, for latencies that are published in cycles: current cores run at 3 to 5 GHz.
_CPU_CLOCK = 3.5e9
_SQUARE = 512
_CPU_SOURCES = (
    ("profile", "measured by python -m kitsune_jax machine; shipped ones: see kitsune_jax/targets/cpu/profile/profile.py"),
    ("places", "latencies of 4, 14 and 50 cycles (Zen and Ice Lake, vendors' optimisation guides)"),
)


# Bytes that a call may take beside its arrays: for partial sums (``strands_for`` in ``cpu/src/executor.cc``), and for the tiles of
# all threads together (``kMostScratch``).
PARTIAL_SUMS, TEMPORARY = 256 * MIB, 1024 * MIB


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CpuMachine(Machine):
    """``fault_bandwidth``: bytes per second of the first touch of fresh pages, by all workers; ``huge_fault_bandwidth``: of the
    huge pages that a pipeline asks for. ``profile``: the source of all times. ``rounding``: where XLA rounds 16-bit results.
    """

    fault_bandwidth: float
    huge_fault_bandwidth: float
    profile: MachineProfile
    rounding: Rounding = xla.KNOWN_ROUNDING


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CpuProgramContext(ProgramContext):
    """``fresh_bytes``: larger arrays of XLA's are fresh pages at every call. ``looped``: the graph is the body of a loop that XLA
    executes. ``flop_counts``: operations of the program, by which XLA chooses the thread.
    """

    fresh_bytes: int = FAULT_THRESHOLD
    looped: bool = False
    flop_counts: FlopCounts = FlopCounts()


# In 8 of 10 programs of more than 1 ms the measured gain was so many times the modelled one (229 cases of ``benchmarks.grid`` on a
# Zen 5 and a Xeon 6, 2026-11-27 to 29; ``python -m benchmarks model --device cpu`` counts them).
GAIN_BAND = (0.5, 1.5)
REGION_ALONE = CpuProgramContext()  # the region is the whole program


@functools.lru_cache(maxsize=64)
def cpu_of(profile: MachineProfile, rounds: Rounding = xla.KNOWN_ROUNDING) -> CpuMachine:
    """The machine model of a CPU with the numbers of ``profile``. ``rounds``: where XLA rounds 16-bit results."""
    workers, seconds = profile.workers, profile.seconds

    def rate(dtype: str, way: str = "widened") -> float:
        return 2.0 * TILE * _SQUARE * _SQUARE / seconds(f"gemm/{dtype}/{way}/{_SQUARE}x{_SQUARE}")

    def moved(level: str) -> float:  # a copied byte is one read and one written
        return 2.0 / seconds(f"copy/{level}")

    f32 = rate("float32")
    ways = [w for w in ("widened", "dots", "tiles") if profile.get(f"gemm/bfloat16/{w}/{_SQUARE}x{_SQUARE}")]
    bf16 = max(rate("bfloat16", w) for w in ways)
    return CpuMachine(
        name=profile.name,
        platform="cpu",
        workers=workers,
        tensor_rates=(("float64", rate("float64")), ("bfloat16", bf16), ("other", f32)),
        local_bytes=profile.l2,
        shared_bytes=max(min(profile.l3, _MOST_SHARED * workers), profile.l2),
        shared_bandwidth=moved("l3") * workers,
        dram_bandwidth=moved("dram") * workers,
        places=(
            Place("l1", 4 / _CPU_CLOCK, moved("l1")),
            Place("l2", 14 / _CPU_CLOCK, moved("l2")),
            Place("l3", 50 / _CPU_CLOCK, moved("l3")),
        ),
        call_seconds=seconds("call"),
        kernel_seconds=seconds("xla/kernel"),
        fault_bandwidth=workers / seconds("touch"),
        huge_fault_bandwidth=workers / seconds("touch/huge"),
        sources=(*_CPU_SOURCES, ("caches", f"{profile.l1 // KIB} and {profile.l2 // KIB} KiB a core, {profile.l3 // KIB} KiB")),
        profile=profile,
        rounding=rounds,
        gain_band=GAIN_BAND,
    )


def cpu_model(name: str) -> CpuMachine:
    """A fixed CPU, for tests and for planning elsewhere: ``"<family>-<cores>"``, by a profile that comes with the package.
    Raises ``ValueError`` for a name that is not of this form.

    >>> cpu_model("avx2-8").workers
    8
    """
    return cpu_of(shipped.shipped(name))


def cpu_at_hand() -> CpuMachine:
    """The CPU this process runs on, by the profile that ``KITSUNE_PROFILE`` names, or by one measured now or before.

    Raises ``ValueError`` where ``KITSUNE_NUM_THREADS`` or ``KITSUNE_PROFILE`` cannot be understood.
    """
    return cpu_of(store.at_hand(), xla.rounding_at_hand())


# --- Times ------------------------------------------------------------------------------------------------------------------------

# Columns that a micro-kernel computes at least: one vector of floats on the widest machines.
_VECTOR = 16
_FEW = 16  # elements of the rows measured as ``fold/short/`` and ``load/short/``
# The start of a vector's product with a matrix of its own of 36 to 1024 elements, and of 4096, which is read in place. 6 x 6, 16 x
# 16, 32 x 32 and 64 x 64 took 31, 54, 115 and 275 ns of one worker (float32, Xeon with AMX).
_OWN_MATRIX, _OWN_LARGE_MATRIX = 25e-9, 100e-9
_NARROW_RUN = 1.4  # a run's row of a few numbers, over one of 16 without its reading
_SHORT = 256  # width of the product measured as ``short/``
_MOVED = 12.0  # bytes that an element of the loop "move" reads and writes in float32
# A call wakes another thread for every 20 us of work that can be shared (kNsPerThread in cpu/src/ffi.cc).
SHARED_SECONDS = 2 * 20e-6
# Looking up the operands of one more op on a tile, before its first element: 50 to 100 ns on Zen 5.
STEP_SECONDS = 70e-9
# An op computes whole vectors; the bits of an rbg key a strip of eight (1 to 64 numbers: 0.51 us, 512: 2.1), threefry four.
_LEAST = {"philox4x32": 8 * _VECTOR, "threefry2x32": 4 * _VECTOR}
# A number's bits take 3.6 ns, 14 times as long as a tanh: each number has a hash of its own, which makes four of them.
_AS_TANHS = {"philox4x32": 14.0}
# XLA's library (YNNPACK) takes no product with a dimension below 8.
_LEAST_SIDE = 8
# XLA folds 8 and 16 numbers by index hardly more slowly than one: 1.0, 1.6 and 2.6 ns where 64 take 11.7 (JAX 0.12, Xeon with AMX).
_NARROW_FOLDS = 1.5
# A fold, over an operation of the loop "arithmetic", whose operations wait for each other: bfloat16 folds took 0.04 to 0.1 ns a
# number longer than float32 ones, an operation of the loop 0.19 (Xeon with AMX).
_BESIDE = 0.4
_ROWS = 1024  # of most measured products
FAMILIES = ("pointwise", "convert")  # of ops that XLA fuses into loops
_TANH_FLOPS = 14.0  # operations of a tanh, by which functions that were not measured are scaled
SIMPLE = 4.0  # operations up to which an op costs as much as an addition
ARITHMETIC = 5  # operations of the loop "arithmetic" beyond those of "move"
_OF_TANH = 1 / 28  # one arithmetic operation, which short loops hide behind memory, over a tanh


def least_elements(kind: str) -> int:
    """The number of elements up to which a pointwise op takes as long as for one."""
    return _LEAST.get(kind, _VECTOR)


class CpuTimes:
    """Seconds of our kernels on one worker and of XLA's on the whole machine, for any shape.

    Every number comes from the profile; this class adds how times grow with shapes. Rates are interpolated between measured shapes
    on logarithmic scales, and constant beyond them.
    """

    def __init__(self, profile: MachineProfile):
        self.profile = profile
        self._numbers = table(profile)
        self.product = functools.lru_cache(maxsize=4096)(self._product)
        self.gradient = functools.lru_cache(maxsize=4096)(self._gradient)
        self._dot = functools.lru_cache(maxsize=4096)(self._xla_dot)
        self.vector = functools.lru_cache(maxsize=1024)(self._vector)
        self.xla_op = functools.lru_cache(maxsize=1024)(self._xla_op)

    def __getitem__(self, key: str) -> float:
        return self._numbers[key]

    # -- our kernels, on one worker

    def ways(self, dtype: str) -> tuple[str, ...]:
        """The kinds of product (``PRODUCTS``) that this machine has for ``dtype``."""
        return tuple(p for p in ("widened", "dots", "tiles") if f"gemm/{_float(dtype)}/{p}/{_SQUARE}x{_SQUARE}" in self._numbers)

    def _product(self, dtype: str, way: str, rows: float, k: int, n: int) -> float:
        """A tile of ``rows`` rows times k x n."""
        dtype = _float(dtype)
        padded = -(-n // _VECTOR) * _VECTOR
        grid = [[math.log(self[f"gemm/{dtype}/{way}/{a}x{b}"] / (a * b)) for b in WIDTHS] for a in DEPTHS]
        across = [_between(WIDTHS, line, padded) for line in grid]
        per_row = math.exp(_between(DEPTHS, across, k)) * max(k, DEPTHS[0]) * padded / TILE
        short = self[f"short/{dtype}/{way}"] / (math.exp(grid[-1][-1]) * _SHORT * _SHORT / TILE)
        return per_row * max(rows, short)

    def _gradient(self, dtype: str, way: str, rows: float, m: int, n: int) -> float:
        """The weight gradient of a tile: ``rows`` contracted, m x n accumulators."""
        dtype = _float(dtype)
        points = [k for k in (16, 64, 512) if f"outer/{dtype}/{way}/{k}x{k}" in self._numbers]
        per_product = [math.log(self[f"outer/{dtype}/{way}/{k}x{k}"] / (TILE * k * k)) for k in points]
        # Each tile reads and writes the accumulators once, however few rows it has.
        a, b = self[f"outer_short/{dtype}/{way}"] / (_SHORT * _SHORT), math.exp(_between(points, per_product, _SHORT))
        sums = max(0.0, (a - SHORT * b) / (1 - SHORT / TILE))
        per_row = max(math.exp(_between(points, per_product, _mean(m, n))) - sums / TILE, 0.2 * b)
        return (per_row * rows + sums) * max(m, 2) * max(n, _VECTOR // 2)

    def few_rows(self, dtype: str, rows: int, elements: int, once: bool = True) -> float:
        """A product of ``rows`` rows with a matrix of ``elements``, which is read once, in place. Not ``once``: one of many."""
        return elements * self[f"few/{_float(dtype)}"] * (0.75 + 0.25 * rows) + (0.0 if once else _OWN_LARGE_MATRIX)

    def pack(self, dtype: str, way: str, transposed: bool, level: str) -> float:
        """An element of a weight that lies in ``level`` (l2, l3 or dram), packed."""
        size = itemsize(_float(dtype))
        moved = self[f"copy/{level}"] - self["copy/l2"] if level != "l2" else 0.0
        return self[f"{'pack_t' if transposed else 'pack'}/{_float(dtype)}/{way}"] + 2 * size * max(0.0, moved)

    def _vector(self, kind: str, dtype: str) -> float:
        """An element of a pointwise op, with its pass over the tile."""
        opcodes, flops = OPS[kind].opcodes, OPS[kind].flops
        if dtype == "float64":
            near = "tanh" if flops > 6 else "add"
            return self._numbers.get(f"vector64/{opcodes[0] if opcodes else 'add'}", self[f"vector64/{near}"])
        if opcodes and f"vector/{opcodes[0]}" in self._numbers:
            return self[f"vector/{opcodes[0]}"]
        if kind in _AS_TANHS:
            return self["vector/tanh"] * _AS_TANHS[kind]
        return self["vector/tanh"] * flops / 14 if flops > SIMPLE else self["vector/add"]  # not measured, or a conversion

    def rounding(self, dtype: str) -> float:
        """An element of a 16-bit ``dtype`` rounded in a register."""
        return self[f"vector/to_{dtype}"] if dtype in NARROW else 0.0

    def product_per_row(self, dtype: str, m: int, k: int, n: int) -> float:
        """Seconds of a product of (m, k) with (k, n) of which both operands belong to one row."""
        twice = 2.0 if dtype == "float64" else 1.0
        if m > 8 and (m > 64 or n * k > 8192):  # as ``small`` in cpu/src/run_products.cc: the second one is packed
            way = self.ways(dtype)[-1]
            return (self.product(dtype, way, m, k, n) + k * n * self.pack(dtype, way, True, "l2")) * twice
        sides = [_mean(a, c) for a, _, c in SMALL_PRODUCTS]
        rates = [math.log(self[f"dot/{a}x{b}x{c}"] / (a * b * c)) for a, b, c in SMALL_PRODUCTS]
        start = _OWN_MATRIX if k > 1 and min(m, n) == 1 < max(m, n) else 0.0
        return start + math.exp(_between(sides, rates, _mean(m, n))) * m * k * n * twice

    def access(self, access: Access) -> float:
        """Seconds of an op's reads or folds by index, for one row of the stream."""
        if access.folds and access.near:
            return access.count * self._row("runs", access.row_bytes)
        inner, outer = (self._row(f"take/{level}", access.row_bytes) for level in ("l2", "l3"))
        # Beyond the last level a row comes from memory, at its bandwidth, since rows are prefetched.
        outer = max(inner, outer)
        beyond = outer + access.row_bytes * max(0.0, self["copy/dram"] - self["copy/l3"])
        p = self.profile
        sizes = (p.l2 / 2, 4 * p.l2, p.l3 / 2, 4 * p.l3)
        taken = _between(sizes, (inner, outer, outer, beyond), access.table_bytes) if not access.near else inner
        if not access.folds:
            return access.count * taken
        # A row that is folded into a table is read and written back.
        return access.count * (self._row("folded", access.row_bytes) + 2 * (taken - inner))

    def written(self, size: float) -> float:
        """One thread writes an array of ``size`` bytes, at the rate of a copy, since a written line is read first."""
        return size * self["copy/l2" if size <= self.profile.l2 else "copy/l3"]

    def folded(self, access: Access) -> float:
        """A fold of a row of the stream, measured on rows in the last level, without reading the table."""
        return access.count * self._row("runs" if access.near else "folded", access.row_bytes)

    def _row(self, key: str, row_bytes: int) -> float:
        """A row by its bytes, linear between the measured widths. Below them a run's time does not shrink: 100 000 rows of 1 number
        took two workers 234 us, of 16 numbers 258 (Xeon with AMX)."""
        few, many = (self[f"{key}/{width}"] for width in ACCESSED)
        each = max(0.0, many - few) / (4 * (ACCESSED[1] - ACCESSED[0]))
        return max(few + (row_bytes - 4 * ACCESSED[0]) * each, (_NARROW_RUN if key == "runs" else 0.3) * few)

    def activation(self, name: str, dtype: str) -> float:
        """An element of an activation that a product applies to its sums."""
        return self[f"activation/{name}/{'bfloat16' if dtype == 'bfloat16' else 'float32'}"]

    def edge(self, dtype: str) -> float:
        """An element that a group of pointwise ops loads or stores, beyond the passes of the ops."""
        dtype = dtype if f"load/{dtype}" in self._numbers else "float32"
        return 0.5 * (self[f"load/{dtype}"] + self[f"store/{dtype}"])

    def fold(self, dtype: str, elements: float, over_rows: bool = False) -> float:
        """A row of ``elements`` summed, or added to sums over the rows."""
        dtype = dtype if f"fold/row/{dtype}" in self._numbers else "float32"
        if over_rows or elements < _FEW:  # such rows are folded together, element by element
            return elements * self[f"fold/column/{dtype}"]
        each = self[f"fold/row/{dtype}"]
        return max(self[f"fold/short/{dtype}"] - _FEW * each, 0.0) + elements * each

    def spread(self, dtype: str, elements: float) -> float:
        """One value repeated along a row of ``elements``, for an op that reads full rows."""
        dtype = dtype if f"load/{dtype}" in self._numbers else "float32"
        each = self[f"load/{dtype}"]
        return max(self[f"load/short/{dtype}"] - _FEW * each, 0.0) + elements * each

    # -- XLA's kernels, on the whole machine

    def xla_dot(self, dtype: str, rows: int, k: int, n: int, form: str = "dot", batch: float = 1) -> float:
        """Seconds of ``batch`` products of rows x k and k x n, in one call of the library. ``form``: dot, dot_t (the weight
        transposed) or outer (k rows contracted, rows x n results)."""
        each, start = self._dot(dtype, rows, k, n, form)
        return batch * each + min(start, 4 * batch * each)  # a tiny product runs on the calling thread

    def _xla_dot(self, dtype: str, rows: int, k: int, n: int, form: str) -> tuple[float, float]:
        """Seconds of one product, and of handing it to the threads where that is extra."""
        if dtype in ("float64", "complex64"):
            each, start = self._dot("float32", rows, k, n, form)
            return 2 * each, start
        dtype = _float(dtype)
        if form == "outer":
            points = self._points(f"xla/outer/{dtype}/") or self._points("xla/outer/float32/")
            known = sorted((_mean(a, b), math.log(s / (r * a * b))) for r, a, b, s in points)
            sides = [side for side, _ in known]
            return math.exp(_between(sides, [rate for _, rate in known], _mean(rows, n))) * rows * k * n, 0.0
        if min(rows, k, n) < _LEAST_SIDE:
            return self._narrow_dot(dtype, rows, k, n, by_rows=form == "dot" and rows == min(rows, k, n)), 0.0
        large = self._points(f"xla/dot/{dtype}/", _ROWS.__eq__)
        sides = [_mean(a, b) for _, a, b, _ in large]
        few32 = self._points("xla/dot/float32/", _is_few)
        least = few32[0][3]
        rates = [math.log(max(s - least, 0.3 * s) / (r * a * b)) for r, a, b, s in large]

        def rate(side: float) -> float:
            return math.exp(_between(sides, rates, side))

        factor = 1.0
        if form == "dot_t" and (other := self._points(f"xla/dot_t/{dtype}/")):
            r, a, b, s = other[0]
            factor = s / (rate(_mean(a, b)) * r * a * b)
        far = self._far(dtype, rows, k, n, rate)
        few = self._points(f"xla/dot/{dtype}/", _is_few) or few32
        single = min(few, key=lambda p: p[1] * p[2])[3]
        # Handing a product to the threads, less where they are awake from the one before.
        start = max(0.0, self["xla/start"] - 16 * 64 * 64 * rate(64))
        r, a, b, s = max(few, key=lambda p: p[1] * p[2])
        weights = max(0.0, (s - single) / (a * b) - r * rate(_mean(a, b)))  # an element of the weights, for any number of rows
        return k * n * (rows * rate(_mean(k, n)) * factor * far + weights), start

    def _far(self, dtype: str, rows: int, k: int, n: int, rate: Callable[[float], float]) -> float:
        """The factor by which a product takes longer because its rows do not fit the caches."""
        found = self._shapes(f"xla/dot/{dtype}/", lambda r: r > 2 * _ROWS)
        if not found:
            return 1.0
        r, a, b, key = found[0]
        moved, few, many = rows * (k + n), _ROWS * (a + b), r * (a + b)
        if moved <= few:
            return 1.0
        most = max(1.0, self[key] / (r * a * b * rate(_mean(a, b))))
        # Moving the rows weighs less, beside the arithmetic, the wider the product is.
        return 1.0 + (most - 1.0) * min(1.0, max(0.0, math.log(moved / few) / math.log(many / few)))

    def _narrow_dot(self, dtype: str, rows: int, k: int, n: int, by_rows: bool) -> float:
        """A product with a side too short for the library: a loop over the larger operand for each column of the smaller one.
        ``by_rows``: the larger operand is a weight, whose rows are added up."""
        dtype = dtype if self._numbers.get(f"xla/dot/{dtype}/2048x256x1") else "float32"
        one, four = (self[f"xla/dot/{dtype}/2048x256x{c}"] / (2048 * 256) for c in (1, 4))
        if by_rows:
            four, one = four - one + self[f"xla/vector/{dtype}"], self[f"xla/vector/{dtype}"]
        sides = sorted((rows, k, n))
        per_element = one + max(0.0, four - one) * (sides[0] - 1) / 3
        return per_element * sides[1] * sides[2]

    def _points(self, prefix: str, of_rows: Callable[[int], bool] = lambda _: True) -> list[tuple[int, int, int, float]]:
        """(rows, K, N, seconds) of the measured products of so many rows. No other number is looked up: it may not be measured."""
        return [(rows, k, n, self[key]) for rows, k, n, key in self._shapes(prefix, of_rows)]

    def _shapes(self, prefix: str, of_rows: Callable[[int], bool]) -> list[tuple[int, int, int, str]]:
        found = []
        for key in self._numbers:
            if key.startswith(prefix):
                rows, k, n = map(int, key.removeprefix(prefix).split("x"))
                if of_rows(rows):
                    found.append((rows, k, n, key))
        return sorted(found)

    def _xla_op(self, kind: str, dtype: str) -> float:
        """An element of an elementwise op in a fused loop, beyond reading and writing the loop's arrays."""
        flops, like = (OPS[kind].flops, OPS[kind].like) if kind in OPS else (1.0, None)
        home, (name, as_long) = dtype if dtype in NARROW else "float32", like or (kind, 1.0)
        tanh = self._beyond("xla/loop/tanh/float32") / 2  # each is there twice
        if f"xla/loop/{name}/float32" in self._numbers and name not in ("move", "arithmetic"):
            found = self._beyond(f"xla/loop/{name}/float32") / 2 * as_long
        else:
            found = tanh * flops / _TANH_FLOPS if flops > SIMPLE else 0.0
        found += self._beyond(f"xla/loop/arithmetic/{home}") / ARITHMETIC if home != "float32" else tanh * _OF_TANH
        return found * (2.0 if dtype == "float64" else 1.0)

    def _beyond(self, key: str) -> float:
        """An element of a loop beyond moving it."""
        move = self["/".join((*key.split("/")[:2], "move", key.split("/")[-1]))]
        return max(self[key] - move, 0.1 * move)

    def xla_moved(self, near: bool) -> float:
        """A byte that a kernel reads or writes: from the caches, or from memory."""
        if near:
            return self["xla/loop/move/float32"] / _MOVED
        return self["copy/dram"] / 2 / self.profile.workers

    def xla_batched(self, dtype: str) -> float:
        """Seconds of one multiplication and addition in many small products."""
        return self._or_float32("xla/batched", dtype)

    def xla_rows(self, what: str, rows: float, width: float, table_bytes: float) -> float:
        """Seconds in which XLA takes ``rows`` rows of ``width`` elements from a table ("gather"), or folds them into one
        ("scatter")."""
        few, many = self[f"xla/{what}/1"], self[f"xla/{what}/64"]
        far = self["xla/gather/far"] * min(1.0, width / 64) if table_bytes > 2 * self.profile.l2 else 0.0
        between = ((width - 1) / 63) ** (_NARROW_FOLDS if what == "scatter" and width < 64 else 1.0)
        return rows * (few + between * max(0.0, many - few) + far)

    def rounded(self, dtype: str) -> float:
        """The time one thread of XLA's needs, beyond float32, to fold a number of ``dtype`` by index: it converts and rounds."""
        if dtype not in NARROW:
            return 0.0
        beyond = [self[f"xla/loop/arithmetic/{d}"] - self[f"xla/loop/move/{d}"] for d in (dtype, "float32")]
        return _BESIDE * self.profile.workers * max(0.0, beyond[0] - beyond[1]) / ARITHMETIC

    def xla_reduce(self, dtype: str, dimensions: str) -> float:
        """Seconds of an element of a sum over ``dimensions`` ("row", "column", "middle" or "all")."""
        return self._or_float32(f"xla/reduce/{dimensions}", dtype)

    def _or_float32(self, what: str, dtype: str) -> float:
        key = f"{what}/{dtype}"
        return self[key if key in self._numbers else f"{what}/float32"]


times = functools.lru_cache(maxsize=16)(CpuTimes)  # of a profile, made once


def _is_few(rows: int) -> bool:
    return rows < 64


def _float(dtype: str) -> str:
    return dtype if dtype in ("float32", "float64", "bfloat16", "float16") else "float32"


def _mean(a: float, b: float) -> float:
    """The harmonic mean: a product's time beyond its arithmetic is for loading and storing, in proportion to 1 / a + 1 / b."""
    return 2.0 * a * b / (a + b) if a and b else 1.0


def _between(at: Sequence[float], values: Sequence[float], x: float) -> float:
    """``values`` (logarithms) at ``x``, linear in log x between the points and constant beyond them."""
    if x <= at[0] or len(at) == 1:
        return values[0]
    if x >= at[-1]:
        return values[-1]
    k = bisect.bisect_right(at, x)
    share = math.log(x / at[k - 1]) / math.log(at[k] / at[k - 1])
    return values[k - 1] + share * (values[k] - values[k - 1])

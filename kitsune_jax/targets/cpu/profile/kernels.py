"""Our side of a machine profile: how long micro-kernels, moved bytes and calls take, and how pieces are timed on a busy machine.

Comes in: the CPU extension. Goes out: ``Piece``s to be timed by ``Passes``, and the numbers made of their times, as listed in
``profile``; and small programs that ``xla`` times in jitted functions, as it times XLA's own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from kitsune_jax.ops.graph import make_params
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import ArrayType, Instr, SinkType, StageProgram, TileProgram, TileType
from kitsune_jax.targets.cpu import call
from kitsune_jax.targets.cpu.bytecode import ACTIVATIONS, DTYPE_CODE, OPCODE, OPCODES, PRODUCTS, SPECIAL_OPS, encode
from kitsune_jax.targets.cpu.lower import lower_program

# --- Timing on a machine that also runs other programs ----------------------------------------------------------------------------

AGREE = 1.1  # two passes over the same work on an idle machine lie within a few percent of each other
DOUBTFUL = 1.3  # a number is doubtful if no two passes lie closer than this
# Parts of all numbers that may be doubtful: in a profile that is kept, and without further passes.
MOST_DOUBTFUL, _FEW_DOUBTFUL = 0.08, 0.02
# The reference over its best time on a core at full speed; a Xeon's clock slows down by 1.2 to 1.3 after products in full vectors.
_SLOW = 1.4
_STOLEN = 0.1  # the part of all cores' time that others may have
# Calls of a slice of time, and its seconds; calls within this factor of the fastest count as equally fast.
_LEAST_CALLS, _SLICE, _MOST_SLICE, _AS_FAST = 3, 1.2e-3, 10e-3, 1.05
_TOGETHER = 0.65  # the least part of all workers' time that the threads of a shared call have
_BLOCK = 8  # pieces between two runs of the reference
_LEAST_PASSES, _MOST_PASSES = 2, 24


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Work with a name. ``seconds``: runs it once; None where the machine has no such work. ``elements``: of the work, as a profile
    counts it. ``agree``: the factor up to which two repetitions are equal."""

    key: str
    seconds: Callable[[], float | None]
    elements: float = 1.0
    agree: float = AGREE


@dataclasses.dataclass(slots=True)
class _Repetition:
    """``reference``: the slower one of the runs before and after. ``stolen``: the part of the cores' time that others had."""

    seconds: float
    reference: float
    stolen: float


class Passes:
    """Times pieces pass by pass, with one repetition of every piece in each, until two passes agree.

    Disturbances last (another program has a core for milliseconds, a core runs at half speed for seconds), so they hit consecutive
    repetitions alike. A repetition is clean unless the reference beside it is slow, or a hypervisor gives the cores to others.

    ``reference``: seconds of work that keeps all workers busy in registers. ``clock``: seconds since some moment. ``stolen``:
    seconds since then in which others than this operating system had one of its ``cores``. ``best``: the reference's least seconds,
    before and in these passes. ``made``: passes, so far."""

    def __init__(
        self,
        reference: Callable[[], float],
        *,
        clock: Callable[[], float] = time.perf_counter,
        stolen: Callable[[], float] = lambda: 0.0,
        cores: int = 1,
        best: float = float("inf"),
    ):
        self.made, self.best = 0, best
        self._reference, self._clock, self._stolen, self._cores = reference, clock, stolen, cores
        self._found: dict[str, list[_Repetition]] = {}
        self._is_disturbed = False

    def run(self, pieces: Iterable[Piece], until: float = float("inf")) -> None:
        """Repeat each of ``pieces`` that has not settled; after the time ``until`` only those with fewer than two repetitions."""
        self.made += 1
        here = [p for p in pieces if not self.is_settled(p)]
        for first in range(0, len(here), _BLOCK):
            block = here[first : first + _BLOCK]
            if self._clock() > until:
                block = [p for p in block if len(self._found.get(p.key, ())) < _LEAST_PASSES]
            self._run(block)

    def settle(self, pieces: Iterable[Piece], until: float, at_most: float) -> None:
        """Run passes until the pieces have settled; after the time ``until``, until few are doubtful; and no longer than
        ``at_most`` once everything is measured twice."""
        here = tuple(pieces)
        for _ in range(_MOST_PASSES):
            self.run(here, at_most)
            self._note_disturbance()
            now = self._clock()
            if all(map(self.is_settled, here)) or now > until and len(self.doubtful()) <= _FEW_DOUBTFUL * len(self._found):
                break
            if now > at_most and all(len(found) >= _LEAST_PASSES for found in self._found.values()):
                break

    def is_settled(self, piece: Piece) -> bool:
        """Whether two clean repetitions agree, or three of four where others took much longer or many pieces differ: then two
        disturbed ones may agree as well."""
        clean = self._clean(piece.key)
        least, alike = (4, 3) if self._is_disturbed or _differ(clean) else (2, 2)
        return len(clean) >= least and clean[alike - 1] <= piece.agree * clean[0]

    def seconds(self) -> dict[str, float]:
        """The least clean repetition of each piece that has any. Without a clean one, the least by the reference's best time."""
        found = {}
        for key, repetitions in self._found.items():
            clean = self._clean(key)
            found[key] = clean[0] if clean else min(r.seconds * self.best / r.reference for r in repetitions)
        return found

    def doubtful(self) -> dict[str, float]:
        """The pieces whose clean repetitions all differ, in ascending order, with the second fastest repetition over the fastest;
        of all repetitions where fewer than two were clean."""
        found = {}
        for key in sorted(self._found):
            clean = self._clean(key)
            if len(clean) < 2:
                every = sorted(r.seconds for r in self._found[key])
                found[key] = max(DOUBTFUL, every[1] / every[0] if len(every) > 1 else DOUBTFUL)
            elif clean[1] > DOUBTFUL * clean[0]:
                found[key] = clean[1] / clean[0]
        return found

    def _clean(self, key: str) -> list[float]:
        found = self._found.get(key, ())
        return sorted(r.seconds for r in found if r.reference <= _SLOW * self.best and r.stolen <= _STOLEN)

    def _note_disturbance(self) -> None:
        """Note whether something disturbs the machine again and again."""
        differ = sum(_differ(self._clean(key)) for key in self._found)
        self._is_disturbed = differ > MOST_DOUBTFUL * len(self._found)

    def _run(self, block: Iterable[Piece]) -> None:
        start, stolen, before = self._clock(), self._stolen(), self._reference()
        found = [(piece.key, piece.seconds()) for piece in block]
        after = self._reference()
        self.best = min(self.best, before, after)
        passed = max(self._clock() - start, 1e-9) * self._cores
        share = (self._stolen() - stolen) / passed
        for key, seconds in found:
            if seconds is not None:
                self._found.setdefault(key, []).append(_Repetition(seconds, max(before, after), share))


def _differ(seconds: Sequence[float]) -> bool:
    """Whether ``seconds``, in ascending order, include times that differ."""
    return len(seconds) > 1 and seconds[-1] > DOUBTFUL * seconds[0]


def fastest_long(calls: Iterable[tuple[float, float]]) -> float:
    """Undisturbed seconds of a call of a millisecond or more. ``calls``: seconds, and those of the busiest thread.

    Beside other programs the threads of such calls wait for cores, and no call is undisturbed, but its busiest thread runs nearly
    as long. So the least time counts if calls are equally fast, else that of the busiest thread.
    """
    found = list(itertools.islice(calls, _LEAST_CALLS))
    least = min(seconds for seconds, _ in found)
    if all(seconds <= _AS_FAST * least for seconds, _ in found):
        return least
    return min(least, *(busiest for _, busiest in found))


def fastest(calls: Iterable[tuple[float, float]], workers: int) -> float:
    """Undisturbed seconds of a call. ``calls``: seconds, and seconds of all threads together, for a slice of time.

    This is the least time. The slice goes on until three calls are as fast, since threads mostly wait for cores otherwise. If they
    never are, but the threads of some call had all ``workers`` most of the time, the result lies between the fastest call and the
    threads' seconds shared out evenly, which no call can take less than.
    """
    found: list[tuple[float, float]] = []
    passed = 0.0
    for seconds, of_threads in calls:
        found.append((seconds, of_threads))
        passed += seconds
        if len(found) < _LEAST_CALLS or passed < _SLICE:
            continue
        least = min(s for s, _ in found)
        if sum(s <= _AS_FAST * least for s, _ in found) >= _LEAST_CALLS:
            return least
        if passed > _MOST_SLICE:
            break
    least = min(s for s, _ in found)
    together = sorted(t for _, t in found)[len(found) // 2]
    if max(min(t, together) / s for s, t in found) < _TOGETHER * workers:
        return least
    return min(least, math.sqrt(least * together / workers))


# --- Micro-kernels and moved bytes ------------------------------------------------------------------------------------------------

# Kernel tables with products of pairs of bfloat16, and those with tiles.
DOTS = frozenset({"avx512bf16", "amx", "neonbf16"})
TILES = frozenset({"amx"})
TILE, SHORT = 96, 8
DEPTHS, WIDTHS = (8, 64, 512), (16, 64, 512)
_GRADIENTS = ((16, 16), (64, 64), (512, 512))
_ELEMENTS, _FEW = 1024, 16
_SQUARE = 256
_WIDE = 1024  # columns of a weight that one row is multiplied by
_SHALLOW = 16  # K of a product that takes no time beside its activation
_MOST_THREADS = 16  # more take long to start, and do not change a core's times
# Opcodes whose exact times plans do not depend on.
_UNMEASURED = frozenset(name for spec in OPS.values() if not spec.measured for name in spec.opcodes)
# Long opcodes of integers only; other opcodes of integers are timed as those of floats.
_OF_INTEGERS = frozenset(n for s in OPS.values() if "float32" not in s.dtypes and s.flops > 4 for n in s.opcodes)
_NO_WORK = frozenset({*SPECIAL_OPS, "reduce_precision"})
_DOUBLE = ("add", "div", "sqrt", "exp", "log", "tanh")
_COPIES = {"l1": 4 << 10, "l2": 128 << 10}  # bytes of each thread
_SHARED_COPIES = {"l3": 4 << 20, "dram": 96 << 20}  # of all threads together
_FRESH = 8 << 20
RELU = "activation/relu/"  # subtracted from the other activations


def pieces(extension: Any, workers: int) -> list[Piece]:
    """All pieces for the kernel table in use, with ``workers`` threads busy."""
    threads = min(workers, _MOST_THREADS)
    found: list[Piece] = []

    def note(key: str, elements: float, function: Any, *args: Any) -> None:
        found.append(Piece(key, functools.partial(_least, function, *args, threads), elements))

    for dtype, product in products(extension):
        here = (DTYPE_CODE[dtype], PRODUCTS.index(product))
        for k in DEPTHS:
            for n in WIDTHS:
                note(f"gemm/{dtype}/{product}/{k}x{n}", 1, extension.measure_gemm, *here, TILE, k, n, 0)
        for k, n in _GRADIENTS:
            note(f"outer/{dtype}/{product}/{k}x{n}", 1, extension.measure_outer, *here, TILE, k, n)
        note(f"outer_short/{dtype}/{product}", 1, extension.measure_outer, *here, SHORT, _SQUARE, _SQUARE)
        note(f"short/{dtype}/{product}", 1, extension.measure_gemm, *here, 1, _SQUARE, _SQUARE, 0)
        for name, transposed in (("pack", False), ("pack_t", True)):
            note(f"{name}/{dtype}/{product}", _SQUARE * _SQUARE, extension.measure_pack, *here, _SQUARE, _SQUARE, transposed)
    for dtype in ("float32", "bfloat16"):
        shape = (DTYPE_CODE[dtype], PRODUCTS.index("best"), TILE, _SHALLOW, _SQUARE)
        for k, name in enumerate(ACTIVATIONS):
            if name not in ("none", "scale"):  # a scale takes as long as a ReLU
                note(f"activation/{name}/{dtype}", TILE * _SQUARE, extension.measure_gemm, *shape, k)
    for k, name in enumerate(OPCODES):
        if name not in _UNMEASURED and name not in _NO_WORK:
            dtype = "uint32" if name in _OF_INTEGERS else "float32"
            note(f"vector/{name}", _ELEMENTS, extension.measure_vector, k, DTYPE_CODE[dtype], _ELEMENTS)
        if name in _DOUBLE:
            note(f"vector64/{name}", _ELEMENTS, extension.measure_vector, k, DTYPE_CODE["float64"], _ELEMENTS)
    for dtype in ("float32", "bfloat16", "float16"):
        for what in ("load", "store"):
            note(f"{what}/{dtype}", _ELEMENTS, extension.measure_move, what, DTYPE_CODE[dtype], _ELEMENTS)
        one_row = (DTYPE_CODE[dtype], PRODUCTS.index("widened"), TILE, 1, _WIDE)
        note(f"few/{dtype}", TILE * _WIDE, extension.measure_outer, *one_row)
        note(f"fold/short/{dtype}", 64, extension.measure_fold, 0, DTYPE_CODE[dtype], 64, _FEW, False)
        note(f"load/short/{dtype}", 1, extension.measure_move, "load", DTYPE_CODE[dtype], _FEW)
        for which in ("row", "column"):
            note(f"fold/{which}/{dtype}", 16 * 256, extension.measure_fold, 0, DTYPE_CODE[dtype], 16, 256, which == "column")
    # Memory has fewer channels than a large machine has cores: workers beyond the measured ones share its bandwidth.
    crowd = workers / threads
    shared = {level: size // threads for level, size in _SHARED_COPIES.items()}
    for level, size in (_COPIES | shared).items():
        note(f"copy/{level}", size / crowd if level == "dram" else size, extension.measure_copy, size)
    for name, huge in (("touch", False), ("touch/huge", True)):
        note(name, _FRESH // threads / crowd, extension.measure_touch, _FRESH // threads, huge)
    return found


def numbers(pieces: Iterable[Piece], seconds: Mapping[str, float]) -> dict[str, float]:
    """The numbers of a profile, from the ``seconds`` of those pieces that the machine has."""
    found: dict[str, float] = {}
    for piece in pieces:
        taken = seconds.get(piece.key)
        if taken is None or piece.key.startswith(RELU):
            continue
        if piece.key.startswith("activation/"):
            taken = max(taken - seconds[RELU + piece.key.split("/")[2]], 0.02 * taken)
        found[piece.key] = taken / piece.elements
    return found


def reference(extension: Any, workers: int) -> float:
    """Seconds of constant work in registers with all workers busy, which show the cores' present speed."""
    threads = min(workers, _MOST_THREADS)
    taken = _least(extension.measure_vector, OPCODE["exp"], DTYPE_CODE["float32"], _ELEMENTS, threads)
    assert taken is not None  # every table has an exponential
    return taken


def _least(function: Any, *args: Any) -> float | None:
    return min(function(*args), default=None)


def products(extension: Any) -> list[tuple[str, str]]:
    """(dtype, product) of every kind of matmul that the kernel table in use has."""
    isa = extension.isa()
    narrow = ["widened", *(["dots"] if isa in DOTS else []), *(["tiles"] if isa in TILES else [])]
    return [("float32", "widened"), ("float16", "widened"), ("float64", "widened"), *(("bfloat16", p) for p in narrow)]


# --- Calls, and reads and folds by indices ----------------------------------------------------------------------------------------

# Elements of rows that are read and folded by indices; (m, k, n) of the products of each row.
ACCESSED = (16, 256)
SMALL_PRODUCTS = ((8, 8, 8), (27, 128, 27))
_ACCESS_TILE = 256


class _Tiles:
    """Builds a tile program of one stage, one instruction at a time. Arrays stream by default."""

    def __init__(self, rows: int, workers: int, tile_rows: int = _ACCESS_TILE):
        self.rows, self.workers, self.tile_rows = rows, workers, tile_rows
        self.inputs: list[ArrayType] = []
        self.outputs: list[ArrayType] = []
        self.values: list[TileType] = []
        self.sinks: list[SinkType] = []
        self.body: list[Instr] = []

    def add(
        self, kind: str, inputs: tuple[int, ...], tile: bool, shape: tuple[int, ...], dtype: str = "float32", **params: Any
    ) -> int:
        self.values.append(TileType(tile, shape, dtype))
        self.body.append(Instr(kind, inputs, (len(self.values) - 1,), make_params(**params)))
        return len(self.values) - 1

    def load(self, *shape: int, dtype: str = "float32", streamed: bool = True) -> int:
        self.inputs.append(self._array(shape, dtype) if streamed else ArrayType(shape, dtype, False))
        return self.add("load", (), streamed, shape, dtype, array=len(self.inputs) - 1)

    def store(self, v: int) -> None:
        t = self.values[v]
        self.outputs.append(self._array(t.shape, t.dtype))
        self.body.append(Instr("store", (v,), (), make_params(array=len(self.outputs) - 1)))

    def _array(self, shape: tuple[int, ...], dtype: str) -> ArrayType:
        return ArrayType((self.rows, *shape), dtype, True, (int(np.prod(shape)),), tuple(range(1, len(shape) + 1)))

    def function(self) -> Any:
        """A function of the inputs that only binds the call."""
        program = TileProgram(
            axes=(self.rows,),
            tile_rows=self.tile_rows,
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
            values=tuple(self.values),
            literals=(),
            stages=(StageProgram("profile", tuple(self.body)),),
            queues=(),
            sinks=tuple(self.sinks),
            workers=self.workers,
        )
        words = encode(lower_program(program, "profile"))
        results = [jax.ShapeDtypeStruct(a.shape, np.dtype(a.dtype)) for a in self.outputs]
        return lambda *args: call.call(words, args, results)


def layers(rows: int, width: int, depth: int) -> Any:
    """A function of x (``rows`` x ``width``) and ``depth`` weights: ``x @ w0 @ w1 ...``."""
    t = _Tiles(rows, -(-rows // TILE), min(TILE, rows))
    x, *weights = t.load(width), *(t.load(width, width, streamed=False) for _ in range(depth))
    sides: dict[str, Any] = {"x_contract": (1,), "w_contract": (0,), "x_batch": (), "w_batch": (), "out_perm": (0, 1)}
    for w in weights:
        x = t.add("matmul", (x, w), True, (width,), accumulate="float32", **sides)
    t.store(x)
    return t.function()


def taker(rows: int, n: int, width: int, workers: int) -> Any:
    """A function of ids (``rows``) and a table (``n`` x ``width``): the sum of each row that is read."""
    t = _Tiles(rows, workers)
    ids, table = t.load(dtype="int32"), t.load(n, width, streamed=False)
    taken = t.add("gather", (table, ids), True, (width,), mode="clip", fill=0)
    t.store(t.add("reduce_sum", (taken,), True, (), axes=(1,)))
    return t.function()


def folder(rows: int, n: int, width: int, workers: int, *, is_sorted: bool) -> Any:
    """A function of ids (``rows``) and x (``rows`` x ``width``), which is folded into ``n`` rows by the ids."""
    t = _Tiles(rows, workers)
    ids, x = t.load(dtype="int32"), t.load(width)
    shape = (n, width)
    t.outputs.append(ArrayType(shape, "float32", False))
    t.sinks.append(SinkType("sum", shape, "float32", 0))
    t.body.append(Instr("sink_at", (x, ids), (), make_params(sink=0, sorted=is_sorted)))
    return t.function()


def picker(rows: int, n: int, count: int, workers: int) -> Any:
    """A function of indices (``count``) and x (``rows`` x ``n``): the elements of every row that the indices name."""
    t = _Tiles(rows, workers)
    ids, x = t.load(count, dtype="int32", streamed=False), t.load(n)
    t.store(t.add("take", (x, ids), True, (count,), axis=1, mode="clip", fill=0))
    return t.function()


def multiplier(rows: int, m: int, k: int, workers: int) -> Any:
    """A function of x (``rows`` x m x k): the products of each row's m vectors with each other, as DLRM's features interact."""
    t = _Tiles(rows, workers)
    x = t.load(m, k)
    sides: dict[str, Any] = {"x_contract": (2,), "y_contract": (2,), "x_batch": (), "y_batch": ()}
    t.store(t.add("dot", (x, x), True, (m, m), accumulate="float32", **sides))
    return t.function()

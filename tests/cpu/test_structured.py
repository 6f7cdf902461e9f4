"""Structured tile programs, written by hand, on the CPU target: against their float64 reference and against the interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import ml_dtypes  # noqa: F401  (makes "bfloat16" a NumPy dtype)
import numpy as np
import pytest

from kitsune_jax.program.ir import Program
from kitsune_jax.targets.cpu import call as cpu_call
from kitsune_jax.targets.cpu import lower as cpu_lower
from reference.interpret import interpret
from tests.support.batch_sums import BATCH_SUMS
from tests.support.bytecode_sim import simulate
from tests.support.irregular import IRREGULAR, ordered_segments
from tests.support.lowered import plain
from tests.support.online import ONLINE_CASES
from tests.support.programs import CASES, Case, attention, gathered_inside, interaction, lstm, lstm_backward, nested, segments
from tests.support.tiles import Tiles

_cpu = pytest.importorskip("kitsune_jax._cpu", reason="the extension is not built: pip install -e .")

TOLERANCE = {"float32": 2e-6, "float16": 4e-3, "bfloat16": 3e-2}


def tolerance(case: Case) -> float:
    dtypes = {a.dtype for a in case.program.arrays} & TOLERANCE.keys()
    return max(TOLERANCE[d] for d in dtypes or {"float32"})


def results(case: Case) -> list[jax.ShapeDtypeStruct]:
    n = case.program.operands
    return [jax.ShapeDtypeStruct(a.shape, np.dtype(a.dtype)) for a in case.program.arrays[n : n + case.program.results]]


def run(case: Case, words: np.ndarray, operands: list[np.ndarray], threads: int) -> list[np.ndarray]:
    out = [np.empty(a.shape, a.dtype) for a in results(case)]
    _cpu.run(words, [plain(a) for a in operands], [plain(a) for a in out], threads)
    return out


def check(case: Case, seed: int = 0) -> None:
    operands = case.operands(np.random.default_rng(seed))
    words = cpu_lower.generate(case.program, "case")
    first = run(case, words, operands, 1)
    errors = case.errors(first, operands)
    assert max(errors) < tolerance(case), errors
    for threads in (2, 3, 8):
        again = run(case, words, operands, threads)
        assert [a.tobytes() for a in again] == [a.tobytes() for a in first], threads
    wide = interpret(case.program, operands, widen=True)
    for got, want in zip(first, wide, strict=True):
        assert got.shape == want.shape
        got, want = got.astype(np.float64), want.astype(np.float64)
        finite = np.isfinite(want)
        np.testing.assert_array_equal(got[~finite], want[~finite])
        scale = np.abs(want[finite]).max(initial=1e-30)
        assert np.abs(got[finite] - want[finite]).max(initial=0) < tolerance(case) * scale


@pytest.mark.parametrize("name", [*CASES, *IRREGULAR, *ONLINE_CASES])
def test_case(name: str) -> None:
    check({**CASES, **IRREGULAR, **ONLINE_CASES}[name]())


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("name", BATCH_SUMS)
def test_sums_of_batches(name: str, workers: int) -> None:
    """Where strands end with batches, and where several share one: the number of workers that a plan counts on decides."""
    case = BATCH_SUMS[name]()
    program = dataclasses.replace(case.program.parts[0].program, workers=workers)
    check(dataclasses.replace(case, program=Program.of(program)))


@pytest.mark.parametrize("name", [*IRREGULAR, *ONLINE_CASES])
def test_simulated(name: str) -> None:
    """The CPU program itself, by the simulator, which checks every access."""
    case = {**IRREGULAR, **ONLINE_CASES}[name]()
    operands = case.operands(np.random.default_rng(1))
    program = case.program.parts[0].program
    code = cpu_lower.lower_program(program, name)
    got = simulate(code, operands, [a.shape for a in program.outputs])
    assert max(case.errors(got, operands)) < tolerance(case)


AWKWARD: dict[str, Callable[[], Case]] = {
    **{f"segments_{d}_{rows}": lambda d=d, rows=rows: segments(rows=rows, dtype=d, width=17, tile_rows=5)
       for d in ("float32", "bfloat16") for rows in (1, 5, 64, 333)},
    "segments_many": lambda: segments(rows=700, n=257, width=3, tile_rows=7),
    **{f"gather_{d}": lambda d=d: gathered_inside(rows=31, n=3, width=70, dtype=d) for d in ("float16", "float32")},
    **{f"attention_{d}_{q}x{k}": lambda d=d, q=q, k=k: attention(2, 3, q, k, 16, 24, d, block=16, tile_rows=7, causal=q <= k)
       for d in ("float16", "bfloat16", "float32") for q, k in ((1, 1), (13, 50), (50, 13), (33, 64))},
    **{f"lstm_{d}_{hidden}": lambda d=d, hidden=hidden: lstm(rows=19, steps=9, features=3, hidden=hidden, dtype=d, tile_rows=8)
       for d in ("float16", "bfloat16", "float32") for hidden in (1, 16, 33)},
    **{f"lstm_backward_{d}_{hidden}": lambda d=d, hidden=hidden: lstm_backward(19, 9, 3, hidden, d, tile_rows=8)
       for d in ("float16", "bfloat16", "float32") for hidden in (1, 16, 33)},
    "lstm_backward_one_row": lambda: lstm_backward(rows=1),
    "nested_float16": lambda: nested(dtype="float16"),
    "nested_wide": lambda: nested(rows=9, k=64, n=34, block=16),
    **{f"interaction_{d}": lambda d=d: interaction(rows=17, features=9, dim=20, dtype=d) for d in ("float16", "float32")},
    "interaction_one_feature": lambda: interaction(rows=17, features=1, dim=33),
}  # fmt: skip


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_shape(name: str) -> None:
    check(AWKWARD[name](), seed=1)


@pytest.mark.parametrize("name", ["segment_sum", "attention_grouped", "lstm", "nested", "computed_weights"])
def test_through_jax(name: str) -> None:
    """One custom call under ``jax.jit``."""
    case = CASES[name]()
    operands = case.operands(np.random.default_rng(3))
    words = cpu_lower.generate(case.program, name)
    before = _cpu.calls()
    got = jax.jit(lambda *args: cpu_call.call(words, args, results(case)))(*operands)
    assert _cpu.calls() == before + 1
    assert max(case.errors([np.asarray(a) for a in got], operands)) < tolerance(case)


@pytest.mark.parametrize("isa", _cpu.available_isas())
@pytest.mark.parametrize("name", ["segment_max", "attention_bfloat16", "lstm_reverse", "lstm_backward", "interaction_bfloat16"])
def test_every_kernel_table(name: str, isa: str) -> None:
    before = _cpu.isa()
    assert _cpu.set_isa(isa)
    try:
        check(CASES[name]())
    finally:
        assert _cpu.set_isa(before)


INDEXES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@pytest.mark.parametrize("dtype", INDEXES)
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_every_integer_is_an_index(dtype: str, mode: str) -> None:
    """Also numbers far out of range, and the largest of each dtype."""
    t = Tiles((41,), 8)
    t.store(t.gather(t.load((7, 3)), t.load((41,), dtype, ((0,),)), mode, -2), (41, 3), ((0,), ()))
    limits = np.iinfo(dtype)
    ids = np.random.default_rng(4).integers(0, 7, 41).astype(dtype)
    ids[[0, 5, 9, 11]] = [limits.max, limits.min, 7, limits.max - 1]
    table = np.random.default_rng(5).standard_normal((7, 3)).astype(np.float32)
    got = np.empty((41, 3), np.float32)
    _cpu.run(cpu_lower.generate(Program.of(t.program()), "gather"), [table, ids], [got], 2)
    whole = [int(i) for i in ids]
    want = [table[min(max(i, 0), 6)] if mode == "clip" or 0 <= i < 7 else np.full(3, -2, np.float32) for i in whole]
    np.testing.assert_array_equal(got, np.stack(want))


@pytest.mark.parametrize("width", [1, 8, 19, 130])
@pytest.mark.parametrize("how", ["sum", "max"])
def test_sorted_segments_of_every_length(how: str, width: int) -> None:
    """Runs that end inside of a tile, go on over tiles and strands, or hold half of all rows; gaps; ids out of range."""
    rng = np.random.default_rng(width)
    rows, n = 40_001, 3000
    ids = np.concatenate([rng.integers(-5, n + 5, rows // 2), np.full(rows - rows // 2, 1234)])
    ids = np.sort(np.where((ids > 700) & (ids < 1100), 699, ids)).astype(np.int32)
    x = (0.1 + rng.random((rows, width))).astype(np.float32)
    t = Tiles((rows,), 500)
    t.sink_at(t.load((rows, width), "float32", ((0,), ())), t.load((rows,), "int32", ((0,),)), how, n, ids_sorted=True)
    program = dataclasses.replace(t.program(), workers=3)
    words = cpu_lower.generate(Program.of(program), "segments")
    inside = (ids >= 0) & (ids < n)
    want = np.full((n, width), 0.0 if how == "sum" else -np.inf)
    (np.add if how == "sum" else np.maximum).at(want, ids[inside], x[inside].astype(np.float64))
    got = [np.full((n, width), np.nan, np.float32) for _ in range(3)]
    for out, threads in zip(got, (1, 2, 5), strict=True):
        _cpu.run(words, [x, ids], [out], threads)
        assert out.tobytes() == got[0].tobytes()
    np.testing.assert_allclose(got[0], want, rtol=3e-6 if how == "sum" else 0)


def test_a_false_promise_of_sorted_ids_stays_inside() -> None:
    rng = np.random.default_rng(0)
    rows, n, width = 5000, 70, 8
    t = Tiles((rows,), 64)
    t.sink_at(t.load((rows, width), "float32", ((0,), ())), t.load((rows,), "int32", ((0,),)), "sum", n, ids_sorted=True)
    words = cpu_lower.generate(Program.of(dataclasses.replace(t.program(), workers=2)), "false")
    guarded = np.full((n + 2, width), 7, np.float32)
    _cpu.run(words, [np.ones((rows, width), np.float32), rng.integers(-n, 2 * n, rows, dtype=np.int32)], [guarded[1:-1]], 2)
    assert (guarded[[0, -1]] == 7).all()
    order = np.asarray([-1, 2**31 - 1, -(2**31), 3, 3, 0, 1, 8, 9, 4], np.int32)
    case = ordered_segments(rows=10, n=3, tile_rows=4)
    operands = case.operands(rng)
    run(case, cpu_lower.generate(case.program, "order"), [*operands[:3], order], 2)

"""Sinks by sorted indices as kernels, in the emulator: segments within a tile, across tiles and lanes, empty ones, dropped rows."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil
from typing import Any

import jax
import numpy as np
import pytest

from kitsune_jax.errors import CannotLower
from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cuda import lower, sources
from tests.support.cuda_run import check_bits, kernel_cache, run_program, runner
from tests.support.tiles import Tiles

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

ROW = ((0,), ())
RNG = np.random.default_rng(13)


def small(*shape: int, dtype: str) -> np.ndarray:
    """Whole numbers: sums and products of them are exact."""
    return RNG.integers(0 if dtype in ("bool", "uint32") else -2, 3, shape).astype(np_dtype(dtype))


def ids(kind: str, rows: int, n: int) -> np.ndarray:
    """Sorted, but for those that are out of range."""
    found = np.sort(RNG.integers(0, n, rows)).astype(np.int32)
    if kind == "one":
        found[:] = n // 2
    if kind == "rows":
        found = np.minimum(np.arange(rows, dtype=np.int32), n - 1)
    if kind == "super":  # half of all rows
        found = np.sort(np.where(RNG.random(rows) < 0.5, n // 3, found)).astype(np.int32)
    if kind == "ends":
        found[: rows // 2], found[rows // 2 :] = 0, n - 1
    if kind == "dropped":
        outside = RNG.choice(np.array([-(2**31), -1, n, 2**31 - 1], np.int32), rows)
        found = np.where(RNG.random(rows) < 0.3, outside, found)
    if kind == "none":
        found[:] = -1
    return found


def summed(rows: int, width: int, n: int, dtype: str = "float32", how: str = "sum") -> TileProgram:
    t = Tiles((rows,), 64)
    shape, streams = ((rows, width), ROW) if width > 1 else ((rows,), ((0,),))
    x = t.load(shape, dtype, streams)
    t.sink_at(x, t.load((rows,), "int32", ((0,),)), how, n, "float32" if "float" in dtype else None, ids_sorted=True)
    return t.program()


def values(rows: int, width: int, dtype: str = "float32") -> np.ndarray:
    return small(rows, width, dtype=dtype) if width > 1 else small(rows, dtype=dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["random", "one", "rows", "super", "ends", "dropped", "none"])
@pytest.mark.parametrize("rows, n, lanes", [(523, 97, 3), (130, 1000, 1), (1, 5, 2), (64, 1, 1)])
def test_ids_of_every_kind(kind: str, rows: int, n: int, lanes: int) -> None:
    check_bits(summed(rows, 40, n), [values(rows, 40), ids(kind, rows, n)], lanes=lanes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sm, lanes", [(900, 3), (800, 2)])
@pytest.mark.parametrize("width", [1, 3, 27, 160])
@pytest.mark.parametrize(
    "dtype, how", [("bfloat16", "sum"), ("float16", "max"), ("float32", "prod"), ("int32", "min"), ("bool", "or")]
)
def test_every_width_and_fold(width: int, dtype: str, how: str, sm: int, lanes: int) -> None:
    rows, n = 400, 61
    x = values(rows, width, dtype)
    if how == "prod":
        x = np.where(RNG.random(x.shape) < 0.1, x, 1).astype(x.dtype)
    check_bits(summed(rows, width, n, dtype, how), [x, ids("dropped", rows, n)], sm=sm, lanes=lanes)


def ordered(rows: int, width: int, n: int, dtype: str) -> tuple[TileProgram, list[np.ndarray]]:
    """x[order] + the last digits of its number, stored through the order, and summed by the ids that the order sorts."""
    t = Tiles((rows,), 64)
    x, index = t.load((rows, width), dtype, ROW), t.load((rows,), "int32", ((0,),))
    number = t.op("and", t.index((0,), (width,)), t.literal(31, "int32"))
    y = t.op("add", x, t.op("convert_element_type", number, dtype=dtype, new_dtype=dtype))
    t.store(y, (rows, width), ROW)
    t.sink_at(x, index, "sum", n, "float32", ids_sorted=True)
    t.in_order(t.input((rows,), "int32"))
    by = RNG.permutation(ids("super", rows, n))
    return t.program(), [small(rows, width, dtype=dtype), by, np.argsort(by, kind="stable").astype(np.int32)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sm, lanes, replicas", [(900, 1, 1), (900, 3, 2), (800, 2, 3)])
@pytest.mark.parametrize("rows", [1, 65, 500])
@pytest.mark.parametrize("dtype, width", [("bfloat16", 64), ("float32", 27), ("float16", 63)])
def test_rows_go_through_the_order_of_the_stream(dtype: str, width: int, rows: int, sm: int, lanes: int, replicas: int) -> None:
    """Also those that would come through shared memory if a tile were one piece of memory."""
    program, arrays = ordered(rows, width, 41, dtype)
    arrays[0] = arrays[0] * (RNG.random(arrays[0].shape) < 0.2).astype(arrays[0].dtype)
    check_bits(program, arrays, sm=sm, lanes=lanes, replicas=replicas)


@pytest.mark.parametrize("rows, replicas", [(2100, 11), (700, 40)])
def test_partial_results_of_many_lanes(rows: int, replicas: int) -> None:
    """More partial results than a tile has rows; some lanes have no tile."""
    for kind in ("random", "super", "one", "dropped"):
        check_bits(summed(rows, 24, 200), [values(rows, 24), ids(kind, rows, 200)], lanes=3, replicas=replicas)


def test_equal_inputs_give_equal_bits_under_every_schedule() -> None:
    rows, n = 700, 30
    x, by = RNG.standard_normal((rows, 40)).astype(np.float32), ids("super", rows, n)
    program = summed(rows, 40, n)
    want = np.zeros((n, 40))
    np.add.at(want, by, x.astype(np.float64))
    results = [found[0] for found in map(runner(program, x, by, lanes=3, replicas=2), range(6))]
    np.testing.assert_allclose(results[0], want, atol=1e-4)
    assert all(r.tobytes() == results[0].tobytes() for r in results[1:])


def test_a_false_promise_touches_nothing_else() -> None:
    """Indices that decrease give any numbers; two warps may write one row of the result, and that is all that may go wrong."""
    rows, n = 300, 17
    descending = np.repeat(np.arange(5, dtype=np.int32)[::-1], 64)[:rows]  # no two warps write one row
    (got,) = run_program(summed(rows, 40, n), values(rows, 40), descending, lanes=1)
    assert got.shape == (n, 40) and not got[5:].any()
    for seed in range(4):
        anything = np.random.default_rng(seed).integers(-3, n + 3, rows).astype(np.int32)
        with pytest.raises(jax.errors.JaxRuntimeError, match="race: st_global writes result 0"):
            run_program(summed(rows, 40, n), values(rows, 40), anything, lanes=1, seed=seed)


def generated(program: TileProgram) -> lower.Kernel:
    return lower.generate_kernel(program, lower.Arrangement(False, 900, 1, 1, 1, (True,), (1,), (), 232448), "program")


def test_what_is_refused_has_a_reason() -> None:
    t = Tiles((100,), 64)
    t.sink_at(t.load((100, 2, 4), "float32", ((0,), (), ())), t.load((100, 2), "int32", ROW), "sum", 9, ids_sorted=True)
    with pytest.raises(CannotLower, match="several indices"):
        generated(t.program())


# -- planted bugs: the emulator is where a race would be seen

PLANTED = {
    "rows are read before the warp has written them": (
        "    syncwarp();\n    const u32* const column",
        "    const u32* const column",
    ),
    "a block is overwritten while others read it": ("put(segment, c, acc); });\n    syncwarp();\n", "put(segment, c, acc); });\n"),
    "runs are joined before all warps have theirs": (
        "    bar_sync(barrier, kGroupThreads);\n    KITSUNE_NO_UNROLL",
        "    KITSUNE_NO_UNROLL",
    ),
    "the next tile's runs go to the buffer that is read": ("    turn ^= 1;", "    //"),
    "a lane folds the rows of its group before all lanes have theirs": (
        "if (!group.last()) return;",
        "if (group.last(); self.worker + 1 != first + lanes) return;",
    ),
}


OFTEN = (
    "a block is overwritten while others read it",
    "the next tile's runs go to the buffer that is read",
    "a lane folds the rows of its group before all lanes have theirs",
)


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=() if bug in OFTEN else pytest.mark.slow) for bug in PLANTED])
def test_the_emulator_sees_a_missing_barrier(bug: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers, emulator = sources.include_dirs("emulator")
    planted = tmp_path / "include"
    shutil.copytree(headers, planted)
    file = planted / "kitsune" / "stage" / "segment.h"
    right, wrong = PLANTED[bug]
    assert file.read_text().count(right) == 1
    file.write_text(file.read_text().replace(right, wrong))

    def generate(*args: Any) -> lower.Kernel:
        made = lower.generate_kernel(*args)
        return dataclasses.replace(made, source=f"// {bug}\n{made.source}")  # which has an image of its own

    monkeypatch.setattr("tests.support.cuda_run.generate_kernel", generate)
    monkeypatch.setattr(sources, "include_dirs", lambda part: (planted, emulator) if part == "emulator" else (planted,))
    program, arrays = summed(700, 64, 30), [values(700, 64), ids("random", 700, 30)]
    found = []
    for seed in range(6):
        try:
            run_program(program, *arrays, lanes=2, seed=seed)
        except jax.errors.JaxRuntimeError as e:
            found.append(str(e))
    assert len(found) >= 4, "few schedules saw it"
    assert all(re.search(r"race: \w+_(shared|l2|global)|which nothing has written", why) for why in found), found

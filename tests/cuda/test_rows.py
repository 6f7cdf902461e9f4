"""How rows reach and leave a lane, in the emulator: every width, dtype and number of rows, bit for bit.

Rows whose pitch allows 16-byte accesses are read where they lie, or come through a ring of tiles (test_tile_ring.py); others come
through shared memory, tile by tile (*staged*). The tile programs are written by hand and compared with the interpreter.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kernel_checks import sass
from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import lower, nvrtc
from reference.interpret import interpret
from tests.support.cuda_run import kernel_cache, run_program
from tests.support.tiles import Tiles

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

ROW = ((0,), ())
WIDTHS = (1, 2, 3, 7, 8, 12, 24, 27, 40, 63, 65, 127)
RNG = np.random.default_rng(5)


def integers(*shape: int, dtype: str = "float32") -> np.ndarray:
    """Few enough that sums and products of them are exact."""
    return RNG.integers(0 if dtype in ("bool", "uint32") else -2, 2, shape).astype(np_dtype(dtype))


def in_and_out(rows: int, dtype: str, widths: tuple[int, ...] = WIDTHS) -> tuple[TileProgram, list[np.ndarray]]:
    """Arrays that are read twice and stored."""
    t = Tiles((rows,), 64)
    arrays = [integers(rows, n, dtype=dtype) for n in widths]
    loads = [t.load(a.shape, dtype, ROW) for a in arrays]
    for k, n in enumerate(widths):
        t.store(t.op("max", loads[k], t.again(k)), (rows, n), ROW)
    return t.program(), arrays


def check(program: TileProgram, arrays: list[np.ndarray], **how: Any) -> None:
    for k, (g, w) in enumerate(zip(run_program(program, *arrays, **how), interpret(program, arrays), strict=True)):
        np.testing.assert_array_equal(g, w, err_msg=f"result {k}\n{program}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sm, lanes", [(900, 1), (900, 3), (800, 2)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "bool"])
def test_rows_of_every_width(dtype: str, sm: int, lanes: int) -> None:
    """Nine tiles, the last of them ragged: a lane reuses both of its buffers."""
    check(*in_and_out(523, dtype), sm=sm, lanes=lanes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sm", [900, 800])
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128])
def test_few_rows(rows: int, sm: int) -> None:
    check(*in_and_out(rows, "bfloat16", (27, 63)), sm=sm, lanes=2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sm", [900, 800])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_staged_rows_are_operands_of_products(dtype: str, sm: int) -> None:
    """Narrow ones are copied to registers for a product, wide ones are fetched on the way."""
    t, rows = Tiles((300,), 64), 300
    arrays = []
    for k, n in ((9, 8), (63, 24), (127, 40), (129, 160)):
        arrays += [integers(rows, k, dtype=dtype), integers(k, n, dtype=dtype)]
        x, w = t.load((rows, k), dtype, ROW), t.load((k, n), dtype)
        t.store(t.matmul(x, w), (rows, n), ROW)
    check(t.program(), arrays, sm=sm, lanes=2)


@pytest.mark.parametrize("sm", [900, 800])
def test_an_array_that_starts_anywhere_is_copied_by_elements(sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program, (array,) = in_and_out(200, "bfloat16", (63,))
    generate = lower.generate_kernel
    start = "static_cast<const u8*>(p.in0)"

    def moved(*args: Any) -> lower.Kernel:
        """The kernel, of an array that starts one element further on and has one row less."""
        made = generate(*args)
        assert start in made.source and "kRows = 200;" in made.source
        return dataclasses.replace(made, source=made.source.replace(start, f"{start} + 2").replace("kRows = 200;", "kRows = 199;"))

    monkeypatch.setattr("tests.support.cuda_run.generate_kernel", moved)
    (got,) = run_program(program, array, sm=sm)
    want = np.roll(array.reshape(-1), -1).reshape(array.shape)
    np.testing.assert_array_equal(got[:-1], want[:-1])


def test_arrays_are_staged_where_their_accesses_would_be_narrow() -> None:
    program, arrays = in_and_out(523, "bfloat16")
    source = generated(program)
    staged = {n for k, n in enumerate(WIDTHS) if f" staged{k}{{" in source}
    assert staged == {27, 63, 65, 127}, "rows of a few bytes, or of whole words, need few accesses"
    for n, bytes_ in ((8, 4), (12, 8), (24, 16), (40, "kInRing"), (2, 4)):
        assert f"{bytes_}>" in next(line for line in source.splitlines() if f", {n}, valid[h])" in line and "load" in line), n


def generated(program: TileProgram, lanes: int = 1) -> str:
    arrangement = lower.Arrangement(False, 900, lanes, 1, 1, (True,), (1,), (), 232448)
    return lower.generate_kernel(program, arrangement, "program").source


@pytest.mark.parametrize("dtype, lanes", [("bfloat16", 3), ("float16", 3), ("float32", 2)])
def test_a_wide_input_is_fetched_once_for_all_columns_of_a_product(dtype: str, lanes: int) -> None:
    """Whose registers leave room for chunks of 64 columns only where operands are at hand."""
    t = Tiles((300,), 64)
    x, w = t.load((300, 160), dtype, ROW), t.load((160, 128), dtype)
    v = t.load((128, 96), dtype)
    t.store(t.matmul(t.matmul(x, w), v), (300, 96), ROW)
    program = t.program()
    source = generated(program, lanes)
    assert source.count("(RowSource<") == 1 and source.count(", 128, true, false, ") == 1
    assert source.count(", 64, false, false, ") == 1, "the second product has narrow chunks"
    arrays = [integers(300, 160, dtype=dtype), integers(160, 128, dtype=dtype), integers(128, 96, dtype=dtype)]
    arrays = [a * (RNG.random(a.shape) < 0.1) for a in arrays]  # 16-bit results count in ones
    check(program, [a.astype(np_dtype(dtype)) for a in arrays], lanes=lanes)


def test_no_room_means_rows_are_read_where_they_lie() -> None:
    program, _ = in_and_out(523, "bfloat16", (63,))
    small = lower.Arrangement(False, 900, 1, 1, 1, (True,), (1,), (), 16 * 1024)
    made = lower.generate_kernel(program, small, "program")
    assert "StagedRows" not in made.source and made.shared_bytes <= small.shared_bytes


@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
def test_staged_rows_need_no_narrow_loads() -> None:
    """In the machine code, but for the two loops that copy what is no whole tile."""
    program, _ = in_and_out(523, "bfloat16", (63,))
    code = sass.disassemble(compilers.cubin(generated(program), "sm_90a").cubin, "kitsune_region")
    assert code.count("LDG.E.U16") <= 2 and code.count("UBLKCP.S.G") == 2
    assert not code.has_local_memory

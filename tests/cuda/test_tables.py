"""Gathers by streamed indices as kernels, in the emulator: every mode, width and dtype, bit for bit as the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_checks import sass
from kitsune_jax.errors import CannotLower
from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cuda import compile as compilers
from kitsune_jax.targets.cuda import lower, nvrtc
from reference.interpret import interpret
from tests.support.cuda_run import check_bits, kernel_cache, run_program
from tests.support.tiles import Tiles

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

ROW = ((0,), ())
RNG = np.random.default_rng(8)
ANYWHERE = np.array([-(2**31), -1, 0, 2**31 - 1], np.int32)


def small(*shape: int, dtype: str) -> np.ndarray:
    """Whole numbers: sums and products of them are exact."""
    return RNG.integers(0 if dtype in ("bool", "uint32") else -2, 3, shape).astype(np_dtype(dtype))


def indices(rows: int, n: int, each: int = 1) -> np.ndarray:
    """Mostly in range, with the ends of the table, the ends of int32 and what lies just outside."""
    found = RNG.integers(-2, n + 2, (rows, each)).astype(np.int32)
    some = RNG.random(found.shape) < 0.1
    return np.where(some, RNG.choice(np.append(ANYWHERE, [n - 1, n]).astype(np.int32), found.shape), found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sm, lanes", [(900, 1), (900, 3), (800, 2)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "bool"])
def test_rows_of_every_width_are_gathered_as_they_lie(dtype: str, sm: int, lanes: int) -> None:
    rows, n = 200, 37
    t = Tiles((rows,), 64)
    ids = t.load((rows,), "int32", ((0,),))
    arrays = [indices(rows, n)[:, 0]]
    for width, mode, fill in ((1, "fill", 1), (3, "clip", 0), (8, "fill", 0), (27, "fill", 1), (64, "clip", 0), (65, "fill", 1)):
        table = t.load((n, width) if width > 1 else (n,), dtype)
        arrays.append(small(n, width, dtype=dtype) if width > 1 else small(n, dtype=dtype))
        streams = ROW if width > 1 else ((0,),)
        t.store(t.gather(table, ids, mode, fill), (rows, width) if width > 1 else (rows,), streams)
    check_bits(t.program(), arrays, sm=sm, lanes=lanes)


def test_a_float_table_is_filled_with_nan_and_infinity() -> None:
    t = Tiles((70,), 64)
    table, ids = t.load((5, 16), "bfloat16"), t.load((70,), "int32", ((0,),))
    for fill in (float("nan"), float("-inf")):
        t.store(t.gather(table, ids, "fill", fill), (70, 16), ROW)
    check_bits(t.program(), [small(5, 16, dtype="bfloat16"), indices(70, 5)[:, 0]])


@pytest.mark.parametrize("rows", [1, 63, 64, 65])
def test_few_rows_of_a_table_of_one(rows: int) -> None:
    t = Tiles((rows,), 64)
    table, ids = t.load((1, 40), "float32"), t.load((rows,), "int32", ((0,),))
    t.store(t.gather(table, ids, "clip"), (rows, 40), ROW)
    check_bits(t.program(), [small(1, 40, dtype="float32"), indices(rows, 1)[:, 0]])


@pytest.mark.parametrize("sm, lanes", [(900, 2), (800, 1)])
@pytest.mark.parametrize("width", [32, 12, 1])
def test_several_indices_of_a_row(width: int, sm: int, lanes: int) -> None:
    """Whole blocks of columns stay where they are read; others go through the lane's rows in shared memory."""
    rows, n, each = 131, 19, 3
    t = Tiles((rows,), 64)
    shape = (n, width) if width > 1 else (n,)
    table, ids = t.load(shape, "bfloat16"), t.load((rows, each), "int32", ROW)
    out = (rows, each, *shape[1:])
    t.store(t.op("tanh", t.gather(table, ids, "fill", 0)), out, ((0,), *((),) * (len(out) - 1)))
    program, arrays = t.program(), [small(*shape, dtype="bfloat16"), indices(rows, n, each)]
    for g, w in zip(run_program(program, *arrays, sm=sm, lanes=lanes), interpret(program, arrays), strict=True):
        np.testing.assert_allclose(g.astype(np.float32), w.astype(np.float32), rtol=2**-7)


def edges(rows: int, n: int, width: int, dtype: str) -> tuple[TileProgram, list[np.ndarray]]:
    """(edge, node, node) @ w, where the nodes are gathered: the first product of an edge update."""
    t = Tiles((rows,), 64)
    e, nodes = t.load((rows, width), dtype, ROW), t.load((n, width), dtype)
    ends = [t.load((rows,), "int32", ((0,),)) for _ in range(2)]
    x = t.concat(e, *(t.gather(nodes, i, "fill", 0) for i in ends), dimension=1)
    w = t.load((3 * width, width), dtype)
    t.store(t.op("add", t.matmul(x, w), e), (rows, width), ROW)
    weights = small(3 * width, width, dtype=dtype) * (RNG.random((3 * width, width)) < 0.1)
    arrays = [small(rows, width, dtype=dtype), small(n, width, dtype=dtype), *(indices(rows, n)[:, 0] for _ in range(2))]
    return t.program(), [*arrays, weights.astype(np_dtype(dtype))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sm, lanes", [(900, 2), (800, 2)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("width", [96, 24])
def test_gathered_rows_are_operands_of_products(dtype: str, width: int, sm: int, lanes: int) -> None:
    check_bits(*edges(300, 41, width, dtype), sm=sm, lanes=lanes)


def generated(program: TileProgram, split: int = 1) -> lower.Kernel:
    places = ("l2",) * len(program.queues)
    stages = len(program.stages)
    return lower.generate_kernel(
        program, lower.Arrangement(stages > 1, 900, 1, 1, 1, (True,) * stages, (split,) * stages, places, 232448), "program"
    )


def test_gathered_rows_go_straight_to_the_product() -> None:
    """No registers and no shared memory of their own. The edges' own rows come through the ring of tiles."""
    program, _ = edges(300, 41, 128, "bfloat16")
    made = generated(program)
    assert made.source.count("RowSource<Bf16, Bf16, 128, 16>") == 2 and made.source.count("(RowSource<") == 2
    assert made.source.count("BoxSource<Bf16, 128>") == 1
    assert made.packed[0].tables and "select" not in made.source


def test_what_is_refused_has_a_reason() -> None:
    t = Tiles((100,), 64)
    t.store(t.gather(t.load((9, 4)), t.load((100, 33), "int32", ROW), "clip"), (100, 33, 4), ((0,), (), ()))
    with pytest.raises(CannotLower, match="33 indices"):
        generated(t.program())


@pytest.mark.skipif(not (nvrtc.available() and sass.available()), reason="needs NVRTC and a disassembler")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_gathered_row_is_loaded_sixteen_bytes_at_a_time(dtype: str) -> None:
    """In the machine code, and its address is one of 64 bits: the index is multiplied by the pitch as a wide number."""
    program, _ = edges(300, 41, 128, dtype)
    code = sass.disassemble(compilers.cubin(generated(program).source, "sm_90a").cubin, "kitsune_region")
    in_global = 2 if dtype == "bfloat16" else 3  # the edges' own rows in bfloat16 come through the ring of tiles
    assert code.count("LDG.E.128") >= 2 * in_global * (4 if dtype == "bfloat16" else 8)
    assert code.count("LDG.E.U16") == 0 and code.count("IMAD.WIDE") >= 4
    assert not code.has_local_memory

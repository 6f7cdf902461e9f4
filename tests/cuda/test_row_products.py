"""Products for each row, and elements picked inside rows, as kernels in the emulator: against the interpreter and float64."""

from __future__ import annotations

import numpy as np
import pytest

from kitsune_jax.errors import CannotLower
from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cuda import lower
from reference.interpret import interpret
from tests.support.cuda_run import check_bits, kernel_cache, run_program
from tests.support.tiles import Tiles

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

ROW = ((0,), ())
RNG = np.random.default_rng(13)
DTYPES = ("bfloat16", "float16", "float32")
HOW = [(900, 1), (900, 3), (800, 2)]


def small(*shape: int, dtype: str) -> np.ndarray:
    """Whole numbers: sums and products of them are exact."""
    return RNG.integers(-2, 3, shape).astype(np_dtype(dtype))


def streams(*shape: int) -> tuple[tuple[int, ...], ...]:
    return ((0,), *((),) * len(shape))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, i, j, k, sm, lanes",
    [
        (1, 3, 3, 5, 900, 1),
        (131, 4, 2, 8, 800, 2),
        (67, 27, 27, 32, 900, 2),
        (64, 17, 40, 24, 800, 1),
        (129, 8, 16, 48, 900, 3),
    ],
)
def test_products_of_rows_of_arrays(rows: int, i: int, j: int, k: int, dtype: str, sm: int, lanes: int) -> None:
    """Each way that the operands may lie."""
    t = Tiles((rows,), 64)
    x, y = t.load((rows, i, k), dtype, streams(i, k)), t.load((rows, j, k), dtype, streams(j, k))
    xt, yt = t.load((rows, k, i), dtype, streams(k, i)), t.load((rows, k, j), dtype, streams(k, j))
    for a, b, contract in ((x, y, (2, 2)), (x, yt, (2, 1)), (xt, y, (1, 2)), (xt, yt, (1, 1)), (x, x, (2, 2))):
        v = t.dot(a, b, contract=tuple((c,) for c in contract), out="float32")
        shape = t.values[v].shape
        t.store(v, (rows, *shape), streams(*shape))
    arrays = [small(rows, *s, dtype=dtype) for s in ((i, k), (j, k), (k, i), (k, j))]
    check_bits(t.program(), arrays, sm=sm, lanes=lanes)


def interaction(rows: int, count: int, width: int, dtype: str, n: int = 19) -> tuple[TileProgram, list[np.ndarray]]:
    """DLRM's: a computed vector and gathered ones, the products of each two, those below the diagonal, and a product of them."""
    t = Tiles((rows,), 64)
    numbers, w = t.load((rows, 13), dtype, ROW), t.load((13, width), dtype)
    x = t.op("max", t.matmul(numbers, w), t.literal(0.0, dtype))
    arrays = [small(rows, 13, dtype=dtype), small(13, width, dtype=dtype)]
    parts = [t.reshape(x, (1, width))]
    for _ in range(count - 1):
        table, ids = t.load((n, width), dtype), t.load((rows,), "int32", ((0,),))
        parts.append(t.reshape(t.gather(table, ids, "fill", 1.0), (1, width)))
        arrays += [small(n, width, dtype=dtype), RNG.integers(-2, n + 2, rows).astype(np.int32)]
    stack = t.concat(*parts, dimension=1)
    flat = t.reshape(t.dot(stack, stack, contract=((2,), (2,))), (count * count,))
    below = np.ravel_multi_index(np.tril_indices(count, -1), (count, count)).astype(np.int32)
    arrays.append(below)
    picked = t.take(flat, t.load(below.shape, "int32"), 1, "fill", float("nan"))
    joined = t.concat(x, picked, dimension=1)
    w = t.load((width + len(below), 24), dtype)
    weights = small(width + len(below), 24, dtype=dtype) * (RNG.random((width + len(below), 24)) < 0.02)
    arrays.append(weights.astype(np_dtype(dtype)))
    t.store(t.matmul(joined, w, out="float32"), (rows, 24), ROW)
    t.store(picked, (rows, len(below)), ROW)
    return t.program(), arrays


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, count, width, sm, lanes", [(1, 3, 8, 900, 1), (131, 5, 16, 800, 2), (70, 9, 40, 900, 1), (131, 5, 8, 900, 2)]
)
def test_the_interaction_of_gathered_vectors(rows: int, count: int, width: int, dtype: str, sm: int, lanes: int) -> None:
    program, arrays = interaction(rows, count, width, dtype)
    for g, w in zip(run_program(program, *arrays, sm=sm, lanes=lanes), interpret(program, arrays), strict=True):
        scale = np.abs(w.astype(np.float64)).max()
        unit = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
        np.testing.assert_allclose(g.astype(np.float64), w.astype(np.float64), rtol=unit, atol=unit * scale)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, count, width, sm, lanes", [(70, 27, 128, 900, 1), (131, 5, 24, 800, 2)])
def test_the_gradient_of_an_interaction(rows: int, count: int, width: int, dtype: str, sm: int, lanes: int) -> None:
    """The gradient of X X^T by X is (G + G^T) X: two products for each row that read the same operands, each its own way."""
    t = Tiles((rows,), 64)
    g, x = t.load((rows, count, count), dtype, streams(count, count)), t.load((rows, count, width), dtype, streams(count, width))
    for contract in (1, 2):
        t.store(t.dot(g, x, ((contract,), (1,))), (rows, count, width), streams(count, width))
    arrays = [small(rows, count, count, dtype=dtype), small(rows, count, width, dtype=dtype)]
    check_bits(t.program(), arrays, sm=sm, lanes=lanes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, count, width, sm, lanes", [(67, 5, 64, 900, 2), (131, 3, 12, 800, 1)])
def test_the_operands_of_a_product_are_kept_for_a_gradient(
    rows: int, count: int, width: int, dtype: str, sm: int, lanes: int
) -> None:
    """They are stored as one array as well; the product takes each from where it lies."""
    t = Tiles((rows,), 64)
    x = t.load((rows, width), dtype, ROW)
    parts, arrays = [t.reshape(t.op("neg", x), (1, width))], [small(rows, width, dtype=dtype)]
    for _ in range(count - 1):
        table, ids = t.load((7, width), dtype), t.load((rows,), "int32", ((0,),))
        parts.append(t.reshape(t.gather(table, ids, "clip"), (1, width)))
        arrays += [small(7, width, dtype=dtype), RNG.integers(-1, 8, rows).astype(np.int32)]
    stack = t.concat(*parts, dimension=1)
    t.store(t.dot(stack, stack, ((2,), (2,)), out="float32"), (rows, count, count), streams(count, count))
    t.store(stack, (rows, count, width), streams(count, width))
    check_bits(t.program(), arrays, sm=sm, lanes=lanes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sm, lanes", HOW)
@pytest.mark.parametrize("dtype", [*DTYPES, "int32"])
def test_elements_are_picked_and_added_up(dtype: str, sm: int, lanes: int) -> None:
    """Every dimension, indices out of range, some twice, and a result of one number for each row."""
    rows, shape = 131, (3, 5, 4)
    t = Tiles((rows,), 64)
    x = t.load((rows, *shape), dtype, streams(*shape))
    arrays = [small(rows, *shape, dtype=dtype)]
    for axis, n in enumerate(shape, 1):
        for mode in ("clip", "fill"):
            index = RNG.integers(-1, n + 1, (2, 3)).astype(np.int32)
            arrays.append(index)
            v = t.take(x, t.load(index.shape, "int32"), axis, mode, 2)
            t.store(v, (rows, *t.values[v].shape), streams(*t.values[v].shape))
        index = RNG.integers(-1, 4, n).astype(np.int32)
        arrays.append(index)
        v = t.put(x, t.load(index.shape, "int32"), axis, 3)
        t.store(v, (rows, *t.values[v].shape), streams(*t.values[v].shape))
    flat = t.reshape(x, (60,))
    one = np.array([7], np.int32)
    arrays.append(one)
    t.store(t.take(flat, t.load((1,), "int32"), 1), (rows, 1), ROW)
    zeros = np.zeros(60, np.int32)
    arrays.append(zeros)
    t.store(t.put(flat, t.load((60,), "int32"), 1, 1), (rows, 1), ROW)
    check_bits(t.program(), arrays, sm=sm, lanes=lanes)


def generated(program: TileProgram, split: int = 1) -> lower.Kernel:
    return lower.generate_kernel(program, lower.Arrangement(False, 900, 1, 1, 1, (True,), (split,), (), 232448), "program")


def test_a_product_that_does_not_fit_is_refused_in_words() -> None:
    t = Tiles((70,), 64)
    x = t.load((70, 64, 512), "float32", streams(64, 512))
    t.store(t.dot(x, x, contract=((2,), (2,))), (70, 64, 64), streams(64, 64))
    with pytest.raises(CannotLower, match="shared memory"):
        generated(t.program())


def test_products_that_have_no_code_are_refused_in_words() -> None:
    t = Tiles((70,), 64)
    x = t.load((70, 5, 4), "float32", streams(5, 4))
    t.store(t.dot(x, x, ((1,), (1,)), ((2,), (2,))), (70, 4), ROW)
    with pytest.raises(CannotLower, match="further batch dimensions"):
        generated(t.program())
    t = Tiles((70,), 64)
    x = t.load((70, 3, 5, 4), "float32", streams(3, 5, 4))
    t.store(t.dot(x, x, ((2,), (2,))), (70, 3, 4, 3, 4), streams(3, 4, 3, 4))
    with pytest.raises(CannotLower, match="contracts dimensions between others"):
        generated(t.program())


def test_inner_products_are_one_number_for_each_row() -> None:
    rows, t = 67, Tiles((67,), 64)
    x, y = (t.load((rows, 40), "float32", ROW) for _ in range(2))
    t.store(t.dot(x, y, contract=((1,), (1,))), (rows,), ((0,),))
    check_bits(t.program(), [small(rows, 40, dtype="float32"), small(rows, 40, dtype="float32")], sm=900, lanes=1)

"""The operators of the CUDA target one by one, in the emulator, against the op table's NumPy rules (which are tested against JAX).

Pointwise operators meet the special values of their dtype, in every pair; all operators of a dtype that the target admits stand in
one kernel. The rest are hand-written tile programs: what moves columns, what reduces them, what reduces the stream, and arrays
whose rows do not lie together.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.ops.graph import Op, Value
from kitsune_jax.ops.spec import is_float, np_dtype
from kitsune_jax.ops.table import OPS
from kitsune_jax.targets import CannotLower
from kitsune_jax.targets.cuda import target as cuda_target
from reference.interpret import interpret
from tests.support.cuda_run import kernel_cache, run_program
from tests.support.table_cases import all_pointwise, disagreement, entries
from tests.support.tiles import Tiles

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

ROW = ((0,), ())
DTYPES = ("float32", "bfloat16", "float16", "int32", "uint32", "bool")
RNG = np.random.default_rng(11)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pointwise(dtype: str) -> None:
    t, arrays, names = all_pointwise(dtype, cuda_target.supports)
    program = t.program()
    got, want = run_program(program, *arrays), interpret(program, arrays)
    found = [disagreement(name, g, w, "cuda") for name, g, w in zip(names, got, want, strict=True)]
    assert not any(found), "\n".join(filter(None, found))


def test_a_division_by_a_constant_is_rounded_correctly() -> None:
    """Bit for bit, special values included, though the steps of a loop have no division."""
    divisors = (1.1, -3.0, 0.7, 1e-9, 16777215.0)
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((512, 32)) * 2.0 ** rng.integers(-40, 90, (512, 32))).astype(np.float32)
    x[:2, :6] = [[0.0, -0.0, np.inf, -np.inf, np.nan, 1.1], [3e38, -3e38, 3.0, 0.7, -1.0, 1.0]]

    def twice(x: jax.Array) -> tuple[jax.Array, ...]:
        step = lambda _, xs: tuple(x / d for x, d in zip(xs, divisors, strict=True))  # noqa: E731
        return jax.lax.fori_loop(0, 2, step, (x,) * len(divisors))

    found = jax.jit(kj.pipeline(twice, target="emulator", force=True))(x)
    for quotient, d in zip(found, divisors, strict=True):
        with np.errstate(over="ignore"):
            want = x / np.float32(d) / np.float32(d)
        np.testing.assert_array_equal(quotient, want)
        assert (np.signbit(quotient) == np.signbit(want))[x == 0].all()


def test_most_of_the_table_has_code() -> None:
    """What has none is known: special functions that CUDA's library lacks, and what needs the bits of a dtype."""
    of_floats = {kind for kind, *_ in entries("float32", cuda_target.supports)}
    missing = {k for k, s in OPS.items() if s.family == "pointwise" and "float32" in s.dtypes} - of_floats
    assert missing == {
        *("digamma", "bessel_i0e", "bessel_i1e", "igamma", "igammac", "zeta", "polygamma", "regularized_incomplete_beta"),
        "reduce_precision",
    }
    of_integers = {kind for kind, *_ in entries("int32", cuda_target.supports)}
    missing = {k for k, s in OPS.items() if s.family == "pointwise" and "int32" in s.dtypes} - of_integers
    assert missing == set()


# -- columns that change places


def check_program(t: Tiles, *arrays: np.ndarray, tolerance: float = 0.0, sm: int = 900, lanes: int = 1) -> None:
    """As the interpreter says; bit for bit if ``tolerance`` is 0."""
    program = t.program()
    for k, (g, w) in enumerate(zip(run_program(program, *arrays, sm=sm, lanes=lanes), interpret(program, arrays), strict=True)):
        assert g.dtype == w.dtype and g.shape == w.shape
        message = f"result {k}\n{program}"
        if tolerance == 0:
            np.testing.assert_array_equal(g, w, err_msg=message)
        else:
            np.testing.assert_allclose(g.astype(np.float64), w.astype(np.float64), rtol=tolerance, atol=tolerance, err_msg=message)


def array(*shape: int, dtype: str = "float32") -> np.ndarray:
    if dtype == "bool":
        return RNG.integers(0, 2, shape).astype(bool)
    if not is_float(dtype):
        return RNG.integers(0, 1000, shape).astype(dtype)
    return RNG.standard_normal(shape).astype(np_dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_concatenations_slices_and_reversals(dtype: str) -> None:
    """Whole blocks, and columns that start within one."""
    t = Tiles((70,), 64)
    x, y = t.load((70, 40), dtype, ROW), t.load((70, 96), dtype, ROW)

    def store(v: int) -> None:
        t.store(v, (70, *t.values[v].shape), ROW)

    def cut(v: int, start: int, limit: int, stride: int = 1) -> int:
        return t.op("slice", v, shape=(-(-(limit - start) // stride),), start=(0, start), limit=(-1, limit), strides=(1, stride))

    store(t.concat(x, y, dimension=1))
    store(t.concat(y, x, y, dimension=1))
    for start, limit, stride in ((0, 32, 1), (32, 96, 1), (5, 38, 1), (64, 65, 1), (1, 96, 7)):
        store(cut(y, start, limit, stride))
    store(t.op("rev", x, dimensions=(1,)))
    store(t.concat(cut(y, 64, 96), cut(y, 0, 32), dimension=1))
    store(t.concat(cut(x, 3, 4), cut(y, 90, 96), x, dimension=1))
    check_program(t, array(70, 40, dtype=dtype), array(70, 96, dtype=dtype))


def test_pads() -> None:
    t = Tiles((9,), 64)
    x = t.load((9, 12, 4), "float32", ((0,), (), ()))
    a = array(9, 12, 4)
    for low, high, interior in (((1, 0), (2, 3), (0, 0)), ((-1, 2), (0, -2), (0, 0)), ((0, -3), (-2, 1), (1, 2))):
        sizes = [n + lo + hi + (n - 1) * gap for n, lo, hi, gap in zip((12, 4), low, high, interior, strict=True)]
        params = {"low": (0, *low), "high": (0, *high), "interior": (0, *interior)}
        y = t.op("pad", x, t.literal(0.5), shape=sizes, **params)
        t.store(y, (9, *sizes), ((0,), (), ()))
    check_program(t, a)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("low, high, interior", [(0, 39, 0), (3, 0, 0), (1, -1, 0), (2, -1, 0), (-1, 3, 0), (0, 0, 4)])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_pads_of_one_column(dtype: str, low: int, high: int, interior: int) -> None:
    """The gradient of ``x[..., 0]``: the columns beside it were the column again."""
    t = Tiles((9,), 64)
    x = t.load((9, 1), dtype, ROW)
    params = {"low": (0, low), "high": (0, high), "interior": (0, interior)}
    y = t.op("pad", t.op("neg", x), t.literal(2, dtype), shape=(1 + low + high,), **params)
    t.store(y, (9, 1 + low + high), ROW)
    check_program(t, array(9, 1, dtype=dtype))


def test_transposes_reshapes_and_broadcasts_of_rows_with_dimensions() -> None:
    t = Tiles((67,), 64)
    x, w, v = t.load((67, 3, 4, 5), "float32", ((0,), (), (), ())), t.load((4,)), t.load((67,), "float32", ((0,),))
    y = t.op("sin", x)
    for perm in ((0, 2, 1, 3), (0, 3, 2, 1), (0, 1, 3, 2)):
        z = t.transpose(y, perm)
        t.store(z, (67, *t.values[z].shape), ((0,), (), (), ()))
    t.store(t.reshape(t.transpose(x, (0, 3, 1, 2)), (15, 4)), (67, 15, 4), ((0,), (), ()))
    t.store(t.op("mul", y, t.broadcast(w, (3, 4, 5), (2,))), (67, 3, 4, 5), ((0,), (), (), ()))
    t.store(t.op("add", y, t.broadcast(v, (3, 4, 5), (0,))), (67, 3, 4, 5), ((0,), (), (), ()))
    means = t.reduce("sum", t.reshape(x, (60,)), (1,))
    t.store(t.broadcast(means, (4, 2), (0,)), (67, 4, 2), ((0,), (), ()))
    check_program(t, array(67, 3, 4, 5), array(4), array(67), tolerance=1e-5)


@pytest.mark.parametrize("dtype", ["int32", "float32", "bfloat16", "uint32"])
def test_indices_of_columns_and_rows(dtype: str) -> None:
    t = Tiles((5, 27), 64)
    streams = ((0,), (1,), (), ())
    x = t.load((5, 27, 3, 40), dtype, streams)
    for d in (1, 2):
        t.store(t.op("max", x, t.iota((3, 40), d, dtype)), (5, 27, 3, 40), streams)
    for axes in ((0,), (1,), (0, 1)):
        t.store(t.op("max", x, t.index(axes, (3, 40), dtype)), (5, 27, 3, 40), streams)
        t.store(t.index(axes, (), dtype), (5, 27), ((0,), (1,)))
    check_program(t, array(5, 27, 3, 40, dtype=dtype))


# -- reductions of columns and of the stream


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint32", "bool"])
def test_reductions_of_columns(dtype: str) -> None:
    t = Tiles((70,), 64)
    wide, narrow, one = (t.load((70, n), dtype, ROW) for n in (90, 5, 1))
    arrays = [array(70, n, dtype=dtype) for n in (90, 5, 1)]
    hows = {"bool": ("and", "or", "max", "min"), "int32": ("sum", "max", "min", "prod", "and", "or")}
    for how in hows.get(dtype, ("sum", "max", "min", *(("and", "or") if dtype == "uint32" else ("prod",)))):
        for x in (wide, narrow, one):
            t.store(t.reduce(how, x, (1,)), (70,), ((0,),))
    check_program(t, *arrays, tolerance={"float32": 3e-5, "bfloat16": 2e-2}.get(dtype, 0.0))


@pytest.mark.parametrize(("dtype", "lanes"), [("float32", 1), ("float32", 3), ("int32", 2), ("uint32", 1), ("bool", 3)])
def test_sinks(dtype: str, lanes: int) -> None:
    """Of whole rows, of columns, of one number a row, in every way; the last tile is not full."""
    t = Tiles((5, 33), 64)
    streams = ((0,), (1,), ())
    x, v = t.load((5, 33, 40), dtype, streams), t.load((5, 33), dtype, ((0,), (1,)))
    ways = {"bool": ("and", "or", "max", "min"), "float32": ("sum", "max", "min", "prod")}
    for how in ways.get(dtype, ("sum", "max", "min", "prod", "and", "or")):
        t.sink(x, how, (0,))
        t.sink(x, how, (0, 1))
        t.sink(v, how, (0,))
    x_array, v_array = array(5, 33, 40, dtype=dtype), array(5, 33, dtype=dtype)
    check_program(t, x_array, v_array, tolerance=2e-5 if dtype == "float32" else 0.0, lanes=lanes)


def test_nan_goes_through_reductions_and_sinks() -> None:
    t = Tiles((70,), 64)
    x = t.load((70, 33), "float32", ROW)
    for how in ("sum", "max", "min"):
        t.store(t.reduce(how, x, (1,)), (70,), ((0,),))
        t.sink(x, how, (0,))
        t.sink(x, how, (0, 1))
    a = array(70, 33)
    a[7, 3], a[69, 32], a[3, 5] = np.nan, np.inf, -np.inf
    check_program(t, a, tolerance=2e-5)


# -- arrays whose rows do not lie together, several stream axes, products


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_strided_rows(dtype: str) -> None:
    """The stream runs over the last, a middle or two separate dimensions."""
    t = Tiles((7, 11), 64)
    last = t.load((40, 7, 11), dtype, ((), (0,), (1,)))
    middle = t.load((3, 7, 11, 4), dtype, ((), (0,), (1,), ()))
    apart = t.load((11, 5, 7), dtype, ((1,), (), (0,)))
    of_one_axis = t.load((7, 40), dtype, ((0,), ()))
    both = t.op("max", last, of_one_axis)
    t.store(both, (40, 11, 7), ((), (1,), (0,)))
    t.store(t.transpose(middle, (0, 2, 1)), (4, 7, 3, 11), ((), (0,), (), (1,)))
    t.store(apart, (7, 5, 11), ((0,), (), (1,)))
    arrays = [array(*s, dtype=dtype) for s in ((40, 7, 11), (3, 7, 11, 4), (11, 5, 7), (7, 40))]
    check_program(t, *arrays)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sm", [900, 800])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_products_of_odd_shapes(dtype: str, sm: int) -> None:
    """K and N of 1, 3, 8, 17 and more than a chunk; two contracted dimensions; operands from strided arrays. Integers: exact."""
    t = Tiles((70,), 64)
    arrays, tolerance = [], 0.0

    def load(*shape: int, streams: Any = None) -> int:
        arrays.append(RNG.integers(-2, 3, shape).astype(np_dtype(dtype)))
        return t.load(shape, dtype, streams)

    for k, n in ((1, 8), (3, 17), (8, 1), (17, 3), (33, 160), (16, 16)):
        y = t.matmul(load(70, k, streams=ROW), load(k, n))
        t.store(y, (70, n), ROW)
    x, w = load(70, 3, 4, streams=((0,), (), ())), load(3, 4, 5)
    t.store(t.matmul(x, w, (((1, 2), (0, 1)), ((), ()))), (70, 5), ROW)
    x, w = load(24, 70, streams=((), (0,))), load(9, 24)
    t.store(t.matmul(x, w, (((1,), (1,)), ((), ()))), (9, 70), ((), (0,)))
    check_program(t, *arrays, tolerance=tolerance, sm=sm)


@pytest.mark.parametrize("sm", [900, 800])
def test_tiles_of_every_type_pass_through_queues(sm: int) -> None:
    t = Tiles((200,), 64)
    values = [(dtype, n) for dtype in DTYPES for n in (40, 8)]
    loads = [t.load((200, n), dtype, ROW) for dtype, n in values]
    row = t.load((200,), "float32", ((0,),))
    queues = [t.queue(x, (1,)) for x in (*loads, row)]
    t.stage()
    for (_, n), q in zip(values, queues, strict=False):
        t.store(t.pop(q), (200, n), ROW)
    t.store(t.pop(queues[-1]), (200,), ((0,),))
    check_program(t, *(array(200, n, dtype=dtype) for dtype, n in values), array(200), sm=sm)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sm, lanes", [(900, 2), (800, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_reductions_over_a_part_of_a_row(dtype: str, sm: int, lanes: int) -> None:
    """Heads and their widths: what follows is computed for each head, and seen again by all of its columns."""
    t, rows = Tiles((150,), 64), 150
    x, y = t.load((rows, 4, 8), dtype, ((0,), (), ())), t.load((rows, 3, 5, 7), dtype, ((0,), (), (), ()))
    heads = t.reduce("sum", t.op("max", x, t.literal(-1, dtype)), (2,))
    t.store(heads, (rows, 4), ROW)
    t.store(t.op("add", x, t.broadcast(heads, (4, 8), (0, 1))), (rows, 4, 8), ((0,), (), ()))
    for how, axes, shape in (("max", (1,), (5, 7)), ("sum", (1, 2), (7,)), ("min", (2,), (3, 7)), ("sum", (2, 3), (3,))):
        t.store(t.reduce(how, y, axes), (rows, *shape), ((0,), *((),) * len(shape)))
    check_program(t, *(RNG.integers(-3, 4, s).astype(np_dtype(dtype)) for s in ((rows, 4, 8), (rows, 3, 5, 7))), sm=sm, lanes=lanes)


# -- what there is no code for


def why_not(build: Any) -> str:
    t = Tiles((70,), 64)
    arrays = build(t)
    with pytest.raises(CannotLower) as no:
        run_program(t.program(), *arrays)
    return no.value.reason


def test_reasons() -> None:
    def torn_reduction(t: Tiles) -> list[np.ndarray]:
        x = t.load((70, 3, 4, 2), "float32", ((0,), (), (), ()))
        t.store(t.reduce("sum", x, (1, 3)), (70, 4), ROW)
        return [array(70, 3, 4, 2)]

    def wide_type(t: Tiles) -> list[np.ndarray]:
        t.store(t.op("sin", t.load((70, 3), "float64", ROW)), (70, 3), ROW)
        return [array(70, 3)]

    assert why_not(torn_reduction) == "a reduction over dimensions of a row that do not follow each other has no code on the GPU"
    assert "float64" in why_not(wide_type)


@pytest.mark.parametrize("dtype", ["float64", "int64", "int8", "uint8", "int16", "complex64"])
def test_dtypes_without_code_are_named(dtype: str) -> None:
    values = [Value((64, 8), dtype), Value((64, 8), dtype)]
    assert cuda_target.supports(Op("neg", (0,), (1,)), values[:1], values[1:]) == f"{dtype} has no code on the GPU"

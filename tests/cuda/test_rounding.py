"""CUDA kernels round 16-bit results where ``jax.jit`` on a GPU does: where another operator computes with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.targets.cuda.stage.simplify import rounded_results
from tests.support.cuda_run import kernel_cache
from tests.support.tiles import Tiles

__all__ = ["kernel_cache"]  # a fixture
pytestmark = [
    pytest.mark.usefixtures("kernel_cache"),
    pytest.mark.filterwarnings("error:kitsune_jax could not"),  # a failure of ours that falls back is a failure here
]
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ROWS = 131
ROW = ((0,), ())


def drawn(*shape: int, dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


def piped(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(kj.pipeline(f, force=True, target="emulator", strict=True))


# -- through the public API: bits of NumPy, which rounds after every operation


def error_of_a_sum(a: Any, b: Any) -> Any:
    s = a + b
    t = s - a
    return (a - (s - t)) + (b - t)


def remainder(a: Any, b: Any) -> Any:
    floor = np.floor if isinstance(a, np.ndarray) else jnp.floor
    return a - floor(a / b) * b


def chain(a: Any, b: Any) -> Any:
    return ((a * b + b) * a - b) * (a - b)


def largest(a: Any, b: Any) -> Any:
    """A maximum hands on what is rounded."""
    maximum = np.maximum if isinstance(a, np.ndarray) else jnp.maximum
    return maximum(a * b, a + b) * a


CASES = [
    *((f, dtype, 5) for f in (error_of_a_sum, remainder, chain) for dtype in DTYPES),
    (largest, "bfloat16", 5),
    (chain, "bfloat16", 1),  # numbers of a row
    (chain, "float16", 67),  # several blocks
]


@pytest.mark.parametrize("f, dtype, width", CASES, ids=lambda x: getattr(x, "__name__", None))
def test_a_kernel_has_the_bits_of_op_by_op(f: Callable[..., Any], dtype: str, width: int) -> None:
    a, b = (drawn(ROWS, width, dtype=dtype, seed=seed) for seed in range(2))
    np.testing.assert_array_equal(np.asarray(piped(f)(a, b)), f(a, b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_of_a_sum_is_what_the_sum_lost(dtype: str) -> None:
    a, b = (drawn(ROWS, 5, dtype=dtype, seed=seed) for seed in range(2))
    lost = a.astype(np.float64) + b.astype(np.float64) - (a + b).astype(np.float64)
    assert np.count_nonzero(lost) > lost.size / 4
    np.testing.assert_array_equal(np.asarray(piped(error_of_a_sum)(a, b)).astype(np.float64), lost)


def compensated(total: Any, error: Any, x: Any) -> Any:
    """Kahan's sum, a term further."""
    y = x - error
    t = total + y
    return t, (t - total) - y


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loop_rounds_in_its_body(dtype: str) -> None:
    first, terms = drawn(ROWS, 5, dtype=dtype), drawn(7, ROWS, 5, dtype=dtype, seed=1)

    def loop(first: Any, terms: Any) -> Any:
        return jax.lax.scan(lambda c, x: (compensated(*c, x), None), (first, jnp.zeros_like(first)), terms)[0]

    total, error = first, np.zeros_like(first)
    for x in terms:
        total, error = compensated(total, error, x)
    got = piped(loop)(first, terms)
    np.testing.assert_array_equal(np.asarray(got[0]), total)
    np.testing.assert_array_equal(np.asarray(got[1]), error)


def test_a_compensated_sum_follows_float64_for_200_steps() -> None:
    """Each step is less than half a unit in the last place of the sum, which alone would stay where it began."""
    terms = np.random.default_rng(2).uniform(0.0005, 0.0015, (200, ROWS, 5)).astype(ml_dtypes.bfloat16)
    step, total = piped(compensated), np.ones((ROWS, 5), ml_dtypes.bfloat16)
    error = np.zeros_like(total)
    for x in terms:
        total, error = step(total, error, x)
    want = 1 + terms.astype(np.float64).sum(0)
    bound = 2 * 2.0**-8 * want  # Kahan's: two units of rounding of the sum, in which the number of terms does not occur
    assert (np.abs(np.asarray(total).astype(np.float64) - want) <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_a_product_are_rounded_once_behind_bias_and_relu(dtype: str) -> None:
    """Whole numbers: float32 adds them up exactly, in any order."""
    rng = np.random.default_rng(3)
    x, w = (rng.integers(-40, 41, shape).astype(DTYPES[dtype]) for shape in ((ROWS, 16), (16, 24)))
    b = drawn(24, dtype=dtype) * DTYPES[dtype](100)
    sums = x.astype(np.float32) @ w.astype(np.float32)
    want = np.maximum(sums + b.astype(np.float32), 0).astype(DTYPES[dtype])
    assert (want != np.maximum(sums.astype(DTYPES[dtype]) + b, 0)).any()
    got = piped(lambda x, w, b: jax.nn.relu(x @ w + b))(x, w, b)
    np.testing.assert_array_equal(np.asarray(got), want)


# -- which values of a program


def of_two(t: Tiles, dtype: str = "bfloat16") -> int:
    a, b = (t.load((ROWS, 8), dtype, ROW) for _ in range(2))
    return t.op("add", a, b)


def test_nothing_is_rounded_that_is_only_stored() -> None:
    t = Tiles((ROWS,), 64)
    t.store(t.op("max", of_two(t), t.literal(0.0, "bfloat16")), (ROWS, 8), ROW)
    assert not rounded_results(t.program())


def test_no_float32_is_rounded() -> None:
    t = Tiles((ROWS,), 64)
    t.store(t.op("exp", of_two(t, "float32")), (ROWS, 8), ROW)
    assert not rounded_results(t.program())


def test_a_sum_over_the_rows_reads_digits() -> None:
    t = Tiles((ROWS,), 64)
    x = of_two(t)
    t.sink(x, "sum", (0,))
    assert rounded_results(t.program()) == {x}


def test_a_conversion_to_a_wider_float_reads_digits() -> None:
    t = Tiles((ROWS,), 64)
    x = of_two(t)
    t.store(t.op("convert_element_type", x, dtype="float32"), (ROWS, 8), ROW)
    assert rounded_results(t.program()) == {x}


def test_a_float_that_is_converted_there_and_back_keeps_its_digits() -> None:
    t = Tiles((ROWS,), 64)
    narrow = t.op("convert_element_type", of_two(t, "float32"), dtype="bfloat16")
    t.store(t.op("convert_element_type", narrow, dtype="float32"), (ROWS, 8), ROW)
    assert not rounded_results(t.program())


def test_a_float_that_is_converted_for_an_operator_of_16_bits_is_rounded() -> None:
    t = Tiles((ROWS,), 64)
    narrow = t.op("convert_element_type", of_two(t, "float32"), dtype="bfloat16")
    t.store(t.op("mul", narrow, narrow), (ROWS, 8), ROW)
    assert rounded_results(t.program()) == {narrow}


def test_a_comparison_with_zero_reads_a_sign() -> None:
    t = Tiles((ROWS,), 64)
    x = of_two(t)
    positive = t.op("gt", x, t.broadcast(t.literal(0.0, "bfloat16"), (8,), ()), dtype="bool")
    t.store(t.op("select_n", positive, x, x), (ROWS, 8), ROW)
    assert not rounded_results(t.program())


@pytest.mark.parametrize("size", [1, 4])
def test_a_loop_over_blocks_keeps_digits_and_one_over_steps_does_not(size: int) -> None:
    t = Tiles((ROWS,), 64)
    array = t.input((8 * size, ROWS, 3), "bfloat16", ((), (0,), ()))
    with t.loop(8, t.load((ROWS, size, 3), "bfloat16", ((0,), (), ()))) as loop:
        x = t.load_slice(array, (loop.index, 0, size, size))
        scaled = t.op("mul", x, x)
        loop.next(t.op("add", loop.carries[0], scaled))
    t.store(loop.results[0], (ROWS, size, 3), ((0,), (), ()))
    assert (scaled in rounded_results(t.program())) == (size == 1)


@pytest.mark.parametrize("kind, rounds", [("mul", True), ("tanh", False)])
def test_elementary_functions_in_a_loop_are_not_rounded(kind: str, rounds: bool) -> None:
    t = Tiles((ROWS,), 64)
    with t.loop(8, t.load((ROWS, 3), "bfloat16", ROW)) as loop:
        (x,) = loop.carries
        found = t.op("mul", x, x) if kind == "mul" else t.op("tanh", x)
        loop.next(t.op("add", x, found))
    t.store(loop.results[0], (ROWS, 3), ROW)
    assert (found in rounded_results(t.program())) == rounds


def test_the_sum_of_two_products_is_rounded_behind_its_bias() -> None:
    t = Tiles((ROWS,), 64)
    x, w = t.load((ROWS, 16), "bfloat16", ROW), t.load((16, 8), "bfloat16")
    bias = t.broadcast(t.load((8,), "bfloat16"), (8,), (1,))
    biased = t.op("add", t.op("add", t.matmul(x, w), t.matmul(x, w)), bias)
    t.store(t.op("tanh", biased), (ROWS, 8), ROW)
    assert rounded_results(t.program()) == {biased}

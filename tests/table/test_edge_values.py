"""Numbers at the edges of a dtype, in rows of any width, give what ``jax.jit`` gives, or what docs/differences.md says instead.

XLA's threads take subnormal numbers for zeros (FTZ and DAZ of MXCSR), and so do the pipelines that run on them. The subnormal
numbers of float16 are normal numbers of float32, in which they are computed: they stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import kitsune_jax as kj
from kitsune_jax import _cpu
from kitsune_jax.ops.spec import DTYPES, is_float, np_dtype
from kitsune_jax.ops.table import OPS
from tests.support.checks import count, enable_x64, isa

__all__ = ["isa"]  # a fixture

pytestmark = pytest.mark.filterwarnings("error:kitsune_jax could not")  # a fall-back to plain HLO is a failure here

Function = Callable[..., Any]
FLOATS = ("float32", "bfloat16", "float16", "float64")
RTOL = {"float32": 1e-5, "bfloat16": 0.02, "float16": 4e-3, "float64": 1e-11}


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    with enable_x64():
        yield


def pipelined(f: Function, *args: Any) -> Any:
    """What ``f``, forced through the pipeline, gives; as NumPy arrays."""
    compiled = jax.jit(kj.pipeline(f, force=True)).lower(*args).compile()
    assert count(compiled.as_text()) > 0
    return jax.tree.map(np.asarray, compiled(*args))


def plain(f: Function, *args: Any) -> Any:
    return jax.tree.map(np.asarray, jax.jit(f)(*args))


def double(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return np.asarray(x).astype(np.float64)


def bits_of(dtype: Any) -> Any:
    return np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")


def rows(x: np.ndarray, width: int) -> np.ndarray:
    """``x`` in rows of ``width`` elements; the last one is filled up from the start of ``x``."""
    return np.resize(x, (-(-x.size // width), width))


# --- float16 keeps its subnormal numbers ------------------------------------------------------------------------------------------

HALVES = np.arange(65536, dtype=np.uint16).view(np.float16)
FINITE = HALVES[np.isfinite(HALVES)]


def half_arithmetic(x: Any, eye: Any) -> Any:
    small = jnp.where(jnp.abs(x) < 1, x, 0)
    return x * np.float16(1.5), x @ eye, x.astype(jnp.float32), jnp.maximum(x, -1), small.sum(1), -x, lax.cummax(x, axis=1)


def half_gradients(x: Any, eye: Any) -> Any:
    """By the operand of a pointwise operator, of a product, and by the weight (an outer product of the rows)."""
    small = jnp.where(jnp.abs(x) < 1, x, 0)
    by_weight = jax.grad(lambda w: (small[: x.shape[1]] @ w).sum(), allow_int=False)(eye)
    return jax.grad(lambda v: (v * small).sum())(small), jax.grad(lambda v: ((v @ eye) * small).sum())(small), by_weight


def check_halves(width: int) -> None:
    x, eye = rows(FINITE, width), np.eye(width, dtype=np.float16)
    exact = double(x)
    scaled, product, wide, largest, sums, negated, running = pipelined(half_arithmetic, x, eye)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(scaled, (exact * 1.5).astype(np.float16))
    np.testing.assert_array_equal(product, x)
    np.testing.assert_array_equal(wide, exact)
    np.testing.assert_array_equal(largest, np.maximum(exact, -1))
    np.testing.assert_array_equal(negated, -exact)
    np.testing.assert_array_equal(running, np.maximum.accumulate(exact, 1))
    small = np.where(np.abs(exact) < 1, exact, 0)
    np.testing.assert_allclose(sums, small.sum(1), rtol=2**-11, atol=2**-25)
    by_factor, by_operand, by_weight = pipelined(half_gradients, x, eye)
    np.testing.assert_array_equal(by_factor, small)
    np.testing.assert_array_equal(by_operand, small)
    want = np.repeat(small[:width].sum(0)[:, None], width, 1)
    np.testing.assert_allclose(by_weight, want, rtol=2**-10, atol=2**-25)


OFTEN = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33)  # around whole vectors


@pytest.mark.parametrize("width", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.slow) for n in range(1, 34)])
def test_every_float16_in_rows_of_every_width(width: int) -> None:
    check_halves(width)


@pytest.mark.parametrize("width", [7, 13])
@pytest.mark.parametrize("isa", _cpu.available_isas(), indirect=True)
def test_every_float16_on_every_instruction_set(isa: str, width: int) -> None:
    check_halves(width)


def test_rounding_to_float16_on_the_way_keeps_subnormal_numbers() -> None:
    x = np.ldexp(np.float32(1.37), -np.arange(40, dtype=np.int32)).reshape(4, 10)
    got = pipelined(lambda x: x.astype(jnp.float16).astype(jnp.float32) * 1024, x)
    np.testing.assert_array_equal(got, x.astype(np.float16).astype(np.float32) * 1024)
    asked = pipelined(lambda x: lax.reduce_precision(x, 5, 10) * 1024, x)  # flushes them, as XLA's does
    np.testing.assert_array_equal(asked, plain(lambda x: lax.reduce_precision(x, 5, 10) * 1024, x))


def test_a_small_loss_scale_in_float16() -> None:
    """The gradient of a mean over many elements: each is far below float16's normal numbers."""
    x = np.linspace(-1, 1, 13 * 17, dtype=np.float16).reshape(17, 13)
    got = pipelined(jax.grad(lambda x: (x * x).sum() / np.float16(60000)), x)
    want = (2 * double(x) * double(np.float16(1) / np.float16(60000))).astype(np.float16)
    np.testing.assert_allclose(double(got), double(want), rtol=0, atol=2**-24)
    assert np.count_nonzero(got) > 0.9 * got.size


# --- conversions ------------------------------------------------------------------------------------------------------------------


def conversion_values(dtype: str) -> np.ndarray:
    """All 16-bit patterns; else numbers of every size, ties of the narrower types, and their neighbours."""
    rng = np.random.default_rng(3)
    if dtype in ("bool", "float16", "bfloat16"):
        return np.arange(65536, dtype=np.uint16).view(np_dtype(dtype)) if dtype != "bool" else np.array([False, True])
    if not is_float(dtype):
        info = np.iinfo(dtype)
        near = [(1 << e) + (1 << max(e - bits, 0)) + k for e in range(64) for bits in (8, 11, 24, 53) for k in (-1, 0, 1)]
        values = [info.min, info.max, *(s * v for v in near for s in (1, -1))]
        return np.array(sorted({v for v in values if info.min <= v <= info.max}), dtype)
    dtype = np_dtype(dtype)
    mantissa, word = ml_dtypes.finfo(dtype).nmant, bits_of(dtype)
    patterns = rng.integers(0, np.iinfo(word).max, 3000, dtype=word, endpoint=True)
    ties = [patterns >> word.type(mantissa - kept) << word.type(mantissa - kept) for kept in (8, 11, min(mantissa, 24))]
    with np.errstate(over="ignore"):
        near = (np.exp(rng.uniform(-110, 90, 2000)) * rng.choice([-1, 1], 2000)).astype(dtype)
    return np.concatenate([edges(dtype), near, patterns.view(dtype), *(t.view(dtype) for t in ties)])


@pytest.mark.sampled(3, width=33)
@pytest.mark.parametrize("width", [1, 7, 33])
@pytest.mark.parametrize("source", DTYPES)
def test_conversions(source: str, width: int) -> None:
    def convert(x: Any) -> Any:
        x = jnp.where(x == x, x, x)  # so that a conversion to its own dtype is an operator too
        return {target: x.astype(target) for target in DTYPES}

    x = rows(conversion_values(source), width)
    got, want = pipelined(convert, x), plain(convert, x)
    if source == "bfloat16":  # a subnormal number as a bool: JAX 0.10's XLA says that it is not 0
        want["bool"] = np.where(np.abs(double(x)) < float(ml_dtypes.finfo(x.dtype).tiny), False, want["bool"])
    for target in DTYPES:
        np.testing.assert_array_equal(double(got[target]), double(want[target]), err_msg=target)
        if is_float(target):
            number = ~np.isnan(double(want[target]))
            np.testing.assert_array_equal(np.signbit(got[target])[number], np.signbit(want[target])[number], err_msg=target)


# --- every operator of floats -----------------------------------------------------------------------------------------------------


def edges(dtype: Any) -> np.ndarray:
    """Zeros, subnormal numbers, the least normal ones, neighbours of 1, halves, integers, the largest, infinities and NaN."""
    dtype = np.dtype(dtype)
    info, word = ml_dtypes.finfo(dtype), bits_of(dtype)
    least, one, most = (int(np.array(v, dtype).view(word)) for v in (info.tiny, 1, info.max))
    near = [1, 3, least // 2, least - 1, least, least + 1, 2 * least, one - 1, one + 1, most - 1, most]
    plain = [0, 0.25, 0.5, 1, 1.5, 2, 2.5, 3, 7, 10, 88, 104, 700, 1e-3, 1e-5, 1e-10, 1e-20, 1e-37, 1e6, 1e9, 1e19, 1e30, np.inf]
    with np.errstate(over="ignore", under="ignore"):
        values = np.unique(np.concatenate([np.array(near, word).view(dtype), np.array(plain).astype(dtype)]).view(word)).view(dtype)
    return np.concatenate([values, -values, np.array([np.nan], dtype)])


# Where XLA's own versions, or its code for different shapes, differ: one hands a subnormal operand on, the other flushes it.
MAY_HAND_ON = {"expm1", "asin", "atan", "atan2", "tanh", "sin", "tan", "erf", "erf_inv"}
# Which of two subnormal bfloat16 numbers is the larger: JAX 0.12's XLA hands one of them on, whatever its sign.
ANY_ZERO = {("max", "bfloat16"), ("min", "bfloat16"), ("clamp", "bfloat16")}
# Near a zero of the function what XLA gives is off by some units in the last place of 1.
ABSOLUTE = {"lgamma": 8, "digamma": 8}
# At the pole at 0 XLA's own programs disagree: lgamma of a subnormal number, and the sign of digamma's infinity.
POLES = {"lgamma", "digamma"}
SERIES = {kind for kind, spec in OPS.items() if spec.flops >= 200}  # test_ops compares these


def operators(arity: int, dtype: str) -> dict[str, Function]:
    """The CPU target's pointwise operators on ``dtype`` by name, as functions of ``arity`` operands."""
    left_out = {*SERIES, "copy", "round", "integer_pow", "reduce_precision", "select_n", "bitcast_convert_type"}
    narrow = dtype in ("bfloat16", "float16")
    if narrow:
        left_out.add("nextafter")  # stays with XLA
    table = [k for k, s in OPS.items() if s.family == "pointwise" and s.arity == arity and dtype in s.dtypes and s.cpu]
    named: dict[str, Function] = {
        k: getattr(lax, f"{k}_p").bind if k.endswith("_to") else getattr(lax, k) for k in table if k not in left_out
    }
    if arity == 1:
        named |= {f"round_{m.name}": lambda x, m=m: lax.round(x, m) for m in lax.RoundingMethod}
        named |= {f"integer_pow_{y}": lambda x, y=y: lax.integer_pow(x, y) for y in (-1, 2, 3, 7)}
        named["relu"] = jax.nn.relu
        if not narrow:
            named["bitcast"] = lambda x: lax.bitcast_convert_type(x, bits_of(x.dtype))
    return named


def agree(kind: str, dtype: str, got: np.ndarray, want: np.ndarray, args: tuple[np.ndarray, ...]) -> None:
    """The same NaN, infinities and signs of zeros, numbers within ``RTOL``; but for the differences that the tables above name."""
    assert got.dtype == want.dtype and got.shape == want.shape
    if not is_float(str(want.dtype)):
        np.testing.assert_array_equal(got, want, err_msg=f"{kind} of {dtype}")
        return
    info = ml_dtypes.finfo(want.dtype)
    tiny, x, y, first = float(info.tiny), double(got), double(want), double(args[0])
    subnormal = np.any([(double(a) != 0) & (np.abs(double(a)) < tiny) for a in args], axis=0)
    with np.errstate(all="ignore"):
        size, sign = np.maximum(np.abs(x), np.abs(y)), np.signbit(x) == np.signbit(y)
        near = RTOL[dtype] * size
        if dtype == "float16":  # a last place of a subnormal number
            near = np.maximum(near, 2.0**-24)
        if kind == "exp2" and dtype == "bfloat16":  # XLA computes e**(x ln 2) with x ln 2 rounded to bfloat16
            near = np.maximum(near, np.abs(first) * 2.0**-8 * size)
        if kind in ABSOLUTE:
            near, sign = near + ABSOLUTE[kind] * float(info.eps), sign | (size < 1e-6)
        same = np.isnan(x) & np.isnan(y) | sign & ((x == y) | np.isfinite(size) & (np.abs(x - y) <= near))
    zeros = size <= 2 * tiny
    if kind in MAY_HAND_ON:
        same |= zeros & sign
    if (kind, dtype) in ANY_ZERO:
        same |= zeros & subnormal
    if kind in POLES:
        same |= np.isinf(x) & (subnormal | (first == 0))
    if kind == "cbrt":  # XLA gives -5.6e-16 for every subnormal number
        same |= subnormal & (x == 0)
    where = tuple(np.argwhere(~same)[0]) if not same.all() else ()
    assert same.all(), (kind, dtype, [a[where] for a in args], "pipelined", got[where], "plain", want[where])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [3, 64])  # a tail only; whole vectors
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("arity", [1, 2, 3])
def test_operators_of_edge_values(arity: int, dtype: str, width: int) -> None:
    values = edges(np_dtype(dtype))[:: 1 if arity < 3 else 4]
    args = tuple(rows(a.ravel(), width) for a in np.meshgrid(*[values] * arity))
    named = operators(arity, dtype)
    assert len(named) > (0, 35, 14, 0)[arity]

    def f(*args: Any) -> Any:
        return {name: function(*args) for name, function in named.items()}

    got, want = pipelined(f, *args), plain(f, *args)
    for name in named:
        agree(name, dtype, got[name], want[name], args)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_values_that_were_wrong(dtype: str) -> None:
    """Operands and results by hand, where no table is needed to see what is right."""
    d = np_dtype(dtype)
    low = np.array(1, bits_of(d)).view(d)[()]
    x = np.array([[low, -low, -1, -2.5, 0.0]], d)
    log, power, larger, running = pipelined(
        lambda x: (lax.log(x), lax.pow(jnp.full_like(x, -2.5), x * 1), jnp.maximum(x, -1), lax.cummax(x, axis=1)), x
    )
    np.testing.assert_array_equal(double(log), [[-np.inf, -np.inf, np.nan, np.nan, -np.inf]])
    np.testing.assert_array_equal(double(power)[:, [2, 4]], double((np.float64(-2.5) ** x[:, [2, 4]].astype(float)).astype(d)))
    np.testing.assert_array_equal(double(larger), [[0, 0, -1, -1, 0]])
    np.testing.assert_array_equal(np.signbit(larger), [[False, True, True, True, False]])
    np.testing.assert_array_equal(double(running), np.zeros((1, 5)))


def test_a_selection_moves_bits() -> None:
    """Operators that compute nothing hand subnormal numbers on, also where XLA's compiler makes a maximum of the selection."""
    d = np.float32
    low = np.array([1, 2**23 - 1], np.uint32).view(d)
    x = np.concatenate([low, -low, [0.0, -0.0, 1.0, np.nan]]).astype(d)
    x, y = (a.copy() for a in np.meshgrid(x, x))
    flush = [np.where(np.abs(v) < np.finfo(d).tiny, 0, v) for v in (x, y)]
    larger, constant, turned = pipelined(
        lambda x, y: (jnp.where(x > y, x, y), jnp.where(x > y, low[0], -y), jnp.concatenate([-x, abs(y)], 1)[:, ::-1]), x, y
    )
    for got, want in (
        (larger, np.where(flush[0] > flush[1], x, y)),
        (constant, np.where(flush[0] > flush[1], low[0], -y)),
        (turned, np.concatenate([-x, np.abs(y)], 1)[:, ::-1]),
    ):
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


# --- reductions and cumulative operators ------------------------------------------------------------------------------------------


def folds(x: Any) -> Any:
    first = {"max": x.max(1), "min": x.min(1), "argmax": jnp.argmax(x, 1), "argmin": jnp.argmin(x, 1)}
    sinks = {"max of rows": jnp.max(-x, 0), "min of rows": jnp.min(-x, 0)}
    return first | sinks | {"cummax": lax.cummax(x, axis=1), "cummin": lax.cummin(x, axis=1, reverse=True)}


@pytest.mark.parametrize("width", [1, 5, 33])
@pytest.mark.parametrize("dtype", FLOATS)
def test_extrema_of_zeros_and_subnormal_numbers(dtype: str, width: int) -> None:
    """A subnormal number counts as the zero of its sign (but for float16), and +0 is larger than -0, whatever the order."""
    d = np_dtype(dtype)
    values = np.array([1, 5], bits_of(d)).view(d)
    values = np.concatenate([values, -values, np.array([0.0, -0.0, 0.0, -0.0], d)])
    x = np.random.default_rng(0).choice(values, (97, width))
    flushed = double(x) if dtype == "float16" else np.copysign(0.0, double(x))
    order = np.where(flushed == 0, np.where(np.signbit(flushed), -1e-30, 1e-30), flushed)  # -0 below +0

    def back(v: np.ndarray) -> np.ndarray:
        return np.where(np.abs(v) <= 1e-30, np.copysign(0.0, v), v)

    got = pipelined(folds, x)
    want = {
        **{"max": back(order.max(1)), "min": back(order.min(1))},
        **{"max of rows": back((-order).max(0)), "min of rows": back((-order).min(0))},
        "cummax": back(np.maximum.accumulate(order, 1)),
        "cummin": back(np.minimum.accumulate(order[:, ::-1], 1)[:, ::-1]),
        **{"argmax": np.argmax(flushed, 1), "argmin": np.argmin(flushed, 1)},
    }
    if width == 1:  # nothing is compared along a row
        want |= {"max": double(x)[:, 0], "min": double(x)[:, 0], "cummax": double(x), "cummin": double(x)}
    for name, exact in want.items():
        np.testing.assert_array_equal(double(got[name]), exact, err_msg=name)
        np.testing.assert_array_equal(np.signbit(double(got[name])), np.signbit(exact), err_msg=name)


@pytest.mark.parametrize("shape,axis", [((97, 1), 1), ((97, 3, 1), 2), ((97, 1, 3), 1)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_fold_of_one_element_is_that_element(dtype: str, shape: tuple[int, ...], axis: int) -> None:
    """Bit by bit: a subnormal number and the sign of zero stay, as where XLA runs it (which flushes a sum in bfloat16)."""
    d = np_dtype(dtype)
    values = np.array([1, 5], bits_of(d)).view(d)
    x = np.resize(np.concatenate([values, -values, np.array([0.0, -0.0, 1.5, np.inf, -np.inf], d)]), shape)

    def f(x: Any) -> Any:
        x = -x  # what streams
        folded = (jnp.sum(x, axis), jnp.prod(x, axis), jnp.max(x, axis), jnp.min(x, axis))
        return folded, (lax.cumsum(x, axis), lax.cummax(x, axis, reverse=True), lax.cummin(x, axis))

    for found in [pipelined(f, x)] + [plain(f, x)] * (dtype != "bfloat16"):
        for y in (*found[0], *found[1]):
            np.testing.assert_array_equal(y.reshape(-1).view(bits_of(d)), (-x).reshape(-1).view(bits_of(d)))

"""What each operator of the table computes, in NumPy, and how its code on every target is compared with that.

Goes out: ``MEANINGS``, by kind. Invariants: every rule equals JAX in every dtype of ``OpSpec.dtypes`` (``tests/table``). Floating
sums and products accumulate in float32 or wider (``scatter_sum`` and ``scatter_prod`` in float64) and round once, to the result's
dtype; integers wrap in their own dtype; ``take`` and operators that move elements are exact. The rules of ``OpSpec.numpy``, with
which the package computes, are not repeated here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy import special

from kitsune_jax.ops.pointwise import THREEFRY_WORDS, Words, element, exact, in_own_dtype, threefry_word, unsigned
from kitsune_jax.ops.reduce import filling, identity
from kitsune_jax.ops.spec import DTYPES, FORMATS, NUMBERS, Array, NumpyRule, Params, is_float, np_dtype, round_to, widen
from kitsune_jax.ops.table import OPS

# --- arithmetic that NumPy and XLA define differently: exact, or rounded once in the dtype given ----------------------------------


def remainder(x: Array, y: Array) -> Array:
    """Remainder with the sign of the dividend; of integers by zero the dividend."""
    if is_float(x.dtype):
        return np.asarray(np.fmod(x, y))
    overflows = (y == -1) if y.dtype.kind == "i" else np.zeros(np.shape(y), bool)  # the least number by -1
    return np.where(y == 0, x, np.fmod(x, np.where((y == 0) | overflows, np.ones_like(y), y)))


def multiply_high(x: Array, y: Array) -> Array:
    """The high half of the double-width product of integers."""
    bits = 8 * x.dtype.itemsize
    if bits < 64:
        wide = f"{x.dtype.kind}{2 * x.dtype.itemsize}"
        return np.asarray((x.astype(wide) * y.astype(wide)) >> bits).astype(x.dtype)
    high = np.frompyfunc(lambda a, b: (int(a) * int(b)) >> bits, 2, 1)
    return np.asarray(high(x.astype(object), y.astype(object))).astype(x.dtype)


def sign(x: Array) -> Array:
    """-1, 0 or 1; a NaN or a zero stays itself."""
    return np.where((x == 0) | (x != x), x, np.sign(x))


def round_away(x: Array) -> Array:
    """To the nearest integer, halves away from zero."""
    whole = np.trunc(x)
    return np.copysign(np.where(np.abs(x - whole) >= 0.5, whole + np.copysign(np.ones_like(x), x), whole), x)


def shift_right_arithmetic(x: Array, amount: Array) -> Array:
    """The sign comes in from the left; all sign if ``amount`` is not below the number of bits."""
    signed, last = x.view(f"i{x.dtype.itemsize}"), np.asarray(8 * x.dtype.itemsize - 1, unsigned(amount).dtype)
    return np.asarray(np.right_shift(signed, np.minimum(unsigned(amount), last).view(signed.dtype))).view(x.dtype)


def population_count(x: Array) -> Array:
    """Number of ones among the bits."""
    return np.bitwise_count(unsigned(x)).astype(x.dtype)


def count_leading_zeros(x: Array) -> Array:
    """Number of zeros above the highest one; the number of bits for 0."""
    bits = 8 * x.dtype.itemsize
    smeared = unsigned(x)
    step = 1
    while step < bits:
        smeared = smeared | (smeared >> np.asarray(step, smeared.dtype))
        step *= 2
    return (bits - np.bitwise_count(smeared)).astype(x.dtype)


def total_order(x: Array) -> Array:
    """Integers ordered as IEEE 754's totalOrder orders the floats: -NaN < -inf < ... < -0 < 0 < ... < inf < NaN."""
    if not is_float(x.dtype):
        return x
    bits = x.view(f"i{x.dtype.itemsize}")
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


def integer_pow(x: Array, y: int) -> Array:
    """x**y by repeated squaring, then the reciprocal for a negative ``y``, each product in the dtype of ``x``; integers wrap."""
    result = np.ones_like(x)
    square, n = x, abs(y)
    while n:
        if n & 1:
            result = result * square
        n >>= 1
        if n:
            square = square * square
    return np.asarray(np.ones_like(x) / result if y < 0 else result)


def reduce_precision(x: Array, exponent_bits: int, mantissa_bits: int) -> Array:
    """``x`` rounded to a float format, ties to even; a number that is too large becomes infinite.

    With fewer exponent bits than its own dtype has, numbers below the least normal number become zero. Otherwise they keep their
    exponent, and their significand is cut at the same place as that of the least normal number.
    """
    own_bits = FORMATS[str(x.dtype)][0]
    bias, own_bias = (2 ** (min(bits, own_bits) - 1) - 1 for bits in (exponent_bits, own_bits))
    y = x.astype(np.float64)
    exponent = np.maximum(np.frexp(y)[1], 2 - own_bias)
    rounded = np.ldexp(np.rint(np.ldexp(y, mantissa_bits + 1 - exponent)), exponent - mantissa_bits - 1)
    limit = math.ldexp(2.0 - 2.0**-mantissa_bits, bias)
    rounded = np.where(np.abs(rounded) > limit, np.copysign(np.inf, y), rounded)
    if exponent_bits < own_bits:
        rounded = np.where(np.abs(rounded) < math.ldexp(1.0, 1 - bias), np.copysign(0.0, y), rounded)
    return np.where(np.isfinite(y), rounded, y)


def bitcast(_params: Params, /, x: Array, *, out_dtype: str) -> Array:
    """The same bits as a number of another dtype of the same width."""
    return np.asarray(x).view(np_dtype(out_dtype))


# --- special functions of float64 arrays, with XLA's values at poles and outside the domain: NaN in, NaN out, and no warnings -----


def acosh(x: Array) -> Array:
    """NaN below 1."""
    return np.asarray(np.arccosh(np.where(x >= 1, x, np.nan)))


def lgamma(x: Array) -> Array:
    """log |Gamma|: infinite at the poles and at both infinities."""
    return np.where(np.isinf(x), np.inf, special.gammaln(x))


def digamma(x: Array) -> Array:
    """NaN at the negative integers and at -inf."""
    pole = (x < 0) & (np.floor(x) == x)
    return np.where(pole | (x == -np.inf), np.nan, special.digamma(x))


def erf_inv(x: Array) -> Array:
    """NaN outside [-1, 1]."""
    return np.where(np.abs(x) > 1, np.nan, special.erfinv(np.clip(x, -1, 1)))


def igamma(a: Array, x: Array) -> Array:
    """Regularised lower incomplete gamma function P(a, x); NaN for x < 0, a < 0 and at a = x = 0."""
    valid = (x >= 0) & (a >= 0) & ~((a == 0) & (x == 0))
    return np.where(valid, special.gammainc(np.abs(a), np.abs(x)), np.nan)


def igammac(a: Array, x: Array) -> Array:
    """Regularised upper incomplete gamma function Q(a, x) = 1 - P(a, x), with the domain of ``igamma``."""
    valid = (x >= 0) & (a >= 0) & ~((a == 0) & (x == 0))
    return np.where(valid, special.gammaincc(np.abs(a), np.abs(x)), np.nan)


def zeta(x: Array, q: Array) -> Array:
    """Hurwitz zeta function, sum over k of (q + k)**-x: infinite at x = 1, NaN below; for q < 0 term by term."""
    x, q = (np.asarray(v) for v in np.broadcast_arrays(x, q))
    shift = np.where((q < 0) & (np.floor(q) != q), np.ceil(-q), 0.0)
    direct = special.zeta(x, q + shift)
    for k in range(int(np.max(shift[np.isfinite(shift)], initial=0.0))):
        direct = direct + np.where(k < shift, np.power(q + k, -x), 0.0)
    pole = (q <= 0) & (np.floor(q) == q) & (x > 1)
    direct = np.where(pole, np.where(np.fmod(x, 2) == 0, np.inf, np.where(q == 0, np.inf, np.nan)), direct)
    return np.where(x == 1, np.inf, np.where(x > 1, direct, np.nan))


def polygamma(n: Array, x: Array) -> Array:
    """The n-th derivative of digamma, (-1)**(n + 1) n! zeta(n + 1, x); NaN unless n is an integer >= 0."""
    whole = (n >= 0) & (np.floor(n) == n)
    order = np.where(whole, n, 1.0)
    sign = np.where(np.fmod(order, 2) == 0, -1.0, 1.0)
    higher = sign * np.exp(special.gammaln(order + 1)) * zeta(order + 1, x)
    return np.where(whole, np.where(order == 0, digamma(x), higher), np.nan)


def regularized_incomplete_beta(a: Array, b: Array, x: Array) -> Array:
    """I_x(a, b); NaN unless a > 0, b > 0 and 0 <= x <= 1."""
    valid = (a > 0) & (b > 0) & (x >= 0) & (x <= 1)
    return np.where(valid, special.betainc(np.abs(a), np.abs(b), np.clip(x, 0, 1)), np.nan)


# --- hashes: Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), ---
# and Philox-4x32 on NumPy's numbers.

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry_hash(key0: Array, key1: Array, count0: Array, count1: Array) -> tuple[Array, Array]:
    """The two words of the counts hashed with the keys. All uint32, of one shape or of rank 0.

    >>> one = np.full(1, 0xFFFFFFFF, np.uint32)
    >>> [hex(word[0]) for word in threefry_hash(one, one, one, one)]
    ['0x1cb996fc', '0xbb002be7']
    """
    keys = (key0, key1, key0 ^ key1 ^ _PARITY)
    with np.errstate(over="ignore"):  # of scalars; arrays wrap silently
        x, y = count0 + key0, count1 + key1
        for i in range(5):
            for r in _ROTATIONS[i % 2]:
                x = x + y
                y = x ^ (y << np.uint32(r) | y >> np.uint32(32 - r))
            x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x, y


def _wide(x: Array, y: Array) -> Array:
    return np.asarray((x.astype(np.uint64) * np.uint64(y)) >> np.uint64(32), np.uint32)


_NUMPY: Words[Any] = Words(
    np.uint32,
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: _wide(np.asarray(x), y),
    lambda x, y: x ^ y,
    lambda x, y: x & y,
    lambda x, y: x >> y,
    lambda x, y: np.asarray(x < y).astype(np.uint32),
    lambda which, zero, other: np.where(which == 0, zero, other),
)


def philox_by_numpy(*words: Array) -> Array:
    """``element`` of arrays of uint32, of one shape or of rank 0.

    >>> keys = [np.full(5, k, np.uint32) for k in (0, 0, 0, 0)]
    >>> [hex(x) for x in philox_by_numpy(*keys, np.arange(5, dtype=np.uint32))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8', '0xf8e4cca4']
    """
    with np.errstate(over="ignore"):
        return np.asarray(element(_NUMPY, *words))


# --- rules of pointwise operators -------------------------------------------------------------------------------------------------


def to_double(x: Array) -> Array:
    """Floats as float64; everything else unchanged."""
    return x.astype(np.float64) if is_float(x.dtype) else x


def _double(function: Callable[..., Any]) -> NumpyRule:
    """Computed in float64: for functions that are not rounded correctly in float32."""
    return in_own_dtype(lambda *arrays: function(*map(to_double, arrays)))


def _with_params(function: Callable[..., Any], *names: str) -> NumpyRule:
    """The rule of a function that takes parameters of the op after the array, and widens the array itself."""

    def rule(params: Params, /, *arrays: Array, out_dtype: str) -> Array:
        with np.errstate(all="ignore"):
            return round_to(function(np.asarray(arrays[0]), *(params[n] for n in names)), out_dtype)

    return rule


def _round(x: Array, method: str) -> Array:
    x = widen(x)
    return np.asarray(np.rint(x)) if method == "even" else round_away(x)


def _power(x: Array, y: Array) -> Array:
    return np.asarray(np.power(to_double(x), y.astype(np.float64)))


def _with_word(function: Callable[..., Any]) -> NumpyRule:
    """The rule of a function that makes two words, of which the parameter ``word`` takes one, or their exclusive or."""
    return lambda params, *arrays, out_dtype: threefry_word(params["word"], *function(*arrays))


def _total(compare: Callable[..., Any]) -> NumpyRule:
    return in_own_dtype(lambda x, y: compare(total_order(x), total_order(y)))


# --- reductions, arg-reductions, cumulative operators, products -------------------------------------------------------------------

FOLDS: Mapping[str, np.ufunc] = MappingProxyType(
    {
        "sum": np.add,
        "max": np.maximum,
        "min": np.minimum,
        "prod": np.multiply,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
)


def _reduction(fold: str, wide: bool) -> NumpyRule:
    def rule(params: Params, /, x: Array, *, out_dtype: str) -> Array:
        x = to_double(np.asarray(x)) if wide else widen(np.asarray(x))
        with np.errstate(all="ignore"):
            folded = FOLDS[fold].reduce(x, axis=tuple(params["axes"]), dtype=x.dtype, initial=identity(fold, x.dtype))
            return round_to(folded, out_dtype)

    return rule


def _arg_reduction(function: Callable[..., Any]) -> NumpyRule:
    """The index of the first NaN if there is one, else of the first extreme element."""

    def rule(params: Params, /, x: Array, *, out_dtype: str) -> Array:
        return round_to(function(widen(np.asarray(x)), axis=params["axis"]), out_dtype)

    return rule


def _cumulative(ufunc: np.ufunc, wide: bool) -> NumpyRule:
    def rule(params: Params, /, x: Array, *, out_dtype: str) -> Array:
        x = to_double(np.asarray(x)) if wide else widen(np.asarray(x))
        axis, reverse = params["axis"], params["reverse"]
        with np.errstate(all="ignore"):
            forward = np.flip(x, axis) if reverse else x
            result = ufunc.accumulate(forward, axis=axis, dtype=x.dtype)
        return round_to(np.flip(result, axis) if reverse else result, out_dtype)

    return rule


def _dot_general(params: Params, /, lhs: Array, rhs: Array, *, out_dtype: str) -> Array:
    """Result dimensions: batch, free of the left, free of the right. Multiplied and added in ``accumulate``."""
    dtype = np_dtype(params["accumulate"])
    x, batch, free_x, depth = _matrix(np.asarray(lhs).astype(dtype), params["lhs_batch"], params["lhs_contract"])
    y, _, free_y, _ = _matrix(np.asarray(rhs).astype(dtype), params["rhs_batch"], params["rhs_contract"])
    with np.errstate(all="ignore"):
        out = np.matmul(x, y.swapaxes(1, 2)) if depth else np.zeros((x.shape[0], x.shape[1], y.shape[1]), dtype)
    return round_to(out.reshape((*batch, *free_x, *free_y)), out_dtype)


def _matrix(x: Array, batch: tuple[int, ...], contract: tuple[int, ...]) -> tuple[Array, tuple[int, ...], tuple[int, ...], int]:
    """``x`` as (batch, free, contracted), the sizes of the batch and of the free dimensions, and the contracted extent."""
    free = tuple(d for d in range(x.ndim) if d not in batch and d not in contract)
    sizes = [tuple(x.shape[d] for d in dims) for dims in (batch, free, contract)]
    b, f, c = (int(np.prod(s, dtype=np.int64)) for s in sizes)
    return x.transpose((*batch, *free, *contract)).reshape(b, f, c), sizes[0], sizes[1], c


# --- reads and sums by an index; windows ------------------------------------------------------------------------------------------


def _positions(index: Array, n: int) -> tuple[Array, Array]:
    """(the index as int64, clipped to [0, n), and a mask of the indices inside)."""
    inside = (index >= 0) & (index < n)
    top = np.asarray(max(n - 1, 0), np.uint64).astype(np.int64)
    return np.where(inside, index, np.where(index < 0, 0, top)).astype(np.int64), inside


def _take(params: Params, /, x: Array, index: Array, *, out_dtype: str) -> Array:
    x, axis = np.asarray(x), params["axis"]
    at, inside = _positions(np.asarray(index), x.shape[axis])
    filled = params["mode"] == "fill"
    fill = np.asarray(filling(params["fill"], str(x.dtype)) if filled else 0).astype(x.dtype)
    shape = (*x.shape[:axis], *at.shape, *x.shape[axis + 1 :])
    if x.shape[axis] == 0:
        return np.full(shape, fill)
    found = np.take(x, at, axis)
    after = (1,) * (x.ndim - 1 - axis)
    return np.where(inside.reshape((*inside.shape, *after)), found, fill) if filled else found


def _scatter(fold: str) -> NumpyRule:
    def rule(params: Params, /, updates: Array, index: Array, *, out_dtype: str) -> Array:
        axis, n, rank = params["axis"], params["n"], np.ndim(index)
        x = to_double(np.asarray(updates))
        rows = np.moveaxis(x, range(axis, axis + rank), range(rank))
        at, inside = _positions(np.asarray(index), n)
        out = np.full((n, *rows.shape[rank:]), identity(fold, x.dtype), x.dtype)
        with np.errstate(all="ignore"):
            FOLDS[fold].at(out, at[inside], rows[inside])
            return round_to(np.moveaxis(out, 0, axis), out_dtype)

    return rule


_ROWS = {"axis": 0, "mode": "clip", "fill": None}


def _online_sum(params: Params, /, values: Array, index: Array, scores: Array, *, out_dtype: str) -> Array:
    v, s = to_double(np.asarray(values)), to_double(np.asarray(scores))
    with np.errstate(all="ignore"):
        largest = _scatter("max")(params, s, index, out_dtype=str(s.dtype))
        used = np.where(np.isfinite(largest), largest, 0) if params["finite"] else largest
        of_rows = _take(_ROWS, used, index, out_dtype=str(s.dtype))
        factor = np.exp(s - of_rows).reshape((*s.shape, *(1,) * (v.ndim - s.ndim)))
        return round_to(_scatter("sum")(params, v * factor, index, out_dtype=str(v.dtype)), out_dtype)


def _window(dims: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...], starts: tuple[Array, ...]) -> tuple[slice, ...]:
    at = [slice(None)] * len(shape)
    for d, size, start in zip(dims, sizes, starts, strict=True):
        first = min(max(int(start), 0), shape[d] - size)
        at[d] = slice(first, first + size)
    return tuple(at)


def _slice_window(params: Params, /, x: Array, *starts: Array, out_dtype: str) -> Array:
    x = np.asarray(x)
    return x[_window(params["dims"], params["sizes"], x.shape, starts)].copy()


def _update(params: Params, /, x: Array, update: Array, *starts: Array, out_dtype: str) -> Array:
    out, dims = np.array(x), params["dims"]
    out[_window(dims, tuple(np.shape(update)[d] for d in dims), out.shape, starts)] = update
    return out


# --- the meaning of every operator ------------------------------------------------------------------------------------------------

_RULES: dict[str, NumpyRule] = {
    "sign": exact(sign),
    "abs": exact(np.abs),
    "floor": exact(np.floor),
    "ceil": exact(np.ceil),
    "round": _with_params(_round, "method"),
    "is_finite": exact(np.isfinite),
    "not": exact(np.invert),
    "population_count": exact(population_count),
    "clz": exact(count_leading_zeros),
    "square": exact(lambda x: x * x),
    "exp": _double(np.exp),
    "exp2": _double(np.exp2),
    "expm1": _double(np.expm1),
    "log": _double(np.log),
    "log1p": _double(np.log1p),
    "sqrt": exact(np.sqrt),
    "rsqrt": _double(lambda x: 1 / np.sqrt(x)),
    "cbrt": _double(np.cbrt),
    "logistic": _double(special.expit),
    "tanh": _double(np.tanh),
    "sin": _double(np.sin),
    "cos": _double(np.cos),
    "tan": _double(np.tan),
    "asin": _double(np.arcsin),
    "acos": _double(np.arccos),
    "atan": _double(np.arctan),
    "sinh": _double(np.sinh),
    "cosh": _double(np.cosh),
    "asinh": _double(np.arcsinh),
    "acosh": _double(acosh),
    "atanh": _double(np.arctanh),
    "erf": _double(special.erf),
    "erfc": _double(special.erfc),
    "erf_inv": _double(erf_inv),
    "lgamma": _double(lgamma),
    "digamma": _double(digamma),
    "bessel_i0e": _double(special.i0e),
    "bessel_i1e": _double(special.i1e),
    "integer_pow": _with_params(lambda x, y: integer_pow(widen(x), y), "y"),
    "reduce_precision": _with_params(reduce_precision, "exponent_bits", "mantissa_bits"),
    "bitcast_convert_type": bitcast,
    "copy": in_own_dtype(lambda x: x),
    "rem": exact(remainder),
    "pow": in_own_dtype(_power),
    "atan2": _double(np.arctan2),
    "nextafter": in_own_dtype(np.nextafter),
    "shift_right_arithmetic": exact(shift_right_arithmetic),
    "mulhi": exact(multiply_high),
    "eq_to": _total(np.equal),
    "lt_to": _total(np.less),
    "le_to": _total(np.less_equal),
    "igamma": _double(igamma),
    "igammac": _double(igammac),
    "zeta": _double(zeta),
    "polygamma": _double(polygamma),
    "clamp": exact(lambda low, x, high: np.minimum(np.maximum(low, x), high)),
    "regularized_incomplete_beta": _double(regularized_incomplete_beta),
    "threefry2x32": _with_word(threefry_hash),
    "philox4x32": in_own_dtype(philox_by_numpy),
    **{f"reduce_{fold}": _reduction(fold, fold in ("sum", "prod")) for fold in FOLDS},
    "argmax": _arg_reduction(np.argmax),
    "argmin": _arg_reduction(np.argmin),
    "cumsum": _cumulative(np.add, True),
    "cumprod": _cumulative(np.multiply, True),
    "cummax": _cumulative(np.maximum, False),
    "cummin": _cumulative(np.minimum, False),
    "cumlogsumexp": _cumulative(np.logaddexp, True),
    "dot_general": _dot_general,
    "take": _take,
    **{f"scatter_{fold}": _scatter(fold) for fold in ("sum", "max", "min", "prod")},
    "scatter_exp_sum": _online_sum,
    "dynamic_slice": _slice_window,
    "dynamic_update_slice": _update,
}

_POSITIVE, _UNIT, _ABOVE_POLE = (0.0, np.inf), (-0.99, 0.99), (0.1, np.inf)


@dataclasses.dataclass(frozen=True)
class Meaning:
    """``numpy``: the rule. The rest says how to test it and all code against it.

    ``samples``: parameters worth testing, for a dtype of the operands. ``domain``: for each operand (the last also for the rest)
    the interval worth testing, open at an infinite end, or a ``range``; () means all numbers. ``ulps``: the allowed error, in units
    in the last place, of operators that are not ``OpSpec.exact``: of ``"xla"`` against the rule (default 5), of ``"cuda"`` in the
    emulator (3). ``absolute`` and ``relative``: errors that XLA may have besides, in float32, near zeros of the function and far in
    its tails.
    """

    numpy: NumpyRule
    samples: Callable[[str], Sequence[Params]] = lambda dtype: ({},)
    domain: tuple[tuple[float, float] | range, ...] = ()
    ulps: Mapping[str, float] = dataclasses.field(default_factory=dict)
    absolute: float = 0.0
    relative: float = 0.0


def _same_width(dtype: str) -> list[Params]:
    return [{"new_dtype": to} for to in NUMBERS if to != dtype and np_dtype(to).itemsize == np_dtype(dtype).itemsize]


_FACTS: dict[str, dict[str, Any]] = {
    "round": {"samples": lambda dtype: [{"method": "even"}, {"method": "away"}]},
    "bitcast_convert_type": {"samples": _same_width},
    "convert_element_type": {"samples": lambda dtype: [{"new_dtype": to} for to in DTYPES]},
    "threefry2x32": {"samples": lambda dtype: [{"word": word} for word in THREEFRY_WORDS]},
    "reduce_precision": {
        "samples": lambda dtype: [{"exponent_bits": e, "mantissa_bits": m} for e, m in ((5, 4), (8, 7), (8, 3), (3, 2), (11, 30))]
    },
    "integer_pow": {
        "samples": lambda dtype: [{"y": y} for y in ((-2, 0, 1, 2, 3, 7) if is_float(dtype) else (0, 1, 2, 3, 7))],
        "ulps": {"xla": 8, "cuda": 8},
    },
    **{kind: {"domain": (_POSITIVE,)} for kind in ("log", "log1p", "sqrt", "rsqrt", "pow")},
    **{kind: {"domain": (_UNIT,)} for kind in ("asin", "acos")},
    **{kind: {"ulps": {"xla": 40, "cuda": 4}} for kind in ("sinh", "cosh")},
    **{kind: {"ulps": {"xla": 16}} for kind in ("bessel_i0e", "bessel_i1e")},
    **{kind: {"domain": (_ABOVE_POLE,), "absolute": 3e-6} for kind in ("igamma", "igammac")},
    "exp2": {"ulps": {"xla": 40}},
    "tanh": {"ulps": {"xla": 10}},
    "logistic": {"ulps": {"cuda": 4}, "absolute": 2e-6},
    "acosh": {"domain": (_POSITIVE,), "ulps": {"cuda": 4}},
    "atanh": {"domain": (_UNIT,), "ulps": {"xla": 256, "cuda": 4}, "absolute": 1e-7},
    "erfc": {"domain": ((-3, 3),), "ulps": {"cuda": 6}, "absolute": 3e-6},
    "erf_inv": {"domain": (_UNIT,), "ulps": {"xla": 60, "cuda": 8}},
    "lgamma": {"domain": (_ABOVE_POLE,), "ulps": {"cuda": 8}, "absolute": 3e-5, "relative": 1e-5},
    "digamma": {"domain": (_ABOVE_POLE,), "absolute": 3e-6, "relative": 1e-5},
    "zeta": {"domain": ((0.2, 6),), "relative": 1e-4},
    "polygamma": {"domain": (range(4), _ABOVE_POLE), "relative": 1e-4},
    "regularized_incomplete_beta": {"domain": (_POSITIVE, _POSITIVE, (0, 0.99)), "absolute": 1e-5, "relative": 2e-3},
}

MEANINGS: Mapping[str, Meaning] = MappingProxyType(
    {kind: Meaning(spec.numpy or _RULES[kind], **_FACTS.get(kind, {})) for kind, spec in OPS.items() if spec.family != "loop"}
)

"""The pointwise entries of the op table (``POINTWISE``), with their NumPy semantics: arithmetic, special functions, and two hashes.

Invariant: an operand of a pointwise op is of full shape or of rank 0. 16-bit floats are widened before they reach these functions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.random import threefry2x32_p
from scipy import special

from kitsune_jax.ops.graph import Op, Value
from kitsune_jax.ops.spec import (
    BITS,
    DTYPES,
    FLOATS,
    FORMATS,
    INFINITY,
    INTEGERS,
    NUMBERS,
    POSITIVE,
    UNIT,
    Array,
    CudaCode,
    DimRelation,
    JaxRule,
    NumpyRule,
    OpSpec,
    Params,
    Shapes,
    arrays_of,
    is_float,
    np_dtype,
    round_to,
    to_double,
    widen,
)

# --- arithmetic that NumPy and XLA define differently: exact, or rounded once in the dtype given ----------------------------------


def unsigned(x: Array) -> Array:
    """The same bits as unsigned integers."""
    return x.view(f"u{x.dtype.itemsize}")


def divide(x: Array, y: Array) -> Array:
    """Quotient; of integers towards zero, by zero all ones, of the least number by -1 itself."""
    if is_float(x.dtype):
        return np.asarray(x / y)
    quotient, _ = _divmod(x, y)
    return quotient


def remainder(x: Array, y: Array) -> Array:
    """Remainder with the sign of the dividend; of integers by zero the dividend."""
    if is_float(x.dtype):
        return np.asarray(np.fmod(x, y))
    _, rest = _divmod(x, y)
    return rest


def _divmod(x: Array, y: Array) -> tuple[Array, Array]:
    x, y = (np.asarray(a) for a in np.broadcast_arrays(x, y))
    zero = y == 0
    minus_one = (y == -1) if x.dtype.kind == "i" else np.zeros_like(zero)
    safe = np.where(zero | minus_one, np.ones_like(y), y)
    rest = np.asarray(np.fmod(x, safe))
    quotient = np.asarray((x - rest) // safe)
    quotient = np.where(minus_one, np.negative(x) if x.dtype.kind == "i" else x, quotient)
    all_ones = np.bitwise_not(np.zeros_like(x))
    return np.where(zero, all_ones, quotient), np.where(zero, x, np.where(minus_one, np.zeros_like(x), rest))


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


def shift_left(x: Array, amount: Array) -> Array:
    """0 if ``amount`` (taken as unsigned) is not below the number of bits."""
    x, safe, within = _shift_operands(x, amount)
    return np.where(within, np.left_shift(x, safe), np.zeros_like(x))


def shift_right_logical(x: Array, amount: Array) -> Array:
    """Zeros come in from the left; 0 if ``amount`` is not below the number of bits."""
    x, safe, within = _shift_operands(x, amount)
    shifted = np.asarray(np.right_shift(unsigned(x), unsigned(safe))).view(x.dtype)
    return np.where(within, shifted, np.zeros_like(x))


def shift_right_arithmetic(x: Array, amount: Array) -> Array:
    """The sign comes in from the left; all sign if ``amount`` is not below the number of bits."""
    x, safe, within = _shift_operands(x, amount)
    bits = 8 * x.dtype.itemsize
    signed = x.view(f"i{x.dtype.itemsize}")
    last = np.full_like(signed, bits - 1)
    return np.asarray(np.right_shift(signed, np.where(within, safe.view(signed.dtype), last))).view(x.dtype)


def _shift_operands(x: Array, amount: Array) -> tuple[Array, Array, Array]:
    x, amount = (np.ascontiguousarray(a) for a in np.broadcast_arrays(x, amount))
    within = unsigned(amount) < 8 * x.dtype.itemsize
    return x, np.where(within, amount, np.zeros_like(amount)), within


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


def convert(_params: Params, /, x: Array, *, out_dtype: str) -> Array:
    """Conversion as XLA defines it: floats to integers truncate and saturate, NaN becomes 0; to bool, all numbers but 0 are
    true."""
    target = np_dtype(out_dtype)
    if out_dtype == "bool":
        return np.asarray(x != 0)
    if is_float(out_dtype):
        return round_to(_integer_to_float(x, out_dtype), out_dtype)
    if not is_float(x.dtype):
        return x.astype(target)
    return _saturate(widen(x).astype(np.float64), target)


def _integer_to_float(x: Array, out_dtype: str) -> Array:
    """Integers become 16-bit floats through float32."""
    return x.astype(np.float32) if x.dtype.kind in "iub" and out_dtype in ("float16", "bfloat16") else x


def _saturate(x: Array, target: np.dtype[Any]) -> Array:
    info = np.iinfo(target)
    whole = np.trunc(x)
    low, high = whole <= float(info.min), whole >= float(info.max)
    with np.errstate(all="ignore"):
        inside = np.where(low | high | np.isnan(x), 0.0, whole).astype(target)
    result = np.where(low, np.asarray(info.min, target), inside)
    return np.where(high, np.asarray(info.max, target), result)


# --- special functions of float64 arrays, with XLA's values at poles and outside the domain: NaN in, NaN out, and no warnings -----

LOG2_E = 1.4426950408889634


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


# --- Threefry-2x32 with 20 rounds: the default hash of ``jax.random`` -------------------------------------------------------------
# Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

THREEFRY_WORDS = ("first", "second", "xor")
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


def threefry_word(word: str, first: Any, second: Any) -> Any:
    """The word of a hash that the op's parameter ``word`` names: one of ``THREEFRY_WORDS``."""
    return first ^ second if word == "xor" else (first, second)[THREEFRY_WORDS.index(word)]


# --- Philox-4x32 with 10 rounds, as XLA makes the bits of ``rbg`` keys, on CPUs and GPUs alike ------------------------------------
# Element i of an array of bits is word i % 4 of the hash of a 128-bit counter, which starts at a number from the key and grows by 1
# for every four elements. The hash is from the same paper; the counting is XLA's (``RngBitGenerator``), and the tests compare it.

T = TypeVar("T")

_ROUNDS = 10
_FACTORS = 0xD2511F53, 0xCD9E8D57
_RAISED = 0x9E3779B9, 0xBB67AE85  # added to the two words of the key after each round


@dataclasses.dataclass(frozen=True)
class Words(Generic[T]):
    """Arithmetic of 32-bit words. ``less`` returns 1 or 0, ``choose(which, zero, other)`` takes ``zero`` where ``which`` is 0."""

    number: Callable[[int], T]
    add: Callable[[T, T], T]
    multiply: Callable[[T, T], T]
    multiply_high: Callable[[T, T], T]
    xor: Callable[[T, T], T]
    both: Callable[[T, T], T]
    shifted_right: Callable[[T, T], T]
    less: Callable[[T, T], T]
    choose: Callable[[T, T, T], T]


def element(w: Words[T], key0: T, key1: T, count0: T, count1: T, place: T) -> T:
    """Element number ``place`` of the bits of the key in the four words before it."""
    one, two = w.number(1), w.number(2)
    n = w.shifted_right(place, two)
    # The counter's lower half is the key's second, its upper half the key's first; a carry goes through all of it.
    x0 = w.add(count0, n)
    carry = w.less(x0, n)
    x1 = w.add(count1, carry)
    carry = w.both(carry, w.less(x1, one))
    x2 = w.add(key0, carry)
    x3 = w.add(key1, w.both(carry, w.less(x2, one)))
    for i in range(_ROUNDS):
        raised = [w.number(i * by % 2**32) for by in _RAISED]
        high0, low0 = (f(x0, w.number(_FACTORS[0])) for f in (w.multiply_high, w.multiply))
        high1, low1 = (f(x2, w.number(_FACTORS[1])) for f in (w.multiply_high, w.multiply))
        x0, x1 = w.xor(w.xor(high1, x1), w.add(key0, raised[0])), low1
        x2, x3 = w.xor(w.xor(high0, x3), w.add(key1, raised[1])), low0
    odd, upper = w.both(place, one), w.both(place, two)
    return w.choose(upper, w.choose(odd, x0, x1), w.choose(odd, x2, x3))


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
_JAX: Words[Any] = Words(
    jnp.uint32,
    jnp.add,
    jnp.multiply,
    lambda x, y: lax.mulhi(*jnp.broadcast_arrays(x, y)),
    jnp.bitwise_xor,
    jnp.bitwise_and,
    jnp.right_shift,
    lambda x, y: (x < y).astype(jnp.uint32),
    lambda which, zero, other: jnp.where(which == 0, zero, other),
)


def philox_by_numpy(*words: Array) -> Array:
    """``element`` of arrays of uint32, of one shape or of rank 0.

    >>> keys = [np.full(5, k, np.uint32) for k in (0, 0, 0, 0)]
    >>> [hex(x) for x in philox_by_numpy(*keys, np.arange(5, dtype=np.uint32))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8', '0xf8e4cca4']
    """
    with np.errstate(over="ignore"):
        return np.asarray(element(_NUMPY, *words))


def philox_by_jax(*words: Any) -> Any:
    """``element`` of arrays or tracers of JAX."""
    return element(_JAX, *words)


# --- the entries ------------------------------------------------------------------------------------------------------------------

SIGNED = ("int8", "int16", "int32", "int64")
SIGNED_NUMBERS = (*SIGNED, *FLOATS)

Function = Callable[..., Any]


def relate_pointwise(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    """Dimension d of the result and of every operand that has dimensions: parallel."""
    operands = [k for k, shape in enumerate((*in_shapes, *out_shapes)) if shape]
    return tuple(DimRelation("parallel", tuple((k, d) for k in operands)) for d in range(len(out_shapes[0])))


def _in_own_dtype(function: Function) -> NumpyRule:
    def rule(params: Params, /, *arrays: Array, out_dtype: str) -> Array:
        with np.errstate(all="ignore"):
            return round_to(function(*arrays_of(arrays)), out_dtype)

    return rule


def _exact(function: Function) -> NumpyRule:
    """Computed in the operands' dtype, 16-bit floats in float32."""
    return _in_own_dtype(lambda *arrays: function(*map(widen, arrays)))


def _double(function: Function) -> NumpyRule:
    """Computed in float64: for functions that are not rounded correctly in float32."""
    return _in_own_dtype(lambda *arrays: function(*map(to_double, arrays)))


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


def _threefry_by_jax(params: Params, /, *arrays: Any, out: Value) -> Any:
    arrays = jnp.broadcast_arrays(*arrays)  # JAX's primitive takes operands of one rank
    return threefry_word(params["word"], *threefry2x32_p.bind(*arrays))


def _total(compare: Function) -> NumpyRule:
    return _in_own_dtype(lambda x, y: compare(total_order(x), total_order(y)))


def _select(which: Array, on_false: Array, on_true: Array) -> Array:
    return np.where(which >= 1, on_true, on_false)


def _entry(
    arity: int,
    kind: str,
    numpy: NumpyRule,
    flops: float,
    doc: str,
    dtypes: tuple[str, ...] = FLOATS,
    cuda: Any = None,
    **facts: Any,
) -> OpSpec:
    """``cuda``: one expression for all types, or a mapping by class. Ops of at most 4 flops are exact, and the micro-operation has
    the op's name, unless ``facts`` say otherwise.
    """
    code: dict[str, CudaCode] = cuda if isinstance(cuda, dict) else {} if cuda is None else {"any": cuda}
    cpu = facts.setdefault("cpu", kind)
    facts.setdefault("opcodes", (cpu,) if cpu else ())
    facts.setdefault("exact", flops <= 4)
    return OpSpec(kind, "pointwise", arity, numpy, relate_pointwise, flops, doc, dtypes, cuda=code, **facts)


_unary, _binary, _ternary, _quaternary, _quinary = (functools.partial(_entry, arity) for arity in range(1, 6))
_compare = functools.partial(_binary, gives="bool")
_compare_in_order = functools.partial(_compare, measured=False)


def _shift(function: str, of: str = "u32") -> str:
    """A function of the device library on the bits of an integer."""
    return f"static_cast<{{T}}>({function}(static_cast<{of}>({{0}}), static_cast<u32>({{1}})))"


def _integer_power(limits: Callable[[int], bool]) -> Callable[[Params], str | None]:
    return lambda params: f"integer_power<{params['y']}>({{0}})" if limits(params["y"]) else None


def _never(params: Params, dtype: str) -> bool:
    return False


def _keeps_exponent(params: Params, dtype: str) -> bool:
    """Subnormal float16 numbers are normal in float32, so rounding to a format with as many exponent bits differs between the
    two."""
    return dtype != "float16" or params["exponent_bits"] < 5


def _same_width(dtype: str) -> list[Params]:
    return [{"new_dtype": to} for to in NUMBERS if to != dtype and np_dtype(to).itemsize == np_dtype(dtype).itemsize]


def _lax(function: Function, **options: Callable[[Params, Value], Any]) -> JaxRule:
    """Evaluation by a function of ``jax.lax`` of another name, or with options: ``option=lambda params, out: value``."""

    def rule(params: Params, /, *arrays: Any, out: Value) -> Any:
        return function(*arrays, **{name: of(params, out) for name, of in options.items()})

    return rule


def _copy_by_jax(params: Params, /, x: Any, *, out: Value) -> Any:
    """With parameters, ``x`` at the precision they name: XLA may not compute it in more (``reduce_precision``)."""
    return lax.reduce_precision(x, **params) if params else x


_METHODS = {"even": lax.RoundingMethod.TO_NEAREST_EVEN, "away": lax.RoundingMethod.AWAY_FROM_ZERO}
_ABOVE_POLE = (0.1, INFINITY)
_SERIES: dict[str, Any] = {"measured": False, "domain": (_ABOVE_POLE,)}

_UNARY = (
    _unary("neg", _exact(np.negative), 1, "-x", NUMBERS, {"any": "(-{0})", "i32": "minus(0, {0})", "u32": "(0u - {0})"},
           folded=True),
    _unary("sign", _exact(sign), 2, "-1, 0 or 1; NaN and zeros stay", NUMBERS, "sign({0})"),
    _unary("abs", _exact(np.abs), 1, "|x|", SIGNED_NUMBERS, "magnitude({0})"),
    _unary("floor", _exact(np.floor), 1, "largest integer <= x", cuda="floorf({0})"),
    _unary("ceil", _exact(np.ceil), 1, "least integer >= x", cuda="ceilf({0})"),
    _unary("round", _with_params(_round, "method"), 2, "nearest integer; method: away or even", cuda="round_{method}({0})",
           cpu="round_{method}", opcodes=("round_away", "round_even"),
           samples=lambda dtype: [{"method": "even"}, {"method": "away"}],
           jax=_lax(lax.round, rounding_method=lambda params, _: _METHODS[params["method"]])),
    _unary("is_finite", _exact(np.isfinite), 1, "neither infinite nor NaN", cuda="finite({0})", gives="bool"),
    _unary("not", _exact(np.invert), 1, "complement; of bool negation", BITS, {"any": "(~{0})", "bool": "(!{0})"},
           jax=_lax(lax.bitwise_not)),
    _unary("population_count", _exact(population_count), 4, "number of ones", INTEGERS,
           "static_cast<{T}>(popc(static_cast<u32>({0})))", cpu="popcnt"),
    _unary("clz", _exact(count_leading_zeros), 4, "leading zeros", INTEGERS,
           "static_cast<{T}>(clz(static_cast<u32>({0})))"),
    _unary("square", _exact(lambda x: x * x), 1, "x * x", NUMBERS, {"any": "({0} * {0})", "i32": "times({0}, {0})"}),
    _unary("exp", _double(np.exp), 10, "e**x", cuda={"any": "expf({0})", "coarse": "exp_coarse({0})"}, fast=2, special=True),
    _unary("exp2", _double(np.exp2), 9, "2**x", cuda="exp2f({0})", fast=1, special=True, like=("exp", 1.0), ulps={"xla": 40}),
    _unary("expm1", _double(np.expm1), 14, "e**x - 1", cuda="expm1f({0})", special=True, like=("exp", 1.5)),
    _unary("log", _double(np.log), 12, "natural logarithm", cuda="logf({0})", fast=2, special=True, domain=(POSITIVE,)),
    _unary("log1p", _double(np.log1p), 15, "log(1 + x)", cuda="log1pf({0})", special=True, like=("log", 1.5), domain=(POSITIVE,)),
    _unary("sqrt", _exact(np.sqrt), 4, "square root", cuda="sqrtf({0})", fast=2, special=True, like=("rsqrt", 0.6),
           domain=(POSITIVE,)),
    _unary("rsqrt", _double(lambda x: 1 / np.sqrt(x)), 5, "1 / sqrt(x)", cuda="rsqrtf({0})", fast=1, special=True,
           domain=(POSITIVE,)),
    _unary("cbrt", _double(np.cbrt), 15, "cube root", cuda="cbrtf({0})", like=("pow", 1.0)),
    _unary("logistic", _double(special.expit), 14, "1 / (1 + e**-x)",
           cuda={"any": "logistic({0})", "coarse": "logistic_coarse({0})"}, fast=2, special=True, ulps={"cuda": 4}, absolute=2e-6),
    _unary("tanh", _double(np.tanh), 14, "hyperbolic tangent", cuda="tanhf({0})", fast=1, special=True, ulps={"xla": 10}),
    _unary("sin", _double(np.sin), 15, "sine", cuda="sinf({0})", special=True),
    _unary("cos", _double(np.cos), 15, "cosine", cuda="cosf({0})", special=True, like=("sin", 1.0)),
    _unary("tan", _double(np.tan), 22, "tangent", cuda="tanf({0})", special=True, like=("sin", 2.0)),
    _unary("asin", _double(np.arcsin), 15, "inverse sine", cuda="asinf({0})", domain=(UNIT,)),
    _unary("acos", _double(np.arccos), 15, "inverse cosine", cuda="acosf({0})", domain=(UNIT,)),
    _unary("atan", _double(np.arctan), 15, "inverse tangent", cuda="atanf({0})"),
    _unary("sinh", _double(np.sinh), 16, "hyperbolic sine", cuda="sinhf({0})", special=True, like=("exp", 2.0),
           ulps={"xla": 40, "cuda": 4}),
    _unary("cosh", _double(np.cosh), 16, "hyperbolic cosine", cuda="coshf({0})", special=True, like=("exp", 2.0),
           ulps={"xla": 40, "cuda": 4}),
    _unary("asinh", _double(np.arcsinh), 22, "inverse hyperbolic sine", cuda="asinhf({0})", like=("log", 2.0)),
    _unary("acosh", _double(acosh), 20, "inverse hyperbolic cosine", cuda="acoshf({0})", like=("log", 2.0),
           domain=(POSITIVE,), ulps={"cuda": 4}),
    _unary("atanh", _double(np.arctanh), 20, "inverse hyperbolic tangent", cuda="atanhf({0})", like=("log", 2.0), domain=(UNIT,),
           ulps={"xla": 256, "cuda": 4}, absolute=1e-7),
    _unary("erf", _double(special.erf), 16, "error function", cuda="erff({0})", special=True),
    _unary("erfc", _double(special.erfc), 24, "1 - erf(x)", cuda="erfcf({0})", special=True, like=("erf", 2.0), domain=((-3, 3),),
           ulps={"cuda": 6}, absolute=3e-6),
    _unary("erf_inv", _double(erf_inv), 30, "inverse error function", cuda="erfinvf({0})", like=("tanh", 2.0),
           domain=(UNIT,), ulps={"xla": 60, "cuda": 8}),
    _unary("lgamma", _double(lgamma), 40, "log |Gamma(x)|", cuda="lgammaf({0})", **_SERIES, ulps={"cuda": 8},
           absolute=3e-5, relative=1e-5),
    _unary("digamma", _double(digamma), 60, "derivative of lgamma", **_SERIES, absolute=3e-6, relative=1e-5),
    _unary("bessel_i0e", _double(special.i0e), 30, "e**-|x| I0(x)", measured=False, ulps={"xla": 16}),
    _unary("bessel_i1e", _double(special.i1e), 30, "e**-|x| I1(x)", measured=False, ulps={"xla": 16}),
    _unary("integer_pow", _with_params(lambda x, y: integer_pow(widen(x), y), "y"), 3, "x**y for a fixed integer y",
           NUMBERS, {"float": _integer_power(lambda y: abs(y) <= 64), "i32": _integer_power(lambda y: 0 <= y <= 64)},
           takes=("y",), immediates=("y",), exact=False, ulps={"xla": 8, "cuda": 8},
           samples=lambda dtype: [{"y": y} for y in ((-2, 0, 1, 2, 3, 7) if is_float(dtype) else (0, 1, 2, 3, 7))],
           jax=_lax(lax.integer_pow, y=lambda params, _: params["y"])),
    _unary("reduce_precision", _with_params(reduce_precision, "exponent_bits", "mantissa_bits"), 4,
           "rounded to exponent_bits and mantissa_bits",
           opcodes=("reduce_precision", "to_float16", "to_bfloat16"), immediates=("exponent_bits", "mantissa_bits"),
           widens=_keeps_exponent,
           samples=lambda dtype: [{"exponent_bits": e, "mantissa_bits": m} for e, m in ((5, 4), (8, 7), (8, 3), (3, 2), (11, 30))],
           jax=lambda params, x, out: lax.reduce_precision(x, **params)),
    _unary("bitcast_convert_type", bitcast, 1, "the same bits as new_dtype, of the same width", NUMBERS,
           "from_word<{R}>(to_word({0}))", cpu="bitcast", gives="any", takes=("new_dtype",), widens=_never, measured=False,
           samples=_same_width, jax=_lax(lax.bitcast_convert_type, new_dtype=lambda params, _: np_dtype(params["new_dtype"]))),
    _unary("copy", _in_own_dtype(lambda x: x), 0, "x itself", DTYPES, "({0})", cpu=None, names=("pvary",),
           jax=_copy_by_jax),
)  # fmt: skip

_BINARY = (
    _binary("add", _exact(np.add), 1, "x + y", NUMBERS, {"any": "({0} + {1})", "i32": "plus({0}, {1})"}, folded=True,
            names=("add_any",)),
    _binary("sub", _exact(np.subtract), 1, "x - y", NUMBERS, {"any": "({0} - {1})", "i32": "minus({0}, {1})"}, folded=True),
    _binary("mul", _exact(np.multiply), 1, "x * y", NUMBERS, {"any": "({0} * {1})", "i32": "times({0}, {1})"}, folded=True),
    _binary("div", _exact(divide), 4, "x / y; of integers towards zero, by zero all ones", NUMBERS, "divide({0}, {1})",
            fast=2, special=True, folded=True),
    _binary("rem", _exact(remainder), 12, "remainder with the sign of x", NUMBERS, "remainder_of({0}, {1})", exact=True),
    _binary("max", _exact(np.maximum), 1, "the larger; NaN if either is", DTYPES, "maximum({0}, {1})", fast=0.5, folded=True),
    _binary("min", _exact(np.minimum), 1, "the smaller; NaN if either is", DTYPES, "minimum({0}, {1})", fast=0.5, folded=True),
    _binary("pow", _in_own_dtype(_power), 30, "x**y, y a float or an integer", cuda="power({0}, {1})", mixes=True, special=True,
            domain=(POSITIVE,)),
    _binary("atan2", _double(np.arctan2), 20, "angle of (y, x)", cuda="atan2f({0}, {1})"),
    _binary("nextafter", _in_own_dtype(np.nextafter), 6, "neighbour of x towards y", cuda="nextafterf({0}, {1})", exact=True,
            widens=_never),
    _binary("and", _exact(np.bitwise_and), 1, "bitwise and", BITS, {"any": "({0} & {1})", "bool": "({0} && {1})"},
           jax=_lax(lax.bitwise_and), folded=True),
    _binary("or", _exact(np.bitwise_or), 1, "bitwise or", BITS, {"any": "({0} | {1})", "bool": "({0} || {1})"},
           jax=_lax(lax.bitwise_or), folded=True),
    _binary("xor", _exact(np.bitwise_xor), 1, "bitwise exclusive or", BITS, {"any": "({0} ^ {1})", "bool": "({0} != {1})"},
           jax=_lax(lax.bitwise_xor), folded=True),
    _binary("shift_left", _exact(shift_left), 2, "0 for amounts beyond the bits", INTEGERS, _shift("shift_left"),
            folded=True),
    _binary("shift_right_logical", _exact(shift_right_logical), 2, "zeros from the left", INTEGERS, _shift("shift_right"),
            folded=True),
    _binary("shift_right_arithmetic", _exact(shift_right_arithmetic), 2, "the sign from the left", INTEGERS,
            _shift("shift_right_sign", "i32")),
    _binary("mulhi", _exact(multiply_high), 4, "high half of the product", INTEGERS, "high_half({0}, {1})"),
    _compare("eq", _exact(np.equal), 1, "x == y", DTYPES, "({0} == {1})", folded=True),
    _compare("ne", _exact(np.not_equal), 1, "x != y", DTYPES, "({0} != {1})", folded=True),
    _compare("lt", _exact(np.less), 1, "x < y", DTYPES, "({0} < {1})", folded=True),
    _compare("le", _exact(np.less_equal), 1, "x <= y", DTYPES, "({0} <= {1})", folded=True),
    _compare("gt", _exact(np.greater), 1, "x > y", DTYPES, "({0} > {1})", folded=True),
    _compare("ge", _exact(np.greater_equal), 1, "x >= y", DTYPES, "({0} >= {1})", folded=True),
    _compare_in_order("eq_to", _total(np.equal), 2, "equal in IEEE 754's total order", DTYPES,
                      "(total_order({0}) == total_order({1}))", jax=_lax(lax.eq_to_p.bind)),
    _compare_in_order("lt_to", _total(np.less), 2, "before in IEEE 754's total order", DTYPES,
                      "(total_order({0}) < total_order({1}))", jax=_lax(lax.lt_to_p.bind)),
    _compare_in_order("le_to", _total(np.less_equal), 2, "not after in IEEE 754's total order", DTYPES,
                      "(total_order({0}) <= total_order({1}))", jax=_lax(lax.le_to_p.bind)),
    _binary("igamma", _double(igamma), 200, "regularised lower incomplete gamma P(x, y)", **_SERIES, absolute=3e-6),
    _binary("igammac", _double(igammac), 200, "regularised upper incomplete gamma Q(x, y)", **_SERIES, absolute=3e-6),
    _binary("zeta", _double(zeta), 200, "Hurwitz zeta function", measured=False, domain=((0.2, 6),), relative=1e-4),
    _binary("polygamma", _double(polygamma), 250, "x-th derivative of digamma", measured=False,
            domain=(range(4), _ABOVE_POLE), relative=1e-4),
)  # fmt: skip

_TERNARY = (
    _ternary("select_n", _in_own_dtype(_select), 1, "(which, on false, on true)", DTYPES, "({0} ? {2} : {1})", mixes=True,
             cpu="select", folded=True),
    _ternary("clamp", _exact(lambda low, x, high: np.minimum(np.maximum(low, x), high)), 2,
             "(low, x, high): min(max(low, x), high)", DTYPES, "clamp({0}, {1}, {2})"),
    _ternary("regularized_incomplete_beta", _double(regularized_incomplete_beta), 200, "I_x(a, b) of (a, b, x)",
             measured=False, domain=(POSITIVE, POSITIVE, (0, 0.99)), absolute=1e-5, relative=2e-3, jax=_lax(lax.betainc)),
)  # fmt: skip

_QUATERNARY = (
    _quaternary("threefry2x32", _with_word(threefry_hash), 77,
                "(key 0, key 1, count 0, count 1) hashed; word: the first or the second of the result, or their xor", ("uint32",),
                "threefry_{word}({0}, {1}, {2}, {3})", cpu="threefry_{word}", exact=True, jax=_threefry_by_jax, like=("tanh", 7.0),
                opcodes=tuple(f"threefry_{word}" for word in THREEFRY_WORDS),
                samples=lambda dtype: [{"word": word} for word in THREEFRY_WORDS]),
)  # fmt: skip

_QUINARY = (
    _quinary("philox4x32", _in_own_dtype(philox_by_numpy), 82, "(key 0, key 1, count 0, count 1, place) bits of an rbg key",
             ("uint32",), "philox({0}, {1}, {2}, {3}, {4})", exact=True, jax=_lax(philox_by_jax), opcodes=(), like=("tanh", 10.0)),
)  # fmt: skip

_CONVERT = OpSpec(
    "convert_element_type",
    "convert",
    1,
    convert,
    relate_pointwise,
    1,
    "new_dtype; floats to integers truncate and saturate, NaN becomes 0",
    gives="any",
    exact=True,
    folded=True,
    samples=lambda dtype: [{"new_dtype": to} for to in DTYPES],
    jax=_lax(lax.convert_element_type, new_dtype=lambda params, _: np_dtype(params["new_dtype"])),
)

POINTWISE: dict[str, OpSpec] = {spec.kind: spec for spec in (*_UNARY, *_BINARY, *_TERNARY, *_QUATERNARY, *_QUINARY, _CONVERT)}

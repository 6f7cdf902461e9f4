"""Pointwise arithmetic that NumPy does not spell as XLA means it: integer division, shifts, rounding, conversion, bit counting.

Comes in: NumPy arrays of one dtype (16-bit floats already widened). Goes out: arrays. Invariant: every function here is exact; for
floats it rounds at most once, in the dtype it is given.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kitsune_jax.ops.spec import FORMATS, Array, Params, is_float, np_dtype, round_to, widen


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
    """-1, 0 or 1; of a float NaN and either zero itself."""
    return np.where((x == 0) | (x != x), x, np.sign(x))


def round_away(x: Array) -> Array:
    """To the nearest integer, halves away from zero."""
    whole = np.trunc(x)
    return np.copysign(np.where(np.abs(x - whole) >= 0.5, whole + np.copysign(np.ones_like(x), x), whole), x)


def shift_left(x: Array, amount: Array) -> Array:
    """0 where ``amount`` (taken as unsigned) is not below the number of bits."""
    x, safe, within = _shift_operands(x, amount)
    return np.where(within, np.left_shift(x, safe), np.zeros_like(x))


def shift_right_logical(x: Array, amount: Array) -> Array:
    """Zeros come in from the left; 0 where ``amount`` is not below the number of bits."""
    x, safe, within = _shift_operands(x, amount)
    shifted = np.asarray(np.right_shift(unsigned(x), unsigned(safe))).view(x.dtype)
    return np.where(within, shifted, np.zeros_like(x))


def shift_right_arithmetic(x: Array, amount: Array) -> Array:
    """The sign comes in from the left; all sign where ``amount`` is not below the number of bits."""
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
    """x**y by repeated squaring, then the reciprocal for a negative ``y``; integers wrap."""
    result = np.ones_like(x)
    square, n = x, abs(y)
    while n:
        if n & 1:
            result = result * square
        n >>= 1
        if n:
            square = square * square
    return np.asarray(1 / result if y < 0 else result)


def reduce_precision(x: Array, exponent_bits: int, mantissa_bits: int) -> Array:
    """``x`` rounded to a float format, ties to even: too large becomes infinite.

    With fewer exponent bits than its own dtype has, what is below the least normal number becomes a zero. Otherwise it keeps its
    exponent, and its significand is cut at the same place as that of the least normal number.
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


def next_after(x: Array, y: Array) -> Array:
    """The neighbour of ``x`` towards ``y`` among the numbers of their own dtype."""
    return np.asarray(np.nextafter(x, y))


def bitcast(_params: Params, /, x: Array, *, out_dtype: str) -> Array:
    """The same bits as a number of another dtype of the same width."""
    return np.asarray(x).view(np_dtype(out_dtype))


def convert(_params: Params, /, x: Array, *, out_dtype: str) -> Array:
    """Conversion as XLA defines it: floats to integers truncate and saturate, NaN becomes 0; to bool, whatever is not 0 is true."""
    target = np_dtype(out_dtype)
    if out_dtype == "bool":
        return np.asarray(x != 0)
    if is_float(out_dtype):
        return round_to(_integer_to_float(x, out_dtype), out_dtype)
    if not is_float(x.dtype):
        return x.astype(target)
    return _saturate(widen(x).astype(np.float64), target)


def _integer_to_float(x: Array, out_dtype: str) -> Array:
    """Integers become 16-bit floats by way of float32."""
    return x.astype(np.float32) if x.dtype.kind in "iub" and out_dtype in ("float16", "bfloat16") else x


def _saturate(x: Array, target: np.dtype[Any]) -> Array:
    info = np.iinfo(target)
    whole = np.trunc(x)
    low, high = whole <= float(info.min), whole >= float(info.max)
    with np.errstate(all="ignore"):
        inside = np.where(low | high | np.isnan(x), 0.0, whole).astype(target)
    result = np.where(low, np.asarray(info.min, target), inside)
    return np.where(high, np.asarray(info.max, target), result)

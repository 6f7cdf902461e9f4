"""The pointwise entries of the op table: arithmetic, special functions, and two hashes.

Comes in: the form of an entry (``spec``). Goes out: ``POINTWISE``, entries by kind. Invariants: an operand of a pointwise op is of
full shape or of rank 0; 16-bit floats are widened before they reach the functions of NumPy here, with which capture computes
operators on constants.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.random import threefry2x32_p

from kitsune_jax.ops.graph import Op, Value
from kitsune_jax.ops.spec import (
    BITS,
    DTYPES,
    FLOATS,
    INTEGERS,
    NUMBERS,
    Array,
    CudaCode,
    DimRelation,
    JaxRule,
    NumpyRule,
    OpSpec,
    Params,
    Shapes,
    is_float,
    np_dtype,
    round_to,
    same_dims,
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
    x, y = (np.asarray(a) for a in np.broadcast_arrays(x, y))
    minus_one = (y == -1) if x.dtype.kind == "i" else np.zeros(y.shape, bool)
    safe = np.where((y == 0) | minus_one, np.ones_like(y), y)
    quotient = np.where(minus_one, np.negative(x), (x - np.fmod(x, safe)) // safe)
    return np.where(y == 0, np.bitwise_not(np.zeros_like(x)), quotient)


def shift_left(x: Array, amount: Array) -> Array:
    """0 if ``amount`` (taken as unsigned) is not below the number of bits."""
    within = unsigned(amount) < 8 * x.dtype.itemsize
    return np.where(within, np.left_shift(x, np.where(within, amount, np.zeros_like(amount))), np.zeros_like(x))


def shift_right_logical(x: Array, amount: Array) -> Array:
    """Zeros come in from the left; 0 if ``amount`` is not below the number of bits."""
    within = unsigned(amount) < 8 * x.dtype.itemsize
    shifted = np.right_shift(unsigned(x), unsigned(np.where(within, amount, np.zeros_like(amount))))
    return np.where(within, np.asarray(shifted).view(x.dtype), np.zeros_like(x))


def convert(_params: Params, /, x: Array, *, out_dtype: str) -> Array:
    """Conversion as XLA defines it: floats to integers truncate and saturate, NaN becomes 0; to bool, all numbers but 0 are
    true."""
    target = np_dtype(out_dtype)
    if out_dtype == "bool":
        return np.asarray(x != 0)
    if is_float(out_dtype):
        return round_to(x, out_dtype)
    if not is_float(x.dtype):
        return x.astype(target)
    return _saturate(widen(x).astype(np.float64), target)


def _saturate(x: Array, target: np.dtype[Any]) -> Array:
    info = np.iinfo(target)
    whole = np.trunc(x)
    low, high = whole <= float(info.min), whole >= float(info.max)
    with np.errstate(all="ignore"):
        inside = np.where(low | high | np.isnan(x), 0.0, whole).astype(target)
    result = np.where(low, np.asarray(info.min, target), inside)
    return np.where(high, np.asarray(info.max, target), result)


# --- Threefry-2x32 with 20 rounds: the default hash of ``jax.random`` -------------------------------------------------------------
# Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

THREEFRY_WORDS = ("first", "second", "xor")


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


def philox_by_jax(*words: Any) -> Any:
    """``element`` of arrays or tracers of JAX."""
    return element(_JAX, *words)


# --- the entries ------------------------------------------------------------------------------------------------------------------

_SIGNED = tuple(dtype for dtype in NUMBERS if not dtype.startswith("u"))

Function = Callable[..., Any]


def relate_pointwise(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    """Dimension d of the result and of every operand that has dimensions: parallel."""
    return same_dims(len(out_shapes[0]), [k for k, shape in enumerate((*in_shapes, *out_shapes)) if shape])


def in_own_dtype(function: Function) -> NumpyRule:
    """The rule of a function of arrays whose result is rounded once."""

    def rule(params: Params, /, *arrays: Array, out_dtype: str) -> Array:
        with np.errstate(all="ignore"):
            return round_to(function(*map(np.asarray, arrays)), out_dtype)

    return rule


def exact(function: Function) -> NumpyRule:
    """Computed in the operands' dtype, 16-bit floats in float32."""
    return in_own_dtype(lambda *arrays: function(*map(widen, arrays)))


def _threefry_by_jax(params: Params, /, *arrays: Any, out: Value) -> Any:
    arrays = jnp.broadcast_arrays(*arrays)  # JAX's primitive takes operands of one rank
    return threefry_word(params["word"], *threefry2x32_p.bind(*arrays))


def _select(which: Array, on_false: Array, on_true: Array) -> Array:
    return np.where(which >= 1, on_true, on_false)


def _entry(
    arity: int,
    kind: str,
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
    return OpSpec(kind, "pointwise", arity, relate_pointwise, flops, doc, dtypes, cuda=code, **facts)


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


def _lax(function: Function, **options: Callable[[Params, Value], Any]) -> JaxRule:
    """Evaluation by a function of ``jax.lax`` of another name, or with options: ``option=lambda params, out: value``."""

    def rule(params: Params, /, *arrays: Any, out: Value) -> Any:
        return function(*arrays, **{name: of(params, out) for name, of in options.items()})

    return rule


def _copy_by_jax(params: Params, /, x: Any, *, out: Value) -> Any:
    """With parameters, ``x`` at the precision they name: XLA may not compute it in more (``reduce_precision``)."""
    return lax.reduce_precision(x, **params) if params else x


_METHODS = {"even": lax.RoundingMethod.TO_NEAREST_EVEN, "away": lax.RoundingMethod.AWAY_FROM_ZERO}

_ENTRIES = (
    _unary("neg", 1, "-x", NUMBERS, {"any": "(-{0})", "i32": "minus(0, {0})", "u32": "(0u - {0})"}, numpy=exact(np.negative)),
    _unary("sign", 2, "-1, 0 or 1; NaN and zeros stay", NUMBERS, "sign({0})"),
    _unary("abs", 1, "|x|", _SIGNED, "magnitude({0})"),
    _unary("floor", 1, "largest integer <= x", cuda="floorf({0})"),
    _unary("ceil", 1, "least integer >= x", cuda="ceilf({0})"),
    _unary("round", 2, "nearest integer; method: away or even", cuda="round_{method}({0})", cpu="round_{method}",
           opcodes=("round_away", "round_even"), jax=_lax(lax.round, rounding_method=lambda params, _: _METHODS[params["method"]])),
    _unary("is_finite", 1, "neither infinite nor NaN", cuda="finite({0})", gives="bool"),
    _unary("not", 1, "complement; of bool negation", BITS, {"any": "(~{0})", "bool": "(!{0})"}, jax=_lax(lax.bitwise_not)),
    _unary("population_count", 4, "number of ones", INTEGERS, "static_cast<{T}>(popc(static_cast<u32>({0})))", cpu="popcnt"),
    _unary("clz", 4, "leading zeros", INTEGERS, "static_cast<{T}>(clz(static_cast<u32>({0})))"),
    _unary("square", 1, "x * x", NUMBERS, {"any": "({0} * {0})", "i32": "times({0}, {0})"}),
    _unary("exp", 10, "e**x", cuda={"any": "expf({0})", "coarse": "exp_coarse({0})"}, fast=2, special=True),
    _unary("exp2", 9, "2**x", cuda="exp2f({0})", fast=1, special=True, like=("exp", 1.0)),
    _unary("expm1", 14, "e**x - 1", cuda="expm1f({0})", special=True, like=("exp", 1.5)),
    _unary("log", 12, "natural logarithm", cuda="logf({0})", fast=2, special=True),
    _unary("log1p", 15, "log(1 + x)", cuda="log1pf({0})", special=True, like=("log", 1.5)),
    _unary("sqrt", 4, "square root", cuda="sqrtf({0})", fast=2, special=True, like=("rsqrt", 0.6)),
    _unary("rsqrt", 5, "1 / sqrt(x)", cuda="rsqrtf({0})", fast=1, special=True),
    _unary("cbrt", 15, "cube root", cuda="cbrtf({0})", like=("pow", 1.0)),
    _unary("logistic", 14, "1 / (1 + e**-x)", cuda={"any": "logistic({0})", "coarse": "logistic_coarse({0})"}, fast=2,
           special=True),
    _unary("tanh", 14, "hyperbolic tangent", cuda="tanhf({0})", fast=1, special=True),
    _unary("sin", 15, "sine", cuda="sinf({0})", special=True),
    _unary("cos", 15, "cosine", cuda="cosf({0})", special=True, like=("sin", 1.0)),
    _unary("tan", 22, "tangent", cuda="tanf({0})", special=True, like=("sin", 2.0)),
    _unary("asin", 15, "inverse sine", cuda="asinf({0})"),
    _unary("acos", 15, "inverse cosine", cuda="acosf({0})"),
    _unary("atan", 15, "inverse tangent", cuda="atanf({0})"),
    _unary("sinh", 16, "hyperbolic sine", cuda="sinhf({0})", special=True, like=("exp", 2.0)),
    _unary("cosh", 16, "hyperbolic cosine", cuda="coshf({0})", special=True, like=("exp", 2.0)),
    _unary("asinh", 22, "inverse hyperbolic sine", cuda="asinhf({0})", like=("log", 2.0)),
    _unary("acosh", 20, "inverse hyperbolic cosine", cuda="acoshf({0})", like=("log", 2.0)),
    _unary("atanh", 20, "inverse hyperbolic tangent", cuda="atanhf({0})", like=("log", 2.0)),
    _unary("erf", 16, "error function", cuda="erff({0})", special=True),
    _unary("erfc", 24, "1 - erf(x)", cuda="erfcf({0})", special=True, like=("erf", 2.0)),
    _unary("erf_inv", 30, "inverse error function", cuda="erfinvf({0})", like=("tanh", 2.0)),
    _unary("lgamma", 40, "log |Gamma(x)|", cuda="lgammaf({0})", measured=False),
    _unary("digamma", 60, "derivative of lgamma", measured=False),
    _unary("bessel_i0e", 30, "e**-|x| I0(x)", measured=False),
    _unary("bessel_i1e", 30, "e**-|x| I1(x)", measured=False),
    _unary("integer_pow", 3, "x**y for a fixed integer y", NUMBERS,
           {"float": _integer_power(lambda y: abs(y) <= 64), "i32": _integer_power(lambda y: 0 <= y <= 64)}, takes=("y",),
           immediates=("y",), exact=False, jax=_lax(lax.integer_pow, y=lambda params, _: params["y"])),
    _unary("reduce_precision", 4, "rounded to exponent_bits and mantissa_bits",
           opcodes=("reduce_precision", "to_float16", "to_bfloat16"), immediates=("exponent_bits", "mantissa_bits"),
           widens=_keeps_exponent, jax=lambda params, x, out: lax.reduce_precision(x, **params)),
    _unary("bitcast_convert_type", 1, "the same bits as new_dtype, of the same width", NUMBERS, "from_word<{R}>(to_word({0}))",
           cpu="bitcast", gives="any", takes=("new_dtype",), widens=_never, measured=False,
           jax=_lax(lax.bitcast_convert_type, new_dtype=lambda params, _: np_dtype(params["new_dtype"]))),
    _unary("copy", 0, "x itself", DTYPES, "({0})", cpu=None, names=("pvary",), jax=_copy_by_jax),
    _binary("add", 1, "x + y", NUMBERS, {"any": "({0} + {1})", "i32": "plus({0}, {1})"}, names=("add_any",), numpy=exact(np.add)),
    _binary("sub", 1, "x - y", NUMBERS, {"any": "({0} - {1})", "i32": "minus({0}, {1})"}, numpy=exact(np.subtract)),
    _binary("mul", 1, "x * y", NUMBERS, {"any": "({0} * {1})", "i32": "times({0}, {1})"}, numpy=exact(np.multiply)),
    _binary("div", 4, "x / y; of integers towards zero, by zero all ones", NUMBERS, "divide({0}, {1})", fast=2, special=True,
            numpy=exact(divide)),
    _binary("rem", 12, "remainder with the sign of x", NUMBERS, "remainder_of({0}, {1})", exact=True),
    _binary("max", 1, "the larger; NaN if either is", DTYPES, "maximum({0}, {1})", fast=0.5, numpy=exact(np.maximum)),
    _binary("min", 1, "the smaller; NaN if either is", DTYPES, "minimum({0}, {1})", fast=0.5, numpy=exact(np.minimum)),
    _binary("pow", 30, "x**y, y a float or an integer", cuda="power({0}, {1})", mixes=True, special=True),
    _binary("atan2", 20, "angle of (y, x)", cuda="atan2f({0}, {1})"),
    _binary("nextafter", 6, "neighbour of x towards y", cuda="nextafterf({0}, {1})", exact=True, widens=_never),
    _binary("and", 1, "bitwise and", BITS, {"any": "({0} & {1})", "bool": "({0} && {1})"}, jax=_lax(lax.bitwise_and),
            numpy=exact(np.bitwise_and)),
    _binary("or", 1, "bitwise or", BITS, {"any": "({0} | {1})", "bool": "({0} || {1})"}, jax=_lax(lax.bitwise_or),
            numpy=exact(np.bitwise_or)),
    _binary("xor", 1, "bitwise exclusive or", BITS, {"any": "({0} ^ {1})", "bool": "({0} != {1})"}, jax=_lax(lax.bitwise_xor),
            numpy=exact(np.bitwise_xor)),
    _binary("shift_left", 2, "0 for amounts beyond the bits", INTEGERS, _shift("shift_left"), numpy=exact(shift_left)),
    _binary("shift_right_logical", 2, "zeros from the left", INTEGERS, _shift("shift_right"), numpy=exact(shift_right_logical)),
    _binary("shift_right_arithmetic", 2, "the sign from the left", INTEGERS, _shift("shift_right_sign", "i32")),
    _binary("mulhi", 4, "high half of the product", INTEGERS, "high_half({0}, {1})"),
    _compare("eq", 1, "x == y", DTYPES, "({0} == {1})", numpy=exact(np.equal)),
    _compare("ne", 1, "x != y", DTYPES, "({0} != {1})", numpy=exact(np.not_equal)),
    _compare("lt", 1, "x < y", DTYPES, "({0} < {1})", numpy=exact(np.less)),
    _compare("le", 1, "x <= y", DTYPES, "({0} <= {1})", numpy=exact(np.less_equal)),
    _compare("gt", 1, "x > y", DTYPES, "({0} > {1})", numpy=exact(np.greater)),
    _compare("ge", 1, "x >= y", DTYPES, "({0} >= {1})", numpy=exact(np.greater_equal)),
    _compare_in_order("eq_to", 2, "equal in IEEE 754's total order", DTYPES, "(total_order({0}) == total_order({1}))",
                      jax=_lax(lax.eq_to_p.bind)),
    _compare_in_order("lt_to", 2, "before in IEEE 754's total order", DTYPES, "(total_order({0}) < total_order({1}))",
                      jax=_lax(lax.lt_to_p.bind)),
    _compare_in_order("le_to", 2, "not after in IEEE 754's total order", DTYPES, "(total_order({0}) <= total_order({1}))",
                      jax=_lax(lax.le_to_p.bind)),
    _binary("igamma", 200, "regularised lower incomplete gamma P(x, y)", measured=False),
    _binary("igammac", 200, "regularised upper incomplete gamma Q(x, y)", measured=False),
    _binary("zeta", 200, "Hurwitz zeta function", measured=False),
    _binary("polygamma", 250, "x-th derivative of digamma", measured=False),
    _ternary("select_n", 1, "(which, on false, on true)", DTYPES, "({0} ? {2} : {1})", mixes=True, cpu="select",
             numpy=in_own_dtype(_select)),
    _ternary("clamp", 2, "(low, x, high): min(max(low, x), high)", DTYPES, "clamp({0}, {1}, {2})"),
    _ternary("regularized_incomplete_beta", 200, "I_x(a, b) of (a, b, x)", measured=False, jax=_lax(lax.betainc)),
    _quaternary("threefry2x32", 77,
                "(key 0, key 1, count 0, count 1) hashed; word: the first or the second of the result, or their xor", ("uint32",),
                "threefry_{word}({0}, {1}, {2}, {3})", cpu="threefry_{word}", exact=True, jax=_threefry_by_jax, like=("tanh", 7.0),
                opcodes=tuple(f"threefry_{word}" for word in THREEFRY_WORDS)),
    _quinary("philox4x32", 82, "(key 0, key 1, count 0, count 1, place) bits of an rbg key", ("uint32",),
             "philox({0}, {1}, {2}, {3}, {4})", exact=True, jax=_lax(philox_by_jax), opcodes=(), like=("tanh", 10.0)),
    OpSpec("convert_element_type", "convert", 1, relate_pointwise, 1,
           "new_dtype; floats to integers truncate and saturate, NaN becomes 0", gives="any", exact=True, numpy=convert,
           jax=_lax(lax.convert_element_type, new_dtype=lambda params, _: np_dtype(params["new_dtype"]))),
)  # fmt: skip

POINTWISE: dict[str, OpSpec] = {spec.kind: spec for spec in _ENTRIES}

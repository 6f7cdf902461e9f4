"""The pointwise entries of the op table.

Comes in: nothing. Goes out: ``POINTWISE``, the entries by kind. Invariant: an operand is of full shape or of rank 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend.random import threefry2x32_p
from scipy import special

from kitsune_jax.graph import Op, Value
from kitsune_jax.ops import numeric, philox, threefry
from kitsune_jax.ops import special as ops_special
from kitsune_jax.ops.relations import DimRelation
from kitsune_jax.ops.spec import (
    BITS,
    DTYPES,
    FLOATS,
    INFINITY,
    INTEGERS,
    NUMBERS,
    POSITIVE,
    UNIT,
    Array,
    CudaCode,
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

SIGNED = ("int8", "int16", "int32", "int64")
SIGNED_NUMBERS = (*SIGNED, *FLOATS)

Function = Callable[..., Any]


def relate_pointwise(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    """Dimension d of every operand that has dimensions, and of the result: parallel."""
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
    """For a function that takes parameters of the op after the array, and widens that itself if it needs to."""

    def rule(params: Params, /, *arrays: Array, out_dtype: str) -> Array:
        with np.errstate(all="ignore"):
            return round_to(function(np.asarray(arrays[0]), *(params[n] for n in names)), out_dtype)

    return rule


def _round(x: Array, method: str) -> Array:
    x = widen(x)
    return np.asarray(np.rint(x)) if method == "even" else numeric.round_away(x)


def _power(x: Array, y: Array) -> Array:
    return np.asarray(np.power(to_double(x), y.astype(np.float64)))


def _with_word(function: Callable[..., Any]) -> NumpyRule:
    """For a function that makes two words, of which the parameter ``word`` takes one, or their exclusive or."""
    return lambda params, *arrays, out_dtype: threefry.word_of(params["word"], *function(*arrays))


def _threefry_by_jax(params: Params, /, *arrays: Any, out: Value) -> Any:
    arrays = jnp.broadcast_arrays(*arrays)  # JAX's primitive takes operands of one rank
    return threefry.word_of(params["word"], *threefry2x32_p.bind(*arrays))


def _total(compare: Function) -> NumpyRule:
    return _in_own_dtype(lambda x, y: compare(numeric.total_order(x), numeric.total_order(y)))


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
    """``cuda``: one expression for all types, or some by class. Cheap ops are exact and their micro-operation has their name,
    unless ``facts`` say otherwise.
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
    """A float16 rounded to a format of no fewer exponent bits has subnormal numbers, which are normal ones of float32."""
    return dtype != "float16" or params["exponent_bits"] < 5


def _same_width(dtype: str) -> list[Params]:
    return [{"new_dtype": to} for to in NUMBERS if to != dtype and np_dtype(to).itemsize == np_dtype(dtype).itemsize]


def _lax(function: Function, **options: Callable[[Params, Value], Any]) -> JaxRule:
    """Evaluation by a function of ``jax.lax`` that has another name, or options as well: ``option=lambda params, out: value``."""

    def rule(params: Params, /, *arrays: Any, out: Value) -> Any:
        return function(*arrays, **{name: of(params, out) for name, of in options.items()})

    return rule


def _copy_by_jax(params: Params, /, x: Any, *, out: Value) -> Any:
    """Where XLA is told to keep the precision that ``x`` has, it may not compute ``x`` in more (``reduce_precision``)."""
    return lax.reduce_precision(x, **params) if params else x


_METHODS = {"even": lax.RoundingMethod.TO_NEAREST_EVEN, "away": lax.RoundingMethod.AWAY_FROM_ZERO}
_ABOVE_POLE = (0.1, INFINITY)
_SERIES: dict[str, Any] = {"measured": False, "domain": (_ABOVE_POLE,)}

_UNARY = (
    _unary("neg", _exact(np.negative), 1, "-x", NUMBERS, {"any": "(-{0})", "i32": "minus(0, {0})", "u32": "(0u - {0})"},
           folded=True),
    _unary("sign", _exact(numeric.sign), 2, "-1, 0 or 1; NaN and zeros stay", NUMBERS, "sign({0})"),
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
    _unary("population_count", _exact(numeric.population_count), 4, "number of ones", INTEGERS,
           "static_cast<{T}>(popc(static_cast<u32>({0})))", cpu="popcnt"),
    _unary("clz", _exact(numeric.count_leading_zeros), 4, "leading zeros", INTEGERS,
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
    _unary("acosh", _double(ops_special.acosh), 20, "inverse hyperbolic cosine", cuda="acoshf({0})", like=("log", 2.0),
           domain=(POSITIVE,), ulps={"cuda": 4}),
    _unary("atanh", _double(np.arctanh), 20, "inverse hyperbolic tangent", cuda="atanhf({0})", like=("log", 2.0), domain=(UNIT,),
           ulps={"xla": 256, "cuda": 4}, absolute=1e-7),
    _unary("erf", _double(special.erf), 16, "error function", cuda="erff({0})", special=True),
    _unary("erfc", _double(special.erfc), 24, "1 - erf(x)", cuda="erfcf({0})", special=True, like=("erf", 2.0), domain=((-3, 3),),
           ulps={"cuda": 6}, absolute=3e-6),
    _unary("erf_inv", _double(ops_special.erf_inv), 30, "inverse error function", cuda="erfinvf({0})", like=("tanh", 2.0),
           domain=(UNIT,), ulps={"xla": 60, "cuda": 8}),
    _unary("lgamma", _double(ops_special.lgamma), 40, "log |Gamma(x)|", cuda="lgammaf({0})", **_SERIES, ulps={"cuda": 8},
           absolute=3e-5, relative=1e-5),
    _unary("digamma", _double(ops_special.digamma), 60, "derivative of lgamma", **_SERIES, absolute=3e-6, relative=1e-5),
    _unary("bessel_i0e", _double(special.i0e), 30, "e**-|x| I0(x)", measured=False, ulps={"xla": 16}),
    _unary("bessel_i1e", _double(special.i1e), 30, "e**-|x| I1(x)", measured=False, ulps={"xla": 16}),
    _unary("integer_pow", _with_params(lambda x, y: numeric.integer_pow(widen(x), y), "y"), 3, "x**y for a fixed integer y",
           NUMBERS, {"float": _integer_power(lambda y: abs(y) <= 64), "i32": _integer_power(lambda y: 0 <= y <= 64)},
           takes=("y",), immediates=("y",), exact=False, ulps={"xla": 8, "cuda": 8},
           samples=lambda dtype: [{"y": y} for y in ((-2, 0, 1, 2, 3, 7) if is_float(dtype) else (0, 1, 2, 3, 7))],
           jax=_lax(lax.integer_pow, y=lambda params, _: params["y"])),
    _unary("reduce_precision", _with_params(numeric.reduce_precision, "exponent_bits", "mantissa_bits"), 4,
           "rounded to exponent_bits and mantissa_bits",
           opcodes=("reduce_precision", "to_float16", "to_bfloat16"), immediates=("exponent_bits", "mantissa_bits"),
           widens=_keeps_exponent,
           samples=lambda dtype: [{"exponent_bits": e, "mantissa_bits": m} for e, m in ((5, 4), (8, 7), (8, 3), (3, 2), (11, 30))],
           jax=lambda params, x, out: lax.reduce_precision(x, **params)),
    _unary("bitcast_convert_type", numeric.bitcast, 1, "the same bits as new_dtype, of the same width", NUMBERS,
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
    _binary("div", _exact(numeric.divide), 4, "x / y; of integers towards zero, by zero all ones", NUMBERS, "divide({0}, {1})",
            fast=2, special=True, folded=True),
    _binary("rem", _exact(numeric.remainder), 12, "remainder with the sign of x", NUMBERS, "remainder_of({0}, {1})", exact=True),
    _binary("max", _exact(np.maximum), 1, "the larger; NaN if either is", DTYPES, "maximum({0}, {1})", fast=0.5, folded=True),
    _binary("min", _exact(np.minimum), 1, "the smaller; NaN if either is", DTYPES, "minimum({0}, {1})", fast=0.5, folded=True),
    _binary("pow", _in_own_dtype(_power), 30, "x**y, y a float or an integer", cuda="power({0}, {1})", mixes=True, special=True,
            domain=(POSITIVE,)),
    _binary("atan2", _double(np.arctan2), 20, "angle of (y, x)", cuda="atan2f({0}, {1})"),
    _binary("nextafter", _in_own_dtype(numeric.next_after), 6, "neighbour of x towards y", cuda="nextafterf({0}, {1})", exact=True,
            widens=_never),
    _binary("and", _exact(np.bitwise_and), 1, "bitwise and", BITS, {"any": "({0} & {1})", "bool": "({0} && {1})"},
           jax=_lax(lax.bitwise_and), folded=True),
    _binary("or", _exact(np.bitwise_or), 1, "bitwise or", BITS, {"any": "({0} | {1})", "bool": "({0} || {1})"},
           jax=_lax(lax.bitwise_or), folded=True),
    _binary("xor", _exact(np.bitwise_xor), 1, "bitwise exclusive or", BITS, {"any": "({0} ^ {1})", "bool": "({0} != {1})"},
           jax=_lax(lax.bitwise_xor), folded=True),
    _binary("shift_left", _exact(numeric.shift_left), 2, "0 for amounts beyond the bits", INTEGERS, _shift("shift_left"),
            folded=True),
    _binary("shift_right_logical", _exact(numeric.shift_right_logical), 2, "zeros from the left", INTEGERS, _shift("shift_right"),
            folded=True),
    _binary("shift_right_arithmetic", _exact(numeric.shift_right_arithmetic), 2, "the sign from the left", INTEGERS,
            _shift("shift_right_sign", "i32")),
    _binary("mulhi", _exact(numeric.multiply_high), 4, "high half of the product", INTEGERS, "high_half({0}, {1})"),
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
    _binary("igamma", _double(ops_special.igamma), 200, "regularised lower incomplete gamma P(x, y)", **_SERIES, absolute=3e-6),
    _binary("igammac", _double(ops_special.igammac), 200, "regularised upper incomplete gamma Q(x, y)", **_SERIES, absolute=3e-6),
    _binary("zeta", _double(ops_special.zeta), 200, "Hurwitz zeta function", measured=False, domain=((0.2, 6),), relative=1e-4),
    _binary("polygamma", _double(ops_special.polygamma), 250, "x-th derivative of digamma", measured=False,
            domain=(range(4), _ABOVE_POLE), relative=1e-4),
)  # fmt: skip

_TERNARY = (
    _ternary("select_n", _in_own_dtype(_select), 1, "(which, on false, on true)", DTYPES, "({0} ? {2} : {1})", mixes=True,
             cpu="select", folded=True),
    _ternary("clamp", _exact(lambda low, x, high: np.minimum(np.maximum(low, x), high)), 2,
             "(low, x, high): min(max(low, x), high)", DTYPES, "clamp({0}, {1}, {2})"),
    _ternary("regularized_incomplete_beta", _double(ops_special.regularized_incomplete_beta), 200, "I_x(a, b) of (a, b, x)",
             measured=False, domain=(POSITIVE, POSITIVE, (0, 0.99)), absolute=1e-5, relative=2e-3, jax=_lax(lax.betainc)),
)  # fmt: skip

_QUATERNARY = (
    _quaternary("threefry2x32", _with_word(threefry.hashed), 77,
                "(key 0, key 1, count 0, count 1) hashed; word: the first or the second of the result, or their xor", ("uint32",),
                "threefry_{word}({0}, {1}, {2}, {3})", cpu="threefry_{word}", exact=True, jax=_threefry_by_jax, like=("tanh", 7.0),
                opcodes=tuple(f"threefry_{word}" for word in threefry.WORDS),
                samples=lambda dtype: [{"word": word} for word in threefry.WORDS]),
)  # fmt: skip

_QUINARY = (
    _quinary("philox4x32", _in_own_dtype(philox.by_numpy), 82, "(key 0, key 1, count 0, count 1, place) bits of an rbg key",
             ("uint32",), "philox({0}, {1}, {2}, {3}, {4})", exact=True, jax=_lax(philox.by_jax), opcodes=(), like=("tanh", 10.0)),
)  # fmt: skip

_CONVERT = OpSpec(
    "convert_element_type",
    "convert",
    1,
    numeric.convert,
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

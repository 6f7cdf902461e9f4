"""The pointwise entries of the op table: one line each.

Comes in: nothing. Goes out: ``POINTWISE``, the entries by kind. Invariant: an operand is of full shape or of rank 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax import lax
from scipy import special

from kitsune_jax.graph import Op, Value
from kitsune_jax.ops import numeric as numeric
from kitsune_jax.ops import special as ops_special
from kitsune_jax.ops.relations import DimRelation
from kitsune_jax.ops.spec import (
    DTYPES,
    FLOATS,
    INTEGERS,
    Array,
    JaxRule,
    NumpyRule,
    OpSpec,
    Params,
    Shapes,
    arrays_of,
    np_dtype,
    round_to,
    to_double,
    widen,
)

SIGNED = ("int8", "int16", "int32", "int64")
NUMBERS = (*INTEGERS, *FLOATS)
SIGNED_NUMBERS = (*SIGNED, *FLOATS)
BITS = ("bool", *INTEGERS)

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


def _total(compare: Function) -> NumpyRule:
    return _in_own_dtype(lambda x, y: compare(numeric.total_order(x), numeric.total_order(y)))


def _select(which: Array, on_false: Array, on_true: Array) -> Array:
    return np.where(which >= 1, on_true, on_false)


def _unary() -> Iterator[OpSpec]:
    def entry(
        kind: str, numpy: NumpyRule, flops: float, cuda: str | None, doc: str, dtypes: tuple[str, ...], cpu: str = ""
    ) -> OpSpec:
        return OpSpec(kind, "pointwise", 1, numpy, relate_pointwise, flops, cpu or kind, cuda, doc, dtypes)

    yield entry("neg", _exact(np.negative), 1, "(-{0})", "-x", NUMBERS)
    yield entry("sign", _exact(numeric.sign), 2, None, "-1, 0 or 1; NaN and zeros stay", NUMBERS)
    yield entry("abs", _exact(np.abs), 1, "fabsf({0})", "|x|", SIGNED_NUMBERS)
    yield entry("floor", _exact(np.floor), 1, "floorf({0})", "largest integer <= x", FLOATS)
    yield entry("ceil", _exact(np.ceil), 1, "ceilf({0})", "least integer >= x", FLOATS)
    yield entry("round", _with_params(_round, "method"), 2, None, "nearest integer; method: away or even", FLOATS, "round_even")
    yield entry("is_finite", _exact(np.isfinite), 1, "isfinite({0})", "neither infinite nor NaN", FLOATS)
    yield entry("not", _exact(np.invert), 1, None, "complement; of bool negation", BITS)
    yield entry("population_count", _exact(numeric.population_count), 4, None, "number of ones", INTEGERS, "popcnt")
    yield entry("clz", _exact(numeric.count_leading_zeros), 4, None, "leading zeros", INTEGERS)
    yield entry("square", _exact(lambda x: x * x), 1, "({0} * {0})", "x * x", NUMBERS)
    yield entry("exp", _double(np.exp), 10, "expf({0})", "e**x", FLOATS)
    yield entry("exp2", _double(np.exp2), 9, "exp2f({0})", "2**x", FLOATS)
    yield entry("expm1", _double(np.expm1), 14, "expm1f({0})", "e**x - 1", FLOATS)
    yield entry("log", _double(np.log), 12, "logf({0})", "natural logarithm", FLOATS)
    yield entry("log1p", _double(np.log1p), 15, "log1pf({0})", "log(1 + x)", FLOATS)
    yield entry("sqrt", _exact(np.sqrt), 4, "sqrtf({0})", "square root", FLOATS)
    yield entry("rsqrt", _double(lambda x: 1 / np.sqrt(x)), 5, "rsqrtf({0})", "1 / sqrt(x)", FLOATS)
    yield entry("cbrt", _double(np.cbrt), 15, "cbrtf({0})", "cube root", FLOATS)
    yield entry("logistic", _double(special.expit), 14, "(1.0f / (1.0f + expf(-{0})))", "1 / (1 + e**-x)", FLOATS)
    yield entry("tanh", _double(np.tanh), 14, "tanhf({0})", "hyperbolic tangent", FLOATS)
    yield entry("sin", _double(np.sin), 15, "sinf({0})", "sine", FLOATS)
    yield entry("cos", _double(np.cos), 15, "cosf({0})", "cosine", FLOATS)
    yield entry("tan", _double(np.tan), 22, "tanf({0})", "tangent", FLOATS)
    yield entry("asin", _double(np.arcsin), 15, "asinf({0})", "inverse sine", FLOATS)
    yield entry("acos", _double(np.arccos), 15, "acosf({0})", "inverse cosine", FLOATS)
    yield entry("atan", _double(np.arctan), 15, "atanf({0})", "inverse tangent", FLOATS)
    yield entry("sinh", _double(np.sinh), 16, "sinhf({0})", "hyperbolic sine", FLOATS)
    yield entry("cosh", _double(np.cosh), 16, "coshf({0})", "hyperbolic cosine", FLOATS)
    yield entry("asinh", _double(np.arcsinh), 22, "asinhf({0})", "inverse hyperbolic sine", FLOATS)
    yield entry("acosh", _double(ops_special.acosh), 20, "acoshf({0})", "inverse hyperbolic cosine", FLOATS)
    yield entry("atanh", _double(np.arctanh), 20, "atanhf({0})", "inverse hyperbolic tangent", FLOATS)
    yield entry("erf", _double(special.erf), 16, "erff({0})", "error function", FLOATS)
    yield entry("erfc", _double(special.erfc), 24, "erfcf({0})", "1 - erf(x)", FLOATS)
    yield entry("erf_inv", _double(ops_special.erf_inv), 30, "erfinvf({0})", "inverse error function", FLOATS)
    yield entry("lgamma", _double(ops_special.lgamma), 40, "lgammaf({0})", "log |Gamma(x)|", FLOATS)
    yield entry("digamma", _double(ops_special.digamma), 60, None, "derivative of lgamma", FLOATS)
    yield entry("bessel_i0e", _double(special.i0e), 30, None, "e**-|x| I0(x)", FLOATS)
    yield entry("bessel_i1e", _double(special.i1e), 30, None, "e**-|x| I1(x)", FLOATS)
    yield entry(
        "integer_pow",
        _with_params(lambda x, y: numeric.integer_pow(widen(x), y), "y"),
        3,
        None,
        "x**y for a fixed integer y",
        NUMBERS,
    )
    yield entry(
        "reduce_precision",
        _with_params(numeric.reduce_precision, "exponent_bits", "mantissa_bits"),
        4,
        None,
        "rounded to exponent_bits and mantissa_bits",
        FLOATS,
    )
    copy = _in_own_dtype(lambda x: x)
    yield OpSpec("copy", "pointwise", 1, copy, relate_pointwise, 0, None, "({0})", "x itself", DTYPES)


def _binary() -> Iterator[OpSpec]:
    def entry(
        kind: str, numpy: NumpyRule, flops: float, cuda: str | None, doc: str, dtypes: tuple[str, ...], cpu: str | None = ""
    ) -> OpSpec:
        return OpSpec(kind, "pointwise", 2, numpy, relate_pointwise, flops, kind if cpu == "" else cpu, cuda, doc, dtypes)

    yield entry("add", _exact(np.add), 1, "({0} + {1})", "x + y", NUMBERS)
    yield entry("sub", _exact(np.subtract), 1, "({0} - {1})", "x - y", NUMBERS)
    yield entry("mul", _exact(np.multiply), 1, "({0} * {1})", "x * y", NUMBERS)
    yield entry("div", _exact(numeric.divide), 4, "({0} / {1})", "x / y; of integers towards zero, by zero all ones", NUMBERS)
    yield entry("rem", _exact(numeric.remainder), 12, "fmodf({0}, {1})", "remainder with the sign of x", NUMBERS)
    yield entry("max", _exact(np.maximum), 1, None, "the larger; NaN if either is", DTYPES)
    yield entry("min", _exact(np.minimum), 1, None, "the smaller; NaN if either is", DTYPES)
    yield entry("pow", _in_own_dtype(_power), 30, None, "x**y, y a float or an integer", FLOATS)
    yield entry("atan2", _double(np.arctan2), 20, "atan2f({0}, {1})", "angle of (y, x)", FLOATS)
    yield entry("nextafter", _in_own_dtype(numeric.next_after), 6, "nextafterf({0}, {1})", "neighbour of x towards y", FLOATS)
    yield entry("and", _exact(np.bitwise_and), 1, "({0} & {1})", "bitwise and", BITS)
    yield entry("or", _exact(np.bitwise_or), 1, "({0} | {1})", "bitwise or", BITS)
    yield entry("xor", _exact(np.bitwise_xor), 1, "({0} ^ {1})", "bitwise exclusive or", BITS)
    yield entry("shift_left", _exact(numeric.shift_left), 2, None, "0 for amounts beyond the bits", INTEGERS)
    yield entry("shift_right_logical", _exact(numeric.shift_right_logical), 2, None, "zeros from the left", INTEGERS)
    yield entry("shift_right_arithmetic", _exact(numeric.shift_right_arithmetic), 2, None, "the sign from the left", INTEGERS)
    yield entry("mulhi", _exact(numeric.multiply_high), 4, None, "high half of the product", INTEGERS, None)
    yield entry("eq", _exact(np.equal), 1, "({0} == {1})", "x == y", DTYPES)
    yield entry("ne", _exact(np.not_equal), 1, "({0} != {1})", "x != y", DTYPES)
    yield entry("lt", _exact(np.less), 1, "({0} < {1})", "x < y", DTYPES)
    yield entry("le", _exact(np.less_equal), 1, "({0} <= {1})", "x <= y", DTYPES)
    yield entry("gt", _exact(np.greater), 1, "({0} > {1})", "x > y", DTYPES)
    yield entry("ge", _exact(np.greater_equal), 1, "({0} >= {1})", "x >= y", DTYPES)
    yield entry("eq_to", _total(np.equal), 2, None, "equal in IEEE 754's total order", DTYPES, None)
    yield entry("lt_to", _total(np.less), 2, None, "before in IEEE 754's total order", DTYPES, None)
    yield entry("le_to", _total(np.less_equal), 2, None, "not after in IEEE 754's total order", DTYPES, None)
    yield entry("igamma", _double(ops_special.igamma), 200, None, "regularised lower incomplete gamma P(x, y)", FLOATS)
    yield entry("igammac", _double(ops_special.igammac), 200, None, "regularised upper incomplete gamma Q(x, y)", FLOATS)
    yield entry("zeta", _double(ops_special.zeta), 200, None, "Hurwitz zeta function", FLOATS)
    yield entry("polygamma", _double(ops_special.polygamma), 250, None, "x-th derivative of digamma", FLOATS)


def _ternary() -> Iterator[OpSpec]:
    clamp = _exact(lambda low, x, high: np.minimum(np.maximum(low, x), high))
    select = _in_own_dtype(_select)
    beta = _double(ops_special.regularized_incomplete_beta)
    pick = "({0} ? {2} : {1})"
    yield OpSpec("select_n", "pointwise", 3, select, relate_pointwise, 1, "select", pick, "(which, on false, on true)", DTYPES)
    yield OpSpec(
        "clamp", "pointwise", 3, clamp, relate_pointwise, 2, "clamp", None, "(low, x, high): min(max(low, x), high)", DTYPES
    )
    yield OpSpec(
        "regularized_incomplete_beta",
        "pointwise",
        3,
        beta,
        relate_pointwise,
        200,
        "regularized_incomplete_beta",
        None,
        "I_x(a, b) of (a, b, x)",
        FLOATS,
    )


def _convert() -> OpSpec:
    doc = "new_dtype; floats to integers truncate and saturate, NaN becomes 0"
    return OpSpec("convert_element_type", "convert", 1, numeric.convert, relate_pointwise, 1, "convert", None, doc, DTYPES)


def _lax(function: Function, **options: Callable[[Params, Value], Any]) -> JaxRule:
    """Evaluation by a function of ``jax.lax`` that has another name, or options as well: ``option=lambda params, out: value``."""

    def rule(params: Params, /, *arrays: Any, out: Value) -> Any:
        return function(*arrays, **{name: of(params, out) for name, of in options.items()})

    return rule


def _copy_by_jax(params: Params, /, x: Any, *, out: Value) -> Any:
    """Where XLA is told to keep the precision that ``x`` has, it may not compute ``x`` in more (``reduce_precision``)."""
    return lax.reduce_precision(x, **params) if params else x


_METHODS = {"even": lax.RoundingMethod.TO_NEAREST_EVEN, "away": lax.RoundingMethod.AWAY_FROM_ZERO}
_JAX: dict[str, JaxRule] = {
    "not": _lax(lax.bitwise_not),
    "and": _lax(lax.bitwise_and),
    "or": _lax(lax.bitwise_or),
    "xor": _lax(lax.bitwise_xor),
    "eq_to": _lax(lax.eq_to_p.bind),
    "lt_to": _lax(lax.lt_to_p.bind),
    "le_to": _lax(lax.le_to_p.bind),
    "regularized_incomplete_beta": _lax(lax.betainc),
    "round": _lax(lax.round, rounding_method=lambda params, _: _METHODS[params["method"]]),
    "integer_pow": _lax(lax.integer_pow, y=lambda params, _: params["y"]),
    "reduce_precision": lambda params, x, out: lax.reduce_precision(x, **params),
    "copy": _copy_by_jax,
    "convert_element_type": _lax(lax.convert_element_type, new_dtype=lambda params, _: np_dtype(params["new_dtype"])),
}
POINTWISE: dict[str, OpSpec] = {
    spec.kind: dataclasses.replace(spec, jax=_JAX.get(spec.kind)) for spec in (*_unary(), *_binary(), *_ternary(), _convert())
}

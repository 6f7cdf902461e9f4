"""The computation of each JAX primitive in plain NumPy.

One entry per primitive: ``(parameters of the equation, *operands) -> array or list of arrays``. Entries follow the documentation of
``jax.lax``; none calls JAX. ``EXACT`` names the primitives that do not round, ``SEVERAL`` those that round more than once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special

from trust.indexing import dynamic_slice, dynamic_update_slice, gather, scatter

Array = Any
Params = dict[str, Any]


class Unknown(Exception):
    """A primitive without an entry here: the program proves nothing."""


def _pointwise(f: Callable[..., Array]) -> Callable[..., Array]:
    return lambda params, *xs: f(*xs)


def _divide(a: Array, b: Array) -> Array:
    if np.issubdtype(a.dtype, np.floating):
        return a / b
    quotient = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)  # towards zero
    return np.sign(a) * np.sign(b) * quotient


def _logical(of_bools: Callable[..., Array], of_ints: Callable[..., Array]) -> Callable[..., Array]:
    return lambda params, *xs: (of_bools if xs[0].dtype == np.bool_ else of_ints)(*xs)


def _round(params: Params, x: Array) -> Array:
    if int(params["rounding_method"]) == 0:  # away from zero
        return np.sign(x) * np.floor(np.abs(x) + 0.5)
    return np.round(x)


def _convert(params: Params, x: Array) -> Array:
    to: Any = np.dtype(params["new_dtype"])
    if to == np.bool_:
        return x != 0
    if np.issubdtype(to, np.integer) and not np.issubdtype(x.dtype, np.integer) and x.dtype != np.bool_:
        return np.clip(np.nan_to_num(np.trunc(x)), np.iinfo(to).min, np.iinfo(to).max)
    return x


def _bitcast(params: Params, x: Array) -> Array:
    """Between floats and integers of 4 or 8 bytes, however the float is held. JAX clears a float's low bits this way."""
    to: Any = np.dtype(params["new_dtype"])
    floats = {4: np.float32, 8: np.float64}
    if to.itemsize not in floats:
        raise Unknown("bitcast_convert_type of 16 bits")
    return x.astype(floats[to.itemsize]).view(to) if np.issubdtype(x.dtype, np.floating) else x.view(to)


def _select(params: Params, which: Array, *cases: Array) -> Array:
    out = cases[0]
    for k, case in enumerate(cases[1:], 1):
        out = np.where(which == k, case, out)
    return out


def _broadcast(params: Params, x: Array, *_: Array) -> Array:
    shape = [1] * len(params["shape"])
    for at, n in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[at] = n
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _iota(params: Params, *_: Array) -> Array:
    shape, at = params["shape"], params["dimension"]
    return np.broadcast_to(np.arange(shape[at]).reshape([-1 if d == at else 1 for d in range(len(shape))]), shape)


def _pad(params: Params, x: Array, fill: Array) -> Array:
    for axis, (low, high, inner) in enumerate(params["padding_config"]):
        n = x.shape[axis]
        out = np.full((*x.shape[:axis], n + inner * max(n - 1, 0), *x.shape[axis + 1 :]), fill, x.dtype)
        out[(slice(None),) * axis + (slice(None, None, inner + 1),)] = x
        widths = [(0, 0)] * x.ndim
        widths[axis] = (max(low, 0), max(high, 0))
        out = np.pad(out, widths, constant_values=fill)
        keep = slice(max(-low, 0), out.shape[axis] - max(-high, 0))
        x = out[(slice(None),) * axis + (keep,)]
    return x


def _slice(params: Params, x: Array) -> Array:
    strides = params["strides"] or (1,) * x.ndim
    return x[tuple(slice(*s) for s in zip(params["start_indices"], params["limit_indices"], strides, strict=True))]


def _reduce(f: Callable[..., Array], empty: Callable[[Any], Any]) -> Callable[..., Array]:
    def reduce(params: Params, x: Array) -> Array:
        return f(x, axis=tuple(params["axes"]), initial=empty(x.dtype))

    return reduce


def _lowest(dtype: Any) -> Any:
    return False if dtype == np.bool_ else np.iinfo(dtype).min if np.issubdtype(dtype, np.integer) else -np.inf


def _highest(dtype: Any) -> Any:
    return True if dtype == np.bool_ else np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else np.inf


def _argument(f: Callable[..., Array]) -> Callable[..., Array]:
    return lambda params, x: f(x, axis=params["axes"][0])


def _cumulative(f: Callable[..., Array]) -> Callable[..., Array]:
    def run(params: Params, x: Array) -> Array:
        turned = np.flip(x, params["axis"]) if params["reverse"] else x
        out = f(turned, axis=params["axis"])
        return np.flip(out, params["axis"]) if params["reverse"] else out

    return run


def _dot(params: Params, a: Array, b: Array) -> Array:
    (contract_a, contract_b), (batch_a, batch_b) = params["dimension_numbers"]
    free_a = [i for i in range(a.ndim) if i not in (*batch_a, *contract_a)]
    free_b = [j for j in range(b.ndim) if j not in (*batch_b, *contract_b)]
    wide = np.promote_types(a.dtype, b.dtype)
    batch, rows, columns = (tuple(x.shape[i] for i in axes) for x, axes in ((a, batch_a), (a, free_a), (b, free_b)))
    terms = math.prod(a.shape[i] for i in contract_a)
    x = a.astype(wide).transpose(*batch_a, *free_a, *contract_a).reshape(math.prod(batch), math.prod(rows), terms)
    y = b.astype(wide).transpose(*batch_b, *contract_b, *free_b).reshape(math.prod(batch), terms, math.prod(columns))
    return np.matmul(x, y).reshape(batch + rows + columns)


def _sort(params: Params, *xs: Array) -> list[Array]:
    axis = params["dimension"]
    keys = xs[: params["num_keys"]]
    order = np.argsort(keys[0], axis=axis, kind="stable") if len(keys) == 1 else np.lexsort(keys[::-1], axis=axis)
    return [np.take_along_axis(x, order, axis) for x in xs]


def _top_k(params: Params, x: Array) -> list[Array]:
    axis = params.get("axis", x.ndim - 1)
    order = np.take(np.argsort(-x, axis=axis, kind="stable"), np.arange(params["k"]), axis)
    return [np.take_along_axis(x, order, axis), order]


def _polynomial(params: Params, x: Array, *coefficients: Array) -> Array:
    out = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        out = out * x + c
    return out


def _integer_pow(params: Params, x: Array) -> Array:
    """As JAX does: products by repeated squaring, each in the dtype of ``x``, then the reciprocal."""
    left, out = abs(params["y"]), np.ones_like(x)
    while left:
        out = out * x if left & 1 else out
        x, left = (x * x if left > 1 else x), left >> 1
    return out if params["y"] >= 0 else np.ones_like(out) / out


def _same(params: Params, *xs: Array) -> list[Array]:
    return list(xs)


_NAMED_AS_IN_NUMPY = (
    *("sin", "cos", "tan", "sinh", "cosh", "tanh", "exp", "exp2", "expm1", "log", "log1p", "log2", "sqrt", "cbrt"),
    *("abs", "sign", "floor", "ceil", "add", "multiply", "subtract", "maximum", "minimum", "square"),
)
_RENAMED: dict[str, Callable[..., Array]] = {
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "neg": np.negative,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": scipy.special.expit,
    "erf": scipy.special.erf,
    "erfc": scipy.special.erfc,
    "erf_inv": scipy.special.erfinv,
    "lgamma": scipy.special.gammaln,
    "digamma": scipy.special.digamma,
    "bessel_i0e": scipy.special.i0e,
    "bessel_i1e": scipy.special.i1e,
    "population_count": lambda x: np.bitwise_count(x),
    "clz": lambda x: np.vectorize(lambda n: 8 * x.itemsize - int(n).bit_length() if n >= 0 else 0, otypes=[x.dtype])(x),
    "shift_right_logical": lambda x, n: (x.view(f"u{x.itemsize}") >> n.view(f"u{n.itemsize}")).view(x.dtype),
    "polygamma": lambda n, x: scipy.special.polygamma(n.astype(np.int64), x),
    "one_minus_square": lambda x: 1 - x * x,
    "is_finite": np.isfinite,
    "mul": np.multiply,
    "sub": np.subtract,
    "add_any": np.add,
    "div": _divide,
    "rem": np.fmod,
    "pow": lambda a, b: np.power(a, b.astype(a.dtype) if np.issubdtype(a.dtype, np.floating) else b),
    "atan2": np.arctan2,
    "max": np.maximum,
    "min": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}

PRIMITIVES: dict[str, Callable[..., Any]] = {
    **{name: _pointwise(getattr(np, name)) for name in _NAMED_AS_IN_NUMPY},
    **{name: _pointwise(f) for name, f in _RENAMED.items()},
    "and": _logical(np.logical_and, np.bitwise_and),
    "or": _logical(np.logical_or, np.bitwise_or),
    "xor": _logical(np.logical_xor, np.bitwise_xor),
    "not": _logical(np.logical_not, np.bitwise_not),
    "polynomial": _polynomial,
    "integer_pow": _integer_pow,
    "round": _round,
    "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast,
    "reduce_precision": _same,
    "select_n": _select,
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "reshape": lambda p, x: (x if p["dimensions"] is None else np.transpose(x, p["dimensions"])).reshape(p["new_sizes"]),
    "squeeze": lambda p, x: np.squeeze(x, tuple(p["dimensions"])),
    "expand_dims": lambda p, x: np.expand_dims(x, tuple(p["dimensions"])),
    "transpose": lambda p, x: np.transpose(x, p["permutation"]),
    "rev": lambda p, x: np.flip(x, tuple(p["dimensions"])),
    "concatenate": lambda p, *xs: np.concatenate(xs, p["dimension"]),
    "stack": lambda p, *xs: np.stack(xs, p["axis"]),
    "unstack": lambda p, x: [np.take(x, i, p["axis"]) for i in range(x.shape[p["axis"]])],
    "tile": lambda p, x: np.tile(x, p["reps"]),
    "split": lambda p, x: list(np.split(x, np.cumsum(p["sizes"])[:-1], p["axis"])),
    "pad": _pad,
    "slice": _slice,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    "scatter": functools.partial(scatter, "set"),
    **{f"scatter{dash}{how}": functools.partial(scatter, how) for how in ("add", "sub", "mul", "max", "min") for dash in "-_"},
    "dot_general": _dot,
    "reduce_sum": _reduce(np.sum, lambda d: 0),
    "reduce_prod": _reduce(np.prod, lambda d: 1),
    "reduce_max": _reduce(np.max, _lowest),
    "reduce_min": _reduce(np.min, _highest),
    "reduce_and": lambda p, x: np.all(x, axis=tuple(p["axes"])),
    "reduce_or": lambda p, x: np.any(x, axis=tuple(p["axes"])),
    "argmax": _argument(np.argmax),
    "argmin": _argument(np.argmin),
    "cumsum": _cumulative(np.cumsum),
    "cumprod": _cumulative(np.cumprod),
    "cummax": _cumulative(np.maximum.accumulate),
    "cummin": _cumulative(np.minimum.accumulate),
    "cumlogsumexp": _cumulative(np.logaddexp.accumulate),
    "sort": _sort,
    "top_k": _top_k,
    "copy": _same,
    "copy_p": _same,
    "optimization_barrier": _same,
    "name": _same,
    "stop_gradient": _same,
    "empty": lambda p: np.zeros(p["shape"]),
    "empty2": lambda p: np.zeros(()),
    "tie": lambda p, x, y: y,
}

# Those that JAX makes of several operators, each of which rounds its result.
SEVERAL = frozenset({"integer_pow"})

EXACT = frozenset(
    (
        *("abs", "sign", "neg", "floor", "ceil", "round", "max", "min", "maximum", "minimum", "clamp", "select_n"),
        *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "is_finite", "convert_element_type", "iota"),
        "bitcast_convert_type",
        *("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev", "concatenate", "stack", "unstack", "tile"),
        *("split", "pad", "slice", "dynamic_slice", "dynamic_update_slice", "gather", "scatter", "scatter-max", "scatter-min"),
        *("reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin", "cummax", "cummin", "sort", "top_k"),
        *("copy", "copy_p", "optimization_barrier", "name", "stop_gradient", "empty", "empty2", "tie"),
    )
)

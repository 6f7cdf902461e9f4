"""Operators that compute: pointwise functions, products, norms, reductions, dtypes.

An entry of ``COMPUTE`` takes a ``Context`` and two values that stream, ``v`` and ``u``, and returns one or more values. Values stay
near 1 if their inputs do, and no branch depends on the last bit of a computed value, so that float64 is an oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trust.context import Context

Array = Any
Operator = Callable[[Context, Array, Array], Any]
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 15, 16, 17, 24, 31, 32, 33)


def matched(v: Array, u: Array) -> tuple[Array, Array]:
    """Both, cut to their common columns."""
    n = min(v.shape[-1], u.shape[-1])
    return v[..., :n], u[..., :n]


def heads(v: Array) -> tuple[Array, int]:
    """The columns of ``v`` as (heads, columns of one)."""
    n = v.shape[-1]
    h = next(k for k in (4, 3, 2, 1) if n % k == 0)
    return v.reshape(*v.shape[:-1], h, n // h), h


UNARY: tuple[Callable[[Array], Array], ...] = (
    jnp.tanh,
    jnp.sin,
    jnp.cos,
    lambda x: jnp.exp(-x * x),
    lambda x: jnp.exp(jnp.minimum(x, 1)),
    lambda x: jnp.log(jnp.abs(x) + 0.5),
    lambda x: jnp.log1p(x * x),
    lambda x: jnp.expm1(-jnp.abs(x)),
    lambda x: jnp.sqrt(x * x + 0.25),
    lambda x: lax.rsqrt(x * x + 0.25),
    lambda x: 1 / (1 + x * x),
    lambda x: x**3 / (1 + jnp.abs(x) ** 3),
    lambda x: jnp.exp2(-jnp.abs(x)),
    lambda x: jnp.cbrt(x * x + 0.1),
    lambda x: lax.erf(x),
    lambda x: lax.erfc(x),
    lambda x: lax.tan(0.5 * jnp.tanh(x)),
    lambda x: jnp.sinh(jnp.tanh(x)) - jnp.cosh(jnp.tanh(x)),
    lambda x: jnp.arctan(x),
    lambda x: jnp.arcsinh(x),
    lambda x: jnp.arctanh(0.5 * jnp.tanh(x)),
    lambda x: jnp.arcsin(0.5 * jnp.sin(x)),
    lambda x: -x,
    jnp.abs,
    lambda x: x * 1.5,
    lambda x: 2 - x,
    lambda x: x / 3,
    lambda x: jnp.square(x) * 0.25,
    lambda x: (x * x + 1) ** -2,
    lambda x: jnp.sign(x) * x,
    lambda x: x - lax.stop_gradient(x) * 0.5,
    lambda x: jnp.maximum(x, 0.1),
    lambda x: jnp.nan_to_num(x),
    lambda x: lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10),
    jnp.sinc,
)

ACTIVATIONS: tuple[Callable[[Array], Array], ...] = (
    jax.nn.relu,
    jax.nn.gelu,
    lambda x: jax.nn.gelu(x, approximate=False),
    jax.nn.silu,
    jax.nn.softplus,
    jax.nn.sigmoid,
    jax.nn.elu,
    jax.nn.leaky_relu,
    jax.nn.log_sigmoid,
    jax.nn.soft_sign,
    jax.nn.relu6,
    jax.nn.hard_tanh,
    jax.nn.celu,
    jax.nn.selu,
)

BINARY: tuple[Callable[[Array, Array], Array], ...] = (
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    lambda a, b: 2 * a * b,
    lambda a, b: a / (1 + b * b),
    jnp.maximum,
    jnp.minimum,
    lambda a, b: jnp.arctan2(a, b * b + 0.5),
    lambda a, b: jnp.power(jnp.abs(a) + 0.5, jnp.tanh(b)),
    jnp.logaddexp,
    lambda a, b: jnp.hypot(a, b) if a.dtype != jnp.float16 else jnp.sqrt(a * a + b * b + 0.1),
    lambda a, b: jnp.where(a > 0, a, b),
    lambda a, b: lax.clamp(-jnp.abs(b), a, jnp.abs(b) + 0.5),
    lambda a, b: a * jax.nn.sigmoid(b),
    lambda a, b: a + b.astype(jnp.bfloat16),
    lambda a, b: b - 0.5 * a + a * a * 0.1,
)


def _binary(c: Context, v: Array, u: Array) -> Any:
    return c.pick(*BINARY)(*matched(*c.pick((v, u), (u, v), (v, v))))


def _pair(c: Context, v: Array, u: Array) -> Any:
    """Two results of the same operands, in either order."""
    a, b = matched(v, u)
    return c.pick(
        lambda: (a * a, 2 * a * b),
        lambda: (a * 0.5, b * 0.5),
        lambda: (a + b, a - b),
        lambda: (b, a),
        lambda: (jnp.maximum(a, b), jnp.minimum(a, b)),
        lambda: (a, a),
    )()


def _compensated(c: Context, v: Array, u: Array) -> Any:
    """Arithmetic whose result is a rounding error, or depends on one: correctly rounded operators, one after the other."""
    a, b = matched(v, u)
    total = a + b
    part = total - a
    return c.pick(
        lambda: (total, (a - (total - part)) + (b - part)),  # Knuth's TwoSum
        lambda: (total, b - part),  # Fast2Sum
        lambda: a - jnp.floor(a / (b * b + 1)) * (b * b + 1),
        lambda: a * b - jnp.maximum(a, b) * jnp.minimum(a, b) + a,
        lambda: jnp.where(total > a, total - b, a * b) - a * 0.3,
        lambda: jnp.sqrt(a * a + b * b + 0.5) - jnp.abs(a),
        lambda: ((a * 0.3 + 0.7) * a - b) * 1.1 - a,
    )()


def _dense(c: Context, v: Array, u: Array) -> Any:
    k, n = v.shape[-1], c.pick(*WIDTHS)
    wide = jnp.promote_types(v.dtype, jnp.float32)
    y = c.pick(
        lambda: v @ c.param(k, n),
        lambda: jnp.dot(v, c.param(k, n)),
        lambda: jnp.einsum("...k,nk->...n", v, c.param(n, k)) / k**0.5,
        lambda: jnp.moveaxis(jnp.tensordot(c.param(k, n), v, ((0,), (v.ndim - 1,))), 0, -1),
        lambda: jnp.matmul(v, c.param(k, n), precision="highest"),
        lambda: jnp.matmul(v, c.param(k, n).astype(v.dtype), preferred_element_type=wide),
        lambda: (c.param(n, k) @ jnp.swapaxes(v, -1, -2)).swapaxes(-1, -2) / k**0.5,
        lambda: v @ (c.param(k, n) * 0.5 + 0.25 * c.param(n)),
    )()
    bias = c.pick(True, False)
    return y + c.stationary(c.below(12), n) if bias else y


def _odd_product(c: Context, v: Array, u: Array) -> Any:
    """Products with literals, without contraction, of rank 0 and 1, outer products."""
    k = v.shape[-1]
    a, b = matched(v, u)
    n = a.shape[-1]
    m = c.pick(1, 2, 3, 5)
    return c.pick(
        lambda: v @ jnp.eye(k, dtype=v.dtype),
        lambda: jnp.dot(v, 0.5),
        lambda: jnp.dot(0.5, v),
        lambda: jnp.dot(v, jnp.full((k,), 1 / k, v.dtype))[..., None] * 0.5,
        lambda: jnp.dot(v, c.param(k))[..., None] / k**0.5,
        lambda: v @ jnp.outer(c.param(k), c.param(m)) / k,
        lambda: v @ jnp.full((k, m), 1 / k, v.dtype),
        lambda: v * jnp.outer(c.param(m), c.param(k))[0],
        lambda: jnp.einsum("...i,j->...ij", v, c.param(m)).reshape(*v.shape[:-1], k * m),
        lambda: jnp.einsum("...i,i->...i", v, c.param(k)),
        lambda: jnp.einsum("...i,...i->...", a, b)[..., None] / n,
        lambda: jnp.einsum("...i,...j->...ij", a, b[..., :m]).reshape(*a.shape[:-1], -1),
        lambda: v * jnp.vdot(c.param(k), c.param(k)) / k,
        lambda: v * jnp.dot(c.param(m, k).T, c.param(m)) / m,
        lambda: v / (1 + jnp.einsum("ij,ij->", *(c.param(m, k),) * 2)),
        lambda: v + jnp.vdot(a, b) / max(1, a.size),
        lambda: v * jnp.inner(c.param(k), jnp.ones((k,), v.dtype)) / k,
        lambda: v @ jnp.diag(c.param(k)),
        lambda: jnp.kron(c.param(2), c.param(3))[:1] * v,
    )()


def _heads(c: Context, v: Array, u: Array) -> Any:
    y, h = heads(v)
    d = v.shape[-1] // h
    m = c.pick(1, 3, 4, 7)
    return c.pick(
        lambda: jnp.einsum("...hd,hdm->...hm", y, c.param(h, d, m)).reshape(*v.shape[:-1], -1),
        lambda: jnp.einsum("...hd,hdm->...mh", y, c.param(h, d, m)).reshape(*v.shape[:-1], -1),
        lambda: jnp.einsum("...hd,hdm->...m", y, c.param(h, d, m)),
        lambda: jnp.einsum("...hd,dm->...mh", y, c.param(d, m)).reshape(*v.shape[:-1], -1),
        lambda: jnp.einsum("...hd,...kd->...hk", y, y).reshape(*v.shape[:-1], h * h) / d,
        lambda: jnp.einsum("...hd,h->...d", y, c.param(h)),
    )()


def _rows_product(c: Context, v: Array, u: Array) -> Any:
    """Products that contract the rows, like a weight gradient, and operators that read their results."""
    a = v.reshape(-1, v.shape[-1])
    b = u.reshape(-1, u.shape[-1])
    r = max(1, a.shape[0])
    return c.pick(
        lambda: a.T @ b / r,
        lambda: jnp.einsum("rm,rn->nm", a, b) / r,
        lambda: v @ (a.T @ b) / r,
        lambda: jnp.einsum("rm,r->m", a, b[:, 0]) / r,
        lambda: (jnp.vdot(a, a) / r, v),
        lambda: jnp.einsum("...tm,...tn->...mn", v, u).sum(tuple(range(v.ndim - 2))) / r,
        lambda: jax.nn.softmax(a[:8] @ a[:8].T / 4, axis=-1) @ b[:8] if r >= 8 else b,
    )()


def _attention(c: Context, v: Array, u: Array) -> Any:
    """Attention over the last leading axis."""
    k = c.pick(2, 4, 5)
    query, key = v @ c.param(v.shape[-1], k), u @ c.param(u.shape[-1], k)
    weights = jax.nn.softmax(jnp.einsum("...tk,...sk->...ts", query, key) / k**0.5, axis=-1)
    return jnp.einsum("...ts,...sd->...td", weights, v)


def _norm(c: Context, v: Array, u: Array) -> Any:
    k = v.shape[-1]

    def layer_norm(x: Array) -> Array:
        mean, var = x.mean(-1, keepdims=True), jnp.var(x, -1, keepdims=True)
        return (x - mean) * lax.rsqrt(var + 0.1) * c.param(k) + c.param(k)

    def rms_norm(x: Array) -> Array:
        return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 0.1) * c.param(k)

    def batch_norm(x: Array) -> Array:
        axes = tuple(range(x.ndim - 1))
        return (x - x.mean(axes)) * lax.rsqrt(jnp.var(x, axes) + 0.1) * c.param(k)

    def unit(x: Array) -> Array:
        return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 0.1)

    def standardised(x: Array) -> Array:
        return jax.nn.standardize(x, axis=-1, epsilon=0.1)

    if 0 in v.shape:
        return rms_norm(v)
    return c.pick(layer_norm, rms_norm, jax.nn.softmax, jax.nn.log_softmax, batch_norm, unit, standardised)(v)


def _row_statistic(c: Context, v: Array, u: Array) -> Any:
    """One number per row, and back to the columns."""
    reduce = c.pick(
        jnp.mean,
        lambda x, **k: jnp.sum(x, **k) / x.shape[-1],
        jnp.max,
        jnp.min,
        jax.scipy.special.logsumexp,
        lambda x, **k: jnp.sqrt(jnp.var(x, **k) + 0.1),
        lambda x, **k: jnp.prod(1 + 0.1 * jnp.tanh(x), **k),
        lambda x, **k: jnp.sum(jnp.abs(x), **k) / x.shape[-1],
        lambda x, **k: jnp.any(x > 5, **k).astype(x.dtype) + jnp.all(x > -5, **k).astype(x.dtype),
    )
    y = reduce(v, axis=-1, keepdims=True)
    return c.pick(lambda: y, lambda: v - 0.5 * jnp.tanh(y), lambda: y * u, lambda: (y[..., 0], v))()


def _rows_statistic(c: Context, v: Array, u: Array) -> Any:
    """A reduction over rows, or over everything; and perhaps back to the rows."""
    if v.size == 0:
        return jnp.sum(v, axis=0)
    axes = c.pick(tuple(range(v.ndim - 1)), (0,), tuple(range(v.ndim)), (v.ndim - 2,))
    n = int(np.prod([v.shape[a] for a in axes]))
    reduce = c.pick(jnp.mean, lambda x, a: jnp.sum(x, a) / n, jnp.max, jnp.min, lambda x, a: jnp.mean(x * x, a))
    y = reduce(v, axes)
    return c.pick(lambda: y, lambda: (y, v - 0.5 * jnp.broadcast_to(jnp.expand_dims(y, axes), v.shape)))()


def _cumulative(c: Context, v: Array, u: Array) -> Any:
    n = v.shape[-1]
    axis = v.ndim - 1 if c.below(5) else v.ndim - 2
    reverse = c.pick(False, True)
    return c.pick(
        lambda: lax.cumsum(v, axis, reverse) / n,
        lambda: lax.cummax(v, axis, reverse),
        lambda: lax.cummin(v, axis, reverse),
        lambda: lax.cumlogsumexp(v, axis, reverse),
        lambda: lax.cumprod(1 + 0.1 * jnp.tanh(v), axis, reverse),
        lambda: jnp.diff(v, axis=-1, prepend=0),
    )()


def _scale(c: Context, v: Array, u: Array) -> Any:
    k = v.shape[-1]
    digit = c.below(12)
    return c.pick(
        lambda: v * c.stationary(digit, k),
        lambda: v + c.stationary(digit, k),
        lambda: v * c.param() + c.param(),
        lambda: v + c.param(*v.shape[1:]),
        lambda: v * c.param(*v.shape[:1], *(1,) * (v.ndim - 1)) if v.shape[0] else v,
        lambda: v + c.row(1),
        lambda: v * c.row(k),
        lambda: v + 0.1 * lax.broadcasted_iota(v.dtype, v.shape, digit % v.ndim) / max(1, v.shape[digit % v.ndim]),
        lambda: v + jnp.arange(k, dtype=v.dtype) / k,
        lambda: v - c.others[digit % len(c.others)].sum().astype(v.dtype) * 0.1 if c.others else v - c.param(1),
        lambda: jnp.clip(v, -1.25, 0.75),
        lambda: jnp.clip(v, c.param() * 0.1 - 1, 1.0),
    )()


def _dtype(c: Context, v: Array, u: Array) -> Any:
    """Casts, and some of them back."""
    to = c.pick(jnp.bfloat16, jnp.float16, jnp.float32)
    a, b = matched(v, u)
    return c.pick(
        lambda: v.astype(to),
        lambda: jnp.sin(v.astype(to)).astype(v.dtype),
        lambda: a.astype(to) * b.astype(jnp.float32),
        lambda: (v.astype(to) @ c.param(v.shape[-1], 5).astype(to)).astype(v.dtype),
        lambda: jnp.sum(v.astype(to), axis=-1, keepdims=True) / v.shape[-1],
        lambda: jnp.mean(v.astype(to).astype(jnp.float32), axis=-1, keepdims=True, dtype=jnp.float32),
    )()


def _rare(c: Context, v: Array, u: Array) -> Any:
    """Rare functions and reductions, where they are smooth; and roundings of an input, which is exact."""
    x, positive, small = c.rows[0], jnp.abs(v) + 0.5, 0.9 * jnp.tanh(v)
    axis = (v.ndim - 1,)
    return c.pick(
        lambda: lax.acos(small),
        lambda: lax.asin(small),
        lambda: lax.acosh(positive + 1),
        lambda: lax.asinh(v),
        lambda: lax.atan(v),
        lambda: lax.atanh(small),
        lambda: lax.cosh(small) - lax.sinh(small),
        lambda: lax.cbrt(positive),
        lambda: lax.erf(v) * 0.5 + lax.erfc(v),
        lambda: lax.erf_inv(small),
        lambda: lax.lgamma(positive),
        lambda: lax.digamma(positive),
        lambda: lax.bessel_i0e(v) - lax.bessel_i1e(v),
        lambda: lax.exp2(small) * lax.expm1(small),
        lambda: lax.log(positive) + lax.log1p(positive),
        lambda: lax.tan(small) * lax.logistic(v),
        lambda: lax.floor(x) * 0.25,
        lambda: lax.ceil(x) * 0.25 + v[..., :1],
        lambda: jnp.round(x * 4) * 0.25,
        lambda: jnp.trunc(x) - lax.sign(x),
        lambda: lax.rem(v, jnp.full_like(v, 64.0)),
        lambda: lax.reduce_prod(1 + 0.1 * small, axis)[..., None] * u,
        lambda: lax.reduce_min(v, axis)[..., None] + u,
        lambda: lax.reduce_max(v, axis)[..., None] - v,
        lambda: lax.cumprod(1 + 0.1 * small, axis[0]),
        lambda: lax.cummin(v, axis[0]),
        lambda: lax.cumlogsumexp(v, axis[0]),
        lambda: jnp.where(jnp.isfinite(v), v, 0.0),
    )()


COMPUTE: dict[str, Operator] = {
    "unary": lambda c, v, u: c.pick(*UNARY)(v),
    "activation": lambda c, v, u: c.pick(*ACTIVATIONS)(v),
    "binary": _binary,
    "pair": _pair,
    "compensated": _compensated,
    "dense": _dense,
    "odd_product": _odd_product,
    "heads": _heads,
    "rows_product": _rows_product,
    "attention": _attention,
    "norm": _norm,
    "row_statistic": _row_statistic,
    "rows_statistic": _rows_statistic,
    "cumulative": _cumulative,
    "scale": _scale,
    "dtype": _dtype,
    "rare": _rare,
}

"""Special functions in float64, with XLA's values at poles and outside the domain where SciPy's differ.

Comes in: float64 arrays. Goes out: float64 arrays. Invariant: NaN in, NaN out, and no warnings.
"""

from __future__ import annotations

import numpy as np
from scipy import special

from kitsune_jax.ops.spec import Array

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
    """The n-th derivative of digamma, (-1)**(n + 1) n! zeta(n + 1, x); NaN where n is no integer >= 0."""
    whole = (n >= 0) & (np.floor(n) == n)
    order = np.where(whole, n, 1.0)
    sign = np.where(np.fmod(order, 2) == 0, -1.0, 1.0)
    higher = sign * np.exp(special.gammaln(order + 1)) * zeta(order + 1, x)
    return np.where(whole, np.where(order == 0, digamma(x), higher), np.nan)


def regularized_incomplete_beta(a: Array, b: Array, x: Array) -> Array:
    """I_x(a, b); NaN unless a > 0, b > 0 and 0 <= x <= 1."""
    valid = (a > 0) & (b > 0) & (x >= 0) & (x <= 1)
    return np.where(valid, special.betainc(np.abs(a), np.abs(b), np.clip(x, 0, 1)), np.nan)

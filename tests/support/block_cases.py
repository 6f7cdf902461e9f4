"""Functions with a long dimension that a CPU plan may work off in blocks, for gradients by any of their operands.

Comes in: nothing. Goes out: ``CASES``, name -> ``BlockCase``. Invariants: the last operand is a cotangent, which
nobody differentiates by; every other operand has a gradient that is not zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = Any
Shape = tuple[int, ...]
WIDE = {"preferred_element_type": jnp.float32}


class BlockCase(NamedTuple):
    """``function``: of the operands without the cotangent. ``shapes``: of all operands, by the length of the long dimension."""

    function: Callable[..., Array]
    shapes: Callable[[int], tuple[Shape, ...]]


def softmax(scores: Array, like: Array) -> Array:
    return jax.nn.softmax(scores).astype(like.dtype)


def scores_of(q: Array, k: Array) -> Array:
    return jnp.einsum("...td,...jd->...tj", q, k, **WIDE) * q.shape[-1] ** -0.5


def heads_first(q: Array, k: Array, v: Array) -> Array:
    return jnp.einsum("...tj,...jd->...td", softmax(scores_of(q, k), v), v)


def tokens_first(q: Array, k: Array, v: Array) -> Array:
    scores = jnp.einsum("bthd,bjhd->bhtj", q, k, **WIDE) * q.shape[-1] ** -0.5
    return jnp.einsum("bhtj,bjhd->bthd", softmax(scores, v), v)


def of_unscaled_scores(q: Array, k: Array, v: Array) -> Array:
    return jnp.einsum("htj,hjd->htd", softmax(jnp.einsum("htd,hjd->htj", 0.3 * q, k, **WIDE), v), v)


def masked(fill: float, window: int | None = None) -> Callable[..., Array]:
    def function(q: Array, k: Array, v: Array) -> Array:
        s = scores_of(q, k)
        i, j = jnp.arange(s.shape[-2])[:, None], jnp.arange(s.shape[-1])
        seen = j <= i if window is None else (j <= i) & (i - j < window)
        return jnp.einsum("...tj,...jd->...td", softmax(jnp.where(seen, s, fill), v), v)

    return function


def causal_with_bias(q: Array, k: Array, v: Array, bias: Array) -> Array:
    s = scores_of(q, k) + bias
    return jnp.einsum("htj,hjd->htd", softmax(jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf), v), v)


def with_bias(q: Array, k: Array, v: Array, bias: Array) -> Array:
    return jnp.einsum("htj,hjd->htd", softmax(scores_of(q, k) + bias, v), v)


def with_scale_and_bias(q: Array, k: Array, v: Array, scale: Array, bias: Array) -> Array:
    return jnp.einsum("htj,hjd->htd", softmax(scores_of(q, k) * scale + bias, v), v)


def shared_keys(q: Array, k: Array, v: Array) -> Array:
    return jnp.einsum("htj,jd->htd", softmax(jnp.einsum("htd,jd->htj", q, k, **WIDE) * q.shape[-1] ** -0.5, v), v)


def keys_of_each_row(q: Array, k: Array, v: Array) -> Array:
    return jnp.einsum("rj,rjd->rd", softmax(jnp.einsum("rd,rjd->rj", q, k, **WIDE), v), v)


def classes(x: Array, w: Array, b: Array) -> Array:
    return jax.nn.log_softmax(x @ w + b)


def classes_by_embedding(x: Array, table: Array) -> Array:
    return jax.nn.log_softmax(x @ table.T)


def normalised(x: Array) -> Array:
    away = x - x.mean(-1, keepdims=True)
    return away * jax.lax.rsqrt((away * away).mean(-1, keepdims=True) + 1e-2)


def norm(x: Array, gain: Array, shift: Array) -> Array:
    return jnp.tanh(normalised(x) * gain + shift)


def norm_in_front_of_a_product(x: Array, gain: Array, w: Array) -> Array:
    return jnp.tanh((normalised(x) * gain) @ w * x.shape[-1] ** -0.5)


def weights_of_places(x: Array, gain: Array) -> Array:
    return jax.nn.softmax(x * gain) * x.max(-1, keepdims=True)


CASES: dict[str, BlockCase] = {
    "heads": BlockCase(heads_first, lambda n: ((3, n, 16),) * 4),
    "many heads": BlockCase(of_unscaled_scores, lambda n: ((8, n, 32),) * 4),
    "one head": BlockCase(heads_first, lambda n: ((n, 16),) * 4),
    "heads of one element": BlockCase(heads_first, lambda n: ((2, n, 1),) * 4),
    "values of one element": BlockCase(heads_first, lambda n: ((2, 37, 8), (2, n, 8), (2, n, 1), (2, 37, 1))),
    "batches and heads": BlockCase(tokens_first, lambda n: ((2, n, 2, 8),) * 4),
    "few queries": BlockCase(heads_first, lambda n: ((2, 31, 20), (2, n, 20), (2, n, 20), (2, 31, 20))),
    "keys of all heads": BlockCase(shared_keys, lambda n: ((3, 29, 16), (n, 16), (n, 16), (3, 29, 16))),
    "causal": BlockCase(masked(-math.inf), lambda n: ((2, n, 16),) * 4),
    "causal, one head": BlockCase(masked(-math.inf), lambda n: ((n, 16),) * 4),
    "a window of low numbers": BlockCase(masked(-1e38, 40), lambda n: ((2, n, 16),) * 4),
    "causal with a bias": BlockCase(causal_with_bias, lambda n: (*((2, n, 8),) * 3, (n, n), (2, n, 8))),
    "a bias of keys": BlockCase(with_bias, lambda n: ((2, 33, 16), (2, n, 16), (2, n, 16), (n,), (2, 33, 16))),
    "a bias of scores": BlockCase(with_bias, lambda n: ((2, 33, 16), (2, n, 16), (2, n, 16), (2, 33, n), (2, 33, 16))),
    # A scale of a whole head has a gradient of 0.4 that is the sum of terms of 130: 1e-5 off by any way of adding them up.
    "a scale of queries and a bias": BlockCase(
        with_scale_and_bias, lambda n: ((2, 33, 8), (2, n, 8), (2, n, 8), (2, 33, 1), (2, 1, n), (2, 33, 8))
    ),
    "keys of each row": BlockCase(keys_of_each_row, lambda n: ((41, 8), (41, n, 8), (41, n, 8), (41, 8))),
    "classes": BlockCase(classes, lambda n: ((133, 12), (12, n), (n,), (133, n))),
    "classes by embedding": BlockCase(classes_by_embedding, lambda n: ((133, 12), (n, 12), (133, n))),
    "norm": BlockCase(norm, lambda n: ((133, n), (n,), (n,), (133, n))),
    "norm in front of a product": BlockCase(norm_in_front_of_a_product, lambda n: ((133, n), (n,), (n, 12), (133, 12))),
    "weights of places": BlockCase(weights_of_places, lambda n: ((133, n), (n,), (133, n))),
}


def subsets(name: str) -> list[tuple[int, ...]]:
    """Every choice of operands to differentiate by, the cotangent never among them."""
    operands = range(len(CASES[name].shapes(256)) - 1)
    return [by for k in range(1, len(operands) + 1) for by in itertools.combinations(operands, k)]

"""Kernel families of attention, beside those of ``cuda_cases``: their keys are worked off in blocks, under a plan of their own.

Queries are the rows; keys and values are as many whatever the rows are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.support.cuda_cases import Arg, Family

Array = Any
_KEYS = 300


def causal(q: Array, k: Array, v: Array) -> Array:
    """[tokens, heads, size]; a query sees the keys up to as many before the last one as there are queries behind it."""
    seen = jnp.arange(len(q))[:, None] + (len(k) - len(q)) >= jnp.arange(len(k))
    return _attention(q, k, v, seen)


def window(q: Array, k: Array, v: Array) -> Array:
    away = jnp.arange(len(q))[:, None] + (len(k) - len(q)) - jnp.arange(len(k))
    return _attention(q, k, v, (away >= 0) & (away < 70))


def padded(lengths: Array, q: Array, k: Array, v: Array) -> Array:
    """Every head has keys of its own number, and a cap on its scores."""
    return _attention(q, k, v, jnp.arange(len(k))[None, None, :] < 1 + lengths[:, None, None], cap=5.0)


def _attention(q: Array, k: Array, v: Array, seen: Array, cap: float = 0.0) -> Array:
    scores = jnp.einsum("qhd,khd->hqk", q, k).astype(jnp.promote_types(q.dtype, jnp.float32)) * q.shape[-1] ** -0.5
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(q.dtype)
    return jnp.einsum("hqk,khd->qhd", weights, v)


def _args(dim: int, dim_v: int) -> tuple[Arg, ...]:
    return Arg((-1, 2, dim)), Arg((_KEYS, 2, dim)), Arg((_KEYS, 2, dim_v))


ATTENTION = {
    family.name: family
    for family in (
        Family("attention-causal", causal, _args(32, 32)),
        Family("attention-window", window, _args(16, 40)),
        Family("attention-padded", padded, (Arg((2,), "int32", classes=_KEYS), *_args(32, 16))),
    )
}

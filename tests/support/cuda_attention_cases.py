"""Kernel families of attention, beside those of ``cuda_cases``: their keys are worked off in blocks, under a plan of their own.

Queries are the rows; keys and values are as many whatever the rows are. In the gradient by keys and values it is the other way
round.
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


def by_keys(k: Array, v: Array, q: Array, do: Array, largest: Array, total: Array, term: Array) -> tuple[Array, Array]:
    """Gradients by k and v [keys, heads, size], given statistics of the queries [heads, queries]; causal."""
    p, ds = _of_scores(q, k, v, do, largest, total, term)
    return jnp.einsum("hqk,qhd->khd", ds, q), jnp.einsum("hqk,qhd->khd", p, do)


def by_queries(q: Array, do: Array, k: Array, v: Array, largest: Array, total: Array, term: Array) -> tuple[Array]:
    """The gradient by q, likewise."""
    return (jnp.einsum("hqk,khd->qhd", _of_scores(q, k, v, do, largest, total, term)[1], k),)


def _of_scores(q: Array, k: Array, v: Array, do: Array, largest: Array, total: Array, term: Array) -> tuple[Array, Array]:
    """The weights and the gradient by the scores, [heads, queries, keys]."""
    wide, scale = jnp.promote_types(q.dtype, jnp.float32), q.shape[-1] ** -0.5
    seen = jnp.arange(len(q))[:, None] + max(0, len(k) - len(q)) >= jnp.arange(len(k))
    scores = jnp.where(seen, jnp.einsum("qhd,khd->hqk", q, k).astype(wide) * scale, -jnp.inf)
    p = jnp.exp(scores - largest[..., None]) / jnp.exp(total)[..., None]
    ds = p * (jnp.einsum("qhd,khd->hqk", do, v).astype(wide) - term[..., None]) * scale
    return p.astype(q.dtype), ds.astype(q.dtype)


def _statistics(rows: int) -> tuple[Arg, ...]:
    return (Arg((2, rows), "float32"),) * 3


ATTENTION_GRADIENTS = {
    family.name: family
    for family in (
        Family("attention-by-keys", by_keys, (*[Arg((-1, 2, 24))] * 2, *[Arg((_KEYS, 2, 24))] * 2, *_statistics(_KEYS))),
        Family("attention-by-queries", by_queries, (*[Arg((-1, 2, 40))] * 2, *[Arg((_KEYS, 2, 40))] * 2, *_statistics(-1))),
    )
}

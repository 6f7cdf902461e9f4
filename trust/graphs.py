"""Operators over graphs and tables: gathers by indices that stream, reductions over segments, products of each row with itself.

The entries of ``GRAPH`` have the form of those of ``operators.COMPUTE``. Indices are random, sorted, all equal, below 0 or beyond
the end; those out of range are read and written in modes that define the result.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trust.context import Context
from trust.operators import Operator, matched

Array = Any


def _ids(c: Context, below: int) -> Array:
    """One index for each row, some of them perhaps out of range."""
    ids = c.integers(c.below(6), below).reshape(-1)
    return c.pick(
        lambda: ids,
        lambda: ids,
        lambda: jnp.sort(ids),
        lambda: jnp.zeros_like(ids) + below // 2,
        lambda: ids - 1,
        lambda: ids * 3,
        lambda: -1 - ids,
        lambda: below + ids * 100_000,
        lambda: jnp.where(ids % 2 == 0, 0, ids),
        lambda: ids.astype(jnp.int8),
    )()


def _rows(v: Array) -> tuple[Array, float]:
    """(the rows of ``v``, the square root of their number)."""
    flat = v.reshape(-1, v.shape[-1])
    return flat, max(1, flat.shape[0]) ** 0.5


def _table(c: Context, v: Array, u: Array) -> Any:
    """Rows of tables that are arguments."""
    k, n = c.pick(1, 2, 7, 40), v.shape[-1]
    flat, _ = _rows(v)
    ids, others = _ids(c, k), _ids(c, n)
    fill = c.pick(0.5, None, -2)
    table = c.param(k, n)
    clipped = jnp.nan_to_num(table.at[ids].get(mode="clip"))
    return c.pick(
        lambda: (flat * clipped).reshape(v.shape),
        lambda: (flat + jnp.take(table, ids, axis=0, mode="fill", fill_value=0.25)).reshape(v.shape),
        lambda: flat + jnp.nan_to_num(jnp.take(table, ids, axis=0, mode="fill", fill_value=fill)),
        lambda: flat * table.at[ids, others].get(mode="clip")[:, None],
        lambda: flat * table.at[ids, others].get(mode="fill", fill_value=1.0)[:, None],
        lambda: jnp.take(table, ids.reshape(-1, 1) + jnp.arange(2, dtype=ids.dtype), axis=0, mode="clip").sum(1) * flat,
        lambda: jnp.take(table, ids, axis=1, mode="clip").T @ c.param(k, 3),
        lambda: jax.vmap(lambda i, row: lax.dynamic_index_in_dim(table, i, keepdims=False) * row)(ids, flat),
        lambda: table.at[jnp.clip(ids, 0, k - 1)].add((flat * 0.1).astype(table.dtype)),
    )()


def _segment(c: Context, v: Array, u: Array) -> Any:
    """Reductions over segments, also by two kinds of indices, and operators on their results."""
    k = c.pick(1, 3, 6, 50)
    flat, scale = _rows(v)
    ids, others = _ids(c, k), _ids(c, k)
    x = c.rows[0].reshape(-1, c.rows[0].shape[-1])
    mode = c.pick("drop", "clip")

    def finite(a: Array) -> Array:
        return jnp.where(jnp.isfinite(a), a, 0.0)

    def summed(a: Array, i: Array) -> Array:
        return jax.ops.segment_sum(a, i, k, mode=mode) / scale

    def read(table: Array, i: Array) -> Array:
        return table.at[i].get(mode="clip")

    return c.pick(
        lambda: summed(flat, ids),
        lambda: (summed(flat, ids), summed(jnp.sin(flat), others)),
        lambda: (flat + read(summed(flat, ids), others)).reshape(v.shape),
        lambda: (flat + read(summed(flat * read(c.param(k, v.shape[-1]), others), ids), ids)).reshape(v.shape),
        lambda: finite(jax.ops.segment_max(x, ids, k)),
        lambda: finite(jax.ops.segment_min(x, ids, k)) + finite(jax.ops.segment_max(-x, others, k)),
        lambda: jax.ops.segment_prod(lax.stop_gradient(1 + 0.1 * jnp.tanh(x)), ids, k),
        lambda: c.param(k, v.shape[-1]).astype(v.dtype).at[ids].add(flat / scale, mode=mode),
        lambda: jnp.zeros((v.shape[-1], k), v.dtype).at[:, ids].add(flat.T / scale, mode=mode),
        lambda: jnp.zeros((k, 4), v.dtype).at[ids, others % 4].add(flat[:, 0] / scale, mode=mode),
        lambda: jax.ops.segment_sum(jnp.ones_like(ids), ids, k),
        lambda: jnp.zeros((k, v.shape[-1]), v.dtype).at[ids].subtract(jnp.tanh(flat) / scale),
    )()


def _message(c: Context, v: Array, u: Array) -> Any:
    """A step of message passing, and attention: a softmax over the rows that share an index."""
    k, n = c.pick(1, 4, 23), v.shape[-1]
    flat, scale = _rows(v)
    senders, receivers = (jnp.clip(_ids(c, k), 0, k - 1) for _ in range(2))
    nodes, w = c.param(k, n), c.param(3 * n, 5)

    def step() -> Array:
        messages = jnp.tanh(jnp.concatenate([flat, nodes[senders], nodes[receivers]], -1) @ w)
        return jax.ops.segment_sum(messages, receivers, k) / scale

    def attention(scores: Array) -> Array:
        most = lax.stop_gradient(jax.ops.segment_max(scores, receivers, k))
        weights = jnp.exp(scores - most[receivers])
        return weights / jax.ops.segment_sum(weights, receivers, k)[receivers]

    return c.pick(
        step,
        lambda: (flat + 0.5 * nodes[senders] - nodes[receivers]).reshape(v.shape),
        lambda: attention(jnp.tanh(flat)).reshape(v.shape),
        lambda: jax.ops.segment_sum(attention(jnp.tanh(flat[:, 0]))[:, None] * nodes[senders], receivers, k),
        lambda: (flat * (step() @ c.param(5, n))[senders]).reshape(v.shape),
    )()


def _interaction(c: Context, v: Array, u: Array) -> Any:
    """Products of each row's own vectors, and a selection among them."""
    a, b = matched(v, u)
    n = a.shape[-1]
    k = c.pick(2, 5)
    looked = c.param(k, n)[jnp.clip(_ids(c, k), 0, k - 1)].reshape(*v.shape[:-1], n)
    vectors = jnp.stack([a, b.astype(a.dtype), looked.astype(a.dtype)], -2)
    products = jnp.einsum("...if,...jf->...ij", vectors, vectors) / n
    rows, columns = np.tril_indices(3, c.pick(0, -1))
    return c.pick(
        lambda: products.reshape(*v.shape[:-1], 9),
        lambda: products[..., rows, columns],
        lambda: jnp.einsum("...if,...f->...i", vectors, a) / n,
        lambda: jnp.einsum("...ij,...jf->...if", products, vectors).reshape(*v.shape[:-1], 3 * n) / 3,
        lambda: jnp.take(jnp.tanh(v), jnp.array([0, v.shape[-1] - 1, 0]), axis=-1),
    )()


GRAPH: dict[str, Operator] = {"table": _table, "segment": _segment, "message": _message, "interaction": _interaction}

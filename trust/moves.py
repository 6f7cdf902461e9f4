"""Operators that move elements, choose between them, count in integers, or contain control flow.

The entries of ``MOVE`` have the form of those of ``operators.COMPUTE``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trust.context import Context
from trust.operators import Operator, matched

Array = Any


def _columns(c: Context, v: Array, u: Array) -> Any:
    """Moves within a row."""
    n = v.shape[-1]
    k = c.below(7)
    rest = [(0, 0)] * (v.ndim - 1)
    plain = [(0, 0, 0)] * (v.ndim - 1)
    return c.pick(
        lambda: v[..., n // 3 :],
        lambda: v[..., : (n + 1) // 2],
        lambda: v[..., ::2],
        lambda: v[..., ::-1],
        lambda: v[..., k % n : k % n + 1],
        lambda: v[..., None, k % n],
        lambda: jnp.pad(v, [*rest, (1, k)], constant_values=0.5),
        lambda: jnp.pad(v, [*rest, (k % 2, 2)], mode="edge"),
        lambda: lax.pad(v, jnp.zeros((), v.dtype), [*plain, (-(n // 2), 1, 1)]),
        lambda: jnp.roll(v, k, axis=-1),
        lambda: jnp.concatenate([v, u], axis=-1),
        lambda: jnp.concatenate([u, v[..., :1], v], axis=-1),
        lambda: jnp.concatenate([v, jnp.broadcast_to(c.stationary(k, 2), (*v.shape[:-1], 2))], axis=-1),
        lambda: tuple(jnp.split(v, [max(1, n // 3), max(1, n // 2)], axis=-1)),
        lambda: jnp.tile(v, (*(1,) * (v.ndim - 1), 2)),
        lambda: jnp.repeat(v, 2, axis=-1),
        lambda: jnp.stack(matched(v, u), axis=-1).reshape(*v.shape[:-1], -1),
        lambda: jnp.stack([v, -v], axis=-2).reshape(*v.shape[:-1], 2 * n),
        lambda: v.at[..., 0].set(0.25),
        lambda: v.at[..., k % n].add(1.0),
        lambda: jnp.swapaxes(jnp.stack([v, v * 2], -1), -1, -2).reshape(*v.shape[:-1], 2 * n),
    )()


def _axes(c: Context, v: Array, u: Array) -> Any:
    """Moves of the rows: transposes, reshapes, flips, concatenation."""
    rows = tuple(range(v.ndim - 1))
    return c.pick(
        lambda: jnp.swapaxes(jnp.sin(jnp.swapaxes(v, 0, -1)), 0, -1),
        lambda: jnp.moveaxis(jnp.moveaxis(v, -1, 0) * c.param(v.shape[-1], *(1,) * (v.ndim - 1)), 0, -1),
        lambda: jnp.tanh(v.reshape(-1, v.shape[-1]) @ c.param(v.shape[-1], 4)).reshape(*v.shape[:-1], 4),
        lambda: v[::-1] * 0.5,
        lambda: jnp.concatenate([v[:1], v[:-1]], axis=0) if v.shape[0] else v,
        lambda: jnp.roll(v, 1, axis=0) + u[..., :1],
        lambda: jnp.concatenate([v, v * 2], axis=0)[: v.shape[0]],
        lambda: jnp.stack([v, v * 2])[1],
        lambda: v.reshape(-1)[::-1].reshape(v.shape),
        lambda: v[:, None][:, 0] + jnp.flip(v, rows),
        lambda: v.T.reshape(v.shape) * 0.5,
        lambda: jnp.where(lax.broadcasted_iota(jnp.int32, v.shape, 0) < v.shape[0] // 2, v, 0),
        lambda: v[: max(1, v.shape[0] // 2)],
        lambda: jnp.tile(v, (2, *(1,) * (v.ndim - 1))),
    )()


def _select(c: Context, v: Array, u: Array) -> Any:
    a, b = matched(v, u)
    x = c.rows[0]
    bits = [i for i in c.ints if i.dtype == jnp.bool_]
    digit = c.below(5)
    mask = c.pick(
        lambda: x[..., :1] > 0.25,
        lambda: jnp.arange(a.shape[-1]) % 2 == 0,
        lambda: lax.broadcasted_iota(jnp.int32, a.shape, 0) % 3 == 1,
        lambda: c.mask()[..., None],
        lambda: (c.integers(digit, 4) < 2)[..., None],
        lambda: jnp.logical_xor(x[..., :1] < 0.5, c.mask()[..., None]),
        lambda: ~(bits[digit % len(bits)] if bits else c.mask())[..., None],
        lambda: (x[..., :1] > -1) & (x[..., :1] < 0.5) | (x[..., :1] > 1),
    )()
    return c.pick(
        lambda: jnp.where(mask, a, b),
        lambda: jnp.where(mask, a, 0),
        lambda: a * mask,
        lambda: jnp.where(mask, a / 0.7, jnp.zeros_like(a)),
        lambda: (a * mask.astype(a.dtype), jnp.broadcast_to(mask, a.shape)[..., 0]),
        lambda: lax.select(jnp.broadcast_to(mask, a.shape), a, -b),
        lambda: jnp.where(mask, a, jnp.where(a > b, b, 1.0)),
    )()


def _integers(c: Context, v: Array, u: Array) -> Any:
    """Integer and bool arithmetic on indices, and back to floats."""
    digit = c.below(10)
    i = c.integers(digit, 9)
    j = c.integers(c.below(6), 5)
    k = c.pick(
        lambda: (i * 3 + j) % 5,
        lambda: jnp.maximum(i - j, 0),
        lambda: i // 2,
        lambda: i ^ j,
        lambda: (i & 3) | j,
        lambda: jnp.where(i > j, i, 2 * j),
        lambda: (i << 1) >> 2,
        lambda: jnp.clip(i, 1, 4),
        lambda: -i + j,
        lambda: i.astype(jnp.uint8) + j.astype(jnp.uint8),
        lambda: i.astype(jnp.int8) - j.astype(jnp.int8),
        lambda: jnp.abs(j - i).astype(jnp.int16),
        lambda: i > j,
        lambda: (i == j) | (i < 2),
        lambda: lax.population_count(i) + lax.clz(j) % 7,
        lambda: lax.shift_right_logical(i * 5, jnp.full_like(i, 1)),
        lambda: ~((i > 1) ^ (j > 2)),
        lambda: lax.max(i, j) - lax.sign(i - j),
    )()
    return c.pick(
        lambda: (k, v),
        lambda: v * (k.astype(v.dtype) * 0.1)[..., None],
        lambda: v + jax.nn.one_hot(k.astype(jnp.int32), v.shape[-1], dtype=v.dtype),
        lambda: (jnp.sum(k.astype(jnp.int32)), v + jnp.sum(k.astype(v.dtype)) / max(1, k.size)),
        lambda: (jnp.max(k.astype(jnp.int32), initial=0), k),
        lambda: jnp.where((k.astype(jnp.int32) > 1)[..., None], v, -v),
    )()


def _argument(c: Context, v: Array, u: Array) -> Any:
    """The index of the largest or smallest element of an input, whose elements are far enough apart."""
    x = c.rows[c.below(c.program.inputs)]
    k = c.pick(jnp.argmax, jnp.argmin)(x, axis=-1)
    return c.pick(
        lambda: (k, v),
        lambda: v + jax.nn.one_hot(k, v.shape[-1], dtype=v.dtype),
        lambda: jnp.take_along_axis(x, k[..., None], axis=-1) * v,
        lambda: jnp.where((k == 0)[..., None], v, 0.5 * v),
    )()


def _gather(c: Context, v: Array, u: Array) -> Any:
    digit = c.below(6)
    n = v.shape[-1]
    flat = v.reshape(-1, n)
    return c.pick(
        lambda: c.param(7, n)[c.integers(digit, 7)] * v,
        lambda: jnp.take(c.param(3, 5), c.integers(digit, 3), axis=0),
        lambda: jnp.take_along_axis(v, c.integers(digit, n)[..., None], axis=-1),
        lambda: v * jnp.take(c.param(11), c.integers(digit, 11))[..., None],
        lambda: flat[c.integers(digit, flat.shape[0])] if flat.shape[0] else v,
        lambda: v[..., jnp.array([0, n - 1, n // 2])],
        lambda: jnp.take(c.param(4, n), c.integers(digit, 9), axis=0, mode=("fill", "clip")[digit % 2], fill_value=0.5) + v,
        lambda: lax.dynamic_slice_in_dim(v, jnp.int32(digit % n), max(1, n // 2), axis=-1),
        lambda: lax.dynamic_slice_in_dim(v, c.integers(digit, 4).sum() % 3, max(1, n // 2), axis=-1),
        lambda: (
            lax.dynamic_update_slice_in_dim(v, u[..., : 1 + n // 2][..., :n] * 0.5, jnp.int32(1), axis=-1)
            if u.shape[-1] >= n and u.dtype == v.dtype
            else v
        ),
        lambda: -jnp.log(jnp.take_along_axis(jax.nn.softmax(v), c.integers(digit, n)[..., None], axis=-1) + 0.1),
    )()


def _segments(c: Context, v: Array, u: Array) -> Any:
    digit = c.below(6)
    k = c.pick(1, 3, 6, 17)
    ids = c.integers(digit, k).reshape(-1)
    flat = v.reshape(-1, v.shape[-1])
    scale = max(1, flat.shape[0]) ** 0.5

    def back(table: Array) -> Array:
        return table[ids].reshape(v.shape)

    return c.pick(
        lambda: jax.ops.segment_sum(flat, ids, k) / scale,
        lambda: back(jax.ops.segment_sum(flat, ids, k) / scale),
        lambda: v - back(jax.ops.segment_sum(jnp.tanh(flat), ids, k) / scale),
        lambda: jnp.zeros((k, v.shape[-1]), v.dtype).at[ids].add(flat) / scale,
        lambda: jax.ops.segment_sum(jnp.ones(flat.shape[:1], v.dtype), ids, k) / scale,
        lambda: back(jax.ops.segment_max(flat, ids, k)),
        lambda: v / (1 + back(jax.ops.segment_sum(jnp.abs(flat), ids, k))),
    )()


def _sorted(c: Context, v: Array, u: Array) -> Any:
    n = v.shape[-1]
    return c.pick(
        lambda: jnp.sort(v, axis=-1),
        lambda: lax.top_k(v, (n + 1) // 2)[0],
        lambda: jnp.median(v, axis=-1, keepdims=True) if v.size else v,
    )()


def _inner(c: Context, v: Array, u: Array) -> Any:
    """Control flow, nested calls and checkpoints inside of the function."""
    n = v.shape[-1]
    w = c.param(n, n)
    b = c.param(n)

    def layer(x: Array) -> Array:
        return jnp.tanh(x @ w + b).astype(x.dtype)

    def fixed(x: Array, y: Array) -> Array:
        return jnp.sin(x @ w + y * 0.5).astype(x.dtype)

    def scanned(k: int, **options: Any) -> Array:
        return lax.scan(lambda x, i: (layer(x + i), jnp.mean(x)), v, jnp.arange(k, dtype=v.dtype), **options)

    decision = c.rows[0].reshape(-1)[0] > 0 if c.rows[0].size else jnp.asarray(True)
    times = c.pick(1, 2, 3)
    return c.pick(
        lambda: jax.jit(layer)(v),
        lambda: jax.checkpoint(layer)(v) * 0.5,
        lambda: scanned(times),
        lambda: scanned(times, reverse=True, unroll=2)[0],
        lambda: lax.fori_loop(0, times, lambda i, x: layer(x) + x * 0.1, v),
        lambda: lax.cond(decision, layer, lambda x: x * 0.5, v),
        lambda: lax.switch(c.integers(0, 3).sum() % 3, [layer, jnp.sin, lambda x: x], v),
        lambda: jax.vmap(lambda row: jnp.tanh(row @ w) + b)(v.reshape(-1, n)).reshape(v.shape),
        lambda: lax.scan(lambda carry, col: (carry * 0.5 + col, carry), v[..., 0], jnp.moveaxis(v, -1, 0))[0][..., None],
        lambda: lax.fori_loop(0, times, lambda i, xs: (xs[1], xs[0] * xs[1] * 0.5), (v, v + 1))[0],
        lambda: lax.scan(lambda x, _: (fixed(x, v), None), v, None, length=times)[0],
        lambda: lax.map(lambda row: row * 2 - b, v),
        lambda: jax.grad(lambda x: jnp.sum(jnp.sin(x @ w)))(v),
        lambda: jax.jvp(layer, (v,), (v * 0.5,))[1],
        lambda: jax.jit(jax.checkpoint(lambda x, y: fixed(x, y) * y))(v, v),
    )()


MOVE: dict[str, Operator] = {
    "columns": _columns,
    "axes": _axes,
    "select": _select,
    "integers": _integers,
    "argument": _argument,
    "gather": _gather,
    "segments": _segments,
    "sorted": _sorted,
    "inner": _inner,
}

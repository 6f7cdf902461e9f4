"""Random networks for the tests of trust: drawn as lists of small integers, so that hypothesis shrinks a failure to few ops.

Comes in: a ``Network`` (dtype, leading axes, features, ops). Goes out: its parameters, its inputs and a JAX function of them.
Invariant: every list of ops is a valid program (integers are taken modulo what there is to choose from), its values stay near 1,
and it branches on its inputs only, so the same program in float64 takes the same branches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

Array = Any
Take = Callable[..., Array]  # shape -> the next parameter, of that shape
MAX_FEATURES = 80


@dataclasses.dataclass(frozen=True)
class Network:
    """``ops``: (name, operand, choice) triples; ``lead``: the axes that stream."""

    dtype: str
    lead: tuple[int, ...]
    features: int
    ops: tuple[tuple[str, int, int], ...]
    seed: int = 0

    def __call__(self, params: list[Array], x: Array) -> tuple[Array, ...]:
        """The last value, a per-row statistic, and one reduction over all rows."""
        left = iter(params)
        return self._evaluate(lambda *shape: next(left), x)

    def arguments(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Parameters and input, in ``dtype``."""
        rng = np.random.default_rng(self.seed)
        shapes: list[tuple[int, ...]] = []

        def take(*shape: int) -> Array:
            shapes.append(shape)
            return jnp.zeros(shape, self.dtype)

        jax.eval_shape(lambda x: self._evaluate(take, x), jax.ShapeDtypeStruct((*self.lead, self.features), self.dtype))
        arrays = [rng.standard_normal(s) / np.sqrt(max(1, s[0] if len(s) > 1 else 1)) for s in shapes]
        x = rng.standard_normal((*self.lead, self.features))
        dtype = jnp.dtype(self.dtype)
        return [a.astype(dtype) for a in arrays], x.astype(dtype)

    def _evaluate(self, take: Take, x: Array) -> tuple[Array, ...]:
        values = [x]
        for name, operand, choice in self.ops:
            v = values[-1 - operand % len(values)]
            u = values[choice % len(values)]
            new = OPS[name](_Context(take, x, choice), v, u)
            if new.shape[-1] <= MAX_FEATURES:
                values.append(new)
        last = values[-1]
        lead = tuple(range(len(self.lead)))
        return (
            last,
            jax.nn.logsumexp(2 * last, axis=-1),
            jnp.mean(last * values[len(values) // 2].mean(-1, keepdims=True), axis=lead),
        )


@dataclasses.dataclass(frozen=True)
class _Context:
    take: Take
    x: Array
    choice: int

    def pick(self, *options: Any) -> Any:
        return options[self.choice % len(options)]


def _dense(c: _Context, v: Array, u: Array) -> Array:
    y = v @ c.take(v.shape[-1], c.pick(1, 3, 8, 13, 16, 17, 33, 40))
    return y if c.choice % 3 == 0 else y + c.take(y.shape[-1])


def _dense_transposed(c: _Context, v: Array, u: Array) -> Array:
    """The weight on the left, rows last."""
    w = c.take(c.pick(2, 5, 16, 31), v.shape[-1])
    return jnp.moveaxis(jnp.tanh(jnp.tensordot(w, v, ((1,), (v.ndim - 1,)))), 0, -1)


def _heads(c: _Context, v: Array, u: Array) -> Array:
    f = v.shape[-1]
    h = next(k for k in (4, 3, 2, 1) if f % k == 0)
    w = c.take(h, f // h, c.pick(1, 3, 4))
    y = jnp.einsum(c.pick("...hd,hdm->...hm", "...hd,hdm->...mh"), v.reshape(*v.shape[:-1], h, f // h), w)
    return y.reshape(*v.shape[:-1], -1)


def _inner_contracted(c: _Context, v: Array, u: Array) -> Array:
    """Two contracted dimensions, and two free ones that cross."""
    f = v.shape[-1]
    h = next(k for k in (4, 3, 2, 1) if f % k == 0)
    y = v.reshape(*v.shape[:-1], h, f // h)
    if c.choice % 2:
        return jnp.einsum("...hd,hdm->...m", y, c.take(h, f // h, 5))
    return jnp.einsum("...hd,dm->...mh", y, c.take(f // h, 3)).reshape(*v.shape[:-1], -1)


def _activation(c: _Context, v: Array, u: Array) -> Array:
    smooth = (jnp.tanh, jax.nn.gelu, lambda x: jax.nn.gelu(x, approximate=False), jax.nn.silu, jnp.sin, jax.nn.softplus)
    return c.pick(*smooth, jax.nn.sigmoid, lambda x: jnp.exp(-x * x), lambda x: x / (1 + jnp.abs(x)))(v)


def _norm(c: _Context, v: Array, u: Array) -> Array:
    def layer_norm(x: Array) -> Array:
        mean, var = x.mean(-1, keepdims=True), jnp.var(x, -1, keepdims=True)
        return (x - mean) * lax.rsqrt(var + 0.1) * c.take(x.shape[-1]) + c.take(x.shape[-1])

    def rms_norm(x: Array) -> Array:
        return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 0.1) * c.take(x.shape[-1])

    return c.pick(layer_norm, rms_norm, jax.nn.softmax, jax.nn.log_softmax)(v)


def _skip(c: _Context, v: Array, u: Array) -> Array:
    n = min(v.shape[-1], u.shape[-1])
    return c.pick(lambda a, b: a + b, lambda a, b: a - 0.5 * b, jnp.multiply)(v[..., :n], u[..., :n])


def _concat(c: _Context, v: Array, u: Array) -> Array:
    return jnp.concatenate(c.pick([v, u], [u, v, c.x], [v, v[..., :1]]), axis=-1)


def _statistic(c: _Context, v: Array, u: Array) -> Array:
    def std(x: Array, **kwargs: Any) -> Array:
        return jnp.sqrt(jnp.var(x, **kwargs) + 0.1)

    row = c.pick(jnp.mean, jax.scipy.special.logsumexp, std)
    y = row(v * v + 0.1, axis=-1, keepdims=True)
    return v * 0.5 + jnp.tanh(y)


def _row_product(c: _Context, v: Array, u: Array) -> Array:
    n = min(v.shape[-1], u.shape[-1])
    return jnp.tanh(jnp.einsum("...d,...d->...", v[..., :n], u[..., :n])[..., None] + v)


def _transpose(c: _Context, v: Array, u: Array) -> Array:
    """Work done with the features first, or with the leading axes in another order."""
    if v.ndim > 2 and c.choice % 2:
        return jnp.swapaxes(jnp.sin(jnp.swapaxes(v, 0, 1) @ c.take(v.shape[-1], 7)), 0, 1)
    y = jnp.moveaxis(v, -1, 0)
    return jnp.moveaxis(y * c.take(v.shape[-1], *(1,) * (v.ndim - 1)) - y[::-1], 0, -1)


def _flatten(c: _Context, v: Array, u: Array) -> Array:
    y = jnp.tanh(v.reshape(-1, v.shape[-1]) @ c.take(v.shape[-1], c.pick(4, 9)))
    return y.reshape(*v.shape[:-1], -1)


def _broadcast(c: _Context, v: Array, u: Array) -> Array:
    if c.choice % 4 == 0:
        return v * c.take() + c.take(v.shape[-1])
    if c.choice % 4 == 1:
        return v + c.take(*v.shape[1:])  # a position, where there are two leading axes
    if c.choice % 4 == 2:
        return (v[..., None] * c.take(v.shape[-1], 2)).reshape(*v.shape[:-1], -1)
    return v + 0.1 * lax.broadcasted_iota(v.dtype, v.shape, c.choice % v.ndim) / v.shape[c.choice % v.ndim]


def _slice(c: _Context, v: Array, u: Array) -> Array:
    f = v.shape[-1]
    return c.pick(
        lambda: v[..., f // 3 :],
        lambda: v[..., ::2],
        lambda: v[..., ::-1],
        lambda: jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(1, 2)], constant_values=0.5),
        lambda: lax.pad(v, jnp.zeros((), v.dtype), [(0, 0, 0)] * (v.ndim - 1) + [(-(f // 2), 1, 1)]),
        lambda: jnp.roll(v, 1, axis=-1),
    )()


def _where(c: _Context, v: Array, u: Array) -> Array:
    n = min(v.shape[-1], u.shape[-1])
    v, u = v[..., :n], u[..., :n]
    mask = c.pick(c.x[..., :1] > 0.25, jnp.arange(n) % 2 == 0, lax.broadcasted_iota(jnp.int32, v.shape, 0) % 3 == 1)
    return jnp.where(mask, v, c.pick(u, 0, -u))


def _cast(c: _Context, v: Array, u: Array) -> Array:
    if v.dtype == jnp.float64:
        return jnp.sin(v) * 2
    other = jnp.bfloat16 if v.dtype == jnp.float32 else jnp.float32
    return (jnp.sin(v.astype(other)) * 2).astype(v.dtype)


def _centre(c: _Context, v: Array, u: Array) -> Array:
    """A statistic over the stream and back: two regions."""
    return v - v.mean(axis=tuple(range(v.ndim - 1)))


def _cumulative(c: _Context, v: Array, u: Array) -> Array:
    return c.pick(lax.cumsum, lax.cumlogsumexp)(v, axis=v.ndim - 1, reverse=c.choice % 4 > 1) / v.shape[-1]


def _masked(c: _Context, v: Array, u: Array) -> Array:
    """Dropout by an input, a clipped input as a gate, one that is rectified."""
    column = c.x[..., :1]
    return c.pick(
        lambda: jnp.where(column > -0.5, v / 0.7, jnp.zeros_like(v)),
        lambda: v * jnp.clip(column, -1.0, 0.5),
        lambda: v * jax.nn.relu(column) + 0.1 * v,
        lambda: v * jnp.maximum(column, jnp.abs(c.x).mean(-1, keepdims=True)),
    )()


OPS: dict[str, Callable[[_Context, Array, Array], Array]] = {
    "dense": _dense,
    "dense_transposed": _dense_transposed,
    "heads": _heads,
    "inner_contracted": _inner_contracted,
    "activation": _activation,
    "norm": _norm,
    "skip": _skip,
    "concat": _concat,
    "statistic": _statistic,
    "row_product": _row_product,
    "transpose": _transpose,
    "flatten": _flatten,
    "broadcast": _broadcast,
    "slice": _slice,
    "where": _where,
    "cast": _cast,
    "centre": _centre,
    "cumulative": _cumulative,
    "masked": _masked,
}


@st.composite
def networks(draw: Any, most_ops: int = 10) -> Network:
    rows = st.sampled_from([1, 2, 3, 7, 13, 17, 31, 37, 64, 97])
    lead = draw(st.one_of(st.tuples(rows), st.tuples(st.sampled_from([1, 2, 3, 5]), st.sampled_from([1, 2, 7, 16]))))
    op = st.tuples(st.sampled_from(list(OPS)), st.integers(0, 3), st.integers(0, 11))
    return Network(
        draw(st.sampled_from(["float32", "bfloat16"])),
        lead,
        draw(st.sampled_from([1, 2, 3, 5, 8, 12, 16, 17])),
        tuple(draw(st.lists(op, min_size=1, max_size=most_ops))),
        draw(st.integers(0, 3)),
    )

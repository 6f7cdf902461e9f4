"""Kernel families as users call them: whole functions, of which the planner makes one or several calls.

Comes in: a family's name, rows, a dtype (see ``cuda_cases``). Goes out: a function and its arguments. Invariant: functions can be
pickled, because ``scripts/gpu`` sends them to processes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from tests.support.cuda_cases import Arg, Array, Family, bias, weight
from tests.support.cuda_recurrent_cases import heun, loss, lstm, pendulum
from tests.support.cuda_training_cases import value_and_grads

_TABLE = 3_501  # rows of 16 floats: 219 KiB, which no lane has room for
_GROUPS = 301
_KEYS = (1_031, 4_099)  # of one token: as many as make rows of the keys
_TOKENS = (523, 1_531)  # whose scores are eight times as large as q, k, v and the result
_SEQUENCES = (131, 1_531)  # of so few no CTA takes all steps by itself: both loops of the gradient are over clusters


def senders_loss(w: Array, nodes: Array, senders: Array, receivers: Array) -> Array:
    summed = jax.ops.segment_sum(jnp.tanh(nodes[senders] @ w), receivers, len(nodes))
    return jnp.mean(summed.astype(jnp.float32) ** 2)


def gradient_by_senders(*args: Array) -> Any:
    """Its rows go to two tables in two orders, of which a stream has one."""
    return jax.value_and_grad(senders_loss, (0, 1))(*args)


def segment_softmax(values: Array, scores: Array, index: Array) -> Array:
    """Sums of values [rows, heads, size], weighted by the softmax of the scores [rows, heads] of each group."""
    largest = jax.lax.stop_gradient(jax.ops.segment_max(scores, index, _GROUPS))
    e = jnp.exp(scores - largest[index])
    total = jax.ops.segment_sum(values * e[:, :, None], index, _GROUPS)
    return total / (jax.ops.segment_sum(e, index, _GROUPS)[:, :, None] + 1)


def extremes(w: Array, nodes: Array, edges: Array, senders: Array, receivers: Array) -> tuple[Array, Array]:
    """Messages of edges: their sums by receivers, and the largest ones by senders. Nodes without messages get 0."""
    messages = jax.nn.relu(jnp.concatenate([nodes[senders], edges], -1) @ w)
    largest = jax.ops.segment_max(messages, senders, len(nodes))
    return jax.ops.segment_sum(messages, receivers, len(nodes)), jnp.where(jnp.isfinite(largest), largest, 0)


def attention_gradients(q: Array, k: Array, v: Array, do: Array) -> Any:
    """The result, causal, and dq, dk, dv; arrays of [tokens, heads, size]."""
    result, back = jax.vjp(functools.partial(jax.nn.dot_product_attention, is_causal=True), q[None], k[None], v[None])
    return result[0], tuple(x[0] for x in back(do[None]))


def one_token(q: Array, keys: Array, values: Array) -> Array:
    """q [heads, size], keys and values [keys, heads, size]: the last quarter of the keys is hidden."""
    scores = jnp.einsum("hd,khd->hk", q, keys) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.arange(len(keys)) < len(keys) * 3 // 4, scores.astype(jnp.promote_types(q.dtype, jnp.float32)), -jnp.inf)
    return jnp.einsum("hk,khd->hd", jax.nn.softmax(scores).astype(q.dtype), values)


def updated(recurrence: Any, count: int, *args: Array) -> Any:
    """A step of gradient descent: the loss, and the first ``count`` arguments after it."""
    value, grads = jax.value_and_grad(functools.partial(loss, recurrence), tuple(range(count)))(*args)
    return value, tuple(p - 1e-4 * g for p, g in zip(args[:count], grads, strict=True))


def read_out(w: Array, u: Array, v: Array, xs: Array) -> Array:
    """A projection in front of a loop, and a readout behind it."""

    def step(h: Array, z: Array) -> tuple[Array, Array]:
        h = jnp.tanh(z + h @ u)
        return h, h

    return jax.lax.scan(step, jnp.zeros((xs.shape[1], len(u)), xs.dtype), xs @ w)[1] @ v


def _nodes(*shape: int) -> Arg:
    return Arg(shape, "int32", classes=_TABLE)


_HEADS = Arg((-1, 2, 32))
CALLS: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "atomic-sums", gradient_by_senders, (weight(16, 16), Arg((_TABLE, 16)), _nodes(-1), _nodes(-1)), deterministic=False
        ),
        Family("extremes", extremes, (weight(24, 16), Arg((_TABLE, 16)), Arg((-1, 8)), _nodes(-1), _nodes(-1))),
        Family("segment-softmax", segment_softmax, (Arg((-1, 4, 16)), Arg((-1, 4)), Arg((-1,), "int32", classes=_GROUPS))),
        Family("one-token", one_token, (Arg((2, 32)), _HEADS, _HEADS), rows=_KEYS),
        Family("attention-gradients", attention_gradients, (_HEADS,) * 4, rows=_TOKENS),
        Family("descent-ode", functools.partial(updated, heun, 3), (weight(6, 32), bias(32), weight(32, 6), Arg((-1, 6)))),
        Family(
            "descent-pendulum",
            functools.partial(updated, pendulum, 2),
            (Arg(()), Arg(()), Arg((-1,)), Arg((-1,))),
            dtypes=("float32",),
        ),
        Family(
            "cluster-lstm",
            functools.partial(value_and_grads, functools.partial(loss, lstm), 3),
            (weight(128, 512), weight(128, 512), bias(512), Arg((-1, 128)), Arg((-1, 128)), Arg((3, -1, 128))),
            rows=_SEQUENCES,
        ),
        Family("read-out", read_out, (weight(5, 24), weight(24, 24), weight(24, 8), Arg((3, -1, 5)))),
    )
}

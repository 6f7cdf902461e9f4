"""Losses of recurrences and their gradients, as kernel families: the largest region is the reverse loop of a gradient.

Comes in: a family's name, rows, a dtype (see ``cuda_cases``). Goes out: a function that gives the loss and gradients, and its
arguments. Invariant: functions can be pickled, because ``scripts/gpu`` sends them to processes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from tests.support.cuda_cases import Arg, Array, Family, bias, recurrence, weight
from tests.support.cuda_training_cases import value_and_grads

# -- recurrences: parameters first, then the state and what comes in at each step


def lstm(w: Array, u: Array, b: Array, h: Array, c: Array, xs: Array) -> tuple[Array, Array]:
    def step(state: Any, x: Array) -> tuple[Any, Array]:
        h, c = state
        i, f, g, o = jnp.split(x @ w + h @ u + b, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    (_, c), hs = jax.lax.scan(step, (h, c), xs)
    return c, hs


def gru(w: Array, u: Array, v: Array, h: Array, xs: Array) -> tuple[Array, Array]:
    def step(h: Array, x: Array) -> tuple[Array, Array]:
        i, j = jnp.split(jax.nn.sigmoid(x @ w + h @ u), 2, axis=-1)
        h = (1 - i) * h + i * jnp.tanh((j * h) @ v)
        return h, h

    return jax.lax.scan(step, h, xs)


def heun(w: Array, b: Array, v: Array, x: Array) -> tuple[Array, Array]:
    """A neural ODE: a weight is used twice in a step."""

    def slope(x: Array) -> Array:
        return jnp.tanh(x @ w + b) @ v

    def step(x: Array, _: None) -> tuple[Array, None]:
        first = slope(x)
        return x + 0.1 * (first + slope(x + 0.2 * first)), None

    x, _ = jax.lax.scan(step, x, None, length=4)
    return x, x


def pendulum(gravity: Array, friction: Array, angle: Array, speed: Array) -> tuple[Array, Array]:
    """Without a product, with two parameters that are one number each."""

    def step(state: Any, _: None) -> tuple[Any, Array]:
        angle, speed = state
        speed = speed - 0.1 * (gravity * jnp.sin(angle) + friction * speed)
        return (angle + 0.1 * speed, speed), angle

    (angle, _), path = jax.lax.scan(step, (angle, speed), None, length=9)
    return angle, path


def loss(recurrence: Any, *args: Array) -> Array:
    """Of what a recurrence ends with and of all that it gives on its way."""
    last, path = (x.astype(jnp.float32) for x in recurrence(*args))
    return jnp.sum(last * last) + jnp.sum(jnp.sin(path))


def _family(name: str, recurrence: Any, count: int, args: tuple[Arg, ...], **options: Any) -> Family:
    return Family(name, functools.partial(value_and_grads, functools.partial(loss, recurrence), count), args, **options)


def _gates(features: int, hidden: int, gates: int) -> tuple[Arg, Arg, Arg]:
    return weight(features, gates * hidden), weight(hidden, gates * hidden), bias(gates * hidden)


RECURRENT: dict[str, Family] = {
    f.name: f
    for f in (
        _family("simple-loop", recurrence, 3, (*_gates(9, 24, 1), Arg((-1, 24)), Arg((5, -1, 9)))),
        # By the rows, too: what comes in at each step, and the state, has a gradient.
        _family("simple-loop-by-rows", recurrence, 5, (*_gates(8, 32, 1), Arg((-1, 32)), Arg((3, -1, 8)))),
        _family("lstm-loop", lstm, 3, (*_gates(9, 32, 4), Arg((-1, 32)), Arg((-1, 32)), Arg((3, -1, 9)))),
        _family("gru-loop", gru, 4, (*_gates(7, 20, 2)[:2], weight(20, 20), Arg((-1, 20)), Arg((4, -1, 7)))),
        _family("heun-loop", heun, 3, (weight(6, 32), bias(32), weight(32, 6), Arg((-1, 6)))),
        _family("pendulum-loop", pendulum, 4, (Arg(()), Arg(()), Arg((-1,)), Arg((-1,))), dtypes=("float32",)),
        # 64 x 256 sums twice: those of the input's weights and those of the state's.
        _family("wide-lstm-loop", lstm, 3, (*_gates(64, 64, 4), Arg((-1, 64)), Arg((-1, 64)), Arg((3, -1, 64))), small=False),
    )
}

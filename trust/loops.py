"""Loops and branches whose body is a program's function.

Comes in: the function (``Callee``), choices, and ``wrap``, which pipelines the body. Goes out: a function of the same arguments.
The first arguments, all of one shape, are the carries; the body's results become the next carries, in an order and with stationary
ones by choice. Every loop ends after a few rounds, because its counter is exact in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trust.program import Digits, Invalid
from trust.transforms import Callee

Array = Any
Function = Callable[..., Any]
Wrap = Callable[[Function], Function]


def _fitted(out: Array, like: Array) -> Array:
    """``out`` as an array of ``like``'s shape and dtype; ``out`` itself if it is one already."""
    if out.shape == like.shape and out.dtype == like.dtype:
        return out
    out = out.astype(like.dtype)
    if out.ndim == like.ndim and out.shape[:-1] == like.shape[:-1]:
        n, k = out.shape[-1], like.shape[-1]
        return out[..., :k] if n >= k else jnp.concatenate([out, like[..., n:]], axis=-1)
    return like * 0.5 + jnp.tanh(jnp.sum(out) / max(1, out.size)).astype(like.dtype)


def _carried(callee: Callee, choices: Digits) -> Function:
    """The body as a function of ``(carries, the other arguments)`` that returns the next carries."""
    carries = callee.program.inputs
    turn = choices.below(carries)
    stationary = choices.below(carries + 1) if carries > 1 and choices.below(2) else carries
    damped = choices.pick(False, True)

    def body(*args: Array) -> tuple[Array, ...]:
        outs = callee.f(*args)
        new = []
        for k in range(carries):
            out = _fitted(outs[(k + turn) % len(outs)], args[k])
            new.append(args[k] if k == stationary else jnp.tanh(out) if damped else out)
        return tuple(new)

    body.__name__ = "trust_body"
    return body


def _split(callee: Callee, args: tuple[Array, ...]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    return args[: callee.program.inputs], args[callee.program.inputs :]


def none(callee: Callee, choices: Digits, wrap: Wrap) -> Function:
    return wrap(callee.f)


def scan(callee: Callee, choices: Digits, wrap: Wrap) -> Function:
    """A ``scan`` with or without sliced inputs and collected outputs, forwards or backwards, unrolled or not."""
    length, reverse, unroll = choices.pick(3, 1, 2, 0), choices.pick(False, True), choices.pick(1, 2)
    sliced, collected = choices.pick(False, True), choices.pick(False, True)
    body = _carried(callee, choices)

    @wrap
    def step(x: Any, *args: Array) -> tuple[tuple[Array, ...], Any]:
        carry, rest = _split(callee, args)
        new = body(*(carry if x is None else (carry[0] + x, *carry[1:])), *rest)
        return new, jnp.mean(new[0] * 0.5, axis=-1) if collected else None

    def loop(*args: Array) -> Any:
        carry, rest = _split(callee, args)
        xs = jnp.stack([carry[0] * (0.5 - k) for k in range(length)]) if sliced and length else None
        return lax.scan(lambda c, x: step(x, *c, *rest), carry, xs, length, reverse, unroll)

    return loop


def fori(callee: Callee, choices: Digits, wrap: Wrap) -> Function:
    times = choices.pick(2, 1, 3)
    body = wrap(_carried(callee, choices))

    def loop(*args: Array) -> Any:
        carry, rest = _split(callee, args)
        return lax.fori_loop(0, times, lambda i, c: body(*c, *rest), carry)

    return loop


def fori_traced(callee: Callee, choices: Digits, wrap: Wrap) -> Function:
    """A ``fori_loop`` whose number of rounds is data: a ``while`` loop."""
    times = choices.pick(2, 1, 3, 0)
    body = wrap(_carried(callee, choices))

    def loop(*args: Array) -> Any:
        carry, rest = _split(callee, args)
        bound = times + jnp.sum(jnp.isnan(carry[0]).astype(jnp.int32))  # not known at compile time
        return lax.fori_loop(0, bound, lambda i, c: body(*c, *rest), carry)

    return loop


def while_(callee: Callee, choices: Digits, wrap: Wrap) -> Function:
    """A ``while_loop`` without a counter: it runs while an element of a carry, its clock, is small. The body adds one to it.

    The clock is before, after or between the other carries, or the only carry, or the first one, which the body reads.
    """
    rounds = choices.pick(3, 1, 2, 0)
    place, wide, kind = choices.pick(0, 1, -1), choices.pick(True, False), choices.pick("first", "extra", "extra", "alone")
    body = _carried(callee, choices)

    def joined(clock: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        at = len(carry) if place == -1 else min(place, len(carry))
        return (clock,) if kind == "alone" else (*carry[:at], clock, *carry[at:])

    def parted(state: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        at = 0 if kind == "alone" else len(state) - 1 if place == -1 else min(place, len(state) - 1)
        return state[at], (*state[:at], *state[at + 1 :])

    @wrap
    def step(*args: Array) -> tuple[Array, ...]:
        if kind == "first":
            return (args[0] + 1, *(x * 0.5 + args[0] * 0.25 for x in body(*args)[1:]))
        count = 1 if kind == "alone" else callee.program.inputs + 1
        clock, carry = parted(args[:count])
        return joined(clock + 1, () if kind == "alone" else body(*carry, *args[count:]))

    def loop(*args: Array) -> Any:
        carry, rest = _split(callee, args)
        clock = jnp.zeros_like(carry[0]) if wide and carry[0].size else jnp.zeros((3,), carry[0].dtype)
        if kind == "first":
            if not carry[0].size:
                raise Invalid("a clock without elements")
            quarters = jnp.arange(carry[0].size).reshape(carry[0].shape) % 4 / 4
            state = (quarters.astype(carry[0].dtype), *carry[1:])
            return lax.while_loop(lambda s: s[0].reshape(-1)[0] < rounds - 0.5, lambda s: step(*s, *rest), state)
        state = joined(clock, carry)

        def goes_on(s: tuple[Array, ...]) -> Array:
            return parted(s)[0].reshape(-1)[1 % clock.size] < rounds - 0.5

        return lax.while_loop(goes_on, lambda s: step(*s, *(() if kind == "alone" else rest)), state)

    return loop


def while_of_scan(callee: Callee, choices: Digits, wrap: Wrap) -> Function:
    inner = scan(callee, choices, wrap)

    def loop(*args: Array) -> Any:
        carry, rest = _split(callee, args)
        state = (jnp.zeros((2,), carry[0].dtype), carry)
        return lax.while_loop(lambda s: s[0][1] < 1.5, lambda s: (s[0] + 1, inner(*s[1], *rest)[0]), state)

    return loop


def nested(callee: Callee, choices: Digits, wrap: Wrap) -> Function:
    """A ``scan`` within a ``fori_loop``; the innermost body or the inner loop is pipelined."""
    pipelined_loop = choices.pick(False, True)
    inner = scan(callee, choices, (lambda f: f) if pipelined_loop else wrap)
    inner = wrap(inner) if pipelined_loop else inner

    def loop(*args: Array) -> Any:
        carry, rest = _split(callee, args)
        return lax.fori_loop(0, 2, lambda i, c: inner(*c, *rest)[0], carry)

    return loop


def map_(callee: Callee, choices: Digits, wrap: Wrap) -> Function:
    """``lax.map`` over three sets of carries."""
    body = wrap(callee.f)

    def loop(*args: Array) -> Any:
        carry, rest = _split(callee, args)
        stacked = jax.tree.map(lambda x: jnp.stack([x, x * 0.5, -x]), carry)
        return lax.map(lambda xs: body(*xs, *rest), stacked)

    return loop


def branch(callee: Callee, choices: Digits, wrap: Wrap) -> Function:
    """``lax.switch`` between the function, the function of other inputs, and zeros; the index is data."""
    chosen, pipelined_all = choices.pick(0, 1, 2), choices.pick(True, False)
    body = wrap(callee.f)

    def other(*args: Array) -> Any:
        carry, rest = _split(callee, args)
        return (body if pipelined_all else callee.f)(*(x * 0.5 for x in carry), *rest)

    def zeros(*args: Array) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(callee.f, *args))

    def loop(*args: Array) -> Any:
        index = chosen + jnp.sum(jnp.isnan(args[0]).astype(jnp.int32))
        return lax.switch(index, [body, other, zeros], *args)

    return loop


LOOPS: dict[str, Callable[[Callee, Digits, Wrap], Function]] = {
    "none": none,
    "scan": scan,
    "fori": fori,
    "fori_traced": fori_traced,
    "while": while_,
    "while_of_scan": while_of_scan,
    "nested": nested,
    "map": map_,
    "branch": branch,
}

"""Philox-4x32 with 10 rounds as XLA makes the bits of ``rbg`` keys with it, on CPUs and GPUs alike.

Comes in: arrays of uint32, or what else has the operations of ``Words``. Goes out: bits. Element i of an array of bits is word
i % 4 of the hash of a counter of 128 bits, which starts at what the key says and grows by 1 for every four elements. Sources:
J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; how XLA counts:
its operator ``RngBitGenerator``, whose results the tests compare with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
from jax import lax
from jax import numpy as jnp

from kitsune_jax.ops.spec import Array

T = TypeVar("T")

_ROUNDS = 10
_FACTORS = 0xD2511F53, 0xCD9E8D57
_RAISED = 0x9E3779B9, 0xBB67AE85  # added to the two words of the key after each round


@dataclasses.dataclass(frozen=True)
class Words(Generic[T]):
    """Arithmetic of words of 32 bits. ``less`` gives 1 or 0, ``choose(which, zero, other)`` takes ``zero`` where ``which`` is 0."""

    number: Callable[[int], T]
    add: Callable[[T, T], T]
    multiply: Callable[[T, T], T]
    multiply_high: Callable[[T, T], T]
    xor: Callable[[T, T], T]
    both: Callable[[T, T], T]
    shifted_right: Callable[[T, T], T]
    less: Callable[[T, T], T]
    choose: Callable[[T, T, T], T]


def element(w: Words[T], key0: T, key1: T, count0: T, count1: T, place: T) -> T:
    """Element number ``place`` of the bits of the key whose four words come before it."""
    one, two = w.number(1), w.number(2)
    n = w.shifted_right(place, two)
    # The counter's lower half is the key's second, its upper half the key's first; a carry goes through all of it.
    x0 = w.add(count0, n)
    carry = w.less(x0, n)
    x1 = w.add(count1, carry)
    carry = w.both(carry, w.less(x1, one))
    x2 = w.add(key0, carry)
    x3 = w.add(key1, w.both(carry, w.less(x2, one)))
    for i in range(_ROUNDS):
        raised = [w.number(i * by % 2**32) for by in _RAISED]
        high0, low0 = (f(x0, w.number(_FACTORS[0])) for f in (w.multiply_high, w.multiply))
        high1, low1 = (f(x2, w.number(_FACTORS[1])) for f in (w.multiply_high, w.multiply))
        x0, x1 = w.xor(w.xor(high1, x1), w.add(key0, raised[0])), low1
        x2, x3 = w.xor(w.xor(high0, x3), w.add(key1, raised[1])), low0
    odd, upper = w.both(place, one), w.both(place, two)
    return w.choose(upper, w.choose(odd, x0, x1), w.choose(odd, x2, x3))


def _wide(x: Array, y: Array) -> Array:
    return np.asarray((x.astype(np.uint64) * np.uint64(y)) >> np.uint64(32), np.uint32)


_NUMPY: Words[Any] = Words(
    np.uint32,
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: _wide(np.asarray(x), y),
    lambda x, y: x ^ y,
    lambda x, y: x & y,
    lambda x, y: x >> y,
    lambda x, y: np.asarray(x < y).astype(np.uint32),
    lambda which, zero, other: np.where(which == 0, zero, other),
)
_JAX: Words[Any] = Words(
    jnp.uint32,
    jnp.add,
    jnp.multiply,
    lambda x, y: lax.mulhi(*jnp.broadcast_arrays(x, y)),
    jnp.bitwise_xor,
    jnp.bitwise_and,
    jnp.right_shift,
    lambda x, y: (x < y).astype(jnp.uint32),
    lambda which, zero, other: jnp.where(which == 0, zero, other),
)


def by_numpy(*words: Array) -> Array:
    """``element`` of arrays of uint32, of one shape or of rank 0.

    >>> keys = [np.full(5, k, np.uint32) for k in (0, 0, 0, 0)]
    >>> [hex(x) for x in by_numpy(*keys, np.arange(5, dtype=np.uint32))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8', '0xf8e4cca4']
    """
    with np.errstate(over="ignore"):
        return np.asarray(element(_NUMPY, *words))


def by_jax(*words: Any) -> Any:
    """The same of arrays or tracers of JAX."""
    return element(_JAX, *words)

"""Threefry-2x32 with 20 rounds in NumPy: the hash that ``jax.random`` makes its bits with by default.

Comes in: arrays of uint32. Goes out: the two words of the result. Source: J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kitsune_jax.ops.spec import Array

WORDS = ("first", "second", "xor")
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def hashed(key0: Array, key1: Array, count0: Array, count1: Array) -> tuple[Array, Array]:
    """The words of the counts hashed with the keys. All uint32, of one shape or of rank 0.

    >>> one = np.full(1, 0xFFFFFFFF, np.uint32)
    >>> [hex(word[0]) for word in hashed(one, one, one, one)]
    ['0x1cb996fc', '0xbb002be7']
    """
    keys = (key0, key1, key0 ^ key1 ^ _PARITY)
    with np.errstate(over="ignore"):  # of scalars; arrays wrap silently
        x, y = count0 + key0, count1 + key1
        for i in range(5):
            for r in _ROTATIONS[i % 2]:
                x = x + y
                y = x ^ (y << np.uint32(r) | y >> np.uint32(32 - r))
            x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x, y


def word_of(word: str, first: Any, second: Any) -> Any:
    """What the parameter ``word`` of the operator takes of a result: ``WORDS``."""
    return first ^ second if word == "xor" else (first, second)[WORDS.index(word)]

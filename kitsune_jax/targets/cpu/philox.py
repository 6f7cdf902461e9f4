"""Bits of ``rbg`` keys as micro-operations on words of 32 bits.

Comes in: the registers of a key's four words and of the elements' numbers. Goes out: the register of their bits.
"""

from __future__ import annotations

from collections.abc import Callable

from kitsune_jax.ops.philox import Words, element
from kitsune_jax.targets.cpu.vectors import VectorBuilder

_WORD = "uint32"


def emit_element(builder: VectorBuilder, words: list[int]) -> int:
    """``words``: four of the key, and the number of the element."""

    def micro(name: str) -> Callable[[int, int], int]:
        return lambda x, y: builder.micro(name, _WORD, x, y)

    def number(value: int) -> int:
        return builder.const(value, _WORD)

    arithmetic = Words(
        number,
        micro("add"),
        micro("mul"),
        micro("mulhi"),
        micro("xor"),
        micro("and"),
        micro("shift_right_logical"),
        lambda x, y: builder.convert(builder.micro("lt", _WORD, x, y), "bool", _WORD),
        lambda which, zero, other: builder.micro("select", _WORD, builder.micro("ne", _WORD, which, number(0)), zero, other),
    )
    return element(arithmetic, *words)

"""The CPU target: tile program -> CPU program (``lower``), its format (``bytecode``, ``words``), its custom call (``emit``).

What runs it is C++ in ``cpu/``. ``supports`` says, op by op, what there is code for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kitsune_jax.ops.rounding import EVERYWHERE, Rounding
from kitsune_jax.targets.cpu import bytecode
from kitsune_jax.targets.cpu.bytecode import DTYPE_CODE, Array, Products
from kitsune_jax.targets.cpu.emit import call, order
from kitsune_jax.targets.cpu.lower import lower
from kitsune_jax.targets.cpu.runtime import available, check, why_not
from kitsune_jax.targets.cpu.support import supports
from kitsune_jax.targets.cpu.words import Call, Part, encode
from kitsune_jax.targets.errors import CannotLower, InvalidProgram

if TYPE_CHECKING:
    import numpy as np

    from kitsune_jax.program.ir import Program

__all__ = [
    "CannotLower",
    "InvalidProgram",
    "Products",
    "available",
    "call",
    "generate",
    "lower",
    "order",
    "supports",
    "why_not",
]


def generate(program: Program, name: str, products: Sequence[Products] = (), rounding: Rounding = EVERYWHERE) -> np.ndarray:
    """The code of ``program`` as int64 words, the attribute of its custom call. Raises ``CannotLower``, ``InvalidProgram``.

    ``products`` says for each part how bfloat16 operands are multiplied; by default, as the kernels of the CPU that runs the code
    like best. ``rounding``: where 16-bit results are rounded.
    """
    ways = products or (Products(),) * len(program.parts)
    several = len(program.parts) > 1
    lowered: dict[tuple[int, Products], bytecode.Program] = {}
    parts = []
    for part, way in zip(program.parts, ways, strict=True):
        key = id(part.program), way  # equal parts share their program
        if key not in lowered:
            lowered[key] = lower(part.program, f"{name}, phase {part.phase}" if several else name, way, rounding)
        parts.append(Part(part.phase, part.reads, part.writes, lowered[key]))
    arrays = tuple(Array(DTYPE_CODE[a.dtype], math.prod(a.shape)) for a in program.arrays)
    return _valid(encode(Call(name, arrays, program.operands, program.results, tuple(parts))))


def _valid(words: np.ndarray) -> np.ndarray:
    """``words``, which the custom call will accept: it checks them in the same way when XLA makes the executable."""
    if wrong := check(words):
        raise InvalidProgram(wrong)
    return words

"""The CPU target: tile program -> CPU program (``lower``), its format (``bytecode``, ``phased``), its custom call (``emit``).

What runs it is C++ in ``cpu/``. ``supports`` says, op by op, what there is code for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kitsune_jax.targets.cpu import bytecode, phased
from kitsune_jax.targets.cpu.bytecode import Products
from kitsune_jax.targets.cpu.emit import call
from kitsune_jax.targets.cpu.lower import lower
from kitsune_jax.targets.cpu.runtime import available, check, why_not
from kitsune_jax.targets.cpu.support import supports
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
    "supports",
    "why_not",
]


_BEST = Products()


def generate(program: Program, name: str, products: Products = _BEST) -> np.ndarray:
    """The code of ``program`` as int64 words, the attribute of its custom call. Raises ``CannotLower``, ``InvalidProgram``.

    ``products`` says how bfloat16 operands are multiplied; by default, as the kernels of the CPU that runs the code like best.
    """
    only = program.only
    return _valid(phased.encode(program, name, products) if only is None else bytecode.encode(lower(only, name, products)))


def _valid(words: np.ndarray) -> np.ndarray:
    """``words``, which the custom call will accept: it checks them in the same way when XLA makes the executable."""
    if wrong := check(words):
        raise InvalidProgram(wrong)
    return words

"""The CPU target: tile program -> CPU program (``lower``), its format (``bytecode``, ``words``), its custom call (``emit``).

What runs it is C++ in ``cpu/``. ``supports`` says, op by op, what there is code for.
"""

from __future__ import annotations

from kitsune_jax.targets.cpu.bytecode import Products
from kitsune_jax.targets.cpu.emit import call, order
from kitsune_jax.targets.cpu.lower import generate, lower
from kitsune_jax.targets.cpu.runtime import available, why_not
from kitsune_jax.targets.cpu.support import supports
from kitsune_jax.targets.errors import CannotLower, InvalidProgram

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

"""The CPU target: tile program -> CPU program (``lower``), its format (``bytecode``), its custom call (``emit``).

What runs it is C++ in ``cpu/``. ``supports`` says, op by op, what there is code for.
"""

from __future__ import annotations

from kitsune_jax.targets.cpu.errors import CannotLower
from kitsune_jax.targets.cpu.lower import lower
from kitsune_jax.targets.cpu.support import supports

__all__ = ["CannotLower", "lower", "supports"]

"""The one error of the CUDA code generator."""

from __future__ import annotations

from kitsune_jax.targets.cpu.errors import CannotLower as _Base


class CannotLower(_Base):
    """A tile program, or a plan of it, has no kernel; ``reason`` says why, in words."""

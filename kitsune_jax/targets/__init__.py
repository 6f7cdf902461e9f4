"""Targets: what executes a plan. One folder per platform; the rest of the package asks here, by platform name.

Comes in: ops (``supports``) and tile programs (``generate``). Goes out: a reason or None, and the int64 words that travel as the
attribute of the custom call (``emit``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kitsune_jax.graph import Op, Value
from kitsune_jax.targets import cpu
from kitsune_jax.targets.cpu import bytecode, runtime
from kitsune_jax.targets.cpu.emit import call as cpu_call
from kitsune_jax.targets.cpu.errors import CannotLower

if TYPE_CHECKING:
    from kitsune_jax.program.ir import TileProgram

__all__ = ["PLATFORMS", "CannotLower", "Planned", "emit", "generate", "has_target", "supports"]

PLATFORMS = ("cpu",)


class Planned(Protocol):
    """A region that was planned and generated: what ``emit`` needs of it."""

    @property
    def platform(self) -> str: ...

    @property
    def attribute(self) -> np.ndarray | None: ...


def has_target(platform: str) -> bool:
    """Whether regions can be executed on ``platform`` here; they can be planned for others all the same.

    Asked of "cpu" for the first time, it warns if the extension is missing or of another version.
    """
    return platform == "cpu" and runtime.available()


def supports(platform: str, op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
    """None if ``platform`` has code for ``op``, else the reason in words. A platform without a target refuses nothing."""
    return cpu.supports(op, in_values, out_values) if platform == "cpu" else None


def generate(platform: str, program: TileProgram, name: str) -> np.ndarray:
    """The code of ``program`` for ``platform`` as int64 words. Raises ``ValueError`` for a platform without a target."""
    _require(platform)
    return bytecode.encode(cpu.lower(program, name))


def emit(planned: Planned, args: Sequence[Any], out_avals: Sequence[Any]) -> list[Any]:
    """Bind the custom call of ``planned`` on ``args``; one result per aval. Raises ``ValueError`` if it has no code."""
    _require(planned.platform)
    if planned.attribute is None:
        raise ValueError("the region was planned without code: it cannot be called")
    return cpu_call(planned.attribute, args, out_avals)


def _require(platform: str) -> None:
    if platform not in PLATFORMS:
        raise ValueError(f"no target executes regions on {platform!r}; there is one for: {', '.join(PLATFORMS)}")

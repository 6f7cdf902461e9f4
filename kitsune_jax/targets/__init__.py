"""Targets: what executes a plan. One folder per family; the rest of the package asks here, by the target's name.

A target is a *platform* of JAX ("cpu", "cuda") or "emulator": CUDA kernels, planned for a GPU, compiled for and run on the host.
Comes in: ops (``supports``), plans and tile programs (``check``, ``generate``). Goes out: a reason or None, the code of a region,
and its custom call (``emit``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kitsune_jax.graph import Op, Value
from kitsune_jax.targets import cpu, cuda
from kitsune_jax.targets.errors import CannotLower, InvalidProgram

if TYPE_CHECKING:
    from kitsune_jax.planning.plan import Plan
    from kitsune_jax.program.ir import Program, TileProgram

__all__ = [
    "TARGETS",
    "CannotLower",
    "InvalidProgram",
    "Planned",
    "check",
    "default_device",
    "emit",
    "generate",
    "has_target",
    "machine_platform",
    "notes",
    "runs_phases",
    "supports",
    "why_not",
]

TARGETS = ("cpu", "cuda", "emulator")

Evaluate = Callable[[int, Sequence[Any]], Any]  # (op of the graph, its operands) -> its result, as JAX computes it


class Planned(Protocol):
    """A region that was planned and generated: what ``emit`` needs of it."""

    @property
    def target(self) -> str: ...

    @property
    def program(self) -> Program: ...

    @property
    def code(self) -> Any: ...


def has_target(target: str) -> bool:
    """Whether regions can be executed by ``target`` here; they can be planned for others all the same.

    Asked for the first time, it warns if something that an installation of this package should have is missing.
    """
    if target == "cpu":
        return cpu.available()
    return target in TARGETS and cuda.available(target)


def why_not(target: str) -> str:
    """Why ``has_target(target)`` is False, as a clause; "" where it is True."""
    if target not in TARGETS:
        return f"no target executes regions on {target!r}; there is one for: {', '.join(TARGETS)}"
    return cpu.why_not() if target == "cpu" else cuda.why_not(target)


def machine_platform(target: str) -> str:
    """The platform whose machine models ``target`` is planned for: that of a GPU for the emulator."""
    return "cuda" if target == "emulator" else target


def default_device(target: str) -> str | None:
    """The machine model to plan for where the user names none: None is that platform's default."""
    return cuda.default_device(target) if target != "cpu" else None


def notes(target: str) -> tuple[str, ...]:
    """What a report has to say about the devices here, for each that is not what a reader would expect."""
    return () if target == "cpu" else cuda.notes(target)


def supports(target: str, op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
    """None if ``target`` has code for ``op``, else the reason in words."""
    if target == "cpu":
        return cpu.supports(op, in_values, out_values)
    return cuda.supports(op, in_values, out_values)


def checks_plans(target: str) -> bool:
    """Whether ``check`` may refuse a plan for ``target``: if not, no program need be built to ask it."""
    return target != "cpu"


def check(target: str, program: TileProgram, plan: Plan, name: str) -> str | None:
    """None if there is code for ``program`` arranged as ``plan`` says, else the reason. Compiles nothing."""
    return None if target == "cpu" else cuda.check(program, plan, name)


def generate(target: str, program: Program, plan: Plan, name: str) -> Any:
    """The code of ``program``, whose first part was planned as ``plan``. Raises ``ValueError`` for an unknown target,
    ``CannotLower`` where there is none, ``InvalidProgram`` for code that the target's extension refuses."""
    _require(target)
    if target == "cpu":
        return cpu.generate(program, name, cpu.Products(*plan.products))
    return cuda.generate(target, program, plan, name)


def compiles(target: str) -> bool:
    """Whether ``generate`` runs a compiler, which takes seconds and can run in several threads."""
    return target != "cpu"


def runs_phases(target: str) -> bool:
    """Whether one call of ``target`` can have several phases, each with a stream space of its own."""
    return target == "cpu"


def emit(planned: Planned, args: Sequence[Any], out_avals: Sequence[Any], evaluate: Evaluate) -> list[Any]:
    """Bind the custom call of ``planned`` on ``args``; one result per aval. Raises ``ValueError`` if it has no code.

    ``evaluate`` computes what a target leaves to XLA: values that do not depend on the stream.
    """
    _require(planned.target)
    if planned.code is None:
        raise ValueError("the region was planned without code: it cannot be called")
    if planned.target == "cpu":
        return cpu.call(planned.code, args, out_avals)
    return cuda.call(planned.target, planned.code, planned.program, args, out_avals, evaluate)


def _require(target: str) -> None:
    if target not in TARGETS:
        raise ValueError(why_not(target))

"""What a target is: everything the rest of the package asks of whoever executes plans.

A target owns the machine models that it is planned for, its planner, its layout and its code. The package gets it as one object, by
its name (``targets.get``); nothing outside of its folder tells targets apart.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.graph import Graph, Op, Value
from kitsune_jax.planning.plan import Ahead, Machine, Plan, ProgramContext
from kitsune_jax.planning.streams import Region
from kitsune_jax.program.ir import Program

M = TypeVar("M", bound=Machine)
P = TypeVar("P", bound=ProgramContext)
L = TypeVar("L", bound=Plan)
Evaluate = Callable[[int, Sequence[Any]], Any]  # (op of the graph, its operands) -> its result, as JAX computes it


class Target(abc.ABC, Generic[M, P, L]):
    """``name``: the name in options and reports. ``platform``: the platform of the devices whose machine models it is planned for
    ("cpu", "cuda"). ``capabilities``: the programs that it has code for. ``M``: its machine models. ``P``: what its
    plans depend on of the program around a region. ``L``: its plans.
    """

    name: str
    platform: str
    capabilities: TargetCapabilities = TargetCapabilities()

    @abc.abstractmethod
    def why_not(self) -> str:
        """Why regions cannot be executed here, as a clause; "" where they can. They can be planned all the same."""

    @abc.abstractmethod
    def available(self) -> bool:
        """Whether regions can be executed here. Warns, once, of something missing that an installation of this package should
        have."""

    @abc.abstractmethod
    def supports(self, op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
        """None if there is code for ``op``, else the reason in words."""

    @abc.abstractmethod
    def machine(self, device: str | None = None) -> M:
        """The model of ``device``, or of the one at hand. Raises ``ValueError`` for a device that it does not know."""

    @abc.abstractmethod
    def program_context(self, graph: Graph, machine: M, body: bool) -> P:
        """The program ``graph`` as the plans of its regions depend on it. ``body``: it is the body of a loop that XLA executes."""

    def is_planned_in_program(self, region: Region, program: P) -> bool:
        """Does the plan of ``region`` depend on the readers of its results? Such a region has no plan as a graph of its own."""
        return False

    def unpipelined_seconds(self, graph: Graph, ops: Sequence[int], machine: M, program: P) -> float:
        """Modelled seconds of ``ops`` where XLA runs them. Asked of targets with ``splits_reductions`` or ``streams_elements``."""
        return 0.0

    @abc.abstractmethod
    def plan(self, graph: Graph, region: Region, machine: M, program: P) -> L:
        """The fastest plan of ``region``, a part of ``program``, that there is code for, by the cost model. A pure function: no
        clock, no randomness.

        Raises ``Infeasible`` with the reason where there is none.
        """

    def together(self, make: Callable[[], Program], plans: Sequence[L], machine: M, apart: float) -> Sequence[L] | str:
        """The plans of parts as phases of one call, or why they cannot be that or do not pay.

        Asked where ``runs_phases``. ``make`` gives the program of the call; ``plans``: of its parts by themselves, of which later
        ones have no launch of their own; ``apart``: the seconds that the same work takes otherwise.
        """
        return plans

    def ahead(self, graph: Graph, calls: Sequence[Sequence[tuple[Region, L]]], machine: M, force: bool) -> Sequence[Ahead | None]:
        """For each of the ``calls``, the regions and plans of its parts, the weight that it asks for on behalf of what XLA does
        behind it. The graph's inputs are arrays in memory. ``force``: wherever that is possible, however little it gains."""
        return [None] * len(calls)

    @abc.abstractmethod
    def generate(self, program: Program, plans: Sequence[L], title: str, ahead: Ahead | None = None) -> Any:
        """The code of a call. ``plans``: one for each of its parts. ``title`` is what profilers show. ``ahead``: what it asks for.

        Raises ``CannotLower`` where there is no code, ``InvalidProgram`` for code that the target's own check refuses.
        """

    @abc.abstractmethod
    def emit(self, code: Any, program: Program, args: Sequence[Any], out_avals: Sequence[Any], evaluate: Evaluate) -> list[Any]:
        """Bind the custom call of ``code``, which ``generate`` made of ``program``, on ``args``; one result per aval. The last of
        ``args`` is the array that the call asks for ahead, where ``code`` was generated with one.

        ``evaluate`` computes what the target leaves to XLA: values that do not depend on the stream.
        """

    def order(self, ids: Any, n: int) -> Any:
        """The positions 0..size - 1 of ``ids``, an integer array of any shape, by their id: int32 ``[ids.size]``.

        Stable: positions of equal ids keep their order. Those of ids outside of [0, n) come last, in their order too. Without side
        effects, so that XLA evaluates equal orders once and moves them out of loops.
        """
        ids = ids.reshape(-1)
        outside = ids < 0
        if n <= np.iinfo(ids.dtype).max:
            outside |= ids >= n
        keys = outside, jnp.where(outside, jnp.zeros_like(ids), ids)
        positions = jax.lax.iota(np.int32, ids.size)
        return jax.lax.sort((*keys, positions), num_keys=2, is_stable=True)[2]

    def notes(self) -> tuple[str, ...]:
        """What a report has to say about the device at hand, where it is not what a reader would expect."""
        return ()

    def surroundings(self) -> tuple[Any, ...]:
        """All that ``plan`` and ``generate`` depend on beside their arguments: plans are remembered by it."""
        return ()

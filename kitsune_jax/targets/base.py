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

from kitsune_jax.ops.graph import Graph, Op, Value
from kitsune_jax.planning.plan import Ahead, Machine, Plan
from kitsune_jax.planning.streams import Region
from kitsune_jax.program.ir import Program

M = TypeVar("M", bound=Machine)
Evaluate = Callable[[int, Sequence[Any]], Any]  # (op of the graph, its operands) -> its result, as JAX computes it


class Target(abc.ABC, Generic[M]):
    """``name``: what users and options call it. ``platform``: that of the devices whose machine models it is planned for ("cpu",
    "cuda"). ``runs_phases``: one call can have several phases, each with a stream space of its own. ``most_merged``: regions that
    follow each other become phases of one call, at most so many. ``recomputes``: a call may compute again what it would read of
    another one (``regions.alternatives``). ``repeats_products``: its calls make arrays that are much larger than what they are made
    of block by block, so a backward pass may make them again (``repeats``). ``divides_gradients``: the weight gradient of a
    concatenation is captured as a product for each part. ``sums_online``: it has code for the sums of ``ops.reduce``.
    ``sums_unordered``: its sums by index may gain where they need not have the same bits in every run. ``sums_by_batch``: it has
    code for sums over the rows of each batch; for others the gradients of an attention by queries and those by keys and values are
    made of scores of their own (``capture.rewrites.attention_scores``). ``runs_loops``: it has code for the loops of a graph.
    ``few_rows``: products of a few rows may stream over what they contract, so that all workers read the weight. ``sums_behind``: a
    loop may be a call without the sums of its steps, which are then made of arrays of all steps. ``most_summed``: elements of such
    sums that stay on chip; behind a loop of more, products of the same arrays are made as well (``capture.rewrites.loops``).
    ``splits_reductions``: where there are fewer rows than workers, reductions over a long dimension may be made of parts of it
    (``capture.rewrites.few_rows``). ``streams_elements``: those of few rows may be folds by index over its elements
    (``capture.rewrites.few_rows``). ``compiles``: ``generate`` runs a compiler, for seconds and in several threads at once. ``M``:
    its machine models.
    """

    name: str
    platform: str
    runs_phases: bool = False
    most_merged: int = 1
    recomputes: bool = False
    repeats_products: bool = False
    divides_gradients: bool = False
    sums_online: bool = False
    sums_unordered: bool = False
    sums_by_batch: bool = False
    runs_loops: bool = False
    few_rows: bool = False
    sums_behind: bool = False
    most_summed: int | None = None
    splits_reductions: bool = False
    streams_elements: bool = False
    compiles: bool = False

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

    def as_found_by(self, graph: Graph, machine: M, body: bool) -> M:
        """``machine`` as the regions of ``graph`` find it, where that depends on the whole program. ``body``: it is a step
        of a loop that XLA runs."""
        return machine

    def is_planned_in_program(self, region: Region, machine: M) -> bool:
        """Does the plan of ``region`` depend on what reads its results? Such a region has no plan as a graph of its own."""
        return False

    def unpipelined_seconds(self, graph: Graph, ops: Sequence[int], machine: M) -> float:
        """Modelled seconds of ``ops`` where XLA runs them. Asked where ``splits_reductions`` or ``streams_elements``."""
        return 0.0

    @abc.abstractmethod
    def plan(self, graph: Graph, region: Region, machine: M) -> Plan:
        """The fastest plan of ``region`` that there is code for, by the cost model. A pure function: no clock, no randomness.

        Raises ``Infeasible`` with the reason where there is none.
        """

    def together(self, make: Callable[[], Program], plans: Sequence[Plan], machine: M, apart: float) -> Sequence[Plan] | str:
        """The plans of parts as phases of one call, or why they cannot be that or do not pay.

        Asked where ``runs_phases``. ``make`` gives the program of the call; ``plans``: of its parts by themselves, of which later
        ones have no launch of their own; ``apart``: the seconds that the same work takes otherwise.
        """
        return plans

    def ahead(
        self, graph: Graph, calls: Sequence[Sequence[tuple[Region, Plan]]], machine: M, force: bool
    ) -> Sequence[Ahead | None]:
        """For each of the ``calls``, the regions and plans of its parts, the weight that it asks for on behalf of what XLA does
        behind it. The graph's inputs are arrays in memory. ``force``: wherever that is possible, however little it gains."""
        return [None] * len(calls)

    @abc.abstractmethod
    def generate(self, program: Program, plans: Sequence[Plan], title: str, ahead: Ahead | None = None) -> Any:
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

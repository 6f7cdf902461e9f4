"""Targets run plans on devices: their interface ``Target``, and ``get``, which returns a target by name.

Comes in: the name of a target: a *platform* of JAX ("cpu", "cuda"), or "emulator", which compiles CUDA kernels planned for a GPU
for the host. Goes out: its ``Target``, which owns its machine models, its planner and its code generator, in a folder of its own.
Invariant: the rest of the package never asks which target it is. To add one, make a folder with a ``Target`` object and name that
object in ``_OBJECTS``.
"""

from __future__ import annotations

import abc
import contextlib
import difflib
import importlib
import re
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from kitsune_jax import config
from kitsune_jax.config import PlannerOptions
from kitsune_jax.errors import CannotLower, InvalidProgram
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.graph import Graph, Op, Value
from kitsune_jax.planning.plan import Machine, Plan, ProgramContext
from kitsune_jax.planning.streams import Region
from kitsune_jax.program.ir import Program

__all__ = ["INSTEAD", "PLATFORMS", "CannotLower", "Evaluate", "InvalidProgram", "Target", "get"]

M = TypeVar("M", bound=Machine)
P = TypeVar("P", bound=ProgramContext)
L = TypeVar("L", bound=Plan)
Evaluate = Callable[[int, Sequence[Any]], Any]  # (op of the graph, its operands) -> its result, as JAX computes it


class Target(abc.ABC, Generic[M, P, L]):
    """``name``: as in options and reports. ``platform``: the platform of the devices it plans for ("cpu", "cuda").
    ``capabilities``: the programs it has code for. ``M``: its machine models; ``P``: its context of a program; ``L``: its plans.
    """

    name: str
    platform: str
    capabilities: TargetCapabilities = TargetCapabilities()

    @abc.abstractmethod
    def why_not(self) -> str:
        """Why regions cannot be executed here, as a clause; "" where they can. Planning works in either case."""

    @abc.abstractmethod
    def available(self) -> bool:
        """Whether regions can be executed here. Warns, once, if a part of this package's installation is missing."""

    @abc.abstractmethod
    def supports(self, op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
        """None if there is code for ``op``, else the reason in words."""

    @abc.abstractmethod
    def machine(self, device: str | None = None) -> M:
        """The model of ``device``, by default of the device present. Raises ``ValueError`` for a name it does not know."""

    @abc.abstractmethod
    def program_context(self, graph: Graph, machine: M, options: PlannerOptions, body: bool) -> P:
        """The facts about the program ``graph`` that plans of its regions depend on, and the user's ``options``. ``body``: it is
        the body of XLA's loop."""

    def unpipelined_seconds(self, graph: Graph, ops: Sequence[int], machine: M, program: P) -> float:
        """Modelled seconds of ``ops`` where XLA runs them. Only for targets with ``splits_reductions`` or ``streams_elements``."""
        return 0.0

    def xla_kernels(self, graph: Graph, ops: Sequence[int], machine: M, program: P) -> Sequence[tuple[Collection[int], float]]:
        """The kernels in which XLA runs ``ops``, none of which is a loop: the ops of each, and its modelled seconds. An op may be
        in several."""
        return []

    def search(self) -> contextlib.AbstractContextManager[None]:
        """Entered while plans for a program are searched by many calls of ``plan`` and ``merge_phases``, which may share work."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def plan(self, graph: Graph, region: Region, machine: M, program: P) -> L:
        """The fastest plan of ``region``, a part of ``program``, that the target has code for, by the cost model: a pure function
        of its arguments, without clock or randomness. Raises ``Infeasible`` with the reason where there is none.
        """

    def merge_phases(
        self, make: Callable[[], Program], plans: Sequence[L], machine: M, program: P, apart: float
    ) -> Sequence[L] | str:
        """The ``plans`` of several regions of ``program`` changed to phases of one call, or the reason why one call cannot run
        them or is slower.

        Only for targets with ``runs_phases``. ``make`` builds the tile program of the call. ``plans``: of the regions alone, all
        but the first without the seconds of a launch. ``apart``: seconds of the same work in separate calls.
        """
        return plans

    @abc.abstractmethod
    def generate(self, program: Program, plans: Sequence[L], title: str) -> Any:
        """The code of a call. ``plans``: one for each part. ``title``: its name in profilers.

        Raises ``CannotLower`` where there is no code, and ``InvalidProgram`` for code that the target's own check refuses.
        """

    @abc.abstractmethod
    def emit(self, code: Any, program: Program, args: Sequence[Any], out_avals: Sequence[Any], evaluate: Evaluate) -> list[Any]:
        """Bind the custom call of ``code``, which ``generate`` made of ``program``, on ``args``; one result per aval.
        ``evaluate`` has XLA compute a value that does not stream."""

    def order(self, ids: Any, n: int) -> Any:
        """The positions 0..size - 1 of ``ids``, an integer array of any shape, sorted by id: int32 ``[ids.size]``.

        Stable. Positions of ids outside of [0, n) come last, in their order. Free of side effects, so that XLA evaluates equal
        orders once and moves them out of loops.
        """
        ids = ids.reshape(-1)
        outside = ids < 0
        if n <= np.iinfo(ids.dtype).max:
            outside |= ids >= n
        keys = outside, jnp.where(outside, jnp.zeros_like(ids), ids)
        positions = jax.lax.iota(np.int32, ids.size)
        return jax.lax.sort((*keys, positions), num_keys=2, is_stable=True)[2]

    def notes(self) -> tuple[str, ...]:
        """Remarks for the report about the device present, such as measurements that failed."""
        return ()

    def surroundings(self) -> tuple[Any, ...]:
        """Everything that ``plan`` and ``generate`` depend on beside their arguments; part of the key of remembered plans."""
        return ()

    def variant(self) -> Hashable:
        """A name for the code that ``generate`` makes now, where it can make several for one plan; part of the key of remembered
        code."""
        return None


def order_of_constants(ids: np.ndarray, n: int) -> np.ndarray:
    """The order of ``Target.order``, by indices that are known.

    >>> order_of_constants(np.array([2, -1, 0, 9, 2, 1], np.int8), 3)
    array([2, 5, 0, 4, 1, 3], dtype=int32)
    """
    keys = ids.reshape(-1).astype(np.int64)  # an index beyond 2^63 becomes negative, and is outside all the same
    outside = (keys < 0) | (keys >= n)
    return np.argsort(np.where(outside, n, keys), kind="stable").astype(np.int32)


def profiler_label(title: str) -> str:
    """The name of a call in profilers.

    >>> profiler_label("region0 (model.py:12 (mlp))")
    'kitsune:region0 model.py:12'
    >>> profiler_label("region0 (cell [2]:3 (mlp))")
    'kitsune:region0 cell 2:3'
    """
    name, _, source = title.partition(" (")
    line = source.partition(" (")[0].rstrip(")")
    return f"kitsune:{name} {re.sub(r'[][]', '', line)}".strip()


def unknown_device(device: str) -> str:
    """The message for a ``device`` that no target has a model of: the nearest name, and all names."""
    gpus = list(importlib.import_module("kitsune_jax.targets.cuda.planning.machines").GPUS)
    family, _, cores = device.lower().partition("-")
    near = difflib.get_close_matches(family, (*gpus, *config.CPU_FAMILIES), 1)
    cores = cores if re.fullmatch(r"[1-9]\d{0,3}", cores) else str(config.num_threads())
    hint = "" if not near else f" (did you mean {near[0] if near[0] in gpus else f'{near[0]}-{cores}'!r}?)"
    return (
        f"device={device!r} is not known{hint}: GPUs are {', '.join(gpus)}; a CPU is <family>-<cores>, such as zen5-8, with one of "
        f"the families {', '.join(config.CPU_FAMILIES)}"
    )


# --- targets by name --------------------------------------------------------------------------------------------------------------

# The module and the object of each target, imported by the first ``get``.
_OBJECTS = {
    "cpu": ("kitsune_jax.targets.cpu.target", "CPU"),
    "cuda": ("kitsune_jax.targets.cuda.target", "CUDA"),
    "emulator": ("kitsune_jax.targets.cuda.target", "EMULATOR"),
}
# Targets that run only where a user names them, and the JAX platform whose own target they then replace.
INSTEAD = {"emulator": "cpu"}
PLATFORMS = tuple(name for name in _OBJECTS if name not in INSTEAD)


def get(name: str) -> Target[Any, Any, Any]:
    """The target called ``name``. Raises ``ValueError`` for any other name.

    >>> get("emulator").platform
    'cuda'
    """
    if name not in _OBJECTS:
        raise ValueError(f"no target executes regions on {name!r}; there is one for: {', '.join(_OBJECTS)}")
    module, attribute = _OBJECTS[name]
    return cast("Target[Any, Any, Any]", getattr(importlib.import_module(module), attribute))

"""The CPU target as one object."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kitsune_jax.graph import Graph, Op, Value
from kitsune_jax.planning.plan import Ahead, Plan
from kitsune_jax.profile import rounding
from kitsune_jax.profile import store as profiles
from kitsune_jax.program.ir import Program
from kitsune_jax.streams.space import Region
from kitsune_jax.targets.base import Evaluate, Target
from kitsune_jax.targets.cpu import emit, runtime, support
from kitsune_jax.targets.cpu.bytecode import Products
from kitsune_jax.targets.cpu.lower import generate
from kitsune_jax.targets.cpu.planning import machines, planner, xla_times
from kitsune_jax.targets.cpu.planning.machines import CpuMachine


@dataclasses.dataclass(frozen=True, eq=False)
class _Code:
    """The code of a call (``lower.generate``), and the seconds that it is modelled to take."""

    words: np.ndarray
    seconds: float


class _Cpu(Target[CpuMachine]):
    name = platform = "cpu"
    runs_phases = recomputes = repeats_products = sums_online = sums_by_batch = runs_loops = few_rows = splits_reductions = True
    # Code of a call is parsed and laid out in proportion to its phases. A training step of a graph network with 15 message-passing
    # steps has 350.
    most_merged = 512

    def why_not(self) -> str:
        return runtime.why_not()

    def available(self) -> bool:
        return runtime.available()

    def supports(self, op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
        return support.supports(op, in_values, out_values)

    def machine(self, device: str | None = None) -> CpuMachine:
        return machines.cpu_at_hand() if device is None else machines.cpu_model(device)

    def as_found_by(self, graph: Graph, machine: CpuMachine, body: bool) -> CpuMachine:
        return xla_times.as_found_by(graph, machine, body)

    def is_planned_in_program(self, region: Region, machine: CpuMachine) -> bool:
        return not machine.unwritten.isdisjoint(region.outputs)

    def unpipelined_seconds(self, graph: Graph, ops: Sequence[int], machine: CpuMachine) -> float:
        return xla_times.of_ops(graph, ops, machine)

    def plan(self, graph: Graph, region: Region, machine: CpuMachine) -> Plan:
        return planner.plan(graph, region, machine)

    def generate(self, program: Program, plans: Sequence[Plan], title: str, ahead: Ahead | None = None) -> Any:
        words = generate(program, title, [Products(*plan.products) for plan in plans], rounding.at_hand())
        return _Code(words, sum(plan.seconds for plan in plans))

    def emit(self, code: Any, program: Program, args: Sequence[Any], out_avals: Sequence[Any], evaluate: Evaluate) -> list[Any]:
        return emit.call(code.words, args, out_avals, code.seconds)

    def order(self, ids: Any, n: int) -> Any:
        # XLA sorts 64-bit keys; the counting sort packs a key and a position into 64 bits.
        return emit.order(ids, n) if n < 1 << 32 else super().order(ids, n)

    def notes(self) -> tuple[str, ...]:
        return profiles.notes()

    def surroundings(self) -> tuple[Any, ...]:
        return profiles.at_hand(), profiles.notes(), rounding.at_hand()


CPU = _Cpu()

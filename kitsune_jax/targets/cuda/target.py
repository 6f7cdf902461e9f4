"""The CUDA target, and the emulator of its kernels, as one object each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kitsune_jax import config
from kitsune_jax.graph import Graph, Op, Value
from kitsune_jax.planning.plan import Plan
from kitsune_jax.program.build import build
from kitsune_jax.program.ir import Program
from kitsune_jax.streams.space import Region
from kitsune_jax.targets import cuda
from kitsune_jax.targets.base import Evaluate, Target
from kitsune_jax.targets.cuda import devices, lower
from kitsune_jax.targets.cuda.planning import machines, planner
from kitsune_jax.targets.cuda.planning.machines import GpuMachine


class _Cuda(Target[GpuMachine]):
    platform = "cuda"
    compiles = True

    def __init__(self, name: str):
        self.name = name

    def why_not(self) -> str:
        return lower.why_not(self.name)

    def available(self) -> bool:
        return lower.available(self.name)

    def supports(self, op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
        return cuda.supports(op, in_values, out_values)

    def machine(self, device: str | None = None) -> GpuMachine:
        return machines.gpu(device or devices.model())

    def plan(self, graph: Graph, region: Region, machine: GpuMachine) -> Plan:
        """Candidates of the planner are shown to the code generator, from the fastest on, and the first one that it takes is it."""
        return planner.plan(graph, region, machine, lambda plan: lower.check(build(graph, region, plan), plan, "region"))

    def generate(self, program: Program, plan: Plan, title: str) -> Any:
        return lower.generate(self.name, program, plan, title)

    def emit(self, code: Any, program: Program, args: Sequence[Any], out_avals: Sequence[Any], evaluate: Evaluate) -> list[Any]:
        return cuda.call(self.name, code, program, args, out_avals, evaluate)

    def notes(self) -> tuple[str, ...]:
        return tuple(filter(None, [devices.note()]))

    def surroundings(self) -> tuple[Any, ...]:
        return config.cuda_arch(), config.cuda_avoid()


class _Emulator(_Cuda):
    def machine(self, device: str | None = None) -> GpuMachine:
        return machines.gpu(device)

    def notes(self) -> tuple[str, ...]:
        return ()


CUDA = _Cuda("cuda")
EMULATOR = _Emulator("emulator")

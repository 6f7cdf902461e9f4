"""The CUDA target, and the emulator of its kernels, as one object each."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kitsune_jax import config
from kitsune_jax.graph import Graph, Op, Value
from kitsune_jax.planning.plan import Ahead, Plan
from kitsune_jax.program.build import build
from kitsune_jax.program.ir import Program
from kitsune_jax.streams.space import Region
from kitsune_jax.targets.base import Evaluate, Target
from kitsune_jax.targets.cuda import devices, emit, hostcc, lower, nvrtc, runtime, support
from kitsune_jax.targets.cuda.planning import ahead, machines, planner, xla_times
from kitsune_jax.targets.cuda.planning.machines import GpuMachine


class _Cuda(Target[GpuMachine]):
    platform = "cuda"
    runs_phases = True
    most_merged = 4  # all of them are compiled as one kernel, which has memory of its own for every array between them
    divides_gradients = repeats_products = True
    sums_online = sums_unordered = True
    runs_loops = True
    sums_behind = streams_elements = True
    most_summed = 1 << 16  # registers of an SM
    compiles = True

    def __init__(self, name: str):
        self.name = name

    def why_not(self) -> str:
        return runtime.why_not() if not runtime.available() else self._no_compiler()

    def _no_compiler(self) -> str:
        return nvrtc.why_not() or devices.why_not() or ""

    def available(self) -> bool:
        why = self.why_not()
        if why:
            warn_once(f"kitsune_jax makes no CUDA kernels here: {why}. Functions lower as plain HLO.")
        return not why

    def supports(self, op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
        return support.supports(op, in_values, out_values)

    def machine(self, device: str | None = None) -> GpuMachine:
        return machines.gpu(device or devices.model())

    def unpipelined_seconds(self, graph: Graph, ops: Sequence[int], machine: GpuMachine) -> float:
        return xla_times.of_ops(graph, ops, machine)

    def plan(self, graph: Graph, region: Region, machine: GpuMachine) -> Plan:
        """Candidates of the planner are shown to the code generator, from the fastest on, and the first one that it takes is it."""
        return planner.plan(graph, region, machine, lambda plan: lower.check(build(graph, region, plan), plan, "region"))

    def together(
        self, make: Callable[[], Program], plans: Sequence[Plan], machine: GpuMachine, apart: float
    ) -> Sequence[Plan] | str:
        """The parts run in the same warpgroups and without clusters."""
        program = make()
        alone = [planner.without_clusters(plan, machine) for plan in plans]
        found = planner.with_barriers(alone, [part.phase for part in program.parts], machine)
        return planner.why_apart(found, apart) or lower.together(program, found)

    def ahead(
        self, graph: Graph, calls: Sequence[Sequence[tuple[Region, Plan]]], machine: GpuMachine, force: bool
    ) -> Sequence[Ahead | None]:
        return ahead.of_calls(graph, calls, machine, force)

    def generate(self, program: Program, plans: Sequence[Plan], title: str, ahead: Ahead | None = None) -> Any:
        return lower.generate(self.name, program, plans, title, ahead)

    def emit(self, code: Any, program: Program, args: Sequence[Any], out_avals: Sequence[Any], evaluate: Evaluate) -> list[Any]:
        return emit.call(self.name, code, program, args, out_avals, evaluate)

    def order(self, ids: Any, n: int) -> Any:
        """XLA:GPU sorts one key and one value by radix, and anything more by comparisons, in hundreds of kernels."""
        ids = ids.reshape(-1)
        outside = (ids < 0) | (ids >= n)  # at most 32 bits: others have no code here
        keys = jnp.where(outside, jnp.full_like(ids, n), ids).astype(jnp.uint32)
        return jax.lax.sort((keys, jax.lax.iota(jnp.int32, ids.size)), num_keys=1, is_stable=True)[1]

    def notes(self) -> tuple[str, ...]:
        return tuple(filter(None, [devices.note()]))

    def surroundings(self) -> tuple[Any, ...]:
        return config.cuda_arch(), config.cuda_avoid()


class _Emulator(_Cuda):
    def _no_compiler(self) -> str:
        return hostcc.why_not() or ""

    def machine(self, device: str | None = None) -> GpuMachine:
        return machines.gpu(device)

    def notes(self) -> tuple[str, ...]:
        return ()


@functools.cache
def warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


CUDA = _Cuda("cuda")
EMULATOR = _Emulator("emulator")

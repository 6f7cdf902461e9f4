"""The CPU target: ``CPU``, the ``Target`` object, and ``supports``, which says for each op whether there is code for it.

Comes in: a Graph, regions, plans, and an op with its values. Goes out: by the ``Target``, plans and calls; by ``supports``, None or
the reason for the report. Invariant: ``lower`` has code for every op that ``supports`` passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from kitsune_jax.config import PlannerOptions
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.graph import Graph, Op, Value
from kitsune_jax.ops.spec import is_narrow
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.plan import CpuPlan
from kitsune_jax.planning.streams import Region
from kitsune_jax.program.ir import Program
from kitsune_jax.targets import Evaluate, Target, profiler_label
from kitsune_jax.targets.cpu import call
from kitsune_jax.targets.cpu.bytecode import DTYPE_CODE, MAX_LOOP_DIMS, Products
from kitsune_jax.targets.cpu.lower import generate
from kitsune_jax.targets.cpu.planning import machines, planner
from kitsune_jax.targets.cpu.planning import xla as xla_times
from kitsune_jax.targets.cpu.planning.machines import CpuMachine, CpuProgramContext
from kitsune_jax.targets.cpu.products import MATMUL_DTYPES
from kitsune_jax.targets.cpu.profile import store as profiles
from kitsune_jax.targets.cpu.profile import xla

# --- Supported ops ----------------------------------------------------------------------------------------------------------------


def supports(op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
    """None if the CPU target has code for ``op``, else the reason for the report. ``lower`` has code for every op that passes here.

    Example: ``supports(op, ins, outs)`` of an int32 ``dot_general`` is ``"matrix product of int32 (only floating point)"``.
    """
    for value in (*in_values, *out_values):
        if value.dtype not in DTYPE_CODE:
            return f"dtype {value.dtype} has no code on the CPU"
        if value.size == 0:
            return "an array without elements"
        if len(value.shape) > MAX_LOOP_DIMS:
            return f"more than {MAX_LOOP_DIMS} dimensions (reshape it to fewer)"
    if op.body is not None:
        return _loop(op.body)
    if op.kind == "dot_general":
        return _dot_general(op, in_values, out_values)
    spec = OPS.get(op.kind)
    if spec is None or spec.family == "pointwise" and spec.cpu is None and op.kind != "copy":
        return f"{op.kind} has no code on the CPU"
    if op.kind == "select_n" and len(in_values) != 3:
        return "select_n with more than two cases (nest selections between two)"
    values = (in_values[0], *in_values[2:]) if spec.family in ("gather", "scatter") else in_values  # without the index
    for dtype in (v.dtype for v in (*values, *(out_values if spec.gives == "any" else ()))):
        if dtype not in spec.dtypes or spec.family == "cumulative" and dtype == "bool":
            return f"{op.kind} of {dtype}"
        if is_narrow(dtype) and not spec.widens(dict(op.params), dtype):
            return f"{op.kind} of {dtype} (16-bit floats are computed in float32)"
    return None


def _loop(body: Graph) -> str | None:
    for op in body.ops:
        why = supports(op, [body.values[v] for v in op.inputs], [body.values[v] for v in op.outputs])
        if why is not None:
            return f"{op.label or op.kind} ({op.source or 'no source line'}): {why}"
    return None


def _dot_general(op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
    if any(v.literal is not None for v in in_values):
        return "matrix product with a constant (a multiplication by it can be pipelined)"
    lhs, rhs = (v.dtype for v in in_values)
    out, accumulate = out_values[0].dtype, op["accumulate"]
    if lhs != rhs:
        return f"matrix product of {lhs} and {rhs}"
    if lhs not in MATMUL_DTYPES or out not in MATMUL_DTYPES:
        return f"matrix product of {lhs} to {out} (only floating point)"
    wide = "float64" if lhs == "float64" else "float32"
    if (out == "float64") != (lhs == "float64") or accumulate != wide:
        return f"matrix product of {lhs} accumulated in {accumulate}"
    return None


# --- The target -------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _CallCode:
    """The code of a call (``lower.generate``), its modelled seconds, and its name in profilers."""

    words: np.ndarray
    seconds: float
    label: str


class _Cpu(Target[CpuMachine, CpuProgramContext, CpuPlan]):
    name = platform = "cpu"
    capabilities = TargetCapabilities(
        runs_phases=True,
        # Parsing and layout take time in proportion to phases. Training a graph network with 15 message-passing steps takes 350.
        most_merged=512,
        recomputes=True,
        repeats_products=True,
        sums_by_worker=True,
        stores_rows=True,
        sums_online=True,
        runs_loops=True,
        few_rows=True,
        splits_reductions=True,
        long_row_bytes=32 << 10,  # 32 rows take a megabyte, the L2 of most cores
    )

    def why_not(self) -> str:
        return call.why_not()

    def available(self) -> bool:
        return call.available()

    def supports(self, op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
        return supports(op, in_values, out_values)

    def machine(self, device: str | None = None) -> CpuMachine:
        return machines.cpu_at_hand() if device is None else machines.cpu_model(device)

    def program_context(self, graph: Graph, machine: CpuMachine, options: PlannerOptions, body: bool) -> CpuProgramContext:
        return xla_times.program_context(graph, machine, options, body)

    def unpipelined_seconds(self, graph: Graph, ops: Sequence[int], machine: CpuMachine, program: CpuProgramContext) -> float:
        return xla_times.of_ops(graph, ops, machine, program)

    def xla_kernels(
        self, graph: Graph, ops: Sequence[int], machine: CpuMachine, program: CpuProgramContext
    ) -> Sequence[tuple[Collection[int], float]]:
        return xla_times.kernels_of_ops(graph, ops, machine, program)

    def plan(self, graph: Graph, region: Region, machine: CpuMachine, program: CpuProgramContext) -> CpuPlan:
        return planner.plan(graph, region, machine, program)

    def generate(self, program: Program, plans: Sequence[CpuPlan], title: str) -> Any:
        words = generate(program, title, [Products(*plan.products) for plan in plans], xla.rounding_at_hand())
        return _CallCode(words, sum(plan.seconds for plan in plans), profiler_label(title))

    def emit(self, code: Any, program: Program, args: Sequence[Any], out_avals: Sequence[Any], evaluate: Evaluate) -> list[Any]:
        return call.call(code.words, args, out_avals, code.seconds, code.label)

    def order(self, ids: Any, n: int) -> Any:
        # XLA sorts 64-bit keys; the counting sort packs a key and a position into 64 bits.
        return call.order(ids, n) if n < 1 << 32 else super().order(ids, n)

    def notes(self) -> tuple[str, ...]:
        return profiles.notes()

    def surroundings(self) -> tuple[Any, ...]:
        return profiles.at_hand(), xla.rounding_at_hand()


CPU = _Cpu()

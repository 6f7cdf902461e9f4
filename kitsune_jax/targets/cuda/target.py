"""The CUDA target and the emulator of its kernels as ``Target`` objects, and the ops that they have code for.

Comes in: an op of the Graph with its values, before a region is formed. Goes out: from ``supports``, None or the reason for the
report; by the ``Target`` objects, plans and calls. Invariant: ``supports`` judges by the op alone; the code generator checks every
plan (``lower.check``).
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kitsune_jax import config
from kitsune_jax.config import PlannerOptions
from kitsune_jax.errors import NoCudaKernelsWarning
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.graph import Graph, Op, Value
from kitsune_jax.ops.loops import parts
from kitsune_jax.ops.reduce import INDEXED, ONLINE
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.plan import GpuPlan, ProgramContext
from kitsune_jax.planning.streams import Region
from kitsune_jax.program.build import build
from kitsune_jax.program.ir import Instr, Program
from kitsune_jax.targets import Evaluate, Target
from kitsune_jax.targets.cuda import hostcc, lower, nvrtc, pointwise, runtime
from kitsune_jax.targets.cuda.planning import machines, planner, xla
from kitsune_jax.targets.cuda.planning.machines import GpuMachine
from kitsune_jax.targets.cuda.stage import fitting
from kitsune_jax.targets.cuda.stage.instructions import REDUCTIONS

# JAX's default precision of a float32 product on a GPU is tf32.
_TF32_PRECISIONS = (None, "DEFAULT")


def supports(op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
    """None if the CUDA target has code for ``op``, else the reason."""
    for value in (*in_values, *out_values):
        if value.dtype not in pointwise.COMPUTE:
            return f"{value.dtype} has no code on the GPU"
        if value.size == 0:
            return "an array without elements has no code on the GPU"
    if op.kind in INDEXED or op.kind in ONLINE:  # one op does not tell which operands stream; an index that does picks rows
        return None
    if op.body is not None:
        return _loop(op.body)
    if op.kind == "dot_general":
        return _dot_general(op, in_values, out_values)
    spec = OPS.get(op.kind)
    if spec is None or not spec.moves and spec.family not in ("pointwise", "convert") and op.kind not in REDUCTIONS:
        return f"{op.kind} has no code on the GPU"
    return None if spec.moves or op.kind in REDUCTIONS else _pointwise(op, in_values, out_values)


def _loop(body: Graph) -> str | None:
    """The reason why a loop with this body cannot run in a kernel, and its source line; or None."""
    for op in body.ops:
        why = supports(op, [body.values[v] for v in op.inputs], [body.values[v] for v in op.outputs])
        if why is None and op.body is not None and (parts(op).xs or parts(op).ys):
            why = "an inner loop over slices of arrays has no code on the GPU"
        if why is not None:
            return f"{op.label or op.kind} ({op.source}): {why}" if op.source else why
    return None


def _pointwise(op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
    if op.kind == "select_n" and len(in_values) != 3:
        return "select_n with more than two cases has no code on the GPU: nest jnp.where instead"
    if op.kind == "select_n" and in_values[0].dtype != "bool":
        return "select_n by an integer has no code on the GPU: use a bool"
    instr = Instr(op.kind, op.inputs, op.outputs, op.params)
    types = [pointwise.COMPUTE[v.dtype] for v in in_values]
    out = out_values[0].dtype
    operands = [f"x{k}" for k in range(len(types))]
    if pointwise.instruction(instr, operands, types, pointwise.COMPUTE[out], out) is None:
        return f"{op.kind} of {in_values[0].dtype} has no code on the GPU"
    return None


def _dot_general(op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
    lhs, rhs = (v.dtype for v in in_values)
    if lhs != rhs or lhs not in pointwise.OPERAND:
        return f"matrix product of {lhs} and {rhs} has no code on the GPU"
    if op["accumulate"] != "float32":
        return f"matrix product accumulated in {op['accumulate']} has no code on the GPU: use preferred_element_type=float32"
    if lhs == "float32" and op["precision"] not in _TF32_PRECISIONS:
        return f"matrix product of float32 at precision {op['precision']}: the GPU kernels have only tf32 (precision DEFAULT)"
    return None


# --- The targets ------------------------------------------------------------------------------------------------------------------


class _Cuda(Target[GpuMachine, ProgramContext, GpuPlan]):
    platform = "cuda"
    capabilities = TargetCapabilities(
        runs_phases=True,
        most_merged=4,  # phases of a call: they are compiled as one kernel, and all arrays between them exist at the same time
        divides_gradients=True,
        stores_gradients=True,
        repeats_products=True,
        sums_online=True,
        sums_by_batch=False,
        runs_loops=True,
        sums_behind=True,
        most_summed=1 << 16,  # registers of an SM
        streams_elements=True,
        cuts_wide_rows=True,
        compiles=True,
    )

    def __init__(self, name: str):
        self.name = name

    def why_not(self) -> str:
        return runtime.why_not() if not runtime.available() else self._no_compiler()

    def _no_compiler(self) -> str:
        return nvrtc.why_not() or runtime.why_no_kernels() or ""

    def available(self) -> bool:
        why = self.why_not()
        if why:
            message = f"kitsune_jax makes no CUDA kernels here: {why}. Functions lower as plain HLO."
            warn_once(f"{message} python -m kitsune_jax doctor says what to do.")
        return not why

    def supports(self, op: Op, in_values: Sequence[Value], out_values: Sequence[Value]) -> str | None:
        return supports(op, in_values, out_values)

    def machine(self, device: str | None = None) -> GpuMachine:
        return machines.gpu(device or runtime.device_model())

    def program_context(self, graph: Graph, machine: GpuMachine, options: PlannerOptions, body: bool) -> ProgramContext:
        return ProgramContext(options=options)

    def unpipelined_seconds(self, graph: Graph, ops: Sequence[int], machine: GpuMachine, program: ProgramContext) -> float:
        return xla.of_ops(graph, ops, machine, program)

    def xla_kernels(
        self, graph: Graph, ops: Sequence[int], machine: GpuMachine, program: ProgramContext
    ) -> Sequence[tuple[Collection[int], float]]:
        return xla.kernels_of_ops(graph, ops, machine, program)

    def search(self) -> contextlib.AbstractContextManager[None]:
        return fitting.shared_fits()

    def plan(self, graph: Graph, region: Region, machine: GpuMachine, program: ProgramContext) -> GpuPlan:
        """The fastest candidate of the planner that the code generator accepts."""
        return planner.plan(graph, region, machine, program, lambda plan: lower.check(build(graph, region, plan), plan, "region"))

    def merge_phases(
        self, make: Callable[[], Program], plans: Sequence[GpuPlan], machine: GpuMachine, program: ProgramContext, apart: float
    ) -> Sequence[GpuPlan] | str:
        """All parts run in the same warpgroups, without clusters."""
        call = make()
        alone = [planner.without_clusters(plan, machine) for plan in plans]
        found = planner.with_barriers(alone, [part.phase for part in call.parts], machine)
        return lower.fit_in_one_kernel(call, found, lambda lanes: planner.with_lanes(found, lanes, apart, machine))

    def generate(self, program: Program, plans: Sequence[GpuPlan], title: str) -> Any:
        return lower.generate(self.name, program, plans, title)

    def emit(self, code: Any, program: Program, args: Sequence[Any], out_avals: Sequence[Any], evaluate: Evaluate) -> list[Any]:
        return lower.call(self.name, code, program, args, out_avals, evaluate)

    def order(self, ids: Any, n: int) -> Any:
        """XLA:GPU sorts a key with one value by radix; anything more by comparisons, in hundreds of kernels."""
        ids = ids.reshape(-1)
        outside = (ids < 0) | (ids >= n)  # ids have at most 32 bits: wider ones have no code here
        keys = jnp.where(outside, jnp.full_like(ids, n), ids).astype(jnp.uint32)
        return jax.lax.sort((keys, jax.lax.iota(jnp.int32, ids.size)), num_keys=1, is_stable=True)[1]

    def notes(self) -> tuple[str, ...]:
        return tuple(filter(None, [runtime.note()]))

    def surroundings(self) -> tuple[Any, ...]:
        return config.cuda_arch(), config.cuda_avoid()

    def variant(self) -> bool:
        return runtime.stamps()


class _Emulator(_Cuda):
    def _no_compiler(self) -> str:
        return hostcc.why_not() or ""

    def machine(self, device: str | None = None) -> GpuMachine:
        return machines.gpu(device)

    def notes(self) -> tuple[str, ...]:
        return ()


@functools.cache
def warn_once(message: str) -> None:
    warnings.warn(message, NoCudaKernelsWarning, stacklevel=4)


CUDA = _Cuda("cuda")
EMULATOR = _Emulator("emulator")

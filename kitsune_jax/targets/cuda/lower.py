"""From a plan and a tile program to a compiled kernel and its custom call."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kitsune_jax import _compat, config
from kitsune_jax.errors import CannotLower, InvalidProgram
from kitsune_jax.ops.graph import Value
from kitsune_jax.ops.reduce import identity
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.plan import Ahead, GpuPlan
from kitsune_jax.program.ir import SINKS, Array, Instr, Program, TileProgram, walk
from kitsune_jax.targets.cuda import call_layout, compile, layout, nvrtc, pack, print_kernel, runtime, tiles
from kitsune_jax.targets.cuda.arrangement import Arrangement, Fetch
from kitsune_jax.targets.cuda.layout import Layout
from kitsune_jax.targets.cuda.pack import VectorRecipe, WeightRecipe
from kitsune_jax.targets.cuda.planning.machines import gpu

# ----------------------------------------------------------------------------------------------------------------------------------
# The kernel of a call: the route from its stages to source, launch words and the recipes of its operands.
#
# Comes in: a tile program, or a call of several, and ``Arrangement``s (what the plans ask for). Goes out: ``Kernel``. The route:
# each stage is lowered to nodes of the device IR and fitted into registers and shared memory (``fitting``), all of them are laid
# out (``layout``) and completed (``frames``), equal ones found (``sharing``), and printed (``print_kernel``). The parts of a call
# of several phases go this way one by one, and are put together by ``call_layout`` and ``print_phases``. Raises ``CannotLower``
# where the arrangement does not fit.
# ----------------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """What XLA makes of a part's stationary operands. ``weights``: recipes of each image, and ``order``, how ``pack.weights`` lines
    them up; then the vectors; ``tables``: stationary values that are read as they lie. ``program``: the part as it was laid out,
    whose values these are."""

    program: TileProgram
    weights: tuple[tuple[WeightRecipe, ...], ...]
    order: tuple[tuple[tuple[int, int], ...], ...]
    vectors: tuple[VectorRecipe, ...]
    tables: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """Its operands are ``inputs`` of the call, what is ``packed`` for each part, for each result of ``filled`` an array of the
    identity of the fold, whose memory becomes that result, and the array that it asks the L2 for, where there is one. Its results
    are those of the call, ``kept`` and the workspace; those of ``widened`` are float32 where the call's are narrower."""

    source: str
    launch: tuple[int, ...]
    inputs: tuple[int, ...]
    packed: tuple[Packed, ...]
    filled: tuple[tuple[int, str], ...]
    kept: tuple[Array, ...]
    workspace_bytes: int
    registers: int  # estimate of what values need, at most
    widened: tuple[int, ...] = ()

    @property
    def shared_bytes(self) -> int:
        return self.launch[5]

    @property
    def hints(self) -> int:
        """Operands, the last ones, that the kernel asks the L2 for and does not read."""
        return self.launch[11]


def generate_kernel(
    program: TileProgram, arrangement: Arrangement, name: str, share: bool = True, fetch: Fetch | None = None
) -> Kernel:
    """The kernel of ``program`` as ``arrangement`` asks. ``share``: equal stages run the same code. Raises ``CannotLower``."""
    _check(program)
    program, widened = _widened(program)
    found = dataclasses.replace(layout.of_kernel(program, arrangement, name), fetch=fetch)
    source = print_kernel.source(found, _kinds(found, share))
    packed = (_packed_operands(found, found.operands.tables),)
    operands, size, most = found.operands.inputs, found.workspace.bytes, _registers(found)
    return Kernel(source, found.launch, operands, packed, found.filled, (), size, most, widened)


def of_call(call: Program, arrangements: tuple[Arrangement, ...], name: str, fetch: Fetch | None = None) -> Kernel:
    """The kernel of a call of several parts, arranged as each of ``arrangements`` asks. Raises ``CannotLower``."""
    for part in call.parts:
        _check(part.program)
        if len(call.parts) > 1 and pack.cuts_by_groups(part.program):
            raise CannotLower("tiles of a batch, and weights that a loop cuts, have no code in a call of several phases on the GPU")
    found = call_layout.of_call(call, arrangements, name, fetch)
    layouts = [part.layout for part in found.parts]
    if any(at.exchanges for at in layouts):
        raise CannotLower("a loop whose weights are split over a cluster has no code in a call of several phases on the GPU")
    source = print_kernel.source_of_phases(found, [_kinds(at, True) for at in layouts])
    packed = tuple(
        _packed_operands(at, tuple(v for v in at.operands.tables if call_layout.table_input(at, v) is None)) for at in layouts
    )
    most = max(_registers(at) for at in layouts)
    return Kernel(source, found.launch, found.direct, packed, found.filled, found.kept, found.workspace_bytes, most)


def _check(program: TileProgram) -> None:
    if program.batch_axes and len(program.stages) > 1:
        raise CannotLower("tiles that keep within a batch have no spatial pipeline")
    if any(program.outputs[sink.array].row_strides for sink in program.sinks):
        raise CannotLower("sums of each batch, as the gradients of an attention's keys and values, have no code on the GPU")
    if any(i.kind in SINKS and i.get("dims") is not None for stage in program.stages for i in walk(stage.body)):
        raise CannotLower("sums into a part of a sink have no code on the GPU")
    if program.tile_rows != tiles.TILE_ROWS:
        raise CannotLower(f"tiles of {program.tile_rows} rows; the GPU's have {tiles.TILE_ROWS}")


def _widened(program: TileProgram) -> tuple[TileProgram, tuple[int, ...]]:
    """``program`` with float32 results where rows are added to them atomically (a bfloat16 would be rounded at every addition), and
    which these are."""
    found = {program.sinks[i["sink"]].array for s in program.stages for i in s.body if layout.is_added(i)}
    wide = tuple(k for k in sorted(found) if program.outputs[k].dtype in ("bfloat16", "float16"))
    outputs = [dataclasses.replace(a, dtype="float32") if k in wide else a for k, a in enumerate(program.outputs)]
    return dataclasses.replace(program, outputs=tuple(outputs)), wide


def _kinds(at: Layout, share: bool) -> list[layout.Kind]:
    return layout.kinds([layout.place_stage(at, s) for s in range(len(at.stages))], share)


def _packed_operands(at: Layout, tables: tuple[int, ...]) -> Packed:
    operands = at.operands
    return Packed(at.program, tuple(operands.of_group(d) for d in operands.groups), operands.order, operands.vectors, tables)


def _registers(at: Layout) -> int:
    return max(stage.lowered.liveness.peak for stage in at.stages)


# ----------------------------------------------------------------------------------------------------------------------------------
# GpuPlan and tile program in, compiled kernel out.
#
# Comes in: a tile program and the plan that arranged it. Goes out: ``Code``, or the reason why there is none. Invariant: a plan
# that ``check`` lets through has a kernel that fits the device; it is generated by the same function.
# ----------------------------------------------------------------------------------------------------------------------------------

_NAME = "region"


@dataclasses.dataclass(frozen=True)
class Code:
    """A region's kernel. ``image``: a cubin or PTX for ``arch``, or a shared library for the emulator."""

    kernel: Kernel
    image: bytes
    arch: str
    name: str


def arrangement(plan: GpuPlan, program: TileProgram) -> Arrangement:
    """What ``plan`` asks of the kernel."""
    machine = gpu(plan.machine)
    return Arrangement(
        spatial=plan.arrangement == "spatial",
        sm=900 if machine.max_cluster > 1 else 800,
        lanes=plan.lanes,
        cluster=plan.cluster,
        replicas=plan.replicas,
        resident=tuple(stage.resident for stage in plan.stages),
        split=tuple(stage.split for stage in plan.stages),
        places=tuple(queue.place for queue in plan.queues),
        shared_bytes=machine.local_bytes,
    )


def kind(plan: GpuPlan, gradients: bool) -> str:
    """What kernels with the same roles, rings and barriers have in common, as a name: ``KITSUNE_CUDA_AVOID`` takes it.

    ``gradients``: it has weight gradients. The names are ``sm90-vertical-resident-lanes2``, ``sm80-spatial-l2-lanes1-split``,
    ``sm90-spatial-cluster-lanes1-gradients`` and the like.
    """
    sm = "sm90" if gpu(plan.machine).max_cluster > 1 else "sm80"
    if plan.arrangement == "spatial":
        # Stages without rings only share what they load, or are a loop over a cluster.
        how = plan.queues[0].place if plan.queues else "cluster" if plan.cluster > 1 else "apart"
    else:
        how = "resident" if plan.stages[0].resident else f"streamed-cluster{plan.cluster}"
    split = "-split" if any(stage.split > 1 for stage in plan.stages) else ""
    return f"{sm}-{plan.arrangement}-{how}-lanes{plan.lanes}{split}{'-gradients' if gradients else ''}"


def check(program: TileProgram, plan: GpuPlan, name: str) -> str | None:
    """None if there is a kernel for ``program`` arranged as ``plan`` says, else the reason. Compiles nothing."""
    return check_call(Program.of(program), (plan,), name)


def check_call(program: Program, plans: Sequence[GpuPlan], name: str) -> str | None:
    """None if there is a kernel for ``program``, whose parts are arranged as ``plans`` say, else the reason. Compiles nothing."""
    for part, plan in zip(program.parts, plans, strict=True):
        this = kind(plan, any(i.kind == "matmul_sink" for stage in part.program.stages for i in walk(stage.body)))
        if any(fnmatch.fnmatchcase(this, pattern) for pattern in config.cuda_avoid()):
            return "KITSUNE_CUDA_AVOID rules its kind of kernel out"
    try:
        _kernel(program, tuple(plans), name)
    except CannotLower as no:
        return no.reason
    return None


def source(program: Program, plans: Sequence[GpuPlan], name: str) -> str:
    """The C++ source of the kernel for ``program``, whose parts are arranged as ``plans`` say. Compiles nothing; raises
    ``CannotLower``."""
    return _kernel(program, tuple(plans), name).source


def together(program: Program, plans: Sequence[GpuPlan]) -> tuple[GpuPlan, ...] | str:
    """``plans`` of the parts of ``program`` as parts of one kernel, with as many lanes as all can have; or why there is none."""
    first, reason = plans[0].lanes, ""
    for lanes in range(first, 0, -1):
        tried = tuple(dataclasses.replace(plan, lanes=lanes) for plan in plans)
        why = check_call(program, tried, _NAME)
        if why is None:
            return tried
        reason = reason or why
    return reason


def generate(target: str, program: Program, plans: Sequence[GpuPlan], name: str, ahead: Ahead | None = None) -> Code:
    """The compiled kernel of ``program``, which asks for ``ahead``. Raises ``CannotLower``; ``InvalidProgram``; ``CompileError``
    with the compiler's log."""
    fetch = None if ahead is None else Fetch.of(ahead)
    # Not the user's line: it would be in the cache key, and a moved line a new compilation.
    made = _kernel(program, tuple(plans), _NAME, fetch)
    if wrong := runtime.check(made.launch):
        raise InvalidProgram(wrong)
    if target == "emulator":
        sm = made.launch[1]
        return Code(made, compile.emulated(made.source, sm), f"emulated sm_{sm // 10}", name)
    arch = runtime.arch()
    compiled = compile.cubin(made.source, arch)
    _check_registers(made, compiled)
    return Code(made, compiled.cubin, arch, name)


def _check_registers(made: Kernel, compiled: nvrtc.Compiled) -> None:
    """Raises ``InvalidProgram`` where ``setmaxnreg`` would wait for ever for registers that the launch does not have."""
    _, sm, _, threads, *_ = made.launch
    if sm == 900 and threads > 2 * tiles.GROUP_THREADS:  # several lanes
        has, needs = nvrtc.resources(compiled.log, compiled.cubin).registers, 65536 // threads // 8 * 8
        if has < needs:
            raise InvalidProgram(f"the compiler launches the kernel with {has} registers a thread; its roles need {needs}")


@functools.lru_cache(maxsize=64)
def _kernel(program: Program, plans: tuple[GpuPlan, ...], name: str, fetch: Fetch | None = None) -> Kernel:
    if program.only is not None:
        return generate_kernel(program.only, arrangement(plans[0], program.only), name, fetch=fetch)
    asked = [arrangement(plan, part.program) for plan, part in zip(plans, program.parts, strict=True)]
    return of_call(program, tuple(asked), name, fetch)


# ----------------------------------------------------------------------------------------------------------------------------------
# The custom call of a kernel, as JAX sees it, and the operands that XLA packs for it.
#
# Comes in: ``Code``, the region's operands, and a way to evaluate what does not depend on the stream. Goes out: the region's
# results.
# ----------------------------------------------------------------------------------------------------------------------------------


def call(
    target: str,
    code: Code,
    program: Program,
    args: Sequence[Any],
    out_avals: Sequence[Any],
    evaluate: Callable[[int, Sequence[Any]], Any],
) -> list[Any]:
    """Bind the custom call of ``code`` on the region's operands ``args``; one result per aval.

    ``evaluate(op, operands)`` gives the result of an op of the graph whose operands do not stream.
    """
    if target == "emulator":
        runtime.register("cpu", compile.emulator_library())
    else:
        runtime.register("CUDA")
    kernel = code.kernel
    operands = [args[k] for k in kernel.inputs]
    for part, packed in zip(program.parts, kernel.packed, strict=True):
        given = [args[k] if k < program.operands else None for k in part.reads]  # None: another part makes it
        operands += _packed(packed, _Stationary(packed.program, given, evaluate))
    own = [_compat.aval_like(a, a.shape, np.float32) if k in kernel.widened else a for k, a in enumerate(out_avals)]
    results = [*own, *(_compat.aval_like(out_avals[0], a.shape, jnp.dtype(a.dtype)) for a in kernel.kept)]
    aliases = {len(operands) + k: result for k, (result, _) in enumerate(kernel.filled)}
    for result, how in kernel.filled:
        aval = results[result]
        operands.append(jnp.full(aval.shape, identity(how, np.dtype(aval.dtype)), aval.dtype))
    operands += args[program.operands :]  # what the kernel asks the L2 for
    # The workspace is never empty, so that the call has a result that nobody reads: see `targets.cpu.emit.call` for what XLA makes
    # of a loop's body that is nothing but a call all of whose results are carries.
    workspace = _compat.aval_like(out_avals[0], (kernel.workspace_bytes,), np.uint8)
    outs = jax.ffi.ffi_call(runtime.TARGET_NAME, [*results, workspace], input_output_aliases=aliases)(
        *operands,
        image=np.frombuffer(code.image, np.uint8),
        launch=np.asarray(kernel.launch, np.int64),
        name=code.name.encode("utf-8", "replace").decode(),  # the path of a source file may hold other bytes
    )
    found = list(outs)[: len(out_avals)]
    for k in kernel.widened:
        found[k] = jax.lax.convert_element_type(found[k], out_avals[k].dtype)
    return found


def _packed(packed: Packed, stationary: _Stationary) -> list[Any]:
    """The operands that XLA makes for a part."""
    found: list[Any] = []
    for group, order in zip(packed.weights, packed.order, strict=True):
        found.append(pack.weights(group, order, [stationary.value(r.value) for r in group]))
    if packed.vectors:
        values = [None if r.value is None else stationary.value(r.value) for r in packed.vectors]
        found.append(pack.vectors(packed.vectors, values))
    return found + [stationary.value(v) for v in packed.tables]


class _Stationary:
    """Values of a tile program that do not stream, each computed once, in front of the call."""

    def __init__(self, program: TileProgram, args: Sequence[Any], evaluate: Callable[[int, Sequence[Any]], Any]):
        self.program, self.args, self.evaluate = program, args, evaluate
        self.literals = dict(program.literals)
        self.makers: dict[int, Instr] = {
            v: i for s in program.stages for i in walk(s.body) for v in i.outputs if not program.values[v].tile
        }
        # What stands in a loop of the graph, or hands it a carry, says the loop's number.
        self.loops = {i.op for s in program.stages for i in walk(s.body) if i.kind == "loop"}
        self.known: dict[int, Any] = {}
        self.by_op: dict[int, Any] = {}  # makers stand in every stage that needs them

    def value(self, v: int) -> Any:
        if v not in self.known:
            self.known[v] = self._value(v)
        return self.known[v]

    def _value(self, v: int) -> Any:
        if v in self.literals:
            return np.asarray(self.literals[v], dtype=jnp.dtype(self.program.values[v].dtype))
        instr = self.makers[v]
        if instr.kind in ("load", "load_slice"):  # the recipe of a slice says how to cut it
            return self.args[instr["array"]]
        operands = [self.value(x) for x in instr.inputs]
        if instr.kind == "reshape":
            return jnp.reshape(operands[0], instr["new_sizes"])
        if instr.op < 0 or instr.op in self.loops:  # of a pass over the tile program, or of a loop's body, not of the graph
            t = self.program.values[v]
            return OPS[instr.kind].evaluate(dict(instr.params), *operands, out=Value(t.shape, t.dtype))
        if instr.op not in self.by_op:
            self.by_op[instr.op] = self.evaluate(instr.op, operands)
        return self.by_op[instr.op]

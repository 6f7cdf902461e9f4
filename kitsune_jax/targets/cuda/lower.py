"""From a plan and a tile program to a compiled kernel and its custom call.

Comes in: a tile program, or a call of several, and the ``GpuPlan`` of each. Goes out: ``Kernel`` (source, launch words, recipes of
operands), ``KernelCode`` (the compiled one), and the results of the custom call. Invariant: a plan that ``check`` accepts has a
kernel that fits the device, because ``check`` lays the kernel out as the generator does; what prints a layout refuses nothing.
"""

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
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.plan import GpuPlan
from kitsune_jax.program.ir import SINKS, Array, Instr, Program, TileProgram, walk
from kitsune_jax.targets import profiler_label
from kitsune_jax.targets.cuda import call_layout, compile, layout, nvrtc, pack, packing, print_kernel, runtime, tiles
from kitsune_jax.targets.cuda.arrangement import Arrangement, arrangement_of, kind_of
from kitsune_jax.targets.cuda.call_layout import CallLayout
from kitsune_jax.targets.cuda.layout import Layout, Operands
from kitsune_jax.targets.cuda.packing import CustomCall

# --- The kernel of a call ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """What a part of a call reads beside its inputs: the weights and vectors of ``operands``, which are packed, and ``tables``,
    stationary values in their own layout. ``program``: the part as it was laid out, whose values these are."""

    program: TileProgram
    operands: Operands
    tables: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """A generated kernel and its custom ``call``.

    Results: those of the call, of which ``widened`` are float32 instead of 16 bits; ``kept``; the workspace.
    """

    source: str
    call: CustomCall
    packed: tuple[Packed, ...]
    kept: tuple[Array, ...]
    widened: tuple[int, ...] = ()

    @property
    def launch(self) -> tuple[int, ...]:
        return self.call.launch

    @property
    def shared_bytes(self) -> int:
        return self.launch[5]


def generate_kernel(program: TileProgram, arrangement: Arrangement, name: str, share: bool = True, stamped: bool = False) -> Kernel:
    """The kernel of ``program`` under ``arrangement``. ``share``: equal stages run the same code. ``stamped``: it records when it
    runs which tile. Raises ``CannotLower``.

    Each stage is lowered to nodes of the device IR and fitted into registers and shared memory (``stage``); then all stages are
    laid out (``layout``) and printed (``print_kernel``).
    """
    return _print(_laid_out(program, arrangement, name, stamped), share)


def generate_call_kernel(call: Program, arrangements: tuple[Arrangement, ...], name: str, stamped: bool = False) -> Kernel:
    """The kernel of a call of several parts, each laid out under its arrangement. Raises ``CannotLower``."""
    return _print(_laid_out_call(call, arrangements, name, stamped))


@dataclasses.dataclass(frozen=True, slots=True)
class _LaidOut:
    """A kernel but for its source, which takes a third of the time to make and is not read while plans are compared."""

    layout: Layout | CallLayout
    call: CustomCall
    widened: tuple[int, ...] = ()


def _laid_out(program: TileProgram, arrangement: Arrangement, name: str, stamped: bool) -> _LaidOut:
    _check(program)
    program, widened = _with_float32_sums(program)
    recorders = arrangement.lanes * layout.RECORDER_BYTES * stamped
    found = dataclasses.replace(layout.lay_out(program, arrangement, name, recorders), stamped=stamped)
    return _LaidOut(found, found.call, widened)


def _laid_out_call(call: Program, arrangements: tuple[Arrangement, ...], name: str, stamped: bool) -> _LaidOut:
    for part in call.parts:
        _check(part.program)
        if len(call.parts) > 1 and pack.lanes_share_batch(part.program):
            raise CannotLower("weights that change with the batch or a loop have no code in a call of several phases on the GPU")
    found = call_layout.lay_out_call(call, arrangements, name, stamped)
    if any(part.layout.exchanges for part in found.parts):
        raise CannotLower("a loop whose weights are split over a cluster has no code in a call of several phases on the GPU")
    return _LaidOut(found, found.call)


def _print(kernel: _LaidOut, share: bool = True) -> Kernel:
    found = kernel.layout
    if isinstance(found, Layout):
        source, operands = print_kernel.source(found, _kinds(found, share)), found.operands
        packed = Packed(found.program, operands, operands.tables)
        return Kernel(source, kernel.call, (packed,), (), kernel.widened)
    layouts = [part.layout for part in found.parts]
    source = print_kernel.source_of_phases(found, [_kinds(at, True) for at in layouts])
    tables = [tuple(v for v in at.operands.tables if call_layout.table_input(at, v) is None) for at in layouts]
    parts = tuple(Packed(at.program, at.operands, made) for at, made in zip(layouts, tables, strict=True))
    return Kernel(source, kernel.call, parts, found.kept)


def _check(program: TileProgram) -> None:
    if program.batch_axes and len(program.stages) > 1:
        raise CannotLower("a stream whose tiles keep within a batch cannot be split into several stages on the GPU")
    if any(program.outputs[sink.array].row_strides for sink in program.sinks):
        raise CannotLower("sums of each batch, as the gradients of an attention's keys and values, have no code on the GPU")
    if any(i.kind in SINKS and i.get("dims") is not None for stage in program.stages for i in walk(stage.body)):
        raise CannotLower("sums into a part of a sink have no code on the GPU")
    if program.tile_rows not in (tiles.TILE_ROWS, tiles.HALF_TILE_ROWS):
        raise CannotLower(f"tiles of {program.tile_rows} rows have no code on the GPU: a tile has {tiles.TILE_ROWS}")


def _with_float32_sums(program: TileProgram) -> tuple[TileProgram, tuple[int, ...]]:
    """``program`` and the numbers of its results that are now float32: 16-bit results of atomic additions, which would be rounded
    at every addition."""
    found = {program.sinks[i["sink"]].array for s in program.stages for i in s.body if layout.is_added(i)}
    wide = tuple(k for k in sorted(found) if program.outputs[k].dtype in ("bfloat16", "float16"))
    outputs = [dataclasses.replace(a, dtype="float32") if k in wide else a for k, a in enumerate(program.outputs)]
    return dataclasses.replace(program, outputs=tuple(outputs)), wide


def _kinds(at: Layout, share: bool) -> list[layout.Kind]:
    return layout.kinds([layout.place_stage(at, s) for s in range(len(at.stages))], share)


# --- From a plan to a compiled kernel ---------------------------------------------------------------------------------------------

# The packing kernel, the same for every call: its table is an operand.
PACKER = """#include "kitsune/pack.h"

using namespace kitsune;

KITSUNE_KERNEL(kitsune_pack, PackParams, p, kPackThreads) { pack_all(p); }
"""
_NAME = "region"  # of every compiled kernel: the line of the user's source would make the cache miss when it moves


@dataclasses.dataclass(frozen=True)
class KernelCode:
    """A compiled kernel. ``image``: a cubin or PTX for ``arch``, or a shared library for the emulator; ``packer``: that of the
    packing kernel, empty where nothing is packed."""

    kernel: Kernel
    image: bytes
    arch: str
    name: str
    packer: bytes = b""


def check(program: TileProgram, plan: GpuPlan, name: str) -> str | None:
    """None if there is a kernel for ``program`` under ``plan``, else the reason. Compiles nothing."""
    return check_call(Program.of(program), (plan,), name)


def check_call(program: Program, plans: Sequence[GpuPlan], name: str) -> str | None:
    """None if there is a kernel for ``program``, whose parts have ``plans``, else the reason. Compiles nothing."""
    for part, plan in zip(program.parts, plans, strict=True):
        this = kind_of(plan, any(i.kind == "matmul_sink" for stage in part.program.stages for i in walk(stage.body)))
        if any(fnmatch.fnmatchcase(this, pattern) for pattern in config.cuda_avoid()):
            return "KITSUNE_CUDA_AVOID excludes its kind of kernel"
    found = _layout_or_reason(program, _asked(program, plans), name, False)
    return found if isinstance(found, str) else None


def fit_in_one_kernel(
    program: Program, plans: Sequence[GpuPlan], with_lanes: Callable[[int], Sequence[GpuPlan] | str]
) -> Sequence[GpuPlan] | str:
    """``plans`` with the largest number of lanes, the same for all parts, with which one kernel can run ``program``; or the reason
    why none can. ``with_lanes(n)``: the plans with n lanes each, or why they should not be one kernel."""
    reason = ""
    for lanes in range(plans[0].lanes, 0, -1):
        equal = with_lanes(lanes)
        why = equal if isinstance(equal, str) else check_call(program, equal, _NAME)
        if why is None:
            return equal
        reason = reason or why
    return reason


def generate(target: str, program: Program, plans: Sequence[GpuPlan], name: str) -> KernelCode:
    """The compiled kernel of ``program``. Raises ``CannotLower``, ``InvalidProgram``, and ``CompileError`` with the compiler's
    log."""
    made = _stamped_kernel(program, tuple(plans)) if runtime.stamps() else None
    made = made or _cached_kernel(program, tuple(plans), _NAME)
    if wrong := runtime.check(made.launch):
        raise InvalidProgram(wrong)
    if target == "emulator":
        return emulated_code(made, name)
    arch = runtime.arch()
    compiled = compile.cubin(made.source, arch)
    _check_registers(made, compiled)
    packer = compile.cubin(PACKER, arch).cubin if made.call.packs else b""
    return KernelCode(made, compiled.cubin, arch, name, packer)


def emulated_code(made: Kernel, name: str) -> KernelCode:
    """``made``, compiled for the emulator."""
    sm = made.launch[1]
    packer = compile.emulated(PACKER, sm) if made.call.packs else b""
    return KernelCode(made, compile.emulated(made.source, sm), f"emulated sm_{sm // 10}", name, packer)


def _check_registers(made: Kernel, compiled: nvrtc.Compiled) -> None:
    """Raise ``InvalidProgram`` where ``setmaxnreg`` would wait forever for registers that the launch does not have."""
    _, sm, _, threads, *_ = made.launch
    if sm == 900 and threads > 2 * tiles.GROUP_THREADS:  # several lanes
        has, needs = compiled.registers, 65536 // threads // 8 * 8
        if has < needs:
            raise InvalidProgram(f"the compiler launches the kernel with {has} registers a thread; its roles need {needs}")


def _stamped_kernel(program: Program, plans: tuple[GpuPlan, ...]) -> Kernel | None:
    """The kernel that records when it runs which tile, or ``None`` where there is no room for that."""
    try:
        return _cached_kernel(program, plans, _NAME, stamped=True)
    except CannotLower as no:
        config.logger.info("a kernel is not in the timeline: %s", no.reason)
        return None


def _cached_kernel(program: Program, plans: tuple[GpuPlan, ...], name: str, stamped: bool = False) -> Kernel:
    return _printed(program, _asked(program, plans), name, stamped)


def _asked(program: Program, plans: Sequence[GpuPlan]) -> tuple[Arrangement, ...]:
    return tuple(arrangement_of(plan, part.program) for plan, part in zip(plans, program.parts, strict=True))


# Equal programs come from several plans, and from regions that only differ in the numbers of their values.
@functools.lru_cache(maxsize=64)
def _printed(program: Program, asked: tuple[Arrangement, ...], name: str, stamped: bool) -> Kernel:
    """Raises ``CannotLower``."""
    found = _layout_or_reason(program, asked, name, stamped)
    if isinstance(found, str):
        raise CannotLower(found)
    return _print(found)


@functools.lru_cache(maxsize=64)
def _layout_or_reason(program: Program, asked: tuple[Arrangement, ...], name: str, stamped: bool) -> _LaidOut | str:
    """The kernel but for its source, or the reason why there is none."""
    try:
        if program.only is not None:
            return _laid_out(program.only, asked[0], name, stamped)
        return _laid_out_call(program, asked, name, stamped)
    except CannotLower as no:
        return no.reason


# --- The custom call --------------------------------------------------------------------------------------------------------------


def call(
    target: str,
    code: KernelCode,
    program: Program,
    args: Sequence[Any],
    out_avals: Sequence[Any],
    evaluate: Callable[[int, Sequence[Any]], Any],
) -> list[Any]:
    """Bind the custom call of ``code`` on the region's operands ``args``; one result per aval.

    ``evaluate(op, operands)`` gives the result of an op of the graph whose operands do not stream.
    """
    if target == "emulator":
        runtime.use_emulator(compile.emulator_library())
    runtime.register("cpu" if target == "emulator" else "CUDA")
    kernel, stationary = code.kernel, []
    for part, packed in zip(program.parts, code.kernel.packed, strict=True):
        given = [args[k] if k < program.operands else None for k in part.reads]  # None: another part makes the array
        stationary.append(_StationaryValues(packed.program, given, evaluate))
    operands = list[Any]()
    for operand in kernel.call.operands:
        match operand:
            case int():
                operands.append(args[operand])
            case packing.MadeByXla(part=number):
                operands.append(packing.as_operand(operand, stationary[number].value(operand.value)))
            case packing.Recipes():
                operands.append(jnp.asarray(np.frombuffer(kernel.call.recipes, np.uint32)))
    own = [_compat.aval_like(a, a.shape, np.float32) if k in kernel.widened else a for k, a in enumerate(out_avals)]
    results = [*own, *(_compat.aval_like(out_avals[0], a.shape, jnp.dtype(a.dtype)) for a in kernel.kept)]
    # The workspace is never empty, so that the call has a result that nobody reads; see `call` in `targets/cpu/call.py`.
    workspace = _compat.aval_like(out_avals[0], (kernel.call.workspace_bytes,), np.uint8)
    named = _compat.named_ffi_call(profiler_label(code.name), runtime.TARGET_NAME, [*results, workspace])
    outs = named(
        *operands,
        image=np.frombuffer(code.image, np.uint8),
        packer=np.frombuffer(code.packer, np.uint8),
        launch=np.asarray(kernel.launch, np.int64),
        name=code.name.encode("utf-8", "replace").decode(),  # the path of a source file may have bytes that are no UTF-8
    )
    found = outs[: len(out_avals)]
    for k in kernel.widened:
        found[k] = jax.lax.convert_element_type(found[k], out_avals[k].dtype)
    return found


class _StationaryValues:
    """Values of a tile program that do not stream, each computed once, before the call."""

    def __init__(self, program: TileProgram, args: Sequence[Any], evaluate: Callable[[int, Sequence[Any]], Any]):
        self.program, self.args, self.evaluate = program, args, evaluate
        self.literals = dict(program.literals)
        self.makers: dict[int, Instr] = {
            v: i for s in program.stages for i in walk(s.body) for v in i.outputs if not program.values[v].tile
        }
        # Instructions in a loop of the graph, and those that make its carries, have the loop's op number.
        self.loops = {i.op for s in program.stages for i in walk(s.body) if i.kind == "loop"}
        self.by_op: dict[int, Any] = {}  # makers are repeated in every stage that needs them
        self.value = functools.cache(self._value)

    def _value(self, v: int) -> Any:
        if v in self.literals:
            return np.asarray(self.literals[v], dtype=jnp.dtype(self.program.values[v].dtype))
        instr = self.makers[v]
        if instr.kind in ("load", "load_slice"):  # the recipe of a slice cuts it out of the array
            return self.args[instr["array"]]
        operands = [self.value(x) for x in instr.inputs]
        if instr.kind == "reshape":
            return jnp.reshape(operands[0], instr["new_sizes"])
        if instr.op < 0 or instr.op in self.loops:  # made by a pass over the tile program, or in a loop's body: no op of the graph
            t = self.program.values[v]
            return OPS[instr.kind].evaluate(dict(instr.params), *operands, out=Value(t.shape, t.dtype))
        if instr.op not in self.by_op:
            self.by_op[instr.op] = self.evaluate(instr.op, operands)
        return self.by_op[instr.op]

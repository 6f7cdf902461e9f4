"""The layout of a kernel of several phases: the tile programs of its parts, and the arrays that one part passes to a later one.

Comes in: a ``Program`` and an ``Arrangement`` for each of its parts. Goes out: ``CallLayout``. Every part is laid out as a kernel
of its own (``layout``) in the same shared memory as the others, except for its barriers. The workspace: the counter of the barrier
between phases, the counters of all parts, which are zero when the kernel starts, then the workspaces of the parts and the arrays
between them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from kitsune_jax.errors import CannotLower
from kitsune_jax.ops.graph import make_params
from kitsune_jax.ops.spec import ROWS
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.streams import dim_strides
from kitsune_jax.program.ir import Array, ArrayType, Instr, Part, Program, StageProgram, TileProgram, TileType, walk
from kitsune_jax.targets.cuda import frame_ir as frame
from kitsune_jax.targets.cuda import layout, tiles
from kitsune_jax.targets.cuda.arrangement import Arrangement
from kitsune_jax.targets.cuda.layout import Layout
from kitsune_jax.targets.cuda.packing import (
    ALIGNMENT,
    CallResult,
    CallWorkspace,
    CustomCall,
    MadeByXla,
    PackedImage,
    Pointee,
    Pointer,
    custom_call,
)
from kitsune_jax.targets.cuda.stage import simplify

# --- Tile programs of the parts ---------------------------------------------------------------------------------------------------

_WIDTHS = (32, 16, 8)  # elements of a row of several elements


def programs_of_call(call: Program) -> tuple[TileProgram, ...]:
    """The program of every part, with tiles of the GPU's rows. Raises ``CannotLower``."""
    return tuple(_with_wide_rows(_with_row_scalars(call, part)) for part in call.parts)


def _with_row_scalars(call: Program, part: Part) -> TileProgram:
    """``part``, whose rows each load the scalars that earlier parts make.

    Arrays that an earlier part makes do not exist yet when the stationary operands are packed. So scalars are loaded by every row,
    and rows of tables are gathered; any other use of a whole array has no code.
    """
    program, made = part.program, {k for k, n in enumerate(part.reads) if n >= call.operands}
    loads = {i.outputs[0]: i["array"] for s in program.stages for i in walk(s.body) if i.kind == "load"}
    whole = {v: k for v, k in loads.items() if k in made and not program.values[v].tile}
    gathered = {i.inputs[0] for s in program.stages for i in walk(s.body) if i.kind == "gather"}
    shown = simplify.loop_values_as_tiles(program)  # whose remaining stationary values XLA makes
    for stage in shown.stages:
        for i in walk(stage.body):
            stationary = i.outputs and not shown.values[i.outputs[0]].tile and i.kind != "load"
            # Ops of later parts are numbered within the part, so XLA could not tell which one to compute.
            if stationary and (whole.keys() & set(i.inputs) or i.kind != "reshape" and part is not call.parts[0]):
                raise CannotLower("a later phase computes a value that does not stream, which has no code on the GPU")
    if program.order in made:
        raise CannotLower("a stream in an order that an earlier phase makes has no code on the GPU")
    if any(program.inputs[k].shape and v not in gathered for v, k in whole.items()):
        raise CannotLower("a phase reads the whole of an array that an earlier phase makes, which has no code on the GPU")
    numbers = {v: k for v, k in whole.items() if not program.inputs[k].shape}
    if not numbers:
        return program
    inputs, values = list(program.inputs), list(program.values)
    for v, k in numbers.items():
        inputs[k] = ArrayType((), inputs[k].dtype, True, (0,) * len(program.axes))
        values[v] = TileType(True, (), values[v].dtype)
    stages = tuple(StageProgram(s.name, _with_row_broadcasts(s.body, numbers)) for s in program.stages)
    return dataclasses.replace(program, inputs=tuple(inputs), values=tuple(values), stages=stages)


def _with_row_broadcasts(body: Sequence[Instr], numbers: dict[int, int]) -> tuple[Instr, ...]:
    """``body`` with broadcasts of ``numbers`` that have a row dimension now."""
    found = []
    for i in body:
        if i.kind == "broadcast_in_dim" and i.inputs[0] in numbers:
            i = dataclasses.replace(i, params=make_params(**{**dict(i.params), "dims": (0,)}))
        elif i.block is not None:
            i = dataclasses.replace(i, block=dataclasses.replace(i.block, body=_with_row_broadcasts(i.block.body, numbers)))
        found.append(i)
    return tuple(found)


def _with_wide_rows(program: TileProgram) -> TileProgram:
    """``program`` with rows of several elements, if it works elementwise on whole arrays (an optimiser's update); else unchanged.

    Such a stream runs over all dimensions of its arrays, so a row is one element. With wider rows a thread has 16 bytes at a time,
    and a tile is 64 rows instead of 64 elements.
    """
    width = next((w for w in _WIDTHS if program.rows % w == 0), 0)
    if not width or not program.axes or program.order is not None or program.batch_axes or len(program.stages) > 1:
        return program
    if not all(_is_dense(program, a) or _is_number(a) for a in (*program.inputs, *program.outputs)):
        return program
    if not all(_is_elementwise(program, i) for i in program.stages[0].body):
        return program
    rows, body = program.rows // width, list[Instr]()
    values = [TileType(True, (width,), t.dtype) if t.tile else t for t in program.values]
    for i in program.stages[0].body:
        if i.kind == "load" and program.values[i.outputs[0]].tile and not program.inputs[i["array"]].shape:
            # A number that every row reads is broadcast over the elements of the row.
            body.append(dataclasses.replace(i, outputs=(len(values),)))
            body.append(Instr("broadcast_in_dim", (len(values),), i.outputs, make_params(dims=(0,), shape=(ROWS, width))))
            values.append(TileType(True, (), program.values[i.outputs[0]].dtype))
        elif i.kind == "sink":
            body.append(dataclasses.replace(i, params=make_params(**{**dict(i.params), "axes": (0, 1)})))
        else:
            body.append(i)
    return dataclasses.replace(
        program,
        axes=(rows,),
        inputs=tuple(_rows_of(a, rows, width) for a in program.inputs),
        outputs=tuple(_rows_of(a, rows, width) for a in program.outputs),
        stages=(StageProgram(program.stages[0].name, tuple(body)),),
        values=tuple(values),
    )


def _is_dense(program: TileProgram, array: ArrayType) -> bool:
    """Is an element of the array a row of the stream, in the order of memory?"""
    return array.streamed and array.row_strides == dim_strides(program.axes) and math.prod(array.shape) == program.rows


def _is_number(array: ArrayType) -> bool:
    return not array.shape and not any(array.row_strides)


def _is_elementwise(program: TileProgram, instr: Instr) -> bool:
    if any(program.values[v].shape for v in (*instr.inputs, *instr.outputs)):
        return False
    spec = OPS.get(instr.kind)
    return instr.kind in ("load", "store", "sink") or spec is not None and spec.family in ("pointwise", "convert")


def _rows_of(array: ArrayType, rows: int, width: int) -> ArrayType:
    if array.shape:
        return ArrayType((rows, width), array.dtype, True, (width,), (1,))
    return dataclasses.replace(array, row_strides=(0,)) if array.streamed else array


# --- The layout of the call -------------------------------------------------------------------------------------------------------

_COUNTER_BYTES = 128  # of the barrier between phases: a cache line


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """The address of a pointer of a part: byte ``byte`` of buffer ``buffer`` of the kernel. ``made``: an earlier phase writes the
    data."""

    buffer: int
    byte: int = 0
    made: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class PartLayout:
    """A part of the call, run by ``ctas`` CTAs from number ``first`` on. ``sources``: of its ``Params``, in their order."""

    phase: int
    layout: Layout
    first: int
    ctas: int
    sources: tuple[Source, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CallLayout:
    """``buffers``: the C++ declaration of each pointer of the kernel; ``pointers``: the array of each. ``reads``: of each part, the
    number of the call's operand for each of its inputs. ``kept``: arrays between phases that are results of the custom call,
    because they are filled before the kernel starts. ``stamped``: as of its parts."""

    name: str
    parts: tuple[PartLayout, ...]
    grid: int
    buffers: tuple[str, ...]
    pointers: tuple[Pointer, ...]
    reads: tuple[tuple[int, ...], ...]
    kept: tuple[Array, ...]
    zero_bytes: int

    @property
    def stamped(self) -> bool:
        return self.parts[0].layout.stamped

    @property
    def call(self) -> CustomCall:
        """The custom call: its operands, and how ``cuda/src`` launches the kernel."""
        a = self.parts[0].layout.a
        shared = max(p.layout.shared_bytes for p in self.parts)
        most = max(p.layout.a.ctas for p in self.parts)
        parts = [p.layout.stationary(reads) for p, reads in zip(self.parts, self.reads, strict=True)]
        geometry = a.sm, self.grid, a.threads, 1, shared, layout.flags_of(True, self.stamped), most
        return custom_call(self.pointers, parts, geometry, self.zero_bytes)


def lay_out_call(call: Program, arrangements: tuple[Arrangement, ...], name: str, stamped: bool = False) -> CallLayout:
    """The layout of ``call``. Raises ``CannotLower`` where it does not fit, or where the parts cannot be parts of one kernel."""
    first = arrangements[0]
    if any(a.cluster > 1 or "cluster" in a.places for a in arrangements):
        raise CannotLower("a call of several phases runs without clusters, because all of its CTAs wait for each other")
    if any((a.sm, a.lanes) != (first.sm, first.lanes) for a in arrangements):
        raise CannotLower("the parts of a call run in the same warpgroups, so they must have equally many lanes")
    programs = programs_of_call(call)
    barriers = [layout.barrier_bytes(p, a) for p, a in zip(programs, arrangements, strict=True)]
    all_bytes = sum(barriers) + first.lanes * layout.RECORDER_BYTES * stamped
    each = list(zip(programs, arrangements, barriers, strict=True))
    found = [layout.lay_out(p, a, name, all_bytes - own, alone=False) for p, a, own in each]
    if len({at.header_bytes for at in found}) > 1:  # one of them fits only without staging
        most = max(at.header_bytes for at in found)
        found = [layout.lay_out(p, a, name, most - own, alone=False) for p, a, own in each]
    return _assemble(call, [dataclasses.replace(at, stamped=stamped) for at in found], name)


def _assemble(call: Program, found: list[Layout], name: str) -> CallLayout:
    filled = {part.writes[k]: how for part, at in zip(call.parts, found, strict=True) for k, how in at.filled}
    results = range(call.operands, call.operands + call.results)
    kept = [n for n in filled if n not in results]
    buffers = _Buffers()
    direct = sorted(
        {part.reads[i] for part, at in zip(call.parts, found, strict=True) for i in _direct(at)} & {*range(call.operands)}
    )
    where = {n: buffers.add(f"const void* operand{n}", n, frame.array_bytes(call.arrays[n])) for n in direct}
    packed, tables = list[list[Source]](), list[dict[int, Source]]()  # of each part
    for k, at in enumerate(found):
        images = enumerate(at.packed)
        packed.append([buffers.add(f"{type_} part{k}_{name}", PackedImage(k, i), size) for i, (type_, name, size) in images])
        made = {v: at.program.values[v] for v in at.operands.tables if table_input(at, v) is None}
        tables.append(
            {v: buffers.add(f"const void* part{k}_table{v}", MadeByXla(k, v), frame.array_bytes(t)) for v, t in made.items()}
        )
    order = {n: number for number, n in enumerate((*results, *kept))}
    for n, how in filled.items():
        buffers.add(f"const void* filled{n}", CallResult(order[n], how, call.arrays[n].dtype), frame.array_bytes(call.arrays[n]))
    where |= {n: buffers.add(f"void* result{n}", CallResult(order[n]), frame.array_bytes(call.arrays[n])) for n in order}
    zeroed = [part.workspace.zero_bytes for part in found]  # in the workspace of a part by itself, at its start
    heads, zero_bytes = layout.offsets(((k, tiles.aligned(size, 128)) for k, size in enumerate(zeroed)), _COUNTER_BYTES)
    others = [tiles.aligned(part.workspace.bytes - size, ALIGNMENT) for part, size in zip(found, zeroed, strict=True)]
    rest, end = layout.offsets(enumerate(others), zero_bytes)
    inner = {n: array for n, array in enumerate(call.arrays) if n >= results.stop and n not in kept}
    sizes = ((n, tiles.aligned(frame.array_bytes(array), ALIGNMENT)) for n, array in inner.items())
    arrays, end = layout.offsets(sizes, tiles.aligned(end, ALIGNMENT))
    memory = buffers.add("u8* workspace", CallWorkspace(), end).buffer
    where |= {n: Source(memory, byte) for n, byte in arrays.items()}
    grid, shares = _shares(call, found)
    parts = []
    for k, (part, at) in enumerate(zip(call.parts, found, strict=True)):
        read = {i: dataclasses.replace(where[n], made=n >= call.operands) for i, n in enumerate(part.reads) if n in where}
        sources = [*(read[i] for i in at.operands.inputs), *packed[k]]
        sources += [tables[k][v] if v in tables[k] else read[table_input(at, v) or 0] for v in at.operands.tables]
        sources += [where[n] for n in part.writes]
        sources += [Source(memory, rest[k] - zeroed[k]), Source(memory, heads[k])]
        parts.append(PartLayout(part.phase, at, *shares[k], tuple(sources)))
    return CallLayout(
        name=name,
        parts=tuple(parts),
        grid=grid,
        buffers=tuple(buffers.declared),
        pointers=tuple(buffers.pointers),
        reads=tuple(part.reads for part in call.parts),
        kept=tuple(call.arrays[n] for n in kept),
        zero_bytes=zero_bytes,
    )


class _Buffers:
    """The pointers of the kernel, as ``CallLayout`` has them."""

    def __init__(self) -> None:
        self.declared: list[str] = []
        self.pointers: list[Pointer] = []

    def add(self, declared: str, of: Pointee, size: int) -> Source:
        self.declared.append(declared)
        self.pointers.append(Pointer(declared.split()[-1], of, size))
        return Source(len(self.pointers) - 1)


def table_input(at: Layout, v: int) -> int | None:
    """The input that table ``v`` is loaded from, in its own layout; None for a table that XLA makes."""
    for stage in at.program.stages:
        for i in stage.body:
            if i.kind == "load" and v in i.outputs:
                return int(str(i["array"]))
    return None


def _direct(at: Layout) -> list[int]:
    """The inputs that a part reads in their own layout."""
    tables = [table_input(at, v) for v in at.operands.tables]
    return [*at.operands.inputs, *(k for k in tables if k is not None)]


def _shares(call: Program, found: list[Layout]) -> tuple[int, list[tuple[int, int]]]:
    """(CTAs of the kernel, (first CTA, number of CTAs) of each part). Each part of a phase starts where the one before it ends, so
    that parts with few tiles run at the same time."""
    most = max(at.a.replicas * at.a.ctas for at in found)
    needs = [at.a.instances(at.program) * at.a.ctas for at in found]
    shares: list[tuple[int, int]] = []
    ends: dict[int, int] = {}
    for part, need in zip(call.parts, needs, strict=True):
        first = ends.get(part.phase, 0)
        shares.append((first, need))
        ends[part.phase] = first + need
    ctas = max(at.a.ctas for at in found)
    grid = min(max(ends.values()), max(most, max(needs)))
    return tiles.aligned(grid, ctas), shares

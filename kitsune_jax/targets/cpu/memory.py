"""The memory of a CPU program's values: views of tiles and arrays, layouts in loops, and offsets in scratch memory.

Comes in: memory of the program (``CpuRef``), shapes, and strides. Goes out: ``View``s; the result of a shape op as another view, or
None where it takes a copy; dimensions that one loop can walk; offsets of buffers in scratch memory (``place_buffers``). Invariant:
two buffers share scratch memory only if the last use of one precedes the first use of the other.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import typing
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kitsune_jax.ops.graph import quick
from kitsune_jax.planning.cost import itemsize, round_up
from kitsune_jax.planning.streams import dim_strides
from kitsune_jax.program.ir import ArrayType, Part, Program, TileProgram, walk
from kitsune_jax.program.passes import squeezed
from kitsune_jax.targets.cpu import bytecode as bc

# --- Views ------------------------------------------------------------------------------------------------------------------------


@quick
@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """A tile or array in memory. Element ``(r, i...)`` is at ``ref.offset + r * row_stride + sum(i * strides)``, all in elements.

    The row dimension never merges with another. A stationary array has ``row_stride`` 0 and its whole shape as ``shape``.
    Broadcast, transpose, slice, rev and most reshapes give a view inside of the same memory, without an instruction.
    """

    ref: bc.CpuRef
    row_stride: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return bc.DTYPES[self.ref.dtype]

    def operand(self, strides: tuple[int, ...] | None = None) -> bc.CpuOperand:
        """The view as an operand, with ``strides`` for the loops of an instruction, by default its own."""
        return bc.CpuOperand(self.ref, self.row_stride, self.strides if strides is None else strides)

    def at(self, offset: int) -> View:
        """The same view, ``offset`` elements further on."""
        return dataclasses.replace(self, ref=moved(self.ref, offset))


def moved(ref: bc.CpuRef, offset: int, moves: Sequence[int] = ()) -> bc.CpuRef:
    """``ref``, ``offset`` elements further on and moved by ``moves`` with the numbers of the enclosing loops."""
    strides = tuple(a + b for a, b in itertools.zip_longest(ref.loop_strides, moves, fillvalue=0))
    return dataclasses.replace(ref, offset=ref.offset + offset, loop_strides=strides if any(strides) else ())


def readable(view: View) -> bool:
    """Whether a stage may read a result back from ``view`` cheaply: it is no queue slot, and its elements have unit stride."""
    strides = [s for n, s in zip(view.shape, view.strides, strict=True) if n != 1]
    return view.ref.space != bc.QUEUE and (not strides or strides[-1] == 1)


def row_pitch(shape: tuple[int, ...], dtype: str) -> int:
    """Elements between the rows of a tile in scratch or in a queue.

    Rows of one dimension and 256 bytes or more begin on cache lines, and not a multiple of a page apart (else stores would falsely
    depend on loads of other rows: 4 KB aliasing). Other rows are dense, so that one loop can walk the rows and inner dimensions.
    """
    item = itemsize(dtype)
    size = math.prod(shape)
    if len(squeezed(shape)) != 1 or size * item < 256:
        return size
    lines = -(-size * item // 64)
    if lines % 64 == 0:
        lines += 1
    return lines * 64 // item


def reshape(view: View, shape: tuple[int, ...]) -> View | None:
    """``view`` with another row shape of the same size, or None where that needs a copy."""
    strides = reshape_strides(view.shape, view.strides, shape)
    return None if strides is None else View(view.ref, view.row_stride, shape, strides)


def reshape_strides(old: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of the same elements in the same order under shape ``new``; None where there are none.

    >>> reshape_strides((4, 6), (6, 1), (2, 2, 6)), reshape_strides((4, 6), (1, 4), (24,))
    ((12, 6, 1), None)
    """
    if 0 in new:
        return (0,) * len(new)
    loops = [(math.prod(old[d] for d in group), strides[group[-1]]) for group in merge_dims(old, (strides,))]
    out: list[int] = []
    left, step = 1, 0  # of the innermost loop: the extent that ``out`` does not cover yet, and its stride
    for n in reversed(new):
        if n == 1:
            out.append(0)
            continue
        if left == 1:
            left, step = loops.pop()
        if left % n != 0:
            return None
        out.append(step)
        left, step = left // n, step * n
    return tuple(reversed(out))


def broadcast(view: View, shape: tuple[int, ...], dims: Sequence[int]) -> View:
    """``broadcast_in_dim`` to ``shape``: dimension ``d`` of the view becomes ``dims[d]`` (-1: the rows, which take one element)."""
    strides = [0] * len(shape)
    for d, n, s in zip(dims, view.shape, view.strides, strict=True):
        if d >= 0 and n == shape[d]:
            strides[d] = s
    return View(view.ref, view.row_stride, shape, tuple(strides))


def aligned(view: View, tile: bool, shape: tuple[int, ...]) -> View:
    """``view`` as an operand of a pointwise tile op of row shape ``shape``: dimensions of extent 1 and rank 0 are stretched."""
    if not tile and len(view.shape) == len(shape) + 1:  # a stationary operand with a dimension of extent 1 in place of the rows
        view = View(view.ref, view.row_stride, view.shape[1:], view.strides[1:])
    if not view.shape:
        return View(view.ref, view.row_stride, shape, (0,) * len(shape))
    strides = tuple(s if n == m else 0 for n, m, s in zip(view.shape, shape, view.strides, strict=True))
    return View(view.ref, view.row_stride, shape, strides)


def transpose(view: View, perm: Sequence[int]) -> View:
    """Row dimensions reordered: dimension ``j`` of the result is ``perm[j]`` of the view."""
    return View(view.ref, view.row_stride, tuple(view.shape[p] for p in perm), tuple(view.strides[p] for p in perm))


def reverse(view: View, dims: Sequence[int]) -> View:
    offset = sum((view.shape[d] - 1) * view.strides[d] for d in dims)
    strides = tuple(-s if d in dims else s for d, s in enumerate(view.strides))
    return View(view.ref, view.row_stride, view.shape, strides).at(offset)


def cut(view: View, ranges: Sequence[range]) -> View:
    """``slice`` of the row dimensions to ``ranges``."""
    offset = sum(r.start * s for r, s in zip(ranges, view.strides, strict=True))
    strides = tuple(r.step * s for r, s in zip(ranges, view.strides, strict=True))
    return View(view.ref, view.row_stride, tuple(map(len, ranges)), strides).at(offset)


def chain(extents: Sequence[int], strides: Sequence[int]) -> int | None:
    """The innermost stride of several dimensions, outermost first, if one loop can walk them all; None if not. Dimensions of
    extent 1 are ignored; without any other the stride is 0.

    >>> chain((4, 10), (30, 3)), chain((4, 10), (3, 12)), chain((1, 10), (0, 3))
    (3, None, 3)
    """
    groups = merge_dims(extents, (strides,))
    if len(groups) > 1:
        return None
    return strides[groups[0][-1]] if groups else 0


def merge_dims(extents: Sequence[int], strides: Sequence[Sequence[int]], order: Sequence[int] | None = None) -> list[list[int]]:
    """Dimensions of more than one element, taken in ``order`` (by default their own), in groups that one loop can walk for every
    operand (given by its strides).

    >>> merge_dims((2, 3, 4), [(12, 4, 1), (20, 4, 1)])
    [[0], [1, 2]]
    """
    groups: list[list[int]] = []
    for d in range(len(extents)) if order is None else order:
        if extents[d] == 1:
            continue
        if groups and all(s[groups[-1][-1]] == s[d] * extents[d] for s in strides):
            groups[-1].append(d)
        else:
            groups.append([d])
    return groups


MOST_COLUMNS = 32  # of a value of a loop's body that lies column by column


# --- Arrays at a program's border -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class BorderArray:
    """An array at the program's border as memory. ``row_stride``: where its address is linear in the row of a batch, else None;
    None for a streamed array in a stream with an order.
    """

    ref: bc.CpuRef
    axis_strides: tuple[int, ...]
    batch_axes: int
    row_stride: int | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def view(self) -> View | None:
        """The part of a batch, where the array has a ``row_stride``."""
        part = dataclasses.replace(self.ref, batch_strides=self.axis_strides[: self.batch_axes])
        return None if self.row_stride is None else View(part, self.row_stride, self.shape, self.strides)


def border(program: TileProgram, array: ArrayType, space: int, number: int) -> BorderArray:
    ref = bc.CpuRef(space, number, 0, bc.DTYPE_CODE[array.dtype])
    dense, batch = array.strides or dim_strides(array.shape), program.batch_axes
    if not array.row_strides:
        return BorderArray(ref, (), 0, 0, array.shape, dense)
    shape, strides = tuple(array.shape[d] for d in array.dims), tuple(dense[d] for d in array.dims)
    in_order = program.order is not None and any(array.row_strides)
    row = None if in_order else chain(program.axes[batch:], array.row_strides[batch:])
    return BorderArray(ref, array.row_strides, batch, row, shape, strides)


# --- Layouts of arrays inside of a call -------------------------------------------------------------------------------------------

# Reads of a table's rows by index, which want them dense.
_BY_ROWS = frozenset({"gather", "scatter", "sink_at"})
_LEAST_LAID_OUT = 1 << 12  # elements


def with_layouts(program: Program) -> Program:
    """``program`` with a stride for each dimension of those arrays between its phases that rows of a stream would touch one element
    at a time: the dimensions that no phase streams over come last.

    As an example, attention's result [heads, 64, tokens] is written and read by rows of tokens: as [tokens, heads, 64], in runs of
    64 elements. An array that each row of a stream reads whole, as every key of a gradient the sums of all queries, stays as it is:
    it is written once, and read in runs along its last dimension by every row. Weights are packed and may lie anyhow."""
    parts = list(program.parts)
    for number in range(program.operands + program.results, len(program.arrays)):
        strides = _laid_out(parts, number)
        if strides is not None:
            parts = [_with_strides(part, number, strides) for part in parts]
    return dataclasses.replace(program, parts=tuple(parts))


def _accesses(parts: Sequence[Part], number: int) -> list[tuple[Part, ArrayType, bool, int]]:
    """Each part that reads or writes array ``number`` of a call, with the array as the part has it, whether it reads, and its
    number there."""
    found = []
    for part in parts:
        for reads, own, arrays in ((True, part.reads, part.program.inputs), (False, part.writes, part.program.outputs)):
            found += [(part, arrays[k], reads, k) for k, array in enumerate(own) if array == number]
    return found


def _laid_out(parts: Sequence[Part], number: int) -> tuple[int, ...] | None:
    """The strides of array ``number`` of a call; None where it stays row-major."""
    accesses = _accesses(parts, number)
    if not accesses:
        return None  # the executor refuses the call
    shape = accesses[0][1].shape
    if math.prod(shape) < _LEAST_LAID_OUT or not all(array.row_strides for _, array, _, _ in accesses):
        return None
    for part, _, reads, k in accesses:
        of_sink = not reads and any(sink.array == k for sink in part.program.sinks)
        if of_sink or part.program.order is not None or any(i.kind in _BY_ROWS for s in part.program.stages for i in walk(s.body)):
            return None
        array = part.program.inputs[k] if reads else None
        if array is not None and not any(array.row_strides[part.program.batch_axes :]) and not _is_weight(part.program, k):
            return None
    real = [d for d, n in enumerate(shape) if n != 1]
    apart = [_touched_one_by_one(part.program, array, reads, k) for part, array, reads, k in accesses]
    streamed = [sum(d in dims for dims in apart) for d in range(len(shape))]
    order = sorted(real, key=lambda d: (-streamed[d], 0 if streamed[d] else shape[d]))  # the longest last
    if not real or not streamed[real[-1]] or streamed[order[-1]]:
        return None
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= shape[d]
    return tuple(strides)


def _touched_one_by_one(program: TileProgram, array: ArrayType, reads: bool, number: int) -> set[int]:
    """The dimensions of which a row, or a step of a loop, touches one index: those that the rows stream over, and those that a loop
    takes apart."""
    slices = [
        i
        for s in program.stages
        for i in walk(s.body)
        if i.kind == ("load_slice" if reads else "store_slice") and i["array"] == number
    ]
    steps = {d for i in slices for d, size in zip(i["dims"], i["sizes"], strict=True) if size == 1}
    return {d for d in range(len(array.shape)) if d not in array.dims} | steps


def _is_weight(program: TileProgram, number: int) -> bool:
    """Do only products read input ``number`` of ``program``, as the operand that they pack?"""
    instructions = [i for s in program.stages for i in walk(s.body)]
    loads = {v for i in instructions if i.kind in ("load", "load_slice") and i["array"] == number for v in i.outputs}
    readers = [i for i in instructions if not loads.isdisjoint(i.inputs)]
    return all(i.kind == "matmul" and i.inputs[0] not in loads for i in readers)


def _with_strides(part: Part, number: int, strides: tuple[int, ...]) -> Part:
    """``part`` with array ``number`` of its call in this layout."""

    def laid_out(own: tuple[int, ...], arrays: tuple[ArrayType, ...]) -> tuple[ArrayType, ...]:
        return tuple(_in_layout(a, strides) if k == number else a for k, a in zip(own, arrays, strict=True))

    inputs, outputs = laid_out(part.reads, part.program.inputs), laid_out(part.writes, part.program.outputs)
    if (inputs, outputs) == (part.program.inputs, part.program.outputs):
        return part
    return dataclasses.replace(part, program=dataclasses.replace(part.program, inputs=inputs, outputs=outputs))


def _in_layout(array: ArrayType, strides: tuple[int, ...]) -> ArrayType:
    dense = dim_strides(array.shape)

    def moved_stride(step: int) -> int:
        d = next((d for d, n in enumerate(array.shape) if n != 1 and dense[d] <= step < dense[d] * n), None)
        return 0 if d is None else step // dense[d] * strides[d]  # None: 0, or an axis of one element

    return dataclasses.replace(array, row_strides=tuple(map(moved_stride, array.row_strides)), strides=strides)


# --- Scratch memory ---------------------------------------------------------------------------------------------------------------

ALIGNMENT = 64


_OPERAND_TYPES = ("CpuOperand", "tuple[CpuOperand, ...]", "CpuRows")
# The fields of each instruction, and of rows, that hold operands.
_OPERANDS = {
    kind: tuple(field.name for field in dataclasses.fields(kind) if field.type in _OPERAND_TYPES)
    for kind in (*typing.get_args(bc.Instruction), bc.CpuRows)
}


def operands(x: Any) -> list[bc.CpuOperand]:
    """All operands in ``x``, an instruction or a field of one, that address tiles, without those of instructions inside a loop."""
    if isinstance(x, bc.CpuOperand):
        return [x]
    inside = x if isinstance(x, tuple) else [getattr(x, name) for name in _OPERANDS[type(x)]]
    return [operand for y in inside for operand in operands(y)]


def _with_refs(x: Any, change: Callable[[bc.CpuRef], bc.CpuRef]) -> Any:
    """``x`` with ``change`` applied to the memory of each of ``operands(x)``."""
    if isinstance(x, bc.CpuOperand):
        return bc.CpuOperand(change(x.ref), x.row_stride, x.strides)
    if isinstance(x, tuple):
        return tuple(_with_refs(y, change) for y in x)
    return dataclasses.replace(x, **{name: _with_refs(getattr(x, name), change) for name in _OPERANDS[type(x)]})


def place_buffers(body: Sequence[bc.Instruction], sizes: list[int], preps: list[bc.Prep]) -> tuple[tuple[bc.Instruction, ...], int]:
    """Replace the virtual buffers of ``sizes`` bytes (``Ref.index``, with offsets inside them) by byte offsets in scratch, in
    ``body`` and in the ``preps`` that it packs. Returns the body and the scratch bytes it needs.

    Buffers share bytes only where no instruction uses one between the first and the last use of the other."""
    lives = _lives(body, preps)
    # Neither order of placement is always better; both are cheap.
    by_size = sorted(lives, key=lambda b: (-sizes[b], lives[b][0]))
    by_time = sorted(lives, key=lambda b: (lives[b][0], -sizes[b]))
    layouts = [_fit_in_time(by_time, lives, sizes), _fit(by_size, lives, sizes)]
    offsets, total = min(layouts, key=lambda layout: layout[1])
    return tuple(_rewrite(instruction, offsets, preps) for instruction in body), total


def _lives(body: Sequence[bc.Instruction], preps: Sequence[bc.Prep]) -> dict[int, list[int]]:
    """The first and the last time each buffer is used. A buffer used inside and outside of a loop lives for the whole loop."""
    lives: dict[int, list[int]] = {}
    time = 0

    def run(code: Sequence[bc.Instruction]) -> set[int]:
        nonlocal time
        used: set[int] = set()
        for instruction in code:
            start = time
            if isinstance(instruction, (bc.CpuLoop, bc.CpuStationary)):
                here = run(instruction.body)
            else:
                refs = [o.ref for o in operands(instruction)]
                refs += [preps[instruction.prep].source] if isinstance(instruction, bc.Pack) else []
                buffers = [ref.index for ref in refs if ref.space == bc.SCRATCH]
                for b in buffers:
                    lives.setdefault(b, [time, time])[1] = time
                here = set(buffers)
            if isinstance(instruction, bc.CpuLoop):
                looped.append((start, time, here))
            used |= here
            time += 1
        return used

    looped: list[tuple[int, int, set[int]]] = []  # inner loops before those around them
    run(body)
    for start, end, inside in looped:
        for b in inside:
            if lives[b][0] < start or lives[b][1] > end:
                lives[b] = [min(lives[b][0], start), max(lives[b][1], end)]
    return lives


def _fit(order: list[int], lives: dict[int, list[int]], sizes: list[int]) -> tuple[dict[int, int], int]:
    """Place every buffer of ``order`` at the lowest offset that is free for its whole life. Returns the offsets and their end."""
    offsets: dict[int, int] = {}
    # Of the placed buffers: the first and last time of their lives, and their ends in memory.
    placed = np.zeros((4, len(order)), np.int64)
    for n, b in enumerate(order):
        (first, last), size, at = lives[b], round_up(sizes[b], ALIGNMENT), 0
        born, died, starts, ends = placed[:, :n]
        near = np.flatnonzero((born <= last) & (died >= first))
        for start, end in sorted(zip(starts[near].tolist(), ends[near].tolist(), strict=True)):
            if at + size <= start:
                break
            at = max(at, end)
        offsets[b] = at
        placed[:, n] = first, last, at, at + size
    return offsets, int(placed[3].max(initial=0))


def _fit_in_time(order: list[int], lives: dict[int, list[int]], sizes: list[int]) -> tuple[dict[int, int], int]:
    """``_fit`` of an ``order`` by the buffers' first uses: those that have died meet no later one."""
    offsets: dict[int, int] = {}
    held: list[tuple[int, int, int]] = []  # start and end in memory, and last use, of those that may live, by their starts
    top = 0
    for b in order:
        (first, last), size, at = lives[b], round_up(sizes[b], ALIGNMENT), 0
        held = [place for place in held if place[2] >= first]
        for start, end, _ in held:
            if at + size <= start:
                break
            at = max(at, end)
        offsets[b] = at
        bisect.insort(held, (at, at + size, last))
        top = max(top, at + size)
    return offsets, top


def _rewrite(instruction: bc.Instruction, offsets: dict[int, int], preps: list[bc.Prep]) -> bc.Instruction:
    def placed(ref: bc.CpuRef) -> bc.CpuRef:
        if ref.space != bc.SCRATCH:
            return ref
        base = offsets[ref.index] // itemsize(bc.DTYPES[ref.dtype])
        return bc.CpuRef(ref.space, 0, base + ref.offset, ref.dtype, ref.loop_strides, ref.batch_strides)

    if isinstance(instruction, bc.Pack):
        preps[instruction.prep] = dataclasses.replace(preps[instruction.prep], source=placed(preps[instruction.prep].source))
        return instruction
    if isinstance(instruction, (bc.CpuLoop, bc.CpuStationary)):
        return dataclasses.replace(instruction, body=tuple(_rewrite(i, offsets, preps) for i in instruction.body))
    result: bc.Instruction = _with_refs(instruction, placed)
    return result

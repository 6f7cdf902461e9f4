"""Lowering of tile programs to CPU programs, with one handler for each kind of instruction.

Comes in: a ``TileProgram``, or a ``Program`` of several. Goes out: the ``bc.CpuProgram`` that computes the same, stage by stage,
or the int64 words of a whole call. Groups of pointwise instructions come from ``pointwise``, products and loops from ``products``;
indices, reductions, scans, concatenations and pads are here. Raises ``CannotLower`` for ops that ``target.supports`` refuses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from kitsune_jax.errors import CannotLower, InvalidProgram
from kitsune_jax.ops.spec import EVERYWHERE, Rounding
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import itemsize, round_up
from kitsune_jax.planning.streams import dim_strides
from kitsune_jax.program.ir import Array, ArrayType, Instr, Program, SinkType, TileProgram, TileType
from kitsune_jax.program.loop_bounds import with_known_bounds
from kitsune_jax.program.passes import simplified, with_biases_first, with_epilogues
from kitsune_jax.targets.cpu import bytecode as bc
from kitsune_jax.targets.cpu import memory, pointwise
from kitsune_jax.targets.cpu.call import check
from kitsune_jax.targets.cpu.facts import RowExponential, TakenDotFacts, TakenSum
from kitsune_jax.targets.cpu.memory import View
from kitsune_jax.targets.cpu.products import emit_dot, emit_loop, emit_matmul, emit_matmul_sink, emit_paste
from kitsune_jax.targets.cpu.stage import StageLowering
from kitsune_jax.targets.cpu.vectors import VectorBuilder, compute_type, immediate

# --- Indices: rows of a table, rows of a sink, elements of a tile's row -----------------------------------------------------------

# Elements along the dimension that take and put select from: their offsets are int32.
_MOST_SELECTED = (1 << 31) - 1


def emit_gather(stage: StageLowering, i: int, instr: Instr) -> None:
    table, index = (stage.view(v) for v in instr.inputs)
    out = stage.place(instr.outputs[0])
    if table.shape[0] == 0:
        _fill(stage, out, instr)
        return
    rows = bc.CpuOperand(table.ref, table.strides[0], table.strides[1:])
    mode, fill = _out_of_range(instr, out.dtype)
    stage.code.append(bc.Gather(rows, table.shape[0], mode, fill, index.shape, table.shape[1:], index.operand(), out.operand()))


def _out_of_range(instr: Instr, dtype: str) -> tuple[int, tuple[float, ...]]:
    """The ``mode`` and ``fill`` of the CPU instruction, for indices out of range."""
    return (bc.FILL, immediate(instr["fill"], compute_type(dtype))) if instr["mode"] == "fill" else (bc.CLIP, (0.0,))


def _fill(stage: StageLowering, out: View, instr: Instr) -> None:
    builder = VectorBuilder(memory.squeezed(out.shape))
    builder.store(out, builder.const(instr["fill"], out.dtype))
    stage.code.append(builder.finish())


def emit_sink_at(stage: StageLowering, i: int, instr: Instr) -> None:
    if i in stage.taken:
        return _sum_of_taken(stage, instr, stage.taken[i])
    v, index, *tops = instr.inputs
    sink = stage.program.sinks[instr["sink"]]
    at = stage.view(index)
    rank = len(at.shape)
    straight = stage.input_in_array_order(v) if math.prod(at.shape) == 1 and not tops else None

    def fits(view: View) -> bool:
        return sink.dtype in (view.dtype, compute_type(view.dtype)) and _dense(view, rank)

    x = straight if straight is not None and fits(straight) else stage.view_that(fits, v, sink.dtype)
    sums = instr["sink"], sink.shape[0], at.shape, x.shape[rank:], at.operand(), x.operand()
    if tops:
        top, heads = _dense_row(_dense_view(stage, tops[0]))
        stage.code.append(bc.AccumulateScaled(*sums, sorted=1, top=top, heads=heads, finite=int(instr["finite"])))
    else:
        stage.code.append(bc.AccumulateAt(*sums, sorted=int(instr["sorted"]), ordered=int(x is straight)))


def _sum_of_taken(stage: StageLowering, instr: Instr, found: TakenSum) -> None:
    """Emit a sum of rows that are read in place from a table."""
    _, index, *tops = instr.inputs
    sink = stage.program.sinks[instr["sink"]]
    at, row, taken = stage.view(index), sink.shape[1:], _gathered_rows(stage, found.gather)
    assert at.shape == ()
    factor, factors = taken.taken, 0
    if found.factor is not None:
        numbers = stage.view_that(lambda x: x.dtype == "float32" and _dense(x, 0), found.factor, "float32")
        factor, factors = _dense_row(numbers)
    top, heads = _dense_row(_dense_view(stage, tops[0])) if tops else (factor, 0)
    stage.code.append(
        bc.AccumulateTaken(
            instr["sink"],
            sink.shape[0],
            (),
            row,
            at.operand(),
            dataclasses.replace(taken.x, strides=dim_strides(row)),
            sorted=1,
            top=top,
            heads=heads,
            finite=int(bool(tops) and instr["finite"]),
            rows=taken.rows,
            mode=taken.mode,
            fill=taken.fill,
            taken=taken.taken,
            factor=factor,
            factors=factors,
        )
    )


def _gathered_rows(stage: StageLowering, gather: Instr) -> bc.CpuRows:
    """The rows that ``gather`` reads, in place."""
    table, index = (stage.view(v) for v in gather.inputs)
    assert _dense(table, 0) and index.shape == ()
    mode, fill = _out_of_range(gather, table.dtype)
    return bc.CpuRows(bc.CpuOperand(table.ref, math.prod(table.shape[1:]), (1,)), table.shape[0], mode, fill, index.operand())


def emit_taken_dot(stage: StageLowering, instr: Instr, found: TakenDotFacts) -> None:
    """Emit a sum over the last dimensions of products of rows, at least one of which is read in place from a table."""

    def side(of: Instr | int) -> bc.CpuRows:
        if isinstance(of, Instr):
            return _gathered_rows(stage, of)
        x = _dense_view(stage, of)
        return bc.CpuRows(_dense_row(x)[0], 0, bc.CLIP, (0.0,), x.operand())

    x, y = (side(of) for of in found.sides)
    out, heads = _dense_row(_rows_of(stage, instr, lambda view: _dense(view, 0) and view.row_stride >= math.prod(view.shape)))
    stage.code.append(bc.CpuTakenDot(heads, math.prod(stage.type(instr.inputs[0]).shape) // heads, x, y, out))


def emit_run_max(stage: StageLowering, i: int, instr: Instr) -> None:
    v, index = instr.inputs
    x, at = _dense_view(stage, v), stage.view(index)
    out = _rows_of(stage, instr, lambda view: _dense(view, 0))
    stage.code.append(bc.RunMax(instr["n"], x.shape, at.operand(), x.operand(), out.operand()))


def _rows_of(stage: StageLowering, instr: Instr, fits: Callable[[View], bool]) -> View:
    """The place of a result that is written row by row, also in a loop, where other values may lie column by column."""
    t = stage.type(instr.outputs[0])
    return stage.place(instr.outputs[0], fits, lambda: stage.scratch(t.shape, t.dtype))


def _dense_view(stage: StageLowering, v: int, first: int = 0) -> View:
    """A view of ``v`` whose dimensions from ``first`` on lie dense; of a copy if its own do not."""
    return stage.view_that(lambda x: _dense(x, first), v, stage.type(v).dtype)


def _dense(x: View, first: int) -> bool:
    """Whether the dimensions of ``x`` from ``first`` on lie dense."""
    pairs = zip(x.shape[first:], x.strides[first:], dim_strides(x.shape[first:]), strict=True)
    return all(n == 1 or s == t for n, s, t in pairs)


def _dense_row(x: View) -> tuple[bc.CpuOperand, int]:
    """Dense ``x`` as an operand with rows of one dimension, and its length."""
    return x.operand((1,)), math.prod(x.shape)


def emit_take_or_put(stage: StageLowering, i: int, instr: Instr) -> None:
    v, index = instr.inputs
    d, takes = instr["axis"] - 1, instr.kind == "take"
    x, at = stage.view(v), _index(stage, index)
    if takes and x.shape[d] == 0:
        _fill(stage, stage.place(instr.outputs[0]), instr)
        return
    x = _dense_view(stage, v, d)
    out = _rows_of(stage, instr, lambda view: _dense(view, d))
    count, *behind = (x if takes else out).shape[d:]  # the other side may have several dimensions of indices in the place of one
    inner = math.prod(behind)
    fields = count, at.shape[0], inner, x.shape[:d], at.operand(), _selected(x, d, inner), _selected(out, d, inner)
    stage.code.append(bc.Take(*fields, *_out_of_range(instr, out.dtype)) if takes else bc.CpuPut(*fields))


def _index(stage: StageLowering, v: int) -> View:
    """The stationary index ``v`` as one dimension."""
    view = stage.view(v)
    return stage.reshaped(view, (math.prod(view.shape),), tile=False)


def _selected(x: View, d: int, inner: int) -> bc.CpuOperand:
    """``x``, dense from dimension ``d`` on, with one stride for the elements that are selected from, ``inner`` at a time."""
    elements = math.prod(x.shape[d:])
    if elements > _MOST_SELECTED:
        raise CannotLower(f"a selection among {elements} elements of a row; the CPU target takes {_MOST_SELECTED}")
    return x.operand((*x.strides[:d], inner))


# --- Programs and stages ----------------------------------------------------------------------------------------------------------

_BEST = bc.Products()
_MOST_ELEMENTS = 1 << 48  # kMaxCount in cpu/src/program_check.cc


def generate(program: Program, name: str, products: Sequence[bc.Products] = (), rounding: Rounding = EVERYWHERE) -> np.ndarray:
    """The code of ``program`` as int64 words, the attribute of its custom call. Raises ``CannotLower``, ``InvalidProgram``.

    ``products``: for each part how bfloat16 operands are multiplied, by default as the CPU that runs the code chooses.
    ``rounding``: where 16-bit results are rounded.
    """
    program = memory.with_layouts(program)
    ways = products or (_BEST,) * len(program.parts)
    several = len(program.parts) > 1
    lowered: dict[tuple[int, bc.Products], bc.CpuProgram] = {}
    parts = []
    for part, way in zip(program.parts, ways, strict=True):
        key = id(part.program), way  # equal parts share their program
        if key not in lowered:
            lowered[key] = lower_program(part.program, f"{name}, phase {part.phase}" if several else name, way, rounding)
        parts.append(bc.CpuPart(part.phase, part.reads, part.writes, lowered[key]))
    words = bc.encode(bc.CpuCall(name, _arrays(program.arrays), program.operands, program.results, tuple(parts)))
    if wrong := check(words):  # as the custom call checks them when XLA makes the executable
        raise InvalidProgram(wrong)
    return words


def _arrays(arrays: Sequence[Array | ArrayType]) -> tuple[bc.CpuArray, ...]:
    return tuple(bc.CpuArray(bc.DTYPE_CODE[a.dtype], math.prod(a.shape)) for a in arrays)


def lower_program(program: TileProgram, name: str, products: bc.Products = _BEST, rounding: Rounding = EVERYWHERE) -> bc.CpuProgram:
    """The CPU program of ``program``, called ``name``; ``products`` and ``rounding`` as in ``generate``. Raises ``CannotLower``
    where an instruction has no code.

    Example::

        words = bc.encode(lower_program(program, "mlp"))
    """
    largest = max((math.prod(a.shape) for a in (*program.inputs, *program.outputs)), default=0)
    if largest > _MOST_ELEMENTS:
        raise CannotLower(f"an array of {largest} elements: the CPU target counts {_MOST_ELEMENTS} at most")
    program = with_epilogues(with_biases_first(simplified(with_known_bounds(program))), rounding)
    preps: list[bc.Prep] = []
    stages = []
    for part in program.stages:
        stage = StageLowering(program, part.body, preps, products, rounding)
        _emit(stage)
        code, scratch_bytes = memory.place_buffers(stage.code, stage.buffer_bytes, preps)
        stages.append(bc.CpuStage(part.name, scratch_bytes, code))
    sides = sum(math.prod(e) for p in preps if p.kind == bc.WEIGHT for e in (p.b_extents, p.k_extents, p.n_extents))
    if sides > bc.MAX_WEIGHT_INDICES:
        raise CannotLower(
            f"matrix products with weights whose sides add up to {sides}; the CPU target takes {bc.MAX_WEIGHT_INDICES}"
        )
    return bc.CpuProgram(
        name=name,
        axes=program.axes,
        batch_axes=program.batch_axes,
        tile_rows=program.tile_rows,
        workers=program.workers,
        inputs=_arrays(program.inputs),
        outputs=_arrays(program.outputs),
        preps=tuple(preps),
        sinks=tuple(_sink(program, sink) for sink in program.sinks),
        queues=tuple(bc.Ring(q.producer, q.consumers, q.depth, entry_bytes(q.tile, program.tile_rows)) for q in program.queues),
        stages=tuple(stages),
        order=-1 if program.order is None else program.order,
    )


def _sink(program: TileProgram, sink: SinkType) -> bc.Sink:
    strides = program.outputs[sink.array].row_strides[: program.batch_axes]
    return bc.Sink(bc.REDUCTIONS.index(sink.how), bc.DTYPE_CODE[sink.dtype], math.prod(sink.shape), sink.array, strides)


def entry_bytes(tile: TileType, tile_rows: int) -> int:
    """Bytes of a queue slot: ``tile_rows`` rows at their pitch, rounded up to a cache line."""
    return round_up(tile_rows * memory.row_pitch(tile.shape, tile.dtype) * itemsize(tile.dtype), memory.ALIGNMENT)


def _emit(stage: StageLowering) -> None:
    """Emit the code of all instructions of ``stage``, which is a stage or the body of a loop."""
    for item in pointwise.schedule(stage):
        if item.loop is not None:
            pointwise.emit_group(stage, item.ops, item.loop)
        else:
            (i,) = item.ops
            if i in stage.exponentials:
                _exponential(stage, stage.exponentials[i])
                continue
            kind = stage.body[i].kind
            handler = _HANDLERS.get(kind) or (_FAMILIES.get(OPS[kind].family) if kind in OPS else None)
            if handler is None:
                raise CannotLower(f"{kind} has no code on the CPU")
            handler(stage, i, stage.body[i])


def _store(stage: StageLowering, i: int, instr: Instr) -> None:
    x = instr.inputs[0]
    if stage.delivered((i, 0), x):
        return
    array = stage.border(instr)
    if (whole := array.view) is not None:
        stage.write(x, whole)
        return
    tile = stage.view_that(lambda view: view.ref.dtype == array.ref.dtype, x, bc.DTYPES[array.ref.dtype])
    stage.code.append(bc.StridedStore(array.ref, array.axis_strides, array.shape, array.strides, tile.operand()))


def _push(stage: StageLowering, i: int, instr: Instr) -> None:
    if not stage.delivered((i, 0), instr.inputs[0]):
        stage.write(instr.inputs[0], stage.queue(instr["queue"]))


def _concatenate(stage: StageLowering, i: int, instr: Instr) -> None:
    for p, v in enumerate(instr.inputs):
        if not stage.delivered((i, p), v):
            stage.write(v, stage.piece(instr, p))


def _pad(stage: StageLowering, i: int, instr: Instr) -> None:
    x, fill = instr.inputs
    tile = stage.type(x).tile
    low, interior = instr["low"][int(tile) :], instr["interior"][int(tile) :]  # ``high`` is what the shape of the result says
    whole = stage.place(instr.outputs[0])
    builder = VectorBuilder(memory.squeezed(whole.shape))
    builder.store(whole, stage.read(builder, fill, whole.shape))
    stage.emit(builder.finish(), tile)
    taken: list[range] = []
    filled: list[range] = []
    for n, m, lo, gap in zip(stage.type(x).shape, whole.shape, low, interior, strict=True):
        every = gap + 1
        # Negative padding cuts: elements of x whose place falls outside the result are left out.
        begin = max(0, -(lo // every)) if lo < 0 else 0
        end = min(n, (m - 1 - lo) // every + 1)
        taken.append(range(begin, end))
        filled.append(range(lo + begin * every, lo + end * every, every))
    if all(taken):
        stage.copy(memory.cut(stage.view(x), taken), memory.cut(whole, filled))


def _reduce(stage: StageLowering, i: int, instr: Instr) -> None:
    if i in stage.dots:
        return emit_taken_dot(stage, instr, stage.dots[i])
    how = OPS[instr.kind].fold
    tile = stage.type(instr.inputs[0]).tile
    axes = {a - int(tile) for a in (instr["axes"] if "axes" in dict(instr.params) else (instr["axis"],))}
    narrow = stage.widened(instr.inputs[0])
    x = stage.view(instr.inputs[0] if narrow is None else narrow)
    out = stage.place(instr.outputs[0])
    kept = [d for d in range(len(x.shape)) if d not in axes]
    in_order = sorted(axes) if how.startswith("arg") else sorted(axes, key=lambda d: -abs(x.strides[d]))
    extents, steps, out_steps = _loops(x, kept, out.strides)
    reduced, reduced_steps, _ = _loops(x, in_order, (0,) * len(in_order))
    if not reduced:
        reduced, reduced_steps = (1,), (0,)
    operands = x.operand((*steps, *reduced_steps)), out.operand(out_steps)
    stage.emit(bc.Reduce(bc.REDUCTIONS.index(how), extents, reduced, *operands), tile)


def _exponential(stage: StageLowering, found: RowExponential) -> None:
    def dense(view: View) -> bool:
        return view.shape[-1] == 1 or view.strides[-1] == 1

    def place(v: int) -> View:
        t = stage.type(v)
        return stage.place(stage.root(v), dense, lambda: stage.scratch(t.shape, t.dtype))

    x = stage.view_that(dense, found.x, stage.type(found.x).dtype)
    kept = x.shape[:-1]
    shift = stage.view(found.shift)
    operands = x.operand(), shift.operand(shift.strides[: len(kept)]), place(found.out).operand()
    sums = () if found.sums is None else (stage.place(stage.root(found.sums)).operand(),)
    stage.code.append(bc.ExpRows(kept, x.shape[-1], found.factor, *operands, sums))


Ints = tuple[int, ...]


def _loops(x: View, dims: Sequence[int], others: Sequence[int]) -> tuple[Ints, Ints, Ints]:
    """The loops over ``dims`` of ``x``, and over another operand whose strides there are ``others``: extents, strides of ``x``, and
    other strides. Extents of 1 are dropped, and neighbours merged where one loop can walk both operands."""
    extents, strides = [x.shape[d] for d in dims], [x.strides[d] for d in dims]
    groups = memory.merge_dims(extents, (strides, others))
    inner = [group[-1] for group in groups]
    merged = tuple(math.prod(extents[k] for k in group) for group in groups)
    return merged, tuple(strides[k] for k in inner), tuple(others[k] for k in inner)


def _scan(stage: StageLowering, i: int, instr: Instr) -> None:
    x = stage.view(instr.inputs[0])
    out = stage.place(instr.outputs[0])
    tile = stage.type(instr.inputs[0]).tile
    axis = instr["axis"] - int(tile)
    others = [d for d in range(len(x.shape)) if d != axis]
    extents, steps, out_steps = _loops(x, others, [out.strides[d] for d in others])
    operands = x.operand((*steps, x.strides[axis])), out.operand((*out_steps, out.strides[axis]))
    how = bc.CUMULATIVE.index(OPS[instr.kind].fold)
    stage.emit(bc.Scan(how, int(instr["reverse"]), (*extents, x.shape[axis]), *operands), tile)


def _accumulate(stage: StageLowering, i: int, instr: Instr) -> None:
    sink = stage.program.sinks[instr["sink"]]
    x = stage.view_that(lambda view: view.dtype == sink.dtype, instr.inputs[0], sink.dtype)
    axes = {a - 1 for a in instr["axes"]} - {-1}
    left = [d for d in range(len(x.shape)) if d not in axes]
    dense = dim_strides(sink.shape)  # of the accumulators
    kept, steps, sum_steps = _loops(x, left, dense)
    if not kept and instr.get("dims"):
        kept, steps, sum_steps = (1,), (0,), (1,)  # one accumulator of several; no loop would stand for a sink of one
    reduced, reduced_steps, _ = _loops(x, sorted(axes, key=lambda d: -abs(x.strides[d])), (0,) * len(axes))
    operand = x.operand((*steps, *reduced_steps))
    sums = bc.Sums(*stage.moves(instr.inputs[1:], instr.get("steps", ()), [dense[d] for d in instr.get("dims", ())]))
    only = stage.root(instr.inputs[0]) == instr.inputs[0] and stage.uses.get(instr.inputs[0]) == [(i, 0)]
    stage.code.append(bc.Accumulate(instr["sink"], kept, reduced, operand, sums, sum_steps, int(only)))


Handler = Callable[[StageLowering, int, Instr], None]
_FAMILIES: dict[str, Handler] = {"reduce": _reduce, "argreduce": _reduce, "cumulative": _scan}
_HANDLERS: dict[str, Handler] = {
    "store": _store,
    "store_slice": _store,
    "paste": emit_paste,
    "loop": lambda stage, i, instr: emit_loop(stage, instr, _emit),
    "gather": emit_gather,
    "take": emit_take_or_put,
    "put": emit_take_or_put,
    "sink_at": emit_sink_at,
    "run_max": emit_run_max,
    "dot": emit_dot,
    "push": _push,
    "concatenate": _concatenate,
    "pad": _pad,
    "sink": _accumulate,
    "matmul": emit_matmul,
    "matmul_sink": emit_matmul_sink,
}

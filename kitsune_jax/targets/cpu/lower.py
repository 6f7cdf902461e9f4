"""Tile program -> CPU program.

Comes in: a ``TileProgram``. Goes out: the ``bytecode.Program`` that computes the same, stage by stage: pointwise instructions in
groups (``pointwise``), matrix products with their epilogues (``matmul``), reductions, scans, concatenations and pads here. Raises
``CannotLower`` for what ``support.supports`` refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kitsune_jax.ops.rounding import EVERYWHERE, Rounding
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr, QueueType, SinkType, StageProgram, TileProgram, TileType
from kitsune_jax.program.passes import simplified, with_biases_first, with_epilogues
from kitsune_jax.program.within import with_known_bounds
from kitsune_jax.streams.space import dim_strides
from kitsune_jax.targets.cpu import buffers, bytecode, indexed, matmul, pointwise, slices, structured, views
from kitsune_jax.targets.cpu.bytecode import (
    CUMULATIVE,
    DTYPE_CODE,
    DTYPES,
    MAX_WEIGHT_INDICES,
    REDUCTIONS,
    WEIGHT,
    Accumulate,
    Array,
    Operand,
    Prep,
    Products,
    Reduce,
    Scan,
    StridedStore,
    Sums,
)
from kitsune_jax.targets.cpu.runtime import check
from kitsune_jax.targets.cpu.stage import Stage
from kitsune_jax.targets.cpu.vectors import VectorBuilder
from kitsune_jax.targets.cpu.views import ITEM_SIZE, View
from kitsune_jax.targets.cpu.words import Call, Part, encode
from kitsune_jax.targets.errors import CannotLower, InvalidProgram

if TYPE_CHECKING:
    import numpy as np

    from kitsune_jax.program.ir import Program

_BEST = Products()
_MOST_ELEMENTS = 1 << 48  # kMaxCount in cpu/src/program_check.cc


def generate(program: Program, name: str, products: Sequence[Products] = (), rounding: Rounding = EVERYWHERE) -> np.ndarray:
    """The code of ``program`` as int64 words, the attribute of its custom call. Raises ``CannotLower``, ``InvalidProgram``.

    ``products`` says for each part how bfloat16 operands are multiplied; by default, as the kernels of the CPU that runs the code
    like best. ``rounding``: where 16-bit results are rounded.
    """
    ways = products or (Products(),) * len(program.parts)
    several = len(program.parts) > 1
    lowered: dict[tuple[int, Products], bytecode.Program] = {}
    parts = []
    for part, way in zip(program.parts, ways, strict=True):
        key = id(part.program), way  # equal parts share their program
        if key not in lowered:
            lowered[key] = lower(part.program, f"{name}, phase {part.phase}" if several else name, way, rounding)
        parts.append(Part(part.phase, part.reads, part.writes, lowered[key]))
    arrays = tuple(Array(DTYPE_CODE[a.dtype], math.prod(a.shape)) for a in program.arrays)
    return _valid(encode(Call(name, arrays, program.operands, program.results, tuple(parts))))


def _valid(words: np.ndarray) -> np.ndarray:
    """``words``, which the custom call will accept: it checks them in the same way when XLA makes the executable."""
    if wrong := check(words):
        raise InvalidProgram(wrong)
    return words


def lower(program: TileProgram, name: str, products: Products = _BEST, rounding: Rounding = EVERYWHERE) -> bytecode.Program:
    """The CPU program of ``program``, called ``name``, whose bfloat16 operands are multiplied as ``products`` says, and whose
    16-bit results are rounded as ``rounding`` says.

    Raises ``CannotLower`` where an instruction has no code.

    Example::

        words = bytecode.encode(lower(program, "mlp"))
    """
    largest = max((math.prod(a.shape) for a in (*program.inputs, *program.outputs)), default=0)
    if largest > _MOST_ELEMENTS:
        raise CannotLower(f"an array of {largest} elements: the CPU target counts {_MOST_ELEMENTS} at most")
    program = with_epilogues(with_biases_first(simplified(with_known_bounds(program))), rounding)
    preps: list[Prep] = []
    stages = tuple(_stage(program, stage, preps, products, rounding) for stage in program.stages)
    sides = sum(math.prod(e) for p in preps if p.kind == WEIGHT for e in (p.b_extents, p.k_extents, p.n_extents))
    if sides > MAX_WEIGHT_INDICES:
        raise CannotLower(f"matrix products with weights whose sides add up to {sides}; the CPU target takes {MAX_WEIGHT_INDICES}")
    return bytecode.Program(
        name=name,
        axes=program.axes,
        batch_axes=program.batch_axes,
        tile_rows=program.tile_rows,
        workers=program.workers,
        inputs=tuple(bytecode.Array(DTYPE_CODE[a.dtype], math.prod(a.shape)) for a in program.inputs),
        outputs=tuple(bytecode.Array(DTYPE_CODE[a.dtype], math.prod(a.shape)) for a in program.outputs),
        preps=tuple(preps),
        sinks=tuple(_sink(program, sink) for sink in program.sinks),
        queues=tuple(_ring(queue, program.tile_rows) for queue in program.queues),
        stages=stages,
        order=-1 if program.order is None else program.order,
    )


def _sink(program: TileProgram, sink: SinkType) -> bytecode.Sink:
    strides = program.outputs[sink.array].row_strides[: program.batch_axes]
    return bytecode.Sink(REDUCTIONS.index(sink.how), DTYPE_CODE[sink.dtype], math.prod(sink.shape), sink.array, strides)


def _ring(queue: QueueType, tile_rows: int) -> bytecode.Ring:
    return bytecode.Ring(queue.producer, queue.consumers, queue.depth, entry_bytes(queue.tile, tile_rows))


def entry_bytes(tile: TileType, tile_rows: int) -> int:
    """Bytes of a queue slot: ``tile_rows`` rows at their pitch, up to a cache line."""
    size = tile_rows * views.row_pitch(tile.shape, tile.dtype) * ITEM_SIZE[tile.dtype]
    return -(-size // buffers.ALIGNMENT) * buffers.ALIGNMENT


def _stage(program: TileProgram, body: StageProgram, preps: list[Prep], products: Products, rounding: Rounding) -> bytecode.Stage:
    stage = Stage(program, body.body, preps, products, rounding)
    _emit(stage)
    code, scratch_bytes = buffers.place(stage.code, stage.buffer_bytes, preps)
    return bytecode.Stage(body.name, scratch_bytes, code)


def _emit(stage: Stage) -> None:
    """The code of all instructions of ``stage``: the body of a stage, or of a loop."""
    for item in pointwise.schedule(stage):
        if item.loop is not None:
            pointwise.emit_group(stage, item.ops, item.loop)
        else:
            (i,) = item.ops
            _handler(stage.body[i].kind)(stage, i, stage.body[i])


Handler = Callable[[Stage, int, Instr], None]


def _handler(kind: str) -> Handler:
    family = OPS[kind].family if kind in OPS else ""
    handler = _HANDLERS.get(kind) or _FAMILIES.get(family)
    if handler is None:
        raise CannotLower(f"{kind} has no code on the CPU")
    return handler


def _store(stage: Stage, i: int, instr: Instr) -> None:
    x = instr.inputs[0]
    if stage.settled((i, 0), x):
        return
    array = stage.output(instr["array"]) if instr.kind == "store" else slices.border_of(stage, instr)
    if array.view is not None:
        stage.write(x, array.view)
        return
    tile = stage.view(x)
    if tile.ref.dtype != array.ref.dtype:
        tile = stage.scratch(array.shape, DTYPES[array.ref.dtype])
        stage.write(x, tile)
    stage.code.append(StridedStore(array.ref, array.axis_strides, array.shape, array.strides, tile.operand()))


def _push(stage: Stage, i: int, instr: Instr) -> None:
    if not stage.settled((i, 0), instr.inputs[0]):
        stage.write(instr.inputs[0], stage.queue(instr["queue"]))


def _concatenate(stage: Stage, i: int, instr: Instr) -> None:
    for p, v in enumerate(instr.inputs):
        if not stage.settled((i, p), v):
            stage.write(v, stage.piece(instr, p))


def _pad(stage: Stage, i: int, instr: Instr) -> None:
    x, fill = instr.inputs
    tile = stage.type(x).tile
    low, interior = instr["low"][int(tile) :], instr["interior"][int(tile) :]  # ``high`` is what the shape of the result says
    whole = stage.place(instr.outputs[0])
    builder = VectorBuilder(views.squeezed(whole.shape))
    builder.store(whole, stage.read(builder, fill, whole.shape))
    stage.emit(builder.finish(), tile)
    start: list[int] = []
    limit: list[int] = []
    step: list[int] = []
    first: list[int] = []
    last: list[int] = []
    for n, m, lo, gap in zip(stage.type(x).shape, whole.shape, low, interior, strict=True):
        every = gap + 1
        # Negative padding cuts: elements of x whose place falls outside the result are left out.
        begin = max(0, -(lo // every)) if lo < 0 else 0
        end = min(n, (m - 1 - lo) // every + 1)
        start.append(begin)
        limit.append(max(begin, end))
        first.append(lo + begin * every)
        last.append(lo + (max(begin, end) - 1) * every + 1)
        step.append(every)
    if any(a >= b for a, b in zip(start, limit, strict=True)):
        return
    ones = (1,) * len(start)
    stage.copy(views.cut(stage.view(x), start, limit, ones), views.cut(whole, first, last, step))


def _reduce(stage: Stage, i: int, instr: Instr) -> None:
    if i in stage.dots:
        return indexed.taken_dot(stage, instr, stage.dots[i])
    how = OPS[instr.kind].fold
    tile = stage.type(instr.inputs[0]).tile
    axes = {a - int(tile) for a in (instr["axes"] if "axes" in dict(instr.params) else (instr["axis"],))}
    x = _reduced(stage, instr.inputs[0])
    out = stage.place(instr.outputs[0])
    kept = [d for d in range(len(x.shape)) if d not in axes]
    in_order = sorted(axes) if how.startswith("arg") else sorted(axes, key=lambda d: -abs(x.strides[d]))
    kept_x = [(x.shape[d], x.strides[d], s) for d, s in zip(kept, out.strides, strict=True)]
    reduced_x = [(x.shape[d], x.strides[d], 0) for d in in_order]
    k, r = _loops(kept_x), _loops(reduced_x) or [(1, 0, 0)]
    stage.emit(
        Reduce(
            REDUCTIONS.index(how),
            tuple(n for n, _, _ in k),
            tuple(n for n, _, _ in r),
            Operand(x.ref, x.row_stride, tuple(s for _, s, _ in (*k, *r))),
            Operand(out.ref, out.row_stride, tuple(s for _, _, s in k)),
        ),
        tile,
    )


def _reduced(stage: Stage, v: int) -> View:
    """``v`` where it lies; the 16-bit value it was widened from, if nothing else has brought the wide one into memory."""
    narrow = stage.widened(v)
    if narrow is None or stage.type(narrow).shape != stage.type(v).shape:
        return stage.view(v)
    return stage.view(narrow)


def _loops(dims: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """(extent, stride, stride) per loop: extents of 1 dropped, neighbours that one loop can walk for both strides merged."""
    out: list[tuple[int, int, int]] = []
    for n, s, t in dims:
        if n == 1:
            continue
        if out and out[-1][1] == s * n and out[-1][2] == t * n:
            out[-1] = (out[-1][0] * n, s, t)
        else:
            out.append((n, s, t))
    return out


def _scan(stage: Stage, i: int, instr: Instr) -> None:
    x = stage.view(instr.inputs[0])
    out = stage.place(instr.outputs[0])
    tile = stage.type(instr.inputs[0]).tile
    axis = instr["axis"] - int(tile)
    k = _loops([(x.shape[d], x.strides[d], out.strides[d]) for d in range(len(x.shape)) if d != axis])
    k.append((x.shape[axis], x.strides[axis], out.strides[axis]))
    stage.emit(
        Scan(
            CUMULATIVE.index(OPS[instr.kind].fold),
            int(instr["reverse"]),
            tuple(n for n, _, _ in k),
            Operand(x.ref, x.row_stride, tuple(s for _, s, _ in k)),
            Operand(out.ref, out.row_stride, tuple(s for _, _, s in k)),
        ),
        tile,
    )


def _accumulate(stage: Stage, i: int, instr: Instr) -> None:
    v = instr.inputs[0]
    sink = stage.program.sinks[instr["sink"]]
    x = stage.view(v)
    if x.dtype != sink.dtype:
        x = stage.scratch(stage.type(v).shape, sink.dtype)
        stage.write(v, x)
    axes = {a - 1 for a in instr["axes"]} - {-1}
    left = [d for d in range(len(x.shape)) if d not in axes]
    dense = dim_strides(sink.shape)  # of the accumulators
    kept = _loops([(x.shape[d], x.strides[d], t) for d, t in zip(left, dense, strict=True)])
    if not kept and instr.get("dims"):
        kept = [(1, 0, 1)]  # one accumulator of several; no loop would stand for a sink of one
    reduced = _loops([(x.shape[d], x.strides[d], 0) for d in sorted(axes, key=lambda d: -abs(x.strides[d]))])
    stage.code.append(
        Accumulate(
            instr["sink"],
            tuple(n for n, _, _ in kept),
            tuple(n for n, _, _ in reduced),
            Operand(x.ref, x.row_stride, tuple(s for _, s, _ in (*kept, *reduced))),
            sums=_sums(stage, instr, dense),
            sum_strides=tuple(t for _, _, t in kept),
        )
    )


def _sums(stage: Stage, instr: Instr, strides: Sequence[int]) -> Sums:
    """The part of the accumulators that a ``sink`` folds into."""
    dims = instr.get("dims", ())
    return Sums(*slices.moves_of(stage, instr.inputs[1:], instr.get("steps", ()), [strides[d] for d in dims]))


_FAMILIES: dict[str, Handler] = {"reduce": _reduce, "argreduce": _reduce, "cumulative": _scan}
_HANDLERS: dict[str, Handler] = {
    "store": _store,
    "store_slice": _store,
    "paste": structured.paste,
    "loop": lambda stage, i, instr: structured.loop(stage, instr, _emit),
    "gather": indexed.gather,
    "take": indexed.take,
    "put": indexed.put,
    "sink_at": indexed.sink_at,
    "run_max": indexed.run_max,
    "dot": structured.dot,
    "push": _push,
    "concatenate": _concatenate,
    "pad": _pad,
    "sink": _accumulate,
    "matmul": matmul.emit_matmul,
    "matmul_sink": matmul.emit_matmul_sink,
}

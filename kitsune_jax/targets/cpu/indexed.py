"""What an index chooses, as instructions of the CPU program: rows of a table, rows of a sink, elements of a tile's row.

Comes in: an instruction ``gather``, ``sink_at``, ``take`` or ``put`` of a stage (or of a loop's body). Goes out: its code, in the
stage. What is read lies dense where the instruction wants it so; a copy is made where it does not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from kitsune_jax.program.ir import Instr
from kitsune_jax.streams.space import dim_strides
from kitsune_jax.targets.cpu import bytecode, views
from kitsune_jax.targets.cpu.bytecode import (
    CLIP,
    FILL,
    AccumulateAt,
    AccumulateScaled,
    AccumulateTaken,
    Gather,
    Operand,
    Put,
    Rows,
    RunMax,
    Take,
)
from kitsune_jax.targets.cpu.stage import Stage
from kitsune_jax.targets.cpu.taken import TakenDot, TakenSum
from kitsune_jax.targets.cpu.vectors import VectorBuilder, compute_type, immediate
from kitsune_jax.targets.cpu.views import View
from kitsune_jax.targets.errors import CannotLower

_MOST_SELECTED = (1 << 31) - 1  # elements along what take and put select from: their offsets are int32


def gather(stage: Stage, i: int, instr: Instr) -> None:
    table, index = (stage.view(v) for v in instr.inputs)
    out = stage.place(instr.outputs[0])
    if table.shape[0] == 0:
        _fill(stage, out, instr)
        return
    rows = Operand(table.ref, table.strides[0], table.strides[1:])
    mode, fill = _out_of_range(instr, out.dtype)
    stage.code.append(Gather(rows, table.shape[0], mode, fill, index.shape, table.shape[1:], index.operand(), out.operand()))


def _out_of_range(instr: Instr, dtype: str) -> tuple[int, tuple[float, ...]]:
    """What an index outside of its range gives, as the instructions have it."""
    return (FILL, immediate(instr["fill"], compute_type(dtype))) if instr["mode"] == "fill" else (CLIP, (0.0,))


def _fill(stage: Stage, out: View, instr: Instr) -> None:
    builder = VectorBuilder(views.squeezed(out.shape))
    builder.store(out, builder.const(instr["fill"], out.dtype))
    stage.code.append(builder.finish())


def sink_at(stage: Stage, i: int, instr: Instr) -> None:
    if i in stage.taken:
        return _sum_of_taken(stage, instr, stage.taken[i])
    v, index, *tops = instr.inputs
    sink = stage.program.sinks[instr["sink"]]
    at = stage.view(index)
    rank = len(at.shape)
    straight = stage.unordered(v) if math.prod(at.shape) == 1 and not tops else None

    def fits(view: View) -> bool:
        return sink.dtype in (view.dtype, compute_type(view.dtype)) and _dense(view, rank)

    if straight is not None and fits(straight):
        x = straight
    else:
        x = stage.view(v)
        if not fits(x):
            x = stage.scratch(stage.type(v).shape, sink.dtype)
            stage.write(v, x)
    promised, ordered = int(instr["sorted"]), int(x is straight)
    operands = at.operand(), x.operand()
    if tops:
        top = _dense_view(stage, tops[0])
        heads = math.prod(top.shape)
        sums = (instr["sink"], sink.shape[0], at.shape, x.shape[rank:], *operands, 1, 0)
        flat = dataclasses.replace(top.operand(), strides=(1,))
        stage.code.append(AccumulateScaled(*sums, top=flat, heads=heads, finite=int(instr["finite"])))
        return
    stage.code.append(AccumulateAt(instr["sink"], sink.shape[0], at.shape, x.shape[rank:], *operands, promised, ordered))


def _sum_of_taken(stage: Stage, instr: Instr, found: TakenSum) -> None:
    """A sum of rows that it reads where the table has them."""
    _, index, *tops = instr.inputs
    sink = stage.program.sinks[instr["sink"]]
    at, row, taken = stage.view(index), sink.shape[1:], _taken(stage, found.gather)
    assert at.shape == ()
    factor, factors = taken.taken, 0
    if found.factor is not None:
        numbers = stage.view(found.factor)
        if numbers.dtype != "float32" or not _dense(numbers, 0):
            numbers = stage.scratch(numbers.shape, "float32")
            stage.write(found.factor, numbers)
        factor, factors = dataclasses.replace(numbers.operand(), strides=(1,)), math.prod(numbers.shape)
    top, heads = factor, 0
    if tops:
        largest = _dense_view(stage, tops[0])
        top, heads = dataclasses.replace(largest.operand(), strides=(1,)), math.prod(largest.shape)
    stage.code.append(
        AccumulateTaken(
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


def _taken(stage: Stage, gather: Instr) -> Rows:
    """What ``gather`` takes, where the table has it."""
    table, index = (stage.view(v) for v in gather.inputs)
    assert _dense(table, 0) and index.shape == ()
    mode, fill = _out_of_range(gather, table.dtype)
    return Rows(Operand(table.ref, math.prod(table.shape[1:]), (1,)), table.shape[0], mode, fill, index.operand())


def taken_dot(stage: Stage, instr: Instr, found: TakenDot) -> None:
    """A sum over the last dimensions of products of rows that it reads where a table has them."""

    def side(of: Instr | int) -> Rows:
        if isinstance(of, Instr):
            return _taken(stage, of)
        x = _dense_view(stage, of).operand()
        return Rows(dataclasses.replace(x, strides=(1,)), 0, CLIP, (0.0,), x)

    x, y = (side(of) for of in found.sides)
    out = _rows_of(stage, instr, lambda view: _dense(view, 0) and view.row_stride >= math.prod(view.shape))
    heads = math.prod(out.shape)
    inner = math.prod(stage.type(instr.inputs[0]).shape) // heads
    stage.code.append(bytecode.TakenDot(heads, inner, x, y, dataclasses.replace(out.operand(), strides=(1,))))


def run_max(stage: Stage, i: int, instr: Instr) -> None:
    v, index = instr.inputs
    x, at = _dense_view(stage, v), stage.view(index)
    out = _rows_of(stage, instr, lambda view: _dense(view, 0))
    stage.code.append(RunMax(instr["n"], x.shape, at.operand(), x.operand(), out.operand()))


def _rows_of(stage: Stage, instr: Instr, fits: Callable[[View], bool]) -> View:
    """The place of a result whose rows are written one by one: in a loop as well, where others lie column by column."""
    t = stage.type(instr.outputs[0])
    return stage.place(instr.outputs[0], fits, lambda: stage.scratch(t.shape, t.dtype))


def _dense_view(stage: Stage, v: int) -> View:
    """Where ``v`` lies with dense rows; a copy if they are not."""
    x = stage.view(v)
    if not _dense(x, 0):
        x = stage.scratch(x.shape, x.dtype)
        stage.write(v, x)
    return x


def _dense(x: View, first: int) -> bool:
    """Whether the dimensions of ``x`` from ``first`` on lie dense."""
    pairs = zip(x.shape[first:], x.strides[first:], dim_strides(x.shape[first:]), strict=True)
    return all(n == 1 or s == t for n, s, t in pairs)


def take(stage: Stage, i: int, instr: Instr) -> None:
    v, index = instr.inputs
    d = instr["axis"] - 1
    x, at = stage.view(v), _index(stage, index)
    if x.shape[d] == 0:
        _fill(stage, stage.place(instr.outputs[0]), instr)
        return
    if not _dense(x, d):
        x = stage.scratch(x.shape, x.dtype)
        stage.write(v, x)
    out = _rows_of(stage, instr, lambda view: _dense(view, d))
    mode, fill = _out_of_range(instr, out.dtype)
    inner, outer = math.prod(x.shape[d + 1 :]), x.shape[:d]
    operands = _selected(x, d, inner, x.shape[d]), _selected(out, d, inner, at.shape[0])
    stage.code.append(Take(x.shape[d], at.shape[0], inner, outer, at.operand(), *operands, mode, fill))


def put(stage: Stage, i: int, instr: Instr) -> None:
    v, index = instr.inputs
    d, n = instr["axis"] - 1, instr["n"]
    x, at = stage.view(v), _index(stage, index)
    if not _dense(x, d):
        x = stage.scratch(x.shape, x.dtype)
        stage.write(v, x)
    out = _rows_of(stage, instr, lambda view: _dense(view, d))
    inner, outer = math.prod(out.shape[d + 1 :]), x.shape[:d]
    operands = _selected(x, d, inner, at.shape[0]), _selected(out, d, inner, n)
    stage.code.append(Put(n, at.shape[0], inner, outer, at.operand(), *operands))


def _index(stage: Stage, v: int) -> View:
    """The stationary index ``v`` as one dimension."""
    view = stage.view(v)
    flat = views.reshape(view, (math.prod(view.shape),))
    if flat is None:
        copy = stage.scratch(view.shape, view.dtype, tile=False)
        stage.copy(view, copy)
        flat = views.reshape(copy, (math.prod(view.shape),))
        assert flat is not None
    return flat


def _selected(x: View, d: int, inner: int, extent: int) -> Operand:
    """``x``, dense from dimension ``d`` on, with one stride for what is selected, ``extent`` times ``inner`` elements."""
    if extent * inner > _MOST_SELECTED:
        raise CannotLower(f"a selection among {extent * inner} elements of a row; the CPU target takes {_MOST_SELECTED}")
    return dataclasses.replace(x.operand(), strides=(*x.strides[:d], inner))

"""Lowering of instructions that move elements within a row: broadcasts, concatenations, slices, transposes, pads, take and put.

Comes in: an instruction, and the ``StageCodeBuilder`` of its stage. Goes out: a home for its result.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kitsune_jax.errors import CannotLower
from kitsune_jax.ops.graph import Param
from kitsune_jax.ops.spec import resolve_rows
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import frame_ir as frame
from kitsune_jax.targets.cuda import ir, pointwise, tiles
from kitsune_jax.targets.cuda import stage_ir as st
from kitsune_jax.targets.cuda.pack import GatheredColumns, ScatteredColumns, VectorRecipe
from kitsune_jax.targets.cuda.stage.builder import StageCodeBuilder

REARRANGING = frozenset(kind for kind, spec in OPS.items() if spec.moves and kind != "reshape")
_FILL = -1
_MOST_FOLDED = 128  # columns of a row that are folded into one of several, at a load from shared memory for each


def rearrange(at: StageCodeBuilder, instr: Instr) -> None:
    """Give the result of ``instr`` a home. Raises ``CannotLower``.

    One rule covers all moves: the instruction is run on the *indices* of its operands' columns. If whole blocks move, no code is
    emitted; otherwise the warp's rows pass through shared memory in the new order.
    """
    if instr.kind == "iota":
        _iota(at, instr)
    elif instr.kind == "broadcast_in_dim" and not at.program.values[instr.inputs[0]].tile:
        _broadcast_stationary(at, instr)
    elif instr.outputs[0] in at.facts.joined or instr.outputs[0] in at.facts.only_multiplied:
        at.new(instr)  # only products read it, piece by piece
    else:
        _move(at, instr)


def _iota(at: StageCodeBuilder, instr: Instr) -> None:
    value, (v,) = at.new(instr), instr.outputs
    shape = tuple(instr["shape"])[1:]
    _check_width(instr, shape)
    index = np.indices(shape)[instr["dimension"] - 1].reshape(-1)
    words = index.astype(np.float32).view(np.int32) if pointwise.COMPUTE[value.dtype] == "float" else index
    at.settle(v, st.Number(0) if value.row else st.InVector(at.vector(table(words))))


def _check_width(instr: Instr, shape: tuple[int, ...]) -> None:
    """Raise ``CannotLower`` for arrays that are too wide: this module computes indices for every column."""
    if math.prod(shape) > tiles.MOST_COLUMNS:
        raise CannotLower(f"{instr.kind} of {math.prod(shape)} columns: the GPU has code for {tiles.MOST_COLUMNS} at most")


def table(words: Any) -> VectorRecipe:
    table = tuple(int(w) for w in np.asarray(words, np.int32))
    return VectorRecipe(None, (), (), (len(table),), tiles.padded(len(table)), table=table)


def _broadcast_stationary(at: StageCodeBuilder, instr: Instr) -> None:
    value, (x,), (v,) = at.new(instr), instr.inputs, instr.outputs
    if x in at.literals:
        at.settle(v, st.Number(at.literals[x]) if value.row else st.Splat(x))
        return
    address = at.layer_vectors.get(v) or at.vector(broadcast_recipe(at, instr))
    at.settle(v, st.InVector(ir.Address(address.at, value.width if value.slab else 0, address.layer)))


def is_vector(at: StageCodeBuilder, instr: Instr) -> bool:
    """Does the broadcast make a vector (or scalar) from a stationary array?"""
    return not at.program.values[instr.inputs[0]].tile and instr.inputs[0] not in at.literals


def broadcast_recipe(at: StageCodeBuilder, instr: Instr) -> VectorRecipe:
    """The recipe of the vector for a stationary value that ``instr`` broadcasts to every row."""
    (x,) = instr.inputs
    t = at.program.values[instr.outputs[0]]
    shape, dims = at.program.values[x].shape, tuple(instr["dims"])
    kept = [d for d in range(len(shape)) if dims[d] != 0]  # the row dimension has extent 1
    row_shape = tuple(instr["shape"])[1:]
    ctas, groups = at.split.parts(instr.outputs[0]), at.split.groups(instr.outputs[0])
    width = tiles.padded(math.prod(t.shape) // ctas)
    kept_shape, kept_dims = tuple(shape[d] for d in kept), tuple(dims[d] - 1 for d in kept)
    return VectorRecipe(x, kept_shape, kept_dims, row_shape, width, ctas, groups=groups)


def _move(at: StageCodeBuilder, instr: Instr) -> None:
    sources = [x for k, x in enumerate(instr.inputs) if not (instr.kind == "pad" and k == 1)]
    index = _index(at, instr, sources)
    sources = [at.root(x) for x in sources]
    value = at.new(instr)
    if instr.kind == "slice" and value.slab and at.split.groups(instr.inputs[0]) > 1:
        _slab_of_group(at, instr, value, int(index[0, 1]) // len(index))
        return
    if instr.kind == "concatenate" and value.slab == len(sources) > 1 and all(at.value(x).slab == 1 for x in sources):
        _settle_blocks(at, instr.outputs[0], [(x, 0, tiles.blocks(at.value(x).width)) for x in sources])
        return
    if value.slab and len(sources) == 1 and at.value(sources[0]).row:
        at.settle(instr.outputs[0], st.Splat(sources[0]))
        return
    at.split.refuse(instr.kind, instr.outputs[0], *sources)
    place(at, instr, index, sources)


def _slab_of_group(at: StageCodeBuilder, instr: Instr, value: st.StageValue, group: int) -> None:
    """Settle a slice as the slab of one group of columns of its operand."""
    x, blocks = at.root(instr.inputs[0]), tiles.blocks(value.width)
    if waits_for_product(at, x):  # the product's chunks have another width
        at.materialize(x)
    at.settle(instr.outputs[0], st.Parts(((x, group * blocks, blocks),)))


def place(at: StageCodeBuilder, instr: Instr, index: np.ndarray, sources: list[int]) -> None:
    """Give the result of ``instr`` the columns [source, column] of ``index``, one row for each column of the result."""
    (v,) = instr.outputs
    value, counts = at.value(v), [at.value(x).n for x in sources]
    alone = len(sources) == 1 and bool((index[:, 0] >= 0).all())  # and no column of a pad, for which ``index`` has column 0
    if alone and np.array_equal(index[:, 1], np.arange(counts[0])):
        at.alias(instr, sources[0])
    elif alone and counts[0] == 1 and (index[:, 1] == 0).all():
        at.settle(v, st.Splat(sources[0]))
    elif value.row and index[0, 0] >= 0 and (rows := _rows_of(at, sources[index[0, 0]])):
        at.load_row(v, rows, int(index[0, 1]))
    elif not value.row and (parts := _whole_blocks(at, value.width, value.n, index, sources)):
        _settle_blocks(at, v, parts)
    else:
        _through_scratch(at, instr, v, index, sources)


def _settle_blocks(at: StageCodeBuilder, v: int, parts: Sequence[tuple[int, int, int]]) -> None:
    """Settle ``v`` as whole blocks of other values: (value, first block, blocks)."""
    for x in dict.fromkeys(x for x, _, _ in parts):
        if waits_for_product(at, x):  # the product's chunks have another width
            at.materialize(x)
    at.settle(v, st.Parts(tuple(parts)))
    if at.repeated and at.uses[v] > 1:
        _evaluate_parts(at, v, tuple(parts))


def _evaluate_parts(at: StageCodeBuilder, v: int, parts: tuple[tuple[int, int, int], ...]) -> None:
    """Evaluate the ``parts`` of ``v`` in one loop, directly into their places in ``v``. Otherwise every reader of ``v`` would
    evaluate them again, and their common operands once for each part."""
    value, values = at.value(v), [at.value(x) for x, _, _ in parts]
    whole = all(first == 0 and blocks == tiles.blocks(x.width) for x, (_, first, blocks) in zip(values, parts, strict=True))
    alike = len({x.width for x in values}) == 1 and len({x for x, _, _ in parts}) == len(parts)
    if value.form == "bit" or not whole or not alike or not any(isinstance(x.home, st.Expression) for x in values):
        return
    keep = at.keep(v)
    if keep.to is None:
        at.add(ir.Registers(keep.ref, keep.form, value.dtype, value.registers))
    starts = dict(zip((x for x, _, _ in parts), itertools.accumulate((n for _, _, n in parts), initial=0), strict=False))
    copy = dataclasses.replace(keep, push=True, over=True)
    actions = [dataclasses.replace(copy, value=x, reads=at.uses[x], first=-start) for x, start in starts.items()]
    at.evaluate(values[0].width, actions)
    owner = ir.Ref("v", v)
    at.add(ir.Alive(owner, 0 if keep.to else value.registers))
    at.settle(v, (st.InImage if keep.to else st.InRegisters)(keep.ref, keep.form, owner))
    for x, _, blocks in parts:
        at.settle(x, st.Parts(((v, starts[x], blocks),)))


def _rows_of(at: StageCodeBuilder, v: int) -> ir.Rows | None:
    """The rows of the array that ``v`` is, if a thread can read a single element of them."""
    home = at.value(v).home
    return home.rows if isinstance(home, st.InArray) and not home.rows.strides and home.rows.access != "kStaged" else None


def fold_part(at: StageCodeBuilder, instr: Instr, how: str) -> None:
    """Give the fold by ``how`` over a part of a row's dimensions a home. Each column of the result reads its part of the row."""
    (x,), (v,) = instr.inputs, instr.outputs
    shape, axes = at.program.values[x].shape, sorted(a - 1 for a in instr["axes"])
    _check_width(instr, shape)
    if axes != list(range(axes[0], axes[-1] + 1)):
        raise CannotLower("a reduction over dimensions of a row that do not follow each other has no code on the GPU")
    count, step = math.prod(shape[a] for a in axes), math.prod(shape[axes[-1] + 1 :])
    if count > _MOST_FOLDED:
        raise CannotLower(f"a reduction of {count} columns of a row to each of several has no code on the GPU")
    value, source = at.new(instr), at.root(x)
    to_scratch(at, [source])
    starts = np.arange(math.prod(shape[: axes[0]]))[:, None] * count * step + np.arange(step)
    at.settle(v, st.InScratch(at.vector(table(starts.reshape(-1))), None, ir.ScratchFold(how, count, step)))
    if value.row:
        raise AssertionError("a fold of a whole row is a row value")
    at.materialize(v)


def waits_for_product(at: StageCodeBuilder, v: int) -> bool:
    """Is ``v`` computed from a pending product?"""
    match at.value(v).home:
        case st.Multiply():
            return True
        case st.Expression(_, operands):
            return any(waits_for_product(at, x) for x in operands)
    return False


def _index(at: StageCodeBuilder, instr: Instr, sources: list[int]) -> np.ndarray:
    """[columns, 2]: the source of each column of the result (-1: none), and the column there."""
    shapes = tuple(at.program.values[x].shape for x in sources)
    for shape in (at.program.values[instr.outputs[0]].shape, *shapes):
        _check_width(instr, shape)
    return _columns(instr.kind, instr.params, shapes)


@functools.lru_cache(maxsize=128)  # a stage is built several times, until it fits
def _columns(kind: str, params: tuple[tuple[str, Param], ...], shapes: tuple[tuple[int, ...], ...]) -> np.ndarray:
    stride = 1 << 40
    operands = [(k * stride + np.arange(math.prod(shape), dtype=np.int64)).reshape(1, *shape) for k, shape in enumerate(shapes)]
    if kind == "pad":
        operands.append(np.asarray(_FILL, np.int64))
    rule = OPS[kind].numpy
    assert rule is not None  # it moves elements
    flat = rule(resolve_rows(params, 1), *operands, out_dtype="int64").reshape(-1)
    found = np.stack([np.where(flat < 0, -1, flat // stride), np.where(flat < 0, 0, flat % stride)], axis=1)
    found.flags.writeable = False
    return found


def _whole_blocks(
    at: StageCodeBuilder, width: int, n: int, index: np.ndarray, sources: list[int]
) -> tuple[tuple[int, int, int], ...] | None:
    """The result as runs of whole blocks of its sources: (value, first block, blocks); or None."""
    size, runs = tiles.block(width), list[tuple[int, int, int]]()
    for b in range(tiles.blocks(width)):
        columns = index[b * size : min((b + 1) * size, n)]
        source, first = int(columns[0, 0]), int(columns[0, 1])
        if source < 0 or (columns[:, 0] != source).any() or first % size:
            return None
        x = at.value(sources[source])
        if x.row or tiles.block(x.width) != size or not np.array_equal(columns[:, 1], first + np.arange(len(columns))):
            return None
        last = runs[-1] if runs else None
        if last and last[0] == sources[source] and last[1] + last[2] == first // size:
            runs[-1] = (last[0], last[1], last[2] + 1)
        else:
            runs.append((sources[source], first // size, 1))
    return tuple(runs)


def to_scratch(at: StageCodeBuilder, sources: list[int]) -> list[int]:
    """Write ``sources`` to the warp's scratch rows, side by side; returns their first columns."""
    *starts, words = itertools.accumulate((at.value(x).width for x in sources), initial=0)
    at.scratch_words = max(at.scratch_words, words | 1)
    at.add(st.SyncWarp())  # earlier readers of the rows are done
    for x, start in zip(sources, starts, strict=True):
        if at.value(x).row:
            at.add(st.RowToScratch(start, at.row(x)))
        else:
            at.evaluate(at.value(x).width, [ir.ToScratch(x, start)])
    at.add(st.SyncWarp())
    return starts


def _through_scratch(at: StageCodeBuilder, instr: Instr, v: int, index: np.ndarray, sources: list[int]) -> None:
    starts = to_scratch(at, sources)
    where = [_FILL if s < 0 else starts[s] + c for s, c in index]
    fill: ir.Expr = ir.Literal(f"{pointwise.COMPUTE[at.value(v).dtype]}(0)")
    if _FILL in where:
        if instr.kind != "pad":
            raise AssertionError("only a pad has columns without a source")
        fill = at.row(instr.inputs[1])
    from_scratch(at, v, where, fill)


def from_scratch(at: StageCodeBuilder, v: int, where: Sequence[int], fill: ir.Expr | None = None) -> None:
    """Read ``v`` from the columns ``where`` of the warp's scratch rows; -1 means ``fill``."""
    value = at.value(v)
    if value.row:
        at.set_row(v, fill if fill is not None and where[0] < 0 else ir.FromScratch(value.dtype, column=where[0]))
    else:
        at.settle(v, st.InScratch(at.vector(table(where)), fill))
        at.materialize(v)


# --- take, and put, its gradient: columns moved by an index that does not stream --------------------------------------------------
#
# XLA knows the index before the call, and makes lists from it: the source of each column (``pack.GatheredColumns``), or the columns
# that each column of the result sums (``pack.ScatteredColumns``). The kernel reads these lists, and the warp's rows pass through
# shared memory in the new order.


def lower_take(at: StageCodeBuilder, instr: Instr) -> None:
    """Lower ``instr``. Raises ``CannotLower``."""
    (v,), x = instr.outputs, at.root(instr.inputs[0])
    at.new(instr)
    _check(at, instr)
    (start,) = to_scratch(at, [x])
    _settle(at, v, st.InScratch(take_columns(at, instr, start), fill_value(instr, at.value(v).dtype)))


def lower_put(at: StageCodeBuilder, instr: Instr) -> None:
    """Lower ``instr``. Raises ``CannotLower``."""
    (v,), (x, index) = instr.outputs, instr.inputs
    at.new(instr)
    _check(at, instr)
    (start,) = to_scratch(at, [at.root(x)])
    of_x, of_index = at.program.values[x], at.program.values[index]
    d, count = instr["axis"] - 1, math.prod(of_index.shape)
    inner = math.prod(of_x.shape[d + len(of_index.shape) :])
    outer = math.prod(of_x.shape[:d])

    def part(name: str, words: int) -> ir.Address:
        how = ScatteredColumns(name, outer, count, inner, instr["n"], start)
        return at.vector(VectorRecipe(index, (), (), (words,), tiles.padded(words), how=how))

    n = at.value(v).n
    first = part("first", n + 1)
    _settle(at, v, st.InScratch(first, None, ir.ScratchList(part("list", max(1, outer * count * inner)))))


def _settle(at: StageCodeBuilder, v: int, home: st.InScratch) -> None:
    if not at.value(v).row:
        at.settle(v, home)
        at.materialize(v)
        return
    dtype = at.value(v).dtype
    if isinstance(home.fold, ir.ScratchList):
        at.set_row(v, ir.SumOfList(dtype, home.table, home.fold.columns, 0))
    else:
        which = ir.Ref("pick", v)
        at.setup.append(frame.LoadScalar(which, "int32", home.table, True))
        at.set_row(v, ir.FromScratch(dtype, index=which, fill=home.fill))


def _check(at: StageCodeBuilder, instr: Instr) -> None:
    x, index = instr.inputs
    at.split.refuse(f"a {instr.kind}", x, instr.outputs[0])
    if at.program.values[index].dtype not in ("int32", "uint32"):
        raise CannotLower(f"a {instr.kind} by {at.program.values[index].dtype} indices has no code on the GPU")


def take_columns(at: StageCodeBuilder, instr: Instr, start: int) -> ir.Address:
    """The vector with the source column of each column of a ``take``, counted from ``start``; -1 where it fills."""
    x, index = (at.program.values[v] for v in instr.inputs)
    d = instr["axis"] - 1
    count, inner, outer = x.shape[d], math.prod(x.shape[d + 1 :]), math.prod(x.shape[:d])
    how = GatheredColumns(outer, count, inner, instr["mode"] == "fill", start)
    n = outer * math.prod(index.shape) * inner
    return at.vector(VectorRecipe(instr.inputs[1], (), (), (n,), tiles.padded(n), how=how))


def fill_value(instr: Instr, dtype: str) -> ir.Expr:
    """The value for an index out of range."""
    type_ = pointwise.COMPUTE[dtype]
    return ir.Literal(pointwise.literal(instr["fill"] if instr["mode"] == "fill" else 0, type_))

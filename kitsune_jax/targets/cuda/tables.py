"""Gathers: rows of a table in global memory, which a tile of indices says, in the place of the rows of a streamed array.

Comes in: a ``gather`` and the ``Evaluation`` of its stage. Goes out: nodes, and the home of its value. Invariant: no address lies
outside of the table, whatever the indices are: one that is out of range has the nearest row ("clip", "promise_in_bounds"), or a row
of the number to fill with, which lies among the stationary vectors. So nothing need look at an index once its row has an address.
"""

from __future__ import annotations

import math

import numpy as np

from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import arrays, columns, pointwise, tiles
from kitsune_jax.targets.cuda import device_ir as ir
from kitsune_jax.targets.cuda import statements as st
from kitsune_jax.targets.cuda.device_ir import Address, Expr, Ref
from kitsune_jax.targets.cuda.evaluation import Evaluation
from kitsune_jax.targets.cuda.pack import VectorRecipe
from kitsune_jax.targets.cuda.values import InArray, InRegisters, Value
from kitsune_jax.targets.errors import CannotLower

# Indices of a row: each has an address of its own, in registers.
_MOST = 32


def lower(at: Evaluation, instr: Instr) -> None:
    """Lowers ``instr``. Raises ``CannotLower``."""
    (table, index), (v,) = instr.inputs, instr.outputs
    at.new(instr)
    if at.is_slab(v):
        raise CannotLower("a gather of columns that are split over CTAs has no code on the GPU")
    t, count = at.program.values[table], at.value(index).n
    if t.dtype not in pointwise.ITEM_SIZE:
        raise CannotLower(f"a table of {t.dtype} has no code on the GPU")
    if count > _MOST:
        raise CannotLower(f"a gather by {count} indices for a row of the stream; the GPU has code for {_MOST} at most")
    at.tables[table] = None
    if count == 1:
        _rows(at, instr, v, Ref("gather", v), at.row(index))
        return
    each = math.prod(t.shape[1:])
    found = [Ref("gather", v, f"_{k}") for k in range(count)]
    sources = [at.unnamed(Value(each, t.dtype, each == 1)) for _ in found]
    for ref, source, row in zip(found, sources, _indices(at, index), strict=True):
        _rows(at, instr, source, ref, row)
    which = np.arange(count * each)
    columns.place(at, instr, np.stack([which // each, which % each], axis=1), sources)


def _indices(at: Evaluation, index: int) -> list[Expr]:
    """Each index of a row, in all threads that share the row."""
    value = at.value(index)
    columns.to_scratch(at, [at.root(index)])
    found: list[Expr] = []
    for column in range(value.n):
        at.counter += 1
        ref = Ref("index", at.counter, f"_{column}")
        at.add(st.SetRow(ref, value.dtype, ir.FromScratch(value.dtype, column=column)))
        found.append(ir.Read("row", ref, value.dtype))
    return found


def _rows(at: Evaluation, instr: Instr, v: int, ref: Ref, index: Expr) -> None:
    """The rows of the table that ``index`` says are the value ``v``, by addresses ``ref``."""
    t = at.program.values[instr.inputs[0]]
    n = math.prod(t.shape[1:])
    size = n * pointwise.ITEM_SIZE[t.dtype]
    table = Ref("table", instr.inputs[0])
    at.add(st.TableRows(ref, table, index, t.shape[0], size, _otherwise(at, instr, n, t.dtype)))
    rows = ir.Rows(ref, t.dtype, n, str(arrays.contiguous_access(n, t.dtype, size)), (), tiles.is_half(t.dtype))
    if n > 1:
        at.settle(v, InArray(rows, -1))
        if v in at.facts.row_pieces:
            at.address_number(ref)  # now, so that no address need stay in registers until the product
        return
    kept = Ref("r", ref.of, ref.part)
    at.add(st.LoadRow(kept, rows))
    at.settle(v, InRegisters(kept, "row", kept))


def _otherwise(at: Evaluation, instr: Instr, n: int, dtype: str) -> Address | None:
    """A row of the number to fill with."""
    if instr["mode"] != "fill":
        return None
    row = np.full(n, instr["fill"], np_dtype(dtype)).view(np.uint8)
    words = np.pad(row, (0, -len(row) % 4)).view(np.int32)
    return at.vector(VectorRecipe(None, (), (), (len(words),), len(words), table=tuple(map(int, words))))

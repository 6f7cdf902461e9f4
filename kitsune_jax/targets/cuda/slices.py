"""Slices of arrays at the number of a loop: the rows of one time step come in, and those of another go out.

Comes in: a ``load_slice`` or ``store_slice``, and the ``Evaluation`` of its stage. Goes out: nodes, and where the slice's rows are.
Invariant: an access is as wide as the slice's pitch, width and every step of the loop allow.
"""

from __future__ import annotations

import math

from kitsune_jax.program.ir import ArrayType, Instr
from kitsune_jax.streams.space import dim_strides
from kitsune_jax.targets.cuda import arrays, pointwise, tiles
from kitsune_jax.targets.cuda import device_ir as ir
from kitsune_jax.targets.cuda import statements as st
from kitsune_jax.targets.cuda.device_ir import Ref, Store
from kitsune_jax.targets.cuda.evaluation import Evaluation
from kitsune_jax.targets.cuda.values import InArray, InRegisters
from kitsune_jax.targets.errors import CannotLower


def load(at: Evaluation, instr: Instr) -> None:
    """The slice is read from its rows where a loop over columns, or a product, asks for it."""
    (v,) = instr.outputs
    value, rows = at.new(instr), _rows(at, instr, "in", instr.inputs)
    if value.row:
        ref = Ref("r", v)
        at.add(st.LoadRow(ref, rows))
        at.settle(v, InRegisters(ref, "row", ref))
    else:
        at.settle(v, InArray(rows, instr["array"]))


def store(at: Evaluation, instr: Instr) -> None:
    (x, *numbers) = instr.inputs
    value, rows = at.value(x), _rows(at, instr, "out", numbers)
    if value.row:
        at.add(st.StoreRow(rows, at.row(x), at.split > 1))
    elif at.split > 1 and not value.slab:
        raise CannotLower("a loop that is split by columns stores a value that is not")
    else:
        at.evaluate(value.width, [Store(x, rows, value.n if value.slab else 0, value.slab or 1)])


def _rows(at: Evaluation, instr: Instr, role: str, numbers: object) -> ir.Rows:
    k = instr["array"]
    array = at.program.inputs[k] if role == "in" else at.program.outputs[k]
    whole = Ref(role, k, "_whole")
    at.name_axes()
    at.once_per_tile(_whole_rows(array, role, k, whole))
    at.counter += 1
    ref, size = Ref("cut", at.counter), pointwise.ITEM_SIZE[array.dtype]
    strides = dim_strides(array.shape)
    assert isinstance(numbers, (tuple, list))
    cuts = tuple(zip(numbers, instr["dims"], instr["steps"], strict=True))
    terms = tuple((at.row(n), step * strides[d] * size) for n, d, step in cuts)
    at.add(st.SliceRows(ref, whole, terms, role == "in"))
    extent = dict(zip(instr["dims"], instr["sizes"], strict=True))
    columns = [(extent.get(d, array.shape[d]), strides[d]) for d in array.kept]
    return _of_columns(array, role, ref, columns, [bytes_ for _, bytes_ in terms])


def _of_columns(array: ArrayType, role: str, ref: Ref, columns: list[tuple[int, int]], steps: list[int]) -> ir.Rows:
    """``columns``: (extent, element stride) of the slice's dimensions, outermost first."""
    n, inner, together = math.prod(extent for extent, _ in columns), 1, True
    for extent, stride in reversed(columns):
        together &= extent == 1 or stride == inner
        inner *= extent
    size = pointwise.ITEM_SIZE[array.dtype]
    if not together:
        return ir.Rows(ref, array.dtype, n, str(size), tuple(reversed(columns)), False)
    access = arrays.contiguous_access(n, array.dtype, *(s * size for s in array.row_strides), *steps)
    return ir.Rows(ref, array.dtype, n, str(access), (), role == "in" and tiles.is_half(array.dtype))


def _whole_rows(array: ArrayType, role: str, k: int, ref: Ref) -> st.RowAddresses:
    size = pointwise.ITEM_SIZE[array.dtype]
    strides = tuple((axis, stride * size) for axis, stride in enumerate(array.row_strides) if stride)
    return st.RowAddresses(ref, ir.parameter(role, k), strides, False)

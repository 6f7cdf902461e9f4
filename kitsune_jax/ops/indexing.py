"""Entries of the op table that read or write where an index says: ``take`` and ``scatter_sum``, ``_max``, ``_min``, ``_prod``.

Comes in: nothing. Goes out: ``INDEXED``, the entries by kind. Invariants: an index below 0 or beyond the last element is out of
range, whatever its dtype; ``take`` is exact; ``scatter_sum`` and ``scatter_prod`` of floats accumulate in float64 and round once.

Over a stream, an index that streams makes of ``take`` a gather from a stationary table, and of a scatter a sink. An index that does
not stream selects inside every row: the instructions ``take`` and ``put`` of the tile program.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax

from kitsune_jax.graph import Op, Scalar, Value, make_params
from kitsune_jax.ops.local import Dims, LocalOp
from kitsune_jax.ops.reduce import FOLDS, identity
from kitsune_jax.ops.relations import DimRelation
from kitsune_jax.ops.spec import (
    DTYPES,
    NUMBERS,
    Array,
    NumpyRule,
    OpSpec,
    Params,
    Shapes,
    is_float,
    is_narrow,
    np_dtype,
    round_to,
    to_double,
)

MODES = ("clip", "fill", "promise_in_bounds")
_LONGEST = 4096  # a dimension that is indexed inside each row
_UNFINISHED = "it reads any row of a table, and this one is not finished before the stream ends"
_OPEN = "any row of its result may change until the stream ends"


def filling(fill: Scalar | None, dtype: str) -> Scalar:
    """What an index out of range gives: ``fill``, or JAX's default, which is NaN, the lowest signed, the highest unsigned number.

    >>> filling(None, "int8"), filling(None, "uint8"), filling(7, "int8")
    (-128, 255, 7)
    """
    if fill is not None:
        return fill
    if is_float(dtype):
        return math.nan
    return True if dtype == "bool" else int(np.iinfo(dtype).min if dtype.startswith("int") else np.iinfo(dtype).max)


# --- meaning --------------------------------------------------------------------------------------------------------------------


def _positions(index: Array, n: int) -> tuple[Array, Array]:
    """(the index as int64, clipped to [0, n), and where it was inside)."""
    inside = (index >= 0) & (index < n)
    top = np.asarray(max(n - 1, 0), np.uint64).astype(np.int64)
    return np.where(inside, index, np.where(index < 0, 0, top)).astype(np.int64), inside


def _take(params: Params, /, x: Array, index: Array, *, out_dtype: str) -> Array:
    x, axis = np.asarray(x), params["axis"]
    at, inside = _positions(np.asarray(index), x.shape[axis])
    filled = params["mode"] == "fill"
    fill = np.asarray(filling(params["fill"], str(x.dtype)) if filled else 0).astype(x.dtype)
    shape = (*x.shape[:axis], *at.shape, *x.shape[axis + 1 :])
    if x.shape[axis] == 0:
        return np.full(shape, fill)
    found = np.take(x, at, axis)
    after = (1,) * (x.ndim - 1 - axis)
    return np.where(inside.reshape((*inside.shape, *after)), found, fill) if filled else found


def _scatter(fold: str) -> NumpyRule:
    def rule(params: Params, /, updates: Array, index: Array, *, out_dtype: str) -> Array:
        axis, n, rank = params["axis"], params["n"], np.ndim(index)
        x = to_double(np.asarray(updates))
        rows = np.moveaxis(x, range(axis, axis + rank), range(rank))
        at, inside = _positions(np.asarray(index), n)
        out = np.full((n, *rows.shape[rank:]), identity(fold, x.dtype), x.dtype)
        with np.errstate(all="ignore"):
            FOLDS[fold].at(out, at[inside], rows[inside])
            return round_to(np.moveaxis(out, 0, axis), out_dtype)

    return rule


# --- by JAX ---------------------------------------------------------------------------------------------------------------------

_GATHER_MODES = {
    "clip": lax.GatherScatterMode.CLIP,
    "fill": lax.GatherScatterMode.FILL_OR_DROP,
    "promise_in_bounds": lax.GatherScatterMode.PROMISE_IN_BOUNDS,
}


def _take_by_jax(params: Params, /, x: Any, index: Any, *, out: Value) -> Any:
    axis, rank = params["axis"], np.ndim(index)
    before, after = range(axis), range(axis + rank, len(out.shape))
    numbers = lax.GatherDimensionNumbers(offset_dims=(*before, *after), collapsed_slice_dims=(axis,), start_index_map=(axis,))
    sizes = [1 if d == axis else n for d, n in enumerate(x.shape)]
    return lax.gather(
        x, lax.expand_dims(index, (rank,)), numbers, sizes, mode=_GATHER_MODES[params["mode"]], fill_value=params["fill"]
    )


def _scatter_by_jax(fold: str, function: Any) -> Any:
    def rule(params: Params, /, updates: Any, index: Any, *, out: Value) -> Any:
        axis, rank = params["axis"], np.ndim(index)
        window = (*range(axis), *range(axis + rank, np.ndim(updates)))
        numbers = lax.ScatterDimensionNumbers(window, inserted_window_dims=(axis,), scatter_dims_to_operand_dims=(axis,))
        # XLA rounds each sum to the dtype of the array it adds into: of a thousand bfloat16 numbers, two digits would be left.
        dtype = np_dtype("float32" if fold in ("sum", "prod") and is_narrow(out.dtype) else out.dtype)
        start = lax.full(out.shape, identity(fold, dtype), dtype)
        index = lax.expand_dims(index, (rank,))
        mode = lax.GatherScatterMode.FILL_OR_DROP
        updates = lax.convert_element_type(updates, dtype)
        made = function(start, index, updates, numbers, indices_are_sorted=params["sorted"], mode=mode)
        return lax.convert_element_type(made, np_dtype(out.dtype))

    return rule


# --- dimension relations --------------------------------------------------------------------------------------------------------


def _relate_take(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    (x, index), axis = in_shapes, op["axis"]
    after = axis + len(index)
    return (
        DimRelation("mixed", ((0, axis),), _UNFINISHED),
        *(DimRelation("parallel", ((0, d), (2, d if d < axis else d - 1 + len(index)))) for d in range(len(x)) if d != axis),
        *(DimRelation("parallel", ((1, k), (2, d))) for k, d in enumerate(range(axis, after))),
    )


def _relate_scatter(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    (updates, index), axis = in_shapes, op["axis"]
    after = axis + len(index)
    return (
        *(DimRelation("contracted", ((0, d), (1, k))) for k, d in enumerate(range(axis, after))),
        *(DimRelation("parallel", ((0, d), (2, d))) for d in range(axis)),
        *(DimRelation("parallel", ((0, d), (2, d + 1 - len(index)))) for d in range(after, len(updates))),
        DimRelation("mixed", ((2, axis),), _OPEN),
    )


# --- row-local forms ------------------------------------------------------------------------------------------------------------


def _take_alone(op: Op, ins: list[Dims]) -> str:
    table, index = ins
    if table.tile and index.tile:
        return "its table and its index both stream"
    if index.tile:
        return "its index streams, and the rows of its table are not in front" if op["axis"] else ""
    return _long(table, table.shape[op["axis"]], index)


def _scatter_alone(op: Op, ins: list[Dims]) -> str:
    updates, index = ins
    if index.tile:
        return "its index streams, and the rows of its result are not in front" if op["axis"] else ""
    if updates.tile and op.kind != "scatter_sum":
        return "its index does not stream, and only sums are made inside rows"
    return _long(updates, op["n"], index)


def _long(x: Dims, n: int, index: Dims) -> str:
    """A selection inside rows has all of a row at hand: where rows are long, they are the stream, and not what stands beside."""
    most = max(n, math.prod(index.shape))
    return f"it selects among {most} elements inside each row, more than {_LONGEST}" if x.tile and most > _LONGEST else ""


def _local_take(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    fill = filling(op["fill"], ins[0].dtype) if op["mode"] == "fill" else 0
    if ins[1].tile:
        return LocalOp("gather", make_params(mode=op["mode"], fill=fill))
    return LocalOp("take", make_params(axis=ins[0].local(op["axis"]), mode=op["mode"], fill=fill))


def _local_scatter(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    updates, index = ins
    if not index.tile:
        return LocalOp("put", make_params(axis=updates.local(op["axis"]), n=op["n"]))
    dtype = "float32" if is_narrow(updates.dtype) else updates.dtype
    how = op.kind.removeprefix("scatter_")
    return LocalOp("sink_at", make_params(how=how, accumulate=dtype, sorted=op["sorted"] and index.row_major()))


def any_order(op: Op) -> bool:
    """May two runs of ``op`` fold its rows in different orders? A maximum or a minimum has the same bits then; sums may differ in
    the last ones (``may_differ``)."""
    return op.kind in ("scatter_max", "scatter_min") or may_differ(op)


def may_differ(op: Op) -> bool:
    """Is ``op`` a sum that need not have the same bits in every run? (``capture.unordered_sums``.)"""
    return ("unordered", True) in op.params


# --- the entries -----------------------------------------------------------------------------------------------------------------


def _scatter_spec(fold: str, function: Any, dtypes: tuple[str, ...]) -> OpSpec:
    return OpSpec(f"scatter_{fold}", "scatter", 2, _scatter(fold), _relate_scatter, 1,
                  f"(updates, index): the {fold} of what each index in [0, n) brings; its dimensions, from axis on, become one",
                  dtypes, mixes=True, fold=fold, local=_local_scatter, alone=_scatter_alone,
                  jax=_scatter_by_jax(fold, function))  # fmt: skip


INDEXED: dict[str, OpSpec] = {
    spec.kind: spec
    for spec in (
        OpSpec("take", "gather", 2, _take, _relate_take, 0, "(x, index): elements of dimension axis; mode: out of range",
               mixes=True, local=_local_take, alone=_take_alone, jax=_take_by_jax),
        _scatter_spec("sum", lax.scatter_add, NUMBERS),
        _scatter_spec("max", lax.scatter_max, DTYPES),
        _scatter_spec("min", lax.scatter_min, DTYPES),
        _scatter_spec("prod", lax.scatter_mul, NUMBERS),
    )
}  # fmt: skip

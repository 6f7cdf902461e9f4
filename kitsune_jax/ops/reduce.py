"""Entries of the op table that combine elements: reductions, cumulative ops, dot_general, and reads and sums by an index.

Comes in: the form of an entry (``spec``). Goes out: ``REDUCTIONS``, ``INDEXED`` and ``ONLINE``, entries by kind. Invariants:
floating sums and products accumulate in float32 or wider and round once, to the result's dtype; integers wrap in their own dtype;
an index below 0 or beyond the last element is out of range, for any dtype; ``take`` is exact.

Over a stream, an index that streams makes ``take`` a gather from a stationary table, and a scatter a sink. An index that does not
stream selects inside every row: the instructions ``take`` and ``put`` of the tile program.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from kitsune_jax.ops.graph import Op, Scalar, Value, make_params
from kitsune_jax.ops.spec import (
    BITS,
    DTYPES,
    FLOATS,
    NUMBERS,
    DimRelation,
    Dims,
    LocalOp,
    OpSpec,
    Params,
    Shapes,
    is_float,
    is_narrow,
    np_dtype,
    one_axis,
    same_dims,
)

# --- reductions, arg-reductions, cumulative ops, dot_general ----------------------------------------------------------------------


def identity(fold: str, dtype: np.dtype[Any]) -> Scalar:
    """The neutral element of a fold: for max and min the infinities, for integers their lowest and highest number.

    >>> identity("max", np.dtype("float32")), identity("min", np.dtype("int8")), identity("and", np.dtype("bool"))
    (-inf, 127, True)
    """
    if fold == "and":
        return np.invert(np.zeros((), dtype)).item()
    if fold not in ("max", "min"):
        return 1 if fold == "prod" else 0
    if is_float(dtype):
        return -math.inf if fold == "max" else math.inf
    if dtype.kind == "b":
        return fold == "min"
    return int(np.iinfo(dtype).min if fold == "max" else np.iinfo(dtype).max)


def _dot_by_jax(params: Params, /, lhs: Any, rhs: Any, *, out: Value) -> Any:
    """``dot_general`` with its own precision: ``lax.dot_general`` would replace an unset one by the current default."""
    precision = None if params["precision"] is None else (lax.Precision[params["precision"]],) * 2
    return lax.dot_general_p.bind(
        lhs,
        rhs,
        dimension_numbers=((params["lhs_contract"], params["rhs_contract"]), (params["lhs_batch"], params["rhs_batch"])),
        precision=precision,
        preferred_element_type=np_dtype(out.dtype),
        out_sharding=None,
    )


# --- dimension relations --------------------------------------------------------------------------------------------------------


def _relate_reduction(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    return _reduced(len(in_shapes[0]), op["axes"], "contracted", "")


def _relate_arg(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    return _reduced(len(in_shapes[0]), (op["axis"],), "mixed", "the index of an extreme element depends on the whole dimension")


def _reduced(rank: int, axes: tuple[int, ...], role: str, why: str) -> tuple[DimRelation, ...]:
    kept = [d for d in range(rank) if d not in axes]
    return (
        *(DimRelation("parallel", ((0, d), (1, k))) for k, d in enumerate(kept)),
        *(DimRelation(role, ((0, d),), why) for d in sorted(axes)),
    )


def _relate_cumulative(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    why = "each element depends on those before it along the dimension"
    return same_dims(len(in_shapes[0]), why=lambda d: why if d == op["axis"] else "")


def _relate_dot(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    relations = [DimRelation("contracted", ((0, a), (1, b))) for a, b in zip(op["lhs_contract"], op["rhs_contract"], strict=True)]
    relations += [
        DimRelation("parallel", ((0, a), (1, b), (2, k)))
        for k, (a, b) in enumerate(zip(op["lhs_batch"], op["rhs_batch"], strict=True))
    ]
    out = len(op["lhs_batch"])
    for side, shape in enumerate(in_shapes):
        taken = (*op[("lhs_batch", "rhs_batch")[side]], *op[("lhs_contract", "rhs_contract")[side]])
        for d in range(len(shape)):
            if d not in taken:
                relations.append(DimRelation("parallel", ((side, d), (2, out))))
                out += 1
    return tuple(relations)


# --- row-local forms ------------------------------------------------------------------------------------------------------------


def _local_reduce(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    """A reduction of one element per row is a reshape, which keeps the sign of zero and subnormal numbers."""
    (x,) = ins
    axes = tuple(sorted({x.local(d) for d in op["axes"]}))
    if any(x.streamed(d) for d in op["axes"]):
        return LocalOp("sink", make_params(how=op.kind.removeprefix("reduce_"), axes=axes))
    if all(x.shape[d] == 1 for d in op["axes"]):
        return LocalOp("reshape", make_params(new_sizes=out.rows_first()))
    return LocalOp(op.kind, make_params(axes=axes))


def _dot_alone(op: Op, ins: list[Dims]) -> str:
    """Both operands may stream together only over contracted dimensions (a sink), or over batch dimensions (a product for each
    row)."""
    if not (ins[0].tile and ins[1].tile) or any(ins[0].streamed(d) for d in op["lhs_contract"]):
        return ""
    for x, batch in zip(ins, (op["lhs_batch"], op["rhs_batch"]), strict=True):
        if any(x.streamed(d) for d in range(len(x.shape)) if d not in batch):
            return "both operands stream, over dimensions that are not batch dimensions of both"
    return ""


def _local_cumulative(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    """A cumulative op over one element is a copy, except those that XLA computes with: a product and a log-sum."""
    alone = out.shape[op["axis"]] == 1 and op.kind in ("cumsum", "cummax", "cummin")
    return LocalOp("copy", ()) if alone else one_axis(op, ins, out)


def _local_dot(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    if ins[0].tile and ins[1].tile:
        of_rows = not any(ins[0].streamed(d) for d in op["lhs_contract"])
        return _local_row_dot(op, ins[0], ins[1]) if of_rows else _local_dot_sink(op, ins[0], ins[1])
    swap = not ins[0].tile
    x, w = (ins[1], ins[0]) if swap else (ins[0], ins[1])
    sides = [(op["lhs_contract"], op["lhs_batch"]), (op["rhs_contract"], op["rhs_batch"])]
    (x_contract, x_batch), (w_contract, w_batch) = reversed(sides) if swap else sides
    # Names of the result's dimensions: in the order of dot_general(x, w), and in the order of the op's own result.
    pairs = [(a, b) for a, b in zip(x_batch, w_batch, strict=True) if not x.streamed(a)]  # the others are batch axes
    batch = [("batch", b) for b in range(len(pairs))]
    x_free = [("x", d) for d in range(len(x.shape)) if d not in x_contract and d not in x_batch]
    w_free = [("w", d) for d in w.kept() if d not in w_contract and d not in w_batch]
    wanted = [*batch, *(w_free if swap else x_free), *(x_free if swap else w_free)]
    row = ("row", 0)
    local = [row, *(n for n in wanted if not (n[0] == "x" and x.streamed(n[1])))]
    falls_out = [*batch, row, *(n for n in x_free if not x.streamed(n[1])), *w_free]
    return LocalOp(
        "matmul",
        make_params(
            x_contract=tuple(x.local(d) for d in x_contract),
            x_batch=tuple(x.local(a) for a, _ in pairs),
            w_contract=tuple(w.local(d) for d in w_contract),
            w_batch=tuple(w.local(b) for _, b in pairs),
            out_perm=tuple(falls_out.index(n) for n in local),
            accumulate=op["accumulate"],
        ),
        swap=swap,
    )


def _local_row_dot(op: Op, x: Dims, y: Dims) -> LocalOp:
    """The dimensions of the result (rows, batch, free of x, free of y) are in the op's order, whose batch is in front as well."""
    return LocalOp(
        "dot",
        make_params(
            x_contract=tuple(x.local(d) for d in op["lhs_contract"]),
            y_contract=tuple(y.local(d) for d in op["rhs_contract"]),
            x_batch=tuple(x.local(d) for d in op["lhs_batch"] if not x.streamed(d)),
            y_batch=tuple(y.local(d) for d in op["rhs_batch"] if not y.streamed(d)),
            accumulate=op["accumulate"],
        ),
    )


def _local_dot_sink(op: Op, x: Dims, y: Dims) -> LocalOp:
    pairs = [(x.local(a), y.local(b)) for a, b in zip(op["lhs_contract"], op["rhs_contract"], strict=True)]
    pairs = list(dict.fromkeys(pairs))  # several streamed dimensions are one row dimension
    # Batch dimensions that stream are those of the tile's batch.
    batch = [(a, b) for a, b in zip(op["lhs_batch"], op["rhs_batch"], strict=True) if not x.streamed(a)]
    return LocalOp(
        "matmul_sink",
        make_params(
            x_contract=tuple(a for a, _ in pairs),
            y_contract=tuple(b for _, b in pairs),
            x_batch=tuple(x.local(a) for a, _ in batch),
            y_batch=tuple(y.local(b) for _, b in batch),
            accumulate=op["accumulate"],
        ),
    )


# --- the entries -----------------------------------------------------------------------------------------------------------------


def _reduce(fold: str, cuda: str, dtypes: tuple[str, ...] = DTYPES) -> OpSpec:
    """``cuda``: the type in the device library that folds this way; "" if there is none."""
    by_jax = getattr(lax, f"reduce_{fold}")
    return OpSpec(f"reduce_{fold}", "reduce", 1, _relate_reduction, 1, f"{fold} over axes", dtypes, fold=fold, local=_local_reduce,
                  cuda={"any": cuda} if cuda else {}, jax=lambda p, x, out: by_jax(x, p["axes"]))  # fmt: skip


def _arg(fold: str) -> OpSpec:
    by_jax = getattr(lax, fold)
    return OpSpec(fold, "argreduce", 1, _relate_arg, 2, "along axis; NaN wins, ties take the first", gives="any", fold=fold,
                  local=one_axis, jax=lambda p, x, out: by_jax(x, p["axis"], np_dtype(out.dtype)))  # fmt: skip


def _running(fold: str, flops: float, dtypes: tuple[str, ...] = DTYPES) -> OpSpec:
    by_jax = getattr(lax, f"cum{fold}")
    return OpSpec(f"cum{fold}", "cumulative", 1, _relate_cumulative, flops, f"running {fold} along axis", dtypes, fold=fold,
                  local=_local_cumulative, takes=("axis", "reverse"),
                  jax=lambda p, x, out: by_jax(x, p["axis"], p["reverse"]))  # fmt: skip


# Micro-kernels number the folds by their place among these (``Reduction`` and ``Cumulative`` in cpu/include/kitsune_cpu).
REDUCTIONS: dict[str, OpSpec] = {
    spec.kind: spec
    for spec in (
        _reduce("sum", "Sum", NUMBERS),
        _reduce("max", "Max"),
        _reduce("min", "Min"),
        _reduce("prod", "Prod", NUMBERS),
        _reduce("and", "And", BITS),
        _reduce("or", "Or", BITS),
        _reduce("xor", "", BITS),
        _arg("argmax"),
        _arg("argmin"),
        _running("sum", 1, NUMBERS),
        _running("prod", 1, NUMBERS),
        _running("max", 1),
        _running("min", 1),
        _running("logsumexp", 24, FLOATS),
        OpSpec("dot_general", "dot", 2, _relate_dot, 2,
               "contracted over lhs_contract, rhs_contract, one by one over lhs_batch, rhs_batch; accumulated in accumulate",
               NUMBERS, gives="any", mixes=True, fold="sum", local=_local_dot, alone=_dot_alone, jax=_dot_by_jax),
    )
}  # fmt: skip


# --- reads and sums by an index: ``take`` and ``scatter_sum``, ``_max``, ``_min``, ``_prod`` --------------------------------------

_LONGEST = 4096  # elements of a dimension that is indexed inside each row
_UNFINISHED = "a lookup may read any row of its table, which is complete only after the last row of the stream"
_OPEN = "any row of its result may change until the stream ends"


def filling(fill: Scalar | None, dtype: str) -> Scalar:
    """The value for an index out of range: ``fill``, or JAX's default, which is NaN, the lowest signed, the highest unsigned
    number.

    >>> filling(None, "int8"), filling(None, "uint8"), filling(7, "int8")
    (-128, 255, 7)
    """
    if fill is not None:
        return fill
    if is_float(dtype):
        return math.nan
    return True if dtype == "bool" else int(np.iinfo(dtype).min if dtype.startswith("int") else np.iinfo(dtype).max)


# --- by JAX ---------------------------------------------------------------------------------------------------------------------

GATHER_MODES = {
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
        x, lax.expand_dims(index, (rank,)), numbers, sizes, mode=GATHER_MODES[params["mode"]], fill_value=params["fill"]
    )


def _scatter_by_jax(fold: str, function: Any) -> Any:
    def rule(params: Params, /, updates: Any, index: Any, *, out: Value) -> Any:
        axis, rank = params["axis"], np.ndim(index)
        window = (*range(axis), *range(axis + rank, np.ndim(updates)))
        numbers = lax.ScatterDimensionNumbers(window, inserted_window_dims=(axis,), scatter_dims_to_operand_dims=(axis,))
        # XLA rounds each sum to the dtype of the array it adds to: of a thousand bfloat16 numbers, two digits would be left.
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
        return "its index streams, so it must index the first dimension of its table: transpose the table" if op["axis"] else ""
    return _long(table, table.shape[op["axis"]], index)


def _scatter_alone(op: Op, ins: list[Dims]) -> str:
    updates, index = ins
    if index.tile:
        return (
            "its index streams, so the indexed dimension of its result must be the first: transpose the result"
            if op["axis"]
            else ""
        )
    if updates.tile and op.kind != "scatter_sum":
        return "its index is the same for all rows, and only sums are computed inside rows"
    return _long(updates, op["n"], index)


def _long(x: Dims, n: int, index: Dims) -> str:
    """A selection inside rows holds a whole row, so it must be short; long dimensions should be the stream instead."""
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


EXACT_FOLDS = frozenset({"scatter_max", "scatter_min"})  # the same bits in any order of the rows


def any_order(op: Op, deterministic: bool) -> bool:
    """May two runs of ``op`` fold its rows in different orders? ``deterministic``: only if all bits are the same then."""
    return op.kind in EXACT_FOLDS or (op.kind == "scatter_sum" and not deterministic)


# --- the entries -----------------------------------------------------------------------------------------------------------------


def _scatter(fold: str, function: Any, dtypes: tuple[str, ...]) -> OpSpec:
    return OpSpec(f"scatter_{fold}", "scatter", 2, _relate_scatter, 1,
                  f"(updates, index): the {fold} of what each index in [0, n) brings; its dimensions, from axis on, become one",
                  dtypes, mixes=True, fold=fold, local=_local_scatter, alone=_scatter_alone,
                  jax=_scatter_by_jax(fold, function))  # fmt: skip


INDEXED: dict[str, OpSpec] = {
    spec.kind: spec
    for spec in (
        OpSpec("take", "gather", 2, _relate_take, 0, "(x, index): elements of dimension axis; mode: out of range", mixes=True,
               local=_local_take, alone=_take_alone, jax=_take_by_jax),
        _scatter("sum", lax.scatter_add, NUMBERS),
        _scatter("max", lax.scatter_max, DTYPES),
        _scatter("min", lax.scatter_min, DTYPES),
        _scatter("prod", lax.scatter_mul, NUMBERS),
    )
}  # fmt: skip


# --- online sums: rows with a factor e^(score - largest score), summed before the largest score is known --------------------------
# One pass is enough: the sum so far is kept with the largest score so far, and scaled by e^(old - new) when a larger one comes. The
# sink of the tile program holds this state (``program.build``), per index or per tile of an axis.
#
# ``scatter_exp_sum(values, index, scores)`` is, for each index in [0, n), the sum of ``values * e^(scores - m)``, where m is the
# largest score of that index. The dimensions of ``scores`` are the first ones of ``values``. ``finite``: 0 replaces an m that is
# infinite or NaN; otherwise such a sum is NaN. An empty sum is 0.

_ROWS = {"axis": 0, "mode": "clip", "fill": None}


def _sum_by_jax(params: Params, /, values: Any, index: Any, scores: Any, *, out: Value) -> Any:
    def by(kind: str, *operands: Any, shape: tuple[int, ...], **more: Any) -> Any:
        rule = INDEXED[kind].jax
        assert rule is not None
        return rule({**params, **more}, *operands, out=Value(shape, out.dtype))

    largest = by("scatter_max", scores, index, shape=(params["n"], *np.shape(scores)[1:]))
    if params["finite"]:
        largest = lax.select(lax.is_finite(largest), largest, lax.full_like(largest, 0))
    factor = lax.exp(scores - by("take", largest, index, shape=np.shape(scores), **_ROWS))
    dims = tuple(range(np.ndim(scores)))
    weighted = values * lax.broadcast_in_dim(factor, np.shape(values), dims)
    return by("scatter_sum", jnp.asarray(weighted), index, shape=out.shape)


def _relate(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    values, _, scores = in_shapes

    def members(d: int) -> tuple[tuple[int, int], ...]:
        return ((0, d), *(((2, d),) if d < len(scores) else ()), (3, d))

    return (
        DimRelation("contracted", ((0, 0), (1, 0), (2, 0))),
        *(DimRelation("parallel", members(d)) for d in range(1, len(values))),
        DimRelation("mixed", ((3, 0),), _OPEN),
    )


def _alone(op: Op, ins: list[Dims]) -> str:
    streams = all(x.streamed(0) and len(x.kept()) == len(x.shape) - 1 for x in ins)
    return "" if streams else "scores of one index are compared with each other, so only its rows may stream"


def _local(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    params = {"how": "sum", "accumulate": "float32", "sorted": op["sorted"], "finite": op["finite"]}
    return LocalOp("sink_at", make_params(**params))


ONLINE: dict[str, OpSpec] = {
    "scatter_exp_sum": OpSpec(
        "scatter_exp_sum", "scatter", 3, _relate, 1,
        "(values, index, scores): the sum of values * e^(scores - the largest of the index) of each index in [0, n)",
        ("float16", "bfloat16", "float32"), mixes=True, fold="sum", local=_local, alone=_alone, jax=_sum_by_jax)
}  # fmt: skip

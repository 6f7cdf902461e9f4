"""Entries of the op table that combine elements: reductions, arg-reductions, cumulative ops, dot_general.

Comes in: nothing. Goes out: ``REDUCTIONS``, the entries by kind. Invariant: floating sums and products accumulate in float32 or
wider and round once, to the result's dtype; integers wrap in their own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from jax import lax

from kitsune_jax.graph import Op, Scalar, Value, make_params
from kitsune_jax.ops.local import Dims, LocalOp, one_axis
from kitsune_jax.ops.relations import DimRelation
from kitsune_jax.ops.spec import (
    BITS,
    DTYPES,
    FLOATS,
    NUMBERS,
    Array,
    NumpyRule,
    OpSpec,
    Params,
    Shapes,
    is_float,
    np_dtype,
    round_to,
    to_double,
    widen,
)

FOLDS: Mapping[str, np.ufunc] = MappingProxyType(
    {
        "sum": np.add,
        "max": np.maximum,
        "min": np.minimum,
        "prod": np.multiply,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
)


def identity(fold: str, dtype: np.dtype[Any]) -> Scalar:
    """What changes nothing that it is folded with: of max and min the infinities, for integers their lowest and highest number.

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


def _reduction(fold: str, wide: bool) -> NumpyRule:
    def rule(params: Params, /, x: Array, *, out_dtype: str) -> Array:
        x = to_double(np.asarray(x)) if wide else widen(np.asarray(x))
        with np.errstate(all="ignore"):
            folded = FOLDS[fold].reduce(x, axis=tuple(params["axes"]), dtype=x.dtype, initial=identity(fold, x.dtype))
            return round_to(folded, out_dtype)

    return rule


def _arg_reduction(function: Callable[..., Any]) -> NumpyRule:
    """The first NaN if there is one, else the first extreme element."""

    def rule(params: Params, /, x: Array, *, out_dtype: str) -> Array:
        return round_to(function(widen(np.asarray(x)), axis=params["axis"]), out_dtype)

    return rule


def _cumulative(ufunc: np.ufunc, wide: bool) -> NumpyRule:
    def rule(params: Params, /, x: Array, *, out_dtype: str) -> Array:
        x = to_double(np.asarray(x)) if wide else widen(np.asarray(x))
        axis, reverse = params["axis"], params["reverse"]
        with np.errstate(all="ignore"):
            forward = np.flip(x, axis) if reverse else x
            result = ufunc.accumulate(forward, axis=axis, dtype=x.dtype)
        return round_to(np.flip(result, axis) if reverse else result, out_dtype)

    return rule


def _dot_general(params: Params, /, lhs: Array, rhs: Array, *, out_dtype: str) -> Array:
    """Result dimensions: batch, free of the left, free of the right. Multiplied and added in ``accumulate``."""
    dtype = np_dtype(params["accumulate"])
    x, batch, free_x, depth = _matrix(np.asarray(lhs).astype(dtype), params["lhs_batch"], params["lhs_contract"])
    y, _, free_y, _ = _matrix(np.asarray(rhs).astype(dtype), params["rhs_batch"], params["rhs_contract"])
    with np.errstate(all="ignore"):
        out = np.matmul(x, y.swapaxes(1, 2)) if depth else np.zeros((x.shape[0], x.shape[1], y.shape[1]), dtype)
    return round_to(out.reshape((*batch, *free_x, *free_y)), out_dtype)


def _dot_by_jax(params: Params, /, lhs: Any, rhs: Any, *, out: Value) -> Any:
    """``dot_general`` as it is bound: ``lax.dot_general`` would put the precision that is the default now for one not asked for."""
    precision = None if params["precision"] is None else (lax.Precision[params["precision"]],) * 2
    return lax.dot_general_p.bind(
        lhs,
        rhs,
        dimension_numbers=((params["lhs_contract"], params["rhs_contract"]), (params["lhs_batch"], params["rhs_batch"])),
        precision=precision,
        preferred_element_type=np_dtype(out.dtype),
        out_sharding=None,
    )


def _matrix(x: Array, batch: tuple[int, ...], contract: tuple[int, ...]) -> tuple[Array, tuple[int, ...], tuple[int, ...], int]:
    """``x`` as (batch, free, contracted), the sizes of the batch and of the free dimensions, and the contracted extent."""
    free = tuple(d for d in range(x.ndim) if d not in batch and d not in contract)
    sizes = [tuple(x.shape[d] for d in dims) for dims in (batch, free, contract)]
    b, f, c = (int(np.prod(s, dtype=np.int64)) for s in sizes)
    return x.transpose((*batch, *free, *contract)).reshape(b, f, c), sizes[0], sizes[1], c


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
    return tuple(
        DimRelation("mixed", ((0, d), (1, d)), why) if d == op["axis"] else DimRelation("parallel", ((0, d), (1, d)))
        for d in range(len(in_shapes[0]))
    )


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
    """Where each row has one element to fold, that element is the result, with its sign of zero or as a subnormal number."""
    (x,) = ins
    axes = tuple(sorted({x.local(d) for d in op["axes"]}))
    if any(x.streamed(d) for d in op["axes"]):
        return LocalOp("sink", make_params(how=op.kind.removeprefix("reduce_"), axes=axes))
    if all(x.shape[d] == 1 for d in op["axes"]):
        return LocalOp("reshape", make_params(new_sizes=out.rows_first()))
    return LocalOp(op.kind, make_params(axes=axes))


def _dot_alone(op: Op, ins: list[Dims]) -> str:
    """Both operands stream together: over what is contracted (a sink), or over batch dimensions only (a product for each row)."""
    if not (ins[0].tile and ins[1].tile) or any(ins[0].streamed(d) for d in op["lhs_contract"]):
        return ""
    for x, batch in zip(ins, (op["lhs_batch"], op["rhs_batch"]), strict=True):
        if any(x.streamed(d) for d in range(len(x.shape)) if d not in batch):
            return "both operands stream, and over more than dimensions that they have in common"
    return ""


def _local_cumulative(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    """Of one element, as ``_local_reduce``; but XLA computes with it in a product and in a log-sum."""
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
    # Names of the result's dimensions: of dot_general(x, w) as it falls out, and of the op's own result.
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
    """The dimensions of its result (rows, batch, free of x, free of y) are those of the op's, whose batch is in front as well."""
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


def _reduce(fold: str, cuda: str, dtypes: tuple[str, ...] = DTYPES, wide: bool = False) -> OpSpec:
    """``cuda``: the type in the device library that folds so; "" if there is none."""
    rule, doc = _reduction(fold, wide), f"{fold} over axes"
    by_jax = getattr(lax, f"reduce_{fold}")
    return OpSpec(f"reduce_{fold}", "reduce", 1, rule, _relate_reduction, 1, doc, dtypes, fold=fold, local=_local_reduce,
                  cuda={"any": cuda} if cuda else {}, jax=lambda p, x, out: by_jax(x, p["axes"]))  # fmt: skip


def _arg(fold: str, function: Callable[..., Any]) -> OpSpec:
    doc = "along axis; NaN wins, ties take the first"
    by_jax = getattr(lax, fold)
    return OpSpec(fold, "argreduce", 1, _arg_reduction(function), _relate_arg, 2, doc, gives="any", fold=fold, local=one_axis,
                  jax=lambda p, x, out: by_jax(x, p["axis"], np_dtype(out.dtype)))  # fmt: skip


def _running(fold: str, ufunc: np.ufunc, flops: float, dtypes: tuple[str, ...] = DTYPES, wide: bool = False) -> OpSpec:
    rule = _cumulative(ufunc, wide)
    doc = f"running {fold} along axis"
    by_jax = getattr(lax, f"cum{fold}")
    return OpSpec(f"cum{fold}", "cumulative", 1, rule, _relate_cumulative, flops, doc, dtypes, fold=fold, local=_local_cumulative,
                  takes=("axis", "reverse"), jax=lambda p, x, out: by_jax(x, p["axis"], p["reverse"]))  # fmt: skip


# Micro-kernels know a way to fold by its place among these (``Reduction`` and ``Cumulative`` in cpu/include/kitsune_cpu).
REDUCTIONS: dict[str, OpSpec] = {
    spec.kind: spec
    for spec in (
        _reduce("sum", "Sum", NUMBERS, wide=True),
        _reduce("max", "Max"),
        _reduce("min", "Min"),
        _reduce("prod", "Prod", NUMBERS, wide=True),
        _reduce("and", "And", BITS),
        _reduce("or", "Or", BITS),
        _reduce("xor", "", BITS),
        _arg("argmax", np.argmax),
        _arg("argmin", np.argmin),
        _running("sum", np.add, 1, NUMBERS, wide=True),
        _running("prod", np.multiply, 1, NUMBERS, wide=True),
        _running("max", np.maximum, 1),
        _running("min", np.minimum, 1),
        _running("logsumexp", np.logaddexp, 24, FLOATS, wide=True),
        OpSpec(
            "dot_general",
            "dot",
            2,
            _dot_general,
            _relate_dot,
            2,
            "contracted over lhs_contract, rhs_contract, one by one over lhs_batch, rhs_batch; accumulated in accumulate",
            NUMBERS,
            gives="any",
            mixes=True,
            fold="sum",
            local=_local_dot,
            alone=_dot_alone,
            jax=_dot_by_jax,
        ),
    )
}

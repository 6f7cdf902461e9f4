"""Entries of the op table that move or make elements: broadcast, reshape, transpose, slice, pad, concatenate, iota, windows.

Comes in: the form of an entry (``spec``). Goes out: ``SHAPES`` and ``WINDOWS``, entries by kind. Invariant: no arithmetic, so all
are exact in every dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax import lax

from kitsune_jax.ops.graph import Op, Param, make_params
from kitsune_jax.ops.spec import ROWS, Array, DimRelation, Dims, LocalOp, OperandDim, OpSpec, Params, Shapes, np_dtype, same_dims


def created(operand: int, dims: Sequence[int]) -> Iterator[DimRelation]:
    """Relations of dimensions that no input has, one each."""
    return (DimRelation("created", ((operand, d),)) for d in dims)


# --- NumPy semantics ------------------------------------------------------------------------------------------------------------


def _broadcast_in_dim(params: Params, /, x: Array, *, out_dtype: str) -> Array:
    x = np.asarray(x)
    shape, dims = params["shape"], params["dims"]
    expanded = [1] * len(shape)
    for n, d in zip(x.shape, dims, strict=True):
        expanded[d] = n
    return np.ascontiguousarray(np.broadcast_to(x.reshape(expanded), shape)).reshape(shape)


def _slice(params: Params, /, x: Array, *, out_dtype: str) -> Array:
    strides = params["strides"] or (1,) * np.ndim(x)
    return x[tuple(slice(*bounds) for bounds in zip(params["start"], params["limit"], strides, strict=True))]


def _pad(params: Params, /, x: Array, fill: Array, *, out_dtype: str) -> Array:
    """Interior padding first, then outside; negative outside padding removes elements."""
    x = np.asarray(x)
    low, high, interior = params["low"], params["high"], params["interior"]
    dilated = [n + max(n - 1, 0) * i for n, i in zip(x.shape, interior, strict=True)]
    padded = [n + max(lo, 0) + max(hi, 0) for n, lo, hi in zip(dilated, low, high, strict=True)]
    out = np.full(padded, fill, np_dtype(out_dtype))
    at = [slice(max(lo, 0), max(lo, 0) + n, i + 1) for n, lo, i in zip(dilated, low, interior, strict=True)]
    out[tuple(at)] = x
    return out[tuple(slice(max(-lo, 0), n - max(-hi, 0)) for n, lo, hi in zip(padded, low, high, strict=True))]


def _iota(params: Params, /, *, out_dtype: str) -> Array:
    shape, d = params["shape"], params["dimension"]
    index = np.arange(shape[d]).reshape([-1 if k == d else 1 for k in range(len(shape))])
    return np.broadcast_to(index, shape).astype(np_dtype(out_dtype))


# --- dimension relations --------------------------------------------------------------------------------------------------------


def _relate_broadcast(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    (x,), (out,) = in_shapes, out_shapes
    made, relations = set(range(len(out))), []
    for d, to in enumerate(op["dims"]):
        if x[d] == out[to]:
            made.discard(to)
            relations.append(DimRelation("parallel", ((0, d), (1, to))))
        else:
            relations.append(DimRelation("mixed", ((0, d),), "a dimension of extent 1 is stretched"))
    return (*relations, *created(1, sorted(made)))


def _relate_transpose(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    return tuple(DimRelation("parallel", ((0, d), (1, k))) for k, d in enumerate(op["permutation"]))


def _relate_rev(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    return same_dims(len(in_shapes[0]), why=lambda d: "the dimension is reversed" if d in op["dimensions"] else "")


def _relate_slice(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    (x,) = in_shapes
    strides = op["strides"] or (1,) * len(x)

    def why(d: int) -> str:
        whole = op["start"][d] == 0 and op["limit"][d] == x[d] and strides[d] == 1
        return "" if whole else "the dimension is sliced"

    return same_dims(len(x), why=why)


def _relate_pad(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    def why(d: int) -> str:
        return "the dimension is padded" if op["low"][d] or op["high"][d] or op["interior"][d] else ""

    return same_dims(len(in_shapes[0]), (0, 2), why)


def _relate_concatenate(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    operands, along = range(len(in_shapes) + 1), op["dimension"]
    return same_dims(len(out_shapes[0]), operands, lambda d: "the dimension is concatenated" if d == along else "")


def relate_reshape(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    """Cut both shapes into the shortest runs of equal product: runs of one dimension each are parallel, others reshaped.

    Dimensions of extent 1 are matched apart: between the same two cuts they are paired in order, and the rest is mixed (an input's)
    or created (the result's).
    """
    (x,), (out,) = in_shapes, out_shapes
    if x == out:
        return same_dims(len(x))
    if 0 in x:
        return (DimRelation("reshaped", (*((0, d) for d in range(len(x))), *((1, d) for d in range(len(out))))),)
    relations: list[DimRelation] = []
    i = j = 0
    while i < len(x) or j < len(out):
        ones_in, i = _ones(x, i)
        ones_out, j = _ones(out, j)
        relations.extend(_match_ones(ones_in, ones_out))
        if i == len(x):  # products are equal, so the result is used up too
            break
        members_in, members_out = [i], [j]
        left, right = x[i], out[j]
        while left != right:
            if left < right:
                left *= x[members_in[-1] + 1]
                members_in.append(members_in[-1] + 1)
            else:
                right *= out[members_out[-1] + 1]
                members_out.append(members_out[-1] + 1)
        i, j = members_in[-1] + 1, members_out[-1] + 1
        relations.extend(_match_run(x, out, members_in, members_out))
    return tuple(relations)


def _ones(shape: Sequence[int], start: int) -> tuple[list[int], int]:
    stop = start
    while stop < len(shape) and shape[stop] == 1:
        stop += 1
    return list(range(start, stop)), stop


def _match_ones(ins: Sequence[int], outs: Sequence[int]) -> Iterator[DimRelation]:
    paired = min(len(ins), len(outs))
    for a, b in zip(ins, outs, strict=False):
        yield DimRelation("parallel", ((0, a), (1, b)))
    for a in ins[paired:]:
        yield DimRelation("mixed", ((0, a),), "a dimension of extent 1 is removed")
    yield from created(1, outs[paired:])


def _match_run(x: Sequence[int], out: Sequence[int], ins: Sequence[int], outs: Sequence[int]) -> Iterator[DimRelation]:
    """One run: dimensions of extent 1 are matched apart, the others are parallel or reshaped together."""
    yield from _match_ones([d for d in ins if x[d] == 1], [d for d in outs if out[d] == 1])
    wide_in = [d for d in ins if x[d] != 1]
    wide_out = [d for d in outs if out[d] != 1]
    members: tuple[OperandDim, ...] = (*((0, d) for d in wide_in), *((1, d) for d in wide_out))
    yield DimRelation("parallel" if len(wide_in) == len(wide_out) == 1 else "reshaped", members)


# --- row-local forms ------------------------------------------------------------------------------------------------------------


def _local_broadcast(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    (x,) = ins
    dims: Param = op["dims"]
    # Dimensions of extent 1 that become streamed ones: a stationary operand may use one of them as the row dimension.
    gone = [d for d in x.kept() if out.streamed(dims[d])]
    spare = gone if not x.tile and len(gone) == 1 and gone[0] == 0 else []  # the row dimension comes first
    kept = [d for d in x.kept() if d not in gone or d in spare]
    mapped = tuple(out.local(dims[d]) for d in kept)
    if x.tile:
        mapped = (0, *mapped)
    squeeze = None
    if len(kept) != len(x.kept()):
        sizes = tuple(x.shape[d] for d in kept)
        squeeze = (ROWS, *sizes) if x.tile else sizes
    return LocalOp("broadcast_in_dim", make_params(shape=out.rows_first(), dims=mapped), squeeze=squeeze)


def _local_reshape(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    if out.tile and not ins[0].tile:  # the streamed dimensions are of extent 1 and new: every row gets the whole array
        row = out.row_shape()
        return LocalOp("broadcast_in_dim", make_params(shape=(ROWS, *row), dims=tuple(range(1, 1 + len(row)))), squeeze=row)
    return LocalOp("reshape", make_params(new_sizes=out.rows_first()))


def _local_transpose(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    perm = tuple(ins[0].local(op["permutation"][j]) for j in out.kept())
    return LocalOp("transpose", make_params(permutation=(0, *perm)))


def _local_slice(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    kept = ins[0].kept()
    strides = op["strides"] or (1,) * len(ins[0].shape)
    return LocalOp(
        "slice",
        make_params(
            start=(0, *(op["start"][d] for d in kept)),
            limit=(ROWS, *(op["limit"][d] for d in kept)),
            strides=(1, *(strides[d] for d in kept)),
        ),
    )


def _local_pad(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    kept = ins[0].kept()
    return LocalOp("pad", make_params(**{k: (0, *(op[k][d] for d in kept)) for k in ("low", "high", "interior")}))


def _local_iota(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    d = op["dimension"]
    if out.streamed(d):
        assert out.labels is not None
        return LocalOp("row_index", make_params(axes=out.labels[d]))
    return LocalOp("iota", make_params(shape=out.rows_first(), dimension=out.local(d)))


SHAPES: dict[str, OpSpec] = {
    spec.kind: spec
    for spec in (
        OpSpec("broadcast_in_dim", "broadcast", 1, _relate_broadcast, local=_local_broadcast, numpy=_broadcast_in_dim,
               doc="input dimension i becomes dims[i] of shape",
               jax=lambda p, x, out: lax.broadcast_in_dim(x, p["shape"], p["dims"])),
        OpSpec("reshape", "reshape", 1, relate_reshape, local=_local_reshape,
               numpy=lambda p, /, x, *, out_dtype: np.asarray(x).reshape(p["new_sizes"]),
               doc="the same elements in row-major order as new_sizes", jax=lambda p, x, out: lax.reshape(x, p["new_sizes"])),
        OpSpec("transpose", "transpose", 1, _relate_transpose, local=_local_transpose,
               numpy=lambda p, /, x, *, out_dtype: np.asarray(x).transpose(p["permutation"]),
               doc="result dimension i is permutation[i]", jax=lambda p, x, out: lax.transpose(x, p["permutation"])),
        OpSpec("rev", "rev", 1, _relate_rev, numpy=lambda p, /, x, *, out_dtype: np.flip(x, p["dimensions"]),
               local=lambda op, ins, out: LocalOp("rev", make_params(dimensions=tuple(map(ins[0].local, op["dimensions"])))),
               doc="reversed along dimensions", jax=lambda p, x, out: lax.rev(x, p["dimensions"])),
        OpSpec("slice", "slice", 1, _relate_slice, local=_local_slice, numpy=_slice, doc="start, limit, strides (None: all 1)",
               jax=lambda p, x, out: lax.slice(x, p["start"], p["limit"], p["strides"])),
        OpSpec("pad", "pad", 2, _relate_pad, local=_local_pad, numpy=_pad,
               doc="(x, fill): low, high (either may be negative) and interior padding",
               jax=lambda p, x, fill, out: lax.pad(x, fill, list(zip(p["low"], p["high"], p["interior"], strict=True)))),
        OpSpec("concatenate", "concatenate", None, _relate_concatenate,
               numpy=lambda p, /, *xs, out_dtype: np.concatenate(xs, p["dimension"]),
               local=lambda op, ins, out: LocalOp("concatenate", make_params(dimension=out.local(op["dimension"]))),
               doc="one after the other along dimension", jax=lambda p, *xs, out: lax.concatenate(xs, p["dimension"])),
        OpSpec("iota", "iota", 0, lambda op, in_shapes, out_shapes: tuple(created(0, range(len(out_shapes[0])))), flops=1,
               local=_local_iota, numpy=_iota, gives="any", doc="the index along dimension of shape",
               jax=lambda p, out: lax.broadcasted_iota(np_dtype(out.dtype), p["shape"], p["dimension"])),
    )
}  # fmt: skip


# --- windows: ``dynamic_slice`` and ``dynamic_update_slice`` ----------------------------------------------------------------------
# ``dims`` are the dimensions along which the window is shorter than the array, each with a scalar operand, its start. As in JAX, a
# start is moved so that the window lies inside the array. The dimensions of a window do not stream; along all others each row has a
# window. XLA writes an update in place into an array that nothing reads afterwards, so updates are left to XLA, except of arrays
# that a loop carries.

_WHY = "the start of its slice along this dimension is known only at run time"


def _all_starts(rank: int, dims: tuple[int, ...], starts: tuple[Any, ...]) -> list[Any]:
    found = dict(zip(dims, starts, strict=True))
    zero = np.zeros((), starts[0].dtype)
    return [found.get(d, zero) for d in range(rank)]


def _slice_by_jax(params: Params, /, x: Any, *starts: Any, out: Any) -> Any:
    return lax.dynamic_slice_p.bind(x, *_all_starts(np.ndim(x), params["dims"], starts), slice_sizes=out.shape)


def _update_by_jax(params: Params, /, x: Any, update: Any, *starts: Any, out: Any) -> Any:
    return lax.dynamic_update_slice_p.bind(x, update, *_all_starts(np.ndim(x), params["dims"], starts))


def _arrays(op: Op) -> int:
    """How many operands are arrays; the others are starts."""
    return 2 if op.kind == "dynamic_update_slice" else 1


def _relate_window(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    operands = (*range(_arrays(op)), len(in_shapes))
    return same_dims(len(in_shapes[0]), operands, lambda d: _WHY if d in op["dims"] else "")


def _alone(op: Op, ins: list[Dims]) -> str:
    return "the start of its slice differs from row to row" if any(x.tile for x in ins[_arrays(op) :]) else ""


def _local(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    """The op with the dimensions of tiles, rows first. The program expands it (``program.build``)."""
    return LocalOp(op.kind, make_params(**{**dict(op.params), "dims": tuple(out.local(d) for d in op["dims"])}))


WINDOWS: dict[str, OpSpec] = {
    spec.kind: spec
    for spec in (
        OpSpec("dynamic_slice", "window", None, _relate_window, 0, "(x, a start for each of dims): sizes elements of these",
               mixes=True, local=_local, alone=_alone, jax=_slice_by_jax, measured=False),
        OpSpec("dynamic_update_slice", "window", None, _relate_window, 0,
               "(x, update, a start for each of dims): x with the update there",
               mixes=True, local=_local, alone=_alone, jax=_update_by_jax, measured=False),
    )
}  # fmt: skip

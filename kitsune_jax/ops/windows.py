"""Entries of the op table that read or write a window of an array whose place is known when they run: ``dynamic_slice`` and
``dynamic_update_slice``.

Comes in: nothing. Goes out: ``WINDOWS``, the entries by kind. ``dims``: the dimensions along which the window is shorter than the
array, each with a scalar operand, its start. Invariants: a start is moved so that the window lies inside the array, as JAX has it;
nothing is computed, so every rule is exact in every dtype.

A window's own dimensions do not stream; along all others each row has a window. XLA writes an update in place, into an array that
nobody reads afterwards; so updates are left to it, but for those of arrays that a loop carries.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from kitsune_jax.graph import Op, make_params
from kitsune_jax.ops.local import Dims, LocalOp
from kitsune_jax.ops.relations import DimRelation
from kitsune_jax.ops.spec import Array, OpSpec, Params, Shapes

_WHY = "where a slice of the dimension begins is known only when it runs"


def _window(dims: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...], starts: tuple[Array, ...]) -> tuple[slice, ...]:
    at = [slice(None)] * len(shape)
    for d, size, start in zip(dims, sizes, starts, strict=True):
        first = min(max(int(start), 0), shape[d] - size)
        at[d] = slice(first, first + size)
    return tuple(at)


def _slice(params: Params, /, x: Array, *starts: Array, out_dtype: str) -> Array:
    x = np.asarray(x)
    return x[_window(params["dims"], params["sizes"], x.shape, starts)].copy()


def _update(params: Params, /, x: Array, update: Array, *starts: Array, out_dtype: str) -> Array:
    out, dims = np.array(x), params["dims"]
    out[_window(dims, tuple(np.shape(update)[d] for d in dims), out.shape, starts)] = update
    return out


def _all_starts(rank: int, dims: tuple[int, ...], starts: tuple[Any, ...]) -> list[Any]:
    found = dict(zip(dims, starts, strict=True))
    zero = np.zeros((), starts[0].dtype)
    return [found.get(d, zero) for d in range(rank)]


def _slice_by_jax(params: Params, /, x: Any, *starts: Any, out: Any) -> Any:
    return lax.dynamic_slice_p.bind(x, *_all_starts(np.ndim(x), params["dims"], starts), slice_sizes=out.shape)


def _update_by_jax(params: Params, /, x: Any, update: Any, *starts: Any, out: Any) -> Any:
    return lax.dynamic_update_slice_p.bind(x, update, *_all_starts(np.ndim(x), params["dims"], starts))


def _relate_slice(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    out = len(in_shapes)
    return tuple(
        relation
        for d in range(len(in_shapes[0]))
        for relation in (
            (DimRelation("mixed", ((0, d), (out, d)), _WHY),) if d in op["dims"] else (DimRelation("parallel", ((0, d), (out, d))),)
        )
    )


def _relate_update(op: Op, in_shapes: Shapes, out_shapes: Shapes) -> tuple[DimRelation, ...]:
    out = len(in_shapes)
    return tuple(
        DimRelation("mixed", ((0, d), (1, d), (out, d)), _WHY)
        if d in op["dims"]
        else DimRelation("parallel", ((0, d), (1, d), (out, d)))
        for d in range(len(in_shapes[0]))
    )


def _alone(first: int) -> Any:
    def alone(op: Op, ins: list[Dims]) -> str:
        return "where it begins is another place for each row" if any(x.tile for x in ins[first:]) else ""

    return alone


def _local(op: Op, ins: list[Dims], out: Dims) -> LocalOp:
    """With the dimensions of tiles, rows first. The program spells it out (``program.windows``)."""
    return LocalOp(op.kind, make_params(**{**dict(op.params), "dims": tuple(out.local(d) for d in op["dims"])}))


WINDOWS: dict[str, OpSpec] = {
    spec.kind: spec
    for spec in (
        OpSpec("dynamic_slice", "window", None, _slice, _relate_slice, 0,
               "(x, a start for each of dims): sizes elements of these", mixes=True, local=_local, alone=_alone(1), jax=_slice_by_jax, measured=False),
        OpSpec("dynamic_update_slice", "window", None, _update, _relate_update, 0,
               "(x, update, a start for each of dims): x with the update there",
               mixes=True, local=_local, alone=_alone(2), jax=_update_by_jax, measured=False),
    )
}  # fmt: skip

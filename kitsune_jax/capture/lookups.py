"""Gathers and scatters of whole rows as the ops ``take`` and ``scatter_sum``, ``_max``, ``_min``, ``_prod``.

Comes in: an ``Equation``, a gather or a scatter that folds. Goes out: value ids of its result, or the reason why it stays opaque.
Invariant: the values that JAX gives, for indices out of range as well.

The indexed dimensions of the array become one: several components of an index become one number, and a batching dimension is a
component that counts. An index with a component out of range becomes -1. Dimensions change places only where the indexed ones do
not stand side by side, or the result wants its own elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from kitsune_jax.capture.equation import Equation
from kitsune_jax.capture.numbers import MODES, Numbers, components, known, mode_of, numbers_of
from kitsune_jax.graph import Scalar
from kitsune_jax.ops.reduce import identity
from kitsune_jax.ops.spec import INTEGERS, np_dtype

_COMBINED = {"sum": "add", "max": "max", "min": "min", "prod": "mul"}
_MOST = 2**31 - 1
# An array so many times as large as what is folded into it stays with XLA, which may write into it in place.
_IN_PLACE = 4


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The array as rows: dimensions ``before``, then ``indexed`` as one, then ``after``."""

    shape: tuple[int, ...]
    before: tuple[int, ...]
    indexed: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def axis(self) -> int:
        return len(self.before)

    @property
    def n(self) -> int:
        return math.prod(self.shape[d] for d in self.indexed)

    @property
    def order(self) -> tuple[int, ...]:
        return (*self.before, *self.indexed, *self.after)


def take(e: Equation) -> int | str:
    """``jnp.take`` of the rows of an array."""
    numbers, index_rank = numbers_of(e), len(e.shape_of(e.ins[1])) - 1
    rows = _rows(e, numbers, e.params["slice_sizes"])
    if isinstance(rows, str):
        return rows
    index = _index(e, numbers, rows, modulo=True)
    mode = "fill" if mode_of(e) == "FILL_OR_DROP" else "clip"  # what is promised to be in range is clipped by XLA as well
    if mode == "clip" and len(rows.indexed) > 1:
        mode = "promise_in_bounds"  # each component has been clipped
    shape = [rows.shape[d] for d in rows.order]
    end = rows.axis + len(rows.indexed)
    x = e.reshape(e.transpose(e.ins[0], rows.order), [*shape[: rows.axis], rows.n, *shape[end:]])
    made = e.op("take", x, index, axis=rows.axis, mode=mode, fill=_fill(e) if mode == "fill" else None)
    wanted = _names(e.out_shape, numbers, rows)
    names = _rows_names(rows, index_rank)
    return e.reshape(e.transpose(made, [names.index(n) for n in wanted]), e.out_shape)


def scatter(e: Equation, fold: str) -> int | str:
    """What is folded into the rows of an array, and the array folded with it unless it changes nothing."""
    if e.out_dtype == "bool" and fold in ("sum", "prod"):
        return f"{e.name}: of booleans"
    x, index, updates = e.ins
    numbers, index_rank = numbers_of(e), len(e.shape_of(index)) - 1
    given = e.shape_of(updates)
    in_window = [d for d in range(len(e.shape_of(x))) if d not in (*numbers.dropped, *numbers.batching)]
    sizes = dict(zip(in_window, (given[k] for k in numbers.window), strict=True))
    rows = _rows(e, numbers, [sizes.get(d, 1) for d in range(len(e.shape_of(x)))])
    if isinstance(rows, str):
        return rows
    start = known(e.builder, x)
    fresh = start is not None and start == identity(fold, np_dtype(e.out_dtype))
    if not fresh and math.prod(e.shape_of(x)) > _IN_PLACE * math.prod(given):
        return f"{e.name}: changes a small part of an array, which XLA does in place"
    names = _names(given, numbers, rows)
    order = [names.index(n) for n in _rows_names(rows, index_rank)]
    squeezed = [given[k] for k in range(len(given)) if not _is_indexed(k, numbers, rows)]
    each = e.transpose(e.reshape(updates, squeezed), order)
    alone = not numbers.batching and list(numbers.index_map) == sorted(numbers.index_map)
    promised = bool(e.params["indices_are_sorted"]) and alone and (len(rows.indexed) == 1 or mode_of(e) != "CLIP")
    at = _index(e, numbers, rows, modulo=False)
    if mode_of(e) == "CLIP" and len(rows.indexed) == 1:
        at = _clamped(e, at, rows.n)
    folded = e.op(f"scatter_{fold}", each, at, axis=rows.axis, n=rows.n, sorted=promised)
    whole = e.reshape(folded, [rows.shape[d] for d in rows.order])
    made = e.transpose(whole, [rows.order.index(d) for d in range(len(rows.shape))])
    if e.name == "scatter-sub":
        return e.op("neg", made) if fresh else e.op("sub", x, made)
    return made if fresh else e.op(_COMBINED[fold], x, made)


# --- which dimensions are which ---------------------------------------------------------------------------------------------------


def _rows(e: Equation, numbers: Numbers, sizes: Sequence[int]) -> _Rows | str:
    """How the array's rows lie, or why it is not indexed by whole rows. ``sizes``: of what is read or written at each index."""
    shape = e.shape_of(e.ins[0])
    if mode_of(e) not in MODES:
        return f"{e.name}: treats indices out of range by {mode_of(e)}"
    if e.dtype_of(e.ins[1]) not in INTEGERS:
        return f"{e.name}: has indices of {e.dtype_of(e.ins[1])}"
    whole = _whole(e, numbers, sizes)
    indexed = tuple(sorted({*numbers.index_map, *numbers.batching} - whole))
    if not indexed:
        return f"{e.name}: has an index without components"
    if any(sizes[d] != 1 for d in indexed):
        return f"{e.name}: each index stands for a window of several rows"
    kept = [d for d in range(len(shape)) if d not in indexed]
    if any(sizes[d] != shape[d] or d in numbers.dropped for d in kept):
        return f"{e.name}: each index stands for a part of a row"
    if len(indexed) > 1 and math.prod(shape[d] for d in indexed) > _MOST:
        return f"{e.name}: the indexed dimensions have more than 2**31 elements together"
    before = tuple(d for d in kept if d < indexed[0])
    return _Rows(shape, before, indexed, tuple(d for d in kept if d > indexed[0]))


def _whole(e: Equation, numbers: Numbers, sizes: Sequence[int]) -> set[int]:
    """Dimensions with a component of the index that are read or written whole: the component is 0, or clipped to it."""
    shape, count = e.shape_of(e.ins[0]), len(numbers.index_map)
    pieces = dict(zip(numbers.index_map, components(e, count), strict=False))
    clips = mode_of(e) == "CLIP" or (mode_of(e) == "PROMISE_IN_BOUNDS" and e.name == "gather")
    whole = {d for d in numbers.index_map if sizes[d] == shape[d] != 1}
    return {d for d in whole if clips or (d in pieces and known(e.builder, pieces[d]) == 0)}


Name = tuple[str, int]  # a dimension of the array ("x") or of the index ("i")


def _rows_names(rows: _Rows, index_rank: int) -> list[Name]:
    """The dimensions of what ``take`` gives and a scatter folds in."""
    return [*(("x", d) for d in rows.before), *(("i", k) for k in range(index_rank)), *(("x", d) for d in rows.after)]


def _windowed(numbers: Numbers, rows: _Rows) -> dict[int, int]:
    """Dimension of what is gathered or folded in -> that of the array which it comes from or goes to."""
    in_window = [d for d in range(len(rows.shape)) if d not in (*numbers.dropped, *numbers.batching)]
    return dict(zip(numbers.window, in_window, strict=True))


def _is_indexed(k: int, numbers: Numbers, rows: _Rows) -> bool:
    """Is dimension ``k`` of what is gathered or folded in an indexed one, of extent 1?"""
    return _windowed(numbers, rows).get(k) in rows.indexed


def _names(shape: Sequence[int], numbers: Numbers, rows: _Rows) -> list[Name]:
    """The dimensions of what JAX gathers or folds in, without indexed ones."""
    windowed, counted = _windowed(numbers, rows), iter(range(len(shape)))
    names = [("x", windowed[k]) if k in windowed else ("i", next(counted)) for k in range(len(shape))]
    return [n for n in names if n[0] == "i" or n[1] not in rows.indexed]


# --- one index out of several components ------------------------------------------------------------------------------------------


def _index(e: Equation, numbers: Numbers, rows: _Rows, modulo: bool) -> int:
    """One index for each row. ``modulo``: JAX takes an index of a gather that may be filled modulo 2**32."""
    v, count = e.ins[1], len(numbers.index_map)
    shape = e.shape_of(v)[:-1]
    pieces = components(e, count) or [e.part(v, len(shape), k, 1) for k in range(count)]
    mode = mode_of(e)
    given = dict(zip(numbers.index_map, (e.reshape(p, shape) for p in pieces), strict=True))
    if modulo and mode == "FILL_OR_DROP":
        given = {d: e.convert(i, "int32") if e.dtype_of(i).endswith("64") else i for d, i in given.items()}
    if len(rows.indexed) == 1 and not numbers.batching:
        return given[rows.indexed[0]]
    inside: int | None = None
    flat: int | None = None
    for d in rows.indexed:
        n = rows.shape[d]
        if d in given:
            i = given[d] if e.dtype_of(given[d]).endswith(("32", "64")) else e.convert(given[d], "int32")
            if mode == "CLIP" or (mode == "PROMISE_IN_BOUNDS" and e.name == "gather"):
                i = _clamped(e, i, n)
            else:
                inside = _both(e, inside, e.op("ge", i, e.builder.literal(0, e.dtype_of(i))))
                inside = _both(e, inside, e.op("lt", i, e.builder.literal(n, e.dtype_of(i))))
            i = e.convert(i, "int32")
        else:
            i = e.op("iota", dtype="int32", shape=shape, dimension=numbers.index_batching[numbers.batching.index(d)])
        flat = i if flat is None else e.op("add", e.op("mul", flat, e.builder.literal(n, "int32")), i)
    assert flat is not None
    if inside is None:
        return flat
    return e.op("select_n", inside, e.broadcast(e.builder.literal(-1, "int32"), shape, ()), flat)


def _both(e: Equation, a: int | None, b: int) -> int:
    return b if a is None else e.op("and", a, b)


def _clamped(e: Equation, index: int, n: int) -> int:
    dtype = e.dtype_of(index)
    most = min(max(n - 1, 0), int(np.iinfo(dtype).max))
    return e.op("clamp", e.builder.literal(0, dtype), index, e.builder.literal(most, dtype))


def _fill(e: Equation) -> Scalar | None:
    """The number that an index out of range gives, in the result's dtype; None for NaN."""
    value = e.params["fill_value"]
    scalar = None if value is None else np.asarray(value).astype(np_dtype(e.out_dtype)).astype(object).item()
    return None if scalar is None or scalar != scalar else scalar

"""Gathers of one element per row, and their gradients, as ops that stream: a compare with the column's number, then a select.

Comes in: an ``Equation``, a ``gather`` or ``scatter-add``. Goes out: value ids of its result, or the reason why it stays
opaque. Invariant: the values that JAX gives, for indices out of range as well. Each row has one index, so nothing is added up:
a gather is the largest of what the index lets through, which is exact. What is no such gather is a matter of ``lookups``.

The labels of a cross-entropy come in three forms: ``take_along_axis`` (the other dimensions are batching ones),
``x[arange, labels]`` (the index has a component for each dimension, and all but one count rows) and ``vmap`` of ``row[label]``
(as the first).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kitsune_jax.capture import lookups
from kitsune_jax.capture.builder import Builder
from kitsune_jax.capture.equation import Equation
from kitsune_jax.capture.numbers import MODES, components, known, mode_of, numbers_of
from kitsune_jax.ops.spec import INTEGERS, is_float

_INDEX_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "int64")


@dataclasses.dataclass(frozen=True)
class _Pick:
    """Dimension ``along`` of the array is indexed by value ``index``, which runs over dimensions ``index_dims`` of the array."""

    shape: tuple[int, ...]
    along: int
    index: int
    index_dims: tuple[int, ...]

    @property
    def extent(self) -> int:
        return self.shape[self.along]

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(d for d in range(len(self.shape)) if d != self.along)

    @property
    def row_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[d] for d in self.others)


def gather(e: Equation) -> int | str:
    """One element of each row."""
    p = _pick(e, e.out_shape)
    if p is None:
        return lookups.take(e)
    x, index = e.ins[0], known(e.builder, p.index)
    if isinstance(index, int) and 0 <= index < p.extent:
        return e.reshape(e.part(x, p.along, index, 1), e.out_shape)
    if not _is_computed(e.builder, x):
        return lookups.take(e)
    return e.reshape(_taken(e, p, mode_of(e) == "FILL_OR_DROP"), e.out_shape)


def scatter_add(e: Equation) -> int | str:
    """One element of each row added to: the gradient of ``gather``."""
    x, _, updates = e.ins
    p = _pick(e, e.shape_of(updates))
    if p is None or e.out_dtype == "bool":
        return lookups.scatter(e, "sum")
    each = e.broadcast(e.reshape(updates, p.row_shape), p.shape, p.others)
    total = e.op("add", x, each)
    if p.extent == 1 and known(e.builder, p.index) == 0:
        return total
    hit = _hits(e, p, _clamped(e, p) if mode_of(e) == "CLIP" else _flat(e, p))
    return e.op("select_n", hit, x, total)


# --- which index belongs to which row ---------------------------------------------------------------------------------------------


def _pick(e: Equation, rows: tuple[int, ...]) -> _Pick | None:
    """What is picked; None where it is not one element per row. ``rows``: the shape of the elements."""
    x, index, numbers = e.shape_of(e.ins[0]), e.builder.values[e.ins[1]], numbers_of(e)
    if mode_of(e) not in MODES or index.dtype not in _INDEX_DTYPES or 0 in (*x, *index.shape):
        return None
    in_window = [d for d in range(len(x)) if d not in (*numbers.dropped, *numbers.batching)]
    window = dict(zip(in_window, numbers.window, strict=True))
    batch = [k for k in range(len(rows)) if k not in numbers.window]
    paired = dict(zip(numbers.batching, numbers.index_batching, strict=True))
    chosen: list[tuple[int, int]] = []
    for d, piece in zip(numbers.index_map, components(e, len(numbers.index_map)), strict=False):
        if window.get(d) is not None and rows[window[d]] != 1:
            continue  # a slice of several
        counted = _counted(e.builder, piece) if len(numbers.index_map) > 1 else None
        if counted is not None and counted < len(batch) and index.shape[counted] == x[d]:
            paired[d] = counted
        else:
            chosen.append((d, piece))
    whole = {d: k for d, k in window.items() if rows[k] == x[d] and d not in numbers.index_map}
    left = [m for j, m in enumerate(index.shape[:-1]) if j not in paired.values()]
    along = chosen[0][0] if len(chosen) == 1 else -1
    covered = sorted((*paired, *whole, along)) == list(range(len(x)))
    if not covered or len({*paired.values()}) < len(paired) or any(m != 1 for m in (*left, *x[along + 1 :])):
        return None
    at = {**whole, **{d: batch[j] for d, j in paired.items()}}
    order = [at[d] for d in sorted(at) if x[d] != 1]
    if order != sorted(order):
        return None
    dims = tuple(d for d in sorted(paired) if x[d] != 1)
    return _Pick(x, along, chosen[0][1], dims)


def _counted(builder: Builder, v: int) -> int | None:
    """The dimension along which ``v`` is 0, 1, 2 ..., if it is.

    JAX makes an index valid by ``where(i < 0, i + n, i)``, which leaves such a value as it is.
    """
    op, shape = builder.maker(v), builder.values[v].shape
    if op is None:
        return None
    if op.kind == "iota":
        return int(op["dimension"])
    if op.kind == "select_n":
        test = builder.maker(op.inputs[0])
        wraps = test is not None and test.kind == "lt" and test.inputs[0] == op.inputs[1] and known(builder, test.inputs[1]) == 0
        return _counted(builder, op.inputs[1]) if wraps else None
    if op.kind not in ("broadcast_in_dim", "reshape"):
        return None
    before, inner = builder.values[op.inputs[0]].shape, _counted(builder, op.inputs[0])
    if inner is None:
        return None
    if before[inner] == 1:
        return shape.index(1) if 1 in shape else None
    if op.kind == "broadcast_in_dim":
        to = int(op["dims"][inner])
        return to if shape[to] == before[inner] else None
    wide = [[d for d, n in enumerate(s) if n != 1] for s in (before, shape)]
    if inner not in wide[0] or [before[d] for d in wide[0]] != [shape[d] for d in wide[1]]:
        return None
    return wide[1][wide[0].index(inner)]


def _is_computed(builder: Builder, v: int) -> bool:
    """Is ``v`` made by an op that may stream? A compare with each column would read all of an array that lies in memory."""
    op = builder.maker(v)
    if op is not None and op.kind in ("broadcast_in_dim", "reshape", "transpose"):
        return _is_computed(builder, op.inputs[0])
    return op is not None and op.kind != "opaque"


# --- the ops that stand for it ----------------------------------------------------------------------------------------------------


def _taken(e: Equation, p: _Pick, fill: bool) -> int:
    """A value of shape ``p.row_shape``."""
    dtype = e.out_dtype
    index = e.convert(_flat(e, p), "int32") if fill else _clamped(e, p)  # JAX takes an index to fill by modulo 2**32, too
    least = -np.inf if is_float(dtype) else int(np.iinfo(dtype).min) if dtype in INTEGERS else False
    let_through = e.op("select_n", _hits(e, p, index), _full(e, least, p.shape), e.ins[0])
    found = e.op("reduce_max", let_through, axes=(p.along,))
    if not fill:
        return found
    inside = _inside(e, p, index)
    rows = [d - (d > p.along) for d in p.index_dims]
    which = inside if e.shape_of(inside) == p.row_shape else e.broadcast(inside, p.row_shape, rows)
    return e.op("select_n", which, _full(e, e.params["fill_value"], p.row_shape), found)


def _hits(e: Equation, p: _Pick, index: int) -> int:
    """Where the column's number is the row's index: bool of shape ``p.shape``."""
    dtype = "int64" if e.dtype_of(index) == "int64" else "int32"
    wide = e.broadcast(e.convert(index, dtype), p.shape, p.index_dims)
    return e.op("eq", e.op("iota", dtype=dtype, shape=p.shape, dimension=p.along), wide)


def _flat(e: Equation, p: _Pick) -> int:
    """The index without dimensions of extent 1."""
    return e.reshape(p.index, [p.shape[d] for d in p.index_dims])


def _inside(e: Equation, p: _Pick, index: int) -> int:
    first, last = (e.builder.literal(n, e.dtype_of(index)) for n in (0, p.extent - 1))
    return e.op("and", e.op("ge", index, first), e.op("le", index, last))


def _clamped(e: Equation, p: _Pick) -> int:
    index = _flat(e, p)
    dtype = e.dtype_of(index)
    most = min(p.extent - 1, int(np.iinfo(dtype).max))
    return e.op("clamp", e.builder.literal(0, dtype), index, e.builder.literal(most, dtype))


def _full(e: Equation, scalar: Any, shape: Sequence[int]) -> int:
    """``scalar``, rounded to the result's dtype, everywhere."""
    return e.broadcast(e.constant(scalar), shape, ())

"""The rules of capture: one function for each JAX primitive that is not an op of the table under its own name.

Comes in: an ``Equation``. Goes out: value ids of its results, or the reason why it stays opaque. Invariants: a rule that returns a
reason has appended nothing; gathers and scatters give the values that JAX gives, for indices out of range as well.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from kitsune_jax.capture import random
from kitsune_jax.capture.edit import Builder, kept_dims
from kitsune_jax.capture.equation import MODES, Equation, ScatterDims, components, mode_of, scatter_dims_of
from kitsune_jax.ops.graph import Scalar
from kitsune_jax.ops.reduce import identity
from kitsune_jax.ops.spec import FORMATS, INTEGERS, is_float, np_dtype
from kitsune_jax.ops.table import OPS

# --- dot_general ------------------------------------------------------------------------------------------------------------------

_MOST_PRECISE = ("DEFAULT", "HIGH", "HIGHEST")
# Algorithms that round wider operands to a type; its products are exact, and added up in float32 anyway.
# jax.nn.dot_product_attention asks for them, its gradient with an operand in float32.
_ROUNDED = {"BF16_BF16_F32": "bfloat16", "F16_F16_F32": "float16"}


def dot_general(e: Equation) -> int | str:
    """One op that adds products up in ``accumulate``, or an outer product, which is a multiplication, where nothing is contracted.

    Transposition writes the gradient of ``vdot(w, w)`` as a ``dot_general`` of a number and an array that contracts nothing.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = e.params["dimension_numbers"]
    dtypes = [str(a.dtype) for a in (*e.in_avals, e.out)]
    if "bool" in dtypes or len({is_float(d) for d in dtypes}) > 1:
        return f"dot_general: multiplies {dtypes[0]} by {dtypes[1]} into {dtypes[2]}"
    narrow = _ROUNDED.get(str(getattr(e.params["precision"], "name", "")))
    narrow = narrow if narrow in dtypes[:2] else None  # XLA does not round two wide operands on every platform
    precision = None if narrow else _precision(e.params["precision"], dtypes)
    common = narrow or _common(*dtypes[:2])
    if precision == "":
        return f"dot_general: asks for {e.params['precision']}"
    accumulate = dtypes[2] if not is_float(dtypes[2]) else "float64" if "float64" in dtypes else "float32"
    if not lhs_contract:
        return _outer(e, lhs_batch, rhs_batch, accumulate)
    return e.op(
        "dot_general",
        *(e.convert(v, common) for v in e.ins),
        lhs_contract=lhs_contract,
        rhs_contract=rhs_contract,
        lhs_batch=lhs_batch,
        rhs_batch=rhs_batch,
        accumulate=accumulate,
        precision=precision,
    )


def _common(lhs: str, rhs: str) -> str:
    """The dtype in which both operands are multiplied: it holds every number of either."""
    return lhs if lhs == rhs or not (is_float(lhs) and is_float(rhs)) else str(jnp.promote_types(lhs, rhs))


def _outer(e: Equation, lhs_batch: Sequence[int], rhs_batch: Sequence[int], accumulate: str) -> int:
    """Each side repeated over the dimensions of the result (batch, free of the left, free of the right), then multiplied.

    The product is rounded once: where the dtypes differ it is made in ``accumulate``, which holds it exactly, or to which a product
    that adds up would round it first.
    """
    dtype, shape = e.out_dtype, e.out_shape
    wide = dtype if all(e.dtype_of(v) == dtype for v in e.ins) else accumulate
    free_of_left = len(e.shape_of(e.ins[0])) - len(lhs_batch)
    sides = []
    for v, batch, first_free in ((e.ins[0], lhs_batch, len(lhs_batch)), (e.ins[1], rhs_batch, len(lhs_batch) + free_of_left)):
        rank = len(e.shape_of(v))
        order = (*batch, *(d for d in range(rank) if d not in batch))  # batch dimensions first, as in the result
        to = (*range(len(batch)), *range(first_free, first_free + rank - len(batch)))
        x = e.transpose(e.convert(v, wide), order)
        sides.append(x if e.shape_of(x) in ((), shape) else e.broadcast(x, shape, to))
    return e.convert(e.op("mul", *sides), dtype)


def _precision(precision: Any, dtypes: Sequence[str]) -> str | None:
    """The stronger of the operands' precisions by name, ``None`` where none is asked for, "" for one that cannot be promised."""
    if precision is None:
        return None
    sides = precision if isinstance(precision, tuple) else (precision,)
    names = [str(getattr(p, "name", p)) for p in sides]
    if all(n in _MOST_PRECISE for n in names):
        return max(names, key=_MOST_PRECISE.index)
    exact = {"F32_F32_F32": "float32", "F64_F64_F64": "float64"}
    return "HIGHEST" if len(names) == 1 and all(d == exact.get(names[0]) for d in dtypes) else ""


# --- gathers and scatters of whole rows: take, scatter_sum, _max, _min, _prod -----------------------------------------------------

_COMBINED = {"sum": "add", "max": "max", "min": "min", "prod": "mul"}
_MOST = 2**31 - 1
# An array so many times as large as the rows folded into it stays with XLA, which may write into it in place.
_IN_PLACE = 4


@dataclasses.dataclass(frozen=True)
class _ArrayAsRows:
    """The array as rows: dimensions ``before``, then ``indexed`` as one, then ``after``.

    The indexed dimensions become one: several components of an index become one number, and a batching dimension is a component
    that counts. An index with a component out of range becomes -1. Dimensions change places only where the indexed ones do not
    stand side by side, or the result wants them elsewhere.
    """

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
    numbers, index_rank = scatter_dims_of(e), len(e.shape_of(e.ins[1])) - 1
    rows = _rows(e, numbers, e.params["slice_sizes"])
    if isinstance(rows, str):
        return rows
    index = _index(e, numbers, rows, modulo=True)
    mode = "fill" if mode_of(e) == "FILL_OR_DROP" else "clip"  # XLA clips indices that are promised to be in range as well
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
    """Rows folded by their index, and then the array folded with the result, unless the array changes nothing."""
    if e.out_dtype == "bool" and fold in ("sum", "prod"):
        return f"{e.name}: of booleans"
    x, index, updates = e.ins
    numbers, index_rank = scatter_dims_of(e), len(e.shape_of(index)) - 1
    given = e.shape_of(updates)
    sizes = {d: given[k] for k, d in numbers.windowed(len(e.shape_of(x))).items()}
    rows = _rows(e, numbers, [sizes.get(d, 1) for d in range(len(e.shape_of(x)))])
    if isinstance(rows, str):
        return rows
    start = e.builder.constant_of(x)
    fresh = start is not None and start == identity(fold, np_dtype(e.out_dtype))
    if not fresh and math.prod(e.shape_of(x)) > _IN_PLACE * math.prod(given):
        return f"{e.name}: changes a small part of an array; XLA does that in place"
    names = _names(given, numbers, rows)
    order = [names.index(n) for n in _rows_names(rows, index_rank)]
    windowed = numbers.windowed(len(rows.shape))
    squeezed = [n for k, n in enumerate(given) if windowed.get(k) not in rows.indexed]
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


def _rows(e: Equation, numbers: ScatterDims, sizes: Sequence[int]) -> _ArrayAsRows | str:
    """The array as rows, or why it is not indexed by whole rows. ``sizes``: of the window read or written at each index."""
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
        return f"{e.name}: each index reads or writes a window of several rows"
    kept = [d for d in range(len(shape)) if d not in indexed]
    if any(sizes[d] != shape[d] or d in numbers.dropped for d in kept):
        return f"{e.name}: each index reads or writes a part of a row"
    if len(indexed) > 1 and math.prod(shape[d] for d in indexed) > _MOST:
        return f"{e.name}: the indexed dimensions have more than 2**31 elements together"
    before = tuple(d for d in kept if d < indexed[0])
    return _ArrayAsRows(shape, before, indexed, tuple(d for d in kept if d > indexed[0]))


def _whole(e: Equation, numbers: ScatterDims, sizes: Sequence[int]) -> set[int]:
    """Dimensions with a component of the index that are read or written whole: the component is 0, or clipped to it."""
    shape, count = e.shape_of(e.ins[0]), len(numbers.index_map)
    pieces = dict(zip(numbers.index_map, components(e, count), strict=False))
    clips = mode_of(e) == "CLIP" or (mode_of(e) == "PROMISE_IN_BOUNDS" and e.name == "gather")
    whole = {d for d in numbers.index_map if sizes[d] == shape[d] != 1}
    return {d for d in whole if clips or (d in pieces and e.builder.constant_of(pieces[d]) == 0)}


Name = tuple[str, int]  # a dimension of the array ("x") or of the index ("i")


def _rows_names(rows: _ArrayAsRows, index_rank: int) -> list[Name]:
    """The dimensions of the rows that ``take`` makes and ``scatter_*`` folds."""
    return [*(("x", d) for d in rows.before), *(("i", k) for k in range(index_rank)), *(("x", d) for d in rows.after)]


def _names(shape: Sequence[int], numbers: ScatterDims, rows: _ArrayAsRows) -> list[Name]:
    """The dimensions of the rows that JAX gathers or folds, without indexed ones."""
    windowed, counted = numbers.windowed(len(rows.shape)), iter(range(len(shape)))
    names = [("x", windowed[k]) if k in windowed else ("i", next(counted)) for k in range(len(shape))]
    return [n for n in names if n[0] == "i" or n[1] not in rows.indexed]


# --- one index out of several components ------------------------------------------------------------------------------------------


def _index(e: Equation, numbers: ScatterDims, rows: _ArrayAsRows, modulo: bool) -> int:
    """One index for each row. ``modulo``: of a gather; JAX takes its index modulo 2**32 where rows out of range are filled."""
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
    return e.op("select_n", inside, e.full(-1, shape, "int32"), flat)


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


# --- gathers of one element per row, and their gradients: a comparison with the column's number, then a select --------------------

_INDEX_DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "int64")


@dataclasses.dataclass(frozen=True)
class _Pick:
    """Dimension ``along`` of the array is indexed by value ``index``, which runs over dimensions ``index_dims`` of the array.

    The labels of a cross-entropy come in three forms: ``take_along_axis`` (the other dimensions are batching ones), ``x[arange,
    labels]`` (the index has a component for each dimension, and all but one count rows) and ``vmap`` of ``row[label]`` (as the
    first). Each row has one index, so nothing is added up: a gather is the largest of the elements that the comparison with the
    index keeps, which is exact.
    """

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
    """One element of each row, or whole rows (``take``)."""
    p = _pick(e, e.out_shape)
    if p is None:
        return take(e)
    x, index = e.ins[0], e.builder.constant_of(p.index)
    if isinstance(index, int) and 0 <= index < p.extent:
        return e.reshape(e.part(x, p.along, index, 1), e.out_shape)
    if not _is_computed(e.builder, x):
        return take(e)
    return e.reshape(_picked(e, p, mode_of(e) == "FILL_OR_DROP"), e.out_shape)


def scatter_add(e: Equation) -> int | str:
    """Add to one element of each row: the gradient of ``gather``. Or to whole rows (``scatter``)."""
    x, _, updates = e.ins
    p = _pick(e, e.shape_of(updates))
    if p is None or e.out_dtype == "bool":
        return scatter(e, "sum")
    each = e.broadcast(e.reshape(updates, p.row_shape), p.shape, p.others)
    total = e.op("add", x, each)
    if p.extent == 1 and e.builder.constant_of(p.index) == 0:
        return total
    index = _flat(e, p)
    hit = _hits(e, p, _clamped(e, index, p.extent) if mode_of(e) == "CLIP" else index)
    return e.op("select_n", hit, x, total)


# --- which index belongs to which row ---------------------------------------------------------------------------------------------


def _pick(e: Equation, rows: tuple[int, ...]) -> _Pick | None:
    """The elements that are picked; None where it is not one element per row. ``rows``: the shape of the elements."""
    x, index, numbers = e.shape_of(e.ins[0]), e.builder.values[e.ins[1]], scatter_dims_of(e)
    if mode_of(e) not in MODES or index.dtype not in _INDEX_DTYPES or 0 in (*x, *index.shape):
        return None
    window = {d: k for k, d in numbers.windowed(len(x)).items()}
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
    """The dimension along which ``v`` counts 0, 1, 2 ..., perhaps by way of ``where(i < 0, i + n, i)``, with which JAX makes an
    index valid; None for any other value.
    """
    op, shape = builder.made_by(v), builder.values[v].shape
    if op is None:
        return None
    if op.kind == "iota":
        return int(op["dimension"])
    if op.kind == "select_n":
        test = builder.made_by(op.inputs[0])
        wraps = (
            test is not None and test.kind == "lt" and test.inputs[0] == op.inputs[1] and builder.constant_of(test.inputs[1]) == 0
        )
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
    return (kept_dims(before, shape) or {}).get(inner)


def _is_computed(builder: Builder, v: int) -> bool:
    """Is ``v`` made by an op that may stream? A comparison with each column would read all of an array that lies in memory."""
    op = builder.made_by(v)
    if op is not None and op.kind in ("broadcast_in_dim", "reshape", "transpose"):
        return _is_computed(builder, op.inputs[0])
    return op is not None and op.kind != "opaque"


# --- the ops of a pick -----------------------------------------------------------------------------------------------------------


def _picked(e: Equation, p: _Pick, fill: bool) -> int:
    """A value of shape ``p.row_shape``."""
    dtype = e.out_dtype
    index = _flat(e, p)
    index = e.convert(index, "int32") if fill else _clamped(e, index, p.extent)  # as JAX, modulo 2**32 if filled
    least = -np.inf if is_float(dtype) else int(np.iinfo(dtype).min) if dtype in INTEGERS else False
    kept = e.op("select_n", _hits(e, p, index), e.full(least, p.shape), e.ins[0])
    found = e.op("reduce_max", kept, axes=(p.along,))
    if not fill:
        return found
    inside = _inside(e, p, index)
    rows = [d - (d > p.along) for d in p.index_dims]
    which = inside if e.shape_of(inside) == p.row_shape else e.broadcast(inside, p.row_shape, rows)
    return e.op("select_n", which, e.full(e.params["fill_value"], p.row_shape), found)


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


# --- all other primitives, and the table of the rules -----------------------------------------------------------------------------

Rule = Callable[[Equation], "int | list[int] | str"]

_MOST_PIECES = 64  # an unstack into more stays one op
_LOG2_E = 1.4426950408889634
_UNROLLED_TERMS = 8  # polynomials of more terms are loops in JAX's lowering


def pointwise(e: Equation) -> int | str:
    """An op on operands of full shape or of rank 0; a dimension of extent 1 that JAX would expand is expanded by an op before."""
    shape = e.out_shape
    if any(s and len(s) != len(shape) for s in map(e.shape_of, e.ins)):
        return f"{e.name}: operands of different ranks"
    ins = [v if e.shape_of(v) in ((), shape) else e.broadcast(v, shape, range(len(shape))) for v in e.ins]
    taken = {name: e.params[name] for name in OPS[e.kind].takes} | ({"accuracy": e.accuracy} if e.accuracy else {})
    return e.op(e.kind, *ins, **{name: str(x) if isinstance(x, np.dtype) else x for name, x in taken.items()})


def _select(e: Equation) -> int | list[int] | str:
    if len(e.ins) != 3:
        return "select_n: more than two cases"
    which, *cases = e.ins
    if 0 < len(e.shape_of(which)) < len(e.out_shape):  # one choice for all words of a key
        which = e.broadcast(which, e.out_shape, range(len(e.shape_of(which))))
    if (fixed := e.builder.values[which].literal) is not None and e.shape_of(cases[int(fixed > 0)]) == e.out_shape:
        return [cases[int(fixed > 0)]]  # as jnp.var chooses by the number of elements
    if e.dtype_of(which) != "bool":
        which = e.op("ge", which, e.constant(1, e.dtype_of(which)))
    return e.op("select_n", which, *cases)


def _convert(e: Equation) -> int | list[int]:
    return e.ins if e.dtype_of(e.ins[0]) == e.out_dtype else e.op("convert_element_type", *e.ins, new_dtype=e.out_dtype)


def _round(e: Equation) -> int:
    method = "even" if e.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN else "away"
    return e.op("round", *e.ins, method=method)


def _reduce_precision(e: Equation) -> int:
    exponent, mantissa = int(e.params["exponent_bits"]), int(e.params["mantissa_bits"])
    own = FORMATS[e.out_dtype]
    kind = "copy" if exponent >= own[0] and mantissa >= own[1] else "reduce_precision"
    return e.op(kind, *e.ins, exponent_bits=exponent, mantissa_bits=mantissa)


def _device_put(e: Equation) -> list[int] | str:
    if len(e.ins) != 1 or any(x is not None for x in (*e.params.get("devices", ()), *e.params.get("srcs", ()))):
        return "device_put: places an array on a device"
    return e.ins


def _one_minus_square(e: Equation) -> int:
    """(1 + x) (1 - x), as JAX lowers it."""
    one, (x,) = e.constant(1), e.ins
    return e.op("mul", e.op("add", one, x), e.op("sub", one, x))


def _pow(e: Equation) -> int | str:
    """JAX converts an integer exponent to the dtype of the base."""
    base, exponent = e.ins
    e.ins = [base, e.convert(exponent, e.out_dtype)]
    return pointwise(e)


def _polynomial(e: Equation) -> int | str:
    """Horner's rule, lowest coefficient first."""
    x, *terms = e.ins
    if len(terms) > (e.params.get("unroll") or _UNROLLED_TERMS):
        return "polynomial: JAX evaluates so many terms in a loop"
    if any(e.shape_of(v) not in ((), e.out_shape) for v in e.ins):
        return "polynomial: operands of different shapes"
    result = terms[-1]
    for c in reversed(terms[:-1]):
        result = e.op("add", e.op("mul", result, x), c)
    return result


def _broadcast_in_dim(e: Equation) -> int | str:
    shape = e.out_shape
    if len(e.ins) != 1:
        return "broadcast_in_dim: the shape is not known"
    x = e.shape_of(e.ins[0])
    if x == shape or (x and math.prod(x) == math.prod(shape) > 0):  # only dimensions of extent 1 were added
        return e.reshape(e.ins[0], shape)
    return e.broadcast(e.ins[0], shape, e.params["broadcast_dimensions"])


def _reshape(e: Equation) -> int | str:
    if len(e.ins) != 1:
        return "reshape: the shape is not known"
    order = e.params.get("dimensions")
    return e.reshape(e.ins[0] if order is None else e.transpose(e.ins[0], order), e.out_shape)


def _split(e: Equation) -> list[int]:
    sizes = list(map(int, e.params["sizes"]))
    return [e.part(e.ins[0], e.params["axis"], end - n, n) for n, end in zip(sizes, accumulate(sizes), strict=True)]


def _unstack(e: Equation) -> list[int] | str:
    axis, (x,) = e.params["axis"], e.ins
    pieces = e.shape_of(x)[axis]
    if pieces > _MOST_PIECES:
        return f"unstack: into more than {_MOST_PIECES} arrays"
    return [e.reshape(e.part(x, axis, k, 1), e.out_shape) for k in range(pieces)]


def _stack(e: Equation) -> int:
    axis, shape = e.params["axis"], e.out_shape
    parts = [e.reshape(v, (*shape[:axis], 1, *shape[axis + 1 :])) for v in e.ins]
    return parts[0] if len(parts) == 1 else e.op("concatenate", *parts, dimension=axis)


def _tile(e: Equation) -> int | list[int]:
    """Each repeated dimension gets a new one in front of it, which is then merged into it."""
    (x,), reps = e.ins, [int(r) for r in e.params["reps"]]
    if all(r == 1 for r in reps):
        return e.ins
    wide = [m for n, r in zip(e.shape_of(x), reps, strict=True) for m in ([n] if r == 1 else [r, n])]
    dims = [d + sum(r != 1 for r in reps[: d + 1]) for d in range(len(reps))]
    return e.reshape(e.broadcast(x, wide, dims), e.out_shape)


def _pad(e: Equation) -> int:
    low, high, interior = zip(*e.params["padding_config"], strict=True) if e.params["padding_config"] else ((), (), ())
    if not any((*low, *high, *interior)):
        return e.ins[0]
    return e.op("pad", *e.ins, low=low, high=high, interior=interior)


def _iota(e: Equation) -> int | str:
    return "iota: the shape is not known" if e.ins else e.op("iota", shape=e.out_shape, dimension=e.params["dimension"])


def _reduce(e: Equation) -> int | list[int]:
    axes = tuple(sorted(map(int, e.params["axes"])))
    made = e.builder.made_by(e.ins[0])
    if made is not None and made.kind == "reshape" and e.shape_of(made.inputs[0]) == e.out_shape:
        return list(made.inputs)  # dimensions of extent 1 that were just added, as in the gradient of ``bias[None]``
    return e.op(e.name, *e.ins, axes=axes) if axes else e.ins


def _window(e: Equation) -> int | list[int]:
    """A slice, or an update, along the dimensions that it does not have whole; a slice that begins at constants is a static one."""
    updates = e.name == "dynamic_update_slice"
    arrays, starts = (e.ins[:2], e.ins[2:]) if updates else (e.ins[:1], e.ins[1:])
    shape, window = e.shape_of(arrays[0]), e.shape_of(arrays[1]) if updates else e.out_shape
    dims = [d for d, (n, m) in enumerate(zip(shape, window, strict=True)) if m != n]
    if not dims:
        return [arrays[-1]]
    numbers = [e.builder.constant_of(starts[d]) for d in dims]
    if not updates and None not in numbers:
        first = [0] * len(shape)
        for d, number in zip(dims, numbers, strict=True):
            first[d] = min(max(int(number or 0), 0), shape[d] - window[d])
        return e.slice(arrays[0], first, [a + n for a, n in zip(first, window, strict=True)])
    operands = (*arrays, *(starts[d] for d in dims))
    if updates:
        return e.op(e.name, *operands, dims=tuple(dims))
    return e.op(e.name, *operands, dims=tuple(dims), sizes=tuple(window[d] for d in dims))


RULES: dict[str, Rule] = {
    "threefry2x32": random.threefry,
    "iota_2x32_shape": random.counts,
    "rng_bit_generator": random.generated,
    "xor": lambda e: random.both_words(e) or pointwise(e),
    "shift_right_logical": lambda e: random.shifted_out(e) or pointwise(e),
    "and": lambda e: random.all_bits(e) or pointwise(e),
    "select_n": _select,
    "convert_element_type": _convert,
    "round": _round,
    "reduce_precision": _reduce_precision,
    "device_put": _device_put,
    "one_minus_square": _one_minus_square,
    "log2": lambda e: e.op("mul", e.op("log", *e.ins), e.constant(_LOG2_E)),
    "pow": _pow,
    "polynomial": _polynomial,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "squeeze": lambda e: e.reshape(e.ins[0], e.out_shape),
    "transpose": lambda e: e.transpose(e.ins[0], e.params["permutation"]),
    "rev": lambda e: e.op("rev", *e.ins, dimensions=e.params["dimensions"]) if e.params["dimensions"] else e.ins,
    "slice": lambda e: e.slice(e.ins[0], e.params["start_indices"], e.params["limit_indices"], e.params["strides"] or ()),
    "split": _split,
    "unstack": _unstack,
    "stack": _stack,
    "tile": _tile,
    "pad": _pad,
    "concatenate": lambda e: e.ins if len(e.ins) == 1 else e.op("concatenate", *e.ins, dimension=e.params["dimension"]),
    "iota": _iota,
    "dynamic_slice": _window,
    "dynamic_update_slice": _window,
    "dot_general": dot_general,
    "gather": gather,
    "scatter-add": scatter_add,
    "scatter-sub": lambda e: scatter(e, "sum"),
    "scatter-mul": lambda e: scatter(e, "prod"),
    "scatter-max": lambda e: scatter(e, "max"),
    "scatter-min": lambda e: scatter(e, "min"),
    **dict.fromkeys((kind for kind, spec in OPS.items() if spec.family == "reduce"), _reduce),
    **dict.fromkeys(("argmax", "argmin"), lambda e: e.op(e.name, *e.ins, axis=e.params["axes"][0])),
}

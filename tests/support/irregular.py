"""Tile programs by hand whose rows are read, written and folded where an index says, in an order of the stream that is free.

Every function returns a ``Case``; ``IRREGULAR`` names a variety of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kitsune_jax.ops.reduce import identity
from kitsune_jax.program.ir import Program
from reference.operators import FOLDS
from tests.support.programs import Array, Case
from tests.support.tiles import Tiles


def ids_of(rng: np.random.Generator, kind: str, rows: int, n: int) -> Array:
    """Ids of rows, out of range now and then: "mixed", "equal", "outside" (all), "half" (one of them has half of all rows)."""
    ids = rng.integers(-2, n + 2, rows)
    if kind == "equal":
        ids[:] = n // 2
    elif kind == "outside":
        ids = np.where(ids % 2, -1 - ids**2, n + ids**2)
    elif kind == "half":
        ids[rng.permutation(rows)[: rows // 2]] = n - 1
    return ids.astype(np.int32)


def order_of(ids: Array, n: int) -> Array:
    """The order of a stream: by id, stable, ids out of range last."""
    return np.argsort(np.where((ids >= 0) & (ids < n), ids, n), kind="stable").astype(np.int32)


def ordered_segments(
    rows: int = 131, width: int = 5, n: int = 11, how: str = "sum", dtype: str = "float32", *, ids: str = "mixed",
    tile_rows: int = 16, stages: int = 1,
) -> Case:  # fmt: skip
    """Rows in the order of their ids: a sorted sink, a store of every row (through the order), its number, and a gathered table."""
    t = Tiles((rows,), tile_rows)
    x, index = t.load((rows, width), dtype, ((0,), ())), t.load((rows,), "int32", ((0,),))
    table = t.load((n, width), dtype)
    t.in_order(t.input((rows,), "int32"))
    moved = t.op("add", x, t.gather(table, index, "fill", 0))
    t.store(t.index((0,)), (rows,), ((0,),))
    if stages == 2:
        q, p = t.queue(moved, (1,)), t.queue(index, (1,))
        t.stage()
        moved, index = t.pop(q), t.pop(p)
    t.store(moved, (rows, width), ((0,), ()))
    t.sink_at(moved, index, how, n, "float32" if dtype in ("bfloat16", "float16") else None, ids_sorted=True)

    def operands(rng: np.random.Generator) -> list[Array]:
        index = ids_of(rng, ids, rows, n)
        values = 1 + 0.3 * rng.standard_normal((rows + n, width))
        return [values[:rows].astype(np.dtype(dtype)), index, values[rows:].astype(np.dtype(dtype)), order_of(index, n)]

    def reference(x: Array, index: Array, table: Array, order: Array) -> list[Array]:
        inside = (index >= 0) & (index < n)
        moved = x + np.where(inside[:, None], table[np.clip(index, 0, n - 1)], 0)
        total = np.full((n, width), identity(how, x.dtype), x.dtype)
        FOLDS[how].at(total, index[inside], moved[inside])
        return [np.arange(float(rows)), moved, total]

    return Case(Program.of(t.program()), operands, reference)


def taken_sums(
    rows: int = 131, heads: int = 3, inner: int = 5, n: int = 11, dtype: str = "float32", *, factors: str = "heads",
    mode: str = "clip", ids: str = "mixed", table_rows: int = 7, tile_rows: int = 16,
) -> Case:  # fmt: skip
    """Rows of a table by one index, times ``factors`` ("none", "row", "heads" or "all": of which there is one each), added up by
    another index, in whose order they stream."""
    t = Tiles((rows,), tile_rows)
    shape = {"none": (), "row": (), "heads": (heads,), "all": (heads, inner)}[factors]
    factor = t.load((rows, *shape), dtype, ((0,), *((),) * len(shape)))
    index, taken = t.load((rows,), "int32", ((0,),)), t.load((rows,), "int32", ((0,),))
    table = t.load((table_rows, heads, inner), dtype)
    t.in_order(t.input((rows,), "int32"))
    x = t.gather(table, taken, mode, -2)
    if factors != "none":
        twice = t.op("add", factor, factor)
        spread = twice if factors == "all" else t.broadcast(twice, (heads, inner), range(1 + len(shape)))
        x = t.op("mul", spread, x) if heads % 2 else t.op("mul", x, spread)
    t.sink_at(x, index, "sum", n, "float32", ids_sorted=True)

    def operands(rng: np.random.Generator) -> list[Array]:
        index, taken = ids_of(rng, ids, rows, n), ids_of(rng, ids, rows, table_rows)
        values = [rng.standard_normal(s).astype(np.dtype(dtype)) for s in ((rows, *shape), (table_rows, heads, inner))]
        return [values[0], index, taken, values[1], order_of(index, n)]

    def reference(factor: Array, index: Array, taken: Array, table: Array, order: Array) -> list[Array]:
        inside = (index >= 0) & (index < n)
        rows_of = table[np.clip(taken, 0, table_rows - 1)]
        if mode == "fill":
            rows_of = np.where(((taken >= 0) & (taken < table_rows))[:, None, None], rows_of, -2.0)
        if factors != "none":
            rows_of = rows_of * 2 * factor.reshape(*factor.shape, *(1,) * (3 - factor.ndim))
        total = np.zeros((n, heads, inner))
        np.add.at(total, index[inside], rows_of[inside])
        return [total]

    return Case(Program.of(t.program()), operands, reference)


def taken_dots(
    rows: int = 131, heads: int = 3, inner: int = 5, dtype: str = "float32", *, both: bool = True, ids: str = "mixed",
    table_rows: int = 7, tile_rows: int = 16,
) -> Case:  # fmt: skip
    """Products by heads of rows of a table, chosen by one index, and rows of another table (``both``) or of the stream."""
    t = Tiles((rows,), tile_rows)
    first, second = t.load((rows,), "int32", ((0,),)), t.load((rows,), "int64", ((0,),))
    table, other = t.load((table_rows, heads, inner), dtype), t.load((table_rows + 1, heads, inner), dtype)
    own = t.load((rows, heads, inner), dtype, ((0,), (), ()))
    x = t.gather(table, first, "fill", -2)
    y = t.gather(other, second) if both else t.op("tanh", own)
    product = t.op("mul", x, y) if heads % 2 else t.op("mul", y, x)
    t.store(t.reduce("sum", product, (2,)), (rows, heads), ((0,), ()))

    def operands(rng: np.random.Generator) -> list[Array]:
        tables = [(table_rows, heads, inner), (table_rows + 1, heads, inner), (rows, heads, inner)]
        index = ids_of(rng, ids, rows, table_rows), ids_of(rng, ids, rows, table_rows + 1).astype(np.int64)
        return [*index, *(rng.standard_normal(s).astype(np.dtype(dtype)) for s in tables)]

    def reference(first: Array, second: Array, table: Array, other: Array, own: Array) -> list[Array]:
        inside = (first >= 0) & (first < table_rows)
        x = np.where(inside[:, None, None], table[np.clip(first, 0, table_rows - 1)], -2.0)
        y = other[np.clip(second, 0, table_rows)] if both else np.tanh(own)
        return [(x * y).sum(2)]

    return Case(Program.of(t.program()), operands, reference)


def selections(rows: int = 37, features: int = 7, dtype: str = "float32", tile_rows: int = 8) -> Case:
    """The lower triangle of a matrix in each row, what is computed of it, and that put back: DLRM's selection and its gradient.

    One pair is out of range, and one is there twice.
    """
    i, j = np.tril_indices(features)
    pairs = (features * i + j).astype(np.int32)
    pairs[:2] = -1, pairs[-1]
    n, k = features**2, len(pairs)
    t = Tiles((rows,), tile_rows)
    x, index = t.load((rows, n, 2), dtype, ((0,), (), ())), t.load((k,), "int32")
    taken = t.take(x, index, 1, "fill", -3)
    clipped = t.take(x, index, 1)
    t.store(taken, (rows, k, 2), ((0,), (), ()))
    t.store(t.put(t.op("tanh", clipped), index, 1, n), (rows, n, 2), ((0,), (), ()))
    twice = t.reshape(clipped, (k, 2))
    t.store(t.put(t.op("add", taken, twice), t.load((k, 2), "int32"), 1, n + 1), (rows, n + 1), ((0,), ()))

    def operands(rng: np.random.Generator) -> list[Array]:
        x = rng.standard_normal((rows, n, 2)).astype(np.dtype(dtype))
        return [x, pairs, rng.integers(-1, n + 2, (k, 2)).astype(np.int32)]

    def reference(x: Array, index: Array, both: Array) -> list[Array]:
        inside = (index >= 0) & (index < n)
        clipped = x[:, np.clip(index, 0, n - 1)]
        taken = np.where(inside[:, None], clipped, -3)
        put, summed = np.zeros((rows, n, 2)), np.zeros((rows, n + 1))
        np.add.at(put, (slice(None), index[inside]), np.tanh(clipped)[:, inside])
        inside = (both >= 0) & (both <= n)
        np.add.at(summed, (slice(None), both[inside]), (taken + clipped)[:, inside])
        return [taken, put, summed]

    return Case(Program.of(t.program()), operands, reference)


IRREGULAR: dict[str, Callable[[], Case]] = {
    **{f"ordered_{how}": lambda how=how: ordered_segments(how=how) for how in ("sum", "max", "min", "prod")},
    **{f"ordered_{ids}": lambda ids=ids: ordered_segments(rows=200, ids=ids) for ids in ("equal", "outside", "half")},
    "ordered_bfloat16": lambda: ordered_segments(dtype="bfloat16"),
    "ordered_float16": lambda: ordered_segments(dtype="float16"),
    "ordered_one_row": lambda: ordered_segments(rows=1, width=1),
    "ordered_one_segment": lambda: ordered_segments(rows=40, n=1),
    "ordered_many_segments": lambda: ordered_segments(rows=67, n=301),
    "ordered_stages": lambda: ordered_segments(stages=2),
    **{f"taken_{factors}": lambda factors=factors: taken_sums(factors=factors) for factors in ("none", "row", "heads", "all")},
    **{f"taken_{ids}": lambda ids=ids: taken_sums(rows=700, ids=ids, mode="fill") for ids in ("equal", "outside", "half")},
    **{f"taken_{dtype}": lambda dtype=dtype: taken_sums(dtype=dtype, heads=2, inner=33) for dtype in ("bfloat16", "float16")},
    "taken_heads_of_one": lambda: taken_sums(heads=40, inner=1, n=200, mode="fill"),
    "taken_narrow": lambda: taken_sums(heads=1, inner=3, factors="row", n=67),
    "taken_wide": lambda: taken_sums(heads=8, inner=24, table_rows=1),
    "taken_one_row": lambda: taken_sums(rows=1, heads=1, inner=1),
    **{f"taken_dot_{inner}": lambda inner=inner: taken_dots(inner=inner, heads=8) for inner in (1, 5, 8, 40)},
    **{f"taken_dot_{ids}": lambda ids=ids: taken_dots(rows=700, ids=ids, both=False) for ids in ("equal", "outside", "half")},
    **{f"taken_dot_{dtype}": lambda dtype=dtype: taken_dots(dtype=dtype, inner=33) for dtype in ("bfloat16", "float16")},
    "taken_dot_one_row": lambda: taken_dots(rows=1, heads=1, inner=8, table_rows=1),
    "selections": selections,
    "selections_bfloat16": lambda: selections(dtype="bfloat16"),
    "selections_float16": lambda: selections(rows=1, dtype="float16"),
}

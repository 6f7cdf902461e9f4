"""Structured tile programs written by hand: segment sums, attention, recurrences, nested loops; each with its float64 reference.

Every function returns a ``Case``. The interpreter, the checker and the CPU target run the same ones; ``CASES`` names a variety of
them, at shapes that no tile divides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import ml_dtypes  # noqa: F401  (makes "bfloat16" a NumPy dtype)
import numpy as np

from kitsune_jax.ops.reduce import identity
from kitsune_jax.ops.spec import ROWS
from kitsune_jax.program.build import assemble
from kitsune_jax.program.ir import Program
from reference.operators import FOLDS
from tests.support.tiles import Tiles

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Case:
    """``operands`` draws what ``program`` takes; ``reference`` computes its results in float64 of operands in float64."""

    program: Program
    operands: Callable[[np.random.Generator], list[Array]]
    reference: Callable[..., Sequence[Array]]

    def wanted(self, operands: Sequence[Array]) -> list[Array]:
        wide = [a.astype(np.float64) if a.dtype.kind in "fV" else a for a in operands]
        with np.errstate(all="ignore"):
            return list(self.reference(*wide))

    def errors(self, got: Sequence[Array], operands: Sequence[Array]) -> list[float]:
        """Of each result, the largest error as a part of the largest finite number of the reference; infinities must agree."""
        out = []
        for g, w in zip(got, self.wanted(operands), strict=True):
            wide = np.asarray(g).astype(np.float64)
            assert wide.shape == w.shape
            finite = np.isfinite(w)
            assert np.array_equal(wide[~finite], w[~finite], equal_nan=True)
            scale = np.abs(w[finite]).max(initial=1e-30)
            off = float(np.abs(wide[finite] - w[finite]).max(initial=0.0) / scale)
            out.append(off if off == off else np.inf)  # Python's max may drop a NaN
        return out


def _normal(rng: np.random.Generator, dtype: str, *shape: int) -> Array:
    return np.asarray(rng.standard_normal(shape)).astype(np.dtype(dtype))


def segments(
    rows: int = 131, width: int = 5, n: int = 11, how: str = "sum", dtype: str = "float32", *,
    each: int = 1, tile_rows: int = 16, ids_sorted: bool = False, mode: str = "fill",
) -> Case:  # fmt: skip
    """Phase 0 folds the rows of x into segments, ``each`` ids for a row; phase 1 gathers for every row what its segments hold.

    Ids reach from -2 to n + 1: those out of range are dropped, and gather nothing (``mode``). Segment 3 stays empty.
    """
    ids_shape = (rows,) if each == 1 else (rows, each)
    streams = ((0,), *((),) * (len(ids_shape) - 1))
    t = Tiles((rows,), tile_rows)
    x = t.load((*ids_shape, width), dtype, (*streams, ()))
    t.sink_at(x, t.load(ids_shape, "int32", streams), how, n, "float32" if dtype == "bfloat16" else None, ids_sorted=ids_sorted)
    u = Tiles((rows,), tile_rows + 3)
    table = u.load((n, width), dtype)
    u.store(u.gather(table, u.load(ids_shape, "int32", streams), mode, -1), (*ids_shape, width), (*streams, ()))
    program = assemble([(0, t.program(), (0, 1), (2,)), (1, u.program(), (2, 1), (3,))], (0, 1), (2, 3))

    def operands(rng: np.random.Generator) -> list[Array]:
        ids = rng.integers(-2, n + 2, ids_shape).astype(np.int32)
        ids[ids == 3] = 4
        if ids_sorted:
            ids = np.sort(ids.reshape(-1)).reshape(ids.shape)
        integer = np.dtype(dtype).kind == "i"
        values = rng.integers(-9, 9, (*ids_shape, width)) if integer else 1 + 0.3 * rng.standard_normal((*ids_shape, width))
        return [values.astype(np.dtype(dtype)), ids]

    def reference(x: Array, ids: Array) -> list[Array]:
        total = np.full((n, width), identity(how, x.dtype), x.dtype)
        gathered = np.full(x.shape, -1, x.dtype)
        flat, out = x.reshape(-1, width), gathered.reshape(-1, width)
        for i, row in zip(ids.reshape(-1), flat, strict=True):
            if 0 <= i < n:
                total[i] = FOLDS[how](total[i], row)
        for k, i in enumerate(ids.reshape(-1)):
            if 0 <= i < n or mode == "clip":
                out[k] = total[min(max(i, 0), n - 1)]
        return [total, gathered]

    return Case(program, operands, reference)


def gathered_inside(rows: int = 77, n: int = 13, width: int = 6, dtype: str = "float32", tile_rows: int = 9) -> Case:
    """An embedding with two indices for a row, all in range and promised to be, and what is computed of it."""
    t = Tiles((rows,), tile_rows)
    table, ids = t.load((n, width), dtype), t.load((rows, 2), "int32", ((0,), ()))
    t.store(t.op("tanh", t.gather(table, ids, "promise_in_bounds")), (rows, 2, width), ((0,), (), ()))
    return Case(
        Program.of(t.program()),
        lambda rng: [_normal(rng, dtype, n, width), rng.integers(0, n, (rows, 2)).astype(np.int32)],
        lambda table, ids: [np.tanh(table[ids])],
    )


def attention(
    heads: int = 3, groups: int = 1, queries: int = 37, keys: int = 29, dim: int = 8, dim_v: int = 6, dtype: str = "float32", *,
    block: int = 8, tile_rows: int = 16, causal: bool = False,
) -> Case:  # fmt: skip
    """Softmax attention by the online algorithm: a tile of queries, and a loop over blocks of keys that carries the running
    maximum, the running sum and the rescaled result. ``groups`` heads of queries share each of ``heads`` heads of keys and values.

    Heads and groups are batch axes; keys and values depend on the heads only, so they are stationary. ``causal``: query i reads
    keys up to i + keys - queries (every query has one).
    """
    t = Tiles((heads, groups, queries), tile_rows, batch_axes=2)
    q = t.load((heads, groups, queries, dim), dtype, ((0,), (1,), (2,), ()))
    k, v = t.input((heads, keys, dim), dtype, ((0,), (), ())), t.input((heads, keys, dim_v), dtype, ((0,), (), ()))

    def rowwise(x: int, n: int) -> int:
        return t.broadcast(x, (n,), (0,))

    def filled(value: float, *shape: int) -> int:
        return t.broadcast(t.literal(value), shape, ())

    def masked(scores: int, first: int, size: int) -> int:
        """``scores`` of ``size`` keys from number ``first`` (an int32 scalar) on."""
        key = t.op("add", t.iota((size,), 1), first)
        last = t.op("add", t.index((2,), (size,)), t.literal(keys - queries, "int32"))
        hidden = t.op("gt", key, last, dtype="bool")
        return t.op("select_n", hidden, scores, filled(-math.inf, size), shape=(size,), dtype="float32")

    def step(carries: Sequence[int], number: int, step: int, size: int) -> tuple[int, int, int]:
        m, total, out = carries
        keys_here, values_here = t.load_slice(k, (number, 1, step, size)), t.load_slice(v, (number, 1, step, size))
        scores = t.matmul(q, keys_here, (((1,), (1,)), ((), ())), "float32")
        scores = t.op("mul", scores, t.literal(dim**-0.5))
        if causal:
            scores = masked(scores, t.op("mul", number, t.literal(step, "int32"), tile=False), size)
        new = t.op("max", m, t.reduce("max", scores, (1,)))
        p = t.op("exp", t.op("sub", scores, rowwise(new, size)))
        scale = t.op("exp", t.op("sub", m, new))
        total = t.op("add", t.op("mul", total, scale), t.reduce("sum", p, (1,)))
        p = p if dtype == "float32" else t.op("convert_element_type", p, dtype=dtype, new_dtype=dtype)
        product = t.matmul(p, values_here, None, "float32")
        return new, total, t.op("add", t.op("mul", out, rowwise(scale, dim_v)), product)

    initial = filled(-math.inf), filled(0.0), filled(0.0, dim_v)
    with t.loop(keys // block, *initial) as loop:
        loop.next(*step(loop.carries, loop.index, block, block))
    last = loop.results
    if keys % block:  # the remainder: the same, straight
        last = step(last, t.literal(keys - keys % block, "int32"), 1, keys % block)
    out = t.op("div", last[2], rowwise(last[1], dim_v))
    out = out if dtype == "float32" else t.op("convert_element_type", out, dtype=dtype, new_dtype=dtype)
    t.store(out, (heads, groups, queries, dim_v), ((0,), (1,), (2,), ()))

    def reference(q: Array, k: Array, v: Array) -> list[Array]:
        scores = np.einsum("hgqd,hkd->hgqk", q, k) * dim**-0.5
        if causal:
            scores = np.where(np.arange(keys) > np.arange(queries)[:, None] + keys - queries, -np.inf, scores)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        return [np.einsum("hgqk,hkd->hgqd", p / p.sum(-1, keepdims=True), v)]

    shapes = (heads, groups, queries, dim), (heads, keys, dim), (heads, keys, dim_v)
    return Case(Program.of(t.program()), lambda rng: [_normal(rng, dtype, *s) for s in shapes], reference)


def lstm(
    rows: int = 37, steps: int = 5, features: int = 6, hidden: int = 7, dtype: str = "float32", *,
    reverse: bool = False, tile_rows: int = 16,
) -> Case:  # fmt: skip
    """A recurrence over the time of streamed sequences: h and c are carried, the weights stay, xs[t] comes in, ys[t] goes out."""
    t = Tiles((rows,), tile_rows)
    xs = t.input((steps, rows, features), dtype, ((), (0,), ()))
    w, u = t.load((features, 4 * hidden), dtype), t.load((hidden, 4 * hidden), dtype)
    bias = t.broadcast(t.load((4 * hidden,), "float32"), (4 * hidden,), (1,))
    initial = t.load((rows, hidden), dtype, ((0,), ())), t.load((rows, hidden), "float32", ((0,), ()))
    ys = t.output((steps, rows, hidden), dtype, ((), (0,), ()))
    with t.loop(steps, *initial, reverse=reverse) as loop:
        h, c = loop.carries
        x = t.reshape(t.load_slice(xs, (loop.index, 0, 1, 1)), (features,))
        gates = t.op("add", t.matmul(x, w, None, "float32"), t.matmul(h, u, None, "float32"))
        gates = t.op("add", gates, bias)
        i, f, g, o = (
            t.op("slice", gates, shape=(hidden,), start=(0, k * hidden), limit=(ROWS, (k + 1) * hidden), strides=(1, 1))
            for k in range(4)
        )
        kept = t.op("mul", t.op("logistic", f), c)
        c = t.op("add", kept, t.op("mul", t.op("logistic", i), t.op("tanh", g)))
        h = t.op("mul", t.op("logistic", o), t.op("tanh", c))
        h = h if dtype == "float32" else t.op("convert_element_type", h, dtype=dtype, new_dtype=dtype)
        t.store_slice(t.reshape(h, (1, hidden)), ys, (loop.index, 0, 1, 1))
        loop.next(h, c)
    t.store(loop.results[0], (rows, hidden), ((0,), ()))
    t.store(loop.results[1], (rows, hidden), ((0,), ()))

    def operands(rng: np.random.Generator) -> list[Array]:
        weights = [0.4 * _normal(rng, "float32", n, 4 * hidden) for n in (features, hidden)]
        sequences, h, c = (
            _normal(rng, dtype, steps, rows, features),
            _normal(rng, dtype, rows, hidden),
            _normal(rng, "float32", rows, hidden),
        )
        return [sequences, *(a.astype(np.dtype(dtype)) for a in weights), _normal(rng, "float32", 4 * hidden), h, c]

    def reference(xs: Array, w: Array, u: Array, b: Array, h: Array, c: Array) -> list[Array]:
        ys = np.zeros((steps, rows, hidden))
        for step in reversed(range(steps)) if reverse else range(steps):
            i, f, g, o = np.split(xs[step] @ w + h @ u + b, 4, axis=1)
            c = _logistic(f) * c + _logistic(i) * np.tanh(g)
            h = ys[step] = _logistic(o) * np.tanh(c)
        return [ys, h, c]

    return Case(Program.of(t.program()), operands, reference)


def lstm_backward(
    rows: int = 37, steps: int = 5, features: int = 6, hidden: int = 7, dtype: str = "float32", *, tile_rows: int = 16, n: int = 9
) -> Case:
    """The gradient of ``lstm`` through time: a reverse loop that carries dh and dc, stores dx, and adds up the gradients of the
    weights, of the bias and of a table of ``n`` rows, from which the sequences were taken by indices of -1 to n, once per step.
    """
    t = Tiles((rows,), tile_rows)
    streams = ((), (0,), ())
    xs, before = (t.input((steps, rows, k), dtype, streams) for k in (features, hidden))
    gates = t.input((steps, rows, 4 * hidden), dtype, streams)  # i, f, g, o, activated
    cells, cells_before = (t.input((steps, rows, hidden), "float32", streams) for _ in range(2))
    cotangents = t.input((steps, rows, hidden), dtype, streams)
    ids = t.input((steps, rows), "int32", ((), (0,)))
    w, u = t.load((4 * hidden, features), dtype), t.load((4 * hidden, hidden), dtype)  # transposed
    initial = t.load((rows, hidden), "float32", ((0,), ())), t.load((rows, hidden), "float32", ((0,), ()))
    dxs = t.output((steps, rows, features), "float32", streams)
    one = t.broadcast(t.literal(1.0), (hidden,), ())

    def wide(x: int) -> int:
        return x if t.values[x].dtype == "float32" else t.op("convert_element_type", x, dtype="float32", new_dtype="float32")

    def slope(a: int, by: int) -> int:
        """``by`` times a (1 - a), the slope of a logistic function whose value is ``a``."""
        return t.op("mul", by, t.op("mul", a, t.op("sub", one, a)))

    with t.loop(steps, *initial, reverse=True) as loop:

        def here(array: int) -> int:
            return t.reshape(t.load_slice(array, (loop.index, 0, 1, 1)), t.inputs[array].loaded.shape[1:])

        activated = wide(here(gates))
        i, f, g, o = (
            t.op("slice", activated, shape=(hidden,), start=(0, k * hidden), limit=(ROWS, (k + 1) * hidden), strides=(1, 1))
            for k in range(4)
        )
        dh = t.op("add", loop.carries[0], wide(here(cotangents)))
        tanh = t.op("tanh", here(cells))
        kept = t.op("sub", one, t.op("mul", tanh, tanh))
        dc = t.op("add", loop.carries[1], t.op("mul", t.op("mul", dh, o), kept))
        d_g = t.op("mul", t.op("mul", dc, i), t.op("sub", one, t.op("mul", g, g)))
        d_f, d_i = slope(f, t.op("mul", dc, here(cells_before))), slope(i, t.op("mul", dc, g))
        dz = t.concat(d_i, d_f, d_g, slope(o, t.op("mul", dh, tanh)), dimension=1)
        t.sink(dz, "sum", (0,))
        dz = dz if dtype == "float32" else t.op("convert_element_type", dz, dtype=dtype, new_dtype=dtype)
        t.matmul_sink(here(xs), dz)
        t.matmul_sink(here(before), dz)
        dx = t.matmul(dz, w, None, "float32")
        t.sink_at(dx, here(ids), "sum", n)
        t.store_slice(t.reshape(dx, (1, features)), dxs, (loop.index, 0, 1, 1))
        loop.next(t.matmul(dz, u, None, "float32"), t.op("mul", dc, f))
    t.store(loop.results[0], (rows, hidden), ((0,), ()))
    t.store(loop.results[1], (rows, hidden), ((0,), ()))

    def operands(rng: np.random.Generator) -> list[Array]:
        shapes = [(steps, rows, features), (steps, rows, hidden)]
        x, h, ct = (_normal(rng, dtype, *s) for s in (*shapes, shapes[1]))
        cells = [_normal(rng, "float32", *shapes[1]) for _ in range(2)]
        z, gates_shape = rng.standard_normal((steps, rows, 4, hidden)), (steps, rows, 4 * hidden)
        z = np.where((np.arange(4) == 2)[:, None], np.tanh(z), _logistic(z)).astype(np.dtype(dtype)).reshape(gates_shape)
        weights = [(0.3 * _normal(rng, "float32", 4 * hidden, k)).astype(np.dtype(dtype)) for k in (features, hidden)]
        index = rng.integers(-1, n + 1, (steps, rows)).astype(np.int32)
        return [x, h, z, *cells, ct, index, *weights, *(_normal(rng, "float32", rows, hidden) for _ in range(2))]

    def reference(xs, before, gates, cells, cells_before, cotangents, ids, w, u, dh, dc) -> list[Array]:
        sums = [np.zeros(4 * hidden), np.zeros((features, 4 * hidden)), np.zeros((hidden, 4 * hidden)), np.zeros((n, features))]
        dxs = np.zeros((steps, rows, features))
        for s in reversed(range(steps)):
            i, f, g, o = np.split(gates[s], 4, axis=1)
            dh, tanh = dh + cotangents[s], np.tanh(cells[s])
            dc = dc + dh * o * (1 - tanh**2)
            d_i, d_f, d_o = dc * g * i * (1 - i), dc * cells_before[s] * f * (1 - f), dh * tanh * o * (1 - o)
            dz = np.concatenate([d_i, d_f, dc * i * (1 - g**2), d_o], axis=1)
            for total, part in zip(sums, (dz.sum(0), xs[s].T @ dz, before[s].T @ dz), strict=False):
                total += part
            dxs[s] = dz @ w
            inside = (ids[s] >= 0) & (ids[s] < n)
            np.add.at(sums[3], ids[s][inside], dxs[s][inside])
            dh, dc = dz @ u, dc * f
        return [dxs, *sums, dh, dc]

    return Case(Program.of(t.program()), operands, reference)


def _logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def nested(rows: int = 21, k: int = 12, n: int = 10, dtype: str = "float32", *, block: int = 4, tile_rows: int = 8) -> Case:
    """tanh(x) @ w in blocks: a loop over pairs of columns of the result, and inside it one over ``block`` rows of w.

    The weight's block is cut out by the numbers of both loops, and the result's columns are stored by the outer one's. ``block``
    divides k, 2 divides n.
    """
    t = Tiles((rows,), tile_rows)
    x, w = t.input((rows, k), dtype, ((0,), ())), t.input((k, n), dtype)
    out = t.output((rows, n), dtype, ((0,), ()))
    with t.loop(n // 2) as outer:
        with t.loop(k // block, t.broadcast(t.literal(0.0), (2,), ())) as inner:
            part = t.op("tanh", t.load_slice(x, (inner.index, 1, block, block)))
            weight = t.load_slice(w, (inner.index, 0, block, block), (outer.index, 1, 2, 2))
            inner.next(t.op("add", inner.carries[0], t.matmul(part, weight, None, "float32")))
        total = inner.results[0]
        total = total if dtype == "float32" else t.op("convert_element_type", total, dtype=dtype, new_dtype=dtype)
        t.store_slice(total, out, (outer.index, 1, 2, 2))
    return Case(
        Program.of(t.program()),
        lambda rng: [_normal(rng, dtype, rows, k), _normal(rng, dtype, k, n)],
        lambda x, w: [np.tanh(x) @ w],
    )


def interaction(rows: int = 23, features: int = 5, dim: int = 4, dtype: str = "float32", tile_rows: int = 8) -> Case:
    """Products of two tiles, row by row: every feature with every other, and once more with one of its dimensions as a batch."""
    t = Tiles((rows,), tile_rows)
    x, y = (t.load((rows, features, dim), dtype, ((0,), (), ())) for _ in range(2))
    t.store(t.dot(x, y, ((2,), (2,))), (rows, features, features), ((0,), (), ()))
    t.store(t.dot(x, y, ((1,), (1,)), ((2,), (2,))), (rows, dim), ((0,), ()))

    def reference(x: Array, y: Array) -> list[Array]:
        return [np.einsum("rid,rjd->rij", x, y), np.einsum("rid,rid->rd", x, y)]

    return Case(Program.of(t.program()), lambda rng: [_normal(rng, dtype, rows, features, dim) for _ in range(2)], reference)


def computed_weights(rows: int = 19, k: int = 6, n: int = 5, tile_rows: int = 8) -> Case:
    """Stationary values that the stage computes: the largest row sum of a weight, carried by a loop, and the weight over it."""
    t = Tiles((rows,), tile_rows)
    x, w = t.load((rows, k), "float32", ((0,), ())), t.input((k, n))
    with t.loop(k, t.literal(1e-6)) as loop:
        row = t.op("abs", t.load_slice(w, (loop.index, 0, 1, 1)), shape=(1, n), tile=False)
        total = t.op("reduce_sum", row, shape=(), tile=False, axes=(0, 1))
        loop.next(t.op("max", loop.carries[0], total, shape=(), tile=False))
    scaled = t.op("div", t.again(w), loop.results[0], shape=(k, n), tile=False)
    t.store(t.matmul(x, scaled), (rows, n), ((0,), ()))
    return Case(
        Program.of(t.program()),
        lambda rng: [_normal(rng, "float32", rows, k), _normal(rng, "float32", k, n)],
        lambda x, w: [x @ (w / max(np.abs(w).sum(1).max(), 1e-6))],
    )


CASES: dict[str, Callable[[], Case]] = {
    **{f"segment_{how}": lambda how=how: segments(how=how) for how in ("sum", "max", "min", "prod")},
    "segment_sum_sorted": lambda: segments(ids_sorted=True),
    "segment_sum_bfloat16": lambda: segments(dtype="bfloat16"),
    "segment_max_int32": lambda: segments(how="max", dtype="int32"),
    "segment_sum_pairs": lambda: segments(each=2, mode="clip"),
    "segment_sum_one_row": lambda: segments(rows=1, width=1),
    "gather_promised": gathered_inside,
    "gather_bfloat16": lambda: gathered_inside(dtype="bfloat16"),
    "attention": attention,
    "attention_grouped": lambda: attention(heads=2, groups=3, queries=21, keys=24),
    "attention_causal": lambda: attention(queries=19, keys=27, causal=True),
    "attention_bfloat16": lambda: attention(queries=40, keys=33, dtype="bfloat16"),
    "attention_few_keys": lambda: attention(heads=1, queries=5, keys=3),
    "lstm": lstm,
    "lstm_reverse": lambda: lstm(reverse=True),
    "lstm_bfloat16": lambda: lstm(dtype="bfloat16"),
    "lstm_no_step": lambda: lstm(steps=0),
    "lstm_one_step": lambda: lstm(steps=1, reverse=True),
    "lstm_backward": lstm_backward,
    "lstm_backward_bfloat16": lambda: lstm_backward(dtype="bfloat16"),
    "lstm_backward_no_step": lambda: lstm_backward(steps=0),
    "lstm_backward_one_step": lambda: lstm_backward(steps=1),
    "nested": nested,
    "nested_bfloat16": lambda: nested(dtype="bfloat16"),
    "interaction": interaction,
    "interaction_bfloat16": lambda: interaction(dtype="bfloat16"),
    "computed_weights": computed_weights,
}

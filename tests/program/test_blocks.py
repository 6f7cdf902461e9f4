"""Loops over blocks of a long dimension, made by a pass: what the program computes stays the same, and no value is longer."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune_jax.program.blocks import NotBlocked, blocked
from kitsune_jax.program.ir import Program, TileProgram, walk
from kitsune_jax.program.loop_bounds import tile_iterations, with_known_bounds
from kitsune_jax.program.passes import simplified
from kitsune_jax.targets.cpu import lower as cpu_lower
from reference.check import verify
from reference.interpret import interpret
from tests.support.tiles import Tiles

_cpu = pytest.importorskip("kitsune_jax._cpu", reason="the extension is not built: pip install -e .")


def softmax_rows(t: Tiles, scores: int, size: int) -> int:
    """As ``jax.nn.softmax`` is captured."""
    largest = t.op("max", t.reduce("max", scores, (1,)), t.literal(-math.inf))
    p = t.op("exp", t.op("sub", scores, t.broadcast(largest, (size,), (0,))))
    return t.op("div", p, t.broadcast(t.reduce("sum", p, (1,)), (size,), (0,)))


def attention(
    heads: int = 2, queries: int = 23, keys: int = 37, dim: int = 6, *, mask: str = "", fill: float = -math.inf,
    window: int = 5, dtype: str = "float32", tile_rows: int = 8,
) -> tuple[TileProgram, int]:  # fmt: skip
    """Attention whose rows hold the scores of all keys, and the value that is the scores."""
    t = Tiles((heads, queries), tile_rows, batch_axes=1)
    q = t.load((heads, queries, dim), dtype, ((0,), (1,), ()))
    k, v = t.load((heads, keys, dim), dtype, ((0,), (), ())), t.load((heads, keys, dim), dtype, ((0,), (), ()))
    scores = t.matmul(q, k, (((1,), (1,)), ((), ())), "float32")
    hidden = t.broadcast(t.literal(fill), (keys,), ())
    key, query = t.iota((keys,), 1), t.index((1,), (keys,))
    last = t.op("add", query, t.load((), "int32") if mask.startswith("placed") else t.literal(keys - queries, "int32"))
    if mask in ("causal", "window", "placed", "placed window"):
        seen = t.op("le", key, last, dtype="bool")
        if mask.endswith("window"):
            seen = t.op("and", seen, t.op("gt", key, t.op("sub", last, t.literal(window, "int32")), dtype="bool"))
        scores = t.op("select_n", seen, hidden, scores, dtype="float32")
    elif mask == "added":
        seen = t.op("ge", last, key, dtype="bool")
        bias = t.op("select_n", seen, hidden, t.broadcast(t.literal(0.0), (keys,), ()), dtype="float32")
        scores = t.op("add", scores, bias)
    p = softmax_rows(t, scores, keys)
    if mask == "dropped":
        keep = t.op("ne", t.op("rem", t.op("add", key, query), t.literal(3, "int32")), t.literal(0, "int32"), dtype="bool")
        p = t.op("select_n", keep, t.broadcast(t.literal(0.0), (keys,), ()), t.op("div", p, t.literal(0.75)), dtype="float32")
    p = p if dtype == "float32" else t.op("convert_element_type", p, dtype=dtype, new_dtype=dtype)
    out = t.matmul(p, v, None, dtype)
    t.store(out, (heads, queries, dim), ((0,), (1,), ()))
    return t.program(), scores


def operands(program: TileProgram, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(a.shape).astype(np.dtype(a.dtype)) for a in program.inputs]


def check(
    program: TileProgram, value: int, block: int, arrays: list[np.ndarray], dim: int = 1, bound: float = 3e-6, edge: int = 0
) -> TileProgram:
    """The blocked program agrees with the whole one in float64, interpreted and on the CPU."""
    made = simplified(blocked(program, value, dim, block, edge))
    verify(made)
    wide = interpret(Program.of(program), arrays, widen=True)
    for got, exact in ((interpret(Program.of(made), arrays, widen=True), 1e-12), (run(made, arrays), bound)):
        for g, w in zip(got, wide, strict=True):
            g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
            np.testing.assert_array_equal(np.isfinite(g), np.isfinite(w))
            finite = np.isfinite(w)
            scale = np.abs(w[finite]).max(initial=1e-30)
            assert np.abs(g[finite] - w[finite]).max(initial=0) <= exact * scale
    return made


def run(program: TileProgram, arrays: list[np.ndarray]) -> list[np.ndarray]:
    out = [np.empty(a.shape, np.dtype(a.dtype)) for a in program.outputs]
    plain = [a.view(np.uint16) if a.dtype.kind == "V" else a for a in (*arrays, *out)]
    _cpu.run(cpu_lower.generate(Program.of(program), "case"), plain[: len(arrays)], plain[len(arrays) :], 2)
    return out


def loops(program: TileProgram) -> list:
    return [i for i in walk(program.stages[0].body) if i.kind == "loop"]


@pytest.mark.parametrize("mask", ["", "causal", "window", "added", "dropped"])
def test_attention_is_one_loop(mask: str) -> None:
    program, scores = attention(mask=mask)
    made = check(program, scores, 8, operands(program))
    bounds = [loop.get("within") for loop in loops(made)]
    assert all(n <= 8 for loop in loops(made) for i in walk(loop.block.body) for v in i.outputs for n in made.values[v].shape)
    if mask not in ("causal", "window", "added"):
        assert bounds == [None]
        return
    assert [b[-1] for b in bounds] == ["whole", "edges"]
    whole, edges = ({i.kind for i in walk(loop.block.body)} for loop in loops(made))
    assert "iota" in edges and "iota" not in whole, "nothing is masked where all is seen"


@pytest.mark.parametrize("mask", ["", "causal"])
def test_narrow(mask: str) -> None:
    program, scores = attention(mask=mask, dtype="bfloat16")
    check(program, scores, 16, operands(program), bound=2e-2)


def test_hidden_blocks_are_left_out() -> None:
    program, scores = attention(queries=64, keys=64, mask="window", window=8, tile_rows=16)
    made = check(program, scores, 8, operands(program))
    whole, edges = ([list(tile_iterations(made, loop, np.asarray(made.rows_of(t)))) for t in range(4)] for loop in loops(made))
    assert [sorted(a + b) for a, b in zip(whole, edges, strict=True)] == [[0, 1], [1, 2, 3], [3, 4, 5], [5, 6, 7]]


@pytest.mark.parametrize("queries, keys, tile_rows", [(150, 170, 96), (170, 150, 64), (1, 170, 96), (131, 131, 131)])
@pytest.mark.parametrize("mask", ["causal", "window", "added"])
def test_blocks_are_smaller_where_a_mask_cuts_them(mask: str, queries: int, keys: int, tile_rows: int) -> None:
    for dtype, bound in (("float32", 3e-6), ("bfloat16", 2e-2)):
        program, scores = attention(queries=queries, keys=keys, mask=mask, window=45, dtype=dtype, tile_rows=tile_rows)
        made = check(program, scores, 32, operands(program), bound=bound, edge=8)
        found = [(loop["within"][1], loop.get("together", 1), loop["within"][-1]) for loop in loops(made)]
        assert found == [(32, 1, "whole"), (8, 4, "edges")]


def test_rows_leave_out_blocks_that_they_do_not_see() -> None:
    """Weights are 0 there, which would make NaN of a value that is NaN."""
    program, scores = attention(queries=128, keys=128, mask="causal", tile_rows=128)
    arrays = operands(program)
    arrays[2][0, 127] = np.nan
    for edge, rows in ((32, 96), (16, 96), (0, 64)):
        (got,) = run(simplified(blocked(program, scores, 1, 64, edge)), arrays)
        assert np.isnan(got[0, rows:]).all() and np.isfinite(got[0, :rows]).all() and np.isfinite(got[1]).all(), edge


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fill", [-math.inf, -1e30])
@pytest.mark.parametrize("mask, within", [("placed", (None, 0)), ("placed window", (-4, 0))])
def test_bounds_that_are_known_when_it_runs(mask: str, within: tuple[int | None, int], fill: float) -> None:
    """Queries at some place among the keys: also before them, behind them, and where indices wrap around."""
    program, scores = attention(queries=23, keys=61, mask=mask, fill=fill)
    arrays = operands(program)
    for place in (0, 1, 14, 38, 60, 70, -1, -5, -30, 2**30 + 5, 2**31 - 3, -(2**31)):
        arrays[3] = np.asarray(place, np.int32)
        with np.errstate(over="ignore"):
            made = check(program, scores, 8, arrays)
    found = [(loop["within"], loop["shifted"]) for loop in loops(made)]
    assert found == [((1, 8, *within, which), (3, 1, "rows", 61)) for which in ("whole", "edges")]
    assert not any(loop.get("shifted") for loop in loops(with_known_bounds(made)))


def test_hidden_blocks_are_left_out_by_a_number_that_is_known_when_it_runs() -> None:
    program, scores = attention(queries=64, keys=96, mask="placed", tile_rows=16)
    loop_of = dict(zip(("whole", "edges"), loops(simplified(blocked(program, scores, 1, 8))), strict=True))

    def looked_at(which: str, tile: int, place: int) -> list[int]:
        return list(tile_iterations(program, loop_of[which], np.asarray(program.rows_of(tile)), lambda array: {3: place}[array]))

    assert looked_at("whole", 0, 17) == [0, 1] and looked_at("edges", 0, 17) == [2, 3, 4]
    assert looked_at("whole", 0, -1) == [] and looked_at("edges", 0, -1) == list(range(12))
    assert looked_at("whole", 0, 2**31 - 9) == []


def test_low_number_hides_only_what_the_comparison_hides() -> None:
    """Where the mask shows a row nothing, a low number gives every key the same weight: no block may be left out."""
    seen, scores = attention(queries=20, keys=37, mask="causal", fill=-1e30)
    assert loops(check(seen, scores, 8, operands(seen)))[0].get("within") is not None
    unseen, scores = attention(queries=37, keys=20, mask="causal", fill=-1e30)
    assert loops(check(unseen, scores, 8, operands(unseen)))[0].get("within") is None
    mild, scores = attention(queries=20, keys=37, mask="causal", fill=-5.0)
    assert loops(check(mild, scores, 8, operands(mild)))[0].get("within") is None


def test_rows_that_see_nothing_are_nan() -> None:
    program, scores = attention(queries=37, keys=20, mask="causal")
    arrays = operands(program)
    check(program, scores, 8, arrays)
    assert np.isnan(interpret(Program.of(simplified(blocked(program, scores, 1, 8))), arrays)[0][:, :17]).all()


def test_nan_and_infinite_scores() -> None:
    program, scores = attention()
    for k, value in ((0, np.nan), (1, np.inf), (1, np.nan)):
        arrays = operands(program)
        arrays[k][0, 3, 2] = value
        check(program, scores, 8, arrays)


def test_two_loops_where_algebra_does_not_help() -> None:
    """A variance waits for the mean: the second sum has a loop of its own."""
    t = Tiles((19,), 8)
    x = t.load((19, 50), "float32", ((0,), ()))
    mean = t.op("mul", t.reduce("sum", x, (1,)), t.literal(1 / 50))
    away = t.op("sub", x, t.broadcast(mean, (50,), (0,)))
    t.store(t.reduce("sum", t.op("mul", away, away), (1,)), (19,), ((0,),))
    t.store(t.op("tanh", away), (19, 50), ((0,), ()))
    program = t.program()
    assert len(loops(check(program, x, 16, operands(program)))) == 2


@pytest.mark.parametrize("leading", [(), (1,), (2, 3)])
def test_a_stream_of_one_row(leading: tuple[int, ...]) -> None:
    """Its arrays stream, over no axis: a dimension of a tile is not the one of the same number of the array."""
    t = Tiles((), 1)
    dim = len(leading)
    x = t.load((*leading, 50), "float32", ((),) * (dim + 1))
    total = t.broadcast(t.reduce("sum", t.op("mul", x, x), (dim + 1,)), (*leading, 50), tuple(range(dim + 1)))
    t.store(t.op("div", t.op("tanh", x), total), (*leading, 50), ((),) * (dim + 1))
    program = t.program()
    assert len(loops(check(program, x, 16, operands(program), dim + 1))) == 2


def test_logarithm_of_a_sum_of_exponentials() -> None:
    t = Tiles((19,), 8)
    x = t.load((19, 50), "float32", ((0,), ()))
    largest = t.reduce("max", x, (1,))
    total = t.reduce("sum", t.op("exp", t.op("sub", x, t.broadcast(largest, (50,), (0,)))), (1,))
    t.store(t.op("add", t.op("log", total), largest), (19,), ((0,),))
    program = t.program()
    assert len(loops(check(program, x, 16, operands(program)))) == 1


def test_a_chain_whose_values_are_read_twice() -> None:
    """What hides blocks is looked for in each value once, however many ways lead to it."""
    t = Tiles((19,), 8)
    x = y = t.load((19, 50), "float32", ((0,), ()))
    for _ in range(40):
        y = t.op("mul", y, y)
    t.store(t.reduce("sum", y, (1,)), (19,), ((0,),))
    program = t.program()
    check(program, x, 16, [np.ones((19, 50), np.float32)])


@pytest.mark.parametrize("kind", ["argmax", "argmin"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_the_index_of_an_extreme_element(kind: str, dtype: str) -> None:
    """Of equal elements the first counts, in whichever block it lies, and the first NaN before all others; also where every element
    is the least that there is."""
    t = Tiles((23,), 8)
    x = t.load((23, 50), dtype, ((0,), ()))
    t.store(t.op(kind, x, shape=(), dtype="int32", axis=1), (23,), ((0,),))
    rng = np.random.default_rng(0)
    array = rng.integers(-3, 4, (23, 50)).astype(dtype)  # each value many times
    worst = np.iinfo(dtype) if dtype == "int32" else np.finfo(dtype)
    array[1] = worst.min if kind == "argmax" else worst.max
    if dtype != "int32":
        array[2] = -np.inf if kind == "argmax" else np.inf
        array[3, [17, 40]] = np.nan
        array[4, 49] = np.nan
    program = t.program()
    made = simplified(blocked(program, x, 1, 16))
    verify(made)
    assert len(loops(made)) == 1
    want = getattr(np, kind)(array, axis=1)
    for got in (run(made, [array]), interpret(Program.of(made), [array])):
        np.testing.assert_array_equal(got[0], want)


def test_what_needs_the_whole_dimension_is_refused() -> None:
    t = Tiles((19,), 8)
    x = t.load((19, 50), "float32", ((0,), ()))
    t.store(t.op("cumsum", x, axis=1, reverse=False), (19, 50), ((0,), ()))
    with pytest.raises(NotBlocked, match="cumsum"):
        blocked(t.program(), x, 1, 16)
    with pytest.raises(NotBlocked, match="blocks of 50"):
        blocked(t.program(), x, 1, 50)


@settings(max_examples=25, deadline=None)
@given(
    heads=st.integers(1, 3),
    queries=st.integers(1, 21),
    keys=st.integers(2, 41),
    block=st.integers(1, 40),
    tile_rows=st.integers(1, 24),
    mask=st.sampled_from(["", "causal", "window", "added", "dropped"]),
    fill=st.sampled_from([-math.inf, -1e30]),
    window=st.integers(1, 9),
)
def test_shapes(heads: int, queries: int, keys: int, block: int, tile_rows: int, mask: str, fill: float, window: int) -> None:
    program, scores = attention(heads, queries, keys, 3, mask=mask, fill=fill, window=window, tile_rows=tile_rows)
    check(program, scores, 1 + (block - 1) % (keys - 1), operands(dataclasses.replace(program), queries))

"""Loops with carries as kernels in the emulator: against the interpreter and float64; and what has no kernel, refused in words."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kitsune_jax.errors import CannotLower
from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.program.ir import TileProgram
from kitsune_jax.targets.cuda import lower, tiles
from reference.check import verify
from reference.interpret import interpret
from tests.support.cuda_run import by_hand, kernel_cache, run_program
from tests.support.programs import CASES, Case, lstm
from tests.support.simulators import cart_pole
from tests.support.tiles import Tiles

__all__ = ["kernel_cache"]  # a fixture
pytestmark = pytest.mark.usefixtures("kernel_cache")

ROW = ((0,), ())
HOW = [(900, 1), (900, 3), (800, 2)]
# Of the largest number of a result: three steps of tf32, and of rounding to 16 bits.
TOLERANCE = {"float32": 2e-3, "bfloat16": 2e-2, "float16": 3e-3}


def tiled(program: TileProgram) -> TileProgram:
    return dataclasses.replace(program, tile_rows=tiles.TILE_ROWS)


def check_case(case: Case, dtype: str, **how: int) -> None:
    operands = case.operands(np.random.default_rng(5))
    errors = case.errors(run_program(tiled(case.program.only), *operands, **how), operands)
    assert max(errors) < TOLERANCE[dtype], errors


def check(program: TileProgram, arrays: list[np.ndarray], **how: int) -> None:
    """The same numbers as the interpreter's."""
    verify(program)
    for k, (g, w) in enumerate(zip(run_program(program, *arrays, **how), interpret(program, arrays), strict=True)):
        np.testing.assert_array_equal(*(np.asarray(x).astype(np.float64) for x in (g, w)), err_msg=f"result {k}\n{program}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sm, lanes", HOW)
@pytest.mark.parametrize("columns", [False, True])
def test_a_simulator_whose_state_is_carried_in_registers(columns: bool, sm: int, lanes: int) -> None:
    """State of four numbers of a row, each an array or all of them one; actions come in, observations go out."""
    check_case(cart_pole(rows=257, steps=7, columns=columns), "float32", sm=sm, lanes=lanes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("hidden, features", [(7, 6), (32, 9), (24, 33)])
def test_recurrences_whose_weights_stay(hidden: int, features: int, dtype: str) -> None:
    for sm, lanes in [(900, 2), (800, 1)]:
        check_case(lstm(131, 3, features, hidden, dtype), dtype, sm=sm, lanes=lanes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("steps", [0, 1, 6])
@pytest.mark.parametrize("reverse", [False, True])
def test_trip_counts_and_directions(steps: int, reverse: bool) -> None:
    check_case(lstm(1, steps, reverse=reverse), "float32", lanes=1)
    check_case(cart_pole(rows=65, steps=steps, reverse=reverse), "float32", lanes=2)


def small(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(-3, 4, shape).astype(np_dtype(dtype))


@pytest.mark.parametrize("width", [1, 3, 40])
def test_carries_that_change_places(width: int) -> None:
    """Each next carry is an old one: none is lost, whichever changes first."""
    t = Tiles((70,), 64)
    a, b, c = (t.load((70, width), "float32", ROW) for _ in range(3))
    with t.loop(4, a, b, c) as loop:
        x, y, z = loop.carries
        loop.next(y, z, x)
    for v in loop.results:
        t.store(v, (70, width), ROW)
    check(t.program(), [small(70, width) + k for k in range(3)], lanes=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_a_nest_of_loops_whose_numbers_cut_the_same_array(dtype: str) -> None:
    """Rows do not lie first; what the outer loop carries, the inner one changes."""
    t = Tiles((67,), 64)
    xs, ys = t.input((3, 67, 4, 5), dtype, ((), (0,), (), ())), t.output((4, 67, 3, 5), dtype, ((), (0,), (), ()))
    with t.loop(3, t.broadcast(t.literal(0, dtype), (5,), ())) as outer:
        with t.loop(4, outer.carries[0], reverse=True) as inner:
            x = t.reshape(t.load_slice(xs, (outer.index, 0, 1, 1), (inner.index, 2, 1, 1)), (5,))
            made = t.op("or" if dtype == "bool" else "max", inner.carries[0], x)
            t.store_slice(t.reshape(made, (1, 1, 5)), ys, (inner.index, 0, 1, 1), (outer.index, 2, 1, 1))
            inner.next(made)
        outer.next(*inner.results)
    t.store(outer.results[0], (67, 5), ROW)
    check(t.program(), [small(3, 67, 4, 5, dtype=dtype)], lanes=2)


def test_numbers_that_no_row_has() -> None:
    """A counter, a pair of words as a random key is one, and a slice of an array without rows: carried, and used by every row."""
    t = Tiles((70,), 64)
    x, rates = t.load((70, 6), "float32", ROW), t.input((5, 2), "float32")
    key = t.load((2,), "uint32")
    with t.loop(5, x, t.literal(0, "int32"), key) as loop:
        state, count, words = loop.carries
        rate = t.op("reshape", t.load_slice(rates, (loop.index, 0, 1, 1)), shape=(2,), tile=False, new_sizes=(2,))
        first = t.op("slice", rate, shape=(1,), tile=False, start=(0,), limit=(1,), strides=(1,))
        first = t.op("reshape", first, shape=(), tile=False, new_sizes=())
        count = t.op("add", count, t.literal(2, "int32"), tile=False)
        flipped = t.op("concatenate", *(
            t.op("slice", words, shape=(1,), tile=False, start=(k,), limit=(k + 1,), strides=(1,)) for k in (1, 0)
        ), shape=(2,), tile=False, dimension=0)  # fmt: skip
        words = t.op("mul", flipped, flipped, shape=(2,), tile=False)
        step = t.op("convert_element_type", count, shape=(), dtype="float32", tile=False, new_dtype="float32")
        bits = t.op("convert_element_type", words, shape=(2,), dtype="float32", tile=False, new_dtype="float32")
        bits = t.broadcast(bits, (3, 2), (2,))
        state = t.op("add", t.op("mul", state, t.broadcast(first, (6,), ())), t.broadcast(step, (6,), ()))
        state = t.op("add", state, t.reshape(bits, (6,)))
        loop.next(state, count, words)
    t.store(loop.results[0], (70, 6), ROW)
    t.store(t.broadcast(loop.results[1], (), ()), (70,), ((0,),))
    check(t.program(), [small(70, 6), small(5, 2), np.asarray([2, 3], np.uint32)], lanes=2)


def test_a_single_row_of_each_step_is_read_by_every_row() -> None:
    """A slice of an array without rows, spread along a dimension of extent 1."""
    t = Tiles((70,), 64)
    x, rates = t.load((70, 6), "float32", ROW), t.input((5, 1, 6), "float32")
    with t.loop(5, x) as loop:
        here = t.load_slice(rates, (loop.index, 0, 1, 1))
        rate = t.op("reshape", here, shape=(1, 6), tile=False, new_sizes=(1, 6))
        loop.next(t.op("add", loop.carries[0], t.broadcast(rate, (6,), (0, 1))))
    t.store(loop.results[0], (70, 6), ROW)
    check(t.program(), [small(70, 6), small(5, 1, 6)])


@pytest.mark.parametrize("sm, lanes", HOW)
def test_a_state_too_wide_for_registers_is_kept_in_shared_memory(sm: int, lanes: int) -> None:
    """Three carries of 128 columns, which change places with what is computed of them."""
    t = Tiles((130,), 64)
    width = 128 if sm == 900 and lanes == 1 else 96
    carries = [t.load((130, width), "float32", ROW) for _ in range(4)]
    with t.loop(3, *carries) as loop:
        a, b, c, d = loop.carries
        loop.next(t.op("add", a, d), t.op("sub", b, a), t.op("add", c, b), c)
    for v in loop.results:
        t.store(v, (130, width), ROW)
    program = t.program()
    made = lower.generate_kernel(program, by_hand(program, sm, lanes, 1), "test")
    assert "Image" in made.source
    check(program, [small(130, width) + k for k in range(4)], sm=sm, lanes=lanes)


def test_what_the_body_reads_of_the_code_around_it_is_computed_once() -> None:
    t = Tiles((66,), 64)
    x, w = t.load((66, 24), "float32", ROW), t.load((24, 40), "float32")
    outside = t.op("mul", t.matmul(x, w, None, "float32"), t.literal(2.0))
    with t.loop(3, t.broadcast(t.literal(0.0), (40,), ())) as loop:
        loop.next(t.op("add", loop.carries[0], outside))
    t.store(t.op("add", loop.results[0], outside), (66, 40), ROW)
    program = t.program()
    source = lower.generate_kernel(program, by_hand(program, 900, 1, 1), "test").source
    assert source.count("Product<") == 1 and source.index("Product<") < source.index("for (i32")
    check(program, [small(66, 24), small(24, 40)], lanes=1)


def generated(program: TileProgram, resident: bool = True) -> lower.Kernel:
    asked = dataclasses.replace(by_hand(program, 900, 1, 1), resident=(resident,) * len(program.stages))
    return lower.generate_kernel(tiled(program), asked, "test")


def test_numbers_of_a_row_are_computed_by_one_thread() -> None:
    """Each of 256 rows of a tile belongs to one thread, where a row has no columns; a sum over the rows counts every thread's."""
    t = Tiles((700,), 64)
    x = t.load((700,), "float32", ((0,),))
    with t.loop(3, x) as loop:
        loop.next(t.op("add", loop.carries[0], x))
    t.store(loop.results[0], (700,), ((0,),))
    t.sink(loop.results[0], "sum", (0,))
    program = t.program()
    assert "with_own_rows" in generated(program).source
    assert "with_own_rows" not in generated(cart_pole(columns=True).program.only).source
    for lanes, replicas in ((1, 1), (2, 3), (3, 2)):
        check(program, [small(700)], lanes=lanes, replicas=replicas)


def test_a_loop_that_leaves_out_iterations_is_refused() -> None:
    program = lstm(64).program.only
    body = tuple(
        dataclasses.replace(i, params=(*i.params, ("within", (0, 1, None, 0, "all")))) if i.block else i
        for i in program.stages[0].body
    )
    bounded = dataclasses.replace(program, stages=(dataclasses.replace(program.stages[0], body=body),))
    with pytest.raises(CannotLower, match="skips iterations"):
        generated(bounded)


def test_weights_that_a_loop_multiplies_with_are_not_streamed() -> None:
    with pytest.raises(CannotLower, match="must stay in shared memory"):
        generated(lstm(64).program.only, resident=False)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("nested", "several nested loops slice"),
        ("computed_weights", "weights that change"),
        ("attention", "do not stay in shared memory"),
    ],
)
def test_what_has_no_kernel_is_refused_in_words(name: str, reason: str) -> None:
    with pytest.raises(CannotLower, match=reason):
        generated(CASES[name]().program.only)

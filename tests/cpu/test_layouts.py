"""Where arrays lie: those between the phases of a call, and rows that a loop reads again and again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.program.ir import Array, Part, Program
from kitsune_jax.targets.cpu import bytecode as bc
from kitsune_jax.targets.cpu import lower, memory
from kitsune_jax.targets.cpu.bytecode import CpuCall
from kitsune_jax.targets.cpu.lower import lower_program
from tests.support.lowered import array, close, run
from tests.support.tiles import Tiles

HEADS, SIZE, TOKENS = 6, 40, 35
CUBE = (HEADS, SIZE, TOKENS)


def two_phases(second: str = "rows") -> Program:
    """y = -exp(x) of an array [heads, 40, tokens], by rows of tokens, in two phases; the second one's rows may be heads instead."""
    by_tokens, by_heads = ((), (), (0,)), ((0,), (), ())
    first = Tiles((TOKENS,), 8)
    first.store(first.op("exp", first.load(CUBE, streams=by_tokens)), CUBE, by_tokens)
    then = Tiles((TOKENS if second == "rows" else HEADS,), 4)
    streams = by_tokens if second == "rows" else by_heads
    then.store(then.op("neg", then.load(CUBE, streams=streams)), CUBE, streams)
    arrays = (Array(CUBE, "float32"),) * 3
    return Program(arrays, 1, 1, (Part(0, first.program(), (0,), (2,)), Part(1, then.program(), (2,), (1,))))


def test_dimensions_that_no_phase_streams_over_come_last() -> None:
    first, then = memory.with_layouts(two_phases()).parts
    between = first.program.outputs[0]
    assert between.strides == (SIZE, 1, HEADS * SIZE) and between.row_strides == (HEADS * SIZE,)
    assert then.program.inputs[0] == between
    assert first.program.inputs[0].strides == () and then.program.outputs[0].strides == ()  # of the call's own arrays: row-major


def test_a_dimension_that_one_phase_keeps_lies_in_runs_for_both() -> None:
    first, then = memory.with_layouts(two_phases("heads")).parts
    assert first.program.outputs[0].strides == (TOKENS * SIZE, 1, SIZE)
    assert then.program.inputs[0].row_strides == (TOKENS * SIZE,)


@pytest.mark.parametrize("second", ["rows", "heads"])
def test_values_do_not_depend_on_the_layout(second: str) -> None:
    from kitsune_jax import _cpu

    x = array(*CUBE)
    words = lower.generate(two_phases(second), "test")
    for threads in (1, 2):
        got = np.empty(CUBE, np.float32)
        _cpu.run(words, [x], [got], threads)
        np.testing.assert_allclose(got, -np.exp(x), rtol=1e-6)


STEPS, ROWS, COLUMNS = 20, 5, 60


def a_loop_behind_rows() -> Program:
    """y[r, c] = the sum over t of -x[t, r, c]: rows [t, c] write -x, and rows of single numbers add its steps in a loop."""
    cube = (STEPS, ROWS, COLUMNS)
    first = Tiles((ROWS,), 2)
    first.store(first.op("neg", first.load(cube, streams=((), (0,), ()))), cube, ((), (0,), ()))
    then = Tiles((ROWS, COLUMNS), 64)
    x = then.input(cube, streams=((), (0,), (1,)))
    with then.loop(STEPS, then.broadcast(then.literal(0.0), (), ())) as loop:
        step = then.load_slice(x, (loop.index, 0, 1, 1))
        loop.next(then.op("add", loop.carries[0], then.reshape(step, ())))
    then.store(loop.results[0], (ROWS, COLUMNS), ((0,), (1,)))
    arrays = (Array(cube, "float32"), Array((ROWS, COLUMNS), "float32"), Array(cube, "float32"))
    return Program(arrays, 1, 1, (Part(0, first.program(), (0,), (2,)), Part(1, then.program(), (2,), (1,))))


def test_steps_of_a_loop_lie_apart() -> None:
    """The rows of one step are read together: with the steps in runs, each number of a step came from a cache line of its own."""
    first, then = memory.with_layouts(a_loop_behind_rows()).parts
    assert first.program.outputs[0].strides == then.program.inputs[0].strides == ()


def test_the_sum_of_a_loop_behind_rows() -> None:
    from kitsune_jax import _cpu

    x, got = array(STEPS, ROWS, COLUMNS), np.empty((ROWS, COLUMNS), np.float32)
    _cpu.run(lower.generate(a_loop_behind_rows(), "test"), [x], [got], 2)
    np.testing.assert_allclose(got, -x.sum(0, dtype=np.float64), rtol=1e-5, atol=1e-5)


GROUPS, KEYS = 6, 9


def keys_behind_queries(reader: str) -> Program:
    """y = x + k of x = -q, an array [2, 6, queries] that rows of queries write, and every row of keys reads whole. The reader is a
    vector op or a product, of which y is the packed operand: k x."""
    array, streams = (2, GROUPS, 700), ((0,), (), (1,))
    first = Tiles((2, 700), 8, batch_axes=1)
    first.store(first.op("neg", first.load(array, streams=streams)), array, streams)
    then = Tiles((2, KEYS), 4, batch_axes=1)
    whole = then.load(array, streams=((0,), (), ()))
    if reader == "vector":
        k = then.load((2, KEYS), streams=((0,), (1,)))
        wide = (then.broadcast(v, (GROUPS, 700), dims) for v, dims in ((whole, (1, 2)), (k, (0,))))
        then.store(then.op("add", *wide), (2, KEYS, GROUPS, 700), ((0,), (1,), (), ()))
    else:
        k = then.load((2, KEYS, GROUPS), streams=((0,), (1,), ()))
        then.store(then.matmul(k, whole), (2, KEYS, 700), ((0,), (1,), ()))
    (out,), given = then.outputs, then.inputs[1]
    arrays = tuple(Array(a.shape, "float32") for a in (first.inputs[0], given, out, first.outputs[0]))
    return Program(arrays, 2, 1, (Part(0, first.program(), (0,), (3,)), Part(1, then.program(), (3, 1), (2,))))


@pytest.mark.parametrize("reader", ["vector", "product"])
def test_an_array_that_every_row_reads_whole_lies_in_runs_for_it_unless_it_is_packed(reader: str) -> None:
    first, then = memory.with_layouts(keys_behind_queries(reader)).parts
    assert (first.program.outputs[0].strides == then.program.inputs[0].strides == ()) == (reader == "vector")


@pytest.mark.parametrize("reader", ["vector", "product"])
def test_values_that_every_row_reads_do_not_depend_on_the_layout(reader: str) -> None:
    from kitsune_jax import _cpu

    program = keys_behind_queries(reader)
    q, k = (array(*a.shape) for a in program.arrays[:2])
    got = np.empty(program.arrays[2].shape, np.float32)
    _cpu.run(lower.generate(program, "test"), [q, k], [got], 2)
    want = -q[:, None] + k[:, :, None, None] if reader == "vector" else np.einsum("hkg,hgq->hkq", k, -q, dtype=np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CpuCall]]:
    """The calls that are lowered while a test runs."""
    found: list[CpuCall] = []
    encode = bc.encode
    monkeypatch.setattr(lower.bc, "encode", lambda call: (found.append(call), encode(call))[1])
    yield found


def attention(q: Any, k: Any, v: Any) -> Any:
    s = jnp.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    s = jnp.where(jnp.tril(jnp.ones(s.shape[1:], bool)), s, -jnp.inf)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(s.astype(jnp.float32)).astype(q.dtype), v)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [3, 8])
def test_queries_that_lie_a_multiple_of_a_kibibyte_apart_are_copied_in_front_of_the_loop(calls, heads: int, dtype: str) -> None:
    tokens, size = 700, 64
    q, k, v = (jax.device_put(np.asarray(np.random.default_rng(s).standard_normal((tokens, heads, size)), dtype)) for s in range(3))
    got = jax.jit(kj.pipeline(attention, force=True, strict=True))(q, k, v)
    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    scores = np.einsum("qhd,khd->hqk", *wide[:2]) / math.sqrt(size)
    weights = np.exp(np.where(np.tril(np.ones((tokens, tokens), bool)), scores, -np.inf))
    want = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), wide[2])
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=1e-5 if dtype == "float32" else 3e-2)
    loops = [i for c in calls for p in c.parts for s in p.program.stages for i in s.body if isinstance(i, bc.CpuLoop)]
    first = [next(i for i in loop.body if isinstance(i, bc.Matmul)) for loop in loops]
    far = heads * size * np.dtype(jnp.dtype(dtype)).itemsize % 1024 == 0
    assert first and {m.x.ref.space for m in first} == {bc.SCRATCH if far else bc.IN}


def test_softmax_of_bfloat16_scores_reads_them_as_the_product_has_scaled_and_stored_them(calls) -> None:
    q, k, v = (jax.device_put(np.asarray(np.random.default_rng(s).standard_normal((650, 3, 64)), "bfloat16")) for s in range(3))
    jax.jit(kj.pipeline(attention, force=True, strict=True))(q, k, v)
    loops = [i for c in calls for p in c.parts for s in p.program.stages for i in s.body if isinstance(i, bc.CpuLoop)]
    whole = loops[0].body  # blocks that no query's position cuts
    product = next(i for i in whole if isinstance(i, bc.Matmul))
    (largest,) = (i for i in whole if isinstance(i, bc.Reduce))
    (exponential,) = (i for i in whole if isinstance(i, bc.ExpRows))
    assert bc.ACTIVATIONS[product.activation] == "scale"
    assert product.out.ref == largest.x.ref == exponential.x.ref and product.out.ref.dtype == bc.DTYPE_CODE["bfloat16"]
    assert [i.adds for i in whole if isinstance(i, bc.Matmul)] == [False, True]


def test_a_program_without_loops_reads_its_rows_where_they_lie() -> None:
    t = Tiles((19,), 8)
    t.store(t.matmul(t.load((19, 512), streams=((0,), ())), t.load((512, 8))), (19, 8), ((0,), ()))
    (product,) = lower_program(t.program(), "test").stages[0].body
    assert isinstance(product, bc.Matmul) and product.x.ref.space == bc.IN


def test_a_product_stores_its_columns_in_the_order_in_which_they_are_read() -> None:
    t = Tiles((19,), 8)
    y = t.matmul(t.load((19, 5), streams=((0,), ())), t.load((5, 4, 16)))
    turned = t.op("transpose", y, shape=(16, 4), permutation=(0, 2, 1))
    t.store(t.op("tanh", turned), (19, 16, 4), ((0,), (), ()))
    product, vector = lower_program(t.program(), "test").stages[0].body
    assert isinstance(product, bc.Matmul) and isinstance(vector, bc.CpuVector)
    assert [o.strides for o in vector.loads] == [(1,)]
    x, w = array(19, 5), array(5, 4, 16)
    (got,) = run(t.program(), x, w)
    close(got, np.tanh(np.einsum("rk,kab->rba", x, w)))


def test_a_reader_that_transposes_a_reshaped_product_does_not_order_its_columns() -> None:
    t = Tiles((19,), 8)
    y = t.matmul(t.load((19, 5), streams=((0,), ())), t.load((5, 1, 4, 16)))
    turned = t.transpose(t.reshape(y, (4, 16)), (0, 2, 1))
    t.store(t.op("tanh", turned), (19, 16, 4), ((0,), (), ()))
    x, w = array(19, 5), array(5, 1, 4, 16)
    (got,) = run(t.program(), x, w)
    close(got, np.tanh(np.einsum("rk,kab->rba", x, w[:, 0])))

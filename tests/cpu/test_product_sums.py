"""Sums of two products of float32: the second adds to what the first has stored, and a bias of the sum is the first one's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax import _cpu
from kitsune_jax.targets.cpu import bytecode as bc
from kitsune_jax.targets.cpu.bytecode import encode
from kitsune_jax.targets.cpu.lower import lower_program
from tests.support.lowered import BF16, ROW, array, close, kinds, run
from tests.support.tiles import Tiles


def cell(rows: int, k: int, m: int, n: int, bias: bool = True, activation: str = "tanh", dtype: str = "float32") -> Tiles:
    """activation(x @ a + h @ b + bias)."""
    t = Tiles((rows,), 8)
    x, h = t.load((rows, k), dtype, ROW), t.load((rows, m), dtype, ROW)
    y = t.op("add", t.matmul(x, t.load((k, n), dtype)), t.matmul(h, t.load((m, n), dtype)))
    if bias:
        y = t.op("add", y, t.broadcast(t.load((n,), dtype), (n,), (1,)))
    t.store(t.op(activation, y) if activation else y, (rows, n), ROW)
    return t


def operands(rows: int, k: int, m: int, n: int, bias: bool = True, dtype: object = np.float32) -> list[np.ndarray]:
    return [array(*s, dtype=dtype) for s in ((rows, k), (rows, m), (k, n), (m, n), *([(n,)] if bias else []))]


def expected(x: np.ndarray, h: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray | float = 0.0) -> np.ndarray:
    x, h, a, b, c = (np.asarray(v, np.float64) for v in (x, h, a, b, c))
    return x @ a + h @ b + c


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows,k,m,n", [(1, 3, 5, 7), (37, 13, 1, 33), (16, 1, 64, 1), (29, 40, 17, 70)])
def test_the_second_product_adds(rows: int, k: int, m: int, n: int, bias: bool) -> None:
    t, inputs = cell(rows, k, m, n, bias), operands(rows, k, m, n, bias)
    (y,) = run(t.program(), *inputs)
    close(y, np.tanh(expected(*inputs)).astype(np.float32), 1e-4)
    body = lower_program(t.program(), "test").stages[0].body
    products = [i for i in body if isinstance(i, bc.Matmul)]
    assert [p.adds for p in products] == [False, True] and products[0].out == products[1].out
    assert [p.bias >= 0 for p in products] == [bias, False]
    assert kinds(t.program()) == ["Matmul", "Matmul", "Vector"], "nothing else adds"


def test_a_sum_goes_straight_to_its_output() -> None:
    t, inputs = cell(21, 5, 6, 9, activation=""), operands(21, 5, 6, 9)
    close(run(t.program(), *inputs)[0], expected(*inputs).astype(np.float32), 1e-5)
    assert kinds(t.program()) == ["Matmul", "Matmul"]


def test_products_that_are_read_again_are_added_apart() -> None:
    t = Tiles((19,), 8)
    x = t.load((19, 5), streams=ROW)
    p, q = t.matmul(x, t.load((5, 6))), t.matmul(x, t.load((5, 6)))
    t.store(t.op("add", p, q), (19, 6), ROW)
    t.store(t.op("mul", p, p), (19, 6), ROW)
    u, a, b = array(19, 5), array(5, 6), array(5, 6)
    total, square = run(t.program(), u, a, b)
    close(total, u @ a + u @ b)
    close(square, (u @ a) ** 2, 1e-4)
    assert not any(i.adds for i in lower_program(t.program(), "test").stages[0].body if isinstance(i, bc.Matmul))


def test_products_of_bfloat16_are_rounded_before_they_are_added() -> None:
    t, inputs = cell(19, 5, 6, 7, dtype="bfloat16"), operands(19, 5, 6, 7, dtype=BF16)
    run(t.program(), *inputs)
    assert not any(i.adds for i in lower_program(t.program(), "test").stages[0].body if isinstance(i, bc.Matmul))


@pytest.mark.parametrize("batch,width", [(1, 8), (37, 16), (130, 33)])
def test_a_state_that_is_the_sum_is_read_before_it_is_written(batch: int, width: int) -> None:
    """h <- x @ a + h @ b: the first product may not store to where the second one reads."""

    def simulate(x, a, b):
        def step(h, x):
            h = x @ a + h @ b
            return h, h * 2

        return jax.lax.scan(step, jnp.zeros((batch, width)), x)

    x, a, b = array(11, batch, width), array(width, width), array(width, width)
    a, b = a / width, b / width
    h, ys = jax.jit(kj.pipeline(simulate))(x, a, b)
    state, wanted = np.zeros((batch, width)), []
    for row in x.astype(np.float64):
        state = row @ a.astype(np.float64) + state @ b.astype(np.float64)
        wanted.append(2 * state)
    np.testing.assert_allclose(h, state, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ys, np.stack(wanted), rtol=1e-4, atol=1e-5)


def test_gradient_of_an_lstm() -> None:
    batch, width, steps = 40, 24, 9

    def loss(params, x):
        a, u, bias = params

        def step(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ a + h @ u + bias, 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((batch, width), x.dtype)
        return jnp.mean(jax.lax.scan(step, (start, start), x)[1] ** 2)

    params = (array(width, 4 * width) / 5, array(width, 4 * width) / 5, array(4 * width))
    x = array(steps, batch, width)
    value, grads = jax.jit(jax.value_and_grad(kj.pipeline(loss)))(params, x)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), (params, x))
        want, want_grads = jax.value_and_grad(loss)(*wide)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for got, w in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(got, w, rtol=2e-4, atol=2e-6 * float(np.abs(w).max() / 1e-2))


def weighted(rows: int, k: int, n: int, dtype: str = "float32", then: str = "") -> Tiles:
    """acc * factor + x @ w in float32, a step of attention by blocks of keys."""
    t = Tiles((rows,), 40)
    x, w = t.load((rows, k), dtype, ROW), t.load((k, n), dtype)
    acc, factor = t.load((rows, n), "float32", ROW), t.load((rows,), "float32", ROW[:1])
    y = t.op("add", t.op("mul", acc, t.broadcast(factor, (n,), (0,))), t.matmul(x, w, None, "float32"))
    t.store(t.op(then, y) if then else y, (rows, n), ROW)
    return t


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows,k,n", [(1, 3, 5), (37, 40, 16), (50, 64, 64), (97, 33, 70)])
def test_a_product_adds_to_what_an_elementwise_instruction_has_stored(rows: int, k: int, n: int, dtype: str) -> None:
    t = weighted(rows, k, n, dtype)
    own = {"float32": np.float32, "bfloat16": BF16, "float16": np.float16}[dtype]
    x, w, acc, factor = array(rows, k, dtype=own), array(k, n, dtype=own), array(rows, n), array(rows)
    wanted = acc * factor[:, None] + expected(x, x[:, :0], w, w[:0])
    close(run(t.program(), x, w, acc, factor)[0], wanted.astype(np.float32), 1e-4)
    assert kinds(t.program()) == ["Vector", "Matmul"]
    assert [i.adds for i in lower_program(t.program(), "test").stages[0].body if isinstance(i, bc.Matmul)] == [True]


def test_a_sum_that_elementwise_instructions_read_is_added_in_their_registers() -> None:
    t = weighted(21, 5, 9, then="tanh")
    x, w, acc, factor = array(21, 5), array(5, 9), array(21, 9), array(21)
    close(run(t.program(), x, w, acc, factor)[0], np.tanh(acc * factor[:, None] + x @ w), 1e-5)
    assert kinds(t.program()) == ["Matmul", "Vector"]


def accumulated(rows: int, n: int, blocks: int, read_twice: bool) -> Tiles:
    """The sum over blocks of 4 of x[:, block] @ w[block]; ``read_twice``: and of what has been added so far, stored by blocks."""
    t = Tiles((rows,), 24)
    x, w = t.input((rows, 4 * blocks), "float32", ROW), t.input((4 * blocks, n))
    out = t.output((rows, blocks * n), "float32", ROW) if read_twice else -1
    with t.loop(blocks, t.broadcast(t.literal(0.0), (n,), ())) as loop:
        part = t.op("exp", t.load_slice(x, (loop.index, 1, 4, 4)))
        total = t.op("add", loop.carries[0], t.matmul(part, t.load_slice(w, (loop.index, 0, 4, 4)), None, "float32"))
        if read_twice:
            t.store_slice(total, out, (loop.index, 1, n, n))
        loop.next(total)
    t.store(loop.results[0], (rows, n), ROW)
    return t


@pytest.mark.parametrize("read_twice", [False, True])
@pytest.mark.parametrize("rows,n,blocks", [(1, 2, 3), (37, 16, 1), (50, 40, 3)])
def test_a_product_adds_to_the_carry_of_its_loop(rows: int, n: int, blocks: int, read_twice: bool) -> None:
    t = accumulated(rows, n, blocks, read_twice)
    x, w = array(rows, 4 * blocks), array(4 * blocks, n)
    parts = np.exp(x.astype(np.float64)).reshape(rows, blocks, 4), w.astype(np.float64).reshape(blocks, 4, n)
    sums = np.cumsum(np.einsum("rbk,bkn->rbn", *parts), 1)
    words = encode(lower_program(t.program(), "test"))
    results = [np.empty(a.shape, np.float32) for a in t.program().outputs]
    for threads in (1, 2):
        _cpu.run(words, [x, w], results, threads)
    *by_block, got = results
    close(got, sums[:, -1].astype(np.float32), 1e-4)
    for each in by_block:
        close(each, sums.reshape(rows, blocks * n).astype(np.float32), 1e-4)
    (loop,) = (i for i in lower_program(t.program(), "test").stages[0].body if isinstance(i, bc.CpuLoop))
    assert [i.adds for i in loop.body if isinstance(i, bc.Matmul)] == [not read_twice]

"""The CPU code generator: tile programs written by hand, lowered, run by the simulator and by the executor, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from kitsune_jax.targets.cpu import bytecode as bc
from kitsune_jax.targets.cpu.lower import lower_program
from tests.support.bytecode_sim import simulate
from tests.support.lowered import BF16, RNG, ROW, array, close, kinds, relu_layer, run
from tests.support.tiles import Tiles

# Straight into place.


def nerf(width: int = 16, inputs: int = 5, rows: int = 37, tile_rows: int = 8) -> tuple[Tiles, list[np.ndarray]]:
    t = Tiles((rows,), tile_rows)
    arrays = [array(rows, inputs)]
    x = h = t.load((rows, inputs), streams=ROW)
    for layer in range(9):
        if layer == 4:
            h = t.concat(h, x, dimension=1)
        k, n = t.values[h].shape[0], 4 if layer == 8 else width
        arrays += [array(k, n) / k**0.5, array(n)]
        w, b = t.load((k, n)), t.load((n,))
        h = relu_layer(t, h, w, b, relu=layer < 8)
    t.store(h, (rows, 4), ROW)
    return t, arrays


def test_nerf_is_one_matmul_per_layer_and_one_copy() -> None:
    t, arrays = nerf()
    program = lower_program(t.program(), "nerf")
    body = program.stages[0].body
    assert [type(i).__name__.removeprefix("Cpu") for i in body] == ["Matmul"] * 4 + ["Vector"] + ["Matmul"] * 5
    matmuls = [i for i in body if isinstance(i, bc.Matmul)]
    assert matmuls[0].x.ref.space == bc.IN and matmuls[-1].out.ref.space == bc.OUT
    assert [m.activation for m in matmuls] == [1] * 8 + [0] and all(m.bias >= 0 for m in matmuls)
    assert matmuls[3].out.row_stride == matmuls[4].x.row_stride, "layer 4 writes into the concatenation"
    (copy,) = (i for i in body if isinstance(i, bc.CpuVector))
    assert copy.extents == (5,) and copy.loads[0].ref.space == bc.IN
    x, *weights = arrays
    h = x
    for layer in range(9):
        if layer == 4:
            h = np.concatenate([h, x], 1)
        h = h @ weights[2 * layer] + weights[2 * layer + 1]
        h = np.maximum(h, 0) if layer < 8 else h
    close(run(t.program(), *arrays)[0], h, 1e-4)


def test_scratch_is_shared_by_values_that_are_not_alive_together() -> None:
    t, _ = nerf(width=256, inputs=63, rows=96, tile_rows=96)
    assert lower_program(t.program(), "nerf").stages[0].scratch_bytes <= 96 * (256 + 320) * 4


def test_one_row_and_prime_rows() -> None:
    for rows, tile_rows in ((1, 96), (7, 96), (13, 4)):
        t, (x, *weights) = nerf(rows=rows, tile_rows=tile_rows)
        whole = simulate(lower_program(t.program(), "a"), [x, *weights], [(rows, 4)])[0]
        again = nerf(rows=rows, tile_rows=1)[0]
        close(simulate(lower_program(again.program(), "b"), [x, *weights], [(rows, 4)])[0], whole)


def layer_norm(t: Tiles, x: int, n: int) -> int:
    mean = t.op("div", t.broadcast(t.reduce("sum", x, (1,)), (1,), (0,)), t.literal(float(n)))
    d = t.op("sub", x, t.broadcast(mean, (n,), (0, 1)))
    var = t.op("div", t.broadcast(t.reduce("sum", t.op("square", d), (1,)), (1,), (0,)), t.literal(float(n)))
    r = t.op("rsqrt", t.op("add", var, t.literal(1e-5)))
    y = t.op("mul", d, t.broadcast(r, (n,), (0, 1)))
    y = t.op("mul", y, t.broadcast(t.load((n,)), (n,), (1,)))
    return t.op("add", y, t.broadcast(t.load((n,)), (n,), (1,)))


def test_layer_norm() -> None:
    t = Tiles((21,), 6)
    x = t.load((21, 10), streams=ROW)
    t.store(layer_norm(t, x, 10), (21, 10), ROW)
    a, g, b = array(21, 10), array(10), array(10)
    want = (a - a.mean(1, keepdims=True)) / np.sqrt(a.var(1, keepdims=True) + 1e-5) * g + b
    close(run(t.program(), a, g, b)[0], want.astype(np.float32))
    assert kinds(t.program()) == ["Reduce", "Vector", "Vector", "Reduce", "Vector", "Vector"]


def test_softmax_reads_the_input_in_place() -> None:
    t = Tiles((9,), 4)
    x = t.load((9, 7), streams=ROW)
    m = t.broadcast(t.reduce("max", x, (1,)), (7,), (0,))
    e = t.op("exp", t.op("sub", x, m))
    t.store(t.op("div", e, t.broadcast(t.reduce("sum", e, (1,)), (7,), (0,))), (9, 7), ROW)
    a = array(9, 7) * 5
    want = np.exp(a - a.max(1, keepdims=True))
    close(run(t.program(), a)[0], want / want.sum(1, keepdims=True))
    assert kinds(t.program()) == ["Reduce", "Vector", "Reduce", "Vector"]


# Layouts.


def test_feature_major_arrays() -> None:
    """[n, rows] in and out: the matmul copies its x to rows, and its result is transposed by one copy."""
    t = Tiles((11,), 4)
    x = t.load((3, 11), streams=((), (0,)))
    y = t.matmul(x, t.load((3, 5)))
    t.store(t.op("tanh", y), (5, 11), ((), (0,)))
    a, w = array(3, 11), array(3, 5)
    close(run(t.program(), a, w)[0], np.tanh(a.T @ w).T)
    assert kinds(t.program()) == ["Vector", "Matmul", "Vector"]


def test_weight_transposed_by_its_prep() -> None:
    t = Tiles((6,), 4)
    x, w = t.load((6, 3), streams=ROW), t.load((5, 3))
    y = t.matmul(x, w, (((1,), (1,)), ((), ())))
    t.store(y, (6, 5), ROW)
    a, b = array(6, 3), array(5, 3)
    close(run(t.program(), a, b)[0], a @ b.T)
    assert kinds(t.program()) == ["Matmul"]


@pytest.mark.parametrize("axes", [(2, 5), (5, 2), (1, 7), (7, 1), (2, 3, 4)])
def test_every_axis_pattern_is_gathered_and_scattered(axes: tuple[int, ...]) -> None:
    """Arrays that have the stream axes in another order, or lack some of them, keep a feature dimension in the middle."""
    k = len(axes)
    t = Tiles(axes, 4)
    order = tuple(reversed(range(k)))
    shape = (*(axes[a] for a in order), 3)
    x = t.load(shape, streams=(*((a,) for a in order), ()))
    first = t.load((axes[0], 3), streams=((0,), ()))
    last = t.load((3, axes[-1]), streams=((), (k - 1,)))
    y = t.op("mul", t.op("add", x, first), last)
    t.store(y, shape, (*((a,) for a in order), ()))
    t.store(y, (*axes, 3), (*((a,) for a in range(k)), ()))
    a, b, c = array(*shape), array(axes[0], 3), array(3, axes[-1])
    rows = a.transpose(*reversed(range(k)), k)
    want = (rows + b.reshape(axes[0], *(1,) * (k - 1), 3)) * c.T.reshape(*(1,) * (k - 1), axes[-1], 3)
    got = run(t.program(), a, b, c)
    close(got[0], want.transpose(*reversed(range(k)), k))
    close(got[1], want)


def test_structural_ops_spend_no_instruction() -> None:
    t = Tiles((5,), 2)
    x = t.load((5, 4, 6), streams=((0,), (), ()))
    y = t.transpose(x, (0, 2, 1))
    y = t.op("rev", y, dimensions=(1,))
    y = t.op("slice", y, shape=(3, 4), start=(0, 1, 0), limit=(-1, 6, 4), strides=(1, 2, 1))
    y = t.op("neg", y)
    y = t.reshape(y, (12,))
    t.store(y, (5, 12), ROW)
    a = array(5, 4, 6)
    close(run(t.program(), a)[0], -a.transpose(0, 2, 1)[:, ::-1][:, 1:6:2].reshape(5, 12))
    assert kinds(t.program()) == ["Vector"]


def test_reshape_of_a_transposed_value_copies_once() -> None:
    t = Tiles((5,), 2)
    x = t.load((5, 2, 3), streams=((0,), (), ()))
    y = t.reshape(t.transpose(x, (0, 2, 1)), (6,))
    t.store(t.reduce("sum", y, (1,)), (5,), ((0,),))
    t.store(t.op("exp", y), (5, 6), ROW)
    a = array(5, 2, 3)
    got = run(t.program(), a)
    close(got[0], a.sum((1, 2)))
    close(got[1], np.exp(a.transpose(0, 2, 1).reshape(5, 6)))
    assert kinds(t.program()).count("Vector") == 2


def test_batched_heads() -> None:
    """x[rows, h, k] with w[h, k, n]: a batch of matmuls on strided columns, no copy; the [h, rows, n] result is one."""
    t = Tiles((7,), 4)
    x, w = t.load((7, 2, 3), streams=((0,), (), ())), t.load((2, 3, 5))
    y = t.matmul(x, w, (((2,), (1,)), ((1,), (0,))))
    t.store(y, (7, 2, 5), ((0,), (), ()))
    t.store(y, (2, 7, 5), ((), (0,), ()))
    a, b = array(7, 2, 3), array(2, 3, 5)
    want = np.einsum("rhk,hkn->rhn", a, b)
    got = run(t.program(), a, b)
    close(got[0], want)
    close(got[1], want.transpose(1, 0, 2))
    assert kinds(t.program()) == ["Matmul", "Vector"]


@pytest.mark.parametrize("perm", [(0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2)])
def test_free_dimensions_of_x_are_more_rows(perm: tuple[int, ...]) -> None:
    t = Tiles((5,), 2)
    x, w = t.load((5, 3, 4), streams=((0,), (), ())), t.load((2, 4, 6))
    y = t.matmul(x, w, (((2,), (1,)), ((), ())), perm=perm)
    t.store(t.op("tanh", y), (5, *t.values[y].shape), ((0,), (), (), ()))
    a, b = array(5, 3, 4), array(2, 4, 6)
    close(run(t.program(), a, b)[0], np.tanh(np.einsum("rfk,akn->rfan", a, b).transpose(perm)))
    assert kinds(t.program())[0] == "Matmul"


def test_two_contracted_dimensions_in_another_order() -> None:
    t = Tiles((5,), 2)
    x, w = t.load((5, 3, 4), streams=((0,), (), ())), t.load((4, 6, 3))
    y = t.matmul(x, w, (((2, 1), (0, 2)), ((), ())))
    t.store(y, (5, 6), ROW)
    a, b = array(5, 3, 4), array(4, 6, 3)
    close(run(t.program(), a, b)[0], np.einsum("rjk,knj->rn", a, b))
    assert kinds(t.program()) == ["Matmul"]


# Epilogues.


def test_bias_of_extent_one_rows_and_swapped_operands() -> None:
    t = Tiles((5,), 2)
    x, w, b = t.load((5, 3), streams=ROW), t.load((3, 4)), t.load((1, 4))
    y = t.op("add", b, t.matmul(x, w), shape=(4,))
    t.store(t.op("max", t.literal(0.0), y), (5, 4), ROW)
    a, c, d = array(5, 3), array(3, 4), array(1, 4)
    close(run(t.program(), a, c, d)[0], np.maximum(a @ c + d, 0))
    assert kinds(t.program()) == ["Matmul"]


def test_an_intermediate_with_another_reader_is_not_fused_away() -> None:
    t = Tiles((5,), 2)
    x, w, b = t.load((5, 3), streams=ROW), t.load((3, 4)), t.load((4,))
    y = t.op("add", t.matmul(x, w), t.broadcast(b, (4,), (1,)))
    t.store(t.op("max", y, t.literal(0.0)), (5, 4), ROW)
    t.store(t.op("gt", y, t.literal(0.0), dtype="bool"), (5, 4), ROW)
    a, c, d = array(5, 3), array(3, 4), array(4)
    got = run(t.program(), a, c, d)
    close(got[0], np.maximum(a @ c + d, 0))
    assert np.array_equal(got[1], a @ c + d > 0)
    assert kinds(t.program()) == ["Matmul", "Vector"]


def test_a_streamed_addend_is_not_a_bias() -> None:
    t = Tiles((5,), 2)
    x, w = t.load((5, 4), streams=ROW), t.load((4, 4))
    t.store(t.op("add", t.matmul(x, w), x), (5, 4), ROW)
    a, c = array(5, 4), array(4, 4)
    close(run(t.program(), a, c)[0], a @ c + a)
    assert lower_program(t.program(), "t").stages[0].body[0].bias == -1


def test_bf16_matmul_bias_relu_and_conversion_in_one() -> None:
    t = Tiles((5,), 2)
    x, w, b = t.load((5, 8), "bfloat16", ROW), t.load((8, 4), "bfloat16"), t.load((4,), "bfloat16")
    y = t.op("add", t.matmul(x, w, out="float32"), t.op("convert_element_type", t.broadcast(b, (4,), (1,)), dtype="float32",
                                                        new_dtype="float32"))  # fmt: skip
    t.store(t.op("convert_element_type", y, dtype="bfloat16", new_dtype="bfloat16"), (5, 4), ROW)
    a, c, d = array(5, 8, dtype=BF16), array(8, 4, dtype=BF16), array(4, dtype=BF16)
    want = (a.astype(np.float32) @ c.astype(np.float32) + d.astype(np.float32)).astype(BF16)
    close(run(t.program(), a, c, d)[0], want, 1e-2)
    assert kinds(t.program()) == ["Matmul"]


# Pointwise groups and dtypes.


def test_explicit_rounding_to_bf16_is_kept() -> None:
    t = Tiles((6,), 4)
    x = t.load((6, 3), streams=ROW)
    y = t.op("convert_element_type", t.op("exp", x), dtype="bfloat16", new_dtype="bfloat16")
    z = t.op("mul", t.op("convert_element_type", y, dtype="float32", new_dtype="float32"), t.literal(3.0))
    t.store(z, (6, 3), ROW)
    a = array(6, 3)
    got = run(t.program(), a)[0]
    assert np.array_equal(got, np.exp(a).astype(BF16).astype(np.float32) * np.float32(3))
    assert kinds(t.program()) == ["Vector"]


def test_every_result_of_bf16_is_rounded() -> None:
    t = Tiles((6,), 4)
    x = t.load((6, 3), "bfloat16", ROW)
    t.store(t.op("sub", t.op("add", x, t.literal(256.0, "bfloat16")), t.literal(256.0, "bfloat16")), (6, 3), ROW)
    a = array(6, 3, dtype=BF16)
    rounded = (a.astype(np.float32) + 256).astype(BF16)
    assert np.any(rounded.astype(np.float32) - 256 != a.astype(np.float32))
    close(run(t.program(), a)[0], (rounded.astype(np.float32) - 256).astype(BF16), 0)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_integers(dtype: str) -> None:
    t = Tiles((6,), 4)
    x = t.load((6, 3), dtype, ROW)
    big = int(np.iinfo(dtype).max)
    y = t.op("xor", t.op("mul", x, x), t.literal(big, dtype))
    t.store(y, (6, 3), ROW)
    t.sink(y, "sum", (0,))
    a = RNG.integers(0, 100, (6, 3)).astype(dtype)
    want = (a * a) ^ np.asarray(big, dtype)
    got = run(t.program(), a)
    assert got[0].dtype == dtype and np.array_equal(got[0], want)
    assert np.array_equal(got[1], want.sum(0, dtype=dtype))


def test_bool_select_and_float64() -> None:
    t = Tiles((6,), 4)
    x = t.load((6, 3), "float64", ROW)
    mask = t.op("and", t.op("gt", x, t.literal(0.0, "float64"), dtype="bool"), t.load((6, 3), "bool", ROW))
    y = t.op("select_n", mask, x, t.op("exp", x), dtype="float64")
    t.store(y, (6, 3), ROW)
    t.store(t.reduce("or", mask, (1,)), (6,), ((0,),))
    which = t.op("convert_element_type", mask, dtype="int32", new_dtype="int32")
    t.store(t.op("select_n", which, x, y, dtype="float64"), (6, 3), ROW)
    a, m = array(6, 3, dtype=np.float64), RNG.random((6, 3)) < 0.5
    got = run(t.program(), a, m)
    both = (a > 0) & m
    close(got[0], np.where(both, np.exp(a), a), 1e-15)
    assert np.array_equal(got[1], both.any(1))
    close(got[2], np.where(both, np.exp(a), a), 1e-15)


def test_float64_matmul_with_bias() -> None:
    t = Tiles((5,), 2)
    x, w, b = t.load((5, 3), "float64", ROW), t.load((3, 4), "float64"), t.load((4,), "float64")
    t.store(relu_layer(t, x, w, b), (5, 4), ROW)
    a, c, d = (array(*s, dtype=np.float64) for s in ((5, 3), (3, 4), (4,)))
    close(run(t.program(), a, c, d)[0], np.maximum(a @ c + d, 0), 1e-14)


def test_more_values_than_registers() -> None:
    t = Tiles((6,), 4)
    x = t.load((6, 3), streams=ROW)
    parts = [t.op("mul", x, t.literal(float(k))) for k in range(1, 50)]
    total = parts[-1]
    for p in parts[:-1]:
        total = t.op("sub", total, p)
    t.store(total, (6, 3), ROW)
    a = array(6, 3)
    close(run(t.program(), a)[0], (a * (49 - sum(range(1, 49)))).astype(np.float32), 1e-4)
    assert kinds(t.program()).count("Vector") > 1


def test_row_index_and_iota() -> None:
    t = Tiles((2, 3, 4), 5)
    y = t.op("add", t.index((0, 2), (6,)), t.iota((6,), 1))
    t.store(y, (2, 3, 4, 6), ((0,), (1,), (2,), ()))
    masked = t.op("select_n", t.op("lt", t.index((1, 2), (6,), "float32"), t.iota((6,), 1, "float32"), dtype="bool"),
                  t.literal(0.0), t.literal(1.0), shape=(6,), dtype="float32")  # fmt: skip
    t.store(masked, (2, 3, 4, 6), ((0,), (1,), (2,), ()))
    t.store(t.iota((6,), 1, "int64"), (24, 6), ((0, 1, 2), ()))
    got = run(t.program())
    i, j, k, n = np.ogrid[:2, :3, :4, :6]
    assert np.array_equal(got[0], np.broadcast_to(i * 4 + k + n + 0 * j, (2, 3, 4, 6)))
    assert np.array_equal(got[1], np.broadcast_to((j * 4 + k < n) + 0.0 * i, (2, 3, 4, 6)))
    assert np.array_equal(got[2], np.broadcast_to(np.arange(6), (24, 6)))

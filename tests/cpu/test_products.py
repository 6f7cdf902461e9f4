"""How products of bfloat16 operands are multiplied: the field of the CPU program, and that every choice computes the same."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax import _cpu
from kitsune_jax.ops.graph import make_params
from kitsune_jax.program.ir import ArrayType, Instr, Program, SinkType, TileProgram
from kitsune_jax.targets.cpu import bytecode as bc
from kitsune_jax.targets.cpu import bytecode as cpu_bytecode
from kitsune_jax.targets.cpu import lower as cpu_lower
from kitsune_jax.targets.cpu.bytecode import encode
from tests.support.checks import isa
from tests.support.lowered import ROW, array, plain, relu_layer
from tests.support.tiles import Tiles

__all__ = ["isa"]  # a fixture

BF16 = ml_dtypes.bfloat16
ROWS, TILE, K, N = 150, 64, 45, 70  # neither K nor N a multiple of any kernel's step; a short last tile


def training(dtype: str = "bfloat16") -> TileProgram:
    """y = relu(x @ w + b), and the gradient x^T y in float32."""
    t = Tiles((ROWS,), TILE)
    x = t.load((ROWS, K), dtype, ROW)
    y = relu_layer(t, x, t.load((K, N), dtype), t.load((N,), dtype))
    t.store(y, (ROWS, N), ROW)
    t.outputs.append(ArrayType((K, N), "float32", False))
    t.sinks.append(SinkType("sum", (K, N), "float32", len(t.outputs) - 1))
    params = make_params(sink=0, how="sum", x_contract=(0,), y_contract=(0,), x_batch=(), y_batch=())
    t.stages[-1].append(Instr("matmul_sink", (x, y), (), params))
    return t.program()


def operands(dtype: object = BF16) -> list[np.ndarray]:
    return [array(*shape, dtype=dtype) for shape in ((ROWS, K), (K, N), (N,))]


def run(words: np.ndarray, x: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    y, g = np.zeros((ROWS, N), x[0].dtype), np.zeros((K, N), np.float32)
    _cpu.run(words, [plain(a) for a in x], [plain(y), g], 2)
    return y, g


@pytest.mark.parametrize("isa", _cpu.available_isas(), indirect=True)
@pytest.mark.parametrize("gradients", bc.PRODUCTS)
@pytest.mark.parametrize("weights", bc.PRODUCTS)
def test_every_choice_computes_the_same(isa, weights, gradients):
    x, w, b = operands()
    y, g = run(cpu_lower.generate(Program.of(training()), "training", [cpu_bytecode.Products(weights, gradients)]), [x, w, b])
    sums, biased = x.astype(np.float64) @ w.astype(np.float64), b.astype(np.float64)
    # Sum and result are rounded by half a unit each, or by one where the order of additions decides.
    slack = 2**-8 * np.abs(sums) + 2**-8 * np.abs(sums + biased) + 1e-5
    assert np.all(np.abs(y.astype(np.float64) - np.maximum(sums + biased, 0)) <= slack)
    np.testing.assert_allclose(g, x.astype(np.float64).T @ y.astype(np.float64), rtol=1e-5, atol=1e-3)


@pytest.mark.skipif("avx512" not in _cpu.available_isas(), reason="compares two kernel tables of AVX-512")
def test_widened_products_are_those_of_the_table_without_native_ones():
    x, before = operands(), _cpu.isa()
    widened = cpu_lower.generate(Program.of(training()), "training", [cpu_bytecode.Products("widened", "widened")])
    try:
        assert _cpu.set_isa("avx512")
        want = run(widened, x)
    finally:
        assert _cpu.set_isa(before)
    for got, one in zip(run(widened, x), want, strict=True):
        assert got.tobytes() == one.tobytes()


def test_one_program_may_mix_choices():
    """Two layers with one weight each: the choice is the weight's, and equal weights of different choices are packed twice."""
    code = cpu_lower.lower_program(training(), "training")
    (weight,) = (i for i, p in enumerate(code.preps) if p.kind == bc.WEIGHT)
    (stage,) = code.stages
    (product,) = (i for i in stage.body if isinstance(i, bc.Matmul))
    other = dataclasses.replace(
        product, weight=len(code.preps), out=dataclasses.replace(product.out, ref=bc.CpuRef(bc.OUT, 2, 0, product.out.ref.dtype))
    )
    mixed = dataclasses.replace(
        code,
        outputs=(*code.outputs, code.outputs[0]),
        preps=(*code.preps, dataclasses.replace(code.preps[weight], product=bc.PRODUCTS.index("widened"))),
        stages=(dataclasses.replace(stage, body=(*stage.body, other)),),
    )
    x = operands()
    y, g, again = np.zeros((ROWS, N), BF16), np.zeros((K, N), np.float32), np.zeros((ROWS, N), BF16)
    _cpu.run(encode(mixed), [plain(a) for a in x], [plain(y), g, plain(again)], 1)
    assert y.tobytes() == run(cpu_lower.generate(Program.of(training()), "t"), x)[0].tobytes()
    assert (
        again.tobytes()
        == run(cpu_lower.generate(Program.of(training()), "t", [cpu_bytecode.Products("widened", "best")]), x)[0].tobytes()
    )


def test_only_bfloat16_has_a_choice():
    choice = cpu_bytecode.Products("widened", "widened")
    for dtype in ("float32", "float16"):
        assert (
            encode(cpu_lower.lower_program(training(dtype), "t", choice)).tolist()
            == encode(cpu_lower.lower_program(training(dtype), "t")).tolist()
        )
    fields = [p.product for p in cpu_lower.lower_program(training(), "t", choice).preps]
    assert sorted(fields) == [0, 1]  # the bias is no product
    with pytest.raises(ValueError, match="one of best, widened, dots, tiles, not 'amx'"):
        cpu_bytecode.Products("amx")


@pytest.mark.parametrize("dtype, value, message", [
    ("bfloat16", 4, "product): 4 is not in 0..3"),
    ("bfloat16", -1, "product): -1 is not in 0..3"),
    ("float32", 1, "product is 1, which only bfloat16 can have, and this is float32"),
    ("float16", 3, "product is 3, which only bfloat16 can have, and this is float16"),
])  # fmt: skip
def test_forged_fields_are_refused(dtype, value, message):
    code = cpu_lower.lower_program(training(dtype), "t")
    weights = tuple(dataclasses.replace(p, product=value) if p.kind == bc.WEIGHT else p for p in code.preps)
    assert message in _cpu.validate(encode(dataclasses.replace(code, preps=weights)))
    (stage,) = code.stages
    body = tuple(dataclasses.replace(i, product=value) if isinstance(i, bc.AccumulateMatmul) else i for i in stage.body)
    assert message in _cpu.validate(encode(dataclasses.replace(code, stages=(dataclasses.replace(stage, body=body),))))


def test_a_dense_operand_is_no_product():
    code = cpu_lower.lower_program(training(), "t")
    preps = tuple(dataclasses.replace(p, product=1) for p in code.preps if p.kind == bc.DENSE)
    words = encode(dataclasses.replace(code, preps=(*(p for p in code.preps if p.kind == bc.WEIGHT), *preps)))
    assert "a dense operand is no product" in _cpu.validate(words)


@pytest.mark.parametrize("shape", [(45, 77), (33, 999), (129, 109)])
def test_weight_gradients_of_odd_widths(shape: tuple[int, int]) -> None:
    """Sums are put together by jobs of 1 024, which begin inside of a row, of a group of columns or of a block of rows."""
    rng = np.random.default_rng(3)
    x, g = (rng.integers(-2, 3, (701, n)).astype(np.float32) for n in shape)
    step = jax.value_and_grad(lambda w, x, g: jnp.sum((x @ w) * g))
    _, got = jax.jit(kj.pipeline(step, strict=True, force=True))(np.zeros(shape, np.float32), x, g)
    np.testing.assert_array_equal(got, x.T @ g)

"""What CUDA kernels compare has the bits of its jaxpr, wherever it is made: gradients of maxima by each argument alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kitsune_jax as kj
from kernel_checks import sass
from kitsune_jax import targets
from kitsune_jax.program.ir import Program
from kitsune_jax.targets.cuda import lower, nvrtc, pointwise
from tests.support.checks import close, in_float64
from tests.support.cuda_run import by_hand, kernel_cache, run_program, tiled
from tests.support.tiles import Tiles

__all__ = ["kernel_cache"]  # a fixture
pytestmark = [
    pytest.mark.usefixtures("kernel_cache"),
    pytest.mark.filterwarnings("error:kitsune_jax could not"),  # a failure of ours that falls back is a failure here
]
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
HALF = ("bfloat16", "float16")
ROWS = 131
ROW = ((0,), ())

# -- programs: everything equals what NumPy, which rounds after every operation, has stored


def drawn(*shape: int, dtype: str, whole: bool = False) -> np.ndarray:
    rng = np.random.default_rng(17)
    numbers = rng.integers(-40, 41, shape) if whole else rng.standard_normal(shape)
    return numbers.astype(DTYPES[dtype])


def equal(t: Tiles, x: int, stored: np.ndarray, *arrays: np.ndarray, dtype: str) -> None:
    """The tile ``x`` equals ``stored``, which is the last input, in a kernel that says so."""
    y = t.load(stored.shape, dtype, ROW)
    t.store(t.op("convert_element_type", t.op("eq", x, y, dtype="bool"), dtype="float32"), stored.shape, ROW)
    assert stored.dtype == DTYPES[dtype]
    (got,) = run_program(t.program(), *arrays, stored)
    assert got.all()


@pytest.mark.parametrize("width", [1, 5, 67])  # numbers of a row, a part of a block, several blocks
@pytest.mark.parametrize("dtype", HALF)
def test_pointwise_operators_round(dtype: str, width: int) -> None:
    x, y = drawn(ROWS, width, dtype=dtype), drawn(ROWS, width, dtype=dtype)[::-1]
    t = Tiles((ROWS,), 64)
    a, b = (t.load((ROWS, width), dtype, ROW) for _ in range(2))
    score = t.op("mul", t.op("add", a, b), t.op("mul", b, b))
    equal(t, score, (x + y) * (y * y), x, y, dtype=dtype)


def test_it_is_the_rounding_that_makes_them_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise, "rounded", lambda kind, template, dtype: template)
    with pytest.raises(AssertionError):
        test_pointwise_operators_round("bfloat16", 5)


@pytest.mark.parametrize("dtype", HALF)
def test_a_conversion_rounds(dtype: str) -> None:
    x = drawn(ROWS, 9, dtype="float32")
    t = Tiles((ROWS,), 64)
    a = t.op("convert_element_type", t.load((ROWS, 9), "float32", ROW), dtype=dtype)
    equal(t, t.op("add", a, a), x.astype(DTYPES[dtype]) + x.astype(DTYPES[dtype]), x, dtype=dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [1, 40])
@pytest.mark.parametrize("dtype", HALF)
def test_a_product_rounds_in_front_of_its_bias(dtype: str, width: int) -> None:
    """Whole numbers: float32 adds them up exactly, in any order."""
    x, w = drawn(ROWS, 16, dtype=dtype, whole=True), drawn(16, width, dtype=dtype, whole=True)
    b = drawn(width, dtype=dtype) * DTYPES[dtype](100)
    t = Tiles((ROWS,), 64)
    product = t.matmul(t.load((ROWS, 16), dtype, ROW), t.load((16, width), dtype))
    bias = t.broadcast(t.load((width,), dtype), (width,), (1,))
    stored = (x.astype(np.float32) @ w.astype(np.float32)).astype(DTYPES[dtype]) + b
    equal(t, t.op("add", product, bias), stored, x, w, b, dtype=dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_a_sum_of_a_row_rounds(dtype: str) -> None:
    x, y = drawn(ROWS, 24, dtype=dtype, whole=True), drawn(ROWS, 1, dtype=dtype)
    t = Tiles((ROWS,), 64)
    total = t.broadcast(t.reduce("sum", t.load((ROWS, 24), dtype, ROW), (1,)), (1,), (0,))
    sums = x.astype(np.float32).sum(1, keepdims=True).astype(DTYPES[dtype])
    equal(t, t.op("mul", total, t.load((ROWS, 1), dtype, ROW)), sums * y, x, y, dtype=dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_a_maximum_that_leaves_is_of_rounded_values(dtype: str) -> None:
    x, y = drawn(ROWS, 21, dtype=dtype), drawn(ROWS, 21, dtype=dtype)[::-1]
    t = Tiles((ROWS,), 64)
    a, b = (t.load((ROWS, 21), dtype, ROW) for _ in range(2))
    score = t.op("mul", t.op("add", a, b), t.op("mul", b, b))
    t.store(t.reduce("max", score, (1,)), (ROWS,), ((0,),))
    t.sink(score, "min", (0,))
    want = (x + y) * (y * y)
    largest, least = run_program(t.program(), x, y)
    np.testing.assert_array_equal(largest, want.max(1))
    np.testing.assert_array_equal(least, want.min(0))


# -- float32: the host's compiler contracts nothing, so the machine code has to say it


def machine_code(t: Tiles, sm: int) -> list[str]:
    call = tiled(Program.of(t.program()))
    source = lower.generate_call_kernel(call, (by_hand(call.parts[0].program, sm, 1, 1),), "program").source
    found = sass.disassemble(nvrtc.compile(source, "sm_90a" if sm == 900 else "sm_80").cubin)
    return [str(i) for i in found.instructions]


@pytest.mark.skipif(not sass.available() or not nvrtc.available(), reason="no NVRTC, or no disassembler")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("sm", [900, 800])
@pytest.mark.parametrize("kind", ["mul", "square", "exp"])
def test_no_multiplication_and_addition_in_one(kind: str, sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is compared; else ptxas is free to. An exponential ends with a multiplication."""

    def contracted() -> int:
        t = Tiles((64,), 64)
        x, y, z = (t.load((64, 8), "float32", ROW) for _ in range(3))
        product = t.op(kind, x, y) if kind == "mul" else t.op(kind, x)
        equals = t.op("eq", t.op("add", product, y), z, dtype="bool")
        t.store(t.op("convert_element_type", equals, dtype="float32"), (64, 8), ROW)
        return sum("FFMA" in line for line in machine_code(t, sm))

    ours = contracted()
    monkeypatch.setattr(pointwise, "rounded", lambda kind, template, dtype: template)
    assert ours < contracted()
    assert kind == "exp" or ours == 0


# -- through the public API

NODES, EDGES = 37, 509
RNG = np.random.default_rng(11)
SENDERS, RECEIVERS = RNG.integers(0, NODES, (2, EDGES), np.int32)
RECEIVERS[: EDGES // 2], SENDERS[EDGES // 3 :] = 5, 3  # a node of half of all edges
RECEIVERS[:NODES] = np.arange(NODES)
LARGEST = RNG.integers(0, 40, ROWS)  # column of each row


def bumps() -> np.ndarray:
    """What makes one column of each row the largest, however the rest is rounded."""
    return np.eye(40)[LARGEST] * 4


def attention_of_edges(h: Any, w: Any, a: Any, g: Any) -> Any:
    z = (h @ w).reshape(NODES, 2, 3)
    of_senders, of_receivers = (z * a[0]).sum(-1), (z * a[1]).sum(-1)
    scores = jax.nn.leaky_relu(of_senders[SENDERS] + of_receivers[RECEIVERS], 0.2)
    largest = jax.ops.segment_max(scores, RECEIVERS, num_segments=NODES)
    weights = jnp.exp(scores - largest[RECEIVERS])
    weights = weights / jax.ops.segment_sum(weights, RECEIVERS, num_segments=NODES)[RECEIVERS]
    return jnp.sum(jax.ops.segment_sum(weights[..., None] * z[SENDERS], RECEIVERS, num_segments=NODES) * g)


def largest_of_rows(x: Any, w: Any, b: Any, y: Any) -> Any:
    v = x @ w + b + y
    return jnp.sum((v * v * 0.3 + v).max(-1) * x[:, 0])


def largest_exponential(x: Any, w: Any, b: Any, y: Any) -> Any:
    v = jnp.exp(jax.nn.silu((x @ w + b + y) * 0.5)) * jax.lax.rsqrt(1 + jnp.square(x[:, :1]))
    return jnp.sum(v.max(-1) * x[:, 0])


def softmax_with_a_maximum(x: Any, w: Any, b: Any, y: Any) -> Any:
    v = x @ w + b
    v = v * b + y
    e = jnp.exp(v - v.max(-1, keepdims=True))
    return jnp.sum((e / e.sum(-1, keepdims=True))[..., 0] * x[:, 0])


def both_ends(x: Any, w: Any, b: Any, y: Any) -> Any:
    v = x @ w + b
    v = v * v * 0.3 + v
    return jnp.sum((v * 0.1 + y).max(-1) * x[:, 0]) + jnp.sum((v * v * 0.1 - y).min(-1))


def nearest(x: Any, w: Any, b: Any, y: Any) -> Any:
    """As one asks for the largest without a reduction's gradient."""
    v = jnp.tanh(x @ w * 0.1 + b) * 0.5 + y
    m = jax.lax.stop_gradient(v.max(-1, keepdims=True))
    return jnp.sum(jnp.where(v >= m, v * v, 0.0))


DENSE = (largest_of_rows, largest_exponential, softmax_with_a_maximum, both_ends, nearest)


def relative_error(f: Any, args: Any, by: int) -> float:
    grad = jax.grad(f, by)
    got = np.asarray(jax.jit(kj.pipeline(grad, force=True, target="emulator", strict=True))(*args), np.float64)
    want = in_float64(grad, *args)
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "float32"), (1, "float16"), (2, "float32"))]


@pytest.mark.parametrize("by, dtype", [(0, "float16"), (1, "bfloat16"), *SLOW])
def test_a_segment_softmax_by_one_argument(by: int, dtype: str) -> None:
    rng = np.random.default_rng(3)
    args = [rng.standard_normal(s) * 0.5 for s in ((NODES, 8), (8, 6), (2, 2, 3), (NODES, 2, 3))]
    assert relative_error(attention_of_edges, [np.asarray(a, DTYPES[dtype]) for a in args], by) < 0.02


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("f", DENSE, ids=lambda f: f.__name__)
def test_a_largest_number_by_the_weights_alone(f: Any, dtype: str) -> None:
    rng = np.random.default_rng(5)
    args = [*(rng.standard_normal(s) * 0.5 for s in ((ROWS, 16), (16, 40), (40,))), bumps()]
    assert relative_error(f, [np.asarray(a, DTYPES[dtype]) for a in args], 1) < 0.05


@pytest.mark.parametrize("dtype", HALF)
def test_an_attention_with_a_maximum_that_has_a_gradient(dtype: str) -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        s = q @ k.T * 0.3
        e = jnp.exp(s - s.max(-1, keepdims=True))
        return jnp.sum(((e / e.sum(-1, keepdims=True)) @ v) ** 2)

    rng = np.random.default_rng(7)
    args = [np.asarray(rng.standard_normal(s) * 0.5, DTYPES[dtype]) for s in ((97, 32), (103, 32), (103, 32))]
    assert relative_error(attention, args, 0) < 0.05


def hard_attention(q: Any, k: Any) -> Any:
    s = q @ k.T * 0.3
    m = jax.lax.stop_gradient(s.max(-1, keepdims=True))
    return jnp.sum(jnp.where(s >= m, s, 0.0) ** 2)


def nearest_neighbours(q: Any, k: Any) -> Any:
    return jnp.sum((q @ k.T * 0.3).max(-1) ** 2)


@pytest.mark.sampled(2, dtype="float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("f", [hard_attention, nearest_neighbours], ids=lambda f: f.__name__)
def test_the_backward_pass_does_not_make_again_what_the_forward_pass_compared(f: Any, dtype: str, monkeypatch: Any) -> None:
    """XLA takes the largest here, of products that it has summed its way: made again by a kernel, they did not equal it."""
    emulator = targets.get("emulator")
    supports = emulator.supports
    monkeypatch.setattr(emulator, "supports", lambda op, *of: "for XLA" if op.kind == "reduce_max" else supports(op, *of))
    rng = np.random.default_rng(0)
    q, k = (jax.device_put(np.asarray(rng.standard_normal(shape), dtype)) for shape in ((601, 32), (607, 32)))
    got = jax.jit(jax.grad(kj.pipeline(f, force=True, target="emulator")))(q, k)
    assert (np.abs(np.asarray(got, np.float32)).max(1) > 0).all(), "every row has a largest number"
    if dtype == "float32":
        close(np.asarray(got), in_float64(jax.grad(f), q, k), 4e-3 * float(np.abs(got).max()))

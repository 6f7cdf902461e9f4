"""Activations in the epilogue of a matrix product: spellings that are recognised, and results by definition."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax import _cpu
from kitsune_jax.program import passes
from kitsune_jax.program.passes import Flow
from kitsune_jax.targets.cpu import bytecode as bc
from tests.capture.test_capture import captured
from tests.support.bytecode_sim import activated
from tests.support.lowered import BF16, ROW, array, close, kinds, run
from tests.support.tiles import Tiles

Function = Callable[[jax.Array], jax.Array]
C = math.sqrt(2 / math.pi)

SPELLINGS: dict[str, tuple[str, Function]] = {
    "jax.nn.gelu, tanh": ("gelu_tanh", lambda x: jax.nn.gelu(x, approximate=True)),
    "gelu by products": ("gelu_tanh", lambda x: 0.5 * x * (1.0 + jnp.tanh(C * x * (1.0 + 0.044715 * x * x)))),
    "gelu by a cube": ("gelu_tanh", lambda x: x * (jnp.tanh(C * (x + 0.044715 * x**3)) + 1) / 2),
    "gelu by a sigmoid": ("gelu_tanh", lambda x: x * jax.nn.sigmoid(2 * C * (x + 0.044715 * x**3))),
    "jax.nn.gelu, erf": ("gelu_erf", lambda x: jax.nn.gelu(x, approximate=False)),
    "gelu by erf": ("gelu_erf", lambda x: x * (1 + jax.lax.erf(x / math.sqrt(2))) * 0.5),
    "jax.nn.silu": ("silu", jax.nn.silu),
    "silu by exp": ("silu", lambda x: x / (1 + jnp.exp(-x))),
    "quick gelu": ("silu", lambda x: x * jax.nn.sigmoid(1.702 * x)),
    "jnp.tanh": ("tanh", jnp.tanh),
    "jax.nn.sigmoid": ("logistic", jax.nn.sigmoid),
    "sigmoid by exp": ("logistic", lambda x: 1 / (1 + jnp.exp(-x))),
    "sigmoid by tanh": ("logistic", lambda x: 0.5 * (jnp.tanh(0.5 * x) + 1)),
    "jax.nn.elu": ("elu", jax.nn.elu),
    "jax.nn.elu, alpha": ("elu", lambda x: jax.nn.elu(x, 0.3)),
    "jax.nn.leaky_relu": ("leaky_relu", jax.nn.leaky_relu),
    "leaky relu by where": ("leaky_relu", lambda x: jnp.where(x < 0, x * 0.2, x)),
}
OTHERS: dict[str, Function] = {
    "a tanh of twice x": lambda x: jnp.tanh(2 * x),
    "x times tanh": lambda x: x * jnp.tanh(x),
    "a silu of minus x": lambda x: x * jax.nn.sigmoid(-x),
    "gelu with another half": lambda x: 0.4 * x * (1 + jnp.tanh(C * (x + 0.044715 * x**3))),
    "erf of a cube": lambda x: 0.5 * x * (1 + jax.lax.erf(x**3)),
    "softplus": jax.nn.softplus,
    "a leaky relu that falls": lambda x: jnp.where(x >= 0, x, -0.1 * x),
    "elu the other way round": lambda x: jnp.where(x > 0, jnp.expm1(x), x),
}


def instructions(made: list[bc.CpuProgram]) -> list[bc.Instruction]:
    return [i for p in made for s in p.stages for i in s.body]


def layer(f: Function) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    return lambda x, w, b: f(x @ w + b)


def operands(rows: int, k: int, n: int, dtype: object, scale: float = 1.0) -> tuple[jax.Array, jax.Array, jax.Array]:
    shapes = ((rows, k), scale), ((k, n), k**-0.5), ((n,), 0.5)
    return tuple(jax.device_put(np.asarray(array(*shape) * s, dtype)) for shape, s in shapes)


# In 16 bits a product applies what is rounded once, and functions of jax.nn whose steps it rounds as they do. (JAX converts the 0
# of a 16-bit elu from float32 in front of the region, which then does not know that it is 0.)
STEPS_ROUNDED = ("jax.nn.silu", "jax.nn.gelu, tanh", "jax.nn.gelu, erf")
ROUNDED_ONCE = ("jnp.tanh", "jax.nn.sigmoid", "jax.nn.leaky_relu", "leaky relu by where")
NARROW = ("bfloat16", "float16")
CASES = [(s, "float32") for s in SPELLINGS] + [(s, d) for s in (*ROUNDED_ONCE, *STEPS_ROUNDED) for d in NARROW]
OTHER_ROUNDINGS = [s for s in SPELLINGS if s not in ROUNDED_ONCE and s not in STEPS_ROUNDED and SPELLINGS[s][0] != "elu"]


@pytest.mark.parametrize("spelling, dtype", CASES)
def test_spelling_is_recognised(programs, spelling, dtype):
    name, f = SPELLINGS[spelling]
    args = operands(37, 19, 45, dtype)
    got = jax.jit(kj.pipeline(layer(f), force=True))(*args)
    (matmul,) = instructions(programs)
    assert isinstance(matmul, bc.Matmul) and bc.ACTIVATIONS[matmul.activation] == name
    x, w, b = (np.asarray(a, np.float64) for a in args)
    with jax.enable_x64(True):
        want = np.asarray(f(jnp.asarray(x @ w + b)), np.float64)
    # Constants are of the network's dtype, so 16-bit gelu has coefficients that are up to 2**-9 off.
    tolerance = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("spelling", STEPS_ROUNDED)
def test_sums_are_rounded_before_the_bias_and_so_are_the_steps_of_the_activation(programs, spelling, name, with_bias):
    """Sums of small integers are exact, so every rounding is known."""
    activation, f = SPELLINGS[spelling]
    dtype = jnp.dtype(name).type
    rng = np.random.default_rng(5)
    x, w = (rng.integers(-5, 6, s).astype(dtype) for s in ((131, 9), (9, 45)))
    x = (x.astype(np.float32) / 32).astype(dtype)
    b = (rng.standard_normal(45) * 2).astype(dtype)
    got = jax.jit(kj.pipeline(lambda x, w, b: f(x @ w + b if with_bias else x @ w) * dtype(3), force=True))(x, w, b)
    (matmul,) = [i for i in instructions(programs) if isinstance(i, bc.Matmul)]
    assert bc.ACTIVATIONS[matmul.activation] == activation and bc.DTYPES[matmul.rounds] == name

    def rounded(v: np.ndarray) -> np.ndarray:
        return v.astype(np.float32).astype(dtype).astype(np.float64)

    y = rounded(x.astype(np.float64) @ w.astype(np.float64))
    y = rounded(y + b.astype(np.float64)) if with_bias else y
    want = rounded(rounded(activated(activation, matmul.parameters, y, dtype)) * 3)
    found = np.asarray(got, np.float64)
    # Functions are approximations, so a step may be rounded to the neighbour: one result in twenty is.
    assert np.mean(np.abs(found - want) > 1e-30) < 0.05
    eps = float(jnp.finfo(name).eps)
    np.testing.assert_allclose(found, want, rtol=3 * eps, atol=eps * float(np.abs(y).max()))


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("spelling", ["jax.nn.gelu, tanh", "jax.nn.gelu, erf"])
def test_gelu_has_the_digits_of_jit(spelling, name):
    """The product of one column is exact, so the two see the same sums."""
    x = jax.device_put(np.asarray(np.linspace(-9, 9, 4001), name)).reshape(-1, 1)
    w = jnp.ones((1, 1), name)
    f = SPELLINGS[spelling][1]
    got, want = (
        np.asarray(jax.jit(g)(x, w), np.float64) for g in (kj.pipeline(lambda x, w: f(x @ w), force=True), lambda x, w: f(x @ w))
    )
    assert np.mean(got != want) < 0.05
    # Where 1 + tanh cancels, a last digit of tanh is a large part of the result.
    np.testing.assert_allclose(got, want, rtol=2 * float(jnp.finfo(name).eps), atol=9 * float(jnp.finfo(name).eps))


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("y", [-7, -3, -2, -1, 2, 3, 4, 7, 10])
def test_powers_are_rounded_after_each_product_as_jit_does(programs, name, y):
    x = jax.device_put(np.asarray(np.random.default_rng(y + 9).uniform(0.4, 1.9, (37, 45)), name))
    got, want = (jax.jit(g)(x) for g in (kj.pipeline(lambda x: x**y, force=True), lambda x: x**y))
    assert programs
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("spelling", OTHER_ROUNDINGS)
def test_what_is_rounded_more_often_is_left_to_the_vector_code(programs, spelling, name):
    f = SPELLINGS[spelling][1]
    args = operands(37, 19, 45, name)
    got, want = (np.asarray(jax.jit(g)(*args), np.float64) for g in (kj.pipeline(layer(f), force=True), layer(f)))
    assert [i.activation for i in instructions(programs) if isinstance(i, bc.Matmul)] == [0]
    # jit's functions are within a rounding of these.
    np.testing.assert_allclose(got, want, rtol=8 * float(jnp.finfo(name).eps), atol=4 * float(jnp.finfo(name).eps))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling_is_recognised_in_a_graph(spelling):
    """The cost model asks the graph, before there is a stage: it finds what the lowering will find."""
    name, f = SPELLINGS[spelling]
    graph = captured(lambda x, w, b: f(x @ w + b), *operands(37, 19, 45, "float32")).graph
    bias = next(i for i, op in enumerate(graph.ops) if op.kind == "add")
    everything = range(len(graph.ops))
    found = passes.recognise(Flow.of_graph(graph, everything, graph.outputs), graph.ops[bias].outputs[0])
    assert found is not None and found.name == name
    views = {"broadcast_in_dim", "copy", "reshape"}
    assert {i for i in everything[bias + 1 :] if graph.ops[i].kind not in views} <= set(found.absorbed)
    also_kept = [*graph.outputs, graph.ops[bias].outputs[0]]
    assert passes.recognise(Flow.of_graph(graph, everything, also_kept), graph.ops[bias].outputs[0]) is None


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_an_activation_is_left_to_the_vector_code(programs, name):
    f = OTHERS[name]
    args = operands(37, 19, 45, "float32")
    got = jax.jit(kj.pipeline(layer(f), force=True))(*args)
    matmuls = [i for i in instructions(programs) if isinstance(i, bc.Matmul)]
    assert [m.activation for m in matmuls] == [0] and len(instructions(programs)) > 1
    np.testing.assert_allclose(got, layer(f)(*args), rtol=1e-5, atol=1e-5)


def test_float64_is_left_to_the_vector_code(programs):
    with jax.enable_x64(True):
        args = operands(37, 19, 45, "float64")
        got = jax.jit(kj.pipeline(layer(jax.nn.silu), force=True))(*args)
        np.testing.assert_allclose(got, layer(jax.nn.silu)(*args), rtol=1e-13, atol=1e-13)
    assert [type(i) for i in instructions(programs)] == [bc.Matmul, bc.CpuVector]


def test_pre_activation_that_someone_else_reads_is_stored(programs):
    def f(x, w, b):
        y = x @ w + b
        return jax.nn.silu(y), y

    args = operands(37, 19, 45, "float32")
    for got, want in zip(jax.jit(kj.pipeline(f, force=True))(*args), f(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert [i.activation for i in instructions(programs) if isinstance(i, bc.Matmul)] == [0]


def test_activation_of_a_rounded_sum_rounds_first(programs):
    """bfloat16 after a float32 product is a rounding that the user asked for: the epilogue rounds the sums."""

    def f(x, w):
        y = jax.lax.dot(x, w, preferred_element_type=jnp.float32)
        return jax.nn.silu(y.astype(jnp.bfloat16))

    x, w, _ = operands(37, 19, 45, "bfloat16", 4.0)
    got = jax.jit(kj.pipeline(f, force=True))(x, w)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    off = 2**-20 * (np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64)))  # of a sum in float32, in any order
    rounded = [(exact + d).astype(BF16).astype(np.float64) for d in (-off, off)]  # mostly the same number
    ends = [activated("silu", (1.0,), y).astype(np.float64) for y in rounded]
    # Half a unit of the logistic, whose approximation is good to 2^-13, and half a unit of its product with y.
    slack = (2**-7 + 2**-12) * np.maximum(*np.abs(ends))
    found = np.asarray(got, np.float64)
    assert np.all((np.minimum(*ends) - slack <= found) & (found <= np.maximum(*ends) + slack))
    (matmul,) = instructions(programs)
    assert bc.ACTIVATIONS[matmul.activation] == "silu" and bc.DTYPES[matmul.rounds] == "bfloat16"


def test_widened_16_bit_sums_and_a_narrow_result(programs):
    def f(x, w, b):
        y = (x @ w).astype(jnp.float32) + b.astype(jnp.float32)
        return jax.nn.gelu(y).astype(jnp.bfloat16)

    args = operands(37, 19, 45, "bfloat16")
    jax.jit(kj.pipeline(f, force=True))(*args)
    assert [type(i) for i in instructions(programs)] == [bc.Matmul]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows, n", [(1, 1), (1, 70), (7, 16), (13, 17), (29, 31), (97, 33), (31, 64), (12, 65)])
def test_awkward_shapes(rows, n, dtype):
    """Executor against simulator, which evaluates definitions in float64."""
    kind = BF16 if dtype == "bfloat16" else dtype
    for activation, op in (("silu", None), ("tanh", "tanh"), ("logistic", "logistic")):
        t = Tiles((rows,), 8)
        y = t.matmul(t.load((rows, 11), dtype, ROW), t.load((11, n), dtype))
        y = t.op("add", y, t.broadcast(t.load((n,), dtype), (n,), (1,)))
        z = t.op(op or "logistic", y)
        t.store(t.op("mul", y, z) if op is None else z, (rows, n), ROW)
        x, w, b = array(rows, 11, dtype=kind), array(11, n, dtype=kind), array(n, dtype=kind)
        assert kinds(t.program()) == ["Matmul"]
        got = run(t.program(), x, w, b, tolerance=2**-10 if dtype == "float16" else None)[0]  # a unit in the last place
        products = (x.astype(np.float64) @ w.astype(np.float64)).astype(kind)
        sums = (products.astype(np.float64) + b.astype(np.float64)).astype(kind).astype(np.float64)
        want = activated(activation, (1.0,) if op is None else (), sums)
        close(got.astype(np.float64), want, {"float32": 1e-5, "float16": 2e-3}.get(dtype, 1e-2))


def test_batch_of_weights_and_strided_results(programs):
    def f(x, w):
        y = jnp.einsum("rbk,bkn->rbn", x, w)
        return jnp.concatenate([jax.nn.gelu(y), x], axis=-1)

    x, w = jnp.asarray(array(23, 3, 5)), jnp.asarray(array(3, 5, 9))
    got = jax.jit(kj.pipeline(f, force=True))(x, w)
    np.testing.assert_allclose(got, f(x, w), rtol=1e-5, atol=1e-5)
    assert [bc.ACTIVATIONS[i.activation] for i in instructions(programs) if isinstance(i, bc.Matmul)] == ["gelu_tanh"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_special_values(spelling):
    """NaN and infinities where JAX has them; elsewhere close, at every scale."""
    _, f = SPELLINGS[spelling]
    special = [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e30, -1e30, 1e38, -1e38, 1e-30, -1e-30, 88.0, -88.0, -200.0, 200.0, -1e-3]
    x, w = jnp.asarray(special, jnp.float32).reshape(-1, 1), jnp.ones((1, 5), jnp.float32)
    got = np.asarray(jax.jit(kj.pipeline(lambda x, w: f(x @ w), force=True))(x, w))
    want = np.asarray(f(x @ w))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-30)


def test_names_are_those_of_the_kernels():
    header = (Path(__file__).parents[2] / "cpu/include/kitsune_cpu/kernels.h").read_text()
    names = re.search(r"enum class Activation : int8_t \{(.*?)\}", header)
    assert names is not None
    camel = ["k" + "".join(part.capitalize() for part in name.split("_")) for name in bc.ACTIVATIONS]
    assert [n.strip() for n in names[1].split(",")] == camel
    counts = re.search(r"kActivationParameters\[kNumActivations\] = \{(.*?)\}", header)
    assert counts is not None and tuple(int(n) for n in counts[1].split(",")) == bc.ACTIVATION_PARAMETERS


@pytest.mark.parametrize("isa", _cpu.available_isas())
def test_every_instruction_set_agrees_with_the_definition(isa):
    before = _cpu.isa()
    assert _cpu.set_isa(isa)
    try:
        for name in ("jax.nn.gelu, tanh", "jax.nn.gelu, erf", "jax.nn.silu", "jnp.tanh", "jax.nn.sigmoid", "jax.nn.elu"):
            _, f = SPELLINGS[name]
            x, w, b = operands(53, 31, 47, "float32", 3.0)
            got = np.asarray(jax.jit(kj.pipeline(layer(f), force=True))(x, w, b))
            with jax.enable_x64(True):
                y = np.asarray(x, np.float64) @ np.asarray(w, np.float64) + np.asarray(b, np.float64)
                want = np.asarray(f(jnp.asarray(y)))
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
    finally:
        assert _cpu.set_isa(before)

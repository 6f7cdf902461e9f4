"""Every pointwise entry of the op table on the CPU target, in every dtype it has code for, against the entry's NumPy rule."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import kitsune_jax as kj
from kitsune_jax import _cpu
from kitsune_jax.ops.spec import DTYPES, FLOATS, FORMATS
from kitsune_jax.ops.table import OPS
from kitsune_jax.targets.cpu.bytecode import DTYPE_CODE, OPCODES, CpuVector, encode
from kitsune_jax.targets.cpu.lower import lower_program
from kitsune_jax.targets.cpu.target import supports
from reference.interpret import interpret
from scripts import opcodes
from tests.support.lowered import plain
from tests.support.table_cases import ROW, SERIES, all_pointwise, disagreement, sample
from tests.support.tiles import Tiles


def run(t: Tiles, arrays: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What the executor makes of a program, and what the interpreter does."""
    program = t.program()
    want = interpret(program, arrays)
    got = [np.empty_like(w) for w in want]
    _cpu.run(encode(lower_program(program, "test")), [plain(a) for a in arrays], [plain(a) for a in got], 1)
    return got, want


@pytest.mark.parametrize("dtype", DTYPES)
def test_pointwise(dtype: str) -> None:
    t, arrays, names = all_pointwise(dtype, supports, without=SERIES)
    got, want = run(t, arrays)
    found = [disagreement(name, g, w, "cpu") for name, g, w in zip(names, got, want, strict=True)]
    assert not any(found), "\n".join(filter(None, found))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", SERIES)
def test_series(kind: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    arrays = [sample(rng, kind, k, dtype, 520).reshape(65, 8) for k in range(OPS[kind].arity or 0)]
    t = Tiles((65,), 64)
    t.store(t.op(kind, *(t.load((65, 8), dtype, ROW) for _ in arrays)), (65, 8), ROW)
    ((got,), (want,)) = run(t, arrays)
    tolerance = {"float64": 1e-10, "float32": 2e-6}.get(dtype, 2.0 ** -FORMATS[dtype][1])
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("source,to", [("float32", "int64"), ("int8", "bool"), ("bool", "uint8"), ("float32", "bfloat16")])
def test_bits_of_another_width_or_of_a_bool_are_refused(source: str, to: str) -> None:
    """By the parser, which has the last word on a program."""
    t = Tiles((4,), 4)
    t.store(t.op("bitcast_convert_type", t.load((4, 3), source, ROW), dtype=to, new_dtype=to), (4, 3), ROW)
    code = lower_program(t.program(), "test")
    (vector,) = code.stages[0].body
    assert isinstance(vector, CpuVector)
    micros = [m if OPCODES[m.op] != "bitcast" else dataclasses.replace(m, type=DTYPE_CODE[to]) for m in vector.code]
    stage = dataclasses.replace(code.stages[0], body=(dataclasses.replace(vector, code=tuple(micros)),))
    reason = _cpu.validate(encode(dataclasses.replace(code, stages=(stage,))))
    assert "the bits of its operand are not those of" in reason or "a register cannot be bfloat16" in reason


def test_the_header_of_opcodes_is_what_the_table_says() -> None:
    assert opcodes.HEADER.read_text() == opcodes.header(), "run python -m scripts.opcodes and build the extension"


def dropout(key: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ w)
    return jnp.where(jax.random.bernoulli(key, 0.75, h.shape), h / 0.75, 0) + jax.random.uniform(key, h.shape)


def test_a_dropout_streams_with_its_random_bits() -> None:
    """The bits become a float in [0, 1) by a shift, an ``or`` and ``bitcast_convert_type``."""
    args = (jax.random.key(3), jnp.linspace(-1, 1, 96 * 24).reshape(96, 24), jnp.eye(24) + 0.1)
    report = kj.explain(dropout, force=True)(*args)
    assert not any("has no code for this operator" in r.reason for r in report.rejected)
    (region,) = report.regions
    streams = [{op for stage in region.stages for op in stage.ops}, *(set(s.ops) for phase in region.later for s in phase.spaces)]
    assert any({"xor", "bitcast_convert_type", "tanh", "select_n"} <= ops for ops in streams)
    np.testing.assert_allclose(jax.jit(kj.pipeline(dropout, force=True))(*args), dropout(*args), rtol=2e-6, atol=2e-6)


FOUR = ("float32", "float64", "int32", "uint32")
TWO_SIDED = ("add", "sub", "mul", "max", "min", "eq", "ne", "lt", "le", "gt", "ge")
INTEGER = ("and", "or", "xor", "shift_left", "shift_right_logical", "shift_right_arithmetic")


@pytest.mark.parametrize("dtype", [*FOUR, "int8", "bool"])
def test_a_constant_is_as_good_as_an_array_of_it(dtype: str) -> None:
    """Bit for bit, on either side of an operation, as bounds and as what is selected."""
    t, rng = Tiles((77,), 32), np.random.default_rng(1)
    number = dtype != "bool"
    kinds = [*TWO_SIDED, *(("div",) if dtype.startswith("float") else INTEGER if number else ("and", "or", "xor"))]
    kinds = [k for k in kinds if number or k not in ("sub",)]
    x = rng.integers(1, 6, (77, 5)).astype(dtype) if not dtype.startswith("float") else rng.normal(size=(77, 5)).astype(dtype)
    arrays, wanted = [x], []
    streamed, constant = t.load((77, 5), dtype, ROW), t.literal(3 if number else True, dtype)
    arrays.append(np.full((77, 5), 3, dtype))
    filled = t.load((77, 5), dtype, ROW)
    arrays.append(rng.integers(0, 2, (77, 5)).astype(bool))
    mask = t.load((77, 5), "bool", ROW)
    for kind in kinds:
        made = "bool" if kind in ("eq", "ne", "lt", "le", "gt", "ge") else dtype
        for pair in ((streamed, constant), (constant, streamed), (streamed, filled), (filled, streamed)):
            t.store(t.op(kind, *pair, shape=(5,), dtype=made), (77, 5), ROW)
    three = t.broadcast(constant, (5,), ())
    for no, yes in ((streamed, three), (three, streamed), (three, three), (streamed, filled), (filled, streamed), (filled, filled)):
        t.store(t.op("select_n", mask, no, yes, shape=(5,), dtype=dtype), (77, 5), ROW)
    got, wanted = run(t, arrays)
    for k in range(0, 4 * len(kinds), 4):
        for one, other in ((got[k], got[k + 2]), (got[k + 1], got[k + 3])):
            assert one.tobytes() == other.tobytes(), kinds[k // 4]
    assert [a.tobytes() for a in got[-6:-3]] == [a.tobytes() for a in got[-3:]]
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_allclose(g.astype(np.float64), w.astype(np.float64), rtol=1e-6)


def test_sines_and_cosines_next_to_multiples_of_a_quarter_turn() -> None:
    """Where the reduced argument is the difference of nearly equal numbers, up to and beyond where it is made in float64."""
    n = np.arange(1, 7000)
    near = np.float32(n * (np.pi / 2))
    x = np.concatenate(
        [near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(1e9)), np.linspace(-9000, 9000, 4001)]
    )
    x = np.concatenate([x, -x]).astype(np.float32)
    t = Tiles((len(x),), 1000)
    v = t.load(x.shape, "float32", ((0,),))
    for kind in ("sin", "cos"):
        t.store(t.op(kind, v), x.shape, ((0,),))
    got, _ = run(t, [x])
    for g, f in zip(got, (np.sin, np.cos), strict=True):
        want = f(x.astype(np.float64))
        assert np.max(np.abs(g - want) / np.spacing(np.abs(want).astype(np.float32))) < 2


@pytest.mark.parametrize("exponent", ["int8", "int32", "uint8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_powers_to_integers(dtype: str, exponent: str) -> None:
    """An exponent of integers, an array or one number, is that of the dtype of the base, as in JAX."""
    rng = np.random.default_rng(2)
    x = jax.device_put(np.asarray(rng.uniform(0.5, 2, (37, 5)) * rng.choice([-1, 1], (37, 5)), dtype))
    y = jax.device_put(np.asarray(rng.integers(0 if exponent == "uint8" else -4, 5, (37, 5)), exponent))
    tolerance = {"float32": 1e-6, "bfloat16": 5e-3, "float16": 6e-4}[dtype]
    got = jax.jit(kj.pipeline(lambda x, y: (lax.pow(x, y), lax.pow(x, y[0, 0]), lax.pow(x, 3)), strict=True, force=True))(x, y)
    for g, to in zip(got, (y, y[0, 0], 3), strict=True):
        assert g.dtype == dtype
        want = np.asarray(x, np.float64) ** np.asarray(to, np.float64)
        np.testing.assert_allclose(np.asarray(g, np.float64), want, rtol=tolerance)

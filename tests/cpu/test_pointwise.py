"""Every pointwise entry of the op table on the CPU target, in every dtype it has code for, against the entry's NumPy rule."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax import _cpu
from kitsune_jax.ops.spec import DTYPES, FLOATS, FORMATS
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.interpret import interpret
from kitsune_jax.targets.cpu import lower, supports
from kitsune_jax.targets.cpu.bytecode import DTYPE_CODE, OPCODES, Vector
from kitsune_jax.targets.cpu.words import encode
from scripts import opcodes
from tests.support.lowered import plain
from tests.support.table_cases import ROW, SERIES, all_pointwise, disagreement, sample
from tests.support.tiles import Tiles


def run(t: Tiles, arrays: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What the executor makes of a program, and what the interpreter does."""
    program = t.program()
    want = interpret(program, arrays)
    got = [np.empty_like(w) for w in want]
    _cpu.run(encode(lower(program, "test")), [plain(a) for a in arrays], [plain(a) for a in got], 1)
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
    code = lower(t.program(), "test")
    (vector,) = code.stages[0].body
    assert isinstance(vector, Vector)
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
    assert not any("not an op" in r.reason for r in report.rejected)
    (region,) = report.regions
    streams = [{op for stage in region.stages for op in stage.ops}, *(set(s.ops) for phase in region.later for s in phase.spaces)]
    assert any({"xor", "bitcast_convert_type", "tanh", "select_n"} <= ops for ops in streams)
    np.testing.assert_allclose(jax.jit(kj.pipeline(dropout, force=True))(*args), dropout(*args), rtol=2e-6, atol=2e-6)

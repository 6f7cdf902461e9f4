"""Every pointwise entry of the op table on the CPU target, in every dtype it has code for, against the entry's NumPy rule."""

from __future__ import annotations

import numpy as np
import pytest

from kitsune_jax import _cpu
from kitsune_jax.ops.spec import DTYPES, FLOATS, FORMATS
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.interpret import interpret
from kitsune_jax.targets.cpu import lower, supports
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


def test_the_header_of_opcodes_is_what_the_table_says() -> None:
    assert opcodes.HEADER.read_text() == opcodes.header(), "run python -m scripts.opcodes and build the extension"

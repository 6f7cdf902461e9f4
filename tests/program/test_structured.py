"""Loops, slices, gathers, indexed sinks, products of tiles and batch axes: the interpreter against float64."""

from __future__ import annotations

import numpy as np
import pytest

from kitsune_jax.program.interpret import interpret
from kitsune_jax.program.verify import verify
from tests.support.programs import CASES


@pytest.mark.parametrize("name", CASES)
def test_a_structured_program_equals_float64(name: str) -> None:
    case = CASES[name]()
    verify(case.program)
    operands = case.operands(np.random.default_rng(3))
    got = interpret(case.program, operands)
    assert max(case.errors(got, operands)) < (2e-2 if "bfloat16" in name else 2e-6)
    exact = interpret(case.program, operands, widen=True, schedule_seed=1)
    assert max(case.errors(exact, operands)) < 1e-12
    for a, wide in zip(got, exact, strict=True):
        assert wide.dtype == (np.float64 if a.dtype.kind in "fV" else a.dtype)

"""Loops, slices, gathers, indexed sinks, products of tiles and batch axes: the interpreter against float64."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune_jax.program.interpret import interpret
from kitsune_jax.program.verify import verify
from tests.support.programs import CASES, Case, attention, lstm, segments


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


def agrees(case: Case, seed: int) -> None:
    verify(case.program)
    operands = case.operands(np.random.default_rng(seed))
    assert max(case.errors(interpret(case.program, operands, widen=True, schedule_seed=seed), operands)) < 1e-11


small, hows = st.integers(1, 9), st.sampled_from(["sum", "max", "min"])


@settings(max_examples=30, deadline=None)
@given(st.tuples(small, small), small, st.integers(1, 20), small, st.integers(1, 7), st.integers(1, 8), st.booleans(), small)
def test_attention_at_any_shape(heads, queries, keys, dim, block, tile_rows, causal, seed):
    case = attention(*heads, queries, max(keys, queries), dim, dim, block=block, tile_rows=tile_rows, causal=causal)
    agrees(case, seed)


@settings(max_examples=30, deadline=None)
@given(small, st.integers(0, 6), small, small, st.booleans(), small, small)
def test_a_recurrence_at_any_shape(rows, steps, features, hidden, reverse, tile_rows, seed):
    agrees(lstm(rows, steps, features, hidden, reverse=reverse, tile_rows=tile_rows), seed)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 40), small, st.integers(4, 20), st.sampled_from(["sum", "max", "min"]), st.integers(1, 3), small, st.booleans()
)
def test_segments_at_any_shape(rows, width, n, how, each, tile_rows, ids_sorted):
    agrees(segments(rows, width, n, how, each=each, tile_rows=tile_rows, ids_sorted=ids_sorted), rows)


def test_a_program_prints_as_it_is_read():
    lines = str(CASES["nested"]().program).splitlines()
    assert lines[:5] == [
        "call",
        "  array 0 (operand): float32[21, 12]",
        "  array 1 (operand): float32[12, 10]",
        "  array 2 (result): float32[21, 10]",
        "phase 0: reads (0, 1) writes (2,)",
    ]
    loops = [line for line in lines if " loop " in line or " next " in line]
    assert [len(line) - len(line.lstrip()) for line in loops] == [4, 6, 8]
    assert loops[0].strip() == "loop %0 in range(5):"
    assert re.fullmatch(r"%\d+:float32\[R,2\] = loop %\d+ in range\(3\) with %\d+ = %\d+:", loops[1].strip())
    assert "      store_slice(%" in "\n".join(lines) and "reversed(range(5))" in str(CASES["lstm_reverse"]().program)

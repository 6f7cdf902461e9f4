"""Loops, slices, gathers, indexed sinks, products of tiles and batch axes: the interpreter against float64."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitsune_jax.ops.graph import make_params
from kitsune_jax.program.ir import TileProgram
from reference.check import verify
from reference.interpret import interpret
from tests.support.checks import in_parts
from tests.support.irregular import IRREGULAR, ordered_segments, selections
from tests.support.online import ONLINE_CASES, online_sums
from tests.support.programs import CASES, Case, attention, lstm, lstm_backward, segments
from tests.support.tiles import Tiles

PROGRAMS = {**CASES, **IRREGULAR, **ONLINE_CASES}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_structured_program_equals_float64(name: str) -> None:
    case = PROGRAMS[name]()
    verify(case.program)
    operands = case.operands(np.random.default_rng(3))
    got = interpret(case.program, operands)
    assert max(case.errors(got, operands)) < (2e-2 if "bfloat16" in name else 2e-3 if "float16" in name else 2e-6)
    exact = interpret(case.program, operands, widen=True, schedule_seed=1)
    assert max(case.errors(exact, operands)) < 1e-12
    for a, wide in zip(got, exact, strict=True):
        assert wide.dtype == (np.float64 if a.dtype.kind in "fV" else a.dtype)


def agrees(case: Case, seed: int) -> None:
    verify(case.program)
    operands = case.operands(np.random.default_rng(seed))
    assert max(case.errors(interpret(case.program, operands, widen=True, schedule_seed=seed), operands)) < 1e-11


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 60), st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.booleans(),
    st.sampled_from(["mixed", "equal", "outside", "half"]), st.sampled_from(["normal", "wide", "low", "broken"]),
)  # fmt: skip
def test_online_sums_at_any_shape(rows, heads, width, n, tile_rows, finite, ids, scores):
    agrees(online_sums(rows, heads, width, n, ids=ids, scores=scores, finite=finite, tile_rows=tile_rows), rows)


small, hows = st.integers(1, 9), st.sampled_from(["sum", "max", "min"])


@in_parts
@settings(max_examples=15, deadline=None)
@given(st.tuples(small, small), small, st.integers(1, 20), small, st.integers(1, 7), st.integers(1, 8), st.booleans(), small)
def test_attention_at_any_shape(part, heads, queries, keys, dim, block, tile_rows, causal, seed):
    case = attention(*heads, queries, max(keys, queries), dim, dim, block=block, tile_rows=tile_rows, causal=causal)
    agrees(case, seed)


@settings(max_examples=30, deadline=None)
@given(small, st.integers(0, 6), small, small, st.booleans(), small, small)
def test_a_recurrence_at_any_shape(rows, steps, features, hidden, reverse, tile_rows, seed):
    agrees(lstm(rows, steps, features, hidden, reverse=reverse, tile_rows=tile_rows), seed)


@settings(max_examples=20, deadline=None)
@given(small, st.integers(0, 4), small, small, small, small)
def test_a_recurrences_gradient_at_any_shape(rows, steps, features, hidden, tile_rows, seed):
    agrees(lstm_backward(rows, steps, features, hidden, tile_rows=tile_rows), seed)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 40), small, st.integers(4, 20), st.sampled_from(["sum", "max", "min"]), st.integers(1, 3), small, st.booleans()
)
def test_segments_at_any_shape(rows, width, n, how, each, tile_rows, ids_sorted):
    agrees(segments(rows, width, n, how, each=each, tile_rows=tile_rows, ids_sorted=ids_sorted), rows)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 40), small, small, st.sampled_from(["sum", "max", "min", "prod"]), small, st.integers(1, 2),
    st.sampled_from(["mixed", "equal", "outside", "half"]),
)  # fmt: skip
def test_an_order_of_the_stream_at_any_shape(rows, width, n, how, tile_rows, stages, ids):
    agrees(ordered_segments(rows, width, n, how, ids=ids, tile_rows=tile_rows, stages=stages), rows)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 20), st.integers(2, 6), small)
def test_selections_at_any_shape(rows, features, tile_rows):
    agrees(selections(rows, features, tile_rows=tile_rows), rows)


def only(case: Case) -> TileProgram:
    program = case.program.only
    assert program is not None
    return program


@pytest.mark.parametrize("broken", ["short", "twice", "promise"])
def test_what_an_order_or_a_promise_says_is_checked_where_it_runs(broken):
    """By the interpreter. A target gives any numbers."""
    case = ordered_segments(rows=20, n=5)
    operands = case.operands(np.random.default_rng(0))
    if broken == "promise":
        operands[3] = operands[3][::-1].copy()
        with pytest.raises(ValueError, match="sink 0 was promised indices that never decrease"):
            interpret(case.program, operands)
        return
    operands[3][3] = 20 if broken == "short" else operands[3][4]
    with pytest.raises(ValueError, match="the order of the stream is no permutation of its rows"):
        interpret(case.program, operands)


@pytest.mark.parametrize(
    "change,told",
    [
        ({"order": 9}, "the order of the stream is input 9; the program has 4"),
        ({"order": 1}, "input 1 is int32\\[20\\]; the order of the stream is int32\\[20\\]"),
        ({"order": 2}, "input 2 is float32\\[5, 5\\]; the order of the stream is int32"),
        ({"batch_axes": 1}, "a stream with batch axes has no order of its own"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(change, told):
    with pytest.raises(ValueError, match=told):
        verify(dataclasses.replace(only(ordered_segments(rows=20, n=5)), **change))


def changed(case: Case, kind: str, **params) -> TileProgram:
    """The program with other parameters in the first instruction of ``kind``."""
    program = only(case)
    body = list(program.stages[0].body)
    at = next(k for k, instr in enumerate(body) if instr.kind == kind)
    body[at] = dataclasses.replace(body[at], params=make_params(**{**dict(body[at].params), **params}))
    return dataclasses.replace(program, stages=(dataclasses.replace(program.stages[0], body=tuple(body)),))


@pytest.mark.parametrize(
    "case,kind,params,told",
    [
        (selections, "take", {"axis": 0}, "dimension 0 of .* is none that a row has"),
        (selections, "take", {"axis": 3}, "dimension 3 of .* is none that a row has"),
        (selections, "take", {"mode": "wrap"}, "there is no mode 'wrap'"),
        (selections, "take", {"mode": "fill", "fill": None}, "there is no number to fill with"),
        (selections, "put", {"axis": 2}, "from dimension 2 on .* must have those of the index"),
        (selections, "put", {"n": 7}, "it makes float32\\[R,7,2\\], but declares"),
        (ordered_segments, "sink_at", {"sorted": None}, "it does not say whether its indices are sorted"),
    ],
)
def test_an_indexed_instruction_that_does_not_fit_is_refused(case, kind, params, told):
    with pytest.raises(ValueError, match=told):
        verify(changed(case(), kind, **params))


def test_an_order_that_a_stage_reads_is_refused():
    t = Tiles((4,), 2)
    t.in_order(t.input((4,), "int32"))
    t.again(0)
    with pytest.raises(ValueError, match="input 0 is the order of the stream, and a stage reads it"):
        verify(t.program())


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

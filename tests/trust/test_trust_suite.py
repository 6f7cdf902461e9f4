"""The search for wrong answers can be trusted: its reference, verdicts, shrinker and watchdog; and what it found stays fixed."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.checks import enable_x64
from trust.build import OPERATORS, build
from trust.check import check, finite_differences
from trust.context import MAX_FEATURES
from trust.generate import draw
from trust.loops import LOOPS
from trust.primitives import Unknown
from trust.program import Digits, Invalid, Op, Program
from trust.reference import Arithmetic, evaluate, roundest
from trust.runner import Search, save, search, signature
from trust.shrink import candidates, shrink_within
from trust.transforms import TRANSFORMS
from trust.worker import Worker

REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.json"))
DENSE = Program(lead=(7,), features=5, ops=(Op("dense", 0, 0, 3), Op("activation", 0, 0, 0)), seed=3)


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda p: p.stem)
def test_what_was_found_stays_fixed(path: Path) -> None:
    record = json.loads(path.read_text())
    program = Program.from_json(record["program"])
    if record["outcome"] in ("hang", "crash"):  # not in this process
        worker = Worker(60.0)
        try:
            assert worker.run(program)["kind"] == "ok"
        finally:
            worker.close()
        return
    outcome = check(program)
    assert outcome.kind == "ok", outcome


# --- the reference ---------------------------------------------------------------------------------------------------------------


def closed_form(f: Callable[..., Any], *args: Any) -> list[np.ndarray]:
    return evaluate(jax.make_jaxpr(f)(*args), args, Arithmetic(widen=True))


def test_the_reference_computes_a_layer_in_float64() -> None:
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(s).astype(np.float32) for s in ((9, 5), (5, 3), (3,)))
    (got,) = closed_form(lambda x, w, b: jax.nn.softmax(jnp.tanh(x @ w + b)), x, w, b)
    y = np.tanh(x.astype(np.float64) @ w.astype(np.float64) + b)
    want = np.exp(y) / np.exp(y).sum(1, keepdims=True)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-14)


def test_the_reference_runs_loops_and_branches() -> None:
    def f(x: Any, n: Any) -> Any:
        def step(carry: Any, y: Any) -> Any:
            return carry * 0.5 + y, jnp.where(y > 0, carry, -y)

        last, ys = jax.lax.scan(step, x[0], x, reverse=True)
        grown = jax.lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] * 2, c[1] + 1), (1, 0))
        return last, ys, jax.lax.switch(n, [jnp.sin, jnp.cos, lambda v: v * 3], x), grown

    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    last, ys, chosen, power, count = closed_form(f, x, np.int32(1))
    want, wanted = x[0].astype(np.float64), np.zeros((4, 3))
    for i in range(3, -1, -1):
        wanted[i] = np.where(x[i] > 0, want, -x[i])
        want = want * 0.5 + x[i]
    np.testing.assert_allclose(last, want)
    np.testing.assert_allclose(ys, wanted)
    np.testing.assert_allclose(chosen, np.cos(x.astype(np.float64)))
    assert (int(power), int(count)) == (16, 4)


def test_the_reference_gathers_and_scatters() -> None:
    rng = np.random.default_rng(0)
    x, i, j = rng.standard_normal((6, 4)), np.array([5, 0, 0, 9, 2]), np.array([[3], [0], [1], [2], [3], [0]])
    with enable_x64():
        rows, clipped, filled, element, summed = closed_form(
            lambda x, i, j: (
                x[i % 6],
                jnp.take(x, i, axis=0, mode="clip"),
                jnp.take(x, i, axis=0, mode="fill", fill_value=7),
                jnp.take_along_axis(x, j, axis=1),
                jax.ops.segment_sum(x[:5], i, 6),
            ),
            *(x, i, j),
        )
    np.testing.assert_array_equal(rows, x[i % 6])
    np.testing.assert_array_equal(clipped, x[np.minimum(i, 5)])
    np.testing.assert_array_equal(filled, np.where((i < 6)[:, None], x[np.minimum(i, 5)], 7))
    np.testing.assert_array_equal(element, np.take_along_axis(x, j, axis=1))
    want = np.zeros((6, 4))
    for row, at in zip(x[:5], i, strict=True):
        if at < 6:
            want[at] += row
    np.testing.assert_allclose(summed, want)


def test_the_reference_rounds_to_each_dtype() -> None:
    x = jnp.asarray([1.0, 2.0**-9, 3.0], jnp.bfloat16)
    rounded = evaluate(jax.make_jaxpr(lambda x: x + 1)(x), [x], Arithmetic())[0]
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded.astype(np.float64), [2, 1, 4])
    (wide,) = closed_form(lambda x: x + 1, x)
    np.testing.assert_array_equal(wide, [2, 1 + 2.0**-9, 4])


def test_jitter_moves_what_rounds_and_nothing_else() -> None:
    x = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)

    def f(x: Any) -> Any:
        return jnp.exp(x), jnp.maximum(x[::-1].T, 0.1)

    closed = jax.make_jaxpr(f)(x)
    moved, exact = evaluate(closed, [x], Arithmetic(jitter=np.random.default_rng(0)))
    assert 0 < np.max(np.abs(moved / np.exp(x) - 1)) < 4 * np.finfo(np.float32).eps
    np.testing.assert_array_equal(exact, np.maximum(x[::-1].T, np.float32(0.1)))


def test_an_unknown_primitive_is_named() -> None:
    with pytest.raises(Unknown, match="fft"):
        closed_form(jnp.fft.fft, np.ones((4, 8), np.float32))


@pytest.mark.parametrize("forms", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(set(OPERATORS) - {"dtype"}))  # every form of which casts to 16 bits
def test_the_reference_agrees_with_jax_in_float64(name: str, forms: int) -> None:
    """Every operator in several forms, with its gradients: two readings of one jaxpr that share no code."""
    compared = 0
    for choice in range(24):
        program = Program(
            "float64", (6,), 5, (Op(name, 0, 0, choice * 101),), outputs=(0, 1), transform="value_and_grad", seed=choice
        )
        with enable_x64():
            try:
                built = build(program)
                f = built.function(lambda f: f)
                closed = jax.make_jaxpr(f)(*built.arguments)
                got = evaluate(closed, built.arguments, Arithmetic(widen=True))
            except (Invalid, Unknown):
                continue
            want = jax.tree.leaves(jax.jit(f)(*built.arguments))
        if roundest(closed) > 1e-15:
            continue  # a cast: here the two round as they like
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, np.asarray(b, np.float64), rtol=1e-6, atol=1e-9)
        compared += 1
        if compared == forms:
            return
    assert compared, f"no form of {name} was compared"


@pytest.mark.parametrize("name", ["dense", "odd_product", "heads", "norm", "gather", "segments", "columns"])
def test_gradients_of_the_reference_are_finite_differences(name: str) -> None:
    """The oracle of a gradient does not rest on JAX's derivative rules alone."""
    compared = 0
    for choice in range(20):
        program = Program(
            "float64", (6,), 5, (Op(name, 0, 0, choice * 977),), outputs=(0,), transform="value_and_grad", seed=choice
        )
        try:
            by_rule, by_difference = finite_differences(program) or (0, 0)
        except (Invalid, Unknown):
            continue
        assert abs(by_rule - by_difference) <= 1e-6 * (1 + abs(by_difference)), program
        compared += 1
        if compared == 3:
            return
    assert compared


# --- programs --------------------------------------------------------------------------------------------------------------------


def test_a_program_is_written_and_read_back() -> None:
    for number in range(200):
        program = draw(1, number)
        assert Program.from_json(program.to_json()) == program
    assert draw(1, 7) == draw(1, 7) != draw(2, 7)


def test_the_draw_reaches_every_operator_loop_and_transformation() -> None:
    programs = [draw(0, number) for number in range(2000)]
    assert {op.name for p in programs for op in p.ops} == set(OPERATORS)
    assert {p.loop for p in programs} == set(LOOPS)
    assert {p.transform for p in programs} == set(TRANSFORMS)
    assert {p.pipelined for p in programs} == {"body", "loop", "whole", "all"}
    assert {0, 1, 200, 2051} <= {p.lead[0] for p in programs}


def test_nearly_every_program_drawn_is_valid() -> None:
    valid = 0
    for number in range(100):
        with enable_x64() if draw(5, number).dtype == "float64" else jax.enable_x64(False):
            try:
                build(draw(5, number))
                valid += 1
            except Invalid:
                pass
    assert valid >= 95


def test_digits_read_a_number_in_any_base() -> None:
    digits = Digits(2 + 3 * (1 + 2 * 4))
    assert (digits.below(3), digits.pick("a", "b"), digits.below(7), digits.below(5)) == (2, "b", 4, 0)


# --- verdicts --------------------------------------------------------------------------------------------------------------------


def planted(change: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A "pipeline" that changes the first result of what it wraps."""

    def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
        def g(*args: Any) -> Any:
            first, *rest = jax.tree.leaves(out := f(*args))
            return jax.tree.unflatten(jax.tree.structure(out), [change(first), *rest])

        return g

    return wrap


def fail(x: Any) -> Any:
    raise ZeroDivisionError("planted")


def counted() -> Callable[[Any], Any]:
    calls = iter(range(1000))

    def host(x: Any) -> Any:
        return np.asarray(x) + np.float32(1e-6) * next(calls)

    return lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.mark.parametrize(
    "change,kind",
    [
        (lambda x: x, "ok"),
        (lambda x: x * (1 + 3e-4), "wrong"),
        (lambda x: x.at[3, 2].add(1e-4), "wrong"),
        (lambda x: x.at[3, 2].set(jnp.nan), "wrong"),
        (lambda x: jnp.where(jnp.abs(x) < 0.1, 0, x), "wrong"),
        (lambda x: x.astype(jnp.bfloat16).astype(x.dtype), "wrong"),
        (lambda x: x.astype(jnp.float16), "wrong"),
        (lambda x: x.T, "wrong"),
        (lambda x: x.at[0].multiply(1 + 1e-7), "ok"),
        (fail, "exception"),
        (counted(), "nondeterministic"),
    ],
    ids=["same", "scaled", "element", "nan", "small", "rounded", "dtype", "shape", "ulp", "exception", "random"],
)
def test_a_planted_error_is_found(change: Callable[[Any], Any], kind: str) -> None:
    program = dataclasses.replace(DENSE, ops=(Op("dense", 0, 0, 3),))
    assert check(program, planted(change)).kind == kind


def test_a_wrong_gradient_is_found() -> None:
    program = dataclasses.replace(DENSE, transform="grad", transform_choice=0, pipelined="whole")
    assert check(program, planted(lambda g: g * 1.001)).kind == "wrong"
    assert check(program, planted(lambda g: g)).kind == "ok"


def test_an_error_of_plain_jax_is_no_failure() -> None:
    assert check(dataclasses.replace(DENSE, ops=(Op("axes", 0, 0, 10), Op("axes", 0, 0, 10)), lead=(3, 4))).kind in (
        "ok",
        "discarded",
    )
    program = dataclasses.replace(DENSE, lead=(0,), ops=(Op("row_statistic"), Op("sorted"), Op("rows_product")))
    assert check(program).kind in ("ok", "discarded")


@pytest.mark.expects_fallbacks
def test_a_fallback_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from kitsune_jax.frontend import lowering

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise IndexError("planted")

    monkeypatch.setattr(lowering, "routed", broken)
    outcome = check(dataclasses.replace(DENSE, features=6))
    assert outcome.kind == "fallback" and "planted" in outcome.detail


# --- shrinking -------------------------------------------------------------------------------------------------------------------


def test_a_failure_shrinks_to_the_operator_that_causes_it() -> None:
    drawn = draw(3, 5)
    drawn = dataclasses.replace(
        drawn, ops=(*drawn.ops, Op("gather", 1, 2, 12345), Op("unary", 0, 0, 99), Op("dense", 2, 1, 7)), lead=(64,)
    )
    small = shrink_within(drawn, lambda p: any(op.name == "gather" for op in p.ops) and p.lead[0] >= 2, 500)
    assert [op.name for op in small.ops] == ["gather"]
    assert (small.lead, small.loop, small.transform, small.features, small.dtype) == ((2,), "none", "none", 1, "float32")


def test_shrinking_keeps_to_its_attempts() -> None:
    asked: list[Program] = []

    def fails(p: Program) -> bool:
        asked.append(p)
        return len(asked) == 7

    assert shrink_within(draw(3, 6), fails, 7) == asked[6]
    assert len(asked) == 7


def test_candidates_are_other_programs() -> None:
    for number in range(50):
        program = draw(4, number)
        assert program not in list(candidates(program))


# --- workers and the search ------------------------------------------------------------------------------------------------------

ANSWERS = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    program = json.loads(line)
    if not program["plain"]:
        if "sorted" in line: time.sleep(60)
        if "gather" in line: os.abort()
    wrong = "norm" in line
    print(json.dumps({"kind": "wrong" if wrong else "ok", "detail": "planted" * wrong, "pipelines": 1}), flush=True)
"""


def test_a_worker_that_hangs_is_ended_and_replaced() -> None:
    worker = Worker(1.0, [sys.executable, "-c", ANSWERS])
    try:
        start = time.monotonic()
        assert worker.run(Program(ops=(Op("sorted"),)))["kind"] == "hang"
        assert time.monotonic() - start < 30
        assert worker.run(Program(ops=(Op("unary"),)))["kind"] == "ok"
        outcome = worker.run(Program(ops=(Op("gather"),)))
        assert outcome["kind"] == "crash" and "SIGABRT" in outcome["detail"]
        assert worker.run(Program(ops=(Op("unary"),)))["kind"] == "ok"
    finally:
        worker.close()


def test_what_plain_jax_dies_of_as_well_is_no_failure() -> None:
    worker = Worker(30.0, [sys.executable, "-c", ANSWERS.replace('not program["plain"]', "True")])
    try:
        assert worker.run(Program(ops=(Op("gather"),)))["kind"] == "discarded"
    finally:
        worker.close()


def test_a_search_shrinks_and_writes_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "trust.worker.command", lambda: [sys.executable, "-c", ANSWERS.replace("sorted", "never").replace("gather", "never")]
    )
    summary = search(Search(60, 1, 2, 120.0, 20.0, 200, tmp_path), show=False)
    expected = sum(any(op.name == "norm" for op in draw(1, k).ops) for k in range(60))
    assert (summary.ran, summary.failures, summary.errors) == (60, expected, []) and expected
    for path in summary.files:
        record = json.loads(path.read_text())
        assert [op[0] for op in record["program"]["ops"]] == ["norm"]
        assert any(op[0] == "norm" for op in record["drawn"]["ops"])
    assert f"{expected} failed" in summary.text()


def test_a_search_ends_with_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trust.worker.command", lambda: [sys.executable, "-c", ANSWERS.replace('"sorted" in line', "True")])
    start = time.monotonic()
    summary = search(Search(1000, 1, 1, 2.0, 60.0, 0, tmp_path), show=False)
    assert time.monotonic() - start < 20 and summary.ran == 0


def test_a_search_that_is_stopped_tells_what_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ANSWERS.replace('"sorted" in line', "False").replace('"gather" in line', "False")
    monkeypatch.setattr("trust.worker.command", lambda: [sys.executable, "-c", answers.replace("norm", "never")])
    stopped = threading.Event()
    threading.Timer(1.5, stopped.set).start()
    start = time.monotonic()
    summary = search(Search(10**9, 1, 1, 600.0, 60.0, 0, tmp_path), stopped, show=False)
    assert time.monotonic() - start < 60 and summary.ran == summary.kinds["ok"] > 0


def test_one_real_worker_answers() -> None:
    worker = Worker(120.0)
    try:
        outcome = worker.run(DENSE)
    finally:
        worker.close()
    assert outcome["kind"] == "ok" and outcome["pipelines"] >= 1


def test_signatures_leave_numbers_out(tmp_path: Path) -> None:
    first, second = ({"kind": "exception", "detail": f"ValueError: value {k} (f32[{k}]) is gone"} for k in (3, 71))
    assert signature(DENSE, first) == signature(draw(0, 0), second)
    assert signature(DENSE, first) != signature(DENSE, {"kind": "exception", "detail": "ValueError: other"})
    assert save(tmp_path, DENSE, DENSE, first) == save(tmp_path, DENSE, draw(0, 1), first)


def test_values_too_large_are_not_kept() -> None:
    ops = tuple(Op("columns", 0, 0, 7 * 21 * 0 + 14 * 7) for _ in range(10))
    built = build(Program(features=40, ops=ops))
    shapes = jax.eval_shape(built.function(lambda f: f), *built.arguments)
    assert all(x.shape[-1] <= 2 * MAX_FEATURES for x in shapes)

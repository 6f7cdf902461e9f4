"""A bug of this package costs the part it is in its pipeline, and nothing else. It is recorded, logged, told once per function."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kitsune_jax as kj
from kitsune_jax import targets
from kitsune_jax.capture import jaxpr as capture_jaxpr
from kitsune_jax.errors import Failure, forget, record
from kitsune_jax.frontend import lowering, route
from tests.support.checks import arrays, close, custom_calls, forced, in_float64

select: Any = importlib.import_module("kitsune_jax.regions.select")
X, W1, W2 = arrays(3, (6, 8), (8, 16), (16, 8))
pytestmark = pytest.mark.expects_fallbacks


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    """A plan made with a planted bug must not be remembered, nor one made without it be found."""
    lowering._routed.cache_clear()
    route._known_plans.cache_clear()
    yield
    lowering._routed.cache_clear()
    route._known_plans.cache_clear()


def two_parts(x: Any, w1: Any, w2: Any) -> Any:
    """Two regions: what stands between them is no operator that streams."""
    hidden = jnp.tanh(x @ w1)
    return jnp.cos(jnp.sort(hidden, axis=0) @ w2)


def with_a_loop(x: Any, w1: Any, w2: Any) -> Any:
    """A loop that is left to XLA, for what it sorts."""
    return jax.lax.scan(lambda c, _: (jnp.sort(jnp.sin(jnp.tanh(c @ w1) @ w2)), None), jnp.tanh(x * 2), None, length=3)[0]


class Planted(Exception):
    """An error that no part of the package expects."""


def failing(original: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            raise Planted("planted")
        return original(*args, **kwargs)

    return wrapped


def reads_columns(width: int) -> Callable[..., bool]:
    """Is the region one with a matrix of ``width`` columns among its operands?"""
    return lambda graph, region, *_, **__: any(graph.values[v].shape[-1:] == (width,) for v in region.outputs)


def run(f: Any, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return jax.jit(f)(*args)


def test_nothing_is_recorded_where_all_goes_well() -> None:
    close(jax.jit(forced(two_parts))(X, W1, W2), in_float64(two_parts, X, W1, W2))
    assert kj.fallbacks() == ()
    assert custom_calls(forced(two_parts), X, W1, W2) == 2


def test_planning_that_fails_costs_one_region(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = targets.get("cpu")
    monkeypatch.setattr(cpu, "plan", failing(cpu.plan, reads_columns(16)))
    close(run(forced(two_parts), X, W1, W2), in_float64(two_parts, X, W1, W2))
    (told,) = {(f.function.split(" ")[0], f.reason) for f in kj.fallbacks()}
    assert told == ("two_parts", "Planted: planted")
    assert all("test_fallbacks.py" in f.part for f in kj.fallbacks())
    assert all("in wrapped" in f.traceback for f in kj.fallbacks())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert custom_calls(forced(two_parts), X, W1, W2) == 1
    report = kj.explain(forced(two_parts))(X, W1, W2)
    assert 0 < report.ops_pipelined < report.ops_total
    assert any("bug of kitsune_jax" in r.reason and "Planted: planted" in r.reason for r in report.rejected)


def test_code_generation_that_fails_costs_one_region(monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter([True, False])
    cpu = targets.get("cpu")
    monkeypatch.setattr(cpu, "generate", failing(cpu.generate, lambda *_: next(made)))
    close(run(forced(two_parts), X, W1, W2), in_float64(two_parts, X, W1, W2))
    (fallback,) = kj.fallbacks()
    assert fallback.reason == "Planted: planted" and fallback.count == 1


def test_a_call_that_cannot_be_bound_is_evaluated_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    called = route.PlannedRegion.call
    monkeypatch.setattr(route.PlannedRegion, "call", failing(called, lambda planned, *_: planned.name == "region0"))
    close(run(forced(two_parts), X, W1, W2), in_float64(two_parts, X, W1, W2))
    (fallback,) = kj.fallbacks()
    assert fallback.part == "the call of region0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        pipelined = lowering.pipelined_jaxpr(jax.make_jaxpr(two_parts)(X, W1, W2), lowering.RouteOptions(force=True), "cpu")
    assert 0 < pipelined.report.ops_pipelined < pipelined.report.ops_total
    assert [r.name for r in pipelined.report.regions] == ["region1"]


def test_forming_a_region_that_fails_costs_one_region(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []

    def first(*_: Any) -> bool:
        chosen.append(None)
        return len(chosen) == 1

    monkeypatch.setattr(select, "spread", failing(select.spread, first))
    close(run(forced(two_parts), X, W1, W2), in_float64(two_parts, X, W1, W2))
    assert {f.reason for f in kj.fallbacks()} == {"Planted: planted"}
    assert lowering.pipelined_jaxpr(
        jax.make_jaxpr(two_parts)(X, W1, W2), lowering.RouteOptions(force=True), "cpu"
    ).report.ops_pipelined


def test_followers_that_fail_leave_the_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select.FollowerSearch, "run", failing(select.FollowerSearch.run, lambda *_: True))

    def step(x: Any, w1: Any, w2: Any) -> Any:
        return w1 - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w @ w2) ** 2))(w1)

    close(run(forced(step), X, W1, W2), in_float64(step, X, W1, W2))
    assert {f.reason for f in kj.fallbacks()} == {"Planted: planted"}
    assert kj.explain(forced(step))(X, W1, W2).ops_pipelined > 0


def test_a_loop_body_that_fails_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_the_body(captured: Any, *_: Any, **__: Any) -> bool:
        return all(op.label != "scan" for op in captured.graph.ops)

    monkeypatch.setattr(lowering, "plan_and_schedule", failing(lowering.plan_and_schedule, in_the_body))
    close(run(forced(with_a_loop), X, W1, W2), in_float64(with_a_loop, X, W1, W2))
    (fallback,) = kj.fallbacks()
    assert "loop" in fallback.part and fallback.function.startswith("with_a_loop (")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert custom_calls(forced(with_a_loop), X, W1, W2) == 1


def test_a_capture_that_fails_costs_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "capture", failing(lowering.capture, lambda *_, **__: True))
    close(run(forced(two_parts), X, W1, W2), in_float64(two_parts, X, W1, W2))
    (fallback,) = kj.fallbacks()
    assert (fallback.part, fallback.reason) == ("the whole function", "Planted: planted")


def test_what_capture_returns_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    original = capture_jaxpr.capture
    failure = Failure("the slices of a product", "Planted: planted")
    monkeypatch.setattr(lowering, "capture", lambda *a, **k: dataclasses.replace(original(*a, **k), failures=(failure,)))
    close(run(forced(two_parts), X, W1, W2), in_float64(two_parts, X, W1, W2))
    assert [f.part for f in kj.fallbacks()] == ["the slices of a product"]
    with pytest.raises(RuntimeError, match="the slices of a product"):
        jax.jit(forced(two_parts, strict=True))(X, W1, W2)


@pytest.mark.parametrize("place", ["plan", "generate", "emit", "capture"])
def test_strict_raises_the_error_itself(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    module: Any = lowering if place == "capture" else targets.get("cpu")
    monkeypatch.setattr(module, place, failing(getattr(module, place), lambda *_, **__: True))
    with pytest.raises(Planted):
        jax.jit(forced(two_parts, strict=True))(X, W1, W2)
    assert kj.fallbacks() == ()


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        lambda f: jax.grad(lambda *a: jnp.sum(f(*a))),
        lambda f: lambda *a: jax.jvp(f, a, a),
        lambda f: jax.vmap(f, (0, None, None)),
        lambda f: jax.checkpoint(f),
        lambda f: lambda x, *w: jax.lax.map(lambda y: f(y, *w), x),
    ],
    ids=["jit", "grad", "jvp", "vmap", "checkpoint", "map"],
)
def test_the_name_of_the_function_survives_transformations(monkeypatch: pytest.MonkeyPatch, transform: Any) -> None:
    monkeypatch.setattr(lowering, "route", failing(lowering.route, lambda *_, **__: True))

    def my_layer(x: Any, w1: Any, w2: Any) -> Any:
        return jnp.tanh(x @ w1) @ w2

    x = jnp.stack([X, X]) if "vmap" in str(transform) else X[None]
    run(transform(forced(my_layer)), x, W1, W2)
    assert {f.function.split(" (")[0] for f in kj.fallbacks()} == {"my_layer"}
    assert all("test_fallbacks.py:" in f.function for f in kj.fallbacks())


def test_each_function_is_told_once_and_counted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(lowering, "route", failing(lowering.route, lambda *_, **__: True))

    def first(x: Any) -> Any:
        return jnp.sin(x)

    def second(x: Any) -> Any:
        return jnp.cos(x)

    with warnings.catch_warnings(record=True) as told, caplog.at_level(logging.WARNING, logger="kitsune_jax"):
        warnings.simplefilter("always")
        for f in (first, second):
            for rows in (2, 3):
                jax.jit(forced(f))(X[:rows])
    messages = [str(w.message) for w in told if "kitsune_jax could not" in str(w.message)]
    assert len(messages) == 2
    assert "first (test_fallbacks.py:" in messages[0] and "second (" in messages[1]
    assert all("Planted: planted" in m and "KITSUNE_STRICT=1" in m and "kitsune_jax.fallbacks()" in m for m in messages)
    assert [f.count for f in kj.fallbacks()] == [2, 2]
    assert caplog.text.count("raise Planted") == 4  # the traceback, each time


def test_records_reach_configured_logs_only(capfd: pytest.CaptureFixture[str]) -> None:
    record_without_handlers = "import logging, warnings; warnings.simplefilter('ignore')\n" + (
        "from kitsune_jax.errors import Failure, record\nrecord('f', Failure('all', 'because'))\n"
    )
    program = "import kitsune_jax\n" + record_without_handlers
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "because" not in done.stderr
    configured = "import logging; logging.basicConfig()\n" + program
    done = subprocess.run([sys.executable, "-c", configured], capture_output=True, text=True, timeout=120)
    assert "because" in done.stderr


def test_a_warning_that_is_an_error_is_recorded_first() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="could not pipeline all of f,"):
            record("f", Failure("all", "because"))
    assert [(f.function, f.part, f.reason) for f in kj.fallbacks()] == [("f", "all", "because")]
    forget()
    assert kj.fallbacks() == ()

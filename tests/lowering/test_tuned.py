"""Functions whose plan is chosen by time: the faster of the plans runs, and the report says how long both took."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax import tuning
from kitsune_jax.frontend import lowering
from kitsune_jax.report.data import MeasuredTimes, time_text
from kitsune_jax.tuning import FORCED, JIT, MODELLED, OPTIMISTIC
from tests.support.checks import count

RNG = np.random.default_rng(5)
X = RNG.standard_normal((4000, 64)).astype(np.float32)
WS = [RNG.standard_normal((64, 64)).astype(np.float32) / 8 for _ in range(3)]
IDS = RNG.integers(0, 50, 4000)


def mlp(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jax.nn.relu(x @ w)
    return x


def row_sums(x: Any, ids: Any) -> Any:
    """The model leaves it to XLA."""
    return jax.ops.segment_sum(jnp.tanh(x[:, :16]) * 2, ids, 50)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("KITSUNE_TUNE", "on")
    monkeypatch.setattr(tuning, "_known", {})


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Called with seconds by name, makes them the measured times of the plans that there are. Returns the list of these plans."""

    def fake(**seconds: float) -> list[str]:
        timed: list[str] = []

        def result(self: Any) -> dict[str, float]:
            found = {name: seconds[name] for name, make in self.candidates.items() if name in seconds and make() is not None}
            if not found:
                raise tuning._NotMeasured("there is no other plan")
            timed.extend((JIT, *found))
            return {JIT: seconds[JIT], **found}

        monkeypatch.setattr(tuning._Measurement, "result", result)
        return timed

    return fake


def calls(f: Callable[..., Any], *args: Any) -> int:
    return int(jax.jit(f).lower(*args).as_text().count("stablehlo.custom_call @kitsune"))


def test_the_models_plan_stays_where_it_is_faster(measured: Callable[..., list[str]]) -> None:
    timed = measured(jit=2e-3, modelled=1e-3)
    fn = kj.pipeline(mlp)
    assert calls(fn, WS, X) == 1
    assert timed == [JIT, MODELLED]
    report = kj.explain(fn)(WS, X)
    assert report.coverage == 1.0
    assert str(report).startswith("2.00x as fast as jax.jit, measured on this machine (1.00 ms instead of 2.00 ms); 6 of 6")
    (region,) = report.regions
    assert region.measured == report.measured
    assert "measured: 1.00 ms, with jax.jit 2.00 ms (2.00x); modelled: " in str(report) and "likely" not in str(report)
    np.testing.assert_allclose(jax.jit(fn)(WS, X), mlp(WS, X), rtol=1e-4, atol=1e-4)


def test_jit_runs_where_no_plan_is_faster(measured: Callable[..., list[str]]) -> None:
    measured(jit=1e-3, modelled=2e-3)
    fn = kj.pipeline(mlp)
    assert calls(fn, WS, X) == 0
    report = kj.explain(fn)(WS, X)
    assert not report.regions
    assert {r.reason for r in report.rejected} == {"measured on this machine: 2.00 ms with pipelines, 1.00 ms with jax.jit (0.50x)"}
    np.testing.assert_allclose(jax.jit(fn)(WS, X), mlp(WS, X), rtol=1e-4, atol=1e-4)


def test_what_jit_is_known_to_be_faster_for_is_not_planned_again(
    measured: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(jit=1e-3, modelled=2e-3)
    fn = kj.pipeline(mlp)
    assert calls(fn, WS, X) == 0

    captured: list[Any] = []
    monkeypatch.setattr(lowering, "capture", captured.append)
    jax.clear_caches()
    assert calls(fn, WS, X) == 0 and not captured


@pytest.mark.parametrize("name", [OPTIMISTIC, FORCED])
def test_a_plan_that_the_model_rejects_runs_where_it_is_faster(
    measured: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(lowering, "_DOUBT", 1e3)
    timed = measured(jit=2e-3, **{name: 1e-3})
    fn = kj.pipeline(row_sums)
    assert not kj.explain(fn)(X, IDS).regions  # nothing has been measured yet
    assert calls(fn, X, IDS) == 1
    assert timed == [JIT, name]
    (region,) = kj.explain(fn)(X, IDS).regions
    assert region.baseline_seconds < region.seconds  # the model still says so
    np.testing.assert_allclose(jax.jit(fn)(X, IDS), row_sums(X, IDS), rtol=1e-4, atol=1e-4)


def test_both_passes_of_a_gradient_are_measured(measured: Callable[..., list[str]]) -> None:
    timed = measured(jit=2e-3, modelled=1e-3)
    fn = kj.pipeline(mlp)
    step = jax.jit(jax.grad(lambda ws: jnp.sum(fn(ws, X) ** 2)))
    got = step(WS)
    assert timed == [JIT, MODELLED] * 2
    want = jax.grad(lambda ws: jnp.sum(mlp(ws, X) ** 2))(WS)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-3, atol=1e-2)


def test_equal_calls_are_measured_once(measured: Callable[..., list[str]]) -> None:
    timed = measured(jit=2e-3, modelled=1e-3)
    fn = kj.pipeline(lambda x: mlp(WS[:2], x))
    assert calls(lambda x: fn(fn(fn(x))), X) > 0
    assert timed == [JIT, MODELLED]


def test_all_calls_of_a_program_share_one_budget(measured: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    measured(jit=2e-3, modelled=1e-3)
    seen: list[float] = []
    choose = tuning.choose

    def spend(key: str, program: Any, candidates: Any, platform: str, budget: tuning.Budget, *others: Any) -> Any:
        seen.append(budget.left)
        budget.left -= 1.0
        return choose(key, program, candidates, platform, budget, *others)

    monkeypatch.setattr(tuning, "choose", spend)
    one, other = kj.pipeline(mlp), kj.pipeline(lambda ws, x: mlp(ws, x) * 2)
    jax.jit(lambda ws, x: jax.lax.scan(lambda c, _: (one(ws, c), None), other(ws, x), None, length=2)).lower(WS, X)
    assert [round(left) for left in seen] == [5, 4]
    jax.jit(lambda ws, x: kj.pipeline(mlp)(ws, x + 1)).lower(WS, X[:5])
    assert round(seen[2]) == 5  # another program


def _exported(fn: Any) -> None:
    jax.export.export(jax.jit(fn))(WS, X)


@pytest.mark.parametrize(
    ("how", "options", "variables"),
    [
        ("off", {}, {"KITSUNE_TUNE": "off"}),
        ("forced", {"force": True}, {}),
        ("strict", {"strict": True}, {}),
        ("explained", {}, {}),
        ("exported", {}, {}),
    ],
)
def test_nothing_is_measured(
    measured: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    options: dict[str, Any],
    variables: dict[str, str],
) -> None:
    timed = measured(jit=2e-3, modelled=1e-3, forced=1e-3)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    fn = kj.pipeline(mlp, **options)
    if how == "explained":
        kj.explain(fn)(WS, X)
    elif how == "exported":
        _exported(fn)
    else:
        assert calls(fn, WS, X) == 1
    assert not timed


@pytest.mark.parametrize(("seconds", "want"), [({"jit": 2e-3, "modelled": 1e-3}, 1), ({"jit": 1e-3, "modelled": 2e-3}, 0)])
def test_an_exported_function_with_a_symbolic_batch_is_timed_where_it_is_called(
    measured: Callable[..., list[str]], seconds: dict[str, float], want: int
) -> None:
    timed = measured(**seconds)
    (rows,) = jax.export.symbolic_shape("rows")
    allowed = jax.export.DisabledSafetyCheck.custom_call("kitsune_region (import kitsune_jax)")
    fn = jax.jit(kj.pipeline(mlp, export="calls"))
    sent = jax.export.export(fn, disabled_checks=[allowed])(WS, jax.ShapeDtypeStruct((rows, 64), np.float32)).serialize()
    assert not timed
    compiled = jax.jit(jax.export.deserialize(sent).call).lower(WS, X).compile()
    assert timed == [JIT, MODELLED]
    assert count(compiled.as_text()) == want
    np.testing.assert_allclose(compiled(WS, X), mlp(WS, X), rtol=1e-3, atol=1e-3)


def _on_two_devices(fn: Callable[..., Any], *args: Any) -> Any:
    """``fn`` compiled for a batch that two devices share."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    rows, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("d",), ()))
    placed = [jax.device_put(x, rows if x is X or x is IDS else whole) for x in args]
    return jax.jit(fn).lower(*placed).compile(), placed


@pytest.mark.parametrize(("seconds", "want"), [({"jit": 2e-3, "modelled": 1e-3}, 1), ({"jit": 1e-3, "modelled": 2e-3}, 0)])
def test_a_shard_is_chosen_by_time(measured: Callable[..., list[str]], seconds: dict[str, float], want: int) -> None:
    timed = measured(**seconds)
    f = lambda ws, x: mlp(ws, x) * (2 + want)  # noqa: E731 (programs of shards are kept)
    compiled, args = _on_two_devices(kj.pipeline(f), WS, X)
    assert timed == [JIT, MODELLED]
    assert count(compiled.as_text()) == want
    np.testing.assert_allclose(compiled(*args), f(WS, X), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("seconds", "want"), [({"jit": 2e-3, "modelled": 1e-3}, 1), ({"jit": 1e-3, "modelled": 2e-3}, 0)])
def test_a_shard_is_timed_with_its_collectives(
    measured: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], want: int
) -> None:
    timed, seen, faked = measured(**seconds), list[str](), tuning._Measurement.result

    def result(self: Any) -> dict[str, float]:
        assert dict(self.axes) == {"a0": 2} and "psum" in str(self.program)
        seen.append(str(self.program))
        return faked(self)

    monkeypatch.setattr(tuning._Measurement, "result", result)
    step = jax.grad(lambda ws, x: jnp.sum(mlp(ws, x) ** 2) * (1 + want))
    compiled, args = _on_two_devices(kj.pipeline(step), WS, X)
    assert timed == [JIT, MODELLED] and len(seen) == 1
    assert count(compiled.as_text()) == want and "all-reduce" in compiled.as_text()
    for got, expected in zip(compiled(*args), step(WS, X), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-1)


def test_the_devices_that_share_a_cpu_run_a_shard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not faked. Which plan wins depends on the machine; the result does not."""
    monkeypatch.setenv("KITSUNE_TUNE", "all")
    seen, compiled_before = list[int](), tuning._compiled

    def compiled(jaxpr: Any, args: Any, mesh: Any) -> Any:
        seen.append(len(args[0].sharding.device_set))
        return compiled_before(jaxpr, args, mesh)

    monkeypatch.setattr(tuning, "_compiled", compiled)
    f = lambda ws, x: jnp.sum(mlp(ws, x), 0) / 3  # noqa: E731
    run, args = _on_two_devices(kj.pipeline(f), WS, X)
    assert len(seen) >= 2 and set(seen) == {2}
    (choice,) = tuning._known.values()
    assert choice is not None and set(choice.seconds) >= {JIT, MODELLED}
    np.testing.assert_allclose(run(*args), f(WS, X), rtol=1e-3, atol=1e-3)


def test_several_processes_leave_shards_to_the_model(measured: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """They must all compile the same."""
    timed = measured(jit=1e-3, modelled=2e-3)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    compiled, _ = _on_two_devices(kj.pipeline(lambda ws, x: mlp(ws, x) / 5), WS, X)
    assert not timed and count(compiled.as_text()) == 1


def test_a_function_of_one_device_among_several_measures_nothing(measured: Callable[..., list[str]]) -> None:
    timed = measured(jit=2e-3, modelled=1e-3, forced=1e-3)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("d")
    fn = jax.shard_map(kj.pipeline(mlp), mesh=mesh, in_specs=(jax.sharding.PartitionSpec(), spec), out_specs=spec)
    assert calls(fn, WS, X) == 1
    assert not timed


def test_callbacks_run_as_often_as_the_user_asks() -> None:
    seen: list[float] = []

    @kj.pipeline
    def fn(ws: Any, x: Any) -> Any:
        y = mlp(ws, x)
        jax.debug.callback(lambda s: seen.append(float(s)), jnp.sum(y))
        return y

    jax.block_until_ready(jax.jit(fn)(WS, X))
    jax.effects_barrier()
    assert len(seen) == 1


def test_times_of_this_machine_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not faked: whichever wins, the answer is right, and the report tells the times of both."""
    monkeypatch.setenv("KITSUNE_TUNE", "all")  # however busy the machine is
    fn = kj.pipeline(mlp)
    np.testing.assert_allclose(jax.jit(fn)(WS, X), mlp(WS, X), rtol=1e-4, atol=1e-4)
    report = kj.explain(fn)(WS, X)
    assert report.measured is not None and report.measured.seconds > 0 and report.measured.jit_seconds > 0
    assert time_text(report.measured.jit_seconds) in report.text()


def test_a_bug_of_ours_in_measuring_costs_only_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(tuning, "random_arguments", broken)
    assert calls(kj.pipeline(mlp), WS, X) == 1


def test_a_function_and_the_same_body_of_a_loop_are_chosen_apart(measured: Callable[..., list[str]]) -> None:
    """In a loop that XLA runs a call's results are copied to the carries."""
    timed = measured(jit=2e-3, modelled=1e-3)
    chooser = lowering.Chooser(kj.config.Options(), "cpu", tuning.Budget(5.0))
    program = jax.make_jaxpr(mlp)(WS, X)
    for body in (False, True, True):
        lowering.fastest(program, lowering.RouteOptions(body=body), "cpu", chooser)
    assert timed == [JIT, MODELLED] * 2


def test_options_of_a_choice_make_its_plan() -> None:
    options = lowering.RouteOptions(body=True)
    assert lowering.options_of(MODELLED, options) == options
    assert lowering.options_of(FORCED, options) == lowering.RouteOptions(body=True, force=True)
    assert lowering.options_of(JIT, options, "why").left == "why"


def halved(x: Any, ws: Any) -> Any:
    """A loop of an unknown number of steps: it cannot be timed as one."""
    return jax.lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 1e-3, lambda x: mlp(ws, x) / 2, x)


@pytest.mark.parametrize(("seconds", "want"), [({"jit": 2e-3, "modelled": 1e-3}, 1), ({"jit": 1e-3, "modelled": 2e-3}, 0)])
def test_the_body_of_a_while_loop_is_timed_alone(measured: Callable[..., list[str]], seconds: dict[str, float], want: int) -> None:
    timed = measured(**seconds)
    fn = kj.pipeline(halved)
    assert calls(fn, X, WS) == want
    assert timed == [JIT, MODELLED]
    report = kj.explain(fn)(X, WS)
    assert len(report.regions) == want
    assert want or "measured on this machine: 2.00 ms with pipelines, 1.00 ms with jax.jit (0.50x)" in {
        r.reason for r in report.rejected
    }
    np.testing.assert_allclose(jax.jit(fn)(X, WS), jax.jit(halved)(X, WS), rtol=1e-4, atol=1e-6)


# -- programs that cannot be timed as one


def talking(ws: Any, x: Any, ids: Any) -> tuple[Any, Any]:
    """Two calls around an effect, which keeps the program from being run for its time."""
    y = jax.lax.optimization_barrier(mlp(ws, x))
    jax.debug.callback(lambda _: None, y[0, 0])
    return y, row_sums(y, ids)


@pytest.fixture
def doubts_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's times are as uncertain as they can be, so each call is timed and none is left out before."""
    monkeypatch.setattr(lowering, "_DOUBT", 1e3)


def test_the_plans_of_a_loops_body_are_timed_with_their_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were made without code, and all took as long as ``jax.jit``."""
    seen = list[bool]()

    def result(self: Any) -> dict[str, float]:
        plan = self.candidates[MODELLED]()
        if plan is None:
            raise tuning._NotMeasured("there is no other plan")
        seen.append("kitsune:" in str(plan))
        return {JIT: 2e-3, MODELLED: 1e-3}

    monkeypatch.setattr(tuning._Measurement, "result", result)
    assert calls(kj.pipeline(halved), X, WS) == 1
    assert seen == [True]


def timed_calls(monkeypatch: pytest.MonkeyPatch, jit: Callable[[str], float]) -> list[str]:
    """Makes a call take 1 ms and XLA as long as ``jit`` says of its program. Returns the programs that are timed."""
    seen: list[str] = []

    def result(self: Any) -> dict[str, float]:
        (make,) = self.candidates.values()
        assert "kitsune:" in str(make()) and "kitsune:" not in str(self.program)
        seen.append(str(self.program))
        return {JIT: jit(seen[-1]), MODELLED: 1e-3}

    monkeypatch.setattr(tuning._Measurement, "result", result)
    return seen


def test_of_a_program_with_effects_each_call_is_timed(doubts_everything: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fn = kj.pipeline(talking)
    seen = timed_calls(monkeypatch, lambda program: 2e-3 if "dot_general" in program else 0.5e-3)
    assert calls(fn, WS, X, IDS) == 1 and len(seen) == 2
    report = kj.explain(fn)(WS, X, IDS)
    (region,) = report.regions
    assert "dot_general" in str(region) and region.measured == MeasuredTimes(1e-3, 2e-3)
    assert report.measured is None and "measured: 1.00 ms, with jax.jit 2.00 ms (2.00x); modelled: " in str(report)
    assert any("1 call faster than XLA's code (2.00x), 1 slower and left to XLA" in note for note in report.notes), report.notes
    assert "measured on this machine: 1.00 ms with pipelines, 500 us with jax.jit (0.50x)" in {r.reason for r in report.rejected}
    for got, want in zip(jax.jit(fn)(WS, X, IDS), talking(WS, X, IDS), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_equal_calls_of_a_long_program_are_timed_once(doubts_everything: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def layers(x: Any) -> Any:
        for _ in range(3):
            x = jax.lax.optimization_barrier(mlp(WS[:2], x))
        return x

    fn = kj.pipeline(layers)
    monkeypatch.setattr(tuning, "takes_too_long", lambda program, platform: True)
    seen = timed_calls(monkeypatch, lambda _: 2e-3)
    assert calls(fn, X) == 3 and len(seen) == 1
    np.testing.assert_allclose(jax.jit(fn)(X), layers(X), rtol=1e-4, atol=1e-4)


def test_a_call_without_a_time_stays_only_where_the_model_sees_a_clear_gain(
    doubts_everything: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn = kj.pipeline(talking)
    choose = tuning.choose

    def only_networks(key: str, program: Any, *rest: Any) -> Any:
        return choose(key, program, *rest) if "dot_general" in str(program) else None

    monkeypatch.setattr(tuning, "choose", only_networks)
    timed_calls(monkeypatch, lambda _: 2e-3)
    assert calls(fn, WS, X, IDS) == 1  # the model leaves the sums to XLA
    assert {r.reason.rpartition(",")[2] for r in kj.explain(fn)(WS, X, IDS).rejected if "modelled" in r.reason} == {
        " and not measured"
    }


def test_where_no_call_was_timed_the_plan_is_the_models(doubts_everything: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fn = kj.pipeline(talking)
    monkeypatch.setattr(tuning, "choose", lambda *args: None)
    assert calls(fn, WS, X, IDS) == 1
    (region,) = kj.explain(fn)(WS, X, IDS).regions
    assert region.baseline_seconds > region.seconds


def test_calls_are_really_timed(doubts_everything: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_TUNE", "all")  # however long it takes here
    fn = kj.pipeline(talking)
    for got, want in zip(jax.jit(fn)(WS, X, IDS), talking(WS, X, IDS), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
    (note,) = [note for note in kj.explain(fn)(WS, X, IDS).notes if "each call for itself" in note]
    assert sum(map(int, re.findall(r"(\d+) (?:call|calls|slower)\b", note))) == 2, note
    assert not kj.fallbacks()


@pytest.mark.expects_fallbacks
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_call_whose_timing_fails_costs_no_other_its_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(lowering, "_program_of", fails)
    fn = kj.pipeline(talking)
    assert calls(fn, WS, X, IDS) == 2
    assert {(f.part, f.reason) for f in kj.fallbacks()} == {("the timing of region1", "RuntimeError: planted")}


def test_bodies_of_loops_are_chosen_as_if_they_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is assumed of XLA for the function around them: their choice is remembered under their own key."""
    factors: list[tuple[bool, float]] = []
    fastest = lowering.fastest

    def note(program: Any, options: Any, *rest: Any) -> Any:
        factors.append((options.body, options.xla_factor))
        return fastest(program, options, *rest)

    monkeypatch.setattr(lowering, "fastest", note)

    def until(ws: Any, x: Any) -> Any:
        return jax.lax.while_loop(lambda c: jnp.sum(c[1]) < c[0], lambda c: (c[0] - 1, mlp(ws, c[1])), (5, x))[1]

    jax.jit(kj.pipeline(until)).lower(WS, X)
    assert (False, 1.0) in factors and {factor for body, factor in factors if body} == {1.0}

"""The grid of ordinary functions: its sample, its statistics, its verdicts and its files; and some cases really measured."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import json
import random
import statistics
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from benchmarks import grid, grid_measure, grid_report, grid_verdict, store, table
from benchmarks.__main__ import README, main
from benchmarks.grid_cases import (
    ACTIVATIONS,
    APPLICATIONS,
    DEPTHS,
    DTYPES,
    ITEM_BYTES,
    KINDS,
    MODES,
    NAMED,
    PROGRAMS,
    REDUCTIONS,
    ROWS,
    WIDTHS,
    GridCase,
    Limits,
    draw,
)
from benchmarks.grid_functions import REDUCTIONS as REDUCED
from benchmarks.grid_functions import make_problem, row_error, update_error

SELECT = importlib.import_module("kitsune_jax.regions.select")  # of the package, ``select`` is the function
SMALL = GridCase("mlp", "infer", "f32", 509, 32, 2, "relu")


# --- the sample


def test_equal_arguments_draw_the_equal_sample() -> None:
    assert draw(grid.CASES, 3) == draw(grid.CASES, 3)
    assert draw(grid.CASES, 3) != draw(grid.CASES, 4)
    assert draw(60, 3).cases == draw(grid.CASES, 3).cases[:60]


def test_named_cases_applications_and_reductions_are_always_in_it() -> None:
    cases = draw(grid.CASES, 0).cases
    assert cases[: len(NAMED)] == NAMED
    assert {*APPLICATIONS, *REDUCTIONS} <= set(cases)
    assert len(cases) == len(set(cases)) == grid.CASES
    assert len({c.label for c in cases}) == grid.CASES


def test_reductions_are_of_one_to_64_megabytes() -> None:
    assert len(REDUCTIONS) == 12
    sizes = [case.rows * case.width * ITEM_BYTES[case.dtype] for case in REDUCTIONS]
    assert all(1 << 20 <= size <= 65 << 20 for size in sizes)


def test_every_level_of_every_factor_is_drawn() -> None:
    drawn = draw(400, 0, Limits(float("inf"), 1 << 60)).cases[len((*NAMED, *APPLICATIONS, *REDUCTIONS, *PROGRAMS)) :]
    mlps = [c for c in drawn if c.kind == "mlp"]
    for name, levels in {
        "width": WIDTHS,
        "depth": DEPTHS,
        "rows": ROWS,
        "activation": ACTIVATIONS,
        "dtype": DTYPES,
        "mode": MODES,
        "norm": (False, True),
    }.items():
        counts = collections.Counter(getattr(c, name) for c in mlps)
        assert set(counts) == set(levels)
    kinds = collections.Counter(c.kind for c in drawn)
    assert set(kinds) == {"mlp", "softmax", "pointwise"}
    assert kinds["mlp"] > 0.7 * len(drawn)
    modes = collections.Counter(c.mode for c in drawn)
    assert abs(modes["infer"] - modes["train"]) < 0.1 * len(drawn)


def test_limits_leave_out_large_cases_and_count_them() -> None:
    limits = Limits(flops=1e9, memory=32 << 20)
    sample = draw(grid.CASES, 0, limits)
    assert sample.too_large > 10
    assert all(limits.admit(c) for c in sample.cases if c not in (*NAMED, *APPLICATIONS, *REDUCTIONS, *PROGRAMS))


def test_impossible_limits_end() -> None:
    assert len(draw(grid.CASES, 0, Limits(flops=0)).cases) == len((*NAMED, *APPLICATIONS, *REDUCTIONS, *PROGRAMS))


def test_work_and_memory_are_counted() -> None:
    case = GridCase("mlp", "infer", "bf16", 100, 64, 3)
    assert case.flops() == 3 * (2 * 64 * 64 + 640) * 100
    assert dataclasses.replace(case, mode="train").flops() == 3 * case.flops()
    assert case.memory() == 2 * (3 * 100 * 64 + 3 * 3 * 64 * 64)


# --- the functions


ONE_MODE = {"reduction": "infer", "program": "train"}


@pytest.mark.parametrize(("kind", "mode"), [(k, m) for k in KINDS for m in MODES if ONE_MODE.get(k, m) == m])
def test_every_kind_has_a_function(kind: str, mode: str) -> None:
    app = {"app": "mgn", "reduction": "variance, leading", "program": "Gaussian process"}.get(kind, "")
    case = GridCase(kind, mode, "f32", 37, 24, 2, "silu", kind == "mlp", app=app)
    problem = make_problem(case)
    got = jax.eval_shape(problem.function, *problem.args)
    assert jax.tree.leaves(got)
    if kind == "program":  # (loss, gradient)
        assert jax.tree.structure(got[1]) == jax.tree.structure(problem.args[0])
        assert got[0].shape == ()
    elif mode == "train":  # (parameters or state, loss)
        assert jax.tree.structure(got[0]) == jax.tree.structure(problem.args[0])
        assert got[1].shape == ()


@pytest.mark.parametrize("case", [c for c in PROGRAMS if c.dtype == "f32"], ids=lambda c: c.app)
def test_the_gradient_of_a_program_is_that_of_its_loss(case: GridCase) -> None:
    """Along its own direction, by central differences in float64: for a random direction the differences are of rounding's size."""
    problem = make_problem(dataclasses.replace(case, rows=24))
    function = jax.jit(problem.function)
    with jax.enable_x64(True):
        params, *inputs = jax.tree.map(lambda a: np.asarray(a, np.float64 if a.dtype == np.float32 else None), problem.args)
        loss, gradient = jax.tree.map(np.asarray, function(params, *inputs))
        length = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradient)))
        step = 1e-6 / length
        ahead, behind = (
            float(function(jax.tree.map(lambda p, g, s=sign: p + s * step * g, params, gradient), *inputs)[0]) for sign in (1, -1)
        )
    assert loss > 0
    np.testing.assert_allclose((ahead - behind) / (2 * step), length**2, rtol=1e-3)


def test_an_mlp_is_what_its_case_says() -> None:
    problem = make_problem(dataclasses.replace(SMALL, depth=3, width=16, rows=5, norm=True))
    params, x = problem.args
    h = np.asarray(x, np.float64)
    for k, layer in enumerate(params):
        weights = {name: np.asarray(a, np.float64) for name, a in layer.items()}
        if k:
            h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5) * weights["gain"] + weights["bias"]
        h = np.maximum(h @ weights["w"] + weights["b"], 0)
    np.testing.assert_allclose(problem.function(*problem.args), h, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(REDUCED))
def test_a_reduction_is_what_its_name_says(name: str) -> None:
    problem = make_problem(GridCase("reduction", "infer", "f32", 512, 24, app=name))
    x, *others = (np.asarray(a, np.float64) for a in problem.args)
    what, _, dimension = name.partition(", ")
    axes = {"leading": 0, "middle": 1}.get(dimension)
    of = {
        "mean of squares": lambda: np.mean(x**2, axes),
        "variance": lambda: np.var(x, axes),
        "sum of absolute values": lambda: np.sum(abs(x), axes),
        "squared difference": lambda: np.sum((x - others[0]) ** 2),
        "squared difference of neighbours": lambda: np.sum(np.diff(x, axis=1) ** 2),
    }
    assert x.ndim == (3 if dimension in ("middle", "") else 2)
    np.testing.assert_allclose(problem.function(*problem.args), of[what](), rtol=1e-4)


def test_a_training_step_goes_down() -> None:
    problem = make_problem(dataclasses.replace(SMALL, mode="train", activation="none", depth=1))
    params, x, y = problem.args
    first = problem.function(params, x, y)
    assert problem.function(first[0], x, y)[1] < 0.95 * first[1]


def test_one_wrong_row_is_an_error() -> None:
    rows = np.random.default_rng(0).standard_normal((4001, 8), np.float32)
    wrong = rows.copy()
    wrong[17] = 0
    assert row_error(rows, rows) == 0
    assert row_error(wrong, rows) > 0.2
    wrong[17, 0] = np.nan
    assert row_error(wrong, rows) == float("inf")


def test_an_update_is_compared_by_what_it_changes() -> None:
    old = {"w": jnp.full((64, 64), 2.0, jnp.bfloat16)}
    want = ({"w": jnp.full((64, 64), 2.25, jnp.bfloat16)}, jnp.float32(1))
    beside = ({"w": jnp.full((64, 64), 2.265625, jnp.bfloat16)}, jnp.float32(1))  # one unit in the last place
    assert update_error(old)(beside, want) <= 0
    assert update_error(old)((old, jnp.float32(1)), want) > 0.9  # no update at all
    assert update_error(old)((want[0], jnp.float32(2)), want) == 1


# --- the statistics


def test_a_median_interval_holds_the_median_as_often_as_it_says() -> None:
    rng = random.Random(0)
    inside = 0
    for _ in range(2000):
        low, high = grid_verdict.median_interval([rng.lognormvariate(0, 0.5) for _ in range(21)])
        inside += low <= 1 <= high
    assert 0.95 <= inside / 2000 < 0.985  # it does not say more than that by far, either
    assert grid_verdict.median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert grid_verdict.median_interval([2.0]) == (2.0, 2.0)


def test_a_ratio_is_taken_within_rounds() -> None:
    base, other = [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]  # the second round ran at half the clock
    assert grid_verdict.ratio(base, other) == {"median": 2.0, "low": 2.0, "high": 2.0, "of_minima": 2.0, "n": 3}


def _ratio(median: float, low: float, high: float, n: int = 20) -> dict[str, float | int]:
    return {"median": median, "low": low, "high": high, "of_minima": median, "n": n}


def test_rounds_end_when_the_ratio_is_known() -> None:
    assert grid_verdict.settled(_ratio(1.0, 0.99, 1.01))
    assert not grid_verdict.settled(_ratio(1.0, 0.99, 1.01, n=4))
    assert grid_verdict.settled(_ratio(2.0, 1.9, 2.1))  # clear of every threshold
    assert not grid_verdict.settled(_ratio(1.1, 1.04, 1.15))
    assert not grid_verdict.settled(_ratio(2.0, 1.5, 2.5))


def test_what_is_slower_or_near_a_threshold_is_measured_again() -> None:
    doubtful = grid_verdict.doubtful
    assert doubtful({"choice": _ratio(0.8, 0.79, 0.81)})
    assert doubtful({"choice": _ratio(1.5, 1.49, 1.51), "forced": _ratio(1.1, 1.09, 1.11)})
    assert not doubtful({"choice": _ratio(1.0, 0.98, 1.02)})
    assert not doubtful({"choice": grid_verdict.by_definition()})


# --- the verdicts


def _record(choice: float, forced: float, mode: str = "infer", dtype: str = "f32", label: str = "") -> dict[str, Any]:
    modelled = {"seconds": 1.0, "baseline_seconds": 1.5, "machine": "avx2-2", "profile": None}
    return {
        "label": label or f"case {choice} {forced} {mode} {dtype}",
        "mode": mode,
        "dtype": dtype,
        "plan": "all" if choice == forced else "some",
        "columns": {"jit": {"median": 0.012}},
        "speedup": {"choice": _ratio(choice, choice, choice), "forced": _ratio(forced, forced, forced)},
        "modelled": {"choice": modelled, "forced": modelled},
        "commit": "abc",
        "modified": False,
        "versions": {"jax": "0.1"},
    }


@pytest.mark.parametrize(
    ("choice", "forced", "word"),
    [(0.9, 0.9, "SLOWER"), (1.0, 1.3, "missed"), (1.3, 1.3, "win"), (1.3, 1.5, "missed"), (1.0, 1.05, ""), (1.2, 0.5, "win")],
)
def test_verdicts(choice: float, forced: float, word: str) -> None:
    assert grid_verdict.verdict(_record(choice, forced)) == word
    assert word in grid_report.progress(1, 9, _record(choice, forced))


def test_a_tally_counts_wins_and_means_over_what_ran() -> None:
    records = [_record(0.5, 0.5), _record(2.0, 2.0), _record(1.0, 1.3), {**_record(1, 1), "error": "WrongResult: x"}]
    found = grid_verdict.tally(records)
    assert (found.cases, found.errors, found.slower, found.taken, found.possible, found.share) == (4, 1, 1, 1, 2, 0.5)
    assert found.mean == pytest.approx(1.0)
    assert grid_verdict.tally([]).share == 1


def test_a_report_names_every_loser_and_every_missed_win_worst_first() -> None:
    records = [
        _record(0.9, 0.9, label="small loss"),
        _record(0.3, 0.3, label="large loss"),
        _record(1.0, 1.2, label="small miss"),
        _record(1.0, 2.2, "train", "bf16", label="large miss"),
        _record(2.0, 2.0, label="good"),
        {**_record(1, 1, label="broken"), "error": "WrongResult: far off"},
    ]
    text = grid_report.report(records)
    order = ["large loss", "small loss", "large miss", "small miss", "broken: WrongResult: far off", "train bf16"]
    assert sorted(order, key=text.index) == order
    assert "good" not in text
    assert "modelled 1.50x" in text
    none = grid_report.report([_record(2.0, 2.0)])
    assert none.count(": none") == 2


# --- the files


def _arguments(folder: Path, *options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    grid.add_arguments(parser)
    return parser.parse_args(["--results", str(folder), *options])


class _Measurer:
    """Stands in for measuring: every case is as fast as ``choice`` says; ``stop`` is interrupted instead of measured."""

    def __init__(self, choice: float = 1.2, stop: int | None = None, fail: int | None = None):
        self.choice, self.stop, self.fail, self.measured = choice, stop, fail, list[GridCase]()

    def __call__(self, case: GridCase, seconds: float) -> dict[str, Any]:
        if len(self.measured) == self.stop:
            raise KeyboardInterrupt
        self.measured.append(case)
        if len(self.measured) - 1 == self.fail:
            raise ValueError("no such thing")
        record = _record(self.choice, self.choice)
        return {k: record[k] for k in ("plan", "columns", "speedup", "modelled")}


def _cases(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("grid-*.json")
    return list(json.loads(path.read_text())["cases"])


def test_an_interrupted_run_keeps_what_it_has_and_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert grid.run(_arguments(tmp_path, "--cases", "10"), _Measurer(stop=4)) == 130
    assert "interrupted after 4 of 10" in capsys.readouterr().out
    assert len(_cases(tmp_path)) == 4
    second = _Measurer()
    assert grid.run(_arguments(tmp_path, "--cases", "10", "--resume"), second) == 0
    assert second.measured == list(draw(10, 0).cases[4:])
    assert [r["label"] for r in _cases(tmp_path)] == [c.label for c in draw(10, 0).cases]


def test_a_resumed_run_measures_again_what_another_commit_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "describe_commit", lambda: {"commit": "old", "modified": False})
    grid.run(_arguments(tmp_path, "--cases", "10"), _Measurer())
    monkeypatch.setattr(grid, "describe_commit", lambda: {"commit": "new", "modified": False})
    again = _Measurer()
    grid.run(_arguments(tmp_path, "--cases", "10", "--resume"), again)
    assert len(again.measured) == 10
    assert {r["commit"] for r in _cases(tmp_path)} == {"new"}


def test_a_part_of_the_sample_adds_to_the_file_and_a_whole_run_replaces_it(tmp_path: Path) -> None:
    grid.run(_arguments(tmp_path, "--cases", "10"), _Measurer())
    part = _Measurer(2.0)
    grid.run(_arguments(tmp_path, "--cases", "10", "--only", "dlrm"), part)
    assert [c.kind for c in part.measured] == ["dlrm"]
    ratios = {r["label"]: r["speedup"]["choice"]["median"] for r in _cases(tmp_path)}
    assert len(ratios) == 10
    assert ratios[part.measured[0].label] == 2.0
    assert statistics.median(ratios.values()) == 1.2
    grid.run(_arguments(tmp_path, "--cases", "8"), _Measurer())
    assert len(_cases(tmp_path)) == 8


def test_filters_choose_within_the_same_sample(tmp_path: Path) -> None:
    seen = _Measurer()
    grid.run(_arguments(tmp_path, "--only", "softmax", "pointwise", "--dtype", "bf16", "--mode", "train", "--no-save"), seen)
    assert seen.measured
    assert set(seen.measured) <= set(draw(grid.CASES, 0).cases)
    assert {(c.dtype, c.mode) for c in seen.measured} == {("bf16", "train")}
    assert not list(tmp_path.iterdir())
    named = _Measurer()
    grid.run(_arguments(tmp_path, "--only", "named", "--no-save"), named)
    assert named.measured == list(NAMED)


def test_a_case_that_fails_costs_itself_only(tmp_path: Path) -> None:
    assert grid.run(_arguments(tmp_path, "--cases", "9"), _Measurer(fail=2)) == 0
    errors = [r for r in _cases(tmp_path) if "error" in r]
    assert [r["error"] for r in errors] == ["ValueError: no such thing"]
    assert len(_cases(tmp_path)) == 9


def test_check_fails_where_a_case_is_slower_or_fails(tmp_path: Path) -> None:
    check = ("--cases", "9", "--check", "--no-save")
    assert grid.run(_arguments(tmp_path, *check), _Measurer(1.0)) == 0
    assert grid.run(_arguments(tmp_path, *check), _Measurer(0.9)) == 1
    assert grid.run(_arguments(tmp_path, *check), _Measurer(1.0, fail=0)) == 1
    assert grid.run(_arguments(tmp_path, "--cases", "9", "--no-save"), _Measurer(0.9)) == 0


def test_a_spent_budget_starts_no_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = _Measurer()
    grid.run(_arguments(tmp_path, "--budget", "-1"), seen)
    assert not seen.measured
    assert "were not measured" in capsys.readouterr().out


def test_one_table_for_every_kind_of_machine(tmp_path: Path) -> None:
    machine = {"cpu": "Some(R) CPU", "cores": 2, "isa": ["avx2"]}
    kinds = [(machine, "2025-01-01"), ({**machine, "isa": ["avx2", "amx_tile"]}, "2025-01-02"), (machine, "2025-01-03")]
    for k, (kind, date) in enumerate(kinds):
        records = [_record(1.0 + k, 1.0 + k), _record(0.5, 0.5, "train", "bf16")]
        grid.GridFile(tmp_path / f"grid-{k}.json", kind, date).save(records)
    newest = grid.newest(tmp_path)
    assert [content["date"] for content in newest] == ["2025-01-03", "2025-01-02"]
    text = grid_report.markdown(newest)
    assert text.count("| mode | dtype |") == 2
    assert "amx_tile" in text
    assert "| infer | f32 | 1 | 3.00x | 0 | 1 of 1 |" in text
    assert "| train | bf16 | 1 | 0.50x | 1 | 0 of 0 |" in text
    assert "| all |  | 2 | 1.22x | 1 | 1 of 1 |" in text
    assert store.newest(tmp_path) == []  # no files of theirs
    (tmp_path / "grid-9.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="format 99"):
        grid.newest(tmp_path)


def test_readme_holds_the_grid_that_is_stored() -> None:
    text = README.read_text()
    begin, end = table.markers("grid")
    assert text[text.index(begin) + len(begin) : text.index(end)].strip() == grid_report.markdown(grid.newest()).strip()


# --- really measured


def test_what_is_left_to_xla_is_not_timed_against_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SELECT, "pays", lambda plan: False)
    record = grid_measure.measure(dataclasses.replace(SMALL, rows=53), 0.01)
    assert record["plan"] == "none"
    assert record["speedup"]["choice"] == grid_verdict.by_definition()
    assert set(record["columns"]) == {"jit", "forced"}
    assert record["modelled"]["choice"]["regions"] == []
    assert record["modelled"]["forced"]["seconds"] > 0


def test_one_program_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SELECT, "pays", lambda plan: True)
    record = grid_measure.measure(dataclasses.replace(SMALL, rows=59), 0.01)
    assert record["plan"] == "all"
    assert set(record["columns"]) == {"jit", "choice"}
    assert record["speedup"]["choice"] == record["speedup"]["forced"]
    assert record["modelled"]["choice"] == record["modelled"]["forced"]


def test_a_wrong_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_row_off(fn: Any, **options: Any) -> Any:
        return kj.pipeline(lambda params, x: fn(params, x).at[5].add(10.0), **options)

    monkeypatch.setattr(grid_measure, "kj", types.SimpleNamespace(pipeline=one_row_off))
    with pytest.raises(grid_measure.WrongResult, match=r"(choice|forced) is .* away from float32 arithmetic, jax.jit is 0"):
        grid_measure.measure(dataclasses.replace(SMALL, rows=64), 0.01)


def test_where_jax_jit_is_wrong_the_pipeline_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_in_16_bits(case: GridCase) -> Any:
        problem = make_problem(case)

        def function(params: Any, x: jax.Array) -> jax.Array:
            return problem.function(params, x) + (10 if x.dtype == jnp.bfloat16 else 0)

        return dataclasses.replace(problem, function=function)

    def right(fn: Any, **options: Any) -> Any:
        return kj.pipeline(lambda params, x: fn(params, x) - 10, **options)

    monkeypatch.setattr(grid_measure, "make_problem", off_in_16_bits)
    monkeypatch.setattr(grid_measure, "kj", types.SimpleNamespace(pipeline=right))
    record = grid_measure.measure(dataclasses.replace(SMALL, rows=64, dtype="bf16"), 0.01)
    assert record["errors"]["jit"] > 1
    assert max(error for column, error in record["errors"].items() if column != "jit") < 0.2


def test_the_command_line_measures_and_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--only", "softmax", "--cases", "56", "--dtype", "f32", "--seconds", "0.05", "--results", str(tmp_path)]
    assert main(["grid", *options]) == 0
    told = capsys.readouterr().out
    assert "geometric mean" in told
    records = _cases(tmp_path)
    assert {r["kind"] for r in records} == {"softmax"}
    assert records[0]["label"] in told
    assert records[0]["versions"]["jax"] == jax.__version__
    readme = tmp_path / "README.md"
    names = (*table.PARTS, table.DEVICES, table.PLANS, table.SUMMARY, table.PEERS, "grid")
    readme.write_text("".join("\n".join(table.markers(name)) + "\n" for name in names))
    assert main(["table", "--results", str(tmp_path), "--readme", str(readme), "--tables", str(readme)]) == 0
    assert "geometric mean" in readme.read_text()

"""``scripts/gpu_check.sh`` without a device: what it runs is right, what fails is told, and nothing stops the rest."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.targets.cuda import hostcc, runtime
from scripts.gpu import benchmarks, correctness, goals, programs, smoke, steps, traffic, training
from tests.support.cuda_attention_cases import ATTENTION, ATTENTION_GRADIENTS
from tests.support.cuda_call_cases import CALLS
from tests.support.cuda_cases import FAMILIES, Family
from tests.support.cuda_recurrent_cases import RECURRENT
from tests.support.cuda_run import kernel_cache  # noqa: F401, a fixture
from tests.support.cuda_training_cases import TRAINING

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"
needs_emulator = pytest.mark.skipif(
    not (hostcc.available() and runtime.available()), reason=hostcc.why_not() or runtime.why_not() or "no emulator"
)


def start(folder: Path, *options: str, python: Path | str = sys.executable, **environment: str) -> subprocess.Popen[str]:
    variables = {**os.environ, "PYTHON": str(python), **environment}
    command = ["bash", str(SCRIPT), *options, str(folder)]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def start_small(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.gpu_check_toy", "small", *options, str(folder)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def status(folder: Path) -> dict[str, int]:
    return {name: of["status"] for name, of in json.loads((folder / "status.json").read_text())["steps"].items()}


@needs_emulator
@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_dry_run_is_right_and_told_on_one_page(whole: bool, tmp_path: Path) -> None:
    """The ``whole`` one; the others have one family's programs."""
    folder = tmp_path / "check"
    options = "--dry-run", "--only", "environment,smoke,correctness,soak,traffic"
    run = start(folder, *options) if whole else start_small(folder, *options)
    output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert status(folder) == {"environment": 0, "smoke": 0, "correctness": 0, "soak": 0, "traffic": 0}
    found = json.loads((folder / "correctness.0.json").read_text())
    assert found["about"]["versions"]["jax"]
    assert len(found["about"]["sources"]) == 16
    assert {f["name"].split()[-1] != programs.PLANNED for f in found["findings"]} == {
        True,
        False,
    }  # the planner's, and a forced one
    assert {f["name"].split()[0] for f in found["findings"]} == {"dense", *(CALLS if whole else ())}
    # Of all, and of the worst row, which may be as far off as jax.jit's: a bfloat16 gradient of few edges is off there by 0.012.
    bound = correctness.TOLERANCE["bfloat16"]
    for f in found["findings"]:
        for (whole, row), (_, row_of_jit) in zip(f["errors"], f["jit_errors"], strict=True):
            assert 0 < whole < bound and 0 < row < max(bound, 1.01 * row_of_jit), f["name"]
    assert all(f["ok"] for f in found["findings"])
    assert all(f["kernels"] > 0 for f in found["findings"])
    soak = json.loads((folder / "soak.json").read_text())["findings"]
    assert [f["launches"] for f in soak] == [f["wanted"] for f in soak] == [3] * 4
    page = (folder / "summary.md").read_text()
    assert "| correctness | right |" in page
    assert "no CUDA device" in page
    with tarfile.open(f"{folder}.tar.gz") as archive:
        assert "check/summary.md" in archive.getnames()


@pytest.mark.slow
@needs_emulator
@pytest.mark.usefixtures("kernel_cache")
def test_a_dry_run_of_a_training_step_is_right(tmp_path: Path) -> None:
    folder = tmp_path / "check"
    output, _ = start(folder, "--dry-run", "--only", "training").communicate(timeout=200)
    assert status(folder) == {"training": 0}, output
    (found,) = json.loads((folder / "training.json").read_text())["findings"]
    assert found["kernels"] > 0 and found["equal_bits"]
    assert set(found["errors"]) == {"loss", "params", "mean", "square"}
    assert all(0 < e < 0.01 for e in found["errors"].values())


@pytest.mark.slow
@needs_emulator
@pytest.mark.usefixtures("kernel_cache")
def test_a_dry_run_of_a_token_asks_for_a_weight_ahead(tmp_path: Path) -> None:
    folder = tmp_path / "check"
    output, _ = start(folder, "--dry-run", "--only", "decoding").communicate(timeout=400)
    assert status(folder) == {"decoding": 0}, output
    (found,) = json.loads((folder / "decoding.json").read_text())["findings"]
    assert found["asked_bytes"] > 1e6 and found["modelled_gain_seconds"] > 1e-6 and found["same_bits"]


@pytest.mark.slow
@needs_emulator
@pytest.mark.usefixtures("kernel_cache")
def test_a_kind_of_kernel_that_hangs_costs_ten_seconds_and_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "check"
    output, _ = start(folder, "--dry-run", "--only", "smoke,correctness", "--plant", "hang@smoke:0").communicate(timeout=300)
    assert status(folder) == {"smoke": 1, "correctness": 0}, output
    hung, other = json.loads((folder / "smoke.json").read_text())["findings"]
    assert hung["error"] == f"did not end within {smoke.LIVE_SECONDS:g} s" and other["ok"]
    found = json.loads((folder / "correctness.0.json").read_text())["findings"]
    assert [f["kind"] for f in found] == [""] * (1 + len(CALLS)) + [other["kind"]]  # the planner's, and the one that is left
    assert f"left out of later steps, because they hung or crashed: {hung['kind']}" in (folder / "summary.md").read_text()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [("--kernel-name", "--kernel-name kernel_substring=kitsune_region"), ("--kernel-regex", "--kernel-regex kns=kitsune_region")],
)
def test_the_sanitizer_is_told_which_kernels_are_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, wanted: str
) -> None:
    """Without the filter every kernel of XLA is instrumented; the option's name depends on the version."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/usr/bin/env bash\necho "  {words} arg"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    made = [step for step in steps.steps("python", tmp_path, dry_run=False) if step.group == "sanitizer"]
    assert [step.name for step in made] == ["memcheck", "racecheck", "synccheck"]
    for step in made:
        line = " ".join(step.programs[0].command)
        assert line.startswith(f"compute-sanitizer --tool {step.name} --error-exitcode") and wanted in line and "--few" in line


def test_a_machine_without_the_sanitizer_leaves_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    made = [step for step in steps.steps("python", tmp_path, dry_run=False) if step.group == "sanitizer"]
    assert all("not on PATH" in step.missing for step in made) and len(made) == 3


def test_no_case_may_take_longer_than_its_step(tmp_path: Path) -> None:
    """Else the step would end before the case is named, and the next call would hang in it again."""
    for step in steps.steps("python", tmp_path, dry_run=False):
        for program in step.programs:
            if "--case-seconds" in program.command:
                assert float(program.command[program.command.index("--case-seconds") + 1]) < step.seconds
    assert next(s.seconds for s in steps.steps("python", tmp_path, dry_run=False) if s.name == "training") > training.CASE_SECONDS


def test_the_build_names_what_is_missing() -> None:
    command = [sys.executable, "-S", "-E", "-m", "scripts.gpu.build"]  # no packages of the environment
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "pip install nanobind setuptools jaxlib" in done.stdout


@pytest.mark.skipif(not isinstance(runtime.driver_info(), str), reason="there is a CUDA driver here")
def test_without_a_device_the_check_ends_at_once(tmp_path: Path) -> None:
    output, _ = start(tmp_path / "check", "--only", "environment,correctness").communicate(timeout=200)
    assert status(tmp_path / "check") == {"environment": 1}, output
    assert "there is no CUDA device: nothing else can run" in output


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("words", [("--onyl", "soak"), ("--only", "soka")])
def test_an_unknown_option_or_step_is_refused(tmp_path: Path, words: tuple[str, str]) -> None:
    run = start(tmp_path / "check", *words)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 2
    assert words[0] in output or words[1] in output
    assert not (tmp_path / "check").exists()


def test_one_wrong_row_of_many_is_seen() -> None:
    wanted = np.random.default_rng(0).standard_normal((20_000, 16))
    right = wanted * (1 + 1e-3)
    wrong = right.copy()
    wrong[12_345] = wrong[1]
    tolerance = correctness.TOLERANCE["bfloat16"]
    of_jit = correctness.difference(right, wanted)
    assert correctness.is_near(of_jit, of_jit, tolerance)
    assert not correctness.is_near(correctness.difference(wrong, wanted), of_jit, tolerance)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_wrong(value: float) -> None:
    wanted = np.ones((4, 4))
    got = wanted.copy()
    got[2, 1] = value
    assert correctness.difference(got, wanted) == (math.inf, math.inf)
    assert correctness.difference(wanted[:3], wanted) == (math.inf, math.inf)


def test_a_choice_for_slow_tools_has_training_steps() -> None:
    """One each: they are the largest kernels."""
    plan: Any = object()
    made = [programs.Program(f, "bfloat16", 333, "cuda", "some", plan) for f in TRAINING.values()]
    chosen = programs.few(made)
    assert [p.family.name for p in chosen] == [f.name for f in TRAINING.values() if f.small]


def test_whole_functions_become_the_kernels_that_they_are_there_for() -> None:
    """Atomic sums; sums of a softmax in the pass that finds its largest scores; a kernel for queries and one for keys; the keys of
    a token as rows; loops in calls of several phases."""
    found = {}
    for name in sorted({*CALLS} - {"extremes", "cluster-lstm"}):
        f = CALLS[name]
        explained = kj.explain(f.function, platform="cuda", device="h200", force=True, deterministic=f.deterministic)
        found[name] = explained(*f.shapes(f.rows[0] if f.rows else 4_099, f.dtypes[0]))
    assert any("added atomically" in note for note in found["atomic-sums"].notes)
    assert len(found["segment-softmax"].regions) == 1
    family = CALLS["segment-softmax"]
    graph = capture(
        jax.make_jaxpr(family.function)(*family.shapes(4_099, "float32")),
        context=RewriteContext(TargetCapabilities(divides_gradients=True, runs_loops=True, sums_online=True)),
    ).graph
    assert [op.kind for op in graph.ops].count("scatter_exp_sum") == 2
    assert len(found["attention-gradients"].regions) == 2
    assert found["one-token"].regions[0].rows == 2 * CALLS["one-token"].rows[0]
    for name in ("descent-ode", "descent-pendulum", "read-out"):
        assert any(region.loops and region.later for region in found[name].regions), found[name]


class _Runs:
    """Stands for a program: its results are ``runs``, one for each run, and jax.jit's 1."""

    def __init__(self, family: Family, *runs: float):
        self.family, self.dtype, left = family, "float32", list(runs)
        self.function = lambda x: x * left.pop(0)

    def arguments(self, seed: int) -> tuple[jax.Array, ...]:
        return (jnp.ones((3, 4)),)


@pytest.mark.parametrize(
    ("deterministic", "runs", "calls", "right"),
    [
        (True, (1, 1), 2, True),
        (True, (1, 1 + 1e-6), 2, False),  # other bits
        (False, (1, 1 + 1e-6), 2, True),
        (False, (1.1, 1.1), 2, False),
        (True, (1, 1), 0, False),  # XLA's, not ours
    ],
)
def test_what_is_right(
    deterministic: bool, runs: tuple[float, ...], calls: int, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program: Any = _Runs(Family("same", lambda x: x, (), deterministic=deterministic), *runs)
    counted = iter((0, calls))
    monkeypatch.setattr(correctness.runtime, "calls", lambda: next(counted))
    assert correctness.check(program, 0)["ok"] == right


def test_every_family_has_programs_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_forced", lambda target, dry_run: iter(()))  # those take a minute to plan
    made = programs.programs(dry_run=False)
    assert {p.family.name for p in made} == {*FAMILIES, *TRAINING, *RECURRENT, *ATTENTION, *ATTENTION_GRADIENTS, *CALLS}
    assert len({p.name for p in made}) == len(made)


def test_counters_are_added_over_kernels() -> None:
    head = '==PROF== Connected\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
    table = head + "\n".join(
        ('0,gemm,dram__bytes_read.sum,byte,"1,000"', "0,gemm,dram__bytes_write.sum,byte,50", "1,relu,dram__bytes_read.sum,byte,7")
    )
    assert traffic.read_table(table) == {"kernels": 2, "read": 1007.0, "written": 50.0}
    with pytest.raises(ValueError, match="not in bytes"):
        traffic.read_table(head + "0,gemm,dram__bytes_read.sum,Mbyte,3\n")
    with pytest.raises(ValueError, match="no kernels"):
        traffic.read_table("==PROF== no kernels were profiled")


def test_goals_are_held_against_records_of_their_size_on_a_gpu() -> None:
    app, goal = next(iter(goals.GRAPH_GOALS.items()))
    record = {"app": app, "mode": "infer", "dtype": "bf16", "platform": "cuda", "rows": goal.rows, "explain": {"coverage": 1.0}}
    found = [
        record | {"speedup": {"jit": {"median": goal.speedup}}},
        record | {"dtype": "f32", "speedup": {"jit": {"median": 0.99 * goal.speedup}}},
        record | {"platform": "cpu", "speedup": {"jit": {"median": 9.0}}},
        record | {"rows": goal.rows - 1, "speedup": {"jit": {"median": 9.0}}},
        record | {"app": "nerf", "speedup": {"jit": {"median": 9.0}}},
    ]
    rows = goals.markdown(found).splitlines()[2:]
    assert [row.split("|")[-2].strip() for row in rows] == ["yes", "no"]


def test_applications_with_goals_are_measured_in_both_modes() -> None:
    for train in (False, True):
        assert {(app, "bf16", goal.rows) for app, goal in goals.GRAPH_GOALS.items()} <= set(benchmarks.runs(train, dry_run=False))
    assert {(app, goal.dtype, goal.rows) for app, goal in goals.SEQUENCE_GOALS.items()} <= set(
        benchmarks.runs(False, dry_run=False)
    )

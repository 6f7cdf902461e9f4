"""``scripts/gpu_check.sh`` without a device: what it runs is right, what fails is told, and nothing stops the rest."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from benchmarks import store
from kitsune_jax import cache
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.frontend import lowering
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.targets.cuda import hostcc, runtime
from scripts import gpu_record
from scripts.gpu import cases, correctness, programs, results, stalls, worker
from tests.support import gpu_check_toy
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


def check(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *options, str(folder)]
    variables = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900, check=False)


def start_toy(folder: Path, *options: str, fault: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.gpu_check_toy", "--dry-run", *options, str(folder)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "GPU_CHECK_TOY": fault}
    return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def toy(folder: Path, *options: str, fault: str = "") -> tuple[int, dict[str, Any], str]:
    run = start_toy(folder, *options, fault=fault)
    output, _ = run.communicate(timeout=120)
    return run.returncode, json.loads((folder / "measured.json").read_text()), output


# --- the whole --------------------------------------------------------------------------------------------------------------------


@needs_emulator
@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize("stages", ["correct", pytest.param("speed,queues,soak,forced", marks=pytest.mark.slow)])
def test_a_dry_run_is_right_and_told(stages: str, tmp_path: Path) -> None:
    done = check(tmp_path / "check", "--dry-run", "--limit", "800", "--stages", stages)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads((tmp_path / "check" / "measured.json").read_text())
    assert done.stdout.rstrip() == (tmp_path / "check" / "summary.txt").read_text().rstrip()
    assert measured["correctness"] and all(f["ok"] and f["kernels"] for f in measured["correctness"].values())
    if "speed" in stages:
        assert list(measured["cases"]) == list(cases.DRY_CASES)
        assert all(of["ms"] > 0 for case in measured["cases"].values() for of in case["columns"].values())
        assert [f["ok"] for f in measured["queues"]] == [True, True]
        assert len(measured["soak"]) == 4 and all(f["ok"] for f in measured["soak"])


def test_without_a_device_the_check_ends_at_once(tmp_path: Path) -> None:
    if not isinstance(runtime.driver_info(), str):
        pytest.skip("this machine has a CUDA driver")
    done = check(tmp_path / "check")
    assert done.returncode == 2
    assert "there is no CUDA device, so nothing can run" in done.stdout


@pytest.mark.parametrize("words", [("--stages", "all-of-them"), ("--no-such-option", "x")])
def test_an_unknown_option_or_stage_is_refused(tmp_path: Path, words: tuple[str, str]) -> None:
    done = check(tmp_path / "check", *words)
    assert done.returncode == 2
    assert words[0] in done.stderr or words[1] in done.stderr
    assert not (tmp_path / "check").exists()


# --- faults of what it runs -------------------------------------------------------------------------------------------------------

PROGRAMS = [f"{family} {k}" for family in gpu_check_toy.FAMILIES for k in range(4)]


def test_a_check_without_faults_is_right(tmp_path: Path) -> None:
    code, measured, output = toy(tmp_path, "--stages", "correct,speed")
    assert code == 0, output
    assert sorted(measured["correctness"]) == PROGRAMS
    assert sorted(measured["cases"]) == list(gpu_check_toy.CASES)
    assert "wrong: none" in output


@pytest.mark.parametrize("fault", ["hang", "crash"])
def test_a_program_that_hangs_or_crashes_costs_itself_alone(tmp_path: Path, fault: str) -> None:
    code, measured, output = toy(tmp_path, "--stages", "correct", fault=f"{fault}@b 2")
    assert code == 1
    assert sorted(measured["correctness"]) == PROGRAMS
    assert [name for name, f in measured["correctness"].items() if not f["ok"]] == ["b 2"]
    assert "WRONG b 2: the process ended in it" in output
    pids = {f["pid"] for name, f in measured["correctness"].items() if name.startswith("b") and f["ok"]}
    assert len(pids) == 2  # another one went on behind it


def test_a_case_that_hangs_costs_itself_alone(tmp_path: Path) -> None:
    code, measured, output = toy(tmp_path, "--stages", "speed", fault="hang@case y")
    assert code == 1
    assert [name for name, f in measured["cases"].items() if not f.get("finished")] == ["y"]
    assert "y: the process ended" in output


def test_what_failed_is_run_again_alone(tmp_path: Path) -> None:
    _, before, _ = toy(tmp_path, "--stages", "correct", fault="crash@b 2")
    code, measured, output = toy(tmp_path, "--stages", "correct", "--only", "failed")
    assert code == 0, output
    assert sorted(measured["correctness"]) == PROGRAMS and all(f["ok"] for f in measured["correctness"].values())
    again = [name for name, f in measured["correctness"].items() if f["pid"] != before["correctness"][name].get("pid")]
    assert sorted(again) == [name for name in PROGRAMS if name.startswith("b")]


def test_a_tool_that_finds_errors_in_a_program_that_ends_is_wrong(tmp_path: Path) -> None:
    """As compute-sanitizer does, by its exit status."""
    code, _, output = toy(tmp_path, "--stages", "correct", fault="status@b")
    assert code == 1 and "exit status 9" in output


def test_the_limit_ends_what_runs_and_keeps_what_was_found(tmp_path: Path) -> None:
    began = time.monotonic()
    _, measured, output = toy(tmp_path, "--stages", "correct", "--limit", "136", fault="hang@b 2")
    assert time.monotonic() - began < 30
    assert {"b 0", "b 1"} <= set(measured["correctness"])
    assert "cut off: b at b 2" in output or "not started" in output


def test_an_interrupt_ends_the_check_and_what_was_found_is_written(tmp_path: Path) -> None:
    run = start_toy(tmp_path, "--stages", "correct", fault="hang@b 2")
    path, deadline = tmp_path / "cases" / "programs_b_planned_0of1.json", time.monotonic() + 60
    while (results.read_json(path) or {}).get("running") != "b 2" and time.monotonic() < deadline:
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=30)
    assert run.returncode == 130, output
    assert {"b 0", "b 1"} <= set(json.loads((tmp_path / "measured.json").read_text())["correctness"])


def test_a_file_that_cannot_be_written_is_told_and_stays_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert results.write_json(path, {"x": 1}) == ""
    (tmp_path / "file").write_text("")
    assert "could not be written" in results.write_json(tmp_path / "file" / "found.json", {"x": 2})
    assert results.read_json(path) == {"x": 1}


def test_a_worker_s_exception_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lowering, "fastest", lowering.fastest)  # a worker notes what they return until its process ends
    monkeypatch.setattr(cache.Cache, "get", cache.Cache.get)
    assert worker.main(["case", "no-such-application f32 8", "--output", str(tmp_path / "found.json"), "--dry-run"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["finished"] and found["error"].startswith("KeyError: 'no-such-application'")


# --- right and wrong --------------------------------------------------------------------------------------------------------------


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
def test_a_value_that_is_not_finite_is_wrong_where_the_reference_is(value: float) -> None:
    wanted = np.ones((4, 4))
    got = wanted.copy()
    got[2, 1] = value
    assert correctness.difference(got, wanted) == (math.inf, math.inf)
    assert correctness.difference(wanted, got) == (math.inf, math.inf)
    assert correctness.difference(got, got) == (0.0, 0.0)
    assert correctness.difference(wanted[:3], wanted) == (math.inf, math.inf)


class _Executable:
    def __init__(self, run: Any):
        self.run = run

    def lower(self, *args: Any) -> _Executable:
        return self

    def compile(self) -> Any:
        return self.run


class _Runs:
    """Stands for a program: its results are ``runs``, one for each run, and jax.jit's 1."""

    def __init__(self, family: Family, *runs: float):
        self.family, self.dtype, self.name, self.target, left = family, "float32", "runs", "cuda", list(runs)
        self.function = _Executable(lambda x: x * left.pop(0))

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
    deterministic: bool, runs: tuple[float, ...], calls: int, right: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program: Any = _Runs(Family("same", lambda x: x, (), deterministic=deterministic), *runs)
    counted = iter((0, calls))
    monkeypatch.setattr(correctness.runtime, "calls", lambda: next(counted))
    found = worker.Findings(tmp_path / "found.json")
    one = correctness.check(program, 0, found)
    assert one["ok"] == right
    assert ("jit_errors" in one) == (runs == (1.1, 1.1))  # asked where the tolerance is exceeded


def test_programs_that_were_right_with_the_same_kernels_do_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One whose kernel changed does, and one that was wrong, and one that nobody has run."""
    earlier = {
        "same": {"ok": True, "cubins": ["a.cubin", "b.cubin"]},
        "changed": {"ok": True, "cubins": ["a.cubin"]},
        "wrong": {"ok": False, "cubins": ["a.cubin"]},
        "of an older check": {"ok": True},
    }
    kernels = {"same": ["b.cubin", "a.cubin"], "changed": ["c.cubin"]}
    asked: list[str] = []

    class Program:
        kind = "planned"

        def __init__(self, name: str):
            self.name = name

        def compile_kernel(self) -> None:
            asked.extend(kernels.get(self.name, []))

    def since() -> list[str]:
        found = list(asked)
        asked.clear()
        return found

    ran: list[str] = []

    def check(program: Any, *_: Any) -> dict[str, Any]:
        ran.append(program.name)
        return {"ok": True}

    monkeypatch.setattr(correctness, "programs", lambda *_: [Program(name) for name in (*earlier, "new")])
    monkeypatch.setattr(correctness, "note_kernels", lambda: since)
    monkeypatch.setattr(correctness, "check", check)
    found = worker.Findings(tmp_path / "found.json")
    correctness.run("a planned 0/1", found, set(), False, False, correctness.right_before({"correctness": earlier}))
    assert ran == ["changed", "wrong", "of an older check", "new"]
    same, changed, *_ = found.content["findings"]
    assert same["unchanged"] and same["ok"] and changed["cubins"] == ["c.cubin"]


def test_what_a_check_is_told_to_leave_out_reaches_its_workers(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({"correctness": {"b 1": {"ok": True, "cubins": ["b 1"]}}}))
    code, measured, output = toy(tmp_path, "--stages", "correct", "--since", str(earlier))
    assert code == 0, output
    assert [name for name, f in measured["correctness"].items() if f.get("unchanged")] == ["b 1"]
    assert "1 of them have the same kernels as when they were right, and did not run" in output


# --- programs and cases -----------------------------------------------------------------------------------------------------------


def test_every_family_has_programs_on_a_device() -> None:
    assert set(programs.ALL) == {*FAMILIES, *TRAINING, *RECURRENT, *ATTENTION, *ATTENTION_GRADIENTS, *CALLS}
    made = [p.name for family in programs.ALL for p in programs.programs("planned", family, dry_run=False)]
    assert {name.split()[0] for name in made} == set(programs.ALL)
    assert len(set(made)) == len(made)


def test_every_timed_case_has_a_place_in_the_record() -> None:
    """Its application exists, and the store can order it among the others."""
    names = [name for name in (*cases.CASES, *cases.LATER) if not name.startswith("token")]
    for name in names:
        head = gpu_record._head_of(name.removeprefix("plans "))
        assert head["app"] in (*store.APP_NAMES, *store.ATTENTION_NAMES), name
    assert len(set(names)) == len(names)


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


def test_stalls_are_told_for_each_kernel() -> None:
    details = '==PROF== Connected\n"ID","Kernel Name","Block Size","Grid Size","Metric Name","Metric Unit","Metric Value"\n'
    details += '"0","kitsune_region","(384, 1, 1)","(132, 1, 1)","Duration","us","592.06"\n'
    source = '"Kernel Name","kitsune_region"\n"#","Address","Source","stall_barrier","stall_long_sb"\n'
    source += '"0","0x1","BAR.SYNC","30","0"\n"1","0x2","LDG.E R1","0","10"\n"2","0x3","EXIT","0","0"\n'
    text = stalls.markdown(details, source)
    assert "## 0: kitsune_region (132, 1, 1) x (384, 1, 1)\nDuration 592.06 us" in text
    assert "samples 40: barrier 75%, long_sb 25%" in text
    assert "75.0%  [0/3] BAR.SYNC  (barrier 30)" in text

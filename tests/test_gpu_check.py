"""``scripts/gpu_check.sh`` without a device: what it runs is right, what fails is told, and nothing stops the rest."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitsune_jax.targets.cuda import hostcc, runtime
from scripts.gpu import correctness, programs, summary, traffic
from tests.cuda_run import kernel_cache  # noqa: F401, a fixture
from tests.cuda_training_cases import TRAINING

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"
needs_emulator = pytest.mark.skipif(
    not (hostcc.available() and runtime.available()), reason=hostcc.why_not() or runtime.why_not() or "no emulator"
)
# Stands for Python: notes what it is asked for and does as the file named like the module says.
FAKE = """#!/usr/bin/env bash
echo "$@" >>"{folder}/calls"
module=none
for word in "$@"; do case $word in scripts.gpu.* | benchmarks*) module=${{word##*.}}; break ;; esac; done
if [ "$module" = summary ]; then exec "{python}" "$@"; fi
[ ! -f "{folder}/$module" ] || . "{folder}/$module"
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A folder with an interpreter that pretends; a file called ``correctness`` in it is what that step does."""
    python = tmp_path / "python"
    python.write_text(FAKE.format(folder=tmp_path, python=sys.executable))
    python.chmod(0o755)
    return tmp_path


def start(folder: Path, *options: str, python: Path | str = sys.executable, **environment: str) -> subprocess.Popen[str]:
    variables = {**os.environ, "PYTHON": str(python), **environment}
    command = ["bash", str(SCRIPT), *options, str(folder)]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def status(folder: Path) -> dict[str, int]:
    rows = (line.split("\t") for line in (folder / "status.tsv").read_text().splitlines())
    return {name: int(code) for name, code, _ in rows}


@needs_emulator
@pytest.mark.usefixtures("kernel_cache")
def test_a_dry_run_is_right_and_told_on_one_page(tmp_path: Path) -> None:
    folder = tmp_path / "check"
    run = start(folder, "--dry-run", "--only", "environment,correctness,soak")
    output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert status(folder) == {"environment": 0, "correctness": 0, "soak": 0}
    found = json.loads((folder / "correctness.json").read_text())
    assert found["about"]["versions"]["jax"]
    assert len(found["about"]["sources"]) == 16
    assert {f["name"].split()[-1] != programs.PLANNED for f in found["findings"]} == {
        True,
        False,
    }  # the planner's, and a forced one
    assert all(0 < e < 0.01 for f in found["findings"] for whole in f["errors"] for e in whole)
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


def test_a_step_that_fails_does_not_stop_the_next(fake: Path) -> None:
    (fake / "correctness").write_text("echo three of four wrong; exit 1\n")
    run = start(fake / "check", "--dry-run", python=fake / "python")
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    found = status(fake / "check")
    assert found["correctness"] == 1
    assert list(found)[-1] == "traffic"
    assert set(found.values()) == {0, 1}
    assert "three of four wrong" in output
    assert "| correctness | failed (1) |" in output


def test_a_step_that_hangs_is_ended_by_its_limit(fake: Path) -> None:
    (fake / "correctness").write_text("exec sleep 100\n")
    begin = time.monotonic()
    run = start(fake / "check", "--dry-run", "--limit", "8", "--only", "correctness,soak", python=fake / "python")
    run.communicate(timeout=60)
    assert time.monotonic() - begin < 30
    assert status(fake / "check") == {"correctness": 124, "soak": 124}  # nothing is left for the second
    assert "stopped by its time limit" in (fake / "check" / "summary.md").read_text()


def test_an_interrupt_ends_the_step_and_still_writes_the_summary(fake: Path) -> None:
    (fake / "correctness").write_text(f"touch {fake}/started; exec sleep 100\n")
    run = start(fake / "check", "--dry-run", python=fake / "python")
    deadline = time.monotonic() + 60
    while not (fake / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode == 130
    assert list(status(fake / "check").items())[-1] == ("correctness", 130)
    assert "interrupted" in (fake / "check" / "summary.md").read_text()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [("--kernel-name", "--kernel-name kernel_substring=kitsune_region"), ("--kernel-regex", "--kernel-regex kns=kitsune_region")],
)
def test_the_sanitizer_is_told_which_kernels_are_ours(fake: Path, words: str, wanted: str) -> None:
    """Without the filter every kernel of XLA is instrumented; the option's name depends on the version."""
    tool = fake / "compute-sanitizer"
    tool.write_text(
        f'#!/usr/bin/env bash\n[ "$1" != --help ] || {{ echo "  {words} arg"; exit; }}\necho "$@" >>"{fake}/sanitized"\n'
    )
    tool.chmod(0o755)
    path = os.pathsep.join([str(fake), os.environ["PATH"]])
    run = start(fake / "check", "--only", "sanitizer", python=fake / "python", PATH=path)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 0, output
    lines = (fake / "sanitized").read_text().splitlines()
    assert [line.split()[1] for line in lines] == ["memcheck", "racecheck", "synccheck"]
    assert all(wanted in line and "--error-exitcode" in line and "correctness --few" in line for line in lines)


def test_the_build_names_what_is_missing(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" -S -E "$@"\n')  # no packages of the environment
    bare.chmod(0o755)
    run = start(tmp_path / "check", "--only", "build", python=bare, PYTHONPATH="")
    run.communicate(timeout=60)
    assert status(tmp_path / "check") == {"build": 2}
    assert "pip install nanobind setuptools jaxlib" in (tmp_path / "check" / "logs" / "build.log").read_text()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    run = start(tmp_path / "check", "--onyl", "soak")
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 2
    assert "--onyl" in output
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


def test_the_summary_tells_of_steps_that_were_stopped(tmp_path: Path) -> None:
    (tmp_path / "status.tsv").write_text("soak\t124\t50\nmicro\t1\t3\n")
    (tmp_path / "soak.json").write_text(json.dumps({"findings": [{"name": "a", "ok": True}], "expected": 4, "finished": False}))
    (tmp_path / "micro.json").write_text(json.dumps({"records": [{"benchmark": "queue", "case": "l2", "error": "WrongResult: x"}]}))
    page = summary.summary(tmp_path)
    assert "| soak | stopped by its time limit | 50 | 1 of 4 right, then it was stopped |" in page
    assert "- micro: l2: WrongResult: x" in page

"""On a CUDA device: a short form of ``scripts/gpu_check.sh``. In processes of their own: JAX sees only CPUs in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kitsune_jax.targets.cuda import nvrtc, runtime

ROOT = Path(__file__).parents[2]
INFO = runtime.driver_info()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(isinstance(INFO, str) or not INFO["devices"], reason=INFO if isinstance(INFO, str) else "no CUDA device"),
    pytest.mark.skipif(not nvrtc.available(), reason=nvrtc.why_not() or ""),
]


def check(folder: Path, stages: str, only: str = "") -> dict[str, Any]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), str(folder), "--stages", stages, "--only", only, "--limit", "550"]
    variables = {**inherited, "PYTHON": sys.executable}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return dict(json.loads((folder / "measured.json").read_text()))


@pytest.mark.parametrize("stage", ["correct", "portable"])
def test_kernels_are_right(tmp_path: Path, stage: str) -> None:
    assert check(tmp_path, stage, "mlp")["correctness"]


def test_applications_run_as_fast_as_they_are_told_to(tmp_path: Path) -> None:
    case = check(tmp_path, "speed", "nerf bf16 262144")["cases"]["nerf bf16 262144"]
    assert case["columns"]["tuned"]["ms"] < 1.1 * case["columns"]["jit"]["ms"]


def test_queues_lose_nothing_and_launches_from_two_threads_do_not_hang(tmp_path: Path) -> None:
    measured = check(tmp_path, "queues,soak")
    assert measured["queues"] and measured["soak"]

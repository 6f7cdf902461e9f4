"""On a CUDA device: a short form of ``scripts/gpu_check.sh``. In processes of their own: JAX sees only CPUs in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kitsune_jax.targets.cuda import nvrtc, runtime

ROOT = Path(__file__).parents[2]
INFO = runtime.driver_info()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(isinstance(INFO, str) or not INFO["devices"], reason=INFO if isinstance(INFO, str) else "no CUDA device"),
    pytest.mark.skipif(not nvrtc.available(), reason=nvrtc.why_not() or ""),
]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    variables = {**inherited, "PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **environment}
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("arch", [None, "sm_90"], ids=["own", "portable"])
def test_kernels_are_right(tmp_path: Path, arch: str | None) -> None:
    output = tmp_path / "correctness.json"
    environment = {} if arch is None else {"KITSUNE_CUDA_ARCH": arch}
    done = run("scripts.gpu.correctness", "--few", "--output", str(output), **environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert json.loads(output.read_text())["findings"]


def test_training_steps_at_full_size_are_right(tmp_path: Path) -> None:
    done = run("scripts.gpu.training", "--output", str(tmp_path / "training.json"))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_queues_lose_nothing(tmp_path: Path) -> None:
    done = run("benchmarks.micro", "--output", str(tmp_path / "micro.json"))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_launches_from_two_threads(tmp_path: Path) -> None:
    done = run("scripts.gpu.soak", "--launches", "400", "--seconds", "60", "--output", str(tmp_path / "soak.json"))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

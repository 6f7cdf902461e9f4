"""The examples run as a user runs them, and the README shows the quick start that is tested here."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
FIT_IMAGE = str(ROOT / "examples" / "fit_image.py")


def test_quickstart_runs_and_explains(capsys: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    assert np.isfinite(names["value"])
    x, params = np.asarray(names["x"], np.float64), names["params"]
    for w, b in params[:-1]:
        x = np.maximum(x @ np.asarray(w, np.float64) + np.asarray(b), 0)
    expected = x @ np.asarray(params[-1][0], np.float64) + np.asarray(params[-1][1])
    np.testing.assert_allclose(names["out"], expected, rtol=1e-4, atol=1e-4)
    assert "operators pipelined" in capsys.readouterr().out


def test_readme_shows_the_quickstart() -> None:
    code = (ROOT / "examples" / "quickstart.py").read_text().split('"""', 2)[2].strip()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code in [block.strip() for block in blocks]


def test_fit_image_learns_the_photograph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(FIT_IMAGE)
    picture = tmp_path / "deeper" / "fit.png"
    arguments = ["--size", "32", "--rows", "256", "--steps", "60", "--block", "4", "--out", str(picture)]
    assert example["main"](arguments) == 0
    out = capsys.readouterr().out
    assert float(re.search(r"PSNR (\S+) dB after 60 steps", out)[1]) > 12  # type: ignore[index]  # a grey picture reaches 10.6 dB
    assert "operators pipelined" in out
    assert "pipelined loss / jax.jit" in out
    assert "pipelined whole / jax.jit" in out
    assert Image.open(picture).size == (3 * 32, 32 + 16)


def test_fit_image_photograph_is_a_photograph() -> None:
    photograph = runpy.run_path(FIT_IMAGE)["photograph"](64)
    assert photograph.shape == (64, 64, 3)
    assert photograph.dtype == np.float32
    assert 0 <= photograph.min() < 0.1
    assert 0.9 < photograph.max() <= 1
    assert photograph.std() > 0.2


def test_fit_image_ends_politely_when_interrupted(tmp_path: Path) -> None:
    """Ctrl-C in the middle of training still gives the picture and the numbers that were reached."""
    script = (
        "import runpy, sys\n"
        "example = runpy.run_path(sys.argv[1])\n"
        "from rich.progress import Progress\n"
        "update = Progress.update\n"
        "def interrupting(self, *a, **k):\n"
        "    update(self, *a, **k)\n"
        "    raise KeyboardInterrupt\n"
        "Progress.update = interrupting\n"
        "raise SystemExit(example['main'](sys.argv[2:]))\n"
    )
    picture = tmp_path / "fit.png"
    arguments = ["--size", "16", "--rows", "64", "--steps", "50", "--block", "2", "--out", str(picture)]
    done = subprocess.run(
        [sys.executable, "-c", script, FIT_IMAGE, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "after 2 steps (interrupted)" in done.stdout
    assert picture.exists()


def test_fit_image_rejects_senseless_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(FIT_IMAGE)["main"]
    for argument, value, why in (
        ("--rows", "0", "must be at least 1"),
        ("--out", str(tmp_path), "must be the name of a picture"),
        ("--out", f"{__file__}/fit.png", "cannot be made"),
    ):
        with pytest.raises(SystemExit):
            main([argument, value])
        assert why in capsys.readouterr().err

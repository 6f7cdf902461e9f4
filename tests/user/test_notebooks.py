"""The notebooks of the site run from the first cell to the last; their asserts hold. Slow: Jupyter runs them, as a reader does."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from kitsune_jax.errors import fallbacks
from scripts import notebooks

PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    if notebooks.FOLDER.parent.exists():  # not part of a source distribution's tests
        assert {path.stem for path in PATHS} >= {"plan", "nerf", "graph", "transformer", "cartpole"}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_cells_run(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert cells[0]["cell_type"] == "markdown" and len(code) >= 3
    assert all(cell["metadata"].get("alt") for cell in cells if "plt.show()" in "".join(cell["source"])), "describe the picture"
    for number, source in enumerate(code):
        exec(compile(source, f"{path.name}, cell {number}", "exec"), names)
    assert not fallbacks()


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_jupyter_runs_it(path: Path) -> None:
    if importlib.util.find_spec("nbclient") is None or importlib.util.find_spec("ipykernel") is None:
        pytest.skip("nbclient and ipykernel are not installed: pip install '.[docs]'")
    ran = notebooks.run(path)
    outputs = [output for cell in ran.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs and not [output for output in outputs if output.output_type == "error"]
    assert any("operators pipelined" in output.get("text", "") for output in outputs)

"""Run the notebooks of docs/notebooks as Jupyter does, and store their outputs in them: ``python scripts/notebooks.py [NAME ...]``.

Comes in: notebooks, all of them without names. Goes out: the same files with new outputs. Plans are for a named machine profile, so
that reports are the same wherever the script runs. Needs ``pip install '.[docs]'``. Run it after a change of reports.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROFILE = "avx512bf16-2"  # two cores with AVX512_BF16, as in the README's report
FOLDER = Path(__file__).resolve().parents[1] / "docs" / "notebooks"


def run(path: Path) -> Any:
    """The notebook ``path`` with the outputs of a new run. Raises ``CellExecutionError`` if a cell raises."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", record_timing=False, coalesce_streams=True)
    client.execute(cwd=str(path.parent))
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    return notebook


def main(names: Sequence[str]) -> int:
    import nbformat

    os.environ["KITSUNE_PROFILE"] = PROFILE
    for path in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        start = time.monotonic()
        nbformat.write(run(path), path)
        print(f"{path.name}: {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

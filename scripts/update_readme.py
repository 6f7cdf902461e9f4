"""Write the generated parts of README.md and of docs/measured.md: the quick start, its report for a named machine model, and the
benchmarks' tables.

Comes in: ``examples/quickstart.py``, the planner, ``benchmarks/results``. Goes out: both, between markers. Run by ``make table``.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "avx512bf16-2"  # the report is for this machine model wherever the script runs: two cores with AVX512_BF16


def main() -> int:
    sys.path.insert(0, str(ROOT))
    import kitsune_jax as kj
    from benchmarks import __main__ as command
    from benchmarks import table

    quickstart = ROOT / "examples" / "quickstart.py"
    code = quickstart.read_text().split('"""', 2)[2].strip()
    with contextlib.redirect_stdout(io.StringIO()):
        names = runpy.run_path(str(quickstart))
    report = kj.explain(names["mlp"], platform="cpu", device=DEVICE)(names["params"], names["x"])
    measured, tables = command.documents()
    shown = {"quickstart": f"```python\n{code}\n```", "explain": f"```text\n{report}\n```", **measured}
    for path, parts in ((command.README, shown), (command.TABLES, tables)):
        changed = [name for name, text in parts.items() if table.update(path, text, name)]
        print(f"{path.name}: {', '.join(changed)} updated" if changed else f"{path.name} is up to date")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

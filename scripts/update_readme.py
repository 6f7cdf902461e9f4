"""Write the generated parts of README.md, docs/measured.md, docs/benchmarks.md, docs/start/for-you.md and docs/gpu-verified.md: the
quick start, its report for a named machine model, the benchmarks' tables, and the kernel families that ran on a GPU.

Comes in: ``examples/quickstart.py``, the planner, ``benchmarks/results``. Goes out: all of them, between markers. Run by ``make
table``.
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
    from benchmarks import page, table
    from scripts import gpu_record

    quickstart = ROOT / "examples" / "quickstart.py"
    code = quickstart.read_text().split('"""', 2)[2].strip()
    with contextlib.redirect_stdout(io.StringIO()):
        names = runpy.run_path(str(quickstart))
    report = kj.explain(names["mlp"], platform="cpu", device=DEVICE)(names["params"], names["x"])
    measured, tables = command.documents()
    shown = {"quickstart": f"```python\n{code}\n```", "explain": f"```text\n{report}\n```", **measured}
    verified = {gpu_record.FAMILIES: gpu_record.families()}
    documents = {command.README: shown, command.TABLES: tables, gpu_record.VERIFIED: verified}
    changes = {path: [n for n, text in parts.items() if table.update(path, text, n)] for path, parts in documents.items()}
    for path, changed in [*changes.items(), *page.update().items()]:
        print(f"{path.name}: {', '.join(changed)} updated" if changed else f"{path.name} is up to date")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

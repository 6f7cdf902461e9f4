"""The tables of the queues and of the benchmarks, for the summary: ``python -m scripts.gpu.tables FOLDER`` writes ``tables.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import store, table
from benchmarks.micro.suite import markdown
from scripts.gpu import goals, results


def main() -> int:
    folder = Path(sys.argv[1])
    parts = []
    if records := results.findings_of(folder, "micro"):
        shown = [{k: v for k, v in record.items() if k not in ("name", "ok")} for record in records]
        parts += ["## Queues", markdown(shown)]
    if (folder / "results").is_dir():
        found = store.newest(folder / "results")
        parts += ["## Benchmarks", table.markdown(found), "## Benchmarks of training steps", table.markdown(found, "train")]
        parts += [
            "## Goals of the applications over graphs, tables and sequences",
            goals.markdown(r for _, records in found for r in records),
        ]
    if findings := results.findings_of(folder, "attention"):
        parts += ["## Attention beside cuDNN", goals.attention_markdown(findings)]
    if findings := results.findings_of(folder, "decoding"):
        parts += ["## One token of a layer, with weights asked for ahead", goals.decoding_markdown(findings)]
    trouble = results.write(folder / "tables.md", "\n\n".join(parts) + "\n")
    print(trouble or "tables.md")
    return 1 if trouble else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""One page of what a check found.

Comes in: the folder of a check: JSON files of the steps, ``status.tsv`` (step, exit status, seconds). Goes out: ``summary.md`` in
it. A step that wrote nothing, or was stopped by its time limit, is told as such.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import store, table
from benchmarks.micro.suite import markdown

_STATUS = {0: "right", 2: "not possible here", 124: "stopped by its time limit", 137: "killed", 130: "interrupted"}


def main() -> int:
    folder = Path(sys.argv[1])
    text = summary(folder)
    (folder / "summary.md").write_text(text + "\n")
    print(text)
    return 0


def summary(folder: Path) -> str:
    steps = [line.split("\t") for line in _read(folder / "status.tsv").splitlines()]
    parts = ["# Check of the CUDA target", _machine(folder), "| step | outcome | seconds | findings |", "|---|---|---:|---|"]
    for name, status, seconds in steps:
        parts.append(
            f"| {name} | {_STATUS.get(int(status), f'failed ({status})')} | {seconds} | {_findings(folder / f'{name}.json')} |"
        )
    parts += _failures(folder, [name for name, *_ in steps])
    micro = _json(folder / "micro.json")
    if micro:
        parts += ["", "## Queues", "", markdown(micro["records"])]
    results = folder / "results"
    if results.is_dir():
        parts += ["", "## Benchmarks", "", table.markdown(store.newest(results))]
        parts += ["", "## Benchmarks of training steps", "", table.markdown(store.newest(results), "train")]
    traffic = _json(folder / "traffic.json")
    if traffic:
        parts += ["", "## Bytes of device memory, counted by the hardware", "", *_traffic(traffic["findings"])]
    return "\n".join(parts)


def _machine(folder: Path) -> str:
    environment = _json(folder / "environment.json")
    if not environment:
        return "The environment was not recorded."
    about = environment["about"]
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if v)
    gpu = (about["machine"] or {}).get("gpu", {}).get("name", "no CUDA device")
    driver = about["nvidia_smi"].get("driver_version", "none")
    commit = about["commit"] or f"unknown, sources {about['sources']}"
    return f"{gpu}, driver {driver}; {versions}; commit {commit}{' with changes' if about['modified'] else ''}\n"


def _findings(path: Path) -> str:
    content = _json(path)
    if not content:
        return ""
    findings = content.get("findings", content.get("records", []))
    right = sum(f.get("ok", "error" not in f) for f in findings)
    skipped = [f["skipped"] for f in findings if "skipped" in f]
    unfinished = "" if content.get("finished", True) else ", then it was stopped"
    return f"{right} of {max(len(findings), content.get('expected', 0))} right{unfinished}{'; ' + skipped[0] if skipped else ''}"


def _failures(folder: Path, steps: list[str]) -> list[str]:
    lines = []
    for step in steps:
        content = _json(folder / f"{step}.json") or {}
        for finding in content.get("findings", content.get("records", [])):
            if not finding.get("ok", "error" not in finding):
                text = finding.get("error") or json.dumps({k: v for k, v in finding.items() if k not in ("name", "ok")})
                lines.append(f"- {step}: {finding.get('name', finding.get('case', ''))}: {text.splitlines()[0][:300]}")
    return ["", "## What was wrong", "", *lines] if lines else []


def _traffic(findings: list[dict[str, Any]]) -> list[str]:
    lines = ["| case | kernels | read | written |", "|---|---:|---:|---:|"]
    for f in findings:
        told = (
            (f"{f['kernels']}", f"{f['read'] / 1e6:.1f} MB", f"{f['written'] / 1e6:.1f} MB")
            if "read" in f
            else ("not counted", "", "")
        )
        lines.append(f"| {f['name']} | {' | '.join(told)} |")
    return lines


def _json(path: Path) -> dict[str, Any] | None:
    text = _read(path)
    return dict(json.loads(text)) if text else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    raise SystemExit(main())

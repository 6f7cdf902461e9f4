"""One page of what a check found.

Comes in: the folder of a check: JSON files of the steps, ``status.json``, ``tables.md``. Goes out: ``summary.md`` in it. A step
that wrote nothing, or was stopped by its time limit, is told as such. Standard library only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from scripts.gpu import results

_STATUS = {0: "right", 2: "not possible here", 137: "killed", 130: "interrupted: the next call goes on"}


def main() -> int:
    print(summary(Path(sys.argv[1])))
    return 0


def summary(folder: Path, status: dict[str, Any] | None = None) -> str:
    status = status or results.read_json(folder / "status.json") or {}
    steps = status.get("steps", {})
    parts = ["# Check of the CUDA target", "", _machine(folder), ""]
    parts += [f"- {note}" for note in status.get("notes", [])]
    if left_out := avoided(folder):
        parts.append(f"- left out of later steps, because they hung or crashed: {', '.join(left_out)}")
    if compiled := status.get("compiled", {}):
        where = ", ".join(f"{count} in {step}" for step, count in compiled.items())
        parts.append(f"- {sum(compiled.values())} kernels were compiled on this machine: {where}")
    parts += ["", "| step | outcome | seconds | findings |", "|---|---|---:|---|"]
    for name, of in steps.items():
        parts.append(f"| {name} | {_outcome(of)} | {of['seconds']:.0f} | {of.get('note') or _findings(folder, name)} |")
    parts += _failures(folder, list(steps))
    if traffic := results.findings_of(folder, "traffic"):
        parts += ["", "## Bytes of device memory, counted by the hardware", "", *_traffic(traffic)]
    tables = _read(folder / "tables.md")
    return "\n".join([*parts, *(["", tables] if tables else [])])


def avoided(folder: Path) -> list[str]:
    """The kinds of kernel that hung or crashed in some step."""
    found = [f for path in sorted(folder.glob("*.json")) for f in (results.read_json(path) or {}).get("findings", [])]
    return sorted({f["kind"] for f in found if f.get("avoid") and f.get("kind")})


def _outcome(of: dict[str, Any]) -> str:
    if of["status"] == 124:
        why = "no time left" if of.get("short") else "stopped by its time limit"
        return f"{why}: the next call goes on"
    return _STATUS.get(of["status"], f"failed ({of['status']})")


def _machine(folder: Path) -> str:
    about = (results.read_json(folder / "environment.json") or {}).get("about", {})
    if "versions" not in about:
        return "The environment was not recorded."
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if v)
    gpu = (about["machine"] or {}).get("gpu", {}).get("name", "no CUDA device")
    driver = about["nvidia_smi"].get("driver_version", "none")
    commit = about["commit"] or f"unknown, sources {about['sources']}"
    return f"{gpu}, driver {driver}; {versions}; commit {commit}{' with changes' if about['modified'] else ''}"


def _findings(folder: Path, step: str) -> str:
    contents = [results.read_json(path) or {} for path in results.files_of(folder, step)]
    if not contents:
        return ""
    findings = results.findings_of(folder, step)
    right = sum(f.get("ok", "error" not in f) for f in findings)
    expected = sum(max(len(c.get("findings", [])), c.get("expected", 0)) for c in contents)
    skipped = [f["skipped"] for f in findings if "skipped" in f]
    unfinished = "" if all(c.get("finished", True) for c in contents) else ", then it was stopped"
    return f"{right} of {expected} right{unfinished}{'; ' + skipped[0] if skipped else ''}"


def _failures(folder: Path, steps: list[str]) -> list[str]:
    lines = []
    for step in steps:
        for finding in results.findings_of(folder, step):
            if not finding.get("ok", "error" not in finding):
                text = finding.get("error") or json.dumps({k: v for k, v in finding.items() if k not in ("name", "ok")})
                lines.append(f"- {step}: {finding.get('name', '')}: {(text.splitlines() or ['?'])[0][:300]}")
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


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    raise SystemExit(main())

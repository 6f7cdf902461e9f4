"""Where the time of a kernel goes, by Nsight Compute: throughputs, stall reasons, and the instructions at which warps wait.

Comes in: ncu's pages "details" and "source" as CSV. Goes out: Markdown, a section for each kernel. Standard library only.
"""

from __future__ import annotations

import collections
import csv
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_SECTIONS = ("SpeedOfLight", "WarpStateStats", "SourceCounters", "LaunchStats", "MemoryWorkloadAnalysis", "Occupancy")
_TOLD = (
    "Duration",
    "DRAM Throughput",
    "L2 Cache Throughput",
    "Compute (SM) Throughput",
    "Registers Per Thread",
    "Dynamic Shared Memory Per Block",
    "L1/TEX Hit Rate",
    "L2 Hit Rate",
)
_HOTTEST = 14


def command(tool: str, report: Path) -> list[str]:
    """ncu, to be followed by the program; it reads the counters of our kernels between the marks of the profiler."""
    options = ["--clock-control", "none", "--profile-from-start", "off", "-k", "regex:kitsune", "-f", "-o", str(report)]
    return [tool, *options, *(word for section in _SECTIONS for word in ("--section", section))]


def _rows(text: str) -> Iterator[dict[str, str]]:
    """The rows of a page, without the words that ncu prints before its header."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith(('"ID"', '"#"', '"Address"', "#,"))), None)
    if start is not None:
        yield from csv.DictReader(io.StringIO("\n".join(lines[start:])))


def markdown(details: str, source: str) -> str:
    kernels: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for row in _rows(details):
        kernels[row["ID"]]["title"] = f"{row['Kernel Name'][:40]} {row.get('Grid Size', '')} x {row.get('Block Size', '')}"
        if row.get("Metric Name") in _TOLD:
            kernels[row["ID"]].setdefault(row["Metric Name"], f"{row['Metric Value']} {row['Metric Unit']}".strip())
    code = _listings(source)
    sections = []
    for number, (ident, facts) in enumerate(kernels.items()):
        told = "; ".join(f"{name} {facts[name]}" for name in _TOLD if name in facts)
        sections.append("\n".join([f"## {ident}: {facts['title']}", told, *(code[number] if number < len(code) else [])]))
    return "\n\n".join(sections) + "\n"


def _listings(source: str) -> list[list[str]]:
    """For each kernel its samples by reason, and its hottest instructions. ncu prints kernel after kernel, each with a header."""
    listings, block = [], list[str]()
    for line in [*source.splitlines(), '"Kernel Name"']:
        if line.startswith('"Kernel Name"'):
            if block:
                listings.append(_listing("\n".join(block)))
            block = []
        else:
            block.append(line)
    return [listing for listing in listings if listing]


def _listing(text: str) -> list[str]:
    rows = list(_rows(text))
    if not rows:
        return []
    reasons = [name for name in rows[0] if name.startswith("stall_") and not name.endswith("_not_issued") and "(" not in name]
    counts = [{name.removeprefix("stall_"): _number(row.get(name)) for name in reasons} for row in rows]
    total = sum(sum(of.values()) for of in counts) or 1.0
    sums: collections.Counter[str] = collections.Counter()
    for of in counts:
        sums.update(of)
    shares = ", ".join(f"{name} {n / total:.0%}" for name, n in sums.most_common(8))
    lines = [f"samples {total:.0f}: {shares}"]
    hottest = sorted(sorted(range(len(rows)), key=lambda i: -sum(counts[i].values()))[:_HOTTEST])
    for i in hottest:
        top = ", ".join(f"{name} {n:.0f}" for name, n in collections.Counter(counts[i]).most_common(2) if n)
        lines.append(f"    {sum(counts[i].values()) / total:6.1%}  [{i}/{len(rows)}] {rows[i].get('Source', '')[:70]}  ({top})")
    return lines


def _number(text: str | None) -> float:
    try:
        return float((text or "0").replace(",", ""))
    except ValueError:
        return 0.0


def main(arguments: Sequence[str]) -> int:
    details, source = (Path(path).read_text(errors="replace") for path in arguments)
    print(markdown(details, source), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

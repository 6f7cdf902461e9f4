"""The grid in words: progress lines, the report at the end of a run, the README's table. Knows no JAX.

Comes in: records as ``grid`` stores them. Goes out: text. No number is typed by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import grid_verdict
from benchmarks.grid_verdict import SLOWER, WIN, Tally
from kitsune_jax.report.data import percent_text, plural, time_text

_HEAD = ("mode", "dtype", "cases", "geometric mean", f"below {SLOWER:.2f}x", f"wins above {WIN:.2f}x taken")
_PLANS = {"none": "left to XLA", "some": "in part", "all": "pipelined"}
Record = Mapping[str, Any]


def progress(number: int, of: int, record: Record) -> str:
    """One line about one case."""
    head = f"[{number:3}/{of}] {record['label']:<58}"
    if "error" in record:
        return f"{head} ERROR {record['error']}"
    choice, forced = (record["speedup"][c]["median"] for c in ("choice", "forced"))
    beside = "" if record["plan"] == "all" or not record["columns"] else f" (forced {forced:.2f}x)"
    jit = record["columns"].get("jit")
    took = f"{time_text(jit['median'])} with jax.jit, " if jit else ""
    word = grid_verdict.verdict(record)
    return f"{head} {choice:5.2f}x{beside}  {took}{_PLANS[record['plan']]}{f'  {word}' if word else ''}"


def report(records: Sequence[Record]) -> str:
    """What a run found: every case that is slower, missed or wrong, and the tallies."""
    good = [r for r in records if "error" not in r]
    whole = grid_verdict.tally(records)
    parts = [
        _section(f"slower than {SLOWER:.2f}x jax.jit", sorted(filter(grid_verdict.is_slower, good), key=_choice)),
        _section(
            f"left to XLA, wholly or in part, though it would have won by more than {percent_text(WIN - 1, 1)}",
            sorted(filter(grid_verdict.is_missed, good), key=lambda r: -r["speedup"]["forced"]["median"]),
        ),
        "\n".join(["errors:", *(f"  {r['label']}: {r['error']}" for r in records if "error" in r)]) if whole.errors else "",
        "\n".join([_tally_line("all", whole), *(_tally_line(" ".join(k), t) for k, t in grid_verdict.by_group(records).items())]),
    ]
    return "\n\n".join(part for part in parts if part)


def _choice(record: Record) -> float:
    return float(record["speedup"]["choice"]["median"])


def _section(title: str, records: Sequence[Record]) -> str:
    if not records:
        return f"{title}: none"
    return "\n".join([f"{title}:", *(f"  {_line(r)}" for r in records)])


def _line(record: Record) -> str:
    texts = []
    for column, s in record["speedup"].items():
        m = record["modelled"][column]
        said = f", modelled {m['baseline_seconds'] / m['seconds']:.2f}x" if m["seconds"] else ""
        texts.append(f"{column} {s['median']:.2f}x ({s['low']:.2f} to {s['high']:.2f}{said})" if s["n"] else f"{column} as jax.jit")
    if record["plan"] == "all":
        texts = texts[:1]
    return f"{record['label']}: {', '.join(texts)}; {time_text(record['columns']['jit']['median'])} with jax.jit"


def _tally_line(name: str, t: Tally) -> str:
    failed = f", {plural(t.errors, 'error')}" if t.errors else ""
    return (
        f"{name:<12} {plural(t.cases, 'case'):>9}{failed}: geometric mean {t.mean:.3f}x, {t.slower} below {SLOWER:.2f}x, "
        f"{t.taken} of {t.possible} possible wins taken ({percent_text(t.share, 1)})"
    )


def markdown(runs: Sequence[Mapping[str, Any]]) -> str:
    """One table for every kind of machine; ``runs`` are the newest files of each. A sentence where nothing has been measured."""
    return "\n\n".join(map(_table, runs)) or "No grid is stored yet: `python -m benchmarks grid` measures one."


def _table(run: Mapping[str, Any]) -> str:
    machine, records = run["machine"], run["cases"]
    commits = sorted({f"{(r['commit'] or 'unknown')[:10]}{' with changes' if r['modified'] else ''}" for r in records})
    models = sorted({m for r in records if "error" not in r for m in _models(r)})
    caption = (
        f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['isa'])}), planned for {', '.join(models)}, "
        f"JAX {', '.join(sorted({r['versions']['jax'] for r in records}))}, measured {run['date']} at {', '.join(commits)}."
    )
    groups = {**grid_verdict.by_group(records), ("all", ""): grid_verdict.tally(records)}
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|---|" + "---:|" * (len(_HEAD) - 2)]
    for (mode, dtype), t in groups.items():
        cells = (mode, dtype, str(t.cases), f"{t.mean:.2f}x", str(t.slower), f"{t.taken} of {t.possible}")
        lines.append("| " + " | ".join(cells) + " |")
    return f"{caption}\n\n" + "\n".join(lines)


def _models(record: Record) -> set[str]:
    """The machine models or measured profiles that the case was planned for."""
    return {m["profile"] or m["machine"] for m in record["modelled"].values()}

"""The grid: is the planner's own choice never slower than ``jax.jit``, and does it take the wins that there are?

    python -m benchmarks grid                                 # some 130 cases, five to ten minutes, on the CPU
    python -m benchmarks grid --only mlp --dtype bf16         # a part of the same sample
    python -m benchmarks grid --resume                        # what an interrupted run of today left out

``grid_cases`` says what is measured, ``grid_functions`` makes functions of it, ``grid_measure`` measures one, ``grid_verdict``
says what that means and ``grid_report`` tells it. Here is the run, and the file ``results/grid-<machine>-<date>.json``, which is
written after every case: an interrupted run keeps what it has. A whole run that comes to its end leaves its own cases in the file
of the day; any other adds to them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import grid_report, grid_verdict
from benchmarks.grid_cases import DTYPES, KINDS, MODES, GridCase, Limits, draw
from benchmarks.machine import describe_commit, describe_machine, describe_software, machine_slug, today
from benchmarks.store import RESULTS

FORMAT = 1
CASES = 137
SECONDS = 1.5  # a case, and up to three times as long where its verdict is in doubt
_INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended, by convention of shells
_SAME = ("commit", "modified", "versions")  # what a stored case must share with this run to stand for a new measurement

Measure = Callable[[GridCase, float], dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=CASES, help=f"how many (default {CASES}), named and applications among them")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", choices=(*KINDS, "named"), nargs="+", help="these kinds, or the cases that somebody reported")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES)
    parser.add_argument("--mode", choices=MODES, nargs="+", default=MODES)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"to time a case (default {SECONDS})")
    parser.add_argument("--budget", type=float, default=float("inf"), help="start no case after so many seconds")
    parser.add_argument("--gflop", type=float, default=Limits.flops / 1e9, help="leave out drawn cases of more work a call")
    parser.add_argument("--memory", type=int, default=Limits.memory >> 20, help="leave out drawn cases of more MiB")
    parser.add_argument("--resume", action="store_true", help="keep what today's file has of this commit, measure the rest")
    parser.add_argument("--no-save", action="store_true", help="write no file")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a case is slower than jax.jit, or fails")
    parser.add_argument("--results", type=Path, default=RESULTS)


def run(args: argparse.Namespace, measure: Measure | None = None) -> int:
    import jax

    if jax.devices()[0].platform != "cpu":
        print("the grid is measured on the CPU: set JAX_PLATFORMS=cpu")
        return 2
    if measure is None:
        from benchmarks.grid_measure import measure as measure_case

        measure = measure_case
    limits = Limits(args.gflop * 1e9, args.memory << 20)
    sample = draw(args.cases, args.seed, limits)
    cases = [c for c in sample.cases if c.dtype in args.dtype and c.mode in args.mode and chosen(c, args.only)]
    print(_opening(args, len(cases), sample.too_large))
    file = GridFile.today(args.results)
    stored = file.load()
    head = {**describe_commit(), "versions": describe_software()}
    done = {r["label"]: r for r in stored if all(r[k] == head[k] for k in _SAME)} if args.resume else {}
    records: list[dict[str, Any]] = []
    status, start = 0, time.perf_counter()
    try:
        for number, case in enumerate(cases, 1):
            if time.perf_counter() - start > args.budget:
                print(f"the budget of {args.budget:g} s is spent: {len(cases) - number + 1} cases were not measured")
                break
            record = done.get(case.label) or {**_described(case), **head, **_measured(measure, case, args.seconds)}
            records.append(record)
            print(grid_report.progress(number, len(cases), record), flush=True)
            if not args.no_save:
                file.save(merged(stored, records))
        else:
            if len(cases) == len(sample.cases) and not args.no_save:
                file.save(records)
    except KeyboardInterrupt:
        print(f"\ninterrupted after {len(records)} of {len(cases)} cases")
        status = _INTERRUPTED
    print(f"\n{grid_report.report(records)}")
    if not args.no_save and records:
        print(f"\n-> {file.path.name}")
    found = grid_verdict.tally(records)
    return status or int(args.check and bool(found.slower or found.errors))


def chosen(case: GridCase, only: Sequence[str] | None) -> bool:
    return only is None or case.kind in only or (case.named and "named" in only)


def merged(stored: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """``records``, and of ``stored`` the cases that are not among them."""
    new = {r["label"] for r in records}
    return [*(r for r in stored if r["label"] not in new), *records]


@dataclasses.dataclass(frozen=True)
class GridFile:
    """The cases of one machine and day."""

    path: Path
    machine: dict[str, Any]
    date: str

    @classmethod
    def today(cls, folder: Path) -> GridFile:
        machine = describe_machine()
        return cls(folder / f"grid-{machine_slug(machine)}-{today()}.json", machine, today())

    def load(self) -> list[dict[str, Any]]:
        return list(load(self.path)["cases"]) if self.path.exists() else []

    def save(self, records: Sequence[Mapping[str, Any]]) -> None:
        content = {"format": FORMAT, "machine": self.machine, "date": self.date, "cases": records}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(self.path)


def load(path: Path) -> dict[str, Any]:
    """One file. Raises ``ValueError`` when it is of another format."""
    content = json.loads(path.read_text())
    if content.get("format") != FORMAT:
        raise ValueError(f"{path.name} has format {content.get('format')!r}, not {FORMAT}")
    return dict(content)


def newest(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The newest file of every kind of machine, by the machine's name."""
    kinds: dict[str, dict[str, Any]] = {}
    for content in sorted(map(load, folder.glob("grid-*.json")), key=lambda c: c["date"]):
        kinds[machine_slug(content["machine"])] = content
    return [kinds[key] for key in sorted(kinds)]


def _opening(args: argparse.Namespace, cases: int, too_large: int) -> str:
    left_out = f"; {too_large} drawn cases beyond {args.gflop:g} Gflop or {args.memory} MiB a call left out" if too_large else ""
    return f"{cases} cases, seed {args.seed}{left_out}\n"


def _described(case: GridCase) -> dict[str, Any]:
    return {"label": case.label, **dataclasses.asdict(case)}


def _measured(measure: Measure, case: GridCase, seconds: float) -> dict[str, Any]:
    """The record, or the error: one case must not cost the others their run."""
    import jax

    try:
        return measure(case, seconds)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    finally:
        jax.clear_caches()  # a hundred compiled functions, and what they hold

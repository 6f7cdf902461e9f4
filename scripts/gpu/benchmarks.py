"""The benchmarks, each in a process of its own: what one has compiled and allocated stays on the device as long as its process.

Comes in: applications, sizes. Goes out: what ``python -m benchmarks run`` stores in ``--results``, and a finding for each.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import store
from benchmarks.apps import APPS
from scripts.gpu import supervise
from scripts.gpu.goals import GRAPH_GOALS, SEQUENCE_GOALS
from scripts.gpu.record import Record, arguments
from scripts.gpu.training import CASES

_DRY_EFFORT = ["--platform", "cpu", "--rounds", "3", "--seconds", "1", "--no-child"]
_EFFORT = ["--platform", "cuda", "--rounds", "20", "--seconds", "4"]


def runs(train: bool, dry_run: bool) -> list[tuple[str, str, int]]:
    """Application, dtype, rows; the ones that are told first run first: large in bfloat16."""
    if dry_run:
        return [("mgn", "f32", 64)]
    graphs = [(app, "bf16", goal.rows) for app, goal in GRAPH_GOALS.items()]
    if train:
        return [*((app, "bf16", rows) for app, rows in CASES), *graphs]
    sequences = [(app, goal.dtype, goal.rows) for app, goal in SEQUENCE_GOALS.items()]
    first = [*((app, "bf16", rows) for app, rows in CASES), *graphs, *((app, "f32", rows) for app, _, rows in graphs), *sequences]
    kinds = [(app, dtype) for app in store.ROW_APP_NAMES for dtype in store.DTYPE_NAMES]
    all_runs = [(app, dtype, rows) for app, dtype in kinds for rows in APPS[app].default_rows("cuda")]
    return [*first, *(run for run in all_runs if run not in first)]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--train", action="store_true", help="training steps")
    parser.add_argument("--results", type=Path, required=True, help="folder for the records")
    parser.add_argument("--case-seconds", type=float, default=70.0)
    args = parser.parse_args()
    name = "train-benchmarks" if args.train else "benchmarks"
    record = Record(name, args.output, jax_devices=False, patience=args.patience)
    chosen = runs(args.train, args.dry_run)
    record.content["expected"] = len(chosen)
    for app, dtype, rows in chosen:
        case = f"{app} {dtype} {rows}"
        if not record.wants(case):
            continue
        command = [sys.executable, "-m", "benchmarks", "run", "--mode", "train" if args.train else "infer", "--app", app]
        command += ["--dtype", dtype, "--rows", str(rows), "--results", str(args.results)]
        with record.case(case, args.case_seconds + 30):
            log = args.output.with_name("logs") / f"{name}.{app}.{dtype}.{rows}.log"
            done = supervise.run([*command, *(_DRY_EFFORT if args.dry_run else _EFFORT)], log, args.case_seconds * args.patience)
        for line in done.lines:
            print(f"  {line}")
        why = f"did not end within {args.case_seconds:g} s" if done.status == supervise.TIMED_OUT else f"exit status {done.status}"
        last = f" ({done.lines[-1]})" if done.lines else ""
        record.tell({"name": case, "ok": done.status == 0, **({"error": why + last} if done.status else {})})
    return record.finish()


if __name__ == "__main__":
    raise SystemExit(main())

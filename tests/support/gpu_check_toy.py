"""A step of ``scripts/gpu_check.sh`` that does nothing but keep a record: with it the driver is tested in a second.

``python -m tests.support.gpu_check_toy drive STEP[:SECONDS],... OPTIONS...`` runs the driver with toy steps of that name; each has
four cases, of which every second one has a kind. ``GPU_CHECK_TOY`` may say what is wrong with one: "crawl@STEP" takes its time.

``python -m tests.support.gpu_check_toy small OPTIONS...`` runs it with its own steps, of whose programs only one family is checked.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

from scripts.gpu import check, record, steps

CASES = tuple(f"case {k}" for k in range(4))
CASE_SECONDS = 2.0


def step() -> int:
    record.about = lambda _: {"sources": record.results.fingerprint()}  # type: ignore[assignment]
    parser = record.arguments("")
    parser.add_argument("--step")
    args = parser.parse_args()
    kept = record.Record(args.step, args.output)
    kept.content["expected"] = len(CASES)
    for k, name in enumerate(CASES):
        kind = f"sm90-toy-{args.step}" if k % 2 else ""
        if not kept.wants(name) or (kind and kind in os.environ.get("KITSUNE_CUDA_AVOID", "").split(",")):
            continue
        with kept.case(name, CASE_SECONDS, kind):
            if os.environ.get("GPU_CHECK_TOY") == f"crawl@{args.step}":
                time.sleep(1.3)
        finding: dict[str, Any] = {"name": name, "ok": os.environ.get("GPU_CHECK_TOY") != f"wrong@{args.step}", "pid": os.getpid()}
        if os.environ.get("GPU_CHECK_TOY") == f"lost@{args.step}" and k == 1:
            kept.tell({**finding, "ok": False, "error": "CUDA_ERROR"})
            return record.results.LOST
        kept.tell(finding)
    return kept.finish()


def drive() -> int:
    def toys(python: str, folder: Path, dry_run: bool) -> list[steps.Step]:
        made = []
        for word in sys.argv[2].split(","):
            name, _, seconds = word.partition(":")
            output = folder / f"{name}.json"
            command = (python, "-m", "tests.support.gpu_check_toy", "step", "--step", name, "--output", str(output))
            made.append(steps.Step(name, float(seconds or 30), (steps.Program(command, output),)))
        return made

    check.steps = toys  # type: ignore[assignment]
    return check.main(sys.argv[3:])


def small() -> int:
    every = check.steps

    def chosen(python: str, folder: Path, dry_run: bool) -> list[steps.Step]:
        made = every(python, folder, dry_run)
        for k, step in enumerate(made):
            if step.name == "correctness":
                programs = (dataclasses.replace(p, command=(*p.command, "--only", "dense")) for p in step.programs)
                made[k] = dataclasses.replace(step, programs=tuple(programs))
        return made

    check.steps = chosen  # type: ignore[assignment]
    return check.main(sys.argv[2:])


if __name__ == "__main__":
    if sys.argv[1] == "small":
        raise SystemExit(small())
    if sys.argv[1] == "drive":
        raise SystemExit(drive())
    del sys.argv[1]
    raise SystemExit(step())

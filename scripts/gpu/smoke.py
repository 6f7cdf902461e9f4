"""One kernel of each kind, each in a process of its own with ten seconds from the launch on: one that hangs costs ten seconds.

Comes in: the families of the tests. Goes out: a finding per kind: right, wrong, hung, crashed. What hung or crashed is left out
of the steps behind (``avoid``). Processes start, plan and compile side by side, in seconds, and launch one after the other.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.gpu import plant, results, supervise
from scripts.gpu.programs import Program, smoke_programs
from scripts.gpu.record import Record, arguments

LIVE_SECONDS = 10.0
_START_SECONDS = 75.0
_SIDE_BY_SIDE = 10
_READY = "ready"
_MOST_DEAD_STARTS = 3  # one after the other: then the device is taken for lost


def child(program: Program, number: int, output: Path) -> int:
    """The process of one kernel."""
    import jax
    import numpy as np

    from scripts.gpu.correctness import TOLERANCE, context_is_lost, difference, is_near, reference

    found: dict[str, Any] = {"ok": False}
    try:
        args = jax.block_until_ready(program.arguments(number))
        wanted = reference(program, args)
        executable = program.function.lower(*args).compile()
        print(_READY, flush=True)
        sys.stdin.read()
        faulthandler.dump_traceback_later(LIVE_SECONDS, exit=True)
        plant.here("smoke", number)
        start = time.monotonic()
        outs = [np.asarray(x) for x in jax.tree.leaves(executable(*args))]
        found["seconds"] = round(time.monotonic() - start, 3)
        faulthandler.cancel_dump_traceback_later()
        errors = [difference(x, w) for x, w in zip(outs, wanted, strict=True)]
        found["ok"] = all(
            is_near(e, (0.0, 0.0), 2 * TOLERANCE[program.dtype]) for e in errors
        )  # of jax.jit's nothing is known here
        found["errors"] = errors
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
        found["avoid"] = context_is_lost(found)
    trouble = results.write_json(output, found)
    print(trouble or output.name)
    return 0


class Case:
    """A program whose process prepares, then waits for its turn, then runs."""

    def __init__(self, program: Program, number: int, folder: Path, dry_run: bool, patience: float):
        self.program, self.output = program, folder / "logs" / f"smoke.{number}.json"
        self.name = f"{program.kind} ({program.family.name})"
        self.live = False
        self.output.unlink(missing_ok=True)
        command = [sys.executable, "-m", "scripts.gpu.smoke", "--output", str(self.output), "--number", str(number)]
        command += ["--case", program.family.name, program.arrangement, *(["--dry-run"] if dry_run else [])]
        environment = {} if dry_run or program.kind.startswith("sm90") else {"KITSUNE_CUDA_ARCH": "sm_90"}
        log = folder / "logs" / f"smoke.{number}.log"
        self.process = supervise.Process(command, log, _START_SECONDS * patience, environment, ask=True)

    @property
    def ready(self) -> bool:
        return _READY in list(self.process.told)

    def launch(self) -> None:
        self.live = True
        self.process.go(LIVE_SECONDS + 3)  # the process ends itself before that, if it still can

    def finding(self) -> dict[str, Any]:
        status, found = self.process.status, results.read_json(self.output)
        about = {"name": self.name, "kind": self.program.kind}
        if found is not None:
            return {**about, **found}
        if not self.live:
            last = self.process.lines[-1] if self.process.lines else "no words"
            slow = status == supervise.TIMED_OUT
            why = "was not ready in time" if slow else f"exit status {status} before the launch ({last})"
            return {**about, "ok": False, "error": why, "dead_start": True}
        hung = status == supervise.TIMED_OUT or any("Timeout (" in line for line in list(self.process.told))
        why = f"did not end within {LIVE_SECONDS:g} s" if hung else f"crashed (exit status {status})"
        why += ", and cannot be killed" if self.process.lost else ""
        return {**about, "ok": False, "error": why, "avoid": True}


def run(programs: list[tuple[int, Program]], folder: Path, dry_run: bool, patience: float = 1.0) -> Iterator[dict[str, Any]]:
    waiting, open_cases = list(programs), list[Case]()
    dead_starts = 0
    try:
        while waiting or open_cases:
            while waiting and len(open_cases) < (1 if dry_run else _SIDE_BY_SIDE):
                number, program = waiting.pop(0)
                open_cases.append(Case(program, number, folder, dry_run, patience))
            for case in list(open_cases):
                if not case.live and case.ready and not any(other.live for other in open_cases):
                    case.launch()
                if case.process.look() is None:
                    continue
                open_cases.remove(case)
                found = case.finding()
                dead_starts = dead_starts + 1 if found.pop("dead_start", False) else 0
                yield found
            if dead_starts >= _MOST_DEAD_STARTS:
                yield {"name": "the rest", "ok": False, "error": f"not run: {dead_starts} processes in a row could not start"}
                return
            time.sleep(0.02)
    finally:
        for case in open_cases:
            case.process.end()
            case.process.wait()


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--case", nargs=2, metavar=("FAMILY", "ARRANGEMENT"), help="one of them, in this process")
    parser.add_argument("--number", type=int, default=0, help="of that one")
    args = parser.parse_args()
    if args.case:
        family, arrangement = args.case
        chosen = [p for p in smoke_programs(args.dry_run, family) if p.arrangement == arrangement]
        return child(chosen[0], args.number, args.output)
    record = Record("smoke", args.output, jax_devices=False, patience=args.patience)
    programs = list(enumerate(smoke_programs(args.dry_run)))
    record.content["expected"] = len(programs)
    todo = [(number, p) for number, p in programs if record.wants(f"{p.kind} ({p.family.name})")]
    for found in run(todo, args.output.parent, args.dry_run, args.patience):
        record.tell(found)
    return record.finish()


if __name__ == "__main__":
    raise SystemExit(main())

"""A worker of ``scripts/gpu_check.sh`` that runs no kernel: with it the driver is tested in a second.

``python -m tests.support.gpu_check_toy OPTIONS...`` runs the driver, with this module as the worker of two families of four
programs and of three cases. ``GPU_CHECK_TOY`` says what goes wrong: "hang@b 2" hangs in the third program of family b, "crash@b 2"
ends its process there, "slow@a 1" takes a second, "hang@case y" hangs while a case is timed, "status@b"
ends family b with status 9.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from scripts.gpu import check, worker

FAMILIES, CASES = ("a", "b"), ("x", "y", "z")
LIMIT_S = 1.0


def fault(name: str) -> None:
    kind, _, where = os.environ.get("GPU_CHECK_TOY", "").partition("@")
    if where == name:
        if kind == "crash":
            os._exit(9)
        time.sleep({"hang": 60.0, "slow": 1.0}[kind])


def work(arguments: list[str]) -> int:
    kind, name, output = arguments[0], arguments[1], Path(arguments[arguments.index("--output") + 1])
    found = worker.Findings(output, name=name, finished=False)
    if kind == "case":
        worker.wait_for_turn()
        with found.watch(name, LIMIT_S):
            fault(f"case {name}")
        found.content |= {"columns": {"jit": {"ms": 2.0, "speedup": 1.0}, "pipeline": {"ms": 1.0, "speedup": 2.0}}, "flops": 0.0}
    else:
        skip = json.loads(arguments[arguments.index("--skip") + 1])
        found.content["findings"] = []
        since = Path(arguments[arguments.index("--since") + 1]) if "--since" in arguments else None
        before = json.loads(since.read_text())["correctness"] if since else {}
        for program in [f"{name.split()[0]} {k}" for k in range(4)]:
            if program not in skip:
                with found.watch(program, LIMIT_S):
                    fault(program)
                unchanged = {"unchanged": True} if program in before else {}
                found.content["findings"].append({"name": program, "ok": True, "pid": os.getpid(), **unchanged})
                found.write()
    found.content["finished"] = True
    found.write()
    return 9 if os.environ.get("GPU_CHECK_TOY") == f"status@{name.split()[0]}" else 0


class Check(check.Check):
    worker = "tests.support.gpu_check_toy"

    def here(self) -> dict[str, Any]:
        return {"driver": "none"}  # a process of its own would import JAX to say so

    def families(self) -> list[str]:
        return list(FAMILIES)

    def cases(self, which: str) -> list[str]:
        return list(CASES)


if __name__ == "__main__":
    if sys.argv[1] in ("programs", "case"):
        raise SystemExit(work(sys.argv[1:]))
    check.Check = Check  # type: ignore[misc]
    raise SystemExit(check.main(sys.argv[1:]))

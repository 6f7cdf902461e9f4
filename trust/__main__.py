"""Command line of the search for wrong answers.

python -m trust --programs 10000 --seed 1 --jobs 2 --budget 3600
python -m trust --replay tests/trust/regressions/*.json             # programs that once failed
python -m trust --show 1:42                                         # program 42 of seed 1, and its jaxpr
python -m trust --jax-tests FOLDER                                  # JAX's own tests of sharded programs, with pipelines
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from trust.generate import draw
from trust.jax_tests import compare
from trust.program import Program
from trust.runner import Search, search
from trust.worker import Worker

FOUND = Path("out/trust")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: every program agrees with NumPy. 1: a program failed. 2: the search itself failed."""
    args = _parser().parse_args(argv)
    if args.show:
        return _show(args.show)
    if args.replay:
        return _replay(args.replay, args.limit)
    if args.jax_tests:
        return compare.run(args.jax_tests, args.out / "jax", args.limit, args.file)
    wanted = Search(args.programs, args.seed, args.jobs, args.budget, args.limit, args.attempts, args.out, args.first)
    stopped = threading.Event()
    for asked in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked, lambda *_: stopped.set())
    summary = search(wanted, stopped, show=not args.quiet)
    print(summary.text())
    if not summary.pipelined and not summary.failures:
        print("no program held a pipeline: is the extension built for this Python?")
        return 2
    return 2 if summary.errors else 1 if summary.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trust", description="Random programs against NumPy.")
    parser.add_argument("--programs", type=int, default=1000, metavar="N", help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="programs are a function of it and their number")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="number of the first program")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="worker processes")
    parser.add_argument("--budget", type=float, default=3600.0, metavar="SECONDS", help="for all programs")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="for one program; beyond, it hangs")
    parser.add_argument("--attempts", type=int, default=150, metavar="N", help="of the shrinker, for each failure")
    parser.add_argument("--out", type=Path, default=FOUND, metavar="FOLDER", help=f"for failures (default: {FOUND})")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE", help="run the programs of these files only")
    parser.add_argument("--show", metavar="S:K", help="print program K of seed S (or a file's) and its jaxpr")
    parser.add_argument(
        "--jax-tests", type=Path, metavar="FOLDER", help="a checkout of JAX of the version installed, or its folder tests"
    )
    parser.add_argument("--file", default="*", metavar="PATTERN", help="with --jax-tests: only files of this name")
    return parser


def _read(path: Path) -> Program:
    record = json.loads(path.read_text())
    return Program.from_json(record.get("program", record))


def _replay(paths: Sequence[Path], limit: float) -> int:
    worker, failed = Worker(limit), 0
    try:
        for path in paths:
            outcome = worker.run(_read(path))
            failed += outcome["kind"] != "ok"
            print(f"{outcome['kind']:<10} {path} {outcome['detail']}", flush=True)
    finally:
        worker.close()
    return 1 if failed else 0


def _show(which: str) -> int:
    import jax

    from trust.build import build

    program = _read(Path(which)) if Path(which).exists() else draw(*map(int, which.split(":")))
    built = build(program)
    print(program.to_json())
    print(jax.make_jaxpr(built.function(lambda f: f))(*built.arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())

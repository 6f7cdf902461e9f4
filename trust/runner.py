"""The search: workers take the next program until all have run or the time is over; failing programs are shrunk and written down.

Comes in: a ``Search``. Goes out: a ``Summary``, and a JSON file for each failure: the smallest program found that fails in the same
way, the program that was drawn, and the error. Failures with one ``signature`` are written once.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trust.generate import draw
from trust.program import Program
from trust.shrink import shrink_within
from trust.worker import Worker


@dataclasses.dataclass(frozen=True)
class Search:
    """``budget``, ``limit``: seconds for all programs, and for one. ``attempts``: of the shrinker, per failure."""

    programs: int
    seed: int
    jobs: int
    budget: float
    limit: float
    attempts: int
    folder: Path
    first: int = 0


@dataclasses.dataclass
class Summary:
    """The counts of a search: programs by outcome, programs with a pipeline, failures by signature; and the files of failures."""

    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    discarded: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    signatures: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    pipelined: int = 0
    files: list[Path] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    errors: list[str] = dataclasses.field(default_factory=list)

    @property
    def ran(self) -> int:
        return sum(self.kinds.values())

    @property
    def failures(self) -> int:
        return self.ran - self.kinds["ok"] - self.kinds["discarded"] - self.kinds["error"]

    def text(self) -> str:
        lines = [
            f"{self.ran} programs in {self.seconds:.0f} s: {self.failures} failed, {self.kinds['ok']} agree with NumPy, "
            f"{self.kinds['discarded']} prove nothing; {self.pipelined} held a pipeline"
        ]
        lines += [f"  {n} x {name}" for name, n in self.signatures.most_common()]
        lines += [f"  discarded {n} x {why}" for why, n in self.discarded.most_common(5)]
        lines += [f"  {path}" for path in self.files]
        lines += self.errors
        return "\n".join(lines)


def signature(program: Program, outcome: dict[str, Any]) -> str:
    """A key that separates failures before they are shrunk: the message without numbers; for wrong results, the program's parts."""
    if outcome["kind"] in ("exception", "fallback"):
        message = re.sub(r"\(.*?\)", "", outcome["detail"].splitlines()[0])
        return f"{outcome['kind']}: {re.sub(r'[0-9]+', 'N', message)[:160]}"
    return (
        f"{outcome['kind']}: {program.dtype} {program.loop} {program.transform} {'+'.join(sorted({op.name for op in program.ops}))}"
    )


def save(folder: Path, small: Program, drawn: Program, outcome: dict[str, Any]) -> Path:
    """Write a failure. The file is named by the failure and the program, so that the same failure is the same file."""
    digest = hashlib.sha256(small.to_json().encode()).hexdigest()[:8]
    path = folder / f"{outcome['kind']}-{'-'.join(dict.fromkeys(op.name for op in small.ops)) or 'no-ops'}-{digest}.json"
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "outcome": outcome["kind"],
        "detail": outcome["detail"],
        "program": json.loads(small.to_json()),
        "drawn": json.loads(drawn.to_json()),
    }
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in record.items())
    path.write_text(f"{{\n{lines}\n}}\n")
    return path


def search(wanted: Search, stopped: threading.Event | None = None, *, show: bool = True) -> Summary:
    """Run until done, out of time, or ``stopped``, which ends the workers; returns the counts so far."""
    state = _State(wanted, Summary(), stopped or threading.Event())
    threads = [threading.Thread(target=state.work, daemon=True) for _ in range(wanted.jobs)]
    start = shown = time.monotonic()
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads) and time.monotonic() - start < wanted.budget and not state.stopped.wait(0.2):
        if show and (sys.stdout.isatty() or time.monotonic() - shown > 20):
            shown = time.monotonic()
            _progress(wanted, state, time.monotonic() - start)
    state.stopped.set()
    for worker in state.workers:
        worker.kill()
    for thread in threads:
        thread.join(timeout=10)
    state.summary.seconds = time.monotonic() - start
    if show and sys.stdout.isatty():
        print(flush=True)
    return state.summary


def _progress(wanted: Search, state: _State, seconds: float) -> None:
    done = state.summary.ran
    rate = done / seconds
    left = min((wanted.programs - done) / rate if rate else wanted.budget, wanted.budget - seconds)
    doing = "; shrinking a failure" if state.shrinking else ""
    counts = f"{done} of {wanted.programs} programs, {state.summary.failures} failed, {rate:.1f}/s"
    line = f"{counts}, at most {max(left, 0):.0f} s left{doing}"
    print(f"\r{line:<100}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)


class _State:
    def __init__(self, wanted: Search, summary: Summary, stopped: threading.Event) -> None:
        self.wanted, self.summary, self.stopped = wanted, summary, stopped
        self.workers: list[Worker] = []
        self.shrinking = 0
        self._lock = threading.Lock()
        self._next = wanted.first

    def work(self) -> None:
        worker = Worker(self.wanted.limit)
        self.workers.append(worker)
        try:
            while (number := self._number()) is not None:
                program = draw(self.wanted.seed, number)
                outcome = worker.run(program)
                if self.stopped.is_set():
                    return
                new = self._count(program, outcome)
                if new:
                    self._shrink(worker, program, outcome)
        except Exception as e:
            self.stopped.set()
            self.summary.errors.append(f"the search itself failed: {type(e).__name__}: {e}")
        finally:
            worker.close()

    def _number(self) -> int | None:
        with self._lock:
            if self.stopped.is_set() or self._next >= self.wanted.first + self.wanted.programs:
                return None
            self._next += 1
            return self._next - 1

    def _count(self, program: Program, outcome: dict[str, Any]) -> bool:
        """Count ``outcome``. Returns whether it is a failure with a new signature."""
        with self._lock:
            summary = self.summary
            summary.kinds[outcome["kind"]] += 1
            summary.pipelined += outcome["pipelines"] > 0
            if outcome["kind"] == "discarded":
                summary.discarded[re.sub(r"[0-9][0-9.e+-]*", "N", outcome["detail"])[:100]] += 1
            if outcome["kind"] == "error":
                summary.errors.append(f"the check of program {program.to_json()} itself failed:\n{outcome['detail']}")
            if outcome["kind"] in ("ok", "discarded", "error"):
                return False
            name = signature(program, outcome)
            summary.signatures[name] += 1
            return summary.signatures[name] == 1

    def _shrink(self, worker: Worker, program: Program, outcome: dict[str, Any]) -> None:
        kind, name = outcome["kind"], signature(program, outcome)
        last = outcome
        limit = min(self.wanted.limit, 15.0) if kind == "hang" else None

        def fails(simpler: Program) -> bool:
            nonlocal last
            if self.stopped.is_set():
                raise StopIteration
            found = worker.run(simpler, limit)
            same = found["kind"] == kind and (kind not in ("exception", "fallback") or signature(simpler, found) == name)
            last = found if same else last
            return bool(same)

        self.shrinking += 1
        try:
            small = shrink_within(program, fails, self.wanted.attempts // 4 if kind == "hang" else self.wanted.attempts)
        finally:
            self.shrinking -= 1
        path = save(self.wanted.folder, small, program, last)
        with self._lock:
            if path not in self.summary.files:
                self.summary.files.append(path)

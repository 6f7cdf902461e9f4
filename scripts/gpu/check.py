"""The driver of ``scripts/gpu_check.sh``: runs the steps, whatever happens in them, and keeps what they found.

Comes in: options, the folder of an earlier call. Goes out: that folder with a file per step, ``status.json``, ``summary.md``,
and the archive of it, all renewed after every step. Invariants: no program outlives its limit; a case that hangs or crashes is a
finding with its name, and the step goes on behind it; a step that is done is not done again. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.gpu import archive, plant, prepared, results, summary
from scripts.gpu.results import DEVICE, LOST, START, say
from scripts.gpu.steps import Program, Step, steps
from scripts.gpu.supervise import INTERRUPTED, TIMED_OUT, Process, run

ROOT = results.ROOT
OF_A_MACHINE = ("build", "environment", "precompile")  # steps that are done again on another one
LEAST_S = 5.0  # less is not worth a start
_GRACE_S = 3.0  # for a process that ends itself, before its driver does
_ARCHIVE_S = 30.0  # between two archives while a step runs


class Check:
    def __init__(self, options: argparse.Namespace):
        self.options, self.folder = options, options.folder.absolute()
        self.archive = (options.archive or self.folder.with_name(f"{self.folder.name}.tar.gz")).absolute()
        self.began, self.limit = time.monotonic(), options.limit
        self.interrupted, self.trouble, self.archived = False, "", 0.0
        self.cache = Path(os.environ.get("KITSUNE_CACHE_DIR") or self.folder / "cache").absolute()
        self.status: dict[str, Any] = {"sources": results.fingerprint(), "steps": {}, "notes": [], "compiled": {}}

    # -- what an earlier call left

    def resume(self) -> None:
        """Takes over what an earlier call has done with the same sources, and removes the rest."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        earlier = results.read_json(self.folder / "status.json")
        if earlier is None and self.options.resume_from:
            try:
                archive.unpack(self.options.resume_from, self.folder)
            except (OSError, tarfile.TarError) as error:
                say(f"nothing to go on from: {error}")
            earlier = results.read_json(self.folder / "status.json")
            for name in OF_A_MACHINE:
                (earlier or {"steps": {}})["steps"].pop(name, None)
        if earlier is not None and earlier.get("sources") == self.status["sources"]:
            self.status = earlier
            anew = [step for step in self.all_steps() if self.options.again and self.wanted(step)]
        else:
            anew = self.all_steps()
            if earlier is not None:
                say("the sources differ from those of the call before: starting anew")
        for step in anew:
            self.status["steps"].pop(step.name, None)
            for path in [*results.files_of(self.folder, step.name), *(self.folder / "logs").glob(f"{step.name}.*")]:
                path.unlink(missing_ok=True)

    def all_steps(self) -> list[Step]:
        return steps(sys.executable, self.folder, self.options.dry_run)

    def wanted(self, step: Step) -> bool:
        only = self.options.only
        return not only or step.name in only or step.group in only

    def to_do(self) -> list[Step]:
        """In their order; what ran into its own limit comes behind what has not had its turn."""
        found = [s for s in self.all_steps() if self.wanted(s) and not self.of(s).get("done")]
        return sorted(found, key=lambda s: self.of(s).get("status") == TIMED_OUT and not self.of(s).get("short"))

    def of(self, step: Step) -> dict[str, Any]:
        return dict(self.status["steps"].get(step.name, {}))

    # -- the run

    def main(self) -> int:
        self.resume()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.interrupt)
        used, notes = prepared.install(self.cache) if not self.options.dry_run else (False, [])
        self.status["notes"] += [note for note in notes if note not in self.status["notes"]]
        self.kernels = self.cubins()
        to_do = self.to_do()
        if not to_do:
            say("every step was done before: --again does it once more")
        for step in to_do:
            if self.interrupted:
                break
            if step.name == "build" and used:
                self.note(step, 0, 0.0, done=True, note="prepared")
            elif step.name == "precompile" and used and self.fits():
                self.note(step, 0, 0.0, done=True, note="prepared: every kernel came along")
            else:
                self.step(step)
            self.keep()
            if step.name == "environment" and self.has_no_device():
                say("=== there is no CUDA device: nothing else can run")
                break
        self.keep()
        say(summary.summary(self.folder))
        say(f"everything: {self.archive}" if not self.trouble else f"WRONG: {self.trouble}")
        if self.interrupted:
            return INTERRUPTED
        wanted = [self.of(s) for s in self.all_steps() if self.wanted(s)]
        return 0 if all(s.get("status") == 0 for s in wanted) and not self.trouble else 1

    def interrupt(self, *_: Any) -> None:
        self.interrupted = True

    def left(self) -> float:
        return float(self.limit - (time.monotonic() - self.began))

    def fits(self) -> bool:
        environment = results.read_json(self.folder / "environment.json") or {}
        return bool(environment.get("prepared_fits"))

    def has_no_device(self) -> bool:
        return any(f["name"] == DEVICE and not f["ok"] for f in results.findings_of(self.folder, "environment"))

    def step(self, step: Step) -> None:
        start, limit = time.monotonic(), min(step.seconds, self.left())
        if step.missing:
            finding = {"name": step.name, "ok": True, "skipped": step.missing}
            results.write_json(self.folder / f"{step.name}.json", {"findings": [finding], "finished": True})
            self.note(step, 0, 0.0, done=True)
        elif limit < LEAST_S:
            say(f"=== {step.name}: no time left")
            self.note(step, TIMED_OUT, 0.0, done=False, short=True)
        else:
            say(f"=== {step.name} (at most {limit:.0f} s)")
            with plant.full_disk(self.options.plant == f"full-disk@{step.name}"):
                status = self.programs(step, limit)
                self.keep()
            self.count(step)
            finished = all(p.output is None or (results.read_json(p.output) or {}).get("finished") for p in step.programs)
            done = finished and status not in (TIMED_OUT, INTERRUPTED)
            self.note(step, status, time.monotonic() - start, done=done, short=limit < step.seconds)

    def programs(self, step: Step, limit: float) -> int:
        """Runs the step's programs side by side; one that died in a case is started again behind it. The worst exit status."""
        log, deadline = self.folder / "logs" / f"{step.name}.log", time.monotonic() + limit
        files = {program: results.Watched(program.output) for program in step.programs}
        start_failed: set[Program] = set()

        def begin(program: Program) -> Process:
            environment = {**self.environment(), **dict(program.environment)}
            return Process(program.command, log, deadline - time.monotonic(), environment)

        running, ended = {program: begin(program) for program in step.programs}, list[int]()
        while running:
            time.sleep(0.05)
            if time.monotonic() > self.archived + _ARCHIVE_S:
                self.keep(tables=False)
            for program, process in list(running.items()):
                content = files[program].read() or {}
                case = content.get("running")
                if self.interrupted:
                    process.end(INTERRUPTED)
                elif case and time.time() > case["since"] + case["seconds"] + _GRACE_S:
                    process.end()
                status = process.look()
                if status is None:
                    continue
                del running[program]
                content = files[program].read() or {}
                case, short = content.get("running"), time.monotonic() > deadline - LEAST_S
                again = False
                if not content.get("finished") and not self.interrupted and not (short and status == TIMED_OUT):
                    if case and not (case["name"] == START and program in start_failed):
                        start_failed |= {program} if case["name"] == START else set()
                        again = self.died(program, content, case, status, process)
                    else:
                        again = status == LOST
                if again and not short:
                    running[program] = begin(program)
                    continue
                for line in process.lines:
                    say(f"    {line}")
                # What ends well must have said that it finished, or have no record.
                unfinished = program.output is not None and not content.get("finished")
                ended.append(TIMED_OUT if again else status or int(unfinished))
        return max(ended, key=lambda s: (s == INTERRUPTED, s == TIMED_OUT, s))

    def died(self, program: Program, content: dict[str, Any], case: dict[str, Any], status: int, process: Process) -> bool:
        """Makes a finding of the case in which a program died. False where the program would only die in it again: the finding
        cannot be written, or is there already."""
        hung = time.time() > case["since"] + case["seconds"] - 0.5
        why = f"did not end within {case['seconds']:g} s" if hung else f"the process ended with {_cause(status)}"
        if process.lost:
            why += ", and cannot be killed"
        say(f"    WRONG: {case['name']}: {why}")
        content["running"] = None
        if any(f["name"] == case["name"] for f in content["findings"]):
            return False
        if case["name"] != START:
            content["findings"].append({"name": case["name"], "kind": case["kind"], "ok": False, "error": why, "avoid": hung})
        assert program.output is not None
        return not results.write_json(program.output, content)

    def environment(self) -> dict[str, str]:
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
            "KITSUNE_CACHE_DIR": str(self.cache),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # processes take turns with the device: none may keep most of its memory
            plant.DRIVER: str(os.getpid()),
        }
        if self.options.dry_run:
            own["JAX_PLATFORMS"] = "cpu"
        if self.options.plant:
            own[plant.VARIABLE] = self.options.plant
        if avoid := summary.avoided(self.folder):
            own["KITSUNE_CUDA_AVOID"] = ",".join(avoid)
        return own

    # -- what stays

    def note(self, step: Step, status: int, seconds: float, **more: Any) -> None:
        total = round(self.of(step).get("seconds", 0) + seconds, 1)
        self.status["steps"][step.name] = {"status": status, "seconds": total, **more}

    def cubins(self) -> set[str]:
        return {path.name for path in (self.cache / "cuda").glob("*.cubin")}

    def count(self, step: Step) -> None:
        """Kernels that this step had to compile."""
        now = self.cubins()
        if new := len(now - self.kernels):
            self.status["compiled"][step.name] = self.status["compiled"].get(step.name, 0) + new
        self.kernels = now

    def keep(self, tables: bool = True) -> None:
        """Status, tables, summary, archive. What cannot be written is told, and tried again after the next step."""
        told = [results.write_json(self.folder / "status.json", self.status)]
        told.append(self.tables() if tables else "")
        told.append(results.write(self.folder / "summary.md", summary.summary(self.folder, self.status) + "\n"))
        told.append(archive.pack(self.folder, self.archive))
        trouble = "; ".join(filter(None, told))
        if trouble and trouble != self.trouble:
            say(f"WRONG: {trouble}")
            self.status["notes"].append(f"WRONG, for a time: {trouble}")
        self.trouble, self.archived = trouble, time.monotonic()

    def tables(self) -> str:
        """Those of the benchmarks, by a program of its own, because it needs what they need; only where there are new results."""
        inputs = [*(self.folder / "results").glob("*.json"), self.folder / "micro.json"]
        newest = max((p.stat().st_mtime for p in inputs if p.exists()), default=0.0)
        output = self.folder / "tables.md"
        if newest == 0 or (output.exists() and output.stat().st_mtime >= newest):
            return ""
        made = run(
            [sys.executable, "-m", "scripts.gpu.tables", str(self.folder)],
            self.folder / "logs" / "tables.log",
            30,
            {**self.environment(), "JAX_PLATFORMS": "cpu"},
        )
        return "" if made.status == 0 else "the tables of the benchmarks could not be made (logs/tables.log)"


def _cause(status: int) -> str:
    try:
        return signal.Signals(status - 128).name if status > 128 else f"exit status {status}"
    except ValueError:
        return f"exit status {status}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("folder", nargs="?", type=Path, default=ROOT / "out" / "gpu-check", help="of the results; an earlier call's is continued")
    add("--archive", type=Path, metavar="PATH", help="the results in one file, renewed after every step; default: FOLDER.tar.gz")
    add("--resume-from", type=Path, metavar="PATH", help="the archive of an earlier call, where FOLDER is gone")
    add("--only", default="", metavar="A,B", help="these steps alone")
    add("--limit", type=float, default=560.0, metavar="SECONDS", help="for everything together (default 560)")
    add("--again", action="store_true", help="also what an earlier call has done")
    add("--dry-run", action="store_true", help="no device: the emulator, tiny sizes, nothing timed; tests the check itself")
    add("--plant", default="", metavar="FAULT@STEP:N", help="in a dry run: one of " + ", ".join(plant.FAULTS))
    add("--list", action="store_true", help="the steps")
    options = parser.parse_args(arguments)
    check_names = [s for step in steps(sys.executable, options.folder, options.dry_run) for s in (step.name, step.group) if s]
    options.only = [name for name in options.only.split(",") if name]
    if options.list:
        say(" ".join(dict.fromkeys(check_names)))
        return 0
    if unknown := [name for name in options.only if name not in check_names]:
        parser.error(f"there is no step {unknown[0]!r}: the steps are {', '.join(dict.fromkeys(check_names))}")
    if options.plant:
        if not options.dry_run:
            parser.error("--plant is for --dry-run")
        try:
            plant.parse(options.plant)
        except ValueError as error:
            parser.error(str(error))
    try:
        return Check(options).main()
    except OSError as error:
        say(f"the check cannot run: {error}")
        return 2


if __name__ == "__main__":
    raise SystemExit(main())

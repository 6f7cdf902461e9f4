"""The driver of ``scripts/gpu_check.sh``: is every kernel right, how fast are the applications, what did the model say, where does
time go; in one call of some minutes on a borrowed machine.

Comes in: the folder that ``--prepare`` made, options. Goes out: a folder with a JSON file a process, ``measured.json`` of all of
them and ``summary.txt``, both renewed as it goes. Invariants: every case has a process of its own, which ends with its limit or
with this one; what prepares runs side by side, what is timed runs alone; the worst process costs its own case. Standard library
only.

Stages, in their order: ``correct`` (the planned programs of all families), ``speed`` (applications, attention, candidates; prepared
while ``correct`` runs), ``torch``, ``stalls`` (ncu), ``queues``, ``soak``, ``sanitizer``, ``portable`` (kernels for devices from
compute capability 8.0 on), ``forced`` (all arrangements), ``later`` (applications of which XLA's own program takes seconds).
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.gpu import prepared, results, stalls
from scripts.gpu.results import ROOT, read_json
from scripts.gpu.supervise import Process
from scripts.gpu.worker import DRIVER, READY

STAGES = ("correct", "speed", "torch", "stalls", "queues", "soak", "sanitizer", "portable", "forced", "later")
SIDE_BY_SIDE = max(2, min(14, (os.cpu_count() or 2) - 2))
_START_S = 150.0  # of a process: imports, plans, XLA's compiler
_PROGRAMS_S = 300.0
_TURN_S = {"case": 75.0, "torch": 90.0, "queues": 60.0, "soak": 80.0}
_PREPARATION_S, _DRAIN_S = 60.0, 45.0  # in which timed cases may start to prepare, and then end it
_TRIES = 4  # of a family: one that died goes on behind the program that killed it
_HOST_GB = 14.0  # of free memory under which no other process starts
_BIG = ("dense",)  # families with so many forced programs that two processes share them
PORTABLE = ("dense", "mlp", "nerf-small", "swiglu-small", "softmax", "diamond", "tanh-step", "attention-causal", "gru-loop")
SANITIZED = {"memcheck": "mlp,attention-causal,edge-phase-small", "racecheck": "mlp", "synccheck": "mlp,gru-loop"}
STALLS = ("train nerf bf16 262144", "mgn bf16 200000", "attention 4096 128 causal", "gat f32 1000000", "meshgraphnets bf16 200000")


class Check:
    worker = "scripts.gpu.worker"

    def __init__(self, options: argparse.Namespace):
        self.options, self.out = options, options.out.absolute()
        self.dry_run, self.began, self.interrupted = options.dry_run, time.monotonic(), False
        self.lines: list[str] = []
        self.measured: dict[str, Any] = {"about": {}, "correctness": {}, "cases": {}, "torch": {}, "queues": [], "soak": []}
        self.environment: dict[str, str] = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
        self.environment["PYTHONPATH"] = str(ROOT)
        if self.dry_run:  # not this machine, whose measuring takes a while
            self.environment["KITSUNE_PROFILE"] = "zen5-2"
        (self.out / "cases").mkdir(parents=True, exist_ok=True)

    # -- the run

    def main(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self.interrupt)
        if not self.set_up():
            return 2
        stages = [stage for stage in STAGES if stage in self.options.stages]
        families = [f for f in self.families() if self.wanted(f)]
        names = [name for name in self.cases("CASES") if self.wanted(name)] if "speed" in stages else []
        timed = Timed(self, [*([("torch", "")] if "torch" in stages else []), *(("case", name) for name in names)])
        if "correct" in stages:
            self.programs("planned", families, most=SIDE_BY_SIDE * 3 // 5, until=130.0)
        timed.run(until=20.0 + 100.0 * ("stalls" in stages))
        for stage in stages:
            if stage not in ("correct", "speed", "torch") and not self.interrupted and self.left() > 15:
                getattr(self, stage)(families)
        self.write()
        wrong = [n for n, f in self.measured["correctness"].items() if not f["ok"]]
        wrong += [n for n, f in self.measured["cases"].items() if _failed(f)]
        wrong += [f["name"] for f in (*self.measured["queues"], *self.measured["soak"]) if not f["ok"]]
        self.say(
            f"end: {len(self.measured['correctness'])} programs, {len(self.measured['cases'])} cases; wrong: {wrong or 'none'}"
        )
        return 130 if self.interrupted else int(bool(wrong))

    def interrupt(self, *_: Any) -> None:
        self.interrupted = True

    def left(self) -> float:
        return 0.0 if self.interrupted else float(self.options.limit - (time.monotonic() - self.began))

    def wanted(self, name: str) -> bool:
        only = self.options.only
        if only == "failed":
            return name.split()[0] in self.failed or name in self.failed
        return only in name

    def say(self, text: str) -> None:
        self.lines.append(f"[{time.monotonic() - self.began:6.1f}] {text}")
        results.say(self.lines[-1])
        results.write(self.out / "summary.txt", "\n".join(self.lines) + "\n")

    def write(self) -> None:
        results.write_json(self.out / "measured.json", self.measured)

    def set_up(self) -> bool:
        """Install the prepared kernels and note the machine. False where there is no device."""
        before = read_json(self.out / "measured.json") or {}
        self.failed = {n.split()[0] for n, f in before.get("correctness", {}).items() if not f["ok"]}
        self.failed |= {n for n, f in before.get("cases", {}).items() if _failed(f)}
        if self.options.only == "failed":  # the others stay
            self.measured["correctness"] = {n: f for n, f in before.get("correctness", {}).items() if f["ok"]}
            self.measured["cases"] = {n: f for n, f in before.get("cases", {}).items() if not _failed(f)}
        query = "name,driver_version,clocks.max.sm,clocks.sm,power.limit"
        smi = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        told = "" if self.dry_run else _output(smi)
        self.say(f"nvidia-smi: {told or 'nothing'}")
        cache = Path(os.environ.get("KITSUNE_CACHE_DIR") or self.out / "cache").absolute()
        self.environment["KITSUNE_CACHE_DIR"] = str(cache)
        if not self.dry_run:
            for note in prepared.install(cache)[1]:
                self.say(note)
        about = self.here()
        self.measured["about"] = {"nvidia_smi": told, **about, "sources": results.fingerprint(), "commit": prepared.commit()}
        self.say(f"here: {about}")
        if not self.dry_run and not prepared.devices_of(about):
            self.say(f"there is no CUDA device, so nothing can run: {about.get('driver') or 'the driver says nothing'}")
            return False
        device = prepared.device_of(about)
        if device and about.get("fits") is False and (driver := prepared.driver(device)):
            self.environment[DRIVER] = str(driver)
            self.say(f"plans are made as they were prepared, for {device}; the driver says {about.get('driver')}")
        return True

    def here(self) -> dict[str, Any]:
        return dict(json.loads(_output([sys.executable, "-m", "scripts.gpu.prepared"], self.environment) or "{}"))

    def families(self) -> list[str]:
        text = f"from scripts.gpu import programs as p; print(*p.{'DRY_FAMILIES' if self.dry_run else 'ALL'})"
        return _output([sys.executable, "-c", text], {**self.environment, "JAX_PLATFORMS": "cpu"}).split()

    def cases(self, which: str) -> list[str]:
        text = f"from scripts.gpu import cases as c; print(*c.{'DRY_CASES' if self.dry_run else which}, sep=chr(10))"
        return _output([sys.executable, "-c", text], {**self.environment, "JAX_PLATFORMS": "cpu"}).splitlines()

    def process(
        self, kind: str, name: str, limit: float, ask: bool, *more: str, prefix: Sequence[str] = ()
    ) -> tuple[Process, Path]:
        """A worker. Its file has the name of its work."""
        file = "_".join((kind, *name.replace("/", "of").split()))[:100]
        output = self.out / "cases" / f"{file}.json"
        output.unlink(missing_ok=True)
        command = [
            *prefix,
            sys.executable,
            "-m",
            self.worker,
            kind,
            *([name] if name else []),
            "--output",
            str(output),
            *more,
        ]
        command += ["--dry-run"] if self.dry_run else []
        return Process(command, output.with_suffix(".log"), limit, self.environment, ask), output

    # -- programs

    def programs(
        self, kinds: str, families: Iterable[str], most: int, until: float, label: str = "", prefix: Sequence[str] = ()
    ) -> None:
        """Families side by side, each in a process; one that died goes on behind the program that killed it. ``until``: seconds to
        leave for what comes next."""
        waiting = collections.deque(
            (f, p) for f in families for p in (["0/2", "1/2"] if kinds == "forced" and f in _BIG else ["0/1"])
        )
        running: dict[tuple[str, str], tuple[Process, Path]] = {}
        tries: collections.Counter[tuple[str, str]] = collections.Counter()
        skip: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
        found: dict[str, dict[str, Any]] = {}

        def take(key: tuple[str, str], content: dict[str, Any], process: Process) -> None:
            found.update({one["name"]: one for one in content.get("findings", [])})
            if content.get("finished"):
                if process.status:  # of a tool that watched it
                    found[f"{key[0]} {key[1]}"] = {"name": " ".join(key), "ok": False, "error": f"exit status {process.status}"}
                return
            if died_in := content.get("running"):
                found[died_in] = {"name": died_in, "ok": False, "error": f"the process ended in it (status {process.status})"}
            skip[key] += [one["name"] for one in content.get("findings", [])] + ([died_in] if died_in else [])
            tries[key] += 1
            if tries[key] < _TRIES and (died_in or content.get("findings")):
                waiting.append(key)
            else:
                words = content.get("error") or " / ".join(process.lines)
                found[f"{key[0]} {key[1]}"] = {"name": " ".join(key), "ok": False, "error": f"did not run: {words[-300:]}"}

        while (waiting or running) and self.left() > until:
            while waiting and len(running) < most:
                key = waiting.popleft()
                name = f"{key[0]} {kinds} {key[1]}"
                skipped = ["--skip", json.dumps(skip[key])]
                skipped += ["--since", str(self.options.since)] if self.options.since else []
                running[key] = self.process("programs", name, _PROGRAMS_S, False, *skipped, prefix=prefix)
            for key, (process, output) in list(running.items()):
                if process.look() is not None:
                    del running[key]
                    take(key, read_json(output) or {}, process)
            time.sleep(0.03)
        cut = []
        for key, (process, output) in running.items():
            process.end()
            process.wait()
            content = read_json(output) or {}
            found.update({one["name"]: one for one in content.get("findings", [])})
            cut.append(f"{key[0]} at {content.get('running')}")
        for name, one in found.items():
            self.measured["correctness"][f"{label}{name}"] = one
        right, left_out = sum(one["ok"] for one in found.values()), [f for f, _ in waiting]
        told = f"{label or kinds}: {right} of {len(found)} programs right"
        if unchanged := sum(one.get("unchanged", False) for one in found.values()):
            told += f"; {unchanged} of them have the same kernels as when they were right, and did not run"
        self.say(f"{told}; cut off: {cut or 'none'}; not started: {left_out or 'none'}")
        for one in found.values():
            if not one["ok"]:
                numbers = {key: one.get(key) for key in ("errors", "jit_errors", "equal_bits", "kernels")}
                self.say(f"  WRONG {label}{one['name']}: {one.get('error') or numbers}"[:300])
        self.write()

    def forced(self, families: list[str]) -> None:
        self.programs("forced", families, SIDE_BY_SIDE, until=8.0)

    def portable(self, families: list[str]) -> None:
        self.environment["KITSUNE_CUDA_ARCH"] = "sm_90"
        self.programs("planned", [f for f in families if f in PORTABLE], SIDE_BY_SIDE, until=8.0, label="portable ")
        del self.environment["KITSUNE_CUDA_ARCH"]

    def sanitizer(self, families: list[str]) -> None:
        """Our kernels only: XLA's own need no check here, and each tool slows what it watches."""
        if not shutil.which("compute-sanitizer"):
            self.say("sanitizer: compute-sanitizer is not on PATH")
            return
        for tool, names in SANITIZED.items():
            command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
            command += ["--kernel-name", "kernel_substring=kitsune_region"]
            chosen = [f for f in names.split(",") if f in families]
            self.programs("planned", chosen, 4, until=max(10.0, self.left() - 45.0), label=f"{tool} ", prefix=command)
            for log in sorted((self.out / "cases").glob("programs_*.log")):
                errors = [
                    line for line in log.read_text(errors="replace").splitlines() if "=========" in line and "ERROR SUMMARY" in line
                ]
                if errors and log.name.split("_")[1] in chosen:
                    self.say(f"  {tool} {log.stem}: {errors[-1].strip('= ')}")

    # -- one at a time

    def one(self, kind: str, name: str = "") -> dict[str, Any]:
        """A worker that prepares and runs now, alone."""
        process, output = self.process(kind, name, _START_S, True)
        while process.look() is None and READY not in list(process.told) and self.left() > 5:
            time.sleep(0.03)
        return self.let_run(kind, name, process, output)

    def let_run(self, kind: str, name: str, process: Process, output: Path) -> dict[str, Any]:
        process.go(max(5.0, min(_TURN_S[kind] * (5 if self.dry_run else 1), self.left() - 3)))
        process.wait()
        found = read_json(output) or {}
        if not found.get("finished"):
            found.setdefault(
                "error",
                f"the process ended (status {process.status}) at {found.get('running')}: {' / '.join(process.lines)[-300:]}",
            )
        return found

    def queues(self, _: list[str]) -> None:
        found = self.one("queues")
        all_of = self.measured["queues"] = _findings(found, "queues")
        self.say(f"queues: {sum(f['ok'] for f in all_of)} of {len(all_of)} right {found.get('error', '')}")
        self.write()

    def soak(self, _: list[str]) -> None:
        found = self.one("soak")
        self.measured["soak"] = _findings(found, "soak")
        told = [
            f"{f['name']}: {f.get('launches', 0)} launches, {f.get('error') or f.get('wrong')} wrong" for f in self.measured["soak"]
        ]
        self.say(f"soak: {told} {found.get('error', '')}")
        self.write()

    def later(self, _: list[str]) -> None:
        for name in self.cases("LATER"):
            if self.wanted(name) and self.left() > 30:
                self.tell("case", name, self.one("case", name))

    def stalls(self, _: list[str]) -> None:
        tool = shutil.which("ncu") or next(map(str, sorted(Path("/opt/nvidia").glob("nsight-compute/*/ncu"))), None)
        if tool is None or self.dry_run:
            self.say("stalls: ncu is not here")
            return
        report = self.out / "stalls.ncu-rep"
        names = [name for name in STALLS if self.wanted(name) or not self.options.only]
        limit = max(20.0, min(110.0, self.left() - 45))
        process = self.process("once", ",".join(names), limit, False, prefix=stalls.command(tool, report))[0]
        process.wait()
        details, source = (_output([tool, "-i", str(report), "--page", p, "--csv"], limit=40.0) for p in ("details", "source"))
        text = stalls.markdown(details, source)
        results.write(self.out / "stalls.details.csv", details)
        results.write(self.out / "stalls.source.csv", source)
        results.write(self.out / "stalls.md", text)
        self.say(f"stalls: {text.count('## ')} kernels; {' / '.join(process.lines)[-200:]}")

    def tell(self, kind: str, name: str, found: dict[str, Any]) -> None:
        if kind == "torch":
            self.measured["torch"] = found
            self.say(f"torch: {json.dumps({k: v for k, v in found.items() if k not in ('name', 'running')})[:1500]}")
        else:
            self.measured["cases"][name] = found
            self.say(f"{name}: {found.get('error', '')}")
            for key, column in found.get("columns", {}).items():
                self.say(f"    {_line(key, column)}")
        self.write()


class Timed:
    """Workers that prepare side by side, then run one after the other."""

    def __init__(self, check: Check, waiting: Iterable[tuple[str, str]]):
        self.check, self.waiting = check, collections.deque(waiting)
        self.open: dict[tuple[str, str], tuple[Process, Path]] = {}
        self.start(SIDE_BY_SIDE - SIDE_BY_SIDE * 3 // 5)

    def start(self, most: int) -> None:
        """Starts as many as may prepare at once."""
        preparing = len(self.preparing())
        while self.waiting and preparing < most and (not self.open or _free_gb() > _HOST_GB):
            key = self.waiting.popleft()
            self.open[key] = self.check.process(*key, _START_S + 1e3, True)
            preparing += 1

    def preparing(self) -> list[tuple[str, str]]:
        return [key for key, (p, _) in self.open.items() if p.look() is None and READY not in list(p.told)]

    def run(self, until: float) -> None:
        """Prepares for a while, then times what is ready, alone on the device and the host; and so on."""
        while (self.open or self.waiting) and self.check.left() > until:
            began = time.monotonic()
            while (self.preparing() or self.waiting) and time.monotonic() < began + _PREPARATION_S + _DRAIN_S:
                if time.monotonic() < began + _PREPARATION_S:
                    self.start(SIDE_BY_SIDE)
                elif not self.preparing():
                    break
                if self.check.left() < until:
                    break
                time.sleep(0.05)
            for key in self.preparing():
                self.open[key][0].end()
            for key in list(self.open):
                if self.check.left() < until:
                    break
                process, output = self.open.pop(key)
                self.check.tell(*key, self.check.let_run(*key, process, output))
        for process, _ in self.open.values():
            process.end()
            process.wait()
        if self.open or self.waiting:
            self.check.say(f"no time for {', '.join(' '.join(key) for key in (*self.open, *self.waiting))}")


def _failed(case: dict[str, Any]) -> bool:
    """Of a timed case: it did not end, or a column does not run (cuDNN has no kernel for some sizes)."""
    return not case.get("finished") or any("error" in c for key, c in case.get("columns", {}).items() if key != "cudnn")


def _findings(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The findings of a worker, and one more if it did not end."""
    ended = [] if found.get("finished") else [{"name": name, "ok": False, "error": found.get("error")}]
    return [*found.get("findings", []), *ended]


def _line(key: str, column: dict[str, Any]) -> str:
    if "ms" not in column:
        return f"{key}: {column.get('error', 'not timed')[:200]}"
    regions = column.get("regions", [])
    modelled = column.get("modelled_ms") or 1e3 * sum(r["seconds"] for r in regions)
    ours = sum(k["calls"] * k["us"] for k in column.get("kernels", []) if k["kernel"].startswith("kitsune")) / 1e3
    parts = [f"{column['ms']:.4f} ms", f"{column.get('speedup', 0):.2f}x jit"]
    parts += [f"kernels {ours:.4f} ms, modelled {modelled:.4f} ({len(regions)} regions)"] if ours or regions else []
    parts += [f"differs {column['differs_from_jit']:.1e}"] if "differs_from_jit" in column else []
    parts += [f"lowered in {column.get('lower_s')} s, compiled in {column.get('compile_s')} s"] if "lower_s" in column else []
    return f"{key}: " + "; ".join([*parts, *column.get("notes", [])])


def _free_gb() -> float:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1e3
    return next((int(line.split()[1]) / 2**20 for line in lines if line.startswith("MemAvailable")), 1e3)


def _output(command: Sequence[str], environment: dict[str, str] | None = None, limit: float = 60.0) -> str:
    try:
        variables = {**os.environ, **(environment or {})}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=limit, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "out", nargs="?", type=Path, default=Path("out/gpu-check"), help="the folder to write (default out/gpu-check)"
    )
    parser.add_argument("--limit", type=float, default=420.0, help="seconds for everything (default 420)")
    parser.add_argument("--stages", default=",".join(STAGES[:4]), type=lambda s: s.split(","), help="of " + ", ".join(STAGES))
    parser.add_argument(
        "--only", default="", help='families and cases whose name holds this; "failed": those that the folder tells of'
    )
    parser.add_argument(
        "--since", type=Path, help="measured.json of an earlier check: programs that were right with the same kernels do not run"
    )
    parser.add_argument("--dry-run", action="store_true", help="no device: the emulator, tiny sizes; tests the check itself")
    options = parser.parse_args(arguments)
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"unknown stages: {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    return Check(options).main()


if __name__ == "__main__":
    sys.exit(main())

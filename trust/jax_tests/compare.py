"""JAX's own tests of sharded programs with pipelines under ``jax.jit``, beside the same tests with ``jax.jit`` alone.

Comes in: a checkout of JAX, or its folder ``tests``, of the version installed. Goes out: a ``Comparison`` of each file: the tests
that pass with ``jax.jit`` alone and not with pipelines, sorted by kind of error, and apart those that ``known.toml`` explains.
Invariant: a test that fails with ``jax.jit`` alone, or does not run here, proves nothing and is not run again.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

FILES = ("array_test.py", "pjit_test.py", "shard_map_test.py")
SEVERAL = "multiprocess"  # a folder of tests for several processes
KNOWN = Path(__file__).with_name("known.toml")
DEVICES = 8
PROCESSES = 2
START = 120.0  # seconds until the first test begins, on a loaded machine


@dataclasses.dataclass(frozen=True)
class Outcome:
    """``kind``: "pass", "skip", "failure", "error", "fallback", "crash" or "hang". ``detail``: type and message of the error."""

    kind: str
    detail: str = ""
    text: str = ""

    @property
    def signature(self) -> str:
        """The kind and the first line of the message, without numbers."""
        line = (self.detail.splitlines() or [""])[0]
        return f"{self.kind}: {re.sub(r'[0-9]+', 'N', line)[:120]}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Of one file: how many tests pass with ``jax.jit``, and the ``new`` and ``known`` (by reason) ones that then do not."""

    file: str
    passed: int
    new: Mapping[str, Outcome]
    known: Mapping[str, str]

    def text(self) -> str:
        lines = [f"{self.file}: {self.passed} pass with jax.jit, {len(self.new) + len(self.known)} of them not with pipelines"]
        for reason, n in collections.Counter(self.known.values()).most_common():
            lines.append(f"  explained, {n} x {reason}")
        by_kind = collections.defaultdict(list)
        for test, outcome in sorted(self.new.items()):
            by_kind[outcome.signature].append(test)
        for kind, tests in sorted(by_kind.items(), key=lambda item: -len(item[1])):
            lines.append(f"  NEW, {len(tests)} x {kind}")
            lines += [f"    {test}" for test in tests]
        return "\n".join(lines)


def files_of(folder: Path) -> list[Path]:
    """The files of the suite in a checkout of JAX or in its folder ``tests``. Raises ``FileNotFoundError`` where there is none."""
    root = folder / "tests" if (folder / "tests").is_dir() else folder
    found = [root / name for name in FILES if (root / name).exists()]
    found += sorted((root / SEVERAL).glob("*_test.py"))
    if not found:
        raise FileNotFoundError(f"{folder} has none of {', '.join(FILES)}: give a checkout of JAX, of the version installed")
    return found


def known_differences(path: Path = KNOWN) -> dict[str, str]:
    """Pattern of ``file:Class.test`` -> the reason why it may differ."""
    entries = tomllib.loads(path.read_text())["difference"]
    return {pattern: entry["reason"] for entry in entries for pattern in entry["tests"]}


def compare(path: Path, folder: Path, limit: float, known: Mapping[str, str], *, force: bool = True) -> Comparison:
    """Run ``path`` in both ways. ``folder``: for the outcomes. ``limit``: seconds per test; beyond, it hangs."""
    name = f"{SEVERAL}/{path.name}" if path.parent.name == SEVERAL else path.name
    plain = run_file(path, folder, "jit", limit)
    passed = [test for test, outcome in plain.items() if outcome.kind == "pass"]
    ours = run_file(path, folder, "pipeline", limit, passed, force=force) if passed else {}
    failed = {test: ours.get(test, Outcome("crash", "it did not run")) for test in passed}
    failed = {test: outcome for test, outcome in failed.items() if outcome.kind != "pass"}
    reasons = {test: _reason(f"{name}:{test}", known) for test in failed}
    return Comparison(
        name,
        len(passed),
        {test: outcome for test, outcome in failed.items() if reasons[test] is None},
        {test: reason for test, reason in reasons.items() if reason is not None},
    )


def _reason(test: str, known: Mapping[str, str]) -> str | None:
    return next((reason for pattern, reason in known.items() if fnmatch.fnmatchcase(test, pattern)), None)


def run_file(
    path: Path, folder: Path, mode: str, limit: float, only: Sequence[str] | None = None, *, force: bool = True
) -> dict[str, Outcome]:
    """The outcome of each test of ``path``. After a test that hangs, or that the process dies of, another process runs the rest."""
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / f"{'several-' * (path.parent.name == SEVERAL)}{path.stem}-{mode}.jsonl"
    processes = PROCESSES if path.parent.name == SEVERAL else 1
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir()
    found: dict[str, Outcome] = {}
    for attempt in range(20):
        files = [results / f"{attempt}-{k}" for k in range(processes)]
        argument = []
        if only is not None:
            (results / "only").write_text("\n".join(t for t in only if t not in found))
            argument = ["--only", str(results / "only")]
        ended = _run(path, files, mode, limit, argument, force)
        made = [_outcomes(file, ended) for file in files]
        for outcomes in made:
            for test, outcome in outcomes.items():
                if test not in found or found[test].kind in ("pass", "skip"):
                    found[test] = outcome
        unfinished = any(o.kind in ("crash", "hang") for outcomes in made for o in outcomes.values())
        if not unfinished or (only is not None and set(only) <= set(found)):
            break
        if only is None:  # the names of all are only known to a run that ends
            only = _names(path, folder, limit)
    return found


def _names(path: Path, folder: Path, limit: float) -> list[str]:
    listed = folder / "names"
    listed.unlink(missing_ok=True)
    _run(path, [listed], "list", limit, [], False)
    return [json.loads(line)["test"] for line in listed.read_text().splitlines()] if listed.exists() else []


def _outcomes(file: Path, ended: str) -> dict[str, Outcome]:
    """``ended``: "ended" or "hang", of the whole process."""
    found: dict[str, Outcome] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        record = json.loads(line)
        if record["outcome"] == "begun":
            found[record["test"]] = Outcome("hang" if ended == "hang" else "crash", "the process ended in it")
        else:
            found[record["test"]] = Outcome(record["outcome"], record.get("detail", ""), record.get("text", ""))
    return found


def environment(force: bool, devices: int) -> dict[str, str]:
    """Of a process of tests: ``devices`` CPU devices, and plans that are the same on every machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KITSUNE_")}
    root = str(Path(__file__).parents[2])
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", kept.get("XLA_FLAGS", ""))
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, (root, kept.get("PYTHONPATH", "")))),
        "JAX_PLATFORMS": "cpu",
        "KITSUNE_PROFILE": "zen5-2",
        "KITSUNE_FORCE": str(int(force)),
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}".strip(),
    }


def _run(path: Path, files: Sequence[Path], mode: str, limit: float, more: Sequence[str], force: bool) -> str:
    """Run ``path`` in a process for each of the ``files`` of results, until all end or one test takes longer than ``limit``."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    environ = environment(force, DEVICES // len(files))
    started = []
    for k, file in enumerate(files):
        argv = [sys.executable, "-m", "trust.jax_tests.worker", str(path), str(file), mode, *more]
        if len(files) > 1:
            argv += ["--processes", str(len(files)), "--process", str(k), "--coordinator", coordinator]
        with file.with_name(f"{file.name}.log").open("wb") as log:
            # A session of its own: a test's own processes end with it.
            started.append(subprocess.Popen(argv, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
    try:
        return _watched(started, files, limit)
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _watched(started: Sequence[subprocess.Popen[bytes]], files: Sequence[Path], limit: float) -> str:
    sizes, since = [-1], time.monotonic()
    while any(process.poll() is None for process in started):
        now = [file.stat().st_size if file.exists() else 0 for file in files]
        if now != sizes:
            sizes, since = now, time.monotonic()
        if time.monotonic() - since > (limit if any(now) else max(limit, START)):
            return "hang"
        time.sleep(0.2)
    return "ended"


def run(folder: Path, out: Path, limit: float, only: str = "*", *, force: bool = True) -> int:
    """Print the comparison of each file whose name ``only`` matches. Exit status 0: every difference is explained. 1: some are
    not. 2: no test ran."""
    known = known_differences()
    compared = []
    for path in files_of(folder):
        if fnmatch.fnmatch(f"{path.parent.name}/{path.name}", f"*{only}"):
            compared.append(compare(path, out, limit, known, force=force))
            print(compared[-1].text(), flush=True)
    new = sum(len(c.new) for c in compared)
    passed = sum(c.passed for c in compared)
    print(f"{passed} tests of JAX pass with jax.jit; {new} of them fail with pipelines, without an explanation")
    return 2 if not passed else 1 if new else 0

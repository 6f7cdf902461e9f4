"""Off-chip bytes of a training step, counted in a simulated cache, beside what the planner's model says.

Comes in: a number of rows and the size of the last-level cache. Goes out: a JSON record with the misses of one step (loss and
gradients of NeRF's network, float32, one thread) under ``jax.jit`` and as one pipeline, and the modelled bytes of both. Invariant:
every column runs under the same options, in a process of its own, and counts its second step, so the cache is warm.

Valgrind's callgrind runs the very machine code that XLA and the executor run on a CPU with AVX2; it has no AVX-512. Usage::

    python -m benchmarks.offchip --rows 8192 --last-level 8388608
    python -m benchmarks.offchip --table    # writes the table of docs/offchip.md from what is stored
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import kitsune_jax as kj
from benchmarks.apps import Params, make_case
from benchmarks.machine import describe_commit, describe_machine, describe_software, machine_slug, today
from benchmarks.store import RESULTS
from benchmarks.table import update
from kitsune_jax.report.data import byte_text

DOCUMENT = Path(__file__).parents[1] / "docs" / "offchip.md"
LINE = 64  # bytes
FORMAT = 1
XLA_FLAGS = "--xla_cpu_max_isa=AVX2"  # valgrind has no AVX-512, whatever the processor has
# "copy" reads and writes an array many times the cache: its bytes are known, so it checks the counter.
COLUMNS = ("copy", "jit", "pipeline")
COPY_BYTES = 64 << 20
# Fills of the cache, and lines written back from it: callgrind's events, one per line of ``LINE`` bytes (its manual, "Command-line
# options: cache simulation").
READ_MISSES, WRITE_MISSES, WRITE_BACKS = ("ILmr", "DLmr"), ("DLmw",), ("ILdmr", "DLdmr", "DLdmw")

# Only code inside of the process can say when a step begins: valgrind's client requests are magic instructions.
_GATE = """
#include <valgrind/callgrind.h>
void count_start(void) { CALLGRIND_START_INSTRUMENTATION; }
void count_dump(void) { CALLGRIND_DUMP_STATS; }
void count_stop(void) { CALLGRIND_STOP_INSTRUMENTATION; }
"""


@dataclasses.dataclass(frozen=True)
class Counts:
    """Bytes between the last-level cache and memory: lines brought in by a read, by a write, and lines written back."""

    read: int
    written: int
    written_back: int

    @property
    def missed(self) -> int:
        """What the planner's model counts: every byte that is read from memory, and every byte that is written there, once.

        A written line is brought in first, so its miss stands for its later way out.
        """
        return self.read + self.written


def parse(text: str) -> Counts:
    """The counts of a file of callgrind. Raises ``ValueError`` where it lacks the events, or says two things of their sum.

    ``summary`` is what the simulator added up while it ran, ``totals`` the sum over the functions in the file. They were seen to
    differ in the event that a miss stands under (reads of instructions for writes of data), never in the sum of all misses.
    """
    summed, booked = _counts(text, "summary"), _counts(text, "totals")
    for one, other in ((summed.missed, booked.missed), (summed.written_back, booked.written_back)):
        if abs(one - other) > 1e-3 * max(one, other) + 100 * LINE:  # the dump itself runs between the two
            raise ValueError(f"{one} bytes in the summary, {other} in the totals: counting was stopped in between?")
    return summed


def _counts(text: str, key: str) -> Counts:
    events, costs = (re.search(rf"^{word}:\s*(.+)$", text, re.MULTILINE) for word in ("events", key))
    if events is None or costs is None:
        raise ValueError(f"no events or no {key}: not a file of callgrind")
    # Trailing zeros are left out of a line of costs (callgrind's format specification).
    names, values = events[1].split(), [int(v) for v in costs[1].split()]
    table = dict(zip(names, values + [0] * (len(names) - len(values)), strict=True))
    missing = [e for e in (*READ_MISSES, *WRITE_MISSES, *WRITE_BACKS) if e not in table]
    if missing:
        raise ValueError(f"no event {', '.join(missing)}: run with --cache-sim=yes --simulate-wb=yes")
    return Counts(*(LINE * sum(table[e] for e in group) for group in (READ_MISSES, WRITE_MISSES, WRITE_BACKS)))


def reduction(before: float, after: float) -> float:
    """The share of ``before`` that is no longer moved."""
    return 1 - after / before


def cache_options(last_level: int, first_level: int = 32 << 10) -> list[str]:
    """Options of the simulated caches, LRU, ``LINE`` bytes a line: 8 ways at the first level, 16 at the last, as in most x86 cores.

    Raises ``ValueError`` for a size that has no such cache: callgrind wants sets in a power of two.
    """
    for size, ways in ((first_level, 8), (last_level, 16)):
        sets = size // (ways * LINE)
        if sets * ways * LINE != size or sets < 1 or sets & (sets - 1):
            raise ValueError(f"no cache of {size} bytes with {ways} ways of {LINE}-byte lines has a power of two of sets")
    return [f"--I1={first_level},8,{LINE}", f"--D1={first_level},8,{LINE}", f"--LL={last_level},16,{LINE}"]


def valgrind_options(last_level: int) -> list[str]:
    """Nothing is simulated before the child asks for it, because imports and the compilation take longer than the step."""
    return [
        *("--tool=callgrind", "--cache-sim=yes", "--simulate-wb=yes", "--instr-atstart=no"),
        *cache_options(last_level),
    ]


def value_and_gradient(rows: int) -> tuple[Any, tuple[Any, ...]]:
    """(function, arguments) of the step that is counted: mean squared error of NeRF's network, and its gradients."""
    case = make_case("nerf", "f32", rows)

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((case.app.function(params, x) - y) ** 2)

    return jax.value_and_grad(loss), (case.params, case.x, jnp.ones((rows, 4), jnp.float32))


def compiled(column: str, function: Any, args: tuple[Any, ...]) -> Any:
    return jax.jit(kj.pipeline(function) if column == "pipeline" else function).lower(*args).compile()


def _increment(x: jax.Array) -> jax.Array:
    return x + 1


def child(column: str, rows: int, gate: Path) -> dict[str, Any]:
    """What runs under valgrind: two steps, of which the second is counted. Gives the loss, and the planner's model of the step."""
    function, args = value_and_gradient(rows) if column != "copy" else (_increment, (jnp.zeros(COPY_BYTES // 4, jnp.float32),))
    step = compiled(column, function, args)
    jax.block_until_ready(args)
    switch = ctypes.CDLL(str(gate))
    switch.count_start()
    jax.block_until_ready(step(*args))
    switch.count_dump()
    out = jax.block_until_ready(step(*args))
    switch.count_dump()
    switch.count_stop()
    if column == "copy":
        return {"modelled": 2 * COPY_BYTES}
    report = kj.explain(function)(*args)
    return {
        "loss": float(out[0]),
        "modelled": report.traffic_pipeline if column == "pipeline" else report.traffic_bulk_sync,
        "planned_for": report.machine,
        "pipelined": [report.ops_pipelined, report.ops_total],
        "tile_rows": [region.tile_rows for region in report.regions],
    }


def count(column: str, rows: int, last_level: int, valgrind: str) -> dict[str, Any]:
    """One column, counted in a process of its own. Raises ``RuntimeError`` with its last words when it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gate = _build_gate(folder)
        command = [valgrind, *valgrind_options(last_level), f"--callgrind-out-file={folder / 'counts'}"]
        command += [sys.executable, "-m", "benchmarks.offchip", "--rows", str(rows), "--child", column]
        command += ["--gate", str(gate), "--output", str(folder / "child.json")]
        flags = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{column} failed under valgrind:\n{done.stderr[-3000:]}")
        counts = parse((folder / "counts.2").read_text())  # of the second dump: what happened after the first one
        found = json.loads((folder / "child.json").read_text())
    return {**found, "counted": {**dataclasses.asdict(counts), "missed": counts.missed}}


def summarise(columns: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The shares of bytes saved, counted and modelled. Raises ``ValueError`` where the columns do not compute the same loss."""
    jit, pipeline = columns["jit"], columns["pipeline"]
    if abs(jit["loss"] - pipeline["loss"]) > 1e-5 * abs(jit["loss"]):
        raise ValueError(f"the losses differ: {jit['loss']} with jax.jit, {pipeline['loss']} as a pipeline")

    def both(key: str) -> float:
        return reduction(jit["counted"][key], pipeline["counted"][key])

    return {
        "counted": both("missed"),
        "counted_written_back": both("written_back"),
        "modelled": reduction(jit["modelled"], pipeline["modelled"]),
    }


def make_record(columns: dict[str, dict[str, Any]], rows: int, last_level: int, valgrind: str) -> dict[str, Any]:
    """What is stored: the columns, and what they were counted on and with."""
    version = subprocess.run([valgrind, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return {
        "format": FORMAT,
        "date": today(),
        "machine": describe_machine(),
        **describe_commit(),
        "versions": {**describe_software(), "valgrind": version.removeprefix("valgrind-")},
        "command": f"python -m benchmarks.offchip --rows {rows} --last-level {last_level}",
        "valgrind_options": valgrind_options(last_level),
        "xla_flags": XLA_FLAGS,
        "threads": 1,
        "app": "nerf",
        "dtype": "f32",
        "rows": rows,
        "columns": columns,
        "reduction": summarise(columns),
    }


def newest(folder: Path = RESULTS) -> dict[str, Any]:
    """The newest record. Raises ``ValueError`` where there is none, or one of another format."""
    records = [json.loads(path.read_text()) for path in folder.glob("offchip-*.json")]
    if not records or any(r.get("format") != FORMAT for r in records):
        raise ValueError(f"{folder.name} has no counts, or some of a format other than {FORMAT}")
    return dict(max(records, key=lambda r: str(r["date"])))


def markdown(record: dict[str, Any]) -> str:
    """The table of a record."""
    versions, saved = record["versions"], record["reduction"]
    last_level = next(int(o.removeprefix("--LL=").split(",")[0]) for o in record["valgrind_options"] if o.startswith("--LL="))
    names = {"copy": f"copy of {byte_text(COPY_BYTES)}, as a check", "jit": "`jax.jit`", "pipeline": "pipeline"}
    changed = " with changes" if record["modified"] else ""
    lines = [
        f"NeRF MLP 8 x 256, loss and gradients, {record['rows']} rows, float32, one thread, last level of "
        f"{last_level >> 20} MiB; JAX {versions['jax']}, Valgrind {versions['valgrind']}, {record['machine']['cpu']}, "
        f"counted {record['date']} at {record['commit'][:10]}{changed}.",
        "",
        "| | read misses | write misses | **counted: both** | **modelled** | written back |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for column, name in names.items():
        found, counted = record["columns"][column], record["columns"][column]["counted"]
        cells = [counted["read"], counted["written"], counted["missed"], found["modelled"], counted["written_back"]]
        lines.append(f"| {name} | {' | '.join(map(byte_text, cells))} |")
    shares = (saved["counted"], saved["modelled"], saved["counted_written_back"])
    lines.append("| saved by the pipeline | | | **{:.1%}** | **{:.1%}** | {:.1%} |".format(*shares))
    return "\n".join(lines)


def _build_gate(folder: Path) -> Path:
    source, gate = folder / "gate.c", folder / "gate.so"
    source.write_text(_GATE)
    done = subprocess.run(["cc", "-shared", "-fPIC", "-O1", str(source), "-o", str(gate)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"no callgrind.h, or no C compiler: install valgrind with its headers\n{done.stderr[-2000:]}")
    return gate


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.table:
        print(f"{DOCUMENT.name} {'updated' if update(DOCUMENT, markdown(newest(args.results)), 'offchip') else 'is up to date'}")
        return 0
    if args.child:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX asks for it: one thread, one cache
        args.output.write_text(json.dumps(child(args.child, args.rows, args.gate)))
        return 0
    if shutil.which(args.valgrind) is None:
        print(f"no {args.valgrind}: install valgrind, or say where it is with --valgrind")
        return 2
    columns = {}
    for column in COLUMNS:
        columns[column] = count(column, args.rows, args.last_level, args.valgrind)
        print(column, json.dumps(columns[column]), flush=True)
    record = make_record(columns, args.rows, args.last_level, args.valgrind)
    path = args.results / f"offchip-{machine_slug(record['machine'])}-{today()}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{json.dumps(record['reduction'])}\n-> {path.name}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offchip", description="Counts off-chip bytes under valgrind.")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--last-level", type=int, default=8 << 20, help="bytes of the last-level cache (default 8 MiB)")
    parser.add_argument("--valgrind", default="valgrind", help="the program; 3.24 runs a step in a seventh of the time of 3.19")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="count nothing, write the table of docs/offchip.md")
    parser.add_argument("--child", choices=COLUMNS, help=argparse.SUPPRESS)
    parser.add_argument("--gate", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

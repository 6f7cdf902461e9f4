"""One case, measured.

Comes in: an app, a dtype, a number of rows. Goes out: a JSON-serialisable record (see ``measure``). A second process measures what
needs a fresh one: the huge-pages column and the first call.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kitsune_jax as kj
from benchmarks.apps import Case, make_case
from benchmarks.columns import COLUMNS, column_names
from benchmarks.roofline import floor_seconds, measured_ceilings, model_ceilings
from benchmarks.timing import calls_to_fill, interleaved, paired_speedup, summary
from kitsune_jax.planning.machines import GPUS

SAMPLED_ROWS = 512
ROTATED_BYTES = 200 << 20  # of inputs on a GPU: several times its L2, so that no call finds its rows there
FILL_SECONDS = 5e-3  # of back-to-back calls on a GPU: many times what the host needs to enqueue one
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # madvise huge pages for malloc: glibc manual, "Memory Allocation Tunables"


@dataclasses.dataclass(frozen=True)
class Effort:
    """``rounds`` interleaved calls, or as many as fit into ``seconds`` (at least three)."""

    rounds: int = 15
    seconds: float = 30.0


def measure(name: str, mode: str, dtype: str, platform: str, rows: int, effort: Effort, *, child: bool = True) -> dict[str, Any]:
    """All columns of one case.

    ``columns[name]``: seconds (median, min, max, quartiles, n) and, for those of this process, ``max_rel_error``.
    ``speedup[name]``: the pipeline against that column, paired round by round. ``explain``: coverage and modelled bytes.
    ``first_call``: seconds to trace, lower and compile (CPU). ``roofline``: the least seconds by the machine's model, and by what a
    library reaches on it (GPU).
    """
    case = make_case(name, dtype, rows)
    functions = {column: COLUMNS[column](case.app.function) for column in column_names(platform)}
    errors = {column: max_relative_error(case, f) for column, f in functions.items()}
    thunks = _thunks(functions, case, ROTATED_BYTES if platform == "cuda" else 0)
    calls = calls_to_fill(thunks, FILL_SECONDS) if platform == "cuda" else 1
    times = interleaved(thunks, rounds=effort.rounds, seconds=effort.seconds, calls=calls)
    columns: dict[str, Any] = {c: {**summary(t), "max_rel_error": errors[c]} for c, t in times.items()}
    speedups: dict[str, Any] = {c: paired_speedup(t, times["pipeline"]) for c, t in times.items() if c != "pipeline"}
    record: dict[str, Any] = {
        "app": name,
        "title": case.app.title,
        "mode": mode,
        "dtype": dtype,
        "platform": platform,
        "rows": rows,
        "flops": case.app.flops * rows,
        "columns": columns,
        "speedup": speedups,
        "explain": _explained(case),
    }
    if platform == "cuda":
        record |= {"calls": calls, "roofline": _roofline(case)}
    elif child:
        first = run_child(name, dtype, rows, effort, huge_pages=True)
        columns["jit_hugepages"], columns["pipeline_hugepages"] = first["columns"]["jit"], first["columns"]["pipeline"]
        speedups["jit_hugepages"] = first["speedup"]
        record["first_call"] = first["first_call"]
    return record


def _thunks(functions: dict[str, Any], case: Case, rotated_bytes: int = 0) -> dict[str, Callable[[], Any]]:
    """Calls of each column, on copies of the rows in turn that are ``rotated_bytes`` together."""
    copies = [case.x, *(case.x + 0 for _ in range(rotated_bytes // case.x.nbytes))]

    def thunk(function: Any) -> Callable[[], Any]:
        inputs = itertools.cycle(copies)
        return lambda: function(case.params, next(inputs))

    return {column: thunk(f) for column, f in functions.items()}


def _roofline(case: Case) -> dict[str, Any]:
    """``model``: by the machine model of this device, where there is one."""
    measured = measured_ceilings(case.dtype)
    kind = jax.devices()[0].device_kind.lower()
    machine = next((m for name, m in GPUS.items() if name in kind), None)
    return {
        "measured": {**dataclasses.asdict(measured), "seconds": floor_seconds(case, measured)},
        "model": machine and {"machine": machine.name, "seconds": floor_seconds(case, model_ceilings(machine, case.dtype))},
    }


def max_relative_error(case: Case, function: Callable[..., jax.Array]) -> float:
    """Largest |y - r| / max(|r|, rms(r)) over a sample of rows, r being the float64 reference on the same (rounded) inputs.

    The root mean square keeps elements that happen to be near zero from dominating.
    """
    chosen = np.unique(np.linspace(0, case.rows - 1, min(SAMPLED_ROWS, case.rows)).astype(np.int64))
    got = np.asarray(function(case.params, case.x)).astype(np.float64)[chosen]
    params = {k: np.asarray(v).astype(np.float64) for k, v in case.params.items()}
    reference = case.app.reference(params, np.asarray(case.x)[chosen].astype(np.float64))
    return float(np.max(np.abs(got - reference) / np.maximum(np.abs(reference), np.sqrt(np.mean(reference**2)))))


def _explained(case: Case) -> dict[str, Any]:
    report = kj.explain(case.app.function)(case.params, case.x).to_dict()
    return {
        **{k: report[k] for k in ("ops_total", "ops_pipelined", "coverage", "traffic_bulk_sync", "traffic_pipeline")},
        "regions": [{k: r[k] for k in ("arrangement", "tile_rows", "seconds", "baseline_seconds")} for r in report["regions"]],
    }


def run_child(name: str, dtype: str, rows: int, effort: Effort, *, huge_pages: bool) -> dict[str, Any]:
    """``child`` in a fresh process. Raises ``RuntimeError`` with the process's last words when it fails."""
    environment = dict(os.environ)
    if huge_pages:
        environment["GLIBC_TUNABLES"] = HUGE_PAGES
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "child.json"
        command = [sys.executable, "-m", "benchmarks", "child", "--app", name, "--dtype", dtype, "--rows", str(rows)]
        command += ["--rounds", str(effort.rounds), "--seconds", str(effort.seconds), "--output", str(path)]
        done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the benchmark's child process failed:\n{done.stderr[-2000:]}")
        return dict(json.loads(path.read_text()))


def child(name: str, dtype: str, rows: int, effort: Effort) -> dict[str, Any]:
    """What a fresh process measures: the first call (cold, then warm), and jax.jit against the pipeline, interleaved."""
    case = make_case(name, dtype, rows)
    first = first_call(case)
    functions = {column: COLUMNS[column](case.app.function) for column in ("jit", "pipeline")}
    times = interleaved(_thunks(functions, case), rounds=effort.rounds, seconds=effort.seconds)
    return {
        "columns": {c: summary(t) for c, t in times.items()},
        "speedup": paired_speedup(times["jit"], times["pipeline"]),
        "first_call": first,
    }


def first_call(case: Case, repeats: int = 5) -> dict[str, Any]:
    """Seconds to trace, lower and compile, ``jax.jit`` against the pipeline.

    ``cold``: each for the first time in the process, the pipeline before ``jax.jit``, after another function has warmed up JAX
    itself; the planner's imports are included. ``warm``: medians of ``repeats`` alternating turns, each with one row less than the
    one before, so that no cache (JAX's or the planner's) knows the shapes.
    """
    jax.jit(lambda x: jax.numpy.maximum(x @ x, 0).sum()).lower(np.zeros((8, 8), np.float32)).compile()
    cold = {column: _compile_seconds(case, column, case.rows) for column in ("pipeline", "jit")}
    warm: dict[str, list[float]] = {"jit": [], "pipeline": []}
    for turn in range(1, repeats + 1):
        for column, seconds in warm.items():
            seconds.append(_compile_seconds(case, column, case.rows - turn))
    medians = {column: summary(seconds)["median"] for column, seconds in warm.items()}
    return {
        "cold": {**cold, "overhead": cold["pipeline"] - cold["jit"]},
        "warm": {**medians, "overhead": medians["pipeline"] - medians["jit"]},
    }


def _compile_seconds(case: Case, column: str, rows: int) -> float:
    function = COLUMNS[column](lambda params, x: case.app.function(params, x))  # a fresh function: no cache knows it
    x = jax.ShapeDtypeStruct((rows, *case.x.shape[1:]), case.x.dtype)
    gc.collect()
    start = time.perf_counter()
    function.lower(case.params, x).compile()
    return time.perf_counter() - start

"""One case, measured.

Comes in: an app, a mode, a dtype, a number of rows. Goes out: a JSON-serialisable record (see ``measure``). A second process
measures what needs a fresh one: the huge-pages column and the first call of mode ``infer``.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kitsune_jax as kj
from benchmarks.apps import APPS, Case, make_case
from benchmarks.columns import COLUMNS, column_names
from benchmarks.memory import rise, temp_bytes
from benchmarks.peers import client as peers
from benchmarks.peers.client import Peer
from benchmarks.roofline import floor_seconds, measured_ceilings, model_ceilings
from benchmarks.timing import Thunk, calls_to_fill, interleaved, paired_speedup, summary
from benchmarks.training import (
    BETA1,
    PIPELINED,
    TRAIN_STEPS,
    TrainCase,
    explained,
    make_train_case,
    reference,
    relative_error,
    step_errors,
    train_column_names,
)
from kitsune_jax.targets.cuda.planning.machines import GPUS

SAMPLED_ROWS = 512
ROTATED_BYTES = 200 << 20  # of inputs on a GPU: several times its L2, so that no call finds its rows there
FILL_SECONDS = 5e-3  # of back-to-back calls on a GPU: many times what the host needs to enqueue one
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # madvise huge pages for malloc: glibc manual, "Memory Allocation Tunables"


@dataclasses.dataclass(frozen=True)
class Effort:
    """``rounds`` interleaved calls, or as many as fit into ``seconds`` (at least three). ``peers``: the interpreter that has
    PyTorch, whose columns are then measured too."""

    rounds: int = 15
    seconds: float = 30.0
    peers: str = ""


def measure(name: str, mode: str, dtype: str, platform: str, rows: int, effort: Effort, *, child: bool = True) -> dict[str, Any]:
    """All columns of one case in ``mode`` "infer" (see ``measure_inference``) or "train" (see ``measure_training``)."""
    head = {"app": name, "title": APPS[name].title, "mode": mode, "dtype": dtype, "platform": platform, "rows": rows}
    if mode == "train":
        return head | measure_training(make_train_case(name, dtype, rows), platform, effort, child=child)
    return head | measure_inference(make_case(name, dtype, rows), platform, effort, child=child)


def measure_inference(case: Case, platform: str, effort: Effort, *, child: bool) -> dict[str, Any]:
    """``columns[name]``: seconds (median, min, max, quartiles, n) and, for those of this process, ``max_rel_error``.
    ``speedup[name]``: the pipeline against that column, paired round by round. ``explain``: coverage and modelled bytes.
    ``first_call``: seconds to trace, lower and compile (CPU). ``roofline``: the least seconds by the machine's model, and by what a
    library reaches on it (GPU).
    """
    functions = {column: COLUMNS[column](case.app.function) for column in column_names(platform)}
    errors = {column: max_relative_error(case, f) for column, f in functions.items()}
    thunks = _thunks(functions, case, ROTATED_BYTES if platform == "cuda" else 0)
    calls = calls_to_fill(thunks, FILL_SECONDS) if platform == "cuda" else 1
    question = peers.Question(case.app.name, "infer", case.params, (case.x,))
    with peers.peers(effort.peers, question) as others:
        errors |= {c: _sampled_error(case, peer.result()["result"]) for c, peer in others.items()}
        times = interleaved({**thunks, **others}, rounds=effort.rounds, seconds=effort.seconds, calls=calls)
    columns: dict[str, Any] = {c: {**summary(t), "max_rel_error": errors[c]} for c, t in times.items()}
    speedups: dict[str, Any] = {c: paired_speedup(t, times["pipeline"]) for c, t in times.items() if c != "pipeline"}
    report = kj.explain(case.app.function)(case.params, case.x)
    record: dict[str, Any] = {
        "flops": case.app.flops * case.rows,
        "columns": columns,
        "speedup": speedups,
        "explain": coverage_and_bytes(report),
    }
    if platform == "cuda":
        record |= {"calls": calls, "roofline": _roofline(case)}
    elif child:
        first = run_child(case.app.name, case.dtype, case.rows, effort, huge_pages=True)
        columns["jit_hugepages"], columns["pipeline_hugepages"] = first["columns"]["jit"], first["columns"]["pipeline"]
        speedups["jit_hugepages"] = first["speedup"]
        record["first_call"] = first["first_call"]
    return record


def measure_training(train: TrainCase, platform: str, effort: Effort, *, child: bool) -> dict[str, Any]:
    """``columns[name]``: seconds as in ``measure_inference``, and ``errors`` of the parts of the step (see ``step_errors``).
    ``speedup[name][other]``: the pipelined column ``name`` against another one. ``explain[name]``: coverage and modelled bytes.
    ``memory[name]``: ``temp_bytes`` as XLA counts them and, on a CPU, ``peak_bytes`` that the first call takes in a process of its
    own; also of "recompute", which is not timed.
    """
    case, network, args = train.case, train.case.app.function, (train.state, train.case.x, train.y)
    want = reference(train)
    names = train_column_names(platform)
    compiled = {c: step.lower(*args).compile() for c, step in ((c, TRAIN_STEPS[c](network)) for c in (*names, "recompute"))}
    memory = {c: {"temp_bytes": temp_bytes(step)} for c, step in compiled.items()}
    steps = {c: compiled[c] for c in names}
    errors = {c: step_errors(step(*args), want) for c, step in steps.items()}
    calls = {c: functools.partial(lambda step, x: step(train.state, x, train.y), step) for c, step in steps.items()}
    thunks = _rotating(calls, case.x, ROTATED_BYTES if platform == "cuda" else 0)
    repeats = calls_to_fill(thunks, FILL_SECONDS) if platform == "cuda" else 1
    question = peers.Question(case.app.name, "train", case.params, (case.x,), train.y)
    with peers.peers(effort.peers, question) as others:
        errors |= {
            c: peer_errors(peer, want[1], {k: m / (1 - BETA1) for k, m in want[0].mean.items()}) for c, peer in others.items()
        }
        timed: dict[str, Thunk] = {**thunks, **others}
        times = interleaved(timed, rounds=effort.rounds, seconds=effort.seconds, warmup=1, calls=repeats)
    if platform == "cpu" and child:
        for column, bytes_of in memory.items():
            bytes_of |= run_child(case.app.name, case.dtype, case.rows, effort, "--mode", "train", "--column", column)
    return {
        "calls": repeats,
        "columns": {c: {**summary(t), "errors": errors[c]} for c, t in times.items()},
        "speedup": {p: {c: paired_speedup(t, times[p]) for c, t in times.items() if c != p} for p in PIPELINED},
        "memory": memory,
        "explain": {column: coverage_and_bytes(report) for column, report in explained(train).items()},
    }


def _thunks(functions: dict[str, Any], case: Case, rotated_bytes: int = 0) -> dict[str, Callable[[], Any]]:
    """Calls of each column, on copies of the rows in turn that are ``rotated_bytes`` together."""
    return _rotating({c: functools.partial(f, case.params) for c, f in functions.items()}, case.x, rotated_bytes)


def _rotating(functions: Mapping[str, Callable[..., Any]], x: jax.Array, rotated_bytes: int) -> dict[str, Callable[[], Any]]:
    copies = [x, *(x + 0 for _ in range(rotated_bytes // x.nbytes))]

    def thunk(function: Callable[..., Any]) -> Callable[[], Any]:
        inputs = itertools.cycle(copies)
        return lambda: function(next(inputs))

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
    return _sampled_error(case, np.asarray(function(case.params, case.x)).astype(np.float64))


def _sampled_error(case: Case, result: np.ndarray) -> float:
    chosen = np.unique(np.linspace(0, case.rows - 1, min(SAMPLED_ROWS, case.rows)).astype(np.int64))
    got = result[chosen]
    params = {k: np.asarray(v).astype(np.float64) for k, v in case.params.items()}
    reference = case.app.reference(params, np.asarray(case.x)[chosen].astype(np.float64))
    return float(np.max(np.abs(got - reference) / np.maximum(np.abs(reference), np.sqrt(np.mean(reference**2)))))


def peer_errors(peer: Peer, loss: Any, grads: Mapping[str, Any]) -> dict[str, float]:
    """As ``step_errors``, of a library's loss and gradients, the worst array of these as "mean"."""
    found = peer.result()
    worst = max(relative_error(found[f"grad.{name}"], g) for name, g in grads.items())
    return {"loss": relative_error(found["loss"], np.float64(loss)), "mean": worst}


def coverage_and_bytes(report: kj.Report) -> dict[str, Any]:
    plain = report.to_dict()
    return {
        **{k: plain[k] for k in ("ops_total", "ops_pipelined", "coverage", "traffic_bulk_sync", "traffic_pipeline")},
        "regions": [{k: r[k] for k in ("arrangement", "tile_rows", "seconds", "baseline_seconds")} for r in plain["regions"]],
    }


def run_child(name: str, dtype: str, rows: int, effort: Effort, *options: str, huge_pages: bool = False) -> dict[str, Any]:
    """``child`` (``train_child`` with ``--mode train``) in a fresh process. Raises ``RuntimeError`` with its last words when it
    fails."""
    environment = dict(os.environ)
    if huge_pages:
        environment["GLIBC_TUNABLES"] = HUGE_PAGES
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "child.json"
        command = [sys.executable, "-m", "benchmarks", "child", "--app", name, "--dtype", dtype, "--rows", str(rows)]
        command += ["--rounds", str(effort.rounds), "--seconds", str(effort.seconds), "--output", str(path), *options]
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


def train_child(name: str, dtype: str, rows: int, column: str) -> dict[str, Any]:
    """What a fresh process measures of a training step: the memory its first call takes."""
    train = make_train_case(name, dtype, rows)
    args = (train.state, train.case.x, train.y)
    step = TRAIN_STEPS[column](train.case.app.function).lower(*args).compile()
    return {"peak_bytes": rise(lambda: step(*args))}


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

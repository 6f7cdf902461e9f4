"""A case in a process of its own: columns lowered and compiled beside other processes, then timed alone on the device.

Comes in: the name of a case. Goes out: milliseconds of each column (median of rounds of queued calls, all columns in turn), the
plan as the report tells it, the device's kernels by name for each column, and how far the columns are from ``jax.jit``'s result.
The column "tuned" is what a user gets: plans are timed when it is lowered.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import itertools
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kitsune_jax.frontend import lowering
from kitsune_jax.frontend.explain import jax_is_supported
from kitsune_jax.report.render import Report
from scripts.gpu.cases import TUNED, Built, build
from scripts.gpu.worker import Findings, failure, note_kernels, wait_for_turn

ROUNDS, SECONDS, FILL_S = 15, 2.0, 4e-3  # of timing; queued calls of the fastest column fill FILL_S
_FIRST_S, _TIMING_S, _TUNING_S = 25.0, 40.0, 60.0  # limits
_PROFILED_CALLS, _MOST_KERNELS = 3, 40
_NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}  # in a command buffer the profiler does not say which operator a kernel is of


def run(name: str, found: Findings, dry_run: bool, without_device: bool) -> None:
    jax_is_supported()  # it plans functions of its own
    kernels_since, reports = note_kernels(), _note_reports()
    began = time.monotonic()
    built = build(name, dry_run)
    found.content |= {"flops": built.flops, "columns": {key: dict(built.about.get(key, {})) for key in built.columns}}
    kernels_since()
    args, compiled, named = built.arguments[0], dict[str, Any](), dict[str, Any]()
    for key, column in built.columns.items():
        of = found.content["columns"][key]
        try:
            reports.clear()
            lowered, of["lower_s"] = _timed(functools.partial(_lower, column, args, without_device))
            of |= {"cubins": kernels_since(), **_plan(reports)}
            if not without_device:
                compiled[key], of["compile_s"] = _timed(lowered.compile)
                if of["regions"] and not dry_run:
                    with contextlib.suppress(Exception):
                        named[key] = lowered.compile(compiler_options=_NO_GRAPHS)
        except Exception as error:
            of |= failure(error)
        found.write()
    tuned = not dry_run and name.startswith(TUNED)
    if tuned:
        _plan_alternatives(built)  # what the timing of plans would else plan while the device waits
    found.content |= {"prepared_s": round(time.monotonic() - began, 1), "cubins": kernels_since()}
    if without_device:
        return
    wait_for_turn()
    _run_columns(found, built, compiled)
    _time(found, built, compiled)
    if tuned:
        _time_tuned(found, built, compiled)
    if not dry_run:
        for key, executable in compiled.items():
            with found.watch(f"profile of {key}", _TIMING_S):
                found.content["columns"][key]["kernels"] = profile(named.get(key, executable), built.arguments)
            found.write()


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.monotonic()
    return work(), round(time.monotonic() - began, 2)


def _lower(column: Callable[..., Any], args: Sequence[Any], without_device: bool, tune: str = "off") -> Any:
    os.environ["KITSUNE_TUNE"] = tune
    traced = jax.jit(column).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)) if without_device else traced.lower()


def _note_reports() -> list[Report]:
    """From now on the reports of pipelined functions, each when it is lowered."""
    reports, fastest, depth = list[Report](), lowering.fastest, [0]

    def noted(*args: Any) -> Any:
        depth[0] += 1
        try:
            made = fastest(*args)
        finally:
            depth[0] -= 1
        if not depth[0]:  # the bodies of loops are in the report of the whole
            reports.append(made.report)
        return made

    lowering.fastest = noted  # type: ignore[assignment]
    return reports


def _plan(reports: Sequence[Report]) -> dict[str, Any]:
    regions = [region for report in reports for region in report.regions]
    ops = sum(report.ops_total for report in reports)
    return {
        "coverage": sum(report.ops_pipelined for report in reports) / ops if ops else 0.0,
        "notes": [note for report in reports for note in report.notes],
        "regions": [
            {
                "name": r.name,
                "arrangement": r.arrangement,
                "bound": r.bound,
                "rows": r.rows,
                "traits": list(r.traits),
                "replicas": r.replicas,
                "workers": r.workers,
                "stages": [{"ops": s.ops, "us": s.microseconds, "workers": s.workers, "split": s.split} for s in r.stages],
                "seconds": r.seconds,
                "baseline": r.baseline_seconds,
            }
            for r in regions
        ],
    }


def _plan_alternatives(built: Built) -> None:
    """Fill the caches of plans and kernels with those that the timing of plans asks for."""
    from kitsune_jax import tuning
    from kitsune_jax.config import Options
    from kitsune_jax.frontend.route import RouteOptions

    program = jax.make_jaxpr(built.columns["jit"])(*built.arguments[0])
    for name in (tuning.OPTIMISTIC, tuning.FORCED):
        with contextlib.suppress(Exception):
            lowering.pipelined_jaxpr(program, lowering.options_of(name, RouteOptions.of(Options())), "cuda")


def _run_columns(found: Findings, built: Built, compiled: dict[str, Any]) -> None:
    """The first run of each column, and how far its result is from jit's."""
    outs = {}
    for key, executable in list(compiled.items()):
        of = found.content["columns"][key]
        with found.watch(f"first run of {key}", _FIRST_S):
            try:
                outs[key] = jax.block_until_ready(executable(*built.arguments[0]))
            except Exception as error:
                of |= failure(error)
                del compiled[key]
    for key, out in outs.items():
        if key != "jit" and "jit" in outs:
            found.content["columns"][key]["differs_from_jit"] = _difference(out, outs["jit"])
    found.write()


@jax.jit
def _differences(a: Any, b: Any) -> list[jax.Array]:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    wide = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in pairs if jnp.issubdtype(x.dtype, jnp.floating)]
    return [jnp.linalg.norm((x - y).ravel()) / jnp.maximum(jnp.linalg.norm(y.ravel()), 1e-30) for x, y in wide]


def _difference(got: Any, want: Any) -> float:
    """The norm of the difference over that of ``want``, of the worst array."""
    return max([float(x) for x in _differences(got, want)] or [0.0])


def _time(found: Findings, built: Built, compiled: dict[str, Any], rounds: int = ROUNDS, told: str = "") -> None:
    """``told``: the one column that is told of, beside others that were timed before; all by default."""
    from benchmarks.timing import calls_to_fill, interleaved, paired_speedup, summary

    thunks = {key: _thunk(executable, built.arguments) for key, executable in compiled.items()}
    with found.watch("timing", _TIMING_S):
        calls = calls_to_fill(thunks, FILL_S)
        times = interleaved(thunks, rounds=rounds, seconds=SECONDS, warmup=1, calls=calls)
    for key, of in times.items():
        if told not in ("", key):
            continue
        column = found.content["columns"][key]
        column |= {"ms": 1e3 * summary(of)["median"], "min_ms": 1e3 * min(of), "calls": calls}
        if "jit" in times:
            column["speedup"] = paired_speedup(times["jit"], of)["median"]
    found.write()


def _thunk(executable: Any, arguments: Sequence[tuple[Any, ...]]) -> Callable[[], Any]:
    turns = itertools.cycle(arguments)
    return lambda: executable(*next(turns))


def _time_tuned(found: Findings, built: Built, compiled: dict[str, Any]) -> None:
    """The pipeline with plans chosen by time, lowered now that the device is quiet, beside "jit"."""
    of = found.content["columns"]["tuned"] = {}
    with found.watch("tuning", _TUNING_S):
        try:
            reports = _note_reports()
            lowered, of["lower_s"] = _timed(functools.partial(_lower, built.columns["pipeline"], built.arguments[0], False, "on"))
            of |= _plan(reports)
            tuned = lowered.compile()
        except Exception as error:
            of |= failure(error)
            return
    _time(found, built, {"tuned": tuned, "jit": compiled["jit"]}, rounds=7, told="tuned")


# --- kernels by name --------------------------------------------------------------------------------------------------------------


def profile(executable: Any, arguments: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """The device's kernels in some calls: name, operator, number in a call, mean microseconds, launch; the largest sum first."""
    from jax.profiler import ProfileData

    scopes = _scopes(executable)
    run_ = _thunk(executable, arguments)
    jax.block_until_ready(run_())
    rows = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        with _trace(folder):
            for _ in range(_PROFILED_CALLS):
                jax.block_until_ready(run_())
        path = sorted(Path(folder).glob("**/*.xplane.pb"))[-1]
        for plane in ProfileData.from_file(str(path)).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                for event in line.events if "Stream" in line.name else ():
                    stats = dict(event.stats)
                    op = str(stats.get("hlo_op") or "")
                    details = str(stats.get("kernel_details") or "") if event.name.startswith("kitsune") else ""
                    rows[(event.name[:70], scopes.get(op, op)[-90:], details[:160])].append(event.duration_ns)
    found = [
        {"kernel": k, "op": op, "details": details, "calls": len(of) / _PROFILED_CALLS, "us": sum(of) / len(of) / 1e3}
        for (k, op, details), of in rows.items()
    ]
    return sorted(found, key=lambda r: -r["calls"] * r["us"])[:_MOST_KERNELS]


@contextlib.contextmanager
def _trace(folder: str) -> Iterator[None]:
    jax.profiler.start_trace(folder)
    try:
        yield
    finally:
        jax.profiler.stop_trace()


def _scopes(executable: Any) -> dict[str, str]:
    """Of our calls in the compiled program: the instruction's name -> the scope in which it was bound, which names the region."""
    found = re.findall(r'^\s*%?(\S+) = .*kitsune_cuda.*op_name="([^"]*)"', executable.as_text(), re.MULTILINE)
    return {name: f"{name}: {scope}" for name, scope in found}


def call_once(names: Sequence[str], found: Findings) -> None:
    """The pipeline of each case called once between the marks that ncu looks for."""
    driver = ctypes.CDLL("libcuda.so.1")
    for name in names:
        try:
            built = build(name)
            executable = _lower(built.columns["pipeline"], built.arguments[0], False).compile()
            jax.block_until_ready(executable(*built.arguments[0]))
            print(f"CASE {name}", flush=True)
            driver.cuProfilerStart()
            jax.block_until_ready(executable(*built.arguments[0]))
            driver.cuProfilerStop()
            found.content.setdefault("called", []).append(name)
        except Exception as error:
            print(f"FAILED {name}: {error}"[:300], flush=True)
        found.write()

"""One case of the grid, measured: ``jax.jit``, the planner's own choice, and every legal region forced into a pipeline.

Comes in: a ``GridCase``. Goes out: a JSON-serialisable record. Columns are compiled once and timed in one process, interleaved.
What need not be timed is not: where the choice leaves everything to XLA its program is that of ``jax.jit`` and its ratio 1 by
definition, and where choice and force make the same program it is timed once. A wrong result is a ``WrongResult``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import kitsune_jax as kj
from benchmarks import grid_verdict
from benchmarks.grid_cases import GridCase
from benchmarks.grid_functions import Problem, make_problem
from benchmarks.timing import summary
from kitsune_jax import _compat
from kitsune_jax.frontend import explain
from kitsune_jax.targets.cpu.call import TARGET_NAME

PIPELINED = ("choice", "forced")
_SAMPLE_SECONDS = 3e-4  # of one sample: calls that are shorter are timed several at a time
_MOST_CALLS = 64
_MOST_ROUNDS = 400
_AGAIN = 2  # times that a doubtful case is measured again, and its rounds added
_MOST_ERROR = 0.3  # of a result in 16 bits, where jax.jit's own is as far off
_REPORTED = ("name", "rows", "tile_rows", "tiles", "arrangement", "ops", "seconds", "baseline_seconds", "bound")

Thunk = Callable[[], Any]


class WrongResult(Exception):
    """A pipelined function's result is further from the right one than rounding explains."""


def measure(case: GridCase, seconds: float) -> dict[str, Any]:
    """``columns[name]``: seconds of a call (median, min, max, quartiles, n) of the columns that were timed. ``speedup[name]`` of
    "choice" and "forced": times as fast as ``jax.jit`` (see ``grid_verdict.ratio``). ``plan``: "none" (the choice leaves
    everything to XLA), "all" (what is forced) or "some". ``modelled[name]``: the planner's regions. ``errors[name]``: against
    ``jax.jit``, or where these two disagree, of all columns against float32. ``load``: processes that wanted to run in the last
    minute. ``seconds``: how long all this may take, about.

    Raises ``WrongResult``.
    """
    problem = make_problem(case)
    functions: dict[str, Callable[..., Any]] = {c: kj.pipeline(problem.function, force=c == "forced") for c in PIPELINED}
    lowered = {c: jax.jit(f).lower(*problem.args) for c, f in {"jit": problem.function, **functions}.items()}
    texts = {c: text.as_text() for c, text in lowered.items()}
    same_as = _same_as(texts)
    compiled = {c: lowered[c].compile() for c in lowered if same_as[c] == c}
    errors = _errors(problem, compiled)
    times = _times({c: lambda run=run: run(*problem.args) for c, run in compiled.items()}, seconds)  # type: ignore[misc]
    return {
        "plan": "none" if same_as["choice"] == "jit" else "all" if same_as["forced"] == "choice" else "some",
        "columns": {c: summary(t) for c, t in times.items()},
        "speedup": _speedups(times, same_as),
        "modelled": {c: modelled(f, problem.args) for c, f in functions.items()},
        "errors": errors,
        "load": os.getloadavg()[0],
    }


def modelled(pipelined: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """What the planner says of ``pipelined``: its machine and, where it has one, measured profile; its regions; and the sums of
    their seconds, as pipelines and bulk-synchronously."""
    closed = _compat.hoist_consts(jax.make_jaxpr(pipelined.__wrapped__)(*args))[0]
    plain = explain.explain_jaxpr(_compat.without_dead_code(closed), pipelined.resolved(), "cpu", None).to_dict()
    regions = [{key: region[key] for key in _REPORTED} for region in plain["regions"]]
    return {
        "machine": plain["machine"],
        "profile": plain.get("profile"),
        "ops_pipelined": plain["ops_pipelined"],
        "ops_total": plain["ops_total"],
        "seconds": sum(r["seconds"] for r in regions),
        "baseline_seconds": sum(r["baseline_seconds"] for r in regions),
        "regions": regions,
    }


def _same_as(texts: Mapping[str, str]) -> dict[str, str]:
    """For every column the first one that runs the same program."""
    same = {"jit": "jit"}
    for column in PIPELINED:
        if TARGET_NAME not in texts[column]:
            same[column] = "jit"
        else:
            same[column] = next((c for c in PIPELINED if texts[c] == texts[column]), column)
    return same


def _errors(problem: Problem, compiled: Mapping[str, Any]) -> dict[str, float]:
    want = jax.block_until_ready(compiled["jit"](*problem.args))
    results = {c: run(*problem.args) for c, run in compiled.items() if c != "jit"}
    errors = {c: problem.error(got, want) for c, got in results.items()}
    if max(errors.values(), default=0.0) <= problem.tolerance:
        return errors
    # Which of the two is wrong? XLA is no oracle, and a gradient in 16 bits may be far off in both.
    right = jax.jit(problem.function)(*jax.tree.map(_widened, problem.args))
    errors = {c: problem.error(got, right) for c, got in {"jit": want, **results}.items()}
    allowed = max(problem.tolerance, min(1.5 * errors["jit"], _MOST_ERROR))
    for column in results:
        if not errors[column] <= allowed:
            raise WrongResult(f"{column} is {errors[column]:.2g} away from float32 arithmetic, jax.jit is {errors['jit']:.2g}")
    return errors


def _widened(a: jax.Array) -> jax.Array:
    return a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a


def _speedups(times: Mapping[str, list[float]], same_as: Mapping[str, str]) -> dict[str, dict[str, float | int]]:
    def of(column: str) -> dict[str, float | int]:
        timed = same_as[column]
        return grid_verdict.by_definition() if timed == "jit" else grid_verdict.ratio(times["jit"], times[timed])

    return {column: of(column) for column in PIPELINED}


def _times(thunks: Mapping[str, Thunk], seconds: float) -> dict[str, list[float]]:
    """Seconds of a call, round by round. Rounds go on until every ratio is settled or the time is up, and for a doubtful case twice
    as long again."""
    if len(thunks) == 1:
        return {}
    calls = _calls_for(thunks)
    times: dict[str, list[float]] = {name: [] for name in thunks}
    for turn in range(1 + _AGAIN):
        start, first = time.perf_counter(), len(times["jit"])
        while len(times["jit"]) < first + _MOST_ROUNDS:
            _round(thunks, times, calls)
            found = {c: grid_verdict.ratio(times["jit"], t) for c, t in times.items() if c != "jit"}
            rounds = len(times["jit"]) - first
            if rounds >= 3 and time.perf_counter() - start > seconds:
                break
            if not turn and all(map(grid_verdict.settled, found.values())):
                break
        if not grid_verdict.doubtful(found):
            break
    return times


def _round(thunks: Mapping[str, Thunk], times: dict[str, list[float]], calls: int) -> None:
    """Every thunk once, each round starting with another one. A call is timed behind one of the same thunk, as in
    ``benchmarks.timing``."""
    names = list(thunks)
    shift = len(times[names[0]]) % len(names)
    for name in names[shift:] + names[:shift]:
        if calls == 1:
            _seconds(thunks[name], 1)
        times[name].append(_seconds(thunks[name], calls))


def _calls_for(thunks: Mapping[str, Thunk]) -> int:
    """Calls of one sample: as many as the fastest thunk makes in ``_SAMPLE_SECONDS``. Every thunk has run before it is timed."""
    for thunk in thunks.values():
        _seconds(thunk, 1)
    fastest = min(_seconds(thunk, 1) for thunk in thunks.values())
    return max(1, min(_MOST_CALLS, int(-(-_SAMPLE_SECONDS // fastest))))


def _seconds(thunk: Thunk, calls: int) -> float:
    """Of one call, its result waited for: what is thrown away is thrown away before the next call asks for memory."""
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(thunk())
    return (time.perf_counter() - start) / calls

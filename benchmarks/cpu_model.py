"""The planner's model of this CPU beside what its pipelines take: ``python -m benchmarks model --device cpu``.

Comes in: the machine's profile. Goes out: for 24 programs, all of whose operators are forced into pipelines, the modelled time of
the plan, the least time of some calls, and their ratio. The time of operators that have no pipeline is in the measurement only.
Last comes the part of the recorded programs whose measured gain is in the band that reports call likely.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kitsune_jax as kj
from benchmarks.apps import make_case
from benchmarks.graphs.apps import GRAPH_APPS, case_of
from benchmarks.sequences.apps import SEQUENCE_APPS
from benchmarks.training import make_train_case, train_step
from kitsune_jax.targets.cpu.planning.machines import GAIN_BAND

NEAR, FAR = 1.35, 2.0  # times too short or too long
_ROWS = {"nerf": 8_192, "mgn": 65_536, "swiglu": 4_096}
_OTHERS = {"gat": 100_000, "dlrm": 4_096, "attention": 1_024, "transformer_layer": 512, "lstm_64": 256}
_FLOAT32 = {"cartpole": 16_384, "pendulum": 16_384}
# The records that the band was taken from.
RECORDS = [
    Path(__file__).parent / "results" / f"grid-{name}.json"
    for name in ("amd-epyc-2c-2026-11-29", "intel-xeon-2c-amx-2026-11-27", "intel-xeon-2c-amx-2026-11-28")
]
_LEAST_JIT, _LEAST_COVERED = 1e-3, 0.9  # seconds; part of the operators
_SECONDS, _LEAST_CALLS = 0.5, 5  # of timing


def programs() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Name, function, arguments."""
    for dtype in ("f32", "bf16"):
        for app, rows in _ROWS.items():
            case = make_case(app, dtype, rows)
            yield f"{app} {dtype} {rows}", case.app.function, (case.params, case.x)
            of = make_train_case(app, dtype, rows)
            yield f"{app} {dtype} {rows}, training step", train_step(of.case.app.function), (of.state, of.case.x, of.y)
        for app, rows in (_OTHERS | _FLOAT32 if dtype == "f32" else _OTHERS).items():
            graph = case_of({**GRAPH_APPS, **SEQUENCE_APPS}[app], dtype, rows)
            yield f"{app} {dtype} {rows}", graph.function, (graph.params, *graph.inputs)


def compare(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[float, float]:
    """Modelled and measured seconds of ``function`` as pipelines."""
    pipelined = kj.pipeline(function, force=True)
    modelled = kj.explain(pipelined, platform="cpu")(*args).seconds
    executable = jax.jit(pipelined).lower(*args).compile()
    found, end = list[float](), time.monotonic() + _SECONDS
    while time.monotonic() < end or len(found) < _LEAST_CALLS:
        before = time.perf_counter()
        jax.block_until_ready(executable(*args))
        found.append(time.perf_counter() - before)
    return modelled, min(found)


def recorded_gains(records: Iterable[Path]) -> list[float]:
    """The measured gain over the modelled one, of each program in ``records`` of ``benchmarks.grid`` that takes ``jax.jit`` more
    than 1 ms, and nine tenths of whose operators are pipelined at least: the model does not time the others."""
    found = []
    for path in records:
        for case in json.loads(path.read_text())["cases"]:
            plan, gain = case["modelled"].get("choice"), case["speedup"].get("choice")
            if not plan or not gain or not plan["seconds"] or case["columns"]["jit"]["median"] <= _LEAST_JIT:
                continue
            if plan["ops_pipelined"] >= _LEAST_COVERED * plan["ops_total"]:
                found.append(gain["median"] * plan["seconds"] / plan["baseline_seconds"])
    return found


def in_band(gains: Sequence[float]) -> float:
    """The part of ``gains`` in ``GAIN_BAND``."""
    return sum(GAIN_BAND[0] <= gain <= GAIN_BAND[1] for gain in gains) / len(gains)


def run(match: Callable[[str], Any]) -> int:
    """Prints a line for each program whose name ``match`` accepts."""
    os.environ["KITSUNE_TUNE"] = "off"
    ratios = []
    print(f"{'modelled':>10} {'measured':>10} {'ratio':>6}  program")
    for name, function, args in programs():
        if match(name):
            modelled, measured = compare(function, args)
            ratios.append(modelled / measured)
            print(f"{modelled * 1e3:7.3f} ms {measured * 1e3:7.3f} ms {ratios[-1]:6.2f}  {name}", flush=True)
    off = np.exp(np.abs(np.log(ratios)))
    gains = recorded_gains(RECORDS)
    band = f"{GAIN_BAND[0]} to {GAIN_BAND[1]} times the modelled one"
    print(f"{len(gains)} recorded programs: the measured gain of {100 * in_band(gains):.0f} % is {band}")
    print(f"{(off <= NEAR).sum()} of {len(ratios)} within {NEAR}x, {(off <= FAR).sum()} within {FAR:g}x")
    return 0

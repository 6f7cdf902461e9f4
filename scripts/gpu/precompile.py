"""Compiles every kernel of the check into the cache on disk, in parallel: host work, which would else be done while a device waits.

Comes in: the list of programs; for ``--prepare`` what the driver of the device says of it. Goes out: a full cache, and per program
how long it took and which entries of the cache it needs; a kernel that does not compile is a finding.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kitsune_jax import cache
from kitsune_jax.targets.cuda import compile, nvrtc, runtime
from scripts.gpu.goals import GOALS, GRAPH_GOALS
from scripts.gpu.programs import Program, programs, smoke_programs
from scripts.gpu.record import Record, arguments

Job = tuple[str, Callable[[], dict[str, Any]]]
_SECONDS = 3600.0  # the driver of the check has its own, shorter limit
_asked: set[str] = set()


def kernels_of(program: Program) -> dict[str, Any]:
    program.compile_kernel()
    return {}


def micro_kernels() -> dict[str, Any]:
    from benchmarks.micro import suite
    from scripts.gpu.soak import rings_of

    device: Any = _Device(nvrtc.sm_of(runtime.arch()))
    for source in (*suite.sources(device, quick=False), *(ring.source for ring in rings_of(device))):
        compile.cubin(source, runtime.arch())
    return {}


@dataclasses.dataclass(frozen=True)
class _Device:
    """What the sources of microbenchmarks ask of a backend."""

    sm: int
    emulated: bool = False


def benchmark_kernels(app: str, dtype: str, rows: int) -> dict[str, Any]:
    import jax

    import kitsune_jax as kj
    from benchmarks.apps import make_case
    from benchmarks.graphs.apps import GRAPH_APPS, case_of
    from benchmarks.sequences.apps import SEQUENCE_APPS

    if app in GOALS:
        graph = case_of({**GRAPH_APPS, **SEQUENCE_APPS}[app], dtype, rows)
        function, args = graph.function, (graph.params, *graph.inputs)
    else:
        case = make_case(app, dtype, 8)
        function, args = case.app.function, (case.params, jax.ShapeDtypeStruct((rows, case.app.width), case.x.dtype))
    lowered = jax.jit(kj.pipeline(function)).trace(*args).lower(lowering_platforms=("cuda",))
    return {"regions": lowered.as_text().count("@kitsune_cuda")}


def training_kernels(app: str, rows: int) -> dict[str, Any]:
    from scripts.gpu.training import compile_step

    regions = compile_step(app, rows)
    return {"regions": regions, **({} if regions else {"error": "the step has no kernel"})}


def graph_training_kernels(app: str, dtype: str, rows: int) -> dict[str, Any]:
    import jax
    import numpy as np

    import kitsune_jax as kj
    from benchmarks.graphs.apps import GRAPH_APPS, case_of
    from benchmarks.graphs.measure import train_step
    from benchmarks.training import initial_state

    case = case_of(GRAPH_APPS[app], dtype, rows)
    args = (initial_state(case.params, np.random.default_rng(1)), case.inputs, case.targets)
    steps = (train_step(case, kj.pipeline(case.function)), kj.pipeline(train_step(case, case.function)))
    texts = [jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",)).as_text() for step in steps]
    return {"regions": sum(text.count("@kitsune_cuda") for text in texts)}


def jobs(dry_run: bool, only: str) -> list[Job]:
    """The largest kernels first, so that none is left alone at the end."""
    found: list[Job] = []
    if not dry_run and not only:
        from scripts.gpu.benchmarks import runs
        from scripts.gpu.training import CASES

        found += [(f"training step {app} {rows}", functools.partial(training_kernels, app, rows)) for app, rows in CASES]
        found += [
            (f"benchmark of training {app} {dtype} {rows}", functools.partial(graph_training_kernels, app, dtype, rows))
            for app, dtype, rows in runs(train=True, dry_run=False)
            if app in GRAPH_GOALS
        ]
        found += [
            (f"benchmark {app} {dtype} {rows}", functools.partial(benchmark_kernels, app, dtype, rows))
            for app, dtype, rows in reversed(runs(train=False, dry_run=False))
        ]
        from scripts.gpu.attention import SIZES, compile_size

        found += [(size.name, functools.partial(compile_size, size)) for size in SIZES]
        from scripts.gpu import decoding

        found += [(size.name, functools.partial(decoding.compile_size, size)) for size in decoding.SIZES]
        found.append(("microbenchmarks", micro_kernels))
    chosen = programs(dry_run, "planned" if dry_run else only)
    if not dry_run:
        sm = "sm90" if nvrtc.sm_of(runtime.arch()) == 900 else "sm80"  # a process compiles for one architecture
        chosen += [p for p in smoke_programs(dry_run) if p.kind.startswith(sm) and only in p.name]
    named = {program.name: program for program in chosen}
    return found + [(name, functools.partial(kernels_of, program)) for name, program in named.items()]


def do(name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    start = time.monotonic()
    _asked.clear()
    try:
        found = work()
    except Exception as e:  # the others must still compile
        found = {"error": f"{type(e).__name__}: {e}"}
    return {
        "name": name,
        "ok": "error" not in found,
        "seconds": round(time.monotonic() - start, 1),
        **found,
        "entries": sorted(_asked),
    }


def as_on(driver: dict[str, Any] | None) -> None:
    """In this process kernels are made for the devices that ``driver`` tells of, and what is asked of the cache is noted."""
    if driver is not None:
        runtime.driver_info = lambda: driver  # type: ignore[assignment]
    get = cache.Cache.get

    def noted(self: cache.Cache, key: str, suffix: str, make: Callable[[], bytes]) -> bytes:
        _asked.add(key + suffix)
        return get(self, key, suffix, make)

    cache.Cache.get = noted  # type: ignore[method-assign]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default="", help="programs whose name holds this")
    parser.add_argument("--driver", type=Path, help="JSON: plan for these devices (runtime.driver_info()) instead of those here")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    args = parser.parse_args()
    record = Record("precompile", args.output, jax_devices=False, patience=args.patience)
    driver = json.loads(args.driver.read_text()) if args.driver else None
    with record.case("all of them", _SECONDS):
        as_on(driver)
        todo = [(name, work) for name, work in jobs(args.dry_run, args.only) if record.wants(name)]
        record.content["expected"] = len(record.content["findings"]) + len(todo)
        if driver is not None:
            from scripts.gpu.environment import surroundings

            record.content["surroundings"] = surroundings()
        workers = 1 if args.dry_run else args.workers
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(workers, context, initializer=as_on, initargs=(driver,)) as pool:
            for job in concurrent.futures.as_completed([pool.submit(do, name, work) for name, work in todo]):
                error = job.exception()
                record.tell(job.result() if error is None else {"name": "a worker", "ok": False, "error": str(error)})
    return record.finish()


if __name__ == "__main__":
    raise SystemExit(main())

"""Compiles every kernel of the check into the cache on disk, in parallel: host work, which would else be done while a device waits.

Comes in: the list of programs. Goes out: a full cache, and how long each took; a kernel that does not compile is a finding.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
from typing import Any

from benchmarks import store
from scripts.gpu.programs import Program, programs
from scripts.gpu.record import Record, arguments


def compile_one(program: Program) -> dict[str, Any]:
    start = time.monotonic()
    error = ""
    try:
        program.compile_kernel()
    except Exception as e:  # the others must still compile
        error = f"{type(e).__name__}: {e}"
    return {
        "name": program.name,
        "ok": not error,
        "seconds": round(time.monotonic() - start, 1),
        **({"error": error} if error else {}),
    }


def compile_benchmark(app: str, dtype: str, rows: int) -> dict[str, Any]:
    import jax

    import kitsune_jax as kj
    from benchmarks.apps import make_case

    start = time.monotonic()
    case = make_case(app, dtype, 8)
    x = jax.ShapeDtypeStruct((rows, case.app.width), case.x.dtype)
    lowered = jax.jit(kj.pipeline(case.app.function)).trace(case.params, x).lower(lowering_platforms=("cuda",))
    regions = lowered.as_text().count("@kitsune_cuda")
    return {
        "name": f"benchmark {app} {dtype} {rows}",
        "ok": True,
        "regions": regions,
        "seconds": round(time.monotonic() - start, 1),
    }


def compile_training(app: str, rows: int) -> dict[str, Any]:
    from scripts.gpu.training import compile_step

    start = time.monotonic()
    regions = compile_step(app, rows)
    return {
        "name": f"training step {app} {rows}",
        "ok": regions > 0,
        "regions": regions,
        "seconds": round(time.monotonic() - start, 1),
        **({} if regions else {"error": "the step has no kernel"}),
    }


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default="", help="programs whose name holds this")
    args = parser.parse_args()
    record = Record("precompile", args.output)
    chosen = programs(args.dry_run, args.only)
    workers = 1 if args.dry_run else max(1, min(14, (os.cpu_count() or 2) - 2))
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = []
        if not args.dry_run and not args.only:  # the largest kernels: first, so that none is left alone at the end
            from benchmarks.apps import APPS
            from scripts.gpu.training import CASES

            jobs += [pool.submit(compile_training, app, rows) for app, rows in CASES]
            jobs += [
                pool.submit(compile_benchmark, app, dtype, rows)
                for app in reversed(store.APP_NAMES)
                for dtype in store.DTYPE_NAMES
                for rows in APPS[app].default_rows("cuda")
            ]
        jobs += [pool.submit(compile_one, program) for program in chosen]
        for job in concurrent.futures.as_completed(jobs):
            error = job.exception()
            record.add(job.result() if error is None else {"name": "a worker", "ok": False, "error": str(error)})
    return record.finish()


if __name__ == "__main__":
    raise SystemExit(main())

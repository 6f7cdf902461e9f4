"""Every program once, on fresh data, against float64 on the host and beside ``jax.jit`` on the same device.

Comes in: the list of programs. Goes out: errors, and whether two runs gave equal bits. The pipeline runs before ``jax.jit`` and
each program on data of its own, so that no freed buffer can hold the answer already.
"""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import traceback
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.gpu.programs import Program, few, programs
from scripts.gpu.record import Record, arguments

# Of the norm of the difference to that of the reference, over all and for the worst row. A result in 16 bits is rounded once more
# than its sums: 2^-8 for bfloat16, 2^-11 for float16; tf32 operands have 11 bits. Deeper chains add up, and are held against
# jax.jit below.
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-3}
WORST_ROW = 5.0  # times as much as that over all: rows differ, and a row that is wrong is off by all of it
WORSE = 2.0  # than jax.jit, at most, where both are beyond the tolerance


def reference(program: Program, args: tuple[Any, ...]) -> list[np.ndarray]:
    """In float64 on the CPU; where the function itself asks for float32, in that."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [np.asarray(a).astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else np.asarray(a) for a in args]
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(program.family.function)(*wide))]


def difference(got: Any, wanted: np.ndarray) -> tuple[float, float]:
    """The norm of the difference over that of the reference: of all, and of the worst row (whose reference counts as no smaller
    than the usual row's). Infinite where a shape, a NaN or an infinity is not the reference's."""
    have = np.asarray(got).astype(np.float64)
    if have.shape != wanted.shape or not np.array_equal(np.isfinite(have), np.isfinite(wanted)):
        return math.inf, math.inf
    norm = float(np.linalg.norm(wanted)) or 1.0
    whole = float(np.linalg.norm(have - wanted)) / norm
    if wanted.ndim < 2:
        return whole, whole
    usual = norm / math.sqrt(wanted.shape[0])
    rows = np.linalg.norm((have - wanted).reshape(wanted.shape[0], -1), axis=1)
    sizes = np.linalg.norm(wanted.reshape(wanted.shape[0], -1), axis=1)
    return whole, float((rows / np.maximum(sizes, usual)).max())


def is_near(error: tuple[float, float], of_jit: tuple[float, float], tolerance: float) -> bool:
    whole, row = error
    return whole <= max(tolerance, WORSE * of_jit[0]) and row <= max(WORST_ROW * tolerance, WORSE * of_jit[1])


def check(program: Program, seed: int) -> dict[str, Any]:
    args = program.arguments(seed)
    outs = [np.asarray(x) for x in jax.tree.leaves(program.function(*args))]
    again = [np.asarray(x) for x in jax.tree.leaves(program.function(*args))]
    plain = jax.tree.leaves(jax.jit(program.family.function)(*args))
    wanted = reference(program, args)
    errors = [difference(x, w) for x, w in zip(outs, wanted, strict=True)]
    jit_errors = [difference(x, w) for x, w in zip(plain, wanted, strict=True)]
    near = all(is_near(e, j, TOLERANCE[program.dtype]) for e, j in zip(errors, jit_errors, strict=True))
    equal = all(a.tobytes() == b.tobytes() for a, b in zip(outs, again, strict=True))
    return {"ok": near and equal, "errors": errors, "jit_errors": jit_errors, "equal_bits": equal}


_lost = ""  # what ended this process's context: nothing can run after it


def finding_of(program: Program, seed: int) -> dict[str, Any]:
    """``check``, whose exception is a finding too: one that fails must not hide the others."""
    global _lost
    if _lost:
        return {"name": program.name, "ok": False, "error": f"not run: the device's context was lost in {_lost}"}
    try:
        return {"name": program.name, **check(program, seed)}
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        _lost = program.name if "CUDA_ERROR" in text else ""
        return {"name": program.name, "ok": False, "error": text, "traceback": traceback.format_exc(limit=-3)}


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default="", help="programs whose name holds this")
    parser.add_argument("--few", action="store_true", help="a small choice, in this process: for tools that slow a device down")
    parser.add_argument("--processes", type=int, default=4, help="that share the device: XLA's compiler is what takes the time")
    args = parser.parse_args()
    alone = args.few or args.dry_run
    record = Record("correctness", args.output, jax_devices=alone)
    chosen = programs(args.dry_run, args.only)
    chosen = few(chosen) if args.few else chosen
    record.content["expected"] = len(chosen)
    if alone:
        found = (finding_of(program, seed) for seed, program in enumerate(chosen))
        return _tell(record, found)
    with concurrent.futures.ProcessPoolExecutor(args.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(finding_of, program, seed) for seed, program in enumerate(chosen)]
        return _tell(record, (_result(job) for job in concurrent.futures.as_completed(jobs)))


def _result(job: concurrent.futures.Future[dict[str, Any]]) -> dict[str, Any]:
    error = job.exception()
    return job.result() if error is None else {"name": "a worker", "ok": False, "error": f"{type(error).__name__}: {error}"}


def _tell(record: Record, found: Iterable[dict[str, Any]]) -> int:
    for finding in found:
        record.tell(finding)
    return record.finish()


if __name__ == "__main__":
    raise SystemExit(main())

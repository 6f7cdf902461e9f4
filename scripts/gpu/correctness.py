"""Every program once, on fresh data, against float64 on the host and beside ``jax.jit`` on the same device.

Comes in: the list of programs. Goes out: errors, and whether two runs gave equal bits. The pipeline runs before ``jax.jit`` and
each program on data of its own, so that no freed buffer can hold the answer already.
"""

from __future__ import annotations

import math
import traceback
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kitsune_jax.targets.cuda import runtime
from scripts.gpu.programs import Program, few, programs
from scripts.gpu.record import Record, arguments
from scripts.gpu.results import LOST

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
    before = runtime.calls()
    outs = [np.asarray(x) for x in jax.tree.leaves(program.function(*args))]
    kernels = runtime.calls() - before
    again = [np.asarray(x) for x in jax.tree.leaves(program.function(*args))]
    plain = jax.tree.leaves(jax.jit(program.family.function)(*args))
    wanted = reference(program, args)
    errors = [difference(x, w) for x, w in zip(outs, wanted, strict=True)]
    jit_errors = [difference(x, w) for x, w in zip(plain, wanted, strict=True)]
    near = all(is_near(e, j, TOLERANCE[program.dtype]) for e, j in zip(errors, jit_errors, strict=True))
    equal = all(a.tobytes() == b.tobytes() for a, b in zip(outs, again, strict=True))
    right = near and kernels > 0 and (equal or not program.family.deterministic)
    return {"ok": right, "errors": errors, "jit_errors": jit_errors, "equal_bits": equal, "kernels": kernels}


def finding_of(program: Program, seed: int) -> dict[str, Any]:
    """``check``, whose exception is a finding too: one that fails must not hide the others."""
    try:
        return {"name": program.name, **check(program, seed)}
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return {"name": program.name, "ok": False, "error": text, "traceback": traceback.format_exc(limit=-3)}


def context_is_lost(finding: dict[str, Any]) -> bool:
    """After such an error nothing can run in this process."""
    return "CUDA_ERROR" in finding.get("error", "")


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--step", default="correctness", help="what the record is called")
    parser.add_argument("--only", default="", help="programs whose name holds this")
    parser.add_argument("--few", action="store_true", help="a small choice: for tools that slow a device down")
    parser.add_argument("--shard", default="0/1", help="K/N: the K-th of N processes that share the programs and the device")
    parser.add_argument("--case-seconds", type=float, default=30.0, help="for one program: XLA compiles it twice")
    args = parser.parse_args()
    shard, shards = map(int, args.shard.split("/"))
    record = Record(args.step, args.output, jax_devices=shards == 1, patience=args.patience)
    chosen = programs(args.dry_run, args.only)
    chosen = few(chosen) if args.few else chosen
    mine = [p for p in chosen if zlib.crc32(p.name.encode()) % shards == shard]  # whichever kinds are ruled out meanwhile
    record.content["expected"] = len(mine)
    for seed, program in enumerate(mine):
        if not record.wants(program.name):
            continue
        with record.case(program.name, args.case_seconds, program.kind):
            found = finding_of(program, seed)
        record.tell({**found, "kind": program.kind})
        if context_is_lost(found):
            return LOST
    return record.finish()


if __name__ == "__main__":
    raise SystemExit(main())

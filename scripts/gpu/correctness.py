"""The programs of a family, each once on fresh data, against float64 on the host.

Comes in: a family, planned or under forced arrangements. Goes out: errors, whether a second run gave equal bits, and the kernels by
their entries in the cache. The pipeline runs before ``jax.jit`` and each program on data of its own, so that no freed buffer can
hold the answer already.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kitsune_jax.targets.cuda import runtime
from scripts.gpu.programs import Program, programs
from scripts.gpu.worker import Findings, failure, note_kernels

# Of the norm of the difference to that of the reference, over all and for the worst row. A result in 16 bits is rounded once more
# than its sums: 2^-8 for bfloat16, 2^-11 for float16; tf32 operands have 11 bits. Deeper chains add up, and are held against
# jax.jit below.
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 2e-3}
WORST_ROW = 5.0  # times as much as that over all: rows differ, and a row that is wrong is off by all of it
WORSE = 2.0  # than jax.jit, at most, where both are beyond the tolerance
LIMIT_S = 20.0  # of two runs of a program: one that hangs costs this much


def reference(program: Program, args: tuple[Any, ...]) -> list[np.ndarray]:
    """In float64 on the CPU; where the function itself asks for float32, in that."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [np.asarray(a).astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else np.asarray(a) for a in args]
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(program.family.function)(*wide))]


def difference(got: Any, wanted: np.ndarray) -> tuple[float, float]:
    """The norm of the difference over that of the reference: of all, and of the worst row (whose reference counts as no smaller
    than the usual row's). Infinite where a shape, a NaN or an infinity is not the reference's; equal ones differ by nothing."""
    have = np.asarray(got).astype(np.float64)
    if have.shape != wanted.shape:
        return math.inf, math.inf
    finite = np.isfinite(wanted)
    if not np.array_equal(have[~finite], wanted[~finite], equal_nan=True) or not np.isfinite(have[finite]).all():
        return math.inf, math.inf
    have, wanted = np.where(finite, have, 0.0), np.where(finite, wanted, 0.0)
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


def check(program: Program, seed: int, found: Findings) -> dict[str, Any]:
    """The finding of one program. What ``jax.jit`` errs is asked where the pipeline is beyond the tolerance."""
    args = jax.block_until_ready(program.arguments(seed))
    executable = program.function.lower(*args).compile()
    before = runtime.calls()
    began = time.monotonic()
    with found.watch(program.name, 10 * LIMIT_S if program.target == "emulator" else LIMIT_S):
        outs = [np.asarray(x) for x in jax.tree.leaves(executable(*args))]
        again = [np.asarray(x) for x in jax.tree.leaves(executable(*args))]
    seconds = time.monotonic() - began
    kernels = runtime.calls() - before
    wanted = reference(program, args)
    errors = [difference(x, w) for x, w in zip(outs, wanted, strict=True)]
    equal = all(a.tobytes() == b.tobytes() for a, b in zip(outs, again, strict=True))
    one: dict[str, Any] = {"errors": errors, "equal_bits": equal, "kernels": kernels, "seconds": round(seconds, 3)}
    tolerance = TOLERANCE[program.dtype]
    near = all(is_near(e, (0.0, 0.0), tolerance) for e in errors)
    if not near:
        plain = jax.tree.leaves(jax.jit(program.family.function)(*args))
        one["jit_errors"] = [difference(x, w) for x, w in zip(plain, wanted, strict=True)]
        near = all(is_near(e, j, tolerance) for e, j in zip(errors, one["jit_errors"], strict=True))
    return {"ok": near and kernels > 0 and (equal or not program.family.deterministic), **one}


def right_before(measured: Mapping[str, Any]) -> dict[str, list[str]]:
    """The programs that were right in an earlier check, with their kernels."""
    found = measured.get("correctness", {})
    return {name: one["cubins"] for name, one in found.items() if one["ok"] and one.get("cubins")}


def run(name: str, found: Findings, skip: set[str], dry_run: bool, without_device: bool, before: Mapping[str, list[str]]) -> None:
    """``name``: "FAMILY planned|forced K/N". A process that died in a program is started again with its name in ``skip``. A program
    with the same kernels ``before`` does not run again."""
    family, kinds, part = name.split()
    k, n = map(int, part.split("/"))
    kernels_since = note_kernels()
    chosen = [p for i, p in enumerate(programs(kinds, family, dry_run)) if i % n == k]
    found.content |= {"findings": [], "expected": len(chosen)}
    kernels_since()  # trials of plans
    for seed, program in enumerate(chosen):
        if program.name in skip:
            continue
        kernels, known = list[str](), before.get(program.name)
        try:
            if without_device or known:
                program.compile_kernel()
                kernels = kernels_since()
            if without_device:
                one: dict[str, Any] = {"ok": True}
            elif known and sorted(known) == sorted(kernels):
                one = {"ok": True, "unchanged": True}
            else:
                one = check(program, seed, found)
        except Exception as error:
            one = {"ok": False, **failure(error)}
        kernels = list(dict.fromkeys((*kernels, *kernels_since())))
        found.content["findings"].append({"name": program.name, "kind": program.kind, **one, "cubins": kernels})
        found.write()
        if "CUDA_ERROR" in one.get("error", ""):  # after that nothing can run in this process
            raise RuntimeError(one["error"])

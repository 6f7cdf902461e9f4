"""Whole training steps of the applications at full size, against float64 on the host and beside ``jax.jit`` on the same device.

Comes in: applications, rows. Goes out: per application the errors of loss, gradients (as Adam's first moment), second moments and
parameters; whether two runs gave equal bits; how many kernels there were. The step is that of ``benchmarks.training``, all of it
pipelined and forced, so that the planner's doubts leave nothing out. The pipeline runs before ``jax.jit``: no freed buffer can
hold the answer already.
"""

from __future__ import annotations

import traceback
from typing import Any

import jax
import numpy as np

import kitsune_jax as kj
from benchmarks.training import TRAIN_STEPS, TrainCase, make_train_case, reference, step_errors, train_step
from scripts.gpu.correctness import TOLERANCE, WORSE, context_is_lost
from scripts.gpu.record import Record, arguments
from scripts.gpu.results import LOST

DTYPE = "bf16"
CASE_SECONDS = 60.0  # XLA compiles two steps of Adam, and the host computes one in float64
CASES = (("nerf", 262_144), ("mgn", 200_000), ("swiglu", 65_536))
_DRY_CASES = (("mgn", 65),)  # a full tile, and one with one row


def forced_step(case: TrainCase, target: str | None = None) -> Any:
    return jax.jit(kj.pipeline(train_step(case.case.app.function), force=True, target=target))


def compile_step(app: str, rows: int) -> int:
    """Puts the kernels of the step into the cache on disk, and of the steps that ``benchmarks`` times. Needs no device. Returns how
    many of them the forced step has."""
    small = make_train_case(app, DTYPE, 8)
    x, y = (jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype) for a in (small.case.x, small.y))
    lowered = forced_step(small).trace(small.state, x, y).lower(lowering_platforms=("cuda",))
    for column in ("network", "whole"):
        TRAIN_STEPS[column](small.case.app.function).trace(small.state, x, y).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("@kitsune_cuda")


def check(app: str, rows: int, target: str | None) -> dict[str, Any]:
    train = make_train_case(app, DTYPE, rows)
    args = (train.state, train.case.x, train.y)
    lowered = forced_step(train, target).lower(*args)
    kernels, step = lowered.as_text().count("@kitsune_cuda"), lowered.compile()
    got, again = step(*args), step(*args)
    equal = all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(*map(jax.tree.leaves, (got, again)), strict=True)
    )
    plain = TRAIN_STEPS["jit"](train.case.app.function)(*args)
    want = reference(train)
    errors, of_jit = step_errors(got, want), step_errors(plain, want)
    near = all(errors[part] <= max(TOLERANCE["bfloat16"], WORSE * of_jit[part]) for part in errors)
    return {"ok": near and equal and kernels > 0, "kernels": kernels, "errors": errors, "jit_errors": of_jit, "equal_bits": equal}


def case_name(app: str, rows: int) -> str:
    return f"{app} {DTYPE} {rows}"


def finding_of(app: str, rows: int, target: str | None) -> dict[str, Any]:
    """``check``, whose exception is a finding too: one that fails must not hide the others."""
    name = case_name(app, rows)
    try:
        return {"name": name, **check(app, rows, target)}
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return {"name": name, "ok": False, "error": text, "traceback": traceback.format_exc(limit=-3)}


def main() -> int:
    args = arguments(__doc__ or "").parse_args()
    record = Record("training", args.output, patience=args.patience)
    cases, target = (_DRY_CASES, "emulator") if args.dry_run else (CASES, None)
    record.content["expected"] = len(cases)
    for app, rows in cases:
        if record.wants(case_name(app, rows)):
            with record.case(case_name(app, rows), CASE_SECONDS):
                found = finding_of(app, rows, target)
            record.tell(found)
            if context_is_lost(found):
                return LOST
    return record.finish()


if __name__ == "__main__":
    raise SystemExit(main())

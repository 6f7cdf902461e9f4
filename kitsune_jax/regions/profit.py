"""When a pipeline is worth it, by what the model says of its plan.

Comes in: a ``Plan``. Goes out: whether it is taken, and the comparison in words.
"""

from __future__ import annotations

from collections.abc import Sequence

from kitsune_jax.planning.plan import Plan
from kitsune_jax.regions.calls import Chosen

# A pipeline has to be modelled at least this much faster than XLA: the model is not better than that.
PROFIT_MARGIN = 1.07
# One that moves less than this part of XLA's bytes only has to be as fast: bytes are counted, seconds modelled. With all legal
# regions instead of those at 1.07x or more GraphCast took 0.94 of the CPU time, its gradient 0.91, its processor's 0.98 (Zen 5).
_FEW_BYTES = 0.5
# Without a matmul both sides are bound by memory and page faults, where the model is worth less: softmax alone was modelled at
# 1.25x and 1.4x and ran at 0.84x on two cores, one modelled at 1.5x ran at 1.7x.
VECTOR_MARGIN = 1.45
# Where nothing is reduced it is worth more. Of 127 random functions of elements, one to six layers in three dtypes, 62 were
# modelled at 1.45x or more and 78 at 1.3x, of which one ran below 0.95x either way; with the others left to XLA all together took
# 1.52 and 1.59 times less. At 1.25x it would be 81 and three (Xeon with AMX).
ELEMENTWISE_MARGIN = 1.3
# Folds by index alone. Of 248 (sums and maxima of 100 to 100 000 rows of 1 to 128 numbers, sorted and not, two dtypes) 115 were
# modelled at 1.45x or more and 145 at 1.25x, of which one ran below 0.95x either way; with the others left to XLA all together took
# 1.73 and 1.88 times less. At 1.2x it would be 154 and two (Xeon with AMX).
FOLD_MARGIN = 1.25


def seconds_gained(plan: Plan) -> float:
    """What the model says a pipeline saves, in seconds."""
    return plan.baseline_seconds - plan.seconds


def all_gained(found: Sequence[Chosen]) -> float:
    """What it says several calls save, in seconds."""
    return sum(seconds_gained(c.plan) for c in found)


def gained_apart(whole: Plan | str, rest: Plan, alone: Sequence[Plan | str]) -> float:
    """What is gained where a region ``whole`` becomes ``rest`` and others, each ``alone`` a call where that pays, else XLA's.

    Where all of them have plans the times that things take are compared. What XLA would take for the parts is no measure: that is
    more than for the whole where a part makes an array that is inside of it.
    """
    if not isinstance(whole, str) and not any(isinstance(p, str) for p in alone):
        apart = [p.seconds if pays(p) else p.baseline_seconds for p in alone if not isinstance(p, str)]
        return whole.seconds - rest.seconds - sum(apart)
    gain = seconds_gained(rest) + sum(seconds_gained(p) for p in alone if not isinstance(p, str) and pays(p))
    return gain - (0.0 if isinstance(whole, str) else seconds_gained(whole))


def pays(plan: Plan) -> bool:
    """Is a pipeline modelled so much faster than XLA that it is taken?"""
    if not any(stage.resource == "tensor" for stage in plan.stages):
        margin = ELEMENTWISE_MARGIN if plan.elementwise else FOLD_MARGIN if plan.folds else VECTOR_MARGIN
        return plan.baseline_seconds > margin * plan.seconds
    few = plan.bytes_moved < _FEW_BYTES * plan.baseline_bytes
    return plan.baseline_seconds > (1.0 if few else PROFIT_MARGIN) * plan.seconds


def compared(plan: Plan) -> str:
    """The modelled times of a pipeline and of XLA, in words."""
    return f"modelled at {_time(plan.seconds)} as a pipeline against {_time(plan.baseline_seconds)}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"

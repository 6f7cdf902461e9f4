"""Sums by index whose rows may be added up in another order in every run, because the user asked for no more.

Comes in: a ``Captured``. Goes out: the same, with ``unordered`` among the parameters of every ``scatter_sum``. Invariant: nothing
else changes; whoever does not look at the parameter adds up in one order.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.capture.captured import Captured, Draft
from kitsune_jax.graph import Op, make_params


def allow_any_order(captured: Captured) -> Captured:
    """``captured``, in which sums by index need not have the same bits in every run."""
    draft = Draft(captured)
    draft.ops = [_allowed(op) for op in draft.ops]
    return draft.finish()


def _allowed(op: Op) -> Op:
    if op.kind != "scatter_sum":
        return op
    return dataclasses.replace(op, params=make_params(**{**dict(op.params), "unordered": True}))

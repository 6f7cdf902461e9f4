"""A region without some of its folds by index, where that gains more.

The rows of a call stream in one order. What folds them in another one needs a table for every worker, which a call of its own does
not, or XLA does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kitsune_jax.planning.plan import Plan
from kitsune_jax.regions.convex import needed, region_of
from kitsune_jax.regions.graph_index import GraphIndex
from kitsune_jax.regions.profit import compared, gained_apart
from kitsune_jax.streams import Region, Spread

_LEFT_ASIDE = "left to XLA: the pipeline that makes its rows would need a table for every worker, and a call of its own is"

Planned = tuple[Region, Plan | str]


def parted(
    index: GraphIndex, sp: Spread, planned: Planned, folds: Sequence[int], plan_of: Callable[[Region], Plan | str]
) -> tuple[Planned, dict[int, str]]:
    """A region of the stream ``sp`` with its plan, or what is left of it without those of its ``folds`` (ops) that are in another
    order, or without all; and the reasons for leaving them aside, by op."""
    region, plan = planned
    order, most = None if isinstance(plan, str) else plan.order, 0.0
    others = tuple(i for i in folds if index.graph.ops[i].inputs[1] != order)
    best = planned
    reasons: dict[int, str] = {}
    for left in dict.fromkeys((others, tuple(folds))):
        if not left:
            continue
        rest = region_of(index, sp, needed(index, sp, set(region.ops).difference(left)))
        smaller = plan_of(rest) if rest.outputs else ""
        if isinstance(smaller, str):
            continue
        alone = [plan_of(region_of(index, sp, needed(index, sp, {i}))) for i in left]
        gain = gained_apart(plan, smaller, alone)
        if gain > most:
            best, most = (rest, smaller), gain
            told = (own if isinstance(own, str) else f"{_LEFT_ASIDE} {compared(own)}" for own in alone)
            reasons.update(zip(left, told, strict=True))
    return best, reasons

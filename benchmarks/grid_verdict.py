"""What the grid's times mean. Knows no JAX.

Comes in: seconds of interleaved calls, and records of cases. Goes out: ratios with their confidence intervals, when to stop
measuring, the verdict on a case, and ``Tally``, what a set of cases comes to.

A case is *slower* where the planner's own choice runs below ``SLOWER`` times ``jax.jit``; a *possible win* where the choice or
the forced pipeline runs more than ``WIN`` times as fast as that, and *missed* where the forced one does, and is more than ``WIN``
times as fast as the choice, too.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

SLOWER, WIN = 0.95, 1.10
_CONFIDENCE = 0.95
_NARROW = 0.04  # width of an interval, relative to its median, that needs no more rounds
_CLEAR = 0.15  # the same where a verdict is clear
_LEAST_ROUNDS = 5


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A confidence interval of the median of what ``values`` were drawn from: two of them, whatever their distribution.

    The k-th least and the k-th largest of n values lie on both sides of the median unless fewer than k of n fair coins fall on one
    side. Where n is too small for the confidence asked for, all values lie within.
    """
    ordered = sorted(values)
    n, below, k = len(ordered), 0.0, 0
    while k < n // 2:
        below += math.comb(n, k) / 2.0**n
        if 2 * below > 1 - _CONFIDENCE:
            break
        k += 1
    k = max(k, 1)
    return ordered[k - 1], ordered[n - k]


def ratio(base: Sequence[float], other: Sequence[float]) -> dict[str, float | int]:
    """How many times as fast as ``base`` ``other`` is: median of the rounds, its interval (``low``, ``high``); of the minima."""
    rounds = [b / o for b, o in zip(base, other, strict=True)]
    low, high = median_interval(rounds)
    return {"median": statistics.median(rounds), "low": low, "high": high, "of_minima": min(base) / min(other), "n": len(rounds)}


def by_definition() -> dict[str, float | int]:
    """The ratio of a function to itself."""
    return {"median": 1.0, "low": 1.0, "high": 1.0, "of_minima": 1.0, "n": 0}


def settled(found: Mapping[str, float | int]) -> bool:
    """Is this ratio known well enough: narrowly, or at least so that it lies on one side of every threshold?"""
    if found["n"] < _LEAST_ROUNDS:
        return False
    width = (found["high"] - found["low"]) / found["median"]
    return width < _NARROW or (width < _CLEAR and not straddles(found))


def straddles(found: Mapping[str, float | int]) -> bool:
    """Does the interval hold a threshold?"""
    return any(found["low"] <= threshold <= found["high"] for threshold in (SLOWER, WIN))


def doubtful(speedup: Mapping[str, Mapping[str, float | int]]) -> bool:
    """Is this case to be measured again: slower than ``jax.jit``, or near a threshold?"""
    return any(s["n"] and (s["median"] < SLOWER or straddles(s)) for s in speedup.values())


def is_slower(record: Mapping[str, Any]) -> bool:
    return bool(record["speedup"]["choice"]["median"] < SLOWER)


def is_possible(record: Mapping[str, Any]) -> bool:
    return max(s["median"] for s in record["speedup"].values()) > WIN


def is_missed(record: Mapping[str, Any]) -> bool:
    choice, forced = (record["speedup"][c]["median"] for c in ("choice", "forced"))
    return bool(forced > WIN and forced > WIN * choice)


def verdict(record: Mapping[str, Any]) -> str:
    """One word for a progress line: "error", "SLOWER", "missed", "win" or ""."""
    if "error" in record:
        return "ERROR"
    if is_slower(record):
        return "SLOWER"
    if is_missed(record):
        return "missed"
    return "win" if is_possible(record) else ""


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """Of some cases: how many, how many failed, the geometric mean of the choice's speed-up, how many are slower, wins taken of
    wins possible."""

    cases: int
    errors: int
    mean: float
    slower: int
    taken: int
    possible: int

    @property
    def share(self) -> float:
        """Of the possible wins, those taken; 1 where there was none."""
        return self.taken / self.possible if self.possible else 1.0


def tally(records: Sequence[Mapping[str, Any]]) -> Tally:
    good = [r for r in records if "error" not in r]
    ratios = [r["speedup"]["choice"]["median"] for r in good]
    possible = [r for r in good if is_possible(r)]
    return Tally(
        cases=len(records),
        errors=len(records) - len(good),
        mean=math.exp(statistics.fmean(map(math.log, ratios))) if ratios else 1.0,
        slower=sum(map(is_slower, good)),
        taken=sum(not is_missed(r) for r in possible),
        possible=len(possible),
    )


def by_group(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Tally]:
    """The tally of every (mode, dtype) that there are records of, in the order of their names."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for r in records:
        groups.setdefault((r["mode"], r["dtype"]), []).append(r)
    return {key: tally(groups[key]) for key in sorted(groups, key=lambda k: (k[0], ("f32", "bf16", "f16").index(k[1])))}

"""What pays beside the chosen calls though it would not by itself: it becomes a phase of a call whose arrays it reads or makes.

An array that only a call reads lies in memory that the executor keeps. Between a call and XLA, or between two of XLA's kernels, it
lies in the block of memory that XLA allocates for the whole program. Where that block is large, it is fresh pages at every run, of
which the system zeroes each at its first touch: of the gradient of a graph attention network with three regions left to XLA between
four calls, 29 of 200 ms of CPU time. What a region is modelled at by itself has nothing of this, as the arrays that it reads and
those that it makes are XLA's either way.

Comes in: the chosen calls, a region that none of them has. Goes out: the seconds that are saved where both are one call. A region
that stands between two calls may save more than the arrays that it reads and makes itself: they become one with it, and what else
one hands to the other is no array of XLA's then either (``border_seconds``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.planning.plan import Plan
from kitsune_jax.regions.calls import Chosen
from kitsune_jax.regions.graph_index import GraphIndex
from kitsune_jax.regions.profit import seconds_gained
from kitsune_jax.streams import Region


@dataclasses.dataclass(frozen=True)
class Beside:
    """``ops`` of the chosen calls, and ``made``: what they make. ``fresh``: seconds for each byte of an array that is XLA's.
    ``spare``: seconds that a region may lose by itself, if it stands between calls."""

    index: GraphIndex
    ops: frozenset[int]
    made: frozenset[int]
    fresh: float
    spare: float = 0.0

    @staticmethod
    def of(index: GraphIndex, chosen: Sequence[Chosen], fresh: float, spare: float = 0.0) -> Beside:
        regions = [r for c in chosen for r in c.regions]
        ops, made = frozenset(i for r in regions for i in r.ops), frozenset(v for r in regions for v in r.outputs)
        return Beside(index, ops, made, fresh, spare)

    def pays(self, region: Region, plan: Plan) -> bool:
        """Is ``region`` modelled faster than XLA, with what is saved as a phase of a chosen call?"""
        saved = self.saved(region)
        between = not self.made.isdisjoint(region.inputs) and any(map(self._is_read, region.outputs))
        return saved > 0.0 and plan.baseline_seconds + saved + self.spare * between > plan.seconds

    def saved(self, region: Region) -> float:
        """Seconds that arrays between ``region`` and the calls take where it is left to XLA: those that nothing else reads."""
        inside = self.ops.union(region.ops)
        values = [v for v in region.inputs if v in self.made]
        values += [v for v in region.outputs if self._is_read(v)]
        return self.fresh * sum(_bytes(self.index, v) for v in values if _stays(self.index, v, inside))

    def _is_read(self, v: int) -> bool:
        return not self.ops.isdisjoint(self.index.consumers.get(v, ()))


class Bridges:
    """Calls, of which more become one because of what stands between them.

    ``merge(more)`` gives the calls there are with ``more`` chosen ones; ``calls`` are the best that were found, with what was
    accepted, and ``border`` the seconds that they take for what else is no array of a call's.
    """

    def __init__(self, index: GraphIndex, merge: Callable[[Sequence[Chosen]], list[Chosen]], fresh: float):
        self.index, self.merge, self.fresh = index, merge, fresh
        self.calls, self.border = self._tried([])
        self.refused: set[tuple[int, ...]] = set()  # by their ops, each of which may be a seed

    def accepts(self, bridge: Chosen) -> bool:
        """Take ``bridge`` where it saves more than it loses by itself."""
        if bridge.ops in self.refused:
            return False
        calls, border = self._tried([bridge])
        if bridge in calls or border >= self.border + seconds_gained(bridge.plan):
            self.refused.add(bridge.ops)
            return False
        self.calls, self.border = calls, border
        self.refused.clear()
        return True

    def _tried(self, more: Sequence[Chosen]) -> tuple[list[Chosen], float]:
        calls = self.merge(more)
        return calls, border_seconds(self.index, calls, self.fresh)


def border_seconds(index: GraphIndex, calls: Sequence[Chosen], fresh: float) -> float:
    """Seconds that arrays take which one of ``calls`` makes, and something else of the program reads."""
    values = [(v, c.ops) for c in calls for r in c.regions for v in r.outputs if v not in index.results]
    return fresh * sum(_bytes(index, v) for v, ops in values if not _stays(index, v, frozenset(ops)))


def _stays(index: GraphIndex, v: int, inside: frozenset[int]) -> bool:
    return v not in index.results and inside.issuperset(c for c in index.consumers.get(v, ()) if c in index.live)


def _bytes(index: GraphIndex, v: int) -> int:
    value = index.graph.values[v]
    return value.size * np_dtype(value.dtype).itemsize

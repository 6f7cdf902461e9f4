"""Clean numbers from a machine that also does other things.

Comes in: pieces of work, each of which can be timed again and again, and a piece of reference that is always the same. Goes out:
the seconds of each, and which of them were another one in every pass. What disturbs a machine lasts: another program has a core for
milliseconds, a core runs at half of its speed for seconds. Repetitions that follow each other are all hit by it, and those of the
neighbours as well. So a pass takes one repetition of every piece, and passes follow until two of them agree; a repetition counts
for nothing while the reference beside it takes longer than at its best, or while a hypervisor gives the cores to somebody else.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence

# Two passes over the same work on an idle machine lie within a few percent of each other.
AGREE = 1.1
# A number of which no two passes lie closer than this is doubtful.
DOUBTFUL = 1.3
# Of all numbers of a profile: with more it is not kept, and with so few no time is spent on them.
MOST_DOUBTFUL, _FEW_DOUBTFUL = 0.08, 0.02
# The reference, over its best time, while a core runs at its full speed. Beside products in full vectors it takes 1.2 to 1.3 times
# as long: the clock of a Xeon is slower for a while after them.
_SLOW = 1.4
_STOLEN = 0.1  # of the time of all cores, what others may have of it
# Calls of a slice, and its seconds; three calls are as fast as the fastest within this.
_LEAST_CALLS, _SLICE, _MOST_SLICE, _AS_FAST = 3, 1.2e-3, 10e-3, 1.05
# Of the time of all workers, what the threads of a call have at least that is shared out among them.
_TOGETHER = 0.65
_BLOCK = 8  # pieces between two looks at the reference
_LEAST_PASSES, _MOST_PASSES = 2, 24


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Work with a name. ``seconds``: of one more repetition; None where the machine has no such work. ``elements``: what of it one
    number of a profile is of. ``agree``: two repetitions are equal enough when one takes no longer than this times the other."""

    key: str
    seconds: Callable[[], float | None]
    elements: float = 1.0
    agree: float = AGREE


@dataclasses.dataclass(slots=True)
class _Repetition:
    """``reference``: the slower one of those before and behind it. ``stolen``: of the time meanwhile."""

    seconds: float
    reference: float
    stolen: float


class Passes:
    """What was found so far.

    ``reference``: seconds of a piece of work that keeps all workers busy in registers. ``clock``: seconds since some moment.
    ``stolen``: seconds since then in which others than this operating system had one of its ``cores``."""

    def __init__(
        self,
        reference: Callable[[], float],
        *,
        clock: Callable[[], float] = time.perf_counter,
        stolen: Callable[[], float] = lambda: 0.0,
        cores: int = 1,
    ):
        self.made = 0
        self._reference, self._clock, self._stolen, self._cores = reference, clock, stolen, cores
        self._found: dict[str, list[_Repetition]] = {}
        self._best = float("inf")  # of the reference
        self._is_disturbed = False

    def run(self, pieces: Iterable[Piece], until: float = float("inf")) -> None:
        """One more repetition of each of ``pieces`` that has not settled; after the time ``until`` only of those that have none or
        one."""
        self.made += 1
        here = [p for p in pieces if not self.is_settled(p)]
        for first in range(0, len(here), _BLOCK):
            block = here[first : first + _BLOCK]
            if self._clock() > until:
                block = [p for p in block if len(self._found.get(p.key, ())) < _LEAST_PASSES]
            self._run(block)

    def settle(self, pieces: Iterable[Piece], until: float, at_most: float) -> None:
        """Passes until the pieces have settled; from the time ``until`` on, until few of them are doubtful; and until the time
        ``at_most``, though everything is measured twice."""
        here = tuple(pieces)
        for _ in range(_MOST_PASSES):
            self.run(here, at_most)
            self._look()
            now = self._clock()
            if all(map(self.is_settled, here)) or now > until and len(self.doubtful()) <= _FEW_DOUBTFUL * len(self._found):
                break
            if now > at_most and all(len(found) >= _LEAST_PASSES for found in self._found.values()):
                break

    def is_settled(self, piece: Piece) -> bool:
        """Do two clean repetitions agree? Three of four at least where any other took much longer, and while many pieces have such:
        then two that were disturbed may be alike as well."""
        clean = self._clean(piece.key)
        least, alike = (4, 3) if self._is_disturbed or _differ(clean) else (2, 2)
        return len(clean) >= least and clean[alike - 1] <= piece.agree * clean[0]

    def seconds(self) -> dict[str, float]:
        """Of each piece of which there are any: the least of the clean repetitions. Where none was clean: as long as the fastest
        one would take, had the reference taken no longer than at its best."""
        found = {}
        for key, repetitions in self._found.items():
            clean = self._clean(key)
            found[key] = clean[0] if clean else min(r.seconds * self._best / r.reference for r in repetitions)
        return found

    def doubtful(self) -> dict[str, float]:
        """What took another time at every clean repetition, in ascending order of the names, and how many times as long the second
        fastest repetition took as the fastest; of all repetitions, where fewer than two were clean."""
        found = {}
        for key in sorted(self._found):
            clean = self._clean(key)
            if len(clean) < 2:
                every = sorted(r.seconds for r in self._found[key])
                found[key] = max(DOUBTFUL, every[1] / every[0] if len(every) > 1 else DOUBTFUL)
            elif clean[1] > DOUBTFUL * clean[0]:
                found[key] = clean[1] / clean[0]
        return found

    def _clean(self, key: str) -> list[float]:
        found = self._found.get(key, ())
        return sorted(r.seconds for r in found if r.reference <= _SLOW * self._best and r.stolen <= _STOLEN)

    def _look(self) -> None:
        """Does something disturb the machine again and again?"""
        differ = sum(_differ(self._clean(key)) for key in self._found)
        self._is_disturbed = differ > MOST_DOUBTFUL * len(self._found)

    def _run(self, block: Iterable[Piece]) -> None:
        found: list[tuple[str, float]] = []
        start, stolen, before = self._clock(), self._stolen(), self._reference()
        for piece in block:
            seconds = piece.seconds()
            if seconds is not None:
                found.append((piece.key, seconds))
        after = self._reference()
        self._best = min(self._best, before, after)
        passed = max(self._clock() - start, 1e-9) * self._cores
        share = (self._stolen() - stolen) / passed
        for key, seconds in found:
            self._found.setdefault(key, []).append(_Repetition(seconds, max(before, after), share))


def _differ(seconds: Sequence[float]) -> bool:
    """Of times in ascending order."""
    return len(seconds) > 1 and seconds[-1] > DOUBTFUL * seconds[0]


def of_long(calls: Iterable[tuple[float, float]]) -> float:
    """What a call of a millisecond or more takes while nothing is in its way: of ``calls``, seconds and its busiest thread's.

    Where other programs run, threads of such calls wait for a core again and again, and no call takes what it takes alone. Its
    busiest thread runs that long all the same, if somewhat less: so calls count that are equally fast, if they are.
    """
    found = list(itertools.islice(calls, _LEAST_CALLS))
    least = min(seconds for seconds, _ in found)
    if all(seconds <= _AS_FAST * least for seconds, _ in found):
        return least
    return min(least, *(busiest for _, busiest in found))


def fastest(calls: Iterable[tuple[float, float]], workers: int) -> float:
    """What a call takes while nothing is in its way: of ``calls``, seconds and seconds of all threads together, a slice of time.

    It is the least of the seconds. The slice goes on while fewer than three calls were as fast: then threads mostly wait for their
    cores. Where that does not help, but the threads of some call had all ``workers`` for themselves most of the time, no call takes
    less than its threads do together, shared out evenly, and none is known to take less than the fastest: it lies between the two.
    """
    found: list[tuple[float, float]] = []
    passed = 0.0
    for seconds, of_threads in calls:
        found.append((seconds, of_threads))
        passed += seconds
        if len(found) < _LEAST_CALLS or passed < _SLICE:
            continue
        least = min(s for s, _ in found)
        if sum(s <= _AS_FAST * least for s, _ in found) >= _LEAST_CALLS:
            return least
        if passed > _MOST_SLICE:
            break
    least = min(s for s, _ in found)
    together = sorted(t for _, t in found)[len(found) // 2]
    if max(min(t, together) / s for s, t in found) < _TOGETHER * workers:
        return least
    return min(least, math.sqrt(least * together / workers))

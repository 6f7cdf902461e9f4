"""Clean numbers from a machine that also does other things.

Comes in: repeated measurements. Goes out: one number, and whether it looks disturbed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

# Repetitions of the same work on an idle machine lie within a few percent of the fastest.
_SPREAD = 1.3
# Of its slice of time, a thread that shares its core with nobody runs nearly all.
SHARE = 0.9
_TRIES = 3
# Of all numbers of a profile; a single one may be hit by an interrupt at every try.
MOST_DISTURBED = 0.08

# seconds of each repetition, and the share of the time in which the threads ran
Repeated = tuple[list[float], float]


@dataclasses.dataclass
class Log:
    """How many numbers were made, and which of them stayed disturbed."""

    made: int = 0
    disturbed: list[str] = dataclasses.field(default_factory=list)

    def quiet(self, name: str, measure: Callable[[], Repeated]) -> float | None:
        """The least of the seconds that ``measure`` returns, which is asked up to three times, while they disagree.

        None if there are none."""
        best = float("inf")
        for _ in range(_TRIES):
            seconds, share = measure()
            if not seconds:
                return None
            least = min(seconds)
            best = min(best, least)
            if middle(seconds) <= _SPREAD * least and least <= _SPREAD * best and share >= SHARE:
                self.made += 1
                return best
        self.made += 1
        self.disturbed.append(name)
        return best

    @property
    def is_disturbed(self) -> bool:
        return len(self.disturbed) > MOST_DISTURBED * self.made


def middle(seconds: Iterable[float]) -> float:
    ordered = sorted(seconds)
    return ordered[len(ordered) // 2]

"""Load balance: how many workers each stage of a spatial pipeline gets.

Comes in: one ``Load`` per stage and the number of workers. Goes out: ``Balance``, whole numbers of workers and the throughput they
reach. The integer program is that of arXiv 2502.18403, section on load balancing:

    maximise T   with   T <= t_i * r_i(a_i),   least_i <= a_i <= most_i,   sum of a_i <= workers

with t_i = 1 / seconds and r_i(a) = a. (The paper's limits on T by the memory's bandwidth, and its gain from operands kept on chip,
are in the seconds that the planner asks with.) The r_i grow, and no stage's workers help another, so the optimum is found without a
solver: the tests compare it with that of a mixed-integer programme.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

from kitsune_jax.planning.plan import Infeasible


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """A stage: ``seconds`` for one tile on one worker, between ``least`` and ``most`` workers."""

    seconds: float
    least: int = 1
    most: int = 1 << 20

    def throughput(self, workers: int) -> float:
        """Tiles per second with ``workers`` workers."""
        return min(workers, self.most) / self.seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Balance:
    """``throughput`` in tiles per second."""

    workers: tuple[int, ...]
    throughput: float


def balance(loads: Sequence[Load], workers: int) -> Balance:
    """The optimum of the integer program, with no worker that does not raise the throughput.

    The slowest stage gets one more worker until it can't have one: only a worker for the slowest stage raises T, and a stage that
    was given one was the slowest when it had one less, so no other distribution has all stages faster. Raises ``Infeasible`` where
    the stages' least workers are more than there are.

    >>> balance([Load(3e-6), Load(1e-6)], 8).workers
    (6, 2)
    """
    for i, load in enumerate(loads):
        if load.seconds <= 0 or not 1 <= load.least <= load.most:
            raise ValueError(f"stage {i} has no sensible load: {load}")
    if not loads:
        raise ValueError("no stages to balance")
    given = [load.least for load in loads]
    left = workers - sum(given)
    if left < 0:
        raise Infeasible(f"{len(loads)} stages need {sum(given)} workers at least; the machine has {workers}")
    queue = [(load.throughput(load.least), i) for i, load in enumerate(loads)]
    heapq.heapify(queue)
    while left and given[queue[0][1]] < loads[queue[0][1]].most:
        slowest = queue[0][1]
        given[slowest] += 1
        left -= 1
        heapq.heapreplace(queue, (loads[slowest].throughput(given[slowest]), slowest))
    return _settled(loads, queue[0][0])


def _settled(loads: Sequence[Load], throughput: float) -> Balance:
    """The fewest workers that keep up ``throughput``. 1e-6: so that rounding asks for no worker more."""
    need = [throughput * load.seconds * (1 - 1e-6) for load in loads]
    workers = tuple(min(load.most, max(load.least, -int(-x // 1))) for load, x in zip(loads, need, strict=True))
    return Balance(workers, min(load.throughput(a) for load, a in zip(loads, workers, strict=True)))

"""Load balance: how many workers each stage of a spatial pipeline gets.

Comes in: one ``Load`` per stage and the limits of the machine. Goes out: ``Balance``, whole numbers of workers and the throughput
they reach. The integer program is that of arXiv 2502.18403, section on load balancing:

    maximise T   with   T <= t_i * r_i(a_i) * s_i,   T * dram_bytes <= DRAM bandwidth,   T * l2_bytes <= L2 bandwidth,
                        1 <= a_i,   sum of a_i over tensor stages <= workers,   sum of a_i over simt stages <= workers

with t_i = 1 / seconds, s_i = ``gain`` and r_i(a) = a up to ``most`` workers.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

# Nodes of the solver's tree, not seconds: equal arguments must give equal plans. Ten stages take a few.
_MOST_NODES = 10_000
_STOPPED = 1  # status of a search that reached a limit (scipy.optimize.milp)


class Infeasible(ValueError):
    """No plan for this region on this machine. The message is the reason, for the report."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """A stage: ``seconds`` for one tile on one worker, between ``least`` and ``most`` workers; ``gain`` from operands kept on
    chip."""

    name: str
    resource: str
    seconds: float
    least: int = 1
    most: int = 1 << 20
    gain: float = 1.0

    def throughput(self, workers: int) -> float:
        """Tiles per second with ``workers`` workers."""
        return min(workers, self.most) * self.gain / self.seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """``shares_workers``: tensor and simt stages each have all workers, because they run side by side on one.

    ``dram_bytes`` / ``l2_bytes``: what one tile of the whole pipeline moves; bandwidths in bytes per second.
    """

    workers: int
    shares_workers: bool
    dram_bytes: float = 0.0
    dram_bandwidth: float = float("inf")
    l2_bytes: float = 0.0
    l2_bandwidth: float = float("inf")

    def pools(self, loads: Sequence[Load]) -> list[list[int]]:
        """Groups of stages that draw their workers from one pool of ``workers``."""
        everyone = list(range(len(loads)))
        if not self.shares_workers:
            return [everyone]
        return [pool for r in ("tensor", "simt") if (pool := [i for i in everyone if loads[i].resource == r])]

    def bandwidth_cap(self) -> tuple[float, str]:
        """(tiles per second that the memory allows, what says so)."""
        dram = self.dram_bandwidth / self.dram_bytes if self.dram_bytes else float("inf")
        l2 = self.l2_bandwidth / self.l2_bytes if self.l2_bytes else float("inf")
        return (dram, "dram") if dram <= l2 else (l2, "l2")


@dataclasses.dataclass(frozen=True, slots=True)
class Balance:
    """``throughput`` in tiles per second; ``bound`` names the stage, "dram" or "l2" that sets it."""

    workers: tuple[int, ...]
    throughput: float
    bound: str


def check_feasible(loads: Sequence[Load], limits: Limits) -> None:
    """Raise ``Infeasible`` where the stages' least workers are more than the machine has."""
    for i, load in enumerate(loads):
        if load.seconds <= 0 or load.gain <= 0 or not 1 <= load.least <= load.most:
            raise ValueError(f"stage {i} ({load.name}) has no sensible load: {load}")
    for pool in limits.pools(loads):
        need = sum(loads[i].least for i in pool)
        if need > limits.workers:
            raise too_few_workers(len(pool), need, limits.workers)


def too_few_workers(stages: int, need: int, workers: int) -> Infeasible:
    return Infeasible(f"{stages} stages need {need} workers at least; the machine has {workers}")


def balance(loads: Sequence[Load], limits: Limits) -> Balance:
    """The optimum of the integer program, with no worker that does not raise the throughput. Raises ``Infeasible``.

    >>> balance([Load("a", "tensor", 3e-6), Load("b", "tensor", 1e-6)], Limits(8, True)).workers
    (6, 2)
    """
    check_feasible(loads, limits)
    if not loads:
        raise ValueError("no stages to balance")
    return settle(loads, limits, _solve(loads, limits))


def _solve(loads: Sequence[Load], limits: Limits) -> float:
    """The largest T, in tiles per second. ``scipy`` is imported here, so that who never balances never pays for it."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    n = len(loads)
    unit = max(load.seconds / load.gain for load in loads)  # T is solved in tiles per ``unit``: numbers near 1
    rows, upper = [], []
    for i, load in enumerate(loads):  # T * seconds / gain - a_i <= 0
        row = np.zeros(n + 1)
        row[0], row[1 + i] = load.seconds / load.gain / unit, -1.0
        rows.append(row)
        upper.append(0.0)
    for pool in limits.pools(loads):
        row = np.zeros(n + 1)
        row[[1 + i for i in pool]] = 1.0
        rows.append(row)
        upper.append(float(limits.workers))
    cap = limits.bandwidth_cap()[0] * unit
    most = [float(min(load.most, limits.workers)) for load in loads]
    result = milp(
        c=np.array([-1.0, *[0.0] * n]),
        constraints=LinearConstraint(np.array(rows), -np.inf, np.array(upper)),
        integrality=np.array([0, *[1] * n]),
        bounds=Bounds([0.0, *[float(load.least) for load in loads]], [cap, *most]),
        options={"mip_rel_gap": 0.0, "node_limit": _MOST_NODES},
    )
    if result.status == _STOPPED:
        return screen(loads, limits).throughput
    if result.x is None:
        raise Infeasible(f"the load balance has no solution: {result.message}")
    return float(result.x[0]) / unit


def screen(loads: Sequence[Load], limits: Limits) -> Balance:
    """The same optimum without a solver: the slowest stage gets one more worker until it can't have one.

    Exact because the r_i are linear and no stage shares two pools; it is used to rank many groupings before one is solved for.
    """
    check_feasible(loads, limits)
    workers = [load.least for load in loads]
    free = {i: k for k, pool in enumerate(limits.pools(loads)) for i in pool}
    left = [limits.workers - sum(workers[i] for i in pool) for pool in limits.pools(loads)]
    queue = [(load.throughput(load.least), i) for i, load in enumerate(loads)]
    heapq.heapify(queue)
    while True:
        _, slowest = queue[0]
        if not left[free[slowest]] or workers[slowest] >= loads[slowest].most:
            break
        workers[slowest] += 1
        left[free[slowest]] -= 1
        heapq.heapreplace(queue, (loads[slowest].throughput(workers[slowest]), slowest))
    return settle(loads, limits, min(load.throughput(a) for load, a in zip(loads, workers, strict=True)))


def settle(loads: Sequence[Load], limits: Limits, throughput: float) -> Balance:
    """The fewest workers that keep up ``throughput``, what they reach together with the memory, and what bounds that."""
    cap, memory = limits.bandwidth_cap()
    target = min(throughput, cap)
    # 1e-6: the solver's tolerance on integers and bounds
    need = [target * load.seconds / load.gain for load in loads]
    workers = tuple(min(load.most, max(load.least, -int(-(x * (1 - 1e-6)) // 1))) for load, x in zip(loads, need, strict=True))
    slowest = min(range(len(loads)), key=lambda i: loads[i].throughput(workers[i]))
    reached = loads[slowest].throughput(workers[slowest])
    return Balance(workers, cap, memory) if cap < reached else Balance(workers, reached, loads[slowest].name)

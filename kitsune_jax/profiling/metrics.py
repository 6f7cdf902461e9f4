"""The numbers of SKIP (arXiv 2504.11750) for one call of a function, the bound of the call, and the chains of kernels that recur.

Comes in: a ``TracedCall``, the ``KernelWork`` of each of its kernels, the ``PeakRates`` of the machine. Goes out: ``Metrics``,
``Shares``, chains as positions in the run. Pure functions; times come from the trace alone.

**The bound.** The latency of a call is divided into three parts. *Overhead* is the time in which no kernel runs, and of each kernel
the time that the machine needs for a kernel without work (``PeakRates.kernel_seconds``). The rest of a kernel is *compute* if its
operations at the machine's peak rates would take longer than its bytes at the machine's bandwidth, and *memory* otherwise. Bytes
that fit the last level cache are taken to come from there. Where kernels overlap, the time is divided among them. The bound of the
call is the largest part. Kernels whose operations are not known (sorts, custom calls) are a part of their own, *other*.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Literal, get_args

from kitsune_jax.profiling.hlo import KernelWork
from kitsune_jax.profiling.trace import KernelRun, TracedCall

Bound = Literal["overhead", "memory", "compute", "other"]
BOUNDS: tuple[Bound, ...] = get_args(Bound)
_NS = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class Metrics:
    """SKIP's numbers of one call. Times in seconds; ``None``: the trace does not have it.

    ``launches``: calls that launched kernels; on a CPU, thunks that were started. ``kernels``: kernels that ran. ``tklqt``: total
    kernel launch and queue time, the sum over kernels of the kernel's start minus that of the call that launched it; ``None`` on a
    CPU, whose thunks are called by the threads that run them. ``latency``: from the start of the call to the end of the last
    kernel. ``first_kernel``: from the start of the call to that of the first kernel. ``kernel_time``: the sum over kernels, which
    may exceed the latency where they overlap. ``mean_kernel``: the average of it. ``idle``: the time of the latency in which no
    kernel runs; SKIP's latency minus kernel time, where no kernels overlap.
    """

    launches: int
    kernels: int
    tklqt: float | None
    latency: float
    first_kernel: float | None
    kernel_time: float
    mean_kernel: float | None
    idle: float


@dataclasses.dataclass(frozen=True, slots=True)
class PeakRates:
    """The peak rates of a machine, of all its workers together. ``dots``: operations of matrix products a second by dtype, with an
    entry "other". ``simple``, ``transcendental``: elements a second. ``near``, ``far``: bytes a second from the last level cache
    and from memory; ``near_bytes``: the size of that cache. ``kernel_seconds``: of a kernel without work."""

    machine: str
    dots: tuple[tuple[str, float], ...]
    simple: float
    transcendental: float
    near: float
    far: float
    near_bytes: int
    kernel_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Shares:
    """The parts of a call's latency, in seconds; their sum is the latency."""

    overhead: float
    memory: float
    compute: float
    other: float = 0.0

    @property
    def bound(self) -> Bound:
        """The largest part; the first of equal ones in the order of the fields."""
        return max(BOUNDS, key=lambda name: float(getattr(self, name)))


def metrics_of(run: TracedCall) -> Metrics:
    """The numbers of ``run``.

    >>> from kitsune_jax.profiling.trace import KernelRun, TracedCall
    >>> kernels = KernelRun("a", 10e3, 20e3, launch=5e3, launched_by=1), KernelRun("b", 30e3, 40e3, launch=6e3, launched_by=2)
    >>> m = metrics_of(TracedCall(0, 40e3, kernels))
    >>> f"{m.tklqt:.6f} {m.kernel_time:.6f} {m.mean_kernel:.6f} {m.idle:.6f} {m.latency:.6f}"
    '0.000029 0.000020 0.000010 0.000020 0.000040'
    """
    kernels = run.kernels
    end = max((k.end for k in kernels), default=run.end)
    spent = sum(k.end - k.start for k in kernels)
    waits = [k.start - k.launch for k in kernels if k.launch is not None]
    launched = len({k.launched_by for k in kernels if k.launched_by is not None})
    return Metrics(
        launches=launched or len(kernels),
        kernels=len(kernels),
        tklqt=sum(waits) * _NS if waits and len(waits) == len(kernels) else None,
        latency=(end - run.start) * _NS,
        first_kernel=(kernels[0].start - run.start) * _NS if kernels else None,
        kernel_time=spent * _NS,
        mean_kernel=spent / len(kernels) * _NS if kernels else None,
        idle=(end - run.start - _busy(run)) * _NS,
    )


def _busy(run: TracedCall) -> float:
    """Nanoseconds in which at least one kernel runs."""
    total, reached = 0.0, run.start
    for k in sorted(run.kernels, key=lambda k: k.start):
        total += max(0.0, k.end - max(k.start, reached))
        reached = max(reached, k.end)
    return total


def shares_of(run: TracedCall, works: Sequence[KernelWork], rates: PeakRates) -> Shares:
    """The parts of the latency of ``run``; ``works`` has one entry for each kernel."""
    m = metrics_of(run)
    parts = kernel_shares(run.kernels, works, rates)
    scale = (m.latency - m.idle) / m.kernel_time if m.kernel_time else 0.0
    return Shares(parts.overhead * scale + m.idle, parts.memory * scale, parts.compute * scale, parts.other * scale)


def kernel_shares(kernels: Sequence[KernelRun], works: Sequence[KernelWork], rates: PeakRates) -> Shares:
    """The parts of the time of ``kernels``, each for itself."""
    parts = dict.fromkeys(BOUNDS, 0.0)
    for kernel, work in zip(kernels, works, strict=True):
        spent = (kernel.end - kernel.start) * _NS
        least = min(spent, rates.kernel_seconds)
        parts["overhead"] += least
        parts[limit_of(work, rates)] += spent - least
    return Shares(**parts)


def limit_of(work: KernelWork, rates: PeakRates) -> Bound:
    """The bound of a kernel with this work: "memory", "compute", or "other" where its operations are not counted."""
    if not work.counted:
        return "other"
    table = dict(rates.dots)
    compute = work.dots / table.get(work.dtype, table["other"])
    compute += work.simple / rates.simple + work.transcendental / rates.transcendental
    return "compute" if compute > work.bytes / (rates.near if work.bytes <= rates.near_bytes else rates.far) else "memory"


# --- chains -----------------------------------------------------------------------------------------------------------------------

LONGEST = 64  # kernels of a chain
_CLEARLY = 1.05  # a chain that weighs less than this more than one that is shorter, or begins earlier, is not taken before it


@dataclasses.dataclass(frozen=True, slots=True)
class Recurring:
    """A chain of ``length`` kernels in a run, and the positions ``starts`` at which it begins."""

    length: int
    starts: tuple[int, ...]

    def kernels(self) -> list[int]:
        """The positions of all its kernels."""
        return [s + k for s in self.starts for k in range(self.length)]


def chains(keys: Sequence[Hashable], times: Sequence[float], most: int) -> list[Recurring]:
    """Chains of kernels with equal ``keys`` that do not overlap, at most ``most``, the one that takes the most time first.

    Of the chains of two kernels and more that recur, those are taken that take the most time, times the logarithm of how often they
    recur: layers before pairs of layers. Equal kernels that are in none of these are a chain of one kernel.

    >>> [(p.length, p.starts) for p in chains("xababyx", [3, 1, 2, 1, 2, 5, 4], most=3)]
    [(1, (0, 6)), (2, (1, 3)), (1, (5,))]
    """
    number = {key: k for k, key in enumerate(dict.fromkeys(keys))}
    numbers, free = [number[key] for key in keys], [True] * len(keys)
    found = list[Recurring]()
    while len(found) < most and (best := _heaviest(numbers, times, free)) is not None:
        found.append(best)
        for at in best.kernels():
            free[at] = False
    single = dict[int, list[int]]()
    for at in range(len(keys)):
        if free[at]:
            single.setdefault(numbers[at], []).append(at)
    found += [Recurring(1, tuple(starts)) for starts in single.values()]
    return sorted(found, key=lambda p: (-sum(times[at] for at in p.kernels()), p.starts))[:most]


def _heaviest(keys: Sequence[int], times: Sequence[float], free: Sequence[bool]) -> Recurring | None:
    """The recurring chain of two kernels or more in ``free`` positions that ``chains`` takes first.

    ``at``: where each chain of the last length that recurs begins. A longer one recurs only where these do.
    """
    best, most = None, 0.0
    at: list[list[int]] = [[k for k in range(len(keys)) if free[k]]]
    for length in range(1, LONGEST + 1):
        longer = list[list[int]]()
        for begins in at:
            by_last = dict[int, list[int]]()
            for begin in begins:
                last = begin + length - 1
                if last < len(keys) and free[last]:
                    by_last.setdefault(keys[last], []).append(begin)
            longer += [found for found in by_last.values() if len(found) > 1]
        at = longer
        for begins in at if length > 1 else ():
            place = Recurring(length, _apart(begins, length))
            if len(place.starts) > 1 and not _repeats(keys[begins[0] : begins[0] + length]):
                weight = sum(times[k] for k in place.kernels()) * math.log2(len(place.starts))
                if weight > most * _CLEARLY:
                    best, most = place, weight
    return best


def _apart(begins: Sequence[int], length: int) -> tuple[int, ...]:
    """Those of the ascending ``begins`` whose chains do not overlap, the first ones first."""
    found = list[int]()
    for begin in begins:
        if not found or begin >= found[-1] + length:
            found.append(begin)
    return tuple(found)


def _repeats(chain: Sequence[int]) -> bool:
    """Whether ``chain`` is a shorter one several times."""
    n = len(chain)
    return any(n % p == 0 and chain[p:] == chain[:-p] for p in range(1, n // 2 + 1))

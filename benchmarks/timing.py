"""Interleaved timing.

Comes in: named thunks that return JAX arrays, or run in another process. Goes out: the seconds of every call, round by round. Each
round calls every thunk twice and times the second call, as users call one function again and again (or it calls every thunk
``calls`` times back to back: a device that works through a queue of calls is timed by the queue, not by the host), starting with
another thunk each time; nothing is cached, and before the next call results are waited for and deleted, and threads rest. The
clock of a shared machine drifts by a factor of two over minutes, so only numbers of the same round are compared: a speedup is the
median over rounds of the ratio within a round.

The first call of the two pays for the memory that the thunk before freed: on a virtual machine whose host takes free pages back, a
training step of an LSTM took 515 ms behind itself and up to 900 ms behind ``jax.jit``'s step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax


@runtime_checkable
class Clocked(Protocol):
    """Something that runs in another process, which times it: ``seconds(n)`` are those of one of ``n`` calls."""

    def seconds(self, calls: int) -> float: ...


Thunk = Callable[[], Any] | Clocked
_LOOK_SECONDS, _QUIET_LOOKS = 2e-3, 5  # the memory is freed some milliseconds after a result is ready


def interleaved(
    thunks: Mapping[str, Thunk], *, rounds: int, seconds: float, warmup: int = 2, calls: int = 1
) -> dict[str, list[float]]:
    """Seconds of a call of each thunk in ``rounds`` rounds; fewer, but at least three, when ``seconds`` have passed."""
    for _ in range(warmup):
        for thunk in thunks.values():
            _call(thunk)
    names = list(thunks)
    times: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    for r in range(rounds):
        if r >= 3 and time.perf_counter() - start > seconds:
            break
        for name in names[r % len(names) :] + names[: r % len(names)]:
            if calls == 1:
                _call(thunks[name])
            times[name].append(_call(thunks[name], calls))
    return times


def calls_to_fill(thunks: Mapping[str, Thunk], seconds: float, most: int = 64) -> int:
    """How many calls of the fastest thunk take ``seconds``; between 1 and ``most``."""
    for thunk in thunks.values():
        _call(thunk)
    fastest = min(_call(thunk) for thunk in thunks.values())
    return max(1, min(most, int(-(-seconds // fastest))))


def rest(most: float = 1.0) -> None:
    """Wait until the threads of this process rest, for at most ``most`` seconds.

    XLA's CPU runtime frees the temporary memory of a call after its results are ready: that of an attention's scores takes 40 ms,
    which the next call would pay for.
    """
    end = time.perf_counter() + most
    ran, quiet = time.process_time(), 0
    while quiet < _QUIET_LOOKS and time.perf_counter() < end:
        time.sleep(_LOOK_SECONDS)
        before, ran = ran, time.process_time()
        quiet = quiet + 1 if ran - before < _LOOK_SECONDS / 4 else 0


def _call(thunk: Thunk, calls: int = 1) -> float:
    rest()
    if isinstance(thunk, Clocked):
        return thunk.seconds(calls)
    start = time.perf_counter()
    results = jax.block_until_ready([thunk() for _ in range(calls)])
    elapsed = (time.perf_counter() - start) / calls
    for leaf in jax.tree.leaves(results):
        leaf.delete()
    return elapsed


def summary(times: Sequence[float]) -> dict[str, float | int]:
    """Median, extremes and quartiles (linear between the neighbours, as NumPy's default) of at least one time."""
    ordered = sorted(times)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "q1": _quantile(ordered, 0.25),
        "q3": _quantile(ordered, 0.75),
        "n": len(ordered),
    }


def paired_speedup(base: Sequence[float], other: Sequence[float]) -> dict[str, float | int]:
    """``summary`` of base/other round by round: above 1 where ``other`` is faster."""
    return summary([b / o for b, o in zip(base, other, strict=True)])


def _quantile(ordered: Sequence[float], q: float) -> float:
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

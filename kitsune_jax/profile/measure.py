"""Measuring a machine: our kernels and XLA's, in some seven seconds where nothing else runs.

Comes in: the threads that a plan may count on. Goes out: a ``Profile``, or ``Disturbed``. The measurement runs in a thread of its
own: the one that asks is in the middle of tracing a function, and JAX keeps what it is tracing for each thread.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from kitsune_jax.profile import calls, kernels, machine_info, xla
from kitsune_jax.profile.model import Profile, numbers_of
from kitsune_jax.profile.timing import MOST_DOUBTFUL, Passes
from kitsune_jax.targets.cpu import runtime

# Of all numbers, the most that may be doubtful; and of the time in which it wanted a core, the least that a thread had one: of a
# profile that is kept, and of one that this process uses. Below it XLA's threads run one after the other instead of beside each
# other, which takes its kernels up to twice as long, and not ours: with 20 programs on two cores a measurement changed 15 of 120
# choices, and a shipped profile 13 (a Xeon with AMX).
_KEPT, _USED = (MOST_DOUBTFUL, 0.85), (0.3, 0.45)
# In which passes follow each other: usually, and where many numbers are still another one in every pass. Two passes are the least.
_SECONDS, _MOST_SECONDS = 3.0, 15.0
# How long an interrupted measurement may go on: XLA may be compiling what it was about to time.
_MOST_LEFT = 20.0


class Disturbed(RuntimeError):
    """The machine could not be measured as it should. The message says why, as a clause. ``profile``: what was found all the same,
    where it is nearer to the machine than any shipped one."""

    def __init__(self, why: str, profile: Profile | None = None):
        super().__init__(why)
        self.profile = profile


def measure(workers: int) -> Profile:
    """Measure this machine with ``workers`` threads busy; pass by pass until two agree. Raises ``Disturbed`` where too many
    numbers are another one in every pass."""
    result: list[Profile | BaseException] = []
    stop = threading.Event()

    def run() -> None:
        try:
            result.append(_passes(workers, stop))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, name="kitsune_jax profile", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)  # without a limit, Python 3.13.0 saw one Ctrl-C in ten only when all was measured
    finally:  # After Ctrl-C, too: where a process ends while a thread of Python's is in C++, Python 3.13 and older abort it
        stop.set()
        thread.join(_MOST_LEFT)
    found = result[0]
    if isinstance(found, Profile):
        return found
    if isinstance(found, Disturbed):
        raise found
    raise Disturbed(f"measuring this machine failed ({type(found).__name__}: {found})") from found


def _passes(workers: int, stop: threading.Event) -> Profile:
    """``stop``: nobody waits for it any more."""

    def go_on() -> None:
        if stop.is_set():
            raise Disturbed("measuring this machine was interrupted")

    extension = runtime.extension()
    if extension is None:
        raise Disturbed("the CPU extension is missing")
    found = Passes(functools.partial(_reference, extension, workers, go_on), stolen=machine_info.stolen_seconds, cores=workers)
    ours = kernels.pieces(extension, workers)
    before = machine_info.ran_and_waited()
    found.run(ours)
    theirs = xla.pieces(workers, go_on)  # compiling takes a second or more: another moment of the machine
    now = time.perf_counter()
    found.settle((*ours, *theirs), now + _SECONDS, now + _MOST_SECONDS)
    seconds, doubtful = found.seconds(), found.doubtful()
    numbers = kernels.numbers(ours, seconds) | xla.numbers(theirs, seconds)
    _without_what_surrounds(numbers)
    l1, l2, l3 = machine_info.cache_sizes()
    profile = Profile(
        name=f"measured-{machine_info.slug()}-{workers}",
        cpu=machine_info.model_name(),
        isa=extension.isa(),
        workers=workers,
        l1=l1,
        l2=l2,
        l3=l3,
        numbers=numbers_of(numbers),
        passes=found.made,
        doubtful=numbers_of(doubtful),
    )
    share = _share(before, machine_info.ran_and_waited())
    if not _is_within(_KEPT, len(doubtful) / len(seconds), share):
        raise Disturbed(
            f"other programs were running while this machine was measured (a thread had {share:.0%} of a core, and {len(doubtful)} "
            f"of {len(seconds)} numbers were another one in each of {found.made} passes); "
            "python -m kitsune_jax.profile measures again",
            profile if _is_within(_USED, len(doubtful) / len(seconds), share) else None,
        )
    return profile


def _reference(extension: Any, workers: int, go_on: Callable[[], None]) -> float:
    go_on()
    return kernels.reference(extension, workers)


def _is_within(limits: tuple[float, float], doubtful: float, share: float) -> bool:
    return doubtful <= limits[0] and share >= limits[1]


def _share(before: tuple[float, float], behind: tuple[float, float]) -> float:
    """Of the time in which this thread wanted a core, how long it had one."""
    ran, waited = (b - a for a, b in zip(before, behind, strict=True))
    return ran / (ran + waited) if ran + waited > 0 else 1.0


def _without_what_surrounds(numbers: dict[str, float]) -> None:
    """Take from each number the time of what was measured with it."""

    def less(key: str, other: float, least: float) -> None:
        numbers[key] = max(numbers[key] - other, least)

    # The call was timed with the tile that its workers multiply meanwhile.
    less("call", numbers["gemm/float32/widened/64x64"], numbers["call/short"])
    # Waiting for a thread that has to wake up takes no less than waiting for those of a pipeline, which are awake. Where other
    # programs leave one core nobody has to wake up, and it was measured as nothing.
    awake = numbers["call"] - numbers["call/short"]
    numbers["xla/call/handed"] = max(numbers["xla/call/handed"], awake)
    less("call/layer", numbers["call/short"], 1e-8)
    numbers["call/layer"] = max(numbers["call/layer"] / (xla.CHAIN - 1), 1e-8)
    less("xla/gather/far", numbers["xla/gather/64"], 0.1 * numbers["xla/gather/64"])
    few = numbers["fold/short/float32"]
    for width in calls.ACCESSED:
        folded = few + (width - calls.ACCESSED[0]) * numbers["fold/row/float32"]  # rows that were taken were added up
        read = 2 * width * numbers["copy/l3"]  # rows that were folded were read: 4 bytes an element, half of a copy
        for level in ("l2", "l3"):
            less(f"take/{level}/{width}", folded, 0.2 * numbers[f"take/{level}/{width}"])
        for key in (f"folded/{width}", f"runs/{width}"):
            less(key, read, 0.2 * numbers[key])

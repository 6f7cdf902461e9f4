"""Measuring a machine: our kernels and XLA's, in two or three seconds.

Comes in: the threads that a plan may count on. Goes out: a ``Profile``, or ``Disturbed``. The measurement runs in a thread of its
own: the one that asks is in the middle of tracing a function, and JAX keeps what it is tracing for each thread.
"""

from __future__ import annotations

import threading

from kitsune_jax.profile import calls, kernels, machine_info, xla
from kitsune_jax.profile.model import Profile, numbers_of
from kitsune_jax.profile.timing import Log
from kitsune_jax.targets.cpu import runtime

_TRIES = 2
# Of its core, what a thread has at least where nothing else runs.
LEAST_SHARE = 0.85


class Disturbed(RuntimeError):
    """The machine could not be measured. The message says why, as a clause."""


def measure(workers: int) -> Profile:
    """Measure this machine with ``workers`` threads busy; again where other programs were in the way. Raises ``Disturbed``."""
    result: list[Profile | BaseException] = []

    def run() -> None:
        try:
            result.append(_quiet(workers))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, name="kitsune_jax profile", daemon=True)
    thread.start()
    thread.join()  # Ctrl-C ends the wait; the thread then ends with the process
    found = result[0]
    if isinstance(found, Profile):
        return found
    if isinstance(found, Disturbed):
        raise found
    raise Disturbed(f"measuring this machine failed ({type(found).__name__}: {found})") from found


def _quiet(workers: int) -> Profile:
    extension = runtime.extension()
    if extension is None:
        raise Disturbed("the CPU extension is missing")
    for _ in range(_TRIES):
        log = Log()
        shares = [kernels.share(extension, workers, LEAST_SHARE)]
        numbers = kernels.measure(extension, workers, log)
        shares.append(kernels.share(extension, workers, LEAST_SHARE))
        numbers |= xla.measure(log, workers)
        shares.append(kernels.share(extension, workers, LEAST_SHARE))
        _without_what_surrounds(numbers)
        share = min(shares)
        if share >= LEAST_SHARE and not log.is_disturbed:
            l1, l2, l3 = machine_info.cache_sizes()
            name = f"measured-{machine_info.slug()}-{workers}"
            return Profile(name, machine_info.model_name(), extension.isa(), workers, l1, l2, l3, numbers_of(numbers))
    raise Disturbed(
        f"other programs were running while this machine was measured (a thread had {share:.0%} of a core, and "
        f"{len(log.disturbed)} of {log.made} numbers would not settle); python -m kitsune_jax.profile measures again"
    )


def _without_what_surrounds(numbers: dict[str, float]) -> None:
    """Take from each number the time of what was measured with it."""

    def less(key: str, other: float, least: float) -> None:
        numbers[key] = max(numbers[key] - other, least)

    # The call was timed with the tile that its workers multiply meanwhile.
    less("call", numbers["gemm/float32/widened/64x64"], numbers["call/short"])
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

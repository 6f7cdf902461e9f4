"""Measures this machine, all of it or one group of numbers.

Comes in: the name of a group, and the numbers that are known already. Goes out: a ``MachineProfile`` with the numbers of that
group. Numbers form groups by what needs them (``group_of``): a float32 network needs neither kernels for bfloat16 nor sums by
index. All groups took 14 s on a virtual Zen 4, those of a float32 network 1.6.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

from kitsune_jax.progress import in_own_thread
from kitsune_jax.targets.cpu import call
from kitsune_jax.targets.cpu.profile import kernels, xla
from kitsune_jax.targets.cpu.profile import profile as profiles
from kitsune_jax.targets.cpu.profile.kernels import MOST_DOUBTFUL, Passes, Piece
from kitsune_jax.targets.cpu.profile.profile import MachineProfile, numbers_of

# --- Groups -----------------------------------------------------------------------------------------------------------------------

KERNELS, CALLS, _ROWS = "kernels", "calls", "rows"
_DTYPES = ("float64", "bfloat16", "float16")
_BASIC = ("move", "tanh", "arithmetic")  # loops by which those of other operators are estimated


def group_of(key: str) -> str:
    """The group of the number called ``key``: those that are measured together.

    >>> group_of("gemm/bfloat16/dots/64x64"), group_of("xla/loop/erf/float32"), group_of("xla/call")
    ('kernels/bfloat16', 'xla/loop/erf/float32', 'calls')
    """
    kind, *rest = key.split("/")
    if kind == "call" or key in ("xla/call", "xla/call/handed", "xla/kernel", "xla/start"):
        return CALLS
    if kind in ("take", "folded", "runs", "order"):
        return _ROWS
    if kind in ("picked", "dot"):
        return kind
    if kind != "xla":
        # A machine's rates are asked for by every plan.
        dtype = "float64" if kind == "vector64" else next((d for d in _DTYPES if d in rest), "")
        return KERNELS if not dtype or kind == "gemm" and rest[-1] == "512x512" else f"{KERNELS}/{dtype}"
    kind, rest = rest[0], rest[1:]
    if kind in ("loop", "reduce"):
        return f"xla/loop/basic/{rest[1]}" if rest[0] in _BASIC else key
    if kind in ("gather", "scatter"):
        return "xla/rows"
    if kind == "while":
        return "xla/while"
    if kind == "dot":
        rows, _, n = map(int, rest[1].split("x"))
        size = "narrow" if n < 8 else "few" if rows < 64 else "far" if rows > 4096 else "square"
        return f"xla/dot/{size}/{rest[0]}"
    return f"xla/{kind}/{rest[0]}"


def groups_before(group: str) -> tuple[str, ...]:
    """The groups whose numbers are subtracted from those of ``group``."""
    if group.startswith(KERNELS):
        return ()
    return (KERNELS,) if group == CALLS else (KERNELS, CALLS) if group == _ROWS else (CALLS,)


def keys(workers: int) -> tuple[str, ...]:
    """The names of all numbers that ``measure`` may find, in ascending order. Raises ``Disturbed`` without the CPU extension."""
    found = {piece.key for piece in kernels.pieces(_extension(), workers)} | {program.key for program in xla.programs(workers)}
    return tuple(sorted(key for key in found if not key.startswith(kernels.RELU)))


# --- Measuring --------------------------------------------------------------------------------------------------------------------

# The most numbers that may be doubtful, and the least part of its wanted time that a thread had a core, for numbers that are kept.
# Below, XLA's threads run one after the other, and its kernels, not ours, seem up to twice as slow: beside 20 programs on two cores
# a measurement changed 15 of 120 choices (Xeon with AMX), as many as a shipped profile (13).
_KEPT = (MOST_DOUBTFUL, 0.85)
_LEAST_WAITED = 0.02  # seconds that a thread waits for its core on a machine of its own
# Seconds of passes: of all groups usually, and where many numbers still differ in every pass; of one group beyond two passes.
_SECONDS, _MOST_SECONDS, _GROUP_SECONDS = 3.0, 15.0, 0.1


class Disturbed(RuntimeError):
    """The machine could not be measured well. The message is the reason, as a clause. ``profile``: the numbers that were measured,
    if any."""

    def __init__(self, why: str, profile: MachineProfile | None = None):
        super().__init__(why)
        self.profile = profile


def measure(workers: int, group: str | None = None, known: MachineProfile | None = None) -> MachineProfile:
    """Measure the numbers of ``group``, or all, with ``workers`` threads busy, pass by pass until two agree.

    ``known``: a profile with those of ``groups_before(group)``, whose ``made`` and ``reference`` go on. Raises ``Disturbed`` if too
    many numbers differ in all passes or other programs had the cores.
    """
    stop = threading.Event()
    found = in_own_thread(functools.partial(_passes, workers, group, known, stop), "kitsune_jax profile", stop.set)
    if isinstance(found, MachineProfile):
        return found
    if isinstance(found, Disturbed):
        raise found
    raise Disturbed(f"measuring this machine failed ({type(found).__name__}: {found})") from found


def _extension() -> Any:
    extension = call.extension()
    if extension is None:
        raise Disturbed("the CPU extension is missing")
    return extension


def _passes(workers: int, group: str | None, known: MachineProfile | None, stop: threading.Event) -> MachineProfile:
    """The measurement. ``stop``: set when no thread waits for it any more."""

    def go_on() -> None:
        if stop.is_set():
            raise Disturbed("measuring this machine was interrupted")

    def wanted(key: str) -> bool:
        return group is None or group_of(key) == group

    extension = _extension()

    def reference() -> float:
        go_on()
        return kernels.reference(extension, workers)

    best = known.reference if known is not None and known.reference else float("inf")
    found = Passes(reference, stolen=profiles.stolen_seconds, cores=workers, best=best)
    ours = [piece for piece in kernels.pieces(extension, workers) if wanted(piece.key)]
    before = profiles.ran_and_waited()
    found.run(ours)
    theirs = xla.pieces(workers, go_on, wanted)  # compiling all takes some seconds
    now, seconds = time.perf_counter(), _SECONDS if group is None else 0.0
    most = _MOST_SECONDS if group is None else _GROUP_SECONDS
    found.settle((*ours, *theirs), now + seconds, now + most)
    profile = _profile(workers, found, ours, theirs, known)
    share, differ, measured = _share(before, profiles.ran_and_waited()), len(profile.doubtful), len(found.seconds())
    if differ > max(_KEPT[0] * measured, 1) or share < _KEPT[1]:
        raise Disturbed(
            f"other programs were running while this machine was measured (a thread had {share:.0%} of a core, and {differ} "
            f"of {measured} numbers differed in each of {found.made} passes); python -m kitsune_jax machine measures again",
            profile,
        )
    return profile


def _profile(workers: int, found: Passes, ours: list[Piece], theirs: list[Piece], known: MachineProfile | None) -> MachineProfile:
    seconds, before = found.seconds(), {} if known is None else dict(known.numbers)
    idle = seconds["xla/call"] if "xla/call" in seconds else before.get("xla/call", 0.0)
    numbers = kernels.numbers(ours, seconds) | xla.numbers(theirs, seconds, idle)
    _subtract_other_work(numbers, before)
    return dataclasses.replace(
        empty(workers) if known is None else known,
        numbers=numbers_of(numbers),
        passes=found.made,
        doubtful=numbers_of(found.doubtful()),
        reference=found.best,
    )


def empty(workers: int) -> MachineProfile:
    """A new profile of this machine without numbers."""
    l1, l2, l3 = profiles.cache_sizes()
    return MachineProfile(
        name=f"measured-{profiles.slug()}-{workers}",
        cpu=profiles.model_name(),
        isa=call.isa(),
        workers=workers,
        l1=l1,
        l2=l2,
        l3=l3,
        numbers=(),
        made=secrets.token_hex(8),
        measured_at=float(round(time.time())),
    )


def _share(before: tuple[float, float], behind: tuple[float, float]) -> float:
    """The part of the time in which this thread wanted a core that it had one."""
    ran, waited = (b - a for a, b in zip(before, behind, strict=True))
    return ran / (ran + waited) if waited > _LEAST_WAITED else 1.0


def _subtract_other_work(numbers: dict[str, float], known: Mapping[str, float]) -> None:
    """Subtract from each of ``numbers`` the time of other work in its measurement, by ``numbers`` or by those ``known`` before."""

    def at(key: str) -> float:
        return numbers[key] if key in numbers else known[key]

    def less(key: str, other: float, least: float) -> None:
        numbers[key] = max(numbers[key] - other, least)

    if "call" in numbers:
        # The measured call includes the tile that each worker multiplies.
        less("call", at("gemm/float32/widened/64x64"), numbers["call/short"])
        # Waking a thread takes no less than waiting for a pipeline's threads, which are awake. Where other programs leave one core,
        # no thread has to wake up, and the measurement is too low.
        awake = numbers["call"] - numbers["call/short"]
        numbers["xla/call/handed"] = max(numbers["xla/call/handed"], awake)
        less("call/layer", numbers["call/short"], 1e-8)
        numbers["call/layer"] = max(numbers["call/layer"] / (xla.CHAIN - 1), 1e-8)
    if "xla/gather/far" in numbers:
        less("xla/gather/far", numbers["xla/gather/64"], 0.1 * numbers["xla/gather/64"])
    if "order" in numbers:
        few = at("fold/short/float32")
        for width in kernels.ACCESSED:
            folded = few + (width - kernels.ACCESSED[0]) * at("fold/row/float32")  # the rows that were read were also summed
            read = 2 * width * at("copy/l3")  # the rows that were folded were also read: 4 bytes an element, half of a copy
            for level in ("l2", "l3"):
                less(f"take/{level}/{width}", folded, 0.2 * numbers[f"take/{level}/{width}"])
            for key in (f"folded/{width}", f"runs/{width}"):
                less(key, read, 0.2 * numbers[key])

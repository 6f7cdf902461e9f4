"""The profile of this process: the one that ``KITSUNE_PROFILE`` names, else one kept on disk, else one measured now in 7 s.

``at_hand`` returns it. A machine is measured once for each version of JAX and of this package, by one thread of one process while
the others wait. A process has one profile for its whole life (also after a fork), and all processes of a distributed program have
the same. Failures of a clock or a disk never fail a user's program: ``notes`` then says why another profile is used.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import os
import threading
import time

import jax
import jaxlib

from kitsune_jax import _compat, config
from kitsune_jax.cache import Cache
from kitsune_jax.cache import key as cache_key
from kitsune_jax.targets.cpu import bytecode, call
from kitsune_jax.targets.cpu.profile import kernels, xla
from kitsune_jax.targets.cpu.profile import profile as profiles
from kitsune_jax.targets.cpu.profile.kernels import MOST_DOUBTFUL, Passes
from kitsune_jax.targets.cpu.profile.profile import FORMAT, Profile, numbers_of

# --- Measuring --------------------------------------------------------------------------------------------------------------------

# The most numbers that may be doubtful, and the least part of its wanted time that a thread had a core: for a profile that is kept,
# and for one that only this process uses. Below, XLA's threads run one after the other, and its kernels, not ours, seem up to twice
# as slow: beside 20 programs on two cores a measurement changed 15 of 120 choices, a shipped profile 13 (Xeon with AMX).
_KEPT, _USED = (MOST_DOUBTFUL, 0.85), (0.3, 0.45)
# Seconds of passes: usually, and where many numbers still differ in every pass.
_SECONDS, _MOST_SECONDS = 3.0, 15.0


class Disturbed(RuntimeError):
    """The machine could not be measured well. The message says why, as a clause. ``profile``: the measurement, if it is nearer to
    the machine than any shipped profile."""

    def __init__(self, why: str, profile: Profile | None = None):
        super().__init__(why)
        self.profile = profile


def measure(workers: int) -> Profile:
    """Measure this machine with ``workers`` threads busy, pass by pass until two agree. Raises ``Disturbed`` if too many differ."""
    stop = threading.Event()
    found = kernels.in_own_thread(functools.partial(_passes, workers, stop), "kitsune_jax profile", stop.set)
    if isinstance(found, Profile):
        return found
    if isinstance(found, Disturbed):
        raise found
    raise Disturbed(f"measuring this machine failed ({type(found).__name__}: {found})") from found


def _passes(workers: int, stop: threading.Event) -> Profile:
    """The measurement. ``stop``: set when no thread waits for it any more."""

    def go_on() -> None:
        if stop.is_set():
            raise Disturbed("measuring this machine was interrupted")

    extension = call.extension()
    if extension is None:
        raise Disturbed("the CPU extension is missing")

    def reference() -> float:
        go_on()
        return kernels.reference(extension, workers)

    found = Passes(reference, stolen=profiles.stolen_seconds, cores=workers)
    ours = kernels.pieces(extension, workers)
    before = profiles.ran_and_waited()
    found.run(ours)
    theirs = xla.pieces(workers, go_on)  # compiling takes a second or more
    now = time.perf_counter()
    found.settle((*ours, *theirs), now + _SECONDS, now + _MOST_SECONDS)
    seconds, doubtful = found.seconds(), found.doubtful()
    numbers = kernels.numbers(ours, seconds) | xla.numbers(theirs, seconds)
    _subtract_other_work(numbers)
    l1, l2, l3 = profiles.cache_sizes()
    profile = Profile(
        name=f"measured-{profiles.slug()}-{workers}",
        cpu=profiles.model_name(),
        isa=extension.isa(),
        workers=workers,
        l1=l1,
        l2=l2,
        l3=l3,
        numbers=numbers_of(numbers),
        passes=found.made,
        doubtful=numbers_of(doubtful),
    )
    share, differ = _share(before, profiles.ran_and_waited()), len(doubtful) / len(seconds)
    if differ > _KEPT[0] or share < _KEPT[1]:
        raise Disturbed(
            f"other programs were running while this machine was measured (a thread had {share:.0%} of a core, and {len(doubtful)} "
            f"of {len(seconds)} numbers differed in each of {found.made} passes); "
            "python -m kitsune_jax.profile measures again",
            profile if differ <= _USED[0] and share >= _USED[1] else None,
        )
    return profile


def _share(before: tuple[float, float], behind: tuple[float, float]) -> float:
    """The part of the time in which this thread wanted a core that it had one."""
    ran, waited = (b - a for a, b in zip(before, behind, strict=True))
    return ran / (ran + waited) if ran + waited > 0 else 1.0


def _subtract_other_work(numbers: dict[str, float]) -> None:
    """Subtract from each number the time of other work in its measurement."""

    def less(key: str, other: float, least: float) -> None:
        numbers[key] = max(numbers[key] - other, least)

    # The measured call includes the tile that each worker multiplies.
    less("call", numbers["gemm/float32/widened/64x64"], numbers["call/short"])
    # Waking a thread takes no less than waiting for a pipeline's threads, which are awake. Where other programs leave one core, no
    # thread has to wake up, and the measurement is too low.
    awake = numbers["call"] - numbers["call/short"]
    numbers["xla/call/handed"] = max(numbers["xla/call/handed"], awake)
    less("call/layer", numbers["call/short"], 1e-8)
    numbers["call/layer"] = max(numbers["call/layer"] / (xla.CHAIN - 1), 1e-8)
    less("xla/gather/far", numbers["xla/gather/64"], 0.1 * numbers["xla/gather/64"])
    few = numbers["fold/short/float32"]
    for width in kernels.ACCESSED:
        folded = few + (width - kernels.ACCESSED[0]) * numbers["fold/row/float32"]  # the rows that were read were also summed
        read = 2 * width * numbers["copy/l3"]  # the rows that were folded were also read: 4 bytes an element, half of a copy
        for level in ("l2", "l3"):
            less(f"take/{level}/{width}", folded, 0.2 * numbers[f"take/{level}/{width}"])
        for key in (f"folded/{width}", f"runs/{width}"):
            less(key, read, 0.2 * numbers[key])


# --- The profile of this process --------------------------------------------------------------------------------------------------

_SUFFIX = ".profile.json"


@dataclasses.dataclass(frozen=True, slots=True)
class _FoundProfile:
    profile: Profile
    notes: tuple[str, ...]


_lock = threading.Lock()
_known: dict[tuple[int, str], _FoundProfile] = {}


def _after_fork() -> None:
    """Replace the lock, which another thread may hold in the parent and nobody would release in the child."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def at_hand() -> Profile:
    """The profile of the CPU that this process runs on, with the threads that a plan may use.

    Raises ``ValueError`` where ``KITSUNE_PROFILE`` names no profile or ``KITSUNE_NUM_THREADS`` is no positive integer.
    """
    return _found().profile


def notes() -> tuple[str, ...]:
    """Remarks on the profile for readers of a plan; none where it was measured here."""
    return _found().notes


def _found() -> _FoundProfile:
    name, workers = config.profile(), config.num_threads()
    if name:
        name = name if "-" in name else f"{name}-{workers}"
        return _FoundProfile(profiles.shipped(name), (f"planned for the shipped profile {name}, as KITSUNE_PROFILE says",))
    asked = (workers, call.isa())
    if asked not in _known:
        with _lock:
            if asked not in _known:
                _known[asked] = _agree_on_profile(workers)
    return _known[asked]


def _agree_on_profile(workers: int) -> _FoundProfile:
    """The profile of this process; in a distributed program, of its first process."""
    client = _compat.distributed_client()
    if client is None:
        return _local_profile(workers)
    index, store = client
    where = f"kitsune_jax/profile/{config.__version__}"
    try:
        if index == 0:
            found = _local_profile(workers)
            store.key_value_set(where, json.dumps([found.profile.to_json(), found.notes]))
            return found
        text, told = json.loads(store.blocking_key_value_get(where, _WAIT_MS))
        profile = Profile.from_json(text)
        return _FoundProfile(profile, (*told, "planned with the profile of process 0, so that all processes have the same plan"))
    except Exception as error:  # the coordinator's own errors, or a process 0 that never plans
        return _shipped_because(f"the processes could not agree on one ({error})", workers)


_WAIT_MS = 120_000
_MEASURING = ("kernels", "xla", "store")


def _local_profile(workers: int) -> _FoundProfile:
    if call.extension() is None:
        return _shipped_because("the CPU extension is missing", workers)
    if not _compat.has_cpu_backend():
        return _shipped_because("JAX has no CPU backend here", workers)
    try:
        return _FoundProfile(stored(workers), ())
    except Disturbed as why:
        if why.profile is not None:
            return _FoundProfile(why.profile, (f"planned with a measurement that is not kept: {why}",))
        config.logger.info("the shipped profile %s is used: %s", shipped_name(workers), why)
        return _shipped_because(str(why), workers)


def _shipped_because(why: str, workers: int) -> _FoundProfile:
    name = shipped_name(workers)
    return _FoundProfile(profiles.shipped(name), (f"planned for the shipped profile {name}: {why}",))


def shipped_name(workers: int) -> str:
    """The shipped profile that is most like this machine."""
    return f"{profiles.family(call.isa())}-{workers}"


def stored(workers: int, again: bool = False) -> Profile:
    """The profile on disk, measured first where there is none (or ``again``). Raises ``Disturbed``, and then keeps nothing."""
    folder = config.cache_dir()
    cache = Cache(None if folder is None else folder.absolute() / "profiles", what="measured machine profiles", made="measured")
    name = identity(workers)

    def make() -> bytes:
        start = time.perf_counter()
        profile = measure(workers)
        config.logger.info("measured this machine in %.1f s: %s", time.perf_counter() - start, profile.name)
        return profile.to_json().encode()

    content = cache.put(name, _SUFFIX, make()) if again else cache.get(name, _SUFFIX, make)
    return Profile.from_json(content.decode())


def identity(workers: int) -> str:
    """A key of everything that a measurement depends on."""
    return cache_key(
        format=str(FORMAT),
        cpu=profiles.model_name(),
        isas=",".join(call.isas()),
        isa=call.isa(),
        caches=str(profiles.cache_sizes()),
        workers=str(workers),
        program=str(bytecode.VERSION),
        package=config.__version__,
        kernels=call.digest(),
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        flags=config.xla_flags(),
        measured=_measurement(),
    )


@functools.cache
def _measurement() -> str:
    """A hash of the measuring code, since other pieces make another profile; "" for a package that is not in files."""
    folder = importlib.resources.files(__package__)
    try:
        return cache_key(**{name: folder.joinpath(f"{name}.py").read_bytes() for name in _MEASURING})
    except OSError:
        return ""

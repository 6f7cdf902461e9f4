"""Which profile the plans of this process are made with: one that was named, one kept on disk, or one measured now.

Comes in: the machine, and what ``KITSUNE_PROFILE`` says. Goes out: ``at_hand``. Invariants: a machine is measured once for each
version of JAX and of this package, by one thread of one process while the others wait; a process has one profile for its whole life
(also after a fork); all processes of one distributed program have the same; and nothing that can go wrong with a clock or a disk
fails a user's program: then the shipped profile of the family is used, or what was
measured beside other programs and is not kept, and ``notes`` says why.
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

from kitsune_jax import _compat, config, version
from kitsune_jax.cache import Cache
from kitsune_jax.cache import key as cache_key
from kitsune_jax.profile import machine_info, shipped
from kitsune_jax.profile.measure import Disturbed, measure
from kitsune_jax.profile.model import FORMAT, Profile
from kitsune_jax.targets.cpu import bytecode, runtime

_SUFFIX = ".profile.json"


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    profile: Profile
    notes: tuple[str, ...]


_lock = threading.Lock()
_known: dict[tuple[int, str], _Found] = {}


def _after_fork() -> None:
    """A fork may have happened while another thread held the lock, which nobody would release in the child."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def at_hand() -> Profile:
    """The profile of the CPU that this process runs on, with the threads that a plan may count on.

    Raises ``ValueError`` where ``KITSUNE_PROFILE`` names no profile or ``KITSUNE_NUM_THREADS`` is no positive integer.
    """
    return _found().profile


def notes() -> tuple[str, ...]:
    """What a reader of a plan should know about the profile behind it; nothing where it was measured here."""
    return _found().notes


def _found() -> _Found:
    name, workers = config.profile(), config.num_threads()
    if name:
        name = name if "-" in name else f"{name}-{workers}"
        return _Found(shipped.shipped(name), (f"planned for the shipped profile {name}, as KITSUNE_PROFILE says",))
    asked = (workers, runtime.isa())
    found = _known.get(asked)
    if found is None:
        with _lock:
            found = _known.get(asked)
            if found is None:
                found = _known[asked] = _agreed(workers)
    return found


def _agreed(workers: int) -> _Found:
    """The profile of this process; in a distributed program, that of its first process."""
    client = _compat.distributed_client()
    if client is None:
        return _of_this_machine(workers)
    index, store = client
    where = f"kitsune_jax/profile/{version.__version__}"
    try:
        if index == 0:
            found = _of_this_machine(workers)
            store.key_value_set(where, json.dumps([found.profile.to_json(), found.notes]))
            return found
        text, told = json.loads(store.blocking_key_value_get(where, _WAIT_MS))
        profile = Profile.from_json(text)
        return _Found(profile, (*told, "planned with the profile of process 0, so that all processes have the same plan"))
    except Exception as error:  # the coordinator's own errors; and a process 0 that never plans
        family = shipped_name(workers)
        why = f"the processes could not agree on one ({error})"
        return _Found(shipped.shipped(family), (f"planned for the shipped profile {family}: {why}",))


_WAIT_MS = 120_000
_MEASURING = ("kernels", "xla", "calls", "timing", "measure")


def _of_this_machine(workers: int) -> _Found:
    family = shipped_name(workers)
    extension = runtime.extension()
    if extension is None or not _compat.has_cpu_backend():
        why = "the CPU extension is missing" if extension is None else "JAX has no CPU backend here"
        return _Found(shipped.shipped(family), (f"planned for the shipped profile {family}: {why}",))
    try:
        return _Found(stored(workers), ())
    except Disturbed as why:
        if why.profile is not None:
            return _Found(why.profile, (f"planned with a measurement that is not kept: {why}",))
        config.logger.info("the shipped profile %s is used: %s", family, why)
        return _Found(shipped.shipped(family), (f"planned for the shipped profile {family}: {why}",))


def shipped_name(workers: int) -> str:
    """The shipped profile that is most like this machine."""
    return f"{machine_info.family(runtime.isa())}-{workers}"


def stored(workers: int, again: bool = False) -> Profile:
    """The profile on disk, measured first where there is none (or ``again``). Raises ``Disturbed``, and keeps nothing then."""
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
    """What a profile is measured for: equal for two processes only if they would measure the same."""
    return cache_key(
        format=str(FORMAT),
        cpu=machine_info.model_name(),
        isas=",".join(runtime.isas()),
        isa=runtime.isa(),
        caches=str(machine_info.cache_sizes()),
        workers=str(workers),
        program=str(bytecode.VERSION),
        package=version.__version__,
        kernels=runtime.digest(),
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        flags=config.xla_flags(),
        measured=_measurement(),
    )


@functools.cache
def _measurement() -> str:
    """A hash of what measures: another selection of numbers is another profile. "" for a package that is not in files."""
    folder = importlib.resources.files(__package__)
    try:
        return cache_key(
            **{name: folder.joinpath(f"{name}.py").read_bytes() for name in ("kernels", "xla", "calls", "timing", "measure")}
        )
    except OSError:
        return ""

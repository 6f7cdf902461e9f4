"""The profile of this process: the one that ``KITSUNE_PROFILE`` names, or that of the machine, kept on disk.

Comes in: the environment, the disk, and the numbers that a plan asks for. Goes out: ``at_hand``, a profile. Where the disk has no
number that a plan asks for, its group is measured then (``measure``), once for each version of JAX and of this package, by one
thread of one process while the others wait. Invariants: a process has one profile for its whole life (also after a fork), and all
processes of a distributed program have the same; failures of a clock or a disk never fail a user's program: ``notes`` then says why
other numbers are used.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping

import jax
import jaxlib

from kitsune_jax import _compat, config
from kitsune_jax.cache import Cache
from kitsune_jax.cache import key as cache_key
from kitsune_jax.progress import announced
from kitsune_jax.targets.cpu import bytecode, call
from kitsune_jax.targets.cpu.profile import profile as profiles
from kitsune_jax.targets.cpu.profile.measure import Disturbed, empty, group_of, groups_before, keys, measure
from kitsune_jax.targets.cpu.profile.profile import FORMAT, MachineProfile, numbers_of, table

# --- Numbers on demand ------------------------------------------------------------------------------------------------------------

_SUFFIX = ".profile.json"
_LINE = "measuring this machine, once, as far as this program needs it: a few seconds; KITSUNE_PROFILE=<family> avoids it"


class _OnDemand(Mapping[str, float]):
    """The numbers of this machine, each measured with its group when it is first looked up. From then on it is a constant.

    ``kept``: those that are on disk. Two of these are equal if they come from one measurement, however much of it they have.
    ``notes``: remarks on numbers that are not kept.
    """

    def __init__(self, kept: MachineProfile, cache: Cache, name: str):
        self.notes: tuple[str, ...] = ()
        self._kept = self._profile = kept
        self._cache, self._name = cache, name
        self._numbers = dict(kept.numbers)
        self._groups = set(map(group_of, self._numbers))
        self._keys = functools.cache(functools.partial(keys, kept.workers))

    def __getitem__(self, key: str) -> float:
        if key not in self._numbers:
            if key not in self._keys():
                raise KeyError(key)
            self._need(group_of(key))
        return self._numbers[key]  # or a KeyError, if this machine has no such kernel

    def __contains__(self, key: object) -> bool:
        return key in self._numbers or key in self._keys() and self.get(str(key)) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OnDemand) and other._profile.made == self._profile.made

    def __hash__(self) -> int:
        return hash(self._profile.made)

    def __repr__(self) -> str:
        return f"_OnDemand({self._profile.made})"

    def profile(self) -> MachineProfile:
        """The machine with these numbers."""
        return dataclasses.replace(self._profile, numbers=(), passes=0, doubtful=(), reference=0.0, on_demand=self)

    def complete(self) -> MachineProfile:
        """All numbers, as plain data."""
        for key in self._keys():
            self._need(group_of(key))
        return self._profile

    def _need(self, group: str) -> None:
        with _lock:
            if group in self._groups:
                return
            for before in groups_before(group):
                self._need(before)
            start = time.perf_counter()
            try:
                self._cache.update(self._name, _SUFFIX, functools.partial(self._with_group, group))
            except Disturbed as why:
                self._note(why)
                self._add(group, why.profile or profiles.shipped(shipped_name(self._profile.workers)))
            config.logger.debug("%s of this machine: measured or read in %.2f s", group, time.perf_counter() - start)

    def _with_group(self, group: str, content: bytes | None) -> bytes | None:
        """The entry on disk with the numbers of ``group``, or ``None`` where it has them. Raises ``Disturbed``."""
        kept = _parsed(content) or self._kept
        if group in set(map(group_of, dict(kept.numbers))):
            self._add(group, kept)
            return None
        with announced("profile", _LINE):
            found = measure(self._profile.workers, group, self._profile)
        self._add(group, found)
        return _joined(kept, found).to_json().encode()

    def _add(self, group: str, found: MachineProfile) -> None:
        numbers = {key: seconds for key, seconds in table(found).items() if group_of(key) == group}
        self._profile = _joined(self._profile, dataclasses.replace(found, numbers=numbers_of(numbers)))
        self._numbers |= numbers
        self._groups.add(group)

    def _note(self, why: Disturbed) -> None:
        if why.profile is not None:
            text = f"planned with measurements that are not kept: {why}"
        else:
            text = f"planned with numbers of the shipped profile {shipped_name(self._profile.workers)}: {why}"
            config.logger.info("%s", text)
        if not self.notes:
            self.notes = (text,)


def _joined(one: MachineProfile, other: MachineProfile) -> MachineProfile:
    """``one`` with the numbers of ``other`` that it lacks."""
    return dataclasses.replace(
        one,
        numbers=numbers_of(dict(other.numbers) | dict(one.numbers)),
        doubtful=numbers_of(dict(other.doubtful) | dict(one.doubtful)),
        passes=min(filter(None, (one.passes, other.passes)), default=0),
        reference=min(filter(None, (one.reference, other.reference)), default=0.0),
    )


def _parsed(content: bytes | None) -> MachineProfile | None:
    try:
        return None if content is None else MachineProfile.from_json(content.decode())
    except ValueError:  # of another format, though its key says the same
        return None


# --- The profile of this process --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _FoundProfile:
    profile: MachineProfile
    notes: tuple[str, ...]


_lock = threading.RLock()  # of the numbers, too: some need others
_known: dict[tuple[int, str], _FoundProfile] = {}


def _after_fork() -> None:
    """Replace the lock, which another thread may hold in the parent and nobody would release in the child."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def at_hand() -> MachineProfile:
    """The profile of the CPU that this process runs on, with the threads that a plan may use.

    Raises ``ValueError`` where ``KITSUNE_PROFILE`` names no profile or ``KITSUNE_NUM_THREADS`` is no positive integer.
    """
    return _found().profile


def notes() -> tuple[str, ...]:
    """Remarks on the profile for readers of a plan; none where it was measured here."""
    found = _found()
    return (*found.notes, *(found.profile.on_demand.notes if isinstance(found.profile.on_demand, _OnDemand) else ()))


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
            if isinstance(here := found.profile.on_demand, _OnDemand):  # nobody knows the plans of the others
                found = _FoundProfile(here.complete(), here.notes)
            store.key_value_set(where, json.dumps([found.profile.to_json(), found.notes]))
            return found
        text, told = json.loads(store.blocking_key_value_get(where, _WAIT_MS))
        profile = MachineProfile.from_json(text)
        return _FoundProfile(profile, (*told, "planned with the profile of process 0, so that all processes have the same plan"))
    except Exception as error:  # the coordinator's own errors, or a process 0 that never plans
        return _shipped_because(f"the processes could not agree on one ({error})", workers)


_WAIT_MS = 120_000
_MEASURING = ("kernels", "xla", "measure")


def _local_profile(workers: int) -> _FoundProfile:
    if call.extension() is None:
        return _shipped_because("the CPU extension is missing", workers)
    if not _compat.has_cpu_backend():
        return _shipped_because("JAX has no CPU backend here", workers)
    on_demand = _on_demand(workers)
    return _FoundProfile(on_demand.profile(), ())


def _shipped_because(why: str, workers: int) -> _FoundProfile:
    name = shipped_name(workers)
    return _FoundProfile(profiles.shipped(name), (f"planned for the shipped profile {name}: {why}",))


def shipped_name(workers: int) -> str:
    """The shipped profile that is most like this machine."""
    return f"{profiles.family(call.isa())}-{workers}"


def stored(workers: int, again: bool = False) -> MachineProfile:
    """All numbers of this machine: those on disk and the others, measured now; or all measured now if ``again``. Raises
    ``Disturbed`` if all were measured badly, and then keeps nothing."""
    if not again:
        return _on_demand(workers).complete()
    with announced("profile", "measuring all of this machine, once: about 15 s, and up to two minutes beside other programs"):
        profile = measure(workers)
    _cache().put(identity(workers), _SUFFIX, profile.to_json().encode())
    return profile


def _cache() -> Cache:
    folder = config.cache_dir()
    return Cache(None if folder is None else folder.absolute() / "profiles", what="measured machine profiles", made="measured")


def _on_demand(workers: int) -> _OnDemand:
    cache, name = _cache(), identity(workers)
    content = cache.get(name, _SUFFIX, lambda: empty(workers).to_json().encode())
    return _OnDemand(MachineProfile.from_json(content.decode()), cache, name)


def on_disk(workers: int) -> MachineProfile | None:
    """The numbers of this machine that are on disk, or ``None`` where there are none. Measures nothing."""
    return _parsed(_cache().find(identity(workers), _SUFFIX))


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

"""What the emulator counts of its launches, as a profiler would: accesses, bank conflicts, bytes by level, copies, fences, waits.

Comes in: launches of this process between ``start`` and ``stop``. Goes out: ``Counts`` of each. Invariants: counting changes
neither results nor schedules; the rules by which threads' accesses make a warp's, and the model of the caches, stand in
``cuda/emulator/src/counters.h`` and ``caches.h``; field names are those of ``counters_report.cc``.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
from collections.abc import Callable, Iterator

from kitsune_jax.targets.cuda import runtime
from kitsune_jax.targets.cuda.lower import Kernel

# L1 and shared memory of an SM together (CUDA C++ Programming Guide, "Shared Memory": compute capability 9.0 and 8.0).
UNIFIED_BYTES = {900: 256 << 10, 800: 192 << 10}
L2_BYTES = {900: 50 << 20, 800: 40 << 20}  # H100 and A100 whitepapers
LOADER = 0  # role; lanes are 1 to 3
GLOBAL = ("ld_global", "ld_l2", "st_global", "red_add", "cp_async")
SHARED = ("ld_shared", "st_shared", "ldmatrix", "stmatrix", "ld_cluster", "st_cluster", "st_async")


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """Accesses of ``width`` bytes a thread at one place of the source. ``stage`` is the rank of the CTA in its instance, ``role`` 0
    for the loader and from 1 on for the lanes; both are -1 before the kernel has said so. ``finish``: after the thread's last tile.

    ``requests`` are instructions of warps. Global accesses have ``sectors`` of 32 bytes and the name of a ``buffer``; accesses to
    shared memory have ``wavefronts``, and as ``ideal`` what they were without a bank conflict.
    """

    stage: int
    role: int
    finish: bool
    op: str
    width: int
    buffer: str
    file: str
    line: int
    requests: int
    threads: int
    bytes: int
    sectors: int
    wavefronts: int
    ideal: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that happened ``count`` times (of what all lanes of a warp do: once for the warp), by so many ``threads``.

    ``amount``: bytes of copies, bytes of shared memory that a ``wgmma`` reads; of waits, how many found that they had to wait.
    """

    stage: int
    role: int
    finish: bool
    name: str
    count: int
    threads: int
    amount: int


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of a buffer by level, in whole sectors. ``wanted``: asked of L1 by loads that it may serve. What is prefetched into L2
    is read from memory and not from L2."""

    name: str
    bytes: int
    wanted: int
    l2_read: int
    l2_written: int
    memory_read: int
    memory_written: int


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """One launch. ``l1``, ``l2``: bytes of the simulated caches; ``ok``: whether the launch came to its end."""

    grid: int
    block: int
    cluster: int
    shared_bytes: int
    seed: int
    l1: int
    l2: int
    ok: bool
    accesses: tuple[Access, ...]
    events: tuple[Event, ...]
    buffers: tuple[Traffic, ...]

    def named(self, name: Callable[[str], str]) -> Counts:
        """The same with other names of buffers."""
        accesses = tuple(dataclasses.replace(a, buffer=name(a.buffer)) if a.buffer else a for a in self.accesses)
        return dataclasses.replace(
            self, accesses=accesses, buffers=tuple(dataclasses.replace(b, name=name(b.name)) for b in self.buffers)
        )

    def buffer(self, name: str) -> Traffic:
        """Raises ``KeyError`` for a buffer that the launch has not touched."""
        for b in self.buffers:
            if b.name == name:
                return b
        raise KeyError(name)

    def count(self, prefix: str) -> int:
        """How often events happened whose name begins so."""
        return sum(e.count for e in self.events if e.name.startswith(prefix))

    def amount(self, name: str) -> int:
        return sum(e.amount for e in self.events if e.name == name)


def emulator() -> ctypes.CDLL:
    """The emulator's library, with the types of its counting functions declared. Raises ``RuntimeError`` before one is in use."""
    if runtime.emulator is None:
        raise RuntimeError("no emulator is in use: nothing was compiled for it yet")
    runtime.emulator.kitsune_emulator_start_counting.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    runtime.emulator.kitsune_emulator_start_counting.restype = None
    runtime.emulator.kitsune_emulator_stop_counting.restype = ctypes.c_char_p
    return runtime.emulator


def start(sm: int = 900, *, l1: int | None = None, l2: int | None = None) -> None:
    """Counts launches from now on, with the caches of a device of ``sm``, or of so many bytes: ``l1`` is L1 and shared memory."""
    emulator().kitsune_emulator_start_counting(l1 or UNIFIED_BYTES[sm], l2 or L2_BYTES[sm])


def stop() -> list[Counts]:
    """Ends counting. What was launched since ``start``, in order."""
    launches = json.loads(emulator().kitsune_emulator_stop_counting())
    return [
        Counts(
            **{
                **launch,
                "accesses": tuple(Access(**a) for a in launch["accesses"]),
                "events": tuple(Event(**e) for e in launch["events"]),
                "buffers": tuple(Traffic(**b) for b in launch["buffers"]),
            }
        )
        for launch in launches
    ]


@contextlib.contextmanager
def counting(sm: int = 900, *, l1: int | None = None, l2: int | None = None) -> Iterator[list[Counts]]:
    """Counts what is launched inside; the list is filled at the end."""
    counts: list[Counts] = []
    start(sm, l1=l1, l2=l2)
    try:
        yield counts
    finally:
        counts += stop()


def buffer_names(kernel: Kernel) -> Callable[[str], str]:
    """From the emulator's names ("operand 0", "result 1 from byte 256") to those in the kernel's source (in0, weights0, vectors,
    table0, out1, workspace). Buffers that share memory have a name of both.
    """
    operands = len(kernel.call.operands)

    def one(buffer: int, first: int) -> str:
        name = f"operand {buffer}" if buffer < operands else f"result {buffer - operands}"
        return f"{name} from byte {first}" if first else name

    known = {one(*place): name for place, name in zip(kernel.call.places, kernel.call.names, strict=True)}
    return lambda name: "/".join(known[part] for part in name.split("/"))

"""Machine models of CPUs: the numbers of a profile, by the names that planning knows.

Comes in: the name of a device, or a profile (``kitsune_jax.profile``). Goes out: a frozen ``CpuMachine``. Invariant: equal names
and equal profiles give equal models, so a plan is a pure function of the graph and the profile.
"""

from __future__ import annotations

import dataclasses
import functools

from kitsune_jax.ops.rounding import Rounding
from kitsune_jax.planning.machine import KIB, MIB, Machine, Place
from kitsune_jax.profile import rounding, shipped, store
from kitsune_jax.profile.kernels import TILE
from kitsune_jax.profile.model import Profile, with_least_times_of_xla
from kitsune_jax.targets.cpu.planning.xla_loops import Steps
from kitsune_jax.targets.cpu.planning.xla_program import Handed
from kitsune_jax.targets.cpu.planning.xla_rows import RowKernels

# glibc mallopt(3): M_MMAP_THRESHOLD grows to at most this; larger blocks are fresh pages at every call.
FAULT_THRESHOLD = 32 * MIB
# Of the last level, what a worker has at most: the largest share of a core of any CPU (32 MiB: 512 for 16 cores of an EPYC 9175F).
# A virtual machine of two cores is shown the 480 MiB of a whole socket, and waits for memory all the same: sums of 10^6 x 64
# numbers by index were modelled at 12 ms of XLA's one thread, which takes 27.
_MOST_SHARED = 32 * MIB
# Nominal: latencies are counted in cycles, of which a core of today makes 3 to 5 billion a second.
_CPU_CLOCK = 3.5e9
_SQUARE = 512
_CPU_SOURCES = (
    ("profile", "measured: kitsune_jax.profile; of a shipped one, kitsune_jax.profile.shipped says what it is made of"),
    ("places", "latencies of 4, 14 and 50 cycles (Zen and Ice Lake, vendors' optimisation guides)"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CpuMachine(Machine):
    """``fault_bandwidth``: of the first touch of fresh pages, all workers together; ``huge_fault_bandwidth``: of huge pages, which
    a pipeline asks for. ``fresh_bytes``: larger arrays of XLA's are fresh pages at every call. ``profile``: what all times are made
    of. ``rounding``: where 16-bit results are rounded, as XLA does. ``steps``: the regions are parts of a step of a loop that XLA
    runs, and so it runs that. ``row_kernels``: those of the program that the regions are parts of. ``handed``: whether XLA hands it
    to another thread. ``unwritten``: the values of it that XLA never has in memory.
    """

    fault_bandwidth: float
    huge_fault_bandwidth: float
    profile: Profile
    rounding: Rounding = rounding.KNOWN
    fresh_bytes: int = FAULT_THRESHOLD
    steps: Steps | None = None
    row_kernels: RowKernels = RowKernels()
    handed: Handed = Handed()
    unwritten: frozenset[int] = frozenset()


@functools.lru_cache(maxsize=64)
def cpu_of(profile: Profile, rounds: Rounding = rounding.KNOWN) -> CpuMachine:
    """The machine model of a CPU: the numbers of ``profile`` by the names that GPUs have as well. ``rounds``: where XLA rounds."""
    workers, seconds = profile.workers, profile.seconds

    def rate(dtype: str, way: str = "widened") -> float:
        return 2.0 * TILE * _SQUARE * _SQUARE / seconds(f"gemm/{dtype}/{way}/{_SQUARE}x{_SQUARE}")

    def moved(level: str) -> float:  # a copied byte is one read and one written
        return 2.0 / seconds(f"copy/{level}")

    f32 = rate("float32")
    ways = [w for w in ("widened", "dots", "tiles") if profile.get(f"gemm/bfloat16/{w}/{_SQUARE}x{_SQUARE}")]
    bf16 = max(rate("bfloat16", w) for w in ways)
    return CpuMachine(
        name=profile.name,
        platform="cpu",
        workers=workers,
        tensor_rates=(("float64", rate("float64")), ("bfloat16", bf16), ("other", f32)),
        local_bytes=profile.l2,
        shared_bytes=max(min(profile.l3, _MOST_SHARED * workers), profile.l2),
        shared_bandwidth=moved("l3") * workers,
        dram_bandwidth=moved("dram") * workers,
        places=(
            Place("l1", 4 / _CPU_CLOCK, moved("l1")),
            Place("l2", 14 / _CPU_CLOCK, moved("l2")),
            Place("l3", 50 / _CPU_CLOCK, moved("l3")),
        ),
        call_seconds=seconds("call"),
        kernel_seconds=seconds("xla/kernel"),
        fault_bandwidth=workers / seconds("touch"),
        huge_fault_bandwidth=workers / seconds("touch/huge"),
        sources=(*_CPU_SOURCES, ("caches", f"{profile.l1 // KIB} and {profile.l2 // KIB} KiB a core, {profile.l3 // KIB} KiB")),
        profile=profile,
        rounding=rounds,
    )


def least_times_of_xla(machine: CpuMachine) -> CpuMachine:
    """``machine`` with XLA's doubtful numbers as low as they may be; itself where none of them is doubtful."""
    profile = with_least_times_of_xla(machine.profile)
    if profile is machine.profile:
        return machine
    return dataclasses.replace(machine, profile=profile, kernel_seconds=profile.seconds("xla/kernel"))


def cpu_model(name: str) -> CpuMachine:
    """A fixed CPU, for tests and for planning elsewhere: ``"<family>-<cores>"``, a profile that comes with the package.

    Raises ``ValueError`` for a name that is not of this form.

    >>> cpu_model("avx2-8").workers
    8
    """
    return cpu_of(shipped.shipped(name))


def cpu_at_hand() -> CpuMachine:
    """The CPU this process runs on: as ``KITSUNE_PROFILE`` says, or as it was measured, now or before.

    Raises ``ValueError`` where ``KITSUNE_NUM_THREADS`` or ``KITSUNE_PROFILE`` mean nothing.
    """
    return cpu_of(store.at_hand(), rounding.at_hand())

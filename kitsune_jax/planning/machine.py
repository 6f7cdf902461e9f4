"""What a machine model is: the numbers that the planner knows about a device.

Comes in: nothing. Goes out: ``Machine``, of which each target makes its own.

Units: bytes, seconds, bytes per second, and operations per second (a fused multiply-add counts two). Rates are per worker: a worker
is a core on a CPU and a streaming multiprocessor (one resident CTA) on a GPU.
"""

from __future__ import annotations

import dataclasses

KIB, MIB = 1024, 1024 * 1024
Rates = tuple[tuple[str, float], ...]


def size_text(n: float) -> str:
    """``n`` bytes, for a reader.

    >>> size_text(227 * KIB), size_text(1.5 * MIB)
    ('227 KiB', '1.5 MiB')
    """
    return f"{n / MIB:.1f} MiB" if n >= MIB else f"{n / KIB:.0f} KiB"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where the entries of a queue can lie: hand-off latency, and bandwidth per worker."""

    name: str
    latency: float
    bandwidth: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device as the cost model sees it; each target's own machines know more.

    ``tensor_rates``: peak operations per second of one worker in matmuls, by dtype; ``"other"`` stands for dtypes that are not
    named. ``local_bytes`` is what one worker keeps on chip for itself (L2 of a core; shared memory of a CTA), ``shared_bytes`` the
    cache all workers share. ``sources`` says where each group of numbers is from.
    """

    name: str
    platform: str
    workers: int
    tensor_rates: Rates
    local_bytes: int
    shared_bytes: int
    shared_bandwidth: float  # all workers together
    dram_bandwidth: float  # all workers together, reads + writes
    places: tuple[Place, ...]  # nearest first
    call_seconds: float  # one pipeline call
    kernel_seconds: float  # gap between two kernels of the bulk-synchronous program
    sources: tuple[tuple[str, str], ...]
    fresh_seconds: float = 0.0  # a byte of an array of the program's that could be one within a call

    def rate(self, rates: Rates, dtype: str) -> float:
        """The entry of ``rates`` for ``dtype``, or for "other"."""
        table = dict(rates)
        return table.get(dtype, table["other"])

    def place(self, name: str) -> Place:
        """The queue place called ``name``. Raises ``KeyError`` for one that the machine does not have."""
        return next(p for p in self.places if p.name == name)

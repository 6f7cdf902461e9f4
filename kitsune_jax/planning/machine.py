"""What a machine model is: the numbers that the planner knows about a device.

Comes in: nothing. Goes out: ``Machine``, of which each target makes its own.

Units: bytes, seconds, bytes per second, and operations per second (a fused multiply-add counts two; on a GPU ``simt_rates`` are
instructions of one lane). Rates are per worker: a worker is a core on a CPU and a streaming multiprocessor (one resident CTA) on a
GPU.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.profile.model import Profile

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


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """A device as the cost model sees it.

    ``tensor_rates`` / ``simt_rates``: peak operations per second of one worker, by dtype; ``"other"`` stands for dtypes that are
    not named. ``library_rates`` (what XLA reaches in a matmul, per worker) and ``spatial_efficiency`` (stages on different workers)
    are by dtype as well, ``vertical_efficiency`` (one worker runs the chain) by "resident" and "streamed" (weights). On a CPU the
    ``profile`` says all of this instead, and these are its largest rates.
    ``sources`` says where each group of numbers is from.

    ``local_bytes`` is what one worker keeps on chip for itself (L2 of a core; shared memory of a CTA), ``shared_bytes`` the cache
    all workers share. GPUs only: ``lane_registers``, registers per thread with 1, 2, ... consumer warpgroups beside a loader;
    ``max_cluster``, CTAs of the largest cluster; ``cluster_counts``, how many clusters of a size fit where the division of
    ``workers`` would say more; ``cluster_bandwidth``, DSMEM of all workers together, by cluster size.
    """

    name: str
    platform: str
    workers: int
    clock: float
    tensor_rates: Rates
    simt_rates: Rates
    library_rates: Rates
    library_simt: float  # fraction of ``simt_rates`` that XLA's fused loops reach
    pipeline_simt: float  # fraction of ``simt_rates`` that a stage's pointwise code reaches
    strided_seconds: float  # one element of a border array whose rows do not lie together, on one worker
    vertical_efficiency: Rates
    spatial_efficiency: Rates
    local_bytes: int
    shared_bytes: int
    shared_bandwidth: float  # all workers together
    dram_bandwidth: float  # all workers together, reads + writes
    places: tuple[Place, ...]  # nearest first
    lane_registers: tuple[int, ...]
    max_cluster: int
    cluster_counts: tuple[tuple[int, int], ...]
    cluster_bandwidth: Rates
    call_seconds: float  # one pipeline call
    kernel_seconds: float  # gap between two kernels of the bulk-synchronous program
    tile_seconds: float  # picking the next tile, or a barrier round trip
    pack_bandwidth: float  # weights laid out for the micro-kernels, once per call
    fault_bandwidth: float  # first touch of fresh pages, all workers together; infinite where buffers are kept
    fault_threshold: int  # an allocation beyond this is fresh pages at every call
    panel: int  # columns a matmul is padded to
    matmul_rows: int  # rows a matmul is padded to
    sources: tuple[tuple[str, str], ...]
    profile: Profile | None = None  # of a CPU: what its times are made of

    def rate(self, rates: Rates, dtype: str) -> float:
        """The entry of ``rates`` for ``dtype``, or for "other"."""
        table = dict(rates)
        return table.get(dtype, table["other"])

    def place(self, name: str) -> Place:
        """The queue place called ``name``. Raises ``KeyError`` for one that the machine does not have."""
        return next(p for p in self.places if p.name == name)

    def clusters(self, size: int) -> int:
        """Clusters of ``size`` workers that are resident at once."""
        return min(dict(self.cluster_counts).get(size, self.workers), self.workers // size)

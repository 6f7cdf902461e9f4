"""Machine models of CPUs: the numbers of a profile, by the names that planning knows.

Comes in: the name of a device, or a profile (``kitsune_jax.profile``). Goes out: a frozen ``Machine``. Invariant: equal names and
equal profiles give equal models, so a plan is a pure function of the graph and the profile.
"""

from __future__ import annotations

import functools

from kitsune_jax.planning.machine import KIB, MIB, Machine, Place
from kitsune_jax.profile import shipped, store
from kitsune_jax.profile.kernels import TILE
from kitsune_jax.profile.model import Profile

# Nominal: latencies are counted in cycles, of which a core of today makes 3 to 5 billion a second.
_CPU_CLOCK = 3.5e9
_SQUARE = 512
_CPU_SOURCES = (
    ("profile", "measured: kitsune_jax.profile; of a shipped one, kitsune_jax.profile.shipped says what it is made of"),
    ("strided_seconds", "6-19 ns an element measured for tiles of 2-4 columns of a row-major array, Zen 4"),
    ("fault_threshold", "glibc mallopt(3): M_MMAP_THRESHOLD grows to at most 32 MiB; larger blocks are mapped anew at every call"),
    ("places", "latencies of 4, 14 and 50 cycles (Zen and Ice Lake, vendors' optimisation guides)"),
)


@functools.lru_cache(maxsize=64)
def cpu_of(profile: Profile) -> Machine:
    """The machine model of a CPU: the numbers of ``profile`` by the names that GPUs have as well."""
    workers, seconds = profile.workers, profile.seconds

    def rate(dtype: str, way: str = "widened") -> float:
        return 2.0 * TILE * _SQUARE * _SQUARE / seconds(f"gemm/{dtype}/{way}/{_SQUARE}x{_SQUARE}")

    def moved(level: str) -> float:  # a copied byte is one read and one written
        return 2.0 / seconds(f"copy/{level}")

    f32 = rate("float32")
    ways = [w for w in ("widened", "dots", "tiles") if profile.get(f"gemm/bfloat16/{w}/{_SQUARE}x{_SQUARE}")]
    bf16 = max(rate("bfloat16", w) for w in ways)
    lane = 1.0 / seconds("vector/add")
    return Machine(
        name=profile.name,
        platform="cpu",
        workers=workers,
        clock=_CPU_CLOCK,
        tensor_rates=(("float64", rate("float64")), ("bfloat16", bf16), ("other", f32)),
        simt_rates=(("float64", lane / 2), ("int64", lane / 2), ("other", lane)),
        library_rates=(("other", f32),),
        library_simt=1.0,
        pipeline_simt=1.0,
        strided_seconds=6e-9,
        vertical_efficiency=(("other", 1.0),),
        spatial_efficiency=(("other", 1.0),),
        local_bytes=profile.l2,
        shared_bytes=max(profile.l3, profile.l2),
        shared_bandwidth=moved("l3") * workers,
        dram_bandwidth=moved("dram") * workers,
        places=(
            Place("l1", 4 / _CPU_CLOCK, moved("l1")),
            Place("l2", 14 / _CPU_CLOCK, moved("l2")),
            Place("l3", 50 / _CPU_CLOCK, moved("l3")),
        ),
        lane_registers=(),
        max_cluster=1,
        cluster_counts=(),
        cluster_bandwidth=(),
        call_seconds=seconds("call"),
        kernel_seconds=seconds("xla/kernel"),
        tile_seconds=0.3e-6,
        pack_bandwidth=4.0 / seconds("pack/float32/widened") * workers,
        fault_bandwidth=workers / seconds("touch"),
        fault_threshold=32 * MIB,
        panel=32,
        matmul_rows=8,
        sources=(*_CPU_SOURCES, ("caches", f"{profile.l1 // KIB} and {profile.l2 // KIB} KiB a core, {profile.l3 // KIB} KiB")),
        profile=profile,
    )


def cpu_model(name: str) -> Machine:
    """A fixed CPU, for tests and for planning elsewhere: ``"<family>-<cores>"``, a profile that comes with the package.

    Raises ``ValueError`` for a name that is not of this form.

    >>> cpu_model("avx2-8").workers
    8
    """
    return cpu_of(shipped.shipped(name))


def cpu_at_hand() -> Machine:
    """The CPU this process runs on: as ``KITSUNE_PROFILE`` says, or as it was measured, now or before.

    Raises ``ValueError`` where ``KITSUNE_NUM_THREADS`` or ``KITSUNE_PROFILE`` mean nothing.
    """
    return cpu_of(store.at_hand())

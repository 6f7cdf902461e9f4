"""Machine models: what the planner knows about a device, as data.

Comes in: the name of a device, or for a CPU the kernel's description of the one at hand. Goes out: a frozen ``Machine``. Invariant:
no number is measured when it is asked for, so a plan made from a machine model is the same in every process that sees the same
device.

Units: bytes, seconds, bytes per second, and operations per second (a fused multiply-add counts two; on a GPU ``simt_rates`` are
instructions of one lane). Rates are per worker: a worker is a core on a CPU and a streaming multiprocessor (one resident CTA) on a
GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from pathlib import Path

from kitsune_jax import config

KIB, MIB = 1024, 1024 * 1024
Rates = tuple[tuple[str, float], ...]


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
    not named. ``library_rates`` (what XLA reaches in a matmul, per worker) and, on a CPU, ``vertical_efficiency`` (one worker runs
    the chain) and ``spatial_efficiency`` are by dtype as well; on a GPU the vertical one is by "resident" and "streamed" (weights).
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
    pass_operations: float  # what one more pointwise op costs a stage for each element, beside its arithmetic
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


# -- CPUs

# f32 lanes x 2 (multiply-add) x pipes, per cycle: Intel and AMD optimisation manuals (two FMA ports from Haswell and Zen on), Arm
# Neoverse N1 optimisation guide (two 128-bit pipes).
_FLOPS_PER_CYCLE = {"generic": 4 * 2 * 2, "avx2": 8 * 2 * 2, "avx512": 16 * 2 * 2, "avx512bf16": 16 * 2 * 2}
_LANES = {"generic": 4, "avx2": 8, "avx512": 16, "avx512bf16": 16}
# Nominal: 447 GF/s on two AVX-512 cores is 223.5 GF/s each, 64 flops a cycle at 3.5 GHz. The real clock moves; ratios do not.
_CPU_CLOCK = 3.5e9
_CPU_SOURCES = (
    (
        "tensor_rates",
        "f32: flops per cycle x 3.5 GHz; AVX512_BF16 doubles them; measured 447 and 886 GF/s on 2 Zen 5 cores",
    ),
    (
        "library_rates",
        "XLA:CPU f32 at 95 % of peak, bf16 at 277 of 474 GF/s with page faults (JAX 0.12, 2 Zen 4 cores); f32 at 164 of 187 GF/s "
        "on one Intel core with two 512-bit pipes (JAX 0.12, 2048 x 256 by 256 x 256)",
    ),
    (
        "vertical_efficiency",
        "tiles of 32-128 rows, 256 wide, Zen 4: f32 94 % of peak, bf16 80 %; 91 % in a NeRF training step on one Intel core",
    ),
    ("pipeline_simt", "a core of Zen 4: max 0.13, exp 0.25, tanh 0.49 ns an element, of which a pass over the tile is 0.07"),
    ("library_simt", "XLA's fused loops: no passes between their ops; bulk tanh and softmax are bound by memory on 2 cores"),
    ("strided_seconds", "6-19 ns an element measured for tiles of 2-4 columns of a row-major array, Zen 4"),
    ("dram_bandwidth", "copy 36 GB/s on 2 cores; 18 GB/s a core, at most 200 GB/s (8 channels of DDR5-3200)"),
    ("fault_bandwidth", "first touch of 4 KiB pages 3.3 GB/s on 2 cores"),
    ("fault_threshold", "glibc mallopt(3): M_MMAP_THRESHOLD grows to at most 32 MiB; larger blocks are mapped anew at every call"),
    ("call_seconds", "XLA FFI call and thread-pool hand-off: 5-10 us"),
    ("places", "L1/L2/L3 of 4, 14 and 50 cycles; 64, 32 and 10 bytes a cycle (Zen and Ice Lake, vendors' optimisation guides)"),
)


def _cpu(isa: str, cores: int, l1: int, l2: int, l3: int, flops_per_cycle: int | None = None, library: float = 0.95) -> Machine:
    f32 = (flops_per_cycle or _FLOPS_PER_CYCLE[isa]) * _CPU_CLOCK
    half = 2 * f32 if isa == "avx512bf16" else f32  # without it, halves are widened to f32 on their way into the registers
    bf16 = 0.75 * half if isa == "avx512bf16" else 0.45 * f32  # XLA:CPU of JAX 0.12 multiplies bf16 natively where the CPU can
    lanes = _LANES[isa] * _CPU_CLOCK
    places = (
        Place("l1", 4 / _CPU_CLOCK, 64 * _CPU_CLOCK),
        Place("l2", 14 / _CPU_CLOCK, 32 * _CPU_CLOCK),
        Place("l3", 50 / _CPU_CLOCK, 10 * _CPU_CLOCK),
    )
    return Machine(
        name=f"{isa}-{cores}",
        platform="cpu",
        workers=cores,
        clock=_CPU_CLOCK,
        tensor_rates=(("float64", f32 / 2), ("bfloat16", half), ("other", f32)),
        simt_rates=(("float64", lanes / 2), ("int64", lanes / 2), ("other", lanes)),
        library_rates=(("float64", library * f32 / 2), ("bfloat16", bf16), ("float16", 0.45 * f32), ("other", library * f32)),
        library_simt=0.5,
        pipeline_simt=0.5,
        pass_operations=2.0,
        strided_seconds=6e-9,
        vertical_efficiency=(("bfloat16", 0.80 if isa == "avx512bf16" else 0.90), ("other", 0.94)),
        spatial_efficiency=(("bfloat16", 0.80 if isa == "avx512bf16" else 0.90), ("other", 0.94)),
        local_bytes=l2,
        shared_bytes=max(l3, l2),
        shared_bandwidth=10 * _CPU_CLOCK * cores,
        dram_bandwidth=min(18e9 * cores, 200e9),
        places=places,
        lane_registers=(),
        max_cluster=1,
        cluster_counts=(),
        cluster_bandwidth=(),
        call_seconds=8e-6,
        kernel_seconds=1e-6,
        tile_seconds=0.3e-6,
        pack_bandwidth=8e9,
        fault_bandwidth=min(1.65e9 * cores, 20e9),
        fault_threshold=32 * MIB,
        panel=32,
        matmul_rows=8,
        sources=_CPU_SOURCES + (("l1", f"{l1} bytes a core"),),
    )


def cpu_model(name: str) -> Machine:
    """A fixed CPU, for tests and for planning elsewhere: ``"<isa>-<cores>"``, isa one of generic, avx2, avx512, avx512bf16.

    Caches are 32 KiB, 1 MiB and 16 MiB a core. Raises ``ValueError`` for a name that is not of this form.

    >>> cpu_model("avx2-8").workers
    8
    """
    match = re.fullmatch(r"(generic|avx2|avx512|avx512bf16)-([1-9]\d{0,3})", name)
    if match is None:
        raise ValueError(f"no CPU model {name!r}: expected <isa>-<cores>, isa one of {', '.join(_LANES)}")
    cores = int(match[2])
    return _cpu(match[1], cores, 32 * KIB, MIB, 16 * MIB * cores)


def cpu_at_hand() -> Machine:
    """The CPU this process runs on: cores it may use, instruction sets and cache sizes as the kernel reports them. No timing.

    Raises ``ValueError`` where ``KITSUNE_NUM_THREADS`` is no positive integer.
    """
    return _cpu_with(config.num_threads())


@functools.cache
def _cpu_with(cores: int) -> Machine:
    l1, l2, l3 = _cache_sizes(Path("/sys/devices/system/cpu/cpu0/cache"))
    cpuinfo = _read(Path("/proc/cpuinfo"))
    isa = _isa(cpuinfo)
    return _cpu(isa, cores, l1, l2, l3, _known_flops_per_cycle(cpuinfo), _library_share(cpuinfo, isa))


def _known_flops_per_cycle(cpuinfo: str) -> int | None:
    """f32 operations per cycle of a core that does fewer than its vectors promise; None where the instruction set tells.

    Zen 4 (AMD family 25) splits 512-bit operations in two (AMD optimisation guide 57647): measured 118 GF/s at 3.7 GHz.
    """
    amd = "AuthenticAMD" in cpuinfo and re.search(r"^cpu family\s*:\s*25$", cpuinfo, re.MULTILINE)
    return 32 if amd else None


def _library_share(cpuinfo: str, isa: str) -> float:
    """The share of a core's f32 peak that XLA reaches in a matmul; ``_CPU_SOURCES`` says where it was measured."""
    return 0.88 if "GenuineIntel" in cpuinfo and isa.startswith("avx512") else 0.95


def _isa(cpuinfo: str) -> str:
    """The best instruction set of ``_LANES`` that the text of /proc/cpuinfo lists; generic where there is no such text."""
    match = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
        return "avx512bf16" if "avx512_bf16" in flags else "avx512"
    return "avx2" if {"avx2", "fma"} <= flags else "generic"


def _cache_sizes(folder: Path) -> tuple[int, int, int]:
    """(L1 data, L2, L3) of one core in bytes from sysfs; 32 KiB, 1 MiB and 8 MiB where it says nothing."""
    sizes = {1: 32 * KIB, 2: MIB, 3: 8 * MIB}
    for index in sorted(folder.glob("index*")):
        level, kind, size = (_read(index / name).strip() for name in ("level", "type", "size"))
        match = re.fullmatch(r"(\d+)([KMG]?)", size)
        if level in ("1", "2", "3") and kind != "Instruction" and match and int(match[1]) > 0:
            sizes[int(level)] = int(match[1]) * {"": 1, "K": KIB, "M": MIB, "G": 1024 * MIB}[match[2]]
    return sizes[1], sizes[2], sizes[3]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# -- GPUs


def _gpu(
    name: str,
    sms: int,
    clock: float,
    bf16_dense: float,
    tf32_dense: float,
    dram: float,
    l2: int,
    l2_bandwidth: float,
    smem: int,
    registers: tuple[int, ...],
    cluster: int,
    vertical: Rates,
    spatial: float,
    sources: tuple[tuple[str, str], ...],
) -> Machine:
    half, single = bf16_dense / sms, tf32_dense / sms
    lanes = 128 * clock  # FP32 lanes per SM: Ampere (GA100: 64) and Hopper whitepapers
    if cluster == 1:
        lanes = 64 * clock
    places = [Place("smem", 29 / clock, 128 * clock), Place("l2", 263 / clock, l2_bandwidth / sms)]
    if cluster > 1:
        places.insert(1, Place("cluster", 180 / clock, 3.3e12 / sms))
    return Machine(
        name=name,
        platform="cuda",
        workers=sms,
        clock=clock,
        tensor_rates=(("bfloat16", half), ("float16", half), ("float32", single), ("other", lanes)),
        simt_rates=(("float64", lanes / 2), ("int64", lanes / 4), ("other", lanes)),
        library_rates=(("bfloat16", half), ("float16", half), ("float32", single), ("other", lanes)),
        library_simt=0.5,
        pipeline_simt=0.5,
        pass_operations=0.0,
        strided_seconds=0.0,
        vertical_efficiency=vertical,
        spatial_efficiency=(("other", spatial),),
        local_bytes=smem,
        shared_bytes=l2,
        shared_bandwidth=l2_bandwidth,
        dram_bandwidth=dram,
        places=tuple(places),
        lane_registers=registers,
        max_cluster=cluster,
        cluster_counts=_HOPPER_CLUSTERS if cluster > 1 else (),
        cluster_bandwidth=(("2", 3.3e12), ("other", 2.65e12)) if cluster > 1 else (),
        call_seconds=5e-6,
        kernel_seconds=1.3e-6,
        tile_seconds=0.3e-6,
        pack_bandwidth=dram,
        fault_bandwidth=float("inf"),
        fault_threshold=0,
        panel=8,
        matmul_rows=64,
        sources=sources,
    )


_HOPPER_SOURCES = (
    ("places", "shared memory 29, DSMEM 180, L2 263 cycles (published H100/H800 measurements); 128 bytes a cycle: 32 banks of 4"),
    (
        "cluster_bandwidth",
        "published H100/H800 measurements: 3.3 TB/s at cluster 2, 2.65 at cluster 4; larger ones: none, taken as 4",
    ),
    ("cluster_counts", "a cluster lies in one GPC; 132 SMs as 6 of 16 and 2 of 18: 16 clusters of 8. The driver has the last word"),
    (
        "lane_registers",
        "a launch of 2, 3 or 4 warpgroups has 255, 168 or 128 registers a thread (64 K a CTA, in steps of 8); setmaxnreg (PTX ISA) "
        "hands them to the lanes: 24 + 2 x 240 with two of them, 32 + 3 x 160 with three, where the first is the loader's share",
    ),
    ("local_bytes", "227 KiB per CTA (CUDA programming guide, compute capability 9.0)"),
    ("kernel_seconds", "gap between kernels of a CUDA graph: 1.3 us"),
    (
        "vertical_efficiency",
        "compiled kernels, issue-simulated: 88-93 % of tensor issue with weights streamed to a cluster of 2, 80-85 % resident",
    ),
    ("spatial_efficiency", "the same: 75-90 % weight-stationary, if DSMEM delivers"),
    ("pack_bandwidth", "one pass over the weights through memory"),
    ("max_cluster", "8 is portable, 16 is what Hopper has (CUDA programming guide); the launch asks for it where a plan does"),
)

# Of a consumer's thread, by lanes: what `pipeline.h` asks setmaxnreg for. With one lane nothing is handed over, and a thread has
# the 255 of its launch; 240 leaves it the same room for addresses.
_HOPPER_REGISTERS = (240, 240, 160)
_HOPPER_CLUSTERS = tuple((n, 6 * (16 // n) + 2 * (18 // n)) for n in range(2, 17))
_HOPPER_VERTICAL = (("resident", 0.85), ("other", 0.88))

H200 = _gpu(
    "h200", 132, 1.7e9, 788e12, 394e12, 4.3e12, 50 * MIB, 5.5e12, 227 * KIB, _HOPPER_REGISTERS, 16, _HOPPER_VERTICAL, 0.80,
    (
        ("tensor_rates", "measured: bf16 788 TFLOP/s at 8192^3 on random data; tf32 half of it"),
        ("dram_bandwidth", "measured copy 4.3 TB/s (H200 data sheet: 4.8)"),
        *_HOPPER_SOURCES,
    ),
)  # fmt: skip
H100 = _gpu(
    "h100", 132, 1.7e9, 788e12, 394e12, 3.0e12, 50 * MIB, 5.5e12, 227 * KIB, _HOPPER_REGISTERS, 16, _HOPPER_VERTICAL, 0.80,
    (
        ("tensor_rates", "as the H200: same die and clocks (H100 SXM5 data sheet: 989 TFLOP/s peak)"),
        ("dram_bandwidth", "H100 SXM5 data sheet 3.35 TB/s, at the H200's measured 90 %"),
        *_HOPPER_SOURCES,
    ),
)  # fmt: skip
A100 = _gpu(
    "a100", 108, 1.41e9, 280e12, 140e12, 1.5e12, 40 * MIB, 4.0e12, 163 * KIB, (240, 168, 128), 1, (("other", 0.80),), 0.75,
    (
        ("tensor_rates", "A100 data sheet 312 TFLOP/s bf16 and 156 TFLOP/s tf32, at 90 %"),
        ("dram_bandwidth", "arXiv 2502.18403: 1.5 TB/s; 54 L2 queues moved 2 TB/s"),
        ("local_bytes", "163 KiB per CTA (CUDA programming guide, compute capability 8.0)"),
        ("max_cluster", "no thread-block clusters before compute capability 9.0"),
        ("lane_registers", "64 K registers shared evenly by 2, 3 or 4 warpgroups, at most 255 a thread: no setmaxnreg before 9.0"),
        ("vertical_efficiency", "design value for mma.sync kernels"),
    ),
)  # fmt: skip

GPUS = {m.name: m for m in (H200, H100, A100)}
_MOST_GPCS = 8  # of GA100 and GH100 (their whitepapers): a cluster lies in one, and how SMs are shared out among them differs


def fitted_gpu(base: str, sms: int, local_bytes: int) -> str:
    """The name of the model ``base`` with ``sms`` multiprocessors, and ``local_bytes`` of shared memory a CTA where that is less.

    >>> fitted_gpu("h200", 132, 232448), fitted_gpu("h200", 114, 232448), fitted_gpu("a100", 128, 101376)
    ('h200', 'h200-114-227', 'a100-128-99')
    """
    kib = min(local_bytes, GPUS[base].local_bytes) // KIB
    return base if (sms, kib * KIB) == (GPUS[base].workers, GPUS[base].local_bytes) else f"{base}-{sms}-{kib}"


@functools.cache
def _fitted(name: str, base: str, sms: int, local_bytes: int) -> Machine:
    machine = GPUS[base]
    share = min(1.0, sms / machine.workers)
    places = tuple(
        dataclasses.replace(p, bandwidth=p.bandwidth if p.name == "smem" else p.bandwidth * share) for p in machine.places
    )
    # Two SMs of a TPC are always in one GPC. Of larger clusters, as many as fit however the SMs are shared out.
    counts = [(2, sms // 2), *((n, (sms - _MOST_GPCS * (n - 1)) // n) for n in range(3, machine.max_cluster + 1))]
    counts = list(itertools.takewhile(lambda entry: entry[1] > 0, counts)) if machine.max_cluster > 1 else []
    return dataclasses.replace(
        machine,
        name=name,
        workers=sms,
        local_bytes=local_bytes,
        shared_bytes=int(machine.shared_bytes * share),
        shared_bandwidth=machine.shared_bandwidth * share,
        dram_bandwidth=machine.dram_bandwidth * share,
        pack_bandwidth=machine.pack_bandwidth * share,
        places=places,
        max_cluster=counts[-1][0] if counts else machine.max_cluster,
        cluster_counts=tuple(counts),
        cluster_bandwidth=tuple((size, rate * share) for size, rate in machine.cluster_bandwidth),
        sources=(
            (
                "workers",
                "the driver's answer; rates of an SM as the model that the name begins with, bandwidths by the number of SMs",
            ),
            *machine.sources,
        ),
    )


def machine_for(platform: str, device: str | None = None) -> Machine:
    """The model of ``device`` on ``platform`` ("cpu" or "cuda"); None is the CPU at hand, or on "cuda" the H200.

    "h200-114-227" is the H200's with 114 multiprocessors and 227 KiB of shared memory for a CTA.

    Raises ``ValueError`` for an unknown platform or device.

    >>> machine_for("cuda", "h200").workers
    132
    """
    if platform == "cpu":
        return cpu_at_hand() if device is None else cpu_model(device)
    if platform == "cuda":
        name = (device or "h200").lower()
        fitted = re.fullmatch(r"(\w+)-([1-9]\d{0,3})-([1-9]\d{0,3})", name)
        if fitted and fitted[1] in GPUS:
            return _fitted(name, fitted[1], int(fitted[2]), min(int(fitted[3]) * KIB, GPUS[fitted[1]].local_bytes))
        if name not in GPUS:
            raise ValueError(f"no CUDA device model {device!r}: expected one of {', '.join(sorted(GPUS))}")
        return GPUS[name]
    raise ValueError(f"no machine model for platform {platform!r}: expected cpu or cuda")

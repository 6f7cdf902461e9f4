"""Machine models by name: CPUs, and the GPUs of ``gpu_machines.py``.

Comes in: the name of a device, or for a CPU the kernel's description of the one at hand. Goes out: a frozen ``Machine``. Invariant:
no number is measured when it is asked for, so a plan made from a machine model is the same in every process that sees the same
device.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from kitsune_jax import config
from kitsune_jax.planning.gpu_machines import GPUS, fitted
from kitsune_jax.planning.machine import KIB, MIB, Machine, Place

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


def machine_for(platform: str, device: str | None = None) -> Machine:
    """The model of ``device`` on ``platform`` ("cpu" or "cuda"); None is the CPU at hand, or on "cuda" the H200.

    "h200-114-227" is the H200's with 114 multiprocessors and 227 KiB of shared memory for a CTA, "h200-114-227-50-1755-2039" that
    with 50 MiB of L2, 1755 MHz and 2039 GB/s of memory besides.

    Raises ``ValueError`` for an unknown platform or device.

    >>> machine_for("cuda", "h200").workers
    132
    """
    if platform == "cpu":
        return cpu_at_hand() if device is None else cpu_model(device)
    if platform == "cuda":
        name = (device or "h200").lower()
        if machine := fitted(name):
            return machine
        if name not in GPUS:
            raise ValueError(f"no CUDA device model {device!r}: expected one of {', '.join(sorted(GPUS))}")
        return GPUS[name]
    raise ValueError(f"no machine model for platform {platform!r}: expected cpu or cuda")

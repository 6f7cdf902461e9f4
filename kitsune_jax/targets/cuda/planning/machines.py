"""Machine models of GPUs: known devices as data, each number with its source, and other devices fitted to the driver's answers.

Comes in: a known model and ``Sizes``, the driver's answers. Goes out: the name of the fitted model, from which ``fitted`` makes the
same model in any process.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from typing import Any

from kitsune_jax.planning.plan import KIB, MIB, Machine, Place, Rates


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """Waits of a lane. ``hop_seconds``: to meet a stage at one end of a ring, by the ring's place. ``load_seconds``: until the
    first bytes of a load from memory arrive; the rest follow with ``lane_bandwidth``. ``piece_bandwidth``: of rows that are read
    and written in pieces of 64 bytes. ``pack_bandwidth``: of the kernel that packs weights, reads and writes together;
    ``pack_seconds``: that it takes for few. 0 and infinity: not measured, no wait."""

    hop_seconds: Rates
    load_seconds: float = 0.0
    lane_bandwidth: float = math.inf
    piece_bandwidth: float = math.inf
    pack_bandwidth: float = math.inf
    pack_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuMachine(Machine):
    """``simt_rates``: instructions of all lanes of one SM per second, by dtype. ``vertical_efficiency``: fraction of the tensor
    rate that a CTA with the whole chain reaches, with "resident" or "streamed" weights; ``spatial_efficiency``: that a CTA per
    stage reaches. ``lane_registers``: registers per thread with 1, 2, ... consumer warpgroups beside a loader;
    ``lane_efficiency``: fraction of these efficiencies that so many reach. ``max_cluster``:
    CTAs of the largest cluster; ``cluster_counts``: (size, number of resident clusters) where this is less than ``workers`` //
    size; ``cluster_bandwidth``: total DSMEM bandwidth of all workers, by cluster size. ``tile_seconds``: to pick the next tile, or
    of a barrier's round trip. ``barrier_seconds``: from the last CTA that ends a phase to the first that begins the next.
    ``tile_rings``: where there are bulk copies (as clusters, from sm_90 on), do vertical plans copy tiles of wide inputs to a
    ring in shared memory (``stage/inputs.py``)?
    """

    clock: float
    simt_rates: Rates
    vertical_efficiency: Rates
    spatial_efficiency: Rates
    lane_registers: tuple[int, ...]
    lane_efficiency: tuple[float, ...]
    max_cluster: int
    cluster_counts: tuple[tuple[int, int], ...]
    cluster_bandwidth: Rates
    transfers: Transfers
    tile_seconds: float = 0.3e-6
    barrier_seconds: float = 2e-6
    tile_rings: bool = True

    def clusters(self, size: int) -> int:
        """Clusters of ``size`` workers that are resident at once."""
        return min(dict(self.cluster_counts).get(size, self.workers), self.workers // size)

    def bandwidth(self, moved: int) -> float:
        """Bytes per second of a kernel that moves ``moved`` bytes: few enough of them are still in the L2, from the one before."""
        return max(self.shared_bandwidth, self.dram_bandwidth) if moved <= self.shared_bytes // 2 else self.dram_bandwidth


def _rates(half: float, single: float, lanes: float) -> dict[str, Any]:
    """The rates of an SM: 16-bit and tf32 products, and its FP32 lanes."""
    tensor = (("bfloat16", half), ("float16", half), ("float32", single), ("other", lanes))
    return {"tensor_rates": tensor, "simt_rates": (("float64", lanes / 2), ("int64", lanes / 4), ("other", lanes))}


_RECORD = "measured on an H200, 2026-11-26"
_HOPPER_SOURCES = (
    ("places", "shared memory 29 cycles (published H100/H800 measurements), L2 287 (record); 32 banks of 4 bytes"),
    ("shared_bandwidth", f"{_RECORD}: bulk copies from the L2 of 16 KB 6.1 TB/s, of 48 KB 6.8"),
    ("clock", f"{_RECORD}: 1.98 GHz where a kernel waits, 1.75 where its products draw all power, which their rate accounts for"),
    (
        "cluster_bandwidth",
        f"{_RECORD}: 3.3 TB/s in pairs; published H100/H800 measurements: 2.65 at cluster 4; larger ones: taken as 4 (the record's "
        "rings of 4 to 16 are bound by the loop over their readers)",
    ),
    ("cluster_counts", f"{_RECORD}: as of GPCs of 5 x 18, 2 x 16 and 10 SMs, of which a cluster lies in one; the driver decides"),
    (
        "transfers",
        f"{_RECORD}: a flag takes 0.63 us through the L2, 2 KB 0.26 in a cluster; 128 threads of each SM with 2 and 8 loads of 16 "
        "bytes read 1.21 and 3.19 TB/s, as of 0.37 us and 52 GB/s; the edge MLP of a graph network is bound by memory at 2.9 TB/s; "
        "the packing kernel is not measured: 1280 threads of an SM with eight loads of 2 bytes in flight reach 5 TB/s at 0.5 us a "
        "load, of which half is taken; few weights take about ten loads, one after the other, from the L2",
    ),
    (
        "lane_registers",
        "a launch of 2, 3 or 4 warpgroups has 255, 168 or 128 registers a thread (64 K a CTA, in steps of 8); setmaxnreg (PTX ISA) "
        "hands them to the lanes: 24 + 2 x 240 with two of them, 32 + 3 x 160 with three, where the first is the loader's share",
    ),
    (
        "lane_efficiency",
        f"{_RECORD}: NeRF, weights streamed, takes 0.45 ms with two lanes and 0.61 with three, attention's block 0.6 and 0.9 us: "
        "160 registers do not hold a product's operands and the results of another",
    ),
    ("local_bytes", "227 KiB per CTA (CUDA programming guide, compute capability 9.0)"),
    ("kernel_seconds", "gap between kernels of a CUDA graph: 1.3 us"),
    ("barrier_seconds", f"{_RECORD}: a barrier of 132 CTAs"),
    (
        "vertical_efficiency",
        "compiled kernels, issue-simulated: 88-93 % of tensor issue with weights streamed to a cluster of 2, 80-85 % resident",
    ),
    ("spatial_efficiency", "the same: 75-90 % weight-stationary, if DSMEM delivers"),
    ("max_cluster", "8 is portable, 16 is what Hopper has (CUDA programming guide); the launch asks for it where a plan does"),
)

H200 = GpuMachine(
    name="h200",
    platform="cuda",
    workers=132,
    clock=1.98e9,
    **_rates(788e12 / 132, 394e12 / 132, 128 * 1.98e9),  # FP32 lanes of an SM: GH100 128 (whitepaper)
    vertical_efficiency=(("resident", 0.85), ("other", 0.88)),
    spatial_efficiency=(("other", 0.80),),
    local_bytes=227 * KIB,
    shared_bytes=50 * MIB,
    shared_bandwidth=6.1e12,
    dram_bandwidth=4.3e12,
    places=(Place("smem", 29 / 1.98e9, 128 * 1.98e9), Place("l2", 287 / 1.98e9, 6.1e12 / 132)),
    # Of a consumer's thread by lanes, as `pipeline.h` asks setmaxnreg for. One lane does not ask: its threads have the 255 of the
    # launch, and 240 leave them the same room for addresses.
    lane_registers=(240, 240, 160),
    lane_efficiency=(1.0, 1.0, 0.65),
    max_cluster=16,
    cluster_counts=tuple((n, 5 * (18 // n) + 2 * (16 // n) + 10 // n) for n in range(2, 17)),
    cluster_bandwidth=(("2", 3.3e12), ("other", 2.65e12)),
    transfers=Transfers(
        hop_seconds=(("cluster", 0.26e-6), ("other", 0.63e-6)),
        load_seconds=0.37e-6,
        lane_bandwidth=52e9,
        piece_bandwidth=2.9e12,
        pack_bandwidth=2.5e12,
        pack_seconds=2.5e-6,
    ),
    barrier_seconds=0.93e-6,
    call_seconds=5e-6,
    kernel_seconds=1.3e-6,
    sources=(
        ("tensor_rates", "measured: bf16 788 TFLOP/s at 8192^3 on random data; tf32 half of it"),
        ("dram_bandwidth", "measured copy 4.3 TB/s (H200 data sheet: 4.8)"),
        *_HOPPER_SOURCES,
    ),
)
H100 = dataclasses.replace(
    H200,
    name="h100",
    dram_bandwidth=3.0e12,
    sources=(
        ("tensor_rates", "as the H200: same die and clocks (H100 SXM5 data sheet: 989 TFLOP/s peak)"),
        ("dram_bandwidth", "H100 SXM5 data sheet 3.35 TB/s, at the H200's measured 90 %"),
        *_HOPPER_SOURCES,
    ),
)
A100 = GpuMachine(
    name="a100",
    platform="cuda",
    workers=108,
    clock=1.41e9,
    **_rates(280e12 / 108, 140e12 / 108, 64 * 1.41e9),  # FP32 lanes of an SM: GA100 64 (whitepaper)
    vertical_efficiency=(("other", 0.80),),
    spatial_efficiency=(("other", 0.75),),
    local_bytes=163 * KIB,
    shared_bytes=40 * MIB,
    shared_bandwidth=4.0e12,
    dram_bandwidth=1.5e12,
    places=(Place("smem", 29 / 1.41e9, 128 * 1.41e9), Place("l2", 263 / 1.41e9, 4.0e12 / 108)),
    lane_registers=(240, 168, 128),
    lane_efficiency=(1.0, 1.0, 1.0),
    max_cluster=1,
    cluster_counts=(),
    cluster_bandwidth=(),
    transfers=Transfers(hop_seconds=(("other", 2 * 263 / 1.41e9),)),  # the data or the flag, and the reader's load
    call_seconds=5e-6,
    kernel_seconds=1.3e-6,
    sources=(
        ("tensor_rates", "A100 data sheet 312 TFLOP/s bf16 and 156 TFLOP/s tf32, at 90 %"),
        ("dram_bandwidth", "arXiv 2502.18403: 1.5 TB/s; 54 L2 queues moved 2 TB/s"),
        ("local_bytes", "163 KiB per CTA (CUDA programming guide, compute capability 8.0)"),
        ("max_cluster", "no thread-block clusters before compute capability 9.0"),
        ("lane_registers", "64 K registers shared evenly by 2, 3 or 4 warpgroups, at most 255 a thread: no setmaxnreg before 9.0"),
        ("vertical_efficiency", "design value for mma.sync kernels"),
    ),
)

_MOST_GPCS = 8  # of GA100 and GH100 (whitepapers): a cluster lies in one GPC, and GPCs differ in their number of SMs
_MOST_SHARED = 227 * KIB  # bytes of a CTA on any device (CUDA programming guide, compute capability 9.0)


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Sizes:
    """The driver's answers about a GPU. ``clock``: the highest, in Hz. ``bandwidth``: memory clock times bus width, in bytes per
    second. The last three are 0 where the driver does not know them, as for a part of a GPU."""

    multiprocessors: int
    shared_bytes: int
    l2_bytes: int = 0
    clock: float = 0.0
    bandwidth: float = 0.0


def _scaled(rates: Rates, by: float) -> Rates:
    return tuple((key, rate * by) for key, rate in rates)


def _clusters(sms: int, most: int) -> tuple[tuple[int, int], ...]:
    """(size, clusters that fit for certain): pairs always, as the two SMs of a TPC are in one GPC; larger clusters as many as fit
    under any distribution of the SMs over the GPCs."""
    counts = [(2, sms // 2), *((n, (sms - _MOST_GPCS * (n - 1)) // n) for n in range(3, most + 1))]
    return tuple(itertools.takewhile(lambda entry: entry[1] > 0, counts)) if most > 1 else ()


def _fit(machine: GpuMachine, driver: Sizes, sizes: Sizes, name: str) -> GpuMachine:
    """``machine``, whose driver answers ``driver``, scaled to ``sizes``.

    Rates of an SM are scaled by the clock. Resources that all SMs share are scaled by their number, unless the driver states them.
    """
    sms = sizes.multiprocessors
    speed = sizes.clock / driver.clock if sizes.clock else 1.0
    share = sms / machine.workers * speed if sizes.clock else min(1.0, sms / machine.workers)
    memory = sizes.bandwidth / driver.bandwidth if sizes.bandwidth else min(1.0, sms / machine.workers)
    places = {p.name: dataclasses.replace(p, latency=p.latency / speed, bandwidth=p.bandwidth * speed) for p in machine.places}
    places["l2"] = dataclasses.replace(places["l2"], bandwidth=machine.shared_bandwidth * share / sms)
    counts = _clusters(sms, machine.max_cluster)
    return dataclasses.replace(
        machine,
        name=name,
        workers=sms,
        clock=machine.clock * speed,
        tensor_rates=_scaled(machine.tensor_rates, speed),
        simt_rates=_scaled(machine.simt_rates, speed),
        local_bytes=min(sizes.shared_bytes // KIB * KIB, _MOST_SHARED),
        shared_bytes=sizes.l2_bytes or int(machine.shared_bytes * min(1.0, sms / machine.workers)),
        shared_bandwidth=machine.shared_bandwidth * share,
        dram_bandwidth=machine.dram_bandwidth * memory,
        places=tuple(places.values()),
        max_cluster=counts[-1][0] if counts else machine.max_cluster,
        cluster_counts=counts,
        cluster_bandwidth=_scaled(machine.cluster_bandwidth, share),
        sources=(
            ("workers", "the driver's answer, as are shared memory, L2, clock and memory bandwidth where the name has them"),
            ("rates", "those of the model that the name begins with: of an SM by the clock, shared ones by the number of SMs"),
            *machine.sources,
        ),
    )


# The driver's answers for the device of each model: multiprocessors, shared memory, L2, clock in Hz, memory clock x 2 x bus width.
_DRIVER = {
    "h200": Sizes(132, 227 * KIB, 60 * MIB, 1.980e9, 2 * 3.201e9 * 6144 / 8),
    "h100": Sizes(132, 227 * KIB, 50 * MIB, 1.980e9, 2 * 2.619e9 * 5120 / 8),
    "h20": Sizes(78, 227 * KIB, 60 * MIB, 1.980e9, 2 * 2.619e9 * 6144 / 8),
    "a100": Sizes(108, 163 * KIB, 40 * MIB, 1.410e9, 2 * 1.215e9 * 5120 / 8),
    "l4": Sizes(58, 99 * KIB, 48 * MIB, 2.040e9, 2 * 6.251e9 * 192 / 8),
}


def _h20() -> GpuMachine:
    """An H200 with 78 SMs and slower tensor cores, which the driver does not report."""
    fitted = _fit(H200, _DRIVER["h200"], _DRIVER["h20"], "h20")
    rates = {"bfloat16": 133e12 / 78, "float16": 133e12 / 78, "float32": 66e12 / 78}
    return dataclasses.replace(
        fitted,
        tensor_rates=tuple((key, rates.get(key, rate)) for key, rate in fitted.tensor_rates),
        sources=(("tensor_rates", "H20 data sheet: 148 TFLOP/s bf16 and 74 TFLOP/s tf32, at 90 %"), *fitted.sources),
    )


def _l4() -> GpuMachine:
    """An SM of compute capability 8.6, 8.9 or 12.0: half the tensor rate of an A100's, twice the lanes."""
    fitted = _fit(A100, _DRIVER["a100"], _DRIVER["l4"], "l4")
    lanes = 128 * fitted.clock
    rates = {"bfloat16": 109e12 / 58, "float16": 109e12 / 58, "float32": 54e12 / 58, "other": lanes}
    return dataclasses.replace(
        fitted,
        tensor_rates=tuple((key, rates[key]) for key, _ in fitted.tensor_rates),
        simt_rates=(("float64", lanes / 64), ("int64", lanes / 4), ("other", lanes)),
        sources=(
            ("tensor_rates", "L4 data sheet: 121 TFLOP/s bf16 and 60 TFLOP/s tf32 without sparsity, at 90 %"),
            ("simt_rates", "128 FP32 lanes an SM, 2 of FP64 (Ada whitepaper)"),
            *fitted.sources,
        ),
    )


GPUS = {m.name: m for m in (H200, H100, A100, _h20(), _l4())}


def fitted_gpu(base: str, sizes: Sizes) -> str:
    """The name of model ``base`` with the driver's ``sizes``: SMs, KiB of shared memory; MiB of L2, MHz, GB/s of memory.

    >>> h100_pcie = Sizes(114, 232448, 50 * MIB, 1.755e9, 2.039e12)
    >>> fitted_gpu("h200", Sizes(132, 232448)), fitted_gpu("h200", Sizes(16, 232448)), fitted_gpu("h100", h100_pcie)
    ('h200', 'h200-16-227', 'h100-114-227-50-1755-2039')
    """
    own = _DRIVER[base]

    def near(a: float, b: float, by: float) -> bool:
        return not a or abs(a - b) <= by * b

    same = (sizes.multiprocessors, sizes.shared_bytes // KIB) == (own.multiprocessors, own.shared_bytes // KIB)
    rates = near(sizes.clock, own.clock, 0.05) and near(sizes.bandwidth, own.bandwidth, 0.05)
    if same and rates and near(sizes.l2_bytes, own.l2_bytes, 0.2):  # drivers and data sheets differ for the H200
        return base
    name = f"{base}-{sizes.multiprocessors}-{min(sizes.shared_bytes, _MOST_SHARED) // KIB}"
    if not (sizes.l2_bytes or sizes.clock or sizes.bandwidth):
        return name
    return f"{name}-{round(sizes.l2_bytes / MIB)}-{round(sizes.clock / 1e6)}-{round(sizes.bandwidth / 1e9)}"


def gpu(device: str | None = None) -> GpuMachine:
    """The model of a GPU by its name; None is the H200. Raises ``ValueError`` for an unknown device.

    "h200-114-227" is the H200 with 114 multiprocessors and 227 KiB of shared memory for a CTA; "h200-114-227-50-1755-2039" also
    has 50 MiB of L2, 1755 MHz and 2039 GB/s of memory.

    >>> gpu("h200").workers
    132
    """
    name = (device or "h200").lower()
    machine = fitted(name) or GPUS.get(name)
    if machine is None:
        raise ValueError(f"no CUDA device model {device!r}: expected one of {', '.join(sorted(GPUS))}")
    return machine


@functools.cache
def fitted(name: str) -> GpuMachine | None:
    """The model of a name by ``fitted_gpu``; None for another name.

    >>> machine = fitted("h100-114-227-50-1755-2039")
    >>> machine.workers, round(machine.dram_bandwidth / 1e9)
    (114, 1825)
    """
    match = re.fullmatch(r"([a-z]\w*)-([1-9]\d{0,3})-([1-9]\d{0,2})(?:-(\d{1,4})-(\d{1,5})-(\d{1,6}))?", name)
    if match is None or match[1] not in GPUS:
        return None
    sms, kib, l2, clock, bandwidth = (int(group or 0) for group in match.groups()[1:])
    return _fit(GPUS[match[1]], _DRIVER[match[1]], Sizes(sms, kib * KIB, l2 * MIB, clock * 1e6, bandwidth * 1e9), name)


def matmul_efficiency(machine: GpuMachine, arrangement: str, resident: bool, lanes: int) -> float:
    """Fraction of the tensor rate that matmuls reach while their epilogues are hidden behind other lanes."""
    of_lanes = machine.lane_efficiency[lanes - 1]
    if arrangement == "spatial":
        return of_lanes * machine.rate(machine.spatial_efficiency, "other")
    return of_lanes * machine.rate(machine.vertical_efficiency, "resident" if resident else "streamed")

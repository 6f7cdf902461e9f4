"""Several devices, and devices that are not the first: what is made runs on every one of them, or is told before it runs."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kitsune_jax as kj
from kitsune_jax import targets
from kitsune_jax.frontend import lowering
from kitsune_jax.frontend.route import RouteOptions, route
from kitsune_jax.program.build import build
from kitsune_jax.program.ir import Program
from kitsune_jax.targets.cuda import compile, hostcc, lower, nvrtc, runtime
from kitsune_jax.targets.cuda.planning.cost import GpuCost
from kitsune_jax.targets.cuda.planning.machines import GPUS
from kitsune_jax.targets.cuda.planning.machines import gpu as gpu_model
from kitsune_jax.targets.cuda.planning.planner import candidates
from tests.cuda.test_launch import fake_driver, needs_compiler, run
from tests.support.cuda_cases import FAMILIES
from tests.support.cuda_run import Kernel, arrangements, kernel_cache, subject
from tests.support.cuda_training_cases import TRAINING
from tests.support.graphs import graph_of, nerf, nerf_params

__all__ = ["fake_driver", "kernel_cache"]

MIB = 1024 * 1024


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What a driver says of a device (nvidia-smi -q, deviceQuery), and the multiprocessors of each of its GPCs."""

    name: str
    capability: int
    multiprocessors: int
    shared_bytes: int
    clock: int  # MHz
    memory_clock: int  # MHz
    bus: int  # bits
    l2: int  # MiB
    gpcs: tuple[int, ...] = ()

    def info(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "compute_capability": self.capability,
            "multiprocessors": self.multiprocessors,
            "shared_bytes": self.shared_bytes,
            "clock": 1e6 * self.clock,
            "memory_bandwidth": 1e6 * self.memory_clock * 2 * self.bus / 8,
            "l2_bytes": self.l2 * MIB,
        }

    def fake(self, i: int) -> str:
        """The same for device ``i`` of the driver that pretends."""
        said = {
            "name": self.name,
            "capability": self.capability,
            "multiprocessors": self.multiprocessors,
            "shared": self.shared_bytes,
            "clock": 1000 * self.clock,
            "memory_clock": 1000 * self.memory_clock,
            "bus": self.bus,
            "l2": self.l2 * MIB,
            "gpcs": "+".join(map(str, self.gpcs)),
        }
        return ",".join(f"{key}{i}={value}" for key, value in said.items())


H200 = Gpu("NVIDIA H200", 90, 132, 232448, 1980, 3201, 6144, 60, (16, 16, 16, 16, 16, 16, 18, 18))
H200_UNEVEN = dataclasses.replace(H200, gpcs=(18, 18, 18, 18, 18, 16, 14, 12))
H200_SLICE = Gpu("NVIDIA H200 MIG 1g.18gb", 90, 16, 232448, 1980, 3201, 6144, 60, (16,))
H100 = Gpu("NVIDIA H100 80GB HBM3", 90, 132, 232448, 1980, 2619, 5120, 50, (16, 16, 16, 16, 16, 16, 18, 18))
H100_PCIE = Gpu("NVIDIA H100 PCIe", 90, 114, 232448, 1755, 1593, 5120, 50, (18, 16, 16, 16, 16, 16, 16))
H100_SLICE = Gpu("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 90, 60, 232448, 1980, 2619, 5120, 50, (16, 16, 14, 14))
H20 = Gpu("NVIDIA H20", 90, 78, 232448, 1980, 2619, 6144, 60, (10, 10, 10, 10, 10, 10, 10, 8))
GH200 = Gpu("NVIDIA GH200 480GB", 90, 132, 232448, 1980, 2619, 6144, 60, (18, 18, 18, 18, 16, 16, 14, 14))
A100 = Gpu("NVIDIA A100-SXM4-40GB", 80, 108, 166912, 1410, 1215, 5120, 40)
A100_80 = Gpu("NVIDIA A100-SXM4-80GB", 80, 108, 166912, 1410, 1593, 5120, 40)
A10 = Gpu("NVIDIA A10", 86, 72, 101376, 1695, 6251, 384, 6)
L4 = Gpu("NVIDIA L4", 89, 58, 101376, 2040, 6251, 192, 48)
RTX_4090 = Gpu("NVIDIA GeForce RTX 4090", 89, 128, 101376, 2520, 10501, 384, 72)
B200 = Gpu("NVIDIA B200", 100, 148, 232448, 1965, 3996, 8192, 126)
GB200 = Gpu("NVIDIA GB200", 100, 152, 232448, 2062, 3996, 8192, 126)
V100 = Gpu("Tesla V100", 70, 80, 98304, 1530, 877, 4096, 6)
BOTH = "NVIDIA A100-SXM4-40GB (sm_80 with 108 SMs), NVIDIA H200 (sm_90 with 132 SMs)"


@pytest.fixture(autouse=True)
def _routes_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("KITSUNE_CUDA_ARCH", raising=False)
    lowering._routed.cache_clear()
    yield
    lowering._routed.cache_clear()


def machine_with(monkeypatch: pytest.MonkeyPatch, *found: Gpu, version: int = 99_000) -> None:
    info: Any = {"version": version, "devices": [gpu.info() for gpu in found]}
    monkeypatch.setattr(runtime, "driver_info", lambda: info)


MACHINES = {
    "H200": ([H200], "sm_90a", "h200"),
    "eight H200": ([H200] * 8, "sm_90a", "h200"),
    "H200 with uneven GPCs": ([H200_UNEVEN], "sm_90a", "h200"),
    "H100": ([H100], "sm_90a", "h100"),
    "H100 PCIe": ([H100_PCIE], "sm_90a", "h100-114-227-50-1755-2039"),
    "H200 and H100 PCIe": ([H200, H100_PCIE], "sm_90a", "h100-114-227-50-1755-2039"),
    "H20": ([H20], "sm_90a", "h20"),
    "GH200": ([GH200], "sm_90a", "h200-132-227-60-1980-4023"),
    "a slice of a H200": ([H200_SLICE], "sm_90a", "h200-16-227-0-1980-0"),
    "a slice of a H100": ([H100_SLICE], "sm_90a", "h100-60-227-0-1980-0"),
    "A100": ([A100], "sm_80", "a100"),
    "A100 with 80 GB": ([A100_80], "sm_80", "a100-108-163-40-1410-2039"),
    "L4": ([L4], "sm_89", "l4"),
    "RTX 4090": ([RTX_4090], "sm_89", "l4-128-99-72-2520-1008"),
    "A100, A10 and RTX 4090": ([RTX_4090, A100, A10], "sm_80", "l4-72-99-6-1410-600"),
    "H200 and A100": ([H200, A100], "compute_80", "a100"),
    "A100 and H200": ([A100, H200], "compute_80", "a100"),
    "B200": ([B200], "sm_100", "a100-148-227-126-1965-8184"),
    "GB200": ([GB200], "sm_100", "a100-152-227-126-2062-8184"),
    "B200 and H200": ([B200, H200], "compute_90", "a100-132-227-60-1965-4917"),
    "none": ([], "sm_90a", "h200"),
}
ALIKE = (
    "eight H200",
    "H100",
    "H100 PCIe",
    "H20",
    "A100 with 80 GB",
    "A100 and H200",
    "GB200",
)  # as another one, with other numbers


@pytest.mark.parametrize("name", MACHINES)
def test_the_architecture_and_the_model_are_those_of_all_devices(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found, arch, model = MACHINES[name]
    machine_with(monkeypatch, *found)
    assert (runtime.arch(), runtime.device_model()) == (arch, model)
    assert gpu_model(model).name == model
    assert runtime.why_no_kernels() == ""
    assert ("differ" in runtime.note()) == (len(set(found)) > 1)


def test_a_named_architecture_takes_the_limits_of_the_devices_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, H100_PCIE, A10, V100)
    small = "l4-72-99-6-1695-600"
    named = {"sm_90a": "h100-114-227-50-1755-2039", "sm_86": small, "compute_80": small, "sm_120": "a100"}
    for arch, model in named.items():
        monkeypatch.setenv("KITSUNE_CUDA_ARCH", arch)
        assert (runtime.arch(), runtime.device_model(), runtime.why_no_kernels(), runtime.note()) == (arch, model, "", "")


def test_a_device_that_is_too_old_is_told_before_anything_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, H200, V100)
    assert "compute capability 7.0" in runtime.why_no_kernels() and "CUDA_VISIBLE_DEVICES" in runtime.why_no_kernels()
    assert "compute capability 7.0" in targets.get("cuda").why_not() or runtime.why_not() or nvrtc.why_not()


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")
def test_a_driver_that_cannot_read_the_ptx_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, H200, A100, version=12040)
    assert BOTH in runtime.why_no_kernels() and "CUDA 12.4" in runtime.why_no_kernels()
    machine_with(monkeypatch, H200, H100_PCIE, version=12040)
    assert runtime.why_no_kernels() == "", "a cubin needs no newer driver"


def test_a_fitted_model_has_the_drivers_numbers_and_keeps_the_rates_of_an_sm_at_the_same_clock() -> None:
    whole, slice_ = gpu_model("h200"), gpu_model("h200-16-227-0-1980-0")
    assert (slice_.workers, slice_.tensor_rates, slice_.clock) == (16, whole.tensor_rates, whole.clock)
    assert slice_.place("l2").bandwidth == pytest.approx(whole.place("l2").bandwidth), "of one SM"
    for name in ("shared_bytes", "shared_bandwidth", "dram_bandwidth"):
        assert getattr(slice_, name) == pytest.approx(getattr(whole, name) * 16 / 132, rel=1e-6), name
    pcie, sxm = gpu_model("h100-114-227-50-1755-2039"), gpu_model("h100")
    assert pcie.dram_bandwidth / sxm.dram_bandwidth == pytest.approx(2039 / 3352, rel=1e-3)
    assert pcie.rate(pcie.tensor_rates, "bfloat16") / sxm.rate(sxm.tensor_rates, "bfloat16") == pytest.approx(1755 / 1980)
    assert pcie.shared_bytes == 50 * MIB
    h20, b200, l4 = (gpu_model(name) for name in ("h20", "a100-148-227-126-1965-8184", "l4"))
    assert h20.workers * h20.rate(h20.tensor_rates, "bfloat16") == pytest.approx(133e12), "held back beyond its clock and SMs"
    assert 3.2e12 < h20.dram_bandwidth < 4.0e12 and 7.0e12 < b200.dram_bandwidth < 8.2e12
    assert (b200.local_bytes, b200.max_cluster, l4.local_bytes) == (227 * 1024, 1, 99 * 1024)
    for name in ("h200-132", "h200-0-227", "h200-132-227-50", "x-132-227", "h200-132-227-50-1-2-3"):
        with pytest.raises(ValueError, match="no CUDA device model"):
            gpu_model(name)


@pytest.mark.parametrize("base", sorted(GPUS))
@pytest.mark.parametrize("sms", [7, 16, 60, 114, 132, 200])
def test_a_model_with_other_numbers_promises_no_more_clusters_than_any_division_of_its_sms_holds(base: str, sms: int) -> None:
    machine = gpu_model(f"{base}-{sms}-99")
    assert machine.workers == sms and machine.local_bytes == 99 * 1024
    for size in range(2, machine.max_cluster + 1):
        # SMs come in pairs; the worst division for clusters of this size leaves as many as possible over in each of eight GPCs
        pairs = sms // 2
        worst = min(
            sum(2 * p // size for p in (*firsts, pairs - sum(firsts)))
            for firsts in itertools.combinations_with_replacement(range(0, min(pairs, 10)), 7)
            if sum(firsts) <= pairs
        ) if size > 2 else pairs  # fmt: skip
        assert 1 <= machine.clusters(size) <= worst


def planned(device: str | None, force: bool = True) -> list[tuple[Any, Any]]:
    """(plan, launch words) of every region of some functions, for the machine at hand or a model."""
    rng = np.random.default_rng(0)
    x, w, v = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((20_000, 256), (256, 256), (256, 32)))
    graphs = [
        graph_of(lambda x, w, v: jax.nn.relu(jax.nn.relu(x @ w) @ w) @ v, x, w, v),
        graph_of(lambda p, x: nerf(p, x), nerf_params(rng, width=64), jnp.zeros((50_000, 63))),
    ]
    found = []
    for graph in graphs:
        for region in route(graph, "cuda", RouteOptions(force=force, device=device, code=False)).regions:
            kernel = lower._cached_kernel(Program.of(build(graph, region.region, region.plan)), (region.plan,), "region")
            found.append((region.plan, kernel.launch))
    return found


def launched(kernels: list[tuple[int, ...]], found: list[Gpu], driver: pathlib.Path) -> list[list[Any]]:
    """For each kernel, by its launch words, and each device the launch that the driver is asked for and accepts, or the error."""
    program = f"""
    def tried(k, buffers, stream):
        k.load(stream)
        k.launch(buffers, stream)
    answers = []
    for words in {[list(map(int, words)) for words in kernels]}:
        launch = np.array(words, np.int64)
        k = _cuda.Kernel(b"image", launch, "region", packer=b"image")
        buffers = [(0x10000 * (i + 1), int(n)) for i, n in enumerate(launch[11 : 11 + launch[8] + launch[9]])]
        answers.append([])
        for d in range({len(found)}):
            failed = error(lambda: tried(k, buffers, 100 * (d + 1)))
            answers[-1].append(journal()[-1] if failed == "no error" else failed)
    print(json.dumps(answers))
    """
    result: list[list[Any]] = run(
        program, driver, ",".join([f"devices={len(found)}", *(gpu.fake(i) for i, gpu in enumerate(found))])
    )
    return result


def holds(gpu: Gpu, cluster: int) -> int:
    """Blocks that are resident at once, one to a multiprocessor."""
    return gpu.multiprocessors if cluster == 1 else cluster * sum(n // cluster for n in gpu.gpcs)


@needs_compiler
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name, (found, _, _) in MACHINES.items() if found],
)
def test_kernels_launch_on_every_device(monkeypatch: pytest.MonkeyPatch, fake_driver: pathlib.Path, name: str) -> None:
    """The driver that pretends refuses what does not fit; where it says that fewer clusters fit than were planned, fewer start."""
    found = MACHINES[name][0]
    machine_with(monkeypatch, *found)
    kernels = planned(None)
    assert kernels, "nothing was planned"
    answers = launched([words for _, words in kernels], found, fake_driver)
    for (plan, words), of_devices in zip(kernels, answers, strict=True):
        sm, grid, cluster, shared, instance = words[1], words[2], words[4], words[5], words[7]
        assert shared <= min(gpu.shared_bytes for gpu in found) and grid <= min(gpu.multiprocessors for gpu in found), plan
        assert sm == (900 if all(gpu.capability == 90 for gpu in found) else 800)
        for gpu, answer in zip(found, of_devices, strict=True):
            want = min(grid, holds(gpu, cluster) // instance * instance)
            assert want > 0 and answer.startswith(f"launch grid={want} "), f"{gpu.name}: {answer}"


@pytest.mark.sampled(2)
@needs_compiler
@pytest.mark.parametrize("gpu", [H200_UNEVEN, H100_PCIE, H100_SLICE, H200_SLICE, H20, GH200], ids=lambda gpu: gpu.name)
def test_what_was_planned_for_a_h200_launches_on_other_devices_of_its_architecture(fake_driver: pathlib.Path, gpu: Gpu) -> None:
    """An exported program, or one whose plan was asked for by name; every arrangement that the planner knows."""
    every = every_arrangement()
    answers = launched([words for _, _, words in every], [gpu], fake_driver)
    for (name, plan, words), (answer,) in zip(every, answers, strict=True):
        cluster, instance = words[4], words[7]
        fits = holds(gpu, cluster) // instance * instance
        if fits:
            assert answer.startswith(f"launch grid={min(words[2], fits)} "), f"{name}: {answer}"
        elif plan.queues and plan.queues[0].place == "l2":
            assert "blocks of a pipeline must all be resident" in answer and "on this machine" in answer, name
        else:
            assert "no cluster of this kernel fits on the device: set KITSUNE_CUDA_ARCH" in answer, name


@functools.cache
def every_arrangement() -> list[tuple[str, Any, tuple[int, ...]]]:
    """The fastest plan of each kind for a H200, and its launch words."""
    shapes = (20_000, 256), (256, 256), (256, 32)
    graph = graph_of(
        lambda x, w, v: jax.nn.relu(jax.nn.relu(x @ w) @ w) @ v, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
    )
    (region,) = route(graph, "cuda", RouteOptions(force=True, device="h200", code=False)).regions
    found: dict[str, tuple[Any, tuple[int, ...]]] = {}
    for plan in candidates(GpuCost(graph, region.region, GPUS["h200"])):
        program = build(graph, region.region, plan)
        kind = f"{plan.arrangement} lanes {plan.lanes} cluster {plan.cluster} {[q.place for q in plan.queues][:1]}"
        if kind not in found and lower.check(program, plan, "region") is None:
            found[kind] = plan, lower._cached_kernel(Program.of(program), (plan,), "region").launch
    return [(kind, *entry) for kind, entry in found.items()]


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")
def test_a_kernel_for_devices_of_several_architectures_is_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, H200, A100)
    graph = graph_of(lambda x, w: jnp.tanh(x @ w), *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((20_000, 64), (64, 64))))
    (region,) = route(graph, "cuda", RouteOptions(force=True, code=False)).regions
    code = lower.generate("cuda", Program.of(build(graph, region.region, region.plan)), [region.plan], "region")
    assert code.arch == "compute_80" and code.kernel.launch[1] == 800
    assert b".entry kitsune_region" in code.image and code.image.endswith(b"\0")


@needs_compiler
def test_a_kernel_for_the_first_device_is_refused_on_another_that_it_does_not_run_on(fake_driver: pathlib.Path) -> None:
    """It may come from an exported program, or KITSUNE_CUDA_ARCH."""
    program = "k = kernel(); print(json.dumps([error(lambda: k.load(stream)) for stream in (100, 200, 300)]))"
    fake = "devices=3,capability1=80,multiprocessors1=108,shared1=166912,multiprocessors2=16"
    first, second, third = run(program, fake_driver, fake)
    assert first == third == "no error"
    assert "generated for sm_90a, the device is sm_80" in second and "KITSUNE_CUDA_ARCH=sm_80" in second
    program = "k = kernel(cooperative=1, cluster=1); print(json.dumps([error(lambda: k.load(stream)) for stream in (100, 300)]))"
    first, third = run(program, fake_driver, fake)
    assert first == "no error" and "only 16 fit on the device" in third


def test_explain_says_that_the_devices_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 64), (64, 64))]
    machine_with(monkeypatch, H200, A100)
    report = kj.explain(f, platform="cuda", force=True)(*shapes)
    assert report.machine == "a100"
    assert any(BOTH in note for note in report.notes), report.notes
    report = kj.explain(f, platform="cuda", device="h200", force=True)(*shapes)
    assert report.machine == "h200" and not any("differ" in note for note in report.notes), "a named device need not be here"


@contextlib.contextmanager
def multiprocessors(count: int) -> Iterator[None]:
    """The emulated device has ``count`` of them."""
    library = ctypes.CDLL(os.fspath(compile.emulator_library()))
    library.kitsune_emulator_set_multiprocessors(count)
    try:
        yield
    finally:
        library.kitsune_emulator_set_multiprocessors(132)


# A family, its arrangement, SMs of devices that are smaller than what it was planned for.
SMALLER = [
    ("mlp", "sm90-vertical-streamed-cluster2-lanes1", (11, 2)),
    ("mlp", "sm90-spatial-cluster-lanes1", (11, 4)),
    ("mlp", "sm80-spatial-l2-lanes2", (11, 4)),
    ("loss", "sm90-vertical-resident-lanes1", (7, 1)),
    ("tanh-step", "sm90-spatial-l2-lanes1", (25, 10)),
]
MORE = [
    ("mlp", "sm90-vertical-resident-lanes2", (7, 1)),
    ("mlp", "sm80-vertical-streamed-cluster1-lanes1", (5,)),
    ("tanh-step", "sm90-vertical-resident-lanes2", (5, 1)),
]


@pytest.mark.skipif(not hostcc.available(), reason=hostcc.why_not() or "")
@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize(
    ("name", "arrangement", "sizes"),
    [*SMALLER, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
    ids=lambda v: str(v),
)
def test_a_kernel_that_was_planned_for_a_larger_device_computes_the_same(
    name: str, arrangement: str, sizes: tuple[int, ...]
) -> None:
    """What is computed row by row has the same bits; sums over the rows are of fewer parts."""
    family = (FAMILIES | TRAINING)[name]
    of = subject(family.function, *family.arguments(64 * 25 - 3, "bfloat16"))
    plan = dataclasses.replace(arrangements(of)[arrangement], replicas=12)
    program = of.program(plan)
    kernel = Kernel(of, plan)
    wide = kernel()
    sinks = {s.array for s in program.sinks}
    assert kernel.code.kernel.launch[2] > max(sizes), "the grid fits the smaller device as it is"
    for size in sizes:
        with multiprocessors(size):
            narrow = Kernel(of, plan)()  # another executable: it is loaded again
        for k, (a, b) in enumerate(zip(wide, narrow, strict=True)):
            if sinks:
                scale = np.abs(a.astype(np.float64)).max()
                assert np.abs(a.astype(np.float64) - b.astype(np.float64)).max() <= 2.0**-7 * scale, f"result {k} on {size} SMs"
            else:
                assert a.tobytes() == b.tobytes(), f"result {k} on {size} SMs"


@pytest.mark.skipif(not hostcc.available(), reason=hostcc.why_not() or "")
@pytest.mark.usefixtures("kernel_cache")
def test_a_pipeline_with_more_blocks_than_the_device_holds_is_refused_with_what_to_do() -> None:
    family = TRAINING["tanh-step"]
    of = subject(family.function, *family.arguments(257, "bfloat16"))
    kernel = Kernel(of, arrangements(of)["sm90-spatial-l2-lanes1"])
    with (
        multiprocessors(7),
        pytest.raises(Exception, match=r"the \d+ blocks of a pipeline must all be resident, but only 7 fit") as caught,
    ):
        kernel()
    assert "trace and compile the function on this machine" in str(caught.value)

"""Several devices, and devices that are not the first: what is made runs on every one of them, or is told before it runs."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
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
from kitsune_jax import lowering
from kitsune_jax.planning.machines import GPUS, machine_for
from kitsune_jax.program import build
from kitsune_jax.route import route
from kitsune_jax.targets.cuda import compile, devices, hostcc, lower, nvrtc, runtime
from tests.cuda_cases import FAMILIES
from tests.cuda_run import Kernel, arrangements, kernel_cache, subject
from tests.cuda_training_cases import TRAINING
from tests.graphs import graph_of, nerf, nerf_params
from tests.test_cuda_launch import fake_driver, needs_compiler, run

__all__ = ["fake_driver", "kernel_cache"]

# compute capability, multiprocessors, shared memory of a block
H200, H100_PCIE, H200_SLICE = (90, 132, 232448), (90, 114, 232448), (90, 16, 232448)
A100, A10, RTX_4090 = (80, 108, 166912), (86, 72, 101376), (89, 128, 101376)
B200, V100 = (100, 148, 232448), (70, 80, 98304)


@pytest.fixture(autouse=True)
def _routes_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("KITSUNE_CUDA_ARCH", raising=False)
    lowering._routed.cache_clear()
    yield
    lowering._routed.cache_clear()


def machine_with(monkeypatch: pytest.MonkeyPatch, *found: tuple[int, int, int], version: int = 99_000) -> None:
    names = ("compute_capability", "multiprocessors", "shared_bytes")
    info: Any = {"version": version, "devices": [dict(zip(names, d, strict=True)) for d in found]}
    monkeypatch.setattr(runtime, "driver_info", lambda: info)


MACHINES = {
    "H200": ([H200], "sm_90a", "h200"),
    "eight H200": ([H200] * 8, "sm_90a", "h200"),
    "H100 PCIe": ([H100_PCIE], "sm_90a", "h200-114-227"),
    "H200 and H100 PCIe": ([H200, H100_PCIE], "sm_90a", "h200-114-227"),
    "a slice of a H200": ([H200_SLICE], "sm_90a", "h200-16-227"),
    "A100": ([A100], "sm_80", "a100"),
    "RTX 4090": ([RTX_4090], "sm_89", "a100-128-99"),
    "A100, A10 and RTX 4090": ([RTX_4090, A100, A10], "sm_80", "a100-72-99"),
    "H200 and A100": ([H200, A100], "compute_80", "a100"),
    "A100 and H200": ([A100, H200], "compute_80", "a100"),
    "B200": ([B200], "sm_100", "a100-148-163"),
    "B200 and H200": ([B200, H200], "compute_90", "a100-132-163"),
    "none": ([], "sm_90a", "h200"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_the_architecture_and_the_model_are_those_of_all_devices(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found, arch, model = MACHINES[name]
    machine_with(monkeypatch, *found)
    assert (devices.arch(), devices.model()) == (arch, model)
    assert machine_for("cuda", model).name == model
    assert devices.why_not() == ""
    assert ("differ" in devices.note()) == (len(set(found)) > 1)


def test_a_named_architecture_takes_the_limits_of_the_devices_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, H100_PCIE, A10, V100)
    for arch, model in (("sm_90a", "h200-114-227"), ("sm_86", "a100-72-99"), ("compute_80", "a100-72-99"), ("sm_120", "a100")):
        monkeypatch.setenv("KITSUNE_CUDA_ARCH", arch)
        assert (devices.arch(), devices.model(), devices.why_not(), devices.note()) == (arch, model, "", "")


def test_a_device_that_is_too_old_is_told_before_anything_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, H200, V100)
    assert "compute capability 7.0" in devices.why_not() and "CUDA_VISIBLE_DEVICES" in devices.why_not()
    assert "compute capability 7.0" in lower.why_not("cuda") or runtime.why_not() or nvrtc.why_not()


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")
def test_a_driver_that_cannot_read_the_ptx_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, H200, A100, version=12040)
    assert "sm_80 with 108 SMs, sm_90 with 132 SMs" in devices.why_not() and "CUDA 12.4" in devices.why_not()
    machine_with(monkeypatch, H200, H100_PCIE, version=12040)
    assert devices.why_not() == "", "a cubin needs no newer driver"


@pytest.mark.parametrize("base", sorted(GPUS))
@pytest.mark.parametrize("sms", [7, 16, 60, 114, 132, 200])
def test_a_model_with_other_numbers_promises_no_more_clusters_than_any_division_of_its_sms_holds(base: str, sms: int) -> None:
    machine = machine_for("cuda", f"{base}-{sms}-99")
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
        for region in route(graph, "cuda", force=force, device=device, code=False).regions:
            kernel = lower._kernel(build(graph, region.region, region.plan), region.plan, "region")
            found.append((region.plan, kernel.launch))
    return found


@needs_compiler
@pytest.mark.parametrize("name", [name for name, (found, _, _) in MACHINES.items() if found])
def test_kernels_load_on_every_device(monkeypatch: pytest.MonkeyPatch, fake_driver: pathlib.Path, name: str) -> None:
    found = MACHINES[name][0]
    machine_with(monkeypatch, *found)
    kernels = planned(None)
    assert kernels, "nothing was planned"
    answers = [
        f"{key}{i}={value}" for i, d in enumerate(found) for key, value in zip(("capability", "multiprocessors", "shared"), d)
    ]
    for plan, launch in kernels:
        clusters = machine_for("cuda", plan.machine).clusters(launch[4]) if launch[4] > 1 else 0
        program = f"""
        k = _cuda.Kernel(b"image", np.array({[int(x) for x in launch]}, np.int64), "region")
        print(json.dumps([error(lambda: k.load(100 * (d + 1))) for d in range({len(found)})]))
        """
        errors = run(program, fake_driver, ",".join([f"devices={len(found)}", f"clusters={clusters}", *answers]))
        assert errors == ["no error"] * len(found)


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC")
def test_a_kernel_for_devices_of_several_architectures_is_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, H200, A100)
    graph = graph_of(lambda x, w: jnp.tanh(x @ w), *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((20_000, 64), (64, 64))))
    (region,) = route(graph, "cuda", force=True, code=False).regions
    code = lower.generate("cuda", build(graph, region.region, region.plan), region.plan, "region")
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
    assert any("sm_80 with 108 SMs, sm_90 with 132 SMs" in note for note in report.notes), report.notes
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
    ("mlp", "sm90-vertical-resident-lanes2", (7, 1)),
    ("mlp", "sm90-vertical-streamed-cluster2-lanes1", (11, 2)),
    ("mlp", "sm90-spatial-cluster-lanes1", (11, 4)),
    ("mlp", "sm80-spatial-l2-lanes2", (11, 4)),
    ("mlp", "sm80-vertical-streamed-cluster1-lanes1", (5,)),
    ("loss", "sm90-vertical-resident-lanes1", (7, 1)),
    ("tanh-step", "sm90-spatial-l2-lanes1", (25, 10)),
    ("tanh-step", "sm90-vertical-resident-lanes2", (5, 1)),
]


@pytest.mark.skipif(not hostcc.available(), reason=hostcc.why_not() or "")
@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize(("name", "arrangement", "sizes"), SMALLER, ids=lambda v: str(v))
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
        pytest.raises(Exception, match="10 blocks of a pipeline must all be resident, but only 7 fit") as caught,
    ):
        kernel()
    assert "trace and compile the function on this machine" in str(caught.value)

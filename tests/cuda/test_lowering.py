"""Lowering for CUDA where there is no GPU: what a module holds, exports, and a compiler that is missing or fails."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import kitsune_jax as kj
from kitsune_jax import config
from kitsune_jax.targets.cuda import nvrtc, runtime, sources
from kitsune_jax.targets.cuda.sources import CompileError
from tests.support import checks
from tests.support.cuda_run import kernel_cache  # noqa: F401  (a fixture)

pytestmark = pytest.mark.usefixtures("kernel_cache")
needs_nvrtc = pytest.mark.skipif(not (nvrtc.available() and runtime.available()), reason="needs NVRTC and the CUDA extension")

ALLOWED = [export.DisabledSafetyCheck.custom_call(name) for name in (checks.TARGET, runtime.TARGET_NAME)]
W1, W2 = checks.arrays(3, (16, 32), (32, 8))


def mlp(x: Any, w1: Any, w2: Any) -> Any:
    return jax.nn.relu(x @ w1) @ w2


@dataclasses.dataclass(frozen=True)
class Held:
    """A kernel as a lowered module holds it."""

    image: bytes
    launch: tuple[int, ...]
    name: str


def kernels_in(lowered: Any) -> list[Held]:
    return kernels_of_text(lowered.as_text())


def kernels_of_text(text: str) -> list[Held]:
    found = []
    for call in re.findall(rf"custom_call @{runtime.TARGET_NAME}\(.*", text):
        image, name = re.search(r'image = dense<"0x([0-9A-F]+)">', call), re.search(r'name = "([^"]*)"', call)
        # MLIR prints more than 100 numbers as bytes.
        launch = re.search(r'launch = dense<(?:\[([-0-9, ]+)\]|"0x([0-9A-F]+)")>', call)
        assert image and launch and name, call[:200]
        words = map(int, launch[1].split(",")) if launch[1] else np.frombuffer(bytes.fromhex(launch[2]), np.int64).tolist()
        found.append(Held(bytes.fromhex(image[1]), tuple(words), name[1]))
    return found


def lowered_for_cuda(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))


def rows(n: int) -> jax.Array:
    (x,) = checks.arrays(n, (n, 16))
    return x


# --- the module


@needs_nvrtc
def test_a_module_carries_its_kernel() -> None:
    (one,) = kernels_in(lowered_for_cuda(kj.pipeline(mlp, force=True, strict=True), rows(200), W1, W2))
    assert one.image.startswith(b"\x7fELF") and b".text.kitsune_region\0" in one.image
    assert one.launch[:2] == (runtime.LAUNCH_VERSION, 900)
    assert re.fullmatch(r"region0 \(test_lowering\.py:\d+ \(mlp\)\)", one.name)


@needs_nvrtc
def test_equal_functions_carry_equal_kernels() -> None:
    """A program's text is the key of JAX's persistent cache."""
    texts = {lowered_for_cuda(kj.pipeline(mlp, force=True), rows(200), W1, W2).as_text() for _ in range(2)}
    jax.clear_caches()
    texts.add(lowered_for_cuda(kj.pipeline(mlp, force=True), rows(200), W1, W2).as_text())
    assert len(texts) == 1


@needs_nvrtc
def test_a_gradient_lowers_as_well() -> None:
    def loss(x: Any, w1: Any, w2: Any) -> Any:
        return jnp.sum(kj.pipeline(mlp, force=True)(x, w1, w2) ** 2)

    assert kernels_in(lowered_for_cuda(jax.grad(loss, (1, 2)), rows(200), W1, W2))


@needs_nvrtc
@pytest.mark.parametrize("arch, sm", [("sm_90a", 900), ("sm_86", 800)])
def test_the_environment_chooses_the_architecture(arch: str, sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_CUDA_ARCH", arch)
    (one,) = kernels_in(lowered_for_cuda(kj.pipeline(mlp, force=True, strict=True), rows(201), W1, W2))
    assert one.launch[1] == sm


@needs_nvrtc
def test_the_log_says_where_the_source_of_a_kernel_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="kitsune_jax"):
        lowered_for_cuda(kj.pipeline(mlp, force=True, strict=True), rows(202), W1, W2)
    path, _ = re.findall(r"kernel for sm_90a: (\S+\.cu)$", caplog.text, re.MULTILINE)  # the other is the packing kernel's
    assert "kitsune_region" in Path(path).read_text()


# --- export


def exported(platforms: tuple[str, ...]) -> Any:
    fn = jax.jit(kj.pipeline(mlp, force=True, strict=True, export="calls"))
    return export.export(fn, platforms=platforms, disabled_checks=ALLOWED)(rows(200), W1, W2)


@needs_nvrtc
def test_an_export_for_cuda_keeps_its_kernel_through_bytes() -> None:
    received = export.deserialize(exported(("cuda",)).serialize())
    (one,) = kernels_of_text(received.mlir_module())
    assert received.platforms == ("cuda",) and one.image.startswith(b"\x7fELF")


@needs_nvrtc
def test_an_export_for_two_platforms_holds_both_kernels_and_runs_on_the_one_at_hand() -> None:
    both = exported(("cpu", "cuda"))
    assert checks.TARGET in both.mlir_module() and len(kernels_of_text(both.mlir_module())) == 1
    checks.close(both.call(rows(200), W1, W2), checks.in_float64(mlp, rows(200), W1, W2))


@needs_nvrtc
def test_an_export_with_symbolic_shapes_is_compiled_for_a_gpu_when_its_sizes_are_known() -> None:
    fn = jax.jit(kj.pipeline(mlp, force=True, strict=True, export="calls"))
    (n,) = export.symbolic_shape("n")
    allowed = [*ALLOWED, export.DisabledSafetyCheck.custom_call("kitsune_region (import kitsune_jax)")]
    both = export.export(fn, platforms=("cpu", "cuda"), disabled_checks=allowed)(jax.ShapeDtypeStruct((n, 16), jnp.float32), W1, W2)
    received = export.deserialize(both.serialize())
    text = jax.jit(received.call).trace(rows(200), W1, W2).lower(lowering_platforms=("cuda",)).as_text()
    (one,) = kernels_of_text(text)
    assert one.image.startswith(b"\x7fELF") and checks.TARGET not in text
    checks.close(received.call(rows(200), W1, W2), checks.in_float64(mlp, rows(200), W1, W2))


# --- without a compiler

WITHOUT = textwrap.dedent(
    """
    import os, sys, warnings
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax, jax.numpy as jnp
    from kitsune_jax.targets.cuda import nvrtc
    nvrtc._candidates = lambda: iter(())
    import kitsune_jax as kj

    def mlp(x, w1, w2):
        return jax.nn.relu(x @ w1) @ w2

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 16), (16, 32), (32, 8))]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for rows in (256, 512, 512):
            args[0] = jax.ShapeDtypeStruct((rows, 16), jnp.float32)
            text = jax.jit(kj.pipeline(mlp, force=True)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
            assert "kitsune" not in text.replace("kitsune_pipeline", "") and "stablehlo.dot_general" in text, text
    print("|".join(str(w.message) for w in told))
    try:
        jax.jit(kj.pipeline(mlp, force=True, strict=True)).trace(*args).lower(lowering_platforms=("cuda",))
    except kj.NotPipelined as no:
        print(no)
    """
)


def test_without_nvrtc_one_warning_says_what_to_install_and_functions_lower_inline() -> None:
    if not runtime.available():
        pytest.skip("needs the CUDA extension")
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    warned, strict = done.stdout.strip().split("\n", 1)
    assert warned.count("|") == 0 and "pip install kitsune_jax[cuda13]" in warned and "plain HLO" in warned, warned
    assert "pip install kitsune_jax[cuda13]" in strict


# --- a kernel that does not compile


@pytest.fixture
def broken_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own sources, of which one no compiler takes: a defect of ours as a user would meet it."""
    base = tmp_path / "cuda"
    shutil.copytree(sources.root(), base)
    with (base / "include" / "kitsune" / "kitsune.h").open("a") as header:
        header.write('\n#error "broken on purpose"\n')
    monkeypatch.setattr(sources, "root", lambda: base)


@needs_nvrtc
@pytest.mark.usefixtures("broken_headers")
def test_a_failed_compile_raises_with_its_log_where_the_user_is_strict() -> None:
    with config.override(strict=True), pytest.raises(CompileError, match="broken on purpose") as raised:
        lowered_for_cuda(kj.pipeline(mlp, force=True), rows(301), W1, W2)
    assert "kitsune.h" in raised.value.log and raised.value.source_path is not None
    assert "kitsune_region" in raised.value.source_path.read_text()


@needs_nvrtc
@pytest.mark.expects_fallbacks
@pytest.mark.usefixtures("broken_headers")
def test_a_failed_compile_is_one_warning_with_its_log_else() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        texts = [lowered_for_cuda(kj.pipeline(mlp, force=True), rows(302), W1, W2).as_text() for _ in range(2)]
    assert all(runtime.TARGET_NAME not in text and "stablehlo.dot_general" in text for text in texts)
    (one,) = told
    assert issubclass(one.category, RuntimeWarning) and "broken on purpose" in str(one.message)


def test_the_images_of_a_module_are_read_back_whole() -> None:
    image = np.arange(256, dtype=np.uint8).tobytes()
    call = 'stablehlo.custom_call @kitsune_cuda(%0) {x = {image = dense<"0xHEX"> : t, launch = dense<[1, -2]> : t, name = "n"}}'
    assert kernels_of_text(call.replace("HEX", image.hex().upper())) == [Held(image, (1, -2), "n")]


@needs_nvrtc
def test_kernels_of_several_regions_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from kitsune_jax.capture.jaxpr import capture
    from kitsune_jax.frontend.route import RouteOptions, route
    from kitsune_jax.targets.cuda import compile

    both, real = threading.Barrier(2, timeout=60), compile.cubin

    def cubin(source: str, arch: str) -> compile.Compiled:
        both.wait()  # raises where the other kernel is compiled afterwards
        return real(source, arch)

    def two(x: Any, w1: Any, w2: Any) -> Any:
        return jnp.sort(jax.nn.relu(x @ w1), axis=0) @ w2

    monkeypatch.setenv("KITSUNE_NUM_THREADS", "2")
    monkeypatch.setattr(compile, "cubin", cubin)
    graph = capture(jax.make_jaxpr(two)(jnp.zeros((4096, 16)), W1, W2)).graph
    routed = route(graph, "cuda", RouteOptions(force=True))
    assert [r.name for r in routed.regions] == ["region0", "region1"] and not routed.failures

"""What ``scripts/gpu_check.sh --prepare`` makes: where it fits, nothing is compiled any more; what does not fit is told."""

from __future__ import annotations

import argparse
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kitsune_jax import cache
from kitsune_jax.targets.cuda import compile, nvrtc, runtime
from scripts.gpu import prepare, prepared, results, worker

ROOT = Path(__file__).parents[2]
DRIVER: dict[str, Any] = {"version": 13000, "devices": [prepare.DEVICES["h200"]]}
SOURCE = 'extern "C" __global__ void kitsune_region(float* x) { x[0] = 2; }'
needs_nvrtc = pytest.mark.skipif(not nvrtc.available(), reason=nvrtc.why_not() or "")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the checkout, and one in it for an environment of --prepare with a built extension."""
    for module in (prepare, prepared):
        monkeypatch.setattr(module, "FOLDER", tmp_path / ".gpu-check")
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(prepare, "VENV", tmp_path / "venv")
    for folder in (tmp_path / "kitsune_jax", tmp_path / "venv" / "kitsune_jax", tmp_path / "venv" / "cache" / "cuda"):
        folder.mkdir(parents=True)
    (tmp_path / "kitsune_jax" / "api.py").write_text("x = 1\n")
    (tmp_path / "venv" / "kitsune_jax" / "_cuda.abi3.so").write_bytes(b"an extension")
    return tmp_path


def packed(tree: Path, entries: list[str], jaxlib: str = "") -> None:
    """``.gpu-check`` for this Python and an H200, with some entries of the cache of ``--prepare``."""
    found: Any = [{"findings": [{"ok": True, "cubins": entries}]}]
    options = argparse.Namespace(
        python=f"{sys.version_info[0]}.{sys.version_info[1]}", jax=jaxlib or prepared.version("jaxlib"), nvrtc="13.0.88"
    )
    made_of = {"sources": results.fingerprint(), "native": results.fingerprint(prepared.NATIVE)}
    results.write_json(tree / "venv" / "driver.h200.json", DRIVER)
    prepare.pack(tree / "venv", found, {"h200": {**prepared.surroundings(), "model": "h200"}}, made_of, options)


@needs_nvrtc
def test_a_kernel_that_came_along_is_not_compiled(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tree / "venv" / "cache"))
    image = compile.cubin(SOURCE, "sm_90a")
    (entry,) = (p.name for p in (tree / "venv" / "cache" / "cuda").glob("*.cubin"))
    packed(tree, [entry])

    used, notes = prepared.install(tree / "here")
    assert used and "prepared: 1 kernels for h200" in notes[-1]
    assert (tree / "kitsune_jax" / "_cuda.abi3.so").read_bytes() == b"an extension"
    monkeypatch.setenv("KITSUNE_CACHE_DIR", str(tree / "here"))
    monkeypatch.setattr(nvrtc, "compile", lambda *_: pytest.fail("a kernel was compiled"))
    assert compile.cubin(SOURCE, "sm_90a") == image
    assert stat.S_IMODE((tree / "here" / "cuda").stat().st_mode) == 0o700


@pytest.mark.parametrize("what", ["jaxlib", "the C++ sources"])
def test_an_extension_for_something_else_is_not_used_and_the_reason_is_told(tree: Path, what: str) -> None:
    packed(tree, [], jaxlib="0.0.1" if what == "jaxlib" else "")
    if what != "jaxlib":
        (tree / "cuda" / "src").mkdir(parents=True)
        (tree / "cuda" / "src" / "launch.cc").write_text("changed")
    used, notes = prepared.install(tree / "here")
    assert not used
    assert any(f"prepared for {what} " in note and "build the extension here" in note for note in notes), notes
    assert not (tree / "kitsune_jax" / "_cuda.abi3.so").exists()


def test_changed_sources_are_told(tree: Path) -> None:
    packed(tree, [])
    (tree / "kitsune_jax" / "api.py").write_text("x = 2\n")
    used, notes = prepared.install(tree / "here")
    assert used  # the extension is not made of it
    assert any("the sources changed after they were prepared" in note for note in notes)


def test_nothing_prepared_is_told(tree: Path) -> None:
    used, notes = prepared.install(tree / "here")
    assert not used and "nothing was prepared" in notes[0]


def test_a_device_that_was_not_prepared_for_is_told(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is made for the driver's numbers: with others there are other kernels."""
    monkeypatch.setattr(runtime, "driver_info", lambda: DRIVER)
    assert runtime.device_model() == "h200"
    packed(tree, [])
    here = prepared.here()
    assert here["fits"] and prepared.device_of(here) == "h200"
    (h200,) = DRIVER["devices"]
    monkeypatch.setattr(runtime, "driver_info", lambda: {**DRIVER, "devices": [{**h200, "multiprocessors": 114}]})
    here = prepared.here()
    assert not here["fits"] and here["model"].startswith("h200-114-227")
    driver = prepared.driver(prepared.device_of(here))  # with which workers plan as it was prepared
    assert driver is not None and json.loads(driver.read_text()) == DRIVER


def test_a_folder_that_is_cut_off_is_told_and_not_used(tree: Path) -> None:
    packed(tree, [])
    (tree / ".gpu-check" / prepared.KERNELS).write_bytes(b"not an archive")
    used, notes = prepared.install(tree / "here")
    assert not used and any("could not be copied" in note for note in notes)


@pytest.mark.slow
@needs_nvrtc
def test_kernels_are_compiled_for_the_device_that_is_told_of(tmp_path: Path) -> None:
    """And each program names the entries of the cache that it needs."""
    results.write_json(tmp_path / "driver.json", DRIVER)
    command = [
        sys.executable,
        "-m",
        "scripts.gpu.worker",
        "programs",
        "softmax planned 0/1",
        "--output",
        str(tmp_path / "found.json"),
    ]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "KITSUNE_CACHE_DIR": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    variables |= {worker.DRIVER: str(tmp_path / "driver.json")}
    done = subprocess.run([*command, "--without-device"], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["finished"] and all(f["ok"] for f in content["findings"])
    entries = prepare.cubins_of(content)
    assert entries and entries == {p.name for p in cache.Cache(tmp_path / "cache" / "cuda").folder.glob("*.cubin")}  # type: ignore[union-attr]

"""``scripts/gpu_check.sh --prepare``: what a bare GPU machine would have to compile, made on a machine without a GPU.

Comes in: a Python and the versions of JAX and NVRTC that the device's machine has; what the drivers say of the devices. Goes out:
``.gpu-check``, a folder that git ignores and that travels with the tree: the extension, every kernel that the check asks for, and
what both were made for. All of it is built in a copy of the sources and an environment of its own (``.venv-gpu-check``, which stays
here). Standard library only.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.gpu import prepared, results
from scripts.gpu.check import PORTABLE
from scripts.gpu.prepared import FOLDER, KERNELS
from scripts.gpu.results import ROOT, read_json
from scripts.gpu.worker import DRIVER

VENV = ROOT / ".venv-gpu-check"
# The extension's build as in pyproject.toml, and what the programs of the check import.
PACKAGES = (
    *("nanobind==3.1.0", "setuptools==84.2.1", "scipy", "pytest", "hypothesis", "matplotlib", "rich"),
    *("optax", "flax", "equinox", "jraph"),
)
# What the drivers say of these devices: an H200's as its driver told it on 2026-11-26, an H100's by its data sheet.
_HOPPER = {"compute_capability": 90, "multiprocessors": 132, "shared_bytes": 227 << 10, "clock": 1.98e9}
DEVICES: dict[str, dict[str, Any]] = {
    "h200": {**_HOPPER, "name": "NVIDIA H200", "memory_bandwidth": 2 * 3.201e9 * 6144 / 8, "l2_bytes": 60 << 20},
    "h100": {**_HOPPER, "name": "NVIDIA H100 80GB HBM3", "memory_bandwidth": 2 * 2.619e9 * 5120 / 8, "l2_bytes": 50 << 20},
}
LIMIT = 64 << 20  # of what travels to a borrowed machine, all together
_SOURCES = (
    *("kitsune_jax", "cpu", "cuda", "scripts", "tests", "benchmarks", "examples", "reference", "trust"),
    *("setup.py", "pyproject.toml", "README.md", "LICENSE"),
)
_JOB_S = 1200.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh --prepare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default="3.12", help="version of the device's Python (default 3.12)")
    parser.add_argument("--jax", default="0.11.2", help="version of the device's JAX (default 0.11.2)")
    parser.add_argument("--nvrtc", default="13.0.88", help="version of the device's NVRTC (default 13.0.88)")
    parser.add_argument("--devices", default="h200,h100", help=f"of {', '.join(DEVICES)} (default: both)")
    parser.add_argument("--driver", type=Path, help="measured.json of an earlier check: plan for that device as its driver told it")
    parser.add_argument("--only", default="", help="programs and cases whose name holds this, alone (to try the preparation)")
    parser.add_argument("--kinds", default="planned,cases,forced,portable", help="what to compile (default: everything)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    options = parser.parse_args(arguments)
    start = time.monotonic()
    devices = {name: {"version": 13000, "devices": [DEVICES[name]]} for name in options.devices.split(",")}
    if options.driver:
        told = (read_json(options.driver) or {}).get("about", {}).get("driver")
        if not isinstance(told, dict):
            print(f"{options.driver} does not tell of a device")
            return 2
        devices = {next(name for name in DEVICES if name in told["devices"][0]["name"].lower()): told}
    made_of = {"sources": results.fingerprint(), "native": results.fingerprint(prepared.NATIVE)}  # now: it takes a while
    try:
        python = environment(options.python, options.jax, options.nvrtc)
        tree = copy_of_sources()
        say("building the extension")
        with (VENV / "build.log").open("w") as file:
            command = [str(python), "setup.py", "build_ext", "--inplace"]
            subprocess.run(command, cwd=tree, stdout=file, stderr=subprocess.STDOUT, check=True)
        here = _told(python, tree, devices)
        found = compile_all(python, tree, devices, options)
    except subprocess.CalledProcessError as error:
        print(f"WRONG: {' '.join(map(str, error.cmd))} failed; see the logs in {VENV}")
        return 1
    pack(tree, found, here, made_of, options)
    return tell(found, time.monotonic() - start)


def say(text: str) -> None:
    print(f"=== {text}", flush=True)


def environment(version: str, jax: str, nvrtc: str) -> Path:
    """The interpreter of an environment that has the device's versions."""
    wanted = " ".join((version, jax, nvrtc, *PACKAGES))
    python, marker = VENV / "bin" / "python", VENV / "versions"
    if not (marker.exists() and marker.read_text() == wanted):
        say(f"an environment with Python {version}, JAX {jax}, NVRTC {nvrtc}")
        if VENV.exists() and not _version(python).startswith(version):
            shutil.rmtree(VENV)
        subprocess.run([ROOT / "scripts" / "make_venv.sh", VENV, version], check=True)
        packages = [f"jax=={jax}", f"jaxlib=={jax}", f"nvidia-cuda-nvrtc=={nvrtc}", *PACKAGES]
        subprocess.run([ROOT / "scripts" / "pip_install.sh", VENV, *packages], check=True)
        marker.write_text(wanted)
    return python


def _version(python: Path) -> str:
    command = [str(python), "-c", "import platform; print(platform.python_version())"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


def copy_of_sources() -> Path:
    """A copy of the tree, so that neither the extension nor its objects of this machine's own JAX get in the way."""
    tree = VENV / "tree"
    for name in _SOURCES:
        source, target = ROOT / name, tree / name
        if source.is_dir():
            # What was built for it stays, where its sources are the same.
            kept = {p.name: p.read_bytes() for p in target.glob("*.so")} if name == "kitsune_jax" else {}
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.pyc"))
            for built, content in kept.items():
                (target / built).write_bytes(content)
        elif source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return tree


def _variables(tree: Path, device: str = "", arch: str = "") -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu", "KITSUNE_CACHE_DIR": str(VENV / "cache")}
    found |= {DRIVER: str(VENV / f"driver.{device}.json")} if device else {}
    return found | ({"KITSUNE_CUDA_ARCH": arch} if arch else {})


def _told(python: Path, tree: Path, devices: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each device what decides the keys of its kernels."""
    text = (
        "import json; from scripts.gpu import prepared as p, worker; worker.plan_as_prepared(); print(json.dumps(p.surroundings()))"
    )
    found = {}
    for name, driver in devices.items():
        results.write_json(VENV / f"driver.{name}.json", driver)
        done = subprocess.run(
            [python, "-c", text], cwd=tree, env=_variables(tree, name), capture_output=True, text=True, check=True
        )
        found[name] = json.loads(done.stdout)
    return found


def compile_all(python: Path, tree: Path, devices: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A process for each family and case, some at once. The large ones first, so that none is left alone at the end."""
    text = "import json; from scripts.gpu import cases as c, programs as p; print(json.dumps([[*p.ALL], [*c.CASES, *c.LATER]]))"
    done = subprocess.run([python, "-c", text], cwd=tree, env=_variables(tree), capture_output=True, text=True, check=True)
    families, cases = json.loads(done.stdout)
    kinds = options.kinds.split(",")
    jobs: list[tuple[str, str, str, str]] = []
    for device in devices:
        jobs += [("case", name, device, "") for name in cases if "cases" in kinds]
        jobs += [("queues", "", device, "")] if "cases" in kinds and device == next(iter(devices)) else []
        jobs += [("programs", f"{f} {kind} 0/1", device, "") for kind in ("planned", "forced") if kind in kinds for f in families]
        jobs += [("programs", f"{f} planned 0/1", device, "sm_90") for f in PORTABLE if "portable" in kinds]
    jobs = [job for job in jobs if options.only in job[1]]
    folder = VENV / "compiled"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def do(number: int, job: tuple[str, str, str, str]) -> dict[str, Any]:
        kind, name, device, arch = job
        output = folder / f"{number}.json"
        command = [str(python), "-m", "scripts.gpu.worker", kind, *([name] if name else []), "--output", str(output)]
        command.append("--without-device")
        began = time.monotonic()
        with output.with_suffix(".log").open("w") as log:
            try:
                variables = _variables(tree, device, arch)
                subprocess.run(command, cwd=tree, env=variables, stdout=log, stderr=log, timeout=_JOB_S, check=False)
            except subprocess.TimeoutExpired:
                print(f"{name} for {device} took more than {_JOB_S:.0f} s", file=log)
        found = {"error": "it ended without a word", **(read_json(output) or {})}
        if found.get("finished"):
            del found["error"]
        return {**found, "kind": kind, "device": device, "job": f"{name or kind} {arch}".strip(), "took": time.monotonic() - began}

    found = []
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        for future in concurrent.futures.as_completed([pool.submit(do, number, job) for number, job in enumerate(jobs)]):
            one = future.result()
            found.append(one)
            wrong = [f"{f['name']}: {f.get('error')}" for f in one.get("findings", []) if not f["ok"]]
            wrong += [f"{key}: {c['error']}" for key, c in one.get("columns", {}).items() if "error" in c and key != "cudnn"]
            wrong += [one["error"]] if "error" in one else []
            head = (
                f"[{len(found)}/{len(jobs)}] {one['job']} for {one['device']}: {len(cubins_of(one))} kernels, {one['took']:.0f} s"
            )
            print("; WRONG ".join([head, *wrong])[:600], flush=True)
            one["wrong"] = wrong
    return found


def cubins_of(one: dict[str, Any]) -> set[str]:
    """The entries of the cache that a worker asked for."""
    parts = [one, *one.get("findings", []), *one.get("columns", {}).values()]
    return {entry for part in parts for entry in part.get("cubins", [])}


def pack(
    tree: Path, found: list[dict[str, Any]], here: dict[str, dict[str, Any]], made_of: dict[str, str], options: argparse.Namespace
) -> None:
    """The folder that travels, replaced when it is whole."""
    new = FOLDER.with_name(f"{FOLDER.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    (new / "extension").mkdir(parents=True)
    for built in (tree / "kitsune_jax").glob("*.so"):
        shutil.copy2(built, new / "extension" / built.name)
    entries = sorted(set().union(*(cubins_of(one) for one in found)))
    with tarfile.open(new / KERNELS, "w:xz", preset=6) as tar:
        for entry in entries:
            if (path := VENV / "cache" / "cuda" / entry).exists():  # one that did not compile has none
                tar.add(path, entry)
    for name in here:
        shutil.copy2(VENV / f"driver.{name}.json", new)
    about = {
        **next(iter(here.values())),
        "models": {name: of["model"] for name, of in here.items()},
        "extension": {"Python": options.python, "jaxlib": options.jax, "the C++ sources": made_of["native"]},
        "sources": made_of["sources"],
        "commit": git("rev-parse", "HEAD").decode().strip(),
        "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
    }
    results.write_json(new / "about.json", about)
    shutil.rmtree(FOLDER, ignore_errors=True)
    new.rename(FOLDER)


def git(*arguments: str) -> bytes:
    """What git says of this checkout; nothing outside of one."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout
    except OSError:
        return b""


def tell(found: list[dict[str, Any]], seconds: float) -> int:
    wrong = sum(bool(one["wrong"]) for one in found)
    bytes_of = sum(p.stat().st_size for p in FOLDER.rglob("*") if p.is_file())
    travels = [ROOT / os.fsdecode(name) for name in git("ls-files", "-co", "--exclude-standard", "-z").split(b"\0") if name]
    tree = sum(path.stat().st_size for path in travels if path.is_file())
    size = f"{FOLDER.name}: {bytes_of / 2**20:.1f} MiB, with the tree {(bytes_of + tree) / 2**20:.1f} MiB"
    print(f"{size}; {len(found) - wrong} of {len(found)} families and cases compiled, {seconds:.0f} s")
    if bytes_of + tree > LIMIT:
        print(f"WRONG: that is more than the {LIMIT >> 20} MiB that a borrowed machine takes")
    return 1 if wrong or bytes_of + tree > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())

"""``scripts/gpu_check.sh --prepare``: what a bare GPU machine would have to compile, made on a machine without a GPU.

Comes in: a Python and the versions of JAX and NVRTC that the device's machine has; what its driver says of it. Goes out:
``.gpu-check``, a folder that git ignores and that travels with the tree: the extension, every kernel, and what both were made for.
All of it is built in a copy of the sources and an environment of its own (``.venv-gpu-check``, which stays here). Standard library
only.
"""

from __future__ import annotations

import argparse
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
from scripts.gpu.prepared import FOLDER, KERNELS
from scripts.gpu.steps import PORTABLE

ROOT = results.ROOT
VENV = ROOT / ".venv-gpu-check"
PACKAGES = ("nanobind==3.1.0", "setuptools==84.2.1", "scipy", "pytest")  # the first two as in pyproject.toml
# What the driver says of an H200 (data sheets: 132 multiprocessors, 227 KiB of shared memory for a block, 1980 MHz, 6144 bits of
# memory at 3.2 GHz; PyTorch reports 60 MiB of L2). `environment.json` of a check has what it really said; --driver takes that file.
H200: dict[str, Any] = {
    "version": 13000,
    "devices": [
        {
            "name": "NVIDIA H200",
            "compute_capability": 90,
            "multiprocessors": 132,
            "shared_bytes": 227 << 10,
            "clock": 1.98e9,
            "memory_bandwidth": 2 * 3.201e9 * 6144 / 8,
            "l2_bytes": 60 << 20,
        }
    ],
}
LIMIT = 64 << 20  # of what travels to a borrowed machine, all together
_SOURCES = (
    "kitsune_jax",
    "cpu",
    "cuda",
    "scripts",
    "tests",
    "benchmarks",
    "examples",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh --prepare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default="3.12", help="version of the device's Python (default 3.12)")
    parser.add_argument("--jax", default="0.11.2", help="version of the device's JAX (default 0.11.2)")
    parser.add_argument("--nvrtc", default="13.0.88", help="version of the device's NVRTC (default 13.0.88)")
    parser.add_argument("--driver", type=Path, help="environment.json of an earlier check on that device; default: an H200")
    parser.add_argument("--only", default=None, help="programs whose name holds this, alone (to try the preparation)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 2)
    options = parser.parse_args(arguments)
    start = time.monotonic()
    driver = H200
    if options.driver:
        driver = (results.read_json(options.driver) or {}).get("about", {}).get("driver")
        if not isinstance(driver, dict):
            print(f"{options.driver} does not tell of a device")
            return 2
    made_of = {"sources": results.fingerprint(), "native": results.fingerprint(prepared.NATIVE)}  # now: it takes a while
    try:
        python = environment(options.python, options.jax, options.nvrtc)
        tree = copy_of_sources()
        say("building the extension")
        log = VENV / "build.log"
        with log.open("w") as file:
            command = [str(python), "setup.py", "build_ext", "--inplace"]
            subprocess.run(command, cwd=tree, stdout=file, stderr=subprocess.STDOUT, check=True)
        made = kernels(python, tree, VENV / "kernels" / made_of["sources"], driver, options)
    except subprocess.CalledProcessError as error:
        print(f"WRONG: {' '.join(map(str, error.cmd))} failed; see the logs in {VENV}")
        return 1
    pack(tree, made, made_of, options)
    return tell(made, time.monotonic() - start)


def say(what: str) -> None:
    print(f"=== {what}", flush=True)


def environment(version: str, jax: str, nvrtc: str) -> Path:
    """The interpreter of an environment that has the device's versions."""
    wanted = f"{version} {jax} {nvrtc}"
    python, marker = VENV / "bin" / "python", VENV / "versions"
    if not (marker.exists() and marker.read_text() == wanted):
        say(f"an environment with Python {version}, JAX {jax}, NVRTC {nvrtc}")
        if VENV.exists() and not str(_version(python)).startswith(version):
            shutil.rmtree(VENV)
        subprocess.run([ROOT / "scripts" / "make_venv.sh", VENV, version], check=True)
        packages = [f"jax=={jax}", f"jaxlib=={jax}", f"nvidia-cuda-nvrtc=={nvrtc}", *PACKAGES]
        subprocess.run([ROOT / "scripts" / "pip_install.sh", VENV, *packages], check=True)
        marker.write_text(wanted)
    return python


def _version(python: Path) -> str:
    try:
        return subprocess.run(
            [python, "-c", "import platform; print(platform.python_version())"], capture_output=True, text=True
        ).stdout
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


def kernels(python: Path, tree: Path, cache: Path, driver: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compiles for the device, then for the portable path, into ``cache``; the records of both."""
    for old in [p for p in (VENV / "kernels").glob("*") if p != cache]:
        shutil.rmtree(old)
    told = VENV / "driver.json"
    told.write_text(json.dumps(driver))
    found = []
    for name, words, arch in (("native", options.only or "", ""), ("portable", options.only or PORTABLE, "sm_90")):
        say(f"compiling kernels: {name}")
        output = VENV / f"precompile.{name}.json"
        output.unlink(missing_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu", "KITSUNE_CACHE_DIR": str(cache)}
        environment |= {"KITSUNE_CUDA_ARCH": arch} if arch else {}
        command = [str(python), "-m", "scripts.gpu.precompile", "--output", str(output), "--driver", str(told)]
        command += ["--workers", str(options.workers), *(["--only", words] if words else [])]
        status = subprocess.run(command, cwd=tree, env=environment, check=False).returncode
        content = results.read_json(output)
        if content is None or not content.get("finished"):
            raise subprocess.CalledProcessError(status, command)
        found.append({**content, "cache": cache / "cuda"})
    return found


def pack(tree: Path, made: list[dict[str, Any]], made_of: dict[str, str], options: argparse.Namespace) -> None:
    """The folder that travels, replaced when it is whole."""
    new = FOLDER.with_name(f"{FOLDER.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    (new / "extension").mkdir(parents=True)
    for built in (tree / "kitsune_jax").glob("*.so"):
        shutil.copy2(built, new / "extension" / built.name)
    entries = sorted({entry for content in made for f in content["findings"] for entry in f.get("entries", [])})
    with tarfile.open(new / KERNELS, "w:xz", preset=6) as tar:
        for entry in entries:
            if (path := made[0]["cache"] / entry).exists():  # one that did not compile has none
                tar.add(path, entry)
    commit = git("rev-parse", "HEAD").decode().strip()
    about = {
        **made[0]["surroundings"],
        "portable": made[1]["surroundings"],
        "extension": {
            "Python": options.python,
            "jaxlib": options.jax,
            "the C++ sources": made_of["native"],
        },
        "sources": made_of["sources"],
        "commit": commit,
        "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
    }
    (new / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    shutil.rmtree(FOLDER, ignore_errors=True)
    new.rename(FOLDER)


def git(*arguments: str) -> bytes:
    """What git says of this checkout; nothing outside of one."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout
    except OSError:
        return b""


def tell(made: list[dict[str, Any]], seconds: float) -> int:
    findings = [f for content in made for f in content["findings"]]
    wrong = [f for f in findings if not f["ok"]]
    bytes_of = sum(p.stat().st_size for p in FOLDER.rglob("*") if p.is_file())
    travels = [ROOT / os.fsdecode(name) for name in git("ls-files", "-co", "--exclude-standard", "-z").split(b"\0") if name]
    tree = sum(path.stat().st_size for path in travels if path.is_file())
    size = f"{FOLDER.name}: {bytes_of / 2**20:.1f} MiB, with the tree {(bytes_of + tree) / 2**20:.1f} MiB"
    print(f"{size}; {len(findings) - len(wrong)} of {len(findings)} programs compiled, {seconds:.0f} s")
    if bytes_of + tree > LIMIT:
        print(f"WRONG: that is more than the {LIMIT >> 20} MiB that a borrowed machine takes")
    return 1 if wrong or bytes_of + tree > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())

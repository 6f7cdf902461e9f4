"""What a number was measured on: the machine, the versions, the commit."""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

_ISA = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd", "asimdhp", "bf16", "sve")


def describe_machine() -> dict[str, Any]:
    """CPU model, family and number of the model, usable cores, memory, instruction sets that matter here, huge-page setting,
    operating system, JAX devices; ``gpu`` where JAX's default device is one."""
    info = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    present = set(flags.group(1).split()) if flags else set()
    family, number = (re.search(rf"^{key}\s*:\s*(\d+)$", info, re.MULTILINE) for key in ("cpu family", "model"))
    memory = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    pages = re.search(r"\[(\w+)\]", _read("/sys/kernel/mm/transparent_hugepage/enabled"))
    machine: dict[str, Any] = {
        "cpu": " ".join(model.group(1).split()) if model else platform.processor() or platform.machine(),
        "cores": _usable_cores(),
        "architecture": platform.machine(),
        "isa": [name for name in _ISA if name in present],
        "memory_bytes": int(memory.group(1)) * 1024 if memory else None,
        "transparent_hugepages": pages.group(1) if pages else None,
        "system": f"{platform.system()} {platform.release()}",
        "devices": [str(d) for d in jax.devices()],
    }
    if family and number:
        machine["family"], machine["model"] = int(family[1]), int(number[1])
    if has_gpu():
        machine["gpu"] = {"name": jax.devices()[0].device_kind, **describe_driver()}
    return machine


def has_gpu() -> bool:
    """Whether JAX's default device is a CUDA device."""
    return bool(jax.devices()[0].platform == "gpu")


def describe_driver() -> dict[str, str]:
    """What ``nvidia-smi`` says of the first device: driver, power limit, clocks at this moment. Empty where it cannot be asked."""
    fields = ("driver_version", "power.limit", "clocks.sm", "clocks.max.sm", "clocks.mem", "memory.total")
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (value.strip() for value in done.stdout.split(",")), strict=False))


def machine_slug(machine: dict[str, Any]) -> str:
    """A file name for the kind of ``machine``: ``amd-epyc-9575f-2c``, ``amd-epyc-zen-5-2c``, ``h200``. Cloud machines tell little
    of their CPU: its design, where it is known, and whether it has tile products (AMX) are told, because they make another kind
    of machine of it. Machines of one kind are compared with each other."""
    if "gpu" in machine:
        return re.sub(r"[^a-z0-9]+", "-", re.sub(r"^NVIDIA ", "", machine["gpu"]["name"]).lower()).strip("-")
    words = re.sub(r"\([^)]*\)|@.*|\b(\d+-core )?processor\b|\bcpu\b", " ", machine["cpu"], flags=re.IGNORECASE)
    tiles = " amx" if "amx_tile" in machine.get("isa", ()) else ""
    return re.sub(r"[^a-z0-9]+", "-", f"{words} {generation(machine)} {machine['cores']}c{tiles}".lower()).strip("-")


def generation(machine: dict[str, Any]) -> str:
    """The design of a CPU whose name does not tell it, such as "Zen 5"; "" where it is not known. Families and models as
    ``/proc/cpuinfo`` numbers them: https://en.wikichip.org/wiki/amd/cpuid."""
    if "AMD" not in machine.get("cpu", ""):
        return ""
    family, model = machine.get("family"), machine.get("model")
    if family == 26:
        return "Zen 5"
    if family != 25 or model is None:
        return ""
    return {**dict.fromkeys((1, 6, 7, 10), "Zen 4"), **dict.fromkeys((0, 2, 3, 4, 5), "Zen 3")}.get(model // 16, "")


def describe_software() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("kitsune_jax", "jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cuda-nvrtc", "numpy", "scipy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def describe_commit() -> dict[str, Any]:
    """The commit of the checkout this file lies in, and whether tracked files differ from it; None outside of a checkout."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!benchmarks/results", ":!README.md")
    return {"commit": git("rev-parse", "HEAD"), "modified": None if changed is None else bool(changed)}


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def _usable_cores() -> int:
    import os

    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""

"""What the operating system says about the CPU: its name, its caches, and which shipped profile it is most like."""

from __future__ import annotations

import functools
import os
import platform
import re
import threading
from pathlib import Path

KIB, MIB = 1024, 1024 * 1024
_THREADS = Path("/proc/self/task")
_OWN = Path("/proc/thread-self")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@functools.cache
def model_name() -> str:
    """The processor with its family, as /proc/cpuinfo has it: "AMD EPYC, family 26, model 2"."""
    found = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    name = found[1].strip() if found else platform.processor() or platform.machine()
    numbers = [f"{what} {n[1]}" for what in ("cpu family", "model", "stepping", "CPU part") if (n := _field(what))]
    return ", ".join((name, *numbers))


def slug() -> str:
    """The name as a part of a profile's: "amd-epyc-26-2"."""
    found = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    name = found[1] if found else platform.processor() or platform.machine()
    numbers = [n[1] for what in ("cpu family", "model") if (n := _field(what))]
    words = re.sub(r"\(.*?\)|@.*|\bCPU\b|\bprocessor\b", " ", name, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", " ".join((words, *numbers)).lower()).strip("-") or "cpu"


def family(isa: str) -> str:
    """The family of ``shipped.FAMILIES`` that a machine with kernels for ``isa`` is most like."""
    number, vendor = _field("cpu family"), "AuthenticAMD" in _cpuinfo()
    if vendor and number and isa == "avx512bf16":
        return "zen4" if number[1] == "25" else "zen5"
    if "GenuineIntel" in _cpuinfo() and isa == "avx512":
        return "skylakex"
    return {"amx": "emeraldrapids"}.get(isa, isa)


@functools.cache
def cache_sizes() -> tuple[int, int, int]:
    """(L1 data, L2, L3) of one core in bytes from sysfs; 32 KiB, 1 MiB and 8 MiB where it says nothing."""
    return read_cache_sizes(_CACHES)


def read_cache_sizes(folder: Path) -> tuple[int, int, int]:
    sizes = {1: 32 * KIB, 2: MIB, 3: 8 * MIB}
    for index in sorted(folder.glob("index*")):
        level, kind, size = (_read(index / name).strip() for name in ("level", "type", "size"))
        match = re.fullmatch(r"(\d+)([KMG]?)", size)
        if level in ("1", "2", "3") and kind != "Instruction" and match and int(match[1]) > 0:
            sizes[int(level)] = int(match[1]) * {"": 1, "K": KIB, "M": MIB, "G": 1024 * MIB}[match[2]]
    return sizes[1], sizes[2], sizes[3]


def stolen_seconds() -> float:
    """Since the machine started, seconds of all its processors that a hypervisor gave to somebody else; 0 where nobody says so."""
    found = re.match(r"cpu +((?:\d+ ?)+)", _read(Path("/proc/stat")))
    fields = found[1].split() if found else []
    return int(fields[7]) / os.sysconf("SC_CLK_TCK") if len(fields) > 7 else 0.0


def ran_and_waited() -> tuple[float, float]:
    """How long the thread that asks has run, and has waited for a core that others had; (0, 0) where the system does not say."""
    fields = _read(_OWN / "schedstat").split()
    return (1e-9 * int(fields[0]), 1e-9 * int(fields[1])) if len(fields) > 1 else (0.0, 0.0)


def other_threads_seconds() -> dict[str, float]:
    """How long each thread of this process but the one that asks has run, by its number; nothing where the system does not say."""
    own = str(threading.get_native_id())
    found = {}
    for thread in _THREADS.glob("*"):
        if thread.name != own and (text := _read(thread / "schedstat")):
            found[thread.name] = 1e-9 * int(text.split()[0])
    return found


def _field(name: str) -> re.Match[str] | None:
    return re.search(rf"^{name}\s*:\s*(\S+)$", _cpuinfo(), re.MULTILINE)


@functools.cache
def _cpuinfo() -> str:
    return _read(Path("/proc/cpuinfo"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

"""``MachineProfile``: measured times of the smallest pieces of work that CPU plans consist of; the profiles that come with the
package; and the operating system's facts about the CPU.

Comes in: numbers by name (below), or a name such as "zen5-2". Goes out: a ``MachineProfile``. Invariants: profiles are plain data,
written as JSON and read back without loss, and equal profiles give equal plans; only ``kernels`` and ``xla`` make numbers from a
clock. All numbers are seconds: of our own kernels, of **one worker while all workers are busy**; under ``xla/``, of XLA with the
whole machine.

=====================================  ============================================================================================
``gemm/<dtype>/<product>/<K>x<N>``     a tile of 96 rows times K x N, packed; product: widened, dots, tiles
``outer/<dtype>/<product>/<K>x<N>``    the weight gradient of a tile of 96 rows, K x N accumulators
``short/<dtype>/<product>``            a tile of 1 row times 256 x 256
``few/<dtype>``                        an element of a weight in the second level that a single row is multiplied by, in place
``outer_short/<dtype>/<product>``       the gradient of a tile of 8 rows, 256 x 256 accumulators
``pack/<dtype>/<product>``             an element of a weight into panels; ``pack_t/``: of a transposed one
``activation/<name>/<dtype>``          an element in a product's epilogue, beyond a ReLU
``vector/<opcode>``                    an element of a float32 micro-operation (of hashes: uint32); ``vector64/`` of float64
``load/<dtype>``, ``store/<dtype>``    an element between memory and registers, with its conversion
``fold/<row or column>/<dtype>``       an element of a sum along a row, or over the rows
``fold/short/<dtype>``                 a row of 16 elements; ``load/short/``: 16 elements
``copy/<l1, l2, l3, dram>``            a byte read and a byte written
``touch``, ``touch/huge``              a byte of fresh pages; of huge pages, which a pipeline asks for where its results are large
``take/<l2, l3>/<16, 256>``            a row of so many elements read by a random index, of a table in that cache
``folded/<16, 256>``                   a row added to a random row of a table in the second level
``runs/<16, 256>``                     a row added to the previous ones with the same index, of which there are eight
``order``                              an index, for making the order of a stream
``picked``                             an element selected from a row by an index that all rows share
``dot/<m>x<k>x<n>``                    products of the m (= n) vectors of a row with each other
``call``, ``call/short``               a call of a pipeline beside its work: with all workers; on the calling thread alone
``call/layer``                         one more product, with its weight, in a call
``xla/call``, ``xla/kernel``           a jitted function without work; one more kernel in it
``xla/call/handed``                    handing a program to another thread, beside the program
``xla/while``                          a step of a loop with one kernel of one thread; ``/stored``: a byte of a slice that it stores
``xla/start``                          one of several products of 16 x 64 times 64 x 64, one after the other
``xla/dot/<dtype>/<rows>x<K>x<N>``     ``x @ w``; ``xla/dot_t/``: times w transposed; ``xla/outer/``: ``x.T @ y``
``xla/vector/<dtype>``                 an element of a weight in the L3 that a single row is multiplied by
``xla/batched/<dtype>``                a multiplication and addition of batched products of 16 x 64 times 64 x 16
``xla/loop/<op>/<dtype>``              an element of a fused loop with that operation, in the cache
``xla/gather/<1, 64>``                 a row of so many elements read by a random index; ``/far``: more, of a table in the L3
``xla/scatter/<1, 64>``                a row added by a random index
``xla/reduce/<which>/<dtype>``         an element of a sum over the trailing dimension (row), the leading one (column), the middle
                                       one (middle) or all
=====================================  ============================================================================================
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
import os
import platform
import re
import threading
from collections.abc import Mapping
from pathlib import Path

from kitsune_jax.planning.plan import KIB, MIB

# --- The profile ------------------------------------------------------------------------------------------------------------------
FORMAT = 5


@dataclasses.dataclass(frozen=True, slots=True)
class MachineProfile:
    """A machine, and how long pieces of work take on it.

    ``name``: in ``explain`` and ``KITSUNE_PROFILE``. ``cpu``: the processor, for people. ``isa``: the kernel table. ``workers``:
    threads a plan may use. ``l1``, ``l2``, ``l3``: bytes of a core's data cache and second level, and of the last level.
    ``numbers``: seconds by name, in ascending order of names. ``passes``: measurements of each number, at least, or 0 if unknown.
    ``doubtful``: sorted names of numbers that differed in all passes, and the second fastest measurement over the fastest.
    ``reference``: the least seconds that ``kernels.reference`` took, or 0 if unknown. ``made``: a random word that tells two
    measurements of a machine apart. ``measured_at``: when the first of them was made, in seconds since 1970, or 0 if unknown.
    ``on_demand``: all numbers of this process's machine, each measured when it is first asked for.
    """

    name: str
    cpu: str
    isa: str
    workers: int
    l1: int
    l2: int
    l3: int
    numbers: tuple[tuple[str, float], ...]
    passes: int = 0
    doubtful: tuple[tuple[str, float], ...] = ()
    reference: float = 0.0
    made: str = ""
    measured_at: float = 0.0
    on_demand: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        for key, seconds in self.numbers:
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"profile {self.name!r}: {key} is {seconds}, not a positive number of seconds")
        for key, spread in self.doubtful:
            if not (math.isfinite(spread) and spread >= 1):
                raise ValueError(f"profile {self.name!r}: the spread of {key} is {spread}, not a number from 1 on")

    def seconds(self, key: str) -> float:
        """The number called ``key``. Raises ``KeyError``."""
        return table(self)[key]

    def get(self, key: str) -> float | None:
        return table(self).get(key)

    def to_json(self) -> str:
        """As text, one number on a line, so that two profiles can be compared by eye.

        >>> from kitsune_jax.targets.cpu.profile.profile import MachineProfile
        >>> p = MachineProfile("mine", "a CPU", "avx2", 2, 1 << 15, 1 << 20, 1 << 24, (("touch", 1e-10),))
        >>> MachineProfile.from_json(p.to_json()) == p
        True
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "on_demand"}
        pairs = {"numbers": dict(self.numbers), "doubtful": dict(self.doubtful)}
        return json.dumps({"format": FORMAT, **fields, **pairs}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> MachineProfile:
        """The profile that ``to_json`` wrote. Raises ``ValueError`` for any other text."""
        try:
            data = json.loads(text)
            if data.pop("format") != FORMAT:
                raise ValueError("it is of another format")
            numbers = numbers_of(data.pop("numbers"))
            profile = MachineProfile(numbers=numbers, doubtful=numbers_of(data.pop("doubtful")), **data)
            sizes = (profile.workers, profile.l1, profile.l2, profile.l3)
            if type(profile.passes) is not int or not all(type(n) is int and n > 0 for n in sizes):
                raise ValueError("cores and caches are positive integers, passes an integer")
            if not isinstance(profile.made, str) or profile.on_demand is not None:
                raise ValueError("made is a word, and numbers on demand are no data")
            if not (profile.reference >= 0 and profile.measured_at >= 0):
                raise ValueError("the reference is a duration, and measured_at a time")
            return profile
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a profile: {error!r}") from error


def numbers_of(numbers: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """``numbers`` as ``MachineProfile.numbers``, to six digits, beyond which they are noise."""
    return tuple(sorted((str(k), float(f"{float(v):.6g}")) for k, v in numbers.items()))


@functools.lru_cache(maxsize=64)
def table(profile: MachineProfile) -> Mapping[str, float]:
    """The numbers by name; of this process's machine, some are measured as they are looked up."""
    return dict(profile.numbers) if profile.on_demand is None else profile.on_demand


# --- Profiles that come with the package ------------------------------------------------------------------------------------------

# ``reference.json`` was measured on two cores of a Zen 5, except: "xla/call/handed" comes from a Xeon with AMX (13 to 17 us).
# "vector/to_bfloat16" and "vector/to_float16" are 1.2 additions; without bfloat16 instructions 1.45 were measured on a Zen 3.
# "xla/reduce" beyond float32 and bfloat16 rows and columns is scaled by a Zen 3 (JAX 0.12): "all" as "row", "middle" 1.1 of
# "column", float16 1.7 of float32.
_PEAK = 235e9  # float32 operations a second of a core of the reference, in its matmuls


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A kind of CPU: operations a second of a core in float32 matmuls, in bfloat16 ones by dots and by tiles (0: it has none), and
    in XLA's bfloat16 products; the time of a vector over the reference's; and the source of these."""

    isa: str
    f32: float
    dots: float
    tiles: float
    xla_bfloat16: float
    vectors: float
    source: str


# Numbers that grow with the time of a vector.
_BY_VECTORS = ("vector", "vector64", "activation", "load", "store", "fold", "take", "folded", "runs", "picked", "few")
_NOT_SHARED = ("call", "kernel", "start", "while")  # numbers of XLA that more workers do not change
_BY_INTEGERS = 1.2  # the time of rounding by integer operations, over that by instructions
_NO_BFLOAT16 = 0.45  # of the f32 rate: XLA widens, multiplies and rounds
FAMILIES = {
    "zen5": Family("avx512bf16", 235e9, 465e9, 0, 440e9, 1.0, "measured: reference.json"),
    "zen4": Family("avx512bf16", 112e9, 220e9, 0, 140e9, 2.0, "measured 117 GF/s f32, XLA bf16 at 277 of 474 on two cores"),
    "emeraldrapids": Family("amx", 165e9, 95e9, 950e9, 700e9, 1.3, "two Xeons: FMA 165-175 GF/s, VDPBF16PS 81-110, AMX 1000"),
    "skylakex": Family("avx512", 90e9, 0, 0, 0.45 * 90e9, 2.3, "measured 94 GF/s f32"),
    "generic": Family("generic", 50e9, 0, 0, _NO_BFLOAT16 * 50e9, 4.0, "4 lanes x 2 pipes x 3.5 GHz = 56 GF/s"),
    "avx2": Family("avx2", 105e9, 0, 0, _NO_BFLOAT16 * 105e9, 2.0, "8 lanes x 2 pipes x 3.5 GHz = 112 GF/s"),
    "avx512": Family("avx512", 210e9, 0, 0, _NO_BFLOAT16 * 210e9, 1.0, "16 lanes x 2 pipes x 3.5 GHz = 224 GF/s"),
    "avx512bf16": Family("avx512bf16", 235e9, 465e9, 0, 440e9, 1.0, "as zen5"),
    "amx": Family("amx", 165e9, 95e9, 950e9, 700e9, 1.3, "as emeraldrapids"),
    "neon": Family("neon", 44e9, 0, 0, _NO_BFLOAT16 * 44e9, 5.0, "Neoverse N1 guide: 4 lanes x 2 pipes x 3 GHz = 48 GF/s"),
    "neonbf16": Family("neonbf16", 88e9, 300e9, 0, 150e9, 2.5, "Neoverse V1 guide: 4 lanes x 4 pipes x 2.8 GHz; BFMMLA x 4"),
}  # fmt: skip


@functools.lru_cache(maxsize=64)
def shipped(name: str) -> MachineProfile:
    """The profile ``"<family>-<cores>"``. Raises ``ValueError`` for a name that is not of this form.

    >>> shipped("avx2-8").workers
    8
    """
    match = re.fullmatch(r"([a-z0-9]+)-([1-9]\d{0,3})", name)
    if match is None or match[1] not in FAMILIES:
        raise ValueError(
            f"{name!r} is not a CPU profile: write <family>-<cores>, such as zen5-8, with one of the families {', '.join(FAMILIES)}"
        )
    return _derived(name, FAMILIES[match[1]], int(match[2]))


@functools.cache
def reference() -> MachineProfile:
    text = importlib.resources.files(__package__).joinpath("reference.json").read_text()
    return MachineProfile.from_json(text)


def _derived(name: str, family: Family, workers: int) -> MachineProfile:
    known = reference()
    numbers: dict[str, float] = {}
    for key, seconds in known.numbers:
        if "/dots" not in key or family.dots:
            numbers[key] = seconds * _factor(key, family, workers)
            if key.startswith("xla/") and key.split("/")[1] not in _NOT_SHARED:
                numbers[key] = numbers[key] * known.workers / workers
        if "/dots" in key and family.tiles:
            numbers[key.replace("/dots", "/tiles")] = seconds * (1.0 if key.startswith("pack") else 465e9 / family.tiles)
    l1 = 32 * KIB if family.f32 < _PEAK else known.l1
    return MachineProfile(name, name, family.isa, workers, l1, MIB, 16 * MIB * workers, numbers_of(numbers))


def _factor(key: str, family: Family, workers: int) -> float:
    """The number ``key`` of as many cores of ``family`` as the reference has, over that of the reference. ``workers``: those that
    share the memory."""
    kind, what, dtype = (*key.split("/"), "", "")[:3]
    slower = _PEAK / family.f32
    if kind in ("gemm", "outer", "short", "outer_short"):
        return 465e9 / family.dots if "/dots" in key else slower
    if kind in ("pack", "pack_t"):
        return max(1.0, family.vectors / 2)
    if kind == "dot":
        return slower
    if key == "vector/to_bfloat16" and not family.dots:
        return family.vectors * _BY_INTEGERS
    if kind in _BY_VECTORS or key in ("copy/l1", "copy/l2"):
        return family.vectors
    if key in ("copy/dram", "touch"):
        # Memory has fewer channels than a large machine has cores: 200 GB/s for all, 18 GB/s for one.
        return workers * 18e9 / min(workers * 18e9, 200e9)
    if kind in ("call", "copy", "touch", "order") or what in ("call", "kernel", "start", "while"):
        return 1.0
    if what in ("dot", "dot_t", "outer", "batched"):
        return 440e9 / family.xla_bfloat16 if dtype == "bfloat16" and what != "outer" else slower
    return family.vectors


# --- Facts from the operating system ----------------------------------------------------------------------------------------------

_THREADS = Path("/proc/self/task")
_OWN = Path("/proc/thread-self")


@functools.cache
def model_name() -> str:
    """The processor with its family, from /proc/cpuinfo: "AMD EPYC, cpu family 26, model 2"."""
    numbers = [f"{what} {n}" for what in ("cpu family", "model", "stepping", "CPU part") if (n := _field(what))]
    return ", ".join((_processor(), *numbers))


def slug() -> str:
    """The processor as a part of a profile's name: "amd-epyc-26-2"."""
    numbers = [n for what in ("cpu family", "model") if (n := _field(what))]
    words = re.sub(r"\(.*?\)|@.*|\bCPU\b|\bprocessor\b", " ", _processor(), flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", " ".join((words, *numbers)).lower()).strip("-") or "cpu"


def family(isa: str) -> str:
    """The entry of ``FAMILIES`` that is most like this machine with kernels for ``isa``."""
    number = _field("cpu family")
    if "AuthenticAMD" in _cpuinfo() and number and isa == "avx512bf16":
        return "zen4" if number == "25" else "zen5"
    if "GenuineIntel" in _cpuinfo() and isa == "avx512":
        return "skylakex"
    return {"amx": "emeraldrapids"}.get(isa, isa)


def cache_sizes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> tuple[int, int, int]:
    """(L1 data, L2, L3) bytes of one core, from sysfs; 32 KiB, 1 MiB and 8 MiB where it says nothing."""
    sizes = {1: 32 * KIB, 2: MIB, 3: 8 * MIB}
    for index in sorted(folder.glob("index*")):
        level, kind, size = (_read(index / name).strip() for name in ("level", "type", "size"))
        match = re.fullmatch(r"(\d+)([KMG]?)", size)
        if level in ("1", "2", "3") and kind != "Instruction" and match and int(match[1]) > 0:
            sizes[int(level)] = int(match[1]) * {"": 1, "K": KIB, "M": MIB, "G": 1024 * MIB}[match[2]]
    return sizes[1], sizes[2], sizes[3]


def stolen_seconds() -> float:
    """Seconds of all processors since boot that a hypervisor gave to others; 0 where the system does not say."""
    fields = _processor_seconds()
    return fields[7] if len(fields) > 7 else 0.0


def busy_seconds() -> float:
    """Seconds since boot that all processors were busy, or given to others by a hypervisor; 0 where the system does not say."""
    fields = _processor_seconds()
    return sum(fields[:8]) - sum(fields[3:5])


def _processor_seconds() -> list[float]:
    """Of all processors: user, nice, system, idle, waiting for disks, interrupts (two kinds), stolen, ..."""
    found = re.match(r"cpu +((?:\d+ ?)+)", _read(Path("/proc/stat")))
    return [int(field) / os.sysconf("SC_CLK_TCK") for field in found[1].split()] if found else []


def ran_and_waited() -> tuple[float, float]:
    """Seconds that this thread has run, and has waited for a core; (0, 0) where the system does not say."""
    fields = _read(_OWN / "schedstat").split()
    return (1e-9 * int(fields[0]), 1e-9 * int(fields[1])) if len(fields) > 1 else (0.0, 0.0)


def other_threads_seconds() -> dict[str, float]:
    """Seconds that each other thread of this process has run, by its number; {} where the system does not say."""
    own = str(threading.get_native_id())
    found = {}
    for thread in _THREADS.glob("*"):
        if thread.name != own and (text := _read(thread / "schedstat")):
            found[thread.name] = 1e-9 * int(text.split()[0])
    return found


def _processor() -> str:
    return _field("model name") or platform.processor() or platform.machine()


def _field(name: str) -> str:
    """The first field called ``name`` of /proc/cpuinfo; "" where there is none."""
    found = re.search(rf"^{name}\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    return found[1].strip() if found else ""


@functools.cache
def _cpuinfo() -> str:
    return _read(Path("/proc/cpuinfo"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

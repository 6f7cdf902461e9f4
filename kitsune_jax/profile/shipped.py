"""Profiles that come with the package: for tests, for planning elsewhere, and for machines that cannot be measured.

Comes in: a name. Goes out: a ``Profile`` that is the same everywhere. One was measured (``reference.json``, two cores of a Zen 5);
the others are that one with what is known to differ: the peaks of the instruction sets, and what was measured on a few machines.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import re
from collections.abc import Iterator

from kitsune_jax.profile.model import Profile, numbers_of

KIB, MIB = 1024, 1024 * 1024
# "xla/call/handed" and "xla/near" of the reference were not measured there. A Xeon with AMX took 13 to 17 us for the first, which
# is the same for all families, as the other times of calls are. Of what "xla/loop" makes of one thread "xla/near" took there 0.41
# for moves (0.85 and 0.99 in bfloat16 and float16) and 0.73 for tanh (0.5 and 0.56).
# "vector/to_bfloat16" and "vector/to_float16" are 1.2 additions: two or three instructions instead of one. Without instructions for
# bfloat16 they are seven; on a Zen 3 its rounding then took 1.45 additions.
# "xla/chain" and "xla/beside" are made of another measurement of the reference: one to seven tanhs, silus or gelus, one after the
# other, in float32 and bfloat16, took n (n + 1) / 2 times as long as one.
# Of "xla/reduce", "xla/squares" and "xla/absolute" float32 and bfloat16 over rows and columns were measured there. The others are
# these times what a Zen 3 (JAX 0.12) showed: "all" takes as long as "row", "middle" 1.1 times as long as "column", float16 1.7
# times as long as float32; squares as long as what is there (1.07 times in bfloat16), absolute values 1.3 times (1.8 in bfloat16).
_PEAK = 235e9  # f32 operations a second of a core of the reference, in its matmuls


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A kind of CPU: f32 matmul operations a second of a core; those in bfloat16 by dots and by tiles (0: it has none), and in
    XLA's products; how many times as long its vectors take; and where these are from."""

    isa: str
    f32: float
    dots: float
    tiles: float
    xla_bfloat16: float
    vectors: float
    source: str


# Kinds of numbers that grow with the time that a vector takes.
_BY_VECTORS = ("vector", "vector64", "activation", "load", "store", "fold", "take", "folded", "runs", "picked", "few")
_BY_INTEGERS = 1.2  # times as long as by instructions
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


def names() -> Iterator[str]:
    """The families, each of which stands for any number of cores: ``zen5-2``."""
    return iter(FAMILIES)


@functools.lru_cache(maxsize=64)
def shipped(name: str) -> Profile:
    """The profile ``"<family>-<cores>"``. Raises ``ValueError`` for a name that is not of this form.

    >>> shipped("avx2-8").workers
    8
    """
    match = re.fullmatch(r"([a-z0-9]+)-([1-9]\d{0,3})", name)
    if match is None or match[1] not in FAMILIES:
        raise ValueError(f"no CPU profile {name!r}: expected <family>-<cores>, family one of {', '.join(names())}")
    return _derived(name, FAMILIES[match[1]], int(match[2]))


@functools.cache
def reference() -> Profile:
    text = importlib.resources.files(__package__).joinpath("reference.json").read_text()
    return Profile.from_json(text)


def _derived(name: str, family: Family, workers: int) -> Profile:
    known = reference()
    slower = _PEAK / family.f32
    numbers: dict[str, float] = {}
    for key, seconds in known.numbers:
        ours = key.split("/")
        if ours[0] in ("gemm", "outer", "short", "pack", "pack_t", "outer_short"):
            way = ours[2]
            factor = slower if way == "widened" else 465e9 / family.dots if family.dots else 0.0
            if ours[0].startswith("pack"):
                factor = max(1.0, family.vectors / 2) if factor else 0.0
            if factor:
                numbers[key] = seconds * factor
            if way == "dots" and family.tiles:
                numbers[key.replace("/dots", "/tiles")] = seconds * (
                    465e9 / family.tiles if not ours[0].startswith("pack") else 1.0
                )
        elif ours[0] == "dot":
            numbers[key] = seconds * slower
        elif key == "vector/to_bfloat16" and not family.dots:
            numbers[key] = seconds * family.vectors * _BY_INTEGERS
        elif ours[0] in _BY_VECTORS or key in ("copy/l1", "copy/l2"):
            numbers[key] = seconds * family.vectors
        elif ours[:2] == ["xla", "near"]:
            numbers[key] = seconds * family.vectors  # of one thread
        elif (
            ours[0] in ("call", "touch", "order")
            or ours[:2] == ["xla", "while"]
            or key in ("xla/call", "xla/call/handed", "xla/kernel", "xla/start")
            or ours[0] == "copy"
        ):
            # Memory has fewer channels than a large machine has cores: 200 GB/s for all, 18 GB/s for one.
            crowded = workers * 18e9 / min(workers * 18e9, 200e9) if key in ("copy/dram", "touch") else 1.0
            numbers[key] = seconds * crowded
        else:
            numbers[key] = seconds * _xla_factor(ours, family, slower) * known.workers / workers
    l1 = 32 * KIB if family.f32 < _PEAK else known.l1
    return Profile(name, name, family.isa, workers, l1, MIB, 16 * MIB * workers, numbers_of(numbers))


def _xla_factor(key: list[str], family: Family, slower: float) -> float:
    if key[1] in ("dot", "dot_t", "outer", "batched"):
        if key[2] == "bfloat16" and key[1] != "outer":
            return 440e9 / family.xla_bfloat16
        return slower
    return family.vectors

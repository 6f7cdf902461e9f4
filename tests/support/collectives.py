"""The collectives of a compiled module: how many there are of each kind, and how many bytes a device sends in them."""

from __future__ import annotations

import math
import re
from collections import Counter

KINDS = "all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter"
_BITS = {"pred": 8, **{f"{kind}{bits}": bits for kind in ("s", "u", "f") for bits in (8, 16, 32, 64)}, "bf16": 16}
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(")


def collectives(text: str) -> Counter[str]:
    """How many collectives of each kind there are."""
    found = Counter(made[2] for line in text.splitlines() if (made := _COLLECTIVE.search(line)))
    return Counter({kind: found[kind] for kind in KINDS})


def bytes_sent(text: str) -> float:
    """The bytes that each device sends by the ring algorithms, where a step of every loop runs once."""
    return sum(_bytes_sent(line, *made.groups()) for line in text.splitlines() if (made := _COLLECTIVE.search(line)))


def _bytes_sent(line: str, types: str, kind: str) -> float:
    devices = 2 if kind == "collective-permute" else _devices(line)
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", types)
    size = sum(_BITS[dtype] // 8 * math.prod(int(n) for n in dims.split(",") if n) for dtype, dims in arrays)
    others = devices - 1
    parts = {"all-reduce": 2 * others / devices, "reduce-scatter": others, "collective-permute": 1}  # of the result
    return size * parts.get(kind, others / devices)


def _devices(line: str) -> int:
    """How many devices take part in a collective: in one of its groups, which are written in three ways."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return listed[1].count(",") + 1
    if by_mesh := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", by_mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", by_mesh[2]))
    shape = re.search(r"replica_groups=\[\d+,(\d+)\]<=", line)
    assert shape is not None, line
    return int(shape[1])

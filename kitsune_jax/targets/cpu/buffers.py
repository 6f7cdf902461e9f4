"""Scratch memory: virtual buffers to byte offsets.

Comes in: a stage's instructions, whose scratch refs name virtual buffers (``Ref.index``) with element offsets inside them. Goes
out: the same instructions with real offsets and index 0, and the size of the stage's scratch. Two buffers share bytes only where
no instruction uses the one between the first and the last use of the other.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kitsune_jax.targets.cpu.bytecode import DTYPES, SCRATCH, Instruction, Operand, Ref, Vector
from kitsune_jax.targets.cpu.views import ITEM_SIZE

ALIGNMENT = 64


def operands(instruction: Instruction) -> list[Operand]:
    """All operands of an instruction that address tiles."""
    if isinstance(instruction, Vector):
        return [*instruction.loads, *instruction.stores]
    return [v for f in dataclasses.fields(instruction) if isinstance(v := getattr(instruction, f.name), Operand)]


def place(body: list[Instruction], sizes: list[int]) -> tuple[tuple[Instruction, ...], int]:
    """Give the virtual buffers of ``sizes`` bytes their addresses. Returns the body and the scratch bytes it needs."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, instruction in enumerate(body):
        for operand in operands(instruction):
            if operand.ref.space == SCRATCH:
                first.setdefault(operand.ref.index, i)
                last[operand.ref.index] = i
    # Neither order of placement is always better; both are cheap.
    by_size = sorted(first, key=lambda b: (-sizes[b], first[b]))
    by_time = sorted(first, key=lambda b: (first[b], -sizes[b]))
    layouts = [_fit(order, first, last, sizes) for order in (by_time, by_size)]
    offsets, total = min(layouts, key=lambda layout: layout[1])
    return tuple(_rewrite(instruction, offsets) for instruction in body), total


def _fit(order: list[int], first: dict[int, int], last: dict[int, int], sizes: list[int]) -> tuple[dict[int, int], int]:
    """Every buffer of ``order`` at the lowest offset that is free for its whole life. Returns the offsets and their end."""
    offsets: dict[int, int] = {}
    total = 0
    for b in order:
        size = _round_up(sizes[b])
        others = sorted((offsets[o], _round_up(sizes[o])) for o in offsets if first[o] <= last[b] and first[b] <= last[o])
        at = 0
        for start, length in others:
            if at + size <= start:
                break
            at = max(at, start + length)
        offsets[b] = at
        total = max(total, at + size)
    return offsets, total


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _rewrite(instruction: Instruction, offsets: dict[int, int]) -> Instruction:
    def moved(operand: Operand) -> Operand:
        ref = operand.ref
        if ref.space != SCRATCH:
            return operand
        base = offsets[ref.index] // ITEM_SIZE[DTYPES[ref.dtype]]
        return dataclasses.replace(operand, ref=Ref(SCRATCH, 0, base + ref.offset, ref.dtype))

    changes: dict[str, Any] = {}
    for field in dataclasses.fields(instruction):
        value = getattr(instruction, field.name)
        if isinstance(value, Operand):
            changes[field.name] = moved(value)
        elif field.name in ("loads", "stores"):
            changes[field.name] = tuple(moved(o) for o in value)
    return dataclasses.replace(instruction, **changes)

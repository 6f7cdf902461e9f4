"""Scratch memory: virtual buffers to byte offsets.

Comes in: a stage's instructions, whose scratch refs name virtual buffers (``Ref.index``) with element offsets inside them. Goes
out: the same instructions with real offsets and index 0, and the size of the stage's scratch. Two buffers share bytes only where
no instruction uses the one between the first and the last use of the other.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

from kitsune_jax.targets.cpu.bytecode import (
    DTYPES,
    SCRATCH,
    Instruction,
    Loop,
    Operand,
    Pack,
    Prep,
    Ref,
    Rows,
    Stationary,
    Vector,
)
from kitsune_jax.targets.cpu.views import ITEM_SIZE

ALIGNMENT = 64


def _fields(kind: str) -> dict[type, tuple[str, ...]]:
    """The fields of each instruction whose type is called ``kind``."""
    all_of = {cls: dataclasses.fields(cls) for cls in typing.get_args(Instruction)}
    return {cls: tuple(field.name for field in fields if field.type == kind) for cls, fields in all_of.items()}


_OPERAND_FIELDS, _ROWS_FIELDS = _fields("Operand"), _fields("Rows")


def operands(instruction: Instruction) -> list[Operand]:
    """All operands of an instruction that address tiles; of a loop, none of what is inside it."""
    if isinstance(instruction, Vector):
        return [*instruction.loads, *instruction.stores]
    rows = [getattr(instruction, name) for name in _ROWS_FIELDS[type(instruction)]]
    own = [getattr(instruction, name) for name in _OPERAND_FIELDS[type(instruction)]]
    return [*own, *(operand for r in rows for operand in (r.x, r.taken))]


def place(body: Sequence[Instruction], sizes: list[int], preps: list[Prep]) -> tuple[tuple[Instruction, ...], int]:
    """Give the virtual buffers of ``sizes`` bytes their addresses, also in the ``preps`` that ``body`` packs. Returns the body and
    the scratch bytes it needs."""
    lives = _lives(body, preps)
    first, last = {b: life[0] for b, life in lives.items()}, {b: life[1] for b, life in lives.items()}
    # Neither order of placement is always better; both are cheap.
    by_size = sorted(first, key=lambda b: (-sizes[b], first[b]))
    by_time = sorted(first, key=lambda b: (first[b], -sizes[b]))
    layouts = [_fit(order, first, last, sizes) for order in (by_time, by_size)]
    offsets, total = min(layouts, key=lambda layout: layout[1])
    return tuple(_rewrite(instruction, offsets, preps) for instruction in body), total


def _lives(body: Sequence[Instruction], preps: Sequence[Prep]) -> dict[int, list[int]]:
    """The first and the last time of use of every buffer. One that is used in a loop and outside of it lives in all of the loop."""
    lives: dict[int, list[int]] = {}
    time = 0

    def run(code: Sequence[Instruction]) -> set[int]:
        nonlocal time
        used: set[int] = set()
        for instruction in code:
            start = time
            if isinstance(instruction, (Loop, Stationary)):
                inside = run(instruction.body)
                if isinstance(instruction, Loop):
                    looped.append((start, time, inside))
                used |= inside
            else:
                refs = [o.ref for o in operands(instruction)]
                refs += [preps[instruction.prep].source] if isinstance(instruction, Pack) else []
                for ref in refs:
                    if ref.space == SCRATCH:
                        lives.setdefault(ref.index, [time, time])[1] = time
                        used.add(ref.index)
            time += 1
        return used

    looped: list[tuple[int, int, set[int]]] = []  # inner loops before those around them
    run(body)
    for start, end, inside in looped:
        for b in inside:
            if lives[b][0] < start or lives[b][1] > end:
                lives[b] = [min(lives[b][0], start), max(lives[b][1], end)]
    return lives


def _fit(order: list[int], first: dict[int, int], last: dict[int, int], sizes: list[int]) -> tuple[dict[int, int], int]:
    """Every buffer of ``order`` at the lowest offset that is free for its whole life. Returns the offsets and their end."""
    offsets: dict[int, int] = {}
    placed = _Lives(max(last.values(), default=0) + 1)
    total = 0
    for b in order:
        size = _round_up(sizes[b])
        others = sorted(placed.during(first[b], last[b]))
        at = 0
        for start, length, _ in others:
            if at + size <= start:
                break
            if at < start + length:
                at = start + length
        offsets[b] = at
        placed.add(first[b], last[b], (at, size, b))
        total = max(total, at + size)
    return offsets, total


class _Lives:
    """Buffers by the time for which they live: which of them live at some time of a span?

    A segment tree: each buffer is kept at the few nodes that together are its life, and known to the nodes above these. So a
    question costs as much as its answer is long, however long the program.
    """

    def __init__(self, times: int):
        self._leaves = 1 << max(0, times - 1).bit_length()
        self._here: dict[int, list[tuple[int, int, int]]] = {}  # lives for all of the node's span
        self._below: dict[int, list[tuple[int, int, int]]] = {}  # for a part of it

    def _nodes(self, first: int, last: int) -> list[int]:
        nodes = []
        a, b = first + self._leaves, last + self._leaves + 1
        while a < b:
            if a & 1:
                nodes.append(a)
                a += 1
            if b & 1:
                b -= 1
                nodes.append(b)
            a, b = a >> 1, b >> 1
        return nodes

    def _above(self, nodes: list[int]) -> set[int]:
        above: set[int] = set()
        for node in nodes:
            node >>= 1
            while node and node not in above:
                above.add(node)
                node >>= 1
        return above

    def add(self, first: int, last: int, buffer: tuple[int, int, int]) -> None:
        nodes = self._nodes(first, last)
        for node in nodes:
            self._here.setdefault(node, []).append(buffer)
        for node in self._above(nodes):
            self._below.setdefault(node, []).append(buffer)

    def during(self, first: int, last: int) -> set[tuple[int, int, int]]:
        nodes = self._nodes(first, last)
        found: set[tuple[int, int, int]] = set()
        for node in nodes:
            found.update(self._here.get(node, ()), self._below.get(node, ()))
        for node in self._above(nodes):
            found.update(self._here.get(node, ()))
        return found


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _rewrite(instruction: Instruction, offsets: dict[int, int], preps: list[Prep]) -> Instruction:
    def ref_of(ref: Ref) -> Ref:
        if ref.space != SCRATCH:
            return ref
        base = offsets[ref.index] // ITEM_SIZE[DTYPES[ref.dtype]]
        return dataclasses.replace(ref, index=0, offset=base + ref.offset)

    def moved(operand: Operand) -> Operand:
        return operand if operand.ref.space != SCRATCH else dataclasses.replace(operand, ref=ref_of(operand.ref))

    if isinstance(instruction, Pack):
        preps[instruction.prep] = dataclasses.replace(preps[instruction.prep], source=ref_of(preps[instruction.prep].source))
        return instruction
    if isinstance(instruction, (Loop, Stationary)):
        return dataclasses.replace(instruction, body=tuple(_rewrite(i, offsets, preps) for i in instruction.body))
    if isinstance(instruction, Vector):
        changes: dict[str, Any] = {name: tuple(map(moved, getattr(instruction, name))) for name in ("loads", "stores")}
    else:
        changes = {name: moved(getattr(instruction, name)) for name in _OPERAND_FIELDS[type(instruction)]}
        for name in _ROWS_FIELDS[type(instruction)]:
            rows: Rows = getattr(instruction, name)
            changes[name] = dataclasses.replace(rows, x=moved(rows.x), taken=moved(rows.taken))
    return dataclasses.replace(instruction, **changes)

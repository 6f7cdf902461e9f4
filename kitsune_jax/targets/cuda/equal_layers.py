"""Equal layers: runs of equal instructions that a kernel can loop over instead of spelling each out.

Comes in: the instructions of a stage. Goes out: ``Run``s: matmul-headed segments that are equal but for their stationary operands,
each fed by the one before. A loop keeps the kernel short: it compiles faster, and its instructions stay in the instruction cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kitsune_jax.program.ir import Instr, TileProgram

_LONGEST = 32  # instructions of a segment


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """``segments[k]``: the tile instructions of layer k. ``entry``: the value that feeds layer 0; ``exits[k]``: what layer k
    makes.
    """

    segments: tuple[tuple[Instr, ...], ...]
    entry: int
    exits: tuple[int, ...]


def find(program: TileProgram, instrs: Sequence[Instr]) -> list[Run]:
    """Disjoint runs of at least two equal layers, in order."""
    tile = [i for i in instrs if not i.outputs or program.values[i.outputs[0]].tile]
    readers: dict[int, list[int]] = {}
    for k, instr in enumerate(tile):
        for v in instr.inputs:
            readers.setdefault(v, []).append(k)
    found, at = [], 0
    while at < len(tile):
        run = _run_at(program, tile, readers, at) if tile[at].kind == "matmul" else None
        if run is None:
            at += 1
        else:
            found.append(run)
            at += sum(len(s) for s in run.segments)
    return found


def _run_at(program: TileProgram, tile: Sequence[Instr], readers: dict[int, list[int]], at: int) -> Run | None:
    for period in range(1, min(_LONGEST, len(tile) - at) + 1):
        if at + period < len(tile) and tile[at + period].kind != "matmul":
            continue
        segments, exits = [], []
        entry = tile[at].inputs[0]
        start, wanted = at, None
        while start + period <= len(tile):
            segment = tuple(tile[start : start + period])
            signature = _signature(program, segment, entry)
            (exit_,) = segment[-1].outputs or (-1,)
            if signature is None or wanted not in (None, signature) or not _closed(segment, start, readers, exit_):
                break
            if program.values[exit_] != program.values[entry]:
                break
            wanted = signature
            segments.append(segment)
            exits.append(exit_)
            entry, start = exit_, start + period
        while len(segments) > 1 and not _handed_on_only(segments, exits, at, period, readers):
            segments.pop()
            exits.pop()
        if len(segments) > 1:
            return Run(tuple(segments), tile[at].inputs[0], tuple(exits))
    return None


def _closed(segment: Sequence[Instr], start: int, readers: dict[int, list[int]], exit_: int) -> bool:
    """Nobody outside reads what the segment makes, its last value apart."""
    inside = range(start, start + len(segment))
    return all(k in inside for i in segment for v in i.outputs if v != exit_ for k in readers.get(v, ()))


def _handed_on_only(segments: Sequence[Any], exits: Sequence[int], at: int, period: int, readers: dict[int, list[int]]) -> bool:
    """What a layer makes is read by the next layer alone (the last one's by anybody)."""
    for k, v in enumerate(exits[:-1]):
        first = at + (k + 1) * period
        if any(r not in range(first, first + period) for r in readers.get(v, ())):
            return False
    return True


def _signature(program: TileProgram, segment: Sequence[Instr], entry: int) -> tuple[Any, ...] | None:
    """What a segment computes, with its operands as positions; None if it does more than compute values."""
    literals = dict(program.literals)
    made: dict[int, int] = {}
    lines = []
    for k, instr in enumerate(segment):
        if len(instr.outputs) != 1 or instr.kind in ("load", "load_slice", "loop", "pop", "gather"):
            return None
        operands: list[Any] = []
        for v in instr.inputs:
            if v == entry:
                operands.append("entry")
            elif v in made:
                operands.append(made[v])
            elif v in literals:
                operands.append((repr(literals[v]), program.values[v].dtype))
            elif not program.values[v].tile:
                operands.append((program.values[v].shape, program.values[v].dtype))
            else:
                operands.append(("outside", v))
        made[instr.outputs[0]] = k
        lines.append((instr.kind, instr.params, tuple(operands), program.values[instr.outputs[0]]))
    return tuple(lines)

"""Several tile programs as one: the phases of a call, and the arrays that travel between them.

Comes in: tile programs with the graph values that each reads and gives, and those of the call. Goes out: a ``PhasedProgram``, which
a target runs as one custom call, and its result as the NumPy interpreter computes it. Arrays are numbered: operands of the call
first, then its results, then *inner* arrays, which live during the call only. Invariants: a part reads operands and what parts of
earlier phases wrote; every result and every inner array is written by one part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kitsune_jax.program.interpret import interpret
from kitsune_jax.program.ir import TileProgram


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A tile program on arrays of the call: ``reads`` are its inputs, ``writes`` its outputs. It runs in phase ``phase``."""

    phase: int
    program: TileProgram
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PhasedProgram:
    """``arrays``: shape and dtype of every array; the first ``operands`` are the call's operands, the next ``results`` its results.

    Parts stand in the order of their phases, which a barrier separates. Those of one phase may run in any order, or at once.
    """

    arrays: tuple[tuple[tuple[int, ...], str], ...]
    operands: int
    results: int
    parts: tuple[Part, ...]


def phased(
    parts: Sequence[tuple[int, TileProgram, Sequence[int], Sequence[int]]], operands: Sequence[int], results: Sequence[int]
) -> PhasedProgram:
    """The call that reads the values ``operands`` and gives ``results``; each of ``parts`` is (phase, program, reads, gives)."""
    given = [v for _, _, _, gives in parts for v in gives]
    order = [*operands, *results, *(v for v in given if v not in set(results))]
    number = {v: k for k, v in enumerate(order)}
    types: dict[int, tuple[tuple[int, ...], str]] = {}
    for _, program, reads, gives in parts:
        arrays = zip((*reads, *gives), (*program.inputs, *program.outputs), strict=True)
        types.update((v, (array.shape, array.dtype)) for v, array in arrays)
    return PhasedProgram(
        arrays=tuple(types[v] for v in order),
        operands=len(operands),
        results=len(results),
        parts=tuple(
            Part(phase, program, tuple(number[v] for v in reads), tuple(number[v] for v in gives))
            for phase, program, reads, gives in parts
        ),
    )


def interpret_phases(
    program: PhasedProgram, operands: Sequence[Any], *, schedule_seed: int | None = None, widen: bool = False
) -> list[np.ndarray[Any, np.dtype[Any]]]:
    """The results of ``program``; arguments as ``interpret`` takes them. Raises what ``interpret`` raises."""
    if len(operands) != program.operands:
        raise ValueError(f"the call takes {program.operands} operands, not {len(operands)}")
    arrays: dict[int, Any] = dict(enumerate(operands))
    for part in program.parts:
        outs = interpret(part.program, [arrays[k] for k in part.reads], schedule_seed=schedule_seed, widen=widen)
        arrays.update(zip(part.writes, outs, strict=True))
    return [arrays[program.operands + k] for k in range(program.results)]

"""Tile programs -> the Program of a call.

Comes in: the programs of a call's regions, with the values that each reads and gives. Goes out: the ``Program``.
"""

from __future__ import annotations

from collections.abc import Sequence

from kitsune_jax.program.ir import Array, Part, Program, TileProgram


def assemble(
    parts: Sequence[tuple[int, TileProgram, Sequence[int], Sequence[int]]], operands: Sequence[int], results: Sequence[int]
) -> Program:
    """The call that reads the graph values ``operands`` and gives ``results``; each of ``parts`` is (phase, program, the values it
    reads, those it gives)."""
    given = [v for _, _, _, gives in parts for v in gives]
    order = [*operands, *results, *(v for v in given if v not in set(results))]
    number = {v: k for k, v in enumerate(order)}
    types: dict[int, Array] = {}
    for _, program, reads, gives in parts:
        arrays = zip((*reads, *gives), (*program.inputs, *program.outputs), strict=True)
        types.update((v, Array(array.shape, array.dtype)) for v, array in arrays)
    return Program(
        arrays=tuple(types[v] for v in order),
        operands=len(operands),
        results=len(results),
        parts=tuple(
            Part(phase, program, tuple(number[v] for v in reads), tuple(number[v] for v in gives))
            for phase, program, reads, gives in parts
        ),
    )

"""Shrink a failing program while it keeps failing in the same way.

Comes in: a program, and a predicate that tells whether a program fails in the same way. Goes out: a program that no single
simplification keeps failing, or the smallest that the budget allowed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from trust.program import Op, Program


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Ask ``fails`` about ever simpler programs, until it refuses them all or raises ``StopIteration``."""
    try:
        again = True
        while again:
            again = False
            for simpler in candidates(program):
                if fails(simpler):
                    program, again = simpler, True
                    break
    except StopIteration:
        pass
    return program


def shrink_within(program: Program, fails: Callable[[Program], bool], attempts: int) -> Program:
    """``shrink`` with at most ``attempts`` calls of ``fails``. Returns the smallest failing program."""
    best, left = program, attempts

    def asked(simpler: Program) -> bool:
        nonlocal best, left
        if not left:
            raise StopIteration
        left -= 1
        if failed := fails(simpler):
            best = simpler
        return failed

    shrink(program, asked)
    return best


def candidates(program: Program) -> Iterator[Program]:
    """Simpler programs, the boldest first."""

    def but(**changes: Any) -> Iterator[Program]:
        simpler = dataclasses.replace(program, **changes)
        if simpler != program:
            yield simpler

    ops = program.ops
    for size in (len(ops) // 2, 1):
        for k in range(0, len(ops), size or 1):
            if size:
                yield from but(ops=ops[:k] + ops[k + size :])
    yield from but(loop="none", loop_choice=0)
    yield from but(transform="none", transform_choice=0)
    if program.transform != "none":
        yield from but(transform="grad")
    yield from but(lead=(2,))
    yield from but(lead=(program.lead[0] // 2, *program.lead[1:]))
    yield from but(lead=program.lead[:1])
    yield from but(inputs=1)
    yield from but(inputs=max(1, program.inputs - 1))
    for k in range(len(program.outputs)):
        if len(program.outputs) > 1:
            yield from but(outputs=program.outputs[:k] + program.outputs[k + 1 :])
    yield from but(outputs=tuple(range(len(program.outputs))))
    yield from but(constants=())
    yield from but(spare=False)
    yield from but(magnitude=1.0)
    yield from but(residuals="save")
    yield from but(force=True)
    yield from but(dtype="float32")
    for features in (1, 2, 3, program.features // 2, program.features - 1):
        if 0 < features < program.features:
            yield from but(features=features)
    for rows in (1, 3, program.lead[0] - 1):
        if 0 < rows < program.lead[0]:
            yield from but(lead=(rows, *program.lead[1:]))
    for place in ("whole", "body"):
        if program.pipelined != "whole" and place != program.pipelined:
            yield from but(pipelined=place)
    for name in ("loop_choice", "transform_choice", "seed"):
        value = getattr(program, name)
        for smaller in _smaller(value):
            yield from but(**{name: smaller})
    for k, op in enumerate(ops):
        simpler = [Op(op.name, 0, op.second, op.choice), Op(op.name, op.first, 0, op.choice)]
        for new in (*simpler, *(dataclasses.replace(op, choice=c) for c in _smaller(op.choice))):
            yield from but(ops=(*ops[:k], new, *ops[k + 1 :]))


def _smaller(number: int) -> Iterator[int]:
    """Zero, the lowest digits of ``number`` in several bases, and half of it: a choice reads digits from the lowest on."""
    seen = {number}
    for value in (0, *(number % base for base in (12, 35, 60, 144, 420, 1000, 5040)), number // 2):
        if value < number and value not in seen:
            seen.add(value)
            yield value

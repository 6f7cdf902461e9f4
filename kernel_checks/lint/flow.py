"""Where an instruction of a function's machine code can go on.

Comes in: a disassembled function. Goes out: for every instruction its successors by index, calls and returns. Invariant: a jump
whose target cannot be read is an error, so no path is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kernel_checks.sass import Instruction

__all__ = ["Flow", "flow"]

_ALWAYS = ("", "PT", "UPT")
_TARGET = re.compile(r"(0x[0-9a-f]+)\)?$")


@dataclass(frozen=True)
class Flow:
    """``next[i]``: where the threads of instruction i may go on, calls and returns left out; ``calls[i]``: the first instruction of
    what is called; ``returns``: the instructions that return to the caller (and go on, where they are predicated); ``ends``: those
    at which threads end, with the same remark."""

    code: Sequence[Instruction]
    next: tuple[tuple[int, ...], ...]
    calls: dict[int, int]
    returns: frozenset[int]
    ends: frozenset[int]


def flow(code: Sequence[Instruction]) -> Flow:
    """Raises ``ValueError`` for an indirect jump, or a jump to where no instruction is."""
    index = {one.address: i for i, one in enumerate(code)}
    joins: dict[str, set[int]] = {}
    for one in code:
        if one.opcode.startswith("BSSY"):
            barrier, _, _ = one.operands.partition(",")
            joins.setdefault(barrier.strip(), set()).add(_target(one, index))
    following: list[tuple[int, ...]] = []
    calls: dict[int, int] = {}
    returns, ends = set[int](), set[int]()
    for i, one in enumerate(code):
        base, always = one.opcode.split(".")[0], one.predicate in _ALWAYS
        after = (i + 1,) if i + 1 < len(code) else ()
        if base in ("EXIT", "KILL"):
            ends.add(i)
            after = () if always else after
        elif base == "BPT":
            after = () if "TRAP" in one.opcode and always else after
        elif base == "RET":
            returns.add(i)
            after = () if always else after
        elif base == "CALL":
            calls[i] = _target(one, index)
        elif base == "BRA":
            # A second condition among the operands, or a form of its own (BRA.DIV, BRA.U.ANY): it may go on.
            never_on = always and one.opcode == "BRA" and "," not in one.operands
            after = (_target(one, index),) if never_on else (*after, _target(one, index))
        elif base == "BSYNC" and i + 1 not in joins.get(one.operands.split(",")[0].strip(), set()):
            raise ValueError(f"{one} at {one.address:#x} does not stand in front of where its threads meet")
        elif base == "WARPSYNC" and ".COLLECTIVE" in one.opcode:
            after = (*after, _target(one, index))
        elif base in ("BRX", "BRXU", "JMX", "JMXU", "JMP", "BREAK"):
            raise ValueError(f"{one} at {one.address:#x}: the target of this jump is not known")
        following.append(after)
    return Flow(code, tuple(following), calls, frozenset(returns), frozenset(ends))


def _target(one: Instruction, index: dict[int, int]) -> int:
    found = _TARGET.search(one.operands)
    if found is None or int(found[1], 16) not in index:
        raise ValueError(f"{one} at {one.address:#x} jumps to where no instruction is")
    return index[int(found[1], 16)]

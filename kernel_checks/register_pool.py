"""The registers that a kernel's warpgroups hand to each other, read from its machine code.

Comes in: disassembled code and the threads of a CTA. Goes out: ``RegisterPool``: what the launch gives, what each role asks for
with ``setmaxnreg``, and the most that its code names. Invariant: nothing that runs a program imports this module (see ``sass.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kernel_checks.sass import Instruction, Sass

__all__ = ["RegisterPool", "Role", "register_pool"]

_WARPGROUP = 128
_REGISTER = re.compile(r"(?<![A-Z])R(\d+)(\.64)?")
_OPERAND = re.compile(r"desc\[[^,]*\]\[[^,]*\]|\[[^,]*\]|[^,\s][^,]*")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")


@dataclass(frozen=True)
class Role:
    """Warpgroups that set the same count. ``registers``: what ``setmaxnreg`` leaves each of their threads; ``used``: one more than
    the highest register that the code from there on names; ``address``: of the instruction."""

    address: int
    gives: bool
    registers: int
    used: int


@dataclass(frozen=True)
class RegisterPool:
    """``launch``: registers of each thread at the launch. ``roles`` in the order of the code; none where nothing is handed over."""

    launch: int
    warpgroups: int
    roles: tuple[Role, ...]

    @property
    def available(self) -> int:
        """Registers of one thread of each warpgroup together."""
        return self.warpgroups * self.launch

    @property
    def asked(self) -> int:
        """The same after every ``setmaxnreg``: the first warpgroup gives, all others ask for the most that stands in the code."""
        if not self.roles:
            return self.available
        kept = max((r.registers for r in self.roles if r.gives), default=self.launch)
        taken = max((r.registers for r in self.roles if not r.gives), default=self.launch)
        return kept + (self.warpgroups - 1) * taken

    @property
    def fits(self) -> bool:
        """False where ``setmaxnreg.inc`` would wait for ever, or a role's code names registers that the role does not have."""
        return self.asked <= self.available and all(r.used <= r.registers for r in self.roles)


def register_pool(code: Sass, threads: int) -> RegisterPool:
    """The pool of a kernel whose CTAs have ``threads`` threads: one warpgroup that gives (the loader), the others ask."""
    index = {one.address: i for i, one in enumerate(code.instructions)}
    roles = []
    for i, one in enumerate(code.instructions):
        if one.opcode.startswith("USETMAXREG"):
            target = _TARGET.search(one.operands)
            assert target is not None, one
            reached = _reached(code.instructions, index, i + 1)
            used = max((r for k in reached for r in _registers(code.instructions[k])), default=-1) + 1
            roles.append(Role(one.address, ".DEALLOC" in one.opcode, int(target[1], 16), used))
    return RegisterPool(code.registers, threads // _WARPGROUP, tuple(roles))


def _reached(code: tuple[Instruction, ...], index: dict[int, int], start: int) -> set[int]:
    """Instructions that may run from ``start`` on."""
    seen, todo = set[int](), [start]
    while todo:
        i = todo.pop()
        if i in seen or i >= len(code):
            continue
        seen.add(i)
        one = code[i]
        target = _TARGET.search(one.operands)
        if one.opcode.startswith(("BRA", "CALL")) and target is not None:
            todo.append(index[int(target[1], 16)])
        conditional = bool(one.predicate) or one.opcode.startswith("CALL") or "UP" in one.operands or one.operands.startswith("P")
        if conditional or not one.opcode.startswith(("BRA", "EXIT", "RET", "BRX")):
            todo.append(i + 1)
    return seen


def _registers(one: Instruction) -> Iterator[int]:
    """The highest register of each operand."""
    operands = list(_OPERAND.finditer(one.operands))
    for position, operand in enumerate(operands):
        for found in _REGISTER.finditer(operand[0]):
            address = operand[0].startswith(("[", "desc"))
            last = position in (0, len(operands) - 1)
            yield int(found[1]) + (1 if found[2] else 0 if address else _more(one.opcode, position, last))


def _more(opcode: str, position: int, last: bool) -> int:
    """Registers that an operand takes beside the one that is named. ``last``: it is the result or the addend."""
    if shape := re.match(r"HGMMA\.64x(\d+)x", opcode):
        return int(shape[1]) // 2 - 1 if position == 0 else 3
    if opcode.startswith("HMMA"):
        return 1 if position == 2 else 3
    if ".128" in opcode:
        return 3
    return 1 if ".64" in opcode or (".WIDE" in opcode and last) else 0

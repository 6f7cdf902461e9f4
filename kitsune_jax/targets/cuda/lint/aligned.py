"""Instructions that all threads of a warp must execute together, and whether they do.

Comes in: a function's machine code. Goes out: each such instruction that some threads of a warp may skip: under a predicate that
can differ between them, or behind a branch on one. Invariant: a value is taken to differ between threads unless it is known not to.

Known to be equal in a warp: constants and parameters; uniform registers; what a shuffle reads from one lane; a vote; a plain load
from an address that is equal; and whatever is computed of these alone where all threads come by. Numbers of warps and warpgroups
(``threadIdx.x / 32`` and coarser) count as equal.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from kitsune_jax.targets.cuda.lint.flow import Flow
from kitsune_jax.targets.cuda.lint.operands import Access, access, product, split
from kitsune_jax.targets.cuda.sass import Instruction

__all__ = ["Skipped", "skipped"]

# SHFL.IDX is not among them: where ptxas gathers the atomics of some threads it shuffles among these.
_ALIGNED = (
    *("HGMMA", "WARPGROUP.", "WARPSYNC.ALL", "USETMAXREG", "BAR.SYNC", "UCGABAR", "LDSM", "STSM", "HMMA", "MOVM"),
    *("SHFL.BFLY", "SHFL.UP", "SHFL.DOWN"),
)
_EQUAL_SOURCES = (
    "SR_CTAID",
    "SR_NCTAID",
    "SR_CgaCtaId",
    "SR_CgaSize",
    "SR_NTID",
    "SR_WARPID",
    "SR_VIRTUALSMID",
    "SR_SWINHI",
    "SRZ",
)
_VOLATILE = ("LD.", "LDG.E.STRONG", "LDG.E.64.STRONG", "LDG.E.128.STRONG", "ATOM", "SYNCS")
_SLOT = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")


@dataclasses.dataclass(frozen=True, order=True)
class Skipped:
    """``instruction`` is skipped by some threads of a warp, because they differ in the condition of ``branch`` (an address)."""

    address: int
    instruction: str
    branch: int

    def __str__(self) -> str:
        why = "under its own predicate" if self.branch == self.address else f"behind the branch at {self.branch:#x}"
        return f"{self.address:#x}: {self.instruction} is for whole warps, and threads of one may differ {why}"


def skipped(flow: Flow) -> tuple[Skipped, ...]:
    """Raises ``UnknownOpcode``."""
    code = flow.code
    accesses = [_access(one) for one in code]
    following = _with_calls(flow)
    after = _post_dominators(following)
    divergent: set[int] = set()
    while True:  # a branch that differs makes what is computed behind it differ, and so perhaps another branch
        inside = _controlled(divergent, following, after)
        differing = _differing(code, accesses, following, inside)
        more = {i for i, names in enumerate(differing) if len(following[i]) > 1 and _condition(code[i], accesses[i]) & names}
        if more <= divergent:
            break
        divergent |= more
    found = set()
    for i, one in enumerate(code):
        if not one.opcode.startswith(_ALIGNED) or not following[i]:
            continue
        if _condition(one, accesses[i]) & differing[i] and one.predicate:
            found.add(Skipped(one.address, str(one), one.address))
        found |= {Skipped(one.address, str(one), code[b].address) for b in inside.get(i, ())}
    return tuple(sorted(found))


def _access(one: Instruction) -> Access:
    """With words of local memory, where spilled registers are, as registers of their own: "L8" is 8 bytes above R1."""
    fast = product(one)
    if fast is not None:
        return Access(frozenset(), fast.d)
    does = access(one)
    if not one.opcode.startswith(("LDL", "STL")):
        return does
    found = _SLOT.search(one.operands)
    first = int(found[1] or "0", 16) if found else 0
    size = 16 if ".128" in one.opcode else 8 if ".64" in one.opcode else 4
    slots = frozenset(f"L{first + k}" for k in range(0, size, 4)) if found else frozenset({"L*"})
    if one.opcode.startswith("STL"):
        return Access(does.reads, slots)
    return Access(does.reads | slots | {"L*"}, does.writes)


def _condition(one: Instruction, does: Access) -> frozenset[str]:
    """The predicates that decide whether it runs, or where it leads."""
    return (
        frozenset(name for name in does.reads if name.startswith("P"))
        if one.opcode.startswith("BRA")
        else (frozenset({one.predicate.lstrip("!")}) if one.predicate.lstrip("!").startswith("P") else frozenset())
    )


def _with_calls(flow: Flow) -> list[tuple[int, ...]]:
    """Where each instruction leads: a call into what it calls, and a return to behind every call."""
    following = list(flow.next)
    for i in flow.returns:
        following[i] = (*following[i], *(call + 1 for call in flow.calls))
    for i, called in flow.calls.items():
        following[i] = (called, *(flow.next[i] if flow.code[i].predicate else ()))
    return following


def _post_dominators(following: Sequence[tuple[int, ...]]) -> list[int]:
    """For each instruction the nearest one that every path from it to the end comes by; -1 is the end."""
    count = len(following)
    order, seen = [], [False] * count
    preceding: list[list[int]] = [[] for _ in range(count + 1)]
    for i, targets in enumerate(following):
        for t in targets or (count,):
            preceding[t].append(i)
    stack = [(count, iter(preceding[count]))]
    while stack:
        node, rest = stack[-1]
        for p in rest:
            if not seen[p]:
                seen[p] = True
                stack.append((p, iter(preceding[p])))
                break
        else:
            order.append(node)
            stack.pop()
    rank = {node: k for k, node in enumerate(order)}  # the end is last
    nearest = [-1] * (count + 1)
    nearest[count] = count
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            new = -1
            for t in following[node] or (count,):
                if t in rank and nearest[t] != -1:
                    new = t if new == -1 else _meet(t, new, nearest, rank)
            if nearest[node] != new:
                nearest[node], changed = new, True
    return [-1 if n == count else n for n in nearest[:count]]


def _meet(a: int, b: int, nearest: list[int], rank: dict[int, int]) -> int:
    while a != b:
        while rank[a] < rank[b]:
            a = nearest[a]
        while rank[b] < rank[a]:
            b = nearest[b]
    return a


def _controlled(branches: set[int], following: Sequence[tuple[int, ...]], after: Sequence[int]) -> dict[int, set[int]]:
    """For each instruction the branches of ``branches`` that decide whether it runs."""
    found: dict[int, set[int]] = {}
    for branch in branches:
        for t in following[branch]:
            node = t
            while node not in (-1, after[branch]):
                if branch in found.setdefault(node, set()):
                    break
                found[node].add(branch)
                node = after[node]
    return found


# In front of an instruction: what may differ between the threads of a warp; and which registers hold threadIdx.x, or that and a
# multiple of 32.
_State = tuple[frozenset[str], frozenset[str]]


def _differing(
    code: Sequence[Instruction], accesses: Sequence[Access], following: Sequence[tuple[int, ...]], inside: dict[int, set[int]]
) -> list[frozenset[str]]:
    """For each instruction the registers and predicates in front of it that may differ between the threads of a warp."""
    before: list[_State | None] = [None] * len(code)
    before[0] = (frozenset(), frozenset())
    todo = [0]
    while todo:
        i = todo.pop()
        state = before[i]
        assert state is not None
        names, threads = state
        one, does = code[i], accesses[i]
        if _differs(one, does, names, threads) or i in inside:
            out = names | does.writes
        else:
            out = names if one.predicate else names - does.writes  # a thread that skips it keeps what it had
        numbers = threads - does.writes
        if not one.predicate and _is_thread(one, threads):
            numbers |= does.writes
        for t in following[i]:
            old = before[t]
            new = (out, numbers) if old is None else (old[0] | out, old[1] & numbers)
            if new != old:
                before[t] = new
                todo.append(t)
    return [state[0] if state else frozenset() for state in before]


def _is_thread(one: Instruction, threads: frozenset[str]) -> bool:
    """Whether it makes the thread's number, or adds a multiple of 32 to it."""
    parts = [part.removesuffix(".reuse") for part in split(one.operands)]
    if one.opcode == "S2R":
        return parts[1] == "SR_TID.X"
    if one.opcode in ("MOV", "IMAD.MOV.U32"):
        return parts[-1] in threads
    if one.opcode in ("VIADD", "IADD3"):
        numbers = [_number(part) for part in parts[1:] if part not in threads and part not in ("RZ", "!PT")]
        return sum(part in threads for part in parts[1:]) == 1 and all(n is not None and n % 32 == 0 for n in numbers)
    return False


def _is_warp(one: Instruction, threads: frozenset[str]) -> bool:
    """Whether its result is a function of the warp's number: of all but the last five bits of the thread's."""
    parts = [part.removesuffix(".reuse") for part in split(one.operands)]
    numbers = [n for part in parts if (n := _number(part)) is not None]
    if not any(part in threads for part in parts) or not numbers:
        return False
    if one.opcode == "SHF.R.U32.HI" and parts[1] == "RZ":
        return parts[3] in threads and numbers[0] >= 5
    if one.opcode == "LOP3.LUT" and "0xc0" in parts:
        return numbers[0] % 32 == 0
    if one.opcode.startswith("ISETP.") and parts[2] in threads:
        # "Below a multiple of 32", or "not above the number in front of one".
        return (numbers[0] + (".GT" in one.opcode or ".LE" in one.opcode)) % 32 == 0 and not one.opcode.startswith(
            ("ISETP.NE", "ISETP.EQ")
        )
    return False


def _number(part: str) -> int | None:
    try:
        return int(part, 16)
    except ValueError:
        return None


def _differs(one: Instruction, does: Access, names: frozenset[str], threads: frozenset[str]) -> bool:
    """Whether what ``one`` writes may differ between threads of a warp, given what does in front of it."""
    if one.opcode.startswith(("R2UR", "VOTE", "REDUX", "ELECT", "U", "S2UR")):
        return one.opcode.startswith(("ELECT", "R2UR"))  # a predicate of theirs: which thread is meant
    if one.opcode.startswith(("S2R", "CS2R")):
        return not any(source in one.operands for source in _EQUAL_SOURCES)
    if one.opcode.startswith("SHFL.IDX"):
        return split(one.operands)[3] != "RZ" and _number(split(one.operands)[3]) is None
    if one.opcode.startswith(_VOLATILE) or "L*" in does.writes:
        return True
    if _is_warp(one, threads):
        return bool(does.reads & names - threads)
    return bool(does.reads & names)

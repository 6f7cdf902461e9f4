"""Instructions that all threads of a warp must execute together, and whether they do.

Comes in: a function's machine code. Goes out: each such instruction that some threads of a warp may skip: under a predicate that
can differ between them, or behind a branch on one. Invariant: a value is taken to differ between threads unless it is known not to.

Known to be equal in a warp: constants and parameters; uniform registers; what a shuffle reads from one lane; a vote; a plain load
from an address that is equal; and whatever is computed of these alone where all threads come by. Numbers of warps and warpgroups
(``threadIdx.x / 32`` and coarser) count as equal. A register that differs and is written under a predicate is equal in the threads
that have written it: whoever reads it under the same predicate, which has not changed meanwhile, reads what is equal.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import re
from collections.abc import Iterable, Sequence

from kernel_checks.lint.flow import Flow
from kernel_checks.lint.operands import Access, access, product, split
from kernel_checks.sass import Instruction

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
    accesses = _with_bits(code, [_access(one) for one in code])
    edges = _edges(flow, accesses)
    after = _post_dominators(flow)  # threads that call come back to behind that call, and to no other
    divergent: set[int] = set()
    while True:  # a branch that differs makes what is computed behind it differ, and so perhaps another branch
        inside = _controlled(divergent, flow, after)
        differing = _differing(code, accesses, edges, inside)
        more = {i for i, names in enumerate(differing) if names and (len(flow.next[i]) > 1 or i in flow.calls)}
        if more <= divergent:
            break
        divergent |= more
    found = set()
    for i, one in enumerate(code):
        if not one.opcode.startswith(_ALIGNED) or not edges[i]:
            continue
        if differing[i]:
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


def _with_bits(code: Sequence[Instruction], accesses: Sequence[Access]) -> list[Access]:
    """With bits of their own, "R60.3", for registers in which ptxas keeps more predicates than there are: it clears a bit, sets it
    under the predicate, and tests it later."""
    bits = [_bit(one) for one in code]
    kept = {register for register, _, how in filter(None, bits) if how != "test"}

    def parts(names: frozenset[str]) -> frozenset[str]:
        return names - kept | {f"{r}.{k}" for r in names & kept for k in range(32)}

    found = []
    for does, bit in zip(accesses, bits, strict=True):
        if bit is None or bit[0] not in kept:
            found.append(Access(parts(does.reads), parts(does.writes)))
            continue
        register, number, how = bit
        own = frozenset({f"{register}.{number}"})
        reads = does.reads - {register}
        found.append(Access(reads | own, does.writes) if how == "test" else Access(reads, own))
    return found


def _bit(one: Instruction) -> tuple[str, int, str] | None:
    """(register, bit, "clear", "set" or "test") where that is all that the instruction does."""
    parts = [part.removesuffix(".reuse") for part in split(one.operands)]
    if one.opcode != "LOP3.LUT" or parts[-3:] not in (["RZ", "0xc0", "!PT"], ["RZ", "0xfc", "!PT"]):
        return None
    number, does_or = _number(parts[-4]) if len(parts) in (6, 7) else None, parts[-2] == "0xfc"
    if number is None:
        return None
    register = parts[-5]
    cleared = ~number & 0xFFFFFFFF
    if len(parts) == 6 and parts[0] == register and not does_or and cleared.bit_count() == 1:
        return register, cleared.bit_length() - 1, "clear"
    if len(parts) == 6 and parts[0] == register and does_or and number.bit_count() == 1:
        return register, number.bit_length() - 1, "set"
    if len(parts) == 7 and parts[0].startswith("P") and parts[1] == "RZ" and not does_or and number.bit_count() == 1:
        return register, number.bit_length() - 1, "test"
    return None


def _condition(one: Instruction, does: Access) -> frozenset[str]:
    """The predicates that decide whether it runs, or where it leads."""
    return (
        frozenset(name for name in does.reads if name.startswith("P"))
        if one.opcode.startswith("BRA")
        else (frozenset({one.predicate.lstrip("!")}) if one.predicate.lstrip("!").startswith("P") else frozenset())
    )


@dataclasses.dataclass(frozen=True)
class _Edge:
    """A way on to instruction ``to``. ``only``: the registers that it says something about, all by default; ``but``: all but these.
    Behind a call the registers that the called code writes come from its return, and the others from the call."""

    to: int
    only: frozenset[str] | None = None
    but: frozenset[str] = frozenset()


def _edges(flow: Flow, accesses: Sequence[Access]) -> list[list[_Edge]]:
    """Where each instruction leads: a call into the called code and to behind it, a return to behind each call of its code."""
    found = [[_Edge(t) for t in targets] for targets in flow.next]
    bodies = {called: _reached(called, flow.next) for called in set(flow.calls.values())}
    changed = True
    while changed:  # code that is called may call
        changed = False
        for body in bodies.values():
            inner = set[int]().union(*(bodies[flow.calls[i]] for i in body if i in flow.calls)) - body
            body |= inner
            changed |= bool(inner)
    for call, called in flow.calls.items():
        writes = frozenset[str]().union(*(accesses[i].writes for i in bodies[called]))
        behind = call + 1
        found[call] = [_Edge(called), _Edge(behind, but=writes), *(found[call] if flow.code[call].predicate else ())]
        for i in flow.returns & _reached(called, flow.next):
            found[i].append(_Edge(behind, only=writes))
    return found


def _post_dominators(flow: Flow) -> list[int]:
    """For each instruction the nearest one that every path from it to the end comes by; -1 is the end. A loop may end by a
    predicated EXIT or RET alone."""
    count, ends = len(flow.next), flow.ends | flow.returns
    following = [(*targets, count) if i in ends else targets or (count,) for i, targets in enumerate(flow.next)]
    order, seen = [], [False] * count
    preceding: list[list[int]] = [[] for _ in range(count + 1)]
    for i, targets in enumerate(following):
        for t in targets:
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
            for t in following[node]:
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


def _controlled(branches: set[int], flow: Flow, after: Sequence[int]) -> dict[int, set[int]]:
    """For each instruction the branches and calls of ``branches`` that decide whether it runs."""
    found: dict[int, set[int]] = {}
    for branch in branches:
        for t in flow.next[branch]:
            node = t
            while node not in (-1, after[branch]):
                if branch in found.setdefault(node, set()):
                    break
                found[node].add(branch)
                node = after[node]
    changed = True
    while changed:  # what decides about a call decides about all that is called
        changed = False
        for call, called in flow.calls.items():
            causes = found.get(call, set()) | ({call} & branches)
            for node in _reached(called, flow.next) if causes else ():
                changed |= not causes <= found.setdefault(node, set())
                found[node] |= causes
    return found


def _reached(start: int, following: Sequence[tuple[int, ...]]) -> set[int]:
    seen, work = {start}, [start]
    while work:
        more = [t for t in following[work.pop()] if t not in seen]
        seen.update(more)
        work += more
    return seen


def _differing(
    code: Sequence[Instruction], accesses: Sequence[Access], edges: Sequence[Sequence[_Edge]], inside: dict[int, set[int]]
) -> list[frozenset[str]]:
    """For each instruction which of the predicates that decide about it may differ between the threads of a warp."""
    # A state: what may differ, and what holds threadIdx.x, or that and a multiple of 32. As bits, because there are many.
    bit = {name: 1 << k for k, name in enumerate(sorted({n for does in accesses for n in does.reads | does.writes}))}
    reads, writes = (
        [sum(bit[n] for n in side) for side in sides] for sides in ([d.reads for d in accesses], [d.writes for d in accesses])
    )
    # A third part: (register, predicate) of what has been written under the predicate, and is equal where that holds.
    under = _Guarded(code, accesses, bit)
    before: list[tuple[int, int, int] | None] = [None] * len(code)
    if code:
        before[0] = (0, 0, 0)
    todo, waiting = list(range(min(1, len(code)))), {0}  # in the order of the code, so that most is looked at once
    while todo:
        i = heapq.heappop(todo)
        waiting.remove(i)
        names, threads, equal = before[i] or (0, 0, 0)
        one = code[i]
        seen = names & ~under.equal_in(i, equal)
        held = _whole(n for n in accesses[i].reads if bit[n] & threads) if reads[i] & threads else frozenset()
        differs = i in inside or _differs(one, accesses[i], bool(reads[i] & seen), bool(reads[i] & seen & ~threads), held)
        equal = under.behind(i, equal, differs)
        if differs:
            out = names | writes[i]
        else:
            out = names if one.predicate else names & ~writes[i]  # a thread that skips it keeps what it had
        numbers = threads & ~writes[i]
        if not one.predicate and _is_thread(one, held):
            numbers |= writes[i]
        for edge in edges[i]:
            t, old = edge.to, before[edge.to]
            silent = sum(bit[n] for n in (bit.keys() - edge.only if edge.only is not None else edge.but & bit.keys()))
            # Of registers that the edge says nothing about, another one does: here nothing differs, and everything is known.
            new = out & ~silent, numbers | silent, equal | under.of(silent)
            if old is not None:
                new = old[0] | new[0], old[1] & new[1], old[2] & new[2]
            if new != old:
                before[t] = new
                if t not in waiting:
                    waiting.add(t)
                    heapq.heappush(todo, t)
    wanted = [_condition(one, does) for one, does in zip(code, accesses, strict=True)]
    return [frozenset(n for n in w if state and bit.get(n, 0) & state[0]) for w, state in zip(wanted, before, strict=True)]


class _Guarded:
    """Which registers are equal in the threads for which a predicate holds, as bits: one for each register that some instruction
    writes under a predicate, and that predicate. ``bit``: of registers and predicates."""

    def __init__(self, code: Sequence[Instruction], accesses: Sequence[Access], bit: dict[str, int]):
        pairs = {(name, one.predicate) for one, does in zip(code, accesses, strict=True) if one.predicate for name in does.writes}
        of = {pair: 1 << k for k, pair in enumerate(sorted(pairs))}
        self.made, self.lost, self.read = list[int](), list[int](), list[list[tuple[int, int]]]()
        by_name: dict[str, int] = {}
        self.of_name: dict[int, int] = {}
        for (name, predicate), one_bit in of.items():
            self.of_name[bit[name]] = self.of_name.get(bit[name], 0) | one_bit
            for changed in (name, predicate.lstrip("!")):
                by_name[changed] = by_name.get(changed, 0) | one_bit
        for one, does in zip(code, accesses, strict=True):
            kept = one.predicate and one.predicate.lstrip("!") not in does.writes
            self.made.append(sum(of[name, one.predicate] for name in does.writes) if kept else 0)
            lost = 0
            for name in does.writes:
                lost |= by_name.get(name, 0)
            self.lost.append(lost)
            found = [(of[name, one.predicate], bit[name]) for name in does.reads if (name, one.predicate) in of]
            self.read.append(found if one.predicate else [])

    def of(self, names: int) -> int:
        """The pairs of the registers ``names``, as bits, with any predicate."""
        return sum(pair for name, pair in self.of_name.items() if name & names) if names else 0

    def equal_in(self, i: int, equal: int) -> int:
        """The registers that instruction ``i`` reads as equal."""
        return sum(register for pair, register in self.read[i] if pair & equal)

    def behind(self, i: int, equal: int, differs: bool) -> int:
        """``equal`` behind instruction ``i``, whose results differ or not."""
        return equal & ~self.lost[i] | (0 if differs else self.made[i])


def _whole(names: Iterable[str]) -> frozenset[str]:
    """``names``, and a register all of whose bits are among them."""
    found = frozenset(names)
    bits = collections.Counter(name.partition(".")[0] for name in found if "." in name)
    return found | {register for register, n in bits.items() if n == 32}


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
    if one.opcode == "LEA.HI" and parts[3] == "RZ":  # of two words shifted left the upper one, and a number
        return parts[1] in threads and parts[2] not in threads and (_number(parts[4]) or 32) <= 27
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


def _differs(one: Instruction, does: Access, source: bool, other: bool, threads: frozenset[str]) -> bool:
    """Whether what ``one`` writes may differ between threads of a warp. ``source``: something that it reads does; ``other``:
    something other than ``threads``, its sources that hold the thread's number."""
    if one.opcode.startswith(("R2UR", "VOTE", "REDUX", "ELECT", "U", "S2UR")):
        return one.opcode.startswith(("ELECT", "R2UR"))  # a predicate of theirs: which thread is meant
    if one.opcode.startswith(("S2R", "CS2R")):
        return not any(source in one.operands for source in _EQUAL_SOURCES)
    if one.opcode.startswith("SHFL.IDX"):
        return split(one.operands)[3] != "RZ" and _number(split(one.operands)[3]) is None
    if one.opcode.startswith(_VOLATILE) or "L*" in does.writes:
        return True
    if _is_warp(one, threads):
        return other
    return source

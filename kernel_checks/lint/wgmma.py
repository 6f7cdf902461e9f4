"""What happens to the registers of a matrix product while the tensor core works on it.

``HGMMA`` is asynchronous and no scoreboard guards it: from its issue until the ``WARPGROUP.DEPBAR`` that retires it, the tensor
core reads A and reads and writes the sum D. Whoever writes A or touches D in between changes the result, or does not, as it
happens.

Comes in: a function's machine code. Goes out: every such touch, on any path, and how many groups of products are in flight at each
wait. All paths are followed, those that a predicate never takes included, until no path shows anything new.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator

from kernel_checks.lint.flow import Flow
from kernel_checks.lint.operands import Product, access, product, split

__all__ = ["Hazard", "InFlight", "Wait", "in_flight"]

_MOST = 64  # groups that are told apart, and products of a group; a wait leaves at most 7, so what is older retires together anyway


@dataclasses.dataclass(frozen=True, order=True)
class Hazard:
    """``what`` the instruction at ``address`` does to the product issued at ``product``."""

    address: int
    what: str
    registers: tuple[str, ...]
    instruction: str
    product: int

    def __str__(self) -> str:
        some = ", ".join(self.registers[:4]) + (", ..." if len(self.registers) > 4 else "")
        return f"{self.address:#x}: {self.instruction} {self.what} {some} of the HGMMA at {self.product:#x}, which is in flight"


@dataclasses.dataclass(frozen=True, order=True)
class Wait:
    """A ``WARPGROUP.DEPBAR``: it leaves the newest ``leaves`` groups in flight. ``arriving``: how many can be when it is reached.

    ``left_products``: how many ``HGMMA`` those left can have together, of ``arriving_products``.
    """

    address: int
    leaves: int
    arriving: tuple[int, ...]
    arriving_products: tuple[int, ...]
    left_products: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class InFlight:
    """``serialised``: no two products of a sum are ever in flight together, as ptxas does where it cannot prove what it must.

    ``empty``: products into nothing, which ptxas makes of groups without one. ``pointwise``: instructions of floating point;
    ``hidden``: those of them with a product in flight whenever they run.
    """

    hazards: tuple[Hazard, ...]
    waits: tuple[Wait, ...]
    serialised: bool
    empty: int
    pointwise: int
    hidden: int

    @property
    def most_left(self) -> int:
        """The most products that a wait leaves in flight: 0 where every wait is for all."""
        return max((n for wait in self.waits for n in wait.left_products), default=0)


# Groups of indices of HGMMA, oldest first, the last one not closed yet; and where the calls on the way return to.
_Groups = tuple[tuple[int, ...], ...]
_State = tuple[_Groups, tuple[int, ...]]
_NONE: _State = (((),), ())
_DEEPEST = 16


def in_flight(flow: Flow) -> InFlight:
    """Raises ``UnknownOpcode``, and ``ValueError`` for what this cannot follow (see ``flow``)."""
    products = {i: p for i, one in enumerate(flow.code) if (p := product(one)) is not None}
    waits = {i: int(split(one.operands)[1], 16) for i, one in enumerate(flow.code) if one.opcode.startswith("WARPGROUP.DEPBAR")}
    states: list[set[_State]] = [set() for _ in flow.code]
    todo = [(0, _NONE)] if products else []  # mma.sync has nothing in flight
    while todo:
        i, state = todo.pop()
        if state in states[i]:
            continue
        states[i].add(state)
        todo += _step(flow, i, state, products, waits)
    hazards = {h for i, seen in enumerate(states) for groups in {s[0] for s in seen} for h in _touches(flow, i, groups, products)}
    pointwise = [i for i, one in enumerate(flow.code) if one.opcode.startswith(("F", "MUFU", "H")) and _is_pointwise(one.opcode)]
    seen_waits = tuple(_wait(flow, i, leaves, {s[0] for s in states[i]}) for i, leaves in sorted(waits.items()) if states[i])
    sums = [p.d for _, p in sorted(products.items()) if p.d]
    return InFlight(
        tuple(sorted(hazards)),
        seen_waits,
        any(map(operator.eq, sums, sums[1:])) and all(max(w.arriving_products) <= 1 for w in seen_waits),
        sum(not p.d for p in products.values()),
        len(pointwise),
        sum(bool(states[i]) and all(any(groups) for groups, _ in states[i]) for i in pointwise),
    )


def _is_pointwise(opcode: str) -> bool:
    return opcode.split(".")[0] in (
        "FADD",
        "FMUL",
        "FFMA",
        "FMNMX",
        "FSEL",
        "FSETP",
        "F2FP",
        "MUFU",
        "HADD2",
        "HFMA2",
        "HMUL2",
        "HMNMX2",
    )


def _step(flow: Flow, i: int, state: _State, products: dict[int, Product], waits: dict[int, int]) -> Iterator[tuple[int, _State]]:
    """Where instruction ``i`` leads, and with what in flight."""
    groups, stack = state
    one = flow.code[i]
    after = [groups]
    if i in products:
        after = [_bounded((*groups[:-1], (*groups[-1], i), *([()] if products[i].ends_group else [])))]
    elif i in waits:
        after = [(*groups[max(0, len(groups) - 1 - waits[i]) : -1], groups[-1])]
    if (i in products or i in waits) and one.predicate:
        after.append(groups)
    if i in flow.calls:
        if len(stack) == _DEEPEST:
            raise ValueError(f"{one} at {one.address:#x} is reached through {_DEEPEST} calls that do not return")
        yield from ((flow.calls[i], (g, (*stack, i + 1))) for g in after)
        if not one.predicate:
            return
    if i in flow.returns:
        if not stack:
            raise ValueError(f"{one} at {one.address:#x} returns, and nothing was called")
        yield from ((stack[-1], (g, stack[:-1])) for g in after)
    yield from ((n, (g, stack)) for n in flow.next[i] for g in after)


def _bounded(groups: _Groups) -> _Groups:
    """``groups`` so that a loop that waits for nothing comes to an end: the oldest become one."""
    if len(groups) > _MOST:
        groups = (tuple(sorted({j for group in groups[: 1 - _MOST] for j in group})), *groups[1 - _MOST :])
    if len(groups[-1]) > _MOST:
        groups = (*groups[:-1], tuple(sorted(set(groups[-1]))))
    return groups


def _touches(flow: Flow, i: int, groups: _Groups, products: dict[int, Product]) -> Iterator[Hazard]:
    one = flow.code[i]
    flying = {j for group in groups for j in group}
    if not flying:
        return

    def hazards(what: str, registers: frozenset[str], j: int) -> Iterator[Hazard]:
        if registers:
            in_order = tuple(sorted(registers, key=lambda name: int(name[1:])))
            yield Hazard(one.address, what, in_order, str(one), flow.code[j].address)

    if i in products:
        new = products[i]
        for j in flying:
            old = products[j]
            yield from hazards("adds into A", new.d & old.a, j)
            yield from hazards("multiplies with the sum", new.a & old.d, j)
            if new.d != old.d:  # products into one sum are in order; those into parts of it are not
                yield from hazards("adds into a part of the sum", new.d & old.d, j)
        return
    does = access(one)
    for j in flying:
        yield from hazards("writes A", does.writes & products[j].a, j)
        yield from hazards("writes the sum", does.writes & products[j].d, j)
        yield from hazards("reads the sum", does.reads & products[j].d, j)
    if one.opcode.startswith("EXIT"):
        for j in flying:
            yield from hazards("ends the thread without a wait for", products[j].d, j)


def _wait(flow: Flow, i: int, leaves: int, states: set[_Groups]) -> Wait:
    def counts(groups: _Groups) -> tuple[int, int, int]:
        closed = groups[:-1]
        left = closed[max(0, len(closed) - leaves) :]
        return len(closed), sum(map(len, closed)), sum(map(len, left))

    columns = [tuple(sorted(set(column))) for column in zip(*map(counts, states), strict=True)]
    return Wait(flow.code[i].address, leaves, *columns)

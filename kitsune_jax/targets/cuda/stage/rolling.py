"""Copies of code as loops: runs of nodes that differ only in numbers which grow evenly, such as the chunks of a product.

Comes in: the nodes of a stage, fitted. Goes out: the same with ``ChunkLoop``s, for the reader: the compiler unrolls them again.
Invariant: the text of a loop's body with k for ``chunk`` is that of copy k, up to the names of accumulators, so the device does the
same in the same order. Of runs that overlap, the one that saves most nodes becomes a loop; what differs from it, such as the first
product where two are in flight, stays before or behind it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kitsune_jax.targets.cuda import ir
from kitsune_jax.targets.cuda import stage_ir as st

_LONGEST = 24  # nodes of a copy


def rolled(nodes: Iterable[ir.Node], loops: bool = True) -> tuple[ir.Node, ...]:
    """``nodes`` with loops in the place of copies, also in the bodies of other loops, unless not ``loops``. Nodes without code are
    left out."""
    found: list[ir.Node] = []
    for node in nodes:
        if isinstance(node, st.CountedLoop):
            first, body, last = (rolled(part, loops) for part in (node.first, node.body, node.last))
            node = dataclasses.replace(node, first=first, body=body, last=last)
        elif isinstance(node, st.LayerLoop):
            node = dataclasses.replace(node, body=rolled(node.body, loops))
        if not isinstance(node, ir.Alive):
            found.append(dataclasses.replace(node, chunk=0) if isinstance(node, st.Issue) else node)  # the number is the loader's
    if not loops:
        return tuple(found)
    copies = _Copies(found)
    return copies.with_arrays(copies.with_loops(0, len(found)))


class _Copies:
    def __init__(self, nodes: Sequence[ir.Node]):
        self.nodes = nodes
        split, known = [_split(node) for node in nodes], dict[ir.Node, int]()
        self.shapes, self.numbers = [known.setdefault(shape, len(known)) for shape, _ in split], [found for _, found in split]
        self.issues: dict[int, list[st.Issue]] = {}  # of the products of several chunks
        for node in nodes:
            if isinstance(node, st.Issue) and node.ref.part:
                self.issues.setdefault(node.ref.of, []).append(node)
        self.accumulators = [_accumulators([node]) for node in nodes]
        self.arrays: set[int] = set()  # products whose accumulators live from one iteration to the next

    def with_loops(self, first: int, last: int) -> list[ir.Node]:
        """The nodes [first, last)."""
        best = max(self._runs(first, last), default=None, key=lambda run: (run[2] - 1) * run[1])
        if best is None:
            return list(self.nodes[first:last])
        start, length, count = best
        end = start + length * count
        return [*self.with_loops(first, start), self._loop(start, length, count), *self.with_loops(end, last)]

    def _runs(self, first: int, last: int) -> Iterable[tuple[int, int, int]]:
        """(first node, nodes of a copy, copies) of every run whose copies are equal but for numbers that grow evenly."""
        for length in range(1, min(_LONGEST, (last - first) // 2) + 1):
            for start in range(first, last - 2 * length + 1):
                steps, count, at = list[int](), 1, start + length
                while at + length <= last and self.shapes[at : at + length] == self.shapes[start : start + length]:
                    grown = self._growth(at - length, length)
                    if not any(grown) or grown != (steps or grown):
                        break
                    steps, count, at = grown, count + 1, at + length
                if count > 1 and self._may_be_arrays(self._shared(start, length, count)):
                    yield start, length, count

    def _growth(self, first: int, length: int) -> list[int]:
        """From the numbers of ``length`` nodes to those of the ones behind."""
        a, b = ([x for n in self.numbers[k : k + length] for x in n] for k in (first, first + length))
        return [after - before for before, after in zip(a, b, strict=True)]

    def _shared(self, start: int, length: int, count: int) -> set[int]:
        """The products whose accumulators are not each of one copy: several copies name them, or code outside of the run, or a copy
        has those of several chunks."""
        end = start + length * count
        copies = [self._named(at, at + length) for at in range(start, end, length)]
        uses = Counter(x for found in (*copies, self._named(0, start), self._named(end, len(self.nodes))) for x in found)
        chunks = Counter(product for product, part in copies[0] if part)
        return {product for product, part in set().union(*copies) if part and (uses[product, part] > 1 or chunks[product] > 1)}

    def _named(self, first: int, last: int) -> set[tuple[int, str]]:
        return set[tuple[int, str]]().union(*self.accumulators[first:last])

    def _may_be_arrays(self, products: Iterable[int]) -> bool:
        """Have all chunks of a product the same columns?"""
        return all(len({issue.columns for issue in self.issues.get(product, ())}) == 1 for product in products)

    def _loop(self, start: int, length: int, count: int) -> st.ChunkLoop:
        shared, steps = self._shared(start, length, count), iter(self._growth(start, length))

        def number(x: int) -> ir.Index:
            step = next(steps)
            return ir.Stepped(x, step) if step else x

        body = [_with_numbers(node, number) for node in self.nodes[start : start + length]]
        own = {product for product, part in _accumulators(body) if part.startswith("[")} - shared
        self.arrays |= shared
        return st.ChunkLoop(count, _renamed(body, own, lambda _: ""))

    def with_arrays(self, nodes: Sequence[ir.Node]) -> tuple[ir.Node, ...]:
        """``nodes`` in which accumulators that live from one iteration of a loop to the next are elements of arrays."""
        found: list[ir.Node] = []
        declared: set[int] = set()
        for node in _renamed(nodes, self.arrays, lambda part: f"[{part[1:]}]" if part.startswith("_") else part):
            for product in sorted({p for p, _ in _accumulators([node])} & self.arrays - declared):
                issues = self.issues[product]
                found.append(st.Accumulators(ir.Ref("d", product), len(issues), issues[0].columns))
                declared.add(product)
            found.append(node)
        return tuple(found)


# --- The numbers and accumulators of nodes ----------------------------------------------------------------------------------------


def _with_numbers(node: ir.Node, change: Callable[[int], ir.Index]) -> ir.Node:
    """``node`` with ``change`` applied to the numbers that may differ between copies, in a fixed order."""

    def changed(x: Any) -> Any:
        if isinstance(x, ir.Ref) and x.kind == "d" and x.part:
            number = change(int(x.part[1:]))
            return dataclasses.replace(x, part=f"[{number}]" if isinstance(number, ir.Stepped) else f"_{number}")
        return dataclasses.replace(x, **{f: change(getattr(x, f)) for f in x.stepped}) if x.stepped else x

    found: ir.Node = ir.rebuild(node, changed)
    return found


def _split(node: ir.Node) -> tuple[ir.Node, tuple[int, ...]]:
    """(``node`` with zeros for the numbers that may differ between copies, these). A loop is equal to no other node."""
    numbers: list[int] = []

    def zero(x: int) -> int:
        numbers.append(x)
        return 0

    if isinstance(node, st.CountedLoop | st.LayerLoop):
        return node, ()
    return _with_numbers(node, zero), tuple(numbers)


def _accumulators(nodes: Iterable[ir.Node]) -> set[tuple[int, str]]:
    """(product, part) of all accumulators that ``nodes`` name."""
    return {(x.of, x.part) for x in ir.within(tuple(nodes)) if isinstance(x, ir.Ref) and x.kind == "d"}


def _renamed(nodes: Iterable[ir.Node], products: set[int], part: Callable[[str], str]) -> tuple[ir.Node, ...]:
    """``nodes`` with other parts in the names of the accumulators of ``products``, and without declarations of single elements."""

    def change(x: Any) -> Any:
        return dataclasses.replace(x, part=part(x.part)) if isinstance(x, ir.Ref) and x.kind == "d" and x.of in products else x

    found: tuple[ir.Node, ...] = ir.rebuild(tuple(nodes), change)
    return tuple(node for node in found if not (isinstance(node, ir.Registers) and node.ref.is_element))

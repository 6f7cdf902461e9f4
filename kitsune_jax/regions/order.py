"""An order of a graph's ops in which every call that was chosen stands as one node, kept up to date as calls are chosen.

Comes in: a ``GraphIndex``, and groups of ops, one by one. Goes out: ``Order``, which says what comes before what. Invariant: a node
stands behind every node that it reads from; so no two groups wait for each other.

Joining a group looks at no more of the graph than stands between its first and its last op and depends on it, or the other way
round (the ordering algorithm of Pearce and Kelly), so a network of equal layers costs in proportion to its length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kitsune_jax.graph import Graph, topological
from kitsune_jax.regions.graph_index import GraphIndex


class Order:
    """``node(i)``: what stands for op ``i``: itself, or the first op of its group. ``position(node)`` grows along every path."""

    def __init__(self, index: GraphIndex, groups: Iterable[Sequence[int]] = ()):
        self.index = index
        self._node = list(range(len(index.graph.ops)))
        self._position = list(range(len(index.graph.ops)))
        self._members: dict[int, tuple[int, ...]] = {}
        self.looks = 0  # how many nodes were looked at, for budgets
        for group in groups:
            self.join(group)

    def copy(self) -> Order:
        other = Order.__new__(Order)
        other.index, other.looks = self.index, 0
        other._node, other._position = self._node.copy(), self._position.copy()
        other._members = self._members.copy()
        return other

    def node(self, i: int) -> int:
        return self._node[i]

    def position(self, node: int) -> int:
        return self._position[node]

    def members(self, node: int) -> tuple[int, ...]:
        return self._members.get(node, (node,))

    def readers(self, node: int) -> list[int]:
        """Nodes that read what ``node`` makes, perhaps some of them several times."""
        ops, consumers, of = self.index.graph.ops, self.index.consumers, self._node
        found = [of[c] for i in self.members(node) for v in ops[i].outputs for c in consumers.get(v, ())]
        return [n for n in found if n != node] if node in self._members else found

    def sources(self, node: int) -> list[int]:
        """Nodes that ``node`` reads from, perhaps some of them several times."""
        ops, producers, of = self.index.graph.ops, self.index.producers, self._node
        found = [of[producers[v]] for i in self.members(node) for v in ops[i].inputs if v in producers]
        return [n for n in found if n != node] if node in self._members else found

    def behind(self, nodes: Iterable[int], last: int) -> set[int]:
        """``nodes`` and all that depend on them, up to position ``last``."""
        found = set(nodes)
        work = list(found)
        while work:
            for n in self.readers(work.pop()):
                if n not in found and self._position[n] <= last:
                    found.add(n)
                    work.append(n)
        self.looks += len(found)
        return found

    def leads_to(self, node: int, other: int) -> bool:
        """Does ``other`` depend on ``node``?"""
        last = self._position[other]
        seen = {node}
        work = [node]
        while work:
            for n in self.readers(work.pop()):
                if n == other:
                    return True
                if n not in seen and self._position[n] < last:
                    seen.add(n)
                    work.append(n)
        return False

    def _before(self, nodes: Iterable[int], first: int) -> set[int]:
        """``nodes`` and all that they depend on, from position ``first`` on."""
        found = set(nodes)
        work = list(found)
        while work:
            for n in self.sources(work.pop()):
                if n not in found and self._position[n] >= first:
                    found.add(n)
                    work.append(n)
        return found

    def join(self, ops: Sequence[int]) -> None:
        """Make ``ops`` (with the groups that some of them are in) one node.

        Raises ``ValueError`` where another node would then have to stand both before and behind it.
        """
        nodes = {self._node[i] for i in ops}
        if len(nodes) > 1:
            places = [self._position[n] for n in nodes]
            after = self.behind(nodes, max(places)) - nodes
            before = self._before(nodes, min(places)) - nodes
            if after & before:
                raise ValueError("the groups wait for each other")
            slots = sorted(self._position[n] for n in (*before, *nodes, *after))
            for slot, n in zip(slots, sorted(before, key=self._position.__getitem__), strict=False):
                self._position[n] = slot
            place = slots[len(before)]
            last = slots[len(slots) - len(after) :]
            for slot, n in zip(last, sorted(after, key=self._position.__getitem__), strict=True):
                self._position[n] = slot
        else:
            place = self._position[next(iter(nodes))]
        members = tuple(sorted(i for n in nodes for i in self.members(n)))
        for n in nodes:
            self._members.pop(n, None)
        for i in members:
            self._node[i] = members[0]
        self._members[members[0]] = members
        self._position[members[0]] = place


def quotient_order(graph: Graph, groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The ops in a topological order in which every group stands as one node (other ops alone), earliest ops first.

    Raises ``ValueError`` where no such order exists (the groups wait for each other).
    """
    node_of = {i: k for k, group in enumerate(groups) for i in group}
    nodes: list[tuple[int, ...]] = [tuple(group) for group in groups]
    for i in range(len(graph.ops)):
        if i not in node_of:
            node_of[i] = len(nodes)
            nodes.append((i,))
    producers = graph.producers()
    needs: list[set[int]] = [set() for _ in nodes]
    for i, op in enumerate(graph.ops):
        made_by = {node_of[producers[v]] for v in op.inputs if v in producers}
        needs[node_of[i]] |= made_by - {node_of[i]}
    order = topological(needs, [node[0] for node in nodes])
    if len(order) != len(nodes):
        raise ValueError("the groups wait for each other")
    return [nodes[n] for n in order]

"""Factors of a Graph: the classes of dimensions that are divided together, which XLA's sharding propagation is told.

Comes in: a Graph. Goes out: for each operand and result the factors of its dimensions, major first, their sizes, and the factors
that are reduced away. A dimension of several factors was made of several dimensions by a reshape.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kitsune_jax.ops.graph import Graph
from kitsune_jax.ops.loops import body_of, parts
from kitsune_jax.ops.table import OPS
from kitsune_jax.sharding.moves import IN_ORDER
from kitsune_jax.sharding.moves import KINDS as MOVED

Factors = tuple[tuple[int, ...], ...]  # of each dimension of a value


@dataclasses.dataclass(frozen=True)
class ShardingRule:
    """``inputs``, ``outputs``: the factors of each operand and result. ``sizes``: of each factor. ``reduced``: factors that only
    operands have."""

    inputs: tuple[Factors, ...]
    outputs: tuple[Factors, ...]
    sizes: tuple[int, ...]
    reduced: tuple[int, ...]


def sharding_rule(graph: Graph) -> ShardingRule:
    """The factors of the operands and results of ``graph``.

    Two dimensions share a factor where some op gives index i of one to index i of the other, or moves elements along the dimension:
    a slice, padding, a concatenation, a reversal or a running sum keeps the axes that divide it. A factor that one array would have
    in two dimensions (scores between the rows of one array) is two factors.

    Rows keep the shards that they have: parameters that are stored in parts (fully sharded data parallelism) divide no array of
    rows, though their dimensions meet. So a factor of operands with rows is another one in parameters, and in results without rows
    that have it of parameters. A factor that of the operands only parameters have (a hidden layer's, in tensor parallelism), and
    those whose sharding a constraint asks for, also divides results with rows.

    An updated parameter is stored as the parameter, and not as others with which it shares a dimension: where each array without
    rows that has a factor is such a parameter or such a result, these have one for each parameter.
    """
    found = _DimensionSets(graph)
    leaves = {v: [found.leaves(v, d) for d in range(len(graph.values[v].shape))] for v in (*graph.inputs, *graph.outputs)}
    shared = found.shared([dim for dims in leaves.values() for dim in dims])
    rows = shared.get(found.rows(), found.rows())
    leaves = {v: _shared_once(dims, shared) for v, dims in leaves.items()}
    has_rows = {v: any(rows in dim for dim in dims) for v, dims in leaves.items()}
    wishes = {v for op in graph.ops if "parts" in dict(op.params) for v in op.inputs[1:]}
    of_rows = {leaf for v in graph.inputs if has_rows[v] and v not in wishes for dim in leaves[v] for leaf in dim}
    of_parameters = {leaf for v in graph.inputs if not has_rows[v] for dim in leaves[v] for leaf in dim}
    updated = _updated(graph, [v for v in (*graph.inputs, *graph.outputs) if not has_rows[v] and v not in wishes])
    elsewhere = {
        leaf for v in leaves if v not in updated for dim in leaves[v] for leaf in dim if leaf not in of_rows or v in wishes
    }
    elsewhere |= {leaf for v in graph.outputs if v not in updated for dim in leaves[v] for leaf in dim}
    number: dict[tuple[int, bool, int | None], int] = {}
    sizes: list[int] = []

    def factors(v: int) -> Factors:
        mine: list[tuple[int, ...]] = []
        taken = set[int]()
        for dim in leaves[v]:
            here = []
            for leaf in dim:
                alone = updated.get(v) if leaf not in elsewhere else None
                key = leaf, leaf in of_rows and (has_rows[v] or leaf not in of_parameters), alone
                k = number.get(key)
                if k is None or k in taken:
                    k = len(sizes)
                    sizes.append(found.size[leaf])
                    number.setdefault(key, k)
                taken.add(k)
                here.append(k)
            mine.append(tuple(here))
        return tuple(mine)

    inputs, outputs = (tuple(map(factors, ids)) for ids in (graph.inputs, graph.outputs))
    kept = {f for value in outputs for dim in value for f in dim}
    return ShardingRule(inputs, outputs, tuple(sizes), tuple(f for f in range(len(sizes)) if f not in kept))


def _updated(graph: Graph, parameters: Sequence[int]) -> dict[int, int]:
    """The operands and results among ``parameters`` that pointwise ops make of each other, each with one of those."""
    makers, parent = graph.producers(), dict[int, int]()

    def root(v: int) -> int:
        while v in parent:
            v = parent[v]
        return v

    found = set[int]()
    for result in graph.outputs:
        shape, seen, work = graph.values[result].shape, set[int](), [result]
        while work and result in parameters:
            v = work.pop()
            if v in seen or graph.values[v].shape != shape:
                continue
            seen.add(v)
            i = makers.get(v)
            if i is not None and graph.ops[i].body is None and OPS[graph.ops[i].kind].family in ("pointwise", "convert"):
                work += graph.ops[i].inputs
        for v in seen.intersection(graph.inputs, parameters) if shape else ():
            found |= {v, result}
            if root(v) != root(result):
                parent[root(v)] = root(result)
    return {v: root(v) for v in found}


def _shared_once(dims: Sequence[Sequence[int]], shared: Mapping[int, int]) -> list[list[int]]:
    """The leaves of an array with those whose factors they have; where two would have the same, the other one keeps its own."""
    mine = {leaf for dim in dims for leaf in dim}
    several = Counter(shared[leaf] for leaf in mine)
    return [[leaf if several[shared[leaf]] > 1 else shared[leaf] for leaf in dim] for dim in dims]


class _DimensionSets:
    """Leaves: parts of dimensions, each of which is joined with others of its size, or cut where a reshape cuts its dimension."""

    def __init__(self, graph: Graph):
        self.size: list[int] = []
        self._parent: dict[int, int] = {}
        self._cut: dict[int, tuple[int, int]] = {}
        self._first: dict[tuple[int, int], int] = {}
        # Dimensions of operands and of results along which elements are moved.
        self._moved: list[tuple[list[int], list[int]]] = []
        self._made: list[tuple[list[list[int]], int]] = []  # the dimensions and the size of each value that an op makes
        self._join_graph(graph, [self._values(graph, v) for v in range(len(graph.values))])

    def leaves(self, v: int, d: int) -> list[int]:
        """The leaves of dimension ``d`` of value ``v``, major first; none for a dimension of one element."""
        return self._resolve(self._first[v, d]) if (v, d) in self._first else []

    def shared(self, dims: Iterable[Sequence[int]]) -> dict[int, int]:
        """For each leaf of ``dims`` the one whose factor it has, a largest one. A dimension of several factors needs their sizes as
        they are, so it shares none with a dimension of another size."""
        dims, parent = list(dims), dict[int, int]()

        def root(leaf: int) -> int:
            while leaf in parent:
                leaf = parent[leaf]
            return leaf

        fixed = {leaf for dim in dims if len(dim) > 1 for leaf in dim}
        for one, other in self._moved:
            a, b = ([x for leaf in leaves for x in self._resolve(leaf)] for leaves in (one, other))
            if len(a) == len(b) == 1 and root(a[0]) != root(b[0]):
                parent[root(b[0])] = root(a[0])
        groups: dict[int, list[int]] = {}
        for leaf in sorted({leaf for dim in dims for leaf in dim}):
            groups.setdefault(root(leaf), []).append(leaf)
        found = dict[int, int]()
        for group in groups.values():
            alike = fixed.isdisjoint(group)
            for leaf in group:
                found[leaf] = max(group, key=lambda x: self.size[x]) if alike else leaf
        return found

    def rows(self) -> int:
        """The leaf that most of all computed elements run over: the rows of a batch, the edges of a graph; -1 if there is none."""
        elements: dict[int, int] = {}
        for dims, size in self._made:
            for leaf in {leaf for dim in dims for one in dim for leaf in self._resolve(one)}:
                elements[leaf] = elements.get(leaf, 0) + size
        return max(elements, key=lambda leaf: elements[leaf], default=-1)

    def _values(self, graph: Graph, v: int) -> list[list[int]]:
        made = []
        for d, n in enumerate(graph.values[v].shape):
            leaf = self._new(n)
            self._first[v, d] = leaf
            made.append([leaf] if n != 1 else [])
        return made

    def _new(self, size: int) -> int:
        self.size.append(size)
        return len(self.size) - 1

    def _root(self, leaf: int) -> int:
        while leaf in self._parent:
            leaf = self._parent[leaf]
        return leaf

    def _resolve(self, leaf: int) -> list[int]:
        root = self._root(leaf)
        if root in self._cut:
            return [x for part in self._cut[root] for x in self._resolve(part)]
        return [root] if self.size[root] != 1 else []

    def _join(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Join two lists of leaves of equal product, from the major ones on, as far as their sizes divide each other."""
        while True:
            a, b = ([x for leaf in leaves for x in self._resolve(leaf)] for leaves in (one, other))
            pair = next(((x, y) for x, y in zip(a, b, strict=False) if x != y), None)
            if pair is None:
                return
            x, y = pair
            if self.size[x] == self.size[y]:
                self._parent[y] = x
                continue
            small, large = (x, y) if self.size[x] < self.size[y] else (y, x)
            if not self.size[small] or self.size[large] % self.size[small]:
                return
            self._cut[large] = (self._new(self.size[small]), self._new(self.size[large] // self.size[small]))

    def _join_graph(self, graph: Graph, dims: list[list[list[int]]]) -> None:
        # What is made of nothing (the positions that a mask compares) is made in any part, and joins no dimensions.
        given = set(graph.inputs)
        for op in graph.ops:
            operands = (*op.inputs, *op.outputs)
            if given.isdisjoint(op.inputs):
                continue
            given.update(op.outputs)
            self._made += [(dims[v], graph.values[v].size) for v in op.outputs]
            if op.body is not None:
                body, p = body_of(op), parts(op)
                inside = [[self._inner(n) for n in value.shape] for value in body.values]
                self._join_graph(body, inside)
                same = [*zip(op.inputs, body.inputs, strict=True), *zip(op.outputs, body.outputs, strict=True)]
                for v, w in same:
                    time = len(dims[v]) - len(inside[w])
                    for d, leaves in enumerate(inside[w]):
                        self._join(dims[v][d + time], leaves)
                for v, w in zip(p.in_carries, p.in_next, strict=True):
                    for a, b in zip(inside[v], inside[w], strict=True):
                        self._join(a, b)
                continue
            if "parts" in dict(op.params):
                for one, other in zip(dims[op.inputs[0]], dims[op.inputs[1]], strict=True):
                    self._join(one, other)
            ins, outs = (tuple(graph.values[v].shape for v in ids) for ids in (op.inputs, op.outputs))
            for relation in OPS[op.kind].relate(op, ins, outs):
                if relation.role in ("parallel", "contracted") or (relation.role == "mixed" and OPS[op.kind].family in IN_ORDER):
                    members = [dims[operands[k]][d] for k, d in relation.members if operands[k] in given]
                    for other in members[1:]:
                        self._join(members[0], other)
                elif relation.role == "mixed" and op.kind in MOVED:
                    (to,) = (dims[v][d] for v, (k, d) in zip(op.outputs, relation.members[-1:], strict=True))
                    self._moved += [(dims[operands[k]][d], to) for k, d in relation.members[:-1] if operands[k] in given]
                elif relation.role == "reshaped":
                    both = ([leaf for k, d in relation.members if k == side for leaf in dims[operands[k]][d]] for side in (0, 1))
                    self._join(*both)

    def _inner(self, n: int) -> list[int]:
        return [self._new(n)] if n != 1 else []

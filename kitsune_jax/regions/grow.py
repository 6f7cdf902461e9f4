"""From a spread stream to convex regions, and the indexes of the graph that the search for regions uses.

Comes in: a Graph, and ``Spread`` objects (how a stream runs through its ops). Goes out: ``Region`` candidates. Invariants of every
region: it is convex (no path leaves it and comes back), connected through streamed values, every streamed output depends on the
whole stream space, and nothing in it is dead.

A **maker** is an op that makes a streamed value from none (a broadcast, an iota). Its result is never an output of a region: ops
outside that read it compute it again, which is cheaper than storing it. Ops of ``GraphIndex.recomputed`` are in every region that
needs their results, and these are no outputs either.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import TypeVar

from kitsune_jax.ops.graph import Graph, Op, reached
from kitsune_jax.ops.spec import COMPARISONS, HAND_ON, is_float
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import itemsize
from kitsune_jax.planning.streams import DimLabels, Region, Seed, Spread, StreamSpace, candidate_seeds, streamed_axes

# --- ops that several regions compute, each for itself, because that is cheaper than storing their results ------------------------

# Operations per element, counted from the table's rows: an exponential and some arithmetic take as long as moving eight bytes.
_MOST_FLOPS = 32.0
_VIEWS = frozenset({"broadcast", "reshape"})


def recomputed_ops(graph: Graph, live: Collection[int], consumers: dict[int, tuple[int, ...]]) -> frozenset[int]:
    """Ops that every region computes for itself: lookups of rows by indices, and cheap pointwise ops on these rows.

    The score of an edge, for example, is made of two rows of its nodes, and every level of a segment softmax reads it; a stored
    score would be written to fresh pages and read back. Everything such an op reads is in memory before the regions that compute it
    run, or is made by another such op; and no opaque op reads its result. ``live``: ops whose results are used.
    """
    if not any(OPS[op.kind].family in ("gather", "scatter") for op in graph.ops if op.kind != "opaque"):
        return frozenset()
    found = _reachable(graph, _indices(graph))
    results = set(graph.outputs)
    for i in reversed(range(len(graph.ops))):
        if i in found:
            readers = [c for v in graph.ops[i].outputs for c in consumers.get(v, ()) if c in live]
            seen = any(v in results for v in graph.ops[i].outputs) or any(graph.ops[c].kind == "opaque" for c in readers)
            if seen or not readers:
                found.discard(i)
    return frozenset(found)


def _indices(graph: Graph) -> set[int]:
    """Cheap pointwise ops on integers of the graph's inputs, whose results are indices of a lookup or a scatter."""
    producers = graph.producers()
    found: set[int] = set()

    def makers(values: Iterable[int]) -> set[int]:
        return {producers[v] for v in values if v in producers} - found

    def counts(i: int) -> bool:
        return _is_cheap(graph, i) and OPS[graph.ops[i].kind].flops <= 2

    for op in graph.ops:
        if op.kind != "opaque" and OPS[op.kind].family in ("gather", "scatter"):
            chain = reached(makers((op.inputs[1],)), lambda i: makers(graph.ops[i].inputs) if counts(i) else ())
            found.update(chain if all(map(counts, chain)) else ())
    return found


def _reachable(graph: Graph, indices: set[int]) -> set[int]:
    """``indices``, the lookups of rows by them or by inputs of the graph, and cheap ops on the rows."""
    made_by = {v: i for i, op in enumerate(graph.ops) for v in op.outputs}
    flops: dict[int, float] = dict.fromkeys(indices, 0.0)
    given = set(graph.inputs)
    for i, op in enumerate(graph.ops):
        if op.kind == "opaque" or i in flops:
            continue
        if OPS[op.kind].family == "gather":
            rows, table = graph.values[op.outputs[0]], graph.values[op.inputs[0]]
            by = op.inputs[1]
            if (by in given or made_by.get(by) in indices) and rows.size >= table.size:
                flops[i] = 0.0
            continue
        if not _is_cheap(graph, i):
            continue
        read = [made_by.get(v) for v in op.inputs if graph.values[v].literal is None]
        makes = all(p is not None and (p in flops or _fills_an_array(graph, p)) for p in read)
        if makes and any(p in flops and p not in indices for p in read):
            total = OPS[op.kind].flops + sum(flops.get(p, 0.0) for p in dict.fromkeys(read) if p is not None)
            if total <= _MOST_FLOPS:
                flops[i] = total
    return set(flops)


def _is_cheap(graph: Graph, i: int) -> bool:
    op = graph.ops[i]
    return op.kind != "opaque" and OPS[op.kind].family in {"pointwise", "convert", *_VIEWS}


def _fills_an_array(graph: Graph, i: int) -> bool:
    """Does op ``i`` make an array of a literal?"""
    op = graph.ops[i]
    return op.kind == "broadcast_in_dim" and graph.values[op.inputs[0]].literal is not None


# --- the index of a graph ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GraphIndex:
    """A graph with its ``producers`` and ``consumers``; ``results``: its outputs; ``live``: ops whose results are used, or that
    have effects (opaque ops are kept). ``recomputed``: ops that several regions may compute (``recomputed_ops``).
    """

    graph: Graph
    producers: dict[int, int]
    consumers: dict[int, tuple[int, ...]]
    live: frozenset[int]
    results: frozenset[int]
    recomputed: frozenset[int]

    @staticmethod
    def of(graph: Graph) -> GraphIndex:
        none = frozenset[int]()
        index = GraphIndex(graph, graph.producers(), graph.consumers(), none, frozenset(graph.outputs), none)
        kept = index.makers(graph.outputs).union(i for i, op in enumerate(graph.ops) if op.kind == "opaque")
        live = frozenset(reached(kept, lambda i: index.makers(graph.ops[i].inputs)))
        return dataclasses.replace(index, live=live, recomputed=recomputed_ops(graph, live, index.consumers))

    def makers(self, values: Iterable[int]) -> set[int]:
        """The ops that make ``values``."""
        return {self.producers[v] for v in values if v in self.producers}

    def readers(self, i: int) -> list[int]:
        """The ops that read the results of op ``i``, some perhaps several times."""
        return [c for v in self.graph.ops[i].outputs for c in self.consumers.get(v, ())]

    def bytes(self, v: int) -> int:
        value = self.graph.values[v]
        return value.size * itemsize(value.dtype)


def splits_layer(op: Op, scores: Container[int] = ()) -> bool:
    """Is ``op`` a sink that splits a layer, and no weight gradient? A gradient contracts the leading dimensions of both operands,
    and reads no attention ``scores``."""
    if op.kind != "dot_general":
        return False
    if any(v in scores for v in op.inputs):
        return True
    return any(sorted(c) != list(range(len(c))) for c in (op["lhs_contract"], op["rhs_contract"]))


def reduces_across(graph: Graph, region: Region) -> bool:
    """Does each row of ``region`` contract a column of an array that has more rows than columns, or reduce one, and read some?

    Rows of the region then lie side by side in each row of the array, of which a tile reads pieces: the mean of 131 101 x 256
    numbers took 23 ms over its columns and 5 over its rows. Columns that are computed, as those of a histogram, are no worse.
    """
    labels = region.label_of()

    def lies_across(v: int, whole: Sequence[int] | None = None) -> bool:
        """Has ``v`` streamed dimensions behind others, and more elements along these? ``whole``: only they count as others."""
        shape, of = graph.values[v].shape, labels.get(v, ())
        held = [d for d, axes in enumerate(of) if not axes and (whole is None or d in whole)]
        inner = [d for d, axes in enumerate(of) if axes and any(h < d for h in held)]
        outer = [h for h in held if any(h < d for d in inner)]
        return math.prod(shape[h] for h in outer) > math.prod(shape[d] for d in inner) > 1

    reads_pieces = any(map(lies_across, region.inputs))
    for i in set(region.ops).difference(region.sinks):
        op = graph.ops[i]
        if OPS[op.kind].family == "reduce" and reads_pieces and lies_across(op.inputs[0], op["axes"]):
            return True
        if op.kind == "dot_general" and not op["lhs_batch"]:
            contracted = zip(op.inputs, (op["lhs_contract"], op["rhs_contract"]), strict=True)
            if any(lies_across(v, dims) for v, dims in contracted):
                return True
    return False


# --- an order of ops in which every chosen call is one node -----------------------------------------------------------------------


class Order:
    """A topological order of nodes, updated as calls are chosen: no two groups depend on each other.

    ``node(i)``: the node of op ``i``: itself, or the first op of its group. ``position(node)`` grows along every path. Joining a
    group looks only at the graph between its first and its last op (the algorithm of Pearce and Kelly), so a network of equal
    layers costs in proportion to its length.
    """

    def __init__(self, index: GraphIndex, groups: Iterable[Sequence[int]] = ()):
        self.index = index
        self._node = list(range(len(index.graph.ops)))
        self._position = list(range(len(index.graph.ops)))
        self._members: dict[int, tuple[int, ...]] = {}
        self.looks = 0  # number of nodes looked at, for budgets
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
        """Nodes that read the results of ``node``, some perhaps several times."""
        ops, consumers, of = self.index.graph.ops, self.index.consumers, self._node
        found = [of[c] for i in self.members(node) for v in ops[i].outputs for c in consumers.get(v, ())]
        return [n for n in found if n != node] if node in self._members else found

    def sources(self, node: int) -> list[int]:
        """Nodes that ``node`` reads from, some perhaps several times."""
        ops, producers, of = self.index.graph.ops, self.index.producers, self._node
        found = [of[producers[v]] for i in self.members(node) for v in ops[i].inputs if v in producers]
        return [n for n in found if n != node] if node in self._members else found

    def behind(self, nodes: Iterable[int], last: int) -> set[int]:
        """``nodes`` and all nodes that depend on them, up to position ``last``."""
        found = reached(nodes, lambda node: (n for n in self.readers(node) if self._position[n] <= last))
        self.looks += len(found)
        return found

    def leads_to(self, node: int, other: int) -> bool:
        """Does ``other`` depend on ``node``?"""
        if self._position[node] >= self._position[other]:  # no path leads back
            self.looks += 1
            return node == other
        return other in self.behind((node,), self._position[other])

    def join(self, ops: Sequence[int]) -> None:
        """Make ``ops``, with the groups that some of them are in, one node.

        Raises ``ValueError`` if another node would then have to run both before and after it.
        """
        nodes = {self._node[i] for i in ops}
        if len(nodes) > 1:
            places = [self._position[n] for n in nodes]
            after = self.behind(nodes, max(places)) - nodes
            first = min(places)
            before = reached(nodes, lambda node: (n for n in self.sources(node) if self._position[n] >= first)) - nodes
            if after & before:
                raise ValueError("the groups depend on each other")
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


# --- from a spread stream to regions ----------------------------------------------------------------------------------------------

_SMALLER = 16  # an operand so many times smaller than the result is stored, not computed again


def anchored(graph: Graph, region: Region) -> tuple[int, ...]:
    """Ops of ``region`` that no other region computes: all but its makers and ``region.recomputed``."""
    labelled, again = {v for v, _ in region.labels}, set(region.recomputed)
    return tuple([i for i in region.ops if i not in again and not labelled.isdisjoint(graph.ops[i].inputs)])


def regions_of(index: GraphIndex, sp: Spread, order: Order | None = None) -> list[Region]:
    """The regions that ``sp`` allows, in topological order of their first ops.

    ``order``: that of the calls already chosen; each counts as one node, so that no two regions depend on each other.
    """
    return [region_of(index, sp, group) for group in groups_of(index, sp, order)]


def groups_of(index: GraphIndex, sp: Spread, order: Order | None) -> list[tuple[int, ...]]:
    """The ops of each of ``regions_of``."""
    members = [i for i in sp.ops if i in index.live and i not in index.recomputed]
    all_axes = frozenset(range(len(sp.space.sizes)))
    order = order or Order(index)
    dropped: set[int] = set()
    while True:
        kept = [i for i in members if i not in dropped]
        groups = [_add_recomputed(index, sp, group) for group in _connected(index, sp, _levels(index, sp, kept, order))]
        bad = {i for group in groups for i in _partial_outputs(index, sp, group, all_axes)}
        if not bad:
            return groups
        dropped |= bad


def _levels(index: GraphIndex, sp: Spread, members: list[int], order: Order) -> dict[int, int]:
    """op -> level, so that no path between two members of one level leaves the members or passes a sink.

    Every step from a member (makers apart) to an op outside, or from a sink to any op, goes up one level.
    """
    if not members:
        return {}
    inside, sinks = set(members), set(sp.sinks)
    makers = {i for i in members if _is_maker(index, sp, i)}
    # No path from behind the last member leads back to a member.
    last = max(order.position(order.node(i)) for i in members)
    level = levels_up_to(order, last, inside, makers, sinks)
    if any(level[i] for i in members):
        last = max([last, *(order.position(order.node(c)) for i in members for c in index.readers(i))])
        level = levels_up_to(order, last, inside, makers, sinks)
        _raise_levels(index, members, makers, sinks, level)
    return {i: level[i] for i in members}


def levels_up_to(order: Order, last: int, inside: set[int], makers: set[int], sinks: set[int]) -> dict[int, int]:
    """The level of each op that depends on a member (``inside``), up to position ``last`` of the order."""
    graph, producers = order.index.graph, order.index.producers
    level: dict[int, int] = {}
    for node in sorted(order.behind((order.node(i) for i in inside), last), key=order.position):
        lv = 0
        for i in order.members(node):
            for v in graph.ops[i].inputs:
                p = producers.get(v)
                if p in level and order.node(p) != node:
                    leaves = p in inside and p not in makers and (i not in inside or p in sinks)
                    lv = max(lv, level[p] + leaves)
        level.update(dict.fromkeys(order.members(node), lv))
    return level


def _raise_levels(index: GraphIndex, members: list[int], makers: set[int], sinks: set[int], level: dict[int, int]) -> None:
    """Lift ops to the level of their readers, unless a value of a lower level would have to be stored for them.

    Makers are lifted, and ops on makers and values from outside: momentum times its decay belongs to the update, which waits for
    the gradient.
    """
    inside = set(members)
    lifted = {i for i in members if i not in sinks}

    def latest(i: int) -> int:
        readers = index.readers(i)
        if i in makers:
            readers = [c for c in readers if c in inside]
        return max(level[i], min((new[c] - (c not in inside) for c in readers), default=level[i]))

    while True:
        new = dict(level)
        for i in reversed(members):
            if i in lifted:
                new[i] = latest(i)
        moved = {i for i in lifted - makers if new[i] > level[i]}
        stuck = {i for i in moved if _stored_for(index, inside - makers, i, new, moved)}
        if not stuck:
            break
        lifted -= stuck
    level.update(new)


def _stored_for(index: GraphIndex, inside: set[int], i: int, level: dict[int, int], moved: set[int]) -> bool:
    """Would ``i`` read a value of a lower level that only lifted ops read? Statistics of a row, from which much larger rows are
    made, are stored all the same."""
    values, op = index.graph.values, index.graph.ops[i]
    for v in op.inputs:
        p = index.producers.get(v)
        if p in inside and level[p] < level[i] and values[v].size * _SMALLER > values[op.outputs[0]].size:
            others = (c for c in index.consumers[v] if c not in moved)
            if v not in index.results and not any(level.get(c, level[i]) > level[p] for c in others):
                return True
    return False


def _connected(index: GraphIndex, sp: Spread, level: dict[int, int]) -> list[tuple[int, ...]]:
    """Groups of ops of one level that share a streamed value."""
    parent = {i: i for i in level}

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    touching: dict[tuple[int, int], int] = {}
    for i in sorted(level):
        op = index.graph.ops[i]
        for v in (*op.inputs, *op.outputs):
            if v in sp.labels:
                first = touching.setdefault((v, level[i]), i)
                parent[find(i)] = find(first)
    groups: dict[int, list[int]] = {}
    for i in sorted(level):
        groups.setdefault(find(i), []).append(i)
    return [tuple(g) for g in sorted(groups.values())]


def _add_recomputed(index: GraphIndex, sp: Spread, group: tuple[int, ...]) -> tuple[int, ...]:
    """``group`` and the ops of the spread that several regions compute and that ``group`` needs."""
    if not index.recomputed:
        return group
    streaming = index.recomputed.intersection(sp.ops)
    return tuple(sorted(reached(group, lambda i: streaming & index.makers(index.graph.ops[i].inputs))))


def needed(index: GraphIndex, sp: Spread, ops: Collection[int]) -> tuple[int, ...]:
    """Those of ``ops`` whose results are read, and the ops that several regions compute and that they need."""
    kept = {i for i in ops if i not in index.recomputed}
    for i in sorted(kept, reverse=True):
        if _is_maker(index, sp, i) and kept.isdisjoint(index.readers(i)):
            kept.discard(i)
    return _add_recomputed(index, sp, tuple(sorted(kept)))


def _outputs(index: GraphIndex, sp: Spread, group: tuple[int, ...]) -> list[int]:
    """The values of ``group`` that are used outside."""
    inside, live = set(group), index.live
    made = (v for i in group if i not in index.recomputed and not _is_maker(index, sp, i) for v in index.graph.ops[i].outputs)
    return [v for v in made if v in index.results or not inside.issuperset(live.intersection(index.consumers.get(v, ())))]


def _is_maker(index: GraphIndex, sp: Spread, i: int) -> bool:
    """Does op ``i`` make a streamed value from none (a broadcast, an iota)? That is cheap to compute again outside."""
    return not any(v in sp.labels for v in index.graph.ops[i].inputs)


def _partial_outputs(index: GraphIndex, sp: Spread, group: tuple[int, ...], all_axes: frozenset[int]) -> set[int]:
    """Ops whose streamed output is needed outside but cannot be stored, because it does not depend on every axis."""
    partial = (v for v in _outputs(index, sp, group) if v in sp.labels and streamed_axes(sp.labels[v]) != all_axes)
    return index.makers(partial).difference(sp.sinks)  # a sink has one sum for each batch


def region_of(index: GraphIndex, sp: Spread, group: tuple[int, ...]) -> Region:
    """The region of a group of ``groups_of``."""
    return Region.of(index.graph, sp.space, group, sp.labels, _outputs(index, sp, group), sp.sinks, index.recomputed)


# --- compared values: both computed in regions, or both by XLA --------------------------------------------------------------------

_EXTREMES = frozenset({"reduce_max", "reduce_min", "scatter_max", "scatter_min", "cummax", "cummin"})
S = TypeVar("S")
_THROUGH = frozenset({"pointwise", "convert", "gather"})


def choose_with_compared_values_computed_once(
    index: GraphIndex, choose: Callable[[GraphIndex], S], ops_of: Callable[[S], Collection[int]]
) -> S:
    """``choose(index)``, such that no compared value is computed both in regions and by XLA.

    The gradient of a maximum goes to the elements that equal it. Our exponential and XLA's differ in the last bit, and XLA
    contracts a multiplication and an addition: an element computed again might equal nothing. So if XLA takes the maximum of values
    that a region would compute again to compare them, the region reads XLA's. Values that only regions compute have the same bits
    in all of them (``program.passes.compared_values``).
    """
    while True:
        found = choose(index)
        twice = _computed_twice(index, ops_of(found))
        if not twice:
            return found
        index = dataclasses.replace(index, recomputed=index.recomputed - twice)


def _computed_twice(index: GraphIndex, inside: Collection[int]) -> frozenset[int]:
    """The ops of ``recomputed`` that both regions (of the ops ``inside``) and XLA would compute, on the way to a comparison."""
    by_xla = set(index.live.difference(inside))
    both = set[int]()
    for i in sorted(index.recomputed.intersection(inside), reverse=True):  # readers of a value come behind its maker
        if not by_xla.isdisjoint(index.readers(i)):
            by_xla.add(i)
            both.add(i)
    if all(_is_exact(index.graph.ops[i]) for i in both):
        return frozenset()
    ways = compared_floats(index.graph)
    both = {i for i in both if not ways.isdisjoint(index.graph.ops[i].outputs) and OPS[index.graph.ops[i].kind].family != "gather"}
    return frozenset() if all(_is_exact(index.graph.ops[i]) for i in both) else frozenset(both)


def _is_exact(op: Op) -> bool:
    """Does ``op`` give the same bits wherever it is computed?"""
    return op.kind in HAND_ON or op.kind in COMPARISONS or OPS[op.kind].moves or OPS[op.kind].family == "gather"


def compared_floats(graph: Graph) -> frozenset[int]:
    """The floats from which comparisons of two values are computed, through pointwise ops, maxima, and ops that only move
    elements."""
    literal = {v for v, value in enumerate(graph.values) if value.literal is not None}
    for op in graph.ops:
        if op.kind != "opaque" and OPS[op.kind].moves and op.inputs and literal.issuperset(op.inputs):
            literal.update(op.outputs)
    pairs = (op.inputs for op in graph.ops if op.kind in COMPARISONS and literal.isdisjoint(op.inputs))
    return _float_sources(graph, (v for x, y in pairs if x != y for v in (x, y)))


def compared_extremes(graph: Graph) -> frozenset[int]:
    """Those of ``compared_floats`` whose maximum or minimum over some elements is taken."""
    folded = (v for op in graph.ops if op.kind in _EXTREMES for v in op.inputs)
    return compared_floats(graph) & _float_sources(graph, folded)


def _float_sources(graph: Graph, values: Iterable[int]) -> frozenset[int]:
    """``values`` and the floats from which they are computed, through ops that keep the floats' identity or fold them."""
    producers, seen, pending = graph.producers(), set[int](), list(values)
    while pending:
        v = pending.pop()
        if v in seen or not is_float(graph.values[v].dtype):
            continue
        seen.add(v)
        op = graph.ops[producers[v]] if v in producers else None
        if op is not None and op.kind != "opaque":
            spec = OPS[op.kind]
            if spec.moves or spec.family in _THROUGH or op.kind in _EXTREMES:
                pending += op.inputs
    return frozenset(seen)


# --- updates of arrays in memory --------------------------------------------------------------------------------------------------

WHY = "this updates a small part of an array in memory: XLA does that in place, and a pipeline would copy the array"
# A sum by index is folded in place only into an array that is more than so many times larger: else no small part of it changes.
LARGER = 4


def updated_in_place(graph: Graph) -> dict[int, str]:
    """op -> ``WHY``, for updates that no region takes.

    An update of values that other ops compute may stream with them. An update of an argument, or of the result of a loop or an
    opaque op, touches only the updated part. So does a sum by index that is added to such an array, which XLA folds into it: the
    gradient by an array of which each step of a loop takes a slice.
    """
    producers, readers = graph.producers(), graph.consumers()
    found = {}

    def in_memory(v: int) -> bool:
        made_by = producers.get(v)
        return made_by is None or made_by in found or graph.ops[made_by].kind == "opaque" or graph.ops[made_by].body is not None

    for i, op in enumerate(graph.ops):
        if op.kind == "dynamic_update_slice" and in_memory(op.inputs[0]):
            found[i] = WHY
        if op.kind != "add":
            continue
        for sums, x in (op.inputs, op.inputs[::-1]):
            made_by = producers.get(sums)
            folds = made_by is not None and graph.ops[made_by].kind == "scatter_sum" and readers.get(sums) == (i,)
            if made_by is None or not folds or sums in graph.outputs or graph.values[x].literal is not None or not in_memory(x):
                continue
            if graph.values[x].size > LARGER * graph.values[graph.ops[made_by].inputs[0]].size:
                found[i] = found[made_by] = WHY
                break
    return found


# --- a cache of spread streams ----------------------------------------------------------------------------------------------------

# No region starts from these ops: they only move data, or make it.
NEVER_SEEDS = frozenset({"opaque", "broadcast_in_dim", "iota", "reshape", "transpose", "copy", "convert_element_type", "slice"})
# Op visits allowed while spreads are made: at least this many, and so many per op. An MLP takes 4 to 8 per op; 15 message-passing
# steps with a region or two each would take 37, and give the same regions with 10.
_LEAST_LOOKS, _LOOKS = 10_000, 10


def seed_order(graph: Graph, ops: Collection[int]) -> list[int]:
    """Those of ``ops`` that a region may start from: products first, and in each kind those with the most work."""

    def work(i: int) -> tuple[int, float]:
        op = graph.ops[i]
        out = math.prod(graph.values[op.outputs[0]].shape)
        if op.kind == "dot_general":
            shape = graph.values[op.inputs[0]].shape
            return (1, 2.0 * out * math.prod(shape[d] for d in op["lhs_contract"]))
        return (0, float(out))

    return sorted((i for i in ops if graph.ops[i].kind not in NEVER_SEEDS), key=lambda i: (*(-w for w in work(i)), i))


SpreadFrom = Callable[[Seed, Container[int], Mapping[int, str]], Spread]  # of (seed, allowed ops, barred ops)


@dataclasses.dataclass(eq=False)
class CachedSpread:
    """A spread and the groups of its ops. ``group_of``: op -> its number among ``groups``; ``chosen``: the number of calls chosen
    when it was made; ``apart``: as its seed has it."""

    spread: Spread
    groups: list[tuple[int, ...]]
    group_of: dict[int, int]
    chosen: int
    apart: bool
    regions: dict[int, Region] = dataclasses.field(default_factory=dict)


class SpreadCache:
    """A cache of spreads, for seeds that are asked for one after the other while regions are chosen.

    ``spread`` makes a spread of ops that no region has (``free``). ``few``: see ``candidate_seeds``. A region that is
    handed out is legal beside all calls chosen so far. A seed that lies in a known spread, with the dimensions that stream there,
    would lead to the same spread, which is used again until a region is chosen. A budget of op visits keeps the work linear in the
    length of the network: when it is spent, spreads are used even then, only their groups are made anew, and only the most
    promising stream through an op is tried.
    """

    def __init__(
        self, index: GraphIndex, order: Order, free: Collection[int], spread: SpreadFrom, few: bool, scores: Container[int]
    ):
        self.index, self.order, self.free, self._spread, self._few, self._scores = index, order, free, spread, few, scores
        self._budget = max(_LEAST_LOOKS, _LOOKS * len(index.graph.ops))
        self._chosen = 0
        self._kept: list[CachedSpread] = []

    def seeds(self, op: int) -> list[Seed]:
        """The ``candidate_seeds`` of ``op`` that the budget allows: at least the first with batch axes and the first without. Seeds
        that keep ``scores`` apart count as those with batch axes."""
        seeds = candidate_seeds(self.index.graph, op, self.index.producers if self._few else None, self._scores)
        if self._budget > 0:
            return seeds
        return [s for s in seeds if s.batch or s.apart][:1] + [s for s in seeds if not (s.batch or s.apart)][:1]

    def choose(self) -> None:
        """Note that a call was chosen, which has changed ``order`` and ``free``."""
        self._chosen += 1
        if self._budget > 0:
            self._kept.clear()

    def at(self, seed: Seed) -> tuple[CachedSpread, bool]:
        """The spread from ``seed``, and whether it was made just now."""
        space, labels = seed.start(self.index.graph)
        for kept in reversed(self._kept):
            if kept.spread.labels.get(seed.value) == labels and kept.spread.space == space and kept.apart == seed.apart:
                return kept, False
        looks = self.order.looks
        made = self._spread(seed, self.free, self._barred(seed, space, labels))
        groups = groups_of(self.index, made, self.order)
        kept = CachedSpread(made, groups, {i: k for k, group in enumerate(groups) for i in group}, self._chosen, seed.apart)
        self._budget -= made.looks + self.order.looks - looks
        self._kept.append(kept)
        return kept, True

    def _barred(self, seed: Seed, space: StreamSpace, labels: DimLabels) -> Mapping[int, str]:
        """The ops that a stream from ``seed`` would be kept out of, as far as known spreads show it."""
        for kept in reversed(self._kept):
            if kept.chosen == self._chosen and kept.spread.space == space and kept.apart == seed.apart:
                for reached, barred in reversed(kept.spread.rounds):
                    if reached.get(seed.value) == labels:
                        return barred
        return {}

    def region_with(self, kept: CachedSpread, op: int) -> Region | None:
        """The region of a spread that contains ``op``, if any."""
        k = kept.group_of.get(op)
        if k is None:
            return None
        if kept.chosen != self._chosen:
            return self._anew(kept, k, op)
        if k not in kept.regions:
            kept.regions[k] = region_of(self.index, kept.spread, kept.groups[k])
        return kept.regions[k]

    def _anew(self, kept: CachedSpread, k: int, op: int) -> Region | None:
        """The region of ``op`` among the ops of a group that later calls have not taken."""
        ops = tuple(i for i in kept.groups[k] if i in self.free)
        left = Region.of(self.index.graph, kept.spread.space, ops, kept.spread.labels, (), kept.spread.sinks)
        part = Spread(left.space, left.label_of(), ops, left.sinks, {})
        found = next((group for group in groups_of(self.index, part, self.order) if op in group), None)
        return None if found is None else region_of(self.index, part, found)

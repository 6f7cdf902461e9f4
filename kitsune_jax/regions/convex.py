"""From a spread stream to convex regions.

Comes in: a Graph and a ``Spread``. Goes out: ``Region`` candidates. Invariants of every region: convex (no path leaves it and comes
back), connected through streamed values, every streamed output depends on the whole stream space, nothing in it is dead.

A **maker** is an op that makes a streamed value from none (a broadcast, an iota). The result of a maker is never an output of a
region: ops outside that read it compute it again, which is cheaper than storing it. Ops that several regions compute
(``regions.again``) are in every region that needs their results, and these are no outputs either.
"""

from __future__ import annotations

from collections.abc import Collection

from kitsune_jax.graph import Graph
from kitsune_jax.regions.graph_index import GraphIndex
from kitsune_jax.regions.order import Order
from kitsune_jax.streams import Region, Spread
from kitsune_jax.streams.space import streamed_axes

_SMALLER = 16  # times smaller than what is made of it


def anchored(graph: Graph, region: Region) -> tuple[int, ...]:
    """Ops that run where the region stands, and nowhere else: not its makers, nor what others compute as well."""
    labels, again = region.label_of(), set(region.again)
    return tuple(i for i in region.ops if i not in again and any(v in labels for v in graph.ops[i].inputs))


def regions_of(index: GraphIndex, sp: Spread, order: Order | None = None) -> list[Region]:
    """The regions that ``sp`` allows, in topological order of their first ops.

    ``order``: that of the calls already chosen; each counts as one node, so that no two regions wait for each other.
    """
    return [region_of(index, sp, group) for group in groups_of(index, sp, order)]


def groups_of(index: GraphIndex, sp: Spread, order: Order | None) -> list[tuple[int, ...]]:
    """The ops of each of ``regions_of``."""
    members = [i for i in sp.ops if i in index.live and i not in index.again]
    all_axes = frozenset(range(len(sp.space.sizes)))
    order = order or Order(index)
    dropped: set[int] = set()
    while True:
        kept = [i for i in members if i not in dropped]
        groups = [_with_again(index, sp, group) for group in _connected(index, sp, _levels(index, sp, kept, order))]
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
    # Behind the last member no path leads back to one.
    last = max(order.position(order.node(i)) for i in members)
    level = _up_to(order, last, inside, makers, sinks)
    if any(level[i] for i in members):
        readers = (c for i in members for v in index.graph.ops[i].outputs for c in index.consumers.get(v, ()))
        last = max([last, *(order.position(order.node(c)) for c in readers)])
        level = _up_to(order, last, inside, makers, sinks)
        _raise(index, members, makers, sinks, level)
    return {i: level[i] for i in members}


def _up_to(order: Order, last: int, inside: set[int], makers: set[int], sinks: set[int]) -> dict[int, int]:
    """The levels of all ops that depend on members (``inside``) and stand no further back than ``last``."""
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


def _raise(index: GraphIndex, members: list[int], makers: set[int], sinks: set[int], level: dict[int, int]) -> None:
    """Lift ops to the level of their readers, unless a value of a lower level would have to be stored for them.

    That is so for makers, and for what is made of them and of values from outside: momentum times its decay belongs to the update,
    which waits for the gradient.
    """
    inside = set(members)
    lifted = {i for i in members if i not in sinks}

    def latest(i: int) -> int:
        readers = [c for v in index.graph.ops[i].outputs for c in index.consumers.get(v, ())]
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
    """Would ``i`` read what a lower level makes, and nobody but ops that were lifted as well? A row's statistics, of which it makes
    much larger rows, are stored."""
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


def _with_again(index: GraphIndex, sp: Spread, group: tuple[int, ...]) -> tuple[int, ...]:
    """``group`` and those ops of the spread that several regions compute and that it needs."""
    if not index.again:
        return group
    ops, work = set(group), list(group)
    streaming = index.again.intersection(sp.ops)
    while work:
        for v in index.graph.ops[work.pop()].inputs:
            p = index.producers.get(v)
            if p in streaming and p not in ops:
                ops.add(p)
                work.append(p)
    return tuple(sorted(ops))


def needed(index: GraphIndex, sp: Spread, ops: Collection[int]) -> tuple[int, ...]:
    """Those of ``ops`` that make something which is read, and the ops that several regions compute and that they need."""
    kept = {i for i in ops if i not in index.again}
    for i in sorted(kept, reverse=True):
        reads = (c for v in index.graph.ops[i].outputs for c in index.consumers.get(v, ()))
        if _is_maker(index, sp, i) and not any(c in kept for c in reads):
            kept.discard(i)
    return _with_again(index, sp, tuple(sorted(kept)))


def _border(index: GraphIndex, sp: Spread, group: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(values read from outside, values used outside), each in order of first appearance."""
    inside = set(group)
    ins: dict[int, None] = {}
    outs: dict[int, None] = {}
    for i in group:
        op = index.graph.ops[i]
        for v in op.inputs:
            if index.producers.get(v) not in inside and index.graph.values[v].literal is None:
                ins[v] = None
        for v in op.outputs:
            if i in index.again or _is_maker(index, sp, i):
                continue
            if v in index.results or any(c not in inside and c in index.live for c in index.consumers.get(v, ())):
                outs[v] = None
    return tuple(ins), tuple(outs)


def _is_maker(index: GraphIndex, sp: Spread, i: int) -> bool:
    """The op makes a streamed value from none (a broadcast, an iota): cheap to make again outside."""
    return not any(v in sp.labels for v in index.graph.ops[i].inputs)


def _partial_outputs(index: GraphIndex, sp: Spread, group: tuple[int, ...], all_axes: frozenset[int]) -> set[int]:
    """Ops whose streamed output is needed outside but can't be stored: it does not depend on every axis."""
    _, outs = _border(index, sp, group)
    partial = {index.producers[v] for v in outs if v in sp.labels and streamed_axes(sp.labels[v]) != all_axes}
    return partial.difference(sp.sinks)  # a sink has one sum for each batch


def region_of(index: GraphIndex, sp: Spread, group: tuple[int, ...]) -> Region:
    """The region of a group of ``groups_of``."""
    ins, outs = _border(index, sp, group)
    inside = set(group)
    touched = {v for i in group for v in (*index.graph.ops[i].inputs, *index.graph.ops[i].outputs)}
    return Region(
        space=sp.space,
        ops=group,
        labels=tuple((v, sp.labels[v]) for v in sorted(touched) if v in sp.labels),
        inputs=ins,
        outputs=outs,
        sinks=tuple(i for i in sp.sinks if i in inside),
        again=tuple(i for i in group if i in index.again),
    )

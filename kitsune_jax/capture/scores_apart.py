"""Scores of an attention that are summed over their rows and over their columns, made once for each.

Comes in: a ``Captured``, for a target without code for sums over the rows of each batch. Goes out: the same, where what sums over
the one dimension reads scores of its own, made of the same queries, keys and statistics. So a gradient by the queries streams over
the queries and folds the keys, and gradients by keys and values stream over the keys and fold the queries: two regions, of which
none adds to sums that another tile adds to as well. What is left to XLA it makes once: its compiler finds that both are the same.

Scores are products whose result is much larger than its operands, as in ``repeated_scores``; no operator is recognised as
attention. Invariants: the copies are equal to what they replace, and what is small (the statistics of a row) is made once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from kitsune_jax.capture.captured import Captured, Draft, Step
from kitsune_jax.capture.repeated_scores import LARGER, made_of
from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.scores import asks_for_equals, is_cheap, scores_of
from kitsune_jax.ops.table import OPS

MOVES = frozenset({"broadcast", "reshape", "transpose", "iota"})
_FOLDS = frozenset({"dot", "reduce"})


def part_scores(captured: Captured) -> Captured:
    """``captured`` with a copy of the scores for each set of dimensions that they are summed over, but one."""
    graph = captured.graph
    scores = scores_of(graph)
    parted = _divided(graph, scores) if scores else []
    return _with_copies(captured, scores, parted) if parted else captured


class _Union:
    """Sets that are joined. Every key is in one, at first by itself."""

    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}

    def root(self, key: Hashable) -> Hashable:
        path = [key]
        while (above := self.parent.get(path[-1])) is not None:
            path.append(above)
        self.parent.update(dict.fromkeys(path[:-1], path[-1]))
        return path[-1]

    def join(self, keys: list[Hashable]) -> None:
        for a, b in zip(keys, keys[1:], strict=False):
            if (root := self.root(a)) != self.root(b):
                self.parent[root] = self.root(b)


def _divided(graph: Graph, scores: frozenset[int]) -> list[list[int]]:
    """The ops that sum over dimensions of ``scores``, those that sum over the same ones together. Of each set of scores that are
    computed of each other, the ops that keep theirs are left out."""
    joined = _Union()  # values, and (value, dimension) pairs
    folded: dict[int, list[Hashable]] = {}  # op -> the dimensions that it sums over
    for i, op in enumerate(graph.ops):
        touched: list[Hashable] = [v for v in (*op.inputs, *op.outputs) if v in scores]
        folds = op.kind != "opaque" and OPS[op.kind].family in _FOLDS and scores.isdisjoint(op.outputs)
        if not touched or not (folds or is_cheap(op)):
            continue
        joined.join(touched)
        shapes = [[graph.values[v].shape for v in side] for side in (op.inputs, op.outputs)]
        for r in OPS[op.kind].relate(op, tuple(shapes[0]), tuple(shapes[1])):
            operands = (*op.inputs, *op.outputs)
            places: list[Hashable] = [
                (operands[k], d) for k, d in r.members if operands[k] in scores and graph.values[operands[k]].shape[d] > 1
            ]
            if r.role == "contracted" and folds:
                folded.setdefault(i, []).extend(places)
            elif r.role == "parallel":
                joined.join(places)
    folded = {i: places for i, places in folded.items() if places}
    for places in folded.values():
        joined.join(places)
    groups: dict[Hashable, dict[Hashable, list[int]]] = {}
    for i, places in folded.items():
        of = next(joined.root(v) for v in graph.ops[i].inputs if v in scores)
        groups.setdefault(of, {}).setdefault(joined.root(places[0]), []).append(i)
    found: list[list[int]] = []
    for group in groups.values():
        # The statistics of a row are made of the scores that stay.
        kept = min(group.values(), key=lambda ends: (all(graph.ops[i].kind == "dot_general" for i in ends), ends))
        found += [ends for ends in group.values() if ends is not kept]
    return found


def _with_copies(captured: Captured, scores: frozenset[int], parted: list[list[int]]) -> Captured:
    """``captured``, where the ops of each list read scores of their own."""
    graph, draft = captured.graph, Draft(captured)
    # Masks of indices and single numbers (the place of a piece of a text) are cheap to make again, and as large as the scores.
    producers, counted = graph.producers(), made_of(graph, lambda v: graph.values[v].shape == ())
    before: dict[int, list[tuple[Op, Step]]] = {}  # op -> the copies that stand in front of it

    def is_copied(v: int, size: int) -> bool:
        op = graph.ops[producers[v]] if v in producers else None
        if op is None or op.kind == "opaque" or graph.values[v].literal is not None or graph.values[v].shape == ():
            return False
        if asks_for_equals(graph, producers, op):  # of copies, whose sums may have another order
            return False
        cheap = is_cheap(op) and (v in counted or graph.values[v].size * LARGER > size)
        return v in scores or cheap or OPS[op.kind].family in MOVES  # what only moves elements is no array of its own

    for ends in parted:
        copies: dict[int, int] = {}
        for i in ends:
            size = max(graph.values[v].size for v in graph.ops[i].inputs if v in scores)
            work = list(graph.ops[i].inputs)
            while work:  # not by recursion: a chain may be longer than Python's stack
                v = work[-1]
                op = graph.ops[producers[v]] if is_copied(v, size) else None
                missing = [w for w in op.inputs if w not in copies] if op is not None and v not in copies else []
                if missing:
                    work += missing
                    continue
                work.pop()
                if v in copies:
                    continue
                copies[v] = v if op is None else draft.value(v, graph.values[v].shape)
                if op is not None:
                    new = dataclasses.replace(op, inputs=tuple(copies[w] for w in op.inputs), outputs=(copies[v],))
                    before.setdefault(i, []).append((new, captured.steps[producers[v]]))
            draft.ops[i] = dataclasses.replace(draft.ops[i], inputs=tuple(copies[v] for v in graph.ops[i].inputs))
    return draft.finish(before)

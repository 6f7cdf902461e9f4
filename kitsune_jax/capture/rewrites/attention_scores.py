"""Rewrites of attention scores, which are much larger than the operands of the product that makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

from kitsune_jax.capture.edit import Captured, Draft, Step, with_params
from kitsune_jax.ops.graph import Graph, Op, Value
from kitsune_jax.ops.spec import is_float
from kitsune_jax.ops.table import CHEAP, OPS, asks_for_equals, grows, is_cheap, scores_of

# ----------------------------------------------------------------------------------------------------------------------------------
# Scores of an attention that a backward pass in the same graph reads, made again there.
#
# Comes in: a ``Captured``. Goes out: the same where what stands behind the attention's result (its loss, and the backward pass
# that starts from it) reads scores, weights and masks of its own, made of the queries, the keys and each row's statistics as the
# first ones are. A region of the forward pass and one of the backward pass then hand arrays of queries or of keys to each other,
# and none of queries by keys. What is left to XLA it makes once: its compiler finds that both are the same.
#
# Scores are products whose result is much larger than its operands; no operator is recognised as attention. Invariants: the
# copies are equal to what they replace, bit for bit where one program makes both. So which scores equal their maximum is no copy.
# ----------------------------------------------------------------------------------------------------------------------------------

LARGER = 4  # times the statistics the scores must be


def repeat_scores(captured: Captured) -> Captured:
    """``captured`` with the scores of attentions made again behind their results."""
    graph = captured.graph
    roots = [i for i, op in enumerate(graph.ops) if op.kind == "dot_general" and grows(graph, op)]
    if not roots:
        return captured
    rewriter = _Rewriter(captured)
    for i in roots:
        rewriter.repeat(i)
    return rewriter.finish()


def made_of(graph: Graph, given: Callable[[int], bool]) -> set[int]:
    """The values that cheap ops make of constants, of indices and of those that are ``given``."""
    found = {v for v, value in enumerate(graph.values) if value.literal is not None or given(v)}
    for op in graph.ops:
        if op.kind != "opaque" and OPS[op.kind].family in CHEAP and found.issuperset(op.inputs):
            found.update(op.outputs)
    return found


class _Rewriter:
    def __init__(self, captured: Captured):
        self.captured, self.graph, self.draft = captured, captured.graph, Draft(captured)
        self.producers, self.consumers = self.graph.producers(), self.graph.consumers()
        self.before: dict[int, list[tuple[Op, Step]]] = {}  # op -> the copies that stand in front of it
        self.copied = False
        self.counted = made_of(self.graph, lambda v: False)
        self.small: dict[int, set[int]] = {}

    def finish(self) -> Captured:
        if not self.copied:
            return self.captured
        return self.draft.finish(self.before)

    def repeat(self, root: int) -> None:
        """Give what stands behind the first product with the weights that are made of product ``root`` copies of those."""
        made = self._weights(root)
        products = [c for v in made for c in self.consumers.get(v, ()) if self.graph.ops[c].kind == "dot_general"]
        if not products:
            return
        behind = self._behind(min(products))
        copies: dict[int, int] = {}
        size = self.graph.values[self.graph.ops[root].outputs[0]].size
        for i in sorted(c for v in made for c in self.consumers.get(v, ()) if c in behind):
            self._rewire(i, behind, size, made, copies)
        # Masks as well: a gradient reads the one that hid the scores.
        masks = {v for w in made for v in self.graph.ops[self.producers[w]].inputs if self._is_mask(v, made)}
        for i in sorted({c for v in masks for c in self.consumers.get(v, ()) if c in behind}):
            self._rewire(i, behind, size, masks, copies)

    def _weights(self, root: int) -> set[int]:
        """Values of the scores' size that are made of them, of masks and of what is small, element by element."""
        (scores,) = self.graph.ops[root].outputs
        size, made, work = self.graph.values[scores].size, {scores}, [scores]
        while work:
            for i in self.consumers.get(work.pop(), ()):
                op = self.graph.ops[i]
                if op.kind == "opaque" or OPS[op.kind].family not in CHEAP or op.outputs[0] in made:
                    continue
                if self.graph.values[op.outputs[0]].size == size and all(v in made or self._is_small(v, size) for v in op.inputs):
                    made.add(op.outputs[0])
                    work.append(op.outputs[0])
        return made

    def _is_small(self, v: int, size: int) -> bool:
        """Is ``v`` much smaller than the scores, or made of such values and of indices?"""
        if size not in self.small:
            self.small[size] = made_of(self.graph, lambda v: self.graph.values[v].size * LARGER <= size)
        return v in self.small[size]

    def _is_mask(self, v: int, made: set[int]) -> bool:
        return v not in made and self.graph.values[v].dtype == "bool" and v in self.producers

    def _behind(self, first: int) -> set[int]:
        """The ops that need the result of op ``first``."""
        found, work = set[int](), [first]
        while work:
            for v in self.graph.ops[work.pop()].outputs:
                new = [c for c in self.consumers.get(v, ()) if c not in found]
                found.update(new)
                work += new
        return found

    def _rewire(self, i: int, behind: set[int], size: int, wanted: set[int], copies: dict[int, int]) -> None:
        op = self.draft.ops[i]
        inputs = tuple(self._copy(v, i, behind, size, copies) if v in wanted else v for v in op.inputs)
        self.draft.ops[i] = dataclasses.replace(op, inputs=inputs)

    def _copy(self, v: int, at: int, behind: set[int], size: int, copies: dict[int, int]) -> int:
        """``v`` as it is made again in front of op ``at``; itself where it is small, or no cheap op makes it."""
        again, work = set[int](), [v]
        while work:
            w = work.pop()
            i = self.producers.get(w)
            if i is None or i in again or w in copies or i in behind or not self._is_made_again(i, w, size):
                continue
            again.add(i)
            work += self.graph.ops[i].inputs
        for i in sorted(again):
            op = self.graph.ops[i]
            (made,) = op.outputs
            new = self.draft.value(made, self.graph.values[made].shape)
            inputs = tuple(copies.get(w, w) for w in op.inputs)
            self.before.setdefault(at, []).append((dataclasses.replace(op, inputs=inputs, outputs=(new,)), self.captured.steps[i]))
            copies[made] = new
            self.copied = True
        return copies.get(v, v)

    def _is_made_again(self, i: int, v: int, size: int) -> bool:
        """Is it cheaper to make ``v`` by op ``i`` again than to keep it?"""
        op = self.graph.ops[i]
        if op.kind == "opaque" or asks_for_equals(self.graph, self.producers, op):
            return False
        cheap = OPS[op.kind].family in CHEAP and (self.graph.values[v].size * LARGER > size or v in self.counted)
        return cheap or op.kind == "dot_general" and grows(self.graph, op)


# ----------------------------------------------------------------------------------------------------------------------------------
# Scores of an attention that are summed over their rows and over their columns, made once for each.
#
# Comes in: a ``Captured``, for a target without code for sums over the rows of each batch. Goes out: the same, where what sums
# over the one dimension reads scores of its own, made of the same queries, keys and statistics. So a gradient by the queries
# streams over the queries and folds the keys, and gradients by keys and values stream over the keys and fold the queries: two
# regions, of which none adds to sums that another tile adds to as well. What is left to XLA it makes once: its compiler finds
# that both are the same.
#
# Scores are products whose result is much larger than its operands, as in ``repeated_scores``; no operator is recognised as
# attention. Invariants: the copies are equal to what they replace, and what is small (the statistics of a row) is made once.
# ----------------------------------------------------------------------------------------------------------------------------------

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


# ----------------------------------------------------------------------------------------------------------------------------------
# Scores of an attention that are divided by a statistic of their row, multiplied by its reciprocal instead.
#
# Comes in: a ``Captured``, for a target on which a division takes many instructions. Goes out: the same, where ``x /
# broadcast(l)`` stands as ``x * broadcast(1 / l)``: one division for a row, or one for a column where the statistics are those of
# the columns, instead of one for each pair of a query and a key. Invariants: only what is much larger than what it is divided by,
# and is made of a product as ``scores_apart`` finds it; the quotient is off by one rounding more.
# ----------------------------------------------------------------------------------------------------------------------------------


def multiply_scores(captured: Captured) -> Captured:
    """``captured`` with products for the quotients of scores and statistics."""
    graph, draft = captured.graph, Draft(captured)
    scores, producers = scores_of(graph), graph.producers()
    reciprocals: dict[int, int] = {}
    before: dict[int, list[tuple[Op, Step]]] = {}

    def reciprocal(v: int, at: int, step: Step) -> int:
        """1 / ``v``, made in front of op ``at``."""
        moves: list[Op] = []
        while v not in reciprocals and v in producers:
            op = graph.ops[producers[v]]
            if op.kind == "opaque" or OPS[op.kind].family not in MOVES or not op.inputs:
                break
            moves.append(op)
            (v,) = op.inputs
        if v not in reciprocals:
            value = graph.values[v]
            one = draft.literal(Value((), value.dtype, 1.0))
            reciprocals[v] = draft.value(v, value.shape)
            before.setdefault(at, []).append((Op("div", (one, v), (reciprocals[v],)), step))
        made = reciprocals[v]
        for op in reversed(moves):
            (v,), x = op.outputs, made
            made = reciprocals[v] = draft.value(v, graph.values[v].shape)
            before.setdefault(at, []).append((dataclasses.replace(op, inputs=(x,), outputs=(made,)), step))
        return made

    for i, op in enumerate(graph.ops):
        if op.kind != "div" or op.inputs[0] not in scores or not is_float(graph.values[op.inputs[0]].dtype):
            continue
        x, y = op.inputs
        if _is_spread(captured, producers, y, graph.values[x].size):
            draft.ops[i] = with_params(dataclasses.replace(op, kind="mul"), (x, reciprocal(y, i, captured.steps[i])), op.outputs)
    return draft.finish(before)


def _is_spread(captured: Captured, producers: dict[int, int], v: int, size: int) -> bool:
    """Is ``v`` a much smaller value that was repeated?"""
    graph = captured.graph
    while graph.values[v].size * LARGER > size:
        op = graph.ops[producers[v]] if v in producers else None
        if op is None or op.kind == "opaque" or OPS[op.kind].family not in MOVES or not op.inputs:
            return False
        (v,) = op.inputs
    return True

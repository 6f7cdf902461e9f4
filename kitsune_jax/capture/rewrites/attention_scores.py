"""Rewrites of attention scores, which are much larger than the operands of the product that makes them.

Comes in: a ``Captured``. Goes out: the same with scores that are computed several times, or scaled in another way, so that no
region has to store them. Scores are products whose result is much larger than its operands (``ops.table.grows``); no operator is
recognised as attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

from kitsune_jax.capture.edit import Captured, GraphEditor, Inserter, with_params
from kitsune_jax.ops.graph import DisjointSets, Graph, Op, reached
from kitsune_jax.ops.spec import is_float
from kitsune_jax.ops.table import CHEAP, OPS, asks_for_equals, grows, is_cheap, scores_of

# --- scores that a backward pass in the same graph reads: computed again there ----------------------------------------------------

LARGER = 4  # times the statistics the scores must be


def repeat_scores(captured: Captured) -> Captured:
    """Give the ops behind an attention's result (its loss, and the backward pass that starts from it) scores of their own.

    Scores, weights and masks are computed again from the queries, the keys and each row's statistics, as the first ones are. A
    region of the forward pass and one of the backward pass then hand arrays of queries or of keys to each other, and none of
    queries by keys. Where both are left to XLA, its compiler finds that they are the same and computes them once.

    Invariant: the copies are equal to the first ones, bit for bit where one program makes both. A comparison of scores with their
    maximum is never copied, because its operands may then come from two programs.
    """
    editor = GraphEditor(captured)
    repeater = _Repeater(editor)
    for i, op in enumerate(editor.graph.ops):
        if op.kind == "dot_general" and grows(editor.graph, op):
            repeater.repeat(i)
    return editor.finish()


def made_of(graph: Graph, given: Callable[[int], bool]) -> set[int]:
    """The values that cheap ops make of constants, of indices and of those that are ``given``."""
    found = {v for v, value in enumerate(graph.values) if value.literal is not None or given(v)}
    for op in graph.ops:
        if op.kind != "opaque" and OPS[op.kind].family in CHEAP and found.issuperset(op.inputs):
            found.update(op.outputs)
    return found


class _Repeater:
    def __init__(self, editor: GraphEditor):
        self.editor, self.graph = editor, editor.graph
        self.made_of_indices: set[int] | None = None
        self.small: dict[int, set[int]] = {}

    def repeat(self, root: int) -> None:
        """Give the ops behind the first product with the weights that are made of product ``root`` copies of those."""
        made, readers = self._weights(root), self.editor.readers
        products = [c for v in made for c in readers.get(v, ()) if self.graph.ops[c].kind == "dot_general"]
        if not products:
            return
        behind = self._behind(min(products))
        copies: dict[int, int] = {}
        size = self.graph.values[self.graph.ops[root].outputs[0]].size
        for i in sorted(c for v in made for c in readers.get(v, ()) if c in behind):
            self._read_copies(i, behind, size, made, copies)
        # Masks as well: a gradient reads the one that hid the scores.
        masks = {v for w in made for v in self.graph.ops[self.editor.maker[w]].inputs if self._is_mask(v, made)}
        for i in sorted({c for v in masks for c in readers.get(v, ()) if c in behind}):
            self._read_copies(i, behind, size, masks, copies)

    def _weights(self, root: int) -> set[int]:
        """Values of the scores' size that are made of them, of masks and of small values, element by element."""
        (scores,) = self.graph.ops[root].outputs
        size, made, work = self.graph.values[scores].size, {scores}, [scores]
        while work:
            for i in self.editor.readers.get(work.pop(), ()):
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
        return v not in made and self.graph.values[v].dtype == "bool" and v in self.editor.maker

    def _behind(self, first: int) -> set[int]:
        """The ops that need the result of op ``first``."""

        def readers(i: int) -> list[int]:
            return [c for v in self.graph.ops[i].outputs for c in self.editor.readers.get(v, ())]

        return reached(readers(first), readers)

    def _read_copies(self, i: int, behind: set[int], size: int, wanted: set[int], copies: dict[int, int]) -> None:
        op = self.editor.ops[i]
        inputs = tuple(self._copy(v, i, behind, size, copies) if v in wanted else v for v in op.inputs)
        self.editor.replace(i, dataclasses.replace(op, inputs=inputs))

    def _copy(self, v: int, at: int, behind: set[int], size: int, copies: dict[int, int]) -> int:
        """``v`` computed again in front of op ``at``; itself where it is small, or no cheap op makes it."""
        again, work = set[int](), [v]
        while work:
            w = work.pop()
            i = self.editor.maker.get(w)
            if i is None or i in again or w in copies or i in behind or not self._is_made_again(i, w, size):
                continue
            again.add(i)
            work += self.graph.ops[i].inputs
        for i in sorted(again):
            op = self.graph.ops[i]
            inputs = [copies.get(w, w) for w in op.inputs]
            copies[op.outputs[0]] = self.editor.in_front_of(at).copy(op, inputs, step=self.editor.captured.steps[i])
        return copies.get(v, v)

    def _is_made_again(self, i: int, v: int, size: int) -> bool:
        """Is it cheaper to make ``v`` by op ``i`` again than to keep it?"""
        op = self.graph.ops[i]
        if op.kind == "opaque" or asks_for_equals(self.graph, self.editor.maker, op):
            return False
        if self.made_of_indices is None:
            self.made_of_indices = made_of(self.graph, lambda v: False)
        cheap = OPS[op.kind].family in CHEAP and (self.graph.values[v].size * LARGER > size or v in self.made_of_indices)
        return cheap or op.kind == "dot_general" and grows(self.graph, op)


# --- scores that are summed over their rows and over their columns: computed once for each ----------------------------------------

MOVES = frozenset({"broadcast", "reshape", "transpose", "iota"})
_FOLDS = frozenset({"dot", "reduce"})


def part_scores(captured: Captured) -> Captured:
    """Give each set of dimensions that scores are summed over, but one, scores of its own.

    The copies are made of the same queries, keys and statistics. So a gradient by the queries streams over the queries and folds
    the keys, and gradients by keys and values stream over the keys and fold the queries: two regions, of which none adds to sums
    that another tile adds to as well. For a target without code for sums over the rows of each batch. Where both are left to XLA,
    its compiler finds that they are the same. Small values (the statistics of a row) are made once.
    """
    scores = scores_of(captured.graph)
    parted = _ops_by_summed_dims(captured.graph, scores) if scores else []
    return _with_copies(captured, scores, parted) if parted else captured


def _ops_by_summed_dims(graph: Graph, scores: frozenset[int]) -> list[list[int]]:
    """The ops that sum over dimensions of ``scores``, those that sum over the same ones together. Of each set of scores that are
    computed of each other, the ops that keep theirs are left out."""
    joined = DisjointSets()  # values, and (value, dimension) pairs
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
    editor = GraphEditor(captured)
    graph, maker = editor.graph, editor.maker
    # Masks of indices and single numbers (the place of a piece of a text) are cheap to make again, and as large as the scores.
    of_indices = made_of(graph, lambda v: graph.values[v].shape == ())

    def is_copied(v: int, size: int) -> bool:
        op = editor.made_by(v)
        if op is None or op.kind == "opaque" or graph.values[v].literal is not None or graph.values[v].shape == ():
            return False
        if asks_for_equals(graph, maker, op):  # of copies, whose sums may have another order
            return False
        cheap = is_cheap(op) and (v in of_indices or graph.values[v].size * LARGER > size)
        return v in scores or cheap or OPS[op.kind].family in MOVES  # an op that only moves elements stores no array of its own

    for ends in parted:
        copies: dict[int, int] = {}
        for i in ends:
            size = max(graph.values[v].size for v in graph.ops[i].inputs if v in scores)
            work = list(graph.ops[i].inputs)
            while work:  # not by recursion: a chain may be longer than Python's stack
                v = work[-1]
                op = editor.made_by(v) if v not in copies and is_copied(v, size) else None
                missing = [w for w in op.inputs if w not in copies] if op is not None else []
                if missing:
                    work += missing
                    continue
                work.pop()
                if op is not None:
                    inputs = [copies[w] for w in op.inputs]
                    copies[v] = editor.in_front_of(i).copy(op, inputs, step=captured.steps[maker[v]])
                copies.setdefault(v, v)
            editor.replace(i, dataclasses.replace(editor.ops[i], inputs=tuple(copies[v] for v in graph.ops[i].inputs)))
    return editor.finish()


# --- scores that are divided by a statistic of their row: multiplied by its reciprocal instead ------------------------------------


def multiply_scores(captured: Captured) -> Captured:
    """Compute ``x / broadcast(l)`` as ``x * broadcast(1 / l)``, for scores ``x`` and a much smaller ``l``.

    That is one division for a row, or one for a column where the statistics are those of the columns, instead of one for each pair
    of a query and a key: for a target on which a division takes many instructions. The quotient is off by one rounding more.
    """
    editor = GraphEditor(captured)
    scores, reciprocals = scores_of(editor.graph), dict[int, int]()
    for i, op in enumerate(editor.graph.ops):
        if op.kind == "div" and op.inputs[0] in scores and is_float(editor.dtype(op.inputs[0])):
            x, y = op.inputs
            if _is_repeated(editor, y, editor.values[x].size):
                new = dataclasses.replace(op, kind="mul")
                editor.replace(i, with_params(new, (x, _reciprocal(editor.in_front_of(i), y, reciprocals)), op.outputs))
    return editor.finish()


def _reciprocal(at: Inserter, v: int, known: dict[int, int]) -> int:
    """1 / ``v``, made of the reciprocal of the value that was moved or repeated to make ``v``; ``known``: those made before."""
    moves: list[Op] = []
    while v not in known and (op := _move_of(at.editor, v)) is not None:
        moves.append(op)
        (v,) = op.inputs
    if v not in known:
        one = at.editor.literal(1.0, at.editor.dtype(v))
        known[v] = at.add("div", (one, v), like=v)
    made = known[v]
    for op in reversed(moves):
        made = known[op.outputs[0]] = at.copy(op, (made,))
    return made


def _is_repeated(editor: GraphEditor, v: int, size: int) -> bool:
    """Is ``v`` a much smaller value that was repeated?"""
    while editor.values[v].size * LARGER > size:
        op = _move_of(editor, v)
        if op is None:
            return False
        (v,) = op.inputs
    return True


def _move_of(editor: GraphEditor, v: int) -> Op | None:
    """The op that makes ``v`` by moving or repeating the elements of its operand."""
    op = editor.made_by(v)
    return op if op is not None and op.kind != "opaque" and OPS[op.kind].family in MOVES and op.inputs else None

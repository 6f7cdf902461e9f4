"""Scores of an attention that a backward pass in the same graph reads, made again there.

Comes in: a ``Captured``. Goes out: the same where what stands behind the attention's result (its loss, and the backward pass that
starts from it) reads scores, weights and masks of its own, made of the queries, the keys and each row's statistics as the first
ones are. A region of the forward pass and one of the backward pass then hand arrays of queries or of keys to each other, and none
of queries by keys. What is left to XLA it makes once: its compiler finds that both are the same.

Scores are products whose result is much larger than its operands; no operator is recognised as attention. Invariants: the copies
are equal to what they replace, bit for bit where one program makes both. So which scores equal their maximum is no copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kitsune_jax.capture.captured import Captured, Draft, Step
from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.scores import CHEAP, asks_for_equals, grows
from kitsune_jax.ops.table import OPS

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

"""Scores over a long dimension: what they are computed of, and which dimensions of it are theirs.

Comes in: a Graph and a reduction over one dimension. Goes out: ``Scores``, or ``AsItIs`` where they are no product with something
that has the dimension. Invariant: nothing is changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kitsune_jax.capture.split_ops import ELEMENTWISE
from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.table import OPS

Labels = tuple[int | None, ...]  # of a value's dimensions: which of the scores' they are; None for one element


class AsItIs(ValueError):
    """Something stands in the way; the reduction stays as it is."""


class Scores:
    """Of op ``root``, which reduces them over ``long``. ``labels``: of the values with the long dimension that they are computed
    of, in terms of their own dimensions. ``ops``: that compute them, from the product on. ``batch``: its batch dimensions;
    ``others``: all dimensions but these and the long one."""

    def __init__(self, graph: Graph, producers: Mapping[int, int], root: int):
        self.graph, self.producers = graph, producers
        (self.value,), (self.long,) = graph.ops[root].inputs, graph.ops[root]["axes"]
        self.shape = graph.values[self.value].shape
        self.labels: dict[int, Labels] = {self.value: tuple(range(len(self.shape)))}
        self.ops: set[int] = set()
        self._above(self.value)
        self.batch = self._batch(self._first_product())
        self.others = tuple(d for d in range(len(self.shape)) if d != self.long and d not in self.batch)

    def _above(self, v: int) -> None:
        """The ops that the scores are made of, from the product on."""
        work = [v]
        while work:
            v = work.pop()
            i = self.producers.get(v)
            op = None if i is None else self.graph.ops[i]
            if i is None or op is None or op.kind == "opaque" or i in self.ops:
                continue
            labels = self.labels[v]
            if op.kind == "dot_general":
                self.ops.add(i)
            elif OPS[op.kind].family in ELEMENTWISE:
                self.ops.add(i)
                work += [x for x in op.inputs if self._label(x, labels)]
            elif op.kind == "transpose":
                self.ops.add(i)
                (x,) = op.inputs
                work += [x] if self._label(x, _unpermuted(labels, op["permutation"])) else []
            elif op.kind == "reshape" and (kept := self.reshaped(op, labels, back=True)) is not None:
                self.ops.add(i)
                work += [op.inputs[0]] if self._label(op.inputs[0], kept) else []

    def _label(self, v: int, labels: Labels) -> bool:
        """Note the labels of ``v``; False where they are known, or ``v`` is a number."""
        if not self.graph.values[v].shape:
            return False
        known = self.labels.setdefault(v, labels)
        if known != labels:
            raise AsItIs("two dimensions of one value")
        return known is labels

    def reshaped(self, op: Op, labels: Labels, back: bool = False) -> Labels | None:
        """The labels of the result of a reshape that adds and drops dimensions of one element (``back``: of its operand)."""
        before, after = (self.graph.values[v].shape for v in (op.inputs[0], op.outputs[0]))
        known, other = (after, before) if back else (before, after)
        if [n for n in known if n != 1] != [n for n in other if n != 1]:
            return None
        left = [d for d, n in zip(labels, known, strict=True) if n != 1]
        if any(d is not None and self.shape[d] != 1 for d, n in zip(labels, known, strict=True) if n == 1):
            return None
        return tuple(left.pop(0) if n != 1 else None for n in other)

    def _first_product(self) -> int:
        found = [i for i in self.ops if self.graph.ops[i].kind == "dot_general"]
        if len(found) != 1:
            raise AsItIs("the scores are no product, or several")
        return found[0]

    def _batch(self, product: int) -> tuple[int, ...]:
        """The batch dimensions of the product, as the scores have them."""
        op = self.graph.ops[product]
        labels, count = self.labels[op.outputs[0]], len(op["lhs_batch"])
        if any(d is None for d in labels):
            raise AsItIs("dimensions of one element")
        return tuple(d for d in labels[:count] if d is not None)


def _unpermuted(labels: Labels, permutation: Sequence[int]) -> Labels:
    found: list[int | None] = [None] * len(labels)
    for d, p in zip(labels, permutation, strict=True):
        found[p] = d
    return tuple(found)

"""Segment softmaxes of a Graph: which exponentials are taken of a score minus the largest score of its segment, and their sums.

Comes in: the ops and values of a Graph. Goes out: ``Segments``, which answers for single values. Invariants: nothing is changed;
what is told holds for every input, with ids out of range, empty segments, NaN and infinities.

The **segment** of a row is the row of a table that its index names. ``take(t, j)`` and ``scatter_sum(x, i)`` mean the same segments
where i and j are the same ids, or j is what JAX makes of i so that negative ids count from the end: rows whose id is negative are
in no segment of i.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kitsune_jax.graph import Op, Value
from kitsune_jax.ops.spec import is_float


@dataclasses.dataclass(frozen=True, slots=True)
class Exponential:
    """``exp(score - take(reference, index))``, where ``reference`` is the largest score of each segment of ``ids`` among n.

    ``finite``: where that is an infinity or NaN the reference is 0. Otherwise the exponential is at most 1, or a NaN is in its
    segment, and the sum over a segment with rows is at least 1 or NaN.
    """

    value: int
    score: int
    ids: int
    n: int
    finite: bool


class Segments:
    def __init__(self, ops: Sequence[Op], values: Sequence[Value]):
        self.values = values
        self.maker = {v: op for op in ops for v in op.outputs}
        self._number: dict[int, int] = {}  # value -> the first value that is equal to it because it is computed in the same way
        first: dict[object, int] = {}
        for op in ops:
            if op.kind == "opaque" or op.body is not None:
                continue
            key = op.kind, tuple(map(self._key, op.inputs)), op.params, values[op.outputs[0]].dtype
            self._number[op.outputs[0]] = first.setdefault(key, op.outputs[0])

    def _key(self, v: int) -> object:
        literal = self.values[v].literal
        return self.number(v) if literal is None else (repr(literal), self.values[v].dtype)

    def number(self, v: int) -> int:
        """One number for all values that are computed alike."""
        return self._number.get(v, v)

    def made(self, v: int, kind: str) -> Op | None:
        """The op of that kind that makes ``v``, if one does."""
        op = self.maker.get(v)
        return op if op is not None and op.kind == kind else None

    def literal(self, v: int) -> object:
        """The number that ``v`` holds everywhere; None if it is not a constant."""
        while (op := self.made(v, "broadcast_in_dim")) is not None:
            v = op.inputs[0]
        return self.values[v].literal

    def same_rows(self, index: int, ids: int, n: int) -> bool:
        """Does ``index`` say what ``ids`` say, for every row whose id is in [0, n)?"""
        if self.number(index) == self.number(ids):
            return True
        wrapped = self.made(index, "select_n")
        if wrapped is None or len(wrapped.inputs) != 3 or self.number(wrapped.inputs[1]) != self.number(ids):
            return False
        below, added = self.made(wrapped.inputs[0], "lt"), self.made(wrapped.inputs[2], "add")
        if below is None or self.number(below.inputs[0]) != self.number(ids) or self.literal(below.inputs[1]) != 0:
            return False
        return added is not None and (self.number(added.inputs[0]), self.literal(added.inputs[1])) == (self.number(ids), n)

    def scattered(self, v: int, kind: str) -> Op | None:
        """The op of that kind that makes ``v`` by an id for each row."""
        op = self.made(v, kind)
        return op if op is not None and op["axis"] == 0 and len(self.values[op.inputs[1]].shape) == 1 else None

    def taken(self, v: int) -> tuple[int, int] | None:
        """(table, index) if ``v`` is a row of the table for each of the ids, whatever is read out of range."""
        op = self.made(v, "take")
        if op is None or op["axis"] != 0 or len(self.values[op.inputs[1]].shape) != 1:
            return None
        return op.inputs[0], op.inputs[1]

    def exponential(self, v: int) -> Exponential | None:
        """``v`` as an exponential of a score minus the largest one of its segment."""
        exp = self.made(v, "exp")
        difference = self.made(exp.inputs[0], "sub") if exp is not None else None
        if difference is None or not is_float(self.values[v].dtype):
            return None
        score, (table, index) = difference.inputs[0], self.taken(difference.inputs[1]) or (-1, -1)
        largest, finite = self._where_finite(table)
        maximum = self.scattered(largest, "scatter_max")
        if maximum is None or self.number(maximum.inputs[0]) != self.number(score):
            return None
        if not self.same_rows(index, maximum.inputs[1], maximum["n"]):
            return None
        return Exponential(v, score, maximum.inputs[1], maximum["n"], finite)

    def _where_finite(self, v: int) -> tuple[int, bool]:
        """(x, True) of ``where(isfinite(x), x, 0)``, else (v, False)."""
        chosen = self.made(v, "select_n")
        test = self.made(chosen.inputs[0], "is_finite") if chosen is not None and len(chosen.inputs) == 3 else None
        if chosen is None or test is None or self.literal(chosen.inputs[1]) != 0:
            return v, False
        same = self.number(test.inputs[0]) == self.number(chosen.inputs[2])
        return (chosen.inputs[2], True) if same else (v, False)

    def total(self, v: int) -> Exponential | None:
        """The exponentials whose sum over each segment ``v`` is."""
        op = self.scattered(v, "scatter_sum")
        found = self.exponential(op.inputs[0]) if op is not None else None
        if op is None or found is None or self.number(op.inputs[1]) != self.number(found.ids) or op["n"] != found.n:
            return None
        return found

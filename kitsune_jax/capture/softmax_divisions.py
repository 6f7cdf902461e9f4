"""Divisions by a segment softmax's sum, moved from the rows of a segment to the segment.

Comes in: a ``Captured``. Goes out: the same with fewer passes over the rows. With ``e`` the exponentials of scores and ``s`` their
sums over the segments of ``i`` (``segments.Segments``):

* ``scatter_sum(v * e / take(s, i), i)`` becomes ``scatter_sum(v * e, i) / s``: sum and weighted sum need no longer wait for each
  other, so one pass makes both. The same goes for any power of ``s``;
* ``scatter_sum(e * sum(take(g, i) * v), i)``, which the backward pass of such a weighted sum needs, becomes
  ``sum(g * scatter_sum(v * e, i))`` where that weighted sum is made anyway: no pass over the rows is left of it.

Invariants: every value that is left keeps its shape and meaning, up to the order in which numbers are rounded. A segment without
rows gives 0 as before, and one with a NaN or an infinity among its scores gives NaN. float16 is left alone, because a weighted
sum of many numbers may exceed 65 504 where their weighted mean does not. In the second equality a row whose id is out of range
counts for nothing, also where it holds an infinity or a NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kitsune_jax.capture.captured import Captured, Draft, Step
from kitsune_jax.capture.segments import Exponential, Segments
from kitsune_jax.graph import Op, Param, Value, make_params
from kitsune_jax.ops.spec import is_float

Dims = tuple[int | None, ...]  # for each dimension of a factor the one of the product that it runs along; None: it has one element


def divide_segments(captured: Captured) -> Captured:
    """Rewrite the sums over segments of ``captured`` that have a softmax's sum among the factors of their rows."""
    kinds = {op.kind for op in captured.graph.ops}
    if not {"exp", "scatter_max", "scatter_sum", "take"} <= kinds:
        return captured
    return _Rewriter(captured).run()


@dataclasses.dataclass
class _Left:
    """What is left of a product: ``value`` (None: 1) without the powers of tables that were ``found`` among its factors."""

    value: int | None
    found: list[tuple[int, int, Dims]]  # (table, power, its rows' dimensions in the product)


class _Rewriter:
    def __init__(self, captured: Captured):
        self.draft = Draft(captured)
        self.draft.ops, self.draft.steps = [], []
        self.old = captured
        self.segments = Segments(captured.graph.ops, self.draft.values)
        self.weighted: dict[tuple[int, int, int], int] = {}  # (exponential, other factor, ids), as numbers -> their sum

    def run(self) -> Captured:
        for op, step in zip(self.old.graph.ops, self.old.steps, strict=True):
            if not self._divided(op, step):
                self.draft.ops.append(op)
                self.draft.steps.append(step)
                self._remember(op.inputs[0] if op.inputs else -1, op, op.outputs[0] if op.outputs else -1)
        return self.draft.finish()

    # --- one sum ----------------------------------------------------------------------------------------------------------------

    def _divided(self, op: Op, step: Step) -> bool:
        """Append what stands for ``op`` if it is a sum over segments with a softmax's sum among its factors."""
        total = self.segments.scattered(op.outputs[0], "scatter_sum") if op.kind == "scatter_sum" else None
        if total is None or self._dtype(op.inputs[0]) not in ("float32", "bfloat16", "float64"):
            return False
        mark = len(self.draft.ops), len(self.draft.values)
        at = op, step
        left = self._without(op.inputs[0], at)
        softmaxes = {s for s, _, _ in left.found}
        if left.value is None or len(softmaxes) != 1 or not self._give(op, left, at):
            del self.draft.ops[mark[0] :], self.draft.steps[mark[0] :]
            del self.draft.values[mark[1] :], self.draft.avals[mark[1] :]
            return False
        return True

    def _give(self, op: Op, left: _Left, at: tuple[Op, Step]) -> bool:
        """Append the sum of what is ``left`` of the rows of ``op``, times the powers of the softmax's sums that were in front."""
        assert left.value is not None
        table = left.found[0][0]
        softmax = self.segments.total(table)
        assert softmax is not None
        if softmax.n != op["n"]:
            return False
        (out,), ids = op.outputs, op.inputs[1]
        total = self._weighted_rows(op, left.value, softmax, at)
        if total is None:
            if self.segments.number(ids) != self.segments.number(softmax.ids):
                return False
            total = self._add("scatter_sum", (left.value, ids), out, self._shape(out), at, **dict(op.params))
            self._remember(left.value, op, total)
        value = total
        for s, power, dims in left.found:
            each = self._spread(s, dims, self._shape(out), at)
            for _ in range(abs(power)):
                value = self._add("div" if power < 0 else "mul", (value, each), out, self._shape(out), at)
        empty = self._empty(table, softmax, left.found[0][2], out, at)
        zeros = self._add("broadcast_in_dim", (self._zero(out),), out, self._shape(out), at, shape=self._shape(out), dims=())
        self.draft.ops.append(Op("select_n", (empty, value, zeros), (out,), (), op.source, label="select_n"))
        self.draft.steps.append(at[1])
        return True

    def _empty(self, table: int, softmax: Exponential, dims: Dims, out: int, at: tuple[Op, Step]) -> int:
        """Where the result has segments without rows. The sum over any other is at least 1, or NaN, unless the softmax is of the
        kind that takes 0 for a largest score of -inf: then rows are counted."""
        count = table
        if softmax.finite:
            rows = self._shape(softmax.ids)
            one = self._constant(1.0, self._dtype(table))
            ones = self._add("broadcast_in_dim", (one,), table, rows, at, shape=rows, dims=())
            params: dict[str, Param] = {"axis": 0, "n": softmax.n, "sorted": False}
            count, dims = self._add("scatter_sum", (ones, softmax.ids), table, (softmax.n,), at, **params), (0,)
        none = self._add("eq", (count, self._zero(count)), count, self._shape(count), at, "bool")
        return self._spread(none, dims, self._shape(out), at)

    # --- factors of a product ---------------------------------------------------------------------------------------------------

    def _without(self, v: int, at: tuple[Op, Step]) -> _Left:
        """``v`` without the sums of softmaxes that are taken among its factors; the shape stays."""
        op = self.segments.maker.get(v)
        taken = self.segments.taken(v)
        if taken is not None:
            softmax = self.segments.total(taken[0])
            if softmax is not None and self.segments.same_rows(taken[1], softmax.ids, softmax.n):
                return _Left(None, [(taken[0], 1, tuple(range(len(self._shape(v)))))])
        if op is None or op.kind not in ("mul", "div", "neg", "integer_pow", "broadcast_in_dim", "reshape"):
            return _Left(v, [])
        sides = [self._without(x, at) for x in op.inputs]
        if not any(side.found for side in sides):
            return _Left(v, [])
        found = [f for side in sides for f in side.found]
        shape = self._shape(v)
        first = sides[0].value
        if op.kind == "mul":
            kept = [side.value for side in sides if side.value is not None]
            return _Left(kept[0] if len(kept) == 1 else self._add("mul", kept, v, shape, at) if kept else None, found)
        if op.kind == "div":
            if first is None:
                return _Left(v, [])
            inverse = [(s, -power, dims) for s, power, dims in sides[1].found]
            value = first if sides[1].value is None else self._add("div", (first, sides[1].value), v, shape, at)
            return _Left(value, [*sides[0].found, *inverse])
        if op.kind == "integer_pow":
            return _Left(None, [(s, power * op["y"], dims) for s, power, dims in found]) if first is None else _Left(v, [])
        if op.kind == "neg":
            return _Left(v, []) if first is None else _Left(self._add("neg", (first,), v, shape, at), found)
        moved = _moves(op, self.draft.values)
        if moved is None:
            return _Left(v, [])
        found = [(s, power, tuple(d if d is None else moved[d] for d in dims)) for s, power, dims in found]
        if first is not None:
            first = self._add(op.kind, (first,), v, shape, at, **dict(op.params))
        return _Left(first, found)

    # --- sums of products with rows that are taken -------------------------------------------------------------------------------

    def _remember(self, rows: int, op: Op, total: int) -> None:
        """``total`` is the sum of ``rows`` by the ids of ``op``. Where they are an exponential times another value, note it."""
        if op.kind != "scatter_sum":
            return
        product = self._maker(rows)
        if product is None or product.kind != "mul":
            return
        for k in range(2):
            e, v = product.inputs[k], product.inputs[1 - k]
            found = self.segments.exponential(self._source(e))
            if found is not None:
                number = self.segments.number
                self.weighted.setdefault((number(self._source(e)), number(v), number(op.inputs[1])), total)

    def _weighted_rows(self, op: Op, rows: int, softmax: Exponential, at: tuple[Op, Step]) -> int | None:
        """The sum of ``rows`` by the ids of ``op`` if these are ``e * sum(take(g, i) * v)`` and the sum of ``v * e`` is there."""
        negative = self._maker(rows)
        inner = negative.inputs[0] if negative is not None and negative.kind == "neg" else rows
        product = self._maker(inner)
        if product is None or product.kind != "mul":
            return None
        for e, other in (product.inputs, product.inputs[::-1]):
            if self.segments.number(e) != self.segments.number(softmax.value):
                continue
            reduced = self.segments.made(self._source(other), "reduce_sum")
            terms = self.segments.made(reduced.inputs[0], "mul") if reduced is not None else None
            if reduced is None or terms is None:
                continue
            made = self._from_the_weighted(op, softmax, reduced, terms, at)
            if made is not None and inner is not rows:
                made = self._add("neg", (made,), made, self._shape(made), at)
            if made is not None:
                return made
        return None

    def _from_the_weighted(self, op: Op, softmax: Exponential, reduced: Op, terms: Op, at: tuple[Op, Step]) -> int | None:
        number = self.segments.number
        kept = [n for d, n in enumerate(self._shape(terms.outputs[0])) if d not in reduced["axes"]]
        out = self._shape(op.outputs[0])
        aligned = 0 not in reduced["axes"] and _long(kept[1:]) == _long(out[1:])
        for g, v in (terms.inputs, terms.inputs[::-1]):
            taken, total = self.segments.taken(g), self.weighted.get((number(softmax.value), number(v), number(softmax.ids)))
            if taken is None or total is None or not aligned or self._shape(taken[0]) != self._shape(total):
                continue
            take, ids = self.segments.maker[g], op.inputs[1]
            # A row that only one of the two ids names takes zeros: it counts in neither form.
            here = number(take.inputs[1]) == number(softmax.ids) and self.segments.same_rows(ids, softmax.ids, softmax.n)
            zero = number(ids) == number(softmax.ids) or take["mode"] == "fill" and take["fill"] == 0
            if not here or not zero or not self._along(softmax, terms.outputs[0], reduced["axes"]):
                continue
            whole = self._add("mul", (taken[0], total), total, self._shape(total), at)
            shape = tuple(n for d, n in enumerate(self._shape(total)) if d not in reduced["axes"])
            summed = self._add("reduce_sum", (whole,), total, shape, at, axes=reduced["axes"])
            return summed if shape == out else self._add("reshape", (summed,), total, out, at, new_sizes=out)
        return None

    def _along(self, softmax: Exponential, terms: int, axes: Sequence[int]) -> bool:
        """Do the exponentials run along the dimensions of ``terms`` that are not summed, in their order?"""
        kept = [n for d, n in enumerate(self._shape(terms)) if d not in axes and n > 1]
        return _long(self._shape(softmax.value)) == kept

    def _source(self, v: int) -> int:
        """What ``v`` holds in another shape: the value before dimensions of one element were added, dropped or summed, and before
        it was repeated along new dimensions at its end."""
        while (op := self._maker(v)) is not None and op.inputs:
            x = op.inputs[0]
            before, after = self._shape(x), self._shape(v)
            spread = op.kind == "broadcast_in_dim" and before and op["dims"] == tuple(range(len(before)))
            single = op.kind == "reduce_sum" and all(before[d] == 1 for d in op["axes"])
            if not (spread or single or op.kind == "reshape" and _long(before) == _long(after)):
                return v
            v = x
        return v

    # --- appending ---------------------------------------------------------------------------------------------------------------

    def _maker(self, v: int) -> Op | None:
        """The op that makes ``v``, an old one or one that stands for it."""
        return self.segments.maker.get(v)

    def _shape(self, v: int) -> tuple[int, ...]:
        return self.draft.values[v].shape

    def _dtype(self, v: int) -> str:
        return self.draft.values[v].dtype

    def _zero(self, v: int) -> int:
        return self._constant(0.0 if is_float(self._dtype(v)) else 0, self._dtype(v))

    def _constant(self, number: float, dtype: str) -> int:
        self.draft.values.append(Value((), dtype, number))
        self.draft.avals.append(None)
        return len(self.draft.values) - 1

    def _add(
        self,
        kind: str,
        inputs: Sequence[int],
        like: int,
        sizes: Sequence[int],
        at: tuple[Op, Step],
        dtype: str = "",
        /,
        **params: Param,
    ) -> int:
        """Append an op that makes a new value, which varies as ``like`` does and has its dtype unless another is given."""
        op, step = at
        made = self.draft.value(like, sizes, dtype)
        new = Op(kind, tuple(inputs), (made,), make_params(**params), op.source, label=op.label if kind == op.kind else kind)
        self.draft.ops.append(new)
        self.draft.steps.append(step)
        self.segments.maker[made] = new
        return made

    def _spread(self, v: int, dims: Dims, shape: tuple[int, ...], at: tuple[Op, Step]) -> int:
        """The table ``v`` repeated to ``shape``; its dimension k becomes ``dims[k]``."""
        kept = [(n, d) for n, d in zip(self._shape(v), dims, strict=True) if d is not None]
        sizes, to = tuple(n for n, _ in kept), tuple(d for _, d in kept)
        if sizes != self._shape(v):
            v = self._add("reshape", (v,), v, sizes, at, new_sizes=sizes)
        if (sizes, to) == (shape, tuple(range(len(shape)))):
            return v
        return self._add("broadcast_in_dim", (v,), v, shape, at, shape=shape, dims=to)


def _long(shape: Sequence[int]) -> list[int]:
    return [n for n in shape if n > 1]


def _moves(op: Op, values: Sequence[Value]) -> Dims | None:
    """Where each dimension of the operand of a broadcast or a reshape goes, if the first stays and all others keep their size."""
    before, after = values[op.inputs[0]].shape, values[op.outputs[0]].shape
    if not before or not after:
        return None
    if op.kind == "broadcast_in_dim":
        moved: Dims = tuple(d if before[k] == after[d] else None for k, d in enumerate(op["dims"]))
    else:
        places = [d for d, n in enumerate(after) if n > 1]
        if _long(before) != _long(after):
            return None
        rest = iter(places)
        moved = tuple(next(rest) if n > 1 else None for n in before)
        moved = (0, *moved[1:]) if before[0] == after[0] == 1 else moved
    return moved if moved[0] == 0 and before[0] == after[0] else None

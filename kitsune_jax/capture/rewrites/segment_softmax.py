"""Rewrites of a segment softmax, so that its exponentials are summed in one pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kitsune_jax.capture.edit import Captured, Draft, Step
from kitsune_jax.ops.graph import Op, Param, Value, make_params
from kitsune_jax.ops.reduce import ONLINE
from kitsune_jax.ops.spec import is_float

# ----------------------------------------------------------------------------------------------------------------------------------
# Segment softmaxes of a Graph: which exponentials are taken of a score minus the largest score of its segment, and their sums.
#
# Comes in: the ops and values of a Graph. Goes out: ``Segments``, which answers for single values. Invariants: nothing is
# changed; what is told holds for every input, with ids out of range, empty segments, NaN and infinities.
#
# The **segment** of a row is the row of a table that its index names. ``take(t, j)`` and ``scatter_sum(x, i)`` mean the same
# segments where i and j are the same ids, or j is what JAX makes of i so that negative ids count from the end: rows whose id is
# negative are in no segment of i.
# ----------------------------------------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------------------------------------
# Divisions by a segment softmax's sum, moved from the rows of a segment to the segment.
#
# Comes in: a ``Captured``. Goes out: the same with fewer passes over the rows. With ``e`` the exponentials of scores and ``s``
# their sums over the segments of ``i`` (``segments.Segments``):
#
# * ``scatter_sum(v * e / take(s, i), i)`` becomes ``scatter_sum(v * e, i) / s``: sum and weighted sum need no longer wait for each
#   other, so one pass makes both. The same goes for any power of ``s``;
# * ``scatter_sum(e * sum(take(g, i) * v), i)``, which the backward pass of such a weighted sum needs, becomes
#   ``sum(g * scatter_sum(v * e, i))`` where that weighted sum is made anyway: no pass over the rows is left of it.
#
# Invariants: every value that is left keeps its shape and meaning, up to the order in which numbers are rounded. A segment
# without rows gives 0 as before, and one with a NaN or an infinity among its scores gives NaN. float16 is left alone, because a
# weighted sum of many numbers may exceed 65 504 where their weighted mean does not. In the second equality a row whose id is out
# of range counts for nothing, also where it holds an infinity or a NaN.
# ----------------------------------------------------------------------------------------------------------------------------------

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


# ----------------------------------------------------------------------------------------------------------------------------------
# Sums over segments of what carries the softmax's exponential: made online, in the pass that finds the largest score.
#
# Comes in: a ``Captured``. Goes out: the same, in which every sum over the segments of ``i`` of a product that has ``e =
# exp(score - take(largest, i))`` among its factors is one ``scatter_exp_sum`` of the other factors, where ``largest`` is the
# largest score of each segment of the same ``i``. The sum no longer waits for ``largest``. Nothing else about the softmax
# matters: the denominator is such a sum (of ones), and so is every weighted sum of values. For targets that fold such sums
# online.
#
# Invariants: every value that is left keeps its shape and meaning, up to the order in which numbers are rounded.
# ----------------------------------------------------------------------------------------------------------------------------------


def sum_online(captured: Captured) -> Captured:
    """Rewrite the sums of ``captured`` over the segments of a softmax whose rows carry its exponential."""
    kinds = {op.kind for op in captured.graph.ops}
    if not {"exp", "scatter_max", "scatter_sum", "take"} <= kinds:
        return captured
    draft = Draft(captured)
    segments = Segments(captured.graph.ops, draft.values)
    draft.ops, draft.steps = [], []
    for op, step in zip(captured.graph.ops, captured.steps, strict=True):
        _append(draft, segments, op, step)
    return draft.finish()


def _append(draft: Draft, segments: Segments, op: Op, step: Step) -> None:
    """Append ``op``, or the online sum that stands for it."""
    total = segments.scattered(op.outputs[0], "scatter_sum") if op.kind == "scatter_sum" else None
    found = _factors(draft, segments, total) if total is not None else None
    if found is not None:
        exponential, other = found
        shape = draft.values[op.inputs[0]].shape
        if other is None:
            other = draft.value(op.inputs[0], shape)
            draft.values.append(Value((), draft.values[other].dtype, 1.0))
            draft.avals.append(None)
            one = len(draft.values) - 1
            params = make_params(shape=shape, dims=())
            draft.ops.append(Op("broadcast_in_dim", (one,), (other,), params, op.source, label="broadcast"))
            draft.steps.append(step)
        params = make_params(**{**dict(op.params), "finite": exponential.finite})
        inputs = other, op.inputs[1], exponential.score
        op = Op("scatter_exp_sum", inputs, op.outputs, params, op.source, label=f"online {op.label}")
    draft.ops.append(op)
    draft.steps.append(step)


def _factors(draft: Draft, segments: Segments, total: Op) -> tuple[Exponential, int | None] | None:
    """The exponential among the factors of the rows that ``total`` sums, and the product of the others (None: 1)."""
    rows, ids = total.inputs
    if draft.values[rows].dtype not in ONLINE["scatter_exp_sum"].dtypes:
        return None

    def softmax(v: int) -> Exponential | None:
        """The exponential that ``v`` repeats along dimensions behind its own."""
        found = segments.exponential(_repeated(draft, segments, v))
        if found is None or segments.number(found.ids) != segments.number(ids) or found.n != total["n"]:
            return None
        shape, own = draft.values[rows].shape, draft.values[found.value].shape
        return found if shape[: len(own)] == own else None

    whole = softmax(rows)
    if whole is not None:
        return (whole, None) if draft.values[whole.value].shape == draft.values[rows].shape else None
    product = segments.made(rows, "mul")
    for k in range(2) if product is not None else ():
        assert product is not None
        found = softmax(product.inputs[k])
        other = product.inputs[1 - k]
        if found is not None and draft.values[other].shape == draft.values[rows].shape:
            return found, other
    return None


def _repeated(draft: Draft, segments: Segments, v: int) -> int:
    """The value of which ``v`` is a repetition along dimensions at its end, dimensions of one element there left out."""
    while (op := segments.maker.get(v)) is not None and op.kind in ("broadcast_in_dim", "reshape") and op.inputs:
        x = op.inputs[0]
        before, after = draft.values[x].shape, draft.values[v].shape
        if op.kind == "reshape":
            kept = after[: len(before)] == before and all(n == 1 for n in after[len(before) :])
        else:
            rank = next((r for r in range(len(before), 1, -1) if before[r - 1] != 1), min(1, len(before)))
            kept = op["dims"][:rank] == tuple(range(rank)) and after[:rank] == before[:rank]
        if not kept:
            return v
        v = x
    return v

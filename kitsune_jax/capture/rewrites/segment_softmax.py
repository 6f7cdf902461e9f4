"""Rewrites of a segment softmax, so that its exponentials are summed in one pass over the rows.

Comes in: a ``Captured``. Goes out: the same with fewer passes over the rows of segments. Invariant: every value that is left keeps
its shape and meaning, up to the order in which numbers are rounded, for every input: with ids out of range, empty segments, NaN
and infinities.

The **segment** of a row is the row of a table that its index names. ``take(t, j)`` and ``scatter_sum(x, i)`` mean the same
segments where i and j are the same ids, or j is computed from i as JAX does it so that negative ids count from the end: rows whose
id is negative are in no segment of i.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kitsune_jax.capture.edit import Captured, GraphEditor, kept_dims
from kitsune_jax.ops.graph import Op, Param, Value, make_params
from kitsune_jax.ops.reduce import ONLINE
from kitsune_jax.ops.spec import is_float


def _has_segment_softmax(captured: Captured) -> bool:
    return {"exp", "scatter_max", "scatter_sum", "take"} <= {op.kind for op in captured.graph.ops}


# --- exponentials of a score minus the largest score of its segment, and their sums -----------------------------------------------


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
    """Answers for single values of an editor's graph which segments and exponentials they are made of. Changes nothing."""

    def __init__(self, editor: GraphEditor):
        self.editor, self.values = editor, editor.values
        self._number: dict[int, int] = {}  # value -> the first value that is equal to it because it is computed in the same way
        first: dict[object, int] = {}
        for op in editor.graph.ops:
            if op.kind == "opaque" or op.body is not None:
                continue
            key = op.kind, tuple(map(self._key, op.inputs)), op.params, self.values[op.outputs[0]].dtype
            self._number[op.outputs[0]] = first.setdefault(key, op.outputs[0])

    def _key(self, v: int) -> object:
        literal = self.values[v].literal
        return self.number(v) if literal is None else (repr(literal), self.values[v].dtype)

    def number(self, v: int) -> int:
        """One number for all values that are computed alike."""
        return self._number.get(v, v)

    def made(self, v: int, kind: str) -> Op | None:
        """The op of that kind that makes ``v``, if one does."""
        op = self.editor.made_by(v)
        return op if op is not None and op.kind == kind else None

    def same_rows(self, index: int, ids: int, n: int) -> bool:
        """Does ``index`` name the row that ``ids`` names, for every row whose id is in [0, n)?"""
        if self.number(index) == self.number(ids):
            return True
        wrapped, number = self.made(index, "select_n"), self.number(ids)
        if wrapped is None or self.number(wrapped.inputs[1]) != number:
            return False
        below, added = self.made(wrapped.inputs[0], "lt"), self.made(wrapped.inputs[2], "add")
        if below is None or added is None or not self.number(below.inputs[0]) == self.number(added.inputs[0]) == number:
            return False
        return self.editor.constant_of(below.inputs[1]) == 0 and self.editor.constant_of(added.inputs[1]) == n

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
        test = self.made(chosen.inputs[0], "is_finite") if chosen is not None else None
        if chosen is None or test is None or self.editor.constant_of(chosen.inputs[1]) != 0:
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


# --- divisions by a segment softmax's sum: moved from the rows of a segment to the segment ----------------------------------------

Dims = tuple[int | None, ...]  # for each dimension of a factor the one of the product that it runs along; None: it has one element


def divide_segments(captured: Captured) -> Captured:
    """Divide by the sum of a softmax once for each segment instead of once for each row.

    With ``e`` the exponentials of scores and ``s`` their sums over the segments of ``i``:

    * ``scatter_sum(v * e / take(s, i), i)`` becomes ``scatter_sum(v * e, i) / s``: sum and weighted sum need no longer wait for
      each other, so one pass makes both. The same goes for any power of ``s``;
    * ``scatter_sum(e * sum(take(g, i) * v), i)``, which the backward pass of such a weighted sum needs, becomes
      ``sum(g * scatter_sum(v * e, i))`` where that weighted sum is made anyway: no pass over the rows is left of it.

    A segment without rows gives 0 as before, and one with a NaN or an infinity among its scores gives NaN. float16 is left alone,
    because a weighted sum of many numbers may exceed 65 504 where their weighted mean does not. In the second equality a row whose
    id is out of range counts for nothing, also where it holds an infinity or a NaN.
    """
    return _DivisionMover(captured).run() if _has_segment_softmax(captured) else captured


@dataclasses.dataclass
class _Left:
    """The rest of a product: ``value`` (None: 1) without the powers of tables that were ``found`` among its factors."""

    value: int | None
    found: list[tuple[int, int, Dims]]  # (table, power, its rows' dimensions in the product)


class _DivisionMover:
    def __init__(self, captured: Captured):
        self.editor = GraphEditor(captured)
        self.segments = Segments(self.editor)
        self.shape, self.dtype, self.made_by = self.editor.shape, self.editor.dtype, self.editor.made_by
        self.weighted: dict[tuple[int, int, int], int] = {}  # (exponential, other factor, ids), as numbers -> their sum

    def run(self) -> Captured:
        for i, op in enumerate(self.editor.graph.ops):
            self.at = self.editor.in_front_of(i)
            new = self._divided(op)
            if new is not None:
                self.editor.replace(i, new)
            else:
                self.at.ops.clear()
                if op.kind == "scatter_sum":
                    self._remember(op.inputs[0], op.inputs[1], op.outputs[0])
        return self.editor.finish()

    # --- one sum ----------------------------------------------------------------------------------------------------------------

    def _divided(self, op: Op) -> Op | None:
        """The op that replaces ``op`` if that is a sum over segments with a softmax's sum among its factors."""
        total = self.segments.scattered(op.outputs[0], "scatter_sum") if op.kind == "scatter_sum" else None
        if total is None or self.dtype(op.inputs[0]) not in ("float32", "bfloat16", "float64"):
            return None
        left = self._without_sums(op.inputs[0])
        if left.value is None or not self.shape(left.value) or len({s for s, _, _ in left.found}) != 1:
            return None
        return self._times_sums(op, left.value, left.found)

    def _times_sums(self, op: Op, rows: int, found: list[tuple[int, int, Dims]]) -> Op | None:
        """The sum of ``rows``, which are the rows of ``op`` without the factors ``found``, times these factors."""
        table = found[0][0]
        softmax = self.segments.total(table)
        assert softmax is not None
        if softmax.n != op["n"]:
            return None
        (out,), ids = op.outputs, op.inputs[1]
        shape = self.shape(out)
        total = self._from_weighted_sum(op, rows, softmax)
        if total is None:
            if self.segments.number(ids) != self.segments.number(softmax.ids):
                return None
            total = self._add("scatter_sum", (rows, ids), out, **dict(op.params))
            self._remember(rows, ids, total)
        value = total
        for s, power, dims in found:
            each = self.at.spread(s, dims, shape)
            for _ in range(abs(power)):
                value = self._add("div" if power < 0 else "mul", (value, each), out)
        empty = self._empty(table, softmax, found[0][2], shape)
        zeros = self._add("broadcast_in_dim", (self._zero(out),), out, shape=shape, dims=())
        return Op("select_n", (empty, value, zeros), (out,), (), op.source, label="select_n")

    def _empty(self, table: int, softmax: Exponential, dims: Dims, shape: tuple[int, ...]) -> int:
        """Where a result of ``shape`` has segments without rows. The sum over any other segment is at least 1, or NaN, unless the
        softmax takes 0 for a largest score of -inf: then rows are counted."""
        count = table
        if softmax.finite:
            rows, one = self.shape(softmax.ids), self.editor.literal(1.0, self.dtype(table))
            ones = self._add("broadcast_in_dim", (one,), table, shape=rows, dims=())
            params: dict[str, Param] = {"axis": 0, "n": softmax.n, "sorted": False}
            count, dims = self._add("scatter_sum", (ones, softmax.ids), table, **params), (0,)
        none = self._add("eq", (count, self._zero(count)), count)
        return self.at.spread(none, dims, shape)

    # --- factors of a product ---------------------------------------------------------------------------------------------------

    def _without_sums(self, v: int) -> _Left:
        """``v`` without the sums of softmaxes that are taken among its factors: a number, or of the same shape."""
        op = self.made_by(v)
        taken = self.segments.taken(v)
        if taken is not None:
            softmax = self.segments.total(taken[0])
            if softmax is not None and self.segments.same_rows(taken[1], softmax.ids, softmax.n):
                return _Left(None, [(taken[0], 1, tuple(range(len(self.shape(v)))))])
        if op is None or op.kind not in ("mul", "div", "neg", "integer_pow", "broadcast_in_dim", "reshape"):
            return _Left(v, [])
        sides = [self._without_sums(x) for x in op.inputs]
        if not any(side.found for side in sides):
            return _Left(v, [])
        found = [f for side in sides for f in side.found]
        first = sides[0].value
        if op.kind == "mul":
            kept = [side.value for side in sides if side.value is not None]
            return _Left(kept[0] if len(kept) == 1 else self._add("mul", kept, v) if kept else None, found)
        if op.kind == "div":
            if first is None:
                return _Left(v, [])
            inverse = [(s, -power, dims) for s, power, dims in sides[1].found]
            value = first if sides[1].value is None else self._add("div", (first, sides[1].value), v)
            return _Left(value, [*sides[0].found, *inverse])
        if op.kind == "integer_pow":
            return _Left(None, [(s, power * op["y"], dims) for s, power, dims in found]) if first is None else _Left(v, [])
        if op.kind == "neg":
            return _Left(v, []) if first is None else _Left(self._add("neg", (first,), v), found)
        moved = _moved_dims(op, self.editor.values)
        if moved is None:
            return _Left(v, [])
        found = [(s, power, tuple(d if d is None else moved[d] for d in dims)) for s, power, dims in found]
        if first is not None and self.shape(first):
            first = self._add(op.kind, (first,), v, **dict(op.params))
        return _Left(first, found)

    # --- sums of products with rows that are taken ------------------------------------------------------------------------------

    def _remember(self, rows: int, ids: int, total: int) -> None:
        """Note that ``total`` is the sum of ``rows`` by ``ids``, where they are an exponential times another value."""
        product, number = self.segments.made(rows, "mul"), self.segments.number
        for factor, v in (product.inputs, product.inputs[::-1]) if product is not None else ():
            if self.segments.exponential(e := self._source(factor)) is not None:
                self.weighted.setdefault((number(e), number(v), number(ids)), total)

    def _from_weighted_sum(self, op: Op, rows: int, softmax: Exponential) -> int | None:
        """The sum of ``rows`` by the ids of ``op`` if these are ``e * sum(take(g, i) * v)`` and the sum of ``v * e`` is there."""
        negative = self.segments.made(rows, "neg")
        product = self.segments.made(negative.inputs[0] if negative is not None else rows, "mul")
        for e, other in (product.inputs, product.inputs[::-1]) if product is not None else ():
            if self.segments.number(e) != self.segments.number(softmax.value):
                continue
            reduced = self.segments.made(self._source(other), "reduce_sum")
            terms = self.segments.made(reduced.inputs[0], "mul") if reduced is not None else None
            made = self._from_terms(op, softmax, reduced, terms) if reduced is not None and terms is not None else None
            if made is not None:
                return made if negative is None else self._add("neg", (made,), made)
        return None

    def _from_terms(self, op: Op, softmax: Exponential, reduced: Op, terms: Op) -> int | None:
        number = self.segments.number
        kept = [n for d, n in enumerate(self.shape(terms.outputs[0])) if d not in reduced["axes"]]
        out = self.shape(op.outputs[0])
        aligned = 0 not in reduced["axes"] and _not_one(kept[1:]) == _not_one(out[1:])
        for g, v in (terms.inputs, terms.inputs[::-1]):
            take, total = self.segments.made(g, "take"), self.weighted.get((number(softmax.value), number(v), number(softmax.ids)))
            taken = self.segments.taken(g)
            if take is None or taken is None or total is None or not aligned or self.shape(taken[0]) != self.shape(total):
                continue
            ids = op.inputs[1]
            # A row that only one of the two ids names takes zeros: it counts in neither form.
            here = number(take.inputs[1]) == number(softmax.ids) and self.segments.same_rows(ids, softmax.ids, softmax.n)
            zero = number(ids) == number(softmax.ids) or take["mode"] == "fill" and take["fill"] == 0
            if not here or not zero or not self._runs_along(softmax, terms.outputs[0], reduced["axes"]):
                continue
            whole = self._add("mul", (taken[0], total), total)
            return self.at.reshape(self._add("reduce_sum", (whole,), total, axes=reduced["axes"]), out)
        return None

    def _runs_along(self, softmax: Exponential, terms: int, axes: Sequence[int]) -> bool:
        """Do the exponentials run along the dimensions of ``terms`` that are not summed, in their order?"""
        return _not_one(self.shape(softmax.value)) == [n for d, n in enumerate(self.shape(terms)) if d not in axes and n > 1]

    def _source(self, v: int) -> int:
        """The value that ``v`` is in another shape: before dimensions of one element were added, dropped or summed, and before it
        was repeated along new dimensions at its end."""
        while (op := self.made_by(v)) is not None and op.inputs:
            x = op.inputs[0]
            before, after = self.shape(x), self.shape(v)
            repeated = op.kind == "broadcast_in_dim" and before and op["dims"] == tuple(range(len(before)))
            single = op.kind == "reduce_sum" and all(before[d] == 1 for d in op["axes"])
            if not (repeated or single or op.kind == "reshape" and _not_one(before) == _not_one(after)):
                return v
            v = x
        return v

    # --- new ops ----------------------------------------------------------------------------------------------------------------

    def _zero(self, v: int) -> int:
        return self.editor.literal(0.0 if is_float(self.dtype(v)) else 0, self.dtype(v))

    def _add(self, kind: str, inputs: Sequence[int], like: int, /, **params: Param) -> int:
        """The result of a new op, which varies as ``like`` does."""
        label = self.at.op.label if kind == self.at.op.kind else kind
        return self.at.add(kind, inputs, like=like, label=label, **params)


def _not_one(shape: Sequence[int]) -> list[int]:
    return [n for n in shape if n > 1]


def _moved_dims(op: Op, values: Sequence[Value]) -> Dims | None:
    """Where each dimension of the operand of a broadcast or a reshape goes, if the first stays and all others keep their size."""
    before, after = values[op.inputs[0]].shape, values[op.outputs[0]].shape
    if not before or not after:
        return None
    if op.kind == "broadcast_in_dim":
        moved: Dims = tuple(d if before[k] == after[d] else None for k, d in enumerate(op["dims"]))
    else:
        kept = kept_dims(before, after)
        if kept is None:
            return None
        moved = tuple(map(kept.get, range(len(before))))
        moved = (0, *moved[1:]) if before[0] == after[0] == 1 else moved
    return moved if moved[0] == 0 and before[0] == after[0] else None


# --- sums of products with the softmax's exponential: made online, in the pass that finds the largest score -----------------------


def sum_online(captured: Captured) -> Captured:
    """Replace sums over segments whose rows have a softmax's exponential as a factor by online sums, for targets that have them.

    Where ``e = exp(score - take(largest, i))`` and ``largest`` is the largest score of each segment of the same ``i``, a sum over
    the segments of ``i`` of ``e`` times other factors becomes one ``scatter_exp_sum`` of the other factors. It no longer waits for
    ``largest``. The denominator of a softmax is such a sum (of ones), and so is every weighted sum of values.
    """
    if not _has_segment_softmax(captured):
        return captured
    editor = GraphEditor(captured)
    segments = Segments(editor)
    for i, op in enumerate(editor.graph.ops):
        total = segments.scattered(op.outputs[0], "scatter_sum") if op.kind == "scatter_sum" else None
        if total is None or (found := _factors(segments, total)) is None:
            continue
        exponential, other = found
        if other is None:
            rows, shape = op.inputs[0], editor.shape(op.inputs[0])
            one, at = editor.literal(1.0, editor.dtype(rows)), editor.in_front_of(i)
            other = at.add("broadcast_in_dim", (one,), like=rows, label="broadcast", shape=shape, dims=())
        params = make_params(**{**dict(op.params), "finite": exponential.finite})
        inputs = other, op.inputs[1], exponential.score
        editor.replace(i, Op("scatter_exp_sum", inputs, op.outputs, params, op.source, label=f"online {op.label}"))
    return editor.finish()


def _factors(segments: Segments, total: Op) -> tuple[Exponential, int | None] | None:
    """The exponential among the factors of the rows that ``total`` sums, and the product of the others (None: 1)."""
    (rows, ids), shape = total.inputs, segments.editor.shape
    if segments.values[rows].dtype not in ONLINE["scatter_exp_sum"].dtypes:
        return None

    def softmax(v: int) -> Exponential | None:
        """The exponential that ``v`` repeats along dimensions behind its own."""
        found = segments.exponential(_repeated_value(segments, v))
        if found is None or segments.number(found.ids) != segments.number(ids) or found.n != total["n"]:
            return None
        own = shape(found.value)
        return found if shape(rows)[: len(own)] == own else None

    whole = softmax(rows)
    if whole is not None:
        return (whole, None) if shape(whole.value) == shape(rows) else None
    product = segments.made(rows, "mul")
    for factor, other in (product.inputs, product.inputs[::-1]) if product is not None else ():
        found = softmax(factor)
        if found is not None and shape(other) == shape(rows):
            return found, other
    return None


def _repeated_value(segments: Segments, v: int) -> int:
    """The value of which ``v`` is a repetition along dimensions at its end, dimensions of one element there left out."""
    while (op := segments.editor.made_by(v)) is not None and op.kind in ("broadcast_in_dim", "reshape") and op.inputs:
        before, after = (segments.editor.shape(x) for x in (op.inputs[0], v))
        if op.kind == "reshape":
            kept = after[: len(before)] == before and all(n == 1 for n in after[len(before) :])
        else:
            rank = next((r for r in range(len(before), 1, -1) if before[r - 1] != 1), min(1, len(before)))
            kept = op["dims"][:rank] == tuple(range(rank)) and after[:rank] == before[:rank]
        if not kept:
            return v
        v = op.inputs[0]
    return v

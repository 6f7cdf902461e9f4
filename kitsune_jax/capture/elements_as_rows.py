"""Reductions of few rows over a long dimension, whose elements become the rows of a stream.

One token against a cache of keys has a row for each head, and each head has thousands of keys. Here the keys are the rows: the keys
of head h follow each other, their index is h, and whatever reduces over them folds by that index, which is in order:

    max_k s[h, k]          =  scatter_max(s', i)
    sum_k p[h, k] v[h, k]  =  scatter_sum(p' v', i)
    s[h, k] - m[h]         =  s' - take(m, i)

So the keys and values stream, read once and as they lie, all workers share them however few the heads are, and the sums of the
softmax are online (``online_sums``), as those of a graph's attention are.

Comes in: a ``Captured``. Goes out: the same where a largest score is looked for over a long dimension in few rows, and all that is
computed of the scores is folded over that dimension again; elsewhere the argument itself. Invariants: no op is recognised as
attention; every other value keeps its shape and meaning, up to the order in which numbers are added up. Numbers of 16 bits are
kept in 32 until they are folded, as in any attention that is made block by block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kitsune_jax.capture.appender import Appender
from kitsune_jax.capture.captured import Captured, Draft, with_params
from kitsune_jax.capture.scores import AsItIs, Labels, Scores
from kitsune_jax.capture.split_ops import ELEMENTWISE, Ops, is_long_maximum
from kitsune_jax.graph import Op, make_params
from kitsune_jax.ops.table import OPS

_LONG = 1024  # elements of the dimension, at least
_ROWS = 8  # of a head, at most: of more the products are worth a tensor core
_FOLDS = {"reduce_max": "scatter_max", "reduce_min": "scatter_min", "reduce_sum": "scatter_sum"}
_HALVES = ("bfloat16", "float16")


def elements_as_rows(captured: Captured) -> Captured:
    """``captured`` with the elements of long reductions of few rows as rows that are folded by index."""
    for root in [op.outputs[0] for op in captured.graph.ops if is_long_maximum(captured.graph, op, _LONG)]:
        if not is_long_maximum(captured.graph, captured.graph.ops[captured.graph.producers()[root]], _LONG):
            continue  # a fold already, by the scores of another one
        try:
            captured = _Rewriter(captured, root).rewrite()
        except AsItIs:
            continue
    return captured


class _Rewriter:
    """A value that has the long dimension is made a second time as [rows, others..]: rows run over the batch dimensions and the
    long one. ``root``: the largest of the scores."""

    def __init__(self, captured: Captured, root: int):
        self.captured, self.graph, self.draft = captured, captured.graph, Draft(captured)
        self.producers = self.graph.producers()
        self.scores = Scores(self.graph, self.producers, self.producers[root])
        self.shape, self.long, self.labels = self.scores.shape, self.scores.long, self.scores.labels
        self.batch, self.others = self.scores.batch, self.scores.others
        if math.prod(self.shape[d] for d in self.others) > _ROWS or math.prod(self.shape) == 0:
            raise AsItIs("there are rows enough")
        self.made: dict[int, int] = {}  # value -> the same as rows
        self.placed: dict[int, Labels] = {}  # of those that are no result of the scores: their dimensions
        self.tables: dict[int, int] = {}  # result of a fold -> the same as [batch, others..]
        self.new = Appender(self.draft, self.captured.steps[self.producers[root]])  # what stands in front of the op at hand
        self.index = -1

    # -- the same as rows

    @property
    def _segments(self) -> int:
        return math.prod(self.shape[d] for d in self.batch)

    @property
    def _rows(self) -> int:
        return self._segments * self.shape[self.long]

    @property
    def _other_sizes(self) -> tuple[int, ...]:
        return tuple(self.shape[d] for d in self.others)

    def rewrite(self) -> Captured:
        before: dict[int, Ops] = {}
        for i, op in enumerate(self.graph.ops):
            self.new.ops, self.new.step = before.setdefault(i, []), self.captured.steps[i]
            known = [v for v in op.inputs if v in self.labels]
            if i in self.scores.ops:
                self.made[op.outputs[0]] = self._product(op) if op.kind == "dot_general" else self._again(op)
            elif known and any(v in self.made for v in known):
                self._reader(i, op)
        if not self.made.keys().isdisjoint(self.graph.outputs):
            raise AsItIs("it is a result")
        return self.draft.finish(before)

    def _reader(self, i: int, op: Op) -> None:
        """``op`` reads values that have the long dimension, but was not needed for the scores."""
        if op.kind == "opaque" or not op.outputs:
            raise AsItIs(f"{op.kind} needs all of the dimension")
        family, (out,) = OPS[op.kind].family, op.outputs
        x = next(v for v in op.inputs if v in self.made)
        labels = self.labels[x]
        if op.kind == "dot_general":
            self._weighted(i, op)
        elif op.kind in _FOLDS:
            self._fold(i, op)
        elif family in ELEMENTWISE:
            self.labels[out] = labels
            self.made[out] = self._again(op)
        elif op.kind in ("transpose", "reshape"):
            to = tuple(labels[d] for d in op["permutation"]) if op.kind == "transpose" else self.scores.reshaped(op, labels)
            if to is None:
                raise AsItIs("a reshape of the scores")
            self.labels[out], self.made[out] = to, self.made[x]
        else:
            raise AsItIs(f"{op.kind} needs all of the dimension")

    def _again(self, op: Op) -> int:
        """The result of a pointwise op, or of one that moves dimensions, as rows."""
        (out,) = op.outputs
        if op.kind in ("transpose", "reshape"):
            return self._as_rows(op.inputs[0])
        inputs = [self._as_rows(v, self.labels[out]) if self.draft.values[v].shape else v for v in op.inputs]
        return self._pointwise(op, inputs, (self._rows, *self._other_sizes))

    def _pointwise(self, op: Op, inputs: Sequence[int], sizes: tuple[int, ...]) -> int:
        """``op`` of values that stand for its operands; what would be of 16 bits is of 32."""
        dtype = self._wide(self.graph.values[op.outputs[0]].dtype)
        if op.kind == "convert_element_type":
            return self.new.of_dtype(inputs[0], dtype)
        made = self.draft.value(op.outputs[0], sizes, dtype)
        of_32 = [self.new.of_dtype(v, self._wide(self.draft.values[v].dtype)) for v in inputs]
        self.new.ops.append((with_params(op, of_32, (made,)), self.new.step))
        return made

    @staticmethod
    def _wide(dtype: str) -> str:
        return "float32" if dtype in _HALVES else dtype

    def _as_rows(self, v: int, labels: Labels | None = None) -> int:
        """``v``, whose dimensions are ``labels``, as rows."""
        known = self.labels.get(v) or self.placed.get(v)
        labels = known if labels is None else labels
        assert labels is not None
        if v in self.made:
            if known != labels:
                raise AsItIs("two dimensions of one value")
            return self.made[v]
        self.placed[v] = labels
        op = self.graph.ops[self.producers[v]] if v in self.producers else None
        if op is not None and op.kind == "broadcast_in_dim":
            x, place = op.inputs[0], tuple(labels[d] for d in op["dims"])
            found = self._repeated(x, place)
        else:
            found = self._moved(v, labels, (*self.batch, self.long, *self.others))
            found = self.new.reshape(found, (self._rows, *self._other_sizes))
        self.made[v] = found
        return found

    def _repeated(self, x: int, place: Labels) -> int:
        """``x`` repeated along the dimensions that it lacks, as rows."""
        x, place = self._bare(x, place)
        whole = (*self.batch, self.long, *self.others)
        if x not in self.tables and (found := self._of_folds(x)) is not None:
            self.tables[x] = found
        if x not in self.tables and (self.long in place or not any(d in place for d in self.batch)):
            spread = self._spread(x, place, whole)
            return self.new.reshape(spread, (self._rows, *self._other_sizes))
        if x not in self.tables:
            table = self._spread(x, place, (*self.batch, *self.others))
            self.tables[x] = self.new.reshape(table, (self._segments, *self._other_sizes))
        return self._take(self.tables[x])

    def _of_folds(self, x: int, depth: int = 4) -> int | None:
        """``x`` as [batch, others..] where it is computed of folds alone, by a few pointwise ops."""
        x, _ = self._bare(x, (None,) * len(self.graph.values[x].shape))
        op = self.graph.ops[self.producers[x]] if x in self.producers else None
        if x in self.tables or op is None or depth == 0 or op.kind == "opaque" or OPS[op.kind].family not in ELEMENTWISE:
            return self.tables.get(x)
        inputs: list[int] = []
        for v in op.inputs:
            number = self._number(v)
            found = number if number is not None else self._of_folds(v, depth - 1)
            if found is None:
                return None
            inputs.append(found)
        sizes = (self._segments, *self._other_sizes)
        if all(not self.draft.values[v].shape for v in inputs):
            return None
        spread = [v if self.draft.values[v].shape else self.new.repeated(v, (), sizes) for v in inputs]
        return self._pointwise(op, spread, sizes)

    def _number(self, v: int) -> int | None:
        """The number that ``v`` holds everywhere."""
        while v in self.producers and self.graph.ops[self.producers[v]].kind == "broadcast_in_dim":
            v = self.graph.ops[self.producers[v]].inputs[0]
        return v if not self.graph.values[v].shape else None

    def _bare(self, x: int, place: Labels) -> tuple[int, Labels]:
        """The value that ``x`` is but for dimensions of one element, and for a maximum with -inf; ``place`` as its own."""
        while x in self.producers and x not in self.tables:
            op = self.graph.ops[self.producers[x]]
            before = self.graph.values[op.inputs[0]].shape if op.inputs else ()
            after = self.graph.values[x].shape
            left = [d for d, n in zip(place, after, strict=True) if n != 1]
            if op.kind == "max" and (kept := [v for v in op.inputs if not self._is_lowest(v)]) and len(kept) == 1:
                (x,) = kept
            elif op.kind in ("reshape", "broadcast_in_dim") and [n for n in before if n != 1] == [n for n in after if n != 1]:
                if op.kind == "broadcast_in_dim" and list(op["dims"]) != sorted(op["dims"]):
                    break
                x, place = op.inputs[0], tuple(left.pop(0) if n != 1 else None for n in before)
            else:
                break
        return x, place

    def _is_lowest(self, v: int) -> bool:
        number = self._number(v)
        literal = None if number is None else self.graph.values[number].literal
        return literal is not None and float(literal) == -math.inf

    def _spread(self, x: int, place: Labels, whole: Sequence[int]) -> int:
        """``x`` with all dimensions of ``whole``, repeated along those that it lacks."""
        sizes = tuple(self.shape[d] for d in whole)
        value = self.draft.values[x]
        kept = [(k, d) for k, d in enumerate(place) if d is not None and value.shape[k] == self.shape[d]]
        if any(n != 1 for k, n in enumerate(value.shape) if k not in dict(kept)):
            raise AsItIs("a dimension that the scores do not have")
        if len(kept) < len(place):
            x = self.new.reshape(x, tuple(value.shape[k] for k, _ in kept))
        at = [list(whole).index(d) for _, d in kept]
        x = self.new.transpose(x, sorted(range(len(at)), key=lambda k: at[k]))
        if self.draft.values[x].shape == sizes:
            return x
        return self.new.add("broadcast_in_dim", (x,), sizes, shape=sizes, dims=sorted(at))

    def _take(self, table: int) -> int:
        sizes = (self._rows, *self.draft.values[table].shape[1:])
        return self.new.add("take", (table, self._ids()), sizes, label="broadcast_in_dim", axis=0, mode="clip", fill=None)

    def _ids(self) -> int:
        """Of each row the number of what it is folded into."""
        if self.index < 0:
            sizes = (self._segments, self.shape[self.long])
            counted = self.new.add("iota", (), sizes, "int32", like=self.scores.value, dimension=0, shape=sizes)
            self.index = self.new.reshape(counted, (self._rows,))
        return self.index

    # -- products and folds

    def _product(self, op: Op) -> int:
        """The scores of a row: the sum of products of its numbers with those of its batch."""
        labels, dtype = self.labels[op.outputs[0]], str(op["accumulate"])
        sides = self._sides(op, labels)
        by_rows = [self.long in free for free, _, _ in sides]
        if by_rows[0] == by_rows[1]:
            raise AsItIs("both sides have the long dimension, or none")
        rows, table = (0, 1) if by_rows[0] else (1, 0)
        if len(sides[rows][0]) != 1 or sorted(d for d in sides[table][0] if d is not None) != sorted(self.others):
            raise AsItIs("a product of other dimensions")
        if self._last_in_memory(op.inputs[rows]) not in op[("lhs_contract", "rhs_contract")[rows]]:
            raise AsItIs("the numbers of a row do not lie side by side")
        contracted = tuple(self.graph.values[op.inputs[0]].shape[d] for d in op["lhs_contract"])
        flat = (math.prod(contracted),)
        x = self._side(op, rows, sides[rows], (*self.batch, self.long), (self._rows, *flat))
        t = self._take(
            self._side(op, table, sides[table], (*self.batch, *self.others), (self._segments, *self._other_sizes, *flat))
        )
        sizes = (self._rows, *self._other_sizes, *flat)
        x = self.new.repeated(self.new.of_dtype(x, dtype), (0, len(sizes) - 1), sizes)
        product = self.new.add("mul", (self.new.of_dtype(t, dtype), x), sizes)
        made = self.new.add("reduce_sum", (product,), sizes[:-1], axes=(len(sizes) - 1,))
        return self.new.of_dtype(made, self._wide(self.graph.values[op.outputs[0]].dtype))

    def _sides(self, op: Op, labels: Labels) -> list[tuple[Labels, tuple[int, ...], tuple[int, ...]]]:
        """Of each operand: labels of its free dimensions, the free dimensions themselves, its batch dimensions."""
        found, at = [], len(op["lhs_batch"])
        for v, side in zip(op.inputs, ("lhs", "rhs"), strict=True):
            batch, contract = op[f"{side}_batch"], op[f"{side}_contract"]
            free = tuple(d for d in range(len(self.graph.values[v].shape)) if d not in batch and d not in contract)
            found.append((labels[at : at + len(free)], free, tuple(batch)))
            at += len(free)
        return found

    def _side(
        self, op: Op, k: int, side: tuple[Labels, tuple[int, ...], tuple[int, ...]], whole: Sequence[int], sizes: tuple[int, ...]
    ) -> int:
        """Operand ``k`` of the first product with its dimensions in the order of ``whole``, the contracted ones last."""
        labels, free, batch = side
        where = dict(zip(labels, free, strict=True)) | dict(zip(self.batch, batch, strict=True))
        order = [where[d] for d in whole] + list(op["lhs_contract"] if k == 0 else op["rhs_contract"])
        return self.new.reshape(self.new.transpose(op.inputs[k], order), sizes)

    def _last_in_memory(self, v: int) -> int:
        """The dimension of ``v`` along which its numbers lie side by side: of what is transposed, where that lies."""
        turned: list[Sequence[int]] = []
        last = len(self.graph.values[v].shape) - 1
        while v in self.producers and self.graph.ops[self.producers[v]].kind == "transpose":
            op = self.graph.ops[self.producers[v]]
            turned.append(op["permutation"])
            (v,) = op.inputs
        for permutation in reversed(turned):
            last = permutation.index(last)
        return last

    def _fold(self, i: int, op: Op) -> None:
        (x,) = op.inputs
        labels = self.labels[x]
        if [labels[d] for d in op["axes"]] != [self.long]:
            raise AsItIs("a reduction over other dimensions as well")
        kept = tuple(d for k, d in enumerate(labels) if k not in op["axes"])
        table = self._scatter(_FOLDS[op.kind], self.made[x], op.label)
        self.tables[op.outputs[0]] = table
        self._put(i, table, kept)

    def _weighted(self, i: int, op: Op) -> None:
        """Replace a product that contracts the long dimension by a sum of products over rows."""
        k = 0 if op.inputs[0] in self.made else 1
        if op.inputs[1 - k] in self.made:
            raise AsItIs("a product of two of them")
        sides = ("lhs", "rhs") if k == 0 else ("rhs", "lhs")
        labels = self.labels[op.inputs[k]]
        (mine, its), (batch, its_batch) = ([op[f"{s}_{what}"] for s in sides] for what in ("contract", "batch"))
        if [labels[d] for d in mine] != [self.long] or {labels[d] for d in batch} != set(self.batch):
            raise AsItIs("a product over other dimensions as well")
        value = self.graph.values[op.inputs[1 - k]]
        free = [d for d in range(len(value.shape)) if d not in its and d not in its_batch]
        if free and self._last_in_memory(op.inputs[1 - k]) not in free:
            raise AsItIs("the numbers of a row do not lie side by side")
        where = {labels[d]: e for d, e in zip(batch, its_batch, strict=True)}
        order = [*(where[d] for d in self.batch), *its, *free]
        wide = tuple(value.shape[d] for d in free)
        y = self.new.reshape(self.new.transpose(op.inputs[1 - k], order), (self._rows, *wide))
        sizes, ahead, dtype = (self._rows, *self._other_sizes, *wide), 1 + len(self.others), str(op["accumulate"])
        weights = self.new.repeated(self.new.of_dtype(self.made[op.inputs[k]], dtype), range(ahead), sizes)
        y = self.new.repeated(self.new.of_dtype(y, dtype), (0, *range(ahead, len(sizes))), sizes)
        table = self._scatter("scatter_sum", self.new.add("mul", (weights, y), sizes), op.label)
        # The product has the batch first, then what is free of its left operand, then of its right one.
        mine_free = [labels[d] for d in range(len(labels)) if d not in mine and d not in batch]
        wide_labels = [-1 - n for n in range(len(wide))]
        ends = [*mine_free, *wide_labels] if k == 0 else [*wide_labels, *mine_free]
        self._put(i, table, (*(labels[d] for d in batch), *ends), wide)

    def _scatter(self, kind: str, rows: int, label: str) -> int:
        value, params = self.draft.values[rows], {"axis": 0, "n": self._segments, "sorted": True}
        return self.new.add(kind, (rows, self._ids()), (self._segments, *value.shape[1:]), value.dtype, label=label, **params)

    def _put(self, i: int, table: int, labels: Labels, wide: tuple[int, ...] = ()) -> None:
        """Make the result of op ``i`` of ``table``: its dimensions in the order of ``labels``; those of ``wide`` are -1, -2, .."""
        op, (out,) = self.graph.ops[i], self.graph.ops[i].outputs
        order = [*self.batch, *self.others, *(-1 - n for n in range(len(wide)))]
        sizes = [*(self.shape[d] for d in (*self.batch, *self.others)), *wide]
        value = self.new.reshape(self.new.of_dtype(table, self.graph.values[out].dtype), tuple(sizes))
        real = [d for d in labels if d is not None]
        value = self.new.transpose(value, [order.index(d) for d in real])
        shape = self.graph.values[out].shape
        params = make_params(new_sizes=shape)
        self.draft.ops[i] = Op("reshape", (value,), (out,), params, op.source, label=op.label)

    # -- ops

    def _moved(self, v: int, labels: Labels, whole: Sequence[int]) -> int:
        """``v`` with its dimensions in the order of ``whole``."""
        if any(d is None for d in labels):
            v = self.new.reshape(v, tuple(n for n, d in zip(self.draft.values[v].shape, labels, strict=True) if d is not None))
        real = [d for d in labels if d is not None]
        missing = [d for d in whole if d not in real]
        if any(self.shape[d] != 1 for d in missing):
            raise AsItIs("a value without some of the dimensions")
        v = self.new.transpose(v, [real.index(d) for d in whole if d in real])
        return self.new.reshape(v, tuple(self.shape[d] for d in whole))

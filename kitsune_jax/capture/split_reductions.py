"""Reductions of few rows over a long dimension, made of parts of it side by side, whose results are merged.

One token against a cache of keys has a row for each head. Where there are fewer heads than workers the keys of a head are cut into
parts: each part has the largest of its scores ``t``, its sum of weights and its weighted sum of values, as if there were no other
keys. What is merged behind follows from the reductions, by the laws by which they are worked off in blocks (``program.blocks``):

    sum_k g x[k]               =  g  sum_p sum_(k in p) x[k]
    sum_k x[k] exp(s[k] - c)   =  sum_p exp(t[p] - c)  sum_(k in p) x[k] exp(s[k] - t[p])

Comes in: a ``Captured``, and how many workers share its work. Goes out: the same where a largest score is looked for over a long
dimension in few rows, and all that is computed of the scores is folded over that dimension again; elsewhere the argument itself.
Invariants: no op is recognised as attention; rows of which every element is -inf, or one is NaN, become what they were.
"""

from __future__ import annotations

import dataclasses
import math

from kitsune_jax.capture.captured import Captured, Draft, Step, with_params
from kitsune_jax.capture.split_ops import CUT, Cut, Ops, is_long_maximum, operand_dims, other_dims
from kitsune_jax.graph import Op, Value
from kitsune_jax.ops.table import OPS

_LONG = 1024  # elements of the dimension, at least
_PART = 256  # of a part, at least
_PARTS = 4  # for each worker, where the dimension has so many: a worker that comes late leaves its parts to others
_ROWS = 8  # of a head, at most: more rows are work enough for all workers
# What folds, and how two folds of parts are put together.
_FOLDS = {
    "reduce_sum": "reduce_sum", "reduce_max": "reduce_max", "reduce_min": "reduce_min", "reduce_prod": "reduce_prod",
    "reduce_and": "reduce_and", "reduce_or": "reduce_or", "dot_general": "reduce_sum",
}  # fmt: skip


class _NotSplit(ValueError):
    """Something stands in the way; the reduction stays as it is."""


def split_reductions(captured: Captured, workers: int) -> Captured:
    """``captured`` with long reductions of few rows in parts, for ``workers`` that would not all have a row of their own."""
    if workers < 2:
        return captured
    for root in [op.outputs[0] for op in captured.graph.ops if is_long_maximum(captured.graph, op, _LONG)]:
        try:
            captured = _Splitter(captured, root, workers).split()
        except _NotSplit:
            continue
    return captured


@dataclasses.dataclass(frozen=True)
class _Outer:
    """A factor of a whole row: ``kind`` is "mul" or "div"; ``place``: its dimensions in the value that has lost it."""

    kind: str
    value: int
    place: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class _State:
    """What a value has lost. ``scores``, ``minus``: ``exp(scores - minus)`` is a factor of it, and of what is left of it
    ``exp(scores - t)`` with t the largest of the part; ``place``: the dimensions of the scores in the value. ``open``: the
    exponential is yet to come."""

    scores: int = -1
    minus: int = -1
    place: tuple[int | None, ...] = ()
    open: bool = False
    outer: tuple[_Outer, ...] = ()

    def moved(self, to: dict[int, int]) -> _State:
        """The same where the dimensions of the value have become ``to``."""

        def at(place: tuple[int | None, ...]) -> tuple[int | None, ...]:
            return tuple(None if d is None else to.get(d) for d in place)

        outer = tuple(dataclasses.replace(o, place=at(o.place)) for o in self.outer)
        return dataclasses.replace(self, place=at(self.place), outer=outer)


class _Splitter:
    """``root``: the result of the first reduction."""

    def __init__(self, captured: Captured, root: int, workers: int):
        self.captured, self.graph, self.draft = captured, captured.graph, Draft(captured)
        self.producers, self.consumers = self.graph.producers(), self.graph.consumers()
        self.root = self.producers[root]
        op = self.graph.ops[self.root]
        (scores,), (axis,) = op.inputs, op["axes"]
        self.length = self.graph.values[scores].shape[axis]
        self.dims = {scores: axis}
        self.folds: list[int] = []
        self._below(scores)
        self._above()
        products = [self.graph.ops[i] for i in self.folds if self.graph.ops[i].kind == "dot_general"]
        if not products:
            raise _NotSplit("nothing is multiplied with what is read of memory")
        self.cut = Cut(self.draft, self.dims, self._parts(products, workers))
        self.before: dict[int, Ops] = {}
        self.states: dict[int, _State] = {}
        self.tops: dict[int, tuple[int, int]] = {}  # scores -> the largest of each part, and what is subtracted
        self.factors: dict[tuple[int, int], int] = {}

    def _parts(self, products: list[Op], workers: int) -> int:
        """Into how many parts the dimension is cut: so many that all workers have equally many."""
        heads = min(math.prod(self.graph.values[op.inputs[0]].shape[d] for d in op["lhs_batch"]) for op in products)
        rows = self.graph.values[self.graph.ops[self.root].outputs[0]].size
        if heads == 0 or rows > _ROWS * heads or heads >= workers:
            raise _NotSplit("there are rows for all workers")
        least = workers // math.gcd(heads, workers)
        most = min(self.length // _PART, max(least, _PARTS * workers // heads))
        found = [p for p in range(least, most + 1, least) if self.length % p == 0]
        if not found:
            raise _NotSplit("the dimension has no equal parts")
        return found[-1]

    def _below(self, scores: int) -> None:
        """The values that are computed of the scores and have their dimension, and the ops that fold it."""
        made = {scores}
        for i, op in enumerate(self.graph.ops):
            if made.isdisjoint(op.inputs) or op.outputs[0] in made:
                continue
            if op.kind == "opaque" or OPS[op.kind].family not in CUT:
                raise _NotSplit(f"{op.kind} needs all of the dimension")
            to = {other_dims(self.draft, op, k).get(self.dims[v], -1) for k, v in enumerate(op.inputs) if v in made}
            if len(to) > 1:
                raise _NotSplit("two dimensions of one value")
            (dim,) = to
            if dim >= 0:
                made.add(op.outputs[0])
                self.dims[op.outputs[0]] = dim
                for k, d in (operand_dims(self.draft, op, dim) or {}).items():
                    if self.dims.setdefault(op.inputs[k], d) != d:
                        raise _NotSplit("two dimensions of one value")
            elif self._folds(op, made):
                self.folds.append(i)
            else:
                raise _NotSplit(f"{op.kind} needs all of the dimension")
        self.made = made - {scores}
        if not self.made.isdisjoint(self.graph.outputs):
            raise _NotSplit("it is a result")

    def _folds(self, op: Op, made: set[int]) -> bool:
        if op.kind == "dot_general":
            pairs = zip(op["lhs_contract"], op["rhs_contract"], strict=True)
            at = [(a, b) for a, b in pairs if self.dims.get(op.inputs[0]) == a or self.dims.get(op.inputs[1]) == b]
            if len(at) != 1:
                return False
            return all(self.dims.setdefault(v, d) == d for v, d in zip(op.inputs, at[0], strict=True))
        return op.kind in _FOLDS and self.dims[op.inputs[0]] in op["axes"]

    def _above(self) -> None:
        """What the values that have the dimension are made of, as far as that has it too and is small, or read nowhere else."""
        work = [v for v in self.dims if v not in self.made]
        most = self.graph.values[self.graph.ops[self.root].inputs[0]].size
        self.copied: set[int] = set()  # ops whose results are made cut, beside what they were
        while work:
            v = work.pop()
            i = self.producers.get(v)
            op = None if i is None else self.graph.ops[i]
            if i is None or op is None or i in self.copied or op.kind == "opaque" or OPS[op.kind].family not in CUT:
                continue
            large = self.graph.values[v].size > most
            found = operand_dims(self.draft, op, self.dims[v])
            if found is None or large and (op.kind == "dot_general" or len(self.consumers[v]) > 1 or v in self.graph.outputs):
                continue
            self.copied.add(i)
            for k, d in found.items():
                if self.dims.setdefault(op.inputs[k], d) != d:
                    raise _NotSplit("two dimensions of one value")
                work.append(op.inputs[k])

    def split(self) -> Captured:
        for i, op in enumerate(self.graph.ops):
            ops = self.before.setdefault(i, [])
            if i in self.copied:
                self.cut.op(ops, op, self.captured.steps[i])
            elif i in self.folds:
                self._fold(i, op, ops)
            elif op.outputs and op.outputs[0] in self.made:
                self._below_scores(op, ops, self.captured.steps[i])
        return self.draft.finish(self.before)

    def _below_scores(self, op: Op, ops: Ops, step: Step) -> None:
        """Make the result of ``op`` cut, or what is left of it."""
        (out,) = op.outputs
        known = {k: self.states[v] for k, v in enumerate(op.inputs) if v in self.states}
        if not known:
            row = self._row(op.inputs[1]) if op.kind == "sub" else None
            if row is not None and self.dims.get(op.inputs[0]) == self.dims[out]:
                place = tuple(range(len(self.draft.values[out].shape)))
                self.states[out] = _State(op.inputs[0], op.inputs[1], place, open=True)
            else:
                self.cut.op(ops, op, step)
            return
        if len(known) > 1:
            raise _NotSplit("a product of two exponentials")
        ((k, state),) = known.items()
        family = OPS[op.kind].family
        if state.open:
            if op.kind != "exp":
                raise _NotSplit("the difference from the largest score is more than an exponent")
            self.states[out] = dataclasses.replace(state, open=False)
            self.cut.made[out] = self._exponential(ops, state, out, step)
        elif op.kind in ("mul", "div") and (op.kind == "mul" or k == 0):
            other = op.inputs[1 - k]
            if self._row(other) is None:
                self.cut.op(ops, op, step)
                self.states[out] = state
            else:
                self.cut.made[out] = self.cut.made[op.inputs[k]]
                place = tuple(range(len(self.draft.values[out].shape)))
                self.states[out] = dataclasses.replace(state, outer=(*state.outer, _Outer(op.kind, other, place)))
        elif op.kind == "convert_element_type" or family in ("broadcast", "reshape", "transpose"):
            self.cut.op(ops, op, step)
            self.states[out] = state.moved(other_dims(self.draft, op, k))
        else:
            raise _NotSplit(f"{op.kind} of an exponential")

    def _row(self, v: int) -> tuple[int, tuple[int | None, ...]] | None:
        """The value that ``v`` repeats along the dimension, and what its dimensions are in ``v``; None where ``v`` differs."""
        value = self.draft.values[v]
        if not value.shape:
            return v, ()
        op = self.graph.ops[self.producers[v]] if v in self.producers else None
        if op is None or op.kind != "broadcast_in_dim" or op.inputs[0] in self.dims or v not in self.dims:
            return None
        return op.inputs[0], op["dims"]

    def _exponential(self, ops: Ops, state: _State, out: int, step: Step) -> int:
        """``exp(scores - t)``."""
        scores = self.cut.cut(ops, state.scores, step)
        _, used = self._top(ops, state.scores, step)
        shape, dim = self.cut.shape(out), self.dims[out]
        place = [d for d in range(len(shape)) if d != dim + 1]
        spread = self.cut.spread(ops, step, used, place, shape)
        difference = self.cut.add(ops, step, "sub", (scores, spread), shape)
        return self.cut.add(ops, step, "exp", (difference,), shape)

    def _top(self, ops: Ops, scores: int, step: Step) -> tuple[int, int]:
        """The largest score of each part, and the same with 0 where a part has none: e^(-inf - -inf) is no number."""
        if scores not in self.tops:
            cut, dim = self.cut.cut(ops, scores, step), self.dims[scores]
            shape = tuple(n for d, n in enumerate(self.cut.shape(scores)) if d != dim + 1)
            top = self.cut.add(ops, step, "reduce_max", (cut,), shape, axes=(dim + 1,))
            lowest = self.draft.literal(Value((), self.draft.values[scores].dtype, -math.inf))
            zero = self.draft.literal(Value((), self.draft.values[scores].dtype, 0.0))
            none = self.cut.add(ops, step, "eq", (lowest, top), shape, dtype="bool")
            zeros = self.cut.add(ops, step, "broadcast_in_dim", (zero,), shape, shape=shape, dims=())
            self.tops[scores] = top, self.cut.add(ops, step, "select_n", (none, top, zeros), shape)
        return self.tops[scores]

    def _fold(self, i: int, op: Op, ops: Ops) -> None:
        """Replace fold ``i`` by one of each part, and one of these."""
        step, (out,) = self.captured.steps[i], op.outputs
        states = [(k, self.states[v]) for k, v in enumerate(op.inputs) if v in self.states]
        if len(states) > 1 or any(s.open for _, s in states):
            raise _NotSplit("a sum of products of two exponentials")
        if states and _FOLDS[op.kind] != "reduce_sum":
            raise _NotSplit("of an exponential only sums can be taken apart")
        (x, *_), dims = op.inputs, self.dims
        if op.kind != "dot_general" and i == self.root and x not in self.states:
            part, at = self._top(ops, x, step)[0], dims[x]
        elif op.kind == "dot_general":
            part, at = self._product(op, ops, step), 0
        else:
            part, at = self._reduced(op, ops, step)
        if states:
            k, state = states[0]
            to = other_dims(self.draft, op, k)
            part = self._scaled(ops, step, state.moved(to), part, at)
        merged = Op(_FOLDS[op.kind], (part,), op.outputs, (("axes", (at,)),), op.source, label=op.label)
        whole, dtype = self.draft.values[out].shape, self.draft.values[part].dtype
        outer = [o for _, state in states for o in state.moved(to).outer]
        if not outer and dtype == self.draft.values[out].dtype:
            self.draft.ops[i] = merged
            return
        made = self.draft.value(part, whole)
        ops.append((dataclasses.replace(merged, outputs=(made,)), step))
        for o in outer:
            value, place = self._row(o.value) or (o.value, ())
            value = self._as(ops, step, value, dtype)
            if self.draft.values[value].shape:
                in_result = [None if d is None else o.place[d] for d in place]
                self._keeps(value, in_result)
                value = self.cut.spread(ops, step, value, in_result, whole)
            made = self.cut.add(ops, step, o.kind, (made, value), whole)
        narrow = Op("convert_element_type", (made,), (out,), source=op.source, label=op.label)
        self.draft.ops[i] = with_params(narrow, (made,), (out,), new_dtype=self.draft.values[out].dtype)

    def _keeps(self, v: int, place: list[int | None]) -> None:
        if any(d is None and n != 1 for n, d in zip(self.draft.values[v].shape, place, strict=True)):
            raise _NotSplit("a sum over rows as well")

    def _as(self, ops: Ops, step: Step, v: int, dtype: str) -> int:
        value = self.draft.values[v]
        if value.dtype == dtype:
            return v
        return self.cut.add(ops, step, "convert_element_type", (v,), value.shape, new_dtype=dtype, dtype=dtype)

    def _product(self, op: Op, ops: Ops, step: Step) -> int:
        """The sums of the parts, in front of all other dimensions, in the dtype in which they are added up."""
        inputs = [self.cut.cut(ops, v, step) for v in op.inputs]
        batches, contracts = [], []
        for v, side in zip(op.inputs, ("lhs", "rhs"), strict=True):
            d = self.dims[v]
            batches.append([d, *(n + (n > d) for n in op[f"{side}_batch"])])
            contracts.append([n + (n >= d) for n in op[f"{side}_contract"]])
        return self.cut.multiply(ops, op, inputs, batches, contracts, step, 0, str(op["accumulate"]))

    def _reduced(self, op: Op, ops: Ops, step: Step) -> tuple[int, int]:
        (x,) = op.inputs
        d, cut = self.dims[x], self.cut.cut(ops, x, step)
        axes = tuple(n + (n >= d) for n in op["axes"])
        shape = tuple(n for k, n in enumerate(self.cut.shape(x)) if k not in axes)
        made = self.draft.value(op.outputs[0], shape)
        ops.append((with_params(op, (cut,), (made,), axes=axes), step))
        return made, sum(k not in axes for k in range(d))

    def _scaled(self, ops: Ops, step: Step, state: _State, part: int, at: int) -> int:
        """``part``, whose dimension ``at`` are the parts, times ``exp(t - minus)``. ``state``: as of the whole result."""
        factor = self._factor(ops, state, step)
        dim = self.dims[state.scores]
        place = [at if d == dim else None if to is None else to + (to >= at) for d, to in enumerate(state.place)]
        self._keeps(factor, place)
        shape, dtype = self.draft.values[part].shape, self.draft.values[part].dtype
        factor = self.cut.spread(ops, step, self._as(ops, step, factor, dtype), place, shape)
        return self.cut.add(ops, step, "mul", (part, factor), shape)

    def _factor(self, ops: Ops, state: _State, step: Step) -> int:
        """``exp(t - minus)`` of each part: the scores' dimensions, that of the parts in the place of the long one."""
        key = state.scores, state.minus
        if key not in self.factors:
            top, _ = self._top(ops, state.scores, step)
            shape = self.draft.values[top].shape
            row, place = self._row(state.minus) or (state.minus, ())
            minus = self.cut.spread(ops, step, row, place, shape) if self.draft.values[row].shape else row
            difference = self.draft.value(top, shape)
            ops.append((Op("sub", (top, minus), (difference,), (), step.origin.source, label="sub"), step))
            self.factors[key] = self.cut.add(ops, step, "exp", (difference,), shape)
        return self.factors[key]

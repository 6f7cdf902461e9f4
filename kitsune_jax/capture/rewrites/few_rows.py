"""Rewrites of reductions with few rows over a long dimension, so that a dimension of many rows streams.

Either the dimension is cut into parts whose results are merged, or each of its elements becomes a row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from kitsune_jax.capture.edit import Appender, Captured, Draft, Step, with_params
from kitsune_jax.ops.graph import Graph, Op, Param, Value, make_params
from kitsune_jax.ops.table import OPS

# ----------------------------------------------------------------------------------------------------------------------------------
# Ops on values one of whose dimensions is cut into parts: ``[.., n, ..]`` as ``[.., parts, n / parts, ..]``.
#
# Comes in: an op, its operands as they are and as they are cut, and where. Goes out: the ops that compute the cut result, or None
# where there are none. Invariant: a cut value is a reshape of the value it stands for, so a part lies behind the part before it.
# ----------------------------------------------------------------------------------------------------------------------------------

Ops = list[tuple[Op, Step]]
ELEMENTWISE = frozenset({"pointwise", "convert"})
# What is cut together with its operands. Of others the result is cut, as it lies in memory.
CUT = ELEMENTWISE | {"broadcast", "reshape", "transpose", "dot", "reduce"}


def is_long_maximum(graph: Graph, op: Op, least: int) -> bool:
    """Is the op a maximum over one dimension, of ``least`` elements or more?"""
    if op.kind != "reduce_max" or len(op["axes"]) != 1:
        return False
    return graph.values[op.inputs[0]].shape[op["axes"][0]] >= least


def other_dims(draft: Draft, op: Op, operand: int) -> dict[int, int]:
    """Dimension of operand number ``operand`` of ``op`` -> the one of its result that runs along with it."""
    out = len(op.inputs)
    shapes = [draft.values[v].shape for v in (*op.inputs, *op.outputs)]
    found = {}
    for relation in OPS[op.kind].relate(op, tuple(shapes[:out]), tuple(shapes[out:])):
        if relation.role == "parallel":
            ends = [d for k, d in relation.members if k == out]
            found.update({d: ends[0] for k, d in relation.members if k == operand and ends})
    return found


def operand_dims(draft: Draft, op: Op, dim: int) -> dict[int, int] | None:
    """Operand number -> its dimension that runs along with dimension ``dim`` of the result of ``op``; None where ``op`` needs or
    makes all of the dimension at once."""
    out = len(op.inputs)
    shapes = [draft.values[v].shape for v in (*op.inputs, *op.outputs)]
    for relation in OPS[op.kind].relate(op, tuple(shapes[:out]), tuple(shapes[out:])):
        if (out, dim) in relation.members:
            ok = relation.role == "parallel" or relation.role == "created" and OPS[op.kind].family == "broadcast"
            return {k: d for k, d in relation.members if k < out} if ok else None
    return None


class Cut:
    """Values of a draft that are cut at ``dims`` (value -> dimension) into ``parts``."""

    def __init__(self, draft: Draft, dims: dict[int, int], parts: int):
        self.draft, self.dims, self.parts = draft, dims, parts
        self.made: dict[int, int] = {}  # value -> the value that is it, cut

    def shape(self, v: int) -> tuple[int, ...]:
        """That of ``v``, cut."""
        shape, d = self.draft.values[v].shape, self.dims[v]
        return (*shape[:d], self.parts, shape[d] // self.parts, *shape[d + 1 :])

    def add(self, ops: Ops, step: Step, kind: str, inputs: Sequence[int], sizes: Sequence[int], /, **more: Param) -> int:
        """Append an op. Its result is of the dtype of its last operand, unless ``dtype`` says another."""
        made = self.draft.value(inputs[-1], sizes, more.pop("dtype", ""))
        ops.append((Op(kind, tuple(inputs), (made,), make_params(**more), step.origin.source, label=kind), step))
        return made

    def cut(self, ops: Ops, v: int, step: Step) -> int:
        """``v``, cut: an op of a cut operand has made it, or it is reshaped as it lies."""
        if v not in self.made:
            shape = self.shape(v)
            self.made[v] = self.add(ops, step, "reshape", (v,), shape, new_sizes=shape)
        return self.made[v]

    def spread(self, ops: Ops, step: Step, v: int, place: Sequence[int | None], shape: Sequence[int]) -> int:
        """``v`` repeated to ``shape``: its dimension ``k`` becomes ``place[k]``, or has one element."""
        value, draft = self.draft.values[v], self.draft
        # A dimension of one element stays where the result has one as well: the stream may run over it.
        kept = [(k, p) for k, p in enumerate(place) if p is not None and value.shape[k] == shape[p]]
        if len(kept) < len(place):
            sizes = tuple(value.shape[k] for k, _ in kept)
            v = self.add(ops, step, "reshape", (v,), sizes, new_sizes=sizes)
        dims = [p for _, p in kept]
        order = sorted(range(len(dims)), key=lambda k: dims[k])
        if order != list(range(len(dims))):
            sizes = tuple(draft.values[v].shape[k] for k in order)
            v = self.add(ops, step, "transpose", (v,), sizes, permutation=order)
        return self.add(ops, step, "broadcast_in_dim", (v,), shape, shape=shape, dims=sorted(dims))

    def op(self, ops: Ops, op: Op, step: Step) -> None:
        """Append what computes the result of ``op``, cut. An operand without the dimension stays whole."""
        (out,) = op.outputs
        family, d = OPS[op.kind].family, self.dims[out]
        inputs = [self.cut(ops, v, step) if v in self.dims else v for v in op.inputs]
        shape = self.shape(out)
        if family == "dot":
            self.made[out] = self._product(ops, op, inputs, step)
            return
        params: dict[str, Param] = {}
        if family == "broadcast":
            dims = [k + (k > d) for k in op["dims"]]
            if op.inputs[0] in self.dims:
                dims.insert(self.dims[op.inputs[0]] + 1, d + 1)
            params = {"shape": shape, "dims": dims}
        elif family == "reshape":
            params = {"new_sizes": shape}
        elif family == "transpose":
            (x,) = op.inputs
            to = [[k, k + 1] if k == self.dims[x] else [k + (k > self.dims[x])] for k in op["permutation"]]
            params = {"permutation": [k for ks in to for k in ks]}
        elif family == "reduce":
            params = {"axes": [k + (k > self.dims[op.inputs[0]]) for k in op["axes"]]}
        new = self.made[out] = self.draft.value(out, shape)
        ops.append((with_params(op, inputs, (new,), **params), step))

    def _product(self, ops: Ops, op: Op, inputs: list[int], step: Step) -> int:
        """A product whose result has the dimension."""
        batches, contracts = [], []
        for k, side in enumerate(("lhs", "rhs")):
            v, at = op.inputs[k], self.dims.get(op.inputs[k], -1)
            if at < 0:  # every part meets all of it
                whole = self.draft.values[v].shape
                shape = (self.parts, *whole)
                inputs[k] = self.spread(ops, step, v, range(1, len(shape)), shape)
            moved = [n + (n > at) for n in range(len(self.draft.values[v].shape))]
            within = at in op[f"{side}_batch"]
            batch = [m for n in op[f"{side}_batch"] for m in ([at, at + 1] if n == at else [moved[n]])]
            batches.append(batch if within else [max(at, 0), *batch])
            contracts.append([moved[n] for n in op[f"{side}_contract"]])
        return self.multiply(ops, op, inputs, batches, contracts, step, self.dims[op.outputs[0]])

    def multiply(
        self,
        ops: Ops,
        op: Op,
        inputs: Sequence[int],
        batches: Sequence[Sequence[int]],
        contracts: Sequence[Sequence[int]],
        step: Step,
        to: int,
        dtype: str = "",
    ) -> int:
        """The product of cut operands; the dimension of its parts, if that comes first, is brought to ``to``."""
        free = []
        for v, batch, contract in zip(inputs, batches, contracts, strict=True):
            shape = self.draft.values[v].shape
            free += [n for d, n in enumerate(shape) if d not in batch and d not in contract]
        shape = (*(self.draft.values[inputs[0]].shape[d] for d in batches[0]), *free)
        made = self.draft.value(op.outputs[0], shape, dtype)
        sides = {"lhs_batch": batches[0], "rhs_batch": batches[1], "lhs_contract": contracts[0], "rhs_contract": contracts[1]}
        ops.append((with_params(op, inputs, (made,), **sides), step))
        first = len(batches[0]) > len(op["lhs_batch"]) and shape[0] == self.parts and not self._within(op)
        if not first or to == 0:
            return made
        order = [*range(1, to + 1), 0, *range(to + 1, len(shape))]
        return self.add(ops, step, "transpose", (made,), [shape[d] for d in order], permutation=order)

    def _within(self, op: Op) -> bool:
        """Is the dimension one of those over which the products of ``op`` are made one by one?"""
        return any(self.dims.get(v, -1) in op[f"{side}_batch"] for v, side in zip(op.inputs, ("lhs", "rhs"), strict=True))


# ----------------------------------------------------------------------------------------------------------------------------------
# Reductions of few rows over a long dimension, made of parts of it side by side, whose results are merged.
#
# One token against a cache of keys has a row for each head. Where there are fewer heads than workers the keys of a head are cut
# into parts: each part has the largest of its scores ``t``, its sum of weights and its weighted sum of values, as if there were
# no other keys. What is merged behind follows from the reductions, by the laws by which they are worked off in blocks
# (``program.blocks``):
#
#     sum_k g x[k]               =  g  sum_p sum_(k in p) x[k]
#     sum_k x[k] exp(s[k] - c)   =  sum_p exp(t[p] - c)  sum_(k in p) x[k] exp(s[k] - t[p])
#
# Comes in: a ``Captured``, and how many workers share its work. Goes out: the same where a largest score is looked for over a
# long dimension in few rows, and all that is computed of the scores is folded over that dimension again; elsewhere the argument
# itself. Invariants: no op is recognised as attention; rows of which every element is -inf, or one is NaN, become what they were.
# ----------------------------------------------------------------------------------------------------------------------------------

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


# ----------------------------------------------------------------------------------------------------------------------------------
# Scores over a long dimension: what they are computed of, and which dimensions of it are theirs.
#
# Comes in: a Graph and a reduction over one dimension. Goes out: ``Scores``, or ``AsItIs`` where they are no product with
# something that has the dimension. Invariant: nothing is changed.
# ----------------------------------------------------------------------------------------------------------------------------------

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


# ----------------------------------------------------------------------------------------------------------------------------------
# Reductions of few rows over a long dimension, whose elements become the rows of a stream.
#
# One token against a cache of keys has a row for each head, and each head has thousands of keys. Here the keys are the rows: the
# keys of head h follow each other, their index is h, and whatever reduces over them folds by that index, which is in order:
#
#     max_k s[h, k]          =  scatter_max(s', i)
#     sum_k p[h, k] v[h, k]  =  scatter_sum(p' v', i)
#     s[h, k] - m[h]         =  s' - take(m, i)
#
# So the keys and values stream, read once and as they lie, all workers share them however few the heads are, and the sums of the
# softmax are online (``online_sums``), as those of a graph's attention are.
#
# Comes in: a ``Captured``. Goes out: the same where a largest score is looked for over a long dimension in few rows, and all that
# is computed of the scores is folded over that dimension again; elsewhere the argument itself. Invariants: no op is recognised as
# attention; every other value keeps its shape and meaning, up to the order in which numbers are added up. Numbers of 16 bits are
# kept in 32 until they are folded, as in any attention that is made block by block.
# ----------------------------------------------------------------------------------------------------------------------------------

_SEGMENT_FOLDS = {"reduce_max": "scatter_max", "reduce_min": "scatter_min", "reduce_sum": "scatter_sum"}
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
        elif op.kind in _SEGMENT_FOLDS:
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
        table = self._scatter(_SEGMENT_FOLDS[op.kind], self.made[x], op.label)
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

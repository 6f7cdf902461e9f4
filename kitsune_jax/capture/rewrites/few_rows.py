"""Rewrites of reductions with few rows over a long dimension, so that a dimension of many rows streams.

Comes in: a ``Captured``. Goes out: the same program with softmax-like reductions of few rows (a maximum of scores, then sums over
them) split along their long dimension; or the argument itself, where there are none. The dimension is cut into parts whose results
are merged (``split_reductions``), or each of its elements becomes a row (``reductions_as_folds``). Invariants: no op is recognised
as attention; every other value keeps its shape and meaning, up to the order in which numbers are added up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from kitsune_jax.capture.edit import Captured, GraphEditor, Inserter, kept_dims, with_params
from kitsune_jax.ops.graph import Graph, Op, Param, make_params
from kitsune_jax.ops.spec import DimRelation
from kitsune_jax.ops.table import OPS

# --- values one of whose dimensions is cut into parts -----------------------------------------------------------------------------

ELEMENTWISE = frozenset({"pointwise", "convert"})
# Families whose ops are computed on cut operands. The result of any other op is cut, as it lies in memory.
CUT = ELEMENTWISE | {"broadcast", "reshape", "transpose", "dot", "reduce"}


_LONG = 1024  # elements of the dimension, at least


def is_long_maximum(graph: Graph, op: Op) -> bool:
    """Is the op a maximum over one long dimension?"""
    if op.kind != "reduce_max" or len(op["axes"]) != 1:
        return False
    return graph.values[op.inputs[0]].shape[op["axes"][0]] >= _LONG


def _relations(editor: GraphEditor, op: Op) -> Sequence[DimRelation]:
    """How the dimensions of operands and result of ``op`` run along; the result has the number behind the operands'."""
    ins, outs = (tuple(editor.shape(v) for v in side) for side in (op.inputs, op.outputs))
    return OPS[op.kind].relate(op, ins, outs)


def other_dims(editor: GraphEditor, op: Op, operand: int) -> dict[int, int]:
    """Dimension of operand number ``operand`` of ``op`` -> the one of its result that runs along with it."""
    found, out = {}, len(op.inputs)
    for relation in _relations(editor, op):
        ends = [d for k, d in relation.members if k == out]
        if relation.role == "parallel" and ends:
            found.update({d: ends[0] for k, d in relation.members if k == operand})
    return found


def operand_dims(editor: GraphEditor, op: Op, dim: int) -> dict[int, int] | None:
    """Operand number -> its dimension that runs along with dimension ``dim`` of the result of ``op``; None where ``op`` needs or
    makes all of the dimension at once."""
    out = len(op.inputs)
    for relation in _relations(editor, op):
        if (out, dim) in relation.members:
            ok = relation.role == "parallel" or relation.role == "created" and OPS[op.kind].family == "broadcast"
            return {k: d for k, d in relation.members if k < out} if ok else None
    return None


class CutValues:
    """Values of a graph that are cut at ``dims`` (value -> dimension) into ``parts``: ``[.., n, ..]`` as ``[.., parts, n / parts,
    ..]``. A cut value is a reshape of the whole value, so a part lies behind the part before it."""

    def __init__(self, editor: GraphEditor, dims: dict[int, int], parts: int):
        self.editor, self.dims, self.parts = editor, dims, parts
        self.made: dict[int, int] = {}  # value -> the value that is it, cut

    def shape(self, v: int) -> tuple[int, ...]:
        """That of ``v``, cut."""
        shape, d = self.editor.shape(v), self.dims[v]
        return (*shape[:d], self.parts, shape[d] // self.parts, *shape[d + 1 :])

    def cut(self, at: Inserter, v: int) -> int:
        """``v``, cut: an op of a cut operand has made it, or it is reshaped as it lies."""
        if v not in self.made:
            self.made[v] = at.add("reshape", (v,), new_sizes=self.shape(v))
        return self.made[v]

    def op(self, at: Inserter, op: Op) -> None:
        """Compute the result of ``op``, cut. An operand without the dimension stays whole."""
        (out,) = op.outputs
        family, d = OPS[op.kind].family, self.dims[out]
        inputs = [self.cut(at, v) if v in self.dims else v for v in op.inputs]
        if family == "dot":
            self.made[out] = self._product(at, op, inputs)
            return
        params: dict[str, Param] = {}
        if family == "broadcast":
            dims = [k + (k > d) for k in op["dims"]]
            if op.inputs[0] in self.dims:
                dims.insert(self.dims[op.inputs[0]] + 1, d + 1)
            params = {"shape": self.shape(out), "dims": dims}
        elif family == "reshape":
            params = {"new_sizes": self.shape(out)}
        elif family == "transpose":
            (x,) = op.inputs
            to = [[k, k + 1] if k == self.dims[x] else [k + (k > self.dims[x])] for k in op["permutation"]]
            params = {"permutation": [k for ks in to for k in ks]}
        elif family == "reduce":
            params = {"axes": [k + (k > self.dims[op.inputs[0]]) for k in op["axes"]]}
        self.made[out] = at.copy(op, inputs, **params)

    def _product(self, at: Inserter, op: Op, inputs: list[int]) -> int:
        """A product whose result has the dimension."""
        batches, contracts = [], []
        for k, side in enumerate(("lhs", "rhs")):
            v, d = op.inputs[k], self.dims.get(op.inputs[k], -1)
            if d < 0:  # every part meets all of it
                shape = (self.parts, *self.editor.shape(v))
                inputs[k] = at.spread(v, range(1, len(shape)), shape)
            moved = [n + (n > d) for n in range(len(self.editor.shape(v)))]
            batch = [m for n in op[f"{side}_batch"] for m in ([d, d + 1] if n == d else [moved[n]])]
            batches.append(batch if d in op[f"{side}_batch"] else [max(d, 0), *batch])
            contracts.append([moved[n] for n in op[f"{side}_contract"]])
        return self.multiply(at, op, inputs, batches, contracts, self.dims[op.outputs[0]])

    def multiply(
        self,
        at: Inserter,
        op: Op,
        inputs: Sequence[int],
        batches: Sequence[Sequence[int]],
        contracts: Sequence[Sequence[int]],
        to: int,
        dtype: str = "",
    ) -> int:
        """The product of cut operands; the dimension of its parts, if that comes first, is brought to ``to``."""
        sides: dict[str, Any] = {
            "lhs_batch": batches[0],
            "rhs_batch": batches[1],
            "lhs_contract": contracts[0],
            "rhs_contract": contracts[1],
        }
        made = at.copy(op, inputs, dtype, **sides)
        in_batch = any(self.dims.get(v, -1) in op[f"{side}_batch"] for v, side in zip(op.inputs, ("lhs", "rhs"), strict=True))
        shape = self.editor.shape(made)
        first = len(batches[0]) > len(op["lhs_batch"]) and shape[0] == self.parts and not in_batch
        if not first or to == 0:
            return made
        order = [*range(1, to + 1), 0, *range(to + 1, len(shape))]
        return at.add("transpose", (made,), permutation=order)


# --- reductions of parts of the dimension, whose results are merged ---------------------------------------------------------------

_PART = 256  # of a part, at least
_PARTS = 4  # for each worker, where the dimension has so many: a worker that comes late leaves its parts to others
_ROWS = 8  # of a head, at most: more rows are work enough for all workers
# Ops that fold the dimension, and the op that merges the results of parts.
_FOLDS = {
    "reduce_sum": "reduce_sum", "reduce_max": "reduce_max", "reduce_min": "reduce_min", "reduce_prod": "reduce_prod",
    "reduce_and": "reduce_and", "reduce_or": "reduce_or", "dot_general": "reduce_sum",
}  # fmt: skip


class Unsupported(ValueError):
    """The reduction stays as it is, for this reason."""


def split_reductions(captured: Captured, workers: int) -> Captured:
    """Cut long reductions of few rows into parts, for ``workers`` that would not all have a row of their own.

    One token against a cache of keys has a row for each head. Where there are fewer heads than workers the keys of a head are cut
    into parts: each part has the largest of its scores ``t``, its sum of weights and its weighted sum of values, as if there were
    no other keys. The merges follow from the reductions, by the laws by which they are worked off in blocks (``program.blocks``):

        sum_k g x[k]               =  g  sum_p sum_(k in p) x[k]
        sum_k x[k] exp(s[k] - c)   =  sum_p exp(t[p] - c)  sum_(k in p) x[k] exp(s[k] - t[p])

    Rows of which every element is -inf, or one is NaN, have the same results as before.
    """
    if workers < 2:
        return captured
    for root in [op.outputs[0] for op in captured.graph.ops if is_long_maximum(captured.graph, op)]:
        try:
            captured = _Splitter(captured, root, workers).split()
        except Unsupported:
            continue
    return captured


@dataclasses.dataclass(frozen=True)
class _RowFactor:
    """A factor of a whole row: ``kind`` is "mul" or "div"; ``place``: its dimensions in the value that has lost it."""

    kind: str
    value: int
    place: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class _LostFactors:
    """The factors that the cut form of a value lacks. ``scores``, ``minus``: the value has the factor ``exp(scores - minus)``, and
    its cut form ``exp(scores - t)`` instead, with t the largest score of the part; ``place``: the dimensions of the scores in the
    value. ``open``: the exponential is yet to come."""

    scores: int = -1
    minus: int = -1
    place: tuple[int | None, ...] = ()
    open: bool = False
    outer: tuple[_RowFactor, ...] = ()

    def moved(self, to: dict[int, int]) -> _LostFactors:
        """The same where the dimensions of the value have become ``to``."""

        def at(place: tuple[int | None, ...]) -> tuple[int | None, ...]:
            return tuple(None if d is None else to.get(d) for d in place)

        outer = tuple(dataclasses.replace(o, place=at(o.place)) for o in self.outer)
        return dataclasses.replace(self, place=at(self.place), outer=outer)


class _Splitter:
    """``root``: the result of the first reduction."""

    def __init__(self, captured: Captured, root: int, workers: int):
        self.editor, self.graph = GraphEditor(captured), captured.graph
        self.root = self.editor.maker[root]
        op = self.graph.ops[self.root]
        (scores,), (axis,) = op.inputs, op["axes"]
        self.length = self.graph.values[scores].shape[axis]
        self.dims = {scores: axis}
        self.folds: list[int] = []
        self._find_readers(scores)
        self._find_operands()
        products = [self.graph.ops[i] for i in self.folds if self.graph.ops[i].kind == "dot_general"]
        if not products:
            raise Unsupported("nothing is multiplied with an array in memory")
        self.cut = CutValues(self.editor, self.dims, self._parts(products, workers))
        self.states: dict[int, _LostFactors] = {}
        self.tops: dict[int, tuple[int, int]] = {}  # scores -> the largest of each part, and the value that is subtracted
        self.factors: dict[tuple[int, int], int] = {}

    def _parts(self, products: list[Op], workers: int) -> int:
        """Into how many parts the dimension is cut: so many that all workers have equally many."""
        heads = min(math.prod(self.graph.values[op.inputs[0]].shape[d] for d in op["lhs_batch"]) for op in products)
        rows = self.graph.values[self.graph.ops[self.root].outputs[0]].size
        if heads == 0 or rows > _ROWS * heads or heads >= workers:
            raise Unsupported("there are rows for all workers")
        least = workers // math.gcd(heads, workers)
        most = min(self.length // _PART, max(least, _PARTS * workers // heads))
        found = [p for p in range(least, most + 1, least) if self.length % p == 0]
        if not found:
            raise Unsupported("the dimension has no equal parts")
        return found[-1]

    def _find_readers(self, scores: int) -> None:
        """Find the values that are computed of the scores and have their dimension, and the ops that fold it."""
        made = {scores}
        for i, op in enumerate(self.graph.ops):
            if made.isdisjoint(op.inputs) or op.outputs[0] in made:
                continue
            if op.kind == "opaque" or OPS[op.kind].family not in CUT:
                raise Unsupported(f"{op.kind} needs all of the dimension")
            to = {other_dims(self.editor, op, k).get(self.dims[v], -1) for k, v in enumerate(op.inputs) if v in made}
            if len(to) > 1:
                raise Unsupported("two dimensions of one value")
            (dim,) = to
            if dim >= 0:
                made.add(op.outputs[0])
                self.dims[op.outputs[0]] = dim
                for k, d in (operand_dims(self.editor, op, dim) or {}).items():
                    self._set_dim(op.inputs[k], d)
            elif self._folds(op):
                self.folds.append(i)
            else:
                raise Unsupported(f"{op.kind} needs all of the dimension")
        self.made = made - {scores}
        if not self.made.isdisjoint(self.graph.outputs):
            raise Unsupported("it is a result")

    def _set_dim(self, v: int, d: int) -> None:
        if self.dims.setdefault(v, d) != d:
            raise Unsupported("two dimensions of one value")

    def _folds(self, op: Op) -> bool:
        if op.kind == "dot_general":
            pairs = zip(op["lhs_contract"], op["rhs_contract"], strict=True)
            at = [(a, b) for a, b in pairs if self.dims.get(op.inputs[0]) == a or self.dims.get(op.inputs[1]) == b]
            if len(at) != 1:
                return False
            return all(self.dims.setdefault(v, d) == d for v, d in zip(op.inputs, at[0], strict=True))
        return op.kind in _FOLDS and self.dims[op.inputs[0]] in op["axes"]

    def _find_operands(self) -> None:
        """Find the ops that the values with the dimension are made by, as far as their operands have the dimension too and are
        small, or read nowhere else."""
        work = [v for v in self.dims if v not in self.made]
        most = self.graph.values[self.graph.ops[self.root].inputs[0]].size
        self.copied: set[int] = set()  # ops whose results are made cut, beside the whole ones
        while work:
            v = work.pop()
            op = self.editor.made_by(v)
            if op is None or self.editor.maker[v] in self.copied or op.kind == "opaque" or OPS[op.kind].family not in CUT:
                continue
            large, read_often = self.graph.values[v].size > most, len(self.editor.readers.get(v, ())) > 1 or v in self.graph.outputs
            found = operand_dims(self.editor, op, self.dims[v])
            if found is None or large and (op.kind == "dot_general" or read_often):
                continue
            self.copied.add(self.editor.maker[v])
            for k, d in found.items():
                self._set_dim(op.inputs[k], d)
                work.append(op.inputs[k])

    def split(self) -> Captured:
        for i, op in enumerate(self.graph.ops):
            self.at = self.editor.in_front_of(i)
            if i in self.copied:
                self.cut.op(self.at, op)
            elif i in self.folds:
                self._fold(i, op)
            elif op.outputs and op.outputs[0] in self.made:
                self._cut_result(op)
        return self.editor.finish()

    def _cut_result(self, op: Op) -> None:
        """Make the result of ``op`` cut, with or without its factors."""
        (out,) = op.outputs
        known = {k: self.states[v] for k, v in enumerate(op.inputs) if v in self.states}
        place = tuple(range(len(self.editor.shape(out))))
        if not known:
            row = self._row(op.inputs[1]) if op.kind == "sub" else None
            if row is not None and self.dims.get(op.inputs[0]) == self.dims[out]:
                self.states[out] = _LostFactors(op.inputs[0], op.inputs[1], place, open=True)
            else:
                self.cut.op(self.at, op)
            return
        if len(known) > 1:
            raise Unsupported("a product of two exponentials")
        ((k, state),) = known.items()
        if state.open:
            if op.kind != "exp":
                raise Unsupported("the difference from the largest score is more than an exponent")
            self.states[out] = dataclasses.replace(state, open=False)
            self.cut.made[out] = self._exponential(state, out)
        elif op.kind in ("mul", "div") and (op.kind == "mul" or k == 0):
            other = op.inputs[1 - k]
            if self._row(other) is None:
                self.cut.op(self.at, op)
                self.states[out] = state
            else:
                self.cut.made[out] = self.cut.made[op.inputs[k]]
                self.states[out] = dataclasses.replace(state, outer=(*state.outer, _RowFactor(op.kind, other, place)))
        elif op.kind == "convert_element_type" or OPS[op.kind].family in ("broadcast", "reshape", "transpose"):
            self.cut.op(self.at, op)
            self.states[out] = state.moved(other_dims(self.editor, op, k))
        else:
            raise Unsupported(f"{op.kind} of an exponential")

    def _row(self, v: int) -> tuple[int, tuple[int | None, ...]] | None:
        """The value that ``v`` repeats along the dimension, and its dimensions in ``v``; None where ``v`` differs along it."""
        if not self.editor.shape(v):
            return v, ()
        op = self.editor.made_by(v)
        if op is None or op.kind != "broadcast_in_dim" or op.inputs[0] in self.dims or v not in self.dims:
            return None
        return op.inputs[0], op["dims"]

    def _exponential(self, state: _LostFactors, out: int) -> int:
        """``exp(scores - t)``."""
        scores = self.cut.cut(self.at, state.scores)
        _, used = self._top(state.scores)
        shape, dim = self.cut.shape(out), self.dims[out]
        spread = self.at.spread(used, [d for d in range(len(shape)) if d != dim + 1], shape)
        return self.at.add("exp", (self.at.add("sub", (scores, spread)),))

    def _top(self, scores: int) -> tuple[int, int]:
        """The largest score of each part, and the same with 0 where a part has none: e^(-inf - -inf) is no number."""
        if scores not in self.tops:
            cut, dim = self.cut.cut(self.at, scores), self.dims[scores]
            top = self.at.add("reduce_max", (cut,), axes=(dim + 1,))
            lowest, zero = (self.editor.literal(x, self.editor.dtype(scores)) for x in (-math.inf, 0.0))
            none = self.at.add("eq", (lowest, top), like=top)
            zeros = self.at.add("broadcast_in_dim", (zero,), like=top, shape=self.editor.shape(top), dims=())
            self.tops[scores] = top, self.at.add("select_n", (none, top, zeros), like=top)
        return self.tops[scores]

    def _fold(self, i: int, op: Op) -> None:
        """Replace fold ``i`` by a fold of each part, and a fold of their results."""
        (out,), at = op.outputs, self.at
        states = [(k, self.states[v]) for k, v in enumerate(op.inputs) if v in self.states]
        if len(states) > 1 or any(s.open for _, s in states):
            raise Unsupported("a sum of products of two exponentials")
        if states and _FOLDS[op.kind] != "reduce_sum":
            raise Unsupported("only sums of an exponential can be made of parts")
        x, dim = op.inputs[0], 0
        if op.kind == "dot_general":
            part = self._product(op)
        elif i == self.root and x not in self.states:
            part, dim = self._top(x)[0], self.dims[x]
        else:
            part, dim = self._reduced(op)
        if states:
            k, state = states[0]
            to = other_dims(self.editor, op, k)
            part = self._scaled(state.moved(to), part, dim)
        merged = Op(_FOLDS[op.kind], (part,), op.outputs, (("axes", (dim,)),), op.source, label=op.label)
        whole, dtype = self.editor.shape(out), self.editor.dtype(part)
        outer = [o for _, state in states for o in state.moved(to).outer]
        if not outer and dtype == self.editor.dtype(out):
            self.editor.replace(i, merged)
            return
        made = at.add(merged.kind, (part,), label=op.label, axes=(dim,))
        for o in outer:
            value, place = self._row(o.value) or (o.value, ())
            value = at.convert(value, dtype)
            if self.editor.shape(value):
                in_result = [None if d is None else o.place[d] for d in place]
                self._check_kept(value, in_result)
                value = at.spread(value, in_result, whole)
            made = at.add(o.kind, (made, value))
        narrow = Op("convert_element_type", (made,), (out,), source=op.source, label=op.label)
        self.editor.replace(i, with_params(narrow, (made,), (out,), new_dtype=self.editor.dtype(out)))

    def _check_kept(self, v: int, place: list[int | None]) -> None:
        if any(d is None and n != 1 for n, d in zip(self.editor.shape(v), place, strict=True)):
            raise Unsupported("a sum over rows as well")

    def _product(self, op: Op) -> int:
        """The sums of the parts, in front of all other dimensions, in the dtype in which they are added up."""
        inputs = [self.cut.cut(self.at, v) for v in op.inputs]
        batches, contracts = [], []
        for v, side in zip(op.inputs, ("lhs", "rhs"), strict=True):
            d = self.dims[v]
            batches.append([d, *(n + (n > d) for n in op[f"{side}_batch"])])
            contracts.append([n + (n >= d) for n in op[f"{side}_contract"]])
        return self.cut.multiply(self.at, op, inputs, batches, contracts, 0, str(op["accumulate"]))

    def _reduced(self, op: Op) -> tuple[int, int]:
        (x,) = op.inputs
        d, cut = self.dims[x], self.cut.cut(self.at, x)
        axes = tuple(n + (n >= d) for n in op["axes"])
        return self.at.copy(op, (cut,), axes=axes), sum(k not in axes for k in range(d))

    def _scaled(self, state: _LostFactors, part: int, dim: int) -> int:
        """``part``, whose dimension ``dim`` are the parts, times ``exp(t - minus)``. ``state``: as of the whole result."""
        factor = self._factor(state)
        long = self.dims[state.scores]
        place = [dim if d == long else None if to is None else to + (to >= dim) for d, to in enumerate(state.place)]
        self._check_kept(factor, place)
        factor = self.at.spread(self.at.convert(factor, self.editor.dtype(part)), place, self.editor.shape(part))
        return self.at.add("mul", (part, factor))

    def _factor(self, state: _LostFactors) -> int:
        """``exp(t - minus)`` of each part: the scores' dimensions, that of the parts in the place of the long one."""
        key = state.scores, state.minus
        if key not in self.factors:
            top, _ = self._top(state.scores)
            row, place = self._row(state.minus) or (state.minus, ())
            minus = self.at.spread(row, place, self.editor.shape(top)) if self.editor.shape(row) else row
            self.factors[key] = self.at.add("exp", (self.at.add("sub", (top, minus)),))
        return self.factors[key]


# --- elements of the dimension as rows of a stream --------------------------------------------------------------------------------

_SEGMENT_FOLDS = {"reduce_max": "scatter_max", "reduce_min": "scatter_min", "reduce_sum": "scatter_sum"}
_HALVES = ("bfloat16", "float16")
_CONTRACTED = ("lhs_contract", "rhs_contract")


def reductions_as_folds(captured: Captured) -> Captured:
    """Make the elements of long reductions of few rows rows that are folded by an index.

    One token against a cache of keys has a row for each head, and each head has thousands of keys. Here the keys are the rows: the
    keys of head h follow each other, their index is h, and every reduction over them folds by that index, which is in order:

        max_k s[h, k]          =  scatter_max(s', i)
        sum_k p[h, k] v[h, k]  =  scatter_sum(p' v', i)
        s[h, k] - m[h]         =  s' - take(m, i)

    So the keys and values stream, read once and as they lie, all workers share them however few the heads are, and the sums of the
    softmax are online (``sum_online``), as those of a graph's attention are. Numbers of 16 bits are kept in 32 until they are
    folded, as in any attention that is made block by block.
    """
    for root in [op.outputs[0] for op in captured.graph.ops if is_long_maximum(captured.graph, op)]:
        try:
            captured = _RowMaker(captured, root).rewrite()
        except Unsupported:
            continue
    return captured


Labels = tuple[int | None, ...]  # for each dimension of a value the one of the scores that it is; None: it has one element


class _RowMaker:
    """A value that has the long dimension is made a second time as [rows, others..]: rows run over the batch dimensions and the
    long one.

    ``value``: the scores, which one product makes and whose maximum over dimension ``long`` is ``root``. ``labels``: of the values
    with the long dimension, of which and from which they are computed. ``ops``: that compute the scores, from the product on.
    ``batch``: the product's batch dimensions, as the scores have them; ``others``: all but these and the long one.
    """

    def __init__(self, captured: Captured, root: int):
        self.editor, self.graph = GraphEditor(captured), captured.graph
        op = self.graph.ops[self.editor.maker[root]]
        if not is_long_maximum(self.graph, op):
            raise Unsupported("it folds rows already, with the scores of another reduction")
        (self.value,), (self.long,) = op.inputs, op["axes"]
        self.shape = self.editor.shape(self.value)
        self.labels: dict[int, Labels] = {self.value: tuple(range(len(self.shape)))}
        self.ops = self._find_ops()
        self.batch = self._batch()
        self.others = tuple(d for d in range(len(self.shape)) if d != self.long and d not in self.batch)
        self.other_sizes = tuple(self.shape[d] for d in self.others)
        self.segments = math.prod(self.shape[d] for d in self.batch)
        self.rows = self.segments * self.shape[self.long]
        if math.prod(self.other_sizes) > _ROWS or math.prod(self.shape) == 0:
            raise Unsupported("there are rows enough")
        self.made: dict[int, int] = {}  # value -> the same as rows
        self.placed: dict[int, Labels] = {}  # labels of values that are no results of the scores
        self.tables: dict[int, int] = {}  # result of a fold -> the same as [batch, others..]
        self.index = -1

    # -- the scores

    def _find_ops(self) -> set[int]:
        """Find the ops that make the scores, from the product on, and the labels of their operands."""
        found, work = set[int](), [self.value]
        while work:
            v = work.pop()
            op = self.editor.made_by(v)
            if op is None or op.kind == "opaque" or self.editor.maker[v] in found:
                continue
            labels: Labels | None = self.labels[v]
            if op.kind == "transpose":
                labels = tuple(self.labels[v][op["permutation"].index(d)] for d in range(len(self.labels[v])))
            elif op.kind == "reshape":
                labels = self._reshaped(op, self.labels[v], back=True)
            elif op.kind != "dot_general" and OPS[op.kind].family not in ELEMENTWISE:
                continue
            if labels is not None:
                found.add(self.editor.maker[v])
                work += [x for x in op.inputs if op.kind != "dot_general" and self._label(x, labels)]
        return found

    def _label(self, v: int, labels: Labels) -> bool:
        """Note the labels of ``v``; False where they are known, or ``v`` is a number."""
        if not self.editor.shape(v):
            return False
        known = self.labels.setdefault(v, labels)
        if known != labels:
            raise Unsupported("two dimensions of one value")
        return known is labels

    def _reshaped(self, op: Op, labels: Labels, back: bool = False) -> Labels | None:
        """The labels of the result of a reshape that adds and drops dimensions of one element (``back``: of its operand)."""
        before, after = (self.editor.shape(v) for v in (op.inputs[0], op.outputs[0]))
        known, other = (after, before) if back else (before, after)
        moved = kept_dims(other, known)
        if moved is None or any(d is not None and self.shape[d] != 1 for d, n in zip(labels, known, strict=True) if n == 1):
            return None
        return tuple(labels[moved[d]] if d in moved else None for d in range(len(other)))

    def _batch(self) -> tuple[int, ...]:
        """The batch dimensions of the product that makes the scores, as the scores have them."""
        products = [op for i in self.ops if (op := self.graph.ops[i]).kind == "dot_general"]
        if len(products) != 1:
            raise Unsupported("the scores are no product, or several")
        labels = self.labels[products[0].outputs[0]]
        if None in labels:
            raise Unsupported("dimensions of one element")
        return tuple(d for d in labels[: len(products[0]["lhs_batch"])] if d is not None)

    # -- values as rows

    def rewrite(self) -> Captured:
        for i, op in enumerate(self.graph.ops):
            self.new = self.editor.in_front_of(i)
            known = [v for v in op.inputs if v in self.labels]
            if i in self.ops:
                self.made[op.outputs[0]] = self._product(op) if op.kind == "dot_general" else self._result_as_rows(op)
            elif known and any(v in self.made for v in known):
                self._reader(i, op)
        if not self.made.keys().isdisjoint(self.graph.outputs):
            raise Unsupported("it is a result")
        return self.editor.finish()

    def _reader(self, i: int, op: Op) -> None:
        """``op`` reads values that have the long dimension, but was not needed for the scores."""
        if op.kind == "opaque" or not op.outputs:
            raise Unsupported(f"{op.kind} needs all of the dimension")
        family, (out,) = OPS[op.kind].family, op.outputs
        x = next(v for v in op.inputs if v in self.made)
        labels = self.labels[x]
        if op.kind == "dot_general":
            self._weighted(i, op)
        elif op.kind in _SEGMENT_FOLDS:
            self._fold(i, op)
        elif family in ELEMENTWISE:
            self.labels[out] = labels
            self.made[out] = self._result_as_rows(op)
        elif op.kind in ("transpose", "reshape"):
            to = tuple(labels[d] for d in op["permutation"]) if op.kind == "transpose" else self._reshaped(op, labels)
            if to is None:
                raise Unsupported("a reshape of the scores")
            self.labels[out], self.made[out] = to, self.made[x]
        else:
            raise Unsupported(f"{op.kind} needs all of the dimension")

    def _result_as_rows(self, op: Op) -> int:
        """The result of a pointwise op, or of one that moves dimensions, as rows."""
        (out,) = op.outputs
        if op.kind in ("transpose", "reshape"):
            return self._as_rows(op.inputs[0])
        inputs = [self._as_rows(v, self.labels[out]) if self.editor.shape(v) else v for v in op.inputs]
        return self._pointwise(op, inputs)

    def _pointwise(self, op: Op, inputs: Sequence[int]) -> int:
        """``op`` on its operands as rows, or as tables; floats of 16 bits become floats of 32."""
        if op.kind == "convert_element_type":
            return self.new.convert(inputs[0], self._wide(self.editor.dtype(op.outputs[0])))
        return self.new.copy(op, [self.new.convert(v, self._wide(self.editor.dtype(v))) for v in inputs])

    @staticmethod
    def _wide(dtype: str) -> str:
        return "float32" if dtype in _HALVES else dtype

    def _as_rows(self, v: int, labels: Labels | None = None) -> int:
        """``v``, whose dimensions are ``labels``, as rows."""
        known = self.labels.get(v) or self.placed.get(v)
        labels = known if labels is None else labels
        assert labels is not None
        if v in self.made:
            # A dimension of one element may be any of the scores', or none.
            if known is None or any(a != b for a, b, n in zip(known, labels, self.editor.shape(v), strict=True) if n != 1):
                raise Unsupported("two dimensions of one value")
            return self.made[v]
        self.placed[v] = labels
        op = self.editor.made_by(v)
        if op is not None and op.kind == "broadcast_in_dim":
            x, place = op.inputs[0], tuple(labels[d] for d in op["dims"])
            found = self._repeated(x, place)
        else:
            found = self._moved(v, labels, (*self.batch, self.long, *self.others))
            found = self.new.reshape(found, (self.rows, *self.other_sizes))
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
            return self.new.reshape(spread, (self.rows, *self.other_sizes))
        if x not in self.tables:
            table = self._spread(x, place, (*self.batch, *self.others))
            self.tables[x] = self.new.reshape(table, (self.segments, *self.other_sizes))
        return self._take(self.tables[x])

    def _of_folds(self, x: int, depth: int = 4) -> int | None:
        """``x`` as [batch, others..] where it is computed of folds alone, by a few pointwise ops."""
        x, _ = self._bare(x, (None,) * len(self.editor.shape(x)))
        op = self.editor.made_by(x)
        if x in self.tables or op is None or depth == 0 or op.kind == "opaque" or OPS[op.kind].family not in ELEMENTWISE:
            return self.tables.get(x)
        inputs: list[int] = []
        for v in op.inputs:
            number = self._number(v)
            found = number if number is not None else self._of_folds(v, depth - 1)
            if found is None:
                return None
            inputs.append(found)
        sizes = (self.segments, *self.other_sizes)
        if all(not self.editor.shape(v) for v in inputs):
            return None
        spread = [v if self.editor.shape(v) else self.new.broadcast(v, (), sizes) for v in inputs]
        return self._pointwise(op, spread)

    def _number(self, v: int) -> int | None:
        """The number that ``v`` holds everywhere."""
        while (op := self.editor.made_by(v)) is not None and op.kind == "broadcast_in_dim":
            (v,) = op.inputs
        return v if not self.editor.shape(v) else None

    def _bare(self, x: int, place: Labels) -> tuple[int, Labels]:
        """The value that ``x`` is but for dimensions of one element, and for a maximum with -inf; ``place`` as its own."""
        while x not in self.tables and (op := self.editor.made_by(x)) is not None:
            before = self.editor.shape(op.inputs[0]) if op.inputs else ()
            moved = kept_dims(before, self.editor.shape(x))
            if op.kind == "max" and (kept := [v for v in op.inputs if self.editor.constant_of(v) != -math.inf]) and len(kept) == 1:
                (x,) = kept
            elif op.kind in ("reshape", "broadcast_in_dim") and moved is not None:
                x, place = op.inputs[0], tuple(place[moved[d]] if d in moved else None for d in range(len(before)))
            else:
                break
        return x, place

    def _spread(self, x: int, place: Labels, whole: Sequence[int]) -> int:
        """``x`` with all dimensions of ``whole``, repeated along those that it lacks."""
        if any(n != 1 and (d is None or n != self.shape[d]) for n, d in zip(self.editor.shape(x), place, strict=True)):
            raise Unsupported("a dimension that the scores do not have")
        return self.new.spread(x, [None if d is None else whole.index(d) for d in place], [self.shape[d] for d in whole])

    def _take(self, table: int) -> int:
        return self.new.add("take", (table, self._ids()), label="broadcast_in_dim", axis=0, mode="clip", fill=None)

    def _ids(self) -> int:
        """For each row the number of the fold that it belongs to."""
        if self.index < 0:
            sizes = (self.segments, self.shape[self.long])
            counted = self.new.add("iota", (), "int32", like=self.value, dimension=0, shape=sizes)
            self.index = self.new.reshape(counted, (self.rows,))
        return self.index

    # -- products and folds

    def _product(self, op: Op) -> int:
        """The scores of a row: the sum of products of its numbers with those of its batch."""
        labels, dtype = self.labels[op.outputs[0]], str(op["accumulate"])
        # For each side: dimension of the scores -> the one of the operand that runs along.
        where = [{labels[to]: d for d, to in other_dims(self.editor, op, k).items()} for k in range(2)]
        if (self.long in where[0]) == (self.long in where[1]):
            raise Unsupported("both sides have the long dimension, or none")
        rows, table = (0, 1) if self.long in where[0] else (1, 0)
        if where[rows].keys() != {*self.batch, self.long} or where[table].keys() != {*self.batch, *self.others}:
            raise Unsupported("a product of other dimensions")
        if self._last_in_memory(op.inputs[rows]) not in op[_CONTRACTED[rows]]:
            raise Unsupported("the numbers of a row do not lie side by side")

        def side(k: int, whole: Sequence[int], sizes: tuple[int, ...]) -> int:
            """Operand ``k`` with its dimensions in the order of ``whole``, the contracted ones last."""
            order = [*(where[k][d] for d in whole), *op[_CONTRACTED[k]]]
            return self.new.reshape(self.new.transpose(op.inputs[k], order), sizes)

        flat = (math.prod(self.editor.shape(op.inputs[0])[d] for d in op["lhs_contract"]),)
        x = side(rows, (*self.batch, self.long), (self.rows, *flat))
        t = self._take(side(table, (*self.batch, *self.others), (self.segments, *self.other_sizes, *flat)))
        sizes = (self.rows, *self.other_sizes, *flat)
        x = self.new.broadcast(self.new.convert(x, dtype), (0, len(sizes) - 1), sizes)
        product = self.new.add("mul", (self.new.convert(t, dtype), x))
        made = self.new.add("reduce_sum", (product,), axes=(len(sizes) - 1,))
        return self.new.convert(made, self._wide(self.editor.dtype(op.outputs[0])))

    def _last_in_memory(self, v: int) -> int:
        """The dimension of ``v`` along which its numbers lie side by side in memory; a transposition moves no numbers there."""
        turned: list[Sequence[int]] = []
        last = len(self.editor.shape(v)) - 1
        while (op := self.editor.made_by(v)) is not None and op.kind == "transpose":
            turned.append(op["permutation"])
            (v,) = op.inputs
        for permutation in reversed(turned):
            last = permutation.index(last)
        return last

    def _fold(self, i: int, op: Op) -> None:
        (x,) = op.inputs
        labels = self.labels[x]
        if [labels[d] for d in op["axes"]] != [self.long]:
            raise Unsupported("a reduction over other dimensions as well")
        kept = tuple(d for k, d in enumerate(labels) if k not in op["axes"])
        table = self._scatter(_SEGMENT_FOLDS[op.kind], self.made[x], op.label)
        self.tables[op.outputs[0]] = table
        self._put(i, table, kept)

    def _weighted(self, i: int, op: Op) -> None:
        """Replace a product that contracts the long dimension by a sum of products over rows."""
        k = 0 if op.inputs[0] in self.made else 1
        if op.inputs[1 - k] in self.made:
            raise Unsupported("a product of two of them")
        sides = ("lhs", "rhs") if k == 0 else ("rhs", "lhs")
        labels = self.labels[op.inputs[k]]
        (mine, its), (batch, its_batch) = ([op[f"{s}_{what}"] for s in sides] for what in ("contract", "batch"))
        if [labels[d] for d in mine] != [self.long] or {labels[d] for d in batch} != set(self.batch):
            raise Unsupported("a product over other dimensions as well")
        value = self.graph.values[op.inputs[1 - k]]
        free = [d for d in range(len(value.shape)) if d not in its and d not in its_batch]
        if free and self._last_in_memory(op.inputs[1 - k]) not in free:
            raise Unsupported("the numbers of a row do not lie side by side")
        where = {labels[d]: e for d, e in zip(batch, its_batch, strict=True)}
        order = [*(where[d] for d in self.batch), *its, *free]
        wide = tuple(value.shape[d] for d in free)
        y = self.new.reshape(self.new.transpose(op.inputs[1 - k], order), (self.rows, *wide))
        sizes, ahead, dtype = (self.rows, *self.other_sizes, *wide), 1 + len(self.others), str(op["accumulate"])
        weights = self.new.broadcast(self.new.convert(self.made[op.inputs[k]], dtype), range(ahead), sizes)
        y = self.new.broadcast(self.new.convert(y, dtype), (0, *range(ahead, len(sizes))), sizes)
        table = self._scatter("scatter_sum", self.new.add("mul", (weights, y)), op.label)
        # The product has the batch dimensions first, then the free ones of its left operand, then those of its right one.
        mine_free = [labels[d] for d in range(len(labels)) if d not in mine and d not in batch]
        wide_labels = [-1 - n for n in range(len(wide))]
        ends = [*mine_free, *wide_labels] if k == 0 else [*wide_labels, *mine_free]
        self._put(i, table, (*(labels[d] for d in batch), *ends), wide)

    def _scatter(self, kind: str, rows: int, label: str) -> int:
        return self.new.add(kind, (rows, self._ids()), label=label, axis=0, n=self.segments, sorted=True)

    def _put(self, i: int, table: int, labels: Labels, wide: tuple[int, ...] = ()) -> None:
        """Make the result of op ``i`` from ``table``: dimensions in the order of ``labels``; those of ``wide`` are -1, -2, .."""
        op, (out,) = self.graph.ops[i], self.graph.ops[i].outputs
        order = [*self.batch, *self.others, *(-1 - n for n in range(len(wide)))]
        sizes = [*(self.shape[d] for d in (*self.batch, *self.others)), *wide]
        value = self.new.reshape(self.new.convert(table, self.editor.dtype(out)), tuple(sizes))
        real = [d for d in labels if d is not None]
        value = self.new.transpose(value, [order.index(d) for d in real])
        shape = self.editor.shape(out)
        params = make_params(new_sizes=shape)
        self.editor.replace(i, Op("reshape", (value,), (out,), params, op.source, label=op.label))

    def _moved(self, v: int, labels: Labels, whole: Sequence[int]) -> int:
        """``v`` with its dimensions in the order of ``whole``."""
        if any(d is None for d in labels):
            v = self.new.reshape(v, tuple(n for n, d in zip(self.editor.shape(v), labels, strict=True) if d is not None))
        real = [d for d in labels if d is not None]
        missing = [d for d in whole if d not in real]
        if any(self.shape[d] != 1 for d in missing):
            raise Unsupported("a value without some of the dimensions")
        v = self.new.transpose(v, [real.index(d) for d in whole if d in real])
        return self.new.reshape(v, tuple(self.shape[d] for d in whole))

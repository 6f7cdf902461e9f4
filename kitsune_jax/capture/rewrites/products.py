"""Rewrites of matrix products and of the index arithmetic, masks and lookups around them."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kitsune_jax.capture.edit import Captured, Draft, Step, pruned, with_params
from kitsune_jax.ops.graph import Graph, Op, Param, Scalar, Value, make_params
from kitsune_jax.ops.spec import is_float, is_narrow
from kitsune_jax.ops.table import OPS

# ----------------------------------------------------------------------------------------------------------------------------------
# Weight gradients without the transposition that autodiff puts behind them.
#
# Comes in: a ``Captured`` without dead ops. Goes out: the same, where ``transpose(dY^T X)`` stands as ``X^T dY``. The product is
# a sink of the stream, so its result can be made in either orientation at the same cost, while a transposition behind it would be
# a pass over memory. The gradient of a matrix that belongs to a row (an expert's weight, taken for each token) is an outer
# product for each row, ``transpose(spread(y) * spread(x))``: its operands are spread in the order of the result instead.
# Invariant: every value keeps its shape and meaning; an element of a gradient is the same sum or product as before.
# ----------------------------------------------------------------------------------------------------------------------------------


def fold_transposes(captured: Captured) -> Captured:
    """Rewrite the transpositions of ``captured`` whose operand, a weight gradient or an outer product, nothing else reads."""
    graph, draft = captured.graph, Draft(captured)
    before: dict[int, list[tuple[Op, Step]]] = {}
    reads = Counter([*graph.outputs, *(v for op in graph.ops for v in op.inputs)])
    maker = graph.producers()
    for i, op in enumerate(graph.ops):
        first = maker.get(op.inputs[0]) if op.kind == "transpose" else None
        if first is None or reads[op.inputs[0]] > 1:
            continue
        product = graph.ops[first]
        if is_weight_gradient(product, graph.values) and op["permutation"] == _exchange(graph, product):
            contract = {"lhs_contract": product["rhs_contract"], "rhs_contract": product["lhs_contract"]}
            draft.ops[i] = with_params(product, product.inputs[::-1], op.outputs, **contract)
            draft.steps[i] = captured.steps[first]
        elif product.kind == "mul" and (spreads := _spreads(graph, maker, product, op["permutation"])) is not None:
            inputs, shape = list(product.inputs), graph.values[op.outputs[0]].shape
            for k, (spread, dims) in spreads.items():
                inputs[k] = draft.value(inputs[k], shape)
                other = with_params(graph.ops[spread], graph.ops[spread].inputs, (inputs[k],), shape=shape, dims=dims)
                before.setdefault(i, []).append((other, captured.steps[spread]))
            draft.ops[i] = with_params(product, inputs, op.outputs)
            draft.steps[i] = captured.steps[first]
    return draft.finish(before)


def _spreads(
    graph: Graph, maker: Mapping[int, int], product: Op, permutation: Sequence[int]
) -> dict[int, tuple[int, tuple[int, ...]]] | None:
    """For each operand of ``product`` that is no number, the op that spreads it and where its dimensions come in the transposed
    product; None where one is not spread, or would have to be transposed itself."""
    found = {}
    for k, v in enumerate(product.inputs):
        if not graph.values[v].shape:
            continue
        spread = maker.get(v)
        if spread is None or graph.ops[spread].kind != "broadcast_in_dim":
            return None
        dims = tuple(permutation.index(d) for d in graph.ops[spread]["dims"])
        if dims != tuple(sorted(dims)):
            return None
        found[k] = spread, dims
    return found


def is_weight_gradient(op: Op, values: Sequence[Value]) -> bool:
    """Both operands are contracted over leading dimensions: rows, as opposed to the columns of a layer's product."""
    if op.kind != "dot_general" or op["lhs_batch"]:
        return False
    sides = zip(op.inputs, (op["lhs_contract"], op["rhs_contract"]), strict=True)
    return all(set(contract) == set(range(len(contract))) < set(range(len(values[v].shape))) for v, contract in sides)


def _exchange(graph: Graph, op: Op) -> tuple[int, ...]:
    """The permutation that puts the right operand's free dimensions in front of the left one's."""
    left, right = (len(graph.values[v].shape) - len(op["lhs_contract"]) for v in op.inputs)
    return (*range(left, left + right), *range(left))


# ----------------------------------------------------------------------------------------------------------------------------------
# Weight gradients of concatenations as one product for each part.
#
# Comes in: a ``Captured`` without dead ops. Goes out: the same, where ``concatenate(a, b)^T dY`` stands as the concatenation of
# ``a^T dY`` and ``b^T dY``. The parts are in memory or on chip anyway; their concatenation would have to be made again for the
# backward pass, or handed to it as rows whose pitch suits no vector load. Invariant: every value keeps its shape and meaning; an
# element of a gradient is the same sum as before.
# ----------------------------------------------------------------------------------------------------------------------------------

# More parts, or parts all narrower than this, make products too small to be worth a copy of a tile.
_MOST_PARTS, _LEAST_COLUMNS = 4, 32


Worth = Callable[[Op, int, Draft], bool]  # (a concatenation, how many of its dimensions are rows, the draft it stands in)


def _has_few_wide_parts(join: Op, rows: int, draft: Draft) -> bool:
    columns = [math.prod(draft.values[v].shape[rows:]) for v in join.inputs]
    return len(columns) <= _MOST_PARTS and max(columns) >= _LEAST_COLUMNS


def split_gradients(captured: Captured, worth: Worth = _has_few_wide_parts) -> Captured:
    """Divide the weight gradients of ``captured`` that read a concatenation of columns which is ``worth`` it."""
    draft = Draft(captured)
    draft.ops, draft.steps = [], []
    joins = {op.outputs[0]: op for op in captured.graph.ops if op.kind == "concatenate"}
    for op, step in zip(captured.graph.ops, captured.steps, strict=True):
        _add(draft, joins, op, step, worth)
    return draft.finish()


def _add(draft: Draft, joins: dict[int, Op], op: Op, step: Step, worth: Worth) -> None:
    for side in range(2) if is_weight_gradient(op, draft.values) else ():
        join = joins.get(op.inputs[side])
        rows = len(op["lhs_contract"])
        if join is not None and _joins_columns(join, rows, draft.values) and worth(join, rows, draft):
            _split(draft, joins, op, step, side, worth)
            return
    draft.ops.append(op)
    draft.steps.append(step)


def _joins_columns(join: Op, rows: int, values: Sequence[Value]) -> bool:
    """A concatenation of several parts behind the first ``rows`` dimensions."""
    columns = [math.prod(values[v].shape[rows:]) for v in join.inputs]
    return join["dimension"] >= rows and len(columns) > 1 and min(columns) > 0


def _split(draft: Draft, joins: dict[int, Op], op: Op, step: Step, side: int, worth: Worth) -> None:
    join, rows = joins[op.inputs[side]], len(op["lhs_contract"])
    left = len(draft.values[op.inputs[0]].shape) - rows
    dimension = join["dimension"] - rows + (left if side else 0)
    (whole,) = op.outputs
    made = []
    for part in join.inputs:
        shape = list(draft.values[whole].shape)
        shape[dimension] = draft.values[part].shape[join["dimension"]]
        made.append(draft.value(whole, shape))
        inputs = (part, op.inputs[1]) if side == 0 else (op.inputs[0], part)
        _add(draft, joins, Op(op.kind, inputs, (made[-1],), op.params, op.source, label=op.label), step, worth)
    params = make_params(dimension=dimension)
    draft.ops.append(Op("concatenate", tuple(made), (whole,), params, op.source, label=op.label))
    draft.steps.append(step)


# ----------------------------------------------------------------------------------------------------------------------------------
# Products of which only some columns are used: the weights are sliced instead of the result.
#
# Comes in: a ``Captured`` without dead ops. Goes out: the same, where ``slice(x @ w)`` stands as ``x @ slice(w)``. The gradient
# of a concatenation is such a slice of the product behind it, where nobody wants the gradient of the other parts. Invariant:
# every value that is left keeps its shape and meaning; an element of the result is the same sum as before.
#
# The sliced weights take the product's place and the product takes the slice's, so no op moves in front of its operands.
# ----------------------------------------------------------------------------------------------------------------------------------


def fold_slices(captured: Captured) -> Captured:
    """Rewrite the slices of ``captured`` that take columns of a product which nothing else reads."""
    draft = Draft(captured)
    reads = Counter([*captured.graph.outputs, *(v for op in draft.ops for v in op.inputs)])
    maker = captured.graph.producers()
    for i, op in enumerate(captured.graph.ops):
        first = maker.get(op.inputs[0]) if op.kind == "slice" else None
        if first is None or reads[op.inputs[0]] > 1:
            continue
        if is_layer(draft.ops[first], draft.values) and _keeps_rows(op, draft.values):
            _fold(draft, first, i)
            maker[draft.ops[first].outputs[0]] = first
    return draft.finish()


def is_layer(op: Op, values: Sequence[Value]) -> bool:
    """A product of rows with a matrix: its last dimension is the matrix's only free one."""
    if op.kind != "dot_general" or op["lhs_batch"] or 0 in op["lhs_contract"]:  # rows contracted: a weight gradient
        return False
    x, w = (len(values[v].shape) for v in op.inputs)
    return w - len(op["rhs_contract"]) == 1 and x > len(op["lhs_contract"])


def _keeps_rows(cut: Op, values: Sequence[Value]) -> bool:
    shape = values[cut.inputs[0]].shape
    strides = cut["strides"] or (1,) * len(shape)
    return all((cut["start"][d], cut["limit"][d], strides[d]) == (0, shape[d], 1) for d in range(len(shape) - 1))


def columns_of(cut: Op, values: Sequence[Value]) -> tuple[int, int] | None:
    """The first of the columns (the last dimension) that the slice ``cut`` takes, and the one behind them; None if it is not so."""
    if not _keeps_rows(cut, values) or (cut["strides"] or (1,))[-1] != 1:
        return None
    return cut["start"][-1], cut["limit"][-1]


def _fold(draft: Draft, first: int, second: int) -> None:
    product, cut = draft.ops[first], draft.ops[second]
    x, w = product.inputs
    wide = draft.values[w].shape
    (free,) = (d for d in range(len(wide)) if d not in product["rhs_contract"])

    def at_free(last: int, others: Sequence[int]) -> tuple[int, ...]:
        return tuple(last if d == free else n for d, n in enumerate(others))

    sizes = at_free(draft.values[cut.outputs[0]].shape[-1], wide)
    start, limit = at_free(cut["start"][-1], [0] * len(wide)), at_free(cut["limit"][-1], wide)
    strides = at_free((cut["strides"] or (1,))[-1], [1] * len(wide))
    narrow = draft.value(w, sizes)
    draft.ops[first] = with_params(cut, (w,), (narrow,), start=start, limit=limit, strides=strides)
    draft.ops[second] = with_params(product, (x, narrow), cut.outputs)
    draft.steps[first], draft.steps[second] = draft.steps[second], draft.steps[first]


# ----------------------------------------------------------------------------------------------------------------------------------
# Masks of rectified values, read off the result instead of the argument.
#
# Comes in: a ``Captured``. Goes out: the same with each ``z > 0`` where ``h = max(z, 0)`` is at hand turned into ``h > 0``. They
# agree for every z, NaN and infinities included. The gradient of a ReLU asks for ``z > 0``, and ``h`` is kept for the weight
# gradient of the next layer anyway: so ``z`` need not be kept, and the matmul that makes it can rectify in its registers.
# ----------------------------------------------------------------------------------------------------------------------------------


def masks_of_results(captured: Captured) -> Captured:
    """``captured`` with comparisons of a rectified value's argument with 0 made to read the rectified value."""
    graph, draft = captured.graph, Draft(captured)
    rectified: dict[int, int] = {}  # argument -> result, of the ReLUs so far
    for i, op in enumerate(graph.ops):
        if op.kind == "max" and (z := _against_zero(graph, op, (0, 1))) is not None:
            rectified.setdefault(z, op.outputs[0])
        elif op.kind in ("gt", "lt") and (z := _against_zero(graph, op, (0,) if op.kind == "gt" else (1,))) in rectified:
            draft.ops[i] = with_params(op, [rectified[v] if v == z else v for v in op.inputs], op.outputs)
    return draft.finish()


def _against_zero(graph: Graph, op: Op, places: tuple[int, ...]) -> int | None:
    """The operand of ``op``, in one of ``places``, whose partner is the literal 0."""
    for p in places:
        other = graph.values[op.inputs[1 - p]].literal
        if other is not None and not isinstance(other, bool) and other == 0 and graph.values[op.inputs[p]].literal is None:
            return op.inputs[p]
    return None


# ----------------------------------------------------------------------------------------------------------------------------------
# Sums by index whose rows may be added up in another order in every run, because the user asked for no more.
#
# Comes in: a ``Captured``. Goes out: the same, with ``unordered`` among the parameters of every ``scatter_sum``. Invariant:
# nothing else changes; whoever does not look at the parameter adds up in one order.
# ----------------------------------------------------------------------------------------------------------------------------------


def allow_any_order(captured: Captured) -> Captured:
    """``captured``, in which sums by index need not have the same bits in every run."""
    draft = Draft(captured)
    draft.ops = [_allowed(op) for op in draft.ops]
    return draft.finish()


def _allowed(op: Op) -> Op:
    if op.kind != "scatter_sum":
        return op
    return dataclasses.replace(op, params=make_params(**{**dict(op.params), "unordered": True}))


# ----------------------------------------------------------------------------------------------------------------------------------
# Indices made in the shape in which they are compared: ``arange(n)[None, :]`` repeated to [m, n] is an iota of [m, n].
#
# Comes in: a ``Captured``. Goes out: the same, with what is computed of indices, constants and single integers alone (the place
# of a piece of a text), and then repeated to be combined with more of its kind, computed in that shape. An index along a
# dimension that a stream cuts into tiles, or that is worked off in blocks, is known to each of them; an array of indices would
# have to be read, and nobody could tell from it which blocks a causal mask hides. Invariant: every value keeps its shape and
# meaning. What is combined with anything else stays the vector that it is, and so does what a function such as a power makes of
# few numbers: in the shape of the scores of an attention, the slopes of its heads would be made again for every query and key.
# ----------------------------------------------------------------------------------------------------------------------------------

Params = tuple[tuple[str, Param], ...]
Place = tuple["int | None", ...]  # for each dimension of a value the one of the new shape that it is; None: it has one element
_COSTLY = 9  # operations for an element, of a function of floats; of integers: a remainder tells which block an index is in
# Operations (3 ms of a core) up to which such a function is made again for every element: the angles of rotary embeddings for each
# token and pair of columns are, so that nothing of them is left in front of the pipeline.
_FEW = 2**25
Want = tuple[int, tuple[int, ...], Place]  # a value, the shape in which it is wanted, and its place there


def spread_indices(captured: Captured) -> Captured:
    """``captured`` with repeated indices that only other indices are combined with made where they are read."""
    return _Spreader(captured).run() if any(op.kind == "iota" for op in captured.graph.ops) else captured


class _Spreader:
    def __init__(self, captured: Captured):
        self.captured, self.draft, self.maker = captured, Draft(captured), captured.graph.producers()
        self.ops: list[Op] = []
        self.steps: list[Step] = []
        self.known: dict[Want, int | None] = {}

    def run(self) -> Captured:
        graph = self.captured.graph
        fixed = {
            v for v, value in enumerate(graph.values) if value.literal is not None or value.shape == () and "int" in value.dtype
        }
        for op in graph.ops:
            if self._is_index_work(op) and fixed.issuperset(op.inputs):
                fixed.update(op.outputs)
        kept, found = set(graph.outputs), set[int]()
        for op in graph.ops:
            if OPS.get(op.kind) is None or OPS[op.kind].family != "pointwise" or not fixed.issuperset(op.outputs):
                kept.update(op.inputs)
        for i, op in enumerate(graph.ops):
            if op.kind == "broadcast_in_dim" and fixed.issuperset(op.outputs) and kept.isdisjoint(op.outputs):
                shape = graph.values[op.outputs[0]].shape
                made = self._made(op.outputs[0], shape, tuple(range(len(shape))))
                if made is not None and self.draft.values[made].shape and self.ops and self.ops[-1].outputs == (made,):
                    self.ops[-1] = Op(
                        self.ops[-1].kind, self.ops[-1].inputs, op.outputs, self.ops[-1].params, op.source, label=op.label
                    )
                    self.known = {k: v for k, v in self.known.items() if v != made}
                    found.add(i)
                    continue
            self.ops.append(op)
            self.steps.append(self.captured.steps[i])
        if not found:
            return self.captured
        self.draft.ops, self.draft.steps = self.ops, self.steps
        return self.draft.finish()

    def _is_index_work(self, op: Op) -> bool:
        spec = OPS.get(op.kind)
        return spec is not None and spec.family in ("iota", "pointwise", "convert", "broadcast", "reshape") and len(op.outputs) == 1

    def _made(self, v: int, shape: tuple[int, ...], place: Place) -> int | None:
        """``v`` in ``shape``, made by new ops; None where that cannot be said. What has no dimensions stays as it is."""
        operands, work = dict[Want, "Sequence[Want] | None"](), [(v, shape, place)]
        while work:
            want = work.pop()
            if want not in self.known and want not in operands:
                operands[want] = self._operands(*want)
                work += operands[want] or ()
        for want in sorted(operands, key=lambda w: self.maker.get(w[0], -1)):  # each behind its operands
            self.known[want] = self._again(*want, operands[want])
        return self.known[v, shape, place]

    def _operands(self, v: int, shape: tuple[int, ...], place: Place) -> Sequence[Want] | None:
        """What ``v`` in ``shape`` is made of; None where that cannot be said."""
        if not self.draft.values[v].shape:
            return ()
        i = self.maker.get(v)
        if i is None:
            return None
        if self._repeated(v, shape):
            return ()
        op, sizes = self.captured.graph.ops[i], self.draft.values[v].shape
        if op.kind == "iota":
            d = place[op["dimension"]]
            return None if d is None or shape[d] != sizes[op["dimension"]] else ()
        if op.kind == "broadcast_in_dim":
            (x,) = op.inputs
            pairs = list(zip(self.draft.values[x].shape, op["dims"], strict=True))
            return ((x, shape, tuple(place[d] if n == sizes[d] else None for n, d in pairs)),)
        if op.kind == "reshape":
            (x,) = op.inputs
            before = self.draft.values[x].shape
            real, of_x = ([d for d, n in enumerate(s) if n != 1] for s in (sizes, before))
            if [sizes[d] for d in real] != [before[d] for d in of_x]:
                return None
            moved = dict(zip(of_x, real, strict=True))
            return ((x, shape, tuple(place[moved[d]] if d in moved else None for d in range(len(before)))),)
        if OPS[op.kind].family not in ("pointwise", "convert"):
            return None
        return [(x, shape, place if self.draft.values[x].shape else ()) for x in op.inputs]

    def _repeated(self, v: int, shape: tuple[int, ...]) -> bool:
        """Is ``v`` made by a costly function, of so many fewer elements than ``shape`` has that it stays what it is?"""
        spec = OPS[self.captured.graph.ops[self.maker[v]].kind]
        costly = spec.family == "pointwise" and spec.flops >= _COSTLY and "int32" not in spec.dtypes
        own, wanted = math.prod(self.draft.values[v].shape), math.prod(shape)
        return costly and own > 1 and (wanted - own) * spec.flops > _FEW

    def _again(self, v: int, shape: tuple[int, ...], place: Place, operands: Sequence[Want] | None) -> int | None:
        if operands is None:
            return None
        if not self.draft.values[v].shape:
            return v
        op, made = self.captured.graph.ops[self.maker[v]], [self.known[want] for want in operands]
        if self._repeated(v, shape):
            dims, sizes = zip(
                *((d, n) for d, n in zip(place, self.draft.values[v].shape, strict=True) if d is not None), strict=True
            )
            if sizes != self.draft.values[v].shape:
                v = self._new(op, "reshape", (v,), v, sizes, make_params(new_sizes=sizes))
            return self._new(op, "broadcast_in_dim", (v,), v, shape, make_params(shape=shape, dims=dims))
        if op.kind == "iota":
            return self._new(op, op.kind, (), v, shape, make_params(shape=shape, dimension=place[op["dimension"]]))
        if op.kind in ("broadcast_in_dim", "reshape"):
            return made[0]
        inputs = tuple(x for x in made if x is not None)
        if len(inputs) < len(made) or all(not self.draft.values[x].shape for x in inputs):
            return None
        return self._new(op, op.kind, inputs, v, shape, op.params)

    def _new(self, like: Op, kind: str, inputs: tuple[int, ...], v: int, shape: tuple[int, ...], params: Params) -> int:
        made = self.draft.value(v, shape)
        self.ops.append(Op(kind, inputs, (made,), params, like.source, label=like.label))
        self.steps.append(self.captured.steps[self.maker[like.outputs[0]]])
        return made


# ----------------------------------------------------------------------------------------------------------------------------------
# Rows taken by an index and multiplied by a matrix: the product is made of the table, and its rows are taken.
#
# Comes in: a ``Captured`` without dead ops. Goes out: the same with fewer multiplications, where an index takes more rows than
# the table has (each node of a graph has several edges). What is done to all taken rows alike is done once to each row of the
# table:
#
# * ``take(x, i) @ w`` becomes ``take(x @ w, i)``, and ``concatenate(e, take(x, i)) @ w`` the sum of ``e @ w[:k]`` and
#   ``take(x @ w[k:], i)``: the first layer of a network over edges;
# * ``scatter_sum(u @ w, i)`` becomes ``scatter_sum(u, i) @ w``: its gradient by the table;
# * ``take(x, i)^T u`` becomes ``x^T scatter_sum(u, i)``: its gradient by the weights, which shares the sum with the one before.
#
# Invariants: every value that is left keeps its shape and meaning. An element of a result is the same sum in another order; what
# was a sum of products in float32 stays one in float32, also where it is now rounded in a bfloat16 array's place. Indices out of
# range give what they gave before. A row of the table that nobody takes counts for nothing, also where it holds an infinity or a
# NaN.
# ----------------------------------------------------------------------------------------------------------------------------------

# An index has to take every row of its table so often, on average: below, a larger array of results outweighs what is saved.
_LEAST_USES = 2.0


def move_indexing(captured: Captured) -> Captured:
    """Rewrite the products of ``captured`` that read taken rows, or whose rows are summed by an index."""
    if not any(op.kind in ("take", "scatter_sum") for op in captured.graph.ops):
        return captured
    divided = pruned(split_gradients(captured, _has_taken_part))
    moved = _Rewriter(divided).run()
    return captured if moved is divided else dataclasses.replace(moved, saves=True)


def _has_taken_part(join: Op, rows: int, draft: Draft) -> bool:
    """Is a part of ``join`` taken by an index that runs over the first ``rows`` dimensions, or fewer?"""
    makers = {v: op for op in draft.captured.graph.ops for v in op.outputs if op.kind == "take"}
    parts = [makers.get(v) for v in join.inputs]
    return any(op is not None and _is_reused(op, draft) and _is_summable(op) for op in parts)


def _is_summable(take: Op) -> bool:
    """Can the rows it takes be replaced by sums over the rows of its table? Not those that are filled with what is not zero."""
    return take["mode"] != "fill" or take["fill"] == 0


def _is_reused(op: Op, draft: Draft) -> bool:
    """Does the ``take`` or ``scatter_sum`` have several rows of its index for each row of its table?"""
    values = draft.values
    n = op["n"] if op.kind == "scatter_sum" else values[op.inputs[0]].shape[0] if values[op.inputs[0]].shape else 0
    return op["axis"] == 0 and n > 0 and math.prod(values[op.inputs[1]].shape) >= _LEAST_USES * n


class _Rewriter:
    """Goes through the ops in order and appends each of them, or what stands for it."""

    def __init__(self, captured: Captured):
        self.draft = Draft(captured)
        self.ops, self.draft.ops, self.draft.steps = captured.graph.ops, [], []
        self.steps = captured.steps
        self.maker = {v: op for op in self.ops for v in op.outputs}
        self.made: dict[tuple[str, tuple[int, ...], tuple[tuple[str, Param], ...]], int] = {}
        self.promised = {op.inputs[1] for op in self.ops if op.kind.startswith("scatter_") and op["sorted"]}
        # Indices of which sums are needed below and above the table as well: there a gradient by weights reads the nearest row.
        self.open = {take.inputs[1] for op in self.ops for _, take in self._taken_sides(op) if take["mode"] == "clip"}

    def run(self) -> Captured:
        for op, step in zip(self.ops, self.steps, strict=True):
            if not (self._product(op, step) or self._sum(op, step) or self._gradient(op, step)):
                self.draft.ops.append(op)
                self.draft.steps.append(step)
        return self.draft.finish()

    # --- what is appended ---------------------------------------------------------------------------------------------------------

    def _add(self, kind: str, inputs: Sequence[int], like: int, shape: Sequence[int], at: tuple[Op, Step], dtype: str = "",
             /, **params: Param) -> int:  # fmt: skip
        """A new op in the place of ``at``; the one that is there already where an equal one is."""
        key = kind, tuple(inputs), make_params(**params)
        if key not in self.made:
            op, step = at
            self.made[key] = self.draft.value(like, shape, dtype)
            self.draft.ops.append(Op(kind, key[1], (self.made[key],), key[2], op.source, label=_label(kind, op)))
            self.draft.steps.append(step)
        return self.made[key]

    def _shape(self, v: int) -> tuple[int, ...]:
        return self.draft.values[v].shape

    def _dtype(self, v: int) -> str:
        return self.draft.values[v].dtype

    def _cut(self, w: int, dim: int, start: int, size: int, at: tuple[Op, Step]) -> int:
        """``size`` rows of dimension ``dim`` of ``w`` from ``start`` on."""
        shape = self._shape(w)
        if size == shape[dim]:
            return w
        first = [start if d == dim else 0 for d in range(len(shape))]
        limit = [start + size if d == dim else n for d, n in enumerate(shape)]
        sizes = [size if d == dim else n for d, n in enumerate(shape)]
        return self._add("slice", (w,), w, sizes, at, start=first, limit=limit, strides=(1,) * len(shape))

    def _give(self, op: Op, kind: str, inputs: Sequence[int], step: Step, **params: Param) -> bool:
        """The last of the ops that stand for ``op``, whose result it makes."""
        self.draft.ops.append(Op(kind, tuple(inputs), op.outputs, make_params(**params), op.source, label=_label(kind, op)))
        self.draft.steps.append(step)
        return True

    # --- take(x, i) @ w -----------------------------------------------------------------------------------------------------------

    def _taken(self, v: int, dim: int) -> Op | None:
        """The ``take`` that made ``v``, if it takes rows whose dimension ``dim`` comes from a table with fewer of them."""
        op = self.maker.get(v)
        if op is None or op.kind != "take" or not _is_reused(op, self.draft) or dim < len(self._shape(op.inputs[1])):
            return None
        return op if op["mode"] != "fill" or op["fill"] in (None, 0) else None  # a row of NaN gives a row of NaN

    def _product(self, op: Op, step: Step) -> bool:
        if op.kind != "dot_general" or op["lhs_batch"] or len(op["lhs_contract"]) != 1 or not is_float(self._dtype(op.outputs[0])):
            return False
        x, w = op.inputs
        (c,), (k,) = op["lhs_contract"], op["rhs_contract"]
        join = self.maker.get(x)
        parts = join.inputs if join is not None and join.kind == "concatenate" and join["dimension"] == c else (x,)
        takes = [self._taken(v, c) for v in parts]
        if not any(takes):
            return False
        at, out = (op, step), op.outputs[0]
        wide = op["accumulate"] if is_narrow(self._dtype(out)) else self._dtype(out)
        direct, first = list[tuple[list[int], int, int]](), 0
        found = list[tuple[tuple[int, int], dict[str, Param]]]()
        for v, take in zip(parts, takes, strict=True):
            size = self._shape(v)[c]
            if take is not None:
                weight = self._cut(w, k, first, size, at)
                table, index = take.inputs
                inner = c - len(self._shape(index)) + 1
                shape = (self._shape(table)[0], *self._shape(out)[len(self._shape(index)) :])
                params = {**dict(op.params), "lhs_contract": (inner,)}
                product = self._add("dot_general", (table, weight), out, shape, at, wide, **params)
                found.append(((product, index), dict(take.params)))
            elif direct and direct[-1][1] + direct[-1][2] == first:  # beside the part before: one product for both
                direct[-1] = [*direct[-1][0], v], direct[-1][1], direct[-1][2] + size
            else:
                direct.append(([v], first, size))
            first += size
        left = []
        for vs, start, size in direct:
            sizes = [size if d == c else n for d, n in enumerate(self._shape(vs[0]))]
            v = vs[0] if len(vs) == 1 else self._add("concatenate", vs, vs[0], sizes, at, dimension=c)
            weight = self._cut(w, k, start, size, at)
            left.append(self._add("dot_general", (v, weight), out, self._shape(out), at, wide, **dict(op.params)))
        if not left and len(found) == 1 and wide == self._dtype(out):
            return self._give(op, "take", found[0][0], step, **found[0][1])
        left += [self._add("take", inputs, out, self._shape(out), at, wide, **params) for inputs, params in found]
        last = left.pop() if wide == self._dtype(out) else None
        total = left[0]
        for v in left[1:]:
            total = self._add("add", (total, v), out, self._shape(out), at, wide)
        if last is not None:
            return self._give(op, "add", (total, last), step)
        return self._give(op, "convert_element_type", (total,), step, new_dtype=self._dtype(out))

    # --- scatter_sum(u @ w, i) ----------------------------------------------------------------------------------------------------

    def _sum(self, op: Op, step: Step) -> bool:
        if op.kind != "scatter_sum" or not self._may_reorder(op.inputs[0]) or not _is_reused(op, self.draft):
            return False
        updates, index = op.inputs
        cut = self.maker.get(updates)
        columns = columns_of(cut, self.draft.values) if cut is not None and cut.kind == "slice" else None
        product = self.maker.get(cut.inputs[0]) if cut is not None and columns is not None else cut
        if product is None or not is_layer(product, self.draft.values) or len(product["lhs_contract"]) != 1:
            return False
        u, w = product.inputs
        rank, (c,), (k,) = len(self._shape(index)), product["lhs_contract"], product["rhs_contract"]
        if c < rank or self._shape(u)[c] > 2 * self._shape(updates)[-1] or self._dtype(u) != self._dtype(updates):
            return False
        at = op, step
        if columns is not None:
            w = self._cut(w, 1 - k, columns[0], columns[1] - columns[0], at)
        total = self._scattered(u, index, op["n"], at)
        params = {**dict(product.params), "lhs_contract": (c - rank + 1,)}
        return self._give(op, "dot_general", (total, w), step, **params)

    def _may_reorder(self, v: int) -> bool:
        """A sum of many numbers of 11 bits that end at 65 504 may overflow where their products with small weights do not."""
        return is_float(self._dtype(v)) and self._dtype(v) != "float16"

    def _scattered(self, u: int, index: int, n: int, at: tuple[Op, Step]) -> int:
        shape = (n, *self._shape(u)[len(self._shape(index)) :])
        return self._add("scatter_sum", (u, index), u, shape, at, axis=0, n=n, sorted=index in self.promised)

    def _nearest(self, u: int, index: int, n: int, at: tuple[Op, Step]) -> int:
        """The sum of the rows of ``u`` for each of ``n`` rows of a table, where an index out of range counts for the nearest row.

        What is out of range is a sum of its own, of two rows, so that the first sum is that of the gradient by the table as well,
        and nothing is cut out of an array between a region over edges and the next one over nodes.
        """
        if index in self.open and n == 1:
            index = self._add("sub", (index, index), index, self._shape(index), at)
            return self._scattered(u, index, n, at)
        total = self._scattered(u, index, n, at)
        if index not in self.open:
            return total
        ends = self._add("scatter_sum", (u, self._end_of(index, -1, n, at)), u, (2, *self._shape(total)[1:]), at,
                         axis=0, n=2, sorted=False)  # fmt: skip
        rows = self._add("iota", (), index, (n,), at, "int32", shape=(n,), dimension=0)
        outside = self._add("take", (ends, self._end_of(rows, 0, n - 1, at)), total, self._shape(total), at,
                            axis=0, mode="fill", fill=0)  # fmt: skip
        return self._add("add", (total, outside), total, self._shape(total), at)

    def _end_of(self, index: int, first: int, last: int, at: tuple[Op, Step]) -> int:
        """0 where ``index`` is at most ``first``, 1 where it is at least ``last``, 2 in between."""
        dtype, shape = self._dtype(index), self._shape(index)
        if dtype.endswith(("8", "16")):
            index = self._add("convert_element_type", (index,), index, shape, at, "int32", new_dtype="int32")
            dtype = "int32"

        def where(kind: str, bound: int) -> int:
            found = self._add(kind, (index, self._literal(bound, dtype)), index, shape, at, "bool")
            return self._add("convert_element_type", (found,), index, shape, at, "int32", new_dtype="int32")

        above = where("ge", last)
        left = self._add("sub", (self._literal(2, "int32"), above), above, shape, at)
        below = where("lt", first + 1)
        return self._add("sub", (left, self._add("add", (below, below), below, shape, at)), below, shape, at)

    def _literal(self, scalar: Scalar, dtype: str) -> int:
        key = f"literal {scalar!r}", (), make_params(dtype=dtype)
        if key not in self.made:
            self.made[key] = len(self.draft.values)
            self.draft.values.append(Value((), dtype, scalar))
            self.draft.avals.append(None)
        return self.made[key]

    # --- take(x, i)^T u -----------------------------------------------------------------------------------------------------------

    def _taken_sides(self, op: Op) -> list[tuple[int, Op]]:
        """The operands of the weight gradient ``op``, by their numbers, that are rows taken from a table with fewer of them."""
        if not is_weight_gradient(op, self.draft.values):
            return []
        pairs = list(zip(op["lhs_contract"], op["rhs_contract"], strict=True))
        found = []
        for side in range(2):
            take, other = self.maker.get(op.inputs[side]), op.inputs[1 - side]
            if take is None or take.kind != "take" or not _is_reused(take, self.draft) or not _is_summable(take):
                continue
            whole = all((d, d) in pairs for d in range(len(self._shape(take.inputs[1]))))
            if whole and self._may_reorder(other) and self._dtype(take.inputs[0]) == self._dtype(other):
                found.append((side, take))
        return found

    def _gradient(self, op: Op, step: Step) -> bool:
        sides = self._taken_sides(op)
        if not sides:
            return False
        (side, take), at = sides[0], (op, step)
        (table, index), other = take.inputs, op.inputs[1 - side]
        n, rank = self._shape(table)[0], len(self._shape(index))
        pairs = [(a - rank + 1, b - rank + 1) for a, b in zip(op["lhs_contract"], op["rhs_contract"], strict=True) if a >= rank]
        contract = {"lhs_contract": (0, *(a for a, _ in pairs)), "rhs_contract": (0, *(b for _, b in pairs))}
        params = {**dict(op.params), **contract}

        total = self._nearest(other, index, n, at)
        used = self._used(table, total, at)
        return self._give(op, "dot_general", (used, total) if side == 0 else (total, used), step, **params)

    def _used(self, rows: int, sums: int, at: tuple[Op, Step]) -> int:
        """``rows``, with zeros where the row of ``sums`` is zero: an infinity there would make a NaN."""
        dtype, shape = self._dtype(sums), self._shape(sums)
        used = self._add("ne", (sums, self._literal(0.0, dtype)), sums, shape, at, "bool")
        if len(shape) > 1:
            used = self._add("reduce_or", (used,), used, shape[:1], at, axes=tuple(range(1, len(shape))))
        whole = self._shape(rows)
        where = self._add("broadcast_in_dim", (used,), used, whole, at, shape=whole, dims=(0,))
        zeros = self._add("broadcast_in_dim", (self._literal(0.0, self._dtype(rows)),), rows, whole, at, shape=whole, dims=())
        return self._add("select_n", (where, zeros, rows), rows, whole, at)


def _label(kind: str, op: Op) -> str:
    """What the user calls an op of that kind that stands for ``op``, or for a part of it."""
    return {op.kind: op.label, "take": "gather", "scatter_sum": "scatter-add", "broadcast_in_dim": "broadcast"}.get(kind, kind)

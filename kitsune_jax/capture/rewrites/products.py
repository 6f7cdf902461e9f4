"""Rewrites of matrix products, and of the index arithmetic, masks and lookups around them.

Comes in: a ``Captured``, for most of them without dead ops. Goes out: the same with cheaper products or indices. Invariant: every
value that is left keeps its shape and meaning; only ``move_indexing`` changes the order in which numbers are added up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from kitsune_jax.capture.edit import Captured, GraphEditor, Inserter, kept_dims, pruned, with_params
from kitsune_jax.ops.graph import Op, Param, Value, is_constant, make_params
from kitsune_jax.ops.spec import is_float, is_narrow
from kitsune_jax.ops.table import OPS

# --- weight gradients without the transposition that autodiff puts behind them ----------------------------------------------------


def fold_transposes(captured: Captured) -> Captured:
    """Compute ``transpose(dY^T X)`` as ``X^T dY``, where nothing else reads the operand of the transposition.

    The product is a sink of the stream, so its result can be made in either orientation at the same cost, while a transposition
    behind it would be a pass over memory. The gradient of a matrix that belongs to a row (an expert's weight, taken for each
    token) is an outer product for each row, ``transpose(broadcast(y) * broadcast(x))``: its operands are broadcast in the order of
    the result instead. An element of a gradient is the same sum or product as before.
    """
    editor = GraphEditor(captured)
    for i, op in enumerate(editor.graph.ops):
        first = editor.maker.get(op.inputs[0]) if op.kind == "transpose" else None
        if first is None or editor.reads(op.inputs[0]) > 1:
            continue
        product = editor.graph.ops[first]
        if is_weight_gradient(product, editor.values) and op["permutation"] == _exchange(product, editor.values):
            contract = {"lhs_contract": product["rhs_contract"], "rhs_contract": product["lhs_contract"]}
            editor.replace(i, with_params(product, product.inputs[::-1], op.outputs, **contract), editor.steps[first])
        elif product.kind == "mul" and (broadcasts := _broadcasts(editor, product, op["permutation"])) is not None:
            inputs, shape = list(product.inputs), editor.shape(op.outputs[0])
            for k, (made_by, dims) in broadcasts.items():
                wide, step = editor.graph.ops[made_by], captured.steps[made_by]
                inputs[k] = editor.in_front_of(i).copy(wide, wide.inputs, step=step, shape=shape, dims=dims)
            editor.replace(i, with_params(product, inputs, op.outputs), editor.steps[first])
    return editor.finish()


def _broadcasts(editor: GraphEditor, product: Op, permutation: Sequence[int]) -> dict[int, tuple[int, tuple[int, ...]]] | None:
    """For each operand of ``product`` that is no number, the op that broadcasts it and where its dimensions come in the transposed
    product; None where one is not broadcast, or would have to be transposed itself."""
    found = {}
    for k, v in enumerate(product.inputs):
        if not editor.shape(v):
            continue
        i = editor.maker.get(v)
        if i is None or editor.graph.ops[i].kind != "broadcast_in_dim":
            return None
        dims = tuple(permutation.index(d) for d in editor.graph.ops[i]["dims"])
        if dims != tuple(sorted(dims)):
            return None
        found[k] = i, dims
    return found


def is_weight_gradient(op: Op, values: Sequence[Value]) -> bool:
    """Both operands are contracted over leading dimensions: rows, as opposed to the columns of a layer's product."""
    if op.kind != "dot_general" or op["lhs_batch"]:
        return False
    sides = zip(op.inputs, (op["lhs_contract"], op["rhs_contract"]), strict=True)
    return all(set(contract) == set(range(len(contract))) < set(range(len(values[v].shape))) for v, contract in sides)


def _exchange(op: Op, values: Sequence[Value]) -> tuple[int, ...]:
    """The permutation that puts the right operand's free dimensions in front of the left one's."""
    left, right = (len(values[v].shape) - len(op["lhs_contract"]) for v in op.inputs)
    return (*range(left, left + right), *range(left))


def fold_transposed_operands(captured: Captured) -> Captured:
    """Compute ``dot_general(x, transpose(w))`` as a product with ``w`` that contracts other dimensions, where no other op is left
    that reads the transposition: a table of embeddings is multiplied as it lies, and not copied first (77 MB in bfloat16 for
    GPT-2's 50 257 tokens), and ``x.T @ dy`` becomes a sum over the rows of both. The free dimensions of ``w`` have to come in the
    order of the result. Products with batch dimensions stay: of an attention, transposed heads are read row by row."""
    editor = GraphEditor(captured)
    folded: dict[int, dict[int, dict[str, Param]]] = {}  # product -> side -> its dimension numbers in the operand's operand
    for op in editor.graph.ops:
        if op.kind == "transpose" and op.outputs[0] not in editor.graph.outputs:
            found = [(j, k, _read_through(op, editor.graph.ops[j], k)) for j, k in _reads_of(editor, op.outputs[0])]
            if all(dims is not None for _, _, dims in found):
                for j, k, dims in found:
                    folded.setdefault(j, {})[k] = dims or {}
    for j, sides in folded.items():
        op = editor.graph.ops[j]
        inputs = [editor.graph.ops[editor.maker[v]].inputs[0] if k in sides else v for k, v in enumerate(op.inputs)]
        editor.replace(j, with_params(op, inputs, op.outputs, **{n: dims for given in sides.values() for n, dims in given.items()}))
    return editor.finish()


def _reads_of(editor: GraphEditor, v: int) -> list[tuple[int, int]]:
    """(op, number of the operand) wherever ``v`` is read."""
    return [(j, k) for j in editor.readers.get(v, ()) for k, x in enumerate(editor.graph.ops[j].inputs) if x == v]


def _read_through(transpose: Op, product: Op, side: int) -> dict[str, Param] | None:
    """The dimension numbers with which ``product`` reads the operand of ``transpose`` as operand ``side``; None where it cannot."""
    if product.kind != "dot_general" or product["lhs_batch"]:
        return None
    order, name = transpose["permutation"], ("lhs", "rhs")[side]
    contract = product[f"{name}_contract"]
    free = [order[d] for d in range(len(order)) if d not in contract]
    return {f"{name}_contract": tuple(order[d] for d in contract)} if free == sorted(free) else None


def exchange_operands(captured: Captured) -> Captured:
    """Compute ``transpose(a @ b)``, where the transposition puts a dimension of ``a`` last, as a transposition of ``b @ a``.

    ``jnp.einsum("bhqk,bkhd->bqhd", ...)`` of an attention is a product [b, h, d, q] and a transposition to [b, q, h, d]. From a
    product [b, h, q, d] the transposition moves whole rows of d numbers. It may be in another region than the product, which then
    stores rows: for 4 x 512 tokens of 8 heads on a Zen 5 an attention took 5.2 ms with rows and 8.5 with columns. Each element is
    the same sum as before. Nothing else may read the product.
    """
    editor = GraphEditor(captured)
    for i, op in enumerate(editor.graph.ops):
        first = editor.maker.get(op.inputs[0]) if op.kind == "transpose" else None
        if first is None or editor.reads(op.inputs[0]) > 1:
            continue
        product = editor.graph.ops[first]
        if product.kind != "dot_general" or not product["lhs_batch"]:
            continue
        batch, rank = len(product["lhs_batch"]), len(op["permutation"])
        left = len(editor.shape(product.inputs[0])) - batch - len(product["lhs_contract"])
        right = rank - batch - left
        if not (left and right and batch <= op["permutation"][-1] < batch + left):
            continue
        names = [("lhs_contract", "rhs_contract"), ("lhs_batch", "rhs_batch")]
        sides = {a: product[b] for pair in names for a, b in (pair, pair[::-1])}
        made = editor.in_front_of(i).copy(product, product.inputs[::-1], step=editor.steps[first], **sides)
        order = (*range(batch), *range(batch + left, rank), *range(batch, batch + left))  # of its dimensions in the old product
        editor.replace(i, with_params(op, (made,), op.outputs, permutation=tuple(order.index(d) for d in op["permutation"])))
    return editor.finish()


# --- weight gradients of concatenations: one product for each part ----------------------------------------------------------------

# More parts, or parts all narrower than this, make products too small to be worth a copy of a tile.
_MOST_PARTS, _LEAST_COLUMNS = 4, 32


Worth = Callable[[Op, int, GraphEditor], bool]  # (a concatenation, how many of its dimensions are rows, the editor of its graph)


def _has_few_wide_parts(join: Op, rows: int, editor: GraphEditor) -> bool:
    columns = [math.prod(editor.shape(v)[rows:]) for v in join.inputs]
    return len(columns) <= _MOST_PARTS and max(columns) >= _LEAST_COLUMNS


def split_gradients(captured: Captured, worth: Worth = _has_few_wide_parts) -> Captured:
    """Compute ``concatenate(a, b)^T dY`` as the concatenation of ``a^T dY`` and ``b^T dY``, where the operand is ``worth`` it.

    The parts are in memory or on chip anyway; their concatenation would have to be made again in the backward pass, or stored as
    rows whose pitch suits no vector load. An element of a gradient is the same sum as before.
    """
    editor = GraphEditor(captured)
    for i, op in enumerate(editor.graph.ops):
        if (split := _split(editor, i, op, worth)) is not None:
            editor.replace(i, split)
    return editor.finish()


def _split(editor: GraphEditor, i: int, op: Op, worth: Worth) -> Op | None:
    """The concatenation that replaces ``op``, with the products of the parts in front of op ``i``; None where it stays whole."""
    for side in range(2) if is_weight_gradient(op, editor.values) else ():
        join, rows = editor.made_by(op.inputs[side]), len(op["lhs_contract"])
        if join is not None and join.kind == "concatenate" and _joins_columns(join, rows, editor) and worth(join, rows, editor):
            return _joined_products(editor, i, op, side, join, worth)
    return None


def _joined_products(editor: GraphEditor, i: int, op: Op, side: int, join: Op, worth: Worth) -> Op:
    """The concatenation of products of the parts of ``join``, which is operand number ``side`` of ``op``."""
    rows, (whole,), made = len(op["lhs_contract"]), op.outputs, list[int]()
    dimension = join["dimension"] - rows + (len(editor.shape(op.inputs[0])) - rows if side else 0)
    for part in join.inputs:
        shape = list(editor.shape(whole))
        shape[dimension] = editor.shape(part)[join["dimension"]]
        made.append(editor.value(whole, shape))
        product = dataclasses.replace(op, inputs=(part, op.inputs[1]) if side == 0 else (op.inputs[0], part), outputs=(made[-1],))
        editor.in_front_of(i).append(_split(editor, i, product, worth) or product)
    return Op("concatenate", tuple(made), (whole,), make_params(dimension=dimension), op.source, label=op.label)


def _joins_columns(join: Op, rows: int, editor: GraphEditor) -> bool:
    """A concatenation of several parts behind the first ``rows`` dimensions."""
    columns = [math.prod(editor.shape(v)[rows:]) for v in join.inputs]
    return join["dimension"] >= rows and len(columns) > 1 and min(columns) > 0


# --- products of which only some columns are used: the weights are sliced instead of the result -----------------------------------


def fold_slices(captured: Captured) -> Captured:
    """Compute ``slice(x @ w)`` as ``x @ slice(w)``, where the slice takes columns of a product that nothing else reads.

    The gradient of a concatenation is such a slice, where the gradient of the other parts is not read. An element of the result is
    the same sum as before. The sliced weights take the product's place and the product takes the slice's, so no op moves in front
    of its operands.
    """
    editor = GraphEditor(captured)
    for i, op in enumerate(editor.graph.ops):
        first = editor.maker.get(op.inputs[0]) if op.kind == "slice" else None
        if first is None or editor.reads(op.inputs[0]) > 1:
            continue
        if is_layer(editor.ops[first], editor.values) and _keeps_rows(op, editor.values):
            _fold_slice(editor, first, i)
    return editor.finish()


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
    """The range of columns (the last dimension) that the slice ``cut`` takes; None where it is no range of whole columns."""
    if not _keeps_rows(cut, values) or (cut["strides"] or (1,))[-1] != 1:
        return None
    return cut["start"][-1], cut["limit"][-1]


def _fold_slice(editor: GraphEditor, first: int, second: int) -> None:
    product, cut = editor.ops[first], editor.ops[second]
    x, w = product.inputs
    wide = editor.shape(w)
    (free,) = (d for d in range(len(wide)) if d not in product["rhs_contract"])

    def at_free(last: int, others: Sequence[int]) -> tuple[int, ...]:
        return tuple(last if d == free else n for d, n in enumerate(others))

    sizes = at_free(editor.shape(cut.outputs[0])[-1], wide)
    start, limit = at_free(cut["start"][-1], [0] * len(wide)), at_free(cut["limit"][-1], wide)
    strides = at_free((cut["strides"] or (1,))[-1], [1] * len(wide))
    narrow, steps = editor.value(w, sizes), (editor.steps[first], editor.steps[second])
    editor.replace(first, with_params(cut, (w,), (narrow,), start=start, limit=limit, strides=strides), steps[1])
    editor.replace(second, with_params(product, (x, narrow), cut.outputs), steps[0])


# --- masks of rectified values, computed from the result instead of the argument --------------------------------------------------


def masks_of_results(captured: Captured) -> Captured:
    """Compute ``z > 0`` as ``h > 0``, where ``h = max(z, 0)`` is made before. They agree for every z, NaN and infinities included.

    The gradient of a ReLU asks for ``z > 0``, and ``h`` is kept for the weight gradient of the next layer anyway: so ``z`` need
    not be kept, and the product that makes it can rectify in its registers.
    """
    editor = GraphEditor(captured)
    rectified: dict[int, int] = {}  # argument -> result, of the ReLUs so far
    for i, op in enumerate(editor.graph.ops):
        if op.kind == "max" and (z := _against_zero(editor.values, op, (0, 1))) is not None:
            rectified.setdefault(z, op.outputs[0])
        elif op.kind in ("gt", "lt") and (z := _against_zero(editor.values, op, (0,) if op.kind == "gt" else (1,))) in rectified:
            editor.replace(i, with_params(op, [rectified[v] if v == z else v for v in op.inputs], op.outputs))
    return editor.finish()


def _against_zero(values: Sequence[Value], op: Op, places: tuple[int, ...]) -> int | None:
    """The operand of ``op``, in one of ``places``, whose partner is the literal 0."""
    for p in places:
        other = values[op.inputs[1 - p]].literal
        if other is not None and not isinstance(other, bool) and other == 0 and values[op.inputs[p]].literal is None:
            return op.inputs[p]
    return None


# --- folds by indices that are constants and in order already ---------------------------------------------------------------------


def promise_sorted(captured: Captured) -> Captured:
    """Mark each fold by constant indices that never decrease as ``sorted``: it needs no order of its own."""
    editor, in_order = GraphEditor(captured), dict[int, bool]()
    for i, op in enumerate(editor.graph.ops):
        if not op.kind.startswith("scatter_") or op["sorted"] or not is_constant(captured.graph, editor.maker, op.inputs[1]):
            continue
        index = op.inputs[1]
        if index not in in_order:
            ids = captured.constant(index)
            in_order[index] = ids is not None and bool(np.all(ids.reshape(-1)[1:] >= ids.reshape(-1)[:-1]))
        if in_order[index]:
            editor.replace(i, with_params(op, op.inputs, op.outputs, sorted=True))
    return editor.finish()


# --- indices made in the shape in which they are compared -------------------------------------------------------------------------

Place = tuple["int | None", ...]  # for each dimension of a value the one of the new shape that it is; None: it has one element
_COSTLY = 9  # operations for an element, of a function of floats; of integers: a remainder tells which block an index is in
# Operations (3 ms of a core) up to which such a function is made again for every element: the angles of rotary embeddings for each
# token and pair of columns are, so that nothing of them is left in front of the pipeline.
_FEW = 2**25
Want = tuple[int, tuple[int, ...], Place]  # a value, the shape in which it is wanted, and its place there


def spread_indices(captured: Captured) -> Captured:
    """Make ``arange(n)[None, :]`` repeated to [m, n] an iota of [m, n], where only other indices are combined with it.

    An index along a dimension that a stream cuts into tiles, or that is worked off in blocks, is known to each of them; an array of
    indices would have to be read, and would not tell which blocks a causal mask hides. So values that are computed of indices,
    constants and single integers alone (the place of a piece of a text), and then repeated to be combined with others of that kind,
    are computed in that shape. Vectors that are combined with anything else stay vectors. So do results of a costly function, such
    as a power, of few numbers: in the shape of the scores of an attention, the slopes of its heads would be made again for every
    query and key.
    """
    return _IndexSpreader(captured).run() if any(op.kind == "iota" for op in captured.graph.ops) else captured


class _IndexSpreader:
    def __init__(self, captured: Captured):
        self.editor = GraphEditor(captured)
        self.known: dict[Want, int | None] = {}

    def run(self) -> Captured:
        graph, editor = self.editor.graph, self.editor
        fixed = {
            v for v, value in enumerate(graph.values) if value.literal is not None or value.shape == () and "int" in value.dtype
        }
        for op in graph.ops:
            if _is_index_work(op) and fixed.issuperset(op.inputs):
                fixed.update(op.outputs)
        kept, changed = set(graph.outputs), False
        for op in graph.ops:
            if OPS.get(op.kind) is None or OPS[op.kind].family != "pointwise" or not fixed.issuperset(op.outputs):
                kept.update(op.inputs)
        for i, op in enumerate(graph.ops):
            if op.kind != "broadcast_in_dim" or not fixed.issuperset(op.outputs) or not kept.isdisjoint(op.outputs):
                continue
            shape, new = editor.shape(op.outputs[0]), editor.in_front_of(i).ops
            made = self._made(i, op.outputs[0], shape, tuple(range(len(shape))))
            if made is not None and editor.shape(made) and new and new[-1][0].outputs == (made,):  # the last of them replaces op i
                last, step = new.pop()
                editor.replace(i, dataclasses.replace(last, outputs=op.outputs, source=op.source, label=op.label), step)
                self.known = {k: v for k, v in self.known.items() if v != made}
                changed = True
        return editor.finish() if changed else editor.captured

    def _made(self, i: int, v: int, shape: tuple[int, ...], place: Place) -> int | None:
        """``v`` in ``shape``, made by ops in front of op ``i``; None where no rule makes it. A number stays as it is."""
        operands, work = dict[Want, "Sequence[Want] | None"](), [(v, shape, place)]
        while work:
            want = work.pop()
            if want not in self.known and want not in operands:
                operands[want] = self._operands(*want)
                work += operands[want] or ()
        for want in sorted(operands, key=lambda w: self.editor.maker.get(w[0], -1)):  # each behind its operands
            self.known[want] = self._emit_in_shape(self.editor.in_front_of(i), *want, operands[want])
        return self.known[v, shape, place]

    def _operands(self, v: int, shape: tuple[int, ...], place: Place) -> Sequence[Want] | None:
        """The values that ``v`` in ``shape`` is made of; None where no rule makes it."""
        sizes, op = self.editor.shape(v), self.editor.made_by(v)
        if not sizes:
            return ()
        if op is None:
            return None
        if self._is_repeated(op, shape):
            return ()
        if op.kind == "iota":
            d = place[op["dimension"]]
            return None if d is None or shape[d] != sizes[op["dimension"]] else ()
        if op.kind == "broadcast_in_dim":
            (x,) = op.inputs
            pairs = list(zip(self.editor.shape(x), op["dims"], strict=True))
            return ((x, shape, tuple(place[d] if n == sizes[d] else None for n, d in pairs)),)
        if op.kind == "reshape":
            (x,) = op.inputs
            before = self.editor.shape(x)
            moved = kept_dims(before, sizes)
            if moved is None:
                return None
            return ((x, shape, tuple(place[moved[d]] if d in moved else None for d in range(len(before)))),)
        if OPS[op.kind].family not in ("pointwise", "convert"):
            return None
        return [(x, shape, place if self.editor.shape(x) else ()) for x in op.inputs]

    def _is_repeated(self, op: Op, shape: tuple[int, ...]) -> bool:
        """Is ``op`` a costly function, of so many fewer elements than ``shape`` has that its result is repeated?"""
        spec = OPS[op.kind]
        costly = spec.family == "pointwise" and spec.flops >= _COSTLY and "int32" not in spec.dtypes
        own, wanted = math.prod(self.editor.shape(op.outputs[0])), math.prod(shape)
        return costly and own > 1 and (wanted - own) * spec.flops > _FEW

    def _emit_in_shape(
        self, at: Inserter, v: int, shape: tuple[int, ...], place: Place, operands: Sequence[Want] | None
    ) -> int | None:
        """``v`` in ``shape``, made at ``at`` of the ``operands`` that are known; None where no rule makes it."""
        sizes, op = self.editor.shape(v), self.editor.made_by(v)
        if operands is None or op is None or not sizes:
            return None if operands is None else v
        made, step = [self.known[want] for want in operands], self.editor.captured.steps[self.editor.maker[v]]
        if self._is_repeated(op, shape):
            dims, real = zip(*((d, n) for d, n in zip(place, sizes, strict=True) if d is not None), strict=True)
            narrow, wide = (dataclasses.replace(op, kind=kind, params=()) for kind in ("reshape", "broadcast_in_dim"))
            v = v if real == sizes else at.copy(narrow, (v,), step=step, new_sizes=real)
            return at.copy(wide, (v,), step=step, shape=shape, dims=dims)
        if op.kind == "iota":
            return at.copy(op, (), step=step, shape=shape, dimension=place[op["dimension"]])
        if op.kind in ("broadcast_in_dim", "reshape"):
            return made[0]
        inputs = tuple(x for x in made if x is not None)
        if len(inputs) < len(made) or all(not self.editor.shape(x) for x in inputs):
            return None
        return at.copy(op, inputs, step=step)


def _is_index_work(op: Op) -> bool:
    spec = OPS.get(op.kind)
    return spec is not None and spec.family in ("iota", "pointwise", "convert", "broadcast", "reshape") and len(op.outputs) == 1


# --- rows taken by an index and multiplied by a matrix: the product is made of the table ------------------------------------------

# An index has to take every row of its table so often, on average: below, a larger array of results costs more than is saved.
_LEAST_USES = 2.0


def move_indexing(captured: Captured) -> Captured:
    """Multiply or sum the rows of a table instead of the rows that an index takes of it, where it takes more than the table has.

    Each node of a graph has several edges; the first layer of a network over edges and its gradients need fewer multiplications:

    * ``take(x, i) @ w`` becomes ``take(x @ w, i)``, and ``concatenate(e, take(x, i)) @ w`` the sum of ``e @ w[:k]`` and
      ``take(x @ w[k:], i)``: the layer;
    * ``scatter_sum(u @ w, i)`` becomes ``scatter_sum(u, i) @ w``: its gradient by the table;
    * ``take(x, i)^T u`` becomes ``x^T scatter_sum(u, i)``: its gradient by the weights, which shares the sum with the one before.

    Every element of a result is the same sum in another order; a sum of products in float32 stays one in float32, also where it is
    now rounded in a bfloat16 array's place. Indices out of range give what they gave before. A row of the table that nobody takes
    counts for nothing, also where it holds an infinity or a NaN.
    """
    if not any(op.kind in ("take", "scatter_sum") for op in captured.graph.ops):
        return captured
    divided = pruned(split_gradients(captured, _has_taken_part))
    moved = _IndexMover(divided).run()
    return captured if moved is divided else dataclasses.replace(moved, saves=True)


def _has_taken_part(join: Op, rows: int, editor: GraphEditor) -> bool:
    """Is a part of ``join`` taken by an index that runs over the first ``rows`` dimensions, or fewer?"""
    parts = [editor.made_by(v) for v in join.inputs]
    return any(op is not None and op.kind == "take" and _is_reused(op, editor) and _is_summable(op) for op in parts)


def _is_summable(take: Op) -> bool:
    """Can the rows it takes be replaced by sums over the rows of its table? Not where missing rows are filled with nonzeros."""
    return take["mode"] != "fill" or take["fill"] == 0


def _is_reused(op: Op, editor: GraphEditor) -> bool:
    """Does the ``take`` or ``scatter_sum`` have several rows of its index for each row of its table?"""
    n = op["n"] if op.kind == "scatter_sum" else editor.shape(op.inputs[0])[0] if editor.shape(op.inputs[0]) else 0
    return op["axis"] == 0 and n > 0 and math.prod(editor.shape(op.inputs[1])) >= _LEAST_USES * n


class _IndexMover:
    """Goes through the ops in order and replaces those that it can; new ops that are equal are one op."""

    def __init__(self, captured: Captured):
        self.editor = GraphEditor(captured)
        self.ops, self.shape, self.dtype = captured.graph.ops, self.editor.shape, self.editor.dtype
        self.made: dict[tuple[str, tuple[int, ...], tuple[tuple[str, Param], ...]], int] = {}
        self.promised = {op.inputs[1] for op in self.ops if op.kind.startswith("scatter_") and op["sorted"]}
        # Indices of which sums are needed below and above the table as well: there a gradient by weights reads the nearest row.
        self.open = {take.inputs[1] for op in self.ops for _, take in self._taken_sides(op) if take["mode"] == "clip"}

    def run(self) -> Captured:
        for i, op in enumerate(self.ops):
            self.at = self.editor.in_front_of(i)
            new = self._product(op) or self._sum(op) or self._gradient(op)
            if new is not None:
                self.editor.replace(i, new)
        return self.editor.finish()

    # --- new ops ----------------------------------------------------------------------------------------------------------------

    def _add(self, kind: str, inputs: Sequence[int], like: int, dtype: str = "", /, **params: Param) -> int:
        """The result of a new op in front of op ``at.op``, or of an equal op that was added before."""
        key = kind, tuple(inputs), make_params(**params)
        if key not in self.made:
            self.made[key] = self.at.add(kind, inputs, dtype, like=like, label=_label(kind, self.at.op), **params)
        return self.made[key]

    def _columns(self, w: int, dim: int, start: int, size: int) -> int:
        """``size`` rows of dimension ``dim`` of ``w`` from ``start`` on."""
        shape = self.shape(w)
        if size == shape[dim]:
            return w
        first = [start if d == dim else 0 for d in range(len(shape))]
        limit = [start + size if d == dim else n for d, n in enumerate(shape)]
        return self._add("slice", (w,), w, start=first, limit=limit, strides=(1,) * len(shape))

    def _instead(self, op: Op, kind: str, inputs: Sequence[int], **params: Param) -> Op:
        """The op that makes the result of ``op`` in its place."""
        return Op(kind, tuple(inputs), op.outputs, make_params(**params), op.source, label=_label(kind, op))

    # --- take(x, i) @ w ---------------------------------------------------------------------------------------------------------

    def _reused_take(self, v: int, dim: int) -> Op | None:
        """The ``take`` that made ``v``, if it takes rows whose dimension ``dim`` comes from a table with fewer of them."""
        op = self.editor.made_by(v)
        if op is None or op.kind != "take" or not _is_reused(op, self.editor) or dim < len(self.shape(op.inputs[1])):
            return None
        return op if op["mode"] != "fill" or op["fill"] in (None, 0) else None  # a row of NaN gives a row of NaN

    def _product(self, op: Op) -> Op | None:
        if op.kind != "dot_general" or op["lhs_batch"] or len(op["lhs_contract"]) != 1 or not is_float(self.dtype(op.outputs[0])):
            return None
        x, w = op.inputs
        (c,), (k,) = op["lhs_contract"], op["rhs_contract"]
        join = self.editor.made_by(x)
        parts = join.inputs if join is not None and join.kind == "concatenate" and join["dimension"] == c else (x,)
        takes = [self._reused_take(v, c) for v in parts]
        if not any(takes):
            return None
        out = op.outputs[0]
        wide = op["accumulate"] if is_narrow(self.dtype(out)) else self.dtype(out)
        direct, first = list[tuple[list[int], int, int]](), 0
        found = list[tuple[tuple[int, int], dict[str, Param]]]()
        for v, take in zip(parts, takes, strict=True):
            size = self.shape(v)[c]
            if take is not None:
                weight = self._columns(w, k, first, size)
                table, index = take.inputs
                inner = c - len(self.shape(index)) + 1
                params = {**dict(op.params), "lhs_contract": (inner,)}
                product = self._add("dot_general", (table, weight), out, wide, **params)
                found.append(((product, index), dict(take.params)))
            elif direct and direct[-1][1] + direct[-1][2] == first:  # beside the part before: one product for both
                direct[-1] = [*direct[-1][0], v], direct[-1][1], direct[-1][2] + size
            else:
                direct.append(([v], first, size))
            first += size
        left = []
        for vs, start, size in direct:
            v = vs[0] if len(vs) == 1 else self._add("concatenate", vs, vs[0], dimension=c)
            weight = self._columns(w, k, start, size)
            left.append(self._add("dot_general", (v, weight), out, wide, **dict(op.params)))
        if not left and len(found) == 1 and wide == self.dtype(out):
            return self._instead(op, "take", found[0][0], **found[0][1])
        left += [self._add("take", inputs, out, **params) for inputs, params in found]
        last = left.pop() if wide == self.dtype(out) else None
        total = left[0]
        for v in left[1:]:
            total = self._add("add", (total, v), out)
        if last is not None:
            return self._instead(op, "add", (total, last))
        return self._instead(op, "convert_element_type", (total,), new_dtype=self.dtype(out))

    # --- scatter_sum(u @ w, i) --------------------------------------------------------------------------------------------------

    def _sum(self, op: Op) -> Op | None:
        if op.kind != "scatter_sum" or not self._may_reorder(op.inputs[0]) or not _is_reused(op, self.editor):
            return None
        updates, index = op.inputs
        cut = self.editor.made_by(updates)
        columns = columns_of(cut, self.editor.values) if cut is not None and cut.kind == "slice" else None
        product = self.editor.made_by(cut.inputs[0]) if cut is not None and columns is not None else cut
        if product is None or not is_layer(product, self.editor.values) or len(product["lhs_contract"]) != 1:
            return None
        u, w = product.inputs
        rank, (c,), (k,) = len(self.shape(index)), product["lhs_contract"], product["rhs_contract"]
        if c < rank or self.shape(u)[c] > 2 * self.shape(updates)[-1] or self.dtype(u) != self.dtype(updates):
            return None
        if columns is not None:
            w = self._columns(w, 1 - k, columns[0], columns[1] - columns[0])
        total = self._scattered(u, index, op["n"])
        return self._instead(op, "dot_general", (total, w), **{**dict(product.params), "lhs_contract": (c - rank + 1,)})

    def _may_reorder(self, v: int) -> bool:
        """float16 ends at 65 504: a sum of many such numbers may overflow where their products with small weights do not."""
        return is_float(self.dtype(v)) and self.dtype(v) != "float16"

    def _scattered(self, u: int, index: int, n: int) -> int:
        return self._add("scatter_sum", (u, index), u, axis=0, n=n, sorted=index in self.promised)

    def _scattered_to_nearest(self, u: int, index: int, n: int) -> int:
        """The sum of the rows of ``u`` for each of ``n`` rows of a table, where an index out of range counts for the nearest row.

        Rows out of range are a sum of their own, of two rows, so that the first sum is that of the gradient by the table as well,
        and nothing is cut out of an array between a region over edges and the next one over nodes.
        """
        if index in self.open and n == 1:
            index = self._add("sub", (index, index), index)
            return self._scattered(u, index, n)
        total = self._scattered(u, index, n)
        if index not in self.open:
            return total
        ends = self._add("scatter_sum", (u, self._end_of(index, -1, n)), u, axis=0, n=2, sorted=False)
        rows = self._add("iota", (), index, "int32", shape=(n,), dimension=0)
        outside = self._add("take", (ends, self._end_of(rows, 0, n - 1)), total, axis=0, mode="fill", fill=0)
        return self._add("add", (total, outside), total)

    def _end_of(self, index: int, first: int, last: int) -> int:
        """0 where ``index`` is at most ``first``, 1 where it is at least ``last``, 2 in between."""
        if self.dtype(index).endswith(("8", "16")):
            index = self._add("convert_element_type", (index,), index, new_dtype="int32")

        def where(kind: str, bound: int) -> int:
            found = self._add(kind, (index, self.editor.literal(bound, self.dtype(index))), index)
            return self._add("convert_element_type", (found,), index, new_dtype="int32")

        above = where("ge", last)
        left = self._add("sub", (self.editor.literal(2, "int32"), above), above)
        below = where("lt", first + 1)
        return self._add("sub", (left, self._add("add", (below, below), below)), below)

    # --- take(x, i)^T u ---------------------------------------------------------------------------------------------------------

    def _taken_sides(self, op: Op) -> list[tuple[int, Op]]:
        """The operands of the weight gradient ``op``, by their numbers, that are rows taken from a table with fewer of them."""
        if not is_weight_gradient(op, self.editor.values):
            return []
        pairs = list(zip(op["lhs_contract"], op["rhs_contract"], strict=True))
        found = []
        for side in range(2):
            take, other = self.editor.made_by(op.inputs[side]), op.inputs[1 - side]
            if take is None or take.kind != "take" or not _is_reused(take, self.editor) or not _is_summable(take):
                continue
            whole = all((d, d) in pairs for d in range(len(self.shape(take.inputs[1]))))
            if whole and self._may_reorder(other) and self.dtype(take.inputs[0]) == self.dtype(other):
                found.append((side, take))
        return found

    def _gradient(self, op: Op) -> Op | None:
        sides = self._taken_sides(op)
        if not sides:
            return None
        side, take = sides[0]
        (table, index), other = take.inputs, op.inputs[1 - side]
        n, rank = self.shape(table)[0], len(self.shape(index))
        pairs = [(a - rank + 1, b - rank + 1) for a, b in zip(op["lhs_contract"], op["rhs_contract"], strict=True) if a >= rank]
        contract = {"lhs_contract": (0, *(a for a, _ in pairs)), "rhs_contract": (0, *(b for _, b in pairs))}
        total = self._scattered_to_nearest(other, index, n)
        used = self._used(table, total)
        return self._instead(op, "dot_general", (used, total) if side == 0 else (total, used), **{**dict(op.params), **contract})

    def _used(self, rows: int, sums: int) -> int:
        """``rows``, with zeros where the row of ``sums`` is zero: an infinity there would make a NaN."""
        rank, whole = len(self.shape(sums)), self.shape(rows)
        used = self._add("ne", (sums, self.editor.literal(0.0, self.dtype(sums))), sums)
        if rank > 1:
            used = self._add("reduce_or", (used,), used, axes=tuple(range(1, rank)))
        where = self._add("broadcast_in_dim", (used,), used, shape=whole, dims=(0,))
        zeros = self._add("broadcast_in_dim", (self.editor.literal(0.0, self.dtype(rows)),), rows, shape=whole, dims=())
        return self._add("select_n", (where, zeros, rows), rows)


def _label(kind: str, op: Op) -> str:
    """The user's name for an op of that kind that replaces ``op``, or a part of it."""
    return {op.kind: op.label, "take": "gather", "scatter_sum": "scatter-add", "broadcast_in_dim": "broadcast"}.get(kind, kind)

"""Rows taken by an index and multiplied by a matrix: the product is made of the table, and its rows are taken.

Comes in: a ``Captured`` without dead ops. Goes out: the same with fewer multiplications, where an index takes more rows than the
table has (each node of a graph has several edges). What is done to all taken rows alike is done once to each row of the table:

* ``take(x, i) @ w`` becomes ``take(x @ w, i)``, and ``concatenate(e, take(x, i)) @ w`` the sum of ``e @ w[:k]`` and
  ``take(x @ w[k:], i)``: the first layer of a network over edges;
* ``scatter_sum(u @ w, i)`` becomes ``scatter_sum(u, i) @ w``: its gradient by the table;
* ``take(x, i)^T u`` becomes ``x^T scatter_sum(u, i)``: its gradient by the weights, which shares the sum with the one before.

Invariants: every value that is left keeps its shape and meaning. An element of a result is the same sum in another order; what was
a sum of products in float32 stays one in float32, also where it is now rounded in a bfloat16 array's place. Indices out of range
give what they gave before. A row of the table that nobody takes counts for nothing, also where it holds an infinity or a NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from kitsune_jax.capture.captured import Captured, Draft, Step, pruned
from kitsune_jax.capture.divided_gradients import split_gradients
from kitsune_jax.capture.sliced_products import columns_of, is_layer
from kitsune_jax.capture.transposed_gradients import is_weight_gradient
from kitsune_jax.graph import Op, Param, Scalar, Value, make_params
from kitsune_jax.ops.spec import is_float, is_narrow

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

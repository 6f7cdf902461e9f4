"""Rewrites of attention scores, which are much larger than the operands of the product that makes them.

Comes in: a ``Captured``. Goes out: the same with scores that are computed several times, or scaled in another way, so that no
region has to store them. Scores are products whose result is much larger than its operands (``ops.table.grows``); no operator is
recognised as attention.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from kitsune_jax.capture.edit import Captured, GraphEditor, Inserter, with_params
from kitsune_jax.ops.graph import DisjointSets, Graph, Op, make_params, reached
from kitsune_jax.ops.spec import is_float
from kitsune_jax.ops.table import CHEAP, OPS, asks_for_equals, grows, is_cheap, scores_of

# --- scores that a backward pass in the same graph reads: computed again there ----------------------------------------------------

LARGER = 4  # times the statistics the scores must be


def repeat_scores(captured: Captured) -> Captured:
    """Give the ops behind an attention's result (its loss, and the backward pass that starts from it) scores of their own.

    Scores, weights and masks are computed again from the queries, the keys and each row's statistics, as the first ones are. A
    region of the forward pass and one of the backward pass then hand arrays of queries or of keys to each other, and none of
    queries by keys. Where both are left to XLA, its compiler finds that they are the same and computes them once.

    Invariant: the copies are equal to the first ones, bit for bit where one program makes both. A comparison of scores with their
    maximum is never copied, because its operands may then come from two programs.
    """
    editor = GraphEditor(captured)
    repeater = _Repeater(editor)
    for i, op in enumerate(editor.graph.ops):
        if op.kind == "dot_general" and grows(editor.graph, op):
            repeater.repeat(i)
    return editor.finish()


def made_of(graph: Graph, given: Callable[[int], bool]) -> set[int]:
    """The values that cheap ops make of constants, of indices and of those that are ``given``."""
    found = {v for v, value in enumerate(graph.values) if value.literal is not None or given(v)}
    for op in graph.ops:
        if op.kind != "opaque" and OPS[op.kind].family in CHEAP and found.issuperset(op.inputs):
            found.update(op.outputs)
    return found


class _Repeater:
    def __init__(self, editor: GraphEditor):
        self.editor, self.graph = editor, editor.graph
        self.made_of_indices: set[int] | None = None
        self.small: dict[int, set[int]] = {}

    def repeat(self, root: int) -> None:
        """Let the backward pass compute the weights of product ``root`` again: ops that depend on the first product with these
        weights read copies of them."""
        made, readers = self._weights(root), self.editor.readers
        products = [c for v in made for c in readers.get(v, ()) if self.graph.ops[c].kind == "dot_general"]
        if not products:
            return
        behind = self._behind(min(products))
        copies: dict[int, int] = {}
        size = self.graph.values[self.graph.ops[root].outputs[0]].size
        for i in sorted(c for v in made for c in readers.get(v, ()) if c in behind):
            self._read_copies(i, behind, size, made, copies)
        # Masks as well: a gradient reads the one that hid the scores.
        masks = {v for w in made for v in self.graph.ops[self.editor.maker[w]].inputs if self._is_mask(v, made)}
        for i in sorted({c for v in masks for c in readers.get(v, ()) if c in behind}):
            self._read_copies(i, behind, size, masks, copies)

    def _weights(self, root: int) -> set[int]:
        """Values of the scores' size that are made of them, of masks and of small values, element by element."""
        (scores,) = self.graph.ops[root].outputs
        size, made, work = self.graph.values[scores].size, {scores}, [scores]
        while work:
            for i in self.editor.readers.get(work.pop(), ()):
                op = self.graph.ops[i]
                if op.kind == "opaque" or OPS[op.kind].family not in CHEAP or op.outputs[0] in made:
                    continue
                if self.graph.values[op.outputs[0]].size == size and all(v in made or self._is_small(v, size) for v in op.inputs):
                    made.add(op.outputs[0])
                    work.append(op.outputs[0])
        return made

    def _is_small(self, v: int, size: int) -> bool:
        """Is ``v`` much smaller than the scores, or made of such values and of indices?"""
        if size not in self.small:
            self.small[size] = made_of(self.graph, lambda v: self.graph.values[v].size * LARGER <= size)
        return v in self.small[size]

    def _is_mask(self, v: int, made: set[int]) -> bool:
        return v not in made and self.graph.values[v].dtype == "bool" and v in self.editor.maker

    def _behind(self, first: int) -> set[int]:
        """The ops that need the result of op ``first``."""

        def readers(i: int) -> list[int]:
            return [c for v in self.graph.ops[i].outputs for c in self.editor.readers.get(v, ())]

        return reached(readers(first), readers)

    def _read_copies(self, i: int, behind: set[int], size: int, wanted: set[int], copies: dict[int, int]) -> None:
        op = self.editor.ops[i]
        inputs = tuple(self._copy(v, i, behind, size, copies) if v in wanted else v for v in op.inputs)
        self.editor.replace(i, dataclasses.replace(op, inputs=inputs))

    def _copy(self, v: int, at: int, behind: set[int], size: int, copies: dict[int, int]) -> int:
        """``v`` computed again in front of op ``at``; itself where it is small, or no cheap op makes it."""
        again, work = set[int](), [v]
        while work:
            w = work.pop()
            i = self.editor.maker.get(w)
            if i is None or i in again or w in copies or i in behind or not self._is_made_again(i, w, size):
                continue
            again.add(i)
            work += self.graph.ops[i].inputs
        for i in sorted(again):
            op = self.graph.ops[i]
            inputs = [copies.get(w, w) for w in op.inputs]
            copies[op.outputs[0]] = self.editor.in_front_of(at).copy(op, inputs, step=self.editor.captured.steps[i])
        return copies.get(v, v)

    def _is_made_again(self, i: int, v: int, size: int) -> bool:
        """Is it cheaper to make ``v`` by op ``i`` again than to keep it?"""
        op = self.graph.ops[i]
        if op.kind == "opaque" or asks_for_equals(self.graph, self.editor.maker, op):
            return False
        if self.made_of_indices is None:
            self.made_of_indices = made_of(self.graph, lambda v: False)
        cheap = OPS[op.kind].family in CHEAP and (self.graph.values[v].size * LARGER > size or v in self.made_of_indices)
        return cheap or op.kind == "dot_general" and grows(self.graph, op)


# --- sums over a row of weights times their gradients: made of the result of the row ----------------------------------------------

_MOST_FACTORS = 32  # ops on the way from a product to its factors


def sum_results(captured: Captured) -> Captured:
    """Sum a row of weights times their gradients as the row's result times its gradient.

    A softmax's backward pass needs ``sum_k w_k dw_k`` of each row. With ``dw_k = sum_d g_d v_kd`` it is ``sum_d o_d g_d``, where
    ``o_d = sum_k w_k v_kd`` is the result of the forward pass: the first gradient of a row need not wait for all keys of the row,
    so a backward pass by blocks of keys goes over them once instead of twice (FlashAttention-2, arXiv:2307.08691, section 2.3.2).
    Factors that are the same in a row, such as a softmax's sum, are taken out of both. ``gradient/softmax_terms.py`` does it for
    functions that JAX linearizes.

    Invariant: the same numbers, but for the order of a sum and, in 16 bits, the rounding of the result.
    """
    editor = GraphEditor(captured)
    sums = [i for i, op in enumerate(editor.graph.ops) if op.kind == "reduce_sum" and op["axes"]]
    if not any(op.kind == "dot_general" and grows(editor.graph, op) for op in editor.graph.ops if sums):
        return captured
    for i in sums:
        _RowSum(editor, i).replace()
    return editor.finish()


class _RowFactors:
    """A value as a product of powers: ``whole`` are factors of its own shape, ``rows`` those that are the same along the dimensions
    ``over``. A factor (mask, case) is 1 where the mask has that case, and 0 elsewhere."""

    def __init__(self, editor: GraphEditor, v: int, over: Sequence[int]):
        self.editor, self.over = editor, over
        self.whole: Counter[int | tuple[int, int]] = Counter()
        self.rows: Counter[int] = Counter()
        self._steps = 0
        self._add(v, 1)

    def _add(self, v: int, power: int) -> None:
        self._steps += 1
        op = self.editor.made_by(v)
        if self._is_thin(v, op):
            self.rows[v] += power
        elif op is None or self._steps > _MOST_FACTORS:
            self.whole[v] += power
        elif op.kind in ("mul", "div"):
            self._add(op.inputs[0], power)
            self._add(op.inputs[1], power if op.kind == "mul" else -power)
        elif op.kind == "convert_element_type" and is_float(self.editor.dtype(op.inputs[0])):
            self._add(op.inputs[0], power)
        elif op.kind == "select_n" and power == 1 and (case := self._other_is_zero(op)) is not None:
            self.whole[op.inputs[0], case] += 1
            self._add(op.inputs[1 + case], 1)
        else:
            self.whole[v] += power

    def _other_is_zero(self, op: Op) -> int | None:
        """The case of a choice of two that is not 0 everywhere, if the other one is."""
        zero = [self.editor.constant_of(v) == 0 for v in op.inputs[1:]]
        return zero.index(False) if sorted(zero) == [False, True] else None

    def _is_thin(self, v: int, op: Op | None) -> bool:
        """Is ``v`` the same along ``over``?"""
        shape = self.editor.shape(v)
        if not shape or all(shape[d] == 1 for d in self.over):
            return True
        if op is None or op.kind != "broadcast_in_dim":
            return False
        return all(self.editor.shape(op.inputs[0])[k] == 1 for k, d in enumerate(op["dims"]) if d in self.over)

    def of_row(self, at: Inserter, v: int, shape: tuple[int, ...]) -> int:
        """The row factor ``v`` in ``shape``, which has no dimensions ``over``."""
        op = self.editor.made_by(v)
        rank = len(shape) + len(self.over)
        place = dict(zip((d for d in range(rank) if d not in self.over), range(len(shape)), strict=True))
        if op is not None and op.kind == "broadcast_in_dim":
            return at.spread(op.inputs[0], [place.get(d) for d in op["dims"]], shape)
        return at.spread(v, [place.get(d) for d in range(len(self.editor.shape(v)))], shape)


class _RowSum:
    """The sum that op ``i`` makes, as far as it is one of weights times their gradients."""

    def __init__(self, editor: GraphEditor, i: int):
        self.editor, self.i, self.op = editor, i, editor.graph.ops[i]
        self.over = tuple(self.op["axes"])
        self.factors = _RowFactors(editor, self.op.inputs[0], self.over)

    def replace(self) -> None:
        for v, power in self.factors.whole.items():
            op = None if isinstance(v, tuple) else self.editor.made_by(v)
            if power == 1 and op is not None and op.kind == "dot_general" and grows(self.editor.graph, op):
                for side in (0, 1):
                    if self._replaced_by_result(op, side):
                        return

    def _replaced_by_result(self, gradient: Op, side: int) -> bool:
        """Write the sum with the result of a product, if operand ``side`` of ``gradient`` is its operand as well."""
        shape = self.editor.shape
        values, g = gradient.inputs[side], gradient.inputs[1 - side]
        of = _product_dims(gradient, len(shape(values)), len(shape(g)), side)
        if {of.result[d] for d in of.free} != set(self.over) or shape(gradient.outputs[0]) != shape(self.op.inputs[0]):
            return False
        rest = Counter(self.factors.whole)
        rest[gradient.outputs[0]] -= 1
        for j in self.editor.readers.get(values, ()):
            product = self.editor.graph.ops[j]
            if j >= self.i or product.kind != "dot_general" or shape(product.outputs[0]) != shape(g):
                continue
            for its in (k for k in (0, 1) if product.inputs[k] == values):
                weights = product.inputs[1 - its]
                made = _product_dims(product, len(shape(values)), len(shape(weights)), its)
                if not _is_transposed(of, made) or shape(weights) != shape(self.op.inputs[0]):
                    continue
                given = _RowFactors(self.editor, weights, self.over)
                if +given.whole == +rest and -given.whole == -rest:
                    self._write(g, product.outputs[0], made, given)
                    return True
        return False

    def _write(self, g: int, result: int, made: _ProductDims, given: _RowFactors) -> None:
        editor, at, (out,) = self.editor, self.editor.in_front_of(self.i), self.op.outputs
        dtype = "float64" if "float64" in map(editor.dtype, (out, g, result)) else "float32"
        total = at.add("mul", (at.convert(result, dtype), at.convert(g, dtype)))
        columns = tuple(sorted(made.result[d] for d in made.free))
        total = at.add("reduce_sum", (total,), axes=columns)
        # What is left are the batches and the rows, in the order of the result; those of the sum are in the order of the weights.
        kept = [d for d in range(len(editor.shape(g))) if d not in columns]
        wanted = [made.result_of_other[d] for d in range(len(editor.shape(self.op.inputs[0]))) if d not in self.over]
        total = at.transpose(total, [kept.index(d) for d in wanted])
        powers = Counter(self.factors.rows)
        powers.subtract(given.rows)
        for v, power in powers.items():
            for _ in range(abs(power)):
                factor = at.convert(self.factors.of_row(at, v, editor.shape(out)), dtype)
                total = at.add("mul" if power > 0 else "div", (total, factor))
        last = Op("convert_element_type", (total,), (out,), make_params(new_dtype=editor.dtype(out)), self.op.source)
        editor.replace(self.i, dataclasses.replace(last, label=self.op.label))


@dataclasses.dataclass(frozen=True)
class _ProductDims:
    """The dimensions of one operand of a product, and where they are. ``batch``, ``contract``: the dimensions of the other operand
    that belong to its batch and contracted dimensions. ``free``: its others. ``result``: of its batch and free dimensions those of
    the result; ``result_of_other``: of the other operand's."""

    batch: dict[int, int]
    contract: dict[int, int]
    free: tuple[int, ...]
    result: dict[int, int]
    result_of_other: dict[int, int]


def _product_dims(op: Op, rank: int, other_rank: int, side: int) -> _ProductDims:
    names = ("lhs", "rhs")[:: 1 if side == 0 else -1]
    batch, other_batch = (op[f"{name}_batch"] for name in names)
    contract, other_contract = (op[f"{name}_contract"] for name in names)
    free = tuple(d for d in range(rank) if d not in batch and d not in contract)
    other_free = tuple(d for d in range(other_rank) if d not in other_batch and d not in other_contract)
    order = (free, other_free) if side == 0 else (other_free, free)
    places = [{d: len(batch) + sum(map(len, order[:k])) + n for n, d in enumerate(dims)} for k, dims in enumerate(order)]
    of_free, of_other_free = places if side == 0 else places[::-1]
    return _ProductDims(
        dict(zip(batch, other_batch, strict=True)),
        dict(zip(contract, other_contract, strict=True)),
        free,
        {**{d: k for k, d in enumerate(batch)}, **of_free},
        {**{d: k for k, d in enumerate(other_batch)}, **of_other_free},
    )


def _is_transposed(of: _ProductDims, made: _ProductDims) -> bool:
    """Do both multiply the same values, ``made`` their rows with weights and ``of`` their columns with a gradient, and has the
    result of each the dimensions of the other one's operand?"""
    if set(of.batch) != set(made.batch) or set(of.contract) != set(made.free) or set(made.contract) != set(of.free):
        return False
    results = all(made.result[d] == place for d, place in (*of.batch.items(), *of.contract.items()))
    weights = all(of.result[d] == place for d, place in (*made.batch.items(), *made.contract.items()))
    rows = all(of.result_of_other.get(place) == d for d, place in made.result_of_other.items())
    return results and weights and rows


# --- scores that are summed over their rows and over their columns: computed once for each ----------------------------------------

MOVES = frozenset({"broadcast", "reshape", "transpose", "iota"})
_FOLDS = frozenset({"dot", "reduce"})


def part_scores(captured: Captured) -> Captured:
    """Give each set of dimensions that scores are summed over, but one, scores of its own.

    The copies are made of the same queries, keys and statistics. So a gradient by the queries streams over the queries and folds
    the keys, and gradients by keys and values stream over the keys and fold the queries: two regions, of which none adds to sums
    that another tile adds to as well. For a target without code for sums over the rows of each batch. Where both are left to XLA,
    its compiler finds that they are the same. Small values (the statistics of a row) are made once.
    """
    scores = scores_of(captured.graph)
    parted = _ops_by_summed_dims(captured.graph, scores) if scores else []
    return _with_copies(captured, scores, parted) if parted else captured


def _ops_by_summed_dims(graph: Graph, scores: frozenset[int]) -> list[list[int]]:
    """The ops that sum over dimensions of ``scores``, those that sum over the same ones together. Of each set of scores that are
    computed of each other, the ops that keep theirs are left out."""
    joined = DisjointSets()  # values, and (value, dimension) pairs
    folded: dict[int, list[Hashable]] = {}  # op -> the dimensions that it sums over
    for i, op in enumerate(graph.ops):
        touched: list[Hashable] = [v for v in (*op.inputs, *op.outputs) if v in scores]
        folds = op.kind != "opaque" and OPS[op.kind].family in _FOLDS and scores.isdisjoint(op.outputs)
        if not touched or not (folds or is_cheap(op)):
            continue
        joined.join(touched)
        shapes = [[graph.values[v].shape for v in side] for side in (op.inputs, op.outputs)]
        for r in OPS[op.kind].relate(op, tuple(shapes[0]), tuple(shapes[1])):
            operands = (*op.inputs, *op.outputs)
            places: list[Hashable] = [
                (operands[k], d) for k, d in r.members if operands[k] in scores and graph.values[operands[k]].shape[d] > 1
            ]
            if r.role == "contracted" and folds:
                folded.setdefault(i, []).extend(places)
            elif r.role == "parallel":
                joined.join(places)
    folded = {i: places for i, places in folded.items() if places}
    for places in folded.values():
        joined.join(places)
    groups: dict[Hashable, dict[Hashable, list[int]]] = {}
    for i, places in folded.items():
        of = next(joined.root(v) for v in graph.ops[i].inputs if v in scores)
        groups.setdefault(of, {}).setdefault(joined.root(places[0]), []).append(i)
    found: list[list[int]] = []
    for group in groups.values():
        # The statistics of a row are made of the scores that stay.
        kept = min(group.values(), key=lambda ends: (all(graph.ops[i].kind == "dot_general" for i in ends), ends))
        found += [ends for ends in group.values() if ends is not kept]
    return found


def _with_copies(captured: Captured, scores: frozenset[int], parted: list[list[int]]) -> Captured:
    """``captured``, where the ops of each list read scores of their own."""
    editor = GraphEditor(captured)
    graph, maker = editor.graph, editor.maker
    # Masks of indices and single numbers (the place of a piece of a text) are cheap to make again, and as large as the scores.
    of_indices = made_of(graph, lambda v: graph.values[v].shape == ())

    def is_copied(v: int, size: int) -> bool:
        op = editor.made_by(v)
        if op is None or op.kind == "opaque" or graph.values[v].literal is not None or graph.values[v].shape == ():
            return False
        if asks_for_equals(graph, maker, op):  # of copies, whose sums may have another order
            return False
        cheap = is_cheap(op) and (v in of_indices or graph.values[v].size * LARGER > size)
        return v in scores or cheap or OPS[op.kind].family in MOVES  # an op that only moves elements stores no array of its own

    for ends in parted:
        copies: dict[int, int] = {}
        for i in ends:
            size = max(graph.values[v].size for v in graph.ops[i].inputs if v in scores)
            work = list(graph.ops[i].inputs)
            while work:  # not by recursion: a chain may be longer than Python's stack
                v = work[-1]
                op = editor.made_by(v) if v not in copies and is_copied(v, size) else None
                missing = [w for w in op.inputs if w not in copies] if op is not None else []
                if missing:
                    work += missing
                    continue
                work.pop()
                if op is not None:
                    inputs = [copies[w] for w in op.inputs]
                    copies[v] = editor.in_front_of(i).copy(op, inputs, step=captured.steps[maker[v]])
                copies.setdefault(v, v)
            editor.replace(i, dataclasses.replace(editor.ops[i], inputs=tuple(copies[v] for v in graph.ops[i].inputs)))
    return editor.finish()


# --- scores that are divided by a statistic of their row: multiplied by its reciprocal instead ------------------------------------


def multiply_scores(captured: Captured) -> Captured:
    """Compute ``x / broadcast(l)`` as ``x * broadcast(1 / l)``, for scores ``x`` and a much smaller ``l``.

    That is one division for a row, or one for a column where the statistics are those of the columns, instead of one for each pair
    of a query and a key: for a target on which a division takes many instructions. The quotient is off by one rounding more.
    """
    editor = GraphEditor(captured)
    scores, reciprocals = scores_of(editor.graph), dict[int, int]()
    for i, op in enumerate(editor.graph.ops):
        if op.kind == "div" and op.inputs[0] in scores and is_float(editor.dtype(op.inputs[0])):
            x, y = op.inputs
            if _is_repeated(editor, y, editor.values[x].size):
                new = dataclasses.replace(op, kind="mul")
                editor.replace(i, with_params(new, (x, _reciprocal(editor.in_front_of(i), y, reciprocals)), op.outputs))
    return editor.finish()


def _reciprocal(at: Inserter, v: int, known: dict[int, int]) -> int:
    """1 / ``v``, made of the reciprocal of the value that was moved or repeated to make ``v``; ``known``: those made before."""
    moves: list[Op] = []
    while v not in known and (op := _move_of(at.editor, v)) is not None:
        moves.append(op)
        (v,) = op.inputs
    if v not in known:
        one = at.editor.literal(1.0, at.editor.dtype(v))
        known[v] = at.add("div", (one, v), like=v)
    made = known[v]
    for op in reversed(moves):
        made = known[op.outputs[0]] = at.copy(op, (made,))
    return made


def _is_repeated(editor: GraphEditor, v: int, size: int) -> bool:
    """Is ``v`` a much smaller value that was repeated?"""
    while editor.values[v].size * LARGER > size:
        op = _move_of(editor, v)
        if op is None:
            return False
        (v,) = op.inputs
    return True


def _move_of(editor: GraphEditor, v: int) -> Op | None:
    """The op that makes ``v`` by moving or repeating the elements of its operand."""
    op = editor.made_by(v)
    return op if op is not None and op.kind != "opaque" and OPS[op.kind].family in MOVES and op.inputs else None

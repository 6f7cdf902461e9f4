"""Rewrites of reductions over a part of the dimensions, so that rows stream that lie side by side: group norms, pooling.

Comes in: a ``Captured`` without dead ops. Goes out: the same with reductions that read whole rows. Invariant: every value that is
left keeps its meaning; only the order in which numbers are added up changes.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

from kitsune_jax.capture.edit import Captured, GraphEditor, Inserter, with_params
from kitsune_jax.ops.graph import Op
from kitsune_jax.ops.spec import is_narrow
from kitsune_jax.ops.table import OPS

# --- short runs that are reduced last ---------------------------------------------------------------------------------------------

_ROUNDED = ("reduce_sum", "reduce_prod")  # in 16 bits the result of each is rounded
_SHORT = 64  # elements of a run, from which on runs are added up as fast as whole rows
_RUNS = 4  # of which an element of the result has so many at least


def reduce_outer_first(captured: Captured) -> Captured:
    """Reduce the outer dimensions first where kept ones lie between these and short inner ones, as those of a group norm do.

    The sums of 8 groups of 8 channels over 1 024 pixels are first 64 sums over the pixels, whose rows lie side by side, and then 8
    sums of 8 numbers; at once they are sums of 8 192 short runs.
    """
    editor = GraphEditor(captured)
    for i, op in enumerate(editor.graph.ops):
        if op.kind in OPS and OPS[op.kind].family == "reduce" and (outer := _outer(editor, op)):
            axes = op["axes"]
            first = editor.in_front_of(i).copy(op, op.inputs, axes=outer)
            inner = tuple(d - sum(o < d for o in outer) for d in axes if d not in outer)
            editor.replace(i, with_params(op, (first,), op.outputs, axes=inner))
    return editor.finish()


def _outer(editor: GraphEditor, op: Op) -> tuple[int, ...]:
    """The reduced dimensions in front of the last kept one, if those behind it are short runs; else none."""
    shape, axes = editor.shape(op.inputs[0]), op["axes"]
    kept = [d for d, n in enumerate(shape) if d not in axes and n > 1]
    if not kept or (op.kind in _ROUNDED and is_narrow(editor.dtype(op.inputs[0]))):
        return ()
    outer = tuple(d for d in axes if d < kept[-1])
    runs, run = (math.prod(shape[d] for d in axes if (d in outer) == side) for side in (True, False))
    return outer if runs >= _RUNS and 1 < run < _SHORT else ()


# --- operands that are cut instead of what is computed of them --------------------------------------------------------------------

_ELEMENTWISE = frozenset({"pointwise", "convert"})


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A reshape of one dimension into several ``pieces``; the other dimensions keep their order and size."""

    dim: int
    pieces: tuple[int, ...]

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[: self.dim], *self.pieces, *shape[self.dim + 1 :])

    def moved(self, dims: Sequence[int]) -> tuple[int, ...]:
        """``dims`` in the new numbers, with all pieces in the place of the dimension that is cut."""
        more = len(self.pieces) - 1
        found: list[int] = []
        for d in dims:
            found += range(d, d + 1 + more) if d == self.dim else [d + more if d > self.dim else d]
        return tuple(found)


def cut_operands(captured: Captured) -> Captured:
    """Cut a dimension of the operands, not of what pointwise operators and sums of rows make of them, where a part of it is reduced
    behind.

    The mean of ``(x * x).reshape(n, 16, m)`` over its second dimension is that of ``y * y`` with ``y = x.reshape(n, 16, m)``. So
    the ``n`` rows are those of all of it, and stream; the rows of ``x`` would end in a reshape, and XLA finds the place of every
    element that it adds up anew: for 34 MB it takes 16 to 20 ms, and 4 for ``y`` (Zen 4). What a product makes is not cut: its
    stream has more rows without, so that its tiles fit a cache (two layers of 256 in groups of 32: 14 ms, and 22 with the cut).
    """
    editor = GraphEditor(captured)
    for i, op in enumerate(editor.graph.ops):
        cut = _cut_of(editor, op) if op.kind == "reshape" else None
        if cut is not None and _reduces_pieces(editor, op.outputs[0], cut) and (chain := _chain(editor, i, cut)):
            _move(editor, i, chain)
    return editor.finish()


def _cut_of(editor: GraphEditor, op: Op) -> _Cut | None:
    """The cut that a reshape makes; None of another reshape. Of arrays without elements the sizes do not tell."""
    shape, new = editor.shape(op.inputs[0]), editor.shape(op.outputs[0])
    more = len(new) - len(shape)
    if more < 1 or 0 in shape:
        return None
    d = next((d for d, n in enumerate(shape) if n != new[d]), len(shape))
    if d == len(shape) or shape[d + 1 :] != new[d + 1 + more :] or 1 in new[d : d + 1 + more]:
        return None
    return _Cut(d, new[d : d + 1 + more])


def _reduces_pieces(editor: GraphEditor, v: int, cut: _Cut) -> bool:
    """Is ``v``, or what pointwise operators make of it in its shape, reduced over some of the pieces, but not the first?"""
    inner, seen, todo = range(cut.dim + 1, cut.dim + len(cut.pieces)), {v}, [v]
    while todo:
        for j in editor.readers.get(todo.pop(), ()):
            op = editor.graph.ops[j]
            family = OPS[op.kind].family if op.kind in OPS else ""
            if family == "reduce" and cut.dim not in op["axes"] and any(d in op["axes"] for d in inner):
                return True
            if family in _ELEMENTWISE and op.outputs[0] not in seen and editor.shape(op.outputs[0]) == editor.shape(v):
                seen.add(op.outputs[0])
                todo.append(op.outputs[0])
    return False


def _chain(editor: GraphEditor, reshape: int, cut: _Cut) -> dict[int, _Cut]:
    """The ops in front of op ``reshape`` that can compute with cut operands, each with the cut of its result: those that nothing
    else reads. Empty where none of them computes anything, or where they would lose the product that they follow."""
    ops, first = editor.graph.ops, editor.graph.ops[reshape].inputs[0]
    found, computes, cuts = dict[int, _Cut](), False, {first: cut}
    inside, todo = collections.Counter([first]), list[int]()  # reads by these ops; what is left to look at

    def follow(v: int) -> None:
        if v in editor.maker and editor.maker[v] not in found:
            heapq.heappush(todo, -editor.maker[v])

    follow(first)
    while todo:  # the last op first, so that all readers of a value are known before its maker
        j = -heapq.heappop(todo)
        op, out = ops[j], ops[j].outputs[0]
        if j in found or len(op.outputs) != 1 or editor.reads(out) != inside[out]:
            continue
        plan = _cut_op(editor, op, cuts[out])
        if plan is None or any(cuts.get(v, c) != c for v, c in plan.operands.items()):
            continue
        found[j] = cuts[out]
        computes |= op.kind not in ("broadcast_in_dim", "reshape")
        cuts.update(plan.operands)
        inside.update(op.inputs)
        for v in plan.operands:
            follow(v)
    ends = [ops[editor.maker[v]].kind for v in cuts if v in editor.maker and editor.maker[v] not in found]
    return found if computes and "dot_general" not in ends else {}


@dataclasses.dataclass(frozen=True)
class _CutOp:
    """The cuts of an op's ``operands``, and its new ``params``, for its result to be cut."""

    operands: Mapping[int, _Cut]
    params: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


def _cut_op(editor: GraphEditor, op: Op, cut: _Cut) -> _CutOp | None:
    """How ``op`` makes its result with a cut; None where that is not known."""
    family = OPS[op.kind].family if op.kind in OPS else ""
    if family in _ELEMENTWISE:
        shape = editor.shape(op.outputs[0])
        full = [v for v in op.inputs if editor.shape(v) != ()]
        return _CutOp(dict.fromkeys(full, cut)) if all(editor.shape(v) == shape for v in full) else None
    if op.kind == "broadcast_in_dim":
        params = {"shape": cut.of(editor.shape(op.outputs[0])), "dims": cut.moved(op["dims"])}
        if cut.dim not in op["dims"]:
            return _CutOp({}, params)
        own = _Cut(op["dims"].index(cut.dim), cut.pieces)
        if editor.shape(op.inputs[0])[own.dim] == 1:
            return None
        return _CutOp({op.inputs[0]: own}, params)
    if op.kind == "reshape":  # that adds or drops dimensions of one element
        before, after = ([d for d, n in enumerate(editor.shape(v)) if n != 1] for v in (op.inputs[0], op.outputs[0]))
        if [editor.shape(op.inputs[0])[d] for d in before] != [editor.shape(op.outputs[0])[d] for d in after]:
            return None
        own = _Cut(before[after.index(cut.dim)], cut.pieces)
        return _CutOp({op.inputs[0]: own}, {"new_sizes": cut.of(editor.shape(op.outputs[0]))})
    if family == "reduce":
        kept = [d for d in range(len(editor.shape(op.inputs[0]))) if d not in op["axes"]]
        own = _Cut(kept[cut.dim], cut.pieces)
        return _CutOp({op.inputs[0]: own}, {"axes": own.moved(op["axes"])})
    return None


def _move(editor: GraphEditor, reshape: int, chain: Mapping[int, _Cut]) -> None:
    """Let the ops of ``chain`` compute cut results of cut operands. The last one makes that of op ``reshape``, which goes."""
    last, made = editor.graph.ops[reshape], dict[int, int]()
    for j in sorted(chain):
        op, at = editor.graph.ops[j], editor.in_front_of(j)
        plan = _cut_op(editor, op, chain[j])
        assert plan is not None
        for v, own in plan.operands.items():
            if v not in made:
                made[v] = _reshaped(editor, at, v, own.of(editor.shape(v)))
        out = op.outputs[0]
        made[out] = last.outputs[0] if out == last.inputs[0] else editor.value(out, chain[j].of(editor.shape(out)))
        inputs = [made[v] if v in plan.operands else v for v in op.inputs]
        editor.replace(j, with_params(op, inputs, (made[out],), **plan.params))
    editor.remove(reshape)


def _reshaped(editor: GraphEditor, at: Inserter, v: int, shape: tuple[int, ...]) -> int:
    """``v`` in another shape; of what was reshaped before, the original."""
    while (op := editor.made_by(v)) is not None and op.kind == "reshape":
        v = op.inputs[0]
    return at.reshape(v, shape)

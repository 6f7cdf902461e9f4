"""Indices made in the shape in which they are compared: ``arange(n)[None, :]`` repeated to [m, n] is an iota of [m, n].

Comes in: a ``Captured``. Goes out: the same, with what is computed of indices, constants and single integers alone (the place of a
piece of a text), and then repeated to be combined with more of its kind, computed in that shape. An index along a dimension that a
stream cuts into tiles, or that is worked off in blocks, is known to each of them; an array of indices would have to be read, and
nobody could tell from it which blocks a causal mask hides. Invariant: every value keeps its shape and meaning. What is combined
with anything else stays the vector that it is, and so does what a function such as a power makes of few numbers: in the shape of
the scores of an attention, the slopes of its heads would be made again for every query and key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kitsune_jax.capture.captured import Captured, Draft, Step
from kitsune_jax.graph import Op, Param, make_params
from kitsune_jax.ops.table import OPS

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

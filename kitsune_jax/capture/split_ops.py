"""Ops on values one of whose dimensions is cut into parts: ``[.., n, ..]`` as ``[.., parts, n / parts, ..]``.

Comes in: an op, its operands as they are and as they are cut, and where. Goes out: the ops that compute the cut result, or None
where there are none. Invariant: a cut value is a reshape of the value it stands for, so a part lies behind the part before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kitsune_jax.capture.captured import Draft, Step, with_params
from kitsune_jax.graph import Graph, Op, Param, make_params
from kitsune_jax.ops.table import OPS

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

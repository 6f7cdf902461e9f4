"""Elements picked inside each row by an index that does not stream (``take``), and added up there (``put``, its gradient).

Comes in: an instruction and the ``Evaluation`` of its stage. Goes out: nodes, and the home of its value. The index is known before
the stream begins, so XLA makes of it, in front of the call, which column of the operand each column of the result is
(``pack.Picked``), or which columns it adds up (``pack.AddedUp``). The kernel reads these lists, and the warp's rows pass through
shared memory in the new order.
"""

from __future__ import annotations

import math

from kitsune_jax.program.ir import Instr
from kitsune_jax.targets.cuda import columns, pointwise, tiles
from kitsune_jax.targets.cuda import device_ir as ir
from kitsune_jax.targets.cuda import statements as st
from kitsune_jax.targets.cuda.device_ir import Address, Expr, Ref
from kitsune_jax.targets.cuda.evaluation import Evaluation
from kitsune_jax.targets.cuda.pack import AddedUp, Picked, VectorRecipe
from kitsune_jax.targets.cuda.values import InScratch
from kitsune_jax.targets.errors import CannotLower


def take(at: Evaluation, instr: Instr) -> None:
    """Lowers ``instr``. Raises ``CannotLower``."""
    (v,), x = instr.outputs, at.root(instr.inputs[0])
    at.new(instr)
    _check(at, instr)
    (start,) = columns.to_scratch(at, [x])
    _settle(at, v, InScratch(columns_of(at, instr, start), filling(instr, at.value(v).dtype)))


def put(at: Evaluation, instr: Instr) -> None:
    """Lowers ``instr``. Raises ``CannotLower``."""
    (v,), (x, index) = instr.outputs, instr.inputs
    at.new(instr)
    _check(at, instr)
    (start,) = columns.to_scratch(at, [at.root(x)])
    of_x, of_index = at.program.values[x], at.program.values[index]
    d, count = instr["axis"] - 1, math.prod(of_index.shape)
    inner = math.prod(of_x.shape[d + len(of_index.shape) :])
    outer = math.prod(of_x.shape[:d])

    def part(name: str, words: int) -> Address:
        how = AddedUp(name, outer, count, inner, instr["n"], start)
        return at.vector(VectorRecipe(index, (), (), (words,), tiles.padded(words), how=how))

    n = at.value(v).n
    first = part("first", n + 1)
    _settle(at, v, InScratch(first, None, ir.ScratchList(part("list", max(1, outer * count * inner)))))


def _settle(at: Evaluation, v: int, home: InScratch) -> None:
    if not at.value(v).row:
        at.settle(v, home)
        at.materialize(v)
        return
    dtype = at.value(v).dtype
    if isinstance(home.fold, ir.ScratchList):
        at.set_row(v, ir.SumOfList(dtype, home.table, home.fold.columns, 0))
    else:
        which = Ref("pick", v)
        at.setup.append(st.LoadScalar(which, "int32", home.table, True))
        at.set_row(v, ir.FromScratch(dtype, index=which, fill=home.fill))


def _check(at: Evaluation, instr: Instr) -> None:
    x, index = instr.inputs
    if at.is_slab(x) or at.is_slab(instr.outputs[0]):
        raise CannotLower(f"a {instr.kind} of columns that are split over CTAs has no code on the GPU")
    if at.program.values[index].dtype not in ("int32", "uint32"):
        raise CannotLower(f"a {instr.kind} by {at.program.values[index].dtype} indices has no code on the GPU")


def columns_of(at: Evaluation, instr: Instr, start: int) -> Address:
    """The vector that says which column each column of the ``take`` is, from ``start`` on, and -1 for what it fills."""
    x, index = (at.program.values[v] for v in instr.inputs)
    d = instr["axis"] - 1
    count, inner, outer = x.shape[d], math.prod(x.shape[d + 1 :]), math.prod(x.shape[:d])
    how = Picked(outer, count, inner, instr["mode"] == "fill", start)
    n = outer * math.prod(index.shape) * inner
    return at.vector(VectorRecipe(instr.inputs[1], (), (), (n,), tiles.padded(n), how=how))


def filling(instr: Instr, dtype: str) -> Expr:
    """What stands where an index is out of range."""
    type_ = pointwise.COMPUTE[dtype]
    return ir.Literal(pointwise.literal(instr["fill"] if instr["mode"] == "fill" else 0, type_))

"""Products for each row (``dot``): both operands stream, and a warp multiplies those of one row after the other.

Comes in: a ``dot`` and the ``Evaluation`` of its stage. Goes out: nodes, and an image as the home of the product; or of what a
``take`` that alone reads it picks. Operands are copied to shared memory row by row from where their pieces lie: rows of arrays and
tables straight from global memory, values of the stage from the warp's scratch rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kitsune_jax.program.ir import Instr, TileProgram
from kitsune_jax.targets.cuda import columns, picks, pointwise
from kitsune_jax.targets.cuda import device_ir as ir
from kitsune_jax.targets.cuda import product_ir as pr
from kitsune_jax.targets.cuda import statements as st
from kitsune_jax.targets.cuda.device_ir import Ref
from kitsune_jax.targets.cuda.evaluation import Evaluation
from kitsune_jax.targets.cuda.values import Expression, InArray, InImage, InRegisters, Value
from kitsune_jax.targets.errors import CannotLower

_WORKING = 56  # registers of a thread while it multiplies: 16 sums, fragments on their way, addresses
_Operand = tuple[int, bool]  # (free elements, whether K is the outer dimension)


def lower(at: Evaluation, instr: Instr) -> None:
    """Lowers ``instr``. Raises ``CannotLower``."""
    x, y = instr.inputs
    dtype, other = (at.program.values[v].dtype for v in (x, y))
    if dtype != other or dtype not in pointwise.OPERAND or instr["accumulate"] != "float32":
        raise CannotLower(f"a product for each row of {dtype} and {other} has no code on the GPU")
    if at.split > 1:
        raise CannotLower("a product for each row in a stage that is split by columns has no code on the GPU")
    k, of_x, of_y = shape(at.program, instr)
    value = at.new(instr)
    if value.row:
        _inner(at, instr, x, y)
        return
    copied = _copied(at, dtype, k, dict.fromkeys(((x, of_x), (y, of_y))))
    operands = [pr.RowOperand(of[0], of[1], copied[v, of]) for v, of in ((x, of_x), (y, of_y))]
    taken = at.facts.picked.get(instr.outputs[0])
    list_ = fill = None
    if taken is not None:
        at.done.add(taken)
        value = at.new(taken)
        list_, fill = picks.columns_of(at, taken, 0), picks.filling(taken, value.dtype)
    (v,) = (taken or instr).outputs
    image, rows, store = Ref("image", v), None, at.facts.only_store(v)
    if store is not None and not at.rows("out", store["array"]).strides:
        at.done.add(store)
        found = at.rows("out", store["array"])
        rows = pr.ToRows(at.address_number(found.ref, stored=True), int(found.access) >= 4)
    same = operands[0] == operands[1]
    node = pr.RowProduct(rows or image, dtype, k, operands[0], None if same else operands[1], value.dtype, value.n, list_, fill)
    at.product_bytes = max(at.product_bytes, node.bytes)
    work = Ref("work", v)
    at.add(st.SyncWarp(), st.Alive(work, _WORKING), node, st.Alive(work))
    if rows is None:
        at.once_per_tile(st.Image(image))
        at.together.add(v)
        at.add(st.Alive(Ref("v", v), 0))
        at.settle(v, InImage(image, value.form, Ref("v", v)))


def shape(program: TileProgram, instr: Instr) -> tuple[int, _Operand, _Operand]:
    """(K, how x lies, how y lies). Raises ``CannotLower`` where the dimensions are in another order."""
    x, y = (program.values[v].rows_first for v in instr.inputs)
    if any(x[d] != 1 for d in instr["x_batch"]):
        raise CannotLower("a product for each row with further batch dimensions has no code on the GPU")
    pairs = sorted((a, b) for a, b in zip(instr["x_contract"], instr["y_contract"], strict=True) if x[a] != 1)
    if [b for _, b in pairs] != sorted(b for _, b in pairs):
        raise CannotLower("a product for each row that contracts dimensions in another order has no code on the GPU")
    k = math.prod(x[a] for a, _ in pairs)
    return k, _lies(x, [a for a, _ in pairs]), _lies(y, [b for _, b in pairs])


def _lies(dims: Sequence[int], contract: Sequence[int]) -> _Operand:
    real = [d for d, n in enumerate(dims) if d and n != 1]
    free = [d for d in real if d not in contract]
    if real not in ([*free, *contract], [*contract, *free]):
        raise CannotLower("a product for each row that contracts dimensions between others has no code on the GPU")
    return math.prod(dims[d] for d in free), bool(free) and bool(contract) and free[0] > contract[0]


def _inner(at: Evaluation, instr: Instr, x: int, y: int) -> None:
    """One number for a row: the sum of products of elements."""
    (v,) = instr.outputs
    ref = Ref("r", v)
    product = at.unnamed(Value(at.value(x).n, "float32", False, Expression("({0} * {1})", (at.root(x), at.root(y)))))
    at.add(st.StartFold(ref, "Sum", "float32"))
    at.evaluate(at.value(x).width, [ir.Fold(product, "Sum", ref)])
    at.add(st.FoldQuad(ref, "Sum"))
    at.settle(v, InRegisters(ref, "row", ref))


def _copied(
    at: Evaluation, dtype: str, k: int, operands: dict[tuple[int, _Operand], None]
) -> dict[tuple[int, _Operand], tuple[pr.Copied, ...]]:
    """How the elements of each operand reach its slot."""
    pieces = {v: at.facts.pieces_of(v) for v, _ in operands}
    computed: dict[int, None] = {}
    for p in dict.fromkeys(at.root(p) for of in pieces.values() for p in of):
        if not _lies_in_rows(at, p, dtype):
            computed[p] = None
    starts = dict(zip(computed, columns.to_scratch(at, list(computed)) if computed else [], strict=True))
    found = {}
    for v, (free, across) in operands:
        run, first, parts = free if across else k, 0, list[pr.Copied]()
        for p in map(at.root, pieces[v]):
            part = _piece(at, p, starts.get(p), first, run)
            parts[-1:] = _joined(parts[-1], part) if parts else [part]
            first += at.value(p).n
        found[v, (free, across)] = tuple(parts)
    return found


def _lies_in_rows(at: Evaluation, v: int, dtype: str) -> bool:
    home = at.value(v).home
    return isinstance(home, InArray) and not home.rows.strides and home.rows.dtype == dtype


def _piece(at: Evaluation, v: int, start: int | None, first: int, run: int) -> pr.Copied:
    value = at.value(v)
    if start is not None:
        return pr.Copied("scratch", start, 1, first, value.n)
    assert isinstance(value.home, InArray)
    rows, unit = value.home.rows, 16 // pointwise.ITEM_SIZE[value.dtype]
    how = "staged" if rows.access == "kStaged" else "elements"
    if rows.access == "16" and not (first % unit or value.n % unit or run % unit):
        how = "async"
    return pr.Copied(how, at.address_number(rows.ref), 1, first, value.n)


def _joined(a: pr.Copied, b: pr.Copied) -> list[pr.Copied]:
    """Pieces of one kind whose addresses follow each other are copied together."""
    if a.how == b.how != "scratch" and a.count == b.count and a.source + a.pieces == b.source:
        return [pr.Copied(a.how, a.source, a.pieces + 1, a.first, a.count)]
    return [a, b]

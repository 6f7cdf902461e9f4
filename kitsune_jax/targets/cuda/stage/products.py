"""Lowering of products for each row, and of the columns that the CTAs of a cluster exchange for a product.

Comes in: an instruction or an operand, and the ``StageBuilder`` of its stage. Goes out: nodes, and a home of the value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from kitsune_jax.errors import CannotLower
from kitsune_jax.program.ir import Instr, TileProgram
from kitsune_jax.targets.cuda import ir, pointwise, tiles
from kitsune_jax.targets.cuda import stage_ir as st
from kitsune_jax.targets.cuda.ir import Keep, Ref
from kitsune_jax.targets.cuda.stage import columns
from kitsune_jax.targets.cuda.stage.builder import StageCodeBuilder
from kitsune_jax.targets.cuda.stage_ir import Expression, InArray, InImage, InRegisters, Multiply, StageValue

# --- Products for each row: both operands stream ----------------------------------------------------------------------------------

_WORKING = 56  # registers of a thread during the product: 16 sums, fragments, addresses
_Operand = tuple[int, bool]  # (free elements, is K the outer dimension?)


def lower_row_product(at: StageCodeBuilder, instr: Instr) -> None:
    """Lower the ``dot`` ``instr``, whose result, or the ``take`` that alone reads it, gets an image. Raises ``CannotLower``.

    A warp multiplies the operands of one row after the other. It copies them to shared memory piece by piece: rows of arrays and
    tables from global memory, values of the stage from the warp's scratch rows.
    """
    x, y = instr.inputs
    dtype, other = (at.program.values[v].dtype for v in (x, y))
    if dtype != other or dtype not in pointwise.OPERAND or instr["accumulate"] != "float32":
        raise CannotLower(f"a product for each row of {dtype} and {other} has no code on the GPU")
    if at.split > 1:
        raise CannotLower("a product for each row in a stage that is split by columns has no code on the GPU")
    k, of_x, of_y = shape(at.program, instr)
    value = at.new(instr)
    if value.row:
        _inner_product(at, instr, x, y)
        return
    copied = _copied(at, dtype, k, dict.fromkeys(((x, of_x), (y, of_y))))
    operands = [st.RowOperand(of[0], of[1], copied[v, of]) for v, of in ((x, of_x), (y, of_y))]
    taken = at.facts.taken.get(instr.outputs[0])
    list_ = fill = None
    if taken is not None:
        at.done.add(taken)
        value = at.new(taken)
        list_, fill = columns.take_columns(at, taken, 0), columns.fill_value(taken, value.dtype)
    (v,) = (taken or instr).outputs
    image, rows, store = Ref("image", v), None, at.facts.only_store(v)
    if store is not None and not at.rows("out", store["array"]).strides:
        at.done.add(store)
        found = at.rows("out", store["array"])
        rows = st.ToRows(at.address_number(found.ref, stored=True), int(found.access) >= 4)
    same = operands[0] == operands[1]
    node = st.RowProduct(rows or image, dtype, k, operands[0], None if same else operands[1], value.dtype, value.n, list_, fill)
    at.product_bytes = max(at.product_bytes, node.bytes)
    work = Ref("work", v)
    at.add(st.SyncWarp(), ir.Alive(work, _WORKING), node, ir.Alive(work))
    if rows is None:
        at.once_per_tile(ir.Image(image))
        at.must_be_images.add(v)
        at.add(ir.Alive(Ref("v", v), 0))
        at.settle(v, InImage(image, value.form, Ref("v", v)))


def shape(program: TileProgram, instr: Instr) -> tuple[int, _Operand, _Operand]:
    """(K, layout of x, layout of y). Raises ``CannotLower`` where the dimensions are in another order."""
    x, y = (program.values[v].rows_first for v in instr.inputs)
    if any(x[d] != 1 for d in instr["x_batch"]):
        raise CannotLower("a product for each row with further batch dimensions has no code on the GPU")
    pairs = sorted((a, b) for a, b in zip(instr["x_contract"], instr["y_contract"], strict=True) if x[a] != 1)
    if [b for _, b in pairs] != sorted(b for _, b in pairs):
        raise CannotLower("a product for each row that contracts dimensions in another order has no code on the GPU")
    k = math.prod(x[a] for a, _ in pairs)
    return k, _operand_layout(x, [a for a, _ in pairs]), _operand_layout(y, [b for _, b in pairs])


def _operand_layout(dims: Sequence[int], contract: Sequence[int]) -> _Operand:
    real = [d for d, n in enumerate(dims) if d and n != 1]
    free = [d for d in real if d not in contract]
    if real not in ([*free, *contract], [*contract, *free]):
        raise CannotLower("a product for each row that contracts dimensions between others has no code on the GPU")
    return math.prod(dims[d] for d in free), bool(free) and bool(contract) and free[0] > contract[0]


def _inner_product(at: StageCodeBuilder, instr: Instr, x: int, y: int) -> None:
    """A product with one number for a row: a sum over the columns."""
    (v,) = instr.outputs
    ref = Ref("r", v)
    product = at.unnamed(StageValue(at.value(x).n, "float32", False, Expression("({0} * {1})", (at.root(x), at.root(y)))))
    at.add(st.StartFold(ref, "Sum", "float32"))
    at.evaluate(at.value(x).width, [ir.Fold(product, "Sum", ref)])
    at.add(st.FoldQuad(ref, "Sum"))
    at.settle(v, InRegisters(ref, "row", ref))


def _copied(
    at: StageCodeBuilder, dtype: str, k: int, operands: dict[tuple[int, _Operand], None]
) -> dict[tuple[int, _Operand], tuple[st.Copied, ...]]:
    """The copies that bring the elements of each operand to its slot."""
    pieces = {v: at.facts.pieces_of(v) for v, _ in operands}
    computed: dict[int, None] = {}
    for p in dict.fromkeys(at.root(p) for of in pieces.values() for p in of):
        if not _is_in_rows(at, p, dtype):
            computed[p] = None
    starts = dict(zip(computed, columns.to_scratch(at, list(computed)) if computed else [], strict=True))
    found = {}
    for v, (free, across) in operands:
        run, first, parts = free if across else k, 0, list[st.Copied]()
        for p in map(at.root, pieces[v]):
            part = _copy_of_piece(at, p, starts.get(p), first, run)
            parts[-1:] = _joined(parts[-1], part) if parts else [part]
            first += at.value(p).n
        found[v, (free, across)] = tuple(parts)
    return found


def _is_in_rows(at: StageCodeBuilder, v: int, dtype: str) -> bool:
    home = at.value(v).home
    return isinstance(home, InArray) and not home.rows.strides and home.rows.dtype == dtype


def _copy_of_piece(at: StageCodeBuilder, v: int, start: int | None, first: int, run: int) -> st.Copied:
    value = at.value(v)
    if start is not None:
        return st.Copied("scratch", start, 1, first, value.n)
    assert isinstance(value.home, InArray)
    rows, unit = value.home.rows, 16 // pointwise.ITEM_SIZE[value.dtype]
    how = "staged" if rows.access == "kStaged" else "elements"
    if rows.access == "16" and not (first % unit or value.n % unit or run % unit):
        how = "async"
    return st.Copied(how, at.address_number(rows.ref), 1, first, value.n)


def _joined(a: st.Copied, b: st.Copied) -> list[st.Copied]:
    """``a`` and ``b`` as one copy if they are of the same kind and their addresses are consecutive."""
    if a.how == b.how != "scratch" and a.count == b.count and a.source + a.pieces == b.source:
        return [st.Copied(a.how, a.source, a.pieces + 1, a.first, a.count)]
    return [a, b]


# --- Exchanges: a product contracts columns of which each CTA of a cluster makes a slab -------------------------------------------


def all_gather(at: StageCodeBuilder, v: int, depth: int = 1) -> int:
    """The value of which ``v`` is a slab, gathered from all CTAs through a ring of ``depth`` entries; or ``v`` if it is no slab.

    Each CTA has a slab of the columns of every weight, so the values of a step are slabs, while a product contracts all columns.
    Every lane stores its slab into an entry of a ring in the shared memory of each CTA (``ClusterQueue``, which all write and
    read), waits for all slabs before it first multiplies with them (``stage/chunks.py``), and multiplies from the entry, which it
    releases at the end of the step. A carry, sent when a step begins, has a ring of two entries, as a fast CTA may be a step ahead
    of a slow one; other values need one entry. All CTAs of a cluster run the same steps on the same tiles, so entry n is the same
    value in all.
    """
    v = at.root(v)
    value = at.value(v)
    if not value.slab:
        return v
    if v not in at.gathered:
        made = at.unnamed(StageValue(value.n * at.split, value.dtype, False))
        # Every CTA can read all columns of an array.
        at.settle(made, value.home if isinstance(value.home, InArray) else _exchanged(at, v, value, depth))
        at.gathered[v] = made
    return at.gathered[v]


def begin_all_gathers(at: StageCodeBuilder, body: Sequence[Instr], carries: Collection[int]) -> None:
    """Send the carries that products of ``body`` contract, before all else in a step."""
    for i in body:
        for v in exchanged_pieces(at, i.inputs[0]) if i.kind == "matmul" else ():
            if at.root(v) in carries:
                all_gather(at, v, tiles.EXCHANGE_DEPTH)


def exchanged_pieces(at: StageCodeBuilder, x: int) -> list[int]:
    """The values whose columns make up operand ``x``: the parts of a concatenation that only products read."""
    parts = at.facts.joined.get(x)
    return [x] if parts is None else [p for part in parts for p in exchanged_pieces(at, part)]


def _exchanged(at: StageCodeBuilder, v: int, value: StageValue, depth: int) -> InImage:
    ring, push, entry = (_name(at, kind) for kind in ("exchange", "push", "entry"))
    vectors = tiles.image_vectors(value.width, value.form)
    at.setup.append(st.Exchange(ring, vectors * at.split, depth))
    at.add(st.QueueCall(ring, "wr_acquire"), st.Entry(push, ring, vectors, write=True))
    at.evaluate(value.width, [Keep(v, _name(at, "q"), value.form, to=push, push=True, reads=1)])
    at.add(st.QueueCall(ring, "wr_release"), st.Entry(entry, ring, 0))
    return InImage(entry, value.form, ring)


def reduce_scatter(at: StageCodeBuilder, products: Sequence[tuple[int, Multiply]]) -> None:
    """Give slabs of the sums of partial ``products`` homes; the sums of one product travel while the next one multiplies.

    Each CTA has the sums over its part of K for all columns (``stage/facts.py``). It sends every other CTA the slab that it needs,
    and adds up the slabs that it gets in the order of the CTAs, so that all runs give the same bits.
    """
    for v, ring in [(v, _send_partial_sums(at, v, product)) for v, product in products]:
        value, parts = at.value(v), list[int]()
        part = dataclasses.replace(value, dtype="float32", slab=0, home=None)
        at.add(st.QueueCall(ring, "rd_acquire"))
        for rank in range(at.split):
            entry = _name(at, "entry")
            at.add(st.Entry(entry, ring, tiles.image_vectors(part.width, part.form), of=rank))
            parts.append(at.unnamed(dataclasses.replace(part, home=InImage(entry, part.form, ring))))
        at.settle(v, Expression(" + ".join(f"{{{k}}}" for k in range(at.split)), tuple(parts)))
        at.materialize(v)
        at.add(st.QueueCall(ring, "rd_release"))


def _send_partial_sums(at: StageCodeBuilder, v: int, product: Multiply) -> Ref:
    """The ring through which each CTA gets its slab of the sums that ``product`` has in every CTA."""
    ring, push, n = _name(at, "exchange"), _name(at, "push"), at.value(v).n * at.split
    mine = at.unnamed(StageValue(n, "float32", False, product))
    vectors = tiles.image_vectors(at.value(mine).width, "word") // at.split
    at.setup.append(st.Exchange(ring, vectors * at.split, 1))
    at.add(st.QueueCall(ring, "wr_acquire"), st.Entry(push, ring, vectors, write=True, each=True))
    at.evaluate(at.value(mine).width, [Keep(mine, _name(at, "q"), "word", to=push, push=True, reads=1)])
    at.add(st.QueueCall(ring, "wr_release"))
    return ring


def _name(at: StageCodeBuilder, kind: str) -> Ref:
    at.counter += 1
    return Ref(kind, at.counter, "_all")


def release_entries(at: StageCodeBuilder, known: dict[int, int]) -> None:
    """Release the entries of values that were gathered since ``known`` and are no longer read."""
    for v, made in at.gathered.items():
        home = at.value(made).home
        if v not in known and isinstance(home, InImage):
            at.add(st.QueueCall(home.owner, "rd_release"))

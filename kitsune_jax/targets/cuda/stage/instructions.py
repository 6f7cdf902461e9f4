"""Lowering of each instruction of a tile program: to nodes of the device IR if it has an effect, otherwise to a home of its value.

Comes in: an instruction, and the ``StageCodeBuilder`` of its stage. Goes out: nodes, and homes. Raises ``CannotLower`` for
instructions without code; ``target.supports`` says the same of an op before a region is formed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from kitsune_jax.errors import CannotLower
from kitsune_jax.ops.spec import np_dtype
from kitsune_jax.planning.streams import dim_strides
from kitsune_jax.program.ir import ArrayType, Instr, TileProgram
from kitsune_jax.targets.cuda import frame_ir as frame
from kitsune_jax.targets.cuda import ir, pointwise, tiles
from kitsune_jax.targets.cuda import stage_ir as st
from kitsune_jax.targets.cuda.ir import Address, Expr, Ref, Store
from kitsune_jax.targets.cuda.pack import VectorRecipe, WeightRecipe
from kitsune_jax.targets.cuda.stage import column_moves, outputs, split
from kitsune_jax.targets.cuda.stage.builder import StageCodeBuilder

# --- Gathers ----------------------------------------------------------------------------------------------------------------------

_MOST = 32  # indices of a row, each of which has an address in registers


def lower_table(at: StageCodeBuilder, instr: Instr) -> None:
    """Lower a ``gather``: rows of a table in global memory, addressed by a tile of indices, take the place of an array's rows.

    No address is ever outside of the table: an index out of range means the nearest row ("clip", "promise_in_bounds"), or a row of
    the fill value among the stationary vectors. So no code after the addresses needs to test an index. Raises ``CannotLower``.
    """
    (table, index), (v,) = instr.inputs, instr.outputs
    at.new(instr)
    at.split.refuse("a gather", v)
    t, count = at.program.values[table], at.value(index).n
    if t.dtype not in pointwise.ITEM_SIZE:
        raise CannotLower(f"a table of {t.dtype} has no code on the GPU")
    if count > _MOST:
        raise CannotLower(f"a gather by {count} indices for a row of the stream has no code on the GPU, at most {_MOST} have")
    at.tables[table] = None
    if count == 1:
        _table_rows(at, instr, v, Ref("gather", v), at.row(index))
        return
    each = math.prod(t.shape[1:])
    found = [Ref("gather", v, f"_{k}") for k in range(count)]
    sources = [at.unnamed(st.StageValue(each, t.dtype, each == 1)) for _ in found]
    for ref, source, row in zip(found, sources, _indices(at, index), strict=True):
        _table_rows(at, instr, source, ref, row)
    which = np.arange(count * each)
    column_moves.place(at, instr, np.stack([which // each, which % each], axis=1), sources)


def _indices(at: StageCodeBuilder, index: int) -> list[Expr]:
    """Each index of a row, in all threads that share the row."""
    value = at.value(index)
    column_moves.to_scratch(at, [at.root(index)])
    found: list[Expr] = []
    for column in range(value.n):
        at.counter += 1
        ref = Ref("index", at.counter, f"_{column}")
        at.add(st.SetRow(ref, value.dtype, ir.FromScratch(value.dtype, column=column)))
        found.append(ir.Read("row", ref, value.dtype))
    return found


def _table_rows(at: StageCodeBuilder, instr: Instr, v: int, ref: Ref, index: Expr) -> None:
    """Settle ``v`` as the rows ``index`` of the table, with addresses ``ref``."""
    t = at.program.values[instr.inputs[0]]
    n = math.prod(t.shape[1:])
    size = n * pointwise.ITEM_SIZE[t.dtype]
    table = Ref("table", instr.inputs[0])
    at.add(ir.TableRows(ref, table, index, t.shape[0], size, _fill_row(at, instr, n, t.dtype)))
    rows = ir.Rows(ref, t.dtype, n, str(frame.contiguous_access(n, t.dtype, size)), (), tiles.is_half(t.dtype))
    if n == 1:
        at.load_row(v, rows, ref=Ref("r", ref.of, ref.part))
        return
    at.settle(v, st.InArray(rows))
    if v in at.facts.row_pieces:
        at.address_number(ref)  # now, so that no address stays in registers until the product


def _fill_row(at: StageCodeBuilder, instr: Instr, n: int, dtype: str) -> Address | None:
    """The vector of a row of the fill value, or None."""
    if instr["mode"] != "fill":
        return None
    row = np.full(n, instr["fill"], np_dtype(dtype)).view(np.uint8)
    words = np.pad(row, (0, -len(row) % 4)).view(np.int32)
    return at.vector(VectorRecipe(None, (), (), (len(words),), len(words), table=tuple(map(int, words))))


# --- Rows of arrays, and slices of them at the number of a loop: the rows of one time step ----------------------------------------


def lower_load(at: StageCodeBuilder, instr: Instr) -> None:
    """Lower a ``load`` or a ``load_slice``: one number of a row is read at once, columns by the loop or the product that needs
    them."""
    value, (v,) = at.new(instr), instr.outputs
    rows = at.rows("in", instr["array"]) if instr.kind == "load" else slice_rows(at, instr, "in", instr.inputs)
    if value.row:
        at.load_row(v, rows)
    else:
        at.settle(v, st.InArray(rows))


def lower_store_slice(at: StageCodeBuilder, instr: Instr) -> None:
    """Lower a ``store_slice``. Raises ``CannotLower``."""
    (x, *numbers) = instr.inputs
    value, rows = at.value(x), slice_rows(at, instr, "out", numbers)
    if value.row:
        at.add(st.StoreRow(rows, at.row(x), at.split.ctas > 1))
    elif at.split.ctas > 1 and not value.slab:
        raise CannotLower("a loop that is split by columns cannot store a value that is not")
    else:
        at.evaluate(value.width, [Store(x, rows, value.part)])


def slice_rows(at: StageCodeBuilder, instr: Instr, role: str, numbers: Sequence[int]) -> ir.Rows:
    """The rows of a slice. An access is as wide as the slice's pitch, its width and every step of the loop allow."""
    k = instr["array"]
    array = at.program.inputs[k] if role == "in" else at.program.outputs[k]
    whole = Ref(role, k, "_whole")
    at.name_axes()
    at.once_per_tile(dataclasses.replace(frame.addresses_of(array, role, k, False), ref=whole))
    at.counter += 1
    ref, size = Ref("cut", at.counter), pointwise.ITEM_SIZE[array.dtype]
    strides = dim_strides(array.shape)
    steps = tuple(zip(numbers, instr["dims"], instr["steps"], strict=True))
    terms = tuple((at.row(n), step * strides[d] * size) for n, d, step in steps)
    at.add(ir.SliceRows(ref, whole, terms, role == "in"))
    extent = dict(zip(instr["dims"], instr["sizes"], strict=True))
    columns = [(extent.get(d, array.shape[d]), strides[d]) for d in array.kept]
    return _rows_of_slice(array, role, ref, columns, [bytes_ for _, bytes_ in terms])


def _rows_of_slice(array: ArrayType, role: str, ref: Ref, columns: list[tuple[int, int]], steps: list[int]) -> ir.Rows:
    """``columns``: (extent, element stride) of the slice's dimensions, outermost first."""
    n, inner, contiguous = math.prod(extent for extent, _ in columns), 1, True
    for extent, stride in reversed(columns):
        contiguous &= extent == 1 or stride == inner
        inner *= extent
    size = pointwise.ITEM_SIZE[array.dtype]
    if not contiguous:
        return ir.Rows(ref, array.dtype, n, str(size), tuple(reversed(columns)), False)
    access = frame.contiguous_access(n, array.dtype, *(s * size for s in array.row_strides), *steps)
    return ir.Rows(ref, array.dtype, n, str(access), (), role == "in" and tiles.is_half(array.dtype))


# --- Products for each row: both operands stream ----------------------------------------------------------------------------------

_WORKING = 56  # registers of a thread during the product: 16 sums, fragments, addresses
_Layout = tuple[int, bool]  # (free elements, is K the outer dimension?)


def lower_row_product(at: StageCodeBuilder, instr: Instr) -> None:
    """Lower the ``dot`` ``instr``, whose result, or the ``take`` that alone reads it, gets an image. Raises ``CannotLower``.

    A warp multiplies the operands of one row after the other. It copies them to shared memory piece by piece: rows of arrays and
    tables from global memory, values of the stage from the warp's scratch rows.
    """
    x, y = instr.inputs
    dtype, other = (at.program.values[v].dtype for v in (x, y))
    if dtype != other or dtype not in pointwise.OPERAND or instr["accumulate"] != "float32":
        raise CannotLower(f"a product for each row of {dtype} and {other} has no code on the GPU")
    at.split.refuse_stage("a product for each row")
    k, of_x, of_y = row_product_shape(at.program, instr)
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
        list_, fill = column_moves.take_columns(at, taken, 0), column_moves.fill_value(taken, value.dtype)
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
        at.settle(v, st.InImage(image, value.form, Ref("v", v)))


def row_product_shape(program: TileProgram, instr: Instr) -> tuple[int, _Layout, _Layout]:
    """(K, layout of x, layout of y). Raises ``CannotLower`` where the dimensions are in another order."""
    x, y = (program.values[v].rows_first for v in instr.inputs)
    if any(x[d] != 1 for d in instr["x_batch"]):
        raise CannotLower("a product for each row with further batch dimensions has no code on the GPU")
    pairs = sorted((a, b) for a, b in zip(instr["x_contract"], instr["y_contract"], strict=True) if x[a] != 1)
    if [b for _, b in pairs] != sorted(b for _, b in pairs):
        raise CannotLower("a product for each row that contracts dimensions in another order has no code on the GPU")
    k = math.prod(x[a] for a, _ in pairs)
    return k, _operand_layout(x, [a for a, _ in pairs]), _operand_layout(y, [b for _, b in pairs])


def _operand_layout(dims: Sequence[int], contract: Sequence[int]) -> _Layout:
    real = [d for d, n in enumerate(dims) if d and n != 1]
    free = [d for d in real if d not in contract]
    if real not in ([*free, *contract], [*contract, *free]):
        raise CannotLower("a product for each row that contracts dimensions between others has no code on the GPU")
    return math.prod(dims[d] for d in free), bool(free) and bool(contract) and free[0] > contract[0]


def _inner_product(at: StageCodeBuilder, instr: Instr, x: int, y: int) -> None:
    """A product with one number for a row: a sum over the columns."""
    product = at.unnamed(st.StageValue(at.value(x).n, "float32", False, st.Expression("({0} * {1})", (at.root(x), at.root(y)))))
    at.fold_row(instr.outputs[0], product, "Sum", "float32")


def _copied(
    at: StageCodeBuilder, dtype: str, k: int, operands: dict[tuple[int, _Layout], None]
) -> dict[tuple[int, _Layout], tuple[st.Copied, ...]]:
    """The copies that bring the elements of each operand to its slot."""
    pieces = {v: at.facts.pieces_of(v) for v, _ in operands}
    computed: dict[int, None] = {}
    for p in dict.fromkeys(at.root(p) for of in pieces.values() for p in of):
        if not _is_in_rows(at, p, dtype):
            computed[p] = None
    starts = dict(zip(computed, column_moves.to_scratch(at, list(computed)) if computed else [], strict=True))
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
    return isinstance(home, st.InArray) and not home.rows.strides and home.rows.dtype == dtype


def _copy_of_piece(at: StageCodeBuilder, v: int, start: int | None, first: int, run: int) -> st.Copied:
    value = at.value(v)
    if start is not None:
        return st.Copied("scratch", start, 1, first, value.n)
    assert isinstance(value.home, st.InArray)
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


# --- All instructions -------------------------------------------------------------------------------------------------------------

_ORDERED = ("Max", "Min")
REDUCTIONS = {f"reduce_{how}": name for how, name in outputs.HOW.items()}


def lower_instruction(at: StageCodeBuilder, instr: Instr) -> None:
    """Lower ``instr``. XLA makes results that do not stream, before the call; an alias needs no code, nor does an effect that has
    been lowered with an earlier one."""
    if instr in at.done or (instr.outputs and (instr.outputs[0] in at.names or not at.program.values[instr.outputs[0]].tile)):
        return
    if instr.kind in column_moves.REARRANGING:
        column_moves.rearrange(at, instr)
    else:
        _HANDLERS.get(instr.kind, _pointwise)(at, instr)


def _pop(at: StageCodeBuilder, instr: Instr) -> None:
    """A queue's entry stays in its slot, and is read from there, until the tile is done."""
    value, q, (v,) = at.new(instr), instr["queue"], instr.outputs
    form = st.queue_form(value.dtype, q in at.slab_queues)
    queue, pop = Ref("queue", q), Ref("pop", q)
    at.add(st.QueueCall(queue, "rd_acquire"), st.Entry(pop, queue, value.slab_vectors(form)))
    if value.row:
        ref = Ref("r", v)
        at.add(st.PopRow(ref, Ref("e", v), pop, value.dtype))
        at.settle(v, st.InRegisters(ref, "row", ref))
    else:
        at.settle(v, st.InImage(pop, form, Ref("v", v)))


def _pointwise(at: StageCodeBuilder, instr: Instr) -> None:
    value, (v,) = at.new(instr), instr.outputs
    compared = v in at.facts.compared
    if not value.row and not compared and (product := _added_to(at, instr)):
        at.settle(v, product)
        _rounded(at, v)
        return
    types = [pointwise.COMPUTE[at.value(x).dtype] for x in instr.inputs]
    places = [f"{{{k}}}" for k in range(len(types))]
    dtype = "bfloat16" if v in at.facts.coarse else value.dtype
    template = pointwise.instruction(instr, places, types, pointwise.COMPUTE[value.dtype], dtype)
    if template is None:
        raise CannotLower(f"{instr.kind} of {types[0]} has no code on the GPU")
    if at.repeated and not at.facts.slices.makers:
        template = _straight(at, instr, template, dtype)
    if compared or v in at.facts.rounded_results:
        template = pointwise.rounded(instr.kind, template, value.dtype)
    elif not value.row and v in at.facts.coarse and (scaled := _scaled_exponential(at, at.root(instr.inputs[0]))):
        at.settle(v, scaled)
        return
    if value.row:
        at.set_row(v, ir.Apply(template, tuple(at.row(x) for x in instr.inputs)))
    else:
        at.settle(v, st.Expression(template, tuple(at.root(x) for x in instr.inputs)))


def _scaled(at: StageCodeBuilder, v: int) -> tuple[int, float] | None:
    """(float32 value, positive number) whose product the pending value ``v`` of a loop is, or None."""
    match at.value(v).home:
        case st.Expression("({0} * {1})", (x, y)) if at.repeated and at.value(v).dtype == "float32":
            for a, b in ((x, y), (y, x)):
                home = at.value(b).home
                if isinstance(home, st.Number) and isinstance(home.value, float) and 0 < home.value < math.inf:
                    return at.root(a), home.value
    return None


def _scaled_exponential(at: StageCodeBuilder, x: int) -> st.Expression | None:
    """The exponential of ``x``, if that is a scaled value less a number of the row, and nothing else reads either of them: the
    multiplication and the subtraction are one instruction. With scales above ln 2, scores that float32 holds could overflow."""
    match at.value(x).home:
        case st.Expression("({0} - {1})", (a, b)) if at.value(b).row or isinstance(at.value(b).home, st.Splat):
            scaled, alone = _scaled(at, a), at.uses[x] == at.uses[at.root(a)] == 1
            if alone and scaled is not None and scaled[1] <= math.log(2):
                return st.Expression(f"exp_coarse({{0}}, {pointwise.literal(scaled[1], 'float')}, {{1}})", (scaled[0], at.root(b)))
    return None


def _straight(at: StageCodeBuilder, instr: Instr, template: str, dtype: str) -> str:
    """The form of ``template`` for a step of a recurrence: without branches, which would cut the step into pieces that a lane runs
    one after the other. (Outside of loops ptxas serialised the products of a SwiGLU that had it.)"""
    if instr.kind == "tanh" and dtype == "bfloat16":
        return template.replace("tanhf(", "tanh_coarse(")
    if instr.kind == "logistic":
        return template.replace("logistic(", "logistic_straight(")
    match at.value(instr.inputs[-1]).home:
        case st.Number(number) if instr.kind == "div" and dtype in pointwise.OPERAND and 2.0**-60 <= abs(number) <= 2.0**60:
            return template.replace("divide(", "divide_by(")
    return template


def _added_to(at: StageCodeBuilder, instr: Instr) -> st.Multiply | None:
    """The product whose accumulators start from the other operand of addition ``instr``, if that alone reads the product: from a
    stationary vector; or, in a loop, from a tile, so that a result that the loop rescales and adds to needs no second set of
    registers."""
    for x, other in (instr.inputs, instr.inputs[::-1]) if instr.kind == "add" else ():
        product, start = at.value(x).home, at.value(other)
        if not isinstance(product, st.Multiply) or product.bias is not None or at.uses[at.root(x)] != 1:
            continue
        if isinstance(start.home, st.InVector) and not start.row and pointwise.COMPUTE[start.dtype] == "float":
            return dataclasses.replace(product, product=instr.outputs[0], bias=(start.home.address, start.width))
        wide = start.dtype == at.value(x).dtype == "float32" and not start.row
        pending = not isinstance(start.home, (st.Expression, st.InRegisters)) or column_moves.waits_for_product(at, other)
        if at.repeated and product.start is None and wide and not pending:
            return dataclasses.replace(product, product=instr.outputs[0], start=at.root(other))
    return None


def _row_index(at: StageCodeBuilder, instr: Instr) -> None:
    value, (v,) = at.new(instr), instr.outputs
    at.name_axes()
    index: Expr = ir.RowIndex(tuple((a, at.program.axes[a]) for a in instr["axes"]))
    index = ir.Apply(pointwise.convert("{0}", "i32", pointwise.COMPUTE[value.dtype]), (index,))
    if value.row:
        at.set_row(v, index)
        return
    row, ref = -1 - v, Ref("index", v)
    at.add(st.SetRow(ref, value.dtype, index))
    at.values[row] = st.StageValue(1, value.dtype, True, st.InRegisters(ref, "row", ref))
    at.settle(v, st.Splat(row))


def _reduce(at: StageCodeBuilder, instr: Instr) -> None:
    (x,), (v,) = instr.inputs, instr.outputs
    at.split.refuse("a reduction", x)
    if at.value(x).row:
        at.alias(instr, x)
        return
    if math.prod(at.program.values[v].shape) > 1:
        column_moves.fold_part(at, instr, REDUCTIONS[instr.kind])
        return
    how, dtype = REDUCTIONS[instr.kind], at.new(instr).dtype
    if how == "Max" and (scaled := _scaled(at, at.root(x))) and isinstance(at.value(scaled[0]).home, st.Multiply):
        # Rounding keeps the order, so the largest scaled score is the largest score, scaled.
        product, factor = scaled
        at.uses[product] += 1
        at.uses[at.root(x)] -= 1
        at.fold_row(v, product, how, dtype)
        at.set_row(v, ir.Apply("({0} * {1})", (at.row(v), ir.Literal(pointwise.literal(factor, "float")))), "_scaled")
        return
    at.fold_row(v, x, how, dtype)
    if how not in _ORDERED:
        _rounded(at, v)


def _matmul(at: StageCodeBuilder, instr: Instr) -> None:
    (v,), pieces = instr.outputs, at.split.pieces(instr.inputs[0])
    if v in at.split.partial:
        x = at.root(instr.inputs[0])
        group = [i for i in at.instrs if i.kind == "matmul" and i.outputs[0] in at.split.partial and at.root(i.inputs[0]) == x]
        at.done.update(group)
        split.reduce_scatter(at, [(i.outputs[0], _product(at, i, [at.root(p) for p in pieces])) for i in group])
        for i in group:
            _rounded(at, i.outputs[0])
        return
    product = _product(at, instr, [split.all_gather(at, x) for x in pieces])
    at.settle(v, product)
    if at.value(v).row:
        at.single_column(v)
    _rounded(at, v)


def _product(at: StageCodeBuilder, instr: Instr, pieces: list[int]) -> st.Multiply:
    at.new(instr)
    if at.next_weight is None:
        at.weights.append(weight_recipe(at, instr))
        weight = len(at.weights) - 1
    else:
        weight = at.next_weight
        at.next_weight += 1
    return st.Multiply(instr.outputs[0], weight, at.weights[weight].shape, tuple(pieces))


def _rounded(at: StageCodeBuilder, v: int) -> None:
    """Round ``v``, a float32 product or sum, to its 16 bits, if it is compared or its digits are read."""
    value = at.value(v)
    if v not in at.facts.compared | at.facts.rounded_results or not tiles.is_half(value.dtype):
        return
    template = pointwise.rounded("dot_general", "{0}", value.dtype)
    if value.row:
        at.set_row(v, ir.Apply(template, (at.row(v),)), "_rounded")
    else:
        at.settle(v, st.Expression(template, (at.unnamed(value),)))


def weight_recipe(at: StageCodeBuilder, instr: Instr) -> WeightRecipe:
    """The recipe by which the weights of ``instr`` are packed."""
    x, w = instr.inputs
    of_x, of_w = at.program.values[x], at.program.values[w]
    left = [d for d in range(1, len(of_x.shape) + 1) if d not in instr["x_contract"]]
    if any(of_x.shape[d - 1] != 1 for d in left):
        raise CannotLower("a matrix product for each row has no code on the GPU")
    if of_w.tile:
        raise CannotLower("a matrix product of two streamed values has no code on the GPU")
    pairs = sorted(zip(instr["x_contract"], instr["w_contract"], strict=True))
    batch = instr["w_batch"]  # of extent 1, as those of x
    free = [d for d in range(len(of_w.shape)) if d not in instr["w_contract"] and d not in batch]
    before = 1 + len(left)  # dimensions of the result before those of w: batch, rows, others of x
    order = [free[p - before] for p in instr["out_perm"] if p >= before]
    if of_w.dtype != of_x.dtype or of_x.dtype not in pointwise.OPERAND:
        raise CannotLower(f"a matrix product of {of_x.dtype} and {of_w.dtype} has no code on the GPU")
    permutation, slices = (*(b for _, b in pairs), *batch, *order), at.facts.slices.of(at.program, w)
    pieces, n, runs = at.split.weight(instr.outputs[0], x, lambda v: math.prod(at.program.values[v].shape))
    shape = tiles.WeightShape(pieces, n, of_x.dtype, at.split.ctas, at.most_columns(at.split.pieces(x)))
    groups = at.split.groups(instr.outputs[0])
    return WeightRecipe(w, permutation, len(pairs) + len(batch), shape, slices, groups, runs)


_HANDLERS: dict[str, Callable[[StageCodeBuilder, Instr], None]] = {
    "load": lower_load,
    "pop": _pop,
    **dict.fromkeys(("push", "store", "sink", "sink_at"), outputs.lower_output),
    "load_slice": lower_load,
    "store_slice": lower_store_slice,
    "row_index": _row_index,
    "gather": lower_table,
    "run_max": outputs.lower_run_max,
    "take": column_moves.lower_take,
    "put": column_moves.lower_put,
    "dot": lower_row_product,
    "matmul": _matmul,
    "matmul_sink": outputs.lower_gradient,
    **dict.fromkeys(REDUCTIONS, _reduce),
}

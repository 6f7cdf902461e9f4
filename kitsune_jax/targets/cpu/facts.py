"""Facts about a stage's body (a ``Flow``) for CPU code: rows read in place, merged products, rounded values.

Comes in: a ``TileProgram`` and the ``Flow`` of a body. Goes out: patterns that code generation replaces by one instruction.
Invariant: results name instructions by their position in the body, and values by their root.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from kitsune_jax.ops.spec import EVERYWHERE, Rounding
from kitsune_jax.ops.table import OPS
from kitsune_jax.program.ir import Instr, TileProgram
from kitsune_jax.program.passes import VIEWS, Flow, compared_values

# --- Rows of a table that are read in place and never lie in a tile ---------------------------------------------------------------

TABLES = ("float32", "bfloat16", "float16")  # dtypes of tables


@dataclasses.dataclass(frozen=True, slots=True)
class TakenSum:
    """A sum over a segment's rows of ``table[ids]`` or ``table[ids] * factor``, by sorted indices, whose rows nothing else reads:
    over the edges of a node, of the nodes at their other ends, with or without a weight for each edge (and head).

    ``factor``: the value that multiplies the rows, or None; for each row one number, one for each of the first dimensions, or all.
    ``absorbed``: the instructions of the body that the sum replaces.
    """

    gather: Instr
    factor: int | None
    absorbed: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TakenDotFacts:
    """A sum over the last dimensions of ``table[ids] * table2[ids2]`` or ``table[ids] * y``: the gradient of an edge's weight.

    ``sides``: of each operand the gather that reads its rows, or its value if it is a tile. ``absorbed``: as in ``TakenSum``."""

    sides: tuple[Instr | int, Instr | int]
    absorbed: tuple[int, ...]


def taken_dots(flow: Flow) -> dict[int, TakenDotFacts]:
    """The products of rows of tables in ``flow``'s body, by the position of their ``reduce_sum``."""
    found = {i: _dot(flow, i, instr) for i, instr in enumerate(flow.body) if instr.kind == "reduce_sum"}
    return {i: match for i, match in found.items() if match is not None}


def _dot(flow: Flow, i: int, instr: Instr) -> TakenDotFacts | None:
    x = flow.type(instr.inputs[0])
    dims = sorted(instr["axes"])
    real = [d for d, n in enumerate(x.shape, 1) if n != 1]
    reduced = [d for d in dims if d in real]
    if not x.tile or 0 in dims or not reduced or reduced != real[len(real) - len(reduced) :]:
        return None
    number, absorbed = _narrow(flow, _only_reader(flow, instr.inputs[0], i))
    if number is None or flow.body[number].kind != "mul":
        return None
    pair = flow.body[number].inputs
    whole = flow.shape(instr.inputs[0])
    if any(not flow.type(v).tile or flow.shape(v) != whole or flow.literal(v) is not None for v in pair):
        return None
    absorbed = (*absorbed, number)
    sides: list[Instr | int] = []
    for v in pair:
        taken = _gathered(flow, _only_reader(flow, v, number))
        if taken is None or flow.dtype(taken.gather.inputs[0]) != flow.dtype(pair[0]):
            sides.append(v)
        else:
            sides.append(taken.gather)
            absorbed += taken.absorbed
    if flow.dtype(pair[0]) not in TABLES or all(isinstance(side, int) for side in sides):
        return None
    return TakenDotFacts((sides[0], sides[1]), absorbed)


def taken_sums(program: TileProgram, flow: Flow) -> dict[int, TakenSum]:
    """The sums of rows of tables in ``flow``'s body, by the position of their ``sink_at``."""
    found: dict[int, TakenSum] = {}
    for i, instr in enumerate(flow.body):
        if instr.kind != "sink_at" or not instr["sorted"] or flow.type(instr.inputs[1]).shape != ():
            continue
        sink = program.sinks[instr["sink"]]
        if (sink.how, sink.dtype) == ("sum", "float32") and (match := _match(flow, i, instr.inputs[0])) is not None:
            found[i] = match
    return found


def _match(flow: Flow, sink: int, v: int) -> TakenSum | None:
    number = _only_reader(flow, v, sink)
    if number is None or flow.body[number].kind != "mul":
        return _gathered(flow, number)
    operands = flow.body[number].inputs
    for rows, factor in (operands, operands[::-1]):
        numbers = _factor(flow, factor)
        if numbers is not None and flow.shape(rows) == flow.shape(v):
            match = _gathered(flow, _only_reader(flow, rows, number), numbers, (number,))
            if match is not None:
                return match
    return None


def _gathered(flow: Flow, number: int | None, factor: int | None = None, absorbed: tuple[int, ...] = ()) -> TakenSum | None:
    """The sum of the results of instruction ``number``, if these are rows of a table, perhaps widened to float32."""
    made, widened = _narrow(flow, number)
    if made is None or flow.body[made].kind != "gather":
        return None
    instr = flow.body[made]
    table, index = instr.inputs
    loaded = flow.makers.get(flow.root(table))
    fits = loaded is not None and loaded.kind == "load" and not flow.type(table).tile and flow.dtype(table) in TABLES
    if not fits or flow.type(table).shape[0] == 0 or flow.type(index).shape != () or not flow.type(index).tile:
        return None
    return TakenSum(instr, factor, (*absorbed, *widened, made))


def _narrow(flow: Flow, number: int | None) -> tuple[int | None, tuple[int, ...]]:
    """Instruction ``number`` and (); if it widens a 16-bit float to float32, the maker of its operand, and itself."""
    if number is None or flow.body[number].kind != "convert_element_type":
        return number, ()
    (x,), (y,) = flow.body[number].inputs, flow.body[number].outputs
    if flow.dtype(x) not in ("bfloat16", "float16") or flow.dtype(y) != "float32":
        return None, ()
    return _only_reader(flow, x, number), (number,)


def _only_reader(flow: Flow, v: int, reader: int) -> int | None:
    """The instruction that makes ``v``, if no other than ``reader`` reads it."""
    root = flow.root(v)
    return flow.places.get(root) if flow.readers(root) == [reader] else None


def _factor(flow: Flow, v: int) -> int | None:
    """The operand that ``v`` repeats along the last dimensions of a row, or ``v`` where it repeats nothing; None where it is the
    same for all rows, or repeated in another way."""
    if not flow.type(v).tile or flow.literal(v) is not None:
        return None
    instr = flow.makers.get(flow.root(v))
    if instr is None or instr.kind != "broadcast_in_dim":
        return v if flow.dtype(v) in TABLES else None
    source, shape = instr.inputs[0], flow.type(instr.outputs[0]).shape
    if not flow.type(source).tile or flow.dtype(source) not in TABLES:
        return None
    own = [d - 1 for d, n in zip(instr["dims"][1:], flow.type(source).shape, strict=True) if n != 1]
    real = [d for d, n in enumerate(shape) if n != 1]
    return source if own == real[: len(own)] else None


# --- Exponentials of rows ---------------------------------------------------------------------------------------------------------

NARROW = ("bfloat16", "float16")
SHORT_ROW = 16  # elements; shorter rows are better off in a loop over all rows


@dataclasses.dataclass(frozen=True, slots=True)
class RowExponential:
    """``exp(x * factor - shift)`` with a number ``shift`` for each row (of the last dimension), as in a softmax.

    ``out``: the exponential, or the 16-bit float that it is rounded to where nothing else reads it. ``sums``: the sums over the
    last dimension, or None; where ``out`` is rounded, they are of the exact numbers. ``absorbed``: the other instructions of the
    body that the step replaces."""

    x: int
    factor: float
    shift: int
    out: int
    sums: int | None
    absorbed: tuple[int, ...]


def row_exponentials(flow: Flow) -> dict[int, RowExponential]:
    """The exponentials of rows in ``flow``'s body, by the position of their ``exp``: of values that lie in memory in any case,
    because a matrix product makes them or a reduction reads them."""
    found = {i: _exponential(flow, i, instr) for i, instr in enumerate(flow.body) if instr.kind == "exp"}
    return {i: match for i, match in found.items() if match is not None}


def _exponential(flow: Flow, i: int, instr: Instr) -> RowExponential | None:
    (e,) = instr.outputs
    row = flow.type(e)
    number = _only_reader(flow, instr.inputs[0], i)
    if row.dtype != "float32" or not row.tile or not row.shape or row.shape[-1] < SHORT_ROW:
        return None
    if number is None or flow.body[number].kind != "sub":
        return None
    x, repeated = flow.body[number].inputs
    shift = _repeated_along_rows(flow, repeated)
    if shift is None or flow.literal(x) is not None or flow.type(x).shape != row.shape or not flow.type(x).tile:
        return None
    absorbed: tuple[int, ...] = (number,)
    factor = 1.0
    scaled = _only_reader(flow, x, number)
    if scaled is not None and flow.body[scaled].kind == "mul":
        constants = [flow.literal(v) for v in flow.body[scaled].inputs]
        if sum(c is not None for c in constants) == 1:
            factor = float(next(c for c in constants if c is not None))
            x = next(v for v, c in zip(flow.body[scaled].inputs, constants, strict=True) if c is None)
            absorbed += (scaled,)
            number = scaled
    widened = _only_reader(flow, x, number)
    narrow, positions = _narrow(flow, widened) if widened is not None else (None, ())
    if positions:
        x = flow.body[positions[0]].inputs[0]
        absorbed += positions
    elif (product := _widened_product(flow, x)) is not None:
        x = product  # the other readers of the widened numbers widen them as they read them
    if flow.type(x).shape != row.shape or not _lies_in_memory(flow, x):
        return None
    sums = [j for j in flow.readers(flow.root(e)) if _sums_rows(flow, j, e)]
    others = [j for j in flow.readers(flow.root(e)) if j not in sums]
    out = e
    if len(others) == 1 and _converts(flow, others[0], NARROW):
        absorbed += (others[0],)
        out = flow.body[others[0]].outputs[0]
        for j in flow.readers(flow.root(out)):  # a sum of the rounded numbers, which that of the exact ones replaces
            wide = flow.instruction(j).outputs[0] if _converts(flow, j, ("float32",)) else None
            if wide is not None and (summed := flow.readers(flow.root(wide))) and _sums_rows(flow, summed[0], wide):
                absorbed += (j,) if len(summed) == 1 else ()
                sums += summed if len(summed) == 1 else []
    elif not sums:
        return None  # its readers may take it from a register
    if len(sums) > 1:
        return None
    return RowExponential(x, factor, shift, out, flow.body[sums[0]].outputs[0] if sums else None, (*absorbed, *sums))


def _widened_product(flow: Flow, x: int) -> int | None:
    """The 16-bit product that ``x`` is a widening conversion of."""
    made = flow.places.get(flow.root(x))
    if made is None or flow.body[made].kind != "convert_element_type" or flow.dtype(x) != "float32":
        return None
    source = flow.body[made].inputs[0]
    maker = flow.makers.get(flow.root(source))
    return source if maker is not None and maker.kind == "matmul" and flow.dtype(source) in NARROW else None


def _repeated_along_rows(flow: Flow, v: int) -> int | None:
    """The float32 value of which ``v`` repeats each number along the last dimension."""
    instr = flow.makers.get(flow.root(v))
    if instr is None or instr.kind != "broadcast_in_dim" or flow.literal(v) is not None:
        return None
    source, shape = instr.inputs[0], flow.type(v).shape
    kept, t = shape[:-1], flow.type(source)
    fits = t.tile and t.dtype == "float32" and (t.shape in (kept, (*kept, 1)))
    return source if fits and tuple(instr["dims"]) == tuple(range(1 + len(t.shape))) else None


def _lies_in_memory(flow: Flow, v: int) -> bool:
    maker = flow.makers.get(flow.root(v))
    reduced = (flow.instruction(j).kind.startswith("reduce_") for j in flow.readers(flow.root(v)))
    return maker is not None and (maker.kind == "matmul" or any(reduced))


def _sums_rows(flow: Flow, i: int, e: int) -> bool:
    """Whether instruction ``i`` sums ``e`` over its last dimension."""
    instr = flow.instruction(i)
    if instr.kind != "reduce_sum" or flow.root(instr.inputs[0]) != flow.root(e):
        return False
    return tuple(instr["axes"]) == (len(flow.type(e).shape),)


def _converts(flow: Flow, i: int, dtypes: tuple[str, ...]) -> bool:
    instr = flow.instruction(i)
    return instr.kind == "convert_element_type" and flow.dtype(instr.outputs[0]) in dtypes


# --- Sums of two products ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class AddedProduct:
    """``result`` = the float32 value that the pointwise instruction ``other`` makes + that of product ``product``, which is added
    where ``other`` has stored its result. ``add``: the position of the addition.

    ``carry``: the number of the loop's carry to whose place the product is added, as the sum is its next value; ``other`` is -1.
    Where the readers of the sum are pointwise too, it is better off in their group."""

    result: int
    other: int
    product: int
    add: int
    carry: int | None = None


def added_products(flow: Flow, carries: Sequence[int] = ()) -> dict[int, AddedProduct]:
    """The sums of a pointwise result and a product in ``flow``'s body, by the position of their addition. ``carries``: of the loop
    whose body it is."""
    found: dict[int, AddedProduct] = {}
    for j, instr in enumerate(flow.body):
        if instr.kind != "add" or any(flow.uses.get(v) != [(j, p)] for p, v in enumerate(instr.inputs)):
            continue
        (out,) = instr.outputs
        if any(OPS[i.kind].family == "pointwise" for i in _readers(flow, out) if i.kind in OPS):
            continue
        for v, w in (instr.inputs, instr.inputs[::-1]):
            product, other = flow.places.get(v, -1), flow.places.get(w, -1)
            carry = next((p for p, c in enumerate(carries) if c == w and flow.uses.get(out) == [(len(flow.body), p)]), None)
            kind = flow.body[other].kind if other >= 0 else ""
            stored = carry is not None or kind in OPS and OPS[kind].family == "pointwise"
            if product >= 0 and stored and flow.type(w) == flow.type(out) and _adds(flow, flow.body[product]):
                found[j] = AddedProduct(out, other, product, j, carry)
    return found


def _readers(flow: Flow, v: int) -> Iterator[Instr]:
    """The instructions that read ``v``, through views."""
    for i in flow.readers(v):
        instr = flow.instruction(i)
        if instr.kind in VIEWS:
            yield from _readers(flow, instr.outputs[0])
        yield instr


def _adds(flow: Flow, product: Instr) -> bool:
    """Whether ``product`` is a matrix product that can add to what lies at the place of its result."""
    if product.kind != "matmul":
        return False
    x, w = (flow.type(v) for v in product.inputs[:2])
    plain = product.get("activation", "none") == "none" and product.get("rounds", "float32") == "float32"
    whole = len(product["x_contract"]) + len(product["x_batch"]) == len(x.shape)
    out = flow.type(product.outputs[0])
    # The result's rows are its batch, then its columns.
    order = [p for p, n in zip(product["out_perm"][1:], out.shape, strict=True) if n != 1]
    float32 = out.dtype == "float32" and "float64" not in (x.dtype, w.dtype)
    return x.tile and not w.tile and plain and whole and float32 and order == sorted(order)


_SAME = ("x_contract", "w_contract", "x_batch", "w_batch", "out_perm")


@dataclasses.dataclass(frozen=True, slots=True)
class ProductSum:
    """``result`` = the float32 product of instruction ``first`` + that of ``second``, a later one, as in the ``x @ a + h @ b`` of a
    recurrent cell: the second product adds to the stored result of the first. ``add``: the position of the addition.

    Only products that contract everything but the rows are joined, so that both have the same matrix of results.
    ``with_biases_first`` has moved biases in front of such sums."""

    result: int
    first: int
    second: int
    add: int


def product_sums(flow: Flow) -> dict[int, ProductSum]:
    """The sums of two products in ``flow``'s body, by the position of either product."""
    number = {v: i for i, instr in enumerate(flow.body) for v in instr.outputs}
    found: dict[int, ProductSum] = {}
    for j, instr in enumerate(flow.body):
        if instr.kind != "add" or any(flow.uses.get(v) != [(j, p)] for p, v in enumerate(instr.inputs)):
            continue
        first, second = sorted(number.get(v, -1) for v in instr.inputs)
        if first >= 0 and _joined(flow, flow.body[first], flow.body[second]):
            found[first] = found[second] = ProductSum(instr.outputs[0], first, second, j)
    return found


def _joined(flow: Flow, a: Instr, b: Instr) -> bool:
    if not (a.kind == b.kind == "matmul" and _plain(flow, a) and _plain(flow, b)):
        return False
    return flow.type(a.outputs[0]) == flow.type(b.outputs[0]) and all(a[name] == b[name] for name in _SAME)


def _plain(flow: Flow, product: Instr) -> bool:
    x, w = (flow.type(v) for v in product.inputs[:2])
    if not x.tile or w.tile or {x.dtype, w.dtype, flow.dtype(product.outputs[0])} != {"float32"}:
        return False
    whole = len(product["x_contract"]) == len(x.shape) and not product["x_batch"]
    return whole and product.get("activation", "none") == "none"


# --- 16-bit values that are rounded where they are made ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Rounded:
    """``values``: the roots that are rounded; ``everywhere``: those that conversions to wider floats read rounded too."""

    values: frozenset[int]
    everywhere: frozenset[int]


def rounded_values(program: TileProgram, flow: Flow, rounding: Rounding) -> Rounded:
    """The roots of 16-bit values that their pointwise operation rounds, although its group computes in float32.

    ``rounding``: where XLA rounds. Values that are compared with others, or whose maximum leaves the program, are rounded in any
    case, also for conversions (``program.passes.compared_values`` says why).
    """
    found: set[int] = set()
    everywhere: set[int] = set()
    compared: frozenset[int] | None = None  # computed only for programs with 16-bit values
    for instr in flow.body:
        if instr.kind not in OPS or OPS[instr.kind].family != "pointwise":
            continue
        literals = tuple(flow.literal(v) for v in instr.inputs)
        for v in instr.outputs:
            dtype = flow.type(v).dtype
            if not EVERYWHERE.rounds(instr.kind, dtype, literals):
                continue
            compared = compared_values(program) if compared is None else compared
            if v in compared:
                everywhere.add(v)
            if v in compared or rounding.rounds(instr.kind, dtype, literals):
                found.add(v)
    return Rounded(frozenset(found), frozenset(everywhere))

"""Loops and products of two tiles, as instructions of the CPU program.

Comes in: an instruction ``loop`` or ``dot`` of a stage (or of a loop's body). Goes out: its code, in the
stage. Carries live in scratch: the next value of one is written to its place at once where nothing reads the old value afterwards,
and copied there at the end of the iteration elsewhere. What a slice takes out of an array costs nothing: its operands move with
the numbers of the loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kitsune_jax.program.ir import WITHIN, Block, Instr, TileProgram
from kitsune_jax.program.passes.flow import VIEWS
from kitsune_jax.targets.cpu import pointwise, slices, views
from kitsune_jax.targets.cpu.bytecode import (
    REDUCTIONS,
    SCRATCH,
    Dot,
    Loop,
    Operand,
    Reduce,
)
from kitsune_jax.targets.cpu.stage import Stage
from kitsune_jax.targets.cpu.vectors import VectorBuilder, compute_type
from kitsune_jax.targets.cpu.views import View
from kitsune_jax.targets.errors import CannotLower

_FEW = 8  # rows of a matrix by which another is multiplied as it lies (``small`` in cpu/src/run_dot.cc)
# Elements of a matrix up to which a vector is multiplied by it and summed as rows are, however it lies; and unless it lies well.
# Products of two vectors are so up to the second number. A vector times a matrix of 4 x 4 took 6 to 12 ns so and 11 to 24 as a
# product; 6 x 6 took 51 to 82 and 25 to 37, 64 x 64 740 to 2600 and 260 to 280 (float32, a Xeon with AMX).
_TINY, _SMALL = 16, 1 << 12


def loop(stage: Stage, instr: Instr, emit: Callable[[Stage], None]) -> None:
    """``emit`` makes the code of the body."""
    block = instr.block
    assert block is not None
    if instr["count"] == 0:
        stage.views.update((out, stage.view(v)) for out, v in zip(instr.outputs, instr.inputs, strict=True))
        return
    for v in pointwise.captured(instr):
        if stage.leaf(v) is None:
            stage.view(v)
    inside = Stage(stage.program, block.body, stage.preps, stage.products, stage.rounding, stage, block)
    places = [inside.new(v) for v in block.carries]
    for v, place in zip(instr.inputs, places, strict=True):
        maker = stage.flow.makers.get(stage.root(v))
        if maker is None or maker.kind != "empty":
            stage.write(v, place)
    inside.views.update(stage.views)
    inside.views.update(zip(block.carries, places, strict=True))
    inside.carried = {p: places[p] for p in _written_at_once(inside, block)}
    emit(inside)
    _hand_on(inside, block, places)
    if inside.code:
        within = _within(stage.program, instr)
        stage.code.append(Loop(instr["count"], int(instr.get("reverse", False)), within, tuple(inside.code)))
    stage.views.update(zip(instr.outputs, places, strict=True))


def _within(program: TileProgram, instr: Instr) -> tuple[int, ...]:
    """Which iterations a tile runs, by the rows of its batch."""
    bounds = instr.get("within")
    if bounds is None:
        return ()
    axis, step, low, high, which = bounds
    unbounded = math.prod(program.axes) + instr["count"] * step
    low, high = -unbounded if low is None else low, unbounded if high is None else high
    return math.prod(program.axes[axis + 1 :]), program.axes[axis], step, low, high, WITHIN.index(which)


def _written_at_once(stage: Stage, block: Block) -> list[int]:
    """The carries whose place nobody reads once the next value is written to it."""
    items = pointwise.schedule(stage)
    where = {i: k for k, item in enumerate(items) for i in item.ops}
    maker = {stage.root(v): i for i, instr in enumerate(stage.body) for v in instr.outputs if i in where}

    def read_before(v: int, i: int, same: bool) -> bool:
        """Whether ``v`` is read before instruction ``i`` writes, or as it does. ``same``: ``v`` is the carry, not a part of it."""
        for j, _ in stage.uses.get(v, ()):
            if j < len(stage.body) and j not in where:  # a view, or a conversion that whoever reads it does
                if not read_before(stage.root(stage.body[j].outputs[0]), i, same and stage.body[j].kind not in VIEWS):
                    return False
                continue
            grouped = same and j <= i and where.get(j) == where[i] and items[where[i]].loop is not None
            alike = grouped and pointwise.shape_of(stage, v) == items[where[i]].loop
            if not alike and (j not in where or where[j] >= where[i]):
                return False
        return True

    results = [stage.root(v) for v in block.results]
    return [p for p, (v, r) in enumerate(zip(block.carries, results, strict=True)) if r in maker and read_before(v, maker[r], True)]


def _hand_on(stage: Stage, block: Block, places: Sequence[View]) -> None:
    """Copy what is not in its carry's place yet. What lies in a place itself moves aside first."""
    homes = {place.ref.index for place in places}
    moves = []
    for p, (result, place) in enumerate(zip(block.results, places, strict=True)):
        if (len(stage.body), p) in stage.satisfied or stage.root(result) == block.carries[p]:
            continue
        lies = None if stage.leaf(result) is not None else stage.view(result)
        if lies == place:
            continue
        if lies is not None and lies.ref.space == SCRATCH and lies.ref.index in homes:
            aside = stage.new(result)
            stage.copy(lies, aside)
            lies = aside
        moves.append((result, lies, place))
    for result, lies, place in moves:
        if lies is None:
            stage.write(result, place)
        else:
            stage.copy(lies, place)


def paste(stage: Stage, i: int, instr: Instr) -> None:
    """A part of a carry is written where it belongs: nothing else reads or writes the carry."""
    x, part, _ = instr.inputs
    stage.views[instr.outputs[0]] = stage.view(x)
    if not stage.settled((i, 1), part):
        stage.write(part, slices.part(stage, instr))


def dot(stage: Stage, i: int, instr: Instr) -> None:
    x, y = instr.inputs
    t, u, result = stage.type(x), stage.type(y), stage.type(instr.outputs[0])
    if t.dtype != u.dtype or not t.dtype.startswith(("float", "bfloat")):
        raise CannotLower(f"a product of {t.dtype} and {u.dtype} for each row")
    if "float64" in (t.dtype, result.dtype) and t.dtype != result.dtype:
        raise CannotLower(f"a {result.dtype} product of {t.dtype} for each row")
    contract, batch = ([d - 1 for d in instr[f"x_{name}"]] for name in ("contract", "batch"))
    contract_y, batch_y = ([d - 1 for d in instr[f"y_{name}"]] for name in ("contract", "batch"))
    free = [d for d in range(len(t.shape)) if d not in (*contract, *batch)]
    free_y = [d for d in range(len(u.shape)) if d not in (*contract_y, *batch_y)]
    sides = (x, (batch, free, contract)), (y, (batch_y, free_y, contract_y))
    m, n, k = (math.prod(s.shape[d] for d in dims) for s, dims in ((t, free), (u, free_y), (t, contract)))
    lead = len(batch), len(batch) + len(free)
    groups = [tuple(range(lead[0])), tuple(range(*lead)), tuple(range(lead[1], len(result.shape)))]
    if n < m and n <= _FEW:  # the result then lies transposed, and the larger operand is read once, as it lies
        m, n, sides = n, m, sides[::-1]
        groups[1:] = reversed(groups[1:])
    if k == 1 or m == 1 and (n * k <= _SMALL if n == 1 else not _is_matrix(stage.view(sides[1][0]), n * k, *sides[1][1])):
        _multiplied_and_summed(stage, instr, sides)
        return
    (x, of_x), (y, (batch_y, free_y, contract_y)) = sides
    shared = _shared(stage.view(y), batch_y, free_y, contract_y)
    of_y = [*batch_y, *free_y[:shared]], free_y[shared:], contract_y
    groups = [(*groups[0], *groups[2][:shared]), groups[1], groups[2][shared:]]
    (vx, sx), (vy, sy) = _matrices(stage, x, of_x, dense=True), _matrices(stage, y, of_y, dense=False)

    def fits(view: View) -> bool:
        strides = _strides(view, groups)
        return strides is not None and strides[2] == 1

    def layout() -> View:
        order = [d for dims in groups for d in dims]
        own = stage.scratch(tuple(result.shape[d] for d in order), result.dtype)
        return views.transpose(own, [order.index(d) for d in range(len(order))])

    out = stage.place(instr.outputs[0], fits, layout)
    strides = _strides(out, groups)
    assert strides is not None
    b, n = (math.prod(vy.shape[d] for d in dims) for dims in of_y[:2])
    x_ = Operand(vx.ref, vx.row_stride, (0 if shared else sx[0], sx[1]))
    y_ = Operand(vy.ref, vy.row_stride, sy)
    stage.code.append(Dot(b, m, n, k, x_, y_, Operand(out.ref, out.row_stride, strides[:2])))


def _is_matrix(y: View, elements: int, batch: Sequence[int], free: Sequence[int], contract: Sequence[int]) -> bool:
    """Is ``y`` worth a product with a vector where it lies? What lies otherwise, as in a loop whose values are columns, and what is
    tiny, is multiplied and summed as rows are: 512 rows by 8 x 8 matrices took 48 to 74 us so and 24 to 34 us as products, by
    32 x 32 ones 200 to 410 and 90 to 110 us (Xeon with AMX)."""
    lies_well = any(y.shape[d] > 1 and y.strides[d] == 1 for d in (*free, *contract))
    return elements > _SMALL or elements > _TINY and lies_well


def _shared(y: View, batch: Sequence[int], free: Sequence[int], contract: Sequence[int]) -> int:
    """Of a product without a batch, how many of the first ``free`` dimensions of ``y`` become one, of matrices that meet the same
    other operand, because the rest is a matrix where ``y`` lies: an expert's weights, several for a token."""
    if math.prod(y.shape[d] for d in batch) != 1:
        return 0
    whole = (k for k in range(len(free)) if _strides(y, ((*batch, *free[:k]), free[k:], contract)) is not None)
    return next(whole, 0)


Groups = Sequence[Sequence[int]]  # row dimensions: batch, free, contracted


def _strides(view: View, groups: Groups) -> tuple[int, ...] | None:
    """One stride for each group of dimensions, or None where a group is no single loop."""
    found = [views.chain([(view.shape[d], view.strides[d]) for d in dims]) for dims in groups]
    return None if None in found else tuple(s for s in found if s is not None)


def _matrices(stage: Stage, v: int, groups: Groups, dense: bool) -> tuple[View, tuple[int, ...]]:
    """``v`` with a stride for each group, the last of them 1 if ``dense``; a copy where it does not lie so."""
    view = stage.view(v)
    strides = _strides(view, groups)
    if strides is None or (dense and strides[2] != 1):
        order = [d for dims in groups for d in dims]
        own = stage.scratch(tuple(view.shape[d] for d in order), view.dtype)
        view = views.transpose(own, [order.index(d) for d in range(len(order))])
        stage.write(v, view)
        strides = _strides(view, groups)
        assert strides is not None
    return view, strides


def _multiplied_and_summed(stage: Stage, instr: Instr, sides: tuple[tuple[int, Groups], tuple[int, Groups]]) -> None:
    """A product of vectors, or of a matrix and a vector: elementwise, and summed over what is contracted."""
    (x, (batch, free, contract)), (y, (batch_y, free_y, contract_y)) = sides
    vx, vy = stage.view(x), stage.view(y)
    left: list[tuple[int | None, int | None]] = [*zip(batch, batch_y, strict=True)]
    left += [*((d, None) for d in free), *((None, e) for e in free_y)]
    kept, dims = len(left), [*left, *zip(contract, contract_y, strict=True)]

    def spread(view: View, of: Sequence[int | None]) -> View:
        strides = tuple(0 if d is None else view.strides[d] for d in of)
        return View(view.ref, view.row_stride, shape, strides)

    shape = tuple(vx.shape[d] if d is not None else vy.shape[e or 0] for d, e in dims)
    wide = compute_type(vx.dtype)
    builder = VectorBuilder(views.squeezed(shape))
    a, b = builder.load(spread(vx, [d for d, _ in dims])), builder.load(spread(vy, [e for _, e in dims]))
    products = stage.scratch(shape, wide)
    builder.store(products, builder.micro("mul", wide, a, b))
    stage.code.append(builder.finish())
    out = stage.place(instr.outputs[0])
    over = Operand(products.ref, products.row_stride, products.strides)
    stage.code.append(Reduce(REDUCTIONS.index("sum"), shape[:kept], shape[kept:], over, out.operand()))

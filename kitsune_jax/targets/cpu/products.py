"""CPU code of matrix products and loops: products with a stationary operand, weight gradients, products of two tiles, loops.

Comes in: an instruction ``matmul``, ``matmul_sink``, ``dot``, ``loop`` or ``paste`` of a ``Stage``. Goes out: code appended to the
stage. An operand that does not lie as the kernel reads it is copied first. Raises ``CannotLower`` for products without a kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from kitsune_jax.errors import CannotLower
from kitsune_jax.program.ir import WITHIN, Instr, LoopBody, TileProgram, walk
from kitsune_jax.program.passes import VIEWS, Use
from kitsune_jax.targets.cpu import bytecode as bc
from kitsune_jax.targets.cpu import memory, pointwise
from kitsune_jax.targets.cpu.memory import View
from kitsune_jax.targets.cpu.stage import NEVER, StageLowering
from kitsune_jax.targets.cpu.vectors import VectorBuilder, compute_type

# --- Products of a tile and a stationary operand ----------------------------------------------------------------------------------

MATMUL_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
# Limits of cpu/src/program_check.cc on a packed weight.
_LONGEST_SIDE, _MOST_PREPARED = 1 << 26, 1 << 36


def emit_matmul(stage: StageLowering, i: int, instr: Instr) -> None:
    """Emit one ``Matmul`` with its epilogue and its ``Prep``s, after a copy of x unless x lies as evenly spaced rows of contiguous
    K elements. Dimensions are ordered as x's memory; the stationary operand is packed to match."""
    dims = _DotDims.of(stage, instr)
    x, w, *bias = instr.inputs
    if stage.leaf(w) is not None:
        raise CannotLower("a matrix product with a constant")
    weight = stage.view(w)
    lies = stage.near(x)
    groups = [list(dims.free), list(dims.w_batch), list(dims.w_contract)]  # row dimensions of x
    in_memory = [sorted(group, key=lambda d: -lies.strides[d]) for group in groups]
    rows = _rows(lies, *in_memory)
    if rows is None:
        in_memory = groups
        rows = _copied_rows(stage, x, *groups)
    x_free, x_batch, x_contract = in_memory
    free, batch = [dims.out_of_x[d] for d in x_free], [dims.out_of_x[d] for d in x_batch]
    total, late = stage.sums.get(i), stage.late_products.get(i)
    result = total.result if total is not None else late.result if late is not None else instr.outputs[0]
    shape = stage.type(result).shape

    def panel(view: View) -> tuple[list[int], bc.CpuOperand | None]:
        columns = sorted(dims.out_of_w.values(), key=lambda d: -view.strides[d])
        return columns, _rows(view, free, batch, columns)

    def layout() -> View:
        sequence = [*free, *batch, *sorted(dims.out_of_w.values(), key=_order_of_readers(stage, result))]
        return _scratch(stage, shape, stage.type(result).dtype, sequence, len(free))

    out = stage.place(result, lambda v: panel(v)[1] is not None, layout)
    columns, lines = panel(out)
    assert lines is not None
    w_of_out = {d: k for k, d in dims.out_of_w.items()}
    prep = _weight(stage, weight, [dims.w_batch[b] for b in x_batch], [dims.w_contract[k] for k in x_contract],
                   [w_of_out[d] for d in columns])  # fmt: skip
    numbers = sorted(columns)  # the dimensions of a bias, in its order
    stage.code.append(
        bc.Matmul(
            x=rows,
            row_multiple=math.prod(shape[d] for d in free),
            batch=math.prod(shape[d] for d in batch),
            weight=stage.prep(prep, w),
            bias=stage.prep(_dense(stage.view(bias[0]), [numbers.index(d) for d in columns]), bias[0]) if bias else -1,
            activation=bc.ACTIVATIONS.index(instr.get("activation", "none")),
            parameters=instr.get("parameters", ()),
            rounds=bc.DTYPE_CODE[instr.get("rounds", "float32")],
            out=lines,
            adds=late is not None or total is not None and total.second == i,
        )
    )


def _order_of_readers(stage: StageLowering, r: int) -> Callable[[int], int]:
    """Where dimension ``d`` of the rows of ``r`` stands for its readers, if they all transpose it alike; else ``d``. A reader of a
    reshaped ``r`` has other dimensions."""
    of = stage.type(r)
    found = [stage.flow.instruction(i) for i, _ in stage.uses.get(stage.root(r), ())]
    alike = [instr.kind == "transpose" and stage.type(instr.inputs[0]).shape == of.shape for instr in found]
    orders = {instr["permutation"] if same else None for instr, same in zip(found, alike, strict=True)}
    (order,) = orders if len(orders) == 1 else (None,)
    lead = int(of.tile)
    return lambda d: d if order is None else tuple(order).index(d + lead)


@dataclasses.dataclass(frozen=True)
class _DotDims:
    """The roles of dimensions: row dimensions of x (0-based, without the row), dimensions of w, row dimensions of the result."""

    free: tuple[int, ...]
    w_batch: dict[int, int]  # row dimension of x -> dimension of w
    w_contract: dict[int, int]
    out_of_x: dict[int, int]  # free and batch dimensions of x -> row dimension of the result
    out_of_w: dict[int, int]  # free dimension of w -> row dimension of the result, ascending in the result

    @staticmethod
    def of(stage: StageLowering, instr: Instr) -> _DotDims:
        x, w = (stage.type(v) for v in instr.inputs[:2])
        if not x.tile or w.tile:
            raise CannotLower("a matrix product of two streamed values")
        if 0 in (*instr["x_contract"], *instr["x_batch"]):
            raise CannotLower("a matrix product that contracts or batches over the rows of a tile")
        x_contract, x_batch = ([d - 1 for d in instr[name]] for name in ("x_contract", "x_batch"))
        w_contract, w_batch = list(instr["w_contract"]), list(instr["w_batch"])
        free = tuple(d for d in range(len(x.shape)) if d not in x_contract and d not in x_batch)
        columns = [d for d in range(len(w.shape)) if d not in w_contract and d not in w_batch]
        falls_out = [*(("x", d) for d in x_batch), ("x", -1), *(("x", d) for d in free), *(("w", d) for d in columns)]
        names = [falls_out[p] for p in instr["out_perm"]]
        if names[0] != ("x", -1):
            raise CannotLower("a matrix product whose result does not have its rows first")
        place = {name: k - 1 for k, name in enumerate(names)}
        return _DotDims(
            free,
            dict(zip(x_batch, w_batch, strict=True)),
            dict(zip(x_contract, w_contract, strict=True)),
            {d: place["x", d] for d in (*free, *x_batch)},
            dict(sorted(((d, place["w", d]) for d in columns), key=lambda pair: pair[1])),
        )


def _rows(view: View, free: Sequence[int], batch: Sequence[int], inner: Sequence[int]) -> bc.CpuOperand | None:
    """``view`` as a batch of matrices whose rows are contiguous ``inner`` elements, with the distance of rows as row stride; None
    where it is not."""
    strides = _strides(view, (inner, free, batch))
    if strides is None:
        return None
    element, step, batch_step = strides
    size = math.prod(view.shape[d] for d in free)
    if element != 1 and any(view.shape[d] != 1 for d in inner):
        return None
    if size == 1:
        step = view.row_stride
    return bc.CpuOperand(view.ref, step, (batch_step,)) if step * size == view.row_stride else None


def _copied_rows(stage: StageLowering, v: int, free: Sequence[int], batch: Sequence[int], inner: Sequence[int]) -> bc.CpuOperand:
    """The ``_rows`` of a copy of ``v`` in scratch, in the layout that the kernel reads."""
    t = stage.type(v)
    copy = _scratch(stage, t.shape, t.dtype, [*free, *batch, *inner], len(free))
    stage.write(v, copy)
    rows = _rows(copy, free, batch, inner)
    assert rows is not None
    return rows


def _scratch(stage: StageLowering, shape: Sequence[int], dtype: str, order: Sequence[int], rows: int = 0) -> View:
    """Scratch of row shape ``shape`` with its dimensions in ``order``, the first ``rows`` of them evenly spaced rows."""
    lies = tuple(shape[d] for d in order)
    own = stage.scratch(lies, dtype, dense=math.prod(lies[:rows]) > 1)
    return memory.transpose(own, [order.index(d) for d in range(len(order))])


def emit_matmul_sink(stage: StageLowering, i: int, instr: Instr) -> None:
    """Emit a weight gradient: it contracts the rows of both tiles; the accumulator has the free dimensions in the op's order."""
    x, y = instr.inputs[:2]
    if stage.type(x).dtype != stage.type(y).dtype:
        raise CannotLower(f"a weight gradient of {stage.type(x).dtype} and {stage.type(y).dtype}")
    pairs = [(a - 1, b - 1) for a, b in zip(instr["x_contract"], instr["y_contract"], strict=True) if a > 0]
    lies = stage.view(x)
    pairs.sort(key=lambda pair: -lies.strides[pair[0]])  # the order of x's memory; y follows
    sides = []
    for v, contract, batch in (
        (x, [a for a, _ in pairs], [d - 1 for d in instr["x_batch"]]),
        (y, [b for _, b in pairs], [d - 1 for d in instr["y_batch"]]),
    ):
        view = stage.view(v)
        free = [d for d in range(len(view.shape)) if d not in contract and d not in batch]
        rows = _rows(view, contract, batch, free) or _copied_rows(stage, v, contract, batch, free)
        sides.append((rows, math.prod(view.shape[d] for d in free)))
    # The kernel prefers few rows of sums to few columns, and whole sums may be transposed. Parts of the sums may not: all parts of
    # the sink's matrices share one layout.
    if sides[1][1] == 1 and instr.get("dims") is None:
        sides.reverse()
    (rows_x, m), (rows_y, n) = sides
    sums, matrices = _part(stage, instr, m, n)
    stage.code.append(
        bc.AccumulateMatmul(
            sink=instr["sink"],
            row_multiple=math.prod(lies.shape[a] for a, _ in pairs),
            batch=math.prod(lies.shape[d - 1] for d in instr["x_batch"]),
            m=m,
            n=n,
            x=rows_x,
            y=rows_y,
            product=_product(rows_x.ref, stage.products.gradients),
            sums=sums,
            matrices=matrices,
        )
    )


def _part(stage: StageLowering, instr: Instr, m: int, n: int) -> tuple[bc.Sums, tuple[int, ...]]:
    """The part of the sink's matrices that an m x n product fills, as loop numbers cut it out, and the matrices' shape."""
    if instr.get("dims") is None:
        return bc.Sums(), ()
    k, dims, steps, sizes = instr["sink"], instr["dims"], instr["steps"], instr["sizes"]
    shape, batch = stage.program.sinks[k].shape, len(instr["x_batch"])
    rows = range(batch, len(stage.type(instr.inputs[0]).rows_first) - len(instr["x_contract"]))
    height, columns = math.prod(shape[batch : rows.stop]), math.prod(shape[rows.stop :])
    d, size = dims[0], sizes[0]
    side = rows if d in rows else range(rows.stop, len(shape))
    if len(dims) > 1 or d < batch or math.prod(shape[side.start : d]) > 1:
        raise CannotLower(f"a weight gradient in parts of dimensions {dims}")
    # All parts but the last have the same length; the last may be shorter.
    longest = max(i["sizes"][0] for s in stage.program.stages for i in walk(s.body) if i.get("dims") and i.get("sink") == k)
    inner = math.prod(shape[d + 1 : side.stop])
    each = inner * (columns if side is rows else height)
    offset, moves = stage.moves(instr.inputs[2:], steps, (each,))
    fits = size in (longest, shape[d] % longest) and not any(e % (longest * each) for e in (offset, *moves))
    if not fits or (side is not rows and longest * inner % bc.SUM_GROUP):
        raise CannotLower(f"a weight gradient in parts of {size} of {shape[d]} elements, {steps[0]} apart")
    return bc.Sums(offset, moves), (height, longest * inner if side is rows else height, columns)


def _product(ref: bc.CpuRef, name: str) -> int:
    """The index in ``PRODUCTS`` of ``name`` for operands like ``ref``; dtypes other than bfloat16 have one kind of product."""
    return bc.PRODUCTS.index(name if ref.dtype == bc.DTYPE_CODE["bfloat16"] else "best")


def _weight(stage: StageLowering, w: View, batch: Sequence[int], contract: Sequence[int], columns: Sequence[int]) -> bc.Prep:
    def part(dims: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(w.shape[d] for d in dims), tuple(w.strides[d] for d in dims)

    one = ((1,), (0,))
    (b, bs), (k, ks), (n, ns) = part(batch), part(contract) if contract else one, part(columns) if columns else one
    longest = max(math.prod(k), math.prod(n))
    if longest > _LONGEST_SIDE:
        raise CannotLower(f"a weight with a side of {longest} elements: the CPU target packs sides of {_LONGEST_SIDE} at most")
    if math.prod((*b, *k, *n)) > _MOST_PREPARED:
        raise CannotLower(f"a weight of {math.prod((*b, *k, *n))} elements: the CPU target packs {_MOST_PREPARED} at most")
    return bc.Prep(bc.WEIGHT, w.ref, w.ref.dtype, b, bs, k, ks, n, ns, _product(w.ref, stage.products.weights), _is_local(w.ref))


def _is_local(ref: bc.CpuRef) -> int:
    """1 for a prep that cannot be made before the stages run, since ``ref`` is no input or moves with a loop or batch; else 0."""
    return int(ref.space != bc.IN or any(ref.loop_strides) or any(ref.batch_strides))


def _dense(bias: View, columns: Sequence[int]) -> bc.Prep:
    """The ``Prep`` of ``bias`` with dimensions in the order of ``columns``, in the dtype of the sums it is added to."""
    wide = "float64" if bias.dtype == "float64" else "float32"
    extents, strides = tuple(bias.shape[d] for d in columns), tuple(bias.strides[d] for d in columns)
    return bc.Prep(
        bc.DENSE, bias.ref, bc.DTYPE_CODE[wide], (), (), (), (), extents or (1,), strides or (0,), local=_is_local(bias.ref)
    )


# --- Loops, and products of two tiles ---------------------------------------------------------------------------------------------

_FEW = 8  # rows of a matrix that multiplies another one in place (``small`` in cpu/src/run_products.cc)
# A matrix of at most _TINY elements, or one of at most _SMALL that lies badly, is multiplied by a vector elementwise and summed; so
# are two vectors of at most _SMALL. Elementwise and as a product: 4 x 4 took 6 to 12 and 11 to 24 ns, 64 x 64 740 and 260.
_TINY, _SMALL = 16, 1 << 12


def emit_loop(stage: StageLowering, instr: Instr, emit: Callable[[StageLowering], None]) -> None:
    """Emit a ``Loop``; ``emit`` makes the code of its body.

    Carries live in scratch. The next value of a carry is written to its place at once where nothing reads the old value afterwards,
    else copied there at the end of the iteration. Slices of arrays need no code: their operands move with the loop's number.
    """
    block = instr.block
    assert block is not None
    if instr["count"] == 0:
        stage.views.update((out, stage.view(v)) for out, v in zip(instr.outputs, instr.inputs, strict=True))
        return
    for v in pointwise.captured(instr):
        if stage.leaf(v) is None:
            stage.view(v)
    inside = StageLowering(stage.program, block.body, stage.preps, stage.products, stage.rounding, stage, block)
    places = [inside.new(v) for v in block.carries]
    for v, place in zip(instr.inputs, places, strict=True):
        maker = stage.flow.makers.get(stage.root(v))
        if maker is None or maker.kind != "empty":
            stage.write(v, place)
    inside.views.update(stage.views)
    inside.views.update(zip(block.carries, places, strict=True))
    at_once, inside.waits = _written_at_once(inside, block)
    inside.carried = {p: places[p] for p in at_once}
    emit(inside)
    _store_carries(inside, block, places)
    if inside.code:
        within = _within(stage.program, instr)
        stage.code.append(bc.CpuLoop(instr["count"], int(instr.get("reverse", False)), within, tuple(inside.code)))
    stage.views.update(zip(instr.outputs, places, strict=True))


def _within(program: TileProgram, instr: Instr) -> tuple[int, ...]:
    """The iterations that a tile runs, by the rows of its batch: ``Loop.within``."""
    bounds = instr.get("within")
    if bounds is None:
        return ()
    axis, step, low, high, which = bounds
    unbounded = math.prod(program.axes) + instr["count"] * step
    low, high = -unbounded if low is None else low, unbounded if high is None else high
    together = instr.get("together", 1)
    return math.prod(program.axes[axis + 1 :]), program.axes[axis], step, low, high, WITHIN.index(which), together


def _written_at_once(stage: StageLowering, block: LoopBody) -> tuple[list[int], dict[Use, frozenset[int]]]:
    """The carries whose old value is no longer read when the next one is written to their place; and of those that are
    concatenated, the pieces that wait for readers of the old value (``StageLowering.waits``)."""
    items = pointwise.schedule(stage)
    where = {i: k for k, item in enumerate(items) for i in item.ops}
    maker = {stage.root(v): i for i, instr in enumerate(stage.body) for v in instr.outputs if i in where}
    maker.update((stage.root(s.result), s.other) for s in stage.late.values() if s.carry is None)  # which writes there first
    added = [s.carry for s in stage.late.values() if s.carry is not None]

    def readers(v: int, whole: bool = True) -> Iterator[tuple[int, bool]]:
        """The instructions that read ``v``, through views and conversions, and whether they read all of it at its place."""
        for j, _ in stage.uses.get(v, ()):
            if j < len(stage.body) and j not in where:
                yield from readers(stage.root(stage.body[j].outputs[0]), whole and stage.body[j].kind not in VIEWS)
            else:
                yield j, whole

    def read_before(v: int, i: int) -> bool:
        """Whether all readers of carry ``v`` read before instruction ``i`` writes, or in its loop."""
        for j, whole in readers(v):
            grouped = whole and j <= i and where.get(j) == where[i] and items[where[i]].loop is not None
            alike = grouped and pointwise.shape_of(stage, v) == items[where[i]].loop
            if not alike and (j not in where or where[j] >= where[i]):
                return False
        return True

    waits: dict[Use, frozenset[int]] = {}

    def wait(v: int, i: int) -> None:
        """Note the pieces of concatenation ``i``, which lies in the place of carry ``v``, that is written too early. In a loop
        over nothing but rows a piece may be written behind the last reader, which sees its own row only."""
        for p, x in enumerate(stage.body[i].inputs):
            r = stage.root(x)
            while r in stage.flow.makers and stage.flow.makers[r].kind in ("reshape", "transpose", "rev"):
                r = stage.root(stage.flow.makers[r].inputs[0])
            made = maker.get(r)
            if made is None:
                if len(stage.uses.get(r, ())) > 1:  # a load is done for its first reader
                    waits[i, p] = NEVER
                continue
            if stage.body[made].kind == "loop":  # its results are copied
                continue
            late = {j for j, _ in readers(v) if where.get(j, len(items)) >= where[made]}
            rows_alone = items[where[made]].loop == (True, ())
            if late and not (rows_alone and all(where.get(j) == where[made] for j in late)):
                waits[i, p] = NEVER
            else:
                behind = frozenset(j for j in late if j > made)
                if behind:
                    waits[i, p] = behind
                if stage.body[made].kind == "concatenate":
                    wait(v, made)

    results = [stage.root(v) for v in block.results]
    made = [p for p, (v, r) in enumerate(zip(block.carries, results, strict=True)) if r in maker and read_before(v, maker[r])]
    for p in made:
        if stage.body[maker[results[p]]].kind == "concatenate":
            wait(block.carries[p], maker[results[p]])
    return [*made, *added], waits


def _store_carries(stage: StageLowering, block: LoopBody, places: Sequence[View]) -> None:
    """Copy each result to its carry's place unless it is there. A result in another carry's place is copied out of it first."""
    homes = {place.ref.index for place in places}
    moves = []
    for p, (result, place) in enumerate(zip(block.results, places, strict=True)):
        if (len(stage.body), p) in stage.satisfied or stage.root(result) == block.carries[p]:
            continue
        lies = None if stage.leaf(result) is not None else stage.view(result)
        if lies == place:
            continue
        if lies is not None and lies.ref.space == bc.SCRATCH and lies.ref.index in homes:
            aside = stage.new(result)
            stage.copy(lies, aside)
            lies = aside
        moves.append((result, lies, place))
    for result, lies, place in moves:
        if lies is None:
            stage.write(result, place)
        else:
            stage.copy(lies, place)


def emit_paste(stage: StageLowering, i: int, instr: Instr) -> None:
    """Write a part of a carry in place: nothing else reads or writes the carry."""
    x, part, _ = instr.inputs
    stage.views[instr.outputs[0]] = stage.view(x)
    if not stage.delivered((i, 1), part):
        stage.write(part, stage.part(instr))


def emit_dot(stage: StageLowering, i: int, instr: Instr) -> None:
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
    sides = in_order = (x, (batch, free, contract)), (y, (batch_y, free_y, contract_y))
    m, n, k = (math.prod(s.shape[d] for d in dims) for s, dims in ((t, free), (u, free_y), (t, contract)))
    lead = len(batch), len(batch) + len(free)
    groups = [tuple(range(lead[0])), tuple(range(*lead)), tuple(range(lead[1], len(result.shape)))]
    if n < m and n <= _FEW:  # transpose the result: the larger operand is then read once, in place
        m, n, sides = n, m, sides[::-1]
        groups[1:] = reversed(groups[1:])
    if k == 1 or m == 1 and (n * k <= _SMALL if n == 1 else not _is_matrix(stage.view(sides[1][0]), n * k, *sides[1][1])):
        _multiply_and_sum(stage, instr, in_order)
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
        return _scratch(stage, result.shape, result.dtype, [d for dims in groups for d in dims])

    out = stage.place(instr.outputs[0], fits, layout)
    strides = _strides(out, groups)
    assert strides is not None
    b, n = (math.prod(vy.shape[d] for d in dims) for dims in of_y[:2])
    x_ = vx.operand((0 if shared else sx[0], sx[1]))
    y_ = vy.operand(sy)
    stage.code.append(bc.Dot(b, m, n, k, x_, y_, out.operand(strides[:2])))


def _is_matrix(y: View, elements: int, batch: Sequence[int], free: Sequence[int], contract: Sequence[int]) -> bool:
    """Whether a product kernel multiplies ``y`` by vectors faster than elementwise code: not a tiny ``y``, nor a small one without
    unit stride, as in a loop whose values are columns. 512 rows by 8 x 8 took 48 to 74 us elementwise, 24 to 34 as products."""
    lies_well = any(y.shape[d] > 1 and y.strides[d] == 1 for d in (*free, *contract))
    return elements > _SMALL or elements > _TINY and lies_well


def _shared(y: View, batch: Sequence[int], free: Sequence[int], contract: Sequence[int]) -> int:
    """How many of the first ``free`` dimensions of ``y`` become batch dimensions of a product without a batch, because the other
    dimensions are a matrix in place: several matrices, such as an expert's weights, multiply one operand."""
    if math.prod(y.shape[d] for d in batch) != 1:
        return 0
    whole = (k for k in range(len(free)) if _strides(y, ((*batch, *free[:k]), free[k:], contract)) is not None)
    return next(whole, 0)


Groups = Sequence[Sequence[int]]  # row dimensions: batch, free, contracted


def _strides(view: View, groups: Groups) -> tuple[int, ...] | None:
    """One stride for each group of dimensions, or None where one loop cannot walk a group."""
    found = [memory.chain([view.shape[d] for d in dims], [view.strides[d] for d in dims]) for dims in groups]
    return None if None in found else tuple(s for s in found if s is not None)


def _matrices(stage: StageLowering, v: int, groups: Groups, dense: bool) -> tuple[View, tuple[int, ...]]:
    """``v`` with one stride for each group, the last of them 1 if ``dense``; a copy where it lies otherwise."""
    view = stage.view(v)
    strides = _strides(view, groups)
    if strides is None or (dense and strides[2] != 1):
        view = _scratch(stage, view.shape, view.dtype, [d for dims in groups for d in dims])
        stage.write(v, view)
        strides = _strides(view, groups)
        assert strides is not None
    return view, strides


def _multiply_and_sum(stage: StageLowering, instr: Instr, sides: tuple[tuple[int, Groups], tuple[int, Groups]]) -> None:
    """Emit a product of vectors, or of a matrix and a vector, as elementwise products and their sums. ``sides``: in the order in
    which the result has their dimensions."""
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
    builder = VectorBuilder(memory.squeezed(shape))
    a, b = builder.load(spread(vx, [d for d, _ in dims])), builder.load(spread(vy, [e for _, e in dims]))
    products = stage.scratch(shape, wide)
    builder.store(products, builder.micro("mul", wide, a, b))
    stage.code.append(builder.finish())
    out = stage.place(instr.outputs[0])
    over = products.operand()
    stage.code.append(bc.Reduce(bc.REDUCTIONS.index("sum"), shape[:kept], shape[kept:], over, out.operand()))

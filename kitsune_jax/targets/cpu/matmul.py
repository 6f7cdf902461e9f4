"""Matrix products: a tile times a stationary operand, with bias, relu and conversion folded in where they follow.

Comes in: a ``matmul`` instruction of a stage. Goes out: one ``Matmul``, its ``Prep``s, and a copy of x first where x does not lie
as rows of contiguous K elements a uniform distance apart. The order of the contracted, free and batch dimensions is ours to choose:
the stationary operand is packed to suit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from kitsune_jax.program.ir import Instr, walk
from kitsune_jax.targets.cpu import slices, views
from kitsune_jax.targets.cpu.bytecode import (
    ACTIVATIONS,
    DENSE,
    DTYPE_CODE,
    IN,
    PRODUCTS,
    SUM_GROUP,
    WEIGHT,
    AccumulateMatmul,
    Matmul,
    Operand,
    Prep,
    Ref,
    Sums,
)
from kitsune_jax.targets.cpu.stage import Stage
from kitsune_jax.targets.cpu.views import View
from kitsune_jax.targets.errors import CannotLower

MATMUL_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
# What cpu/src/program_check.cc accepts of a packed weight.
_LONGEST_SIDE, _MOST_PREPARED = 1 << 26, 1 << 36


def emit_matmul(stage: Stage, i: int, instr: Instr) -> None:
    dims = _Dims.of(stage, instr)
    x, w, *bias = instr.inputs
    if stage.leaf(w) is not None:
        raise CannotLower("a matrix product with a constant")
    weight = stage.view(w)
    lies = stage.view(x)
    order = dims.ordered_by(lies)
    rows = _rows(lies, order.free, order.batch, order.contract)
    if rows is None:
        lies, order = _copied(stage, x, dims)
        rows = _rows(lies, order.free, order.batch, order.contract)
        assert rows is not None
    free, batch = [dims.out_of_x[d] for d in order.free], [dims.out_of_x[d] for d in order.batch]
    total = stage.sums.get(i)
    result = instr.outputs[0] if total is None else total.result
    shape = stage.type(result).shape

    def panel(view: View) -> tuple[list[int], tuple[int, int] | None]:
        columns = sorted(dims.out_of_w.values(), key=lambda d: -view.strides[d])
        return columns, _rows(view, free, batch, columns)

    def layout() -> View:
        sequence = [*free, *batch, *dims.out_of_w.values()]
        own = _matrix(stage, [shape[d] for d in sequence], stage.type(result).dtype, len(free))
        return views.transpose(own, [sequence.index(d) for d in range(len(shape))])

    out = stage.place(result, lambda v: panel(v)[1] is not None, layout)
    columns, lines = panel(out)
    assert lines is not None
    w_of_out = {d: k for k, d in dims.out_of_w.items()}
    prep = _weight(stage, weight, [dims.w_batch[b] for b in order.batch], [dims.w_contract[k] for k in order.contract],
                   [w_of_out[d] for d in columns])  # fmt: skip
    numbers = sorted(columns)  # the dimensions of a bias, in its order
    stage.code.append(
        Matmul(
            x=Operand(lies.ref, rows[0], (rows[1],)),
            row_multiple=math.prod(shape[d] for d in free),
            batch=math.prod(shape[d] for d in batch),
            weight=stage.prep(prep, w),
            bias=stage.prep(_dense(stage.view(bias[0]), [numbers.index(d) for d in columns]), bias[0]) if bias else -1,
            activation=ACTIVATIONS.index(instr.get("activation", "none")),
            parameters=instr.get("parameters", ()),
            rounds=DTYPE_CODE[instr.get("rounds", "float32")],
            out=Operand(out.ref, lines[0], (lines[1],)),
            adds=total is not None and total.second == i,
        )
    )


@dataclasses.dataclass(frozen=True)
class _Order:
    """Row dimensions of x, each list in the order in which memory is walked."""

    free: list[int]
    batch: list[int]
    contract: list[int]


@dataclasses.dataclass(frozen=True)
class _Dims:
    """Who is who: row dimensions of x (0-based, the row left out), dimensions of w, row dimensions of the result."""

    free: tuple[int, ...]
    w_batch: dict[int, int]  # row dimension of x -> dimension of w
    w_contract: dict[int, int]
    out_of_x: dict[int, int]  # free and batch dimensions of x -> row dimension of the result
    out_of_w: dict[int, int]  # free dimension of w -> row dimension of the result, ascending in the result
    out_shape: tuple[int, ...]

    @staticmethod
    def of(stage: Stage, instr: Instr) -> _Dims:
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
        return _Dims(
            free,
            dict(zip(x_batch, w_batch, strict=True)),
            dict(zip(x_contract, w_contract, strict=True)),
            {d: place["x", d] for d in (*free, *x_batch)},
            dict(sorted(((d, place["w", d]) for d in columns), key=lambda pair: pair[1])),
            stage.type(instr.outputs[0]).shape,
        )

    def ordered_by(self, x: View) -> _Order:
        def falling(dims: Sequence[int]) -> list[int]:
            return sorted(dims, key=lambda d: -x.strides[d])

        return _Order(falling(self.free), falling(tuple(self.w_batch)), falling(tuple(self.w_contract)))


def _rows(view: View, free: Sequence[int], batch: Sequence[int], inner: Sequence[int]) -> tuple[int, int] | None:
    """(distance of rows, batch stride) of ``view`` as matrices of contiguous ``inner`` elements; None if it is not that."""

    def pairs(dims: Sequence[int]) -> list[tuple[int, int]]:
        return [(view.shape[d], view.strides[d]) for d in dims]

    element, step, batch_step = views.chain(pairs(inner)), views.chain(pairs(free)), views.chain(pairs(batch))
    size = math.prod(view.shape[d] for d in free)
    if element is None or step is None or batch_step is None:
        return None
    if element != 1 and any(view.shape[d] != 1 for d in inner):
        return None
    if size == 1:
        return view.row_stride, batch_step
    return (step, batch_step) if step * size == view.row_stride else None


def _copied(stage: Stage, x: int, dims: _Dims) -> tuple[View, _Order]:
    """A copy of x in scratch, laid out for the kernel."""
    order = _Order(list(dims.free), list(dims.w_batch), list(dims.w_contract))
    sequence = [*order.free, *order.batch, *order.contract]
    t = stage.type(x)
    own = _matrix(stage, [t.shape[d] for d in sequence], t.dtype, len(order.free))
    target = views.transpose(own, [sequence.index(d) for d in range(len(sequence))])
    stage.write(x, target)
    return target, order


def _matrix(stage: Stage, shape: Sequence[int], dtype: str, multiple: int) -> View:
    """Scratch of row shape ``shape`` whose first ``multiple`` dimensions are rows to the kernel, at one distance throughout."""
    return stage.scratch(tuple(shape), dtype, dense=math.prod(shape[:multiple]) > 1)


def emit_matmul_sink(stage: Stage, i: int, instr: Instr) -> None:
    """A weight gradient: the rows of both tiles are contracted, the free dimensions are the accumulator's, in the op's order."""
    x, y = instr.inputs[:2]
    if stage.type(x).dtype != stage.type(y).dtype:
        raise CannotLower(f"a weight gradient of {stage.type(x).dtype} and {stage.type(y).dtype}")
    pairs = [(a - 1, b - 1) for a, b in zip(instr["x_contract"], instr["y_contract"], strict=True) if a > 0]
    lies = stage.view(x)
    pairs.sort(key=lambda pair: -lies.strides[pair[0]])  # the order in which x's rows are walked; y follows
    sides = []
    for v, contract, batch in (
        (x, [a for a, _ in pairs], [d - 1 for d in instr["x_batch"]]),
        (y, [b for _, b in pairs], [d - 1 for d in instr["y_batch"]]),
    ):
        view = stage.view(v)
        free = [d for d in range(len(view.shape)) if d not in contract and d not in batch]
        rows = _rows(view, contract, batch, free)
        if rows is None:
            sequence = [*contract, *batch, *free]
            own = _matrix(stage, [view.shape[d] for d in sequence], stage.type(v).dtype, len(contract))
            view = views.transpose(own, [sequence.index(d) for d in range(len(sequence))])
            stage.write(v, view)
            rows = _rows(view, contract, batch, free)
            assert rows is not None
        sides.append((view, rows, math.prod(view.shape[d] for d in free)))
    # Whole sums are the same either way, and the kernel likes few rows of them better than few columns. A part of the sums is not
    # turned around: the sink has its matrices as its other parts have them.
    if sides[1][2] == 1 and instr.get("dims") is None:
        sides.reverse()
    (vx, rx, m), (vy, ry, n) = sides
    sums, matrices = _part(stage, instr, m, n)
    stage.code.append(
        AccumulateMatmul(
            sink=instr["sink"],
            row_multiple=math.prod(lies.shape[a] for a, _ in pairs),
            batch=math.prod(lies.shape[d - 1] for d in instr["x_batch"]),
            m=m,
            n=n,
            x=Operand(vx.ref, rx[0], (rx[1],)),
            y=Operand(vy.ref, ry[0], (ry[1],)),
            product=_product(vx.ref, stage.products.gradients),
            sums=sums,
            matrices=matrices,
        )
    )


def _part(stage: Stage, instr: Instr, m: int, n: int) -> tuple[Sums, tuple[int, ...]]:
    """Which part of the sink's matrices an m x n product is, where numbers of loops cut it out; and those matrices."""
    if instr.get("dims") is None:
        return Sums(), ()
    k, dims, steps, sizes = instr["sink"], instr["dims"], instr["steps"], instr["sizes"]
    shape, batch = stage.program.sinks[k].shape, len(instr["x_batch"])
    rows = range(batch, len(stage.type(instr.inputs[0]).rows_first) - len(instr["x_contract"]))
    height, columns = math.prod(shape[batch : rows.stop]), math.prod(shape[rows.stop :])
    d, size = dims[0], sizes[0]
    side = rows if d in rows else range(rows.stop, len(shape))
    if len(dims) > 1 or d < batch or math.prod(shape[side.start : d]) > 1:
        raise CannotLower(f"a weight gradient in parts of dimensions {dims}")
    # The first parts are all as long; what is left is shorter.
    longest = max(i["sizes"][0] for s in stage.program.stages for i in walk(s.body) if i.get("dims") and i.get("sink") == k)
    inner = math.prod(shape[d + 1 : side.stop])
    each = inner * (columns if side is rows else height)
    offset, moves = slices.moves_of(stage, instr.inputs[2:], steps, (each,))
    fits = size in (longest, shape[d] % longest) and not any(e % (longest * each) for e in (offset, *moves))
    if not fits or (side is not rows and longest * inner % SUM_GROUP):
        raise CannotLower(f"a weight gradient in parts of {size} of {shape[d]} elements, {steps[0]} apart")
    return Sums(offset, moves), (height, longest * inner if side is rows else height, columns)


def _product(ref: Ref, name: str) -> int:
    """``name`` as the format has it for operands like ``ref``: only bfloat16 can be multiplied in more than one way."""
    return PRODUCTS.index(name if ref.dtype == DTYPE_CODE["bfloat16"] else "best")


def _weight(stage: Stage, w: View, batch: Sequence[int], contract: Sequence[int], columns: Sequence[int]) -> Prep:
    def part(dims: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(w.shape[d] for d in dims), tuple(w.strides[d] for d in dims)

    one = ((1,), (0,))
    (b, bs), (k, ks), (n, ns) = part(batch), part(contract) if contract else one, part(columns) if columns else one
    longest = max(math.prod(k), math.prod(n))
    if longest > _LONGEST_SIDE:
        raise CannotLower(f"a weight with a side of {longest} elements: the CPU target packs sides of {_LONGEST_SIDE} at most")
    if math.prod((*b, *k, *n)) > _MOST_PREPARED:
        raise CannotLower(f"a weight of {math.prod((*b, *k, *n))} elements: the CPU target packs {_MOST_PREPARED} at most")
    return Prep(WEIGHT, w.ref, w.ref.dtype, b, bs, k, ks, n, ns, _product(w.ref, stage.products.weights), _moves(w.ref))


def _moves(ref: Ref) -> int:
    """Whether what ``ref`` names is not there, or not the same, before any stage runs: it is prepared where it is used."""
    return int(ref.space != IN or any(ref.loop_strides) or any(ref.batch_strides))


def _dense(bias: View, columns: Sequence[int]) -> Prep:
    """``bias`` with its dimensions in the order of ``columns``, wide enough for the sums it is added to."""
    wide = "float64" if bias.dtype == "float64" else "float32"
    extents, strides = tuple(bias.shape[d] for d in columns), tuple(bias.strides[d] for d in columns)
    return Prep(DENSE, bias.ref, DTYPE_CODE[wide], (), (), (), (), extents or (1,), strides or (0,), local=_moves(bias.ref))

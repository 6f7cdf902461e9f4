"""Tile programs written by hand whose sinks have one sum for each batch, and fold whole tiles or the blocks of a loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kitsune_jax.ops.graph import make_params
from kitsune_jax.program.ir import ArrayType, Instr, Program, SinkType
from tests.support.programs import Array, Case
from tests.support.tiles import Tiles


def _sink(t: Tiles, how: str, shape: tuple[int, ...], dtype: str, leading: tuple[int, ...]) -> int:
    """A sink of ``shape`` for each batch; ``leading``: the batch axes in the order in which its output has them."""
    extents = tuple(t.axes[a] for a in leading)
    array = t._array((*extents, *shape), dtype, (*((a,) for a in leading), *((),) * len(shape)))
    assert isinstance(array, ArrayType) and not array.streamed
    t.outputs.append(array)
    t.sinks.append(SinkType(how, shape, dtype, len(t.outputs) - 1))
    return len(t.sinks) - 1


def _fold(t: Tiles, kind: str, inputs: tuple[int, ...], sink: int, **params: object) -> None:
    t.body.append(Instr(kind, inputs, (), make_params(sink=sink, **params)))


def batch_sums(
    outer: int = 2, inner: int = 3, rows: int = 19, m: int = 37, n: int = 5, dtype: str = "float32", *, tile_rows: int = 8,
    block: int = 0, axes: int = 2,
) -> Case:  # fmt: skip
    """For each batch (outer, inner) x^T y and y^T x, the sum and the largest of x, and the sum of all x over the whole stream.

    ``block``: the products and the sums of x are made by a loop over so many elements of x (0: at once), with the remainder behind
    it. ``axes``: how many of the two are batch axes; the sums run over the other one as well.
    """
    t = Tiles((outer, inner, rows), tile_rows, batch_axes=axes)
    x, y = (
        t.input((outer, rows, inner, m), dtype, ((0,), (2,), (1,), ())),
        t.load((outer, inner, rows, n), dtype, ((0,), (1,), (2,), ())),
    )
    wide, batch = "float64" if dtype == "float64" else "float32", tuple(range(axes))[::-1]
    down, across = _sink(t, "sum", (m, n), wide, batch), _sink(t, "sum", (n, m), wide, batch)
    total, most = _sink(t, "sum", (m,), wide, batch), _sink(t, "max", (m,), dtype, batch)
    product = {"x_contract": (0,), "y_contract": (0,), "x_batch": (), "y_batch": (), "accumulate": wide}

    def folds(x: int, number: tuple[int, ...], step: int, size: int) -> None:
        def cut(d: int) -> dict[str, object]:
            return {"dims": (d,), "steps": (step,), "sizes": (size,)} if number else {}

        _fold(t, "matmul_sink", (x, y, *number), down, **product, **cut(0))
        _fold(t, "matmul_sink", (y, x, *number), across, **product, **cut(1))
        _fold(t, "sink", (x, *number), total, axes=(0,), **cut(0))

    if block:
        with t.loop(m // block) as loop:
            folds(t.load_slice(x, (loop.index, 3, block, block)), (loop.index,), block, block)
            loop.next()
        if rest := m % block:
            number = t.literal(m - rest, "int32")
            folds(t.load_slice(x, (number, 3, 1, rest)), (number,), 1, rest)
    else:
        folds(t.again(x), (), 0, 0)
    _fold(t, "sink", (t.again(x),), most, axes=(0,))
    t.sink(t.again(x), "sum", (0,))

    def reference(x: Array, y: Array) -> list[Array]:
        xs = np.moveaxis(x, 2, 1)  # outer, inner, rows, m
        kept = "oi"[:axes]
        down = np.einsum(f"oirm,oirn->{kept[::-1]}mn", xs, y)
        most = xs.max(tuple(range(axes, 3)))
        turned = (most if axes < 2 else most.swapaxes(0, 1),)
        return [down, np.swapaxes(down, -1, -2), np.einsum(f"oirm->{kept[::-1]}m", xs), *turned, xs.sum((0, 1, 2))]

    def operands(rng: np.random.Generator) -> list[Array]:
        shapes = (outer, rows, inner, m), (outer, inner, rows, n)
        return [rng.standard_normal(s).astype(np.dtype(dtype)) for s in shapes]

    return Case(Program.of(t.program()), operands, reference)


BATCH_SUMS: dict[str, Callable[[], Case]] = {
    "whole": batch_sums,
    "in_blocks": lambda: batch_sums(m=101, block=32),
    "in_even_blocks": lambda: batch_sums(m=64, n=40, block=32),
    "one_batch": lambda: batch_sums(1, 1, 301, block=32),
    "one_row": lambda: batch_sums(2, 2, 1),
    "many_batches": lambda: batch_sums(5, 7, 9),
    "groups": lambda: batch_sums(3, 4, 11, axes=1, block=32),
    "bfloat16": lambda: batch_sums(dtype="bfloat16", block=32),
    "float16": lambda: batch_sums(2, 3, 40, dtype="float16"),
    "float64": lambda: batch_sums(dtype="float64", m=70, block=32),
}

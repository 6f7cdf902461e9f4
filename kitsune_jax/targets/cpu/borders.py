"""The arrays at a program's border as memory.

Comes in: an ``ArrayType`` of a tile program. Goes out: its ``Border``, with strides for the stream axes and the row's dimensions.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.program.ir import ArrayType, TileProgram
from kitsune_jax.streams.space import dim_strides
from kitsune_jax.targets.cpu import views
from kitsune_jax.targets.cpu.bytecode import DTYPE_CODE, Ref
from kitsune_jax.targets.cpu.views import View


@dataclasses.dataclass(frozen=True, slots=True)
class Border:
    """An array of the program's border as memory: ``view`` where its address is linear in the row of a batch, else None.

    Where the stream has an order of its own, no streamed array's address is.
    """

    ref: Ref
    axis_strides: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    view: View | None


def border(program: TileProgram, array: ArrayType, space: int, number: int) -> Border:
    ref = Ref(space, number, 0, DTYPE_CODE[array.dtype])
    dense, batch = dim_strides(array.shape), program.batch_axes
    if not array.row_strides:
        return Border(ref, (), array.shape, dense, View(ref, 0, array.shape, dense))
    shape, strides = tuple(array.shape[d] for d in array.dims), tuple(dense[d] for d in array.dims)
    row = views.row_stride_of(program.axes[batch:], array.row_strides[batch:])
    if program.order is not None and any(array.row_strides):
        row = None
    part = dataclasses.replace(ref, batch_strides=array.row_strides[:batch])
    return Border(ref, array.row_strides, shape, strides, None if row is None else View(part, row, shape, strides))

"""What instructions of the CPU program name memory by. ``bytecode`` says what the fields mean, and hands these on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Ref:
    space: int
    index: int
    offset: int
    dtype: int
    loop_strides: tuple[int, ...] = ()
    batch_strides: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of an instruction that loops over (rows, *extents): its stride, in elements, for the row and each extent."""

    ref: Ref
    row_stride: int
    strides: tuple[int, ...]

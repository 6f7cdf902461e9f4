"""The view algebra: how a tile lies in memory, and which operations only change how it is looked at.

A ``View`` is memory (``Ref``), the distance of consecutive rows, and the row shape with a stride per dimension, all in elements.
The row dimension stands apart and never merges with another. Broadcast, transpose, slice, rev and most reshapes give a view of the
same memory: no instruction is spent on them. Invariant: every function here returns a view inside the memory of the one it got.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from kitsune_jax.program.passes.flow import squeezed as squeezed
from kitsune_jax.streams.space import dim_strides
from kitsune_jax.targets.cpu.bytecode import DTYPES, QUEUE, SCRATCH, Operand, Ref

ITEM_SIZE = dict(zip(DTYPES, (1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8), strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """Element ``(r, i...)`` is at ``ref.offset + r * row_stride + sum(i * strides)``.

    A stationary array has ``row_stride`` 0 and its whole shape as ``shape``.
    """

    ref: Ref
    row_stride: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return DTYPES[self.ref.dtype]

    def operand(self) -> Operand:
        return Operand(self.ref, self.row_stride, self.strides)

    def at(self, offset: int) -> View:
        """The same view, ``offset`` elements further on."""
        return dataclasses.replace(self, ref=dataclasses.replace(self.ref, offset=self.ref.offset + offset))


def readable(view: View) -> bool:
    """Whether a stage may, and should, read a result back from here: not from a queue slot it produces, nor strided elements."""
    strides = [s for n, s in zip(view.shape, view.strides, strict=True) if n != 1]
    return view.ref.space != QUEUE and (not strides or strides[-1] == 1)


def row_pitch(shape: tuple[int, ...], dtype: str) -> int:
    """Elements between the rows of a tile in scratch or in a queue.

    Rows of one dimension and 256 bytes or more begin on cache lines, and not a multiple of a page apart (stores would falsely
    depend on loads of other rows, 4 KB aliasing). Shorter rows, and rows of several dimensions, are dense, so that loops over rows
    and inner dimensions can be one loop.
    """
    item = ITEM_SIZE[dtype]
    size = math.prod(shape)
    if len(squeezed(shape)) != 1 or size * item < 256:
        return size
    lines = -(-size * item // 64)
    if lines % 64 == 0:
        lines += 1
    return lines * 64 // item


def reshape(view: View, shape: tuple[int, ...]) -> View | None:
    """``view`` with another row shape of the same size, or None where that needs a copy."""
    strides = reshape_strides(view.shape, view.strides, shape)
    return None if strides is None else View(view.ref, view.row_stride, shape, strides)


def reshape_strides(old: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of the same elements in the same order under shape ``new``; None where no strides exist.

    >>> reshape_strides((4, 6), (6, 1), (2, 2, 6)), reshape_strides((4, 6), (1, 4), (24,))
    ((12, 6, 1), None)
    """
    source = [(n, s) for n, s in zip(old, strides, strict=True) if n != 1]
    out: list[int] = []
    i = j = 0
    while j < len(new):
        if new[j] == 1:
            out.append(0)
            j += 1
            continue
        first, begin = i, j
        have, want = source[i][0], new[j]
        i, j = i + 1, j + 1
        while have != want:
            if have < want:
                have *= source[i][0]
                i += 1
            else:
                want *= new[j]
                j += 1
        for (_, s), (n, t) in zip(source[first : i - 1], source[first + 1 : i], strict=True):
            if s != n * t:
                return None
        step, group = source[i - 1][1], []
        for n in reversed(new[begin:j]):
            group.append(step)
            step *= n
        out.extend(reversed(group))
    return tuple(out)


def broadcast(view: View, shape: tuple[int, ...], dims: Sequence[int]) -> View:
    """``broadcast_in_dim`` to ``shape``: dimension ``d`` of the view becomes ``dims[d]`` (-1: the rows, which take one element)."""
    strides = [0] * len(shape)
    for d, n, s in zip(dims, view.shape, view.strides, strict=True):
        if d >= 0 and n == shape[d]:
            strides[d] = s
    return View(view.ref, view.row_stride, shape, tuple(strides))


def aligned(view: View, tile: bool, shape: tuple[int, ...]) -> View:
    """``view`` as an operand of a pointwise tile op of row shape ``shape``: dimensions of extent 1 and rank 0 are stretched."""
    if not tile and len(view.shape) == len(shape) + 1:  # a stationary operand with a dimension of extent 1 where the rows stand
        view = View(view.ref, view.row_stride, view.shape[1:], view.strides[1:])
    if not view.shape:
        return View(view.ref, view.row_stride, shape, (0,) * len(shape))
    strides = tuple(s if n == m else 0 for n, m, s in zip(view.shape, shape, view.strides, strict=True))
    return View(view.ref, view.row_stride, shape, strides)


def transpose(view: View, perm: Sequence[int]) -> View:
    """Row dimensions reordered: dimension ``j`` of the result is ``perm[j]`` of the view."""
    return View(view.ref, view.row_stride, tuple(view.shape[p] for p in perm), tuple(view.strides[p] for p in perm))


def reverse(view: View, dims: Sequence[int]) -> View:
    offset = sum((view.shape[d] - 1) * view.strides[d] for d in dims)
    strides = tuple(-s if d in dims else s for d, s in enumerate(view.strides))
    return View(view.ref, view.row_stride, view.shape, strides).at(offset)


def cut(view: View, start: Sequence[int], limit: Sequence[int], step: Sequence[int]) -> View:
    """``slice`` of the row dimensions."""
    shape = tuple(max(0, -(-(b - a) // s)) for a, b, s in zip(start, limit, step, strict=True))
    offset = sum(a * t for a, t in zip(start, view.strides, strict=True))
    strides = tuple(t * s for t, s in zip(view.strides, step, strict=True))
    return View(view.ref, view.row_stride, shape, strides).at(offset)


def scratch(buffer: int, dtype_code: int, shape: tuple[int, ...], dense: bool = False) -> View:
    """A tile of its own in scratch; ``buffer`` is a virtual buffer number until ``buffers.place`` gives it an address.

    ``dense``: no space between rows, for those who walk rows and an inner dimension in one loop.
    """
    pitch = math.prod(shape) if dense else row_pitch(shape, DTYPES[dtype_code])
    return View(Ref(SCRATCH, buffer, 0, dtype_code), pitch, shape, dim_strides(shape))


def chain(pairs: Sequence[tuple[int, int]]) -> int | None:
    """Innermost stride of several (extent, stride) dimensions, outermost first, if one loop can walk them all; None if not.

    Dimensions of extent 1 do not count; no dimension left gives 0.
    """
    real = [(n, s) for n, s in pairs if n != 1]
    for (_, s), (n, t) in zip(real, real[1:], strict=False):
        if s != n * t:
            return None
    return real[-1][1] if real else 0


def row_stride_of(axes: Sequence[int], strides: Sequence[int]) -> int | None:
    """The single row stride of an array with a stride per stream axis, or None where its address is not linear in the row.

    >>> row_stride_of((4, 10), (30, 3)), row_stride_of((4, 10), (3, 12)), row_stride_of((1, 10), (0, 3))
    (3, None, 3)
    """
    return chain(list(zip(axes, strides, strict=True)))

"""Streamed arrays at the border of a kernel: how the columns of their rows lie, and how a thread reaches them.

Comes in: ``ArrayType``s of the tile program. Goes out: sizes and ``Rows``. Invariant: an access is as wide as the pitch and the
width of the array allow; a *staged* array comes through shared memory, a tile at a time, because its rows would take many narrow
accesses.
"""

from __future__ import annotations

import dataclasses
import math

from kitsune_jax.program.ir import ArrayType, TileProgram
from kitsune_jax.streams.space import dim_strides
from kitsune_jax.targets.cuda import pointwise, tiles
from kitsune_jax.targets.cuda.device_ir import Ref, Rows, parameter
from kitsune_jax.targets.cuda.statements import RowAddresses

_FEW_ACCESSES = 8  # of a thread to a tile: a barrier and a wait cost no less


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """How the columns of a row lie: ``sizes`` and element ``strides`` of its dimensions, outermost first."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def n(self) -> int:
        return math.prod(self.sizes)

    @property
    def contiguous(self) -> bool:
        return all(n == 1 or s == d for n, s, d in zip(self.sizes, self.strides, dim_strides(self.sizes), strict=True))


def columns_of(array: ArrayType) -> Columns:
    strides = dim_strides(array.shape)
    return Columns(tuple(array.shape[d] for d in array.dims), tuple(strides[d] for d in array.dims))


def array_bytes(array: ArrayType) -> int:
    return math.prod(array.shape) * pointwise.ITEM_SIZE[array.dtype]


def row_bytes(array: ArrayType) -> int:
    return columns_of(array).n * pointwise.ITEM_SIZE[array.dtype]


def access_bytes(array: ArrayType) -> int:
    """The width of an access to a row: all pieces of a thread's columns start on a multiple of it, and so does the end of a row."""
    columns, size = columns_of(array), pointwise.ITEM_SIZE[array.dtype]
    return contiguous_access(columns.n, array.dtype, *(s * size for s in array.row_strides)) if columns.contiguous else size


def contiguous_access(columns: int, dtype: str, *pitches: int) -> int:
    """The same of rows of ``columns`` that lie together; ``pitches``: bytes between rows."""
    size = pointwise.ITEM_SIZE[dtype]
    return math.gcd(16, tiles.owned(tiles.padded(columns)) * size, columns * size, *pitches)


def lies_together(program: TileProgram, array: ArrayType) -> bool:
    """Is a tile of the array one piece of memory? It then starts on a multiple of 64 bytes, because a tile has 64 rows."""
    columns = columns_of(array)
    return (
        array.streamed
        and not program.batch_axes
        and program.order is None
        and len(program.axes) == 1
        and columns.contiguous
        and array.row_strides == (columns.n,)
    )


def is_staged(program: TileProgram, array: ArrayType) -> bool:
    """Should the array's tiles come through shared memory, where there is room?

    Not where 16 bytes can be read at once: that is as good, and rows of such pitches conflict in the banks of shared memory.
    """
    columns = columns_of(array)
    if array.dtype not in pointwise.ITEM_SIZE or columns.n == 1 or not lies_together(program, array):
        return False
    width, wide = tiles.padded(columns.n), access_bytes(array)
    accesses = 2 * tiles.blocks(width) * tiles.owned(width) * pointwise.ITEM_SIZE[array.dtype] // wide  # of a thread, for a tile
    return wide < 16 and accesses > _FEW_ACCESSES


def staged_bytes(array: ArrayType) -> int:
    """Shared memory of a lane for a staged array: this tile and the next."""
    return tiles.aligned(2 * tiles.TILE_ROWS * row_bytes(array), 128)


def rows_of(array: ArrayType, role: str, k: int, staged: bool) -> Rows:
    """How a thread reaches the rows of input ("in") or output ("out") ``k``."""
    columns = columns_of(array)
    contiguous = columns.contiguous
    strides = () if contiguous else tuple(zip(reversed(columns.sizes), reversed(columns.strides), strict=True))
    pairs = role == "in" and contiguous and tiles.is_half(array.dtype)
    return Rows(Ref(role, k), array.dtype, columns.n, "kStaged" if staged else str(access_bytes(array)), strides, pairs)


def addresses_of(array: ArrayType, role: str, k: int, staged: bool) -> RowAddresses:
    size = pointwise.ITEM_SIZE[array.dtype]
    strides = tuple((axis, stride * size) for axis, stride in enumerate(array.row_strides) if stride)
    return RowAddresses(Ref(role, k), parameter(role, k), strides, staged)

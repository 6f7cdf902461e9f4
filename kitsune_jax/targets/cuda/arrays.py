"""Streamed arrays at the border of a kernel: the addresses of a tile's rows, and the text that loads and stores their columns.

Comes in: ``ArrayType``s of the tile program. Goes out: C++ text. Invariant: an access is as wide as the pitch and the width of the
array allow; a *staged* array comes through shared memory, a tile at a time, because its rows would take many narrow accesses.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from kitsune_jax.program.ir import ArrayType, TileProgram
from kitsune_jax.streams.space import dim_strides
from kitsune_jax.targets.cuda import pointwise, tiles

if TYPE_CHECKING:
    from kitsune_jax.targets.cuda.body import Body


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


def access_bytes(array: ArrayType) -> int:
    """The width of an access to a row: all pieces of a thread's columns start on a multiple of it, and so does the end of a row."""
    columns, size = columns_of(array), pointwise.ITEM_SIZE[array.dtype]
    if not columns.contiguous:
        return size
    owned = tiles.owned(tiles.padded(columns.n)) * size
    return math.gcd(16, owned, columns.n * size, *(s * size for s in array.row_strides))


def lies_together(program: TileProgram, array: ArrayType) -> bool:
    """Is a tile of the array one piece of memory? It then starts on a multiple of 64 bytes, because a tile has 64 rows."""
    columns = columns_of(array)
    return array.streamed and len(program.axes) == 1 and columns.contiguous and array.row_strides == (columns.n,)


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
    return -(-2 * tiles.TILE_ROWS * columns_of(array).n * pointwise.ITEM_SIZE[array.dtype] // 128) * 128


class Arrays:
    """The arrays one stage touches. Row addresses are computed once per tile, when the first access asks for them."""

    def __init__(self, body: Body):
        self.body = body
        self.rows: dict[tuple[str, int], str] = {}
        self.axes_named = False

    def _array(self, role: str, k: int) -> ArrayType:
        program = self.body.program
        return program.inputs[k] if role == "in" else program.outputs[k]

    def row(self, role: str, k: int) -> str:
        """The name of the two row addresses of array ``k`` ("in" or "out")."""
        if (role, k) in self.rows:
            return self.rows[role, k]
        array, name = self._array(role, k), f"{role}{k}_row"
        self.rows[role, k] = name
        const, byte = ("const ", "const u8") if role == "in" else ("", "u8")
        size = pointwise.ITEM_SIZE[array.dtype]
        self._name_axes()
        terms = [f"axis{a}[h] * {s * size}ll" for a, s in enumerate(array.row_strides) if s]
        offset = " + ".join(terms) or "0"
        prologue = self.body.prologue
        if role == "in" and k in self.body.config.staged:
            prologue.append(f"const u8* const {name}[2] = {{staged{k}.row(n, lane.row), staged{k}.row(n, lane.row + 8)}};")
            return name
        prologue.append(f"{const}void* {name}[2];")
        prologue.append("KITSUNE_UNROLL")
        base = self.body.constants.parameter(f"{role}{k}")
        prologue.append(f"for (int h = 0; h < 2; ++h) {name}[h] = static_cast<{byte}*>({base}) + (valid[h] ? {offset} : 0);")
        return name

    def _name_axes(self) -> None:
        """The index along each stream axis of the thread's two rows: the row in mixed radix, the last axis fastest."""
        if self.axes_named:
            return
        self.axes_named = True
        sizes, prologue = self.body.program.axes, self.body.prologue
        if len(sizes) == 1:
            prologue.append("const i64 axis0[2] = {row[0], row[1]};")
            return
        inner = 1
        for a in reversed(range(len(sizes))):
            text = [f"row[{h}] / {inner}ll % {sizes[a]}ll" for h in range(2)]
            prologue.append(f"const i64 axis{a}[2] = {{{text[0]}, {text[1]}}};")
            inner *= sizes[a]

    def axis_index(self, axes: tuple[int, ...], h: str) -> str:
        """The mixed-radix index over some stream axes, outermost first."""
        self._name_axes()
        text = "0"
        for a in axes:
            text = f"({text} * {self.body.program.axes[a]}ll + axis{a}[{h}])"
        return text

    def _offset(self, columns: Columns) -> str:
        """C++ lambda: element offset of a logical column of an array whose columns do not lie together."""
        terms, inner = [], 1
        for n, stride in zip(reversed(columns.sizes), reversed(columns.strides), strict=True):
            terms.append(f"static_cast<i64>(column / {inner} % {n}) * {stride}")
            inner *= n
        return f"[](int column) {{ return {' + '.join(terms)}; }}"

    def _access(self, k: int) -> str:
        """How the rows of input ``k`` are read."""
        return "kStaged" if k in self.body.config.staged else str(access_bytes(self._array("in", k)))

    def in_pairs(self, k: int) -> bool:
        """Does ``load`` bring input ``k`` as pairs of 16-bit values?"""
        array = self._array("in", k)
        return tiles.is_half(array.dtype) and columns_of(array).contiguous

    def load(self, k: int, name: str, width: int, shift: int, column0: str = "") -> list[str]:
        """Declares and fills ``name[2][owned]`` with the thread's columns of block b - shift, from ``column0`` on; of 16-bit values
        that lie together ``name[2][owned / 2]`` with pairs of them, zeros beyond the row."""
        array = self._array("in", k)
        columns, owned, row = columns_of(array), tiles.owned(width), self.row("in", k)
        element = pointwise.ELEMENT[array.dtype]
        column = f"{column0}first_column<{width}>(lane, {f'b - {shift}' if shift else 'b'})"
        where = f"{name}[h], {row}[h], {column}, {columns.n}, valid[h]"
        if self.in_pairs(k):
            return [
                f"u32 {name}[2][{owned // 2}];",
                "KITSUNE_UNROLL",
                f"for (int h = 0; h < 2; ++h) load_halves<{owned}, {self._access(k)}>({where});",
            ]
        if columns.contiguous:
            call = f"load_row<{element}, {owned}, {self._access(k)}>({where})"
        else:
            call = (
                f"load_strided<{element}, {owned}>({name}[h], {row}[h], {column}, {columns.n}, valid[h], {self._offset(columns)})"
            )
        return [
            f"{pointwise.COMPUTE[array.dtype]} {name}[2][{owned}];",
            "KITSUNE_UNROLL",
            f"for (int h = 0; h < 2; ++h) {call};",
        ]

    def store(self, k: int, name: str, width: int, column0: str = "") -> list[str]:
        """Stores ``name[2][owned]``, the columns of block b, from ``column0`` on."""
        array = self._array("out", k)
        columns, owned, row = columns_of(array), tiles.owned(width), self.row("out", k)
        element = pointwise.ELEMENT[array.dtype]
        column = f"{column0}first_column<{width}>(lane, b)"
        if columns.contiguous:
            call = f"store_row<{element}, {owned}, {access_bytes(array)}>({row}[h], {column}, {columns.n}, valid[h], {name}[h])"
        else:
            call = (
                f"store_strided<{element}, {owned}>({row}[h], {column}, {columns.n}, valid[h], {name}[h], {self._offset(columns)})"
            )
        return ["KITSUNE_UNROLL", f"for (int h = 0; h < 2; ++h) {call};"]

    def source(self, k: int, operand: str, width: int) -> str | None:
        """A RowSource over the array, or None where its rows need more than a load."""
        array = self._array("in", k)
        columns = columns_of(array)
        if not columns.contiguous:
            return None
        element, row = pointwise.ELEMENT[array.dtype], self.row("in", k)
        return (
            f"RowSource<{operand}, {element}, {width}, {self._access(k)}>"
            f"{{{{{row}[0], {row}[1]}}, {{valid[0], valid[1]}}, {columns.n}, lane}}"
        )

"""Widths of tiles, blocks of columns and chunks of weights: the arithmetic that the device library and the packing share.

Comes in: logical sizes. Goes out: padded ones. Invariant: the same numbers as ``cuda/include/kitsune/layout.h`` and
``stage/matmul.h``.
"""

from __future__ import annotations

import dataclasses

TILE_ROWS = 64
GROUP_THREADS = 128
ROW_BYTES = 128  # of K in a chunk: the span of the 128-byte swizzle


def padded(n: int) -> int:
    """The width of a tile with ``n`` columns: 8, 16 or a multiple of 32.

    >>> [padded(n) for n in (1, 8, 9, 27, 63, 283)]
    [8, 8, 16, 32, 64, 288]
    """
    return 8 if n <= 8 else 16 if n <= 16 else -(-n // 32) * 32


def block(width: int) -> int:
    """Columns of a block of a tile of padded width ``width``."""
    return min(width, 32)


def owned(width: int) -> int:
    """Columns that one thread owns in a block."""
    return block(width) // 4


def blocks(width: int) -> int:
    return width // block(width)


def column_chunks(width: int, most: int) -> tuple[int, ...]:
    """Widths of the column chunks of a matmul's result: as equal as blocks of 32 allow, none wider than ``most``.

    >>> column_chunks(288, 128), column_chunks(256, 64), column_chunks(8, 128)
    ((96, 96, 96), (64, 64, 64, 64), (8,))
    """
    count = -(-width // most)
    if count == 1:
        return (width,)
    units = width // 32
    return tuple(32 * (units // count + (k < units % count)) for k in range(count))


def is_half(dtype: str) -> bool:
    """Is the value kept as pairs of 16 bits?"""
    return dtype in ("bfloat16", "float16")


def registers(width: int, form: str) -> int:
    """32-bit registers of a thread for a tile: "pair" of 16-bit values, "bit" of a mask, "word" of anything.

    >>> registers(256, "pair"), registers(256, "bit"), registers(256, "word")
    (64, 4, 128)
    """
    return width // 4 if form == "pair" else -(-width // 64) if form == "bit" else width // 2


def image_vectors(width: int, form: str) -> int:
    """16-byte vectors of a tile's register image, per thread (``kImageVectors``).

    >>> image_vectors(256, "pair"), image_vectors(8, "word"), image_vectors(256, "bit")
    (16, 1, 1)
    """
    return -(-registers(width, form) // 4)


@dataclasses.dataclass(frozen=True, slots=True)
class WeightShape:
    """A packed weight matrix: K in pieces (the parts of a concatenation), N columns in ``split`` slabs.

    ``dtype``: of the operands: "bfloat16", "float16", or "float32" for tf32 products. ``most``: columns of the widest chunk.
    """

    pieces: tuple[int, ...]
    n: int
    dtype: str
    split: int = 1
    most: int = 128

    @property
    def k(self) -> int:
        return sum(self.pieces)

    @property
    def slab(self) -> int:
        """Padded columns of one slab."""
        return padded(self.n) if self.split == 1 else padded(-(-self.n // self.split))

    @property
    def chunks(self) -> tuple[int, ...]:
        return column_chunks(self.slab, self.most)

    @property
    def k_blocks(self) -> int:
        return sum(blocks(padded(p)) for p in self.pieces)

    @property
    def blocks_per_chunk(self) -> int:
        return 2 if is_half(self.dtype) else 1

    @property
    def k_chunks(self) -> int:
        return -(-self.k_blocks // self.blocks_per_chunk)

    def chunk_bytes(self, columns: int) -> int:
        return columns * ROW_BYTES

    @property
    def slab_bytes(self) -> int:
        return self.k_chunks * self.slab * ROW_BYTES

    @property
    def bytes(self) -> int:
        return self.split * self.slab_bytes

    def part_bytes(self, chunk: int) -> int:
        """Of a part of the packed matrix: column chunk ``chunk``, counted through the slabs, or -1 for the whole."""
        return self.bytes if chunk < 0 else self.k_chunks * self.chunk_bytes(self.chunks[chunk % len(self.chunks)])

    @property
    def elements(self) -> int:
        return self.bytes // (2 if is_half(self.dtype) else 4)

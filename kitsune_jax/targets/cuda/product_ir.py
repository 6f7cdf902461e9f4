"""The device IR, continued: products for each row, whose operands pass through shared memory row by row.

Like ``statements.py``: data that ``row_products.py`` makes and ``print_products.py`` spells out.
"""

from __future__ import annotations

from kitsune_jax.targets.cuda import tiles
from kitsune_jax.targets.cuda.device_ir import Address, Expr, Node, Ref

_WARPS = tiles.GROUP_THREADS // 32
_MOST_OF_TWO_SLOTS = 1 << 14  # bytes of two slots of a warp at most; wider operands get one


class KeepAddress(Node):
    """The addresses of the rows ``ref`` become number ``number`` of those that the lane keeps in shared memory. ``stored``: they
    are written to, and those beyond the stream are null."""

    ref: Ref
    number: int
    stored: bool


class Copied(Node):
    """Elements of an operand from ``first`` on: of ``pieces`` sources, ``count`` each. ``how``: "async" (16 bytes at a time),
    "elements" or "staged", of the addresses from ``source`` on; or "scratch", of the warp's scratch rows from column ``source`` on.
    """

    how: str
    source: int
    pieces: int
    first: int
    count: int


class RowOperand(Node):
    """``free`` times K elements of a row. ``across``: K is the outer dimension."""

    free: int
    across: bool
    copied: tuple[Copied, ...]

    def slot_bytes(self, k: int, size: int) -> int:
        """``RowOperand::kBytes`` of stage/row_product.h."""
        run, runs = (self.free, k) if self.across else (k, self.free)
        return runs * (-(-run * size // 16) | 1) * 16


class ToRows(Node):
    """To the rows of an array, whose addresses are number ``number``. ``pairs``: they start on a multiple of four bytes."""

    number: int
    pairs: bool


class RowProduct(Node):
    """x y^T of each row, of operands of ``dtype``, to the image ``to`` of a value of ``out`` with ``columns`` columns, or to the
    rows of an array. ``y`` is None where it is x. ``picks``: a vector that says which element of the product each column is, -1
    for ``fill``."""

    to: Ref | ToRows
    dtype: str
    k: int
    x: RowOperand
    y: RowOperand | None
    out: str
    columns: int
    picks: Address | None
    fill: Expr | None

    @property
    def others(self) -> RowOperand:
        return self.y or self.x

    @property
    def slots(self) -> int:
        return 2 if 2 * self._slot <= _MOST_OF_TWO_SLOTS else 1

    @property
    def _slot(self) -> int:
        size = 2 if tiles.is_half(self.dtype) else 4
        return self.x.slot_bytes(self.k, size) + (self.y.slot_bytes(self.k, size) if self.y else 0)

    @property
    def bytes(self) -> int:
        """Shared memory of a lane (``RowProduct::kBytes``)."""
        return _WARPS * (self.slots * self._slot + -(-self.x.free * self.others.free // 4) * 16)


class RowMemory(Node):
    """Where a lane keeps ``addresses`` for each row, at byte ``at``, and its warps work on products, in ``bytes`` from ``work`` on:
    a warp has the same part for all of them, because nothing but the warp itself says when one is done."""

    addresses: int
    at: int
    work: int
    bytes: int


def address_bytes(count: int) -> int:
    """Shared memory of a lane for so many addresses of each of its rows (``RowAddresses::kBytes``)."""
    return tiles.TILE_ROWS * 8 * count

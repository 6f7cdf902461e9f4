"""How a CTA holds a weight gradient: a product that contracts the rows, accumulated in registers while tiles stream past.

Comes in: the columns of its two operands. Goes out: ``GradientShape``, which the planner counts with and kernels are made from.
Invariant: registers and bytes are exactly those of ``cuda/include/kitsune/stage/gradient.h``.

The accumulators of X^T Y have the columns of X as rows and those of Y as columns. A stage that is *split* shares out the columns of
Y over its CTAs; the *lanes* of a CTA share out the rows, in blocks of 64, and every lane works on the tiles of all of them. Each
lane leaves its tile's operands in shared memory as *panels*.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from kitsune_jax.planning.cost import RegionCost, itemsize, round_up

BLOCK_ROWS = 64  # of accumulators: the M of wgmma
MOST_COLUMNS = 256  # its N
# A thread's accumulators beside which it can still make the operands; a consumer has 160 to 240 registers.
MOST_REGISTERS = 160
_PANEL_COLUMNS = 64  # of a block of 16-bit columns: 128 bytes, the swizzle's width
_TILE_ROWS = 64
_PITCH_WORDS = 4  # that a row of a float32 panel is longer, so that neighbours in a column lie in different banks


@dataclasses.dataclass(frozen=True, slots=True)
class GradientShape:
    """``rows``, ``columns``: of the accumulators, as many as there are columns of X and Y in one slab. ``swapped``: X is the
    second operand. ``blocks``: of 64 rows that a lane has; ``width``: columns of its accumulators.
    """

    rows: int
    columns: int
    swapped: bool
    blocks: int
    width: int

    @property
    def registers(self) -> int:
        """32-bit registers of a thread."""
        return self.blocks * self.width // 2

    @property
    def all_blocks(self) -> int:
        return -(-self.rows // BLOCK_ROWS)


def gradient_shapes(first: int, second: int, half: bool, split: int, lanes: int) -> list[GradientShape]:
    """The ways to hold the product of operands of ``first`` and ``second`` columns, fewest registers first; none for a product
    that does not fit. ``half``: 16-bit operands.

    >>> [(g.swapped, g.blocks, g.width) for g in gradient_shapes(256, 256, True, 2, 2)]
    [(False, 2, 128), (True, 2, 128)]
    >>> [(g.swapped, g.registers) for g in gradient_shapes(256, 4, True, 1, 2)]
    [(False, 64), (True, 128)]
    """
    found = []
    for swapped, rows, columns in ((False, first, second), (True, second, first)):
        if split > 1 and columns % (32 * split):
            continue  # slabs are whole blocks of 32 columns
        slab = columns // split
        width = round_up(slab, 64) if half else (8 if slab <= 8 else 16 if slab <= 16 else round_up(slab, 32))
        shape = GradientShape(rows, slab, swapped, -(-round_up(rows, BLOCK_ROWS) // BLOCK_ROWS // lanes), width)
        if width <= MOST_COLUMNS and shape.registers <= MOST_REGISTERS:
            found.append(shape)
    return sorted(found, key=lambda g: g.registers)


def useful_gradient_split(first: int, second: int, split: int) -> int:
    """The most CTAs, ``split`` at most, that can share a gradient: slabs of whole blocks of 32 columns of either operand.

    >>> useful_gradient_split(319, 256, 5), useful_gradient_split(63, 4, 8)
    (4, 1)
    """
    return max(s for s in range(1, split + 1) if s == 1 or first % (32 * s) == 0 or second % (32 * s) == 0)


def panel_sums(cost: RegionCost, ops: Iterable[int]) -> frozenset[int]:
    """Sums over the rows of a 16-bit operand of a weight gradient among ``ops``: they are made where that operand lies already."""
    ops = tuple(ops)
    operands = {v for i in ops if i in cost.sinks and cost.work(i).dot is not None for v in cost.graph.ops[i].inputs}

    def is_sum(i: int) -> bool:
        op = cost.graph.ops[i]
        if i not in cost.sinks or op.kind != "reduce_sum" or op.inputs[0] not in operands:
            return False
        return itemsize(cost.graph.values[op.inputs[0]].dtype) == 2 and cost.graph.values[op.outputs[0]].size > 1

    return frozenset(i for i in ops if is_sum(i))


def panel_sums_of(cost: RegionCost) -> dict[int, int]:
    """Sums over the rows of an operand of a weight gradient -> the gradient, in whose stage the operand lies in shared memory."""
    found: dict[int, int] = {}
    for gradient in cost.region.ops:
        if gradient in cost.sinks and cost.work(gradient).dot is not None:
            for i in panel_sums(cost, (gradient, *(c for v in cost.graph.ops[gradient].inputs for c in cost.readers.get(v, ())))):
                found.setdefault(i, gradient)
    return found


def panel_bytes(width: int, half: bool) -> int:
    """Shared memory of 64 rows of an operand ``width`` columns wide.

    >>> panel_bytes(32, True), panel_bytes(256, True), panel_bytes(8, False)
    (8192, 32768, 3072)
    """
    if half:
        return round_up(width, _PANEL_COLUMNS) // _PANEL_COLUMNS * _TILE_ROWS * 128
    return round_up(_TILE_ROWS * (width + _PITCH_WORDS) * 4, 1024)

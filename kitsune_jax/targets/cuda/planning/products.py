"""Products for each row in a plan: what belongs to their stage, and what they keep and move there.

Comes in: a ``RegionCost`` and ops. Goes out: the ops that only feed such a product or pick from it, shared memory, and the work of
a tile. Operands are copied to shared memory row by row from where they lie (``row_products.py``), so they never lie together
anywhere, and rows that an index takes are best taken where they are multiplied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from kitsune_jax.planning.cost import GATHER, DotWork, RegionCost, itemsize, round_up
from kitsune_jax.targets.cuda.product_ir import RowOperand, RowProduct
from kitsune_jax.targets.cuda.tiles import TILE_ROWS

_VIEWS = frozenset({"broadcast", "reshape"})
# Cycles of a warp for a row beside what its engines take: barriers, the latency of a chain of products and of its sums on their way
# through shared memory. A design value: no device has measured it.
_ROW_CYCLES = 500
_COPY_SLOTS = 8  # of 16 bytes: an address, a place, the copy itself
_PRODUCT_SLOTS = 64  # of an mma.sync with its share of ldmatrix, in the 32 threads of a warp
_SUM_SLOTS = 4  # of a sum: to shared memory, and from there to where it goes
_ROWS, _COLUMNS, _DEPTH_BYTES = 16, 8, 32  # of an mma.sync


@dataclasses.dataclass(frozen=True, slots=True)
class ProductWork:
    """Of a tile. ``flops``: of padded products. ``shared``: bytes that shared memory moves. ``cycles``: that a lane waits alone."""

    flops: float
    slots: float
    shared: float
    cycles: float


def row_products_of(cost: RegionCost, ops: Iterable[int]) -> list[int]:
    """Matmuls whose both operands stream."""
    return [i for i in ops if i not in cost.sinks and (dot := cost.work(i).dot) is not None and dot.per_row]


def fed_by(cost: RegionCost) -> dict[int, int]:
    """Ops that only put together or take the operands of a product, or pick from its result -> the product."""
    found: dict[int, int] = {}
    for product in row_products_of(cost, cost.region.ops):
        todo = list(cost.graph.ops[product].inputs)
        while todo:
            i = cost.producer.get(todo.pop(), -1)
            if i < 0 or i in found or cost.is_maker(i) or not _feeds(cost, i):
                continue
            found[i] = product
            if cost.family(i) != GATHER:
                todo += cost.graph.ops[i].inputs
        todo = list(cost.graph.ops[product].outputs)
        while todo:
            readers = cost.readers.get(todo.pop(), ())
            if len(readers) == 1 and (cost.family(readers[0]) in _VIEWS or cost.graph.ops[readers[0]].kind == "take"):
                found[readers[0]] = product
                if cost.graph.ops[readers[0]].kind != "take":
                    todo += cost.graph.ops[readers[0]].outputs
    return found


def stacked_of(cost: RegionCost, ops: Iterable[int]) -> frozenset[int]:
    """Of ``ops`` those that put operands together: a product reads them part by part."""
    found = fed_by(cost)
    return frozenset(i for i in ops if i in found and cost.family(i) in (*_VIEWS, "concatenate"))


def _feeds(cost: RegionCost, i: int) -> bool:
    return cost.family(i) in (*_VIEWS, "concatenate") or cost.looks_up(i)


def _node(cost: RegionCost, i: int) -> RowProduct:
    """The product with its operands as they lie where K is their last dimension, which is the least."""
    dot, (x, y) = _dot(cost, i), cost.graph.ops[i].inputs
    a, b = (RowOperand(n, False, ()) for n in (dot.m, dot.n))
    return RowProduct(None, dot.dtype, dot.k, a, None if x == y else b, dot.dtype, 0, None, None)  # type: ignore[arg-type]


def _dot(cost: RegionCost, i: int) -> DotWork:
    dot = cost.work(i).dot
    assert dot is not None
    return dot


def product_bytes(cost: RegionCost, ops: Iterable[int]) -> int:
    """Shared memory of a lane: operands and sums of a row of each warp; products take turns."""
    return max((_node(cost, i).bytes for i in row_products_of(cost, ops)), default=0)


def product_work(cost: RegionCost, i: int) -> ProductWork:
    dot, (x, y) = _dot(cost, i), cost.graph.ops[i].inputs
    size = itemsize(dot.dtype)
    m, n, k = round_up(dot.m, _ROWS), round_up(dot.n, _COLUMNS), round_up(dot.k, _DEPTH_BYTES // size)
    copied = (dot.m + (0 if x == y else dot.n)) * dot.k * size
    multiplied = (m + m // _ROWS * n) * k * size
    products = m // _ROWS * (n // _COLUMNS) * (k * size // _DEPTH_BYTES)
    sums = dot.m * dot.n
    slots = copied / 16 * _COPY_SLOTS + products * _PRODUCT_SLOTS + sums * _SUM_SLOTS
    rows = TILE_ROWS // 4  # of each warp, one after the other
    return ProductWork(
        2.0 * TILE_ROWS * m * n * k, TILE_ROWS * slots, TILE_ROWS * (copied + multiplied + 8.0 * sums), rows * _ROW_CYCLES
    )

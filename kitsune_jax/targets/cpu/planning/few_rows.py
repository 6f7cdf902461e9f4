"""Products of few rows with a matrix that is read once, as it lies: a token with a weight, a query with the keys of its head.

Comes in: what a product does for a row, or the costs of a region. Goes out: whether it is of that kind, and the matrices of a
region that only such products read; a tile needs no memory for those.
"""

from __future__ import annotations

from kitsune_jax.planning.cost import DotWork, RegionCost
from kitsune_jax.streams.seeds import FEW_OF_BATCH, FEW_ROWS

_LARGE = 1 << 12  # elements of a matrix that belongs to one row of the stream


def has_few_rows(dot: DotWork | None, sink: bool) -> bool:
    """``sink``: the product contracts the stream."""
    if dot is None or dot.dtype == "float64" or min(dot.m, dot.n) > (FEW_OF_BATCH if dot.per_row else FEW_ROWS):
        return False
    return sink or dot.per_row and max(dot.m, dot.n) * dot.k >= _LARGE


def matrices(cost: RegionCost) -> frozenset[int]:
    """The streamed operands of the region that nothing reads but products for each row of the stream, of few rows each."""

    def once(v: int, i: int) -> bool:
        dot = cost.work(i).dot
        larger = max(cost.graph.ops[i].inputs, key=cost.row_size)
        return dot is not None and dot.per_row and v == larger and has_few_rows(dot, False)

    return frozenset(v for v in cost.region.inputs if v in cost.labels and all(once(v, i) for i in cost.readers.get(v, ())))

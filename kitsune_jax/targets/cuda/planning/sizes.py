"""Bytes of what a stage keeps on a GPU, counted with the sizes that its kernel is laid out with (``targets.cuda.tiles``).

Comes in: the ops of a stage. Goes out: bytes of packed weights, of vectors, of a ring's entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from kitsune_jax.planning.cost import DotWork, RegionCost
from kitsune_jax.targets.cuda import tiles

Cost = TypeVar("Cost", bound=RegionCost)


def dots_of(cost: RegionCost, ops: Iterable[int]) -> list[DotWork]:
    """Matmuls with stationary weights."""
    dots = [cost.work(i).dot for i in ops if i not in cost.sinks]
    return [dot for dot in dots if dot is not None and not dot.per_row]


def gradients_of(cost: RegionCost, ops: Iterable[int]) -> list[DotWork]:
    """Weight gradients: matmuls that contract the rows, of operands with ``m`` and ``n`` columns."""
    return [dot for i in ops if i in cost.sinks and (dot := cost.work(i).dot) is not None]


def slab(columns: int, split: int) -> int:
    """Columns of each of ``split`` slabs.

    >>> slab(1408, 22), slab(100, 1)
    (64, 100)
    """
    return columns if split == 1 else columns // split


def packed_bytes(cost: RegionCost, ops: Iterable[int], split: int = 1, batches: bool = False) -> int:
    """A CTA's share of the packed weights that the matmuls of ``ops`` read, those in the bodies of loops as well. ``batches``: of
    those that depend on the batch, those of all."""
    ops = tuple(ops)
    found = sum(packed_bytes(body, body.region.ops, split) for _, body in loops_of(cost, ops))
    for i in ops:
        for dot in dots_of(cost, (i,)):
            weight = next((v for v in cost.graph.ops[i].inputs if v in cost.of_batch), None) if batches else None
            each = tiles.WeightShape((dot.k,), dot.n, dot.dtype, split).slab_bytes
            found += each if weight is None else each * (cost.graph.values[weight].size // cost.row_size(weight))
    return found


def loops_of(cost: Cost, ops: Iterable[int]) -> list[tuple[int, Cost]]:
    """(steps, costs of the body) of the loops among ``ops``."""
    return [(cost.graph.ops[i]["length"], cost.body(i)) for i in ops if cost.graph.ops[i].body is not None]


def vector_bytes(cost: RegionCost, ops: Iterable[int]) -> int:
    """Biases, gains and the like: stationary operands of other ops than matmuls."""
    others = (i for i in ops if cost.work(i).dot is None and cost.graph.ops[i].body is None)
    return sum(cost.bytes(v) for v in cost.stationary_inputs(others))


def form(dtype: str) -> str:
    """How the elements of a value lie in registers, where no stage is split (``values.Value.form``)."""
    return "pair" if tiles.is_half(dtype) else "bit" if dtype == "bool" else "word"


def entry_bytes(cost: RegionCost, v: int) -> int:
    """One tile of ``v`` in a ring."""
    return tiles.image_bytes(tiles.padded(cost.row_size(v)), form(cost.graph.values[v].dtype))

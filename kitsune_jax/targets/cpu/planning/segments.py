"""Folds by indices in whose order a region streams: what making the order takes, and what each segment takes beside its rows.

Comes in: the costs of a region. Goes out: worker-seconds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from kitsune_jax.planning.cost import Access
from kitsune_jax.targets.cpu.planning.cost import CpuCost

# One worker: a run that ends, and a number that may be an index when the order is made. 100 000 single numbers with 10 indices took
# 234 us of two in order, with 10 000 and 100 000 indices 300 and 523; 10 000 in no order 80 and 189 (Xeon with AMX).
_RUN_SECONDS, _KEY_SECONDS = 8e-9, 9e-9
# Rows that are copied where a row is widened to double precision and rounded again; and for the two that a strand keeps, of so many
# strands at most (cpu/src/executor.cc): 128 rows of 8 192 numbers with 256 indices were modelled at 0.6 ms and took 1.5.
_KEPT_ROWS, _STRAND_ROWS, _STRANDS = 3, 8, 64


def order_seconds(cost: CpuCost) -> float:
    """What it takes to stream in the order of indices: to make the order, and to read and write single rows."""
    if cost.order is None:
        return 0.0
    rows = cost.region.space.rows
    keys = max((_segments(access) for access in _folds(cost) if access.near), default=0)
    seconds = rows * cost.times["order"] + keys * _KEY_SECONDS
    for v in (*cost.region.inputs, *cost.outputs):
        if v in cost.labels:
            row = Access(1, cost.row_bytes(v), cost.bytes(v), False, False)
            near = dataclasses.replace(row, near=True)
            seconds += rows * (cost.times.access(row) - cost.times.access(near))
    return seconds


def folded_seconds(cost: CpuCost) -> float:
    """Of folding rows that the region does nothing else with: they are read while others are folded."""
    seconds = 0.0
    for i in cost.sinks:
        access, rows = cost.access(i), cost.graph.ops[i].inputs[0]
        alone = rows in cost.region.inputs and rows in cost.labels and cost.readers.get(rows) == [i]
        if access is not None and access.folds and alone:
            seconds += cost.region.space.rows * cost.times.folded(access)
    return seconds


def segments_seconds(cost: CpuCost, tiles: int) -> float:
    """Of the results of folds in order, beside reading and folding rows: their lines are brought in before they are written, runs
    end, as many as rows at random have different indices, and what no row has is filled. The last run of each of ``tiles`` tiles is
    kept in double precision, as are the first and the last one of a strand until all strands have ended."""
    seconds = 0.0
    for access in _folds(cost):
        if access.near:
            segments = _segments(access)
            ends = segments * -math.expm1(-cost.region.space.rows * access.count / segments)
            empty = 1 - ends / segments
            seconds += (0.5 + 0.5 * empty) * cost.times.written(access.table_bytes) + ends * _RUN_SECONDS
            kept = _KEPT_ROWS * tiles + _STRAND_ROWS * min(tiles, _STRANDS)
            seconds += kept * access.row_bytes * cost.times["copy/l2"]
    return seconds


def _folds(cost: CpuCost) -> Iterator[Access]:
    for i in cost.sinks:
        access = cost.access(i)
        if access is not None and access.folds:
            yield access


def _segments(access: Access) -> int:
    return max(1, access.table_bytes // max(1, access.row_bytes))

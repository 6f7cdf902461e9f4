"""Short runs inside rows: what is repeated or folded there a few elements at a time takes longer than its elements.

Comes in: the costs of a region. Goes out: how many runs a repeated operand has in a row, whether a reduction picks its elements one
by one, and how many short pieces of arrays cross the border. A Viterbi or CRF step is of this kind: ``a[:, :, None] + transitions``
of [batch, 6, 6], and its maximum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kitsune_jax.planning.cost import FREE, RegionCost, itemsize
from kitsune_jax.targets.cpu.planning.times import CpuTimes

# Up to eight rows of an array in memory that are read or written alone, a page and more from the next ones: exp of [255, 512, 6] in
# front of a loop, in tiles of 4 of the 512 rows, took one worker 7 ns for eight rows, of [255, 2048, 6] 22 (Xeon with AMX, busy).
# In tiles of one of 64 rows, pieces of 64 bytes took 23 ns, of 128 and 256 bytes 30 to 60; of 16 bytes, a quarter of a page from
# the next ones, 8 to 12, which is finding them (the same machine).
PIECE_SECONDS, NEAR_PIECE_SECONDS = 20e-9, 6e-9
_PIECE_ROWS, _PIECE_BYTES, _PAGE = 8, 1024, 4096
# Runs inside a row are found by their strides, one by one: they took 8 to 15 ns each, a whole row of one number 3 (same machine).
_WITHIN = 3.0
SHORT = 16  # elements: from here on the elements of a run are what takes time


def spreads(cost: RegionCost, i: int) -> tuple[int, ...]:
    """Of each operand of op ``i`` that was repeated along the row, or inside it in short runs, the number of runs of a row."""
    size = cost.row_size(cost.graph.ops[i].outputs[0])
    found = []
    for v in dict.fromkeys(cost.graph.ops[i].inputs):
        run = size
        while v in cost.producer and cost.family(cost.producer[v]) in FREE and cost.graph.ops[cost.producer[v]].inputs:
            op = cost.graph.ops[cost.producer[v]]
            if op.kind == "broadcast_in_dim":
                run = min(run, _repeated(cost.graph.values[op.inputs[0]].shape, op["dims"], cost.graph.values[v].shape))
            v = op.inputs[0]
        if v not in cost.labels or size <= 1:
            continue
        if cost.row_size(v) == 1:
            found.append(1)
        elif 0 < run < min(size, SHORT):
            found.append(size // run)
    return tuple(found)


def seconds(times: CpuTimes, dtype: str, elements: int, n: int) -> float:
    """Of an operand that is repeated in ``n`` runs of a row of ``elements``."""
    return n * times.spread(dtype, elements / n) * (_WITHIN if n > 1 else 1.0)


def _repeated(shape: Sequence[int], dims: Sequence[int], out: Sequence[int]) -> int:
    """Elements of the result that follow each other until it changes between the same element again and another one."""
    kept = {d for n, d in zip(shape, dims, strict=True) if n == out[d]}
    real = [d for d, n in enumerate(out) if n > 1]
    run = 1
    for d in reversed(real):
        if (d in kept) != (real[-1] in kept):
            break
        run *= out[d]
    return run


def folds_single_elements(cost: RegionCost, i: int) -> bool:
    """Does reduction ``i`` fold fewer elements than a vector has, and are those that lie side by side of as few results?"""
    op = cost.graph.ops[i]
    shape, params = cost.graph.values[op.inputs[0]].shape, dict(op.params)
    axes = params["axes"] if "axes" in params else (params["axis"],)
    behind = math.prod(shape[max(axes) + 1 :])
    return behind < SHORT and 1 < math.prod(shape[d] for d in axes) < SHORT


def pieces(cost: RegionCost, rows: int) -> tuple[int, int]:
    """Short pieces that the region reads and writes where it streams over a dimension of an array that others stand in front of:
    those that lie pages apart, and the others.

    Of eight rows each, as short tiles have them, or of a tile's ``rows`` where these are fewer. What loops slice is not among them:
    the rows of a slice lie together."""
    far, near, sliced = 0, 0, cost.sliced()
    together = max(1, min(_PIECE_ROWS, rows))
    for v in (*cost.region.inputs, *cost.outputs):
        value, labels = cost.graph.values[v], cost.labels.get(v)
        streamed = [d for d, label in enumerate(labels or ()) if label and value.shape[d] > 1]
        if v in sliced or not streamed:
            continue
        in_front = math.prod(n for d, n in enumerate(value.shape[: streamed[-1]]) if d not in streamed)
        inner = math.prod(value.shape[streamed[-1] + 1 :])
        size = inner * itemsize(value.dtype)
        if in_front == 1 or together * size >= _PIECE_BYTES:
            continue
        if size * value.shape[streamed[-1]] >= _PAGE:
            far += value.size // (together * inner)
        else:
            near += value.size // (together * inner)
    return far, near


def pieces_seconds(cost: RegionCost, rows: int) -> float:
    """What ``pieces`` take one worker."""
    far, near = pieces(cost, rows)
    return far * PIECE_SECONDS + near * NEAR_PIECE_SECONDS

"""Short runs inside rows: what is repeated or folded there a few elements at a time takes longer than its elements.

Comes in: the costs of a region. Goes out: how many runs a repeated operand has in a row, and whether a reduction picks its elements
one by one. A Viterbi or CRF step is of this kind: ``a[:, :, None] + transitions`` of [batch, 6, 6], and its maximum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kitsune_jax.planning.cost import FREE, RegionCost

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
    return behind < SHORT and math.prod(shape[d] for d in axes) < SHORT

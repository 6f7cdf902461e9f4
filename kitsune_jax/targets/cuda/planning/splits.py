"""Which stages of a GPU's pipeline several CTAs can share, each with its slab of the result's columns.

Comes in: the ops of a stage. Goes out: the most CTAs that can share them. A stage is shared where it is one matmul, or one weight
gradient, among nothing but elementwise ops: each CTA makes its own columns of the results. Slabs are whole blocks of columns, all
of the same number. ``targets.cuda.slabs`` finds the slabs of a stage that is split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kitsune_jax.planning.cost import RegionCost, itemsize
from kitsune_jax.targets.cuda.planning.sizes import dots_of, gradients_of
from kitsune_jax.targets.cuda.tiles import BLOCK_COLUMNS

_ANCHORS = frozenset({"dot", "reduce", "argreduce", "cumulative"})
_ELEMENTWISE = frozenset({"pointwise", "convert", "broadcast"})


def most_split(cost: RegionCost, ops: Sequence[int], split: int) -> int:
    """The most CTAs, ``split`` at most, that can share ``ops``."""
    if split == 1 or not is_splittable(cost, ops):
        return 1
    gradients = gradients_of(cost, ops)
    if gradients:
        return useful_gradient_split(gradients[0].m, gradients[0].n, split)
    return useful_split(dots_of(cost, ops)[0].n, split)


def is_splittable(cost: RegionCost, ops: Sequence[int]) -> bool:
    """One matmul and elementwise ops: each CTA of a stage can make its own columns of the results, or of a weight gradient."""
    sums = panel_sums(cost, ops)
    anchors = [i for i in ops if cost.family(i) in _ANCHORS and i not in sums]
    others = [i for i in ops if i not in sums and i not in anchors]
    if len(anchors) != 1 or any(i in cost.sinks for i in others):
        return False
    dot = cost.work(anchors[0]).dot
    if dot is None or dot.per_row:
        return False
    if anchors[0] in cost.sinks:
        return _separate_operands(cost, others, anchors[0])
    columns = cost.row_size(cost.graph.ops[anchors[0]].outputs[0])
    after = _after(cost, ops, anchors[0])
    elementwise = all(cost.family(i) in _ELEMENTWISE for i in ops if i != anchors[0])
    return elementwise and all(cost.row_size(v) in (1, columns) for i in after for v in cost.graph.ops[i].outputs)


def _separate_operands(cost: RegionCost, ops: Sequence[int], gradient: int) -> bool:
    """Whether the operands of a weight gradient meet nowhere in the stage: only those of one of them are shared out."""
    if any(cost.family(i) not in _ELEMENTWISE for i in ops if i != gradient):
        return False
    reach = []
    for v in cost.graph.ops[gradient].inputs:
        seen: set[int] = set()
        todo = [v]
        while todo:
            v = todo.pop()
            if v in seen or not cost.streamed(v) or cost.row_size(v) == 1:
                continue
            seen.add(v)
            touching = [i for i in ops if i != gradient and v in (*cost.graph.ops[i].inputs, *cost.graph.ops[i].outputs)]
            todo += [u for i in touching for u in (*cost.graph.ops[i].inputs, *cost.graph.ops[i].outputs)]
        reach.append(seen)
    return not reach[0] & reach[1]


def _after(cost: RegionCost, ops: Sequence[int], first: int) -> list[int]:
    """Ops that depend on ``first``, itself included."""
    made = set(cost.graph.ops[first].outputs)
    after = [first]
    for i in ops:
        if made.intersection(cost.graph.ops[i].inputs):
            made.update(cost.graph.ops[i].outputs)
            after.append(i)
    return after


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


def useful_split(columns: int, split: int) -> int:
    """The most slabs, all of the same number of whole blocks of 32 columns, that ``split`` CTAs can share.

    >>> useful_split(1408, 25), useful_split(256, 3), useful_split(100, 4)
    (22, 2, 1)
    """
    blocks = columns // BLOCK_COLUMNS if columns % BLOCK_COLUMNS == 0 else 1
    return max(s for s in range(1, min(split, blocks) + 1) if blocks % s == 0)


def useful_gradient_split(first: int, second: int, split: int) -> int:
    """The most CTAs, ``split`` at most, that can share a gradient: slabs of whole blocks of 32 columns of either operand.

    >>> useful_gradient_split(319, 256, 5), useful_gradient_split(63, 4, 8)
    (4, 1)
    """
    return max(s for s in range(1, split + 1) if s == 1 or first % (BLOCK_COLUMNS * s) == 0 or second % (BLOCK_COLUMNS * s) == 0)

"""Stages cut and joined for spatial pipelines on a GPU.

Comes in: stages of the finest pipeline. Goes out: the same ops in other stages. Invariant: stages stay in topological order, makers
stand in every stage that reads them, every other op in exactly one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kitsune_jax.planning.cost import RegionCost
from kitsune_jax.planning.stages import Ops, joined, with_makers
from kitsune_jax.targets.cuda.planning.splits import is_splittable

_ELEMENTWISE = frozenset({"pointwise", "convert", "broadcast"})


def separated(cost: RegionCost, stage: Ops) -> tuple[Ops, ...]:
    """``stage`` as up to three stages, the matmul among nothing but elementwise ops, so that it can be split by columns.

    Without a matmul, or where it is splittable as it is, it stays one.
    """
    dot = next((i for i in stage if cost.work(i).dot is not None and i not in cost.sinks), None)
    if dot is None or is_splittable(cost, stage):
        return (stage,)
    ops = [i for i in stage if not cost.is_maker(i)]
    body, rest = _followers(cost, ops, dot)
    front = _front(cost, [i for i in ops if i not in body and i not in rest], body, rest)
    return with_makers(cost, [tuple(sorted(part)) for part in (front, body, rest) if part])


def _followers(cost: RegionCost, ops: Sequence[int], dot: int) -> tuple[set[int], set[int]]:
    """(the matmul and what follows it column by column, what else depends on it)."""
    columns = cost.row_size(cost.graph.ops[dot].outputs[0])
    body, rest = {dot}, set[int]()
    for i in ops:
        before = {cost.producer[v] for v in cost.graph.ops[i].inputs if v in cost.producer}
        here = cost.family(i) in _ELEMENTWISE and i not in cost.sinks and cost.row_size(cost.graph.ops[i].outputs[0]) == columns
        if before & rest or (before & body and not here):
            rest.add(i)
        elif before & body:
            body.add(i)
    return body, rest


def _front(cost: RegionCost, ops: Sequence[int], body: set[int], rest: set[int]) -> set[int]:
    """The ops that stay in front of the matmul. Elementwise ones join the parts that read them: ``body`` and ``rest`` grow."""
    front: set[int] = set()
    for i in reversed(ops):
        readers = {c for v in cost.graph.ops[i].outputs for c in cost.readers.get(v, ())}
        columnwise = cost.family(i) in _ELEMENTWISE and all(v not in cost.producer for v in cost.graph.ops[i].inputs)
        if readers and readers <= rest:
            rest.add(i)
        elif readers <= body | rest and columnwise:
            body.add(i)
        else:
            front.add(i)
    return front


def grouped(stages: Sequence[Ops], seconds: Callable[[int, int], float], most: int) -> list[tuple[Ops, ...]]:
    """For 2 to ``most`` stages the contiguous grouping whose slowest stage is fastest; none for a number where none fits.

    ``seconds(a, b)``: of stages a to b - 1 as one stage; infinite where they fit no stage.
    """
    n = len(stages)
    best = [0.0] + [float("inf")] * n  # of the first j stages in k stages
    cuts: list[list[int]] = []
    found = []
    for k in range(1, min(most, n) + 1):
        following = [float("inf")] * (n + 1)
        cut = [0] * (n + 1)
        for b in range(k, n + 1):
            for a in range(b - 1, k - 2, -1):
                one = seconds(a, b)
                if one == float("inf"):
                    break  # more ops do not fit either
                slowest = max(best[a], one)
                if slowest < following[b]:
                    following[b], cut[b] = slowest, a
        best = following
        cuts.append(cut)
        if k > 1 and best[n] < float("inf"):
            found.append(_grouping(stages, cuts))
    return found


def _grouping(stages: Sequence[Ops], cuts: Sequence[Sequence[int]]) -> tuple[Ops, ...]:
    ends = [len(stages)]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    return tuple(joined(stages[a:b]) for a, b in itertools.pairwise(reversed(ends)))

"""Where a stream may start: dimensions of one value, which become its axes.

Comes in: a Graph and one of its ops. Goes out: the ``Seed``s from which ``propagate.spread`` may go on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping

from kitsune_jax.graph import Graph
from kitsune_jax.ops.table import OPS

# Products of a batch with fewer results than this are no attention: all of a batch is one row.
_LARGE_BATCH = 64 * 64
FEW_ROWS = 4  # of a product that takes as long as its weight takes to arrive
FEW_OF_BATCH = 8  # the same of a product for each of a batch: the matrix is small enough to stay near while all rows meet it
_LARGE_WEIGHT = 64 * 64  # elements
_MOVED = frozenset({"reshape", "transpose", "convert_element_type", "copy"})


@dataclasses.dataclass(frozen=True, slots=True)
class Seed:
    """``dims`` of ``value``: each becomes a stream axis of its own, in this order, the first ``batch`` of them batch axes.
    ``apart``: sums of scores over the stream are left to another one (``Wiring.scores``)."""

    value: int
    dims: tuple[int, ...]
    batch: int = 0
    apart: bool = False


def candidate_seeds(
    graph: Graph, op_index: int, producers: Mapping[int, int] | None = None, scores: Container[int] = ()
) -> list[Seed]:
    """Ways in which the stream could run through an op, most promising first. Where ``producers`` are given, a product of a few
    rows streams over what it contracts, or over the columns of its weight, and one of a batch of those over the batch; not over
    the rows. ``scores``: see ``Wiring``.

    A dot streams over the free dimensions of either side (the other side is then stationary, or, where the dot has batch
    dimensions, stationary for each batch), or, where they are the longest, over the contracted ones (it is a sink then); anything
    else over all but the last dimension of its largest operand, its first dimension, and each single dimension.
    """
    op = graph.ops[op_index]
    seeds: list[Seed] = []
    if op.kind == "dot_general":
        sides = []
        for v, contract, batch in (
            (op.inputs[0], op["lhs_contract"], op["lhs_batch"]),
            (op.inputs[1], op["rhs_contract"], op["rhs_batch"]),
        ):
            shape = graph.values[v].shape
            free = [d for d in range(len(shape)) if d not in contract and d not in batch]
            sides.append((math.prod(shape[d] for d in free), v, free))
        # A weight gradient: the rows are what it contracts, and the other seeds would stream over columns of the weight.
        seeds += _batched(graph, op_index)
        contracted = math.prod(graph.values[op.inputs[0]].shape[d] for d in op["lhs_contract"])
        if op["lhs_contract"] and contracted >= max(size for size, _, _ in sides):
            seeds.append(Seed(op.inputs[0], tuple(op["lhs_contract"])))
        if producers is not None and has_few_rows(graph, producers, op_index):
            batch = range(len(op["lhs_batch"]))
            seeds = [Seed(op.outputs[0], tuple(batch)) if batch else Seed(op.inputs[0], tuple(op["lhs_contract"]))]
            sides = [max(sides)]
        if producers is not None and (taken := _taken_with(graph, producers, op_index)):
            seeds.insert(0, Seed(op.outputs[0], taken))
        along = [Seed(v, tuple(free[:k])) for _, v, free in sorted(sides, key=lambda s: -s[0]) for k in range(len(free), 0, -1)]
        if any(v in scores for v in (*op.inputs, *op.outputs)) and not any(s.batch for s in seeds):
            seeds = [dataclasses.replace(s, apart=True) for s in along] + seeds
        seeds += along
    elif OPS[op.kind].family in ("gather", "scatter"):
        # The rows are what the indices run over; the other dimensions in front of them stream where the indices do not.
        v = op.outputs[0] if OPS[op.kind].family == "gather" else op.inputs[0]
        indexed = range(op["axis"], op["axis"] + len(graph.values[op.inputs[1]].shape))
        choices = [tuple(indexed), tuple(indexed[:1]), tuple(range(op["axis"]))]
        seeds = [Seed(v, dims) for dims in choices if dims]
    else:
        operands = [v for v in (*op.outputs, *op.inputs) if graph.values[v].shape]
        if not operands:
            return []
        v = max(operands, key=lambda v: (graph.values[v].size, len(graph.values[v].shape)))
        rank = len(graph.values[v].shape)
        choices = [tuple(range(rank - 1)), (0,), *((d,) for d in range(1, rank)), tuple(range(rank))]
        seeds = [Seed(v, dims) for dims in choices if dims]
    return [
        s for s in dict.fromkeys(_without_ones(graph, s) for s in seeds) if all(graph.values[s.value].shape[d] > 0 for d in s.dims)
    ]


def _taken_with(graph: Graph, producers: Mapping[int, int], op_index: int) -> tuple[int, ...]:
    """The batch dimensions of a product that multiplies matrices taken of a table, one or more for each of the batch: the weights
    of a token's experts. A row of such a stream reads its matrices where the table has them; others would cut all of them."""
    op = graph.ops[op_index]
    for v in op.inputs:
        while (made_by := producers.get(v)) is not None and graph.ops[made_by].kind in _MOVED:
            v = graph.ops[made_by].inputs[0]
        if made_by is not None and graph.ops[made_by].kind == "take":
            return tuple(range(len(op["lhs_batch"])))
    return ()


def has_few_rows(graph: Graph, producers: Mapping[int, int], op_index: int) -> bool:
    """Is the op a product of a few rows with a weight (or, for each of a batch, with a matrix of its own) that lies in memory?

    What is computed of many rows may have few columns: such a product streams with what makes its rows.
    """
    op = graph.ops[op_index]
    if op.kind != "dot_general" or not op["lhs_contract"]:
        return False
    (out,) = op.outputs
    batch = math.prod(graph.values[out].shape[: len(op["lhs_batch"])])
    rows, matrix = sorted(op.inputs, key=lambda v: graph.values[v].size)
    x, y = graph.values[rows].size, graph.values[matrix].size
    while (made_by := producers.get(matrix)) is not None and graph.ops[made_by].kind in _MOVED:
        matrix = graph.ops[made_by].inputs[0]
    if made_by is not None and graph.ops[made_by].kind not in ("opaque", "dynamic_update_slice"):
        return False
    contracted = math.prod(graph.values[op.inputs[0]].shape[d] for d in op["lhs_contract"])
    few = FEW_OF_BATCH if batch > 1 else FEW_ROWS
    return 0 < x <= few * contracted * batch and y >= _LARGE_WEIGHT * batch


def is_batched(graph: Graph, op_index: int) -> bool:
    """Is the op a product that may stream over batch axes, with one side that lies still for each batch?"""
    return graph.ops[op_index].kind == "dot_general" and bool(_batched(graph, op_index))


def _batched(graph: Graph, op_index: int) -> list[Seed]:
    """Streams over the batch dimensions of a dot and the free ones of one side: the other side lies still for each batch."""
    op = graph.ops[op_index]
    batch, (out,) = len(op["lhs_batch"]), op.outputs
    shape = graph.values[out].shape
    if math.prod(shape[:batch]) <= 1 or math.prod(shape[batch:]) < _LARGE_BATCH:
        return []
    free = len(graph.values[op.inputs[0]].shape) - batch - len(op["lhs_contract"])
    lhs, rhs = range(batch, batch + free), range(batch + free, len(shape))
    sides = sorted((lhs, rhs), key=lambda side: -math.prod(shape[d] for d in side))
    return [Seed(out, (*range(batch), *side[:k]), batch) for side in sides for k in range(len(side), 0, -1)]


def _without_ones(graph: Graph, seed: Seed) -> Seed:
    """The same stream without axes of extent 1, unless it has no others."""
    shape = graph.values[seed.value].shape
    dims = tuple(d for d in seed.dims if shape[d] != 1)
    batch = sum(shape[d] != 1 for d in seed.dims[: seed.batch])
    return Seed(seed.value, dims, batch, seed.apart) if dims else Seed(seed.value, seed.dims)

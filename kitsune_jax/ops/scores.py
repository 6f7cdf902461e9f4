"""Scores: the results of products that are much larger than their operands, as those of an attention, and what is made of them.

Comes in: a Graph. Goes out: which of its values are scores. No operator is recognised as attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.comparisons import COMPARISONS
from kitsune_jax.ops.spec import is_float
from kitsune_jax.ops.table import OPS

_GROWS = 8  # times its operands a product's result must be, as in ``repeats``
_LONG = 256  # its rows and its columns, at least: a layer of few terms has as many rows, but not as many columns
CHEAP = frozenset({"pointwise", "convert", "broadcast", "reshape", "transpose", "iota"})


def grows(graph: Graph, op: Op) -> bool:
    """Is the result of the product ``op`` much larger than its operands?"""
    sizes = [graph.values[v].size for v in op.inputs]
    shape = graph.values[op.inputs[0]].shape
    summed = math.prod(shape[d] for d in (*op["lhs_batch"], *op["lhs_contract"]))
    return graph.values[op.outputs[0]].size >= _GROWS * max(sizes) and min(sizes) >= _LONG * summed


def is_cheap(op: Op) -> bool:
    """Does ``op`` work element by element, or only move elements?"""
    return op.kind != "opaque" and OPS[op.kind].family in CHEAP


def asks_for_equals(graph: Graph, producers: Mapping[int, int], op: Op) -> bool:
    """Does ``op`` ask which numbers equal others, or are as large as the largest?"""
    values = graph.values
    if op.kind not in COMPARISONS or any(values[v].literal is not None or not is_float(values[v].dtype) for v in op.inputs):
        return False
    return op.kind in ("eq", "ne") or any(_is_extreme(graph, producers, v) for v in op.inputs)


def _is_extreme(graph: Graph, producers: Mapping[int, int], v: int) -> bool:
    while v in producers:
        op = graph.ops[producers[v]]
        if op.kind == "opaque" or not (OPS[op.kind].moves or op.kind == "copy") or not op.inputs:
            return op.kind in ("reduce_max", "reduce_min")
        v = op.inputs[0]
    return False


def scores_of(graph: Graph) -> frozenset[int]:
    """The results of products that are much larger than their operands, and what is made of them element by element."""
    roots = {i for i, op in enumerate(graph.ops) if op.kind == "dot_general" and grows(graph, op)}
    found: dict[int, int] = {}  # -> its size
    if not roots:
        return frozenset()
    for i, op in enumerate(graph.ops):
        sizes = [found[v] for v in op.inputs if v in found]
        for v in op.outputs:
            if i in roots or (sizes and is_cheap(op) and graph.values[v].size == max(sizes)):
                found[v] = graph.values[v].size
    return frozenset(found)

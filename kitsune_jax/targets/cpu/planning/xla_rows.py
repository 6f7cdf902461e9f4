"""Kernels of XLA:CPU over rows: softmaxes, layer norms, and the elementwise work around them.

Comes in: the Graph of a whole program. Goes out: ``RowKernels``. From many rows on XLA makes one kernel of elementwise work and of
reductions that keep the rows, which goes through the ops block by block in the first caches (JAX 0.12).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.table import OPS

_MANY_ROWS = 4096
_FAMILIES = frozenset({"pointwise", "convert", "broadcast", "reshape", "reduce", "iota"})
_DTYPES = frozenset({"float32", "bfloat16", "bool", "int32"})
# What such a kernel takes, as a part of what its ops take in kernels of their own and one passage of operands and results takes.
# Softmaxes of 64 to 512 columns took 0.45 to 0.62 of that in float32 and 0.38 to 0.46 in bfloat16, layer norms 0.46 to 0.71 and
# 0.27 to 0.37 (a Xeon with AMX).
_IN_32_BITS, _IN_16_BITS = 0.5, 0.38


@dataclasses.dataclass(frozen=True)
class RowKernels:
    """``ops``: those in such kernels; ``between``: the values that only such ops make and read."""

    ops: frozenset[int] = frozenset()
    between: frozenset[int] = frozenset()

    def hold(self, ops: Collection[int]) -> bool:
        return bool(self.ops) and self.ops.issuperset(ops)

    @staticmethod
    def rate(dtypes: Collection[str]) -> float:
        return _IN_16_BITS if "bfloat16" in dtypes else _IN_32_BITS


def row_kernels(graph: Graph) -> RowKernels:
    """What of ``graph`` hangs together with a reduction that keeps many rows, by ops that such kernels have."""
    fits = [_fits(graph, op) for op in graph.ops]
    producers, consumers = graph.producers(), graph.consumers()
    found: set[int] = set()
    for root, op in enumerate(graph.ops):
        if root in found or not fits[root] or OPS[op.kind].family != "reduce":
            continue
        found.add(root)
        work = [root]
        while work:
            here = graph.ops[work.pop()]
            near = {producers[v] for v in here.inputs if v in producers} | {c for v in here.outputs for c in consumers.get(v, ())}
            new = {i for i in near if fits[i]} - found
            found |= new
            work += new
    results = set(graph.outputs)
    made = (v for i in found for v in graph.ops[i].outputs if v not in results)
    return RowKernels(frozenset(found), frozenset(v for v in made if found.issuperset(consumers.get(v, ()))))


def _fits(graph: Graph, op: Op) -> bool:
    if op.kind == "opaque" or op.body is not None or OPS[op.kind].family not in _FAMILIES:
        return False
    if any(graph.values[v].dtype not in _DTYPES for v in op.outputs):
        return False
    if OPS[op.kind].family != "reduce":
        return True
    return 0 not in op["axes"] and graph.values[op.inputs[0]].shape[0] >= _MANY_ROWS

"""Which ops of a region are computed of rows of tables where the tables have them: what ``targets.cpu.taken`` finds in a program,
before there is one.

Comes in: the costs of a region, for their facts about it. Goes out: ``Taken``.
"""

from __future__ import annotations

import dataclasses

from kitsune_jax.planning.cost import FREE, RegionCost

_TABLES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Taken:
    """``sums``: ops that read rows of a table. ``absorbed``: the products that they compute. ``values``: what never lies in memory,
    gathered rows and their products."""

    sums: frozenset[int]
    absorbed: frozenset[int]
    values: frozenset[int]

    @staticmethod
    def of(cost: RegionCost) -> Taken:
        sums, absorbed, values = set[int](), set[int](), set[int]()
        for i in cost.region.ops:
            op = cost.graph.ops[i]
            access = cost.access(i)
            folds = access is not None and access.folds and access.near and op.kind in ("scatter_sum", "scatter_exp_sum")
            products = op.kind == "reduce_sum" and i not in cost.sinks
            if not (folds or products) or cost.graph.values[op.inputs[0]].dtype not in _TABLES:
                continue
            chain = _made(cost, op.inputs[0], i)
            if chain is None:
                continue
            made, between = chain
            if folds and cost.looks_up(made):
                sums.add(i)
                values.update(between)
            elif cost.graph.ops[made].kind == "mul":
                found = [_made(cost, v, made) for v in cost.graph.ops[made].inputs]
                tables = [f for f in found if f is not None and cost.looks_up(f[0])]
                if tables:
                    sums.add(i)
                    absorbed.add(made)
                    # Of two gathers a sum reads the second as factors, from a tile.
                    values.update(between, *(names for _, names in (tables[:1] if folds else tables)))
        return Taken(frozenset(sums), frozenset(absorbed), frozenset(values))


def _made(cost: RegionCost, v: int, reader: int) -> tuple[int, list[int]] | None:
    """The op of the region that makes ``v``, behind other names of it, where ``reader`` alone reads it; and all names."""
    names = []
    while v in cost.producer and cost.readers.get(v, []) == [reader] and v not in cost.outputs:
        names.append(v)
        reader = cost.producer[v]
        op = cost.graph.ops[reader]
        if cost.family(reader) not in FREE or len(op.inputs) != 1:
            return reader, names
        v = op.inputs[0]
    return None

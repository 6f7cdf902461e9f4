"""Who runs a program of XLA:CPU: the thread that calls it, or another one that has to wake up first.

Comes in: the Graph of a whole program. Goes out: ``Handed``. XLA's CPU client counts the operations of a compiled program and runs
one of fewer than a thousand where it is called; any other it hands to a thread of its own, for which the caller waits. A custom
call counts as nothing: where a short pipeline is all that a program has to do, the caller runs it. A long one is given as many
operations as it takes to be handed over (``targets.cpu.emit``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

from kitsune_jax.graph import Graph, Op
from kitsune_jax.ops.table import OPS
from kitsune_jax.planning.cost import COPIES, FREE, SCATTER

# ``flop_count() < 1000`` in XLA's CPU client (JAX 0.12): x + 1 took 5.5 us for 900 elements and 7.7 for 1100, whose sum takes 0.1.
_CHEAP = 1000
# Calls that are modelled to take so long are handed over: the caller's Python goes on meanwhile. It takes 20 us, and
# sometimes as long again as the call: its threads have slept, and the system wakes two of them on one core. An LSTM of 1.3 ms took
# 1.65 on the average, up to 2.3 for seconds on end, one of 8 ms 5 % longer (Xeon with AMX, 2 cores).
LONG_SECONDS = 10e-3
_READERS = frozenset({"reduce", "argreduce", "cumulative", SCATTER})  # families with an operation for each element that they read


@dataclasses.dataclass(frozen=True)
class Handed:
    """``flops``: of each op of a program, as XLA counts them; none where nothing is known of the program."""

    flops: tuple[int, ...] = ()
    total: int = 0

    def is_of(self, graph: Graph) -> bool:
        """Is this ``graph`` the program itself? A region of less than half of one is planned as a graph of its own: what runs
        beside it keeps threads awake and caches full, and its ops have other numbers."""
        return len(graph.ops) == len(self.flops)

    def without(self, ops: Collection[int]) -> bool:
        """Is the program handed to another thread, but not what is left of it without ``ops``?"""
        return self.total >= _CHEAP > self.total - sum(self.flops[i] for i in ops)


def handed(graph: Graph) -> Handed:
    flops = tuple(_flops(graph, op) for op in graph.ops)
    return Handed(flops, sum(flops))


def _flops(graph: Graph, op: Op) -> int:
    if op.kind == "opaque":
        return _CHEAP  # nobody knows
    if op.body is not None:
        return handed(op.body).total
    family = OPS[op.kind].family
    if family in FREE or family in COPIES:
        return 0
    size = max(graph.values[v].size for v in (op.inputs if family in _READERS else op.outputs))
    if family == "dot":
        shape = graph.values[op.inputs[0]].shape
        return 2 * size * math.prod(shape[d] for d in op["lhs_contract"])
    return size

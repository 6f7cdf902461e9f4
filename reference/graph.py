"""The evaluation of a Graph with NumPy, op by op: the results of every target are compared with it.

In: a Graph without opaque ops, and arrays for its inputs. Out: arrays for its outputs. Invariant: every value has its graph shape,
and its graph dtype unless ``widen``.
"""

from __future__ import annotations

from collections.abc import Sequence

from kitsune_jax.ops import loops
from kitsune_jax.ops.graph import Graph
from kitsune_jax.ops.spec import Array
from kitsune_jax.ops.table import OPS


def evaluate_numpy(graph: Graph, arrays: Sequence[Array], *, widen: bool = False) -> list[Array]:
    """The outputs of ``graph`` on ``arrays``, one per graph input.

    With ``widen`` every floating value is held and computed in float64, so that only the rounding of the inputs, of literals and of
    ``reduce_precision`` is left: the reference for errors. Integers keep their dtypes.

    Raises:
      ValueError: the graph has an opaque op.
    """
    return loops.evaluate_numpy(OPS, graph, arrays, widen)

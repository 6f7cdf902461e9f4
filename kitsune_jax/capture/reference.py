"""Evaluating a Graph with NumPy, op by op: what every executor is compared with.

Comes in: a Graph without opaque ops and arrays for its inputs. Goes out: arrays for its outputs. Invariant: every value has its
graph shape, and its graph dtype unless ``widen``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kitsune_jax.graph import Graph
from kitsune_jax.ops.spec import Array, is_float, np_dtype
from kitsune_jax.ops.table import OPS


def evaluate_numpy(graph: Graph, arrays: Sequence[Array], *, widen: bool = False) -> list[Array]:
    """The outputs of ``graph`` on ``arrays``, one per graph input.

    With ``widen`` every floating value is held and computed in float64 whatever its dtype, so that only the rounding of the inputs
    and of literals (and what ``reduce_precision`` asks for) is left: the reference for errors. Integers keep their dtypes.

    Raises:
      ValueError: the graph has an opaque op.
    """
    env = {v: np.asarray(x) for v, x in zip(graph.inputs, arrays, strict=True)}
    env |= {v: np.asarray(x.literal, np_dtype(x.dtype)) for v, x in enumerate(graph.values) if x.literal is not None}
    if widen:
        env = {v: x.astype(np.float64) if is_float(x.dtype) else x for v, x in env.items()}
    for op in graph.ops:
        if op.kind not in OPS:
            raise ValueError(f"{op.label} ({op.source}) is opaque: {op.reason}")
        params, out = dict(op.params), graph.values[op.outputs[0]]
        dtype = out.dtype
        if widen:
            dtype = "float64" if is_float(dtype) else dtype
            if is_float(params.get("accumulate", "")):
                params["accumulate"] = "float64"
        env[op.outputs[0]] = OPS[op.kind].numpy(params, *(env[v] for v in op.inputs), out_dtype=dtype)
    return [env[v] for v in graph.outputs]

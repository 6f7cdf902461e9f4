"""The evaluation of a Graph with NumPy, op by op: the results of every target are compared with it.

Comes in: a Graph without opaque ops, and arrays for its inputs. Goes out: arrays for its outputs. Invariant: every value has its
graph shape, and its graph dtype unless ``widen``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kitsune_jax.ops.graph import Graph, Op
from kitsune_jax.ops.loops import body_of
from kitsune_jax.ops.spec import Array, is_float, np_dtype
from kitsune_jax.ops.table import OPS
from reference.operators import MEANINGS


def evaluate_numpy(graph: Graph, arrays: Sequence[Array], *, widen: bool = False) -> list[Array]:
    """The outputs of ``graph`` on ``arrays``, one per graph input.

    With ``widen`` every floating value is held and computed in float64, so that only the rounding of the inputs, of literals and of
    ``reduce_precision`` is left: the reference for errors. Integers keep their dtypes.

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
        operands = [env[v] for v in op.inputs]
        if op.body is not None:
            env.update(zip(op.outputs, _run(op, operands, widen), strict=True))
            continue
        params, dtype = dict(op.params), graph.values[op.outputs[0]].dtype
        if widen:
            dtype = "float64" if is_float(dtype) else dtype
            if is_float(params.get("accumulate", "")):
                params["accumulate"] = "float64"
        env[op.outputs[0]] = MEANINGS[op.kind].numpy(params, *operands, out_dtype=dtype)
    return [env[v] for v in graph.outputs]


def _run(op: Op, operands: Sequence[Array], widen: bool) -> list[Array]:
    """The results of a loop, step by step."""
    body, first, carries, length = body_of(op), op["consts"], op["carries"], op["length"]
    consts, state, xs = operands[:first], list(operands[first : first + carries]), operands[first + carries :]
    types = [body.values[v] for v in body.outputs[carries:]]
    dtypes = ["float64" if widen and is_float(t.dtype) else t.dtype for t in types]
    ys = [np.zeros((length, *t.shape), np_dtype(dtype)) for t, dtype in zip(types, dtypes, strict=True)]
    for step in reversed(range(length)) if op["reverse"] else range(length):
        made = evaluate_numpy(body, [*consts, *state, *(x[step] for x in xs)], widen=widen)
        state = made[:carries]
        for y, slice_ in zip(ys, made[carries:], strict=True):
            y[step] = slice_
    return [*state, *ys]
